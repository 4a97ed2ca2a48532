"""Other ways to send a batch, each as a careful user of it would write it.

Libraries that only these need are imported where a side is made, in its own process.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.shapes import PADS, Batch
from benchmarks.sides import Side, reusable_bytes


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
        loaded = pickle.loads(received[0])
        return {name: torch.from_numpy(array) for name, array in loaded.items()}

    return Side(
        send=(("encode", lambda _: [pickle.dumps(arrays, protocol=5)]),),
        receive=(("decode", decode),),
    )


def pickle5_out_of_band(batch: Batch) -> Side:
    """Padded numpy arrays, pickled with their memory out of band: the transport's copy is all.

    What arrives lies in the receive buffers and is gone when they are written again. All other
    sides but `reused` give memory that the receiver keeps.
    """
    arrays = {name: column.numpy() for name, column in batch.columns.items()}

    def encode(_: Any) -> list[Any]:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        return [head, *(buffer.raw() for buffer in buffers)]

    def decode(received: list[bytearray]) -> dict[str, torch.Tensor]:
        loaded = pickle.loads(received[0], buffers=received[1:])
        return {name: torch.from_numpy(array) for name, array in loaded.items()}

    return Side(send=(("encode", encode),), receive=(("decode", decode),))


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
        buffer=reusable_bytes,
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
