"""Test `python -m gradcomp plan`: its output, and its refusals, which are one line and status 2."""

import json
import re
import sys

import pytest

from gradcomp.__main__ import main
from gradcomp.plan.command import bits_per_s
from gradcomp.plan.show import seconds, with_prefix
from tests.plan.measured import as_written, as_written_with_nodes
from tests.programs import ROOT, run_python

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


def test_every_ratio_stands_against_16_bits_too(capsys):
    output = plan(capsys, "--ranks", "16")
    header, none = (
        next(each for each in output.splitlines() if each.startswith(s)) for s in ("hook ", "none")
    )
    assert "fewer  than bf16" in header
    assert "× none  × bf16" in header
    assert " 0.5× " in none
    said = " ".join(output.split())
    assert "Use int4: a step is 7.2 times as fast" in said
    assert "It is 3.6 times as fast as with 16 bits (bf16)." in said
    assert "Against 16 bits it would be 24 times as fast, with 42 times fewer bytes." in said
    without_bf16 = plan(capsys, "--ranks", "16", "--hook", "int4")
    assert "× bf16" in without_bf16, "it is compared with, even if it isn't shown"
    assert "3.6 times as fast as with 16 bits" in " ".join(without_bf16.split())


def test_16_bits_that_were_not_measured_are_left_out(capsys, file):
    measured = as_written()
    measured["hooks"] = [hook for hook in measured["hooks"] if hook["name"] != "bf16"]
    file.write_text(json.dumps(measured))
    output = plan(capsys, "--from", str(file))
    assert "bf16" not in output
    assert "16 bits" not in output
    assert json.loads(plan(capsys, "--from", str(file), "--json"))["hooks"][0]["times_16_bits"] is None


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
    assert "link     1 Gbit/s per rank, 100 µs per round trip" in output
    header = next(line for line in output.splitlines() if line.startswith("hook "))
    assert "measured" in header
    row = next(line for line in output.splitlines() if line.startswith("int4 "))
    assert "500 ms" in row
    assert not any(line.startswith("int8 ") for line in output.splitlines()), "it wasn't timed"


def test_a_link_with_a_delay(capsys, file):
    """From 5 ms on, sums on gloo are exchanged: here every rank sends its factors to three others at once."""

    def sent(*arguments):
        output = plan(capsys, *arguments, "--hook", "powersgd:1", "--json")
        return json.loads(output)["hooks"][1]["sent_bytes"]

    on_cpus = ["--model", "resnet50", "--device", "cpu", "--ranks", "4", "--latency-us"]
    assert sent(*on_cpus, "52000") == pytest.approx(2 * sent(*on_cpus, "4000"))
    assert "10 Gbit/s per rank, 52.0 ms per round trip" in plan(capsys, *on_cpus, "52000")
    on_gpus = ["--model", "resnet50", "--backend", "gloo", "--ranks", "4", "--latency-us", "52000"]
    assert "52.0 ms per message" in plan(capsys, *on_gpus), "hooks exchange messages of CPU tensors only"
    file.write_text(json.dumps(as_written() | {"round_trip_s": 0.052}))
    assert "52.0 ms per round trip" in plan(capsys, "--from", str(file))


def test_a_plan_for_another_network_than_the_measured_one(capsys, file):
    output = plan(capsys, "--from", str(file), "--bandwidth", "100Gbit", "--ranks", "16")
    assert "link     100 Gbit/s per rank, 100 µs per round trip" in output
    assert "ranks    16 on a CPU" in output
    assert "measured" not in next(line for line in output.splitlines() if line.startswith("hook "))


def documented():
    """Return (command, output) for each plan in docs/plan.md that needs no file of measurements."""
    page = (ROOT / "docs" / "plan.md").read_text()
    blocks = re.findall(r"```\npython -m gradcomp plan ([^\n]*)\n```\n\n```\n(.*?)\n```\n", page, re.DOTALL)
    return [(command, output) for command, output in blocks if "--from" not in command]


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
    assert bits_per_s(text) == pytest.approx(bits)


@pytest.mark.parametrize(("command", "output"), documented(), ids=lambda text: text.split("\n")[0][:40])
def test_the_page_shows_what_is_printed(capsys, command, output):
    assert plan(capsys, *command.split()).rstrip() == output


