"""Columns of parts, made by hand: what `encode` never writes in them, and what is refused.

`corpus.py` puts them among the others.
"""

import msgpack

from tests.wire.forge import (
    int64s,
    jagged,
    list_of,
    message,
    node,
    object_array,
    part,
    row_message,
    rows_node,
    table,
    tensor,
    tensordict,
)
from tests.wire.many import Forge
from tests.wire.spec_reader import SIZES


def numbers_of(values, narrow=0):
    """Bytes of the numbers beside cells, stored as the wire's code `narrow` says."""
    if narrow == 1:
        bits = sum(value << i for i, value in enumerate(values))
        return bits.to_bytes((len(values) + 7) // 8, "little")
    width, signed = (narrow % 16, narrow >= 32) if narrow else (8, True)
    return b"".join(value.to_bytes(width, "little", signed=signed) for value in values)


def made_of(form, data=b"", index=None, /, *, rows=None, step=0, narrow=0, **changes):
    """A part, before its cells and numbers have a place: see `column`.

    Args:
        form: Its name or number.
        data: The bytes of its cells, or a place that has them already.
        index: The numbers beside them.
        rows: How long its rows are; None for those of the column.
        step: The last number of it.
        narrow: How the index is stored.
        changes: Numbers of it to replace, by name.
    """
    return form, data, index, rows, step, narrow, changes


NAMES = (
    *("form", "group", "buffer", "offset", "stored", "cells"),
    *("index_buffer", "index_offset", "index_stored", "indices", "step"),
)


def column(f, kind, parts, lengths=(2, 3), dtype="uint8", inner=(), **changes):
    """A column of parts. Changes are its `stored`, its `group`, its `size` or its `dim`."""
    lengths = [*lengths]
    documents = kind in ("NON_TENSOR_ROWS", "OBJECT_ARRAY")
    cell = SIZES[dtype]
    for dim in inner:
        cell *= dim
    rows = []
    for form, cells, index, own, step, narrow, replaced in parts:
        place = f.put(cells) if isinstance(cells, bytes) else cells
        count = len(cells) // cell if isinstance(cells, bytes) else 0
        found = [] if index is None else index
        numbers = part(
            form,
            count,
            place,
            group=0 if kind == "TENSOR" else f.shared_group(lengths if own is None else own),
            index=f.put(numbers_of(found, narrow)),
            narrow=narrow,
            indices=len(found),
            step=step,
        )
        for name, value in replaced.items():
            numbers[NAMES.index(name)] = value
        rows.append(numbers)
    buffer, offset = f.put(table(*rows))
    stored = changes.pop("stored", 64 + len(parts))
    total = changes.pop("size", sum(lengths))
    if kind == "TENSOR":
        return tensor(dtype, [total, *inner], buffer, offset, stored)
    group = changes.pop("group", None)
    group = f.shared_group(lengths) if group is None else group
    if documents:
        place = {"buffer": buffer, "offset": offset, "group": group, "stored": stored}
        return (
            rows_node(total, **place)
            if kind == "NON_TENSOR_ROWS"
            else object_array([len(lengths)], total, **place)
        )
    dim = changes.pop("dim", 1)
    shape = [total, *inner] if dim == 1 else [*inner, total]
    return jagged(group, dim, shape, dtype, buffer, offset, stored)


def batch_of(kind, *parts, lengths=(2, 3), frames=(), **options):
    """A message of one column of parts, in a TensorDict if it may be in one."""
    f = Forge()
    made = column(f, kind, parts, lengths, **options)
    root = made if kind == "OBJECT_ARRAY" else tensordict([len(lengths)], {"a": made})
    return f.message(root, *frames)


def documents_of(*parts, lengths, kind="NON_TENSOR_ROWS", **options):
    return batch_of(kind, *parts, lengths=lengths, **options)


TEXT = msgpack.packb("text")
MANY = bytes(range(10, 30))


def shared_places():
    """Two columns over one table, one over its cells, and one that has them as its own."""
    f = Forge()
    # Tables count for each column that names them, so there must be as many bytes.
    f.put(b"\xff" * 88)
    cells = f.put(bytes([5, 6, 7]))
    index = f.put(bytes([1, 0]))
    group = f.shared_group([2, 2])
    numbers = part("AT", 3, cells, group=group, index=index, narrow=17, indices=2)
    place = f.put(table(numbers))
    other = f.put(table(part("REPEATED", 1, cells, group=group)))
    leaves = {
        "a": jagged(group, 1, [4], "uint8", place[0], place[1], 65),
        "b": jagged(group, 1, [4], "uint8", place[0], place[1], 65),
        "c": jagged(group, 1, [4], "uint8", other[0], other[1], 65),
        "d": tensor("uint8", [2], *cells),
    }
    return f.message(tensordict([2], leaves))


def over_its_own_table():
    """A column whose cells are the bytes of its table."""
    f = Forge()
    group = f.shared_group([88, 88])
    place = f.put(bytes(88))
    rows = part("AT", 88, place, group=group, index=place, narrow=1, indices=2)
    rows[6:8] = [0, place[1] + 80]  # the step's bytes, which are zero
    f._frames[0][place[1] : place[1] + 88] = table(rows)
    leaf = jagged(group, 1, [176], "uint8", place[0], place[1], 65)
    return f.message(tensordict([2], {"a": leaf}))


def in_a_row(frames, rows=1):
    """A message in rows: as they are, or of one part where there are several."""
    blob = row_message(frames)
    f = Forge()
    if rows == 1:
        buffer, offset = f.put(blob)
        return f.message(rows_node(len(blob), buffer, offset, f.group([len(blob)])))
    lengths = [len(blob)] * rows
    made = made_of("AT", blob, [0] * rows, narrow=1)
    return f.message(column(f, "NON_TENSOR_ROWS", [made], lengths))


REPEATS = batch_of("JAGGED", made_of("REPEATED", b"\7"), lengths=[2, 3])
PLAIN_ROW = message(tensor(shape=[3]), b"\1\2\3")

GOOD = {
    "part_in_order": ("cells end to end", batch_of("JAGGED", made_of("IN_ORDER", MANY[:5]))),
    "part_at": ("rows that overlap", batch_of("JAGGED", made_of("AT", MANY[:4], [1, 1]))),
    "part_at_fewer_cells": (
        "one cell that is in no row, and an index of one byte each",
        batch_of("JAGGED", made_of("AT", MANY[:5], [2, 1], narrow=17)),
    ),
    "part_at_signed": (
        "an index of two bytes with a sign",
        batch_of("JAGGED", made_of("AT", MANY[:3], [1, 0], narrow=34)),
    ),
    "part_at_bits": (
        "an index of bits, and bits behind them",
        batch_of("JAGGED", made_of("AT", MANY[:4], [1, 0, 1, 1], narrow=1, indices=2)),
    ),
    "part_at_of_empty_rows": (
        "a row without cells may begin behind the last",
        batch_of("JAGGED", made_of("AT", MANY[:3], [3, 0]), lengths=[0, 3]),
    ),
    "part_repeated": ("counts", batch_of("JAGGED", made_of("REPEATED", b"\1\2\3", [1, 0, 4]))),
    "part_repeated_one": ("one cell, without a count", REPEATS),
    "part_repeated_one_counted": (
        "one cell, with its count",
        batch_of("JAGGED", made_of("REPEATED", b"\7", [5], narrow=17)),
    ),
    "part_repeated_wide": (
        "cells of three int16, two times and three times",
        batch_of("JAGGED", made_of("REPEATED", MANY[:12], [2, 3]), dtype="int16", inner=[3]),
    ),
    "part_ramp": (
        "a first cell for each row",
        batch_of("JAGGED", made_of("RAMP", int64s(7, -9), step=1000), dtype="int64"),
    ),
    "part_ramp_of_one": (
        "one first cell, and a step that falls",
        batch_of("JAGGED", made_of("RAMP", b"\1\0", step=-3), dtype="int16"),
    ),
    "part_ramp_wraps": (
        "the lowest step there is",
        batch_of("JAGGED", made_of("RAMP", int64s(1, 2), step=-(2**63)), dtype="int64"),
    ),
    "part_ramp_wraps_bytes": (
        "sums beyond the dtype",
        batch_of("JAGGED", made_of("RAMP", b"\xfa\5", step=2**62 + 3), lengths=[4, 2]),
    ),
    "part_ramp_narrow": (
        "first cells of one byte",
        batch_of("JAGGED", made_of("RAMP", b"\1\2", stored=17, cells=2), dtype="int64"),
    ),
    "part_ramp_of_cells_of_one": (
        "cells of rank 1 that hold one integer",
        batch_of("JAGGED", made_of("RAMP", b"\1\2", step=1), inner=[1]),
    ),
    "part_narrow": (
        "cells of bits",
        batch_of("JAGGED", made_of("AT", b"\5", [0, 0], stored=1, cells=3), dtype="bool"),
    ),
    "part_of_floats": (
        "NaN and negative zero keep their bits",
        batch_of(
            "JAGGED",
            made_of("REPEATED", bytes.fromhex("010080ff00000080"), [3, 2]),
            dtype="float32",
        ),
    ),
    "part_of_complex": (
        "cells of 16 bytes",
        batch_of(
            "JAGGED", made_of("AT", MANY + MANY[:12], [0, 0]), dtype="complex128", lengths=[2, 1]
        ),
    ),
    "part_step_without_meaning": (
        "a step where it means nothing, and how no index is stored",
        batch_of("JAGGED", made_of("IN_ORDER", MANY[:5], step=9, index_stored=99)),
    ),
    "parts_end_to_end": (
        "prefixes at cells of their own, then cells in order, then runs",
        batch_of(
            "JAGGED",
            made_of("AT", MANY[:2], [0, 0], rows=[2, 1]),
            made_of("IN_ORDER", MANY[2:5], rows=[1, 2]),
            made_of("REPEATED", b"\0", rows=[1, 0]),
            lengths=[4, 3],
        ),
    ),
    "parts_8": (
        "eight parts",
        batch_of(
            "JAGGED",
            *[made_of("IN_ORDER", bytes([i, 9]), rows=[1, 1]) for i in range(8)],
            lengths=[8, 8],
        ),
    ),
    "parts_without_rows": (
        "parts whose rows are all empty, of every form",
        batch_of(
            "JAGGED",
            made_of("IN_ORDER", MANY[:5]),
            made_of("AT", b"", [0, 0], rows=[0, 0]),
            made_of("REPEATED", b"", [], rows=[0, 0]),
            made_of("RAMP", b"\7", rows=[0, 0], step=1),
            made_of("RAMP", b"\7\7", rows=[0, 0], step=1),
        ),
    ),
    "parts_of_one_row": (
        "groups of one row, which have no offsets",
        batch_of(
            "JAGGED",
            made_of("AT", MANY[:2], [0], rows=[2]),
            made_of("RAMP", b"\7", rows=[3], step=1),
            lengths=[5],
        ),
    ),
    "parts_share_cells": ("four columns over the same cells, two over one table", shared_places()),
    "part_over_its_table": ("cells and numbers may lie in the table", over_its_own_table()),
    "part_of_a_tensor": (
        "rows of a tensor of rank 2 at cells of their own; the group means nothing",
        batch_of(
            "TENSOR", made_of("AT", MANY[:6], [1, 0, 1], group=-5), lengths=[1] * 3, inner=[3]
        ),
    ),
    "part_of_a_tensor_in_order": (
        "a tensor whose cells may lie elsewhere",
        batch_of("TENSOR", made_of("IN_ORDER", MANY[:2]), lengths=[1, 1]),
    ),
    "part_of_a_tensor_repeated": (
        "and one that is constant",
        batch_of("TENSOR", made_of("REPEATED", int64s(-7)), lengths=[1] * 3, dtype="int64"),
    ),
    "part_of_a_tensor_ramp": (
        "whose rows are one cell each, so that the step is never taken",
        batch_of("TENSOR", made_of("RAMP", b"\1\2\3", step=9), lengths=[1] * 3),
    ),
    "part_of_documents": (
        "rows that are equal, not one object",
        documents_of(made_of("AT", TEXT + b"\7", [0, 5, 0]), lengths=[5, 1, 5]),
    ),
    "part_of_one_object": (
        "rows that are one object, twice",
        documents_of(made_of("AT", b"\x91\xc0\x90", [0, 2, 0, 2], step=1), lengths=[2, 1, 2, 1]),
    ),
    "part_of_one_object_inside": (
        "a row that begins within another is an object of its own",
        documents_of(made_of("AT", b"\x91\x90", [0, 1], step=-1), lengths=[2, 1]),
    ),
    "part_of_documents_repeated": (
        "each byte of documents counts as a cell",
        documents_of(made_of("REPEATED", b"\xc0\7", [2, 1]), lengths=[1, 1, 1]),
    ),
    "part_of_documents_ramp": (
        "bytes that rise",
        documents_of(made_of("RAMP", b"\1", step=1), lengths=[1, 1]),
    ),
    "part_of_documents_bits": (
        "bytes of 0 and 1",
        documents_of(made_of("IN_ORDER", b"\2", stored=1, cells=2), lengths=[1, 1]),
    ),
    "parts_of_documents": (
        "the first bytes of all documents are one part",
        documents_of(
            made_of("REPEATED", b"\x92", rows=[1, 1]),
            made_of("AT", b"\1\2\3", [0, 1], rows=[2, 2], step=1),
            lengths=[3, 3],
        ),
    ),
    "part_of_an_object_array": (
        "cells of an array of objects",
        documents_of(made_of("AT", TEXT, [0, 0]), lengths=[5, 5], kind="OBJECT_ARRAY"),
    ),
    "part_of_messages": (
        "rows that are messages, and one object",
        documents_of(
            made_of("AT", row_message(PLAIN_ROW), [0, 0], step=1),
            lengths=[len(row_message(PLAIN_ROW))] * 2,
        ),
    ),
    "part_in_a_message_in_a_row": ("a column of parts in a row", in_a_row(REPEATS)),
    "part_of_nothing": (
        "how no cells are stored says nothing: there is no table",
        message(
            list_of(
                tensor("int64", [0], 7, 99, 65),
                tensor("int64", [3, 0], 7, 99, 72),
                jagged(shape=[0], offset=99, stored=70),
                rows_node(0, 7, 99, 1, 65),
            ),
            groups=[[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]],
        ),
    ),
}


def bad_part(*parts, kind="JAGGED", **options):
    return batch_of(kind, *parts, **options)


def sparse_of(indices_of_parts):
    """A sparse tensor with indices, or values, that are made of parts."""
    f = Forge()
    parts = [made_of("REPEATED", int64s(0) if indices_of_parts else b"\7")]
    rows = [1] if indices_of_parts else [1, 1]
    inner = [2] if indices_of_parts else []
    if indices_of_parts:
        parts = [made_of("IN_ORDER", int64s(0, 1))]
        indices = column(f, "TENSOR", parts, rows, "int64", inner)
        values = tensor("uint8", [2], *f.put(b"\1\2"))
    else:
        indices = tensor("int64", [1, 2], *f.put(int64s(0, 1)))
        values = column(f, "TENSOR", parts, rows)
    f.put(b"\xff" * 64)
    return f.message(node("SPARSE_COO", 1, numbers=[1, 2], children=[indices, values]))


GOOD["part_of_sparse_values"] = ("which are a tensor", sparse_of(False))


ROWS_1 = {"lengths": [1, 1], "kind": "TENSOR"}
# name -> (reason, why, frames)
BAD = {
    "part_form_4": ("bad_record", "a form that there is not", bad_part(made_of(4, MANY[:5]))),
    "part_form_below_0": ("bad_record", "form -1", bad_part(made_of(-1, MANY[:5]))),
    "part_group": (
        "bad_record",
        "a part in a group that there is not",
        bad_part(
            made_of("IN_ORDER", MANY[:2], rows=[1, 1], group=9),
            made_of("IN_ORDER", MANY[:3], rows=[1, 2]),
        ),
    ),
    "part_group_below_0": (
        "bad_record",
        "a part in group -1",
        bad_part(
            made_of("IN_ORDER", MANY[:2], rows=[1, 1]),
            made_of("IN_ORDER", MANY[:3], rows=[1, 2], group=-1),
        ),
    ),
    "part_of_another_group": (
        "bad_offsets",
        "one part in another group than its column's, though of equal rows",
        bad_part(made_of("IN_ORDER", MANY[:2], group=1)),
    ),
    "parts_of_fewer_rows": (
        "bad_offsets",
        "a part of one row in a column of two",
        bad_part(
            made_of("IN_ORDER", MANY[:4], rows=[4]), made_of("IN_ORDER", MANY[:1], rows=[0, 1])
        ),
    ),
    "parts_too_short": (
        "bad_offsets",
        "rows that are longer than their parts",
        bad_part(
            made_of("IN_ORDER", MANY[:2], rows=[1, 1]), made_of("IN_ORDER", MANY[:2], rows=[1, 1])
        ),
    ),
    "parts_too_long": (
        "bad_offsets",
        "rows that are shorter than their parts",
        bad_part(
            made_of("IN_ORDER", MANY[:3], rows=[2, 1]), made_of("IN_ORDER", MANY[:3], rows=[1, 2])
        ),
    ),
    "parts_of_other_rows": (
        "bad_offsets",
        "as many cells, in other rows",
        bad_part(
            made_of("IN_ORDER", MANY[:3], rows=[1, 2]), made_of("IN_ORDER", MANY[:2], rows=[2, 0])
        ),
    ),
    "part_in_order_of_more_cells": (
        "bad_offsets",
        "more cells than rows have",
        bad_part(made_of("IN_ORDER", MANY[:6])),
    ),
    "part_in_order_of_fewer_cells": (
        "bad_offsets",
        "fewer cells than rows have",
        bad_part(made_of("IN_ORDER", MANY[:4])),
    ),
    "part_in_order_with_index": (
        "bad_offsets",
        "numbers where there are none",
        bad_part(made_of("IN_ORDER", MANY[:5], [0])),
    ),
    "part_cells_below_0": (
        "out_of_bounds",
        "-1 cells",
        bad_part(made_of("AT", MANY[:5], [0, 0], cells=-1)),
    ),
    "part_at_of_more_cells": (
        "out_of_bounds",
        "more cells than the group has",
        bad_part(made_of("AT", MANY[:6], [0, 1])),
    ),
    "part_at_beyond": (
        "out_of_bounds",
        "a row that ends behind the cells",
        bad_part(made_of("AT", MANY[:4], [2, 2])),
    ),
    "part_at_below_0": (
        "out_of_bounds",
        "a row that begins before the cells",
        bad_part(made_of("AT", MANY[:4], [0, -1])),
    ),
    "part_at_overflow": (
        "out_of_bounds",
        "a row at 2^63 - 1, whose end overflows",
        bad_part(made_of("AT", MANY[:4], [0, 2**63 - 1])),
    ),
    "part_at_empty_beyond": (
        "out_of_bounds",
        "an empty row that begins behind the cells",
        bad_part(made_of("AT", MANY[:3], [4, 0]), lengths=[0, 3]),
    ),
    "part_at_of_fewer_numbers": (
        "bad_offsets",
        "one number for two rows",
        bad_part(made_of("AT", MANY[:5], [0])),
    ),
    "part_at_of_more_numbers": (
        "bad_offsets",
        "three numbers for two rows",
        bad_part(made_of("AT", MANY[:5], [0, 0, 0])),
    ),
    "part_repeated_short": (
        "bad_offsets",
        "counts of fewer cells than rows have",
        bad_part(made_of("REPEATED", b"\1\2", [2, 2])),
    ),
    "part_repeated_long": (
        "bad_offsets",
        "counts of more cells",
        bad_part(made_of("REPEATED", b"\1\2", [2, 4])),
    ),
    "part_repeated_below_0": (
        "bad_offsets",
        "a count below 0, in a sum that fits",
        bad_part(made_of("REPEATED", b"\1\2\3", [3, -1, 3])),
    ),
    "part_repeated_overflow": (
        "bad_offsets",
        "counts whose sum overflows to the number of cells",
        bad_part(made_of("REPEATED", b"\1\2\3", [2**63 - 1, 2**63 - 1, 7])),
    ),
    "part_repeated_without_cells": (
        "bad_offsets",
        "no cell at all",
        bad_part(made_of("REPEATED", b"", [])),
    ),
    "part_repeated_without_counts": (
        "bad_offsets",
        "two cells without counts",
        bad_part(made_of("REPEATED", b"\1\2", [])),
    ),
    "part_repeated_of_more_cells": (
        "out_of_bounds",
        "more cells than rows have, some of them never",
        bad_part(made_of("REPEATED", MANY[:6], [1, 1, 1, 1, 1, 0])),
    ),
    "part_ramp_of_floats": (
        "unknown_dtype",
        "a ramp of float32",
        bad_part(made_of("RAMP", bytes(4), step=1), dtype="float32"),
    ),
    "part_ramp_of_bools": (
        "unknown_dtype",
        "a ramp of bool",
        bad_part(made_of("RAMP", bytes(1), step=1), dtype="bool"),
    ),
    "part_ramp_of_vectors": (
        "unknown_dtype",
        "a ramp of two integers per cell",
        bad_part(made_of("RAMP", bytes(2), step=1), inner=[2]),
    ),
    "part_ramp_of_int4": (
        "unknown_dtype",
        "a ramp of a dtype that is not stored narrow either",
        bad_part(made_of("RAMP", bytes(1), step=1), dtype="int4"),
    ),
    "part_ramp_of_two_cells": (
        "bad_offsets",
        "two first cells of three rows",
        bad_part(made_of("RAMP", b"\1\2", step=1), lengths=[1, 2, 3]),
    ),
    "part_ramp_without_cells": (
        "bad_offsets",
        "no first cell",
        bad_part(made_of("RAMP", b"", step=1)),
    ),
    "part_ramp_with_index": (
        "bad_offsets",
        "numbers where there are none",
        bad_part(made_of("RAMP", b"\1", [1])),
    ),
    "part_in_no_buffer": (
        "out_of_bounds",
        "cells in a buffer that there is not",
        bad_part(made_of("IN_ORDER", MANY[:5], buffer=1)),
    ),
    "part_in_buffer_below_0": (
        "out_of_bounds",
        "cells in buffer -1",
        bad_part(made_of("IN_ORDER", MANY[:5], buffer=-1)),
    ),
    "part_offset_below_0": (
        "out_of_bounds",
        "cells at -1",
        bad_part(made_of("IN_ORDER", MANY[:5], offset=-1)),
    ),
    "part_offset_beyond": (
        "out_of_bounds",
        "cells at 2^63 - 1",
        bad_part(made_of("IN_ORDER", MANY[:5], offset=2**63 - 1)),
    ),
    "part_index_in_no_buffer": (
        "out_of_bounds",
        "numbers in a buffer that there is not",
        bad_part(made_of("AT", MANY[:5], [0, 0], index_buffer=3)),
    ),
    "part_index_beyond": (
        "out_of_bounds",
        "numbers that end behind the payload",
        bad_part(made_of("AT", MANY[:5], [0, 0], index_offset=2**62)),
    ),
    "part_index_before": (
        "out_of_bounds",
        "numbers that begin before it",
        bad_part(made_of("AT", MANY[:5], [0, 0], index_offset=-8)),
    ),
    "part_of_parts": (
        "unknown_dtype",
        "cells of a part that are made of parts",
        bad_part(made_of("IN_ORDER", MANY[:5], stored=65)),
    ),
    "part_index_of_parts": (
        "unknown_dtype",
        "numbers that are made of parts",
        bad_part(made_of("AT", MANY[:5], [0, 0], index_stored=65)),
    ),
    "part_index_too_wide": (
        "unknown_dtype",
        "numbers of eight bytes that are called narrow",
        bad_part(made_of("AT", MANY[:5], [0, 0], index_stored=24)),
    ),
    "part_floats_narrow": (
        "unknown_dtype",
        "cells of float32 in two bytes",
        bad_part(made_of("IN_ORDER", MANY, stored=18), dtype="float32"),
    ),
    "part_stored_below_0": (
        "unknown_dtype",
        "cells that are stored as -1",
        bad_part(made_of("IN_ORDER", MANY[:5], stored=-1)),
    ),
    "parts_0": (
        "unknown_dtype",
        "a column of no parts",
        bad_part(made_of("IN_ORDER", MANY[:5]), stored=64),
    ),
    "parts_9": (
        "unknown_dtype",
        "a column of nine parts",
        bad_part(*[made_of("IN_ORDER", b"\1", rows=[1, 0])] * 9, lengths=[9, 0]),
    ),
    "parts_of_ragged_dim_2": (
        "bad_record",
        "parts of columns",
        bad_part(made_of("IN_ORDER", MANY[:10]), inner=[2], dim=2),
    ),
    "parts_of_a_tensor": (
        "bad_record",
        "a tensor of two parts",
        bad_part(*[made_of("IN_ORDER", MANY[:1], rows=[1, 0])] * 2, **ROWS_1),
    ),
    "part_of_rank_0": (
        "bad_record",
        "a tensor of rank 0",
        message(tensor("uint8", [], 0, 0, 65), table(part("REPEATED", 1)) + b"\7"),
    ),
    "part_of_a_tensor_beyond": (
        "out_of_bounds",
        "a row of a tensor behind the cells",
        bad_part(made_of("AT", MANY[:2], [0, 2]), **ROWS_1),
    ),
    "part_of_views": (
        "out_of_bounds",
        "views are never of parts: there is no number that could say so",
        message(node("TENSOR_VIEWS", "uint8", 1, numbers=[0, 65, 0, 0, 1, 88]), bytes(88)),
    ),
    "part_of_sparse_indices": (
        "bad_value",
        "indices that are made of parts",
        sparse_of(True),
    ),
    "part_table_beyond": (
        "out_of_bounds",
        "a table of which one byte is missing",
        message(jagged(0, 1, [5], "uint8", 0, 0, 65), bytes(87), groups=[[0, 0, 1, 5, 5]]),
    ),
    "part_tables_overlap": (
        "out_of_bounds",
        "two columns over one table of parts, and no bytes but that",
        message(list_of(*[tensor("uint8", [2], 0, 0, 65)] * 2), table(part("REPEATED", 1))),
    ),
    "part_group_of_column": (
        "bad_record",
        "a column of parts in a group that there is not",
        bad_part(made_of("IN_ORDER", MANY[:5]), group=3),
    ),
    "part_of_other_total": (
        "bad_offsets",
        "rows that are shorter than the values",
        bad_part(made_of("IN_ORDER", MANY[:6]), size=6),
    ),
    "part_of_no_document": (
        "bad_value",
        "a row that ends within its document",
        documents_of(made_of("AT", TEXT, [0, 1]), lengths=[5, 4]),
    ),
    "part_of_objects_of_other_lengths": (
        "bad_value",
        "rows that are one object, and of different lengths",
        documents_of(made_of("AT", b"\x91\xc0", [0, 0], step=1), lengths=[2, 1]),
    ),
    "part_of_documents_of_other_total": (
        "bad_offsets",
        "rows that are shorter than the documents",
        documents_of(made_of("AT", b"\xc0", [0, 0]), lengths=[1, 1], size=3),
    ),
    "part_in_a_row_of_parts": (
        "out_of_bounds",
        "parts in a message that lies in rows of parts",
        in_a_row(REPEATS, rows=2),
    ),
    "part_in_a_row_in_a_row_of_parts": (
        "out_of_bounds",
        "parts in a message in a row of a message that lies in rows of parts",
        in_a_row(in_a_row(REPEATS), rows=2),
    ),
    "part_bomb_in_a_row": (
        "out_of_bounds",
        "more than 64 bytes for each byte of a message in a row",
        in_a_row(batch_of("JAGGED", made_of("REPEATED", b"\7"), lengths=[1 << 20, 0])),
    ),
}
