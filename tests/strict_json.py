"""What JSON has of a value, and JSON that is read strictly: the oracle of exports."""

import json
import math
from typing import Any

import numpy as np
import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.float32, torch.float64, torch.bool)
"""Dtypes of which torch makes Python's numbers in all versions."""


class RefusedError(Exception):
    """JSON does not have a value, or not so that it comes back."""


def refuse(*_):
    raise RefusedError


def plain(value: Any) -> Any:
    """What reading the JSON of a value gives."""
    if isinstance(value, (np.generic, np.ndarray)):
        if value.dtype.kind not in "biufUO" or value.dtype == np.longdouble:
            refuse()
        return plain(value.item()) if not value.ndim else [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.dtype not in DTYPES:
            refuse()
        return plain(value.tolist())
    if isinstance(value, str):
        units = value.encode("utf-16-le", "surrogatepass")
        return value if units.decode("utf-16-le", "surrogatepass") == value else refuse()
    if isinstance(value, float):
        return value if math.isfinite(value) else refuse()
    if isinstance(value, int):
        return value if isinstance(value, bool) else int(value)
    if value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        made = {key_text(key): plain(item) for key, item in value.items()}
        return made if len(made) == len(value) else refuse()
    return refuse()


def key_text(key: Any) -> str:
    if not isinstance(key, (str, int, float, np.generic, type(None))):
        refuse()
    key = plain(key)
    words = {"None": "null", "True": "true", "False": "false"}
    return key if isinstance(key, str) else words.get(repr(key), repr(key))


def strictly(text: str) -> Any:
    """What a strict reader gives: no NaN, and no key twice."""
    assert text.isascii()

    def distinct(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=distinct)


def outcome(value: Any) -> Any:
    """The `repr`, which tells 1 from 1.0, True and -0.0, of what JSON has; None if it has not."""
    try:
        return repr(plain(value))
    except RefusedError:
        return None
