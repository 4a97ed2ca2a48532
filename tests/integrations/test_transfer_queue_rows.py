"""Rows through the storage backend for TransferQueue, without Ray: what is got is what was put.

The client and the storage units are the backend's own. Only the sockets between them and the
controller are left out: a request is serialized, read back and handled in this process.
"""

import asyncio
import itertools
import pickle
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from benchmarks import operations
from jagcodec import WireFormatError, decode, encode, stack_or_nest
from jagcodec.errors import TransportError
from jagcodec.memory.arrays import object_array
from jagcodec.testing import tensors
from tests.device import on_device, watched
from tests.helpers import nested, size
from tests.oracle import assert_same
from tests.wire import forge

pytest.importorskip(
    "transfer_queue", reason="TransferQueue is not installed: pip install '.[transfer-queue]'"
)

from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.storage.simple_storage import StorageUnitData
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from jagcodec.integrations import _transfer_queue_messages
from jagcodec.integrations import transfer_queue as backend
from jagcodec.integrations._transfer_queue_columns import columns_to_send
from jagcodec.integrations._transfer_queue_messages import MESSAGE, StorageOptions, body_of
from jagcodec.integrations._transfer_queue_storage import RowStorage
from jagcodec.integrations._transfer_queue_version import StockStorageUnit

WITH_STRIDED = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]


def unit_of(rows):
    """A storage unit of this backend, or one of TransferQueue's own if the rows are."""
    ours = isinstance(rows, RowStorage)
    unit = object.__new__(backend._JagcodecStorageUnit if ours else StockStorageUnit)
    unit.storage_unit_id, unit.storage_unit_size, unit.storage_data = "unit", None, rows
    return unit


KINDS = {
    "put": ZMQRequestType.PUT_DATA,
    "get": ZMQRequestType.GET_DATA,
    "save_checkpoint": ZMQRequestType.SAVE_STORAGE_CHECKPOINT,
    "load_checkpoint": ZMQRequestType.LOAD_STORAGE_CHECKPOINT,
}


def answer_of(unit, request, body):
    """The answer of a storage unit; both messages are serialized, and read again."""
    sent = ZMQMessage.create(KINDS[request], "client", body).serialize()
    received = ZMQMessage.deserialize([bytes(frame) for frame in sent])
    answer = getattr(unit, f"_handle_{request}")(received)
    return ZMQMessage.deserialize([bytes(frame) for frame in answer.serialize()])


def saved(unit, path):
    return answer_of(unit, "save_checkpoint", {"path": str(path)}).body


def loaded(unit, path):
    return answer_of(unit, "load_checkpoint", {"path": str(path)}).body


class Queue(backend._JagcodecStorageManager):
    """A client and its storage units in one process; rows are known by their global indexes."""

    def __init__(self, units=("one", "two"), **options):
        self._options = StorageOptions(**options)
        info = backend._StorageUnitInfo
        self.storage_unit_infos = {name: info("unit", name, "here", {}) for name in units}
        self.units = {name: unit_of(RowStorage(None, self._options)) for name in units}
        self.sent: list[int] = []  # bytes of the messages of puts, and of the answers to gets
        self.received: list[int] = []

    async def notify_data_update(self, *arguments):
        pass

    async def _put_to_single_storage_unit(self, rows, data, target_storage_unit):
        body = {"global_indexes": rows, "data": data}
        self.sent.append(size(data[MESSAGE]))
        answer = answer_of(self.units[target_storage_unit], "put", body)
        assert answer.request_type == ZMQRequestType.PUT_DATA_RESPONSE, answer.body

    async def _get_from_single_storage_unit(self, rows, fields, target_storage_unit):
        body = {"global_indexes": rows, "fields": fields}
        answer = answer_of(self.units[target_storage_unit], "get", body)
        assert answer.request_type == ZMQRequestType.GET_DATA_RESPONSE, answer.body
        self.received.append(size(answer.body["data"][MESSAGE]))
        return fields, answer.body["data"]

    def put(self, rows, **columns):
        meta = SimpleNamespace(size=len(rows), global_indexes=[*rows], partition_ids=["p"])
        asyncio.run(self.put_data(TensorDict(columns, [len(rows)]), meta))

    def get(self, rows, *names):
        meta = SimpleNamespace(size=len(rows), global_indexes=[*rows], field_names=[*names])
        return asyncio.run(self.get_data(meta))

    def reload(self, folder):
        """Save the rows of each unit, and load them into a new one."""
        for name, unit in self.units.items():
            assert saved(unit, folder / name) == {"success": True}
            self.units[name] = unit_of(RowStorage(None, self._options))
            assert loaded(self.units[name], folder / name) == {"success": True}

    def close(self):
        pass


