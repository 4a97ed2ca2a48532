"""`materialize`: a batch to padded, jagged or varlen columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, overload

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec._arguments import check_option, known_names, name_set, usable_device, whole_number
from jagcodec.batch.batched_data_dict import BatchedDataDict
from jagcodec.batch.columns import (
    AnyBatch,
    are_several,
    columns_of,
    concat_in_memory,
    is_encoded,
    meta_of,
    opened,
)
from jagcodec.batch.join import join_rows
from jagcodec.batch.leaves import move_leaf
from jagcodec.batch.options import (
    Layout,
    Options,
    PaddingSide,
    check_accelerator,
    check_mapping,
    masks_of,
    rounded,
    too_long,
    too_long_in,
)
from jagcodec.batch.rectangles import (
    Key,
    Rectangle,
    allocate_rectangles,
    fill_rectangles,
    padded_columns,
    path_of,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, describe
from jagcodec.memory.buffers import WritableBuffer
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, readable_view, view_of
from jagcodec.ragged.non_tensor import is_non_tensor, object_array, rows_of_leaf
from jagcodec.ragged.pad_values import pad_bits
from jagcodec.ragged.row_splits import Lengths, RowSplits, RowSplitsPool, read_lengths
from jagcodec.ragged.strided import StridedRows
from jagcodec.ragged.varlen import varlen_column
from jagcodec.ragged.views import RaggedView, end_to_end, full_rows
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.lowered import Columns
from jagcodec.wire.wire_batch import MessageColumns, WireBatch

_LAYOUTS, _SIDES = get_args(Layout), get_args(PaddingSide)

_CPU = torch.device("cpu")

T = TypeVar("T")


@overload
def materialize(
    td: AnyBatch | Sequence[AnyBatch],
    layout: Layout = ...,
    pad_value_dict: Mapping[str, Any] | None = ...,
    pad_to_seqlen: int = ...,
    *,
    pad_to_multiple: int = ...,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = ...,
    prompt_lengths: Lengths | str | None = ...,
    prompt_width: int = ...,
    token_aligned_fields: Iterable[str] | None = ...,
    keep_jagged: Iterable[str] = ...,
    attention_mask_of: str | Mapping[str, str] | None = ...,
    device: torch.device | str | None = ...,
    pin_memory: bool = ...,
    out: Mapping[str, Any] | WritableBuffer | None = ...,
    strict: bool = ...,
) -> BatchedDataDict: ...


@overload
def materialize(
    td: AnyBatch | Sequence[AnyBatch],
    layout: Layout = ...,
    pad_value_dict: Mapping[str, Any] | None = ...,
    pad_to_seqlen: int = ...,
    *,
    pad_to_multiple: int = ...,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = ...,
    prompt_lengths: Lengths | str | None = ...,
    prompt_width: int = ...,
    token_aligned_fields: Iterable[str] | None = ...,
    keep_jagged: Iterable[str] = ...,
    attention_mask_of: str | Mapping[str, str] | None = ...,
    device: torch.device | str | None = ...,
    pin_memory: bool = ...,
    out: Mapping[str, Any] | WritableBuffer | None = ...,
    strict: bool = ...,
    container: Callable[[dict[str, Any]], T],
) -> T: ...


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
    container: Callable[[dict[str, Any]], Any] = BatchedDataDict,
) -> Any:
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
        td: A batch: a TensorDict of batch size (N, ...), a dict of columns, or a `BatchedDataDict`;
            or a message, whose columns then go straight from it to where they are wanted: its
            frames, a blob, or a `WireBatch`. Or a list of batches: the rows of all of them, one
            batch after the other, as `concat_rows` joins them.
        layout: ``"padded"`` pads each jagged column (N, j, ...) to its longest row;
            ``"jagged"`` passes it through; ``"packed"`` makes a `PackedColumn` of it.
        pad_value_dict: Column name to pad value; cells of columns not named have all bits 0,
            which is 0 (in ``float8_e8m0fnu``, which has no zero, 2**-127). Integers are exact,
            and fractions rounded to the column's dtype as torch does; what would become another
            integer, infinity or zero by that is an error. Names that are not columns are ignored,
            so that one dict serves every batch, as they are in the other arguments that take
            names. A column inside a nested TensorDict is looked up by its tuple of names, as
            tensordict does.
        pad_to_seqlen: In the padded layout, the width of every jagged column, and of every
            narrower rectangle that `token_aligned_fields` includes; 0 means the longest row. In
            every layout, what no row of a jagged column may be longer than.
        pad_to_multiple: In the padded layout, widths are rounded up to a multiple of this, as
            sequence parallelism and fp8 kernels want.
        padding_side: Where pad cells go, for all columns or by name ("right" for the rest).
            ``"left_right"`` is verl's rectangle of prompt and response: prompts end, and
            responses begin, at one column of cells (`prompt_width`).
        prompt_lengths: For ``"left_right"``: (N,) tokens of each row that are prompt (a
            tensor, an array, a list or a tuple), or the name of the rectangular column of them.
        prompt_width: For ``"left_right"``: cells for prompts; 0 means the longest prompt. What
            no prompt may be longer than.
        token_aligned_fields: Which *rectangles* (N, S, ...) are padded as a jagged column of N
            rows of S cells is. Readers such as NeMo-RL's stack rows that happen to be equally
            long, and a rank that has such rows must not end up narrower than the others. None
            means all of two dims or more, except those that are wider than `pad_to_seqlen`,
            which keep their width. Names mean these alone, and none of them may be wider; an
            empty collection means no rectangle, for batches with image grids. Columns of one
            dim have nothing to widen.
        keep_jagged: Names of columns that stay as they are in any layout, and of any length:
            rows whose length is not counted in tokens, such as image patches.
        attention_mask_of: Name of a column that is padded; the result then has
            ``"attention_mask"``, bool (N, width): True where its rectangle holds a token. Or names
            of several, each with the name of its mask.
        device: Where tensors go; None leaves them. Only the valid cells cross, and the rectangle
            is made there.
        pin_memory: Make the rectangles in page-locked memory, from which copies to an
            accelerator run by themselves (`non_blocking`). Needs an accelerator.
        out: Memory for the rectangles, to be reused from step to step: what an earlier call
            returned (a mapping from names to tensors, nested as the batch is; each is written,
            and must be of just the right shape, dtype and device; columns that it lacks are
            allocated), or one writable CPU buffer for all of them of any size that suffices,
            pinned or not. Whatever was in it is overwritten.
        strict: Refuse names in `pad_value_dict`, a `padding_side` by name, `token_aligned_fields`
            and `keep_jagged` that are not those of columns.
        container: Called with the dict of columns; what it returns is returned. Nested
            TensorDicts become containers too.

    Returns:
        The columns in their order. Padded columns are new (or in `out`), in one allocation
        that is freed with the last of them; everything else aliases `td`. Gradients pass through
        them, unless torch records none. Rows of strided nested tensors that differ in several
        dims are padded in each, in those after the first always on the right. Non-tensor columns
        become object arrays (N,), items unwrapped by `unwrap_wire_stripped_payload`; a payload
        that belongs to the whole batch fills N rows.

    Raises:
        ArgumentError: An option is not one of these, a row is longer than `pad_to_seqlen` (a
            silent width mismatch between ranks hangs collectives) or a prompt than its row, a pad
            does not fit its dtype, `out` does not fit, overlaps the batch or itself, or is
            given for what needs a gradient, there is no accelerator to pin memory for, or `td`
            has no batch dim.
        ArgumentKeyError: `attention_mask_of` or `prompt_lengths` does not name such a column; or,
            with `strict`, any name is not that of a column.
        ArgumentTypeError: `td` is not a batch, or it is or holds a lazy stack.

    The contract of the first four arguments is that of NeMo-RL's
    ``nemo_rl.data_plane.codec.materialize``.
    """
    where = "materialize"
    check_option(layout, _LAYOUTS, f"{where}(layout)")
    if pad_value_dict is not None:
        check_mapping(pad_value_dict, f"{where}(pad_value_dict)")
    by_name = not isinstance(padding_side, str) and isinstance(padding_side, Mapping)
    sides: Any = padding_side if by_name else {}
    for side in sides.values() if by_name else [padding_side]:
        if side not in _SIDES:
            check_option(side, _SIDES, f"{where}(padding_side)")
    batch = _opened(td, f"{where}(td)")
    # Checked where they are given; most calls give few.
    if pad_to_seqlen or type(pad_to_seqlen) is not int:
        pad_to_seqlen = whole_number(
            pad_to_seqlen, 0, f"{where}(pad_to_seqlen)", "a width, or 0 for the longest row"
        )
    if pad_to_multiple != 1:
        pad_to_multiple = whole_number(pad_to_multiple, 1, f"{where}(pad_to_multiple)", "1 or more")
    if prompt_width:
        prompt_width = whole_number(
            prompt_width, 0, f"{where}(prompt_width)", "a width, or 0 for the longest prompt"
        )
    options = Options(
        layout,
        pad_value_dict or {},
        pad_to_seqlen or 0,
        pad_to_multiple,
        sides,
        "right" if by_name else padding_side,  # type: ignore[arg-type]
        prompt_width or 0,
        None
        if token_aligned_fields is None
        else name_set(token_aligned_fields, f"{where}(token_aligned_fields)"),
        name_set(keep_jagged, f"{where}(keep_jagged)"),
        masks_of(attention_mask_of),
        None if device is None else usable_device(device, f"{where}(device)"),
        pin_memory,
        container,
    )
    if layout != "padded":
        options.check_unpadded(prompt_lengths, out)
    elif pin_memory:
        check_accelerator()
    plain = options.only_pads and out is prompt_lengths is None and not strict
    columns = _padded_at_once(batch, options) if plain else None
    if columns is None:
        result = _Materializing(options, prompt_lengths, out, strict).run(
            columns_of(batch, f"{where}(td)") if isinstance(batch, dict) else batch
        )
    elif container is BatchedDataDict:
        result = BatchedDataDict.of_equal_rows(columns)
    else:
        result = container(columns)
    if type(result) is BatchedDataDict:
        result.meta_info = dict(meta_of(batch))
    return result


