"""Test that the times that pages and README state are those of one run on one machine, which they name."""

import json
import re
import statistics

import pytest

from benchmarks.demo import chart
from benchmarks.network import report
from gradcomp.hooks.auto_hook import CANDIDATES
from tests.programs import ROOT

RESULTS = ROOT / "benchmarks/results"
# README's names of hooks, and the names in the rows and in docs/accuracy.md.
HOOKS = {
    "no hook": "none",
    "`auto_hook`": "auto",
    "`bf16_compress_hook`": "bf16",
    "`quantization_hook`, 8 bits": "int8",
    "`quantization_hook`, 4 bits": "int4",
    "`powerSGD_hook`, rank 16, int8 factors, the rest in bf16": "powersgd:16:int8",
    "`powerSGD_hook`, rank 8, int8 factors, the rest in bf16": "powersgd:8:int8",
}
# The columns of times in README and in docs/choosing.md: Mbit/s, and ms one way; None without a router.
LINKS = ((200, 0.0), (200, 25.0), (1_000, 0.0), (1_000, 25.0))
FASTEST = 10_000, None


def rows_of(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def text_of(name):
    return " ".join((ROOT / name).read_text().split())


ROWS = rows_of("network.jsonl")
STEPS = report.of(ROWS, job="steps")


def one_rank_each(**wanted):
    return report.of(STEPS, ranks_per_host=1, **wanted)


def on_two_hosts(**wanted):
    return one_rank_each(hosts=2, **wanted)


def at(rows, link, **wanted):
    return report.of(rows, mbit_per_s=link[0], delay_ms=link[1], **wanted)


LOCAL = [row for row in on_two_hosts(model="mlp", wrapper="local steps") if row["hook"] != "20:delay=5"]
NONE_BESIDE = [row for link in LINKS for row in at(on_two_hosts(model="mlp", hook="none"), link)]
TABLES = {
    "docs/network.md": [
        [row for row in on_two_hosts(model="mlp", wrapper="torch") if row["delay_ms"] != 5],
        [
            row
            for row in on_two_hosts(model="gpt", wrapper="torch", hooks="gradcomp")
            if row["hook"] != "allreduce"
        ],
        report.of(ROWS, job="loss"),
        [row for row in report.of(STEPS, hosts=4) if row["hook"] not in ("noop", "bf16")],
        on_two_hosts(model="mlp12"),
        report.of(STEPS, hosts=2, ranks_per_host=3),
    ],
    "docs/frameworks/local_steps.md": [NONE_BESIDE + LOCAL],
    "docs/fsdp.md": [
        on_two_hosts(wrapper="fsdp2"),
        report.of(STEPS, wrapper="fsdp2", ranks_per_host=2, mbit_per_s=200),
    ],
}


@pytest.mark.parametrize("page", TABLES)
def test_pages_have_tables_of_the_rows(page):
    text = (ROOT / page).read_text()
    for rows in TABLES[page]:
        for table in report.tables(rows).split("\n\n"):
            assert table in text


def test_all_times_are_of_one_machine_and_no_packet_was_dropped():
    (machine,) = {(row["device"], row["torch"], row["python"]) for row in ROWS}
    assert f"{machine[0].removeprefix('CPU ').partition(',')[0]}, torch {machine[1]}" in text_of(
        "docs/network.md"
    )
    assert not [row for row in ROWS if row.get("dropped_packets") or "failed" in row]
    assert report.differences(STEPS).rstrip() in text_of("docs/network.md")


def times_the_fastest():
    """Return auto_hook's step over the fastest candidate's, by (model, hosts, link)."""
    found = {}
    for auto in report.of(STEPS, hook="auto"):
        where = auto["model"], auto["hosts"], (auto["mbit_per_s"], auto["delay_ms"])
        beside = at(one_rank_each(model=where[0], hosts=where[1], wrapper="torch"), where[2])
        found[where] = report.median_ms(report.of(beside, hook="auto")) / min(
            report.median_ms(report.of(beside, hook=hook, hooks="gradcomp")) for hook in CANDIDATES
        )
    return found


def sentence_on_auto():
    low, *_, high = ratios = sorted(times_the_fastest().values())
    return (
        f"A step with `auto_hook` takes {low:.2f} to {high:.2f} times as long as with the fastest candidate, "
        f"in the median {statistics.median(ratios):.2f}"
    )


def test_the_page_says_how_near_auto_hook_comes_to_the_fastest():
    assert sentence_on_auto() in text_of("docs/network.md")


def sentence_on_gloo():
    """Compare gloo's all-reduce of 1 kB with an exchange, over links with 25 ms one way."""
    two, four = (at(report.of(ROWS, job="link", hosts=hosts), LINKS[3])[0] for hosts in (2, 4))
    small, of_four = (dict(link["all_reduce_seconds"])[1_000] * 1e3 for link in (two, four))
    exchange = two["exchange_seconds"] * 1e3
    return (
        f"With 25 ms one way gloo's all-reduce of 1 kB takes {small:.0f} ms on 2 ranks and {of_four:.0f} on "
        f"4, an exchange of messages {exchange:.0f}"
    )


def test_the_internals_say_what_gloo_takes():
    assert sentence_on_gloo() in text_of("docs/internals/network.md")


def said():
    """Return the line that auto_hook wrote over 200 Mbit/s with 25 ms."""
    return "gradcomp: " + at(on_two_hosts(model="mlp", hook="auto"), LINKS[1])[0]["said"]


def test_the_page_of_auto_hook_has_a_line_that_it_wrote():
    assert said() in text_of("docs/auto.md")


def advice():
    """Format, for models and hosts, the mildest hook within 10 % of the fastest, as docs/choosing.md does."""
    lines = []
    for name, model, hosts in (
        ("perceptron, 2 hosts", "mlp", 2),
        ("perceptron, 4 hosts", "mlp", 4),
        ("GPT, 2 hosts", "gpt", 2),
    ):
        cells = []
        for link in (*LINKS, FASTEST):
            beside = at(one_rank_each(model=model, hosts=hosts, wrapper="torch", hooks="gradcomp"), link)
            if not beside:
                cells.append("")
                continue
            ms = {hook: report.median_ms(report.of(beside, hook=hook)) for hook in CANDIDATES}
            chosen = next(hook for hook in CANDIDATES if ms[hook] <= 1.1 * min(ms.values()))
            cells.append(f"{chosen}, {ms['none'] / ms[chosen]:.1f}×")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def test_the_advice_is_what_was_fastest():
    text = (ROOT / "docs/choosing.md").read_text()
    for line in advice():
        assert line in text


def readmes_line(name):
    """Return the cells of a hook's line in README's table."""
    hook = HOOKS[name]
    runs = on_two_hosts(model="mlp", wrapper="torch", hooks="gradcomp")
    cells = [report.cell(at(runs, link, hook=hook), at(runs, link)) for link in LINKS]
    if hook == "auto":
        return [name, "as what it chooses", *cells, "as what it chooses"]
    cost = costs()[{"bf16": "fp16"}.get(hook, hook)]
    return [name, f"{cost[2]} ({cost[3]})", *cells, "" if hook == "none" else cost[8]]


def costs():
    """Return the cells of docs/accuracy.md's table by the hook's name."""
    page = (ROOT / "docs/accuracy.md").read_text()
    lines = page[page.index("\ngpt: ") :].partition("\n\n")[0].splitlines()[3:]
    return {cells[0]: cells for line in lines if (cells := line.split())}


def test_the_readme_has_a_line_for_each_hook():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| fewer bytes than fp32") - 2 :].partition("\n\n")[0]
    _, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert lines == [readmes_line(name) for name in HOOKS]


def without_communication():
    return f"{report.median_ms(at(on_two_hosts(model='mlp', hook='noop'), LINKS[0])):.0f} ms"


def gains():
    """Say how many times as fast auto_hook makes a step over 200 Mbit/s and over 1 Gbit/s."""
    runs = on_two_hosts(model="mlp", wrapper="torch", hooks="gradcomp")
    times = [
        report.median_ms(at(runs, link, hook="none")) / report.median_ms(at(runs, link, hook="auto"))
        for link in (LINKS[0], LINKS[2])
    ]
    return "{:.0f} times as fast over 200 Mbit/s, {:.1f} times over 1 Gbit/s".format(*times)


def test_readme_and_the_home_page_say_the_gain():
    assert f"Without communication a step takes {without_communication()}" in text_of("README.md")
    assert gains() in text_of("docs/index.md")


def test_times_on_a_gpu_are_of_its_rows():
    (ours,) = report.of(
        rows_of("nvidia-h100-80gb-hbm3.jsonl"),
        case="powerSGD_hook",
        label="bert-large, 38 buckets, r=4",
        dtype="float32",
        provider="gradcomp",
    )
    assert f"[{ours['p50_us'] / 1e3:.1f} ms for BERT-large]" in text_of("README.md")
    assert f"{ours['host_us'] / 1e3:.1f} on the host" in text_of("README.md")


def on_cpu(case, label, provider="gradcomp"):
    (row,) = report.of(rows_of("cpu-amd-epyc-1-threads.jsonl"), case=case, label=label, provider=provider)
    return row


def times_torchs(case, label, digits=1):
    """Say how many times as fast as torch's ours is on a CPU, with the middle 60 % of rounds."""
    row = on_cpu(case, label)
    low, middle, high = (f"{row[f'times_baseline{part}']:.{digits}f}" for part in ("_p20", "", "_p80"))
    return f"{middle} ({low}–{high})"


def powersgd_line(label):
    cells = [times_torchs("powerSGD_hook", f"{label}, 1 bucket, r={rank}") for rank in (1, 4, 16)]
    return f"| {label} | {' | '.join(cells)} |"


def test_the_page_of_powersgd_has_times_on_a_cpu():
    page = (ROOT / "docs/powersgd.md").read_text()
    for label in re.findall(r"^\| (\d+×[^|]*) \|", page, re.MULTILINE):
        assert powersgd_line(label) in page


def sentence_on_the_reducer():
    small, resnet = (times_torchs("reducer", label, 2) for label in ("400 small tensors", "resnet50"))
    return (
        f"with 400 small tensors the Reducer is {small} times as fast as torch's DDP, with ResNet-50's "
        f"parameters {resnet}"
    )


def test_the_page_of_the_reducer_has_times_on_a_cpu():
    assert sentence_on_the_reducer() in text_of("docs/reducer.md")


def sentence_on_hooks():
    names = ("torch_fp16", "fp16", "int8", "int4", "pertensor")
    ms = [on_cpu("quantization_hook", "25 MiB bucket, W=1", name)["p50_us"] / 1e3 for name in names]
    return (
        f"On one thread a hook's own work on 25 MiB of fp32 takes {ms[0]:.1f} ms for torch's fp16, "
        f"{ms[1]:.1f} for ours, {ms[2]:.1f} for int8, {ms[3]:.1f} for int4 and {ms[4]:.1f} for pertensor"
    )


def test_the_internals_of_hooks_have_times_on_a_cpu():
    assert sentence_on_hooks() in text_of("docs/internals/hooks.md")


def sentence_on_the_demo():
    records = {record["hook"]: record for record in rows_of("demo.jsonl")}
    target = chart.target_loss([*records.values()])
    seconds = {hook: chart.seconds_to(target, record) for hook, record in records.items()}
    times = [seconds["none"] / seconds[hook] for hook in ("bf16", "int4", "auto_hook")]
    return "{:.1f} times as soon with bf16, {:.1f} with int4 and {:.1f} with auto_hook".format(*times)


def test_the_page_of_the_demo_says_its_gain():
    assert sentence_on_the_demo() in text_of("docs/demo.md")
