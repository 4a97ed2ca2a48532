"""Numbers to cells, for rows at once and for rows that grow: which dtype, exactly, or refused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec import cells
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief


class _Code(NamedTuple):
    """How the numbers of lists become cells: as `cells.fill` takes them."""

    code: str
    dtype: np.dtype[Any]
    precision: int


# float16 and bfloat16 by way of float32, as torch rounds Python's floats.
CODES: dict[torch.dtype, _Code] = {
    getattr(torch, name): _Code(code, np.dtype(stored), precision)
    for name, code, stored, precision in (
        ("bool", "?", "bool", 0),
        ("int8", "b", "int8", 0),
        ("int16", "h", "int16", 0),
        ("int32", "i", "int32", 0),
        ("int64", "q", "int64", 0),
        ("uint8", "B", "uint8", 0),
        ("uint16", "H", "uint16", 0),
        ("uint32", "I", "uint32", 0),
        ("uint64", "Q", "uint64", 0),
        ("bfloat16", "f", "float32", 8),
        ("float16", "f", "float32", 11),
        ("float32", "f", "float32", 24),
        ("float64", "d", "float64", 53),
    )
}
"""The dtypes that Python's numbers can have in C."""

DEFAULTS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}
"""The dtypes of Python's numbers where nobody says another."""


def plain_number(item: Any) -> Any:
    """An int, float or bool that is exactly an item which counts as one; None if none is."""
    if isinstance(item, np.generic) or (
        isinstance(item, (np.ndarray, torch.Tensor)) and item.ndim == 0
    ):
        return item.item()
    try:
        return operator.index(item)
    except TypeError:
        return None


def default_dtype(item: Any) -> torch.dtype:
    """The dtype of Python's numbers, going by the first of them."""
    kind = type(item)
    if kind not in DEFAULTS:
        plain = plain_number(item) if not isinstance(item, (int, float)) else item
        kind = next((base for base in (bool, int, float) if isinstance(plain, base)), int)
    return DEFAULTS[kind]


def filled(
    rows: Sequence[Sequence[Any]], lengths: Sequence[int], dtype: torch.dtype
) -> tuple[Any, tuple[int, int] | None]:
    """The cells of rows of numbers, end to end: an array, or a tensor if numpy has not the dtype.

    Args:
        rows: Lists or tuples.
        lengths: How long each of them is.
        dtype: One of `CODES`.

    Returns:
        The cells and None; or nothing usable, and the row and the index of the first item that is
        no number or does not fit.

    Raises:
        ValueError: A row is not as long as was said.
    """
    how = CODES[dtype]
    values = np.empty(sum(lengths), dtype=how.dtype)
    sizes = np.array(lengths, dtype=np.int64)
    bad = cells.fill(rows, sizes, values, how.code, how.precision, plain_number)
    if bad is not None or how.dtype.itemsize == dtype.itemsize:
        return values, bad
    rounded = torch.from_numpy(values).to(dtype)
    infinite = rounded.isinf().numpy() & np.isfinite(values)
    if not infinite.any():
        return rounded, None
    at = int(np.argmax(infinite))
    row = int(np.searchsorted(np.cumsum(sizes), at, side="right"))
    return rounded, (row, at - int(sizes[:row].sum()))


def misfits(tensor: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[np.bool_]:
    """Which numbers a dtype does not hold; ints must be exact."""
    if tensor.dtype.is_floating_point:
        if not dtype.is_floating_point:
            return np.ones(tuple(tensor.shape), dtype=np.bool_)
        return np.asarray((tensor.to(dtype).isinf() & tensor.isfinite()).cpu())
    numbers: npt.NDArray[Any] = tensor.cpu().numpy()
    if dtype.is_floating_point or dtype.is_complex:
        wide = tensor.to(dtype.to_real()).double().cpu().numpy()
        low, high = np.iinfo(numbers.dtype).min, np.iinfo(numbers.dtype).max
        inside = (wide >= low) & (wide < float(high) + 1)
        back = np.where(inside, wide, 0).astype(numbers.dtype)
        return np.asarray(~inside | (back != numbers))
    least, most = (0, 1) if dtype == torch.bool else _ends(dtype)
    large = numbers > min(most, np.iinfo(numbers.dtype).max)
    small = numbers < max(least, np.iinfo(numbers.dtype).min)
    return np.asarray(large | small)


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


def option_of(name: str, dtype: str) -> str:
    """How a caller says what the cells of a column are."""
    return f"dtypes={{{name!r}: {dtype}}}"


def refusal(
    path: str, number: float, dtype: torch.dtype, option: Callable[[str], str]
) -> ArgumentError | ArgumentTypeError:
    """Why a number is none of a column's; `option` says how a caller chooses another dtype."""
    wanted = str(dtype).removeprefix("torch.")
    if isinstance(number, float) and not dtype.is_floating_point:
        expected = "bools" if dtype == torch.bool else "integers"
        return ArgumentTypeError(
            "bad_type",
            path,
            f"expected {expected} (the column is {wanted}), found {number!r}; for floats pass "
            f"{option('torch.float32')}",
        )
    exactly = "" if isinstance(number, float) else " exactly"
    return ArgumentError(
        "bad_dtype",
        path,
        f"expected a number that {wanted} holds{exactly}, found {brief(number)}; for other cells "
        f"pass {option('...')}",
    )
