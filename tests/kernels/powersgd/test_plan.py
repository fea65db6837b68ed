"""Test PowerSGD's plans: the kernels' launches, offsets beyond 2³¹; errors that are added to, or dropped."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradcomp.cpu import powersgd as cpu
from gradcomp.kernels.powersgd.back_project import back_project
from gradcomp.kernels.powersgd.bucket import PowerSGDBucket
from gradcomp.kernels.powersgd.plan import PowerSGDPlan
from gradcomp.kernels.powersgd.project import project
from gradcomp.kernels.powersgd.reconstruct import reconstruct
from gradcomp.kernels.powersgd.tile import SHRINK
from gradcomp.kernels.powersgd.work import PowerSGDWork
from gradcomp.layout import Matrix, PowerSGDLayout
from tests.kernels.compiled import is_kernel, kernel_modules
from tests.kernels.powersgd.ranks import COMPRESS_ALL, plans_of, random_grads

FP32, FP16 = torch.float32, torch.float16
SHAPES = [(70, 45), (13,), (9, 5, 3), (33, 130), (70, 45), (4,)]
BOTH = pytest.mark.parametrize("plan_class", [PowerSGDPlan, cpu.PowerSGDPlan], ids=["kernels", "plain"])
# Operations of torch that launch nothing and allocate nothing.
VIEWS = {
    *("view", "_unsafe_view", "slice", "select", "detach", "alias", "as_strided", "t", "transpose"),
    "expand",
}


class LaunchingOps(TorchDispatchMode):
    """A mode that notes every torch operation except views."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **kwargs or {})


class Noted:
    """A stand-in for a kernel that notes its launches."""

    def __init__(self, name: str, launched: list[str]):
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        assert all(size > 0 for size in grid)
        return lambda *_, **__: self.launched.append(self.name)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Return the list of the kernels launched from here on. None runs."""
    names: list[str] = []
    for module in kernel_modules():
        for name in filter(is_kernel, vars(module).copy()):
            monkeypatch.setattr(module, name, Noted(name, names))
    return names


def step_of(plan, buffer: torch.Tensor, seed: int = 0) -> None:
    """Take a step of a single rank."""
    plan.project(buffer, 1.0)
    plan.back_project(buffer, 1.0)
    plan.reconstruct(buffer, seed)


@pytest.mark.parametrize("rank", [1, 4, 32, 40])
@pytest.mark.parametrize("count", [1, 8, 60])
def test_a_step_is_five_launches_and_allocates_nothing(count, rank, launched, device):
    shapes = [shape for i in range(count) for shape in ((40, 41 + i), (3,))]
    plan = PowerSGDPlan(
        PowerSGDLayout(shapes, rank, COMPRESS_ALL), FP32, device,
        error_feedback=True, warm_start=True, epsilon=0.0, seed=0,
    )  # fmt: skip
    assert launched == ["_random_q_kernel"]
    launched.clear()
    plan.take_scratch()
    buffer = torch.zeros(plan.layout.numel, device=device)
    with LaunchingOps() as ops:
        step_of(plan, buffer)
    assert len(launched) == (5 if rank <= 32 else 4)
    assert ops.names == [], "torch's own operations: launches or allocations"
    with LaunchingOps() as ops:
        torch.zeros(3, device=device)[1:].view(-1)
    assert ops.names == ["zeros"], "the mode sees no allocation: the test is idle"


def plan_of(plan_class, dtype, rank, square, device):
    """Return a plan for SHAPES, and its device. In plain torch it computes on the CPU."""
    device = device if plan_class is PowerSGDPlan else torch.device("cpu")
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    layout = PowerSGDLayout.square(numel, rank) if square else PowerSGDLayout(SHAPES, rank, 1.1)
    options = {"error_feedback": True, "warm_start": True, "epsilon": 0.0, "seed": 0}
    return plan_class(layout, dtype, device, **options), device


@pytest.mark.parametrize("square", [False, True])
@BOTH
def test_what_is_added_to_the_error_lies_where_its_parameter_does(plan_class, square, device):
    """Values are added to a compressed matrix's error. Other tensors have no error."""
    plan, device = plan_of(plan_class, FP32, 2, square, device)
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    step_of(plan, random_grads(plan.layout, FP32, device, 0)[0])
    for number in (3, 1):
        before, start, values = plan.error(), sum(numels[:number]), torch.ones(numels[number], device=device)
        plan.add_to_error(start, values)
        expected = before.clone()
        if square or number == 3:
            expected[start : start + len(values)] += values
        assert torch.allclose(plan.error(), expected, rtol=0, atol=1e-6)


