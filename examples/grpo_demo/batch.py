"""The batches: real lengths and rewards, drawn values, padded as a framework holds them.

numpy and the standard library only. The trainer's reference is written and read here, so that
nothing of the codec stands between what was padded and what it is compared with.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.data import RolloutTable
from jagcodec.errors import ArgumentError

AnyArray: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]

VOCABULARY = 152_000
PAD_ID = 151_643
SEED = 20_210_927

LOGPROBS = ("generation_logprobs", "prev_logprobs", "reference_logprobs")
PER_TOKEN = ("input_ids", "token_mask", *LOGPROBS, "advantages")
"""The columns with one value per token; the others have one per row."""

RESPONSE_SLICES = {name: f"{name} of responses" for name in LOGPROBS}
WRITTEN_BACK = "advantages written back"
"""Names of the comparisons that are not of a whole column."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded columns.

    Attributes:
        columns: Name to column: (N, S) or (N,), `message` an object array (N,).
        prompts: (N,) prompt tokens.
        responses: (N,) response tokens.
    """

    columns: dict[str, AnyArray]
    prompts: IntArray
    responses: IntArray


def make_batch(table: RolloutTable, number: int, rows: int) -> Batch:
    """Batch `number` of the table: its rows ``number * rows`` and on, padded to the longest.

    The same arguments give the same batch, in any process.

    Raises:
        ArgumentError: The table has too few rows, or `rows` breaks a group apart.
    """
    part = slice(number * rows, (number + 1) * rows)
    if rows < 1 or rows % table.group_size or part.stop > len(table.rewards):
        raise ArgumentError(
            "bad_option",
            "make_batch(rows)",
            f"expected groups of {table.group_size} within {len(table.rewards)} rows, "
            f"found rows {part.start} to {part.stop}",
        )
    prompts, responses, rewards = table.prompts[part], table.responses[part], table.rewards[part]
    lengths = prompts + responses
    rng = np.random.default_rng([SEED, number])
    shape = (rows, int(lengths.max()))
    position = np.arange(shape[1])
    in_row = position < lengths[:, None]
    in_response = in_row & (position >= prompts[:, None])
    advantages = group_advantages(rewards, table.group_size)

    generation = -rng.exponential(0.5, shape)
    logprobs = {
        "generation_logprobs": generation,
        "prev_logprobs": generation + rng.normal(0, 1e-3, shape),
        "reference_logprobs": generation + rng.normal(0, 1e-1, shape),
    }
    columns: dict[str, AnyArray] = {
        # Any id may be drawn, the pad id too: it is lengths that say what is padding.
        "input_ids": np.where(in_row, rng.integers(0, VOCABULARY, shape), PAD_ID),
        "token_mask": in_response.astype(np.int32),
        **{
            name: np.where(in_row, values, 0).astype(np.float32)
            for name, values in logprobs.items()
        },
        "advantages": np.where(in_response, advantages[:, None], np.float32(0)),
        # A group of equal rewards teaches nothing and is masked out.
        "sample_mask": (advantages != 0).astype(np.float32),
        "input_lengths": lengths,
        "rewards": rewards,
        "message": _messages(rng, number * rows, responses, rewards),
    }
    return Batch(columns, prompts, responses)


def group_advantages(rewards: FloatArray, group_size: int) -> FloatArray:
    """GRPO's advantages: each reward, normalised within its group.

    Example:
        >>> group_advantages(np.array([0, 0, 1, 1], dtype=np.float32), 2).tolist()
        [0.0, 0.0, 0.0, 0.0]
    """
    groups = rewards.astype(np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    advantages = centred / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    flat: FloatArray = advantages.reshape(-1).astype(np.float32)
    return flat


_WORDS = ("so", "she", "has", "12", "eggs", "for", "$3", "which", "makes", "€36", "=", "in all\n")


def _messages(
    rng: np.random.Generator, first: int, responses: IntArray, rewards: FloatArray
) -> AnyArray:
    """One dict per row, of more shapes and types than JSON could bring back."""
    messages = np.empty(len(responses), dtype=object)
    for i, (words, reward) in enumerate(zip(responses.tolist(), rewards.tolist(), strict=True)):
        drawn = rng.integers(0, len(_WORDS), words).tolist()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": " ".join(_WORDS[word] for word in drawn),
            "row": first + i,
            "tags": ("gsm8k", "correct") if reward else ("gsm8k",),
        }
        if i % 3 == 0:
            message["sampling"] = {"temperature": 1.0, "top_p": float(rng.random()), "stop": None}
        if i % 5 == 0:
            message["tool_calls"] = [(i, b"\x00\xff", True), [], ()]
        messages[i] = message
    return messages


def save_reference(batch: Batch, directory: Path, number: int) -> None:
    """Write a batch down for `load_reference`, without the codec."""
    arrays: dict[str, Any] = {k: v for k, v in batch.columns.items() if v.dtype != object}
    np.savez(_arrays(directory, number), **arrays)
    np.savez(_lengths(directory, number), prompts=batch.prompts, responses=batch.responses)
    # Python literals, because JSON has no tuples.
    text = repr(batch.columns["message"].tolist())
    _objects(directory, number).write_text(text, encoding="utf-8")


def load_reference(directory: Path, number: int) -> Batch:
    """The batch that `save_reference` wrote down."""
    with np.load(_arrays(directory, number)) as arrays:
        columns: dict[str, AnyArray] = dict(arrays.items())
    with np.load(_lengths(directory, number)) as lengths:
        prompts, responses = lengths["prompts"], lengths["responses"]
    rows = ast.literal_eval(_objects(directory, number).read_text(encoding="utf-8"))
    columns["message"] = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        columns["message"][i] = row
    return Batch(columns, prompts, responses)


def _arrays(directory: Path, number: int) -> Path:
    return directory / f"batch-{number}.npz"


def _lengths(directory: Path, number: int) -> Path:
    return directory / f"lengths-{number}.npz"


def _objects(directory: Path, number: int) -> Path:
    return directory / f"messages-{number}.txt"
