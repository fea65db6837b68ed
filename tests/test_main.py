"""Test `python -m gradcomp` and gradcomp.__version__."""

import importlib
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import triton

import gradcomp
from gradcomp.__main__ import main
from gradcomp.device import amd_architecture
from tests.programs import run_python

WITHOUT_NUMPY = """
import runpy, sys
sys.modules["numpy"] = None
runpy.run_module("gradcomp", run_name="__main__")
"""


def test_a_users_process_is_told_versions_and_what_computes():
    """A new process has neither Triton's interpreter nor numpy."""
    done = run_python("-c", WITHOUT_NUMPY, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for expected in (
        f"gradcomp {gradcomp.__version__}",
        f"torch {torch.__version__}",
        f"Triton {triton.__version__}",
        f"GPU back end {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'none'}",
        "CPU tensors plain torch",
        "CUDA tensors Triton kernels, but no CUDA device is available",
    ):
        assert expected in lines
    assert any(line.startswith("backends gloo") for line in lines)


def test_a_gpu_is_described(monkeypatch, capsys):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    main([])
    output = capsys.readouterr().out
    assert "cuda:0        NVIDIA H200, compute capability 9.0, 139 GiB" in output
    assert "CUDA tensors  Triton kernels\n" in output


def test_amd_gpus_are_described(monkeypatch, capsys):
    names = ["gfx942:sramecc+:xnack-", "gfx1100"]
    properties = [
        SimpleNamespace(name="AMD GPU", gcnArchName=name, major=9, minor=4, total_memory=2**36)
        for name in names
    ]
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties[getattr(device, "index", device)]
    )
    amd_architecture.cache_clear()
    main([])
    amd_architecture.cache_clear()
    output = capsys.readouterr().out
    assert "GPU back end  ROCm 6.4.43482\n" in output
    assert "cuda:0        AMD GPU, gfx942, 64 GiB\n" in output
    assert "cuda:1        AMD GPU, gfx1100 (no kernels for it), 64 GiB\n" in output


def test_the_interpreter_is_named(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr("gradcomp.ops._INTERPRETED", True)
    main([])
    assert "CPU tensors   Triton's interpreter" in capsys.readouterr().out


def test_help_says_what_it_prints(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "versions, devices and backends" in capsys.readouterr().out


def test_the_version_is_the_installed_one(monkeypatch):
    assert gradcomp.__version__ == metadata.version("gradcomp")

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", not_installed)
        importlib.reload(gradcomp)
    assert gradcomp.__version__ == "0+unknown"
    importlib.reload(gradcomp)
