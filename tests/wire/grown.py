# mypy: disable-error-code="call-arg, misc"
"""Messages of any size, made by hand: many nodes, columns and rows, long documents.

`singles()` has every kind by itself, and `drawn(seed)` several in and next to each other.
`test_growth.py` counts what readers do with n, 2n and 4n of them, `fuzz/weigh.py` weighs them, and
the fuzzer damages them.
"""

import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tests.wire import forge
from tests.wire.forge import Draft, Part, int64s, message, nest, node, record, run_of, tensor, user

SPOILED = {
    "unknown dtype": tensor("float33", []),
    "out of bounds": tensor(buffer=9),
    "bad document": Part(None, [], [record("BIG_INT", b"")]),
    "bad row": node("SPARSE_COO", 0, 0, children=[0, 0]),
}

# --- columns of any number of rows -------------------------------------------------------------

Column = Callable[[Draft, int, int], Part]
"""The i-th of many columns of so many rows."""


def dense(f: Draft, dtype, data, *shape, stored=0):
    return tensor(dtype, shape, *f.put(data), stored=stored)


def lengths_of(i, rows):
    return [(i + row) % 2 * 2 for row in range(rows)]


def ragged(f: Draft, i, rows, *, group=None, each=None):
    total = sum(lengths_of(i, rows)) if each is None else each * rows
    group = f.group(lengths_of(i, rows)) if each is None else f.shared_group([each] * rows)
    return forge.jagged(group, 1, [total], "int64", *f.put(bytes(8 * total)))


def documents(row):
    """Rows of documents, in the ragged group of their lengths."""
    return lambda f, i, rows: forge.rows_of(f, *map(row, range(rows)))


def messages_in_rows(f: Draft, i, rows):
    image = forge.row_message(message(tensor(), b"x"))
    group = f.group([len(image)] * rows)
    return forge.rows_node(len(image) * rows, *f.put(image * rows), group=group, stored=256)


def arrays(shape, **changes):
    """Rows that are arrays of this shape or nil in turn, in a group of their own."""

    def make(f: Draft, i, rows):
        dims = [[1, *shape] if (i + row) % 2 else [0] * (1 + len(shape)) for row in range(rows)]
        return forge.arrays_in_rows(f, dims, **changes)

    return make


def indirect_runs(f: Draft, i, rows):
    """A prefix, other cells, and none."""
    prefix = run_of(b"\0", [0] * rows, rows=[1] * rows, narrow=1)
    others = run_of(b"\0", rows=[1] * rows), run_of(rows=[0] * rows)
    return forge.column(f, "JAGGED", [prefix, *others], [2] * rows)


def indirect_rows(stored):
    """Rows that are one document, as one object or as several."""

    def make(f: Draft, i, rows):
        row = forge.packed([[], i % 100, "x"])
        run = run_of(row, [0] * rows, narrow=1)
        return forge.column(f, "NON_TENSOR_ROWS", [run], [len(row)] * rows, stored=stored)

    return make


COLUMNS: dict[str, Column] = {
    "no cells": lambda f, i, n: dense(f, "int64", b"", n, 0, 2**40),
    "bits": lambda f, i, n: dense(f, "int64", bytes(n), n, 8, stored=1),
    "narrow": lambda f, i, n: dense(f, "int32", bytes(n), n, stored=17),
    "jagged, own group": ragged,
    "jagged, shared group": lambda f, i, n: ragged(f, i, n, each=1),
    "jagged, empty rows": lambda f, i, n: ragged(f, i, n, each=0),
    "strided": lambda f, i, n: forge.strided_nested(
        n, n, 1, f.put(bytes(n)), f.put(int64s(*[1] * n))
    ),
    "strided, no cells": lambda f, i, n: forge.strided_nested(0, n, 1, (0, 0), f.put(bytes(8 * n))),
    "sparse": lambda f, i, n: forge.sparse_coo(
        dense(f, "int64", int64s(*range(n)), 1, n), dense(f, "uint8", bytes(n), n), 1, [n]
    ),
    "lazy stack": lambda f, i, n: node("LAZY_STACK", 0, children=[forge.tensordict([], {})] * n),
    "payload stack": lambda f, i, n: node(
        "NON_TENSOR_STACK", 0, children=[forge.payload([row]) for row in range(n)]
    ),
    "rows": documents(lambda row: row % 100),
    "rows of lists": documents(lambda row: []),
    "rows of records": documents(lambda row: record("TUPLE", row % 100)),
    "rows with marks": documents(lambda row: -57),  # d0 c7: like an extension
    "rows of messages": messages_in_rows,
    "rows of arrays": arrays([2, 1]),
    "rows of tensors": arrays([3], dtype="int16", tensors=1),
    "rows of narrow dims": arrays([1], stored=1),
    "rows of empty arrays": arrays([0, 2]),
    # Rows in a group and cells of their own, of which there are few.
    "indirect": lambda f, i, n: forge.column(
        f, "JAGGED", [run_of(bytes(min(2, i + n)), [0] * n, narrow=1)], lengths_of(i, n)
    ),
    "indirect, shared": lambda f, i, n: forge.column(
        f, "JAGGED", [run_of(f.once("cells", lambda: f.put(b"\7")), cells=1)], [1] * n
    ),
    "indirect, runs": indirect_runs,
    # Of cells so large that few of them are looked at when they are written again, too.
    "indirect tensor": lambda f, i, n: forge.column(
        f, "TENSOR", [run_of(bytes(128), [0] * n, narrow=1)], [1] * n, "int64", [16]
    ),
    "indirect rows": indirect_rows(65),
    "indirect rows of one object": indirect_rows(129),
}

