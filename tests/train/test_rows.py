"""A batch is a list of rows, whatever form it has and whatever was done to it."""

import functools
import itertools
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule
from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor

from jagcodec import BatchedDataDict, WireBatch, WireFormatError, encode, select_rows, split_rows
from jagcodec.errors import ArgumentError, ArgumentIndexError, ArgumentKeyError, ArgumentTypeError
from jagcodec.forward.micro_batches import plan_micro_batches
from jagcodec.produce.jagged_tensors import stack_or_nest
from jagcodec.schema import check_schema
from jagcodec.testing import jagged_tensors
from jagcodec.train.materialize import materialize
from jagcodec.train.rows import concat_rows, join_columns, repeat_rows
from jagcodec.train.tax import padding_tax
from jagcodec.train.to_rows import to_rows
from jagcodec.types import PackedColumn
from jagcodec.wire.blobs import to_blob
from jagcodec.wire.compare import first_difference
from jagcodec.wire.read.decoder import decode
from jagcodec.wire.read.wire_batch import open_wire
from tests.helpers import MESSAGES, Store, message, nested, rollout, run_python
from tests.oracle import assert_same, bits, pad_rows, rows_of, table
from tests.strategies import indices, tensordicts
from tests.wire.readers import OPTIONS, peak_of
from tests.wire.values import Turn

# --- a batch as a list of rows -----------------------------------------------------------------


def rollout_of(rows, tag="gsm8k"):
    """A batch of (number, tokens) for each row; numbers from 4 on do not fit in two bytes."""
    offsets = torch.tensor([0, *np.cumsum([tokens for _, tokens in rows])], dtype=torch.int64)
    make = torch.nested.nested_tensor_from_jagged
    ids = [torch.arange(tokens) + (number << 7 * number) for number, tokens in rows]
    views = torch.cat([torch.stack([row, -row]).int() for row in ids], 1)
    numbers = torch.tensor([float(number) for number, _ in rows])
    pairs = torch.cat([torch.stack([row, -row], 1) for row in ids]).float()
    inner = {"ids": nested([row[:1] for row in ids], torch.int16), "reward": numbers.double()}
    return TensorDict(
        {
            "ids": make(torch.cat(ids), offsets),
            "pairs": make(pairs, offsets),
            "done": make(torch.cat(ids) % 3 == 0, offsets),
            "views": make(views, offsets, jagged_dim=2),
            "reward": numbers,
            "grid": (numbers.view(-1, 1, 1) * torch.ones(2, 3)).short(),
            "text": NonTensorStack(*[NonTensorData({"row": number}) for number, _ in rows]),
            "tag": NonTensorData(tag, batch_size=[len(rows)]),
            "inner": TensorDict(inner, [len(rows)]),
        },
        [len(rows)],
    )


class Batch(NamedTuple):
    """A batch in any form, and what it must hold."""

    held: Any
    rows: list[dict[str, Any]]  # as `table` gives them
    names: list[str]  # of its columns, in their order
    kind: type  # of every batch that is made of it
    packed: bool  # whether its jagged columns are packed ones
    meta: dict[str, Any] | None

    def checked(self):
        """Itself, once it is known to hold that."""
        held, rows, names, kind = self.held, self.rows, self.names, self.kind
        assert type(self.held) is kind
        assert list(held.keys()) == names
        assert table(held, len(rows)) == [{name: row[name] for name in names} for row in rows]
        if self.meta is not None:
            assert (held.meta if kind is WireBatch else held.meta_info) == self.meta
        if kind is TensorDict and {"ids", "done"} <= {*names}:
            assert held["ids"].offsets() is held["done"].offsets()
        return self

    def of_rows(self, held, chosen):
        """What an operation made of some of its rows."""
        return self._replace(held=held, rows=[self.rows[i] for i in chosen]).checked()


UNPACKED = ("pairs", "views")  # packed, they do not always say which of their dims is ragged
IN_MEMORY: dict[str, Any] = {
    "TensorDict": lambda td, meta: td,
    "dict": lambda td, meta: dict(td.items()),
    "BatchedDataDict": lambda td, meta: BatchedDataDict(td.items(), meta_info=meta),
    "packed": lambda td, meta: BatchedDataDict(
        materialize(td.exclude(*UNPACKED), "packed"), meta_info=meta
    ),
}
FORMS = st.sampled_from([*IN_MEMORY, *MESSAGES])


def opened(batch):
    held = batch.held
    return open_wire(held) if isinstance(held, (list, tuple, bytearray)) else held


def held_as(form, td, meta, **options):
    if form in MESSAGES:
        return MESSAGES[form](encode(td, meta=meta, **options))
    return IN_MEMORY[form](td, meta)


def with_columns(batch, names):
    if names == batch.names:
        return batch.held
    held = opened(batch)
    if type(held) is dict:
        return {name: held[name] for name in names}
    return held.select(*names) if isinstance(held, TensorDict) else held.select(names)


def common_meta(metas):
    """What all of them have in common; None unless all say."""
    if None in metas:
        return None
    first, *others = metas
    return {k: v for k, v in first.items() if all(m.get(k) == v for m in others)}


def made(form, numbers, tag, step, options):
    td, meta = rollout_of(numbers, tag), {"step": step, "seed": 3}
    packed = form == "packed"
    names = [*(td.exclude(*UNPACKED) if packed else td).keys()]
    held = held_as(form, td, meta, **options)
    kind = WireBatch if form in MESSAGES else type(held)
    kept = meta if kind in (WireBatch, BatchedDataDict) else None
    return Batch(held, table(td), names, kind, packed, kept)


BATCHES = st.builds(
    made,
    form=FORMS,
    numbers=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), min_size=1, max_size=4),
    tag=st.sampled_from(["gsm8k", "math"]),
    step=st.integers(1, 2),
    options=st.sampled_from(OPTIONS),
)


