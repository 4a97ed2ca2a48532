"""Where two batches, or two messages, first differ: column, row and cell."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict.tensorclass import NonTensorDataBase

from jagcodec._arguments import check_known
from jagcodec.batch.describe import (
    CONTAINERS,
    UNKNOWN,
    Entry,
    OpenMessage,
    PlaceReader,
    describe,
    document_bounds,
    in_entry,
    open_message,
)
from jagcodec.errors import WireFormatError, brief, child_path, shown
from jagcodec.memory.tensor_bytes import ByteArray, as_bytes
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import fields_of, unbatched_parts
from jagcodec.wire.decoder import build
from jagcodec.wire.encoder import encode
from jagcodec.wire.message import Message
from jagcodec.wire.schema import FORMS, Node
from jagcodec.wire.spec import Kind

LONGEST_VALUE = 80
"""Characters of a value in a `Difference`, at most."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two values.

    Attributes:
        column: Its name, those of nested columns joined with dots; empty for the whole batch, and
            a path that begins with $ in a value that is no batch.
        row: Its number; None where a whole column differs.
        cell: Indices of the cell within its row, ``(token,)`` or more; None where there are none.
        inside: The path in a row that holds an object; empty where the whole of it differs.
        what: What differs: ``"type"``, ``"dtype"``, ``"shape"``, ``"columns"``, ``"value"`` ...
        left: What it is in the first of the two, shortened.
        right: What it is in the second.
    """

    column: str
    row: int | None
    cell: tuple[int, ...] | None
    inside: str
    what: str
    left: str
    right: str

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**vars(self), "cell": None if self.cell is None else list(self.cell)}

    def __str__(self) -> str:
        name = shown(self.column, 60)
        place = [name if name.startswith("$") else f"column {name}"] if name else []
        place += [] if self.row is None else [f"row {brief(self.row)}"]
        place += [f"cell {list(self.cell)}"] if self.cell else []
        place += [shown(self.inside, 60)] if self.inside else []
        where = ", ".join(place) or "the whole"
        return f"{where}: {self.what} {self.left} and {self.right}"


_WHOLE = Difference("", None, None, "", "", "", "")


def first_difference(left: Any, right: Any) -> Difference | None:
    """Where two values first differ, bit for bit; None where they are the same.

    Names, batch sizes, dtypes, shapes and lengths of rows of all columns are compared first, and
    then cells, column by column in the order of the first batch and row by row. Cells are the same
    if their bits are: a NaN equals the same NaN, 0.0 and -0.0 differ.

    Example:
        >>> import torch
        >>> from jagcodec.batch.difference import first_difference
        >>> a = {"ids": torch.tensor([[1, 2], [3, 4]]), "reward": torch.tensor([0.5, 1.0])}
        >>> b = {"ids": torch.tensor([[1, 2], [3, 5]]), "reward": torch.tensor([0.5, 1.0])}
        >>> found = first_difference(a, b)
        >>> found.column, found.row, found.cell, found.left, found.right
        ('ids', 1, (1,), '4', '5')
        >>> print(found)
        column ids, row 1, cell [1]: value 4 and 5

    Args:
        left: A TensorDict, a dict of columns, or any other value that `encode` takes.
        right: Another. Neither is changed. Holes of nested tensors, memory maps and whether a
            tensor is a parameter make no difference.

    Raises:
        UnsupportedTypeError: An object in one of them is not one that `encode` takes, so that its
            bits are not known.
    """
    for cells in (False, True):
        found = _compare(left, right, _WHOLE, cells)
        if found is not None:
            return found
    return None


# --- messages ----------------------------------------------------------------------------------


def message_difference(
    left: Any, right: Any, *, columns: Sequence[str] | None = None
) -> Difference | None:
    """Where the values of two messages first differ, as `first_difference`.

    How they are stored (narrow, elided, compressed, with checksums) makes no
    difference. Batches are compared column by column, and one column of each is in memory at a
    time. A value of a type that this process does not know is the same where its bytes are.

    Example:
        >>> from jagcodec import encode
        >>> from jagcodec.batch.difference import message_difference
        >>> left, right = {"step": 3, "tags": ["a", "b"]}, {"step": 3, "tags": ["a"]}
        >>> print(message_difference(encode(left), encode(right)))
        $.tags: length 2 and 1

    Args:
        left: Frames or a blob.
        right: Another message.
        columns: Names of the only columns to compare; None for everything.

    Raises:
        ArgumentKeyError: Neither has a column of this name.
        WireFormatError: A message is malformed; or it holds a value of a type that this process
            does not know, whose bytes differ from those in the other.
        UnsupportedTypeError: As `first_difference`.
    """
    a = open_message(left, "message_difference(left)")
    b = open_message(right, "message_difference(right)")
    return difference_of(a, b, columns)


def difference_of(
    a: OpenMessage, b: OpenMessage, columns: Sequence[str] | None = None
) -> Difference | None:
    """As `message_difference`, of two that are open."""
    both = [{entry.name: entry for entry in (*x.columns, *x.beside)} for x in (a, b)]
    if columns is not None:
        check_known(columns, {**both[0], **both[1]}, "columns")
        both = [{name: entry for name, entry in x.items() if name in columns} for x in both]
    if not (a.batch and b.batch):
        kinds = [x.message.header.schema.root.kind for x in (a, b)]
        apart = kinds[0] is kinds[1] and kinds[0] in CONTAINERS and [*both[0]] == [*both[1]]
        if columns is None and not apart:
            return _difference_of_nodes(a, _root(a), b, _root(b))
    else:
        found = _structure(a, b, both, columns is None)
        if found is not None:
            return found
    if [*both[0]] != [*both[1]]:
        return _columns_differ(_WHOLE, [*both[0]], [*both[1]])
    # Names, dtypes and shapes of all columns before the cells of any.
    for name, entry in both[0].items():
        found = _difference_of_nodes(a, entry, b, both[1][name])
        if found is not None:
            return found
    return None if columns is not None else _difference_of_metas(a, b)


def _structure(
    a: OpenMessage, b: OpenMessage, both: list[dict[str, Entry]], whole: bool
) -> Difference | None:
    """What differs of two batches before a cell is looked at."""
    descriptions = []
    for x in (a, b):
        with _naming(x):
            descriptions.append(describe(x))
    first, second = descriptions
    if whole:
        if first.value != second.value:
            return replace(_WHOLE, what="type", left=first.value, right=second.value)
        sizes = [dict(_batch_sizes(x)) for x in (a, b)]
        for keys, size in sizes[0].items():
            if keys in sizes[1] and size != sizes[1][keys]:
                texts = [str(list(x)) for x in (size, sizes[1][keys])]
                return replace(
                    _WHOLE, column=".".join(keys), what="batch size", left=texts[0], right=texts[1]
                )
        if [*sizes[0]] != [*sizes[1]]:
            return _columns_differ(_WHOLE, *(list(map(".".join, size)) for size in sizes))
    if [*both[0]] != [*both[1]]:
        return _columns_differ(_WHOLE, [*both[0]], [*both[1]])
    left = {c.name: c for c in (*first.columns, *first.beside)}
    right = {c.name: c for c in (*second.columns, *second.beside)}
    for name in both[0]:
        for what in ("kind", "dtype", "shape"):
            values = getattr(left[name], what), getattr(right[name], what)
            if values[0] != values[1]:
                texts = [_shape_text(v) if what == "shape" else str(v) for v in values]
                return replace(_WHOLE, column=name, what=what, left=texts[0], right=texts[1])
    for name in both[0]:
        rows = left[name].rows, right[name].rows
        if rows[0] is not None and rows[1] is not None:
            lengths = first.rows_of[rows[0]].lengths, second.rows_of[rows[1]].lengths
            found = _lengths_differ(*lengths, replace(_WHOLE, column=name))
            if found is not None:
                return found
    return None


def _shape_text(shape: Any) -> str:
    return str(None if shape is None else ["*" if dim is None else dim for dim in shape])


def _batch_sizes(found: OpenMessage) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The batch and those in it: their dims, by their names."""

    def within(node: Node, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if node.kind is Kind.TENSORDICT:
            yield name, found.message.shape(node)
        for key, child in zip(node.fields[-1], node.children, strict=True):
            if child.kind is Kind.TENSORDICT:
                yield from within(child, (*name, key))

    if found.batch is not None:
        yield from within(found.batch, ())


def _root(found: OpenMessage) -> Entry:
    return Entry("$", (), found.message.header.schema.root)


def _difference_of_nodes(
    a: OpenMessage, left: Entry, b: OpenMessage, right: Entry
) -> Difference | None:
    values = []
    for found, entry in ((a, left), (b, right)):
        try:
            values.append(build(found.message, entry.node))
        except WireFormatError as error:
            if error.reason in UNKNOWN and _stored_alike(
                (a.message, left.node), (b.message, right.node)
            ):
                return None
            with _naming(found):
                raise in_entry(entry, error) from error
    start = replace(_WHOLE, column=left.name)
    for cells in (False, True):
        found_difference = _compare(values[0], values[1], start, cells)
        if found_difference is not None:
            return found_difference
    return None


def _difference_of_metas(a: OpenMessage, b: OpenMessage) -> Difference | None:
    packed = [_packed_meta(x.message) for x in (a, b)]
    if packed[0] == packed[1]:
        return None
    metas = []
    for x in (a, b):
        with _naming(x):
            metas.append({"meta": x.message.meta()})
    return first_difference(*metas)


@contextmanager
def _naming(found: OpenMessage) -> Iterator[None]:
    """Put what a message is called in front of what errors say of it."""
    try:
        yield
    except WireFormatError as error:
        path = f"{found.path}: {error.path}"
        raise WireFormatError(error.reason, path, error.detail) from error


def _packed_meta(message: Message) -> bytes:
    header = message.header
    bounds = document_bounds(header.packed_values)[header.schema.values :]
    return header.packed_values[bounds[0][0] :] if bounds else b""


def _stored_alike(*sides: tuple[Message, Node]) -> bool:
    """Whether two nodes are stored as the same bytes, whatever those mean."""
    first, second = (
        _stored(message, node, PlaceReader(message), document_bounds(message.header.packed_values))
        for message, node in sides
    )
    return all(x == y for x, y in zip(first, second, strict=False)) and not any(
        next(rest, None) is not None for rest in (first, second)
    )


def _stored(
    message: Message, node: Node, reader: PlaceReader, values: list[tuple[int, int]]
) -> Iterator[Any]:
    """The fields of a node, its bytes, and those of the nodes in it."""
    yield node.kind, node.fields, message.shape(node)
    if node.kind is Kind.VALUE:
        start, end = values[node.value]
        yield message.header.packed_values[start:end]
    form = FORMS.get(node.kind)
    if form is not None and form.numbers:
        if form.numbers[2:3] == ("stored",):
            yield message.numbers[node.number + 2]
        if "group" in form.numbers:
            group = message.numbers[node.number + form.numbers.index("group")]
            yield message.row_splits(group).host.tobytes()
        for place in reader.places(node):
            yield message.payload.read(*place).tobytes()
    for child in node.children:
        yield from _stored(message, child, reader, values)


# --- values ------------------------------------------------------------------------------------


def _compare(a: Any, b: Any, at: Difference, cells: bool) -> Difference | None:
    """The first difference at a place; without `cells` none of cells and objects in rows."""
    if isinstance(a, UnbatchedTensor) and isinstance(b, UnbatchedTensor):
        (size, left), (other, right) = unbatched_parts(a), unbatched_parts(b)
        return _other(at, "batch size", size, other) or _compare(left, right, at, cells)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors(a, b, at, cells)
    if type(a) is not type(b):
        return replace(at, what="type", left=_type(a), right=_type(b))
    if isinstance(a, NonTensorStack):
        return _other(at, "batch size", a.batch_size, b.batch_size) or (
            _objects(a.tolist(), b.tolist(), at) if cells else None
        )
    if isinstance(a, NonTensorDataBase):
        return _other(at, "batch size", a.batch_size, b.batch_size) or (
            _objects([a.data], [b.data], at, whole=True) if cells else None
        )
    if isinstance(a, TensorDictBase):
        return _tensordicts(a, b, at, cells)
    if is_tensorclass(a):
        (left, others), (right, more) = fields_of(a), fields_of(b)
        return _compare(left, right, at, cells) or _compare(others, more, at, cells)
    if isinstance(a, dict):
        found = _columns(a, b, at, cells)
        if found is None and hasattr(a, "meta_info"):
            found = _compare(a.meta_info, b.meta_info, _step(at, "meta_info"), cells)
        return found
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return replace(at, what="length", left=str(len(a)), right=str(len(b)))
        # Most often equal, which their bytes say much sooner.
        if cells and _same_bytes(a, b):
            return None
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            found = _compare(x, y, _step(at, i), cells)
            if found is not None:
                return found
        return None
    if isinstance(a, np.ndarray):
        return _arrays(a, b, at, cells)
    if not cells or _same_bytes(a, b):
        return None
    return replace(at, what="value", left=_text(a), right=_text(b))


def _other(at: Difference, what: str, a: Any, b: Any) -> Difference | None:
    if a == b:
        return None
    texts = [str(list(x) if isinstance(x, torch.Size) else x) for x in (a, b)]
    return replace(at, what=what, left=texts[0], right=texts[1])


def _step(at: Difference, key: Any) -> Difference:
    """A place one key or index further in: the column, then the row, then a path in the row."""
    if at.column == "" and type(key) is str:
        return replace(at, column=key)
    if at.column.startswith("$") and at.row is None:  # of a value that is no batch
        step = f"{at.column}[{brief(key)}]" if type(key) is int else child_path(at.column, key)
        return replace(at, column=step)
    if at.row is None and type(key) is int and not at.inside:
        return replace(at, row=key)
    inside = at.inside or "$"
    return replace(
        at, inside=f"{inside}[{brief(key)}]" if type(key) is int else child_path(inside, key)
    )


def _columns_differ(at: Difference, a: Sequence[Any], b: Sequence[Any]) -> Difference:
    """Names that one of two has alone, or their order."""
    known = set(a), set(b)
    alone = [[x for x in a if x not in known[1]], [x for x in b if x not in known[0]]]
    if not any(alone):
        return replace(at, what="order of columns", left=_names(a), right=_names(b))
    without = "without it" if sum(map(len, alone)) == 1 else "without them"
    texts = [f"with {_names(names)}" if names else without for names in alone]
    return replace(at, what="columns", left=texts[0], right=texts[1])


def _names(names: Sequence[Any]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(shown(x, 60) if type(x) is str else brief(x) for x in names[:8]) + more


def _columns(
    a: Mapping[Any, Any], b: Mapping[Any, Any], at: Difference, cells: bool
) -> Difference | None:
    # By items, because a TensorDict iterates over its rows.
    left, right = dict(a.items()), dict(b.items())
    same = len(left) == len(right) and _same_bytes([*left], [*right])
    if not same:
        return _columns_differ(at, [*left], [*right])
    for (key, x), y in zip(left.items(), right.values(), strict=True):
        inner = replace(at, column=f"{at.column}.{key}") if _nests(at, a) else _step(at, key)
        found = _compare(x, y, inner, cells)
        if found is not None:
            return found
    return None


def _nests(at: Difference, batch: Any) -> bool:
    """Whether the keys of this are those of columns within a column."""
    return isinstance(batch, TensorDictBase) and at.column != "" and at.row is None


def _tensordicts(a: Any, b: Any, at: Difference, cells: bool) -> Difference | None:
    found = _other(at, "batch size", a.batch_size, b.batch_size)
    if found is not None:
        return found
    if isinstance(a, LazyStackedTensorDict):
        found = _other(at, "stack dim", a.stack_dim, b.stack_dim)
        return found or _compare(list(a.tensordicts), list(b.tensordicts), at, cells)
    return _columns(a, b, at, cells)


def _objects(
    a: Sequence[Any], b: Sequence[Any], at: Difference, whole: bool = False
) -> Difference | None:
    """Objects of rows; or, of the `whole` batch, one of all of them."""
    if _same_bytes(a, b):
        return None
    for row, (x, y) in enumerate(zip(a, b, strict=True)):
        inner = replace(at, inside=at.inside or "$") if whole else _step(at, row)
        found = _compare(x, y, inner, False) or _compare(x, y, inner, True)
        if found is not None:
            return found
    return None


def _same_bytes(a: Any, b: Any) -> bool:
    """Whether two values are equal as messages: equal objects give equal bytes."""
    first, second = (encode([value]) for value in (a, b))
    return len(first) == len(second) and all(x == y for x, y in zip(first, second, strict=True))


# --- cells -------------------------------------------------------------------------------------


def _tensors(a: torch.Tensor, b: torch.Tensor, at: Difference, cells: bool) -> Difference | None:
    if is_jagged(a) != is_jagged(b) or a.is_nested != b.is_nested or a.layout != b.layout:
        return replace(at, what="layout", left=_layout(a), right=_layout(b))
    found = _other(at, "dtype", a.dtype, b.dtype)
    if found is not None:
        return found
    if is_jagged(a):
        return _jagged(a, b, at, cells)
    if a.is_nested:
        return _compare(list(a.unbind()), list(b.unbind()), at, cells)
    found = _other(at, "shape", a.shape, b.shape)
    if found is not None:
        return found
    if a.layout is torch.strided:
        return _bits(a, b, at) if cells else None
    found = _other(at, "coalesced", a.is_coalesced(), b.is_coalesced())
    for part in ("_indices", "_values"):
        found = found or _tensors(
            getattr(a, part)(), getattr(b, part)(), _step(at, part.strip("_")), cells
        )
    return found


def _layout(tensor: torch.Tensor) -> str:
    return "jagged" if is_jagged(tensor) else str(tensor.layout).removeprefix("torch.")


def _jagged(a: torch.Tensor, b: torch.Tensor, at: Difference, cells: bool) -> Difference | None:
    left, right = view_of(a, "left"), view_of(b, "right")
    dim = left.ragged_dim
    found = _other(at, "ragged dim", dim, right.ragged_dim)
    if found is not None:
        return found
    shapes = [[view.row_splits.rows, *view.values_shape] for view in (left, right)]
    for shape in shapes:
        shape[dim] = -1
    texts = [_shape_text([None if x == -1 else x for x in shape]) for shape in shapes]
    found = _other(at, "shape", *texts) or _lengths_differ(
        left.row_splits.lengths, right.row_splits.lengths, at
    )
    if found is not None or not cells:
        return found
    # Tokens first, so that the first difference is that of the first row.
    values = [values_of(view).movedim(dim - 1, 0) for view in (left, right)]
    cell = _first_cell(*values)
    if cell is None:
        return None
    row = int(np.searchsorted(left.row_splits.host, cell[0], side="right")) - 1
    index = list(cell[1:])
    index.insert(dim - 1, cell[0] - int(left.row_splits.host[row]))
    texts = _cell_texts(*(x[cell] for x in values))
    return replace(at, row=row, cell=tuple(index), what="value", left=texts[0], right=texts[1])


def _lengths_differ(a: Any, b: Any, at: Difference) -> Difference | None:
    if len(a) != len(b):
        return replace(at, what="rows", left=str(len(a)), right=str(len(b)))
    rows = np.flatnonzero(a != b)
    if not len(rows):
        return None
    row = int(rows[0])
    return replace(at, row=row, what="tokens", left=str(a[row]), right=str(b[row]))


def _bits(a: torch.Tensor, b: torch.Tensor, at: Difference) -> Difference | None:
    cell = _first_cell(a, b)
    if cell is None:
        return None
    left, right = _cell_texts(a[cell], b[cell])
    return replace(_at_cell(at, cell), what="value", left=left, right=right)


def _at_cell(at: Difference, cell: tuple[int, ...]) -> Difference:
    """A cell of a column, whose first index is the row; or of an array in a row."""
    if at.row is None and not at.inside:
        return replace(at, row=cell[0], cell=cell[1:]) if cell else at
    return replace(at, cell=cell)


def _first_cell(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...] | None:
    """The index of the first cell whose bits differ, of two tensors of one dtype and shape."""
    at = _first_byte(as_bytes(a), as_bytes(b))
    if at is None:
        return None
    return tuple(int(i) for i in np.unravel_index(at // a.dtype.itemsize, tuple(a.shape)))


def _first_byte(a: ByteArray, b: ByteArray) -> int | None:
    """Where bytes differ first; compared a piece at a time, as each comparison takes memory."""
    for start in range(0, len(a), _PIECE):
        places = np.flatnonzero(a[start : start + _PIECE] != b[start : start + _PIECE])
        if len(places):
            return start + int(places[0])
    return None


_PIECE = 1 << 24


def _cell_texts(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    """Two cells as people read them; with their bits where that says no difference."""
    texts = []
    for cell in (a, b):
        try:
            texts.append(repr(cell.item()))
        except (RuntimeError, NotImplementedError):  # of dtypes that torch cannot print
            texts.append("")
    if texts[0] != texts[1]:
        return texts
    bits = [as_bytes(cell)[::-1].tobytes().hex() for cell in (a, b)]
    return [f"{text} (bits {each})".strip() for text, each in zip(texts, bits, strict=True)]


def _arrays(a: Any, b: Any, at: Difference, cells: bool) -> Difference | None:
    found = _other(at, "dtype", a.dtype, b.dtype) or _other(at, "shape", a.shape, b.shape)
    if found is not None or not cells or _same_bytes(a, b):
        return found
    for index in np.ndindex(a.shape):
        x, y = a[index], b[index]
        found = _compare(x, y, _at_cell(at, index), False) or _compare(
            x, y, _at_cell(at, index), True
        )
        if found is not None:
            return found
    return None


def _type(value: Any) -> str:
    return type(value).__name__


def _text(value: Any) -> str:
    """A value in few words, with the bits of a float where it may take them to differ."""
    if isinstance(value, float) and value != value:
        return f"nan (bits {struct.pack('>d', value).hex()})"
    try:
        if isinstance(value, (str, bytes, bool, int, float, complex, type(None))):
            return shown(repr(value) if len(str(value)) < 1000 else brief(value), LONGEST_VALUE)
        if isinstance(value, (set, frozenset, np.generic, range, slice, torch.dtype, torch.device)):
            return shown(repr(value)[:1000], LONGEST_VALUE)
    except (ValueError, RuntimeError):  # an int too long for Python, a slice with an int1 tensor
        pass
    return brief(value)
