"""PowerSGD: all-reduce two thin factors of every gradient matrix instead of the matrix.

Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. docs/powersgd.md has the algorithm
as implemented, and how it differs from torch's.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import require_bucket
from gradcomp.compress import checkpoint, consolidation
from gradcomp.compress.checkpoint import PROGRESS, Settings
from gradcomp.compress.compressor import Compressor
from gradcomp.compress.consolidation import consolidated_state_dict, load_from_dcp, per_rank_state_dict
from gradcomp.compress.memories import Memory
from gradcomp.compress.powersgd import PowerSGDCompressor, PowerSGDOptions, QuantizedStart
from gradcomp.compress.state import CompressorState, Phase, option
from gradcomp.rules import WHOLE, described

from . import powersgd_from_torch

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


# The arguments of torch's PowerSGDState.
_TORCHS_OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
_OTHER_OPTIONS = ("random_seed", "factor_dtype", "uncompressed_dtype", "start_bits")
logger = logging.getLogger(__name__)


class PowerSGDState(CompressorState):
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

    _compressor, _options_class = PowerSGDCompressor, PowerSGDOptions
    algorithm = "PowerSGD"

    matrix_approximation_rank: int = option()
    min_compression_rate: float = option()
    use_error_feedback: bool = option()
    warm_start: bool = option()
    orthogonalization_epsilon: float = option()
    batch_tensors_with_same_shape: bool = option()
    factor_dtype: torch.dtype | None = option()
    uncompressed_dtype: torch.dtype | None = option()
    start_bits: int | None = option()

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
        options = PowerSGDOptions(
            matrix_approximation_rank,
            min_compression_rate,
            use_error_feedback,
            warm_start,
            orthogonalization_epsilon,
            batch_tensors_with_same_shape,
            factor_dtype,
            uncompressed_dtype,
            start_bits,
        )
        super().__init__(
            PowerSGDCompressor,
            options,
            process_group,
            start_iter=WHOLE("start_powerSGD_iter", start_powerSGD_iter),
            random_seed=random_seed,
            compression_stats_logging_frequency=compression_stats_logging_frequency,
        )
        shown = (f"{name} = {getattr(self, name)}" for name in (*_TORCHS_OPTIONS, *_OTHER_OPTIONS))
        logger.info("PowerSGD config: %s", "; ".join(shown))

    def _begin(self, process_group: Any, settings: Settings, options: Any) -> None:
        super()._begin(process_group, settings, options)
        # Memories from torch's hook, by bucket index, which is all that torch knows about them.
        self._from_torch: dict[int, dict[str, Any]] = {}
        self._waits_for_buckets = False

    @property
    def start_powerSGD_iter(self) -> int:  # noqa: N802
        """Torch's name of start_iter."""
        return self.start_iter

    @start_powerSGD_iter.setter
    def start_powerSGD_iter(self, value: int) -> None:  # noqa: N802
        self.start_iter = WHOLE("start_powerSGD_iter", value)

    def _require_start(self, start_iter: int, options: PowerSGDOptions) -> None:
        if (options.use_error_feedback or options.warm_start) and start_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                "because PowerSGD can only be applied after the first two iterations in DDP. "
                f"Got {start_iter}."
            )

    def compared_options(self) -> dict[str, Any]:
        compared = super().compared_options()
        return {"start_powerSGD_iter": compared.pop("start_iter"), **compared}

    def phase(self, options: PowerSGDOptions) -> Phase:
        if self._waits_for_buckets or (options.start_bits is None and self.iter < self.start_iter):
            return Phase(self.algorithm, None, options, warms_up=PowerSGDCompressor)
        if self.iter < self.start_iter:
            name = f"the quantized start of {self.algorithm}"
            return Phase(name, QuantizedStart, options, warms_up=PowerSGDCompressor)
        return Phase(self.algorithm, PowerSGDCompressor, options)

    def end_step(self) -> None:
        super().end_step()
        self._waits_for_buckets = False

    # --- memories from torch's hook ---

    def rescale_errors(self, factor: float) -> None:
        super().rescale_errors(factor)
        for memory in self._from_torch.values():
            if memory["error"] is not None:
                memory["error"] = memory["error"] * factor

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the process group, as CompressorState's state_dict.

        A bucket has, once compressed, "error" (this rank's, flat), "shard_error" (after a quantized start:
        see QuantizedCompressor) and "directions": by tensor, the Q [cols, rank] that the next step projects
        on, the same on all ranks. "from_torch": torch's memories, until their buckets come.
        """
        saved, theirs = super().state_dict(), dict(self._from_torch)
        contents = {**saved["contents"], "from_torch": list(theirs)}
        return {**saved, "contents": contents, "from_torch": theirs}

    def checked(self, state_dict: Any) -> dict[str, Any]:
        checkpoint.require_version(state_dict)
        theirs = {
            index: powersgd_from_torch.checked(f"torch's bucket {index}", memory)
            for index, memory in checkpoint.indexed("from_torch", state_dict.get("from_torch", {}))
        }
        if "from_torch" in state_dict:
            state_dict = {name: value for name, value in state_dict.items() if name != "from_torch"}
        checked = super().checked(state_dict)
        contents = checkpoint.checked_contents(state_dict["contents"], "from_torch", theirs)
        return {**checked, "contents": {**checked["contents"], **contents}, "from_torch": theirs}

    def _take(self, checked: dict[str, Any]) -> None:
        super()._take(checked)
        self._from_torch = checked["from_torch"]
        self._waits_for_buckets = bool(self._from_torch)

    def _compressor_of(
        self, memory: Memory, kind: type[Compressor], device: torch.device, group: dist.ProcessGroup
    ) -> Compressor:
        theirs = self._from_torch.pop(memory.index, None) if memory.is_empty else None
        compressor = super()._compressor_of(memory, kind, device, group)
        if theirs is not None and not powersgd_from_torch.load(compressor, memory, theirs):
            logger.warning(
                "PowerSGD: bucket %s has another layout than torch's: its memory starts at zero.",
                memory.index,
            )
        return compressor

    def __getstate__(self) -> Any:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return super().__getstate__()


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's matrices through factors of low rank, everything else exactly.

    For the first ``state.start_powerSGD_iter`` steps, allreduce_hook. Then, with M [n, m] a gradient seen as
    a matrix (its first dimension against the others), r the rank and W the world size:

    1. M ← gradient + error. 2. P ← M Q. 3. All-reduce P and, in the same collective, the tensors that are
    vectors or not worth compressing. 4. Orthonormalize P. 5. Q ← Mᵀ P. 6. All-reduce Q. 7. gradient ← P Qᵀ;
    error ← M − P Qᵀ.

    On the wire: two collectives, (n + m) · r elements per matrix, in the bucket's dtype. State: the error (as
    much memory as the compressed gradients) and the factors, per bucket. Source: Vogels, Karimireddy and
    Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

    A step with inf or NaN gives inf or NaN on every rank; the matrices it touched start afresh in the next.
    On CUDA there are seven kernel launches per bucket and step, eleven with int8 factors, and nothing waits
    for the host.

    To read the algorithm first, see `power_sgd` in gradcomp/testing/simple.py: 33 lines of plain torch.

    Raises TypeError for any state but a PowerSGDState, and for any bucket but a floating-point one.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    """
    return _average("powerSGD_hook", state, bucket, square=False)