class Rows(RuleBasedStateMachine):
    batches = Bundle("batches")

    @initialize(target=batches, made=st.lists(BATCHES, min_size=2, max_size=5))
    def begin(self, made):
        return multiple(*made)

    @rule(target=batches, batch=batches, data=st.data())
    def choose(self, batch, data):
        index, chosen = data.draw(indices(len(batch.rows)))
        return batch.of_rows(select_rows(batch.held, index), chosen)

    @rule(
        target=batches,
        batch=batches,
        times=st.integers(0, 2) | st.lists(st.integers(0, 2), min_size=4, max_size=4),
        together=st.booleans(),
    )
    def repeat(self, batch, times, together):
        count = len(batch.rows)
        if isinstance(times, list):
            times, together = np.resize(times, count), True
        chosen = np.repeat(range(count), times) if together else np.tile(range(count), times)
        times = torch.from_numpy(times) if isinstance(times, np.ndarray) else times
        return batch.of_rows(repeat_rows(batch.held, times, interleave=together), chosen)

    @rule(target=batches, batch=batches, parts=st.integers(1, 4))
    def split(self, batch, parts):
        found = split_rows(batch.held, parts)
        expected = np.array_split(range(len(batch.rows)), parts)
        return multiple(*[batch.of_rows(*part) for part in zip(found, expected, strict=True)])

    @rule(target=batches, batch=batches, data=st.data())
    def choose_columns(self, batch, data):
        names = data.draw(st.lists(st.sampled_from(batch.names), min_size=1, unique=True))
        found = with_columns(batch._replace(held=opened(batch)), names)
        return batch._replace(held=found, names=names).checked()

    @rule(target=batches, chosen=st.lists(batches, min_size=2, max_size=4))
    def concatenate(self, chosen):
        model = next((b for b in chosen if b.kind is not WireBatch), chosen[0])
        names = [name for name in chosen[0].names if all(name in b.names for b in chosen)]
        if not names:
            return multiple()
        found = concat_rows([with_columns(b, names) for b in chosen])
        known = model.kind in (WireBatch, BatchedDataDict)
        meta = common_meta([b.meta for b in chosen]) if known else None
        rows = [row for b in chosen for row in b.rows]
        return Batch(found, rows, names, model.kind, model.packed, meta).checked()

    @rule(target=batches, batch=batches, other=FORMS, at=st.integers(1, 8))
    def put_columns_side_by_side(self, batch, other, at):
        """The columns from `at` on come from a worker, in a form of its own."""
        left, right = batch.names[:at], batch.names[at:]
        if not right or batch.packed:
            return multiple()
        written = with_columns(batch, right)
        written = written.to_tensordict() if isinstance(written, WireBatch) else written
        if isinstance(written, TensorDict) and other != "packed":
            written = held_as(other, written, batch.meta)
        found = join_columns([with_columns(batch, left), written])
        encoded = not isinstance(written, (dict, TensorDict))
        kind = WireBatch if encoded else batch.kind
        return batch._replace(held=found, kind=kind, meta=None).checked()

    @rule(
        target=batches,
        batch=batches,
        way=st.sampled_from(["decode", "pickle", *MESSAGES]),
        options=st.sampled_from(OPTIONS),
    )
    def send(self, batch, way, options):
        kind, held = batch.kind, opened(batch)
        if kind is dict:
            return multiple()
        if way == "pickle" and kind is not TensorDict:
            return batch._replace(held=pickle.loads(pickle.dumps(held))).checked()
        frames = encode(held, **options)
        if way in MESSAGES:
            meta = {} if kind is TensorDict else batch.meta
            held = MESSAGES[way](frames)
            return batch._replace(held=held, kind=WireBatch, meta=meta, packed=False)
        if kind is WireBatch:
            batch = batch._replace(kind=TensorDict, meta=None)
        return batch._replace(held=decode(frames)).checked()

    @rule(batch=batches, data=st.data(), form=st.sampled_from(["tensor", "list"]))
    def rows_out(self, batch, data, form):
        names = data.draw(st.none() | st.lists(st.sampled_from(batch.names), unique=True))
        found = to_rows(batch.held, names, form)
        assert len(found) == padding_tax(batch.held).rows == len(batch.rows)
        for row, expected in zip(found, batch.rows, strict=True):
            assert list(row) == (batch.names if names is None else names)
            assert_row(row, expected, form)

    @rule(batch=batches, layout=st.sampled_from(["padded", "jagged", "packed"]))
    def make_columns(self, batch, layout):
        names = [name for name in batch.names if layout != "packed" or name not in UNPACKED]
        if not names:
            return
        found = materialize(with_columns(batch, names), layout, {"ids": -7})
        assert list(found) == names
        if layout != "padded":
            expected = [{name: row[name] for name in names} for row in batch.rows]
            assert table(found, len(batch.rows)) == expected
        for name in {"ids", "pairs", "done"} & {*names} if layout == "padded" else ():
            rows = [row[name][1] for row in batch.rows]
            width = max(map(len, rows), default=0)
            pad = [0, 0] if name == "pairs" else -7 if name == "ids" else 0
            assert bits(found[name]) == pad_rows(rows, width, pad)


def assert_row(row, expected, form):
    """A row that `to_rows` made is this one of `table`."""
    for name, value in row.items():
        known = expected[name]
        if isinstance(known, dict):
            assert_row(value, known, form)
        elif isinstance(known, str):
            assert repr(value) == known
        else:
            dtype, cells = known
            if form == "list":
                assert isinstance(value, (list, int, float))
                value = torch.tensor(value, dtype=dtype)
            assert value.dtype == dtype
            assert bits(value) == cells or not value.numel()


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=120, stateful_step_count=16)


def batch_of(*rows, **more):
    return TensorDict({"ids": nested(rows), **more}, [len(rows)])


