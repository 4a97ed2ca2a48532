"""`pass_on`: raises again errors of a read that are not the fault of the message.

They come from outside: from the machine, or from the caller's code.
"""

from __future__ import annotations

import sys
import traceback
import types


def pass_on(error: Exception) -> None:
    """Raise an error that is not a fault of the message: of the machine, or of other code."""
    if isinstance(error, ImportError):  # a module is imported at its first use
        raise error
    outside = _from_outside(error)
    if outside is not None:
        raise outside
    # By words and not by type: reading a header must not import torch.
    if any(words in str(error) for words in _NO_MEMORY):
        raise MemoryError(f"{error!s:.200}") from error


_NO_MEMORY = ("you tried to allocate", "out of memory")
"""What torch says where the host or a device has too little memory."""


def _from_outside(error: BaseException | None) -> BaseException | None:
    """The error in a chain that code outside the readers raised; None if readers raised all.

    Python calls a signal handler in the function that it interrupts. A library may catch the error
    of the handler, and raise another one.
    """
    seen: list[int] = []
    while error is not None and id(error) not in seen:
        seen.append(id(error))
        packages = [_package_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
        # An error that was handled before the message was read began in the caller's code.
        if packages and packages[0] in _READERS and not _READERS.issuperset(packages):
            return error
        error = error.__cause__ or error.__context__
    return None


def _package_of(frame: types.FrameType) -> str:
    module: str = frame.f_globals.get("__name__") or "builtins"
    return module.partition(".")[0]


_READERS = sys.stdlib_module_names | {
    *("builtins", "jagcodec", "torch", "tensordict", "pyvers", "numpy", "msgpack", "zstandard")
}
"""The packages whose code runs when a message is read."""
