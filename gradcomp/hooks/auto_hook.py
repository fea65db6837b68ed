"""The hook that measures compressions while training goes on, and uses the mildest near the fastest."""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.announcement import say, shown_bytes
from gradcomp.comm.nodes import AUTO
from gradcomp.comm.reduced_values import ReducedValues
from gradcomp.comm.streams import Future
from gradcomp.compress import checkpoint
from gradcomp.compress.parameter_states import Bucket
from gradcomp.compress.powersgd import PowerSGDCompressor
from gradcomp.compress.settings import Settings
from gradcomp.compress.state import CompressorState, Phase, option
from gradcomp.compress.trial import CHECK_EVERY, MAX_SLOW_STEPS, TOLERANCE, TURN, SlowSteps, StepClock, Trial
from gradcomp.device import has_streams
from gradcomp.rules import RANK, Rule, check_fields, checked_field

from .named_hooks import NamedHook, forms_of

__all__ = ["CANDIDATES", "AutoState", "auto_hook"]

# Names as in docs/accuracy.md, the mildest first.
CANDIDATES = ("none", "bf16", "int8", "int4", "powersgd:16:int8", "powersgd:8:int8")
_RETRIAL = Rule(
    "None or an int and at least 1", lambda value: value is None or (type(value) is int and value >= 1)
)


@dataclass(frozen=True)
class AutoOptions:
    """The options of AutoState. Errors don't depend on them."""

    candidates: tuple[str, ...] = CANDIDATES
    tolerance: float = checked_field(0.05, TOLERANCE)
    steps_per_turn: int = checked_field(6, TURN)
    rounds: int = checked_field(3, RANK)
    retrial_every: int | None = checked_field(10_000, _RETRIAL)

    def __post_init__(self) -> None:
        check_fields(self)
        given: Any = self.candidates
        names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
        if not names:
            raise ValueError(f"candidates is {given!r}, but must be a list of names, such as {CANDIDATES}")
        for name in names:
            NamedHook.named(name if isinstance(name, str) else repr(name))
            if name.startswith("batched") or ":start" in name:
                raise ValueError(f"candidates: {name!r} can't be a candidate; plain names of PowerSGD can")
            if names.count(name) > 1:
                raise ValueError(f"candidates has {name!r} twice: {names}")
        object.__setattr__(self, "candidates", names)


