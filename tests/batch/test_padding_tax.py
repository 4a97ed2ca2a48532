"""The padding tax adds up."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import encode, pack_jagged_fields, padding_tax, stack_or_nest
from jagcodec.testing import jagged_batches


@given(jagged_batches())
def test_a_batch_costs_what_its_message_weighs(batch):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    tax = padding_tax(
        batch.fields,
        lengths=batch.lengths,
        token_aligned_fields=batch.token_aligned_fields,
    )
    assert tax.rows == len(batch.lengths)
    assert tax.wire_bytes == sum(memoryview(frame).nbytes for frame in encode(td))
    assert [field.name for field in tax.fields] == list(batch.fields)
    assert tax.padded_bytes == sum(field.padded_bytes for field in tax.fields)
    assert tax.saved_bytes == tax.padded_bytes - tax.wire_bytes
    for field in tax.fields:
        column = batch.fields[field.name]
        if isinstance(column, torch.Tensor):
            assert field.padded_bytes == column.numel() * column.itemsize
        if field.name in batch.token_aligned_fields:
            assert field.layout == "jagged"
            cell = column.shape[2:].numel() * column.itemsize
            assert field.wire_bytes == int(batch.lengths.sum()) * cell


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(50, 60))
def test_bare_lengths(lengths, width):
    tax = padding_tax(lengths, padded_width=width, bytes_per_token=4)
    assert tax.padded_bytes == len(lengths) * width * 4
    assert tax.wire_bytes == sum(lengths) * 4 + 8 * (len(lengths) + 1)
    assert tax.fill == (sum(lengths) / (len(lengths) * width) if lengths else 1.0)
    assert padding_tax(torch.tensor(lengths, dtype=torch.int32)).rows == len(lengths)


def test_a_batch_as_it_arrives():
    inner = TensorDict({"y": torch.ones(2, 4)}, [2])
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(3)]), "inner": inner}, [2])
    tax = padding_tax(td, padded_width=8)
    assert [(f.name, f.padded_bytes, f.wire_bytes) for f in tax.fields] == [
        ("x", 64, 16),
        ("inner.y", 32, 32),
    ]
    assert tax.fields[0].saved_percent == 75.0
    assert tax.fill == 0.25


def test_the_table_is_for_people():
    words = np.array(["a", "b"], dtype=object)
    fields = {"ids": torch.ones(2, 100, dtype=torch.int64), "words": words}
    text = str(padding_tax(fields, lengths=torch.tensor([10, 100])))
    lines = text.splitlines()
    assert lines[0] == "2 rows, 55.0% of the padded cells are tokens"
    assert lines[2].split() == ["ids", "jagged", "1,600", "880", "45.0%"]
    assert lines[3].split()[:2] == ["words", "object"]
    assert lines[-1].startswith("total")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: padding_tax([3, 9], padded_width=8), ValueError, "at most 8.*found 9"),
        (lambda: padding_tax([-1]), ValueError, "row 0"),
        (lambda: padding_tax([0.5]), TypeError, "integer"),  # type: ignore[list-item]
        (lambda: padding_tax(["x"]), TypeError, "lengths"),  # type: ignore[list-item]
        (lambda: padding_tax(7), TypeError, "lengths"),  # type: ignore[arg-type]
        (lambda: padding_tax(TensorDict({}, [])), ValueError, "batch dim"),
        (lambda: padding_tax([2**62] * 3), ValueError, "add up"),
        (lambda: padding_tax([1], bytes_per_token=0), ValueError, "bytes_per_token"),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()
