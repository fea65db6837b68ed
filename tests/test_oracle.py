"""The oracles agree with arithmetic by hand, and with steps of the hooks from an identical state."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch

import gradcomp.ops
from gradcomp.comm.bucket import GradBucket
from gradcomp.hooks import default_hooks, powerSGD_hook
from gradcomp.testing.ranks import run_ranks
from tests.hooks.powersgd_runs import SHAPES as MORE
from tests.kept import directions_in, error_in
from tests.oracle import (
    BatchedPowerSGDOracle,
    PowerSGDOracle,
    mean,
    projector,
    rounded,
    sixteen_bit_mean,
    split,
)
from tests.tolerances import (
    ONE_STEP,
    ONE_STEP_FP64,
    ONE_STEP_SPAN,
    SIXTEEN_BIT_ROUNDINGS,
    UNIT_ROUNDOFF,
    average,
)

EXACT = 1e-14  # float64, a few operations
SHAPES = ((12, 10), (7,), (8, 3, 2, 2), (12, 10), (3, 2), (1, 20), ())


def tensors(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def relative(results, expected):
    """Compute the relative error of lists of tensors over all their elements."""
    results, expected = (
        torch.cat([each.double().flatten() for each in some]) for some in (results, expected)
    )
    return float((results - expected).norm() / expected.norm())


def test_mean_by_hand():
    (average_,) = mean([[torch.tensor([1, 2, -3], dtype=torch.float16)], [torch.tensor([2.0, 4.0, 3.0])]])
    assert average_.tolist() == [1.5, 3.0, 0.0]
    assert average_.dtype == torch.float64
    assert mean([[torch.tensor(1j)], [torch.tensor(1 + 0j)]]) == [0.5 + 0.5j]


def test_sixteen_bits_by_hand():
    """In fp16, 1/3 is 0.333251953125 and 2^-24 / 3 is 0; sums round to even; division precedes overflow."""
    gradients = [[torch.tensor([1.0, 2.0**-24, 2048 * 3, 65504 * 3.0])]] + [
        [torch.tensor([0, 0, 3, 0.0])]
    ] * 2
    (average_,) = sixteen_bit_mean(gradients, torch.float16)
    # 2048 + 1 is 2048 in fp16, twice; with the two ones added first, the sum would be 2050.
    assert average_.tolist() == [0.333251953125, 0.0, 2048.0, 65504.0]
    assert sixteen_bit_mean([[torch.tensor(257.0)]], torch.bfloat16) == [256.0]
    assert rounded([[torch.tensor(65520.0), torch.tensor(2049.0)]], torch.float16) == [[math.inf, 2048.0]]


def test_powersgd_by_hand():
    """The mean M = [[3, 4], [6, 8], [0, 5]] of two ranks is projected on [0, 1].

    M̄ Q = [4, 8, 5], of length √105; Q = M̄ᵀ P = [60, 105] / √105; P Qᵀ = [4, 8, 5] ⊗ [4/7, 1].
    """
    matrix = torch.tensor([[3.0, 4], [6, 8], [0, 5]])
    noise = torch.tensor([[1.0, 0], [0, -2], [5, 5]])
    oracle = PowerSGDOracle([(3, 2), (2,)], rank=1, min_compression_rate=0.5)
    assert oracle.compressed == [0]
    first, second = matrix + noise, matrix - noise
    vectors = torch.tensor([1.0, 2]), torch.tensor([3.0, 2])
    averages = oracle.step([[first, vectors[0]], [second, vectors[1]]], [torch.tensor([[0.0], [2]])])
    expected = torch.tensor([4.0, 8, 5], dtype=torch.float64).outer(
        torch.tensor([4 / 7, 1], dtype=torch.float64)
    )
    assert relative(averages, [expected, torch.tensor([2.0, 2])]) <= EXACT
    assert (
        relative([oracle.errors[0][0], oracle.errors[1][0]], [first - expected, second - expected]) <= EXACT
    )
    assert not oracle.errors[0][1].any()
    assert relative([oracle.qs[0].abs()], [torch.tensor([[60.0], [105]]).double() / math.sqrt(105)]) <= EXACT


def test_batched_powersgd_by_hand():
    """Projecting 1 2 3 | 4 5 as [[1, 2, 3], [4, 5, 0], [0, 0, 0]] on [0, 0, 1] keeps its first row."""
    oracle = BatchedPowerSGDOracle([(3,), (2, 1)])
    gradients = [[torch.tensor([1.0, 2, 3]), torch.tensor([[4.0], [5]])]]
    averages = oracle.step(gradients, [torch.tensor([[0.0], [0], [1]])])
    assert relative(averages, [torch.tensor([1.0, 2, 3]), torch.zeros(2, 1)]) <= EXACT
    (error,) = oracle.errors[0]
    assert relative([error], [torch.tensor([[0.0, 0, 0], [4, 5, 0], [0, 0, 0]])]) <= EXACT


def test_behind_a_bucket_there_is_no_error():
    """Projecting [[1, 1], [1, –]] on [1, 0] yields [[1, 1/2], [1, 1/2]]; the padding's 1/2 is dropped."""
    oracle = BatchedPowerSGDOracle([(3,)])
    (average_,) = oracle.step([[torch.ones(3)]], [torch.tensor([[1.0], [0]])])
    (error,) = oracle.errors[0]
    assert relative([average_], [torch.tensor([1.0, 0.5, 1.0])]) <= EXACT
    assert relative([error], [torch.tensor([[0, 0.5], [0, 0]])]) <= EXACT


