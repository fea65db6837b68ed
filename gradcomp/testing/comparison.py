"""Compare hooks on equal gradients: the errors of their averages, and the bytes that they send."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.comm.bucket import Hook
from gradcomp.command_line import aligned
from gradcomp.testing.claims import Claims, declared
from gradcomp.testing.properties.accuracy import BucketSteps
from gradcomp.testing.ranks import run_ranks
from gradcomp.testing.run import MakeState, run_hook
from gradcomp.testing.strategies import SPECTRA
from gradcomp.testing.workload import RecordedWorkload, Workload, flat


@dataclass(frozen=True)
class Comparison:
    """The result of compare: a row for each hook and its gradients; as str() a table, as csv() CSV.

    G is the ranks' mean gradient, C the hook's average, both of all tensors of a row as one vector.

    bytes/element: the most bytes that any rank handed to collectives in the last step, per element.
    summed: ‖ΣC − ΣG‖ / ‖ΣG‖, with sums over all steps. Error feedback keeps it small.
    error: ‖C − G‖ / ‖G‖ in the last step.
    cosine: ⟨C, G⟩ / (‖C‖ ‖G‖) in the last step; NaN if C or G is zero.
    energy: 1 − error².
    δ: 1 − ‖M − C‖² / ‖M‖² (contraction), a mean over the steps; with error feedback M is G plus what is held
        back. δ ±: its standard deviation.
    ω: ‖(C − G) − the steps' mean of C − G‖² / the ranks' mean ‖gradient‖² (variance; see Claims), a mean over
        the steps. NaN with error feedback, whose steps depend on each other. ω ±: its standard deviation.
    """

    rows: list[dict[str, Any]]

    def __str__(self) -> str:
        shown = [
            [each if isinstance(each, str) else f"{each:.3g}" for each in row.values()] for row in self.rows
        ]
        return "\n".join(aligned([(*row, "") for row in [list(self.rows[0]), *shown]]))  # "": aligned right

    def csv(self) -> str:
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return file.getvalue()

    def plot(self, path: str | Path) -> None:
        """Draw each row's `summed` over its bytes per element, and write the picture to a file.

        The file's suffix, such as .png or .svg, says its format. Raises ImportError without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Comparison.plot needs matplotlib: pip install 'gradcomp[plot]'") from error
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        for hook in dict.fromkeys(row["hook"] for row in self.rows):
            points = [(row["bytes/element"], row["summed"]) for row in self.rows if row["hook"] == hook]
            axes.plot(*zip(*points, strict=True), "o", label=hook)
        axes.set_yscale("symlog", linthresh=1e-4)  # exact averages have 0
        axes.set(xlabel="bytes/element", xlim=(0, None), ylabel="summed", ylim=(-1e-5, None))
        figure.legend(loc="outside upper left")
        figure.savefig(path)


def compare(
    hooks: Iterable[tuple[str, Hook, MakeState]],
    gradients: Iterable[Tensor] | Workload | None = None,
    *,
    steps: int = 32,
    world_size: int = 2,
    by_bucket: bool = False,
) -> Comparison:
    """Run hooks on the same gradients, on simulated ranks, and compare their averages and bytes.

    hooks: (name, hook, make_state) of each, also of one hook with several options. A state with start_iter
        or start_powerSGD_iter begins after its plain steps.
    gradients: tensors that every rank has in every step, for example a model's gradients, each in its own
        bucket. Or a Workload, which has its own ranks, steps and buckets. By default matrices and vectors of
        each spectrum, with noise of the ranks' own; see Workload.
    steps: the number of steps, which repeat the gradients: the draws of a random compressor.
    world_size: the number of ranks.
    by_bucket: also make a row for each bucket.

    Judge hooks with error feedback by `summed`: the error of a step is large if it makes up for others.
    Raises ValueError if there are no gradients, or no hooks; RankError if a hook fails.
    """
    workloads: dict[str, Workload]
    if gradients is None:
        shapes, buckets = ((64, 48), (48,)), ((0,), (1,))
        recipe = Workload(shapes, buckets, world_size, steps, noise=0.5)
        workloads = {name: replace(recipe, spectra=(name,)) for name in SPECTRA if name != "zero"}
    elif isinstance(gradients, Workload):
        workloads = {"workload": gradients}
    elif tensors := [each for each in gradients if each is not None]:
        each_alone = [(index,) for index in range(len(tensors))]
        workloads = {"given": RecordedWorkload.of([[tensors] * world_size] * steps, each_alone)}
    else:
        raise ValueError("no gradients: give tensors, or a Workload")
    rows, given_hooks = [], list(hooks)
    for label, workload in workloads.items():
        for name, hook, make_state in given_hooks:
            outcomes = list(_outcomes(hook, make_state, workload))
            rows.append({"gradients": label, "hook": name, **_measures(outcomes)})
            for indices, outcome in zip(workload.buckets, outcomes, strict=True) if by_bucket else ():
                label_of_bucket = ", ".join(str(list(workload.shapes[index])) for index in indices)
                rows.append({"gradients": label_of_bucket, "hook": name, **_measures([outcome])})
    if not rows:
        raise ValueError("no hooks: give (name, hook, make_state) of each")
    return Comparison(rows)


