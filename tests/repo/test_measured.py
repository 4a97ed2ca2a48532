"""The tables and the picture of the docs are those that the report makes of the recorded run."""

import json
import re

import pytest

from benchmarks import bytes_page, pages, report, saving

RECORD = json.loads(report.RECORD.read_text())


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: path.name)
def test_no_figure_is_copied_by_hand(path):
    page = path.read_text()
    assert report.rewritten(page, report.tables(RECORD)) == page


def test_the_picture_of_the_saving_is_that_of_the_record():
    assert report.PICTURE.read_text() == saving.picture(RECORD)


def test_every_table_is_shown_somewhere():
    pages = "".join(path.read_text() for path in report.PAGES)
    assert set(re.findall(r"<!-- measured: ([\w-]+) -->", pages)) == set(report.tables(RECORD))


def test_a_page_is_rewritten_between_its_markers_only():
    page = "before\n<!-- measured: bars -->\nold\n<!-- end -->\nafter\n"
    made = report.rewritten(page, {"bars": "new"})
    assert made == "before\n<!-- measured: bars -->\nnew\n<!-- end -->\nafter\n"
    with pytest.raises(KeyError):
        report.rewritten(page, {})


def test_no_figure_of_the_options_is_copied_by_hand():
    page, made = bytes_page.PAGE.read_text(), bytes_page.tables(pages.read(bytes_page.RECORD))
    assert report.rewritten(page, made) == page
    assert set(re.findall(r"<!-- measured: ([\w-]+) -->", page)) == set(made)


def test_the_option_that_takes_least_depends_on_the_link():
    small = {"bytes": 10**6, "write": 50.0, "decode": 50.0}
    large = {"bytes": 10**7, "write": 1.0, "decode": 1.0}
    # 8 ms of the one and 80 of the other at 1 Gbit/s, and a tenth of that at 10.
    assert bytes_page.milliseconds(small, 1, overlap=False) == 108
    assert bytes_page.milliseconds(large, 1, overlap=False) == 82
    assert bytes_page.milliseconds(small, 1, overlap=True) == 50
    assert bytes_page.milliseconds(large, 10, overlap=True) == 8
