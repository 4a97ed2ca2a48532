"""`materialize`: a batch to padded, jagged or varlen columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from jagcodec._arguments import (
    check_function,
    check_known,
    check_names,
    check_option,
    flag_of,
    mapping_of,
    name_set,
    result_of,
    whole_number,
)
from jagcodec.batch.batched_data_dict import BatchedDataDict
from jagcodec.batch.columns import (
    AnyBatch,
    are_several,
    columns_of,
    concat_in_memory,
    each_column,
    is_encoded,
    meta_of,
    opened,
    row_count_of,
    row_lengths_of,
    with_offsets,
)
from jagcodec.batch.devices import moved
from jagcodec.batch.join import join_rows
from jagcodec.batch.rectangles import (
    Layout,
    PaddingSide,
    Placement,
    Rectangle,
    allocate_rectangles,
    check_width,
    fill_rectangles,
    no_memory,
    padded_columns,
    path_of,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, brief, describe
from jagcodec.memory.buffers import WritableBuffer
from jagcodec.memory.extents import check_extent
from jagcodec.memory.plain_types import usable_device
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.pack.tensors import warn_of_swapped_dims
from jagcodec.ragged.copy_rows import owned_values
from jagcodec.ragged.lengths import Lengths, read_lengths
from jagcodec.ragged.nested import (
    check_memory,
    is_jagged,
    nested_tensor,
    readable_view,
    view_of,
    view_of_strided,
)
from jagcodec.ragged.pad_values import pad_bits
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.varlen import varlen_column
from jagcodec.ragged.views import RaggedView, end_to_end, full_rows
from jagcodec.wire.lowered import Columns, Key
from jagcodec.wire.wire_batch import WireBatch

_LAYOUTS, _SIDES = get_args(Layout), get_args(PaddingSide)

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=BatchedDataDict)


def materialize(
    td: AnyBatch | Sequence[AnyBatch],
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    *,
    pad_to_multiple: int = 1,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = "right",
    prompt_lengths: Lengths | str | None = None,
    prompt_width: int = 0,
    token_aligned_fields: Iterable[str] | None = None,
    keep_jagged: Iterable[str] = (),
    attention_mask_of: str | Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
    out: Mapping[str, Any] | WritableBuffer | None = None,
    strict: bool = False,
    container: Callable[[dict[str, Any]], T] = BatchedDataDict,  # type: ignore[assignment]
) -> T:
    """A wire batch to columns for a trainer: the fetch site.

    Example:
        >>> import torch
        >>> from jagcodec import materialize, pack_jagged_fields
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=torch.tensor([2, 3])
        ... )
        >>> materialize(td, pad_value_dict={"ids": -1}, pad_to_seqlen=4)["ids"].tolist()
        [[5, 6, -1, -1], [7, 8, 9, -1]]
        >>> materialize(td, padding_side="left", attention_mask_of="ids")["attention_mask"].tolist()
        [[False, True, True], [True, True, True]]
        >>> materialize(td, layout="packed")["ids"].cu_seqlens.tolist()
        [0, 2, 5]

    Args:
        td: A batch: a TensorDict of batch size (N, ...), a dict of columns, a `BatchedDataDict`, or
            a message (frames, a blob, a `WireBatch`), whose cells are copied once. Or a list of
            batches, whose rows are joined as by `concat_rows`.
        layout: ``"padded"`` pads each jagged column (N, j, ...) to its longest row;
            ``"jagged"`` passes it through; ``"packed"`` makes a `PackedColumn` of it. Rows of a
            strided nested tensor have their tokens in the first dim in which they differ; other
            dims in which they differ are padded at the end, to the longest.
        pad_value_dict: Column name to pad value; other columns are padded with bits 0, which is 0
            (in ``float8_e8m0fnu``, which has no zero, 2**-127). Integers are exact; fractions are
            rounded as torch does, but never to infinity or zero. Here and in other arguments, names
            that are not columns are ignored, so that one dict serves every batch; a column inside
            a nested TensorDict is a tuple of names.
        pad_to_seqlen: The most tokens of a row, in every layout. If padded, also the width of every
            jagged column, and of narrower rectangles in `token_aligned_fields`. 0: the longest row.
        pad_to_multiple: Padded widths are rounded up to a multiple of this, as sequence parallelism
            and fp8 kernels want.
        padding_side: Where pad cells go, for all columns or by name ("right" for the rest).
            ``"left_right"`` is verl's rectangle of prompt and response: prompts end, and
            responses begin, at one column of cells (`prompt_width`).
        prompt_lengths: For ``"left_right"``: (N,) tokens of each row that are prompt, or the name
            of the rectangular column of them.
        prompt_width: For ``"left_right"``: cells for prompts, and the most tokens of a prompt; 0
            means the longest prompt.
        token_aligned_fields: Which *rectangles* (N, S, ...) are padded like a jagged column of N
            rows of S cells. (NeMo-RL stacks rows that happen to be equally long, and all ranks need
            one width.) None means all of two dims or more that are not wider than `pad_to_seqlen`;
            names mean these alone, none of which may be wider; ``()`` is for image grids.
        keep_jagged: Names of columns that stay as they are in any layout, and of any length:
            rows whose length is not counted in tokens, such as image patches.
        attention_mask_of: Name of a column that is padded; the result then has
            ``"attention_mask"``, bool (N, width): True where its rectangle holds a token. Or names
            of several, each with the name of its mask.
        device: Where tensors go; None leaves them. Only the valid cells cross. What goes to the
            host has arrived when this returns, after one wait for its device.
        pin_memory: Make the rectangles in page-locked memory, from which copies to an
            accelerator can be `non_blocking`.
        out: Memory for the rectangles, overwritten from step to step: what an earlier call returned
            (names to tensors of the right shape, dtype and device; columns that it lacks are
            allocated), or one writable CPU buffer that is large enough for all.
        strict: Refuse names that are not those of columns in `pad_value_dict`, a `padding_side` by
            name, `token_aligned_fields` and `keep_jagged`.
        container: Called with the dict of columns, and of those of each nested TensorDict; what it
            returns is returned.

    Returns:
        The columns in their order. Padded columns are new (or in `out`), in one allocation
        that is freed with the last of them; everything else aliases `td`. Gradients pass through
        them. Non-tensor columns become object arrays (N,), items unwrapped by
        `unwrap_wire_stripped_payload`; a payload of the whole batch fills N rows. Warns
        (`JagcodecWarning`) where it pads the first dim of rows (k, n) beside rows of n tokens.

    Raises:
        ArgumentError: An option is not one of these, a row is longer than `pad_to_seqlen` (ranks
            with other widths would hang a collective) or a prompt than its row, a pad does not fit
            its dtype, `out` does not fit, overlaps the batch or itself, or is given for what needs
            a gradient, there is no accelerator to pin memory for, rows of a strided nested tensor
            differ in several dims and are to be packed, or `td` has no batch dim.
        ArgumentKeyError: `attention_mask_of` or `prompt_lengths` does not name such a column, or
            `strict` rejects a name.
        ArgumentTypeError: `td` is not a batch, or it is or holds a lazy stack.

    The contract of the first four arguments is that of NeMo-RL's
    ``nemo_rl.data_plane.codec.materialize``.
    """
    check_option(layout, _LAYOUTS, "materialize(layout)")
    pads: dict[Any, Any] = {}
    if pad_value_dict is not None:
        pads = _by_name(pad_value_dict, "pad_value_dict", "a dict of column names to pads")
    by_name = type(padding_side) is not str and isinstance(padding_side, Mapping)
    sides: Any = _by_name(padding_side, "padding_side", "sides by name") if by_name else {}
    side: Any = "right" if by_name else padding_side
    for each in (side, *sides.values()):
        check_option(each, _SIDES, "materialize(padding_side)")
    if not (pin_memory is strict is False and container is BatchedDataDict):
        pin_memory = flag_of(pin_memory, "materialize(pin_memory)")
        strict = flag_of(strict, "materialize(strict)")
        check_function(container, "materialize(container)", "a function of a dict of columns")
    batch = td if type(td) is WireBatch else _opened(td, "materialize(td)")
    width = whole_number(pad_to_seqlen, 0, "materialize(pad_to_seqlen)")
    multiple = whole_number(pad_to_multiple, 1, "materialize(pad_to_multiple)")
    prompt_width = whole_number(prompt_width, 0, "materialize(prompt_width)")
    aligned: frozenset[Any] | None = None
    if token_aligned_fields is not None:
        aligned = name_set(token_aligned_fields, "materialize(token_aligned_fields)")
    kept = name_set(keep_jagged, "materialize(keep_jagged)")
    masks = _masks_of(attention_mask_of)
    device = usable_device(device, "materialize(device)")
    placed = width or multiple != 1 or sides or side != "right" or prompt_width
    usual = device is None and out is None and prompt_lengths is None and not strict
    columns: dict[str, Any] | None = None
    if layout != "padded":
        only_padded = {
            "pad_to_multiple": multiple != 1,
            "padding_side": sides or side != "right",
            "prompt_lengths": prompt_lengths is not None,
            "prompt_width": prompt_width,
            "token_aligned_fields": aligned,
            "attention_mask_of": masks,
            "pin_memory": pin_memory,
            "out": out is not None,
        }
        for name in (name for name, given in only_padded.items() if given):
            detail = f"requires layout='padded', found layout={layout!r}"
            raise ArgumentError("bad_option", f"materialize({name})", detail)
    elif pin_memory:
        _check_accelerator()
    elif usual and not (placed or aligned or kept or masks):
        columns = padded_columns(batch, pads)
    if columns is None:
        pool = RowSplitsPool()
        source = _on_device(batch, device, pool)
        placement = Placement(width, multiple, sides, side, prompt_width)
        placement.prompts = _read_prompts(source, prompt_lengths, placement)
        plan = _Plan(layout, pads, placement, aligned, kept, masks, pool, batch)
        columns = each_column(source, plan.column, "materialize")
        plan.add_masks(columns)
        plan.warn_of_swapped_dims()
        if strict:
            keys = [*_keys(columns, ())]
            check_known(pads, keys, "materialize(pad_value_dict)")
            check_known(sides, keys, "materialize(padding_side)")
            check_known(aligned or (), keys, "materialize(token_aligned_fields)")
            check_known(kept, keys, "materialize(keep_jagged)")
        allocate_rectangles(plan.rectangles, out, pin_memory)
        fill_rectangles(plan.rectangles, reused=out is not None)
        columns = _filled(columns, container)
    result: Any = _contained(columns, container)
    if type(result) is BatchedDataDict:
        result.meta_info = dict(meta_of(batch))
    return result  # type: ignore[no-any-return]


def _opened(source: Any, where: str) -> Any:
    """An open batch: of a list of batches, the rows of all of them."""
    if not are_several(source):
        return opened(source, where)
    encoded = all(map(is_encoded, source))
    return join_rows(source, where) if encoded else concat_in_memory(source, where)


def _on_device(batch: Any, device: torch.device | None, pool: RowSplitsPool) -> Any:
    """An open batch whose tensors are on a device; None leaves them. A dict becomes `Columns`."""
    where = "materialize(td)"
    if isinstance(batch, WireBatch):
        if device is None:
            return batch
        opened_columns = columns_of(batch, where)
        return opened_columns._replace(columns=moved(opened_columns.columns, device, pool, path_of))
    if device is not None:
        row_count_of(batch, where)  # which refuses a dict that does not hold columns
    columns = batch if device is None else moved(batch, device, pool, path_of)
    if isinstance(batch, dict) or device is None:
        return with_offsets(columns, where, pool)
    return Columns(batch.batch_size[0], columns)


def _filled(columns: dict[str, Any], container: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Columns whose rectangles are filled; batches in them in containers."""
    for name, column in columns.items():
        if type(column) is Rectangle:
            columns[name] = column.tensor
        elif type(column) is dict:
            columns[name] = _contained(_filled(column, container), container)
    return columns


