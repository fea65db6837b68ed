"""Compare whole trainings with gradcomp.DistributedDataParallel and with torch's."""

import pytest
import torch

from tests.parallel.beside_torch import assert_alike, assert_alike_in_groups, train
from tests.reducer.models import HOOKS, STATIC, UNUSED, VIEW

GRID = [
    *((model, {}) for model in ("MLP", "ConvNet", "Transformer", "Embeddings", "MixedDtypes")),
    *((model, VIEW) for model in ("MLP", "ConvNet", "Transformer", "Embeddings", "MixedDtypes")),
    *((model, UNUSED) for model in ("MLP", "ConvNet", "Branches", "Embeddings")),
    *((model, STATIC) for model in ("MLP", "Repeated", "Transformer")),
    ("Branches", UNUSED | VIEW),
    ("Repeated", STATIC | VIEW),
    ("Repeated", STATIC | UNUSED),
    ("ConvNet", {"broadcast_buffers": False}),
]


def test_training(run_group):
    for ranks in assert_alike_in_groups(run_group, train, GRID):
        for _, state_dict in ranks:
            # Each forward starts from rank 0's BatchNorm statistics, and updates them with its own input.
            names = [name for name in state_dict if "running" not in name]
            assert all(torch.equal(state_dict[name], ranks[0][1][name]) for name in names)


def test_training_with_hooks(run_group):
    wires = {"allreduce": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for name, wire in wires.items():
        cases = [("MLP", options, HOOKS[name]) for options in ({}, VIEW)]
        assert_alike_in_groups(run_group, train, cases, wire)


@pytest.mark.ranks(3)
def test_training_on_three_ranks(rank):
    cases = [(model, {}, None, 2) for model in ("MLP", "Transformer", "ConvNet", "Embeddings")]
    cases += [("Branches", UNUSED), ("MLP", {}, HOOKS["allreduce"], 2)]
    for case in cases:
        assert_alike(rank, train, *case, wire=torch.float32)
