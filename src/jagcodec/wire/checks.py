"""Checks of single values of a message, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jagcodec.errors import Reason, WireFormatError, brief, child_path
from jagcodec.memory import INT64_MAX, extent_of
from jagcodec.wire.spec import FEW_KEYS, MAX_BYTES, MAX_EQUAL_HASHES, MOST_PROBES


def bad(expected: str, found: Any) -> WireFormatError:
    """The error for parts of a message that do not fit together."""
    # Cut what was found: the text may be one of torch's dispatch tables, or a stranger's.
    return WireFormatError("bad_value", "$", f"expected {expected}, found {found!s:.200}")


def fail(reason: Reason, detail: str, *, path: str = "$") -> WireFormatError:
    """The error for a message that is bad at a place, which is the root by default."""
    return WireFormatError(reason, path, detail)


def inside(error: WireFormatError, step: Any) -> WireFormatError:
    """A copy of an error with a step in front of its path: a key, an index, or None for no step."""
    if step is None:
        # Make a new error here, too: the caller raises it from `error`, which cannot cause itself.
        return WireFormatError(error.reason, error.path, error.detail)
    path = f"$[{step}]" if type(step) is int else child_path("$", step)
    if error.path.startswith("$"):
        path += error.path[1:]
    else:  # the path names a part of a message that is in a row
        path += f" ({error.path})"
    return WireFormatError(error.reason, path, error.detail)


def in_message(error: WireFormatError, index: int) -> WireFormatError:
    """A copy of an error with the number of its message in front of the path."""
    return WireFormatError(error.reason, f"message {index}: {error.path}", error.detail)


def expect(ok: bool, reason: Reason, expected: str, found: Any, path: str = "$") -> None:
    """Raise the error for a bad message unless `ok`."""
    if not ok:
        raise fail(reason, f"expected {expected}, found {brief(found)}", path=path)


def is_oversized_empty(dims: Sequence[int], itemsize: int) -> bool:
    """Whether dims have a 0, and others so large that every reader rejects them."""
    # Strides are products of these dims, and joins add the dims up: neither may overflow.
    return 0 in dims and extent_of(dims) * itemsize >= MAX_BYTES


def elements_of(shape: Sequence[int], itemsize: int) -> int:
    """The number of elements of a shape, which is checked.

    `itemsize` is 0 if the elements are not stored.
    """
    for dim in shape:
        expect(dim >= 0, "bad_record", "a dim of 0 or more", dim)
    extent = extent_of(shape)
    expect(extent <= INT64_MAX, "bad_record", "fewer than 2**63 cells", shape)
    fits = not is_oversized_empty(shape, itemsize)
    expect(fits, "bad_record", f"dims next to 0 of fewer than {MAX_BYTES} bytes", shape)
    return 0 if 0 in shape else extent  # the caller compares this with the payload


def check_distinct(keys: Sequence[Any], what: str, run: int = 1) -> None:
    """Refuse keys that collide in the table that Python makes of them: a stranger chose them.

    `run` is how many neighbouring places Python tries before it jumps: 1 in a dict, 10 in a set.
    """
    try:
        hashes = list(map(hash, keys))
    except TypeError as error:
        raise fail("bad_value", f"expected hashable {what}, found {error!s:.200}") from error
    step = MAX_EQUAL_HASHES
    ordered = sorted(hashes)
    if any(a == b for a, b in zip(ordered, ordered[step:], strict=False)):
        raise fail("bad_value", f"expected {what} of distinct hashes, found over {step} equal ones")
    # Python doubles a table when two thirds of it are in use. Check the table of each size with the
    # keys that it holds then.
    size = FEW_KEYS
    while len(hashes) > FEW_KEYS:
        first = hashes[: size * 2 // 3 + 1]
        if not _spread(first, size - 1, run):
            raise fail("bad_value", f"expected {what} that do not collide, found ones that do")
        if len(first) == len(hashes):
            return
        size *= 2


def _spread(hashes: Sequence[int], mask: int, run: int) -> bool:
    """Whether keys with these hashes need few steps each in a table of ``mask + 1`` places."""
    # Take the steps that CPython takes (Objects/dictobject.c and setobject.c, 3.11 to 3.14), unless
    # nearly all keys find their first place free, as they do most often.
    if len(hashes) - len({value & mask for value in hashes}) <= MOST_PROBES:
        return True
    taken = bytearray(mask + 1)
    steps = MOST_PROBES * len(hashes)
    for value in hashes:
        place, steps = _free_place(taken, value, run, steps)
        if place < 0:
            return False
        taken[place] = 1
    return True


def _free_place(taken: bytearray, value: int, run: int, steps: int) -> tuple[int, int]:
    """The first free place for a hash, or -1 after `steps` steps; and the steps left."""
    mask = len(taken) - 1
    place = value & mask
    perturb = value & _UINT64
    while taken[place]:
        if run > 1 and place + run <= mask + 1:
            found = taken.find(0, place, place + run)
            steps -= 1  # trying a run of neighbours takes about as long as one step
            if found >= 0:
                return found, steps
        perturb >>= 5
        place = (5 * place + 1 + perturb) & mask
        steps -= 1
        if steps < 0:
            return -1, steps
    return place, steps


_UINT64 = (1 << 64) - 1
