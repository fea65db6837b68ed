"""Hooks that send gradients in 4 or 8 bits, with error feedback, in two collectives per bucket."""

from typing import Any

import torch
import torch.distributed as dist

from gradcomp.compress.compressor_state import CompressorState
from gradcomp.compress.quantised import QuantisedCompressor, QuantisedOptions

# No `from __future__ import annotations` in this package: DDP compares a hook's annotations with types.


class QuantizationState(CompressorState):
    """The state that quantization_hook is registered with: options, errors, statistics.

    process_group: None for the default one.
    bits: 4 or 8 for each element of a matrix; vectors, and tensors smaller than a block, are sent exactly.
    block_size: elements with a scale of their own, even.
    use_error_feedback: add what rounding loses to the next step's gradients.
    start_iter: steps of plain all-reduce before quantisation starts.
    compression_stats_logging_frequency: steps between log lines with compression_stats().

    Raises ValueError for an invalid option, TypeError for anything but a process group.

    Checkpoints as of any CompressorState: state_dict(), load_state_dict(), torch.save.
    """

    min_start_iter = 0

    def __init__(
        self,
        process_group: Any = None,
        bits: int = 4,
        block_size: int = 128,
        use_error_feedback: bool = True,
        start_iter: int = 0,
        *,
        compression_stats_logging_frequency: int = 10_000,
    ):
        super().__init__(
            QuantisedCompressor,
            QuantisedOptions(bits, block_size, use_error_feedback),
            process_group,
            start_iter=start_iter,
            compression_stats_logging_frequency=compression_stats_logging_frequency,
        )


def quantization_hook(
    state: QuantizationState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in state.options.bits bits per element; plainly in the first state.start_iter steps.

    1. M ← gradient + error, cut into blocks. 2. Quantise M in one shard per rank. 3. All-to-all: every rank
    gets its shard of all ranks. 4. It sums them in fp32, adds its own error, and quantises the mean. 5.
    All-gather. 6. All ranks dequantise the same bytes.

    On the wire: codes, a scale in bf16 per block, and vectors exactly: at 4 bits and blocks of 128 a 7.8th of
    fp32's bytes, whatever the number of ranks. inf and NaN make their block NaN on every rank, and leave no
    error.

    Raises TypeError for another state, for anything but a bucket, and for a bucket that is not
    floating-point.

    Example::

        ddp_model.register_comm_hook(QuantizationState(bits=4), quantization_hook)
    """
    if not isinstance(state, QuantizationState):
        raise TypeError(f"quantization_hook takes a QuantizationState as its state, got {state!r}")
    return state.average("quantization_hook", bucket, QuantisedCompressor, state.options)
