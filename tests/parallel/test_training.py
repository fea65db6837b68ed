"""Compare whole trainings with gradcomp.DistributedDataParallel and with torch's."""

import torch

from gradcomp.hooks import default_hooks
from tests.parallel.beside_torch import assert_alike_in_groups, assert_all_alike, train
from tests.reducer.models import STATIC, UNUSED, VIEW

HOOKS = [default_hooks.fp16_compress_hook, default_hooks.allreduce_hook]
GRID = [
    *((model, {}) for model in ("MLP", "ConvNet", "Transformer", "Embeddings", "MixedDtypes")),
    *((model, UNUSED) for model in ("MLP", "ConvNet", "Branches", "Embeddings")),
    *((model, STATIC) for model in ("MLP", "Repeated", "Transformer")),
    *((model, VIEW) for model in ("ConvNet", "Transformer")),
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
    assert_alike_in_groups(run_group, train, [("MLP", {}, hook) for hook in HOOKS], wire=torch.float16)


def test_training_on_three_ranks(run_ranks):
    cases = [
        (model, {}, hook, 2) for model, hook in (("MLP", None), ("Transformer", None), ("MLP", HOOKS[1]))
    ]
    assert_all_alike(run_ranks, train, 3, cases, exact=False)
