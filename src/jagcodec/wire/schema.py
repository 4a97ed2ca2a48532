"""The schema of a message: nodes, their forms, and where their numbers are.

Each kind of node has a *form*: fields in the schema, numbers in the message's array of numbers, and
children. So the schema fixes where the numbers and values of each node are. A `Schema` depends on
its bytes alone, and is kept for the next message that has the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory import INT64_MAX
from jagcodec.wire import documents, spec
from jagcodec.wire.checks import expect, fail, inside
from jagcodec.wire.spec import INDIRECT, MAX_NDIM, PLAIN, TORCH_ITEMSIZES, Kind


@dataclass(slots=True, eq=False)
class Node:
    """One node of a schema."""

    kind: Kind
    fields: list[Any]  # its entries in the schema, which were checked
    number: int  # index of the first of its numbers
    dims: int  # index of the first of its dims, which are the last of its numbers
    end: int  # index after the last of its numbers
    value: int  # index of the first value in it
    depth: int  # how many nodes are around it
    itemsize: int = 0  # bytes per element of its torch dtype, before narrowing; 0 without one
    children: Sequence[Node] = ()


class Group(NamedTuple):
    """The numbers of a ragged group, whose rows columns share.

    The first two are the place of the offsets. Fewer than two rows have no offsets.
    """

    buffer: int
    offset: int
    rows: int
    min: int
    max: int


GROUP_NUMBERS = len(Group._fields)

# --- checks of fields --------------------------------------------------------------------------


def _int_between(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_name(value: Any) -> bool:
    return type(value) is str


def _are_keys(value: Any) -> bool:
    return type(value) is list and {*map(type, value)} <= {str} and len(set(value)) == len(value)


def _is_torch_dtype(value: Any) -> bool:
    expect(type(value) is str and value in TORCH_ITEMSIZES, "unknown_dtype", "a torch dtype", value)
    return True


def _is_numpy_dtype(value: Any) -> bool:
    # Raises, so that the error names the dtype.
    return numpy_itemsize(value) >= 0


# --- forms -------------------------------------------------------------------------------------

ANY, PER_KEY = -1, -2
"""How many children: any number, or one for each key in the last field."""


class Form(NamedTuple):
    """The parts of one kind of node."""

    fields: dict[str, Callable[[Any], bool]]  # the name and the check of each entry in the schema
    numbers: tuple[str, ...] = ()  # names; "*" stands for as many dims as the field "rank" says
    children: int = 0  # how many, or `ANY` or `PER_KEY`


# The first numbers of most forms; dims follow. The wire format calls the storage code "stored".
_PLACE = ("buffer", "offset")
_CELLS = ("buffer", "offset", "stored")
_ROWS = ("buffer", "offset", "stored", "group")
_DOCUMENTS = ("buffer", "offset", "stored", "group", "size")

BUFFER, OFFSET, STORAGE_CODE, GROUP, SIZE = range(len(_DOCUMENTS))
"""The positions of these numbers in a node, counted from `Node.number`."""

_RANK = {"rank": _int_between(0, MAX_NDIM)}
_TENSOR = {"dtype": _is_torch_dtype, **_RANK}
_STACK = {"stack_dim": _int_between(0, INT64_MAX)}

FORMS: dict[Kind, Form] = {
    Kind.TUPLE: Form({}, children=ANY),
    Kind.LIST: Form({}, children=ANY),
    Kind.MAP: Form({"keys": _are_keys}, children=PER_KEY),
    Kind.DICT: Form({}, children=ANY),
    Kind.BYTES: Form({}, (*_PLACE, "size")),
    Kind.ARRAY: Form({"dtype": _is_numpy_dtype, **_RANK}, (*_PLACE, "*")),
    Kind.OBJECT_ARRAY: Form(_RANK, (*_DOCUMENTS, "*")),
    Kind.TENSOR: Form(_TENSOR, (*_CELLS, "*")),
    Kind.JAGGED: Form({**_TENSOR, "ragged_dim": _int_between(1, MAX_NDIM)}, (*_ROWS, "*")),
    Kind.STRIDED_NESTED: Form(_RANK, children=2),
    Kind.SPARSE_COO: Form({**_RANK, "coalesced": _int_between(0, 1)}, ("*",), 2),
    Kind.TENSOR_VIEWS: Form({}, children=2),
    Kind.TENSORDICT: Form({**_RANK, "keys": _are_keys}, ("*",), PER_KEY),
    Kind.LAZY_STACK: Form(_STACK, children=ANY),
    Kind.NON_TENSOR_DATA: Form(_RANK, ("*",), 1),
    Kind.NON_TENSOR_ROWS: Form({}, _DOCUMENTS),
    Kind.NON_TENSOR_STACK: Form(_STACK, children=ANY),
    Kind.ARRAY_ROWS: Form({"holder": _int_between(0, 2), "tensors": _int_between(0, 1)}, (), 2),
    Kind.USER: Form({"name": _is_name}, children=1),
}


# --- schemas -----------------------------------------------------------------------------------


class Schema:
    """A checked schema; `root` is the node of the message's value."""

    def __init__(self, data: bytes) -> None:
        self.data: bytes = data
        self.number_count: int = 0  # numbers of all nodes; the header's counts come after them
        self.value_count: int = 0  # documents
        # Nodes with numbers to check. A TENSOR comes before the node that is built from it.
        self.nodes: list[Node] = []
        self.plan: Any = None  # the `Plan` that `claims.py` makes of the nodes
        self.memory_bytes: int = 32 * len(data)  # about how many this object needs
        self.node_count: int = 0  # nodes, including those without numbers
        self.depth: int = 0  # nodes around the deepest one
        self._stacks = 0  # stacks around the node that is being read
        self.root: Node = self._node(documents.parsed(data, "schema", records=False), 0)
        # Where a header's numbers have the count of groups, that of frames, and the first group.
        self.group_count: int = self.number_count
        self.frame_count: int = self.group_count + 1
        self.first_group: int = self.frame_count + 1

    def first_size(self, groups: int) -> int:
        """The index of frame 1's size among the numbers of a header with `groups` groups."""
        return self.first_group + GROUP_NUMBERS * groups

    def _node(self, item: Any, depth: int) -> Node:
        """The checked node of an entry, with all nodes in it; None is a document."""
        self.memory_bytes += 160
        self.node_count += 1
        if item is None:
            self.value_count += 1
            first = self.number_count
            return Node(Kind.VALUE, _NO_FIELDS, first, first, first, self.value_count - 1, depth)
        if type(item) is not list or not item or type(item[0]) is not int:
            raise fail("bad_record", f"expected a node, found {brief(item)}")
        if depth > spec.MAX_LEVELS:
            raise fail("too_deep", f"expected at most {spec.MAX_LEVELS} levels, found more")
        self.depth = max(self.depth, depth)
        form = _form_of(item[0])
        ends = 1 + len(form.fields)
        fields, children = item[1:ends] or _NO_FIELDS, item[ends:]
        kind = Kind(item[0])
        _check_form(kind, form, fields, len(children))
        node = self._next_node(kind, form, fields, depth)
        outer_stacks = self._stacks
        if kind in (Kind.LAZY_STACK, Kind.NON_TENSOR_STACK):
            self._stacks += 1
            most = spec.MAX_STACKS
            expect(outer_stacks < most, "too_deep", f"at most {most} stacks", "more")
        elif kind is Kind.NON_TENSOR_DATA:
            self._stacks = 0  # tensordict does not look for stacks in its payload
        if children:
            self._read_children(node, children, depth + 1)
        if kind in INTEGER_ROWS:
            _check_integer_rows(node)
            self.nodes.append(node)
        self._stacks = outer_stacks
        return node

    def _read_children(self, node: Node, children: list[Any], depth: int) -> None:
        nodes: list[Node] = []
        node.children = nodes
        for i, child in enumerate(children):
            try:
                nodes.append(self._node(child, depth))
            except WireFormatError as error:
                raise inside(error, child_step(node, i)) from error

    def _next_node(self, kind: Kind, form: Form, fields: list[Any], depth: int) -> Node:
        """A node that has the next numbers of the header; noted in `nodes` if it has some."""
        named = dict(zip(form.fields, fields, strict=True))
        first, rank = self.number_count, named["rank"] if "*" in form.numbers else None
        dims = first + len(form.numbers) - (rank is not None)
        self.number_count = dims + (rank or 0)
        itemsize = TORCH_ITEMSIZES.get(named.get("dtype", ""), 0)
        end, value = self.number_count, self.value_count
        node = Node(kind, fields, first, dims, end, value, depth, itemsize)
        if form.numbers:
            if kind is not Kind.BYTES:
                self.memory_bytes += 256  # its part of the plan
            self.nodes.append(node)
        return node


