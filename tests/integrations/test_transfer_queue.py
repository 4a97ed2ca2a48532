"""TransferQueue over this wire: its own controller, storage units and clients, on a real Ray."""

import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    Limits,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    register_type,
    stack_or_nest,
)
from jagcodec.testing import assert_same

ray = pytest.importorskip("ray", reason="Ray is not installed")
tq = pytest.importorskip(
    "transfer_queue",
    reason="TransferQueue is not installed: pip install 'jagcodec[transfer-queue]'",
)

from transfer_queue import interface  # noqa: E402
from transfer_queue.metadata import BatchMeta  # noqa: E402
from transfer_queue.storage.managers.simple_storage_manager import (  # noqa: E402
    AsyncSimpleStorageManager,
)
from transfer_queue.utils import serial_utils, zmq_utils  # noqa: E402

from jagcodec.integrations import transfer_queue as integration  # noqa: E402
from tests.helpers import LENGTHS, PAYLOADS, ROOT, make_batch  # noqa: E402

SOURCE = str(Path(jagcodec.__file__).parents[1])
HOOK = "jagcodec.integrations.transfer_queue.install"
PATHS = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH", "")]))
SECONDS = 90

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def queue():
    """A queue of two storage units, all of its processes and this one with `install`."""
    integration.install()
    ray.init(
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"worker_process_setup_hook": HOOK, "env_vars": {"PYTHONPATH": PATHS}},
    )
    tq.init()
    yield tq
    tq.close()
    ray.shutdown()
    integration.uninstall()


@pytest.fixture
def as_before():
    """Leaves this process as it was: the queue of other tests may be running."""
    before = serial_utils.encode
    yield
    if before is integration._STOCK["encode"]:
        integration.uninstall()
    else:
        integration.install()


@pytest.fixture
def installed(as_before):
    integration.install()


@pytest.fixture
def stock(as_before):
    integration.uninstall()


def put(batch, name):
    keys = [f"{name}_{i}" for i in range(len(batch))]
    tq.kv_batch_put(keys=keys, partition_id=name, fields=batch)
    return keys


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


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


