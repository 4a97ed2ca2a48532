"""Messages of any size, made by hand: many of every kind of column, value and document.

`singles()` has every kind by itself, and `drawn(seed)` several in and next to each other.
`test_growth.py` counts what readers do with n, 2n and 4n of them, and `fuzz/weigh.py` weighs them.
"""

import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from jagcodec.wire.registry import register_type
from tests.wire.cases.indirect import column as indirect_column
from tests.wire.cases.indirect import run_of
from tests.wire.forge import (
    Draft,
    Part,
    array,
    compressed,
    document,
    int64s,
    jagged,
    list_of,
    map_of,
    message,
    message_of_rows,
    node,
    object_array,
    packed,
    record,
    row_message,
    rows_node,
    rows_of,
    sparse_coo,
    strided_nested,
    tag,
    tensor,
    tensor_views,
    tensordict,
    user,
    zstd,
)


@dataclass
class Box:
    """A registered type, so that messages can hold one."""

    value: Any


register_type(Box, "growth.Box")

# --- columns: what a TensorDict of `rows` rows may hold ----------------------------------------

Column = Callable[[Draft, int, int], Part]
"""The i-th of many columns of so many rows."""


def dense(f: Draft, dtype, data, *shape, stored=0):
    return tensor(dtype, shape, *f.put(data), stored=stored)


