"""Test `python -m gradcomp report`: the page's text, its layout, and the refused files."""

import math
import re
import xml.dom.minidom
from html.parser import HTMLParser

import pytest

from gradcomp.__main__ import main
from gradcomp.compress.recording import file as recording_file
from gradcomp.recordings.run import runs_of
from tests.programs import run_module

OPTIONS = {"matrix_approximation_rank": 4, "factor_dtype": "torch.int8"}
START = 4


def row(rank, step, bucket, **changes):
    """Return a row in a recorder's format; bucket 1 is twice as large as bucket 0."""
    is_compressed, gradient_bytes = step >= START, 4_000 * (bucket + 1)
    error = 0.25 * (bucket + 1)
    row = {
        "step": step,
        "bucket": bucket,
        "rank": rank,
        "compressed": is_compressed,
        "numel": gradient_bytes // 4,
        "gradient_bytes": gradient_bytes,
        "sent_bytes": gradient_bytes // 10 if is_compressed else gradient_bytes,
        "rate": 10.0 if is_compressed else 1.0,
        "time_ms": 1.0 + bucket + rank if is_compressed else None,
        "gradient_norm": 2.0 + rank if is_compressed else None,
        "average_norm": 1.0 if is_compressed else None,
        "error_norm": None,
        "relative_error": error if is_compressed else 0.0,
        "energy_kept": 1 - error**2 if is_compressed else 1.0,
        "mean_norm": 1.0 if is_compressed else None,
    }
    return row | changes


def recording(
    path, rank=0, steps=range(10), changes=None, algorithm="PowerSGD", options=OPTIONS, world_size=2
):
    """Write a recording. changes(step, bucket): entries that replace a row's."""
    rows = [
        row(rank, step, bucket, **(changes(step, bucket) if changes else {}))
        for step in steps
        for bucket in (0, 1)
    ]
    recording_file.append(path, recording_file.header(algorithm, options, rank, world_size), rows)
    return path


class Page(HTMLParser):
    """Collects a page's table, the titles of its pictures, and all tags with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.table, self.titles, self.cells = [], [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "line", "polyline", "polygon", "circle", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag
        if tag == "tr":
            name, value = self.cells
            self.table[name] = value
            self.cells = []

    def handle_data(self, data):
        if self.open and self.open[-1] in ("th", "td"):
            self.cells.append(data)
        if self.open and self.open[-1] == "figcaption":
            self.titles.append(data)


def report(tmp_path, *files):
    out = tmp_path / "page.html"
    main(["report", *map(str, files), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    return Page(text), text


def test_the_table_is_arithmetic_on_the_rows(tmp_path, capsys):
    files = [recording(tmp_path / f"rank{rank}.jsonl", rank) for rank in (0, 1)]
    page, text = report(tmp_path, *files)
    assert "page.html: 10 steps of 1 run(s)" in capsys.readouterr().out
    error = math.hypot(0.25, 0.5) / math.hypot(1, 1)
    assert page.table == {
        "Options": "matrix_approximation_rank = 4, factor_dtype = torch.int8",
        "World size": "2",
        "Ranks recorded": "0, 1",
        "Steps recorded": "10, from 0 to 9; 4 of them without compression",
        "Buckets": "2",
        "Compression rate of the compressed steps": "10.00",
        # 6 compressed steps of 12,000 bytes save nine tenths; ranks aren't added up.
        "Bytes saved in the recorded steps, per rank": "64.80 kB of 120.00 kB",
        "Mean relative error of the compressed steps": f"{error:.4f}",
        "Mean energy kept": f"{1 - error**2:.4f}",
        # On the slowest rank, buckets take 2 and 3 ms.
        "Median time of a bucket": "2.5 ms",
    }
    assert page.titles == [
        "Compression rate",
        "Bytes per rank, summed over the recorded steps",
        "Relative error of the average",
        "Energy kept",
        "Time of a bucket, ms",
    ]
    assert "sent: 55.20 kB in step 9, without compression: 120.00 kB in step 9" in text


def test_the_page_is_whole_and_needs_nothing_else(tmp_path):
    page, text = report(tmp_path, recording(tmp_path / "a<b>&.jsonl", options={"name": "<script>"}))
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not [each for _, attributes in page.tags for each in attributes if each in ("src", "href")]
    assert not re.search(r"url\(|@import|https?:", text)
    assert "a&lt;b&gt;&amp;.jsonl" in text
    # The page fits a telephone's width, and has a dark style.
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "minmax(min(100%," in text
    assert "overflow-wrap: anywhere" in text


def points_of(text, index=0):
    """Return the points of the page's line with this number."""
    return [
        tuple(map(float, each.split(",")))
        for each in re.findall(r'<polyline class="line[^>]*points="([^"]*)"', text)[index].split()
    ]


