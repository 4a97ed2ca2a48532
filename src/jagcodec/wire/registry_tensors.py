"""Types of torch and tensordict by name: registered when one of them turns up, or its name does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)

from jagcodec.errors import brief
from jagcodec.memory.arrays import torch_name
from jagcodec.rows import non_tensor
from jagcodec.wire.registry import NamedType, register_types, require_type


def state_functions(cls: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The functions from a value of a class of tensordict to a state and back; None for others."""
    if issubclass(cls, non_tensor.NonTensorDataBase):
        return _non_tensor_data_of, partial(_non_tensor, cls)
    if is_tensorclass(cls):
        return _parts_of_tensorclass, partial(_tensorclass, cls)
    if issubclass(cls, TensorDictBase) and hasattr(cls, "__required_keys__"):
        return non_tensor.source_of, lambda td: cls.from_tensordict(
            _tensordict_of_state(td), check=False
        )
    return None


def _parts_of_tensorclass(value: Any) -> Any:
    fields, others = non_tensor.fields_of(value)
    return (fields, others) if others else fields


def _tensorclass(cls: Any, state: Any) -> Any:
    fields, others = state if type(state) is tuple else (state, {})
    return non_tensor.tensorclass_of(cls, _tensordict_of_state(fields), require_type(others, dict))


def _tensordict_of_state(state: Any) -> TensorDictBase:
    if not isinstance(state, TensorDictBase) or isinstance(state, NonTensorStack):
        raise ValueError(f"expected a TensorDict, found {type(state).__name__}")
    return state


def _non_tensor_data_of(value: Any) -> NonTensorData:
    return NonTensorData(value.data, batch_size=value.batch_size, names=value.names)


def _non_tensor(cls: Any, payload: Any) -> Any:
    return cls(require_type(payload, NonTensorData).data, batch_size=payload.batch_size)


def _size(state: Any) -> torch.Size:
    if not all(-(1 << 63) <= require_type(dim, int) < 1 << 63 for dim in require_type(state, list)):
        raise ValueError("expected integers of 64 bits")
    return torch.Size(state)


# Of every dtype that this torch has: a dtype itself can be encoded even where its tensors cannot.
_DTYPES = {
    torch_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _dtype(state: Any) -> torch.dtype:
    if require_type(state, str) not in _DTYPES:
        raise ValueError(f"expected a dtype of torch {torch.__version__}, found {brief(state)}")
    return _DTYPES[state]


def _device(state: Any) -> torch.device:
    kind, number = state
    # Before torch is asked, which quotes what it does not know.
    if not (require_type(kind, str).isascii() and kind.isalnum()):
        raise ValueError(f"expected a device type, found {brief(kind)}")
    if number is None:
        return torch.device(kind)
    if not 0 <= require_type(number, int) < 128:
        raise ValueError(f"expected a device number from 0 to 127, found {brief(number)}")
    return torch.device(kind, number)


def _unbatched_of_state(state: Any) -> Any:
    size, tensor = state
    if not (size is None or type(size) is torch.Size) or type(tensor) is not torch.Tensor:
        raise ValueError("expected a batch size or None, and a tensor")
    return non_tensor.unbatched_of(size, tensor)


TYPES: tuple[NamedType, ...] = (
    NamedType(torch.Size, "torch.Size", list, _size),
    NamedType(torch.dtype, "torch.dtype", torch_name, _dtype),
    NamedType(torch.device, "torch.device", operator.attrgetter("type", "index"), _device),
    NamedType(MetaData, "tensordict.MetaData", _non_tensor_data_of, partial(_non_tensor, MetaData)),
    NamedType(
        UnbatchedTensor,
        "tensordict.UnbatchedTensor",
        non_tensor.unbatched_parts,
        _unbatched_of_state,
    ),
)

register_types(TYPES)
