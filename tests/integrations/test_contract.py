"""What every integration promises, asked of each: values, refusals, ownership, errors, examples."""

import importlib.util
import json
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import jagcodec
from jagcodec import BatchedDataDict, WireBatch, decode, encode, open_wire
from tests.helpers import LENGTHS, ROOT, make_batch, run_python
from tests.integrations.conftest import SECONDS, needs
from tests.oracle import assert_same

# Each transport is a function that sends a value, with options of `encode`, and returns what comes.


@contextmanager
def zmq(_):
    from jagcodec.integrations.zmq import recv_frames, send_frames
    from tests.integrations.test_zmq import Net, zmq

    with closing(Net()) as net:
        left, right = net.joined(zmq.PAIR, zmq.PAIR)

        def carry(value, allow_pickle=False, **options):
            frames = encode(value, allow_pickle=allow_pickle, **options)
            send_frames(left, frames, timeout=SECONDS)
            return decode(recv_frames(right, timeout=SECONDS).frames, allow_pickle=allow_pickle)

        yield carry


@contextmanager
def torch_distributed(_):
    import torch.distributed as dist

    from jagcodec.integrations.torch_distributed import broadcast

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    # A device is named, so that this rank reads its own message.
    yield lambda value, **options: broadcast(value, 0, device="cpu", **options)
    dist.destroy_process_group()


@contextmanager
def ray(request, sent=lambda value: value):
    ray = request.getfixturevalue("cluster")
    from jagcodec.integrations.ray import register, unregister

    def carry(value, **options):
        register(**options)
        try:
            found = ray.get(ray.put(sent(value)), timeout=SECONDS)
            return getattr(found, "meta_info", {}).get("value", found)  # of a DataProto
        finally:
            unregister()

    yield carry


@contextmanager
def verl(request):
    from verl import DataProto

    def sent(value):
        return value if isinstance(value, WireBatch) else DataProto(meta_info={"value": value})

    with ray(request, sent) as carry:
        yield carry


@contextmanager
def mooncake(_):
    from examples import mooncake_put_get as example

    with example.cluster(segment=1 << 26) as client:

        def carry(value, allow_pickle=False, **options):
            example.put(client, "a", value, allow_pickle=allow_pickle, **options)
            try:
                return decode(example.get(client, "a"), allow_pickle=allow_pickle)
            finally:
                client.remove_all(True)

        yield carry


# Of each, the module that it needs.
NEEDED = {
    zmq: "zmq",
    torch_distributed: "torch",
    ray: "ray",
    verl: "verl",
    mooncake: "mooncake.store",
}


def can_be_imported(module):
    try:
        importlib.import_module(module)
    except ImportError:  # of a library of the system, too
        return False
    return True


IN_PROCESS = (zmq, torch_distributed)
TRANSPORTS = [
    pytest.param(each, id=each.__name__, marks=() if each in IN_PROCESS else pytest.mark.cluster)
    for each, module in NEEDED.items()
    if can_be_imported(module)
]


