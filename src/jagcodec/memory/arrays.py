"""Memory as numpy arrays, without an import of torch: bytes, addresses, and overlaps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

ByteArray: TypeAlias = npt.NDArray[np.uint8]
AnyArray: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]

NUMPY_BY_NAME = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
"""The dtypes that numpy has under every supported torch, by name; most columns have one of them."""


IN_NUMPY = NUMPY_BY_NAME | {
    name: np.dtype(name) for name in ("uint16", "uint32", "uint64", "complex64", "complex128")
}
"""The dtypes that numpy and a recent torch have, by name."""


def stored_dtype(name: str, itemsize: int) -> np.dtype[Any]:
    """The dtype of arrays of cells: numpy's own, or unsigned words of the same size."""
    return IN_NUMPY.get(name) or np.dtype(f"u{itemsize}")


def torch_name(dtype: Any) -> str:
    """PyTorch's own name of a dtype, such as "int64"; a dtype of numpy prints as the same name."""
    return str(dtype).removeprefix("torch.")


def object_array(items: Sequence[Any]) -> npt.NDArray[np.object_]:
    """(N,) object array of the unchanged items; `numpy.array` would unpack nested sequences."""
    return np.fromiter(items, dtype=object, count=len(items))


def is_numeric(array: npt.NDArray[Any]) -> bool:
    """Whether an array holds numbers or bools."""
    return array.dtype.kind in "biufc"


class _NoTensor:
    """Stands for the type of tensors before torch is imported: nothing has this type."""


def tensor_type() -> Any:
    """The type of tensors, without an import of torch: before one, there are no tensors."""
    return getattr(sys.modules.get("torch"), "Tensor", _NoTensor)


def is_of_torch(kind: type) -> bool:
    """Whether a type may be one of torch, of tensordict, or of a column of tensors.

    They are not imported for the answer.
    """
    if "torch" not in sys.modules:
        return False
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return "tensordict" in sys.modules or not modules.isdisjoint(("torch", "jagcodec"))


def array_bytes(array: npt.NDArray[Any]) -> ByteArray:
    """A C-contiguous array of numbers as flat bytes that alias it."""
    return array.reshape(-1).view(np.uint8)


def address(data: npt.NDArray[Any]) -> int:
    """The address of the first cell."""
    place: int = data.__array_interface__["data"][0]  # `data.ctypes` takes twice as long
    return place


class _Borrowed:
    """Memory at an address, and the object that keeps it alive."""

    def __init__(self, start: int, size: int, owner: object, writable: bool) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (start, not writable),
        }


def borrowed(start: int, size: int, owner: object, writable: bool = True) -> ByteArray:
    """`size` bytes at an address, as an array that keeps `owner` alive."""
    return np.asarray(_Borrowed(start, size, owner, writable), dtype=np.uint8)


def for_torch(data: ByteArray) -> ByteArray:
    """`data` as an array that torch accepts without a warning. Only read the tensor of it."""
    return data if data.flags.writeable else borrowed(address(data), len(data), data)


def are_disjoint(targets: Iterable[Any], sources: Iterable[Any]) -> bool:
    """Whether no target overlaps a source, or another target.

    They are contiguous arrays, or strided tensors on any device.
    """
    spans = [(*_span(data), True) for data in targets]
    spans += [(*_span(data), False) for data in sources]
    written = read = 0  # where the target, or the source, that reaches furthest ends
    for start, size, is_target in sorted(span for span in spans if span[1]):
        if start < written or (is_target and start < read):
            return False
        if is_target:
            written = max(written, start + size)
        else:
            read = max(read, start + size)
    return True


def _span(data: Any) -> tuple[int, int]:
    """Where memory begins, and how many bytes it has."""
    if isinstance(data, np.ndarray):
        return address(data), data.nbytes
    if not data.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True))
    return data.data_ptr(), (last + 1) * data.itemsize
