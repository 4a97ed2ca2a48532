"""Which option of `encode` saves how many bytes, and what it costs: ``python -m benchmarks.bytes``.

    verl      512 rows of 64 prompts as verl holds them: about 0.5 M prompt and 2.1 M response
              tokens, seven int64 columns, float32 log-probabilities and rm_scores of zeros
    images    `images` of 1,200 to 2,500 patches in bfloat16, each of 8 rows: as a jagged column,
              as payloads of rows that are one dict (`one`), and as equal dicts and tensors
              (`equal`)
    demo      the batch of 512 GSM8K rows that `make demo` sends
    noise     nothing to elide: random ids, log-probabilities and flags, 512 x 1536 and 8 x 64; and
              "wide ids", 512 rows of 100 to 1,535 tokens: ids below 2^60, and six float columns
    experts   the experts that tokens were routed to, (tokens, 40, 8) int64, and their ids
    text      1.5 M tokens without repeats: ids of the words in Python's own source code, a
              mask, and log-probabilities of what a softmax gives

Every batch is written with each option, copied as a transport would, read by `decode` and by
`materialize`; all options take turns. What is read is first compared with the input, bit for bit.
The speed at which an option breaks even is that of a link on which the bytes that it saves need as
long as the extra time at both ends, one message after the other.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks import report
from benchmarks.machine import quieted
from benchmarks.measure import check, copied, ratio, times
from benchmarks.shapes import DESIGN, lengths_of
from examples import demo
from jagcodec import decode, encode, materialize, pack_jagged_fields
from jagcodec.testing import is_same

VOCABULARY = 151_936
PER_PROMPT = 8
PATCH = 1176  # cells of one patch of an image
LAYERS, EXPERTS = 40, 8

Option = dict[str, Any]
OPTIONS: dict[str, Option] = {
    "none": {},
    "narrow": {"narrow": True},
    "elide": {"elide": True},
    "narrow, elide": {"narrow": True, "elide": True},
    "narrow, elide, zstd": {"narrow": True, "elide": True, "compress": "zstd"},
    "zstd": {"compress": "zstd"},
}
STEPS = ("write", "decode", "materialize")
KINDS = ("verl", "images", "demo", "noise", "experts", "text")


class Made(NamedTuple):
    """A batch, and the options that suit it."""

    value: TensorDict
    options: dict[str, Option]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("bytes", __doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each batch, about")
    parser.add_argument("--images", type=int, default=16, help="each of 2.8 to 5.9 MB, in 8 rows")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shrink", type=int, default=1, help="rows so many times shorter")
    given = parser.parse_args(arguments)
    quieted()
    made = {
        batch: make
        for batch, make in makers(given.images, given.shrink).items()
        if batch.split(",")[0] in given.only
    }

    def found() -> dict[str, Any]:
        batches = {batch: measured(batch, make(), given.seconds) for batch, make in made.items()}
        return {"batches": batches}

    return report.run("bytes", found, given)


def measured(batch: str, made: Made, seconds: float) -> dict[str, Any]:
    """Bytes and milliseconds of each option, and ratios to those of no option and of narrow."""
    calls: dict[str, Any] = {}
    sizes = {}
    for name, option in made.options.items():
        frames = copied(encode(made.value, **option))
        sizes[name] = sum(map(len, frames))
        verify(made.value, frames, f"{batch}: {name}")
        calls |= {
            f"write {name}": partial(encode, made.value, **option),
            f"decode {name}": partial(decode, frames),
            f"materialize {name}": partial(materialize, frames),
        }
    ms = times(calls, seconds)
    options = {name: figures(name, sizes, ms) for name in made.options}
    rounds = len(next(iter(ms.values())))
    return {"rounds": rounds, "rows": len(made.value), "options": options}


def verify(value: TensorDict, frames: Sequence[Any], what: str) -> None:
    """Make sure that a message gives every value back, bit for bit, by both ways to read it."""
    check(is_same(decode(frames), value), f"{what}: decode")
    check(is_same(materialize(frames), materialize(value)), f"{what}: materialize")


def figures(
    name: str, sizes: Mapping[str, int], ms: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Bytes and medians of one option, alone and compared with no option and with narrow."""
    found: dict[str, Any] = {"bytes": sizes[name]}
    for step in STEPS:
        found[step] = statistics.median(ms[f"{step} {name}"])
        if "narrow" in sizes:
            ratios = ratio(ms[f"{step} {name}"], ms[f"{step} narrow"])
            found[f"{step} / narrow"] = statistics.median(ratios)
    for other in ("none", "narrow"):
        if other in sizes and name not in ("none", other):
            trips = [
                [a + b for a, b in zip(ms[f"write {x}"], ms[f"decode {x}"], strict=True)]
                for x in (name, other)
            ]
            extra = statistics.median(a - b for a, b in zip(*trips, strict=True))
            found[f"pays below, {other}"] = break_even(sizes[other] - sizes[name], extra)
    return found


