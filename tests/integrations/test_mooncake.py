"""Batches in a real Mooncake store: its master, clients and nodes, on the loopback."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    encode_fields,
    materialize,
    open_wire,
    to_blob,
)
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError, TransportError
from jagcodec.testing import jagged_batches
from tests.oracle import assert_same, bits, rows_of

# An ImportError names the library of the system that is not there.
mooncake = pytest.importorskip("mooncake.store", exc_type=ImportError)

import jagcodec  # noqa: E402
from benchmarks.mooncake_cluster import master, node  # noqa: E402
from jagcodec.integrations.mooncake import Store  # noqa: E402
from tests.helpers import LENGTHS, PAYLOADS, ROOT, make_batch  # noqa: E402

SOURCE = str(Path(jagcodec.__file__).parents[1])
PATHS = os.pathsep.join([str(ROOT), SOURCE, os.environ.get("PYTHONPATH", "")])
MIB = 1 << 20


class Client(mooncake.MooncakeDistributedStore):  # type: ignore[name-defined]
    """Remembers what it was asked to read and to register."""

    def __init__(self):
        super().__init__()
        self.ranges = []
        self.registered = {}

    def get_into_ranges(self, pointers, keys, places, offsets, sizes):
        self.ranges += zip(offsets[0][0], sizes[0][0], strict=True)
        return super().get_into_ranges(pointers, keys, places, offsets, sizes)

    def register_buffer(self, address, size):
        self.registered[address] = size
        return super().register_buffer(address, size)

    def unregister_buffer(self, address):
        del self.registered[address]
        return super().unregister_buffer(address)


pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def running():
    with master() as started:
        yield started


@pytest.fixture(scope="module")
def client(running):
    client = running.client(segment=64 * MIB, kind=Client)
    yield client
    client.close()


@pytest.fixture
def store(client):
    client.ranges.clear()
    with Store(client) as store:
        yield store
    client.remove_all(True)


@pytest.fixture(scope="module")
def shared(client):
    """A store that many examples of one test use."""
    with Store(client) as store:
        yield store


def run(code, *arguments, seconds=120, **environment):
    """A process of its own; what it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": PATHS, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class TestValues:
    @pytest.mark.parametrize("cells_per_token", [1, 20_000], ids=["small", "large"])
    def test_a_tensordict_comes_back(self, store, client, cells_per_token):
        batch = make_batch(cells_per_token)
        size = store.put("a", batch)
        assert size == len(to_blob(encode(batch))) == client.get_size("a")
        found = store.get("a")
        assert_same(found, batch)
        assert rows_of(found["ids"].sum(-1) if cells_per_token > 1 else found["ids"])
        assert found["ids"].offsets() is found["logprobs"].offsets()
        assert_same(decode(store.read("a")), batch)
        assert_same(store.open("a").to_tensordict(), batch)

    def test_whatever_can_be_encoded(self, store):
        values = [
            {"step": 3, "rows": (1, [2.5, None])},
            BatchedDataDict(a=torch.arange(4), b=[None, "x", {}, (1,)]),
            torch.arange(10).to(torch.bfloat16),
            b"",
            None,
        ]
        for i, value in enumerate(values):
            store.put(f"v{i}", value)
        for i, value in enumerate(values):
            found = store.get(f"v{i}")
            assert type(found) is type(value)
            assert_same(found, value)

    def test_a_wire_batch_of_a_store_goes_into_a_store(self, store):
        batch = make_batch()
        store.put("a", batch)
        store.put("whole", open_wire(store.read("a")))
        assert bytes(store.read("whole")) == bytes(store.read("a"))
        part = store.open("a").rows([4, 2]).select(["ids", "message"])
        with pytest.raises(ArgumentError, match=r"found narrow; put its to_tensordict"):
            store.put("b", part, narrow=True)
        store.put("b", part)
        found = store.get("b")
        assert found.batch_size == (2,)
        expected = rows_of(batch["ids"])
        assert rows_of(found["ids"]) == [expected[4], expected[2]]
        assert found.get("message").tolist() == [PAYLOADS[4], PAYLOADS[2]]

    @settings(max_examples=40)
    @given(jagged_batches(), st.integers(0, 9), st.sampled_from([0, 100, 1 << 18]), st.data())
    def test_fields_in_rectangles_and_parts_out(self, shared, batch, wider, read_ahead, data):
        store = shared
        named = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
        size = store.put_fields("p", batch.fields, **named, replace=True)
        frames = encode_fields(batch.fields, **named)
        assert bytes(store.read("p")) == to_blob(frames)
        assert size == len(to_blob(frames))
        width = max([wider, *batch.lengths.tolist()])
        assert_same(
            dict(materialize(open_wire(store.read("p")), pad_to_seqlen=width)),
            dict(materialize(decode(frames), pad_to_seqlen=width)),
        )
        names = data.draw(st.lists(st.sampled_from(sorted(batch.fields) or [""]), unique=True))
        names = [name for name in names if name]
        rows = len(batch.lengths)
        index = data.draw(st.lists(st.integers(0, rows - 1), max_size=6) if rows else st.just([]))
        part = store.open("p", read_ahead=read_ahead).select(names).rows(index).to_tensordict()
        whole = decode(frames)
        for name in names:
            column, found = whole.get(name), part.get(name)
            if isinstance(column, torch.Tensor):
                assert found.layout == column.layout
                cells = rows_of if column.is_nested else bits
                expected = cells(column)
                assert cells(found) == [expected[i] for i in index]
            else:
                assert_same(list(found.tolist()), [column.tolist()[i] for i in index])


