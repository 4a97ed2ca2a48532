"""Bringing device memory to the host, with CPU tensors in the place of a device's.

What needs a device is in `tests/wire/test_cuda.py`.
"""

from contextlib import contextmanager
from unittest import mock

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
from jagcodec.testing import assert_same, bits, jagged_batches, rows_of, tensors, trees


@contextmanager
def elsewhere():
    """Every strided tensor counts as one on a device; gives the sizes of what was fetched."""
    fetched = []
    copied_together = staging.copied_together

    def copied(tensors_):
        fetched.append([tensor.nbytes for tensor in tensors_])
        return copied_together(tensors_)

    with (
        mock.patch.object(staging, "stageable", return_value=True),
        mock.patch.object(staging, "copied_together", copied),
    ):
        yield fetched


def message(frames):
    return [bytes(memoryview(frame)) for frame in frames]


@given(st.lists(tensors(), max_size=4))
def test_what_is_copied_together_is_the_same(originals):
    originals = [tensor for tensor in originals if tensor.numel()]
    copies = staging.copied_together(originals)
    for copy, tensor in zip(copies, originals, strict=True):
        assert_same(copy, tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == copies[0].data_ptr() % 64
        before = bits(tensor)
        copy.view(torch.uint8).fill_(0) if copy.dim() else copy.zero_()
        assert bits(tensor) == before
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) <= 1


@given(trees(), st.booleans())
def test_a_value_elsewhere_is_the_same_message_after_one_fetch(value, narrow):
    expected = message(encode(value, narrow=narrow, checksum=True))
    with elsewhere() as fetched:
        frames = encode(value, narrow=narrow, checksum=True)
    assert message(frames) == expected
    assert len(fetched) <= 1


@given(jagged_batches())
def test_columns_elsewhere_are_the_same_message_after_one_fetch(batch):
    options = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
    expected = message(encode_fields(batch.fields, **options))
    with elsewhere() as fetched:
        frames = encode_fields(batch.fields, **options)
    assert message(frames) == expected
    assert len(fetched) <= 1


def test_columns_of_one_raggedness_bring_their_offsets_once():
    lengths = torch.tensor([2, 3])
    td = pack_jagged_fields({"a": torch.ones(2, 4), "b": torch.ones(2, 8)}, lengths=None)
    td = pack_jagged_fields(dict(td.items()), lengths=lengths, token_aligned_fields=["a", "b"])
    with elsewhere() as fetched:
        encode({"td": td, "again": td["a"]})
    assert fetched == [[20, 24, 20]]


def test_only_rows_leave_the_device():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(1000.0), torch.tensor([0, 500, 1000]), lengths=torch.tensor([2, 3])
    )
    with elsewhere() as fetched:
        frames = encode(TensorDict({"a": holes}, batch_size=[2]))
    assert fetched == [[24, 16]]  # offsets and lengths; the values are compacted where they lie
    assert rows_of(decode(frames)["a"]) == rows_of(holes)


class Fresh:
    """Makes new tensors whenever it is asked for its state."""


register_type(
    Fresh,
    "tests.Fresh",
    to_state=lambda value: [torch.arange(5), torch.ones(2)],
    from_state=lambda state: state,
)


def test_tensors_that_are_made_anew_in_every_walk_are_right():
    with elsewhere():
        frames = encode([Fresh(), torch.zeros(3)])
    assert_same(decode(frames), [[torch.arange(5), torch.ones(2)], torch.zeros(3)])


def test_a_response_is_sliced_after_one_fetch():
    full = stack_or_nest([torch.arange(4.0), torch.arange(10.0, 13.0)])
    mask = stack_or_nest([torch.ones(3), torch.ones(1)])
    with elsewhere() as fetched:
        result = response_from_nested(full, mask)
    assert fetched == [[24, 24]]
    assert result.offsets() is mask.offsets()
    assert rows_of(result) == [bits(torch.arange(3.0)), bits(torch.tensor([11.0]))]
