"""Where two messages differ: column, row and cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jagcodec._arguments import check_known
from jagcodec.batch.compare import (
    WHOLE,
    Difference,
    columns_differ,
    compare,
    first_difference,
    lengths_differ,
    shape_text,
)
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
from jagcodec.errors import WireFormatError
from jagcodec.wire.decoder import build
from jagcodec.wire.message import Message
from jagcodec.wire.schema import FORMS, Node
from jagcodec.wire.spec import Kind

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
        return columns_differ(WHOLE, [*both[0]], [*both[1]])
    # Names, dtypes and shapes of all columns before the cells of any.
    for name, entry in both[0].items():
        found = _difference_of_nodes(a, entry, b, both[1][name])
        if found is not None:
            return found
    return None if columns is not None else _difference_of_metas(a, b)


def differences_of(
    a: OpenMessage, b: OpenMessage, columns: Sequence[str] | None = None
) -> list[Difference]:
    """The first difference of each column that differs, of two messages that are open."""
    first = difference_of(a, b, columns)
    if first is None or not (a.batch and b.batch):
        return [] if first is None else [first]
    both = [{entry.name: entry for entry in (*x.columns, *x.beside)} for x in (a, b)]
    if columns is not None:
        both = [{name: entry for name, entry in x.items() if name in columns} for x in both]
    found: list[Difference | None] = []
    if [*both[0]] != [*both[1]]:
        found.append(columns_differ(WHOLE, *map(list, both)))
    for name in (name for name in both[0] if name in both[1]):
        found.append(_difference_of_nodes(a, both[0][name], b, both[1][name]))
    found.append(None if columns is not None else _difference_of_metas(a, b))
    # One that no column has, such as another batch size, is the first.
    return [each for each in found if each is not None] or [first]


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
            return replace(WHOLE, what="type", left=first.value, right=second.value)
        sizes = [dict(_batch_sizes(x)) for x in (a, b)]
        for keys, size in sizes[0].items():
            if keys in sizes[1] and size != sizes[1][keys]:
                texts = [str(list(x)) for x in (size, sizes[1][keys])]
                return replace(
                    WHOLE, column=".".join(keys), what="batch size", left=texts[0], right=texts[1]
                )
        if [*sizes[0]] != [*sizes[1]]:
            return columns_differ(WHOLE, *(list(map(".".join, size)) for size in sizes))
    if [*both[0]] != [*both[1]]:
        return columns_differ(WHOLE, [*both[0]], [*both[1]])
    left = {c.name: c for c in (*first.columns, *first.beside)}
    right = {c.name: c for c in (*second.columns, *second.beside)}
    for name in both[0]:
        for what in ("kind", "dtype", "shape"):
            values = getattr(left[name], what), getattr(right[name], what)
            if values[0] != values[1]:
                texts = [shape_text(v) if what == "shape" else str(v) for v in values]
                return replace(WHOLE, column=name, what=what, left=texts[0], right=texts[1])
    for name in both[0]:
        rows = left[name].rows, right[name].rows
        if rows[0] is not None and rows[1] is not None:
            lengths = first.rows_of[rows[0]].lengths, second.rows_of[rows[1]].lengths
            found = lengths_differ(*lengths, replace(WHOLE, column=name))
            if found is not None:
                return found
    return None


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
    start = replace(WHOLE, column=left.name)
    for cells in (False, True):
        found_difference = compare(values[0], values[1], start, cells)
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
