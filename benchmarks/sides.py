"""The ways to send a batch: those of jagcodec, those of others, and the floor.

Other formats are used as a careful user would use them. Libraries that only one side needs are
imported where that side is made, in its own process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

import jagcodec
from benchmarks.measure import Step
from benchmarks.shapes import PADS, Batch


@dataclass(frozen=True)
class Side:
    """One way to send a batch."""

    send: tuple[Step, ...]  # from the batch to a list of frames
    receive: tuple[Step, ...]  # from the receive buffers, one per frame, to rectangles by name
    buffer: Callable[[int], bytearray | bytes] = bytearray  # of a size


# --- jagcodec ----------------------------------------------------------------------------------


def fused(batch: Batch) -> Side:
    """`encode_fields`, then `materialize(frames)`: the example of the README."""
    return Side(
        send=(("encode_fields", lambda _: _encode_fields(batch)),),
        receive=(
            ("materialize", lambda frames: jagcodec.materialize(frames, pad_value_dict=PADS)),
        ),
    )


def reused(batch: Batch) -> Side:
    """The same with a message buffer and an output that are reused."""
    size = sum(memoryview(frame).nbytes for frame in _encode_fields(batch))
    message = memoryview(bytearray(size + 64 * (len(PADS) + 3) + 4096))
    kept: dict[str, Any] = {"pad_value_dict": PADS}

    def encode(_: Any) -> list[memoryview]:
        return [message[: _encode_fields(batch, out=message)]]

    def materialize(wire: Any) -> Any:
        kept["out"] = jagcodec.materialize(wire, **kept)
        return kept["out"]

    return Side(
        send=(("encode_fields", encode),),
        receive=(
            ("open_wire", lambda received: jagcodec.open_wire(received[0])),
            ("materialize", materialize),
        ),
    )


def _encode_fields(batch: Batch, **options: Any) -> Any:
    return jagcodec.encode_fields(
        batch.columns, lengths=batch.lengths, token_aligned_fields=PADS, **options
    )


def composed(batch: Batch) -> Side:
    """The steps one by one, with a TensorDict of jagged tensors in between."""
    return Side(
        send=(
            (
                "pack",
                lambda _: jagcodec.pack_jagged_fields(
                    batch.columns, lengths=batch.lengths, token_aligned_fields=PADS
                ),
            ),
            ("encode", jagcodec.encode),
        ),
        receive=(
            ("decode", jagcodec.decode),
            ("materialize", lambda td: jagcodec.materialize(td, pad_value_dict=PADS)),
        ),
    )


# --- others ------------------------------------------------------------------------------------


def rows(batch: Batch) -> Side:
    """The per-row loop of today's frameworks over TransferQueue's own encoder.

    What NeMo-RL's codec does: a slice per row and `as_nested_tensor` for each column, then
    `to_padded_tensor` for each. The loop is written anew here.
    """
    from transfer_queue.utils.serial_utils import decode, encode

    def pack(_: Any) -> TensorDict:
        lengths = batch.lengths.tolist()
        columns = {
            name: torch.nested.as_nested_tensor(
                [padded[i, :n] for i, n in enumerate(lengths)], layout=torch.jagged
            )
            for name, padded in batch.columns.items()
        }
        return TensorDict(columns, batch_size=[len(lengths)])

    def materialize(td: TensorDict) -> dict[str, torch.Tensor]:
        return {name: torch.nested.to_padded_tensor(td[name], pad) for name, pad in PADS.items()}

    return Side(
        send=(("pack", pack), ("encode", encode)),
        receive=(("decode", decode), ("materialize", materialize)),
    )


def pickle5(batch: Batch) -> Side:
    """Padded numpy arrays, pickled into one frame; numpy's pickle faster than torch's tensors."""
    arrays = {name: column.numpy() for name, column in batch.columns.items()}

    def decode(received: list[bytearray]) -> dict[str, torch.Tensor]:
        loaded = pickle.loads(received[0], buffers=received[1:])
        return {name: torch.from_numpy(array) for name, array in loaded.items()}

    return Side(
        send=(("encode", lambda _: [pickle.dumps(arrays, protocol=5)]),),
        receive=(("decode", decode),),
    )


def pickle5_out_of_band(batch: Batch) -> Side:
    """The same with their memory out of band: the transport's copy is all.

    What arrives lies in the receive buffers and is gone when they are written again. All other
    sides but `reused` give memory that the receiver keeps.
    """
    in_band = pickle5(batch)
    arrays = {name: column.numpy() for name, column in batch.columns.items()}

    def encode(_: Any) -> list[Any]:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        return [head, *(buffer.raw() for buffer in buffers)]

    return Side(send=(("encode", encode),), receive=in_band.receive)


def torch_save(batch: Batch) -> Side:
    """Padded tensors through `torch.save` and `torch.load` in memory."""

    def encode(_: Any) -> list[Any]:
        file = io.BytesIO()
        torch.save(batch.columns, file)
        return [file.getbuffer()]

    def decode(received: list[bytearray]) -> Any:
        return torch.load(io.BytesIO(received[0]), weights_only=True)

    return Side(send=(("encode", encode),), receive=(("decode", decode),))


def safetensors(batch: Batch) -> Side:
    """Padded tensors through `safetensors.torch`, which reads from `bytes` alone."""
    from safetensors.torch import load, save

    def decode(received: list[bytes]) -> dict[str, torch.Tensor]:
        loaded = load(received[0])  # in an order of its own
        return {name: loaded[name] for name in PADS}

    return Side(
        send=(("encode", lambda _: [save(batch.columns)]),),
        receive=(("decode", decode),),
        buffer=bytes,
    )


def consolidated(batch: Batch) -> Side:
    """A padded TensorDict, consolidated to one storage and pickled."""
    td = TensorDict(dict(batch.columns), batch_size=[batch.shape[0]])

    def decode(received: list[bytearray]) -> dict[str, torch.Tensor]:
        loaded = pickle.loads(received[0])
        return {name: loaded[name] for name in PADS}

    return Side(
        send=(
            ("consolidate", lambda _: td.consolidate()),
            ("encode", lambda packed: [pickle.dumps(packed, protocol=5)]),
        ),
        receive=(("decode", decode),),
    )


def arrow(batch: Batch) -> Side:
    """Arrow IPC with a list per row: a mask strips the padding, and one puts it back."""
    import pyarrow as pa

    def pack(_: Any) -> Any:
        lengths = batch.lengths.numpy()
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        valid = np.arange(batch.shape[1]) < lengths[:, None]
        columns = [
            pa.LargeListArray.from_arrays(offsets, column.numpy()[valid])
            for column in batch.columns.values()
        ]
        return pa.record_batch(columns, names=list(batch.columns))

    def encode(packed: Any) -> list[Any]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, packed.schema) as writer:
            writer.write_batch(packed)
        return [sink.getvalue()]

    def decode(received: list[bytearray]) -> Any:
        return pa.ipc.open_stream(pa.py_buffer(received[0])).read_next_batch()

    def materialize(packed: Any) -> dict[str, torch.Tensor]:
        lengths = np.diff(packed.column(0).offsets.to_numpy())
        width = int(lengths.max())
        valid = np.arange(width) < lengths[:, None]
        rectangles = {}
        for name, column in zip(packed.schema.names, packed.columns, strict=True):
            values = column.values.to_numpy()
            rectangle = np.full(valid.shape, PADS[name], dtype=values.dtype)
            rectangle[valid] = values
            rectangles[name] = torch.from_numpy(rectangle)
        return rectangles

    return Side(
        send=(("pack", pack), ("encode", encode)),
        receive=(("decode", decode), ("materialize", materialize)),
    )


# --- the transport, and the floor --------------------------------------------------------------


def receive(frame: Any, buffer: bytearray | bytes) -> None:
    """The transport: one copy."""
    if isinstance(buffer, bytearray):
        memoryview(buffer)[:] = memoryview(frame).cast("B")
    else:
        # These bytes were never hashed, and nothing refers to their last contents.
        source = np.frombuffer(frame, dtype=np.uint8)
        target = np.frombuffer(buffer, dtype=np.uint8)
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def floor(batch: Batch) -> Side:
    """No codec, but what no codec can beat: three copies of the valid bytes, one fill of the pads.

    All of its memory is held ready.
    """
    valid = valid_values(batch)
    packed, placed = ([cells.copy() for cells in valid] for _ in range(2))
    rectangles = [column.numpy().copy() for column in batch.columns.values()]

    def pack(_: Any) -> list[Any]:
        for cells, to in zip(valid, packed, strict=True):
            np.copyto(to, cells)
        return packed

    def materialize(received: list[bytearray]) -> Any:
        for buffer, to in zip(received, placed, strict=True):
            np.copyto(to, np.frombuffer(buffer, to.dtype))
        for rectangle, pad in zip(rectangles, PADS.values(), strict=True):
            rectangle.fill(pad)
        return batch.columns

    return Side(send=(("pack", pack),), receive=(("materialize", materialize),))


def valid_values(batch: Batch) -> list[npt.NDArray[Any]]:
    """The valid cells of each column, end to end."""
    valid = torch.arange(batch.shape[1]) < batch.lengths[:, None]
    return [column[valid].numpy() for column in batch.columns.values()]


SIDES: dict[str, Callable[[Batch], Side]] = {
    "fused": fused,
    "reused": reused,
    "composed": composed,
    "rows": rows,
    "pickle": pickle5,
    "pickle_oob": pickle5_out_of_band,
    "torch_save": torch_save,
    "safetensors": safetensors,
    "tensordict": consolidated,
    "arrow": arrow,
    "floor": floor,
}
NEEDS = {"rows": "transfer_queue", "safetensors": "safetensors", "arrow": "pyarrow"}


def missing(name: str) -> str:
    """The package that a side needs and that is not installed; empty if there is none."""
    package = NEEDS.get(name)
    return package if package and importlib.util.find_spec(package) is None else ""
