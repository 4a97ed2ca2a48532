"""Rows from inference engines: the checks that all engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from jagcodec._arguments import FOREIGN_ERRORS
from jagcodec.errors import ArgumentError, JagcodecError, brief

Row = dict[str, Any]


@contextmanager
def reading_output(path: str, expected: str) -> Iterator[None]:
    """Raise an error that names the sample for anything that is not of the engine's types."""
    try:
        yield
    except JagcodecError:
        raise
    except (AttributeError, LookupError, *FOREIGN_ERRORS) as error:
        detail = f"expected {expected}, found {type(error).__name__}: {error}"
        raise ArgumentError("bad_type", path, f"{detail}; leave out failed requests") from error


def logprob(value: Any, path: str) -> float:
    """A logprob as a float; an error if the value is not a number."""
    if type(value) is not float and not isinstance(value, Real):
        raise ArgumentError("bad_type", path, f"expected a logprob, found {brief(value)}")
    return float(value)


def check_count(count: int, expected: int, path: str, like: str) -> None:
    """Raise an error if there are not as many items as in `like`, which has `expected`."""
    if count != expected:
        detail = f"expected {expected} items like {like}, found {count}"
        raise ArgumentError("bad_length", path, detail)


def same_keys(rows: dict[str, Row]) -> list[Row]:
    """The rows, without keys that are None in every row; an error if only some rows have a key.

    The keys of `rows` are the paths of the samples. Each row gets its own lists.
    """
    for key in next(iter(rows.values()), {}):
        without = [path for path, row in rows.items() if row[key] is None]
        if 0 < len(without) < len(rows):
            detail = f"expected {key} in all samples or in none, found a sample without; ask the "
            detail += "engine for it in every request, or leave out samples that have none"
            raise ArgumentError("row_mismatch", without[0], detail)
    return [
        {key: x.copy() if type(x) is list else x for key, x in row.items() if x is not None}
        for row in rows.values()
    ]
