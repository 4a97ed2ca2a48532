"""`materialize`: a batch to padded, jagged or varlen columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

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
    )
    if layout != "padded":
        options.check_unpadded(prompt_lengths, out)
    elif pin_memory:
        check_accelerator()
    plain = options.only_pads and out is prompt_lengths is None and not strict
    columns: dict[str, Any] | None = _padded_at_once(batch, options.pads) if plain else None
    if columns is None:
        source = columns_of(batch, f"{where}(td)") if isinstance(batch, dict) else batch
        planning = _Planning(options, _read_prompts(source, prompt_lengths, options))
        columns = planning.columns(source, ())
        planning.add_masks(columns)
        if strict:
            options.check_names([*_keys(columns, ())])
        allocate_rectangles(planning.rectangles, out, pin_memory)
        fill_rectangles(planning.rectangles, reused=out is not None)
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


def _padded_at_once(batch: Any, pads: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The columns of one message, if it is a small one of plain columns."""
    source = getattr(batch, "source", None)
    if type(source) is not MessageColumns or source.device is not None or len(source.sizes) > 1:
        return None
    nodes = {name: node for name, (_, node) in batch.by_name.items()}
    return padded_columns(source.message, source.sizes[0], nodes, batch.chosen, pads)


def _read_prompts(batch: Any, given: Any, options: Options) -> IntArray | None:
    """(N,) tokens of each row that are prompt; None if no column needs them."""
    if given is None and not options.prompt_width:
        return None
    where = "materialize(prompt_lengths)"
    if "left_right" not in (options.side, *options.sides.values()) or given is None:
        found = f"requires padding_side='left_right', found padding_side={options.side!r}"
        raise ArgumentError("bad_option", where, found)
    if isinstance(given, str):
        columns = batch.columns if isinstance(batch, Columns) else batch
        (name,) = known_names(given, columns.keys(), where)
        given = columns[name]
    rows = batch.rows if isinstance(batch, Columns) else batch.batch_size[0]
    return read_lengths(given, where, rows=rows).lengths


def _contained(columns: dict[str, Any], container: Callable[[dict[str, Any]], Any]) -> Any:
    """Columns whose rectangles are filled, and batches in them, in containers."""
    for name, column in columns.items():
        if type(column) is Rectangle:
            columns[name] = column.tensor
        elif type(column) is dict:
            columns[name] = _contained(column, container)
    if container is BatchedDataDict:
        return BatchedDataDict.of_equal_rows(columns)
    return container(columns)


def _keys(columns: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Key]:
    for name, column in columns.items():
        if type(column) is dict:
            yield from _keys(column, (*above, name))
        else:
            yield (*above, name) if above else name


