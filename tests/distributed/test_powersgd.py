"""PowerSGD with real processes: one step against torch's and a float64 oracle, error feedback, replicas."""

import copy
import hashlib
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from gradcomp.hooks import default_hooks, powerSGD_hook
from tests.distributed.powersgd_oracle import (
    Bucket,
    compressed,
    positions,
    powersgd_step,
    projector,
    random_gradient,
    relative,
    starts,
)
from tests.distributed.ranks import device_of_rank, run_ranks
from tests.distributed.test_default_hooks import Net, backward, flat_grads
from tests.tolerances import UNIT_ROUNDOFF, average

# One step of float32 from an identical state: products of up to 300 terms and an orthonormalisation. Measured
# 4e-7 against torch, 2e-7 against the oracle.
ONE_STEP = 1e-5
# The span of the new Q, which the spread of its singular values magnifies. Measured 4e-7.
ONE_STEP_SPAN = 1e-5
# The same in float64. Measured 7e-16, but the span keeps a condition number of up to 100.
ONE_STEP_FP64 = 1e-12
# Of a gradient of rank ≤ r, what one step in float32 leaves out. Measured 2e-6 behind an ill-conditioned P.
RECOVERY = 1e-5
# Two ways to orthonormalise with epsilon 1e-8 added to columns of length about 1. Measured 3e-7.
EPSILON_STEP = 1e-5
# One step with the gradient, P, Q and the result rounded to 16 bits: four roundings. Measured 1.2.
SIXTEEN_BIT_ROUNDINGS = 4

# Convolutions, vectors, small tensors, tall, wide, and three of one shape apart from each other.
SHAPES = (
    *((64, 48), (7,), (16, 3, 3, 3), (64, 48), (5,), (2, 3), (200, 10), (10, 300), (33, 65)),
    *((96, 30, 2, 2), (1, 40), (64, 48), (13, 1), (128, 160), (1,), (31, 37)),
)
START = 2
HOOKS = {
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched": powerSGD_hook.batched_powerSGD_hook,
    "fp16 around powerSGD": default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "bf16 around powerSGD": default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    "fp16 around batched": default_hooks.fp16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook),
    "bf16 around batched": default_hooks.bf16_compress_wrapper(powerSGD_hook.batched_powerSGD_hook),
    "none": None,
}


def error_of(state, bucket_index=0):
    return state.state_dict()["buckets"][bucket_index]["error"]


def directions_of(state, bucket_index=0):
    return state.state_dict()["buckets"][bucket_index]["directions"]


# One step from an identical state.


