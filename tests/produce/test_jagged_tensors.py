"""The layout functions against the list-of-rows model, errors included."""

from array import array
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import (
    encode_fields,
    encode_rows,
    materialize,
    maybe_pack_jagged,
    pack_jagged_fields,
    pack_per_token_field,
    pack_rows,
    response_from_nested,
)
from jagcodec.errors import JagcodecError, JagcodecWarning
from jagcodec.produce.jagged_tensors import stack_or_nest, to_nested_by_length
from jagcodec.testing import jagged_tensors, tensors
from jagcodec.types import PackedColumn
from tests.oracle import assert_same, bits, pad_rows, rows_of
from tests.strategies import lengths_in, torch_dtypes


@st.composite
def rectangles(draw):
    """(padded, lengths): any strides and dtype, S wider than the longest row now and then."""
    rows, width = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    trailing = draw(st.lists(st.integers(0, 3), max_size=2))
    return draw(tensors((rows, width, *trailing))), draw(lengths_in(width, rows))


def bounds(jagged):
    return jagged._min_seqlen, jagged._max_seqlen


def nested(rows, ragged_dim=None):
    return stack_or_nest(rows, always_nest=True, ragged_dim=ragged_dim)


def nest(*lengths):
    return nested([torch.ones(n) for n in lengths])


FORMS: list[Callable[[list[int]], Any]] = [
    *(list, tuple, partial(array, "h"), partial(np.array, dtype=np.uint8)),
    *(partial(torch.tensor, dtype=torch.int64), partial(torch.tensor, dtype=torch.int32)),
]


@given(rectangles(), st.sampled_from(FORMS))
def test_rows_survive_packing(rectangle, form):
    padded, lengths = rectangle
    before = bits(padded)
    nested = to_nested_by_length(padded, form(lengths))
    assert nested.layout is torch.jagged
    assert nested.dtype == padded.dtype
    assert rows_of(nested) == rows_of(padded, lengths)
    assert tuple(nested.values().shape) == (sum(lengths), *padded.shape[2:])
    assert nested.offsets().dtype == torch.int64  # type: ignore[attr-defined]
    assert bounds(nested) == (min(lengths, default=0), max(lengths, default=0))
    if nested.values().numel():
        nested.values().view(torch.uint8).fill_(1)
    assert bits(padded) == before
    assert rows_of(pack_per_token_field(padded, lengths)) == rows_of(padded, lengths)


@given(rectangles())
def test_maybe_packs_exactly_the_width_of_the_longest_row(rectangle):
    padded, lengths = rectangle
    result = maybe_pack_jagged(padded, lengths)
    if padded.shape[1] == max(lengths, default=0):
        assert rows_of(result) == rows_of(padded, lengths)
    else:
        assert_same(result, padded)
        assert result.is_contiguous()


@pytest.mark.filterwarnings("error::jagcodec.errors.JagcodecWarning")
@pytest.mark.parametrize("pack", [maybe_pack_jagged, pack_per_token_field])
@pytest.mark.parametrize("shape", [(3, 5), (4,), (), (4, 2), (4, 2, 4)])
def test_what_does_not_fit_stays_rectangular_and_is_not_copied(pack, shape):
    val = torch.ones(shape, requires_grad=True)
    is_sign = pack is pack_per_token_field and len(shape) > 1
    text = "stays rectangular .* its rows or its width"
    with pytest.warns(JagcodecWarning, match=text) if is_sign else nullcontext():
        result = pack(val, torch.tensor([1, 3, 2, 0]))
    assert_same(result, val)
    assert not result.requires_grad
    assert result.data_ptr() == val.data_ptr()
    # All results are detached; a jagged tensor comes back with the same rows.
    padded = torch.ones(2, 3, requires_grad=True)
    jagged = to_nested_by_length(padded, [1, 3])
    assert not pack(padded, [1, 3]).requires_grad
    assert not pack(jagged, [1, 3]).requires_grad
    assert rows_of(pack(jagged, [1, 3])) == rows_of(jagged)


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


