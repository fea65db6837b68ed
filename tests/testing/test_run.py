"""run_hook runs a hook as DDP does, and its measurements are right."""

import gc
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist

from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.testing import RankError, Workload, claims_of, run_hook
from gradcomp.testing.run import CheckpointError, reload, tensors_in
from tests.testing import compressors
from tests.testing.averaging import done

pytestmark = pytest.mark.usefixtures("plain_torch")

WORKLOAD = Workload(((6, 5), (3,), (2, 2)), ((2, 1), (0,)), steps=3, noise=1.0, drift=1.0)


def power_sgd(process_group):
    return powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=1, start_powerSGD_iter=2)


def test_outputs_are_the_averages_by_step_rank_and_index():
    run = run_hook(default_hooks.allreduce_hook, None, WORKLOAD)
    for step in range(3):
        for rank in range(2):
            for output, mean in zip(run.outputs[step][rank], WORKLOAD.mean(step), strict=True):
                torch.testing.assert_close(output.double(), mean, rtol=1e-6, atol=1e-7)


def test_buckets_come_as_in_ddp():
    seen = []

    def hook(group, bucket):
        gradients = [gradient.clone() for gradient in bucket.gradients()]
        seen.append(
            (bucket.index(), bucket.is_last(), bucket.buffer().data_ptr(), bucket.parameters(), gradients)
        )
        return done([bucket.buffer().to(torch.float64)])  # DDP takes a list of one, and casts

    run = run_hook(
        hook, None, Workload(((6, 5), (3,), (2, 2)), ((2, 1), (0,)), world_size=1, steps=2, noise=1.0)
    )
    assert [(index, last) for index, last, *_ in seen] == [(0, False), (1, True)] * 2
    for first, second in zip(seen[:2], seen[2:], strict=True):
        assert first[2] == second[2], "another buffer"
        assert all(a is b for a, b in zip(first[3], second[3], strict=True)), "other parameters"
    assert [tuple(t.shape) for t in seen[0][4]] == [(2, 2), (3,)]
    assert torch.equal(run.outputs[0][0][1], seen[0][4][1])
    assert run.outputs[0][0][1].dtype == torch.float32


def test_all_buckets_are_in_flight_before_one_is_waited_for():
    events = []

    def hook(group, bucket):
        events.append(f"issue {bucket.index()}")
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda f: events.append(f"done {bucket.index()}") or f.value())

    run_hook(hook, None, Workload(((1,), (1,)), ((0,), (1,)), world_size=1), schedule=3)
    assert events.index("issue 1") < len(events) - 1
    assert sorted(events) == ["done 0", "done 1", "issue 0", "issue 1"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda buffer: buffer, "returned Tensor, but must return a torch.futures.Future"),
        (lambda buffer: done(buffer[1:]), r"holds \[2\], but a bucket of 3 elements"),
        (lambda buffer: done(None), "holds NoneType, but a bucket of 3"),
    ],
)
def test_a_wrong_result_is_refused(result, message):
    with pytest.raises(RankError, match=message):
        run_hook(lambda group, bucket: result(bucket.buffer()), None, Workload(((3,),)))


def test_bytes_on_the_wire():
    plain = run_hook(default_hooks.allreduce_hook, None, WORKLOAD).wire_bytes
    halved = run_hook(default_hooks.fp16_compress_hook, None, WORKLOAD).wire_bytes
    assert plain == [[WORKLOAD.num_bytes] * 2] * 3
    assert halved[1:] == [[WORKLOAD.num_bytes // 2] * 2] * 2  # in the first step the ranks compare hooks
    powersgd = run_hook(powerSGD_hook.powerSGD_hook, power_sgd, WORKLOAD).wire_bytes
    assert powersgd[2] == [4 * (3 + 4 + 6 + 5)] * 2  # a vector, a 2×2 matrix not worth it, P and Q


def test_errors_and_bytes_of_the_state():
    errors_of = claims_of(powerSGD_hook.powerSGD_hook, power_sgd).errors_of
    run = run_hook(powerSGD_hook.powerSGD_hook, power_sgd, WORKLOAD, errors_of=errors_of)
    assert not any(error.any() for error in run.errors[1][0])
    assert [tuple(error.shape) for error in run.errors[2][1]] == [(6, 5), (3,), (2, 2)]
    assert run.errors[2][0][0].any()
    assert run.state_bytes[0] == [0, 0]
    assert run.state_bytes[2][0] >= 4 * 30


def test_checkpoints_on_the_way():
    run = run_hook(powerSGD_hook.powerSGD_hook, power_sgd, WORKLOAD)
    seen = []

    def make_state(process_group):
        seen.append(process_group)
        return power_sgd(process_group)

    resumed = run_hook(powerSGD_hook.powerSGD_hook, make_state, WORKLOAD, checkpoint_at=2)
    assert len(seen) == 2
    assert torch.equal(run.outputs[2][0][0], resumed.outputs[2][0][0])


class Loadable:
    """A state of a class that torch.load's safe default doesn't know."""

    def __init__(self, process_group=None):
        self.process_group, self.value = process_group, 0

    def __getstate__(self):
        return {"value": self.value}


class WithStateDict(Loadable):
    def __getstate__(self):
        raise TypeError("not me")

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


@pytest.mark.parametrize("state_class", [Loadable, WithStateDict])
def test_ways_to_reload_a_state(state_class):
    state = state_class()
    state.value = 7
    with pytest.raises(CheckpointError, match="safe default"):
        reload(state, state_class, None)
    loaded = reload(state, state_class, None, safe=False)
    assert loaded is not state
    assert loaded.value == 7


def test_a_state_that_cant_be_saved():
    with pytest.raises(CheckpointError, match="can't be saved and loaded: TypeError"):
        reload({"generator": (x for x in ())}, dict, None, safe=False)


def test_tensors_in_a_state():
    shared = torch.zeros(8)
    hidden = torch.ones(2)

    class State:
        __slots__ = ("function", "nested", "parameter")

    state = State()
    state.nested = {"a": [shared[:4], (shared[4:],)]}
    state.function = lambda: hidden
    state.parameter = torch.nn.Parameter(torch.zeros(100))
    found = tensors_in(state)
    assert sorted(tensor.untyped_storage().nbytes() for tensor in found) == [8, 32]
    del found
    gc.collect()


def test_the_same_on_gloo():
    options = {"errors_of": attrgetter("errors"), "checkpoint_at": 1, "safe_checkpoint": False}
    simulated = run_hook(compressors.hook, compressors.Halves, WORKLOAD, **options)
    real = run_hook(compressors.hook, compressors.Halves, WORKLOAD, ranks="gloo", **options)
    for step in range(3):
        for rank in range(2):
            for one, other in ((simulated.outputs, real.outputs), (simulated.errors, real.errors)):
                for a, b in zip(one[step][rank], other[step][rank], strict=True):
                    assert torch.equal(a, b)
    assert real.state_bytes == simulated.state_bytes
    assert simulated.wire_bytes == [[WORKLOAD.num_bytes] * 2] * 3
    assert real.wire_bytes == [[0, 0]] * 3
