"""What the fuzzer runs: any bytes -> the frames of a message -> the readers -> a verdict.

Needs no atheris, so that `tests/repo/test_fuzz_corpus.py` replays the corpus through the same
functions. An input is a byte that says how the message is read, and its frames; each comes after
four bytes of its length, so that libFuzzer may change anything. Most of the time `mutated` changes
an input instead, with the damage that `tests/wire/` does to messages, so that lengths, counts and
checksums fit.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tensordict import TensorDict

from jagcodec.errors import REASONS, ArgumentError, UnsupportedTypeError, WireFormatError
from jagcodec.wire import blobs
from jagcodec.wire.limits import Limits
from jagcodec.wire.many.joined import join_rows
from jagcodec.wire.read import decoder, wire_batch
from jagcodec.wire.registry import register_type
from jagcodec.wire.spec import BLOB_MAGIC, MAGIC
from jagcodec.wire.stored import elide_cells, repeats
from jagcodec.wire.write.encoder import encode
from tests.oracle import described
from tests.wire.forge import blob, damaged
from tests.wire.grown import drawn

_LENGTH = struct.Struct("<I")


@dataclass
class Sampling:
    """A registered type, which messages of the corpus hold."""

    temperature: float
    stop: Any = ()


register_type(Sampling, "fuzz.Sampling")


def frames_of(data: bytes) -> tuple[int, list[bytes]]:
    """How an input is read, and the frames in it; the last may be shorter than it says."""
    frames, at = [], 1
    while at + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        frames.append(data[at : at + size])
        at += size
    return data[0] if data else 0, frames


def input_of(how: int, frames: list[bytes]) -> bytes:
    """The input of these frames."""
    return bytes([how]) + b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)


def mutated(data: bytes, most: int, seed: int, mutate: Callable[[bytes, int], bytes]) -> bytes:
    """Another input like this one; now and then a new message, or what libFuzzer makes of it."""
    rng = random.Random(seed)
    kind = rng.random()
    if kind < 0.1:
        return mutate(data, most)
    how, frames = frames_of(data)
    if kind < 0.25 or not frames:
        frames = drawn(rng.randrange(1 << 32)).make(rng.randrange(1, 5))
    if kind < 0.3:
        how = rng.randrange(256)
    made = input_of(how, damaged(frames, rng))
    return made if len(made) <= most else data


START = b"\x84" + bytes([0xA0 | len(MAGIC)]) + MAGIC.encode()
# What one input may add to the peak of resident memory. Inputs are a few KB.
MEMORY_BOUND = 64 << 20


# What repeats may take 1 GiB besides, as long as nobody says otherwise.
LIMITS = Limits(expanded=1 << 21)


decode = partial(decoder.decode, limits=LIMITS)
open_wire = partial(wire_batch.open_wire, limits=LIMITS)
load = partial(blobs.load, limits=LIMITS)


class Counts(ctypes.Structure):
    """How far the inputs of a run got. Plain memory, so that processes can share it."""

    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("past_start", ctypes.c_int64),
        ("past_header", ctypes.c_int64),
        ("values", ctypes.c_int64),
    )


class BrokenPromiseError(AssertionError):
    """An input did something that SECURITY.md promises no message does."""


class Target:
    """The readers behind one function. `path` is a file that may be written to, for `load`."""

    def __init__(self, path: str | os.PathLike[str], counts: Counts | None = None) -> None:
        self.counts = Counts() if counts is None else counts
        self._path = Path(path)
        self._peak = 0

    def __call__(self, data: bytes) -> None:
        """Give one input to one reader.

        `BrokenPromiseError` if what was read cannot be read again, is something else for another
        reader, or took memory out of proportion; else what the reader should not have raised.
        """
        message, reader, deep = self.message(data)
        self._peak = self._peak or _peak()
        self.counts.inputs += 1
        self.counts.past_start += _begins_well(message)
        try:
            value = reader(message)
        except WireFormatError as error:
            _check_error(error)
            self.counts.past_header += _is_past_header(error)
        else:
            self.counts.past_header += 1
            self.counts.values += 1
            described(value)  # reads every byte, as a consumer would
            if deep:
                _check_stable(value)
                if reader is decode and type(value) is TensorDict and value.batch_dims:
                    _check_open(message, value)
        finally:
            peak = _peak()
            grown, self._peak = peak - self._peak, max(peak, self._peak)
        if grown > MEMORY_BOUND:
            raise BrokenPromiseError(f"{grown >> 20} MiB for an input of {len(data)} bytes")

    def message(self, data: bytes) -> tuple[Any, Callable[[Any], Any], bool]:
        """The message of an input, who reads it, and whether to look closely at the value."""
        how, frames = frames_of(data)
        form = how % 16
        # What costs most is done least often.
        deep = how >= 224
        if form < 4:
            return frames, decode, deep
        if form == 4:
            return frames, _uncopied, deep
        if form == 5:  # writable, so that it is aliased
            return [bytearray(frame) for frame in frames], decode, deep
        if form == 6:  # at an odd address
            return [memoryview(bytearray(b"x" + frame))[1:] for frame in frames], decode, deep
        if form in (10, 11):
            return frames, _chosen if form & 1 else _whole, deep
        whole = _in_one(frames)
        if form < 10:
            reader = (decode, self._mapped, self._loaded)[form - 7]
            return (bytearray if form == 7 else bytes)(whole), reader, deep
        if form < 14:
            return bytearray(whole), _chosen if form & 1 else _whole, deep
        return whole, _fetched_chosen if form & 1 else _fetched, deep

    def _mapped(self, whole: bytes) -> Any:
        self._path.write_bytes(whole)
        return load(self._path, mmap=True)

    def _loaded(self, whole: bytes) -> Any:
        self._path.write_bytes(whole)
        return load(self._path)


def _in_one(frames: list[bytes]) -> bytes:
    """Frames in one buffer; a frame that is one already is as it is."""
    if not frames or (len(frames) == 1 and frames[0].startswith(BLOB_MAGIC)):
        return b"".join(frames)
    return blob(frames)


def _begins_well(message: Any) -> bool:
    start = message if isinstance(message, (bytes, bytearray)) else [*message, b""][0]
    return bytes(start[: len(START)]) == START or start[: len(BLOB_MAGIC)] == BLOB_MAGIC


def _is_past_header(error: WireFormatError) -> bool:
    """Whether a message was refused for what the header cannot show."""
    places = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return error.path.startswith("$") and ("read_header" not in places or "value" in places)


def _uncopied(message: Any) -> Any:
    return decode(message, copy=False)


def _whole(message: Any) -> Any:
    batch = open_wire(message)
    _ = batch.fields, batch.batch_size, batch.schema, len(batch), repr(batch)
    return batch.to_tensordict()


def _chosen(message: Any) -> Any:
    """Some rows of a batch, alone and joined; what cannot be chosen from may say so."""
    if not callable(message):  # first, because joins read what cannot be opened, too
        frames = [message] if isinstance(message, (bytes, bytearray)) else message
        with suppress(ArgumentError):
            twice = join_rows([frames, frames], "fuzz")
            described(twice.rows([0] * min(len(twice), 1)).to_tensordict())
            described(twice.to_tensordict())
    batch = open_wire(message)
    for name in batch.fields:
        _ = batch.schema[name]
        described(batch.row_lengths(name))
    rows = min(len(batch), 8)
    with suppress(ArgumentError):
        picked = batch.rows([*range(0, rows, 2), *range(rows - 1, -1, -3), *[0] * min(rows, 1)])
        described(picked.to_tensordict())
        part = batch.select(batch.fields[:2]).rows(slice(1, rows))
        described(part.rows([True] * len(part)).to_tensordict())
        # A value that can be read can be written, unless it holds what only a reader takes.
        with suppress(UnsupportedTypeError):
            return decode(part.to_frames())
    return None


def _source(message: Any) -> Callable[[int, int], Any]:
    return lambda offset, size: message[offset : offset + size]


def _fetched(message: Any) -> Any:
    return _whole(_source(message))


def _fetched_chosen(message: Any) -> Any:
    return _chosen(_source(message))


def _peak() -> int:
    # Not getrusage's, which begins with the peak of whoever started this process.
    with open("/proc/self/status", "rb") as file:
        high_water = next(line for line in file if line.startswith(b"VmHWM:"))
    return int(high_water.split()[1]) * 1024


def _check_error(error: WireFormatError) -> None:
    if error.reason not in REASONS or not error.path or not error.detail:
        raise BrokenPromiseError(f"an error that says nothing: {error!r}")
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        if cause in causes:
            raise BrokenPromiseError("an error that causes itself") from error
        causes.append(cause)
        # torch reports that memory ran out as a RuntimeError, which becomes a WireFormatError.
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            raise BrokenPromiseError("memory ran out") from error
        cause = cause.__cause__


def _bytes_of(value: Any, **options: Any) -> list[bytes] | None:
    """The message of a value that was read, or None if it holds what only a reader takes."""
    try:
        return [bytes(memoryview(frame)) for frame in encode(value, **options)]
    except UnsupportedTypeError:
        return None


def _elided(value: Any, *, narrow: bool) -> list[bytes] | None:
    """As `_bytes_of`, and whatever is found to repeat is sent once, whether it pays or not."""
    before = elide_cells.LEAST_SEARCHED, repeats.RUN_COST
    elide_cells.LEAST_SEARCHED, repeats.RUN_COST = 1, -(1 << 20)
    try:
        return _bytes_of(value, elide=True, narrow=narrow)
    finally:
        elide_cells.LEAST_SEARCHED, repeats.RUN_COST = before


def _check_stable(value: Any) -> None:
    """What was read can be written, and what was written reads as the same."""
    first = _bytes_of(value)
    if first is not None and first != _bytes_of(decode(list(map(bytearray, first)))):
        raise BrokenPromiseError("encode(decode(encode(value))) differs from encode(value)")
    for narrow in (False, True):
        elided = None if first is None else _elided(value, narrow=narrow)
        if elided is not None and first != _bytes_of(decode(elided)):
            raise BrokenPromiseError("a value is another once it was sent with elide=True")


def _check_open(message: list[Any], value: TensorDict) -> None:
    """Whoever opens a batch sees what `decode` sees."""
    in_one = isinstance(message, (bytes, bytearray))
    whole = message if in_one else _in_one([*map(bytes, message)])
    for source in (message, _source(whole)):
        if _bytes_of(open_wire(source).to_tensordict()) != _bytes_of(value):
            raise BrokenPromiseError("open_wire and decode read different values")


def main(paths: list[str]) -> int:
    """Replay inputs, each with the frames that it makes: ``python fuzz/target.py INPUT...``."""
    failed = 0
    for path in paths:
        data = Path(path).read_bytes()
        with tempfile.NamedTemporaryFile() as file:
            run = Target(file.name)
            message, reader, _ = run.message(data)
            print(f"{path}: {reader}")
            for frame in [message] if isinstance(message, (bytes, bytearray)) else message:
                print(f"  {bytes(frame)!r}")
            try:
                run(data)
            except Exception:
                failed += 1
                traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