@given(torch_dtypes(), st.booleans(), st.data())
def test_stack_or_nest_of_every_dtype(dtype, nests, data):
    """Also of those that torch cannot join."""
    lengths = [2, 3] if nests else [2, 2]
    rows = [data.draw(tensors((n,), dtype)) for n in lengths]
    result = stack_or_nest(rows)
    assert result.dtype == dtype
    assert (rows_of(result) if nests else bits(result)) == list(map(bits, rows))


def test_scalars_and_rows_with_an_axis_before_the_tokens():
    assert stack_or_nest([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    wide = nested([torch.ones(3, 5), torch.zeros(3, 5)], 2)
    assert [row.shape for row in wide.unbind()] == [(3, 5), (3, 5)]
    assert wide.values().shape == (3, 10)


@given(st.data())
def test_responses_are_shifted_left_by_one(data):
    prompts = data.draw(st.lists(st.integers(0, 4), max_size=5))
    # Only an empty response may be in a row without a prompt.
    responses = [data.draw(st.integers(0, 4 if prompt else 0)) for prompt in prompts]
    trailing = data.draw(st.lists(st.integers(0, 2), max_size=1))
    lengths = map(sum, zip(prompts, responses, strict=True))
    rows = [data.draw(tensors((n, *trailing), torch.float32)) for n in lengths]
    full = stack_or_nest(rows, always_nest=True)
    mask = stack_or_nest([torch.ones(r) for r in responses], always_nest=True)
    if not rows:
        return
    result = response_from_nested(full, mask)
    spans = zip(rows, prompts, responses, strict=True)
    expected = [bits(row)[p - 1 : p + r - 1] if r else [] for row, p, r in spans]
    assert rows_of(result) == expected
    assert result.offsets() is mask.offsets()  # type: ignore[attr-defined]
    if not trailing:
        again = to_nested_by_length(torch.tensor(pad_rows(expected, max(responses) + 1, 7)), mask)
        assert rows_of(again) == expected


MASKS = [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64]


def packed(jagged):
    return materialize({"x": jagged}, layout="packed")["x"]


@given(st.data())
def test_masks_of_whole_rows_choose_responses(data):
    """In several turns, as a `RowBuilder` makes them; a first token is never one of a response."""
    masks = data.draw(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=4))
    masks = [[False, *mask[1:]] if mask else mask for mask in masks]
    trailing = data.draw(st.sampled_from([(), (30,)]))  # more than there are tokens
    rows = [data.draw(tensors((len(mask), *trailing), torch.float32)) for mask in masks]
    dtype = data.draw(st.sampled_from(MASKS))
    full, mask = nested(rows), nested([torch.tensor(mask, dtype=dtype) for mask in masks])
    cells = [bits(row) for row in rows]
    expected = [
        [cell for cell, is_chosen in zip(row, mask[1:], strict=False) if is_chosen]
        for row, mask in zip(cells, masks, strict=True)
    ]
    holes = with_holes(full), with_holes(mask)
    for pair in ((full, mask), holes, (packed(full), mask), (packed(full), packed(mask))):
        found = response_from_nested(*pair)
        assert rows_of(found) == expected
        assert (found.dtype, found.shape[2:]) == (full.dtype, full.shape[2:])
        assert bounds(found) == (min(map(len, expected)), max(map(len, expected)))


def with_holes(jagged):
    """The same rows, each with a cell after it that belongs to no row."""
    rows = [torch.cat([row, row.new_ones(1, *row.shape[1:])]) for row in jagged.unbind()]
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(rows),
        torch.tensor([0, *map(len, rows)]).cumsum(0),
        lengths=torch.tensor([len(row) - 1 for row in rows]),
    )


def test_what_the_error_of_a_packed_column_says_helps():
    ids, wide = nest(2, 3), nested([torch.ones(2, 2), torch.ones(2, 1)], 2)
    calls: list[Callable[[Any], Any]] = [
        *(partial(pack, lengths=[2, 3]) for pack in PACKS),
        *(stack_or_nest, lambda x: stack_or_nest([x, x])),
    ]
    for call in calls:
        for jagged in (ids, wide):
            with pytest.raises(JagcodecError, match="found PackedColumn x; a jagged") as caught:
                call(packed(jagged))
            remedy = caught.value.detail.rpartition(" is ")[2]
            assert_same(eval(remedy, {"torch": torch, "x": packed(jagged)}), jagged)
    odd = PackedColumn("x", [1], 2, None)  # type: ignore[arg-type]
    columns: list[Any] = [pack_rows, encode_fields, pack_jagged_fields]
    of_columns = [lambda x, call=call: call({"x": x}) for call in columns]
    for call in (*calls, *of_columns, lambda x: response_from_nested(x, ids)):
        with pytest.raises(JagcodecError, match=r"\.values: expected a tensor, found str"):
            call(odd)
    for pack in PACKS:
        with pytest.raises(JagcodecError, match=r"pass its \.cu_seqlens\.diff\(\)"):
            pack(PADDED, packed(ids))
        assert_same(pack(PADDED[:2], packed(ids).cu_seqlens.diff()), pack(PADDED[:2], [2, 3]))


@given(jagged_tensors().filter(lambda mask: type(mask.shape[1]) is not int), st.data())
def test_padded_responses_become_the_rows_of_their_mask(mask, data):
    lengths = [len(row) for row in rows_of(mask)]
    width = max(lengths, default=0) + data.draw(st.integers(0, 2))
    padded = data.draw(tensors((len(lengths), width, 2)))
    result = to_nested_by_length(padded, mask)
    assert rows_of(result) == rows_of(padded, lengths)
    assert bounds(result) == (min(lengths, default=0), max(lengths, default=0))
    if mask.lengths() is None:
        assert result.offsets() is mask.offsets()  # type: ignore[attr-defined]


def test_the_mask_of_a_response_multiplies_whatever_its_offsets():
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    mask = torch.nested.nested_tensor_from_jagged(torch.ones(3), offsets)
    assert (response_from_nested(nest(4, 5), mask) * mask).values().tolist() == [1.0, 1.0, 1.0]


TURNS = nested([torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])])


def test_gradients_flow_through_the_layout():
    for make, gradient in (
        (lambda x: to_nested_by_length(x, [3, 1]), [[1, 1, 1], [1, 0, 0]]),
        (lambda x: to_nested_by_length(x, nest(3, 1)), [[1, 1, 1], [1, 0, 0]]),
        (lambda x: stack_or_nest([x[0], x[1, :1]]), [[1, 1, 1], [1, 0, 0]]),
        (lambda x: response_from_nested(nested([*x]), nest(2, 1)), [[1, 1, 0], [0, 1, 0]]),
        (lambda x: response_from_nested(nested([*x]), TURNS), [[0, 1, 0], [1, 1, 0]]),
    ):
        padded = torch.ones(2, 3, requires_grad=True)
        make(padded).values().sum().backward()
        assert padded.grad is not None
        assert padded.grad.tolist() == gradient


