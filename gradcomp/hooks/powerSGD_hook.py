"""PowerSGD: all-reduce two thin factors of every gradient matrix instead of the matrix.

Drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``. docs/powersgd.md has the options
and the differences from torch's, docs/internals/powersgd.md the algorithm as implemented.
"""

import logging
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.nodes import AUTO
from gradcomp.compress import checkpoint
from gradcomp.compress.checkpoint import consolidated_state_dict, load_from_dcp, per_rank_state_dict
from gradcomp.compress.powersgd import PowerSGDCompressor, PowerSGDOptions
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.compress.state import CompressorState, Phase, option
from gradcomp.rules import WHOLE

__all__ = [
    "PowerSGDState",
    "average_errors",
    "batched_powerSGD_hook",
    "consolidated_state_dict",
    "load_from_dcp",
    "per_rank_state_dict",
    "powerSGD_hook",
]

logger = logging.getLogger(__name__)


LOST = (
    "batched_powerSGD_hook: a backward has left out some tensors of a bucket. torch's DDP drops the averages "
    "of tensors that no rank has used, and so loses the errors in these averages. Use powerSGD_hook, or "
    "gradcomp.DistributedDataParallel"
)


class PowerSGDState(CompressorState):
    """PowerSGD's hyperparameters, and every bucket's error and factors. Arguments and meanings are torch's.

    process_group: the group that averages; None for the default one.
    matrix_approximation_rank: the factors' columns; the compression is rows · cols / ((rows + cols) · rank).
    start_powerSGD_iter: steps of plain all-reduce before compression starts; at least 2 with error feedback
        or warm start, because DDP rebuilds its buckets after the first step.
    min_compression_rate: a matrix whose compression would be lower is averaged uncompressed.
    use_error_feedback: add the compression error of a step to the next step's gradient. The errors take as
        much device memory as the compressed gradients.
    warm_start: project on the last step's factors rather than on random ones.
    orthogonalization_epsilon: added to a column's length before dividing by it. Not needed here: zero columns
        stay zero.
    random_seed: the seed for the first projection (for every projection without warm start); the same on all
        ranks.
    compression_stats_logging_frequency: steps between log lines with compression_stats().
    batch_tensors_with_same_shape: no effect, because all matrices are always compressed together.

    Options that torch doesn't have:

    factor_dtype: the dtype in which factors are sent: torch.bfloat16 or torch.float16, which uncompressed
        tensors then have, too, or torch.int8, with a scale for every 128 elements. With each,
        min_compression_rate compares bytes, and error feedback makes up for the rounding. None: the bucket's.
    uncompressed_dtype: with int8 factors, the dtype in which vectors and other uncompressed tensors are sent:
        torch.bfloat16 or torch.float16. None: the bucket's dtype.
    start_bits: 4 or 8: quantize the first start_powerSGD_iter steps to 4 or 8 bits, see quantization_hook;
        PowerSGD continues from their errors. None: the first steps are exact.
    ranks_per_node: see CompressorState. With nodes int8 factors and a quantized start are averaged
        hierarchically, see quantization_hook; so are other factors on a CPU.

    Raises ValueError for an invalid option and for a start_powerSGD_iter that is too early; TypeError if
    process_group is not a process group. Assigning to an attribute raises the same errors.

    Checkpoints: ``torch.save``, ``torch.load`` (its safe default), or state_dict(); see CompressorState.
    """

    _default_ranks_per_node = AUTO
    _default_start_iter = 1_000
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
        start_powerSGD_iter: int = _default_start_iter,  # noqa: N803
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
        ranks_per_node: int | str = AUTO,
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
            ranks_per_node=ranks_per_node,
        )
        shown = {**asdict(options), **asdict(self.settings), "start_powerSGD_iter": self.start_iter}
        del shown["square"], shown["start_iter"]  # the hook and torch's name say them
        logger.info("PowerSGD config: %s", "; ".join(f"{name} = {value}" for name, value in shown.items()))

    @property
    def start_powerSGD_iter(self) -> int:  # noqa: N802
        """start_iter under torch's name."""
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

    def _starting(self, compressing: Phase) -> Phase:
        phase, given = super()._starting(compressing), compressing.options
        if given.start_bits is None:
            return phase
        options = QuantizedOptions(given.start_bits, error_feedback=given.use_error_feedback)
        name = f"the quantized start of {self.algorithm}"
        return phase._replace(name=name, compressor=QuantizedCompressor, options=options)

    def _why_nothing_is_saved(self) -> str:
        return (
            f": no matrix is large enough for rank {self.matrix_approximation_rank}, as each must be "
            f"compressed at least {self.min_compression_rate:g} times (min_compression_rate)"
        )

    def __getstate__(self) -> Any:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return super().__getstate__()


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's matrices through low-rank factors, and everything else exactly.

    The first ``state.start_powerSGD_iter`` steps are plain, see allreduce_hook. In later steps, M [n, m] is a
    gradient seen as a matrix (its first dimension against the others), and r is the rank:

    1. M ← gradient + error.
    2. P ← M Q.
    3. All-reduce P and, in the same collective, the vectors and the tensors not worth compressing.
    4. Orthonormalize P.
    5. Q ← Mᵀ P.
    6. All-reduce Q.
    7. gradient ← P Qᵀ; error ← M − P Qᵀ.

    On the wire: two collectives, (n + m) · r elements per matrix, in the bucket's dtype.
    State: per bucket, the error (as much device memory as the compressed gradients) and the factors.
    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

    inf or NaN in a gradient gives inf or NaN on every rank. The matrix's error stays as it was (on CPUs
    zero in that element), and the next step takes random directions for it. On CUDA a bucket takes five
    kernel launches per step, eleven with int8 factors, and the host never waits for the device.

    To read the algorithm first, see `power_sgd` in docs/examples/simple.py: 33 lines of plain torch.

    Raises TypeError if the state is not a PowerSGDState or the bucket is not floating-point.

    Example::

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4)
        ddp_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    """
    if not isinstance(state, PowerSGDState):
        PowerSGDState.refuse("powerSGD_hook", state, bucket)
    return state.average("powerSGD_hook", bucket)


def batched_powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the whole bucket through low-rank factors, as one square matrix padded with zeros.

    The bucket, biases included, is one matrix; powerSGD_hook lists the steps. This hook sends less than
    powerSGD_hook and loses more: a bucket cut into rows of equal length has little of its layers' structure.
    Prefer powerSGD_hook, which takes no more time here.

    Raises TypeError if the state is not a PowerSGDState or the bucket is not floating-point.
    """
    if not isinstance(state, PowerSGDState):
        PowerSGDState.refuse("batched_powerSGD_hook", state, bucket)
    asks = isinstance(bucket, dist.GradBucket) and state.use_error_feedback and LOST not in state.announced
    if asks and len({parameter.grad is None for parameter in bucket.parameters()}) == 2:
        state.announced.add(LOST)
        logger.warning(LOST)
    return state.average("batched_powerSGD_hook", bucket, _squared(state.options))


_squared = lru_cache(maxsize=16)(partial(replace, square=True))


def average_errors(state_dicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the state_dicts of all ranks of a run into one, which every rank of any new run can load.

    The merged errors are the ranks' mean. With it on every rank, the new run's mean error is unchanged.

    state_dicts: a list, or an iterator that loads one state_dict after another. Each state_dict may be freed
        when the next one is loaded.

    Raises ValueError for an empty list and for state_dicts of different steps or buckets. For any other
    invalid state_dict it raises the errors of load_state_dict.
    """
    return checkpoint.average_errors(state_dicts, PowerSGDState.__new__(PowerSGDState).checked)
