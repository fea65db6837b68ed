"""Test a PowerSGDState's statistics, and its log of statistics, options and the start of compression."""

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp.hooks import powerSGD_hook
from tests.hooks.powersgd_oracle import Bucket, random_gradient
from tests.hooks.powersgd_runs import COMMON, FEW_SHAPES, OTHER_SHAPES, START, Messages, new_state
from tests.ranks import of_all_ranks, simulate


def count(rank, name, hook_name, options, steps):
    """Return compression_stats after every step of two buckets, and what was logged at INFO."""
    module = {"gradcomp": powerSGD_hook, "torch": torch_powersgd}[name]
    with Messages(module.__name__) as said:
        state = module.PowerSGDState(None, **options)
        stats = []
        for step in range(steps):
            for index, shapes in enumerate((FEW_SHAPES, OTHER_SHAPES)):
                bucket = Bucket(random_gradient(shapes, rank, step), shapes, index, index == 1)
                getattr(module, hook_name)(state, bucket).wait()
            stats.append((state.iter, state.compression_stats()))
    return stats, [line for line in said if "Compression stats" in line]


@pytest.mark.parametrize("rank", [1, 2, 32])
def test_compression_stats_are_torchs(rank):
    """Numbers and log lines are torch's. A line is logged in the first compressed step, then every third."""
    options = {
        "matrix_approximation_rank": rank,
        "start_powerSGD_iter": START,
        "compression_stats_logging_frequency": 3,
    }
    ours, theirs = (
        simulate(count, 1, name, "powerSGD_hook", options, 10)[0] for name in ("gradcomp", "torch")
    )
    assert ours == theirs
    stats, lines = ours
    assert stats[START - 1] == (START, (0, 0, 0))
    assert stats[-1][1][0] > 1 or rank == 32
    assert [line.split(",")[0] for line in lines] == [
        f"INFO Compression stats: iter {step}" for step in (2, 5, 8)
    ]


def test_compression_stats_of_the_batched_hook():
    """There are two factors of the square's side. torch counts them too, before its hook fails."""
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START}
    ((stats, _),) = simulate(count, 1, "gradcomp", "batched_powerSGD_hook", options, START + 1)
    before = [64 * 48 + 7 + 40 * 90 + 64 * 48 + 9, 64 * 48 + 40 * 90 + 7]
    assert stats[-1][1][1:] == (sum(before), sum(2 * 2 * side for side in [99, 82]))


@pytest.mark.simulated_ranks(1)
def test_the_configuration_is_logged_once(rank):
    with Messages() as said:
        state = new_state()
        for step in range(START + 3):
            for index in (0, 1):
                bucket = Bucket(random_gradient(FEW_SHAPES, rank, step), FEW_SHAPES, index, index == 1)
                powerSGD_hook.powerSGD_hook(state, bucket).wait()
    lines = of_all_ranks(said)[0]
    assert sum("config" in line for line in lines) == 1
    assert lines[0].startswith("INFO PowerSGD config: matrix_approximation_rank = 2; ")
    for name in COMMON[:8]:
        assert f"{name} = " in lines[0]
