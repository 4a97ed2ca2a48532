"""What a message says of itself: columns, rows, bytes; whether it is sound; one row of it.

No cell is read to describe one, and no value is made of types that this process does not know.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from jagcodec._arguments import known_names
from jagcodec.errors import ArgumentIndexError, WireFormatError, child_path
from jagcodec.memory.buffers import MessageLike
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.wire.checks import inside
from jagcodec.wire.column_sizes import Weighing, batch_node, columns_of
from jagcodec.wire.decoder import build, objects
from jagcodec.wire.frames import blob_end, buffer_bytes, is_blob
from jagcodec.wire.header import Header
from jagcodec.wire.inner_first import tensor_of
from jagcodec.wire.lazy import batch_of_message
from jagcodec.wire.message import Budget, ChosenRows, Message
from jagcodec.wire.message import open_message as opened
from jagcodec.wire.row_shapes import component_shapes, view_bounds
from jagcodec.wire.schema import FORMS, Node, child_step
from jagcodec.wire.spec import PLAIN, TORCH_DTYPES, Kind

# --- opening -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A column of a message, or another value in it.

    Attributes:
        name: Of a column its keys, joined with dots, or as a tuple where that could be another's
            name; of anything else a path that begins with $.
        node: What it is made of.
    """

    name: str
    node: Node


class OpenMessage(NamedTuple):
    """A message whose header was read.

    Attributes:
        path: What errors call it.
        message: It, open.
        bytes: All of it, as a blob if it is one, and otherwise its frames.
        behind: Bytes behind the end of a blob, which nobody reads.
        columns: Those of its batch; where it holds none, the values that its value is made of.
        beside: What stands beside the batch.
        batch: Whether it holds one.
    """

    path: str
    message: Message
    bytes: int
    behind: int
    columns: list[Entry]
    beside: list[Entry]
    batch: bool


def open_message(source: Any, path: str) -> OpenMessage:
    """A message of any value, with its checksums compared, if it has any.

    Args:
        source: Its frames, or a blob; only read, and kept alive.
        path: What errors call it.

    Raises:
        ArgumentTypeError: It is neither frames nor a blob.
        WireFormatError: It is malformed, or damaged.
        ArgumentError: Frames are compressed, and the library for that is not installed.
    """
    message = opened(source, path, by_range=True)
    arrays: Any = message.frames
    header = message.header
    total, behind = sum(map(len, arrays)), 0
    one = source if not isinstance(source, (list, tuple)) else source[0]
    whole = buffer_bytes(one, path)
    if len(arrays) == 1 + len(header.stored) and is_blob(whole):
        total = blob_end(len(arrays[0]), header.stored)
        behind = len(whole) - total
    root = header.schema.root
    batch = batch_node(root)
    if batch is None:
        return OpenMessage(path, message, total, behind, _values_of(root), [], False)
    columns = _named(columns_of(batch))
    return OpenMessage(path, message, total, behind, columns, _beside(root, batch), True)


def _named(columns: Iterable[tuple[tuple[str, ...], Node]]) -> list[Entry]:
    """Columns under names that no two of them share: those who compare messages go by these."""
    listed = [(".".join(keys), keys, node) for keys, node in columns]
    counts = Counter(name for name, _, _ in listed)
    return [
        Entry(str(keys) if counts[name] > 1 or name.startswith(("$", "('")) else name, node)
        for name, keys, node in listed
    ]


def _values_of(root: Node) -> list[Entry]:
    """What a value that is no batch is made of, one level down; of stacked batches the columns."""
    stacked = _stacked_columns(root)
    if stacked:
        return stacked
    if root.kind not in CONTAINERS or not root.children:
        return [Entry("$", root)]
    found = []
    for i, child in enumerate(root.children):
        step = child_step(root, i)
        found.append(Entry(f"$[{i}]" if type(step) is not str else child_path("$", step), child))
    return found


CONTAINERS = frozenset((Kind.LIST, Kind.TUPLE, Kind.MAP))
"""Kinds of values whose entries, where they are no batch, are what they are made of."""


def _stacked_columns(root: Node) -> list[Entry]:
    """The columns of a lazy stack of rows, each as the list of what its rows have of it.

    None where the rows are stacked along another dim, or have other columns than the first.
    """
    rows = root.children
    if root.kind is not Kind.LAZY_STACK or root.fields[0] != 0:
        return []
    if any(row.kind is not Kind.TENSORDICT for row in rows):
        return []
    columns = [dict(columns_of(row)) for row in rows]
    if not columns or any(row.keys() != columns[0].keys() for row in columns):
        return []
    lists = []
    for keys in columns[0]:
        node = Node(Kind.LIST, [], root.number, root.value)
        node.children = [row[keys] for row in columns]
        lists.append((keys, node))
    return _named(lists)


