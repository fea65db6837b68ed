"""Test what is decided for ROCm: options of launches, products, and the GPUs that have kernels."""

from types import SimpleNamespace

import pytest
import torch

from gradcomp import device
from gradcomp.kernels import launch
from gradcomp.kernels.launch import Launch
from gradcomp.kernels.quantize.work import tile_shape
from gradcomp.layout.blocks import MAX_BLOCK_SIZE

GPU = torch.device("cuda", 0)
CACHED = (device.amd_architecture, device.require_kernels_for)


@pytest.fixture
def amd_gpu(monkeypatch):
    """Return a function that makes GPU an AMD GPU with this gcnArchName."""

    def install(name: str) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.4.43482")
        monkeypatch.setattr("gradcomp.device._current_device", lambda: 0)
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    for function in CACHED:
        function.cache_clear()
    yield install
    for function in CACHED:
        function.cache_clear()


class Kernel:
    """A stand-in for a JITFunction that notes the options that it is compiled and launched with."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *arguments, grid, **options):
        self.compiled.append(options)

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append(options)


def test_no_launch_on_rocm_names_maxnreg(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    kernel, options = Kernel(), {"BLOCK": 4, "num_warps": 8, "enable_fp_fusion": False}
    Launch(kernel, 1, **options, maxnreg=64)()
    assert kernel.launched.pop() == {**options, "maxnreg": 64}
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    launched = Launch(kernel, 1, **options, maxnreg=64)
    launched()
    assert kernel.launched == [options]
    # It is compiled ahead of the step, but Triton launches it.
    assert not launched.compile()
    assert kernel.compiled == [options]


def test_products_in_fp32_are_exact_on_rocm(monkeypatch):
    assert device.dot_precision(torch.float32) == "tf32x3"
    assert device.dot_precision(torch.float64) == "ieee"
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert device.dot_precision(torch.float32) == device.dot_precision(torch.float64) == "ieee"


@pytest.mark.parametrize("architecture", device.AMD_ARCHITECTURES)
def test_kernels_are_launched_on_the_architectures_they_are_compiled_for(amd_gpu, architecture):
    amd_gpu(f"{architecture}:sramecc+:xnack-")
    with device.launching_on(GPU):
        pass
    assert device.processor(GPU) == {"GPU architecture": architecture}


@pytest.mark.parametrize("architecture", ["gfx1100", "gfx908"])
def test_no_kernel_is_launched_on_another_architecture(amd_gpu, architecture):
    amd_gpu(architecture)
    message = f"no kernels for cuda:0, an AMD GPU of architecture {architecture}: .* gfx90a, gfx942, gfx950"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            device.launching_on(GPU)


def test_a_program_has_at_most_1024_threads_with_64_in_a_warp():
    sizes = range(2, MAX_BLOCK_SIZE + 1, 2)
    assert max(tile_shape(size, itemsize)[1] for size in sizes for itemsize in (4, 8)) * 64 == 1024


def test_the_number_of_multiprocessors(monkeypatch):
    device.num_multiprocessors.cache_clear()
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert device.num_multiprocessors(GPU) == 108
    assert {device.num_multiprocessors(torch.device(name)) for name in ("cpu", "meta")} == {132}
    device.num_multiprocessors.cache_clear()
