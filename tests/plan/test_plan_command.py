"""`python -m gradcomp plan`: what it prints, and what it refuses with one line and status 2."""

import json
import sys

import pytest

from gradcomp.__main__ import main
from gradcomp.plan.show import seconds, with_prefix
from tests.plan.measured import as_written
from tests.programs import run_python

QUICK = ["plan", "--model", "resnet50", "--hook", "bf16,int4,powersgd:16:int8"]


def plan(capsys, *arguments):
    main(["plan", *arguments])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, "one line"
    return output.err


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(as_written()))
    return path


def test_the_table(capsys):
    output = plan(capsys, "--model", "resnet50", "--ranks", "8", "--bandwidth", "1Gbit", "--device", "L40S")
    assert "PREDICTED" in output.splitlines()[0]
    assert "ranks    8 on L40S, nccl" in output
    assert "link     1 Gbit/s per rank, 10 µs per message" in output
    rows = {line.split()[0]: line for line in output.splitlines() if line}
    for hook in ("none", "bf16", "int8", "int4", "powersgd:1:int8"):
        assert hook in rows
    assert " 1.00 " in rows["none"]
    assert "docs/accuracy.md" in output
    assert "\n\nUse int4: a step is " in output


def test_a_fast_link_needs_no_compression(capsys):
    output = plan(
        capsys, "--ranks", "2", "--bandwidth", "400Gbit", "--backward-ms", "500", "--latency-us", "1"
    )
    assert "\n\nDon't compress: without any communication a step would be only" in output


def test_json_is_the_table(capsys):
    found = json.loads(plan(capsys, *QUICK[1:], "--json"))
    assert found["predicted"] is True
    assert found["world_size"] == 64
    assert found["bits_per_s"] == 10e9
    assert [hook["hook"] for hook in found["hooks"]] == ["none", "bf16", "int4", "powersgd:16:int8"]
    for hook in found["hooks"]:
        assert hook["times_none"] == found["hooks"][0]["step_s"] / hook["step_s"]
        assert hook["step_s"] > found["compute"]["step_s"]
    assert found["recommendation"]["hook"] in {hook["hook"] for hook in found["hooks"]}


def test_compute_is_from_the_device_or_as_given(capsys):
    def compute(*arguments):
        return json.loads(plan(capsys, *QUICK[1:], "--json", *arguments))["compute"]

    usual = compute()
    assert usual["backward_s"] == 2 * usual["forward_s"]
    assert compute("--batch", "128")["forward_s"] == pytest.approx(2 * usual["forward_s"])
    assert compute("--device", "A100")["forward_s"] == pytest.approx(usual["forward_s"] * 989 / 312)
    given = compute("--backward-ms", "70", "--forward-ms", "0", "--optimizer-ms", "5")
    assert (given["forward_s"], given["backward_s"], given["optimizer_s"]) == (0, 0.070, 0.005)


def test_the_map(capsys):
    output = plan(capsys, *QUICK[1:], "--map")
    assert output.startswith("PREDICTED")
    assert output.count("400 Gbit/s") == output.count("50 Mbit/s") == 2, "a map for either assumption"
    assert "10,000 ranks" in output