def column_of(batch, name, form="tensor"):
    return [row[name] for row in to_rows(batch, [name], form)]


def nest(*lengths, fill=1.0):
    return nested([[fill] * n for n in lengths], torch.float32)


@given(st.data())
def test_columns_of_every_kind_are_lists_of_rows(data):
    td = data.draw(tensordicts(lazy=False))
    rows = td.batch_size[0]
    index, chosen = data.draw(indices(rows))
    before = table(td)
    expected = [before[i] for i in chosen]
    for batch in (td, open_wire(encode(td)), open_wire(Store(encode(td)))):
        found = select_rows(batch, index)
        assert type(found) is type(batch)
        assert table(found) == expected
        again = decode(encode(found))
        assert (again.names, list(again.keys())) == (td.names, list(td.keys()))
        assert table(again) == expected
        parts = split_rows(batch, data.draw(st.integers(1, rows + 1)))
        assert table(concat_rows(parts)) == before
        assert table(concat_rows([found, batch, found])) == expected + before + expected
    part = data.draw(st.slices(rows).filter(lambda part: part.step in (None, 1)))
    sent = open_wire(encode(td)).rows(part).to_frames()
    assert message(sent) == message(encode(select_rows(decode(encode(td)), part)))
    assert table(concat_rows([encode(td), encode(td, narrow=True)])) == before * 2
    assert table(td) == before


def test_a_part_that_cannot_be_cut_out_of_a_message_is_encoded():
    td = rollout_of([(1, 2), (3, 4), (2, 0)]).select("ids", "views")  # ragged in dims 1 and 2
    part = open_wire(encode(td)).rows(slice(1, 3))
    assert message(part.to_frames()) == message(encode(select_rows(td, slice(1, 3))))


LISTS = {f"{kind}int{size}" for kind in ("", "u") for size in (8, 16, 32, 64)} | {"bool"}
LISTS |= {"float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"}


@given(jagged_tensors(), st.data())
def test_a_jagged_column_of_any_kind(column, data):
    """Of ragged dim 1 or 2, with or without holes, of every dtype."""
    index, chosen = data.draw(indices(column.shape[0]))
    found = select_rows({"x": column}, index)["x"]
    assert rows_of(found) == [rows_of(column)[i] for i in chosen]
    assert found.dim() == column.dim()
    assert found.values().is_contiguous()
    assert found.offsets().dtype == torch.int64
    lengths = found.offsets().diff().tolist()
    bounds = (min(lengths, default=0), max(lengths, default=0))
    assert (found._min_seqlen, found._max_seqlen) == bounds
    tensors = column_of({"x": column}, "x")
    assert list(map(bits, tensors)) == rows_of(column)
    name = str(column.dtype).removeprefix("torch.")
    if name not in LISTS and name[:7] != "float8_":
        if tensors:
            with pytest.raises(ArgumentTypeError, match=rf"to_rows\['x'\].*{column.dtype}"):
                column_of({"x": column}, "x", "list")
        return
    for row, tensor in zip(column_of({"x": column}, "x", "list"), tensors, strict=True):
        again = torch.tensor(row, dtype=torch.complex128)
        same = tensor.to(torch.complex128).reshape(again.shape)
        assert torch.equal(again.nan_to_num(7), same.nan_to_num(7))


def test_rows_of_times_are_those_of_the_array_in_both_forms():
    """As a list, numpy itself makes ints of nanoseconds."""
    for dtype in ("M8[ns]", "m8[ns]", "M8[s]", "M8[D]"):
        column = np.array([[1, 2], [3, 4]]).view(dtype)
        for form in ("tensor", "list"):
            for row, expected in zip(to_rows({"x": column}, as_=form), column, strict=True):
                assert_same(row["x"], expected)


def test_batches_of_more_batch_dims():
    whole = NonTensorData("w", batch_size=[2, 2])
    columns = {"x": torch.arange(4).view(2, 2), "n": {"y": torch.ones(2, 2, 3)}, "w": whole}
    td = TensorDict(columns, [2, 2])
    back = select_rows(td, [1])
    assert (back.batch_size, back.get("w").batch_size) == ((1, 2), (1, 2))
    assert concat_rows([back, td])["x"].tolist() == [[2, 3], [0, 1], [2, 3]]
    assert to_rows(td, as_="list")[1] == {"x": [2, 3], "n": {"y": [[1.0] * 3] * 2}, "w": "w"}


def test_strided_nested_columns():
    cells = torch.arange(5.0, requires_grad=True)
    rows = [cells[:2].view(2, 1), cells[2:].view(1, 3)]
    shapes = torch.nested.as_nested_tensor(rows, layout=torch.strided)
    none = torch.nested.as_nested_tensor([], layout=torch.strided)
    back = concat_rows([select_rows({"x": shapes}, [1]), {"x": none}, {"x": shapes}])["x"]
    assert [row.shape for row in back.unbind()] == [(1, 3), (2, 1), (1, 3)]
    back.unbind()[0].sum().backward()
    assert cells.grad.tolist() == [0, 0, 1, 1, 1]
    sent: Any = encode(TensorDict({"x": shapes.detach()}, [2]))
    assert_same(concat_rows([sent, open_wire(sent)])["x"].unbind(), shapes.detach().unbind() * 2)
    turned = concat_rows([{"x": shapes.detach().transpose(1, 2)}, {"x": shapes.detach()}])["x"]
    assert [row.tolist() for row in turned.unbind()[:2]] == [[[0, 1]], [[2], [3], [4]]]
    td = TensorDict({"coo": torch.eye(2).to_sparse(), "shapes": shapes.detach()}, [2])
    assert [row.to_dense().tolist() for row in column_of(td, "coo")] == [[1, 0], [0, 1]]
    assert column_of(td, "shapes", "list") == [[[0.0], [1.0]], [[2.0, 3.0, 4.0]]]


