"""Messages of any size, made by hand: what a reader does with n, 2n and 4n of the same.

`grown(seed)` draws a recipe: which kinds of nodes and records, and how they lie beside and inside
each other. A recipe makes a message of any number of units. `tests/wire/test_growth.py` counts
what readers do with it, and `fuzz/grow.py` looks at the clock and the memory.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from tests.wire.forge import (
    Part,
    RowMessage,
    compressed,
    document,
    int64s,
    list_of,
    map_of,
    message,
    node,
    record,
    row_message,
    tag,
    tensor,
    tensor_views,
    tensordict,
    zstd,
)
from tests.wire.many import (
    COLUMNS,
    DOCUMENTS,
    VALUES,
    WRAPS,
    Forge,
    Value,
    collide,
    image,
    nest,
)

# --- recipes -------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How to make a message of any number of units."""

    name: str
    make: Callable[[int], list[bytes]]
    batch: bool  # whether its value is a TensorDict

    def of_size(self, size: int, most: int = 40_000) -> int:
        """How many units make a message of about so many bytes."""
        units = 64
        per_unit = max(1.0, sum(map(len, self.make(units))) / units)
        return max(16, min(most, int(size / per_unit)))


def _mixed(f: Forge, values: Sequence[Value], n: int, *, turns: bool) -> list[Part]:
    """`n` of each, one sort after the other or in turns."""
    if turns:
        return [value(f, i) for i in range(n) for value in values]
    return [value(f, i) for value in values for i in range(n)]


def _named(parts: Sequence[Part], long: int = 0) -> dict[str, Part]:
    return {f"{i}" + "x" * (long if i == 0 else 0): part for i, part in enumerate(parts)}


_SPOILS: dict[str, Callable[[], Part]] = {
    "unknown dtype": lambda: node("TENSOR", "float33", 0, numbers=[0, 0, 0]),
    "out of bounds": lambda: node("TENSOR", "uint8", 1, numbers=[9, 0, 0, 1]),
    "bad document": lambda: document(record("BIG_INT", b"")),
    "bad row": lambda: node("SPARSE_COO", 0, 0, children=[0, 0]),
}


def beside(*names: str, spoil: str | None = None, turns: bool = False, **options: bool) -> Recipe:
    """`n` of each of these values in a list."""

    def make(n: int) -> list[bytes]:
        f = Forge(**options)
        parts = _mixed(f, [VALUES[name] for name in names], n, turns=turns)
        if spoil:
            parts.append(_SPOILS[spoil]())
        return f.message(list_of(*parts))

    title = " + ".join(names) + (f", then {spoil}" if spoil else "")
    return Recipe(f"beside({title}){_shown(options)}", make, False)


def inside(wraps: Sequence[str], name: str, *, spoil: str | None = None) -> Recipe:
    """`n` values, each in containers of its own."""

    def make(n: int) -> list[bytes]:
        f = Forge()
        parts = []
        for i in range(n):
            part = VALUES[name](f, i)
            for wrap in wraps:
                part = WRAPS[wrap](part)
            parts.append(part)
        if spoil:
            parts.append(_SPOILS[spoil]())
        return f.message(list_of(*parts))

    return Recipe(f"inside({name} in {' in '.join(wraps)}, {spoil})", make, False)


