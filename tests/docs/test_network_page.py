"""Test that the tables of docs/network.md, and README's table, show the recorded rows."""

import json
import statistics

import pytest

from benchmarks.network import auto, report
from tests.programs import ROOT

# README's names of hooks, and the names in the rows and in docs/accuracy.md.
HOOKS = {
    "no hook": "none",
    "`auto_hook`": "auto",
    "`bf16_compress_hook`": "bf16",
    "`quantization_hook`, 8 bits": "int8",
    "`quantization_hook`, 4 bits": "int4",
    "`powerSGD_hook`, rank 16, int8 factors": "powersgd:16:int8",
    "`powerSGD_hook`, rank 8, int8 factors": "powersgd:8:int8",
}
# The hooks whose time to a loss is on the page, for the GPT.
TO_LOSS = ("none", "int4", "powersgd:4", "powersgd:8:int8:start4")
# The hooks in the table of steps: torch's others end with an error or hang, and bf16 is as fast as fp16.
OURS = ("noop", "none", "fp16", "int8", "int4", "powersgd:4", "powersgd:8:int8")
STEPS = [*(("gradcomp", hook) for hook in OURS), ("torch", "fp16")]
# The hooks shown with three ranks per host.
OF_THREE_RANKS = ("none", "int4", "int4:flat", "powersgd:8:int8", "powersgd:8:int8:flat")
# README's columns of times: Mbit/s, and ms one way.
LINKS = ((200, 0), (200, 25), (1_000, 0), (1_000, 25))
# The hooks in the table of links with a delay; fp16 is as fast as bf16.
DELAYED = ("noop", "none", "allreduce", "bf16", "int8", "int4", "powersgd:8", "powersgd:8:int8")


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
    of_mlp = report.of(on_torchs, job="steps", model="mlp")
    of_three = report.of(rows_of_nodes, hosts=2, ranks_per_host=3, job="steps")
    shown = (
        [row for row in of_mlp if (row["hooks"], row["hook"]) in STEPS],
        [row for row in report.of(on_torchs, job="loss", model="gpt") if row["hook"] in TO_LOSS],
        [row for row in of_three if row["hooks"] == "gradcomp" and row["hook"] in OF_THREE_RANKS],
    )
    for some in shown:
        for block in report.tables(some).split("\n\n"):
            assert block in page


def test_the_page_has_a_table_of_links_with_a_delay():
    page, rows = (ROOT / "docs/network.md").read_text(), rows_of("network_delay.jsonl")
    steps = report.of(rows, job="steps", model="mlp", hosts=2)
    shown = [row for row in steps if row["hook"] in DELAYED and (row["mbit_per_s"], row["delay_ms"]) in LINKS]
    assert report.tables(shown) in page


def test_the_page_says_medians_of_more_hosts_and_of_more_buckets():
    """ms per step at 1 Gbit/s and 25 ms: without a hook, with PowerSGD, with int4."""
    page, rows = (ROOT / "docs/network.md").read_text(), rows_of("network_delay.jsonl")
    at = report.of(rows, job="steps", mbit_per_s=1_000, delay_ms=25)
    four, many = (
        [
            round(report.median_ms(report.of(at, model=model, hosts=hosts, hook=hook)))
            for hook in ("none", "powersgd:8", "int4")
        ]
        for model, hosts in (("mlp", 4), ("mlp12", 2))
    )
    of_four = f"a step takes {four[0]} ms without a hook, {four[1]} with PowerSGD and {four[2]} with int4"
    assert of_four in page
    assert f"12 buckets (3.5 million parameters, two hosts) {many[0]}, {many[1]} and {many[2]}." in page


def test_the_page_has_the_table_of_auto_hook():
    page = (ROOT / "docs/network.md").read_text()
    of_two, of_more = rows_of("network_auto.jsonl"), rows_of("network_auto_hosts.jsonl")
    assert auto.ratios(of_two + of_more) in page
    noticed = [row["noticed_after"] for row in report.of(of_two + of_more, job="change")]
    assert f"begins after {min(noticed)} to {max(noticed)} steps" in page


def test_the_page_on_local_steps_has_a_table_of_the_rows():
    rows = report.of(rows_of("network_local_steps.jsonl"), job="steps")
    shown = [row for row in rows if row["wrapper"] in ("torch", "local steps")]
    assert report.tables(shown) in (ROOT / "docs/frameworks/local_steps.md").read_text()


def test_the_page_has_the_time_of_an_exchange_of_local_steps():
    """20 steps with one exchange, less 20 steps without communication."""
    rows = report.of(rows_of("network_delay_local_steps.jsonl"), job="steps", delay_ms=25.0)
    ms = {
        hook: statistics.median(row["step_ms"] for row in report.of(rows, hook=hook))
        for hook in ("noop", "20", "20:int4", "20:delay=5", "20:int4:delay=5")
    }
    whole, int4, delayed, both = (round(20 * (each - ms["noop"])) for each in list(ms.values())[1:])
    adds = f"adds {whole} ms to 20 steps over 200 Mbit/s with 25 ms, and {int4} with int4;"
    assert f"{adds} with `delay=5` {delayed} and {both}" in " ".join(
        (ROOT / "docs/network.md").read_text().split()
    )


def test_the_readme_quotes_the_rows():
    """Times as in the rows of links with a delay, bytes and losses as on docs/accuracy.md."""
    runs = report.of(rows_of("network_delay_auto.jsonl"), job="steps", model="mlp", hosts=2)
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| fewer bytes than fp32") - 2 :].partition("\n\n")[0]
    _, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert [hook for hook, *_ in lines] == list(HOOKS)
    costs = {cells[0]: cells for line in accuracy_lines() if (cells := line.split())}
    for name, rate, *cells in lines:
        hook = HOOKS[name]
        found = [report.of(runs, hook=hook, mbit_per_s=mbit, delay_ms=ms) for mbit, ms in LINKS]
        assert [len(each) for each in found] == [3] * len(LINKS)
        assert cells[: len(LINKS)] == [auto.shown(report.median_ms(each)) for each in found], hook
        cost = costs.get({"bf16": "fp16"}.get(hook, hook))
        if cost is not None:
            assert rate == f"{cost[2]} ({cost[3]})"
        if cost is not None and hook != "none":
            assert cells[len(LINKS)] == cost[8]


def accuracy_lines():
    page = (ROOT / "docs/accuracy.md").read_text()
    return page[page.index("\ngpt: ") :].partition("\n\n")[0].splitlines()[3:]
