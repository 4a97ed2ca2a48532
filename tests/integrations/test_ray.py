"""What is Ray's own: the object store, worker processes, and the hook that sets them up."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec import BatchedDataDict, WireBatch, encode, open_wire, pack_rows, to_rows
from jagcodec.errors import ArgumentError
from tests.helpers import PAYLOADS, address, make_batch, run_python, size
from tests.integrations.conftest import get, needs, new_worker
from tests.oracle import assert_same

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray

from jagcodec.integrations import ray as integration
from jagcodec.integrations import setup


def there_and_back(value):
    return get(ray.put(value))


@pytest.mark.cluster
class TestStore:
    # As a message of Ray's, in the store in pieces, and in the store in one piece.
    @pytest.mark.parametrize("cells_per_token", [1, 20_000, 100_000])
    def test_its_readers_get_memory_of_their_own(self, registered, cells_per_token):
        reference = ray.put(make_batch(cells_per_token))
        first, second = get(reference), get(reference)
        wire = ray.put(open_wire(encode(make_batch(cells_per_token))))
        found, again = get(wire), get(wire)  # the store gives every reader the same memory
        places = [[address(frame) for frame in each.to_frames()] for each in (found, again)]
        assert cells_per_token == 1 or places[0] == places[1]
        assert all(memoryview(frame).readonly for frame in found.to_frames())
        for td in (first, found.to_tensordict()):
            td["ids"].values().zero_()  # a write to the store would kill this process
            td["reward"].zero_()
        for td in (second, again.to_tensordict()):
            assert_same(td, make_batch(cells_per_token))

    def test_ray_is_given_no_buffer_that_it_copies_slowly(self, registered):
        """Of more than 1 MiB it starts threads for each, which pays off from about 8 MiB on."""
        sizes = []
        for cells_per_token in (20_000, 100_000):
            batch = make_batch(cells_per_token)
            for value in (batch, open_wire(encode(batch))):
                buffers = []
                ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
                sizes += [len(buffer.raw()) for buffer in buffers]
        assert max(sizes) == 15 * 100_000 * 8  # in one piece
        assert not [size for size in sizes if 2**20 < size <= 2**23]

    @pytest.mark.parametrize("registered", [False, True])
    def test_lists_of_samples_and_dicts_of_lists_are_one_message(self, cluster, registered):
        samples = [
            {"tokens": [1, 2, 3], "log_probs": torch.ones(2), "reward": 1.0, "image": {"x": None}},
            {"tokens": [1], "log_probs": torch.zeros(1), "reward": 0.0, "image": None},
        ]
        lists = {name: [row[name] for row in samples] for name in samples[0]}
        if registered:
            integration.register()
        for rows in (samples, lists):
            reference = integration.put(rows, narrow=True, meta={"partition": [4, 7]})
            found = get(reference)
            assert type(found) is WireBatch
            assert found.meta == {"partition": [4, 7]}
            assert to_rows(found, as_="list") == to_rows(pack_rows(samples), as_="list")
        integration.unregister()
        with pytest.raises(ArgumentError, match="expected 2 rows like 'tokens', found 1"):
            integration.put(lists | {"reward": [1.0]})

    def test_a_wire_batch_keeps_its_object_in_the_store_and_sends_chosen_rows(self, registered):
        found = there_and_back(open_wire(encode(make_batch(20_000))))  # its reference is gone
        for _ in range(20):  # more than the store holds, were nothing freed
            ray.put(np.ones(15 * 2**20, dtype=np.uint8))
        assert_same(found.to_tensordict(), make_batch(20_000))
        chosen = there_and_back(found.rows([1]))
        assert type(chosen) is WireBatch
        assert size(there_and_back(chosen).to_frames()) < 10_000

    def test_references_are_not_hidden_from_ray(self, registered):
        with pytest.raises(TypeError, match="ObjectRef cannot be encoded"):
            ray.put(BatchedDataDict({"reference": [ray.put(1)]}))


def shares_offsets(td):
    """Whether a batch came in this wire format: only there do equal rows share their offsets."""
    return td["ids"].offsets() is td["logprobs"].offsets()


@pytest.mark.cluster
class TestRegistration:
    def test_unregister_restores_and_what_is_stored_stays_readable(self, cluster):
        for _ in range(2):
            integration.register()
        reference = ray.put(make_batch())
        for _ in range(2):
            integration.unregister()
        assert_same(get(reference), make_batch())
        assert shares_offsets(get(reference))
        assert not shares_offsets(there_and_back(make_batch()))

    def test_a_serializer_of_the_users_is_kept(self, cluster):
        batch = BatchedDataDict(a=torch.ones(2))
        ray.util.register_serializer(
            BatchedDataDict, serializer=lambda batch: "theirs", deserializer=str
        )
        try:
            for on in (setup, integration.register, integration.unregister):
                on()
                assert there_and_back(batch) == "theirs"
            integration.register()
        finally:
            ray.util.deregister_serializer(BatchedDataDict)
        assert type(there_and_back(batch)) is BatchedDataDict
        integration.unregister()


@pytest.mark.cluster
class TestWorkers:
    def test_arguments_and_results(self, registered):
        @ray.remote
        def double(batch, wire):
            batch["reward"] *= 2
            batch["ids"].values().mul_(2)  # a write to the store would kill this worker
            return batch, wire.select(["message"]), type(wire).__name__

        batch = make_batch(20_000)
        double = double.options(**new_worker("is sent a batch first"))
        back, wire, kind = get(double.remote(batch, open_wire(encode(batch))))
        assert shares_offsets(back)
        assert kind == "WireBatch"
        assert back["reward"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        assert torch.equal(back["ids"].values(), batch["ids"].values() * 2)
        assert type(wire) is WireBatch
        assert wire["message"].tolist() == PAYLOADS

    def test_one_that_imports_tensordict_sends_batches_in_this_wire_format(self, cluster):
        @ray.remote
        def make():
            import sys

            heavy = ("torch", "numpy", "tensordict", "verl", "jagcodec.wire", "jagcodec.memory")
            before = [name for name in ("jagcodec", *heavy) if name in sys.modules]
            import torch
            from tensordict import TensorDict

            rows = [torch.full((2,), 1.5), torch.full((3,), 2.5)]
            nested = torch.nested.nested_tensor
            columns = {name: nested(rows, layout=torch.jagged) for name in ("ids", "logprobs")}
            return TensorDict(columns, batch_size=[2]), before

        found, before = get(make.options(**new_worker("imports")).remote())
        assert before == ["jagcodec"]  # which imports nothing heavy by itself
        assert shares_offsets(found)
        assert [row.tolist() for row in found["ids"].unbind()] == [[1.5] * 2, [2.5] * 3]


def repeated():
    """Twelve rows of two images, each with its own memory."""
    images = [torch.arange(4000) + i for i in range(2)]
    payloads = [{"pixels": images[i // 6].clone()} for i in range(12)]
    rows = NonTensorStack(*payloads)
    ids = torch.stack([images[i // 6] for i in range(12)])
    return TensorDict({"image": rows, "ids": ids}, [12])


EACH = 4000 * 8  # bytes of an image


OF_RAY_S_OWN = """
import ray, torch
from ray import cloudpickle

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
reference = ray.put({"x": torch.zeros(1 << 20)})
ray.get(ray.remote(lambda found: found["x"].fill_(1.0).sum().item()).remote(reference))
print(ray.get(reference)["x"].sum().item())
for value in (
    torch.zeros(1000),
    torch.zeros(10, 100).t(),
    torch.nested.as_nested_tensor([torch.zeros(400), torch.zeros(600)], layout=torch.jagged),
    torch.zeros(1000, requires_grad=True),
):
    buffers = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    found = cloudpickle.loads(data, buffers=buffers)
    print(sum(len(buffer.raw()) for buffer in buffers) >= 4000, found.requires_grad)
