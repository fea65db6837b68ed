"""Several collectives per bucket on a CPU, while later buckets are computed and compressed.

A bucket's average is a sequence of stages with a collective between each two. A stage waits for the
collective before it. So on one thread a bucket's stages are spread over the calls of the hook:

    hook of bucket 0   stage 1 ─ A₀ ▷
    backward, and A₀ is under way
    hook of bucket 1   stage 1 ─ A₁ ▷ ─ wait for A₀ ─ stage 2 of bucket 0 ─ B₀ ▷
    backward, and A₁ and B₀ are under way
    hook of bucket 2   stage 1 ─ A₂ ▷ ─ wait for A₁ ─ stage 2 of bucket 1 ─ B₁ ▷ ─ wait for B₀ ─ …
    the last bucket's hook goes on until all are done

The newest bucket's first stage comes before the others' next stages. So every rank issues A₀ A₁ B₀ A₂ B₁ …:
an order that depends on the buckets alone, with no thread or callback.
"""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .process_group import Operation

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

    def __init__(self, complete: Callable[[], None]):
        super().__init__()
        self._complete = complete

    def wait(self) -> Any:
        if not self.done():
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        chained = PipelinedFuture(self._complete)

        def follow(done: Any) -> None:
            try:
                chained.set_result(callback(done))
            except Exception as error:
                chained.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type

        self.add_done_callback(follow)
        return chained


class Pipeline:
    """The buckets of a step whose stages are under way, the newest first."""

    def __init__(self) -> None:
        self._running: list[tuple[Stages, dist.Work | None, PipelinedFuture]] = []
        self._unfinished: set[PipelinedFuture] = set()

    def add(self, stages: Stages, *, is_first: bool, is_last: bool) -> PipelinedFuture:
        """Begin a bucket's stages, and take every bucket before it one stage further, the newest first.

        Raises the error of any bucket, on the thread that calls the hooks.
        """
        if is_first:
            self.finish()  # buckets that an error in backward has left, the same on every rank
        earlier, self._running = self._running, []
        future = PipelinedFuture(self.finish)
        self._unfinished.add(future)
        begun = self._step(stages, None, future)
        self._running = [each for each in (begun, *(self._step(*each) for each in earlier)) if each]
        if is_last:
            self.finish()
        elif self._running and not earlier and torch._C._current_graph_task_id() != -1:
            # The last bucket may go to another hook. This runs before DDP waits for futures.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        return future

    def finish(self) -> None:
        """Take all buckets to their end, one stage each in turn."""
        while self._running:
            earlier, self._running = self._running, []
            self._running = [each for each in [self._step(*each) for each in earlier] if each]

    def _step(
        self, stages: Stages, work: dist.Work | None, future: PipelinedFuture
    ) -> tuple[Stages, dist.Work | None, PipelinedFuture] | None:
        """Wait for a bucket's collective and run its next stage. Returns None after the last stage.

        After an error no bucket under way is averaged, and their futures hold the error.
        """
        try:
            return stages, _next(stages, work), future
        except StopIteration as end:
            future.set_result(end.value)
        except Exception as error:
            for each in {future, *self._unfinished}:
                if not each.done():
                    each.set_exception(error)  # type: ignore[arg-type]  # torch names the result's type
            self._unfinished.clear()
            raise
        self._unfinished.discard(future)
        return None


def is_waited_for_at_once(bucket: dist.GradBucket) -> bool:
    """Return whether torch waits for this bucket's average before it calls another bucket's hook.

    True in a static graph's first step: torch's DDP calls all hooks at the end of backward, in a callback of
    the autograd engine, and waits for their futures there. No later hook or callback could complete a future.
    """
    is_in_backward = torch._C._current_graph_task_id() != -1
    return isinstance(bucket, dist.GradBucket) and is_in_backward and not torch._C._current_autograd_node()
