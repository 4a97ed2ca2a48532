"""Batches in every form: what takes one takes all, and gives the same kind back."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    WireBatch,
    concat_rows,
    decode,
    encode,
    encode_fields,
    join_columns,
    materialize,
    open_wire,
    pack_jagged_fields,
    padding_tax,
    repeat_rows,
    select_rows,
    split_rows,
    stack_or_nest,
    to_blob,
    to_rows,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.schema import check_schema
from jagcodec.testing import jagged_batches, tensors
from jagcodec.types import Layout
from tests.helpers import rollout
from tests.oracle import rows_of
from tests.strategies import lengths_in

FORMS: dict[str, Any] = {
    "TensorDict": lambda td: td,
    "dict": lambda td: dict(td.items()),
    "BatchedDataDict": lambda td: BatchedDataDict(td.items(), meta_info={"step": 7}),
    "packed": lambda td: materialize(td, "packed"),
    "WireBatch": lambda td: open_wire(encode(td, meta={"step": 7})),
    "frames": lambda td: encode(td, meta={"step": 7}),
    "tuple": lambda td: tuple(encode(td)),
    "blob": lambda td: to_blob(encode(td, meta={"step": 7})),
    "elided": lambda td: encode(td, elide=True, narrow=True, compress="zstd"),
}
KINDS: dict[str, Any] = {
    **dict.fromkeys(FORMS, WireBatch),
    "TensorDict": TensorDict,
    "dict": dict,
    **dict.fromkeys(("BatchedDataDict", "packed"), BatchedDataDict),
}


def samples(batch):
    return to_rows(batch, as_="list")


@pytest.mark.parametrize("form", FORMS)
def test_what_takes_a_batch_takes_every_form_and_gives_the_kind_back(form):
    td = rollout()
    rows, given, kind = samples(td), FORMS[form](td), KINDS[form]
    assert samples(given) == rows
    assert samples(materialize(given, "jagged")) == rows
    for found, expected in (
        (select_rows(given, [2, 0]), [rows[2], rows[0]]),
        (repeat_rows(given, 2), [row for row in rows for _ in range(2)]),
        (concat_rows([given, given]), rows + rows),
        (join_columns([given]), rows),
    ):
        assert type(found) is kind
        assert samples(found) == expected
    parts = split_rows(given, 2, max_tokens=4)
    assert all(type(part) is kind for part in parts)
    assert sorted(len(row["ids"]) for part in parts for row in samples(part)) == [0, 2, 4]
    assert padding_tax(given).rows == 3
    check_schema(given, open_wire(encode(decode(encode(td)))).schema)
    padded = materialize(given)
    assert torch.equal(padded["ids"], torch.tensor([[0, 1, 0, 0], [4, 5, 6, 7], [0, 0, 0, 0]]))
    assert padded["message"].tolist() == [row["message"] for row in rows]


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_lists_of_batches_in_any_forms(first, second):
    td = rollout()
    other = TensorDict({"value": torch.arange(3.0)}, [3])
    kinds = [KINDS[first], KINDS[second]]
    kind = next((kind for kind in kinds if kind is not WireBatch), WireBatch)
    joined = join_columns([FORMS[first](td), FORMS[second](other)])
    assert type(joined) is kind
    assert samples(joined) == [{**row, "value": float(i)} for i, row in enumerate(samples(td))]
    if first != second and (WireBatch not in kinds or "packed" in (first, second)):
        return  # columns of two kinds
    both = [FORMS[first](td), FORMS[second](td)]
    assert samples(concat_rows(both)) == samples(td) * 2
    assert type(concat_rows(both)) is kind
    assert samples(materialize(both, "jagged")) == samples(td) * 2


def test_a_list_of_blobs_is_known_by_their_first_bytes():
    td = rollout()
    blobs: list[Any] = [bytes(to_blob(encode(td))), to_blob(encode(td))]
    assert samples(concat_rows(blobs)) == samples(td) * 2
    assert len(materialize(blobs)) == len(materialize(tuple(blobs))) == 6
    assert len(materialize([*blobs, encode(td), open_wire(blobs[0])])) == 12
    function: Any
    for function in (concat_rows, join_columns):
        with pytest.raises(ArgumentTypeError, match="expected a list of batches, found one"):
            function(encode(rollout()))
    for function in (select_rows, split_rows):
        with pytest.raises(ArgumentTypeError, match="expected a batch"):
            function(blobs, 1)


def test_meta_of_batches_in_several_forms_is_what_all_agree_on():
    td = TensorDict({"x": torch.ones(2)}, [2])
    batches: list[Any] = [
        BatchedDataDict(td.items(), meta_info={"step": 7, "seed": 1}),
        encode(td, meta={"step": 7, "seed": True}),
        open_wire(encode(td, meta={"step": 7, "more": 2})),
    ]
    assert concat_rows(batches).meta_info == {"step": 7}
    assert materialize(batches).meta_info == {"step": 7}
    assert materialize(batches[0]).meta_info == {"step": 7, "seed": 1}
    assert join_columns(batches, replace=True).meta_info == {"step": 7}
    assert concat_rows(batches[1:]).meta == {"step": 7}


def test_what_a_trainer_made_goes_back_in():
    layouts: list[Layout] = ["padded", "jagged", "packed"]
    for layout in layouts:
        batch = materialize(rollout(), layout)
        again = materialize(batch, layout, token_aligned_fields=())
        assert samples(again) == samples(batch)
        left = materialize(materialize(rollout(), "packed"), padding_side="left")
        assert left["ids"].tolist() == [[0, 0, 0, 1], [4, 5, 6, 7], [0, 0, 0, 0]]
    nested: dict[str, Any] = {
        "inner": {"ids": rollout()["ids"], "none": {}},
        "reward": [0.5, 1.0, None],
    }
    pads: Any = {("inner", "ids"): -1}
    found = materialize(nested, pad_value_dict=pads)
    assert found["inner"]["ids"][0].tolist() == [0, 1, -1, -1]
    assert found["reward"].tolist() == [0.5, 1.0, None]
    nested["n"] = torch.tensor([1, 1, 0])
    found = materialize(nested, padding_side="left_right", prompt_lengths="n")
    assert found["inner"]["ids"].shape == (3, 4)


def test_what_is_not_a_batch_is_refused_by_all():
    calls: list[Any] = [
        materialize,
        to_rows,
        padding_tax,
        lambda batch: check_schema(batch, {}),
        lambda batch: select_rows(batch, 0),
        lambda batch: repeat_rows(batch, 2),
        lambda batch: split_rows(batch, 2),
        lambda batch: concat_rows([batch]),
        lambda batch: join_columns([batch]),
    ]
    for call in calls:
        for value in (None, object(), "batch.jag"):
            with pytest.raises(ArgumentTypeError, match="expected a batch"):
                call(value)
        with pytest.raises(ArgumentError, match="batch dim"):
            call(TensorDict({}, []))
        with pytest.raises(ArgumentError, match="expected 1 rows"):
            call({"a": [1], "b": [1, 2]})


# --- columns side by side, in memory -----------------------------------------------------------


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
def test_columns_keep_their_rows_and_share_the_raggedness_of_the_batch(batch, data):
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
    joined = join_columns([td, columns])
    assert type(joined) is TensorDict
    assert list(joined.keys()) == [*before, *columns]
    assert joined.batch_size == td.batch_size
    assert list(td.keys()) == list(before)
    for name, leaf in before.items():
        assert joined.get(name) is leaf
        assert td.get(name) is leaf
    assert joined.get("rect") is columns["rect"]
    if rows:
        assert joined.get("items").tolist() == list(items)
        for name in ("rows", "more"):
            assert rows_of(joined.get(name)) == rows_of(columns[name])
        peers = [joined.get(n) for n in (*batch.token_aligned_fields, "rows", "more")]
        assert len({id(peer.offsets()) for peer in peers}) == 1


@given(st.integers(1, 5).flatmap(lambda n: st.tuples(lengths_in(4, n), lengths_in(4, n))))
def test_rows_of_other_lengths_are_refused_at_the_first_that_differs(both):
    expected, found = both
    td = TensorDict({"ids": nest(*expected)}, batch_size=[len(expected)])
    column = nest(*found, fill=2.0)
    if expected == found:
        joined = join_columns([td, {"new": column}])
        assert (td["ids"] * joined["new"]).values().tolist() == [2.0] * sum(expected)
        return
    row = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    batches: Any
    for batches in (
        [td, {"new": column}],
        [encode(td), encode(TensorDict({"new": column}, [len(found)]))],
    ):
        with pytest.raises(ArgumentError) as caught:
            join_columns(batches)
        assert caught.value.reason == "bad_length"
        assert caught.value.path == f"join_columns(batches[1])['new'], row {row}"
        assert caught.value.detail == (
            f"expected {expected[row]} tokens like 'ids' of the first batch, found {found[row]}"
        )


def two_raggednesses():
    return TensorDict({"ids": nest(3, 2), "mask": nest(1, 2)}, batch_size=[2])


def test_any_jagged_column_of_the_first_batch_will_do():
    td = two_raggednesses()
    joined = join_columns([td, {"a": nest(1, 2), "b": nest(3, 2)}])
    assert joined["a"].offsets() is td["mask"].offsets()
    assert joined["b"].offsets() is td["ids"].offsets()
    plain = TensorDict({"reward": torch.ones(2)}, batch_size=[2])
    joined = join_columns([plain, {"a": nest(3, 1), "b": nest(3, 1), "c": nest(1, 1)}])
    assert (joined["a"] * joined["b"]).values().tolist() == [1.0] * 4
    assert rows_of(joined["c"]) == rows_of(nest(1, 1))


def test_a_column_is_replaced_only_on_request_and_in_its_place():
    td = two_raggednesses()
    with pytest.raises(ArgumentError, match="replace=True") as caught:
        join_columns([td, {"ids": nest(3, 2)}])
    assert caught.value.reason == "conflict"
    assert caught.value.path == "join_columns(batches[1])['ids']"
    joined = join_columns([td, {"ids": nest(3, 2, fill=5.0)}], replace=True)
    assert list(joined.keys()) == ["ids", "mask"]
    assert joined["ids"].values().tolist() == [5.0] * 5
    assert td["ids"].values().tolist() == [1.0] * 5


def test_holes_are_no_hindrance():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 2, 6]), lengths=torch.tensor([1, 2])
    )
    td = TensorDict({"mask": nest(1, 2)}, batch_size=[2])
    joined = join_columns([td, {"a": holes}])
    assert (td["mask"] * joined["a"]).values().tolist() == [0.0, 2.0, 3.0]


def test_names_device_and_what_came_over_the_wire_are_kept():
    td = TensorDict({"ids": nest(3, 2)}, batch_size=[2], names=["rows"], device="cpu").lock_()
    message = np.empty(2, dtype=object)
    message[:] = ["a", {"b": 1}]
    reply = encode_fields({"message": message, "value": nest(3, 2)}, lengths=None)
    joined = join_columns([td, reply])
    assert (joined.names, joined.device) == (["rows"], torch.device("cpu"))
    assert joined.get("message").tolist() == ["a", {"b": 1}]
    assert joined["value"].offsets() is td["ids"].offsets()
    assert not joined.is_locked


def test_gradients_flow_through_joined_columns():
    values = torch.ones(5, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 5]))
    joined = join_columns([two_raggednesses(), {"a": column}])
    (2 * joined["a"].values()).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0] * 5


def test_padded_columns_are_packed_by_the_rows_of_the_batch_first():
    td = two_raggednesses()
    scores = {"scores": torch.arange(6.0).view(2, 3)}
    packed = pack_jagged_fields(scores, lengths=td["ids"], token_aligned_fields=["scores"])
    joined = join_columns([td, packed])
    assert (joined["scores"] * td["ids"]).values().tolist() == [0, 1, 2, 3, 4]


def test_columns_of_a_dict_become_leaves_of_a_tensordict():
    columns = materialize(rollout(), "packed")
    columns["inner"] = {"n": np.arange(3), "text": ["a", "b", None]}
    joined = join_columns([TensorDict({"first": torch.ones(3)}, [3]), columns])
    assert isinstance(joined, TensorDictBase)
    assert samples(joined) == [{"first": 1.0, **row} for row in samples(columns)]
    assert samples(decode(encode(joined))) == samples(joined)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"a": torch.ones(3)}, "expected 2 rows, like the first batch, found 3"),
        ({"a": nest(1)}, "found 1"),
        ({"a": torch.tensor(1.0)}, "'a'.*expected a column"),
        (TensorDict({}, [2, 3]), "already|batch"),
        (None, "expected a batch"),
    ],
)
def test_columns_that_cannot_be_joined(columns, text):
    batch = TensorDict({"ids": nest(1, 2), "reward": torch.ones(2)}, batch_size=[2])
    if isinstance(columns, TensorDict):
        assert list(join_columns([batch, columns]).keys()) == ["ids", "reward"]
        return
    with pytest.raises((ValueError, TypeError), match=text):
        join_columns([batch, columns])
