"""A wire batch to what a trainer takes: the only place where padding is paid back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, overload

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from jagcodec.batch.batched_data_dict import BatchedDataDict
from jagcodec.batch.leaves import Sharing, move_leaf
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import (
    Blank,
    ByteArray,
    IntArray,
    Room,
    allocate,
    are_apart,
    as_bytes,
    describe,
)
from jagcodec.pack.fields import field_names
from jagcodec.ragged.nested import Parts, RowSplits, is_jagged, take_apart
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.pad_values import pad_bits
from jagcodec.ragged.views import (
    WireCells,
    compact_values,
    pad_into,
    pad_task,
    padded_shape,
    parts_of_rectangle,
    read_lengths,
)
from jagcodec.rowcopy import Copy, Pad, copy_all, pad_all, rows_only
from jagcodec.wire.decoder import usable_device
from jagcodec.wire.frames import writable_bytes
from jagcodec.wire.lazy import WireBatch

Layout = Literal["padded", "jagged", "packed"]
"""What `materialize` makes of jagged columns: rectangles, nothing, or varlen-attention input."""

PaddingSide = Literal["right", "left", "left_right"]
"""Where the pad cells of a rectangle's row lie."""

Key: TypeAlias = str | tuple[str, ...]
"""What a column is called in arguments: its name, or inside a nested one all of them."""

_LAYOUTS, _SIDES = get_args(Layout), get_args(PaddingSide)

T = TypeVar("T")


@overload
def materialize(
    td: TensorDictBase | WireBatch,
    layout: Layout = ...,
    pad_value_dict: Mapping[str, Any] | None = ...,
    pad_to_seqlen: int = ...,
    *,
    pad_to_multiple: int = ...,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = ...,
    prompt_lengths: torch.Tensor | str | None = ...,
    prompt_width: int = ...,
    token_aligned_fields: Iterable[str] = ...,
    keep_jagged: Iterable[str] = ...,
    attention_mask_of: str | None = ...,
    device: torch.device | str | None = ...,
    pin_memory: bool = ...,
    out: Any = ...,
) -> BatchedDataDict: ...


@overload
def materialize(
    td: TensorDictBase | WireBatch,
    layout: Layout = ...,
    pad_value_dict: Mapping[str, Any] | None = ...,
    pad_to_seqlen: int = ...,
    *,
    pad_to_multiple: int = ...,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = ...,
    prompt_lengths: torch.Tensor | str | None = ...,
    prompt_width: int = ...,
    token_aligned_fields: Iterable[str] = ...,
    keep_jagged: Iterable[str] = ...,
    attention_mask_of: str | None = ...,
    device: torch.device | str | None = ...,
    pin_memory: bool = ...,
    out: Any = ...,
    container: Callable[[dict[str, Any]], T],
) -> T: ...


