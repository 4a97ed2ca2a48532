"""Names of torch's dtypes on the wire."""

from __future__ import annotations

import torch

from jagcodec.wire.dtypes import CELL_DTYPES, cell_dtype
from jagcodec.wire.spec import TORCH_ITEMSIZES

TORCH_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in TORCH_ITEMSIZES if hasattr(torch, name)
}
"""The wire's names of the dtypes that this torch has."""

CELL_DTYPES.clear()
CELL_DTYPES.update({name: dtype for dtype, name in TORCH_NAMES.items()})


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a checked name."""
    dtype: torch.dtype = cell_dtype(name)
    return dtype