def step_of_both(rank, options, shapes, steps_before):
    """(gradient, ours, theirs) of a step after steps_before of torch's: each (output, error before, after, Q)."""
    options = {"process_group": None, "start_powerSGD_iter": START, **options}
    theirs = torch_powersgd.PowerSGDState(**options)
    for step in range(START + steps_before):
        bucket = Bucket(random_gradient(shapes, rank, step), shapes)
        torch_powersgd.powerSGD_hook(theirs, bucket).wait()
    ours = powerSGD_hook.from_torch(copy.deepcopy(theirs))
    gradient = random_gradient(shapes, rank, 99)
    their_error = theirs.error_dict.get(0)
    their_output = torch_powersgd.powerSGD_hook(theirs, Bucket(gradient.clone(), shapes)).wait()
    our_output = powerSGD_hook.powerSGD_hook(ours, Bucket(gradient.clone(), shapes)).wait()
    return (
        gradient,
        (our_output, error_of(ours), directions_of(ours)),
        (their_output, their_error, theirs.error_dict.get(0)),
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_one_step_as_torchs(rank, world_size):
    """From torch's own state after some steps, whether torch batches the matrices or not."""
    for batched in (False, True):
        options = {"matrix_approximation_rank": rank, "batch_tensors_with_same_shape": batched}
        ranks = run_ranks(step_of_both, world_size, options, SHAPES, 3)
        mask = positions(SHAPES, compressed(SHAPES, rank))
        for _, (our_output, our_error, _), (their_output, _, their_error) in ranks:
            assert relative(our_output, their_output) <= ONE_STEP
            assert relative(our_error[mask], their_error[mask]) <= ONE_STEP
            assert not our_error[~mask].any()
            assert torch.equal(our_output, ranks[0][1][0])


def test_from_torch_without_warm_start_keeps_the_errors():
    """There are no factors to continue from, and the next projections differ; but not what is owed."""
    options = {"matrix_approximation_rank": 2, "warm_start": False}
    mask = positions(SHAPES, compressed(SHAPES, 2))
    ranks = run_ranks(step_of_both, 2, options, SHAPES, 3)
    outputs = torch.stack([ours[0].double() for _, ours, _ in ranks]).mean(0)
    after = torch.stack([ours[1].double() for _, ours, _ in ranks]).mean(0)
    owed = torch.stack([gradient.double() + theirs[1].double() for gradient, _, theirs in ranks]).mean(0)
    assert relative((outputs + after)[mask], owed[mask]) <= ONE_STEP


def test_from_torch_without_error_feedback_keeps_the_factors():
    options = {"matrix_approximation_rank": 2, "use_error_feedback": False}
    for _, (our_output, our_error, _), (their_output, _, _) in run_ranks(step_of_both, 2, options, SHAPES, 3):
        assert relative(our_output, their_output) <= ONE_STEP
        assert not our_error.any()


def test_from_torch_that_compressed_vectors():
    """With min_compression_rate below 1 torch "compresses" vectors too; here they are averaged."""
    options = {"matrix_approximation_rank": 2, "min_compression_rate": 0.5}
    mask = positions(SHAPES, compressed(SHAPES, 2, 0.5))
    for _, (ours, _, _), (theirs, _, _) in run_ranks(step_of_both, 2, options, SHAPES, 3):
        assert relative(ours[mask], theirs[mask]) <= ONE_STEP


@pytest.mark.parametrize("rank", [1, 2])
def test_one_step_with_epsilon_as_torchs(rank):
    """Torch's Gram–Schmidt, which takes an epsilon, runs for ranks 1 and 2."""
    options = {"matrix_approximation_rank": rank, "orthogonalization_epsilon": 1e-8}
    for _, (ours, _, _), (theirs, _, _) in run_ranks(step_of_both, 2, options, SHAPES, 3):
        assert relative(ours, theirs) <= EPSILON_STEP


def steps_of_ours(rank, hook_name, options, shapes, num_steps, dtype):
    """num_steps compressed steps: each (gradient, error before, Q before, output, error after, Q after)."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **options)
    for step in range(START):
        HOOKS[hook_name](state, Bucket(random_gradient(shapes, rank, step, dtype), shapes)).wait()
    results, before = [], None
    for step in range(num_steps):
        gradient = random_gradient(shapes, rank, START + step, dtype)
        output = HOOKS[hook_name](state, Bucket(gradient.clone(), shapes)).wait()
        after = (error_of(state), directions_of(state))
        results.append((gradient, before, output, after))
        before = after
    return results


def assert_steps_as_the_oracle(ranks, shapes, order, bound, span_bound):
    for step in range(1, len(ranks[0])):
        gradients = [results[step][0] for results in ranks]
        errors = [results[step][1][0] for results in ranks]
        qs = ranks[0][step][1][1]
        expected = powersgd_step(shapes, gradients, errors, qs, order)
        for results, error in zip(ranks, expected.errors, strict=True):
            _, _, output, (our_error, directions) = results[step]
            assert output.dtype == gradients[0].dtype
            assert relative(output, expected.output) <= bound
            if error.any():
                assert relative(our_error, error) <= bound
            for direction, q in zip(directions, expected.qs, strict=True):
                assert relative(projector(direction), projector(q)) <= span_bound


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_steps_as_the_oracles(rank, world_size):
    options = {"matrix_approximation_rank": rank}
    ranks = run_ranks(steps_of_ours, world_size, "powerSGD", options, SHAPES, 3, torch.float32)
    assert_steps_as_the_oracle(ranks, SHAPES, compressed(SHAPES, rank), ONE_STEP, ONE_STEP_SPAN)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_fp64_buckets_in_fp64(rank):
    options = {"matrix_approximation_rank": rank}
    ranks = run_ranks(steps_of_ours, 2, "powerSGD", options, SHAPES, 3, torch.float64)
    assert_steps_as_the_oracle(ranks, SHAPES, compressed(SHAPES, rank), ONE_STEP_FP64, 100 * ONE_STEP_FP64)


def test_min_compression_rate():
    """At 0.5 even matrices are compressed that grow by it; at 30 only the largest."""
    for rate, rank in [(0.5, 4), (30, 2)]:
        options = {"matrix_approximation_rank": rank, "min_compression_rate": rate}
        order = compressed(SHAPES, rank, rate)
        # Matrices of one row or column, or of rank min(n, m), leave no error to compare.
        ranks = run_ranks(steps_of_ours, 2, "powerSGD", options, SHAPES, 3, torch.float32)
        assert_steps_as_the_oracle(ranks, SHAPES, order, ONE_STEP, ONE_STEP_SPAN)
    assert len(compressed(SHAPES, 4, 0.5)) > len(compressed(SHAPES, 4)) > len(compressed(SHAPES, 2, 30)) > 0


def test_rank_above_the_matrix():
    """Then P Qᵀ is the mean itself, and there is no error."""
    shapes = ((3, 40), (40, 3), (5, 5), (1, 9), (9, 1), (4,))
    options = {"matrix_approximation_rank": 64, "min_compression_rate": 0.1}
    assert len(compressed(shapes, 64, 0.1)) == 5
    ranks = run_ranks(steps_of_ours, 2, "powerSGD", options, shapes, 3, torch.float32)
    for step in range(3):
        mean = torch.stack([results[step][0].double() for results in ranks]).mean(0)
        for results in ranks:
            _, _, output, (_, directions) = results[step]
            assert relative(output, mean + owed_before(ranks, step)) <= ONE_STEP
            assert [tuple(direction.shape) for direction in directions] == [
                *((40, 3), (3, 3), (5, 5), (9, 1), (1, 1))
            ]


def owed_before(ranks, step):
    """The mean of the ranks' errors before a step: what its output may hold beside the mean gradient."""
    if step == 0:
        return torch.zeros(ranks[0][0][0].numel(), dtype=torch.float64)
    return torch.stack([results[step][1][0].double() for results in ranks]).mean(0)


# Error feedback.


def assert_nothing_is_lost(ranks, steps, factor_rank):
    """The sum of the averaged outputs and the mean of the final errors is the sum of the mean gradients."""
    numel = ranks[0][0][0].numel()
    given, out, largest = torch.zeros(numel).double(), torch.zeros(numel).double(), 0.0
    for step in range(steps):
        given += torch.stack([results[step][0].double() for results in ranks]).mean(0)
        out += ranks[0][step][2].double()
        for results in ranks:
            largest = max(largest, float((results[step][0].abs() + results[step][3][0].abs()).max()))
    errors = torch.stack([results[-1][3][0].double() for results in ranks]).mean(0)
    # Per step and element: M rounds once, P Qᵀ (rank terms) twice, the error once.
    bound = steps * (2 * factor_rank + 4) * UNIT_ROUNDOFF[torch.float32] * largest
    assert (out + errors - given).abs().max() <= bound
    assert errors.abs().max() > 1e3 * bound, "nothing was compressed"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize(("hook", "rank"), [("powerSGD", 1), ("powerSGD", 4), ("batched", 2)])
def test_error_feedback_loses_nothing(hook, rank, warm_start, world_size):
    steps = 30
    options = {"matrix_approximation_rank": rank, "warm_start": warm_start}
    ranks = run_ranks(steps_of_ours, world_size, hook, options, SHAPES, steps, torch.float32)
    assert_nothing_is_lost(ranks, steps, rank)
    if hook == "batched":
        return
    mask = ~positions(SHAPES, compressed(SHAPES, rank))
    for step in range(steps):
        locals_ = torch.stack([results[step][0].double()[mask] for results in ranks])
        bound = average(torch.float32, world_size, locals_.abs().amax(0))
        for results in ranks:
            assert ((results[step][2][mask] - locals_.mean(0)).abs() <= bound).all()
            assert not results[step][3][0][mask].any()


def test_no_error_feedback():
    """Every step compresses the gradient alone; there are no errors."""
    options = {"matrix_approximation_rank": 2, "use_error_feedback": False}
    ranks = run_ranks(steps_of_ours, 2, "powerSGD", options, SHAPES, 4, torch.float32)
    assert not any(results[step][3][0].any() for results in ranks for step in range(4))
    order = compressed(SHAPES, 2)
    for step in range(1, 4):
        gradients = [results[step][0] for results in ranks]
        zeros = [torch.zeros_like(gradient) for gradient in gradients]
        expected = powersgd_step(SHAPES, gradients, zeros, ranks[0][step][1][1], order)
        for results in ranks:
            assert relative(results[step][2], expected.output) <= ONE_STEP


def test_no_warm_start():
    """The projections are new at every step, the same on all ranks, and give the oracle's step."""
    options = {"matrix_approximation_rank": 2, "warm_start": False}
    ranks = run_ranks(steps_of_ours, 2, "powerSGD", options, SHAPES, 4, torch.float32)
    order = compressed(SHAPES, 2)
    for step in range(1, 4):
        gradients, errors = ([results[step][i] for results in ranks] for i in (0, 1))
        qs = ranks[0][step][1][1]
        expected = powersgd_step(SHAPES, gradients, [error for error, _ in errors], qs, order)
        for results in ranks:
            assert relative(results[step][2], expected.output) <= ONE_STEP
            for mine, first, before in zip(results[step][3][1], ranks[0][step][3][1], qs, strict=True):
                assert torch.equal(mine, first)
                assert mine.shape[0] == 1 or not torch.equal(mine, before)


# Gradients of low rank, zero gradients.


def low_rank_steps(rank, factor_rank, shapes, sequence):
    """The outputs for a sequence of gradients: "low" (the same of rank factor_rank on all ranks), "zero", "one"
    (of rank one) or "own" (any, of this rank's).
    """
    options = {"matrix_approximation_rank": factor_rank, "use_error_feedback": False}
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **options)
    results = []
    for step, kind in enumerate(["own"] * START + sequence):
        gradient = random_gradient(shapes, rank, step)
        if kind != "own":
            columns = {"low": factor_rank, "one": 1, "zero": 0}[kind]
            generator = torch.Generator().manual_seed(step)
            gradient = torch.cat(
                [
                    (
                        torch.randn(n, columns, generator=generator)
                        @ torch.randn(columns, m, generator=generator)
                    ).flatten()
                    for n, m in shapes
                ]
            )
        output = powerSGD_hook.powerSGD_hook(state, Bucket(gradient.clone(), shapes)).wait()
        results.append((gradient, output))
    return results[START:]


