"""Fixtures of the tests of messages."""

import pytest

from jagcodec.wire import compress, elide


@pytest.fixture
def eager(monkeypatch):
    """`elide` sends what it finds once, and every frame is compressed, whether it pays or not."""
    monkeypatch.setattr(elide, "FEWEST", 1)
    monkeypatch.setattr(elide, "SLACK", -(1 << 20))
    monkeypatch.setattr(compress, "_SMALLEST", 1)
    monkeypatch.setattr(compress, "_is_smaller", lambda *args: True)
    monkeypatch.setattr(compress, "is_accepted", lambda *args: True)