def break_even(saved: int, extra_ms: float) -> float | None:
    """Gbit/s below which bytes saved are worth that time; None: at any speed, 0: at none."""
    if saved <= 0:
        return 0.0 if extra_ms >= 0 else None
    return None if extra_ms <= 0 else 8 * saved / extra_ms / 1e6


# --- batches -----------------------------------------------------------------------------------


def nested(rows: Sequence[Any]) -> torch.Tensor:
    """Rows as a jagged column, which has offsets of its own."""
    return torch.nested.as_nested_tensor(list(map(torch.as_tensor, rows)), layout=torch.jagged)


def lengths_around(rng: np.random.Generator, mean: float, rows: int) -> list[int]:
    """Lengths from a quarter to seven quarters of a mean."""
    found: list[int] = rng.integers(max(1, int(mean / 4)), int(mean * 7 / 4) + 2, rows).tolist()
    return found


def make_verl(shrink: int) -> Made:
    """A batch as verl holds it, whose columns say the same thing several times."""
    rng = np.random.default_rng(0)

    def ids(tokens: int) -> Any:
        # The rank of a token and how often it comes go as one over the other.
        return np.exp(rng.random(tokens) * math.log(VOCABULARY)).astype(np.int64) - 1

    asked = [ids(n) for n in lengths_around(rng, 977 / shrink, 64)]
    prompts = [prompt for prompt in asked for _ in range(PER_PROMPT)]
    responses = [ids(n) for n in lengths_around(rng, 4_100 / shrink, len(prompts))]
    both = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    logprobs = [-rng.exponential(0.5, len(row)).astype(np.float32) for row in responses]
    columns = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested(both),
        "attention_mask": nested([np.ones(len(row), np.int64) for row in both]),
        "position_ids": nested([np.arange(len(row)) for row in both]),
        "response_mask": nested([np.ones(len(row), np.int64) for row in responses]),
        "loss_mask": nested([np.ones(len(row), np.int64) for row in responses]),
        "rollout_log_probs": nested(logprobs),
        "rm_scores": nested([np.zeros(len(row), np.float32) for row in responses]),
    }
    return Made(TensorDict(columns, batch_size=[len(prompts)]), OPTIONS)


