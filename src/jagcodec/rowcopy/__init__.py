"""The hot loop: copy ragged rows together, or apart into a rectangle.

A *row* here is a run of cells, a *cell* everything that lies under one index of dim 0. The
functions move bytes and know no dtype. There are three backends:

    compiled  a C extension of this package, if it was built: one memcpy per row, several threads
    numpy     the same in Python, for CPU memory where there is no compiled one
    torch     index ops: accelerators, and tensors that autograd follows, whatever is chosen

The best one there is serves CPU memory. The environment variable ``JAGCODEC_ROWCOPY`` or
`use_backend` chooses another; `backend` says which it is, and why it is not the compiled one.

Starts, lengths and leads are int64 arrays, one number per row, that callers have checked; the
compiled backend checks them once more against the buffers, because it could not survive them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.tensor_bytes import IntArray, as_bytes
from jagcodec.rowcopy import memory, numpy_kernel, torch_ops
from jagcodec.rowcopy.memory import cells_alone
from jagcodec.rowcopy.tasks import Copy, Ends, Kernel, Pad, Starts, Unwritten, numbers

__all__ = [
    "Backend",
    "Copy",
    "Pad",
    "Starts",
    "Unwritten",
    "backend",
    "cells_alone",
    "copy_all",
    "differences",
    "ends",
    "gather",
    "numbers",
    "pad",
    "pad_all",
    "scatter",
    "sums",
    "use_backend",
]

Name = Literal["compiled", "numpy", "torch"]

_KERNELS: dict[str, Kernel | None] = {"numpy": numpy_kernel, "torch": None}
_missing: str | None = None
try:
    from jagcodec.rowcopy import _kernel
except ImportError as error:
    _missing = str(error)
else:
    _KERNELS["compiled"] = _kernel


class Backend(NamedTuple):
    """What serves CPU memory.

    Attributes:
        name: ``"compiled"``, ``"numpy"`` or ``"torch"``.
        missing: Why the compiled backend could not be imported; None where it could.
    """

    name: Name
    missing: str | None


def backend() -> Backend:
    """Which backend is in use, and what the import of the compiled one said if it failed.

    Example:
        >>> from jagcodec import rowcopy
        >>> rowcopy.backend().name in ("compiled", "numpy", "torch")
        True
    """
    return Backend(_name, _missing)


def use_backend(name: Name) -> Name:
    """Choose the backend for CPU memory in this process.

    Args:
        name: ``"compiled"``, ``"numpy"`` or ``"torch"``.

    Returns:
        The name of the one that was in use before, so that it can be put back.

    Raises:
        ArgumentError: There is none of this name, or it is not installed.

    Example:
        >>> from jagcodec import rowcopy
        >>> before = rowcopy.use_backend("numpy")
        >>> rowcopy.use_backend(before)
        'numpy'
    """
    global _name
    former, _name = _name, _checked(name, "use_backend(name)")
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


def gather(
    cells: torch.Tensor, starts: IntArray, lengths: IntArray, out: torch.Tensor | None = None
) -> torch.Tensor:
    """(M, ...) cells -> (sum(lengths), ...): rows ``cells[start : start + length]``, end to end.

    Rows may overlap, repeat and come in any order. The result owns its memory; or it is `out`,
    contiguous memory of that many bytes, apart from that of `cells`.
    """
    kernel = _kernel_for(cells)
    if kernel is None:
        return torch_ops.gather(cells, starts, lengths, out)
    return memory.gather(kernel, cells, starts, lengths, out)


def copy_all(tasks: Sequence[Copy]) -> None:
    """Copy the rows of every task, in CPU memory: columns of one batch, which share threads."""
    kernel = _KERNELS[_name]
    if kernel is None:
        for task in tasks:
            torch_ops.copy(task)
    elif tasks:
        memory.copy_all(kernel, tasks)


def pad_all(tasks: Sequence[Pad]) -> None:
    """Write the rectangle of every task, in CPU memory: columns of one batch, as `copy_all`."""
    kernel = _KERNELS[_name]
    if kernel is None:
        for task in tasks:
            torch_ops.pad_bytes(task)
    elif tasks:
        memory.pad_all(kernel, tasks)


def scatter(
    values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """Write the rows that lie end to end in `values` to ``out[start : start + length]`` each.

    The runs must not overlap; cells between them keep what they hold. `out` is contiguous.
    Returns `out`, or for tensors that autograd follows a new tensor in its place.
    """
    kernel = _kernel_for(values)
    if kernel is None:
        return torch_ops.scatter(values, lengths, out, starts)
    return memory.scatter(kernel, values, lengths, out, starts)


def pad(
    cells: torch.Tensor,
    starts: IntArray,
    lengths: IntArray,
    out: torch.Tensor,
    leads: IntArray | None,
    pattern: bytes,
    *,
    fresh: bool = False,
) -> torch.Tensor:
    """Write rows ``cells[start : start + length]`` and their pads to a rectangle, in one pass.

    Args:
        cells: (M, ...); rows may overlap, repeat and come in any order.
        starts: (R,) first cells.
        lengths: (R,), at most `width` each.
        out: (R, width, ...), contiguous, of the dtype of `cells` and apart from its memory.
        leads: (R,) pad cells before each row, at most ``width - length``; None for none. The
            rest of the width is padded after it.
        pattern: The bits of one pad element, ``dtype.itemsize`` bytes.
        fresh: `out` holds nothing but the pattern already, as new zeroed memory does.

    Returns:
        `out`, or for tensors that autograd follows a new tensor in its place.
    """
    kernel = _kernel_for(cells)
    if kernel is None:
        return torch_ops.pad(cells, starts, lengths, out, leads, pattern, fresh)
    return memory.pad(kernel, cells, starts, lengths, out, leads, pattern, fresh)


def ends(cells: torch.Tensor, stride: int, width: int, rows: int) -> tuple[IntArray, IntArray]:
    """What lies between the constant ends of each row, of (M, ...) contiguous cells on the CPU.

    Row i is `width` cells from cell ``i * stride`` on.

    Returns:
        (rows,) how many equal cells each row begins with, and (rows,) how many follow before the
        equal cells that it ends with; both 0 where all are equal.
    """
    starts, lengths = (np.empty(rows, dtype=np.int64) for _ in range(2))
    task = Ends(as_bytes(cells), stride, width, memory.cell_bytes(cells), starts, lengths)
    (_KERNELS[_name] or numpy_kernel).ends([task], torch.get_num_threads())
    return starts, lengths


def sums(lengths: IntArray) -> tuple[IntArray, int, int]:
    """(N,) lengths to (N + 1,) offsets from 0 on, and the least and the greatest length.

    Sums past 2**63 wrap around; without lengths, both extremes are 0.
    """
    offsets: IntArray = np.empty(len(lengths) + 1, dtype=np.int64)
    low, high = (_KERNELS[_name] or numpy_kernel).sums(lengths, offsets)
    return offsets, low, high


def differences(offsets: IntArray) -> tuple[IntArray, int, int, bool]:
    """The inverse: lengths, extremes, and whether no offset is below the one before it.

    Otherwise the differences may have wrapped around.
    """
    lengths: IntArray = np.empty(len(offsets) - 1, dtype=np.int64)
    low, high, rising = (_KERNELS[_name] or numpy_kernel).differences(offsets, lengths)
    return lengths, low, high, rising


def _kernel_for(cells: torch.Tensor) -> Kernel | None:
    """The kernel for this memory; None where torch must do it."""
    return None if cells.requires_grad or not cells.is_cpu else _KERNELS[_name]
