"""Messages that are cut, forged, foreign or newer: always one `WireFormatError` that says where."""

import contextlib
import threading
import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from jagcodec import (
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    open_wire,
)
from jagcodec.errors import REASONS
from jagcodec.wire.spec import Kind
from tests.helpers import receive, rollout
from tests.wire.corpus import documents_inside, nodes_inside, rows_inside, stacks_inside
from tests.wire.forge import (
    RowMessage,
    array,
    blob,
    int64s,
    jagged,
    list_of,
    map_of,
    message,
    message_of_rows,
    node,
    object_array,
    record,
    row_message,
    sparse_coo,
    strided_nested,
    tag,
    tensor,
    tensor_views,
    tensordict,
    user,
)

OFFSETS = int64s(0, 2, 5)
PAYLOAD = OFFSETS + bytes(40)
GROUPS = [[0, 0, 2, 2, 3]]


def rollout_frames():
    return receive(encode({"batch": rollout(), "big": torch.arange(4000)}), bytes)


def refused(frames):
    with pytest.raises(WireFormatError) as caught:
        decode(frames)
    error = caught.value
    assert error.reason in REASONS
    assert error.path
    assert "expected" in error.detail
    assert isinstance(error, ValueError)
    return error


def test_hand_written_messages_are_read():
    payload = OFFSETS + np.arange(5, dtype="<f4").tobytes()
    nested = decode(message(map_of({"x": jagged(dtype="float32")}), payload, groups=GROUPS))["x"]
    assert [row.tolist() for row in nested.unbind()] == [[0, 1], [2, 3, 4]]


def test_frames_of_the_wrong_size_number_or_order_are_refused():
    frames = rollout_frames()
    for i, frame in enumerate(frames):
        for end in (0, 1, len(frame) // 2, len(frame) - 1):
            refused([*frames[:i], frame[:end], *frames[i + 1 :]])
        refused([*frames[:i], frame + b"\0", *frames[i + 1 :]])
        refused([*frames[:i], *frames[i + 1 :]])
    refused([*frames, b""])
    refused(frames[::-1])
    refused([frames[0], *frames[:0:-1]])


@given(st.binary(max_size=64), st.lists(st.binary(max_size=8), max_size=3))
def test_noise_is_refused(head, rest):
    refused([head, *rest])


@given(st.data())
def test_noise_behind_a_good_start_gives_a_value_or_the_error(data):
    frames = rollout_frames()
    header = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(10, len(header) - 1))
        header[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    with contextlib.suppress(WireFormatError):
        decode([bytes(header), *frames[1:]])


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "no_message"),
        ([b""], "foreign"),
        (b"", "foreign"),
        ([msgpack.packb({"a": 1})], "foreign"),
        ([msgpack.packb([1, 2])], "foreign"),
        ([b"\x80\x04\x95rest of a pickle"], "foreign"),
        ([3], "foreign"),
        ([np.ones((4, 4))[:, ::2]], "foreign"),
        (message(1, fields={"jagcodec": 2}), "unknown_version"),
        (message(1, fields={"jagcodec": True}), "unknown_version"),
        (message(1, fields={"numbers": "x"}), "bad_header"),
        (message(1, sizes=[-1]), "bad_header"),
        (message(1, sizes=[2**62, 2**62, 2**62]), "bad_header"),
        (message(1, sizes=[8]), "frame_count"),
        (message(1, groups=[[0, 0, 2]]), "bad_header"),
        (message(1, groups=[[0, 0, 2, 3, 2]]), "bad_offsets"),
        (message(1, groups=[[0, 0, 2**60, 0, 0]]), "out_of_bounds"),
        (message(1, fields={"schema": 5}), "bad_header"),
        (message(1, schema=b"\xc1"), "bad_header"),
        (message(1, schema=b"\xc0\xc0"), "bad_header"),
        (message(1, values=b"\x91\xc1"), "bad_header"),
        (message(1, values=b"\x91\x01\x01"), "bad_header"),
        (message(1, values=b"\x91\x81\xc0\x01"), "bad_header"),
    ],
)
def test_messages_that_are_not_valid(frames, reason):
    assert refused(frames).reason == reason


def test_an_unknown_version_names_both():
    error = refused(message(1, fields={"jagcodec": 7}))
    assert "version 1" in str(error)
    assert "7" in str(error)


