"""Types of Python, torch and numpy that every reader knows by a name, and their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jagcodec.errors import brief


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


def _complex(state: Any) -> complex:
    real, imag = state
    return complex(of_type(real, float), of_type(imag, float))


def _range(state: Any) -> range:
    start, stop, step = of_type(state, tuple)
    return range(of_type(start, int), of_type(stop, int), of_type(step, int))


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


PLAIN_TYPES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    complex: ("complex", lambda value: (value.real, value.imag), _complex),
    range: ("range", lambda value: (value.start, value.stop, value.step), _range),
    slice: ("slice", lambda value: (value.start, value.stop, value.step), _slice),
    torch.Size: ("torch.Size", list, _size),
    torch.dtype: ("torch.dtype", lambda value: str(value).removeprefix("torch."), _dtype),
    torch.device: ("torch.device", lambda value: (value.type, value.index), _device),
    np.str_: ("numpy.str_", str, lambda state: np.str_(of_type(state, str))),
    np.bytes_: ("numpy.bytes_", bytes, lambda state: np.bytes_(of_type(state, bytes))),
}
"""Name on the wire, a way to a state, and the way back, by type."""