@pytest.mark.parametrize("sent", [False, True])
def test_empty_rows_take_no_memory_for_each_index_of_the_dims_before_them(sent):
    """A column (N, 1024, S): one row has four cells at each index, and 1,023 rows have none."""
    cells = torch.arange(4 * 1024, dtype=torch.int32)
    values = cells.reshape(4, 1024).T.reshape(1024, 4)
    offsets = torch.tensor([0] + [4] * 1024)
    column = torch.nested.nested_tensor_from_jagged(values.T.contiguous(), offsets).transpose(1, 2)
    td = TensorDict({"x": column}, [1024])
    batch = open_wire(encode(td)) if sent else td
    rows = range(1023, -1, -1)
    for call in (
        lambda: select_rows(batch, rows)["x"],
        lambda: select_rows(batch, slice(0, 1024, 2))["x"],
        lambda: concat_rows([batch, batch])["x"],
    ):
        assert peak_of(call) < 1 << 21  # a number for each index of every row is 8 MiB
    assert (select_rows(batch, rows)["x"][1023] == values).all()


def test_payloads_of_the_whole_batch_stay_that_until_they_differ():
    def joined(*values):
        parts = [NonTensorData(value, batch_size=[1]) for value in values]
        return concat_rows([TensorDict({"x": part}, [1]) for part in parts]).get("x")

    assert_same(joined({"n": 1}, {"n": 1}), NonTensorData({"n": 1}, batch_size=[2]))
    differ = joined({"n": 1}, {"n": 1}, {"n": 2})
    assert isinstance(differ, NonTensorStack)
    assert differ.tolist() == [{"n": 1}, {"n": 1}, {"n": 2}]
    # 1 and True and 1.0 are equal and are not the same.
    assert [type(x) for x in joined(1, True, 1.0).tolist()] == [int, bool, float]
    lock = object()  # which cannot be encoded
    assert joined(lock, lock).data is lock
    assert joined(lock, object()).tolist()[0] is lock


def test_a_range_is_a_slice_and_a_pickled_batch_of_slices_holds_only_its_rows():
    cells = torch.arange(40_000).view(4, 10_000)
    td = TensorDict({"ids": nested(cells), "grid": cells}, [4])
    part, chosen = select_rows(td, slice(1, 2)), select_rows(td, [1])
    for same in (part, select_rows(td, range(1, 2))):
        for whole, view in ((td["ids"].values(), same["ids"].values()), (td["grid"], same["grid"])):
            assert view.data_ptr() == whole.data_ptr() + 80_000
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert chosen["grid"].data_ptr() != part["grid"].data_ptr()
    assert_same(chosen, part)
    columns = BatchedDataDict(td.items()).rows(slice(1, 2))
    columns["again"] = columns["grid"]
    packed = pickle.dumps(columns)
    assert len(packed) < 180_000  # a column of two names once
    back = pickle.loads(packed)
    assert back["again"] is back["grid"]
    assert_same(dict(back), dict(columns))
    for name in ("ids", "grid"):
        assert len(pickle.dumps(BatchedDataDict({"x": part[name]}))) < 90_000
        assert sum(map(len, encode(part.select(name)))) < 90_000


def test_chosen_rows_stay_right_when_their_source_moves_to_shared_memory():
    size = 1 << 20  # large enough for the system to take its memory back at once
    rows = [torch.full((size + i,), i) for i in range(4)]
    cells = torch.arange(4 * size).view(4, size)
    batch = BatchedDataDict(x=cells.clone(), jagged=stack_or_nest(rows))
    parts = batch.rows(slice(1, 3)), split_rows(batch, sizes=[1, 2, 1])[1]
    batch["x"].share_memory_()  # what putting it on a queue of torch.multiprocessing does
    batch["jagged"].values().share_memory_()
    others = [torch.full((4, size), 9) for _ in range(4)]  # where the memory was
    for part in parts:
        assert part["x"].equal(cells[1:3])
        assert part["jagged"].values().equal(torch.cat(rows[1:3]))
    assert len(others) == 4


def test_rows_alias_the_batch():
    td = rollout()
    td["wide"] = torch.zeros(3, 2)
    row = to_rows(td)[1]
    row["ids"][0], row["wide"][0] = 70, 7
    assert td["ids"].values().tolist() == [0, 1, 70, 5, 6, 7]
    assert td["wide"].tolist() == [[0, 0], [7, 0], [0, 0]]
    assert to_rows(td)[1]["message"] is column_of(td, "message")[1]
    blob = bytearray(to_blob(encode(td)))
    writable, read_only = to_rows(open_wire(blob)), to_rows(open_wire(bytes(blob)))
    before = writable[1]["ids"].tolist()
    writable[1]["ids"][0] = 99
    assert column_of(open_wire(blob), "ids", "list")[1][0] == 99
    assert read_only[1]["ids"].tolist() == before
    read_only[1]["ids"][0] = 5  # a copy, which may be written to


def test_gradients_flow():
    values = torch.arange(6.0, requires_grad=True)
    weight = torch.ones(3, 2, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 3, 6]))
    td = TensorDict({"w": weight}, [3])
    both = join_columns([td, {"x": column}])
    result = concat_rows([select_rows(both, [2, 0, 2]), select_rows(both, slice(0, 1))])
    rows = column_of(both, "x")
    (result["x"].values().sum() + result["w"].sum() + 4 * rows[1].sum()).backward()
    assert values.grad.tolist() == [2, 2, 4, 2, 2, 2]
    assert weight.grad.tolist() == [[2, 2], [0, 0], [2, 2]]
    assert column_of({"x": values}, "x", "list") == [0, 1, 2, 3, 4, 5]