def test_pictures_show_the_rows(tmp_path):
    _, text = report(tmp_path, recording(tmp_path / "one.jsonl"))
    rate = points_of(text)
    assert len(rate) == 10
    xs, ys = zip(*rate, strict=True)
    assert list(xs) == sorted(xs)
    assert len(set(ys[:START])) == len(set(ys[START:])) == 1
    assert ys[START] < ys[0], "up is more"
    sent, without = points_of(text, 1), points_of(text, 2)
    assert sent[START - 1] == without[START - 1]
    assert sent[-1][1] > without[-1][1]
    # The relative error's band reaches from bucket 0's 0.25 to bucket 1's 0.5, around their median.
    edge = [
        float(each.split(",")[1]) for each in re.search(r'<polygon[^>]*points="([^"]*)"', text)[1].split()
    ]
    (middle,) = {y for _, y in points_of(text, 3)}
    assert math.isclose(middle, (max(edge) + min(edge)) / 2, abs_tol=0.1)


def test_long_runs_are_thinned_and_keep_their_extremes(tmp_path):
    peak = {"relative_error": 9.0, "energy_kept": -80.0}
    recorded = recording(
        tmp_path / "long.jsonl", steps=range(5000), changes=lambda step, _: peak if step == 3217 else {}
    )
    _, text = report(tmp_path, recorded)
    assert len(text) < 120_000
    assert all(len(points_of(text, index)) <= 240 for index in range(6))
    assert 'text-anchor="end">10</text>' in text, "the axis reaches the peak"


def test_the_svg_of_the_charts_alone(tmp_path):
    svg = tmp_path / "charts.svg"
    files = recording(tmp_path / "one.jsonl")
    main(["report", str(files), "--out", str(tmp_path / "page.html"), "--svg", str(svg)])
    document = xml.dom.minidom.parseString(svg.read_text(encoding="utf-8"))
    assert len(document.getElementsByTagName("polyline")) == 6
    assert len([rect for rect in document.getElementsByTagName("rect") if rect.getAttribute("class")]) == 5


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path):
    wrong = {"relative_error": math.nan, "energy_kept": math.nan, "gradient_norm": math.inf}
    recorded = recording(tmp_path / "odd.jsonl", changes=lambda step, _: wrong if step == 6 else {})
    page, text = report(tmp_path, recorded)
    assert text.count("2 values of inf or NaN are left out.") == 2
    assert "nan" not in text.lower().replace("inf or nan", "")
    assert page.table["Mean energy kept"] == "0.8438"


def test_without_complete_the_page_says_so(tmp_path):
    unknown = {"relative_error": None, "energy_kept": None, "mean_norm": None}
    recorded = recording(tmp_path / "one.jsonl", changes=lambda step, _: unknown if step >= START else {})
    page, _ = report(tmp_path, recorded)
    assert "Recorder.complete() was not called" in page.table["Mean relative error of the compressed steps"]
    assert "Relative error of the average" not in page.titles


