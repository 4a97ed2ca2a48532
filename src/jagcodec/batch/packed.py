"""`plan_packing`, `PackPlan`: rows for a forward pass, and what it computed back to rows.

Torch is imported when a tensor is asked for, so a controller without it can plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import check_names, check_option, mapping_of, name_set
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    brief,
    column_name,
    describe,
)
from jagcodec.packing.layout import CpLayout, PackLayout, Tail, plan_layout
from jagcodec.packing.lengths import IntArray, length_array

if TYPE_CHECKING:
    import torch

    from jagcodec.batch.columns import AnyBatch
    from jagcodec.ragged.copy_pieces import Buffer
    from jagcodec.ragged.lengths import Lengths
    from jagcodec.ragged.packer import Packer
    from jagcodec.ragged.varlen import PackedColumn
    from jagcodec.ragged.views import RaggedView
    from jagcodec.wire.lowered import Key


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
    """Where every token of a forward pass comes from, computed once for all columns of a batch.

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
            lengths count. Only a tensor imports torch, and only one on a device is waited for.
        row_multiple: Rows are padded to a multiple of this, such as 2 * cp * tp, or for fp8 the
            least common multiple of that and 16. A row of 0 tokens stays one.
        total_multiple: The total T of cells is a multiple of this.
        total: T is exactly this, and the two arguments next to it are left out.
        min_total: T is at least this, before `total_multiple`.
        tail: Where the cells go that T needs beyond the padded rows: ``"last_row"`` lengthens
            the last row, ``"own_row"`` adds a row without tokens after it. Required with `total`,
            `total_multiple` or `min_total`.
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
    row_splits = pool = None
    if hasattr(lengths, "is_nested") or hasattr(lengths, "cu_seqlens"):  # a tensor, or of tensors
        from jagcodec.ragged.packer import read_plan_lengths
        from jagcodec.ragged.row_splits import RowSplitsPool

        pool = RowSplitsPool()
        row_splits = read_plan_lengths(lengths, f"{where}(lengths)", pool)
        numbers = row_splits.lengths
    else:
        numbers = length_array(lengths, f"{where}(lengths)")
    layout = plan_layout(
        numbers,
        where,
        row_multiple=row_multiple,
        total_multiple=total_multiple,
        total=total,
        min_total=min_total,
        tail=tail,
        cp_size=cp_size,
        cp_layout=cp_layout,
    )
    packer = None
    if row_splits is not None:
        from jagcodec.ragged.packer import Packer

        packer = Packer(layout, row_splits, pool)
    return PackPlan(layout, packer)