POINTER = ("a", None, 0, "|O")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (tensor("float33"), "unknown_dtype"),
        (tensor("qint8"), "unknown_dtype"),
        (tensor("Tensor"), "unknown_dtype"),
        (tensor(7), "unknown_dtype"),
        (tensor(["int64", "u1"]), "unknown_dtype"),
        (node("TENSOR", "uint8"), "bad_record"),
        (node("TENSOR", "uint8", 0, None), "bad_record"),
        (node("TENSOR", "uint8", 1.0), "bad_record"),
        (node("TENSOR", "uint8", True), "bad_record"),
        (tensor(shape=[65]), "out_of_bounds"),
        (tensor("int64", [9]), "out_of_bounds"),
        (tensor(shape=[2**62, 2**62]), "bad_record"),
        (tensor(shape=[0, 2**62, 2**62]), "bad_record"),
        (tensor(shape=[1] * 65), "bad_record"),
        (tensor(buffer=1), "out_of_bounds"),
        (tensor(offset=64), "out_of_bounds"),
        (tensor("int64", stored=99), "unknown_dtype"),
        (jagged(group=1), "bad_record"),
        (jagged(dim=2), "bad_record"),
        (jagged(dim=0), "bad_record"),
        (jagged(shape=[]), "bad_record"),
        (jagged(shape=[4]), "bad_offsets"),
        (array("|O"), "unknown_dtype"),
        (array("<i4; import os"), "unknown_dtype"),
        (array("<U4000000000"), "out_of_bounds"),
        (array(["sub", "<i4", [3]]), "unknown_dtype"),
        (array(["struct", 4, False, []]), "unknown_dtype"),
        (object_array([2**40], 6), "bad_offsets"),
        (object_array([2**62, 2**62], 5), "bad_record"),
        (node("SCALAR", children=[5]), "unknown_kind"),
        (node("BYTES", numbers=[0, 0, 2**40]), "out_of_bounds"),
        (node("DICT", children=[[1, 1], tensor(), tensor()]), "bad_value"),
        (node("DICT", children=[[[]], tensor()]), "bad_value"),
        (node("DICT", children=[[1], tensor(), tensor()]), "bad_value"),
        (strided_nested(1, 2**60), "out_of_bounds"),
        (strided_nested(3, 1), "bad_offsets"),
        (sparse_coo(tensor("int64", [1, 1], 0, 8), tensor()), "bad_sparse"),
        (node("TENSORDICT", 1, ["x"], numbers=[1]), "bad_record"),
        (node("TENSORDICT", 1, ["x", "x"], numbers=[1], children=[tensor()] * 2),
         "bad_record"),
        (node("TENSORDICT", 1, [1], numbers=[1], children=[tensor()]), "bad_record"),
        (node("TENSORDICT", 1, ["a", "b"], [], numbers=[1]), "bad_record"),
        (tensordict([1], {"x": 5}), "bad_value"),
        (tensordict([2], {"x": tensor()}), "bad_value"),
        (tensordict([2**30], {}), "bad_rows"),
        (node("NON_TENSOR_DATA", 1, numbers=[10**9], children=["x"]), "bad_rows"),
        (node("LAZY_STACK", 0, children=[1]), "bad_value"),
        (node("LAZY_STACK", 5, children=[tensordict([1], {})]), "bad_value"),
        (node("NON_TENSOR_STACK", 0, children=[1]), "bad_value"),
    ],
)  # fmt: skip
def test_forged_nodes(part, reason):
    error = refused(message(map_of({"a": list_of(0, part)}), PAYLOAD, groups=GROUPS))
    assert error.reason == reason
    assert error.path.startswith("$.a[1]") or error.path == "header"


