"""The quantized all-reduce on real ranks: averages, error feedback, checkpoints, training."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradcomp
from gradcomp.comm.pipeline import run_through
from gradcomp.compress import BucketSpec
from gradcomp.compress.consolidation import average_errors
from gradcomp.compress.quantized import QuantizedCompressor, QuantizedOptions
from gradcomp.hooks import default_hooks
from gradcomp.hooks.quantization_hooks import QuantizationState, quantization_hook
from gradcomp.testing import check_hook
from tests.depth import everyday
from tests.hooks.powersgd_oracle import Bucket, random_gradient, relative
from tests.hooks.powersgd_runs import reload
from tests.kept import error_in
from tests.ranks import RankError

SHAPES = [(40, 30), (17,), (8, 3, 5), (1,), (3, 2)]
NUMEL = 40 * 30 + 17 + 8 * 3 * 5 + 1 + 6
EXACT = [slice(1200, 1217), slice(1337, 1344)]  # vectors, and tensors smaller than a block of 16
# ‖output − mean‖ / ‖mean‖ for normal gradients, quantized twice.
LOSS = {4: 0.2, 8: 0.02}
BITS = pytest.mark.parametrize("bits", [4, 8])


pytestmark = pytest.mark.usefixtures("plain_torch")


def state_of(bits, **options):
    return QuantizationState(bits=bits, block_size=16, **options)


def take_step(state, rank, step, dtype=torch.float32):
    """Average one bucket; return its input and output."""
    gradient = random_gradient(SHAPES, rank, step, dtype)
    output = quantization_hook(state, Bucket(gradient.clone(), SHAPES)).wait()
    return gradient, output


def one_step(rank, bits, dtype):
    return take_step(state_of(bits), rank, 0, dtype)


@BITS
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_mean(run_ranks, bits, world_size, dtype):
    results = run_ranks(one_step, world_size, bits, dtype)
    mean = torch.stack([gradient.double() for gradient, _ in results]).mean(0)
    for _, output in results:
        assert output.dtype == dtype
        assert torch.equal(output, results[0][1])
        assert relative(output, mean) < LOSS[bits]
        for part in EXACT:
            assert torch.allclose(
                output[part].double(), mean[part], rtol=2 * torch.finfo(dtype).eps, atol=1e-7
            )


def accumulate(rank, bits, saved):
    """Return the sums of inputs and outputs over steps, continued from `saved` if given, and the state."""
    state = state_of(bits)
    if saved is not None:
        state.load_state_dict(reload(saved))
    first = state.iter
    steps = [take_step(state, rank, step) for step in range(first, first + 6)]
    inputs, outputs = (sum(each.double() for each in column) for column in zip(*steps, strict=True))
    saved = state.state_dict()
    return inputs, outputs, saved


@BITS
@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_lost_comes_back(run_ranks, bits, world_size):
    """Σ outputs + mean error = Σ mean inputs, also on another number of ranks."""
    runs = run_ranks(accumulate, world_size, bits, None)
    inputs = torch.stack([run[0] for run in runs]).mean(0)
    errors = torch.stack([error_in(run[2]).double() for run in runs]).mean(0)
    assert relative(runs[0][1] + errors, inputs) < 1e-6
    assert errors.norm() > 0
    merged = average_errors([run[2] for run in runs], state_of(bits).checked)
    resumed = run_ranks(accumulate, 2, bits, merged)
    inputs = torch.stack([run[0] for run in resumed]).mean(0)
    after = torch.stack([error_in(run[2]).double() for run in resumed]).mean(0)
    assert relative(resumed[0][1] + after, inputs + errors) < 1e-6


def broken_off(rank, bits):
    """Return the last outputs of a whole run, and of a run saved, loaded and resumed after three steps."""
    whole, first = state_of(bits), state_of(bits)
    expected = [take_step(whole, rank, step)[1] for step in range(6)]
    for step in range(3):
        take_step(first, rank, step)
    second = state_of(bits)
    second.load_state_dict(reload(first.state_dict()))
    return expected[3:], [take_step(second, rank, step)[1] for step in range(3, 6)]


@BITS
def test_a_resumed_run_has_the_same_bits(run_ranks, bits):
    for expected, resumed in run_ranks(broken_off, 3, bits):
        assert all(torch.equal(one, other) for one, other in zip(expected, resumed, strict=True))


def skip_a_layer(rank, bits):
    """Take two steps, then one in which no rank uses the first tensor.

    Returns (state before that step, output, state after it).
    """
    spec = BucketSpec(tuple(SHAPES), torch.float32, torch.device("cpu"), dist.get_world_size(), 0)
    compressor = QuantizedCompressor(spec, QuantizedOptions(bits, 16))
    for step in range(2):
        compressor.average(random_gradient(SHAPES, rank, step), dist.group.WORLD, step)
    before = compressor.state()
    flat = random_gradient(SHAPES, rank, 3)
    flat[: 40 * 30] = 0
    run_through(compressor.reduce(flat, flat, dist.group.WORLD, 3, unused=[0]))
    return before, flat, compressor.state()


@BITS
def test_a_layer_that_every_rank_skips_keeps_its_error(run_ranks, bits):
    for before, output, after in run_ranks(skip_a_layer, 2, bits):
        first, second = slice(0, 40 * 30), slice(1217, 1337)
        assert not output[first].any()
        assert torch.equal(after["error"][first], before["error"][first])
        assert not torch.equal(after["error"][second], before["error"][second])


@BITS
def test_without_feedback_nothing_is_kept(run_ranks, bits):
    state_dicts = [run[2] for run in run_ranks(without_feedback, 2, bits)]
    assert all(error_in(each) is None for each in state_dicts)


def without_feedback(rank, bits):
    state = state_of(bits, use_error_feedback=False)
    return *take_step(state, rank, 0), state.state_dict()


def poisoned(rank, bits):
    """Return a step's output with a NaN and an inf on rank 1, and the next step's input and output."""
    state = state_of(bits)
    gradient = random_gradient(SHAPES, rank, 0)
    if rank == 1:
        gradient[100], gradient[1200] = torch.nan, torch.inf
    bad = quantization_hook(state, Bucket(gradient, SHAPES)).wait()
    return bad, take_step(state, rank, 1)


@BITS
def test_a_step_that_is_not_finite_is_forgotten(run_ranks, bits):
    results = run_ranks(poisoned, 2, bits)
    mean = torch.stack([gradient.double() for _, (gradient, _) in results]).mean(0)
    for bad, (_, good) in results:
        assert bad[100].isnan()
        assert bad[1200].isinf()
        assert relative(good, mean) < 3 * LOSS[bits]


class Net(nn.Module):
    """Three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(rank, way):
    """Train with 4 bits; return the first loss, the last loss, and the parameters."""
    torch.manual_seed(0)
    model, state = Net(), state_of(4)
    data = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))
    wrapped = model
    if way in ("torch", "none"):
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    elif way == "gradcomp":
        wrapped = gradcomp.DistributedDataParallel(model, bucket_cap_mb=0.001)
    if way in ("torch", "gradcomp"):
        wrapped.register_comm_hook(state, quantization_hook)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (wrapped(data) - data[:, :16].sin()).square().mean()
        loss.backward()
        if way == "average_":
            gradcomp.average_([p.grad for p in model.parameters()], quantization_hook, state)
        optimizer.step()
        losses.append(loss.item())
    assert way == "none" or state.compression_stats()[0] > 3
    return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("way", ["torch", "gradcomp", "average_"])
def test_it_trains_everywhere(run_ranks, way):
    (first, last, one), (_, _, other) = run_ranks(train, 2, way)
    (_, uncompressed, _), _ = run_ranks(train, 2, "none")
    assert last < 0.9 * first
    assert abs(last - uncompressed) < 0.01 * first
    assert torch.equal(one, other)


@pytest.mark.parametrize("bits", everyday([8], [4, 8]))  # 4 every day in tests/testing/test_check.py
def test_every_property_of_the_kit(bits):
    report = check_hook(
        quantization_hook,
        lambda group: QuantizationState(group, bits, block_size=16),
        max_examples=everyday(2, 10),
    )
    report.raise_if_failed()
    held = {name for name, verdict in report.verdicts.items() if "holds" in str(verdict)}
    assert {
        *("completes", "replicas_identical", "error_feedback_identity", "checkpoint_round_trip"),
        *("nonfinite_seen_by_all", "held_back_comes_out", "bounded_memory"),
    } <= held


def other_bits(rank):
    take_step(state_of(8 if rank else 4), rank, 0)


def test_ranks_that_disagree_are_told(run_ranks):
    with pytest.raises(RankError, match=r"bits.* 4 on rank 0 and 8"):
        run_ranks(other_bits, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": True}, "bits is True"),
        ({"block_size": 7}, "block_size is 7"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 4098}, "block_size is 4098, but must be an even number of elements from 2 to 4096"),
        ({"use_error_feedback": 1}, "error_feedback is 1"),
        (
            {"within_dtype": torch.float32},
            "within_dtype is torch.float32, but must be None, torch.bfloat16 or",
        ),
        ({"start_iter": -1}, "start_iter is -1"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationState(**options)


def test_another_state_is_refused():
    with pytest.raises(TypeError, match="takes a QuantizationState"):
        quantization_hook(None, Bucket(torch.zeros(4), [(4,)]))


def test_no_group_is_left(group_of_one):
    """A bucket without elements, or with vectors alone, is averaged as well."""
    state = QuantizationState()
    assert quantization_hook(state, Bucket(torch.zeros(0), [(0,)])).wait().numel() == 0
    vector = torch.randn(5)
    assert torch.equal(quantization_hook(state, Bucket(vector.clone(), [(5,)])).wait(), vector)
    assert dist.is_initialized()


def last_bucket_exactly(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    hook = default_hooks.allreduce_hook if bucket.is_last() else quantization_hook
    return hook(None if bucket.is_last() else state, bucket)


def with_two_hooks(rank):
    """Return each class's gradients under a user's hook that gives the last bucket to another hook."""
    found = []
    for cls in (nn.parallel.DistributedDataParallel, gradcomp.DistributedDataParallel):
        torch.manual_seed(0)
        model = cls(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.01)
        model.register_comm_hook(state_of(8), last_bucket_exactly)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model.zero_grad()
            model(torch.randn(8, 64)).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def test_the_last_bucket_may_be_another_hooks(run_ranks):
    """Then only the end of backward completes the other buckets' futures."""
    results = run_ranks(with_two_hooks, 2)
    for by_class in zip(*results, strict=True):
        for one, other in zip(*by_class, strict=True):
            assert torch.equal(one, other)
            assert one.any()
