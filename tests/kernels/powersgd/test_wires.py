"""Compare PowerSGD in Triton, with wires of another dtype than the bucket's, with float64 and plain torch."""

import pytest
import torch

from gradcomp.cpu.powersgd import PowerSGDPlan as PlainPlan
from tests.depth import everyday
from tests.hooks.powersgd_oracle import relative
from tests.kernels.powersgd.ranks import (
    MIXED,
    assert_padding_is_zero,
    matrices_of,
    plans_of,
    random_grads,
    step,
    sums_of,
)
from tests.tolerances import FACTOR_ROUNDINGS, FACTOR_UNIT, POWERSGD_STAGE, POWERSGD_STEP

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


WIRES = [
    *((FP32, FP16, 3), (FP64, BF16, 2), (BF16, FP32, 3)),
    *((FP32, BF16, 4), (FP32, FP32, 4), (BF16, FP16, 4)),
]


@pytest.mark.parametrize(("dtype", "wire_dtype", "rank"), everyday(WIRES[:3], WIRES), ids=str)
def test_a_step(dtype, wire_dtype, rank, device):
    plans = plans_of(MIXED, rank, dtype, device, world_size=2, wire_dtype=wire_dtype)
    layout = plans[0].layout
    options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0}
    plain = [PlainPlan(layout, dtype, torch.device("cpu"), wire_dtype=wire_dtype, **options) for _ in plans]
    for each in plain:
        each.load(each.error(), [direction.cpu() for direction in plans[0].directions()])
    for seed in range(2):
        grads = random_grads(layout, dtype, device, seed, world_size=2)
        others = [grad.cpu().clone() for grad in grads]
        sums = [sums_of(plan, grad) for plan, grad in zip(plans, grads, strict=True)]
        step(plans, grads, seed)
        step(plain, others, seed)
        assert all(plan.p_wire.dtype == wire_dtype for plan in plans)
        rounding = FACTOR_ROUNDINGS * FACTOR_UNIT[wire_dtype] if wire_dtype in FACTOR_UNIT else 0.0
        assert torch.equal(*grads)
        assert relative(grads[0].double().cpu(), others[0].double()) <= rounding + 2 * POWERSGD_STEP[dtype]
        for index, output in enumerate(matrices_of(layout, grads[0])):
            total = sum(each[index] for each in sums) / 2
            error = sum(matrices_of(layout, plan.error())[index] for plan in plans) / 2
            assert relative(error, total - output) <= POWERSGD_STAGE[dtype]
        for plan in plans:
            assert_padding_is_zero(plan)
