"""The schema of a message: nodes, their forms, and the checks of their numbers.

Each kind of node has a *form*: fields in the schema, numbers in the message's array of numbers, and
children. So the schema fixes where the numbers and values of each node are. What was made of a
schema depends on its bytes alone, and is kept for the next message that has the same ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory import INT64_MAX, extent_of
from jagcodec.wire import spec
from jagcodec.wire.checks import cells_of, expect, fail, inside
from jagcodec.wire.documents import unpack
from jagcodec.wire.spec import INDIRECT, MAX_NDIM, MAX_UNBACKED_ROWS, PLAIN, TORCH_DTYPES, Kind


@dataclass(slots=True, eq=False)
class Node:
    """One node of a schema."""

    kind: Kind
    fields: list[Any]  # its entries in the schema, checked
    number: int  # index of the first of its numbers
    dims: int  # index of the first of its dims, which are the last of its numbers
    end: int  # index after the last of its numbers
    value: int  # index of the first value in it
    itemsize: int = 0  # of a tensor: bytes per cell as wide as its dtype
    children: Sequence[Node] = ()


class Group(NamedTuple):
    """A ragged group: rows that columns share; from two on, their offsets are at a place."""

    buffer: int
    offset: int
    rows: int
    min: int
    max: int


# --- checks of fields --------------------------------------------------------------------------


def _between(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_name(value: Any) -> bool:
    return type(value) is str


def _are_keys(value: Any) -> bool:
    return type(value) is list and {*map(type, value)} <= {str} and len(set(value)) == len(value)


def _is_torch_dtype(value: Any) -> bool:
    expect(type(value) is str and value in TORCH_DTYPES, "unknown_dtype", "a torch dtype", value)
    return True


def _is_numpy_dtype(value: Any) -> bool:
    return numpy_itemsize(value) >= 0


# --- forms -------------------------------------------------------------------------------------

ANY, PER_KEY = -1, -2
"""How many children: any number, or one for each key, which are the last field."""


class Form(NamedTuple):
    """What a kind of node is made of."""

    fields: dict[str, Callable[[Any], bool]]  # names and checks of its entries in the schema
    numbers: tuple[str, ...] = ()  # names; "*" means as many dims as the field "rank" gives
    children: int = 0  # how many, or `ANY` or `PER_KEY`


_PLACE = ("buffer", "offset")
_CELLS = (*_PLACE, "stored")
_DOCUMENTS = (*_CELLS, "group", "size")

_RANK = {"rank": _between(0, MAX_NDIM)}
_TENSOR = {"dtype": _is_torch_dtype, **_RANK}
_STACK = {"stack_dim": _between(0, INT64_MAX)}

FORMS: dict[Kind, Form] = {
    Kind.TUPLE: Form({}, children=ANY),
    Kind.LIST: Form({}, children=ANY),
    Kind.MAP: Form({"keys": _are_keys}, children=PER_KEY),
    Kind.DICT: Form({}, children=ANY),
    Kind.BYTES: Form({}, (*_PLACE, "size")),
    Kind.ARRAY: Form({"dtype": _is_numpy_dtype, **_RANK}, (*_PLACE, "*")),
    Kind.OBJECT_ARRAY: Form(_RANK, (*_DOCUMENTS, "*")),
    Kind.TENSOR: Form(_TENSOR, (*_CELLS, "*")),
    Kind.JAGGED: Form({**_TENSOR, "ragged_dim": _between(1, MAX_NDIM)}, (*_CELLS, "group", "*")),
    Kind.STRIDED_NESTED: Form(_RANK, children=2),
    Kind.SPARSE_COO: Form({**_RANK, "coalesced": _between(0, 1)}, ("*",), 2),
    Kind.TENSOR_VIEWS: Form({}, children=2),
    Kind.TENSORDICT: Form({**_RANK, "keys": _are_keys}, ("*",), PER_KEY),
    Kind.LAZY_STACK: Form(_STACK, children=ANY),
    Kind.NON_TENSOR_DATA: Form(_RANK, ("*",), 1),
    Kind.NON_TENSOR_ROWS: Form({}, _DOCUMENTS),
    Kind.NON_TENSOR_STACK: Form(_STACK, children=ANY),
    Kind.USER: Form({"name": _is_name}, children=1),
}


# --- schemas -----------------------------------------------------------------------------------


class Schema:
    """A checked schema; `root` is the node of the message's value."""

    def __init__(self, data: bytes) -> None:
        self.packed: bytes = data
        self.numbers: int = 0  # how many its nodes have
        self.values: int = 0  # how many documents
        # Nodes with numbers to check; a tensor's before those that are made of it. Of each TENSOR
        # and JAGGED what a check needs: its number, the indices of its first dim and of the others,
        # `itemsize`, and whether it is jagged; of each TENSORDICT of one dim its number; and the
        # other nodes.
        self.nodes: list[Node] = []
        self.cells: list[tuple[int, int, Sequence[int], int, bool]] = []
        self.batches: list[int] = []
        self.others: list[Node] = []
        self.weight: int = 32 * len(data)  # about how many bytes of memory it needs
        self.size: int = 0  # how many nodes, those without numbers too
        self.depth: int = 0  # how many others its deepest node is inside
        self._stacks = 0  # around the node that is being read
        self.root: Node = self._node(unpack(data, "schema", records=False), 0)

    def _node(self, item: Any, depth: int) -> Node:
        self.weight += 160
        self.size += 1
        if item is None:
            self.values += 1
            first = self.numbers
            return Node(Kind.VALUE, _NONE, first, first, first, self.values - 1)
        if type(item) is not list or not item or type(item[0]) is not int:
            raise fail("bad_record", f"expected a node, found {brief(item)}")
        if depth > spec.MAX_LEVELS:
            raise fail("too_deep", f"expected at most {spec.MAX_LEVELS} levels, found more")
        self.depth = max(self.depth, depth)
        form = _FORMS_BY_CODE.get(item[0])
        if form is None:
            found = f"found {item[0]}; the sender may be newer than this reader"
            raise fail("unknown_kind", f"expected a known kind of node, {found}")
        ends = 1 + len(form.fields)
        fields, children = item[1:ends] or _NONE, item[ends:]
        kind = Kind(item[0])
        wanted = len(form.fields)
        expect(len(fields) == wanted, "bad_record", f"{wanted} fields of {kind.name}", fields)
        for (name, check), field in zip(form.fields.items(), fields, strict=True):
            expect(check(field), "bad_record", f"a {name} of {kind.name}", field)
        _check_form(kind, form, fields, len(children))
        node = self._numbered(kind, form, fields)
        around = self._stacks
        if kind in (Kind.LAZY_STACK, Kind.NON_TENSOR_STACK):
            self._stacks += 1
            most = spec.MAX_STACKS
            expect(around < most, "too_deep", f"at most {most} stacks", "more")
        elif kind is Kind.NON_TENSOR_DATA:
            self._stacks = 0  # tensordict does not look into it
        if children:
            nodes: list[Node] = []
            node.children = nodes
            for i, child in enumerate(children):
                try:
                    nodes.append(self._node(child, depth + 1))
                except WireFormatError as error:
                    raise inside(error, child_step(node, i)) from error
        if kind in INTEGER_ROWS:
            _check_integer_rows(node)
            self.nodes.append(node)
            self.others.append(node)
        self._stacks = around
        return node

    def _numbered(self, kind: Kind, form: Form, fields: list[Any]) -> Node:
        """A node with the next numbers, which are to be checked."""
        named = dict(zip(form.fields, fields, strict=True))
        first, rank = self.numbers, named["rank"] if "*" in form.numbers else None
        dims = first + len(form.numbers) - (rank is not None)
        self.numbers = dims + (rank or 0)
        itemsize = TORCH_DTYPES.get(named.get("dtype", ""), 0)
        node = Node(kind, fields, first, dims, self.numbers, self.values, itemsize)
        if form.numbers:
            self.nodes.append(node)
            if rank and kind in (Kind.TENSOR, Kind.JAGGED):
                others = tuple(range(dims + 1, node.end))
                self.cells.append((first, dims, others, itemsize, kind is Kind.JAGGED))
            elif kind is Kind.TENSORDICT and rank == 1:
                self.batches.append(first)
            else:
                self.others.append(node)
        return node


