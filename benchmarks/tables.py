"""Bring the tables and numbers in README and pages up to date with benchmarks/results: make tables

A text of the rows is found in its page by its words. In a table's line all but the first cell may differ, and
elsewhere numbers. A test runs it: no page may change.
"""

import re
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import accuracy, demo
from benchmarks.environment import ROOT
from benchmarks.network import report
from benchmarks.records import RESULTS, Row, read
from gradcomp.hooks.auto_hook import CANDIDATES

# The columns of times in docs/choosing.md: Mbit/s, and ms one way; None without a router.
LINKS = ((200, 0.0), (200, 25.0), (1_000, 0.0), (1_000, 25.0))
FASTEST = 10_000, None

ACCURACY = report.of(read(RESULTS / "accuracy.jsonl"), task="gpt")
LOSSES = accuracy.summaries(ACCURACY)["gpt"]
ROWS = read(RESULTS / "network.jsonl")
STEPS = report.of(ROWS, job="steps")


def steps(**wanted: Any) -> list[Row]:
    """Return the timed steps with these values, by default of two hosts with one rank each."""
    return report.of(STEPS, **{"hosts": 2, "ranks_per_host": 1, **wanted})


def at(rows: list[Row], link: report.Link, **wanted: Any) -> list[Row]:
    return report.of(rows, mbit_per_s=link[0], delay_ms=link[1], **wanted)


def ms(rows: list[Row], link: report.Link, hook: str) -> float:
    return report.median_ms(at(rows, link, hook=hook))


def tables() -> Iterator[tuple[str, str]]:
    """Yield (page, table of rows)."""
    local = [row for row in steps(model="mlp", wrapper="local steps") if row["hook"] != "20:delay=5"]
    beside = [row for link in LINKS for row in at(steps(model="mlp", hook="none"), link)]
    gpt = steps(model="gpt", wrapper="torch", hooks="gradcomp")
    for page, rows in (
        ("network", [row for row in steps(model="mlp", wrapper="torch") if row["delay_ms"] not in (5, None)]),
        ("network", [row for row in gpt if row["hook"] != "allreduce" and row["delay_ms"] is not None]),
        ("network", [row for row in report.of(STEPS, hosts=4) if row["hook"] not in ("noop", "bf16")]),
        ("network", report.of(STEPS, hosts=2, ranks_per_host=3)),
        ("frameworks/local_steps", beside + local),
        ("fsdp", steps(wrapper="fsdp2")),
    ):
        for table in re.split(r"\n\n(?=[^|])", report.tables(rows)):
            yield f"docs/{page}.md", table
    yield "docs/accuracy.md", accuracy.tables(ACCURACY)


def mean(losses: list[float], sign: str = "") -> str:
    return accuracy.mean_and_spread(losses, 3, sign).partition(" ")[0]


def readmes_lines() -> Iterator[str]:
    """Yield a line for each hook: of the GPT's steps, and of a smaller one's loss."""
    costs = {each.hook: mean(each.differences, "+") for each in LOSSES}
    runs, links = steps(model="gpt", wrapper="torch", hooks="gradcomp"), (LINKS[0], LINKS[3])
    for hook, name in report.DRAWN.items():
        times = " | ".join(report.cell(at(runs, link, hook=hook), at(runs, link)) for link in links)
        none, sent = (
            statistics.median(row["sent_bytes_per_step"] for row in at(runs, links[0], hook=each))
            for each in ("none", hook)
        )
        rate = {"auto": "as it chooses", "noop": "sends none"}.get(hook) or f"{none / sent:.1f}×"
        loss = costs.get({"bf16": "fp16", "none": ""}.get(hook, hook), "")
        yield f"| {name} | {rate} | {times} | {loss} |"


def advice() -> Iterator[str]:
    """Yield, for models and hosts, the mildest hook within 10 % of the fastest."""
    for name, model, hosts in (("perceptron", "mlp", 2), ("perceptron", "mlp", 4), ("GPT", "gpt", 2)):
        cells = []
        for link in (*LINKS, FASTEST):
            beside = at(steps(model=model, hosts=hosts, wrapper="torch", hooks="gradcomp"), link)
            times = {hook: ms(beside, link, hook) for hook in CANDIDATES} if beside else {}
            chosen = next((hook for hook in times if times[hook] <= 1.1 * min(times.values())), None)
            cells.append(f"{chosen}, {times['none'] / times[chosen]:.1f}×" if chosen else "")
        yield f"| {name}, {hosts} hosts | {' | '.join(cells)} |"