def test_every_transport_can_be_imported():
    missing = [each.__name__ for each, module in NEEDED.items() if not can_be_imported(module)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module", params=TRANSPORTS)
def carry(request):
    with request.param(request) as carry:
        yield carry


MROPE = jagcodec.stack_or_nest([torch.arange(4 * n).view(4, n) for n in (3, 1, 2)], ragged_dim=2)
SAMPLES = {
    "tokens": [torch.arange(3), torch.arange(1)],
    "reward": [0.5, 1.0],
    "message": [{"row": 0}, None],
}
VALUES = {
    "no rows": lambda: make_batch(lengths=[]),
    "one row": lambda: make_batch(lengths=[4]),
    "jagged tensor": lambda: make_batch()["ids"],
    "ragged dim 2": lambda: MROPE,
    "lazy stack": lambda: LazyStackedTensorDict(
        *[TensorDict({"image": torch.ones(2, i + 1)}, batch_size=[2]) for i in range(3)]
    ),
    "batched": lambda: BatchedDataDict(jagcodec.materialize(make_batch()), meta_info={"step": 7}),
    "lists of tensors": lambda: BatchedDataDict(SAMPLES),
    "chosen rows": lambda: (
        open_wire(encode(make_batch(20_000))).select(["logprobs", "message"]).rows([4, 2])
    ),
    "nested": lambda: {"batches": [make_batch(), (1, make_batch()["ids"])], "step": 3},
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_sent_arrives(carry, name):
    found, expected = carry(VALUES[name]()), VALUES[name]()
    assert_same(*(x.to_tensordict() if isinstance(x, WireBatch) else x for x in (found, expected)))


@pytest.mark.parametrize("cells", [1, 20_000, 100_000])
def test_what_arrives_may_be_written_to(carry, cells):
    found = carry(make_batch(cells))
    for column in found.values():
        if isinstance(column, torch.Tensor):
            (column.values() if column.is_nested else column).zero_()
    product = found["logprobs"].unsqueeze(-1) * found["experts"]  # of one raggedness
    assert [row.tolist() for row in product.unbind()] == [[[0.0] * 2] * n for n in LENGTHS]
    assert_same(carry(make_batch(cells)), make_batch(cells))


def test_what_cannot_be_encoded_is_named_and_the_next_value_arrives(carry):
    with pytest.raises(TypeError, match=r"lock\[1\]: _thread\.lock cannot be encoded"):
        carry(BatchedDataDict({"lock": [None, threading.Lock()]}))
    assert_same(carry(make_batch()), make_batch())


def test_pickle_and_replacements_only_if_told(carry):
    batch = BatchedDataDict({"path": [Path("/a"), Path("/b")]})
    with pytest.raises(TypeError, match="Path cannot be encoded"):
        carry(batch)
    assert carry(batch, allow_pickle=True) == batch
    assert carry(batch, default=str) == {"path": ["/a", "/b"]}


IMPORT = "import jagcodec.integrations."
# Of each package: what needs it, and what the error says.
WITHOUT = {
    "zmq": (f"{IMPORT}zmq", "zmq needs pyzmq: pip install 'pyzmq>=25'"),
    "ray": (f"{IMPORT}ray", "ray needs Ray: pip install 'ray>=2.40'"),
    "ray, setup": (
        "from jagcodec.integrations import setup; setup()",
        "setup needs Ray: pip install",
    ),
    "PIL": (f"{IMPORT}pillow", "pillow needs Pillow: pip install 'pillow>=10'"),
    "transfer_queue": (f"{IMPORT}transfer_queue", "pip install 'TransferQueue>=0.1.9'"),
    "verl": (f"{IMPORT}verl", "verl needs verl, installed as"),
    "pyarrow": (f"{IMPORT}arrow as a; a.to_arrow({{}})", "pip install 'pyarrow>=19'"),
}
# Forks, so that torch is imported once, and nothing of this library beforehand.
FORKED = """
import json, os, sys
import torch
for name, code in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        sys.modules[name.split(",")[0]] = None
        try:
            exec(code)
        except Exception as error:
            kind = f"{type(error).__module__}.{type(error).__name__}"
            print(json.dumps([name, kind, str(error)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def errors_without():
    """Of each package the type and the text of the error, in a process that lacks it."""
    codes = {name: code for name, (code, _) in WITHOUT.items()}
    lines = run_python(FORKED, json.dumps(codes)).stdout.splitlines()
    return {name: (kind, text) for name, kind, text in map(json.loads, lines)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("ray") if name == "verl" else ()) for name in WITHOUT]
)
def test_without_a_package_the_error_says_what_to_install(name, errors_without):
    kind, text = errors_without[name]
    missing = "builtins.ModuleNotFoundError"
    assert kind == ("jagcodec.errors.ArgumentError" if name == "pyarrow" else missing)
    assert WITHOUT[name][1] in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "package", "printed"),
    [
        ("zmq_pipeline", "zmq", "384 rows from 2 workers"),
        ("torch_distributed_broadcast", "torch", "every rank has the 64 rows"),
        ("http_post", "torch", "every row arrived as it was sent; the producer imported no torch"),
        ("grpo", "torch", "every update has the loss and the gradients of padded rectangles"),
        pytest.param("ray_store", "ray", "4 rows back", marks=pytest.mark.cluster),
        pytest.param("verl_dataproto", "verl", "8 rows back", marks=pytest.mark.cluster),
        pytest.param(
            *("transfer_queue_put_get", "transfer_queue", "3 rows back"), marks=pytest.mark.cluster
        ),
        pytest.param("mooncake_put_get", "mooncake", "4 rows back", marks=pytest.mark.cluster),
    ],
)
def test_its_example_runs(example, package, printed):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert printed in run_python(ROOT / f"examples/{example}.py").stdout