@pytest.mark.parametrize(("name", "units"), [("put", 1), ("put_to_two", 2)])
def test_what_the_benchmark_of_a_put_sends_is_every_row(name, units):
    operation = operations.MAKERS[name](20)
    batches = operation.seen(operation.call())
    found = sorted(uid for batch in batches for uid in batch["uid"].tolist())
    assert (len(batches), found) == (units, [f"u{i // 8}" for i in range(20)])


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 2], [3, 1]]], ids=["one", "two"])
def test_columns_on_a_device_are_the_same_messages_after_two_waits(device, groups):
    cells = torch.arange(48)
    columns = {"wide": cells.view(4, 12), "images": cells.view(4, 3, 4), "reward": cells[:4] / 2}
    columns |= {"turned": cells.view(12, 4).T, "ids": nested([[1, 2], [3], [], [4, 5, 6]])}
    batch, options = TensorDict(columns, [4]), StorageOptions()

    def messages(data):
        parts = options.parts(columns_to_send(data), [np.array(group) for group in groups])
        return [[bytes(frame) for frame in options.encode(part)] for part in parts]

    expected, there = messages(batch), on_device(batch, device)
    with watched(device) as traffic:
        assert messages(there) == expected
    # The offsets of the jagged column decide which cells to fetch.
    assert traffic.waits <= 1 + len(groups)


# --- any rows put in any way -------------------------------------------------------------------

OBJECTS = [None, "text", 300, 0.5, True, b"bytes", {"a": [1, None]}, (1, "b"), {"x": torch.ones(2)}]
NOT_READ_BY_TORCH = {torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}  # pickles
DTYPES = st.sampled_from(  # all are nested by torch
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16),
        *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *sorted(NOT_READ_BY_TORCH, key=str),
    ]
)
TENSORS = st.tuples(DTYPES, st.lists(st.integers(0, 3), max_size=3)).flatmap(
    lambda kind: tensors(tuple(kind[1]), kind[0])
)


@st.composite
def columns(draw, rows):
    """A column of some rows in any form, the rows, and its ragged dim (1 if none was given)."""
    form = draw(st.sampled_from(["stacked", "jagged", "strided", "objects", "array"]))
    if form in ("objects", "array"):
        items = draw(st.lists(st.sampled_from(OBJECTS) | TENSORS, min_size=rows, max_size=rows))
        payload = NonTensorData(object_array(items), batch_size=[rows])
        return NonTensorStack(*items) if form == "objects" else payload, items, 1
    dtype = draw(DTYPES if form != "strided" else st.sampled_from(WITH_STRIDED))
    shape = draw(st.lists(st.integers(0, 3), min_size=form != "stacked", max_size=3))
    shapes, ragged_dim = [shape] * rows, 1
    if form == "jagged":
        ragged_dim = draw(st.integers(1, len(shape)))
        lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
        shapes = [[*shape[: ragged_dim - 1], n, *shape[ragged_dim:]] for n in lengths]
    elif form == "strided":
        dims = st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape))
        shapes = draw(st.lists(dims, min_size=rows, max_size=rows))
    items = [draw(tensors(tuple(each), dtype)) for each in shapes]
    if form == "stacked":
        return torch.stack(items), items, 1
    if form == "jagged":
        return stack_or_nest(items, always_nest=True, ragged_dim=ragged_dim), items, ragged_dim
    return torch.nested.as_nested_tensor(items, layout=torch.strided), items, 1


