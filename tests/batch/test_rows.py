"""Row algebra, against a model in which a batch is a plain list of rows."""

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    WireBatch,
    balance_rows,
    concat_rows,
    decode,
    encode,
    materialize,
    open_wire,
    pack_jagged_fields,
    repeat_rows,
    select_rows,
    split_rows,
    stack_or_nest,
    to_blob,
)
from jagcodec.batch.compare import first_difference
from jagcodec.errors import ArgumentIndexError, ArgumentTypeError
from jagcodec.testing import jagged_tensors
from jagcodec.types import PackedColumn
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import tensordicts


def table(batch, count=None):
    """A batch as a list of rows: each a dict of names to lists, bits and texts."""
    if isinstance(batch, WireBatch):
        batch = batch.to_tensordict()
    if isinstance(batch, LazyStackedTensorDict):
        assert batch.stack_dim == 0
        return [{k: bits(v) for k, v in member.items()} for member in batch.tensordicts]  # type: ignore[arg-type]
    if isinstance(batch, TensorDictBase):
        count = batch.batch_size[0]
    elif count is None:
        count = len(batch)
    columns = {name: entries(leaf, count) for name, leaf in batch.items()}
    assert all(len(column) == count for column in columns.values())
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def entries(leaf, count):
    if isinstance(leaf, NonTensorStack):
        return [repr(item) for item in leaf.tolist()]
    if isinstance(leaf, NonTensorData):
        held = leaf.data
        by_row = isinstance(held, np.ndarray) and held.dtype == object
        return [repr(item) for item in held] if by_row else [repr(held)] * count
    if isinstance(leaf, PackedColumn):
        cuts = leaf.cu_seqlens.tolist()
        assert leaf.max_seqlen == max(np.diff(cuts), default=0)
        assert leaf.position_ids.tolist() == [
            i for a, b in itertools.pairwise(cuts) for i in range(b - a)
        ]
        dim = leaf.values.shape.index(cuts[-1])
        return [bits(leaf.values.narrow(dim, a, b - a)) for a, b in itertools.pairwise(cuts)]
    if isinstance(leaf, torch.Tensor):
        return rows_of(leaf) if leaf.is_nested else bits(leaf)
    if isinstance(leaf, (np.ndarray, list)):
        return [repr(item) for item in leaf]
    return table(leaf, count)


def offsets(jagged):
    return jagged.offsets()


