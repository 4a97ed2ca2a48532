"""Lists of numbers per token, as many as each token has: two jagged columns, and back.

`torch.jagged` has one ragged dim. So the numbers of a row lie end to end in one column, and how
many of them each token has is another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import whole_number
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import IntArray, as_bytes, as_words, to_device
from jagcodec.pack.row_columns import RowColumns, Wanted
from jagcodec.ragged.copy_rows import pad_into, pad_task, padded_shape, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.pad_values import pad_bits
from jagcodec.ragged.row_splits import LENGTH_DTYPES, RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.rowcopy import pad_all


def pack_token_lists(
    rows: torch.Tensor | Sequence[Any],
    *,
    dtype: torch.dtype | None = None,
    pad_value: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose tokens have a list of numbers each, of any length, as two jagged columns.

    Example:
        >>> from jagcodec import encode, pack_token_lists
        >>> rows = [[[7, 9], [], [4]], [[3, 8, 5]]]  # two rows, of three tokens and of one
        >>> ids, counts = pack_token_lists(rows)
        >>> ids.values().tolist(), counts.values().tolist()
        ([7, 9, 4, 3, 8, 5], [2, 0, 1, 3])
        >>> [row.tolist() for row in counts.unbind()]
        [[2, 0, 1], [3]]
        >>> frames = encode({"ids": ids, "counts": counts}, narrow=True)

    The two are columns like any others, whose rows are chosen, joined and sent together.
    `unpack_token_lists` and `pad_token_lists` give the lists back. Columns whose lists are as long
    as each other, such as ids and their log-probabilities, need their counts only once. Who has
    the numbers of each row end to end, and the counts, has the two columns already (`pack_rows`).

    Args:
        rows: N rows: of each a list or a tuple of its tokens, each of which is a list, a tuple, an
            array or a tensor of numbers; or an array or a tensor (tokens, K), whose tokens have K
            numbers each, but for pads. Or all of them as a jagged tensor (N, j, K). Nothing is done
            token by token where rows are arrays or tensors.
        dtype: Of the numbers. None: as for `pack_rows`, the first number decides (ints become
            int64, floats float32), and arrays and tensors keep their dtype. Ints must fit exactly.
        pad_value: What fills up the tokens of rows (tokens, K) behind their numbers, such as -1; it
            is compared bit for bit, and left out. None: nothing is a pad.

    Returns:
        The numbers, jagged (N, j), all those of a row end to end; and how many each token has,
        jagged (N, tokens), int64. Both own their memory and lie where the rows lay; of a jagged
        tensor without holes the second has its offsets object.

    Raises:
        ArgumentError: A number does not fit its cells, a pad lies before a number, or there is no
            number at all and `dtype` does not say of what; row and token are named.
        ArgumentTypeError: A token is no list of numbers or of another type than the first, or
            `rows` or `dtype` is of another type.
    """
    where = "pack_token_lists"
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(
            "bad_type", f"{where}(dtype)", f"expected None or a torch.dtype, found {brief(dtype)}"
        )
    if isinstance(rows, torch.Tensor) and is_jagged(rows):
        return _of_column(rows, dtype, pad_value, where)
    listed = _listed(rows, where)
    if listed and all(map(_is_array, listed)):
        return _of_arrays(listed, dtype, pad_value, where)
    if pad_value is not None:
        found = next((describe(row) for row in listed if not _is_array(row)), "no rows")
        raise ArgumentError(
            "bad_option",
            f"{where}(pad_value)",
            f"requires rows that are arrays or tensors (tokens, K), found {found}",
        )
    return _of_tokens(listed, dtype, where)


