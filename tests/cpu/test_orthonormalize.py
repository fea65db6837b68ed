"""Gram–Schmidt in plain torch: panels of several heights at once."""

import pytest
import torch

from gradcomp.cpu.orthonormalize import orthonormalize

RANK = 5


def panel_of(rows, condition, seed):
    """Return two panels [2, rows, RANK] of condition number 10 ** condition."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(2, rows, RANK, generator=generator, dtype=torch.float64))[0]
    turned = torch.linalg.qr(torch.randn(RANK, RANK, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(torch.logspace(0, -condition, RANK, dtype=torch.float64)) @ turned


def orthonormalized(panels, epsilon=0.0):
    results = [panel.clone() for panel in panels]
    scratch = [torch.full((2, *panel.shape), torch.nan, dtype=torch.float64) for panel in panels]
    orthonormalize(results, epsilon, scratch)
    return results


def gram(panel):
    return panel.mT.double() @ panel.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ill_conditioned_beside_well_conditioned(dtype):
    panels = [panel_of(rows, condition, rows).to(dtype) for rows, condition in ((6, 0), (40, 6), (300, 3))]
    for panel, basis in zip(panels, orthonormalized(panels), strict=True):
        assert basis.dtype == dtype
        assert torch.linalg.matrix_norm(gram(basis) - torch.eye(RANK, dtype=torch.float64)).max() <= 1e-5
        # The basis spans the panel's columns.
        left = panel.double() - basis.double() @ (basis.mT.double() @ panel.double())
        assert left.norm() <= 1e-6 * panel.norm()


def test_dependent_columns_become_zero_whatever_the_neighbors():
    dependent = panel_of(30, 0, 0).float()
    dependent[0, :, 2] = dependent[0, :, 0] - 3 * dependent[0, :, 1]
    dependent[1, :, 4] = 0.0
    basis, other = orthonormalized([dependent, panel_of(7, 5, 1).float()])
    expected = torch.eye(RANK, dtype=torch.float64).repeat(2, 1, 1)
    expected[0, 2, 2] = expected[1, 4, 4] = 0.0
    assert torch.allclose(gram(basis), expected, atol=1e-5)
    assert torch.allclose(gram(other), torch.eye(RANK, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.25])
def test_one_column(epsilon):
    panel = panel_of(30, 1, 0)[:, :, :1].repeat(2, 1, 1)
    panel[1], panel[2, 7] = 0.0, torch.nan
    (basis,) = orthonormalized([panel], epsilon)
    for i in (0, 3):
        assert torch.allclose(basis[i], panel[i] / (panel[i].norm() + epsilon), rtol=1e-14)
    assert not basis[1].any()
    assert basis[2].isnan().all()


def test_epsilon_is_added_to_every_length():
    """The result equals torch's Gram–Schmidt, which goes column by column."""
    panel, epsilon = panel_of(30, 1, 0), 0.25
    expected = panel.clone()
    for i in range(RANK):
        column = expected[:, :, i : i + 1]
        column /= column.norm(dim=1, keepdim=True) + epsilon
        rest = expected[:, :, i + 1 :]
        rest -= column * (column * rest).sum(dim=1, keepdim=True)
    (basis,) = orthonormalized([panel], epsilon)
    assert torch.allclose(basis, expected, rtol=0, atol=1e-12)