def test_wires_of_16_bits_are_scaled_before_they_are_rounded(device):
    """A value that fits only after division by the number of ranks doesn't overflow."""
    (plan,) = plans_of([(16, 64), (3,)], 1, FP16, device)
    plan.load(torch.zeros(plan.layout.numel, dtype=FP16, device=device), [torch.ones(64, 1, device=device)])
    buffer = torch.full((plan.layout.numel,), 3e4, dtype=FP16, device=device)
    plan.project(buffer, 1 / 8)
    # Rows of 64 · 3e4 on a direction of 1/8 each: 2.4e5, where fp16 ends at 65504.
    assert plan.p_wire.tolist() == [3e4] * 16 + [3e4 / 8] * 3 + [0.0] * 5
    plan.back_project(buffer, 1 / 8)
    # Columns of 16 · 3e4 on a P of 1/4 each: 1.2e5.
    assert plan.q_wire.tolist() == [1.5e4] * 64


@BOTH
def test_an_error_beyond_16_bits_is_dropped(plan_class, device):
    """An infinite error would make the next step infinite."""
    device = device if plan_class is PowerSGDPlan else torch.device("cpu")
    layout = PowerSGDLayout([(4, 4)], 1, COMPRESS_ALL)
    plan = plan_class(layout, FP16, device, error_feedback=True, warm_start=True, epsilon=0.0, seed=0)
    plan.load(torch.zeros(16, dtype=FP16, device=device), [torch.ones(4, 1, device=device)])
    gradient = torch.full((16,), 3e4, dtype=FP16, device=device)
    gradient[0] = -6.5e4
    output = gradient.clone()
    step_of(plan, output)
    lost = gradient.double() - output.double()
    assert lost[0] < -65520
    assert lost[1:].abs().max() < 65504
    assert plan.error().double().tolist() == [0.0, *lost[1:].half().tolist()]
    output.zero_()
    step_of(plan, output)
    assert output.isfinite().all()
    assert output.any()


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [FP32, torch.float64, torch.bfloat16], ids=str)
def test_reading_the_error_changes_no_bit_of_later_steps(dtype, square, rank, device):
    """Plain torch computes the error from M when the error is read, or when the next gradient is added."""
    plans = [plan_of(cpu.PowerSGDPlan, dtype, rank, square, device)[0] for _ in range(2)]
    for seed in range(4):
        grads = random_grads(plans[0].layout, dtype, torch.device("cpu"), seed) * 2
        read, unread = (grad.clone() for grad in grads)
        step_of(plans[0], read, seed)
        step_of(plans[1], unread, seed)
        assert torch.equal(read, unread)
        first = plans[0].error()
        assert torch.equal(first, plans[0].error())
    assert torch.equal(first, plans[1].error())
    if dtype != torch.bfloat16:
        assert first.any()


@pytest.mark.parametrize("chunk_numel", [cpu.CHUNK_NUMEL, 64])
@pytest.mark.parametrize("rank", [2, cpu.MAX_TERMS, cpu.MAX_TERMS + 1])
def test_outputs_and_the_error_are_the_gradients_sum(rank, chunk_numel, monkeypatch, device):
    """Neither the rows per chunk matter, nor whether P Qᵀ is computed by terms or as a product."""
    monkeypatch.setattr(cpu, "CHUNK_NUMEL", chunk_numel)
    plan, device = plan_of(cpu.PowerSGDPlan, torch.float64, rank, False, device)
    gradients = [random_grads(plan.layout, torch.float64, device, seed)[0] for seed in range(5)]
    outputs = [gradient.clone() for gradient in gradients]
    for seed, output in enumerate(outputs):
        step_of(plan, output, seed)
    torch.testing.assert_close(sum(outputs) + plan.error(), sum(gradients), rtol=1e-12, atol=1e-12)


