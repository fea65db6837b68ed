"""Fixtures for tests of simulated ranks."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import distributed_c10d


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Check that a run leaves no thread, and the process's own world, random state and Future.wait."""
    threads, world, random = threading.active_count(), distributed_c10d._world, torch.get_rng_state()
    wait = torch._C.Future.__dict__["wait"]
    yield
    assert threading.active_count() == threads
    assert distributed_c10d._world is world
    assert torch.equal(torch.get_rng_state(), random)
    assert torch._C.Future.__dict__["wait"] is wait