class PackPlan:
    """Where every cell of a forward pass comes from; made by `plan_packing`.

    A column is a jagged tensor with the plan's row lengths; a rectangle (N, S, ...) whose S is not
    below the longest row; or values (sum of lengths, ...) end to end. A jagged tensor of ragged dim
    2, such as MRoPE's (3, n) per row, becomes (3, T).

    On the CPU all columns of a batch are copied by one call of the row kernel. On a device, and
    where gradients flow, an index is made once for a rank and a shift. Nothing waits for a device
    but the first column of each offsets tensor that the plan has not met, whose lengths are read.

    Attributes:
        rows: N.
        total: T, the cells of the whole buffer.
        local_total: T / cp_size, the cells of a rank.
        lengths: (N,) int64 array of tokens per row.
        padded_lengths: (N,) int64 array, with pads; with the tail, if it is the last row's.
        max_seqlen: The longest row.
        max_seqlen_padded: The longest padded row; or the tail, if it is its own row and longer.
        cu_seqlens: (N + 1,) int32 tensor: where each row begins without pads, and the end. A tail
            of its own is one row more.
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
        return PackPlan, (self.layout, None, self._device)  # what is made of it is made again

    def __repr__(self) -> str:
        return f"PackPlan(rows={self.rows}, total={self.total}, cp_size={self.layout.cp_size})"

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self._offsets()[0]

    @property
    def cu_seqlens_padded(self) -> torch.Tensor:
        return self._offsets()[1]

    def _offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cu_seqlens is None:
            real, padded = self.layout.cu_seqlens, self.layout.cu_seqlens_padded
            both = self._sent(np.concatenate([real] if padded is real else [real, padded]))
            self._cu_seqlens = both[: len(real)], both[len(real) :]
            if padded is real:
                self._cu_seqlens = both, both
        return self._cu_seqlens

    def _sent(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """Numbers as a tensor, on the device of the plan."""
        from jagcodec.ragged.packer import sent

        return sent(numbers, self._device)

    def to(self, device: torch.device | str) -> PackPlan:
        """The plan with `cu_seqlens` and its other tensors on a device, in one copy without a wait.

        Columns are packed where they are, whatever the device of the plan.

        Raises:
            ArgumentError: There is no such device.
        """
        from jagcodec.memory.plain_types import usable_device

        found = usable_device(device, "PackPlan.to(device)")
        return PackPlan(self.layout, self._tensors(), found)

    def _tensors(self) -> Packer:
        """What packs tensors, made when the first one comes."""
        if self._packer is None:
            from jagcodec.ragged.packer import Packer

            self._packer = Packer(self.layout)
        return self._packer

    # Into the buffer

    @overload
    def pack(  # type: ignore[overload-overlap]  # a blob in a tensor is a column
        self,
        source: torch.Tensor | PackedColumn,
        *,
        pad: Any = 0,
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
        keep_jagged: Iterable[str] = (),
        cp_rank: int | None = None,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]: ...

    def pack(
        self,
        source: Any,
        *,
        pad: Any = 0,
        shift: int = 0,
        pad_value_dict: Mapping[Any, Any] | None = None,
        labels_of: str | Mapping[str, Any] | None = None,
        token_aligned_fields: Iterable[str] = (),
        keep_jagged: Iterable[str] = (),
        cp_rank: int | None = None,
        out: Any = None,
    ) -> Any:
        """A column, or all columns of a batch, laid out for the forward pass.

        Example:
            >>> import torch
            >>> from jagcodec import pack_rows, plan_packing
            >>> batch = pack_rows({"ids": [[5, 6, 7], [8]], "reward": [0.5, 1.0]})
            >>> plan = plan_packing(batch["ids"], row_multiple=4, cp_size=2)
            >>> packed = plan.pack(batch, labels_of="ids", cp_rank=0)
            >>> packed["ids"].tolist(), packed["labels"].tolist(), packed["reward"].tolist()
            ([5, 0, 8, 0], [6, -100, -100, -100], [0.5, 1.0])

        Args:
            source: A column, as the class describes it. Or a batch in any form, in which ragged
                columns of the plan's row lengths are packed. Of a message only the cells of this
                rank are read, and each is copied once.
            pad: What pads of a column hold: a number, or one value of its trailing shape, such as
                ``torch.arange(k)`` for the experts of a router. It must fit the dtype.
            shift: Cell j of a row has its token j - shift, or a pad if the row lacks it: -1 makes
                labels. Pads stay pads.
            pad_value_dict: Of a batch: column name to `pad`, 0 for the others. Names that are
                not those of columns are ignored, here and in the two arguments below.
            labels_of: Of a batch: the packed column whose next tokens become a column "labels", or
                a dict of names of labels to columns. Where there is no next token, -100 is, unless
                `pad_value_dict` has another pad for the labels.
            token_aligned_fields: Of a batch: rectangles (N, S, ...) that are packed, too.
            keep_jagged: Of a batch: ragged columns that stay jagged, of any row lengths.
            cp_rank: A rank of context parallelism, or None for the whole buffer, whatever cp_size.
            out: Memory of the right shape, dtype and device, overwritten; of a batch a dict of
                those, and columns that it lacks are allocated.

        Returns:
            A tensor (T / cp_size, ...), or (T, ...) for ``cp_rank=None``; of a batch a dict of
            them. Packed columns are new; gradients flow through them. Columns that are not packed
            are as `materialize` returns them.

        Raises:
            ArgumentError: Row lengths are not those of the plan (the row is named), a strided
                tensor may be both a rectangle and values end to end, there is no such rank, a pad
                does not fit, or `out` does not fit, overlaps the input, or is given for what needs
                a gradient.
            ArgumentKeyError: `labels_of` does not name a packed column.
            ArgumentTypeError: `source` is neither a column nor a batch.
            WireFormatError: A message is malformed.
        """
        from jagcodec.ragged.packer import is_column

        rank = self.layout.rank(cp_rank, f"{_PACK}(cp_rank)")
        if isinstance(source, np.ndarray) and source.dtype != np.uint8:  # which a blob may be
            detail = f"expected a tensor or a batch, found an array of {source.dtype}; "
            detail += "torch.from_numpy makes a tensor of it"
            raise ArgumentTypeError("bad_type", f"{_PACK}(source)", detail)
        if not is_column(source):
            _check_defaults("column", source, pad=pad, shift=shift)
            packing = _Packing(
                self._tensors(),
                rank,
                _by_name(pad_value_dict, "pad_value_dict", "pads"),
                name_set(token_aligned_fields, f"{_PACK}(token_aligned_fields)"),
                name_set(keep_jagged, f"{_PACK}(keep_jagged)"),
                _by_name(out, "out", "tensors"),
            )
            return packing.batch(source, labels_of)
        _check_defaults(
            "batch",
            source,
            pad_value_dict=pad_value_dict,
            labels_of=labels_of,
            token_aligned_fields=token_aligned_fields,
            keep_jagged=keep_jagged,
        )
        packer = self._tensors()
        view = packer.rows_of(source, f"{_PACK}(column)")
        shift = self.layout.shift(shift, f"{_PACK}(shift)")
        buffer = packer.buffer(view, _PACK, rank=rank, shift=shift, pad=pad, out=out)
        return packer.fill([buffer])[0]

    def position_ids(
        self, cp_rank: int | None = None, *, pads: Literal["zero", "continue"] = "zero"
    ) -> torch.Tensor:
        """0, 1, ... in each row: (T / cp_size,) int64, or (T,) for ``cp_rank=None``; a new tensor.

        Pads have 0, or with ``pads="continue"`` they go on. Those of a tail of its own start at 0.
        """
        where = "PackPlan.position_ids"
        check_option(pads, ("zero", "continue"), f"{where}(pads)")
        rank = self.layout.rank(cp_rank, f"{where}(cp_rank)")
        return self._sent(self.layout.position_ids(rank, through_pads=pads == "continue"))

    def mask(self, cp_rank: int | None = None) -> torch.Tensor:
        """True where a token is, False where a pad is: bool, of the shape of `position_ids`."""
        rank = self.layout.rank(cp_rank, "PackPlan.mask(cp_rank)")
        return self._sent(self.layout.pieces(rank).mask())

    # Out of it

    def unpack(
        self, values: torch.Tensor | Sequence[torch.Tensor], *, shift: int = 0, pad: Any = 0
    ) -> torch.Tensor:
        """What was computed for each cell, as rows: the inverse of `pack`.

        Example:
            >>> import torch
            >>> from jagcodec import plan_packing
            >>> plan = plan_packing([3, 1], row_multiple=4, cp_size=2)
            >>> whole = torch.arange(8.0)
            >>> parts = [plan.pack(torch.arange(4.0), cp_rank=rank) for rank in range(2)]
            >>> [row.tolist() for row in plan.unpack(parts).unbind()]
            [[0.0, 1.0, 2.0], [3.0]]

        Args:
            values: (T, ...), or a list of (T / cp_size, ...), one per rank in their order. A
                leading dim of 1 is dropped.
            shift: Token j of a row gets the value of cell j - shift: 1 puts what a model says at
                j about token j + 1 to j + 1.
            pad: For tokens that get none, as for `pack`.

        Returns:
            A jagged tensor (N, j, ...) of the plan's rows, with the offsets of the tensor that the
            plan was made of. Its gradient is that of `values`.

        Raises:
            ArgumentError: Values have another number of cells, or parts differ in shape, dtype or
                device, or are not as many as ranks.
            ArgumentTypeError: Values are not strided tensors.
        """
        where = "PackPlan.unpack"
        shift = self.layout.shift(shift, f"{where}(shift)")
        return self._tensors().unpacked(values, shift, pad, f"{where}(values)")


_PACK = "PackPlan.pack"


def _check_defaults(needed: str, source: Any, **options: Any) -> None:
    """Refuse options of columns for a batch, and those of batches for a column."""
    for name, value in options.items():
        if value is not None and not (type(value) in (int, tuple) and not value):
            detail = f"expected a {needed} with {name}, found {describe(source)}"
            raise ArgumentError("bad_option", f"{_PACK}({name})", detail)


def _by_name(value: Any, name: str, what: str) -> dict[Any, Any]:
    """An argument for a batch that has something for each column."""
    expected = f"a dict of column names to {what}"
    return {} if value is None else mapping_of(value, f"{_PACK}({name})", expected)


class _Packing:
    """One call of `pack` for a batch."""

    def __init__(
        self,
        packer: Packer,
        rank: int | None,
        pads: Mapping[Any, Any],
        aligned: frozenset[Any],
        kept: frozenset[Any],
        out: Mapping[Any, Any],
    ) -> None:
        self.packer, self.rank, self.pads = packer, rank, pads
        self.aligned, self.kept, self.out = aligned, kept, out
        self.buffers: dict[Key, Buffer] = {}

    def batch(self, source: Any, labels_of: Any) -> dict[str, Any]:
        """The columns of a batch."""
        from jagcodec.batch.columns import (
            are_several,
            each_column,
            opened,
            row_count_of,
            with_offsets,
        )

        where = f"{_PACK}(batch)"
        if are_several(source):
            detail = "expected one batch, found a list of them; concat_rows makes one"
            raise ArgumentTypeError("bad_type", where, detail)
        batch, rows = opened(source, where), self.packer.layout.rows
        found = row_count_of(batch, where)
        if found != rows and [*batch.keys()]:
            detail = f"expected the {rows} rows of the plan, found {found}"
            raise ArgumentError("row_mismatch", where, detail)
        known = with_offsets(batch, where, self.packer.pool)
        columns = each_column(known, self.column, _PACK)
        for name in self.aligned & columns.keys() - self.buffers.keys() - self.kept:
            # An array or a list, which is not packed without a word.
            self.packer.rows_of_rectangle(columns[name], f"{_PACK}({column_name(name)})")
        self.add_labels(columns, labels_of)
        buffers = [*self.buffers.values()]
        filled = zip(map(id, buffers), self.packer.fill(buffers), strict=True)
        return _filled(columns, dict(filled))

    def column(self, leaf: torch.Tensor | RaggedView, key: Key) -> Any:
        """The buffer of a column that is packed, or else the column."""
        packer, path = self.packer, f"{_PACK}({column_name(key)})"
        if key in self.kept:
            return packer.kept(leaf)
        if packer.is_ragged(leaf):
            view = packer.rows_of(leaf, path, "; or name it in keep_jagged")
        elif key in self.aligned:
            view = packer.rows_of_rectangle(leaf, path)
        else:
            return leaf
        return self.buffer(view, key, self.pads.get(key, 0))

    def buffer(self, view: RaggedView, key: Key, pad: Any, shift: int = 0) -> Buffer:
        path, out = f"{_PACK}({column_name(key)})", cast(Any, self.out)
        for name in (key,) if isinstance(key, str) else key:
            out = out.get(name) if isinstance(out, Mapping) else None
        made = self.packer.buffer(view, path, rank=self.rank, shift=shift, pad=pad, out=out)
        self.buffers[key] = made
        return made

    def add_labels(self, columns: dict[str, Any], labels_of: Any) -> None:
        """The next tokens of columns, under names of their own."""
        where = f"{_PACK}(labels_of)"
        wanted = {} if labels_of is None else labels_of
        if isinstance(labels_of, (str, tuple)):
            wanted = {"labels": labels_of}
        wanted = mapping_of(wanted, where, "the name of a column, or a dict of names to names")
        check_names([*wanted, *wanted.values()], where)
        packed = dict(self.buffers)
        for name, key in wanted.items():
            if key not in packed:
                detail = f"expected a column that is packed, one of {[*packed]!r:.200}, "
                raise ArgumentKeyError("no_such_field", where, f"{detail}found {brief(key)}")
            if name in columns:
                detail = f"expected no column {name!r}, found one; pass labels_of="
                detail += f"{{'another name': {key!r}}}"
                raise ArgumentError("conflict", where, detail)
            pad = self.pads.get(name, _NO_LABEL)
            columns[name] = self.buffer(packed[key].view, name, pad, shift=-1)


_NO_LABEL = -100
"""What PyTorch's `cross_entropy` ignores."""


def _filled(columns: dict[str, Any], filled: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """Columns with tensors in the place of buffers, by id; of batches in the batch, too."""
    for name, column in columns.items():
        inner = _filled(column, filled) if type(column) is dict else column
        columns[name] = filled.get(id(column), inner)
    return columns