def _beside(root: Node, batch: Node) -> list[Entry]:
    if root.kind is Kind.USER:
        return [Entry("$.meta_info", root.children[0].children[1])]
    if root.kind is not Kind.MAP:
        return []
    pairs = zip(root.fields[0], root.children, strict=True)
    return [Entry(child_path("$", name), node) for name, node in pairs if node is not batch]


# --- descriptions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnDescription:
    """A column of a message, or another value in it.

    Attributes:
        name: Of a column its keys, joined with dots; of anything else a path that begins with $.
        kind: ``"jagged"``, ``"tensor"``, ``"object"`` or another kind, in small letters.
        dtype: What its cells are called on the wire; None where there are none.
        shape: With None for the ragged dim; None where it has none.
        stored: ``"narrow"`` where cells take fewer bytes than their dtype, ``"indirect"`` where
            rows lie elsewhere in the message, so that repeats are there once, else empty.
        bytes: What it takes of the message; cells that columns share are counted at the first.
        share: The same, of the whole message before frames were compressed; 0 to 1.
        rows: Which of `MessageDescription.rows_of` its rows are; None where it is not jagged.
        largest_row: Of jagged columns and rows of objects: the number of the first of the largest.
        largest_row_bytes: How many bytes its cells, or its document, take.
    """

    name: str
    kind: str
    dtype: str | None
    shape: tuple[int | None, ...] | None
    stored: str
    bytes: int
    share: float
    rows: int | None
    largest_row: int | None
    largest_row_bytes: int | None