def ragged(f: Draft, group, total, *inner, stored=0, dim=1):
    shape = [total, *inner] if dim == 1 else [*inner, total]
    cells = math.prod(shape)
    place = f.put(bytes((cells + 7) // 8 if stored == 1 else 8 * cells))
    return jagged(group, dim, shape, "int64", *place, stored=stored)


def own_lengths(i, rows):
    return [(i + row) % 2 * 2 for row in range(rows)]


def own_ragged(f: Draft, i, rows):
    return ragged(f, f.group(own_lengths(i, rows)), sum(own_lengths(i, rows)))


def same_ragged(length, *inner, **options):
    """Columns of one ragged group."""
    return lambda f, i, rows: ragged(
        f, f.shared_group([length] * rows), length * rows, *inner, **options
    )


def strided(*shape):
    def make(f: Draft, i, rows):
        cells = rows * math.prod(shape)
        places = f.put(bytes(cells)), f.put(int64s(*(shape or [1]) * rows))
        return strided_nested(cells, rows, len(shape), *places)

    return make


def sparse(f: Draft, rows, values, coalesced=0):
    indices = dense(f, "int64", int64s(*range(rows)), 1, rows)
    return sparse_coo(indices, values, coalesced, [rows])


def documents(row, *, shared):
    """Rows of documents, in a ragged group of their own or in one."""

    def make(f: Draft, i, rows):
        data = [packed(row(k if shared else i + k)) for k in range(rows)]
        lengths = [*map(len, data)]
        group = f.shared_group(lengths) if shared else f.group(lengths)
        return rows_node(sum(lengths), *f.put(b"".join(data)), group=group)

    return make


def image():
    """A row that is a message: a tensor of one cell."""
    return row_message(message(tensor(), b"x"))


def messages_in_rows(f: Draft, i, rows):
    size = len(image())
    place = f.put(image() * rows)
    group, stored = f.group([size] * rows), 256 if rows else 0
    return rows_node(size * rows, *place, group=group, stored=stored)


def payload(value, rows=()):
    return node("NON_TENSOR_DATA", len(rows), numbers=rows, children=[value])


def indirect(f: Draft, i, rows):
    """Rows in a group and cells of their own, of which there are few."""
    lengths = own_lengths(i, rows)
    cells = bytes(min(2, sum(lengths)))
    return indirect_column(f, "JAGGED", [run_of(cells, [0] * rows, narrow=1)], lengths)


def indirect_shared(f: Draft, i, rows):
    cells = f.once("cells", lambda: f.put(b"\7"))
    run = run_of(cells, cells=min(rows, 1))
    return indirect_column(f, "JAGGED", [run], [1] * rows)


def indirect_runs(f: Draft, i, rows):
    """A prefix, other cells, and none."""
    runs = [
        run_of(bytes(min(rows, 1)), [0] * rows, rows=[1] * rows, narrow=1),
        run_of(bytes(min(rows, 1)), rows=[1] * rows),
        run_of(rows=[0] * rows),
    ]
    return indirect_column(f, "JAGGED", runs, [2] * rows)


def one_table(f: Draft, i, rows):
    """Columns over one table, each with as many bytes that nothing else names."""
    f.put(bytes(64))
    return f.once(("table", rows), lambda: indirect_shared(f, i, rows))


def indirect_tensor(f: Draft, i, rows):
    # Of cells so large that few of them are looked at when they are written again, too.
    run = run_of(bytes(128 * min(rows, 1)), [0] * rows, narrow=1)
    return indirect_column(f, "TENSOR", [run], [1] * rows, "int64", [16])


def indirect_rows(stored):
    """Rows that are one document, as one object or as several."""

    def make(f: Draft, i, rows):
        row = packed([[], i % 100, "x"])
        run = run_of(row if rows else b"", [0] * rows, narrow=1)
        lengths = [len(row)] * rows
        return indirect_column(f, "NON_TENSOR_ROWS", [run], lengths, stored=stored)

    return make


COLUMNS: dict[str, Column] = {
    "uint8": lambda f, i, n: dense(f, "uint8", bytes(n), n),
    "bfloat16 x 3": lambda f, i, n: dense(f, "bfloat16", bytes(6 * n), n, 3),
    "no cells": lambda f, i, n: dense(f, "int64", b"", n, 0, 2**40),
    "bits": lambda f, i, n: dense(f, "int64", bytes(n), n, 8, stored=1),
    "narrow": lambda f, i, n: dense(f, "int32", bytes(n), n, stored=17),
    "jagged, own group": own_ragged,
    "jagged, own empty group": lambda f, i, n: ragged(f, f.group([0] * n), 0),
    "jagged, shared group": same_ragged(1),
    "jagged, shared empty group": same_ragged(0),
    "jagged bits": same_ragged(2, 4, stored=1),
    "jagged of nothing": same_ragged(1, 0, 2**40),
    "jagged at dim 2": same_ragged(1, 2, dim=2),
    "strided ()": strided(),
    "strided (1,)": strided(1),
    "strided (0,)": strided(0),
    "sparse": lambda f, i, n: sparse(f, n, dense(f, "uint8", bytes(n), n)),
    "sparse coalesced": lambda f, i, n: sparse(f, n, dense(f, "uint8", bytes(n), n), 1),
    "sparse bits": lambda f, i, n: sparse(
        f, n, dense(f, "int64", bytes((n + 7) // 8), n, stored=1)
    ),
    "sparse, no cells": lambda f, i, n: sparse_coo(
        dense(f, "int64", b"", 2, 0), dense(f, "float32", b"", 0), 0, [n, 2**40]
    ),
    "nested, empty": lambda f, i, n: tensordict([n], {}),
    "nested": lambda f, i, n: tensordict(
        [n], {"a": own_ragged(f, i, n), "b": tensordict([n], {"c": payload("x", [n])})}
    ),
    "lazy stack": lambda f, i, n: node("LAZY_STACK", 0, children=[tensordict([], {})] * n),
    "lazy stack of stacks": lambda f, i, n: node(
        "LAZY_STACK",
        1,
        children=[tensordict([n], {"a": dense(f, "uint8", bytes(n), n)})],
    ),
    "payload": lambda f, i, n: payload({"a": [1, 2.5, None], "b": "text"}, [n]),
    "payload records": lambda f, i, n: payload(record("TUPLE", record("SET", 1, 2)), [n]),
    "payload tensor": lambda f, i, n: payload(dense(f, "uint8", b"x", 1), [n]),
    "payload stack": lambda f, i, n: node(
        "NON_TENSOR_STACK", 0, children=[payload([row]) for row in range(n)]
    ),
    "rows, own group": documents(lambda row: row % 100, shared=False),
    "rows, shared group": documents(lambda row: row % 100, shared=True),
    "rows of lists": documents(lambda row: [], shared=True),
    "rows of records": documents(lambda row: record("TUPLE", row % 100), shared=True),
    "rows with marks": documents(lambda row: -57, shared=True),  # d0 c7: like an extension
    "rows of messages": messages_in_rows,
    "indirect": indirect,
    "indirect, shared": indirect_shared,
    "indirect, one table": one_table,
    "indirect, runs": indirect_runs,
    "indirect tensor": indirect_tensor,
    "indirect rows": indirect_rows(65),
    "indirect rows of one object": indirect_rows(129),
}

# --- documents and values: what may stand anywhere ---------------------------------------------


def nest(wrap, levels, value):
    for _ in range(levels):
        value = wrap(value)
    return value


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
    "BIG_INT": lambda i: record("BIG_INT", (1 << 70 | i).to_bytes(9, "little")),
    "complex": lambda i: user("complex", 0.5, float(i)),
    "TUPLE": lambda i: record("TUPLE", i),
    "SET": lambda i: record("SET", i, i + 1),
    "FROZENSET": lambda i: record("FROZENSET", record("FROZENSET", record("FROZENSET", i))),
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
HASHABLE = (
    *("int", "float", "str", "bin", "BIG_INT", "complex", "TUPLE", "FROZENSET", "range"),
    *("SCALAR", "numpy.str_", "torch.Size"),
)

Value = Callable[[Draft, int], Part]
"""The i-th of many values."""


def of_rows(name, rows) -> Value:
    return lambda f, i: COLUMNS[name](f, i, rows)


def of_document(name) -> Value:
    return lambda f, i: document(DOCUMENTS[name](i))


def objects(shape, *items) -> Value:
    rows = rows_of(*items)
    lengths = [b - a for a, b in zip(rows.bounds, rows.bounds[1:], strict=False)]
    return lambda f, i: object_array(
        shape, len(rows.data), *f.put(rows.data), group=f.group(lengths), stored=rows.stored
    )


def views(f: Draft, i):
    return tensor_views(2, [4], f.put(bytes(4)), f.put(int64s(0, 1, 1, 2)))


VALUES: dict[str, Value] = {
    **{name: of_document(name) for name in DOCUMENTS},
    **{f"{name} [{rows}]": of_rows(name, rows) for name in COLUMNS for rows in (1, 2)},
    "tuple node": lambda f, i: node("TUPLE"),
    "list node": lambda f, i: node("LIST"),
    "map node": lambda f, i: node("MAP", [f"k{i}"], children=[0]),
    "dict node": lambda f, i: node("DICT", children=[[i], 0]),
    "slice node": lambda f, i: node(
        "USER", "slice", children=[node("TUPLE", children=[None, list_of(i), None])]
    ),
    "bytes": lambda f, i: node("BYTES", numbers=[*f.put(b"x"), 1]),
    "no bytes": lambda f, i: node("BYTES", numbers=[0, 0, 0]),
    "array": lambda f, i: array("|u1", [1], *f.put(b"x")),
    "array of text": lambda f, i: array("<U2", [1], *f.put(bytes(8))),
    "array of nothing": lambda f, i: array("|S0", [2, 3]),
    "array of no cells": lambda f, i: array("<f8", [0, 2**40]),
    "array of dates": lambda f, i: array("<M8[ns]", [1], *f.put(bytes(8))),
    # All of them at one place: refused unless the payload has bytes for each.
    "overlap": lambda f, i: array("<U2", [1], *f.once("overlap", lambda: f.put(bytes(8)))),
    "objects": objects([1], 0),
    "objects of messages": objects([1], image()),
    "no objects": objects([0, 2**40]),
    "views": views,
    "no views": lambda f, i: tensor_views(0, [0]),
    "user": lambda f, i: node("USER", "growth.Box", children=[map_of({"value": views(f, i)})]),
    "stranger": lambda f, i: node("USER", "no.such.Type", children=[0]),
    "empty lazy stack": lambda f, i: node("LAZY_STACK", 0),
    "empty stack": lambda f, i: node("NON_TENSOR_STACK", 0),
    "bad end": lambda f, i: ragged(f, f.shared_group([1, 1]), 3),
}
SPOILED = {
    "unknown dtype": tensor("float33", []),
    "out of bounds": tensor(buffer=9),
    "bad document": document(record("BIG_INT", b"")),
    "bad row": node("SPARSE_COO", 0, 0, children=[0, 0]),
}
WRAPS: list[Callable[[Any], Part]] = [
    list_of,
    lambda part: node("TUPLE", children=[part]),
    lambda part: map_of({"a": part}),
    lambda part: node("DICT", children=[[1], part]),
    lambda part: payload(part, [1]),
]


# --- recipes -----------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How to make a message of any number of units."""

    name: str
    make: Callable[[int], list[bytes]]
    batch: bool = False  # whether its value is a TensorDict

    def of_size(self, size: int, most: int) -> int:
        """How many units make a message of about so many bytes."""
        per_unit = max(1.0, sum(map(len, self.make(64))) / 64)
        return max(16, min(most, int(size / per_unit)))


def beside(*names: str, wrap=None, spoil: str | None = None, **options: bool) -> Recipe:
    """`n` of each of these values in a list, each in containers of its own with `wrap`."""

    def make(n: int) -> list[bytes]:
        f = Draft(**options)
        parts = [VALUES[name](f, i) for name in names for i in range(n)]
        parts = [wrap(part) for part in parts] if wrap else parts
        return f.message(list_of(*parts, *([SPOILED[spoil]] if spoil else [])))

    return Recipe(f"beside({' + '.join(names)}, {spoil}, {options})", make)


def deep(wrap: Callable[[Any], Part], name: str, levels: int) -> Recipe:
    """`n` values spread over many levels of containers in each other."""

    def make(n: int) -> list[bytes]:
        f = Draft()
        part = document(0)
        for level in range(levels):
            few = range(level * n // levels, (level + 1) * n // levels)
            part = wrap(list_of(*(VALUES[name](f, i) for i in few), part))
        return f.message(part)

    return Recipe(f"deep({name}, {levels})", make)


def columns(*names: str, rows: int = 2, spoil: str | None = None, **options: bool) -> Recipe:
    """A batch of few rows and `n` columns of each of these."""

    def make(n: int) -> list[bytes]:
        f = Draft(**options)
        parts = [COLUMNS[name](f, i, rows) for i in range(n) for name in names]
        leaves = {f"{i}": part for i, part in enumerate(parts)}
        return f.message(tensordict([rows], leaves | ({"bad": SPOILED[spoil]} if spoil else {})))

    return Recipe(f"columns({' + '.join(names)}, {rows} rows, {spoil}, {options})", make, True)


def tall(*names: str, each: int = 1) -> Recipe:
    """A batch of `n` rows and few columns."""

    def make(n: int) -> list[bytes]:
        f = Draft()
        parts = [COLUMNS[name](f, i, n) for i in range(each) for name in names]
        return f.message(tensordict([n], {f"{i}": part for i, part in enumerate(parts)}))

    return Recipe(f"tall({each} x {' + '.join(names)})", make, True)


def document_of(name: str, shape: str = "list") -> Recipe:
    """One document of `n` others."""

    def make(n: int) -> list[bytes]:
        items = [DOCUMENTS[name](i) for i in range(n)]
        if shape == "list":
            return message(items)
        if shape == "keys":
            return message(record("DICT", *(part for item in items for part in (item, None))))
        return message(record(shape, *items))

    return Recipe(f"document_of({name}, {shape})", make)


def in_rows(name: str, kind: str = "NON_TENSOR_ROWS", *, messages: bool = False) -> Recipe:
    """`n` rows of documents, or of messages of one."""

    def make(n: int) -> list[bytes]:
        items = [DOCUMENTS[name](i) for i in range(n)]
        made = [row_message(message(item)) for item in items] if messages else items
        return message_of_rows(*made, kind=kind)

    return Recipe(f"in_rows({name}, {kind}, {messages})", make)


def unnamed(name: str, what: str) -> Recipe:
    """`n` values beside `n` frames or ragged groups that nobody names."""

    def make(n: int) -> list[bytes]:
        f = Draft()
        parts = [VALUES[name](f, i) for i in range(n)]
        for _ in range(n if what == "groups" else 0):
            f.group([1])
        more = {"empty frames": b"", "frames": b"x"}
        return f.message(list_of(*parts), *[more[what]] * n if what in more else [])

    return Recipe(f"unnamed({name}, {what})", make)


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


LARGE: dict[str, Callable[[int], list[bytes]]] = {
    "views": lambda n: message(tensor_views(n, [8], (0, 16 * n)), int64s(*[0, 8] * n) + bytes(8)),
    "string": lambda n: message("x" * n),
    "surrogates": lambda n: message("\ud800" * n),
    "key over much": lambda n: message({"k" * n: [0] * n + [tag("TUPLE")]}),
    "key of a node": lambda n: message(
        map_of({"k" * n: list_of(*[0] * n, SPOILED["unknown dtype"])})
    ),
    "type name": lambda n: message(node("USER", "n" * n, children=[0])),
    "dtype name": lambda n: message(tensor("n" * n, [])),
    "big integer": lambda n: message(record("BIG_INT", b"\1" * n)),
    "big integers equal": lambda n: message(
        record("SET", *[record("BIG_INT", bytes([i, 1]) + bytes(n) + b"\1") for i in range(32)])
    ),
    "size": lambda n: message(record("USER", "torch.Size", [*range(n)])),
    "numbers": lambda n: message(record("NUMBERS", "int8", bytes([200]) * n)),
    "bools": lambda n: message(record("NUMBERS", "bool", b"\1" * n)),
    "scalar of text": lambda n: message(record("SCALAR", f"<U{n}", bytes(4 * n))),
    "timestamps under levels": lambda n: message(
        nest(lambda inner: [inner], 60, [-1] * n + [msgpack.Timestamp(5)])
    ),
    "marks": lambda n: message([-57] * n),
    "many frames": lambda n: message(1, *[b""] * n),
    "forged counts": lambda n: message(None, values=b"\x91" + b"\xdd\x05\xf5\xe1\x00" * n),
    "open arrays": lambda n: message(None, values=b"\x91" * n),
    "open maps": lambda n: message(None, schema=b"\x81\xa1a" * n),
    "compressed frames": lambda n: compressed(1, [32] * n, *[zstd((b"\7", 32), size=32)] * n),
    "blocks of zstd": lambda n: compressed(
        tensor(shape=[32 * n]), [32 * n], zstd(*[(b"\7", 32)] * n, size=32 * n)
    ),
    "empty blocks of zstd": lambda n: compressed(
        tensor(shape=[99 * n]), [99 * n], zstd(*[b""] * n, (b"\7", 99 * n), size=99 * n)
    ),
    "crc": lambda n: message("x" * n, bytes(n), checksum=True),
    "members that collide": lambda n: message(record("SET", *probing_keys(n))),
    "keys that collide": lambda n: message(node("DICT", children=[probing_keys(n), *[None] * n])),
}


def large(what: str) -> Recipe:
    """One thing of `n` parts."""
    return Recipe(f"large({what})", LARGE[what])


def singles() -> list[Recipe]:
    """Every kind by itself, in each of the ways in which it may be many."""
    return [
        *map(beside, VALUES),
        *map(columns, COLUMNS),
        *map(tall, COLUMNS),
        *map(in_rows, DOCUMENTS),
        *map(document_of, DOCUMENTS),
        *(document_of(name, shape) for name in HASHABLE for shape in ("keys", "SET")),
        *map(large, LARGE),
        *(unnamed(name, what) for name in ("no bytes", "rows, own group [2]", "objects", "nil")
          for what in ("groups", "empty frames", "frames")),
    ]  # fmt: skip


def drawn(seed: int) -> Recipe:
    """The recipe of a seed."""
    rng = random.Random(seed)
    spoil = rng.choice([None, None, *SPOILED])
    options = {"apart": rng.random() < 0.2, "between": rng.random() < 0.2}
    values: Sequence[str] = rng.sample([*VALUES], 2)
    names = rng.sample([*COLUMNS], rng.choice([1, 2, 3]))
    wrap, kind = rng.choice(WRAPS), rng.choice(["NON_TENSOR_ROWS", "OBJECT_ARRAY"])
    recipes = [
        beside(*values, spoil=spoil, **options),
        beside(values[0], wrap=wrap, spoil=spoil),
        deep(wrap, values[0], rng.choice([2, 10, 45])),
        columns(*names, rows=rng.choice([0, 1, 2, 3, 8]), spoil=spoil, **options),
        tall(*names, each=rng.choice([1, 3, 10])),
        in_rows(rng.choice([*DOCUMENTS]), kind, messages=True),
    ]
    return rng.choice(recipes)
