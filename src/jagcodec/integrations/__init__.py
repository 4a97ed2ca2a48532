"""Integrations: one module each, imported by name; and the hook for Ray's workers.

Importing this package imports none of these modules and none of their dependencies.
"""

from __future__ import annotations

import os
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from jagcodec.errors import ArgumentError

__all__ = ["setup"]


def setup() -> None:
    """Make Ray write batches in this wire format, in this process.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations import setup

            setup()  # in this process; the hook calls it in every worker
            ray.init(runtime_env={"worker_process_setup_hook": "jagcodec.integrations.setup"})

    Every TensorDict, jagged tensor, `BatchedDataDict`, `WireBatch` and `DataProto` of verl that
    `ray.put`, a task argument or a result holds, at any depth, is written as a message, with the
    options of `jagcodec.integrations.ray.register` if you called it, and before them those that the
    variable ``JAGCODEC_ENCODE`` names: ``elide``, ``narrow``, or both with a comma between them.
    Types for which you gave Ray a serializer keep it. Calling this twice is harmless;
    `jagcodec.integrations.ray.unregister` undoes it. It imports Ray, but not torch, tensordict or
    verl. If Ray then writes a batch of a version of these that this wire format does not support,
    it raises `ArgumentError`.

    Raises:
        ArgumentError: ``JAGCODEC_ENCODE`` holds another word.
    """
    add_reducers()


@contextmanager
def needed(integration: str, package: str) -> Iterator[None]:
    """If a module that is imported inside is missing, name the package to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{integration} needs {package} (found no module named {error.name!r})", name=error.name
        ) from error


# --- options of `encode` for all processes of a job ---------------------------------------------

VARIABLE = "JAGCODEC_ENCODE"
_WORDS = ("elide", "narrow")  # options that are on or off, and that readers need not know


def options_of_environment() -> dict[str, bool]:
    """The options of `encode` that ``JAGCODEC_ENCODE`` names, for Ray's hook and TransferQueue."""
    text = os.environ.get(VARIABLE, "")
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if word not in _WORDS:
            expected = "expected elide, narrow, or both with a comma between them"
            raise ArgumentError("bad_option", VARIABLE, f"{expected}, found {word!r}")
    return dict.fromkeys(words, True)


# --- reducers for Ray's pickler, found by the name of a type -----------------------------------

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


class _ReducersByName(dict[type, Reducer]):
    """The reducers of `ray`, or of `verl` if verl is imported, loaded with the first such value."""

    # Options of `encode`. Those of `register` take precedence over those of the environment.
    environment_options: Mapping[str, Any] = {}
    registered_options: Mapping[str, Any] = {}

    def __missing__(self, cls: type) -> Reducer:
        package = str(cls.__module__).partition(".")[0]
        if (package, cls.__name__) not in _NAMES:
            raise KeyError(cls)
        integration = "verl" if sys.modules.get("verl.protocol") is not None else "ray"
        try:
            module = import_module(f"jagcodec.integrations.{integration}")
        except Exception as error:
            version = getattr(sys.modules[package], "__version__", "unknown")
            detail = f"expected to write a {cls.__name__} of {package}, found a version ({version})"
            detail += f" where this fails: {type(error).__name__}: {error}; install another one"
            raise ArgumentError("bad_option", "jagcodec.integrations.setup", detail) from error
        options = {**self.environment_options, **self.registered_options}
        reducer: Reducer = module.reducers(**options)[cls]
        return reducer


_reducers_by_name = _ReducersByName()


def _reducer_maps() -> list[MutableMapping[type, Reducer]]:
    """First the reducers of Ray, with those that the user gave it; then those of Python."""
    with needed("jagcodec.integrations.setup", "Ray: pip install 'ray>=2.40'"):
        table: ChainMap[type, Reducer] = import_module("ray.cloudpickle").CloudPickler.dispatch
    return table.maps


def add_reducers(options: Mapping[str, Any] | None = None) -> None:
    """Make Ray use our reducers for types for which it has none; None keeps the options."""
    _reducers_by_name.environment_options = options_of_environment()
    maps = _reducer_maps()
    if not any(each is _reducers_by_name for each in maps):
        maps.insert(1, _reducers_by_name)
    if options is not None:
        _reducers_by_name.registered_options = options


def restore_reducers() -> None:
    """Undo `add_reducers`."""
    if "ray.cloudpickle" in sys.modules:
        maps = _reducer_maps()
        maps[:] = [each for each in maps if each is not _reducers_by_name]
    _reducers_by_name.registered_options = {}
