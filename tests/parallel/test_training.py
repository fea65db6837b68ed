"""Compare whole trainings with gradcomp.DistributedDataParallel and with torch's."""

import torch
import torch.distributed as dist

from gradcomp.hooks import default_hooks
from tests.parallel.beside_torch import assert_alike_in_groups, assert_all_alike, batch_of, gradients
from tests.reducer.models import CAP_MB, MODELS, STATIC, UNUSED, VIEW, loss_of, on_device


def train(cls, rank, name, options, hook=None, steps=5):
    """Train from weights that differ between ranks; return every step's gradients, and the state_dict."""
    torch.manual_seed(rank)
    model = on_device(MODELS[name]())
    if name == "Embeddings":  # NCCL has no sparse gradients
        options = options | {"process_group": dist.new_group(backend="gloo")}
    ddp = cls(model, bucket_cap_mb=CAP_MB, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp(batch_of(model, rank, step))).backward()
        results.append(gradients(model))
        optimizer.step()
    return results, ddp.state_dict()


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