def _contained(columns: dict[str, Any], container: Callable[[dict[str, Any]], Any]) -> Any:
    if container is BatchedDataDict:
        return BatchedDataDict.of_equal_rows(columns)
    return result_of(container, (columns,), "materialize(container)")


def _keys(columns: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Key]:
    for name, column in columns.items():
        if type(column) is dict:
            yield from _keys(column, (*above, name))
        else:
            yield (*above, name) if above else name


# --- options -----------------------------------------------------------------------------------


def _by_name(given: Any, option: str, expected: str) -> dict[Any, Any]:
    """An option that has a value for each of some columns."""
    found = mapping_of(given, f"materialize({option})", expected)
    check_names(found, f"materialize({option})")
    return found


def _masks_of(given: Any) -> Mapping[Any, str]:
    """Columns to the names of their masks, of `attention_mask_of`."""
    where = "materialize(attention_mask_of)"
    if given is None:
        return {}
    if isinstance(given, str):
        return {given: "attention_mask"}
    expected = "the name of a column, or a mapping of names of columns to names of masks"
    masks = _by_name(given, "attention_mask_of", expected)
    for name in masks.values():
        if not isinstance(name, str):
            detail = f"expected {expected}, found {brief(name)} for a mask"
            raise ArgumentTypeError("bad_type", where, detail)
    if len(set(masks.values())) < len(masks):
        found = f"expected a name for each mask, found {brief(list(masks.values()))}"
        raise ArgumentError("conflict", where, found)
    return masks


