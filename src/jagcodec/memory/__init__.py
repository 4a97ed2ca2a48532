"""Bytes, and where they come from."""

ALIGNMENT = 64
"""Buffers that share memory start at multiples of this: one cache line."""


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT
