"""The storage backend for TransferQueue: its own controller and clients, on a real Ray.

One queue runs at a time: one of TransferQueue's own storage units, and then those of this backend.
"""

import ast
import asyncio
import enum
import inspect
import logging
import os
import runpy
import sys
import types
from abc import ABCMeta, abstractmethod
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import ArgumentError, WireFormatError
from jagcodec.columns.batch import Columns
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError, TransportError
from jagcodec.wire.write import encoder
from tests.helpers import LENGTHS, make_batch, nested, size
from tests.integrations.conftest import SECONDS, new_worker
from tests.oracle import assert_same

pytest.importorskip(
    "transfer_queue", reason="TransferQueue is not installed: pip install '.[transfer-queue]'"
)

import ray
import transfer_queue as tq
from omegaconf import OmegaConf  # which TransferQueue requires
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)
from transfer_queue import interface
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage import simple_storage
from transfer_queue.storage.bootstrap import StorageBootstrapProvider, simple_storage_bootstrap
from transfer_queue.storage.managers import simple_storage_manager as managers
from transfer_queue.storage.managers.base import StorageManagerFactory
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from jagcodec.integrations import (
    _transfer_queue_columns,
    _transfer_queue_messages,
    _transfer_queue_storage,
    _transfer_queue_version,
)
from jagcodec.integrations import transfer_queue as backend
from jagcodec.integrations._transfer_queue_columns import field_schema
from jagcodec.integrations._transfer_queue_messages import (
    MESSAGE,
    StorageOptions,
    body_of,
    storage_options,
)
from jagcodec.integrations._transfer_queue_storage import RowStorage

pytestmark = pytest.mark.cluster

STOCK = "stock"
Stock = managers.AsyncSimpleStorageManager
START = simple_storage_bootstrap.initialize_simple_storage
CAN_SAVE = hasattr(tq, "save_checkpoint")  # from 0.1.10 on
PARTS = (
    _transfer_queue_columns,
    _transfer_queue_messages,
    _transfer_queue_storage,
    _transfer_queue_version,
)


def imported_again(monkeypatch):
    """The names of the backend after a second import of it and of its parts.

    After the test, the parts are again those of the first import.
    """
    for part in PARTS:
        monkeypatch.setattr(jagcodec.integrations, part.__name__.rpartition(".")[2], part)
        monkeypatch.delitem(sys.modules, part.__name__)
    return runpy.run_path(backend.__file__, run_name=backend.__name__)


@pytest.fixture(scope="module")
def use(cluster):
    """Starts a queue of two storage units, unless it runs, and ends the one before.

    No process but this one imports the backend by itself; `STOCK` is a queue without it.
    """
    running = set()

    def use(name, **options):
        if name in running:
            return
        running.clear()
        tq.close()
        for name_of_group, group in placement_group_table().items():
            if group["state"] != "REMOVED":  # 0.1.9 keeps those of a queue that was closed
                identity = PlacementGroupID(bytes.fromhex(name_of_group))
                remove_placement_group(PlacementGroup(identity))
        with pytest.MonkeyPatch.context() as patch:
            if name == STOCK:
                patch.setitem(StorageManagerFactory._registry, "SimpleStorage", Stock)
                patch.setitem(StorageBootstrapProvider._providers, "simplestorage", START)
            tq.init(OmegaConf.create({"backend": {"SimpleStorage": options}}))
        assert backend.installed() is (name != STOCK)
        assert len(units()) == 2
        running.add(name)

    yield use
    tq.close()


@pytest.fixture(scope="module")
def of_stock(use, tmp_path_factory):
    """What a queue without the backend returns; its checkpoint; what a client with it is told."""

    @ray.remote(num_cpus=0, **new_worker("late"))
    def late(batch):
        import transfer_queue

        import jagcodec.integrations.transfer_queue  # noqa: F401

        transfer_queue.init()
        transfer_queue.kv_put(key="b", partition_id="p", tag={"control": "is stock's"})
        try:
            transfer_queue.kv_batch_put(keys=["a"], partition_id="p", fields=batch)
        except Exception as error:
            return f"{type(error).__name__} {error}"

    folder = tmp_path_factory.mktemp("stock") / "saved"
    use(STOCK)
    put_columns()
    found = all_columns()
    if CAN_SAVE:
        tq.save_checkpoint(folder)
    batch = TensorDict({"x": torch.ones(1)}, [1])
    error = ray.get(late.remote(batch), timeout=SECONDS)
    assert rows_of(get(put(batch, "after"), "after")["x"]) == [1.0]
    return found, folder, error


