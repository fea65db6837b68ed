"""Test `python -m gradcomp plan`: its output, and its refusals, which are one line and status 2."""

import re

import pytest

from gradcomp.__main__ import main
from gradcomp.comm.announcement import shown_bytes
from gradcomp.command_line import bytes_per_s, shown_seconds
from gradcomp.hooks.named_hooks import NAMES
from tests.programs import ROOT, refusal, run_python

HERE = "tests.plan.test_plan_command"
MODEL = ("--model", f"{HERE}:a_model")


def a_model():
    return [(300, 200), (200,)]


def mixed():
    import torch
    from torch import nn

    parts = (("bfloat16", (300, 200)), ("float64", (400, 100)), ("float32", (70,)), ("complex64", (50,)))
    return nn.ParameterList(
        nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype))) for dtype, shape in parts
    )


def in_8_bits():
    import torch
    from torch import nn

    return nn.ParameterList([nn.Parameter(torch.empty(4, dtype=torch.float8_e4m3fn))])


def odd():
    return [(), (0, 5), (1, 1), (5, 0), (2, 3, 1, 4)]


def empty():
    return [(0,)]


def plan(capsys, *arguments):
    main(["plan", *arguments])
    return capsys.readouterr().out


def row_of(output, hook):
    """Return the cells of a hook's row, its name first."""
    return re.split("  +", next(line for line in output.splitlines() if re.split("  +", line)[0] == hook))


def documented():
    """Return (command, output) for each plan in docs/plan.md that is shown with its output."""
    page = (ROOT / "docs" / "plan.md").read_text()
    blocks = re.findall(r"```\npython -m gradcomp plan ([^\n]*)\n```\n\n```\n(.*?)\n```\n", page, re.DOTALL)
    assert blocks
    return blocks


def test_the_table(capsys):
    output = plan(
        capsys, *MODEL, "--ranks", "2", "--bandwidth", "8Mbit", "--delay-ms", "100", "--backend", "gloo"
    )
    assert "model    60,200 parameters, gradients in float32, 1 buckets" in output
    assert "network  2 ranks, 1 per node, gloo; 0.008 Gbit/s per node, round trips of 100 ms" in output
    # 240,800 bytes at 1 MB/s. DDP's own all-reduce has a step there and a step back.
    assert row_of(output, "none") == ["none", "240.80 kB", "1.0×", "0.5×", "241 ms", "200 ms"]
    assert row_of(output, "bf16") == ["bf16", "120.40 kB", "2.0×", "1.0×", "120 ms", "50.0 ms"]
    assert [line.split()[0] for line in output.splitlines()[4:] if line][: len(NAMES)] == list(NAMES)
    assert "Arithmetic: nothing was run." in output


def test_gradients_in_16_bits_and_small_buckets(capsys):
    output = plan(capsys, *MODEL, "--ranks", "2", "--dtype", "bfloat16", "--hook", "int4")
    assert "gradients in bfloat16, 1 buckets" in output
    assert row_of(output, "none")[:4] == ["none", "120.40 kB", "1.0×", "1.0×"]
    assert "2 buckets" in plan(capsys, *MODEL, "--bucket-cap-mb", "0.0001")


def test_bytes_are_those_of_each_parameters_dtype(capsys):
    """Of 2 ranks each sends all its bytes once; bf16 sends 2 bytes of every dtype."""
    model = ("--model", f"{HERE}:mixed", "--ranks", "2")
    output = plan(capsys, *model)
    assert "100,170 parameters, gradients in bfloat16 and float64 and float32, 3 buckets" in output
    assert row_of(output, "none")[1] == shown_bytes(2 * 60_000 + 8 * 40_000 + 4 * 70 + 8 * 50)
    assert row_of(output, "bf16")[1] == shown_bytes(2 * 100_170)
    given = plan(capsys, *model, "--dtype", "float32")
    assert "gradients in float32, 1 buckets" in given
    assert row_of(given, "none")[1] == shown_bytes(4 * 100_170)
    gloo = plan(capsys, *model, "--delay-ms", "100", "--backend", "gloo", "--hook", "int4")
    assert row_of(gloo, "none")[-1] == "300 ms", "two of three buckets at a time"


