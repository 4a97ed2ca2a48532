"""Batches through Ray's object store by this wire: `register`, in every process that writes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from tensordict import LazyStackedTensorDict, TensorDict
from torch.nested._internal.nested_tensor import NestedTensor

from jagcodec.batch.batched_data_dict import BatchedDataDict
from jagcodec.memory.blocks import allocate_together
from jagcodec.memory.tensor_bytes import ByteArray, address, borrowed
from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import encode
from jagcodec.wire.frames import Frame
from jagcodec.wire.lazy import WireBatch, open_wire

try:
    from ray import cloudpickle
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jagcodec.integrations.ray needs Ray: pip install 'jagcodec[ray]'", name=error.name
    ) from error

VALUES: tuple[type, ...] = (TensorDict, LazyStackedTensorDict, NestedTensor, BatchedDataDict)

# What Ray did with these types before: None where it had no reducer of its own.
_before: dict[type, Callable[[Any], Any] | None] = {}


def register(*, allow_pickle: bool = False) -> None:
    """Let Ray carry batches by this wire, from now on and out of this process.

    `ray.put`, results and task arguments that are, or hold at any depth, a TensorDict, a jagged
    tensor, a `BatchedDataDict` or a `WireBatch` are written to the object store as the frames of
    `encode`. Call it in the driver, and name it as ``worker_process_setup_hook`` for workers. Who
    only reads needs jagcodec installed and nothing else. To call it twice is harmless.

    Args:
        allow_pickle: Pickle objects inside batches that cannot ride, instead of refusing them.

    A TensorDict, a jagged tensor and a BatchedDataDict are copied as they are read and may be
    written to, as `decode` documents them: on the CPU, without gradients. A `WireBatch` reads the
    store in place: its header at once, a column when it is asked for; what it hands out is a
    copy. It keeps its object in the store. Of a `WireBatch` the chosen rows and columns are
    written.

    Exactly these classes are meant, not their subclasses. While one is written, Ray sees no
    ObjectRef in it (they are refused) and no tensor to send by a `tensor_transport`.

    Raises:
        UnsupportedTypeError: Not here, but where Ray writes a batch that holds an object which
            cannot ride.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations.ray import register

            register()
            ray.init(runtime_env={
                "worker_process_setup_hook": "jagcodec.integrations.ray.register"
            })
            td = ray.get(ray.put(td))
    """
    read = _with_pickles if allow_pickle else _value
    reducers: dict[type, Callable[[Any], Any]] = dict.fromkeys(
        VALUES, partial(reduced, read=read, allow_pickle=allow_pickle)
    )
    carry({**reducers, WireBatch: _reduced_batch})


def carry(reducers: Mapping[type, Callable[[Any], Any]]) -> None:
    """Let Ray reduce values of these types so, until `unregister`."""
    for cls, reducer in reducers.items():
        _before.setdefault(cls, cloudpickle.CloudPickler.dispatch.get(cls))
        cloudpickle.CloudPickler.dispatch[cls] = reducer


def unregister() -> None:
    """Let Ray write batches as it did before `register`; what is in its store stays readable."""
    for cls, reducer in _before.items():
        if reducer is None:
            cloudpickle.CloudPickler.dispatch.pop(cls, None)
        else:
            cloudpickle.CloudPickler.dispatch[cls] = reducer
    _before.clear()


def reduced(value: Any, *, read: Callable[[list[Any]], Any], **options: bool) -> Any:
    """A value as the function that reads it, and the frames of `encode` with these options."""
    return read, ([_pieces(frame) for frame in encode(value, **options)],)


# Ray's threshold, above which it starts six threads for a buffer and waits for them. Up to eight
# times as much they take longer than the copy: `python -m benchmarks.ray_store` shows it.
_COPIED_AT_ONCE = 1 << 20
_WORTH_THREADS = 8 << 20


def _pieces(frame: Frame) -> list[pickle.PickleBuffer]:
    """A frame in pieces that Ray copies to its store at once, or whole where it is large."""
    view = memoryview(frame)
    if view.nbytes > _WORTH_THREADS:
        return [pickle.PickleBuffer(view)]
    view = view.cast("B")
    starts = range(0, max(view.nbytes, 1), _COPIED_AT_ONCE)
    return [pickle.PickleBuffer(view[start : start + _COPIED_AT_ONCE]) for start in starts]


def _reduced_batch(batch: WireBatch) -> Any:
    return _batch, ([_pieces(frame) for frame in batch.to_frames()],)


# What objects in the store name: these stay where they are.


def _value(frames: list[list[Any]]) -> Any:
    return decode(owned(frames))


def _with_pickles(frames: list[list[Any]]) -> Any:
    return decode(owned(frames), allow_pickle=True)


def _batch(frames: list[list[Any]]) -> WireBatch:
    # As read-only memory, so that whatever is read is copied: small objects do not lie in the
    # store, and every reader of a process is given the same memory.
    return open_wire([_in_place(pieces).data.toreadonly() for pieces in frames])


def _in_place(pieces: list[Any]) -> ByteArray:
    """A frame where it lies in the store."""
    arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
    if len(arrays) == 1:
        return arrays[0]
    # Ray writes buffers one behind the other, each at a multiple of 64 bytes.
    starts = [address(array) for array in arrays]
    ends = [start + len(array) for start, array in zip(starts, arrays, strict=True)]
    if starts[1:] != ends[:-1]:
        return np.concatenate(arrays)
    return borrowed(starts[0], ends[-1] - starts[0], arrays, writable=False)


def owned(frames: list[list[Any]]) -> list[ByteArray]:
    """Frames copied out of the store: it is read-only, and a write there kills the process.

    Into one block: of many blocks the system takes each back at once, and zeroes it anew for the
    next batch, which costs more than the copy.
    """
    sizes = [sum(memoryview(piece).nbytes for piece in pieces) for pieces in frames]
    owned = allocate_together(sizes)
    for pieces, room in zip(frames, owned, strict=True):
        at = 0
        for piece in pieces:
            cells = np.frombuffer(piece, dtype=np.uint8)
            room[at : at + len(cells)] = cells
            at += len(cells)
    return owned