@pytest.fixture
def queue(use):
    use("default")


def put(batch, name, **options):
    keys = [f"{name}_{i}" for i in range(len(batch))]
    tq.kv_batch_put(keys=keys, partition_id=name, fields=batch, **options)
    return keys


def get(keys, name, **options):
    return tq.kv_batch_get(keys=keys, partition_id=name, **options)


def in_client(coroutine):
    """What a coroutine of the client returns: in its own loop, which it has from 0.1.10 on."""
    run = getattr(interface._TQ_CLIENT, "_run_coroutine", asyncio.run)
    return run(coroutine)


def units():
    return [*interface._TQ_STORAGE["SimpleStorage"].values()]


def on_units(work):
    """What a function returns for each storage unit, in its process."""
    return ray.get([unit.__ray_call__.remote(work) for unit in units()], timeout=SECONDS)


def active(unit):
    return unit.storage_data.active_key_count


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


def assert_rows(found, rows):
    """The rows of `make_batch`, by their numbers."""
    batch = make_batch()
    expected = jagcodec.to_rows(batch, as_="list")
    assert jagcodec.to_rows(found, as_="list") == [expected[i] for i in rows]
    for name in ("ids", "logprobs", "experts", "embedding", "reward"):
        assert found[name].dtype == batch[name].dtype


# With one item for each of six rows.
PAYLOADS: list[Any] = [
    [{"id": i, "text": f"row {i}"} for i in range(6)],
    *(torch.arange(6), torch.arange(12).view(6, 2), nested([range(n) for n in LENGTHS])),
    *(np.arange(6), np.array(list("abcdef"))),
    np.array([{"a": [i, [2]]} for i in range(6)], dtype=object),
]
NS = [3, 1, 4, 2, 5, 1]
STRIDED = [torch.ones(n, n + 1) for n in NS]
COLUMNS: dict[str, Any] = {
    "jagged": nested([range(n) for n in NS]),
    "inner": nested([torch.ones(n, 2) * n for n in NS]),
    "ragged 2": nested([torch.ones(2, n) * n for n in NS]),
    "no cells": nested([torch.ones(n, 0) for n in NS]),
    "strided": torch.nested.as_nested_tensor(STRIDED, layout=torch.strided),
    "empty rows": torch.ones(6, 0),
    "flat": torch.arange(6.0),
    "flags": torch.tensor([True, False] * 3),
    "rectangle": torch.arange(18).view(6, 3),
    "cube": torch.arange(36.0).view(6, 3, 2).to(torch.bfloat16),
    "strings": NonTensorStack(*"abcdef"),
    "dicts": NonTensorStack(*[{"a": [n, None, 2.5], "b": {"c": "x"}} for n in NS]),
    "tensors in dicts": NonTensorStack(*[{"x": torch.arange(n)} for n in NS]),
    "None": NonTensorStack(*[None] * 6),
    **{f"payload {i}": NonTensorData(x, batch_size=[6]) for i, x in enumerate(PAYLOADS)},
}


def dtype_of(row):
    return torch.int32 if row < 4 else torch.int64


def put_columns():
    """All of them at once, and row by row, with columns whose rows differ."""
    keys = put(TensorDict(COLUMNS, [6]), "columns")
    for i, key in enumerate(keys):
        odd = {
            "dtype": torch.ones(1, 2, dtype=dtype_of(i)),
            "rank": torch.ones(1, 2) if i < 3 else torch.ones(1, 2, 2),
            "inner dims": torch.ones(1, 2, 1 + i),
            "two dims": torch.ones(1, 2 + i, 1 + i),
            "None or tensor": torch.ones(1, 2) if i < 3 else NonTensorStack(None),
            "scalar or row": torch.ones(1) if i < 3 else torch.ones(1, 2),
            "one each": torch.arange(i + 1)[None],
        }
        for name in ("flat", "flags", "rectangle", "cube", "empty rows"):
            odd[name] = COLUMNS[name][i : i + 1]
        for name in ("dicts", "None"):
            odd[name] = NonTensorStack(COLUMNS[name].tolist()[i])
        tq.kv_batch_put(keys=[key], partition_id="rows", fields=TensorDict(odd, [1]))


