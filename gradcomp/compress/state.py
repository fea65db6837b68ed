"""The state of a compressing hook, and the hook that works with any compressor.

    hook(state, bucket) ──▶ state.average
        phase       how this step's buckets are averaged: plainly, or by a class of compressors
        states      what is kept of the bucket's parameters, and the bucket's compressor
        stages      the compressor's kernels and collectives, on a side stream (CUDA) or in the Pipeline (CPU)

A bucket's index() and is_last() are hints only. In a static graph's first step, torch gives every bucket the
index 0 and calls no bucket the last. With skip_all_reduce_unused_params the last bucket may not come at all.
So a step ends in one of three ways:

    a bucket says that it is the last (the Reducer's last bucket of a step always does)
    backward ends, and gradients or parameters of its first bucket change before the next bucket comes: an
        optimizer steps, or zero_grad. Without a change, the next backward goes on with the step
        (several backwards of one forward; reentrant checkpoints, which have their own backwards)
    a bucket brings a parameter for the second time: the previous step has ended, and a new step begins

undo_step takes back all steps since a change, such as the steps of several models.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gradcomp.device import has_streams, pinned

from ..comm.all_reduce import average_in_place
from ..comm.announcement import say
from ..comm.bucket import ShardBucket, checked_bucket, require_bucket
from ..comm.exchange import reduce_scatter
from ..comm.pipeline import Pipeline, average_in_stages
from ..comm.process_group import Explaining, joined_group
from ..comm.streams import Future
from ..comm.torch_private import current_graph_task_id, queue_callback
from ..rules import described
from .agreement import Place, agree
from .compressor import Compressor
from .parameter_states import Bucket
from .saved_state import SavedState
from .settings import Settings, logger_of, option

__all__ = ["CompressorState", "Phase", "compress_hook", "option"]

# A state with more exact steps than this before compression says so in its first step.
LONG_START = 10
UNCLAIMED = (
    "the checkpoint has errors of parameters that the first step did not bring: %s. They wait for these. "
    "Likely cause: another model, or the runs differ in bucket_cap_mb, find_unused_parameters or wrapper, "
    "and one has no names of parameters: call state.number_parameters(model.named_parameters()) in both"
)
NUM_STEPS = 40  # whose gradients' sizes are compared
NUM_PARTS, PART_NUMEL = 8, 512  # of a bucket, as far as it is that large
# A loss spike jumps twice, a GradScaler's scale by a factor of 2.
JUMP, MANY_JUMPS = 8, 6
JUMPED = (
    f"%s: gradients became {JUMP} or more times larger or smaller from one step to the next %d times in "
    f"{NUM_STEPS} steps, but errors keep the unit of the gradients that left them. Likely cause: averages "
    "are divided by each step's tokens or samples. Multiply the loss instead, by "
    "gradcomp.loss_factor(count), or call state.rescale_errors before every backward; see "
    "docs/weighted_averages.md."
)


class Phase(NamedTuple):
    """How a state averages the buckets of a step.

    name: the algorithm's name in log lines.
    compressor: the class of the buckets' compressors; None for plain averages.
    options: the compressors' options.
    warms_up: later phases. Their compressors are warmed up in these steps.
    is_flat: True to average without nodes, whatever the state's ranks_per_node.
    """

    name: str
    compressor: type[Compressor] | None
    options: Any
    warms_up: "tuple[Phase, ...]" = ()
    is_flat: bool = False


class CompressorState(SavedState):
    """The state that compress_hook is registered with: makes and keeps a compressor for every bucket.

    compressor: a subclass of Compressor, called as compressor(bucket: BucketSpec, options) for every bucket.
    options: a frozen dataclass of plain values, which raises ValueError for invalid values; None for a
        compressor without options.
    process_group: the group that averages; None for the default one. A DeviceMesh of two dimensions, (between
        nodes, within nodes), also sets ranks_per_node.
    start_iter: steps of plain all-reduce before compression starts; at least 2, because DDP rebuilds its
        buckets after the first step.
    random_seed: the seed for a compressor's random choices; the same on all ranks.
    compression_stats_logging_frequency: steps between log lines with compression_stats().
    ranks_per_node: the number of ranks that share a network card, for hierarchical compressors; 1 to
        average without nodes. "auto": torchrun's LOCAL_WORLD_SIZE if the group is the default one, and there
        are several nodes of equally many ranks that follow one another; otherwise 1.

    keep_undo: assign True, and undo_step can take back the last step. That needs one more copy of the errors
        (with PowerSGD of P and Q, too), which each step writes.
    recorder: the Recorder that records the state's steps, set by the Recorder itself; None without one.
    shard_group: with compress_replicas, the ranks that hold the other shards of this replica; otherwise None.

    Raises TypeError for an argument of another type, ValueError for an invalid setting. Assigning to an
    attribute raises the same errors.

    Checkpoints: use state_dict() and load_state_dict(). Every rank has its own errors: save one checkpoint
    per rank to continue exactly, or consolidated_state_dict(state) once for all ranks. With
    torch.distributed.checkpoint, use per_rank_state_dict and load_from_dcp.
    """

    _announces_phases = True

    def __init__(
        self,
        compressor: type[Compressor],
        options: Any = None,
        process_group: Any = None,
        *,
        start_iter: int = SavedState._default_start_iter,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        ranks_per_node: int | str | None = None,
    ):
        if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
            raise TypeError(f"CompressorState takes a subclass of Compressor, got {compressor!r}")
        # Stubs don't have __dataclass_params__, hence getattr.
        is_frozen = getattr(getattr(options, "__dataclass_params__", None), "frozen", False)
        if options is not None and (isinstance(options, type) or not is_frozen):
            raise TypeError(
                f"CompressorState takes a frozen dataclass or None as its options, got {options!r}"
            )
        settings = Settings(options, start_iter, random_seed, compression_stats_logging_frequency)
        self._require_start(settings.start_iter, options)
        if not hasattr(type(self), "_compressor"):
            self._compressor, self._options_class = compressor, type(options)
        self._reset(None, settings)
        if ranks_per_node is not None:
            self.ranks_per_node = ranks_per_node
        self.process_group = process_group

    def _reset(self, process_group: Any, settings: Settings) -> None:
        """Set all attributes to their values before the first step."""
        super()._reset(process_group, settings)
        self._place = Place()  # in the last bucket's group
        self._steps: Steps = Steps()
        self._phase: Phase | None = None  # of the last bucket
        self._sizes: GradientSizes | None = GradientSizes()  # None once judged
        self._pipeline = Pipeline()
        self.shard_group: dist.ProcessGroup | None = None
        # True once compress_reduce_scatter has taken the state: no rank then sees the averages of all.
        self.has_shards = False

    # --- steps ---

    @property
    def iter(self) -> int:
        """The number of steps so far."""
        return self._steps.num + self._steps.is_over

    @iter.setter
    def iter(self, value: int) -> None:
        self._steps, self._states.lost_undo = Steps(value), value - 1

    def phase(self, options: Any, group: dist.ProcessGroup, device: torch.device) -> Phase:
        """Return how the current step averages buckets with these options.

        Called before the step's first bucket, in the same place on all ranks, and for each bucket with other
        options than the last phase's.

        group, device: the bucket's.
        """
        compressing = Phase(self.algorithm, self._compressor, options)
        return self._starting(compressing) if self._steps.num < self.settings.start_iter else compressing

    def _starting(self, compressing: Phase) -> Phase:
        """Return how the steps before compression average."""
        return compressing._replace(compressor=None, warms_up=(compressing,))

    def end_step(self) -> None:
        """End and count the step. Call this after the last bucket yourself if no bucket reports is_last()."""
        phase, steps = self._phase, self._steps
        if phase is not None and steps.gradient_bytes:
            if self._announces_phases and phase.name not in self.announced:
                self._announce_phase(phase.name)
        elif not self.announced and self.start_iter - steps.num > LONG_START:
            self.announced.add("")
            start = f"{self.algorithm}: exact averages until step {self.start_iter}"
            say(start, joined_group(self.process_group))
        steps.end()
        self._states.end_step()
        if self._states.loaded:
            self._warn_of_keys(UNCLAIMED, self._states.unclaimed())
        if phase is not None and phase.compressor is not None and steps.num >= self.next_stats_report:
            self._report_stats()
        self.is_compared |= self.compared_in is not None
        steps.num += 1

    # --- averages ---

    @classmethod
    def refuse(cls, hook_name: str, state: Any, bucket: Any) -> NoReturn:
        """Raise TypeError for a wrong bucket, or else for a state that isn't of this class."""
        require_bucket(hook_name, bucket)
        whose = ", torch's own" if hasattr(state, "q_memory_dict") else ""
        got = f"{described(state)}{whose}"
        raise TypeError(f"{hook_name} takes a gradcomp {cls.__name__} as its state, got {got}")

    def average(self, hook_name: str, bucket: dist.GradBucket, options: Any = None) -> Future:
        """Average a hook's bucket: plainly in the first steps, with compressors in later steps.

        A ShardBucket is reduce-scattered instead: its shard gets the sum, and its buffer is of no use.

        hook_name: the hook's name in messages.
        options: of the bucket, comparable by ==; None for the state's. If they change, the errors stay.

        Raises TypeError if the bucket is not a dense floating-point bucket. In the state's first step, raises
        RuntimeError on every rank if the ranks differ.
        """
        buffer, group = checked_bucket(hook_name, bucket, self.process_group, "state.process_group")
        parameters = bucket.parameters()  # torch makes a list of them in every call
        watched = getattr(bucket, "watched", parameters)  # which torch's buckets lack
        if not self._steps.take(parameters, watched):
            self.end_step()
            self._steps.take(parameters, watched)
        is_first = self._steps.num_buckets == 1
        if is_first:
            self._steps.is_undoable = self.keep_undo
            if not self.keep_undo:
                self._states.lost_undo = self._steps.num
        place, size, rank = self._place, group.size(), group.rank()
        if (place.group and place.group()) is not group or (place.size, place.rank) != (size, rank):
            self._states.give_all_back()
            self._place = Place(weakref.ref(group), size, rank)
            self._expect_comparison()
        if self.compared_in is None or self.compared_in == self._steps.num:  # all buckets of that step
            self.compared_in = None  # if the comparison fails
            agreed = agree(self, hook_name, bucket, group)
            if agreed != self._place:
                self._states.give_all_back()
                self._place = agreed
            self._warn_of_another_ranks_errors(group)
            self.compared_in = self._steps.num
        options = self.settings.options if options is None else options
        if is_first or self._phase is None or self._phase.options is not options:
            self._phase = self.phase(options, group, buffer.device)
        phase = self._phase
        own = self._states.bucket_of(bucket, phase.options)
        if phase.compressor is None:
            future = self._average_plainly(hook_name, bucket, group)
        else:
            future = self._average_compressed(hook_name, bucket, group, phase, own)
        if phase.warms_up and not own.is_warmed_up:
            own.is_warmed_up = True
            for later in phase.warms_up:  # while this step's collectives are in progress
                assert later.compressor is not None
                later.compressor.warm_up(own.spec(bucket, self._place_in(later)), later.options)
        if bucket.is_last():
            self.end_step()
        return future

    def _average_plainly(self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Future:
        buffer, operation = bucket.buffer(), Explaining.averaging(bucket.index(), hook_name, group)
        if isinstance(bucket, ShardBucket):
            summing = reduce_scatter(bucket.shard, buffer.view(group.size(), -1), group)
            return average_in_stages(bucket, summing, operation, self._pipeline)
        if self.recorder is not None:
            self.recorder.add_plain(self.iter, bucket.index(), buffer, group)
        return average_in_place(bucket, group, operation, self._pipeline)

    def _average_compressed(
        self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, phase: Phase, own: Bucket
    ) -> Future:
        """Average a bucket with the phase's compressor."""
        buffer, step = bucket.buffer(), self._steps.num
        # A compressor ends a step by choosing the next step's random projections, with the next seed.
        seeds = [self.settings.random_seed * 1_000_003 + number * 8_191 for number in (step, step + 1)]
        seed, next_seed = (each % 2**62 + own.draw for each in seeds)
        made_for = phase.compressor, buffer.device, phase.is_flat
        if own.made_for != made_for:
            assert phase.compressor is not None
            spec = own.spec(bucket, self._place_in(phase), seed)
            lost = self._states.make_compressor(own, phase.compressor, spec)
            self._warn_of_keys("the checkpoint has other shapes of %s, whose errors start at zero", lost)
            own.made_for = made_for
        compressor, is_first = own.compressor, self._steps.num_buckets == 1
        assert compressor is not None
        if self._sizes is not None and is_first:
            num_jumps = self._sizes.note(step, own.keys, buffer)
            if num_jumps is not None:
                self._sizes = None
                made = [each for each in self._states._buckets if each.compressor is not None]
                if num_jumps >= MANY_JUMPS and any(each.current_error() is not None for each in made):
                    logger_of(self).warning(JUMPED, self.algorithm, num_jumps)
        if compressor.is_plain and not own.waits:
            future = self._average_plainly(hook_name, bucket, group)
        else:
            if own.undo is not None and own.undo[0] < step:
                self._states.lost_undo = max(self._states.lost_undo, own.undo[0])
            running = own.stages(bucket, group, next_seed, step if self._steps.is_undoable else None)
            if self.recorder is not None and compressor.is_plain:  # as on ranks without pending errors
                self.recorder.add_plain(step, bucket.index(), buffer, group)
            elif self.recorder is not None:
                running = self.recorder.recorded(running, step, bucket.index(), buffer, own, group)
            if own.operation is None or own.operation[0] != hook_name:
                own.operation = hook_name, Explaining.averaging(bucket.index(), hook_name, group)
            future = self._pipeline.add(bucket, running, own.operation[1], is_first=is_first)
        self.total_numel_before_compression += buffer.numel()
        self.total_numel_after_compression += compressor.sent_numel
        self._steps.gradient_bytes += buffer.nbytes
        self._steps.sent_bytes += compressor.sent_numel * buffer.itemsize
        return future

    def _place_in(self, phase: Phase) -> Place:
        return replace(self._place, ranks_per_node=1, place=0) if phase.is_flat else self._place


def compress_hook(state: CompressorState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the state's compressor; plainly in the first state.start_iter steps.

    On the wire: the compressor's bytes. On CUDA all runs on a side stream, in bucket order.

    Raises TypeError if the state is not a CompressorState or the bucket is not a floating-point bucket.

    Example::

        ddp_model.register_comm_hook(CompressorState(TopK, TopKOptions(density=0.01)), compress_hook)
    """
    if not isinstance(state, CompressorState):
        CompressorState.refuse("compress_hook", state, bucket)
    return state.average("compress_hook", bucket)


class Steps:
    """The number of steps, and the buckets of the current one, identified by their parameters.

    num: the number of steps before the current one.
    first: the first step since gradients or parameters were changed.
    is_undoable: True if undo_step() can take the steps since `first` back.
    is_over: True if backward has ended since the last bucket.
    is_joined: True if a backward has ended in the current step, and another one has gone on with it.
    num_buckets: the number of buckets so far.
    gradient_bytes: the bytes of the compressed buckets so far.
    sent_bytes: the bytes that a rank has sent for these buckets.
    """

    def __init__(self, num: int = 0) -> None:
        self.num = self.first = num
        self.is_undoable = False
        self._of_backward, self._latest = set[int](), -1  # the last backward's parameters, and its number
        self._running: Any = lambda: None  # returns the callback at the end of the backward under way
        self._taken: dict[int, int] = {}  # parameters since `first` began, and the last step of each
        self._watched: list[weakref.ref[torch.Tensor]] = []  # of the backward's first bucket
        self._left: list[Any] | None = None  # as the last backward has left them; None during a backward
        self.end()

    def end(self) -> None:
        """Begin the next step."""
        self.is_over = self.is_joined = False
        self.num_buckets = self.gradient_bytes = self.sent_bytes = 0
        if self._running() is None and self._left is None:  # outside of a backward
            self._taken = {}

    def take(self, parameters: Sequence[torch.Tensor], watched: Sequence[torch.Tensor]) -> bool:
        """Add a bucket, unless the step has ended before it.

        watched: a change of them, or of their gradients, between two backwards ends the step.

        Returns whether the bucket was added. Sets is_over at the end of the backward that brings it.
        """
        new, backward = dict.fromkeys(map(id, parameters), self.num), current_graph_task_id()
        # A reentrant checkpoint's backward is within another one, whose number is smaller.
        goes_on = backward != -1 and (self._running() is not None or backward < self._latest)
        left = None if goes_on else self._left
        is_changed = left is not None and (backward == -1 or left != self._versions())
        # FSDP2 reduces a module that runs twice in a forward twice in one backward.
        of_others = new.keys() - (self._of_backward if goes_on else ())
        last = max(map(self._taken.get, of_others, repeat(-1)), default=-1)
        if self.num_buckets and (is_changed or last == self.num):
            return False
        if is_changed or last >= 0 or not self._taken:  # earlier averages can't be taken back any more
            self._taken = {each: step for each, step in self._taken.items() if step == self.num}
            self.first = self.num
        self._taken |= new
        self.is_joined |= self.is_over and not goes_on
        self.is_over, self._left = False, None
        self.num_buckets += 1
        if not goes_on:
            self._of_backward, self._watched = set(), list(map(weakref.ref, watched))
        self._of_backward.update(new)
        if backward != -1 and self._running() is None:
            # A callback of a callback comes after DDP's, which writes the averages to the gradients. It lives
            # as long as the backward, which may fail.
            end = partial(queue_callback, self._end_backward)
            self._running, self._latest = weakref.ref(end), max(self._latest, backward)
            queue_callback(end)
        return True

    def _end_backward(self) -> None:
        self._running, self._left, self.is_over = lambda: None, self._versions(), self.num_buckets > 0

    def _versions(self) -> list[Any]:
        """Return numbers that grow with every change of the watched parameters and their gradients."""
        watched = [ref() for ref in self._watched]
        watched += [None if each is None else each.grad for each in watched]
        return [None if each is None else each.is_inference() or each._version for each in watched]


class GradientSizes:
    """The norms of some parts of every step's first bucket: a unit that changes from step to step shows.

    norms: [NUM_STEPS, NUM_PARTS] in fp32, divided by the step's scale; None before the first step.
    keys: of the bucket; a state may have several models.
    num_steps, last_step: the number of steps noted, and the last one's own number.
    scale: the product of all factors of rescale_errors, so far.
    """

    def __init__(self) -> None:
        self.norms: torch.Tensor | None = None
        self.keys: list[str] = []
        self.num_steps, self.last_step, self.scale = 0, -1, 1.0
        self._copied: torch.cuda.Event | None = None

    def note(self, step: int, keys: list[str], buffer: torch.Tensor) -> int | None:
        """Note a step's first bucket. Returns num_jumps of NUM_STEPS steps, None before it is known."""
        if self.norms is None or step < 2:  # DDP rebuilds its buckets after the first step
            self.keys, self.num_steps = keys, 0
            self.norms = torch.zeros(NUM_STEPS, NUM_PARTS, dtype=torch.float32, device=buffer.device)
        if self.keys != keys:
            return None
        if self.num_steps == NUM_STEPS:
            return self.num_jumps()
        stride, wide = buffer.numel() // NUM_PARTS, torch.promote_types(buffer.dtype, torch.float32)
        parts = buffer.as_strided((NUM_PARTS, min(stride, PART_NUMEL)), (stride, 1))
        self.norms[self.num_steps] = torch.linalg.vector_norm(parts, dim=1, dtype=wide) / self.scale
        self.num_steps, self.last_step = self.num_steps + 1, step
        return None

    def num_jumps(self) -> int | None:
        """Return how often most parts jumped, all in one direction; None while CUDA copies the norms."""
        assert self.norms is not None
        if has_streams(device := self.norms.device):
            host = pinned(torch.empty(self.norms.shape, dtype=torch.float32, device="cpu"), device)
            self.norms = host.copy_(self.norms, non_blocking=True)
            self._copied = torch.cuda.current_stream(device).record_event()
        if self._copied is not None and not self._copied.query():
            return None
        logs = self.norms.log2().diff(dim=0)
        is_known = logs.isfinite()  # not of zeros, inf and NaN
        limit = math.log2(JUMP)
        in_one_direction = (~is_known | (logs >= limit)).all(1) | (~is_known | (logs <= -limit)).all(1)
        return int((in_one_direction & (is_known.sum(1) > NUM_PARTS // 2)).sum())
