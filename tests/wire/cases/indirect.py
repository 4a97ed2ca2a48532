"""Indirect columns, made by hand."""

import msgpack

from tests.wire.forge import (
    Draft,
    jagged,
    object_array,
    row_message,
    rows_node,
    run,
    table,
    tensor,
    tensordict,
)
from tests.wire.spec_reader import SIZES


def numbers_of(values, narrow=0):
    """Bytes of an index, stored as the wire's code `narrow` says."""
    if narrow == 1:
        bits = sum(value << i for i, value in enumerate(values))
        return bits.to_bytes((len(values) + 7) // 8, "little")
    width, signed = (narrow % 16, narrow >= 32) if narrow else (8, True)
    return b"".join(value.to_bytes(width, "little", signed=signed) for value in values)


def run_of(data=b"", index=None, /, *, rows=None, narrow=0, **changes):
    """A run, before its cells and its index have a place: see `column`.

    Args:
        data: The bytes of its cells, or a place that has them already.
        index: At which cell each row begins; None: all at the first.
        rows: How long its rows are; None for those of the column.
        narrow: How the index is stored.
        changes: Numbers of it to replace, by name.
    """
    return data, index, rows, narrow, changes


NAMES = (
    *("group", "buffer", "offset", "stored", "cells"),
    *("index_buffer", "index_offset", "index_stored"),
)
DOCUMENTS = ("NON_TENSOR_ROWS", "OBJECT_ARRAY")


def column(f, kind, runs, lengths=(2, 3), dtype="uint8", inner=(), **changes):
    """An indirect column. Changes are its `stored`, its `group`, its `size` or its `dim`."""
    lengths = [*lengths]
    cell = SIZES[dtype]
    for dim in inner:
        cell *= dim
    rows = []
    for cells, index, own, narrow, replaced in runs:
        place = f.put(cells) if isinstance(cells, bytes) else cells
        numbers = run(
            len(cells) // cell if isinstance(cells, bytes) else 0,
            place,
            group=0 if kind == "TENSOR" else f.shared_group(lengths if own is None else own),
            index=None if index is None else f.put(numbers_of(index, narrow)),
            narrow=narrow,
        )
        for name, value in replaced.items():
            numbers[NAMES.index(name)] = value
        rows.append(numbers)
    buffer, offset = f.put(table(*rows))
    stored = changes.pop("stored", 64 + len(runs))
    total = changes.pop("size", sum(lengths))
    if kind == "TENSOR":
        return tensor(dtype, [total, *inner], buffer, offset, stored)
    group = changes.pop("group", None)
    group = f.shared_group(lengths) if group is None else group
    if kind in DOCUMENTS:
        place = {"buffer": buffer, "offset": offset, "group": group, "stored": stored}
        return (
            rows_node(total, **place)
            if kind == "NON_TENSOR_ROWS"
            else object_array([len(lengths)], total, **place)
        )
    dim = changes.pop("dim", 1)
    shape = [total, *inner] if dim == 1 else [*inner, total]
    return jagged(group, dim, shape, dtype, buffer, offset, stored)


def batch_of(kind, *runs, lengths=(2, 3), frames=(), **options):
    """A message of one indirect column, in a TensorDict if it may be in one."""
    f = Draft()
    made = column(f, kind, runs, lengths, **options)
    root = made if kind == "OBJECT_ARRAY" else tensordict([len(lengths)], {"a": made})
    return f.message(root, *frames)


def documents_of(*runs, lengths, kind="NON_TENSOR_ROWS", **options):
    return batch_of(kind, *runs, lengths=lengths, **options)


TEXT = msgpack.packb("text")


def in_a_row(frames, rows=1):
    """A message in rows: as they are, or indirect where there are several."""
    blob = row_message(frames)
    f = Draft()
    if rows == 1:
        buffer, offset = f.put(blob)
        return f.message(rows_node(len(blob), buffer, offset, f.group([len(blob)]), 256))
    lengths = [len(blob)] * rows
    return f.message(column(f, "NON_TENSOR_ROWS", [run_of(blob)], lengths, stored=321))