def unpack_token_lists(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The list of each token: a jagged tensor whose rows are the tokens of the batch, or of a row.

    Example:
        >>> from jagcodec import pack_token_lists, unpack_token_lists
        >>> ids, counts = pack_token_lists([[[7, 9], [], [4]], [[3, 8, 5]]])
        >>> lists = unpack_token_lists(ids, counts)
        >>> [token.tolist() for token in lists.unbind()]
        [[7, 9], [], [4], [3, 8, 5]]
        >>> lists.offsets().tolist()  # with .values() what CSR calls indptr and indices
        [0, 2, 2, 3, 6]
        >>> unpack_token_lists(ids.unbind()[0], counts.unbind()[0]).offsets().tolist()
        [0, 2, 2, 3]

    Args:
        values: Jagged (N, j, ...), as `pack_token_lists` gives them; or (n, ...) of one row.
        counts: How many each token has: integers, jagged (N, tokens), or a rectangle (N, S) as
            `materialize` pads them with 0 on any side; or (tokens,) of one row.

    Returns:
        Jagged (T, j, ...) with T = all tokens, or N * S slots of a rectangle, those without a token
        being empty. ``.values()`` are those of `values`, aliased where they have no holes, and
        ``.offsets()`` is (T + 1,) int64. Gradients flow through it. Waits for a device once for
        each argument on it.

    Raises:
        ArgumentError: A count is negative (row and token are named), or those of a row do not add
            up to its values (it is named), or there are more rows of one than of the other.
        ArgumentTypeError: An argument is of another type, or counts are not integers.
    """
    lists = _lists(values, counts, "unpack_token_lists")
    return nested_tensor(lists.values, RowSplits.from_lengths(lists.lengths.reshape(-1)))


def pad_token_lists(
    values: torch.Tensor,
    counts: torch.Tensor,
    *,
    pad_value: Any = 0,
    width: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists of all tokens in one rectangle (N, S, K), and the mask of what is not padding.

    Example:
        >>> from jagcodec import pack_token_lists, pad_token_lists
        >>> ids, counts = pack_token_lists([[[7, 9], [4]], [[3, 8, 5]]])
        >>> rectangle, mask = pad_token_lists(ids, counts, pad_value=-1)
        >>> rectangle.tolist()
        [[[7, 9, -1], [4, -1, -1]], [[3, 8, 5], [-1, -1, -1]]]
        >>> mask.sum(-1).tolist()
        [[2, 1], [3, 0]]

    Args:
        values: As for `unpack_token_lists`.
        counts: As there. Of a rectangle (N, S) tokens stay where they are, so that those of
            ``materialize(..., keep_jagged=["ids"])`` lie as all other columns do, whatever its
            padding side and width.
        pad_value: What fills the rest, as for `materialize`.
        width: K, such as the k of top-k; None: the most numbers that a token has.

    Returns:
        (N, S, K, ...), dtype and device of `values`, and (N, S, K) bool on that device; of one row
        (tokens, K, ...) and (tokens, K). S is the most tokens of a row, or that of `counts`.
        Gradients flow through the first.

    Raises:
        ArgumentError: As from `unpack_token_lists`; a token has more numbers than `width` (it is
            named); or `values` cannot hold `pad_value`.
        ArgumentTypeError: As from `unpack_token_lists`; or `pad_value` is no number.
    """
    where = "pad_token_lists"
    lists = _lists(values, counts, where)
    lengths = lists.lengths
    longest = int(lengths.max(initial=0))
    if width is None:
        width = longest
    elif longest > whole_number(width, 0, f"{where}(width)"):
        raise ArgumentError(
            "row_too_long",
            lists.place(f"{where}(values)", int(np.argmax(lengths.reshape(-1) > width))),
            f"expected at most width={width} numbers per token, found {longest}; raise width",
        )
    bits = pad_bits(pad_value, lists.values.dtype, f"{where}(pad_value)")
    if lists.kind == "jagged":
        held = np.arange(lists.tokens.max) < lists.tokens.lengths[:, None]
        lengths = np.zeros(held.shape, dtype=np.int64)
        lengths[held] = lists.lengths
    # Where there is no token there are no numbers, so that those of the others touch.
    splits = RowSplits.from_lengths(lengths.reshape(-1))
    rectangle = _padded(end_to_end(lists.values, splits), width, bits)
    device = lists.values.device
    known = to_device(torch.from_numpy(lengths), device)
    mask = torch.arange(width, device=device) < known.unsqueeze(-1)
    return rectangle.view(*lengths.shape, *rectangle.shape[1:]), mask


def _padded(view: RaggedView, width: int, bits: bytes) -> torch.Tensor:
    out = torch.empty(padded_shape(view, width), dtype=view.dtype, device=view.device)
    task = pad_task(view, as_bytes(out), width, None, bits) if out.is_cpu else None
    if task is not None:
        pad_all([task])
        return out
    return pad_into(out, view, None, bits) if out.numel() else out


# --- packing -----------------------------------------------------------------------------------


class _OfRows(RowColumns):
    """Makes one column of the numbers of all rows."""

    def _at(self, name: str, row: int | None = None) -> str:
        return _place(f"{self._where}({name})", row)

    def _option(self, name: str, dtype: str) -> str:
        return f"dtype={dtype}"

    def _as_objects(self, name: str) -> str:
        return ""


class _OfTokens(_OfRows):
    """Makes one column of the numbers of all tokens, and calls these by their rows."""

    first = "the first token"

    def __init__(self, where: str, tokens: RowSplits) -> None:
        """Take the tokens of each row."""
        super().__init__(where, True)
        self._tokens = tokens

    def _at(self, name: str, row: int | None = None) -> str:
        if row is None:
            return super()._at(name)
        return _place(f"{self._where}({name})", *_row_of(self._tokens, row))

    def _flattened(self, name: str, rows: Sequence[Any], leaf: Any) -> NoReturn:
        token = next(i for i, row in enumerate(rows) if len(row))
        self._unlike(self._at(name, token), name, "numbers", rows[token][0])


def _listed(rows: Any, where: str) -> list[Any]:
    if isinstance(rows, (list, tuple)) or _is_array(rows):
        return list(rows)
    raise ArgumentTypeError(
        "bad_type",
        f"{where}(rows)",
        f"expected a list of rows, or a tensor or an array of them, found {describe(rows)}",
    )


def _is_array(value: Any) -> bool:
    """Whether it is an array or a tensor that can be gone through."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_nested and value.dim() > 0
    return isinstance(value, np.ndarray) and value.ndim > 0


def _of_tokens(
    rows: list[Any], dtype: torch.dtype | None, where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens that are lists, arrays or tensors."""
    for i, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) and not _is_array(row):
            raise ArgumentTypeError(
                "bad_type",
                f"{where}(rows), row {i}",
                f"expected a list of tokens, or an array (tokens, K), found {describe(row)}",
            )
    tokens = RowSplits.from_lengths(np.array([len(row) for row in rows], dtype=np.int64))
    listed = list(itertools.chain.from_iterable(rows))
    if not listed:
        if dtype is None:
            raise ArgumentError(
                "bad_dtype",
                f"{where}(rows)",
                "expected numbers, found no token; say what they would be with dtype=torch.int64",
            )
        return _columns(torch.empty(0, dtype=dtype), np.empty(0, dtype=np.int64), tokens)
    column: Any = _OfTokens(where, tokens).column("rows", listed, Wanted(dtype))
    is_view = type(column) is RaggedView
    if not is_view or len(column.shape) > 1:
        token = next(i for i, item in enumerate(listed) if not is_view or np.ndim(item) > 1)
        raise ArgumentTypeError(
            "bad_type",
            _place(f"{where}(rows)", *_row_of(tokens, token)),
            f"expected a list of numbers for each token, found {describe(listed[token])}",
        )
    return _columns(values_of(column), column.row_splits.lengths, tokens)