class TestParts:
    def test_a_field_costs_its_own_bytes(self, store, client):
        batch = make_batch(500, lengths=[i % 50 + 1 for i in range(200)])
        size = store.put("a", batch)
        wire = store.open("a", read_ahead=0)
        client.ranges.clear()
        assert rows_of(wire.leaf("logprobs")) == rows_of(batch["logprobs"])
        tokens = int(batch["logprobs"].offsets()[-1])
        offsets = 201 * 8
        assert sorted(n for _, n in client.ranges) == sorted([tokens * 4, offsets])
        assert size > 500 * 8 * tokens

    def test_a_range_of_rows_is_one_read(self, store, client):
        batch = make_batch(500, lengths=[i % 50 + 1 for i in range(200)])
        store.put("a", batch)
        wire = store.open("a", read_ahead=0).select(["ids"]).rows(slice(50, 60))
        client.ranges.clear()
        found = wire.to_tensordict()["ids"]
        assert rows_of(found) == rows_of(batch["ids"])[50:60]
        tokens = sum(i % 50 + 1 for i in range(50, 60))
        assert [n for _, n in client.ranges] == [201 * 8, tokens * 500 * 8]

    def test_near_rows_are_read_together(self, store, client):
        batch = make_batch(10, lengths=[i % 50 + 1 for i in range(200)])
        store.put("a", batch)
        chosen = list(range(0, 200, 3))
        expected = [rows_of(batch["ids"])[i] for i in chosen]
        counts = {}
        for read_ahead in (0, 4096, 1 << 18):
            wire = store.open("a", read_ahead=read_ahead).select(["ids"]).rows(chosen)
            client.ranges.clear()
            assert rows_of(wire.leaf("ids")) == expected
            counts[read_ahead] = len(client.ranges)
        assert counts[0] == 1 + len(chosen)
        assert counts[4096] < len(chosen)
        assert counts[1 << 18] <= 2

    def test_opening_reads_the_header_once(self, store, client):
        store.put("a", make_batch(5_000))
        client.ranges.clear()
        assert store.open("a").schema["ids"].shape == (6, None, 5_000)
        assert len(client.ranges) == 1


