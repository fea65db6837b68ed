"""Test the table of the slowest kernels without a GPU."""

import pytest
import torch

from benchmarks import outcomes, slowest
from benchmarks.clock import Clock
from benchmarks.kernels import casting
from benchmarks.records import RESULTS, read

CPU = torch.device("cpu")


@pytest.mark.usefixtures("plain_torch")
def test_the_slowest_kernels_are_recorded(tmp_path, monkeypatch, capsys):
    cases = [case for case in casting.cases(CPU, quick=True) if case.comes_first]
    monkeypatch.setattr(slowest, "operations", lambda device: [(case, 0) for case in cases])
    arguments = ["--device", "cpu", "--results", str(tmp_path), "--outcomes", str(tmp_path / "outcomes")]
    assert slowest.main(arguments) == 0
    assert len(outcomes.read(tmp_path / "outcomes")) == len(cases) == 4
    [path] = tmp_path.glob("*.jsonl")
    rows = read(path)
    assert [row["us"] for row in rows] == sorted((row["us"] for row in rows), reverse=True)
    documented = (RESULTS / "README.md").read_text()
    assert not [field for field in rows[0] if f"`{field}`" not in documented]
    assert all(row["gb_per_s"] == pytest.approx(row["num_bytes"] / row["us"] / 1e3) for row in rows)
    assert "compress_cast" in capsys.readouterr().out


def test_each_kernel_has_its_own_bytes():
    """back_project orthonormalizes first, in kernels of their own."""
    found = slowest.operations(CPU)
    [(case, p_numel)] = [
        (case, p_numel) for case, p_numel in found if "back_project" in case.name and "r=32" in case.label
    ]
    launched = [[slowest.Launched("_gram_kernel", 1.0), slowest.Launched("_back_project_kernel", 2.0)]]
    rows = slowest.slowest(launched, [(case, p_numel)], Clock(CPU, quick=True), "a test")
    assert [row["num_bytes"] for row in rows] == [case.num_bytes, 4 * p_numel]
    assert p_numel % 32 == 0 < p_numel < case.num_bytes // 4