class AutoState(CompressorState):
    """The state that auto_hook is registered with: finds out which compression pays, and uses it.

    Candidates take turns of a few training steps, round after round. A candidate pays if its steps are
    surely shorter than the first candidate's ("none") by more than `tolerance`, and the first one's steps
    wait that long for averages. Of those that pay, mildest first, the first that takes at most `tolerance`
    longer per step than the fastest is used then; without one, the first candidate.

    process_group: the group that averages; None for the default one.
    candidates: names as in docs/accuracy.md, the mildest first: none, bf16, fp16, int8, int4, powersgd:RANK,
        powersgd:RANK:bf16, powersgd:RANK:int8. With nodes, each is tried flat and hierarchical.
    strongest: the last of the candidates to try, such as "int8" for at most 8 bits; None for all.
    tolerance: the part of the fastest step's time that a milder candidate may take longer, and the part of
        the first one's that others must gain.
    start_iter: plain steps before the trial, at least 2, because DDP rebuilds its buckets after the first.
    steps_per_turn: steps of a turn. Its first two don't count.
    rounds: every candidate has a turn in each round. A candidate with all steps 1.5 times slower than the
        fastest one's has no others, except the first one. A trial ends early if a candidate is surely twice
        as fast as the first, and has up to four times as many rounds if steps vary too much to be sure.
    retrial_every: steps from one trial to the next, at most ten times the trial's after one that wasn't sure;
        None for no other trial on that ground. 50 steps in a row that are 25 % slower than in the trial begin
        another one, too.
    ranks_per_node: see CompressorState.
    clock: a function that returns seconds, instead of the device's events or time.perf_counter; for tests.

    choice: the candidate in use after a trial; None before and during one.

    Every step of a trial is a valid step: the errors of a compression are passed on to the next. The ranks
    choose alike: they exchange the times of their steps, and their waits, in two small all-reduces per
    round. The choice and its times are in checkpoints. A resumed run with as many ranks and nodes goes on
    with them; a trial without a choice begins again.

    Raises ValueError for an invalid option, an unknown candidate, none, or one twice; TypeError if
    process_group is not a process group.
    """

    _default_ranks_per_node = AUTO
    _default_start_iter = 10
    # What any candidate keeps, PowerSGD keeps, too.
    _compressor, _options_class = PowerSGDCompressor, AutoOptions
    algorithm = "auto_hook"
    _announces_phases = False  # it says which candidate is used

    candidates: tuple[str, ...] = option()
    tolerance: float = option()
    steps_per_turn: int = option()
    rounds: int = option()
    retrial_every: int | None = option()

    def __init__(
        self,
        process_group: Any = None,
        candidates: Iterable[str] = CANDIDATES,
        *,
        strongest: str | None = None,
        tolerance: float = 0.05,
        start_iter: int = _default_start_iter,
        steps_per_turn: int = 6,
        rounds: int = 3,
        retrial_every: int | None = 10_000,
        ranks_per_node: int | str = AUTO,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        clock: Callable[[], float] | None = None,
    ):
        named: Any = candidates
        options = AutoOptions(named, tolerance, steps_per_turn, rounds, retrial_every)
        names = options.candidates
        if strongest is not None and strongest not in names:
            raise ValueError(f"strongest is {strongest!r}, which is not one of the candidates {names}")
        if strongest is not None:
            options = replace(options, candidates=names[: names.index(strongest) + 1])
        super().__init__(
            PowerSGDCompressor,
            options,
            process_group,
            start_iter=start_iter,
            random_seed=random_seed,
            compression_stats_logging_frequency=compression_stats_logging_frequency,
            ranks_per_node=ranks_per_node,
        )
        self._clock = StepClock(clock)

    def _reset(self, process_group: Any, settings: Settings) -> None:
        super()._reset(process_group, settings)
        self._trial: Trial | None = None
        self._clock = StepClock()
        self._device = torch.device("cpu")
        self._counts_from = 0  # the first step whose time may count
        self._slow = SlowSteps()

    @property
    def choice(self) -> str | None:
        """The candidate in use after a trial; None before and during one."""
        return None if self._trial is None else self._trial.choice

    @property
    def is_sure(self) -> bool:
        """Whether more rounds wouldn't help the last trial: its steps didn't vary too much."""
        return self._trial is None or self._trial.is_sure

    @property
    def table(self) -> list[dict[str, Any]]:
        """The candidates of the last trial, mildest first.

        candidate: its name.
        ms: the median time of a step, of the ranks' means; None if unknown.
        wait_ms: the median time that a step waits for its averages after backward's last bucket; only of
            the first candidate.
        gain_ms: the median by which its steps are shorter than the first candidate's, in pairs.
        gain_low_ms, gain_high_ms: the interval for the true median of the gain.
        level: the probability that such an interval holds the true median.
        why: in words, why it doesn't pay; empty if it does.
        sent_bytes: the bytes that a rank sends per step; with nodes, a node. None if unknown.
        nats: its cost in validation loss on the small GPT of docs/accuracy.md; None if unknown.
        """
        rows = [] if self._trial is None else self._trial.table()
        return [{**row, "nats": NamedHook.form_named(row["candidate"]).cost} for row in rows]

    def compared_options(self) -> dict[str, Any]:
        num_ranks = None if self._trial is None else self._trial.place[0]
        trial = self._ended_trial() if num_ranks == self._place.size else None  # not another group's
        return super().compared_options() | {"the trial": trial}

    # --- steps ---

    def phase(self, options: AutoOptions, group: dist.ProcessGroup, device: torch.device) -> Phase:
        if self._steps.num_buckets == 1:
            self._begin_step(group, device)
        if self._trial is not None:
            return _phase_of(self._trial.current)
        return Phase(self.algorithm, None, options, warms_up=tuple(map(_phase_of, self._names())))

    def _begin_step(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        if not self.is_compared:
            self._begin_run(group)
        trial = self._trial
        if trial is None:
            if self.iter >= self.start_iter:
                self._begin_trial(group)
        elif trial.choice is None:
            if trial.step >= trial.steps_per_turn * len(trial.taking_part):
                self._end_round(trial, group)
        elif trial.is_over_after(self.iter - trial.chosen_at, self.retrial_every):
            self._begin_trial(group)
        elif self.iter % CHECK_EVERY == 0:
            usual = trial.medians()[trial.choice]
            if self._slow.are_too_many(self._clock.take(), usual, self._groups(group), self._device):
                say(f"auto_hook: {MAX_SLOW_STEPS} steps in a row were slow, so the trial is repeated", group)
                self._begin_trial(group)

    def _begin_run(self, group: dist.ProcessGroup) -> None:
        """After a load or in another group: forget a trial that hasn't ended, or has other settings.

        The ranks have compared the others, so all of them do. Some may be new processes, whose first steps
        are slow: buckets are rebuilt, kernels are compiled, memory is allocated. As many steps don't count as
        come before a new run's trial.
        """
        self._counts_from = self.iter + min(self.start_iter, self._default_start_iter)
        self._forget_times()
        trial = self._trial
        if trial is not None and (trial.choice is None or trial.settings != self._new_trial(group).settings):
            self._trial = None

    def _begin_trial(self, group: dist.ProcessGroup) -> None:
        self._trial = trial = self._new_trial(group)
        trial.step = min(self.iter - self._counts_from, 0)
        self._forget_times()
        if trial.choice is None:
            first = self.iter - trial.step
            last = first + trial.num_rounds * trial.steps_per_turn * len(trial.names)
            say(f"auto_hook tries {', '.join(trial.names)} from step {first} to about step {last}", group)

    def _forget_times(self) -> None:
        self._clock.forget()
        self._slow = SlowSteps()

    def _names(self, num_ranks: int = 2) -> list[str]:
        """Return a trial's candidates, with nodes each flat and hierarchical.

        A single rank averages nothing, so nothing can pay.
        """
        names = self.candidates if num_ranks > 1 else self.candidates[:1]
        has_nodes, is_gloo = self._place.ranks_per_node > 1, not has_streams(self._device)
        forms = forms_of(map(NamedHook.named, names), has_nodes=has_nodes, is_gloo=is_gloo)
        return [form.name for form in forms]

    def _new_trial(self, group: dist.ProcessGroup) -> Trial:
        options, place = self.options, (group.size(), self._place.ranks_per_node)
        settings = (options.steps_per_turn, options.rounds, options.tolerance)
        before = self.choice if self.is_sure else None
        return Trial(self._names(group.size()), place, *settings, before, chosen_at=self.iter)

    def _end_round(self, trial: Trial, group: dist.ProcessGroup) -> None:
        """Agree with the other ranks on the round's times, and announce a choice."""
        own_waits = self._clock.take_waits(of_each=self.shard_group is not None)
        seconds, waits = trial.round_of(dict(self._clock.take(waits=True)), own_waits)
        what, groups = "compare the candidates' times of auto_hook", self._groups(group)
        # Ranks that wait for one another are late by turns: the slowest rank's steps add up to too much.
        total = ReducedValues(what, seconds, groups, self._device, dist.ReduceOp.SUM).wait()
        waits = ReducedValues(what, waits, groups, self._device).wait()
        num_ranks = math.prod(each.size() for each in groups)
        trial.end_round([each / num_ranks for each in total], waits, self.iter)
        if trial.choice is not None:
            _announce(trial, self.table, self.iter, group)
            if self.recorder is not None:
                choice = {"step": self.iter, "choice": trial.choice, "candidates": self.table}
                self.recorder.choices.append(choice)

    def _groups(self, group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
        """Return the groups that choose alike: a step waits for the slowest shard, too."""
        return [group] if self.shard_group is None else [group, self.shard_group]

    def _average_compressed(
        self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, phase: Phase, own: Bucket
    ) -> Future:
        self._clock.begin_bucket(self._device)
        future = super()._average_compressed(hook_name, bucket, group, phase, own)
        trial = self._trial
        if trial is not None and trial.choice is None and trial.step < trial.steps_per_turn:
            self._clock.add_wait(trial.step, future, self._device)
        return future

    def end_step(self) -> None:
        if self._trial is not None and self._steps.gradient_bytes:
            self._trial.sent_bytes[self._trial.current] = self._steps.sent_bytes
        super().end_step()
        if self._trial is not None:
            self._clock.end_step(self._trial.step)
            self._trial.step += 1

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the process group, in the format of CompressorState.state_dict.

        It also has "trial", the fields of the last trial; None before and during one.
        """
        return {**super().state_dict(), "trial": self._ended_trial()}

    def _ended_trial(self) -> dict[str, Any] | None:
        return None if self._trial is None or self._trial.choice is None else asdict(self._trial)

    def checked(self, state_dict: Any) -> dict[str, Any]:
        checkpoint.require_version(state_dict)
        trial = state_dict.get("trial")
        checked = super().checked({name: value for name, value in state_dict.items() if name != "trial"})
        return {**checked, "trial": None if trial is None else asdict(Trial.from_dict(trial))}

    def _load_checked(self, checked: dict[str, Any]) -> None:
        super()._load_checked(checked)
        trial = checked["trial"]
        self._trial = None if trial is None else Trial.from_dict(trial)


@cache
def _phase_of(name: str) -> Phase:
    """Return how a candidate averages."""
    hook = NamedHook.form_named(name)
    return Phase(name, hook.compressor, hook.options, is_flat=not hook.is_hierarchical)


def _shown_gain(row: dict[str, Any]) -> str:
    return f"{row['gain_ms']:.3g} ms ({row['gain_low_ms']:.3g} to {row['gain_high_ms']:.3g})"


def _announce(trial: Trial, table: list[dict[str, Any]], step: int, group: dist.ProcessGroup) -> None:
    """Say what was chosen before this step, and why, with the table."""
    if trial.unknown:
        logging.getLogger(__name__).warning(
            "auto_hook knows no time of a step with %s after %s rounds, so it uses %s. Likely cause: "
            "a clock that stands still, goes back or returns NaN on a rank.",
            *(", ".join(trial.unknown), trial.round, trial.choice),
        )
    shown, levels, first, chosen = [], [1.0], table[0], table[0]
    for row in table:
        chosen = row if row["candidate"] == trial.choice else chosen
        is_compared = row["gain_ms"] is not None and row["candidate"] in trial.taking_part
        levels += [row["level"]] if is_compared else []
        ms = "?" if row["ms"] is None else f"{row['ms']:.3g} ms"
        gain = f", gain {_shown_gain(row)}" if is_compared else ""
        sent = "" if row["sent_bytes"] is None else f", {shown_bytes(row['sent_bytes'])}"
        nats = "" if row["nats"] is None else f", {row['nats']:+.3f}"
        shown.append(f"{row['candidate']} {ms}{gain}{sent}{nats}")
    wait = "an unknown wait" if first["wait_ms"] is None else f"a wait of {first['wait_ms']:.3g} ms"
    too_little = f"no other surely gains more than {trial.tolerance:.0%} of its step, within {wait}"
    why = too_little if chosen is first else f"gain {_shown_gain(chosen)} of {wait}"
    if not trial.is_sure:
        why += f" (steps vary too much for {trial.round} rounds; see AutoState's rounds)"
    say(
        f"auto_hook uses {trial.choice} from step {step} on: {why}. Each with its time, its gain "
        f"over {trial.names[0]} (interval at {min(levels):.1%}) and its bytes per step, and its cost "
        f"in loss in docs/accuracy.md: {'; '.join(shown)}",
        group,
    )


def auto_hook(state: AutoState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the mildest compression that pays, which the state finds out by itself.

    The first state.start_iter steps are plain, then about 100 steps are a trial; see AutoState.

    On the wire: the codes or factors of the candidate in use. A trial adds two all-reduces of a few numbers
    per round; later every 25th step adds an all-reduce of one number.
    State: the candidate's errors, which are passed on when the candidate changes.

    Raises TypeError if the state is not an AutoState or the bucket is not a floating-point bucket.

    Example::

        ddp_model.register_comm_hook(AutoState(), auto_hook)
    """
    if not isinstance(state, AutoState):
        AutoState.refuse("auto_hook", state, bucket)
    return state.average("auto_hook", bucket)
