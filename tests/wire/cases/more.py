"""More that any reader must refuse, and that a reader in another language need not be tested with.

Their titles are "reason: what is wrong", and what is wrong is their name.
"""

import msgpack

from tests.wire.cases.pieces import (
    GROUP,
    PAYLOAD,
    batch,
    components_of,
    documents_inside,
    sparse,
)
from tests.wire.cases.table import Case
from tests.wire.forge import (
    RowMessage,
    array,
    blob,
    header,
    int64s,
    jagged,
    list_of,
    message,
    message_of_rows,
    node,
    object_array,
    packed,
    record,
    row_message,
    rows_node,
    strided_nested,
    tensor,
    tensordict,
)

INNER = row_message(message(tensor(), b"\7"))
OPEN_ARRAY = b"\xdd\x05\xf5\xe1\x00"  # it claims 100 million items
OPEN_MAP = b"\xdf\x05\xf5\xe1\x00\xa1a"


def of_part(part):
    """A message of a node over the payload of two rows."""
    return message(part, PAYLOAD, groups=[GROUP])


def offsets(*numbers):
    return message(batch(jagged()), int64s(*numbers) + bytes(40), groups=[GROUP])


def wrapping_offsets():
    """Each length is 1 or more as int64 reckons, and they end where they should."""
    cells = int64s(0, 2**63 - 1, -(2**63), -1, 5) + bytes(5)
    return message(
        tensordict([4], {"x": jagged(offset=40)}), cells, groups=[[0, 0, 4, 1, 2**63 - 1]]
    )


def timestamps(form, before=b"", items=0):
    """A value that msgpack takes for its own, after others."""
    return message(None, values=b"\x91\xdc" + (items + 1).to_bytes(2, "big") + before + form)


