"""Lists of numbers per token, of any length: two jagged columns, and back. The oracle is lists."""

import itertools
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentTypeError,
    concat_rows,
    decode,
    encode,
    encode_rows,
    join_columns,
    materialize,
    open_wire,
    pack_rows,
    pack_token_lists,
    pad_token_lists,
    repeat_rows,
    select_rows,
    stack_or_nest,
    to_blob,
    to_rows,
    unpack_token_lists,
)
from tests.helpers import size

NUMBERS = st.integers(0, 99)
ROWS = st.lists(st.lists(st.lists(NUMBERS, max_size=4), max_size=4), max_size=4)
PAD = -7


def packed(*args: Any, **options: Any) -> tuple[Any, Any]:
    return pack_token_lists(*args, **options)


def flat(rows):
    return [[number for token in row for number in token] for row in rows]


def counted(rows):
    return [[len(token) for token in row] for row in rows]


def lists_of(column: Any) -> list[Any]:
    """The rows of a jagged column as lists, by its offsets."""
    values, offsets = column.values().tolist(), column.offsets().tolist()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def rectangle(row, width, pad=PAD, dtype=np.int64):
    """The tokens of a row, padded to some width."""
    out = np.full((len(row), width), pad, dtype=dtype)
    for i, token in enumerate(row):
        out[i, : len(token)] = token
    return out


def longest(rows):
    return max((len(token) for row in rows for token in row), default=0)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from([torch.int64, torch.uint8, torch.float32, torch.bfloat16]))
def test_lists_and_arrays_of_any_kind_become_the_same_two_columns(rows, dtype):
    each = {
        "lists": rows,
        "tuples": tuple(tuple(map(tuple, row)) for row in rows),
        "arrays": [[np.array(token, np.int32) for token in row] for row in rows],
        "tensors": [[torch.tensor(token, dtype=torch.int16) for token in row] for row in rows],
        "array": [[array("h", token) for token in row] for row in rows],
        "mixed": [[np.array(t, np.int16) if len(t) % 2 else t for t in row] for row in rows],
    }
    for given_rows in each.values():
        ids, counts = pack_token_lists(given_rows, dtype=dtype)
        assert lists_of(ids) == flat(rows)
        assert ids.dtype == dtype
        assert lists_of(counts) == counted(rows)
        assert counts.dtype == torch.int64
        lists = unpack_token_lists(ids, counts)
        assert lists_of(lists) == [token for row in rows for token in row]
        assert lists.dtype == dtype


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 2), st.data())
def test_rows_that_are_padded_rectangles(rows, more, data):
    width = longest(rows) + more
    dtype = data.draw(st.sampled_from([None, torch.uint8, torch.float64]))
    widths = [width, *(width + i for i in range(1, len(rows)))]  # each as wide as it likes
    forms: dict[str, Any] = {
        "arrays": [rectangle(row, width) for row in rows],
        "of other widths": [rectangle(row, w) for row, w in zip(rows, widths, strict=False)],
        "tensors": [torch.from_numpy(rectangle(row, width)) for row in rows],
        "of columns": [np.asfortranarray(rectangle(row, width)) for row in rows],
    }
    if rows:
        nested: Any = stack_or_nest(forms["tensors"], always_nest=True)
        forms["jagged"] = nested
    for form, padded in forms.items():
        if not rows:
            continue
        ids, counts = packed(padded, pad_value=PAD, dtype=dtype)
        assert lists_of(ids) == flat(rows)
        assert ids.dtype == (dtype or torch.int64)
        assert lists_of(counts) == counted(rows)
        if form == "jagged":
            assert counts.offsets() is nested.offsets()
        ids, counts = pack_token_lists(padded)  # where nothing is a pad
        assert sum(map(len, lists_of(ids))) == sum(
            len(row) * (widths[i] if form == "of other widths" else width)
            for i, row in enumerate(rows)
        )


