"""Reducers for Ray's pickler, registered at once or when a type is imported.

This module imports neither torch nor tensordict, Ray or verl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jagcodec.errors import ArgumentError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

Reducer = Callable[[Any], Any]

# --- the pickler ---------------------------------------------------------------------------------

_PICKLER = "ray.cloudpickle"

# What Ray did with these types before: None where it had no reducer of its own.
_before: dict[type, Reducer | None] = {}


def carry(reducers: Mapping[type, Reducer]) -> None:
    """Make Ray use these reducers for values of these types, until `restore_reducers`."""
    dispatch = import_module(_PICKLER).CloudPickler.dispatch
    for cls, reducer in reducers.items():
        _before.setdefault(cls, dispatch.get(cls))
        dispatch[cls] = reducer


def restore_reducers() -> None:
    """Undo `carry` and `start`."""
    global _finder
    if _finder is not None:
        _finder.stop()
        _finder = None
    for cls, reducer in _before.items():
        dispatch = import_module(_PICKLER).CloudPickler.dispatch
        if reducer is None:
            dispatch.pop(cls, None)
        else:
            dispatch[cls] = reducer
    _before.clear()


# --- types, when they are imported ---------------------------------------------------------------

# The types that are written in this wire format, by the module that has them when it is imported.
_TYPES: dict[str, tuple[str, ...]] = {
    _PICKLER: (),
    "tensordict": ("TensorDict", "LazyStackedTensorDict"),
    "jagcodec.batch.batched_data_dict": ("BatchedDataDict",),
    "jagcodec.wire.wire_batch": ("WireBatch",),
    "verl.protocol": ("DataProto",),
}
_types: list[type] = []
_finder: _Finder | None = None


def start() -> None:
    """Register types that are imported, and others when they are."""
    global _finder
    if _finder is None:
        _finder = _Finder()
    for name in sorted(_finder.names):
        if sys.modules.get(name) is not None:
            import_module(name)  # waits for a thread that is importing it
            _finder.imported(name)


def _register(name: str) -> None:
    """Register the types of a module that was imported."""
    module = sys.modules[name]
    try:
        _types.extend(getattr(module, attribute) for attribute in _TYPES[name])
        if name == "tensordict":  # which imports all that this needs
            _types.append(import_module("jagcodec.ragged.nested").NESTED_TENSOR)
        if sys.modules.get(_PICKLER) is not None:
            carry({cls: _reduced for cls in _types if cls not in _before})
    except Exception as error:
        raise _failed(name, error) from error


def _reduced(value: Any) -> Any:
    """The reducer of all types: that of `register`, or of `install` if verl is imported.

    Their modules are imported here and not with the types. A module that is being imported may be
    one that they import, or that imports them.
    """
    theirs = "verl.protocol" if sys.modules.get("verl.protocol") is not None else _PICKLER
    try:
        ours = import_module(f"jagcodec.integrations.{theirs.partition('.')[0]}")
    except Exception as error:
        raise _failed(theirs, error) from error
    return ours.BY_DEFAULT[type(value)](value)


def _failed(name: str, error: Exception) -> ArgumentError:
    """Not an ImportError: programs read that as a library that is not installed."""
    version = getattr(sys.modules[name.partition(".")[0]], "__version__", "unknown")
    return ArgumentError(
        "bad_option",
        "jagcodec.integrations.setup",
        f"expected to register the types of {name} with Ray, found a version ({version}) where "
        f"this fails: {type(error).__name__}: {error}; install another version, or remove "
        "jagcodec.integrations.setup from worker_process_setup_hook",
    )


# --- imports -------------------------------------------------------------------------------------


class _Finder:
    """Finds modules as the finders after it do, and calls `_register` when they are imported."""

    def __init__(self) -> None:
        self.names = set(_TYPES)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        finders = sys.meta_path
        if name not in self.names or self not in finders:
            return None
        # Those before this one have been asked, or are asking.
        for finder in finders[finders.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, partial(self.imported, name))
                    spec.loader = loader
                return spec
        return None

    def imported(self, name: str) -> None:
        if name in self.names:
            _register(name)
            self.names.discard(name)
        if not self.names:
            self.stop()

    def stop(self) -> None:
        self.names.clear()
        # In a new list, because other threads may be iterating over this one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


class _Loader:
    """A loader that calls `then` when the module is loaded; otherwise the one it wraps."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module shows its own loader, also while it runs.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()