@st.composite
def indices(draw, rows):
    """An index, and the rows that it stands for."""
    kinds = ["slice", "bools", "empty", *(["ints", "int"] if rows else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "slice":
        index = draw(st.slices(rows))
        return index, list(range(rows))[index]
    if kind == "empty":
        return [], []
    if kind == "bools":
        chosen = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        form = draw(st.sampled_from([np.array, torch.tensor]))
        return form(chosen, dtype=bool if form is np.array else torch.bool), [
            i for i, wanted in enumerate(chosen) if wanted
        ]
    if kind == "int":
        i = draw(st.integers(-rows, rows - 1))
        return i, [i % rows]
    chosen = draw(st.lists(st.integers(-rows, rows - 1), max_size=6))
    form = draw(st.sampled_from([list, np.array, torch.tensor]))
    return form(chosen), [i % rows for i in chosen]


def has_lazy(td):
    return any(
        (isinstance(leaf, LazyStackedTensorDict) and not isinstance(leaf, NonTensorStack))
        or (isinstance(leaf, TensorDict) and has_lazy(leaf))
        for _, leaf in td.items()
    )


@given(st.data())
def test_select_is_what_a_list_of_rows_does(data):
    td = data.draw(tensordicts())
    index, chosen = data.draw(indices(td.batch_size[0]))
    assume(chosen or not has_lazy(td))
    before = table(td)
    selected = select_rows(td, index)
    assert type(selected) is TensorDict
    assert selected.batch_size == (len(chosen),)
    assert selected.names == td.names
    assert list(selected.keys()) == list(td.keys())
    assert table(selected) == [before[i] for i in chosen]
    assert table(td) == before
    assert table(decode(encode(selected))) == table(selected)


@given(st.data())
def test_select_on_a_message_is_the_same(data):
    td = data.draw(tensordicts())
    index, chosen = data.draw(indices(td.batch_size[0]))
    assume(chosen or not has_lazy(td))
    part = select_rows(open_wire(encode(td)), index)
    assert isinstance(part, WireBatch)
    assert table(part) == table(select_rows(td, index))


@given(st.data())
def test_what_is_split_is_put_together_again(data):
    td = data.draw(tensordicts())
    rows = td.batch_size[0]
    parts = data.draw(st.integers(1, max(rows, 1) if has_lazy(td) else rows + 2))
    assume(rows or not has_lazy(td))
    split = split_rows(td, parts)
    assert len(split) == parts
    sizes = [part.batch_size[0] for part in split]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert table(concat_rows(split)) == table(td)
    assert [row for part in split for row in table(part)] == table(td)
    messages = split_rows(open_wire(encode(td)), parts)
    assert table(concat_rows(messages)) == table(td)


def is_ambiguous(column):
    """Packed values of (n, n) cells do not say which dim is ragged."""
    if isinstance(column, dict):
        return any(map(is_ambiguous, column.values()))
    packed = isinstance(column, PackedColumn)
    return packed and column.values.shape[:2] == (column.cu_seqlens[-1],) * 2


@given(st.data())
def test_dicts_of_columns_too(data):
    td = data.draw(tensordicts())
    for layout in ("padded", "jagged", "packed"):
        try:
            batch = materialize(td, layout)
        except TypeError:  # a lazy stack
            assume(False)
        index, chosen = data.draw(indices(len(batch)))
        if layout == "packed" and is_ambiguous(batch):
            with pytest.raises(ValueError, match="choose rows before"):
                batch.rows(index)
            continue
        selected = batch.rows(index)
        assert type(selected) is BatchedDataDict
        if layout == "packed" and is_ambiguous(selected):
            continue
        assert table(selected) == [table(batch)[i] for i in chosen]
        if batch:
            twice = concat_rows([selected, batch])
            if layout == "packed" and is_ambiguous(twice):
                continue
            assert table(twice) == table(selected) + table(batch)


@pytest.mark.parametrize("cuts", [[0, 3, 1], [1, 2, 3], [0, -1, 3], [[0, 1], [1, 3]]], ids=str)
def test_packed_columns_of_unsound_rows_are_refused(cuts):
    column = PackedColumn(torch.arange(3), torch.tensor(cuts), 2, torch.arange(3))
    with pytest.raises(ArgumentError, match=r"expected \(N \+ 1,\) cu_seqlens .* that never fall"):
        select_rows({"a": column}, [0])


@given(jagged_tensors(), st.data())
def test_a_jagged_column_of_any_kind(jagged, data):
    rows = jagged.shape[0]
    index, chosen = data.draw(indices(rows))
    selected = select_rows(TensorDict({"x": jagged}, [rows]), index)["x"]
    assert rows_of(selected) == [rows_of(jagged)[i] for i in chosen]
    assert selected.dim() == jagged.dim()
    assert selected.values().is_contiguous()
    assert offsets(selected).dtype == torch.int64
    lengths = [len(range(*span)) for span in itertools.pairwise(offsets(selected).tolist())]
    assert (selected._min_seqlen, selected._max_seqlen) == (
        min(lengths, default=0),
        max(lengths, default=0),
    )


def batch_of(*rows, **more):
    ids = stack_or_nest([torch.tensor(row) for row in rows], always_nest=True)
    return TensorDict({"ids": ids, **more}, [len(rows)])


def test_columns_share_their_raggedness_after_every_operation():
    fields = {"ids": torch.arange(12).view(3, 4), "logprob": torch.rand(3, 4)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([2, 4, 3]))
    for result in (
        select_rows(td, [2, 0]),
        select_rows(td, slice(0, 2)),
        concat_rows([td, td]),
        repeat_rows(td, 2),
        *split_rows(td, 2),
        BatchedDataDict(td.items()).to("cpu"),
    ):
        assert offsets(result["ids"]) is offsets(result["logprob"])
        product = result["ids"] * result["logprob"]
        assert product.shape[0] == result["ids"].shape[0]


def test_a_range_is_a_slice_and_a_pickled_batch_of_slices_holds_only_its_rows():
    td = pack_jagged_fields(
        {"ids": torch.arange(40_000).view(4, 10_000), "grid": torch.arange(40_000).view(4, 10_000)},
        lengths=torch.tensor([10_000] * 4),
        token_aligned_fields=["ids"],
    )
    part = select_rows(td, slice(1, 2))
    for name in ("ids", "grid"):
        whole = td[name].values() if name == "ids" else td[name]
        view = part[name].values() if name == "ids" else part[name]
        assert view.data_ptr() == whole.data_ptr() + 80_000
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert len(pickle.dumps(BatchedDataDict({"x": part[name]}))) < 90_000
        assert sum(map(len, encode(part.select(name)))) < 90_000
    columns = BatchedDataDict(td.items()).rows(slice(1, 2))
    columns["again"] = columns["grid"]
    packed = pickle.dumps(columns)
    assert len(packed) < 180_000  # a column of two names once
    back = pickle.loads(packed)
    assert back["again"] is back["grid"]
    assert_same(dict(back), dict(columns))
    chosen = select_rows(td, [1])
    assert chosen["grid"].data_ptr() != part["grid"].data_ptr()
    assert_same(chosen["grid"], part["grid"])


MOVED = """
import torch
from jagcodec import BatchedDataDict, materialize, select_rows, split_rows, stack_or_nest

ways = {
    "select_rows": lambda batch: select_rows(batch, slice(1, 3)),
    "split_rows": lambda batch: split_rows(batch, sizes=[1, 2, 1])[1],
    "rows": lambda batch: batch.rows(slice(1, 3)),
    "iterator": lambda batch: list(batch.rows(slice(1, 3)).make_iterator(2, epochs=1))[0],
}
size = 1 << 20  # large enough for the system to take its memory back at once
for how, take in ways.items():
    print(how, flush=True)
    batch = BatchedDataDict(
        x=torch.arange(4 * size).view(4, size),
        jagged=stack_or_nest([torch.full((size + i,), i) for i in range(4)]),
    )
    part = take(batch)
    expected = [row.clone() for row in part["x"]], part["jagged"].values().clone()
    batch["x"].share_memory_()  # what putting it on a queue of torch.multiprocessing does
    batch["jagged"].values().share_memory_()
    others = [torch.full((4, size), 9) for _ in range(4)]  # where the memory was
    assert torch.equal(part["x"], torch.stack(expected[0]))
    assert torch.equal(part["jagged"].values(), expected[1])
"""


def test_chosen_rows_stay_right_when_their_source_moves_to_shared_memory():
    # In a process of its own: one that is wrong may end.
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["select_rows", "split_rows", "rows", "iterator"]


def test_gradients_flow():
    values = torch.arange(6.0, requires_grad=True)
    jagged = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([0, 2, 3, 6]), min_seqlen=1, max_seqlen=3
    )
    weight = torch.ones(3, 2, requires_grad=True)
    td = TensorDict({"x": jagged, "w": weight}, [3])
    result = concat_rows([select_rows(td, [2, 0, 2]), select_rows(td, slice(0, 1))])
    (result["x"].values().sum() + result["w"].sum()).backward()
    assert values.grad.tolist() == [2, 2, 0, 2, 2, 2]
    assert weight.grad.tolist() == [[2, 2], [0, 0], [2, 2]]


def test_payloads_of_the_whole_batch_stay_that_until_they_differ():
    one, other = (
        TensorDict({"step": NonTensorData({"n": n}, batch_size=[2])}, [2]) for n in (1, 2)
    )
    same = concat_rows([one, select_rows(one, [0])])
    assert_same(same.get("step"), NonTensorData({"n": 1}, batch_size=[3]))
    differ = concat_rows([one, other]).get("step")
    assert isinstance(differ, NonTensorStack)
    assert differ.tolist() == [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 2}]
    # 1 and True and 1.0 are equal and are not the same.
    kinds = [TensorDict({"x": NonTensorData(x, batch_size=[1])}, [1]) for x in (1, True, 1.0)]
    assert [type(x) for x in concat_rows(kinds).get("x").tolist()] == [int, bool, float]


