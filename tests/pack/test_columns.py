"""Packing a dict of columns."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
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
    merge_columns,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
    to_blob,
)
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.testing import jagged_batches, tensors
from tests.oracle import assert_same, rows_of
from tests.strategies import lengths_in


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


@st.composite
def jagged_like(draw, lengths):
    """Rows of these lengths, ragged in dim 1 or 2, in memory of their own."""
    outer = tuple(draw(st.lists(st.integers(1, 2), max_size=1)))
    trailing = tuple(draw(st.lists(st.integers(1, 2), max_size=1)))
    rows = [draw(tensors((*outer, n, *trailing), torch.float32)) for n in lengths]
    return stack_or_nest(rows, always_nest=True, ragged_dim=1 + len(outer))


@given(jagged_batches(), st.data())
def test_merged_columns_keep_their_rows_and_share_the_batch_raggedness(batch, data):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    lengths, rows = batch.lengths.tolist(), len(batch.lengths)
    items = np.empty(rows, dtype=object)
    items[:] = [{"row": i} for i in range(rows)]
    columns = {"rect": data.draw(tensors((rows, 2))), "items": items}
    if rows:
        columns["rows"] = data.draw(jagged_like(lengths))
        columns["more"] = data.draw(jagged_like(lengths))
    before = dict(td.items())
    merged = merge_columns(td, columns)

    assert list(merged.keys()) == [*before, *columns]
    assert merged.batch_size == td.batch_size
    assert list(td.keys()) == list(before)
    for name, leaf in before.items():
        assert merged.get(name) is leaf
        assert td.get(name) is leaf
    assert merged.get("rect") is columns["rect"]
    if rows:
        assert merged.get("items").tolist() == list(items)
        for name in ("rows", "more"):
            assert rows_of(merged.get(name)) == rows_of(columns[name])
        peers = [merged.get(n) for n in (*batch.token_aligned_fields, "rows", "more")]
        assert len({id(peer.offsets()) for peer in peers}) == 1


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(lengths_in(4, n), lengths_in(4, n))))
def test_rows_of_other_lengths_are_refused_at_the_first_that_differs(both):
    expected, found = both
    td = TensorDict({"ids": nest(*expected)}, batch_size=[len(expected)])
    column = nest(*found, fill=2.0)
    if expected == found:
        merged = merge_columns(td, {"new": column})
        assert (td["ids"] * merged["new"]).values().tolist() == [2.0] * sum(expected)
        return
    row = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    for like in (None, "ids"):
        with pytest.raises(ArgumentError) as caught:
            merge_columns(td, {"new": column}, like=like)
        assert caught.value.reason == "bad_length"
        assert caught.value.path == f"merge_columns('new'), row {row}"
        assert (
            caught.value.detail == f"expected {expected[row]} tokens like 'ids', found {found[row]}"
        )


def two_raggednesses():
    return TensorDict({"ids": nest(3, 2), "mask": nest(1, 2)}, batch_size=[2])


def test_any_jagged_column_of_the_batch_will_do_unless_one_is_named():
    td = two_raggednesses()
    merged = merge_columns(td, {"a": nest(1, 2), "b": nest(3, 2)})
    assert merged["a"].offsets() is td["mask"].offsets()
    assert merged["b"].offsets() is td["ids"].offsets()
    assert merge_columns(td, {"a": nest(1, 2)}, like="mask")["a"].offsets() is td["mask"].offsets()
    with pytest.raises(ArgumentError, match=r"row 0.*expected 3 tokens like 'ids', found 1$"):
        merge_columns(td, {"a": nest(1, 2)}, like="ids")
    with pytest.raises(ArgumentError, match=r"row 1.*'ids', found 1, nor like any of 1 other"):
        merge_columns(td, {"a": nest(3, 1)})


def test_columns_of_nested_batches_count_too():
    inner = TensorDict({"ids": nest(3, 2)}, batch_size=[2])
    td = TensorDict({"actor": inner, "reward": torch.ones(2)}, batch_size=[2])
    for like in (None, ("actor", "ids")):
        merged = merge_columns(td, {"a": nest(3, 2)}, like=like)
        assert merged["a"].offsets() is inner["ids"].offsets()
        assert merged["actor"] is inner
    with pytest.raises(ArgumentError, match=r"like 'actor\.ids', found 1"):
        merge_columns(td, {"a": nest(1, 2)})


def test_a_batch_without_jagged_columns_takes_any_rows_and_they_multiply():
    td = TensorDict({"reward": torch.ones(2)}, batch_size=[2])
    merged = merge_columns(td, {"a": nest(3, 1), "b": nest(3, 1), "c": nest(1, 1)})
    assert (merged["a"] * merged["b"]).values().tolist() == [1.0] * 4
    assert rows_of(merged["c"]) == rows_of(nest(1, 1))


def test_a_column_is_replaced_only_on_request_and_in_its_place():
    td = two_raggednesses()
    with pytest.raises(ArgumentError, match="replace=True") as caught:
        merge_columns(td, {"ids": nest(3, 2)})
    assert (caught.value.reason, caught.value.path) == ("conflict", "merge_columns('ids')")
    merged = merge_columns(td, {"ids": nest(3, 2, fill=5.0)}, replace=True)
    assert list(merged.keys()) == ["ids", "mask"]
    assert merged["ids"].values().tolist() == [5.0] * 5
    assert td["ids"].values().tolist() == [1.0] * 5


def test_holes_are_no_hindrance():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 2, 6]), lengths=torch.tensor([1, 2])
    )
    td = TensorDict({"mask": nest(1, 2)}, batch_size=[2])
    merged = merge_columns(td, {"a": holes})
    assert (td["mask"] * merged["a"]).values().tolist() == [0.0, 2.0, 3.0]
    td = TensorDict({"holes": holes}, batch_size=[2])
    merged = merge_columns(td, {"a": nest(1, 2), "b": nest(1, 2)})
    assert (merged["a"] * merged["b"]).values().tolist() == [1.0] * 3


def test_names_device_and_what_came_over_the_wire_are_kept():
    td = TensorDict({"ids": nest(3, 2)}, batch_size=[2], names=["rows"], device="cpu").lock_()
    message = np.empty(2, dtype=object)
    message[:] = ["a", {"b": 1}]
    reply = pack_jagged_fields({"message": message, "value": nest(3, 2)}, lengths=None)
    merged = merge_columns(td, decode(encode(reply)))
    assert (merged.names, merged.device) == (["rows"], torch.device("cpu"))
    assert merged.get("message").tolist() == ["a", {"b": 1}]
    assert merged["value"].offsets() is td["ids"].offsets()
    assert not merged.is_locked


def test_gradients_flow_through_merged_columns():
    values = torch.ones(5, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]))
    merged = merge_columns(two_raggednesses(), {"a": column})
    (2 * merged["a"].values()).sum().backward()
    assert values.grad.tolist() == [2.0] * 5


def test_zero_rows_merge():
    td = pack_jagged_fields(
        {"a": torch.ones(0, 3)},
        lengths=torch.zeros(0, dtype=torch.int64),
        token_aligned_fields=["a"],
    )
    merged = merge_columns(td, {"b": td["a"], "items": np.empty(0, dtype=object)})
    assert merged.batch_size == (0,)
    assert merged["b"].offsets() is td["a"].offsets()


LAZY = LazyStackedTensorDict(TensorDict({}, []), TensorDict({}, []), stack_dim=0)


@pytest.mark.parametrize(
    ("batch", "columns", "options", "reason", "text"),
    [
        (None, {"a": torch.ones(3)}, {}, "row_mismatch", "'a'.*expected 2 rows.*found 3"),
        (None, {"a": nest(1)}, {}, "row_mismatch", "'a'.*found 1"),
        (None, {"a": np.empty(1, dtype=object)}, {}, "row_mismatch", "'a'.*found 1"),
        (None, {"a": torch.tensor(1.0)}, {}, "bad_shape", "'a'.*0-d"),
        (None, {"a": NonTensorData("x")}, {}, "bad_type", "'a'.*object array"),
        (None, {"a": NonTensorData("x", batch_size=[3])}, {}, "row_mismatch", "'a'.*found 3"),
        (None, {"a": [1, 2]}, {}, "bad_type", "'a'.*found list"),
        (None, {1: torch.ones(2)}, {}, "bad_type", "not strings"),
        (None, None, {}, "bad_type", "dict of names"),
        (None, LAZY, {}, "bad_type", "lazy stack"),
        (None, {}, {"like": "absent"}, "no_such_field", "like.*'absent'"),
        (None, {}, {"like": 3}, "no_such_field", "like.*3"),
        (None, {}, {"like": "reward"}, "bad_type", "jagged column, found a .2,. tensor"),
        ({"ids": nest(1, 2)}, {}, {}, "bad_type", "found dict"),
        (LAZY, {}, {}, "bad_type", "LazyStacked"),
        (TensorDict({}, [2, 3]), {}, {}, "bad_shape", r"\(2, 3\)"),
        (TensorDict({}, []), {}, {}, "bad_shape", r"\(\)"),
    ],
)
def test_columns_that_cannot_be_merged(batch, columns, options, reason, text):
    if batch is None:
        batch = TensorDict({"ids": nest(1, 2), "reward": torch.ones(2)}, batch_size=[2])
    with pytest.raises((ValueError, TypeError, KeyError), match=text) as caught:
        merge_columns(batch, columns, **options)
    assert caught.value.reason == reason  # type: ignore[attr-defined]
    assert isinstance(caught.value, ArgumentKeyError) == (reason == "no_such_field")


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
    merged = merge_columns(packed, {"more": ["c", "d"]})
    assert merged.get("more").tolist() == ["c", "d"]
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


def test_padded_columns_are_merged_as_rows_when_they_are_named():
    td = pack_jagged_fields(
        {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=torch.tensor([2, 3])
    )
    scores = torch.tensor([[1.0, 2, 0, 0], [3, 4, 5, 0]], requires_grad=True)
    columns = {"scores": scores, "mask": torch.ones(2), "grid": torch.zeros(2, 9)}
    named = ["scores", "mask", "unknown"]
    merged = merge_columns(td, columns, token_aligned_fields=named)
    assert (merged["scores"] * td["ids"]).values().tolist() == [5, 12, 21, 32, 45]
    assert merged["mask"].shape == (2,)
    assert merged["grid"].shape == (2, 9)
    merged["scores"].values().sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    with pytest.raises(ArgumentError, match="row 1"):
        merge_columns(td, {"scores": torch.zeros(2, 2)}, token_aligned_fields=["scores"])


def test_padded_columns_need_rows_to_be_merged_by():
    scores = {"scores": torch.arange(6).view(2, 3)}
    plain = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(ArgumentError, match="none in it"):
        merge_columns(plain, scores, token_aligned_fields=["scores"])
    two = TensorDict(
        {"a": stack_or_nest([torch.zeros(1), torch.zeros(2)])}
        | {"b": stack_or_nest([torch.zeros(3), torch.zeros(2)])},
        batch_size=[2],
    )
    with pytest.raises(ArgumentError, match="like="):
        merge_columns(two, scores, token_aligned_fields=["scores"])
    merged = merge_columns(two, scores, like="b", token_aligned_fields=["scores"])
    assert merged["scores"].values().tolist() == [0, 1, 2, 3, 4]
