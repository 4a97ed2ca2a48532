"""Rows in, rows joined, rows out, beside what producers use today: ``python -m benchmarks.rows``.

    python -m benchmarks.rows [--seconds 4] [--rows 512] [--only lists,join] [--json FILE]

    lists       a column of 677 thousand tokens in 512 lists: encode_rows, encode, and
                msgspec.msgpack.encode of the same lists (without msgspec: msgpack.packb)
    one_row     512 messages of one row, six numpy columns of 100 to 500 tokens and a reward:
                encode_rows of each, and pickle.dumps(protocol=5) of each
    tensors     slime's dict of lists of 1-D tensors, half as many rows, both ways:
                decode(encode_rows(...)), decode(encode(...)), and pickle
    join        512 messages of one row to one padded batch: materialize of them, of blobs that are
                opened one by one and joined by concat_rows, and unpickling as many rows of numpy
                arrays and pad_sequence of each column
    parts       8 messages of 64 rows to one padded batch: materialize of them as frames and as
                blobs that are opened one by one, and of one message of the 512 rows
    narrow      a quarter of the messages of join, stored narrow and plain, opened and joined
    split       an open message in 512 parts by split_rows, each .to_frames(), beside
                pickle.dumps(protocol=5) of 512 rows of numpy arrays; and to_rows of its seven
                columns, beside slicing the padded columns row by row
    tensordict  split_rows of a TensorDict into 512, and making those TensorDicts by hand
    budget      26 micro-batches by max_tokens, all materialized, and the whole batch at once

One process; in a round every side of a part is called once, in an order drawn anew, and what it
makes is freed inside the clock. A ratio is the median of the rounds' ratios, with the lowest and
highest beside it. Results are compared with the input once, outside the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

import jagcodec
from benchmarks.machine import machine, versions
from benchmarks.small import copied
from benchmarks.trips import quieted

try:
    import msgspec
except ImportError:
    pack_lists: Callable[[Any], bytes] = msgpack.packb
    PACKER = "msgpack"
else:
    pack_lists = msgspec.msgpack.encode
    PACKER = "msgspec"

Calls = dict[str, Callable[[], Any]]

SECONDS = 4.0
ROWS = 512
FEWEST = 3  # rounds
VOCABULARY = 151_936


class Ratio(NamedTuple):
    """The time of one side over that of another, and what is asked of it."""

    ours: str
    theirs: str
    asked: float | None = None


class Limit(NamedTuple):
    """The milliseconds of one side, and how many are asked of it for 512 rows."""

    ours: str
    asked: float


class Part(NamedTuple):
    """What is measured together."""

    calls: Calls
    lines: Sequence[Ratio | Limit]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    quieted()
    report: dict[str, Any] = {"machine": machine(), "versions": versions(), "parts": {}}
    for what in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in report[what].items()))
    if os.getloadavg()[0] > 0.5:
        print("something else runs here: look at the lowest ratios too")
    for name in options.only:
        part = PARTS[name](options.rows)
        found = report["parts"][name] = measured(part, options.seconds)
        print(f"\n{text(name, found)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rows", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each part, about")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--only", type=_names, default=tuple(PARTS), help="lists,one_row,...")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser


def _names(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PARTS)}, found {given!r}")
    return names


# --- inputs ------------------------------------------------------------------------------------


def make_samples(rows: int) -> list[dict[str, Any]]:
    """Rows of six numpy columns of 100 to 500 tokens, and a reward."""
    numbers = np.random.default_rng(0)
    samples = []
    for tokens in numbers.integers(100, 501, rows).tolist():
        sample: dict[str, Any] = {
            "input_ids": numbers.integers(0, VOCABULARY, tokens),
            "loss_mask": np.ones(tokens, dtype=np.int64),
            "position_ids": np.arange(tokens),
        }
        for name in ("logprobs", "ref_logprobs", "advantages"):
            sample[name] = numbers.random(tokens, dtype=np.float32)
        samples.append({**sample, "reward": 0.5})
    return samples


def padded(samples: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """What a trainer makes of rows without this library."""
    rows = list(samples)
    columns = {
        name: pad_sequence([torch.from_numpy(row[name]) for row in rows], batch_first=True)
        for name in rows[0]
        if name != "reward"
    }
    return {**columns, "reward": torch.tensor([row["reward"] for row in rows])}


def message_of(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The message of rows, as it arrives."""
    return copied(jagcodec.encode_rows(samples))


