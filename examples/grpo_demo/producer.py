"""The producer: what a rollout worker does at its write site."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from examples.grpo_demo.batch import (
    PER_TOKEN,
    RESPONSE_SLICES,
    WRITTEN_BACK,
    Batch,
    make_batch,
    save_reference,
)
from examples.grpo_demo.check import check_rows
from examples.grpo_demo.report import Produced
from jagcodec import decode, encode, pack_jagged_fields, padding_tax
from jagcodec.data import rollout_table

if TYPE_CHECKING:
    import zmq


def produce(socket: zmq.Socket[bytes], directory: Path, rows: int, batches: int) -> list[Produced]:
    """Pack, encode and send each batch, and check the advantages that are written back.

    Args:
        socket: Its other end is `consume`'s; its time-outs bound every wait.
        directory: Where the trainer finds what was padded.
        rows: Rows per batch.
        batches: Number of batches.

    Returns:
        One report per batch.

    Raises:
        TransportTimeoutError: Nothing was written back in time.
        MismatchError: What was written back is not what was padded.
        WireFormatError: What was written back cannot be read.
    """
    table = rollout_table()
    made = [make_batch(table, number, rows) for number in range(batches)]
    for number, batch in enumerate(made):
        save_reference(batch, directory, number)
    socket.recv()  # The trainer has started, so that no send is timed while it does.
    return [_trip(socket, batch) for batch in made]


def _trip(socket: zmq.Socket[bytes], batch: Batch) -> Produced:
    # Imported here, so that `run_demo` can say what to install where pyzmq is missing.
    from jagcodec.integrations.zmq import recv_frames, send_frames

    fields = {
        name: column if column.dtype == object else torch.from_numpy(column)
        for name, column in batch.columns.items()
    }
    lengths = torch.from_numpy(batch.columns["input_lengths"])
    marks = {"begun": perf_counter()}
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=PER_TOKEN)
    marks["packed"] = perf_counter()
    frames = encode(td)
    marks["encoded"] = perf_counter()
    send_frames(socket, frames)

    advantages = decode(recv_frames(socket).frames)
    marks["written back"] = perf_counter()
    expected = [
        row[start : start + count]
        for row, start, count in zip(
            batch.columns["advantages"], batch.prompts, batch.responses, strict=True
        )
    ]
    compared = check_rows(
        WRITTEN_BACK, expected, advantages.values().numpy(), np.diff(advantages.offsets().numpy())
    )

    tokens = int(batch.responses.sum())
    owed = {name: column.size for name, column in batch.columns.items()}
    owed |= dict.fromkeys([*RESPONSE_SLICES.values(), WRITTEN_BACK], tokens)
    tax = padding_tax(fields, lengths=lengths, token_aligned_fields=PER_TOKEN)
    return Produced(
        marks,
        owed,
        compared,
        columns=len(fields),
        wire_bytes=tax.total.wire_bytes,
        padding_tax=str(tax),
    )