def script(code, **environment):
    """What a fresh process prints."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": PATHS, **environment},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.mark.cluster
class TestColumns:
    def test_every_kind_comes_back(self, queue):
        assert len(interface._TQ_STORAGE["SimpleStorage"]) == 2
        keys = put(make_batch(), "kinds")
        assert_rows(queue.kv_batch_get(keys=keys, partition_id="kinds"), range(6))

    @pytest.mark.parametrize("rows", [[4], [5, 0], [3, 2, 1, 0], [1, 3, 5]])
    def test_some_rows_in_another_order(self, queue, rows):
        keys = put(make_batch(), "some")
        found = queue.kv_batch_get(keys=[keys[i] for i in rows], partition_id="some")
        assert_rows(found, rows)

    @pytest.mark.parametrize(
        "payload",
        [["a", "b"], ("a",) * 6, "abcdef", b"abcdef", torch.arange(5), {"stop": [1]}, np.arange(2)],
        ids=lambda payload: type(payload).__name__,
    )
    def test_a_payload_of_the_whole_batch_is_every_row_s(self, queue, payload):
        batch = TensorDict({"x": torch.ones(6), "all": NonTensorData(payload, batch_size=[6])}, [6])
        keys = put(batch, "whole")
        assert type(batch.get("all")) is NonTensorData
        found = queue.kv_batch_get(keys=keys, partition_id="whole").get("all")
        rows = found.unbind() if isinstance(found, torch.Tensor) else found.tolist()
        assert len(rows) == 6
        for row in rows:
            assert_same(row, payload)

    @pytest.mark.parametrize(
        "payload",
        [
            [{"id": i, "text": f"row {i}"} for i in range(6)],
            torch.arange(6),
            torch.arange(12).view(6, 2),
            stack_or_nest([torch.arange(n) for n in LENGTHS]),
            np.arange(6),
        ],
        ids=lambda payload: type(payload).__name__,
    )
    def test_a_payload_of_one_item_per_row_is_dealt_out(self, queue, payload):
        batch = TensorDict({"x": torch.ones(6), "all": NonTensorData(payload, batch_size=[6])}, [6])
        keys = put(batch, "dealt")
        order = [4, 0, 3]
        found = queue.kv_batch_get(keys=[keys[i] for i in order], partition_id="dealt").get("all")
        rows = found.unbind() if isinstance(found, torch.Tensor) else found.tolist()
        items = payload.unbind() if isinstance(payload, torch.Tensor) else list(payload)
        for row, i in zip(rows, order, strict=True):
            plain = row.tolist() if hasattr(row, "tolist") else row
            item = items[i].tolist() if hasattr(items[i], "tolist") else items[i]
            assert plain == item

    def test_arrays_of_strings_and_objects_are_rows(self, queue):
        objects = np.empty(6, dtype=object)
        objects[:] = PAYLOADS
        columns = {"text": np.array(list("abcdef")), "object": objects}
        found = queue.kv_batch_get(
            keys=put(TensorDict(columns, [6]), "arrays"), partition_id="arrays"
        )
        assert found.get("text").tolist() == list("abcdef")
        assert found.get("object").tolist() == PAYLOADS

    def test_some_columns(self, queue):
        keys = put(make_batch(), "columns")
        found = queue.kv_batch_get(
            keys=keys, partition_id="columns", select_fields=["message", "ids"]
        )
        assert set(found.keys()) == {"message", "ids"}

    def test_columns_of_one_raggedness_multiply(self, queue):
        keys = put(make_batch(), "raggedness")
        found = queue.kv_batch_get(keys=keys, partition_id="raggedness")
        product = found["ids"].unsqueeze(-1) * found["experts"]
        assert [len(row) for row in product.unbind()] == LENGTHS

    def test_rows_that_are_added_and_written_over(self, queue):
        keys = put(make_batch(), "later")
        more = TensorDict({"value": stack_or_nest([torch.ones(n) for n in LENGTHS])}, [6])
        queue.kv_batch_put(keys=keys, partition_id="later", fields=more)
        queue.kv_batch_put(
            keys=keys[2:4],
            partition_id="later",
            fields=TensorDict({"reward": torch.tensor([8.0, 9.0])}, [2]),
        )
        found = queue.kv_batch_get(keys=keys, partition_id="later")
        assert [len(row) for row in found["value"].unbind()] == LENGTHS
        assert found["reward"].tolist() == [0.0, 1.0, 8.0, 9.0, 4.0, 5.0]

    def test_what_comes_back_may_be_written_to(self, queue):
        keys = put(make_batch(), "writable")
        found = queue.kv_batch_get(keys=keys, partition_id="writable")
        found["ids"].values().zero_()
        found["reward"].zero_()
        assert_rows(queue.kv_batch_get(keys=keys, partition_id="writable"), range(6))

    def test_one_row_with_a_tag(self, queue):
        queue.kv_put(
            key="k",
            partition_id="one",
            fields={"ids": torch.arange(4), "text": "hello"},
            tag={"score": 0.5, "shape": (1, 2)},
        )
        found = queue.kv_batch_get(keys="k", partition_id="one")
        assert rows_of(found["ids"]) == [[0, 1, 2, 3]]
        assert queue.kv_list(partition_id="one")["one"]["k"] == {"score": 0.5, "shape": (1, 2)}
        queue.kv_clear(keys="k", partition_id="one")
        assert "k" not in queue.kv_list(partition_id="one").get("one", {})

    def test_several_client_processes(self, queue):
        @ray.remote(num_cpus=0)
        def client(name, batch):
            import transfer_queue

            transfer_queue.init()
            keys = [f"{name}_{i}" for i in range(len(batch))]
            transfer_queue.kv_batch_put(keys=keys, partition_id=name, fields=batch)
            found = transfer_queue.kv_batch_get(keys=keys, partition_id=name)
            return keys, found["ids"].values()

        names = [f"client{number}" for number in range(3)]
        results = [client.remote(name, make_batch()) for name in names]
        for name, (keys, values) in zip(names, ray.get(results, timeout=SECONDS), strict=True):
            assert torch.equal(values, make_batch()["ids"].values())
            assert_rows(queue.kv_batch_get(keys=keys, partition_id=name), range(6))


@pytest.mark.cluster
class TestObjects:
    def test_a_data_parser_runs_where_the_rows_are_stored(self, queue):
        factor = 10

        def parse(fields):
            fields["ids"] = [row * factor for row in fields["ids"]]
            return fields

        keys = [f"parsed_{i}" for i in range(6)]
        queue.kv_batch_put(keys=keys, partition_id="parsed", fields=make_batch(), data_parser=parse)
        found = queue.kv_batch_get(keys=keys, partition_id="parsed")
        assert rows_of(found["ids"]) == rows_of(make_batch()["ids"] * 10)

    def test_code_is_unpickled_where_it_is_called_and_not_before(self, installed, monkeypatch):
        loads = serial_utils.cloudpickle.loads
        unpickled = []
        monkeypatch.setattr(
            serial_utils.cloudpickle, "loads", lambda data: unpickled.append(data) or loads(data)
        )
        message = {"request_type": "PUT_DATA", "body": {"data_parser": len, "data": {}}}
        parser = serial_utils.decode(serial_utils.encode(message))["body"]["data_parser"]
        assert callable(parser)
        assert not unpickled
        assert parser([7, 8]) == 2
        assert len(unpickled) == 1

    def test_what_cannot_be_encoded_is_named_and_not_pickled(self, queue):
        batch = TensorDict({"path": NonTensorStack("a", Path("/b"))}, [2])
        with pytest.raises(RuntimeError, match=r"body.data.path\[\d\].*Path cannot be encoded"):
            put(batch, "refused")
        assert_rows(queue.kv_batch_get(keys=put(make_batch(), "on"), partition_id="on"), range(6))

    def test_a_reply_that_cannot_be_encoded_is_an_error_and_the_unit_lives(self, queue):
        def parse(fields):
            fields["text"] = [Path(text) for text in fields["text"]]
            return fields

        keys = ["odd_0", "odd_1"]
        queue.kv_batch_put(
            keys=keys,
            partition_id="odd",
            fields=TensorDict({"text": NonTensorStack("/a", "/b")}, [2]),
            data_parser=parse,
        )
        with pytest.raises(RuntimeError, match="Path cannot be encoded"):
            queue.kv_batch_get(keys=keys, partition_id="odd")
        assert_rows(queue.kv_batch_get(keys=put(make_batch(), "x"), partition_id="x"), range(6))


@pytest.mark.cluster
class TestBesideStock:
    def test_a_stock_reader_fails_readably_and_unpickles_nothing(self, queue, monkeypatch):
        keys = put(make_batch(), "mixed")
        unpickled = []
        integration.uninstall()
        try:
            for module in (serial_utils.pickle, serial_utils.cloudpickle):
                monkeypatch.setattr(module, "loads", lambda data, *_: unpickled.append(data))
            with pytest.raises(Exception, match="Extension type code 16 is not supported"):
                queue.kv_batch_get(keys=keys, partition_id="mixed")
        finally:
            monkeypatch.undo()
            integration.install()
        assert not unpickled
        assert_rows(queue.kv_batch_get(keys=keys, partition_id="mixed"), range(6))

    def test_a_stock_client_ends_in_the_handshake_and_the_queue_lives(self, queue):
        # An environment of its own, for a process of its own: one that other tests have used is
        # connected already, and init() does nothing there.
        @ray.remote(num_cpus=0, runtime_env={"env_vars": {"JAGCODEC_TEST": "stock"}})
        def stock():
            import transfer_queue

            from jagcodec.integrations.transfer_queue import uninstall

            uninstall()
            try:
                transfer_queue.init()
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        said = ray.get(stock.remote(), timeout=SECONDS)
        assert said.startswith("TimeoutError")
        assert "Handshake" in said
        keys = put(make_batch(), "after_stock")
        assert_rows(queue.kv_batch_get(keys=keys, partition_id="after_stock"), range(6))

    def test_a_stock_message_is_refused_by_the_name_of_the_remedy(self, stock):
        values = ({"request_type": "GET"}, [b"x"], "text", torch.ones(3), 1 << 70)
        messages = [serial_utils.encode(value) for value in values]
        integration.install()
        for frames in messages:
            with pytest.raises(WireFormatError, match=r"transfer_queue\.install\(\)"):
                serial_utils.decode(frames)

    def test_an_installed_client_of_stock_units(self):
        said = script(
            """
            import ray, torch, transfer_queue as tq
            from tensordict import TensorDict
            from jagcodec.integrations.transfer_queue import install

            ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
            tq.init()
            batch = TensorDict({"x": torch.ones(1)}, [1])
            tq.kv_batch_put(keys=["a"], partition_id="p", fields=batch)

            @ray.remote(num_cpus=0)
            def late():
                install()
                try:
                    tq.init()
                except Exception as error:
                    return f"{type(error).__name__}: {error}"

            print("handshake", ray.get(late.remote(), timeout=90))
            install()
            try:
                tq.kv_batch_get(keys=["a"], partition_id="p")
            except Exception as error:
                print("get", type(error).__name__, error)
            """,
        )
        lines = {line.split()[0]: line for line in said.splitlines() if line}
        assert "TimeoutError" in lines["handshake"]
        assert "jagcodec.integrations.transfer_queue.install()" in lines["handshake"]
        assert "jagcodec.integrations.transfer_queue.install()" in lines["get"]


@pytest.mark.cluster
def test_a_storage_unit_that_dies_is_an_error_and_no_hang():
    said = script(
        """
        import threading, time, ray, torch, transfer_queue as tq
        from tensordict import TensorDict
        from transfer_queue import interface
        from jagcodec.integrations.transfer_queue import install

        install()
        ray.init(
            num_cpus=6,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"worker_process_setup_hook": "HOOK"},
        )
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
        """.replace("HOOK", HOOK),
        TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT="5",
        TQ_SIMPLE_STORAGE_MAX_ATTEMPTS="1",
        TQ_SIMPLE_STORAGE_PROBE_TIMEOUT="2",
    )
    assert "failed with StorageUnitTimeout" in said


class TestPackedBuffers:
    values = (
        torch.arange(6).view(2, 3),
        {"role": "user", "ids": np.arange(3)},
        "text",
        make_batch(),
        None,
    )

    @pytest.mark.parametrize("workers", [1, 4])
    @pytest.mark.parametrize("kind", ["numpy", "torch", "memoryview"])
    def test_values_come_back(self, installed, kind, workers):
        make = {
            "numpy": lambda size: np.empty(size + 5, dtype=np.uint8),
            "torch": lambda size: torch.empty(size + 5, dtype=torch.uint8),
            "memoryview": lambda size: memoryview(bytearray(size)),
        }[kind]
        buffers, sizes = serial_utils.batch_encode_into(
            list(self.values), lambda sizes: [make(size) for size in sizes], num_workers=workers
        )
        assert all(np.asarray(b).nbytes >= n for b, n in zip(buffers, sizes, strict=True))
        tensor, mapping, text, batch, nothing = serial_utils.batch_decode_from(buffers)
        assert torch.equal(tensor, self.values[0])
        assert mapping["ids"].tolist() == [0, 1, 2]
        assert (mapping["role"], text, nothing) == ("user", "text", None)
        assert rows_of(batch["ids"]) == rows_of(self.values[3]["ids"])
        assert batch.get("message").tolist() == PAYLOADS

    def test_values_alias_their_buffers(self, installed):
        buffers, _ = serial_utils.batch_encode_into(
            [torch.zeros(1000)], lambda sizes: [torch.zeros(sizes[0], dtype=torch.uint8)]
        )
        (value,) = serial_utils.batch_decode_from(buffers)
        buffers[0][-4000:] = 255
        assert value.isnan().all()

    @pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # stock 0.1.9's own
    def test_refusals(self, installed):
        asked = []
        with pytest.raises(UnsupportedTypeError, match=r"_thread\.lock cannot be encoded"):
            serial_utils.batch_encode_into([1, threading.Lock()], asked.append)
        assert not asked
        with pytest.raises(ArgumentError, match="expected a buffer of at least"):
            serial_utils.batch_encode_into([torch.ones(9)], lambda sizes: [bytearray(8)])
        first, second = bytearray(200), bytearray(8)
        with pytest.raises(ArgumentError, match=r"\[1\]: expected a buffer of at least"):
            serial_utils.batch_encode_into([1, 2], lambda sizes: [first, second])
        assert not any(first)
        with pytest.raises(ArgumentError, match="expected 2 buffers, found 1"):
            serial_utils.batch_encode_into([1, 2], lambda sizes: [first])
        integration.uninstall()
        stock, _ = serial_utils.batch_encode_into(
            [{"a": 1}], lambda sizes: [bytearray(size) for size in sizes]
        )
        integration.install()
        with pytest.raises(WireFormatError, match=r"transfer_queue\.install\(\)"):
            serial_utils.batch_decode_from(stock)


def jagged_rows(*rows, dim=1):
    values = torch.cat([torch.as_tensor(row) for row in rows], dim=dim - 1)
    lengths = torch.tensor([torch.as_tensor(row).shape[dim - 1] for row in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


class TestRowsOfOneUnit:
    """What TransferQueue's own tests ask of `_select_by_positions`, and what is sent of it."""

    @staticmethod
    def select(column, positions):
        return AsyncSimpleStorageManager._select_by_positions(column, positions)

    @pytest.mark.parametrize("dim", [1, 2])
    def test_it_is_a_list_of_tensors_and_sent_as_one_buffer(self, installed, dim):
        rows = [torch.arange(3 * n).view((n, 3) if dim == 1 else (3, n)) for n in (2, 0, 5, 3)]
        chosen = self.select(jagged_rows(*rows, dim=dim), [3, 0, 1])
        assert isinstance(chosen, list)
        assert_same([*chosen], [rows[3], rows[0], rows[1]])
        frames = serial_utils.encode({"x": chosen})
        back = serial_utils.decode(frames)["x"]
        assert type(back) is list
        assert_same(back, [*chosen])
        assert b"transfer_queue.rows" in bytes(frames[0])

    def test_what_is_put_into_the_list_is_sent(self, installed):
        rows = [torch.arange(2), torch.arange(3), torch.arange(4)]
        for change in (
            lambda found: found.append(torch.ones(1)),
            lambda found: found.__setitem__(1, torch.ones(3)),
            lambda found: found.reverse(),
            lambda found: found.pop(),
        ):
            chosen = self.select(jagged_rows(*rows), [0, 1, 2])
            change(chosen)
            assert_same(serial_utils.decode(serial_utils.encode(chosen)), [*chosen])

    def test_no_positions_and_other_columns_are_transfer_queue_s(self, installed):
        with pytest.raises(ValueError, match="No positions"):
            self.select(jagged_rows([1], [2, 3]), [])
        assert self.select(torch.arange(5), [0, 2, 4]).tolist() == [0, 2, 4]
        assert self.select(["a", "b", "c"], [2, 0]) == ["c", "a"]