def test_small_batches():
    assert (to_rows({}), to_rows(TensorDict({}, [2]))) == ([], [{}, {}])
    assert to_rows({"a": {}, "x": [1, 2]}) == [{"a": {}, "x": 1}, {"a": {}, "x": 2}]
    parts = split_rows({"x": [1, 2, 3, 4]}, sizes=[1, 0, 3])
    assert [part["x"] for part in parts] == [[1], [], [2, 3, 4]]
    assert repeat_rows({"x": []}, [])["x"] == []
    for unsigned in (np.uint64, np.uint8):
        assert select_rows({"x": [5, 6]}, np.array([1, 0], unsigned))["x"] == [6, 5]
    conjugated = torch.tensor([[1 + 2j], [3 - 1j]]).conj()
    assert select_rows({"x": conjugated}, [1])["x"].tolist() == [[3 + 1j]]
    td = TensorDict({"x": np.array(["a", ["b"], None], dtype=object)}, [3])
    both = concat_rows([select_rows(td, []), td, select_rows(td, [1])])
    assert both.get("x").data.tolist() == ["a", ["b"], None, ["b"]]
    assert materialize(select_rows({"y": NonTensorStack("a")}, []))["y"].shape == (0,)


def test_split_by_tokens_and_back():
    td = batch_of([1] * 5, [2], [3] * 4, [4] * 2, [5] * 3, step=NonTensorData(1, batch_size=[5]))
    parts = split_rows(td, max_tokens=8)
    first = [[row[0].item() for row in part["ids"].unbind()] for part in parts]
    assert first == [[1, 2, 4], [3, 5]]
    batches = plan_micro_batches([5, 1, 4, 2, 3], max_tokens=8)
    assert_same(batches.restore(parts), td)
    assert_same(select_rows(concat_rows(parts), batches.inverse), td)
    assert len(split_rows(td, 4, max_tokens=8)) == 4
    assert [len(part) for part in split_rows(materialize(td, "packed"), max_tokens=8)] == [3, 2]
    assert [len(part) for part in split_rows(encode(td), max_tokens=8)] == [3, 2]
    td["other"] = nest(1, 1, 1, 1, 9)
    for lengths in (torch.tensor([1, 1, 1, 1, 9]), td["other"]):
        assert len(split_rows(td, max_tokens=9, lengths=lengths)) == 2
    none = torch.tensor([], dtype=torch.int64)
    assert split_rows({"x": []}, max_tokens=9, lengths=none) == []


SIZES = [(2,), (2, 3), (2, 4), (2, 3, 2)]


@pytest.mark.parametrize("sent", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", list(itertools.product(SIZES, SIZES)), ids=str)
def test_joined_columns_have_the_batch_dims_that_all_batches_have(sizes, sent):
    batches = [
        TensorDict({name: torch.ones(*size, 2)}, size)
        for name, size in zip(("a", "b"), sizes, strict=True)
    ]
    joined = join_columns(batches)
    common = [
        pair[0] for pair in itertools.takewhile(lambda x: x[0] == x[1], zip(*sizes, strict=False))
    ]
    assert [*joined.batch_size] == common
    each = [encode(b) if is_sent else b for b, is_sent in zip(batches, sent, strict=True)]
    assert_same(join_columns(each).to_tensordict(), joined)


def test_a_dict_beside_a_batch_of_several_dims_has_one():
    batch = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["prompt", "sample"], device="cpu")
    joined = join_columns([batch, {"b": ["x", "y"]}])
    found = (joined.batch_size, joined.names, joined.device)
    assert found == ((2,), ["prompt"], torch.device("cpu"))
    assert joined.get("b").tolist() == ["x", "y"]


def test_joined_columns_are_aliased_and_share_the_offsets_of_any_column():
    td = TensorDict({"ids": nest(3, 2), "mask": nest(1, 2)}, [2], names=["rows"]).lock_()
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 2, 6]), lengths=torch.tensor([1, 2])
    )
    reply = encode(TensorDict({"b": nest(3, 2), "m": NonTensorStack("x", {"y": 1})}, [2]))
    columns = {"a": nest(1, 2), "holes": holes}
    joined = join_columns([td, columns])
    assert (joined.names, joined.is_locked) == (["rows"], False)
    joined = join_columns([TensorDict(dict(td.items()), [2]), columns, reply])
    assert type(joined) is WireBatch
    assert joined["ids"] is td.get("ids")
    for name, like in (("a", "mask"), ("holes", "mask"), ("b", "ids")):
        assert joined[name].offsets() is td[like].offsets()
    assert (td["mask"] * joined["holes"]).values().tolist() == [0.0, 2.0, 3.0]
    assert joined["m"].tolist() == ["x", {"y": 1}]
    replaced = join_columns([td, {"ids": nest(3, 2, fill=5.0)}], replace=True)
    assert list(replaced.keys()) == list(td.keys()) == ["ids", "mask"]
    assert (replaced["ids"][0][0], td["ids"][0][0]) == (5.0, 1.0)
    assert join_columns([reply, reply], replace=True).fields == ("b", "m")
    plain = TensorDict({"reward": torch.ones(2)}, [2], device="cpu")
    joined = join_columns([plain, {"a": nest(3, 1), "b": nest(3, 1), "c": nest(1, 1)}])
    assert joined["a"].offsets() is joined["b"].offsets()
    assert rows_of(joined["c"]) == rows_of(nest(1, 1))
    assert joined.device == torch.device("cpu")


def test_columns_of_a_dict_become_leaves_of_a_tensordict():
    columns = materialize(rollout(), "packed")
    columns["inner"] = {"n": np.arange(3), "text": ["a", "b", None]}
    joined = join_columns([TensorDict({"first": torch.ones(3)}, [3]), columns])
    assert type(joined) is TensorDict
    expected = [{"first": 1.0, **row} for row in to_rows(columns, as_="list")]
    assert to_rows(joined, as_="list") == to_rows(decode(encode(joined)), as_="list") == expected


