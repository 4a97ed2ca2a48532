"""The options of `materialize`, checked.

`LayoutOptions` has all of them, and refuses those that do not go together. `read_options` makes it
from the arguments of a caller; the functions that read single arguments come after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from jagcodec._arguments import (
    check_known,
    check_names,
    check_option,
    key_of,
    mapping_of,
    name_set,
    require_flag,
    require_int,
    values_by_key,
)
from jagcodec.columns.batch import Key
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    brief,
)
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import usable_device
from jagcodec.rows.lengths import read_lengths
from jagcodec.train.rectangles import (
    Layout,
    PaddingSide,
    Placement,
)
from jagcodec.wire.read.any_batch import (
    row_count_of,
)

_LAYOUTS = get_args(Layout)
_SIDES = get_args(PaddingSide)


@dataclass(slots=True)
class LayoutOptions:
    """The options of one call of `materialize`. Each has been checked by itself."""

    layout: Layout
    pads: dict[Any, Any]  # by column
    placement: Placement
    prompt_lengths: Any  # as the caller passed it; `read_prompts` reads it
    token_aligned: frozenset[Any] | None
    keep_jagged: frozenset[Any]
    masks: Mapping[Any, str]  # column to the name of its mask
    align_end: Mapping[Any, Any]  # column to the column where its rows end
    device: torch.device | None
    pin_memory: bool
    out: Any
    strict: bool

    def check(self) -> None:
        """Raise an error for options that need rectangles in another layout, or an accelerator."""
        if self.layout != "padded":
            is_given = self._rectangle_options()
            for name in (name for name in is_given if is_given[name]):
                detail = f"requires layout='padded', found layout={self.layout!r}"
                raise ArgumentError("bad_option", f"materialize({name})", detail)
        elif self.pin_memory:
            if self.device is not None and self.device.type != "cpu":
                detail = f"expected rectangles on the host, found device={str(self.device)!r}"
                raise ArgumentError("conflict", "materialize(pin_memory)", detail)
            _check_accelerator()

    def pads_rectangles(self) -> bool:
        """Whether `materialize` pads rectangles further, if `token_aligned_fields` is None."""
        return self.layout == "padded" and bool(self.masks or self.placement.moves_rows())

    def _rectangle_options(self) -> dict[str, Any]:
        """The options that only rectangles have, and whether each is given."""
        placement = self.placement
        return {
            "pad_to_multiple": placement.multiple != 1,
            "padding_side": placement.sides or placement.side != "right",
            "align_end": self.align_end,
            "prompt_lengths": self.prompt_lengths is not None,
            "prompt_width": placement.prompt_width,
            "token_aligned_fields": self.token_aligned,
            "attention_mask_of": self.masks,
            "pin_memory": self.pin_memory,
            "out": self.out is not None,
        }

    def check_names(self, keys: Sequence[Key]) -> None:
        """Raise an error for a name in an option that is not the name of a column."""
        check_known(self.pads, keys, "materialize(pad_value_dict)")
        check_known(self.placement.sides, keys, "materialize(padding_side)")
        check_known(self.token_aligned or (), keys, "materialize(token_aligned_fields)")
        check_known(self.keep_jagged, keys, "materialize(keep_jagged)")


def read_options(
    *,
    layout: Any,
    pad_value_dict: Any,
    pad_to_seqlen: Any,
    pad_to_multiple: Any,
    padding_side: Any,
    align_end: Any,
    prompt_lengths: Any,
    prompt_width: Any,
    token_aligned_fields: Any,
    keep_jagged: Any,
    attention_mask_of: Any,
    device: Any,
    pin_memory: Any,
    out: Any,
    strict: Any,
) -> LayoutOptions:
    """The options of `materialize` from its arguments, checked by themselves and together."""
    check_option(layout, _LAYOUTS, "materialize(layout)")
    pads: dict[Any, Any] = {}
    if pad_value_dict is not None:
        expected = "a dict of column names to pads"
        pads = _read_values_by_column(pad_value_dict, "pad_value_dict", expected)
    side, sides = _read_sides(padding_side)
    if pin_memory is not False or strict is not False:  # most calls need not check either
        pin_memory = require_flag(pin_memory, "materialize(pin_memory)")
        strict = require_flag(strict, "materialize(strict)")
    placement = Placement(
        require_int(pad_to_seqlen, 0, "materialize(pad_to_seqlen)"),
        require_int(pad_to_multiple, 1, "materialize(pad_to_multiple)"),
        sides,
        side,
        require_int(prompt_width, 0, "materialize(prompt_width)"),
    )
    token_aligned: frozenset[Any] | None = None
    if token_aligned_fields is not None:
        token_aligned = name_set(token_aligned_fields, "materialize(token_aligned_fields)")
    options = LayoutOptions(
        layout,
        pads,
        placement,
        prompt_lengths,
        token_aligned,
        name_set(keep_jagged, "materialize(keep_jagged)"),
        _read_masks(attention_mask_of),
        _read_align_end(align_end),
        usable_device(device, "materialize(device)"),
        pin_memory,
        out,
        strict,
    )
    options.check()
    return options


def _read_values_by_column(value: Any, option: str, expected: str) -> dict[Any, Any]:
    """An option that maps names of columns to values."""
    values = mapping_of(value, f"materialize({option})", expected)
    check_names(values, f"materialize({option})")
    return values_by_key(values, f"materialize({option})")


def _read_sides(padding_side: Any) -> tuple[PaddingSide, dict[Any, PaddingSide]]:
    """`padding_side` as the side of most columns, and the sides of the others by name."""
    sides: dict[Any, PaddingSide] = {}
    side = padding_side
    if type(padding_side) is not str and isinstance(padding_side, Mapping):
        sides = _read_values_by_column(padding_side, "padding_side", "sides by name")
        side = "right"
    for each in (side, *sides.values()):
        check_option(each, _SIDES, "materialize(padding_side)")
    return side, sides


def _read_masks(attention_mask_of: Any) -> Mapping[Any, str]:
    """`attention_mask_of` as a dict of names of columns to the names of their masks."""
    where = "materialize(attention_mask_of)"
    if attention_mask_of is None:
        return {}
    if isinstance(attention_mask_of, str):
        return {attention_mask_of: "attention_mask"}
    expected = "the name of a column, or a mapping of names of columns to names of masks"
    masks = _read_values_by_column(attention_mask_of, "attention_mask_of", expected)
    for name in masks.values():
        if not isinstance(name, str):
            detail = f"expected {expected}, found {brief(name)} for a mask"
            raise ArgumentTypeError("bad_type", where, detail)
    if len(set(masks.values())) < len(masks):
        detail = f"expected a name for each mask, found {brief(list(masks.values()))}"
        raise ArgumentError("conflict", where, detail)
    return masks


def _read_align_end(align_end: Any) -> Mapping[Any, Any]:
    """`align_end` as a dict of names of columns to the columns where their rows end."""
    if align_end is None:
        return {}
    expected = "a dict of names of columns to names of columns that have all tokens"
    ends = _read_values_by_column(align_end, "align_end", expected)
    check_names(ends.values(), "materialize(align_end)")
    ends = {name: key_of(whole) for name, whole in ends.items()}
    for name in ends.values():
        if name in ends:
            detail = f"expected columns that have all tokens, found {brief(name)} on both sides"
            raise ArgumentError("conflict", "materialize(align_end)", detail)
    return ends


def read_prompts(batch: Any, options: LayoutOptions) -> IntArray | None:
    """(N,) prompt tokens of each row; None if no column needs them."""
    prompts, placement = options.prompt_lengths, options.placement
    if prompts is None and not placement.prompt_width:
        return None
    where = "materialize(prompt_lengths)"
    sides = (placement.side, *placement.sides.values())
    if "left_right" not in sides:
        found = " and ".join(map(repr, dict.fromkeys(sides)))
        detail = f"requires padding_side='left_right', found padding_side={found}"
        raise ArgumentError("bad_option", where, detail)
    if prompts is None:
        detail = f"expected the prompts of prompt_width={placement.prompt_width}, found None"
        raise ArgumentError("bad_option", where, detail)
    if isinstance(prompts, str):
        check_known([prompts], batch.keys(), where)
        prompts = batch[prompts]
    return read_lengths(prompts, where, rows=row_count_of(batch, where)).lengths


def _check_accelerator() -> None:
    """Refuse to page-lock memory if there is no accelerator to copy it to."""
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        detail = (
            "expected an accelerator to copy page-locked memory to, found none that torch can use; "
            f"leave pin_memory=False: {error!s:.200}"
        )
        raise ArgumentError("bad_option", "materialize(pin_memory)", detail) from error
