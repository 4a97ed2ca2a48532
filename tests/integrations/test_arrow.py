"""`to_arrow`: the rows of every form of a batch, as other tools read them."""

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

import jagcodec
from jagcodec import encode, materialize, pack_jagged_fields, pack_rows, stack_or_nest, to_rows
from jagcodec.testing import jagged_batches
from tests.helpers import MESSAGES

pytest.importorskip("pyarrow")
from jagcodec.integrations.arrow import to_arrow

SAMPLES = [
    {"ids": [5, 6, 7], "reward": 0.5, "grid": torch.ones(2, 2), "text": "a", "raw": b"\x00"},
    {"ids": [8], "reward": 1.0, "grid": torch.zeros(2, 2), "text": None, "raw": b""},
]

FORMS: dict[str, Any] = {
    "TensorDict": lambda td: td,
    "dict of columns": lambda td: dict(td.items()),
    "BatchedDataDict": lambda td: materialize(td, layout="jagged"),
    "packed columns": lambda td: materialize(td, layout="packed"),
    "narrow frames": lambda td: encode(td, narrow=True),
    **{name: lambda td, form=form: form(encode(td)) for name, form in MESSAGES.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_gives_its_rows(form):
    td = pack_rows(SAMPLES)
    assert to_arrow(FORMS[form](td)).to_pylist() == to_rows(td, as_="list")


@pytest.mark.parametrize(
    "kind", [torch.nn.Parameter, torch.nn.Buffer, MemoryMappedTensor.from_tensor]
)
def test_plain_tensors_of_every_type_are_columns(kind):
    assert to_arrow({"x": kind(torch.eye(2))}).to_pylist() == [{"x": [1, 0]}, {"x": [0, 1]}]


def test_a_batch_without_columns_has_rows_in_a_batch():
    batch = TensorDict({"n": TensorDict({"m": TensorDict({}, [2])}, [2])}, [2])
    for form in (batch, encode(batch)):
        assert to_arrow(form).to_pylist() == to_rows(form) == [{"n": {"m": {}}}] * 2


FLOATS = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = {torch.float32, torch.float64, torch.bool, torch.uint8, torch.uint64, *FLOATS} | {
    *(torch.int8, torch.int16, torch.int32, torch.int64)
}


def bits_of(values):
    """Numbers in nested lists, floats by their bits; a NaN of numpy's is any NaN in Python."""
    if isinstance(values, list):
        return [bits_of(value) for value in values]
    if isinstance(values, float | np.float16):  # which older versions of pyarrow return
        return "nan" if values != values else struct.pack("<d", values)
    return values


@given(jagged_batches())
def test_jagged_columns_are_their_rows(batch):
    names = batch.token_aligned_fields
    td = pack_jagged_fields(batch.fields, lengths=batch.lengths, token_aligned_fields=names)
    columns = {
        name: td[name]
        for name in sorted(names)
        if td[name].dtype in DTYPES and 0 not in td[name].shape[2:]
    }
    table = to_arrow(columns)
    for name, column in columns.items():
        wide = torch.float32 if column.dtype in FLOATS else column.dtype
        rows = [row.to(wide).tolist() for row in column.unbind()]
        assert bits_of(table[name].to_pylist()) == bits_of(rows)


MROPE = stack_or_nest([torch.arange(6).view(2, 3), torch.arange(2).view(2, 1)], ragged_dim=2)


def test_columns_of_every_kind():
    for column, rows in (
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), [1.5, -2.0]),
        (torch.tensor([1.5, 2.0]).to(torch.float8_e5m2), [1.5, 2.0]),
        (torch.tensor([True, False]), [True, False]),
        (np.array([1, 2], dtype=np.uint64), [1, 2]),
        (MROPE, [[[0, 1, 2], [3, 4, 5]], [[0], [1]]]),
        (torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 1)]), [[[1, 1]], [[1], [1]]]),
        ([{"role": "user"}, None], ['{"role": "user"}', None]),
        ([None, None], [None, None]),
        (["a", 1], ['"a"', "1"]),
        (TensorDict({"x": torch.ones(2)}, [2]), [{"x": 1.0}, {"x": 1.0}]),
        (NonTensorData("gsm8k", batch_size=[2]), ["gsm8k", "gsm8k"]),
        (NonTensorStack("a", "b"), ["a", "b"]),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
    ):
        td = TensorDict({}, [2]) if not isinstance(column, (list, np.ndarray)) else {}
        td["c"] = column
        assert to_arrow(td)["c"].to_pylist() == rows


ODD: list[Any] = [
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, 2).to_sparse(),
    torch.ones(2, 0),
    torch.empty(2, device="meta"),
    [object(), object()],
    [{"pixels": torch.ones(2)}, None],
    ["\ud800", "b"],
]
NO_BATCHES: list[Any] = [3, None, TensorDict({}, []), {"a": torch.ones(2), "b": torch.ones(3)}]
NO_BATCHES += [LazyStackedTensorDict(TensorDict({}, []), TensorDict({}, []))]


def test_what_cannot_be_a_table_is_named():
    odd = [({"fine": [1, 2], "odd": x}, "column 'odd': .* leave the column out, or") for x in ODD]
    for source, said in (*odd, *((source, r"to_arrow\(batch\)") for source in NO_BATCHES)):
        with pytest.raises(jagcodec.JagcodecError, match=said):
            to_arrow(source)