# A bucket's steps on rank 0, the last one's bytes, the ranks' mean ‖gradient‖², and whether it keeps errors.
_Outcome = tuple[BucketSteps, int, Tensor, bool]


def _outcomes(hook: Hook, make_state: MakeState, workload: Workload) -> Iterator[_Outcome]:
    """Run the hook on each bucket of a workload, with a state of its own."""

    def started(process_group: dist.ProcessGroup) -> Any:
        state: Any = process_group if make_state is None else make_state(process_group)
        name = "start_powerSGD_iter" if hasattr(state, "start_powerSGD_iter") else "start_iter"
        if hasattr(state, "iter"):
            state.iter = max(state.iter, getattr(state, name, 0))
        return state

    (state,) = run_ranks(lambda _, process_group: started(process_group), 1)
    steps, ranks = range(workload.num_steps), range(workload.world_size)
    gradients = [[workload.gradients(step, rank) for rank in ranks] for step in steps]
    for indices in workload.buckets:
        of_bucket = [[[tensors[index] for index in indices] for tensors in step] for step in gradients]
        run = run_hook(hook, started, RecordedWorkload.of(of_bucket))
        keeps_errors = max(run.state_numels[-1]) >= workload.numel(*indices)
        keeps_errors = declared(hook, state)[0].get("error_feedback", keeps_errors)
        squares = torch.stack([flat(run.workload.stacked(i)).square().sum() / len(ranks) for i in steps])
        yield next(BucketSteps.each(Claims(), run)), max(run.wire_bytes[-1]), squares, keeps_errors


def _measures(outcomes: Sequence[_Outcome]) -> dict[str, float]:
    """Return a row's numbers, by column."""
    means = torch.cat([steps.means for steps, *_ in outcomes], dim=1)
    averages = torch.cat([steps.outputs for steps, *_ in outcomes], dim=1)
    held = torch.cat([steps.held[:-1] * keeps_errors for steps, *_, keeps_errors in outcomes], dim=1)
    given = means + held
    off, mean, average = averages - means, means[-1], averages[-1]
    error = _ratio(off[-1].norm(), mean.norm())
    contractions = 1 - _ratio((averages - given).square().sum(1), given.square().sum(1))
    sizes = torch.stack([squares for *_, squares, _ in outcomes]).sum(0)
    variances = _ratio((off - off.mean(0)).square().sum(1), sizes)
    if any(keeps_errors for *_, keeps_errors in outcomes):
        variances *= math.nan
    numbers = {
        "bytes/element": sum(wire_bytes for _, wire_bytes, *_ in outcomes) / max(1, means.shape[1]),
        "summed": _ratio(off.sum(0).norm(), means.sum(0).norm()),
        "error": error,
        "cosine": average @ mean / (average.norm() * mean.norm()),
        "energy": 1 - error**2,
        "δ": contractions.mean(),
        "δ ±": contractions.std(correction=0),
        "ω": variances.mean(),
        "ω ±": variances.std(correction=0),
    }
    return {name: float(number) for name, number in numbers.items()}


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole; 0 where both are 0."""
    return torch.where(part == 0, part, part / whole)
