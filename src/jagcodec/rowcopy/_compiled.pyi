"""A `jagcodec.rowcopy.memory.Kernel`; any buffers will do, and bad ones raise ValueError."""

from jagcodec.buffers import ByteArray, IntArray

def copy(
    dst: ByteArray,
    src: ByteArray,
    dst_starts: IntArray | None,
    src_starts: IntArray | None,
    lengths: IntArray,
    cell_bytes: int,
    threads: int,
    /,
) -> None: ...
def pad(
    dst: ByteArray,
    src: ByteArray,
    starts: IntArray,
    lengths: IntArray,
    leads: IntArray | None,
    width: int,
    cell_bytes: int,
    pattern: bytes,
    threads: int,
    /,
) -> None: ...
