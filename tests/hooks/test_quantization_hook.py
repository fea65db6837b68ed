"""The quantized all-reduce on real ranks: averages, error feedback, checkpoints, training."""

from functools import partial

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
from tests.ranks import of_all_ranks, simulate
from tests.training import Averaged, Layers, drawn, parameters_of
from tests.training import train as train_on

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
def test_the_mean(bits, world_size, dtype):
    results = simulate(one_step, world_size, bits, dtype)
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
def test_what_is_lost_comes_back(bits, world_size):
    """Σ outputs + mean error = Σ mean inputs, also on another number of ranks."""
    runs = simulate(accumulate, world_size, bits, None)
    inputs = torch.stack([run[0] for run in runs]).mean(0)
    errors = torch.stack([error_in(run[2]).double() for run in runs]).mean(0)
    assert relative(runs[0][1] + errors, inputs) < 1e-6
    assert errors.norm() > 0
    merged = average_errors([run[2] for run in runs], state_of(bits).checked)
    resumed = simulate(accumulate, 2, bits, merged)
    inputs = torch.stack([run[0] for run in resumed]).mean(0)
    after = torch.stack([error_in(run[2]).double() for run in resumed]).mean(0)
    assert relative(resumed[0][1] + after, inputs + errors) < 1e-6


@pytest.mark.simulated_ranks(2)
@BITS
def test_a_layer_that_every_rank_skips_keeps_its_error(rank, bits):
    """Take two steps, then one in which no rank uses the first tensor."""
    spec = BucketSpec(tuple(SHAPES), torch.float32, torch.device("cpu"), dist.get_world_size(), 0)
    compressor = QuantizedCompressor(spec, QuantizedOptions(bits, 16))
    for step in range(2):
        compressor.average(random_gradient(SHAPES, rank, step), dist.group.WORLD, step)
    before = compressor.state()
    flat = random_gradient(SHAPES, rank, 3)
    flat[: 40 * 30] = 0
    run_through(compressor.reduce(flat, flat, dist.group.WORLD, 3, unused=[0]))
    output, after = flat, compressor.state()
    first, second = slice(0, 40 * 30), slice(1217, 1337)
    assert not output[first].any()
    assert torch.equal(after["error"][first], before["error"][first])
    assert not torch.equal(after["error"][second], before["error"][second])


@pytest.mark.simulated_ranks(2)
@BITS
def test_without_feedback_nothing_is_kept(rank, bits):
    state = state_of(bits, use_error_feedback=False)
    state_dicts = [run[2] for run in of_all_ranks((*take_step(state, rank, 0), state.state_dict()))]
    assert all(error_in(each) is None for each in state_dicts)


def train(rank, way):
    """Train with 4 bits; return the losses, and the parameters."""
    torch.manual_seed(0)
    state, data = state_of(4), drawn(64, 32, rank=rank)
    hook = None if way == "none" else quantization_hook
    options = {} if way == "average_" else {"bucket_cap_mb": 0.001}
    model = Averaged(Layers(32, 32, 32, 16), "torch" if way == "none" else way, hook, state, **options)
    losses = train_on(
        model, lambda call, _: (call(data) - data[:, :16].sin()).square().mean(), range(30), 0.2
    )
    assert way == "none" or state.compression_stats()[0] > 3
    return losses[0], losses[-1], parameters_of(model)


@pytest.mark.parametrize("way", ["torch", "gradcomp", "average_"])
def test_it_trains_everywhere(run_ranks, way):
    (first, last, one), (_, _, other) = run_ranks(train, 2, way)
    (_, uncompressed, _), _ = run_ranks(train, 2, "none")
    assert last < 0.9 * first
    assert abs(last - uncompressed) < 0.01 * first
    assert torch.equal(one, other)


HELD = (
    *("completes", "replicas_identical", "error_feedback_identity", "checkpoint_round_trip"),
    *("nonfinite_seen_by_all", "held_back_comes_out", "bounded_memory"),
)


@pytest.mark.parametrize("bits", everyday([8], [4, 8]))  # 4 every day in tests/testing/test_check.py
def test_every_property_of_the_kit(bits):
    make = partial(QuantizationState, bits=bits, block_size=16)
    report = check_hook(quantization_hook, make, max_examples=everyday(2, 10), only=everyday(HELD, ()))
    report.raise_if_failed()
    assert {name for name, verdict in report.verdicts.items() if verdict.outcome == "holds"} >= set(HELD)


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
            {"uncompressed_dtype": torch.float32},
            "uncompressed_dtype is torch.float32, but must be None, torch",
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


@pytest.mark.ranks(2)
def test_the_last_bucket_may_be_another_hooks(rank):
    """Then only the end of backward completes the other buckets' futures."""
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
    results = of_all_ranks(found)
    for by_class in zip(*results, strict=True):
        for one, other in zip(*by_class, strict=True):
            assert torch.equal(one, other)
            assert one.any()
