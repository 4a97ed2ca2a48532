"""Columns that their owner changes: after a batch was opened, and after they were read."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    JagcodecError,
    WireBatch,
    concat_rows,
    decode,
    encode,
    join_columns,
    materialize,
    open_wire,
    plan_packing,
    select_rows,
    split_rows,
    to_rows,
)
from jagcodec.columns.batch import views_of
from tests.helpers import nested
from tests.oracle import assert_same

ROWS = 3


def jagged():
    return nested([[1], [2, 3], [4, 5, 6]])


def without_last(offsets):
    return lambda: offsets.resize_(ROWS)


# --- a column of each kind, and a change of the number of its rows -----------------------------


def a_list():
    column = [*"abc"]
    return column, lambda: column.append("d")


def a_shorter_list():
    column = [*"abc"]
    return column, column.pop


def objects():
    column = np.array([*"abc"], dtype=object)
    return column, lambda: column.resize(4, refcheck=False)


def a_tensor():
    column = torch.arange(3.0)
    return column, lambda: column.resize_(4)


def a_shorter_tensor():
    column = torch.arange(3.0)
    return column, lambda: column.resize_(2)


def a_jagged_tensor():
    column = jagged()
    return column, without_last(column.offsets())


def a_packed_column():
    column = materialize({"x": jagged()}, layout="packed")["x"]
    return column, without_last(column.cu_seqlens)


def a_stack():
    column = NonTensorStack(*"abc")
    members: list[Any] = column.tensordicts
    return column, lambda: members.append(NonTensorData("d"))


def a_dict():
    column: dict[str, Any] = {"inner": torch.arange(3)}
    return column, lambda: column.update(inner=torch.arange(4))


def a_dict_with_more_columns():
    column = {"inner": torch.arange(3)}
    return column, lambda: column.update(more=torch.arange(4))


def a_list_in_a_batch():
    column = BatchedDataDict(inner=[*"abc"])
    return column, lambda: column["inner"].append("d")


def a_tensor_in_a_tensordict():
    column = TensorDict({"inner": torch.arange(3)}, [3])
    return column, lambda: column["inner"].resize_(4)


CHANGES: list[Callable[[], Any]] = [
    *(a_list, a_shorter_list, objects, a_tensor, a_shorter_tensor, a_jagged_tensor, a_stack),
    *(a_packed_column, a_dict, a_dict_with_more_columns, a_list_in_a_batch),
    a_tensor_in_a_tensordict,
]

OPENED: dict[str, Any] = {
    "opened": open_wire,
    "joined": lambda batch: concat_rows([open_wire(batch)] * 2),
    "side by side": lambda batch: join_columns(
        [open_wire(batch), open_wire(encode(TensorDict({"more": torch.ones(ROWS)}, [ROWS])))]
    ),
    "chosen": lambda batch: open_wire(batch).rows([2, 0]),
}


def lengths_of(batch: WireBatch) -> Any:
    return batch.row_lengths("tokens")


READERS: dict[str, Callable[[WireBatch], Any]] = {
    "one column": lambda batch: batch["changed"],
    "columns": views_of,
    "to_tensordict": lambda batch: batch.to_tensordict(),
    "chosen rows": lambda batch: batch.rows([0, 1])["changed"],
    "a range": lambda batch: views_of(batch.rows(slice(0, 1))),
    "materialize": materialize,
    "packed": lambda batch: materialize(batch, layout="packed"),
    "to_frames": lambda batch: batch.to_frames(),
    "narrow": lambda batch: encode(batch, narrow=True),
    "elide": lambda batch: encode(batch, elide=True),
    "a join": lambda batch: views_of(concat_rows([batch, batch])),
    "to_rows": to_rows,
    "select_rows": lambda batch: views_of(select_rows(batch, [0])),
    "split_rows": lambda batch: [views_of(part) for part in split_rows(batch, 2)],
    "plan.pack": lambda batch: plan_packing(lengths_of(batch)).pack(batch),
}


def read_all(value):
    """Read a nested batch, which is otherwise not read yet."""
    if isinstance(value, WireBatch):
        value.to_tensordict()
    if type(value) is dict:
        value = [*value.values()]
    for item in value if isinstance(value, (list, tuple)) else ():
        read_all(item)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("reader", READERS)
def test_a_column_with_other_rows_than_when_it_was_opened_is_refused(change, opened, reader):
    column, grow = change()
    batch = OPENED[opened]({"same": torch.arange(ROWS), "tokens": jagged(), "changed": column})
    grow()
    with pytest.raises(JagcodecError, match=r"changed|inner|more"):
        read_all(READERS[reader](batch))


@pytest.mark.parametrize("change", [a_jagged_tensor, a_packed_column])
@pytest.mark.parametrize("opened", OPENED)
def test_row_lengths_are_those_of_the_rows_that_were_opened(change, opened):
    column, shrink = change()
    batch = OPENED[opened]({"changed": column})
    shrink()
    with pytest.raises(ArgumentError, match="changed") as caught:
        batch.row_lengths("changed")
    assert caught.value.reason == "row_mismatch"


def test_other_columns_are_read_all_the_same():
    column, grow = a_list()
    batch = open_wire({"same": torch.arange(ROWS), "changed": column})
    grow()
    assert batch["same"].tolist() == [0, 1, 2]
    assert decode(batch.select(["same"]).to_frames())["same"].tolist() == [0, 1, 2]
    column.pop()
    assert batch["changed"].tolist() == [*"abc"]


def test_columns_that_are_added_later_are_not_of_the_batch():
    columns = {"same": torch.arange(ROWS)}
    batch = open_wire(columns)
    columns["later"] = torch.arange(5)
    assert batch.fields == ("same",)
    assert_same(materialize(batch)["same"], torch.arange(ROWS))


OPTIONS: list[Any] = [{}, {"narrow": True}, {"elide": True}, {"compress": "zstd"}]
WRITTEN = [change for change in CHANGES if change not in (a_dict, a_dict_with_more_columns)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", WRITTEN)
def test_no_message_is_written_that_readers_refuse(change, options):
    column, grow = change()
    columns = {"same": torch.arange(ROWS), "changed": column}
    in_dicts = change in (a_packed_column, a_list_in_a_batch, a_list, a_shorter_list, objects)
    batch = BatchedDataDict(columns) if in_dicts else TensorDict(columns, [ROWS])
    grow()
    for value in (batch, {"batch": batch}):
        with pytest.raises(JagcodecError) as caught:
            encode(value, **options)
        assert caught.value.reason == "row_mismatch"


def test_a_later_dim_of_a_batch_counts_as_well():
    batch = TensorDict({"x": torch.ones(3, 2), "y": torch.ones(3, 2, 4)}, [3, 2])
    opened = open_wire(batch)
    batch["x"].resize_(3, 3)
    for call in (lambda: encode(batch), lambda: opened["x"], opened.to_frames):
        with pytest.raises(JagcodecError, match=r"\[3, 2\]") as caught:
            call()
        assert caught.value.reason == "row_mismatch"


def test_any_column_is_of_a_batch_without_dims():
    td = TensorDict({"x": torch.ones(3), "y": torch.tensor(1), "j": jagged()}, [])
    td["x"].resize_(4)
    for options in OPTIONS:
        assert_same(decode(encode(td, **options)), td)


# --- objects that were read belong to their reader ---------------------------------------------

OBJECTS = [{"turns": [1]}, {"turns": [2]}]
BATCHES: dict[str, Any] = {
    "documents": lambda: BatchedDataDict({"o": copy.deepcopy(OBJECTS)}, meta_info={"m": [1]}),
    "with tensors": lambda: BatchedDataDict(
        {"o": copy.deepcopy(OBJECTS), "t": torch.arange(2)}, meta_info={"m": [1]}
    ),
    "documents inside": lambda: BatchedDataDict(
        {"in": {"o": copy.deepcopy(OBJECTS)}, "t": torch.arange(2)}, meta_info={"m": [1]}
    ),
    "all inside": lambda: BatchedDataDict(
        {"in": BatchedDataDict({"o": copy.deepcopy(OBJECTS)})}, meta_info={"m": [1]}
    ),
}

READ_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "one column": lambda batch: batch["o"].tolist(),
    "columns": lambda batch: list(views_of(batch)["o"]),
    "chosen": lambda batch: batch.rows([0, 1])["o"].tolist(),
    "to_tensordict": lambda batch: batch.to_tensordict()["o"],
    "materialize": lambda batch: list(materialize(batch)["o"]),
    "a join": lambda batch: list(views_of(concat_rows([batch, batch]))["o"])[:2],
    "to_rows": lambda batch: [row["o"] for row in to_rows(batch)],
    "sent on": lambda batch: list(materialize(batch.to_frames())["o"]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("first", READ_OBJECTS)
@pytest.mark.parametrize("later", READ_OBJECTS)
def test_what_was_read_is_not_read_again(batch, first, later):
    opened = open_wire(encode(BATCHES[batch]()))
    held = opened if "o" in opened.fields else opened["in"]
    found = READ_OBJECTS[first](held)
    found[0]["turns"].append("changed")
    opened.meta["m"].append("changed")
    again = opened if "o" in opened.fields else opened["in"]
    for each in (held, again):
        assert READ_OBJECTS[later](each) == OBJECTS
    assert opened.meta == {"m": [1]}
