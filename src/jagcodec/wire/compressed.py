"""Compressed messages: a message around a message, block by block, and how it is opened.

The header of the outer one holds that of the inner one, and where every block of the inner frames
ends in the outer ones. So a reader knows all sizes before there is memory for anything, and reads a
range by the blocks that hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.blocks import new_block
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.wire.checks import fail
from jagcodec.wire.codecs import codec_of, inflated, run_all
from jagcodec.wire.frames import Fetch, FramePayload, Payload, RangePayload, copied
from jagcodec.wire.header import Header, read_header
from jagcodec.wire.records import revived
from jagcodec.wire.spec import FREE_EXPANSION, MAX_BLOCK, MAX_EXPANSION, Kind


def opened(
    header: Header, frames: Sequence[Any], copy: bool | None, *, by_range: bool = False
) -> tuple[Header, FramePayload]:
    """The header and the buffers of a message in memory: of the one inside, if it is compressed.

    With `by_range` a frame is decompressed when something in it is asked for first; otherwise all
    of them are at once. `frames` are those behind the header, of the sizes that it names.

    Raises:
        WireFormatError: What is inside is no message.
        ArgumentError: The library that decompresses it is not installed.
    """
    if header.schema.root.kind is not Kind.COMPRESSED:
        return header, FramePayload(frames, copy, by_range=by_range)
    inner, blocks = _inside(header)
    payload = InflatedPayload(_Frames(blocks, frames), copy, by_range=by_range)
    if not by_range:
        payload.inflate()
    return inner, payload


def opened_frames(header: Header, frames: Sequence[ByteArray]) -> tuple[Header, list[ByteArray]]:
    """As `opened`, the buffers as arrays."""
    if header.schema.root.kind is not Kind.COMPRESSED:
        return header, list(frames)
    inner, blocks = _inside(header)
    inside = _Frames(blocks, frames)
    inside.inflate(range(len(inside)))
    return inner, list(inside)


def opened_ranges(header: Header, fetch: Fetch, copy: bool | None) -> tuple[Header, Payload]:
    """As `opened`, of a message whose buffers are fetched: only blocks that are wanted are."""
    if header.schema.root.kind is not Kind.COMPRESSED:
        return header, RangePayload(fetch, copy)
    inner, blocks = _inside(header)
    return inner, RangePayload(_Ranges(blocks, fetch), copy)


# --- what the header says ----------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Where the blocks of the inner frames lie.

    Attributes:
        codec: The name of what they are compressed with.
        block_size: Bytes of each but the last of a frame.
        sizes: Bytes of the inner frames.
        ends: (blocks,) of each frame: where they end in the outer one.
    """

    codec: str
    block_size: int
    sizes: list[int]
    ends: list[IntArray]

    def starts(self, frame: int) -> IntArray:
        """(blocks,) where the blocks of a frame begin in the outer one."""
        ends = self.ends[frame]
        starts = np.zeros_like(ends)
        starts[1:] = ends[:-1]
        return starts

    def start(self, frame: int, block: int) -> int:
        """Where a block begins in the outer frame."""
        return int(self.ends[frame][block - 1]) if block else 0

    def size(self, frame: int, block: int) -> int:
        """Bytes of a block."""
        return min(self.block_size, self.sizes[frame] - block * self.block_size)


def _inside(header: Header) -> tuple[Header, _Blocks]:
    """The header of the inner message, and where its blocks lie; all of it checked."""
    root = header.schema.root
    block_size = header.numbers[root.number]
    if not 1 <= block_size <= MAX_BLOCK:
        raise fail("bad_record", f"expected blocks of 1 to {MAX_BLOCK} bytes, found {block_size}")
    if header.groups:
        raise fail("bad_record", f"expected no ragged groups around it, found {len(header.groups)}")
    if len(header.values) != 2 or type(header.values[0]) is not bytes:
        found = brief(header.values)
        raise fail("bad_record", f"expected a header and the ends of blocks, found {found}")
    packed: bytes = header.values[0]
    try:
        inner = read_header(packed, header.limits)
        if inner.schema.root.kind is Kind.COMPRESSED:
            raise fail("bad_record", "expected a message that is not compressed, found one that is")
        plain = inner.schema.numbers + 2 + 5 * len(inner.groups) + len(inner.sizes)
        if len(inner.numbers) > plain:
            raise fail(
                "bad_header", "expected checksums around the message alone, found some in it"
            )
    except WireFormatError as error:
        path = f"compressed message, {error.path}"
        raise WireFormatError(error.reason, path, error.detail) from error
    total, most = sum(inner.sizes), MAX_EXPANSION * (len(packed) + sum(header.sizes))
    if total > most + FREE_EXPANSION:
        raise fail(
            "out_of_bounds",
            f"expected at most {MAX_EXPANSION} bytes for each that was sent, and a MiB, found "
            f"{total} for {most // MAX_EXPANSION}",
        )
    ends = revived(header.values[1], 1, header.limits.depth, False)
    return inner, _blocks(header, inner, block_size, ends)


