"""Device tensors to the host: copied together, with one wait.

A copy by itself, as `Tensor.cpu` makes it, waits for everything the device was asked to do before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from jagcodec.memory import aligned
from jagcodec.memory.tensor_bytes import flat_bytes


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous CPU tensors with the same cells, in one block that is freed with the last.

    The copies are complete when this returns: one wait for each device. For CUDA devices the
    block is in page-locked memory, which such a device writes to by itself.
    """
    sources = [flat_bytes(tensor) if tensor.numel() else None for tensor in tensors]
    sizes = [0 if source is None else source.numel() for source in sources]
    devices = {source.device for source in sources if source is not None and not source.is_cpu}
    total = sum(map(aligned, sizes))
    pinned = any(device.type == "cuda" for device in devices)
    block = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    copies = []
    start = 0
    for tensor, source, size in zip(tensors, sources, sizes, strict=True):
        if source is None:
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            continue
        cells = block[start : start + size]
        cells.copy_(source, non_blocking=True)
        copies.append(cells.view(tensor.dtype).view(tensor.shape))
        start += aligned(size)
    for device in devices:
        _wait_for(device)
    return copies


def _wait_for(device: torch.device) -> None:
    module = torch.get_device_module(device)
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()  # the stream that the copies were put on
    else:
        module.synchronize()


class HostCopies:
    """Host copies of device tensors, by address and layout.

    Not by identity: the parts of a jagged or sparse tensor are new objects each time.
    """

    def __init__(self) -> None:
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
            copies = to_host(list(wanted.values()))
            for (place, tensor), copy in zip(wanted.items(), copies, strict=True):
                self._copies[place] = (tensor, copy)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was fetched; a CPU tensor itself."""
        return tensor if tensor.is_cpu else self._copies[_place(tensor)][1]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
