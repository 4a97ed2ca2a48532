"""Device memory to the host: copied together, to pinned memory from CUDA, and waited for once.

A copy by itself, as `Tensor.cpu` makes it, waits for everything the device was told to do before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from jagcodec.memory.tensor_bytes import ALIGNMENT, flat_bytes


def stageable(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor is brought to the host by way of `Staging`; never one on the CPU."""
    return tensor.device.type not in ("cpu", "meta")


class Staging:
    """Tensors to bring to the host: `note` each of them, `fetch` all, then ask for each `on_host`.

    Tensors are known by where they lie and how, not by identity: those that make up a jagged or
    sparse tensor are new objects whenever they are asked for. What was noted is kept alive, so
    that no other tensor can come to lie there.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[Any, ...], torch.Tensor] = {}
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, tensor: torch.Tensor) -> bool:
        """Ask for a tensor; says whether it is one to be brought."""
        if not stageable(tensor) or not tensor.numel():
            return False
        self._noted.setdefault(_place(tensor), tensor)
        return True

    def fetch(self) -> None:
        """Copy what was noted and wait for it: one synchronisation for each device."""
        if self._noted:
            copies = copied_together(list(self._noted.values()))
            self._copies = dict(zip(self._noted, copies, strict=True))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that was fetched; any other tensor itself."""
        if not self._copies or not stageable(tensor):
            return tensor
        return self._copies.get(_place(tensor), tensor)


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


def copied_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous CPU tensors with the same cells, in one block that is freed with the last.

    The block is pinned for tensors on CUDA devices. The copies are complete when this returns.
    """
    sources = [flat_bytes(tensor) for tensor in tensors]
    sizes = [-(-source.numel() // ALIGNMENT) * ALIGNMENT for source in sources]
    devices = {source.device for source in sources if stageable(source)}
    pinned = any(device.type == "cuda" for device in devices)
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    copies = []
    starts = itertools.accumulate(sizes, initial=0)
    for tensor, source, start in zip(tensors, sources, starts, strict=False):
        cells = block[start : start + source.numel()]
        cells.copy_(source, non_blocking=True)
        copies.append(cells.view(tensor.dtype).view(tensor.shape))
    for device in devices:
        _wait_for(device)
    return copies


def _wait_for(device: torch.device) -> None:
    module = torch.get_device_module(device)
    if hasattr(module, "current_stream"):
        # The stream that the copies were put on.
        module.current_stream(device).synchronize()
    else:
        module.synchronize()
