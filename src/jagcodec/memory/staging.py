"""Device tensors to the host: copied together, with one wait.

A copy by itself, as `Tensor.cpu` makes it, waits for everything the device was asked to do before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from jagcodec.memory import aligned
from jagcodec.memory.tensor_bytes import flat_bytes


class HostCopies:
    """Host copies of device tensors."""

    def __init__(self) -> None:
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
            copies = _on_host(list(wanted.values()))
            for (place, tensor), copy in zip(wanted.items(), copies, strict=True):
                self._copies[place] = (tensor, copy)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was fetched; a CPU tensor itself."""
        return tensor if tensor.is_cpu else self._copies[_place(tensor)][1]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = tensor.device, tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return (*kind, tensor.data_ptr(), tensor.shape, tensor.stride())


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies in one block that is freed with the last, complete when this returns."""
    devices = {tensor.device for tensor in tensors if tensor.numel()}
    # A CUDA device writes to page-locked memory by itself.
    pinned = any(device.type == "cuda" for device in devices)
    total = sum(aligned(tensor.numel() * tensor.itemsize) for tensor in tensors)
    block = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    sources, copies = [], []
    for tensor in tensors:
        if not tensor.numel():
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            continue
        source = flat_bytes(tensor)
        sources.append(source)  # which may be a copy: until it has been read
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
