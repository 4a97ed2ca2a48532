"""Which option of `encode` saves how many bytes, and what it costs: ``python -m benchmarks.bytes``.

    python -m benchmarks.bytes [--turns 5] [--images 32] [--only verl,demo]
                               [--options 'none;elide'] [--json FILE] [--write] [--page]

    verl      512 rows of 64 prompts as verl holds them: about 0.5 M prompt and 2.1 M response
              tokens, seven int64 columns, float32 log-probabilities and rm_scores of zeros
    images    `images` of 1,200 to 2,500 patches in bfloat16, each of 8 rows: as a jagged column,
              as payloads of rows that are one dict (`one`), and as equal dicts and tensors
              (`equal`)
    demo      the batch of 512 GSM8K rows that `make demo` sends
    noise     nothing to elide: random ids and log-probabilities, 512 x 1536 and 8 x 64; and
              "wide ids", 512 rows of 100 to 1,535 tokens: ids below 2^60, and six float columns
    experts   what tokens were routed to, (tokens, 40, 8) int64, beside their ids
    levels    1.5 M tokens without repeats, with some levels of zstd: ids of the words in
              Python's own source code, a mask, and log-probabilities of what a softmax gives

Every batch is written with each option, copied as a transport would, read by `decode` and by
`materialize`; all options in every turn, in an order drawn anew. What is read is compared with the
input, bit for bit, in a first turn that is not timed. Times are medians, and ratios the medians of
the ratios within a turn. The speed at which an option breaks even is that of a link on which the
bytes that it saves take as long as what both ends spend more, one message after the other.
``--write`` stores a run in docs/measured/bytes.json and writes the tables of docs/bytes.md from it,
and ``--page`` writes these alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks import bytes_page, pages
from benchmarks.machine import machine, versions
from benchmarks.rows import check
from benchmarks.shapes import Case
from benchmarks.small import copied
from benchmarks.trips import quieted
from examples.grpo_demo.batch import PER_TOKEN
from examples.grpo_demo.batch import make_batch as make_demo_batch
from jagcodec import decode, encode, materialize, pack_jagged_fields
from jagcodec.data import rollout_table
from jagcodec.testing import is_same

VOCABULARY = 151_936
PER_PROMPT = 8
PATCH = 1176  # cells of one patch of an image
LAYERS, EXPERTS = 40, 8
SHORT_MS = 20.0  # what takes less is done several times over

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
LEVELS: dict[str, Option] = {
    "none": {},
    "narrow": {"narrow": True},
    **{
        f"narrow, zstd of level {level}": {"narrow": True, "compress": ("zstd", level)}
        for level in (-5, -1, 1, 3)
    },
    "zstd": {"compress": "zstd"},
}


class Made(NamedTuple):
    """A batch.

    Attributes:
        value: What is encoded.
        options: Those of `OPTIONS`, and what else is of interest for this batch.
        once: Bytes of what is in it only once, if that is known.
    """

    value: TensorDict
    options: dict[str, Option]
    once: int = 0


class Bar(NamedTuple):
    """What is asked of a figure."""

    what: str
    asked: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.asked


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.page:
        bytes_page.rewrite()
        return 0
    quieted()
    report: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.bytes", *(arguments or sys.argv[1:])]),
        "machine": machine(),
        "versions": versions(),
        "batches": {},
    }
    for what in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in report[what].items()))
    for name in given.only:
        for part, made in PARTS[name](given.images, given.shrink):
            wanted = {k: v for k, v in made.options.items() if k in (given.options or made.options)}
            found = measured(made._replace(options=wanted), given.turns, part)
            report["batches"][part] = found
            print(f"\n{text(part, found)}", flush=True)
    report["bars"] = [{**bar._asdict(), "met": bar.met} for bar in bars(report["batches"])]
    print(f"\n{'bar':62}{'asked':>10}{'found':>10}")
    for bar in bars(report["batches"]):
        verdict = "met" if bar.met else "MISSED"
        print(f"{bar.what:62}{bar.asked:10.2f}{bar.found:10.2f}  {verdict}")
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    if given.write:
        pages.record(bytes_page.RECORD, report)
        bytes_page.rewrite()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bytes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--turns", type=int, default=5, help="in which every option is used once")
    parser.add_argument("--images", type=int, default=32, help="each of 2.8 to 5.9 MB, in 8 rows")
    parser.add_argument("--only", type=_parts, default=tuple(PARTS), help="verl,demo,...")
    parser.add_argument("--options", type=_options, help="'none;narrow;narrow, elide', say")
    parser.add_argument("--shrink", type=int, default=1, help="rows so many times shorter")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--write", action="store_true", help="store what is measured")
    parser.add_argument("--page", action="store_true", help="write the tables of the page alone")
    return parser


def _parts(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PARTS)}, found {given!r}")
    return names


def _options(given: str) -> tuple[str, ...]:
    return tuple(given.split(";"))


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
    # Ids below 151,936 take three bytes.
    once = 3 * sum(map(len, asked)) + (3 + 4) * sum(map(len, responses))
    return Made(TensorDict(columns, batch_size=[len(prompts)]), OPTIONS, once)


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
    once = sum(image.nbytes for image in pixels)
    options = {name: OPTIONS[name] for name in ("none", "elide")}  # floats are never narrowed
    return Made(TensorDict(columns, batch_size=[len(rows)]), options, once)


def make_demo() -> Made:
    """What the demo sends."""
    batch = make_demo_batch(rollout_table(), 1, 512)
    fields = {
        name: column if column.dtype == object else torch.from_numpy(column)
        for name, column in batch.columns.items()
    }
    lengths = torch.from_numpy(batch.columns["input_lengths"])
    value = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=PER_TOKEN)
    return Made(value, OPTIONS)


def make_noise(lengths: Sequence[int], highest: int = VOCABULARY, floats: int = 3) -> Made:
    """Columns that repeat nothing: ids below a number, and floats."""
    rng = np.random.default_rng(2)
    columns = {
        "input_ids": nested([rng.integers(0, highest, n) for n in lengths]),
        **{
            f"logprobs_{i}": nested([rng.normal(size=n).astype(np.float32) for n in lengths])
            for i in range(floats)
        },
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


def make_levels(shrink: int) -> Made:
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
    return Made(TensorDict(columns, batch_size=[len(lengths)]), LEVELS)


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


Parts = Iterator[tuple[str, Made]]


def verl(_: int, shrink: int) -> Parts:
    """The batch as verl holds it."""
    yield "verl", make_verl(shrink)


def images(count: int, shrink: int) -> Parts:
    """Images, in each of three ways."""
    for kind in ("jagged", "one", "equal"):
        yield f"images, {kind}", make_images(kind, count, shrink)


def demo(_: int, shrink: int) -> Parts:
    """The batch of the demo."""
    yield "demo", make_demo()


def noise(_: int, shrink: int) -> Parts:
    """Nothing to elide, in large batches and in a small one."""
    yield "noise, 512 x 1536", make_noise(Case("lognormal", 512, 1536 // shrink).lengths().tolist())
    yield "noise, 8 x 64", make_noise(lengths_around(np.random.default_rng(4), 36, 8))
    wide = np.random.default_rng(6).integers(100, 1536, 512) // shrink
    yield "noise, wide ids", make_noise(wide.tolist(), 1 << 60, 6)


def experts(_: int, shrink: int) -> Parts:
    """Routed experts beside ids."""
    yield "experts", make_experts(shrink)


def levels(_: int, shrink: int) -> Parts:
    """Each level of zstd, on what repeats no row."""
    yield "levels", make_levels(shrink)


_ALL = (verl, images, demo, noise, experts, levels)
PARTS: dict[str, Callable[[int, int], Parts]] = {part.__name__: part for part in _ALL}


# --- verifying ---------------------------------------------------------------------------------


def verify(value: TensorDict, frames: Sequence[Any], what: str) -> None:
    """See that a message gives every value back, bit for bit, by both ways to read it.

    Rows are compared one by one, so that this takes no memory but what is read.

    Raises:
        SystemExit: It does not.
    """
    decoded = decode(frames)
    check(type(decoded) is TensorDict, f"{what}: decode: a {type(decoded).__name__}")
    check(decoded.batch_size == value.batch_size, f"{what}: decode: {decoded.batch_size}")
    check(list(decoded.keys()) == list(value.keys()), f"{what}: decode: columns")
    for name in value.keys():  # noqa: SIM118  of a TensorDict
        found, column = decoded.get(name), value.get(name)
        check(found.shape[0] == column.shape[0], f"{what}: decode: rows of {name}")
        check(type(found) is type(column), f"{what}: decode: {name}: a {type(found).__name__}")
        if isinstance(column, torch.Tensor):
            check(found.layout == column.layout, f"{what}: decode: {name}: {found.layout}")
        same_column(found, column, f"{what}: decode: {name}")
    del decoded, found
    rectangles: dict[Any, Any] = dict(materialize(frames))
    check(set(rectangles) == set(value.keys()), f"{what}: columns")
    for name in value.keys():  # noqa: SIM118  of a TensorDict
        same_column(rectangles[name], value.get(name), f"{what}: materialize: {name}")


def same_column(found: Any, column: Any, what: str) -> None:
    """See that a column is that of a TensorDict, row by row; a rectangle of rows has zeros behind.

    Raises:
        SystemExit: It is not.
    """
    if not isinstance(column, torch.Tensor):
        payloads = found.tolist()
        check(len(payloads) == len(column.tolist()), f"{what}: rows")
        for i, (payload, expected) in enumerate(zip(payloads, column.tolist(), strict=True)):
            same_payload(payload, expected, f"{what}[{i}]")
        return
    check(found.dtype == column.dtype, f"{what}: {found.dtype}")
    if not column.is_nested:
        same_cells(found, column, what)
        return
    rows = column.unbind()
    check(len(found) == len(rows), f"{what}: rows")
    longest = max(map(len, rows), default=0)
    check(found.is_nested or found.shape[1] == longest, f"{what}: width")
    for i, (row, expected) in enumerate(zip(found.unbind(), rows, strict=True)):
        same_cells(row[: len(expected)], expected, f"{what}[{i}]")
        rest = row[len(expected) :]
        check(not _bits(rest).any(), f"{what}[{i}]: padding")
        check(not (found.is_nested and len(rest)), f"{what}[{i}]: {len(row)} tokens")


def same_payload(found: Any, expected: Any, what: str) -> None:
    """See that an object is another one: dicts of tensors item by item, others as the oracle."""
    if type(expected) is dict:
        check(type(found) is dict and list(found) == list(expected), f"{what}: keys")
        for key, item in expected.items():
            same_payload(found[key], item, f"{what}[{key!r}]")
    elif isinstance(expected, torch.Tensor):
        check(isinstance(found, torch.Tensor) and found.dtype == expected.dtype, f"{what}: dtype")
        same_cells(found, expected, what)
    else:
        check(is_same(found, expected), what)


def same_cells(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """See that the bits of two strided tensors of one dtype are equal: not that -0.0 is 0.0."""
    check(found.shape == expected.shape, f"{what}: {tuple(found.shape)}")
    check(np.array_equal(_bits(found), _bits(expected)), what)


def _bits(tensor: torch.Tensor) -> Any:
    # No torch, whose threads wait for each other where other things run.
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


# --- measuring ---------------------------------------------------------------------------------


def measured(made: Made, turns: int, what: str) -> dict[str, Any]:
    """Bytes and milliseconds of each option, and ratios to those of no option and of narrow."""
    order = random.Random(0)
    sizes: dict[str, int] = {}
    ms: dict[str, dict[str, list[float]]] = {}
    often: dict[str, int] = {}
    taken = 0.0
    for name, option in made.options.items():
        start = time.perf_counter()
        frames = copied(encode(made.value, **option))
        took = 1e3 * (time.perf_counter() - start)
        taken += took
        often[name] = max(1, min(10, int(SHORT_MS / took))) if turns > 1 else 1
        sizes[name] = sum(map(len, frames))
        verify(made.value, frames, f"{what}: {name}")
        ms[name] = {step: [] for step in STEPS}
    # Of short ones, more turns, for their medians.
    turns *= 3 if turns > 1 and taken < 10 * SHORT_MS else 1
    names = list(made.options)
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            order.shuffle(names)
            for name in names:
                for step, took in zip(STEPS, trip(made, name, often[name]), strict=True):
                    ms[name][step].append(took)
            gc.collect()
    finally:
        gc.enable()
    rows = {name: line(name, sizes, ms) for name in made.options}
    return {"turns": turns, "once": made.once, "rows": len(made.value), "options": rows}


def trip(made: Made, name: str, often: int) -> tuple[float, float, float]:
    """Milliseconds to write a message with an option, to decode it and to materialize it."""
    option = made.options[name]
    frames: list[Any] = []

    def timed(call: Callable[[], Any]) -> float:
        made_by_call: Any = None
        start = time.perf_counter()
        for _ in range(often):
            made_by_call = call()
        took = 1e3 * (time.perf_counter() - start) / often
        frames[:] = frames or copied(made_by_call)
        return took

    write = timed(lambda: encode(made.value, **option))
    return write, timed(lambda: decode(frames)), timed(lambda: materialize(frames))


def line(
    name: str, sizes: Mapping[str, int], ms: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, Any]:
    """The figures of one option."""
    own = ms[name]
    found: dict[str, Any] = {"bytes": sizes[name]}
    for step in STEPS:
        found[step] = statistics.median(own[step])
    for other in ("none", "narrow"):
        if other not in ms:
            continue
        beside = ms[other]
        for step in STEPS:
            pairs = list(zip(own[step], beside[step], strict=True))
            found[f"{step} / {other}"] = statistics.median(a / b for a, b in pairs)
            found[f"{step} - {other}"] = statistics.median(a - b for a, b in pairs)
        saved = sizes[other] - sizes[name]
        for step in ("decode", "materialize"):
            extra = found[f"write - {other}"] + found[f"{step} - {other}"]
            found[f"break-even {step} / {other}"] = break_even(saved, extra)
    return found


def break_even(saved: int, extra_ms: float) -> float | None:
    """Gbit/s below which bytes saved are worth that time; None of any speed, 0 of none."""
    if saved <= 0:
        return 0.0 if extra_ms >= 0 else None
    return None if extra_ms <= 0 else 8 * saved / extra_ms / 1e6


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """What this library asks of itself, of the batches that were measured."""
    asked: list[Bar] = []

    def figure(batch: str, option: str, what: str) -> Any:
        return found.get(batch, {}).get("options", {}).get(option, {}).get(what)

    def ask(what: str, most: float, value: float | None, scale: float = 1.0) -> None:
        if value is not None:
            asked.append(Bar(what, most, value * scale))

    both = "narrow, elide"
    ask("verl, narrow and elide: MB", 15.5, figure("verl", both, "bytes"), 1e-6)
    for step, most in zip(STEPS, (2.0, 1.0, 1.0), strict=True):
        ratio = figure("verl", both, f"{step} / narrow")
        ask(f"verl, narrow and elide: time to {step} / narrow alone", most, ratio)
    for kind in ("jagged", "one", "equal"):
        batch = f"images, {kind}"
        if size := figure(batch, "elide", "bytes"):
            ask(f"{batch}, elide: bytes / one copy", 1.05, size / found[batch]["once"])
    for batch, option, most in (("demo", both, 0.63), ("experts", "narrow of the column", 1.0)):
        size, plain = figure(batch, option, "bytes"), figure(batch, "none", "bytes")
        if size and plain:
            ask(f"{batch}, {option}: bytes / no option", most, size / plain)
    for batch in ("noise, 512 x 1536", "noise, 8 x 64"):
        size, alone = figure(batch, both, "bytes"), figure(batch, "narrow", "bytes")
        if not size or not alone:
            continue
        ask(f"{batch}, {both}: bytes more than narrow alone", 0, size - alone)
        for step in STEPS:
            more = figure(batch, both, f"{step} - narrow")
            most = max(0.1 * figure(batch, "narrow", step), 0.3)
            ask(f"{batch}, {both}: ms more to {step}", most, more)
    wide = "noise, wide ids"
    ask(f"{wide}, {both}: time to write / narrow alone", 1.15, figure(wide, both, "write / narrow"))
    return asked


def text(name: str, found: Mapping[str, Any]) -> str:
    """One batch as a table."""
    once = f", {found['once'] / 1e6:.1f} MB of it once" if found["once"] else ""
    head = f"{name}: {found['rows']} rows{once}, {found['turns']} turns"
    lines = [
        head,
        f"  {'':31}{'MB':>9}{'of none':>9}"
        + "".join(f"{step + ' ms':>16}{'/ narrow':>9}" for step in STEPS)
        + f"{'Gbit/s':>9}{'/ narrow':>9}",
    ]
    options = found["options"]
    plain = options.get("none", {}).get("bytes")
    for option, own in options.items():
        cells = f"  {option:31}{own['bytes'] / 1e6:9.3f}"
        cells += f"{own['bytes'] / plain:9.3f}" if plain else f"{'':9}"
        for step in STEPS:
            cells += f"{own[step]:16.2f}{_ratio(own.get(f'{step} / narrow')):>9}"
        for other in ("none", "narrow"):
            key = f"break-even decode / {other}"
            cells += f"{_speed(own[key]) if key in own and option != other else '':>9}"
        lines.append(cells.rstrip())
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _speed(value: float | None) -> str:
    if value is None:
        return "any"
    return f"{value:.1f}" if value else "none"


if __name__ == "__main__":
    sys.exit(main())