@settings(max_examples=100, deadline=None)
@given(ROWS.filter(len), st.data())
def test_both_columns_go_where_columns_go(rows, data):
    ids, counts = pack_token_lists(rows, dtype=torch.int64)
    tokens = stack_or_nest([torch.arange(len(row)) for row in rows], always_nest=True)
    batch = TensorDict({"ids": ids, "counts": counts, "tokens": tokens}, [len(rows)])
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    options = data.draw(
        st.sampled_from([{}, {"narrow": True}, {"elide": True}, {"narrow": ["counts"]}])
    )
    frames = encode(batch, **options)
    again = decode(frames)
    assert again["counts"].offsets() is again["tokens"].offsets()
    again["counts"] + again["tokens"]
    blob = bytes(to_blob(frames))
    opened = open_wire(lambda at, n: blob[at : at + n])
    joined = join_columns([opened.select(["ids", "tokens"]), opened.select(["counts"])])
    twice = concat_rows([open_wire(frames), open_wire(frames)])
    expected = {
        "whole": (again, range(len(rows))),
        "read": (opened, range(len(rows))),
        "joined": (joined, range(len(rows))),
        "selected": (select_rows(batch, index), index),
        "chosen": (opened.rows(index), index),
        "repeated": (repeat_rows(batch, 2), [i for i in range(len(rows)) for _ in range(2)]),
        "twice": (twice, [*range(len(rows)), *range(len(rows))]),
        "sent on": (decode(twice.rows(index).to_frames()), index),
        "sampled": (pack_rows(to_rows(opened, as_="numpy")), range(len(rows))),
        "jagged": (materialize(twice, layout="jagged"), [*range(len(rows))] * 2),
    }
    for found, of in expected.values():
        wanted = [rows[i] for i in of]
        assert lists_of(found["ids"]) == flat(wanted)
        lists = unpack_token_lists(found["ids"], found["counts"])
        assert lists_of(lists) == [token for row in wanted for token in row]
    for i, row in enumerate(rows):
        one = unpack_token_lists(ids.unbind()[i], counts.unbind()[i])
        assert lists_of(one) == row


@settings(max_examples=150, deadline=None)
@given(ROWS.filter(len), st.sampled_from(["right", "left"]), st.data())
def test_rectangles_lie_as_those_of_the_other_columns_do(rows, side, data):
    pad = data.draw(st.sampled_from([0, -1]))
    ids, counts = packed(rows, dtype=torch.int32)
    most = longest(rows)
    width = data.draw(st.sampled_from([None, most, most + 2]))
    sent: dict[str, Any] = {
        "ids": [np.array(row, np.int32) for row in flat(rows)],
        "counts": [np.array(row, np.int64) for row in counted(rows)],
    }
    frames = encode_rows(sent)  # as an engine has them that has both already
    batch = materialize(frames, keep_jagged=["ids"], padding_side=side, pad_to_multiple=3)
    found, mask = pad_token_lists(batch["ids"], batch["counts"], pad_value=pad, width=width)
    seqlen = -(-max(map(len, rows)) // 3) * 3
    cells = most if width is None else width
    expected = np.full((len(rows), seqlen, cells), pad)
    for i, row in enumerate(rows):
        start = seqlen - len(row) if side == "left" else 0
        expected[i, start : start + len(row)] = rectangle(row, cells, pad)
    assert found.dtype == torch.int32
    assert found.shape == mask.shape
    assert found.tolist() == expected.tolist()
    held = np.zeros(expected.shape, bool)
    for i, row in enumerate(rows):
        start = seqlen - len(row) if side == "left" else 0
        for j, token in enumerate(row):
            held[i, start + j, : len(token)] = True
    assert mask.tolist() == held.tolist()
    assert found[mask].tolist() == list(itertools.chain.from_iterable(flat(rows)))

    # The same lists by slot, of those that hold no token too.
    slots = unpack_token_lists(batch["ids"], batch["counts"])
    assert len(lists_of(slots)) == len(rows) * seqlen
    assert [t for t in lists_of(slots) if t] == [t for row in rows for t in row if t]

    # Of jagged counts on the right, as wide as the row of most tokens; and of one row.
    found, mask = pad_token_lists(ids, counts, pad_value=pad)
    assert found.shape == (len(rows), max(map(len, rows)), most)
    for i, row in enumerate(rows):
        assert found[i, : len(row)].tolist() == rectangle(row, most, pad).tolist()
        assert (found[i, len(row) :] == pad).all()
        assert not mask[i, len(row) :].any()
        one, of_one = pad_token_lists(ids.unbind()[i], counts.unbind()[i], width=most)
        assert one.tolist() == rectangle(row, most, 0).tolist()
        assert of_one.sum(-1).tolist() == [len(token) for token in row]


def test_numbers_that_are_cells_and_counts_of_any_integers():
    ids, counts = packed([[[1, 2], []], [[3]]])
    wide = torch.nested.nested_tensor_from_jagged(torch.arange(6).view(3, 2), ids.offsets())
    lists = unpack_token_lists(wide, counts.to(torch.uint8))
    assert lists.values().data_ptr() == wide.values().data_ptr()
    assert [row.tolist() for row in lists.unbind()] == [[[0, 1], [2, 3]], [], [[4, 5]]]
    padded, mask = pad_token_lists(wide, counts, pad_value=9)
    assert padded.tolist() == [[[[0, 1], [2, 3]], [[9, 9]] * 2], [[[4, 5], [9, 9]], [[9, 9]] * 2]]
    assert mask.shape == (2, 2, 2)


def test_values_with_holes():
    ids = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([1, 4, 10]), torch.tensor([2, 3])
    )
    counts = stack_or_nest([torch.tensor([1, 1]), torch.tensor([0, 3, 0])])
    assert lists_of(unpack_token_lists(ids, counts)) == [[1], [2], [], [4, 5, 6], []]


