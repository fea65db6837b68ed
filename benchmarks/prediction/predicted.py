"""Predictions that benchmarks on a GPU show beside what they measure: benchmarks/results/predicted.jsonl."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from benchmarks import environment
from benchmarks.records import RESULTS

PATH = RESULTS / "predicted.jsonl"
# The plan's stage that each launch of a step belongs to.
STAGES = (
    "project",
    "project",
    "orthonormalize",
    "orthonormalize",
    "back_project",
    "back_project",
    "reconstruct",
)
KEYS = ("gpu", "model", "rank", "dtype")


def record(
    gpu: str, model: str, rank: int, dtype: str, stages_us: dict[str, float], path: Path = PATH
) -> None:
    """Put one step's predictions, in microseconds by stage, in place of the file's earlier ones."""
    kept = [row for row in _rows(path) if [row[key] for key in KEYS] != [gpu, model, rank, dtype]]
    facts = environment.describe(torch.device("cpu"))
    made = {key: facts[key] for key in ("date_utc", "commit", "triton")}
    row = {"program": "python -m benchmarks.prediction", **made, "gpu": gpu, "model": model, "rank": rank}
    row |= {"dtype": dtype, "predicted_us": {stage: round(each, 1) for stage, each in stages_us.items()}}
    ordered = sorted([*kept, row], key=lambda row: [str(row[key]).zfill(3) for key in KEYS])
    path.write_text("".join(json.dumps(each) + "\n" for each in ordered))


def lookup(device: str, model: str, rank: int, dtype: str, stage: str, path: Path = PATH) -> float | None:
    """Return the microseconds predicted for a stage on the GPU of this name; None if there are none."""
    for row in _read(path):
        is_wanted = (row["model"], row["rank"], row["dtype"]) == (model, rank, dtype)
        # "A100 80GB" is "NVIDIA A100-SXM4-80GB" to its driver.
        if is_wanted and set(row["gpu"].split()) <= set(device.replace("-", " ").split()):
            return row["predicted_us"].get(stage)
    return None


@cache
def _read(path: Path) -> list[dict]:
    return _rows(path)


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
