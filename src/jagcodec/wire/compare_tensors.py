"""Where two tensors, or two leaves of TensorDicts, first differ, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch

from jagcodec.columns.tensor_columns import (
    LazyStack,
    Payloads,
    TensorClass,
    TensorDictBatch,
    Unbatched,
)
from jagcodec.memory.arrays import stored_dtype, torch_name
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import as_bytes, as_words
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.nested import is_jagged, view_of
from jagcodec.rows.non_tensor import fields_of, is_stack, unbatched_parts
from jagcodec.wire.compare import (
    Difference,
    add_comparisons,
    compare,
    compare_batches,
    compare_cells,
    compare_items,
    compare_jagged_cells,
    compare_rows,
    property_difference,
    step,
    value_difference,
)


def _compare_unbatched(a: Any, b: Any, at: Difference) -> Difference | None:
    (size, left), (other, right) = unbatched_parts(a), unbatched_parts(b)
    return property_difference(at, "batch size", size, other) or compare(left, right, at)


def _compare_payloads(a: Any, b: Any, at: Difference) -> Difference | None:
    difference = property_difference(at, "batch size", a.batch_size, b.batch_size)
    if not is_stack(a):
        return difference or compare(a.data, b.data, replace(at, inside=at.inside or "$"))
    if -1 in a.batch_size:  # a stack of different sizes, of which `tolist` may fail
        return _compare_stacks(a, b, at)
    return difference or compare_items(a.tolist(), b.tolist(), at)


def _compare_stacks(a: Any, b: Any, at: Difference) -> Difference | None:
    return (
        property_difference(at, "batch size", a.batch_size, b.batch_size)
        or property_difference(at, "stack dim", a.stack_dim, b.stack_dim)
        or compare_items(a.tensordicts, b.tensordicts, at)
    )


def _compare_tensorclasses(a: Any, b: Any, at: Difference) -> Difference | None:
    (left, others), (right, more) = fields_of(a), fields_of(b)
    return compare(left, right, at) or compare(others, more, at)


def compare_tensors(a: torch.Tensor, b: torch.Tensor, at: Difference) -> Difference | None:
    difference = property_difference(
        at, "layout", _layout_name(a), _layout_name(b)
    ) or property_difference(at, "dtype", torch_name(a.dtype), torch_name(b.dtype))
    if difference is not None:
        return difference
    if is_jagged(a):
        return _compare_jagged(a, b, at)
    if a.is_nested:
        return compare_items(a.unbind(), b.unbind(), at)
    difference = property_difference(at, "shape", a.shape, b.shape)
    if difference is not None:
        return difference
    if a.layout is torch.strided and not (a.is_meta or b.is_meta or a.is_quantized):
        if _have_same_bits(a, b):
            return None
        return compare_cells(_array(a), _array(b), at, torch_name(a.dtype))
    if a.layout is not torch.sparse_coo:  # `encode` rejects such tensors: do not compare cells
        return value_difference(at, a, b)
    difference = property_difference(at, "coalesced", a.is_coalesced(), b.is_coalesced())
    for part in ("_indices", "_values"):
        x, y = (getattr(tensor, part)() for tensor in (a, b))
        difference = difference or compare_tensors(x, y, step(at, part.strip("_")))
    return difference


def _layout_name(tensor: torch.Tensor) -> str:
    kind = "jagged" if is_jagged(tensor) else str(tensor.layout).removeprefix("torch.")
    return "nested" if tensor.is_nested and kind == "strided" else kind


def _compare_jagged(a: torch.Tensor, b: torch.Tensor, at: Difference) -> Difference | None:
    views = view_of(a, "left"), view_of(b, "right")
    difference = compare_rows(views, at)
    if difference is not None:
        return difference
    left, right = map(values_of, views)
    if _have_same_bits(left, right):
        return None
    return compare_jagged_cells(views, (_array(left), _array(right)), at)


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal, bit for bit; copies neither."""
    return torch.equal(as_words(a), as_words(to_device(b, a.device)))


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The cells of a tensor as an array; of unsigned words if numpy lacks the dtype."""
    stored = stored_dtype(torch_name(tensor.dtype), tensor.itemsize)
    return as_bytes(tensor).view(stored).reshape(tuple(tensor.shape))


add_comparisons(
    {
        Unbatched: _compare_unbatched,
        Payloads: _compare_payloads,
        LazyStack: _compare_stacks,
        TensorDictBatch: compare_batches,
        TensorClass: _compare_tensorclasses,
    }
)