_NO_FIELDS: list[Any] = []
"""The fields of all nodes that have none: one object, because such nodes may be many."""


def _check_form(kind: Kind, form: Form, fields: list[Any], children: int) -> None:
    """Check the fields of a node, and how many children it has."""
    wanted = len(form.fields)
    expect(len(fields) == wanted, "bad_record", f"{wanted} fields of {kind.name}", fields)
    for (name, check), field in zip(form.fields.items(), fields, strict=True):
        expect(check(field), "bad_record", f"a {name} of {kind.name}", field)
    wanted = form.children
    if wanted == PER_KEY:
        wanted = len(fields[-1])
    fits = wanted in (ANY, children)
    expect(fits, "bad_record", f"{wanted} children of {kind.name}", children)
    expect(kind != Kind.DICT or children > 0, "bad_record", "a list of keys before the values", 0)
    if kind == Kind.JAGGED:
        rank, dim = fields[1:]
        expect(dim <= rank, "bad_record", f"a ragged dim of 1 to {rank}", dim)


INTEGER_ROWS = (Kind.STRIDED_NESTED, Kind.TENSOR_VIEWS, Kind.ARRAY_ROWS)
"""Kinds with two children: cells, and int64s, a row of them for each tensor or array."""


def _check_integer_rows(node: Node) -> None:
    values, rows = node.children
    wanted = Kind.JAGGED if node.kind is Kind.ARRAY_ROWS else Kind.TENSOR
    expect(values.kind is wanted, "bad_record", f"a {wanted.name}", values.kind.name)
    expect(rows.kind is Kind.TENSOR, "bad_record", "a TENSOR", rows.kind.name)
    expect(rows.fields == ["int64", 2], "bad_record", "rows of int64", rows.fields)
    rank = values.fields[1]
    if node.kind is Kind.ARRAY_ROWS and not node.fields[1]:
        known = values.fields[0] in spec.ARRAY_DTYPES
        expect(known, "unknown_dtype", "a dtype of numpy and torch", values.fields[0])
    if node.kind is Kind.TENSOR_VIEWS:
        expect(rank > 0, "bad_record", "views of rows", rank)
    else:
        expect(rank == 1, "bad_record", "cells end to end", rank)