def test_the_page_shows_a_plan():
    assert len(documented()) == 1


# --- nodes ---

NODES = ["--model", "gpt2-medium", "--ranks", "32", "--ranks-per-node", "8", "--bandwidth", "12.5Gbit"]


def test_nodes_have_a_row_for_either_form(capsys):
    output = plan(capsys, *NODES)
    assert "ranks    32 on H200, nccl, 4 nodes of 8 ranks" in output
    assert "12.5 Gbit/s per network card, 1 network card per node, 10 µs per message" in output
    assert "360 GB/s per rank within a node" in output, "80% of the data sheet's"
    rows = {line.split("  ")[0]: line for line in output.splitlines()}
    assert "node sends" in rows["hook"]
    assert " 1.28 GB " in rows["int4"]
    assert " 276 MB " in rows["int4 by nodes"]
    assert "bf16 by nodes" not in rows
    assert "powersgd:4:int8 by nodes" in rows
    said = " ".join(output.split())
    assert "Use int4 by nodes: a step is 8.9 times as fast;" in said
    assert "It is 4.5 times as fast as with 16 bits (bf16)" in said
    assert "Its state: QuantizationState(bits=4, ranks_per_node=8)." in said


def test_either_form_in_json(capsys):
    found = json.loads(plan(capsys, *NODES, "--hook", "int4,powersgd:4:int8", "--json"))
    assert found["nodes"] == {"ranks": 8, "within_bytes_per_s": 360e9, "cards": 1}
    hooks = {hook["hook"]: hook for hook in found["hooks"]}
    assert list(hooks) == [
        "none",
        "int4",
        "int4 by nodes",
        "powersgd:4:int8",
        "powersgd:4:int8 by nodes",
    ]
    assert hooks["none"]["state"] is None
    assert hooks["int4"]["state"] == "QuantizationState(bits=4, ranks_per_node=1)"
    assert hooks["powersgd:4:int8 by nodes"]["state"] == (
        "PowerSGDState(None, matrix_approximation_rank=4, factor_dtype=torch.int8, "
        "uncompressed_dtype=torch.bfloat16, ranks_per_node=8)"
    )
    assert hooks["none"]["times_16_bits"] == pytest.approx(1 / 1.96, rel=0.01)
    assert found["recommendation"]["hook"] == "int4 by nodes"


def test_the_bytes_of_choosing_are_these(capsys):
    page = (ROOT / "docs" / "choosing.md").read_text()
    printed = {row.split("  ")[0]: row.split() for row in plan(capsys, *NODES).splitlines()}
    for name, hook in (
        ("no compression", "none"),
        ("16 bits", "bf16"),
        ("4 bits, flat", "int4"),
        ("4 bits, by nodes", "int4 by nodes"),
        ("PowerSGD r = 16, int8 factors, flat", "powersgd:16:int8"),
        ("PowerSGD r = 16, int8 factors, by nodes", "powersgd:16:int8 by nodes"),
    ):
        number, unit, *ratios = printed[hook][len(hook.split()) :][:4]
        assert f"| {name} | {number} {unit} | {' | '.join(ratios)} |" in page


def test_one_rank_per_node_changes_nothing(capsys):
    without = plan(capsys, *QUICK[1:])
    assert plan(capsys, *QUICK[1:], "--ranks-per-node", "1", "--cards-per-node", "1") == without
    assert "by nodes" not in without
    found = json.loads(plan(capsys, *QUICK[1:], "--json"))
    assert found["nodes"] is None
    assert all(hook["leaving_bytes"] == hook["sent_bytes"] for hook in found["hooks"])


def test_one_node_has_no_form_by_nodes(capsys):
    output = plan(capsys, *QUICK[1:], "--ranks", "8", "--ranks-per-node", "8")
    assert "1 node of 8 ranks" in output
    assert "by nodes" not in output
    assert "sent/step" in output
    assert "Don't compress" in output


def test_links_within_and_cards_are_as_given(capsys):
    output = plan(capsys, *NODES, "--bandwidth-within", "25GB/s", "--cards-per-node", "8")
    assert "25 GB/s per rank within a node" in output
    assert "12.5 Gbit/s per network card, 8 network cards per node" in output
    in_bits = plan(capsys, *NODES, "--bandwidth-within", "200Gbit", "--cards-per-node", "8")
    assert in_bits == output
    assert "25.6 GB/s per rank within a node" in plan(capsys, *NODES, "--device", "L40S")


