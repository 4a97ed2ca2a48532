"""Padded columns with a mask to jagged ones, and back to the very same rectangles.

A length says where right padding begins. A mask says it of any padding: prompts padded on the
left, holes in the middle. The valid cells of a row are the *runs* of True in its mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from jagcodec import rowcopy
from jagcodec._arguments import check_fields, name_set
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, describe
from jagcodec.memory.blocks import Wanted, allocate
from jagcodec.memory.tensor_bytes import (
    ByteArray,
    IntArray,
    as_bytes,
    as_words,
    contiguous_bits,
    from_bytes,
    from_words,
    refill,
)
from jagcodec.pack.fields import check_rows, leaves_of
from jagcodec.ragged.copy_rows import padded_shape, values_of
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView, end_to_end, rows_in_place

PADDING_FIELD = "padding"

# --- rectangles -> rows ------------------------------------------------------------------------


def pack_masked_fields(
    fields: Mapping[str, Any],
    *,
    mask: torch.Tensor | str,
    token_aligned_fields: Iterable[str] | None = None,
    padding_field: str = PADDING_FIELD,
) -> TensorDict:
    """Padded columns to a batch of jagged ones by a mask, and what it takes to go back.

    Args:
        fields: Name to column: tensors (N, ...), jagged tensors of N rows, or object arrays (N,).
        mask: (N, S) booleans, or integers 0 and 1: where a cell is valid. Or the name of the
            column that is the mask, such as verl's ``"attention_mask"``.
        token_aligned_fields: Names of the per-token columns (N, S, ...). Names that are not columns
            are ignored, so that one set of names serves every batch. None takes every rectangle
            that begins with (N, S); that is a guess by shape, and a feature that happens to be
            (N, S) is packed too.
        padding_field: Name of the leaf to add.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in their order and no device. Row i of a
        per-token column is its cells where row i of the mask is True, in order; these columns are
        detached, own their memory and share one offsets tensor. A per-token column whose pad cells
        are not one constant, bit for bit, stays rectangular, because rows would lose them. All
        other columns are as from `pack_jagged_fields`.

        The last leaf is a TensorDict under `padding_field`, for `unpack_masked_fields`: ``"runs"``,
        jagged (N, j, 2) int32 (int64 from S = 2^31 on), the start and the length of each run of
        True in a row of the mask; and ``"rectangle"``, the payload ``{"width": S, "pads": {name:
        0-d tensor}}`` with the pad of each column packed here (0 without pad cells). Both are on
        the CPU. The mask itself is in the batch only if it is a column.

    Raises:
        ArgumentError: The mask is not (N, S) or holds more than 0 and 1, a column has not N rows,
            a named one does not begin with (N, S), or one is called `padding_field`.
        ArgumentKeyError: `mask` names no column.
        ArgumentTypeError: The mask is neither a tensor of booleans or integers nor a name, or a
            column is neither a tensor nor an object array.

    The mask and what is to be known of the pads are read together: one synchronisation for each
    device that holds per-token columns.

    Example:
        >>> import torch
        >>> from jagcodec import pack_masked_fields
        >>> td = pack_masked_fields(
        ...     {"ids": torch.tensor([[9, 9, 5, 6], [9, 7, 8, 9]])},
        ...     mask=torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
        ... )
        >>> [row.tolist() for row in td["ids"].unbind()]
        [[5, 6], [7, 8]]
        >>> td["padding", "runs"].values().tolist(), td["padding"]["rectangle"]["pads"]
        ([[2, 2], [1, 2]], {'ids': tensor(9)})
    """
    where = "pack_masked_fields"
    check_fields(fields, f"{where}(fields)")
    named = (
        None
        if token_aligned_fields is None
        else name_set(token_aligned_fields, f"{where}(token_aligned_fields)")
    )
    _check_name(padding_field, f"{where}(padding_field)")
    if padding_field in fields:
        raise ArgumentError(
            "bad_option",
            f"{where}({padding_field!r})",
            "expected no column of the name of the padding leaf; "
            "choose another with padding_field=...",
        )
    valid, path = _mask(fields, mask, where)
    rows, width = valid.shape
    per_token = {}
    for name, column in fields.items():
        check_rows(column, rows, "like the mask", f"{where}({name!r})")
        if _is_per_token(column, name, named, (rows, width), where):
            per_token[name] = column
    cells, pads = _read(valid, per_token, path)
    runs = _runs_of(cells, width)
    columns: list[tuple[str, Any]] = []
    for name, column in fields.items():
        if name in pads:
            columns.append((name, _valid_cells(column, runs)))
        elif isinstance(column, (np.ndarray, list)):
            columns.append((name, list(column)))
        elif is_non_tensor(column):
            columns.append((name, column))
        elif is_jagged(column):
            columns.append((name, view_of(column, f"{where}({name!r})")))
        else:
            columns.append((name, contiguous_bits(column)))
    leaves = leaves_of(columns)
    leaves[padding_field] = _padding_leaf(runs, pads)
    return TensorDict(leaves, batch_size=[rows])


_MASK_DTYPES = frozenset(
    [torch.bool, *(getattr(torch, f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64))]
)


def _mask(fields: Mapping[str, Any], mask: Any, where: str) -> tuple[torch.Tensor, str]:
    """The mask (N, S), and what to call it."""
    path = f"{where}(mask)"
    if isinstance(mask, str):
        if mask not in fields:
            raise ArgumentKeyError(
                "no_such_field",
                path,
                f"expected a mask or the name of a column, found {mask!r}; "
                f"the columns are {', '.join(map(repr, fields)) or 'none'}",
            )
        mask, path = fields[mask], f"{where}({mask!r})"
    expected = "expected an (N, S) mask of booleans, or of integers 0 and 1, found"
    if not isinstance(mask, torch.Tensor) or mask.layout is not torch.strided or mask.is_nested:
        raise ArgumentTypeError("bad_type", path, f"{expected} {describe(mask)}")
    if mask.dtype not in _MASK_DTYPES:
        raise ArgumentTypeError("bad_dtype", path, f"{expected} {mask.dtype}; try mask.bool()")
    if mask.dim() != 2:
        raise ArgumentError("bad_shape", path, f"{expected} shape {tuple(mask.shape)}")
    return mask, path


def _is_per_token(
    column: Any, name: str, named: frozenset[str] | None, shape: tuple[int, int], where: str
) -> bool:
    fits = isinstance(column, torch.Tensor) and not is_jagged(column) and column.shape[:2] == shape
    if named is None:
        return fits
    if name in named and not fits:
        found = "an object array"
        if isinstance(column, torch.Tensor):
            found = "jagged rows" if is_jagged(column) else f"shape {tuple(column.shape)}"
        raise ArgumentError(
            "bad_shape",
            f"{where}({name!r})",
            f"expected a per-token column ({shape[0]}, {shape[1]}, ...) like the mask, "
            f"found {found}; name it in token_aligned_fields only if it is padded like the mask",
        )
    return name in named


def _read(
    mask: torch.Tensor, columns: Mapping[str, torch.Tensor], path: str
) -> tuple[ByteArray, dict[str, torch.Tensor]]:
    """The mask (N, S) on the host, and the pad of each column that has one.

    Every question is asked where the columns are, and the answers are copied together.
    """
    words = as_words(mask).squeeze(-1)
    if mask.dtype == torch.bool:  # True is any byte but 0
        words = words.ne(0).view(torch.uint8)
    by_device: dict[torch.device, list[str]] = {words.device: []}
    for name, column in columns.items():
        by_device.setdefault(column.device, []).append(name)
    cells: ByteArray = np.empty(0, dtype=np.uint8)
    pads: dict[str, torch.Tensor] = {}
    for device, names in by_device.items():
        there = words.to(device, non_blocking=True)
        valid = there.ne(0)
        first = _first_pad(valid)
        answers = [valid, ((there == 0) | (there == 1)).all()]
        for name in names:
            answers += _pad_of(columns[name], valid, first)
        answers = [answer.reshape(-1).view(torch.uint8) for answer in answers]
        ends = np.cumsum([answer.numel() for answer in answers])
        parts = np.split(as_bytes(torch.cat(answers)), ends[:-1])
        host, is_mask, rest = parts[0], parts[1].all(), parts[2:]
        if not is_mask:
            cell = int(((words != 0) & (words != 1)).flatten().view(torch.uint8).argmax())
            raise ArgumentError(
                "bad_option",
                f"{path}, row {cell // words.shape[1]}",
                "expected a mask of booleans, or of integers 0 and 1, "
                f"found {mask.flatten()[cell].item()}; pass the mask itself, such as ids != pad",
            )
        if device == words.device:
            cells = host.reshape(valid.shape)
        padded = not host.all()
        for name, pad, constant in zip(names, rest[::2], rest[1::2], strict=True):
            if constant:
                pads[name] = from_bytes(pad * padded, columns[name].dtype, ())
    return cells, {name: pads[name] for name in columns if name in pads}


def _first_pad(valid: torch.Tensor) -> torch.Tensor:
    """(2, 1): row and column of the first False, or of some cell if there is none.

    They never leave the device, so nothing waits for them.
    """
    if not valid.numel():
        return torch.zeros((2, 1), dtype=torch.int64, device=valid.device)
    index = valid.view(torch.uint8).argmin().view(1)
    return torch.stack([index // valid.shape[1], index % valid.shape[1]])


def _pad_of(
    column: torch.Tensor, valid: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of one pad cell of a column, and whether they are those of all its pad cells."""
    words = as_words(column)
    if not words.numel():
        return words.new_zeros(words.shape[-1]), valid.new_ones(1)
    pad = words.index_select(0, first[0]).index_select(1, first[1]).flatten(0, -2)[0]
    same = (words == pad).logical_or_(valid.view(*valid.shape, *[1] * (words.dim() - 2)))
    # The least of the bytes: all() of booleans takes forty times as long on a CPU.
    return pad, same.view(torch.uint8).amin()


