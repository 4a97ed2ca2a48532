"""What a side of a trip is; those of jagcodec; the floor."""

from __future__ import annotations

import ctypes
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import jagcodec
from benchmarks.shapes import PADS, Batch

Step = tuple[str, Callable[[Any], Any]]
"""A name, and what takes the value of the step before and gives that of the next."""

# What earlier revisions lack, to which `benchmarks.before` compares this one.
REUSES_OUTPUT = "out" in inspect.signature(jagcodec.materialize).parameters
READS_FRAMES = hasattr(jagcodec, "join_columns")  # materialize does, since there are joins


@dataclass(frozen=True)
class Side:
    """One way to send a batch.

    Attributes:
        send: Steps from the batch to a list of frames.
        receive: Steps from the receive buffers, one per frame, to a mapping of rectangles.
        buffer: What a receive buffer is made of, given its size.
    """

    send: tuple[Step, ...]
    receive: tuple[Step, ...]
    buffer: Callable[[int], bytearray | bytes] = bytearray


def fused(batch: Batch) -> Side:
    """`encode_fields`, then `materialize(frames)`: the example of the README."""
    return Side(
        send=(("encode_fields", lambda _: _encode_fields(batch)),),
        receive=(
            *(() if READS_FRAMES else (("open_wire", jagcodec.open_wire),)),
            ("materialize", lambda frames: jagcodec.materialize(frames, pad_value_dict=PADS)),
        ),
    )


def _encode_fields(batch: Batch) -> Sequence[Any]:
    return jagcodec.encode_fields(batch.columns, lengths=batch.lengths, token_aligned_fields=PADS)


def reused(batch: Batch) -> Side:
    """The same with a message buffer and, where `materialize` can, an output that are reused."""
    size = sum(memoryview(frame).nbytes for frame in _encode_fields(batch))
    message = memoryview(bytearray(size + 64 * (len(PADS) + 3) + 4096))
    kept: dict[str, Any] = {}

    def encode(_: Any) -> list[memoryview]:
        written = jagcodec.encode_fields(
            batch.columns, lengths=batch.lengths, token_aligned_fields=PADS, out=message
        )
        return [message[:written]]

    def materialize(wire: Any) -> Any:
        if REUSES_OUTPUT:
            kept["pad_value_dict"] = PADS
            kept["out"] = jagcodec.materialize(wire, **kept)
            return kept["out"]
        return jagcodec.materialize(wire, pad_value_dict=PADS)

    return Side(
        send=(("encode_fields", encode),),
        receive=(
            ("open_wire", lambda received: jagcodec.open_wire(received[0])),
            ("materialize", materialize),
        ),
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


def reusable_bytes(size: int) -> bytes:
    """A receive buffer for readers that take `bytes` only; `receive` writes it none the less."""
    return bytes(size)


def receive(frame: Any, buffer: bytearray | bytes) -> None:
    """The transport: one copy."""
    if isinstance(buffer, bytearray):
        memoryview(buffer)[:] = memoryview(frame).cast("B")
    else:
        # Nobody has hashed it, and whoever saw the last contents is gone.
        source = np.frombuffer(frame, dtype=np.uint8)
        target = np.frombuffer(buffer, dtype=np.uint8)
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


class Floor:
    """Three copies of the valid bytes and one fill of the rectangles, in memory held ready."""

    def __init__(self, batch: Batch) -> None:
        valid = valid_values(batch)
        self._hops = [[cells.copy() for cells in valid] for _ in range(4)]
        self._rectangles = [
            (np.full(batch.shape, PADS[name], column.numpy().dtype), PADS[name])
            for name, column in batch.columns.items()
        ]

    def run(self) -> None:
        for source, target in itertools.pairwise(self._hops):
            for cells, to in zip(source, target, strict=True):
                np.copyto(to, cells)
        for rectangle, pad in self._rectangles:
            rectangle.fill(pad)


def valid_values(batch: Batch) -> list[npt.NDArray[Any]]:
    """The valid cells of each column, end to end."""
    valid = torch.arange(batch.shape[1]) < batch.lengths[:, None]
    return [column[valid].numpy() for column in batch.columns.values()]
