"""What `encode` is told of single columns: which are stored narrow, and how their cells lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.ragged.inner_dims import moved_first
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.lowered import InnerFirst

Name: TypeAlias = Any
"""A column's name; inside a nested batch a tuple of all of them."""


class ByColumn:
    """The columns of a value during one walk over it: which is which, and what was said of it.

    A column is called by its names from the outermost TensorDict on, wherever that lies.
    """

    def __init__(self, narrow: Mapping[Name, bool], outermost: Mapping[Name, int]) -> None:
        self._narrow = narrow
        self._outermost = outermost
        self._base: list[Any] | None = None
        self._pool = RowSplitsPool()
        # From which item of which list on items are stored narrow, or no longer.
        self.marks: list[tuple[list[Any], int, bool]] = []

    def column(self, path: list[Any], items: list[Any], name: str, column: Any) -> Any:
        """A column that comes next in the batch at `path`, as it is to be lowered."""
        if self._base is None or path[: len(self._base)] != self._base:
            self._base = path.copy()
        names = (*path[len(self._base) :], name)
        self._mark(items, names)
        dim = _said(self._outermost, names)
        return column if dim is None else self._inner_first(column, names, dim)

    def end(self, path: list[Any], items: list[Any]) -> None:
        """See that what follows the batch at `path` is no part of its last column."""
        base = self._base
        inside = base is not None and path[: len(base)] == base
        self._mark(items, tuple(path[len(base) :]) if inside and base is not None else ())

    def narrow_items(self, items: Sequence[Any], of: list[Any]) -> frozenset[int]:
        """The indices of the items that are stored narrow, which were marked in the list `of`."""
        marks = [(at, narrow) for marked, at, narrow in self.marks if marked is of]
        ends = [*(at for at, _ in marks[1:]), len(items)]
        spans = zip(marks, ends, strict=False)
        return frozenset(i for (at, narrow), end in spans if narrow for i in range(at, end))

    def _mark(self, items: list[Any], names: tuple[Any, ...]) -> None:
        if self._narrow:
            # What is said of a batch holds for the columns in it of which nothing is said.
            said = (_said(self._narrow, names[:end]) for end in range(len(names), 0, -1))
            narrow = next((value for value in said if value is not None), False)
            self.marks.append((items, len(items), narrow))

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


def by_column(narrow: Any, outermost: Any) -> tuple[bool, ByColumn | None]:
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
    return every and narrow, ByColumn({} if every else narrow, outermost or {})


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
