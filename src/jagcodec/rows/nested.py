"""Nested tensors, made and taken apart: the only import of private torch.

Nested tensors are `torch.jagged` here; the last section handles torch's older layout, strided.
`nested_tensor` makes one. These take one apart: its rows become a `RaggedView`.

| function | when |
|---|---|
| `view_of` | for any use; `detach` decides whether gradients flow |
| `view_over_array` | the rows are only read: over an array, which is faster than over a tensor |
| `view_of_parts` | the caller has the parts, and may have fetched offsets from devices |
| `view_of_parts_unchecked` | the same, but `check_memory` has passed the values already |

Every public accessor of a nested tensor is a dispatched op of 5 to 25 microseconds. So the
functions here read the parts as attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import UnbatchedTensor

from jagcodec._arguments import ARRAY_TYPES
from jagcodec._dependencies import check_attributes, private_names
from jagcodec.errors import ArgumentError
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.memory.plain_types import TENSOR_TYPES, check_memory, check_plain
from jagcodec.memory.staging import HostCopies, host_numbers, to_device
from jagcodec.memory.tensor_bytes import (
    as_words,
    cat_bits,
    from_words,
    lacks_kernel,
    plain_array,
    refill,
)
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, end_to_end

with private_names("torch", tested="2.15.0"):
    from torch.nested._internal.nested_tensor import (
        NestedTensor,
        _store_val_in_tensor,
        get_tensor_symint,
    )

    _make_subclass: Any = torch.Tensor._make_wrapper_subclass
    _strided_view: Callable[..., torch.Tensor] = torch._nested_view_from_buffer
    _without_torch_function: Any = torch._C._disabled_torch_function_impl
    _DISPATCH_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor).add(
        torch._C.DispatchKey.AutogradNestedTensor
    )
    # Attributes that are read later, here and in other modules.
    check_attributes(
        NestedTensor(torch.empty(0), torch.zeros(1, dtype=torch.int64)),
        *("_values", "_offsets", "_lengths", "_ragged_idx", "_metadata_cache"),
        *("_size", "_strides"),
    )
    for _name in ("_coalesced_", "_indices", "_is_zerotensor", "_nested_tensor_size", "_values"):
        getattr(torch.Tensor, _name)  # a method may be of any class above: not `check_attributes`
    _mark_dynamic: Callable[..., None] = torch._dynamo.mark_dynamic

NESTED_TENSOR: type[torch.Tensor] = NestedTensor
"""The type of `torch.jagged` nested tensors, for dispatch by type."""


COLUMN_TYPES: frozenset[type] = TENSOR_TYPES | ARRAY_TYPES | {NESTED_TENSOR, UnbatchedTensor}
"""The types of tensors and arrays that a column may be."""


def check_column(column: Any, path: str) -> None:
    """Refuse a tensor or an array of any other type as a column."""
    if type(column) not in COLUMN_TYPES and isinstance(column, (torch.Tensor, np.ndarray)):
        check_plain(column, path)


def check_jagged(jagged: torch.Tensor, path: str) -> None:
    """Refuse a jagged tensor whose values or offsets cannot be read."""
    parts = parts_of(jagged)
    for part in (parts.values, parts.offsets):
        check_plain(part, path)


def is_jagged(value: object) -> bool:
    """Whether `value` is a `torch.jagged` nested tensor: ``value.layout is torch.jagged``."""
    return type(value) is NestedTensor


class NestedParts(NamedTuple):
    """The parts of a nested tensor, unread."""

    values: torch.Tensor
    offsets: torch.Tensor  # (N + 1,), on the device of the values
    lengths: torch.Tensor | None  # (N,) if there are holes between the rows
    ragged_dim: int


# --- taken apart -------------------------------------------------------------------------------


def parts_of(jagged: torch.Tensor, *, detach: bool = True) -> NestedParts:
    """The parts of a nested tensor.

    `detach` detaches the values, which is cheaper than to detach the nested tensor.
    """
    inner: Any = jagged
    values = inner._values
    if detach:
        values = values.detach() if values.requires_grad else values
    elif _is_followed(jagged):
        values = inner.values()
    return NestedParts(values, inner._offsets, inner._lengths, inner._ragged_idx)


def _is_followed(jagged: torch.Tensor) -> bool:
    """Whether autograd follows the nested tensor itself, and not the values inside it.

    This is so for a nested tensor that is a leaf, or the result of a torch function.
    """
    inner: Any = jagged
    if inner._values.requires_grad or not torch.is_grad_enabled():
        return False
    # Its dispatch takes ten times as long. This is one call of C: an error that a signal handler
    # raises at the end of a `with` would leave the dispatch of the thread off.
    return bool(_without_torch_function(_requires_grad, (), (jagged,), {}))


_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def offsets_of(jagged: torch.Tensor) -> torch.Tensor | None:
    """The offsets of a nested tensor; None if there are holes between its rows."""
    inner: Any = jagged
    offsets: torch.Tensor | None = inner._offsets if inner._lengths is None else None
    return offsets


def rows_in(jagged: torch.Tensor) -> int:
    """N: ``jagged.size(0)``."""
    inner: Any = jagged
    return len(inner._offsets) - 1


def view_of(
    jagged: torch.Tensor, path: str, pool: RowSplitsPool | None = None, *, detach: bool = True
) -> RaggedView:
    """The rows of a nested tensor in place. One device sync, none for a CPU tensor."""
    return view_of_parts(parts_of(jagged, detach=detach), path, pool or RowSplitsPool())


def view_over_array(jagged: torch.Tensor, path: str, pool: RowSplitsPool) -> RaggedView:
    """A view that is only read: over an array, unless autograd must follow the values."""
    inner: Any = jagged
    values = inner._values
    row_splits = pool.of_source(inner._offsets)
    array = None if _is_followed(jagged) else plain_array(values)
    if row_splits is None or inner._lengths is not None or array is None:
        return view_of(jagged, path, pool, detach=not torch.is_grad_enabled())
    dim, shape = inner._ragged_idx, array.shape
    if shape[dim - 1] != row_splits.total or not array.flags.c_contiguous:
        return view_of(jagged, path, pool)
    return RaggedView(array, values.dtype, shape, dim, starts=None, row_splits=row_splits)


def view_of_parts(
    parts: NestedParts, path: str, pool: RowSplitsPool, copies: HostCopies | None = None
) -> RaggedView:
    """The rows in place. Shared offsets are read once, from `copies` if they are on a device."""
    check_memory(parts.values, path)
    return view_of_parts_unchecked(parts, path, pool, copies)


def view_of_parts_unchecked(
    parts: NestedParts, path: str, pool: RowSplitsPool, copies: HostCopies | None = None
) -> RaggedView:
    """`view_of_parts` without the check of the values, which `check_memory` has passed."""
    values, dim = parts.values, parts.ragged_dim
    shape = tuple(values.shape)
    cells = shape[dim - 1]
    row_splits = pool.of_source(parts.offsets) if parts.lengths is None else None
    if row_splits is not None and row_splits.total == cells:
        return RaggedView(values, values.dtype, shape, dim, starts=None, row_splits=row_splits)
    if parts.offsets.is_meta:
        check_plain(parts.offsets, path)
    if copies is None and parts.lengths is not None:
        copies = HostCopies()
        copies.fetch((parts.offsets, parts.lengths))  # waits once for both
    host = host_numbers(parts.offsets, copies)
    row_splits = RowSplits.from_offsets(host) if parts.lengths is None else None
    if row_splits is not None and row_splits.total == cells:
        row_splits.offsets_tensors[parts.offsets.device] = parts.offsets
        pool.remember(parts.offsets, row_splits)
        return RaggedView(values, values.dtype, shape, dim, starts=None, row_splits=row_splits)
    # The rows have holes between them, or they begin or end inside the values.
    starts = host[:-1]
    lengths = np.diff(host) if parts.lengths is None else host_numbers(parts.lengths, copies)
    if not ((starts >= 0) & (lengths >= 0) & (lengths <= cells - starts)).all():
        detail = (
            f"expected rows within the {cells} cells of the values, "
            f"found offsets {host.tolist()!r:.80}"
        )
        raise ArgumentError("bad_length", path, detail)
    row_splits = RowSplits.from_lengths(lengths)
    return RaggedView(values, values.dtype, shape, dim, starts, row_splits)


# --- made --------------------------------------------------------------------------------------


def nested_tensor(values: torch.Tensor, row_splits: RowSplits, ragged_dim: int = 1) -> torch.Tensor:
    """Rows end to end along dim ``ragged_dim - 1``, with the offsets tensor of `row_splits`."""
    # Give torch the lengths of the shortest and longest row: without them it pads rows to the sum
    # of all lengths (pytorch/pytorch#159380).
    device = values.device
    offsets = row_splits.offsets_tensors.get(device)
    if offsets is None:
        offsets = _new_offsets(row_splits, device)
    if values.requires_grad:
        low, high = row_splits.min, row_splits.max
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, jagged_dim=ragged_dim, min_seqlen=low, max_seqlen=high
        )
    # Without a gradient, this does the same as that call, but three times as fast, and without the
    # warning about fx tracing that torch 2.13 logs in every process.
    shared = row_splits.jagged_parts
    bounds = dict(shared.get("bounds") or shared.setdefault("bounds", _new_bounds(row_splits)))
    jagged = _wrapper_of(values)
    # Columns of equal rows and shapes differ only in their values. Copying the other attributes
    # takes a tenth of the constructor's time.
    key = (values.shape, ragged_dim, device) if values.is_contiguous() else None
    like = shared.get(key)
    if like is not None:
        jagged.__dict__.update(like, _values=values, _metadata_cache=bounds)
        return jagged  # type: ignore[no-any-return]
    sizes, strides = values.shape, values.stride()
    before, after = sizes[: ragged_dim - 1], sizes[ragged_dim:]
    ragged = get_tensor_symint(offsets, coeff=1)  # type: ignore[no-untyped-call]
    jagged._ragged_idx = ragged_dim
    jagged._size = (row_splits.rows, *before, ragged, *after)
    jagged._strides = (ragged * strides[ragged_dim - 1], *strides)
    NestedTensor.__init__(jagged, values, offsets, _metadata_cache=bounds, _ragged_idx=ragged_dim)
    if key is not None:
        shared[key] = {k: v for k, v in vars(jagged).items() if k != "_values"}
    return jagged  # type: ignore[no-any-return]


def _wrapper_of(values: torch.Tensor) -> Any:
    """A nested tensor of these values that still lacks its attributes."""
    # Torch reads only the number of sizes given here, never the sizes: a nested tensor answers with
    # its `_size` and `_strides`. NestedTensor's constructor passes SymInts instead. Torch then
    # calls Python, and turns an error of a signal handler there into a TypeError.
    sizes = (0, *values.shape)
    return _make_subclass(
        NestedTensor,
        sizes,
        sizes,
        0,
        torch.contiguous_format,
        values.dtype,
        torch.jagged,
        values.device,
        False,  # pin_memory
        False,  # requires_grad
        "sizes",  # dispatch_sizes_strides_policy
        False,  # dispatch_device
        True,  # dispatch_layout
        _DISPATCH_KEYS,
        storage_size=values.untyped_storage().size(),
    )


def _new_offsets(row_splits: RowSplits, device: torch.device) -> torch.Tensor:
    """The offsets tensor that all columns of these rows share on a device."""
    offsets = to_device(torch.from_numpy(row_splits.offsets_array), device)
    # Torch gives each offsets tensor a number when it first sees it, without a lock. Have it do so
    # before other threads can see the tensor: otherwise columns of the same rows may get different
    # numbers.
    get_tensor_symint(offsets, coeff=1)  # type: ignore[no-untyped-call]
    shared: torch.Tensor = row_splits.offsets_tensors.setdefault(device, offsets)
    return shared


def _new_bounds(row_splits: RowSplits) -> dict[str, torch.Tensor]:
    """The lengths of the shortest and longest row, in the form that all columns of them share."""
    lengths = {"min_seqlen": row_splits.min, "max_seqlen": row_splits.max}
    bounds = {name: _store_val_in_tensor(length) for name, length in lengths.items()}
    # Each constructor of torch marks its bounds, in steps that two threads must not take at once.
    # Marks that are set before other threads can see the bounds stay unchanged.
    for bound in bounds.values():
        _mark_dynamic(bound, 0)
    return bounds


# --- strided -----------------------------------------------------------------------------------


def strided_nested(values: torch.Tensor, shapes: IntArray) -> torch.Tensor:
    """A strided nested tensor over `values`, which holds components of these (N, rank) shapes."""
    if not len(shapes):
        options: dict[str, Any] = {"dtype": values.dtype, "device": values.device}
        try:
            return torch.nested.as_nested_tensor([], layout=torch.strided, **options)
        except RuntimeError as error:  # torch fills a tensor, but some dtypes lack the kernel
            if not lacks_kernel(error):
                raise
            none = torch.empty((0, 0), dtype=torch.int64)
            return _strided_view(values[:0], none, none, none.view(-1))
    # Torch ignores the offset of a storage, and 2.6 wants a storage without other cells.
    if values.storage_offset() or values.untyped_storage().nbytes() != values.nbytes:
        grad = values.requires_grad
        values = values.clone() if grad else from_words(as_words(values).clone(), values.dtype)
    strides = np.ones_like(shapes)
    for dim in range(shapes.shape[1] - 1, 0, -1):
        np.multiply(strides[:, dim], shapes[:, dim], out=strides[:, dim - 1])
    ends = np.cumsum(shapes.prod(axis=1))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    parts = map(torch.from_numpy, (np.ascontiguousarray(shapes), strides, starts))
    return _strided_view(values, *parts)


def strided_parts(nested: torch.Tensor) -> tuple[torch.Tensor, IntArray]:
    """The cells of a strided nested tensor end to end, and (N, rank) shapes of its components."""
    if nested.requires_grad or not nested.is_contiguous():
        rows = nested.unbind()
        shapes = np.array([row.shape for row in rows], dtype=np.int64)
        return torch.cat([row.reshape(-1) for row in rows]), shapes
    inner: Any = nested
    shapes = inner._nested_tensor_size().numpy()
    return nested.values()[: int(shapes.prod(axis=1).sum())], shapes


def view_of_strided(nested: torch.Tensor, path: str, pad_bits: bytes | None = None) -> RaggedView:
    """The rows of a strided nested tensor end to end along the first dim in which they differ.

    With `pad_bits`, each later dim in which they differ is padded to its largest size.
    """
    check_memory(nested, path)
    rows = list(nested.unbind())
    shapes = np.array([row.shape for row in rows], dtype=np.int64)
    dims = np.flatnonzero((shapes != shapes[:1]).any(axis=0)).tolist()
    if len(dims) > 1 and pad_bits is None:
        detail = (
            f"expected rows that differ in one dim, found {len(dims)}; "
            "pad them (layout='padded') or name the column in keep_jagged"
        )
        raise ArgumentError("bad_shape", path, detail)
    dim = dims[0] if dims else 0
    lengths = shapes[:, dim].copy()
    shape = shapes.max(axis=0).tolist()
    shape[dim] = total_of(lengths)
    check_extent(shape, nested.itemsize, path)
    row_splits = RowSplits.from_lengths(lengths)
    if len(dims) < 2 or pad_bits is None:
        return end_to_end(cat_bits(rows, dim), row_splits, dim + 1)
    values = refill(rows[0].detach().new_empty(shape), pad_bits)
    for row, start in zip(rows, row_splits.starts.tolist(), strict=True):
        place = values if row.requires_grad else as_words(values)
        cells = row if row.requires_grad else as_words(row)
        for axis, size in enumerate(row.shape):
            place = place.narrow(axis, start if axis == dim else 0, size)
        place.copy_(cells)
    return end_to_end(values, row_splits, dim + 1)
