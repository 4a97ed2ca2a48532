"""Indirect columns: every number of their tables, bombs, and what `elide` writes.

The golden files hold one message for every way in which a table may be good or bad. Here each
number of tables takes many values, and all readers must come to one verdict.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec import WireFormatError, decode, encode, open_wire
from jagcodec.wire.header import read_header
from jagcodec.wire.schema import ROW_KINDS, runs_of
from jagcodec.wire.spec import MOST_RUNS
from tests.helpers import message_in, nested, size
from tests.oracle import assert_same
from tests.wire import forge
from tests.wire.cases import GOOD
from tests.wire.forge import NUMBERS, TEXT, Draft, batch_of, column, run_of, tensor, tensordict
from tests.wire.forge import message as message_of
from tests.wire.readers import BATCH_READERS, WHOLE_BATCH_READERS, agree, outcome, peak_of, refused

pytestmark = pytest.mark.filterwarnings("ignore")


SAMPLES = (
    *("runs", "empty_rows", "wide", "signed", "at_first", "tensor", "tensor_of_one_cell"),
    *("documents", "documents_at_first", "one_object_inside", "object_array"),
)


def tables_of(frames):
    """Where each table begins, and how many runs it has."""
    header = read_header(bytes(frames[0]))
    nodes = [node for node in header.schema.nodes if node.kind in ROW_KINDS]
    places = [header.numbers[node.number + 1 : node.number + 3] for node in nodes]
    found = [(at, runs_of(node.kind, how)) for node, (at, how) in zip(nodes, places, strict=True)]
    return [(at, runs) for at, runs in found if runs]


def agree_in_batches(frames):
    """One verdict of both readers, and of all ways to read a batch."""
    read = agree(frames)
    for name, reader in BATCH_READERS.items():
        if read or name not in ("rows", "to_frames"):  # a row that is not read may be bad
            found = outcome(reader, frames)
            assert isinstance(found, Exception) != read, (name, found)
            assert read or isinstance(found, WireFormatError), (name, found)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_number_of_a_table_and_of_its_node(name):
    frames = GOOD[f"indirect_{name}"]
    ((start, runs),) = tables_of(frames)
    for at in range(start, start + 64 * runs, 8):
        for value in {*NUMBERS, 2, 4, 5, 34}:
            payload = bytearray(frames[1])
            payload[at : at + 8] = forge.int64s(value)
            agree([frames[0], bytes(payload)], at, value)
            if name != "object_array" and value in (-1, 1, 65, 2**63 - 1):
                agree_in_batches([frames[0], bytes(payload)])
    for at in range(len(forge.Parts(frames[0]).numbers)):
        for value in (*NUMBERS, 2, 4, 5, 66, 67, 71, 73, 128, 130):
            agree(forge.with_number(frames, at, value), at, value)


NOT_MSGPACK, LONGER = b"\xc1" * 5, b"\3text"  # 0xc1 begins nothing, and 3 is an integer of one byte


def in_turn(kind, stored, *rows):
    """A message of these rows twice, in an array or in a column: documents, which are indirect if
    it says how they are stored; or messages (256).
    """
    if stored in (65, 129):
        runs = run_of(b"".join(rows), [0, len(rows[0])] * 2)
        return batch_of(kind, runs, lengths=[*map(len, rows)] * 2, stored=stored)
    made: Any = rows
    if stored:
        made = [forge.row_message(message_of(None, values=b"\x91" + row)) for row in rows]
    f = Draft()
    root = forge.rows_of(f, *made * 2, kind=kind)
    return f.message(root if kind == "OBJECT_ARRAY" else tensordict([4], {"a": root}))


@pytest.mark.parametrize("bad", [NOT_MSGPACK, LONGER, forge.packed(forge.record("BIG_INT", b""))])
@pytest.mark.parametrize("stored", [0, 65, 129, 256])
def test_a_bad_document_names_its_row(bad, stored):
    """Whether each row is an object of its own, or rows of the same bytes are one."""
    error = refused(decode, in_turn("OBJECT_ARRAY", stored, TEXT, bad))
    assert error.path.removesuffix(" (values)") == "$[1]"
    frames = in_turn("NON_TENSOR_ROWS", stored, TEXT, bad)
    # Rows that are sent on as they are are not read.
    readers = BATCH_READERS if stored in (65, 129) else WHOLE_BATCH_READERS
    for read in (decode, *readers.values()):
        path = refused(read, frames).path.removeprefix("message 0: ")
        assert path.removesuffix(" (values)") == "$.a[1]"
    for rows, first in (([1], 1), ([3, 1], 3), ([2, 0, 1], 1), (slice(2, 4), 3), (slice(1, 3), 1)):
        chosen = open_wire(frames).rows(rows)
        error = refused(type(chosen).to_tensordict, chosen)
        assert error.path.removesuffix(" (values)") == f"$.a[{first}]"
    assert open_wire(frames).rows([2, 0])["a"].tolist() == ["text", "text"]


def test_what_repeats_does_not_repeat_at_every_level():
    """The billion laughs: 60 rows, each of which is a message of 60 rows, and so on."""
    frames = forge.message(tensor("int64", [800], 0, 0, 1), bytes(100))
    for level in range(6):
        row, f = forge.row_message(frames), Draft()
        rows = column(f, "NON_TENSOR_ROWS", [run_of(row)], [len(row)] * 60, stored=321)
        frames = f.message(rows)
        assert agree(frames) == (level == 0)
        assert peak_of(outcome, decode, frames) < 10 << 20


def test_rows_without_cells_count():
    """Thousands of columns of rows without cells take time; so they count as bytes."""
    f = Draft()
    rows, columns = 1 << 16, 3000
    leaf = column(f, "JAGGED", [run_of(b"\7", [0] * rows, narrow=1)], [0] * (rows - 1) + [1])
    f.put(bytes(64 * columns))
    frames = f.message(tensordict([rows], {f"c{i}": leaf for i in range(columns)}))
    assert refused(decode, frames).reason == "too_large"
    assert 64 * size(frames) + (1 << 30) < columns * 8 * rows


def test_tables_and_indices_are_copied_before_they_are_checked():
    """Another process may write to a message while it is read."""
    frames = [bytearray(frame) for frame in GOOD["indirect_anywhere"]]
    batch = open_wire(frames)
    view = message_in(batch).rows(batch.by_name["a"].key)
    frames[1][:] = b"\xff" * len(frames[1])
    assert view.row_starts().tolist() == [1, 1]
    assert batch["a"].values().shape == (5,)


# --- what is written ---------------------------------------------------------------------------


AT = [0, 15, 16, 31, 32, 511, 512, 1999, 2000, 3967, 3968, 3984, 3999]


@pytest.mark.parametrize("at", AT)
def test_rows_that_are_equal_but_for_one_cell(at):
    made = np.tile(np.random.default_rng(0).integers(0, 1 << 40, 4000), (8, 1))
    made[:, at] = range(8)
    texts = ["x" * at + chr(97 + i % 3) + "x" * (3999 - at) for i in range(6)]
    arrays = [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]
    for td in (
        TensorDict({"a": nested(made)}, [8]),
        TensorDict({f"c{i}": nested([row[:2000], row[2000:]]) for i, row in enumerate(made)}, [2]),
        TensorDict({f"c{i}": torch.tensor(row) for i, row in enumerate(made)}, [4000]),
        TensorDict({"a": NonTensorStack(*texts)}, [6]),
        TensorDict({"a": NonTensorStack(*[{"text": text} for text in texts])}, [6]),
        TensorDict({"a": NonTensorStack(*arrays)}, [6]),
    ):
        for narrow in (False, True):
            assert_same(decode(encode(td, elide=True, narrow=narrow)), td)


def test_no_more_runs_are_written_than_readers_take():
    """Each column is the one before it and one more."""
    rng = np.random.default_rng(0)
    ends = [rng.integers(0, 1 << 40, (2, 200)) for _ in range(9)]
    columns = {"end0": nested(ends[0])}
    for i in range(1, len(ends)):
        columns[f"end{i}"] = nested(ends[i])
        columns[f"all{i}"] = nested(np.concatenate(ends[: i + 1], axis=1))
    td = TensorDict(columns, batch_size=[2])
    frames = encode(td, elide=True)
    found = [runs for _, runs in tables_of(frames)]
    assert max(found) == MOST_RUNS
    assert len(found) == len(ends) - 2  # one of them is sent as it is
    assert_same(decode(frames), td)
