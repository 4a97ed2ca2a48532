"""The batches: real GSM8K lengths and long-tailed synthetic ones, made with a fixed seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.data import rollout_table

PADS: dict[str, int | float] = {
    "input_ids": 151643,
    "token_mask": 0,
    "generation_logprobs": 0.0,
    "prev_logprobs": 0.0,
    "reference_logprobs": 0.0,
    "advantages": 0.0,
}
DTYPES = {"input_ids": torch.int64, "token_mask": torch.int32}
TOKEN_BYTES = sum(DTYPES.get(name, torch.float32).itemsize for name in PADS)
REAL_FILL = 0.275  # the share of cells that are tokens, in one rectangle of all GSM8K rollouts
SEED = 0

FIRST = "gsm8k:512"  # the batch of the README
SMALL, DESIGN, LARGE, FULL = "64x512", "512x1536", "1024x8192", "512x1536@1"
SHAPES = (
    *(FIRST, "gsm8k:64", "gsm8k:4096", SMALL, DESIGN, LARGE, "16384x512"),
    *("512x1536@0.1", "512x1536@0.5", "512x1536@0.75", FULL),
)

Lengths = npt.NDArray[np.int64]


def lengths_of(shape: str) -> Lengths:
    """The lengths of ``gsm8k:512``, ``512x1536``, or ``512x1536@0.5`` (the share of tokens)."""
    if shape.startswith("gsm8k:"):
        return gsm8k_lengths(int(shape.removeprefix("gsm8k:")))
    size, _, fill = shape.partition("@")
    rows, _, width = size.partition("x")
    return lognormal_lengths(int(rows), int(width), float(fill or REAL_FILL))


def gsm8k_lengths(rows: int) -> Lengths:
    """Prompt and response tokens of the first real GSM8K rollouts."""
    lengths: Lengths = rollout_table().lengths[:rows]
    return lengths


def lognormal_lengths(rows: int, width: int, fill: float) -> Lengths:
    """Long-tailed lengths in 1 to `width`, the longest of them `width`, that fill about so much."""
    shape = np.random.default_rng(SEED).lognormal(sigma=0.5, size=rows)
    low, high = 0.0, 100.0 * width
    for _ in range(60):  # bisect for the scale that gives the fill after clipping
        scale = (low + high) / 2
        lengths = np.clip(np.rint(shape * scale), 1, width).astype(np.int64)
        lengths[np.argmax(shape)] = width
        low, high = (scale, high) if lengths.mean() < fill * width else (low, scale)
    return lengths


@dataclass(frozen=True)
class Batch:
    """Padded columns (N, S) of the names in `PADS`, and their (N,) lengths."""

    lengths: torch.Tensor
    columns: dict[str, torch.Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.columns["input_ids"].shape
        return rows, width

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def valid_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    @property
    def padded_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def save(self, directory: Path) -> None:
        """To a file, so that several processes can map one batch."""
        torch.save(vars(self), directory / "batch.pt")

    @classmethod
    def mapped(cls, directory: Path) -> Batch:
        """The batch that `save` wrote: its memory is copied on write, shared until then."""
        return cls(**torch.load(directory / "batch.pt", mmap=True))


def make_batch(lengths: Lengths, pads: Mapping[str, int | float] = PADS) -> Batch:
    """Random columns as wide as the longest row; cells past a row's length hold its pad."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (len(lengths), int(lengths.max()))
    rows = torch.from_numpy(lengths)
    padding = torch.arange(shape[1]) >= rows[:, None]
    columns = {
        name: _cells(shape, DTYPES.get(name, torch.float32), generator).masked_fill_(padding, pad)
        for name, pad in pads.items()
    }
    return Batch(rows, columns)


def make_small_batch(rows: int, mean: int = 300, pads: Mapping[str, int | float] = PADS) -> Batch:
    """The columns of `make_batch` and a number per row: what a rollout worker sends.

    Lengths are spread evenly between half and one and a half `mean`; one row has `mean` tokens.
    """
    spread = np.linspace(mean / 2, mean * 3 / 2, rows + 2)[1:-1]
    lengths = np.random.default_rng(SEED).permutation(np.rint(spread).astype(np.int64))
    batch = make_batch(lengths, pads)
    reward = torch.randn(rows, generator=torch.Generator().manual_seed(SEED))
    return replace(batch, columns={**batch.columns, "reward": reward})


def _cells(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, generator=generator)
    high = 2 if dtype == torch.int32 else 151_000
    return torch.randint(high, shape, dtype=dtype, generator=generator)
