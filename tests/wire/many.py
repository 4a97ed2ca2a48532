"""Everything of which a message may hold many, made by hand: columns, values, documents, keys.

A `Forge` is the message under way, and gives each of them its place in the payload. How they lie
beside and inside each other is in `grown.py`.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jagcodec.wire.registry import register_type
from tests.wire.forge import (
    Part,
    array,
    document,
    int64s,
    list_of,
    map_of,
    message,
    node,
    packed,
    record,
    row_message,
    rows_of,
    run,
    sparse_coo,
    strided_nested,
    table,
    tensor_views,
    tensordict,
    user,
)


@dataclass
class Box:
    """A registered type, so that messages can hold one."""

    value: Any


register_type(Box, "growth.Box")


class Forge:
    """A message under way: its payload and its ragged groups.

    Args:
        apart: Whether each buffer is a frame of its own.
        between: Whether an empty frame stands before each buffer.
    """

    def __init__(self, *, apart: bool = False, between: bool = False) -> None:
        self._apart = apart
        self._between = between
        self._frames: list[bytearray] = [bytearray()]
        self.groups: list[list[int]] = []
        self._shared: dict[Any, Any] = {}

    def put(self, data: bytes) -> list[int]:
        """The place of these bytes, which are the message's from now on."""
        if not data:
            return [0, 0]
        if self._between:
            self._frames.append(bytearray())
        if self._apart or self._between:
            self._frames.append(bytearray(data))
            return [len(self._frames) - 1, 0]
        frame = self._frames[0]
        frame.extend(bytes(-len(frame) % 8))
        frame += data
        return [0, len(frame) - len(data)]

    def group(self, lengths: Sequence[int]) -> int:
        """A new ragged group of rows of these lengths."""
        place = [0, 0]
        if len(lengths) > 1:
            offsets = [0]
            for length in lengths:
                offsets.append(offsets[-1] + length)
            place = self.put(int64s(*offsets))
        self.groups.append([*place, len(lengths), min(lengths, default=0), max(lengths, default=0)])
        return len(self.groups) - 1

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was called for this key first."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def shared_group(self, lengths: Sequence[int]) -> int:
        """The ragged group of these lengths, one for the message."""
        return self.once(("group", tuple(lengths)), lambda: self.group(lengths))

    def message(self, root: Any, *more: bytes, checksum: bool = False) -> list[bytes]:
        """The frames of a message of this root."""
        frames = [*map(bytes, self._frames), *more]
        return message(root, *frames, groups=self.groups, checksum=checksum)


# --- columns: what a TensorDict of `rows` rows may hold -----------------------------------------

Column = Callable[[Forge, int, int], Part]
"""The i-th of many columns of so many rows."""


def _tensor(dtype: str, itemsize: int, *inner: int) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        size = itemsize * rows
        for dim in inner:
            size *= dim
        return node("TENSOR", dtype, 1 + len(inner), numbers=[*f.put(bytes(size)), 0, rows, *inner])

    return make


def _bits(f: Forge, i: int, rows: int) -> Part:
    return node("TENSOR", "int64", 2, numbers=[*f.put(bytes(rows)), 1, rows, 8])


def _narrow(f: Forge, i: int, rows: int) -> Part:
    return node("TENSOR", "int32", 1, numbers=[*f.put(bytes(rows)), 17, rows])


def _jagged(f: Forge, group: int, total: int, *inner: int, stored: int = 0, dim: int = 1) -> Part:
    shape = [total, *inner] if dim == 1 else [*inner, total]
    cells = total
    for extent in inner:
        cells *= extent
    size = (cells + 7) // 8 if stored == 1 else 8 * cells
    numbers = [*f.put(bytes(size)), stored, group, *shape]
    return node("JAGGED", "int64", len(shape), dim, numbers=numbers)


def _own_lengths(i: int, rows: int) -> list[int]:
    return [(i + row) % 2 * 2 for row in range(rows)]


def _jagged_own(f: Forge, i: int, rows: int) -> Part:
    lengths = _own_lengths(i, rows)
    return _jagged(f, f.group(lengths), sum(lengths))


def _jagged_own_empty(f: Forge, i: int, rows: int) -> Part:
    return _jagged(f, f.group([0] * rows), 0)


def _jagged_shared(f: Forge, i: int, rows: int) -> Part:
    return _jagged(f, f.shared_group([1] * rows), rows)


def _jagged_shared_empty(f: Forge, i: int, rows: int) -> Part:
    return _jagged(f, f.shared_group([0] * rows), 0)