def _blocks(header: Header, inner: Header, block_size: int, ends: Any) -> _Blocks:
    if type(ends) is not list or not all(type(end) is int for end in ends):
        raise fail("bad_record", f"expected the ends of blocks, found {brief(ends)}")
    if len(inner.sizes) != len(header.sizes):
        raise fail(
            "frame_count",
            f"expected as many frames as are in it, {len(inner.sizes)}, found {len(header.sizes)}",
        )
    counts = [-(-size // block_size) for size in inner.sizes]
    if len(ends) != sum(counts):
        raise fail("bad_offsets", f"expected the ends of {sum(counts)} blocks, found {len(ends)}")
    if ends and not 0 <= min(ends) <= max(ends) <= max(header.sizes):
        raise fail("bad_offsets", "expected ends of blocks within their frames, found others")
    table = np.array(ends, dtype=np.int64)
    parts = np.split(table, np.cumsum(counts)[:-1]) if counts else []
    blocks = _Blocks(header.schema.root.fields[0], block_size, inner.sizes, parts)
    for i, (stored, outer) in enumerate(zip(parts, header.sizes, strict=True)):
        # No block is empty, or larger than it is when it is stored as it is.
        found = stored - blocks.starts(i)
        last = int(stored[-1]) if len(stored) else 0
        whole = len(stored) == 0 or (
            0 < found.min() <= found.max() <= block_size
            and found[-1] <= blocks.size(i, len(found) - 1)
        )
        if last != outer or not whole:
            raise fail(
                "bad_offsets",
                f"expected blocks of 1 byte to their own size that end at {outer}, found others",
                path=f"frame {i + 1}",
            )
    return blocks


# --- in memory ---------------------------------------------------------------------------------


class _Frames(Sequence[Any]):
    """The inner frames, each decompressed when it is asked for first.

    A frame of which no block is compressed is the outer one, and as writable as that is.
    """

    def __init__(self, blocks: _Blocks, outer: Sequence[Any]) -> None:
        self._blocks = blocks
        self._codec = codec_of(blocks.codec)
        self._outer = outer
        self._found: list[ByteArray | None] = [None] * len(outer)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._outer)

    def __getitem__(self, index: Any) -> Any:
        frame = self._found[index]
        if frame is None:
            with self._lock:  # so that no other thread does the same
                if self._found[index] is None:
                    self.inflate([index])
            frame = self._found[index]
        return frame

    def is_new(self, index: int) -> bool:
        """Whether a frame is memory of its own, of which nobody else knows."""
        return self._found[index] is not None and self._found[index] is not self._outer[index]

    def inflate(self, indices: Sequence[int]) -> None:
        """Decompress frames, the blocks of all of them together."""
        blocks, made = self._blocks, []
        tasks: list[tuple[int, ByteArray, ByteArray]] = []
        for i in indices:
            outer, size = self._outer[i], blocks.sizes[i]
            if type(outer) is not np.ndarray:
                raise fail("bad_value", "expected bytes on the host, found a frame on a device")
            if len(outer) == size:  # then each of its blocks is as large as it is by itself
                made.append(outer)
                continue
            frame = new_block(size).data
            made.append(frame)
            tasks += ((i, data, target) for data, target in _pieces(blocks, i, outer, frame))
        codec = self._codec

        def work() -> Any:
            decompress = codec.decompressor()

            def one(task: tuple[int, ByteArray, ByteArray]) -> None:
                i, data, target = task
                if len(data) < len(target):
                    path = f"frame {i + 1}"
                    block = inflated(decompress, codec, data, len(target), path)
                    data = np.frombuffer(block, dtype=np.uint8)
                target[:] = data

            return one

        run_all(work, tasks, sum(len(target) for *_, target in tasks), 0)
        for i, frame in zip(indices, made, strict=True):
            self._found[i] = frame


def _pieces(
    blocks: _Blocks, frame: int, data: ByteArray, target: ByteArray
) -> list[tuple[ByteArray, ByteArray]]:
    """A frame in pieces, each with where it goes: compressed blocks, and runs of stored ones."""
    ends, starts = blocks.ends[frame], blocks.starts(frame)
    own = np.full(len(ends), blocks.block_size)
    own[-1] = blocks.size(frame, len(ends) - 1)
    compressed = np.flatnonzero(ends - starts < own).tolist()
    pieces = []
    done, read = 0, 0  # bytes of the frame, and of what was sent of it
    for block in compressed:
        begin, start, end = block * blocks.block_size, int(starts[block]), int(ends[block])
        if done < begin:
            pieces.append((data[read:start], target[done:begin]))
        done, read = begin + int(own[block]), end
        pieces.append((data[start:end], target[begin:done]))
    if done < len(target):
        pieces.append((data[read:], target[done:]))
    return pieces


class InflatedPayload(FramePayload):
    """The inner frames of a compressed message in memory."""

    def __init__(self, frames: _Frames, copy: bool | None, *, by_range: bool) -> None:
        super().__init__(frames, copy, by_range=by_range)
        self._inner = frames

    @property
    def frames(self) -> None:
        """None: to look at all of them would be to decompress them."""
        return

    def inflate(self) -> None:
        """Decompress all frames now. What is new memory belongs to whoever asks for it."""
        self._inner.inflate(range(len(self._inner)))
        for i, frame in enumerate(self._inner):
            if self._inner.is_new(i):
                self._owned[i] = frame, frame.__array_interface__["data"][0]


# --- by ranges ---------------------------------------------------------------------------------


class _Ranges:
    """Fetches ranges of the inner frames by the blocks that hold them.

    The last block of each frame that was fetched is kept, in which the next range often begins.
    """

    def __init__(self, blocks: _Blocks, fetch: Fetch) -> None:
        self._blocks = blocks
        self._codec = codec_of(blocks.codec)
        self._fetch = fetch
        self._last: dict[int, tuple[int, ByteArray]] = {}

    def __call__(self, buffer: int, offset: int, size: int) -> ByteArray:
        """`size` bytes at `offset` of an inner frame, which has them."""
        block_size = self._blocks.block_size
        first, last = offset // block_size, (offset + size - 1) // block_size
        known, kept = self._last.get(buffer, (-1, _NOTHING))
        begin = offset - first * block_size
        if known != first:
            return self._blocks_of(buffer, first, last)[begin : begin + size]
        if first == last:
            return kept[begin : begin + size]
        rest = self._blocks_of(buffer, first + 1, last)
        return np.concatenate([kept[begin:], rest[: size - len(kept) + begin]])

    def _blocks_of(self, buffer: int, first: int, last: int) -> ByteArray:
        """Blocks from `first` to `last`, end to end."""
        blocks, codec = self._blocks, self._codec
        ends = blocks.ends[buffer]
        at = blocks.start(buffer, first)
        data = self._fetch(buffer, at, int(ends[last]) - at)
        memory = new_block((last - first) * blocks.block_size + blocks.size(buffer, last)).data
        tasks = [
            (
                data[blocks.start(buffer, i) - at : int(ends[i]) - at],
                (i - first) * blocks.block_size,
                i,
            )
            for i in range(first, last + 1)
        ]

        def work() -> Any:
            decompress = codec.decompressor()

            def one(task: tuple[ByteArray, int, int]) -> None:
                piece, begin, block = task
                size = blocks.size(buffer, block)
                if len(piece) < size:
                    path = f"frame {buffer + 1}"
                    whole = inflated(decompress, codec, piece, size, path)
                    piece = np.frombuffer(whole, dtype=np.uint8)
                memory[begin : begin + size] = piece

            return one

        run_all(work, tasks, len(memory), 0)
        kept = copied(memory[-blocks.size(buffer, last) :])
        kept.flags.writeable = False  # it is handed out again
        self._last[buffer] = last, kept
        return memory


_NOTHING: ByteArray = np.empty(0, dtype=np.uint8)
