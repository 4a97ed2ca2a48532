"""What readers do with a message, and how much of it: for messages that grow (see `grown.py`)."""

import sys
from collections.abc import Callable
from typing import Any

from jagcodec import concat_rows, decode, materialize, open_wire
from jagcodec.errors import JagcodecError
from jagcodec.wire import header, schema
from tests.wire.forge import blob


def _opened(frames: list[bytes]) -> Any:
    batch = open_wire(frames)
    _ = batch.schema
    for name in batch.fields:
        batch.row_lengths(name)
        batch.leaf(name)
    return batch.to_tensordict()


def _chosen(frames: list[bytes]) -> Any:
    batch = open_wire(frames)
    rows = len(batch)
    batch.rows(slice(0, max(rows - 1, 0))).to_tensordict()
    names = batch.fields[::2]
    return batch.select(names).rows([*range(0, rows, 2), *range(rows)][:rows]).to_tensordict()


def _sent_on(frames: list[bytes]) -> Any:
    batch = open_wire(frames)
    return batch.rows(slice(0, max(len(batch) - 1, 0))).to_frames()


def _fetched(frames: list[bytes]) -> Any:
    whole = blob(frames)
    batch = open_wire(lambda offset, size: whole[offset : offset + size])
    rows = len(batch)
    batch.to_tensordict()
    return batch.rows([*range(0, rows, 2)]).to_tensordict()


def _padded(frames: list[bytes]) -> Any:
    return materialize(open_wire(frames))


def _joined(frames: list[bytes]) -> Any:
    return concat_rows([open_wire(frames), open_wire(frames)]).to_tensordict()


def _several(frames: list[bytes]) -> Any:
    return materialize([frames, frames])


ANY_READERS: dict[str, Callable[[list[bytes]], Any]] = {"decode": decode}
"""Of any message."""

BATCH_READERS: dict[str, Callable[[list[bytes]], Any]] = {
    "open_wire": _opened,
    "rows": _chosen,
    "to_frames": _sent_on,
    "a callable": _fetched,
    "materialize": _padded,
    "concat_rows": _joined,
    "several": _several,
}
"""Of a batch. They read every column, all rows and some."""


def readers_of(batch: bool) -> dict[str, Callable[[list[bytes]], Any]]:
    return {**ANY_READERS, **BATCH_READERS} if batch else ANY_READERS


def outcome(read: Callable[[list[bytes]], Any], frames: list[bytes]) -> Any:
    """What was read, or the library's own error; any other is raised."""
    try:
        return read(frames)
    except JagcodecError as error:
        return error


def forget() -> None:
    """Empty the tables of known schemas, so that the next message is read from scratch."""
    schema._known.clear()
    header._known.clear()


def operations(call: Callable[[], Any]) -> int:
    """How many bytecode instructions a call takes, in Python code of any package."""
    count = 0

    def local(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def start(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    before = sys.gettrace()
    sys.settrace(start)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
