"""Where two messages differ: column, row and cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jagcodec._arguments import check_known
from jagcodec.batch.compare import WHOLE, Difference, columns_differ, compare
from jagcodec.batch.describe import Entry, OpenMessage, description_of, in_entry, open_source
from jagcodec.errors import WireFormatError
from jagcodec.wire.decoder import build
from jagcodec.wire.message import Message
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import Kind


def message_difference(
    left: Any, right: Any, *, columns: Sequence[str] | None = None
) -> Difference | None:
    """Where the values of two messages first differ, as `first_difference`.

    How they are stored (narrow, elided, compressed, with checksums) makes no difference. Batches
    are compared column by column, and one column of each is in memory at a time.

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
        WireFormatError: A message is malformed, or it holds a value of a type that this process
            does not know.
    """
    a = open_source(left, "message_difference(left)")
    b = open_source(right, "message_difference(right)")
    return next(differences(a, b, columns), None)


def differences(
    a: OpenMessage, b: OpenMessage, columns: Sequence[str] | None = None
) -> Iterator[Difference]:
    """As `message_difference`, of two that are open: the first difference of each column."""
    known: set[Any] = set()
    for part, found in _differences(a, b, columns):
        if part not in known:
            known.add(part)
            yield found


def _differences(
    a: OpenMessage, b: OpenMessage, columns: Sequence[str] | None
) -> Iterator[tuple[Any, Difference]]:
    """Differences, each with what it is in: first of names, types and shapes, then of cells."""
    left, right = ({entry.name: entry for entry in (*x.columns, *x.beside)} for x in (a, b))
    if columns is not None:
        check_known(columns, {**left, **right}, "columns")
        left, right = ({n: x[n] for n in x if n in columns} for x in (left, right))
    elif a.batch is None or b.batch is None:
        left, right = ({"$": Entry("$", (), x.message.header.schema.root)} for x in (a, b))
    else:
        yield from _differences_of_batches(a, b)
    if [*left] != [*right]:
        yield "columns", columns_differ(WHOLE, [*left], [*right])
    pairs = [(left[name], right[name]) for name in left if name in right]
    for cells in (False, True):
        for mine, other in pairs:
            at = replace(WHOLE, column=mine.name)
            found = compare(_value(a, mine), _value(b, other), at, cells)
            if found is not None:
                yield (mine.name,), found
        if columns is None:
            found = compare(_meta(a), _meta(b), replace(WHOLE, column="meta"), cells)
            if found is not None:
                yield "meta", found


def _differences_of_batches(a: OpenMessage, b: OpenMessage) -> Iterator[tuple[Any, Difference]]:
    types = [description_of(x).value for x in (a, b)]
    if types[0] != types[1]:
        yield "type", replace(WHOLE, what="type", left=types[0], right=types[1])
    left, right = (dict(_batch_sizes(x.message, x.batch, "")) for x in (a, b))
    for name, size in left.items():
        if name in right and size != right[name]:
            at = replace(WHOLE, column=name, what="batch size")
            yield ("size", name), replace(at, left=str(size), right=str(right[name]))


def _batch_sizes(message: Message, node: Node | None, name: str) -> Iterator[tuple[str, list[int]]]:
    """The dims of a batch and of those in it, by their names."""
    if node is not None and node.kind is Kind.TENSORDICT:
        yield name, list(message.shape(node))
        for key, child in zip(node.fields[-1], node.children, strict=True):
            yield from _batch_sizes(message, child, f"{name}.{key}" if name else key)


def _value(found: OpenMessage, entry: Entry) -> Any:
    with _naming(found):
        try:
            return build(found.message, entry.node)
        except WireFormatError as error:
            raise in_entry(entry, error) from error


def _meta(found: OpenMessage) -> dict[str, Any]:
    with _naming(found):
        return found.message.meta()


@contextmanager
def _naming(found: OpenMessage) -> Iterator[None]:
    """Put the name of a message before the path of its errors."""
    try:
        yield
    except WireFormatError as error:
        path = f"{found.path}: {error.path}"
        raise WireFormatError(error.reason, path, error.detail) from error
