"""`plan_packing`, `PackPlan`: rows in one buffer for a forward pass, and results back to rows.

Torch is imported when a tensor is asked for, so a controller without it can plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import check_option
from jagcodec._compiling import untraced
from jagcodec._dependencies import check_torch
from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.forward.layout import CpLayout, PackLayout, Tail
from jagcodec.forward.layout_arguments import PackOptions, plan_layout
from jagcodec.memory.arrays import IntArray
from jagcodec.rows.lengths import length_array

if TYPE_CHECKING:
    import torch

    from jagcodec.forward.packer import Packer
    from jagcodec.rows.lengths import Lengths
    from jagcodec.rows.varlen import PackedColumn
    from jagcodec.wire.read.any_batch import AnyBatch


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
            least common multiple of that and 16. A row of length 0 gets no pads by this:
            `cu_seqlens_padded` repeats a number for it, as `cu_seqlens` does.
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
    numbers, packer = lengths_and_packer(lengths, f"{where}(lengths)")
    options = PackOptions(row_multiple, total_multiple, total, min_total, tail, cp_size, cp_layout)
    return PackPlan(plan_layout(numbers, options, where), packer)


def lengths_and_packer(lengths: Any, path: str) -> tuple[IntArray, Packer | None]:
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
        cu_seqlens: (N + 1,) int32 tensor: where each row begins without pads, and the end;
            (N + 2,) with a separate tail, which is one more row.
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
            numbers = np.concatenate([real] if padded is real else [real, padded])
            both = self._as_tensor(numbers, "PackPlan.cu_seqlens")
            self._cu_seqlens = both[: len(real)], both[len(real) :]
            if padded is real:
                self._cu_seqlens = both, both
        return self._cu_seqlens

    def _as_tensor(self, numbers: npt.NDArray[Any], where: str) -> torch.Tensor:
        """Numbers as a tensor, on the device of the plan. The call at `where` needs it."""
        check_torch(where)
        from jagcodec.forward.packer import tensor_on

        return tensor_on(numbers, self._device)

    def to(self, device: torch.device | str) -> PackPlan:
        """The plan with `cu_seqlens` and its other tensors on a device, in one copy without a wait.

        Columns are packed where they are, whatever the device of the plan.

        Raises:
            ArgumentError: There is no such device.
        """
        check_torch("PackPlan.to")
        from jagcodec.memory.plain_types import usable_device

        target = usable_device(device, "PackPlan.to(device)")
        return PackPlan(self.layout, self._tensor_packer(), target)

    def _tensor_packer(self) -> Packer:
        """The packer, made when the first tensor comes. Callers check that torch is there."""
        if self._packer is None:
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
        from jagcodec.forward.column_buffers import ColumnBuffers
        from jagcodec.forward.packer import is_column

        rank = self.layout.read_rank(cp_rank, f"{_PACK}(cp_rank)")
        if isinstance(source, np.ndarray) and source.dtype != np.uint8:  # bytes may be a blob
            detail = f"expected a tensor or a batch, found an array of {source.dtype}; "
            detail += "torch.from_numpy makes a tensor of it"
            raise ArgumentTypeError("bad_type", f"{_PACK}(source)", detail)
        if is_column(source):
            options = {
                "pad_value_dict": pad_value_dict is not None,
                "labels_of": labels_of is not None,
                "token_aligned_fields": not _names_nothing(token_aligned_fields),
                "align_end": not _names_nothing(align_end),
                "keep_jagged": not _names_nothing(keep_jagged),
            }
            _refuse_options_of_other_form("batch", source, options)
            return self._pack_column(source, rank, pad, shift, out)
        options = {"pad": pad is not ..., "shift": type(shift) is not int or shift != 0}
        _refuse_options_of_other_form("column", source, options)
        buffers = ColumnBuffers(
            _PACK,
            self._tensor_packer(),
            partial(self.layout.pieces, rank),
            pads=pad_value_dict,
            token_aligned=token_aligned_fields,
            align_end=align_end,
            keep_jagged=keep_jagged,
            out=out,
        )
        return buffers.fill_columns(buffers.plan_columns(source, labels_of))

    def _pack_column(
        self, column: Any, rank: int | None, pad: Any, shift: Any, out: Any
    ) -> torch.Tensor:
        """What `pack` returns for a column."""
        packer = self._tensor_packer()
        view = packer.rows_of(column, f"{_PACK}(column)")
        shift = self.layout.read_shift(shift, f"{_PACK}(shift)")
        pieces = self.layout.pieces(rank, shift)
        task = packer.buffer_task(view, pieces, _PACK, pad=pad, out=out)
        return packer.fill([task])[0]

    def position_ids(
        self, cp_rank: int | None = None, *, pads: Literal["zero", "continue"] = "zero"
    ) -> torch.Tensor:
        """0, 1, ... in each row: (T / cp_size,) int64, or (T,) for ``cp_rank=None``; a new tensor.

        Pads have 0. With ``pads="continue"`` they count on from their row, and a separate tail
        counts from 0.
        """
        where = "PackPlan.position_ids"
        check_option(pads, ("zero", "continue"), f"{where}(pads)")
        rank = self.layout.read_rank(cp_rank, f"{where}(cp_rank)")
        positions = self.layout.position_ids(rank, through_pads=pads == "continue")
        return self._as_tensor(positions, where)

    def mask(self, cp_rank: int | None = None) -> torch.Tensor:
        """A bool tensor of the shape of `position_ids`: True for a token, False for a pad."""
        where = "PackPlan.mask"
        rank = self.layout.read_rank(cp_rank, f"{where}(cp_rank)")
        return self._as_tensor(self.layout.pieces(rank).mask(), where)

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
        shift = self.layout.read_shift(shift, f"{where}(shift)")
        check_torch(where)
        return self._tensor_packer().unpack(
            self.layout, values, shift, pad, last, f"{where}(values)"
        )


_PACK = "PackPlan.pack"


def _names_nothing(value: Any) -> bool:
    """Whether an option that lists names of columns is left out, or is an empty collection."""
    return value is None or (isinstance(value, (list, tuple, Set)) and not value)


def _refuse_options_of_other_form(form: str, source: Any, options: dict[str, bool]) -> None:
    """Refuse options that need a "column" or a "batch", as `form` says.

    `options` has whether the caller gave each.
    """
    for name in (name for name, is_given in options.items() if is_given):
        detail = f"expected a {form} with {name}, found {describe(source)}"
        raise ArgumentError("bad_option", f"{_PACK}({name})", detail)