class TestForged:
    """Records of TransferQueue's that somebody else wrote."""

    @pytest.mark.parametrize(
        "state",
        [
            (None, np.zeros((4_000_000, 0), dtype=np.int64)),
            (None, np.zeros((4_000_000, 0), dtype=np.int32)),
            (None, np.zeros(4, dtype=np.int64)),
            (None, np.zeros((1, 1), dtype=np.float64)),
            (None, torch.zeros(4_000_000, 0, dtype=torch.int64)),
            ([1], np.zeros((2, 1), dtype=np.int64)),
            ("ab", np.zeros((2, 1), dtype=np.int64)),
            (range(1 << 40), np.zeros((1, 1), dtype=np.int64)),
            None,
            (1, 2, 3),
        ],
    )
    def test_shapes(self, state):
        tracemalloc.start()
        try:
            with pytest.raises((ValueError, TypeError)):
                integration._shapes(state)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        "state",
        [
            (torch.zeros(5), np.array([2, 2]), 1),
            (torch.zeros(5), np.array([6, -1]), 1),
            (torch.zeros(5), np.array([[5]]), 1),
            (torch.zeros(5), np.array([5.0]), 1),
            (torch.zeros(5), np.array([5]), 2),
            (torch.zeros(5), np.array([5]), 0),
            (torch.zeros(5), np.array([5]), True),
            (torch.zeros(()), np.array([1]), 1),
            (torch.zeros(2, 2).to_sparse(), np.array([2]), 1),
            (torch.zeros(0), np.array([1 << 62] * 4), 1),
            (jagged_rows([1], [2]), np.array([1, 1]), 1),
            ([1], np.array([1]), 1),
            None,
            (1, 2),
        ],
    )
    def test_rows(self, state):
        with pytest.raises((ValueError, TypeError)):
            integration._row_list(state)

    def test_shapes_without_dims_are_refused_in_a_message_too(self, installed):
        forged = integration._Shapes(None, [])
        forged.state = (None, np.zeros((4_000_000, 0), dtype=np.int64))
        frames = encode(forged)
        assert sum(map(len, frames)) < 200
        for read in (decode, serial_utils.decode):
            with pytest.raises(WireFormatError, match="at least one dim"):
                read(frames)

    def test_only_transfer_queue_s_decoder_makes_what_can_be_called(self, installed):
        message = {"request_type": "PUT_DATA", "body": {"data_parser": len, "data": {}}}
        frames = serial_utils.encode(message)
        assert type(decode(frames)["body"]["data_parser"]) is bytes
        assert callable(serial_utils.decode(frames)["body"]["data_parser"])
        # Passed on, it is what it was.
        again = serial_utils.encode(serial_utils.decode(frames))
        assert decode(again) == decode(frames)
        # At any other place, and by any other name, bytes are bytes.
        for other in ({"body": {"x": b"1"}}, {"data_parser": b"1"}, b"1", [{"body": {}}]):
            assert serial_utils.decode(serial_utils.encode(other)) == other

        class Code:
            pass

        # Another name of the same length, so that nothing else in the message changes.
        register_type(Code, "transfer_queue.CODE", to_state=lambda _: b"1", from_state=lambda s: s)
        (header,) = encode(Code())
        forged = bytes(header).replace(b"transfer_queue.CODE", b"transfer_queue.code")
        for read in (decode, serial_utils.decode):
            with pytest.raises(WireFormatError) as caught:
                read([forged])
            assert caught.value.reason == "unknown_type"


