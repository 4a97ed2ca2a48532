"""What small messages cost under default limits: memory is bounded, and more is refused.

``python -m tests.wire.test_worst`` prints the peak of resident memory and the seconds that each
reader takes for each of the messages, which ask for as much as default limits allow.
"""

import sys
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    Limits,
    WireFormatError,
    decode,
    encode,
    materialize,
)
from tests.wire.forge import (
    int64s,
    jagged,
    message,
    rows_node,
    run,
    strided_nested,
    table,
    tensor,
    tensordict,
    zstd,
)
from tests.wire.readers import cost, readers_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)

# --- messages ----------------------------------------------------------------------------------

_BLOCK = 1 << 17
_BLOCKS = 180  # of one byte each, which take four bytes, so that the message is below 1 kB
_ASKED = Limits().expanded + 64 * 150


def frame(size, *start, byte=b"\0"):
    """A zstd frame of some bytes, then one byte again and again."""
    head = b"".join(start)
    size = min(size, _BLOCKS * _BLOCK)
    left = size - len(head)
    runs = [(byte, _BLOCK)] * (left // _BLOCK) + [(byte, left % _BLOCK)] * (left % _BLOCK > 0)
    return size, zstd(*[head] * bool(head), *runs, size=size)


def batch(rows, columns, *frames, groups=()):
    """The message of a batch; a frame is bytes, or a size and what is stored of it."""
    pairs = [pair if type(pair) is tuple else (len(pair), pair) for pair in frames]
    sizes, sent = [size for size, _ in pairs], [data for _, data in pairs]
    return message(
        tensordict([rows], columns), *sent, sizes=sizes, stored=[*map(len, sent)], groups=groups
    )


def one_frame():
    size, data = frame(_ASKED)
    return batch(size, {"a": tensor(shape=[size])}, (size, data))


def bits():
    """One jagged row of cells that are stored as bits."""
    size, data = frame(_ASKED // 65)
    cells = 8 * size
    column = jagged(0, 1, [cells], "int64", 0, 0, 1)
    return batch(1, {"a": column}, (size, data), groups=[[0, 0, 1, cells, cells]])


def documents():
    """One row: a list of the smallest objects, each of one byte."""
    size, data = frame(_ASKED // 65, b"\xdd", (_ASKED // 65 - 5).to_bytes(4, "big"), byte=b"\x90")
    return batch(1, {"a": rows_node(size)}, (size, data), groups=[[0, 0, 1, size, size]])


def components():
    size, data = frame(_ASKED // 65 // 8 * 8)
    count = size // 8
    nested = strided_nested(0, count)
    return batch(count, {"a": nested}, (size, data))


def rows_without_cells():
    """Rows of several columns of one group, whose offsets are all 0."""
    size, data = frame(_ASKED // 65 // 8 * 8)
    rows = size // 8 - 1
    leaves = {f"c{i}": jagged(0, 1, [0], "int64", 0, 0) for i in range(8)}
    return batch(rows, leaves, (size, data), groups=[[0, 0, rows, 0, 0]])


def rows_of_an_indirect_tensor():
    """Each is one byte, and begins at the first: its index is a bit."""
    rows = (_ASKED - 4096) // 34
    size, data = frame(rows // 8 + 1)
    rows = min(rows, 8 * size)
    head = table(run(1, (1, 0), index=(1, 0), narrow=1))
    return batch(rows, {"a": tensor("uint8", [rows], 0, 0, 65)}, head, (size, data))


def wide_rows_of_an_indirect_tensor():
    rows = 256
    size, data = frame((_ASKED - 64 * 1024) // (rows * 64 + 1))
    head = table(run(1, (1, 0), stored=1, index=(1, 0), narrow=1))
    column = tensor("int64", [rows, 8 * size], 0, 0, 65)
    return batch(rows, {"a": column}, head, (size, data))


def indirect_rows(runs):
    """Rows that are all the same, of cells that are stored as bits."""
    rows = 30
    each = (_ASKED - 64 * 1024) // (rows * runs * 8 + 1) // 8 * 8
    size, data = frame(each // 8)
    each = 8 * size
    lengths = int64s(*(i * runs * each for i in range(rows + 1)))
    parts = int64s(*(i * each for i in range(rows + 1)))
    head = table(*[run(each, (1, 0), group=int(runs > 1), stored=1) for _ in range(runs)])
    groups = [[0, 0, rows, runs * each, runs * each]]
    frames = [lengths + parts + head] if runs > 1 else [lengths + head]
    groups += [[0, len(lengths), rows, each, each]] * (runs > 1)
    offset = len(frames[0]) - len(head)
    column = jagged(0, 1, [runs * rows * each], "int64", 0, offset, 64 + runs)
    return batch(rows, {"a": column}, *frames, (size, data), groups=groups)


def indirect_documents():
    """Rows of documents that share their bytes, and become an object each."""
    rows = 40
    most = 64 * 400 + Limits().expanded // 64
    each = most // rows
    size, data = frame(each, b"\xdd", (each - 5).to_bytes(4, "big"), byte=b"\x80")
    offsets = int64s(*(i * size for i in range(rows + 1)))
    head = table(run(size, (1, 0)))
    column = rows_node(rows * size, 0, len(offsets), 0, 65)
    return batch(
        rows, {"a": column}, offsets + head, (size, data), groups=[[0, 0, rows, size, size]]
    )


WORST = {
    "one frame": one_frame,
    "bits": bits,
    "documents": documents,
    "components": components,
    "rows without cells": rows_without_cells,
    "indirect tensor, many rows": rows_of_an_indirect_tensor,
    "indirect tensor, wide rows": wide_rows_of_an_indirect_tensor,
    "indirect rows": lambda: indirect_rows(1),
    "indirect rows, 4 runs": lambda: indirect_rows(4),
    "indirect documents": indirect_documents,
}


# --- tests -------------------------------------------------------------------------------------

MOST = 512 << 20
READERS = readers_of(batch=True)


@pytest.mark.parametrize("name", WORST)
def test_a_message_below_1_kb_takes_less_than_512_mb(name):
    frames = WORST[name]()
    assert sum(map(len, frames)) < 1000
    # It asks for nearly as much as is allowed, so that a limit that counts less is noticed.
    with pytest.raises(WireFormatError) as caught:
        decode(frames, limits=Limits(expanded=Limits().expanded // 4))
    assert caught.value.reason == "too_large"
    for reader in ("decode", "open_wire", "materialize"):
        _, peak = cost(partial(READERS[reader], frames))
        assert peak < MOST, reader
    if name in ("bits", "documents", "components"):
        _, peak = cost(partial(READERS["concat_rows"], frames))
        assert peak < 2 * MOST


def one_long_row():
    """Compressed offsets of 131,071 rows, of which the last has all 2**20 cells."""
    blocks = [(b"\0", 1 << 17)] * 8
    offsets = (1 << 20) + 8, zstd(*blocks, int64s(1 << 20), size=(1 << 20) + 8)
    cells = 1 << 20, zstd(*blocks, size=1 << 20)
    column = jagged(0, 1, [1 << 20], "uint8", 1, 0)
    return batch(1 << 17, {"a": column}, offsets, cells, groups=[[0, 0, 1 << 17, 0, 1 << 20]])


@pytest.mark.parametrize("reader", READERS)
def test_a_rectangle_that_no_plain_message_could_ask_for_is_refused(reader):
    frames = one_long_row()
    assert sum(map(len, frames)) < 1000
    with pytest.raises(WireFormatError, match=r"padded rows.*Limits") as caught:
        READERS[reader](frames)
    assert caught.value.reason == "too_large"
    assert len(decode(frames, limits=Limits(expanded=1 << 38))["a"].offsets()) == (1 << 17) + 1


def test_rectangles_of_all_columns_count_in_bytes():
    """Here 2,000 rows of one cell each and one of 2**17, of 1 byte and of 3 x 8 bytes."""
    rows, longest = 2001, 1 << 17
    total = rows - 1 + longest
    offsets = int64s(*range(rows), total)
    cells = total, zstd((b"\0", longest), (b"\0", rows - 1), size=total)
    wide = 24 * total, zstd(*[(b"\0", longest)] * 24, (b"\0", 24 * (rows - 1)), size=24 * total)
    columns = {
        "a": jagged(0, 1, [total], "uint8", 1, 0),
        "b": jagged(0, 1, [total, 3], "int64", 2, 0),
    }
    frames = batch(rows, columns, offsets, cells, wide, groups=[[0, 0, rows, 1, longest]])
    padded = rows * longest * (1 + 3 * 8)
    assert len(decode(frames, limits=Limits(expanded=padded))["b"].offsets()) == rows + 1
    with pytest.raises(WireFormatError, match=f"Limits.expanded={padded}.") as caught:
        decode(frames, limits=Limits(expanded=padded - 1))
    assert caught.value.reason == "too_large"


def test_shapes_of_rows_without_cells_are_not_padded():
    rows = [torch.zeros(1 << 16, 0), torch.zeros(0, 1 << 16)]
    td = TensorDict({"a": torch.nested.nested_tensor(rows)}, [2])
    with pytest.raises(ArgumentError, match=r"'a'.*found 48 bytes.*keep_jagged"):
        materialize(encode(td))
    assert materialize(encode(td), keep_jagged=["a"])["a"].size(0) == 2


def main():
    for name, make in WORST.items():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        frames = make()
        size = sum(map(len, frames))
        for reader, read in READERS.items():
            try:
                seconds, peak = cost(partial(read, frames))
                print(f"{name:32} {size:5} {reader:20} {peak / 1e6:7.0f} MB {seconds:6.2f} s")
            except Exception as error:
                print(f"{name:32} {size:5} {reader:20} {type(error).__name__} {error!s:.120}")


if __name__ == "__main__":
    main()