def test_payloads_that_cannot_be_encoded_are_compared_by_identity():
    lock = object()
    td = TensorDict({"x": NonTensorData(lock, batch_size=[1])}, [1])
    assert concat_rows([td, td]).get("x").data is lock
    other = TensorDict({"x": NonTensorData(object(), batch_size=[1])}, [1])
    assert concat_rows([td, other]).get("x").tolist()[0] is lock


def test_object_arrays_stay_object_arrays():
    array = np.array(["a", ["b"], None], dtype=object)
    td = TensorDict({"x": array, "y": NonTensorStack("a", "b", "c")}, [3])
    both = concat_rows([td, select_rows(td, [1])])
    assert both.get("x").data.tolist() == ["a", ["b"], None, ["b"]]
    assert both.get("y").tolist() == ["a", "b", "c", "b"]
    none = select_rows(td, [])
    assert materialize(none)["y"].shape == (0,)
    assert concat_rows([none, td]).get("y").tolist() == ["a", "b", "c"]


def test_stacks_of_more_batch_dims():
    inner = [NonTensorStack(NonTensorData(i), NonTensorData(-i)) for i in range(3)]
    stack = NonTensorStack(*inner)
    td = TensorDict({"x": stack, "w": NonTensorData("w", batch_size=[3, 2])}, [3, 2])
    back = select_rows(td, [2, 0])
    assert back.batch_size == (2, 2)
    assert back.get("x").tolist() == [[2, -2], [0, 0]]
    assert concat_rows([back, td]).get("x").tolist() == [[2, -2], [0, 0], [0, 0], [1, -1], [2, -2]]
    other = TensorDict({**dict(td.items()), "w": NonTensorData("v", batch_size=[3, 2])}, [3, 2])
    with pytest.raises(ArgumentError, match=r"\['w'\].*flatten the batch"):
        concat_rows([td, other])


