"""`materialize`: a batch to padded, jagged or packed columns.

`materialize` checks its options and opens the batch. A `_LayoutPlan` then decides what each column
becomes; `rectangles.py` gives all rectangles memory, and fills them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np
import torch

from jagcodec._arguments import (
    check_function,
    check_known,
    check_laid_out,
    check_new_name,
    result_of,
)
from jagcodec._compiling import untraced
from jagcodec.columns.batch import Key
from jagcodec.columns.devices import moved
from jagcodec.errors import (
    ArgumentError,
    brief,
    column_name,
    describe,
)
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.buffers import WritableBuffer
from jagcodec.memory.extents import check_extent
from jagcodec.memory.plain_types import check_memory
from jagcodec.produce.warnings import warn_of_swapped_dims
from jagcodec.rows.copy_rows import owned_values
from jagcodec.rows.lengths import Lengths
from jagcodec.rows.nested import (
    is_jagged,
    nested_tensor,
    view_of,
    view_of_strided,
    view_over_array,
)
from jagcodec.rows.of_tensors import device_of, full_rows
from jagcodec.rows.pad_values import pad_bits
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.varlen import varlen_column
from jagcodec.rows.views import RaggedView, end_to_end
from jagcodec.train.batched_data_dict import BatchedDataDict
from jagcodec.train.layout_options import (
    LayoutOptions,
    read_options,
    read_prompts,
)
from jagcodec.train.rectangles import (
    Layout,
    PaddingSide,
    Rectangle,
    RowPlaces,
    allocate_rectangles,
    check_unbacked,
    check_width,
    fill_rectangles,
    no_memory,
    path_of,
    place_at_end,
)
from jagcodec.wire.many.joined import join_rows
from jagcodec.wire.read.any_batch import (
    AnyBatch,
    are_several,
    concat_in_memory,
    each_column,
    is_encoded,
    meta_of,
    opened,
    row_count_of,
    row_lengths_of,
)
from jagcodec.wire.read.wire_batch import WireBatch, open_whole

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=BatchedDataDict)


@untraced
def materialize(
    td: AnyBatch | Sequence[AnyBatch],
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    *,
    pad_to_multiple: int = 1,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = "right",
    align_end: Mapping[str, str] | None = None,
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
    """Make columns for a trainer of a batch or of messages.

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
        >>> td["logprobs"] = torch.nested.nested_tensor(
        ...     [torch.tensor([-0.5]), torch.tensor([-1.0, -2.0])], layout=torch.jagged
        ... )
        >>> materialize(td, align_end={"logprobs": "ids"})["logprobs"].tolist()
        [[0.0, -0.5, 0.0], [0.0, -1.0, -2.0]]

    Args:
        td: A batch: a TensorDict of batch size (N, ...), a dict of columns, a `BatchedDataDict`, or
            a message (frames, a blob, a `WireBatch`), whose cells are copied once. Or a list of
            batches, whose rows are joined as by `concat_rows`.
        layout: ``"padded"`` pads each jagged column (N, j, ...) to its longest row;
            ``"jagged"`` passes it through; ``"packed"`` makes a `PackedColumn` of it, without
            pads (`plan_packing` aligns rows for parallelism). A row of length 0 becomes a row of
            pads, or has no cells in a `PackedColumn`, where `cu_seqlens` repeats a number. Rows of
            a strided nested tensor have their tokens in the first dim in which they differ; other
            dims in which they differ are padded at the end, to the longest.
        pad_value_dict: Column name to pad value; other columns are padded with bits 0, which is 0
            (in ``float8_e8m0fnu``, which has no zero, 2**-127). Integers are exact; fractions are
            rounded as torch does, but never to infinity or zero. As in NeMo-RL, other layouts
            ignore it, because they have no pads. Here and in other arguments, names that are not
            columns are ignored, so one dict serves every batch; a tuple of names is the name of a
            column inside a nested TensorDict.
        pad_to_seqlen: The most tokens of a row, in every layout. If padded, also the width of every
            jagged column, and of narrower rectangles in `token_aligned_fields`. 0 means the longest
            row.
        pad_to_multiple: Padded widths are rounded up to a multiple of this, as sequence parallelism
            and fp8 kernels need.
        padding_side: Where pad cells go, for all columns or by name ("right" for the rest).
            ``"left_right"`` is verl's rectangle of prompt and response: prompts end, and
            responses begin, at one column of cells (`prompt_width`).
        align_end: A jagged column that has only the last tokens of each row, such as
            log-probabilities of the response, to the padded column that has all tokens. The rows of
            the first end where those of the second do, whatever the padding side, and their
            rectangles are equally wide.
        prompt_lengths: For ``"left_right"``: (N,) numbers of prompt tokens, one per row, or the
            name of the rectangular column that holds them.
        prompt_width: For ``"left_right"``: how many cells are for the prompt, which no prompt may
            exceed; 0 means the longest prompt.
        token_aligned_fields: Which *rectangles* (N, S, ...) are padded like a jagged column of N
            rows of S cells. (NeMo-RL stacks rows that happen to be equally long, and all ranks need
            one width.) None means every rectangle that is not wider than `pad_to_seqlen`. Names
            mean only these, and one that is wider is an error. ``()`` pads none, for image grids.
        keep_jagged: Names of columns that stay unchanged in every layout, whatever their lengths.
            Their lengths do not count tokens, as those of image patches do not.
        attention_mask_of: The name of a column that is padded. The result then has
            ``"attention_mask"``, bool (N, width): True where its rectangle holds a token, whatever
            `pad_value_dict` has for the name of the mask. Or a dict of several such names, each
            with the name of its mask.
        device: Where tensors go; None leaves them. Only the valid cells cross. Tensors that go to
            the host have arrived when this returns; it waits once for their device. Large ones go
            to a CUDA device through page-locked memory, which torch keeps for the next batch.
        pin_memory: Make the rectangles in page-locked memory of the host, from which copies to an
            accelerator can be `non_blocking`.
        out: Memory for the rectangles, overwritten from step to step: the result of an earlier call
            (names to tensors of the right shape, dtype and device; columns that it lacks are
            allocated), or one writable CPU buffer that is large enough for all. Wait until copies
            out of it, such as `non_blocking` ones, have finished. With `pin_memory`, it must be
            page-locked.
        strict: Raise an error for a name in `pad_value_dict`, a `padding_side` by name,
            `token_aligned_fields` or `keep_jagged` that is not the name of a column.
        container: A function that makes the result from the dict of columns. It also makes the
            batch of each nested TensorDict from the dict of its columns.

    Returns:
        The columns in their order. Padded columns are new (or in `out`), in one allocation
        that is freed with the last of them; everything else aliases `td`. Gradients flow through
        the columns: torch copies those that autograd follows, as `RaggedView.uses_row_kernel`
        decides. Non-tensor columns become object arrays (N,), items unwrapped by
        `unwrap_wire_stripped_payload`; a payload of the whole batch fills N rows. Warns
        (`JagcodecWarning`) if it pads the first dim of rows (k, n) while other rows have n tokens.

    Raises:
        ArgumentError: An option has a wrong value, or needs ``layout="padded"``; a row is longer
            than `pad_to_seqlen` (ranks with other widths would hang a collective), or a prompt is
            longer than its row; a row of a column in `align_end` is longer than that of the other,
            or has a padding side of its own; a pad does not fit its dtype; `out` does not fit,
            overlaps the batch or itself, is not page-locked with `pin_memory`, or is given for a
            column that needs a gradient; there is no accelerator to pin memory for; rows of a
            strided nested tensor must be packed, but differ in several dims; or `td` has no batch
            dim.
        ArgumentKeyError: `attention_mask_of`, `align_end` or `prompt_lengths` does not name such a
            column, `strict` rejects a name, or the batches of a list have different columns.
        ArgumentTypeError: `td` is not a batch, or it is or holds a lazy stack.

    The contract of the first four arguments is that of NeMo-RL's
    ``nemo_rl.data_plane.codec.materialize``.
    """
    if container is not BatchedDataDict:
        check_function(container, "materialize(container)", "a function of a dict of columns")
    options = read_options(
        layout=layout,
        pad_value_dict=pad_value_dict,
        pad_to_seqlen=pad_to_seqlen,
        pad_to_multiple=pad_to_multiple,
        padding_side=padding_side,
        align_end=align_end,
        prompt_lengths=prompt_lengths,
        prompt_width=prompt_width,
        token_aligned_fields=token_aligned_fields,
        keep_jagged=keep_jagged,
        attention_mask_of=attention_mask_of,
        device=device,
        pin_memory=pin_memory,
        out=out,
        strict=strict,
    )
    batch = td if type(td) is WireBatch else _open_source(td, "materialize(td)")
    columns = _LayoutPlan(options, batch).filled_columns(container)
    result: Any = _make_container(columns, container)
    if type(result) is BatchedDataDict:
        result.meta_info = dict(meta_of(batch))
    return result  # type: ignore[no-any-return]


def _open_source(source: Any, where: str) -> Any:
    """An open batch; a list of batches becomes one batch with the rows of all."""
    if not are_several(source):
        frames = isinstance(source, (list, tuple)) and source
        return open_whole(source, where) if frames else opened(source, where)
    encoded = all(map(is_encoded, source))
    return join_rows(source, where) if encoded else concat_in_memory(source, where)


def _on_device(batch: Any, device: torch.device | None, pool: RowSplitsPool) -> Any:
    """The open batch, or a dict of its columns, with all tensors on a device; None moves none."""
    if isinstance(batch, dict):
        row_count_of(batch, "materialize(td)")  # refuses a dict with values that are not columns
    if device is None:
        return batch
    if isinstance(batch, WireBatch):
        batch = each_column(batch, _unchanged, _unchanged, path_of, pool)
    return moved(batch, device, pool, path_of)


def _unchanged(column: Any, key: Key) -> Any:
    return column


def _with_tensors(
    columns: dict[str, Any], container: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """The columns of the result: rectangles become their tensors, and inner batches containers."""
    for name, column in columns.items():
        if type(column) is Rectangle:
            columns[name] = column.tensor
        elif type(column) is dict:
            columns[name] = _make_container(_with_tensors(column, container), container)
    return columns


def _make_container(columns: dict[str, Any], container: Callable[[dict[str, Any]], Any]) -> Any:
    """What the caller's `container` makes of columns."""
    if container is BatchedDataDict:
        return BatchedDataDict.of_equal_rows(columns)
    return result_of(container, (columns,), "materialize(container)")