RECORDS = [
    (msgpack.ExtType(1, b"x"), "unknown_kind"),
    (msgpack.ExtType(5, b"x"), "unknown_kind"),
    (msgpack.ExtType(127, b""), "unknown_kind"),
    (msgpack.Timestamp(5), "unknown_kind"),
    (tag("TUPLE"), "unknown_kind"),
    ([1, tag("TUPLE")], "unknown_kind"),
    ([tag("TUPLE", b"\x90")], "bad_record"),
    ([tag("TENSOR"), "uint8", 0], "unknown_kind"),
    ([tag("SCHEMA")], "unknown_kind"),
    (record("SCALAR", "<i4", b"xxx"), "bad_record"),
    (record("SCALAR", "|O", bytes(8)), "unknown_dtype"),
    (record("SCALAR", "<i4", record("BIG_INT", b"\1")), "bad_record"),
    (record("SCALAR", "<i4", b"1234", 5), "bad_record"),
    (record("BIG_INT", b""), "bad_record"),
    (record("BIG_INT"), "bad_record"),
    (user("complex", 1, 2.0), "bad_value"),
    (user("range", 0, 1, 0), "bad_value"),
    (user("range", 0, 1, 1.0), "bad_value"),
    (record("USER", "range", 5), "bad_value"),
    (record("DICT", 1), "bad_record"),
    (record("DICT", 1, 2, 1, 3), "bad_value"),
    (record("DICT", [], 2), "bad_value"),
    (record("DICT", record("DICT"), 2), "bad_value"),
    (record("SET", 1, 1), "bad_value"),
    (record("SET", {}), "bad_value"),
    (record("USER", "torch.Size", [2**63]), "bad_value"),
    (record("USER", "torch.Size", [True]), "bad_value"),
    (record("USER", "torch.dtype", "load"), "bad_value"),
    (record("USER", "torch.dtype", []), "bad_value"),
    (user("torch.device", "gpu", 0), "bad_value"),
    (user("torch.device", "cuda", 4000), "bad_value"),
    (record("USER", "numpy.str_", 5), "bad_value"),
    (record("NUMBERS", "int16", b"123"), "bad_value"),
    (record("NUMBERS", "bool", b"\2"), "bad_value"),
    (record("NUMBERS", "|O", b"12345678"), "unknown_dtype"),
    (record("NUMBERS", ["int8"], b"1"), "unknown_dtype"),
    (record("NUMBERS", "int8", [1]), "bad_record"),
    (record("NUMBERS", "int8"), "bad_record"),
    (record("SET", record("NUMBERS", "int8", b"1")), "bad_value"),
    (record("USER", [], 5), "bad_record"),
    (record("PICKLE", b"\x80\x04K\x01."), "pickle_refused"),
]


@pytest.mark.parametrize(("document", "reason"), RECORDS)
def test_forged_records(document, reason):
    # Among the values of a message, in a row, and in a row beside a message.
    error = refused(message({"a": [0, document]}))
    assert error.reason == reason
    assert error.path.startswith("$.a[1]") or error.path == "$"
    for rows in ([0, {"a": document}], [0, {"a": document}, row_message(message(1))]):
        error = refused(message_of_rows(*rows))
        assert error.reason == reason
        assert error.path.startswith("$[1]")


@pytest.mark.parametrize("offsets", [[1, 2, 5], [0, 6, 5], [0, -1, 5], [0, 2, 2**62]])
def test_forged_offsets(offsets):
    error = refused(message(jagged(), int64s(*offsets) + bytes(40), groups=GROUPS))
    assert error.reason == "bad_offsets"


def test_offsets_whose_differences_wrap_around():
    """Each of these lengths is 1 or more as int64 reckons, and they end where they should."""
    offsets = np.array([0, 2**63 - 1, -(2**63), -1, 5])
    group = [0, 0, 4, int(np.diff(offsets).min()), int(np.diff(offsets).max())]
    payload = offsets.astype("<i8").tobytes() + bytes(5)
    frames = message(tensordict([4], {"x": jagged(offset=40)}), payload, groups=[group])
    assert refused(frames).reason == "bad_offsets"
    with pytest.raises(WireFormatError, match="never fall"):
        open_wire(frames).select(["x"]).to_tensordict()
    forged = torch.nested.nested_tensor_from_jagged(
        torch.zeros(5), torch.from_numpy(offsets), min_seqlen=1, max_seqlen=5
    )
    with pytest.raises(UnsupportedTypeError, match="within the 5 cells"):
        encode(forged)


@pytest.mark.parametrize("bounds", [(2, 4), (1, 3), (0, 0)])
def test_forged_bounds_of_a_group(bounds):
    error = refused(message(jagged(), PAYLOAD, groups=[[0, 0, 2, *bounds]]))
    assert error.reason == "bad_offsets"


