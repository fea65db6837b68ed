"""Print how orthonormal Gram–Schmidt makes P, by the precision of P's Gram matrix.

python -m benchmarks.powersgd_orthogonality. The largest ‖QᵀQ − I‖ of 60 fp32 panels with 1024 rows, after
one pass and after two passes. Only the Gram matrix differs in precision. The rest is as in the kernels: in
fp64, with results rounded to fp32. "compensated" is the exact Gram matrix, rounded to fp32: no sum of fp32
numbers is closer. "lost": the Gram matrix is not positive definite, so a column would be dropped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch

RANKS = (4, 16, 32)
CONDITIONS = (1e0, 1e2, 1e3, 1e4, 1e6)
NUM_ROWS = 1024
NUM_PANELS = 60
# The Gram matrices of an fp32 panel [n, r], in fp64.
GRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda panel: (panel.mT @ panel).double(),
    "compensated": lambda panel: (panel.double().mT @ panel.double()).float().double(),
    "fp64": lambda panel: panel.double().mT @ panel.double(),
}


def panel_of(rank: int, condition: float, seed: int) -> torch.Tensor:
    """Return a random fp32 panel [NUM_ROWS, rank] with this condition number."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64)).Q
        for rows in (NUM_ROWS, rank)
    )
    return (left * torch.logspace(0, -math.log10(condition), rank, dtype=torch.float64) @ right.mT).float()


def deviation(panel: torch.Tensor, gram: Callable[[torch.Tensor], torch.Tensor], passes: int) -> float:
    """Return ‖QᵀQ − I‖ for a panel's basis Q; infinity if a Gram matrix is not positive definite."""
    for _ in range(passes):
        lower, failed = torch.linalg.cholesky_ex(gram(panel))
        if failed:
            return math.inf
        panel = torch.linalg.solve_triangular(lower, panel.double().mT, upper=False).mT.float()
    basis = panel.double()
    return float((basis.mT @ basis - torch.eye(basis.shape[1])).norm())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.powersgd_orthogonality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args(argv)
    columns = [f"{name}, {passes}" for name in GRAMS for passes in ("one pass", "two passes")]
    print(f"| rank | condition | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 2) + "|")
    for rank in RANKS:
        for condition in CONDITIONS:
            panels = [panel_of(rank, condition, seed) for seed in range(NUM_PANELS)]
            worst = [
                max(deviation(panel, gram, passes) for panel in panels)
                for gram in GRAMS.values()
                for passes in (1, 2)
            ]
            cells = [f"{value:.0e}" if math.isfinite(value) else "lost" for value in worst]
            print(f"| {rank} | {condition:.0e} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