def flat(tensors_):
    return torch.cat([each.flatten() for each in tensors_])


def bucket_of(state):
    """Return the bucket's error, and its directions in the oracles' order."""
    error = error_in(state)
    return {} if error is None else {"error": error, "directions": directions_in(state)}


@dataclass
class Step:
    """A rank's gradients and averages in a step, and the hook's "error" and "directions" around it."""

    gradients: list[torch.Tensor]
    averages: list[torch.Tensor]
    before: dict
    after: dict


def steps_of(rank, group, hook, make_state, num_steps, dtype=torch.float32, shapes=SHAPES):
    parameters = [torch.empty(shape, dtype=dtype) for shape in shapes]
    state, steps, after = make_state(group), [], {}
    for step in range(num_steps):
        gradients = tensors(shapes, 10 * step + rank, dtype)
        bucket = GradBucket(0, torch.cat([g.flatten() for g in gradients]), parameters, True)
        averages = split(hook(state, bucket).wait(), shapes)
        before, after = after, bucket_of(state) if hasattr(state, "state_dict") else {}
        steps.append(Step(gradients, averages, before, after))
    return steps


def of_ranks(ranks, step, name):
    return [getattr(steps[step], name) for steps in ranks]


@pytest.fixture(params=["plain torch", "kernels"])
def arithmetic(request, monkeypatch):
    """Under Triton's interpreter kernels process CPU tensors, unless ops._INTERPRETED is patched."""
    if request.param == "plain torch":
        monkeypatch.setattr(gradcomp.ops, "_INTERPRETED", False)
    return request.param


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.usefixtures("arithmetic")
def test_16_bit_hooks(name, world_size):
    for hook in (
        getattr(default_hooks, f"{name}_compress_hook"),
        getattr(default_hooks, f"{name}_compress_wrapper")(default_hooks.allreduce_hook),
    ):
        ranks = run_ranks(steps_of, world_size, hook, lambda group: group, 1)
        gradients, averages = of_ranks(ranks, 0, "gradients"), of_ranks(ranks, 0, "averages")
        expected = sixteen_bit_mean(gradients, HALVES[name])
        for mine in averages:
            if world_size == 2:
                assert torch.equal(flat(mine).double(), flat(expected))
            assert relative(mine, expected) <= 2 * UNIT_ROUNDOFF[HALVES[name]]
        largest = torch.stack([flat(g).abs() for g in gradients]).amax(0)
        distance = (flat(averages[0]) - flat(mean(gradients))).abs()
        assert (distance <= average(HALVES[name], world_size, largest)).all()


@pytest.mark.usefixtures("arithmetic")
def test_allreduce_hook():
    ranks = run_ranks(steps_of, 3, default_hooks.allreduce_hook, lambda group: group, 1)
    expected = mean(of_ranks(ranks, 0, "gradients"))
    assert relative(ranks[1][0].averages, expected) <= 3 * UNIT_ROUNDOFF[torch.float32]


def errors_of(oracle, memory, shapes):
    """Convert a hook's errors to the oracle's form."""
    parts = split(memory["error"].double(), shapes)
    return [oracle.square(parts)] if isinstance(oracle, BatchedPowerSGDOracle) else parts