class TestMemory:
    def test_what_get_returns_is_the_callers(self, store):
        batch = make_batch(5_000)
        store.put("a", batch)
        store.put("b", {"other": torch.full((200_000,), 7)})
        first, second = store.get("a"), store.get("a")
        opened = store.open("a").to_tensordict()
        first["ids"].values().zero_()
        opened["ids"].values().zero_()
        opened["logprobs"].values().zero_()
        store.get("b")
        assert_same(second, batch)
        assert_same(store.get("a"), batch)
        for part in (0, 1 << 18):
            wire = store.open("a", read_ahead=part)
            wire.leaf("logprobs").values().zero_()
            assert_same(wire.to_tensordict(), batch)

    def test_what_read_lends_is_kept_for_its_tensors(self, store, client):
        batch = make_batch(5_000)
        store.put("a", batch)
        ids = decode(store.read("a"))["ids"]  # a part of it is enough
        for _ in range(5):
            store.put("b", torch.full((200_000,), 7), replace=True)
            store.get("b")
        assert rows_of(ids) == rows_of(batch["ids"])
        buffers = len(client.registered)
        for _ in range(20):  # and comes back
            store.read("a")
        assert len(client.registered) <= buffers + 1

    def test_it_stays_valid_after_close(self, client):
        store = Store(client)
        batch = make_batch(5_000)
        store.put("lent", batch)
        found = decode(store.read("lent"))
        before = set(client.registered)
        store.close()
        assert set(client.registered) < before
        found["ids"].values().add_(1)
        assert rows_of(found["ids"]) == rows_of(batch["ids"] + 1)
        store.close()

    def test_a_store_that_is_let_go_of_gives_its_memory_back(self, client):
        before = set(client.registered)
        store = Store(client)
        store.put("let go", [1], replace=True)
        assert set(client.registered) > before
        del store
        gc.collect()
        assert set(client.registered) == before

    def test_no_more_than_max_bytes(self, client):
        before = sum(client.registered.values())
        with Store(client, max_bytes=4 * MIB) as store:
            store.put("a", torch.arange(100_000), replace=True)  # 1 MiB
            lent = [store.read("a") for _ in range(4)]
            with pytest.raises(ArgumentError, match="let go of what read") as caught:
                store.read("a")
            assert caught.value.reason == "too_large"
            kept = bytes(lent[2])
            del lent
            # Buffers of 1 MiB make room for one of 4.
            store.put("b", torch.arange(400_000), replace=True)
            assert sum(client.registered.values()) - before <= 4 * MIB
            assert store.get("b").tolist() == list(range(400_000))
            assert decode(kept).tolist() == list(range(100_000))
            with pytest.raises(ArgumentError, match="at most 4194304 bytes"):
                store.put("c", torch.arange(700_000))

    def test_threads(self, store):
        def work(number):
            for i in range(15):
                value = torch.full((50_000 + number,), 100 * number + i)
                store.put(f"{number}.{i}", value)
                if not torch.equal(store.get(f"{number}.{i}"), value):
                    wrong.append((number, i))
                done.append(number)

        wrong, done = [], []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert len(done) == 60


class TestKeys:
    def test_missing(self, store):
        for call in (store.get, store.read, store.open, store.remove):
            with pytest.raises(
                ArgumentKeyError, match=r"'nothing'.*removed, .* or never put"
            ) as caught:
                call("nothing")
            assert caught.value.reason == "no_such_key"

    def test_taken(self, store):
        store.put("a", [1])
        with pytest.raises(ArgumentError, match="pass replace=True") as caught:
            store.put("a", [2])
        assert caught.value.reason == "conflict"
        assert store.get("a") == [1]

    @pytest.mark.parametrize("value", [[2], "x" * 3_000_000, torch.arange(300_000)])
    def test_replaced(self, store, value):
        store.put("a", torch.arange(100_000))
        store.put("a", value, replace=True)
        assert_same(store.get("a"), value)

    def test_removed(self, store):
        store.put("a", [1])
        store.get("a")
        with pytest.raises(TransportError, match="force=True") as caught:
            store.remove("a")  # it was read a moment ago
        assert caught.value.reason == "busy"
        store.remove("a", force=True)
        with pytest.raises(ArgumentKeyError):
            store.get("a")
        store.put("a", [2])
        assert store.get("a") == [2]

    @pytest.mark.parametrize("key", ["a/b:c", "Zürich 東京", "x" * 3000])
    def test_any_string_will_do(self, store, key):
        store.put(key, key)
        assert store.get(key) == key

    def test_none_at_all(self, store):
        with pytest.raises(ArgumentError, match="empty"):
            store.put("", 1)
        with pytest.raises(ArgumentTypeError, match="a string as the key, found int"):
            store.get(7)


