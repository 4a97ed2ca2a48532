"""`BatchedDataDict`: a dict whose columns have one entry per row."""

import pickle

import numpy as np
import pytest
import torch

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    decode,
    encode,
    materialize,
    pack_jagged_fields,
)
from jagcodec.batch.compare import first_difference
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from tests.batch.plain import table


def trainer_batch(layout="padded", container=BatchedDataDict):
    fields = {
        "ids": torch.arange(12).view(3, 4),
        "reward": torch.arange(3.0),
        "message": np.array(["a", {"b": 1}, None], dtype=object),
    }
    td = pack_jagged_fields(fields, lengths=[2, 4, 3], token_aligned_fields=["ids"])
    batch = materialize(td, layout, container=container)
    batch.meta_info["step"] = 7
    return batch


def test_length_is_rows():
    batch = trainer_batch()
    assert (len(batch), list(batch)) == (3, ["ids", "reward", "message"])
    assert "rows=3" in repr(batch)
    assert (len(BatchedDataDict()), bool(BatchedDataDict())) == (0, False)
    empty = batch.rows([])
    assert (len(empty), bool(empty)) == (0, True)


def test_every_column_has_n_rows():
    with pytest.raises(ArgumentError, match=r"\['b'\]: expected 2 rows.*found 1"):
        BatchedDataDict(a=[1, 2], b=torch.ones(1))
    batch = BatchedDataDict(a=[1, 2])
    for put in (
        lambda: batch.__setitem__("b", [1]),
        lambda: batch.update(b=[1]),
        lambda: batch.setdefault("b", [1]),
        lambda: batch | {"b": [1]},
        lambda: batch.__ior__({"b": [1]}),
    ):
        with pytest.raises(ArgumentError, match="expected 2 rows"):
            put()
    with pytest.raises(ArgumentTypeError, match="meta_info"):
        batch["step"] = 7
    assert list(batch) == ["a"]
    batch["a"] = [1, 2, 3]  # the only column may change its rows
    batch.update({"b": np.zeros(3)}, c=[0, 0, 0])
    assert batch.setdefault("c", None) == [0, 0, 0]
    assert list(batch | {"d": [1, 1, 1]}) == ["a", "b", "c", "d"]
    assert type(batch | {}) is BatchedDataDict


def test_select_and_union():
    batch = trainer_batch()
    left, right = batch.select(["ids", "reward"]), batch.select(["reward", "message"])
    assert left["ids"] is batch["ids"]
    both = left.union(right)
    assert (list(both), both.meta_info) == (["ids", "reward", "message"], {"step": 7})
    assert list(left) == ["ids", "reward"]
    with pytest.raises(ArgumentKeyError, match="'nope'"):
        batch.select(["nope"])
    with pytest.raises(ArgumentError, match=r"meta_info\['step'\]"):
        batch.union(BatchedDataDict(y=[1, 2, 3], meta_info={"step": 8}))
    with pytest.raises(ArgumentError, match="rows"):
        batch.union({"y": [1]})


def test_union_and_diff_agree_on_what_is_equal():
    nan = torch.tensor([0.5, float("nan")])
    batch = BatchedDataDict(w=torch.nn.Parameter(nan.clone()), n=[1, 2])
    for name, column in (("w", nan), ("n", [1, 2])):
        assert first_difference({name: column}, {name: batch[name]}) is None
        assert list(batch.union({name: column})) == ["w", "n"]
    for name, column in (("w", -nan), ("w", nan.double()), ("w", nan.tolist()), ("n", [1, True])):
        assert first_difference({name: column}, {name: batch[name]}) is not None
        with pytest.raises(ArgumentError, match=rf"union\(other\)\['{name}'\]"):
            batch.union({name: column})


def test_concat_keeps_the_meta_info_that_all_agree_on():
    batch, other = trainer_batch(), trainer_batch()
    other.meta_info = {"step": 7, "more": [1]}
    both = BatchedDataDict.concat([batch, other])
    assert (type(both), both.meta_info) == (BatchedDataDict, {"step": 7})
    assert table(both) == table(batch) * 2
    other.meta_info["step"] = 7.0
    assert BatchedDataDict.concat([batch, other]).meta_info == {}
    with pytest.raises(ArgumentError, match="expected batches, found none"):
        BatchedDataDict.concat([])


class Subclass(BatchedDataDict):
    pass


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_what_is_made_of_it_keeps_its_type_and_meta_info(layout):
    batch = trainer_batch(layout, Subclass)
    for found in (
        pickle.loads(pickle.dumps(batch)),
        batch.copy(),
        batch.rows([0, 1, 2]),
        batch.split(1)[0],
    ):
        assert type(found) is Subclass
        assert table(found) == table(batch)
        assert found.meta_info == {"step": 7}
    sent = decode(encode(BatchedDataDict(batch, meta_info=batch.meta_info)))
    assert type(sent) is BatchedDataDict
    assert table(sent) == table(batch)
    assert sent.meta_info == {"step": 7}


def test_move():
    batch = trainer_batch("jagged")
    batch["more"] = batch["ids"] + 1
    moved = batch.to("meta")
    assert moved["ids"].device.type == "meta"
    assert moved["message"] is batch["message"]
    assert moved.meta_info == batch.meta_info
    assert batch.to("cpu")["ids"] is batch["ids"]
    assert moved["ids"].offsets() is moved["more"].offsets()