"""


@pytest.mark.cluster
def test_what_the_docs_say_of_ray_s_own_variable():
    """A write of one reader is seen by all of them; jagged tensors profit; gradients are lost."""
    lines = run_python(OF_RAY_S_OWN, RAY_ENABLE_ZERO_COPY_TORCH_TENSORS="1").stdout.splitlines()
    assert lines[-5:] == [str(float(1 << 20)), *["True False"] * 4]


@pytest.mark.cluster
class TestVariable:
    @pytest.mark.parametrize(
        ("words", "images"), [("elide", 4), ("elide, narrow", 1), ("narrow", 6), ("", 24)]
    )
    def test_options_of_the_variable_reach_a_worker(self, cluster, words, images):
        @ray.remote
        def send(batch):
            buffers: list[Any] = []
            ray.cloudpickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
            return batch, sum(len(buffer.raw()) for buffer in buffers)

        environment = {"env_vars": {"JAGCODEC_ENCODE": words}}
        found, sent = get(send.options(runtime_env=environment).remote(repeated()))
        assert_same(found, repeated())
        assert images * 0.9 < sent / EACH < images * 1.1

    def test_a_worker_with_another_word_ends_and_does_not_hang(self, cluster):
        environment = {"env_vars": {"JAGCODEC_ENCODE": "elided"}}
        task = ray.remote(max_retries=0, runtime_env=environment)(lambda: 1)
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            get(task.remote())


# What a process writes, read by a reader of this library, and the readers that it names.
TOOLS = """
import sys
from jagcodec.integrations import setup