def make_images(kind: str, images: int, shrink: int) -> Made:
    """Images, each in the rows of one prompt."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1_200 // shrink, 2_500 // shrink + 1, images).tolist()
    noise = torch.Generator().manual_seed(1)
    pixels = [torch.randn(n, PATCH, generator=noise).to(torch.bfloat16) for n in sizes]
    rows = [image for image in pixels for _ in range(PER_PROMPT)]
    column: Any
    if kind == "jagged":
        column = nested(rows)
    else:
        one = [{"pixel_values": image} for image in pixels]
        payloads: dict[str, Callable[[int], Any]] = {
            "one": lambda i: one[i // PER_PROMPT],
            "equal": lambda i: {"pixel_values": rows[i].clone()},
        }
        column = NonTensorStack(*map(payloads[kind], range(len(rows))))
    columns = {"images": column, "number": torch.arange(len(rows))}
    options = {name: OPTIONS[name] for name in ("none", "elide")}  # floats are never narrowed
    return Made(TensorDict(columns, batch_size=[len(rows)]), options)


def make_demo() -> Made:
    """The batch that `make demo` sends."""
    columns, lengths = demo.make_batch(demo.ROWS)
    value = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=demo.PER_TOKEN)
    return Made(value, OPTIONS)


def make_noise(lengths: Sequence[int], highest: int = VOCABULARY, floats: int = 3) -> Made:
    """Columns that repeat nothing: ids below a number, floats, and flags."""
    rng = np.random.default_rng(2)
    columns = {
        "input_ids": nested([rng.integers(0, highest, n) for n in lengths]),
        **{
            f"logprobs_{i}": nested([rng.normal(size=n).astype(np.float32) for n in lengths])
            for i in range(floats)
        },
        "mask": nested([rng.random(n) < 0.5 for n in lengths]),
    }
    return Made(TensorDict(columns, batch_size=[len(lengths)]), OPTIONS)


def make_experts(shrink: int) -> Made:
    """What tokens were routed to, by a router that prefers some experts."""
    rng = np.random.default_rng(3)
    lengths = lengths_around(rng, 976 / shrink, 8)
    columns = {
        "input_ids": nested([rng.integers(0, VOCABULARY, n) for n in lengths]),
        "routed_experts": nested([rng.integers(0, 128, (n, LAYERS, EXPERTS)) for n in lengths]),
    }
    options = {**OPTIONS, "narrow of the column": {"narrow": ["routed_experts"]}}
    return Made(TensorDict(columns, batch_size=[len(lengths)]), options)


def make_text(shrink: int) -> Made:
    """Tokens as a model sees them, so that they compress as those do."""
    tokens = 1_500_000 // shrink
    rng = np.random.default_rng(5)
    ids = words_of_python(tokens)
    logits = rng.normal(size=(len(ids), 32)) * 4
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    logprobs = np.take_along_axis(logits, drawn[:, None], 1)[:, 0].astype(np.float32)
    lengths = np.array_split(np.arange(len(ids)), max(1, len(ids) // 3_000))
    columns = {
        "input_ids": nested([ids[row] for row in lengths]),
        "loss_mask": nested([(row >= row[len(row) // 4]).astype(np.int64) for row in lengths]),
        "logprobs": nested([logprobs[row] for row in lengths]),
    }
    return Made(TensorDict(columns, batch_size=[len(lengths)]), OPTIONS)


def words_of_python(tokens: int) -> Any:
    """So many ids of the words and signs in the standard library, the most frequent one 0."""
    words: list[str] = []
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" not in path.parts:
            words += re.findall(r"\s+|\w+|[^\w\s]", path.read_text(errors="replace"))
        if len(words) >= tokens:
            break
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([ranks[word] for word in words[:tokens]], dtype=np.int64) % VOCABULARY


def makers(images: int, shrink: int) -> dict[str, Callable[[], Made]]:
    """By name, how a batch is made."""
    around = lengths_around(np.random.default_rng(4), 36, 8)
    wide = np.random.default_rng(6).integers(100, 1536, 512) // shrink
    long_tailed = np.maximum(lengths_of(DESIGN) // shrink, 1)
    return {
        "verl": lambda: make_verl(shrink),
        "images, jagged": lambda: make_images("jagged", images, shrink),
        "images, one": lambda: make_images("one", images, shrink),
        "images, equal": lambda: make_images("equal", images, shrink),
        "demo": make_demo,
        "noise, 512 x 1536": lambda: make_noise(long_tailed.tolist()),
        "noise, 8 x 64": lambda: make_noise(around),
        "noise, wide ids": lambda: make_noise(wide.tolist(), 1 << 60, 6),
        "experts": lambda: make_experts(shrink),
        "text": lambda: make_text(shrink),
    }


if __name__ == "__main__":
    sys.exit(main())
