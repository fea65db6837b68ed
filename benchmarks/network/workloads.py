"""What the hosts train: the demo's GPT on text, and multilayer perceptrons on scikit-learn's digits."""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.accuracy.tasks import Batch, digits_images, next_bytes
from benchmarks.demo.corpus import Windows
from benchmarks.demo.train import GPT, LEARNING_RATE

MLP_BATCH, GPT_BATCH, SEQUENCE = 64, 8, 64  # per rank
MAX_SHIFT = 3  # pixels
WARM_UP_STEPS = 10  # in which the learning rate rises


@dataclass
class Workload:
    """One rank's model, optimizer and data. All ranks have the same weights and validation data.

    target_loss: the validation loss, in nats, to which time is measured.
    bucket_cap_mb: MiB of DDP's buckets; None for its default.
    """

    net: nn.Module
    draw: Callable[[], Batch]
    validation: Batch
    target_loss: float
    bucket_cap_mb: float | None = None

    def __post_init__(self) -> None:
        self.make_optimizer()

    def make_optimizer(self) -> None:
        """Make the optimizer of the net's parameters, which are others once the net is sharded."""
        # Fused: one pass, where the default takes eleven, longer than forward and backward of the MLP.
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=LEARNING_RATE, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1)
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, classes = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())

    def validate(self) -> float:
        with torch.no_grad():
            return self.loss(self.net, self.validation).item()


def mlp(rank: int, ranks: int, seed: int = 0) -> Workload:
    """Make 784-1024-1024-10 for images of 28×28: 1,863,690 parameters, in two of DDP's buckets.

    Raises ImportError without scikit-learn.
    """
    draw, validation = _digits(rank, ranks, seed)
    torch.manual_seed(seed)
    hidden = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    net = nn.Sequential(*hidden, nn.Linear(1024, 10))
    return Workload(net, draw, validation, target_loss=0.3)


def mlp12(rank: int, ranks: int, seed: int = 0) -> Workload:
    """Make 784-528-...-528-10 with 12 hidden layers: 3,485,856 parameters, in 12 of DDP's buckets.

    Every hidden layer is more than the buckets' 1 MiB, so that a bucket ends with each of them. Raises
    ImportError without scikit-learn.
    """
    draw, validation = _digits(rank, ranks, seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in (784, *[528] * 11):
        layers += [nn.Linear(width, 528, bias=False), nn.ReLU()]
        nn.init.kaiming_uniform_(layers[-2].weight, nonlinearity="relu")
    net = nn.Sequential(*layers, nn.Linear(528, 10, bias=False))
    return Workload(net, draw, validation, target_loss=0.3, bucket_cap_mb=1)


def _digits(rank: int, ranks: int, seed: int) -> tuple[Callable[[], Batch], Batch]:
    """Return the function that draws a batch of digits, and the validation data.

    The images are enlarged, and moved by up to three pixels each time.
    """
    small, labels, num_training = digits_images()
    images = functional.interpolate(small, size=28, mode="bilinear").squeeze(1)
    padded = functional.pad(images[:num_training], (MAX_SHIFT,) * 4)
    generator = torch.Generator().manual_seed(seed * ranks + rank)
    pixels = torch.arange(28)

    def draw() -> Batch:
        chosen = torch.randint(num_training, (MLP_BATCH,), generator=generator)
        top, left = torch.randint(2 * MAX_SHIFT + 1, (2, MLP_BATCH, 1), generator=generator)
        rows, columns = (top + pixels).unsqueeze(2), (left + pixels).unsqueeze(1)
        return padded[chosen[:, None, None], rows, columns].flatten(1), labels[chosen]

    return draw, (images[num_training:].flatten(1), labels[num_training:])


def gpt(rank: int, ranks: int, seed: int = 0) -> Workload:
    """Make the demo's GPT: 866,048 parameters, next bytes of Python's standard library."""
    folder = sysconfig.get_paths()["stdlib"]
    data = Windows(folder, SEQUENCE, seed, rank, ranks)
    every = Windows(folder, SEQUENCE, seed, 0, 1).validation

    torch.manual_seed(seed)
    net = GPT(width=128, layers=4, heads=4, sequence=SEQUENCE)
    return Workload(net, lambda: next_bytes(data.draw(GPT_BATCH)), next_bytes(every), target_loss=2.5)


WORKLOADS: dict[str, Callable[..., Workload]] = {"mlp": mlp, "gpt": gpt, "mlp12": mlp12}
