"""The rows of several batches one after the other, and columns of several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec.batch.joined import JoinedColumns, JoinedRows, Messages
from jagcodec.batch.rows import Batch, concat_batches
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    WireFormatError,
    describe,
)
from jagcodec.wire.lazy import WireBatch, open_whole
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.spec import Kind
from jagcodec.wire.stacked import of_message, open_messages, stacked

B = TypeVar("B", bound=Batch)


def concat_rows(batches: Iterable[B]) -> B:
    """The rows of several batches, one batch after the other.

    Args:
        batches: At least one; all of one kind and with the same columns, in any order. As for
            `select_rows`; the rows of `WireBatch`es are read if there are batches of other kinds
            among them.

    Returns:
        A batch of the same kind; the batches are untouched. Of `WireBatch`es it is a `WireBatch`
        over all of them: nothing is read or copied until a column is asked for. Of the others
        every column is copied once. Columns of equal row lengths share one offsets tensor. A
        non-tensor payload of the whole batch stays one if all batches have the same, bit for
        bit; unequal ones become one row each (a `NonTensorStack`). ``meta_info`` is joined.

    Raises:
        ArgumentError: There is no batch; a column differs between batches in layout, dtype,
            device or the shape of a row (nothing is promoted or guessed); or ``meta_info`` holds
            unequal values under one key.
        ArgumentKeyError: A batch lacks a column of another; both are named.
        ArgumentTypeError: Batches or columns are not of one kind.

    Example:
        >>> import torch
        >>> from jagcodec import concat_rows, pack_jagged_fields
        >>> def batch(*rows):
        ...     ids = torch.tensor(rows)
        ...     return pack_jagged_fields({"ids": ids}, lengths=(ids > 0).sum(1))
        >>> both = concat_rows([batch([5, 6, 0], [7, 8, 9]), batch([3, 4])])
        >>> [row.tolist() for row in both["ids"].unbind()]
        [[5, 6], [7, 8, 9], [3, 4]]
    """
    where = "concat_rows"
    listed = batches
    if not isinstance(batches, (TensorDictBase, dict, WireBatch)):
        listed = list(batches)
        if listed and all(isinstance(batch, WireBatch) for batch in listed):
            return join_rows(listed, where)  # type: ignore[return-value, arg-type]
    joined: B = concat_batches(listed, where)
    return joined


def join_columns(batches: Iterable[Any], *, replace: bool = False) -> WireBatch:
    """Messages with other columns of the same rows, side by side: what a worker wrote back.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, join_columns, materialize
        >>> lengths = torch.tensor([2, 3])
        >>> rollout = encode_fields({"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=lengths)
        >>> scores = encode_fields({"logprobs": torch.ones(2, 3)}, lengths=lengths)
        >>> both = join_columns([rollout, scores])
        >>> both.fields, materialize(both)["logprobs"].tolist()
        (('ids', 'logprobs'), [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])

    Args:
        batches: Open messages, or the frames or the blob of each; at least one.
        replace: Let columns of later messages take the place of those of the same name.

    Returns:
        A `WireBatch` over all of them. Nothing is copied, and of the payloads only the row
        lengths of jagged columns are read. Its `meta` has what no two messages disagree on.

    Raises:
        ArgumentError: There is no message, they differ in their number of rows, a jagged column
            has row lengths that none of the first message has (the row is named), or two have a
            column of the same name.
        ArgumentTypeError: `batches` is one message.
        WireFormatError: One is damaged; it is said which.
    """
    where = "join_columns"
    listed = _several(batches, where)
    opened = [
        batch if isinstance(batch, WireBatch) else _opened(i, batch)
        for i, batch in enumerate(listed)
    ]
    first = opened[0]
    known = [(n, lengths) for n in first.fields if (lengths := first.row_lengths(n)) is not None]
    sources: dict[str, WireBatch] = {}
    for i, batch in enumerate(opened):
        if len(batch) != len(first):
            raise ArgumentError(
                "row_mismatch",
                f"{where}(batches[{i}])",
                f"expected {len(first)} rows, like the first message, found {len(batch)}",
            )
        for name in batch.fields:
            path = f"{where}(batches[{i}])[{name!r}]"
            if name in sources and not replace:
                raise ArgumentError(
                    "conflict",
                    path,
                    "expected a new name, found a column of it in an earlier message; pass "
                    "replace=True, or select the others",
                )
            lengths = batch.row_lengths(name) if i and known else None
            if lengths is not None and not any(np.array_equal(lengths, k) for _, k in known):
                like, expected = known[0]
                row = int(np.flatnonzero(lengths != expected)[0])
                raise ArgumentError(
                    "bad_length",
                    f"{path}, row {row}",
                    f"expected {expected[row]} tokens like {like!r} of the first message, found "
                    f"{lengths[row]}",
                )
            sources[name] = batch
    return JoinedColumns(sources, opened, first)


# --- several messages --------------------------------------------------------------------------


def join_messages(sources: Sequence[Any], where: str) -> WireBatch:
    """The rows of several messages, given as lists of frames or as blobs, opened together.

    Raises:
        ArgumentKeyError: They do not have the same columns.
        WireFormatError: One is damaged, or not the message of a batch; it is said which.
    """
    stacks, frames = open_messages(sources, where, DEFAULT_LIMITS)
    counts = np.zeros(len(sources), dtype=np.int64)
    with_nodes = []
    for stack in stacks:
        root = stack.schema.root
        if root.kind is not Kind.TENSORDICT or root.fields[:2] != [1, None]:
            # Batches in dicts, and such with dim names or more dims, each as it is.
            return join_rows([_opened(i, source) for i, source in enumerate(sources)], where)
        with_nodes.append((stack, dict(zip(root.fields[2], root.children, strict=True))))
        counts[stack.members] = stack.numbers[:, root.dims]
    fields = _same_fields([(int(s.members[0]), nodes) for s, nodes in with_nodes], where)
    messages = Messages(counts, lambda i: _opened(i, sources[i]), with_nodes, frames)
    return JoinedRows(messages, fields, None, None)


def join_rows(batches: Sequence[WireBatch], where: str) -> WireBatch:
    """The rows of several open batches, as chosen in each.

    Raises:
        ArgumentKeyError: They do not have the same columns.
        ArgumentError: They differ in their batch dims behind the first.
    """
    fields = _same_fields(list(enumerate(batch.fields for batch in batches)), where)
    first = batches[0]
    for i, batch in enumerate(batches):
        if batch.batch_size[1:] != first.batch_size[1:]:
            raise ArgumentError(
                "bad_shape",
                f"{where} of batch {i}",
                f"expected batch dims {list(first.batch_size[1:])} behind the first, like batch 0, "
                f"found {list(batch.batch_size[1:])}",
            )
    whole = [batch.whole() for batch in batches]
    counts = np.array([len(batch) for batch in whole], dtype=np.int64)
    in_place = [batch.in_place() for batch in whole]
    if all(found is not None for found in in_place):
        known: Any = in_place
        stacks = stacked((i, header) for i, (header, _, _) in enumerate(known))
        nodes = [(stack, known[int(stack.members[0])][1]) for stack in stacks]
        beside = any(batch.has_more for batch in whole)
        held = [frames for _, _, frames in known]
        messages = Messages(counts, whole.__getitem__, nodes, held, beside=beside)
    else:
        messages = Messages(counts, whole.__getitem__)
    chosen = [batch.chosen_rows() for batch in batches]
    if all(rows is None for rows in chosen):
        return JoinedRows(messages, fields, None, first)
    index = [
        np.arange(count) if rows is None else np.asarray(rows, dtype=np.int64)
        for rows, count in zip(chosen, counts.tolist(), strict=True)
    ]
    bases = np.repeat(np.cumsum(counts) - counts, [len(rows) for rows in index])
    return JoinedRows(messages, fields, np.concatenate(index) + bases, first)


def readable(source: Any, where: str) -> Any:
    """A batch of what `materialize` takes: a message in any form, several of them, or a batch."""
    if isinstance(source, (WireBatch, TensorDictBase)):
        return source
    if isinstance(source, (list, tuple)) and source:
        items = [type(item) for item in source]
        if any(issubclass(kind, (list, tuple)) for kind in items):
            if all(issubclass(kind, (list, tuple)) for kind in items):
                return join_messages(source, where)
            source = [
                item if isinstance(item, WireBatch) else _opened(i, item)
                for i, item in enumerate(source)
            ]
            items = [WireBatch]
        if all(issubclass(kind, WireBatch) for kind in items):
            return join_rows(source, where)
        return open_whole(source, where)
    if isinstance(source, (bytes, bytearray, memoryview, np.ndarray, torch.Tensor)):
        return open_whole(source, where)
    raise ArgumentTypeError(
        "bad_type",
        where,
        "expected a TensorDict, a message (its frames, a blob, or a WireBatch), or a list of "
        f"messages, found {describe(source)}",
    )


def _several(batches: Iterable[Any], where: str) -> list[Any]:
    one = isinstance(batches, (WireBatch, bytes, bytearray, memoryview, np.ndarray, torch.Tensor))
    listed = [] if one else list(batches)
    if one or any(isinstance(item, (bytes, bytearray, memoryview)) for item in listed[:1]):
        raise ArgumentTypeError(
            "bad_type", f"{where}(batches)", "expected a list of messages, found one message"
        )
    if not listed:
        raise ArgumentError("bad_option", f"{where}(batches)", "expected messages, found none")
    return listed


def _opened(index: int, source: Any) -> WireBatch:
    """One of several messages, opened; an error says which it is."""
    try:
        return open_whole(source, f"message {index}")
    except WireFormatError as error:
        raise of_message(index, error) from error


def _same_fields(batches: Sequence[tuple[int, Iterable[str]]], where: str) -> tuple[str, ...]:
    """The columns of the first, which all must have."""
    ordered = sorted(batches, key=lambda pair: pair[0])
    first = dict.fromkeys(ordered[0][1])
    for i, names in ordered[1:]:
        for name in first.keys() ^ dict.fromkeys(names).keys():
            raise ArgumentKeyError(
                "no_such_field",
                f"{where} of batch {i}",
                f"expected the columns of the first batch, found {name!r} "
                f"{'missing' if name in first else 'besides'}; select the ones that all have",
            )
    return tuple(first)
