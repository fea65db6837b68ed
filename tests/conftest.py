"""Choose the device of the tests before any module imports Triton: without a GPU, kernels are interpreted."""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.depth import PROFILE
from tests.devices import let_torchs_power_sgd_have_cpu_buckets, patch_triton_once_per_launch


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "the device that tests compute on; by default the GPU if there is one"
    parser.addoption("--device", choices=("cuda", "cpu"), help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from this process and its children if the device is the CPU."""
    device = config.getoption("device")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA counts the GPUs
    if torch.cuda.is_available():
        os.environ.pop("TRITON_INTERPRET", None)
    elif device == "cuda":
        raise pytest.UsageError(f"--device cuda: torch {torch.__version__} finds no GPU")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        patch_triton_once_per_launch()
    # Ranks that wait for a processor would measure a delay. Tests of links with one set it themselves.
    os.environ["GRADCOMP_ROUND_TRIP_MS"] = "0"
    let_torchs_power_sgd_have_cpu_buckets()
    hypothesis.settings.register_profile("everyday", deadline=None)
    hypothesis.settings.register_profile("deep", deadline=None, max_examples=1000)
    hypothesis.settings.load_profile(PROFILE)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the kernels: the GPU, or the CPU, where they are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """Return tests.ranks.run_ranks: a test with this fixture needs processes, and is marked so."""
    from tests import ranks  # imports Triton

    return ranks.run_ranks


@pytest.fixture
def rank() -> None:
    """Stand for the rank that a test marked `ranks` or `simulated_ranks` is called with."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `ranks(world_size)` or `simulated_ranks(world_size)` on every rank of a group."""
    from tests.ranks import run_ranks, simulate  # imports Triton

    for name, run in (("ranks", run_ranks), ("simulated_ranks", simulate)):
        if marker := pyfuncitem.get_closest_marker(name):
            _, *others = inspect.signature(pyfuncitem.function).parameters
            given = [pyfuncitem.funcargs[each] for each in others]
            run(pyfuncitem.function, *marker.args, *given, **marker.kwargs)
            return True
    return None


@pytest.fixture(params=["gloo", "nccl"])
def run_group(
    request: pytest.FixtureRequest, run_ranks: Callable[..., list[Any]]
) -> Callable[..., list[Any]]:
    """Return run_ranks for two ranks on gloo, or on NCCL for one rank per GPU (one on gloo without a GPU)."""
    world_size = 2 if request.param == "gloo" else max(1, torch.cuda.device_count())
    return lambda function, *arguments: run_ranks(function, world_size, *arguments, backend=request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need processes, and those that compute on the GPU if there is one."""
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ranks"):
            item.add_marker("processes")
        if touches_device(item):
            item.add_marker("device")


def touches_device(item: pytest.Item) -> bool:
    """Return whether a test takes `device` or `run_group`, or is in a file that imports device_of_rank."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    fixtures = set(getattr(item, "fixturenames", ()))
    takes_fixture = "run_group" in fixtures or "device" in fixtures - parameters.keys()
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
