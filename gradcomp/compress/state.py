"""The state of compressing hooks: plain first steps, then a compressor for every bucket."""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops

from ..comm.bucket import require_bucket, require_dense_floats
from ..comm.consistency import require_same_group, require_same_on_all_ranks
from ..comm.pipeline import Pipeline, Stages, explained, run_through
from ..comm.process_group import Operation, joined_group, require_group, resolve_group
from ..comm.streams import Future, average_in_place, run_on_side_stream
from .announcement import StartAnnouncement
from .checkpoint import PROGRESS, another_ranks_errors, owner_of
from .compressor import BucketSpec, Compressor, errors_in
from .memories import BucketMemories, BucketPart
from .step_buckets import StepBuckets, is_waited_for_at_once

MakeCompressor = Callable[[BucketSpec, Any], Compressor]


class CompressedAveraging:
    """The common state of compressing hooks: plain first steps, memory, comparison of ranks, statistics.

    The first start_iter steps are plain all-reduces.
    recorder: the Recorder of its steps, which sets it; None if there is none.
    """

    random_seed: int
    compression_stats_logging_frequency: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    next_stats_report: int

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        # The group of the last step's collectives. None: none yet.
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._num_steps = self.next_stats_report = 0
        self._step = StepBuckets()
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self._memories = BucketMemories()
        self._waits_for_buckets = False
        self._pipeline = Pipeline()
        self._is_compared = self._was_loaded = self._discards_step = False
        # The rank whose errors were loaded, until it is known which rank uses them.
        self._errors_of: dict[str, Any] | None = None
        self._announcement = StartAnnouncement()
        self.recorder: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "process_group":
            require_group(type(self).__name__, value)
            self._is_compared = False
        super().__setattr__(name, value)

    @property
    def iter(self) -> int:
        """The number of steps so far."""
        return self._num_steps + self._step.is_over

    @iter.setter
    def iter(self, value: int) -> None:
        self._num_steps = value
        self._step.end()

    @property
    def algorithm(self) -> str:
        """The algorithm's name in messages and log lines."""
        raise NotImplementedError

    @property
    def start_iter(self) -> int:
        """Steps of plain all-reduce before compression starts."""
        raise NotImplementedError

    @property
    def is_plain_step(self) -> bool:
        """True if the current step's buckets are averaged plainly."""
        return self.iter < self.start_iter or self._waits_for_buckets

    @property
    def _logger(self) -> logging.Logger:
        return logging.getLogger(type(self).__module__)

    @property
    def _is_same_on_all_processors(self) -> bool:
        """Compressor.is_same_on_all_processors of the compressors."""
        return False

    def compared_options(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name."""
        raise NotImplementedError

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (compression rate, elements before compression, elements after), summed over all steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    @property
    def is_compared(self) -> bool:
        """True if a step has found the ranks alike since options, group or memory were last changed."""
        return self._is_compared

    @property
    def has_model(self) -> bool:
        """True if the state averages the gradients of a model, or knows the names in one."""
        return self._memories.have_parameters

    def number_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Know a model's parameters by their names, in this run and in checkpoints.

        named_parameters: model.named_parameters(). Call it before the first step. gradcomp's wrapper and
        Reducer, CommHook and compress_replicas do so; torch's DDP tells a hook no names.

        Without names, a checkpoint knows parameters by the first step's buckets: a resumed run whose first
        step has other buckets (another bucket_cap_mb, say) can't use its memory, and logs a warning.

        Raises TypeError for anything but pairs of a name and a tensor; ValueError where buckets have brought
        the parameters of a checkpoint with names.

        Example::

            state.number_parameters(model.named_parameters())
            ddp_model.register_comm_hook(state, hook)
        """
        self._memories.identity.name(named_parameters)

    @contextmanager
    def discard_step(self) -> Iterator[None]:
        """Leave the errors as they are in the backwards of a with block, whose gradients are thrown away.

        A step takes what it sends out of the errors. If the optimizer never gets that average, as in a GAN
        whose generator trains through the discriminator, that would be lost. The step is averaged and counted
        as any other. no_sync() sends nothing at all: prefer it where the averages aren't needed.

        Every rank uses it for the same steps.

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
        """Count the step. Call this yourself, after the last bucket, if no bucket reports is_last()."""
        self._step.end()
        self._memories.end_step()
        if self._was_loaded:
            self._was_loaded = False
            self._warn_of_unclaimed_memories()
        if not self.is_plain_step and self.iter >= self.next_stats_report:
            self._report_stats()
        self._announcement.end_step(self.iter, joined_group(self.process_group))
        self._is_compared, self._waits_for_buckets = True, False
        self._num_steps += 1
        if self.iter == self.start_iter:
            self._logger.info("Start to apply %s after %s iterations.", self.algorithm, self.iter)

    def take_back(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Add a parameter's average to the error again, because it was not used.

        average: flat, as in the bucket. Reducers call this if they learn after a step that no rank has used
        the parameter, and leave its gradient as it is. Otherwise what the average contains of the error would
        be lost.
        """
        if self._discards_step:
            return
        found = self._memories.memory_of(parameter)
        compressor, offset = (found[0].compressor, found[1]) if found else (None, 0)
        if compressor is not None:
            real = torch.view_as_real(average) if average.is_complex() else average
            compressor.add_to_error(offset, real.reshape(-1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def rescale_errors(self, factor: float) -> None:
        """Multiply this rank's errors by factor: the new scale of the gradients divided by the old one.

        AMP's GradScaler multiplies losses, and so gradients and what compression holds back of them, by a
        scale that it changes now and then. Call this after scaler.update(), on every rank; 1 does nothing.

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
            self._memories.scale_errors(factor)

    def average(
        self,
        hook_name: str,
        bucket: dist.GradBucket,
        make: MakeCompressor,
        options: Any,
        later: MakeCompressor | None = None,
    ) -> Future:
        """Average a hook's bucket, plainly in the first steps, then with compressors.

        hook_name: the name in messages. make(BucketSpec, options): makes a compressor. options: comparable by
        ==; a bucket's memory starts afresh when they have changed. later: what makes the compressors of later
        steps, if this step's are of another kind; they are warmed up.

        Raises TypeError for anything but a dense floating-point bucket; in a state's first step RuntimeError,
        on every rank, where the ranks differ.
        """
        require_bucket(hook_name, bucket)
        buffer = bucket.buffer()
        group = resolve_group(hook_name, self.process_group, "state.process_group")
        require_dense_floats(hook_name, buffer)
        is_first = self._begin_bucket(bucket, group)
        self._compare_once(hook_name, bucket, group, is_first=is_first)
        parts = self._parts_of(bucket, options)
        operation = Operation.averaging(bucket.index(), hook_name, group)
        if self.is_plain_step:
            if self.recorder is not None:
                self.recorder.add_plain(self.iter, bucket.index(), buffer, group)
            self.maybe_increase_iter(bucket)
            plain = average_in_place(buffer, group, operation)
            self._warm_up(parts, buffer.device, group, later or make)
            return plain
        self._warn_of_another_ranks_errors(group)
        compressors = [self._compressor_of(part, buffer.device, group, make) for part in parts]
        # A step ends by choosing what the next one projects on, hence the next step's seed.
        seeds = [self._seed(part.memory.index, self.iter + 1) for part in parts]
        unused = [part.unused(bucket) for part in parts]
        keeps_errors = self._discards_step

        def stages() -> Stages:
            for part, compressor, seed, left_out in zip(parts, compressors, seeds, unused, strict=True):
                flat = part.gather(buffer)
                compressor.leave_out(left_out)
                errors = errors_in(compressor.state()) if keeps_errors else {}
                yield from compressor.stages(flat, group, seed)
                if errors:
                    compressor.load({**compressor.state(), **errors})
                part.scatter(flat, buffer)
            return buffer

        running = explained(stages(), operation)
        if self.recorder is not None:
            named = (self.iter, bucket.index(), buffer)
            running = self.recorder.recorded(running, *named, parts, compressors, group)
        if ops.runs_triton(buffer.device):
            future: Future = run_on_side_stream(buffer.device, lambda: run_through(running))
        else:
            is_last = bucket.is_last() or is_waited_for_at_once(bucket)
            future = self._pipeline.add(running, is_first=is_first, is_last=is_last)
        if later is not None:
            self._warm_up(parts, buffer.device, group, later)
        sent_numel = sum(compressor.sent_numel for compressor in compressors)
        self.total_numel_before_compression += buffer.numel()
        self.total_numel_after_compression += sent_numel
        what = self.algorithm if later is None else f"the quantized start of {self.algorithm}"
        self._announcement.count(what, buffer.nbytes, sent_numel * buffer.itemsize)
        self.maybe_increase_iter(bucket)
        return future

    def _begin_bucket(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> bool:
        """Note a bucket and its group. Returns whether the bucket is its step's first."""
        parameters = bucket.parameters()  # torch makes a list of them in every call
        if self._step.has_any_of(parameters):
            self.end_step()
        if self._group is not None and self._group() is not group:
            # Compressors were made for the number of ranks, and this rank's place among them.
            self._memories.put_away()
            self._is_compared = False
        self._group = weakref.ref(group)
        is_first = self._step.is_empty
        self._step.add(parameters)
        return is_first

    def _compare_once(
        self, hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, *, is_first: bool
    ) -> None:
        """Raise RuntimeError on every rank, in the first step, unless all have equal options and buckets."""
        if self._is_compared:
            return
        names = map(self._memories.identity.name_of, bucket.parameters())
        values = self.compared_options() | {
            "iter": self.iter,
            "hook": hook_name,
            "world size": group.size(),
            "dtype of the bucket": bucket.buffer().dtype,
            "index of the bucket": bucket.index(),
            "whether the bucket is the last (bucket_cap_mb tells how many there are)": bucket.is_last(),
            "shapes in the bucket": [list(parameter.shape) for parameter in bucket.parameters()],
            "names of parameters (number_parameters gives them)": list(names),
            "directions": self._memories.common_digest(),
        }
        if is_first:
            require_same_group(f"{hook_name}'s state", group)
        device = bucket.buffer().device
        unlike = require_same_on_all_ranks(
            f"{hook_name}'s state",
            values,
            group,
            device,
            "Give every rank the same hook, options, model and bucket caps; after a restart, a checkpoint of "
            "the same step",
            notes={} if self._is_same_on_all_processors else ops.processor(device),
        )
        if unlike:
            self._logger.warning(
                "%s: the ranks run on unlike processors, whose sums differ in the last bit: %s. Replicas "
                "will drift apart by rounding errors; see docs/powersgd.md.",
                self.algorithm,
                unlike,
            )

    def _parts_of(self, bucket: dist.GradBucket, options: Any) -> list[BucketPart]:
        """Return the bucket's parts, and log the memories that were dropped."""
        parts, lost, unidentified = self._memories.parts_of(bucket, options)
        if unidentified:
            self._logger.warning(
                "%s: the checkpoint knows its parameters by the first step's buckets, and this run's first "
                "step has other buckets: the memory of %s parameters starts afresh. Likely cause: another "
                "bucket_cap_mb, find_unused_parameters or model. Call state.number_parameters("
                "model.named_parameters()) in both runs, and checkpoints know parameters by name.",
                self.algorithm,
                unidentified,
            )
        for memory in lost:
            is_alike = (memory.options, memory.dtype) == (options, bucket.buffer().dtype)
            self._logger.warning(
                "%s: bucket %s has %s %s: its memory starts afresh.",
                self.algorithm,
                memory.index,
                "another layout" if is_alike else "other options",
                "than its checkpoint" if memory.compressor is None else "now",
            )
        return parts

    def _warn_of_unclaimed_memories(self) -> None:
        """Warn if a loaded memory is of parameters that the first step has not brought."""
        if names := self._memories.unclaimed():
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            self._logger.warning(
                "%s: the checkpoint has a memory of parameters that the first step has not brought: %s. It "
                "waits for them, and the parameters that came without one start afresh. Likely cause: "
                "another model, or a run whose parameters have names and one whose parameters have none: "
                "call state.number_parameters(model.named_parameters()) in both.",
                self.algorithm,
                shown,
            )

    def _compressor_of(
        self, part: BucketPart, device: torch.device, group: dist.ProcessGroup, make: MakeCompressor
    ) -> Compressor:
        """Return the part's compressor: the kept one, or a new one, which loads the memory's saved state."""
        memory = part.memory
        if (memory.device, memory.make) != (device, make):
            memory.put_away()
        if memory.compressor is not None:
            return memory.compressor
        saved = memory.saved
        seed = self._seed(memory.index, self.iter)
        spec = BucketSpec(tuple(memory.shapes), memory.dtype, device, group.size(), seed)
        memory.compressor, memory.saved = make(spec, memory.options), None
        memory.device, memory.make = device, make
        if saved is not None:
            memory.compressor.load(saved)
        return memory.compressor

    def _warm_up(
        self, parts: list[BucketPart], device: torch.device, group: dist.ProcessGroup, make: MakeCompressor
    ) -> None:
        """Warm up the compressors that the parts will have, once, after this step's work is under way."""
        warm_up = getattr(make, "warm_up", None)  # a function that makes compressors has none
        for memory in (part.memory for part in parts):
            if warm_up is not None and not memory.is_warmed_up:
                memory.is_warmed_up = True
                spec = BucketSpec(tuple(memory.shapes), memory.dtype, device, group.size(), 0)
                warm_up(spec, memory.options)

    def _seed(self, index: int, step: int) -> int:
        """Return the seed for a bucket's random choices in a step, the same on every rank."""
        return (self.random_seed * 1_000_003 + step * 8_191 + index) % 2**63

    def _report_stats(self) -> None:
        """Log the statistics, and note when they are due again."""
        rate, before, after = self.compression_stats()
        self._logger.info(
            "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
            *(self.iter, before, after, rate),
        )
        self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def _contents(self) -> dict[str, Any]:
        """Return what a pickle or a copy holds: all but the process group, in plain types."""
        raise NotImplementedError

    def _restore(self, contents: dict[str, Any], process_group: Any) -> None:
        """Become a state with these contents. Raises what load_state_dict raises."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return self._contents()

    def __setstate__(self, contents: dict[str, Any]) -> None:
        # The group may still change, so the first compressed step checks whose errors these are.
        self._restore(contents, joined_group(None) if dist.is_initialized() else None)
        self._logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). If a different group "
            "is desired, please set `self.process_group` after %s state is loaded.",
            self.algorithm,
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the state with its memory, for the same process group. Its recorder isn't copied."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied._restore(self._contents(), self.process_group)
        copied._memories.identity.share_names(self._memories.identity)
        return copied

    def _whose_errors(self) -> dict[str, Any] | None:
        return self._errors_of or owner_of(self.process_group)

    def _set_progress(self, values: Mapping[str, Any]) -> None:
        """Take a checkpoint's step and statistics; the ranks are compared again in the next step."""
        for name in PROGRESS:
            setattr(self, name, values[name])
        self._is_compared, self._was_loaded = False, True

    def _warn_of_another_ranks_errors(self, group: dist.ProcessGroup | None = None) -> None:
        """Warn if the loaded errors are another rank's, as soon as this rank is known."""
        group = group or joined_group(self.process_group)
        if self._errors_of is None or group is None:
            return
        warning = another_ranks_errors(self.algorithm, self._errors_of, group)
        self._errors_of = None
        if warning is not None:
            self._logger.warning(warning)
