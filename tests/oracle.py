"""A batch as a plain list of rows, and equality down to the bit.

Nothing here calls the code under test: rows are Python lists, cells are Python integers that hold
the bits of a cell, and jagged tensors are read through PyTorch's public accessors.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict.tensorclass import NonTensorDataBase

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> Any:
    """The bits of a strided tensor's cells, as nested lists of integers.

    Example:
        >>> bits(torch.tensor([1.0, -0.0], dtype=torch.float16))
        [15360, -32768]
    """
    tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().clone()
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor.contiguous()).view(torch.int64).tolist()
    return tensor.view(_INTEGERS[tensor.itemsize]).tolist()


def rows_of(value: torch.Tensor, lengths: Sequence[int] | None = None) -> list[Any]:
    """The rows of a padded tensor (given its lengths) or of a jagged one, each as `bits`.

    Example:
        >>> rows_of(torch.tensor([[5, 6, 0], [7, 8, 9]]), [2, 3])
        [[5, 6], [7, 8, 9]]
    """
    if lengths is not None:
        return [row[:n] for row, n in zip(bits(value), lengths, strict=True)]
    jagged: Any = value
    values, offsets = jagged.values(), jagged.offsets().tolist()
    holes = jagged.lengths()
    ends = offsets[1:] if holes is None else map(sum, zip(offsets, holes.tolist(), strict=False))
    dim = value.dim() - values.dim() + _ragged_axis(value)
    return [
        bits(values.narrow(dim, start, end - start))
        for start, end in zip(offsets, ends, strict=False)
    ]


def _ragged_axis(jagged: torch.Tensor) -> int:
    """The ragged dim of the values: the jagged tensor's size there is not a plain integer."""
    return next(i for i, dim in enumerate(jagged.shape[1:]) if not isinstance(dim, int)) - 1


