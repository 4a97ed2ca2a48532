"""Checks of arguments without tensors: names, mappings, numbers, words, arrays and functions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec._dependencies import module_with_torch
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    JagcodecError,
    brief,
    describe,
)

_STRING = frozenset((str,))
_NO_NAMES: frozenset[Any] = frozenset()
_MOST_NAMED = 8
_MOST_COMPARED = 1000  # names, to find those that are like an unknown one
_LONGEST_COMPARED = 60  # characters of such a name
_MOST_SEARCHED = 4  # levels of lists
_LARGEST = (1 << 63) - 1

FOREIGN_ERRORS = (TypeError, ValueError, RuntimeError, MemoryError, OverflowError)
"""What Python, numpy and torch raise for an object that is not what it seems to be."""


# --- mappings and lists ------------------------------------------------------------------------


def mapping_of(value: Any, path: str, expected: str) -> dict[Any, Any]:
    """A caller's mapping as a plain dict; a plain dict is returned itself."""
    if type(value) is dict:
        return value
    detail = f"expected {expected}, found {describe(value)}"
    if isinstance(value, Mapping):
        try:
            # Ask for items, because a TensorDict iterates over its rows.
            return {name: item for name, item in value.items()}  # noqa: C416 - see above
        except (TypeError, ValueError) as error:
            detail += " whose items are not pairs"
            raise ArgumentTypeError("bad_type", path, detail) from error
    raise ArgumentTypeError("bad_type", path, detail)


def named_columns(fields: Any, path: str, what: str = "columns") -> dict[str, Any]:
    """A caller's columns, or other values, by name: as `mapping_of`, and with strings as keys."""
    columns = mapping_of(fields, path, f"a dict of names to {what}")
    if not _STRING.issuperset(map(type, columns)):
        for name in columns:
            if not isinstance(name, str):
                wrong = f"{describe(fields)} with keys that are not strings"
                detail = f"expected a dict of names to {what}, found {wrong}"
                raise ArgumentTypeError("bad_type", path, detail)
    return columns


def items_of(values: Any, path: str, expected: str) -> list[Any]:
    """The items of a caller's list, or of another iterable that is not text."""
    try:
        if not isinstance(values, (str, bytes)):
            # Use an iterator, because a subclass of list may lie about its length.
            return list(iterator_of(values))
    except FOREIGN_ERRORS as error:
        detail = f"expected {expected}, found {describe(values)}"
        raise ArgumentTypeError("bad_type", path, detail) from error
    raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {brief(values)}")


def iterator_of(values: Any) -> Iterator[Any]:
    """An iterator; TypeError for an object that only has items by index.

    In tensordict 0.10 a NonTensorData has an item at every index, so reading it would not end.
    """
    if not isinstance(values, Iterable):
        raise TypeError(f"{type(values).__name__} is not iterable")
    return iter(values)


def array_of(values: Any) -> npt.NDArray[Any]:
    """`numpy.asarray`; as `iterator_of`, TypeError for items by index alone, also in a list."""
    level: Sequence[Any] = (values,)
    for _ in range(_MOST_SEARCHED):
        kinds = set(map(type, level))
        for kind in kinds:
            if hasattr(kind, "__getitem__") and not issubclass(kind, (Iterable, np.generic)):
                raise TypeError(f"{kind.__name__} is not iterable")
        if not any(issubclass(kind, (list, tuple)) for kind in kinds):
            break
        level = [*chain(*(item for item in level if isinstance(item, (list, tuple))))]
    return np.asarray(values)


def named_item(values: Any, key: str | tuple[str, ...]) -> Any:
    """What nested mappings hold for a column; None if they lack it."""
    for name in (key,) if isinstance(key, str) else key:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


# --- names -------------------------------------------------------------------------------------


def name_set(names: Any, path: str) -> frozenset[Any]:
    """The names that an argument holds, as a set."""
    return _NO_NAMES if type(names) is tuple and not names else _names_in(names, path, frozenset)


def name_list(names: Any, path: str) -> list[Any]:
    """The names that an argument holds, each once, in their order."""
    return [*_names_in(names, path, dict.fromkeys)]


