"""Tests of compression_report: its numbers against arithmetic by hand and theory, its table, its errors."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from gradcomp.hooks import debugging_hooks, default_hooks, powerSGD_hook
from gradcomp.testing.compression import compression_report
from gradcomp.testing.workload import Workload
from tests.testing.averaging import done
from tests.tolerances import ONE_STEP

pytestmark = pytest.mark.usefixtures("plain_torch")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def power_sgd(rank=2, **options):
    return lambda group: powerSGD_hook.PowerSGDState(group, rank, **options)


def first_half(process_group, bucket):
    """Average the first half of a bucket, and set the second half to zero."""
    buffer = bucket.buffer()
    half = buffer[: buffer.numel() // 2]
    dist.all_reduce(half.div_(process_group.size()), group=process_group)
    buffer[half.numel() :] = 0
    return done(buffer)


def test_by_hand():
    """The means are [3, 4 | 0, 12] and [[0, 0], [0, 5]]: 25 of 169 and 0 of 25 of their energy is kept."""
    ranks = [
        [torch.tensor([3.0, 8, 0, 0]), torch.tensor([[0.0, 0], [0, 10]])],
        [torch.tensor([3.0, 0, 0, 24]), torch.zeros(2, 2)],
    ]
    report = compression_report(first_half, ranks, steps=2)
    vector, matrix = report.tensors
    assert vector.shape == (4,)
    assert (vector.gradient_bytes, vector.wire_bytes, vector.best_energy) == (16, 8, None)
    assert vector.relative_error == vector.accumulated_error == pytest.approx(12 / 13)
    assert vector.cosine_similarity == pytest.approx(5 / 13)
    assert vector.energy_kept == pytest.approx(25 / 169)
    assert (matrix.shape, matrix.relative_error, matrix.energy_kept) == ((2, 2), 1, 0)
    assert math.isnan(matrix.cosine_similarity)
    whole = report.overall
    assert (whole.shape, whole.gradient_bytes, whole.wire_bytes, whole.compression_rate) == ((8,), 32, 16, 2)
    assert whole.energy_kept == pytest.approx(25 / 194)
    # In one bucket, the first tensor is kept entirely and the second not at all.
    together = compression_report(first_half, ranks, buckets=[[0, 1]])
    assert [each.energy_kept for each in together.tensors] == [1, 0]
    assert [each.wire_bytes for each in together.tensors] == [None, None]
    assert [each.compression_rate for each in together.tensors] == [None, None]
    assert together.overall.wire_bytes == 16


def test_the_table():
    report = compression_report(first_half, [torch.tensor([3.0, 4, 0, 12]), torch.ones(1000, 2)], rank=1)
    assert str(report) == "\n".join(
        [
            "first_half: world size 2, step 1, against rank 1",
            "tensor       error  cosine  energy    best  bytes   sent  rate",
            "0 [4]        0.923  0.3846  0.1479  1.0000     16      8   2.0",
            "1 [1000, 2]  0.707  0.7071  0.5000  1.0000  8,000  4,000   2.0",
            "all          0.726  0.6874  0.4726  1.0000  8,016  4,008   2.0",
        ]
    )
    many = str(compression_report(first_half, [torch.ones(4)], steps=2, buckets=[[0]])).splitlines()
    assert many[1].split() == ["tensor", "error", "summed", "cosine", "energy", "bytes", "sent", "rate"]


def test_hooks_that_do_not_compress():
    gradients = [normal(20, 30), torch.zeros(3)]
    exact = compression_report(default_hooks.allreduce_hook, gradients, world_size=4)
    assert exact.world_size == 4
    assert exact.overall.relative_error == 0
    assert [each.compression_rate for each in exact.tensors] == [1, 1]
    assert exact.tensors[1].energy_kept == 1
    rounded = compression_report(default_hooks.fp16_compress_hook, gradients)
    assert 0 < rounded.overall.relative_error < 2**-11
    assert rounded.overall.compression_rate == 2
    nothing = compression_report(debugging_hooks.noop_hook, [gradients[:1], [-gradients[0]]])
    assert nothing.overall.relative_error == nothing.overall.compression_rate == math.inf


@pytest.mark.parametrize("module", [powerSGD_hook, torch_powersgd], ids=["gradcomp", "torch"])
def test_powersgd_from_its_first_compressed_step(module):
    """The 1,000 plain steps are skipped. Rank 2 is kept entirely; of more, at most an SVD's energy."""
    gradients = [normal(64, 2) @ normal(2, 48), normal(40, 30, seed=1), normal(7)]
    report = compression_report(
        module.powerSGD_hook, gradients, make_state=lambda group: module.PowerSGDState(group, 2)
    )
    low, full, vector = report.tensors
    assert report.rank == 2
    assert max(low.relative_error, vector.relative_error) <= ONE_STEP
    assert low.best_energy == pytest.approx(1)
    assert 0 < full.energy_kept < full.best_energy < 0.3
    assert [each.wire_bytes for each in report.tensors] == [4 * 2 * (64 + 48), 4 * 2 * (40 + 30), 4 * 7]
    assert report.overall.wire_bytes == sum(each.wire_bytes for each in report.tensors)
    squares = [float(gradient.square().sum()) for gradient in gradients]
    kept = [each.best_energy * square for each, square in zip(report.tensors, squares, strict=True)]
    assert report.overall.best_energy == pytest.approx(sum(kept) / sum(squares))


def test_warm_start_comes_near_the_best_and_error_feedback_makes_good():
    gradients = [normal(40, 30) / torch.arange(1, 31)]
    report = partial(compression_report, powerSGD_hook.powerSGD_hook, gradients)
    make_state = power_sgd(use_error_feedback=False)
    without = [report(make_state=make_state, steps=steps).overall for steps in (1, 16)]
    assert without[0].energy_kept < 0.98 * without[1].energy_kept
    assert 0.999 * without[1].best_energy < without[1].energy_kept <= without[1].best_energy
    feedback = report(make_state=power_sgd(), steps=16).overall
    assert feedback.accumulated_error < 0.8 * without[1].accumulated_error


def test_a_workload():
    """A workload's ranks, steps and buckets are used; here the gradients are new in every step."""
    workload = Workload(
        shapes=((20, 20), (5,), (30, 10)), buckets=((2, 1), (0,)), world_size=3, steps=2, drift=1.0
    )
    report = compression_report(powerSGD_hook.batched_powerSGD_hook, workload, make_state=power_sgd(1))
    assert (report.world_size, report.steps) == (3, 2)
    assert [each.shape for each in report.tensors] == list(workload.shapes)
    assert [each.wire_bytes for each in report.tensors] == [4 * 2 * 20, None, None]
    assert report.overall.wire_bytes == 4 * 2 * (20 + 18)
    assert report.overall.relative_error != report.overall.accumulated_error


def test_what_is_refused():
    for gradients in ([], [[]]):
        with pytest.raises(ValueError, match="no gradients"):
            compression_report(default_hooks.allreduce_hook, gradients)
    with pytest.raises(ValueError, match="2 ranks for world_size 3"):
        compression_report(default_hooks.allreduce_hook, [[normal(2)], [normal(2)]], world_size=3)
    with pytest.raises(ValueError, match="buckets"):
        compression_report(default_hooks.allreduce_hook, [normal(2), normal(3)], buckets=[[0]])
