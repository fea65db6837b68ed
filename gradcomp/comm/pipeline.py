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
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradcomp.device import has_streams

from .process_group import Operation
from .streams import Future, devices_of_future, on_side_stream, wait_for_current_stream

# Yields each collective under way, or None for one that needs no waiting. Returns the averaged bucket.
Stages = Generator[dist.Work | None, None, torch.Tensor]
T = TypeVar("T")


def run_through(stages: Generator[dist.Work | None, None, T]) -> T:
    """Run all stages, waiting for each collective, and return the result."""
    work: dist.Work | None = None
    while True:
        try:
            work = _next(stages, work)
        except StopIteration as end:
            result: T = end.value
            return result


def explained(stages: Stages, operation: Operation) -> Stages:
    """Run stages, and explain errors of their collectives, issued here or waited for elsewhere."""
    with operation:
        return (yield from stages)


def _next(stages: Generator[dist.Work | None, None, T], work: dist.Work | None) -> dist.Work | None:
    """Wait for a collective and run the next stage. The stages get the collective's error."""
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        return stages.throw(error)
    return next(stages)


class PipelinedFuture(torch.futures.Future[torch.Tensor]):
    """A future that runs the stages left when it is waited for: no hook of a later bucket may come."""

    def __init__(self, complete: Callable[[], None], device: torch.device):
        super().__init__(devices=devices_of_future(device))
        self._complete, self._device = complete, device

    def wait(self) -> Any:
        if not self.done():
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        chained = PipelinedFuture(self._complete, self._device)

        def follow(done: Any) -> None:
            try:
                chained.set_result(callback(done))
            except Exception as error:
                chained.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type

        self.add_done_callback(follow)
        return chained


class _Running(NamedTuple):
    """A bucket under way.

    work: the collective that its next stage waits for.
    backward: the number of the backward that has brought the bucket; -1 outside of one.
    """

    stages: Stages
    work: dist.Work | None
    future: PipelinedFuture
    device: torch.device
    backward: int


class Pipeline:
    """The buckets of a step whose stages are under way, the newest first."""

    def __init__(self) -> None:
        self._running: list[_Running] = []
        self._unfinished: dict[PipelinedFuture, _Running] = {}

    def add(self, stages: Stages, device: torch.device, *, is_first: bool, is_last: bool) -> PipelinedFuture:
        """Begin a bucket's stages. On CUDA, take every bucket before it one stage further, the newest first.

        device: the bucket's. The first stage comes after the current stream's work so far.

        Raises the error of any bucket, on the thread that calls the hooks.
        """
        backward = torch._C._current_graph_task_id()
        if is_first:
            self._drop_of_other_backwards(backward)
            self.finish()
        wait_for_current_stream(device)
        future, earlier, self._running = PipelinedFuture(self.finish, device), self._running, []
        on_host = [each for each in earlier if not has_streams(each.device)]
        on_streams = [each for each in earlier if has_streams(each.device)]
        begun = self._advance([_Running(stages, None, future, device, backward), *on_streams])
        self._running = [*begun, *on_host]
        if is_last:
            self.finish()
        elif self._running and not earlier and backward != -1:
            # The last bucket may go to another hook. This runs before DDP waits for futures.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        return future

    def finish(self) -> None:
        """Take all buckets to their end, one stage each in turn; on a CPU the oldest first."""
        while self._running:
            running, self._running = self._running, []
            on_streams = [each for each in running if has_streams(each.device)]
            on_host = [each for each in reversed(running) if not has_streams(each.device)]
            self._running = [*self._advance(on_streams), *reversed(self._advance(on_host))]

    def _drop_of_other_backwards(self, backward: int) -> None:
        """Drop what a backward that an error has ended left: the buffers have other gradients already.

        A backward without an error leaves nothing. What was begun outside of any goes on.
        """
        left = [each for each in self._running if each.backward not in (-1, backward)]
        self._running = [each for each in self._running if each not in left]
        error = RuntimeError("an error ended the step before this bucket was averaged")
        for each in left:
            if each.work is not None:
                with suppress(RuntimeError):
                    on_side_stream(each.device, each.work.wait)
            each.stages.close()
            self._unfinished.pop(each.future, None)
            each.future.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type

    def _advance(self, buckets: list[_Running]) -> list[_Running]:
        """Run the next stage of each bucket, on side streams. Returns the buckets that have more stages."""
        found: list[_Running | None] = []
        for device, of_device in groupby(buckets, lambda each: each.device):
            found += on_side_stream(device, partial(self._step_each, list(of_device)))
        return [each for each in found if each]

    def _step_each(self, buckets: list[_Running]) -> list[_Running | None]:
        return [self._step(each) for each in buckets]

    def _step(self, bucket: _Running) -> _Running | None:
        """Run a bucket's next stage. Returns None after the last stage.

        After an error no bucket under way is averaged, and their futures hold the error.
        """
        self._unfinished[bucket.future] = bucket
        try:
            advanced = _advanced(bucket)
        except Exception as error:
            for each in self._unfinished.values():
                if not each.future.done():
                    each.future.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type
                if each.work is not None and has_streams(each.device) and each is not bucket:
                    # The memory of its buffers is used again, after the collective.
                    on_side_stream(each.device, each.work.wait)
            self._unfinished.clear()
            raise
        if advanced is None:
            del self._unfinished[bucket.future]
        else:
            self._unfinished[bucket.future] = advanced
        return advanced


def _advanced(bucket: _Running) -> _Running | None:
    """Wait for a bucket's collective and run its next stage. The last stage completes the future."""
    try:
        return bucket._replace(work=_next(bucket.stages, bucket.work))
    except StopIteration as end:
        bucket.future.set_result(end.value)
        return None


class _Pipelines(threading.local):
    """A thread's pipeline for hooks that keep nothing between buckets."""

    def __init__(self) -> None:
        self.shared = Pipeline()


_of_thread = _Pipelines()


def average_in_stages(
    bucket: dist.GradBucket, stages: Stages, operation: Operation, pipeline: Pipeline | None = None
) -> Future:
    """Return a future of the bucket's average, while its stages run.

    operation: explains errors of the collectives.
    pipeline: by default the thread's one.
    """
    return (pipeline or _of_thread.shared).add(
        explained(stages, operation),
        bucket.buffer().device,
        is_first=bucket.index() == 0,
        is_last=bucket.is_last() or is_waited_for_at_once(bucket),
    )


def is_waited_for_at_once(bucket: dist.GradBucket) -> bool:
    """Return whether torch waits for this bucket's average before it calls another bucket's hook.

    True in a static graph's first step: torch's DDP calls all hooks at the end of backward, in a callback of
    the autograd engine, and waits for their futures there. No later hook or callback could complete a future.
    """
    is_in_backward = torch._C._current_graph_task_id() != -1
    return isinstance(bucket, dist.GradBucket) and is_in_backward and not torch._C._current_autograd_node()
