"""Batches in Ray's object store as messages.

`put` makes one message of samples or of a dict of lists. `register` adds the hook, which makes a
message of each batch and jagged tensor that Ray writes. A bare dict is not a type of the hook: Ray
pickles it, and only the batches and jagged tensors in it become messages.

`options_of_environment` (`jagcodec.integrations`) reads the variable ``JAGCODEC_ENCODE`` for the
hook; `put` does not use it. `reduced` writes values, and `read` and `_batch` read them again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
from tensordict import LazyStackedTensorDict, TensorDict

from jagcodec import BatchedDataDict, encode_rows
from jagcodec._compiling import untraced
from jagcodec.integrations import Reducer, add_reducers, needed, restore_reducers
from jagcodec.memory.arrays import ByteArray, address, borrowed
from jagcodec.memory.blocks import allocate_together
from jagcodec.rows.nested import NESTED_TENSOR
from jagcodec.wire.frames import Frame
from jagcodec.wire.limits import NO_LIMITS
from jagcodec.wire.read.decoder import decode
from jagcodec.wire.read.wire_batch import WireBatch, open_wire
from jagcodec.wire.write.encoder import EncodeOptions, encode

with needed(__name__, "Ray: pip install 'ray>=2.40'"):
    import ray
    import ray.cloudpickle

VALUES: tuple[type, ...] = (TensorDict, LazyStackedTensorDict, NESTED_TENSOR, BatchedDataDict)


@untraced
def put(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]], **options: Any
) -> ray.ObjectRef:
    """Put samples, or a dict of lists such as slime's `train_data`, into Ray's store as a message.

    Example:
        .. code-block:: python

            import ray
            from jagcodec import to_rows
            from jagcodec.integrations.ray import put

            train_data = {"tokens": [[1, 2, 3], [1, 2]], "rewards": [1.0, 0.0]}
            batch = ray.get(put(train_data, meta={"step": 7}))
            samples = to_rows(batch)

    Args:
        rows: As for `encode_rows`: a list of samples, one dict each, or a dict of names to lists
            with an item per sample: a number, a list of numbers, a tensor, or any other value.
        options: Those of `encode_rows`. What belongs to the whole batch goes into `meta`.

    Returns:
        The reference of a `WireBatch`, with or without `register`. Raises as `encode_rows`.
    """
    return ray.put(open_wire(encode_rows(rows, **options), limits=NO_LIMITS))


@untraced
def register(**options: Unpack[EncodeOptions]) -> None:
    """Make Ray write batches to its object store in this wire format, from this process.

    Example:
        .. code-block:: python

            import ray
            from jagcodec.integrations.ray import register

            register()
            td = ray.get(ray.put(td))

    Args:
        options: Those of `encode`, such as `elide` for batches that repeat prompts or images, and
            `allow_pickle` and `default` for objects inside batches that cannot be encoded. For
            these, Ray otherwise raises a `TypeError` whose cause is `UnsupportedTypeError`. Calling
            this again replaces them. An option that you leave out is the one that the variable
            ``JAGCODEC_ENCODE`` names, as for `setup`.

    Raises:
        ArgumentError: ``JAGCODEC_ENCODE`` holds a word that `setup` does not know.

    Otherwise it is `jagcodec.integrations.setup`. What you get back is on the CPU and without
    gradients. A `WireBatch` keeps its object in the store until the last `WireBatch` or view over
    it is gone. Ray keeps subclasses of the types.
    """
    add_reducers(options)


@untraced
def unregister() -> None:
    """Undo `register` and `setup` in this process; what is in Ray's store stays readable."""
    restore_reducers()


@untraced
def reducers(**options: Any) -> dict[type, Reducer]:
    """For each type, the function that writes its values."""
    return {**dict.fromkeys(VALUES, partial(reduced, read, options)), WireBatch: _reduced_batch}


@untraced
def reduced(read: Callable[..., Any], options: dict[str, Any], value: Any) -> Any:
    """The function that reads a value, and its arguments: the frames of `encode`."""
    frames = [_pieces(frame) for frame in encode(value, **options)]
    return read, (frames, bool(options.get("allow_pickle")))


# Above this threshold Ray starts six threads for each buffer and waits for them. Up to eight times
# the threshold, that takes longer than the copy: see `python -m benchmarks.planes`.
_COPIED_AT_ONCE = 1 << 20
_WORTH_THREADS = 8 << 20


def _pieces(frame: Frame) -> list[pickle.PickleBuffer]:
    """A frame in pieces that Ray copies without threads, or whole if it is large."""
    view = memoryview(frame)
    if view.nbytes > _WORTH_THREADS:
        return [pickle.PickleBuffer(view)]
    view = view.cast("B")
    starts = range(0, max(view.nbytes, 1), _COPIED_AT_ONCE)
    return [pickle.PickleBuffer(view[start : start + _COPIED_AT_ONCE]) for start in starts]


def _reduced_batch(batch: WireBatch) -> Any:
    return _batch, ([_pieces(frame) for frame in batch.to_frames()],)


# Objects in the store refer to these functions by name: never rename or move them.


@untraced
def read(frames: list[list[Any]], allow_pickle: bool) -> Any:
    return decode(_owned(frames), allow_pickle=allow_pickle, limits=NO_LIMITS)


def _batch(frames: list[list[Any]]) -> WireBatch:
    # Make the frames read-only, so that whatever is read of them is copied: Ray keeps small objects
    # in the memory of the process, and gives all their readers the same memory.
    data = [_in_place(pieces).data.toreadonly() for pieces in frames]
    return open_wire(data, limits=NO_LIMITS)


def _in_place(pieces: list[Any]) -> ByteArray:
    """A frame in the store, without a copy where its pieces are adjacent."""
    arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
    if len(arrays) == 1:
        return arrays[0]
    # Ray writes buffers one after the other, each at a multiple of 64 bytes.
    starts = [address(array) for array in arrays]
    ends = [start + len(array) for start, array in zip(starts, arrays, strict=True)]
    if starts[1:] != ends[:-1]:
        return np.concatenate(arrays)
    return borrowed(starts[0], ends[-1] - starts[0], arrays, writable=False)


def _owned(frames: list[list[Any]]) -> list[ByteArray]:
    """Copy frames out of the store, which is read-only: a write there kills the process."""
    # Use one block: the system takes back many small blocks when they are freed, and zeroes them
    # again for the next batch, which costs more than the copy.
    sizes = [sum(memoryview(piece).nbytes for piece in pieces) for pieces in frames]
    owned = allocate_together(sizes)
    for pieces, memory in zip(frames, owned, strict=True):
        at = 0
        for piece in pieces:
            cells = np.frombuffer(piece, dtype=np.uint8)
            memory[at : at + len(cells)] = cells
            at += len(cells)
    return owned