def deep(wraps: Sequence[str], name: str, levels: int = 60, *, spoil: str | None = None) -> Recipe:
    """`n` values spread over many levels of containers in each other."""

    def make(n: int) -> list[bytes]:
        f = Forge()
        part = document(0) if spoil is None else _SPOILS[spoil]()
        for level in range(levels):
            each = [
                VALUES[name](f, i) for i in range(level * n // levels, (level + 1) * n // levels)
            ]
            part = WRAPS[wraps[level % len(wraps)]](list_of(*each, part))
        return f.message(part)

    # Two levels each.
    return Recipe(f"deep({name} in {levels} x {'/'.join(wraps)}, {spoil})", make, False)


def columns(
    *names: str, rows: int = 2, spoil: str | None = None, long: bool = False, **options: bool
) -> Recipe:
    """A batch of few rows and `n` columns of each of these."""

    def make(n: int) -> list[bytes]:
        f = Forge(**options)
        made = [COLUMNS[name] for name in names]
        parts = [column(f, i, rows) for i in range(n) for column in made]
        if spoil:
            parts.append(_SPOILS[spoil]())
        return f.message(tensordict([rows], _named(parts, n if long else 0)))

    title = " + ".join(names) + (f", then {spoil}" if spoil else "")
    return Recipe(f"columns({title}, {rows} rows, long={long}){_shown(options)}", make, True)


def tall(*names: str, each: int = 1, **options: bool) -> Recipe:
    """A batch of `n` rows and few columns."""

    def make(n: int) -> list[bytes]:
        f = Forge(**options)
        parts = [COLUMNS[name](f, i, n) for i in range(each) for name in names]
        return f.message(tensordict([n], _named(parts)))

    return Recipe(f"tall({each} x {' + '.join(names)}){_shown(options)}", make, True)


def in_rows(*names: str, kind: str = "NON_TENSOR_ROWS", levels: int = 1) -> Recipe:
    """`n` rows for each of these values, each a message of one; all in rows of one row."""

    def make(n: int) -> list[bytes]:
        rows = []
        for i in range(n * len(names)):
            inner = Forge()
            part = VALUES[names[i % len(names)]](inner, i)
            rows.append(row_message(inner.message(list_of(part))))
        frames = _in_rows(rows, kind)
        for _ in range(levels - 1):
            frames = _in_rows([row_message(frames)], kind)
        return frames

    return Recipe(f"in_rows({' + '.join(names)}, {kind}, {levels} levels)", make, False)


def message_in_row(name: str, levels: int) -> Recipe:
    """`n` values in a message that lies in a row, in a row, in a row."""

    def make(n: int) -> list[bytes]:
        f = Forge()
        frames = f.message(list_of(*[VALUES[name](f, i) for i in range(n)]))
        for _ in range(levels):
            frames = _in_rows([row_message(frames)], "OBJECT_ARRAY")
        return frames

    return Recipe(f"message_in_row({name}, {levels} levels)", make, False)


def documents_in_rows(*names: str, kind: str = "NON_TENSOR_ROWS", messages: bool = False) -> Recipe:
    """`n` rows of each of these documents, with a message among them or without."""

    def make(n: int) -> list[bytes]:
        values = [DOCUMENTS[names[i % len(names)]](i) for i in range(n * len(names))]
        if messages:
            return _in_rows([image(0), *(row_message(message(value)) for value in values)], kind)
        rows = [_packed(value) for value in values]
        return _in_rows(rows, kind)

    return Recipe(f"documents_in_rows({' + '.join(names)}, {kind}, {messages})", make, False)


def document_of(*names: str, shape: str = "list") -> Recipe:
    """One document of `n` of each of these others."""

    def make(n: int) -> list[bytes]:
        items = [DOCUMENTS[names[i % len(names)]](i) for i in range(n * len(names))]
        if shape == "map":
            return message({f"{i}": item for i, item in enumerate(items)})
        if shape == "list":
            return message(items)
        if shape == "DICT":
            return message(
                record("DICT", *(part for i, it in enumerate(items) for part in (i, it)))
            )
        if shape == "keys":
            return message(record("DICT", *(part for item in items for part in (item, None))))
        return message(record(shape, *items))

    return Recipe(f"document_of({' + '.join(names)}, {shape})", make, False)


def colliding(kind: str) -> Recipe:
    """`n` keys or members that collide in the interpreter."""
    make = collide(kind)
    return Recipe(f"colliding({kind})", lambda n: message(make(Forge(), n, 0)), False)


def unnamed(name: str, what: str) -> Recipe:
    """`n` values beside `n` frames or ragged groups that nobody names."""

    def make(n: int) -> list[bytes]:
        f = Forge()
        parts = [VALUES[name](f, i) for i in range(n)]
        if what == "groups":
            for _ in range(n):
                f.group([1])
            return f.message(list_of(*parts))
        more = {"empty frames": b"", "frames": b"x"}[what]
        return f.message(list_of(*parts), *[more] * n, checksum=name == "nil")

    return Recipe(f"unnamed({name}, {what})", make, False)


def large(what: str) -> Recipe:
    """One thing of `n` parts."""
    return Recipe(f"large({what})", _LARGE[what], False)


def _packed(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")


def _in_rows(rows: Sequence[bytes], kind: str) -> list[bytes]:
    data = b"".join(rows)
    f = Forge()
    stored = 256 if isinstance(rows[0], RowMessage) else 0
    numbers = [*f.put(data), stored, f.group(list(map(len, rows))), len(data)]
    if kind == "OBJECT_ARRAY":
        return f.message(node(kind, 1, numbers=[*numbers, len(rows)]))
    return f.message(node(kind, numbers=numbers))


def _views_of(n: int) -> list[bytes]:
    f = Forge()
    return f.message(tensor_views(n, [8], f.put(bytes(8)), f.put(int64s(*[0, 8] * n))))


_LARGE: dict[str, Callable[[int], list[bytes]]] = {
    "views": _views_of,
    "string": lambda n: message("x" * n),
    "surrogates": lambda n: message("\ud800" * n),
    "key": lambda n: message({"k" * n: [0] * 100}),
    "key over much": lambda n: message({"k" * n: [0] * n + [tag("TUPLE")]}),
    "key of a node": lambda n: message(
        map_of({"k" * n: list_of(*[0] * n, _SPOILS["unknown dtype"]())})
    ),
    "type name": lambda n: message(node("USER", "n" * n, children=[0])),
    "dtype name": lambda n: message(node("TENSOR", "n" * n, 0, numbers=[0, 0, 0])),
    "big integer": lambda n: message(record("BIG_INT", b"\1" * n)),
    "big integers equal": lambda n: message(
        record("SET", *[record("BIG_INT", bytes([i, 1]) + bytes(n) + b"\1") for i in range(32)])
    ),
    "size": lambda n: message(record("USER", "torch.Size", [*range(n)])),
    "numbers": lambda n: message(record("NUMBERS", "int8", bytes([200]) * n)),
    "bools": lambda n: message(record("NUMBERS", "bool", b"\1" * n)),
    "lists of numbers": lambda n: message(
        [record("NUMBERS", "int32", i.to_bytes(4, "little")) for i in range(n)]
    ),
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
}


def _shown(options: dict[str, bool]) -> str:
    return "".join(f" {name}" for name, on in options.items() if on)


# --- which there are -----------------------------------------------------------------------------

HASHABLE = (
    *("int", "float", "str", "bin", "BIG_INT", "complex", "TUPLE", "FROZENSET", "range"),
    *("SCALAR", "numpy.str_", "torch.Size"),
)


def singles() -> list[Recipe]:
    """Every kind by itself, in each of the ways in which it may be many."""
    return [
        *(beside(name) for name in VALUES),
        *(columns(name) for name in COLUMNS),
        *(tall(name) for name in COLUMNS),
        *(documents_in_rows(name) for name in DOCUMENTS),
        *(document_of(name) for name in DOCUMENTS),
        *(document_of(name, shape="keys") for name in HASHABLE),
        *(document_of(name, shape="SET") for name in HASHABLE),
        *(large(what) for what in _LARGE),
        *(colliding(kind) for kind in ("SET", "DICT", "node")),
    ]


def grown(seed: int) -> Recipe:
    """The recipe of a seed."""
    rng = random.Random(seed)
    values, cols, docs = list(VALUES), list(COLUMNS), list(DOCUMENTS)
    spoil = rng.choice([None, None, None, *_SPOILS])
    options = {"apart": rng.random() < 0.2, "between": rng.random() < 0.2}
    wraps = rng.sample(list(WRAPS), rng.choice([1, 1, 2, 3]))
    kind = rng.choice(["NON_TENSOR_ROWS", "OBJECT_ARRAY"])
    few = rng.choice([1, 2, 2, 3])
    how = rng.randrange(100)
    if how < 25:
        names = rng.choices(values, k=2)
        return beside(*names, spoil=spoil, turns=rng.random() < 0.5, **options)
    if how < 55:
        rows = rng.choice([0, 1, 2, 2, 3, 8])
        long = rng.random() < 0.1
        names = rng.choices(cols, k=few)
        return columns(*names, rows=rows, spoil=spoil, long=long, **options)
    if how < 65:
        return tall(*rng.choices(cols, k=few), each=rng.choice([1, 3, 10]), **options)
    if how < 72:
        return inside(wraps, rng.choice(values), spoil=spoil)
    if how < 77:
        levels = rng.choice([2, 10, 45])
        return deep(wraps, rng.choice(values), levels, spoil=spoil)
    if how < 84:
        levels = rng.choice([1, 1, 3, 40])
        return in_rows(*rng.choices(values, k=few), kind=kind, levels=levels)
    if how < 87:
        return message_in_row(rng.choice(values), rng.choice([1, 5, 60]))
    if how < 91:
        names = rng.choices(docs, k=few)
        return documents_in_rows(*names, kind=kind, messages=rng.random() < 0.3)
    if how < 95:
        shape = rng.choice(["list", "map", "DICT", "TUPLE", "keys", "SET", "FROZENSET"])
        keyed = shape in ("keys", "SET", "FROZENSET")
        return document_of(*rng.choices(HASHABLE if keyed else docs, k=few), shape=shape)
    if how < 98:
        return unnamed(rng.choice(values), rng.choice(["groups", "empty frames", "frames"]))
    if how < 99:
        return colliding(rng.choice(["SET", "DICT", "node"]))
    return large(rng.choice(list(_LARGE)))