_NONE: list[Any] = []
"""The fields of a node without any: one object for all of them, because they may be many."""


def _check_form(kind: Kind, form: Form, fields: list[Any], children: int) -> None:
    wanted = form.children
    if wanted == PER_KEY:
        wanted = len(fields[-1])
    fits = wanted in (ANY, children)
    expect(fits, "bad_record", f"{wanted} children of {kind.name}", children)
    expect(kind != Kind.DICT or children > 0, "bad_record", "a list of keys before the values", 0)
    if kind == Kind.JAGGED:
        rank, dim = fields[1:]
        expect(dim <= rank, "bad_record", f"a ragged dim of 1 to {rank}", dim)


INTEGER_ROWS = (Kind.STRIDED_NESTED, Kind.TENSOR_VIEWS)
"""What is made of a tensor, and of a row of int64s for each tensor in it."""


def _check_integer_rows(node: Node) -> None:
    for child in node.children:
        expect(child.kind is Kind.TENSOR, "bad_record", "a TENSOR", child.kind.name)
    cells, rows = node.children
    expect(rows.fields == ["int64", 2], "bad_record", "rows of int64", rows.fields)
    rank = cells.fields[1]
    if node.kind is Kind.TENSOR_VIEWS:
        expect(rank > 0, "bad_record", "views of rows", rank)
    else:
        expect(rank == 1, "bad_record", "cells end to end", rank)