def test_a_matrix_behind_2_to_the_31(device):
    """Take whole steps. A vector and a matrix start beyond 2³¹, and the memory before them isn't touched."""
    start = 2**31 + 5
    layout = PowerSGDLayout.__new__(PowerSGDLayout)
    layout._set(start + 99, [Matrix(start, 9, 10, 90, 2)], [(start + 90, 9)])
    near = PowerSGDLayout.__new__(PowerSGDLayout)
    near._set(99, [Matrix(0, 9, 10, 90, 2)], [(90, 9)])
    (far_plan,), (near_plan,) = (plans_of(each, 2, FP16, device) for each in (layout, near))
    buffer = torch.empty(start + 99, dtype=FP16, device=device)
    for seed in range(2):
        (grad,) = random_grads(near, FP16, device, seed)
        buffer[start:] = grad
        step_of(far_plan, buffer)
        step_of(near_plan, grad)
        assert torch.equal(buffer[start:], grad)


def test_the_end_of_a_matrix_of_more_than_2_to_the_31_elements(device):
    """Run the last program of every walk through the matrix. It touches little of the gradient and memory."""
    n, m, r = 2**16 + 50, 2**15 + 8, 2
    work = PowerSGDWork(PowerSGDLayout([(n, m)], r, 0), 2, 2)
    assert min(work.memory_numel, n * m) > 2**31
    kernels = ("project", "back_project", "reconstruct")
    ends = {kernel: getattr(work, f"{kernel}_work")[-1] for kernel in kernels}
    (first_row, first_col), (back_col, back_row), (written_col, written_row) = (
        (row[2] * work.tiles[kernel][0], row[3] * work.tiles[kernel][1]) for kernel, row in ends.items()
    )
    grad, memory = (torch.empty(size, dtype=FP16, device=device) for size in (n * m, work.memory_numel))
    for flat, value in ((grad, 1.0), (memory, 2.0)):
        flat[: n * m].view(n, m)[first_row:, first_col:] = value
        flat[: n * m].view(n, m)[back_row:, back_col:] = value
    # Each launch has one program. As the only program of its block, it adds up one partial sum.
    for kernel, row in ends.items():
        setattr(work, f"{kernel}_work", [(*row[:5], 0, 1)])
    bucket = PowerSGDBucket(
        work, FP16, FP16, torch.device("meta"), error_feedback=True, warm_start=True, epsilon=0.0
    )
    bucket.place(torch.empty(bucket.scratch_bytes, dtype=torch.uint8, device="meta"))
    for name in ("p", "q", "norms", "arrived", "partial", "p_wire", "q_wire"):
        setattr(bucket, name, torch.zeros_like(getattr(bucket, name), device=device))
    bucket.memory = memory
    bucket.matrices = torch.tensor(work.matrix_table, device=device)
    bucket.tables = {
        kernel: torch.tensor(getattr(work, f"{kernel}_work"), device=device) for kernel in kernels
    }

    # P and Q are zero, so M = gradient + memory. Q's lengths are zero, so M is projected on the random Q,
    # which holds ones here.
    bucket.q[work.q_panel_numel // 2 :][:m] = 1.0
    for launch in project(bucket):
        launch(buffer=grad, scale=1.0)
    rows, cols = n - first_row, m - first_col
    shrink = SHRINK.value
    assert bucket.partial[:rows].tolist() == [3.0 * cols * shrink] * rows
    assert bucket.p_wire[first_row:n].tolist() == [3.0 * cols] * rows
    assert (memory[: n * m].view(n, m)[first_row:, first_col:] == 3).all()

    bucket.p[:n] = 1.0
    for launch in back_project(bucket):
        launch(scale=1.0)
    total = memory[: n * m].view(n, m)[back_row:, -1].sum().item()
    assert bucket.partial[: m - back_col].tolist() == [total * shrink] * (m - back_col)
    assert bucket.q_wire[back_col:m].tolist() == [total] * (m - back_col)

    bucket.q_wire.fill_(0.5)
    reconstruct(bucket)(buffer=grad, seed=0)
    assert (grad.view(n, m)[written_row:, written_col:] == 0.5).all()
