"""Results of a scenario: recorded on every rank, judged in one process.

Judging uses no collective, so it doesn't rely on the code under check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

# What a result must be: the float64 mean of the ranks' references; its rank's own reference; rank 0's.
Expected = Literal["mean", "own", "rank 0"]


def rounding(dtype: torch.dtype, world_size: int) -> float:
    """Return the error of a mean in this dtype, over the largest value on any rank.

    Each rank rounds its part, and each partial sum is rounded: half an eps each. The rest is for backwards of
    one graph that round differently, as a GPU's libraries may: 4 eps, or 16 in float32 with its longer sums.
    """
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    return (world_size + (4 if is_16_bit else 16)) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Result:
    """A tensor on one rank, on the CPU, and its reference. None stands for no gradient.

    name: equal on all ranks.
    max_error: the allowed error over the largest reference of any rank; 0 for no error.
    is_common: whether all ranks must have equal bits.
    """

    name: str
    reference: torch.Tensor | None
    result: torch.Tensor | None
    expected: Expected
    max_error: float
    is_common: bool


@dataclass
class Results:
    """A rank's results in a scenario. Tensors are copied to the CPU when they are noted."""

    world_size: int
    results: list[Result] = field(default_factory=list)

    def mean(
        self,
        name: str,
        own: torch.Tensor | None,
        result: torch.Tensor | None,
        max_error: float | None = None,
    ) -> None:
        """Expect the mean of the ranks' own tensors, with None as zeros, and equal bits on all ranks."""
        self._note(name, own, result, "mean", max_error, is_common=True)

    def like(
        self,
        name: str,
        reference: torch.Tensor | None,
        result: torch.Tensor | None,
        max_error: float | None = None,
        is_common: bool = True,
    ) -> None:
        """Expect another implementation's result on this rank, and by default equal bits on all ranks."""
        self._note(name, reference, result, "own", max_error, is_common)

    def same(self, name: str, reference: torch.Tensor | None, result: torch.Tensor | None) -> None:
        """Expect exactly this rank's reference."""
        self._note(name, reference, result, "own", 0.0, is_common=False)

    def rank_0s(self, name: str, own: torch.Tensor, result: torch.Tensor) -> None:
        """Expect exactly what rank 0 had."""
        self._note(name, own, result, "rank 0", 0.0, is_common=True)

    def fact(self, name: str, is_so: bool) -> None:
        """Expect that something is so on this rank."""
        self.same(name, torch.tensor(True), torch.tensor(bool(is_so)))

    def _note(
        self,
        name: str,
        reference: torch.Tensor | None,
        result: torch.Tensor | None,
        expected: Expected,
        max_error: float | None,
        is_common: bool,
    ) -> None:
        if max_error is None:
            given = reference if reference is not None else result
            max_error = 0.0 if given is None else rounding(given.dtype, self.world_size)
        copies = [None if each is None else _on_cpu(each) for each in (reference, result)]
        self.results.append(Result(name, *copies, expected, max_error, is_common))


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU: dense, real and contiguous."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.to("cpu", copy=True).contiguous()


class Verdict(NamedTuple):
    """error, max_error: of the result that comes closest to its bound, or exceeds it most."""

    error: float
    max_error: float
    failures: list[str]


def judge(ranks: Sequence[Sequence[Result]]) -> Verdict:
    """Judge a scenario by the results of every rank."""
    by_name: dict[str, dict[int, Result]] = {}
    failures: list[str] = []
    for rank, results in enumerate(ranks):
        for result in results:
            if rank in by_name.setdefault(result.name, {}):
                failures.append(
                    f"{result.name}: noted twice on rank {rank}, so one of the two was not judged"
                )
            by_name[result.name][rank] = result
    if not by_name:
        failures.append("nothing was compared")
    worst = (0.0, 0.0)
    for name, of_ranks in by_name.items():
        first = next(iter(of_ranks.values()))
        if (first.is_common or first.expected != "own") and len(of_ranks) < len(ranks):
            failures.append(f"{name}: only ranks {sorted(of_ranks)} have it")
            continue
        for rank, result in of_ranks.items():
            error, problem = _compare(result, list(of_ranks.values()))
            if problem:
                failures.append(f"{name}, rank {rank}: {problem}")
            if result.max_error and not error / result.max_error <= _ratio(*worst):
                worst = error, result.max_error
        if first.is_common and not all(_is_equal(first.result, other.result) for other in of_ranks.values()):
            failures.append(f"{name}: the replicas differ")
    return Verdict(*worst, failures)


def _ratio(error: float, max_error: float) -> float:
    return error / max_error if max_error else -1.0


def _is_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _compare(result: Result, of_ranks: list[Result]) -> tuple[float, str | None]:
    """Return the result's error over the largest reference, and a description of a misfit; None if right."""
    expected = _expected(result, of_ranks)
    if expected is None or result.result is None:
        is_right = expected is None and result.result is None
        have, should = ("None" if each is None else "a tensor" for each in (result.result, expected))
        return 0.0, None if is_right else f"is {have}, but must be {should}"
    if result.result.shape != expected.shape:
        return 0.0, f"has shape {list(result.result.shape)}, but must have {list(expected.shape)}"
    if result.reference is not None and result.result.dtype != result.reference.dtype:
        return 0.0, f"is {result.result.dtype}, but must be {result.reference.dtype}"
    if not result.max_error:
        return 0.0, None if torch.equal(result.result, expected) else "is not exactly what it must be"
    if not expected.numel():
        return 0.0, None
    references = [each.reference for each in of_ranks if each.reference is not None]
    scale = max(reference.abs().max().item() for reference in references) or 1.0
    error = (result.result.double() - expected.double()).abs().max().item() / scale
    if error <= result.max_error:
        return error, None
    return error, f"off by {error:.3g}, allowed {result.max_error:.3g}"  # also for NaN


def _expected(result: Result, of_ranks: list[Result]) -> torch.Tensor | None:
    if result.expected == "own":
        return result.reference
    if result.expected == "rank 0":
        return of_ranks[0].reference
    references = [each.reference for each in of_ranks if each.reference is not None]
    if not references:
        return None
    return torch.stack([reference.double() for reference in references]).sum(0) / len(of_ranks)
