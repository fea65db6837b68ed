"""Test that tables and numbers in pages are those of the recorded rows, and how they are renewed."""

import pytest

from benchmarks import tables
from tests.programs import ROOT


def test_no_page_changes():
    for page, text in tables.texts():
        before = (ROOT / page).read_text()
        assert tables.updated(before, text) == before, page


def test_no_packet_was_dropped():
    assert not [row for row in tables.ROWS if row.get("dropped_packets") or "failed" in row]


def test_a_text_takes_the_place_of_other_rows():
    page = "Title\n\n| | 2 hosts |\n|---|---|\n| int4 | 1.0×, 3 |\n\nIt takes 1,000.5 ms\nor 3."
    table = "| | 4 hosts |\n|---|---|\n| int4 | aborts |"
    assert tables.updated(page, table) == page.replace("2 hosts", "4 hosts").replace("1.0×, 3", "aborts")
    assert tables.updated(page, "It takes 7 ms or 3.25") == page.replace("1,000.5 ms\nor 3", "7 ms or 3.25")
    assert tables.updated(page, "takes 1,000.5 ms or 3") == page
    for text, places in (("| int8 | 3 |", 0), ("8", 6)):
        with pytest.raises(ValueError, match=f"the page has {places} places for a text"):
            tables.updated(page, text)