def all_columns():
    """Every column by put and order, of one storage unit and of two; a tensor with its layout."""
    found = {}
    for name in ("columns", "rows"):
        for order in ([5, 0, 3, 1, 4, 2], [0, 1, 2], [4, 2], [1]):
            td = get([f"columns_{i}" for i in order], name)
            for column in sorted(td.keys()):
                found[f"{name} {order} {column}"] = with_layout(td.get(column))
    assert len(found) == 4 * (len(COLUMNS) + 14)
    return found


def with_layout(column):
    return column, str(getattr(column, "layout", None))


def with_each_dtype(columns):
    """The same columns, but rows of several dtypes are not cast to the first one's."""
    each = {
        f"rows {order} dtype": [torch.ones(2, dtype=dtype_of(i)) for i in order]
        for order in ([5, 0, 3, 1, 4, 2], [4, 2])
    }
    return columns | {name: with_layout(NonTensorStack(*rows)) for name, rows in each.items()}


class TestQueue:
    def test_a_reader_gets_what_stock_returns(self, of_stock, queue):
        """Values, types, dtypes and layouts of every kind of column; and known ragged dims."""
        expected, _, of_a_client_with_it = of_stock
        rows = [torch.ones(2, NS[1], dtype=torch.int64)]
        known = jagcodec.stack_or_nest(rows, always_nest=True, ragged_dim=2)
        expected = with_each_dtype(expected) | {"columns [1] ragged 2": with_layout(known)}
        put_columns()
        assert_same(all_columns(), expected)
        assert of_a_client_with_it.startswith("TransportError storage unit TQ_STORAGE_UNIT_")
        remedy = "import jagcodec.integrations.transfer_queue before transfer_queue.init"
        assert remedy in of_a_client_with_it

    @pytest.mark.skipif(not CAN_SAVE, reason="this TransferQueue saves nothing")
    def test_checkpoints_are_stock_s_in_both_directions(self, of_stock, use, tmp_path):
        def load(folder, expected):
            put(TensorDict({"flat": torch.zeros(6)}, [6]), "columns")
            tq.load_checkpoint(folder)
            assert_same(all_columns(), expected)

        of_queue, of_theirs, _ = of_stock
        use("default")
        load(of_theirs, with_each_dtype(of_queue))
        load(of_theirs, with_each_dtype(of_queue))
        tq.save_checkpoint(tmp_path / "ours")
        load(tmp_path / "ours", with_each_dtype(of_queue))
        use(STOCK)
        load(tmp_path / "ours", of_queue)

    def test_columns_come_back_in_the_order_of_the_keys(self, queue):
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

    def test_a_payload_without_an_item_for_each_row_is_of_the_whole_batch(self, queue):
        """TransferQueue itself fails, or deals out the letters of a text."""
        payloads: list[Any] = [["a", "b"], ("a",) * 6, "abcdef", b"abcdef", {"stop": (1, (2,))}]
        payloads += [torch.arange(5), np.arange(2)]
        columns = {str(i): NonTensorData(x, batch_size=[6]) for i, x in enumerate(payloads)}
        keys = put(TensorDict(columns, [6]), "payloads")
        found = get([keys[i] for i in (4, 0, 3)], "payloads")
        for i, payload in enumerate(payloads):
            column = found.get(str(i))
            rows = [*column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()
            assert_same(rows, [payload] * 3)

    def test_rows_that_are_added_and_written_over(self, queue):
        keys = put(make_batch(), "later")
        value = nested([[1] * n for n in LENGTHS])
        grad = torch.ones(6, 3, requires_grad=True)
        put(TensorDict({"value": value, "grad": grad}, [6]), "later")
        changed = TensorDict({"reward": torch.tensor([8.0, 9.0])}, [2])
        tq.kv_batch_put(keys=keys[2:4], partition_id="later", fields=changed)
        one = {"ids": torch.arange(4), "tag": "other"}
        tq.kv_put(key=keys[0], partition_id="later", fields=one, tag={"score": 0.5})
        found = get(keys, "later")
        assert rows_of(found["value"]) == rows_of(value)
        assert found["reward"].tolist() == [0.0, 1.0, 8.0, 9.0, 4.0, 5.0]
        assert rows_of(found["grad"]) == [[1.0] * 3] * 6
        assert not found["grad"].requires_grad
        assert rows_of(get(keys[0], "later")["ids"]) == [[0, 1, 2, 3]]
        assert found.get("tag").tolist() == ["other", *["gsm8k"] * 5]
        assert tq.kv_list(partition_id="later")["later"][keys[0]] == {"score": 0.5}

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

    def test_memory_of_a_put_is_freed_when_its_last_row_is_cleared(self, queue):
        def puts(unit):
            import gc

            gc.collect()
            return [type(item).__name__ for item in gc.get_objects()].count("WireBatch")

        before = on_units(puts)
        keys = put(TensorDict({"x": torch.ones(6, 3)}, [6]), "memory")
        metrics = on_units(lambda unit: unit._handle_get_metrics().body["active_keys"])
        assert metrics == on_units(active)
        assert sum(metrics) >= 6
        tq.kv_clear(keys=keys[:4], partition_id="memory")
        assert on_units(puts) == [count + 1 for count in before]
        tq.kv_clear(keys=keys[4:], partition_id="memory")
        assert on_units(puts) == before

    def test_stock_s_and_another_version_s_requests_are_errors_and_the_queue_lives(
        self, queue, monkeypatch
    ):
        manager = interface._TQ_CLIENT.storage_manager
        unit = next(iter(manager.storage_unit_infos))
        put_rows, get_rows = Stock._put_to_single_storage_unit, Stock._get_from_single_storage_unit
        for request, what in ((put_rows, {"x": [torch.ones(1)]}), (get_rows, ["x"])):
            with pytest.raises(RuntimeError, match="found TransferQueue's own format; install"):
                in_client(request(manager, [1], what, target_storage_unit=unit))
        for module in (backend, _transfer_queue_messages):
            monkeypatch.setattr(module, "MESSAGE", "jagcodec 9.9")
        expected = r"expected a message of jagcodec 0.*found jagcodec 9\.9"
        with pytest.raises(RuntimeError, match=expected):
            put(make_batch(), "other")
        monkeypatch.undo()
        assert_rows(get(put(make_batch(), "lives"), "lives"), range(6))


def test_options_reach_every_process_and_a_unit_that_dies_is_an_error(use, monkeypatch, caplog):
    """And no hang."""
    for name, value in (("SEND_RECV_TIMEOUT", 5), ("MAX_ATTEMPTS", 1), ("PROBE_TIMEOUT", 2)):
        monkeypatch.setattr(managers, f"TQ_SIMPLE_STORAGE_{name}", value, raising=False)
    caplog.set_level(logging.INFO, backend._logger.name)

    @ray.remote(num_cpus=0, **new_worker("worker"))
    def worker(fitting, wide):
        import transfer_queue

        transfer_queue.init()
        transfer_queue.kv_batch_put(keys=["a", "b"], partition_id="p", fields=fitting)
        found = transfer_queue.kv_batch_get(keys=["b", "a"], partition_id="p")
        from jagcodec.integrations.transfer_queue import installed

        assert installed()
        try:
            transfer_queue.kv_batch_put(keys=["c"], partition_id="p", fields=wide)
        except Exception as error:
            return str(error), [len(row) for row in found["ids"].unbind()]

    paths = NonTensorStack(PurePosixPath("/a"), PurePosixPath("/b"))
    fitting = {"ids": nested([range(300), range(200)]), "path": paths}
    wide = {"x": torch.ones(1, 800)}  # 3,200 bytes even if narrow
    options = {"allow_pickle": True, "narrow": True, "limits": {"bytes": 3000}}
    use("chosen", jagcodec=options, total_storage_size=4)
    assert f"{MESSAGE} runs the storage units: " in caplog.text
    said = worker.remote(TensorDict(fitting, [2]), TensorDict(wide, [1]))
    error, lengths = ray.get(said, timeout=SECONDS)
    assert "at most 3000 bytes" in error
    assert lengths == [200, 300]
    found = get(["a", "b"], "p")
    assert found.get("path").tolist() == paths.tolist()
    assert [len(row) for row in found["ids"].unbind()] == [300, 200]
    with pytest.raises(RuntimeError, match="Storage capacity exceeded"):
        put(TensorDict({"x": torch.ones(8)}, [8]), "more")
    if tq.__version__ == "0.1.9":
        return  # which never stops to wait for a unit that died: it closes sockets with linger=-1
    ray.kill(units()[0])
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
        for _ in range(100):
            get(["a", "b"], "p")
    assert type(caught.value).__name__ in ("StorageUnitTimeout", "RuntimeError")


@pytest.fixture
def counted(monkeypatch):
    """Bytes of the messages that this client sends and receives, as its sockets have them."""
    sizes = {"sent": 0, "received": 0}
    serialize, deserialize = ZMQMessage.serialize, ZMQMessage.deserialize

    def counting_serialize(message):
        frames = serialize(message)
        sizes["sent"] += size(frames)
        return frames

    def counting_deserialize(frames):
        sizes["received"] += size(frames)
        return deserialize(frames)

    monkeypatch.setattr(ZMQMessage, "serialize", counting_serialize)
    monkeypatch.setattr(ZMQMessage, "deserialize", counting_deserialize)

    def since():
        found = dict(sizes)
        sizes.update(sent=0, received=0)
        return found

    return since


@pytest.mark.parametrize("asked", ["by option", "by variable", "by one client"])
def test_images_of_a_prompt_cross_between_processes_once(use, counted, monkeypatch, asked):
    """Once for each of the two units, which deal the eight rows of each image."""

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"JAGCODEC_ENCODE": "elide"}})
    def other_client(batch):
        import transfer_queue

        transfer_queue.init()
        keys = [f"images_{i}" for i in range(len(batch))]
        transfer_queue.kv_batch_put(keys=keys, partition_id="images", fields=batch)
        return keys

    images = [torch.arange(20_000) + i for i in range(2)]
    rows = [images[i // 8] for i in range(16)]
    payloads = NonTensorStack(*({"pixels": row.clone()} for row in rows))
    batch = TensorDict({"ids": nested(rows), "mm": payloads}, [16])
    each = 2 * images[0].nbytes  # of an image, in two columns
    if asked == "by variable":
        monkeypatch.setenv("JAGCODEC_ENCODE", "elide")
    use(asked, **({"jagcodec": {"elide": True}} if asked == "by option" else {}))
    counted()
    if asked == "by one client":
        keys = ray.get(other_client.remote(batch), timeout=SECONDS)
    else:
        keys = put(batch, "images")
        assert 4 < counted()["sent"] / each < 4.5
    for order in (range(16), [*range(15, -1, -1)], [0, 9, 2, 11, 1, 8, 3, 10]):
        counted()
        found = get([keys[i] for i in order], "images")
        assert 4 < counted()["received"] / each < 4.5
        assert_same([*found["ids"].unbind()], [rows[i] for i in order])
        assert_same([row["pixels"] for row in found["mm"].tolist()], [rows[i] for i in order])
    if asked != "by one client":  # rows that came apart are one answer, in which they repeat
        for i in range(16):
            tq.kv_batch_put(keys=[f"{i}"], partition_id="apart", fields=batch[i : i + 1])
        assert 16 < counted()["sent"] / each < 16.5
        assert_same([*get([*map(str, range(16))], "apart")["ids"].unbind()], rows)
        assert 4 < counted()["received"] / each < 4.5


def test_every_process_has_the_version_that_make_was_asked_for(cluster):
    @ray.remote(num_cpus=0)
    def version():
        import transfer_queue

        return transfer_queue.__version__

    asked = os.environ.get("JAGCODEC_TRANSFERQUEUE", tq.__version__)
    assert [tq.__version__, ray.get(version.remote(), timeout=SECONDS)] == [asked, asked]


@pytest.mark.parametrize("actor", [simple_storage.SimpleStorageUnit, TransferQueueController])
def test_a_process_without_jagcodec_is_named(use, monkeypatch, tmp_path, actor):
    """Storage units, or the controller, in an environment where jagcodec is missing."""
    package = tmp_path / "jagcodec"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'jagcodec'\", name='jagcodec')"
    )
    variables = {"PYTHONPATH": str(tmp_path), WORKER_PROCESS_SETUP_HOOK_ENV_VAR: "gc.collect"}
    options = actor.options  # as NeMo-RL sets an environment for the actors of TransferQueue
    environment = {"runtime_env": {"env_vars": variables}}
    monkeypatch.setattr(actor, "options", lambda **given: options(**given, **environment))
    with pytest.raises(TransportError, match=r"^node (?!unknown)") as caught:
        use("without it")
    assert "found no module named 'jagcodec'" in caught.value.detail
    assert "install this version of jagcodec there" in caught.value.detail


@pytest.mark.parametrize("place", ["ip=192.0.2.2, pid=7", "ip: 192.0.2.2\npid: 7"])
def test_the_node_without_jagcodec_is_read_from_both_texts_of_ray(place):
    error = backend._not_importable(RuntimeError(f"No module named 'jagcodec' ({place})"))
    assert isinstance(error, TransportError)
    assert error.path == "node 192.0.2.2"


def test_what_the_start_of_storage_units_refuses():
    for given, error, text in (
        ({"jagcodec": {"pickle": True}}, ArgumentKeyError, "jagcodec: expected one of allow_p"),
        ({"jagcodec": {"narrow": 1}}, ArgumentTypeError, "jagcodec.narrow: expected true or"),
        ({"jagcodec": {"elide": None}}, ArgumentTypeError, "jagcodec.elide: expected true or"),
        ({"jagcodec": {"limits": {"byte": 1}}}, ArgumentKeyError, "jagcodec.limits: expected"),
        ({"jagcodec": {"limits": 7}}, ArgumentTypeError, "jagcodec.limits: expected a map"),
        ({"jagcodec": [1]}, ArgumentTypeError, "jagcodec: expected a mapping"),
        ({"jagcodec": {"limits": {"bytes": -1}}}, ArgumentError, ""),
        ({"ssd_offload": {"enabled": True}}, ArgumentError, "ssd_offload.enabled: expected f"),
    ):
        with pytest.raises(error) as caught:
            backend.start_units(OmegaConf.create({"backend": {"SimpleStorage": given}}))
        assert str(caught.value).startswith(f"backend.SimpleStorage.{text}" if text else "Limits")


def test_options_that_a_configuration_leaves_out_are_those_of_the_variable(monkeypatch):
    for words, given, expected in (
        ("", {}, (False, False)),
        (" ", {"elide": True}, (True, False)),
        ("elide", {}, (True, False)),
        ("narrow, elide", {"elide": False}, (False, True)),
        ("narrow", {"allow_pickle": True}, (False, True)),
    ):
        monkeypatch.setenv("JAGCODEC_ENCODE", words)
        found = storage_options({"jagcodec": given})
        assert (found.elide, found.narrow) == expected
    monkeypatch.setenv("JAGCODEC_ENCODE", "elide,zstd")
    with pytest.raises(ArgumentError, match=r"JAGCODEC_ENCODE: expected elide.*found 'zstd'"):
        backend.start_units(OmegaConf.create({"backend": {"SimpleStorage": {}}}))


class TestStorage:
    """A storage unit's rows, without a queue around them."""

    @pytest.fixture
    def storage(self):
        return RowStorage(None, StorageOptions())

    @staticmethod
    def body(**columns):
        rows = len(next(iter(columns.values())))
        return body_of(StorageOptions().encode(Columns(rows, columns)))

    @staticmethod
    def got(storage, names, rows):
        """The frames of a reply, and the batch in them."""
        frames = storage.get_data({MESSAGE: names}, rows)[MESSAGE]
        return frames, jagcodec.open_wire(frames)

    def test_what_is_refused_is_not_stored(self, storage):
        body = self.body(x=torch.ones(2, 3))
        with pytest.raises(WireFormatError, match="expected 3 rows, found 2"):
            storage.put_data(body, [0, 1, 2])
        body[MESSAGE][0] = body[MESSAGE][0][:-1]
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

    def test_a_column_that_came_in_one_put_is_not_kept_twice(self, storage, monkeypatch):
        rows, encoded = list(range(8)), []

        def encode(columns, **options):
            encoded.append(list(columns.columns))
            return encoder.encode(columns, **options)

        storage.put_data(self.body(image=torch.rand(8, 3000)), rows)
        for i in rows:
            storage.put_data(self.body(x=torch.full((1,), i), ids=torch.full((1, 3000), i)), [i])
        monkeypatch.setattr(_transfer_queue_messages, "encode", encode)
        # A message of the joined columns alone is made only for a reply that has others.
        for names, number, messages in (
            (["image", "x"], 3, [["image", "x"], ["x"]]),
            (["ids"], 6, [["ids"]]),
            (["ids", "x"], 7, [["ids", "x"]]),
            (["image", "x", "ids"], 8, [["image", "x", "ids"]]),
        ):
            batch = self.got(storage, names, rows[:number])[1]
            assert encoded == messages
            encoded.clear()
            assert set(batch.fields) == set(names)
            if "x" in names:
                assert batch["x"].tolist() == rows[:number]
            if "ids" in names:
                assert [row[0].item() for row in batch["ids"].unbind()] == rows[:number]
        held = {row.batch for column in storage.field_data.values() for row in column.values()}
        assert sum("image" in batch.fields for batch in held) == 1

    @pytest.mark.parametrize("body", [{"x": [1]}, ["x"], {}, None, {"jagcodec 9.9": 1}, {1: 2}])
    def test_a_request_of_another_kind(self, storage, body):
        for request in (storage.put_data, storage.get_data):
            with pytest.raises(TransportError, match=f"expected a message of {MESSAGE}"):
                request(body, [0])


def test_the_schema_is_what_transfer_queue_extracts_from_rows():
    batch = make_batch().exclude("tag")
    batch["positions"] = torch.nested.nested_tensor_from_jagged(
        torch.arange(30).view(2, 15), torch.tensor([0, 3, 4, 9, 9, 11, 15]), jagged_dim=2
    )
    batch["strided"] = COLUMNS["strided"]
    found, stock = field_schema(batch), extract_field_schema(batch)
    assert found == stock
    assert list(found) == list(stock)
    for name, field in found.items():
        assert {k: type(v) for k, v in field.items()} == {
            k: type(v) for k, v in stock[name].items()
        }


def test_nothing_of_transfer_queue_is_replaced_but_two_entries_of_its_registries(monkeypatch):
    def names():
        found = {}
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "transfer_queue"]:
            owners: list[Any] = [module, *filter(inspect.isclass, vars(module).values())]
            for of in owners:
                found |= {(of.__name__, name): id(x) for name, x in vars(of).items()}
        return found

    registries = StorageManagerFactory._registry, StorageBootstrapProvider._providers
    expected = ["SimpleStorage"], ["simplestorage"]
    for registry, (name,) in zip(registries, expected, strict=True):
        monkeypatch.setitem(registry, name, registry[name])  # put back after the test
    before, registered = names(), [dict(registry) for registry in registries]
    imported_again(monkeypatch)
    assert before == names()
    for old, new, changed in zip(registered, registries, expected, strict=True):
        assert [name for name in new if new[name] is not old.get(name)] == changed


