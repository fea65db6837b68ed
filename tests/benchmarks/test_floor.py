"""Test the floor in a GPU's rows: bytes over bandwidth, plus launches."""

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import environment
from benchmarks.clock import Timing
from benchmarks.environment import floor_us
from benchmarks.harness import Case, Setup
from benchmarks.records import read

CUDA = torch.device("cuda")


@pytest.fixture
def on(monkeypatch):
    """Makes the driver report a GPU's name."""
    return lambda name: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_the_floor_is_bytes_over_bandwidth_and_launches(on):
    on("NVIDIA H200")
    assert floor_us(CUDA, 48_000_000, 7) == pytest.approx(10 + 14)  # 4.8 TB/s, 2 µs a launch
    on("NVIDIA A100-SXM4-80GB")
    assert floor_us(CUDA, 2_039_000, 1) == pytest.approx(1 + 2)


def test_a_gpu_of_unknown_bandwidth_and_a_cpu_have_no_floor(on):
    for name in ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090 D"):
        on(name)
        assert floor_us(CUDA, 2**20, 1) is None
    assert floor_us(torch.device("cpu"), 2**20, 1) is None


class Clock:
    """A GPU's clock, on which every call takes 30 µs."""

    device, copy_gb_per_s = CUDA, 4000.0

    def copy(self, num_bytes):
        return lambda: None

    def time(self, providers, seconds):
        return {name: Timing([30.0] * 5, host_us=5.0) for name in providers}


def test_every_row_of_a_gpu_has_the_floor_and_how_many_floors_its_time_is(on, tmp_path, monkeypatch, capsys):
    on("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(bench, "Clock", lambda *_: Clock())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(environment, "driver_version", lambda: None)
    right = [torch.arange(4.0)]
    setup = Setup({"gradcomp": lambda: right, "torch": lambda: right}, lambda: [right[0].double()])
    case = Case("count", "to 4", "float32", 33_500_000, 0.0, lambda: setup, "torch", min_launches=2)
    assert bench.main(["--device", "cuda", "--record", "--results", str(tmp_path)], [case]) == 0
    ours = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("gradcomp "))
    assert ours.split()[-4:] == ["2.14", "0.0e+00", "1.00", "(1.00-1.00)"]
    [path] = tmp_path.iterdir()
    rows = read(path)
    assert [row["provider"] for row in rows] == ["gradcomp", "torch", "copy"]
    for row in rows:
        assert (row["min_launches"], row["floor_us"]) == (2, pytest.approx(10 + 4))
        assert row["times_floor"] == pytest.approx(30 / 14)
