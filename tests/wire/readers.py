"""What readers do with a message, how much of it, and in how much memory."""

import ctypes
import dis
import functools
import gc
import itertools
import re
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jagcodec import WireFormatError, concat_rows, decode, materialize, open_wire
from jagcodec.errors import REASONS, JagcodecError
from jagcodec.memory import blocks
from jagcodec.wire import header, schema
from tests.oracle import described
from tests.wire import spec_reader
from tests.wire.forge import blob

OPTIONS: list[dict[str, Any]] = [
    {},
    {"narrow": True},
    {"elide": True},
    {"compress": "zstd"},
    {"checksum": True},
    {"narrow": True, "elide": True},
    {"narrow": True, "checksum": True, "compress": ("zstd", -7)},
    {"narrow": True, "elide": True, "compress": ("zstd", 3), "checksum": True},
]
"""Those of `encode` with which values are sent."""


def opened(frames: Any) -> Any:
    """Everything that an open batch tells."""
    batch = open_wire(frames)
    _ = [*batch.schema.items()]
    for name in batch.fields:
        batch.row_lengths(name)
        batch[name]
    return batch.to_tensordict()


def chosen(frames: Any) -> Any:
    """All rows of a batch but one, and some of its columns, in another order."""
    batch = open_wire(frames)
    rows = len(batch)
    batch.rows(slice(0, max(rows - 1, 0))).to_tensordict()
    names = batch.fields[::2]
    return batch.select(names).rows([*range(0, rows, 2), *range(rows)][:rows]).to_tensordict()


def sent_on(frames: Any) -> Any:
    batch = open_wire(frames)
    return batch.rows(slice(0, max(len(batch) - 1, 0))).to_frames()


def all_rows(frames: Any) -> Any:
    batch = open_wire(frames)
    rows = len(batch)
    for index in (slice(0, rows), [*range(rows - 1, -1, -1), 0], [True] * rows):
        batch.rows(index).to_tensordict()


def fetched(frames: Any) -> Any:
    whole = blob(frames)
    batch = open_wire(lambda offset, size: whole[offset : offset + size])
    batch.to_tensordict()
    return batch.rows([*range(0, len(batch), 2)]).to_tensordict()


WHOLE_BATCH_READERS: dict[str, Callable[[Any], Any]] = {
    "open_wire": opened,
    "all rows": all_rows,
    "a callable": fetched,
    "materialize": lambda frames: materialize(open_wire(frames)),
    "concat_rows": lambda frames: concat_rows([open_wire(frames)] * 2).to_tensordict(),
    "several": lambda frames: materialize([frames, frames]),
    "several blobs": lambda frames: materialize([blob(frames)] * 2),
}
"""They read all of a batch, so that what is wrong in it is found."""

BATCH_READERS = {**WHOLE_BATCH_READERS, "rows": chosen, "to_frames": sent_on}


def readers_of(batch: bool) -> dict[str, Callable[[Any], Any]]:
    return {"decode": decode, **(BATCH_READERS if batch else {})}


def outcome(read: Callable[[Any], Any], frames: Any) -> Any:
    """What was read, or the library's own error; any other is raised."""
    try:
        return read(frames)
    except JagcodecError as error:
        return error


def refused(
    read: Callable[[Any], Any], message: Any, reason: str = "", path: str = "", says: str = ""
) -> WireFormatError:
    """The one error of a reader, which says where, what and what was expected."""
    with pytest.raises(WireFormatError, match=says or None) as caught:
        read(message)
    error: Any = caught.value
    assert error.reason in ({reason} if reason else REASONS), error
    assert error.path
    assert path in ("", error.path)
    assert "expected" in error.detail
    seen: list[BaseException] = []
    cause = error
    while cause is not None:
        assert cause not in seen, "an error that is its own cause"
        seen.append(cause)
        cause = cause.__cause__
    return error


