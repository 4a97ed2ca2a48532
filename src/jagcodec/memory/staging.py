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

    def __init__(self, *, follow: bool = False) -> None:
        """Copies that autograd does not follow, unless they are to `follow` their tensors."""
        self._follow = follow
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
            copies = _on_host(list(wanted.values()), self._follow)
            for (place, tensor), copy in zip(wanted.items(), copies, strict=True):
                self._copies[place] = (tensor, copy)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was fetched; a CPU tensor itself."""
        return tensor if tensor.is_cpu else self._copies[_place(tensor)][1]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return (*kind, tensor.data_ptr(), tensor.shape, tensor.stride())


def _on_host(tensors: Sequence[torch.Tensor], follow: bool) -> list[torch.Tensor]:
    """Contiguous copies, complete when this returns, each with a storage of its own.

    They are in one block that is freed with the last; those that autograd follows are apart.
    """
    devices = {tensor.device for tensor in tensors if tensor.numel()}
    # A CUDA device writes to page-locked memory by itself.
    pinned = any(device.type == "cuda" for device in devices)
    followed = [follow and tensor.requires_grad for tensor in tensors]
    sizes = [
        0 if apart else tensor.numel() * tensor.itemsize
        for tensor, apart in zip(tensors, followed, strict=True)
    ]
    options: dict[str, Any] = {"device": "cpu", "pin_memory": pinned}
    block = torch.empty(sum(map(aligned, sizes)), dtype=torch.uint8, **options).numpy()
    sources, copies = [], []
    for tensor, size, apart in zip(tensors, sizes, followed, strict=True):
        if not size:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, **options)
            copies.append(copy.copy_(tensor, non_blocking=True) if apart else copy)
            continue
        source = flat_bytes(tensor)
        sources.append(source)  # which may be a copy: until it has been read
        # A storage of just these bytes, so that one copy is pickled without the others.
        cells, block = torch.from_numpy(block[:size]), block[aligned(size) :]
        cells.copy_(source, non_blocking=True)
        copies.append(cells.view(tensor.dtype).view(tensor.shape))
    for device in devices:
        module = torch.get_device_module(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()  # the stream that the copies were put on
        else:
            module.synchronize()
    return copies
