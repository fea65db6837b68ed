"""Hooks that send gradients in 4 or 8 bits, in two collectives per bucket.

quantization_hook, with error feedback, is gradcomp's own. The others are drop-in for
``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``: same names and signatures, without state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradcomp import ops
from gradcomp.comm.bucket import checked_bucket, require_bucket
from gradcomp.comm.kept_buffers import KeptBuffers
from gradcomp.comm.pipeline import Stages, explained, run_through
from gradcomp.comm.process_group import Operation
from gradcomp.comm.streams import Future, completed, run_on_side_stream
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions, quantized_all_reduce
from gradcomp.compress.state import CompressorState
from gradcomp.layout.blocks import BlockLayout
from gradcomp.rules import BLOCK_SIZE, described

__all__ = [
    "QuantizationState",
    "quantization_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

LARGEST_BLOCK = 1024  # of quantization_pertensor_hook
_BlockSize = Callable[[int, int], int]  # (the bucket's number of elements, world size) → a block's
ALIGNMENT = 16  # elements of which its blocks are multiples


class QuantizationState(CompressorState):
    """The state that quantization_hook is registered with: options, errors, statistics.

    process_group: None for the default one.
    bits: 4 or 8 for each element of a matrix; vectors, and tensors smaller than a block, are sent exactly.
    block_size: elements with a scale of their own, even, at most 4096.
    use_error_feedback: add what rounding loses to the next step's gradients.
    start_iter: steps of plain all-reduce before quantization starts.
    uncompressed_dtype: torch.bfloat16 or torch.float16 to send vectors and small tensors in; None: exactly.
    compression_stats_logging_frequency: steps between log lines with compression_stats().

    Raises ValueError for an invalid option, TypeError for anything but a process group.

    Checkpoints as of any CompressorState: state_dict(), load_state_dict(), torch.save.
    """

    min_start_iter = 0
    _compressor, _options_class = QuantizedCompressor, QuantizedOptions

    def __init__(
        self,
        process_group: Any = None,
        bits: int = 4,
        block_size: int = 128,
        use_error_feedback: bool = True,
        start_iter: int = 0,
        *,
        uncompressed_dtype: torch.dtype | None = None,
        compression_stats_logging_frequency: int = 10_000,
    ):
        super().__init__(
            QuantizedCompressor,
            QuantizedOptions(bits, block_size, use_error_feedback, uncompressed_dtype),
            process_group,
            start_iter=start_iter,
            compression_stats_logging_frequency=compression_stats_logging_frequency,
        )


def quantization_hook(
    state: QuantizationState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in state.options.bits bits per element; plainly in the first state.start_iter steps.

    1. M ← gradient + error, cut into blocks. 2. Quantize M in one shard per rank. 3. All-to-all: every rank
    gets its shard of all ranks. 4. It sums them in fp32, adds its own error, and quantizes the mean. 5.
    All-gather. 6. All ranks dequantize the same bytes.

    On the wire: codes, a scale in bf16 per block, and vectors exactly: at 4 bits and blocks of 128 a 7.8th of
    fp32's bytes, whatever the number of ranks. inf and NaN make their block NaN on every rank, and leave no
    error.

    To read the algorithm first, see `quantized_all_reduce` in gradcomp/testing/simple.py: 30 lines.

    Raises TypeError for another state, for anything but a bucket, and for a bucket that is not
    floating-point.

    Example::

        ddp_model.register_comm_hook(QuantizationState(bits=4), quantization_hook)
    """
    if not isinstance(state, QuantizationState):
        require_bucket("quantization_hook", bucket)
        raise TypeError(f"quantization_hook takes a QuantizationState as its state, got {described(state)}")
    return state.average("quantization_hook", bucket)


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits per element, in blocks of up to 1024 elements that have one scale each.

    The steps are quantization_hook's, but without errors, and with the whole bucket quantized, vectors too.
    torch's rounds once, to one scale for the bucket, which its largest element sets; this rounds twice, to
    scales of blocks so long that longer ones would save less than 0.4 % of the bytes. docs/hooks.md compares.

    On the wire: 1 byte per element and 2 per block. A rank sends 2 (W − 1) / W buckets of codes, where in
    torch's all-gather it sends W − 1 of them. What rounding loses is lost: quantization_hook with bits=8
    sends about as much, and adds that to the next step. inf and NaN make their block NaN on every rank.
    State: the process group, or None for the default one.

    Raises TypeError for anything but a bucket, and for one that is not floating-point.

    Example::

        ddp_model.register_comm_hook(None, quantization_pertensor_hook)
    """
    _, group = checked_bucket("quantization_pertensor_hook", bucket, process_group)
    return _average_in_8_bits("quantization_pertensor_hook", bucket, group, _largest_blocks)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits per element, in blocks of bucket_size elements that have one scale each.

    What quantization_pertensor_hook does, in shorter blocks: more accurate, for 2 more bytes per block. A
    bucket of fewer than bucket_size elements is sent exactly. DDP calls hooks with two arguments: for another
    bucket_size register a function of yours that calls this one.

    Raises ValueError for a bucket_size that is odd, less than 2 or more than 4096, TypeError for anything but
    a bucket, and for one that is not floating-point.

    Example::

        ddp_model.register_comm_hook(None, quantization_perchannel_hook)
    """
    bucket_size = BLOCK_SIZE("quantization_perchannel_hook: bucket_size", bucket_size)
    _, group = checked_bucket("quantization_perchannel_hook", bucket, process_group)
    return _average_in_8_bits("quantization_perchannel_hook", bucket, group, lambda *_: bucket_size)


def _largest_blocks(numel: int, world_size: int) -> int:
    """Return the size of the longest blocks, up to LARGEST_BLOCK, that fill a shard with little padding."""
    shard = max(1, -(-numel // world_size))
    num_blocks = -(-shard // LARGEST_BLOCK)
    return -(-shard // (num_blocks * ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True)
class _PlanKey:
    """What a plan depends on."""

    numel: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    world_size: int


# Plans of quantized all-reduces without error feedback.
_plans: KeptBuffers[ops.QuantizedPlan] = KeptBuffers()


def _average_in_8_bits(
    hook_name: str, bucket: dist.GradBucket, group: dist.ProcessGroup, block_size_of: _BlockSize
) -> Future:
    """Average the whole bucket, cut into blocks without regard to its tensors, in 8 bits per element.

    hook_name: the name under which the plan is kept.
    block_size_of(numel, world_size): the size of a block. A bucket smaller than a block is sent exactly.

    A plan holds no gradients between steps. It is kept because it takes long to make; it is as large as two
    buckets of codes.
    """
    buffer = bucket.buffer()
    numel, size = buffer.numel(), group.size()
    if not numel:
        return completed(buffer.device, lambda: buffer)
    key = _PlanKey(numel, block_size_of(numel, size), buffer.dtype, buffer.device, size)
    parameters = bucket.parameters()

    def stages() -> Stages:
        plan = _plans.take(parameters, hook_name, key) or _make_plan(key)
        yield from quantized_all_reduce(plan, buffer, group)
        if parameters:
            _plans.keep(parameters[0], hook_name, key, plan)
        return buffer

    # A plan is made in the sequence, so that on CUDA its memory is the side stream's.
    operation = Operation.averaging(bucket.index(), hook_name, group)
    return run_on_side_stream(buffer.device, lambda: run_through(explained(stages(), operation)))


def _make_plan(key: _PlanKey) -> ops.QuantizedPlan:
    layout = BlockLayout([(1, key.numel)], key.block_size, key.world_size)
    return ops.quantized_plan(layout, key.dtype, key.device, bits=8, error_feedback=False)