def cell_of(number: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """A Python number as a cell of a dtype; None if it does not fit: ints and bools only exactly.

    Example:
        >>> cell_of(300, torch.int8), cell_of(True, torch.int8), cell_of(0.1, torch.float16)
        (None, None, tensor(0.0999755859375, dtype=torch.float16))
    """
    if isinstance(number, bool) or dtype is torch.bool:
        return torch.tensor(number) if isinstance(number, bool) and dtype is torch.bool else None
    if isinstance(number, int) and not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if not info.min <= number <= info.max:
            return None
        return torch.from_numpy(np.array(number, dtype=str(dtype).removeprefix("torch.")))
    if not dtype.is_floating_point:
        return None
    try:
        with np.errstate(over="ignore"):
            # narrow floats by way of float32, as torch rounds
            nearest = np.float64(number) if dtype is torch.float64 else np.float32(number)
    except OverflowError:
        return None
    cell = torch.tensor(nearest).to(dtype)
    if isinstance(number, int):
        return cell if cell.isfinite() and int(cell.item()) == number else None
    return cell if math.isfinite(cell.item()) or not math.isfinite(number) else None


def pad_rows(rows: Sequence[list[Any]], width: int, pad: Any) -> list[Any]:
    """Pad each row to `width` with the cell `pad`.

    Example:
        >>> pad_rows([[5, 6], [7]], 3, 0)
        [[5, 6, 0], [7, 0, 0]]
    """
    return [row + [pad] * (width - len(row)) for row in rows]


def assert_same(actual: Any, expected: Any, path: str = "$") -> None:
    """Assert that two values are equal in type, dtype, shape, layout, order and bits, recursively.

    Example:
        >>> assert_same([1, (2.0, None)], [1, (2.0, None)])
        >>> assert_same({"a": [1, True]}, {"a": [1, 1]})
        Traceback (most recent call last):
        AssertionError: $['a'][1]: type bool, expected int

    Raises:
        AssertionError: They differ; the message begins with the path to the first difference.

    Parameters and memory-mapped tensors count as plain tensors, and a jagged tensor with holes as
    one with the same rows and no holes.
    """
    if isinstance(expected, UnbatchedTensor):
        _check(isinstance(actual, UnbatchedTensor), path, _name(actual), _name(expected), "type ")
        _same_tensors(_unbatched(actual), _unbatched(expected), path)
        return
    if isinstance(expected, torch.Tensor):
        _same_tensors(actual, expected, path)
        return
    _check(type(actual) is type(expected), path, _name(actual), _name(expected), "type ")
    if isinstance(expected, TensorDictBase) and not isinstance(expected, NonTensorStack):
        _same_tensordicts(actual, expected, path)
    elif isinstance(expected, NonTensorStack):
        _check(actual.batch_size == expected.batch_size, path, actual, expected)
        assert_same(actual.tolist(), expected.tolist(), path)
    elif isinstance(expected, NonTensorDataBase):
        _check(actual.batch_size == expected.batch_size, path, actual, expected)
        assert_same(actual.data, expected.data, f"{path}.data")
    elif is_tensorclass(expected):
        a, b = vars(actual), vars(expected)
        assert_same(a["_tensordict"], b["_tensordict"], path)
        assert_same(_not_none(a["_non_tensordict"]), _not_none(b["_non_tensordict"]), path)
    elif isinstance(expected, dict):
        if isinstance(expected, defaultdict):
            _check(actual.default_factory is expected.default_factory, path, actual, expected)
        assert_same(list(actual), list(expected), f"{path} keys")
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}[{_text(key, repr)}]")
    elif isinstance(expected, torch.Size):
        _check(actual == expected, path, actual, expected)
    elif isinstance(expected, (list, tuple, deque)):
        _check(len(actual) == len(expected), path, len(actual), len(expected), "length ")
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    elif isinstance(expected, (set, frozenset)):
        assert_same(sorted(actual, key=_order), sorted(expected, key=_order), path)
    elif isinstance(expected, float):
        _check(struct.pack("<d", actual) == struct.pack("<d", expected), path, actual, expected)
    elif isinstance(expected, complex):
        assert_same((actual.real, actual.imag), (expected.real, expected.imag), path)
    elif isinstance(expected, np.ndarray):
        _same_arrays(actual, expected, path)
    elif isinstance(expected, (np.str_, np.bytes_)):
        _check(bool(actual == expected), path, actual, expected)
    elif isinstance(expected, np.generic):
        _same_arrays(np.asarray(actual), np.asarray(expected), path)
    elif isinstance(expected, slice):
        for part in ("start", "stop", "step"):
            assert_same(getattr(actual, part), getattr(expected, part), f"{path}.{part}")
    elif isinstance(expected, range):
        parts = (expected.start, expected.stop, expected.step)
        assert_same((actual.start, actual.stop, actual.step), parts, path)
    elif isinstance(expected, (Decimal, datetime)):
        # Equal ones may differ in digits or time zone, and a signalling NaN cannot be compared.
        _check(repr(actual) == repr(expected), path, actual, expected)
    else:
        _check(actual == expected, path, actual, expected)


def is_same(actual: Any, expected: Any) -> bool:
    """Whether two values, such as two batches, are equal as `assert_same` asserts it.

    ``==`` of two batches compares cell by cell, and raises for jagged columns.

    Example:
        >>> is_same({"a": [1.0]}, {"a": [1.0]}), is_same({"a": [1.0]}, {"a": [1]})
        (True, False)
    """
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def _unbatched(leaf: Any) -> Any:
    """The tensor in an `UnbatchedTensor`, which is a tensorclass before tensordict 0.12."""
    return leaf if isinstance(leaf, torch.Tensor) else vars(leaf)["_tensordict"]["data"]


def _not_none(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}


def _same_tensors(actual: Any, expected: torch.Tensor, path: str) -> None:
    _check(isinstance(actual, torch.Tensor), path, _name(actual), "Tensor", "type ")
    for what in ("dtype", "layout", "is_nested"):
        a, b = getattr(actual, what), getattr(expected, what)
        _check(a == b, path, a, b, f"{what} ")
    if expected.layout is torch.jagged:
        _same_jagged(actual, expected, path)
    elif expected.is_nested:
        same_rows(actual.unbind(), expected.unbind() if expected.size(0) else (), path)
    else:
        _check(actual.shape == expected.shape, path, actual.shape, expected.shape, "shape ")
        if expected.layout is torch.strided:
            _check(bits(actual) == bits(expected), path, actual, expected)
        elif expected.layout is torch.sparse_coo:
            a, b = actual.is_coalesced(), expected.is_coalesced()
            _check(a == b, path, a, b, "coalesced ")
            _same_tensors(actual._indices(), expected._indices(), f"{path}.indices")
            _same_tensors(actual._values(), expected._values(), f"{path}.values")
        else:
            rows = expected.layout in (torch.sparse_csr, torch.sparse_bsr)
            parts = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
            for part in (*parts, "values"):
                a, b = getattr(actual, part)(), getattr(expected, part)()
                _same_tensors(a, b, f"{path}.{part}")


