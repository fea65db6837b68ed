"""The data that a collective moves between simulated ranks, and gloo's checks of tensors.

One Call per rank describes a collective. Rank s's call holds the tensors that s sends to each rank r, and the
tensors that s fills: with tensors from each rank or, in a reduction, with the reduced value. With W ranks:

    all_reduce       s sends t to all                  r: t = t_0 + ... + t_(W-1)
    all_gather       s sends t to all                  r: outputs[s] = t_s
    reduce_scatter   s sends inputs[r] to r            r: output = inputs_0[r] + ... + inputs_(W-1)[r]
    all_to_all       s sends inputs[r] to r            r: outputs[s] = inputs_s[r]
    broadcast, reduce, gather, scatter: like these, with one source or one destination

Reductions add up in rank order, in the tensors' dtype. With two ranks they have gloo's bits; with more they
are equal to gloo's up to rounding. MIN and MAX ignore a NaN unless it is rank 0's. gloo's ignore a NaN of one
rank or another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": lambda total, term: torch.where(term < total, term, total),
    "MAX": lambda total, term: torch.where(term > total, term, total),
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(eq=False)
class Call:
    """One rank's call of a collective.

    name: the collective's name in torch.distributed.
    agreed: by name, the arguments that must be equal on all ranks.
    sends: by destination rank, the tensors to send.
    receives: by source rank, the tensors to fill.
    op: the reduction's name; "" for none.
    reduced: the tensors to fill with the reduction's result.
    undefined: the tensors with undefined values afterwards.
    value: the future's value.
    """

    name: str
    agreed: dict[str, Any]
    sends: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    receives: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    op: str = ""
    reduced: Sequence[Tensor] = ()
    undefined: Sequence[Tensor] = ()
    value: Sequence[Tensor] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.agreed.items())})"

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the call's CUDA tensors."""
        sent = [t for tensors in self.sends.values() for t in tensors]
        return {t.device for t in (*sent, *self.value) if t.is_cuda}

    @property
    def sent_bytes(self) -> int:
        """The bytes of the tensors to send; a tensor for several ranks counts once."""
        return sum({id(t): t.nbytes for tensors in self.sends.values() for t in tensors}.values())


def transfer(calls: Sequence[Call]) -> None:
    """Carry out a collective: one call per rank, in rank order."""
    devices = set().union(*(call.devices for call in calls))
    for device in devices:  # the order of streams is not simulated
        torch.cuda.synchronize(device)
    with torch.no_grad():
        writes: list[tuple[Tensor, Tensor]] = []
        totals: dict[tuple[int, ...], Tensor] = {}
        for rank, call in enumerate(calls):
            for source, outputs in call.receives.items():
                writes += zip(outputs, calls[source].sends[rank], strict=True)
            if call.op:
                for output, *terms in zip(call.reduced, *(peer.sends[rank] for peer in calls), strict=True):
                    key = tuple(map(id, terms))  # an all-reduce has one sum for all ranks
                    if key not in totals:
                        totals[key] = _reduce(call.op, terms)
                    writes.append((output, totals[key]))
            for output in call.undefined:
                real = output.is_floating_point() or output.is_complex()
                writes.append((output, output.new_full((), float("nan") if real else 0)))
        for output, value in writes:
            output.detach().copy_(value)  # autograd does not see collectives
    for device in devices:
        torch.cuda.synchronize(device)


def shape_mismatch(calls: Sequence[Call]) -> str | None:
    """Describe the first tensors that have other shapes than their receiver expects; None if all agree.

    The calls' names and agreed arguments must be equal already.
    """
    for rank, call in enumerate(calls):
        for source, outputs in call.receives.items():
            sent = [list(t.shape) for t in calls[source].sends[rank]]
            expected = [list(t.shape) for t in outputs]
            if sent != expected:
                return f"rank {source} sends {sent} to rank {rank}, which expects {expected}"
    return None


def _reduce(op: str, terms: Sequence[Tensor]) -> Tensor:
    total = reduce(REDUCTIONS[op], terms)
    if op == "AVG":
        return total / len(terms)
    return total if len(terms) > 1 else total.clone()


_REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGRAL = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_COMPLEX = (torch.complex64, torch.complex128)


def traits(name: str, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the dtype and shapes of a call's tensors, to compare them across ranks.

    Raises RuntimeError or ValueError for tensors that gloo or NCCL refuses.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{name}: simulated ranks take dense tensors, got {tensor.layout}")
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        if not (tensor.is_contiguous() or channels_last):
            raise ValueError(
                f"{name}: tensors must be contiguous, got strides {tensor.stride()} of {list(tensor.shape)}"
            )
        accepted = _REAL + _INTEGRAL + (() if name == "gather" else _COMPLEX)
        if tensor.dtype not in accepted:
            raise RuntimeError(f"{name}: invalid scalar type {tensor.dtype}")
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"dtype": tensors[0].dtype, "shape": shapes[0] if len(shapes) == 1 else shapes}


def reduction_name(name: str, opts: Any, tensors: Sequence[Tensor]) -> str:
    """Return the name of the reduction in opts. Raises RuntimeError if gloo refuses it for these tensors."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    op_name = str(getattr(op, "op", op)).rpartition(".")[2]
    integral = tensors[0].dtype in _INTEGRAL
    if (
        op_name not in REDUCTIONS
        or (op_name == "AVG" and integral)
        or (op_name in ("BAND", "BOR", "BXOR") and not integral)
    ):
        raise RuntimeError(f"{name}: cannot use ReduceOp.{op_name} with {tensors[0].dtype}")
    return op_name


def check_alike(name: str, tensors: Sequence[Tensor], like: Tensor, world_size: int) -> None:
    """Raise RuntimeError unless there is one tensor per rank, each with the shape and dtype of `like`."""
    if len(tensors) != world_size:
        raise RuntimeError(f"{name}: {len(tensors)} tensors in a group of {world_size}")
    for index, tensor in enumerate(tensors):
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise RuntimeError(
                f"{name}: tensor {index} is {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} "
                f"{list(like.shape)}"
            )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    first, second = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in (one, other))
    return first[0] + first[1] > second[0] and second[1] > 0