def taken():
    """Each name that the backend takes from TransferQueue, and the module or class that has it."""
    files = [str(module.__file__) for module in (backend, *PARTS)]
    nodes = [node for file in files for node in ast.walk(ast.parse(Path(file).read_text()))]
    homes = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transfer_queue"):
            homes |= {alias.name: sys.modules[str(node.module)] for alias in node.names}
    yield from ((module, name) for name, module in homes.items())
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in homes:
            name = ast.unparse(node.value)
            yield getattr(homes[name], name), node.attr
    unit = simple_storage.SimpleStorageUnit
    yield from ((unit, "__ray_metadata__"), (unit.__ray_metadata__, "modified_class"))
    yield from ((simple_storage_bootstrap, START.__name__), (START, "__wrapped__"))
    for owner, names in _transfer_queue_version._NAMES_USED.items():
        yield from ((owner, name) for name in names.split())


@pytest.mark.parametrize(("owner", "name"), dict.fromkeys(taken()))
def test_another_version_of_transfer_queue_is_named(monkeypatch, owner, name):
    """Whatever is missing of what the backend takes, an import says so."""
    monkeypatch.setattr(tq, "__version__", "9.9")
    if isinstance(owner, enum.EnumMeta):  # whose members cannot be deleted
        others = {kind.name: kind for kind in owner if kind.name != name}
        stand_in = type(owner.__name__, (), others)
        monkeypatch.setattr(sys.modules[owner.__module__], owner.__name__, stand_in)
    if inspect.ismodule(getattr(owner, name, None)):
        monkeypatch.setitem(sys.modules, f"{owner.__name__}.{name}", None)
    for cls in getattr(owner, "__mro__", [owner]):
        if name in vars(cls) and not isinstance(owner, enum.EnumMeta):
            monkeypatch.delattr(cls, name)
        for key, method in [*vars(cls).items()] if inspect.isclass(cls) else ():
            if inspect.isfunction(method) and name in method.__code__.co_names:
                monkeypatch.delattr(cls, key)  # which sets it on an instance, or reads it
    with pytest.raises(ImportError, match=rf"\b{name}\b.*found version 9\.9"):
        imported_again(monkeypatch)