def expected_type(rows, ragged_dims):
    """What stands for the type of a column: TransferQueue's own, but with the dim that is known."""
    if not all(isinstance(row, torch.Tensor) for row in rows):
        return NonTensorStack
    if len({(row.dtype, row.dim()) for row in rows}) > 1:
        return NonTensorStack
    column = AsyncSimpleStorageManager._pack_field_values(rows)
    if not isinstance(column, torch.Tensor):
        return NonTensorStack
    known = {dim for dim in ragged_dims if dim > 1}
    equal = len({row.shape for row in rows}) == 1
    dim = getattr(column, "_ragged_idx", None)
    return column.layout, known.pop() if dim and equal and len(known) == 1 else dim


def type_of(column):
    if not isinstance(column, torch.Tensor):
        return type(column)
    return column.layout, getattr(column, "_ragged_idx", None)


@given(st.data())
def test_each_row_comes_back_as_it_was_put(tmp_path_factory, data):
    """Bit for bit and with its dtype, in whatever columns the rows were put, and kept since."""
    queue, known, folder = Queue(), {}, tmp_path_factory.mktemp("rows")
    numbers = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(numbers)
        column, items, ragged_dim = data.draw(columns(len(rows)))
        queue.put(rows, x=column, number=torch.tensor(rows))
        known |= {row: (item, ragged_dim) for row, item in zip(rows, items, strict=True)}
        for _ in range(data.draw(st.integers(0, 2))):
            if data.draw(st.booleans()):
                queue.reload(folder)
                for row, (item, _) in known.items():
                    if isinstance(item, torch.Tensor) and item.dtype in NOT_READ_BY_TORCH:
                        known[row] = item, 1
            wanted = data.draw(st.lists(st.sampled_from([*known]), min_size=1, unique=True))
            batch = queue.get(wanted, "number", "x")
            assert batch["number"].tolist() == wanted
            found = batch.get("x")
            items, ragged_dims = zip(*(known[row] for row in wanted), strict=True)
            got = found.unbind() if isinstance(found, torch.Tensor) else found.tolist()
            assert_same([*got], [*items])
            assert type_of(found) == expected_type([*items], ragged_dims)


# --- rows that repeat --------------------------------------------------------------------------

IMAGES = [torch.full((300 + i, 7), i, dtype=torch.int64) for i in range(3)]
OF_IMAGE = {len(image): {"pixels": image} for image in IMAGES}
FORMS: dict[str, Any] = {
    "jagged": lambda rows: stack_or_nest(rows, always_nest=True),
    "equal objects": lambda rows: NonTensorStack(*({"pixels": row.clone()} for row in rows)),
    "one object": lambda rows: NonTensorStack(*map(OF_IMAGE.get, map(len, rows))),
    "bytes": lambda rows: NonTensorStack(*(row.numpy().tobytes() for row in rows)),
    "rectangles": lambda rows: torch.stack([row[:300] for row in rows]),
}
ONE_ROW = IMAGES[0].nbytes


@given(st.data(), st.sampled_from([*FORMS]))
def test_rows_that_repeat_come_back_whatever_client_and_unit_look_for(data, form):
    queue, known = Queue(), {}
    flags = st.booleans()
    for unit in queue.units.values():
        unit.storage_data.options = StorageOptions(elide=data.draw(flags))
    for _ in range(data.draw(st.integers(1, 4))):
        queue._options = StorageOptions(elide=data.draw(flags), narrow=data.draw(flags))
        rows = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
        images = [data.draw(st.sampled_from(IMAGES)) for _ in rows]
        column = FORMS[form](images)
        queue.put(rows, x=column, number=torch.tensor(rows))
        items = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
        known |= dict(zip(rows, items, strict=True))
        for _ in range(data.draw(st.integers(0, 2))):
            wanted = data.draw(st.lists(st.sampled_from([*known]), min_size=1, unique=True))
            found = queue.get(wanted, "x", "number")
            assert found["number"].tolist() == wanted
            got = found.get("x")
            got = got.unbind() if isinstance(got, torch.Tensor) else got.tolist()
            assert_same([*got], [known[row] for row in wanted])