# --- parts -------------------------------------------------------------------------------------


def lists(rows: int) -> Part:
    """A column of lists."""
    numbers = random.Random(0)
    tokens = [
        [numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(900, 1_745))]
        for _ in range(rows)
    ]
    column = jagcodec.decode(jagcodec.encode_rows({"ids": tokens}))["ids"]
    check([row.tolist() for row in column.unbind()] == tokens, "encode_rows of lists")
    check(jagcodec.decode(jagcodec.encode(tokens)) == tokens, "encode of lists")
    calls: Calls = {
        "encode_rows": lambda: jagcodec.encode_rows({"ids": tokens}),
        "encode": lambda: jagcodec.encode(tokens),
        PACKER: lambda: pack_lists(tokens),
    }
    return Part(calls, [Ratio("encode_rows", PACKER, 1.0), Ratio("encode", PACKER)])


def one_row(rows: int) -> Part:
    """Messages of one row each."""
    samples = make_samples(rows)
    for sample in samples:
        same_row(jagcodec.decode(jagcodec.encode_rows([sample])), sample, "encode_rows of one row")
    calls: Calls = {
        "encode_rows": lambda: [jagcodec.encode_rows([sample]) for sample in samples],
        "pickle": lambda: [pickle.dumps(sample, protocol=5) for sample in samples],
    }
    return Part(calls, [Ratio("encode_rows", "pickle", 1.3)])