_FORMS_BY_CODE = {int(kind): form for kind, form in FORMS.items()}


def _form_of(code: int) -> Form:
    form = _FORMS_BY_CODE.get(code)
    if form is None:
        detail = (
            f"expected a known kind of node, found {code}; the sender may be newer than this reader"
        )
        raise fail("unknown_kind", detail)
    return form


def child_step(node: Node, child: int) -> Any:
    """The step in a path from a node to a child: a key, an index, or None if a path has no step."""
    if node.kind in (Kind.MAP, Kind.TENSORDICT):
        return node.fields[-1][child]
    if node.kind in (Kind.TUPLE, Kind.LIST, Kind.LAZY_STACK, Kind.NON_TENSOR_STACK):
        return child
    return None


# --- rows ---------------------------------------------------------------------------------------

DOCUMENT_ROWS = (Kind.NON_TENSOR_ROWS, Kind.OBJECT_ARRAY)
"""Kinds that hold one document per row."""

ROW_KINDS = (Kind.TENSOR, Kind.JAGGED, *DOCUMENT_ROWS)
"""Kinds that have rows of cells or documents. They may be indirect."""


def runs_of(kind: Kind, storage_code: int) -> int:
    """How many runs a node of `ROW_KINDS` has, by its storage code; 0 if it is not indirect."""
    if kind is Kind.JAGGED:
        within = INDIRECT < storage_code <= INDIRECT + spec.MOST_RUNS
        return storage_code - INDIRECT if within else 0
    if kind in DOCUMENT_ROWS:
        return int(storage_code & ~spec.BLOBS in (INDIRECT + 1, spec.ONE_OBJECT))
    return int(storage_code == INDIRECT + 1)


