"""The storage backend for TransferQueue: its own controller and clients, on a real Ray."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import ArgumentError, WireFormatError, stack_or_nest
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError, TransportError
from jagcodec.wire.encoder import Columns
from tests.integrations.conftest import SECONDS
from tests.oracle import assert_same

ray = pytest.importorskip("ray", reason="Ray is not installed")
tq = pytest.importorskip(
    "transfer_queue",
    reason="TransferQueue is not installed: pip install '.[transfer-queue]'",
)

from omegaconf import OmegaConf  # noqa: E402, which TransferQueue requires
from transfer_queue import interface  # noqa: E402
from transfer_queue.metadata import extract_field_schema  # noqa: E402
from transfer_queue.storage import simple_storage  # noqa: E402

from jagcodec.integrations import transfer_queue as backend  # noqa: E402
from tests.helpers import LENGTHS, PAYLOADS, make_batch  # noqa: E402

IMPORT = "import jagcodec.integrations.transfer_queue"
START = """
import ray, torch, transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)

def nested(rows, layout=torch.jagged):
    return torch.nested.as_nested_tensor(rows, layout=layout)
"""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def queue(cluster):
    """A queue of two storage units; no process but this one imports the backend by itself."""
    tq.init()
    yield tq
    tq.close()


@pytest.fixture
def script(python):
    """Runs code in a new process, and returns the lines that it prints."""

    def run(code, **environment):
        return [line for line in python(code, **environment).stdout.splitlines() if line]

    return run


def put(batch, name, **options):
    keys = [f"{name}_{i}" for i in range(len(batch))]
    tq.kv_batch_put(keys=keys, partition_id=name, fields=batch, **options)
    return keys


def get(keys, name, **options):
    return tq.kv_batch_get(keys=keys, partition_id=name, **options)


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


def plain(item):
    return item.tolist() if hasattr(item, "tolist") else item


def assert_rows(found, rows):
    """The rows of `make_batch`, by their numbers."""
    batch = make_batch()
    assert found.batch_size == (len(rows),)
    for name in ("ids", "logprobs", "experts", "embedding", "reward"):
        assert found[name].dtype == batch[name].dtype
        expected = rows_of(batch[name])
        assert rows_of(found[name]) == [expected[i] for i in rows]
    assert found.get("message").tolist() == [PAYLOADS[i] for i in rows]
    assert found.get("tag").tolist() == ["gsm8k"] * len(rows)


# Payloads of a whole batch of six rows, and payloads with one item per row.
WHOLE: list[Any] = [
    ["a", "b"],
    ("a",) * 6,
    "abcdef",
    b"abcdef",
    torch.arange(5),
    {"stop": [1]},
    np.arange(2),
]
DEALT: list[Any] = [
    [{"id": i, "text": f"row {i}"} for i in range(6)],
    torch.arange(6),
    torch.arange(12).view(6, 2),
    stack_or_nest([torch.arange(n) for n in LENGTHS]),
    np.arange(6),
    np.array(list("abcdef")),
    np.array([{"a": (i, (2,))} for i in range(6)], dtype=object),
]


class TestColumns:
    def test_columns_come_back_in_the_order_of_the_keys(self, queue):
        assert backend.installed()
        assert len(interface._TQ_STORAGE["SimpleStorage"]) == 2
        keys = put(make_batch(), "kinds")
        for rows in (range(6), [3, 2, 1, 0], [4]):
            found = get([keys[i] for i in rows], "kinds")
            assert_rows(found, rows)
            found["ids"].values().zero_()  # it is the caller's
            found["reward"].zero_()
        found = get(keys, "kinds", select_fields=["experts", "ids"])
        assert set(found.keys()) == {"experts", "ids"}
        product = found["ids"].unsqueeze(-1) * found["experts"]  # of one raggedness
        assert [len(row) for row in product.unbind()] == LENGTHS

    def test_payloads_are_of_the_whole_batch_or_dealt_out(self, queue):
        payloads = {str(i): payload for i, payload in enumerate([*WHOLE, *DEALT])}
        columns = {n: NonTensorData(x, batch_size=[6]) for n, x in payloads.items()}
        keys = put(TensorDict(columns, [6]), "payloads")
        order = [4, 0, 3]
        found = get([keys[i] for i in order], "payloads")
        for name, payload in payloads.items():
            column = found.get(name)
            rows = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
            for row, i in zip(rows, order, strict=True):
                if int(name) < len(WHOLE):
                    assert_same(row, payload)
                else:
                    assert plain(row) == plain(payload[i])

    def test_rows_that_are_added_and_written_over(self, queue):
        keys = put(make_batch(), "later")
        value = stack_or_nest([torch.ones(n) for n in LENGTHS])
        grad = torch.ones(6, 3, requires_grad=True)
        for some, columns in (
            (keys, {"value": value, "grad": grad}),
            (keys[2:4], {"reward": torch.tensor([8.0, 9.0])}),
        ):
            fields = TensorDict(columns, [len(some)])
            queue.kv_batch_put(keys=some, partition_id="later", fields=fields)
        found = get(keys, "later")
        assert rows_of(found["value"]) == rows_of(value)
        assert found["reward"].tolist() == [0.0, 1.0, 8.0, 9.0, 4.0, 5.0]
        assert rows_of(found["grad"]) == [[1.0] * 3] * 6
        assert not found["grad"].requires_grad

    def test_one_row_with_a_tag(self, queue):
        fields = {"ids": torch.arange(4), "text": "hello"}
        queue.kv_put(key="k", partition_id="one", fields=fields, tag={"score": 0.5})
        assert rows_of(get("k", "one")["ids"]) == [[0, 1, 2, 3]]
        assert queue.kv_list(partition_id="one")["one"]["k"] == {"score": 0.5}

    def test_several_client_processes(self, queue):
        # An environment of their own, for processes that no other test has used.
        @ray.remote(num_cpus=0, runtime_env={"env_vars": {"JAGCODEC_TEST": "clients"}})
        def client(name, batch):
            import transfer_queue

            from jagcodec.integrations.transfer_queue import installed

            assert not installed()
            transfer_queue.init()
            assert installed()
            keys = [f"{name}_{i}" for i in range(len(batch))]
            transfer_queue.kv_batch_put(keys=keys, partition_id=name, fields=batch)
            found = transfer_queue.kv_batch_get(keys=keys, partition_id=name)
            return keys, found["ids"].values()

        names = [f"client{number}" for number in range(2)]
        results = [client.remote(name, make_batch()) for name in names]
        for name, (keys, values) in zip(names, ray.get(results, timeout=SECONDS), strict=True):
            assert torch.equal(values, make_batch()["ids"].values())
            assert_rows(get(keys, name), range(6))


# What every column of `COLUMNS` comes back as, one row per put and several, of one unit and of two.
DESCRIBE = """
def describe(value):
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, tuple(value.batch_size), repr(value.tolist())
    ragged = getattr(value, "_ragged_idx", None)
    rows = [row.tolist() for row in value.unbind()]
    return type(value).__name__, str(value.dtype), str(value.layout), value.is_nested, ragged, rows

