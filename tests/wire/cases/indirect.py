"""Indirect columns, made by hand: what `encode` never writes in them, and what is refused."""

import msgpack

from tests.wire.cases.table import bad, good
from tests.wire.forge import (
    Draft,
    int64s,
    jagged,
    list_of,
    message,
    node,
    object_array,
    row_message,
    rows_node,
    run,
    sparse_coo,
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


def tokens(*runs, **options):
    return batch_of("JAGGED", *runs, **options)


TEXT = msgpack.packb("text")
MANY = bytes(range(10, 30))


def shared_places():
    """Two columns over one table, one over its cells, and one that has them as its own."""
    f = Draft()
    # Tables count for each column that names them, so there must be as many bytes.
    f.put(b"\xff" * 64)
    cells = f.put(bytes([5, 6, 7]))
    group = f.shared_group([2, 2])
    place = f.put(table(run(3, cells, group=group, index=f.put(bytes([1, 0])), narrow=17)))
    other = f.put(table(run(2, cells, group=group)))
    leaves = {
        "a": jagged(group, 1, [4], "uint8", place[0], place[1], 65),
        "b": jagged(group, 1, [4], "uint8", place[0], place[1], 65),
        "c": jagged(group, 1, [4], "uint8", other[0], other[1], 65),
        "d": tensor("uint8", [2], *cells),
    }
    return f.message(tensordict([2], leaves))


def over_its_own_table():
    """A column whose cells are the bytes of its table."""
    f = Draft()
    group = f.shared_group([64, 64])
    place = f.put(bytes(64))
    # Both rows begin at bits of the group's number, which are zero.
    f.payload[0][place[1] : place[1] + 64] = table(
        run(64, place, group=group, index=place, narrow=1)
    )
    leaf = jagged(group, 1, [128], "uint8", place[0], place[1], 65)
    return f.message(tensordict([2], {"a": leaf}))


def in_a_row(frames, rows=1):
    """A message in rows: as they are, or indirect where there are several."""
    blob = row_message(frames)
    f = Draft()
    if rows == 1:
        buffer, offset = f.put(blob)
        return f.message(rows_node(len(blob), buffer, offset, f.group([len(blob)]), 256))
    lengths = [len(blob)] * rows
    return f.message(column(f, "NON_TENSOR_ROWS", [run_of(blob)], lengths, stored=321))


REPEATS = tokens(run_of(b"\7\7\7"))
PLAIN_ROW = message(tensor(shape=[3]), b"\1\2\3")
IN_ORDER = [0, 2]


def sparse_of(indirect_indices):
    """A sparse tensor with indirect indices, or values."""
    f = Draft()
    if indirect_indices:
        runs = [run_of(int64s(0, 1), [0])]
        indices = column(f, "TENSOR", runs, [1], "int64", [2])
        values = tensor("uint8", [2], *f.put(b"\1\2"))
    else:
        indices = tensor("int64", [1, 2], *f.put(int64s(0, 1)))
        values = column(f, "TENSOR", [run_of(b"\7", [0, 0])], [1, 1])
    f.put(b"\xff" * 64)
    return f.message(sparse_coo(indices, values, 1, [2]))


ROWS_1 = {"lengths": [1, 1], "kind": "TENSOR"}


def bad_run(*runs, kind="JAGGED", **options):
    return batch_of(kind, *runs, **options)


GOOD = good(
    "indirect_in_order: cells end to end",
    tokens(run_of(MANY[:5], IN_ORDER)),
    "indirect_anywhere: rows that overlap",
    tokens(run_of(MANY[:4], [1, 1])),
    "indirect_at_first: rows that all begin at the first cell",
    REPEATS,
    "indirect_without_index_place: how no index is stored, and where",
    tokens(run_of(b"\7\7\7", index_offset=-5, index_stored=99)),
    "indirect_fewer_cells: one cell that is in no row, and an index of one byte each",
    tokens(run_of(MANY[:5], [2, 1], narrow=17)),
    "indirect_signed: an index of two bytes with a sign",
    tokens(run_of(MANY[:4], [1, 0], narrow=34)),
    "indirect_bits: an index of bits, and bits behind them",
    tokens(run_of(MANY[:4], [1, 0, 1, 1], narrow=1)),
    "indirect_empty_rows: a row without cells may begin behind the last",
    tokens(run_of(MANY[:3], [3, 0]), lengths=[0, 3]),
    "indirect_wide: cells of three int16",
    tokens(run_of(MANY[:18], [1, 0]), dtype="int16", inner=[3]),
    "indirect_narrow: cells of bits",
    tokens(run_of(b"\5", [0, 0], stored=1, cells=3), dtype="bool"),
    "indirect_floats: NaN and negative zero keep their bits",
    tokens(run_of(bytes.fromhex("010080ff00000080"), [0, 0]), lengths=[1, 2], dtype="float32"),
    "indirect_complex: cells of 16 bytes",
    tokens(run_of(MANY + MANY[:12], [0, 0]), dtype="complex128", lengths=[2, 1]),
    "indirect_runs: prefixes at cells of their own, then cells in order, then one for all",
    tokens(
        run_of(MANY[:2], [0, 0], rows=[2, 1]),
        run_of(MANY[2:5], [0, 1], rows=[1, 2]),
        run_of(b"\0", rows=[1, 0]),
        lengths=[4, 3],
    ),
    "indirect_8_runs: eight runs",
    tokens(*[run_of(bytes([i, 9]), [0, 1], rows=[1, 1]) for i in range(8)], lengths=[8, 8]),
    "indirect_runs_without_cells: runs whose rows are all empty",
    tokens(
        run_of(MANY[:5], IN_ORDER),
        run_of(b"", [0, 0], rows=[0, 0]),
        run_of(b"", rows=[0, 0], buffer=9, offset=-3, stored=99),
    ),
    "indirect_one_row: groups of one row, which have no offsets",
    tokens(run_of(MANY[:2], [0], rows=[2]), run_of(b"\7\7\7", rows=[3]), lengths=[5]),
    "indirect_shared: four columns over the same cells, two over one table",
    shared_places(),
    "indirect_over_its_table: cells and index may lie in the table",
    over_its_own_table(),
    "indirect_tensor: rows of a tensor of rank 2 at cells of their own; the group means nothing",
    batch_of("TENSOR", run_of(MANY[:6], [1, 0, 1], group=-5), lengths=[1] * 3, inner=[3]),
    "indirect_tensor_in_order: a tensor whose cells may lie elsewhere",
    batch_of("TENSOR", run_of(MANY[:2], [0, 1]), lengths=[1, 1]),
    "indirect_tensor_of_one_cell: and one that is constant, a bit for each row",
    batch_of("TENSOR", run_of(int64s(-7), [0] * 3, narrow=1), lengths=[1] * 3, dtype="int64"),
    "indirect_documents: rows that are equal, not one object",
    documents_of(run_of(TEXT + b"\7", [0, 5, 0]), lengths=[5, 1, 5]),
    "indirect_documents_at_first: rows that all are the first bytes, equal or cut",
    documents_of(run_of(b"\7\7"), lengths=[1, 1]),
    "indirect_one_object: rows that are one object, twice",
    documents_of(run_of(b"\x91\xc0\x90", [0, 2, 0, 2]), lengths=[2, 1, 2, 1], stored=129),
    "indirect_one_object_inside: a row that begins within another is an object of its own",
    documents_of(run_of(b"\x91\x90", [0, 1]), lengths=[2, 1], stored=129),
    "indirect_documents_of_bits: bytes of 0 and 1",
    documents_of(run_of(b"\2", [0, 1], stored=1, cells=2), lengths=[1, 1]),
    "indirect_object_array: cells of an array of objects",
    documents_of(run_of(TEXT, [0, 0]), lengths=[5, 5], kind="OBJECT_ARRAY"),
    "indirect_messages: rows that are messages, and one object",
    documents_of(
        run_of(row_message(PLAIN_ROW), [0, 0]),
        lengths=[len(row_message(PLAIN_ROW))] * 2,
        stored=385,
    ),
    "indirect_messages_apart: rows that are messages with the same bytes",
    documents_of(
        run_of(row_message(PLAIN_ROW), [0, 0]),
        lengths=[len(row_message(PLAIN_ROW))] * 2,
        stored=321,
    ),
    "indirect_nothing: how no cells are stored says nothing: there is no table",
    message(
        list_of(
            tensor("int64", [0], 7, 99, 65),
            tensor("int64", [3, 0], 7, 99, 72),
            jagged(shape=[0], offset=99, stored=70),
            rows_node(0, 7, 99, 1, 129),
        ),
        groups=[[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]],
    ),
    "indirect_sparse_values: which are a tensor",
    sparse_of(False),
)

BAD = bad(
    "bad_record indirect_group: a run in a group that there is not",
    tokens(run_of(MANY[:2], [0, 1], rows=[1, 1], group=9), run_of(MANY[:3], [0, 1], rows=[1, 2])),
    "bad_record indirect_group_below_0: a run in group -1",
    tokens(run_of(MANY[:2], [0, 1], rows=[1, 1]), run_of(MANY[:3], [0, 1], rows=[1, 2], group=-1)),
    "bad_offsets indirect_another_group: one run in another group than its column's, though of "
    "equal rows",
    tokens(run_of(MANY[:5], IN_ORDER, group=1)),
    "bad_offsets indirect_fewer_rows: a run of one row in a column of two",
    tokens(run_of(MANY[:4], [0], rows=[4]), run_of(MANY[:1], [0, 0], rows=[0, 1])),
    "bad_offsets indirect_too_short: rows that are longer than their runs",
    tokens(run_of(MANY[:2], [0, 1], rows=[1, 1]), run_of(MANY[:2], [0, 1], rows=[1, 1])),
    "bad_offsets indirect_too_long: rows that are shorter than their runs",
    tokens(run_of(MANY[:3], [0, 2], rows=[2, 1]), run_of(MANY[:3], [0, 1], rows=[1, 2])),
    "bad_offsets indirect_other_rows: as many cells, in other rows",
    tokens(run_of(MANY[:3], [0, 1], rows=[1, 2]), run_of(MANY[:2], [0, 0], rows=[2, 0])),
    "out_of_bounds indirect_cells_below_0: -1 cells",
    tokens(run_of(MANY[:5], [0, 0], cells=-1)),
    "out_of_bounds indirect_more_cells: more cells than the group has",
    tokens(run_of(MANY[:6], [0, 1])),
    "out_of_bounds indirect_more_cells_in_a_run: more cells than the group of a run has, though "
    "not more than the column",
    tokens(run_of(b"\7", [0, 0], rows=[0, 0]), run_of(MANY[:5], IN_ORDER)),
    "out_of_bounds indirect_at_first_beyond: a row that is longer than the cells, without an index",
    tokens(run_of(MANY[:2])),
    "out_of_bounds indirect_beyond: a row that ends behind the cells",
    tokens(run_of(MANY[:4], [2, 2])),
    "out_of_bounds indirect_below_0: a row that begins before the cells",
    tokens(run_of(MANY[:4], [0, -1])),
    "out_of_bounds indirect_overflow: a row at 2^63 - 1, whose end overflows",
    tokens(run_of(MANY[:4], [0, 2**63 - 1])),
    "out_of_bounds indirect_empty_beyond: an empty row that begins behind the cells",
    tokens(run_of(MANY[:3], [4, 0]), lengths=[0, 3]),
    "out_of_bounds indirect_in_no_buffer: cells in a buffer that there is not",
    tokens(run_of(MANY[:5], IN_ORDER, buffer=1)),
    "out_of_bounds indirect_in_buffer_below_0: cells in buffer -1",
    tokens(run_of(MANY[:5], IN_ORDER, buffer=-1)),
    "out_of_bounds indirect_offset_below_0: cells at -1",
    tokens(run_of(MANY[:5], IN_ORDER, offset=-1)),
    "out_of_bounds indirect_offset_beyond: cells at 2^63 - 1",
    tokens(run_of(MANY[:5], IN_ORDER, offset=2**63 - 1)),
    "out_of_bounds indirect_index_in_no_buffer: an index in a buffer that there is not",
    tokens(run_of(MANY[:5], [0, 0], index_buffer=3)),
    "out_of_bounds indirect_index_in_buffer_below_0: an index in buffer -2",
    tokens(run_of(MANY[:5], [0, 0], index_buffer=-2)),
    "out_of_bounds indirect_index_beyond: an index that ends behind the payload",
    tokens(run_of(MANY[:5], [0, 0], index_offset=2**62)),
    "out_of_bounds indirect_index_before: an index that begins before it",
    tokens(run_of(MANY[:5], [0, 0], index_offset=-8)),
    "unknown_dtype indirect_indirect: cells of a run that are indirect",
    tokens(run_of(MANY[:5], IN_ORDER, stored=65)),
    "unknown_dtype indirect_index_indirect: an index that is indirect",
    tokens(run_of(MANY[:5], [0, 0], index_stored=65)),
    "unknown_dtype indirect_index_too_wide: an index of eight bytes that is called narrow",
    tokens(run_of(MANY[:5], [0, 0], index_stored=24)),
    "unknown_dtype indirect_floats_narrow: cells of float32 in two bytes",
    tokens(run_of(MANY, IN_ORDER, stored=18), dtype="float32"),
    "unknown_dtype indirect_stored_below_0: cells that are stored as -1",
    tokens(run_of(MANY[:5], IN_ORDER, stored=-1)),
    "unknown_dtype indirect_0_runs: a column of no runs",
    tokens(run_of(MANY[:5], IN_ORDER), stored=64),
    "unknown_dtype indirect_9_runs: a column of nine runs",
    tokens(*[run_of(b"\1", [0, 0], rows=[1, 0])] * 9, lengths=[9, 0]),
    "unknown_dtype indirect_tokens_of_one_object: a column of tokens that says which rows are "
    "one object",
    tokens(run_of(MANY[:5], IN_ORDER), stored=129),
    "bad_record indirect_ragged_dim_2: indirect rows of columns",
    tokens(run_of(MANY[:10], IN_ORDER), inner=[2], dim=2),
    "unknown_dtype indirect_tensor_of_2_runs: a tensor of two runs",
    bad_run(*[run_of(MANY[:1], [0, 0], rows=[1, 0])] * 2, **ROWS_1),
    "bad_record indirect_documents_of_2_runs: documents of two runs",
    documents_of(
        run_of(b"\x92", rows=[1, 1]), run_of(b"\1\2\3", [0, 1], rows=[2, 2]), lengths=[3, 3]
    ),
    "bad_record indirect_rank_0: a tensor of rank 0",
    message(tensor("uint8", [], 0, 0, 65), table(run(1, index=(0, 0), narrow=1)) + b"\7"),
    "out_of_bounds indirect_tensor_beyond: a row of a tensor behind the cells",
    bad_run(run_of(MANY[:2], [0, 2]), **ROWS_1),
    "bad_record indirect_tensor_without_index: rows of a tensor that take no bytes",
    bad_run(run_of(MANY[:1]), **ROWS_1),
    "bad_record indirect_tensor_of_many_rows: more rows of a tensor than the payload has bits",
    message(tensor("uint8", [1 << 40], 0, 0, 65), table(run(1, index=(0, 0), narrow=1))),
    "bad_record indirect_bounds: bounds of views that are indirect",
    message(
        node("TENSOR_VIEWS", children=[tensor(), tensor("int64", (1, 2), 0, 0, 65)]), bytes(80)
    ),
    "bad_value indirect_sparse_indices: indices that are indirect",
    sparse_of(True),
    "out_of_bounds indirect_table_beyond: a table of which one byte is missing",
    message(jagged(0, 1, [5], "uint8", 0, 0, 65), bytes(63), groups=[[0, 0, 1, 5, 5]]),
    "out_of_bounds indirect_tables_overlap: two columns over one table, and no bytes but that",
    message(list_of(*[tensor("uint8", [2], 0, 0, 65)] * 2), table(run(1, index=(0, 0), narrow=1))),
    "bad_record indirect_group_of_column: an indirect column in a group that there is not",
    tokens(run_of(MANY[:5], IN_ORDER), group=3),
    "bad_offsets indirect_other_total: rows that are shorter than the values",
    tokens(run_of(MANY[:5], IN_ORDER), size=6),
    "bad_value indirect_no_document: a row that ends within its document",
    documents_of(run_of(TEXT, [0, 1]), lengths=[5, 4]),
    "bad_value indirect_document_among_messages: rows that are documents, stored as messages",
    documents_of(run_of(TEXT, [0, 0]), lengths=[5, 5], stored=321),
    "bad_value indirect_objects_of_other_lengths: rows that are one object, and of different "
    "lengths",
    documents_of(run_of(b"\x91\xc0", [0, 0]), lengths=[2, 1], stored=129),
    "bad_offsets indirect_documents_of_other_total: rows that are shorter than the documents",
    documents_of(run_of(b"\xc0", [0, 0]), lengths=[1, 1], size=3),
    "out_of_bounds indirect_in_a_row: an indirect column in a message in a row",
    in_a_row(REPEATS),
    "out_of_bounds indirect_in_an_indirect_row: and where that row is one of several with the "
    "same bytes",
    in_a_row(REPEATS, rows=2),
    "out_of_bounds indirect_in_a_row_in_a_row: or in a message in a row of a message in a row",
    in_a_row(in_a_row(REPEATS)),
)