def _padded_at_once(batch: Any, options: Options) -> dict[str, torch.Tensor] | None:
    """The columns of one message, if it is a small one of plain columns."""
    source = getattr(batch, "source", None)
    if type(source) is not MessageColumns or batch.chosen is not None:
        return None
    if source.device is not None or len(source.sizes) > 1:
        return None
    nodes = {name: node for name, (_, node) in batch.by_name.items()}
    return padded_columns(source.message, source.sizes[0], nodes, options.pads)


def _opened(source: Any, where: str) -> Any:
    """An open batch: of a list of batches, the rows of all of them."""
    if not are_several(source):
        return opened(source, where)
    encoded = all(map(is_encoded, source))
    return join_rows(source, where) if encoded else concat_in_memory(source, where)


class _Materializing:
    """The state of one `materialize` call."""

    def __init__(self, options: Options, prompt_lengths: Any, out: Any, strict: bool) -> None:
        self._strict = strict
        self._options = options
        self._prompt_lengths = prompt_lengths
        self._prompts: IntArray | None = None
        self._out = out
        self._pool = RowSplitsPool()
        self._rectangles: list[Rectangle] = []
        # Whether rectangles are taken for columns of equally long rows, where no names are given.
        self._widens = options.layout == "padded" and bool(
            options.width
            or options.multiple != 1
            or options.side != "right"
            or options.sides
            or options.masks
        )
        # Rectangles that need no padding, and their rows.
        self._unpadded_rows: dict[Key, RowSplits] = {}
        # Where rows go, by the rows and the side; the rows are kept, so that their id stays theirs.
        self._places: dict[tuple[int, str], tuple[IntArray | None, int, RowSplits]] = {}

    def run(self, td: TensorDictBase | WireBatch | Columns) -> Any:
        """Look at every column, allocate the rectangles together, then fill them."""
        out = self._out
        if self._prompt_lengths is not None or self._options.prompt_width:
            self._prompts = self._read_prompts(td)
        plan = self._plan(td, ())
        for name, mask in self._options.masks.items():
            self._plan_mask(plan, name, mask)
        if self._strict:
            self._options.check_names(list(_leaf_keys(plan, ())))
        allocate_rectangles(self._rectangles, out, self._options.pin_memory)
        fill_rectangles(self._rectangles, reused=out is not None)
        return self._contained(plan)

    def _contained(self, plan: dict[str, Any]) -> Any:
        columns = {}
        for name, column in plan.items():
            if type(column) is Rectangle:
                columns[name] = column.tensor
            elif type(column) is dict:
                columns[name] = self._contained(column)
            else:
                columns[name] = column
        container = self._options.container
        if container is BatchedDataDict:
            return BatchedDataDict.of_equal_rows(columns)
        return container(columns)

    # Columns

    def _plan(self, td: Any, above: tuple[str, ...]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        options = self._options
        # Whether columns of the same rows go to the same place, so that they are placed once.
        simple = not (options.sides or options.keep_jagged or options.device)
        placed: tuple[Any, Any] = (None, None)
        for name, leaf in _columns(td):
            key = (*above, name) if above else name
            kind = type(leaf)
            # The commonest first.
            if kind is not RaggedView and is_jagged(leaf):
                if options.layout != "padded" or key in options.keep_jagged:
                    columns[name] = self._unpadded(leaf, key)
                    continue
                if options.device is None:
                    leaf = readable_view(leaf, path_of(key), self._pool)
                else:  # the rows are moved before they are padded, in a tensor
                    detach = not torch.is_grad_enabled()
                    leaf = view_of(leaf, path_of(key), self._pool, detach=detach)
                kind = RaggedView
            if kind is RaggedView:
                rows, like = placed
                if rows is leaf.row_splits and simple:
                    columns[name] = self._placed(leaf, like.left_pad, like.width, key)
                    continue
                columns[name] = column = self._ragged(leaf, key)
                if type(column) is Rectangle:
                    placed = leaf.row_splits, column
            elif kind is torch.Tensor:
                columns[name] = (
                    self._strided(leaf, key) if leaf.is_nested else self._rectangular(leaf, key)
                )
            elif isinstance(leaf, np.ndarray):
                columns[name] = leaf
            elif is_non_tensor(leaf):
                columns[name] = rows_of_leaf(leaf, td.batch_size[0])
            elif kind is list:
                columns[name] = object_array(leaf)
            elif isinstance(leaf, (TensorDictBase, WireBatch, Columns)):
                inner = leaf if kind is Columns else opened(leaf, path_of((*above, name)))
                columns[name] = self._plan(inner, (*above, name))
            else:
                columns[name] = self._rectangular(leaf, key)
        return columns

    def _unpadded(self, leaf: torch.Tensor, key: Key) -> Any:
        """A nested tensor, which stays what it is where it is to stay jagged."""
        options = self._options
        if key in options.keep_jagged:
            return self._moved(leaf)
        view = view_of(leaf, path_of(key), self._pool, detach=not torch.is_grad_enabled())
        if options.layout == "packed":
            return self._ragged(view, key)
        self._check_width(view.row_splits, key)
        return self._moved(leaf)

    def _check_width(self, row_splits: RowSplits, key: Key) -> None:
        width = self._options.width
        if width and row_splits.max > width:
            raise too_long_in(row_splits, width, path_of(key))

    def _ragged(self, view: RaggedView, key: Key) -> Any:
        """The rows of a column in the layout that was asked for."""
        options = self._options
        jagged = options.layout == "jagged" or key in options.keep_jagged
        row_splits = view.row_splits
        if options.width and row_splits.max > options.width and key not in options.keep_jagged:
            raise too_long_in(row_splits, options.width, path_of(key))
        if options.layout == "padded" and not jagged and options.device in (None, view.device):
            return self._rectangle(view, key)
        # Compacted first, so that no hole crosses to the device.
        row_splits = self._pool.unique(row_splits)
        view = end_to_end(self._moved(_kept_values(view)), row_splits, view.ragged_dim)
        if jagged:
            return nested_tensor(values_of(view), row_splits, view.ragged_dim)
        if options.layout == "packed":
            return varlen_column(view, path_of(key))
        return self._rectangle(view, key)

    def _strided(self, leaf: torch.Tensor, key: Key) -> Any:
        """A strided nested tensor, whose rows may be ragged in several dims."""
        options = self._options
        stays = options.layout == "jagged" or key in options.keep_jagged
        if leaf.dim() == 1:  # of rows without dims, or of no rows: nothing is ragged
            parts = () if stays else leaf.unbind()
            none = leaf if stays else torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            return self._moved(torch.stack(parts) if parts else none)
        if stays and (not options.width or key in options.keep_jagged):
            return self._moved(leaf)
        rows = StridedRows(leaf)
        if stays:
            self._check_width(rows.row_splits, key)
            return self._moved(leaf)
        if options.layout == "packed" and len(rows.dims) > 1:
            raise ArgumentError(
                "bad_shape",
                path_of(key),
                f"expected rows that differ in one dim, found {len(rows.dims)} that differ; "
                "use layout='padded', or name the column in keep_jagged",
            )
        # A few numbers can name shapes as large as they like: a row without cells has them, too.
        own = leaf.numel() * leaf.itemsize + 8 * len(rows.rows) * leaf.dim()
        padded = rows.padded_cells * leaf.itemsize
        if padded > max(own**2, DEFAULT_LIMITS.expanded):
            raise ArgumentError(
                "too_large",
                path_of(key),
                f"expected rows whose shapes are about the same, found {own} bytes that padding "
                f"makes {padded}; name the column in keep_jagged",
            )
        return self._ragged(rows.view(self._pad_bits(leaf.dtype, key)), key)

    def _rectangular(self, leaf: Any, key: Key) -> Any:
        options = self._options
        names = options.token_aligned
        if key in names if names is not None else self._widens:
            return self._per_token(leaf, key)
        return leaf if options.device is None else self._moved(leaf)

    def _per_token(self, leaf: Any, key: Key) -> Any:
        """A rectangle, as a jagged column becomes whose rows all are as long as it is wide."""
        options = self._options
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or key in options.keep_jagged:
            return self._moved(leaf)
        rows, held = leaf.shape[:2]
        side = options.sides.get(key, options.side)
        if options.token_aligned is not None and 0 < options.width < held:
            raise ArgumentError(
                "row_too_long",
                path_of(key),
                f"expected a rectangle of at most pad_to_seqlen={options.width} cells, found "
                f"{held}; raise pad_to_seqlen, or leave the column out of token_aligned_fields",
            )
        lengths = np.full(rows, held, dtype=np.int64)
        row_splits = self._pool.unique(RowSplits.from_lengths(lengths))
        left_pad: IntArray | None = None
        if side == "left_right":
            left_pad, width = self._place_by_prompt(row_splits, path_of(key))
        else:
            # One that is wider than `pad_to_seqlen` may be an image grid.
            width = rounded(max(options.width, held), options.multiple)
            if side == "left":
                left_pad = width - lengths
        if width == held:
            self._unpadded_rows[key] = row_splits
            return self._moved(leaf)
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise ArgumentError(
                "bad_shape",
                path_of(key),
                f"expected a strided rectangle to make {width} cells wide, found {describe(leaf)}; "
                "name the per-token columns in token_aligned_fields, and not this one",
            )
        if leaf.requires_grad and not torch.is_grad_enabled():
            leaf = leaf.detach()
        return self._placed(full_rows(self._moved(leaf), row_splits), left_pad, width, key)

    def _rectangle(self, view: RaggedView, key: Key) -> Rectangle:
        """A column of these rows, which are placed once for all columns on one side."""
        options = self._options
        side = options.sides.get(key, options.side) if options.sides else options.side
        row_splits = view.row_splits
        place = self._places.get((id(row_splits), side))
        if place is None:
            place = (*self._place(row_splits, side, path_of(key)), row_splits)
            self._places[id(row_splits), side] = place
        return self._placed(view, place[0], place[1], key)

    def _placed(
        self, view: RaggedView, left_pad: IntArray | None, width: int, key: Key
    ) -> Rectangle:
        dtype, dim, shape = view.dtype, view.ragged_dim, view.shape
        pads = self._options.pads
        bits = self._pad_bits(dtype, key) if key in pads else bytes(dtype.itemsize)
        padded = (view.row_splits.rows, *shape[: dim - 1], width, *shape[dim:])
        memory: Any = view.memory
        device = memory.device if isinstance(memory, torch.Tensor) else _CPU
        rectangle = Rectangle(padded, dtype, device, key, view, left_pad, width, bits)
        self._rectangles.append(rectangle)
        return rectangle

    def _pad_bits(self, dtype: torch.dtype, key: Key) -> bytes:
        pads = self._options.pads
        return pad_bits(pads[key], dtype, path_of(key)) if key in pads else bytes(dtype.itemsize)

    def _plan_mask(self, plan: dict[str, Any], name: Any, mask: str) -> None:
        column: Any = plan
        for step in name if isinstance(name, tuple) else (name,):
            column = column.get(step) if type(column) is dict else None
        where = f"materialize(attention_mask_of={name!r})"
        left_pad: IntArray | None = None
        if name in self._unpadded_rows:
            row_splits, width = self._unpadded_rows[name], column.shape[1]
        elif type(column) is Rectangle:
            row_splits, left_pad, width = column.view.row_splits, column.left_pad, column.width
        else:
            raise ArgumentKeyError(
                "no_such_field",
                where,
                "expected the name of a column that is padded, or of a rectangle that "
                f"token_aligned_fields names, found {name!r:.80} among "
                f"{sorted(plan)!r:.200}",
            )
        if mask in plan:
            raise ArgumentError(
                "conflict",
                where,
                f"expected no column {mask!r} in the batch, found one; pass "
                f"attention_mask_of={{{name!r}: 'another name'}}",
            )
        ones = torch.ones(row_splits.total, dtype=torch.bool, device=column.device)
        plan[mask] = self._placed(end_to_end(ones, row_splits), left_pad, width, mask)

    def _moved(self, leaf: Any) -> Any:
        device = self._options.device
        if device is None or leaf.device == device:
            return leaf
        return move_leaf(leaf, device, True, self._pool)

    # Where rows go in their rectangle

    def _place(
        self, row_splits: RowSplits, side: PaddingSide, path: str
    ) -> tuple[IntArray | None, int]:
        """The first cell of each row in the rectangle (None: cell 0), and its width."""
        options = self._options
        if side == "left_right":
            return self._place_by_prompt(row_splits, path)
        if options.width and row_splits.max > options.width:
            raise too_long_in(row_splits, options.width, path)
        width = rounded(options.width or row_splits.max, options.multiple)
        return (width - row_splits.lengths if side == "left" else None), width

    def _place_by_prompt(self, row_splits: RowSplits, path: str) -> tuple[IntArray, int]:
        options, prompts = self._options, self._prompts
        lengths = row_splits.lengths
        if prompts is None:
            raise ArgumentError(
                "bad_option",
                "materialize(prompt_lengths)",
                "expected prompt_lengths with padding_side='left_right', found None",
            )
        wrong = np.flatnonzero(prompts > lengths)
        if len(wrong):
            row = int(wrong[0])
            raise ArgumentError(
                "bad_length",
                f"{path}, row {row}",
                f"expected a prompt within its row of {lengths[row]} tokens, found "
                f"{prompts[row]}; give columns without prompts another padding_side by name",
            )
        longest = int(prompts.max(initial=0))
        prompt_width = options.prompt_width or longest
        if longest > prompt_width:
            row = int(np.argmax(prompts))
            raise ArgumentError(
                "row_too_long",
                f"{path}, row {row}",
                f"expected prompts of at most prompt_width={prompt_width} tokens, found {longest}",
            )
        left_pad = prompt_width - prompts
        ends = left_pad + lengths
        needed = max(int(ends.max(initial=0)), prompt_width)
        if options.width and needed > options.width:
            row = int(np.argmax(ends))
            raise too_long(
                path, row, options.width, f"{ends[row]} with its prompt padded to {prompt_width}"
            )
        return left_pad, rounded(options.width or needed, options.multiple)

    def _read_prompts(self, td: Any) -> IntArray | None:
        """(N,) tokens of each row that are prompt."""
        given, where = self._prompt_lengths, "materialize(prompt_lengths)"
        sides = {self._options.side, *self._options.sides.values()}
        if given is None or "left_right" not in sides:
            if given is not None or self._options.prompt_width:
                raise ArgumentError(
                    "bad_option",
                    where,
                    "requires padding_side='left_right', "
                    f"found padding_side={self._options.side!r}",
                )
            return None
        if isinstance(given, str):
            columns = td.columns if isinstance(td, Columns) else td
            (name,) = known_names(given, columns.keys(), where)
            given = columns[name]
        rows = td.rows if isinstance(td, Columns) else td.batch_size[0]
        return read_lengths(given, where, rows=rows).lengths


def _columns(td: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(td, WireBatch):
        return td.columns()
    items: Iterable[tuple[str, Any]] = (td.columns if isinstance(td, Columns) else td).items()
    return items


def _leaf_keys(plan: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Key]:
    for name, column in plan.items():
        if type(column) is dict:
            yield from _leaf_keys(column, (*above, name))
        else:
            yield (*above, name) if above else name


def _kept_values(view: RaggedView) -> torch.Tensor:
    """The rows of a view end to end, in memory that may be kept and written to."""
    if isinstance(view.memory, np.ndarray):
        return gathered([view])[0]
    return values_of(view)