def materialize(
    td: TensorDictBase | WireBatch,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
    *,
    pad_to_multiple: int = 1,
    padding_side: PaddingSide | Mapping[str, PaddingSide] = "right",
    prompt_lengths: torch.Tensor | str | None = None,
    prompt_width: int = 0,
    token_aligned_fields: Iterable[str] = (),
    keep_jagged: Iterable[str] = (),
    attention_mask_of: str | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
    out: Any = None,
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
            that one dict serves every batch, as they are in the other arguments that take
            names. A column inside a nested TensorDict is looked up by its tuple of names, as
            tensordict does.
        pad_to_seqlen: In the padded layout, the width of every jagged column; 0 means the
            longest row. Rectangular columns keep their shape. In every layout, what no row may
            be longer than.
        pad_to_multiple: In the padded layout, widths are rounded up to a multiple of this, as
            sequence parallelism and fp8 kernels want.
        padding_side: Where pad cells go, for all columns or by name ("right" for the rest).
            ``"left_right"`` is verl's rectangle of prompt and response: prompts end, and
            responses begin, at one column of cells (`prompt_width`).
        prompt_lengths: For ``"left_right"``: (N,) tokens of each row that are prompt, or the
            name of the rectangular column that holds them.
        prompt_width: For ``"left_right"``: cells for prompts; 0 means the longest prompt. What
            no prompt may be longer than.
        token_aligned_fields: Names of *rectangular* columns (N, S, ...) that are per-token and
            must follow `pad_to_seqlen` and `pad_to_multiple`, padded on their side. Which they
            are is never guessed: an image grid may have any shape.
        keep_jagged: Names of columns that stay jagged in any layout, and of any length: rows
            whose length is not counted in tokens, such as image patches.
        attention_mask_of: Name of a jagged column; the result then has ``"attention_mask"``,
            bool (N, width): True where the rectangle of that column holds a token.
        device: Where tensors go; None leaves them. Only the valid cells cross, and the rectangle
            is made there.
        pin_memory: Make the rectangles in page-locked memory, from which copies to an
            accelerator run by themselves (`non_blocking`). Needs an accelerator.
        out: Memory for the rectangles, to be reused from step to step: what an earlier call
            returned (a mapping from names to tensors, nested as the batch is; each is written,
            and must be of just the right shape, dtype and device; columns that it lacks are
            allocated), or one writable CPU buffer for all of them of any size that suffices,
            pinned or not. Whatever was in it is overwritten.
        container: Called with the dict of columns; what it returns is returned. Nested
            TensorDicts become containers too.

    Returns:
        The columns in their order. Padded columns are new (or lie in `out`), in one allocation
        that is freed with the last of them; everything else aliases `td`. Non-tensor columns
        become object arrays (N,), items unwrapped by `unwrap_wire_stripped_payload`; a payload
        that belongs to the whole batch fills N rows.

    Raises:
        ArgumentError: An option is not one of these, a row is longer than `pad_to_seqlen` (a
            silent width mismatch between ranks hangs collectives) or a prompt than its row, a
            pad does not fit its dtype, `out` does not fit, or overlaps the batch or itself, or
            `td` has no batch dim.
        ArgumentKeyError: `attention_mask_of` or `prompt_lengths` names no such column.
        ArgumentTypeError: `td` is no TensorDict, or it is or holds a lazy stack.

    The contract of the first four arguments is that of NeMo-RL's
    ``nemo_rl.data_plane.codec.materialize``.

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
    """
    where = "materialize"
    _check_option(layout, _LAYOUTS, f"{where}(layout)")
    _check_mapping(pad_value_dict, f"{where}(pad_value_dict)")
    by_name = not isinstance(padding_side, str) and isinstance(padding_side, Mapping)
    sides: Any = padding_side if by_name else {}
    for side in sides.values() if by_name else [padding_side]:
        _check_option(side, _SIDES, f"{where}(padding_side)")
    if not isinstance(td, (TensorDictBase, WireBatch)):
        raise ArgumentTypeError(
            "bad_type", f"{where}(td)", f"expected a TensorDict, found {type(td).__name__}"
        )
    options = _Options(
        layout,
        pad_value_dict or {},
        _whole(pad_to_seqlen, 0, f"{where}(pad_to_seqlen)", "a width, or 0 for the longest row"),
        _whole(pad_to_multiple, 1, f"{where}(pad_to_multiple)", "1 or more"),
        sides,
        "right" if by_name else padding_side,  # type: ignore[arg-type]
        _whole(prompt_width, 0, f"{where}(prompt_width)", "a width, or 0 for the longest prompt"),
        field_names(token_aligned_fields, f"{where}(token_aligned_fields)"),
        field_names(keep_jagged, f"{where}(keep_jagged)"),
        attention_mask_of,
        usable_device(device, f"{where}(device)"),
        pin_memory,
        container,
    )
    if layout != "padded":
        options.check_unpadded(prompt_lengths, out)
    return _Materializing(options, prompt_lengths, out).run(td)


class _Options(NamedTuple):
    """The checked arguments of one `materialize` call."""

    layout: Layout
    pads: Mapping[Any, Any]
    width: int
    multiple: int
    sides: Mapping[Any, PaddingSide]
    side: PaddingSide
    prompt_width: int
    token_aligned: frozenset[Any]
    keep_jagged: frozenset[Any]
    masked: str | None
    device: torch.device | None
    pin_memory: bool
    container: Callable[[dict[str, Any]], Any]

    def check_unpadded(self, prompt_lengths: Any, out: Any) -> None:
        """Refuse what only rectangles have, rather than pass over it."""
        given = {
            "pad_to_multiple": self.multiple != 1,
            "padding_side": self.sides or self.side != "right",
            "prompt_lengths": prompt_lengths is not None,
            "prompt_width": self.prompt_width,
            "token_aligned_fields": self.token_aligned,
            "attention_mask_of": self.masked is not None,
            "pin_memory": self.pin_memory,
            "out": out is not None,
        }
        for name, value in given.items():
            if value:
                raise ArgumentError(
                    "bad_option",
                    f"materialize({name})",
                    f"expected it with layout='padded' only, found layout={self.layout!r}",
                )


@dataclass(slots=True, eq=False)
class _Rectangle(Blank):
    """A padded column before there is memory for it."""

    key: Key
    parts: Parts | WireCells
    leads: IntArray | None
    pattern: bytes


def _filled(
    rectangles: list[_Rectangle], rooms: list[Room], *, reused: bool
) -> Iterator[torch.Tensor]:
    """The rectangles in their rooms; those on the CPU are written together."""
    copies, pads, tensors = [], [], []
    for rectangle, room in zip(rectangles, rooms, strict=True):
        parts, leads, pattern = rectangle.parts, rectangle.leads, rectangle.pattern
        fresh = room.zeroed and not any(pattern)
        task = pad_task(room, parts, leads, pattern)
        if task is None and isinstance(parts, Parts):
            tensors.append(pad_into(room.tensor, parts, leads, pattern, fresh=fresh))
            continue
        tensors.append(room.tensor)
        if task is None:
            pass  # no cells, and so no bytes of the message
        elif fresh:
            copies.append(rows_only(task))
        else:
            pads.append(task)
    tasks: list[Copy | Pad] = [*copies, *pads]
    if reused and not _are_apart(tasks):
        raise ArgumentError(
            "conflict",
            "materialize(out)",
            "expected memory of its own for each column, apart from the batch, found an overlap",
        )
    copy_all(copies)
    pad_all(pads)
    return iter(tensors)


def _are_apart(tasks: Sequence[Copy | Pad]) -> bool:
    read = [part for task in tasks for part in task[1:] if isinstance(part, np.ndarray)]
    return are_apart([task.dst for task in tasks], read)


class _Materializing:
    """The state of one `materialize` call."""

    def __init__(self, options: _Options, prompt_lengths: Any, out: Any) -> None:
        self._options = options
        self._prompt_lengths = prompt_lengths
        self._prompts: IntArray | None = None
        self._out = out
        self._sharing = Sharing()
        self._rectangles: list[_Rectangle] = []
        self._places: dict[tuple[RowSplits, PaddingSide], tuple[IntArray | None, int]] = {}

    def run(self, td: TensorDictBase | WireBatch) -> Any:
        """Look at every column, allocate the rectangles together, then fill them."""
        self._prompts = self._read_prompts(td)
        plan = self._plan(td, ())
        if self._options.masked is not None:
            self._plan_mask(plan, self._options.masked)
        filled = _filled(self._rectangles, self._memory(), reused=self._out is not None)
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
        return self._options.container(columns)

    # Memory

    def _memory(self) -> list[Room]:
        """Room for each rectangle: new, or reused."""
        wanted = self._rectangles
        if self._out is None:
            return self._allocated(wanted, None)
        if not isinstance(self._out, Mapping):
            return self._allocated(wanted, writable_bytes(self._out, "materialize(out)"))
        given = [self._given(rectangle) for rectangle in self._rectangles]
        fresh = self._allocated([b for b, g in zip(wanted, given, strict=True) if g is None], None)
        rest = iter(fresh)
        return [next(rest) if room is None else room for room in given]

    def _allocated(self, blanks: Sequence[Blank], out: ByteArray | None) -> list[Room]:
        try:
            return allocate(blanks, out=out, pin_memory=self._options.pin_memory)
        except (MemoryError, ValueError, RuntimeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                "too_large",
                "materialize(pin_memory)"
                if self._options.pin_memory
                else "materialize(pad_to_seqlen)",
                f"expected rectangles that fit in memory, found width {self._options.width}: "
                f"{error!s:.200}",
            ) from error

    def _given(self, rectangle: _Rectangle) -> Room | None:
        """The tensor of `out` for a rectangle, if there is one."""
        found: Any = self._out
        names = (rectangle.key,) if isinstance(rectangle.key, str) else rectangle.key
        for name in names:
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        fits = (
            isinstance(found, torch.Tensor)
            and (tuple(found.shape), found.dtype) == (rectangle.shape, rectangle.dtype)
            and found.device == rectangle.device
            and found.layout is torch.strided
            and found.is_contiguous()
            and not found.requires_grad
        )
        if not fits:
            shown = f"{found.dtype} " if isinstance(found, torch.Tensor) else ""
            raise ArgumentError(
                "bad_shape",
                f"materialize(out)[{'.'.join(names)!r}]",
                f"expected a contiguous {rectangle.dtype} tensor {rectangle.shape} on "
                f"{rectangle.device} that needs no gradient, found {shown}{describe(found)}; leave "
                "the column out, or pass one buffer for all",
            )
        return Room(found, as_bytes(found) if found.is_cpu else None, False)

    # Columns

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
        for name, key, leaf in self._leaves(td, above):
            # The commonest first: what a TensorDict is takes long to ask.
            if type(leaf) is WireCells:
                columns[name] = self._rectangle(leaf, leaf.splits, key)
            elif isinstance(leaf, Parts) or is_jagged(leaf):
                columns[name] = self._jagged(leaf, key)
            elif type(leaf) is torch.Tensor:
                columns[name] = self._rectangular(leaf, key)
            elif is_non_tensor(leaf):
                columns[name] = rows_of_leaf(leaf, rows)
            elif isinstance(leaf, (TensorDictBase, WireBatch)):
                columns[name] = self._plan(leaf, (*above, name))
            else:
                columns[name] = self._rectangular(leaf, key)
        return columns

    def _leaves(
        self, td: TensorDictBase | WireBatch, above: tuple[str, ...]
    ) -> Iterator[tuple[str, Key, Any]]:
        if not isinstance(td, WireBatch):
            for name, leaf in td.items():
                yield name, _key(above, name), leaf
            return
        options = self._options
        in_place = options.layout == "padded" and options.device is None
        for name in td.fields:
            key = _key(above, name)
            if options.layout == "jagged" or key in options.keep_jagged:
                yield name, key, td.leaf(name)
                continue
            cells = td.cells(name) if in_place else None
            yield name, key, td.column(name) if cells is None else cells

    def _check_width(self, splits: RowSplits, path: str) -> None:
        width = self._options.width
        if width and splits.max > width:
            row = int(np.argmax(splits.lengths > width))
            raise _too_long(path, row, width, splits.lengths[row])

    def _jagged(self, leaf: torch.Tensor | Parts, key: Key) -> Any:
        options = self._options
        path = _path(key)
        if key in options.keep_jagged:
            return self._moved(leaf)
        parts = leaf if isinstance(leaf, Parts) else take_apart(leaf, path, seen=self._sharing.read)
        splits = self._sharing.groups.of_lengths(parts.lengths).splits
        self._check_width(splits, path)
        if options.layout == "jagged":
            return self._moved(leaf)
        if options.device is not None and parts.values.device != options.device:
            # Compacted first, so that no hole crosses to the device.
            values = self._moved(compact_values(parts))
            parts = Parts(
                values, splits.offsets, splits.starts, splits.lengths, parts.ragged_dim, True
            )
        if options.layout == "packed":
            return self._sharing.packing.column(compact_values(parts), splits, path)
        return self._rectangle(parts, splits, key)

    def _rectangular(self, leaf: torch.Tensor, key: Key) -> Any:
        options, path = self._options, _path(key)
        if key not in options.token_aligned:
            return self._moved(leaf)
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.dim() < 2:
            raise ArgumentError(
                "bad_shape",
                path,
                f"expected a per-token rectangle (N, S, ...), found {describe(leaf)}; "
                "leave it out of token_aligned_fields",
            )
        side, held = options.sides.get(key, options.side), leaf.shape[1]
        width = _rounded(options.width or held, options.multiple)
        if side == "left_right" or held > width:
            raise ArgumentError(
                "bad_shape",
                path,
                f"expected a rectangle of at most pad_to_seqlen={width} cells that is padded right "
                f"or left, found {held} and padding_side={side!r}",
            )
        if held == width:
            return self._moved(leaf)
        parts = parts_of_rectangle(self._moved(leaf.detach()))
        leads = np.full(len(leaf), width - held) if side == "left" else None
        return self._placed(parts, leads, width, key)

    def _rectangle(self, parts: Parts | WireCells, splits: RowSplits, key: Key) -> _Rectangle:
        """A column of these rows, which are placed once for all columns on one side."""
        side = self._options.sides.get(key, self._options.side)
        place = self._places.get((splits, side))
        if place is None:
            path = _path(key)
            self._check_width(splits, path)
            place = self._places[splits, side] = self._place(splits, side, path)
        return self._placed(parts, *place, key)

    def _placed(
        self, parts: Parts | WireCells, leads: IntArray | None, width: int, key: Key
    ) -> _Rectangle:
        pattern = pad_bits(self._options.pads.get(key, 0), parts.dtype, _path(key))
        shape = padded_shape(parts, width)
        rectangle = _Rectangle(shape, parts.dtype, parts.device, key, parts, leads, pattern)
        self._rectangles.append(rectangle)
        return rectangle

    def _plan_mask(self, plan: dict[str, Any], name: str) -> None:
        column = plan.get(name)
        if type(column) is not _Rectangle:
            raise ArgumentKeyError(
                "no_such_field",
                f"materialize(attention_mask_of={name!r})",
                f"expected the name of a column that is padded, found {sorted(plan)!r:.200}",
            )
        if "attention_mask" in plan:
            raise ArgumentError(
                "conflict",
                f"materialize(attention_mask_of={name!r})",
                "expected no column 'attention_mask' in the batch, found one; select the others",
            )
        splits = self._sharing.groups.of_lengths(column.parts.lengths).splits
        ones = torch.ones(splits.total, dtype=torch.bool, device=column.parts.device)
        parts = Parts(ones, splits.offsets, splits.starts, splits.lengths, 1, True)
        width = column.shape[column.parts.ragged_dim]
        plan["attention_mask"] = self._placed(parts, column.leads, width, "attention_mask")

    def _moved(self, leaf: Any) -> Any:
        device = self._options.device
        if device is None or leaf.device == device:
            return leaf
        return move_leaf(leaf, device, True, self._sharing)

    # Where rows go in their rectangle

    def _place(
        self, splits: RowSplits, side: PaddingSide, path: str
    ) -> tuple[IntArray | None, int]:
        """The first cell of each row in the rectangle (None: cell 0), and its width."""
        options = self._options
        if side == "left_right":
            return self._place_by_prompt(splits, path)
        width = _rounded(options.width or splits.max, options.multiple)
        return (width - splits.lengths if side == "left" else None), width

    def _place_by_prompt(self, splits: RowSplits, path: str) -> tuple[IntArray, int]:
        options, prompts = self._options, self._prompts
        if prompts is None:
            raise ArgumentError(
                "bad_option",
                "materialize(prompt_lengths)",
                "expected prompt_lengths with padding_side='left_right', found None",
            )
        wrong = np.flatnonzero(prompts > splits.lengths)
        if len(wrong):
            row = int(wrong[0])
            raise ArgumentError(
                "bad_length",
                f"{path}, row {row}",
                f"expected a prompt within its row of {splits.lengths[row]} tokens, found "
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
        leads = prompt_width - prompts
        ends = leads + splits.lengths
        needed = max(int(ends.max(initial=0)), prompt_width)
        if options.width and needed > options.width:
            row = int(np.argmax(ends))
            raise _too_long(
                path, row, options.width, f"{ends[row]} with its prompt padded to {prompt_width}"
            )
        return leads, _rounded(options.width or needed, options.multiple)

    def _read_prompts(self, td: TensorDictBase | WireBatch) -> IntArray | None:
        """(N,) tokens of each row that are prompt."""
        given, where = self._prompt_lengths, "materialize(prompt_lengths)"
        sides = {self._options.side, *self._options.sides.values()}
        if given is None or "left_right" not in sides:
            if given is not None or self._options.prompt_width:
                raise ArgumentError(
                    "bad_option",
                    where,
                    "expected it with padding_side='left_right' only, found "
                    f"padding_side={self._options.side!r}",
                )
            return None
        if isinstance(given, str):
            names = list(td.fields if isinstance(td, WireBatch) else td.keys())
            if given not in names:
                raise ArgumentKeyError(
                    "no_such_field", where, f"expected one of {names}, found {given!r}"
                )
            given = td.leaf(given) if isinstance(td, WireBatch) else td[given]
        rows = td.batch_size[0] if len(td.batch_size) else 0
        return read_lengths(given, where, rows=rows).lengths


# --- arguments ---------------------------------------------------------------------------------


def _key(above: tuple[str, ...], name: str) -> Key:
    return (*above, name) if above else name


def _path(key: Key) -> str:
    return f"materialize({key if isinstance(key, str) else '.'.join(key)!r})"


def _rounded(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def _too_long(path: str, row: int, width: int, found: Any) -> ArgumentError:
    return ArgumentError(
        "row_too_long",
        f"{path}, row {row}",
        f"expected rows of at most pad_to_seqlen={width} tokens, found {found}; "
        "raise pad_to_seqlen or shorten the row",
    )


def _check_option(value: Any, options: tuple[str, ...], path: str) -> None:
    if value not in options:
        raise ArgumentError(
            "bad_option",
            path,
            f"expected one of {', '.join(map(repr, options))}, found {value!r}",
        )


def _check_mapping(value: Any, path: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected a dict of column names to pads, found {type(value).__name__}",
        )


def _whole(number: Any, least: int, path: str, expected: str) -> int:
    try:
        whole = operator.index(number)
    except TypeError:
        whole = least - 1
    if whole < least:
        raise ArgumentError("bad_option", path, f"expected {expected}, found {number!r}")
    return whole
