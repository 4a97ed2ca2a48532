"""Bringing device memory to the host: all of a message together, and one wait for it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    decode,
    encode,
    encode_fields,
    pack_jagged_fields,
    register_type,
    response_from_nested,
    stack_or_nest,
)
from jagcodec.memory import staging
from jagcodec.testing import jagged_batches, tensors
from tests.device import DEVICE, on_device, watch, with_tensors
from tests.helpers import message
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import trees

pytestmark = pytest.mark.usefixtures("own_device")


@given(st.lists(tensors(), max_size=4))
def test_what_is_to_host_is_the_same(originals):
    originals = [tensor for tensor in originals if tensor.numel()]
    for sources in (originals, on_device(originals)):
        with watch() as traffic:
            copies = staging.to_host(sources)
        assert traffic.waits == (sources is not originals and bool(sources))
        for copy, tensor in zip(copies, originals, strict=True):
            assert_same(copy, tensor)
            assert copy.is_contiguous()
            assert copy.data_ptr() % 64 == copies[0].data_ptr() % 64
            before = bits(tensor)
            copy.view(torch.uint8).fill_(0) if copy.dim() else copy.zero_()
            assert bits(tensor) == before
        assert len({copy.untyped_storage().data_ptr() for copy in copies}) <= 1


def with_holes(value):
    found = []

    def look(tensor):
        if tensor.layout is torch.jagged and tensor.lengths() is not None:
            found.append(tensor)
        return tensor

    with_tensors(value, look)
    return found


@given(trees(), st.booleans())
def test_a_value_on_a_device_is_the_same_message_after_one_wait(value, narrow):
    expected = message(encode(value, narrow=narrow, checksum=True))
    there = on_device(value)
    with watch() as traffic:
        frames = encode(there, narrow=narrow, checksum=True)
    assert message(frames) == expected
    # Which cells to fetch of a jagged tensor with holes depends on what was fetched before.
    assert traffic.waits <= 1 + len(with_holes(value))


@given(jagged_batches())
def test_columns_on_a_device_are_the_same_message_after_one_wait(batch):
    options = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
    expected = message(encode_fields(batch.fields, **options))
    there = on_device(batch.fields)
    with watch() as traffic:
        frames = encode_fields(there, **options)
    assert message(frames) == expected
    assert traffic.waits <= 1


def test_columns_of_the_same_rows_fetch_their_offsets_once():
    lengths = torch.tensor([2, 3])
    fields = on_device({"a": torch.ones(2, 4), "b": torch.ones(2, 8)})
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=["a", "b"])
    with watch() as traffic:
        encode({"td": td, "again": td["a"]})
    assert sorted(traffic.fetched) == [20, 20, 24]
    assert traffic.waits == 1


def test_only_rows_leave_the_device():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(1000.0), torch.tensor([0, 500, 1000]), lengths=torch.tensor([2, 3])
    )
    there = on_device(TensorDict({"a": holes}, batch_size=[2]))
    with watch() as traffic:
        frames = encode(there)
    assert traffic.fetched == [24, 16, 20]  # offsets, lengths, and of the values only the rows
    assert rows_of(decode(frames)["a"]) == rows_of(holes)


class Fresh:
    """Makes new tensors whenever it is asked for its state."""


register_type(
    Fresh,
    "tests.Fresh",
    to_state=lambda value: on_device([torch.arange(5), torch.ones(2)]),
    from_state=lambda state: state,
)


def test_tensors_that_are_made_anew_whenever_they_are_read():
    frames = encode([Fresh(), torch.zeros(3)])
    assert_same(decode(frames), [[torch.arange(5), torch.ones(2)], torch.zeros(3)])


def test_a_response_is_sliced_after_one_wait():
    full = on_device(stack_or_nest([torch.arange(4.0), torch.arange(10.0, 13.0)]))
    mask = on_device(stack_or_nest([torch.ones(3), torch.ones(1)]))
    with watch() as traffic:
        result = response_from_nested(full, mask)
    assert traffic.fetched == [24, 24]
    assert traffic.waits == 1
    assert result.device == DEVICE
    assert result.offsets() is mask.offsets()  # type: ignore[attr-defined]
    assert rows_of(result) == [bits(torch.arange(3.0)), bits(torch.tensor([11.0]))]
