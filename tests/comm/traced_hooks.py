"""Trace hooks and whatever calls them on CUDA's stub, also with mistakes planted. Prints JSON.

python -m tests.comm.traced_hooks
"""

# ruff: noqa: E402 the stub must be installed before gradcomp is imported
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

from benchmarks import stub_cuda

stub_cuda.install()

import torch
import torch.distributed as dist

import gradcomp
from gradcomp.comm import exchange, nodes, pipeline
from gradcomp.comm.bucket import GradBucket
from gradcomp.comm.process_group import Explaining, kept_of
from gradcomp.compress.compressor import BucketSpec
from gradcomp.compress.quantized_all_reduce import QuantizedAllReduce
from gradcomp.fsdp.checks import Averager
from gradcomp.fsdp.reduce_scatter import CompressedReduceScatter
from gradcomp.fsdp.replicas import AllReduceHook
from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.hooks.auto_hook import AutoState, auto_hook
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.kernels.powersgd import plan as powersgd_plan
from gradcomp.layout import BlockLayout
from gradcomp.local_steps import LocalSteps
from tests.comm.happens_before import Trace, TracedWork, install
from tests.hooks.checked import HOOKS

# One list of shapes per bucket.
SHAPES = [[(64, 48), (48,)], [(32, 32), (7,)], [(16, 40)], [(24, 24), (5,)]]
NUM_STEPS = 5  # the first two of states are plain

TRACE = Trace()
install(TRACE)


def parameters_of(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def as_ddp(hook: Callable[..., Any], state: Any, num_steps: int = NUM_STEPS) -> None:
    """Call a hook as torch's DDP does: bucket after bucket on the current stream; then wait for all."""
    buckets = []
    for index, shapes in enumerate(SHAPES):
        parameters = parameters_of(shapes)
        buffer = torch.zeros(sum(each.numel() for each in parameters))
        buckets.append(GradBucket(index, buffer, parameters, is_last=index == len(SHAPES) - 1))
    for _ in range(num_steps):
        TRACE.works.clear()
        futures = []
        for bucket in buckets:
            bucket.buffer().normal_()  # backward
            futures.append(hook(state, bucket))
        for future in futures:
            assert future.done()  # DDP waits in C++, which can't run the stages left
            TRACE.wait(future.clock)
        for bucket in buckets:
            bucket.buffer().mul_(2)  # the optimizer


def as_fsdp(hook: Callable[..., Any] | None, state: Any) -> None:
    """Average replicas as FSDP2 does: after a reduce-scatter's stream, on an all-reduce's stream."""
    scattering, reducing = (torch.cuda.Stream(stream_id=number) for number in (7, 8))
    replicas = Averager("compress_replicas", state, dist.group.WORLD)
    groups = []
    for index, shapes in enumerate(SHAPES):
        parameters = parameters_of(shapes)
        fields = {
            "units": lambda dtype: (1.0, 1.0),
            "shard_group": dist.group.WORLD,
            "averages_now": True,
            "divide_factor": None,
        }
        group = SimpleNamespace(reduced=lambda output, own=parameters: own, shards=parameters, **fields)
        groups.append((AllReduceHook(index, group, replicas), sum(each.numel() for each in parameters)))
    for _ in range(NUM_STEPS):
        TRACE.works.clear()
        for average, numel in groups:
            with torch.cuda.stream(scattering):
                output = torch.zeros(numel)
            reducing.wait_stream(scattering)
            with torch.cuda.stream(reducing):
                average(output)
                output = output.clone()
        replicas.end_of_backward()
        torch.cuda.current_stream().wait_stream(reducing)


def as_fsdp_shards(_: object, state: Any) -> None:
    """Reduce-scatter as FSDP2 does, on a stream of its own, keeping the last input. Layers come in pairs."""
    scattering = torch.cuda.Stream(stream_id=7)
    group = dist.group.WORLD
    sums = Averager("compress_reduce_scatter", state, group)
    layers = []
    for index, shapes in enumerate([*SHAPES, *SHAPES]):
        parameters = parameters_of(shapes)
        fields = {
            "units": lambda dtype: (1.0, 1.0),
            "name": f"layer {index}",
            "reduce_scatter_group": group,
            "replicate_group": None,
            "shards": parameters,
        }
        layer = SimpleNamespace(reduced=lambda output, whole, own=parameters: own, **fields)
        numel = sum(each.numel() for each in parameters)
        layers.append((CompressedReduceScatter(index, layer, sums), numel))
    for _ in range(NUM_STEPS):
        TRACE.works.clear()
        last, gradients = (torch.zeros(1), scattering.record_event()), []
        for reduce_scatter, numel in layers:
            torch.cuda.current_stream().wait_event(last[1])
            sent = torch.randn(numel)
            scattering.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(scattering):
                shard = torch.zeros(numel)
                reduce_scatter(shard, sent, group, dist.ReduceOp.SUM)
                last = sent, scattering.record_event()
                gradients.append(shard.div_(2))
        sums.end_of_backward()
        torch.cuda.current_stream().wait_stream(scattering)
        for gradient in gradients:
            gradient.mul_(2)  # the optimizer
        scattering.wait_stream(torch.cuda.current_stream())


def make_net() -> torch.nn.Module:
    layers = [torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 50), torch.nn.Linear(50, 3)]
    return torch.nn.Sequential(*layers)


