"""Tests of benchmarks/accuracy: a tiny real run, its data, its statistics, the tables of docs/accuracy.md.

They need matplotlib: pip install 'gradcomp[accuracy]'.
"""

import subprocess
from argparse import Namespace

import pytest
import torch

import gradcomp

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'gradcomp[accuracy]'")

from benchmarks import accuracy
from benchmarks.accuracy import parse
from benchmarks.records import append, read
from benchmarks.training import averaging, corpus, runs
from benchmarks.training.averaging import LocalOptions, split_rate
from benchmarks.training.runs import options_of, train
from benchmarks.training.tasks import OPTIMIZERS, TASKS, loss_of
from benchmarks.training.wire import SimulatedWire, Wire
from gradcomp.comm.consistency import MESSAGE_BYTES
from gradcomp.testing import run_ranks
from tests.programs import refusal, run_python

SIZES = {"width": 16, "layers": 1, "heads": 2, "batch": 2, "sequence": 16}
TINY = Namespace(**SIZES, steps=20, tokens_per_parameter=1, learning_rate=3e-3, optimizer="adamw")

TINY_OPTIONS = [f"--{name}={size}" for name, size in SIZES.items()]


def run_accuracy(*arguments: str) -> subprocess.CompletedProcess:
    done = run_python("-m", "benchmarks.accuracy", *arguments, stderr=subprocess.STDOUT, timeout_s=600)
    assert done.returncode == 0, done.stdout
    return done