def same_rows(actual: Sequence[Any], expected: Sequence[Any], path: str) -> None:
    """Assert that two lists of strided tensors are equal."""
    _check(len(actual) == len(expected), path, len(actual), len(expected), "rows ")
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        _same_tensors(a, b, f"{path}[{i}]")


def _same_jagged(actual: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    a, b = _ragged_axis(actual), _ragged_axis(expected)
    _check(a == b, path, a, b, "ragged axis ")
    _check(actual.shape[0] == expected.shape[0], path, actual.shape, expected.shape, "shape ")
    same = rows_of(actual) == rows_of(expected)
    _check(same, path, actual.values(), expected.values())
    inner = [tuple(x.values().shape) for x in (actual, expected)]
    inner = [shape[: a + 1] + shape[a + 2 :] for shape in inner]
    _check(inner[0] == inner[1], path, inner[0], inner[1], "row shape ")


def _same_tensordicts(actual: Any, expected: TensorDictBase, path: str) -> None:
    _check(
        actual.batch_size == expected.batch_size,
        path,
        actual.batch_size,
        expected.batch_size,
        "batch size ",
    )
    _check(actual.names == expected.names, path, actual.names, expected.names, "names ")
    if isinstance(expected, LazyStackedTensorDict):
        _check(actual.stack_dim == expected.stack_dim, path, actual.stack_dim, expected.stack_dim)
        for i, (a, b) in enumerate(zip(actual.tensordicts, expected.tensordicts, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
        return
    assert_same(list(actual.keys()), list(expected.keys()), f"{path} keys")
    leaves = dict(expected.items())
    for key, leaf in actual.items():
        assert_same(leaf, leaves[key], f"{path}[{key!r}]")


def _same_arrays(actual: Any, expected: Any, path: str) -> None:
    _check(actual.dtype == expected.dtype, path, actual.dtype, expected.dtype, "dtype ")
    _check(actual.shape == expected.shape, path, actual.shape, expected.shape, "shape ")
    if expected.dtype.names is not None:
        for name in expected.dtype.names:
            _same_arrays(actual[name], expected[name], f"{path}[{name!r}]")
    elif expected.dtype == object:
        assert_same(list(actual.flat), list(expected.flat), path)
    elif expected.dtype.kind == "T":
        # for a missing item, numpy returns the object given as `na_object`
        assert_same(list(actual.flat), list(expected.flat), path)
    elif expected.dtype in (np.dtype("g"), np.dtype("G")):
        same = np.array_equal(actual, expected, equal_nan=True)
        _check(same, path, actual, expected)
    else:
        _check(actual.tobytes() == expected.tobytes(), path, actual, expected)


def _order(value: Any) -> tuple[str, str]:
    # The repr of a frozenset depends on its iteration order, so its members are sorted first, also
    # where it is inside a tuple.
    members: Any = value
    if isinstance(value, frozenset):
        members = sorted(map(_order, value))
    elif isinstance(value, tuple):
        members = list(map(_order, value))
    elif isinstance(value, int):
        members = hex(value)  # of any size, unlike its repr
    return (_name(value), repr(members))


def _name(value: Any) -> str:
    return type(value).__name__


def _check(same: bool, path: str, actual: Any, expected: Any, what: str = "") -> None:
    if not same:
        raise AssertionError(f"{path}: {what}{_text(actual)}, expected {_text(expected)}")


def _text(value: Any, as_text: Callable[[Any], str] = str) -> str:
    """`value` as text; never an error, even if `as_text` raises one."""
    try:
        return as_text(value)
    except Exception:  # torch cannot print int1, and Python limits the digits of an int
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return f"{value.dtype} with bits {bits(value)}"
        return f"{_name(value)} that cannot be printed"
