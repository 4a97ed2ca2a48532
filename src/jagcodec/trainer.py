"""A wire batch to what a trainer takes: the only place where padding is paid back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args, overload

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from jagcodec.buffers import Blank, allocate
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.layout import compact_values, pad_into, padded_shape
from jagcodec.pads import pad_bits
from jagcodec.payloads import is_non_tensor, rows_of_leaf
from jagcodec.ragged import Parts, RowSplits, is_jagged, splits_of_lengths, take_apart
from jagcodec.wire.registry import register_type
from jagcodec.wire_batch import WireBatch

Layout = Literal["padded", "jagged", "packed"]
"""What `materialize` makes of jagged columns: rectangles, nothing, or varlen-attention input."""

T = TypeVar("T")


class BatchedDataDict(dict[str, Any]):
    """A dict of columns, each with one entry per row: what `materialize` returns.

    A column is a tensor (N, ...), a jagged tensor, a `PackedColumn`, an object array (N,), or a
    `BatchedDataDict` of its own.

    Example:
        >>> import torch
        >>> from jagcodec import BatchedDataDict
        >>> BatchedDataDict(reward=torch.zeros(2))["reward"].shape
        torch.Size([2])
    """


class PackedColumn(NamedTuple):
    """A jagged column as variable-length attention takes it (flash-attention's ``varlen``).

    Attributes:
        values: (total, ...): the rows end to end; the column's own memory. Of a column of ragged
            dim 2, such as MRoPE position ids, (A, total, ...).
        cu_seqlens: (N + 1,) int32: where each row begins, and the end.
        max_seqlen: Length of the longest row.
        position_ids: (total,) int64: 0, 1, ... within each row.

    Columns of one raggedness share the last three.
    """

    values: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor


@overload
def materialize(
    td: TensorDictBase | WireBatch,
    layout: Layout = ...,
    pad_value_dict: Mapping[str, Any] | None = ...,
    pad_to_seqlen: int = ...,
) -> BatchedDataDict: ...


@overload
def materialize(
    td: TensorDictBase | WireBatch,
    layout: Layout = ...,
    pad_value_dict: Mapping[str, Any] | None = ...,
    pad_to_seqlen: int = ...,
    *,
    container: Callable[[dict[str, Any]], T],
) -> T: ...


def materialize(
    td: TensorDictBase | WireBatch,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    *,
    container: Callable[[dict[str, Any]], Any] = BatchedDataDict,
) -> Any:
    """A wire batch to columns for a trainer: the fetch site.

    Args:
        td: TensorDict of batch size (N, ...), or a `WireBatch`, whose columns then go straight
            from the message to where they are wanted.
        layout: ``"padded"`` pads each jagged column (N, j, ...) to its longest row;
            ``"jagged"`` passes it through; ``"packed"`` makes a `PackedColumn` of it.
        pad_value_dict: Column name to pad value, 0 for columns not named. Exact: a value that
            the column's dtype cannot hold is an error. Names that are no column are ignored, so
            that one dict serves every batch. A column inside a nested TensorDict is looked up by
            its tuple of names, as tensordict does.
        pad_to_seqlen: In the padded layout, the width of every jagged column; 0 means the
            longest row. Rectangular columns keep their shape. In every layout, what no row may
            be longer than.
        container: Called with the dict of columns; what it returns is returned. Nested
            TensorDicts become containers too.

    Returns:
        The columns in their order. Padded columns are new, in one allocation that is freed with
        the last of them; everything else aliases `td`. Non-tensor columns become object arrays
        (N,), items unwrapped by `unwrap_wire_stripped_payload`; a payload that belongs to the
        whole batch fills N rows.

    Raises:
        ArgumentError: The layout is unknown, a row is longer than `pad_to_seqlen` (a silent
            width mismatch between ranks hangs collectives), a pad does not fit its dtype, or
            `td` has no batch dim.
        ArgumentTypeError: `td` is no TensorDict, or it is or holds a lazy stack.

    Example:
        >>> import torch
        >>> from jagcodec import materialize, pack_jagged_fields
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=torch.tensor([2, 3])
        ... )
        >>> materialize(td, pad_value_dict={"ids": -1}, pad_to_seqlen=4)["ids"].tolist()
        [[5, 6, -1, -1], [7, 8, 9, -1]]
        >>> materialize(td, layout="packed")["ids"].cu_seqlens.tolist()
        [0, 2, 5]
    """
    where = "materialize"
    if layout not in get_args(Layout):
        raise ArgumentError(
            "bad_option",
            f"{where}(layout)",
            f"expected one of {', '.join(map(repr, get_args(Layout)))}, found {layout!r}",
        )
    try:
        width = operator.index(pad_to_seqlen)
    except TypeError:
        width = -1
    if width < 0:
        raise ArgumentError(
            "bad_option",
            f"{where}(pad_to_seqlen)",
            f"expected a width, or 0 for the longest row, found {pad_to_seqlen!r}",
        )
    if pad_value_dict is not None and not isinstance(pad_value_dict, Mapping):
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(pad_value_dict)",
            f"expected a dict of column names to pads, found {type(pad_value_dict).__name__}",
        )
    if not isinstance(td, (TensorDictBase, WireBatch)):
        raise ArgumentTypeError(
            "bad_type", f"{where}(td)", f"expected a TensorDict, found {type(td).__name__}"
        )
    return _Materializing(layout, pad_value_dict or {}, width, container).run(td)


class _Rectangle(NamedTuple):
    """A padded column before there is memory for it."""

    parts: Parts
    blank: Blank
    pattern: bytes

    def fill(self, out: torch.Tensor) -> torch.Tensor:
        return pad_into(out, self.parts, self.pattern, fresh=self.blank.zeroed)


class _Materializing:
    """The state of one `materialize` call."""

    def __init__(
        self,
        layout: Layout,
        pads: Mapping[Any, Any],
        width: int,
        container: Callable[[dict[str, Any]], Any],
    ) -> None:
        self._layout = layout
        self._pads = pads
        self._width = width
        self._container = container
        self._splits: dict[bytes, RowSplits] = {}
        self._packing: dict[tuple[bytes, torch.device], _Packing] = {}
        self._rectangles: list[_Rectangle] = []

    def run(self, td: TensorDictBase | WireBatch) -> Any:
        """Look at every column, allocate the rectangles together, then fill them."""
        plan = self._plan(td, ())
        try:
            blanks = allocate([rectangle.blank for rectangle in self._rectangles])
        except (MemoryError, ValueError) as error:
            raise ArgumentError(
                "too_large",
                "materialize(pad_to_seqlen)",
                f"expected rectangles that fit in memory, found width {self._width}: {error}",
            ) from error
        filled = map(_Rectangle.fill, self._rectangles, blanks)
        return self._contained(plan, filled)

    def _contained(self, plan: dict[str, Any], filled: Iterator[torch.Tensor]) -> Any:
        columns = {}
        for name, column in plan.items():
            if type(column) is _Rectangle:
                columns[name] = next(filled)
            elif type(column) is dict:
                columns[name] = self._contained(column, filled)
            else:
                columns[name] = column
        return self._container(columns)

    def _plan(self, td: TensorDictBase | WireBatch, above: tuple[str, ...]) -> dict[str, Any]:
        if isinstance(td, LazyStackedTensorDict):
            raise ArgumentTypeError(
                "bad_type",
                f"materialize({repr('.'.join(above)) if above else 'td'})",
                "expected a TensorDict, found a lazy stack, whose rows may differ in keys and "
                "shapes; make columns of its rows with stack_or_nest, or materialize its members",
            )
        if not len(td.batch_size):
            raise ArgumentError(
                "bad_shape",
                f"materialize({repr('.'.join(above)) if above else 'td'})",
                "expected batch size (N, ...), found no batch dim",
            )
        rows = td.batch_size[0]
        columns: dict[str, Any] = {}
        leaf: Any
        if isinstance(td, WireBatch):
            read = td.leaf if self._layout == "jagged" else td.column
            items: Iterable[tuple[str, Any]] = ((name, read(name)) for name in td.fields)
        else:
            items = td.items()
        for name, leaf in items:
            key = (*above, name)
            if is_non_tensor(leaf):
                columns[name] = rows_of_leaf(leaf, rows)
            elif isinstance(leaf, (TensorDictBase, WireBatch)):
                columns[name] = self._plan(leaf, key)
            elif isinstance(leaf, Parts) or is_jagged(leaf):
                columns[name] = self._jagged(leaf, key)
            else:
                columns[name] = leaf
        return columns

    def _jagged(self, leaf: torch.Tensor | Parts, key: tuple[str, ...]) -> Any:
        path = f"materialize({'.'.join(key)!r})"
        parts = leaf if isinstance(leaf, Parts) else take_apart(leaf, path)
        same_rows = parts.lengths.tobytes()
        splits = self._splits.get(same_rows)
        if splits is None:
            splits = self._splits[same_rows] = splits_of_lengths(parts.lengths)
        if self._width and splits.max > self._width:
            row = int(np.argmax(splits.lengths > self._width))
            raise ArgumentError(
                "row_too_long",
                f"{path}, row {row}",
                f"expected rows of at most pad_to_seqlen={self._width} tokens, "
                f"found {splits.lengths[row]}; raise pad_to_seqlen or shorten the row",
            )
        if self._layout == "jagged":
            return leaf
        if self._layout == "packed":
            return self._packed(parts, splits, path)
        name = key[0] if len(key) == 1 else key
        values = parts.values
        pattern = pad_bits(self._pads.get(name, 0), values.dtype, path)
        shape = padded_shape(parts, self._width or splits.max)
        blank = Blank(shape, values.dtype, values.device, zeroed=not any(pattern))
        rectangle = _Rectangle(parts, blank, pattern)
        self._rectangles.append(rectangle)
        return rectangle

    def _packed(self, parts: Parts, splits: RowSplits, path: str) -> PackedColumn:
        key = (parts.lengths.tobytes(), parts.values.device)
        packing = self._packing.get(key)
        if packing is None:
            packing = self._packing[key] = _packing(splits, parts.values.device, path)
        return PackedColumn(
            compact_values(parts), packing.cu_seqlens, splits.max, packing.position_ids
        )


class _Packing(NamedTuple):
    """What the packed columns of one raggedness share."""

    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor


def _packing(splits: RowSplits, device: torch.device, path: str) -> _Packing:
    if splits.total > np.iinfo(np.int32).max:
        raise ArgumentError(
            "bad_length",
            path,
            f"expected fewer than 2**31 tokens for int32 cu_seqlens, found {splits.total}; "
            "split the batch",
        )
    cu_seqlens = torch.from_numpy(splits.host.astype(np.int32))
    positions = np.arange(splits.total) - np.repeat(splits.starts, splits.lengths)
    return _Packing(cu_seqlens.to(device), torch.from_numpy(positions).to(device))


# So that what `materialize` returns can itself be sent on.
register_type(
    BatchedDataDict, "jagcodec.BatchedDataDict", to_state=dict, from_state=BatchedDataDict
)
register_type(PackedColumn, "jagcodec.PackedColumn", to_state=tuple, from_state=PackedColumn._make)
