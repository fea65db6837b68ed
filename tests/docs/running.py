"""Run the documented Python, with a process group and without one.

A page's blocks run in order, in one namespace, on each of two ranks (gloo). Before a block that begins with
new models come the names that it takes from its reader's program. After a block every model that averages
gradients is trained.
"""

import functools
import os
import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from tests.docs.code_blocks import Block
from tests.frameworks.recipes import IN_RECIPES

WIDTH = 64
STEPS = 4  # DDP arranges its buckets after the first step; states start to compress after some steps
# Blocks that begin with new models; others go on with the page's.
STARTS = re.compile(r"(register\w*|Parallel|fully_shard|Reducer|LocalSteps)\(")


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


def new_ddp_model() -> DistributedDataParallel:
    return DistributedDataParallel(new_model())


def users_names() -> dict[str, Any]:
    """Return new values of the names that blocks take from their reader's program."""
    model, inputs = new_model(), torch.randn(8, WIDTH)
    return {
        "model": model,
        "module": model,
        "ddp_model": new_ddp_model(),
        "inputs": inputs,
        "loss": model(inputs).square().mean(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batches": [(torch.randn(8, WIDTH), torch.zeros(8, WIDTH)) for _ in range(40)],
        "step": 99,
        "run": SimpleNamespace(log=lambda values, step: None),
        "folder": "checkpoint-folder",
        "rank": dist.get_rank(),
        **dict.fromkeys(("world_size", "old_world_size", "num_nodes", "num_sites"), dist.get_world_size()),
    }


def hooked() -> dict[str, Any]:
    """Return a model and its state, whose errors aren't zero."""
    ddp_model = new_ddp_model()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp_model)
    return {"ddp_model": ddp_model, "state": state, "optimizer": torch.optim.SGD(ddp_model.parameters(), 0.1)}


def of_a_gan() -> dict[str, Any]:
    names = hooked()
    fake = torch.randn(8, WIDTH)
    return {**names, "ddp_discriminator": names["ddp_model"], "fake": fake, "loss_of_generator": torch.mean}


def with_tokens(*counts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, WIDTH), torch.randint(WIDTH, (n,))) for n in counts]


# More names for single blocks.
BEFORE = {
    ("docs/what_compression_cant_know.md", 0): of_a_gan,
    ("docs/weighted_averages.md", 0): lambda: (
        hooked() | {"micro_batches": with_tokens(5 + dist.get_rank(), 3)}
    ),
    ("docs/weighted_averages.md", 1): lambda: (
        hooked() | {"batches": [(*batch, 2 * len(batch[1])) for batch in with_tokens(4, 40, 7)]}
    ),
}


def check_errors_are_kept(names: dict[str, Any]) -> None:
    kept = names["state"].state
    assert kept.keys() <= dict(names["ddp_model"].module.named_parameters()).keys()
    assert any(each["error"].any() for each in kept.values())


def check_local_steps(names: dict[str, Any]) -> None:
    check_equal(names["model"])
    assert names["state"].iter == 3


AFTER = {
    ("docs/frameworks/zero_redundancy.md", 0): lambda names: train(
        names["model"], optimizer=names["optimizer"]
    ),
    ("docs/frameworks/local_steps.md", 0): check_local_steps,
    ("docs/checkpoints.md", 10): check_errors_are_kept,
}

# Replacements in a page's code, for two ranks on a machine without GPUs.
INSTEAD = {
    ("docs/fsdp.md", 1): {'"cuda"': '"cpu"', "(num_nodes, 8)": "(num_nodes, 1)"},
    ("docs/frameworks/local_steps.md", 1): {'"cuda"': '"cpu"', "(num_sites, 8)": "(num_sites, 1)"},
    # The recipe's example runs on Inductor, which takes a minute: see tests/frameworks/test_recipes.py.
    ("docs/frameworks/torch_compile.md", 0): {"Parallel(model))": 'Parallel(model), backend="aot_eager")'},
}

# Blocks that simulate ranks themselves, or need none: they run in a process without a group.
WITHOUT_GROUP = {("README.md", 1), *(("docs/testing.md", number) for number in range(4)), ("docs/plan.md", 0)}

# Python that other tests run.
RUN_ELSEWHERE = {
    ("docs/new_compressor.md", 2): "tests/compress/test_new_compressor.py",
    # One script, block after block.
    **{("docs/quick_start.md", number): "tests/docs/test_quick_start.py" for number in range(4)},
    # tests/frameworks/test_pages.py finds every line of these pages in what runs.
    **{
        (f"docs/frameworks/{page}.md", number): "tests/frameworks/recipes.py"
        for page in IN_RECIPES
        for number in range(2 if page in ("accelerate", "fabric") else 1)
    },
}


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
            page, names = block.page, {"__name__": "documented", **users_names()}
        elif STARTS.search(block.source):
            names |= users_names()
        names |= BEFORE.get(block.key, dict)()
        execute(block, names)
        AFTER.get(block.key, lambda names: None)(names)
        for model in averaged(names):
            train(model, names.get("local_steps"))
        dist.barrier()
    names.clear()


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
            execute(block, names)
    finally:
        gradcomp.testing.check_hook = original


def execute(block: Block, names: dict[str, Any]) -> None:
    source = block.source
    for documented, instead in INSTEAD.get(block.key, {}).items():
        assert documented in source, f"{block.page}:{block.line} has no {documented}"
        source = source.replace(documented, instead)
    # Tracebacks name the page and the line in it. Annotations are types, as in a module without
    # `from __future__ import annotations`.
    exec(compile("\n" * (block.line - 1) + source, block.page, "exec", dont_inherit=True), names)