# --- nodes, of which there may be many ---------------------------------------------------------


def byte(f: Draft):
    return tensor("uint8", (1,), *f.put(b"x"))


NODES: dict[str, Callable[[Draft], Part]] = {
    name: lambda f, make=make: make(f, 0, 2) for name, make in COLUMNS.items()
}
NODES |= {
    "BYTES": lambda f: node("BYTES", numbers=[*f.put(b"x"), 1]),
    "ARRAY": lambda f: forge.array("<U2", (1,), *f.put(bytes(8))),
    "ARRAY_ROWS": lambda f: forge.arrays_in_rows(f, [[1, 2], [0, 0]], holder=1),
    "OBJECT_ARRAY": lambda f: forge.object_array([1], 1, *f.put(b"\7"), group=f.group([1])),
    "TENSOR_VIEWS": lambda f: forge.tensor_views(1, [1], f.put(b"x"), f.put(int64s(0, 1))),
    "SPARSE_COO": lambda f: forge.sparse_coo(
        tensor("int64", [1, 1], *f.put(int64s(0))), tensor("int64", [1], *f.put(b"\1"), stored=1)
    ),
    "USER": lambda f: node(
        "USER", "slice", children=[node("TUPLE", children=[None, byte(f), None])]
    ),
    "TENSORDICT": lambda f: forge.tensordict([1], {"a": byte(f)}),
    "LAZY_STACK": lambda f: node("LAZY_STACK", 0, children=[forge.tensordict([], {})]),
    "LIST": lambda f: forge.list_of(byte(f)),
    "TUPLE": lambda f: node("TUPLE", children=[byte(f)]),
    "MAP": lambda f: forge.map_of({"a": byte(f)}),
    "DICT": lambda f: node("DICT", children=[[1], byte(f)]),
    "payload": lambda f: forge.payload(byte(f), 1),
    "document": lambda f: Part(None, [], [{"a": [1]}]),
}

# --- documents: what may stand anywhere --------------------------------------------------------


DOCUMENTS: dict[str, Callable[[int], Any]] = {
    "nil": lambda i: None,
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "str": lambda i: f"text {i}",
    "marked str": lambda i: f"Ç{i}",  # c3 87, and lengths that look like extensions
    "bin": lambda i: b"\xc7" + struct.pack("<i", i),
    "list": lambda i: [],
    "map": lambda i: {f"k{i}": i, "b": {}},
    "BIG_INT": lambda i: record("BIG_INT", (1 << 70 | i).to_bytes(9, "little")),
    "complex": lambda i: user("complex", 0.5, float(i)),
    "TUPLE": lambda i: record("TUPLE", i),
    "SET": lambda i: record("SET", i, i + 1),
    "FROZENSET": lambda i: record("FROZENSET", record("FROZENSET", record("FROZENSET", i))),
    "DICT": lambda i: record("DICT", i, 0, record("TUPLE", i), 0),
    "range": lambda i: user("range", 0, 10**9, i + 1),
    "slice": lambda i: user("slice", i, None, None),
    "NUMBERS": lambda i: record("NUMBERS", "int32", struct.pack("<2i", i, -i)),
    "SCALAR": lambda i: record("SCALAR", "<i4", struct.pack("<i", i)),
    "numpy.str_": lambda i: record("USER", "numpy.str_", f"s{i}"),
    "torch.Size": lambda i: record("USER", "torch.Size", [i, 2]),
    "torch.dtype": lambda i: record("USER", "torch.dtype", "float32"),
    "torch.device": lambda i: user("torch.device", "cpu", None),
    "USER": lambda i: record("USER", "no.such.Type", i),
    "deep list": lambda i: nest(lambda inner: [inner], 20, i),
    "deep tuple": lambda i: nest(lambda inner: record("TUPLE", inner), 20, i),
}
HASHABLE = (
    *("int", "float", "str", "bin", "BIG_INT", "complex", "TUPLE", "FROZENSET", "range"),
    *("SCALAR", "numpy.str_", "torch.Size"),
)
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


