"""The tasks: a GPT on text, a GPT on text that is read once, and a small convolutional network on digits."""

import argparse
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.training.corpus import HELD_OUT_BYTES, Windows, read_corpus, read_once, sentences, spread
from benchmarks.training.gpt import GPT
from benchmarks.training.options import MIN_STEPS

Batch = tuple[Tensor, Tensor]  # inputs, and the classes to predict

VALIDATION_WINDOWS, TEXT_VALIDATION_WINDOWS = 128, 1024  # of held-out text, divided among the ranks
TEXT_WARMUP = 0.05  # of the steps
VALIDATION_FRACTION = 0.2  # held-out fraction of the digits
DIGITS_BATCH = 32  # images per rank and step

# Chosen without compression: the hooks use the baseline's learning rates.
TEXT_LEARNING_RATE, TEXT_BETAS = 5e-3, (0.9, 0.99)
DIGITS_OPTIMIZER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-3}


@dataclass
class Task:
    """One rank's model, optimizer and data. Ranks have the same weights, and other data.

    They all follow from the options, the seed, the rank and the number of ranks, so that every hook trains
    the same weights on the same data in the same order.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    draw: Callable[[], Batch]
    validation: Batch
    steps: int
    warmup_steps: int = 10


def gpt(options: argparse.Namespace, seed: int, rank: int, ranks: int) -> Task:
    """Make the GPT with AdamW. The validation windows are spread over the held-out files."""
    text, held_out = read_corpus(sysconfig.get_paths()["stdlib"])
    data = Windows(text, options.sequence, seed, rank, ranks)
    torch.manual_seed(seed)
    net = GPT(options.width, options.layers, options.heads, options.sequence)
    return Task(
        net,
        torch.optim.AdamW(net.parameters(), lr=options.learning_rate),
        draw=lambda: next_bytes(data.draw(options.batch)),
        validation=next_bytes(spread(held_out, options.sequence, VALIDATION_WINDOWS)[rank::ranks]),
        steps=options.steps,
    )


def text(options: argparse.Namespace, seed: int, rank: int, ranks: int) -> Task:
    """Make the GPT with AdamW, for text that is read once: each window by one rank, in one step.

    The number of steps follows from the tokens per parameter, if there are any. Ranks have parts of the
    validation windows.
    """

    def read(num_windows: int) -> tuple[Tensor, Tensor]:
        folders = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
        return read_once(folders, options.sequence, num_windows)

    return _reading_once(read, options, seed, rank, ranks)


def grammar(options: argparse.Namespace, seed: int, rank: int, ranks: int) -> Task:
    """Make the GPT with AdamW, for made-up sentences, which are read once as in text."""

    def read(num_windows: int) -> tuple[Tensor, Tensor]:
        num_bytes = num_windows * (options.sequence + 1)
        found, _ = sentences(num_bytes + HELD_OUT_BYTES, seed=0)
        return found[:num_bytes].view(num_windows, -1), found[num_bytes:]

    return _reading_once(read, options, seed, rank, ranks)


def _reading_once(
    read: Callable[[int], tuple[Tensor, Tensor]],
    options: argparse.Namespace,
    seed: int,
    rank: int,
    ranks: int,
) -> Task:
    """Make the task. read(number of windows) returns windows to train on, and bytes to validate on."""
    torch.manual_seed(seed)
    net = GPT(options.width, options.layers, options.heads, options.sequence)
    tokens = options.tokens_per_parameter * sum(parameter.numel() for parameter in net.parameters())
    steps = options.steps
    if tokens:
        steps = max(MIN_STEPS, math.ceil(tokens / (ranks * options.batch * options.sequence)))
    windows, held_out = read(steps * ranks * options.batch)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    batches = iter(order[rank::ranks].split(options.batch))
    return Task(
        net,
        torch.optim.AdamW(net.parameters(), lr=TEXT_LEARNING_RATE, betas=TEXT_BETAS),
        draw=lambda: next_bytes(windows[next(batches)].long()),
        validation=next_bytes(spread(held_out, options.sequence, TEXT_VALIDATION_WINDOWS)[rank::ranks]),
        steps=steps,
        warmup_steps=math.ceil(TEXT_WARMUP * steps),
    )


def next_bytes(windows: Tensor) -> Batch:
    return windows[:, :-1], windows[:, 1:]


def digits_images() -> tuple[Tensor, Tensor, int]:
    """Return scikit-learn's images, 1,797 × 1 × 8 × 8, their classes, and how many come first for training.

    The last fifth of the images is for validation. The images stay in the data set's order: thirteen people
    wrote them, and a random split, which is easier, would hold out images of writers that are also trained
    on. Raises ImportError without scikit-learn.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    num_training = len(images) - round(VALIDATION_FRACTION * len(images))
    return images, torch.from_numpy(data.target).long(), num_training


def digits(options: argparse.Namespace, seed: int, rank: int, ranks: int) -> Task:
    """Make three convolutions with SGD with momentum. Raises ImportError without scikit-learn."""
    images, labels, num_training = digits_images()
    generator = torch.Generator().manual_seed(seed * ranks + rank)

    def draw() -> Batch:
        chosen = torch.randint(num_training, (DIGITS_BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 2 * 2, 10)),
    )
    optimizer = torch.optim.SGD(net.parameters(), **DIGITS_OPTIMIZER)
    validation = images[num_training:], labels[num_training:]
    return Task(net, optimizer, draw, validation, options.steps)


def loss_of(logits: Tensor, classes: Tensor) -> Tensor:
    """Compute the mean cross-entropy in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), classes.flatten())


def accuracy_of(logits: Tensor, classes: Tensor) -> Tensor:
    """Compute the fraction of predictions that are right."""
    return (logits.argmax(-1) == classes).float().mean()


TASKS = {"gpt": gpt, "digits": digits, "text": text, "grammar": grammar}
