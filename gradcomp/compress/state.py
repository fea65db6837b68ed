"""The state of a compressing hook, and the hook that works with any compressor.

    hook(state, bucket) ──▶ state.average
        phase       how this step's buckets are averaged: plainly, or by a class of compressors
        states      what is kept of the bucket's parameters, and the bucket's compressor
        stages      the compressor's kernels and collectives, on a side stream (CUDA) or in the Pipeline (CPU)

A bucket's index() and is_last() are hints only. In a static graph's first step, torch gives every bucket the
index 0 and calls no bucket the last. With skip_all_reduce_unused_params the last bucket may not come at all.
So a step ends in one of three ways:

    a bucket says that it is the last
    backward ends: the step is over, unless the next bucket brings parameters that are new in the step
        (several backwards of one forward; reentrant checkpoints, which have their own backwards)
    a bucket brings a parameter for the second time: the previous step has ended, and a new step begins
"""

import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradcomp import ops

from ..comm.all_reduce import average_in_place
from ..comm.bucket import ShardBucket, checked_bucket
from ..comm.consistency import require_same_group, require_same_on_all_ranks
from ..comm.delay import MIN_DELAY_S, round_trip_s
from ..comm.exchange import reduce_scatter
from ..comm.nodes import LaunchedNodes, groups_of_mesh, require_ranks_per_node
from ..comm.pipeline import Pipeline, Stages, average_in_stages, explained, is_waited_for_at_once
from ..comm.process_group import Operation, joined_group, require_group
from ..comm.streams import Future
from ..rules import described
from . import checkpoint
from .announcement import announce_start, say
from .checkpoint import PROGRESS, Settings, another_ranks_errors, owner_of, progress_of
from .compressor import Compressor, ShardCompressor, errors_in
from .parameter_keys import is_name
from .parameter_states import Bucket, Entries, ParameterStates

# A state with more exact steps than this before compression says so in its first step.
LONG_START = 10


class Phase(NamedTuple):
    """How a state averages the buckets of a step.

    name: the algorithm's name in log lines.
    compressor: the class of the buckets' compressors; None for plain averages.
    options: the compressors' options.
    warms_up: later phases, whose compressors are to be warmed up in these steps.
    is_flat: True to average without nodes, whatever the state's ranks_per_node.
    """

    name: str
    compressor: type[Compressor] | None
    options: Any
    warms_up: "tuple[Phase, ...]" = ()
    is_flat: bool = False


class _Attribute:
    """A state's attribute that stands for a field of its options or settings. Assignment checks the value."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: Any, owner: type) -> Any:
        return self if state is None else getattr(getattr(state, self._part), self._name)

    def __set__(self, state: Any, value: Any) -> None:
        state.change(**{self._part: replace(getattr(state, self._part), **{self._name: value})})


def option() -> Any:
    """Return a class attribute that stands for the field of the same name in a state's options."""
    return _Attribute("options")


def setting() -> Any:
    """Return a class attribute that stands for the field of the same name in a state's settings."""
    return _Attribute("settings")