@dataclass(frozen=True)
class RowLengths:
    """Rows that columns share.

    Attributes:
        columns: Their names.
        lengths: (N,) tokens of each row.
    """

    columns: tuple[str, ...]
    lengths: IntArray = field(repr=False)

    def histogram(self, bins: int = 8) -> list[tuple[int, int, int]]:
        """(first length, last length, rows) of at most `bins` ranges of lengths, equally wide."""
        if not len(self.lengths):
            return []
        least, most = int(self.lengths.min()), int(self.lengths.max())
        width = -(-(most - least + 1) // bins)
        counts = np.bincount((self.lengths - least) // width)
        ends = (least + width * (i + 1) - 1 for i in range(len(counts)))
        return [
            (end - width + 1, min(end, most), int(count))
            for end, count in zip(ends, counts, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the lengths themselves, for JSON."""
        lengths = self.lengths
        numbers: dict[str, Any] = dict.fromkeys(("min", "mean", "median", "max"))
        if len(lengths):
            numbers = {
                "min": int(lengths.min()),
                "mean": float(lengths.mean()),
                "median": float(np.median(lengths)),
                "max": int(lengths.max()),
            }
        return {
            "columns": list(self.columns),
            "rows": len(lengths),
            "tokens": int(lengths.sum()),
            **numbers,
            "histogram": [list(each) for each in self.histogram()],
        }


@dataclass(frozen=True)
class MessageDescription:
    """What a message is made of.

    Attributes:
        value: ``"TensorDict"``, ``"BatchedDataDict"`` or ``"dict"`` where `open_wire` finds a batch
            in it, else the kind of its value in small letters.
        rows: Of the batch; None where there is none, or it has no rows.
        bytes: All of it, as a blob if it is one, and otherwise its frames.
        plain_bytes: Header and frames before they were compressed.
        frames: How many, the header included.
        behind: Bytes behind the end of a blob, which nobody reads.
        narrow: Whether any cells are stored narrow.
        elide: Whether any column is indirect.
        compress: ``"zstd"`` if frames are compressed, otherwise None.
        checksum: Whether it has checksums, which were compared.
        columns: Those of the batch, or the values that the value is made of.
        beside: What stands beside the batch in a dict, or is its `meta_info`.
        meta: The names in `meta` of `encode`.
        rows_of: The rows of jagged columns.
        overhead: Bytes of the header, of offsets of rows, and of gaps.
    """

    value: str
    rows: int | None
    bytes: int
    plain_bytes: int
    frames: int
    behind: int
    narrow: bool
    elide: bool
    compress: str | None
    checksum: bool
    columns: tuple[ColumnDescription, ...]
    beside: tuple[ColumnDescription, ...]
    meta: tuple[str, ...] | None
    rows_of: tuple[RowLengths, ...]
    overhead: int

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        found = dict(vars(self))
        for name in ("columns", "beside"):
            found[name] = [
                {**vars(column), "shape": None if column.shape is None else list(column.shape)}
                for column in found[name]
            ]
        found["meta"] = None if self.meta is None else list(self.meta)
        found["rows_of"] = [rows.as_dict() for rows in self.rows_of]
        return found


def describe_message(source: MessageLike) -> MessageDescription:
    """What a message of any value is made of, from its header and the offsets of its rows.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields
        >>> from jagcodec.wire.description import describe_message
        >>> frames = encode_fields({"ids": torch.arange(12).view(3, 4)}, lengths=[3, 4, 3])
        >>> found = describe_message(frames)
        >>> found.rows, found.columns[0].kind, found.columns[0].shape, found.columns[0].bytes
        (3, 'jagged', (3, None), 80)
        >>> found.columns[0].largest_row, found.rows_of[0].lengths.tolist()
        (1, [3, 4, 3])

    Args:
        source: Frames or a blob; only read. Checksums are compared; no cell is looked at.

    Raises:
        ArgumentTypeError: It is neither frames nor a blob.
        WireFormatError: The header or offsets of rows are malformed, or bytes were damaged.
        ArgumentError: Frames are compressed, and the library for that is not installed.
    """
    return describe(open_message(source, "describe_message(source)"))


def describe(found: OpenMessage) -> MessageDescription:
    """As `describe_message`, of a message that is open."""
    message, header = found.message, found.message.header
    plain = header.total - sum(header.stored) + sum(header.sizes)
    weighing = Weighing(message)
    groups: dict[int, list[str]] = {}
    described = [
        [_column(message, entry, weighing, plain, groups) for entry in entries]
        for entries in (found.columns, found.beside)
    ]
    rows_of = tuple(
        RowLengths(tuple(names), message.row_splits(group).lengths)
        for group, names in groups.items()
    )
    counted = sum(column.bytes for columns in described for column in columns)
    return MessageDescription(
        _value_name(header.schema.root, found.batch),
        _rows(message, found.batch),
        found.bytes,
        plain,
        1 + len(header.sizes),
        found.behind,
        weighing.narrow,
        weighing.elide,
        "zstd" if header.compressed else None,
        has_checksums(header),
        tuple(described[0]),
        tuple(described[1]),
        _meta_names(message),
        rows_of,
        plain - counted,
    )


def has_checksums(header: Header) -> bool:
    """Whether a message has checksums; where it has no payload, of its header alone."""
    sizes = len(header.sizes) * (2 if header.compressed else 1)
    return len(header.numbers) > header.schema.numbers + 2 + 5 * len(header.groups) + sizes


def _value_name(root: Node, batch: bool) -> str:
    if batch:
        return {Kind.USER: "BatchedDataDict", Kind.MAP: "dict"}.get(root.kind, "TensorDict")
    return f"user type {root.fields[0]}" if root.kind is Kind.USER else root.kind.name.lower()


def _rows(message: Message, batch: bool) -> int | None:
    root = message.header.schema.root
    if not batch:
        return len(root.children) if root.kind is Kind.LAZY_STACK and root.fields[0] == 0 else None
    try:
        return len(batch_of_message(message))
    except WireFormatError:  # a batch without dims
        return None


def _meta_names(message: Message) -> tuple[str, ...] | None:
    """The names in `meta`; None of what this process cannot read."""
    try:
        return tuple(map(str, message.meta()))
    except WireFormatError as error:
        if error.reason not in UNKNOWN:
            raise
        return None


UNKNOWN = frozenset(("unknown_type", "pickle_refused"))
"""Reasons of errors about values that this process cannot make, of messages that may be sound."""


def _column(
    message: Message, entry: Entry, weighing: Weighing, plain: int, groups: dict[int, list[str]]
) -> ColumnDescription:
    name, node = entry
    rows = [weighing.sent(child) for child in node.children] if node.kind is Kind.LIST else None
    sent = weighing.sent(node) if rows is None else sum(rows)
    cells = node.children[0] if node.kind is Kind.INNER_FIRST else node
    group = largest = largest_bytes = None
    if cells.kind is Kind.JAGGED:
        number = message.numbers[cells.number + 3]
        groups.setdefault(number, []).append(name)
        group = [*groups].index(number)
    lengths, each = (rows, 1) if rows is not None else _row_sizes(message, cells)
    if len(lengths):
        largest = int(np.argmax(lengths))
        largest_bytes = int(lengths[largest]) * each
    return ColumnDescription(
        name,
        _kind(node),
        _dtype(cells),
        _shape(message, node),
        _stored(message, cells),
        sent,
        sent / plain if plain else 0.0,
        group,
        largest,
        largest_bytes,
    )


def _row_sizes(message: Message, node: Node) -> tuple[Sequence[int] | IntArray, int]:
    """What each row is long, and the bytes of one step of it; nothing where rows are alike."""
    if node.kind is Kind.TENSOR_VIEWS:
        starts, ends = view_bounds(message.payload, message.numbers, node)
        return ends - starts, node.itemsize * math.prod(message.shape(node)[1:])
    if node.kind is Kind.STRIDED_NESTED:
        return component_shapes(message.payload, message.numbers, node).prod(axis=1), node.itemsize
    if node.kind not in _GROUPED:
        return (), 1
    lengths = message.row_splits(message.numbers[node.number + 3]).lengths
    if node.kind is not Kind.JAGGED:
        return lengths, 1
    dims = list(message.shape(node))
    del dims[node.fields[2] - 1]
    return lengths, node.itemsize * math.prod(dims)


_GROUPED = frozenset((Kind.JAGGED, Kind.NON_TENSOR_ROWS, Kind.OBJECT_ARRAY))
_KINDS = {
    **dict.fromkeys((Kind.JAGGED, Kind.INNER_FIRST), "jagged"),
    **dict.fromkeys((Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_STACK), "object"),
}


def _kind(node: Node) -> str:
    if node.kind is Kind.USER:
        return f"type {node.fields[0]}"
    return _KINDS.get(node.kind, node.kind.name.lower())


def _dtype(node: Node) -> str | None:
    if node.kind is Kind.LIST:
        dtypes = {_dtype(child) for child in node.children}
        return dtypes.pop() if len(dtypes) == 1 else None
    if "dtype" not in FORMS.get(node.kind, _NO_FORM).fields:
        return None
    name = node.fields[0]
    return name if type(name) is str else str(name[0])


_NO_FORM = FORMS[Kind.TUPLE]


_Shape: TypeAlias = "tuple[int | None, ...]"


def _shape(message: Message, node: Node) -> _Shape | None:
    """Its dims, with None for the ragged one and (rows, ...) in front of it."""
    kind = node.kind
    if kind is Kind.INNER_FIRST:
        (child,), (dim,) = node.children, node.fields
        first, _, *rest = message.shape(child)
        dims: list[int | None] = [None, *rest]
        dims.insert(dim, first)
        return (message.row_splits(message.numbers[child.number + 3]).rows, *dims)
    if kind is Kind.JAGGED:
        dims = [*message.shape(node)]
        dims[node.fields[2] - 1] = None
        return (message.row_splits(message.numbers[node.number + 3]).rows, *dims)
    if kind is Kind.NON_TENSOR_ROWS:
        return (message.row_splits(message.numbers[node.number + 3]).rows,)
    if kind is Kind.LIST:
        return _shape_of_rows([_shape(message, child) for child in node.children])
    if kind is Kind.TENSOR_VIEWS:
        return (message.numbers[node.number + 4], None, *message.shape(node)[1:])
    if kind is Kind.STRIDED_NESTED:
        return _shape_of_rows(
            [*map(tuple, component_shapes(message.payload, message.numbers, node).tolist())]
        )
    form = FORMS.get(kind, _NO_FORM)
    dimensional = form.numbers[-1:] == ("*",)
    return message.shape(node) if dimensional else None


def _shape_of_rows(shapes: Sequence[_Shape | None]) -> _Shape | None:
    """That of a list of tensors: how many, and their dims, with None where these differ."""
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) < len(shapes) or len({*map(len, known)}) > 1:
        return None
    dims = (set(dim) for dim in zip(*known, strict=True))
    return (len(known), *(dim.pop() if len(dim) == 1 else None for dim in dims))


def _stored(message: Message, node: Node) -> str:
    form = FORMS.get(node.kind, _NO_FORM)
    if form.numbers[2:3] != ("stored",):
        return ""
    stored = message.numbers[node.number + 2]
    if stored == PLAIN:
        return ""
    if message.is_indirect(node):
        return "indirect"
    return "narrow" if "dtype" in form.fields and node.fields[0] in TORCH_DTYPES else ""


# --- soundness ---------------------------------------------------------------------------------


def check_message(source: MessageLike) -> tuple[OpenMessage, dict[str, str]]:
    """Read a message whole, as `decode` does, and keep nothing of it.

    Returns:
        The message; and of each value that this process cannot make, because its type is not
        registered or it is pickled, the name and why.

    Raises:
        ArgumentTypeError: As `describe_message`.
        WireFormatError: It is not a sound message; where, and why.
        ArgumentError: As `describe_message`.
    """
    found = open_message(source, "check_message(source)")
    message, unknown = found.message, {}
    for entry in (*found.columns, *found.beside):
        try:
            build(message, entry.node)
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                raise in_entry(entry, error) from error
            unknown[entry.name] = str(error)
    try:
        message.meta()
    except WireFormatError as error:
        if error.reason not in UNKNOWN:
            raise
        unknown["meta"] = str(error)
    if not unknown:
        build(message, message.header.schema.root)  # whether they fit together
    return found, unknown


def in_entry(entry: Entry, error: WireFormatError) -> WireFormatError:
    """The error of one column, or of another value, with its name in the path."""
    if entry.name.startswith("$"):
        return WireFormatError(
            error.reason, entry.name + error.path.removeprefix("$"), error.detail
        )
    return inside(error, entry.name)


# --- rows --------------------------------------------------------------------------------------


def chosen_entries(found: OpenMessage, names: Sequence[str] | None) -> list[Entry]:
    """The columns of these names, in this order; all of them for None."""
    everything = {entry.name: entry for entry in (*found.columns, *found.beside)}
    if names is None:
        return found.columns
    return [everything[name] for name in known_names(names, everything, "columns")]


def rows_at(
    found: OpenMessage, row: int, entries: Iterable[Entry]
) -> Iterator[tuple[str, Any, WireFormatError | None]]:
    """One row of each of these: its name, and the cells or the value; or why there is none.

    Where a value belongs to the whole batch it is the value itself.

    Raises:
        ArgumentIndexError: A column has no such row.
        WireFormatError: A column is malformed. Of a type that this process does not know the error
            is handed out in place of the value.
    """
    for entry in entries:
        try:
            yield entry.name, _row_at(found.message, entry, row), None
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                raise in_entry(entry, error) from error
            yield entry.name, None, error


def _row_at(message: Message, entry: Entry, row: int) -> Any:
    node = entry.node
    chosen = ChosenRows(range(row, row + 1))
    shape = _shape(message, node)
    if node.kind in _ROWS_AT and shape:
        _check_row(entry, row, shape[0] or 0)
        return _ROWS_AT[node.kind](message, node, chosen)
    value = build(message, node)
    return _row_of(entry, value, row)


def _row_of(entry: Entry, value: Any, row: int) -> Any:
    """A row of a value of any kind."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        value = value.unbind()
    elif isinstance(value, torch.Tensor) and value.dim() and value.layout is not torch.strided:
        value = value.to_dense()
    if hasattr(value, "tolist") and hasattr(value, "tensordicts"):  # a stack of payloads
        value = value.tolist()
    sized = isinstance(value, (list, tuple)) or (
        hasattr(value, "shape") and hasattr(value, "__getitem__") and len(value.shape)
    )
    if not sized or entry.node.kind is Kind.NON_TENSOR_DATA:
        return getattr(value, "data", value) if entry.node.kind is Kind.NON_TENSOR_DATA else value
    _check_row(entry, row, len(value))
    return value[row]


def _check_row(entry: Entry, row: int, rows: int) -> None:
    if row >= rows:
        expected = f"a row from 0 to {rows - 1}" if rows else "no row, for there is none"
        raise ArgumentIndexError("no_such_row", entry.name, f"expected {expected}, found {row}")


_ROWS_AT: dict[Kind, Callable[[Message, Node, ChosenRows], Any]] = {
    Kind.JAGGED: lambda message, node, chosen: message.jagged(node, chosen).unbind()[0],
    Kind.INNER_FIRST: lambda message, node, chosen: tensor_of(message, node, chosen).unbind()[0],
    Kind.TENSOR: lambda message, node, chosen: message.tensor(node, chosen)[0],
    Kind.NON_TENSOR_ROWS: lambda message, node, chosen: objects(
        message, node, Budget(message), chosen
    )[0],
}