FULL = nested([torch.arange(4.0), torch.arange(3.0)])
# A call, what its error says, and the call that does as it says.
REMEDIES: list[tuple[Any, str, Any]] = [
    (
        lambda: response_from_nested(torch.arange(7.0), nest(1, 2)),
        r"p\._replace\(values=x\)",
        lambda: response_from_nested(packed(FULL)._replace(values=torch.arange(7.0)), nest(1, 2)),
    ),
    (
        lambda: response_from_nested(torch.ones(2, 4), nest(1, 2)),
        "use to_nested_by_length",
        lambda: response_from_nested(to_nested_by_length(torch.ones(2, 4), [4, 3]), nest(1, 2)),
    ),
    (
        lambda: response_from_nested(torch.nested.nested_tensor([*FULL.unbind()]), nest(1, 2)),
        r"stack_or_nest\(x\.unbind\(\), always_nest=True\)",
        lambda: response_from_nested(
            stack_or_nest(torch.nested.nested_tensor([*FULL.unbind()]).unbind(), always_nest=True),
            nest(1, 2),
        ),
    ),
    (
        lambda: to_nested_by_length(torch.ones(7), [4, 3]),
        r"torch\.nested\.nested_tensor_from_jagged\(values, offsets\)",
        lambda: torch.nested.nested_tensor_from_jagged(torch.ones(7), FULL.offsets()),
    ),
    (
        lambda: nested([torch.tensor(1)]),
        "stack them",
        lambda: stack_or_nest([torch.tensor(1)]),
    ),
    *(
        (
            lambda mask=mask: pack_jagged_fields({"x": torch.ones(1, 2)}, mask=mask),
            "; pass mask != 0",
            lambda mask=mask: pack_jagged_fields({"x": torch.ones(1, 2)}, mask=mask != 0),
        )
        for mask in (torch.ones(1, 2), torch.ones(1, 2).bfloat16(), np.ones((1, 2)))
    ),
    (
        lambda: pack_rows({"x": [[16]]}, dtypes={"x": torch.float8_e5m2}),
        "; pass tensors",
        lambda: pack_rows(
            {"x": [torch.tensor([16.0]).to(torch.float8_e5m2)]}, dtypes={"x": torch.float8_e5m2}
        ),
    ),
    (
        lambda: pack_rows({"x": [np.array([True]), np.array([1])]}),
        "; convert the rows",
        lambda: pack_rows({"x": [np.array([True]).astype(int), np.array([1])]}),
    ),
    (
        lambda: encode_rows({"x": 5}),  # type: ignore[dict-item]
        "values of the whole batch into meta= of encode_rows",
        lambda: encode_rows([{"y": 1}], meta={"x": 5}),
    ),
]


@pytest.mark.parametrize(("call", "text", "remedied"), REMEDIES)
def test_what_an_error_says_helps(call, text, remedied):
    with pytest.raises(JagcodecError, match=text):
        call()
    remedied()


