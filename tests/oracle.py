"""A batch as a plain list of rows, and equality down to the bit.

Nothing here calls the code under test: rows are Python lists, cells are Python integers that hold
the bits of a cell, and jagged tensors are read through PyTorch's public accessors.
"""

import itertools
import math
import struct
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict.base import TensorDictBase
from tensordict.tensorclass import NonTensorDataBase

from jagcodec import BatchedDataDict
from jagcodec.types import PackedColumn

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The cells of a strided tensor as integers of the same bits."""
    tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().clone()
    if tensor.itemsize == 16:
        tensor = torch.view_as_real(tensor.contiguous())
    return tensor.view(_INTEGERS[tensor.itemsize])


def bits(tensor: torch.Tensor) -> Any:
    """The bits of a strided tensor's cells, as nested lists of integers."""
    return _integers(tensor).tolist()


def rows_of(value: torch.Tensor, lengths: Sequence[int] | None = None) -> list[Any]:
    """The rows of a padded tensor (given its lengths) or of a jagged one, each as `bits`."""
    if lengths is not None:
        return [row[:n] for row, n in zip(bits(value), lengths, strict=True)]
    return [bits(row) for row in _rows(value)]


def _rows(jagged: Any) -> list[torch.Tensor]:
    starts, lengths = jagged.offsets().tolist(), jagged.lengths()
    ends = itertools.pairwise(starts)
    lengths = [end - start for start, end in ends] if lengths is None else lengths.tolist()
    parts = zip(starts, lengths, strict=False)
    return [jagged.values().narrow(_ragged_dim(jagged), *part) for part in parts]


def _ragged_dim(jagged: torch.Tensor) -> int:
    """The ragged dim of the values: the jagged tensor's size there is not a plain integer."""
    return next(i for i, dim in enumerate(jagged.shape[1:]) if not isinstance(dim, int))


