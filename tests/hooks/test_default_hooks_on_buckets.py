"""Test the default hooks on buckets, without DDP: asynchronous collectives, errors, wrapped hooks."""

import pytest
import torch
import torch.distributed as dist

from gradcomp.comm.bucket import GradBucket
from gradcomp.comm.process_group import kept_of
from gradcomp.hooks import debugging_hooks, default_hooks
from tests.ranks import of_all_ranks

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "bf16 around fp16": default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook),
}


class Bucket(GradBucket):
    """A bucket of one gradient of any dtype. A complex gradient isn't viewed as real."""

    def __init__(self, buffer: torch.Tensor):
        super().__init__(0, buffer, [torch.empty_like(buffer)], is_last=True)
        self.set_buffer(buffer)


@pytest.mark.ranks(2, timeout_s=30)
@pytest.mark.parametrize("hook", ["allreduce", "fp16", "bf16", "bf16 around fp16"])
def test_hooks_return_while_the_collective_is_under_way_on_a_cpu(rank, hook, tmp_path):
    """Let rank 1 join the collective only after rank 0's hook has returned. A blocking hook never returns.

    The buffer is the CPU's: gloo waits for CUDA tensors on the host.
    """
    hook_name = hook
    store = dist.FileStore(str(tmp_path / "store"), 2)
    HOOKS[hook_name](None, Bucket(torch.zeros(1))).wait()  # the first one measures the delay
    buffer = torch.full((1000,), float(rank))
    if rank == 1:
        store.wait(["rank 0 is back from its hook"])
    future = HOOKS[hook_name](None, Bucket(buffer))
    done_early = future.done()
    if rank == 0:
        store.set("rank 0 is back from its hook", "yes")
    (early, values), (_, others) = of_all_ranks((done_early, future.wait().unique().tolist()))
    assert not early
    assert values == others == [0.5]


@pytest.mark.simulated_ranks(2)
def test_buckets_that_cannot_be_compressed_are_refused_on_every_rank(rank):
    messages = []
    for hook_name, buffer in [
        ("allreduce", torch.ones(4, dtype=torch.int64)),
        ("fp16", torch.ones(4, dtype=torch.int32)),
        ("bf16", torch.ones(4, dtype=torch.complex64)),
        ("bf16 around fp16", torch.ones(4, dtype=torch.int8)),
        ("fp16", torch.ones(4).to_sparse()),
    ]:
        with pytest.raises(TypeError) as error:
            HOOKS[hook_name](None, Bucket(buffer))
        messages.append(str(error.value))
    assert messages == [
        "allreduce_hook averages floating-point buckets, got torch.int64",
        "fp16_compress_hook compresses floating-point buckets, got torch.int32",
        "bf16_compress_hook compresses floating-point buckets, got torch.complex64",
        "bf16_compress_wrapper compresses floating-point buckets, got torch.int8",
        "fp16_compress_hook compresses dense buckets, got torch.sparse_coo. Likely cause: "
        "nn.Embedding(sparse=True), for which torch's DDP makes a sparse bucket; gradcomp's averages it "
        "apart from the hook",
    ]


class WithoutBf16(dist.ProcessGroup):
    """A backend that can't all-reduce bfloat16, and requires options, as torchft's do."""

    def getBackendName(self):  # noqa: N802
        return "nobf16"

    def allreduce(self, tensors, options):
        raise RuntimeError("Invalid scalar type")


@pytest.mark.ranks(2)
def test_a_backend_without_bf16_is_named(rank):
    dist.Backend.register_backend("nobf16", lambda store, rank, size, timeout: WithoutBf16(rank, size))
    group = dist.new_group(backend="nobf16")
    kept_of(group)["bf16_compress_hook"] = True  # compared already
    bucket = Bucket(torch.ones(4))
    with pytest.raises(RuntimeError) as error:
        default_hooks.bf16_compress_hook(group, bucket)
    message = str(error.value)
    assert message.startswith(
        "backend 'cpu:nobf16,cuda:nobf16' did not all-reduce a torch.bfloat16 tensor on cpu: Invalid"
    )
    assert message.endswith("register a hook that sends another dtype")


@pytest.mark.simulated_ranks(2)
def test_another_hook_on_another_rank_is_named(rank):
    hook = [default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook][rank]
    with pytest.raises(RuntimeError, match=r"name is .fp16_compress_hook. on rank 0 and .bf16_compress_hook"):
        hook(None, Bucket(torch.ones(4)))


@pytest.mark.simulated_ranks(1)
def test_a_wrapper_puts_the_bucket_back(rank):
    def raising(state, bucket):
        raise ValueError("inside the hook")

    outcomes = []
    for hook, error in [(raising, ValueError), (lambda state, bucket: 7, RuntimeError)]:
        buffer = torch.ones(4)
        bucket = Bucket(buffer)
        with pytest.raises(error) as raised:
            default_hooks.fp16_compress_wrapper(hook)(None, bucket)
        outcomes.append((str(raised.value), bucket.buffer() is buffer))
    buffer = torch.full((4,), 1 + 2.0**-12)
    bucket = Bucket(buffer)
    result = default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook)(None, bucket).wait()
    outcomes.append((result.tolist(), bucket.buffer() is buffer))
    inside, (message, is_back), result = of_all_ranks(outcomes)[0]
    assert (inside, result) == (("inside the hook", True), ([1.0] * 4, True))
    assert is_back
    assert "lambda> returned int, but must return a torch.futures.Future" in message
