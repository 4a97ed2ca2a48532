"""`plan_packing`, `plan_micro_batches`: rows for forward passes, and results back to rows.

Torch is imported when a tensor is asked for, so a controller without it can plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from math import fsum
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import FOREIGN_ERRORS, check_option, integer_of, items_of
from jagcodec._compiling import untraced
from jagcodec._dependencies import check_torch
from jagcodec.errors import ArgumentError, ArgumentIndexError, ArgumentTypeError, brief, describe
from jagcodec.forward.column_buffers import ColumnBuffers
from jagcodec.forward.layout import (
    CpLayout,
    PackLayout,
    PackOptions,
    Tail,
    plan_buffers,
    plan_layout,
    rank_of,
)
from jagcodec.forward.assignment import Assignment, Cost, Fill, Rules, assign_rows
from jagcodec.rows.lengths import IntArray, length_array

if TYPE_CHECKING:
    import torch

    from jagcodec.forward.packer import Packer
    from jagcodec.rows.lengths import Lengths
    from jagcodec.rows.varlen import PackedColumn
    from jagcodec.wire.opened import AnyBatch


@untraced
def plan_packing(
    lengths: Lengths,
    *,
    row_multiple: int = 1,
    total_multiple: int = 1,
    total: int | None = None,
    min_total: int = 0,
    tail: Tail | None = None,
    cp_size: int = 1,
    cp_layout: CpLayout = "zigzag",
) -> PackPlan:
    """Plan where every token of a forward pass comes from, once for all columns of a batch.

    Example:
        >>> import torch
        >>> from jagcodec import plan_packing
        >>> plan = plan_packing([3, 1], row_multiple=4)
        >>> plan.pack(torch.tensor([[5, 6, 7], [8, 0, 0]]), pad=-1).tolist()
        [5, 6, 7, -1, 8, -1, -1, -1]
        >>> plan.cu_seqlens_padded.tolist(), plan.position_ids().tolist()
        ([0, 4, 8], [0, 1, 2, 0, 0, 0, 0, 0])
        >>> [row.tolist() for row in plan.unpack(torch.arange(8.0)).unbind()]
        [[0.0, 1.0, 2.0], [4.0]]

    Args:
        lengths: (N,) tokens per row: a list, an array, a tensor, or a jagged tensor, whose row
            lengths count. Torch is imported only for tensors, and only a tensor on a device is
            waited for.
        row_multiple: Rows are padded to a multiple of this, such as 2 * cp * tp, or for fp8 the
            least common multiple of that and 16. A row of 0 tokens stays one.
        total_multiple: The total T of cells is a multiple of this.
        total: T is exactly this. Leave out `total_multiple` and `min_total` then.
        min_total: T is at least this, before `total_multiple`.
        tail: Where the cells go that T needs beyond the padded rows: ``"last_row"`` lengthens
            the last row, ``"own_row"`` adds a row without tokens after it. It is required with
            `total`, `total_multiple` or `min_total`.
        cp_size: Ranks of context parallelism, each of which holds T / cp_size cells.
        cp_layout: ``"zigzag"``: each padded row is 2 * cp_size chunks, and rank r has chunks r and
            2 * cp_size - 1 - r of every row. ``"zigzag_buffer"``: the same with the whole buffer as
            one row. ``"contiguous"``: rank r has the r-th of `cp_size` intervals of the buffer.

    Returns:
        The plan. It depends on the arguments alone, so every rank computes the same one.

    Raises:
        ArgumentError: A length is negative, a number is below its minimum, `total` is too small,
            `tail` is missing, rows or the total do not divide into chunks (the error names the
            multiple to pass), or T is 2**31 or more.
        ArgumentTypeError: Lengths are not integers.
    """
    where = "plan_packing"
    numbers, packer = _lengths_and_packer(lengths, f"{where}(lengths)")
    options = PackOptions(row_multiple, total_multiple, total, min_total, tail, cp_size, cp_layout)
    return PackPlan(plan_layout(numbers, options, where), packer)


def _lengths_and_packer(lengths: Any, path: str) -> tuple[IntArray, Packer | None]:
    """(N,) row lengths; for a tensor also a packer that knows its offsets."""
    if not (hasattr(lengths, "is_nested") or hasattr(lengths, "cu_seqlens")):  # not tensors
        return length_array(lengths, path), None
    from jagcodec.forward.packer import Packer, read_plan_lengths
    from jagcodec.rows.row_splits import RowSplitsPool

    pool = RowSplitsPool()
    row_splits = read_plan_lengths(lengths, path, pool)
    return row_splits.lengths, Packer(row_splits, pool)


@untraced
class PackPlan:
    """Where every cell of a forward pass comes from; made by `plan_packing`.

    A column is a jagged tensor with the plan's row lengths; a rectangle (N, S, ...) with S at least
    the longest row; or values (sum of lengths, ...) end to end. A jagged tensor of ragged dim 2,
    such as MRoPE's (3, n) per row, becomes (3, T).

    On the CPU all columns of a batch are copied by one call of the row kernel. On a device, and
    where gradients flow, an index is made once for a rank and a shift. A plan waits for a device
    only to read row lengths: once for each offsets tensor that is new to it.

    Attributes:
        rows: N.
        total: T, the cells of the whole buffer.
        local_total: T / cp_size, the cells of a rank.
        lengths: (N,) int64 array of tokens per row.
        padded_lengths: (N,) int64 array of cells per row: its tokens and pads, and for the last row
            also the tail if ``tail="last_row"``.
        max_seqlen: The longest row.
        max_seqlen_padded: The longest padded row; or the tail, if it is separate and longer.
        cu_seqlens: (N + 1,) int32 tensor: where each row begins without pads, and the end. A
            separate tail is one more row.
        cu_seqlens_padded: The same with pads. **The same object** if nothing is padded, because
            Transformer Engine takes two objects for different layouts.
    """

    def __init__(
        self, layout: PackLayout, packer: Packer | None = None, device: torch.device | None = None
    ) -> None:
        """Use `plan_packing`."""
        self.layout: PackLayout = layout
        self.rows: int = layout.rows
        self.total: int = layout.total
        self.local_total: int = layout.local_total
        self.lengths: IntArray = layout.lengths.copy()
        self.padded_lengths: IntArray = layout.padded_lengths.copy()
        self.max_seqlen: int = layout.max_seqlen
        self.max_seqlen_padded: int = layout.max_seqlen_padded
        self._device = device  # None is the CPU, which needs no torch
        self._packer = packer
        self._cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None

    def __reduce__(self) -> Any:
        return PackPlan, (self.layout, None, self._device)  # the copy makes packer and tensors anew

    def __repr__(self) -> str:
        return f"PackPlan(rows={self.rows}, total={self.total}, cp_size={self.layout.cp_size})"

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self._cu_seqlens_tensors()[0]

    @property
    def cu_seqlens_padded(self) -> torch.Tensor:
        return self._cu_seqlens_tensors()[1]

    def _cu_seqlens_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cu_seqlens is None:
            real, padded = self.layout.cu_seqlens, self.layout.cu_seqlens_padded
            both = self._as_tensor(np.concatenate([real] if padded is real else [real, padded]))
            self._cu_seqlens = both[: len(real)], both[len(real) :]
            if padded is real:
                self._cu_seqlens = both, both
        return self._cu_seqlens

    def _as_tensor(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """Numbers as a tensor, on the device of the plan."""
        check_torch("PackPlan.cu_seqlens")
        from jagcodec.forward.packer import sent

        return sent(numbers, self._device)

    def to(self, device: torch.device | str) -> PackPlan:
        """The plan with `cu_seqlens` and its other tensors on a device, in one copy without a wait.

        Columns are packed where they are, whatever the device of the plan.

        Raises:
            ArgumentError: There is no such device.
        """
        check_torch("PackPlan.to")
        from jagcodec.memory.plain_types import usable_device

        found = usable_device(device, "PackPlan.to(device)")
        return PackPlan(self.layout, self._tensor_packer(), found)

    def _tensor_packer(self) -> Packer:
        """The packer, made when the first tensor comes."""
        if self._packer is None:
            check_torch("PackPlan.unpack")
            from jagcodec.forward.packer import Packer

            self._packer = Packer.of_lengths(self.layout.lengths)
        return self._packer

    # Into the buffer

    @overload
    def pack(  # type: ignore[overload-overlap]  # a blob in a tensor is a column
        self,
        source: torch.Tensor | PackedColumn,
        *,
        pad: Any = ...,
        shift: int = 0,
        cp_rank: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    @overload
    def pack(
        self,
        source: AnyBatch,
        *,
        pad_value_dict: Mapping[Any, Any] | None = None,
        labels_of: str | Mapping[str, Any] | None = None,
        token_aligned_fields: Iterable[str] = (),
        align_end: Iterable[str] = (),
        keep_jagged: Iterable[str] = (),
        cp_rank: int | None = None,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]: ...

    def pack(
        self,
        source: Any,
        *,
        pad: Any = ...,
        shift: int = 0,
        pad_value_dict: Mapping[Any, Any] | None = None,
        labels_of: str | Mapping[str, Any] | None = None,
        token_aligned_fields: Iterable[str] = (),
        align_end: Iterable[str] = (),
        keep_jagged: Iterable[str] = (),
        cp_rank: int | None = None,
        out: Any = None,
    ) -> Any:
        """Lay out a column, or all columns of a batch, for the forward pass.

        Example:
            >>> import torch
            >>> from jagcodec import pack_rows, plan_packing
            >>> batch = pack_rows({"ids": [[5, 6, 7], [8]], "reward": [0.5, 1.0]})
            >>> plan = plan_packing(batch["ids"], row_multiple=4, cp_size=2)
            >>> packed = plan.pack(batch, labels_of="ids", cp_rank=0)
            >>> packed["ids"].tolist(), packed["labels"].tolist(), packed["reward"].tolist()
            ([5, 0, 8, 0], [6, -100, -100, -100], [0.5, 1.0])

        Args:
            source: A column, as the class describes it. Or a batch in any form: its ragged columns
                must have the plan's row lengths, and are packed. From a message, only the cells of
                this rank are read, and each is copied once.
            pad: What pads of a column hold: a number, or one value of its trailing shape, such as
                ``torch.arange(k)`` for the experts of a router. It must fit the dtype. If it is
                left out, the bits of pads are 0.
            shift: Cell j of a row gets its token j - shift, or a pad if the row has no such token;
                -1 makes labels. Pads stay pads.
            pad_value_dict: For a batch: column name to `pad`. Names that are not columns are
                ignored here, in `token_aligned_fields` and in `keep_jagged`.
            labels_of: For a batch: the packed column whose next tokens become a column "labels", or
                a dict of names of new columns to packed ones. Where a row has no next token, a
                column holds its pad in `pad_value_dict`. Without one, integers named "labels" hold
                -100, bools and floats 0, and integers of another name are an error.
            token_aligned_fields: For a batch: rectangles (N, S, ...) that are packed, too.
            align_end: For a batch: jagged or packed columns that have only the last tokens of each
                row, such as log-probabilities of the response, or all of them. They are put at the
                ends of the rows. The cells before them hold the column's pad; a label whose token
                is missing holds the labels' pad.
            keep_jagged: For a batch: ragged columns that stay jagged, whatever their row lengths.
            cp_rank: A rank of context parallelism, or None for the whole buffer, whatever cp_size.
            out: Memory of the right shape, dtype and device, overwritten. For a batch, a dict of
                such tensors; columns that it lacks are allocated.

        Returns:
            A tensor (T / cp_size, ...), or (T, ...) for ``cp_rank=None``; for a batch, a dict of
            them. Packed columns are new; gradients flow through them. Columns that are not packed
            have the form that `materialize` returns.

        Raises:
            ArgumentError: Row lengths are not those of the plan, or are longer in `align_end` (the
                row is named), `align_end` names a rectangle or another column without row lengths,
                a strided tensor may be both a rectangle and values end to end, there is no such
                rank, a pad does not fit, integers of `labels_of` need one, or `out` does not fit,
                overlaps the input, or is given for what needs a gradient.
            ArgumentKeyError: `labels_of` does not name a packed column, or `align_end` a column.
            ArgumentTypeError: `source` is neither a column nor a batch.
            WireFormatError: A message is malformed.
        """
        check_torch(_PACK)
        from jagcodec.forward.packer import is_column

        rank = self.layout.rank(cp_rank, f"{_PACK}(cp_rank)")
        if isinstance(source, np.ndarray) and source.dtype != np.uint8:  # which a blob may be
            detail = f"expected a tensor or a batch, found an array of {source.dtype}; "
            detail += "torch.from_numpy makes a tensor of it"
            raise ArgumentTypeError("bad_type", f"{_PACK}(source)", detail)
        if not is_column(source):
            _check_defaults("column", source, pad=pad, shift=shift)
            pieces_of = partial(self.layout.pieces, rank)
            buffers = ColumnBuffers(_PACK, self._tensor_packer(), pieces_of)
            buffers.read_options(pad_value_dict, token_aligned_fields, align_end, keep_jagged, out)
            return buffers.whole(_unfilled_columns(buffers, source, labels_of))
        _check_defaults(
            "batch",
            source,
            pad_value_dict=pad_value_dict,
            labels_of=labels_of,
            token_aligned_fields=token_aligned_fields,
            align_end=align_end,
            keep_jagged=keep_jagged,
        )
        packer = self._tensor_packer()
        view = packer.rows_of(source, f"{_PACK}(column)")
        shift = self.layout.shift(shift, f"{_PACK}(shift)")
        buffer = packer.buffer(view, self.layout.pieces(rank, shift), _PACK, pad=pad, out=out)
        return packer.fill([buffer])[0]

    def position_ids(
        self, cp_rank: int | None = None, *, pads: Literal["zero", "continue"] = "zero"
    ) -> torch.Tensor:
        """0, 1, ... in each row: (T / cp_size,) int64, or (T,) for ``cp_rank=None``; a new tensor.

        Pads have 0. With ``pads="continue"`` they count on from their row, and a separate tail
        counts from 0.
        """
        where = "PackPlan.position_ids"
        check_option(pads, ("zero", "continue"), f"{where}(pads)")
        rank = self.layout.rank(cp_rank, f"{where}(cp_rank)")
        return self._as_tensor(self.layout.position_ids(rank, through_pads=pads == "continue"))

    def mask(self, cp_rank: int | None = None) -> torch.Tensor:
        """A bool tensor of the shape of `position_ids`: True for a token, False for a pad."""
        rank = self.layout.rank(cp_rank, "PackPlan.mask(cp_rank)")
        return self._as_tensor(self.layout.pieces(rank).mask())

    # Out of it

    def unpack(
        self,
        values: torch.Tensor | Sequence[torch.Tensor],
        *,
        shift: int = 0,
        pad: Any = ...,
        last: Lengths | None = None,
    ) -> torch.Tensor:
        """Turn values that were computed for each cell into rows: the inverse of `pack`.

        Example:
            >>> import torch
            >>> from jagcodec import plan_packing
            >>> plan = plan_packing([3, 1], row_multiple=4, cp_size=2)
            >>> whole = torch.arange(8.0)
            >>> parts = [plan.pack(torch.arange(4.0), cp_rank=rank) for rank in range(2)]
            >>> [row.tolist() for row in plan.unpack(parts).unbind()]
            [[0.0, 1.0, 2.0], [3.0]]
            >>> [row.tolist() for row in plan.unpack(parts, last=[2, 0]).unbind()]
            [[1.0, 2.0], []]

        Args:
            values: (T, ...), or a list of (T / cp_size, ...), one per rank in their order. A
                leading dim of 1 is dropped.
            shift: Token j of a row gets the value of cell j - shift. With 1, what the model
                computed at cell j for token j + 1 goes to token j + 1.
            pad: The value of tokens that get none, as for `pack`.
            last: (N,) how many tokens at the end of each row are wanted, such as those of the
                response; or a jagged tensor, whose row lengths count. None means all.

        Returns:
            A jagged tensor (N, j, ...) of the plan's rows, with the offsets of the tensor that the
            plan was made from, or of `last`. Gradients flow to `values`.

        Raises:
            ArgumentError: Values have another number of cells, parts differ in shape, dtype or
                device, there is not one part for each rank, or `last` has another number of rows,
                or is longer than its row (the row is named).
            ArgumentTypeError: Values are not strided tensors, or `last` does not hold integers.
        """
        where = "PackPlan.unpack"
        shift = self.layout.shift(shift, f"{where}(shift)")
        return self._tensor_packer().unpacked(
            self.layout, values, shift, pad, last, f"{where}(values)"
        )


_PACK = "PackPlan.pack"


def _check_defaults(needed: str, source: Any, **options: Any) -> None:
    """Refuse options that only a `needed` source takes, a "column" or a "batch"."""
    for name, value in options.items():
        if not (value is None or value is ... or (type(value) in (int, tuple) and not value)):
            detail = f"expected a {needed} with {name}, found {describe(source)}"
            raise ArgumentError("bad_option", f"{_PACK}({name})", detail)


def _unfilled_columns(buffers: ColumnBuffers, source: Any, labels_of: Any) -> dict[str, Any]:
    """The columns of a batch; those that are packed are replaced by unfilled buffers."""
    from jagcodec.forward.packer import is_column
    from jagcodec.wire.opened import (
        are_several,
        each_column,
        is_batch,
        opened,
        row_count_of,
    )

    where = f"{buffers.where}(batch)"
    if are_several(source):
        detail = "expected one batch, found a list of them; concat_rows makes one"
        raise ArgumentTypeError("bad_type", where, detail)
    if (is_column(source) or isinstance(source, np.ndarray)) and not is_batch(source):
        detail = f"expected a batch, found {describe(source)}; put the column in a dict"
        raise ArgumentTypeError("bad_type", where, detail)
    batch, rows = opened(source, where), buffers.packer.row_splits.rows
    found = row_count_of(batch, where)
    if found != rows and [*batch.keys()]:
        detail = f"expected the {rows} rows of the plan, found {found}"
        raise ArgumentError("row_mismatch", where, detail)
    pool = buffers.packer.pool
    columns = each_column(batch, buffers.column, buffers.column, buffers.path, pool)
    buffers.check_packed(columns)
    buffers.add_labels(columns, labels_of)
    return columns


# --- micro-batches -----------------------------------------------------------------------------


@untraced
def plan_micro_batches(
    lengths: Lengths,
    ranks: int = 1,
    *,
    max_tokens: int | None = None,
    row_multiple: int = 1,
    total_multiple: int = 1,
    rows_per_batch: int | None = None,
    count: int | None = None,
    count_multiple: int = 1,
    groups: Any = None,
    cost: Cost = None,
    fill: Fill = "error",
) -> MicroBatches:
    """Group rows into micro-batches of limited size, the same number for every rank.

    Example:
        >>> from jagcodec import plan_micro_batches
        >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
        >>> [[rows.tolist() for rows in steps] for steps in batches]
        [[[5], [3, 4]], [[0], [1, 2]]]

    Args:
        lengths: (N,) tokens per row: a list, an array, a tensor, or a jagged tensor, whose row
            lengths count.
        ranks: How many data-parallel ranks there are.
        max_tokens: The most cells of a micro-batch, its pads included.
        row_multiple: Every row is padded to a multiple of this, as by `plan_packing`.
        total_multiple: The total of a micro-batch is padded to a multiple of this.
        rows_per_batch: The rows of a micro-batch; the last step may hold fewer. It is only the most
            rows that a micro-batch may hold with `max_tokens` or `groups`, if there are more
            micro-batches than it needs, or if too few rows are left for the last step of each rank
            (``fill="repeat"`` adds copies then).
        count: Micro-batches of each rank, exactly, such as the maximum over several nodes.
        count_multiple: Their number is a multiple of this, as virtual pipeline stages need.
        groups: (N,) hashable ids: rows of one group stay in one micro-batch.
        cost: What to balance over the ranks. None balances tokens; a pair (a, b) balances the cost
            ``a * n + b * n**2`` of rows of n tokens; a function takes the (N,) lengths and returns
            (N,) costs, the same ones on every rank.
        fill: If there are too few rows (or groups): "error", or "repeat" for copies of the shortest
            row, one in each micro-batch that would be empty.

    Returns:
        A `MicroBatches`. It has as few micro-batches as first-fit-decreasing needs. Rows go to
        ranks, most expensive first, each to the one with the lowest sum. Where that leaves no
        room under the caps, they are packed by first-fit-decreasing instead. The result depends on
        the arguments alone, whatever the CPU, numpy or Python, so every rank may compute its own.

    Raises:
        ArgumentError: A row or a group exceeds a cap alone (it is named); `count` is too small or
            not a multiple; there are too few rows; none of `max_tokens`, `rows_per_batch` and
            `count` is given; or a length, a cost or a number is out of range.
        ArgumentTypeError: Lengths are not integers, or ids are not hashable.
    """
    rules = Rules(
        ranks=ranks,
        max_tokens=max_tokens,
        row_multiple=row_multiple,
        total_multiple=total_multiple,
        rows_per_batch=rows_per_batch,
        count=count,
        count_multiple=count_multiple,
        fill=fill,
    )
    tokens, packer = _lengths_and_packer(lengths, "plan_micro_batches(lengths)")
    return MicroBatches(tokens, rules, assign_rows(tokens, rules, groups, cost), packer)


@untraced
class MicroBatches(Sequence[tuple[IntArray, ...]]):
    """The rows of each micro-batch; made by `plan_micro_batches`.

    ``batches[rank][step]`` has the rows of one micro-batch, (rows,) int64 and rising. Each rank has
    the same number of steps, the most expensive first; `in_order` gives a plan with the steps in
    another order. ``len(batches)`` is the number of ranks. These arrays, `order` and `inverse` are
    copies: writing to one changes neither the others nor the plan.

    Attributes:
        order: (M,) int64 rows of all micro-batches end to end: rank by rank, step by step. M > N if
            there are copies.
        inverse: (N,) int64: the place of each row in `order`, and never that of a copy.

    Example:
        >>> import torch
        >>> from jagcodec import plan_micro_batches
        >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
        >>> results = [torch.from_numpy(rows) * 10 for steps in batches for rows in steps]
        >>> batches.restore(results).tolist()
        [0, 10, 20, 30, 40, 50]
    """

    def __init__(
        self,
        lengths: IntArray,
        rules: Rules,
        assignment: Assignment,
        packer: Packer | None = None,
    ) -> None:
        """Use `plan_micro_batches`."""
        self._lengths, self._rules, self._assignment = lengths, rules, assignment
        self._packer = packer
        self.order: IntArray = assignment.order.copy()
        self._count = len(assignment.costs) // rules.ranks  # micro-batches of each rank
        each = [assignment.order[rows].copy() for rows in self._slices_in_order(0, rules.ranks)]
        starts = range(0, rules.ranks * max(self._count, 1), max(self._count, 1))
        self._steps = tuple(tuple(each[start : start + self._count]) for start in starts)
        self.inverse: IntArray = self._places_by_row(0, rules.ranks)

    def __reduce__(self) -> Any:
        return MicroBatches, (self._lengths, self._rules, self._assignment)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, rank: int) -> tuple[IntArray, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[IntArray, ...], ...]: ...

    def __getitem__(self, rank: Any) -> Any:
        index = rank if isinstance(rank, slice) else integer_of(rank)
        try:
            return self._steps[index]  # type: ignore[index]
        except (IndexError, *FOREIGN_ERRORS):
            raise _outside("MicroBatches", "rank", rank, len(self)) from None

    def __repr__(self) -> str:
        rows, ranks = len(self._lengths), len(self)
        return f"MicroBatches(rows={rows}, ranks={ranks}, micro_batches_per_rank={self._count})"

    def is_repeat(self, rank: int, step: int) -> npt.NDArray[np.bool_]:
        """(rows,) bool: which rows of a micro-batch are copies. Mask their loss."""
        where = "MicroBatches.is_repeat"
        rank = self._checked_rank(rank, where)
        known = integer_of(step)
        if known is None or not 0 <= known < self._count:
            raise _outside(where, "step", step, self._count)
        return self._assignment.is_copy[self._slices_in_order(rank, rank + 1)[known]].copy()

    def pack(
        self,
        batch: AnyBatch,
        rank: int = 0,
        *,
        total: int | None = None,
        tail: Tail | None = None,
        cp_rank: int | None = None,
        cp_size: int = 1,
        cp_layout: CpLayout = "zigzag",
        pad_value_dict: Mapping[Any, Any] | None = None,
        labels_of: str | Mapping[str, Any] | None = None,
        token_aligned_fields: Iterable[str] = (),
        align_end: Iterable[str] = (),
        keep_jagged: Iterable[str] = (),
    ) -> list[tuple[PackPlan, dict[str, Any]]]:
        """Lay out every micro-batch of a rank for the forward pass, all in one copy.

        Example:
            >>> from jagcodec import pack_rows, plan_micro_batches
            >>> batch = pack_rows({"ids": [[5, 6, 7], [8], [9, 9]], "reward": [0.5, 1.0, 2.0]})
            >>> batches = plan_micro_batches(batch["ids"], max_tokens=4, row_multiple=2)
            >>> for plan, columns in batches.pack(batch, labels_of="ids"):
            ...     print(plan.cu_seqlens_padded.tolist(), columns["ids"].tolist())
            [0, 4] [5, 6, 7, 0]
            [0, 2, 4] [8, 0, 9, 9]

        Args:
            batch: All N rows, in any form: an open message, a join of hundreds, a dict of columns.
            rank: Which data-parallel rank.
            total: Every micro-batch has exactly so many cells, as pipelines need. It takes the
                place of `total_multiple`.
            tail: Where the cells go that a total needs beyond the rows, as for `plan_packing`;
                required with `total` and `total_multiple`.
            cp_rank: As for `PackPlan.pack`.
            cp_size: As for `plan_packing`.
            cp_layout: As for `plan_packing`.
            pad_value_dict: As for `PackPlan.pack`.
            labels_of: As for `PackPlan.pack`.
            token_aligned_fields: As for `PackPlan.pack`.
            align_end: As for `PackPlan.pack`. All N rows are checked, whatever the rank, so every
                rank raises the same error.
            keep_jagged: As for `PackPlan.pack`.

        Returns:
            For each step the plan of its rows, with the multiples of `plan_micro_batches`, and what
            ``plan.pack(select_rows(batch, rows), ...)`` returns. The packed columns of the steps
            are slices of one block; those of a column with a gradient share one graph, so call
            ``backward`` once, on their sum.

        Raises:
            ArgumentError: `plan_packing` or `PackPlan.pack` would raise it; the error names the
                micro-batch. Or the batch has another number of rows.
            ArgumentIndexError: There is no such rank.
            ArgumentTypeError: `batch` is not a batch.
            WireFormatError: A message is malformed.
        """
        where = "MicroBatches.pack"
        known = self._checked_rank(rank, where)
        steps = [self._assignment.order[rows] for rows in self._slices_in_order(known, known + 1)]
        order = np.concatenate([*steps, np.empty(0, np.int64)])
        bounds = np.cumsum([0, *map(len, steps)])
        options = PackOptions(
            row_multiple=self._rules.row_multiple,
            total_multiple=self._rules.total_multiple if total is None else 1,
            total=total,
            tail=tail,
            cp_size=cp_size,
            cp_layout=cp_layout,
        )
        rows = self._lengths[order], order, bounds
        layout = plan_buffers(
            rows,
            len(self._lengths),
            options,
            where,
            made_by="plan_micro_batches",
            each="micro-batch",
        )
        of_cp = rank_of(cp_rank, layout.cp_size, f"{where}(cp_rank)")
        buffers = ColumnBuffers(where, self._tensor_packer(), cache(partial(layout.pieces, of_cp)))
        buffers.read_options(pad_value_dict, token_aligned_fields, align_end, keep_jagged)
        columns = _unfilled_columns(buffers, batch, labels_of)
        plans = [PackPlan(each) for each in layout.layouts(of_cp)]
        cells = [plan.total if of_cp is None else plan.local_total for plan in plans]
        return [*zip(plans, buffers.steps(columns, steps, cells), strict=True)]

    def _tensor_packer(self) -> Packer:
        """A packer for tensors of all rows; it knows the offsets of earlier calls."""
        check_torch("MicroBatches.pack")
        from jagcodec.forward.packer import Packer

        if self._packer is None:
            self._packer = Packer.of_lengths(self._lengths)
        return self._packer.anew()

    def rows(self, rank: int) -> IntArray:
        """The rows of a rank, rising and without copies: those that ``restore(results, rank)`` has.

        Example:
            >>> import torch
            >>> from jagcodec import join_columns, open_wire, pack_rows, plan_micro_batches
            >>> batch = pack_rows({"ids": [[1] * n for n in [5, 1, 4, 2, 3, 6]]})
            >>> batches = plan_micro_batches(batch["ids"], ranks=2, max_tokens=8)
            >>> batches.rows(1).tolist()
            [0, 1, 2]
            >>> values = [torch.from_numpy(rows) * 10 for rows in batches[1]]
            >>> mine = open_wire(batch).rows(batches.rows(1))
            >>> join_columns([mine, {"value": batches.restore(values, 1)}])["value"].tolist()
            [0, 10, 20]

        Returns:
            A new (rows,) int64 array.

        Raises:
            ArgumentIndexError: There is no such rank.
        """
        rank = self._checked_rank(rank, "MicroBatches.rows")
        first = self._assignment.bounds[rank * self._count]
        rows: IntArray = self._assignment.order[first + self._places_by_row(rank, rank + 1)]
        return rows

    def in_order(self, rank: int, order: Sequence[int] | IntArray) -> MicroBatches:
        """The same plan with the steps of one rank in another order.

        Example:
            >>> from jagcodec import plan_micro_batches
            >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
            >>> cheapest_first = batches.in_order(0, [1, 0])
            >>> [rows.tolist() for rows in batches[0]], [r.tolist() for r in cheapest_first[0]]
            ([[5], [3, 4]], [[3, 4], [5]])

        Args:
            rank: Whose steps.
            order: (steps,) the step that each becomes: every number of 0 to steps - 1 once.

        Returns:
            A new plan. Its `pack` and `restore` have the steps in the new order.

        Raises:
            ArgumentIndexError: There is no such rank.
            ArgumentError: `order` lacks a step, or names one twice.
            ArgumentTypeError: `order` does not hold integers.
        """
        where = "MicroBatches.in_order"
        rank = self._checked_rank(rank, where)
        expected = f"each step of 0 to {self._count - 1} once"
        steps = [integer_of(step) for step in items_of(order, f"{where}(order)", expected)]
        if sorted(step for step in steps if step is not None) != [*range(self._count)]:
            detail = f"expected {expected}, found {brief(steps)}"
            raise ArgumentError("bad_option", f"{where}(order)", detail)
        numbers = np.arange(len(self._assignment.costs))
        first = rank * self._count
        numbers[first : first + self._count] = first + np.array(steps, np.int64)
        moved = self._assignment.in_order(numbers)
        return MicroBatches(self._lengths, self._rules, moved, self._packer)

    def restore(
        self, results: Iterable[Any], rank: int | None = None, *, last: Lengths | None = None
    ) -> Any:
        """Put the results of all micro-batches into the order of the rows, and drop copies.

        Example:
            >>> from jagcodec import plan_micro_batches
            >>> batches = plan_micro_batches([3, 1, 2], ranks=2, rows_per_batch=1, fill="repeat")
            >>> [[rows.tolist() for rows in steps] for steps in batches]
            [[[0], [1]], [[2], [1]]]
            >>> batches.restore([["a"], ["copy"], ["c"], ["b"]])
            ['a', 'b', 'c']
            >>> batches.restore([["c"], ["b"]], rank=1)
            ['b', 'c']

        Args:
            results: A batch or a column for each micro-batch, in the order of `order`: batches of
                any form; or tensors, jagged tensors, arrays, or lists with an item for each row.
            rank: Only the results of this rank; `rows` names their rows.
            last: (N,) how many cells at the end of each row of the batch are wanted, such as those
                of the response; or a jagged tensor, whose row lengths count. Jagged and packed
                columns keep these; other columns are returned as without it.

        Returns:
            A batch or a column of the same kind, as from `concat_rows`: rows 0 to N - 1, or those
            of the rank, rising.

        Raises:
            ArgumentError: There are not as many results as micro-batches, one has another number of
                rows than its micro-batch (it is named), or `last` has another number of rows than
                the batch, or is longer than a row of a column (both are named).
            ArgumentTypeError: A result is neither a batch nor a column, their kinds differ, or
                `last` does not hold integers.
        """
        where = "MicroBatches.restore"
        if rank is not None:
            rank = self._checked_rank(rank, where)
        first, end = (0, len(self)) if rank is None else (rank, rank + 1)
        sizes = [places.stop - places.start for places in self._slices_in_order(first, end)]
        listed = items_of(results, f"{where}(results)", "a list of batches or columns")
        if len(listed) != len(sizes) or not sizes:
            detail = f"expected {len(sizes)} results, one for each micro-batch, found {len(listed)}"
            raise ArgumentError("row_mismatch", f"{where}(results)", detail)
        restored = _put_back(listed, sizes, self._places_by_row(first, end), where)
        if last is None:
            return restored
        from jagcodec.forward.row_ends import last_cells

        wanted = self._read_last(last, f"{where}(last)")
        return last_cells(restored, wanted if rank is None else wanted[self.rows(rank)], where)

    def _read_last(self, last: Any, path: str) -> IntArray:
        """(N,) lengths that a caller passed."""
        found = _lengths_and_packer(last, path)[0]
        if len(found) != len(self._lengths):
            detail = f"expected {len(self._lengths)} lengths, one for each row of the batch, "
            raise ArgumentError("row_mismatch", path, detail + f"found {len(found)}")
        return found

    def report(self) -> dict[str, int | float]:
        """The sizes of the plan, and how well it is balanced.

        Example:
            >>> from jagcodec import plan_micro_batches
            >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], 2, max_tokens=8, row_multiple=2)
            >>> batches.report()["micro_batches_per_rank"], round(batches.report()["fill"], 2)
            (2, 0.88)

        Returns:
            Numbers by name: rows, copies, tokens, ranks, micro_batches, micro_batches_per_rank;
            cells, which are tokens and pads; fill, the share of cells that are tokens of rows;
            and the cost of the heaviest rank and of the heaviest micro-batch, over the mean.
        """
        tokens, cells = int(self._lengths.sum()), int(self._assignment.cells.sum())
        costs = self._assignment.costs
        return {
            "rows": len(self._lengths),
            "copies": len(self.order) - len(self._lengths),
            "tokens": tokens,
            "ranks": len(self),
            "micro_batches": len(costs),
            "micro_batches_per_rank": self._count,
            "cells": cells,
            "fill": tokens / cells if cells else 1.0,
            "heaviest_rank": _over_mean([*map(fsum, costs.reshape(len(self), -1).tolist())]),
            "heaviest_micro_batch": _over_mean(costs.tolist()),
        }

    def _slices_in_order(self, first: int, last: int) -> list[slice]:
        """Where the micro-batches of these ranks are in `order`."""
        bounds = self._assignment.bounds[first * self._count : last * self._count + 1]
        return [slice(start, end) for start, end in pairwise(bounds.tolist())]

    def _places_by_row(self, first: int, last: int) -> IntArray:
        """The places of rows, in rising order of rows, within these ranks; without copies."""
        bounds = self._assignment.bounds
        places = slice(bounds[first * self._count], bounds[last * self._count])
        rows = np.flatnonzero(~self._assignment.is_copy[places])
        return rows[np.argsort(self._assignment.order[places][rows], kind="stable")]

    def _checked_rank(self, rank: Any, where: str) -> int:
        known = integer_of(rank)
        if known is None or not 0 <= known < len(self):
            raise _outside(where, "rank", rank, len(self))
        return known


def _put_back(results: list[Any], sizes: list[int], index: IntArray, where: str) -> Any:
    """Join batches or columns of these numbers of rows, and choose the rows of `index`."""
    check_torch(where)
    from jagcodec.columns.column import row_count
    from jagcodec.columns.join import join_leaves
    from jagcodec.columns.offsets import read_offsets
    from jagcodec.rows.row_splits import RowSplitsPool
    from jagcodec.wire.compare import same_values
    from jagcodec.wire.many import join_rows
    from jagcodec.wire.opened import concat_in_memory, is_batch, is_encoded, opened, row_count_of
    from jagcodec.wire.wire_batch import rows_at

    are_batches, pool = is_batch(results[0]), RowSplitsPool()
    parts = []
    for i, (result, size) in enumerate(zip(results, sizes, strict=True)):
        path = f"{where}(results[{i}])"
        parts.append(opened(result, path) if are_batches else result)
        found = row_count_of(parts[i], path) if are_batches else row_count(result, path) or 0
        if found != size:
            detail = f"expected {size} rows, like its micro-batch, found {found}"
            raise ArgumentError("row_mismatch", path, detail)
    if not are_batches:
        read_offsets(parts, pool)
        return join_leaves(parts, index, pool, f"{where}(results)", same_values)
    if all(map(is_encoded, parts)):
        return rows_at(join_rows(parts, where), index)
    return concat_in_memory(parts, where, index)


def _outside(where: str, what: str, found: Any, count: int) -> ArgumentIndexError:
    detail = f"expected a {what} of 0 to {count - 1}, found {brief(found)}"
    return ArgumentIndexError("bad_option", f"{where}({what})", detail)


def _over_mean(costs: Sequence[float]) -> float:
    total = fsum(costs)
    return max(costs) * len(costs) / total if total else 1.0
