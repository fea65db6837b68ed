"""Test `python -m gradcomp report`: the printed numbers, and the refused files."""

import math
import re

import pytest

from gradcomp.__main__ import main
from gradcomp.compress.recording import file as recording_file
from gradcomp.report import MAX_LINES
from tests.programs import run_module

OPTIONS = {"matrix_approximation_rank": 4, "factor_dtype": "torch.int8"}
START = 4


def row(step, bucket, **changes):
    """Return a row in a recorder's format; bucket 1 is twice as large as bucket 0."""
    is_compressed, gradient_bytes = step >= START, 4_000 * (bucket + 1)
    error = 0.25 * (bucket + 1)
    row = {
        "step": step,
        "bucket": bucket,
        "rank": 0,
        "compressed": is_compressed,
        "numel": gradient_bytes // 4,
        "gradient_bytes": gradient_bytes,
        "sent_bytes": gradient_bytes // 10 if is_compressed else gradient_bytes,
        "rate": 10.0 if is_compressed else 1.0,
        "time_ms": 1.0 + bucket if is_compressed else None,
        "gradient_norm": 2.0 if is_compressed else None,
        "average_norm": 1.0 if is_compressed else None,
        "error_norm": None,
        "relative_error": error if is_compressed else 0.0,
        "energy_kept": 1 - error**2 if is_compressed else 1.0,
        "mean_norm": 1.0 if is_compressed else None,
    }
    return row | changes


def recording(
    path, steps=range(10), changes=None, algorithm="PowerSGD", options=OPTIONS, name="one", **header
):
    """Write a recording. changes(step, bucket): entries that replace a row's. name: the recorder's."""
    entries = {"recorder": name, "algorithm": algorithm, "options": options, "rank": 0, "world_size": 2}
    first = recording_file.Header(**{**entries, "is_resumed": False, **header})
    rows = [
        row(step, bucket, **(changes(step, bucket) if changes else {})) for step in steps for bucket in (0, 1)
    ]
    recording_file.append(path, [first, *rows])
    return path


def report(capsys, *files):
    """Return what the command prints: lines of (name, value), and the table's rows of cells."""
    main(["report", *map(str, files)])
    text = capsys.readouterr().out
    totals, _, table = text.partition("\n\n")
    named = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in totals.splitlines()[1:])
    return text, named, [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]


def test_totals_are_arithmetic_on_the_rows(tmp_path, capsys):
    text, totals, _ = report(capsys, recording(tmp_path / "one.jsonl"))
    error = math.hypot(0.25, 0.5) / math.hypot(1, 1)
    assert text.startswith("PowerSGD, rank 0 of 2\n")
    assert totals == {
        "options": "matrix_approximation_rank = 4, factor_dtype = torch.int8",
        "steps": "10, from 0 to 9; 4 of them without compression",
        "buckets": "2",
        # 4 plain steps of 12,000 bytes, and 6 steps of a tenth.
        "bytes sent": "55.20 kB of 120.00 kB",
        "compression rate": "10.00",
        "relative error": f"{error:.4f}",
        "energy kept": f"{1 - error**2:.4f}",
        "time of a bucket": "1.5 ms",
    }


def test_a_line_for_every_step_of_a_short_run(tmp_path, capsys):
    _, _, table = report(capsys, recording(tmp_path / "one.jsonl"))
    assert table[0] == ["steps", "rate", "relative error", "energy kept", "time ms"]
    assert [cells[0] for cells in table[1:]] == [str(step) for step in range(10)]
    assert table[START] == [str(START - 1), "1", "0", "1", "–"]
    assert table[START + 1] == [str(START), "10", "0.3953", "0.8438", "1.5"]


