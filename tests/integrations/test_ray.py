"""Batches through a real Ray: this process, task arguments and results, worker processes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from jagcodec import (
    BatchedDataDict,
    WireBatch,
    encode,
    encode_rows,
    materialize,
    open_wire,
    select_rows,
    stack_or_nest,
    to_rows,
)

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from jagcodec.integrations import ray as integration  # noqa: E402
from tests.helpers import PAYLOADS, make_batch  # noqa: E402
from tests.oracle import assert_same  # noqa: E402

SECONDS = 60

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    # Workers import this library from where this process has it.
    paths = [str(Path(integration.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        runtime_env={
            "worker_process_setup_hook": "jagcodec.integrations.setup",
            "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        },
    )
    yield
    ray.shutdown()


@pytest.fixture
def registered(cluster):
    integration.register()
    yield
    integration.unregister()


def there_and_back(value):
    return ray.get(ray.put(value), timeout=SECONDS)


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


# As a message of Ray's, in the store in pieces, and in the store in one piece.
SIZES = pytest.mark.parametrize(
    "cells_per_token", [1, 20_000, 100_000], ids=["small", "in the store", "large"]
)


@SIZES
def test_a_tensordict_comes_back(registered, cells_per_token):
    batch = make_batch(cells_per_token)
    found = there_and_back(batch)
    assert_same(found, batch)
    if cells_per_token == 1:  # one raggedness, which stock pickling takes apart
        assert rows_of(found["ids"] * found["logprobs"])


@SIZES
def test_what_comes_back_may_be_written_to(registered, cells_per_token):
    reference = ray.put(make_batch(cells_per_token))
    first, second = (ray.get(reference, timeout=SECONDS) for _ in range(2))
    first["ids"].values().zero_()
    first["reward"].zero_()
    assert_same(second, make_batch(cells_per_token))


def test_ray_is_given_no_buffer_that_it_copies_slowly(registered):
    """Of more than 1 MiB it starts threads for each, which pays off from about 8 MiB on."""
    sizes = []
    for cells_per_token in (20_000, 100_000):
        batch = make_batch(cells_per_token)
        for value in (batch, open_wire(encode(batch))):
            ray.cloudpickle.dumps(
                value, protocol=5, buffer_callback=lambda buffer: sizes.append(len(buffer.raw()))
            )
    assert max(sizes) == 15 * 100_000 * 8  # in one piece
    assert not [size for size in sizes if 2**20 < size <= 2**23]


def test_a_jagged_tensor_comes_back_with_its_ragged_dim(registered):
    position_ids = torch.nested.nested_tensor_from_jagged(
        torch.arange(30).view(3, 10),
        torch.tensor([0, 4, 4, 10]),
        jagged_dim=2,
        min_seqlen=0,
        max_seqlen=6,
    )
    found = there_and_back(position_ids)
    assert found._ragged_idx == 2
    assert torch.equal(found.values(), position_ids.values())
    assert found.offsets().tolist() == [0, 4, 4, 10]
    found.values().zero_()


def test_a_batched_data_dict_comes_back(registered):
    batch = materialize(make_batch())
    batch.meta_info["step"] = 7
    found = there_and_back(batch)
    assert type(found) is BatchedDataDict
    assert found.meta_info == {"step": 7}
    assert torch.equal(found["ids"], batch["ids"])
    assert found["message"].tolist() == PAYLOADS


LENGTHS = [3, 1, 4, 2]


def samples(count=4):
    """What rollout managers collect: one item per sample, tensors and objects."""
    return [
        {
            "tokens": torch.arange(10 * i, 10 * i + LENGTHS[i]),
            "log_probs": torch.full((LENGTHS[i],), 0.5 * i),
            "reward": float(i),
            "message": {"row": i},
        }
        for i in range(count)
    ]


def test_a_dict_of_lists_of_tensors_comes_back_as_it_was_put(registered):
    columns = {name: [sample[name] for sample in samples()] for name in samples()[0]}
    found = there_and_back(BatchedDataDict(columns))
    assert type(found) is BatchedDataDict
    assert [row.tolist() for row in found["tokens"]] == [row.tolist() for row in columns["tokens"]]
    assert (found["reward"], found["message"]) == (columns["reward"], columns["message"])
    found["tokens"][0].zero_()  # a write to the store would kill this process


@pytest.mark.parametrize("form", ["list of samples", "dict of lists of tensors"])
def test_samples_are_put_as_one_batch_and_parts_of_it_fetched(registered, form):
    rows = samples()
    columns = {name: [sample[name] for sample in rows] for name in rows[0]}
    batch = open_wire(encode_rows(rows if form == "list of samples" else columns))
    for index in ([0, 2], [3]):
        part = there_and_back(select_rows(batch, index))
        found = to_rows(part)
        assert len(found) == len(index)
        for row, i in zip(found, index, strict=True):
            assert torch.equal(row["tokens"], rows[i]["tokens"])
            assert torch.equal(row["log_probs"], rows[i]["log_probs"])
            assert (row["reward"], row["message"]) == (rows[i]["reward"], rows[i]["message"])


def test_a_lazy_stack_comes_back(registered):
    stack = LazyStackedTensorDict(
        *[TensorDict({"image": torch.ones(2, i + 1)}, batch_size=[2]) for i in range(3)]
    )
    found = there_and_back(stack)
    assert type(found) is LazyStackedTensorDict
    assert [td["image"].shape for td in found.tensordicts] == [(2, 1), (2, 2), (2, 3)]


def test_batches_inside_other_objects_come_back(registered):
    batch = make_batch()
    found = there_and_back({"batches": [batch, (1, batch["ids"])], "step": 3})
    assert_same(found["batches"][0], batch)
    assert rows_of(found["batches"][1][1]) == rows_of(batch["ids"])
    assert found["step"] == 3


class TestWireBatch:
    @SIZES
    def test_comes_back_and_goes_on(self, registered, cells_per_token):
        batch = make_batch(cells_per_token)
        found = there_and_back(there_and_back(open_wire(encode(batch))))
        assert_same(found.to_tensordict(), batch)

    @pytest.mark.parametrize("cells_per_token", [20_000, 100_000])
    def test_reads_the_store_in_place_and_copies_what_it_hands_out(
        self, registered, cells_per_token
    ):
        batch = make_batch(cells_per_token)
        wire = open_wire(encode(batch))
        reference = ray.put(wire)
        found = ray.get(reference, timeout=SECONDS)
        assert type(found) is WireBatch
        # The store gives every reader the same memory.
        again = ray.get(reference, timeout=SECONDS)
        places = [
            [np.frombuffer(frame, dtype=np.uint8).ctypes.data for frame in opened.to_frames()]
            for opened in (found, again)
        ]
        assert places[0] == places[1]
        assert all(memoryview(frame).readonly for frame in found.to_frames())
        td = found.to_tensordict()
        td["ids"].values().zero_()
        assert_same(again.to_tensordict(), make_batch(cells_per_token))

    def test_small_ones_cannot_be_written_through_either(self, registered):
        reference = ray.put(open_wire(encode(make_batch())))
        first, second = (ray.get(reference, timeout=SECONDS) for _ in range(2))
        first.to_tensordict()["reward"].zero_()
        assert second.to_tensordict()["reward"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    def test_only_what_was_chosen_is_sent(self, registered):
        wire = open_wire(encode(make_batch(20_000))).select(["logprobs", "message"]).rows([4, 2])
        found = there_and_back(wire)
        assert found.fields == ("logprobs", "message")
        expected = make_batch(20_000)["logprobs"].unbind()
        assert rows_of(found.leaf("logprobs")) == [expected[4].tolist(), expected[2].tolist()]
        assert found.leaf("message").tolist() == [PAYLOADS[4], PAYLOADS[2]]
        assert sum(memoryview(frame).nbytes for frame in found.to_frames()) < 10_000

    def test_one_that_came_from_ray_goes_on(self, registered):
        once = there_and_back(open_wire(encode(make_batch(20_000))))
        assert_same(there_and_back(once).to_tensordict(), make_batch(20_000))
        assert_same(there_and_back(once.rows(slice(0, 6))).to_tensordict(), make_batch(20_000))

    def test_it_keeps_its_object_in_the_store(self, registered):
        found = there_and_back(open_wire(encode(make_batch(20_000))))  # its reference is gone
        for _ in range(20):  # more than the store holds, were nothing freed
            ray.put(np.ones(15 * 2**20, dtype=np.uint8))
        assert_same(found.to_tensordict(), make_batch(20_000))


class TestWorkers:
    def test_arguments_and_results(self, registered):
        @ray.remote
        def double(batch, wire):
            batch["reward"] *= 2
            batch["ids"].values().mul_(2)  # a write to the store would kill this worker
            return batch, wire.select(["message"]), type(wire).__name__

        batch = make_batch(20_000)
        back, wire, kind = ray.get(double.remote(batch, open_wire(encode(batch))), timeout=SECONDS)
        assert kind == "WireBatch"
        assert back["reward"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        assert torch.equal(back["ids"].values(), batch["ids"].values() * 2)
        assert type(wire) is WireBatch
        assert wire.leaf("message").tolist() == PAYLOADS

    def test_results_are_written_by_this_wire(self, registered):
        """The hook was run in the worker: equal rows share their offsets only on this wire."""

        @ray.remote
        def make():
            columns = [torch.ones(2), torch.ones(1)]
            return TensorDict(
                {
                    name: stack_or_nest([row.clone() for row in columns], always_nest=True)
                    for name in "ab"
                },
                batch_size=[2],
            )

        back = ray.get(make.remote(), timeout=SECONDS)
        assert back["a"].offsets() is back["b"].offsets()

    def test_an_actor(self, registered):
        @ray.remote
        class Buffer:
            def put(self, batch):
                self.batch = batch

            def get(self):
                return self.batch

        buffer = Buffer.remote()  # type: ignore[attr-defined]
        ray.get(buffer.put.remote(make_batch()), timeout=SECONDS)
        assert_same(ray.get(buffer.get.remote(), timeout=SECONDS), make_batch())


class TestRefusals:
    def test_what_cannot_be_encoded_is_named(self, registered):
        batch = BatchedDataDict({"lock": [threading.Lock()]})
        with pytest.raises(TypeError, match=r"lock\[0\]: _thread.lock cannot be encoded"):
            ray.put(batch)

    def test_references_are_not_hidden_from_ray(self, registered):
        reference = ray.put(1)
        with pytest.raises(TypeError, match="ObjectRef cannot be encoded"):
            ray.put(BatchedDataDict({"reference": [reference]}))

    def test_pickle_only_if_told(self, cluster):
        batch = BatchedDataDict({"path": [Path("/a"), Path("/b")]})
        integration.register()
        try:
            with pytest.raises(TypeError, match="Path cannot be encoded"):
                ray.put(batch)
            integration.register(allow_pickle=True)
            assert there_and_back(batch) == batch
            integration.register(default=str)
            assert there_and_back(batch) == {"path": ["/a", "/b"]}
        finally:
            integration.unregister()


class TestRegistration:
    def test_unregister_restores(self, cluster):
        integration.register()
        integration.register()
        reference = ray.put(make_batch())
        integration.unregister()
        assert_same(ray.get(reference, timeout=SECONDS), make_batch())  # it stays readable
        back = there_and_back(make_batch())
        assert back["ids"].offsets() is not back["logprobs"].offsets()
        integration.unregister()

    def test_a_serializer_of_the_users_is_restored(self, cluster):
        ray.util.register_serializer(
            BatchedDataDict, serializer=lambda batch: "theirs", deserializer=str
        )
        try:
            integration.register()
            assert type(there_and_back(BatchedDataDict(a=torch.ones(2)))) is BatchedDataDict
            integration.unregister()
            assert there_and_back(BatchedDataDict(a=torch.ones(2))) == "theirs"
        finally:
            ray.util.deregister_serializer(BatchedDataDict)

    def test_ray_is_loaded_only_when_asked(self):
        code = "import sys, jagcodec, jagcodec.integrations; print('ray' in sys.modules)"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert run.stdout.split() == ["False"]
