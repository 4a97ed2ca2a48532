"""Checks of arguments with tensors: which types are plain, and the remedy for each other type.

A subclass of a tensor or an array adds something that matters: a mask, a placement, fields. A
copy would silently lose it, or fail inside torch, so every function refuses such types by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor

from jagcodec._arguments import FOREIGN_ERRORS, array_remedy, int_or_none
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import has_memory, resolved

TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, MemoryMappedTensor))
"""The types of plain tensors; only `rows.nested` knows the type of jagged ones."""

LENGTH_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""The dtypes that lengths and offsets may have."""

_REMEDIES = {
    "DTensor": "call .full_tensor() first",
    "AsyncCollectiveTensor": "call .wait() first",
    "MaskedTensor": "call .to_tensor(fill) first",
    "FakeTensor": "it has no values; leave FakeTensorMode first",
    "UninitializedTensorMixin": "it has no values yet; run its module once first",
    "Tensor": "call .as_subclass(torch.Tensor) first, which keeps the values alone",
}
"""What to do with a subclass: the entry of its class, or of the first base that has one."""


def remedy_for(value: Any) -> str:
    """What to do with a tensor or an array whose values cannot be read; empty if they can."""
    if isinstance(value, np.ndarray):
        return array_remedy(value)
    kind = type(value)
    if kind not in TENSOR_TYPES:
        return next(_REMEDIES[base.__name__] for base in kind.__mro__ if base.__name__ in _REMEDIES)
    if value.is_meta:
        return "a meta tensor has no values; make it on another device"
    try:
        if value.layout is not torch.strided or has_memory(value):
            return ""
    except (RuntimeError, NotImplementedError):  # the tensor has no storage
        return "it has no memory of its own, as inside torch.vmap and torch.func; leave that first"
    reason = "its storage was made smaller than its cells, as FSDP frees parameters"
    return f"{reason}; gather it, or pass what is left as a slice"


def with_remedy(value: Any) -> str:
    """The description of an unreadable tensor or array, and its remedy; empty if it can be read."""
    remedy = remedy_for(value)
    name = describe(value) if type(value) in TENSOR_TYPES else f"a {type(value).__name__}"
    return f"{name}; {remedy}" if remedy else ""


def check_plain(value: Any, path: str) -> None:
    """Refuse an array or a tensor (but not a jagged one) whose values cannot be read."""
    if remedy_for(value):
        expected = "an array" if isinstance(value, np.ndarray) else "a tensor"
        detail = f"expected {expected} whose values can be read, found {with_remedy(value)}"
        raise ArgumentTypeError("bad_type", path, detail)
    if isinstance(value, torch.Tensor) and value.is_quantized:  # torch may crash on its bits
        detail = f"expected a plain dtype, found {value.dtype}; dequantise it first"
        raise ArgumentTypeError("bad_dtype", path, detail)


def check_memory(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor without memory to copy rows from. Meta tensors pass: they have shapes."""
    if not (type(tensor) in TENSOR_TYPES and tensor.is_meta):
        check_plain(tensor, path)


def check_rectangle(value: Any, path: str) -> None:
    """Refuse anything but a plain strided tensor that is not nested."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        detail = f"expected a padded (strided) tensor, found {describe(value)}"
        raise ArgumentTypeError("bad_type", path, detail)
    check_plain(value, path)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, path: str
) -> None:
    """Refuse a caller's `out` if cells of this shape cannot be written to it."""
    fits = (
        type(out) in TENSOR_TYPES
        and not remedy_for(out)
        and out.layout is torch.strided
        and not out.is_nested
        and (tuple(out.shape), out.dtype) == (shape, dtype)
        and out.device == device
        and out.is_contiguous()
        and not out.requires_grad
    )
    if not fits:
        detail = (
            f"expected a contiguous {dtype} tensor {shape} on {device} without a gradient, "
            f"found {describe(out)}"
        )
        raise ArgumentError("bad_shape", path, detail)


def is_followed(memory: Any) -> bool:
    """Whether memory is a tensor that autograd follows."""
    return isinstance(memory, torch.Tensor) and memory.requires_grad


def check_not_followed(memory: Any, path: str) -> None:
    """Refuse to reuse the caller's memory for a column that autograd follows.

    The backward pass of an earlier step may still need what the memory holds.
    """
    if is_followed(memory):
        detail = "expected a column without a gradient, found one with it; use torch.no_grad()"
        raise ArgumentError("conflict", path, detail)


def host_tensor(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """A caller's tensor on the host, aliased if possible; another layout is returned unchanged."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    check_rectangle(tensor, path)
    return resolved(tensor.detach().cpu())


def usable_device(device: Any, path: str) -> torch.device | None:
    """The device, if tensors can be put there; None stays None."""
    if device is None:
        return None
    # Torch accepts other types, too, and crashes the process if one reports a wrong length.
    has_name = isinstance(device, (str, torch.device))
    name_or_number = device if has_name else int_or_none(device)
    detail = f"expected a device of this machine, found {brief(device)}"
    if name_or_number is None:
        raise ArgumentError("bad_option", path, detail)
    try:
        if str(name_or_number) == "meta":
            return torch.device("meta")
        return torch.empty(0, device=name_or_number).device
    except (*FOREIGN_ERRORS, AssertionError) as error:
        raise ArgumentError("bad_option", path, f"{detail}: {error}") from error
