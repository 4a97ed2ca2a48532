"""Reads the kept messages, and those of a file, without torch, beside the second reader.

`test_without_torch.py` runs it. It imports neither torch nor what needs it, and prints how many
columns of each kind it compared.
"""

import collections
import json
import sys
from pathlib import Path

import numpy as np

from jagcodec import JagcodecError, concat_rows, open_wire, to_rows
from jagcodec.types import ColumnArrays
from jagcodec.wire.read.wire_batch import WireBatch
from tests.wire import spec_reader

GOLDEN = Path(__file__).parent / "golden"
NEEDS_TORCH = ("SPARSE_COO", "STRIDED_NESTED", "LAZY_STACK", "NON_TENSOR_STACK", "USER")
IN_NUMPY = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
IN_NUMPY += ["bool", "float16", "float32", "float64", "complex64", "complex128"]

seen: collections.Counter[str] = collections.Counter()


def bytes_of(text):
    words = (word.partition("*") for word in text.split())
    return b"".join(bytes.fromhex(data) * int(count or 1) for data, _, count in words)


def messages():
    files = [GOLDEN / "encoded.json", GOLDEN / "good.json", *map(Path, sys.argv[1:])]
    for file in files:
        for name, entry in json.loads(file.read_text()).items():
            frames = [bytes_of(frame) for frame in entry.get("frames", ())]
            yield name, frames or bytes_of(entry["blob"])


def batch_in(value):
    """The columns of the one batch of a message as the second reader gives it; else None."""
    kind = value[0] if type(value) is tuple else None
    if kind == "TENSORDICT":
        return value[2] if value[1] else None
    if kind == "USER" and value[1] == "jagcodec.BatchedDataDict":
        return value[2][0]
    if kind == "USER" and value[1] == "collections.OrderedDict" and type(value[2]) is dict:
        value = value[2]
    if type(value) is dict:
        found = [x for x in value.values() if type(x) is tuple and x[0] == "TENSORDICT"]
        return found[0][2] if len(found) == 1 and found[0][1] else None
    return None


def check_array(found, dtype, shape, data):
    assert type(found) is np.ndarray or np.isscalar(found), type(found)
    found = np.asarray(found)
    itemsize = spec_reader.SIZES[dtype]
    assert found.dtype == np.dtype(dtype if dtype in IN_NUMPY else f"u{itemsize}"), found.dtype
    assert (tuple(found.shape), found.tobytes()) == (tuple(shape), bytes(data))


def check(found, expected):
    """Whether a value is what the second reader says; of cells, bit for bit."""
    kind = expected[0] if type(expected) is tuple else type(expected).__name__
    seen[kind] += 1
    if type(expected) is list:
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            check(each, other)
    elif type(expected) is dict:
        assert list(found) == list(expected)
        for name, other in expected.items():
            check(found[name], other)
    elif type(expected) is not tuple:
        assert (type(found), repr(found)) == (type(expected), repr(expected))
    elif kind == "TENSOR":
        check_array(found, *expected[1:])
    elif kind == "JAGGED":
        _, dtype, _, dim, rows = expected
        assert (type(found), found.ragged_dim) == (ColumnArrays, dim - 1)
        assert len(found.unbind()) == len(rows)
        for row, (shape, data) in zip(found.unbind(), rows, strict=True):
            check_array(row, dtype, shape, data)
    elif kind == "ARRAY":
        _, dtype, shape, data = expected
        assert (found.dtype.str, found.shape, found.tobytes()) == (dtype, tuple(shape), data)
    elif kind in ("OBJECT_ARRAY", "NON_TENSOR_ROWS"):
        check(np.asarray(found).reshape(-1).tolist(), expected[-1])
    elif kind == "NON_TENSOR_DATA":
        payload = expected[2]
        of_rows = type(payload) is tuple and payload[0] in ("ARRAY", "OBJECT_ARRAY")
        if of_rows and len(payload[-2]) and payload[-2][0] == len(found):
            check(found, payload)
        else:
            check([*found], [payload] * len(found))
    elif kind == "TENSORDICT":
        assert type(found) is WireBatch
        check_columns(found, expected[2])
    elif kind == "TUPLE":
        assert type(found) is tuple
        check([*found], expected[1])
    elif kind in ("SET", "FROZENSET"):
        assert (type(found).__name__.upper(), len(found)) == (kind, len(expected[1]))
    elif kind == "DICT":
        assert type(found) is dict
        assert len(found) == len(expected[1]) // 2
        check([*found.values()], expected[1][1::2])
    elif kind == "SCALAR":
        assert (found.dtype.str, found.tobytes()) == expected[1:]
    elif kind == "TENSOR_VIEWS":
        for row, (shape, data) in zip(found, expected[2], strict=True):
            check_array(row, expected[1], shape, data)
    else:
        raise AssertionError(f"{kind} has no rule here")


def check_packed(found, state):
    _, dtype, shape, data = state["values"]
    offsets = np.frombuffer(state["cu_seqlens"][3], "<i4").tolist()
    assert found.row_splits.tolist() == offsets
    check_array(found.values, dtype, shape, data)
    seen["PackedColumn"] += 1


def check_is_refused(batch, name):
    text = ""
    try:
        batch[name]
    except JagcodecError as error:
        text = str(error)
    assert repr(name) in text
    assert "pip install torch tensordict" in text or "register_type" in text
    seen["refused"] += 1


def check_columns(batch, columns):
    assert batch.fields == tuple(columns)
    for name, expected in columns.items():
        kind = expected[0] if type(expected) is tuple else None
        if kind == "USER" and expected[1] == "jagcodec.PackedColumn":
            check_packed(batch[name], expected[2])
            check_packed(batch.arrays(name), expected[2])
        elif kind == "USER" and expected[1] == "jagcodec.BatchedDataDict":
            check_columns(batch[name], expected[2][0])
        elif kind in NEEDS_TORCH:
            check_is_refused(batch, name)
        else:
            check(batch[name], expected)
            if kind in ("TENSOR", "JAGGED"):
                check_cells(batch, name, expected)
                assert str(batch.schema[name].dtype) == expected[1]


def check_cells(batch, name, expected):
    """The same column by `arrays`, in chosen rows, in a join, sent on, and as rows."""
    rows = len(batch)
    arrays = batch.arrays(name)
    check(arrays.values if arrays.row_splits is None else arrays, expected)
    backwards = [*range(rows)][::-1]
    one = batch.select([name])
    chosen = one.rows(backwards)
    parts = [one.rows([row]).arrays(name).unbind()[0].tobytes() for row in backwards]
    for other in (
        chosen,
        open_wire(chosen.to_frames()),
        concat_rows([one.rows([row]) for row in backwards] or [one]),
    ):
        assert [np.asarray(row).tobytes() for row in other.arrays(name).unbind()] == parts
        assert [np.asarray(row[name]).tobytes() for row in to_rows(other, as_="array")] == parts
        assert str(other.schema[name].dtype) == expected[1]


def main():
    for name, frames in messages():
        try:
            columns = batch_in(spec_reader.read(frames))
        except spec_reader.RefusedError:  # of a pickle
            continue
        except ModuleNotFoundError as error:  # a message that is compressed
            assert error.name == "zstandard"  # noqa: PT017
            continue
        if columns is None:
            continue
        try:
            batch = open_wire(frames)
            check_columns(batch, columns)
        except Exception as error:
            raise AssertionError(f"message {name}") from error
        seen["messages"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
