"""The models of reducer_check's scenarios, each with a feature that plain models lack, and their wrapping."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

import gradcomp
from benchmarks.rank_results import Results

# Small, so that every model has several buckets.
CAP_MB = 0.004

On = Literal["Reducer", "wrapper"]


class MLP(nn.Sequential):
    """This model is a plain one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


class Branches(nn.Module):
    """This model has a layer that some forwards use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(20, 40), nn.Linear(40, 3)
        self.sometimes, self.never = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, is_used: bool) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return {"result": self.head(torch.tanh(self.sometimes(hidden)) if is_used else hidden)}


class Repeated(nn.Module):
    """This model uses a layer twice, one on rank 0 only, and one never."""

    def __init__(self, is_rank_0: bool) -> None:
        super().__init__()
        self.is_rank_0 = is_rank_0
        self.first, self.shared, self.head = nn.Linear(20, 40), nn.Linear(40, 40), nn.Linear(40, 3)
        self.on_rank_0, self.never = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(self.first(x)))))
        hidden = torch.tanh(self.on_rank_0(hidden)) if self.is_rank_0 else hidden
        return self.head(hidden)


class Embeddings(nn.Module):
    """This model has an embedding with sparse gradients beside one with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = nn.Embedding(50, 8, sparse=True), nn.Embedding(30, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, is_used: bool = True) -> torch.Tensor:
        hidden = self.dense(tokens).sum(1) + 1.0
        return self.head(hidden + self.sparse(tokens).sum(1) if is_used else hidden)


class ConvNet(nn.Module):
    """This model has channels-last weights and inputs, and BatchNorm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(16 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 3, 8, 8).to(memory_format=torch.channels_last)
        return self.head(self.body(images).flatten(1))


class MixedDtypes(nn.Module):
    """This model has float32 and bfloat16 parameters, which become ready in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(5))
        for layer in self.layers[1::2]:
            layer.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


class Complex(nn.Module):
    """This model has a complex parameter, stored transposed, beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 24)
        self.turn = nn.Parameter(torch.randn(16, 24, dtype=torch.complex64).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.first(x).to(torch.complex64) @ self.turn)


class Given(nn.Module):
    """This model has exactly those gradients that its forward gets."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        products = [(param * each).sum() for param, each in zip(self.params, gradients, strict=True)]
        return torch.stack(products).sum()


class Averaged:
    """A model on a Reducer or in the wrapper, which average its gradients. Call it as the model.

    options: of the Reducer or the wrapper, which have the same ones.
    """

    def __init__(self, on: On, model: nn.Module, device: torch.device, **options: Any) -> None:
        self.model = model
        self._ddp: gradcomp.DistributedDataParallel | None = None
        if on == "wrapper":
            self._ddp = wrapped(gradcomp.DistributedDataParallel, model, device, **options)
            self.reducer = self._ddp.reducer
        else:
            layers = (layer for layer in model.modules() if isinstance(layer, nn.Embedding))
            self.reducer = gradcomp.Reducer(
                model.named_parameters(),
                sparse_params=[layer.weight for layer in layers if layer.sparse],
                **{"bucket_cap_mb": CAP_MB, "first_bucket_cap_mb": CAP_MB} | options,
            )

    def __call__(self, *inputs: Any) -> Any:
        if self._ddp is not None:
            return self._ddp(*inputs)
        outputs = self.model(*inputs)
        self.reducer.prepare_for_backward(outputs)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        return (self._ddp or self.reducer).no_sync()

    def register(self, state: Any, hook: Any) -> None:
        (self._ddp or self.reducer).register_comm_hook(state, hook)


def wrapped(cls: Callable[..., Any], model: nn.Module, device: torch.device, **options: Any) -> Any:
    """Wrap a model with gradcomp's or torch's DistributedDataParallel."""
    device_ids = [device.index] if device.type == "cuda" else None
    return cls(model, device_ids=device_ids, **{"bucket_cap_mb": CAP_MB} | options)


def made(make: Callable[[], nn.Module], device: torch.device, seed: int = 0) -> nn.Module:
    """Make a model, with the same weights for the same seed on every rank."""
    torch.manual_seed(seed)
    return make().to(device)


def numbers(device: torch.device, rank: int, step: int, shape: Sequence[int]) -> torch.Tensor:
    """Return random inputs. They differ between ranks and steps, but not between kinds of devices."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(tuple(shape), generator=generator).to(device)


def loss_of(outputs: Any) -> torch.Tensor:
    tensor: torch.Tensor = outputs["result"] if isinstance(outputs, dict) else outputs
    return (tensor - 1.0).square().sum()


class BesideTwin:
    """Trains a model with averaged gradients beside its twin, which has this rank's own gradients."""

    def __init__(self, on: On, model: nn.Module, device: torch.device, **options: Any) -> None:
        self.twin = copy.deepcopy(model)
        self.averaged = Averaged(on, model, device, **options)
        self.device = device

    def zero_grad(self, set_to_none: bool = True) -> None:
        for model in (self.averaged.model, self.twin):
            model.zero_grad(set_to_none)

    def backward(self, *micro_batches: tuple[Any, ...]) -> None:
        """Accumulate the gradients of several inputs, and average in the last backward.

        The twin comes first, so that what is read next comes right behind the averaging.
        """
        for index, inputs in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            loss_of(self.twin(*inputs)).backward()
            with nullcontext() if is_last else self.averaged.no_sync():
                loss_of(self.averaged(*inputs)).backward()

    def named(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield each parameter's name, the averaged model's, and the twin's."""
        for (name, param), own in zip(
            self.averaged.model.named_parameters(), self.twin.parameters(), strict=True
        ):
            yield name, param, own

    def expect_means(self, results: Results, where: str, max_error: float | None = None) -> None:
        for name, param, own in self.named():
            results.mean(f"{where}, {name}", own.grad, param.grad, max_error)


@contextmanager
def current_stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Make a stream other than the default current, if the device has streams."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