def _jagged_bits(f: Forge, i: int, rows: int) -> Part:
    return _jagged(f, f.shared_group([2] * rows), 2 * rows, 4, stored=1)


def _jagged_of_nothing(f: Forge, i: int, rows: int) -> Part:
    """Rows of one cell of no bytes."""
    return _jagged(f, f.shared_group([1] * rows), rows, 0, 2**40)


def _jagged_second(f: Forge, i: int, rows: int) -> Part:
    return _jagged(f, f.shared_group([1] * rows), rows, 2, dim=2)


def _jagged_bad_end(f: Forge, i: int, rows: int) -> Part:
    return _jagged(f, f.shared_group([1] * rows), rows + 1)


def _strided(*shape: int) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        cells = rows
        for dim in shape:
            cells *= dim
        places = f.put(bytes(cells)), f.put(int64s(*shape * rows))
        return strided_nested(cells, rows, len(shape), *places)

    return make


def _part(f: Forge, dtype: str, data: bytes, *shape: int, stored: int = 0) -> Part:
    return node("TENSOR", dtype, len(shape), numbers=[*f.put(data), stored, *shape])


def _sparse(coalesced: int, *, stored: int = 0) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        indices = _part(f, "int64", int64s(*range(rows)), 1, rows)
        values = _part(f, "uint8", bytes(rows), rows)
        if stored:
            values = _part(f, "int64", bytes((rows + 7) // 8), rows, stored=1)
        return sparse_coo(indices, values, coalesced, [rows])

    return make


def _sparse_without_cells(f: Forge, i: int, rows: int) -> Part:
    indices, values = _part(f, "int64", b"", 2, 0), _part(f, "float32", b"", 0)
    return sparse_coo(indices, values, 0, [rows, 2**40])


def _nested(*columns: Column) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        leaves = {f"c{j}": column(f, i, rows) for j, column in enumerate(columns)}
        return tensordict([rows], leaves)

    return make


def _stack(column: Column | None, stack_dim: int = 0) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        size, count = ([1], rows) if stack_dim == 0 else ([rows], 1)
        members = [
            tensordict(size, {"a": column(f, i + m, size[0])} if column else {})
            for m in range(count)
        ]
        if stack_dim == 0:
            members = [node("LAZY_STACK", 0, children=[member]) for member in members]
            members = [tensordict([], {}) for _ in range(rows)] if column is None else members
        return node("LAZY_STACK", stack_dim, children=members)

    return make


def _payload(value: Any) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        return node("NON_TENSOR_DATA", 1, numbers=[rows], children=[value])

    return make


def _payload_of(column: Column) -> Column:
    def make(f: Forge, i: int, rows: int) -> Part:
        return node("NON_TENSOR_DATA", 1, numbers=[rows], children=[column(f, i, 2)])

    return make


def _rows(make_row: Callable[[int], Any], *, shared: bool) -> Column:
    """Rows of documents, in a ragged group of their own or in one."""

    def make(f: Forge, i: int, rows: int) -> Part:
        made = [packed(make_row(row if shared else i + row)) for row in range(rows)]
        data = b"".join(made)
        lengths = list(map(len, made))
        group = f.shared_group(lengths) if shared else f.group(lengths)
        return node("NON_TENSOR_ROWS", numbers=[*f.put(data), 0, group, len(data)])

    return make


def image(row: int) -> bytes:
    """A row that is a message: a tensor of one cell."""
    return row_message(message(node("TENSOR", "uint8", 1, numbers=[0, 0, 0, 1]), b"x"))


def _message_rows(f: Forge, i: int, rows: int) -> Part:
    """Rows that are messages, each at a multiple of 64."""
    parts = [image(row) for row in range(rows)]
    data, group = b"".join(parts), f.group(list(map(len, parts)))
    return node("NON_TENSOR_ROWS", numbers=[*f.put(data), 256, group, len(data)])


# Indirect columns


def _table(f: Forge, *runs: list[int]) -> list[int]:
    """The place of a table, and how a column says that it is one."""
    return [*f.put(table(*runs)), 64 + len(runs)]


def _indirect(*, own: bool, index: bool = True) -> Column:
    """Rows of one cell, or two, of one run, in a group and cells of their own or shared ones."""

    def make(f: Forge, i: int, rows: int) -> Part:
        lengths = _own_lengths(i, rows) if own else [1] * rows
        group = f.group(lengths) if own else f.shared_group(lengths)
        cells = min(2, sum(lengths))

        def put() -> tuple[Any, Any]:
            return f.put(bytes(8 * cells)), f.put(bytes((rows + 7) // 8)) if index else None

        place, at = put() if own else f.once(("cells", index, rows), put)
        numbers = run(cells, place, group=group, index=at, narrow=1)
        column = [*_table(f, numbers), group, sum(lengths)]
        return node("JAGGED", "int64", 1, 1, numbers=column)

    return make


def _one_table(f: Forge, i: int, rows: int) -> Part:
    """Columns over one table, each with as many bytes that nothing else names."""
    group = f.shared_group([1] * rows)
    cells = min(rows, 1)
    place = f.once(("table", rows), lambda: _table(f, run(cells, f.put(b"\7"), group=group)))
    f.put(bytes(64))
    return node("JAGGED", "uint8", 1, 1, numbers=[*place, group, rows])


def _several_runs(f: Forge, i: int, rows: int) -> Part:
    """A prefix, other cells, and none."""
    ones, none = f.shared_group([1] * rows), f.shared_group([0] * rows)
    place = f.put(bytes(rows))
    numbers = _table(
        f,
        run(min(rows, 1), place, group=ones, index=place, narrow=1),
        run(rows, place, group=ones),
        run(group=none),
    )
    group = f.shared_group([2] * rows)
    return node("JAGGED", "uint8", 1, 1, numbers=[*numbers, group, 2 * rows])


def _indirect_tensor(f: Forge, i: int, rows: int) -> Part:
    # Of cells so large that few of them are looked at when they are written again, too.
    place = f.put(bytes(128 + rows))
    numbers = run(min(rows, 1), place, index=place, narrow=1)
    return node("TENSOR", "int64", 2, numbers=[*_table(f, numbers), rows, 16])


def _indirect_rows(*, one: bool) -> Column:
    """Rows that are one document, as one object or as several."""

    def make(f: Forge, i: int, rows: int) -> Part:
        document = packed([[], i % 100, "x"])
        group = f.shared_group([len(document)] * rows)
        place, index = f.put(document), f.put(bytes((rows + 7) // 8))
        cells = len(document) if rows else 0
        own = _table(f, run(cells, place, group=group, index=index, narrow=1))
        own[2] = 129 if one else own[2]
        return node("NON_TENSOR_ROWS", numbers=[*own, group, len(document) * rows])

    return make


def _payload_stack(f: Forge, i: int, rows: int) -> Part:
    members = [node("NON_TENSOR_DATA", 0, children=[[row]]) for row in range(rows)]
    return node("NON_TENSOR_STACK", 0, children=members)


COLUMNS: dict[str, Column] = {
    "uint8": _tensor("uint8", 1),
    "bfloat16 x 3": _tensor("bfloat16", 2, 3),
    "no cells": _tensor("int64", 8, 0),
    "no cells, 2^40": _tensor("int64", 8, 0, 2**40),
    "bits": _bits,
    "narrow": _narrow,
    "jagged, own group": _jagged_own,
    "jagged, own empty group": _jagged_own_empty,
    "jagged, shared group": _jagged_shared,
    "jagged, shared empty group": _jagged_shared_empty,
    "jagged bits": _jagged_bits,
    "jagged of nothing": _jagged_of_nothing,
    "jagged at dim 2": _jagged_second,
    "strided rank 0": _strided(),
    "strided (1,)": _strided(1),
    "strided (0,)": _strided(0),
    "strided (1, 0)": _strided(1, 0),
    "sparse": _sparse(0),
    "sparse coalesced": _sparse(1),
    "sparse bits": _sparse(0, stored=1),
    "sparse, no cells": _sparse_without_cells,
    "nested, empty": _nested(),
    "nested tensor": _nested(_tensor("uint8", 1)),
    "nested jagged, shared": _nested(_jagged_shared_empty),
    "nested jagged, own": _nested(_jagged_own),
    "nested objects": _nested(_payload("x"), _rows(lambda row: row % 100, shared=True)),
    "nested twice": _nested(_nested(_jagged_shared)),
    "lazy stack, empty": _stack(None),
    "lazy stack of stacks": _stack(_tensor("uint8", 1)),
    "lazy stack, dim 1": _stack(_jagged_shared, 1),
    "payload": _payload("x"),
    "payload dict": _payload({"a": [1, 2.5, None], "b": "text"}),
    "payload records": _payload(record("TUPLE", record("SET", 1, 2), record("BIG_INT", b"\1" * 9))),
    "payload tensor": _payload_of(_tensor("uint8", 1)),
    "rows, own group": _rows(lambda row: row % 100, shared=False),
    "rows, shared group": _rows(lambda row: row % 100, shared=True),
    "rows of lists": _rows(lambda row: [], shared=True),
    "rows of records": _rows(lambda row: record("TUPLE", row % 100), shared=True),
    "rows with marks": _rows(lambda row: -57, shared=True),  # d0 c7: like an extension
    "rows of messages": _message_rows,
    "payload stack": _payload_stack,
    "indirect": _indirect(own=True),
    "indirect, shared": _indirect(own=False),
    "indirect, at first": _indirect(own=True, index=False),
    "indirect, one table": _one_table,
    "indirect, runs": _several_runs,
    "indirect tensor": _indirect_tensor,
    "indirect rows": _indirect_rows(one=False),
    "indirect rows of one object": _indirect_rows(one=True),
}


# --- values: what may stand anywhere -------------------------------------------------------------

Value = Callable[[Forge, int], Part]
"""The i-th of many values."""


def _rows_column(name: str, rows: int) -> Value:
    return lambda f, i: COLUMNS[name](f, i, rows)


def _data(kind: str, dtype: Any, itemsize: int, *shape: int) -> Value:
    def make(f: Forge, i: int) -> Part:
        size = itemsize
        for dim in shape:
            size *= dim
        return array(dtype, list(shape), *f.put(bytes(size)))

    return make


def _objects(shape: Sequence[int], *items: Any, shared: bool = False) -> Value:
    rows = rows_of(*items)

    def make(f: Forge, i: int) -> Part:
        lengths = [b - a for a, b in zip(rows.bounds, rows.bounds[1:], strict=False)]
        group = f.shared_group(lengths) if shared else f.group(lengths)
        numbers = [*f.put(rows.data), 0, group, len(rows.data), *shape]
        return node("OBJECT_ARRAY", len(shape), numbers=numbers)

    return make


def _views(f: Forge, i: int) -> Part:
    return tensor_views(2, [4], f.put(bytes(4)), f.put(int64s(0, 1, 1, 2)))


def _overlap(f: Forge, i: int) -> Part:
    """All of them at one place: refused unless the payload has bytes for each."""
    place = f.once("overlap", lambda: f.put(bytes(8)))
    return array("<U2", [1], *place)


def _doc(make: Callable[[int], Any]) -> Value:
    return lambda f, i: document(make(i))


def _big(value: int) -> list[Any]:
    return record("BIG_INT", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


DOCUMENTS: dict[str, Callable[[int], Any]] = {
    "nil": lambda i: None,
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "str": lambda i: f"text {i}",
    "marked str": lambda i: f"Ç{i}",  # c3 87, and lengths that look like extensions
    "bin": lambda i: b"\xc7" + struct.pack("<i", i),
    "list": lambda i: [],
    "list of lists": lambda i: [[[]], [0]],
    "map": lambda i: {"a": i, "b": {}},
    "map of keys": lambda i: {f"k{i}": 1},
    "BIG_INT": lambda i: _big(1 << 70 | i),
    "complex": lambda i: user("complex", 0.5, float(i)),
    "TUPLE": lambda i: record("TUPLE", i),
    "SET": lambda i: record("SET", i, i + 1),
    "FROZENSET": lambda i: record("FROZENSET", i),
    "FROZENSETs": lambda i: record("FROZENSET", record("FROZENSET", record("FROZENSET", i))),
    "DICT": lambda i: record("DICT", i, 0, record("TUPLE", i), 0),
    "range": lambda i: user("range", 0, 10**9, i + 1),
    "slice": lambda i: user("slice", i, None, None),
    "NUMBERS": lambda i: record("NUMBERS", "int32", struct.pack("<2i", i, -i)),
    "NUMBERS, empty": lambda i: record("NUMBERS", "bool", b""),
    "SCALAR": lambda i: record("SCALAR", "<i4", struct.pack("<i", i)),
    "numpy.str_": lambda i: record("USER", "numpy.str_", f"s{i}"),
    "torch.Size": lambda i: record("USER", "torch.Size", [i, 2]),
    "torch.dtype": lambda i: record("USER", "torch.dtype", "float32"),
    "torch.device": lambda i: user("torch.device", "cpu", None),
    "USER": lambda i: record("USER", "growth.Box", {"value": i}),
    "deep list": lambda i: nest(lambda inner: [inner], 20, i),
    "deep tuple": lambda i: nest(lambda inner: record("TUPLE", inner), 20, i),
}


def _slice_node(part: Part) -> Part:
    return node("USER", "slice", children=[node("TUPLE", children=[None, part, None])])


def nest(wrap: Callable[[Any], Any], levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = wrap(value)
    return value


VALUES: dict[str, Value] = {
    **{name: _doc(make) for name, make in DOCUMENTS.items()},
    **{f"{name} [1]": _rows_column(name, 1) for name in COLUMNS},
    **{f"{name} [2]": _rows_column(name, 2) for name in COLUMNS},
    "tuple node": lambda f, i: node("TUPLE"),
    "list node": lambda f, i: node("LIST"),
    "map node": lambda f, i: node("MAP", [f"k{i}"], children=[0]),
    "dict node": lambda f, i: node("DICT", children=[[i], 0]),
    "slice node": lambda f, i: _slice_node(node("LIST", children=[i])),
    "bytes": lambda f, i: node("BYTES", numbers=[*f.put(b"x"), 1]),
    "no bytes": lambda f, i: node("BYTES", numbers=[0, 0, 0]),
    "array": _data("ARRAY", "|u1", 1, 1),
    "array of text": _data("ARRAY", "<U2", 8, 1),
    "array of nothing": _data("ARRAY", "|S0", 0, 2, 3),
    "array of no cells": _data("ARRAY", "<f8", 8, 0, 2**40),
    "array of dates": _data("ARRAY", "<M8[ns]", 8, 1),
    "overlap": _overlap,
    "objects": _objects([1], 0),
    "objects, shared": _objects([2], 0, 1, shared=True),
    "objects of messages": _objects([1], image(0)),
    "no objects": _objects([0, 2**40]),
    "views": _views,
    "no views": lambda f, i: tensor_views(0, [0]),
    "user": lambda f, i: node("USER", "growth.Box", children=[map_of({"value": _views(f, i)})]),
    "stranger": lambda f, i: node("USER", "no.such.Type", children=[0]),
    "batch of rank 0": lambda f, i: tensordict([], {"a": node("NON_TENSOR_DATA", 0, children=[0])}),
    "empty lazy stack": lambda f, i: node("LAZY_STACK", 0),
    "empty stack": lambda f, i: node("NON_TENSOR_STACK", 0),
    "jagged, bad end": lambda f, i: _jagged_bad_end(f, i, 2),
}

WRAPS: dict[str, Callable[[Part], Part]] = {
    "TUPLE": lambda part: node("TUPLE", children=[part]),
    "LIST": lambda part: list_of(part),
    "MAP": lambda part: map_of({"a": part}),
    "DICT": lambda part: node("DICT", children=[[1], part]),
    "NON_TENSOR_DATA": lambda part: node("NON_TENSOR_DATA", 1, numbers=[1], children=[part]),
    "TENSORDICT": lambda part: tensordict([1], {"a": part}),
    "USER": lambda part: node("USER", "growth.Box", children=[map_of({"value": part})]),
}


# --- keys ----------------------------------------------------------------------------------------


def probing_keys(count: int) -> list[int]:
    """Integers of distinct hashes that share their way through a dict of CPython.

    Most of them fill a piece of the orbit that probing follows once the bits of a hash are used up.
    The others come to the first half of that piece, by slots that are taken, and go on to its end.
    """
    mask = 7
    while (mask + 1) * 2 // 3 < count:
        mask = 2 * mask + 1
    orbit, slot = [], 0
    for _ in range(count - count // 7):
        orbit.append(slot)
        slot = (5 * slot + 1) & mask
    slots = np.array(orbit, dtype=np.int64)
    place = np.full(mask + 1, mask)
    place[slots] = np.arange(len(orbit))
    late: list[int] = []
    for lap in range(1, 4096):
        keys = slots + lap * (mask + 1)
        at, perturb, taken = slots, keys, np.ones(len(keys), dtype=bool)
        while perturb.any():
            perturb = perturb >> 5
            at = (5 * at + perturb + 1) & mask
            taken &= place[at] < mask
        late += keys[taken & (place[at] < len(orbit) // 2)].tolist()
        if len(late) >= count - len(orbit):
            break
    return [*orbit, *late][:count]


def collide(kind: str) -> Callable[[Forge, int, int], Part]:
    def make(f: Forge, n: int, rows: int) -> Part:
        keys = probing_keys(n)
        if kind == "SET":
            return document(record("SET", *keys))
        if kind == "DICT":
            return document(record("DICT", *(part for key in keys for part in (key, None))))
        return node("DICT", children=[keys, *[None] * n])

    return make