class CompressorState:
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
    ranks_per_node: the number of ranks that share a network card, for compressors that average by nodes; 1 to
        average without nodes. "auto": torchrun's LOCAL_WORLD_SIZE if the group is the default one, there are
        several nodes, and a node's ranks follow one another; otherwise 1.

    recorder: the Recorder that records the state's steps, set by the Recorder itself; None without one.
    shard_group: with compress_replicas, the ranks that hold the other shards of this replica; otherwise None.

    Raises TypeError for an argument of another type, ValueError for an invalid setting. Assigning to an
    attribute raises the same errors.

    Checkpoints: use state_dict() and load_state_dict(). Every rank has its own errors: save one checkpoint
    per rank to continue exactly, or consolidated_state_dict(state) once for all ranks. With
    torch.distributed.checkpoint, use per_rank_state_dict and load_from_dcp.

    Example::

        state = CompressorState(TopK, TopKOptions(density=0.01))
        ddp_model.register_comm_hook(state, compress_hook)
    """

    min_start_iter = 2
    _default_ranks_per_node: int | str = 1
    _default_start_iter = 2
    # A subclass with one fixed compressor sets both: its pickled states hold plain types and name no class.
    _compressor: type[Compressor]
    _options_class: type

    start_iter: int = setting()
    random_seed: int = setting()
    compression_stats_logging_frequency: int = setting()

    total_numel_before_compression: int
    total_numel_after_compression: int
    next_stats_report: int

    def __init__(
        self,
        compressor: type[Compressor],
        options: Any = None,
        process_group: Any = None,
        *,
        start_iter: int = _default_start_iter,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        ranks_per_node: int | str | None = None,
    ):
        if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
            raise TypeError(f"CompressorState takes a subclass of Compressor, got {compressor!r}")
        if options is not None and (isinstance(options, type) or not _is_frozen(options)):
            raise TypeError(
                f"CompressorState takes a frozen dataclass or None as its options, got {options!r}"
            )
        settings = Settings(start_iter, random_seed, compression_stats_logging_frequency)
        self._require_start(settings.start_iter, options)
        self._compressor, self._options_class = compressor, type(options)
        self._reset(None, settings, options)
        if ranks_per_node is not None:
            self.ranks_per_node = ranks_per_node
        self.process_group = process_group

    def _reset(self, process_group: Any, settings: Settings, options: Any) -> None:
        """Set all attributes to their values before the first step."""
        self._process_group = process_group
        self._ranks_per_node = self._default_ranks_per_node
        # Of the last step: (ranks per node, the nodes in words), or None without nodes. No process groups:
        # the state may outlive them.
        self._nodes: tuple[int, str] | None = None
        self._round_trip_s = 0.0  # between ranks, or nodes
        self._settings, self._options = settings, options
        # The group of the last step's collectives; None before the first step.
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._num_steps = self.next_stats_report = 0
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self._step = _StepBuckets()
        self._phase: Phase | None = None
        self._announced: set[str] = set()
        self._states = ParameterStates()
        self._pipeline = Pipeline()
        self._is_compared = self._was_loaded = self._discards_step = self._is_resumed = False
        # The rank that saved the loaded errors, until this process's own rank is known.
        self._errors_of: dict[str, Any] | None = None
        self.recorder: Any = None
        self.shard_group: dist.ProcessGroup | None = None
        # True once compress_reduce_scatter has taken the state: no rank then sees the averages of all.
        self.has_shards = False

    # --- options ---

    @property
    def algorithm(self) -> str:
        """The algorithm's name in messages, log lines and checkpoints."""
        return self._compressor.__name__

    @property
    def options(self) -> Any:
        """The compressor's options."""
        return self._options

    @property
    def settings(self) -> Settings:
        """The state's settings, which every kind of state has."""
        return self._settings

    def change(self, *, options: Any = None, settings: Settings | None = None) -> None:
        """Use other options or settings from now on. The next step compares the ranks again.

        options, settings: the new values; None for no change.

        Raises ValueError if compression would start too early for the options.
        """
        options, settings = options or self._options, settings or self._settings
        self._require_start(settings.start_iter, options)
        if self.iter:
            own, new = (
                {**checkpoint.as_dict(some), **asdict(other)}
                for some, other in ((self._options, self._settings), (options, settings))
            )
            if texts := checkpoint.changes(own, new):
                shown = ", ".join(texts)
                _logger_of(self).info("%s: changed at step %s: %s.", self.algorithm, self.iter, shown)
        self._options, self._settings, self._is_compared = options, settings, False

    @property
    def process_group(self) -> Any:
        """The process group that averages; None for the default one. Assign to change it."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        if isinstance(group, DeviceMesh):
            group, self._ranks_per_node = groups_of_mesh(group)
        require_group(type(self).__name__, group)
        self._process_group, self._is_compared = group, False

    @property
    def ranks_per_node(self) -> int | str:
        """The number of ranks that share a network card, or "auto". Assign to change it."""
        return self._ranks_per_node

    @ranks_per_node.setter
    def ranks_per_node(self, value: int | str) -> None:
        self._ranks_per_node, self._is_compared = require_ranks_per_node(value), False

    def _require_start(self, start_iter: int, options: Any) -> None:
        """Raise ValueError if start_iter is too early for compression with these options."""
        if start_iter < self.min_start_iter:
            raise ValueError(
                f"start_iter is {start_iter}, but DDP rebuilds its buckets after the first step: at least "
                f"{self.min_start_iter}"
            )

    def compared_options(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name."""
        shared = {"start_iter": self.start_iter, "random_seed": self.random_seed}
        return {"compressor": self.algorithm, **shared, **checkpoint.compared(self._options)}

    # --- steps ---

    @property
    def iter(self) -> int:
        """The number of steps so far."""
        return self._num_steps + self._step.is_over

    @iter.setter
    def iter(self, value: int) -> None:
        self._num_steps = value
        self._step.end()

    def phase(self, options: Any) -> Phase:
        """Return how the current step averages buckets with these options."""
        compressing = Phase(self.algorithm, self._compressor, options)
        if self.iter < self.start_iter:
            return Phase(self.algorithm, None, options, warms_up=(compressing,))
        return compressing

    def claims(self, options: Any) -> dict[str, Any]:
        """Return what averages with these options promise; see Compressor.claims."""
        return self._compressor.claims(options)

    @property
    def is_compared(self) -> bool:
        """True if a step has compared the ranks since options or group changed or a checkpoint was loaded."""
        return self._is_compared

    @property
    def can_reduce_scatter(self) -> bool:
        """True if the state's compressor can reduce-scatter a ShardBucket."""
        return self._compressor.of_shards is not None

    @property
    def has_model(self) -> bool:
        """True if buckets have brought a model's parameters, or number_parameters has named them."""
        return self._states.have_parameters

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (compression rate, elements before compression, elements after), summed over all steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def number_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Identify a model's parameters by their names, in this run and in checkpoints.

        named_parameters: model.named_parameters().

        Call it before the first step if you use torch's DDP, which tells a hook no names. gradcomp's wrapper
        and Reducer, CommHook, compress_replicas and compress_reduce_scatter call it for you.

        Without names, parameters are known by the first step's buckets. If the first step of a resumed run
        has other buckets (another bucket_cap_mb, say), the saved errors can't be used, and a warning is
        logged.

        Raises TypeError for anything but pairs of a name and a tensor; ValueError if a checkpoint has these
        names, but buckets have brought the parameters already.

        Example::

            state.number_parameters(model.named_parameters())
            ddp_model.register_comm_hook(state, hook)
        """
        self._states.name(named_parameters)

    @contextmanager
    def discard_step(self) -> Iterator[None]:
        """Keep the errors unchanged during a with block, for backwards whose gradients you throw away.

        A step subtracts from the errors the part that it sends. That part is lost if the optimizer never gets
        the average. Example: the discriminator's gradients when a GAN's generator trains through it. The step
        is still averaged and counted. If you don't need the averages, prefer no_sync(), which sends nothing.

        Every rank must use it for the same steps.

        Example::

            with state.discard_step():
                generator_loss(ddp_discriminator(fake)).backward()
            ddp_discriminator.zero_grad()
        """
        before, self._discards_step = self._discards_step, True
        try:
            yield
        finally:
            self._discards_step = before

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count the step if this is its last bucket."""
        if bucket.is_last():
            self.end_step()

    def end_step(self) -> None:
        """End and count the step. Call this after the last bucket yourself if no bucket reports is_last()."""
        gradient_bytes, sent_bytes = self._step.gradient_bytes, self._step.sent_bytes
        self._step.end()
        self._states.end_step()
        if self._was_loaded:
            self._was_loaded = False
            self._warn_of_unclaimed()
        phase = self.phase(self._options)
        if phase.compressor is not None and self.iter >= self.next_stats_report:
            self._report_stats()
        if gradient_bytes:
            self._has_compressed(phase, gradient_bytes, sent_bytes)
        elif not self._announced and self.start_iter - self.iter > LONG_START:
            self._announced.add("")
            group = joined_group(self.process_group)
            say(f"{self.algorithm}: exact averages until step {self.start_iter}", group)
        self._is_compared = True
        self._num_steps += 1

    def _has_compressed(self, phase: Phase, gradient_bytes: int, sent_bytes: int) -> None:
        """Announce a phase's first compressed step; called at the end of every compressed step.

        gradient_bytes: the bytes of the step's gradients.
        sent_bytes: the bytes that a rank has sent in the step; with nodes, a node.
        """
        if phase.name not in self._announced:
            self._announced.add(phase.name)
            group = joined_group(self.process_group)
            between = self._nodes and self._nodes[1]
            announce_start(
                phase.name,
                self.iter,
                gradient_bytes,
                sent_bytes,
                group,
                between,
                is_resumed=self._is_resumed and self.iter > self.start_iter,
                round_trip_s=self._round_trip_s if self._has_delay else None,
            )
            if sent_bytes >= gradient_bytes:
                _logger_of(self).warning("%s saves no bytes%s.", phase.name, self._why_nothing_is_saved())

    def _why_nothing_is_saved(self) -> str:
        """Return words that go on after "saves no bytes", with the likely cause."""
        return ""

    def _begin_step(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Prepare a step, before the first of its buckets is averaged. All ranks come here at the same step.

        device: the bucket's.
        """

    def take_back(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Add a parameter's unused average back to the error.

        average: the average, flat, as in the bucket.

        A Reducer calls this if it learns after a step that no rank has used the parameter. The parameter's
        gradient then stays unchanged, and the errors that the average contains would be lost.
        """
        if self._discards_step:
            return
        real = torch.view_as_real(average) if average.is_complex() else average
        values = real.reshape(-1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        self._states.add_to_error(parameter, values)

    def rescale_errors(self, factor: float) -> None:
        """Multiply this rank's errors by factor, after the scale of the gradients has changed.

        factor: the new scale divided by the old scale. A factor of 1 does nothing.

        AMP's GradScaler multiplies losses by a scale, so gradients and errors have that scale, too. The
        GradScaler changes its scale now and then. Call this after scaler.update(), on every rank.

        Raises ValueError for a factor that is not finite and positive.

        Example::

            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            state.rescale_errors(scaler.get_scale() / scale)
        """
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ValueError(
                "rescale_errors takes the new scale divided by the old one, finite and positive; got "
                f"{factor!r}"
            )
        if factor != 1:
            self._states.scale_errors(factor)

    def average(self, hook_name: str, bucket: dist.GradBucket, options: Any = None) -> Future:
        """Average a hook's bucket: plainly in the first steps, with compressors in later steps.

        A ShardBucket is reduce-scattered instead: its shard gets the sum, and its buffer is of no use.

        hook_name: the hook's name in messages.
        options: the bucket's options, comparable by ==; None for the state's options. If they change, the
            errors stay.

        Raises TypeError if the bucket is not a dense floating-point bucket. In the state's first step, raises
        RuntimeError on every rank if the ranks differ.
        """
        buffer, group = checked_bucket(hook_name, bucket, self.process_group, "state.process_group")
        is_first = self._begin_bucket(bucket, group)
        self._compare_once(hook_name, bucket, group, is_first=is_first)
        options = self._options if options is None else options
        if is_first:
            self._begin_step(group, buffer.device)
        if is_first or self._phase is None or self._phase.options is not options:
            self._phase = self.phase(options)
        phase = self._phase
        if isinstance(bucket, ShardBucket):
            phase = _of_shards(phase)
        own = self._states.bucket_of(bucket, phase.options)
        if phase.compressor is None:
            future = self._average_plainly(hook_name, bucket, group)
        else:
            self._warn_of_another_ranks_errors(group)
            future = self._average_compressed(hook_name, bucket, group, phase, own)
        if phase.warms_up and not own.is_warmed_up:
            own.is_warmed_up = True
            for later in phase.warms_up:  # while this step's collectives are in progress
                spec = own.spec(buffer.device, 0, **self._ranks(group, later))
                assert later.compressor is not None
                later.compressor.warm_up(spec, later.options)
        self.maybe_increase_iter(bucket)
        return future

    def _average_plainly(self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Future:
        buffer, operation = bucket.buffer(), Operation.averaging(bucket.index(), hook_name, group)
        if isinstance(bucket, ShardBucket):
            return average_in_stages(bucket, _sum_of_shard(bucket, group), operation, self._pipeline)
        if self.recorder is not None:
            self.recorder.add_plain(self.iter, bucket.index(), buffer, group)
        return average_in_place(bucket, group, operation, self._pipeline)

    def _average_compressed(
        self,
        hook_name: str,
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        phase: Phase,
        own: Bucket,
    ) -> Future:
        """Average a bucket with the phase's compressor."""
        assert phase.compressor is not None
        buffer = bucket.buffer()
        seed = self._seed(own.index, self.iter)
        ranks = self._ranks(group, phase)
        compressor, lost = self._states.compressor_of(own, phase.compressor, buffer.device, seed, **ranks)
        if lost:
            self._warn_of("the checkpoint has other shapes of %s, whose errors start at zero", lost)
        if compressor.is_plain:
            future = self._average_plainly(hook_name, bucket, group)
        else:
            future = self._average_in_stages(hook_name, bucket, group, own, compressor)
        self.total_numel_before_compression += buffer.numel()
        self.total_numel_after_compression += compressor.sent_numel
        self._step.gradient_bytes += buffer.nbytes
        self._step.sent_bytes += compressor.sent_numel * buffer.itemsize
        return future

    def _average_in_stages(
        self,
        hook_name: str,
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        own: Bucket,
        compressor: Compressor,
    ) -> Future:
        """Begin a compressor's stages."""
        buffer = bucket.buffer()
        # A compressor ends a step by choosing the next step's random projections: hence the next step's seed.
        seed, unused = self._seed(own.index, self.iter + 1), own.unused(bucket)
        keeps_errors = self._discards_step

        def stages() -> Stages:
            compressor.leave_out(unused)
            errors = errors_in(compressor.state()) if keeps_errors else {}
            if isinstance(bucket, ShardBucket):
                assert isinstance(compressor, ShardCompressor)
                yield from compressor.reduce_scatter(buffer, bucket.shard, group)
            else:
                yield from compressor.stages(buffer, group, seed)
            if errors:
                compressor.load({**compressor.state(), **errors})
            return buffer

        running = explained(stages(), Operation.averaging(bucket.index(), hook_name, group))
        if self.recorder is not None:
            running = self.recorder.recorded(running, self.iter, bucket.index(), buffer, compressor, group)
        is_first = self._step.num_buckets == 1
        is_last = bucket.is_last() or is_waited_for_at_once(bucket)
        return self._pipeline.add(running, buffer.device, is_first=is_first, is_last=is_last)

    def _begin_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> bool:
        """Register a bucket and its group. Returns whether the bucket is the first one of its step."""
        parameters = bucket.parameters()  # torch makes a list of them in every call
        if self._step.has_any_of(parameters):
            self.end_step()
        if self._group is not None and self._group() is not group:
            # Compressors depend on the number of ranks, and on this rank's number.
            self._states.give_all_back()
            self._is_compared = False
        self._group = weakref.ref(group)
        self._step.add(parameters)
        return self._step.num_buckets == 1

    def _compare_once(
        self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, *, is_first: bool
    ) -> None:
        """In the first step, raise RuntimeError on every rank if options or buckets differ between ranks."""
        if self._is_compared:
            return
        names = map(self._states.keys.get, bucket.parameters())
        values = self.compared_options() | {
            "iter": self.iter,
            "hook": hook_name,
            "world size": group.size(),
            "dtype of the bucket": bucket.buffer().dtype,
            "index of the bucket": bucket.index(),
            "whether the bucket is the last (bucket_cap_mb tells how many there are)": bucket.is_last(),
            "shapes in the bucket": [list(parameter.shape) for parameter in bucket.parameters()],
            "names of parameters (number_parameters gives them)": list(names),
            "directions": self._states.common_digest(),
        }
        if is_first:
            require_same_group(f"{hook_name}'s state", group)
        device = bucket.buffer().device
        launched = LaunchedNodes.of(self._ranks_per_node, group)
        values |= launched.compared()
        processor = {} if self._compressor.is_same_on_all_processors else ops.processor(device)
        unlike = require_same_on_all_ranks(
            f"{hook_name}'s state",
            values,
            group,
            device,
            "Give every rank the same hook, options, model and bucket caps; after a restart, a checkpoint of "
            "the same step",
            notes={**processor, **launched.noted()},
        )
        found = launched.agreed_nodes(group, unlike)
        nodes = (found.ranks_per_node, str(found)) if found else None
        round_trip = round_trip_s(bucket.buffer(), group, found.between if found else None)
        if (nodes, round_trip) != (self._nodes, self._round_trip_s):
            self._states.give_all_back()
            self._nodes, self._round_trip_s = nodes, round_trip
        if processors := [text for name, text in unlike.items() if name in processor]:
            _logger_of(self).warning(
                "%s: the ranks run on unlike processors, whose sums differ in the last bit: %s. Replicas "
                "will drift apart by rounding errors; see docs/powersgd.md.",
                self.algorithm,
                "; ".join(processors),
            )

    def _warn_of_unclaimed(self) -> None:
        """Warn if a checkpoint has entries of parameters that the first step has not brought."""
        unclaimed = self._states.unclaimed()
        if names := list(filter(is_name, unclaimed)):
            self._warn_of(
                "the checkpoint has errors of parameters that the first step has not brought: %s. They wait "
                "for them. Likely cause: another model, or this run has no names of parameters: call "
                "state.number_parameters(model.named_parameters())",
                names,
            )
        if places := [key for key in unclaimed if not is_name(key)]:
            self._warn_of(
                "the checkpoint knows parameters by the first step's buckets, and this run's first step has "
                "others, or names: the errors of %s start at zero. Likely cause: another bucket_cap_mb, "
                "find_unused_parameters or model. Call state.number_parameters(model.named_parameters()) in "
                "both runs, and checkpoints know parameters by name",
                places,
            )

    def _warn_of(self, text: str, keys: list[str]) -> None:
        shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        _logger_of(self).warning(f"%s: {text}.", self.algorithm, shown)

    @property
    def _has_delay(self) -> bool:
        return self._round_trip_s >= MIN_DELAY_S

    def _ranks(self, group: dist.ProcessGroup, phase: Phase) -> dict[str, Any]:
        """Return what a BucketSpec says of the ranks."""
        per_node = 1 if phase.is_flat else self._num_ranks_per_node
        return {"world_size": group.size(), "ranks_per_node": per_node, "has_delay": self._has_delay}

    @property
    def _num_ranks_per_node(self) -> int:
        return 1 if self._nodes is None else self._nodes[0]

    def _seed(self, index: int, step: int) -> int:
        """Return the seed for a bucket's random choices in a step, the same on every rank."""
        return (self.random_seed * 1_000_003 + step * 8_191 + index) % 2**63

    def _report_stats(self) -> None:
        """Log the statistics, and note when they are due again."""
        rate, before, after = self.compression_stats()
        _logger_of(self).info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            *(self.iter, before, after, rate),
        )
        self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the process group, in plain types and copied tensors.

        "version": the format's version.
        "algorithm": the compressor's name.
        "options": the compressor's options by name.
        Settings and progress: one entry each, by name.
        "errors_of": the rank that the errors belong to, {"rank", "world_size"}.
        "parameters": what is kept of each parameter, as in `state`.
        "num_parameters": the number of entries in "parameters".
        """
        saved = checkpoint.to_state_dict(
            self.algorithm, self._options, self._settings, progress_of(self), self._states.entries()
        )
        return {**saved, "errors_of": self._errors_of or owner_of(self.process_group)}

    @property
    def state(self) -> Entries:
        """What is kept of each parameter, copied: {name: {"error": [as the parameter], ...}}.

        The keys are the parameters' names, see number_parameters; without names, the place where a bucket
        first brought them. What belongs to a whole bucket has a tuple of all its parameters' keys as its key.
        Errors are in the gradients' unit; those of a complex parameter have a last dimension of 2.
        """
        return self._states.entries()

    def errors_of_buckets(self) -> dict[int, torch.Tensor]:
        """Return copies of this rank's errors by the index of their bucket, [numel]."""
        return self._states.errors_of_buckets()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, including its options. The process group stays.

        Saved errors go to the parameters that they were saved for, whatever buckets these parameters are in.
        Errors that don't fit start at zero, with a warning. Another rank's errors are loaded, with a warning.
        So are other options and settings than this state was given: assign yours again after loading.

        Raises TypeError for anything but a state_dict; KeyError for missing or unknown keys; ValueError for
        an unknown version, another compressor, or any other value that doesn't fit. After an error the state
        is unchanged.
        """
        checked = self.checked(state_dict)
        default = Settings(self._default_start_iter)
        if texts := checkpoint.replaced(self._options, self._settings, checked, default):
            _logger_of(self).warning(
                "%s: the checkpoint changes what this state was made with: %s. Its options count; to use "
                "yours, assign them after load_state_dict.",
                self.algorithm,
                ", ".join(texts),
            )
        self._load_checked(checked)
        self._warn_of_another_ranks_errors()

    def checked(self, state_dict: Any) -> dict[str, Any]:
        """Check a state_dict, and return it in plain types. Raises the errors of load_state_dict."""
        checked = checkpoint.checked(state_dict, self.algorithm, self._compressor, self._options_class)
        self._require_start(checked["start_iter"], self._options_class(**checked["options"]))
        return checked

    def _load_checked(self, checked: dict[str, Any]) -> None:
        """Continue from a checked state_dict. The next step compares the ranks again."""
        self._options = self._options_class(**checked["options"])
        self._settings = checkpoint.settings_of(checked)
        self._states.load(checked["parameters"])
        for name in PROGRESS:
            setattr(self, name, checked[name])
        self._is_compared, self._was_loaded, self._is_resumed = False, True, True
        self._errors_of = checked["errors_of"] if checkpoint.has_errors(checked) else None

    def _contents(self) -> Any:
        """Return the contents of a pickle or a copy: everything except the process group."""
        nodes = {"ranks_per_node": self._ranks_per_node}
        if _has_one_compressor(type(self)):
            return {**self.state_dict(), **nodes}
        classes = {"compressor": self._compressor, "options_class": self._options_class}
        return {**classes, **nodes, "state_dict": self.state_dict()}

    def _restore(self, contents: Any, process_group: Any) -> None:
        """Set all attributes from _contents(). Raises the errors of load_state_dict."""
        if not _has_one_compressor(type(self)):
            self._compressor, self._options_class = contents["compressor"], contents["options_class"]
            contents = {**contents["state_dict"], "ranks_per_node": contents["ranks_per_node"]}
        ranks_per_node: Any = self._default_ranks_per_node
        if isinstance(contents, dict) and "ranks_per_node" in contents:
            contents = dict(contents)
            ranks_per_node = contents.pop("ranks_per_node")
        checked = self.checked(contents)
        self._reset(process_group, checkpoint.settings_of(checked), None)
        self._load_checked(checked)
        self._ranks_per_node = require_ranks_per_node(ranks_per_node)

    def __getstate__(self) -> Any:
        return self._contents()

    def __setstate__(self, contents: Any) -> None:
        # The group may still change, so the first compressed step checks that the errors are this rank's.
        self._restore(contents, joined_group(None) if dist.is_initialized() else None)
        _logger_of(self).warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group "
            "is desired, please set `self.process_group` after %s state is loaded.",
            self.algorithm,
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the state with all errors, for the same process group, but without its recorder."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied._restore(self._contents(), self.process_group)
        copied._states.keys.inherit(self._states.keys)
        return copied

    def _warn_of_another_ranks_errors(self, group: dist.ProcessGroup | None = None) -> None:
        """Warn if another rank saved the loaded errors. Does nothing while this process's rank is unknown."""
        group = group or joined_group(self.process_group)
        if self._errors_of is None or group is None:
            return
        warning = another_ranks_errors(self.algorithm, self._errors_of, group)
        self._errors_of = None
        if warning is not None:
            _logger_of(self).warning(warning)


def compress_hook(state: CompressorState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the state's compressor; plainly in the first state.start_iter steps.

    On the wire: the bytes that the compressor sends. On CUDA its kernels and collectives run on a side
    stream, in bucket order.

    Raises TypeError if the state is not a CompressorState or the bucket is not a floating-point bucket.

    Example::

        ddp_model.register_comm_hook(CompressorState(TopK, TopKOptions(density=0.01)), compress_hook)
    """
    if not isinstance(state, CompressorState):
        raise TypeError(f"compress_hook takes a CompressorState as its state, got {described(state)}")
    return state.average("compress_hook", bucket)


def _of_shards(phase: Phase) -> Phase:
    """Return the phase with the classes that reduce-scatter."""
    assert phase.compressor is None or phase.compressor.of_shards is not None
    of_shards = phase.compressor and phase.compressor.of_shards
    return phase._replace(compressor=of_shards, warms_up=tuple(map(_of_shards, phase.warms_up)))


def _sum_of_shard(bucket: ShardBucket, group: dist.ProcessGroup) -> Stages:
    """Sum a bucket's shard without compression. Yields the collective."""
    buffer = bucket.buffer()
    yield from reduce_scatter(bucket.shard, buffer.view(group.size(), -1), group)
    return buffer


def _logger_of(state: CompressorState) -> logging.Logger:
    """Return the logger of the module that defines the state's class."""
    return logging.getLogger(type(state).__module__)


def _has_one_compressor(state_class: type[CompressorState]) -> bool:
    return hasattr(state_class, "_compressor")


def _is_frozen(options: Any) -> bool:
    """Return whether options are a frozen dataclass."""
    # Stubs don't have __dataclass_params__, hence getattr.
    return is_dataclass(options) and bool(getattr(options, "__dataclass_params__").frozen)  # noqa: B009


class _StepBuckets:
    """The buckets of the current step, identified by their parameters.

    is_over: True if backward has ended since the last bucket.
    num_buckets: the number of buckets so far.
    gradient_bytes: the bytes of the compressed buckets so far.
    sent_bytes: the bytes that a rank has sent for these buckets.
    """

    def __init__(self) -> None:
        self._backward = -1
        self.end()

    def has_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether one of a bucket's parameters has come in this step."""
        return not self._parameters.isdisjoint(map(id, parameters))

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add a bucket, and set is_over at the end of the backward that brings it."""
        self._parameters.update(map(id, parameters))
        self.is_over = False
        self.num_buckets += 1
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def end(self) -> None:
        """Begin the next step."""
        self.is_over = False
        self.num_buckets = self.gradient_bytes = self.sent_bytes = 0
        self._parameters: set[int] = set()

    def _end_backward(self) -> None:
        self._backward = -1
        self.is_over = self.num_buckets > 0