def on_networks() -> Iterator[tuple[str, str]]:
    """Yield (page, sentence) on times over links."""
    (machine,) = {(row["device"], row["torch"]) for row in ROWS}
    yield "docs/network.md", f"{machine[0].removeprefix('CPU ').partition(',')[0]}, torch {machine[1]}"
    yield "docs/network.md", report.differences(STEPS).rstrip()
    ratios = []  # auto_hook's step over the fastest candidate's
    for model, hosts, link in {
        (row["model"], row["hosts"], (row["mbit_per_s"], row["delay_ms"])) for row in STEPS
    }:
        beside = at(steps(model=model, hosts=hosts, wrapper="torch", hooks="gradcomp"), link)
        if report.of(beside, hook="auto"):
            ratios.append(ms(beside, link, "auto") / min(ms(beside, link, hook) for hook in CANDIDATES))
    yield (
        "docs/network.md",
        f"A step with `auto_hook` takes {min(ratios):.2f} to {max(ratios):.2f} times as long as with the "
        f"fastest candidate, in the median {statistics.median(ratios):.2f}",
    )
    two, four = (at(report.of(ROWS, job="link", hosts=hosts), LINKS[3])[0] for hosts in (2, 4))
    small, of_four = (dict(link["all_reduce_seconds"])[1_000] * 1e3 for link in (two, four))
    yield (
        "docs/internals/network.md",
        f"With 25 ms one way gloo's all-reduce of 1 kB takes {small:.0f} ms on 2 ranks and {of_four:.0f} on "
        f"4, an exchange of messages {two['exchange_seconds'] * 1e3:.0f}",
    )
    runs = steps(model="mlp", wrapper="torch", hooks="gradcomp")
    yield "docs/auto.md", "gradcomp: " + at(runs, LINKS[1], hook="auto")[0]["said"]
    gpts = steps(model="gpt", wrapper="torch", hooks="gradcomp")
    gpt, mlp = (ms(each, LINKS[0], "none") / ms(each, LINKS[0], "auto") for each in (gpts, runs))
    yield "docs/index.md", f"a small GPT is {gpt:.1f} times as fast, and of a perceptron {mlp:.1f} times"


def on_cpu(case: str, label: str, provider: str = "gradcomp") -> Row:
    rows = read(RESULTS / "cpu-amd-epyc-1-threads.jsonl")
    (row,) = report.of(rows, case=case, label=label, provider=provider)
    return row


def times_torchs(case: str, label: str, digits: int = 1) -> str:
    """Say how many times as fast as torch's ours is on a CPU, with the middle 60 % of rounds."""
    row = on_cpu(case, label)
    low, middle, high = (f"{row[f'times_baseline{part}']:.{digits}f}" for part in ("_p20", "", "_p80"))
    return f"{middle} ({low}–{high})"


# The lines of docs/internals/hooks.md's table: cases, and the beginning of their labels.
ON_GPU = {
    "`powerSGD_hook`, BERT-large, r = 4": ("powerSGD_hook", "bert-large"),
    "ResNet-50, r = 4, 32, 1": ("powerSGD_hook", "resnet50"),
    "`quantization_hook`, 8, 4 bits; torch's fp16 hook": ("quantization_hook", "25 MiB"),
    "8 bits, 25 MiB, 8 ranks: quantize, average, dequantize": ("quantize average dequantize", "25 MiB, 8"),
    "4 bits": ("quantize average dequantize", "25 MiB, 4"),
    "`fp16_compress_hook`, 25 MiB": ("fp16_compress_hook", "25 MiB"),
    "flatten, unflatten ResNet-50; DDP's kernels": ("flatten unflatten", "resnet50"),
    "Reducer: ResNet-50, with views": ("reducer", "resnet50"),
    "Reducer: BERT-large": ("reducer", "bert-large"),
}


