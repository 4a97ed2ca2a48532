"""`Lowering`: a value to a schema and items, by one table of types.

`Lowering.lower` finds the type of a value in `_HANDLERS`, and calls its handler. The handler makes
the *tree* of the value: a tuple is a node, anything else a document (`Tree` in `items`). Handlers
of containers call `lower_at` for each value in them. All of them share one `ValueWalk`.

    walk              `ValueWalk`: the place of the walk, what it has found, and its errors
    lowering_values   handlers of values of Python and numpy
    lowering_objects  rows of objects
    lowering_columns  handlers of batches and their columns
    lowering_tensors  handlers of tensors and TensorDicts, imported when there is one

This file has the walk with its table, types without a handler, and the tables at the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jagcodec._arguments import result_of
from jagcodec.columns.batch import Batch, ColumnDict, Columns
from jagcodec.errors import JagcodecError
from jagcodec.memory.arrays import is_of_torch
from jagcodec.wire import spec
from jagcodec.wire.documents import TAGS
from jagcodec.wire.items import Tree
from jagcodec.wire.native import NATIVE
from jagcodec.wire.registry import name_for_sending, state_of
from jagcodec.wire.spec import Code, Kind
from jagcodec.wire.write.lowering_columns import (
    COLUMN_HANDLERS,
    lower_columns,
    lower_open_batch,
)
from jagcodec.wire.write.lowering_values import (
    LIST_TYPES,
    ListColumn,
    lower_array,
    lower_bytes,
    lower_dict,
    lower_list,
    lower_list_column,
    lower_scalar,
    lower_set,
    lower_tuple,
)
from jagcodec.wire.write.walk import Handler, ValueWalk, lowering_of_tensors


class Lowering(ValueWalk):
    """One walk over a value, which makes the tree of its schema, items and documents.

    First call `lower`, then `finish`, which also reads cells on devices.
    """

    def lower(self, value: Any) -> Tree:
        """The tree of a value. Its data is added to `items`."""
        kind = type(value)
        if kind in NATIVE:
            return value
        handler = _HANDLERS.get(kind) or _handler_of(kind)
        return self.lower_foreign(value) if handler is None else handler(self, value)

    def lower_foreign(self, value: Any, why: str = "") -> Tree:
        """The tree of the value that `default` returns, or of a pickle; raises if neither works."""
        if self.default is not None:
            if len(self.path) + self._defaults >= spec.MAX_DEPTH:
                detail = (
                    "expected values of default that can be encoded, "
                    f"found none in {spec.MAX_DEPTH} calls"
                )
                raise self.error("too_deep", detail)
            new = result_of(self.default, (value,), "default")
            if new is not value:
                self._defaults += 1
                tree = self.lower(new)
                self._defaults -= 1
                return tree
        if not self._allow_pickle:
            raise self.unsupported(value, why)
        try:
            return [TAGS[Kind.PICKLE], pickle.dumps(value, protocol=5)]
        except Exception as error:  # a __reduce__ may raise anything
            raise self.unsupported(value, f"; pickle failed too: {error}") from error

    def apply_default(self, value: Any) -> Any:
        """The value, or what `default` returns for it if its type has no handler."""
        if self.default is None or type(value) in _HANDLERS or _handler_of(type(value)):
            return value
        return result_of(self.default, (value,), "default")


def _handler_of(kind: type) -> Handler | None:
    """The handler of a type that `_HANDLERS` may lack; None if no type above it has one."""
    if is_of_torch(kind):  # the import adds the types of torch and tensordict
        lowering_of_tensors()
    handler = _HANDLERS.get(kind)
    if handler is not None:
        return handler
    if name_for_sending(kind) is not None:
        return _lower_registered
    return next((handler for base, handler in _HANDLERS_OF_BASES if issubclass(kind, base)), None)


def _lower_registered(walk: ValueWalk, value: Any) -> Tree:
    """The tree of a value whose type has a registered name."""
    name = name_for_sending(type(value))
    try:
        state = state_of(value)
    except JagcodecError:
        raise
    except Exception as error:  # the user's function may raise anything
        why = f": its to_state raises {type(error).__name__}: {error}"
        raise walk.unsupported(value, why) from error
    tree = walk.lower_at("state", state)
    return (Code.USER, name, tree) if type(tree) is tuple else [TAGS[Kind.USER], name, tree]


# --- tables of types -----------------------------------------------------------------------------

# `lowering_tensors` adds types of torch and tensordict to all tables.
_HANDLERS: dict[type, Handler] = {
    dict: lower_dict,
    ColumnDict: lower_dict,
    ListColumn: lower_list_column,
    list: lower_list,
    tuple: lower_tuple,
    bytes: lower_bytes,
    set: lower_set,
    frozenset: lower_set,
    np.ndarray: lower_array,
    np.memmap: lower_array,
    Columns: lower_columns,
}

# For types that `_HANDLERS` lacks and that are not registered: the first base decides.
_HANDLERS_OF_BASES: list[tuple[type, Handler]] = [
    (np.generic, lower_scalar),
    (Batch, lower_open_batch),
]


def add_handlers(
    handlers: Mapping[type, Handler],
    *,
    columns: Mapping[type, Handler],
    bases: Iterable[tuple[type, Handler]],
    lists: Iterable[type],
) -> None:
    """Add handlers of more types.

    Args:
        handlers: Of values.
        columns: Of values that are columns of a batch.
        bases: Of values whose type is a subclass of these.
        lists: Types that are lowered as lists.
    """
    _HANDLERS.update(handlers)
    _HANDLERS.update(dict.fromkeys(lists, lower_list))
    LIST_TYPES.update(lists)
    COLUMN_HANDLERS.update(columns)
    _HANDLERS_OF_BASES.extend(bases)
