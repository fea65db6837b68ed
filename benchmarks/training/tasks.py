"""The tasks: a GPT on text, on text that is read once, and on made-up sentences."""

import argparse
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.training.corpus import HELD_OUT_BYTES, Windows, read_corpus, read_once, sentences, spread

VOCABULARY = 256  # a token is a byte


class Block(nn.Module):
    """A transformer block: attention, then a perceptron of two layers, each normalized before."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor [batch, sequence, width] to one of equal shape."""
        qkv = self.attention(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """A GPT that maps bytes to logits for each next byte."""

    def __init__(self, width: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


Batch = tuple[Tensor, Tensor]  # inputs, and the classes to predict
MakeOptimizers = Callable[[nn.Module, float], list[Optimizer]]

MIN_STEPS = 10  # fewer leave no step to time after the plain ones
VALIDATION_WINDOWS, TEXT_VALIDATION_WINDOWS = 128, 1024  # of held-out text, divided among the ranks
TEXT_WARMUP = 0.05  # of the steps

# Chosen without compression: the hooks use the baseline's learning rates.
TEXT_LEARNING_RATE, TEXT_BETAS = 5e-3, (0.9, 0.99)


@dataclass
class Task:
    """One rank's model, optimizers and data. Ranks have the same weights, and other data.

    They all follow from the options, the seed, the rank and the number of ranks, so that every hook trains
    the same weights on the same data in the same order.

    optimizers: makes them for the model, whose parameters FSDP2 may have replaced, and a learning rate.
    """

    net: nn.Module
    optimizers: MakeOptimizers
    learning_rate: float
    draw: Callable[[], Batch]
    validation: Batch
    steps: int
    warmup_steps: int = 10


def adamw(net: nn.Module, learning_rate: float, betas: tuple[float, float] = TEXT_BETAS) -> list[Optimizer]:
    return [torch.optim.AdamW(net.parameters(), lr=learning_rate, betas=betas)]


def sgd(net: nn.Module, learning_rate: float) -> list[Optimizer]:
    return [torch.optim.SGD(net.parameters(), learning_rate, momentum=0.9)]


def muon(net: nn.Module, learning_rate: float) -> list[Optimizer]:
    """Make Muon for the blocks' matrices, with updates as large as AdamW's, and AdamW for the rest."""
    matrices = [each for each in net.get_submodule("blocks").parameters() if each.dim() == 2]
    rest = [each for each in net.parameters() if all(each is not other for other in matrices)]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=TEXT_BETAS),
    ]


OPTIMIZERS: dict[str, MakeOptimizers] = {"adamw": adamw, "sgd": sgd, "muon": muon}


def gpt(options: argparse.Namespace, seed: int, rank: int, ranks: int) -> Task:
    """Make the GPT with AdamW. The validation windows are spread over the held-out files."""
    text, held_out = read_corpus(sysconfig.get_paths()["stdlib"])
    data = Windows(text, options.sequence, seed, rank, ranks)
    torch.manual_seed(seed)
    net = GPT(options.width, options.layers, options.heads, options.sequence)
    return Task(
        net,
        partial(adamw, betas=(0.9, 0.999)),
        options.learning_rate,
        draw=lambda: next_bytes(data.draw(options.batch)),
        validation=next_bytes(spread(held_out, options.sequence, VALIDATION_WINDOWS)[rank::ranks]),
        steps=options.steps,
    )


Reads = Callable[[int, int], tuple[Tensor, Tensor]]


def packages(num_windows: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Read the sources of Python and of its packages."""
    return read_once([sysconfig.get_paths()[name] for name in ("stdlib", "purelib")], sequence, num_windows)


def made_up(num_windows: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Write sentences."""
    num_bytes = num_windows * (sequence + 1)
    found, _ = sentences(num_bytes + HELD_OUT_BYTES, seed=0)
    return found[:num_bytes].view(num_windows, -1), found[num_bytes:]


def reading_once(read: Reads, options: argparse.Namespace, seed: int, rank: int, ranks: int) -> Task:
    """Make the GPT with options.optimizer, for text that is read once: each window by one rank, in one step.

    The number of steps follows from the tokens per parameter, if there are any. Ranks have parts of the
    validation windows.

    read(number of windows, sequence): returns windows to train on, and bytes to validate on.
    """
    torch.manual_seed(seed)
    net = GPT(options.width, options.layers, options.heads, options.sequence)
    tokens = options.tokens_per_parameter * sum(parameter.numel() for parameter in net.parameters())
    steps = options.steps
    if tokens:
        steps = max(MIN_STEPS, math.ceil(tokens / (ranks * options.batch * options.sequence)))
    windows, held_out = read(steps * ranks * options.batch, options.sequence)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    batches = iter(order[rank::ranks].split(options.batch))
    return Task(
        net,
        OPTIMIZERS[options.optimizer],
        TEXT_LEARNING_RATE,
        draw=lambda: next_bytes(windows[next(batches)].long()),
        validation=next_bytes(spread(held_out, options.sequence, TEXT_VALIDATION_WINDOWS)[rank::ranks]),
        steps=steps,
        warmup_steps=math.ceil(TEXT_WARMUP * steps),
    )


def next_bytes(windows: Tensor) -> Batch:
    return windows[:, :-1], windows[:, 1:]


def loss_of(logits: Tensor, classes: Tensor) -> Tensor:
    """Compute the mean cross-entropy in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), classes.flatten())


TASKS = {"gpt": gpt, "text": partial(reading_once, packages), "grammar": partial(reading_once, made_up)}