def on_gpu() -> Iterator[str]:
    """Yield a line for each of ON_GPU: of every problem in fp32, beside torch's time of the host."""
    rows = report.of(read(RESULTS / "nvidia-h100-80gb-hbm3.jsonl"), dtype="float32")
    rows = [*{(row["case"], row["label"], row["provider"]): row for row in rows}.values()]  # the last ones
    for name, (cases, label) in ON_GPU.items():
        found = [row for row in rows if row["case"] in cases.split() and row["label"].startswith(label)]
        ours = [row for row in found if row["provider"] in ("gradcomp", "int8", "int4")]
        theirs = [row for row in found if row["provider"] == ours[0]["baseline"]]
        forms = ("times_baseline", ".2g"), ("percent_of_copy", ".0f"), ("times_floor", ".1f")
        cells = [", ".join(f"{row[field]:{form}}" for row in ours) for field, form in forms]
        cells += [", ".join(f"{row['host_us'] / 1e3:.3g}" for row in each) for each in (ours, theirs)]
        yield f"| {name} | {' | '.join(cells)} |"


def on_devices() -> Iterator[tuple[str, str]]:
    """Yield (page, text) on times of single calls, and on the demo."""
    yield from (("docs/internals/hooks.md", line) for line in on_gpu())
    yield "README.md", f"[{next(on_gpu()).split(' | ')[1]} times as fast as torch's]"
    for label in ("4×1024×1024, 512×512×3×3", "60×256×256"):
        cells = [times_torchs("powerSGD_hook", f"{label}, 1 bucket, r={rank}") for rank in (1, 4, 16)]
        yield "docs/powersgd.md", f"| {label} | {' | '.join(cells)} |"
    small, resnet = (times_torchs("reducer", label, 2) for label in ("400 small tensors", "resnet50"))
    yield (
        "docs/reducer.md",
        f"with 400 small tensors the Reducer is {small} times as fast as torch's DDP, with ResNet-50's "
        f"parameters {resnet}",
    )
    names = ("torch_fp16", "fp16", "int8", "int4", "pertensor")
    found = [on_cpu("quantization_hook", "25 MiB bucket, W=1", name)["p50_us"] / 1e3 for name in names]
    yield (
        "docs/internals/hooks.md",
        "On one thread a hook's own work on 25 MiB of fp32 takes {:.1f} ms for torch's fp16, {:.1f} for "
        "ours, {:.1f} for int8, {:.1f} for int4 and {:.1f} for pertensor".format(*found),
    )
    records = {record["hook"]: record for record in read(RESULTS / "demo.jsonl")}
    target = demo.target_loss([*records.values()])
    seconds = {hook: demo.seconds_to(target, record) for hook, record in records.items()}
    times = [seconds["none"] / seconds[hook] for hook in ("bf16", "int4", "auto")]
    yield (
        "docs/demo.md",
        "{:.1f} times as soon with bf16, {:.1f} with int4 and {:.1f} with auto_hook".format(*times),
    )


def of_text(**options: int) -> dict[str, accuracy.Summary]:
    """Summarize the rows of local steps with these options, after none with its best learning rate."""
    rows = read(RESULTS / "accuracy_local_steps_text.jsonl")
    rows = [row for row in rows if options.items() <= row["options"].items()]
    nones = [row for row in rows if row["hook"].startswith("none")]
    none = min((row for row in nones if row["seed"] == 0), key=lambda row: row["validation_loss"])["hook"]
    compared = report.of(rows, hook=none) + [row for row in rows if row not in nones]
    return {each.hook.removesuffix(":lr=0.005"): each for each in accuracy.summaries(compared)["text"]}


def on_local_steps() -> Iterator[str]:
    """Yield lines and sentences on the losses of local steps."""
    found = of_text(width=64, batch=8)
    none = next(iter(found.values()))
    yield f"ends at {statistics.mean(none.losses):.3f} nats"
    names = {f"{every}, int4": f"local:{every}:int4" for every in (10, 30)}
    names |= {"**3 to 50, int4**": "local:3:int4:to=50"}
    names |= {"10, int4, DiLoCo's outer optimizer": "local:10:int4:outer=0.7/0.9:lr=0.001"}
    names |= {"every step, powersgd:2:int8": "powersgd:2:int8"}
    for setting, hook in names.items():
        loss = accuracy.mean_and_spread(found[hook].differences, 3, "+")
        yield f"| {setting} | {none.bytes_per_step / found[hook].bytes_per_step:.1f}× | {loss} |"
    yield "A rank alone adds {:.3f}.".format(*found["alone"].differences)
    yield "`every=2` ({:+.3f})".format(*found["local:2:int4"].differences)
    larger = of_text(width=96, batch=16)["local:3:int4:to=50"]
    yield f"adds {mean(larger.differences, '+')} at 279 k parameters and 1,024 tokens per rank and step"