PADDED = torch.zeros(3, 4)
QUANTISED = torch.quantize_per_tensor(PADDED, 0.5, 0, torch.qint8)
WIDE = stack_or_nest([torch.ones(2, n) for n in (1, 2, 3)])
WRONG_LENGTHS: list[tuple[Any, str, str]] = [
    ([1, 1], "bad_shape", r"lengths shape \(2,\) != \(3,\)"),
    (torch.tensor([[1, 1, 1]]), "bad_shape", r"lengths shape \(1, 3\) != \(3,\)"),
    ([1, -1, 1], "bad_length", "row 1.*found -1"),
    ([1, 1, 5], "bad_length", "row 2.*at most 4.*found 5"),
    (torch.tensor([1.0, 1.0, 1.0]), "bad_dtype", "integer"),
    (torch.tensor([2**63 + 5, 0, 0], dtype=torch.uint64), "bad_length", "lengths"),
    ([1, 2.0, 1], "bad_dtype", r"found 2\.0"),
    ([1, True, 1], "bad_dtype", "found True"),
    ([1, None, 1], "bad_dtype", "found None"),
    ([1, 1 << 64, 1], "bad_length", "an int of 65 bits"),
    (np.array([1.0, 2, 3]), "bad_dtype", "float64"),
    (np.array([True, False, True]), "bad_dtype", "bool"),
    ({1, 2, 3}, "bad_type", "set"),
    (None, "bad_type", "NoneType"),
    (torch.ones(3).to_sparse(), "bad_type", "sparse"),
    (torch.ones(3, dtype=torch.int64, device="meta"), "bad_type", "meta"),
    (torch.nested.nested_tensor([torch.ones(1)]), "bad_type", "nested"),
    (nest(3, 4, 5), "bad_length", "row 2.*at most 4.*found 5"),
    (nest(1, 2), "row_mismatch", "expected 3 rows, found 2"),
    (WIDE, "bad_shape", "expected ragged dim 1, found 2"),
]
PACKS = [to_nested_by_length, maybe_pack_jagged, pack_per_token_field]
WRONG: list[Any] = [
    *((to_nested_by_length, (PADDED, lengths), *rest) for lengths, *rest in WRONG_LENGTHS),
    (to_nested_by_length, (torch.zeros(3), [1, 1, 1]), "bad_shape", r"expects \(N, S, \.\.\.\)"),
    *((pack, (PADDED, [1, 4, -2]), "bad_length", r"\(lengths\), row 2") for pack in PACKS),
    *((pack, (PADDED, [1.0, 1.0]), "bad_dtype", r"\(lengths\)") for pack in PACKS),
    *((pack, (PADDED.numpy(), [1, 1, 1]), "bad_type", "ndarray") for pack in PACKS),
    *((pack, (QUANTISED, [1, 1, 1]), "bad_dtype", "dequantise") for pack in PACKS),
    (to_nested_by_length, (nest(1, 2, 3), [1, 1, 1]), "bad_type", r"\(padded\).*jagged"),
    (stack_or_nest, ([torch.ones(2, 3), torch.ones(3, 2)],), "bad_shape", r"dims \[0, 1\]"),
    (stack_or_nest, ([torch.ones(2), torch.ones(2, 1)],), "bad_shape", r"tensors\[1\]"),
    (stack_or_nest, ([torch.ones(2), torch.ones(2).long()],), "bad_dtype", "dtype"),
    (stack_or_nest, ([torch.ones(2), torch.ones(2, device="meta")],), "bad_dtype", "device"),
    (stack_or_nest, ([torch.ones(2), None],), "bad_type", r"tensors\[1\]"),
    (stack_or_nest, (None,), "bad_type", "list of tensors"),
    (nested, ([torch.tensor(1)],), "bad_shape", "0-d"),
    (nested, ([torch.ones(3, n) for n in (1, 2)], 1), "bad_shape", "differ in dim 0"),
    (nested, ([torch.ones(3, 1)], 3), "bad_shape", "ragged_dim"),
    (nested, ([torch.ones(3, 1)], 0), "bad_shape", "ragged_dim"),
    (response_from_nested, (nest(3, 2), nest(1, 2)), "empty_prompt", "row 1"),
    (response_from_nested, (nest(3, 2), nest(1, 3)), "bad_length", "row 1"),
    (response_from_nested, (nest(3, 2), nest(1)), "row_mismatch", "expected 2 rows"),
    (response_from_nested, (WIDE, nest(1, 1, 1)), "bad_shape", "ragged dim 1, found 2 and 1"),
    (response_from_nested, (torch.ones(2, 3), nest(1, 1)), "bad_type", "to_nested_by_length"),
    (
        response_from_nested,
        (nest(3, 3), nest(3, 3)),
        "empty_prompt",
        "row 0.*whole rows leaves out",
    ),
    (
        response_from_nested,
        (TURNS, 2 * TURNS),
        "bad_option",
        "mask., row 0, cell 2: .*0 or 1.*found 2",
    ),
    (response_from_nested, (TURNS, TURNS * float("nan")), "bad_option", "row 0, cell 0: .*nan"),
    (response_from_nested, (TURNS, nested([torch.ones(3, 1)] * 2)), "bad_shape", "found 3 dims"),
    (response_from_nested, (nest(2, 2), torch.ones(2, 1)), "bad_type", "response_mask"),
]


@pytest.mark.parametrize(("function", "arguments", "reason", "text"), WRONG)
def test_bad_arguments_are_named(function, arguments, reason, text):
    with pytest.raises(JagcodecError, match=text) as caught:
        function(*arguments)
    assert caught.value.reason == reason