@pytest.mark.parametrize("name", ["odd", "empty", "mixed"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_every_shape_dtype_and_form(capsys, name, dtype, backend):
    nodes = ("--ranks", "4", "--ranks-per-node", "2", "--delay-ms", "10")
    output = plan(capsys, "--model", f"{HERE}:{name}", "--dtype", dtype, "--backend", backend, *nodes)
    assert f"gradients in {dtype}, " in output


def test_nodes_have_a_row_for_either_form(capsys):
    nodes = ("--ranks-per-node", "4", "--hook", "bf16,int4,powersgd:4")

    def forms(*arguments):
        rows = plan(capsys, *MODEL, *nodes, *arguments).split("\n\n")[1].splitlines()[1:]
        return [re.split("  +", row)[0] for row in rows]

    assert forms() == ["none", "bf16", "int4 hierarchical", "int4", "powersgd:4"]
    assert forms("--backend", "gloo")[-2:] == ["powersgd:4 hierarchical", "powersgd:4"]
    assert forms("--ranks", "4") == ["none", "bf16", "int4", "powersgd:4"], "one node"
    assert "64 ranks, 4 per node" in plan(capsys, *MODEL, *nodes), "16 nodes by default"


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        *((text, 10e9) for text in ("10Gbit", "10Gbit/s", "10Gbps", "10Gb", "10gb/s", "10 Gbit")),
        ("1.25GB/s", 10e9),
        ("1.25GBps", 10e9),
        ("200Mbit", 2e8),
        ("500kb", 5e5),
    ],
)
def test_bandwidths_as_people_write_them(text, bits):
    assert 8 * bytes_per_s(text) == pytest.approx(bits)


@pytest.mark.parametrize(("command", "output"), documented(), ids=lambda text: text.split("\n")[0][:40])
def test_the_page_shows_what_is_printed(capsys, command, output):
    assert plan(capsys, *command.split()).rstrip() == output


def test_the_bytes_of_choosing_are_these(capsys):
    page = (ROOT / "docs" / "choosing.md").read_text()
    hooks = ("--hook", "bf16,int4,powersgd:16:int8")
    model = ("--model", "benchmarks.models:gpt2_medium")
    output = plan(capsys, *model, "--ranks", "32", "--ranks-per-node", "8", *hooks)
    codes = ("int4", "int4 hierarchical", "powersgd:16:int8", "powersgd:16:int8 hierarchical")
    for hook in ("none", "bf16", *codes):
        sent, *ratios = row_of(output, hook)[1:4]
        assert f"| {hook} | {sent} | {' | '.join(ratios)} |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --model"),
        (["--model", "resnet51"], "model 'resnet51' is not module:callable"),
        ([*MODEL, "--hook", "int2"], "argument --hook: there is no hook 'int2'; known are none, allreduce"),
        ([*MODEL, "--ranks", "0"], "'0' is not a whole number of at least 1"),
        ([*MODEL, "--ranks", "12", "--ranks-per-node", "8"], "12 ranks are not whole nodes of 8 ranks"),
        ([*MODEL, "--bandwidth", "fast"], "'fast' is not a bandwidth"),
        ([*MODEL, "--bandwidth", "0Gbit"], "'0Gbit' is not a bandwidth"),
        ([*MODEL, "--delay-ms", "-1"], "'-1' is not a number of at least 0"),
        ([*MODEL, "--delay-ms", "inf"], "'inf' is not a number of at least 0"),
        ([*MODEL, "--bucket-cap-mb", "0"], "'0' is not a number above 0"),
        ([*MODEL, "--backend", "mpi"], "invalid choice: 'mpi'"),
        ([*MODEL, "--dtype", "float8_e5m2"], "invalid choice: 'float8_e5m2'"),
        (
            ["--model", f"{HERE}:in_8_bits"],
            "is in torch.float8_e4m3fn, in which nothing is averaged: give --dtype",
        ),
    ],
)
def test_what_can_not_be_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, "one line"
    assert message in output.err


def test_a_users_process():
    """Run the command like a user, in a process without numpy."""
    without_numpy = (
        f"import runpy, sys; sys.modules['numpy'] = None; sys.argv[1:] = ['plan', *{MODEL}]\n"
        "runpy.run_module('gradcomp', run_name='__main__')"
    )
    done = run_python("-c", without_numpy, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "node sends" in done.stdout


def test_an_unknown_command_is_refused(capsys):
    assert "invalid choice: 'plam'" in refusal(capsys, main, ["plam"])


def test_info_is_the_default(capsys):
    main(["info"])
    named = capsys.readouterr().out
    main([])
    assert capsys.readouterr().out == named
    assert "Versions" in named


def test_numbers_have_units():
    assert [shown_seconds(each) for each in (0, 2e-6, 0.0123, 0.5, 12)] == [
        "0.0 µs",
        "2.0 µs",
        "12.3 ms",
        "500 ms",
        "12.0 s",
    ]
    assert [shown_bytes(each) for each in (0, 999, 1000, -25e6, 2.64e9, 1.5e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "-25.00 MB",
        "2.64 GB",
        "1.50 TB",
    ]