def test_a_long_run_has_medians_of_intervals(tmp_path, capsys):
    recorded = recording(tmp_path / "long.jsonl", range(4, 99), lambda step, _: {"time_ms": float(step)})
    _, _, table = report(capsys, recorded)
    assert len(table) == 1 + MAX_LINES
    assert (table[1][0], table[1][4]) == ("4 to 13", "8.5")
    assert (table[-1][0], table[-1][4]) == ("94 to 98", "96")


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path, capsys):
    wrong = {"relative_error": math.nan, "energy_kept": math.nan, "gradient_norm": math.inf}
    recorded = recording(tmp_path / "odd.jsonl", changes=lambda step, _: wrong if step == 6 else {})
    _, totals, table = report(capsys, recorded)
    assert totals["energy kept"] == "0.8438; 1 steps of inf or NaN are left out"
    assert table[7] == ["6", "10", "–", "–", "1.5"]


def test_without_complete_the_report_says_so(tmp_path, capsys):
    unknown = {"relative_error": None, "energy_kept": None, "mean_norm": None}
    recorded = recording(tmp_path / "one.jsonl", changes=lambda step, _: unknown if step >= START else {})
    _, totals, _ = report(capsys, recorded)
    assert "Recorder.complete() was not called" in totals["relative error"]


def test_a_run_that_has_not_compressed_yet(tmp_path, capsys):
    _, totals, table = report(capsys, recording(tmp_path / "one.jsonl", steps=[0]))
    assert "compression rate" not in totals
    assert table[1:] == [["0", "1", "0", "1", "–"]]


def test_runs_with_other_options_are_apart(tmp_path, capsys):
    first = recording(tmp_path / "first.jsonl")
    other = recording(tmp_path / "other.jsonl", algorithm="QuantizedCompressor", options={"bits": 4})
    text, _, _ = report(capsys, first, other)
    assert re.findall(r"^(\w+), rank", text, re.MULTILINE) == ["PowerSGD", "QuantizedCompressor"]


@pytest.mark.parametrize("header", [{"name": "two", "is_resumed": True}, {}], ids=["restart", "load"])
def test_a_step_that_a_restart_repeats_counts_once(tmp_path, capsys, header):
    path = recording(tmp_path / "one.jsonl")
    recording(path, steps=range(8, 12), changes=lambda *_: {"time_ms": 7.0}, **header)
    _, totals, table = report(capsys, path)
    assert totals["steps"].startswith("12, from 0 to 11;")
    assert [cells[4] for cells in table[-2:]] == ["7", "7"]


HEADER = (
    '{"format": "gradcomp recording", "recorder": "one", "algorithm": "A", "options": {}, "rank": 0, '
    '"world_size": 1, "is_resumed": false}\n'
)
ANOTHER_FILE = "is not what Recorder.save writes: .*Likely cause: another file"


def headings(capsys, *files):
    """Return each run's heading, with its steps."""
    text, _, _ = report(capsys, *files)
    return [
        (run.splitlines()[0], re.search(r"steps +([^;]*);", run)[1]) for run in re.split(r"\n\n(?=\w)", text)
    ]


SHORT = range(4)
LIKE = "PowerSGD, rank 0 of 2"


def test_recordings_in_one_file_are_told_apart(tmp_path, capsys):
    """Two models that save in turns, a run with other options, and one on more ranks."""
    path = tmp_path / "all.jsonl"
    other = OPTIONS | {"matrix_approximation_rank": 8}
    for steps, name, more in (
        (range(4), "generator", {}),
        (range(4), "discriminator", {}),
        (range(4, 6), "generator", {}),
        (range(4, 9), "discriminator", {}),
        (range(9, 11), "discriminator", {"options": other}),
        (range(11, 14), "discriminator", {"rank": 1, "world_size": 3}),
    ):
        recording(path, steps, name=name, **more)
    assert headings(capsys, path) == [
        (f"{LIKE}, matrix_approximation_rank = 4, run 1 of the file", "6, from 0 to 5"),
        (f"{LIKE}, matrix_approximation_rank = 4, run 2 of the file", "9, from 0 to 8"),
        (f"{LIKE}, matrix_approximation_rank = 8", "2, from 9 to 10"),
        ("PowerSGD, rank 1 of 3", "3, from 11 to 13"),
    ]


