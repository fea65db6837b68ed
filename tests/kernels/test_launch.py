"""Launch compiled kernels: with the arguments of Triton's own launch, and, if needed, by Triton's own launch.

Triton's launchers run on the libcuda of benchmarks.stub_cuda, in another process: this one interprets
kernels.
"""

import os

import pytest
import torch

from gradcomp.kernels import launch as launch_module
from gradcomp.kernels.launch import Launch, Slot, Stage
from tests.programs import found_by, needs_stub_cuda

CPU = torch.device("cpu")

pytestmark = pytest.mark.smallest  # the launches are Triton's private ones

PROGRAM = """
import json
import logging
from benchmarks import stub_cuda

stub_cuda.install()
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from gradcomp.kernels.powersgd import plan as powersgd_plan
from gradcomp.layout import PowerSGDLayout

launched, compiled, hooked, ordinary, logged = [], [], [], [], []
DEVICE, OPTIONS = torch.device("cpu"), {"error_feedback": True, "warm_start": True, "epsilon": 0.0}
LAYOUT = PowerSGDLayout([(256, 512), (512,), (512, 256)], 4, 1)


def record(launcher, x, y, z, stream, function, metadata, data, enter, leave, *arguments):
    values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
    launched.append([x, y, z, stream, str(metadata), *map(str, values)])


class Logged(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())


CudaLauncher.__call__ = record
logging.getLogger("gradcomp").addHandler(Logged())
triton.knobs.runtime.jit_post_compile_hook = lambda **_: compiled.append(1)
meta = torch.device("meta")
powersgd_plan.PowerSGDPlan(LAYOUT, torch.float32, meta, **OPTIONS, seed=0).compile(DEVICE)
found = {"compiled by warm-up": len(compiled)}
run = triton.runtime.JITFunction.run


def counted(*arguments, **named):
    ordinary.append(1)
    return run(*arguments, **named)


def step(buffer):
    launched.clear()
    ordinary.clear()
    plan.project(buffer, 0.25)
    plan.back_project(buffer, 0.125)
    plan.reconstruct(buffer, 2**40 + 1)
    return list(launched), len(ordinary)


plan = powersgd_plan.PowerSGDPlan(LAYOUT, torch.float32, DEVICE, **OPTIONS, seed=0)
plan.take_scratch()
found["compiled by the plan"] = len(compiled) - found["compiled by warm-up"]
triton.runtime.JITFunction.run = counted
memory = torch.zeros(LAYOUT.numel + 4)
for start in (0, 4):
    found[f"direct {start}"] = step(memory[start:][: LAYOUT.numel])
found["logged before"] = len(logged)
for _ in range(2):
    found["unaligned"] = step(memory[1:][: LAYOUT.numel])[1]
hook = lambda metadata: hooked.append(1)
runtime = triton.knobs.runtime
runtime.launch_enter_hook.add(hook) if runtime.launch_enter_hook is not None else None
for start in (0, 4):
    found[f"observed {start}"] = step(memory[start:][: LAYOUT.numel])
runtime.launch_enter_hook.remove(hook)
found["after"] = step(memory[: LAYOUT.numel])[1]
found["logged"] = logged
print(json.dumps(found))
"""


@needs_stub_cuda
def test_compiled_launches_are_tritons_own():
    # PYTHONPATH: the environment's Triton may be another one than the installed Triton.
    found = found_by("-c", PROGRAM, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    for start in (0, 4):
        (direct, num_ordinary), (observed, _) = found[f"direct {start}"], found[f"observed {start}"]
        assert len(direct) == 5
        assert num_ordinary == 0
        assert direct == observed
    assert found["direct 0"] != found["direct 4"]
    # A profiler, or an address that kernels weren't compiled for, needs Triton's own launch. Two launches get
    # the bucket's address.
    assert (found["observed 0"][1], found["unaligned"]) == (5, 2)
    assert found["after"] == 0
    # Each reason is logged once.
    assert found["logged before"] == 0
    unaligned, observed = found["logged"]
    assert "a buffer in torch.float32 begins 4 bytes after a multiple of 16" in unaligned
    assert "a profiler" in observed
    assert found["compiled by warm-up"] > 0
    assert found["compiled by the plan"] == 0


class Kernel:
    """A stand-in for a JITFunction that notes what it is launched with, and compiled with."""

    def __init__(self):
        self.launched, self.compiled = [], []

    def warmup(self, *arguments, grid, **options):
        self.compiled.append(options)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


def test_a_stage_fills_the_slots_of_its_launches():
    kernel, own = Kernel(), torch.zeros(3)
    buffer, scale = Slot("buffer", torch.float32), Slot("scale", 1000.0)
    stage = Stage(
        [Launch(kernel, 2, own, buffer, scale, 1000.0, BLOCK=4), Launch(kernel, 5, buffer, own, BLOCK=8)], CPU
    )
    stage.compile(CPU)
    assert not kernel.launched
    for number in (1000.0, 0.5):
        given = torch.ones(4)
        stage(buffer=given, scale=number)
        (first, second), kernel.launched = kernel.launched, []
        assert (first[0], first[2]) == ((2,), {"BLOCK": 4})
        assert first[1][0] is own
        assert first[1][1] is given
        assert first[1][2:] == (number, 1000.0)
        assert second[1][0] is given
        assert second[1][1] is own


def test_a_launch_of_no_programs_launches_nothing():
    kernel = Kernel()
    empty, full = Launch(kernel, 0, 1, BLOCK=2), Launch(kernel, 3, 1, BLOCK=2)
    empty()
    Stage([empty], CPU)()
    assert not kernel.launched
    full()
    assert kernel.launched == [((3,), (1,), {"BLOCK": 2})]


def test_no_launch_on_rocm_names_maxnreg(monkeypatch):
    monkeypatch.setattr(launch_module, "JITFunction", Kernel)
    kernel, options = Kernel(), {"BLOCK": 4, "num_warps": 8, "enable_fp_fusion": False}
    Launch(kernel, 1, **options, maxnreg=64)()
    assert kernel.launched.pop() == ((1,), (), {**options, "maxnreg": 64})
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    launch = Launch(kernel, 1, **options, maxnreg=64)
    launch()
    assert kernel.launched == [((1,), (), options)]
    # It is compiled ahead of the step, but Triton launches it.
    assert not launch.compile()
    assert kernel.compiled == [options]


def test_a_launch_is_not_changed_by_another_threads():
    """Casts and copies share a launch: another call comes while the arguments are put together."""
    launched = []
    launch = Launch(Kernel(), None, Slot("src", 0), Slot("scale", 0.0))
    launch._bound, launch._of_kernel = [None, None], ()
    launch._run = lambda *arguments: launched.append((arguments[0], *arguments[4:]))

    class Interrupted(dict):
        def __getitem__(self, name):
            if name == "scale":
                launch.run_compiled({"num_programs": 2, "src": 20, "scale": 0.2}, stream=0)
            return super().__getitem__(name)

    launch.run_compiled(Interrupted(num_programs=1, src=10, scale=0.1), stream=0)
    launch.run_compiled({"num_programs": 0, "src": 30, "scale": 0.3}, stream=0)
    assert launched == [(2, 20, 0.2), (1, 10, 0.1)]
