"""Write a test that shows a failure without gradcomp.testing, in real processes on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gradcomp.testing.run import Place
from gradcomp.testing.workload import RecordedWorkload, Workload

TEST = """\
import torch, torch.distributed as dist
{imports}

def check(rank, total=0.0):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29513", rank=rank, world_size={world_size})
    state = {state}
{average}
        total += gradients[{index}].flatten()[{element}].item(){chosen}
    assert rank != {rank} or abs(total - {expected!r}) < {allowed:.2g}, total

def test_{hook}(): torch.multiprocessing.spawn(check, nprocs={world_size})"""
AVERAGE = """\
    for step in range({num_steps}):
        gradients = [{draw} for p in map(torch.zeros, {shapes})]
        gradcomp.average_(gradients, {hook}, state)"""
# Two backward passes, of half the gradients each, need a model.
ACCUMULATED = """\
    model = torch.nn.Sequential(torch.nn.ParameterList(torch.zeros(s, dtype={dtype}) for s in {shapes}))
    model.forward = lambda: list(model[0])
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(state, {hook})
    for step in range({num_steps}):
        halves = [{draw} / 2 for p in model[0]]
        ddp.zero_grad()
        with ddp.no_sync(): torch.autograd.backward(ddp(), halves)
        torch.autograd.backward(ddp(), halves)
        gradients = [p.grad for p in model[0]]"""
# A parameter's gradient in a step on a rank, without ties and with them.
DRAWS = tuple(
    f"((torch.arange(p.numel()).double() + 7 * rank) ** 2 + step).cos(){rounded}.view_as(p)"
    for rounded in ("", ".pow(3).round()")
)


def drawn_anew(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the workload with gradients that a test can draw, behind the test's expression for them.

    Only a workload of one bucket: DDP forms others by its own rules.
    """
    if len(workload.buckets) > 1:
        return
    like = [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in workload.shapes]
    kept = {name: getattr(workload, name) for name in ("zero_steps", "accumulated", "device")}
    for draw in (f"{each}.to({workload.dtype})" for each in DRAWS):
        drawn = [
            [
                [eval(draw, {"torch": torch, "p": p, "rank": rank, "step": step}) for p in like]
                for rank in range(workload.world_size)
            ]
            for step in range(max(2, workload.steps))
        ]
        yield draw, replace(RecordedWorkload.of(drawn, workload.buckets), noise=1.0, **kept)


def is_importable(*objects: Any) -> bool:
    """Return whether all objects have names that a module can import. None counts as one that has."""
    return all("<" not in getattr(each, "__qualname__", "<") for each in objects if each is not None)


def copyable_test(hook: Any, make_state: Any, workload: Workload, draw: str, place: Place) -> str:
    """Return the text of a test that fails: the sum of averages at a place differs from the expected one.

    Half of the difference is allowed. The hook and the maker of its state are imported by name.
    """
    num_steps, shapes = place.steps.stop, list(workload.shapes)
    if place.period:
        draw = draw.replace("step", f"step % {place.period}")
    elif workload.zero_steps:
        draw += f" * (step < {workload.steps})"
    of_state = [] if make_state is None else [make_state]
    imports = [f"from {each.__module__} import {each.__qualname__}" for each in (hook, *of_state)]
    if not workload.accumulated:
        imports.insert(0, "import gradcomp")
    average = (ACCUMULATED if workload.accumulated else AVERAGE).format(
        dtype=workload.dtype, shapes=shapes, hook=hook.__qualname__, num_steps=num_steps, draw=draw
    )
    return TEST.format(
        imports="\n".join(imports),
        world_size=workload.world_size,
        state="".join(f"{each.__qualname__}(dist.group.WORLD)" for each in of_state) or "dist.group.WORLD",
        hook=hook.__qualname__,
        average=average,
        index=place.index,
        element=place.element,
        chosen="" if place.steps == range(num_steps) else f" * (step in {place.steps})",
        rank=place.rank,
        expected=place.expected,
        allowed=abs(place.got - place.expected) / 2,
    )
