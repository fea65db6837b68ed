"""The tables of docs/network.md, and README's first one, are those of the recorded rows."""

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
MBIT_PER_S = {"50 Mbit/s": 50, "200 Mbit/s": 200, "1 Gbit/s": 1_000, "10 Gbit/s": 10_000}


@pytest.fixture(scope="module")
def rows():
    lines = (ROOT / "benchmarks/results/network.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_page_has_the_tables_of_the_rows(rows):
    page = (ROOT / "docs/network.md").read_text()
    tables = report.tables(rows) + "\n\n" + predicted.table(predicted.compare(rows))
    for block in tables.split("\n\n"):
        assert block in page


def test_the_readme_quotes_the_rows(rows):
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| ms per step, two hosts |") :].partition("\n\n")[0]
    (_, *links), _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert [hook for hook, *_ in lines] == list(HOOKS)
    for hook, *cells in lines:
        for link, cell in zip(links, cells, strict=True):
            found = report.of(rows, job="steps", hosts=2, model="mlp", mbit_per_s=MBIT_PER_S[link])
            (row,) = (each for each in found if report.name(each) == HOOKS[hook])
            assert cell == quoted(row), (hook, link)


def quoted(row):
    """Format a step's time in ms: without decimals from 100 on, else with one."""
    if "failed" in row:
        return report.failure(row)
    milliseconds = row["step_ms"]
    return f"{milliseconds:.0f}" if milliseconds >= 99.95 else f"{milliseconds:.1f}"
