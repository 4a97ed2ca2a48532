"""A dict of columns to a batch: what a producer calls at its write site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec.buffers import contiguous_bits
from jagcodec.fields import check_fields, check_rows, field_names, leaves_of
from jagcodec.layout import parts_or_rectangle, read_lengths
from jagcodec.ragged import is_jagged, take_apart
from jagcodec.wire.encoder import Encoding, Frame
from jagcodec.wire.framing import writable_bytes, write_blob


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: torch.Tensor | None,
    token_aligned_fields: Iterable[str] | None = None,
) -> TensorDict:
    """Padded columns to a batch of jagged ones: the write site of a producer.

    Args:
        fields: Name to column: tensors (N, ...), jagged tensors of N rows, or object arrays (N,).
        lengths: (N,) valid tokens per row. None packs nothing and takes N from the columns.
        token_aligned_fields: Names of the per-token columns, packed as by `pack_per_token_field`
            (with its fallback); every other one stays rectangular. Names that are no column are
            ignored, so that one set of names serves every batch. None: each tensor is packed
            or not as `maybe_pack_jagged` guesses from its shape.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in their order and no device. Packed
        columns own their memory and share one raggedness, so ``td["a"] * td["b"]`` works; jagged
        columns with the same row lengths join it. Rectangular columns are detached and alias
        contiguous input. Object arrays become one payload per row (`NonTensorStack`), aliased.

    Raises:
        ArgumentError: A column has not N rows, `lengths` is not one-dimensional, or one of them
            is negative.
        ArgumentTypeError: A column is neither a tensor nor an object array (it is named), or
            lengths are no integers.

    Example:
        >>> import torch
        >>> from jagcodec import pack_jagged_fields
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "reward": torch.tensor([0.0, 1.0])},
        ...     lengths=torch.tensor([2, 3]),
        ...     token_aligned_fields=["ids"],
        ... )
        >>> td["ids"].values().tolist(), td["reward"].tolist()
        ([5, 6, 7, 8, 9], [0.0, 1.0])
    """
    plan = _plan(fields, lengths, token_aligned_fields, "pack_jagged_fields")
    return TensorDict(leaves_of(plan.columns), batch_size=[plan.rows])


@overload
def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: torch.Tensor | None,
    token_aligned_fields: Iterable[str] | None = ...,
    out: None = ...,
    narrow: bool = ...,
    checksum: bool = ...,
    allow_pickle: bool = ...,
) -> list[Frame]: ...


@overload
def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: torch.Tensor | None,
    token_aligned_fields: Iterable[str] | None = ...,
    out: Any,
    narrow: bool = ...,
    checksum: bool = ...,
    allow_pickle: bool = ...,
) -> int: ...


def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: torch.Tensor | None,
    token_aligned_fields: Iterable[str] | None = None,
    out: Any = None,
    narrow: bool = False,
    checksum: bool = False,
    allow_pickle: bool = False,
) -> list[Frame] | int:
    """Padded columns straight to a message: no jagged tensor and no TensorDict in between.

    The message is, byte for byte, that of ``encode(pack_jagged_fields(...))``.

    Args:
        fields: As for `pack_jagged_fields`.
        lengths: As there.
        token_aligned_fields: As there.
        out: Memory to write the message to as one blob, as by `encode_into`.
        narrow: As for `encode`.
        checksum: As for `encode`.
        allow_pickle: As for `encode`.

    Returns:
        Frames, as `encode` returns them; with `out` the bytes written to it. Rectangular columns
        are aliased by their frames, packed ones own their memory.

    Raises:
        ArgumentError: As from `pack_jagged_fields`; or `out` is too small.
        ArgumentTypeError: As from `pack_jagged_fields`; or `out` is no writable buffer.
        UnsupportedTypeError: As from `encode`.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode_fields
        >>> columns = {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}
        >>> frames = encode_fields(columns, lengths=torch.tensor([2, 3]))
        >>> decode(frames)["ids"].values().tolist()
        [5, 6, 7, 8, 9]
    """
    plan = _plan(fields, lengths, token_aligned_fields, "encode_fields")
    encoding = Encoding(narrow=narrow, checksum=checksum, allow_pickle=allow_pickle)
    frames = encoding.frames(encoding.batch(plan.rows, plan.columns))
    if out is None:
        return frames
    return write_blob(frames, writable_bytes(out, "encode_fields(out)"))


class _Plan(NamedTuple):
    """Checked columns: tensors, jagged ones as `Parts`, or lists of N objects."""

    rows: int
    columns: list[tuple[str, Any]]


def _plan(
    fields: Mapping[str, Any],
    lengths: torch.Tensor | None,
    token_aligned_fields: Iterable[str] | None,
    where: str,
) -> _Plan:
    check_fields(fields, where)
    splits = None if lengths is None else read_lengths(lengths, f"{where}(lengths)")
    named = (
        None
        if token_aligned_fields is None
        else field_names(token_aligned_fields, f"{where}(token_aligned_fields)")
    )

    rows = None if splits is None else splits.rows
    columns: list[tuple[str, Any]] = []
    for name, column in fields.items():
        path = f"{where}({name!r})"
        rows = check_rows(column, rows, "one per length" if splits else "like the others", path)
        if isinstance(column, np.ndarray):
            columns.append((name, list(column)))
        elif is_jagged(column):
            columns.append((name, take_apart(column, path)))
        elif splits is None or (named is not None and name not in named):
            columns.append((name, contiguous_bits(column)))
        else:
            columns.append((name, parts_or_rectangle(column, splits, path, named is None)))
    return _Plan(rows or 0, columns)
