"""Compressing a message: what a caller may choose, and the message around it (see `compressed`)."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jagcodec import cells
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief
from jagcodec.memory.blocks import new_block
from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.wire import documents
from jagcodec.wire.codecs import Codec, codec_of, run_all
from jagcodec.wire.frames import PendingMessage, blob_end, written
from jagcodec.wire.header import with_checksums, write_header
from jagcodec.wire.spec import (
    CODECS,
    FREE_EXPANSION,
    LONG_LIST,
    MAX_BLOCK,
    MAX_EXPANSION,
    Code,
    CodecName,
    Kind,
)


@dataclasses.dataclass(frozen=True)
class Compression:
    """How the frames of a message are compressed, for links that are slower than memory.

    Args:
        codec: ``"zstd"``; or ``"lz4"``, which takes half the time or less, and leaves a quarter
            more. docs/bytes.md says at which speeds of a link each of them pays.
        level: Of zstd from -7 to 22, of lz4 from -64 to 1: lower is faster and larger.
        threshold: Frames of fewer bytes are not compressed.
        block_size: Bytes that are compressed by themselves. A reader of ranges fetches and
            decompresses whole blocks; larger ones are a little smaller in all.
        threads: How many to use at most; 0 for as many as torch does.

    Raises:
        ArgumentError: There is no such codec, or a number is out of its range.
        ArgumentTypeError: An argument has another type.

    Example:
        >>> import torch
        >>> from jagcodec import Compression, decode, encode
        >>> frames = encode(torch.zeros(100_000), compress=Compression("lz4", block_size=1 << 16))
        >>> sum(map(len, frames)) < 10_000, decode(frames).shape
        (True, torch.Size([100000]))
    """

    codec: CodecName = "zstd"
    level: int = 1
    threshold: int = 4096
    block_size: int = 1 << 20
    threads: int = 0

    def __post_init__(self) -> None:
        path = "Compression(codec)"
        if not isinstance(self.codec, str):
            found = type(self.codec).__name__
            raise ArgumentTypeError("bad_type", path, f"expected a name, found {found}")
        if self.codec not in CODECS:
            names = " or ".join(map(repr, CODECS))
            raise ArgumentError("bad_option", path, f"expected {names}, found {brief(self.codec)}")
        lowest, highest = LEVELS[self.codec]
        least = {"level": lowest, "block_size": 1}
        most = {"level": highest, "block_size": MAX_BLOCK}
        for name in ("level", "threshold", "block_size", "threads"):
            value, path = getattr(self, name), f"Compression({name})"
            if type(value) is not int:
                found = type(value).__name__
                raise ArgumentTypeError("bad_type", path, f"expected an integer, found {found}")
            if not least.get(name, 0) <= value <= most.get(name, value):
                end = f" to {most[name]}" if name in most else " or more"
                expected = f"expected {least.get(name, 0)}{end}"
                raise ArgumentError("bad_option", path, f"{expected}, found {brief(value)}")


LEVELS = {"zstd": (-7, 22), "lz4": (-64, 1)}
"""The least and the highest level of each codec."""

Compress: TypeAlias = CodecName | Compression | None
"""What encoders take as `compress`."""


def usable_compression(compress: Any) -> Compression:
    """A caller's choice.

    Raises:
        ArgumentError: There is no such codec.
        ArgumentTypeError: It is neither a name nor a `Compression`.
    """
    if isinstance(compress, Compression):
        return compress
    if isinstance(compress, str):
        return Compression(compress)  # type: ignore[arg-type]  # it looks at the name
    names = " or ".join(map(repr, CODECS))
    found = type(compress).__name__
    raise ArgumentTypeError(
        "bad_type", "compress", f"expected {names}, a Compression or None, found {found}"
    )


def compressed(message: PendingMessage, how: Compression, checksum: bool) -> PendingMessage:
    """A message that has no checksums, compressed; as it is where that makes it no smaller.

    Raises:
        ArgumentError: The library that compresses it is not installed.
    """
    codec = codec_of(how.codec)
    frames = written(message.buffers, message.write)
    pieces = _within_bounds(_blocks(frames, how, codec), frames, how, len(message.header))
    sent = [_joined(frame, blocks) for frame, blocks in zip(frames, pieces, strict=True)]
    ends = [end for blocks in pieces for end in np.cumsum([*map(len, blocks)]).tolist()]
    header = _header(message.header, how, ends, list(map(len, sent)))
    if not _is_smaller([header, *sent], [message.header, *frames]):
        header, sent = message.header, frames
    if checksum:
        header = with_checksums(header, [zlib.crc32(frame.data) for frame in sent])
    return PendingMessage(header, [*sent], lambda memory: None, list)


def _is_smaller(frames: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether a message is worth sending in the place of another, as frames and as a blob."""
    size, other = (sum(map(len, one)) for one in (frames, others))
    ends = [blob_end(len(one[0]), [*map(len, one[1:])]) for one in (frames, others)]
    # A header may become a few bytes longer when checksums come into it.
    return size + 64 < other and ends[0] <= ends[1]


def _header(inner: bytes, how: Compression, ends: list[int], sizes: list[int]) -> bytes:
    packed = cells.pack(ends) if len(ends) >= LONG_LIST else None
    of_ends = ends if packed is None else [documents.TAGS[Kind.NUMBERS], *packed]
    values: bytes = documents.packer().pack([inner, of_ends])
    tree = (Code.COMPRESSED, how.codec, None, None)
    return write_header(tree, [how.block_size], values, [], sizes, None)


def _blocks(frames: list[ByteArray], how: Compression, codec: Codec) -> list[list[Any]]:
    """What is sent of each block of each frame: the block itself where that is no more."""
    pieces: list[list[Any]] = []
    tasks: list[tuple[int, int]] = []
    step = how.block_size
    for i, frame in enumerate(frames):
        pieces.append([frame[at : at + step] for at in range(0, len(frame), step)])
        if len(frame) >= how.threshold:
            tasks += ((i, block) for block in range(len(pieces[i])))

    def work() -> Any:
        compress = codec.compressor(how.level)

        def one(task: tuple[int, int]) -> None:
            i, block = task
            small = compress(pieces[i][block])
            if len(small) < len(pieces[i][block]):
                pieces[i][block] = small

        return one

    run_all(work, tasks, sum(map(len, frames)), how.threads)
    return pieces


def _within_bounds(
    pieces: list[list[Any]], frames: list[ByteArray], how: Compression, header: int
) -> list[list[Any]]:
    """The same with blocks as they are, as many as it takes for the message not to be a bomb."""
    sent = header + sum(len(piece) for blocks in pieces for piece in blocks)
    missing = -(-(sum(map(len, frames)) - FREE_EXPANSION) // MAX_EXPANSION) - sent
    for frame, blocks in zip(frames, pieces, strict=True):
        for i, piece in enumerate(blocks):
            if missing <= 0:
                return pieces
            whole = frame[i * how.block_size : (i + 1) * how.block_size]
            missing -= len(whole) - len(piece)
            blocks[i] = whole
    return pieces


def _joined(frame: ByteArray, blocks: list[Any]) -> ByteArray:
    """Blocks end to end; the frame itself, where none of them is compressed."""
    size = sum(map(len, blocks))
    if size == len(frame):
        return frame
    memory = new_block(size).data
    end = 0
    for block in blocks:
        memory[end : end + len(block)] = np.frombuffer(block, dtype=np.uint8)
        end += len(block)
    return memory