def recipe(make: Any) -> Callable[..., Recipe]:
    """What gives the recipe of a function of n and more, from the arguments behind n."""

    def of(*arguments: Any, **options: Any) -> Recipe:
        said = [*map(str, arguments), *(f"{name}={value}" for name, value in options.items())]
        name = f"{make.__name__}({', '.join(said)})"
        batch = make.__name__ in ("columns", "tall")
        return Recipe(name, lambda n: make(n, *arguments, **options), batch)

    return of


@recipe
def beside(n, *names, spoil=None, apart=False):
    """`n` of each of these nodes in a list, in frames and groups of their own or all over the same.

    What is at the same place counts for each of them, so there must be as many bytes.
    """
    f = Draft(apart=apart)
    parts = []
    for name in names:
        made = [NODES[name](f) for _ in range(n if apart else 1)]
        parts += made if apart else made * n
    size = sum(map(len, f.payload))
    bad = [SPOILED[spoil]] if spoil else []
    return f.message(forge.list_of(*parts, *bad), *([] if apart else [bytes(size * (n - 1))]))


@recipe
def columns(n, *names, spoil=None):
    """A batch of two rows and `n` columns of each of these kinds."""
    f = Draft()
    leaves = {f"{name} {i}": COLUMNS[name](f, i, 2) for i in range(n) for name in names}
    return f.message(forge.tensordict([2], leaves | ({"bad": SPOILED[spoil]} if spoil else {})))


@recipe
def tall(n, *names, each=1):
    """A batch of `n` rows and few columns."""
    f = Draft()
    parts = [COLUMNS[name](f, i, n) for i in range(each) for name in names]
    return f.message(forge.tensordict([n], {f"{i}": part for i, part in enumerate(parts)}))


@recipe
def document_of(n, name, shape="list"):
    """One document of `n` others."""
    items = [DOCUMENTS[name](i) for i in range(n)]
    if shape == "keys":
        return message(record("DICT", *(part for item in items for part in (item, None))))
    return message(items if shape == "list" else record(shape, *items))


@recipe
def in_rows(n, name, kind="NON_TENSOR_ROWS", *, messages=False):
    """`n` rows of documents, or of messages of one."""
    items = [DOCUMENTS[name](i) for i in range(n)]
    made = [forge.row_message(message(item)) for item in items] if messages else items
    return forge.message_of_rows(*made, kind=kind)


@recipe
def large(n, what):
    """One thing of `n` parts."""
    return LARGE[what](n)


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
    "views": lambda n: message(
        forge.tensor_views(n, [8], (0, 16 * n)), int64s(*[0, 8] * n) + bytes(8)
    ),
    "string": lambda n: message("x" * n),
    "surrogates": lambda n: message("\ud800" * n),
    "key over much": lambda n: message({"k" * n: [0] * n + [forge.tag("TUPLE")]}),
    "key of a node": lambda n: message(
        forge.map_of({"k" * n: forge.list_of(*[0] * n, SPOILED["unknown dtype"])})
    ),
    "type name": lambda n: message(node("USER", "n" * n, children=[0])),
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
    "many frames": lambda n: message(1, *[b""] * n),
    "forged counts": lambda n: message(None, values=b"\x91" + b"\xdd\x05\xf5\xe1\x00" * n),
    "open maps": lambda n: message(None, schema=b"\x81\xa1a" * n),
    "compressed frames": lambda n: forge.compressed(
        1, [32] * n, *[forge.zstd((b"\7", 32), size=32)] * n
    ),
    "blocks of zstd": lambda n: forge.compressed(
        tensor(shape=[32 * n]), [32 * n], forge.zstd(*[(b"\7", 32)] * n, size=32 * n)
    ),
    "crc": lambda n: message("x" * n, bytes(n), checksum=True),
    "members that collide": lambda n: message(record("SET", *probing_keys(n))),
    "keys that collide": lambda n: message(node("DICT", children=[probing_keys(n), *[None] * n])),
}


def singles() -> list[Recipe]:
    """Every kind by itself, in each of the ways in which it may be many."""
    return [
        *map(beside, NODES),
        *(beside(name, apart=True) for name in NODES),
        *map(columns, COLUMNS),
        *map(tall, COLUMNS),
        *map(in_rows, DOCUMENTS),
        *map(document_of, DOCUMENTS),
        *(document_of(name, shape) for name in HASHABLE for shape in ("keys", "SET")),
        *map(large, LARGE),
    ]


def drawn(seed: int) -> Recipe:
    """The recipe of a seed."""
    rng = random.Random(seed)
    spoil = rng.choice([None, None, *SPOILED])
    few = rng.sample([*COLUMNS], 2)
    kind = rng.choice(["NON_TENSOR_ROWS", "OBJECT_ARRAY"])
    recipes = [
        beside(*rng.sample([*NODES], 2), spoil=spoil),
        columns(*few, spoil=spoil),
        tall(*few, each=rng.choice([1, 3, 10])),
        in_rows(rng.choice([*DOCUMENTS]), kind, messages=True),
    ]
    return rng.choice(recipes)
