"""Reducers for Ray's pickler, found by the name of a type.

This module imports neither torch nor tensordict, Ray or verl.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from importlib import import_module
from typing import Any

from jagcodec.errors import ArgumentError
from jagcodec.integrations._needed import needed

Reducer = Callable[[Any], Any]

# The types that are written in this wire format, by their package and name.
_NAMES = {
    ("tensordict", "TensorDict"),
    ("tensordict", "LazyStackedTensorDict"),
    ("torch", "NestedTensor"),
    ("jagcodec", "BatchedDataDict"),
    ("jagcodec", "WireBatch"),
    ("verl", "DataProto"),
}


class _ByName(dict[type, Reducer]):
    """The reducers of `ray`, or of `verl` if verl is imported, loaded with the first such value."""

    options: Mapping[str, Any] = {}  # of `encode`

    def __missing__(self, cls: type) -> Reducer:
        if (str(cls.__module__).partition(".")[0], cls.__name__) not in _NAMES:
            raise KeyError(cls)
        theirs = "verl" if sys.modules.get("verl.protocol") is not None else "ray"
        try:
            ours = import_module(f"jagcodec.integrations.{theirs}")
        except Exception as error:
            raise _failed(cls, error) from error
        reducer: Reducer = ours.reducers(**self.options)[cls]
        return reducer


_by_name = _ByName()


def _maps() -> list[MutableMapping[type, Reducer]]:
    """Ray's own reducers, and with them those of the user; then those of Python."""
    with needed("jagcodec.integrations.setup", "Ray: pip install 'ray>=2.40'"):
        table: ChainMap[type, Reducer] = import_module("ray.cloudpickle").CloudPickler.dispatch
    return table.maps


def carry(options: Mapping[str, Any] | None = None) -> None:
    """Make Ray use these reducers for types that have none of Ray's; None keeps their options."""
    maps = _maps()
    if not any(each is _by_name for each in maps):
        maps.insert(1, _by_name)
    if options is not None:
        _by_name.options = options


def restore_reducers() -> None:
    """Undo `carry`."""
    if "ray.cloudpickle" in sys.modules:
        maps = _maps()
        maps[:] = [each for each in maps if each is not _by_name]
    _by_name.options = {}


def _failed(cls: type, error: Exception) -> ArgumentError:
    package = cls.__module__.partition(".")[0]
    version = getattr(sys.modules[package], "__version__", "unknown")
    return ArgumentError(
        "bad_option",
        "jagcodec.integrations.setup",
        f"expected to write a {cls.__name__} of {package}, found a version ({version}) where this "
        f"fails: {type(error).__name__}: {error}; install another version, or remove "
        "jagcodec.integrations.setup from worker_process_setup_hook",
    )