def test_lazy_sparse_and_strided_nested_leaves():
    lazy = LazyStackedTensorDict(
        *[TensorDict({"x": torch.ones(n)}, []) for n in (1, 2)], stack_dim=0
    )
    coo = torch.eye(2).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided)
    td = TensorDict({"lazy": lazy, "coo": coo, "nested": nested}, [2])
    back = concat_rows([select_rows(td, [1]), td])
    assert [m["x"].shape[0] for m in back["lazy"].tensordicts] == [2, 1, 2]
    assert back["coo"].to_dense().tolist() == [[0, 1], [1, 0], [0, 1]]
    assert [len(row) for row in back["nested"].unbind()] == [2, 1, 2]
    csr = TensorDict({"csr": torch.eye(2).to_sparse_csr()}, [2])
    with pytest.raises(ValueError, match="csr"):
        select_rows(csr, [0])
    with pytest.raises(ValueError, match="csr"):
        concat_rows([csr, csr])


def test_every_dtype():
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex128, torch.bool):
        column = torch.arange(6, dtype=torch.uint8).view(3, 2).to(dtype)
        td = TensorDict({"x": column}, [3])
        both = concat_rows([select_rows(td, [2, 0]), td])["x"]
        assert both.dtype == dtype
        assert bits(both) == [bits(column)[i] for i in (2, 0, 0, 1, 2)]
    conj = torch.tensor([[1 + 2j], [3 - 1j]]).conj()
    assert select_rows({"x": conj}, [1])["x"].tolist() == [[3 + 1j]]


def test_a_message_is_not_read_until_it_is_asked():
    td = pack_jagged_fields({"ids": torch.arange(12).view(3, 4)}, lengths=torch.tensor([2, 4, 3]))
    asked = []
    blob = to_blob(encode(td))

    def fetch(offset, size):
        asked.append(size)
        return blob[offset : offset + size]

    batch = open_wire(fetch)
    header = sum(asked)
    parts = split_rows(batch, 3)
    assert sum(asked) == header
    assert [row.tolist() for row in parts[2].to_tensordict()["ids"].unbind()] == [[8, 9, 10]]