MATRICES = ((64, 48), (30, 90), (64, 48), (150, 40))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_gradients_of_low_rank_are_recovered(rank):
    """Another gradient of rank r at every step: each exactly, whatever the projection."""
    for results in run_ranks(low_rank_steps, 2, rank, MATRICES, ["low"] * 4):
        for gradient, output in results:
            assert relative(output, gradient) <= RECOVERY


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("pause", ["zero", "one"])
def test_gradients_are_recovered_after_poorer_ones(pause, rank):
    """A zero gradient (a parameter not in use) or one of rank 1 must not cost the next one its rank."""
    for results in run_ranks(low_rank_steps, 2, rank, MATRICES, ["low", pause, pause, "low", "low"]):
        for gradient, output in results:
            if gradient.any():
                assert relative(output, gradient) <= RECOVERY
            else:
                assert not output.any()


def zero_then_random(rank, options):
    """Errors after 12 steps, of which the first compressed ones are zero, and their sum of gradients."""
    state = powerSGD_hook.PowerSGDState(None, 2, START, **options)
    outputs = []
    for step in range(12):
        gradient = random_gradient(MATRICES, rank, step) * (step > START + 1)
        outputs.append(powerSGD_hook.powerSGD_hook(state, Bucket(gradient, MATRICES)).wait())
    return outputs[-1]


