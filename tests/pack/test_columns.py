"""Packing a dict of columns."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)

from jagcodec import (
    ArgumentError,
    decode,
    encode,
    encode_fields,
    materialize,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
    to_blob,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.testing import jagged_batches
from tests.oracle import assert_same, rows_of


@given(jagged_batches())
def test_columns_keep_rows_order_and_payloads(batch):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    assert td.batch_size == (len(batch.lengths),)
    assert td.device is None
    assert list(td.keys()) == list(batch.fields)
    for name, column in batch.fields.items():
        leaf = td.get(name)
        if name in batch.token_aligned_fields:
            assert rows_of(leaf) == rows_of(column, batch.lengths.tolist())
        elif isinstance(column, torch.Tensor):
            assert_same(leaf, column)
        elif len(column):
            assert_same(leaf.tolist(), list(column))


def test_columns_packed_together_multiply():
    lengths = torch.tensor([1, 3, 0])
    fields = {"a": torch.ones(3, 3), "b": 2 * torch.ones(3, 8), "r": torch.ones(3)}
    fields["c"] = stack_or_nest([torch.ones(1), torch.ones(3), torch.ones(0)])
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields={"a", "b", "absent"})
    assert (td["a"] * td["b"]).values().tolist() == [2.0] * 4
    assert (td["a"] * td["c"]).values().tolist() == [1.0] * 4


def test_lengths_of_a_jagged_column_keep_its_offsets():
    ids = stack_or_nest([torch.ones(1), torch.ones(3)])
    fields = {"a": torch.ones(2, 4)}
    td = pack_jagged_fields(fields, lengths=ids, token_aligned_fields=["a"])
    assert (td["a"] * ids).values().tolist() == [1.0] * 4
    frames = encode_fields(fields, lengths=ids, token_aligned_fields=["a"])
    assert rows_of(decode(frames)["a"]) == rows_of(td["a"])


def test_without_names_the_shape_decides():
    fields = {"a": torch.ones(2, 3), "b": torch.ones(2, 4), "c": torch.ones(2)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([1, 3]))
    assert [td[name].is_nested for name in fields] == [True, False, False]


def test_with_names_the_shape_does_not_decide():
    td = pack_jagged_fields(
        {"grid": torch.ones(2, 3)}, lengths=torch.tensor([1, 3]), token_aligned_fields=[]
    )
    assert not td["grid"].is_nested


def test_without_lengths_nothing_is_packed():
    words = np.array(["x", None], dtype=object)
    td = pack_jagged_fields({"a": torch.ones(2, 3), "words": words}, lengths=None)
    assert td.batch_size == (2,)
    assert not td["a"].is_nested
    assert td.get("words").tolist() == ["x", None]
    assert pack_jagged_fields({}, lengths=None).batch_size == (0,)


def test_the_batch_is_detached():
    fields = {"a": torch.ones(2, 3, requires_grad=True), "b": torch.ones(2, 5, requires_grad=True)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([1, 3]))
    assert not td["a"].requires_grad
    assert not td["b"].requires_grad


LENGTHS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("column", "error", "text"),
    [
        (torch.ones(3, 2), ValueError, "'bad'.*expected 2 rows.*found 3"),
        (torch.tensor(1.0), ValueError, "'bad'.*0-d"),
        (np.ones(2), TypeError, "'bad'.*from_numpy"),
        (np.array(["a", "b"]), TypeError, "'bad'.*object"),
        (["a", 1], TypeError, "'bad'.*list"),
        (torch.eye(2).to_sparse(), TypeError, "'bad'.*sparse"),
        (TensorDict({}, [2]), TypeError, "'bad'.*TensorDict"),
    ],
)
def test_columns_that_cannot_be_encoded_are_named(column, error, text):
    with pytest.raises(error, match=text):
        pack_jagged_fields({"good": torch.ones(2), "bad": column}, lengths=LENGTHS)


def test_bad_lengths_and_names():
    with pytest.raises(ValueError, match=r"row 0.*-1"):
        pack_jagged_fields({}, lengths=torch.tensor([-1]))
    with pytest.raises(TypeError, match="put it in a list"):
        pack_jagged_fields({}, lengths=LENGTHS, token_aligned_fields="input_ids")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (None, "dict of names"),
        ([torch.ones(2)], "found list"),
        ({1: torch.ones(2)}, "not strings"),
        ({"grid": np.empty((2, 2), dtype=object)}, "numpy.empty"),
        ({"q": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)}, "dequantise"),
    ],
)
def test_fields_that_are_not_valid(fields, text):
    with pytest.raises(TypeError, match=text):
        pack_jagged_fields(fields, lengths=LENGTHS)


def test_a_jagged_column_with_holes_joins_its_rows():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 2, 6]), lengths=torch.tensor([1, 2])
    )
    fields = {"a": torch.ones(2, 3), "b": holes}
    td = pack_jagged_fields(fields, lengths=LENGTHS, token_aligned_fields=["a"])
    assert (td["a"] * td["b"]).values().tolist() == [0.0, 2.0, 3.0]


def test_names_that_are_no_set():
    with pytest.raises(TypeError, match="set of names"):
        pack_jagged_fields({}, lengths=LENGTHS, token_aligned_fields=5)  # type: ignore[arg-type]


# --- columns written back ----------------------------------------------------------------------


def nest(*lengths, fill=1.0):
    return stack_or_nest([torch.full((n,), fill) for n in lengths], always_nest=True)


@pytest.mark.parametrize("rows", [3, 2047, 2048, 5000])
def test_fused_is_composed_however_large_the_offsets_are(rows):
    """Offsets of 2,047 rows and more are a buffer of their own, between those of columns."""
    lengths = torch.arange(rows) % 7
    fields = {name: torch.arange(rows * 7).view(rows, 7) + i for i, name in enumerate("abc")}
    named: dict[str, Any] = {"lengths": lengths, "token_aligned_fields": fields}
    fused = encode_fields(fields, **named)
    composed = encode(pack_jagged_fields(fields, **named))
    assert [bytes(frame) for frame in fused] == [bytes(frame) for frame in composed]
    out = bytearray(sum(map(len, map(bytes, fused))) + 1000)
    assert bytes(out[: encode_fields(fields, **named, out=out)]) == bytes(to_blob(composed))
    given = []

    def room(size):
        given.append(bytearray(size))
        return given[0]

    encode_fields(fields, **named, out=room)
    assert given == [to_blob(composed)]
    columns = materialize(open_wire(fused))
    for name, column in fields.items():
        kept = torch.arange(7) < lengths[:, None]
        assert torch.equal(columns[name], (column * kept)[:, : lengths.max()])


# --- payloads ----------------------------------------------------------------------------------


def with_payloads():
    td = TensorDict({"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, batch_size=[2])
    td["notes"] = NonTensorStack({"role": "user"}, "text")
    td["source"] = NonTensorData("gsm8k", batch_size=[2])
    td["meta"] = MetaData([1, 2], batch_size=[2])
    td["grid"] = torch.stack([NonTensorStack(1, 2), NonTensorStack(3, 4)])
    return td


@pytest.mark.parametrize("as_dict", [False, True])
def test_payload_columns_of_a_tensordict_are_kept(as_dict):
    td: Any = with_payloads()
    fields = dict(td.items()) if as_dict else td
    options: Any = {"lengths": torch.tensor([2, 3]), "token_aligned_fields": ["ids"]}
    packed = pack_jagged_fields(fields, **options)
    assert packed["ids"].values().tolist() == [5, 6, 7, 8, 9]
    for name in ("notes", "source", "meta", "grid"):
        assert_same(packed.get(name), td.get(name))
    frames = encode_fields(fields, **options)
    assert list(map(bytes, frames)) == list(map(bytes, encode(packed)))
    assert_same(decode(frames), packed)


@pytest.mark.parametrize(
    "rows", [[{"a": 1}, {}], ["a", None], [b"a", {"b": [None]}], [None, None]], ids=str
)
def test_lists_of_what_can_only_be_objects_are_rows(rows):
    columns = {"ids": torch.ones(2, 3), "info": rows}
    td = pack_jagged_fields(columns, lengths=[1, 3], token_aligned_fields=["ids"])
    assert_same(td.get("info").tolist(), rows)
    frames = encode_fields(columns, lengths=[1, 3], token_aligned_fields=["ids"])
    assert_same(list(materialize(frames)["info"]), rows)
    columns["info"] = rows[:1]
    with pytest.raises(ArgumentError, match="expected 2 rows, one per length, found 1"):
        encode_fields(columns, lengths=[1, 3], token_aligned_fields=["ids"])


def test_lists_of_strings_are_rows():
    fields = {"ids": torch.zeros(2, 3), "text": ["a", "b\ud800"]}
    packed = pack_jagged_fields(fields, lengths=torch.tensor([2, 3]))
    assert packed.get("text").tolist() == ["a", "b\ud800"]
    frames = encode_fields(fields, lengths=torch.tensor([2, 3]))
    assert list(map(bytes, frames)) == list(map(bytes, encode(packed)))
    nothing = pack_jagged_fields({"text": []}, lengths=torch.empty(0, dtype=torch.int64))
    assert nothing.batch_size == torch.Size([0])


@pytest.mark.parametrize(
    ("column", "error"),
    [
        (["a"], ArgumentError),
        (["a", 1], ArgumentTypeError),
        ([torch.zeros(1), torch.zeros(1)], ArgumentTypeError),
        (NonTensorStack("a", "b", "c"), ArgumentError),
        (NonTensorData("a"), ArgumentTypeError),
        (NonTensorData("a", batch_size=[3]), ArgumentError),
        (MetaData("a"), ArgumentTypeError),
    ],
)
def test_payloads_of_other_rows_are_refused(column, error):
    for call in (pack_jagged_fields, encode_fields):
        with pytest.raises(error, match="text"):
            call({"text": column}, lengths=torch.tensor([2, 3]))