# --- repeat ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 3), st.booleans())
def test_repeat(rows, times, interleave):
    batch = BatchedDataDict(x=torch.tensor(rows, dtype=torch.int64))
    expected = [x for x in rows for _ in range(times)] if interleave else rows * times
    assert repeat_rows(batch, times, interleave=interleave)["x"].tolist() == expected
    assert batch.repeat(times, interleave)["x"].tolist() == expected


def test_repeat_by_row():
    assert repeat_rows({"x": [5, 6, 7]}, torch.tensor([2, 0, 1]))["x"] == [5, 5, 7]


@pytest.mark.parametrize(
    ("times", "options", "error"),
    [
        (-1, {}, ValueError),
        ([1, 2], {}, ValueError),
        (1.5, {}, TypeError),
        ("2", {}, TypeError),
        (True, {}, TypeError),
        ([1, 1, 1], {"interleave": False}, TypeError),
    ],
)
def test_repeat_refuses(times, options, error):
    with pytest.raises(error, match=r"repeat_rows\(times\)"):
        repeat_rows({"x": [1, 2, 3]}, times, **options)


# --- split -------------------------------------------------------------------------------------


def test_split_by_sizes():
    parts = split_rows({"x": [1, 2, 3, 4]}, sizes=[1, 0, 3])
    assert [part["x"] for part in parts] == [[1], [], [2, 3, 4]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_a_token_budget_holds_and_loses_no_row(lengths, budget):
    parts = balance_rows(lengths, max_tokens=budget)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert all(len(part) > 0 and total <= budget for part, total in zip(parts, sums, strict=True))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    # Never more parts than twice what the tokens need, plus one: LPT fills every part but one
    # to half of the budget.
    assert len(parts) <= 2 * (sum(lengths) // budget) + 2
    assert [p.tolist() for p in balance_rows(torch.tensor(lengths), max_tokens=budget)] == [
        p.tolist() for p in parts
    ]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_balanced_parts_are_within_one_row_of_each_other(lengths, data):
    count = data.draw(st.integers(1, len(lengths)))
    parts = balance_rows(lengths, count)
    assert len(parts) == count
    assert all(len(part) for part in parts)
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths)


def test_split_by_tokens_and_back():
    td = batch_of([1] * 5, [2], [3] * 4, [4] * 2, [5] * 3, step=NonTensorData(1, batch_size=[5]))
    parts = split_rows(td, max_tokens=8)
    assert [[row[0].item() for row in part["ids"].unbind()] for part in parts] == [
        [1, 2, 4],
        [3, 5],
    ]
    order = np.concatenate(balance_rows([5, 1, 4, 2, 3], max_tokens=8))
    again = select_rows(concat_rows(parts), np.argsort(order))
    assert_same(again, td)
    assert len(split_rows(td, 4, max_tokens=8)) == 4
    packed = materialize(td, "packed")
    assert [len(part) for part in packed.split(max_tokens=8)] == [3, 2]
    assert [len(part) for part in split_rows(open_wire(encode(td)), max_tokens=8)] == [3, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of parts, sizes and max_tokens"),
        ({"parts": 2, "sizes": [1, 2]}, "one of parts, sizes and max_tokens"),
        ({"sizes": [3], "max_tokens": 9}, "one of parts, sizes and max_tokens"),
        ({"parts": 2, "lengths": torch.ones(3)}, "lengths only with max_tokens"),
        ({"parts": 0}, "expected 1 or more, found 0"),
        ({"parts": 1.5}, "expected 1 or more, found 1.5"),
        ({"sizes": [1, 1]}, "add up to 3"),
        ({"sizes": [4, -1]}, "add up to 3"),
        ({"sizes": [1.5, 1.5]}, "add up to 3"),
        ({"max_tokens": 3}, "row 1.*max_tokens=3 tokens, found 4"),
        ({"max_tokens": 0}, "expected 1 or more"),
        ({"max_tokens": 9, "parts": 4}, "at most 3 parts"),
        ({"max_tokens": 9, "lengths": torch.ones(2, dtype=torch.int64)}, "lengths shape"),
    ],
)
def test_split_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        split_rows(batch_of([1], [1] * 4, [1]), **options)


