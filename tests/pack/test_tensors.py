"""The layout functions against the list-of-rows model, errors included."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagcodec
from jagcodec import (
    maybe_pack_jagged,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
)
from jagcodec.testing import tensors
from tests.oracle import assert_same, bits, pad_rows, rows_of
from tests.strategies import lengths_in


@st.composite
def rectangles(draw):
    """(padded, lengths): any strides and dtype, S wider than the longest row now and then."""
    rows, width = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    trailing = draw(st.lists(st.integers(0, 3), max_size=2))
    return draw(tensors((rows, width, *trailing))), draw(lengths_in(width, rows))


def bounds(jagged):
    return jagged._min_seqlen, jagged._max_seqlen


@given(rectangles(), st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_rows_survive_packing(rectangle, dtype):
    padded, lengths = rectangle
    before = bits(padded)
    nested = to_nested_by_length(padded, torch.tensor(lengths, dtype=dtype))
    assert nested.layout is torch.jagged
    assert nested.dtype == padded.dtype
    assert rows_of(nested) == rows_of(padded, lengths)
    assert tuple(nested.values().shape) == (sum(lengths), *padded.shape[2:])
    assert nested.offsets().dtype == torch.int64  # type: ignore[attr-defined]
    assert bounds(nested) == (min(lengths, default=0), max(lengths, default=0))
    assert bits(padded) == before


@given(rectangles())
def test_packed_rows_own_their_memory(rectangle):
    padded, lengths = rectangle
    nested = to_nested_by_length(padded, torch.tensor(lengths, dtype=torch.int64))
    if nested.values().numel():
        assert nested.values().untyped_storage().data_ptr() != padded.untyped_storage().data_ptr()


@given(rectangles())
def test_per_token_fields_pack_whatever_their_padding(rectangle):
    padded, lengths = rectangle
    nested = pack_per_token_field(padded, torch.tensor(lengths, dtype=torch.int64))
    assert rows_of(nested) == rows_of(padded, lengths)


@given(rectangles())
def test_maybe_packs_exactly_the_width_of_the_longest_row(rectangle):
    padded, lengths = rectangle
    result = maybe_pack_jagged(padded, torch.tensor(lengths, dtype=torch.int64))
    if padded.shape[1] == max(lengths, default=0):
        assert rows_of(result) == rows_of(padded, lengths)
    else:
        assert_same(result, padded)
        assert result.is_contiguous()


@pytest.mark.parametrize("shape", [(3, 5), (4,), (), (4, 2)])
def test_per_token_fields_that_do_not_fit_stay_rectangular(shape):
    val = torch.ones(shape, requires_grad=True)
    result = pack_per_token_field(val, torch.tensor([1, 3, 2, 0]))
    assert_same(result, val)
    assert not result.requires_grad


def test_rectangles_that_stay_are_not_copied():
    val = torch.ones(4, 9)
    assert maybe_pack_jagged(val, torch.tensor([1, 2, 3, 4])).data_ptr() == val.data_ptr()


def test_gradients_flow_through_the_layout_but_stop_at_the_wire_helpers():
    padded = torch.ones(2, 3, requires_grad=True)
    lengths = torch.tensor([1, 3])
    (2 * to_nested_by_length(padded, lengths).values()).sum().backward()
    assert padded.grad.tolist() == [[2, 0, 0], [2, 2, 2]]
    assert not pack_per_token_field(padded, lengths).requires_grad


@given(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=2), st.booleans(), st.data())
def test_stack_or_nest_matches_its_rows(rows, trailing, always_nest, data):
    lengths = data.draw(lengths_in(4, rows))
    outer = data.draw(st.lists(st.integers(1, 2), max_size=1))
    tensors_ = [data.draw(tensors((*outer, n, *trailing), torch.int32)) for n in lengths]
    result = stack_or_nest(tensors_, always_nest=always_nest)
    if not rows:
        assert_same(result, torch.empty(0))
    elif len(set(lengths)) > 1 or always_nest:
        assert result.layout is torch.jagged
        assert [bits(row) for row in result.unbind()] == [bits(t) for t in tensors_]
        assert bounds(result) != (None, None)
    else:
        assert_same(result, torch.stack(tensors_))


@given(st.data())
def test_responses_are_shifted_left_by_one(data):
    prompts = data.draw(st.lists(st.integers(1, 4), max_size=5))
    responses = data.draw(lengths_in(4, len(prompts)))
    trailing = data.draw(st.lists(st.integers(0, 2), max_size=1))
    rows = [
        data.draw(tensors((p + r, *trailing), torch.float32))
        for p, r in zip(prompts, responses, strict=True)
    ]
    if not rows:
        return
    full = stack_or_nest(rows, always_nest=True)
    mask = stack_or_nest([torch.ones(r) for r in responses], always_nest=True)
    result = response_from_nested(full, mask)
    expected = [
        bits(row)[p - 1 : p + r - 1] for row, p, r in zip(rows, prompts, responses, strict=True)
    ]
    assert rows_of(result) == expected
    if not trailing:
        assert (result * mask).shape[0] == len(rows)


def test_a_response_carries_gradients():
    full = to_nested_by_length(torch.ones(1, 4, requires_grad=True), torch.tensor([4]))
    assert response_from_nested(
        full, stack_or_nest([torch.ones(2)], always_nest=True)
    ).requires_grad


def test_an_empty_row_with_an_empty_response_is_fine():
    full = stack_or_nest([torch.arange(3.0), torch.arange(0.0)])
    mask = stack_or_nest([torch.ones(1), torch.ones(0)])
    assert rows_of(response_from_nested(full, mask)) == [bits(torch.tensor([1.0])), []]


def nest(*lengths):
    return stack_or_nest([torch.ones(n) for n in lengths], always_nest=True)


@pytest.mark.parametrize(
    ("full", "mask", "reason", "text"),
    [
        (nest(3, 2), nest(1, 2), "empty_prompt", "row 1"),
        (nest(3, 2), nest(1, 5), "bad_length", "row 1"),
        (nest(3, 2), nest(1), "row_mismatch", "expected 2 rows"),
        (torch.ones(2, 3), nest(1, 1), "bad_type", "to_nested_by_length"),
        (nest(2, 2), torch.ones(2, 1), "bad_type", "response_mask"),
    ],
)
def test_responses_that_cannot_be_sliced(full, mask, reason, text):
    with pytest.raises((ValueError, TypeError), match=text) as caught:
        response_from_nested(full, mask)
    assert caught.value.reason == reason  # type: ignore[attr-defined]


@given(rectangles(), st.sampled_from([torch.int64, torch.int32]), st.data())
def test_padded_responses_become_the_rows_of_their_mask(rectangle, width, data):
    padded, lengths = rectangle
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=width)
    holes = None
    if lengths and data.draw(st.booleans()):
        lengths = [data.draw(st.integers(0, n)) for n in lengths]
        holes = torch.tensor(lengths, dtype=width)
    mask = torch.nested.nested_tensor_from_jagged(
        torch.ones(int(offsets[-1])), offsets, lengths=holes
    )
    before = bits(padded)
    result = to_nested_by_length(padded, mask)
    assert rows_of(result) == rows_of(padded, lengths)
    assert result.dtype == padded.dtype
    assert bounds(result) == (min(lengths, default=0), max(lengths, default=0))
    assert bits(padded) == before
    if holes is None:
        assert result.offsets() is mask.offsets()  # type: ignore[attr-defined]


@given(st.data())
def test_responses_padded_and_packed_again_are_themselves(data):
    prompts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    responses = data.draw(lengths_in(4, len(prompts)))
    rows = [torch.rand(p + r) for p, r in zip(prompts, responses, strict=True)]
    mask = stack_or_nest([torch.ones(r) for r in responses], always_nest=True)
    sliced = response_from_nested(stack_or_nest(rows, always_nest=True), mask)
    wide = max(responses) + data.draw(st.integers(0, 2))
    again = to_nested_by_length(torch.tensor(pad_rows(rows_of(sliced), wide, 7)), mask)
    assert rows_of(again) == rows_of(sliced)
    assert rows_of(again * mask.int()) == rows_of(sliced)


def test_gradients_flow_back_to_padded_responses():
    padded = torch.ones(2, 3, requires_grad=True)
    mask = nest(3, 1)
    (to_nested_by_length(padded, mask) * mask).values().sum().backward()
    assert padded.grad.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("padded", "mask", "reason", "text"),
    [
        (torch.ones(2, 3), nest(3, 4), "bad_length", "row 1.*at most 3.*found 4"),
        (torch.ones(3, 3), nest(1, 2), "row_mismatch", "expected 3 rows, found 2"),
        (torch.ones(2), nest(1, 2), "bad_shape", r"\(N, S, \.\.\.\)"),
        (nest(1, 2), nest(1, 2), "bad_type", "padded"),
        (
            torch.ones(2, 3),
            stack_or_nest([torch.ones(2, 1), torch.ones(2, 2)]),
            "bad_shape",
            "expected ragged dim 1, found 2",
        ),
    ],
)
def test_padded_responses_that_do_not_fit_their_mask(padded, mask, reason, text):
    with pytest.raises((ValueError, TypeError), match=text) as caught:
        to_nested_by_length(padded, mask)
    assert caught.value.reason == reason  # type: ignore[attr-defined]
    assert caught.value.path.startswith("to_nested_by_length(")  # type: ignore[attr-defined]


PADDED = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("padded", "lengths", "error", "text"),
    [
        (torch.zeros(3), [1, 1, 1], ValueError, r"expects \(N, S, \.\.\.\)"),
        (PADDED, [1, 1], ValueError, r"lengths shape \(2,\) != \(3,\)"),
        (PADDED, [[1, 1, 1]], ValueError, r"lengths shape \(1, 3\) != \(3,\)"),
        (PADDED, [1, -1, 1], ValueError, "row 1.*found -1"),
        (PADDED, [1, 1, 5], ValueError, "row 2.*at most 4.*found 5"),
        (PADDED, [1.0, 1.0, 1.0], TypeError, "integer"),
        (PADDED, [True, True, False], TypeError, "integer"),
        (nest(1, 2, 3), [1, 1, 1], TypeError, "jagged"),
    ],
)
def test_rectangles_that_cannot_be_packed(padded, lengths, error, text):
    with pytest.raises(error, match=text) as caught:
        to_nested_by_length(padded, torch.tensor(lengths))
    assert isinstance(caught.value, jagcodec.JagcodecError)


def test_arguments_of_another_type_are_refused():
    with pytest.raises(TypeError, match="set"):
        to_nested_by_length(PADDED, {1, 2, 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ndarray"):
        pack_per_token_field(PADDED.numpy(), torch.tensor([1, 1, 1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [maybe_pack_jagged, pack_per_token_field])
def test_negative_lengths_raise_everywhere(function):
    with pytest.raises(ValueError, match="row 2"):
        function(PADDED, torch.tensor([1, 4, -2]))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([torch.ones(2, 3), torch.ones(3, 2)], r"dims \[0, 1\]"),
        ([torch.ones(2), torch.ones(2, 1)], "tensors.1."),
        ([torch.ones(2), torch.ones(2, dtype=torch.int64)], "dtype"),
    ],
)
def test_rows_that_cannot_be_one_tensor(rows, text):
    with pytest.raises(ValueError, match=text):
        stack_or_nest(rows)


def test_scalars_stack_but_cannot_nest():
    assert stack_or_nest([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    with pytest.raises(ValueError, match="0-d"):
        stack_or_nest([torch.tensor(1)], always_nest=True)


def test_quantised_tensors_are_refused():
    quantised = torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.qint8)
    with pytest.raises(TypeError, match="dequantise"):
        to_nested_by_length(quantised, torch.tensor([1, 3]))


def test_rows_with_an_axis_before_the_tokens():
    equal = [torch.ones(3, 5), torch.zeros(3, 5)]
    nested = stack_or_nest(equal, always_nest=True, ragged_dim=2)
    assert [row.shape for row in nested.unbind()] == [(3, 5), (3, 5)]
    assert nested.values().shape == (3, 10)
    with pytest.raises(ValueError, match="differ in dim 0 alone"):
        stack_or_nest([torch.ones(3, 1), torch.ones(3, 2)], ragged_dim=1)
    with pytest.raises(ValueError, match="ragged_dim"):
        stack_or_nest(equal, always_nest=True, ragged_dim=4)


def test_the_mask_of_a_response_multiplies_whatever_its_offsets():
    full = nest(4, 5)
    mask = torch.nested.nested_tensor_from_jagged(
        torch.ones(3), torch.tensor([0, 1, 3], dtype=torch.int32)
    )
    assert (response_from_nested(full, mask) * mask).values().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "lengths",
    [
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.int64, device="meta"),
        torch.nested.nested_tensor([torch.ones(1)]),
        None,
    ],
)
def test_lengths_that_cannot_be_read(lengths):
    with pytest.raises(TypeError, match=r"\(lengths\)"):
        to_nested_by_length(PADDED, lengths)


def test_lengths_beyond_int64():
    lengths = torch.tensor([2**63 + 5, 0, 0], dtype=torch.uint64)
    with pytest.raises(ValueError, match="lengths"):
        to_nested_by_length(PADDED, lengths)


@pytest.mark.parametrize("tensors_", [None, 5])
def test_rows_that_are_no_list(tensors_):
    with pytest.raises(TypeError, match="list of tensors"):
        stack_or_nest(tensors_)
