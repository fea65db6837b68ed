"""Run the documented Python, with a process group and without one."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from tests.docs.code_blocks import Block
from tests.docs.preambles import AFTER, BEFORE, FRESH, INSTEAD

WIDTH = 64
STEPS = 4  # DDP arranges its buckets after the first step; states start to compress after some steps


class Model(nn.Module):
    """The `model` or `module` of a page: two blocks and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.last(x)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module, local_steps: Any = None, optimizer: Any = None) -> None:
    """Train on different data on every rank; raise if the ranks' weights then differ."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    if local_steps is not None:
        local_steps.join()
    check_equal(model)


def check_equal(model: nn.Module) -> None:
    weights = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, sum_of(model))
    assert all(torch.equal(weights[0], other) for other in weights), f"the ranks' weights differ: {weights}"


def sum_of(model: nn.Module) -> torch.Tensor:
    """Return the sum of the weights; for a sharded model, of this replica's."""
    with torch.no_grad():
        tensors = [getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()]
        return torch.stack([each.double().sum() for each in tensors]).sum().float()


def run_in_rank(rank: int, blocks: Sequence[Block], folder: str) -> None:
    """Run the blocks of several pages on this rank, a namespace for each page."""
    os.chdir(folder)
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    page = ""
    for block in blocks:
        if block.page != page:
            page, names = block.page, namespace(rank)
        execute(BEFORE.get(block.key, FRESH), f"before {block.page}:{block.line}", names)
        execute_block(block, names)
        execute(AFTER.get(block.key, ""), f"after {block.page}:{block.line}", names)
        for model in averaged(names):
            train(model, names.get("local_steps"))
        dist.barrier()
    names.clear()


def namespace(rank: int) -> dict[str, Any]:
    """Return the names that every page may use; BEFORE adds names for single blocks."""
    given = (DistributedDataParallel, check_equal, new_model, train)
    names = {each.__name__: each for each in given} | {"powerSGD": powerSGD_hook, "rank": rank}
    names |= {"default_hooks": default_hooks, "dist": dist, "gradcomp": gradcomp, "nn": nn, "torch": torch}
    return {"__name__": "documented", "world_size": dist.get_world_size(), **names}


def averaged(names: dict[str, Any]) -> Iterable[nn.Module]:
    """Yield the page's models that average their gradients."""
    for model in {id(names.get(name)): names.get(name) for name in ("model", "ddp_model")}.values():
        hooks = getattr(model, "_comm_hooks", None) or []
        is_measured_only = any(hook is debugging_hooks.noop_hook for hook, _ in hooks)
        is_ours = isinstance(model, gradcomp.DistributedDataParallel)
        if not is_measured_only and (hooks or is_ours or hasattr(model, "set_requires_all_reduce")):
            yield model


def run_without_group(blocks: Sequence[Block]) -> None:
    """Run the blocks of one page in this process; check_hook checks two properties on two examples."""
    import gradcomp.testing

    few = functools.partial(gradcomp.testing.check_hook, max_examples=2, only=["completes", "averages"])
    names: dict[str, Any] = {"__name__": "documented", "my_hook": default_hooks.allreduce_hook}
    names["make_state"] = None
    original, gradcomp.testing.check_hook = gradcomp.testing.check_hook, few
    try:
        for block in blocks:
            execute_block(block, names)
            execute(AFTER.get(block.key, ""), f"after {block.page}:{block.line}", names)
    finally:
        gradcomp.testing.check_hook = original


def execute_block(block: Block, names: dict[str, Any]) -> None:
    source = block.source
    for documented, instead in INSTEAD.get(block.key, {}).items():
        assert documented in source, f"{block.page}:{block.line} has no {documented}"
        source = source.replace(documented, instead)
    # Tracebacks name the page and the line in it.
    execute("\n" * (block.line - 1) + source, block.page, names)


def execute(source: str, name: str, names: dict[str, Any]) -> None:
    # A page's annotations are types, as in a module without `from __future__ import annotations`.
    exec(compile(source, name, "exec", dont_inherit=True), names)
