"""Messages of few rows, rows in, joined and out, compared with what producers use today.

Two parts of `python -m benchmarks.bench`, in one process. Every result is compared with the input
once, outside the clock. The copy of a message is that of a transport: the first frame becomes
`bytes`, every other one a new `bytearray`.
"""

from __future__ import annotations

import functools
import pickle
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch.nn.utils.rnn import pad_sequence

import jagcodec
from benchmarks.measure import (
    Calls,
    Columns,
    Ratio,
    check,
    cool,
    copied,
    functions_entered,
    same_columns,
    summary,
    times,
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
# One call is too short to compare: how many calls of a side make a figure, and what comes before
# each of them.
SMALL_CALLS: dict[str, tuple[int, Callable[[], object]]] = {"warm": (50, bool), "cold": (15, cool)}


class Part(NamedTuple):
    """Sides that are measured together, and the ratios of interest."""

    calls: Calls
    ratios: Sequence[Ratio]


def with_last(calls: Calls) -> Part:
    """Each side is compared with the last one."""
    *others, last = calls
    return Part(calls, [(name, last) for name in others])


def measure_small(seconds: float, rows: Sequence[int] = SMALL_ROWS) -> dict[str, Any]:
    """Messages of few rows, by their number, warm and cold; and the functions that calls enter."""
    found: dict[str, Any] = {}
    for number in rows:
        part = small(make_small_batch(number, pads=ZEROS))
        for kind, (size, before) in SMALL_CALLS.items():
            ms = times(part.calls, seconds, 3 * size, before)
            figures = {side: medians(each, size) for side, each in ms.items()}
            found[f"{number}, {kind}"] = summary(figures, part.ratios)
    frames = copied(part.calls["encode"]())
    calls: Calls = {
        "encode_fields": part.calls["encode"],
        "decode": lambda: jagcodec.decode(frames),
        "open_wire + materialize": lambda: jagcodec.materialize(jagcodec.open_wire(frames)),
    }
    package = Path(jagcodec.__file__).parent
    functions = {name: functions_entered(call, package) for name, call in calls.items()}
    return {"rows": found, "functions": functions}


def medians(ms: Sequence[float], size: int) -> list[float]:
    """A figure for every `size` calls."""
    starts = range(0, len(ms) - size + 1, size)
    return [statistics.median(ms[start : start + size]) for start in starts]


def measure_rows(
    seconds: float, rows: int = ROWS, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Parts of `PARTS` by their names; all of them by default."""
    found = {}
    for name in PARTS if names is None else names:
        part = PARTS[name](rows)
        found[name] = summary(times(part.calls, seconds), part.ratios)
    return found


# --- small messages ----------------------------------------------------------------------------


def small(batch: Batch) -> Part:
    """One message of six per-token columns and a reward, of about 300 tokens per row.

    `fused`, `decoded` and `pickle` (of numpy arrays, with their memory out of band) go from padded
    tensors to padded tensors. `encode` and `in band` (one bytes object) are the first half.
    """
    columns, lengths = batch.columns, batch.lengths

    def encode() -> Sequence[Any]:
        return jagcodec.encode_fields(columns, lengths=lengths, token_aligned_fields=PADS)

    def arrays() -> dict[str, Any]:
        return {name: column.numpy() for name, column in columns.items()}

    def pickled() -> Columns:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays(), protocol=5, buffer_callback=buffers.append)
        received = copied([head, *buffers])
        return tensors_of(pickle.loads(received[0], buffers=received[1:]))

    calls: Calls = {
        "fused": lambda: jagcodec.materialize(jagcodec.open_wire(copied(encode()))),
        "decoded": lambda: jagcodec.materialize(jagcodec.decode(copied(encode()))),
        "pickle": pickled,
        "encode": encode,
        "in band": lambda: pickle.dumps(arrays(), protocol=5),
    }
    for name in ("fused", "decoded", "pickle"):
        same_columns(calls[name](), columns, f"{name}, {len(lengths)} rows")
    same_columns(tensors_of(pickle.loads(calls["in band"]())), columns, "in band")
    return Part(calls, [("fused", "pickle"), ("decoded", "pickle"), ("encode", "in band")])


def tensors_of(arrays: Mapping[str, Any]) -> Columns:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


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


def make_real_samples(rows: int) -> list[dict[str, Any]]:
    """Rows as engines and agent loops make them: three arrays, a reward, a uid, two messages."""
    numbers = np.random.default_rng(0)
    samples = []
    for i, tokens in enumerate(numbers.integers(55, 460, rows).tolist()):
        chat = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 60}]
        sample = {
            "input_ids": numbers.integers(0, VOCABULARY, tokens),
            "logprobs": numbers.random(tokens, dtype=np.float32),
            "mask": numbers.integers(0, 2, tokens).astype(bool),
            "reward": 0.5,
            "uid": f"u{i // 8}",
            "messages": chat,
        }
        samples.append(sample)
    return samples


AS_LONG_AS_RESPONSES = ("response_ids", "logprobs", "top_ids", "top_logprobs", "loss_mask")
TRAJECTORY_OPTIONS: dict[str, Any] = {
    "same_length": AS_LONG_AS_RESPONSES,
    "dtypes": {"image": object},
    "ragged_dims": {"experts": 2},
}


def make_trajectories(rows: int) -> list[dict[str, Any]]:
    """Rows as a user of an agent loop writes them.

    Lists of tokens, log-probabilities and a mask, top-5 ids and log-probabilities, a reward, a uid,
    messages, a tool call or None, an image in every third row, and the experts of 4 layers.
    """
    numbers = np.random.default_rng(0)
    samples = []
    for i in range(rows):
        tokens = int(numbers.integers(3, 120))
        both, top = tokens + int(numbers.integers(5, 40)), (tokens, 5)
        image = numbers.integers(0, 255, (3, int(numbers.integers(8, 20)), 16), dtype=np.uint8)
        says = {"role": "assistant", "content": "a" * int(numbers.integers(1, 50))}
        sample = {
            "input_ids": numbers.integers(0, VOCABULARY, both).tolist(),
            "response_ids": numbers.integers(0, VOCABULARY, tokens).tolist(),
            "logprobs": (-numbers.random(tokens)).tolist(),
            "top_ids": numbers.integers(0, VOCABULARY, top).astype(np.int32),
            "top_logprobs": -numbers.random(top, dtype=np.float32),
            "loss_mask": (numbers.random(tokens) < 0.8).tolist(),
            "reward": float(numbers.random()),
            "uid": f"u{i // 4}",
            "messages": [{"role": "user", "content": f"q{i}"}, says],
            "tool_call": {"name": "calc", "arguments": {"x": i}} if i % 2 else None,
            "image": None if i % 3 else image,
            "experts": numbers.integers(0, 8, (4, both, 2), dtype=np.uint8),
        }
        samples.append(sample)
    return samples


def padded(samples: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """What a trainer makes of rows without this library."""
    rows = list(samples)
    columns = {
        name: pad_sequence([torch.from_numpy(row[name]) for row in rows], batch_first=True)
        for name, value in rows[0].items()
        if isinstance(value, np.ndarray)
    }
    return {**columns, "reward": torch.tensor([row["reward"] for row in rows])}


# --- parts -------------------------------------------------------------------------------------


def lists(rows: int) -> Part:
    """A column of lists, 677 thousand tokens in 512 rows."""
    numbers = random.Random(0)
    tokens = [
        [numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(900, 1_745))]
        for _ in range(rows)
    ]
    column = jagcodec.decode(jagcodec.encode_rows({"ids": tokens}))["ids"]
    check([row.tolist() for row in column.unbind()] == tokens, "encode_rows of lists")
    check(jagcodec.decode(jagcodec.encode(tokens)) == tokens, "encode of lists")
    return with_last(
        {
            "encode_rows": lambda: jagcodec.encode_rows({"ids": tokens}),
            "encode": lambda: jagcodec.encode(tokens),
            PACKER: lambda: pack_lists(tokens),
        }
    )


def one_row(rows: int) -> Part:
    """A message for each row, of six numpy columns of 100 to 500 tokens and a reward."""
    samples = make_samples(rows)
    for sample in samples:
        same_row(jagcodec.decode(jagcodec.encode_rows([sample])), sample, "encode_rows of one row")
    return with_last(
        {
            "encode_rows": lambda: [jagcodec.encode_rows([sample]) for sample in samples],
            "pickle": lambda: [pickle.dumps(sample, protocol=5) for sample in samples],
        }
    )


def real_rows(rows: int) -> Part:
    """One, 8 and 32 rows of arrays, a reward, a uid and messages, again and again."""
    samples = make_real_samples(rows)
    calls: dict[str, Callable[[], Any]] = {}
    ratios = []
    for size in (1, 8, 32):
        parts = [samples[i : i + size] for i in range(0, rows, size)]
        ratios.append(_encoded_and_pickled(f"of {size}", jagcodec.encode_rows, parts, calls))
    return Part(calls, ratios)


def trajectories(rows: int) -> Part:
    """One, 8 and 64 rows of a user, with options; and one of them without what needs options."""
    samples = make_trajectories(rows)
    calls: dict[str, Callable[[], Any]] = {}
    ratios = []
    encode = functools.partial(jagcodec.encode_rows, **TRAJECTORY_OPTIONS)
    for size in (1, 8, 64):
        parts = [samples[i : i + size] for i in range(0, rows, size)]
        ratios.append(_encoded_and_pickled(f"of {size}", encode, parts, calls))
    simple = [{k: x for k, x in row.items() if k not in ("image", "experts")} for row in samples]
    parts = [[row] for row in simple]
    ratios.append(_encoded_and_pickled("of 1, no options", jagcodec.encode_rows, parts, calls))
    return Part(calls, ratios)


def _encoded_and_pickled(
    name: str, encode: Callable[..., Any], parts: Sequence[Any], calls: dict[str, Any]
) -> Ratio:
    """Add both sides to the `calls`, after the values have been compared."""
    ours, theirs = f"encode_rows {name}", f"pickle {name}"
    calls[ours] = functools.partial(each_of, encode, parts)
    calls[theirs] = functools.partial(each_of, functools.partial(pickle.dumps, protocol=5), parts)
    for part, frames in zip(parts, calls[ours](), strict=True):
        same_rows(jagcodec.to_rows(jagcodec.open_wire(frames)), part, ours)
    return ours, theirs


def _same_value(found: Any, sent: Any) -> bool:
    """Whether a value arrived; Python's floats arrive as float32."""
    if not (torch.is_tensor(found) or isinstance(found, (float, np.ndarray))):
        return bool(found == sent)
    wanted = np.asarray(sent)
    wanted = wanted.astype(np.float32) if wanted.dtype == np.float64 else wanted
    return bool(np.array_equal(np.asarray(found), wanted))


def rows_of_arrays(rows: int) -> Part:
    """A column of objects that has an image in every third row, written and read."""
    images = [sample["image"] for sample in make_trajectories(rows)]
    frames = copied(jagcodec.encode_rows({"image": images}, dtypes={"image": object}))
    pickled = pickle.dumps(images, protocol=5)
    calls: Calls = {
        "encode_rows": lambda: jagcodec.encode_rows({"image": images}, dtypes={"image": object}),
        "dumps": lambda: pickle.dumps(images, protocol=5),
        "materialize": lambda: jagcodec.materialize(frames),
        "loads": lambda: pickle.loads(pickled),
    }
    for found, sent in zip(calls["materialize"]()["image"], images, strict=True):
        check(found is sent or np.array_equal(found, sent), "rows that are arrays")
    return Part(calls, [("encode_rows", "dumps"), ("materialize", "loads")])


def options(rows: int) -> Part:
    """Eight real rows with and without an option that changes nothing."""
    samples = make_real_samples(rows)
    parts = [samples[i : i + 8] for i in range(0, rows, 8)]
    named = {"dtypes": {"logprobs": torch.float32}}
    sides: dict[str, Any] = {"without": {}, "with dtypes": named}
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(each_of, functools.partial(jagcodec.encode_rows, **chosen), parts)
        for name, chosen in sides.items()
    }
    check(
        [*map(_bytes_of, calls["without"]())] == [*map(_bytes_of, calls["with dtypes"]())], "bytes"
    )
    return Part(calls, [("with dtypes", "without")])


def _bytes_of(frames: Iterable[Any]) -> list[bytes]:
    return list(map(bytes, frames))


def odd_columns(rows: int) -> Part:
    """Seven plain columns and an odd one: in one message, and the odd one in another."""
    batch = jagcodec.pack_rows(make_samples(64))
    odd: dict[str, Any] = {
        "sets": NonTensorStack(*({i} for i in range(64))),
        "sparse": torch.sparse_coo_tensor(torch.arange(64).repeat(2, 1), torch.ones(64)),
        "nested batch": TensorDict({"x": torch.ones(64), "y": torch.ones(64, 3)}, [64]),
        "dicts": NonTensorStack(*({"i": i} for i in range(64))),
    }
    calls: dict[str, Callable[[], Any]] = {}
    ratios = []
    for name, column in odd.items():
        both = batch.copy()
        both[name] = column
        alone = TensorDict({name: column}, [64])
        names = f"7 and {name}", f"7, then {name}"
        calls[names[0]] = functools.partial(each_of, jagcodec.encode, [both] * 8)
        calls[names[1]] = functools.partial(each_of, jagcodec.encode, [batch, alone] * 8)
        ratios.append(names)
        check(list(jagcodec.decode(jagcodec.encode(both)).keys()) == [*batch.keys(), name], name)
    return Part(calls, ratios)


def each_of(call: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """What a call returns for each part."""
    return list(map(call, parts))


def same_rows(found: Sequence[Mapping[str, Any]], samples: Sequence[Any], what: str) -> None:
    """Make sure that rows are samples of arrays, numbers and objects."""
    check(len(found) == len(samples), what)
    for row, sample in zip(found, samples, strict=True):
        check(list(row) == list(sample), what)
        for name, value in sample.items():
            check(_same_value(row[name], value), f"{what}: {name}")


def tensor_rows(rows: int) -> Part:
    """Eight rows of tensors alone, again and again, and the same rows as arrays."""
    samples = [
        {name: value for name, value in sample.items() if isinstance(value, np.ndarray)}
        for sample in make_real_samples(rows)
    ]
    parts = [samples[i : i + 8] for i in range(0, rows, 8)]
    torches = [[tensors_of(row) for row in part] for part in parts]
    for part, given in zip(parts, torches, strict=True):
        frames = jagcodec.encode_rows(given)
        check(list(map(bytes, frames)) == list(map(bytes, jagcodec.encode_rows(part))), "tensors")
        same_rows(jagcodec.to_rows(jagcodec.open_wire(frames)), given, "tensors")
    return with_last(
        {
            "tensors": lambda: [jagcodec.encode_rows(part) for part in torches],
            "arrays": lambda: [jagcodec.encode_rows(part) for part in parts],
            "pickle": lambda: [pickle.dumps(part, protocol=5) for part in parts],
        }
    )


def join_real_rows(rows: int) -> Part:
    """Messages of one real row to one padded batch with its objects."""
    samples = make_real_samples(rows)
    frames = [copied(jagcodec.encode_rows([sample])) for sample in samples]
    pickles = [pickle.dumps(sample, protocol=5) for sample in samples]

    def unpickled() -> dict[str, Any]:
        loaded = list(map(pickle.loads, pickles))
        objects = {name: [row[name] for row in loaded] for name in ("uid", "messages")}
        return {**padded(loaded), **objects}

    calls: Calls = {"materialize": lambda: jagcodec.materialize(frames), "pad_sequence": unpickled}
    batch, expected = calls["materialize"](), calls["pad_sequence"]()
    check([*batch.keys()] == [*samples[0]], "names of joined rows")
    for name, column in expected.items():
        same = (
            torch.equal(batch[name], column)
            if torch.is_tensor(column)
            else list(batch[name]) == column
        )
        check(bool(same), f"joined rows: {name}")
    return with_last(calls)


def tensors(rows: int) -> Part:
    """slime's dict of lists of 1-D tensors, half as many rows, written and read."""
    numbers = random.Random(0)
    lengths = [numbers.randrange(100, 1_500) for _ in range(rows // 2)]
    columns: dict[str, list[torch.Tensor]] = {
        "tokens": [torch.randint(0, VOCABULARY, (tokens,)) for tokens in lengths],
        "loss_masks": [torch.ones(tokens, dtype=torch.int32) for tokens in lengths],
    }
    for name in ("log_probs", "ref_log_probs", "advantages", "returns"):
        columns[name] = [torch.rand(tokens) for tokens in lengths]
    back = jagcodec.decode(jagcodec.encode_rows(columns))
    for name, column in columns.items():
        pairs = zip(back[name].unbind(), column, strict=True)
        check(all(torch.equal(found, row) for found, row in pairs), "encode_rows of tensors")
    return with_last(
        {
            "encode_rows": lambda: jagcodec.decode(jagcodec.encode_rows(columns)),
            "encode": lambda: jagcodec.decode(jagcodec.encode(columns)),
            "pickle": lambda: pickle.loads(pickle.dumps(columns, protocol=5)),
        }
    )


def join(rows: int) -> Part:
    """Messages to one padded batch: one of each row, eight, and one of all rows.

    `materialize` takes them as lists of frames; `open` opens them as they come in.
    """
    samples = make_samples(rows)

    def messages(size: int) -> list[Any]:
        starts = range(0, rows, size)
        return [copied(jagcodec.encode_rows(samples[i : i + size])) for i in starts]

    def opened(blobs: Sequence[Any]) -> Any:
        return jagcodec.materialize(jagcodec.concat_rows(list(map(jagcodec.open_wire, blobs))))

    each, eight, one = messages(1), messages(-(-rows // 8)), messages(rows)[0]
    blobs, eight_blobs = (list(map(jagcodec.to_blob, listed)) for listed in (each, eight))
    pickles = [pickle.dumps(sample, protocol=5) for sample in samples]
    calls: Calls = {
        "materialize": lambda: jagcodec.materialize(each),
        "open": lambda: opened(blobs),
        "pad_sequence": lambda: padded(map(pickle.loads, pickles)),
        "8 messages": lambda: jagcodec.materialize(eight),
        "8 open": lambda: opened(eight_blobs),
        "one message": lambda: jagcodec.materialize(one),
    }
    for name, call in calls.items():
        same_columns(call(), padded(samples), name)
    ratios = [(name, "pad_sequence") for name in ("materialize", "open")]
    return Part(calls, [*ratios, *((name, "one message") for name in ("8 messages", "8 open"))])


def split(rows: int) -> Part:
    """An open message in parts of one row, as messages and as values.

    `to_frames` cuts a part out of its message, which `encode` reads and writes again. `slices` cuts
    the padded columns row by row.
    """
    samples = make_samples(rows)
    batch = jagcodec.open_wire(copied(jagcodec.encode_rows(samples)))
    columns = padded(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]

    def messages() -> list[list[Any]]:
        return [part.to_frames() for part in jagcodec.split_rows(batch, rows)]

    def sliced() -> list[dict[str, torch.Tensor]]:
        return [
            {name: x[i] if x.ndim == 1 else x[i, :tokens] for name, x in columns.items()}
            for i, tokens in enumerate(lengths)
        ]

    def encoded() -> list[list[Any]]:
        return [jagcodec.encode(part) for part in jagcodec.split_rows(batch, rows)]

    for frames, again, sample in zip(messages(), encoded(), samples, strict=True):
        same_row(jagcodec.decode(frames), sample, "to_frames of a part")
        check(_bytes_of(frames) == _bytes_of(again), "encode of a part")
    for found, expected in zip(jagcodec.to_rows(batch), sliced(), strict=True):
        same_columns(found, expected, "to_rows")
    calls: Calls = {
        "to_frames": messages,
        "encode": encoded,
        "pickle": lambda: [pickle.dumps(sample, protocol=5) for sample in samples],
        "to_rows": lambda: jagcodec.to_rows(batch),
        "slices": sliced,
    }
    ratios = [("to_frames", "pickle"), ("to_frames", "encode"), ("to_rows", "slices")]
    return Part(calls, ratios)


def budget(rows: int) -> Part:
    """Micro-batches within a token budget, all materialized, and the whole batch at once."""
    samples = make_samples(rows)
    frames = copied(jagcodec.encode_rows(samples))
    lengths = [len(sample["input_ids"]) for sample in samples]
    most = max(sum(lengths) // 25, *lengths)

    def micro_batches() -> list[Any]:
        batch = jagcodec.open_wire(frames)
        return [jagcodec.materialize(part) for part in jagcodec.split_rows(batch, max_tokens=most)]

    groups = jagcodec.plan_micro_batches(lengths, max_tokens=most)[0]
    for found, group in zip(micro_batches(), groups, strict=True):
        same_columns(found, padded(samples[i] for i in group.tolist()), "a micro-batch")
    return with_last(
        {
            f"{len(groups)} micro-batches": micro_batches,
            f"{len(groups)} as one": lambda: jagcodec.materialize(jagcodec.open_wire(frames)),
        }
    )


_ALL = (
    *(trajectories, rows_of_arrays, options, odd_columns),
    *(lists, one_row, real_rows, tensor_rows, tensors, join, join_real_rows, split, budget),
)
PARTS: dict[str, Callable[[int], Part]] = {part.__name__: part for part in _ALL}


def same_row(batch: TensorDict, sample: Mapping[str, Any], what: str) -> None:
    """Make sure that a batch of one row is a sample."""
    check(list(batch.keys()) == list(sample), what)
    for name, value in sample.items():
        if name == "reward":
            check(batch[name].tolist() == [value], f"{what}: {name}")
        else:
            check(np.array_equal(batch[name].values().numpy(), value), f"{what}: {name}")
