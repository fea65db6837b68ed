"""Measure a hook on given gradients: the error of its averages, and the bytes that it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.comm.bucket import Hook
from gradcomp.command_line import aligned
from gradcomp.compress import CompressorState
from gradcomp.testing.ranks import run_ranks
from gradcomp.testing.run import MakeState, run_hook
from gradcomp.testing.workload import RecordedWorkload, Workload


@dataclass(frozen=True)
class Quality:
    """How close one tensor's average is to the mean, or all tensors' averages together.

    G is the ranks' mean gradient in the last step, C the hook's average.

    shape: the tensor's shape; (elements,) for all together.
    relative_error: ‖C − G‖ / ‖G‖.
    accumulated_error: ‖ΣC − ΣG‖ / ‖ΣG‖, with sums over all steps. Error feedback keeps it small.
    cosine_similarity: ⟨C, G⟩ / (‖C‖ ‖G‖); NaN if C or G is zero.
    energy_kept: 1 − ‖C − G‖² / ‖G‖².
    best_energy: the largest energy_kept of any matrix of the requested rank, from G's singular values
        (Eckart and Young, 1936); 1 for vectors. None without a rank.
    gradient_bytes: the bytes of the gradient.
    wire_bytes: the most bytes that any rank handed to collectives in the last step; None for a tensor that
        shares its bucket with others.
    """

    shape: tuple[int, ...]
    relative_error: float
    accumulated_error: float
    cosine_similarity: float
    energy_kept: float
    best_energy: float | None
    gradient_bytes: int
    wire_bytes: int | None

    @property
    def compression_rate(self) -> float | None:
        """gradient_bytes / wire_bytes; inf if no bytes are sent, None if they are unknown."""
        if self.wire_bytes is None:
            return None
        return self.gradient_bytes / self.wire_bytes if self.wire_bytes else math.inf


@dataclass(frozen=True)
class CompressionReport:
    """The result of compression_report; str() formats it as a table.

    steps: the number of steps; the last one is measured.
    rank: the rank for best_energy.
    tensors: the quality of each tensor, in the given order.
    overall: the quality of all tensors as one vector.
    """

    hook: str
    world_size: int
    steps: int
    rank: int | None
    tensors: tuple[Quality, ...]
    overall: Quality

    def __str__(self) -> str:
        columns = ["tensor", "error", "summed", "cosine", "energy", "best", "bytes", "sent", "rate"]
        names = [f"{index} {list(each.shape)}" for index, each in enumerate(self.tensors)]
        rows = map(_row, [*names, "all"], [*self.tensors, self.overall])
        hidden = {"summed"} if self.steps == 1 else set()
        hidden |= {"best"} if self.rank is None else set()
        shown = [column for column in zip(columns, *rows, strict=True) if column[0] not in hidden]
        of_rank = "" if self.rank is None else f", against rank {self.rank}"
        lines = [f"{self.hook}: world size {self.world_size}, step {self.steps}{of_rank}"]
        lines += aligned([(*row, "") for row in zip(*shown, strict=True)])  # the last column is aligned left
        return "\n".join(lines)


def compression_report(
    hook: Hook,
    gradients: Sequence[Tensor] | Sequence[Sequence[Tensor]] | Workload,
    *,
    make_state: MakeState = None,
    world_size: int | None = None,
    steps: int = 1,
    rank: int | None = None,
    buckets: Sequence[Sequence[int]] | None = None,
) -> CompressionReport:
    """Run a hook on these gradients, on simulated ranks, and measure its last step.

    gradients: one list of tensors for all ranks, or a list per rank; every step repeats them. Or a Workload,
        which has its own ranks, steps and buckets.
    make_state: make_state(process_group) makes a rank's state. None if the state is the process group. A
        PowerSGDState, gradcomp's or torch's, skips its start_powerSGD_iter plain steps.
    world_size: the number of ranks; by default the number of lists, or 2 for one list of tensors.
    steps: the number of steps. With warm start, the first one has the largest error. With error feedback, a
        later one also sends what earlier ones left out.
    rank: the rank for best_energy; by default the state's matrix_approximation_rank, if it has one.
    buckets: the indices of each bucket's tensors. By default each tensor has its own bucket, so its bytes on
        the wire can be measured. Hooks that compress a whole bucket (batched_powerSGD_hook) need the model's.

    Raises ValueError if there are no gradients, if there are lists for another number of ranks, or if buckets
    don't hold each tensor once; RankError if the hook fails.
    """
    given = _of_steps(gradients, world_size, steps)
    numbers = range(len(given[0][0]))
    if buckets is None:
        buckets = gradients.buckets if isinstance(gradients, Workload) else [(index,) for index in numbers]
    if sorted(index for indices in buckets for index in indices) != list(numbers):
        raise ValueError(f"buckets {buckets} don't hold each of {len(numbers)} tensors once")
    if rank is None and make_state is not None:
        (state,) = run_ranks(lambda _, process_group: make_state(process_group), 1)
        rank = getattr(state, "matrix_approximation_rank", None)
    outcomes, wire_bytes = _run_buckets(hook, make_state, given, buckets)
    best = [None if rank is None else _best(each.means[-1], each.shape, rank) for each in outcomes]
    means = torch.cat([each.means for each in outcomes], dim=1)
    averages = torch.cat([each.averages for each in outcomes], dim=1)
    whole = _Outcome((means.shape[1],), means, averages, sum(o.gradient_bytes for o in outcomes), wire_bytes)
    return CompressionReport(
        getattr(hook, "__qualname__", repr(hook)),
        len(given[0]),
        len(given),
        rank,
        tuple(map(_quality, outcomes, best)),
        _quality(whole, None if rank is None else sum(kept or 0.0 for kept in best)),
    )


class _Outcome(NamedTuple):
    """A tensor's mean gradients and the hook's averages of them, both [steps, elements] in float64."""

    shape: tuple[int, ...]
    means: Tensor
    averages: Tensor
    gradient_bytes: int
    wire_bytes: int | None


def _run_buckets(
    hook: Hook, make_state: MakeState, gradients: list[list[list[Tensor]]], buckets: Sequence[Sequence[int]]
) -> tuple[list[_Outcome], int]:
    """Run the hook on every bucket of gradients [step][rank][index], each with a state of its own.

    Returns the outcome of each tensor, and the bytes on the wire in the last step.
    """

    def started(process_group: dist.ProcessGroup) -> Any:
        state: Any = process_group if make_state is None else make_state(process_group)
        if hasattr(state, "start_powerSGD_iter"):
            state.iter = max(state.iter, state.start_powerSGD_iter)
        if isinstance(state, CompressorState):
            state._compare = lambda *_, **__: None  # type: ignore[method-assign]  # which sends the options
        return state

    outcomes: dict[int, _Outcome] = {}
    wire_bytes = 0
    for indices in buckets:
        workload = RecordedWorkload.of([[[of[i] for i in indices] for of in step] for step in gradients])
        run = run_hook(hook, started, workload)
        sent = max(run.wire_bytes[-1])
        wire_bytes += sent
        for position, index in enumerate(indices):
            outputs = [each for each in run.each_output() if (each.rank, each.index) == (0, position)]
            outcomes[index] = _Outcome(
                workload.shapes[position],
                torch.stack([output.mean.flatten() for output in outputs]),
                torch.stack([output.average.double().flatten() for output in outputs]),
                gradients[0][0][index].nbytes,
                sent if len(indices) == 1 else None,
            )
    return [outcomes[index] for index in sorted(outcomes)], wire_bytes


def _best(mean: Tensor, shape: tuple[int, ...], rank: int) -> float:
    """Compute ‖best approximation of this rank to a tensor of this shape‖²."""
    if len(shape) < 2 or not mean.numel():
        return float(mean.square().sum())
    return float(torch.linalg.svdvals(mean.view(shape[0], -1))[:rank].square().sum())


def _quality(outcome: _Outcome, best: float | None) -> Quality:
    mean, average, summed = outcome.means[-1], outcome.averages[-1], outcome.means.sum(0)
    relative_error = _ratio(float((average - mean).norm()), float(mean.norm()))
    product = float(average.norm() * mean.norm())
    return Quality(
        shape=outcome.shape,
        relative_error=relative_error,
        accumulated_error=_ratio(float((outcome.averages.sum(0) - summed).norm()), float(summed.norm())),
        cosine_similarity=float(average @ mean) / product if product else math.nan,
        energy_kept=1.0 - relative_error**2,
        best_energy=None if best is None else _ratio(best, float(mean.square().sum()), 1.0),
        gradient_bytes=outcome.gradient_bytes,
        wire_bytes=outcome.wire_bytes,
    )


def _ratio(part: float, whole: float, of_nothing: float = 0.0) -> float:
    """Return part / whole; of_nothing if both are 0, inf if only `whole` is."""
    if whole:
        return part / whole
    return math.inf if part else of_nothing


def _of_steps(
    gradients: Sequence[Tensor] | Sequence[Sequence[Tensor]] | Workload, world_size: int | None, steps: int
) -> list[list[list[Tensor]]]:
    """Return compression_report's gradients, given in any of its forms, as [step][rank][index]."""
    if isinstance(gradients, Workload):
        ranks = range(gradients.world_size)
        given = [[gradients.gradients(step, rank) for rank in ranks] for step in range(gradients.num_steps)]
    elif gradients and isinstance(gradients[0], Tensor):
        shared: Any = list(gradients)
        given = [[shared] * (2 if world_size is None else world_size)] * steps
    else:
        given = [[list(of_rank) for of_rank in gradients]] * steps
    if not given or not given[0] or not given[0][0]:
        raise ValueError("no gradients: give a list of tensors, one such list per rank, or a Workload")
    if world_size not in (None, len(given[0])):
        raise ValueError(f"gradients of {len(given[0])} ranks for world_size {world_size}")
    return given


def _row(name: str, quality: Quality) -> list[str]:
    rate = quality.compression_rate
    return [
        name,
        f"{quality.relative_error:.3g}",
        f"{quality.accumulated_error:.3g}",
        f"{quality.cosine_similarity:.4f}",
        f"{quality.energy_kept:.4f}",
        "" if quality.best_energy is None else f"{quality.best_energy:.4f}",
        f"{quality.gradient_bytes:,}",
        "" if quality.wire_bytes is None else f"{quality.wire_bytes:,}",
        "" if rate is None else f"{rate:.1f}",
    ]