class LaterUnit:
    """A storage unit of the versions after 0.1.11, whose requests a `PayloadTransfer` answers."""

    def __init__(self, transfer):
        self.storage_unit_id, self.storage_unit_size, self.storage_data = "unit", None, None
        self.payload_transfer = transfer

    def get_zmq_server_info(self): ...
    def _handle_save_checkpoint(self, request): ...
    def _handle_load_checkpoint(self, request): ...


@pytest.fixture
def later(monkeypatch):
    """The names of this module, imported beside a TransferQueue of such a version."""

    def names(*methods):
        package = "transfer_queue.storage.payload_transfer"
        for name in (package, f"{package}.base"):
            module: Any = types.ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            abstract = {method: abstractmethod(lambda *_, **__: None) for method in methods}
            module.PayloadTransfer = ABCMeta("PayloadTransfer", (), abstract)
            monkeypatch.setitem(sys.modules, name, module)
        for registry in StorageManagerFactory._registry, StorageBootstrapProvider._providers:
            for name, entry in registry.items():
                monkeypatch.setitem(registry, name, entry)  # put back after the test
        stock = simple_storage.SimpleStorageUnit.__ray_metadata__
        monkeypatch.setattr(stock, "modified_class", LaterUnit)
        return imported_again(monkeypatch)

    return names