class TestMessages:
    def test_metadata_is_encoded_as_data(self, installed):
        schema = {
            "ids": {
                "dtype": torch.int64,
                "shape": torch.Size([3]),
                "is_nested": True,
                "is_non_tensor": False,
                "per_sample_shapes": [(3,), (1,)],
            },
            "odd": {"is_nested": True, "per_sample_shapes": [(3,), None]},
        }
        meta = BatchMeta([4, 9], ["p", "p"], schema, np.ones(2, np.int8), {"t": torch.ones(2)})
        back = serial_utils.decode(serial_utils.encode({"body": {"metadata": meta}}))
        found = back["body"]["metadata"]
        assert type(found) is BatchMeta
        assert found.field_schema == schema
        assert found.global_indexes == [4, 9]
        assert found.extra_info["t"].tolist() == [1, 1]
        assert found.production_status.tolist() == [1, 1]
        assert found.is_ready == meta.is_ready

    def test_a_field_schema_keeps_its_rows(self, installed):
        for shapes in ({7: (3, 2), 2: (1, 2)}, {7: (3,), 2: (1, 2)}, {}, {1: None}, {1: (2.5,)}):
            message = {"body": {"field_schema": {"ids": {"per_sample_shapes": shapes}}}}
            back = serial_utils.decode(serial_utils.encode(message))
            found = back["body"]["field_schema"]["ids"]["per_sample_shapes"]
            assert list(found.items()) == list(shapes.items())

    def test_the_schema_is_what_transfer_queue_says(self, installed):
        batch = make_batch().exclude("tag")
        batch["positions"] = torch.nested.nested_tensor_from_jagged(
            torch.arange(30).view(2, 15), torch.tensor([0, 3, 4, 9, 9, 11, 15]), jagged_dim=2
        )
        ours = sys.modules["transfer_queue.metadata"].extract_field_schema(batch)
        stock = integration._STOCK["extract_field_schema"](batch)
        assert ours == stock
        assert list(ours) == list(stock)

    def test_forged_metadata_is_refused(self, installed):
        class Forged:
            pass

        register_type(
            Forged,
            "tests.Forged",
            to_state=lambda forged: ((1, 2),),
            from_state=lambda state: state,
        )
        header = encode(Forged())
        frame = header[0].replace(b"\xactests.Forged", b"\xb8transfer_queue.BatchMeta")
        with pytest.raises(WireFormatError):
            serial_utils.decode([frame])

    def test_pickle_only_if_told(self, as_before):
        integration.install(allow_pickle=True)
        frames = serial_utils.encode({"body": Path("/a")})
        assert serial_utils.decode(frames) == {"body": Path("/a")}
        integration.install()
        with pytest.raises(WireFormatError, match="without pickle"):
            serial_utils.decode(frames)

    def test_a_default_and_limits_if_told(self, as_before):
        integration.install(default=str, limits=Limits(bytes=100))
        frames = serial_utils.encode({"body": Path("/a")})
        assert serial_utils.decode(frames) == {"body": "/a"}
        with pytest.raises(WireFormatError, match="at most 100 bytes"):
            serial_utils.decode(serial_utils.encode({"body": "x" * 100}))
        integration.install()
        with pytest.raises(UnsupportedTypeError):
            serial_utils.encode({"body": Path("/a")})