@pytest.mark.parametrize("form", ["padded", "jagged", "packed"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float16), (torch.int32, torch.int64), (torch.bool, torch.int8)],
)
def test_rows_of_two_dtypes_are_not_joined(form, dtypes):
    """Bits of one are not those of the other, and no value is converted unasked."""
    batches = [
        materialize(TensorDict({"x": nested([[1, 0], [1]], dtype)}, [2]), form) for dtype in dtypes
    ]
    for join in (concat_rows, lambda parts: concat_rows([*map(encode, parts)])["x"]):
        with pytest.raises(ArgumentError, match="dtype"):
            join(batches)


@pytest.mark.parametrize("form", ["tensor", "list"])
def test_rows_of_tensorclasses_and_of_what_belongs_to_the_whole_batch(form):
    turn = Turn(tokens=torch.arange(2), role="user", batch_size=[2])  # type: ignore[call-arg]
    array = NonTensorData(np.array(["a", None], dtype=object), batch_size=[2])
    td = TensorDict({"turn": turn, "array": array, "one": UnbatchedTensor(torch.arange(3))}, [2])
    rows = to_rows(td, as_=form)
    assert [int(row["turn"]["tokens"]) for row in rows] == [0, 1]
    assert [row["turn"]["role"] for row in rows] == ["user", "user"]
    assert [row["array"] for row in rows] == ["a", None]
    assert [[*row["one"]] for row in rows] == [[0, 1, 2]] * 2
    assert_same(concat_rows([select_rows(td, [1]), td]).get("one"), td.get("one"))


def test_numpy_columns():
    columns = {
        "i": np.array([1, 2], dtype=">i4"),
        "f": np.ones((2, 2), dtype=np.float32),
        "s": np.array(["a", "b"]),
        "back": np.arange(2)[::-1],
    }
    columns["f"].flags.writeable = False
    tensors, lists = (to_rows(columns, as_=form)[1] for form in ("tensor", "list"))
    assert (tensors["i"].dtype, tensors["i"].shape, tensors["s"]) == (torch.int32, (), "b")
    assert lists == {"i": 2, "f": [1, 1], "s": "b", "back": 0}
    assert type(lists["i"]) is int


TD = batch_of([1], [1] * 4, [1])
TWO = TensorDict({"ids": nest(1, 2), "other": nest(4, 2)}, [2])
LAZY = TensorDict.lazy_stack([TensorDict({"x": torch.ones(i)}, []) for i in (1, 2)])
STACK = NonTensorStack(*(NonTensorStack(NonTensorData(i), NonTensorData(-i)) for i in range(3)))
CSR = {"x": torch.eye(2).to_sparse_csr()}
COO = {"x": torch.eye(2).to_sparse()}
GRID = {"x": torch.ones(1, 2)}
INT = torch.int64


def of_ragged_dim(dim):
    return {"x": stack_or_nest([torch.ones(2, 2)], always_nest=True, ragged_dim=dim)}


def packed(*cuts):
    return {"a": PackedColumn(torch.arange(3), torch.tensor(cuts), 2, torch.arange(3))}


def ids(column):
    return [batch_of([1, 2]), TensorDict({"ids": column}, [1])]


