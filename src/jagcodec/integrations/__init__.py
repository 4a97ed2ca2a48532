"""Integrations: one module each, imported by name; and the hook for Ray's workers.

Importing this package imports none of these modules and none of their dependencies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

from jagcodec.errors import ArgumentError, brief
from jagcodec.integrations import _reducers

__all__ = ["setup"]

_VARIABLE = "JAGCODEC_NEXT_HOOK"
_HERE = "jagcodec.integrations.setup"

# Next hooks that were called, so that one that calls `setup` in turn is not called again.
_called: set[str] = set()


def setup() -> None:
    """Make Ray write batches in this wire format, in this process.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations import setup

            setup()  # in this process; the hook calls it in every worker
            ray.init(runtime_env={"worker_process_setup_hook": "jagcodec.integrations.setup"})

    Raises:
        ArgumentError: ``JAGCODEC_NEXT_HOOK`` does not name a function that can be imported. Or Ray
            raises it later, when it writes a batch of a version of tensordict or verl that this
            wire format does not support.
        ModuleNotFoundError: Ray is not installed.

    It imports Ray, but neither torch nor tensordict or verl: the types are found by their names
    when Ray writes them, with the default options of `jagcodec.integrations.ray.register` and, in
    a process that imports `verl.protocol`, of `jagcodec.integrations.verl.install`. Types that
    `register` or `install` registered keep their options, as do those for which you gave Ray a
    serializer. Undo it with `jagcodec.integrations.ray.unregister`.

    Ray accepts one ``worker_process_setup_hook`` per job. If you have another one, put its name
    into the environment variable ``JAGCODEC_NEXT_HOOK``, as ``module.function``: `setup` imports
    the module and calls the function, at the end and once per process. Its errors get a note
    with the name of the variable. Calling `setup` twice is harmless.
    """
    _reducers.carry_by_name()
    name = os.environ.get(_VARIABLE)
    if not name or name in _called:
        return
    _called.add(name)
    try:
        _function(name)()
    except Exception as error:
        _called.discard(name)
        error.add_note(f"raised by {_VARIABLE}={brief(name)}, which {_HERE} called")
        raise


def _function(name: str) -> Callable[[], object]:
    """The function of a dotted name."""
    home, _, attribute = name.rpartition(".")
    if not home or not all(part.isidentifier() for part in name.split(".")):
        raise _bad_hook(f"found {brief(name)}")
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home and not home.startswith(f"{error.name}."):
            raise  # not the module that was named, but one that it imports
        raise _bad_hook(f"found no module {brief(error.name)} for {brief(name)}") from error
    if not hasattr(module, attribute):
        raise _bad_hook(f"found no {brief(attribute)} in the module {brief(home)}")
    function: Callable[[], object] = getattr(module, attribute)
    if not callable(function):
        raise _bad_hook(f"found {brief(name)}, a {type(function).__name__}, which is not callable")
    return function


def _bad_hook(found: str) -> ArgumentError:
    return ArgumentError(
        "bad_option",
        f"{_HERE}({_VARIABLE})",
        f"expected module.function, a function that this process can import, {found}; set the "
        "variable to the hook to call next, or unset it",
    )