def test_gradients_pass():
    logprobs, counts = packed([[[0.5, 1.5], [2.0]]])
    values = logprobs.values().clone().requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(values, logprobs.offsets())
    padded, mask = pad_token_lists(nested, counts, pad_value=7)
    (padded * mask * 3).sum().backward()
    assert values.grad.tolist() == [3, 3, 3]
    (unpack_token_lists(nested, counts).values() * 2).sum().backward()
    assert values.grad.tolist() == [5, 5, 5]


def test_what_is_packed_is_nobody_elses():
    for rows in ([np.ones((2, 2))], stack_or_nest([torch.ones(2, 2)], always_nest=True)):
        ids, counts = packed(rows)
        before = lists_of(counts)
        ids.values().add_(1)
        counts.values().add_(1)
        assert torch.as_tensor(rows[0]).tolist() == [[1, 1], [1, 1]]
        assert counts.offsets().tolist() == [0, 2]
        assert before == [[2, 2]]


@pytest.mark.parametrize(("pad", "dtype"), [(float("nan"), np.float32), (-np.inf, np.float64)])
def test_pads_are_compared_bit_for_bit(pad, dtype):
    padded = rectangle([[0.5], []], 2, pad, dtype)
    logprobs, counts = pack_token_lists([padded], pad_value=pad)
    assert lists_of(logprobs) == [[0.5]]
    assert lists_of(counts) == [[1, 0]]


def test_counts_are_small_where_they_are_narrow():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 200, 5000)
    row = [rng.integers(0, 60_000, n, dtype=np.int32) for n in lengths]
    ids, counts = pack_token_lists([row])
    batch = TensorDict({"ids": ids, "counts": counts}, [1])
    assert size(encode(batch, narrow=True)) < 2 * lengths.sum() + 5000 + 500


@pytest.mark.parametrize(
    ("rows", "options", "error", "text"),
    [
        (3, {}, ArgumentTypeError, "(rows): expected a list of rows"),
        ("ab", {}, ArgumentTypeError, "(rows): expected a list of rows"),
        ([[[1]], 3], {}, ArgumentTypeError, "row 1: expected a list of tokens"),
        ([[[1]], [[2], 3]], {}, ArgumentError, "row 1, token 1: expected"),
        ([[1, 2]], {}, ArgumentTypeError, "row 0, token 0: expected a list of numbers for each"),
        ([["a"]], {}, ArgumentTypeError, "row 0, token 0: expected a list of numbers for each"),
        ([[[1]], [[2], ["a"]]], {}, ArgumentTypeError, "row 1, token 1: expected numbers"),
        ([[[1]], [[2], [0.5]]], {}, ArgumentTypeError, "row 1, token 1: expected integers"),
        ([[[1]], [[], [300]]], {"dtype": torch.uint8}, ArgumentError, "row 1, token 1: expected"),
        ([[[]], [[[1]]]], {}, ArgumentTypeError, "row 1, token 0: expected numbers, found list"),
        ([[torch.ones(1, 1)]], {}, ArgumentTypeError, "row 0, token 0: expected a list of numbers"),
        (
            [[torch.ones(1)], [torch.ones(1, dtype=torch.int32)]],
            {},
            ArgumentTypeError,
            "row 1, token 0: expected float32 like the first token, found int32; say which with "
            "dtype=...",
        ),
        ([[]], {}, ArgumentError, "(rows): expected numbers, found no token"),
        (
            [[[], []]],
            {},
            ArgumentError,
            "found only empty ones; say what the cells are with dtype=",
        ),
        ([[[1]]], {"dtype": int}, ArgumentTypeError, "(dtype): expected None or a torch.dtype"),
        ([[[1]]], {"pad_value": 0}, ArgumentError, "(pad_value): requires rows that are arrays"),
        ([], {"pad_value": 0}, ArgumentError, "found no rows"),
        ([np.ones(3)], {}, ArgumentError, "row 0: expected (tokens, K), found (3,)"),
        ([np.array([["a"]])], {}, ArgumentTypeError, "row 0: expected numbers, found <U1"),
        ([np.ones((1, 2), np.uint8)], {"pad_value": -1}, ArgumentError, "expected a pad that"),
        (
            [rectangle([[1]], 2), np.array([[1, 2], [PAD, 2]])],
            {"pad_value": PAD},
            ArgumentError,
            "row 1, token 1: expected pads of -7 behind the numbers of a token",
        ),
        (
            stack_or_nest([torch.ones(1, 2, 2)], always_nest=True),
            {},
            ArgumentError,
            "expected rows (tokens, K), found cells of (2, 2)",
        ),
        (
            stack_or_nest([torch.ones(2, 1)], always_nest=True, ragged_dim=2),
            {},
            ArgumentError,
            "expected ragged dim 1, found 2",
        ),
    ],
)
def test_rows_that_are_no_lists_of_numbers(rows, options, error, text):
    with pytest.raises(error) as raised:
        pack_token_lists(rows, **options)
    assert str(raised.value).startswith("pack_token_lists(")
    assert text in str(raised.value)


