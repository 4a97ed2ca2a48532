"""Messages of few rows, rows in, rows joined and rows out, compared with what producers use today.

Parts of `python -m benchmarks.bench`. `small`, of 1, 8 and 64 rows of about 300 tokens in six
per-token columns and a reward, all sides from padded tensors to padded tensors:

    fused       encode_fields, copy, materialize(open_wire(frames))
    decoded     encode_fields, copy, materialize(decode(frames))
    pickle      pickle of the numpy arrays with their memory out of band (protocol 5), copy, loads,
                torch.from_numpy
    encode      encode_fields alone
    in band     pickle.dumps(protocol=5) of the arrays alone: one bytes object

The copy is that of a transport: the first frame becomes `bytes`, every other one a new
`bytearray`. Also counted: how many named functions of the library one call enters. `rows`:

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
    split       an open message in 512 parts by split_rows, each .to_frames(), compared with
                pickle.dumps(protocol=5) of 512 rows of numpy arrays; and to_rows of its seven
                columns, compared with slicing the padded columns row by row
    budget      26 micro-batches by max_tokens, all materialized, and the whole batch at once

One process. Every result is compared with the input once, outside the clock.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

import jagcodec
from benchmarks.measure import (
    Calls,
    Columns,
    Ratio,
    check,
    copied,
    functions_entered,
    in_turns,
    same_columns,
    summary,
)
from benchmarks.shapes import PADS, Batch, make_small_batch

try:
    import msgspec
except ImportError:
    pack_lists: Callable[[Any], bytes] = msgpack.packb
    PACKER = "msgpack"
else:
    pack_lists = msgspec.msgpack.encode
    PACKER = "msgspec"

ROWS = 512
VOCABULARY = 151_936
ZEROS = dict.fromkeys(PADS, 0)  # the pads that `materialize` writes unless it is given others

SMALL_ROWS = (1, 8, 64)
SMALL_TURNS = 50  # calls of each side in a round


class Part(NamedTuple):
    """Sides that are measured together, and the ratios of interest."""

    calls: Calls
    ratios: Sequence[Ratio]


def measure_small(seconds: float, rows: Sequence[int] = SMALL_ROWS) -> dict[str, Any]:
    """Messages of few rows, by their number; and the functions that calls enter."""
    found: dict[str, Any] = {}
    for number in rows:
        part = small(make_small_batch(number, pads=ZEROS))
        ms = in_turns(part.calls, seconds, turns=SMALL_TURNS)
        found[str(number)] = summary(ms, part.ratios)
    calls = calls_of_one_batch(make_small_batch(rows[-1], pads=ZEROS))
    package = Path(jagcodec.__file__).parent
    functions = {name: functions_entered(call, package) for name, call in calls.items()}
    return {"rows": found, "functions": functions}


def measure_rows(seconds: float, rows: int = ROWS) -> dict[str, Any]:
    """Every part of `PARTS`, by its name."""
    found = {}
    for name, make in PARTS.items():
        part = make(rows)
        found[name] = summary(in_turns(part.calls, seconds), part.ratios)
    return found


# --- small messages ----------------------------------------------------------------------------


def small(batch: Batch) -> Part:
    """One small message, from padded tensors to padded tensors."""
    columns, lengths = batch.columns, batch.lengths

    def encode() -> Sequence[Any]:
        return jagcodec.encode_fields(columns, lengths=lengths, token_aligned_fields=PADS)

    def fused() -> Columns:
        return jagcodec.materialize(jagcodec.open_wire(copied(encode())))

    def decoded() -> Columns:
        return jagcodec.materialize(jagcodec.decode(copied(encode())))

    def pickled() -> Columns:
        arrays = {name: column.numpy() for name, column in columns.items()}
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        received = copied([head, *buffers])
        loaded = pickle.loads(received[0], buffers=received[1:])
        return {name: torch.from_numpy(array) for name, array in loaded.items()}

    def in_band() -> bytes:
        return pickle.dumps({name: column.numpy() for name, column in columns.items()}, protocol=5)

    calls: Calls = {
        "fused": fused,
        "decoded": decoded,
        "pickle": pickled,
        "encode": encode,
        "in band": in_band,
    }
    for name in ("fused", "decoded", "pickle"):
        same_columns(calls[name](), columns, f"{name}, {len(lengths)} rows")
    arrays = {name: torch.from_numpy(array) for name, array in pickle.loads(in_band()).items()}
    same_columns(arrays, columns, "in band")
    return Part(calls, [("fused", "pickle"), ("decoded", "pickle"), ("encode", "in band")])


def calls_of_one_batch(batch: Batch) -> Calls:
    """The calls whose functions are counted."""
    encode = small(batch).calls["encode"]
    frames = copied(encode())
    return {
        "encode_fields": encode,
        "decode": lambda: jagcodec.decode(frames),
        "open_wire + materialize": lambda: jagcodec.materialize(jagcodec.open_wire(frames)),
    }


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
    return Part(calls, [("encode_rows", PACKER), ("encode", PACKER)])


def one_row(rows: int) -> Part:
    """Messages of one row each."""
    samples = make_samples(rows)
    for sample in samples:
        same_row(jagcodec.decode(jagcodec.encode_rows([sample])), sample, "encode_rows of one row")
    calls: Calls = {
        "encode_rows": lambda: [jagcodec.encode_rows([sample]) for sample in samples],
        "pickle": lambda: [pickle.dumps(sample, protocol=5) for sample in samples],
    }
    return Part(calls, [("encode_rows", "pickle")])


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
    return Part(calls, [("encode_rows", "pickle"), ("encode", "pickle")])


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
    return Part(calls, [("materialize", "pad_sequence"), ("one by one", "pad_sequence")])


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
    return Part(calls, [("8 messages", "one message"), ("8 open", "one message")])


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
    return Part(calls, [("narrow", "plain")])


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
    return Part(calls, [("to_frames", "pickle"), ("to_rows", "slices")])


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
    return Part(calls, [(f"{len(groups)} micro-batches", whole)])


_ALL = (lists, one_row, tensors, join, parts, narrow, split, budget)
PARTS: dict[str, Callable[[int], Part]] = {part.__name__: part for part in _ALL}


def same_row(batch: TensorDict, sample: Mapping[str, Any], what: str) -> None:
    """Make sure that a batch of one row is a sample."""
    check(list(batch.keys()) == list(sample), what)
    for name, value in sample.items():
        if name == "reward":
            check(batch[name].tolist() == [value], f"{what}: {name}")
        else:
            check(np.array_equal(batch[name].values().numpy(), value), f"{what}: {name}")
