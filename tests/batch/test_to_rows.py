"""Rows out: samples, and the rows of one column."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    UnbatchedTensor,
    tensorclass,
)

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    RowBuilder,
    concat_rows,
    decode,
    encode,
    materialize,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
    to_blob,
    to_rows,
)
from jagcodec.batch.to_rows import RowsAs
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.testing import jagged_batches, jagged_tensors
from tests.helpers import rollout
from tests.oracle import assert_same, bits, rows_of


def column_of(batch, name, form="tensor"):
    """The rows of one column."""
    return [row[name] for row in to_rows(batch, [name], form)]


FORMS: list[RowsAs] = ["tensor", "numpy", "list"]


def opened(td):
    return open_wire(bytearray(to_blob(encode(td))))


def rewrapped(td):
    return BatchedDataDict(dict(td.items()))


KINDS = {
    "tensordict": lambda td: td,
    "open": opened,
    "dict": rewrapped,
    "decoded": lambda td: decode(encode(td)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples(kind):
    rows = to_rows(KINDS[kind](rollout()), as_="list")
    assert [row["ids"] for row in rows] == [[0, 1], [4, 5, 6, 7], []]
    assert [row["message"] for row in rows] == ["a", {"b": (1, 2)}, None]
    assert [list(row) for row in rows] == [["ids", "logprob", "reward", "message"]] * 3
    assert [len(row["logprob"]) for row in rows] == [2, 4, 0]
    assert all(type(row["reward"]) is float for row in rows)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=jagged_batches())
def test_every_cell_of_every_column(kind, batch):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    lengths = batch.lengths.tolist()
    rows = to_rows(KINDS[kind](td))
    assert len(rows) == len(lengths) or not batch.fields
    for name, column in batch.fields.items():
        found = [row[name] for row in rows]
        if name in batch.token_aligned_fields:
            assert list(map(bits, found)) == rows_of(column, lengths)
        elif isinstance(column, torch.Tensor):
            assert [bits(cell) for cell in found] == [bits(column[i]) for i in range(len(lengths))]
            assert all(cell.dtype == column.dtype for cell in found)
        else:
            assert_same(found, list(column))


@given(jagged_tensors())
def test_jagged_columns_with_holes_and_other_ragged_dims(column):
    assert list(map(bits, column_of({"x": column}, "x"))) == rows_of(column)


ARRAYS = "bool u?int(8|16|32|64) float(16|32|64) complex(64|128)".replace(" ", "|")
LISTS = f"{ARRAYS}|bfloat16|complex32|float8.*"


@given(jagged_tensors(), st.sampled_from(["numpy", "list"]))
def test_arrays_and_lists_say_what_the_tensors_say(column, form):
    expected = column_of({"x": column}, "x")
    if not re.fullmatch(ARRAYS if form == "numpy" else LISTS, str(column.dtype)[6:]):
        if len(column):
            with pytest.raises(ArgumentTypeError, match=rf"to_rows\['x'\].*{column.dtype}"):
                column_of({"x": column}, "x", form)
        return
    for row, tensor in zip(column_of({"x": column}, "x", form), expected, strict=True):
        if form == "numpy":
            assert_same(torch.from_numpy(row.copy()), tensor.contiguous())
            continue
        again = torch.tensor(row, dtype=torch.complex128)
        same = tensor.to(torch.complex128).reshape(again.shape)
        assert torch.equal(again.nan_to_num(7), same.nan_to_num(7))


@pytest.mark.parametrize("form", FORMS)
def test_one_column_is_its_rows(form):
    td = rollout()
    samples = to_rows(td, as_=form)
    for name in samples[0]:
        assert_same(column_of(td, name, form), [row[name] for row in samples])


@pytest.mark.parametrize("kind", KINDS)
def test_some_columns_in_another_order(kind):
    rows = to_rows(KINDS[kind](rollout()), ["message", "ids"], as_="list")
    assert tuple(rows[0].items()) == (("message", "a"), ("ids", [0, 1]))
    assert to_rows(rollout(), []) == [{}, {}, {}]
    assert to_rows(rollout(), ("reward",), "list")[0].keys() == {"reward"}


def test_what_a_row_of_one_dim_is():
    td = TensorDict({"x": torch.tensor([1, 2]), "y": torch.ones(2, 3)}, [2])
    tensor, array, number = (to_rows(td, as_=form)[1] for form in FORMS)
    assert tensor["x"].shape == ()
    assert tensor["x"].dtype == torch.int64
    assert type(array["x"]) is np.int64
    assert array["y"].shape == (3,)
    assert number == {"x": 2, "y": [1.0, 1.0, 1.0]}
    assert type(number["x"]) is int


def test_rows_alias_the_batch():
    td = rollout()
    td["wide"] = torch.zeros(3, 2)
    for row in (to_rows(td)[1], to_rows(td, as_="numpy")[1]):
        row["ids"][0] = 70
        row["wide"][0] = 7
        assert td["ids"].values().tolist() == [0, 1, 70, 5, 6, 7]
        assert td["wide"].tolist() == [[0, 0], [7, 7], [0, 0]] or td["wide"][1, 0] == 7
        row["ids"][0] = 4
    samples = to_rows(td)
    start = td["ids"].values().data_ptr()
    assert [row["ids"].data_ptr() - start for row in samples[:2]] == [0, 16]
    assert samples[1]["message"] is column_of(td, "message")[1]


def test_rows_of_an_open_message_alias_it_where_decode_does():
    blob = bytearray(to_blob(encode(rollout())))
    writable, read_only = to_rows(open_wire(blob)), to_rows(open_wire(bytes(blob)))
    before = writable[1]["ids"].tolist()
    writable[1]["ids"][0] = 99
    assert column_of(open_wire(blob), "ids", "list")[1][0] == 99
    assert read_only[1]["ids"].tolist() == before
    read_only[1]["ids"][0] = 5  # a copy, which may be written to


def test_chosen_rows_and_columns_of_an_open_message():
    batch = opened(rollout()).rows([2, 1, 1]).select(["message", "ids"])
    assert to_rows(batch, as_="list") == [
        {"message": None, "ids": []},
        {"message": {"b": (1, 2)}, "ids": [4, 5, 6, 7]},
        {"message": {"b": (1, 2)}, "ids": [4, 5, 6, 7]},
    ]
    assert column_of(batch.rows([]), "ids") == []
    assert to_rows(batch.rows([])) == []


@tensorclass
class Turn:
    ids: torch.Tensor
    who: str = ""


@pytest.mark.parametrize("form", FORMS)
def test_batches_within_the_batch_become_dicts(form):
    inner = TensorDict({"x": stack_or_nest([torch.ones(2), torch.ones(1)])}, [2])
    td = TensorDict({"a": {"b": inner}, "r": torch.arange(2)}, [2])
    for batch in (td, opened(td), {"a": {"b": dict(inner.items())}, "r": torch.arange(2)}):
        rows = to_rows(batch, as_=form)
        assert [len(row["a"]["b"]["x"]) for row in rows] == [2, 1]
    make: Any = Turn
    turn = make(ids=torch.arange(2), who="user", batch_size=[2])
    rows = to_rows(TensorDict({"turn": turn}, [2]), as_=form)
    assert [(int(row["turn"]["ids"]), row["turn"]["who"]) for row in rows] == [
        (0, "user"),
        (1, "user"),
    ]


def test_batches_without_columns():
    assert to_rows({}) == []
    assert to_rows(TensorDict({}, [2])) == [{}, {}]
    assert to_rows({"a": {}, "x": [1, 2]}) == [{"a": {}, "x": 1}, {"a": {}, "x": 2}]


def test_payloads_of_every_kind():
    whole = NonTensorData({"step": 1}, batch_size=[2])
    array = np.array(["a", None], dtype=object)
    td = TensorDict({"whole": whole, "rows": NonTensorData(array, batch_size=[2])}, [2])
    td["one"] = UnbatchedTensor(torch.arange(3))
    rows = to_rows(td, as_="numpy")
    assert [row["whole"] for row in rows] == [{"step": 1}] * 2
    assert [row["rows"] for row in rows] == ["a", None]
    assert [row["one"].tolist() for row in rows] == [[0, 1, 2]] * 2


def test_columns_of_a_trainer():
    td = rollout()
    packed = materialize(td, layout="packed")
    assert [row["ids"] for row in to_rows(packed, as_="list")] == [[0, 1], [4, 5, 6, 7], []]
    padded = materialize(td, pad_to_seqlen=4)
    assert column_of(padded, "ids", "list")[1] == [4, 5, 6, 7]
    assert column_of(padded, "message") == ["a", {"b": (1, 2)}, None]


def test_strided_nested_and_sparse_columns():
    parts = [torch.ones(2, 1), torch.ones(1, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    assert_same(column_of({"x": nested}, "x"), parts)
    assert column_of({"x": nested}, "x", "list") == [[[1.0], [1.0]], [[1.0, 1.0, 1.0]]]
    assert [row.shape for row in column_of({"x": nested}, "x", "numpy")] == [(2, 1), (1, 3)]
    sparse = torch.eye(2).to_sparse()
    assert [row.to_dense().tolist() for row in column_of({"x": sparse}, "x")] == [[1, 0], [0, 1]]
    with pytest.raises(ArgumentTypeError, match=r"torch[.]sparse_coo; use as_='tensor'"):
        column_of({"x": sparse}, "x", "numpy")
    with pytest.raises(ArgumentTypeError, match=r"torch[.]sparse_csr; leave it out"):
        column_of({"x": torch.eye(2).to_sparse_csr()}, "x")


def test_numpy_columns():
    columns = {
        "i": np.array([1, 2], dtype=">i4"),
        "f": np.ones((2, 2), dtype=np.float32),
        "s": np.array(["a", "b"]),
        "back": np.arange(2)[::-1],
    }
    columns["f"].flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = to_rows(columns)
    assert rows[0]["i"].dtype == torch.int32
    assert rows[0]["f"].tolist() == [1, 1]
    assert [row["s"] for row in rows] == ["a", "b"]
    assert [int(row["back"]) for row in rows] == [1, 0]
    assert to_rows(columns, as_="list")[1] == {"i": 2, "f": [1, 1], "s": "b", "back": 0}
    assert column_of(columns, "i", "numpy")[1] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes_that_numpy_has_not(dtype):
    jagged: Any = stack_or_nest([torch.tensor([1.0, -2.0]), torch.tensor([0.5])]).to(torch.bfloat16)
    column = torch.nested.nested_tensor_from_jagged(jagged.values().to(dtype), jagged.offsets())
    for x in (column, torch.ones(2).to(dtype)):
        with pytest.raises(ArgumentTypeError, match=f"{dtype}.*as_='tensor'") as error:
            to_rows({"x": x}, as_="numpy")
        assert error.value.path == "to_rows['x']"
        assert to_rows({"x": x})[0]["x"].dtype == dtype
    assert column_of({"x": column}, "x", "list") == [[1.0, -2.0], [0.5]]


def test_gradients_flow_through_tensors():
    values = torch.ones(3, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    rows = column_of({"x": column}, "x")
    (rows[1].sum() * 2).backward()
    assert values.grad.tolist() == [0, 2, 2]
    assert column_of({"x": column}, "x", "list") == [[1], [1, 1]]
    assert column_of({"x": values}, "x", "numpy") == [1, 1, 1]


def test_more_than_one_batch_dim():
    td = TensorDict({"x": torch.arange(4).view(2, 2), "n": {"y": torch.ones(2, 2, 3)}}, [2, 2])
    rows = to_rows(td, as_="list")
    assert rows[1] == {"x": [2, 3], "n": {"y": [[1.0] * 3] * 2}}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([1, 2],), ArgumentTypeError, "TensorDict.*found list"),
        ((None,), ArgumentTypeError, "NoneType"),
        ((TensorDict({}, []),), ArgumentError, "batch dim"),
        (({"a": [1], "b": [1, 2]},), ArgumentError, "expected 1 rows"),
        (({"a": 5},), ArgumentTypeError, "column"),
        (({"a": [1]}, "a"), ArgumentTypeError, "found str; put one name in a list"),
        (({"a": [1]}, ["a", "b"]), ArgumentKeyError, "expected one of 'a'"),
        (({"a": [1]}, 5), ArgumentTypeError, "list of names"),
        (({"a": [1]}, None, "pandas"), ArgumentError, "'numpy'"),
        (({"a": torch.ones(2, device="meta")}, ["a"], "list"), ArgumentTypeError, "meta"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        to_rows(*arguments)


def test_lazy_stacks_are_refused():
    stack = LazyStackedTensorDict(*[TensorDict({"x": torch.ones(i)}, []) for i in range(2)])
    for batch in (stack, {"inner": stack}):
        with pytest.raises(ArgumentTypeError, match=r"lazy stack.*contiguous"):
            to_rows(batch)


def test_joins_of_open_messages():
    parts = [RowBuilder({"ids": torch.int64}) for _ in range(3)]
    for i, part in enumerate(parts):
        part.append(ids=range(i))
        part.set(reward=float(i), tag=str(i))
    joined = concat_rows([open_wire(part.to_frames()) for part in parts])
    assert to_rows(joined, as_="list") == [
        {"ids": list(range(i)), "reward": float(i), "tag": str(i)} for i in range(3)
    ]
    assert to_rows(joined.rows([2, 0]), ["tag", "ids"], "list")[0] == {"tag": "2", "ids": [0, 1]}
    resumed = RowBuilder.from_message(joined.rows([2]))
    assert resumed.to_row()["ids"].tolist() == [0, 1]
