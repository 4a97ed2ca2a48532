#!/usr/bin/env python3
"""Weigh messages, in memory per byte: ``python fuzz/weigh.py`` writes the table of SECURITY.md.

Each figure is the peak by which resident memory grows during `decode`, divided by the bytes of the
header and the payload. The messages are of `SIZE` bytes and hold nothing but the smallest nodes or
records of one kind (`tests/wire/grown.py`). Each is made in one process
and read in another, because memory that a process freed before hides what it takes next. Fails if a
figure passes `MOST_PER_BYTE`.
"""

from __future__ import annotations

import gc
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tensordict
import torch

from benchmarks import report
from jagcodec import decode
from tests.wire.forge import (
    Draft,
    Part,
    array,
    int64s,
    jagged,
    list_of,
    map_of,
    message,
    node,
    record,
    sparse_coo,
    strided_nested,
    tensor,
)
from tests.wire.forge import tensordict as batch_of
from tests.wire.grown import COLUMNS, DOCUMENTS, Recipe, document_of, in_rows, large, tall
from tests.wire.readers import cost

PAGE = report.ROOT / "SECURITY.md"
SIZE = 1_000_000
# The largest figure of the table, and some.
MOST_PER_BYTE = 700
# Units of a message that is read first: for what is imported, compiled or kept once.
FIRST = 16
MOST_UNITS = 1_000_000
# Columns or arrays of a ragged group: so many that its offsets are little of the message.
SHARE = 50


def _documents(value: Callable[[int], Any]) -> Recipe:
    return Recipe("documents", lambda n: message([value(i) for i in range(n)]))


def _nodes(value: Any, size: int = 0, *kind: Any, group: Sequence[int] = ()) -> Recipe:
    """Many of one node of so many bytes, in a list or in a node of another kind."""
    kind, groups = kind or ("LIST",), [group] if group else []

    def make(n: int) -> list[bytes]:
        frames = [(int64s(1) + bytes(size * n))[: size * n]] if size else []
        return message(node(*kind, children=[value] * n), *frames, groups=groups)

    return Recipe(f"nodes {value.schema if isinstance(value, Part) else value}", make)


def _columns_of_one_row(name: str) -> Recipe:
    def make(n: int) -> list[bytes]:
        f = Draft()
        return f.message(list_of(*(COLUMNS[name](f, i, 1) for i in range(n))))

    return Recipe(f"{name}, many", make)


def _jagged_of_own_groups(n: int) -> list[bytes]:
    groups = [[0, 0, 1, 0, 0]] * n
    return message(list_of(*(jagged(i, shape=[0]) for i in range(n))), groups=groups)


def _arrays_of_one_group(n: int) -> list[bytes]:
    """Arrays of `n` empty lists each."""
    f = Draft()
    group = f.group([1] * n)
    places = [f.put(b"\x90" * n) for _ in range(SHARE)]
    arrays = [node("OBJECT_ARRAY", 1, numbers=[*place, 0, group, n, n]) for place in places]
    return f.message(list_of(*arrays))


def _writable_frames(n: int) -> list[Any]:
    return [message(1, *[b""] * n)[0], *(bytearray() for _ in range(n))]


_PAYLOAD = node("NON_TENSOR_DATA", 0, children=[None])
_SCALARS = ("nil", "int", "float", "str", "marked str", "bin")
_TEXT_AND_NUMBERS = [
    *map(document_of, _SCALARS),
    _documents(lambda i: f"{i % 100:02}"),
    _documents(lambda i: 256 + i % 50_000),
    *map(large, ("string", "surrogates")),
]
_CONTAINERS = [
    *(document_of(name) for name in DOCUMENTS if name not in (*_SCALARS, "USER")),
    *map(_documents, (lambda i: {}, *(lambda i, k=k: record(k) for k in ("TUPLE", "SET", "DICT")))),
]
_SLICE = node("USER", "slice", children=[node("TUPLE", children=[None, list_of(1), None])])
_NODES = [
    None,
    [],
    {},
    node("TUPLE"),
    node("LIST"),
    _SLICE,
    map_of({}),
    node("DICT", children=[[]]),
]
_ARRAYS = [
    _nodes(array("|u1"), 1),
    _nodes(array("<U2"), 8),
    _nodes(array("|S0", [2, 3])),
    _nodes(array("<f8", [0, 2**40])),
    _nodes(array("<M8[ns]"), 8),
]
_INDEX = tensor("int64", [1, 1])
_TENSORS = [
    _nodes(tensor(), 1),
    _nodes(tensor("int64", [1, 0, 2**40])),
    _nodes(tensor("int64", [1, 8], stored=1), 1),
    _nodes(tensor("int32", stored=17), 1),
    _nodes(strided_nested(1, 1), 9),
    *(_nodes(sparse_coo(_INDEX, tensor(), flag, [2]), 9) for flag in (0, 1)),
    _nodes(sparse_coo(_INDEX, tensor("int64", stored=1), shape=[2]), 9),
    _nodes(sparse_coo(tensor("int64", [2, 0]), tensor(shape=[0]), shape=[1, 2**40])),
]
_ONE_GROUP = [
    _nodes(jagged(shape=[0]), group=[0, 0, 1, 0, 0]),
    _nodes(jagged(shape=[2, 4], dtype="int64", offset=0, stored=1), 1, group=[0, 0, 1, 2, 2]),
]
_JAGGED = [_ONE_GROUP, [Recipe("groups", _jagged_of_own_groups)]]
_TENSORDICTS = [[_nodes(batch_of([], leaves))] for leaves in ({}, {"a": _PAYLOAD})]
_PAYLOADS = [[_nodes(_PAYLOAD)], [_nodes(_PAYLOAD, 0, "NON_TENSOR_STACK", 0)]]
_ROWS = [[tall(name, each=each) for name in ("rows", "rows of lists")] for each in (1, SHARE)]
_INDIRECT_ROWS = ("indirect, shared", "indirect rows", "indirect rows of one object")
_INDIRECT = [_columns_of_one_row(name) for name in ("indirect, shared", "indirect, runs")]
_OBJECT_ARRAYS = [
    [in_rows("list", kind="OBJECT_ARRAY")],
    [Recipe("arrays of one group", _arrays_of_one_group)],
]
_FRAMES = [large("many frames"), Recipe("writable frames", _writable_frames)]