ORACLES = {
    powerSGD_hook.powerSGD_hook: PowerSGDOracle,
    powerSGD_hook.batched_powerSGD_hook: BatchedPowerSGDOracle,
}
POWERSGD = powerSGD_hook.powerSGD_hook
FP32, FP64, FP16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
# By a wrapper's dtype, or the bucket's: the bounds of averages and errors, and of the directions' span.
BOUNDS = {FP32: (ONE_STEP, ONE_STEP_SPAN), FP64: (ONE_STEP_FP64, 100 * ONE_STEP_FP64)}
for half in (FP16, BF16):
    BOUNDS[half] = SIXTEEN_BIT_ROUNDINGS * UNIT_ROUNDOFF[half], math.inf
WRAPPERS = {FP16: default_hooks.fp16_compress_wrapper, BF16: default_hooks.bf16_compress_wrapper}
OPTIONS = {"matrix_approximation_rank": 2, "use_error_feedback": True, "warm_start": True}
COLD, WITHOUT_FEEDBACK = {"warm_start": False}, {"use_error_feedback": False}
# The arithmetic, the hook, the wrapper's dtype, the bucket's dtype, the number of ranks, options. At a rate
# of 0.5 even matrices smaller than their factors are compressed.
CASES = [
    *(("plain torch", *case, FP32, 2, {}) for case in product(ORACLES, [None, *WRAPPERS])),
    *(("plain torch", *case) for case in product(ORACLES, [None], [FP32], [2], [COLD, WITHOUT_FEEDBACK])),
    *(("kernels", hook, None, FP32, 2, {}) for hook in ORACLES),
    *(
        ("plain torch", POWERSGD, None, dtype, world_size, {"matrix_approximation_rank": rank})
        for dtype, world_size, rank in (
            *product([FP32], [1, 2, 3], [1, 2, 4, 8]),
            *product([FP64], [2], [1, 2, 4, 8]),
            *product([FP16, BF16], [2], [2]),
        )
    ),
    ("plain torch", POWERSGD, None, FP32, 2, {"matrix_approximation_rank": 4, "min_compression_rate": 0.5}),
    ("plain torch", POWERSGD, None, FP32, 2, {"min_compression_rate": 30}),
    # Above min(n, m) of most matrices.
    ("plain torch", POWERSGD, None, FP32, 2, {"matrix_approximation_rank": 64, "min_compression_rate": 0.1}),
]


@pytest.mark.parametrize(
    ("arithmetic", "inner", "wrapper", "dtype", "world_size", "options"), CASES, indirect=["arithmetic"]
)
def test_powersgd_hooks(arithmetic, inner, wrapper, dtype, world_size, options):
    """The oracle starts each step from the state that the hook's last step left.

    Without error feedback no error is kept. Without warm start, directions are new in every step, and equal
    on all ranks.
    """
    start, options, shapes = 2, OPTIONS | options, SHAPES if arithmetic == "kernels" else (*SHAPES, *MORE)
    # A span amplifies roundings, depending on the random directions: 0.3 to 1.1 bounds in 60 seeds.
    new_state = partial(powerSGD_hook.PowerSGDState, start_powerSGD_iter=start, random_seed=1, **options)
    rank, feedback, warm, *rate = options.values()
    hook = WRAPPERS[wrapper](inner) if wrapper else inner
    ranks = run_ranks(steps_of, world_size, hook, new_state, start + 3, dtype, shapes)
    bound, span_bound = BOUNDS[wrapper or dtype]
    for step in (start + 1, start + 2):
        before, after = of_ranks(ranks, step, "before"), of_ranks(ranks, step, "after")
        oracle = ORACLES[inner](shapes, rank, *rate, error_feedback=feedback, warm_start=warm)
        oracle.errors = [errors_of(oracle, memory, shapes) for memory in before]
        gradients = rounded(of_ranks(ranks, step, "gradients"), wrapper or dtype)
        expected = oracle.step(gradients, before[0]["directions"])
        for averages in of_ranks(ranks, step, "averages"):
            assert averages[0].dtype == dtype
            assert relative(averages, expected) <= bound
        for memory, errors in zip(after, oracle.errors, strict=True):
            assert (
                relative(errors_of(oracle, memory, shapes), errors) <= bound
                if feedback
                else not memory["error"].any()
            )
        for mine, *others, last in zip(*(each["directions"] for each in [*after, before[0]]), strict=True):
            assert warm or not torch.equal(mine, last)
            assert warm or all(torch.equal(mine, other) for other in others)
        for mine, q in zip(after[0]["directions"], oracle.qs or (), strict=warm):
            assert relative([projector(mine)], [projector(q)]) <= span_bound
