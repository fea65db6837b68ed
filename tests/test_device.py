"""Test what is decided for ROCm: products, and the GPUs that have kernels."""

from types import SimpleNamespace

import pytest
import torch

from gradcomp import device

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


def test_the_number_of_multiprocessors(monkeypatch):
    device.num_multiprocessors.cache_clear()
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert device.num_multiprocessors(GPU) == 108
    assert {device.num_multiprocessors(torch.device(name)) for name in ("cpu", "meta")} == {132}
    device.num_multiprocessors.cache_clear()
