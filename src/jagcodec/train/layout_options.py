"""The options of `materialize`, checked.

`LayoutOptions` has all of them, and refuses those that do not go together. The functions that make
its fields from the arguments of a caller come after it.
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
    mapping_of,
)
from jagcodec.columns.batch import Key
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    brief,
)
from jagcodec.memory.arrays import IntArray
from jagcodec.rows.lengths import read_lengths
from jagcodec.train.rectangles import (
    Layout,
    PaddingSide,
    Placement,
)
from jagcodec.wire.read.opened import (
    row_count_of,
)

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
            for name in (name for name, given in self._rectangle_options().items() if given):
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


def read_values_by_column(given: Any, option: str, expected: str) -> dict[Any, Any]:
    """An option that maps names of columns to values."""
    found = mapping_of(given, f"materialize({option})", expected)
    check_names(found, f"materialize({option})")
    return found


def read_sides(given: Any) -> tuple[PaddingSide, dict[Any, PaddingSide]]:
    """`padding_side` as the side of most columns, and the sides of the others by name."""
    by_name = type(given) is not str and isinstance(given, Mapping)
    sides = read_values_by_column(given, "padding_side", "sides by name") if by_name else {}
    side: Any = "right" if by_name else given
    for each in (side, *sides.values()):
        check_option(each, _SIDES, "materialize(padding_side)")
    return side, sides


def read_masks(given: Any) -> Mapping[Any, str]:
    """`attention_mask_of` as a dict of names of columns to the names of their masks."""
    where = "materialize(attention_mask_of)"
    if given is None:
        return {}
    if isinstance(given, str):
        return {given: "attention_mask"}
    expected = "the name of a column, or a mapping of names of columns to names of masks"
    masks = read_values_by_column(given, "attention_mask_of", expected)
    for name in masks.values():
        if not isinstance(name, str):
            detail = f"expected {expected}, found {brief(name)} for a mask"
            raise ArgumentTypeError("bad_type", where, detail)
    if len(set(masks.values())) < len(masks):
        found = f"expected a name for each mask, found {brief(list(masks.values()))}"
        raise ArgumentError("conflict", where, found)
    return masks


def read_align_end(given: Any) -> Mapping[Any, Any]:
    """`align_end` as a dict of names of columns to the columns where their rows end."""
    if given is None:
        return {}
    expected = "a dict of names of columns to names of columns that have all tokens"
    ends = read_values_by_column(given, "align_end", expected)
    check_names(ends.values(), "materialize(align_end)")
    for name in ends.values():
        if name in ends:
            detail = f"expected columns that have all tokens, found {brief(name)} on both sides"
            raise ArgumentError("conflict", "materialize(align_end)", detail)
    return ends


def read_prompts(batch: Any, options: LayoutOptions) -> IntArray | None:
    """(N,) prompt tokens of each row; None if no column needs them."""
    given, placement = options.prompt_lengths, options.placement
    if given is None and not placement.prompt_width:
        return None
    where = "materialize(prompt_lengths)"
    if "left_right" not in (placement.side, *placement.sides.values()) or given is None:
        detail = f"requires padding_side='left_right', found padding_side={placement.side!r}"
        raise ArgumentError("bad_option", where, detail)
    if isinstance(given, str):
        check_known([given], batch.keys(), where)
        given = batch[given]
    return read_lengths(given, where, rows=row_count_of(batch, where)).lengths


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
