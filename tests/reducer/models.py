"""Define models, and Reducers for them."""

import torch
from torch import nn

from gradcomp.hooks import default_hooks
from gradcomp.reducer import Reducer
from tests.devices import device_of_rank

CAP_MB = 0.01
PLAIN = {}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def batch(self, generator):
        return torch.randn(6, 20, generator=generator)


class ConvNet(nn.Module):
    """This model has BatchNorm and channels-last weights."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(16 * 16, 5)

    def forward(self, x):
        return self.head(self.body(x.to(memory_format=torch.channels_last)).flatten(1))

    def batch(self, generator):
        return torch.randn(4, 3, 8, 8, generator=generator)


class Transformer(nn.Module):
    """This model's embeddings are tied to its output."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(37, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 37, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.layer(self.embedding(tokens)))

    def batch(self, generator):
        return torch.randint(0, 37, (3, 7), generator=generator)


class Embeddings(nn.Module):
    """This model has a sparse and a dense embedding. Batches have 0 to 20 tokens, so as many sparse rows."""

    def __init__(self):
        super().__init__()
        self.sparse = nn.Embedding(50, 8, sparse=True)
        self.dense = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head(self.sparse(tokens).sum(1) + self.dense(tokens).sum(1))

    def batch(self, generator):
        length = int(torch.randint(0, 5, (), generator=generator))
        return torch.randint(0, 30, (5, length), generator=generator)


class Branches(nn.Module):
    """This model uses some layers on some ranks, in some steps, or never; its outputs are in a dict."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.never = nn.Linear(40, 40)
        self.head = nn.Linear(40, 2)

    def forward(self, x):
        hidden = self.trunk(x)
        which = int(x[0, 0].abs() * 10) % 4
        if which < 3:
            hidden = self.branches[which](hidden)
        return {"result": [self.head(hidden)], "unrelated": "text"}

    def batch(self, generator):
        return torch.randn(5, 12, generator=generator)


class Repeated(nn.Module):
    """This model uses one layer twice, recomputes one in backward, and never uses one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 24)
        self.shared = nn.Linear(24, 24)
        self.never = nn.Linear(24, 24)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        hidden = self.shared(torch.tanh(self.shared(self.first(x))))
        return torch.utils.checkpoint.checkpoint(self.head, torch.tanh(hidden), use_reentrant=False)

    def batch(self, generator):
        return torch.randn(5, 10, generator=generator)


class MixedDtypes(nn.Module):
    """This model has float32, bfloat16 and complex parameters; the complex one is stored transposed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(5))
        for layer in self.layers[1::2]:
            layer.bfloat16()
        self.turn = nn.Parameter(torch.randn(16, 20, dtype=torch.complex64).t())

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return torch.view_as_real(x.to(torch.complex64) @ self.turn)

    def batch(self, generator):
        return torch.randn(6, 20, generator=generator)


class Heads(nn.Module):
    """This model has a trunk and two heads, with losses that aren't linear in the parameters."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.a(hidden).square().sum(), self.b(hidden).square().sum()


MODELS = {
    each.__name__: each for each in (MLP, ConvNet, Transformer, Embeddings, Branches, Repeated, MixedDtypes)
}
HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def on_device(placed):
    """Return the module or tensor on the rank's device."""
    return placed.to(device_of_rank())


def run_cases(rank, function, cases):
    """Return the function's results for several cases, in one set of processes."""
    return [function(rank, *case) for case in cases]


def loss_of(outputs):
    if isinstance(outputs, dict):
        (outputs,) = outputs["result"]
    return nn.functional.mse_loss(outputs.float(), torch.ones_like(outputs, dtype=torch.float32))


def make_reducer(model, hook=None, **options):
    sparse = [each.weight for each in model.modules() if getattr(each, "sparse", None) is True]
    caps = {"bucket_cap_mb": CAP_MB, "first_bucket_cap_mb": CAP_MB}
    reducer = Reducer(model.named_parameters(), **caps | {"sparse_params": sparse} | options)
    if hook is not None:
        reducer.register_comm_hook(None, HOOKS[hook])
    return reducer
