"""`json_text`: a value as JSON that gives an equal value back, or an error; imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import array_remedy
from jagcodec.errors import ArgumentError, brief, child_path, describe
from jagcodec.memory.arrays import tensor_type
from jagcodec.memory.extents import lists_of
from jagcodec.produce.row_kinds import cells_tensors
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.spec import MAX_DEPTH

_Steps = tuple[Any, ...]
"""The way to a value: the steps to its container, and then the index or the key in it."""

_dumps = json.JSONEncoder(allow_nan=False, check_circular=False).encode

_quoted = json.encoder.encode_basestring_ascii
_WORDS = {None: "null", True: "true", False: "false"}
_SCALARS = (str, int, float, type(None))  # a bool is an int
_NUMBERS = frozenset((int, float, bool, type(None)))
_JOINED = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""A pair of lone surrogates: JSON escapes each, and a reader makes one character of both."""


def json_text(value: Any, place: str, remedy: str) -> str:
    """A value as JSON; an ArgumentError names the place, the path in the value, and the remedy.

    Numbers, bools and text of numpy become those of Python. Arrays, tensors and tuples become
    lists, and keys of dicts become text. The JSON is ASCII.
    """
    try:
        return _text(value, (), MAX_DEPTH)
    except _NotJsonError as error:
        path = "$"
        for step in error.steps:
            path = f"{path}[{step}]" if type(step) is int else child_path(path, step.key)
        where = place if path == "$" else f"{place}, {path}"
        detail = f"expected {error.expected}, found {error.found}; {remedy}"
        raise ArgumentError("bad_type", where, detail) from error


class _JsonKey:
    """A step of a path that is a key, and not an index."""

    def __init__(self, key: Any) -> None:
        self.key = key


class _NotJsonError(Exception):
    """Something in a value that JSON does not have."""

    def __init__(self, expected: str, found: str, above: _Steps) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found
        self.steps: list[Any] = []
        while above:
            above, step = above
            self.steps.insert(0, step)


def _text(value: Any, above: _Steps, levels: int) -> str:
    kind = type(value)
    if issubclass(kind, _SCALARS):
        return _scalar(value, above)
    if issubclass(kind, np.generic):
        return _scalar(_plain(value, above), above)
    if not levels:
        raise _NotJsonError(f"at most {MAX_DEPTH} levels", "more", above)
    if issubclass(kind, np.ndarray):  # it counts as a level, because it may hold itself
        return _text(_plain(value, above), above, levels - 1)
    # Call the methods of the base class: those of a subclass may do anything.
    if issubclass(kind, (list, tuple)):
        base: Any = list if issubclass(kind, list) else tuple
        return _list([*base.__iter__(value)], above, levels - 1)
    if issubclass(kind, dict):
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        return _object([*base.items(value)], above, levels - 1)
    if issubclass(kind, tensor_type()):
        return _text(_array_of(value, above), above, levels - 1)
    raise _NotJsonError("a value that JSON has", brief(value), above)


def _scalar(value: Any, above: _Steps) -> str:
    if issubclass(type(value), str):
        if _JOINED.search(value):
            found = f"{brief(value)} with two lone surrogates that JSON joins"
            raise _NotJsonError("text that JSON gives back", found, above)
        return _quoted(value)
    if value is None or issubclass(type(value), bool):
        return _WORDS[value]
    with suppress(ValueError):  # the number has too many digits
        if issubclass(type(value), int):
            return int.__repr__(value)
        if math.isfinite(value):
            return float.__repr__(value)
    raise _NotJsonError("a number that JSON has", brief(value), above)


def _list(items: list[Any], above: _Steps, levels: int) -> str:
    if _NUMBERS.issuperset(map(type, items)):
        with suppress(ValueError):  # one of them is not JSON: the loop below names it
            return _dumps(items)
    texts = (_text(item, (above, i), levels) for i, item in enumerate(items))
    return f"[{', '.join(texts)}]"


def _object(items: list[tuple[Any, Any]], above: _Steps, levels: int) -> str:
    texts: dict[str, str] = {}
    keys: dict[str, Any] = {}
    for key, item in items:
        name = _name(key, above)
        if name in texts:
            found = f"{brief(keys[name])} and {brief(key)}"
            raise _NotJsonError("keys that differ as text", found, above)
        keys[name], texts[name] = key, _text(item, (above, _JsonKey(key)), levels)
    return f"{{{', '.join(f'{name}: {text}' for name, text in texts.items())}}}"


def _name(key: Any, above: _Steps) -> str:
    plain = _plain(key, above) if issubclass(type(key), np.generic) else key
    if not issubclass(type(plain), _SCALARS):
        raise _NotJsonError("keys that are text, numbers, bools or None", brief(key), above)
    text = _scalar(plain, (above, _JsonKey(key)))
    return text if issubclass(type(plain), str) else f'"{text}"'


def _plain(value: Any, above: _Steps) -> Any:
    """A scalar of numpy as Python's, or an array as lists of them."""
    is_array, dtype = isinstance(value, np.ndarray), value.dtype
    remedy = array_remedy(value) if is_array else ""
    is_json = dtype.kind in ("biufUO" if is_array else "biufU")
    if not is_json or remedy or (dtype.kind == "f" and dtype.itemsize > 8):
        found = f"{describe(value)} of dtype {dtype}" + (f"; {remedy}" if remedy else "")
        raise _NotJsonError("an array or a scalar that JSON has", found, above)
    if not value.size and lists_of(value.shape) > DEFAULT_LIMITS.objects:
        # Empty lists come from no bytes, so a short message could make any number of them.
        found = f"an array of shape {brief(value.shape)}"
        raise _NotJsonError("an array of fewer empty lists", found, above)
    return value.tolist()


def _array_of(tensor: Any, above: _Steps) -> npt.NDArray[Any]:
    """The numbers of a tensor. Because there is a tensor, torch is imported already."""
    from jagcodec.memory.plain_types import check_rectangle
    from jagcodec.memory.tensor_bytes import number_array

    try:
        check_rectangle(tensor, "")
        return number_array(tensor)
    except (TypeError, RuntimeError) as error:  # also if numpy has no numbers of its dtype
        found = str(cells_tensors().described_tensor(tensor))
        raise _NotJsonError("a tensor that JSON has", found, above) from error
