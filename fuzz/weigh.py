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
from tests.wire.forge import Draft, list_of, map_of, message, node, record
from tests.wire.forge import tensordict as batch_of
from tests.wire.grown import DOCUMENTS, Recipe, beside, document_of, in_rows, large, tall
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
    return Recipe("documents", lambda n: message([value(i) for i in range(n)]), False)


def _nodes(value: Any, *kind: Any) -> Recipe:
    """Many of one node in a list, or in a node of another kind."""
    kind = kind or ("LIST",)
    return Recipe("nodes", lambda n: message(node(*kind, children=[value] * n)), False)


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
    *(document_of(name) for name in DOCUMENTS if name not in _SCALARS),
    _documents(lambda i: {}),
    _documents(lambda i: record("TUPLE")),
    _documents(lambda i: record("SET")),
    _documents(lambda i: record("DICT")),
]
_NODES = [
    *map(beside, ("nil", "list", "tuple node", "list node", "slice node")),
    *map(_nodes, ({}, map_of({}), node("DICT", children=[[]]))),
]
_ARRAYS = [
    *("array", "array of text", "array of nothing", "array of no cells"),
    "array of dates",
]
_TENSORS = [
    *("uint8 [1]", "no cells [1]", "bits [1]", "narrow [1]", "strided (1,) [1]"),
    *("strided (0,) [1]", "sparse [1]", "sparse coalesced [1]", "sparse bits [1]"),
    "sparse, no cells [1]",
]
_JAGGED = [
    [beside("jagged, shared empty group [1]"), beside("jagged bits [1]")],
    [beside("jagged, own empty group [1]")],
]
_TENSORDICTS = [[_nodes(batch_of([], {}))], [_nodes(batch_of([], {"a": _PAYLOAD}))]]
_PAYLOADS = [[_nodes(_PAYLOAD)], [_nodes(_PAYLOAD, "NON_TENSOR_STACK", 0)]]
_ROWS = [
    [tall(name, each=each) for name in ("rows, shared group", "rows of lists")]
    for each in (1, SHARE)
]
_OBJECT_ARRAYS = [
    [in_rows("list", kind="OBJECT_ARRAY")],
    [Recipe("arrays of one group", _arrays_of_one_group, False)],
]
_FRAMES = [large("many frames"), Recipe("writable frames", _writable_frames, False)]

# What a row is about, how it puts its figures, and the recipes of each figure.
ROWS: list[tuple[str, str, list[list[Recipe]]]] = [
    ("text, numbers in documents", "{}", [_TEXT_AND_NUMBERS]),
    ("numbers in lists of one type", "{}", [[large("numbers"), large("bools")]]),
    ("arrays, maps and records of documents", "{}", [_CONTAINERS]),
    ("values that are nodes of their own: lists, tuples, maps, dicts", "{}", [_NODES]),
    ("numpy arrays", "{}", [[*map(beside, _ARRAYS)]]),
    ("dense, sparse and strided nested tensors", "{}", [[*map(beside, _TENSORS)]]),
    ("jagged tensors", "{} in one ragged group, {} with a group each", _JAGGED),
    ("lists of views of one tensor", "{} per byte of bounds", [[large("views")]]),
    (
        "components of a strided nested tensor",
        "{} per byte of their sizes",
        [[tall("strided (0,)")]],
    ),
    ("TensorDicts", "{}, with a payload in each {}", _TENSORDICTS),
    ("lazy stacks", "{}", [[beside("empty lazy stack")]]),
    ("`NonTensorData`, stacks of them", "{}, {}", _PAYLOADS),
    (
        "rows of `NonTensorStack`s",
        "{} in one column, {} in columns that share a ragged group",
        _ROWS,
    ),
    (
        "rows of indirect columns",
        "{} of tokens, {} of objects, {} of one object",
        [
            [tall(name)]
            for name in ("indirect, shared", "indirect rows", "indirect rows of one object")
        ],
    ),
    ("indirect columns", "{}", [[beside("indirect, shared [1]"), beside("indirect, runs [1]")]]),
    (
        "rows of object arrays",
        "{} in one array, {} in arrays that share a ragged group",
        _OBJECT_ARRAYS,
    ),
    ("empty frames", "{}", [_FRAMES]),
]
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
    report.rewrite(PAGE, {"weights": made})
    if most > MOST_PER_BYTE:
        print(f"{most:.0f} bytes per byte: more than {MOST_PER_BYTE}")
    return int(most > MOST_PER_BYTE)


if __name__ == "__main__":
    sys.exit(main())