def steps_of(
    net: Callable[..., Any], parameters: list[torch.nn.Parameter], average: Callable[[], Any]
) -> None:
    for _ in range(NUM_STEPS):
        TRACE.works.clear()
        net(torch.randn(8, 40)).square().sum().backward()
        average()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-1e-3)
            parameter.grad = None


def in_reducer(hook: Callable[..., Any] | None, state: Any) -> None:
    net = make_net()
    reducer = gradcomp.Reducer(net.parameters(), bucket_cap_mb=0.005)
    if hook is not None:
        reducer.register_comm_hook(state, hook)
    steps_of(net, list(net.parameters()), lambda: None)


def in_wrapper(hook: Callable[..., Any] | None, state: Any) -> None:
    model = gradcomp.DistributedDataParallel(make_net(), bucket_cap_mb=0.005)
    if hook is not None:
        model.register_comm_hook(state, hook)
    steps_of(model, list(model.parameters()), lambda: None)


def by_average(hook: Callable[..., Any] | None, state: Any) -> None:
    net = make_net()
    parameters = list(net.parameters())
    steps_of(net, parameters, lambda: gradcomp.average_([each.grad for each in parameters], hook, state))


def by_local_steps(hook: Callable[..., Any] | None, state: Any) -> None:
    """Exchange fragments that are under way during a step."""
    net = make_net()
    local = LocalSteps(net, None, 4, hook, state, 2, delay=1)
    for _ in range(5 * NUM_STEPS):
        TRACE.works.clear()
        for parameter in net.parameters():
            parameter.data.normal_()  # the inner optimizer
        local.step()
    local.join()


class HookOfCodes:
    """Averages in one exchange of codes or in two, flat or hierarchical, although the stub has one rank."""

    def __init__(self, ranks_per_node: int, *, is_one_exchange: bool) -> None:
        self._ranks_per_node, self._is_one_exchange = ranks_per_node, is_one_exchange
        self._of_buckets: dict[int, Any] = {}
        world = dist.group.WORLD
        kept_of(world)["nodes"] = {2: nodes.Nodes(world, world)}

    def __call__(self, _: object, bucket: GradBucket) -> Any:
        buffer, index, size = bucket.buffer(), bucket.index(), self._ranks_per_node
        spec = BucketSpec((), buffer.dtype, buffer.device, size, 0, size, has_delay=self._is_one_exchange)

        def stages() -> exchange.Works:
            if index not in self._of_buckets:
                layout_for = partial(BlockLayout, SHAPES[index], 16)
                own = QuantizedAllReduce(layout_for, buffer.dtype, spec, bits=4, error_feedback=True)
                self._of_buckets[index] = own
            yield from self._of_buckets[index].reduce(buffer, dist.group.WORLD)

        operation = Explaining.averaging(index, "HookOfCodes", dist.group.WORLD)
        return pipeline.average_in_stages(bucket, stages(), operation)


def problems(train: Callable[..., None], hook: Callable[..., Any] | None, state: Any) -> list[str]:
    """Return the mistakes in a training, and leave the last step in TRACE.works."""
    TRACE.problems.clear()
    with TRACE:
        train(hook, state)
    return list(dict.fromkeys(TRACE.problems))


def on_nccl() -> list[Any]:
    return [work for work in TRACE.works if work.stream.startswith("NCCL")]


def overlaps() -> bool:
    """Return whether the second collective waits for nothing that waits for the first one."""
    first, second = on_nccl()[:2]
    side = [work for work in TRACE.works if work.stream == "stream 1"]
    return not any(work.is_after(first) for work in side if second.is_after(work))