def test_split_by_tokens_asks_which_lengths_count():
    td = batch_of([1], [2, 3], other=stack_or_nest([torch.ones(4), torch.ones(2)]))
    with pytest.raises(ValueError, match="'ids' and 'other' differ"):
        split_rows(td, max_tokens=9)
    assert len(split_rows(td, max_tokens=5, lengths=torch.tensor([4, 2]))) == 2
    with pytest.raises(ValueError, match="found neither"):
        split_rows({"x": [1]}, max_tokens=9)
    assert split_rows({"x": []}, max_tokens=9, lengths=torch.tensor([], dtype=torch.int64)) == []
    with pytest.raises(ValueError, match="found neither"):
        balance_rows([1, 2])
    with pytest.raises(ValueError, match=r"row 0.*0 or more, found -1"):
        balance_rows([-1], 1)


# --- concat refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ({"ids": torch.ones(1, 2, dtype=torch.int64)}, ValueError, "layout jagged.*strided"),
        ({"ids": stack_or_nest([torch.ones(1)], always_nest=True)}, ValueError, "dtype"),
        (
            {"ids": stack_or_nest([torch.ones(1, 2, dtype=torch.int64)], always_nest=True)},
            ValueError,
            "row shape",
        ),
        ({"ids": NonTensorData("x", batch_size=[1])}, TypeError, "one kind of column"),
        ({}, KeyError, "'ids' missing"),
    ],
)
def test_concat_refuses(other, error, message):
    with pytest.raises(error, match=message):
        concat_rows([batch_of([1, 2]), TensorDict(other, [1])])


def test_concat_names_columns_and_batches():
    with pytest.raises(KeyError, match=r"batch 1.*'y' besides"):
        concat_rows([batch_of([1]), batch_of([1], y=torch.ones(1))])
    with pytest.raises(ValueError, match=r"\['x'\] of batch 1.*row shape"):
        concat_rows([{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}])
    first, second = (
        stack_or_nest([torch.ones(2, 2)], always_nest=True, ragged_dim=dim) for dim in (1, 2)
    )
    with pytest.raises(ValueError, match="ragged dim"):
        concat_rows([{"x": first}, {"x": second}])
    with pytest.raises(ValueError, match="found none"):
        concat_rows([])
    with pytest.raises(TypeError, match="one batch"):
        concat_rows(batch_of([1]))
    with pytest.raises(TypeError, match="kind of column"):
        concat_rows([batch_of([1]), {"ids": [1]}])
    with pytest.raises(TypeError, match=r"batches\[1\].*expected a batch"):
        concat_rows([batch_of([1]), [1]])