def _keys(columns: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Key]:
    """The keys of all columns, with those of inner batches, whose names are `above` them."""
    for name, column in columns.items():
        if type(column) is dict:
            yield from _keys(column, (*above, name))
        else:
            yield (*above, name) if above else name


# --- planning ----------------------------------------------------------------------------------


class _LayoutPlan:
    """What each column of one call becomes. Rectangles get memory when all columns are planned."""

    def __init__(self, options: LayoutOptions, batch: Any) -> None:
        self.options: LayoutOptions = options
        self.batch: Any = batch  # open
        self.pool: RowSplitsPool = RowSplitsPool()
        self.source: Any = _on_device(batch, options.device, self.pool)
        # Read prompt lengths on the host: before columns leave it, or after all have arrived.
        leaves_host = options.device is not None and options.device.type != "cpu"
        self.prompts: IntArray | None = read_prompts(batch if leaves_host else self.source, options)
        self.rectangles: list[Rectangle] = []  # to be filled
        # All padded columns: the ones above, and rectangles that need no more pads.
        self._padded: dict[Key, Rectangle] = {}
        # Columns of `align_end`, which are planned after the columns that have all tokens.
        self._end_views: dict[Key, RaggedView] = {}
        has_exceptions = options.align_end or options.keep_jagged
        self._pads_all: bool = options.layout == "padded" and not has_exceptions
        # Places are computed once for all columns with the same row lengths and padding side.
        self._places: dict[tuple[RowSplits, str], RowPlaces] = {}

    def filled_columns(self, container: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The columns of the result. `container` makes each batch inside the batch."""
        options = self.options
        lay_out_view = self._pad_rows if self._pads_all else self._lay_out_view
        columns = each_column(self.source, lay_out_view, self._lay_out_tensor, path_of, self.pool)
        if options.align_end:
            self._align_ends(columns)
        if options.masks:
            self._add_masks(columns)
        self._warn_of_swapped_dims()
        if options.strict:
            options.check_names([*_keys(columns, ())])
        allocate_rectangles(self.rectangles, options.out, options.pin_memory)
        fill_rectangles(self.rectangles, reused=options.out is not None)
        return _with_tensors(columns, container)

    def _lay_out_tensor(self, leaf: torch.Tensor, key: Key) -> Any:
        """What a column of tensors becomes."""
        if leaf.is_nested:
            return self._lay_out_nested(leaf, key)
        return self._lay_out_rectangle(leaf, key)

    def _lay_out_nested(self, leaf: torch.Tensor, key: Key) -> Any:
        """What a nested tensor becomes. If it stays jagged, it is the same tensor."""
        options = self.options
        stays_jagged, width = options.layout == "jagged", options.placement.pad_to_seqlen
        if key in options.keep_jagged or (stays_jagged and not width):
            return leaf
        path = path_of(key)
        if is_jagged(leaf):
            if options.layout == "padded":
                view = view_over_array(leaf, path, self.pool)
            else:
                view = view_of(leaf, path, self.pool, detach=not torch.is_grad_enabled())
        elif leaf.dim() > 1:
            bits = self._pad_bits(leaf.dtype, key) if options.layout == "padded" else None
            view = view_of_strided(leaf, path, bits)
        else:  # rows without dims, or no rows: nothing is ragged
            if stays_jagged:
                return leaf
            parts = leaf.unbind(0)
            if parts:
                return torch.stack(parts)
            return torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        if stays_jagged:
            check_width(view.row_splits, width, key)
            return leaf
        return self._lay_out_view(view, key)

    def _lay_out_view(self, view: RaggedView, key: Key) -> Any:
        """The rows of a column in the layout of the call."""
        options = self.options
        keeps_jagged, placement = key in options.keep_jagged, options.placement
        if key in options.align_end and not keeps_jagged:
            self._end_views[key] = view
            return view
        layout: Layout = "jagged" if keeps_jagged else options.layout
        if layout == "padded":
            return self._pad_rows(view, key)
        if not keeps_jagged:
            check_width(view.row_splits, placement.pad_to_seqlen, key)
        row_splits, values = self.pool.unique(view.row_splits), owned_values(view)
        if layout == "jagged":
            return nested_tensor(values, row_splits, view.ragged_dim)
        if layout == "packed":
            check_unbacked(row_splits.total, view.cell_bytes, key)
            return varlen_column(end_to_end(values, row_splits, view.ragged_dim), path_of(key))
        assert_never(layout)

    def _pad_rows(self, view: RaggedView, key: Key) -> Rectangle:
        """A rectangle of the rows of a column."""
        placement, row_splits = self.options.placement, view.row_splits
        rows_and_side = row_splits, placement.sides.get(key, placement.side)
        places = self._places.get(rows_and_side)
        if places is None:
            places = self._place_rows(row_splits, key, placement.pad_to_seqlen)
            self._places[rows_and_side] = places
        return self._plan_rectangle(view, places, key, self._pad_bits(view.dtype, key))

    def _place_rows(self, row_splits: RowSplits, key: Key, width: int) -> RowPlaces:
        """Where rows go; an error about rows too short for their prompts gets a remedy."""
        try:
            return self.options.placement.place_rows(row_splits, key, width, self.prompts)
        except ArgumentError as error:
            if error.reason != "bad_length":
                raise
            remedy = self._remedy_for_prompts(key)
            raise ArgumentError("bad_length", error.path, f"{error.detail}; {remedy}") from None

    def _remedy_for_prompts(self, key: Key) -> str:
        """The remedy for a column whose rows are too short for their prompts."""
        placement = self.options.placement
        if key in placement.sides:
            return f"leave {brief(key)} out of padding_side, or give it another padding_side there"
        prompts: Any = self.prompts
        lengths = row_lengths_of(self.batch, "", self.pool)
        fit = [name for name, tokens in lengths.items() if (tokens >= prompts).all()]
        sides: dict[Key, str] = {**dict.fromkeys(fit[:8], "left_right")} or {key: "right"}
        return f"if it holds no prompts, give it another padding_side by name: padding_side={sides}"

    def _lay_out_rectangle(self, leaf: torch.Tensor, key: Key) -> Any:
        """A rectangle, which options may pad further, as if it were jagged with equal rows."""
        if leaf.dim() < 2 or not self._may_pad(key):
            return leaf
        options = self.options
        widest = options.placement.pad_to_seqlen
        rows, cells = leaf.shape[:2]
        is_wider = 0 < widest < cells
        if options.token_aligned is not None and is_wider:
            detail = f"expected at most pad_to_seqlen={widest} cells, found {cells}; raise it"
            raise ArgumentError("row_too_long", path_of(key), detail)
        check_extent(leaf.shape, leaf.itemsize, path_of(key))
        lengths = np.full(rows, cells, dtype=np.int64)
        row_splits = self.pool.unique(RowSplits.from_lengths(lengths))
        # Keep a rectangle that is wider than `pad_to_seqlen`, if it was not named: it may be an
        # image grid.
        places = RowPlaces(None, cells)
        if not is_wider:
            places = self._place_rows(row_splits, key, max(widest, cells))
        if places.width == cells:
            shape = (rows * cells, *leaf.shape[2:])
            # This view only has the sizes of the rows, for masks and `align_end`. Nothing is copied
            # from it, so the memory may keep the dims of the column, and any layout.
            view = RaggedView(
                leaf, leaf.dtype, shape, ragged_dim=1, starts=None, row_splits=row_splits
            )
            bits = bytes(leaf.itemsize)
            self._padded[key] = Rectangle(
                leaf.shape, leaf.dtype, leaf.device, key, view, None, cells, bits
            )
            return leaf
        if leaf.layout is not torch.strided or leaf.is_quantized:
            detail = f"expected a strided rectangle to make {places.width} cells wide, found "
            detail += f"{describe(leaf)}; leave it out of token_aligned_fields"
            raise ArgumentError("bad_shape", path_of(key), detail)
        check_memory(leaf, path_of(key))
        if leaf.requires_grad and not torch.is_grad_enabled():
            leaf = leaf.detach()
        bits = self._pad_bits(leaf.dtype, key)
        return self._plan_rectangle(full_rows(leaf, row_splits), places, key, bits)

    def _may_pad(self, key: Key) -> bool:
        """Whether the options allow pads in a column that is a rectangle."""
        options = self.options
        if key in options.align_end or key in options.keep_jagged:
            return False
        if key in options.align_end.values():
            return True
        if options.token_aligned is None:
            return options.pads_rectangles()
        return key in options.token_aligned

    def _align_ends(self, columns: dict[str, Any]) -> None:
        """Plan the columns whose rows end where those of other columns do."""
        where, keys = "materialize(align_end)", [*_keys(columns, ())]
        for key, whole_key in self.options.align_end.items():
            check_known([key], keys, where)
            check_laid_out(whole_key, self._padded, "padded", where)
            if key not in self._end_views:
                detail = "expected a jagged or packed column in align_end that is not kept jagged; "
                detail += "if it is a rectangle, pack_jagged_fields makes it jagged"
                raise ArgumentError("bad_shape", path_of(key), detail)
            if key in self.options.placement.sides:
                detail = f"expected no padding_side of {brief(key)}, which is that of "
                detail += brief(whole_key)
                raise ArgumentError("conflict", where, detail)
        for key, view in self._end_views.items():
            whole = self._padded[self.options.align_end[key]]
            places = place_at_end(view.row_splits, whole, key)
            bits = self._pad_bits(view.dtype, key)
            rectangle = self._plan_rectangle(view, places, key, bits)
            names = key if isinstance(key, tuple) else (key,)
            inner = columns
            for name in names[:-1]:
                inner = inner[name]
            inner[names[-1]] = rectangle

    def _plan_rectangle(
        self, view: RaggedView, places: RowPlaces, key: Key, bits: bytes
    ) -> Rectangle:
        """Plan a rectangle for the rows of a view, with a pad of these bits."""
        (left_pad, width), dtype, dims = places, view.dtype, view.shape
        before = view.ragged_dim - 1
        shape = (view.row_splits.rows, *dims[:before], width, *dims[before + 1 :])
        rectangle = Rectangle(shape, dtype, device_of(view), key, view, left_pad, width, bits)
        self._padded[key] = rectangle
        self.rectangles.append(rectangle)
        return rectangle

    def _pad_bits(self, dtype: torch.dtype, key: Key) -> bytes:
        if key not in self.options.pads:
            return bytes(dtype.itemsize)
        return pad_bits(self.options.pads[key], dtype, path_of(key))

    def _warn_of_swapped_dims(self) -> None:
        """Warn if rows (k, n) become wider than k while the rows of another column have n tokens.

        TransferQueue uses dim 1 as the ragged one if all rows have the same shape.
        """
        wide = [each for each in self.rectangles if len(each.view.shape) > 1]
        if not wide:
            return
        equal = (padded.view.row_splits for padded in self._padded.values())
        tokens = {splits.max for splits in equal if splits.min == splits.max}
        for rectangle in wide:
            view, splits = rectangle.view, rectangle.view.row_splits
            if view.ragged_dim != 1 or splits.min != splits.max:
                continue
            if rectangle.width > splits.max != view.shape[1] and view.shape[1] in tokens:
                warn_of_swapped_dims(path_of(rectangle.key), column_name(rectangle.key))

    def _add_masks(self, columns: dict[str, Any]) -> None:
        """Plan the masks of padded columns."""
        for name, mask in self.options.masks.items():
            where = f"materialize(attention_mask_of={name!r})"
            check_laid_out(name, self._padded, "padded", where, name_in_detail=False)
            remedy = f"pass attention_mask_of={{{name!r}: 'another name'}}"
            check_new_name(mask, columns, where, remedy)
            padded, row_splits = self._padded[name], self._padded[name].view.row_splits
            width = padded.width
            check_unbacked(row_splits.rows * width, padded.view.cell_bytes, name)
            try:
                ones = torch.ones(row_splits.total, dtype=torch.bool, device=padded.device)
            except RuntimeError as error:
                raise no_memory((row_splits.rows, width), mask, error) from error
            places = RowPlaces(padded.left_pad, width)
            # No entry of `pad_value_dict` is the pad of a mask, whose pads hold no token.
            tokens, pad = end_to_end(ones, row_splits), bytes(1)
            columns[mask] = self._plan_rectangle(tokens, places, mask, pad)