def test_equal_runs_in_several_files_have_the_files_names(tmp_path, capsys):
    files = [recording(tmp_path / f"{name}.jsonl", SHORT, name=name) for name in ("seed0", "seed1")]
    recording(files[1], SHORT, name="seed2")
    steps = "4, from 0 to 3"
    assert headings(capsys, *files) == [
        (f"{LIKE}, {files[0]}", steps),
        (f"{LIKE}, {files[1]}, run 1 of the file", steps),
        (f"{LIKE}, {files[1]}, run 2 of the file", steps),
    ]


@pytest.mark.parametrize(
    ("is_resumed", "changes", "num_runs"),
    [
        (True, None, 1),
        (False, None, 2),  # the same program, begun later
        (True, lambda *_: {"numel": 7}, 2),  # another model
    ],
)
def test_only_a_resumed_run_of_equal_buckets_goes_on(tmp_path, capsys, is_resumed, changes, num_runs):
    path = recording(tmp_path / "one.jsonl", SHORT)
    recording(path, range(4, 6), changes, name="later", is_resumed=is_resumed)
    assert len(headings(capsys, path)) == num_runs


def test_a_resumed_run_that_may_go_on_from_two_is_apart(tmp_path, capsys):
    path = tmp_path / "two.jsonl"
    for name in ("one", "other"):
        recording(path, SHORT, name=name)
    recording(path, range(4, 6), name="later", is_resumed=True)
    assert [steps for _, steps in headings(capsys, path)] == ["4, from 0 to 3"] * 2 + ["2, from 4 to 5"]


def test_another_recording_after_a_torn_line_keeps_its_header(tmp_path):
    path = recording(tmp_path / "one.jsonl", SHORT)
    path.write_text(path.read_text()[:-40])
    recording(path, SHORT, name="later")
    with pytest.raises(ValueError, match=r"line 9 .* the program ended while it wrote; remove the line"):
        recording_file.read(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8] + lines[9:]))
    assert [len(each.rows) for each in recording_file.read(path)] == [7, 8]


BROKEN = {
    "empty": ("", "is empty. Likely cause: Recorder.save was not called"),
    "no JSON": ("hello\n", f"line 1 {ANOTHER_FILE}"),
    "bytes": (b"\xff\xfe\x00", f"line 1 {ANOTHER_FILE}"),
    "no header": ('{"step": 1}\n', f"line 1 {ANOTHER_FILE}"),
    "another format": (HEADER.replace("recording", "plan"), f"line 1 {ANOTHER_FILE}"),
    "another row": (HEADER + '{"step": 1}\n', f"line 2 {ANOTHER_FILE}"),
    "a list": (HEADER + "[1]\n", f"line 2 {ANOTHER_FILE}"),
    "a torn line": (HEADER + '{"step": 1, "bu', "line 2 is not .* the program ended while it wrote"),
    "no rows": (HEADER, "no rows in .*: no step was recorded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_bad_files_are_named(tmp_path, kind, capsys):
    text, message = BROKEN[kind]
    path = tmp_path / "broken.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as end:
        main(["report", str(path)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert str(path) in said
    assert said.count("\n") == 1


def test_a_row_of_another_type_is_named(tmp_path):
    path = recording(tmp_path / "one.jsonl", steps=[9], changes=lambda *_: {"rate": "fast"})
    with pytest.raises(ValueError, match=r"line 2 is not what Recorder\.save writes"):
        recording_file.read(path)


def test_the_program_ends_with_status_2(tmp_path):
    done = run_module("gradcomp", "report", str(tmp_path / "missing.jsonl"))
    assert done.returncode == 2
    assert "there is no file" in done.stdout
    assert "missing.jsonl" in done.stdout
    assert "Traceback" not in done.stdout