@contextmanager
def planted(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


class TryingState(AutoState):
    """Has a trial although the stub has one rank: every candidate passes its errors on to every kind."""

    NAMES = ("int4", "powersgd:4", "none", "int8", "bf16", "powersgd:2:int8")

    def _names(self, num_ranks: int = 2) -> list[str]:
        return list(self.NAMES)


def with_auto_hook() -> list[str]:
    """Return the mistakes in a trial of two rounds, and in as many steps after it as two checks of speed."""
    state = TryingState(start_iter=2, steps_per_turn=3, rounds=2, clock=iter(range(10_000)).__next__)
    found = problems(partial(as_ddp, num_steps=110), auto_hook, state)
    assert state.choice == "int4"
    return found


def state_of_powersgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, 4, 2, 1)


def dropping_hook(_: object, bucket: GradBucket) -> Any:
    """Free memory that a collective under way still reads."""
    dist.all_reduce(bucket.buffer().clone(), async_op=True)
    return default_hooks.fp16_compress_hook(None, bucket)


def impatient_hook(_: object, bucket: GradBucket) -> Any:
    """Change the bucket while its hook's work is under way."""
    future = default_hooks.fp16_compress_hook(None, bucket)
    bucket.buffer().mul_(2)
    return future


def mistakes() -> Iterator[tuple[str, list[str]]]:
    """Yield each planted mistake, and what the trace says of it."""
    in_codes = quantization_hook, QuantizationState(bits=4)
    with planted(pipeline, "wait_for_current_stream", lambda device: None):
        yield "gradients are not waited for", problems(as_ddp, *in_codes)
    with planted(TracedWork, "wait", lambda self, timeout=None: True):
        yield "collectives are not waited for", problems(as_ddp, *in_codes)
    complete = pipeline.PipelinedFuture.set_result

    def completed_elsewhere(future: Any, result: Any) -> None:
        complete(future, result)
        future.clock = {}  # as if recorded on a stream that has nothing to do

    with planted(pipeline.PipelinedFuture, "set_result", completed_elsewhere):
        yield "futures are completed on another stream", problems(as_ddp, *in_codes)
    shared = powersgd_plan.take_scratch(torch.device("cpu"), None, 2**24)
    with planted(powersgd_plan, "take_scratch", lambda *_: shared):
        found = problems(as_ddp, powerSGD_hook.powerSGD_hook, state_of_powersgd())
        yield "buckets under way share a scratch", found
    with planted(torch.Tensor, "record_stream", lambda tensor, stream: None):
        found = problems(as_fsdp, quantization_hook, QuantizationState(bits=4, start_iter=1))
        yield "FSDP2 frees its output too early", found
    with planted(Averager, "_average", lambda sums, bucket: sums._state.average("", bucket)):
        found = problems(as_fsdp_shards, None, QuantizationState(bits=4))
        yield "FSDP2 goes on before a shard is summed", found
    yield "a hook frees memory too early", problems(as_ddp, dropping_hook, None)
    yield "a bucket is changed too early", problems(as_ddp, impatient_hook, None)


def callers() -> Iterator[tuple[str, list[str]]]:
    """Yield the mistakes of callers besides torch's DDP, of hierarchical hooks, and of hooks within hooks."""
    yield "auto_hook", with_auto_hook()
    for ranks_per_node, is_one in product((1, 2), (False, True)):
        found = problems(as_ddp, HookOfCodes(ranks_per_node, is_one_exchange=is_one), None)
        assert len(on_nccl()) == len(SHAPES) * (2 * ranks_per_node - is_one)
        yield f"codes in {'one' if is_one else 'two'}, {ranks_per_node} ranks per node", found
    wrapped = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    yield "a wrapper of PowerSGD", problems(as_ddp, wrapped, state_of_powersgd())
    for train in (in_reducer, in_wrapper, by_average, as_fsdp, by_local_steps):
        yield f"{train.__name__} without a hook", problems(train, None, None)
        for name, hook, state in (
            ("PowerSGD", powerSGD_hook.powerSGD_hook, state_of_powersgd()),
            ("int4", quantization_hook, QuantizationState(bits=4, start_iter=1)),
        ):
            yield f"{train.__name__} with {name}", problems(train, hook, state)

    for bits in (4, 8, 16):
        state = QuantizationState(bits=bits, start_iter=1)
        yield f"as_fsdp_shards in {bits} bits", problems(as_fsdp_shards, None, state)


def main() -> None:
    hooks = {}
    for name, check in HOOKS.items():
        found = problems(as_ddp, check.make(), check.make_state() if check.make_state else None)
        collectives = [work.name for work in on_nccl()]
        hooks[name] = {
            "problems": found,
            "collectives": collectives,
            "overlaps": bool(collectives) and overlaps(),
        }
    json.dump({"hooks": hooks, "callers": dict(callers()), "mistakes": dict(mistakes())}, sys.stdout)


if __name__ == "__main__":
    main()