def written(value):
    from ray import cloudpickle
    data = cloudpickle.dumps(value)
    names = [name for name in ("ray", "verl") if f"jagcodec.integrations.{name}".encode() in data]
    return names, cloudpickle.loads(data)

def batch():
    import torch, tensordict
    return tensordict.TensorDict({"a": torch.arange(3)}, batch_size=[3])
"""


ANY = "setup()\nsetup()\nnames, td = written(batch())\nprint(names, td['a'].tolist())"
OF_VERL = """
setup()
before, _ = written(batch())
import verl
names, data = written(verl.DataProto(batch=batch(), meta_info={"step": 3}))
assert data.meta_info == {"step": 3}
print(before, names, written(batch())[0], data.batch["a"].tolist())
"""
# The options of a call before the hook, and of one after it.
OPTIONS = """
import pathlib
from jagcodec import BatchedDataDict
from jagcodec.integrations.ray import register, unregister
paths = BatchedDataDict({"path": [pathlib.Path("/a")]})
register(allow_pickle=True)
setup()
first = written(paths)[1] == paths
unregister()
assert written(batch())[0] == []
setup()
try:
    written(paths)
except TypeError as error:
    refused = "cannot be encoded" in str(error)
register(allow_pickle=True)
print(first, refused, written(paths)[1] == paths)
"""
# A call leaves out what the variable names, and says otherwise.
AFTER = """
import torch
from tensordict import TensorDict
from jagcodec.integrations.ray import register, unregister
td = TensorDict({"x": torch.zeros(8, 1000) + torch.randn(1000)}, batch_size=[8])

def is_small():
    from ray import cloudpickle
    return len(cloudpickle.dumps(td)) < 10_000

register(allow_pickle=True)
first = is_small()
register(elide=False)
second = is_small()
unregister()
setup()
print(first, second, is_small())
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
td, together = batch(), Barrier(4)
setup()

def names(_):
    together.wait()
    return written(td)[0]

print([*ThreadPoolExecutor(4).map(names, range(4))])
"""


class TestHook:
    @pytest.mark.parametrize(
        ("code", "printed"),
        [
            (ANY, "['ray'] [0, 1, 2]"),
            (f"batch()\n{ANY}", "['ray'] [0, 1, 2]"),
            (f"import jagcodec.integrations.ray\n{ANY}", "['ray'] [0, 1, 2]"),
            pytest.param(OF_VERL, "['ray'] ['verl'] ['verl'] [0, 1, 2]", marks=needs("verl")),
            (OPTIONS, "True True True"),
            (THREADS, f"{[['ray']] * 4}"),
        ],
        ids=["batch", "batch before", "integration before", "of verl", "options", "threads"],
    )
    def test_what_a_process_writes(self, code, printed):
        assert run_python(f"{TOOLS}{code}").stdout == f"{printed}\n"

    def test_options_of_a_call_come_after_those_of_the_variable(self):
        assert run_python(f"{TOOLS}{AFTER}", JAGCODEC_ENCODE="elide").stdout == "True False True\n"

    @pytest.mark.parametrize("words", ["elided", "elide narrow", "elide,", "1"])
    def test_a_word_that_is_not_an_option_is_an_error(self, words):
        for call in ("setup()", "from jagcodec.integrations.ray import register; register()"):
            code = f"{TOOLS}{call}"
            *_, last = run_python(code, status=1, JAGCODEC_ENCODE=words).stderr.splitlines()
            expected = "jagcodec.errors.ArgumentError: JAGCODEC_ENCODE: expected elide, narrow, or "
            assert last.startswith(expected)

    def test_other_classes_of_these_names_are_ray_s(self, tmp_path):
        (tmp_path / "verl").mkdir()
        (tmp_path / "verl/__init__.py").write_text("class DataProto: pass")
        code = "setup()\nimport verl\nprint(written(verl.DataProto())[0])"
        assert run_python(TOOLS + code, path=tmp_path).stdout == "[]\n"

    def test_a_version_that_is_not_supported_is_named_with_the_hook(self, tmp_path):
        (tmp_path / "tensordict").mkdir()
        theirs = "__version__ = '9.9'\nclass TensorDict: pass"
        (tmp_path / "tensordict/__init__.py").write_text(theirs)
        code = "setup()\nimport tensordict\nwritten(tensordict.TensorDict())"
        *_, last = run_python(TOOLS + code, path=tmp_path, status=1).stderr.splitlines()
        assert "jagcodec.integrations.setup: expected to write a TensorDict of tensordict" in last
        assert "version (9.9)" in last
        assert "ImportError: cannot import name 'LazyStackedTensorDict'" in last