def test_one_plain_step_is_a_page_too(tmp_path):
    page, _ = report(tmp_path, recording(tmp_path / "one.jsonl", steps=[0]))
    assert page.table["Compression rate of the compressed steps"] == "no step was compressed"
    assert page.titles == ["Compression rate", "Bytes per rank, summed over the recorded steps"]
    assert "circle" in {tag for tag, _ in page.tags}


def test_runs_with_other_options_have_sections_of_their_own(tmp_path):
    first = recording(tmp_path / "first.jsonl")
    other = recording(tmp_path / "other.jsonl", algorithm="QuantizedCompressor", options={"bits": 4})
    _, text = report(tmp_path, first, other)
    assert re.findall("<h2>(.*?)</h2>", text) == ["PowerSGD", "QuantizedCompressor"]


def test_a_step_that_a_restart_repeats_counts_once(tmp_path):
    path = recording(tmp_path / "one.jsonl")
    recording(path, steps=range(8, 12), changes=lambda *_: {"time_ms": 7.0})
    (run,) = runs_of(recording_file.read(path))
    assert run.steps == list(range(12))
    assert len(run.rows) == 24
    assert [row["time_ms"] for row in run.rows if row["step"] == 8] == [7.0, 7.0]


def broken(tmp_path, text):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


HEADER = (
    '{"format": "gradcomp recording", "version": %s, "algorithm": "A", "options": {}, "rank": 0, '
    '"world_size": 1}\n'
)
BROKEN = {
    "empty": ("", "is empty. Likely cause: Recorder.save was not called"),
    "no JSON": ("hello\n", "line 1 is not JSON: 'hello'. Likely cause: another file"),
    "bytes": (b"\xff\xfe\x00", "it isn't text"),
    "no header": ('{"step": 1}\n', "line 1 is not the header of a recording"),
    "another version": (HEADER % 2, "line 1 has version 2, but this gradcomp reads 1. Likely cause: a newer"),
    "another row": (HEADER % 1 + '{"step": 1}\n', "line 2 is not a row"),
    "a list": (HEADER % 1 + "[1]\n", "line 2 is not a row"),
    "a torn line": (
        HEADER % 1 + '{"step": 1, "bu',
        "line 2 is not JSON: .* the program ended while it wrote",
    ),
    "no rows": (HEADER % 1, "no rows in .*: no step was recorded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_bad_files_are_named(tmp_path, kind, capsys):
    text, message = BROKEN[kind]
    path = broken(tmp_path, text)
    with pytest.raises(SystemExit) as end:
        main(["report", str(path), "--out", str(tmp_path / "page.html")])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert str(path) in said
    assert said.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_row_of_another_type_is_named(tmp_path):
    path = recording(tmp_path / "one.jsonl", steps=[9], changes=lambda *_: {"rate": "fast"})
    with pytest.raises(ValueError, match="line 2: rate is 'fast', but must be a number"):
        recording_file.read(path)
    path.unlink()
    recording(path, steps=[9], changes=lambda *_: {"numel": -1})
    with pytest.raises(ValueError, match="line 2: numel is -1, but must be a whole number of at least 0"):
        recording_file.read(path)


def test_the_program_ends_with_status_2(tmp_path):
    done = run_module("gradcomp", "report", str(tmp_path / "missing.jsonl"))
    assert done.returncode == 2
    assert "missing.jsonl" in done.stdout
    assert "Traceback" not in done.stdout


def test_it_does_not_overwrite_what_it_reads(tmp_path, capsys):
    path = recording(tmp_path / "one.jsonl")
    before = path.read_text()
    for option in ("--out", "--svg"):
        with pytest.raises(SystemExit):
            main(["report", str(path), option, str(path)])
        assert "is one of the files to read" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_missing_file(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "none.jsonl")])
    assert (
        capsys.readouterr().err
        == f"python -m gradcomp report: error: there is no file {tmp_path}/none.jsonl\n"
    )
