"""Pickles this library's values: their tensors as one message, and the rest as pickle does.

Torch's own pickles do not suffice: it cannot read those of many dtypes again, and the pickle of a
slice has its whole storage.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.errors import child_path
from jagcodec.memory.arrays import object_array
from jagcodec.memory.plain_types import remedy_for, usable_device
from jagcodec.memory.staging import to_device
from jagcodec.rows.nested import NESTED_TENSOR
from jagcodec.wire.limits import NO_LIMITS
from jagcodec.wire.read.decoder import decode
from jagcodec.wire.torch_dtypes import TORCH_NAMES
from jagcodec.wire.write.encoder import encode


class _Place(NamedTuple):
    """The placeholder of a tensor in a pickle."""

    name: str  # its name in the message


class _TensorKind(NamedTuple):
    """The properties of a tensor that a message does not hold."""

    device: str | None  # None for the CPU
    requires_grad: bool
    is_parameter: bool


def pickled_parts(make: Callable[[Any], Any], state: Any, protocol: int) -> tuple[Any, ...]:
    """The parts that `__reduce_ex__` returns for ``make(state)``.

    The tensors in the state, in dicts, lists, tuples and arrays of objects, go into a message. Its
    frames are out-of-band buffers from protocol 5 on. Torch pickles tensors that no message can
    hold, such as quantized ones. A tensor in several places stays one tensor.
    """
    taken = _Taken()
    rest = _map_leaves(state, taken.place_of, (), {})
    frames = encode(taken.tensors) if taken.tensors else []
    sent = [pickle.PickleBuffer(frame) if protocol >= 5 else bytes(frame) for frame in frames]
    return _made, (make, rest, taken.kinds, sent)


def _made(make: Callable[[Any], Any], rest: Any, kinds: dict[str, _TensorKind], frames: Any) -> Any:
    if not frames:
        return make(rest)
    tensors = decode(frames, limits=NO_LIMITS)
    for name, kind in kinds.items():
        tensors[name] = _of_kind(tensors[name], kind, name)
    return make(_map_leaves(rest, lambda place, _: tensors.get(place.name, place), (), {}))


def _of_kind(tensor: torch.Tensor, kind: _TensorKind, name: str) -> torch.Tensor:
    device = usable_device(kind.device, f"{name} of a pickle")
    if device is not None:
        tensor = to_device(tensor, device)
    if kind.is_parameter:
        return torch.nn.Parameter(tensor, kind.requires_grad)
    return tensor.requires_grad_() if kind.requires_grad else tensor


class _Taken:
    """The tensors of one pickle, by their names in the message."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, _TensorKind] = {}  # plain tensors on the CPU have none
        self._places: dict[int, _Place] = {}  # by the id of the tensor

    def place_of(self, tensor: Any, path: tuple[Any, ...]) -> Any:
        """The placeholder of a tensor; the tensor itself if no message can hold it."""
        if type(tensor) is _Place or not _fits_into_message(tensor):
            return tensor
        place = self._places.get(id(tensor))
        if place is None:
            name = functools.reduce(child_path, path, "$")
            name = name if name not in self.tensors else f"{name} ({len(self.tensors)})"
            place = self._places[id(tensor)] = _Place(name)
            self.tensors[name] = tensor
            device = None if tensor.is_cpu else str(tensor.device)
            kind = _TensorKind(device, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))
            if any(kind):
                self.kinds[name] = kind
        return place


_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, NESTED_TENSOR))
_LAYOUTS = (torch.strided, torch.jagged, torch.sparse_coo)


def _fits_into_message(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _TYPES or tensor.layout not in _LAYOUTS or tensor.is_quantized:
        return False
    jagged = tensor.layout is torch.jagged
    return tensor.dtype in TORCH_NAMES and not (tensor.is_meta if jagged else remedy_for(tensor))


_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))


def _map_leaves(
    value: Any,
    of_leaf: Callable[[Any, tuple[Any, ...]], Any],
    path: tuple[Any, ...],
    known: dict[int, tuple[Any, Any]],
) -> Any:
    """A value with all tensors and places replaced. Containers without any stay the same objects.

    `known` has each container and its replacement, by id: one in several places stays one object.
    """
    if type(value) is _Place or isinstance(value, torch.Tensor):
        return of_leaf(value, path)
    if id(value) in known:
        return known[id(value)][1]
    parts = _split_container(value)
    if parts is None:
        return value
    keys, items, make = parts
    if _PLAIN.issuperset(map(type, items)):
        return value
    known[id(value)] = value, value  # ends the walk of a container that holds itself
    new = [
        item if type(item) in _PLAIN else _map_leaves(item, of_leaf, (*path, key), known)
        for key, item in zip(keys, items, strict=True)
    ]
    if any(a is not b for a, b in zip(items, new, strict=True)):
        known[id(value)] = value, make(new)
    return known[id(value)][1]


def _split_container(
    value: Any,
) -> tuple[Iterable[Any], list[Any], Callable[[list[Any]], Any]] | None:
    """The keys and items of a container, and a function that makes a container of new items.

    Returns None if the value is not a container.
    """
    kind = type(value)
    if kind is dict:
        return list(value), list(value.values()), lambda new: dict(zip(value, new, strict=True))
    if kind is list or kind is tuple:
        return range(len(value)), list(value), kind
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._fields, list(value), value._make  # type: ignore[attr-defined]
    if kind is np.ndarray and value.dtype == object:
        shape = value.shape
        return range(value.size), list(value.flat), lambda new: object_array(new).reshape(shape)
    return None
