"""The stages of several buckets: their order, who completes a future, and how errors end a step."""

import pytest
import torch

from gradcomp import average_
from gradcomp.comm.bucket import GradBucket
from gradcomp.comm.pipeline import Pipeline, average_in_stages, run_through
from gradcomp.comm.process_group import ExplainedError, Explaining

OPERATION = Explaining("average bucket 0 with a hook", 1, 2)


class Work:
    """Stands in for a collective."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        log.append(f"issue {name}")

    def wait(self):
        self.log.append(f"wait {self.name}")


def bucket(index, log, names="AB"):
    """Yield one collective per name; return the index."""
    for name in names:
        yield Work(f"{name}{index}", log)
    log.append(f"end {index}")
    return index


def add(pipeline, stages, *, is_first, is_last):
    def averaging():
        buffer.fill_((yield from stages))

    buffer = torch.full((1,), -1.0)
    return pipeline.add(GradBucket(0, buffer, [], is_last), averaging(), OPERATION, is_first=is_first)


def issued(log):
    return [entry.split()[1] for entry in log if entry.startswith("issue")]


def test_no_hook_waits_for_an_earlier_bucket():
    log, pipeline, futures = [], Pipeline(), []
    for index in range(4):
        log.append(f"hook {index}")
        futures.append(add(pipeline, bucket(index, log), is_first=index == 0, is_last=index == 3))
    assert issued(log) == ["A0", "A1", "A2", "A3", "B0", "B1", "B2", "B3"]
    assert log.index("wait A0") > log.index("issue A3")
    # What each waits for first has been under way for longest.
    assert [entry for entry in log if "wait" in entry] == [
        f"wait {name}{i}" for name in "AB" for i in range(4)
    ]
    assert [future.value() for future in futures] == [0, 1, 2, 3]


@pytest.mark.parametrize("lengths", [(1, 3, 2), (0, 2, 0), (4, 0, 1)])
def test_buckets_may_have_different_numbers_of_stages(lengths):
    log, pipeline = [], Pipeline()
    futures = [
        add(pipeline, bucket(index, log, "ABCD"[:length]), is_first=index == 0, is_last=index == 2)
        for index, length in enumerate(lengths)
    ]
    assert [future.value() for future in futures] == [0, 1, 2]
    assert len(issued(log)) == sum(lengths)


def test_whoever_waits_completes_a_future():
    """A caller may wait for each bucket before it hands out the next."""
    log, pipeline = [], Pipeline()
    for index in range(3):
        future = add(pipeline, bucket(index, log), is_first=index == 0, is_last=False)
        assert not future.done()
        assert future.wait() == index
    assert issued(log) == ["A0", "B0", "A1", "B1", "A2", "B2"]


def test_whoever_waits_for_what_follows_completes_it():
    future = add(Pipeline(), bucket(3, []), is_first=True, is_last=False)
    assert future.then(lambda done: done.value() * 2).then(lambda done: done.value() + 1).wait() == 7
    failed = future.then(lambda done: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.wait()


def test_an_error_is_raised_in_the_hook():
    def failing():
        yield None
        raise RuntimeError("connection lost")

    log, pipeline = [], Pipeline()
    add(pipeline, failing(), is_first=True, is_last=False)
    with pytest.raises(RuntimeError, match="connection lost"):
        add(pipeline, bucket(1, log), is_first=False, is_last=True)
    assert log == ["issue A1", "wait A1"]  # a collective may still write to its buffer
    # The next step starts without the failed bucket.
    assert add(pipeline, bucket(0, log), is_first=True, is_last=True).value() == 0


def test_whoever_waits_after_an_error_gets_it():
    class Lost(Work):
        def wait(self):
            raise RuntimeError("connection lost")

    def lost(log):
        yield Lost("A0", log)
        raise AssertionError("the stage after a collective that failed must not run")

    log, pipeline = [], Pipeline()
    future = add(pipeline, lost(log), is_first=True, is_last=False)
    with pytest.raises(
        ExplainedError, match="rank 1 of 2 could not average bucket 0 with a hook: connection"
    ):
        add(pipeline, bucket(1, log), is_first=False, is_last=True)
    for waited_for in (future, future.then(lambda done: done.value())):
        with pytest.raises(RuntimeError, match="connection lost"):
            waited_for.wait()
    assert add(pipeline, bucket(0, log), is_first=True, is_last=True).value() == 0


def test_other_errors_of_stages_stay_what_they_are():
    def failing():
        yield None
        raise torch.OutOfMemoryError("lacks memory")

    with pytest.raises(torch.OutOfMemoryError, match="lacks memory") as raised:
        add(Pipeline(), failing(), is_first=True, is_last=True)
    assert str(raised.value) == "lacks memory"


def begin_in_backward(pipeline, log, index, *, is_last, fails=False):
    """Return the future of a bucket that a backward brings; the backward may fail afterwards."""
    futures, leaf = [], torch.zeros(1, requires_grad=True)

    def hook(_):
        futures.append(add(pipeline, bucket(index, log), is_first=True, is_last=is_last))
        if fails:
            raise ValueError("backward broke off")

    leaf.register_hook(hook)
    leaf.sum().backward()
    return futures[0]


def test_what_a_broken_backward_left_is_dropped():
    """Its collectives are completed, but its average would overwrite the next step's gradients."""
    log, pipeline = [], Pipeline()
    with pytest.raises(ValueError, match="broke off"):
        begin_in_backward(pipeline, log, 7, is_last=False, fails=True)
    broken_off = next(iter(pipeline._unfinished)).future
    assert begin_in_backward(pipeline, log, 0, is_last=True).value() == 0
    assert log == ["issue A7", "wait A7", "issue A0", "wait A0", "issue B0", "wait B0", "end 0"]
    with pytest.raises(RuntimeError, match="an error ended the step before this bucket was averaged"):
        broken_off.wait()
    assert not pipeline._unfinished


def test_what_was_begun_outside_of_backward_is_finished():
    """Every rank has issued its collectives: an exchange of LocalSteps under way, say."""
    log, pipeline = [], Pipeline()
    earlier = add(pipeline, bucket(7, log), is_first=True, is_last=False)
    assert begin_in_backward(pipeline, log, 0, is_last=True).value() == 0
    assert earlier.value() == 7
    assert issued(log) == ["A7", "B7", "A0", "B0"]


def test_an_error_between_the_buckets_of_average_leaves_nothing_under_way():
    log = []

    def hook(_, given):
        if given.index() == 1:
            raise ValueError("refused")
        return average_in_stages(given, bucket(7, log), OPERATION)

    with pytest.raises(ValueError, match="refused"):
        average_([torch.ones(1), torch.ones(1, dtype=torch.float64)], hook)
    average_in_stages(GradBucket(0, torch.zeros(1), [], True), bucket(0, log), OPERATION)
    assert issued(log) == ["A7", "A0", "B0"]


def test_run_through_waits_for_every_collective():
    log = []
    run_through(bucket(5, log))
    assert log == ["issue A5", "wait A5", "issue B5", "wait B5", "end 5"]
