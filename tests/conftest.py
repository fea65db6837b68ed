"""Choose Triton's interpreter for the kernels if there is no GPU, before any module imports Triton."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.devices import let_torchs_power_sgd_have_cpu_buckets

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
let_torchs_power_sgd_have_cpu_buckets()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the kernels: the GPU if there is one, else the CPU, where they are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """Return tests.ranks.run_ranks: a test with this fixture needs processes, and is marked so."""
    from tests import ranks  # imports Triton

    return ranks.run_ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need processes, and those that compute on the GPU if there is one."""
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
        if touches_device(item):
            item.add_marker("device")


def touches_device(item: pytest.Item) -> bool:
    """Return whether a test takes the fixture `device`, or is in a file that imports device_of_rank."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    takes_fixture = "device" in getattr(item, "fixturenames", ()) and "device" not in parameters
    return takes_fixture or hasattr(getattr(item, "module", None), "device_of_rank")


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in plain torch, as in a user's process. Otherwise simulated ranks run interpreted kernels."""
    from gradcomp import ops  # imports Triton

    monkeypatch.setattr(ops, "_INTERPRETED", False)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Join a process group of size 1 for one test."""
    from benchmarks.hooks import join_group_of_one  # imports Triton

    join_group_of_one(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()