@pytest.mark.parametrize("group", [[0, 0, 1, 4, 5], [0, 0, 1, 4, 4], [0, 0, 0, 0, 5]])
def test_forged_groups_without_offsets(group):
    error = refused(message(jagged(offset=0), PAYLOAD, groups=[group]))
    assert error.reason == "bad_offsets"


BAD = tensor("float33")


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (BAD, "$"),
        (list_of(1, BAD), "$[1]"),
        (map_of({"a": list_of(map_of({"b c": BAD}))}), "$.a[0]['b c']"),
        (node("TUPLE", children=[0, list_of(BAD)]), "$[1][0]"),
        (tensordict([1], {"ids": BAD}), "$.ids"),
        (map_of({"td": tensordict([], {"x": tensordict([], {"y": BAD})})}), "$.td.x.y"),
        (list_of(0, tensor(buffer=9)), "$[1]"),
        (map_of({"td": tensordict([], {"x": tensor(buffer=9)})}), "$.td.x"),
    ],
)  # fmt: skip
def test_errors_name_the_path_to_the_node(part, path):
    assert refused(message(part, PAYLOAD)).path == path


def test_errors_name_the_path_to_the_record():
    wrong = record("BIG_INT", b"")
    for document, path in (
        (wrong, "$"),
        ({"a": [{"b c": wrong}]}, "$.a[0]['b c']"),
        (record("TUPLE", 0, [wrong]), "$[1][0]"),
    ):
        assert refused(message(document)).path == path
    image = row_message(message(map_of({"image": BAD}), b"x"))
    assert refused(message_of_rows("a", image)).path == "$[1].image"
    cut = RowMessage(blob(message(1))[:-1])
    assert refused(message_of_rows("a", cut)).path == "$[1] (header)"


# Nesting


@pytest.mark.parametrize(
    "frames",
    [
        message(nodes_inside(500)),
        message(nodes_inside(105)),
        message(None, schema=b"\x91" * 100_000 + b"\x13"),
        message(None, schema=b"\x92\x13" * 900 + b"\xc0"),
        message(None, values=b"\x91" + b"\x91" * 100_000 + b"\1"),
        message(None, values=b"\x91" + b"\x81\xa1a" * 100_000 + b"\1"),
        message(documents_inside(900)),
        message(documents_inside(106)),
        message_of_rows(documents_inside(900)),
        message_of_rows(b"\x91" * 900 + msgpack.packb([tag("TUPLE")]), 1),
        rows_inside(105),
        rows_inside(130),
        rows_inside(105, kind="NON_TENSOR_ROWS"),
        message(stacks_inside(9)),
    ],
)
def test_nesting_is_bounded(frames):
    assert refused(frames).reason in ("too_deep", "bad_header")


def on_a_small_stack(call):
    """What a call returns or raises in a thread of 256 KiB of stack, which it must not overrun."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    size = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    return outcome[0]


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: message(nodes_inside(n)), 104),
        (lambda n: message(documents_inside(n)), 104),
        (lambda n: message_of_rows(documents_inside(n - 1)), 104),
        (rows_inside, 104),
        (lambda n: rows_inside(n, "NON_TENSOR_ROWS"), 104),
        (lambda n: message(stacks_inside(n)), 8),
        (lambda n: message(stacks_inside(n, "NON_TENSOR_STACK")), 8),
    ],
)
def test_nesting_takes_no_stack(make, most):
    """Up to the limit a value is read, and past it refused, in a thread of little stack."""
    for levels in (most - 4 if most > 100 else most, most + 2, most + 30, 4 * most):
        frames = make(levels)
        found = on_a_small_stack(lambda frames=frames: decode(frames))
        if levels <= most:
            assert not isinstance(found, Exception), found
        else:
            assert isinstance(found, WireFormatError)
            assert found.reason == "too_deep"


def nested_in_rows(value):
    cells = np.empty(1, dtype=object)
    cells[0] = value
    return cells


DEEPEST_LEAVES = [
    (),
    torch.zeros(1),
    torch.eye(2).to_sparse_coo(),
    torch.nested.nested_tensor([torch.ones(1)]),
    2**70,
    1j,
    b"x" * 5000,
    {1: 2},
    {2**70: 2**70},
    frozenset({2**70}),
    range(2**70),
    np.array([torch.ones(1), None], dtype=object),
    TensorDict({"a": torch.eye(2).to_sparse_coo()}, [2]),
]


@pytest.mark.parametrize(
    "inside",
    [
        lambda value: (value,),
        lambda value: [value],
        lambda value: {"a": value},
        lambda value: {1: value},
        lambda value: slice(None, value),
        lambda value: NonTensorData((value,), batch_size=[1]),
        nested_in_rows,
    ],
)
@pytest.mark.parametrize("leaf", DEEPEST_LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_what_encode_writes_decode_reads_at_the_deepest(inside, leaf):
    values = [leaf]
    for _ in range(105):
        values.append(inside(values[-1]))
    # As deep as it goes, looked for from both ends.
    low, high = 0, 105
    while high - low > 1:
        middle = (low + high) // 2
        try:
            encode(values[middle])
            low = middle
        except TypeError:
            high = middle
    assert low > 30
    found = on_a_small_stack(lambda: decode(encode(values[low])))
    assert not isinstance(found, Exception), found


@pytest.mark.parametrize("kind", [Kind.LAZY_STACK, Kind.NON_TENSOR_STACK])
def test_stacks_in_stacks_are_few(kind):
    """tensordict's work doubles with every level: 40 of them in 350 bytes would take days."""
    assert refused(message(stacks_inside(40, kind.name))).reason == "too_deep"


