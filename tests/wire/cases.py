"""Messages by hand that `encode` never writes: good ones, bad ones, and more bad ones.

`golden/good.json` and `golden/bad.json` hold the first two, for readers in any language: JSON with
a message per line (docs/wire-format.md, section 9). `test_hostile.py` gives all of them to every
reader. `python -m tests.wire.test_golden --add` writes a new one to them.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tests.wire import forge
from tests.wire.forge import GROUP, PAYLOAD, RowMessage, int64s, jagged, message, record, tensor

# --- the files ---------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden"
RUN = re.compile(rb"(.)\1{15,}", re.DOTALL)


class Case(NamedTuple):
    """A message by hand, and what any reader must make of it."""

    why: str
    message: Any  # frames, or bytes for a message in one buffer
    reason: str | None = None  # why it is refused; None: it is read


def hex_of(data):
    """Bytes as hex; a run of one byte of 16 or more is a word of its own, such as `00*4096`."""
    words, end = [], 0
    for run in RUN.finditer(data):
        words += [data[end : run.start()].hex(), f"{run[1].hex()}*{len(run[0])}"]
        end = run.end()
    return " ".join(filter(None, [*words, data[end:].hex()]))


def bytes_of(text):
    words = (word.partition("*") for word in text.split())
    return b"".join(bytes.fromhex(word) * int(times or 1) for word, _, times in words)


def entry(why, message, **more):
    """One message as it stands in a file."""
    if isinstance(message, bytes):
        return {"why": why, "blob": hex_of(message), **more}
    return {"why": why, "frames": [hex_of(frame) for frame in message], **more}


def message_of(entry):
    if "blob" in entry:
        return bytes_of(entry["blob"])
    return [bytes_of(lines) for lines in entry["frames"]]


@functools.cache
def load(file):
    return json.loads((GOLDEN / file).read_text())


def lines_of(entries):
    """JSON with a line per message."""
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def cases_of(file):
    return {
        name: Case(entry["why"], message_of(entry), entry.get("reason"))
        for name, entry in load(file).items()
    }


GOOD = cases_of("good.json")
BAD = cases_of("bad.json")
# They ask for what only Python or torch can know, or are nested deeper than must be read.
MAY_ACCEPT = {name for name, entry in load("bad.json").items() if entry.get("may_accept")}
MAY_ACCEPT |= {"a type of device with a line break"}

# --- more, which a reader in another language need not be tested with: "reason: what is wrong" --

INNER = forge.row_message(message(tensor(), b"\7"))
OPEN_ARRAY = b"\xdd\x05\xf5\xe1\x00"  # it claims 100 million items


def wrapping_offsets():
    """Each length is 1 or more as int64 reckons, and they end where they should."""
    cells = int64s(0, 2**63 - 1, -(2**63), -1, 5) + bytes(5)
    return message(
        forge.tensordict([4], {"x": jagged(offset=40)}), cells, groups=[[0, 0, 4, 1, 2**63 - 1]]
    )


def timestamp(form, before=b"", items=0):
    """A value that msgpack takes for its own, after others."""
    return message(None, values=b"\x91\xdc" + (items + 1).to_bytes(2, "big") + before + form)


MORE = {
    title.split(": ", 1)[1]: Case("", made, title.split(": ", 1)[0])
    for title, made in {
        "foreign: a blob with a header of no bytes": forge.blob(message(1), size=0),
        "unknown_dtype: a dtype of torch's that has no cells": message(tensor("qint8"), PAYLOAD),
        "unknown_dtype: a list for a dtype": message(tensor(["int64", "u1"]), PAYLOAD),
        "unknown_dtype: code after a dtype": message(forge.array("<i4; import os"), PAYLOAD),
        "bad_record: a jagged tensor without dims": message(
            jagged(shape=[]), PAYLOAD, groups=[GROUP]
        ),
        "bad_record: 2^124 cells of documents": message(
            forge.object_array([2**62, 2**62], 5), PAYLOAD, groups=[GROUP]
        ),
        "bad_sparse: cells that are not those of the indices": message(
            forge.sparse_coo(tensor("int64", [1, 1]), tensor(shape=[2], offset=8), shape=[3]),
            int64s(0) + b"xy",
        ),
        "bad_value: a stack past the dims of its members": message(
            forge.node("LAZY_STACK", 5, children=[forge.tensordict([1], {})])
        ),
        "bad_value: a component without dims of no cells": message(
            forge.strided_nested(1, 1, 0, (0, 8)), int64s(0) + b"x"
        ),
        "bad_offsets: offsets that fall below 0": message(
            forge.batch(jagged()), int64s(0, -1, 5) + bytes(40), groups=[GROUP]
        ),
        "bad_offsets: offsets whose differences wrap around": wrapping_offsets(),
        "bad_record: a scalar whose bytes are an integer": message(
            record("SCALAR", "<i4", record("BIG_INT", b"\1"))
        ),
        "bad_record: a scalar of three fields": message(record("SCALAR", "<i4", b"1234", 5)),
        "bad_record: a BIG_INT without a field": message(record("BIG_INT")),
        "bad_value: a bool in a torch.Size": message(record("USER", "torch.Size", [True])),
        "bad_value: a type of device with a line break": message(
            forge.user("torch.device", "cuda\n", 0)
        ),
        "unknown_kind: a timestamp of 4 bytes": timestamp(b"\xd6\xff\0\0\0\5"),
        "unknown_kind: a timestamp of 8 bytes": timestamp(b"\xd7\xff" + bytes(8)),
        "unknown_kind: a timestamp behind 500 bytes of 255": timestamp(
            b"\xc7\x0c\xff" + bytes(12), b"\xcc\xff" * 500, 500
        ),
        "bad_value: a row of zeros among messages": forge.message_of_rows(
            INNER, RowMessage(bytes(64))
        ),
        "bad_value: a row that is a part of the magic": forge.message_of_rows(
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
            forge.object_array([10**8], 1), b"\1", groups=[[0, 0, 1, 1, 1]]
        ),
        "out_of_bounds: 10^8 rows of one document": message(
            forge.rows_node(1), b"\1", groups=[[0, 0, 10**8, 0, 1]]
        ),
    }.items()
}
