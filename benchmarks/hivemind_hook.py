"""A DDP hook around one of hivemind's compressors, which hivemind itself calls between peers."""

from typing import Any

import torch
import torch.distributed as dist

from gradcomp.comm.bucket import Hook


def compressed_all_gather(compressor: Any) -> Hook:
    """Return a hook that averages what the compressor keeps of each rank's bucket.

    compressor: a hivemind.compression.CompressionBase. Every rank sends its bucket as the compressor's
    message, gets everyone's, and averages what the compressor extracts from them, in rank order and so to the
    same bits. hivemind's own averaging compresses parts of tensors, and differences on the way back: this
    shows the loss of the compressor alone.
    """
    from hivemind.compression import CompressionInfo  # type: ignore[import-not-found]
    from hivemind.proto import runtime_pb2  # type: ignore[import-not-found]

    def hook(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        message = compressor.compress(buffer, CompressionInfo.from_tensor(buffer))
        sent = torch.frombuffer(bytearray(message.SerializeToString()), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(received, sent, group=process_group)
        buffer.zero_()
        for each in received:
            theirs = compressor.extract(runtime_pb2.Tensor.FromString(each.numpy().tobytes()))
            buffer += theirs / len(received)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    hook.__qualname__ = f"{type(compressor).__name__}"
    return hook
