"""Tensors between the host and devices: those to the host are copied together, with one wait.

A copy by itself, as `Tensor.cpu` makes it, waits for everything the device was asked to do before.
One that is made with `non_blocking` may be read before it has arrived, so only this file makes any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from jagcodec.memory import aligned
from jagcodec.memory.tensor_bytes import flat_bytes


def to_device(
    tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
) -> torch.Tensor:
    """A tensor on a device. What goes to the host has arrived when this returns.

    With `non_blocking`, an accelerator may still be reading page-locked memory.
    """
    # From any other memory CUDA has read everything when the call returns, without a wait for the
    # device.
    if device.type == "cuda" and tensor.is_cpu and not tensor.is_pinned():
        non_blocking = True
    return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")


class HostCopies:
    """Host copies of device tensors."""

    def __init__(self, *, kept: bool = False) -> None:
        """Copies to read; or, if `kept`, tensors of their own, which autograd follows."""
        self._kept = kept
        # By address and layout: the parts of a jagged or sparse tensor are new objects each time.
        # The tensor is kept, so that its address is not reused.
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy those that are not on the CPU, each once, and wait for them once."""
        wanted: dict[tuple[Any, ...], torch.Tensor] = {}
        for tensor in tensors:
            if not tensor.is_cpu:
                place = _place(tensor)
                if place not in self._copies:
                    wanted[place] = tensor
        if wanted:
            copies = _on_host(list(wanted.values()), self._kept)
            for (place, tensor), copy in zip(wanted.items(), copies, strict=True):
                self._copies[place] = (tensor, copy)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was fetched; a CPU tensor itself."""
        return tensor if tensor.is_cpu else self._copies[_place(tensor)][1]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return (*kind, tensor.data_ptr(), tensor.shape, tensor.stride())


def _on_host(tensors: Sequence[torch.Tensor], kept: bool) -> list[torch.Tensor]:
    """Contiguous copies, complete when this returns; in one block, unless they are kept.

    Kept copies have memory of torch's own, which is pickled alone, and which torch does not reuse
    while a copy to a device reads it.
    """
    devices = {tensor.device for tensor in tensors if tensor.numel()}
    # A CUDA device writes to page-locked memory by itself.
    pinned = any(device.type == "cuda" for device in devices)
    options: dict[str, Any] = {"device": "cpu", "pin_memory": pinned}
    total = 0 if kept else sum(aligned(tensor.numel() * tensor.itemsize) for tensor in tensors)
    block = torch.empty(total, dtype=torch.uint8, **options)
    sources, copies = [], []
    for tensor in tensors:
        followed = kept and tensor.requires_grad and torch.is_grad_enabled()
        if followed or not tensor.numel():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, **options)
            copies.append(copy.copy_(tensor, non_blocking=True) if followed else copy)
            continue
        source = flat_bytes(tensor)
        sources.append(source)  # which may be a copy: until it has been read
        if kept:
            cells = torch.empty(source.numel(), dtype=torch.uint8, **options)
        else:
            cells, block = block[: source.numel()], block[aligned(source.numel()) :]
        cells.copy_(source, non_blocking=True)
        copies.append(cells.view(tensor.dtype).view(tensor.shape))
    for device in devices:
        module = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()  # the stream that the copies were put on
        else:
            module.synchronize()
    return copies
