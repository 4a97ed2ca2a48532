"""Inputs of the fuzzer: a byte that says how the message is read, and its frames.

Each frame comes after four bytes of its length, so that libFuzzer may change anything. Most of the
time `mutated` changes an input instead, with the damage that `tests/wire/` does to messages: what
comes out is put together again, so that its lengths, counts and checksums fit.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jagcodec.wire.registry import register_type
from tests.wire.damage import damaged
from tests.wire.forge import blob
from tests.wire.grown import drawn

__all__ = ["blob", "frames_of", "input_of", "mutated"]

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
