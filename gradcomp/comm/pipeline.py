"""Collectives under way while later buckets are computed and compressed.

A bucket's average is a sequence of stages with a collective between each two. A stage waits for the
collective before it: on CUDA the side stream waits, not the host. So on one thread, and on one side stream, a
bucket's stages are spread over the calls of the hook:

    hook of bucket 0   stage 1 ─ A₀ ▷
    backward, and A₀ is under way
    hook of bucket 1   stage 1 ─ A₁ ▷ ─ wait for A₀ ─ stage 2 of bucket 0 ─ B₀ ▷
    backward, and A₁ and B₀ are under way
    hook of bucket 2   stage 1 ─ A₂ ▷ ─ wait for A₁ ─ stage 2 of bucket 1 ─ B₁ ▷ ─ wait for B₀ ─ …
    the last bucket's hook goes on until all are done

The newest bucket's first stage comes before the others' next stages. So every rank issues A₀ A₁ B₀ A₂ B₁ …:
an order that depends on the buckets alone, with no thread or callback.

On a CPU the host would wait, and with it backward. So a hook runs the first stage only, and the last hook all
others, the oldest bucket first: A₀ A₁ … B₀ B₁ …. With any number of buckets, as many round trips as with one.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from gradcomp.device import has_streams

from .exchange import Works
from .process_group import Explaining
from .streams import Future, on_side_stream, side_stream, wait_for_current_stream
from .torch_private import current_autograd_node, current_graph_task_id, queue_callback


def run_through(stages: Works) -> None:
    """Run all stages, waiting for each collective."""
    for work in stages:
        if work is not None:
            work.wait()


class PipelinedFuture(torch.futures.Future[torch.Tensor]):
    """A future that runs the stages left when it is waited for: no hook of a later bucket may come."""

    def __init__(self, pipeline: "Pipeline", device: torch.device, followed: "PipelinedFuture | None" = None):
        super().__init__(devices=[device] if has_streams(device) else None)
        self._pipeline, self._device, self._followed = pipeline, device, followed

    def wait(self) -> Any:
        if not self.done():
            self._pipeline.finish()
        return super().wait()

    def advance(self) -> None:
        """Wait for the collectives under way, and run the next stage of each bucket in the pipeline."""
        if not self.done():
            self._pipeline.finish(num_stages=1)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        chained = PipelinedFuture(self._pipeline, self._device, self._followed or self)

        def follow(done: Any) -> None:
            try:
                chained.set_result(callback(done))
            except Exception as error:
                chained.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type

        self.add_done_callback(follow)
        return chained

    def drop(self) -> None:
        """Wait for the bucket's collective under way, and run no further stage: an error ended the step."""
        own = self._followed or self
        self._pipeline.drop(lambda running: running.future is own)


def drop(averages: Iterable[Future | dist.Work]) -> None:
    """Wait for what is under way of these averages, which may still write to buckets. Forget their errors."""
    for each in averages:
        with suppress(Exception):
            if isinstance(each, PipelinedFuture):
                each.drop()
            each.wait()


@dataclass(eq=False)
class _Running:
    """A bucket under way.

    buffer: gets the average.
    operation: explains errors of its collectives.
    backward: the number of the backward that has brought the bucket; -1 outside of one.
    work: the collective that its next stage waits for.
    """

    buffer: torch.Tensor
    stages: Works
    operation: Explaining
    future: PipelinedFuture
    device: torch.device
    backward: int
    work: dist.Work | None = None


