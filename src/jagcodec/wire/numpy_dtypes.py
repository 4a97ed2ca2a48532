"""numpy dtypes as the wire describes them, and back. See `dtypes.numpy_itemsize`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec.memory.tensor_bytes import ByteArray, array_bytes

# One C type, two formats in the world: x87's 80 bits in 16 bytes, and IEEE quad.
_LONG_DOUBLE = {
    "float80": np.finfo(np.longdouble).nmant == 63 and np.dtype("g").itemsize == 16,
    "float128": np.finfo(np.longdouble).nmant == 112,
}
_EXTENDED = {
    name: np.dtype(code)
    for real, cplx in (("float80", "complex160"), ("float128", "complex256"))
    if _LONG_DOUBLE[real]
    for name, code in ((real, "g"), (cplx, "G"))
}
_EXTENDED_NAMES = {dtype: name for name, dtype in _EXTENDED.items()}


def describe(dtype: np.dtype[Any]) -> Any | None:
    """The wire's description of a dtype, in tuples; None for one that cannot be encoded."""
    description = _describe(dtype)
    if description is None:
        return None
    try:
        known = restore(description)
    except (TypeError, ValueError):
        return None
    # Types added by other packages (ml_dtypes) pass for void, records for their struct.
    # C has two names for a 64-bit integer, and numpy a type for each; they are one dtype.
    same = known.type is dtype.type or dtype.kind in "iu"
    return description if known == dtype and same else None


def _describe(dtype: np.dtype[Any]) -> Any | None:
    if dtype in _EXTENDED_NAMES:
        return _EXTENDED_NAMES[dtype]
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = _describe(base)
        return None if inner is None else ("sub", inner, tuple(shape))
    if dtype.names is not None and dtype.fields is not None:
        fields = []
        for name in dtype.names:
            entry: Any = dtype.fields[name]
            inner = _describe(entry[0])
            title = entry[2] if len(entry) > 2 else None
            if inner is None or not (title is None or type(title) is str):
                return None
            fields.append((name, title, int(entry[1]), inner))
        return ("struct", dtype.itemsize, dtype.isalignedstruct, tuple(fields))
    return dtype.str if dtype.kind in "biufcmMSUVO" and dtype.char not in "gG" else None


def listed(description: Any) -> Any:
    """A description as documents hold it: msgpack is strict about tuples."""
    return [listed(part) for part in description] if type(description) is tuple else description


def restore(description: Any) -> np.dtype[Any]:
    """The dtype of a checked description.

    Raises:
        ValueError, TypeError: This platform or this numpy has no such dtype.
    """
    if isinstance(description, str):
        if description in _EXTENDED:
            return _EXTENDED[description]
        if description.startswith(("float", "complex")):
            raise ValueError(f"this platform has no {description}")
        return np.dtype(description)
    if description[0] == "sub":
        return np.dtype((restore(description[1]), tuple(description[2])))
    _, itemsize, aligned, fields = description
    spec: Any = {
        "names": [field[0] for field in fields],
        "formats": [restore(field[3]) for field in fields],
        "offsets": [field[2] for field in fields],
        "itemsize": itemsize,
    }
    if any(field[1] is not None for field in fields):
        spec["titles"] = [field[1] for field in fields]
    dtype: np.dtype[Any] = np.dtype(spec, align=bool(aligned))
    return dtype


def cell_bytes(array: np.ndarray[Any, Any]) -> ByteArray:
    """The cells of an array in order, those bytes of structs that are in no field zero."""
    if array.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    array = _zero_padding(array)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    return array_bytes(array)


def _zero_padding(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array` with the bytes between and behind its fields zero: equal arrays, equal bytes."""
    dtype = array.dtype
    if not _has_padding(dtype):
        return array
    if dtype.names is not None:
        clean = np.zeros(array.shape, dtype)
        for name in dtype.names:
            clean[name] = _zero_padding(array[name])
        return clean
    clean = np.array(array, order="C")
    clean.reshape(-1).view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return clean


def _has_padding(dtype: np.dtype[Any]) -> bool:
    if dtype.subdtype is not None:
        return _has_padding(dtype.subdtype[0])
    if dtype.names is None or dtype.fields is None:
        return _EXTENDED_NAMES.get(dtype) in ("float80", "complex160")
    covered = np.zeros(dtype.itemsize, dtype=bool)
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        if _has_padding(field):
            return True
        covered[offset : offset + field.itemsize] = True
    return not covered.all()


def check_text(array: np.ndarray[Any, Any]) -> None:
    """Refuse code points that are none: numpy fails with a SystemError when it meets them.

    Raises:
        ValueError: There is one.
    """
    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            check_text(array[name])
    elif dtype.kind == "U" and array.nbytes:
        order = ">" if dtype.byteorder == ">" else "<"
        points = np.array(array, order="C").reshape(-1).view(f"{order}u4")
        if (points > 0x10FFFF).any():
            raise ValueError(f"{int(points.max()):#x}, which is no code point")


def string_cells(array: npt.NDArray[Any]) -> tuple[list[str | None], bool, bool, Any]:
    """The items of an array of numpy's variable-width strings, and how it treats what is missing.

    Raises:
        ValueError: What stands for missing is neither None nor a float nor a str.
    """
    dtype: Any = array.dtype
    has_na = hasattr(dtype, "na_object")
    na = dtype.na_object if has_na else None
    if type(na) not in (type(None), float, str):
        raise ValueError(f"{na!r:.60} for missing")
    # Where a string stands for missing, numpy itself cannot tell the two apart.
    text = has_na and type(na) is str
    items = [str(item) if text or isinstance(item, str) else None for item in array.flat]
    return items, dtype.coerce, has_na, na
