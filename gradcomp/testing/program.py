"""Write a test that shows a failure without gradcomp.testing: a few lines on torch's DDP and gloo."""

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

def check(rank):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29513", rank=rank, world_size={world_size})
    model, total = torch.nn.Module(), 0.0
    model.p = torch.nn.ParameterList(torch.zeros(s, dtype={dtype}) for s in {shapes})
    model.forward = lambda gradients: sum((p * g).sum() for p, g in zip(model.p, gradients))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb={cap_mb})
    ddp.register_comm_hook({state}, {hook})
    for step in range({num_steps}):
        seeds = [torch.Generator().manual_seed(1000 * (step % {period}) + rank) for _ in model.p]
        gradients = [{draw} * (step < {steps}) for p, g in zip(model.p, seeds)]
        ddp.zero_grad()
{backward}
        total += model.p[{index}].grad.flatten()[{element}].item() * (step in {chosen})
    assert rank != {rank} or abs(total - {expected!r}) < {allowed:.2g}, total

def test_{hook}():
    torch.multiprocessing.spawn(check, nprocs={world_size})"""
BACKWARD = "        ddp(gradients).backward()"
ACCUMULATED = """\
        with ddp.no_sync():
            ddp([g / 2 for g in gradients]).backward()
        ddp([g / 2 for g in gradients]).backward()"""
# Gradients with and without ties, as the test draws them.
DRAWS = (
    "torch.randn(p.shape, generator=g, dtype=torch.float64).to(p)",
    "torch.randint(-1, 2, p.shape, generator=g).to(p)",
)


def drawn_anew(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the workload with gradients that a test can draw, behind the test's expression for them."""
    for draw in DRAWS:
        ranks = range(workload.world_size)
        steps = range(max(2, workload.steps))
        like = [torch.zeros(shape, dtype=workload.dtype, device="cpu") for shape in workload.shapes]
        drawn = [
            [[_drawn(draw, each, 1000 * step + rank) for each in like] for rank in ranks] for step in steps
        ]
        kept = {
            name: getattr(workload, name) for name in ("zero_steps", "rearranged", "accumulated", "device")
        }
        yield draw, replace(RecordedWorkload.of(drawn, workload.buckets), noise=1.0, **kept)


def _drawn(draw: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the gradient that the test draws for a parameter, by the test's own expression."""
    names = {"torch": torch, "p": like, "g": torch.Generator().manual_seed(seed)}
    gradient: torch.Tensor = eval(draw, names)
    return gradient


def is_importable(*objects: Any) -> bool:
    """Return whether all objects have names that a module can import. None counts as one that has."""
    return all("<" not in getattr(each, "__qualname__", "<") for each in objects if each is not None)


def copyable_test(hook: Any, make_state: Any, workload: Workload, draw: str, place: Place) -> str:
    """Return the text of a test that fails: the sum of averages at a place differs from the expected one.

    Half of the difference is allowed. The hook and the maker of its state are imported by name.
    """
    of_state = [] if make_state is None else [make_state]
    return TEST.format(
        imports="\n".join(f"from {each.__module__} import {each.__qualname__}" for each in (hook, *of_state)),
        world_size=workload.world_size,
        dtype=workload.dtype,
        shapes=workload.shapes,
        cap_mb=25 if len(workload.buckets) == 1 else 1e-6,
        state="".join(f"{each.__qualname__}(dist.group.WORLD)" for each in of_state) or "dist.group.WORLD",
        hook=hook.__qualname__,
        num_steps=place.steps.stop,
        steps=workload.steps if workload.zero_steps else place.steps.stop,
        period=place.period or workload.steps,
        draw=draw,
        backward=ACCUMULATED if workload.accumulated else BACKWARD,
        index=place.index,
        element=place.element,
        chosen=place.steps,
        rank=place.rank,
        expected=place.expected,
        allowed=abs(place.got - place.expected) / 2,
    )