LOCAL = ("local:5", "local:10:int4", "local:10:int4:delay=5")
OTHER_LOCAL = ("local:10:int4:outer=0.7/0.9", "local:2:to=5")
SHARDED = ("fsdp2:fp32:fp32", "fsdp2:bf16:fp32", "fsdp2:int8:16bit", "fsdp2:int8:int4")
HOOKS = ("int8", "int4", "int4:64", "powersgd:1:bf16", "powersgd:1:int8:start4")
EVERY_SORT = ("none", "alone", "none:lr=0.01", *LOCAL, *OTHER_LOCAL, *SHARDED, *HOOKS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train 20 steps with EVERY_SORT, but not again with bf16; return the rows by hook."""
    folder = tmp_path_factory.mktemp("accuracy")
    options = [*TINY_OPTIONS, "--task=gpt", "--steps=20", "--seeds=1", "--ranks=2", "--resume"]
    options += [f"--hook={','.join([*EVERY_SORT, 'bf16'])}", "--out", str(folder)]
    of_these_options = row("bf16", 0, 3.0, 1) | {"options": options_of(parse(options))}
    of_others = row("none", 0, 3.0, 1) | {"options": options_of(parse([*options, "--batch=3"]))}
    append(folder / "accuracy.jsonl", [of_these_options, of_others])
    done = run_accuracy(*options)
    recorded = read(folder / "accuracy.jsonl")
    assert recorded[:2] == [of_these_options, of_others]
    assert tuple(each["hook"] for each in recorded[2:]) == EVERY_SORT
    assert accuracy.tables([*recorded[2:], of_these_options]) in done.stdout
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG"), "of two sizes"
    return {each["hook"]: each for each in recorded[2:]}


def test_local_steps(trained):
    rows = [trained[hook] for hook in ("none", "alone", "none:lr=0.01", *LOCAL, *OTHER_LOCAL)]
    assert len({each["validation_loss"] for each in rows}) == len(rows)
    local, whole = [trained[hook] for hook in LOCAL], trained["none"]["bytes_per_step"]
    # After 5, 10 and 15 steps and at the end, with a count beside each.
    assert 4 * whole <= local[0]["sent_bytes"] < 4.01 * whole
    assert 2 * whole / 8 < local[1]["sent_bytes"] < 2 * whole / 4
    assert 2 * whole / 8 < local[2]["sent_bytes"] < 2 * whole / 4
    # After 2, 4, 8, 13 and 18 steps and at the end.
    assert 6 * whole <= trained["local:2:to=5"]["sent_bytes"] < 6.01 * whole
    assert [row["bytes_per_step"] for row in local] == [row["sent_bytes"] // 20 for row in local]


def test_sharded_models(trained):
    none, exact, bf16, int8, int4 = (trained[hook] for hook in ("none", *SHARDED))
    assert exact["validation_loss"] == pytest.approx(none["validation_loss"], abs=1e-4)
    # Weights are gathered in forward, those of blocks in backward, too, and gradients are scattered.
    whole = none["bytes_per_step"]
    assert whole < exact["bytes_per_step"] < 1.5 * whole
    assert bf16["bytes_per_step"] == exact["bytes_per_step"] - (exact["bytes_per_step"] - whole / 2) // 2
    assert int4["bytes_per_step"] < int8["bytes_per_step"] < bf16["bytes_per_step"]
    assert len({row["validation_loss"] for row in (exact, bf16, int8, int4)}) == 4


def test_compressing_hooks(trained):
    num_bytes = {hook: trained[hook]["bytes_per_step"] for hook in trained}
    assert trained["alone"]["sent_bytes"] == 0
    # Vectors are sent exactly, and a model as small as this one has many.
    assert num_bytes["none"] / 4 < num_bytes["int8"] < num_bytes["none"] / 2.9
    assert num_bytes["none"] / 8 < num_bytes["int4"] < num_bytes["int4:64"] < num_bytes["none"] / 4
    int8, bf16 = (trained[hook] for hook in ("powersgd:1:int8:start4", "powersgd:1:bf16"))
    assert int8["bytes_per_step"] < bf16["bytes_per_step"]
    assert int8["sent_bytes"] < bf16["sent_bytes"]


def test_a_whole_run(tmp_path):
    hooks = ["--hook=none,powersgd:1", "--steps=60", "--seeds=1", "--seed=3", "--ranks=2"]
    done = run_accuracy(*TINY_OPTIONS, *hooks, "--out", str(tmp_path))
    rows = read(tmp_path / "accuracy.jsonl")
    assert [(row["task"], row["hook"], row["seed"]) for row in rows] == [
        ("gpt", hook, 3) for hook in ("none", "powersgd:1")
    ]
    assert all(row["commit"] and row["torch"] == torch.__version__ and row["ranks"] == 2 for row in rows)
    none, power_sgd = rows
    assert none["bytes_per_step"] == 4 * none["num_parameters"]
    # In the first step DDP also broadcasts its bucket assignment.
    assert 0 < (assignment := none["sent_bytes"] - 60 * none["bytes_per_step"]) < 200
    assert power_sgd["start_powerSGD_iter"] == 6
    compressed = power_sgd["bytes_per_step"]
    assert compressed < none["bytes_per_step"] / 4
    # Options and nodes of both ranks, and the links' delay, in the first step.
    compared, plain = 2 * MESSAGE_BYTES + 8, 6 * none["bytes_per_step"]
    assert power_sgd["sent_bytes"] == assignment + compared + plain + 54 * compressed
    # Both runs have equal weights and data, so losses differ only after the sixth step.
    start, *_, end = none["validation_losses"]
    assert power_sgd["validation_losses"][:2] == none["validation_losses"][:2]
    assert power_sgd["validation_losses"][2:] != none["validation_losses"][2:]
    assert end == [60, none["validation_loss"]]
    assert end[1] < start[1]
    assert accuracy.tables(rows) in done.stdout


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_take_every_parameter_once(optimizer):
    net = TASKS["gpt"](TINY, 0, 0, 1).net
    groups = [group for each in OPTIMIZERS[optimizer](net, 0.25) for group in each.param_groups]
    assert {group["lr"] for group in groups} == {0.25}
    taken = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(taken) == sorted(map(id, net.parameters()))


def trained_here(rank, group, hook):
    """Train with a hook on gradcomp's wrapper, on simulated ranks or processes, and return the row."""
    options = parse([*TINY_OPTIONS, "--steps=20", "--task=text", "--optimizer=muon"])
    options.tokens_per_parameter = 0
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(averaging, "DistributedDataParallel", gradcomp.DistributedDataParallel)
    wire = SimulatedWire() if averaging.is_simulated() else Wire(None)
    with patch.context(), torch.autograd.set_multithreading_enabled(False), wire:
        return train("", "text", hook, 0, options, torch.device("cpu"), wire)


@pytest.mark.parametrize("hook", ["int4", "powersgd:1:int8", "local:5:int4"])
def test_simulated_ranks_compute_the_bits_of_processes(hook):
    (simulated, _), (processes, _) = (
        run_ranks(trained_here, 2, hook, ranks=ranks, timeout_s=300.0) for ranks in ("simulated", "gloo")
    )
    assert all(simulated[name] == processes[name] for name in ("losses", "validation_losses"))
    # Messages have headings.
    assert simulated["bytes_per_step"] == pytest.approx(processes["bytes_per_step"], rel=0.05)


def test_simulated_ranks_fill_the_time(tmp_path, monkeypatch):
    """Of four minutes the trials use nothing here, and steps take 90 ms in all."""
    options = parse(["--simulated-ranks=2", "--minutes=4", "--hook=none,int4", "--parameters=1e6"])
    assert (options.ranks, options.width, options.layers) == (2, 192, 2)
    monkeypatch.setattr(
        runs, "train", lambda _, __, hook, *___: {"ms_per_step": {"none": 30, "int4": 60}[hook]}
    )
    run_ranks(lambda *_: runs.plan([(0, "gpt", hook) for hook in options.hooks], options, None, None), 2)
    assert options.steps == pytest.approx(4 * 60 * runs.USED_PART / 0.09, rel=0.01)


def test_sentences_have_the_entropy_that_is_said(monkeypatch):
    """A reader who counts the words that follow each word finds it."""
    monkeypatch.setattr(corpus, "NUM_WORDS", 4200)
    text, entropy = corpus.sentences.__wrapped__(12_000_000, 0)
    assert entropy == pytest.approx(0.393, abs=1e-3)
    words = text.view(-1, 6)
    assert words[:, 5].eq(ord(" ")).all()
    _, index = words.unique(dim=0, return_inverse=True)
    pairs, counts = torch.stack([index[:-1], index[1:]]).unique(dim=1, return_counts=True)
    of_first = torch.zeros(int(index.max()) + 1, dtype=torch.int64).index_add_(0, pairs[0], counts)
    chances = counts / of_first[pairs[0]]
    found = -(counts / len(words) * chances.log()).sum() / 6
    assert found == pytest.approx(entropy, rel=0.02)


@pytest.mark.parametrize("name", TASKS)
def test_ranks_share_weights_and_nothing_else(name):
    first, second, again = (TASKS[name](TINY, 5, rank, 2) for rank in (0, 1, 0))
    other_seed = TASKS[name](TINY, 6, 0, 2)
    weights = [
        torch.cat([p.flatten() for p in task.net.parameters()]) for task in (first, second, other_seed)
    ]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    inputs, classes = first.draw()
    same_inputs, same_classes = again.draw()
    assert inputs.equal(same_inputs)
    assert classes.equal(same_classes)
    assert not inputs.equal(second.draw()[0])
    assert not inputs.equal(other_seed.draw()[0])


@pytest.fixture
def numbered_text(tmp_path, monkeypatch):
    """Two folders of Python files with 30,000 numbers, of which no two are equal, and none of a test's."""
    for number in range(30):
        folder = tmp_path / ("stdlib", "purelib")[number % 2]
        (folder / "tests").mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.py").write_text("".join(f"{number:03}{each:05}" for each in range(1000)))
        (folder / "tests" / f"{number}.py").write_text("x" * 8000)
    paths = {name: str(tmp_path / name) for name in ("stdlib", "purelib")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    monkeypatch.setattr(corpus, "HELD_OUT_BYTES", 20_000)
    return list(paths.values())


def test_text_is_read_once(numbered_text):
    ranks, windows = 3, []
    for rank in range(ranks):
        task = TASKS["text"](TINY, 0, rank, ranks)
        for _ in range(task.steps):
            inputs, classes = task.draw()
            assert inputs.shape == classes.shape == (2, 16)
            windows += [bytes(each.tolist()) for each in torch.cat([inputs, classes[:, -1:]], 1)]
        with pytest.raises(StopIteration):
            task.draw()
    num_parameters = sum(parameter.numel() for parameter in task.net.parameters())
    assert num_parameters <= task.steps * ranks * 2 * 16 < num_parameters + ranks * 2 * 16
    assert len(set(windows)) == len(windows) == task.steps * ranks * 2
    in_order, held_out_text = corpus.read_once(numbered_text, 16, 800)
    numbers = in_order.flatten().unfold(0, 8, 8).tolist()
    assert len({bytes(each) for each in numbers}) == 17 * 800 // 8, "windows overlap"
    held_out = {bytes(each.tolist()) for each in held_out_text.unfold(0, 17, 1)}
    assert len(held_out) == 24_000 - 16
    assert not held_out & set(windows)
    assert not any(b"x" in each for each in windows)


def test_too_little_text_is_an_error(numbered_text):
    with pytest.raises(ValueError, match=r"240,001 bytes are to be read once, but .* have 216,000: train"):
        corpus.read_once(numbered_text, 240_000, 1)


def test_names_of_runs():
    assert split_rate("powersgd:8:int8:lr=0.02") == ("powersgd:8:int8", 0.02)
    assert LocalOptions.named("local:20") == LocalOptions(20)
    every_setting = LocalOptions(20, "powersgd:8:int8", delay=1, to=40, outer=(0.7, 0.9))
    assert LocalOptions.named("local:20:powersgd:8:int8:delay=1:to=40:outer=0.7/0.9") == every_setting


def test_the_loss_of_known_logits():
    logits = torch.tensor([[[0.0, 0.0], [2.0, 0.0]]])  # batch × sequence × classes, as the GPT's
    classes = torch.tensor([[0, 1]])
    # -log(1/2), and -log(1 / (1 + e²))
    assert loss_of(logits, classes).item() == pytest.approx((0.693147 + 2.126928) / 2, rel=1e-5)


def row(hook: str, seed: int, loss: float, num_bytes: int) -> dict:
    known = {"task": "gpt", "num_parameters": 10, "steps": 100, "ranks": 2, "start_powerSGD_iter": 10}
    sizes = {"bytes_per_step": num_bytes, "sent_bytes": 10**6 * num_bytes}
    return known | sizes | {"hook": hook, "seed": seed, "validation_loss": loss}


def test_the_picture_has_a_line_per_hook_over_sizes(tmp_path):
    sizes = [{"num_parameters": size} for size in (10, 100)]
    rows = [row(hook, 0, 2.0, 4) | size for size in sizes for hook in ("none:lr=1", "int4:lr=1", "int8:lr=1")]
    accuracy.draw(rows, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="two sizes"):
        accuracy.draw(rows[:3], tmp_path / "accuracy.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "gpt,mnist"], "--task: there is no 'mnist'; known are gpt,text,grammar"),
        (
            ["--hook", "fp8"],
            "--hook: there is no hook 'fp8'; known are none, allreduce, bf16, fp16, int8, int4, ",
        ),
        (["--hook", "local:0"], "local: '0' is not a number of local steps"),
        (["--hook", "local:5:speed=3"], "local: there is no setting 'speed'; known are delay, to, outer"),
        (["--hook", "local:5:outer=x"], "could not convert string to float: 'x'"),
        (["--hook", "none:lr=fast"], "could not convert string to float: 'fast'"),
        (["--seeds", "0"], "argument --seeds: '0' is not a whole number of at least 1"),
    ],
)
def test_bad_options_are_shown(arguments, message, capsys):
    assert message in refusal(capsys, parse, arguments)
