"""The hot loops: one copies ragged rows, the other turns Python numbers into cells and back.

Callers make a task for each column (`Copy`, `Pad`), and `copy_all` or `pad_all` runs all of them.
The loop over numbers is `fill`, `narrow_list` and `is_native`, at the end.

Each loop is written in C and in Python. The environment variable ``JAGCODEC_ROWCOPY`` chooses for
both: ``compiled``, which raises an error if one was not built, or ``numpy``. Without the variable,
each loop runs in C if it was built.

A *row* is a run of cells, and a *cell* is everything under one index of dim 0. The loop over rows
moves bytes in CPU memory and knows no dtype:

    compiled  one memcpy per row, several threads, no GIL
    numpy     one memcpy per row in Python, for an installation without a compiler

Torch copies tensors on accelerators, and tensors that autograd follows (`rows.copy_rows`).

Starts, lengths and left pads are int64 arrays with one number per row, which callers have checked.
The compiled loop checks them again against the buffers: a wrong one would crash it.

The loop over numbers changes no number. Its `is_native` finds values that msgpack can write.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jagcodec.errors import ArgumentError
from jagcodec.kernels import numpy_kernel, python_cells
from jagcodec.kernels.tasks import Copy, Ends, Pad, Starts, numbers, rows_only
from jagcodec.memory.arrays import ByteArray, IntArray

__all__ = [
    "LIST_DTYPES",
    "Backend",
    "Copy",
    "Ends",
    "Pad",
    "Starts",
    "backend",
    "copy_all",
    "ends",
    "fill",
    "is_native",
    "list_of_narrow",
    "missing_cells",
    "narrow_list",
    "numbers",
    "pad_all",
    "rows_only",
    "thread_count",
]


class Backend(NamedTuple):
    """A kernel that copies rows in CPU memory."""

    name: str
    missing: str | None  # why the compiled backend could not be imported


def backend() -> Backend:
    """The backend in use."""
    return _backend


_CHOSEN = os.environ.get("JAGCODEC_ROWCOPY", "")
_EXPECTED = "expected 'compiled' or 'numpy', found "
if _CHOSEN not in ("", "compiled", "numpy"):
    raise ArgumentError("bad_option", "JAGCODEC_ROWCOPY", f"{_EXPECTED}{_CHOSEN!r}")


def _compiled(extension: str) -> tuple[Any, str | None]:
    """The module of a compiled loop, and None; or None, and why it cannot be imported.

    Raises ArgumentError instead if `JAGCODEC_ROWCOPY` asks for the compiled loops.
    """
    try:
        return importlib.import_module(f"jagcodec.kernels.{extension}"), None
    except ImportError as error:  # "no module" if it was not built
        if _CHOSEN == "compiled":
            detail = f"{_EXPECTED}'compiled', which cannot be imported ({error}); install a C "
            detail += "compiler and install jagcodec again from source, or choose 'numpy'"
            raise ArgumentError("bad_option", "JAGCODEC_ROWCOPY", detail) from error
        return None, str(error)


def thread_count() -> int:
    """How many threads torch has; if it is not imported, how many the environment allows."""
    of_torch = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if of_torch is not None:
        return int(of_torch())
    # OpenMP also allows a list: one number for each level of nested parallel regions.
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(outermost) if outermost.isdecimal() and int(outermost) else _usable_cpus()


def _usable_cpus() -> int:
    """How many CPUs this process may use, which a container or `taskset` may restrict."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- rows ------------------------------------------------------------------------------------

_active, _missing = _compiled("_kernel")
_backend = Backend("compiled", None)
if _active is None or _CHOSEN == "numpy":
    _active, _backend = numpy_kernel, Backend("numpy", _missing)


def copy_all(tasks: Sequence[Copy]) -> None:
    """Copy the rows of all tasks, in CPU memory. The columns of a batch share threads."""
    if tasks:
        _active.copy(tasks, thread_count())


def pad_all(tasks: Sequence[Pad]) -> None:
    """Write the rectangles of all tasks, in CPU memory, as `copy_all` does."""
    if tasks:
        _active.pad(tasks, thread_count())


def ends(
    src: ByteArray, stride: int, width: int, cell_bytes: int, rows: int
) -> tuple[IntArray, IntArray]:
    """The starts and lengths that `Ends` measures, in CPU memory."""
    starts, lengths = (np.empty(rows, dtype=np.int64) for _ in range(2))
    task = Ends(src, stride, width, cell_bytes, starts, lengths)
    _active.ends([task], thread_count())
    return starts, lengths


# --- numbers ---------------------------------------------------------------------------------

_cells: Any = None
_missing_cells: str | None = "JAGCODEC_ROWCOPY=numpy"
if _CHOSEN != "numpy":
    _cells, _missing_cells = _compiled("_cells")
_cells = _cells or python_cells

fill: Callable[..., Any] = _cells.fill
is_native: Callable[[Sequence[Any], int, int, int, int], bool] = _cells.is_native
narrow_list: Callable[[list[Any]], tuple[str, bytes] | None] = _cells.narrow_list


def missing_cells() -> str | None:
    """Why the compiled loop over numbers is not in use; None if it is."""
    return _missing_cells


LIST_DTYPES = {
    name: np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "float64")
}
"""The dtypes that `narrow_list` names."""


def list_of_narrow(dtype: str, data: bytes) -> list[Any] | None:
    """The list that `narrow_list` was given, or None if these are not such bytes."""
    numpy_dtype = LIST_DTYPES[dtype]
    if len(data) % numpy_dtype.itemsize or (dtype == "bool" and data.translate(None, b"\0\1")):
        return None
    numbers_in_list: list[Any] = np.frombuffer(data, numpy_dtype).tolist()
    return numbers_in_list
