"""Test that backward compiles nothing after a 16-bit hook's first bucket, with CUDA stubbed elsewhere."""

import os

import pytest

from tests.programs import found_by, needs_stub_cuda

pytestmark = pytest.mark.smallest  # the launches are Triton's private ones

PROGRAM = """
import json
from benchmarks import stub_cuda

stub_cuda.install()
import torch
import triton
import gradcomp
from gradcomp.hooks import default_hooks

compiled, found = [], []
triton.knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(1)


def note(what):
    found.append((what, len(compiled)))
    compiled.clear()


def hook(state, bucket):
    note("between hooks")
    future = default_hooks.fp16_compress_hook(state, bucket)
    note(f"in hook {bucket.index()}")
    return future


# Buckets of a multiple of 16 elements, of an odd number, and of one element.
model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(numel)) for numel in (1, 5001, 4096))
reducer = gradcomp.Reducer(model.parameters(), bucket_cap_mb=1e-6, first_bucket_cap_mb=1e-6)
note("in the Reducer")
reducer.register_comm_hook(None, hook)
for _ in range(2):
    torch.stack([(parameter * parameter).sum() for parameter in model]).sum().backward()
    note("at the end")
print(json.dumps(found))
"""


@needs_stub_cuda
def test_kernels_are_compiled_once_and_early():
    # PYTHONPATH: the environment's Triton may be another one than the installed Triton.
    found = found_by("-c", PROGRAM, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    hooks = [what for what, _ in found if what.startswith("in hook")]
    assert hooks == ["in hook 0", "in hook 1", "in hook 2"] * 2
    # flatten and unflatten; both casts.
    assert [each for each in found if each[1]] == [["in the Reducer", 2], ["in hook 0", 2]]
