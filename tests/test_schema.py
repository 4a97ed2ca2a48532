"""`check_schema`: the columns that a stage expects, and what it is told when others come."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    concat_rows,
    encode,
    materialize,
    open_wire,
    pack_rows,
    stack_or_nest,
    to_blob,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, WireFormatError
from jagcodec.schema import check_schema
from jagcodec.types import FieldSchema, PackedColumn
from tests.helpers import Store, nested


def batch(rows=2):
    ids = [[1] * (n + 1) for n in range(rows)]
    td = pack_rows({"ids": ids, "reward": [0.5] * rows, "text": [*map(str, range(rows))]})
    positions = [torch.ones(3, n + 1) for n in range(rows)]
    td["positions"] = stack_or_nest(positions, always_nest=True, ragged_dim=2)
    td["grid"] = torch.ones(rows, 2, 4)
    td["nested"] = TensorDict({"x": torch.ones(rows)}, [rows])
    td["views"] = torch.nested.nested_tensor([torch.ones(1, n + 1) for n in range(rows)])
    td["sparse"] = torch.ones(rows, 2).to_sparse()
    return td


SCHEMA = open_wire(encode(batch())).schema


def test_every_form_of_a_batch_passes_whatever_its_rows():
    td = batch(5)
    frames = encode(td)
    for form in (td, frames, bytes(to_blob(frames)), open_wire(frames)):
        check_schema(form, SCHEMA)
    check_schema({**dict(td.items()), "text": NonTensorStack(*map(str, range(5)))}, SCHEMA)
    columns = materialize(td.select("ids", "reward", "text"), layout="jagged")
    check_schema(columns, {name: SCHEMA[name] for name in columns})
    store = Store(encode(TensorDict({"x": torch.ones(9999)}, [9999])))
    check_schema(open_wire(store), {"x": FieldSchema("tensor", torch.float32, (None,))})
    assert store.fetched < 2000  # nothing of the cells is read


def test_a_join_passes_only_if_each_of_its_messages_does():
    frames = [encode(TensorDict({"x": torch.ones(2, 3)}, [2])) for _ in range(3)]
    schema = open_wire(frames[0]).schema
    check_schema(concat_rows(frames), schema)
    for other in (torch.ones(2, 3).double(), torch.ones(2, 4), nested([[1.0], [2.0]])):
        whole = concat_rows([*frames, encode(TensorDict({"x": other}, [2]))])
        with pytest.raises(ArgumentError, match=r"concat_rows\['x'\] of batch 3: "):
            check_schema(whole, schema)


PARTS = torch.tensor([0, 2, 3], dtype=torch.int32), 2, torch.tensor([0, 1, 0])
COLUMNS = {
    "jagged": nested([[1, 2], [3]]),
    "tensor": torch.ones(2, 3),
    "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "sparse": torch.eye(2).to_sparse_coo(),
    "packed": PackedColumn(torch.ones(3), *PARTS),
    "packed, dim 2": PackedColumn(torch.ones(2, 3), *PARTS),
    "list": ["a", "b"],
    "list of tensors": [torch.ones(1), torch.ones(2)],
    "dict of lists": {"y": ["a", "b"]},
    "array": np.ones((2, 3)),
    "array of objects": np.array(["a", None], dtype=object),
    "array of texts": np.array(["a", "bb"]),
    "stack": NonTensorStack("a", "b"),
    "payload": NonTensorData("x", batch_size=[2]),
    "dict": {"x": torch.ones(2), "y": ["a", "b"]},
    "TensorDict": TensorDict({"y": torch.ones(2)}, [2]),
    "BatchedDataDict": BatchedDataDict({"x": torch.ones(2)}),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_every_form_of_a_column_has_one_schema(column):
    for others in ({}, {"reward": torch.ones(2)}):  # without tensors, a batch may be one document
        plain = BatchedDataDict({"x": column, **others})
        forms: list[Any] = [plain, encode(plain), open_wire(plain), dict(plain)]
        schemas = [dict(open_wire(form).schema) for form in forms[:3]]
        assert schemas == [schemas[0]] * 3
        for form in forms:
            check_schema(form, schemas[0])


def test_a_column_that_differs_is_named():
    for name, column, reason, text in (
        ("more", torch.ones(2), "new_field", "expected no such column, found one"),
        ("reward", None, "no_such_field", "expected it, found none"),
        ("reward", torch.ones(2).double(), "bad_dtype", "float32, found torch.float64"),
        ("reward", NonTensorStack("a", "b"), "bad_type", "kind 'tensor', found 'object'"),
        ("ids", torch.ones(2, 3).long(), "bad_type", "kind 'jagged', found 'tensor'"),
        ("grid", torch.ones(2, 2, 5), "bad_shape", r"shape \[2, 4\], found \[2, 5\]"),
        ("grid", torch.ones(2, 2), "bad_shape", r"shape \[2, 4\], found \[2\]"),
        ("sparse", torch.ones(2, 2), "bad_type", "kind 'sparse_coo', found 'tensor'"),
        ("views", torch.ones(2, 2), "bad_type", "kind 'strided_nested', found 'tensor'"),
        ("nested", torch.ones(2), "bad_type", "kind 'tensordict', found 'tensor'"),
    ):
        td = batch().exclude(name)
        if column is not None:
            td[name] = column
        for source in (td, encode(td)):
            with pytest.raises(ArgumentError, match=text) as raised:
                check_schema(source, SCHEMA)
            assert raised.value.args[:2] == (reason, f"check_schema: column {name!r}")


def test_columns_may_be_optional_and_none_is_any():
    td = batch().exclude("text", "grid")
    check_schema(td, SCHEMA, optional=["grid", "text", "reward"])
    with pytest.raises(ArgumentError, match="column 'grid'"):
        check_schema(td, SCHEMA, optional=["text"])
    grids = FieldSchema("tensor", torch.float32, (None, None, 4))
    check_schema(batch().select("ids"), {"ids": FieldSchema("jagged", None, None)})
    check_schema({"grid": torch.ones(2, 7, 4)}, {"grid": grids})
    with pytest.raises(ArgumentError, match=r"shape \[None, 4\], found \[7, 5\]"):
        check_schema({"grid": torch.ones(2, 7, 5)}, {"grid": grids})
    with pytest.raises(ArgumentError, match="kind 'tensor', found 'array'"):
        check_schema({"grid": np.ones((2, 7, 4), dtype=np.float32)}, {"grid": grids})


def test_mistakes_of_the_caller_and_of_the_message():
    damaged = bytes(to_blob(encode(batch())))[:-1]
    for source, schema, optional, error, text in (
        (3, SCHEMA, (), ArgumentTypeError, r"check_schema\(batch\)"),
        ({}, {"ids": torch.int64}, (), ArgumentTypeError, r"\(schema\): expected a mapping"),
        (batch(), SCHEMA, ["answer"], ArgumentKeyError, r"check_schema\(optional\)\('answer'\)"),
        (batch(), SCHEMA, "text", ArgumentTypeError, "put it in a list"),
        (damaged, SCHEMA, (), WireFormatError, "expected"),
    ):
        with pytest.raises(error, match=text):
            check_schema(source, schema, optional=optional)  # type: ignore[arg-type]