def test_nodes_of_measured_ranks(capsys, file):
    arguments = ["--from", str(file), "--ranks", "8", "--ranks-per-node", "2"]
    output = plan(capsys, *arguments, "--bandwidth", "1Gbit", "--bandwidth-within", "5Gbit")
    assert "ranks    8 on a CPU, gloo, 4 nodes of 2 ranks" in output
    assert "int4 by nodes" in output
    assert "give --bandwidth-within" in refused(capsys, *arguments, "--bandwidth", "1Gbit")
    said = refused(capsys, *arguments, "--bandwidth-within", "5Gbit")
    assert "--ranks-per-node needs --bandwidth: " in said
    assert "measured without nodes, so it has the rate of a rank, not of a network card" in said


def row_of(output, hook):
    """Return the cells of a hook's row, by column."""
    header, row = (
        next(line for line in output.splitlines() if line.startswith(f"{name}  ")) for name in ("hook", hook)
    )
    return dict(zip(*(re.split(r"  +", each) for each in (header, row)), strict=True))


def test_measured_nodes_need_no_bandwidth(capsys, tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(as_written_with_nodes()))
    output = plan(capsys, "--from", str(file))
    assert "ranks    4 on a CPU, gloo, 2 nodes of 2 ranks" in output
    assert "1 Gbit/s per network card, 1 network card per node" in output
    assert "1 GB/s per rank within a node" in output
    assert row_of(output, "int4")["measured"] == "500 ms"
    assert row_of(output, "int4 by nodes")["measured"] == "300 ms"
    # As many nodes of other sizes, on the measured links.
    for ranks, per_node in ((8, 4), (4, 1)):
        other = plan(capsys, "--from", str(file), "--ranks", str(ranks), "--ranks-per-node", str(per_node))
        assert "1 Gbit/s per" in other
        assert "measured:" not in other
    slower_within = plan(capsys, "--from", str(file), "--bandwidth-within", "100Mbit")
    assert "measured:" not in slower_within
    assert "12.5 MB/s per rank within a node" in slower_within
    with_cards = ["--from", str(file), "--cards-per-node", "2"]
    assert "2 network cards per node" in plan(capsys, *with_cards, "--bandwidth", "1Gbit")
    assert "--cards-per-node needs --bandwidth, which is then of each card" in refused(capsys, *with_cards)


def test_a_map_of_nodes_has_whole_nodes(capsys, tmp_path):
    output = plan(capsys, *QUICK[1:], "--ranks-per-node", "6", "--map")
    assert "nccl, nodes of 6 ranks." in output
    assert "10 nodes of 6 ranks" in plan(capsys, *QUICK[1:], "--ranks-per-node", "6")
    assert " 6 ranks  " in output
    assert "2,046 ranks" in output
    assert "int4 by nodes" in output
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    plan(capsys, *QUICK[1:], "--ranks-per-node", "6", "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks-per-node", "0"], "'0' is not a whole number of at least 1"),
        (
            ["--ranks", "30", "--ranks-per-node", "8"],
            "--ranks is 30; it must be a multiple of --ranks-per-node",
        ),
        (["--ranks", "4", "--ranks-per-node", "8"], "--ranks is 4; it must be a multiple"),
        (["--ranks-per-node", "8", "--cards-per-node", "3"], "a node has 3 network cards for 8 ranks"),
        (["--cards-per-node", "2"], "a node has 2 network cards for 1 ranks"),
        (["--bandwidth-within", "10Gbit"], "--bandwidth-within needs --ranks-per-node of at least 2"),
        (["--ranks-per-node", "8", "--bandwidth-within", "10G"], "'10G' is not a bandwidth"),
        (
            ["--device", "cpu", "--ranks-per-node", "2"],
            "nothing is known of gloo's links within a node of cpu: give --bandwidth-within",
        ),
        (["--backend", "gloo", "--ranks-per-node", "2"], "gloo's links within a node of H200"),
    ],
)
def test_nodes_that_can_not_be_are_refused(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


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
    """Run the command like a user, in a process without numpy."""
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