class TestFaults:
    def test_what_cannot_be_encoded_leaves_nothing(self, store):
        with pytest.raises(UnsupportedTypeError, match=r"\$\.lock"):
            store.put("a", {"lock": threading.Lock()})
        with pytest.raises(ArgumentError):
            store.put_fields("a", {"ids": torch.ones(2, 3)}, lengths=torch.tensor([-1, 1]))
        store.put("a", 1)

    def test_no_room(self, store):
        with pytest.raises(TransportError, match="expected room in the store") as caught:
            store.put("a", torch.zeros(70 * MIB, dtype=torch.uint8))
        assert caught.value.reason == "no_room"
        with pytest.raises(ArgumentKeyError):
            store.get("a")

    @pytest.mark.parametrize("data", [b"abc", b"hello" * 100, b"\x00" * 5000])
    def test_foreign(self, store, client, data):
        assert client.put("a", data) == 0
        for call in (store.get, store.open):
            with pytest.raises(WireFormatError) as caught:
                call("a")
            assert caught.value.reason in ("foreign", "frame_size", "bad_header")

    def test_cut(self, store, client):
        batch = make_batch(5_000)
        blob = bytes(to_blob(encode(batch)))
        for size in (10, 100, len(blob) // 2, len(blob) - 1):
            assert client.upsert("a", blob[:size]) == 0
            with pytest.raises(WireFormatError) as caught:
                store.get("a")
            assert caught.value.reason in ("frame_size", "foreign")
            for read_ahead in (0, 1 << 18):
                with pytest.raises(WireFormatError) as caught:
                    store.open("a", read_ahead=read_ahead).to_tensordict()
                assert caught.value.reason == "frame_size"
        # What lies before the cut can be read.
        assert store.open("a").leaf("reward").tolist() == batch["reward"].tolist()

    def test_damaged(self, store, client):
        store.put("a", torch.arange(10_000), checksum=True)
        blob = bytearray(store.read("a"))
        blob[-9] ^= 1
        assert client.upsert("a", bytes(blob)) == 0
        with pytest.raises(WireFormatError) as caught:
            store.get("a")
        assert caught.value.reason == "bad_checksum"

    def test_being_written(self, store, client):
        assert client.batch_put_session_start(["a"], [1000]) == [0]
        try:
            for call in (store.get, store.open):
                with pytest.raises(TransportError, match="being written; try again") as caught:
                    call("a")
                assert caught.value.reason == "busy"
        finally:
            client.batch_put_session_revoke(["a"])

    def test_gone_or_replaced_while_it_is_open(self, store):
        store.put("a", make_batch(5_000))
        wire = store.open("a")
        store.put("a", [1], replace=True)
        with pytest.raises(TransportError, match="another value was put") as caught:
            wire.leaf("ids")
        assert caught.value.reason == "busy"
        store.remove("a", force=True)
        with pytest.raises(ArgumentKeyError, match="or never put"):
            wire.leaf("ids")

    def test_clients_that_cannot_serve(self, running):
        with pytest.raises(ArgumentTypeError, match="found int"):
            Store(3)
        with pytest.raises(TransportError, match="not set up"):
            Store(mooncake.MooncakeDistributedStore())
        client = running.client(segment=0)
        with pytest.raises(ArgumentError, match="positive"):
            Store(client, max_bytes=0)
        closed, open_yet = Store(client), Store(client)
        with pytest.raises(ArgumentError, match="0 or more"):
            closed.open("a", read_ahead=-1)
        closed.close()
        with pytest.raises(TransportError, match="found it closed"):
            closed.get("a")
        client.close()
        with pytest.raises(TransportError, match="close the store before its client"):
            open_yet.put("a", 1)
        open_yet.close()


READER = """
    import json, os, sys
    from benchmarks.mooncake_cluster import Master
    from jagcodec import materialize, open_wire
    from jagcodec.integrations.mooncake import Store

    client = Master(None, *sys.argv[1:]).client(segment=0)
    with Store(client) as store:
        whole = store.get("a")
        part = store.open("a").select(["ids", "message"]).rows(slice(2, 4)).to_tensordict()
        packed = materialize(store.open("a"), layout="packed", keep_jagged=["logprobs"])
        store.put("answer", [whole["reward"].sum().item(), len(packed["ids"].values)])
        print(json.dumps([
            [row.tolist() for row in whole["ids"].unbind()],
            [row.tolist() for row in part["ids"].unbind()],
            part.get("message").tolist(),
        ]))
    client.close()
"""


def test_another_process_reads_what_this_one_put(store, running):
    batch = make_batch()
    store.put("a", batch)
    rows = [row.tolist() for row in batch["ids"].unbind()]
    assert run(READER, running.address, running.metadata) == [
        rows,
        rows[2:4],
        [PAYLOADS[2], list(PAYLOADS[3])],  # type: ignore[arg-type]
    ]
    assert store.get("answer") == [15.0, sum(LENGTHS)]


# Calls on a store of which something has died or stopped: what each raised, and after how long.
LATER = """
    import json, os, signal, sys, time
    import torch
    from benchmarks.mooncake_cluster import Master, master, node
    from jagcodec import JagcodecError, encode_fields
    from jagcodec.integrations.mooncake import Store

    def main():
        with master() as running, node(running, 1 << 26) as holder:
            client = running.client(segment=0)
            store = Store(client)
            store.put("a", torch.arange(100_000))
            store.put_fields("b", {"x": torch.ones(3, 4)}, lengths=torch.tensor([1, 4, 2]))
            wire = store.open("b", read_ahead=0)
            process = {"master": running.process, "node": holder}[sys.argv[1]]
            process.send_signal(getattr(signal, sys.argv[2]))
            found = {}
            calls = {
                "get": lambda: store.get("a"),
                "leaf": lambda: wire.leaf("x"),
                "put": lambda: store.put("c", torch.arange(100_000)),
                "remove": lambda: store.remove("b"),
            }
            for name, call in calls.items():
                start = time.monotonic()
                try:
                    call()
                    outcome = None
                except JagcodecError as error:
                    outcome = [type(error).__name__, error.reason, str(error)]
                found[name] = [outcome, time.monotonic() - start]
            print(json.dumps(found), flush=True)
            running.process.kill()
            holder.kill()
            os._exit(0)  # a client without its master takes its time to close

    main()
"""


@pytest.mark.parametrize(
    ("who", "signal", "reasons"),
    [
        ("master", "SIGKILL", {"no_peer"}),
        ("master", "SIGSTOP", {"timed_out", "no_peer"}),
        ("node", "SIGKILL", {"peer_failed"}),
        ("node", "SIGSTOP", {"peer_failed"}),
    ],
)
def test_no_call_hangs_when_one_dies(who, signal, reasons):
    limits = {"MC_RPC_TIMEOUT_MS": "2000", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}
    found = run(LATER, who, signal, seconds=110, **limits)
    # Without its node the master still answers, and has no more to do for a removal.
    for name in found if who == "master" else ("get", "leaf", "put"):
        (kind, reason, text), _ = found[name]
        assert reason in reasons, (name, found)
        assert kind in ("TransportError", "TransportTimeoutError")
        assert "Mooncake" in text
        assert f"{'open' if name == 'leaf' else name}('" in text


def test_without_mooncake_the_error_says_what_to_install():
    found = run(
        """
        import json, sys
        sys.modules["mooncake"] = None
        try:
            import jagcodec.integrations.mooncake
        except ModuleNotFoundError as error:
            print(json.dumps(str(error)))
        """
    )
    assert "pip install 'jagcodec[mooncake]'" in found


def test_without_its_libraries_the_error_names_the_missing_one(tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    found = run(
        """
        import json
        try:
            import jagcodec.integrations.mooncake
        except ImportError as error:
            print(json.dumps(str(error)))
        """,
        PYTHONPATH=os.pathsep.join([str(tmp_path), PATHS]),
    )
    assert "libibverbs.so.1" in found
    assert "apt-get install" in found


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/mooncake_put_get.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rows back" in done.stdout


def test_memory_of_a_failed_transfer_is_not_lent_again():
    """The transfer engine may still write to it, late."""
    with master() as alone, node(alone, 16 * MIB) as holder:
        client = alone.client(segment=0, kind=Client)
        with Store(client) as store:
            store.put("a", np.arange(1000))
            assert store.get("a").tolist() == list(range(1000))
            before = len(client.registered)
            holder.kill()
            holder.wait()
            for failed in (1, 2):
                with pytest.raises(TransportError, match="is gone or does not answer") as caught:
                    store.get("a")
                assert caught.value.reason == "peer_failed"
                assert len(client.registered) == max(before, failed)
        client.close()
