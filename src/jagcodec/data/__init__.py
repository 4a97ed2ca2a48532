"""Lengths and rewards of real rollouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class RolloutTable:
    """Lengths and rewards of real rollouts; the rows of one prompt follow each other."""

    group_size: int  # rollouts per prompt
    prompts: npt.NDArray[np.int64]  # (N,) tokens
    responses: npt.NDArray[np.int64]  # (N,) tokens
    rewards: npt.NDArray[np.float32]  # (N,) 1 where the answer is right, else 0

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(N,) prompt and response tokens."""
        return self.prompts + self.responses


def rollout_table() -> RolloutTable:
    """The lengths and rewards of 5,276 answers to questions of GSM8K.

    Example:
        >>> from jagcodec.data import rollout_table
        >>> table = rollout_table()
        >>> len(table.lengths), table.group_size, int(table.lengths.max())
        (5276, 4, 574)

    Returns:
        The table, in arrays of its own.
    """
    path = resources.files("jagcodec").joinpath("data/gsm8k_rollout_lengths.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    # A row has the columns prompt_tokens, response_tokens and is_correct.
    prompts, responses, right = np.array(table["rows"], dtype=np.int64).T.copy()
    return RolloutTable(table["group_size"], prompts, responses, right.astype(np.float32))