UNBATCHED = [TensorDict({"x": UnbatchedTensor(torch.ones(n))}, [1]) for n in (2, 3)]
DIFFER: list[tuple[list[Any], type[Exception], str]] = [
    ([TD, TensorDict({}, [1])], ArgumentKeyError, "batch 1.*'ids' missing"),
    ([TD, TWO], ArgumentKeyError, "batch 1.*'other' in addition"),
    (ids(torch.ones(1, 2, dtype=INT)), ArgumentError, "jagged.*strided"),
    (ids(nest(1)), ArgumentError, r"\['ids'\] of batch 1.*dtype"),
    (ids(nested([[[1, 1]]])), ArgumentError, "row shape"),
    (ids(NonTensorData("x", batch_size=[1])), ArgumentTypeError, "one kind"),
    ([TensorDict(GRID, [1]), TensorDict({"x": torch.ones(1, 3)}, [1])], ArgumentError, "row shape"),
    ([TensorDict(of_ragged_dim(dim), [1]) for dim in (1, 2)], ArgumentError, "ragged dim"),
    (UNBATCHED, ArgumentError, "row for each"),
    ([TensorDict(COO, [2])] * 2, ArgumentError, r"'x'.*coo; call \.to_dense"),
    ([TensorDict({}, [1, 2]), TensorDict({}, [1, 3])], ArgumentError, "batch dims"),
]
REFUSED: dict[Any, list[tuple[Any, type[Exception], str]]] = {
    select_rows: [
        ((TD, [3]), ArgumentIndexError, r"select_rows\(index\).*rows of 0 to 2"),
        ((TD, [-4]), ArgumentIndexError, r"select_rows\(index\)"),
        ((TD, np.array([2**64 - 1], np.uint64)), ArgumentIndexError, "rows of 0 to 2"),
        ((TD, [True]), ArgumentTypeError, r"select_rows\(index\)"),
        ((TD, "x"), ArgumentTypeError, r"select_rows\(index\)"),
        ((TD, [[0], [1, 2]]), ArgumentTypeError, r"select_rows\(index\)"),
        (([to_blob(encode(TD))] * 2, [0]), ArgumentTypeError, "expected a batch"),
        ((CSR, [0]), ArgumentError, r"csr; call \.to_dense"),
        ((COO, [0]), ArgumentError, r"coo; call \.to_dense"),
        ((select_rows(TD, []), [0]), ArgumentIndexError, "no rows of a batch without rows"),
        ((packed([0, 1], [1, 3]), [0]), ArgumentError, "offsets from 0 that never fall"),
        ((packed(0, 3, 1), [0]), ArgumentError, r"expected \(N \+ 1,\) cu_seqlens"),
        ((packed(1, 2, 3), [0]), ArgumentError, "cu_seqlens, which are offsets from 0 that never"),
        (({"x": LAZY}, [0]), ArgumentError, r"\['x'\].*lazy stack.*densify"),
        ((TensorDict({"x": STACK}, [3]), [0]), ArgumentError, r"\['x'\].*flatten the batch"),
    ],
    repeat_rows: [
        ((TD, -1), ArgumentError, r"repeat_rows\(times\).*0 or more, found -1"),
        ((TD, [1, 2]), ArgumentError, r"repeat_rows\(times\).*3 numbers.*found 2"),
        ((TD, 1.5), ArgumentTypeError, r"repeat_rows\(times\)"),
        ((TD, True), ArgumentTypeError, r"repeat_rows\(times\)"),
    ],
    functools.partial(repeat_rows, interleave=False): [
        ((TD, [1, 1, 1]), ArgumentTypeError, r"repeat_rows\(times\): expected an integer")
    ],
    functools.partial(split_rows, max_tokens=9): [
        ((TWO,), ArgumentError, "'ids' and 'other' differ"),
        (({"x": [1]},), ArgumentError, "expected a jagged column, .* found none; pass lengths"),
    ],
    concat_rows: [
        (([],), ArgumentError, "found none"),
        ((TD,), ArgumentTypeError, "expected a list of batches, found one"),
        ((encode(TD),), ArgumentTypeError, "found one"),
        (([TD, [1]],), ArgumentTypeError, r"batches\[1\].*expected a batch"),
        (([TD, {"ids": [1]}],), ArgumentTypeError, "kind of column"),
        (([CSR, CSR],), ArgumentError, "csr"),
        (([{"x": np.ones((1, n))} for n in (1, 2)],), ArgumentError, "row shape"),
        *(((batches,), error, text) for batches, error, text in DIFFER),
    ],
    join_columns: [
        (([],), ArgumentError, "found none"),
        ((to_blob(encode(TD)),), ArgumentTypeError, "found one batch"),
        (([TD, {"a": torch.ones(2)}],), ArgumentError, "3 rows, like the first.*found 2"),
        (([encode(TD), encode(TWO)],), ArgumentError, "expected 3 rows.*found 2"),
        (([TD, {"a": torch.tensor(1.0)}],), ArgumentTypeError, "'a'.*expected a column"),
        (([encode(TD), [b"no message"]],), WireFormatError, "message 1: "),
    ],
    BatchedDataDict.select: [
        ((BatchedDataDict(a=[1]), "a"), ArgumentTypeError, "found the string 'a'; put it in a list")
    ],
    WireBatch.select: [
        ((open_wire(encode(TD)), "ids"), ArgumentTypeError, "string 'ids'; put it in a list"),
        ((open_wire(encode(TD)), 5), ArgumentTypeError, "expected names"),
    ],
    to_rows: [
        (({"a": [1]}, "a"), ArgumentTypeError, "found the string .a.; put it in a list"),
        (({"a": [1]}, ["a", "b"]), ArgumentKeyError, "expected one of 'a'"),
        (({"a": [1]}, None, "numpy"), ArgumentError, "'tensor', 'array', 'list', found 'numpy'"),
        (({"a": torch.ones(2, device="meta")}, ["a"], "list"), ArgumentTypeError, "meta"),
        ((COO, None, "list"), ArgumentTypeError, "sparse_coo; use as_='tensor'"),
        ((CSR,), ArgumentTypeError, "sparse_csr; leave it out"),
    ],
}


@pytest.mark.parametrize(
    ("call", "arguments", "error", "text"), [(f, *case) for f in REFUSED for case in REFUSED[f]]
)
def test_refused(call, arguments, error, text):
    with pytest.raises(error, match=text):
        call(*arguments)


OTHER = TensorDict({"new": nest(1, 3, 2)}, [3])
LONGER = r"batches\[1\]\)\['new'\], row 1: .* 4 tokens like 'ids' of the first batch, found 3"


def test_columns_that_do_not_fit_next_to_each_other():
    for batches, reason, text in (
        ([TD, dict(OTHER)], "bad_length", LONGER),
        ([encode(TD), encode(OTHER)], "bad_length", LONGER),
        ([TD, dict(TD)], "conflict", r"batches\[1\]\)\['ids'\].*replace=True"),
    ):
        with pytest.raises(ArgumentError, match=text) as caught:
            join_columns(batches)
        assert caught.value.reason == reason


ERRORS = """
import torch
from jagcodec import concat_rows, encode, encode_rows, join_columns
from jagcodec.wire.compare import first_difference

first = {name: torch.ones(2) for name in "hgfedcba"}
others = [{name: torch.ones(2) for name in names} for names in ("hgab", "hgfedcbaxyz", "hx")]
calls = [lambda other=other: concat_rows([first, other]) for other in others]
calls += [lambda other=other: concat_rows(map(encode_rows, ([first], [other]))) for other in others]
calls += [lambda other=other: join_columns([first, other]) for other in others]
for call in calls:
    try:
        call()
    except Exception as error:
        print(error)
print(first_difference({"a": set("hgfedcba")}, {"a": set("hgfedcbx")}))
"""


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_texts_of_errors_do_not_depend_on_the_hash_seed(seed, capsys):
    exec(ERRORS, {})
    text = capsys.readouterr().out
    assert run_python(ERRORS, PYTHONHASHSEED=seed).stdout == text
    assert text.count("\n") == 10
    assert "of batch 1: expected the columns of batch 0, found 'f' missing" in text
    assert "(batches[1])['h']" in text