class TestInstall:
    def test_every_name_is_replaced_and_restored(self, stock):
        places = [
            (module, name, value)
            for module in (serial_utils, zmq_utils, sys.modules["transfer_queue.metadata"])
            for name, value in vars(module).items()
            if any(value is stock for stock in integration._STOCK.values())
        ]
        assert len(places) >= 10
        integration.install()
        integration.install()
        assert not any(vars(module)[name] is value for module, name, value in places)
        assert (
            type(serial_utils.MsgpackDecoder().decode(serial_utils.MsgpackEncoder().encode((1,))))
            is tuple
        )
        integration.uninstall()
        assert all(vars(module)[name] is value for module, name, value in places)
        integration.uninstall()
        assert type(serial_utils.decode(serial_utils.encode((1,)))) is list

    def test_names_that_others_imported(self):
        code = """
            import types, sys
            from transfer_queue.utils.serial_utils import encode as theirs
            mine = types.ModuleType("mine"); mine.write = theirs; sys.modules["mine"] = mine
            kept = [theirs]
            from jagcodec.integrations.transfer_queue import install, uninstall
            install()
            from transfer_queue.utils.serial_utils import encode as later
            print(mine.write is kept[0], theirs is kept[0], mine.write is later)
            uninstall()
            print(mine.write is kept[0])
        """
        assert script(code).split() == ["False", "False", "True", "True"]

    def test_without_transfer_queue_the_error_says_what_to_install(self):
        code = """
            import sys
            sys.modules["transfer_queue"] = None
            try:
                import jagcodec.integrations.transfer_queue
            except ModuleNotFoundError as error:
                print(error)
        """
        assert "pip install 'jagcodec[transfer-queue]'" in script(code)

    @pytest.mark.parametrize(
        "change",
        [
            "del serial_utils.batch_encode_into",
            "del AsyncSimpleStorageManager.put_data",
            "sys.modules['transfer_queue.metadata'] = None",
        ],
    )
    def test_another_version_of_transfer_queue_is_named(self, change):
        code = f"""
            import sys
            import transfer_queue
            from transfer_queue.utils import serial_utils
            from transfer_queue.storage.managers.simple_storage_manager import (
                AsyncSimpleStorageManager,
            )
            transfer_queue.__version__ = "9.9"
            {change}
            try:
                import jagcodec.integrations.transfer_queue
            except ImportError as error:
                print(type(error).__name__, error)
        """
        found = script(code)
        assert found.startswith("ImportError")
        assert "functions of TransferQueue 0.1.9 to 0.1.11, found version 9.9" in found


@pytest.mark.cluster
def test_the_example_runs():
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples/transfer_queue_put_get.py")],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "3 rows back" in run.stdout
