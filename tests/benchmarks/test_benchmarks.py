"""Test the benchmarks' models, harness and records without a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import models, outcomes
from benchmarks.clock import Timing
from benchmarks.harness import Case, Setup, WrongResultError, check, elementwise_error, rounding_error
from benchmarks.records import RESULTS, read
from gradcomp import ops
from gradcomp.cpu.quantize import AdderInCodes, Decoder, Encoder
from tests.programs import run_module

CPU = torch.device("cpu")


# --- the models ---


@pytest.mark.parametrize(
    ("model", "num_parameters", "num_elements"),
    [("resnet50", 161, 25_557_032), ("bert-large", 391, 335_141_888), ("gpt2-medium", 292, 354_823_168)],
)
def test_models_have_the_known_sizes(model, num_parameters, num_elements):
    shapes = list(models.MODELS[model]())
    assert len(shapes) == num_parameters
    assert models.num_elements(shapes) == num_elements


# --- the harness ---


def case_of(provider, *, outputs=(), max_error=0.0) -> Case:
    """Make a case with the right result 0, 1, 2, 3."""

    def build() -> Setup:
        right = torch.arange(4.0)
        providers = {"torch": lambda: [right.clone()], "gradcomp": provider}
        return Setup(providers, lambda: [right.double()], outputs=outputs)

    return Case("count", "to 4", "float32", 16, max_error, build, baseline="torch")


out = torch.arange(4.0)  # right from the start, so only the NaN fill shows that it was not written


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case_of(lambda: [torch.arange(4.0) + 1]), id="wrong value"),
        pytest.param(case_of(lambda: [torch.full((4,), math.nan)]), id="nan"),
        pytest.param(case_of(lambda: [torch.arange(4.0).view(2, 2)]), id="wrong shape"),
        pytest.param(case_of(lambda: [out], outputs=[out]), id="unwritten output"),
    ],
)
def test_check_refuses(case):
    with pytest.raises(WrongResultError):
        check(case, case.build())


def test_check_accepts_what_is_right():
    case = case_of(lambda: [torch.arange(4.0)])
    restored = []
    assert check(case, replace(case.build(), restore=restored.append)) == {"torch": 0.0, "gradcomp": 0.0}
    assert restored == ["torch", "gradcomp"]


def test_elementwise_error_is_absolute_below_the_smallest_normal_number():
    exact = torch.tensor([1.0, 1e-7, 0.0], dtype=torch.float64)
    assert elementwise_error(exact.half(), exact) <= rounding_error(torch.float16)
    assert elementwise_error(exact.half().float(), exact) > 0.1
    assert elementwise_error(exact.half().float(), exact, torch.float16) < 1e-3


@pytest.mark.parametrize("broken", [lambda: [torch.zeros(4)], lambda: 1 / 0])
def test_a_wrong_result_is_not_recorded_and_the_others_are(broken, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    right = case_of(lambda: [torch.arange(4.0)])
    cases = [replace(case_of(broken), name="miscount"), right]
    arguments = ["--quick", "--device", "cpu", "--record", "--results", str(tmp_path)]
    noted = tmp_path / "outcomes"
    assert bench.main([*arguments, "--failed-part", "kernels", "--outcomes", str(noted)], cases) == 1
    assert "FAILED miscount to 4 float32" in capsys.readouterr().out
    found = {name: row["outcome"] for name, row in outcomes.read(noted).items()}
    assert found == {"miscount to 4 float32": "failed", "count to 4 float32": "passed"}
    assert bench.main(arguments, [right]) == 0
    [path] = tmp_path.glob("*.jsonl")
    rows = read(path)
    assert [row["case"] for row in rows] == ["count"] * 6  # appended: two providers and a copy in each run
    assert [row["failed_parts"] for row in rows] == [["kernels"]] * 3 + [[]] * 3


def test_rows_are_written_before_the_next_case_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def interrupted():
        raise KeyboardInterrupt

    cases = [case_of(lambda: [torch.arange(4.0)]), case_of(interrupted)]
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--quick", "--device", "cpu", "--record", "--results", str(tmp_path)], cases)
    [path] = tmp_path.iterdir()
    assert len(path.read_text().splitlines()) == 3


def test_ratios_are_formed_round_by_round():
    # A machine that slows down during the run: the ratio of the medians would be 1.
    ours, baseline = Timing([1.0, 2.0, 4.0, 8.0, 16.0]), Timing([2.0, 4.0, 8.0, 8.0, 3.0])
    assert ours.us.p50 == 4.0
    assert ours.times(baseline).p50 == 2.0
    assert baseline.times(baseline) == (1.0, 1.0, 1.0)


def test_cases_beyond_the_budget_are_skipped_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = case_of(lambda: [torch.arange(4.0)])
    noted = tmp_path / "outcomes"
    arguments = ["--quick", "--device", "cpu", "--budget-s", "-1", "--outcomes", str(noted)]
    assert bench.main(arguments, [case]) == 0
    assert "not reached within -1 s: count to 4 float32" in capsys.readouterr().out
    assert outcomes.read(noted) == {"count to 4 float32": {"outcome": "left"}}


@pytest.mark.parametrize("quick", [False, True])
def test_every_file_of_kernels_is_found_and_its_cases_have_different_names(quick):
    names = [str(case) for case in bench.discover(CPU, quick)]
    assert len(set(names)) == len(names)
    operations = "flatten unflatten compress_cast decompress_cast quantize average dequantize"
    for expected in f"{operations} allreduce_hook quantization_hook powerSGD_hook reducer".split():
        assert any(name.startswith(f"{expected} ") for name in names), expected


def test_each_model_is_flattened_whole_on_a_gpu():
    # Cases are described without allocating anything, so this needs no GPU.
    cases = [case for case in bench.discover(torch.device("cuda"), False) if case.name == "flatten"]
    sizes = {case.label.split(",")[0]: case.num_bytes for case in cases if case.dtype == "float32"}
    assert sizes == {name: 8 * models.num_elements(list(shapes())) for name, shapes in models.MODELS.items()}


def test_what_matters_most_is_timed_first_on_a_gpu():
    names = list(map(str, bench.discover(torch.device("cuda"), False)))
    places = [[name.startswith(start) for name in names].index(True) for start in bench.FIRST]
    assert places == sorted(places)
    assert places[-1] < 30
    families = {name.split()[0] for name in names[: places[-1]]}
    assert families == {name.split()[0] for name in names} - {"allreduce_hook", "fp16_compress_hook"}


def test_the_cases_to_compile_have_every_rank_dtype_and_number_of_bits():
    def kinds(cases):
        after = {"quantize": 1, "powerSGD_hook": 2}  # the size, or the model and its buckets
        found = [case for case in cases if case.name in after]
        return {(case.name, *case.label.split(", ")[after[case.name] :], case.dtype) for case in found}

    cases = bench.discover(torch.device("cuda"), False)
    assert kinds(bench.to_compile(cases)) == kinds(cases)


def quantizing(stage, bits):
    """Return the 1 MiB case of a stage of the quantized all-reduce."""
    [case] = [
        case
        for case in bench.discover(CPU, quick=True)
        if case.name == stage and f"1 MiB, {bits} bits" in case.label
    ]
    return case


def test_the_quantized_stages_move_the_documented_bytes():
    """docs/internals/hooks.md has these bytes per fp32 element, at 4 bits and 8 ranks; scales included."""
    cases = [quantizing(stage, 4) for stage in ("quantize", "average", "dequantize")]
    moved = [case.num_bytes / case.num_elements for case in cases]
    assert [round(each, 1) for each in moved] == [12.5, 1.5, 4.5]
    assert round(sum(moved), 1) == 18.5


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stage", ["quantize", "average", "dequantize"])
def test_a_wrong_quantized_stage_is_found(stage, bits, monkeypatch):
    """An error of a thousandth is found, although rounding to 4 bits loses a tenth."""
    monkeypatch.setattr(ops, "_INTERPRETED", False)  # plain torch, which benchmarks use on CPU
    case = quantizing(stage, bits)
    assert set(check(case, case.build())) == {"gradcomp", "torch"}
    operation = {"quantize": Encoder, "average": AdderInCodes, "dequantize": Decoder}[stage]
    right = operation.__call__

    def wrong(operation, **buffers):
        right(operation, **buffers)
        written = buffers["buffer" if stage == "dequantize" else "kept"]
        written *= 1.001

    setup = case.build()
    monkeypatch.setattr(operation, "__call__", wrong)
    with pytest.raises(WrongResultError):
        check(case, setup)


def test_a_run_records_rows_with_every_field(tmp_path):
    command = ["benchmarks", "--quick", "--filter", "allreduce_hook", "--record"]
    done = run_module(*command, "--results", str(tmp_path), GRADCOMP_COMMIT="0123abc")
    assert done.returncode == 0, done.stdout
    [path] = tmp_path.iterdir()
    rows = read(path)
    assert [row["provider"] for row in rows] == ["gradcomp", "torch", "copy"]
    documented = (RESULTS / "README.md").read_text()
    for row in rows:
        assert row["case"] == "allreduce_hook"
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["num_bytes"] == 2 * 25 * 2**20
        assert math.isclose(row["gb_per_s"], row["num_bytes"] / row["p50_us"] / 1e3)
        assert row["commit"] not in ("", "unknown")
        assert row["torch"] == torch.__version__
        assert row["device"].endswith(", 1 threads")
        assert not [field for field in row if f"`{field}`" not in documented]
        nulls = {field for field, value in row.items() if value is None}
        only_on_cuda = {"compute_capability", "driver", "cuda", "host_us", "host_us_per_bucket"}
        assert nulls <= only_on_cuda | {"bytes_per_element", "floor_us", "times_floor", "error"}
        assert (row["error"] is None) == (row["provider"] == "copy")
    assert all(row["error"] < 1e-6 for row in rows[:2])


def test_a_filter_that_matches_nothing_fails(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert bench.main(["--device", "cpu", "--filter", "no such thing"]) == 1
    assert "flatten resnet50" in capsys.readouterr().out