def _names_in(names: Any, path: str, collect: Callable[[Any], Any]) -> Any:
    if isinstance(names, (str, bytes)):
        detail = f"expected names, found the string {brief(names)}; put it in a list"
        raise ArgumentTypeError("bad_type", path, detail)
    try:
        collected = collect(iterator_of(names))
    except FOREIGN_ERRORS as error:
        detail = f"expected names, found {describe(names)}"
        raise ArgumentTypeError("bad_type", path, detail) from error
    check_names(collected, path)
    if _STRING.issuperset(map(type, collected)):
        return collected
    return collect(map(key_of, collected))


def key_of(name: Any) -> Any:
    """The key of a column that an argument names: as in tensordict, ``("ids",)`` is "ids"."""
    return name[0] if type(name) is tuple and len(name) == 1 else name


def values_by_key(values: dict[Any, Any], path: str) -> dict[Any, Any]:
    """Values by the names of columns, as an argument holds them, by the keys of the columns."""
    if _STRING.issuperset(map(type, values)):
        return values
    keyed = {key_of(name): value for name, value in values.items()}
    if len(keyed) < len(values):
        twice = next(key for key in keyed if key in values and (key,) in values)
        detail = f"expected one value for each column, found two for {brief(twice)}"
        raise ArgumentError("conflict", path, detail)
    return keyed


def check_names(names: Iterable[Any], path: str) -> None:
    """Refuse what is not a name of a column: a string, or for a nested batch a tuple of strings."""
    if not _STRING.issuperset(map(type, names)):
        for name in names:
            parts = name if type(name) is tuple and name else (name,)
            if not all(isinstance(part, str) for part in parts):
                raise ArgumentTypeError("bad_type", path, f"expected names, found {brief(name)}")


def check_name(name: Any, path: str) -> None:
    """Refuse what is not a string as the name of one column."""
    if not isinstance(name, str):
        detail = f"expected the name of a column, found {describe(name)}"
        raise ArgumentTypeError("bad_type", path, detail)


def known_names(names: Any, columns: Iterable[str], path: str) -> list[str]:
    """The names that an argument holds, in their order; each must be the name of a column."""
    listed = name_list(names, path)
    check_known(listed, columns, path)
    return listed


def check_known(names: Iterable[Any], columns: Iterable[Any], path: str) -> None:
    """Refuse names that no column has."""
    # Do not copy a mapping: callers check the names of a large batch one by one.
    known = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise unknown_name(min(unknown, key=brief), known, path)


def unknown_name(name: Any, columns: Iterable[str], path: str) -> ArgumentKeyError:
    """The error for a name that no column has. A stranger may have named the columns."""
    listed = list(columns)
    if len(listed) > _MOST_NAMED:
        listed = [*dict.fromkeys([*_nearest_names(name, listed), *listed])]
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    first = ", ".join(map(brief, listed[:_MOST_NAMED])) or "no column"
    detail = f"expected one of {first}{more}, found {brief(name)}"
    return ArgumentKeyError("no_such_field", f"{path}({brief(name)})", detail)


def _nearest_names(name: Any, columns: Sequence[Any]) -> list[Any]:
    """The columns whose names look most like this one, the nearest first; there may be none."""
    from difflib import get_close_matches  # imported here, because only errors need it

    # Compare only so many short names, because a stranger may have chosen them.
    names: dict[str, Any] = {}
    for column in columns[:_MOST_COMPARED]:
        names.setdefault(_text_of_name(column), column)
    return [names[near] for near in get_close_matches(_text_of_name(name), names)]


def _text_of_name(name: Any) -> str:
    """The start of a name as one text: in a nested batch, its parts are joined with dots."""
    parts = name if type(name) is tuple else (name,)
    texts = (part[:_LONGEST_COMPARED] for part in parts if isinstance(part, str))
    return ".".join(texts)[:_LONGEST_COMPARED]


def check_laid_out(
    name: Any, columns: Iterable[Any], how: str, path: str, *, name_in_detail: bool = True
) -> None:
    """Refuse the name of a column that is not laid out, `how` being "padded" or "packed".

    `columns` are all that are. Leave the name out of the detail if the path has it already.
    """
    if name not in columns:
        detail = f"expected a column that is {how}, one of {[*columns]!r:.200}"
        detail += f", found {brief(name)}" if name_in_detail else ""
        raise ArgumentKeyError("no_such_field", path, detail)


def check_new_name(name: str, columns: Iterable[str], path: str, remedy: str) -> None:
    """Refuse a name for a new column that another column has; `remedy` gives it another name."""
    if name in columns:
        raise ArgumentError("conflict", path, f"expected no column {name!r}, found one; {remedy}")


