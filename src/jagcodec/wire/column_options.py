"""What `encode` is told of single columns: which are stored narrow, and how their cells lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from jagcodec._arguments import check_known
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.ragged.inner_dims import moved_first
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.lowered import InnerFirst

Name: TypeAlias = Any
"""A column's name; inside a nested batch a tuple of all of them."""


class ColumnOptions:
    """What was said of single columns, and which columns there were.

    A column is called by its name, and inside a nested batch by those of the columns around it too.
    """

    def __init__(self, narrow: Mapping[Name, bool], outermost: Mapping[Name, int]) -> None:
        self._narrow = narrow
        self._outermost = outermost
        self._names: dict[tuple[str, ...], None] = {}
        self._pool = RowSplitsPool()

    def narrow(self, names: tuple[str, ...], around: bool) -> bool:
        """Whether a column is stored narrow; as the batch `around` it is, if nothing was said."""
        self._names[names] = None
        said: bool | None = _said(self._narrow, names)
        return around if said is None else said

    def lying(self, names: tuple[str, ...], column: Any) -> Any:
        """A column as its cells are to lie."""
        dim = _said(self._outermost, names)
        return column if dim is None else self._inner_first(column, names, dim)

    def check_names(self) -> None:
        """Refuse names that are none of the columns that there were.

        Where there were none at all, as in a message that only says something to a worker, nothing
        could be named.

        Raises:
            ArgumentKeyError: One of them is not.
        """
        if not self._names:
            return
        known = [names if len(names) > 1 else names[0] for names in self._names]
        for option, given in (("narrow", self._narrow), ("outermost", self._outermost)):
            names = (name[0] if type(name) is tuple and len(name) == 1 else name for name in given)
            check_known(names, known, option)

    def _inner_first(self, column: Any, names: tuple[Any, ...], dim: int) -> Any:
        """A jagged column with a dim outermost; any other as it is."""
        path = f"outermost({'.'.join(map(str, names))!r})"
        if isinstance(column, torch.Tensor) and is_jagged(column):
            if column.is_meta:
                return column  # to be refused as ever
            column = view_of(column, path, self._pool)
        elif type(column) is not RaggedView:
            return column
        if column.ragged_dim != 1 or dim >= len(column.shape):
            rows = "(tokens" + f", {', '.join(map(str, column.shape[1:]))})"
            found = f"rows of {rows}" if column.ragged_dim == 1 else "rows ragged in another dim"
            raise ArgumentError(
                "bad_shape",
                path,
                f"expected rows of tokens with an inner dim {dim} (their dim 0 is the tokens), "
                f"found {found}; name another dim, or leave the column out",
            )
        values = moved_first(column, dim)
        shape = tuple(values.shape)
        return InnerFirst(dim, RaggedView(values, values.dtype, shape, 2, None, column.row_splits))


def column_options(narrow: Any, outermost: Any) -> tuple[bool, ColumnOptions | None]:
    """What was said of all columns, and what was said of some.

    Args:
        narrow: True, False, or a mapping of names to either.
        outermost: A mapping of names to inner dims, or None.

    Raises:
        ArgumentError: A dim is not one inside of rows.
        ArgumentTypeError: An argument, a name or a value is of another type.
    """
    if outermost is None and type(narrow) is bool:
        return narrow, None
    every = type(narrow) is bool
    if not every:
        _check(narrow, "narrow", "True, False, or a mapping of names of columns to True or False")
        for name, value in narrow.items():
            if type(value) is not bool:
                raise ArgumentTypeError(
                    "bad_type",
                    f"narrow[{brief(name)}]",
                    f"expected a bool, found {describe(value)}",
                )
    if outermost is not None:
        _check(outermost, "outermost", "None, or a mapping of names of columns to inner dims")
        for name, value in outermost.items():
            path = f"outermost[{brief(name)}]"
            if type(value) is not int:
                raise ArgumentTypeError(
                    "bad_type", path, f"expected an integer, found {describe(value)}"
                )
            if value < 1:
                raise ArgumentError(
                    "bad_option",
                    path,
                    f"expected an inner dim from 1 on (dim 0 is the tokens), found {value}",
                )
    return every and narrow, ColumnOptions({} if every else narrow, outermost or {})


def _check(given: Any, path: str, expected: str) -> None:
    if not isinstance(given, Mapping):
        raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {describe(given)}")
    for name in given:
        names = name if type(name) is tuple and name else (name,)
        if not all(isinstance(part, str) for part in names):
            raise ArgumentTypeError(
                "bad_type",
                path,
                f"expected names of columns, or tuples of names (nested ones), found {brief(name)}",
            )


def _said(given: Mapping[Name, Any], names: tuple[Any, ...]) -> Any:
    """What a mapping says of a column; None where it says nothing."""
    found = given.get(names)
    return given.get(names[0]) if found is None and len(names) == 1 else found