_FORMS_BY_CODE = {int(kind): form for kind, form in FORMS.items()}


def child_step(node: Node, child: int) -> Any:
    """The step of a path from a node to one of its children: a key, or ``None`` for no step."""
    if node.kind in (Kind.MAP, Kind.TENSORDICT):
        return node.fields[-1][child]
    if node.kind in (Kind.TUPLE, Kind.LIST, Kind.LAZY_STACK, Kind.NON_TENSOR_STACK):
        return child
    return None


# --- numbers -----------------------------------------------------------------------------------


class Places:
    """The buffers of a message, as its numbers are checked against them."""

    def __init__(self, sizes: Sequence[int], *, in_row: bool = False) -> None:
        self.sizes: Sequence[int] = sizes
        self.payload: int = sum(sizes)
        self.left: int = self.payload  # what no value has claimed yet
        self.objects: int = 0  # rows of objects, views and components
        self.expanded: int = 0  # bytes that values need at full width
        self.in_row: bool = in_row

    def claim(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        """Check that bytes are in a buffer, and that all values fit the payload."""
        if size == 0:
            return
        self.left -= size
        if buffer >= len(self.sizes):
            error = f"a buffer below {len(self.sizes)}, found buffer {buffer}"
        elif offset + size > self.sizes[buffer]:
            at = f"{size} bytes at {offset} of buffer {buffer}"
            error = f"{at}, found a buffer of {self.sizes[buffer]}"
        elif self.left < 0:
            found = f"more bytes of them than the {self.payload} of the payload"
            error = f"values that do not overlap, found {found}"
        else:
            return
        raise fail("out_of_bounds", f"expected {error}", path=path)

    def claim_rows(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        """The same for documents and offsets, whose rows need more memory than their bytes."""
        self.claim(buffer, offset, size, path)
        self.expanded += spec.EXPANSION * size


def check_groups(groups: Sequence[Group], places: Places) -> None:
    """Check the numbers of the ragged groups."""
    for i, group in enumerate(groups):
        path, (buffer, offset, rows, low, high) = f"ragged group {i}", group
        expect(low <= high, "bad_offsets", "min <= max", [low, high], path)
        if rows > 1:
            places.claim_rows(buffer, offset, 8 * (rows + 1), path)
        else:
            fits = low == high and (rows == 1 or not high)
            expect(fits, "bad_offsets", "one length of one row, 0 without rows", [low, high], path)


def _check_at_sight(
    schema: Schema, numbers: Sequence[int], sizes: Sequence[int]
) -> tuple[int, int] | None:
    """The unclaimed bytes and `Places.expanded`, if numbers are as most are; None of all others."""
    frames, left, rows_claimed = len(sizes), sum(sizes), 0
    first = schema.numbers + 2
    groups = numbers[first - 2]
    for i in range(first, first + 5 * groups, 5):
        buffer, offset, rows, low, high = numbers[i : i + 5]
        if rows > 1 and low <= high:
            size = 8 * rows + 8
            if buffer >= frames or offset + size > sizes[buffer]:
                return None
            rows_claimed += size
        elif low != high or high > 0 == rows:
            return None
    for i in schema.batches:
        if numbers[i] > MAX_UNBACKED_ROWS:
            return None
    for i, dim, others, size, is_jagged in schema.cells:
        size *= numbers[dim]
        for at in others:
            size *= numbers[at]
        buffer = numbers[i]
        if (
            not size
            or numbers[i + 2] != PLAIN
            or buffer >= frames
            or numbers[i + 1] + size > sizes[buffer]
            or (is_jagged and numbers[i + 3] >= groups)
        ):
            return None
        left -= size
    left -= rows_claimed
    return None if left < 0 else (left, spec.EXPANSION * rows_claimed)


def check_numbers(
    schema: Schema,
    numbers: Sequence[int],
    groups: Sequence[Group],
    sizes: Sequence[int],
    *,
    in_row: bool,
) -> tuple[int, int]:
    """Check numbers, of which `read_header` found none negative; `Places.expanded`, `.objects`."""
    nodes, simple = schema.others, _check_at_sight(schema, numbers, sizes)
    if simple is not None and not nodes:
        return simple[1], 0
    places = Places(sizes, in_row=in_row)
    if simple is not None:
        places.left, places.expanded = simple
    else:
        nodes = schema.nodes
        check_groups(groups, places)
    for node in nodes:
        try:
            check_node(node, numbers, groups, places)
        except WireFormatError as error:
            raise _with_path(error, schema.root, node) or error from error
    return places.expanded, places.objects


DOCUMENT_ROWS = (Kind.NON_TENSOR_ROWS, Kind.OBJECT_ARRAY)
"""What holds one document per row."""

ROW_KINDS = (Kind.TENSOR, Kind.JAGGED, *DOCUMENT_ROWS)
"""What has rows of cells, and may be indirect."""


def runs_of(kind: Kind, stored: int) -> int:
    """How many runs the rows of one of `ROW_KINDS` have; 0 if it is not indirect."""
    if kind is Kind.JAGGED:
        return stored - INDIRECT if INDIRECT < stored <= INDIRECT + spec.MOST_RUNS else 0
    if kind in DOCUMENT_ROWS:
        return int(stored & ~spec.BLOBS in (INDIRECT + 1, spec.ONE_OBJECT))
    return int(stored == INDIRECT + 1)


def _claim_table(
    node: Node, own: list[int], shape: list[int], groups: Sequence[Group], places: Places
) -> None:
    """Check that the table of an indirect column is there, and count what the column needs."""
    kind, runs = node.kind, runs_of(node.kind, own[2])
    # What repeats would repeat again in each row, and so on for every level of rows.
    expect(not places.in_row, "out_of_bounds", "no indirect columns in a message in a row", "some")
    rows = shape[0] if kind is Kind.TENSOR and shape else 0
    if kind is Kind.TENSOR:
        # Each has a number in an index, of a bit at least.
        expect(0 < rows <= 8 * places.payload, "bad_record", "rows with an index", rows)
    else:
        rows = groups[own[3]].rows
    if kind is Kind.JAGGED:
        expect(node.fields[2] == 1, "bad_record", "indirect rows of ragged dim 1", node.fields[2])
    places.claim(own[0], own[1], 8 * len(spec.RUN_NUMBERS) * runs)
    size = own[4] if kind in DOCUMENT_ROWS else math.prod(shape) * node.itemsize
    # Also rows without cells: each costs a step.
    places.expanded += size + spec.ROW_COST * rows * runs


def _cell_bytes(node: Node) -> int:
    """Bytes of memory per cell; 0 of a node whose dims are not those of cells."""
    if node.kind is Kind.ARRAY:
        return numpy_itemsize(node.fields[0])
    return 8 if node.kind is Kind.OBJECT_ARRAY else node.itemsize


def check_node(node: Node, numbers: Sequence[int], groups: Sequence[Group], places: Places) -> None:
    """Check the numbers of one node, and claim every place that they name."""
    kind, i = node.kind, node.number
    own = list(numbers[i : node.end])
    shape = own[node.dims - i :]
    cells = cells_of(shape, _cell_bytes(node))
    held = own[4] if kind in DOCUMENT_ROWS else cells  # `stored` is ignored where there is nothing
    if kind is Kind.JAGGED or kind in DOCUMENT_ROWS:
        most = len(groups)
        expect(own[3] < most, "bad_record", f"a ragged group below {most}", own[3])
    if kind in DOCUMENT_ROWS:
        places.objects += groups[own[3]].rows
    if kind in ROW_KINDS and held and runs_of(kind, own[2]):
        _claim_table(node, own, shape, groups, places)
    elif kind in (Kind.TENSOR, Kind.JAGGED):
        places.claim(own[0], own[1], stored_size(node.fields[0], own[2], cells))
        places.expanded += 0 if own[2] == PLAIN else cells * node.itemsize
    elif kind is Kind.ARRAY:
        size = cells * _cell_bytes(node)
        expect(size <= INT64_MAX, "bad_record", "fewer than 2**63 bytes", shape)
        places.claim(own[0], own[1], size)
    elif kind is Kind.BYTES:
        places.claim(own[0], own[1], own[2])
    elif kind in (Kind.NON_TENSOR_ROWS, Kind.OBJECT_ARRAY):
        known = own[2] & ~spec.BLOBS == PLAIN or not own[4]
        expect(known, "bad_record", "documents or messages as they are", own[2])
        places.claim_rows(own[0], own[1], own[4])
    elif kind in INTEGER_ROWS:
        _count_integer_rows(node, numbers, places)
    elif kind in (Kind.TENSORDICT, Kind.NON_TENSOR_DATA):
        few = extent_of(shape) <= max(MAX_UNBACKED_ROWS, places.payload)
        expected = f"at most {MAX_UNBACKED_ROWS} rows, or a payload of as many bytes"
        expect(few, "bad_rows", expected, shape)


def _count_integer_rows(node: Node, numbers: Sequence[int], places: Places) -> None:
    """Count what views and components need, whose bytes were claimed as those of a tensor."""
    child = node.children[1]
    stored = numbers[child.number + 2]
    expect(stored == PLAIN, "bad_record", "integers as wide as their dtype", stored)
    rows, width = numbers[child.dims : child.end]
    wanted = 2 if node.kind is Kind.TENSOR_VIEWS else node.fields[0] or 1
    expect(width == wanted, "bad_record", f"rows of {wanted} integers", width)
    places.objects += rows
    places.expanded += spec.EXPANSION * 8 * width * rows


def _with_path(error: WireFormatError, node: Node, target: Node) -> WireFormatError | None:
    """The error of a node `target`, with the path to it from `node`; None if it is not in it."""
    if node is target:
        return inside(error, None)
    for i, child in enumerate(node.children):
        found = _with_path(error, child, target)
        if found is not None:
            return inside(found, child_step(node, i))
    return None


# --- dtypes ------------------------------------------------------------------------------------


_NUMPY_DTYPE = re.compile(
    r"(?P<bool>\|b1)|\|[iu]1|[<>][iu](?:2|4|8)|[<>]f(?:2|4|8)|[<>]c(?:8|16)"
    r"|[<>][mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|[SV]\d{1,10}|[<>]U\d{1,10}"
)


def stored_size(dtype: str, stored: int, cells: int) -> int:
    """Bytes of `cells` cells of a torch dtype that are stored as `stored`."""
    itemsize = TORCH_DTYPES[dtype]
    if stored == PLAIN or not cells:
        return cells * itemsize
    if dtype in spec.INTEGER_DTYPES:
        if stored == spec.BITS:
            return (cells + 7) // 8
        width, signed = spec.STORED_WIDTHS.get(stored, (itemsize, False))
        if width < itemsize and not (signed and dtype.startswith(("u", "b"))):
            return cells * width
    raise fail("unknown_dtype", f"expected cells of {dtype} or narrower, found code {stored}")


def numpy_itemsize(dtype: Any) -> int:
    """Bytes per element of a dtype by numpy's own name for it (``<f4``, ``|S8``, ``<M8[ns]``)."""
    if type(dtype) is not str or _NUMPY_DTYPE.fullmatch(dtype) is None:
        raise fail("unknown_dtype", f"expected a numpy dtype, found {brief(dtype)}")
    digits = re.match(r"\d+", dtype[2:])
    size = int(digits.group()) if digits else 0
    return size * 4 if dtype[1] == "U" else size


# --- what is kept ------------------------------------------------------------------------------

MOST_SCHEMAS = 64
"""How many schemas a reader keeps, and how many a writer."""

LARGEST_KEPT = 128 << 10
"""Bytes of memory that one may need."""

_known: dict[bytes, Schema] = {}


def keep(known: dict[Any, Any], key: Any, value: Any, weight: int) -> None:
    """Keep what was made of a schema of this weight; of too many the oldest makes way."""
    # Single dict operations, and no lock: a child of a fork would wait for one that was held.
    if weight <= LARGEST_KEPT:
        known[key] = value
        for oldest in list(known)[:-MOST_SCHEMAS]:
            known.pop(oldest, None)


def read_schema(data: bytes) -> Schema:
    """The schema of these bytes, read or looked up."""
    known = _known.get(data)
    if known is None:
        known = Schema(data)
        keep(_known, data, known, known.weight)
    return known
