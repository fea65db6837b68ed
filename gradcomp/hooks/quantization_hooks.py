"""Hooks that send gradients in 4 or 8 bits, in one exchange or in two per bucket.

quantization_hook, with error feedback, is gradcomp's own. The other hooks keep no state between steps. They
are drop-in for ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``: same names and signatures.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import KeptBuffers, checked_bucket
from gradcomp.comm.exchange import Works, has_delay
from gradcomp.comm.nodes import AUTO
from gradcomp.comm.pipeline import average_in_stages
from gradcomp.comm.process_group import Explaining
from gradcomp.comm.streams import Future, completed
from gradcomp.compress.compressor import BucketSpec
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.compress.quantized_all_reduce import QuantizedAllReduce
from gradcomp.compress.state import CompressorState, option
from gradcomp.layout import BlockLayout
from gradcomp.rules import BLOCK_SIZE

__all__ = [
    "QuantizationState",
    "quantization_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

LARGEST_BLOCK = 1024  # elements in quantization_pertensor_hook's longest blocks
ALIGNMENT = 16  # quantization_pertensor_hook's block sizes are multiples of 16 elements


class QuantizationState(CompressorState):
    """The state that quantization_hook is registered with: options, errors, statistics.

    process_group: the group that averages, or a DeviceMesh, see CompressorState; None for the default one.
    bits: 4 or 8 bits for each element of a matrix. Vectors, and tensors smaller than a block, are sent
        exactly. 16 bits: every element is rounded to a 16-bit dtype, the sum over the ranks is in fp32, and
        between more than two ranks the mean is rounded once more.
    block_size: elements that share one scale; even, at most 4096.
    use_error_feedback: add a step's rounding errors to the next step's gradients. None: with 4 and 8 bits;
        16 bits keep no errors.
    start_iter: steps of plain all-reduce before quantization starts.
    uncompressed_dtype: the dtype in which vectors and small tensors are sent, with 16 bits all tensors:
        torch.bfloat16 or torch.float16. None: the bucket's dtype; with 16 bits torch.bfloat16.
    compression_stats_logging_frequency: steps between log lines with compression_stats().
    ranks_per_node: see CompressorState. With nodes averages are exact within a node, in codes between nodes.

    Raises ValueError for an invalid option, TypeError if process_group is not a process group.

    Checkpoints: use state_dict() and load_state_dict(), or torch.save; see CompressorState.
    """

    min_start_iter = _default_start_iter = 0
    algorithm = "quantization_hook"
    _default_ranks_per_node = AUTO
    _compressor, _options_class = QuantizedCompressor, QuantizedOptions

    bits: int = option()
    block_size: int = option()
    uncompressed_dtype: torch.dtype | None = option()

    @property
    def use_error_feedback(self) -> bool:
        """Whether errors are kept. It can't be changed."""
        return bool(self.options.error_feedback)

    def __init__(
        self,
        process_group: Any = None,
        bits: int = 4,
        block_size: int = 128,
        use_error_feedback: bool | None = None,
        start_iter: int = _default_start_iter,
        *,
        uncompressed_dtype: torch.dtype | None = None,
        compression_stats_logging_frequency: int = 10_000,
        ranks_per_node: int | str = AUTO,
    ):
        super().__init__(
            QuantizedCompressor,
            QuantizedOptions(bits, block_size, use_error_feedback, uncompressed_dtype),
            process_group,
            start_iter=start_iter,
            compression_stats_logging_frequency=compression_stats_logging_frequency,
            ranks_per_node=ranks_per_node,
        )