def peak_of(call: Callable[..., Any], *arguments: Any) -> int:
    """The most memory of Python and numpy that a call took at a time."""
    tracemalloc.start()
    try:
        call(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def on_a_small_stack(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns or raises in a thread of 256 KiB of stack, which it must not overrun."""
    size = threading.stack_size(256 * 1024)
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(call, *arguments)
            return done.exception() or done.result()
    finally:
        threading.stack_size(size)


def forget() -> None:
    """Empty the tables of known schemas, so that the next message is read from scratch."""
    for table in (schema._schema_of_bytes, header._start_of_tree, header._schema_of_start):
        table.clear()


def operations(call: Callable[[], Any]) -> int:
    """How many bytecode instructions a call takes, in Python code of any package.

    A search through a list or a tuple counts as many as it has items.
    """
    count = 0
    # By the id of its code, which is kept, so that no other code gets the id.
    known: dict[int, tuple[types.CodeType, dict[int, str]]] = {}

    def local(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def searching(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        name = known[id(frame.f_code)][1].get(frame.f_lasti)
        if name is not None:
            searched = frame.f_locals.get(name)
            count += len(searched) if isinstance(searched, (list, tuple)) else 0
        return searching

    def start(frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        code = frame.f_code
        if id(code) not in known:
            known[id(code)] = code, searches(code)
        return searching if known[id(code)][1] else local

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        owner = getattr(argument, "__self__", None)
        if (
            event == "c_call"
            and isinstance(owner, (list, tuple))
            and argument.__name__ in _SEARCHES
        ):
            count += len(owner)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(start)
    sys.setprofile(called)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


_SEARCHES = ("index", "count", "remove", "insert", "__contains__")
"""Methods of a list that look at all of its items, or move them."""


@functools.cache
def searches(code: types.CodeType) -> dict[int, str]:
    """Where code asks whether something is in a variable, and the name of that variable."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    pairs = itertools.pairwise(steps)
    asked = [(each, at) for each, at in pairs if at.opname == "CONTAINS_OP"]
    return {
        at.offset: str(each.argval) for each, at in asked if each.opname.startswith("LOAD_FAST")
    }


def cost(read: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of this thread, and bytes by which memory grows at its peak (Linux)."""
    forget()
    gc.collect()
    blocks.release()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    begin = time.thread_time()
    value = read()
    seconds = time.thread_time() - begin
    peak = status("VmHWM")
    del value
    return seconds, max(0, peak - before)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


# --- values in the second reader's terms -------------------------------------------------------


def plain(value):
    """A value of the second reader as `described` has it, from the value alone."""
    if type(value) in (float, int):
        return described(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and value and type(value[0]) is str:
        if value[0] == "TENSOR_VIEWS":  # what is stored is the list's business alone
            return [plain(("TENSOR", value[1], *view)) for view in value[2]]
        if value[0] == "DICT" and all(type(key) is str for key in value[1][::2]):
            return plain(dict(zip(value[1][::2], value[1][1::2], strict=True)))
        if value[0] in ("SET", "FROZENSET"):
            return (value[0], sorted(map(plain, value[1]), key=repr))
        return tuple(map(plain, value))
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_reads(message, value):
    assert repr(plain(spec_reader.read(message))) == repr(described(value))


def verdicts(message):
    """What both readers make of a message: text of the value, or None where it is refused."""
    try:
        second = repr(plain(spec_reader.read(message)))
    except spec_reader.RefusedError as error:
        second, why = None, str(error)
    else:
        why = ""
    whole = isinstance(message, bytes)
    try:
        first = repr(described(decode(message if whole else [*map(bytearray, message)])))
    except WireFormatError as error:
        first, why = None, why or f"{error.reason} {error}"
    return first, second, why


# What the page leaves to the reader, by what the library says of it.
LIBRARY_MAY = re.compile(
    "create_nt_buffer|fill_cpu|Expected one of cpu|expected a (DEVICE|device type)|too_deep"
    "|expected a dtype of (torch|numpy)"
    "|array is too big|number of dimensions|hashable (dict keys|set members)|hash generic"
)
# And by what the second reader says.
SECOND_READER_MAY = re.compile("^(dtype|names|hashes|offset 0)$")


def agree(message, *about):
    """Whether both readers read a message, and alike; fails if only one does, but for what the
    page leaves to the reader.
    """
    first, second, why = verdicts(message)
    left = LIBRARY_MAY.search(why) if first is None else SECOND_READER_MAY.search(why)
    assert first == second or (left and None in (first, second)), (why, message, *about)
    return first is not None
