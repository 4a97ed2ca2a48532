"""Values that msgpack knows, written at once."""

from types import SimpleNamespace
from typing import Any

from jagcodec.wire import documents, native


def test_rows_that_are_one_object_are_written_once(monkeypatch):
    one, pack = {"a": [1]}, documents.writer().pack
    written: list[Any] = []

    def packed(row):
        written.append(row)
        return pack(row)

    rows = [one, "x", one, {"a": [1]}, one, "x"]
    monkeypatch.setattr(native, "writer", lambda: SimpleNamespace(pack=packed))
    made, same = native.written_at_once(rows, levels=9) or ([], None)
    assert made == list(map(pack, rows))
    assert same == native.first_same(rows) == [0, 1, 0, 3, 0, 5]
    assert [*map(id, written)] == [id(rows[i]) for i in (0, 1, 3, 5)]
    assert native.first_same(rows[1:4]) is None
