"""`columns`: what holds rows is asked once, and rows of a batch are copied in one call."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack

from jagcodec import concat_rows, open_wire, plan_micro_batches, select_rows
from jagcodec.columns import join, join_tensors
from jagcodec.columns.batch import CellRows, FieldSchema, OneObject
from jagcodec.columns.held import column_of
from jagcodec.rows import copy_bytes
from jagcodec.rows.nested import view_of
from jagcodec.rows.varlen import varlen_column
from tests.wire.values import Turn

TURN: Any = Turn
JAGGED = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
VIEW = view_of(JAGGED, "ids")
TD = TensorDict({"x": torch.arange(2)}, batch_size=[2])

HOLDERS = {
    "Dense": torch.arange(2),
    "Sparse": torch.eye(2).to_sparse(),
    "StridedNested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "Jagged": JAGGED,
    "Packed": varlen_column(VIEW, "ids"),
    "ViewColumn": VIEW,
    "Unbatched": UnbatchedTensor(torch.ones(3)),
    "Array": np.arange(2),
    "ObjectList": ["a", "b"],
    "CellsColumn": CellRows(VIEW),
    "OneObjectColumn": OneObject("a", 2),
    "Payloads": NonTensorStack(NonTensorData("a"), NonTensorData("b")),
    "DictBatch": {"x": torch.arange(2)},
    "TensorDictBatch": TD,
    "TensorClass": TURN(tokens=torch.arange(2), batch_size=[2]),
    "LazyStack": lazy_stack([TD, TD]),
    "Open": open_wire(TD),
    "HeldColumn": object(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_each_type_of_column_has_a_class(name):
    assert type(column_of(HOLDERS[name])).__name__ == name


def test_rows_of_all_columns_of_a_batch_are_copied_in_one_call():
    columns: dict[str, Any] = {
        "ids": JAGGED,
        "packed": HOLDERS["Packed"],
        "reward": torch.tensor([1.0, 2.0]),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    for call, wanted in (
        (lambda: select_rows(columns, [1, 0]), [2.0, 1.0]),
        (lambda: concat_rows([columns, columns]), [1.0, 2.0, 1.0, 2.0]),
    ):
        with mock.patch.object(join, "gathered_cells", wraps=copy_bytes.gathered_cells) as gathered:
            made = call()
        assert gathered.call_count == 1
        assert made["reward"].tolist() == wanted


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray, lambda rows: {"x": rows}])
def test_restored_rows_are_copied_once(make):
    batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
    results = [
        make(np.stack([rows, rows * 10], 1).astype(np.int64)) for steps in batches for rows in steps
    ]
    with (
        mock.patch.object(join_tensors, "cat_bits", side_effect=AssertionError),
        mock.patch.object(join_tensors, "take_rows", side_effect=AssertionError),
    ):
        restored = batches.restore(results)
    found = restored["x"] if isinstance(restored, dict) else restored
    assert found.tolist() == [[row, row * 10] for row in range(6)]


def test_a_range_of_rows_aliases_and_a_joined_column_does_not():
    rows = torch.arange(4)
    assert select_rows({"x": rows}, slice(1, 3))["x"].data_ptr() == rows[1:].data_ptr()
    assert concat_rows([{"x": rows}])["x"].data_ptr() != rows.data_ptr()


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"])
def test_the_schema_names_the_layout_of_a_sparse_tensor(layout):
    block = (1, 1) if layout == "sparse_bsr" else None
    tensor = torch.eye(2).to_sparse(layout=getattr(torch, layout), blocksize=block)
    assert open_wire({"x": tensor}).schema["x"] == FieldSchema(layout, None, None)