class _Runs(NamedTuple):
    """The runs of True in a mask (N, S)."""

    starts: IntArray  # (R,) within their rows
    lengths: IntArray  # (R,)
    rows: IntArray  # (R,) which row each is in
    width: int  # S
    per_row: RowSplits  # how many runs each row has
    cells: RowSplits  # how many valid cells each row has


def _runs_of(cells: ByteArray, width: int) -> _Runs:
    rows = len(cells)
    walled = np.zeros((rows, width + 2), dtype=np.uint8)
    walled[:, 1:-1] = cells
    # Between the walls runs begin and end in turn, each in one row.
    edges = np.flatnonzero(walled[:, 1:] != walled[:, :-1])
    row, starts = np.divmod(edges[::2], width + 1)
    return _runs(starts, edges[1::2] - edges[::2], np.bincount(row, minlength=rows), width)


def _runs(starts: IntArray, lengths: IntArray, counts: IntArray, width: int) -> _Runs:
    per_row = RowSplits.from_lengths(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    valid = np.diff(ends[per_row.host])
    return _Runs(starts, lengths, rows, width, per_row, RowSplits.from_lengths(valid))


def _valid_cells(column: torch.Tensor, runs: _Runs) -> RaggedView:
    shape = (runs.cells.total, *column.shape[2:])
    if runs.cells.total == 0 or column.numel() == 0:
        values = column.detach().new_empty(shape)
    else:
        cells, stride = rows_in_place(as_words(column))
        words = rowcopy.gather(cells, runs.rows * stride + runs.starts, runs.lengths)
        values = from_words(words, column.dtype)
    return end_to_end(values, runs.cells)


def _padding_leaf(runs: _Runs, pads: dict[str, torch.Tensor]) -> TensorDict:
    rows = runs.per_row.rows
    pairs = np.stack([runs.starts, runs.lengths], axis=1)
    pairs = pairs.astype(np.int32 if runs.width < 2**31 else np.int64)
    leaves = leaves_of([("runs", end_to_end(torch.from_numpy(pairs), runs.per_row))])
    payload = {"width": runs.width, "pads": pads}
    leaves["rectangle"] = NonTensorData(payload, batch_size=[rows])
    return TensorDict(leaves, batch_size=[rows])


# --- rows -> rectangles ------------------------------------------------------------------------


def unpack_masked_fields(td: TensorDictBase, *, padding_field: str = PADDING_FIELD) -> TensorDict:
    """The rectangles that `pack_masked_fields` packed, bit for bit.

    Args:
        td: A batch of `pack_masked_fields`: decoded, or its rows chosen or joined, or columns
            added and removed. Its padding leaf may hold one payload for all rows or one per row,
            and pads may differ by row.
        padding_field: Name of the padding leaf.

    Returns:
        ``TensorDict`` of the batch size of `td`, without the padding leaf. The columns that it
        names are (N, S, ...), on the device of their rows, detached, in one allocation that is
        freed with the last of them. A column that it names and `td` lacks is left out. Every
        other leaf is the one of `td`.

    Raises:
        ArgumentError: The padding leaf contradicts itself or a column (the row is named): runs
            that overlap, fall back or leave the width, rows of another length than their runs,
            a pad of another dtype, widths that differ by row, or rectangles that do not fit in
            memory.
        ArgumentKeyError: `td` has no padding leaf.
        ArgumentTypeError: `td` is not a TensorDict, or the padding leaf or a column that it names
            is not what it was.

    Example:
        >>> import torch
        >>> from jagcodec import pack_masked_fields, unpack_masked_fields
        >>> ids = torch.tensor([[9, 9, 5, 6], [9, 7, 8, 9]])
        >>> td = pack_masked_fields({"ids": ids}, mask=ids != 9)
        >>> unpack_masked_fields(td)["ids"].tolist()
        [[9, 9, 5, 6], [9, 7, 8, 9]]
    """
    where = "unpack_masked_fields"
    _check_name(padding_field, f"{where}(padding_field)")
    if not isinstance(td, TensorDictBase) or isinstance(td, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type", f"{where}(td)", f"expected a TensorDict, found {describe(td)}"
        )
    if not td.batch_dims:
        raise ArgumentError(
            "bad_shape", f"{where}(td)", "expected batch size (N, ...), found no batch dim"
        )
    leaves = dict(td.items())
    if padding_field not in leaves:
        raise ArgumentKeyError(
            "no_such_field",
            f"{where}(padding_field)",
            f"expected the padding leaf of pack_masked_fields, found no {padding_field!r} among "
            f"{', '.join(map(repr, leaves)) or 'no columns'}",
        )
    path = f"{where}({padding_field!r})"
    padding = _read_padding(leaves.pop(padding_field), td.batch_size[0], path)
    pool = RowSplitsPool()
    named = {
        name: _jagged(leaves[name], padding.runs, f"{where}({name!r})", pool)
        for name in leaves
        if name in padding.names
    }
    pads = {
        name: _row_pads(padding.pads, name, view.dtype, f"{where}({name!r})")
        for name, view in named.items()
    }
    width = padding.runs.width
    rectangles = [
        Wanted(padded_shape(view, width), view.dtype, view.device) for view in named.values()
    ]
    try:
        allocate(rectangles)
    except (MemoryError, ValueError) as error:
        raise ArgumentError(
            "too_large",
            path,
            f"expected rectangles that fit in memory, found width {width}: {error}",
        ) from error
    for (name, view), rectangle in zip(named.items(), rectangles, strict=True):
        leaves[name] = _filled(rectangle.tensor, view, padding.runs, pads[name])
    names = td.names if any(td.names) else None
    return TensorDict(leaves, batch_size=td.batch_size, device=td.device, names=names)


class _Padding(NamedTuple):
    """A padding leaf, checked."""

    runs: _Runs
    names: frozenset[Any]  # the columns that were packed
    pads: list[dict[str, Any]]  # by name, for all rows or one dict for each


def _read_padding(leaf: Any, rows: int, path: str) -> _Padding:
    if (
        not isinstance(leaf, TensorDictBase)
        or isinstance(leaf, LazyStackedTensorDict)
        or is_non_tensor(leaf)
        or not {"runs", "rectangle"} <= set(leaf.keys())
    ):
        raise ArgumentTypeError(
            "bad_type",
            path,
            "expected the TensorDict of runs and rectangle that pack_masked_fields made, "
            f"found {describe(leaf)}",
        )
    payloads = _payloads(leaf.get("rectangle"), rows, path)
    widths = [payload["width"] for payload in payloads]
    for row, width in enumerate(widths):
        if width != widths[0]:
            raise ArgumentError(
                "bad_shape",
                f"{path}, row {row}",
                f"expected rectangles of width {widths[0]} like row 0, found {width}; "
                "unpack the parts one by one, or pad them to one width with materialize",
            )
    pads = [payload["pads"] for payload in payloads]
    names = frozenset().union(*pads)
    return _Padding(_read_runs(leaf.get("runs"), rows, widths[0], path), names, pads)


def _payloads(leaf: Any, rows: int, path: str) -> list[dict[str, Any]]:
    """The payload of all rows, or one for each."""
    if is_non_tensor(leaf):
        whole = isinstance(leaf, NonTensorData) and isinstance(leaf.data, dict)
        payloads = [leaf.data] if whole else list(rows_of_leaf(leaf, rows))
        if len(payloads) == (1 if whole else rows) > 0 and all(map(_is_payload, payloads)):
            return payloads
    raise ArgumentTypeError(
        "bad_type",
        path,
        "expected {'width': S, 'pads': {name: pad}} as the rectangle of all rows or of each, "
        f"found {getattr(leaf, 'data', leaf)!r:.80}",
    )


def _is_payload(payload: Any) -> bool:
    return (
        isinstance(payload, dict)
        and type(payload.get("width")) is int
        and 0 <= payload["width"] < 2**63
        and isinstance(payload.get("pads"), dict)
    )


def _read_runs(leaf: Any, rows: int, width: int, path: str) -> _Runs:
    view = view_of(leaf, path) if is_jagged(leaf) else None
    if (
        view is None
        or view.ragged_dim != 1
        or view.dtype not in (torch.int32, torch.int64)
        or view.shape[1:] != (2,)
    ):
        found = describe(leaf) if view is None else f"values of {describe(view.memory)}"
        raise ArgumentTypeError(
            "bad_type", path, f"expected runs (N, j, 2) of int32 or int64, jagged, found {found}"
        )
    pairs = values_of(view).cpu().numpy().astype(np.int64)
    starts, lengths = np.ascontiguousarray(pairs.T)
    row_of_run = np.repeat(np.arange(rows), view.row_splits.lengths)
    # No sum of a start and a length, which could overflow.
    outside = (starts < 0) | (lengths < 1) | (lengths > width - starts)
    _check_runs(outside, pairs, row_of_run, f"expected runs within the width {width}", path)
    crossing = np.zeros(len(pairs), dtype=bool)
    crossing[1:] = (row_of_run[1:] == row_of_run[:-1]) & (starts[1:] < pairs[:-1].sum(axis=1))
    _check_runs(crossing, pairs, row_of_run, "expected runs in order that do not overlap", path)
    return _runs(starts, lengths, view.row_splits.lengths, width)


def _check_runs(
    wrong: npt.NDArray[np.bool_], pairs: IntArray, rows: IntArray, expected: str, path: str
) -> None:
    if wrong.any():
        run = int(np.argmax(wrong))
        raise ArgumentError(
            "bad_length",
            f"{path}, row {rows[run]}",
            f"{expected}, found {pairs[run, 1]} cells from {pairs[run, 0]} on",
        )


def _jagged(leaf: Any, runs: _Runs, path: str, pool: RowSplitsPool) -> RaggedView:
    """A column that was packed, if it still has the rows of its runs."""
    if not is_jagged(leaf):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected the jagged column that was packed, found {describe(leaf)}; "
            "take it out of the batch, and put it back after unpacking",
        )
    view = view_of(leaf, path, pool)
    if view.ragged_dim != 1:
        raise ArgumentError("bad_shape", path, f"expected ragged dim 1, found {view.ragged_dim}")
    expected, found = runs.cells.lengths, view.row_splits.lengths
    wrong = found != expected
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgumentError(
            "bad_length",
            f"{path}, row {row}",
            f"expected the {expected[row]} cells of its runs, found {found[row]}; "
            "unpack before rows change their lengths",
        )
    return view


