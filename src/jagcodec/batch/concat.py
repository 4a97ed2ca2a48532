"""The rows of several batches one after the other, and columns of several side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec.batch.joined import JoinedColumns, join_rows, open_one
from jagcodec.batch.rows import Batch, concat_batches
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.wire.lazy import WireBatch

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
        batch if isinstance(batch, WireBatch) else open_one(i, batch)
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
                of_first, expected = known[0]
                row = int(np.flatnonzero(lengths != expected)[0])
                raise ArgumentError(
                    "bad_length",
                    f"{path}, row {row}",
                    f"expected {expected[row]} tokens like {of_first!r} of the first message, "
                    f"found {lengths[row]}",
                )
            sources[name] = batch
    return JoinedColumns(sources, opened, first)


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