@pytest.mark.parametrize("form", [*FORMS])
def test_a_unit_answers_with_the_repeats_that_a_put_left_out(form):
    """And with those of rows that came apart, if it was asked to."""
    rows, each = [image for image in IMAGES for _ in range(4)], ONE_ROW // 2
    for elide, distinct in ((False, 12), (True, 3)):
        queue = Queue(units=["one"], elide=elide)
        queue.put(range(12), x=FORMS[form](rows))
        for wanted in (range(12), [11, 2, 7, 1, 6, 0, 3, 8]):  # of each image
            queue.get(wanted, "x")
            expected = 3 if elide else len(wanted)
            assert expected <= queue.received[-1] / ONE_ROW < expected + 0.5, (elide, wanted)
        queue.get([4], "x")
        assert 1 <= queue.received[-1] / ONE_ROW < 1.5
        assert distinct <= queue.sent[-1] / ONE_ROW < distinct + 0.5
        for i in range(12):  # alone, each repeats nothing
            queue.put([20 + i], x=FORMS[form](rows[i : i + 1]))
            assert queue.sent[-1] > each
        queue.get(range(20, 32), "x")
        assert distinct <= queue.received[-1] / ONE_ROW < distinct + 0.5
        held = {row.batch for row in queue.units["one"].storage_data.field_data["x"].values()}
        kept = sum(size(batch.to_frames()) for batch in held)  # joined, and so elided too
        assert 2 * distinct <= kept / ONE_ROW < 2 * distinct + 1


def test_a_unit_that_was_asked_for_nothing_sends_on_what_clients_stored_smaller():
    rows = [image for image in IMAGES for _ in range(4)]
    queue = Queue(units=["one"])
    queue._options = StorageOptions(elide=True, narrow=True)
    queue.put(range(12), x=FORMS["jagged"](rows), y=torch.arange(12))
    found = queue.get([*range(11, -1, -1)], "y", "x")
    assert queue.sent[0] == pytest.approx(3 * ONE_ROW / 8, rel=0.3)
    assert queue.received[0] == pytest.approx(queue.sent[0], rel=0.1)
    assert_same([*found["x"].unbind()], rows[::-1])


def test_a_batch_without_repeats_is_searched_at_the_put_alone(monkeypatch):
    searched = []

    def noted(columns, **options):
        searched.append(options["elide"])
        return encode(columns, **options)

    monkeypatch.setattr(_transfer_queue_messages, "encode", noted)
    queue = Queue(units=["one"], elide=True)
    queue.put(range(3), x=FORMS["jagged"](IMAGES))
    queue.get([2, 0], "x")
    assert searched == [True, False]


# --- checkpoints -------------------------------------------------------------------------------

POSITIONS = [torch.arange(6).view(3, 2) + i for i in range(3)]
COLUMNS = {
    "ids": stack_or_nest([torch.arange(n) for n in (3, 1, 2)]),
    "positions": stack_or_nest(POSITIONS, always_nest=True, ragged_dim=2),
    "mixed": NonTensorStack(torch.ones(1), torch.ones(2, dtype=torch.int32), "text"),
    "objects": NonTensorStack({"a": 1}, None, "b"),
    "grid": torch.arange(18).view(3, 2, 3),
    "small": torch.ones(3, 2).to(torch.bfloat16),
}


UNITS = [*itertools.product([True, False], repeat=3)]  # of this backend, or not, one after another


def unit_with(ours, **columns):
    """A unit that was sent these rows."""
    size = len(next(iter(columns.values()), ()))
    if not ours:
        stacks = (NonTensorStack, NonTensorData)
        of = {n: c.tolist() if isinstance(c, stacks) else c.unbind() for n, c in columns.items()}
        unit = unit_of(StorageUnitData(None))
        unit.storage_data.put_data(of, [*range(size)])
        return unit
    queue = Queue(units=["one"])
    if columns:
        queue.put(range(size), **columns)
    return queue.units["one"]


