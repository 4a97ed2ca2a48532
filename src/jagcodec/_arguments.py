"""Checks of arguments: columns, names, counts and options."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, brief, describe

_STRING = frozenset((str,))
_NO_NAMES: frozenset[Any] = frozenset()
_MOST_NAMED = 8


def check_fields(fields: Any, path: str) -> None:
    """Refuse anything but a dict of names to columns."""
    if type(fields) is dict and _STRING.issuperset(map(type, fields)):
        return
    # By items, because a TensorDict iterates over its rows.
    pairs = fields.items() if isinstance(fields, Mapping) else [(None, None)]
    if not all(isinstance(name, str) for name, _ in pairs):
        detail = f"expected a dict of names to columns, found {describe(fields)}"
        keys = " with keys that are not strings" if isinstance(fields, Mapping) else ""
        raise ArgumentTypeError("bad_type", path, detail + keys)


def name_set(names: Any, path: str) -> frozenset[Any]:
    """The names that an argument holds, in no order."""
    return _NO_NAMES if names == () else _names_in(names, path, frozenset)


def name_list(names: Any, path: str) -> list[Any]:
    """The names that an argument holds, each once, in their order."""
    return [*_names_in(names, path, dict.fromkeys)]


def _names_in(names: Any, path: str, collect: Callable[[Any], Any]) -> Any:
    if isinstance(names, str):
        detail = f"expected names, found the string {names!r}; put it in a list"
        raise ArgumentTypeError("bad_type", path, detail)
    try:
        return collect(names)
    except TypeError as error:
        raise ArgumentTypeError("bad_type", path, f"expected names, found {error}") from error


def known_names(names: Any, columns: Iterable[str], path: str) -> list[str]:
    """The names that an argument holds, in their order, which must be those of columns."""
    listed = name_list(names, path)
    check_known(listed, columns, path)
    return listed


def check_known(names: Iterable[Any], columns: Iterable[Any], path: str) -> None:
    """Refuse names that are not those of columns."""
    # Of a batch of many columns, names may be asked for one by one.
    known = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise unknown_name(min(unknown, key=str), known, path)


def unknown_name(name: Any, columns: Iterable[str], path: str) -> ArgumentKeyError:
    """The error of a name that is not that of a column; a stranger may have named these."""
    listed = list(columns)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    named = ", ".join(map(brief, listed[:_MOST_NAMED])) or "no column"
    detail = f"expected one of {named}{more}, found {brief(name)}"
    return ArgumentKeyError("no_such_field", f"{path}({brief(name)})", detail)


def check_options(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse names of options that a function does not have."""
    for name in given:
        if name not in known:
            expected = f"expected one of {', '.join(sorted(known))}, found {brief(name)}"
            raise ArgumentKeyError("bad_option", where, expected)


def check_rectangle(value: Any, path: str) -> None:
    """Refuse anything but a strided tensor that is not nested."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        detail = f"expected a padded (strided) tensor, found {describe(value)}"
        raise ArgumentTypeError("bad_type", path, detail)
    if value.is_quantized:
        detail = f"expected a plain dtype, found {value.dtype}; dequantise it first"
        raise ArgumentTypeError("bad_dtype", path, detail)


def whole_number(number: Any, least: int, path: str, expected: str = "") -> int:
    """An integer of `least` or more, of any type that counts as one."""
    try:
        whole = operator.index(number)
    except TypeError:
        whole = least - 1
    if whole < least:
        detail = f"expected {expected or f'{least} or more'}, found {brief(number)}"
        raise ArgumentError("bad_option", path, detail)
    return whole


def check_option(value: Any, options: tuple[str, ...], path: str) -> None:
    """Refuse anything but one of a few words."""
    if value not in options:
        detail = f"expected one of {', '.join(map(repr, options))}, found {value!r}"
        raise ArgumentError("bad_option", path, detail)


def usable_device(device: torch.device | str | None, path: str) -> torch.device | None:
    """The device, if tensors can be put there; None stays None."""
    if device is None:
        return None
    try:
        if str(device) == "meta":
            return torch.device("meta")
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        detail = f"expected a device of this machine, found {device!r}: {error}"
        raise ArgumentError("bad_option", path, detail) from error
