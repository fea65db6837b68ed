"""PowerSGD: all-reduce two thin factors of every gradient matrix instead of the matrix.

Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. docs/powersgd.md has the algorithm as
implemented, and how it differs from torch's.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.compress.consistency import require_same_group, require_same_on_all_ranks
from gradcomp.compress.grad_bucket import require_bucket
from gradcomp.compress.hook import require_dense_floats
from gradcomp.compress.process_group import joined_group, require_group, resolve_group
from gradcomp.compress.streams import in_order
from gradcomp.layout import LowRankLayout

from . import powersgd_checkpoint, powersgd_transfer
from .default_hooks import allreduce_hook
from .powersgd_memory import BucketMemories, Share
from .powersgd_options import OPTIONS, PROGRESS, checked_options, options_of
from .powersgd_options import plain as _plain
from .powersgd_transfer import (
    average_errors,
    consolidated_state_dict,
    load_from_dcp,
    per_rank_state_dict,
)

__all__ = [
    "PowerSGDState",
    "average_errors",
    "batched_powerSGD_hook",
    "consolidated_state_dict",
    "from_torch",
    "load_from_dcp",
    "per_rank_state_dict",
    "powerSGD_hook",
]

logger = logging.getLogger(__name__)

# What the ranks' factors and collectives don't depend on.
_MAY_DIFFER = ("compression_stats_logging_frequency", "batch_tensors_with_same_shape")


class PowerSGDState:
    """PowerSGD's hyperparameters, and what it remembers of every bucket. Arguments and meanings are torch's.

    process_group: None for the default one.
    matrix_approximation_rank: columns of the factors; the compression is rows · cols / ((rows + cols) · rank).
    start_powerSGD_iter: steps of plain all-reduce before compression starts; at least 2 with error feedback or
        warm start, because DDP rebuilds its buckets after the first step.
    min_compression_rate: matrices that would save less are averaged as they are.
    use_error_feedback: add what compression lost to the next step's gradient. Needs the memory of the
        compressed gradients once more.
    warm_start: project on the last step's factors rather than on random ones.
    orthogonalization_epsilon: added to a column's length before dividing by it. Not needed here: zero columns
        stay zero.
    random_seed: of the first (without warm start, every) projection; the same on all ranks.
    compression_stats_logging_frequency: steps between log lines with compression_stats().
    batch_tensors_with_same_shape: accepted, and needless: all matrices are compressed together anyway.

    Raises ValueError for an option that cannot be, and for a start_powerSGD_iter that is too early; TypeError for a
    process_group that is none. So does an assignment to the attribute.

    Checkpoints: ``torch.save`` and ``torch.load`` (with its safe default), or state_dict() and load_state_dict(). Every
    rank has errors of its own: save one per rank to continue exactly, or consolidated_state_dict(state) for all ranks.
    """

    matrix_approximation_rank: int
    start_powerSGD_iter: int  # noqa: N815
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    compression_stats_logging_frequency: int
    batch_tensors_with_same_shape: bool
    iter: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    next_stats_report: int

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ):
        options = checked_options(
            {
                "matrix_approximation_rank": matrix_approximation_rank,
                "start_powerSGD_iter": start_powerSGD_iter,
                "min_compression_rate": min_compression_rate,
                "use_error_feedback": use_error_feedback,
                "warm_start": warm_start,
                "orthogonalization_epsilon": orthogonalization_epsilon,
                "random_seed": random_seed,
                "compression_stats_logging_frequency": compression_stats_logging_frequency,
                "batch_tensors_with_same_shape": batch_tensors_with_same_shape,
            }
        )
        self.process_group = process_group
        vars(self).update(options, **dict.fromkeys(PROGRESS, 0))
        self._memories = BucketMemories()
        # Memories taken over from torch, by their bucket's index, which is all that torch knows of them.
        self._from_torch: dict[int, dict[str, Any]] = {}
        self._waits_for_buckets = False
        self._is_compared = False
        # Whose errors were loaded, until it is known who uses them.
        self._errors_of: dict[str, Any] | None = None
        values = "; ".join(f"{name} = {value}" for name, value in options.items())
        logger.info("PowerSGD config: %s", values)

    def compression_stats(self) -> tuple[float, int, int]:
        """(compression rate, elements before compression, elements after), summed over the steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count the step when its last bucket comes by."""
        if bucket.is_last():
            self._waits_for_buckets = False
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "process_group":
            require_group("PowerSGDState", value)
        if name in OPTIONS:
            value = checked_options({**options_of(self), name: value})[name]
            self._is_compared = False
        super().__setattr__(name, value)

    def state_dict(self) -> dict[str, Any]:
        """All but the process group, in plain types and tensors of its own.

        "version": of this format. The options and the progress, by name. "buckets" maps a bucket's index to its "shapes"
        and "parameters" (numbers, in the order in which the hook first saw them), and, once it has been compressed, to the
        "error" (this rank's, flat as the bucket) and the "directions" (the Q [cols, rank] that the next step projects on;
        the same on all ranks). "from_torch": torch's memories that have not found their bucket yet. "errors_of": whose
        errors they are, {"rank", "world_size"}. "contents": the indices in "buckets" and "from_torch".
        """
        errors_of = self._errors_of or powersgd_checkpoint.owner_of(self.process_group)
        buckets, from_torch = self._memories.state_dict(), dict(self._from_torch)
        return powersgd_checkpoint.to_state_dict(self, errors_of, buckets, from_torch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, options included; the process group stays.

        The memory goes to the parameters that it was saved for, in whatever buckets a new model's first step
        brings them. Where that cannot be, it starts afresh, with a log line; errors of another rank's get one too.

        Raises KeyError for a state_dict with missing or unknown keys, ValueError for one of an unknown version or with
        anything that doesn't fit (sizes, dtypes, values that aren't finite, options that cannot be), TypeError for
        something else. Then the state is as it was.
        """
        self._take(powersgd_checkpoint.checked(state_dict))
        if (group := joined_group(self.process_group)) is not None:
            self._say_whose_errors(group)

    def _take(self, checked: dict[str, Any]) -> None:
        """Continue from a state_dict that has been checked."""
        self._memories.load_state_dict(checked["buckets"])
        vars(self).update({name: checked[name] for name in (*OPTIONS, *PROGRESS)})
        self._from_torch = checked["from_torch"]
        self._is_compared = False
        self._waits_for_buckets = bool(self._from_torch)
        self._errors_of = checked["errors_of"] if powersgd_checkpoint.has_errors(checked) else None

    def _say_whose_errors(self, group: dist.ProcessGroup) -> None:
        """Warn, once, where the errors that were loaded are another rank's."""
        warning = powersgd_checkpoint.anothers_errors(self._errors_of, group)
        self._errors_of = None
        if warning is not None:
            logger.warning(warning)

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        checked = powersgd_checkpoint.checked(state)
        logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group is "
            "desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.process_group = dist.group.WORLD if dist.is_initialized() else None
        self._memories = BucketMemories()
        # The group may still be set to another: whose errors these are is asked in the first compressed step.
        self._take(checked)

    def take_back(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Add to the error what a hook has given as a parameter's average, and nobody has used.

        average: flat, as in the bucket. For reducers that find out after a step that no rank has used the parameter, and
        leave its gradient as it is: what was given out of the error would be lost.
        """
        found = self._memories.memory_of(parameter)
        plan, offset = (found[0].plan, found[1]) if found else (None, 0)
        if plan is not None:
            real = torch.view_as_real(average) if average.is_complex() else average
            plan.add_to_error(offset, real.reshape(-1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def _compare(self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup) -> None:
        """In the state's first step: raise RuntimeError on every rank unless all have the same options and bucket."""
        self._is_compared = True
        options = options_of(self)
        values = {name: value for name, value in options.items() if name not in _MAY_DIFFER} | {
            "iter": self.iter,
            "hook": hook_name,
            "world size": group.size(),
            "dtype of the bucket": bucket.buffer().dtype,
            "index of the bucket": bucket.index(),
            "shapes in the bucket": [list(parameter.shape) for parameter in bucket.parameters()],
            "directions": self._memories.digest_of_directions(),
        }
        require_same_group(f"{hook_name}'s state", group)
        device = bucket.buffer().device
        unlike = require_same_on_all_ranks(
            f"{hook_name}'s state",
            values,
            group,
            device,
            "Give every rank the same hook, options, model and bucket caps; after a restart, a checkpoint of the same step",
            notes={"CPU capability": torch.backends.cpu.get_cpu_capability()} if device.type == "cpu" else {},
        )
        if unlike:
            logger.warning(
                "PowerSGD: the ranks run on unlike CPUs, whose sums differ in the last bit: %s. Replicas will drift apart by "
                "rounding errors; see docs/powersgd.md.",
                unlike,
            )

    def _shares(self, bucket: dist.GradBucket, square: bool) -> list[Share]:
        """The bucket, or what it consists of; logs what has no memory any more."""
        kind = {
            "dtype": bucket.buffer().dtype,
            "square": square,
            "rank": _plain(self.matrix_approximation_rank),
            "min_compression_rate": _plain(self.min_compression_rate),
            "error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            "epsilon": _plain(self.orthogonalization_epsilon),
        }
        shares, lost = self._memories.shares(bucket, kind)
        for memory in lost:
            what = "another layout" if memory.kind == kind else "other options"
            now = "than its checkpoint" if memory.plan is None else "now"
            logger.warning(
                "PowerSGD: bucket %s has %s %s: its memory starts afresh.", memory.index, what, now
            )
        return shares

    def _plan_of(self, share: Share, device: torch.device, group: dist.ProcessGroup) -> "ops.LowRankPlan":
        """The share's plan: kept, made with the memory of a checkpoint, or made anew."""
        memory = share.memory
        if memory.plan is not None and memory.plan.p_wire.device == device:
            return memory.plan
        if memory.plan is not None:  # the model has moved
            memory.saved = {"error": memory.plan.error(), "directions": memory.plan.directions()}
        memory.plan = ops.low_rank_plan(
            memory.layout,
            memory.kind["dtype"],
            device,
            error_feedback=self.use_error_feedback,
            warm_start=self.warm_start,
            # P is averaged here where torch sums it.
            epsilon=self.orthogonalization_epsilon / group.size(),
            seed=self._seed(share.memory.index, self.iter),
        )
        if memory.saved is not None:
            directions = memory.saved["directions"] or memory.plan.directions()
            memory.plan.load(memory.saved["error"], directions)
            memory.saved = None
        elif memory.index in self._from_torch:
            theirs = self._from_torch.pop(memory.index)
            if not powersgd_transfer.load(memory.plan, memory, theirs):
                logger.warning(
                    "PowerSGD: bucket %s has another layout than torch's: starts afresh.", share.memory.index
                )
        return memory.plan

    def _seed(self, index: int, step: int) -> int:
        """Of a bucket's random projection in a step, the same on every rank."""
        return (self.random_seed * 1_000_003 + step * 8_191 + index) % 2**63

    def _count(self, layouts: list[LowRankLayout], bucket: dist.GradBucket) -> None:
        for layout in layouts:
            self.total_numel_before_compression += layout.numel
            self.total_numel_after_compression += layout.wire_numel + layout.q_numel
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            logger.info(
                "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
                *(self.iter, before, after, rate),
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's matrices through factors of low rank, everything else exactly.

    For the first ``state.start_powerSGD_iter`` steps, allreduce_hook. Then, with M [n, m] a gradient seen as a
    matrix (its first dimension against the others), r the rank and W the world size:

    1. M ← gradient + error. 2. P ← M Q. 3. All-reduce P and, in the same collective, the tensors that are
    vectors or not worth compressing. 4. Orthonormalise P. 5. Q ← Mᵀ P. 6. All-reduce Q. 7. gradient ← P Qᵀ;
    error ← M − P Qᵀ.

    On the wire: two collectives, (n + m) · r elements per matrix, in the bucket's dtype. State: the error (as
    much memory as the compressed gradients) and the factors, per bucket. Source: Vogels, Karimireddy and Jaggi,
    "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

    A step with inf or NaN gives inf or NaN on every rank; the matrices it touched start afresh in the next.
    On CUDA: six kernel launches a bucket and step, and nothing waits for the host.

    Raises TypeError for a state of another kind, for what is no bucket, and for one that is not floating-point.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    """
    return _low_rank_hook("powerSGD_hook", state, bucket, square=False)


def batched_powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the whole bucket through factors of low rank, as one square matrix filled up with zeros.

    The steps of powerSGD_hook with one matrix per bucket, biases included. It sends less than powerSGD_hook and
    loses more: a bucket cut into rows of equal length has little of its layers' structure. Prefer
    powerSGD_hook, which costs no more here.

    Raises TypeError for a state of another kind, for what is no bucket, and for one that is not floating-point.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
        ddp_model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    """
    return _low_rank_hook("batched_powerSGD_hook", state, bucket, square=True)


def _low_rank_hook(
    name: str, state: PowerSGDState, bucket: dist.GradBucket, square: bool
) -> torch.futures.Future[torch.Tensor]:
    require_bucket(name, bucket)
    if not isinstance(state, PowerSGDState):
        hint = ": from_torch converts torch's" if hasattr(state, "q_memory_dict") else ""
        raise TypeError(f"{name} takes a gradcomp PowerSGDState as its state, got {state!r}{hint}")
    group, buffer = resolve_group(name, state.process_group, "state.process_group"), bucket.buffer()
    require_dense_floats(name, buffer)
    if not state._is_compared:
        state._compare(name, bucket, group)
    shares = state._shares(bucket, square)
    if state.iter < state.start_powerSGD_iter or state._waits_for_buckets:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(group, bucket)
    if state._errors_of is not None:
        state._say_whose_errors(group)
    work = [
        # A step ends by choosing what the next one projects on.
        (share, state._plan_of(share, buffer.device, group), state._seed(share.memory.index, state.iter + 1))
        for share in shares
    ]

    def sequence() -> torch.Tensor:
        for share, plan, seed in work:
            flat = share.gather(buffer)
            _compressed_average(plan, flat, seed, group, left_out=share.matrices_left_out(bucket))
            share.scatter(flat, buffer)
        return buffer

    future = in_order(buffer.device, sequence)
    state._count([plan.layout for _, plan, _ in work], bucket)
    state.maybe_increase_iter(bucket)
    return future


def _compressed_average(
    plan: "ops.LowRankPlan", flat: torch.Tensor, seed: int, group: dist.ProcessGroup, left_out: list[int]
) -> None:
    """The steps of powerSGD_hook on a flat bucket, in place.

    left_out: matrices of which this rank sends no P. Where no rank sends any, nothing is taken out of the errors.
    """
    scale = 1 / group.size()
    plan.project(flat, scale)
    for index in left_out:
        plan.p_wire[plan.layout.place_of_p(index)].zero_()
    dist.all_reduce(plan.p_wire, group=group)
    plan.back_project(flat, scale)
    if plan.q_wire.numel():
        dist.all_reduce(plan.q_wire, group=group)
    plan.reconstruct(flat, seed)


def from_torch(state: Any, *, wait_for_buckets: bool = True) -> PowerSGDState:
    """A PowerSGDState that continues from torch's: hyperparameters, progress, errors and factors.

    state: a torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState, as
    ``torch.load(..., weights_only=False)`` gives it. Its errors of tensors that it did not compress are left
    behind: here those are averaged exactly.
    wait_for_buckets: torch knows its memories by the number of their bucket only, and DDP arranges a new model's
    buckets after its first step. So that step is a plain all-reduce, and the memories go to the buckets of the
    next. False: the first step's buckets are torch's already, as in a loop of your own.

    Raises TypeError for anything else.
    """
    if not hasattr(state, "q_memory_dict"):
        raise TypeError(f"from_torch takes a PowerSGDState of torch's, got {type(state).__name__}")
    names = set(OPTIONS) - {"random_seed"}
    ours = PowerSGDState(state.process_group, **{name: getattr(state, name) for name in names})
    vars(ours).update({name: rule(name, getattr(state, name)) for name, rule in PROGRESS.items()})
    ours._from_torch = powersgd_transfer.memories_of(state)
    ours._waits_for_buckets = wait_for_buckets
    return ours
