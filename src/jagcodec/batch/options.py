"""The options of `materialize`, and their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from jagcodec._arguments import check_known
from jagcodec.batch.rectangles import Key
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.ragged.row_splits import RowSplits

Layout = Literal["padded", "jagged", "packed"]
"""What `materialize` makes of jagged columns: rectangles, nothing, or varlen-attention input."""

PaddingSide = Literal["right", "left", "left_right"]
"""Where the pad cells of a rectangle's row are."""


class Options(NamedTuple):
    """The checked arguments of one `materialize` call."""

    layout: Layout
    pads: Mapping[Any, Any]
    width: int
    multiple: int
    sides: Mapping[Any, PaddingSide]
    side: PaddingSide
    prompt_width: int
    token_aligned: frozenset[Any] | None
    keep_jagged: frozenset[Any]
    masks: Mapping[Any, str]
    device: torch.device | None
    pin_memory: bool

    @property
    def widens(self) -> bool:
        """Whether rectangles are padded too, as columns of equally long rows."""
        placed = self.width or self.multiple != 1 or self.side != "right" or self.sides
        return self.layout == "padded" and bool(placed or self.masks)

    @property
    def only_pads(self) -> bool:
        """Whether all that is asked for is rectangles as wide as their longest rows."""
        others = self.widens or self.device is not None or self.pin_memory or self.prompt_width
        return self.layout == "padded" and not (others or self.token_aligned or self.keep_jagged)

    def side_of(self, key: Key) -> PaddingSide:
        """Where a column has its pad cells."""
        return self.sides.get(key, self.side) if self.sides else self.side

    def stays_jagged(self, key: Key) -> bool:
        """Whether a column is not padded or packed."""
        return self.layout == "jagged" or key in self.keep_jagged

    def check_names(self, keys: list[Key]) -> None:
        """Refuse names that are not those of columns."""
        check_known(self.pads, keys, "materialize(pad_value_dict)")
        check_known(self.sides, keys, "materialize(padding_side)")
        check_known(self.token_aligned or (), keys, "materialize(token_aligned_fields)")
        check_known(self.keep_jagged, keys, "materialize(keep_jagged)")

    def check_unpadded(self, prompt_lengths: Any, out: Any) -> None:
        """Refuse what only rectangles have, rather than pass over it."""
        given = {
            "pad_to_multiple": self.multiple != 1,
            "padding_side": self.sides or self.side != "right",
            "prompt_lengths": prompt_lengths is not None,
            "prompt_width": self.prompt_width,
            "token_aligned_fields": self.token_aligned,
            "attention_mask_of": self.masks,
            "pin_memory": self.pin_memory,
            "out": out is not None,
        }
        for name, value in given.items():
            if value:
                raise ArgumentError(
                    "bad_option",
                    f"materialize({name})",
                    f"requires layout='padded', found layout={self.layout!r}",
                )


# --- checks -------------------------------------------------------------------------------------


def rounded(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def check_accelerator() -> None:
    """Refuse to page-lock memory where there is nothing to copy it to."""
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise ArgumentError(
            "bad_option",
            "materialize(pin_memory)",
            "expected an accelerator to copy page-locked memory to, found none that torch can "
            f"use; leave pin_memory=False: {error!s:.200}",
        ) from error


def too_long(path: str, row: int, width: int, found: Any) -> ArgumentError:
    return ArgumentError(
        "row_too_long",
        f"{path}, row {row}",
        f"expected rows of at most pad_to_seqlen={width} tokens, found {found}; "
        "raise pad_to_seqlen or shorten the row",
    )


def check_mapping(value: Any, path: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected a dict of column names to pads, found {type(value).__name__}",
        )


def too_long_in(row_splits: RowSplits, width: int, path: str) -> ArgumentError:
    row = int(np.argmax(row_splits.lengths > width))
    return too_long(path, row, width, row_splits.lengths[row])


def masks_of(given: Any) -> Mapping[Any, str]:
    """Columns to the names of their masks, of `attention_mask_of`.

    Raises:
        ArgumentError: Two masks have one name.
        ArgumentTypeError: It is neither a name nor a mapping of names to names.
    """
    if given is None:
        return {}
    where = "materialize(attention_mask_of)"
    if isinstance(given, str):
        return {given: "attention_mask"}
    if not isinstance(given, Mapping) or not all(type(name) is str for name in given.values()):
        raise ArgumentTypeError(
            "bad_type",
            where,
            "expected the name of a column, or a mapping of names of columns to names of masks, "
            f"found {describe(given)}",
        )
    if len(set(given.values())) < len(given):
        raise ArgumentError(
            "conflict", where, f"expected a name for each mask, found {brief(list(given.values()))}"
        )
    return given
