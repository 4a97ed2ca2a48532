"""The hot loop: copies ragged rows end to end or into a rectangle.

A *row* is a run of cells, and a *cell* is everything under one index of dim 0. The functions move
bytes and know no dtype. CPU memory has two backends:

    compiled  the C extension of this package: one memcpy per row, several threads, no GIL
    numpy     the same loop in Python, if the extension was not built

`torch_ops` copies tensors on accelerators, and those that autograd follows, by index. The
environment variable ``JAGCODEC_ROWCOPY`` or `use_backend` chooses a backend.

Starts, lengths and left pads are int64 arrays with one number per row, which callers have checked.
The compiled backend checks them again against the buffers: a wrong one would crash it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.tensor_bytes import IntArray, as_bytes
from jagcodec.rowcopy import numpy_kernel
from jagcodec.rowcopy.tasks import Copy, Ends, Kernel, Pad, Starts, numbers, rows_only

__all__ = [
    "Backend",
    "Copy",
    "Ends",
    "Name",
    "Pad",
    "Starts",
    "backend",
    "copy_all",
    "ends",
    "numbers",
    "pad_all",
    "rows_only",
    "use_backend",
]

Name = Literal["compiled", "numpy"]

_KERNELS: dict[str, Kernel] = {"numpy": numpy_kernel}
_missing: str | None = None
try:
    import jagcodec.rowcopy._kernel as _kernel  # raises "no module" if it was not built
except ImportError as _error:
    _missing = str(_error)
else:
    _KERNELS["compiled"] = _kernel


class Backend(NamedTuple):
    """What copies rows in CPU memory."""

    name: Name
    missing: str | None  # why the compiled backend could not be imported


def backend() -> Backend:
    """Return the backend in use, and why the compiled one could not be imported, if it is so.

    Example:
        >>> from jagcodec import rowcopy
        >>> rowcopy.backend().name in ("compiled", "numpy")
        True
    """
    return Backend(_name, _missing)


def use_backend(name: Name) -> Name:
    """Choose the backend for CPU memory in this process.

    Example:
        >>> from jagcodec import rowcopy
        >>> before = rowcopy.use_backend("numpy")
        >>> rowcopy.use_backend(before)
        'numpy'

    Args:
        name: ``"compiled"`` or ``"numpy"``.

    Returns:
        The name of the backend that was in use before, so that it can be restored.

    Raises:
        ArgumentError: There is no backend of this name, or it could not be imported.
    """
    global _name, _active
    former, _name = _name, _checked(name, "use_backend(name)")
    _active = _KERNELS[_name]
    return former


def _checked(name: str, where: str) -> Name:
    if name in _KERNELS:
        return cast(Name, name)
    found = repr(name)
    if name == "compiled":
        found += (
            f", which cannot be imported ({_missing}); install a C compiler and install jagcodec "
            "again from source, or choose 'numpy'"
        )
    raise ArgumentError(
        "bad_option", where, f"expected one of {', '.join(map(repr, _KERNELS))}, found {found}"
    )


_name: Name = _checked(
    os.environ.get("JAGCODEC_ROWCOPY") or ("numpy" if _missing else "compiled"), "JAGCODEC_ROWCOPY"
)
_active: Kernel = _KERNELS[_name]


def copy_all(tasks: Sequence[Copy]) -> None:
    """Copy the rows of every task, all in CPU memory: the columns of a batch share threads."""
    if tasks:
        _active.copy(tasks, torch.get_num_threads())


def pad_all(tasks: Sequence[Pad]) -> None:
    """Write the rectangle of every task, all in CPU memory, like `copy_all`."""
    if tasks:
        _active.pad(tasks, torch.get_num_threads())


def ends(cells: torch.Tensor, stride: int, width: int, rows: int) -> tuple[IntArray, IntArray]:
    """The starts and lengths that `Ends` measures, for (M, ...) contiguous cells on the CPU."""
    starts, lengths = (np.empty(rows, dtype=np.int64) for _ in range(2))
    cell_bytes = cells.shape[1:].numel() * cells.itemsize
    task = Ends(as_bytes(cells), stride, width, cell_bytes, starts, lengths)
    _active.ends([task], torch.get_num_threads())
    return starts, lengths
