"""PowerSGD's state: hyperparameters, progress, and the memory of every bucket."""

import logging
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compress.checkpoint import has_errors
from gradcomp.compress.compressor import Compressor
from gradcomp.compress.memories import BucketPart
from gradcomp.compress.powersgd import LowRankOptions
from gradcomp.compress.state import CompressedAveraging, MakeCompressor

from . import powersgd_checkpoint, powersgd_from_torch
from .powersgd_options import OPTIONS, checked_options, options_of

PUBLIC_MODULE = "gradcomp.hooks.powerSGD_hook"  # where users import the state from, and files look for it
logger = logging.getLogger(PUBLIC_MODULE)

# Options that may differ between ranks: factors and collectives don't depend on them.
_MAY_DIFFER = ("compression_stats_logging_frequency", "batch_tensors_with_same_shape")


class PowerSGDState(CompressedAveraging):
    """PowerSGD's hyperparameters and its memory of every bucket. Arguments and meanings are torch's.

    process_group: None for the default one.
    matrix_approximation_rank: the factors' columns; the compression is rows · cols / ((rows + cols) · rank).
    start_powerSGD_iter: steps of plain all-reduce before compression starts; at least 2 with error feedback
        or warm start, because DDP rebuilds its buckets after the first step.
    min_compression_rate: matrices that would save less are averaged as they are.
    use_error_feedback: add what compression lost to the next step's gradient. Needs as much memory again as
        the compressed gradients.
    warm_start: project on the last step's factors rather than on random ones.
    orthogonalization_epsilon: added to a column's length before dividing by it. Not needed here: zero columns
        stay zero.
    random_seed: the seed for the first (without warm start, every) projection; the same on all ranks.
    compression_stats_logging_frequency: steps between log lines with compression_stats().
    batch_tensors_with_same_shape: accepted without effect: all matrices are always compressed together.

    Not torch's:

    factor_dtype: what factors are sent in. torch.bfloat16, torch.float16: so is everything else. torch.int8:
        with a scale for every 128 elements, in two collectives per factor (a quantized all-reduce).
        min_compression_rate is one of bytes then. The error is what the averages really lack, so error
        feedback makes up for the rounding.
    uncompressed_dtype: with int8 factors, what vectors and other uncompressed tensors are sent in:
        torch.bfloat16 or torch.float16. None: exactly.
    start_bits: 4 or 8: the first start_powerSGD_iter steps are quantized to so many bits, as by
        quantization_hook, and PowerSGD goes on from their errors. None: they are exact.

    Raises ValueError for an invalid option and for a start_powerSGD_iter that is too early; TypeError for
    anything but a process group. So does an assignment to the attribute.

    Checkpoints: ``torch.save`` and ``torch.load`` (with its safe default), or state_dict() and
        load_state_dict(). Every rank has its own errors: save one per rank to continue exactly, or
        consolidated_state_dict(state) for all ranks.
    """

    __module__ = PUBLIC_MODULE

    matrix_approximation_rank: int
    start_powerSGD_iter: int  # noqa: N815
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    batch_tensors_with_same_shape: bool
    factor_dtype: torch.dtype | None
    uncompressed_dtype: torch.dtype | None
    start_bits: int | None

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
        *,
        factor_dtype: torch.dtype | None = None,
        uncompressed_dtype: torch.dtype | None = None,
        start_bits: int | None = None,
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
                "factor_dtype": factor_dtype,
                "uncompressed_dtype": uncompressed_dtype,
                "start_bits": start_bits,
            }
        )
        super().__init__(process_group)
        vars(self).update(options)
        # Memories from torch's hook, by bucket index, which is all that torch knows about them.
        self._from_torch: dict[int, dict[str, Any]] = {}
        logger.info("PowerSGD config: %s", "; ".join(f"{name} = {value}" for name, value in options.items()))

    @property
    def algorithm(self) -> str:
        return "PowerSGD"

    @property
    def start_iter(self) -> int:
        return self.start_powerSGD_iter

    def compared_options(self) -> dict[str, Any]:
        return {name: value for name, value in options_of(self).items() if name not in _MAY_DIFFER}

    def compressor_options(self, *, square: bool) -> LowRankOptions:
        """Return the options that this state's compressors depend on."""
        return LowRankOptions(
            square=square,
            rank=self.matrix_approximation_rank,
            min_compression_rate=self.min_compression_rate,
            error_feedback=self.use_error_feedback,
            warm_start=self.warm_start,
            epsilon=self.orthogonalization_epsilon,
            factor_dtype=self.factor_dtype,
            uncompressed_dtype=self.uncompressed_dtype,
            start_bits=self.start_bits,
        )

    @property
    def is_quantized_start(self) -> bool:
        """True if the current step is one of the first, and these are quantized."""
        return self.start_bits is not None and self.iter < self.start_iter

    @property
    def is_plain_step(self) -> bool:
        return self._waits_for_buckets or (super().is_plain_step and not self.is_quantized_start)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIONS:
            value = checked_options({**options_of(self), name: value})[name]
            self._is_compared = False
        super().__setattr__(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the process group, in plain types and tensors of its own.

        "version": the format's. Options and progress by name. "buckets" maps a bucket's index to its "kind"
        (dtype and options), "shapes", "parameters" (indices), and, once compressed, "error" (this rank's,
        flat), "shard_error" (of a quantized start: see QuantizedCompressor) and "directions" (the Q [cols,
        rank] that the next step projects on, the same on all ranks). "parameters": "names" by index, and
        "first_buckets", the indices and shapes of parameters without a name. "from_torch": torch's memories
        whose bucket has not come yet. "errors_of": whose errors they are, {"rank", "world_size"}. "contents":
        the indices in "buckets" and "from_torch".
        """
        return powersgd_checkpoint.to_state_dict(
            self, self._whose_errors(), *self._memories.saved(), dict(self._from_torch)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict, options included; the process group stays.

        The memory goes to the parameters that it was saved for, in whatever buckets a new model's first step
        has them. Where it doesn't fit, it starts afresh, with a log line. Another rank's errors are logged,
        too.

        Raises KeyError for a state_dict with missing or unknown keys, ValueError for one of an unknown
        version or with anything that doesn't fit (sizes, dtypes, values that aren't finite, invalid options),
        TypeError for anything but a state_dict. The state is unchanged then.
        """
        self._take(self.checked(state_dict))
        self._warn_of_another_ranks_errors()

    @staticmethod
    def checked(state_dict: Any) -> dict[str, Any]:
        """Return a state_dict that may be loaded, in plain types. Raises what load_state_dict raises."""
        return powersgd_checkpoint.checked(state_dict)

    def _take(self, checked: dict[str, Any]) -> None:
        self._memories.load(checked["parameters"], powersgd_checkpoint.memories_of(checked))
        vars(self).update({name: checked[name] for name in OPTIONS})
        self._set_progress(checked)
        self._from_torch = checked["from_torch"]
        self._waits_for_buckets = bool(self._from_torch)
        self._errors_of = checked["errors_of"] if has_errors(checked, ("buckets", "from_torch")) else None

    def rescale_errors(self, factor: float) -> None:
        super().rescale_errors(factor)
        for memory in self._from_torch.values():
            if memory["error"] is not None:
                memory["error"] = memory["error"] * factor

    def _contents(self) -> dict[str, Any]:
        return self.state_dict()

    def _restore(self, contents: dict[str, Any], process_group: Any) -> None:
        checked = self.checked(contents)
        super().__init__(process_group)
        self._take(checked)

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return super().__getstate__()

    def _compressor_of(
        self, part: BucketPart, device: torch.device, group: dist.ProcessGroup, make: MakeCompressor
    ) -> Compressor:
        memory, is_new = part.memory, part.memory.is_empty
        compressor = super()._compressor_of(part, device, group, make)
        if is_new and memory.index in self._from_torch:
            theirs = self._from_torch.pop(memory.index)
            if not powersgd_from_torch.load(compressor, memory, theirs):
                text = "PowerSGD: bucket %s has another layout than torch's: starts afresh."
                logger.warning(text, memory.index)
        return compressor