def check_options(options: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Refuse names of options that a function does not have."""
    for name in options:
        if name not in allowed:
            detail = f"expected one of {', '.join(sorted(allowed))}, found {brief(name)}"
            raise ArgumentKeyError("bad_option", where, detail)


# --- numbers, flags and words ------------------------------------------------------------------


def int_or_none(number: Any) -> int | None:
    """An integer of any type as an int; None for any other value, such as a bool."""
    if type(number) is int:
        return number
    if isinstance(number, bool) or "bool" in str(getattr(number, "dtype", "")):
        return None
    try:
        return operator.index(number)
    except FOREIGN_ERRORS:  # a tensor may have several cells, or no values
        return None


def require_int(number: Any, least: int, path: str, expected: str = "") -> int:
    """A number as an int of `least` or more; an error for any other value."""
    whole = number if type(number) is int else int_or_none(number)
    if whole is None or not least <= whole <= _LARGEST:
        large = whole is not None and whole > _LARGEST
        expected = "less than 2**63" if large else expected or f"{least} or more"
        detail = f"expected {expected}, found {brief(number)}"
        raise ArgumentError("bad_option", path, detail)
    return whole


def require_flag(value: Any, path: str) -> bool:
    """A caller's True or False, or numpy's; an error for any other value."""
    if not isinstance(value, (bool, np.bool_)):
        detail = f"expected True or False, found {brief(value)}"
        raise ArgumentTypeError("bad_type", path, detail)
    return bool(value)


def check_option(value: Any, options: tuple[str, ...], path: str) -> None:
    """Refuse anything but one of a few words."""
    if not isinstance(value, str) or value not in options:
        detail = f"expected one of {', '.join(map(repr, options))}, found {brief(value)}"
        raise ArgumentError("bad_option", path, detail)


# --- arrays ------------------------------------------------------------------------------------

ARRAY_TYPES = frozenset((np.ndarray, np.memmap))
"""The types of plain arrays. What another subclass adds, such as a mask, would be lost."""

_ARRAY_REMEDIES = {
    "MaskedArray": "call .filled(fill) first",
    "recarray": "make a dict of its fields",
    "ndarray": "call numpy.asarray(x) first, which keeps the values alone",
}
"""What to do with other arrays, by the name of the class, or of its nearest base listed here."""


def array_remedy(array: npt.NDArray[Any]) -> str:
    """What to do with an array that is not plain; empty if it is."""
    kind = type(array)
    if kind in ARRAY_TYPES:
        return ""
    return next(_ARRAY_REMEDIES[b.__name__] for b in kind.__mro__ if b.__name__ in _ARRAY_REMEDIES)


def check_array(array: npt.NDArray[Any], path: str) -> None:
    """Refuse an array that is not plain."""
    remedy = array_remedy(array)
    if remedy:
        name = type(array).__name__
        detail = f"expected an array whose values can be read, found a {name}; {remedy}"
        raise ArgumentTypeError("bad_type", path, detail)


def host_array(value: Any, path: str, expected: str) -> npt.NDArray[Any]:
    """A caller's tensor, array or list as an array on the host, aliased if possible."""
    plain, tensor = value, getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(value, tensor):
        plain = module_with_torch("memory.plain_types", path).host_tensor(value, path)
    elif isinstance(value, np.ndarray):
        check_array(value, path)
    try:
        return plain.numpy() if isinstance(plain, tensor) else array_of(plain)
    except FOREIGN_ERRORS as error:  # lists differ in length, or numpy lacks the dtype or layout
        detail = f"expected {expected}, found {describe(value)}"
        raise ArgumentTypeError("bad_type", path, detail) from error


# --- functions ---------------------------------------------------------------------------------


def check_function(value: Any, path: str, expected: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {brief(value)}")


def result_of(function: Callable[..., Any], arguments: Iterable[Any], path: str) -> Any:
    """What a caller's function returns. Its errors pass through, except for a TypeError.

    Python raises a TypeError also if the function takes other arguments.
    """
    try:
        return function(*arguments)
    except JagcodecError:
        raise
    except TypeError as error:
        detail = f"expected a function that takes these arguments, found {describe(function)}: "
        raise ArgumentTypeError("bad_type", path, f"{detail}{error!s:.200}") from error
