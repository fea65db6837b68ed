"""Orthonormal panels: on the kernels, in two launches up to rank 32 and one beyond it, and in plain torch."""

import math

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize_gram_schmidt

from gradcomp.cpu import orthonormalize as plain
from gradcomp.kernels.powersgd import work as powersgd_work
from gradcomp.kernels.powersgd.bucket import PowerSGDBucket, wire_factor
from gradcomp.kernels.powersgd.orthonormalize import orthonormalize
from gradcomp.kernels.powersgd.work import PowerSGDWork, wire_stride
from gradcomp.layout import PowerSGDLayout
from tests.tolerances import ORTHONORMAL, SPAN


@pytest.fixture
def small_chunks(monkeypatch):
    """Split panels of more than 64 rows into chunks."""
    monkeypatch.setattr(powersgd_work, "CHUNK_NUMEL", 64)


def orthonormalized(panels: list[torch.Tensor], epsilon: float = 0.0) -> list[torch.Tensor]:
    """Launch the kernels on these n×r panels; return their orthonormal bases."""
    device, wire_dtype = panels[0].device, panels[0].dtype
    rank = max(panel.shape[1] for panel in panels)
    layout = PowerSGDLayout([panel.shape for panel in panels], rank, 0)
    work = PowerSGDWork(layout, wire_dtype.itemsize, wire_dtype.itemsize)
    ranks = [(matrix.rows, matrix.rank) for matrix in layout.matrices]
    assert ranks == [panel.shape for panel in panels], "the layout has another order"
    padding = [wire_stride(len(panel), wire_dtype.itemsize) - len(panel) for panel in panels]
    columns = [
        torch.nn.functional.pad(panel.T, (0, zeros)) for panel, zeros in zip(panels, padding, strict=True)
    ]
    wire = torch.cat([each.flatten() for each in columns])
    options = {"error_feedback": False, "warm_start": True, "epsilon": epsilon / wire_factor(wire_dtype)}
    bucket = PowerSGDBucket(work, wire_dtype, wire_dtype, device, **options)
    bucket.place(torch.zeros(bucket.scratch_bytes, dtype=torch.uint8, device=device))
    bucket.p_wire.copy_(wire)
    for each in (bucket.p, bucket.grams):
        each.fill_(math.nan)
    for launch in orthonormalize(bucket):
        launch()
    result, start = [], 0
    for panel in panels:
        rows = -(-len(panel) // work.block_rows) * work.block_rows
        whole = bucket.p[start : start + work.rank * rows].view(work.rank, rows).T
        start += work.rank * rows
        assert not whole[len(panel) :].any(), "padding must be zero even beside NaN"
        result.append(whole[: len(panel), : panel.shape[1]])
    return result


def in_plain_torch(panels: list[torch.Tensor], epsilon: float = 0.0) -> list[torch.Tensor]:
    """Return the same in plain torch. The panels have equal numbers of columns."""
    results = [panel[None].cpu().clone() for panel in panels]
    scratch = [torch.full((2, *panel.shape), math.nan, dtype=torch.float64) for panel in results]
    plain.orthonormalize(results, epsilon, scratch)
    return [result[0].to(panel.device) for result, panel in zip(results, panels, strict=True)]


BOTH = pytest.mark.parametrize("bases_of", [orthonormalized, in_plain_torch], ids=["kernels", "plain"])


def with_condition(n: int, r: int, condition: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n, r, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(r, r, generator=generator, dtype=torch.float64)).Q
    return left * torch.logspace(0, -math.log10(condition), r, dtype=torch.float64) @ right.T


def check(panel: torch.Tensor, q: torch.Tensor) -> None:
    """Check that q is an orthonormal basis of the panel, to fp32's precision."""
    assert deviation(q) <= ORTHONORMAL[torch.float32]
    p, q = panel.double(), q.double()
    assert float((p - q @ (q.T @ p)).norm() / p.norm()) <= SPAN[torch.float32]


def deviation(q: torch.Tensor) -> float:
    q = q.double()
    return float((q.T @ q - torch.eye(q.shape[1], device=q.device)).norm())


@BOTH
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 32, 40])
def test_orthonormal_although_ill_conditioned(bases_of, rank, device):
    conditions = {1: [1.0], 40: [1e1, 1e6]}.get(rank, [1e0, 1e4, 1e5, 1e6])
    n = 300 if rank < 32 else 100
    panels = [with_condition(n, rank, condition).to(device, torch.float32) for condition in conditions]
    for panel, q in zip(panels, bases_of(panels), strict=True):
        check(panel, q)


@BOTH
@pytest.mark.parametrize("rank", [1, 4, 16, 40])
def test_in_fp64(bases_of, rank, device):
    panel = with_condition(130, rank, 1e4 if rank > 1 else 1).to(device)
    (q,) = bases_of([panel])
    assert deviation(q) <= ORTHONORMAL[torch.float64]
    assert float((panel - q @ (q.T @ panel)).norm() / panel.norm()) <= SPAN[torch.float64]


