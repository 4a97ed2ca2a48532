"""A batch of your own lengths, sent and received in several ways, timed side by side."""

from __future__ import annotations

import importlib.util
import io
import pickle
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.batch.materialize import materialize
from jagcodec.cli.arguments import TokenColumn
from jagcodec.errors import ArgumentError, JagcodecError
from jagcodec.memory.tensor_bytes import same_width_ints
from jagcodec.pack.fields import encode_fields

Columns = Mapping[str, torch.Tensor]


class Way(NamedTuple):
    """A way to send a batch: to buffers, and back to rectangles."""

    name: str
    write: Callable[[], Sequence[Any]]
    read: Callable[[list[Any]], Columns]


@dataclass(frozen=True)
class Trip:
    """What one way took: medians over rounds, in seconds.

    Attributes:
        way: Its name.
        bytes: What is sent.
        write: Rectangles to buffers.
        copy: Buffers to those of the receiver, as a link would at the speed of memory.
        read: Buffers to rectangles.
        whole: All three in one; the median of their sums.
    """

    way: str
    bytes: int
    write: float
    copy: float
    read: float
    whole: float

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def make_columns(lengths: Sequence[int], width: int, columns: Iterable[TokenColumn]) -> Columns:
    """Rectangles of random cells, zero behind each row; the same ones each time.

    Raises:
        ArgumentError: This torch cannot fill a dtype.
        MemoryError: They are too large.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        valid = torch.arange(width) < torch.tensor(list(lengths), dtype=torch.int64)[:, None]
    except (RuntimeError, OverflowError) as error:  # as torch says that there is none
        raise MemoryError from error
    found: dict[str, torch.Tensor] = {}
    for name, dtype_name in columns:
        dtype: Any = getattr(torch, dtype_name, None)
        shape = (len(lengths), width)
        try:
            if dtype.is_floating_point or dtype.is_complex:
                cells = torch.randn(shape, generator=generator).to(dtype)
            else:
                # As wide as the ids of today's vocabularies, where they fit.
                most = 2 if dtype == torch.bool else min(150_000, torch.iinfo(dtype).max)
                cells = torch.randint(most, shape, generator=generator).to(dtype)
            found[name] = cells.masked_fill(~valid, 0).contiguous()
        except (AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
            if "allocate memory" in str(error):
                raise MemoryError from error
            detail = f"expected a dtype that torch can fill with numbers, found {dtype_name}"
            raise ArgumentError("bad_dtype", f"--columns {name}", detail) from error
    return found


def ways_of(columns: Columns, lengths: Sequence[int], width: int) -> list[Way]:
    """The ways that this machine has the libraries for."""
    bits = {name: tensor.view(same_width_ints(tensor.dtype)) for name, tensor in columns.items()}
    arrays = {name: tensor.numpy() for name, tensor in bits.items()}
    dtypes = {name: tensor.dtype for name, tensor in columns.items()}

    def rectangles(received: Mapping[str, Any]) -> Columns:
        return {
            name: torch.from_numpy(received[name]).view(dtypes[name]).view(len(lengths), width)
            for name in columns
        }

    def own() -> Sequence[Any]:
        return encode_fields(columns, lengths=lengths, token_aligned_fields=[*columns])

    def read_own(frames: list[Any]) -> Columns:
        return materialize(frames, pad_to_seqlen=width)

    def out_of_band() -> Sequence[Any]:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        return [head, *(buffer.raw() for buffer in buffers)]

    # What is unpickled here is what this process pickled a moment before, as what it is compared
    # with does; nothing that was read from a file or another process comes here.
    ways = [
        Way("jagcodec", own, read_own),
        Way(
            "padded pickle",
            lambda: [pickle.dumps(arrays, protocol=5)],
            lambda got: rectangles(pickle.loads(got[0])),  # noqa: S301
        ),
        Way(
            "pickle out of band",
            out_of_band,
            lambda got: rectangles(pickle.loads(got[0], buffers=got[1:])),  # noqa: S301
        ),
    ]
    if _installed("safetensors"):
        ways.append(_safetensors(bits, rectangles))
    if _installed("pyarrow"):
        ways.append(_arrow(arrays, width, rectangles))
    return ways


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _safetensors(bits: Columns, rectangles: Callable[[Mapping[str, Any]], Columns]) -> Way:
    from safetensors.torch import load, save

    # Under numbers, because it does not take every name.
    numbers = dict(zip(bits, map(str, range(len(bits))), strict=True))

    def write() -> Sequence[Any]:
        return [save({numbers[name]: tensor for name, tensor in bits.items()})]

    def read(got: list[Any]) -> Columns:
        found = load(bytes(got[0]))
        return rectangles({name: found[number].numpy() for name, number in numbers.items()})

    return Way("padded safetensors", write, read)


def _arrow(
    arrays: Mapping[str, Any], width: int, rectangles: Callable[[Mapping[str, Any]], Columns]
) -> Way:
    import pyarrow as pa

    def write() -> Sequence[Any]:
        lists = [
            pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), width)
            for array in arrays.values()
        ]
        # Under numbers, because it does not take every name.
        batch = pa.RecordBatch.from_arrays(lists, names=[*map(str, range(len(lists)))])
        stream = io.BytesIO()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        return [stream.getbuffer()]

    def read(got: list[Any]) -> Columns:
        batch = pa.ipc.open_stream(pa.py_buffer(got[0])).read_next_batch()
        # Arrow's memory is read-only, and a trainer writes to its batch.
        cells = (column.flatten().to_numpy().copy() for column in batch.columns)
        return rectangles(dict(zip(arrays, cells, strict=True)))

    return Way("padded Arrow", write, read)


class WrongResultError(JagcodecError):
    """A way did not bring back what was sent."""


def timed_trips(
    ways: Sequence[Way],
    columns: Columns,
    rounds: int,
    progress: Callable[[Iterable[int]], Iterable[int]],
) -> list[Trip]:
    """Send a batch by each way in every round, after one round that is checked and not timed.

    Raises:
        WrongResultError: A way does not bring back the same bits.
    """
    spent: list[list[tuple[float, float, float]]] = [[] for _ in ways]
    sizes = [0] * len(ways)
    for round_number in progress(range(rounds + 1)):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            sent = way.write()
            wrote = time.perf_counter()
            received = [bytearray(part) for part in sent]
            copied = time.perf_counter()
            result = way.read(received)
            end = time.perf_counter()
            if round_number:
                spent[i].append((wrote - start, copied - wrote, end - copied))
            else:
                sizes[i] = sum(memoryview(part).nbytes for part in sent)
                _check(way, columns, result)
            del sent, received, result
    medians = [
        [statistics.median(part) for part in (*zip(*times, strict=True), [*map(sum, times)])]
        for times in spent
    ]
    return [
        Trip(way.name, size, *median)
        for way, size, median in zip(ways, sizes, medians, strict=True)
    ]


def _check(way: Way, sent: Columns, result: Columns) -> None:
    for name, tensor in sent.items():
        found = result[name]
        ints = same_width_ints(tensor.dtype)
        same = found.dtype == tensor.dtype and np.array_equal(
            found.contiguous().view(ints).numpy(), tensor.view(ints).numpy()
        )
        if not same:
            raise WrongResultError("bad_value", way.name, f"expected what was sent in {name!r}")
