"""The first difference of two batches, against the oracle and against what was changed."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from jagcodec import decode, encode, encode_fields, pack_jagged_fields, testing
from jagcodec.batch.compare import first_difference
from jagcodec.batch.describe import differences, read_whole
from jagcodec.errors import ArgumentKeyError
from tests.oracle import is_same
from tests.strategies import tensordicts, trees

VALUES = st.one_of(tensordicts(), trees())


def message_difference(left, right, columns=None):
    """The first difference of two messages."""
    a, b = (read_whole(each, "message", columns) for each in (left, right))
    return next(differences(a, b), None)


@given(VALUES, VALUES)
def test_two_batches_differ_where_the_oracle_says_so(a, b):
    assert first_difference(a, decode(encode(a))) is None
    assert message_difference(encode(a), encode(a, narrow=True, checksum=True)) is None
    found, same = first_difference(a, b), is_same(a, b)
    assert (found is None) == testing.is_same(a, b) == same
    assert (message_difference(encode(a), encode(b)) is None) == same
    if found is None:
        testing.assert_same(a, b)
        return
    with pytest.raises(AssertionError, match=re.escape(str(found))):
        testing.assert_same(a, b)


@given(st.data(), st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.bool]))
def test_the_changed_cell_is_found(data, dtype):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    rows = [i for i, length in enumerate(lengths) if length]
    cells = torch.zeros(len(lengths), 5, 2, dtype=dtype)
    changed = cells.clone()
    where = data.draw(st.sampled_from(rows)) if rows else 0
    token = data.draw(st.integers(0, max(lengths[where] - 1, 0)))
    changed[where, token, 1] = 1
    batches = [
        {"first": torch.ones(len(lengths)), "ids": each, "reward": torch.ones(len(lengths))}
        for each in (cells, changed)
    ]
    names = ["ids"]
    packed = [
        pack_jagged_fields(batch, lengths=lengths, token_aligned_fields=names) for batch in batches
    ]
    frames = [
        encode_fields(batch, lengths=lengths, token_aligned_fields=names) for batch in batches
    ]
    for found in (first_difference(*packed), message_difference(*frames)):
        if rows:
            assert (found.column, found.row, found.cell) == ("ids", where, (token, 1))
            assert found.what == "value"
            assert (float(eval(found.left)), float(eval(found.right))) == (0, 1)
        else:
            assert found is None


IDS = torch.tensor([[1, 2], [3, 4]])
NAN = torch.tensor([math.nan, 1.0])
OTHER_NAN = (NAN.view(torch.int32) + 1).view(torch.float32)


def batch(**columns):
    return TensorDict(columns, batch_size=[2])


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ({"ids": IDS}, {"ids": IDS.int()}, "column ids: dtype torch.int64 and torch.int32"),
        ({"ids": IDS}, {"ids": IDS[:, :1]}, "column ids: shape [2, 2] and [2, 1]"),
        ({"ids": IDS, "x": IDS}, {"ids": IDS}, "the whole: columns with x and without it"),
        ({"a": IDS, "b": NAN}, {"b": NAN, "a": IDS}, "the whole: order of columns a, b and b, a"),
        # Dtypes of all columns before the cells of any.
        (
            {"a": IDS, "b": IDS},
            {"a": IDS + 1, "b": IDS.int()},
            "column b: dtype torch.int64 and torch.int32",
        ),
        ({"r": NAN}, {"r": NAN.clone()}, None),
        (
            {"r": NAN},
            {"r": OTHER_NAN},
            "column r, row 0: value nan (bits 7fc00000) and nan (bits 7fc00001)",
        ),
        ({"r": torch.zeros(2)}, {"r": -torch.zeros(2)}, "column r, row 0: value 0.0 and -0.0"),
        (
            {"tag": NonTensorStack({"a": [1, 2]}, "x")},
            {"tag": NonTensorStack({"a": [1, True]}, "x")},
            "column tag, row 0, $.a[1]: type int and bool",
        ),
        (
            {"tag": NonTensorStack("x", "y")},
            {"tag": NonTensorStack("x", "z")},
            "column tag, row 1: value 'y' and 'z'",
        ),
    ],
)
def test_what_is_said(left, right, said):
    for found in (
        first_difference(batch(**left), batch(**right)),
        message_difference(encode(batch(**left)), encode(batch(**right))),
    ):
        assert str(found).replace("torch.", "") == str(said).replace("torch.", "")


def test_nested_batches_and_rows_of_other_lengths():
    rows = [torch.ones(2), torch.ones(3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    longer = torch.nested.nested_tensor([rows[0], torch.ones(4)], layout=torch.jagged)
    a, b = ({"inner": batch(ids=IDS, x=each)} for each in (jagged, longer))
    for found in (
        first_difference(batch(**a), batch(**b)),
        message_difference(encode(batch(**a)), encode(batch(**b))),
    ):
        assert str(found) == "column inner.x, row 1: tokens 3 and 4"


def test_what_stands_beside_the_batch_and_meta_are_compared():
    td = batch(ids=IDS)
    found = message_difference(encode(td, meta={"step": 1}), encode(td, meta={"step": 2}))
    assert str(found) == "column meta, $.step: value 1 and 2"
    found = message_difference(
        encode({"td": td, "w": torch.ones(3)}), encode({"td": td, "w": torch.zeros(3)})
    )
    assert (found.column, found.row) == ("w", 0)


def test_chosen_columns_and_names_that_are_none():
    a, b = (encode(batch(ids=IDS, x=x)) for x in (IDS, IDS + 1))
    assert message_difference(a, b, columns=["ids"]) is None
    assert message_difference(a, b, columns=["x"]).column == "x"
    with pytest.raises(ArgumentKeyError):
        message_difference(a, b, columns=["nothing"])


def test_arrays_and_plain_values():
    x = np.arange(6).reshape(2, 3)
    changed = x.copy()
    rest = (1, 2.5, {"k": b"1"})
    assert first_difference({"x": x, "y": rest}, {"x": changed, "y": rest}) is None
    changed[1, 2] = 7
    found = first_difference({"x": x, "y": rest}, {"x": changed, "y": rest})
    assert (found.column, found.row, found.cell) == ("x", 1, (2,))


def test_values_under_keys_that_equal_nothing_are_compared():
    a, b = ({float("nan"): value} for value in (1, 2))
    assert str(first_difference([a], [b])).endswith("value 1 and 2")


def test_what_values_lie_in_is_compared_and_not_only_they():
    """[x] and (x,) have the same entries."""
    assert str(message_difference(encode([IDS]), encode((IDS,)))) == "$: type list and tuple"
    rows = [TensorDict({"a": torch.ones(n)}, batch_size=[]) for n in (2, 3)]
    stack = encode(LazyStackedTensorDict(*rows, stack_dim=0))
    assert message_difference(stack, stack) is None
    assert str(message_difference(stack, encode(rows))) == "$: type LazyStackedTensorDict and list"
    sized = [TensorDict({"a": row["a"]}, batch_size=row["a"].shape) for row in rows]
    other = encode(LazyStackedTensorDict(*sized, stack_dim=0))
    assert "batch size" in str(message_difference(stack, other))


def test_columns_whose_names_would_be_one_are_compared_both():
    """A key may have a dot in it, or look like the name of what stands beside the batch."""
    inner = {"a": TensorDict({"b": IDS}, batch_size=[2])}
    left = encode(batch(**{"a.b": IDS}, **inner))
    assert message_difference(left, encode(batch(**{"a.b": IDS}, **inner))) is None
    for changed in (
        {"a.b": IDS + 1, **inner},
        {"a.b": IDS, "a": TensorDict({"b": IDS + 1}, batch_size=[2])},
        {**inner, "a.b": IDS},
    ):
        assert message_difference(left, encode(batch(**changed))) is not None
    one, other = (encode({"td": batch(**{"$.x": x}), "x": 1}) for x in (IDS, IDS + 1))
    assert str(message_difference(one, other)).startswith("column td.$.x, row 0")


def test_names_that_a_stranger_chose_are_safe_to_print():
    name = "\x1b]0;owned\x07\x1b[2J\u202e"
    found = message_difference(encode(batch(**{name: IDS})), encode(batch(ids=IDS)))
    assert str(found) == (r"the whole: columns with \x1b]0;owned\x07\x1b[2J\u202e and with ids")
    changed = message_difference(encode(batch(**{name: IDS})), encode(batch(**{name: IDS + 1})))
    assert str(changed).isprintable()
