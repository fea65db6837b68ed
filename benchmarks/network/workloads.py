"""What the hosts train: a GPT on text, and a multilayer perceptron on scikit-learn's digits."""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.training.tasks import Batch, Task, adamw
from benchmarks.training.tasks import gpt as gpt_task

MLP_BATCH = 64  # per rank
MAX_SHIFT = 3  # pixels
GPT = Namespace(width=128, layers=4, heads=4, sequence=64, batch=8, steps=0, learning_rate=1e-3)


def mlp(rank: int, ranks: int) -> Task:
    """Make 784-1024-1024-10 for images of 28×28: 1,863,690 parameters, in two of DDP's buckets.

    The images are enlarged, and moved by up to three pixels each time. Raises ImportError without
    scikit-learn.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    small = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(data.target).long()
    images = functional.interpolate(small, size=28, mode="bilinear").squeeze(1)
    num_training = len(images) - 359  # the last ones are held out
    padded = functional.pad(images[:num_training], (MAX_SHIFT,) * 4)
    generator = torch.Generator().manual_seed(rank)
    pixels = torch.arange(28)

    def draw() -> Batch:
        chosen = torch.randint(num_training, (MLP_BATCH,), generator=generator)
        top, left = torch.randint(2 * MAX_SHIFT + 1, (2, MLP_BATCH, 1), generator=generator)
        rows, columns = (top + pixels).unsqueeze(2), (left + pixels).unsqueeze(1)
        return padded[chosen[:, None, None], rows, columns].flatten(1), labels[chosen]

    torch.manual_seed(0)
    hidden = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    net = nn.Sequential(*hidden, nn.Linear(1024, 10))
    validation = images[num_training:].flatten(1), labels[num_training:]
    return Task(net, adamw, 1e-3, draw, validation, steps=0)


def gpt(rank: int, ranks: int) -> Task:
    """Make the demo's GPT: 867,072 parameters, next bytes of Python's standard library."""
    return gpt_task(GPT, 0, rank, ranks)


WORKLOADS: dict[str, Callable[[int, int], Task]] = {"mlp": mlp, "gpt": gpt}