def batched_powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the whole bucket through factors of low rank, as one square matrix padded with zeros.

    The steps of powerSGD_hook with one matrix per bucket, biases included. It sends less than powerSGD_hook
    and loses more: a bucket cut into rows of equal length has little of its layers' structure. Prefer
    powerSGD_hook, which costs no more here.

    Raises TypeError for any state but a PowerSGDState, and for any bucket but a floating-point one.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
        ddp_model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    """
    return _average("batched_powerSGD_hook", state, bucket, square=True)


def _average(
    hook_name: str, state: PowerSGDState, bucket: dist.GradBucket, *, square: bool
) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, PowerSGDState):
        require_bucket(hook_name, bucket)
        hint = ": from_torch converts torch's" if hasattr(state, "q_memory_dict") else ""
        raise TypeError(
            f"{hook_name} takes a gradcomp PowerSGDState as its state, got {described(state)}{hint}"
        )
    return state.average(hook_name, bucket, _squared(state.options) if square else None)


@lru_cache(maxsize=16)
def _squared(options: PowerSGDOptions) -> PowerSGDOptions:
    return replace(options, square=True)


def average_errors(state_dicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the state_dicts of all ranks of a run into one, for every rank of a run with any number of ranks.

    Its errors are the mean of the ranks' errors, so the mean in the new run is the same. state_dicts: a list,
    or an iterator that loads one after another; each is needed only until the next.

    Raises ValueError for an empty list and for state_dicts of different steps or buckets, and what
    load_state_dict raises for any other misfit.
    """
    return consolidation.average_errors(state_dicts, PowerSGDState.__new__(PowerSGDState).checked)


def from_torch(state: Any, *, wait_for_buckets: bool = True) -> PowerSGDState:
    """Make a PowerSGDState that continues from torch's: hyperparameters, progress, errors and factors.

    state: a torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState, as loaded by
    ``torch.load(..., weights_only=False)``. Its errors of uncompressed tensors are dropped, because those
    tensors are averaged exactly here.
    wait_for_buckets: torch identifies its memories by bucket index only, and DDP arranges a new model's
    buckets after its first step. So that step is a plain all-reduce, and the memories go to the buckets of
    the next one.
    False: the first step's buckets are torch's already, as in your own training loop.

    Raises TypeError for anything else.
    """
    if not hasattr(state, "q_memory_dict"):
        raise TypeError(f"from_torch takes a PowerSGDState of torch's, got {type(state).__name__}")
    ours = PowerSGDState(state.process_group, **{name: getattr(state, name) for name in _TORCHS_OPTIONS})
    for name, rule in PROGRESS.items():
        setattr(ours, name, rule(name, getattr(state, name)))
    ours._from_torch = powersgd_from_torch.memories_of(state)
    ours._waits_for_buckets = wait_for_buckets
    return ours