MORE = {
    title.split(": ", 1)[1]: Case("", made, title.split(": ", 1)[0])
    for title, made in {
        # headers
        "foreign: a frame that is an integer": [3],
        "foreign: an empty buffer": b"",
        "foreign: a blob without the first byte of its magic": b"J" + blob(message(1))[1:],
        "foreign: a blob with a header of no bytes": blob(message(1), size=0),
        "frame_size: a blob that claims a longer header": blob(message(1), size=1 << 20),
        "foreign: a header with a fifth key, its values again": [
            b"\x85" + header(1)[1:] + packed("values") + packed(b"\x91\2")
        ],
        "bad_header: numbers that are text": message(1, fields={"numbers": "x"}),
        "bad_header: a map with nil for a key": message(1, values=b"\x91\x81\xc0\1"),
        # nodes
        "unknown_dtype: a dtype of torch's that has no cells": of_part(tensor("qint8")),
        "unknown_dtype: an integer for a dtype": of_part(tensor(7)),
        "unknown_dtype: a list for a dtype": of_part(tensor(["int64", "u1"])),
        "unknown_dtype: code after a dtype": of_part(array("<i4; import os")),
        "out_of_bounds: a dtype of 16 GB": of_part(array("<U4000000000")),
        "out_of_bounds: two arrays of text over the same bytes": message(
            list_of(*[array("<U100")] * 2), bytes(400)
        ),
        "bad_record: a rank that is a float": of_part(node("TENSOR", "uint8", 1.0)),
        "bad_record: a jagged tensor without dims": of_part(jagged(shape=[])),
        "out_of_bounds: a tensor without a payload": message(tensor("int64", [3])),
        "out_of_bounds: a byte string in no buffer": message(
            node("NON_TENSOR_DATA", 1, numbers=[1], children=[node("BYTES", numbers=[0, 0, 9])])
        ),
        "bad_offsets: more cells than documents": of_part(object_array([2**40], 6)),
        "bad_record: 2^124 cells of documents": of_part(object_array([2**62, 2**62], 5)),
        "bad_value: one key for two children": message(
            node("DICT", children=[[1], tensor(), tensor()]), b"xy"
        ),
        "bad_value: a list for a key of a node": message(
            node("DICT", children=[[[]], tensor()]), b"x"
        ),
        "bad_sparse: cells that are not those of the indices": message(
            sparse(tensor("int64", [1, 1]), tensor(shape=[2], offset=8)), int64s(0) + b"xy"
        ),
        "bad_record: an integer for a column's name": message(
            node("TENSORDICT", 1, [1], numbers=[1], children=[tensor()]), b"x"
        ),
        "bad_rows: a batch of 2^30 rows": message(tensordict([2**30], {})),
        "bad_value: a stack past the dims of its members": message(
            node("LAZY_STACK", 5, children=[tensordict([1], {})])
        ),
        "bad_value: a component without dims of no cells": components_of([(0,)], 1, rank=0),
        # groups
        "bad_offsets: offsets that fall below 0": offsets(0, -1, 5),
        "bad_offsets: offsets that end at 2^62": offsets(0, 2, 2**62),
        "bad_offsets: offsets whose differences wrap around": wrapping_offsets(),
        "bad_offsets: a min above the shortest row": message(
            jagged(), PAYLOAD, groups=[[0, 0, 2, 3, 3]]
        ),
        "bad_offsets: a max below the longest row": message(
            jagged(), PAYLOAD, groups=[[0, 0, 2, 2, 2]]
        ),
        # documents
        "unknown_kind: an extension that vLLM unpickles": message([msgpack.ExtType(5, b"x")]),
        "bad_record: a scalar whose bytes are an integer": message(
            record("SCALAR", "<i4", record("BIG_INT", b"\1"))
        ),
        "bad_record: a scalar of three fields": message(record("SCALAR", "<i4", b"1234", 5)),
        "bad_record: a BIG_INT without a field": message(record("BIG_INT")),
        "bad_value: an integer for the state of a range": message(record("USER", "range", 5)),
        "bad_value: a DICT as a key": message(record("DICT", record("DICT"), 2)),
        "bad_value: NUMBERS in a SET": message(record("SET", record("NUMBERS", "int8", b"1"))),
        "bad_value: a bool in a torch.Size": message(record("USER", "torch.Size", [True])),
        "unknown_dtype: NUMBERS that are pointers": message(record("NUMBERS", "|O", b"12345678")),
        "bad_record: NUMBERS as an array": message(record("NUMBERS", "int8", [1])),
        "bad_record: a list for the name of a type": message(record("USER", [], 5)),
        "unknown_kind: a timestamp of 4 bytes": timestamps(b"\xd6\xff\0\0\0\5"),
        "unknown_kind: a timestamp of 8 bytes": timestamps(b"\xd7\xff" + bytes(8)),
        "unknown_kind: a timestamp of 12 bytes": timestamps(b"\xc7\x0c\xff" + bytes(12)),
        "unknown_kind: a timestamp behind 500 bytes of 255": timestamps(
            b"\xd6\xff\0\0\0\5", b"\xcc\xff" * 500, 500
        ),
        "unknown_kind: a timestamp behind a long text": timestamps(
            b"\xd6\xff\0\0\0\5", packed("text" * 500), 1
        ),
        # rows
        "bad_value: a row of zeros among messages": message_of_rows(INNER, RowMessage(bytes(64))),
        "bad_value: a byte more behind a message in a row": message_of_rows(
            RowMessage(INNER + b"\0"), "other"
        ),
        "bad_value: a row that is a part of the magic": message_of_rows(
            RowMessage(b"jagcode"), "a"
        ),
        "bad_header: a list that claims 100 million items in a row": message_of_rows(
            OPEN_ARRAY * 200 + bytes(2000), 1
        ),
        # depth
        "bad_header: 100,000 arrays in a schema": message(None, schema=b"\x91" * 100_000 + b"\x13"),
        "too_deep: 900 tuples in a schema": message(None, schema=b"\x92\x13" * 900 + b"\xc0"),
        "bad_header: 100,000 lists in a document": message(None, values=b"\x91" * 100_000 + b"\1"),
        "bad_header: 100,000 maps in a document": message(
            None, values=b"\x91" + b"\x81\xa1a" * 100_000 + b"\1"
        ),
        "too_deep: 900 records in each other in a row": message_of_rows(documents_inside(900)),
        # claims
        "bad_header: lists that claim 100 million items": message(
            None, values=b"\x91" + OPEN_ARRAY * 200 + bytes(2000)
        ),
        "bad_header: maps that claim 100 million items": message(
            None, values=b"\x91" + OPEN_MAP * 200 + bytes(2000)
        ),
        "bad_header: a schema that claims 100 million items": message(
            None, schema=OPEN_ARRAY * 200 + bytes(2000)
        ),
        "bad_header: 10^15 groups and frames": message(None, counts=[10**15, 10**15]),
        "bad_value: 10^8 cells of one document": message(
            object_array([10**8], 1), b"\1", groups=[[0, 0, 1, 1, 1]]
        ),
        "out_of_bounds: 10^8 rows of one document": message(
            rows_node(1), b"\1", groups=[[0, 0, 10**8, 0, 1]]
        ),
        "out_of_bounds: 10^9 cells stored as bits": of_part(tensor("int64", [10**9], stored=1)),
        "out_of_bounds: 10^9 components without cells": of_part(strided_nested(0, 10**9)),
        "out_of_bounds: 10^9 components without dims": of_part(strided_nested(1, 10**9, 0)),
    }.items()
}
