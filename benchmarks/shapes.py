"""The batches: real GSM8K lengths and long-tailed synthetic ones, made with a fixed seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

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
REAL_FILL = 0.275  # of all rows of the GSM8K rollouts, in one rectangle
SEED = 0

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A batch to make."""

    source: str  # "gsm8k" or "lognormal"
    rows: int
    width: int = 0  # of gsm8k: as wide as its longest row
    fill: float = REAL_FILL  # of gsm8k: what it is

    def __str__(self) -> str:
        if self.source == "gsm8k":
            return f"gsm8k:{self.rows}"
        fill = "" if self.fill == REAL_FILL else f"@{self.fill:g}"
        return f"{self.rows}x{self.width}{fill}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """From ``512x1536``, ``512x1536@0.5`` (that share of the cells are tokens), ``gsm8k:512``.

        Raises:
            ValueError: The text has another form.
        """
        if text.startswith("gsm8k:"):
            return cls("gsm8k", int(text.removeprefix("gsm8k:")))
        shape, _, fill = text.partition("@")
        rows, _, width = shape.partition("x")
        return cls("lognormal", int(rows), int(width), float(fill or REAL_FILL))

    def lengths(self) -> Lengths:
        if self.source == "gsm8k":
            return gsm8k_lengths(self.rows)
        return lognormal_lengths(self.rows, self.width, self.fill)


DESIGN = Case("lognormal", 512, 1536)
SMALL = Case("lognormal", 64, 512)
LARGE = Case("lognormal", 1024, 8192)
GROWN = Case("lognormal", 64 * 64, 512)  # 64 times the tokens of SMALL

_SHAPES = "64x512 512x512 4096x512 16384x512 512x1536 512x4096 4096x2048 16384x2048 1024x8192"
_LONG = "64x16384 512x16384 2048x16384 4096x16384 16384x16384"
_REAL = "gsm8k:64 gsm8k:512 gsm8k:4096"
_FILLS = "512x1536@0.1 512x1536@0.5 512x1536@0.75 512x1536@1"

FULL = tuple(map(Case.parse, f"{_REAL} {_SHAPES} {_LONG} {_FILLS}".split()))
QUICK = (SMALL, Case("gsm8k", 512), DESIGN)


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
        """To files, so that several processes can map one batch."""
        (directory / "columns.json").write_text(json.dumps(list(self.columns)))
        np.save(directory / "lengths.npy", self.lengths.numpy())
        for name, column in self.columns.items():
            np.save(directory / f"column.{name}.npy", column.numpy())

    @classmethod
    def mapped(cls, directory: Path) -> Batch:
        """What `save` wrote, its columns mapped: copied on write, shared until then."""

        def read(name: str) -> torch.Tensor:
            return torch.from_numpy(np.load(directory / f"{name}.npy", mmap_mode="c"))

        names = json.loads((directory / "columns.json").read_text())
        return cls(read("lengths"), {name: read(f"column.{name}") for name in names})


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
    """Columns as of `make_batch` and one more, a number per row: what a rollout worker sends.

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


def lognormal_lengths(rows: int, width: int, fill: float = REAL_FILL) -> Lengths:
    """Long-tailed lengths in 1 to `width`, the longest of them `width`, of about that fill."""
    shape = np.random.default_rng(SEED).lognormal(sigma=0.5, size=rows)
    low, high = 0.0, 100.0 * width
    for _ in range(60):  # bisect for the scale that gives the fill after clipping
        scale = (low + high) / 2
        lengths = np.clip(np.rint(shape * scale), 1, width).astype(np.int64)
        lengths[np.argmax(shape)] = width
        low, high = (scale, high) if lengths.mean() < fill * width else (low, scale)
    return lengths


def gsm8k_lengths(rows: int) -> Lengths:
    """Prompt + response tokens of whole groups of real GSM8K rollouts, drawn with a fixed seed."""
    from jagcodec.data import rollout_table  # which other versions may lack

    table = rollout_table()
    groups = table.lengths.reshape(-1, table.group_size)
    drawn = np.random.default_rng(SEED).permutation(len(groups))[: rows // table.group_size]
    lengths: Lengths = groups[drawn].reshape(-1)
    return lengths
