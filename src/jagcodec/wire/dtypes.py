"""What the wire calls the dtypes of torch, and of numpy."""

from __future__ import annotations

import torch

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES
from jagcodec.wire.checks import fail
from jagcodec.wire.spec import TORCH_DTYPES

DTYPES: dict[str, torch.dtype | None] = {name: getattr(torch, name, None) for name in TORCH_DTYPES}
"""The dtypes by name; None where this torch does not have one."""

TORCH_NAMES = {dtype: name for name, dtype in DTYPES.items() if dtype is not None}
"""Their names."""

NUMPY_NAMES = {dtype: TORCH_NAMES[torch_dtype] for torch_dtype, dtype in NUMPY_DTYPES.items()}
"""The names of the same dtypes of numpy."""

NAMED_ARRAYS = {name: dtype for dtype, name in NUMPY_NAMES.items()}
"""These dtypes of numpy by name."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a checked name."""
    dtype = DTYPES[name]
    if dtype is None:
        raise unknown_dtype(name)
    return dtype


def unknown_dtype(name: str) -> WireFormatError:
    """The error of a dtype that this torch does not have."""
    expected = f"expected a dtype of torch {torch.__version__}"
    return fail("unknown_dtype", f"{expected}, found {brief(name)}")