def _of_arrays(
    rows: list[Any], dtype: torch.dtype | None, pad_value: Any, where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are arrays or tensors (tokens, K)."""
    shapes = [tuple(row.shape) for row in rows]
    for i, shape in enumerate(shapes):
        if len(shape) != 2:
            raise ArgumentError(
                "bad_shape", f"{where}(rows), row {i}", f"expected (tokens, K), found {shape}"
            )
    tokens = RowSplits.from_lengths(np.array([length for length, _ in shapes], dtype=np.int64))
    as_tensor = _OfRows(where, False)
    numbers, counts = [], []
    for i, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        cells: Any = as_tensor.column("rows", [row.reshape(-1)], Wanted())
        if type(cells) is not RaggedView:
            raise ArgumentTypeError(
                "bad_dtype", f"{where}(rows), row {i}", f"expected numbers, found {row.dtype}"
            )
        first = int(tokens.host[i])
        found = _stripped(values_of(cells).view(shape), first, tokens, pad_value, where)
        numbers.append(found[0])
        counts.append(found[1])
    column: Any = _OfRows(where, True).column("rows", numbers, Wanted(dtype))
    return _columns(values_of(column), np.concatenate(counts), tokens)


def _of_column(
    rows: torch.Tensor, dtype: torch.dtype | None, pad_value: Any, where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A jagged column (N, j, K)."""
    view = _rows(rows, f"{where}(rows)", RowSplitsPool())
    if len(view.shape) != 2:
        raise ArgumentError(
            "bad_shape",
            f"{where}(rows)",
            f"expected rows (tokens, K), found cells of {tuple(view.shape[1:])}",
        )
    numbers, counts = _stripped(values_of(view), 0, view.row_splits, pad_value, where)
    made = _columns(numbers, counts, view.row_splits)
    if not view.row_splits.rows:
        return made[0].to(dtype or numbers.dtype), made[1]
    column: Any = _OfRows(where, True).column("rows", list(made[0].unbind()), Wanted(dtype))
    return _columns(values_of(column), counts, view.row_splits)


def _stripped(
    cells: torch.Tensor, first: int, tokens: RowSplits, pad_value: Any, where: str
) -> tuple[torch.Tensor, IntArray]:
    """The numbers of cells (T, K) without their pads, and how many each token has.

    `first` is the one of all `tokens` that the cells begin with.
    """
    total, width = cells.shape
    if pad_value is None:
        counts: IntArray = np.full(total, width, dtype=np.int64)
        return cells.reshape(-1), counts
    bits = pad_bits(pad_value, cells.dtype, f"{where}(pad_value)")
    pad = torch.tensor(list(bits), dtype=torch.uint8).view(cells.dtype)
    kept = (as_words(cells) != as_words(pad).to(cells.device)).any(-1)
    holes = (kept[:, 1:] & ~kept[:, :-1]).any(1)
    held, wrong = torch.stack([kept.sum(1), holes.long()]).cpu().numpy()
    if wrong.any():
        raise ArgumentError(
            "bad_pad",
            _place(f"{where}(rows)", *_row_of(tokens, first + int(np.argmax(wrong)))),
            f"expected pads of {pad_value!r:.80} behind the numbers of a token, found one before "
            "others; sort them to the end, or choose another pad_value",
        )
    return cells[kept], held


def _columns(
    values: torch.Tensor, counts: IntArray, tokens: RowSplits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers end to end, and how many each token has, as two jagged columns."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    splits = RowSplits.from_lengths(np.diff(ends[tokens.host]))
    # A copy: what belongs to row splits is nobody's to write to.
    counted = to_device(torch.from_numpy(np.array(counts, dtype=np.int64)), values.device)
    return nested_tensor(values, splits), nested_tensor(counted, tokens)


def _place(path: str, row: int | None = None, token: int | None = None) -> str:
    path += "" if row is None else f", row {row}"
    return path if token is None else f"{path}, token {token}"


def _row_of(tokens: RowSplits, token: int) -> tuple[int, int]:
    """The row of one of all tokens, and which of its tokens that is."""
    row = int(np.searchsorted(tokens.host[1:], token, side="right"))
    return row, token - int(tokens.host[row])


# --- unpacking ---------------------------------------------------------------------------------


class _Lists(NamedTuple):
    """Lists of numbers, and counts that fit them.

    Attributes:
        values: The numbers of all tokens, end to end.
        lengths: How many each token has: (T,) of jagged counts and of one row, or (N, S).
        tokens: Those of each row, or the S slots of a rectangle.
        kind: Of the counts: "jagged", or how many dims they have.
    """

    values: torch.Tensor
    lengths: IntArray
    tokens: RowSplits
    kind: str | int

    def place(self, path: str, token: int) -> str:
        """What errors call a token."""
        row, of_row = _row_of(self.tokens, token)
        return _place(path, None if self.kind == 1 else row, of_row)


def _lists(values: Any, counts: Any, where: str) -> _Lists:
    """Values end to end and what their counts say, once these fit them."""
    pool = RowSplitsPool()
    for name, given in (("values", values), ("counts", counts)):
        if not is_jagged(given) and not (isinstance(given, torch.Tensor) and _is_array(given)):
            raise ArgumentTypeError(
                "bad_type",
                f"{where}({name})",
                f"expected a jagged tensor, or a strided one of one row, found {describe(given)}",
            )
    if counts.dtype not in LENGTH_DTYPES:
        raise ArgumentTypeError(
            "bad_dtype", f"{where}(counts)", f"expected integers, found {counts.dtype}"
        )
    kind = "jagged" if is_jagged(counts) else counts.dim()
    if kind not in (("jagged", 2) if is_jagged(values) else (1,)):
        expected = "jagged (N, tokens) or (N, S)" if is_jagged(values) else "(tokens,) of one row"
        raise ArgumentError(
            "bad_shape", f"{where}(counts)", f"expected {expected}, found {describe(counts)}"
        )
    rows = _rows(values, f"{where}(values)", pool)
    if kind == 2:
        shape = tuple(counts.shape)
        slots = RowSplits.from_lengths(np.full(shape[0], shape[1], dtype=np.int64))
        counted = end_to_end(counts.detach().reshape(-1), slots)
    else:
        counted = _rows(counts, f"{where}(counts)", pool)
        if len(counted.shape) != 1:
            raise ArgumentError(
                "bad_shape",
                f"{where}(counts)",
                f"expected one count per token, found cells of {tuple(counted.shape[1:])}",
            )
    if counted.row_splits.rows != rows.row_splits.rows:
        raise ArgumentError(
            "row_mismatch",
            f"{where}(counts)",
            f"expected {rows.row_splits.rows} rows like values, found {counted.row_splits.rows}",
        )
    found = values_of(counted).detach().cpu().numpy()
    lists = _Lists(values_of(rows), found.astype(np.int64), counted.row_splits, kind)
    _check_counts(found, rows.row_splits, lists, f"{where}(counts)")
    return lists._replace(lengths=lists.lengths.reshape(counts.shape)) if kind == 2 else lists


def _rows(tensor: torch.Tensor, path: str, pool: RowSplitsPool) -> RaggedView:
    """The rows of a jagged tensor, or the one that a strided one is."""
    if not is_jagged(tensor):
        return end_to_end(tensor, RowSplits.from_lengths(np.array([len(tensor)], dtype=np.int64)))
    view = view_of(tensor, path, pool, detach=False)
    if view.ragged_dim != 1:
        raise ArgumentError("bad_shape", path, f"expected ragged dim 1, found {view.ragged_dim}")
    return view


def _check_counts(found: npt.NDArray[Any], rows: RowSplits, lists: _Lists, path: str) -> None:
    """See that counts are 0 or more, and add up to the values of each row."""
    if (found < 0).any():
        token = int(np.argmax(found < 0))
        raise ArgumentError(
            "bad_length",
            lists.place(path, token),
            f"expected a count of 0 or more, found {found[token]}",
        )
    # No count alone is more than all values, so that sums do not wrap around.
    most = np.minimum(found, rows.total + 1).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(most)])[lists.tokens.host]
    wrong = np.flatnonzero(np.diff(ends) != rows.lengths)
    if len(wrong):
        row = int(wrong[0])
        start, end = lists.tokens.host[row : row + 2].tolist()
        raise ArgumentError(
            "row_mismatch",
            _place(path, None if lists.kind == 1 else row),
            f"expected counts that add up to its {rows.lengths[row]} values, found "
            f"{sum(found[start:end].tolist())}; pass the counts of these values, of the same rows",
        )
