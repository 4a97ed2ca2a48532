"""The hot loop: copy ragged rows together, or apart into a rectangle.

A *row* here is a run of cells, a *cell* everything that lies under one index of dim 0. Both
functions move bytes and know no dtype. CPU memory goes through `memory`; other devices, and
tensors that autograd follows, through `indexed`. Callers check; nothing is checked here.
"""

from __future__ import annotations

import torch

from jagcodec.buffers import IntArray
from jagcodec.rowcopy import indexed, memory


def gather(cells: torch.Tensor, starts: IntArray, lengths: IntArray) -> torch.Tensor:
    """(M, ...) cells -> (sum(lengths), ...): rows ``cells[start : start + length]``, end to end.

    Rows may overlap, repeat and come in any order. The result owns its memory.
    """
    if cells.device.type == "cpu" and not cells.requires_grad:
        return memory.gather(cells, starts, lengths)
    return indexed.gather(cells, starts, lengths)


def scatter(
    values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """Write the rows that lie end to end in `values` to ``out[start : start + length]`` each.

    The runs must not overlap. Returns `out`, or for tensors that autograd follows a new tensor
    in its place.
    """
    if values.device.type == "cpu" and not values.requires_grad:
        return memory.scatter(values, lengths, out, starts)
    return indexed.scatter(values, lengths, out, starts)