def tensors(rows: int) -> Part:
    """A dict of lists of tensors."""
    numbers = random.Random(0)
    lengths = [numbers.randrange(100, 1_500) for _ in range(rows // 2)]
    columns: dict[str, list[torch.Tensor]] = {
        "tokens": [torch.randint(0, VOCABULARY, (tokens,)) for tokens in lengths],
        "loss_masks": [torch.ones(tokens, dtype=torch.int32) for tokens in lengths],
    }
    for name in ("log_probs", "ref_log_probs", "advantages", "returns"):
        columns[name] = [torch.rand(tokens) for tokens in lengths]
    frames = jagcodec.encode_rows(columns)
    most = len(columns) + 2
    check(len(frames) <= most, f"{len(frames)} frames of {len(columns)} columns")
    back = jagcodec.decode(frames)
    for name, column in columns.items():
        pairs = zip(back[name].unbind(), column, strict=True)
        check(all(torch.equal(found, row) for found, row in pairs), "encode_rows of tensors")
    calls: Calls = {
        "encode_rows": lambda: jagcodec.decode(jagcodec.encode_rows(columns)),
        "encode": lambda: jagcodec.decode(jagcodec.encode(columns)),
        "pickle": lambda: pickle.loads(pickle.dumps(columns, protocol=5)),
    }
    return Part(calls, [Ratio("encode_rows", "pickle", 1 / 20), Ratio("encode", "pickle")])


def join(rows: int) -> Part:
    """Messages of one row to one padded batch."""
    samples = make_samples(rows)
    messages = [message_of([sample]) for sample in samples]
    pickles = [pickle.dumps(sample, protocol=5) for sample in samples]
    blobs = [jagcodec.to_blob(message) for message in messages]
    calls: Calls = {
        "materialize": lambda: jagcodec.materialize(messages),
        "one by one": lambda: opened_and_joined(blobs),
        "pad_sequence": lambda: padded(map(pickle.loads, pickles)),
    }
    for name, call in calls.items():
        same_columns(call(), padded(samples), f"{name} of messages of one row")
    ratios = [("materialize", 1 / 5), ("one by one", 1 / 2.5)]
    return Part(calls, [Ratio(name, "pad_sequence", asked) for name, asked in ratios])


def opened_and_joined(messages: Iterable[Any]) -> Any:
    """Messages opened as they come in, and padded together."""
    batch = jagcodec.concat_rows([jagcodec.open_wire(message) for message in messages])
    return jagcodec.materialize(batch)


def parts(rows: int) -> Part:
    """Messages of some rows to one padded batch."""
    samples = make_samples(rows)
    size = -(-rows // 8)
    eight = [message_of(samples[start : start + size]) for start in range(0, rows, size)]
    blobs = [jagcodec.to_blob(message) for message in eight]
    one = message_of(samples)
    calls: Calls = {
        "8 messages": lambda: jagcodec.materialize(eight),
        "8 open": lambda: opened_and_joined(blobs),
        "one message": lambda: jagcodec.materialize(one),
    }
    for name, call in calls.items():
        same_columns(call(), padded(samples), f"materialize of {name}")
    return Part(calls, [Ratio(name, "one message", 1.5) for name in ("8 messages", "8 open")])


def narrow(rows: int) -> Part:
    """Messages of one row, stored narrow and plain."""
    samples = make_samples(rows // 4)
    plain = [message_of([sample]) for sample in samples]
    options: Any = {"narrow": True}
    stored = [copied(jagcodec.encode_rows([sample], **options)) for sample in samples]
    calls: Calls = {
        "narrow": lambda: opened_and_joined(stored),
        "plain": lambda: opened_and_joined(plain),
    }
    for name, call in calls.items():
        same_columns(call(), padded(samples), f"{name} messages")
    return Part(calls, [Ratio("narrow", "plain", 3.0)])


def split(rows: int) -> Part:
    """The rows of an open message, one by one."""
    samples = make_samples(rows)
    batch = jagcodec.open_wire(message_of(samples))
    columns = padded(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]

    def messages() -> list[list[Any]]:
        return [part.to_frames() for part in jagcodec.split_rows(batch, rows)]

    def sliced() -> list[dict[str, torch.Tensor]]:
        return [
            {name: x[i] if x.ndim == 1 else x[i, :tokens] for name, x in columns.items()}
            for i, tokens in enumerate(lengths)
        ]

    for frames, sample in zip(messages(), samples, strict=True):
        same_row(jagcodec.decode(frames), sample, "to_frames of a part")
    for found, expected in zip(jagcodec.to_rows(batch), sliced(), strict=True):
        same_columns(found, expected, "to_rows")
    calls: Calls = {
        "to_frames": messages,
        "pickle": lambda: [pickle.dumps(sample, protocol=5) for sample in samples],
        "to_rows": lambda: jagcodec.to_rows(batch),
        "slices": sliced,
    }
    ratios = [Ratio("to_frames", "pickle"), Ratio("to_rows", "slices")]
    return Part(calls, [Limit("to_frames", 10), Limit("to_rows", 5), *ratios])


def tensordict(rows: int) -> Part:
    """A TensorDict in parts of one row."""
    samples = make_samples(rows)
    batch = jagcodec.pack_rows(samples)

    def by_hand() -> list[TensorDict]:
        values = {name: batch[name].values() for name in samples[0] if name != "reward"}
        ends = batch["input_ids"].offsets().tolist()
        made = []
        for i in range(rows):
            start, end = ends[i], ends[i + 1]
            offsets = torch.tensor([0, end - start])
            leaves = {
                name: torch.nested.nested_tensor_from_jagged(each[start:end], offsets)
                for name, each in values.items()
            }
            leaves["reward"] = batch["reward"][i : i + 1]
            made.append(TensorDict(leaves, batch_size=[1]))
        return made

    calls: Calls = {"split_rows": lambda: jagcodec.split_rows(batch, rows), "by hand": by_hand}
    for name, call in calls.items():
        for part, sample in zip(call(), samples, strict=True):
            same_row(part, sample, name)
    return Part(calls, [Ratio("split_rows", "by hand", 1.0)])


def budget(rows: int) -> Part:
    """Micro-batches within a token budget."""
    samples = make_samples(rows)
    frames = message_of(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]
    most = max(sum(lengths) // 25, *lengths)

    def micro_batches() -> list[Any]:
        batch = jagcodec.open_wire(frames)
        return [jagcodec.materialize(part) for part in jagcodec.split_rows(batch, max_tokens=most)]

    groups = jagcodec.balance_rows(torch.tensor(lengths), max_tokens=most)
    for found, group in zip(micro_batches(), groups, strict=True):
        same_columns(found, padded(samples[i] for i in group.tolist()), "a micro-batch")
    whole = f"{len(groups)} as one"
    calls: Calls = {
        f"{len(groups)} micro-batches": micro_batches,
        whole: lambda: jagcodec.materialize(jagcodec.open_wire(frames)),
    }
    same_columns(calls[whole](), padded(samples), "materialize")
    return Part(calls, [Ratio(f"{len(groups)} micro-batches", whole, 3.0)])


_ALL = (lists, one_row, tensors, join, parts, narrow, split, tensordict, budget)
PARTS: dict[str, Callable[[int], Part]] = {part.__name__: part for part in _ALL}


# --- verifying ---------------------------------------------------------------------------------


def check(holds: bool, what: str) -> None:
    """See that a result is right.

    Raises:
        SystemExit: It is not.
    """
    if not holds:
        raise SystemExit(f"VERIFICATION FAILED: {what}")


def same_row(batch: TensorDict, sample: Mapping[str, Any], what: str) -> None:
    """See that a batch of one row is a sample."""
    check(list(batch.keys()) == list(sample), what)
    for name, value in sample.items():
        if name == "reward":
            check(batch[name].tolist() == [value], f"{what}: {name}")
        else:
            check(np.array_equal(batch[name].values().numpy(), value), f"{what}: {name}")


def same_columns(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str
) -> None:
    """See that columns are the same, dtypes too."""
    check(list(found.keys()) == list(expected), what)
    for name, column in expected.items():
        same = found[name].dtype == column.dtype and torch.equal(found[name], column)
        check(same, f"{what}: {name}")


# --- measuring ---------------------------------------------------------------------------------


def measured(part: Part, seconds: float) -> dict[str, Any]:
    """Milliseconds of every side, and the lines: medians, and the lowest and the highest."""
    order = random.Random(0)
    names = list(part.calls)
    ms: dict[str, list[float]] = {name: [] for name in names}
    for call in part.calls.values():
        call()  # warms up
    end = time.perf_counter() + seconds
    while len(ms[names[0]]) < FEWEST or time.perf_counter() < end:
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            part.calls[name]()
            ms[name].append(1e3 * (time.perf_counter() - start))
    lines = {}
    for line in part.lines:
        if isinstance(line, Ratio):
            name, unit = f"{line.ours} / {line.theirs}", "times"
            pairs = zip(ms[line.ours], ms[line.theirs], strict=True)
            each = [ours / theirs for ours, theirs in pairs]
        else:
            name, unit, each = line.ours, "ms", ms[line.ours]
        lines[name] = {
            "median": statistics.median(each),
            "lowest": min(each),
            "highest": max(each),
            "unit": unit,
            "asked": line.asked,
        }
    medians = {name: statistics.median(each) for name, each in ms.items()}
    return {"rounds": len(ms[names[0]]), "ms": medians, "lines": lines}


def text(name: str, found: Mapping[str, Any]) -> str:
    """One part: milliseconds of each side, and every line beside what is asked."""
    times = ", ".join(f"{side} {ms:.2f} ms" for side, ms in found["ms"].items())
    lines = [f"{name}, {found['rounds']} rounds: {times}"]
    for line, each in found["lines"].items():
        spread = (
            f"{each['median']:.3f} {each['unit']} ({each['lowest']:.3f} to {each['highest']:.3f})"
        )
        verdict = ""
        if each["asked"] is not None:
            met = "met" if each["median"] <= each["asked"] else "missed"
            verdict = f"asked {each['asked']:g}: {met}"
        lines.append(f"  {line:30}{spread:36}{verdict}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
