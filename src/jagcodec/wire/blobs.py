"""`to_blob`, `dump`, `load`: messages in one buffer or file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from jagcodec._arguments import require_flag
from jagcodec._compiling import untraced
from jagcodec._dependencies import module_with_torch
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.buffers import Buffer, StrPath
from jagcodec.wire.files import file_path, noted_file, read_file, write_file
from jagcodec.wire.frames import begins_message, blob_pieces, frame_arrays, is_blob
from jagcodec.wire.limits import Limits
from jagcodec.wire.write.encoder import EncodeOptions, encode

if TYPE_CHECKING:
    import torch


@untraced
def to_blob(frames: Sequence[Buffer]) -> bytearray:
    """The frames of a message in one new buffer, which `decode` and `open_wire` accept too.

    Args:
        frames: As `encode` returns them, or as they were received.

    Raises:
        ArgumentTypeError: `frames` is not a list of frames, but for example a plain value.
        ArgumentError: It is a blob already.
        WireFormatError: There is no frame, or one of them is not a buffer.

    Example:
        >>> from jagcodec import decode, encode, to_blob
        >>> decode(to_blob(encode({"a": 1})))
        {'a': 1}
    """
    where = "to_blob(frames)"
    arrays = frame_arrays(frames, where)
    if len(arrays) == 1 and is_blob(arrays[0]):
        raise ArgumentError("bad_option", where, "expected frames, found a blob")
    return bytearray().join(blob_pieces(arrays))


@untraced
def dump(obj: Any, path: StrPath, **options: Unpack[EncodeOptions]) -> None:
    """Write a value to a file, whole or not at all: a crash leaves the old file, or none.

    Args:
        obj: Anything that `encode` accepts.
        path: The file; its directory must exist and hold a second copy for a moment. An old file
            is replaced and its permissions are kept; a new one has those of the umask. On return
            it is on the disk, and so is its name where directories can be synchronised.
        options: Those of `encode`: `narrow`, `elide`, `checksum` and so on.

    Raises:
        UnsupportedTypeError: As `encode`.
        OSError: The file system failed; an old file is still there.
        ArgumentError: `path` is not that of a regular file, or has a NUL in it.
        ArgumentTypeError: It is not a path; or `obj` is the frames of a message.

    Example:
        >>> import tempfile
        >>> from jagcodec import dump, load
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     dump({"step": 3}, f"{directory}/batch.jag")
        ...     load(f"{directory}/batch.jag")
        {'step': 3}
    """
    refuse_frames(obj, "dump(obj)")
    name = file_path(path, "dump(path)", "the value comes first: dump(obj, path)")
    write_file(name, encode(obj, **options), "dump(path)")


def refuse_frames(obj: Any, where: str) -> None:
    """Refuse the frames of a message where a value is expected."""
    first = obj[0] if isinstance(obj, (list, tuple)) and obj else None
    if isinstance(first, (bytes, bytearray)) and begins_message(first):
        detail = (
            "expected a value, found the frames of a message; "
            "pass open_wire(frames), or write to_blob(frames)"
        )
        raise ArgumentTypeError("bad_type", where, detail)


@untraced
def load(
    path: StrPath,
    *,
    mmap: bool = False,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> Any:
    """The value that `dump` wrote.

    Args:
        path: A regular file; nothing is waited for.
        mmap: Map the file instead of reading it: pages are read on first use. The mapping is
            private: a write to a tensor stays in this process. The file must not be shortened
            while the value lives. `open_wire` reads parts of such a file.
        device: As for `decode`.
        allow_pickle: As for `decode`.
        limits: As for `decode`. A larger file is not read.

    Raises:
        WireFormatError: The file holds no whole message, or more than one (reason
            ``"frame_count"``), or was shortened while it was read.
        OSError: It cannot be read.
        ArgumentError: It is not a regular file, or its path has a NUL in it; or there is no such
            device.
        ArgumentTypeError: It is not a path (but for example a file descriptor, or a message).

    Example: see `dump`.
    """
    mmap = require_flag(mmap, "load(mmap)")
    usable_reading = module_with_torch("wire.read.opening", "load").usable_reading
    decode = module_with_torch("wire.read.decoder", "load").decode
    how = usable_reading("load", limits, None, device, allow_pickle)
    name = file_path(path, "load(path)", "decode accepts a message in memory")
    with noted_file(name):
        data = read_file(name, "load(path)", how.limits, mmap=mmap)
        return decode(data, device=how.device, allow_pickle=allow_pickle, limits=how.limits)