# --- dtypes ------------------------------------------------------------------------------------


_NUMPY_DTYPE = re.compile(
    r"(?P<bool>\|b1)|\|[iu]1|[<>][iu](?:2|4|8)|[<>]f(?:2|4|8)|[<>]c(?:8|16)"
    r"|[<>][mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|[SV]\d{1,10}|[<>]U\d{1,10}"
)


def size_at_code(dtype: str, storage_code: int, elements: int) -> int:
    """Bytes of `elements` elements of a torch dtype with this storage code."""
    itemsize = TORCH_ITEMSIZES[dtype]
    if storage_code == PLAIN or not elements:
        return elements * itemsize
    if dtype in spec.INTEGER_DTYPES:
        if storage_code == spec.BITS:
            return (elements + 7) // 8
        width, signed = spec.STORED_WIDTHS.get(storage_code, (itemsize, False))
        if width < itemsize and not (signed and dtype.startswith(("u", "b"))):
            return elements * width
    raise fail("unknown_dtype", f"expected cells of {dtype} or narrower, found code {storage_code}")


def numpy_itemsize(dtype: Any) -> int:
    """Bytes per element of a dtype by numpy's own name for it (``<f4``, ``|S8``, ``<M8[ns]``)."""
    if type(dtype) is not str or _NUMPY_DTYPE.fullmatch(dtype) is None:
        raise fail("unknown_dtype", f"expected a numpy dtype, found {brief(dtype)}")
    digits = re.match(r"\d+", dtype[2:])
    size = int(digits.group()) if digits else 0
    return size * 4 if dtype[1] == "U" else size


# --- what is kept ------------------------------------------------------------------------------

MOST_SCHEMAS = 64
"""The most schemas that a reader keeps, and the most that a writer keeps."""

LARGEST_KEPT = 128 << 10
"""The most bytes of memory that a kept schema may need."""

_schema_of_bytes: dict[bytes, Schema] = {}


def keep(kept: dict[Any, Any], key: Any, value: Any, memory_bytes: int) -> None:
    """Keep a value up to `LARGEST_KEPT` bytes, and drop the oldest beyond `MOST_SCHEMAS`."""
    # Use single dict operations and no lock: a process that forks would copy a lock that is held.
    if memory_bytes <= LARGEST_KEPT:
        kept[key] = value
        for oldest in list(kept)[:-MOST_SCHEMAS]:
            kept.pop(oldest, None)


def read_schema(data: bytes) -> Schema:
    """The schema of these bytes: a kept one, or a new one."""
    schema = _schema_of_bytes.get(data)
    if schema is None:
        schema = Schema(data)
        keep(_schema_of_bytes, data, schema, schema.memory_bytes)
    return schema
