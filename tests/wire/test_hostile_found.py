"""Faults that the fuzzer or a search by hand found in the readers, one test for each."""

import struct

import msgpack
import pytest

from jagcodec import WireFormatError, decode
from jagcodec.wire.spec import Kind


def message(schema, numbers=(), values=(), groups=(), payload=()):
    """The frames of a message; `schema` is packed already, or a tree for msgpack."""
    words = [*numbers, len(groups), len(payload), *(n for group in groups for n in group)]
    words += map(len, payload)
    packed = schema if isinstance(schema, bytes) else msgpack.packb(schema)
    fields = {
        "jagcodec": 1,
        "schema": msgpack.ExtType(Kind.SCHEMA, packed),
        "numbers": struct.pack(f"<{len(words)}q", *words),
        "values": msgpack.packb(list(values)),
    }
    return [msgpack.packb(fields), *payload]


def refused(frames, reason):
    with pytest.raises(WireFormatError) as caught:
        decode(frames)
    assert caught.value.reason == reason
    return caught.value


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        # A tensor without bytes, in the schema's root: the path has no step.
        (message([Kind.TENSOR, "int64", 1], [0, 0, 0, 3]), "out_of_bounds"),
        # A child that its path has no step for.
        (message([Kind.USER, "x", [99]]), "unknown_kind"),
        (message([Kind.NON_TENSOR_DATA, 1, [Kind.BYTES]], [1, 0, 0, 9]), "out_of_bounds"),
    ],
)
def test_no_error_is_its_own_cause(frames, reason):
    error = refused(frames, reason)
    seen = []
    while error is not None:
        assert error not in seen
        seen.append(error)
        error = error.__cause__
