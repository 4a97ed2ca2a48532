"""Tables and values as text."""

from __future__ import annotations

import reprlib
from typing import Any

from jagcodec.errors import brief, shown


def name_text(name: str) -> str:
    """A name that a stranger may have chosen, on one line."""
    return shown(name, 32)


def counted(number: int, one: str) -> str:
    """A number of things."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def error_line(error: BaseException) -> str:
    return f"jagcodec: error: {shown(str(error), 1000)}"


def size_text(size: int) -> str:
    """A number of bytes, in units of about three digits."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= 10 * unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,} B"


def cells_text(value: Any) -> str:
    """A value of a row on one line, safe to print; shortened, as numpy does it."""
    import numpy as np

    array = _as_array(value)
    if not isinstance(array, np.ndarray) or array.dtype == object:
        return shown(_SHORT.repr(value), 400)
    if not array.ndim:
        return shown(str(array[()]), 400)
    with np.printoptions(threshold=16, edgeitems=4, linewidth=1 << 20):
        text = " ".join(np.array2string(array).split())
    return shown(text.replace("[ ", "["), 400)


def cells_json(value: Any) -> Any:
    """A value of a row for JSON; numbers that JSON does not have, and other objects, as text."""
    import numpy as np

    array = _as_array(value)
    if isinstance(array, np.ndarray) and array.dtype.kind in "biufc":
        return _plain(array.tolist())
    return _plain(value)


def _as_array(value: Any) -> Any:
    """A tensor as an array; one that numpy has no dtype for by its values, or by its bytes."""
    import torch

    from jagcodec.memory.tensor_bytes import number_array

    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout is not torch.strided:
        return value
    try:
        return number_array(value, widened=True)
    except (TypeError, RuntimeError):
        return value.view(torch.uint8).numpy()


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxdict = self.maxlist = self.maxtuple = 8

    def repr_int(self, x: int, level: int) -> str:
        # Python may refuse to print more than 4,300 digits.
        return brief(x) if x.bit_length() > 14_000 else super().repr_int(x, level)


_SHORT = _Short()


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    is_json = value is None or type(value) in (bool, str)
    is_json = is_json or (type(value) is float and abs(value) < float("inf"))
    if is_json or (type(value) is int and value.bit_length() <= 14_000):
        return value
    return repr(value) if isinstance(value, float | complex) else _SHORT.repr(value)