def test_a_payload_transfer_of_later_versions_moves_the_same_messages(later):
    names = later("put", "get", "handle_request")
    theirs = mock.Mock()
    handle_request = theirs.handle_request
    unit = names["_JagcodecStorageUnit"](theirs, options=StorageOptions())
    transfer, storage = unit.payload_transfer, unit.storage_data
    assert transfer is theirs  # with all that a transfer has, such as counters for the metrics
    callbacks = {"load_data": storage.get_data, "store_data": storage.store}

    def answer(kind, **body):
        request = types.SimpleNamespace(request_type=kind, body=body)
        return request, transfer.handle_request(request, storage_id="unit", **callbacks)

    kinds, rows = ZMQRequestType, [4, 7]
    body = TestStorage.body(ids=torch.tensor([[1, 2], [3, 4]]))
    _, stored = answer(kinds.PUT_DATA, global_indexes=rows, data=body)
    asked = {MESSAGE: ["ids"]}
    _, found = answer(kinds.GET_DATA, global_indexes=[7], fields=asked)
    assert (stored.request_type, stored.sender_id) == (kinds.PUT_DATA_RESPONSE, "unit")
    got = jagcodec.open_wire(found.body["data"][MESSAGE])["ids"]
    assert [row.tolist() for row in got.unbind()] == [[3, 4]]
    handle_request.assert_not_called()
    # What fails, and what is neither a put nor a get, is TransferQueue's.
    for kind in (kinds.PUT_DATA, kinds.GET_DATA, kinds.CLEAR_DATA):
        request, answered = answer(kind, global_indexes=[9], fields=asked, data=None)
        handle_request.assert_called_with(request, storage_id="unit", **callbacks)
        assert answered is handle_request.return_value


def test_a_payload_transfer_that_answers_no_requests_is_named(later):
    with pytest.raises(ImportError, match=r"with PayloadTransfer\.handle_request, found version"):
        later("put", "get")