def quantization_hook(
    state: QuantizationState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in state.options.bits bits per element; plainly in the first state.start_iter steps.

    1. M ← gradient + error, cut into blocks.
    2. Quantize M in one shard per rank, except this rank's own shard.
    3. All-to-all: every rank gets its own shard from all others.
    4. The rank adds these shards to its own M in fp32, and quantizes the mean.
    5. All-gather: every rank gets all means.
    6. All ranks dequantize the same bytes.

    Between two ranks, and of small buckets on links with a delay (comm/exchange.py), one all-gather of all
    ranks' codes takes the place of steps 2 to 5, and all ranks add the same codes in fp32.

    On the wire: codes, one bf16 scale per block, and vectors exactly. 4 bits in blocks of 128 elements take
    1/7.8 of fp32's bytes, whatever the number of ranks. inf or NaN makes the whole block NaN on every rank,
    and the block keeps its error (on CPUs but for such elements).

    With 16 bits there are no blocks, scales and errors: step 2 rounds the bucket to 16 bits, and with two
    collectives step 4 rounds the mean. A 16-bit all-reduce rounds partial sums up to W times.

    With ranks_per_node, ranks of a node first sum their buckets exactly; each then does
    the steps with a part of the sum, between nodes. The means are gathered as codes.

    Raises TypeError if the state is not a QuantizationState or the bucket is not a floating-point bucket.

    Example::

        ddp_model.register_comm_hook(QuantizationState(bits=4), quantization_hook)
    """
    if not isinstance(state, QuantizationState):
        QuantizationState.refuse("quantization_hook", state, bucket)
    return state.average("quantization_hook", bucket)


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits per element, in blocks of up to 1024 elements with one scale each.

    The hook quantizes the whole bucket, including vectors, and keeps no errors; quantization_hook lists the
    steps. docs/hooks.md compares it with torch's hook, which has one scale for the bucket.

    On the wire: 1 byte per element and 2 bytes per block. With W ranks, a rank sends 2 (W − 1) / W buckets of
    codes, or W − 1 if they are small and links have a delay. quantization_hook with bits=8 sends about as
    much, and adds the errors to the next step. inf or NaN makes the whole block NaN on every rank.
    State: the process group, or None for the default one.

    Raises TypeError if the bucket is not a floating-point bucket.
    """
    return _average_in_8_bits("quantization_pertensor_hook", bucket, process_group, _largest_blocks)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in 8 bits per element, in blocks of bucket_size elements with one scale each.

    The blocks are shorter than quantization_pertensor_hook's: more accurate, but 2 more bytes for each
    additional block. A bucket of fewer than bucket_size elements is sent exactly. DDP calls hooks with two
    arguments: to change bucket_size, register your own function that calls this hook.

    Raises ValueError for a bucket_size that is odd, less than 2 or more than 4096; TypeError if the bucket is
    not a floating-point bucket.
    """
    bucket_size = BLOCK_SIZE("quantization_perchannel_hook: bucket_size", bucket_size)
    return _average_in_8_bits("quantization_perchannel_hook", bucket, process_group, lambda *_: bucket_size)


def _largest_blocks(numel: int, world_size: int) -> int:
    """Return the longest block size, up to LARGEST_BLOCK, that fills a shard with little padding."""
    shard = max(1, -(-numel // world_size))
    num_blocks = -(-shard // LARGEST_BLOCK)
    block_size = -(-shard // (num_blocks * ALIGNMENT)) * ALIGNMENT
    # A bucket smaller than its block would be sent exactly.
    return block_size if block_size <= numel else -(-numel // (2 * ALIGNMENT)) * ALIGNMENT


# Quantized all-reduces without error feedback, kept from step to step.
_all_reduces: KeptBuffers[QuantizedAllReduce] = KeptBuffers()


def _average_in_8_bits(
    hook_name: str, bucket: dist.GradBucket, process_group: Any, block_size_of: Callable[[int, int], int]
) -> Future:
    """Average the whole bucket, cut into blocks without regard to its tensors, in 8 bits per element.

    hook_name: the hook's name, in messages and among the kept all-reduces.
    block_size_of: (numel, number of shards) -> a block's size. A bucket smaller than a block is sent exactly.

    The all-reduce is kept for the next step, because making one takes long. It takes as much device memory
    as two buckets of codes, and this rank's shard of the bucket in fp32; between two ranks as three of codes.
    """
    buffer, group = checked_bucket(hook_name, bucket, process_group)
    numel, size = buffer.numel(), group.size()
    if not numel:
        return completed(buffer.device, buffer)
    spec = BucketSpec(
        ((1, numel),), buffer.dtype, buffer.device, size, seed=0, has_delay=has_delay(buffer, group)
    )
    key, parameters = (spec, block_size_of(numel, size)), bucket.parameters()

    def layout_for(num_shards: int) -> BlockLayout:
        return BlockLayout(spec.shapes, block_size_of(numel, num_shards), num_shards)

    def stages() -> Works:
        all_reduce = _all_reduces.take(parameters, hook_name, key)
        if all_reduce is None:
            all_reduce = QuantizedAllReduce(layout_for, spec.dtype, spec, error_feedback=False)
        yield from all_reduce.reduce(buffer, group)
        if parameters:
            _all_reduces.keep(parameters[0], hook_name, key, all_reduce)

    # stages() makes the all-reduce, so that on CUDA its tensors belong to the side stream.
    return average_in_stages(bucket, stages(), Explaining.averaging(bucket.index(), hook_name, group))