def _row_pads(pads: list[dict[str, Any]], name: str, dtype: torch.dtype, path: str) -> ByteArray:
    """(1 or N, itemsize): the bits of a column's pad for all rows, or for each."""
    bits = np.empty((len(pads), dtype.itemsize), dtype=np.uint8)
    for row, named in enumerate(pads):
        # No further than the first that lacks it: what is read was sent.
        pad = named.get(name)
        if not isinstance(pad, torch.Tensor) or pad.shape != () or pad.dtype != dtype:
            found = f"{pad.dtype}" if isinstance(pad, torch.Tensor) else type(pad).__name__
            raise ArgumentError(
                "bad_pad",
                f"{path}, row {row}" if len(pads) > 1 else path,
                f"expected a 0-d pad of the column's {dtype}, found {found}; "
                "unpack before a column changes its dtype",
            )
        bits[row] = as_bytes(pad)
    return bits[:1] if (bits == bits[:1]).all() else bits


def _filled(out: torch.Tensor, view: RaggedView, runs: _Runs, pads: ByteArray) -> torch.Tensor:
    if not out.numel():
        return out
    words = as_words(out)
    if len(pads) == 1:
        refill(out, pads.tobytes())
    else:
        by_row = as_words(from_bytes(pads.reshape(-1), out.dtype, (len(pads),)))
        words.copy_(by_row.view(len(pads), *[1] * (words.dim() - 2), -1))
    cells = words.view(-1, *words.shape[2:])
    starts = runs.rows * runs.width + runs.starts
    filled = rowcopy.scatter(as_words(values_of(view)), runs.lengths, cells, starts)
    return from_words(filled, out.dtype).view(out.shape)


def _check_name(padding_field: Any, path: str) -> None:
    if not isinstance(padding_field, str):
        raise ArgumentTypeError(
            "bad_type", path, f"expected the name of a leaf, found {padding_field!r}"
        )