def test_as_many_stacks_as_encode_writes_are_read():
    stack = TensorDict({"x": torch.ones(1)}, [])
    for _ in range(8):
        stack = LazyStackedTensorDict(stack, stack_dim=0)
    assert decode(encode(stack)).batch_size == (1,) * 8
    with pytest.raises(TypeError, match="8 stacks"):
        encode([LazyStackedTensorDict(stack, stack_dim=0)])


# What a message costs


def test_keys_chosen_to_collide_are_refused():
    # Multiples of the modulus of Python's integer hash, all with hash 0.
    modulus = (1 << 61) - 1
    keys = [record("BIG_INT", (i * modulus).to_bytes(40, "little")) for i in range(1, 200)]
    pairs = [part for key in keys for part in (key, None)]
    assert refused(message(record("DICT", *pairs))).reason == "bad_value"
    assert refused(message(record("SET", *keys))).reason == "bad_value"
    as_node = node("DICT", children=[keys, *[None] * len(keys)])
    assert refused(message(as_node)).reason == "bad_value"


@pytest.mark.parametrize(
    "frames",
    [
        # a list that claims 100 million items, inside one that does, and so on
        message(None, values=b"\x91" + b"\xdd\x05\xf5\xe1\x00" * 200 + bytes(2000)),
        message(None, values=b"\x91" + b"\xdf\x05\xf5\xe1\x00\xa1a" * 200 + bytes(2000)),
        message(None, schema=b"\xdd\x05\xf5\xe1\x00" * 200 + bytes(2000)),
        message_of_rows(b"\xdd\x05\xf5\xe1\x00" * 200 + bytes(2000), 1),
        message(None, counts=[10**15, 10**15]),
        message(object_array([10**8], 1), b"\1", groups=[[0, 0, 1, 1, 1]]),
        message(
            node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, 1]), b"\1", groups=[[0, 0, 10**8, 0, 1]]
        ),
        message(tensor(shape=[10**9])),
        message(tensor("int64", [10**9], stored=1), PAYLOAD),
        message(node("NON_TENSOR_DATA", 1, numbers=[10**9], children=["x"])),
        message(strided_nested(0, 10**9), PAYLOAD),
        message(strided_nested(1, 10**9, 0), PAYLOAD),
        message(tensor_views(10**9), PAYLOAD),
    ],
)  # fmt: skip
def test_no_allocation_on_a_strangers_word(frames):
    refused(frames)  # loads whatever is loaded on first use
    assert peak_of(lambda: refused(frames)) < 1_000_000


