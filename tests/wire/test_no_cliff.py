"""What a column costs depends on that column alone: calls of Python are counted, not time."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import encode, encode_fields, encode_rows, open_wire
from jagcodec.columns.batch import FieldSchema
from tests.helpers import nested

PACKAGE = str(Path(jagcodec.__file__).parent)
PLAIN = 32
A_FEW = 8  # calls, such as those of a cache that is filled, or of a list that grows


def calls(call):
    """How many functions of the package are entered, once everything is known."""
    for _ in range(3):
        call()
    count = 0

    def entered(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def assert_no_cliff(encode_columns, plain, odd):
    """`encode_columns` takes columns by name: 32 plain ones, an odd one, both, or none."""
    many = {f"plain{i}": plain for i in range(PLAIN)}
    both = calls(lambda: encode_columns({**many, "odd": odd}))
    alone, without = (
        calls(lambda: encode_columns({"odd": odd})),
        calls(lambda: encode_columns(many)),
    )
    empty = calls(lambda: encode_columns({}))
    assert both <= without + alone - empty + A_FEW, (both, without, alone, empty)


def stack(*payloads):
    return NonTensorStack(*map(NonTensorData, payloads))


SPLITS = torch.tensor([0, 2, 3])
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "meta": {"meta": {"step": 3}},
    "default": {"default": str},
    "allow_pickle": {"allow_pickle": True},
    "narrow": {"narrow": True},
    "elide": {"elide": True},
    "checksum": {"checksum": True},
}

LEAVES: dict[str, Any] = {
    "jagged": nested([[1, 2], [3]]),
    "bfloat16": nested([[1, 2], [3]], torch.bfloat16),
    "holes": torch.nested.nested_tensor_from_jagged(
        torch.arange(6), torch.tensor([0, 2, 4]), lengths=torch.tensor([1, 2])
    ),
    "a later ragged dim": torch.nested.nested_tensor_from_jagged(
        torch.arange(6).view(2, 3), SPLITS, jagged_dim=2
    ),
    "followed by autograd": nested([[1, 2], [3]], torch.float32).requires_grad_(),
    "transposed": torch.arange(6).view(3, 2).T,
    "strided nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": torch.eye(2).to_sparse_coo(),
    "sets": stack({1}, {2}),
    "dicts": stack({"a": 1}, None),
    "arrays": stack(np.ones(3), None),
    "arrays of two ranks": stack(np.ones(3), np.ones((1, 2))),
    "tuples": stack((1, 2), (3,)),
    "one for all": NonTensorData({"a": 1}, batch_size=[2]),
    "nested batch": TensorDict({"x": torch.ones(2), "y": nested([[1], [2]])}, [2]),
    "nested odd batch": TensorDict({"x": stack({1}, {2})}, [2]),
    "lazy": LazyStackedTensorDict(
        TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(2)})
    ),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LEAVES)
def test_an_odd_leaf_costs_what_it_costs_alone(kind, options):
    if options == "default" and kind == "lazy":
        pytest.skip("its members have no rows to be listed")
    chosen = OPTIONS[options]

    def encoded(columns):
        return encode(TensorDict(columns, [2]), **chosen)

    for plain in (torch.ones(2), nested([[1, 2], [3]]), stack("a", "b")):
        assert_no_cliff(encoded, plain, LEAVES[kind])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["jagged", "bfloat16", "transposed", "nested batch", "sets"])
def test_an_odd_field_costs_what_it_costs_alone(kind, options):
    chosen = OPTIONS[options]

    def encoded(columns):
        return encode_fields(columns, **chosen)

    assert_no_cliff(encoded, torch.ones(2), LEAVES[kind])


ONE_DIM = FieldSchema("jagged", torch.int64, (2, None))
ROWS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "lists": ([[1, 2], [3]], {}),
    "lists of floats as float64": ([[1.5], [2.5]], {"dtypes": {"odd": torch.float64}}),
    "lists as bfloat16": ([[1.5], [2.5]], {"dtypes": {"odd": torch.bfloat16}}),
    "arrays of another dtype": ([np.ones(2, np.float16), np.ones(3, np.float16)], {}),
    "bfloat16": ([torch.ones(2, dtype=torch.bfloat16)] * 2, {}),
    "a FieldSchema": (
        [[1], [2]],
        {"dtypes": {"odd": FieldSchema("jagged", torch.int64, (2, None))}},
    ),
    "experts": (
        [np.ones((2, 3, 2), np.uint8), np.ones((2, 4, 2), np.uint8)],
        {"ragged_dims": {"odd": 2}},
    ),
    "rectangular": ([[1, 2], [3, 4]], {"rectangular": ["odd"]}),
    "images": ([np.ones((2, 3, 2), np.uint8), None], {"dtypes": {"odd": object}}),
    "sets": ([{1}, {2}], {}),
    "calls": ([{"name": "f"}, None], {}),
    "messages": ([[{"role": "user"}], [{"role": "user"}]], {}),
    "tuples": ([("a", "b"), ("c",)], {}),
    "narrow": ([[1, 2], [3]], {"narrow": ["odd"]}),
    "same length": ([[1, 2], [3]], {"same_length": ["odd"]}),
    "an unknown type": ([object(), object()], {"default": lambda value: "x"}),
}


@pytest.mark.parametrize("kind", ROWS)
def test_an_odd_column_of_rows_costs_what_it_costs_alone(kind):
    odd, options = ROWS[kind]

    def encoded(columns):
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        named: Any = {
            option: [name for name in value if name in columns]
            if isinstance(value, list)
            else {name: x for name, x in value.items() if name in columns}
            if isinstance(value, dict)
            else value
            for option, value in options.items()
        }
        return encode_rows(rows or [{}, {}], **named)

    for plain in ([[1, 2], [3]], [np.ones(2), np.ones(1)], ["a", "b"], [0.5, 1.5]):
        assert_no_cliff(encoded, plain, odd)


def test_an_odd_column_that_is_sent_on_costs_what_it_costs_alone():
    ids, words = nested([[1, 2], [3]]), stack({1}, {2})
    columns = {**{f"plain{i}": ids for i in range(PLAIN)}, "words": words}
    batch = open_wire(encode(TensorDict(columns, [2]))).rows([1])
    plain = [f"plain{i}" for i in range(PLAIN)]
    both, without, alone, empty = (
        calls(lambda names=names: encode(batch.select(names)))
        for names in ([*plain, "words"], plain, ["words"], [])
    )
    assert both <= without + alone - empty + A_FEW, (both, without, alone, empty)