@pytest.mark.parametrize("form", MESSAGES)
@pytest.mark.parametrize(("batches", "error", "text"), DIFFER)
def test_messages_that_differ_are_refused_like_batches(form, batches, error, text):
    messages = [MESSAGES[form](encode(batch)) for batch in batches]
    for read in (concat_rows, lambda batches: batches):
        with pytest.raises(error, match=text):
            materialize(read(messages))


def test_split_refuses():
    for options, text in (
        ({}, "one of parts, sizes and max_tokens"),
        ({"sizes": [3], "max_tokens": 9}, "one of parts, sizes and max_tokens"),
        ({"parts": 2, "lengths": torch.ones(3)}, "lengths only with max_tokens"),
        ({"parts": 0}, r"\(parts\): expected 1 or more, found 0"),
        ({"parts": 1.5}, "expected 1 or more, found 1.5"),
        ({"sizes": [1, 1]}, "add up to 3"),
        ({"sizes": [4, -1]}, "add up to 3"),
        ({"sizes": [1.5, 1.5]}, "add up to 3"),
        ({"max_tokens": 3}, r"\(lengths\), row 1: .*max_tokens=3 tokens, found 4"),
        ({"max_tokens": 0}, r"\(max_tokens\): expected 1 or more"),
        ({"max_tokens": 9, "parts": 4}, r"\(parts\): expected at most 3 parts.*found 4"),
        ({"max_tokens": 9, "lengths": torch.ones(2, dtype=INT)}, "lengths shape"),
    ):
        with pytest.raises(ArgumentError, match=rf"split_rows.*{text}"):
            split_rows(TD, **options)


CALLS: dict[str, Any] = {
    "materialize": materialize,
    "to_rows": to_rows,
    "padding_tax": padding_tax,
    "check_schema": lambda batch: check_schema(batch, {}),
    "select_rows": lambda batch: select_rows(batch, 0),
    "repeat_rows": lambda batch: repeat_rows(batch, 2),
    "split_rows": lambda batch: split_rows(batch, 2),
    "concat_rows": lambda batch: concat_rows([batch]),
    "join_columns": lambda batch: join_columns([batch]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_a_batch_is_refused(name):
    expected = f"{name}.*expected a batch"
    for value, error, text in (
        *((value, ArgumentTypeError, expected) for value in (None, object(), "batch.jag")),
        (TensorDict({}, []), ArgumentError, "no batch dim"),
        ({"a": [1], "b": [1, 2]}, ArgumentError, "expected 1 rows.*found 2"),
        ({"a": 5}, ArgumentTypeError, "'a'.*expected a column"),
        (LAZY, ArgumentTypeError, "lazy stack.*densify"),
    ):
        with pytest.raises(error, match=text):
            CALLS[name](value)


# --- BatchedDataDict: a dict whose columns have one entry per row ------------------------------


def test_every_column_has_n_rows():
    with pytest.raises(ArgumentError, match=r"\['b'\]: expected 2 rows.*found 1"):
        BatchedDataDict(a=[1, 2], b=torch.ones(1))
    batch = BatchedDataDict(a=[1, 2])
    puts: list[Any] = [batch.update, batch.__or__, batch.__ior__]
    for put in (*puts, lambda pairs: batch.setdefault(*pairs.popitem())):
        with pytest.raises(ArgumentError, match="expected 2 rows"):
            put({"b": [1]})
    with pytest.raises(ArgumentError, match="expected 2 rows"):
        batch["b"] = [1]
    with pytest.raises(ArgumentTypeError, match="meta_info"):
        batch["step"] = 7
    assert list(batch) == ["a"]
    batch["a"] = [1, 2, 3]  # the only column may change its rows
    batch.update({"b": np.zeros(3)}, c=[0, 0, 0])
    assert batch.setdefault("c", None) == [0, 0, 0]
    assert list(batch | {"d": [1, 1, 1]}) == ["a", "b", "c", "d"]
    assert type(batch | {}) is BatchedDataDict


def test_select_and_union_which_agrees_with_diff_on_what_is_equal():
    batch = materialize(encode(rollout(), meta={"step": 7}))
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
    nan = torch.tensor([0.5, float("nan")])
    batch = BatchedDataDict(w=torch.nn.Parameter(nan.clone()), n=[1, 2])
    for name, column in (("w", nan), ("n", [1, 2])):
        assert first_difference({name: column}, {name: batch[name]}) is None
        assert list(batch.union({name: column})) == ["w", "n"]
    for name, column in (("w", -nan), ("w", nan.double()), ("w", nan.tolist()), ("n", [1, True])):
        assert first_difference({name: column}, {name: batch[name]}) is not None
        with pytest.raises(ArgumentError, match=rf"union\(other\)\['{name}'\]"):
            batch.union({name: column})


class Subclass(BatchedDataDict):
    pass


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_what_is_made_of_it_keeps_its_type_and_meta_info(layout):
    batch = Subclass(materialize(rollout(), layout), meta_info={"step": 7})
    assert (len(BatchedDataDict()), bool(BatchedDataDict())) == (0, False)
    assert (len(batch.rows([])), bool(batch.rows([]))) == (0, True)
    assert "rows=3" in repr(batch)
    for found in (
        *(pickle.loads(pickle.dumps(batch)), batch.copy(), batch.rows([0, 1, 2])),
        *(split_rows(batch, 1)[0], repeat_rows(batch, 1, interleave=False), concat_rows([batch])),
    ):
        assert type(found) is Subclass
        assert table(found) == table(batch)
        assert found.meta_info == {"step": 7}
    other = batch.copy()
    other.meta_info["step"] = 7.0
    assert concat_rows([batch, other]).meta_info == {}
    assert all(batch.to("cpu")[name] is column for name, column in batch.items())
    moved = batch.to("meta")
    assert (moved["reward"].device.type, moved.meta_info) == ("meta", {"step": 7})
    assert moved["message"] is batch["message"]
    if layout == "jagged":
        assert moved["ids"].offsets() is moved["logprob"].offsets()
