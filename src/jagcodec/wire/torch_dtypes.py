"""Names of torch's dtypes on the wire."""

from __future__ import annotations

import torch

from jagcodec.errors import brief
from jagcodec.wire.checks import fail
from jagcodec.wire.spec import TORCH_ITEMSIZES

TORCH_BY_NAME: dict[str, torch.dtype | None] = {
    name: getattr(torch, name, None) for name in TORCH_ITEMSIZES
}
"""The dtypes by name; None if this torch does not have it."""

TORCH_NAMES = {dtype: name for name, dtype in TORCH_BY_NAME.items() if dtype is not None}
"""The wire's names of the dtypes that this torch has."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a checked name."""
    dtype = TORCH_BY_NAME[name]
    if dtype is None:
        detail = f"expected a dtype of torch {torch.__version__}, found {brief(name)}"
        raise fail("unknown_dtype", detail)
    return dtype
