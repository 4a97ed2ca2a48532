"""Copies between the host and devices: tensors reach the host together, with one wait.

`HostCopies` copies tensors to the host. `to_device` copies one tensor to any device: a large one
goes to a CUDA device through page-locked memory, without a wait for its earlier work.

`Tensor.cpu` waits for everything that the device was asked to do before, once for each tensor. A
`non_blocking` copy may be read before it has arrived, so only this file makes such copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from jagcodec.memory import aligned
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.tensor_bytes import (
    NUMPY_DTYPES,
    as_words,
    contiguous_bits,
    flat_bytes,
    from_words,
)


def to_device(
    tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
) -> torch.Tensor:
    """A tensor on a device. A copy to the host is complete when this returns.

    With `non_blocking`, a copy from page-locked memory may still be running after the return: do
    not write to `tensor` before it is done. Other memory has been read by then.
    """
    if tensor.device == device:
        return tensor
    needs_torch = tensor.is_nested or tensor.is_quantized or tensor.requires_grad
    is_plain = tensor.layout is torch.strided and not needs_torch and device.type != "meta"
    if is_plain:
        tensor = contiguous_bits(tensor)
        if tensor.dtype not in NUMPY_DTYPES:  # torch cannot move each of these to each device
            words = to_device(as_words(tensor), device, non_blocking=non_blocking)
            return from_words(words, tensor.dtype)
    read_at_once = _is_read_at_once(tensor, device)
    if read_at_once and is_plain and tensor.nbytes >= _MIN_STAGED_BYTES:
        with suppress(RuntimeError):  # the system has no more page-locked memory
            tensor = tensor.pin_memory()
    non_blocking = (non_blocking or read_at_once) and device.type != "cpu"
    return tensor.to(device, non_blocking=non_blocking)


_MIN_STAGED_BYTES = 1 << 20
"""A copy of a tensor of so many bytes or more is faster through page-locked memory.

CUDA copies other memory piece by piece, and waits for the device before the last ones.
"""


def _is_read_at_once(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether CUDA, which copies the tensor, has read it before a `non_blocking` call returns."""
    return device.type == "cuda" and tensor.is_cpu and not tensor.is_pinned()


class HostCopies:
    """Host copies of device tensors."""

    def __init__(self, *, independent: bool = False) -> None:
        """Make no copies yet.

        Callers only read the copies. If they are `independent`, each has its own memory, which
        callers may write to and pass on, and autograd follows it.
        """
        self._independent = independent
        # Keys are addresses and layouts, because each access to a part of a jagged or sparse tensor
        # makes a new object. The tensor is kept, so that its address is not reused.
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy each tensor that is not on the CPU once, and wait once for all."""
        sources: dict[tuple[Any, ...], torch.Tensor] = {}  # without those that were copied before
        for tensor in tensors:
            if not tensor.is_cpu:
                place = _place(tensor)
                if place not in self._copies:
                    sources[place] = tensor
        if sources:
            copies = _on_host(list(sources.values()), self._independent)
            for (place, tensor), copy in zip(sources.items(), copies, strict=True):
                self._copies[place] = (tensor, copy)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a fetched tensor; a CPU tensor is returned unchanged."""
        return tensor if tensor.is_cpu else self._copies[_place(tensor)][1]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key of the cells of a tensor: equal for two objects that are the same cells."""
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return (*kind, tensor.data_ptr(), tensor.shape, tensor.stride())


def _on_host(tensors: Sequence[torch.Tensor], independent: bool) -> list[torch.Tensor]:
    """Contiguous copies, complete when this returns; they share one block or are independent.

    Torch allocates each independent copy separately. So each is pickled without the others, and
    torch does not reuse its memory while a copy to a device reads it.
    """
    devices = {tensor.device for tensor in tensors if tensor.numel()}
    # A CUDA device can write to page-locked memory without the CPU.
    pinned = any(device.type == "cuda" for device in devices)
    options: dict[str, Any] = {"device": "cpu", "pin_memory": pinned}
    total = (
        0 if independent else sum(aligned(tensor.numel() * tensor.itemsize) for tensor in tensors)
    )
    block = torch.empty(total, dtype=torch.uint8, **options)
    sources, copies = [], []
    for tensor in tensors:
        is_followed = independent and tensor.requires_grad and torch.is_grad_enabled()
        if is_followed or not tensor.numel():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, **options)
            copies.append(copy.copy_(tensor, non_blocking=True) if is_followed else copy)
            continue
        source = flat_bytes(tensor)
        sources.append(source)  # it may be a copy: keep it until the device has read it
        if independent:
            cells = torch.empty(source.numel(), dtype=torch.uint8, **options)
        else:
            cells, block = block[: source.numel()], block[aligned(source.numel()) :]
        cells.copy_(source, non_blocking=True)
        copies.append(cells.view(tensor.dtype).view(tensor.shape))
    for device in devices:
        module = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()  # the copies are on this stream
        else:
            module.synchronize()
    return copies


def host_numbers(numbers: torch.Tensor, copies: HostCopies | None) -> IntArray:
    """The numbers of a tensor as int64s on the host; from `copies`, if they were fetched."""
    if not numbers.is_cpu:
        numbers = numbers.cpu() if copies is None else copies.of(numbers)
    return np.ascontiguousarray(numbers.detach().numpy(), dtype=np.int64)