def test_the_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    plan(capsys, *QUICK[1:], "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    err = refused(capsys, *QUICK[1:], "--picture", str(tmp_path / "map.nonsense"))
    assert "nonsense" in err
    err = refused(capsys, *QUICK[1:], "--picture", str(tmp_path / "absent" / "map.png"))
    assert "No such file" in err


def test_without_matplotlib_the_picture_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "needs matplotlib" in refused(capsys, *QUICK[1:], "--picture", str(tmp_path / "map.png"))
    assert "Use " in plan(capsys, *QUICK[1:])


def test_a_plan_from_measurements(capsys, file):
    output = plan(capsys, "--from", str(file))
    assert "ranks    4 on a CPU, gloo" in output
    assert "link     1 Gbit/s per rank, 100 µs per message" in output
    header = next(line for line in output.splitlines() if line.startswith("hook "))
    assert "measured" in header
    row = next(line for line in output.splitlines() if line.startswith("int4 "))
    assert "500 ms" in row
    assert not any(line.startswith("int8 ") for line in output.splitlines()), "it wasn't timed"


def test_a_plan_for_another_network_than_the_measured_one(capsys, file):
    output = plan(capsys, "--from", str(file), "--bandwidth", "100Gbit", "--ranks", "16")
    assert "link     100 Gbit/s per rank, 100 µs per message" in output
    assert "ranks    16 on a CPU" in output
    assert "measured" not in next(line for line in output.splitlines() if line.startswith("hook "))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet51"], "there is no model 'resnet51'; known are resnet50,"),
        (["--model", "json:absent"], "'absent' of module 'json' is not there"),
        (["--model", "time:time"], "returned float; it must return an nn.Module"),
        (["--model", "tests.plan.test_plan_command:a_model"], "give --backward-ms"),
        (["--device", "TPU"], "invalid choice: 'TPU'"),
        (["--ranks", "0"], "'0' is not a whole number of at least 1"),
        (["--ranks", "two"], "'two' is not a whole number of at least 1"),
        (["--bandwidth", "-1Gbit"], "expected one argument"),
        (["--bandwidth=-1Gbit"], "'-1Gbit' is not a bandwidth; write it as 200Mbit or 10Gbit"),
        (["--bandwidth", "0Gbit"], "'0Gbit' is not a bandwidth"),
        (["--bandwidth", "10"], "'10' is not a bandwidth"),
        (["--latency-us=-1"], "'-1' is not a number of at least 0"),
        (["--latency-us", "nan"], "'nan' is not a number of at least 0"),
        (["--backward-ms", "inf"], "'inf' is not a number of at least 0"),
        (["--bucket-cap-mb", "0"], "'0' is not a number above 0"),
        (["--hook", "int4,int2"], "there is no hook 'int2'"),
        (["--device", "cpu", "--hook", "powersgd:32"], "hook powersgd:32 has not been timed on cpu"),
        (["--from", "/absent.json"], "/absent.json can't be read"),
        (["--from", "/absent.json", "--model", "resnet50"], "--model and --from exclude each other"),
        (["--color"], "unrecognized arguments: --color"),
    ],
)
def test_what_can_not_be_is_refused(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def a_model():
    return [(30, 20)]


def test_a_broken_file_is_refused(capsys, file):
    file.write_text("{")
    assert "isn't JSON" in refused(capsys, "--from", str(file))


def test_a_users_model_with_a_given_time(capsys):
    output = plan(capsys, "--model", "tests.plan.test_plan_command:a_model", "--backward-ms", "10")
    assert "600 parameters" in output
    assert "forward 5.0 ms, backward 10.0 ms" in output


def test_a_users_process():
    """As a user runs it; without numpy."""
    without_numpy = (
        "import runpy, sys; sys.modules['numpy'] = None; sys.argv[1:] = ['plan', '--model', 'resnet50']\n"
        "runpy.run_module('gradcomp', run_name='__main__')"
    )
    done = run_python("-c", without_numpy, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "PREDICTED" in done.stdout


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plam"])
    assert end.value.code == 2
    assert "invalid choice: 'plam'" in capsys.readouterr().err


def test_info_is_the_default(capsys):
    main(["info"])
    named = capsys.readouterr().out
    main([])
    assert capsys.readouterr().out == named
    assert "Versions" in named


def test_numbers_have_units():
    assert [seconds(each) for each in (0, 2e-6, 0.0123, 0.5, 12)] == [
        "0.0 µs",
        "2.0 µs",
        "12.3 ms",
        "500 ms",
        "12.0 s",
    ]
    assert [with_prefix(each, "B") for each in (0, 999, 1000, 25e6, 2.64e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "25 MB",
        "2.64 GB",
    ]