def peak_of(call):
    """The most memory that a call took at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_stock_receiver_fails_readably_and_unpickles_nothing():
    """vLLM's and TransferQueue's decoders unpickle extension codes 1 to 5, and raise on others."""

    def stock(code, data):
        if code in (1, 2, 3, 4, 5):
            pytest.fail("a stock receiver would have unpickled this")
        raise NotImplementedError(f"Extension type code {code} is not supported")

    for value in (1, "plain", {"a": [1, 2]}, rollout_frames()):
        frames = value if isinstance(value, list) else encode(value)
        with pytest.raises(NotImplementedError, match="code 16"):
            msgpack.unpackb(bytes(frames[0]), ext_hook=stock)


def test_no_kind_is_ever_a_code_that_peers_unpickle():
    assert not {int(kind) for kind in Kind} & {1, 2, 3, 4, 5}
    assert len({int(kind) for kind in Kind}) == len(Kind)


def tensor_in_rows(levels, size):
    frames = message(tensor(shape=[size]), bytes(size))
    for _ in range(levels):
        frames = message_of_rows(row_message(frames), 1, kind="OBJECT_ARRAY")
    return frames


@pytest.mark.parametrize(
    "frames",
    [
        # zero-byte tensors of very many rows
        message(strided_nested(0, 0), PAYLOAD),
        message(sparse_coo(tensor("int64", [0, 2**40]), tensor(shape=[2**40, 0]), 1, [0])),
        message(strided_nested(0, 20_000), bytes(160_008)),
        # long keys over many values, with and without something wrong in it
        message({"a" * 50_000: [0] * 10_000 + [tag("TUPLE")]}),
        message(map_of({"a" * 50_000: list_of(tensor("zz"), *[0] * 10_000)})),
        message(list_of(*[map_of({"a" * 60: 1})] * 5000)),
        # one buffer under many values
        message(list_of(*[tensor("int16", [50_000], 0, 1)] * 200), bytes(100_002)),
        message(list_of(*[node("BYTES", numbers=[0, 0, 100_000])] * 200), bytes(100_002)),
        message(list_of(*[tensor("int64", [800_000], stored=1)] * 50), bytes(100_002)),
        message(tensor("int64", [800_000], stored=1), bytes(100_002)),
        message(
            list_of(*[jagged(i, shape=[0], offset=0) for i in range(200)]),
            bytes(80_008),
            groups=[[0, 0, 10_000, 0, 0]] * 200,
        ),
        message(
            list_of(*[strided_nested(100_000, 1)] * 300), int64s(100_000) + bytes(100_000)
        ),
        message(
            list_of(*[node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, 50_000])] * 200),
            bytes([1]) * 50_000 + int64s(*range(50_001)),
            groups=[[0, 50_000, 50_000, 1, 1]],
        ),
        # a bad field that is itself large
        message(tensor([["|S100000"] * 100]), bytes(10**5)),
        # values of little, many of them
        message(None, schema=msgpack.packb([26, *[None] * 50_000]), values=[None] * 50_000),
        message(None, schema=msgpack.packb([26, *[[19]] * 50_000]), values=[]),
        message(None, schema=msgpack.packb([26, *[[25]] * 5000]), values=[], numbers=[0] * 15_000),
        message(1, groups=[[0, 0, 0, 0, 0]] * 10_000),
        message(1, *[b""] * 5000),
        message_of_rows(*[0] * 50_000),
        message_of_rows(*[[]] * 50_000),
        message_of_rows(*[record("TUPLE")] * 20_000),
        # a tensor in rows in rows
        tensor_in_rows(40, 1_000_000),
    ],
)  # fmt: skip
def test_what_a_message_costs_is_bounded_by_its_size(frames):
    def read():
        with contextlib.suppress(WireFormatError):
            decode(frames)

    read()
    assert peak_of(read) < 100 * sum(map(len, frames)) + 1_000_000


def test_a_tensor_in_rows_in_rows_is_not_copied_at_each_level():
    frames = tensor_in_rows(90, 1_000_000)
    decode(frames)
    assert peak_of(lambda: decode(frames)) < 5_000_000


def test_a_deep_and_wide_message_is_refused_soon():
    part = list_of(*[0] * 200_000, node(99, children=()))
    for _ in range(98):
        part = node("TUPLE", children=[part])
    error = refused(message(part))
    assert error.reason == "unknown_kind"
    assert error.path.endswith("[200000]")
    document = [0] * 200_000 + [tag(99)]
    for _ in range(98):
        document = record("TUPLE", document)
    assert refused(message(document)).reason == "unknown_kind"


def test_code_points_that_are_not_valid():
    point = b"\xff\xff\xff\x7f"
    assert refused(message(record("SCALAR", "<U1", point))).reason == "bad_value"
    assert refused(message(array("<U1"), point)).reason == "bad_value"


@pytest.mark.parametrize("form", [b"\xc7\x04\xff\0\0\0\5", b"\xc8\0\x08\xff" + bytes(8)])
def test_no_form_of_a_timestamp_is_a_value(form):
    # msgpack takes some of these for a timestamp of its own, and refuses others.
    for wrong in (form, b"\xd6\xff\0\0\0\5", b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12)):
        # Wherever it stands, and however many bytes of 255 there are before it.
        for before in (b"", b"\xcc\xff" * 500, msgpack.packb("text" * 500) + b"\xcc\xff"):
            items = len(list(_items(before)))
            values = _array(items + 1) + before + wrong
            reasons = {
                refused(message(None, values=b"\x91" + values)).reason,
                refused(message_of_rows(values, 1)).reason,
            }
            assert reasons <= {"unknown_kind", "bad_header"}
            assert wrong == form or reasons == {"unknown_kind"}


def _items(data):
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return unpacker


def _array(items):
    return b"\xdc" + items.to_bytes(2, "big")


def test_a_header_names_every_key_once():
    header = message(1)[0]
    doubled = b"\x85" + header[1:] + msgpack.packb("values") + msgpack.packb(b"\x91\2")
    assert refused([doubled]).reason == "foreign"
    twice = header.replace(b"\xa7numbers\xc4\x10" + bytes(16), b"\xa6values\xc4\2\x91\2")
    assert refused([twice]).reason == "bad_header"


def test_checked_indices_do_not_change_with_the_message():
    frames = receive(encode(torch.eye(3).to_sparse_coo()))
    back = decode(frames)
    frames[1][:] = b"\xff" * len(frames[1])
    assert back._indices().max() == 2


def test_checked_offsets_do_not_change_with_the_message():
    frames = [bytearray(frame) for frame in message(jagged(), PAYLOAD, groups=GROUPS)]
    back = decode(frames)
    frames[1][:24] = b"\xff" * 24
    assert back.offsets().tolist() == [0, 2, 5]


# Rows that are messages


def test_a_message_in_a_row_ends_with_zeros_up_to_a_multiple_of_64():
    inner = row_message(message(tensor(), b"\7"))
    (back,) = decode(message_of_rows(inner)).tolist()
    assert back.tolist() == [7]
    for zeros in (1, 63, 64):
        refused(message_of_rows(RowMessage(inner + bytes(zeros)), "other"))
        refused(message_of_rows(RowMessage(bytes(zeros) + inner), "other"))
        refused(message_of_rows(RowMessage(inner[:-zeros]), "other"))
    for row in (bytes(2), bytes(64), b"jagcode"):
        refused(message_of_rows(RowMessage(row), "other"))


def test_a_row_that_is_a_message_is_cut_anywhere():
    inner = row_message(message(tensor(), b"\7", checksum=True))
    for end in range(2, len(inner)):
        refused(message_of_rows(RowMessage(inner[:end]), "other"))


def test_what_a_message_in_a_row_says_is_not_about_the_one_around_it():
    """Its places are its own, and so are its groups and its type of a user's."""
    for part in (tensor(offset=1), tensor(shape=[2]), tensor(buffer=1), jagged(offset=0)):
        inner = row_message(message(part, b"\7"))
        error = refused(message_of_rows("x" * 200, inner))
        assert error.reason in ("out_of_bounds", "bad_record")
        assert error.path == "$[1]"
    hidden = row_message(message(record("PICKLE", b"\x80\x04K\x01.")))
    assert refused(message_of_rows(hidden)).reason == "pickle_refused"
    assert decode(message_of_rows(hidden), allow_pickle=True).tolist() == [1]


def test_every_bit_of_a_message_in_a_row():
    frames = message_of_rows("a", row_message(message(list_of(tensor(), 5), b"\7")))
    payload = bytearray(frames[1])
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(WireFormatError):
            decode([frames[0], bytes(payload)])
        payload[bit // 8] ^= 1 << bit % 8