def cell_of(number: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """An item as a cell of a dtype; None if it does not fit: ints and bools only exactly."""
    if not isinstance(number, (int, float)):
        return None
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
    """Pad each row to `width` with the cell `pad`."""
    return [row + [pad] * (width - len(row)) for row in rows]


def table(batch: Any, count: int | None = None) -> list[dict[str, Any]]:
    """The rows of a batch, each a dict of names to the bits, or the text, of its cells."""
    if hasattr(batch, "row_lengths"):  # a WireBatch
        batch = batch.to_tensordict()
    if isinstance(batch, TensorDict):
        assert count in (None, batch.batch_size[0])
        count = batch.batch_size[0]
    elif count is None:
        count = len(batch)
    columns = {name: _entries(leaf, count) for name, leaf in batch.items()}
    assert all(len(column) == count for column in columns.values())
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _entries(leaf: Any, count: int) -> list[Any]:
    if isinstance(leaf, NonTensorStack):
        return [_text(item) for item in leaf.tolist()]
    if isinstance(leaf, NonTensorData):
        array = leaf.data  # of one item per row, unless a TensorDict would make it a tensor
        by_row = isinstance(array, np.ndarray) and array.dtype.kind not in "biufc"
        return _entries(array, count) if by_row else [repr(array)] * count
    if isinstance(leaf, tensordict.UnbatchedTensor):
        return [described(leaf)] * count
    if isinstance(leaf, torch.Tensor):
        strided = leaf.is_nested and leaf.layout is torch.strided
        if strided:
            return [(leaf.dtype, bits(row)) for row in leaf.unbind()]
        return [(leaf.dtype, row) for row in (rows_of(leaf) if leaf.is_nested else bits(leaf))]
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return _entries(torch.from_numpy(leaf.astype(leaf.dtype.newbyteorder("="))), count)
    if isinstance(leaf, np.ndarray):
        return [_text(item) for item in leaf]
    if isinstance(leaf, list):
        return [_text(item) for item in leaf]
    if hasattr(leaf, "cu_seqlens"):
        return _varlen(leaf)
    if tensordict.is_tensorclass(leaf):
        return [described(leaf[i]) for i in range(count)]
    return table(leaf, count)


def _text(item: Any) -> str:
    return repr(item.tolist() if isinstance(item, np.ndarray) else item)


def _varlen(leaf: Any) -> list[Any]:
    """The rows of a packed column, whose parts agree."""
    cuts = leaf.cu_seqlens.tolist()
    assert leaf.max_seqlen == max(np.diff(cuts), default=0)
    steps = [i for a, b in itertools.pairwise(cuts) for i in range(b - a)]
    assert leaf.position_ids.tolist() == steps
    dim = leaf.values.shape.index(cuts[-1])
    rows = [leaf.values.narrow(dim, a, b - a) for a, b in itertools.pairwise(cuts)]
    return [(leaf.values.dtype, bits(row)) for row in rows]


def assert_same(actual: Any, expected: Any, path: str = "$") -> None:
    """Assert that two values are equal in type, dtype, shape, layout, order and bits, recursively.

    The error begins with the path to the first difference. Parameters and memory-mapped tensors
    count as plain tensors, and a jagged tensor with holes as one with the same rows and no holes.
    """
    _same(described(actual), described(expected), path)


def is_same(actual: Any, expected: Any) -> bool:
    """Whether two values, such as two batches, are equal as `assert_same` asserts it."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def _same(actual: Any, expected: Any, path: str) -> None:
    """Compare two descriptions."""
    if type(actual) is not type(expected):
        same = False
    elif isinstance(expected, dict):
        _same([*actual], [*expected], f"{path} keys")
        for key in expected:
            _same(actual[key], expected[key], f"{path}[{key!r}]")
        return
    elif isinstance(expected, (list, tuple)):
        for i, (a, b) in enumerate(zip(actual, expected, strict=False)):
            _same(a, b, f"{path}[{i}]" if isinstance(expected, list) else path)
        same = len(actual) == len(expected)
    else:
        same = bool(actual == expected)
    if not same:
        raise AssertionError(f"{path}: {actual!r:.200}, expected {expected!r:.200}")


def described(value: Any) -> Any:
    """A value as lists, dicts with string keys, and tuples that begin with a kind.

    Descriptions of equal types are equal only if the values are, down to the bit. The kinds are
    those of the wire format, as its second reader has them (`tests/wire/spec_reader.py`).
    """
    kind = type(value)
    if isinstance(value, tensordict.UnbatchedTensor):
        # a tensorclass before tensordict 0.12
        inner = value if isinstance(value, torch.Tensor) else vars(value)["_tensordict"]["data"]
        return (tensordict.UnbatchedTensor, _tensor(inner))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, TensorDictBase) or tensordict.is_tensorclass(value):
        return _batch(value)
    if isinstance(value, (np.str_, np.bytes_)):
        return ("USER", f"numpy.{kind.__name__}", value.item())
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return ("SCALAR", *_array(np.array(value))[1::2])
    if kind is BatchedDataDict:
        return (
            "USER",
            "jagcodec.BatchedDataDict",
            described([dict(value.items()), value.meta_info]),
        )
    if kind is PackedColumn:
        return ("USER", "jagcodec.PackedColumn", described(value._asdict()))
    if isinstance(value, dict):
        return _dict(value)
    if isinstance(value, torch.Size):
        return ("USER", "torch.Size", [*value])
    if isinstance(value, (list, tuple, deque)):
        items = [described(item) for item in value]
        return items if kind is list else ("TUPLE" if kind is tuple else kind, items)
    if isinstance(value, (set, frozenset)):
        return (kind.__name__.upper(), sorted((described(item) for item in value), key=repr))
    return _scalar(value)


def _scalar(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return ("float", struct.pack(">d", value).hex())
    if kind is int and value.bit_length() > 64:
        return ("int", hex(value))  # of any size, unlike its repr
    if kind is complex:
        return ("USER", "complex", described((value.real, value.imag)))
    if kind in (range, slice):
        return ("USER", kind.__name__, described((value.start, value.stop, value.step)))
    if kind is torch.dtype:
        return ("USER", "torch.dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return ("USER", "torch.device", ("TUPLE", [value.type, value.index]))
    if isinstance(value, (Decimal, datetime)):
        # Equal ones may differ in digits or time zone, and a signalling NaN cannot be compared.
        return (kind, repr(value))
    return value


def _dict(value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        items: Any = {key: described(item) for key, item in value.items()}
        if type(value) is dict:
            return items
    else:
        items = [described(part) for item in value.items() for part in item]
    if type(value) is dict:
        return ("DICT", items)
    return (type(value), getattr(value, "default_factory", None), items)


def _batch(value: Any) -> Any:
    size = [*value.batch_size]
    if isinstance(value, NonTensorStack):
        members = value.tensordicts
        if value.stack_dim == 0 and len(size) == 1 and not any(map(_is_stacked, members)):
            return ("NON_TENSOR_ROWS", [described(member.data) for member in members])
        return ("NON_TENSOR_STACK", value.stack_dim, [described(member) for member in members])
    if isinstance(value, NonTensorDataBase):
        kind = "NON_TENSOR_DATA" if type(value) is NonTensorData else type(value)
        return (kind, size, described(value.data))
    if tensordict.is_tensorclass(value):
        parts = vars(value)
        others = parts["_non_tensordict"] or {}
        others = {name: described(part) for name, part in others.items() if part is not None}
        return (type(value), described(parts["_tensordict"]), others)
    stack = isinstance(value, LazyStackedTensorDict)
    # Below 0.12 a stack without members has no names to ask for.
    names = [value.names] if (not stack or value.tensordicts) and any(value.names) else []
    if stack:
        members = [described(member) for member in value.tensordicts]
        return ("LAZY_STACK", value.stack_dim, members, *names)
    leaves = {key: described(value._get_str(key, None)) for key in value.keys()}  # noqa: SIM118
    return ("TENSORDICT" if type(value) is TensorDict else type(value), size, leaves, *names)


def _is_stacked(member: Any) -> bool:
    return isinstance(member, NonTensorStack) or bool(member.batch_dims)


def _array(value: Any) -> Any:
    shape = [*value.shape]
    if value.dtype.kind == "O":
        return ("OBJECT_ARRAY", shape, [described(item) for item in value.flat])
    dtype = value.dtype.str if value.dtype.names is None else str(value.dtype)
    return ("ARRAY", dtype, shape, value.tobytes())


def _tensor(value: Any) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is torch.jagged:
        dim = _ragged_dim(value)
        pieces, shape = _rows(value), [*value.values().shape]
        shape[dim] = sum(piece.shape[dim] for piece in pieces)
        return ("JAGGED", dtype, shape, dim + 1, [*map(_cells, pieces)])
    if value.is_nested:
        rows = [_cells(row) for row in (value.unbind() if value.size(0) else ())]
        return ("STRIDED_NESTED", dtype, rows)
    if value.layout is torch.strided:
        return ("TENSOR", dtype, *_cells(value))
    parts = map(_tensor, (value._indices(), value._values()))
    return ("SPARSE_COO", [*value.shape], *parts, value.is_coalesced())


def _cells(tensor: torch.Tensor) -> list[Any]:
    """The shape of a strided tensor, and its bytes in row-major order."""
    # Flat, because numpy 1 has at most 32 dims.
    data = _integers(tensor).reshape(-1).numpy().tobytes() if tensor.numel() else b""
    return [[*tensor.shape], data]