def _read_prompts(batch: Any, given: Any, placement: Placement) -> IntArray | None:
    """(N,) tokens of each row that are prompt; None if no column needs them."""
    if given is None and not placement.prompt_width:
        return None
    where = "materialize(prompt_lengths)"
    if "left_right" not in (placement.side, *placement.sides.values()) or given is None:
        detail = f"requires padding_side='left_right', found padding_side={placement.side!r}"
        raise ArgumentError("bad_option", where, detail)
    if isinstance(given, str):
        columns = batch.columns if isinstance(batch, Columns) else batch
        check_known([given], columns.keys(), where)
        given = columns[given]
    rows = batch.rows if isinstance(batch, Columns) else batch.batch_size[0]
    return read_lengths(given, where, rows=rows).lengths


def _check_accelerator() -> None:
    """Refuse to page-lock memory where there is nothing to copy it to."""
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        expected = "expected an accelerator to copy page-locked memory to, found none that torch"
        found = f"{expected} can use; leave pin_memory=False: {error!s:.200}"
        raise ArgumentError("bad_option", "materialize(pin_memory)", found) from error


# --- planning ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Plan:
    """The checked options of one call, and its columns; rectangles have no memory yet."""

    layout: Layout
    pads: Mapping[Any, Any]
    placement: Placement
    aligned: frozenset[Any] | None
    kept: frozenset[Any]
    masks: Mapping[Any, str]
    pool: RowSplitsPool
    batch: Any  # which is open
    rectangles: list[Rectangle] = field(default_factory=list)
    # What masks need of padded columns: their rows, where these go, the width and the device.
    _masked: dict[Key, tuple[RowSplits, IntArray | None, int, torch.device]] = field(
        default_factory=dict
    )
    # Columns of the same rows are placed once.
    _known: dict[tuple[RowSplits, str], tuple[IntArray | None, int]] = field(default_factory=dict)

    def column(self, leaf: torch.Tensor | RaggedView, key: Key) -> Any:
        """What becomes of a column of tensors."""
        if type(leaf) is RaggedView:
            return self._ragged(leaf, key)
        tensor: Any = leaf
        return (self._nested if tensor.is_nested else self._rectangular)(tensor, key)

    def _nested(self, leaf: torch.Tensor, key: Key) -> Any:
        """A nested tensor, which stays what it is where it is to stay jagged."""
        stays = self.layout == "jagged"
        if key in self.kept or (stays and not self.placement.width):
            return leaf
        path = path_of(key)
        if is_jagged(leaf):
            if self.layout == "padded":
                view = readable_view(leaf, path, self.pool)
            else:
                view = view_of(leaf, path, self.pool, detach=not torch.is_grad_enabled())
        elif leaf.dim() > 1:
            pad_bits = self._pad_bits(leaf.dtype, key) if self.layout == "padded" else None
            view = view_of_strided(leaf, path, pad_bits)
        else:  # of rows without dims, or of no rows: nothing is ragged
            none = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            parts = () if stays else leaf.unbind()
            return leaf if stays else torch.stack(parts) if parts else none
        if stays:
            check_width(view.row_splits, self.placement.width, key)
            return leaf
        return self._ragged(view, key)

    def _ragged(self, view: RaggedView, key: Key) -> Any:
        """The rows of a column in the layout that was asked for."""
        kept = key in self.kept
        if kept or self.layout != "padded":
            if not kept:
                check_width(view.row_splits, self.placement.width, key)
            row_splits = self.pool.unique(view.row_splits)
            values = owned_values(view)
            if kept or self.layout == "jagged":
                return nested_tensor(values, row_splits, view.ragged_dim)
            return varlen_column(end_to_end(values, row_splits, view.ragged_dim), path_of(key))
        rows = view.row_splits, self.placement.sides.get(key, self.placement.side)
        place = self._known.get(rows)
        if place is None:
            place = self._known[rows] = self._placed(rows[0], key, self.placement.width)
        return self._padded(view, *place, key)

    def _placed(self, row_splits: RowSplits, key: Key, width: int) -> tuple[IntArray | None, int]:
        """As `Placement.of_rows`; for a column without prompts, the error has the other sides."""
        try:
            return self.placement.of_rows(row_splits, key, width)
        except ArgumentError as error:
            if error.reason != "bad_length":
                raise
            remedy = self._other_side(key)
            raise ArgumentError("bad_length", error.path, f"{error.detail}; {remedy}") from None

    def _other_side(self, key: Key) -> str:
        if key in self.placement.sides:
            return f"leave {brief(key)} out of padding_side, or give it another padding_side there"
        prompts: Any = self.placement.prompts
        lengths = row_lengths_of(self.batch, "", self.pool)
        fit = [name for name, tokens in lengths.items() if (tokens >= prompts).all()]
        sides: dict[Key, str] = {**dict.fromkeys(fit[:8], "left_right")} or {key: "right"}
        return f"if it holds no prompts, give it another padding_side by name: padding_side={sides}"

    def _rectangular(self, leaf: torch.Tensor, key: Key) -> Any:
        """A rectangle; if asked for, padded further, as a jagged column of equal rows is."""
        most = self.placement.width
        named = self._pads_rectangles() if self.aligned is None else key in self.aligned
        if not named or leaf.dim() < 2 or key in self.kept:
            return leaf
        rows, held = leaf.shape[:2]
        if self.aligned is not None and 0 < most < held:
            detail = f"expected at most pad_to_seqlen={most} cells, found {held}; raise it"
            raise ArgumentError("row_too_long", path_of(key), detail)
        check_extent(leaf.shape, leaf.itemsize, path_of(key))
        lengths = np.full(rows, held, dtype=np.int64)
        row_splits = self.pool.unique(RowSplits.from_lengths(lengths))
        # One that is wider than `pad_to_seqlen` may be an image grid.
        left_pad, width = self._placed(row_splits, key, max(most, held))
        if width == held:
            self._masked[key] = row_splits, None, width, leaf.device
            return leaf
        if leaf.layout is not torch.strided or leaf.is_quantized:
            detail = f"expected a strided rectangle to make {width} cells wide, found "
            detail += f"{describe(leaf)}; leave it out of token_aligned_fields"
            raise ArgumentError("bad_shape", path_of(key), detail)
        check_memory(leaf, path_of(key))
        if leaf.requires_grad and not torch.is_grad_enabled():
            leaf = leaf.detach()
        return self._padded(full_rows(leaf, row_splits), left_pad, width, key)

    def _pads_rectangles(self) -> bool:
        """Whether rectangles are padded too, where no names are given."""
        where = self.placement
        placed = where.width or where.multiple != 1 or where.side != "right" or where.sides
        return self.layout == "padded" and bool(placed or self.masks)

    def _padded(
        self, view: RaggedView, left_pad: IntArray | None, width: int, key: Key
    ) -> Rectangle:
        dim, shape = view.ragged_dim, view.shape
        padded = (view.row_splits.rows, *shape[: dim - 1], width, *shape[dim:])
        bits, device = self._pad_bits(view.dtype, key), view.device
        self._masked[key] = view.row_splits, left_pad, width, device
        rectangle = Rectangle(padded, view.dtype, device, key, view, left_pad, width, bits)
        self.rectangles.append(rectangle)
        return rectangle

    def _pad_bits(self, dtype: torch.dtype, key: Key) -> bytes:
        if key not in self.pads:
            return bytes(dtype.itemsize)
        return pad_bits(self.pads[key], dtype, path_of(key))

    def warn_of_swapped_dims(self) -> None:
        """Warn of rows (k, n) that are made wider than k, where other rows have n tokens each.

        TransferQueue takes dim 1 for the ragged one where all rows have one shape.
        """
        splits = [masked[0] for masked in self._masked.values()]
        tokens = {rows.max for rows in splits if rows.min == rows.max}
        for rectangle in self.rectangles:
            view, rows = rectangle.view, rectangle.view.row_splits
            if len(view.shape) > 1 and view.ragged_dim == 1 and rows.min == rows.max:
                inner = view.shape[1]
                if rectangle.width > rows.max != inner and inner in tokens:
                    warn_of_swapped_dims(path_of(rectangle.key))

    def add_masks(self, columns: dict[str, Any]) -> None:
        for name, mask in self.masks.items():
            where = f"materialize(attention_mask_of={name!r})"
            if name not in self._masked:
                detail = f"expected a column that is padded, one of {list(self._masked)!r:.200}"
                raise ArgumentKeyError("no_such_field", where, detail)
            if mask in columns:
                detail = f"expected no column {mask!r}, found one; pass attention_mask_of="
                raise ArgumentError("conflict", where, f"{detail}{{{name!r}: 'another name'}}")
            row_splits, left_pad, width, device = self._masked[name]
            try:
                ones = torch.ones(row_splits.total, dtype=torch.bool, device=device)
            except RuntimeError as error:  # cells without bytes may be many
                raise no_memory((row_splits.rows, width), mask, error) from error
            columns[mask] = self._padded(end_to_end(ones, row_splits), left_pad, width, mask)
