"""The command `python -m gradcomp report`: one HTML page about what recorders have written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradcomp.compress.recording.file import read
from gradcomp.plan.command import OneLineParser

from .page import page, picture
from .run import runs_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        prog="python -m gradcomp report",
        description="Write an HTML page, with tables and pictures, about the files that Recorder.save wrote. "
        "Files of several ranks of a run are put together.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines of Recorder.save")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="PAGE", help="default: %(default)s"
    )
    text = "write the first run's charts to this file, too, without the page around them"
    parser.add_argument("--svg", type=Path, metavar="PICTURE", help=text)
    options = parser.parse_args(arguments)
    for name, written in (("--out", options.out), ("--svg", options.svg)):
        if written is not None and any(written.absolute() == file.absolute() for file in options.files):
            parser.error(f"argument {name}: {written} is one of the files to read")
    try:
        recordings = [recording for file in options.files for recording in read(file)]
        runs = runs_of(recordings)
        if not runs:
            names = ", ".join(map(str, options.files))
            parser.error(f"no rows in {names}. Likely cause: no step was recorded before Recorder.save")
        options.out.write_text(page(runs, [file.name for file in options.files]), encoding="utf-8")
        if options.svg is not None:
            options.svg.write_text(picture(runs[0]), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.out}: {sum(len(run.steps) for run in runs)} steps of {len(runs)} run(s)")