lengths = [3, 1, 4, 2, 5, 1]
columns = {
    "jagged": nested([torch.arange(n) for n in lengths]),
    "inner": nested([torch.ones(n, 2) * n for n in lengths]),
    "ragged 2": nested([torch.ones(2, n) * n for n in lengths]),
    "no cells": nested([torch.ones(n, 0) for n in lengths]),
    "strided": nested([torch.ones(n, n + 1) for n in lengths], torch.strided),
    "empty rows": torch.ones(6, 0),
    "flat": torch.arange(6.0),
    "flags": torch.tensor([True, False] * 3),
    "rectangle": torch.arange(18).view(6, 3),
    "cube": torch.arange(36.0).view(6, 3, 2).to(torch.bfloat16),
    "strings": NonTensorStack(*"abcdef"),
    "dicts": NonTensorStack(*[{"a": [n, None, 2.5], "b": {"c": "x"}} for n in lengths]),
    "tensors in dicts": NonTensorStack(*[{"x": torch.arange(n)} for n in lengths]),
    "None": NonTensorStack(*[None] * 6),
}
batch = TensorDict(columns, [6])
keys = [str(n) for n in range(6)]
tq.kv_batch_put(keys=keys, partition_id="whole", fields=batch)
for i in range(6):
    odd = {
        "dtype": torch.ones(1, 2, dtype=[torch.int32, torch.int64][i // 4]),
        "rank": torch.ones(1, 2) if i < 3 else torch.ones(1, 2, 2),
        "inner dims": torch.ones(1, 2, 1 + i),
        "two dims": torch.ones(1, 2 + i, 1 + i),
        "None or tensor": torch.ones(1, 2) if i < 3 else NonTensorStack(None),
        "scalar or row": torch.ones(1) if i < 3 else torch.ones(1, 2),
        "one each": torch.arange(i + 1)[None],
    }
    row = {name: columns[name][i : i + 1] for name in columns if name in
           ("flat", "flags", "rectangle", "cube", "empty rows")}
    row |= {name: NonTensorStack(columns[name].tolist()[i]) for name in ("dicts", "None")}
    tq.kv_batch_put(keys=[keys[i]], partition_id="rows", fields=TensorDict(odd | row, [1]))
for partition in ("whole", "rows"):
    for order in ([5, 0, 3, 1, 4, 2], [0, 1, 2], [4, 2], [1]):
        found = tq.kv_batch_get(keys=[keys[i] for i in order], partition_id=partition)
        for name in sorted(found.keys()):
            print(partition, order, name, *describe(found.get(name)))
tq.close()
"""


def test_a_reader_gets_what_stock_returns(script):
    """Values, types, dtypes and layouts of every kind of column, with and without the backend."""
    scripts = START + "tq.init()" + DESCRIBE, START + IMPORT + "\ntq.init()" + DESCRIBE
    stock, ours = (
        [line for line in script(code) if line.startswith(("whole ", "rows "))] for code in scripts
    )
    assert len(stock) == 4 * (14 + 14)
    assert ours == stock


class TestRefusals:
    def test_what_cannot_be_put_is_refused_and_nothing_is_written(self, queue):
        before = on_units(active)
        parsed = r"put\(data_parser\): expected None.*before the put"
        with pytest.raises(ArgumentError, match=parsed):
            put(make_batch(), "parsed", data_parser=dict)
        paths = NonTensorStack("a", "b", "c", Path("d"))
        with pytest.raises(jagcodec.UnsupportedTypeError) as caught:
            put(TensorDict({"x": torch.ones(4), "path": paths}, [4]), "refused")
        assert caught.value.path == "$.path[3]"
        assert "register_type" in caught.value.detail
        assert "backend.SimpleStorage.jagcodec.allow_pickle to true" in caught.value.detail
        assert on_units(active) == before

    def test_a_row_that_is_gone_is_stock_s_error(self, queue):
        keys = put(make_batch(), "gone")
        client = interface._TQ_CLIENT
        metadata = in_client(client.async_kv_retrieve_meta(keys, "gone", create=False))
        in_client(client.storage_manager.clear_data(metadata))
        kind = getattr(simple_storage, "StorageKeyNotFoundError", RuntimeError)
        with pytest.raises(kind, match="not found in field"):
            in_client(client.storage_manager.get_data(metadata))


def test_memory_of_a_put_is_freed_when_its_last_row_is_cleared(queue):
    def puts(unit):
        import gc

        gc.collect()
        return [type(item).__name__ for item in gc.get_objects()].count("WireBatch")

    before = on_units(puts)
    keys = put(TensorDict({"x": torch.ones(6, 3)}, [6]), "memory")
    metrics = on_units(lambda unit: unit._handle_get_metrics().body["active_keys"])
    assert metrics == on_units(active)
    assert sum(metrics) >= 6
    queue.kv_clear(keys=keys[:4], partition_id="memory")
    assert on_units(puts) == [count + 1 for count in before]
    queue.kv_clear(keys=keys[4:], partition_id="memory")
    assert on_units(puts) == before


def in_client(coroutine):
    """What a coroutine of the client returns: in its own loop, which it has from 0.1.10 on."""
    run = getattr(interface._TQ_CLIENT, "_run_coroutine", asyncio.run)
    return run(coroutine)


def active(unit):
    return unit.storage_data.active_key_count


def on_units(work):
    """What a function returns for each storage unit, in its process."""
    units = interface._TQ_STORAGE["SimpleStorage"].values()
    return ray.get([unit.__ray_call__.remote(work) for unit in units], timeout=SECONDS)


CHECKPOINT = """
batch = TensorDict({
    "ids": nested([torch.arange(n) for n in (3, 1, 4, 2)]),
    "odd": nested([torch.ones(2, n) for n in (3, 1, 4, 2)]),
    "reward": torch.arange(4.0),
    "text": NonTensorStack(*"abcd"),
    "image": NonTensorStack(*[{"pixels": torch.ones(n)} for n in range(4)]),
}, [4])
keys = list("wxyz")
"""
SHOW = """
def show(who):
    found = tq.kv_batch_get(keys=keys[::-1], partition_id="p")
    rows = [[row.tolist() for row in found[name].unbind()] for name in ("ids", "odd", "reward")]
    images = [row["pixels"].tolist() for row in found.get("image").tolist()]
    print(who, rows, found["ids"].layout, found.get("text").tolist(), images)

def change():
    fields = TensorDict({"reward": torch.zeros(4)}, [4])
    tq.kv_batch_put(keys=keys, partition_id="p", fields=fields)
"""


@pytest.mark.skipif(not hasattr(tq, "save_checkpoint"), reason="this TransferQueue saves nothing")
def test_checkpoints_are_stock_s_in_both_directions(script, tmp_path):
    folders = f"FIRST, SECOND = {str(tmp_path / '1')!r}, {str(tmp_path / '2')!r}\n"
    start = START + CHECKPOINT + SHOW + folders
    said = script(
        start
        + """
tq.init()
tq.kv_batch_put(keys=keys, partition_id="p", fields=batch)
show("put")
tq.save_checkpoint(FIRST)
tq.close()
"""
        + IMPORT
        + """
tq.init()
tq.load_checkpoint(FIRST)
show("ours, of stock")
change()
tq.load_checkpoint(FIRST)
show("ours, loaded again")
tq.save_checkpoint(SECOND)
change()
tq.load_checkpoint(SECOND)
show("ours, of ours")
tq.close()
"""
    )
    said += script(
        start + 'tq.init()\ntq.load_checkpoint(SECOND)\nshow("stock, of ours")\ntq.close()'
    )
    shown = [line.partition(" [")[::2] for line in said if " [" in line]
    ours = ["ours, of stock", "ours, loaded again", "ours, of ours"]
    assert [who for who, _ in shown] == ["put", *ours, "stock, of ours"]
    assert len({rows for _, rows in shown}) == 1


class TestStart:
    def test_options_reach_every_process(self, script):
        said = script(
            START
            + IMPORT
            + """
from omegaconf import OmegaConf
from pathlib import PurePosixPath
options = {"allow_pickle": True, "narrow": True, "limits": {"bytes": 3000}}
tq.init(OmegaConf.create({"backend": {"SimpleStorage": {
    "jagcodec": options, "total_storage_size": 4, "num_data_storage_units": 2}}}))
rows = [torch.arange(n) for n in (300, 200)]
paths = NonTensorStack(PurePosixPath("/a"), PurePosixPath("/b"))
batch = TensorDict({"ids": nested(rows), "path": paths}, [2])

@ray.remote(num_cpus=0)
def worker():
    tq.init()
    tq.kv_batch_put(keys=["a", "b"], partition_id="p", fields=batch)
    try:  # 3,200 bytes even if narrow
        wide = TensorDict({"x": torch.ones(1, 800)}, [1])
        tq.kv_batch_put(keys=["c"], partition_id="p", fields=wide)
    except Exception as error:
        print("limit", error)
        return str(error)

print("worker", ray.get(worker.remote()))
found = tq.kv_batch_get(keys=["a", "b"], partition_id="p")
print("path", found.get("path").tolist(), [len(row) for row in found["ids"].unbind()])
try:
    more = TensorDict({"x": torch.ones(8)}, [8])
    tq.kv_batch_put(keys=list("12345678"), partition_id="p", fields=more)
except Exception as error:
    print("capacity", error)
tq.close()
""",
            TQ_LOGGING_LEVEL="ERROR",
        )
        lines = {line.split()[0]: line for line in said}
        assert "at most 3000 bytes" in lines["worker"]
        assert lines["path"] == "path [PurePosixPath('/a'), PurePosixPath('/b')] [300, 200]"
        assert "Storage capacity exceeded" in lines["capacity"]

    def test_a_process_without_jagcodec_is_named(self, script, tmp_path):
        """Storage units, or the controller, in an environment where jagcodec is missing."""
        package = tmp_path / "jagcodec"
        package.mkdir()
        (package / "__init__.py").write_text(
            "raise ModuleNotFoundError(\"No module named 'jagcodec'\", name='jagcodec')"
        )
        said = script(
            START
            + IMPORT
            + f"""
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

environment = {{"env_vars": {{"PYTHONPATH": {str(tmp_path)!r}}}}}
for actor in (SimpleStorageUnit, TransferQueueController):
    # As NeMo-RL sets a runtime environment for the actors of TransferQueue.
    options = actor.options
    actor.options = lambda *args, **more: options(*args, **more, runtime_env=environment)
    try:
        tq.init()
    except Exception as error:
        print(type(error).__name__, error)
    actor.options = options
    tq.close()
"""
        )
        assert len(said) == 2
        for line in said:
            assert line.startswith("TransportError node ")
            assert "found no module named 'jagcodec'" in line
            assert "install this version of jagcodec there" in line
            assert "node unknown" not in line


class TestOtherPeers:
    def test_stock_s_and_another_version_s_requests_are_errors_and_the_queue_lives(
        self, queue, monkeypatch
    ):
        from transfer_queue.storage.managers.simple_storage_manager import (
            AsyncSimpleStorageManager as Stock,
        )

        manager = interface._TQ_CLIENT.storage_manager
        unit = next(iter(manager.storage_unit_infos))
        put_rows, get_rows = Stock._put_to_single_storage_unit, Stock._get_from_single_storage_unit
        for request, what in ((put_rows, {"x": [torch.ones(1)]}), (get_rows, ["x"])):
            with pytest.raises(RuntimeError, match="found TransferQueue's own format; install"):
                in_client(request(manager, [1], what, target_storage_unit=unit))
        monkeypatch.setattr(backend, "MESSAGE", "jagcodec 9.9")
        expected = r"expected a message of jagcodec 0.*found jagcodec 9\.9"
        with pytest.raises(RuntimeError, match=expected):
            put(make_batch(), "other")
        monkeypatch.undo()
        assert_rows(get(put(make_batch(), "lives"), "lives"), range(6))

    def test_a_client_of_stock_s_storage_units_is_an_error(self, script):
        said = script(
            START
            + """
tq.init()

batch = TensorDict({"x": torch.ones(1)}, [1])

@ray.remote(num_cpus=0)
def late():
    import jagcodec.integrations.transfer_queue
    tq.init()
    tq.kv_put(key="b", partition_id="p", tag={"control": "is stock's"})
    try:
        tq.kv_batch_put(keys=["a"], partition_id="p", fields=batch)
    except Exception as error:
        return f"{type(error).__name__} {error}"

print(ray.get(late.remote(), timeout=90))
tq.kv_batch_put(keys=["a"], partition_id="p", fields=batch)
print(tq.kv_batch_get(keys=["a"], partition_id="p")["x"].tolist())
tq.close()
"""
        )
        *_, error, after = said
        assert error.startswith("TransportError storage unit TQ_STORAGE_UNIT_")
        assert "import jagcodec.integrations.transfer_queue before transfer_queue.init" in error
        assert after == "[1.0]"


def test_a_storage_unit_that_dies_is_an_error_and_no_hang(python):
    run = python(
        START
        + IMPORT
        + """
import threading, time
from transfer_queue import interface
tq.init()
unit = list(interface._TQ_STORAGE["SimpleStorage"].values())[0]
threading.Timer(1, lambda: ray.kill(unit)).start()
keys = [str(i) for i in range(64)]
batch = TensorDict({"x": torch.ones(64, 1000)}, [64])
start = time.monotonic()
try:
    while time.monotonic() - start < 60:
        tq.kv_batch_put(keys=keys, partition_id="p", fields=batch)
        tq.kv_batch_get(keys=keys, partition_id="p")
except Exception as error:
    print("failed with", type(error).__name__, error)
""",
        TQ_LOGGING_LEVEL="INFO",
        TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT="5",
        TQ_SIMPLE_STORAGE_MAX_ATTEMPTS="1",
        TQ_SIMPLE_STORAGE_PROBE_TIMEOUT="2",
    )
    assert re.search("failed with (StorageUnitTimeout|RuntimeError)", run.stdout)
    # The log says which storage units run.
    assert f"jagcodec {jagcodec.__version__} runs the storage units" in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"jagcodec": {"pickle": True}}, ArgumentKeyError, "jagcodec: expected one of allow_p"),
        ({"jagcodec": {"narrow": 1}}, ArgumentTypeError, "jagcodec.narrow: expected true or"),
        ({"jagcodec": {"allow_pickle": "yes"}}, ArgumentTypeError, "jagcodec.allow_pickle: "),
        ({"jagcodec": {"limits": {"byte": 1}}}, ArgumentKeyError, "jagcodec.limits: expected"),
        ({"jagcodec": {"limits": 7}}, ArgumentTypeError, "jagcodec.limits: expected a map"),
        ({"jagcodec": [1]}, ArgumentTypeError, "jagcodec: expected a mapping"),
        ({"jagcodec": {"limits": {"bytes": -1}}}, ArgumentError, ""),
        ({"ssd_offload": {"enabled": True}}, ArgumentError, "ssd_offload.enabled: expected f"),
    ],
)
def test_what_the_start_of_storage_units_refuses(given, error, text):
    with pytest.raises(error) as caught:
        backend.start_units(OmegaConf.create({"backend": {"SimpleStorage": given}}))
    assert str(caught.value).startswith(f"backend.SimpleStorage.{text}" if text else "Limits")


class TestStorage:
    """A storage unit's rows, without a queue around them."""

    @pytest.fixture
    def storage(self):
        return backend._RowStorage(None, backend.StorageOptions())

    @staticmethod
    def body(**columns):
        rows = len(next(iter(columns.values())))
        return backend.body_of(backend.StorageOptions().encode(Columns(rows, columns)))

    @staticmethod
    def got(storage, names, rows):
        """The frames of a reply, and the batch in them."""
        frames = storage.get_data({backend.MESSAGE: names}, rows)[backend.MESSAGE]
        return frames, jagcodec.open_wire(frames)

    def test_what_is_refused_is_not_stored(self, storage):
        body = self.body(x=torch.ones(2, 3))
        with pytest.raises(WireFormatError, match="expected 3 rows, found 2"):
            storage.put_data(body, [0, 1, 2])
        body[backend.MESSAGE][0] = body[backend.MESSAGE][0][:-1]
        with pytest.raises(WireFormatError):
            storage.put_data(body, [0, 1])
        assert (storage.active_key_count, storage.field_data) == (0, {})
        storage.storage_size = 3
        storage.put_data(self.body(x=torch.ones(2, 3)), [0, 1])
        with pytest.raises(ValueError, match="capacity exceeded"):
            storage.put_data(self.body(x=torch.ones(2, 3)), [2, 3])
        assert storage.active_key_count == 2

    def test_one_block_per_column_whatever_puts_the_rows_came_from(self, storage):
        for i in range(50):
            storage.put_data(self.body(ids=torch.full((1, 3000), i), o=[{"i": i}]), [i])
        for names, rows in ((["ids", "o"], [40, 3, 7]), (["o", "ids"], [7, 40, 5])):
            frames, batch = self.got(storage, names, rows)
            assert [len(frame) for frame in frames[1:]].count(3 * 3000 * 8) == 1
            assert len(frames) <= 3
            assert batch.meta == {}  # no column has to be joined from its rows
            assert [row[0].item() for row in batch["ids"].unbind()] == rows
            assert batch["o"].tolist() == [{"i": i} for i in rows]

    def test_rows_that_were_read_together_share_a_message_from_then_on(self, storage):
        for i in range(8):
            storage.put_data(self.body(x=torch.full((1,), i), y=torch.ones(1)), [i])

        def messages(name):
            return len({id(row.batch) for row in storage.field_data[name].values()})

        self.got(storage, ["x"], [5, 1, 2])
        assert (messages("x"), messages("y")) == (6, 8)
        rows = list(range(8))
        assert self.got(storage, ["x", "y"], rows)[1]["x"].tolist() == rows
        storage.put_data(self.body(x=torch.tensor([9])), [3])
        assert self.got(storage, ["x"], rows)[1]["x"].tolist() == [0, 1, 2, 9, 4, 5, 6, 7]

    @pytest.mark.parametrize("body", [{"x": [1]}, ["x"], {}, None, {"jagcodec 9.9": 1}, {1: 2}])
    def test_a_request_of_another_kind(self, storage, body):
        for request in (storage.put_data, storage.get_data):
            with pytest.raises(TransportError, match=f"expected a message of {backend.MESSAGE}"):
                request(body, [0])


class TestSchema:
    def test_it_is_what_transfer_queue_extracts_from_rows(self):
        batch = make_batch().exclude("tag")
        batch["positions"] = torch.nested.nested_tensor_from_jagged(
            torch.arange(30).view(2, 15), torch.tensor([0, 3, 4, 9, 9, 11, 15]), jagged_dim=2
        )
        batch["strided"] = torch.nested.as_nested_tensor(
            [torch.ones(n, n + 1) for n in range(6)], layout=torch.strided
        )
        found, stock = backend.field_schema(batch), extract_field_schema(batch)
        assert found == stock
        assert list(found) == list(stock)
        for name, field in found.items():
            assert {k: type(v) for k, v in field.items()} == {
                k: type(v) for k, v in stock[name].items()
            }


class TestImport:
    def test_nothing_of_transfer_queue_is_replaced_but_two_entries_of_its_registries(self, script):
        code = """
            import sys, inspect
            import transfer_queue
            from transfer_queue.storage.bootstrap import StorageBootstrapProvider
            from transfer_queue.storage.managers.base import StorageManagerFactory

            def names():
                found = {}
                for module in [m for name, m in sys.modules.items() if "transfer_queue" in name]:
                    classes = [value for value in vars(module).values() if inspect.isclass(value)]
                    for of in [module, *classes]:
                        found |= {(of.__name__, name): id(x) for name, x in vars(of).items()}
                return found

            before = names()
            registries = StorageManagerFactory._registry, StorageBootstrapProvider._providers
            registered = [dict(registry) for registry in registries]
            import jagcodec.integrations.transfer_queue
            after = names()
            print([key for key in before if after[key] != before[key]])
            for old, new in zip(registered, registries):
                print([name for name in new if new[name] is not old.get(name)])
        """
        assert script(code) == ["[]", "['SimpleStorage']", "['simplestorage']"]

    def test_another_version_of_transfer_queue_is_named(self, script):
        changes = {
            "del Manager._group_by_hash": "Manager._group_by_hash",
            "del Data.clear": "StorageUnitData.clear",
            "bootstrap.initialize_simple_storage = len": "initialize_simple_storage",
        }
        code = f"""
            import transfer_queue
            from transfer_queue.storage import simple_storage
            from transfer_queue.storage.bootstrap import simple_storage_bootstrap as bootstrap
            from transfer_queue.storage.managers import simple_storage_manager
            Manager = simple_storage_manager.AsyncSimpleStorageManager
            Data = simple_storage.StorageUnitData
            transfer_queue.__version__ = "9.9"
            for change in {[*changes]}:
                group, clear = Manager._group_by_hash, Data.clear
                exec(change)
                try:
                    import jagcodec.integrations.transfer_queue
                except ImportError as error:
                    print(error)
                Manager._group_by_hash, Data.clear = group, clear
        """
        for found, named in zip(script(code), changes.values(), strict=True):
            assert named in found
            assert "found version 9.9" in found
