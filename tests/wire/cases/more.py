"""More that any reader must refuse, and that a reader in another language need not be tested with.

Their titles are "reason: what is wrong", and what is wrong is their name.
"""

from tests.wire.cases.files import Case
from tests.wire.cases.pieces import GROUP, PAYLOAD, batch, components_of, sparse
from tests.wire.forge import (
    RowMessage,
    array,
    blob,
    int64s,
    jagged,
    message,
    message_of_rows,
    node,
    object_array,
    record,
    row_message,
    rows_node,
    tensor,
    tensordict,
    user,
)

INNER = row_message(message(tensor(), b"\7"))
OPEN_ARRAY = b"\xdd\x05\xf5\xe1\x00"  # it claims 100 million items


def wrapping_offsets():
    """Each length is 1 or more as int64 reckons, and they end where they should."""
    cells = int64s(0, 2**63 - 1, -(2**63), -1, 5) + bytes(5)
    return message(
        tensordict([4], {"x": jagged(offset=40)}), cells, groups=[[0, 0, 4, 1, 2**63 - 1]]
    )


def timestamp(form, before=b"", items=0):
    """A value that msgpack takes for its own, after others."""
    return message(None, values=b"\x91\xdc" + (items + 1).to_bytes(2, "big") + before + form)


MORE = {
    title.split(": ", 1)[1]: Case("", made, title.split(": ", 1)[0])
    for title, made in {
        "foreign: a blob with a header of no bytes": blob(message(1), size=0),
        "unknown_dtype: a dtype of torch's that has no cells": message(tensor("qint8"), PAYLOAD),
        "unknown_dtype: a list for a dtype": message(tensor(["int64", "u1"]), PAYLOAD),
        "unknown_dtype: code after a dtype": message(array("<i4; import os"), PAYLOAD),
        "bad_record: a jagged tensor without dims": message(
            jagged(shape=[]), PAYLOAD, groups=[GROUP]
        ),
        "bad_record: 2^124 cells of documents": message(
            object_array([2**62, 2**62], 5), PAYLOAD, groups=[GROUP]
        ),
        "bad_sparse: cells that are not those of the indices": message(
            sparse(tensor("int64", [1, 1]), tensor(shape=[2], offset=8)), int64s(0) + b"xy"
        ),
        "bad_value: a stack past the dims of its members": message(
            node("LAZY_STACK", 5, children=[tensordict([1], {})])
        ),
        "bad_value: a component without dims of no cells": components_of([(0,)], 1, rank=0),
        "bad_offsets: offsets that fall below 0": message(
            batch(jagged()), int64s(0, -1, 5) + bytes(40), groups=[GROUP]
        ),
        "bad_offsets: offsets whose differences wrap around": wrapping_offsets(),
        "bad_record: a scalar whose bytes are an integer": message(
            record("SCALAR", "<i4", record("BIG_INT", b"\1"))
        ),
        "bad_record: a scalar of three fields": message(record("SCALAR", "<i4", b"1234", 5)),
        "bad_record: a BIG_INT without a field": message(record("BIG_INT")),
        "bad_value: a bool in a torch.Size": message(record("USER", "torch.Size", [True])),
        "bad_value: a type of device with a line break": message(user("torch.device", "cuda\n", 0)),
        "unknown_kind: a timestamp of 4 bytes": timestamp(b"\xd6\xff\0\0\0\5"),
        "unknown_kind: a timestamp of 8 bytes": timestamp(b"\xd7\xff" + bytes(8)),
        "unknown_kind: a timestamp behind 500 bytes of 255": timestamp(
            b"\xc7\x0c\xff" + bytes(12), b"\xcc\xff" * 500, 500
        ),
        "bad_value: a row of zeros among messages": message_of_rows(INNER, RowMessage(bytes(64))),
        "bad_value: a row that is a part of the magic": message_of_rows(
            RowMessage(b"jagcode"), "a"
        ),
        "bad_header: 100,000 arrays in a schema": message(None, schema=b"\x91" * 100_000 + b"\x13"),
        "bad_header: 100,000 maps in a document": message(
            None, values=b"\x91" + b"\x81\xa1a" * 100_000 + b"\1"
        ),
        "bad_header: lists that claim 100 million items": message(
            None, values=b"\x91" + OPEN_ARRAY * 200 + bytes(2000)
        ),
        "bad_value: 10^8 cells of one document": message(
            object_array([10**8], 1), b"\1", groups=[[0, 0, 1, 1, 1]]
        ),
        "out_of_bounds: 10^8 rows of one document": message(
            rows_node(1), b"\1", groups=[[0, 0, 10**8, 0, 1]]
        ),
    }.items()
}