def test_select_refuses():
    td = batch_of([1], [2])
    for index, error in (
        ([2], IndexError),
        ([-3], IndexError),
        ([True], TypeError),
        ("x", TypeError),
    ):
        with pytest.raises(error, match=r"select_rows\(index\)"):
            select_rows(td, index)
    with pytest.raises(TypeError, match=r"select_rows\(batch\)"):
        select_rows([1, 2], [0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no batch dim"):
        select_rows(TensorDict({}, []), [0])
    with pytest.raises(ValueError, match="found 1"):
        select_rows({"a": [1, 2], "b": [1]}, [0])
    with pytest.raises(TypeError, match="meta_info"):
        select_rows({"a": 7}, [0])


# --- BatchedDataDict ---------------------------------------------------------------------------


def trainer_batch():
    td = pack_jagged_fields(
        {
            "ids": torch.arange(12).view(3, 4),
            "reward": torch.arange(3.0),
            "message": np.array(["a", {"b": 1}, None], dtype=object),
        },
        lengths=torch.tensor([2, 4, 3]),
        token_aligned_fields=["ids"],
    )
    batch = materialize(td)
    batch.meta_info["step"] = 7
    return batch


def test_length_is_rows():
    batch = trainer_batch()
    assert len(batch) == 3
    assert len(BatchedDataDict()) == 0
    assert not BatchedDataDict()
    empty = batch.rows([])
    assert len(empty) == 0
    assert empty
    assert list(batch) == ["ids", "reward", "message"]
    assert "rows=3" in repr(batch)


def test_every_column_has_n_rows():
    with pytest.raises(ValueError, match=r"\['b'\]: expected 2 rows.*found 1"):
        BatchedDataDict(a=[1, 2], b=torch.ones(1))
    batch = BatchedDataDict(a=[1, 2])
    for put in (
        lambda: batch.__setitem__("b", [1]),
        lambda: batch.update(b=[1]),
        lambda: batch.setdefault("b", [1]),
        lambda: batch | {"b": [1]},
        lambda: batch.__ior__({"b": [1]}),
    ):
        with pytest.raises(ValueError, match="expected 2 rows"):
            put()
    with pytest.raises(TypeError, match="meta_info"):
        batch["step"] = 7
    assert list(batch) == ["a"]
    batch["a"] = [1, 2, 3]  # the only column may change its rows
    batch.update({"b": np.zeros(3)}, c=[0, 0, 0])
    assert list(batch | {"d": [1, 1, 1]}) == ["a", "b", "c", "d"]
    assert isinstance(batch | {}, BatchedDataDict)


def test_select_and_union():
    batch = trainer_batch()
    left, right = batch.select(["ids", "reward"]), batch.select(["reward", "message"])
    assert list(left) == ["ids", "reward"]
    assert left["ids"] is batch["ids"]
    both = left.union(right)
    assert list(both) == ["ids", "reward", "message"]
    assert both.meta_info == {"step": 7}
    assert list(left) == ["ids", "reward"]
    with pytest.raises(KeyError, match="'nope'"):
        batch.select(["nope"])
    nan = BatchedDataDict(x=torch.tensor([float("nan")]))
    assert list(nan.union({"x": torch.tensor([float("nan")])})) == ["x"]
    for other in (torch.tensor([0.0]), torch.tensor([float("nan")]).double(), [float("nan")]):
        with pytest.raises(ValueError, match=r"union\(other\)\['x'\]"):
            nan.union({"x": other})
    with pytest.raises(ValueError, match=r"meta_info\['step'\]"):
        batch.union(BatchedDataDict(y=[1, 2, 3], meta_info={"step": 8}))
    with pytest.raises(ValueError, match="rows"):
        batch.union({"y": [1]})


def test_union_and_diff_agree_on_what_is_equal():
    tensor = torch.tensor([0.5, float("nan")])
    batch = BatchedDataDict(w=torch.nn.Parameter(tensor.clone()), n=[1, 2])
    for name, column in (("w", tensor), ("n", [1, 2])):
        assert first_difference({name: column}, {name: batch[name]}) is None
        assert list(batch.union({name: column})) == ["w", "n"]
    for name, column in (("w", -tensor), ("n", [1, True])):
        assert first_difference({name: column}, {name: batch[name]}) is not None
        with pytest.raises(ValueError, match=rf"union\(other\)\['{name}'\]"):
            batch.union({name: column})


def test_mini_batches_come_from_the_seed_alone():
    batch = BatchedDataDict(x=torch.arange(6), meta_info={"a": 1})
    plain = [mini["x"].tolist() for mini in batch.make_iterator(2, epochs=2)]
    assert plain == [[0, 1], [2, 3], [4, 5]] * 2

    def order(seed):
        torch.rand(3)  # what else is drawn does not matter
        return [mini["x"].tolist() for mini in batch.make_iterator(3, 2, seed=seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    first, second = order(1)[:2], order(1)[2:]
    assert first != second
    for minis in (first, second):
        assert sorted(x for mini in minis for x in mini) == list(range(6))
    assert next(batch.make_iterator(2)).meta_info == {"a": 1}


@pytest.mark.parametrize(
    ("args", "message"), [((4,), "divisor of the 6"), ((0,), "mini_batch"), ((2, 0), "epochs")]
)
def test_mini_batches_refuse_at_once(args, message):
    with pytest.raises(ValueError, match=message):
        BatchedDataDict(x=[0] * 6).make_iterator(*args)


def test_concat_keeps_the_meta_info_that_all_agree_on():
    batch, other = trainer_batch(), trainer_batch()
    other.meta_info = {"step": 7, "more": [1]}
    both = BatchedDataDict.concat([batch, other])
    assert type(both) is BatchedDataDict
    assert both.meta_info == {"step": 7}
    assert batch.meta_info == {"step": 7}
    other.meta_info["step"] = 7.0
    assert BatchedDataDict.concat([batch, other]).meta_info == {}


class Subclass(BatchedDataDict):
    pass


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_pickles_and_encodes_with_its_meta_info(layout):
    td = pack_jagged_fields(
        {"ids": torch.arange(12).view(3, 4), "reward": torch.arange(3.0)},
        lengths=torch.tensor([2, 4, 3]),
        token_aligned_fields=["ids"],
    )
    batch = materialize(td, layout, container=Subclass)
    batch.meta_info["step"] = 7
    back = pickle.loads(pickle.dumps(batch))
    assert type(back) is Subclass
    assert table(back) == table(batch)
    assert back.meta_info == {"step": 7}
    assert type(batch.copy()) is Subclass
    assert type(batch.rows([0])) is Subclass
    ridden = decode(encode(BatchedDataDict(batch, meta_info=batch.meta_info)))
    assert type(ridden) is BatchedDataDict
    assert table(ridden) == table(batch)
    assert ridden.meta_info == {"step": 7}


def test_a_pickled_column_holds_only_itself():
    batch = materialize(
        TensorDict(
            {"small": stack_or_nest([torch.ones(1), torch.ones(2)]), "big": torch.ones(2, 9)}, [2]
        )
    )
    big = materialize(
        pack_jagged_fields(
            {"a": torch.ones(64, 512), "b": torch.ones(64, 512)}, lengths=torch.full((64,), 512)
        )
    )
    assert len(pickle.dumps(big["a"])) < 64 * 512 * 4 + 2000
    assert len(pickle.dumps(batch["small"])) < 2000


def test_move():
    batch = trainer_batch()
    moved = batch.to("meta")
    assert moved["ids"].device.type == "meta"
    assert moved["message"] is batch["message"]
    assert batch.to("cpu")["ids"] is batch["ids"]
    assert moved.meta_info == batch.meta_info


def test_errors_name_the_function_that_was_called():
    td = batch_of([1], [1] * 9)
    lengths = torch.tensor([1, 9])
    calls = {
        "split_rows": lambda **options: split_rows(td, lengths=lengths, **options),
        "balance_rows": lambda **options: balance_rows(lengths, **options),
    }
    for where, call in calls.items():
        for options, rest in (
            ({"max_tokens": 5}, "(lengths), row 1"),
            ({"max_tokens": 0}, "(max_tokens)"),
            ({"max_tokens": 9, "parts": 3}, "(parts)"),
            ({"max_tokens": 9, "parts": 0}, "(parts)"),
        ):
            with pytest.raises(ArgumentError) as caught:
                call(**options)
            assert caught.value.path == where + rest


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_a_lazy_stack_is_not_a_batch(stack_dim):
    members = [TensorDict({"x": torch.ones(2, i + 1)}, [2]) for i in range(2)]
    stack = LazyStackedTensorDict(*members, stack_dim=stack_dim)
    for call in (select_rows, split_rows):
        with pytest.raises(ArgumentTypeError, match=r"\(batch\).*lazy stack.*contiguous"):
            call(stack, 1)
    if stack_dim:
        with pytest.raises(ArgumentError, match=r"\['x'\].*stack along the rows"):
            select_rows({"x": stack}, [0])


def test_indices_beyond_int64_are_no_rows_from_the_end():
    batch = pack_jagged_fields({"ids": torch.arange(6).view(3, 2)}, lengths=[1, 2, 2])
    with pytest.raises(ArgumentIndexError, match="rows of 0 to 2"):
        select_rows(batch, np.array([2**64 - 1], dtype=np.uint64))
    assert select_rows(batch, np.array([2, 0], dtype=np.uint64)).batch_size == (2,)