class Pipeline:
    """The buckets of a step whose stages are under way, in `running` the newest first."""

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self._unfinished: set[_Running] = set()

    def add(
        self, bucket: dist.GradBucket, stages: Works, operation: Explaining, *, is_first: bool
    ) -> PipelinedFuture:
        """Begin a bucket's stages. On CUDA, take every bucket before it one stage further, the newest first.

        stages: average the bucket's buffer. The first comes after the current stream's work so far.
        operation: explains errors of the collectives, issued here or waited for elsewhere.
        is_first: whether the bucket is the step's first.

        Returns a future of the buffer. Raises the error of any bucket, on the thread that calls the hooks.
        """
        buffer, backward = bucket.buffer(), current_graph_task_id()
        device = buffer.device
        if is_first and self.running:
            # The buffers of a backward that an error has ended have other gradients already; one without an
            # error leaves nothing. What was begun outside of any goes on.
            self.drop(lambda running: running.backward not in (-1, backward))
            self.finish()
        # In a static graph's first step torch's DDP calls all hooks in a callback of the engine, at the end
        # of backward, and waits there for each bucket before it calls the next one's hook.
        is_torchs = isinstance(bucket, dist.GradBucket)
        ends = bucket.is_last() or (is_torchs and backward != -1 and not current_autograd_node())
        if is_on_streams := has_streams(device):
            wait_for_current_stream(device)
        future, earlier, self.running = PipelinedFuture(self, device), self.running, []
        new = _Running(buffer, stages, operation, future, device, backward)
        self._unfinished.add(new)
        if is_on_streams:
            on_streams = [new, *(each for each in earlier if has_streams(each.device))]
            on_host = [each for each in earlier if not has_streams(each.device)]
            self.running = self._run_on_streams(on_streams, -1 if ends else 1) + on_host
        else:
            self.running = self._run([new], 1) + earlier
        if ends:
            self.finish()
        elif self.running and not earlier and backward != -1:
            # The last bucket may go to another hook. This runs before DDP waits for futures.
            queue_callback(self.finish)
            _of_backwards.add(self)
        return future

    def finish(self, num_stages: int = -1) -> None:
        """Take all buckets to their end, one stage each in turn; on a CPU the oldest first.

        num_stages: the number of stages to run; -1 for all.
        """
        if not self.running:
            return
        running, self.running = self.running, []
        on_streams = [each for each in running if has_streams(each.device)]
        on_host = [each for each in reversed(running) if not has_streams(each.device)]
        left = self._run_on_streams(on_streams, num_stages) if on_streams else []
        self.running = left + self._run(on_host, num_stages)[::-1]

    def drop(self, is_left: Callable[[_Running], bool]) -> None:
        """Give up the buckets under way that is_left chooses, after an error elsewhere."""
        left = [*filter(is_left, self.running)]
        self.running = [each for each in self.running if each not in left]
        self._give_up(left, RuntimeError("an error ended the step before this bucket was averaged"))

    def _run_on_streams(self, buckets: list[_Running], num_stages: int) -> list[_Running]:
        """Run stages on the buckets' side streams; see _run."""
        # Of several devices each runs one stage in turn: the order must not depend on the devices.
        at_once = num_stages if len(set(map(attrgetter("device"), buckets))) == 1 else 1
        while buckets and num_stages:
            running, buckets, num_stages = buckets, [], num_stages - at_once
            for device, each in groupby(running, attrgetter("device")):
                buckets += on_side_stream(device, partial(self._run, [*each], at_once))
        return buckets

    def _run(self, buckets: list[_Running], num_stages: int) -> list[_Running]:
        """Run stages of the buckets in turn, the last of which completes a future. Returns those with more.

        After an error, which is explained, no bucket under way is averaged, and their futures hold the error.
        """
        while buckets and num_stages:
            num_stages, left = num_stages - 1, []
            for bucket in buckets:
                work, bucket.work = bucket.work, None
                try:
                    if work is not None:
                        work.wait()
                    bucket.work = next(bucket.stages)
                    left.append(bucket)
                except StopIteration:
                    self._unfinished.discard(bucket)
                    bucket.future.set_result(bucket.buffer)
                except Exception as error:
                    explained = bucket.operation.explained(error)
                    self._give_up([*self._unfinished], explained)  # type: ignore[arg-type]
                    if explained is error:
                        raise
                    raise explained from error
            buckets = left
        return buckets

    def _give_up(self, buckets: Iterable[_Running], error: Exception) -> None:
        """Wait for what is under way, which may still write to buffers. The futures hold the error."""
        for each in buckets:
            self._unfinished.discard(each)
            if each.work is not None:
                on_side_stream(each.device, partial(drop, [each.work]))
            each.stages.close()
            if has_streams(each.device):
                torch.cuda.current_stream(each.device).wait_stream(side_stream(each.device))
            if not each.future.done():
                each.future.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type


_of_backwards: WeakSet[Pipeline] = WeakSet()


def end_backward(*, drops: bool) -> None:
    """Average or drop what the running backward has under way. Futures hold the errors; backward goes on."""
    backward = current_graph_task_id()
    for pipeline in [*_of_backwards]:
        with suppress(Exception):
            if drops:
                pipeline.drop(lambda running: running.backward == backward)
            elif any(each.backward == backward for each in pipeline.running):
                pipeline.finish()


_of_thread = threading.local()  # has the thread's pipeline for hooks that keep nothing between buckets


def average_in_stages(
    bucket: dist.GradBucket, stages: Works, operation: Explaining, pipeline: Pipeline | None = None
) -> Future:
    """Return a future of the bucket's buffer, while its stages run, by default in the thread's pipeline."""
    if pipeline is None:
        if not hasattr(_of_thread, "pipeline"):
            _of_thread.pipeline = Pipeline()
        pipeline = _of_thread.pipeline
    return pipeline.add(bucket, stages, operation, is_first=bucket.index() == 0)
