"""The trainer: fetches each batch, checks it, and writes a column back."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from examples.grpo_demo.batch import PAD_ID, RESPONSE_SLICES, group_advantages, load_reference
from examples.grpo_demo.check import check_columns, check_rows
from examples.grpo_demo.report import Consumed
from jagcodec import decode, encode, materialize, response_from_nested, to_nested_by_length
from jagcodec.data import rollout_table

if TYPE_CHECKING:
    import zmq


def consume(socket: zmq.Socket[bytes], directory: Path, batches: int) -> list[Consumed]:
    """Receive, decode, materialize and check each batch, and write its advantages back.

    Args:
        socket: Its other end is `produce`'s; its time-outs bound every wait.
        directory: Where the producer put what it padded.
        batches: Number of batches.

    Returns:
        One report per batch.

    Raises:
        TransportTimeoutError: No batch came in time.
        MismatchError: A column, or a response slice, is not what was padded.
        WireFormatError: A message cannot be read.
    """
    group_size = rollout_table().group_size
    socket.send(b"ready")
    return [_trip(socket, directory, number, group_size) for number in range(batches)]


def _trip(socket: zmq.Socket[bytes], directory: Path, number: int, group_size: int) -> Consumed:
    # Imported here, so that `run_demo` can say what to install where pyzmq is missing.
    from jagcodec.integrations.zmq import recv_frames, send_frames

    frames = recv_frames(socket).frames
    marks = {"received": perf_counter()}
    td = decode(frames)
    marks["decoded"] = perf_counter()
    batch = materialize(td, pad_value_dict={"input_ids": PAD_ID})
    marks["materialized"] = perf_counter()

    reference = load_reference(directory, number)
    marks["reference read"] = perf_counter()
    columns = {
        name: column.numpy() if isinstance(column, torch.Tensor) else column
        for name, column in batch.items()
    }
    compared = check_columns(reference.columns, columns)
    marks["checked"] = perf_counter()

    responses = batch["token_mask"].sum(dim=1)
    mask = to_nested_by_length(torch.ones_like(batch["token_mask"]), responses)
    marks["masked"] = perf_counter()
    slices: dict[str, Any] = {
        name: response_from_nested(td[name], mask) for name in RESPONSE_SLICES
    }
    marks["sliced"] = perf_counter()
    for name, found in slices.items():
        # A logprob at position i is of token i + 1: the slice begins one before the response.
        expected = [
            row[start - 1 : start - 1 + count]
            for row, start, count in zip(
                reference.columns[name], reference.prompts, reference.responses, strict=True
            )
        ]
        compared |= check_rows(
            RESPONSE_SLICES[name],
            expected,
            found.values().numpy(),
            np.diff(found.offsets().numpy()),
        )

    marks["slices checked"] = perf_counter()
    advantages = torch.from_numpy(group_advantages(batch["rewards"].numpy(), group_size))
    per_token = advantages[:, None].expand(batch["token_mask"].shape)
    send_frames(socket, encode(to_nested_by_length(per_token, responses)))
    return Consumed(marks, compared, tuple(len(frame) for frame in frames))
