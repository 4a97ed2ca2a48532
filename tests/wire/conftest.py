"""Fixtures of the tests of messages."""

import pytest

from jagcodec.wire import elide


def send_whatever_repeats_once(patch):
    """Make `elide` send what it finds once, whether it pays or not."""
    patch.setattr(elide, "FEWEST", 1)
    patch.setattr(elide, "SLACK", -(1 << 20))


@pytest.fixture
def eager(monkeypatch):
    """`elide` sends what it finds once, whether it pays or not."""
    send_whatever_repeats_once(monkeypatch)