@pytest.mark.parametrize("options", [{}, {"orthogonalization_epsilon": 1e-8}, {"warm_start": False}], ids=str)
def test_zero_gradients_first(options):
    """A layer that starts without gradients is compressed as any other once it has some."""
    begin = starts(MATRICES)
    for output in run_ranks(zero_then_random, 2, options):
        for start, end in pairwise(begin):
            assert output[start:end].any(), "its gradients are never sent"


# Training with torch's DDP.


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def train(rank, hook_name, options, state_options, steps, dtype=torch.float32, lr=0.1):
    """Per step: the digest of the gradients and whether they are finite; the losses, the buckets' order."""
    torch.manual_seed(0)
    unused = options.get("find_unused_parameters", False)
    model = DistributedDataParallel(Net(unused).to(device_of_rank(), dtype), bucket_cap_mb=0.02, **options)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=START, **state_options)
    hook, order = HOOKS[hook_name], []

    def recorded(state, bucket):
        order.append(bucket.index())
        return hook(state, bucket)

    if hook is not None:
        model.register_comm_hook(state, recorded)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    digests, losses = [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, rank, step % 4, dtype).item())
        gradients = flat_grads(model)
        digests.append((digest(gradients), bool(gradients.isfinite().all())))
        optimizer.step()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return digests, digest(parameters), losses, order