@pytest.mark.parametrize("rank", [4, 16, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_from_16_bits(rank, dtype, device):
    panel = with_condition(130, rank, 10).to(device, dtype)
    (q,) = orthonormalized([panel])
    assert q.dtype == torch.float32
    check(panel, q)


@BOTH
@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 40])
def test_zero_and_dependent_columns_become_zeros(bases_of, rank, device):
    panel = torch.randn(70, rank, generator=torch.Generator().manual_seed(1)).to(device)
    dead = {rank - 1}
    panel[:, rank - 1] = 0 if rank < 3 else -3 * panel[:, 0]
    if rank >= 4:
        panel[:, 2] = 0
        panel[:, rank - 2] = panel[:, 0] + panel[:, 1]
        dead |= {2, rank - 2}
    if rank >= 8:
        panel[:, 4] = panel[:, 0]
        dead.add(4)
    q, zeros = bases_of([panel, torch.zeros_like(panel)])
    assert {j for j in range(rank) if not q[:, j].any()} == dead
    assert deviation(q[:, [j for j in range(rank) if j not in dead]]) <= ORTHONORMAL[torch.float32]
    assert not zeros.any()


@BOTH
@pytest.mark.parametrize("rank", [4])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_any_scale(bases_of, rank, scale, device):
    panel = with_condition(70, rank, 10).to(device, torch.float32) * scale
    check(panel.double() / scale, bases_of([panel])[0])


@pytest.mark.parametrize("rank", [2, 16])
@pytest.mark.usefixtures("small_chunks")
def test_chunks_and_columns_of_unlike_scale(rank, device):
    """A chunk's largest element may be far from another chunk's, and a column's from another column's."""
    panel = torch.randn(200, rank, generator=torch.Generator().manual_seed(1))
    panel[:64] *= 1e-15
    panel[64:128] *= 1e15
    panel[128:] = 0
    panel[:, 1] *= 1e-18
    (q,) = orthonormalized([panel.to(device)])
    assert deviation(q) <= ORTHONORMAL[torch.float32]
    # The first chunk is negligible beside the second, and the third is zero.
    check(panel[64:128] / panel[64:128].norm(dim=0), q[64:128].cpu())
    assert not q[128:].any()


@pytest.mark.smallest
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.usefixtures("small_chunks")
def test_chunks(rank, device):
    """Chunks have 64 rows. Panels have one row, 63 to 65 rows, or many chunks; some are ill-conditioned."""
    lengths = (max(rank, 63), 64, 65, 640 if rank == 4 else 330)
    conditions = (10, 1e6, 10, 1e6)
    panels = [
        with_condition(n, rank, condition).to(device, torch.float32)
        for n, condition in zip(lengths, conditions, strict=True)
    ]
    one_row = torch.full((1, 1), -3.0, device=device)
    first, *others = orthonormalized([one_row, *panels])
    assert first.tolist() == [[-1.0]]
    for panel, q in zip(panels, others, strict=True):
        check(panel, q)


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rank", [1, 4, 16, 40])
def test_a_panel_with_anything_not_finite_becomes_so_and_no_other(bases_of, rank, device):
    good = torch.randn(70, rank, generator=torch.Generator().manual_seed(1)).to(device)
    panels = []
    for bad, row, column in ((math.nan, 0, 0), (math.inf, 69, rank - 1), (-math.inf, 35, rank // 2)):
        panels.append(good.clone())
        panels[-1][row, column] = bad
    *bad_ones, untouched = bases_of([*panels, good])
    # One column of NaN is enough, since every element of P Qᵀ is a sum over all columns.
    assert all(q.isnan().all(dim=0).any() for q in bad_ones)
    assert untouched.isfinite().all()


@BOTH
@pytest.mark.parametrize("rank", [1, 4, 16, 40])
def test_epsilon_as_in_torch(bases_of, rank, device):
    epsilon = {1: 1.0, 4: 1e-2}.get(rank, 1e-8)  # beyond rank 32 its effect is only nearly torch's
    panel = torch.randn(70, rank, generator=torch.Generator().manual_seed(1))
    expected = panel.double().unsqueeze(0).clone()
    _orthogonalize_gram_schmidt(expected, epsilon)
    (q,) = bases_of([panel.to(device)], epsilon)
    torch.testing.assert_close(q.cpu().double(), expected[0], rtol=1e-6, atol=1e-7)


def test_many_panels_at_once_and_bitwise_again(device):
    generator = torch.Generator().manual_seed(2)
    shapes = [(1, 1), (3, 2), (40, 4), (65, 3), (64, 4), (33, 1), (300, 4)]
    panels = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    for panel, q in zip(panels, orthonormalized(panels), strict=True):
        assert deviation(q) <= ORTHONORMAL[torch.float32]
        assert torch.equal(q, orthonormalized([panel, panels[2]])[0])
