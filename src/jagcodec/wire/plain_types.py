"""Types that every reader knows by name, and their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec.errors import brief

NamedType: TypeAlias = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]
"""A name on the wire, a way to a state, and the way back."""


def of_type(state: Any, cls: type) -> Any:
    """A state that is exactly of a type."""
    if type(state) is not cls:
        raise ValueError(f"expected {cls.__name__}, found {type(state).__name__}")
    return state


# Of every dtype that this torch has: a dtype itself can be encoded even where its tensors cannot.
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def of_fields(make: Callable[..., Any], *types: type) -> Callable[[Any], Any]:
    """`make` of the fields of a state, which is a tuple of exactly these types."""

    def from_state(state: Any) -> Any:
        if [type(part) for part in of_type(state, tuple)] != list(types):
            raise ValueError(f"expected {[cls.__name__ for cls in types]}")
        return make(*state)

    return from_state


def of_one(make: Callable[[Any], Any], cls: type) -> Callable[[Any], Any]:
    """`make` of a state that is exactly of a type."""
    return lambda state: make(of_type(state, cls))


def _slice(state: Any) -> slice:
    start, stop, step = of_type(state, tuple)
    return slice(start, stop, step)


def _size(state: Any) -> torch.Size:
    if not all(-(1 << 63) <= of_type(dim, int) < 1 << 63 for dim in of_type(state, list)):
        raise ValueError("expected integers of 64 bits")
    return torch.Size(state)


def _dtype(state: Any) -> torch.dtype:
    if of_type(state, str) not in _DTYPES:
        raise ValueError(f"expected a dtype of torch {torch.__version__}, found {brief(state)}")
    return _DTYPES[state]


def _device(state: Any) -> torch.device:
    kind, number = state
    # Before torch is asked, which quotes what it does not know.
    if not (of_type(kind, str).isascii() and kind.isalnum()):
        raise ValueError(f"expected a device type, found {brief(kind)}")
    if number is None:
        return torch.device(kind)
    if not 0 <= of_type(number, int) < 128:
        raise ValueError(f"expected a device number from 0 to 127, found {brief(number)}")
    return torch.device(kind, number)


PLAIN_TYPES: dict[type, NamedType] = {
    complex: ("complex", lambda value: (value.real, value.imag), of_fields(complex, float, float)),
    range: (
        "range",
        lambda value: (value.start, value.stop, value.step),
        of_fields(range, int, int, int),
    ),
    slice: ("slice", lambda value: (value.start, value.stop, value.step), _slice),
    torch.Size: ("torch.Size", list, _size),
    torch.dtype: ("torch.dtype", lambda value: str(value).removeprefix("torch."), _dtype),
    torch.device: ("torch.device", lambda value: (value.type, value.index), _device),
    np.str_: ("numpy.str_", str, of_one(np.str_, str)),
    np.bytes_: ("numpy.bytes_", bytes, of_one(np.bytes_, bytes)),
}