class _Planning:
    """The columns of one `materialize` call as they will be; rectangles have no memory yet."""

    def __init__(self, options: Options, prompts: IntArray | None) -> None:
        self.rectangles: list[Rectangle] = []
        self._options = options
        self._prompts = prompts
        self._pool = RowSplitsPool()
        # Whether rectangles are widened, where no names are given.
        self._widens = options.widens
        # Rectangles that need no padding, and their rows.
        self._unpadded: dict[Key, tuple[torch.Tensor, RowSplits]] = {}
        # Where rows go, by the rows and the side; the rows are kept, so that their id stays theirs.
        self._places: dict[tuple[int, str], tuple[IntArray | None, int, RowSplits]] = {}

    def columns(self, batch: Any, above: tuple[str, ...]) -> dict[str, Any]:
        """The columns of a batch that is inside the batches `above`."""
        items = batch.columns if isinstance(batch, Columns) else batch
        pairs = items.columns() if isinstance(items, WireBatch) else items.items()
        columns: dict[str, Any] = {}
        for name, leaf in pairs:
            key = (*above, name) if above else name
            kind = type(leaf)
            # The commonest first.
            if kind is RaggedView:
                columns[name] = self._ragged(leaf, key)
            elif is_jagged(leaf):
                columns[name] = self._jagged(leaf, key)
            elif kind is torch.Tensor:
                read = self._strided if leaf.is_nested else self._rectangular
                columns[name] = read(leaf, key)
            elif isinstance(leaf, np.ndarray):
                columns[name] = leaf
            elif is_non_tensor(leaf):
                columns[name] = rows_of_leaf(leaf, batch.batch_size[0])
            elif kind is list:
                columns[name] = object_array(leaf)
            elif isinstance(leaf, (TensorDictBase, WireBatch, Columns)):
                inner = leaf if kind is Columns else opened(leaf, path_of((*above, name)))
                columns[name] = self.columns(inner, (*above, name))
            else:
                columns[name] = self._rectangular(leaf, key)
        return columns

    def _jagged(self, leaf: torch.Tensor, key: Key) -> Any:
        """A nested tensor, which stays what it is where it is to stay jagged."""
        options = self._options
        if key in options.keep_jagged:
            return self._moved(leaf)
        if options.layout == "padded" and options.device is None:
            return self._rectangle(readable_view(leaf, path_of(key), self._pool), key)
        view = view_of(leaf, path_of(key), self._pool, detach=not torch.is_grad_enabled())
        if options.layout == "jagged":
            self._check_width(view.row_splits, key)
            return self._moved(leaf)
        return self._ragged(view, key)

    def _ragged(self, view: RaggedView, key: Key) -> Any:
        """The rows of a column in the layout that was asked for."""
        options = self._options
        stays = options.stays_jagged(key)
        if options.layout == "padded" and not stays and options.device in (None, view.device):
            return self._rectangle(view, key)
        if key not in options.keep_jagged:
            self._check_width(view.row_splits, key)
        # Compacted first, so that no hole crosses to the device.
        row_splits = self._pool.unique(view.row_splits)
        view = end_to_end(self._moved(_kept_values(view)), row_splits, view.ragged_dim)
        if stays:
            return nested_tensor(values_of(view), row_splits, view.ragged_dim)
        packed = options.layout == "packed"
        return varlen_column(view, path_of(key)) if packed else self._rectangle(view, key)

    def _check_width(self, row_splits: RowSplits, key: Key) -> None:
        width = self._options.width
        if width and row_splits.max > width:
            raise too_long_in(row_splits, width, path_of(key))

    def _strided(self, leaf: torch.Tensor, key: Key) -> Any:
        """A strided nested tensor, whose rows may be ragged in several dims."""
        options = self._options
        stays = options.stays_jagged(key)
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
        """A rectangle, widened as a jagged column is whose rows all are as long as it is wide."""
        options = self._options
        names = options.token_aligned
        named = self._widens if names is None else key in names
        if not named or not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
            return self._moved(leaf)
        if key in options.keep_jagged:
            return self._moved(leaf)
        rows, held = leaf.shape[:2]
        if names is not None and 0 < options.width < held:
            raise ArgumentError(
                "row_too_long",
                path_of(key),
                f"expected a rectangle of at most pad_to_seqlen={options.width} cells, found "
                f"{held}; raise pad_to_seqlen, or leave the column out of token_aligned_fields",
            )
        lengths = np.full(rows, held, dtype=np.int64)
        row_splits = self._pool.unique(RowSplits.from_lengths(lengths))
        # One that is wider than `pad_to_seqlen` may be an image grid.
        left_pad, width = self._place(row_splits, key, max(options.width, held))
        if width == held:
            leaf = self._moved(leaf)
            self._unpadded[key] = leaf, row_splits
            return leaf
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise ArgumentError(
                "bad_shape",
                path_of(key),
                f"expected a strided rectangle to make {width} cells wide, found {describe(leaf)}; "
                "name the per-token columns in token_aligned_fields, and not this one",
            )
        if leaf.requires_grad and not torch.is_grad_enabled():
            leaf = leaf.detach()
        return self._add(full_rows(self._moved(leaf), row_splits), left_pad, width, key)

    def _moved(self, leaf: Any) -> Any:
        device = self._options.device
        if device is None or leaf.device == device:
            return leaf
        return move_leaf(leaf, device, True, self._pool)

    # Rectangles

    def _rectangle(self, view: RaggedView, key: Key) -> Rectangle:
        """A column of these rows, which are placed once for all columns on one side."""
        row_splits, side = view.row_splits, self._options.side_of(key)
        place = self._places.get((id(row_splits), side))
        if place is None:
            place = (*self._place(row_splits, key, self._options.width), row_splits)
            self._places[id(row_splits), side] = place
        return self._add(view, place[0], place[1], key)

    def _add(self, view: RaggedView, left_pad: IntArray | None, width: int, key: Key) -> Rectangle:
        dim, shape = view.ragged_dim, view.shape
        padded = (view.row_splits.rows, *shape[: dim - 1], width, *shape[dim:])
        bits = self._pad_bits(view.dtype, key)
        rectangle = Rectangle(padded, view.dtype, view.device, key, view, left_pad, width, bits)
        self.rectangles.append(rectangle)
        return rectangle

    def _pad_bits(self, dtype: torch.dtype, key: Key) -> bytes:
        pads = self._options.pads
        return pad_bits(pads[key], dtype, path_of(key)) if key in pads else bytes(dtype.itemsize)

    def add_masks(self, columns: dict[str, Any]) -> None:
        """Add the masks of columns that are padded."""
        for name, mask in self._options.masks.items():
            where = f"materialize(attention_mask_of={name!r})"
            padded = next((each for each in self.rectangles if each.key == name), None)
            left_pad: IntArray | None = None
            if padded is not None:
                row_splits, left_pad, width = padded.view.row_splits, padded.left_pad, padded.width
                device = padded.device
            elif name in self._unpadded:
                column, row_splits = self._unpadded[name]
                width, device = column.shape[1], column.device
            else:
                raise ArgumentKeyError(
                    "no_such_field",
                    where,
                    "expected the name of a column that is padded, or of a rectangle that "
                    f"token_aligned_fields names, found {name!r:.80} among "
                    f"{sorted(columns)!r:.200}",
                )
            if mask in columns:
                raise ArgumentError(
                    "conflict",
                    where,
                    f"expected no column {mask!r} in the batch, found one; pass "
                    f"attention_mask_of={{{name!r}: 'another name'}}",
                )
            ones = torch.ones(row_splits.total, dtype=torch.bool, device=device)
            columns[mask] = self._add(end_to_end(ones, row_splits), left_pad, width, mask)

    def _place(self, row_splits: RowSplits, key: Key, width: int) -> tuple[IntArray | None, int]:
        """The first cell of each row in the rectangle (None: cell 0), and its width, which is
        `width` or, for 0, that of the longest row, rounded up.
        """
        side = self._options.side_of(key)
        if side == "left_right":
            return self._place_by_prompt(row_splits, path_of(key))
        if width and row_splits.max > width:
            raise too_long_in(row_splits, width, path_of(key))
        width = rounded(width or row_splits.max, self._options.multiple)
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


def _kept_values(view: RaggedView) -> torch.Tensor:
    """The rows of a view end to end, in memory that may be kept and written to."""
    if isinstance(view.memory, np.ndarray):
        return gathered([view])[0]
    return values_of(view)
