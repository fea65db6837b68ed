"""Test that the tables of docs/network.md, and README's first table, show the recorded rows."""

import json

import pytest

from benchmarks.network import predicted, report
from tests.programs import ROOT

# README's names of hooks, and the tables'.
HOOKS = {
    "no communication": "noop",
    "no hook": "none",
    "torch's fp16": "torch's fp16",
    "`quantization_hook`, 4 bits": "int4",
    "`powerSGD_hook`, rank 4": "powersgd:4",
    "torch's PowerSGD, rank 4": "torch's powersgd:4",
}
# The hooks whose time to a loss is on the page.
TO_LOSS = ("none", "int4", "powersgd:4", "powersgd:8:int8:start4")
# README's columns: (ranks per host, Mbit/s).
COLUMNS = {
    "50 Mbit/s": (1, 50),
    "200 Mbit/s": (1, 200),
    "1 Gbit/s": (1, 1_000),
    "10 Gbit/s": (1, 10_000),
    "2 × 3 ranks, 200 Mbit/s": (3, 200),
}


def rows_of(name):
    lines = (ROOT / "benchmarks/results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def rows():
    return rows_of("network.jsonl")


@pytest.fixture(scope="module")
def rows_of_nodes():
    return rows_of("network_nodes.jsonl")


def test_the_page_has_tables_of_the_rows(rows, rows_of_nodes):
    page = (ROOT / "docs/network.md").read_text()
    on_torchs = report.of(rows, hosts=2, wrapper="torch")
    of_three = report.of(rows_of_nodes, hosts=2, ranks_per_host=3, job="steps")
    shown = (
        report.of(on_torchs, job="steps", model="mlp"),
        [row for row in report.of(on_torchs, job="loss") if row["hook"] in TO_LOSS],
        [row for row in of_three if row["hooks"] == "gradcomp" and row["hook"] != "fp16"],
    )
    for some in shown:
        for block in report.tables(some).split("\n\n"):
            assert block in page


def test_the_page_says_how_far_off_predictions_are(rows, rows_of_nodes):
    page = (ROOT / "docs/network.md").read_text()
    for each in (rows, rows_of_nodes):
        *_, summary = predicted.table(predicted.compare(each)).splitlines()
        assert summary in page


def test_the_readme_quotes_the_rows(rows, rows_of_nodes):
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| ms per step, two hosts |") :].partition("\n\n")[0]
    (_, *links), _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert [hook for hook, *_ in lines] == list(HOOKS)
    for hook, *cells in lines:
        for link, cell in zip(links, cells, strict=True):
            ranks, mbit_per_s = COLUMNS[link]
            of_place = rows if ranks == 1 else report.of(rows_of_nodes, ranks_per_host=ranks)
            found = report.of(of_place, job="steps", hosts=2, model="mlp", mbit_per_s=mbit_per_s)
            # PowerSGD's small factors go flat.
            names = (HOOKS[hook], "powersgd:4:flat") if hook == "`powerSGD_hook`, rank 4" else (HOOKS[hook],)
            (row,) = (each for each in found if report.name(each) in names)
            assert cell == quoted(row), (hook, link)


def quoted(row):
    """Format a step's time in ms: without decimals from 100 on, else with one."""
    if "failed" in row:
        return report.failure(row)
    milliseconds = row["step_ms"]
    return f"{milliseconds:.0f}" if milliseconds >= 99.95 else f"{milliseconds:.1f}"