def rows_in(unit):
    """Every value of a unit as TransferQueue holds it, by column and row."""
    data = unit.storage_data
    if isinstance(data, RowStorage):
        data = data.as_stock()
    return {name: dict(rows) for name, rows in data.field_data.items()}


def test_checkpoints_of_columns_with_and_without_rows(tmp_path):
    """Through units of this backend and of TransferQueue's own, which held other rows before."""
    some = {name: COLUMNS[name] for name in ("objects", "ids")}
    cases = (COLUMNS, []), (COLUMNS, [0, 1, 2]), (some, [1]), (some, [0, 2]), ({}, [])
    for (columns, cleared), kinds in itertools.product(cases, UNITS):
        unit = unit_with(kinds[0], **columns)
        unit.storage_data.clear(cleared)
        expected = rows_in(unit)
        for cycle, ours in enumerate(kinds[1:]):
            path = tmp_path / f"{cycle}"
            assert saved(unit, path) == {"success": True}
            unit = unit_with(ours, ids=torch.zeros(4), other=torch.zeros(4))
            assert loaded(unit, path) == {"success": True}
            assert_same(rows_in(unit), expected)
            count = len({0, 1, 2}.difference(cleared)) if columns else 0
            assert unit.storage_data.active_key_count == count


def test_a_load_that_fails_is_reported_and_the_rows_stay(tmp_path, monkeypatch):
    def fails(*_):
        raise KeyError("any exception")

    def state(**given):
        known = {"storage_unit_size": None, "field_data": {}, "active_keys": set()}
        return pickle.dumps(known | given)

    paths = {"path": {0: "a", 1: PurePosixPath("b")}}
    for content, text in (
        (None, "No such file"),
        (b"\0", "invalid load key"),
        (pickle.dumps([1]), "list"),
        (state(field_data=None), "NoneType"),
        (state(field_data={"x": [1]}), "'items'"),
        (state(field_data=paths), "$.path[1]: pathlib."),
        (state(field_data=paths), "or set backend.SimpleStorage.jagcodec.allow_pickle to true"),
    ):
        unit, path = unit_with(True, **COLUMNS), tmp_path / "checkpoint"
        before = rows_in(unit)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        found = loaded(unit, path)
        assert (found["success"], text in found["message"]) == (False, True), found
        assert_same(rows_in(unit), before)
        for name, handler in (("from_stock", loaded), ("as_stock", saved)):
            with monkeypatch.context() as patch:
                patch.setattr(RowStorage, name, fails)
                assert saved(unit_with(False, ids=torch.ones(1)), path) == {"success": True}
                failed = handler(unit, path)
            assert failed == {"success": False, "message": "KeyError('any exception')"}
        assert_same(rows_in(unit), before)


def test_a_ragged_dim_survives_a_checkpoint(tmp_path):
    queue = Queue()
    queue.put(range(3), positions=COLUMNS["positions"])
    for _ in range(2):
        queue.reload(tmp_path)
    assert type_of(queue.get([1], "positions")["positions"]) == (torch.jagged, 2)


# --- answers of storage units ------------------------------------------------------------------


def message(batch, **meta):
    return body_of(encode(batch, meta=meta or None))


def rows(*names, count=2, dims=()):
    return TensorDict({name: torch.zeros(count, *dims, 3) for name in names}, [count, *dims])


def forged(*counts):
    """The message of two rows, by its claim, and of columns of these numbers of rows."""
    leaves = {
        name: forge.tensor(shape=(count,), offset=8 * i)
        for i, (name, count) in enumerate(zip("xy", counts, strict=True))
    }
    return body_of(forge.message(forge.tensordict([2], leaves), bytes(16)))


def test_the_forged_message_is_sound_but_for_its_rows():
    assert decode(forged(2, 2)[MESSAGE])["y"].tolist() == [0, 0]