# What a row is about, how it puts its figures, and the recipes of each figure.
ROWS: list[tuple[str, str, list[list[Recipe]]]] = [
    ("text, numbers in documents", "{}", [_TEXT_AND_NUMBERS]),
    ("numbers in lists of one type", "{}", [[large("numbers"), large("bools")]]),
    ("arrays, maps and records of documents", "{}", [_CONTAINERS]),
    ("values that are nodes of their own: lists, tuples, maps, dicts", "{}",
     [[*map(_nodes, _NODES)]]),
    ("numpy arrays", "{}", [_ARRAYS]),
    ("dense, sparse and strided nested tensors", "{}", [_TENSORS]),
    ("jagged tensors", "{} in one ragged group, {} with a group each", _JAGGED),
    ("lists of views of one tensor", "{} per byte of bounds", [[large("views")]]),
    ("components of a strided nested tensor", "{} per byte of their sizes",
     [[tall("strided, no cells")]]),
    ("TensorDicts", "{}, with a payload in each {}", _TENSORDICTS),
    ("lazy stacks", "{}", [[_nodes(node("LAZY_STACK", 0))]]),
    ("`NonTensorData`, stacks of them", "{}, {}", _PAYLOADS),
    ("rows of `NonTensorStack`s",
     "{} in one column, {} in columns that share a ragged group", _ROWS),
    ("rows of indirect columns", "{} of tokens, {} of objects, {} of one object",
     [[tall(name)] for name in _INDIRECT_ROWS]),
    ("indirect columns", "{}", [_INDIRECT]),
    ("rows of object arrays",
     "{} in one array, {} in arrays that share a ragged group", _OBJECT_ARRAYS),
    ("empty frames", "{}", [_FRAMES]),
]  # fmt: skip
RECIPES = [recipe for _, _, groups in ROWS for group in groups for recipe in group]


def _made(index: int) -> tuple[list[bytes], list[bytes]]:
    recipe = RECIPES[index]
    return recipe.make(FIRST), recipe.make(recipe.of_size(SIZE, MOST_UNITS))


def _weighed(first: list[bytes], frames: list[bytes]) -> float:
    decode(first)
    return cost(lambda: decode(frames))[1] / sum(map(len, frames))


def _in_a_new_process(call: Callable[..., Any], *arguments: Any) -> Any:
    with get_context("fork").Pool(1) as pool:
        return pool.apply(call, arguments)


def _weigh(index: int) -> float:
    found: float = _in_a_new_process(_weighed, *_in_a_new_process(_made, index))
    print(f"{found:6.1f}  {RECIPES[index].name}", flush=True)
    return found


def _shown(figures: Sequence[float]) -> str:
    least, most = round(min(figures)), round(max(figures))
    return f"{least}" if least == most else f"{least} to {most}"


def main() -> int:
    """Measure every row, and write the table."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Collections would write to every page that a new process shares with this one.
    gc.collect()
    gc.freeze()
    gc.disable()
    index = count()
    rows, most = [], 0.0
    for what, words, groups in ROWS:
        found = [[_weigh(next(index)) for _ in group] for group in groups]
        rows.append([what, words.format(*map(_shown, found))])
        most = max(most, *map(max, found))
    made = report.table(("what", "bytes per byte"), rows)
    versions = f"torch {torch.__version__}, tensordict {tensordict.__version__}"
    made += f"\n\nMeasured on Python {platform.python_version()}, {versions}."
    print(made)
    PAGE.write_text(report.rewritten(PAGE.read_text(), {"weights": made}))
    if most > MOST_PER_BYTE:
        print(f"{most:.0f} bytes per byte: more than {MOST_PER_BYTE}")
    return int(most > MOST_PER_BYTE)


if __name__ == "__main__":
    sys.exit(main())