IDS = packed([[[1, 2], []], [[3]]])[0]
LARGE = torch.tensor([[2**62, 2**62], [2**62, 2**62]])


@pytest.mark.parametrize("function", [unpack_token_lists, pad_token_lists])
@pytest.mark.parametrize(
    ("values", "counts", "error", "text"),
    [
        ([1], [1], ArgumentTypeError, "(values): expected a jagged tensor"),
        (IDS, [2, 1], ArgumentTypeError, "(counts): expected a jagged tensor"),
        (torch.tensor(1), torch.tensor([1]), ArgumentTypeError, "(values): expected a jagged"),
        (IDS, torch.ones(2, 1), ArgumentTypeError, "(counts): expected integers, found"),
        (IDS, torch.ones(2, 1, dtype=torch.bool), ArgumentTypeError, "expected integers, found"),
        (IDS, torch.tensor([2, 1]), ArgumentError, "(counts): expected jagged (N, tokens) or (N"),
        (IDS.values(), torch.tensor([[3]]), ArgumentError, "expected (tokens,) of one row"),
        (IDS, torch.tensor([[2]]), ArgumentError, "(counts): expected 2 rows like values, found 1"),
        (IDS, torch.tensor([[2], [2]]), ArgumentError, "row 1: expected counts that add up to its"),
        (IDS, torch.tensor([[3], [0]]), ArgumentError, "row 0: expected counts that add up to its"),
        (IDS, LARGE, ArgumentError, f"add up to its 2 values, found {2**63}"),
        (IDS, torch.tensor([[2, 0], [2, -1]]), ArgumentError, "row 1, token 1: expected a count"),
        (
            IDS,
            stack_or_nest([torch.tensor([[2]]), torch.tensor([[1]])], always_nest=True),
            ArgumentError,
            "expected one count per token, found cells of (1,)",
        ),
        (IDS.values(), torch.tensor([1, 1]), ArgumentError, "(counts): expected counts that add"),
        (IDS.values(), torch.tensor([4, -1]), ArgumentError, "(counts), token 1: expected a count"),
    ],
)
def test_counts_that_are_not_those_of_the_values(function, values, counts, error, text):
    with pytest.raises(error) as raised:
        function(values, counts)
    assert str(raised.value).startswith(f"{function.__name__}(")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"width": 1}, "(values), row 0, token 0: expected at most width=1 numbers per token"),
        ({"width": -1}, "(width): expected 0 or more, found -1"),
        ({"pad_value": 0.5}, "(pad_value): expected a pad that torch.int64 holds, found 0.5"),
    ],
)
def test_rectangles_that_cannot_be(options, text):
    with pytest.raises(ArgumentError) as raised:
        pad_token_lists(*pack_token_lists([[[1, 2], []], [[3]]]), **options)
    assert text in str(raised.value)
