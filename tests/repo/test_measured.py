"""The tables and the picture of the docs are those that the report makes of the records."""

import re

import pytest

from benchmarks import report

MADE = report.all_tables()


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: path.name)
def test_no_figure_is_copied_by_hand(path):
    """If this fails after a new run: python -m benchmarks.report"""
    page = path.read_text()
    assert report.rewritten(page, MADE) == page


def test_every_table_is_shown_somewhere():
    pages = "".join(path.read_text() for path in report.PAGES)
    assert set(re.findall(r"<!-- measured: (.+) -->", pages)) == set(MADE)


def test_the_picture_of_the_saving_is_that_of_the_record():
    assert report.PICTURE.read_text() == report.picture(report.record("bench"))
