"""PowerSGD's factors sent in codes: the wires, quantized."""

import pytest
import torch

from gradcomp.layout import BlockLayout
from tests.kernels.powersgd.ranks import plans_of, random_grads
from tests.kernels.quantize.ranks import Rank, all_reduce

FP32 = torch.float32
SIZE = 128


def plans_with_codes(shapes, rank, dtype, device, *, world_size=2, uncompressed_dtype=None):
    """Return a plan, and the plans of the quantized all-reduces of its P and Q."""
    wide = torch.promote_types(dtype, FP32)
    (plan,) = plans_of(shapes, rank, dtype, device, wire_dtype=wide)
    p_numels, uncompressed_numel, q_numels = plan.wire_numels
    options = {"bits": 8, "error_feedback": False, "uncompressed_dtype": uncompressed_dtype or dtype}
    codes = [
        Rank(BlockLayout(parts, SIZE, world_size), wide, device, **options)
        for parts in ([(1, sum(p_numels)), (uncompressed_numel,)], [(1, sum(q_numels))])
    ]
    return plan, codes


def average(codes, wires):
    """Average the ranks' wires in codes."""
    for wire, averaged in zip(wires, all_reduce(codes, wires), strict=True):
        wire.copy_(averaged)


@pytest.mark.parametrize("shapes", [[(40, 60), (5,), (70, 30), (30, 40)], [(12, 9), (8, 3)]], ids=str)
def test_matrices_that_are_left_out_are_sent_as_zeros(shapes, device):
    """This holds for codes, and for short factors, sent exactly. All other matrices lose nothing."""
    ranks = [plans_with_codes(shapes, 2, FP32, device) for _ in range(2)]
    plans = [plan for plan, _ in ranks]
    layout = plans[0].layout
    grads = random_grads(layout, FP32, device, 0, 2)
    mean = (grads[0] + grads[1]) / 2
    for plan, grad in zip(plans, grads, strict=True):
        plan.project(grad, 1.0, [1])
    average([codes[0] for _, codes in ranks], [plan.p_wire for plan in plans])
    for plan, grad in zip(plans, grads, strict=True):
        plan.back_project(grad, 1.0)
    average([codes[1] for _, codes in ranks], [plan.q_wire for plan in plans])
    for plan, grad in zip(plans, grads, strict=True):
        plan.reconstruct(grad, 0)
    assert torch.equal(*grads)
    for index, matrix in enumerate(layout.matrices):
        part = slice(matrix.offset, matrix.offset + matrix.numel)
        assert grads[0][part].any() == (index != 1)
        # A matrix that is left out stays in the errors, complete.
        errors = sum(plan.error()[part] for plan in plans) / 2
        assert torch.allclose(grads[0][part] + errors, mean[part], atol=1e-5)
        if index == 1:
            assert torch.equal(errors, mean[part])