WRONG_ANSWERS = {
    "a row too many": (message(rows("x", "y", count=3)), "expected 2 rows, found 3"),
    "a row too few": (message(rows("x", "y", count=1)), "expected 2 rows, found 1"),
    "no rows": (message(rows("x", "y", count=0)), "expected 2 rows, found 0"),
    "two dims of rows": (message(rows("x", "y", dims=[2])), "expected 2 rows, found 2 x 2"),
    "no columns": (message(rows()), "'x' missing"),
    "a column missing": (message(rows("x")), "'y' missing"),
    "a column in addition": (message(rows("x", "y", "z")), "'z' in addition"),
    "another column": (message(rows("x", "z")), "'y' missing"),
    "a column of other rows": (forged(2, 3), "y"),
    "other columns with tensors": (message(rows("x", "y"), with_tensors=["z"]), "as with_tensors"),
    "columns with tensors in a dict": (message(rows("x", "y"), with_tensors={"x": 1}), "found"),
    "no names of columns with tensors": (message(rows("x", "y"), with_tensors=1), "found 1"),
    "another value": (message([1, 2]), "found one of another value"),
    "a part of a message": ({MESSAGE: encode(rows("x", "y"))[:1]}, "frames"),
    "another message": ({MESSAGE: [b"hello"]}, "jagcodec"),
    "no frames": ({MESSAGE: []}, "found no frame"),
    "the name of a file": ({MESSAGE: __file__}, "expected the frames of a message"),
    "a batch": ({MESSAGE: {"x": [1, 2], "y": [1, 2]}}, "expected the frames of a message"),
    "nothing": ({MESSAGE: None}, "expected the frames of a message"),
    "a message of another version": ({"jagcodec 9.9": []}, "found jagcodec 9.9"),
    "no message": ([1], "TransferQueue's own format"),
}


@pytest.mark.parametrize("units", [["one"], ["two", "one"]])
@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_an_answer_with_other_rows_or_columns_is_an_error_that_names_the_unit(name, units):
    answer, text = WRONG_ANSWERS[name]
    queue: Any = Queue(units)
    queue.put(range(2 * len(units)), x=torch.ones(2 * len(units), 3), y=torch.ones(2 * len(units)))
    get = queue._get_from_single_storage_unit

    async def forged(rows, fields, target_storage_unit):
        found = await get(rows, fields, target_storage_unit)
        return (fields, answer) if target_storage_unit == "one" else found

    queue._get_from_single_storage_unit = forged
    with pytest.raises((WireFormatError, TransportError), match=text) as caught:
        queue.get(range(2 * len(units)), "x", "y")
    if name != "a column of other rows":  # found when it is read, and named by its message
        assert caught.value.path.startswith("get from storage unit one")


def test_a_unit_may_answer_with_the_columns_in_another_order():
    queue: Any = Queue()
    numbers, positions = torch.arange(4), torch.arange(8).view(4, 2)
    queue.put(range(4), x=numbers, y=positions)
    get = queue._get_from_single_storage_unit

    async def reordered(rows, fields, target_storage_unit):
        names = {MESSAGE: fields[MESSAGE][::-1]}
        return await get(rows, names, target_storage_unit)

    queue._get_from_single_storage_unit = reordered
    found = queue.get([2, 0, 3], "x", "y")
    assert list(found.keys()) == ["x", "y"]
    assert found["x"].tolist() == [2, 0, 3]
    assert [row.tolist() for row in found["y"].unbind()] == positions[[2, 0, 3]].tolist()


@pytest.mark.parametrize("dims", [[], [2]])
def test_a_put_of_other_rows_is_refused_and_not_kept(dims):
    storage = RowStorage(None, StorageOptions())
    for body in (message(rows("x", count=3, dims=dims)), {MESSAGE: __file__}):
        with pytest.raises(WireFormatError, match="put"):
            storage.put_data(body, [0, 1] if not dims else [0, 1, 2])
    assert (storage.active_key_count, storage.field_data) == (0, {})