def assert_replicas_equal(ranks):
    for digests, parameters, _, order in ranks:
        buckets = max(order) + 1
        assert buckets >= 5, "too few buckets to have several in flight"
        assert order[-buckets:] == list(range(buckets))
        assert all(finite for _, finite in digests)
        assert digests == ranks[0][0]
        assert parameters == ranks[0][1]


@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_stay_equal(hook, world_size):
    """100 steps with many buckets in flight; torch's hook dies of two."""
    options = {"matrix_approximation_rank": 4}
    assert_replicas_equal(run_ranks(train, world_size, hook, {}, options, 100))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_replicas_stay_equal_with_ddp_options(hook, options):
    assert_replicas_equal(run_ranks(train, 2, hook, options, {"matrix_approximation_rank": 2}, 100))


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if "around" in hook])
def test_replicas_stay_equal_under_the_wrappers(hook):
    assert_replicas_equal(run_ranks(train, 2, hook, {}, {"matrix_approximation_rank": 2}, 30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_replicas_of_models_in_other_dtypes_stay_equal(hook, dtype):
    assert_replicas_equal(run_ranks(train, 2, hook, {}, {"matrix_approximation_rank": 2}, 30, dtype))


def test_state_options_keep_replicas_equal():
    for options in ({"warm_start": False}, {"use_error_feedback": False}, {"min_compression_rate": 0.5}):
        options = {"matrix_approximation_rank": 4, **options}
        assert_replicas_equal(run_ranks(train, 3, "powerSGD", {}, options, 20))


def test_without_warm_start_or_error_feedback_compression_may_start_at_once():
    options = {"warm_start": False, "use_error_feedback": False, "start_powerSGD_iter": 0}
    for rate, outputs in run_ranks(compress_from_the_first_step, 2, options):
        assert rate > 2
        assert all(torch.linalg.matrix_rank(output.view(64, 48)) == 1 for output in outputs)


def compress_from_the_first_step(rank, options):
    state = powerSGD_hook.PowerSGDState(None, **options)
    shape = [(64, 48)]
    buckets = [Bucket(random_gradient(shape, rank, step), shape) for step in range(3)]
    outputs = [powerSGD_hook.powerSGD_hook(state, bucket).wait() for bucket in buckets]
    return state.compression_stats()[0], outputs


@pytest.mark.parametrize("hook", ["powerSGD", "batched", "fp16 around powerSGD"])
def test_training_reaches_about_the_loss_of_no_compression(hook):
    steps = 150
    options = {"matrix_approximation_rank": 2}
    compressed_ranks = run_ranks(train, 2, hook, {}, options, steps)
    plain_ranks = run_ranks(train, 2, "none", {}, options, steps)
    for (_, _, mine, _), (_, _, other, _) in zip(compressed_ranks, plain_ranks, strict=True):
        assert other[-1] < 0.3 * other[0], "the training itself does not converge"
        # The losses agree to a tenth of what was gained.
        assert abs(mine[-1] - other[-1]) < 0.1 * (other[0] - other[-1])


# 16 bits.


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("hook", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)], ids=["fp16", "bf16"]
)
@pytest.mark.parametrize("inner", ["powerSGD", "batched"])
def test_one_wrapped_step_is_close(inner, hook, dtype, world_size):
    """Both first steps project on the same random directions."""
    options = {"matrix_approximation_rank": 2}
    plain, wrapped = (
        run_ranks(steps_of_ours, world_size, name, options, SHAPES, 1, torch.float32)
        for name in (inner, f"{hook} around {inner}")
    )
    for ((_, _, expected, _),), ((_, _, output, _),) in zip(plain, wrapped, strict=True):
        assert output.dtype == torch.float32
        distance = relative(output, expected)
        assert 0 < distance <= SIXTEEN_BIT_ROUNDINGS * UNIT_ROUNDOFF[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_buckets(dtype):
    """A model's own 16-bit buckets: the oracle's step from the same state, within 16-bit rounding."""
    options = {"matrix_approximation_rank": 2}
    ranks = run_ranks(steps_of_ours, 2, "powerSGD", options, SHAPES, 3, dtype)
    order = compressed(SHAPES, 2)
    for step in range(1, 3):
        gradients = [results[step][0] for results in ranks]
        errors = [results[step][1][0] for results in ranks]
        expected = powersgd_step(SHAPES, gradients, errors, ranks[0][step][1][1], order)
        for results, error in zip(ranks, expected.errors, strict=True):
            bound = SIXTEEN_BIT_ROUNDINGS * UNIT_ROUNDOFF[dtype]
            assert results[step][2].dtype == dtype
            assert relative(results[step][2], expected.output) <= bound
            assert relative(results[step][3][0], error) <= bound


# Randomness, arguments, groups.


def draw(rank, seed, disturb):
    state = powerSGD_hook.PowerSGDState(None, 2, START, random_seed=seed)
    torch.manual_seed(rank if disturb else 0)
    before = torch.random.get_rng_state()
    for step in range(START + 1):
        powerSGD_hook.powerSGD_hook(state, Bucket(random_gradient(MATRICES, rank, step), MATRICES)).wait()
    assert torch.equal(before, torch.random.get_rng_state()), "the user's generator was used"
    buckets = [
        Bucket(random_gradient([(64, 48)], rank, 0), [(64, 48)], index, index == 1) for index in (0, 1)
    ]
    same = [powerSGD_hook.powerSGD_hook(state, bucket).wait() for bucket in buckets]
    return directions_of(state), same


def test_random_projections():
    """From random_seed alone: not from the generators of the user, who may seed each rank differently."""
    first, second = run_ranks(draw, 2, 0, True)
    (other_seed, _), _ = run_ranks(draw, 2, 1, False)
    for mine, theirs, other in zip(first[0], second[0], other_seed, strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, other)


def sub_group(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    state = powerSGD_hook.PowerSGDState(group, 64, START, min_compression_rate=0.1)
    shape = [(6, 40)]
    results = []
    for step in range(4):
        gradient = random_gradient(shape, rank, step)
        results.append((gradient.clone(), powerSGD_hook.powerSGD_hook(state, Bucket(gradient, shape)).wait()))
    return results


def test_a_group_of_some_ranks():
    first, _, third = run_ranks(sub_group, 3)
    for (mine, output), (theirs, other) in zip(first, third, strict=True):
        assert torch.equal(output, other)
        assert relative(output, (mine.double() + theirs.double()) / 2) <= ONE_STEP


def call_wrongly(rank):
    messages = []
    state = powerSGD_hook.PowerSGDState(None)
    wrong = [(None, torch.ones(4)), (dist.group.WORLD, torch.ones(4)), (state, torch.ones(4).long())]
    for hook in (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook):
        for given, buffer in wrong:
            with pytest.raises(TypeError) as error:
                hook(given, Bucket(buffer))
            messages.append(str(error.value))
    return messages


def test_wrong_states_and_buckets_are_refused():
    (messages,) = run_ranks(call_wrongly, 1)
    for name, own in (("powerSGD_hook", messages[:3]), ("batched_powerSGD_hook", messages[3:])):
        assert own[0] == f"{name} takes a gradcomp PowerSGDState as its state, got None"
        assert own[1].startswith(f"{name} takes a gradcomp PowerSGDState as its state, got <")
        assert own[2] == f"{name} compresses floating-point buckets, got torch.int64"


def odd_buckets(rank, hook_name):
    """Buckets of nothing to compress, of one element, and of none."""
    results = []
    for shapes in ([(7,), (3,)], [(1,)], [(0,)], [(0, 4), (64, 48)], [(1, 1)]):
        state = powerSGD_hook.PowerSGDState(None, 1, START)
        for step in range(START + 3):
            gradient = random_gradient(shapes, rank, step)
            output = HOOKS[hook_name](state, Bucket(gradient.clone(), shapes)).wait()
        results.append((gradient, output, error_of(state)))
    return results


@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_odd_buckets(hook):
    ranks = run_ranks(odd_buckets, 2, hook)
    for mine, theirs in zip(*ranks, strict=True):
        assert mine[1].shape == mine[0].shape
        assert torch.equal(mine[1], theirs[1])
        assert mine[1].isfinite().all()
        if hook == "powerSGD" and mine[0].numel() < 64:
            assert torch.allclose(mine[1], (mine[0] + theirs[0]) / 2)


def memory_of_gradient_size(rank, shapes, options):
    state = powerSGD_hook.PowerSGDState(None, 2, START, **options)
    for step in range(START + 2):
        powerSGD_hook.powerSGD_hook(state, Bucket(random_gradient(shapes, rank, step), shapes)).wait()
    seen, found, queue = set(), 0, [state]
    while queue:
        item = queue.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found += item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, list | tuple):
            queue += item
        elif hasattr(item, "__dict__"):
            queue += vars(item).values()
    return found


@pytest.mark.parametrize("error_feedback", [True, False])
def test_memory_is_the_error_and_small_factors(error_feedback):
    shapes = [(512, 512)] * 3 + [(100,)]
    options = {"use_error_feedback": error_feedback}
    (held_bytes,) = run_ranks(memory_of_gradient_size, 1, shapes, options)
    gradients_bytes = 4 * sum(math.prod(shape) for shape in shapes)
    assert held_bytes <= (error_feedback + 0.1) * gradients_bytes


class Branches(nn.Module):
    """A layer used in some steps only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, both):
        return self.sometimes(self.always(x)) if both else self.always(x)


def use_a_layer_late(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = powerSGD_hook.PowerSGDState(None, 2, START)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(START + 6):
        model.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x, both=step >= START + 3).square().mean().backward()
    return float(model.module.sometimes.weight.grad.norm())


def test_a_layer_that_is_used_later_gets_gradients():
    """DDP fills the bucket with zeros for a layer not in use: those must not stop its gradients for ever."""
    assert all(norm > 0 for norm in run_ranks(use_a_layer_late, 2))
