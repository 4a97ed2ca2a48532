"""The tables of the docs are those that the report makes of the recorded run."""

import json
import re

import pytest

from benchmarks import report

RECORD = json.loads(report.RECORD.read_text())


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: path.name)
def test_no_figure_is_copied_by_hand(path):
    page = path.read_text()
    assert report.rewritten(page, report.tables(RECORD)) == page


def test_every_table_is_shown_somewhere():
    pages = "".join(path.read_text() for path in report.PAGES)
    assert set(re.findall(r"<!-- measured: ([\w-]+) -->", pages)) == set(report.tables(RECORD))


def test_a_page_is_rewritten_between_its_markers_only():
    page = "before\n<!-- measured: bars -->\nold\n<!-- end -->\nafter\n"
    made = report.rewritten(page, {"bars": "new"})
    assert made == "before\n<!-- measured: bars -->\nnew\n<!-- end -->\nafter\n"
    with pytest.raises(KeyError):
        report.rewritten(page, {})
