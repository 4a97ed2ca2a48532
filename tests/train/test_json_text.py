"""`json_text`: JSON that gives an equal value back, or an error with the place and a remedy."""

import enum
import re
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import ArgumentError
from jagcodec.train.json_text import json_text
from jagcodec.wire.spec import MAX_DEPTH
from tests import odd
from tests.strategies import stdlib_values, trees
from tests.strict_json import DTYPES, outcome, strictly

# Keys that are often one text, and text whose surrogates often meet.
_text = st.text(alphabet="1au\ud83d\ude00\U0001f600", max_size=3)
_keys = _text | st.sampled_from([1, 1.0, True, None, "1", "1.0", "true", "null", np.int64(1), 0.5])
_leaves = st.none() | st.booleans() | st.integers() | st.floats() | _text
JSON_LIKE: st.SearchStrategy[Any] = st.recursive(
    _leaves | st.lists(_leaves).map(lambda items: np.array(items, object)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=6,
)


def written(value):
    """What a strict reader has of the JSON of a value; None if there is an error."""
    try:
        return repr(strictly(json_text(value, "the place", "the remedy")))
    except ArgumentError as raised:
        error = raised
    assert error.path.startswith("the place")
    assert error.detail.endswith("; the remedy")
    return None


def known(value):
    """Whether the oracle knows all dtypes of tensors in a value."""
    if isinstance(value, torch.Tensor):
        return value.is_nested or value.dtype in DTYPES
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.reshape(-1).tolist()
    held = value.values() if isinstance(value, dict) else value
    return not isinstance(value, (dict, list, tuple)) or all(map(known, held))


@given(JSON_LIKE | trees().filter(known) | stdlib_values())
def test_a_value_comes_back_equal_or_is_refused(value):
    assert written(value) == outcome(value)


Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, [2.0, -0.0]), "[1, [2.0, -0.0]]"),
        ({1: "a", None: True, False: None, 0.5: 0}, None),
        ({"a": np.int64(1), "b": np.float32(0.5), "c": np.bool_(True)}, None),
        ([np.arange(2), np.array(["a"]), np.array(3), np.str_("b")], '[[0, 1], ["a"], 3, "b"]'),
        (torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True), "[[0.5]]"),
        ({"a": "\ud83d", "b\ude00": "\U0001f600"}, None),
        (OrderedDict(b=1, a=2), '{"b": 1, "a": 2}'),
        ([Point(1, 2), Level.LOW], "[[1, 2], 1]"),
        ([2**70, *[0] * 3], None),
    ],
)
def test_values_that_json_has(value, text):
    made = json_text(value, "", "")
    assert text in (None, made)
    assert repr(strictly(made)) == outcome(value)


@pytest.mark.parametrize(
    ("value", "path", "found"),
    [
        (float("nan"), "x", "a number that JSON has, found nan"),
        ({"a": [0, {"b": [1.0, float("-inf")]}]}, "x, $.a[1].b[1]", "found -inf"),
        ({"a b": {1: b"c"}}, "x, $['a b'][1]", "a value that JSON has, found b'c'"),
        ([{1: 0, "1": 0}], "x, $[0]", "keys that differ as text, found 1 and '1'"),
        ([{None: 0, "null": 0}], "x, $[0]", "found None and 'null'"),
        ([{"true": 0, True: 0}], "x, $[0]", "found 'true' and True"),
        ({(1, 2): 0}, "x", r"keys that are text, numbers, bools or None, found \[1, 2\]"),
        ({float("nan"): 0}, "x, $[nan]", "a number that JSON has, found nan"),
        (["\ud83d\ude00"], "x, $[0]", "text that JSON gives back, found .* JSON joins"),
        ({"\ud83d\ude00": 0}, "x, $", "text that JSON gives back"),
        ([np.ones(1, "g")], "x, $[0]", "an array or a scalar .* float128|longdouble"),
        ([np.datetime64("2026-01-01")], "x, $[0]", r"datetime64\[D\]"),
        ([np.ma.masked_array([1])], "x, $[0]", r"found MaskedArray .* call \.filled\(fill\)"),
        ([torch.eye(2).to_sparse()], "x, $[0]", "a tensor that JSON has, found .*sparse_coo"),
        ([torch.ones(2, dtype=torch.complex64)], "x, $[0]", "complex64"),
        ([odd.LONG, 1], "x, $[0]", "a number that JSON has, found an int of"),
        ([np.zeros((2**40, 0))], "x, $[0]", "an array of fewer empty lists"),
    ],
)
def test_errors_name_the_way_to_a_value(value, path, found):
    with pytest.raises(ArgumentError, match=f"expected .*{found}.*; do this$") as caught:
        json_text(value, "x", "do this")
    assert caught.value.path.startswith(path)
    assert caught.value.reason == "bad_type"


def itself():
    """A list, a dict and an array that hold themselves."""
    made: list[Any] = [[], {}, np.empty((), object)]
    made[0].append(made[0])
    made[1]["a"] = made[1]
    made[2][()] = made[2]
    return made


def test_levels_end():
    for value in itself():
        with pytest.raises(ArgumentError, match=f"at most {MAX_DEPTH} levels, found more"):
            json_text(value, "", "")
    deepest: Any = 0
    for _ in range(MAX_DEPTH):
        deepest = [deepest]
    assert strictly(json_text(deepest, "", "")) == deepest


@pytest.mark.filterwarnings("ignore")
def test_odd_objects_are_written_or_refused():
    values = [*odd.python_values(), *odd.array_values(), *odd.tensor_values(), *odd.batch_values()]
    for value in (value for value in values if value is not odd.HUGE):
        for held in (value, [value], {"a": value}):
            written(held)


def test_texts_of_errors_are_short():
    with pytest.raises(ArgumentError) as caught:
        json_text({"k" * 10_000: [b"x" * 10_000]}, "x", "do this")
    assert re.search(r"; do this$", caught.value.detail)
    assert len(str(caught.value)) < 1000