def on_shards() -> Iterator[str]:
    """Yield lines on the losses of FSDP2's weights and gradients."""
    rows = read(RESULTS / "accuracy_fsdp.jsonl")
    small = accuracy.summaries([row for row in rows if row["options"]["width"] == 64])["gpt"]
    large = accuracy.costs([row for row in rows if row["hook"].endswith(":lr=0.0015")])
    for each in small[1:]:
        second = mean([large[each.hook]], "+") if each.hook in large else ""
        name = each.hook.removeprefix("fsdp2:").replace(":", ", ")
        yield f"| {name} | {accuracy.mean_and_spread(each.differences, 3, '+')} | {second} |"


def at_size() -> str:
    """Format no hook's loss at 20 tokens per parameter, and what hooks add: by size, and by optimizer."""
    rows = read(RESULTS / "accuracy_text.jsonl")
    columns: dict[str, list[Row]] = {}
    for row in rows:
        optimizer = {"adamw": "", "sgd": ", SGD", "muon": ", Muon"}[row["options"]["optimizer"]]
        columns.setdefault(f"{row['num_parameters']:,}{optimizer}", []).append(row)
    costs = [accuracy.costs(rows) for rows in columns.values()]
    cells = {"none": [mean(accuracy.summaries(rows)["text"][0].losses) for rows in columns.values()]}
    for hook in dict.fromkeys(hook for each in costs for hook in each):
        cells[hook] = [mean([each[hook]], "+") if hook in each else "" for each in costs]
    head = f"| parameters | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|"
    return "\n".join([head, *(f"| {hook} | {' | '.join(each)} |" for hook, each in cells.items())])


def on_costs() -> Iterator[str]:
    """Yield sentences on the losses of the small GPT: of equal bytes, of a compressed start, of 8 ranks."""
    four, eight = accuracy.costs(ACCURACY), accuracy.costs(read(RESULTS / "accuracy_8_ranks.jsonl"))
    for hook in ("powersgd:16:int8", "powersgd:8:bf16", "powersgd:4"):
        yield f"`{hook}` ({four[hook]:+.2f})"
    for each in accuracy.summaries(read(RESULTS / "accuracy_start.jsonl"))["gpt"][1:3]:
        yield f"`{each.hook}` sends {each.sent_bytes / 1e6:.1f} MB and adds {mean(each.differences)}"
    apart = max(abs(eight[hook] - four[hook]) for hook in eight if hook in four and hook != "alone")
    yield f"are the same, within {apart:.3f}"


def texts() -> Iterator[tuple[str, str]]:
    """Yield (page, what it says by the rows)."""
    yield from (*tables(), *on_networks(), *on_devices())
    yield from (("docs/frameworks/local_steps.md", text) for text in on_local_steps())
    yield from (("docs/fsdp.md", text) for text in on_shards())
    yield from (("docs/accuracy.md", text) for text in (at_size(), *on_costs()))
    yield "README.md", "\n".join(readmes_lines())
    none, alone, *_ = LOSSES
    size = f"{ACCURACY[0]['num_parameters']:,}"
    yield "README.md", f"no hook's {mean(none.losses)}, for a GPT of {size} parameters"
    yield "README.md", f"Without any communication it ends {mean(alone.differences)} above"
    yield "docs/choosing.md", "\n".join(advice())


NUMBER = r"[-+]?\d+(?:[.,]\d+)*"


def pattern_of(text: str) -> str:
    """Return a pattern of what a page says of other rows in place of this text."""
    lines = []
    for line in text.splitlines():
        words = [re.escape(part).replace("\\ ", r"\s+") for part in re.split(NUMBER, line)]
        cell = re.match(r"\|[^|]*\|", line)
        lines.append(re.escape(cell[0]) + "[^\n]*" if cell else NUMBER.join(words))
    return "\n".join(lines)


def updated(page: str, text: str) -> str:
    """Return a page's contents with this text. Raises ValueError unless there is one place for it."""
    found = list(re.finditer(pattern_of(text), page))
    if text.split() in [match[0].split() for match in found]:
        return page
    if len(found) != 1:
        raise ValueError(f"the page has {len(found)} places for a text, write it by hand: {text}")
    return page[: found[0].start()] + text + page[found[0].end() :]


def main() -> None:
    for page, text in texts():
        before = (ROOT / page).read_text()
        after = updated(before, text)
        if after != before:
            (ROOT / page).write_text(after)
            print(f"{page}: {text}")


if __name__ == "__main__":
    main()
