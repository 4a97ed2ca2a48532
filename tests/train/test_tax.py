"""The padding tax says what messages weigh, under every option."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import BatchedDataDict, concat_rows, encode, pack_jagged_fields, padding_tax
from jagcodec.errors import WireFormatError
from jagcodec.testing import jagged_batches
from jagcodec.train.tax import ColumnTax, PaddingTax
from tests.helpers import MESSAGES, nested, rollout, rollouts, size

FORMS = {"wire": [], "narrow": ["narrow"], "elide": ["elide"], "both": ["narrow", "elide"]}
measured: Any = partial(padding_tax, options=True)  # of which no size is None


def check_sums(tax, value, **options):
    """Every sum is the size of a message that was made by itself."""
    for name, form in FORMS.items():
        on: Any = dict.fromkeys(form, True)
        total = getattr(tax.total, f"{name}_bytes")
        assert total == size(encode(value, **options, **on)), name
        parts = [getattr(part, f"{name}_bytes") for part in (*tax.columns, tax.overhead)]
        assert sum(parts) == total
        assert min(parts) >= 0
    assert tax.total.padded_bytes == sum(column.padded_bytes for column in tax.columns)


@settings(max_examples=25)
@given(jagged_batches())
def test_sums_are_the_sizes_of_messages(batch):
    names = batch.token_aligned_fields
    how: Any = {"lengths": batch.lengths, "token_aligned_fields": names}
    td = pack_jagged_fields(batch.fields, **how)
    tax = measured(batch.fields, **how)
    check_sums(tax, td)
    plain = padding_tax(batch.fields, **how)
    assert [c.wire_bytes for c in plain.columns] == [c.wire_bytes for c in tax.columns]
    assert plain.total.narrow_bytes is plain.total.elide_bytes is plain.total.both_bytes is None
    assert tax.rows == len(batch.lengths)
    assert [column.name for column in tax.columns] == list(batch.fields)
    for found in tax.columns:
        column = batch.fields[found.name]
        if isinstance(column, torch.Tensor):
            assert found.padded_bytes == column.numel() * column.itemsize
        if found.name in names:
            assert found.layout == "jagged"
            cell = column.shape[2:].numel() * column.itemsize
            assert found.wire_bytes == int(batch.lengths.sum()) * cell
    assert tax.total.both_bytes <= tax.total.narrow_bytes
    json.dumps(tax.as_dict())


def test_cells_that_columns_share_count_for_the_first():
    td = rollouts()
    tax = measured(td)
    check_sums(tax, td)
    columns = {column.name: column for column in tax.columns}
    # Prompts and responses come before the ids, which are made of them.
    assert columns["input_ids"].elide_bytes < columns["input_ids"].wire_bytes / 10
    assert columns["prompts"].elide_bytes * 3 < columns["prompts"].wire_bytes
    assert columns["attention_mask"].narrow_bytes == -(-columns["attention_mask"].wire_bytes // 64)
    meta = {"step": list(range(5000))}
    with_meta = measured(encode(td, meta=meta))
    check_sums(with_meta, td, meta=meta)
    assert with_meta.columns == tax.columns
    # One column was booked with the ragged group that it shares with none.
    td = TensorDict({"text": np.array(["a", "b"], dtype=object)}, [2])
    assert padding_tax(td).columns[0].wire_bytes == 4


def test_every_form_of_a_batch_weighs_the_same():
    td = rollout()
    td["inner"] = TensorDict({"x": torch.ones(3, 2)}, [3])
    expected = padding_tax(td, options=True)
    frames = encode(td)
    blob = MESSAGES["blob"](frames)
    forms: list[Any] = [
        *(dict(td.items()), bytes(blob), *(form(frames) for form in MESSAGES.values())),
        [np.frombuffer(frame, dtype=np.uint8) for frame in frames],
        torch.frombuffer(blob, dtype=torch.uint8),
        encode(td, narrow=True, checksum=True),  # as it would be made without options
    ]
    for form in forms:
        assert padding_tax(form, options=True) == expected
    assert padding_tax(concat_rows([frames] * 2)).rows == 6
    data = BatchedDataDict({"ids": torch.arange(12).view(3, 4)}, meta_info={"step": 1})
    (column,) = padding_tax(data, options=True).columns
    assert (column.name, column.wire_bytes, column.narrow_bytes) == ("ids", 96, 12)


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(50, 60))
def test_bare_lengths(lengths, width):
    tax = padding_tax(lengths, padded_width=width)
    assert tax.total.padded_bytes == len(lengths) * width * 8
    assert tax.total.wire_bytes == sum(lengths) * 8 + 8 * (len(lengths) + 1)
    assert tax.fill == (sum(lengths) / (len(lengths) * width) if lengths else 1.0)
    array = np.array(lengths, dtype=np.int64)
    for same in (array, list(array), torch.tensor(lengths, dtype=torch.int32)):
        assert padding_tax(same, padded_width=width) == tax


def test_a_width_is_that_of_every_jagged_column():
    inner = TensorDict({"y": torch.ones(2, 4)}, [2])
    td = TensorDict({"x": nested([[1], [1] * 3], torch.float32), "inner": inner}, [2])
    tax = padding_tax(td, padded_width=8)
    found = {column.name: (column.padded_bytes, column.wire_bytes) for column in tax.columns}
    assert found == {"x": (64, 16), "inner.y": (32, 32)}
    assert tax.columns[0].saved_percent == 75.0
    assert tax.fill == 0.25
    padded = {"x": torch.ones(2, 20)}
    how: Any = {"lengths": [1, 3], "token_aligned_fields": ["x"]}
    assert padding_tax(padded, **how).total.padded_bytes == 160
    assert padding_tax(padded, padded_width=8, **how).total.padded_bytes == 64


def test_the_table_is_for_people():
    words = np.array(["a", "b"], dtype=object)
    fields = {"ids": torch.ones(2, 100, dtype=torch.int64), "words\n\x1b[31m": words}
    tax = padding_tax(fields, lengths=torch.tensor([10, 100]))
    lines = str(tax).splitlines()
    assert lines[0] == "2 rows, 55.0% of the padded cells are tokens"
    assert lines[2].split() == ["ids", "jagged", "1,600", "880", "45.0%"]
    assert lines[3].split()[:2] == [r"words\n\x1b[31m", "object"]
    assert lines[-1].startswith("total")
    lines = str(padding_tax(fields, lengths=[10, 100], options=True)).splitlines()
    head = "column layout padded B wire B narrow B elide B both B saved"
    assert lines[1].split() == head.split()
    assert lines[-1].startswith("encode(..., narrow=True) saves ")


def test_the_fewest_options_that_save_most():
    for column, advice in (
        (torch.rand(50, 50, dtype=torch.float64), "No option of encode saves 5% of the bytes."),
        (torch.randint(256, 1000, (50, 50)), "encode(..., narrow=True) saves 7"),
        (torch.ones(50, 1).expand(50, 500), "encode(..., elide=True) saves 9"),
    ):
        td = pack_jagged_fields({"x": column}, lengths=[column.shape[1]] * 50)
        assert padding_tax(td, options=True).advice.startswith(advice)


@pytest.mark.parametrize(
    ("narrow", "elide", "both", "option"),
    [
        (300, 340, 300, "narrow=True"),  # of two single options, the one that saves more
        (340, 300, 300, "elide=True"),
        (300, 300, 300, "narrow=True"),
        (600, 600, 300, "narrow=True, elide=True"),
    ],
)
def test_options_are_counted_not_their_letters(narrow, elide, both, option):
    column = ColumnTax("x", "jagged", 2000, 1000, narrow, elide, both)
    overhead = ColumnTax("", "", 0, 0, 0, 0, 0)
    advice = PaddingTax(1, 1.0, (column,), overhead).advice
    assert advice == f"encode(..., {option}) saves 70% of the bytes."


def test_bad_arguments():
    for call, error, text in (
        (lambda: padding_tax([3, 9], padded_width=8), ValueError, "at most 8.*found 9"),
        (lambda: padding_tax(rollouts(), padded_width=8), ValueError, "'prompts'.*at most 8"),
        (lambda: padding_tax([3], padded_width=-1), ValueError, "padded_width.*0 or more"),
        (lambda: padding_tax([3], padded_width="8"), TypeError, "padded_width"),  # type: ignore[arg-type]
        (lambda: padding_tax([3], padded_width=True), TypeError, "padded_width"),
        (lambda: padding_tax([3], lengths=[3]), ValueError, r"tax\(lengths\): expected padded"),
        (
            lambda: padding_tax({"ids": [[3]]}, token_aligned_fields=["ids"]),
            *(
                ValueError,
                r"tax\(token_aligned_fields\): expected padded columns and",
            ),
        ),
        (lambda: padding_tax([-1]), ValueError, "row 0"),
        (lambda: padding_tax(["x"]), TypeError, "lengths"),
        (lambda: padding_tax([rollouts(), rollouts()]), TypeError, "one batch.*concat_rows"),
        (lambda: padding_tax([encode(rollouts())] * 2), TypeError, "one batch.*concat_rows"),
        (lambda: padding_tax(7), TypeError, "lengths"),
        (lambda: padding_tax([2**62] * 3), ValueError, "add up"),
        (lambda: padding_tax(b"nonsense"), WireFormatError, "jagcodec"),
        (lambda: padding_tax(encode({"step": 3})), WireFormatError, "send columns with encode_"),
    ):
        with pytest.raises(error, match=text):
            call()
