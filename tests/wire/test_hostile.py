"""Messages that are cut, forged, foreign or newer: always one `WireFormatError` that says where."""

import contextlib
import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

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
from tests.wire.corpus import ext, message

OFFSETS = np.array([0, 2, 5], dtype="<i8").tobytes()


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
    jagged = ext(Kind.JAGGED, "float32", [5], 0, 24, 0, 1)
    payload = OFFSETS + np.arange(5, dtype="<f4").tobytes()
    nested = decode(message({"x": jagged}, payload, ragged=[[0, 0, 2, 2, 3]]))["x"]
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
        (None, "foreign"),
        ([np.ones((4, 4))[:, ::2]], "foreign"),
        (message(1, jagcodec=2), "unknown_version"),
        (message(1, jagcodec=True), "unknown_version"),
        (message(1, buffers="x"), "bad_header"),
        (message(1, buffers=[-1]), "bad_header"),
        (message(1, buffers=[2**62, 2**62, 2**62]), "bad_header"),
        (message(1, buffers=[8]), "frame_count"),
        (message(1, ragged=[[0, 0, 2]]), "bad_header"),
        (message(1, ragged=[[0, 0, 2, 3, 2]]), "bad_offsets"),
        (message(1, ragged=[[0, 0, 2**60, 0, 0]]), "out_of_bounds"),
        (message(1, tree=5), "bad_header"),
        (message(b"\xc1"), "bad_header"),
        (message(b"\x01\x01"), "bad_header"),
        (message(b"\x81\xc0\x01"), "bad_header"),
    ],
)
def test_messages_that_are_not_valid(frames, reason):
    assert refused(frames).reason == reason


def test_an_unknown_version_names_both():
    error = refused(message(1, jagcodec=7))
    assert "version 1" in str(error)
    assert "7" in str(error)


T = Kind.TENSOR
PAYLOAD = OFFSETS + bytes(40)
GROUP = [[0, 0, 2, 2, 3]]
POINTER = ["a", None, 0, "|O"]


def struct(itemsize, *fields):
    return ["struct", itemsize, False, list(fields)]


def tensor(dtype="uint8", shape=(1,), buffer=0, offset=0):
    return ext(T, dtype, list(shape), buffer, offset)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (msgpack.ExtType(1, b"x"), "unknown_kind"),
        (msgpack.ExtType(5, b"x"), "unknown_kind"),
        (msgpack.ExtType(127, b"x"), "unknown_kind"),
        (msgpack.Timestamp(5), "unknown_kind"),
        (ext(T, "float32", [1], 0), "bad_record"),
        (tensor("float33"), "unknown_dtype"),
        (tensor("qint8"), "unknown_dtype"),
        (tensor("Tensor"), "unknown_dtype"),
        (tensor(7), "unknown_dtype"),
        (tensor(shape=[65]), "out_of_bounds"),
        (tensor("int64", [9]), "out_of_bounds"),
        (tensor(shape=[2**62, 2**62]), "bad_record"),
        (tensor(shape=[0, 2**62, 2**62]), "bad_record"),
        (tensor(shape=[-1]), "bad_record"),
        (tensor(shape=[True]), "bad_record"),
        (tensor(shape=[1.0]), "bad_record"),
        (tensor(shape=[1] * 65), "bad_record"),
        (tensor(buffer=1), "out_of_bounds"),
        (tensor(buffer=-1), "bad_record"),
        (tensor(offset=64), "out_of_bounds"),
        (ext(Kind.JAGGED, "uint8", [5], 0, 24, 1, 1), "bad_record"),
        (ext(Kind.JAGGED, "uint8", [5], 0, 24, 0, 2), "bad_record"),
        (ext(Kind.JAGGED, "uint8", [5], 0, 24, 0, 0), "bad_record"),
        (ext(Kind.JAGGED, "uint8", [4], 0, 24, 0, 1), "bad_offsets"),
        (ext(Kind.ARRAY, "|O", [1], 0, 0), "unknown_dtype"),
        (ext(Kind.ARRAY, "<i4; import os", [1], 0, 0), "unknown_dtype"),
        (ext(Kind.ARRAY, "<U4000000000", [1], 0, 0), "out_of_bounds"),
        (ext(Kind.ARRAY, ["sub", "<i4", [2**40, 2**40]], [1], 0, 0), "bad_record"),
        (
            ext(Kind.ARRAY, struct(4, ["a", None, 2, "<i4"]), [1], 0, 0),
            "out_of_bounds",
        ),
        (
            ext(Kind.ARRAY, struct(4, *[["a", None, 0, "<i4"]] * 2), [1], 0, 0),
            "unknown_dtype",
        ),
        (
            ext(Kind.FIELD_ARRAY, struct(2**30, POINTER), [1], []),
            "out_of_bounds",
        ),
        (
            ext(Kind.FIELD_ARRAY, struct(8, POINTER), [1], []),
            "bad_record",
        ),
        (
            ext(Kind.FIELD_ARRAY, struct(8, POINTER), [1], [5]),
            "bad_value",
        ),
        (ext(Kind.OBJECT_ARRAY, [2**40], []), "bad_record"),
        (ext(Kind.SCALAR, "<i4", b"xxx"), "bad_record"),
        (ext(Kind.SCALAR, None, 5), "bad_value"),
        (ext(Kind.BYTES, 2**40, 0, 0), "out_of_bounds"),
        (ext(Kind.BIG_INT, b""), "bad_record"),
        (ext(Kind.COMPLEX, 1, 2.0), "bad_record"),
        (ext(Kind.RANGE, 0, 1, 0), "bad_record"),
        (ext(Kind.DICT, [1]), "bad_record"),
        (ext(Kind.DICT, [1, 2, 1, 3]), "bad_value"),
        (ext(Kind.DICT, [[], 2]), "bad_value"),
        (ext(Kind.SET, [1, 1]), "bad_value"),
        (ext(Kind.SET, [{}]), "bad_value"),
        (ext(Kind.SIZE, [2**63]), "bad_record"),
        (ext(Kind.DTYPE, "load"), "unknown_dtype"),
        (ext(Kind.DEVICE, "gpu", 0), "bad_value"),
        (ext(Kind.DEVICE, "cuda", 4000), "bad_record"),
        (ext(Kind.STRIDED_NESTED, 1, 2), "bad_value"),
        (
            ext(Kind.STRIDED_NESTED, tensor("int64", [1, 1], 0, 8), tensor("uint8", [3])),
            "bad_offsets",
        ),
        (ext(Kind.SPARSE_COO, [1], tensor("int64", [1, 1], 0, 8), tensor(), False), "bad_sparse"),
        (ext(Kind.SPARSE_COMPRESSED, "strided", [1], None, None, None), "bad_record"),
        (
            ext(
                Kind.SPARSE_COMPRESSED, "sparse_csr", [1, 1], *[tensor("int64", [2])] * 2, tensor()
            ),
            "bad_sparse",
        ),
        (ext(Kind.TENSORDICT, [1], None, ["x"]), "bad_record"),
        (ext(Kind.TENSORDICT, [1], None, ["x", tensor(), "x", tensor()]), "bad_record"),
        (ext(Kind.TENSORDICT, [1], None, [1, tensor()]), "bad_record"),
        (ext(Kind.TENSORDICT, [1], None, ["x", 5]), "bad_value"),
        (ext(Kind.TENSORDICT, [2], None, ["x", tensor()]), "bad_value"),
        (ext(Kind.TENSORDICT, [1], ["a", "b"], []), "bad_record"),
        (ext(Kind.TENSORDICT, [10**9], None, []), "bad_rows"),
        (ext(Kind.NON_TENSOR_DATA, [10**9], "x"), "bad_rows"),
        (ext(Kind.LAZY_STACK, 0, None, [1]), "bad_value"),
        (ext(Kind.NON_TENSOR_STACK, 0, [1]), "bad_value"),
    ],
)
def test_forged_records(tree, reason):
    error = refused(message({"a": [0, tree]}, PAYLOAD, ragged=GROUP))
    assert error.reason == reason
    assert error.path.startswith("$.a[1]") or error.path == "$"


@pytest.mark.parametrize("offsets", [[1, 2, 5], [0, 6, 5], [0, -1, 5], [0, 2, 2**62]])
def test_forged_offsets(offsets):
    payload = np.array(offsets, dtype="<i8").tobytes() + bytes(40)
    tree = ext(Kind.JAGGED, "uint8", [5], 0, 24, 0, 1)
    assert refused(message(tree, payload, ragged=GROUP)).reason == "bad_offsets"


def test_offsets_whose_differences_wrap_around():
    """Each of these lengths is 1 or more as int64 reckons, and they end where they should."""
    offsets = np.array([0, 2**63 - 1, -(2**63), -1, 5])
    group = [[0, 0, 4, int(np.diff(offsets).min()), int(np.diff(offsets).max())]]
    payload = offsets.astype("<i8").tobytes() + bytes(5)
    jagged = ext(Kind.JAGGED, "uint8", [5], 0, 40, 0, 1)
    tree = ext(Kind.TENSORDICT, [4], None, ["x", jagged])
    assert refused(message(tree, payload, ragged=group)).reason == "bad_offsets"
    with pytest.raises(WireFormatError, match="never fall"):
        open_wire(message(tree, payload, ragged=group)).select(["x"]).to_tensordict()
    forged = torch.nested.nested_tensor_from_jagged(
        torch.zeros(5), torch.from_numpy(offsets), min_seqlen=1, max_seqlen=5
    )
    with pytest.raises(UnsupportedTypeError, match="within the 5 cells"):
        encode(forged)


@pytest.mark.parametrize("bounds", [(2, 4), (1, 3), (0, 0)])
def test_forged_bounds_of_a_group(bounds):
    tree = ext(Kind.JAGGED, "uint8", [5], 0, 24, 0, 1)
    assert refused(message(tree, PAYLOAD, ragged=[[0, 0, 2, *bounds]])).reason == "bad_offsets"


BAD = ext(Kind.TENSOR, "float33", [1], 0, 0)


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (BAD, "$"),
        ([1, BAD], "$[1]"),
        ({"a": [{"b c": BAD}]}, "$.a[0]['b c']"),
        (ext(Kind.TUPLE, [0, [BAD]]), "$[1][0]"),
        (ext(Kind.DICT, [1, 2, 3, BAD]), "$['3']"),
        (ext(Kind.TENSORDICT, [1], None, ["ids", BAD]), "$.ids"),
        ({"td": ext(Kind.TENSORDICT, [], None, ["x", ext(Kind.TENSORDICT, [], None, ["y", BAD])])},
         "$.td.x.y"),
        (ext(Kind.NON_TENSOR_ROWS, ["a", {"image": BAD}]), "$[1].image"),
    ],
)  # fmt: skip
def test_errors_name_the_path_to_the_record(tree, path):
    assert refused(message(tree, PAYLOAD)).path == path


def test_nesting_is_bounded():
    tree = b"\x01"
    for _ in range(500):
        tree = msgpack.packb(msgpack.ExtType(int(Kind.TUPLE), b"\x91\x91" + tree))
    assert refused(message(tree)).reason == "too_deep"
    refused(message(b"\x91" * 100_000 + b"\x01"))
    refused(message(b"\x81\xa1a" * 100_000 + b"\x01"))


def test_keys_chosen_to_collide_are_refused():
    # Multiples of the modulus of Python's integer hash, all with hash 0.
    modulus = (1 << 61) - 1
    keys = [i * modulus for i in range(1, 200)]
    packed = [msgpack.ExtType(17, msgpack.packb([k.to_bytes(40, "little")])) for k in keys]
    items = [part for key in packed for part in (key, None)]
    assert refused(message(ext(Kind.DICT, items))).reason == "bad_value"
    assert refused(message(ext(Kind.SET, packed))).reason == "bad_value"


@pytest.mark.parametrize(
    "tree",
    [
        # a list that claims 100 million items, inside one that does, and so on
        b"\xdd\x05\xf5\xe1\x00" * 200 + bytes(2000),
        b"\xdf\x05\xf5\xe1\x00\xa1a" * 200 + bytes(2000),
        msgpack.packb(ext(Kind.OBJECT_ARRAY, [10**8], [None])),
        msgpack.packb(tensor(shape=[10**9])),
        msgpack.packb(ext(Kind.NON_TENSOR_DATA, [10**9], "x")),
        msgpack.packb(ext(Kind.STRING_ARRAY, [10**8], [], True, False, None)),
    ],
)
def test_no_allocation_on_a_strangers_word(tree):
    frames = message(tree, PAYLOAD, ragged=GROUP)
    refused(frames)  # loads whatever is loaded on first use
    tracemalloc.start()
    refused(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


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


def big(kind, *fields):
    return msgpack.packb(ext(kind, *fields))


@pytest.mark.parametrize(
    "frames",
    [
        # zero-byte tensors of very many rows
        message(big(Kind.STRIDED_NESTED, tensor("int64", [2**40, 0]), tensor("uint8", [0]))),
        message(
            big(
                Kind.SPARSE_COO,
                [0],
                tensor("int64", [0, 2**40]),
                tensor("uint8", [2**40, 0]),
                True,
            )
        ),
        message(big(Kind.STRIDED_NESTED, tensor("int64", [1, 20000]), tensor()), bytes(160_008)),
        # long keys over many values, with and without something wrong in it
        message({"a" * 50_000: [0] * 10_000 + [b"\xd6\xff"]}),
        message({"a" * 50_000: [tensor("zz"), *[0] * 10_000]}),
        # one buffer under many values
        message([tensor("int16", [50_000], 0, 1)] * 200, bytes(100_002)),
        message([ext(Kind.BYTES, 100_000, 0, 0)] * 200, bytes(100_002)),
        message([tensor(["int64", "bits"], [800_000])] * 50, bytes(100_002)),
        message(
            [ext(Kind.JAGGED, "uint8", [0], 0, 0, i, 1) for i in range(200)],
            bytes(80_008),
            ragged=[[0, 0, 10_000, 0, 0]] * 200,
        ),
        message(
            [ext(Kind.STRIDED_NESTED, tensor("int64", [1, 1]), tensor("uint8", [100_000]))] * 300,
            (100_000).to_bytes(8, "little") + bytes(100_000),
        ),
        # structs that are gaps, over and over
        message([ext(Kind.FIELD_ARRAY, struct(60_000), [1], [])] * 2000),
        # a bad field that is itself large
        message(ext(T, "u", [ext(Kind.ARRAY, "|S100000", [1], 0, 0)] * 100, 0, 0), bytes(10**5)),
    ],
)  # fmt: skip
def test_what_a_message_costs_is_bounded_by_its_size(frames):
    with contextlib.suppress(WireFormatError):
        decode(frames)
    tracemalloc.start()
    with contextlib.suppress(WireFormatError):
        decode(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * sum(map(len, frames)) + 1_000_000


def test_a_deep_and_wide_message_is_refused_soon():
    x = msgpack.packb([0] * 200_000 + [ext(99)])
    for _ in range(98):
        x = msgpack.packb(msgpack.ExtType(int(Kind.TUPLE), b"\x91\x91" + x))
    error = refused(message(x))
    assert error.reason == "unknown_kind"
    assert error.path.startswith("$[...]")


@pytest.mark.parametrize("dtype", ["<U1", ["struct", 4, False, [["a", None, 0, "<U1"]]]])
def test_code_points_that_are_not_valid(dtype):
    point = b"\xff\xff\xff\x7f"
    assert refused(message(ext(Kind.SCALAR, dtype, point))).reason == "bad_value"
    assert refused(message(ext(Kind.ARRAY, dtype, [1], 0, 0), point)).reason == "bad_value"


@pytest.mark.parametrize(
    "tree",
    [
        msgpack.ExtType(int(Kind.TUPLE), msgpack.packb({"a": tensor("zz")})),
        msgpack.ExtType(int(Kind.DICT), msgpack.packb([tensor("zz"), 5])),
        ext(T, "uint8", tensor("uint7", [1]), 0, 0),
        msgpack.ExtType(int(Kind.TUPLE), msgpack.packb({-1: 1})),
    ],
)
def test_records_that_are_no_records(tree):
    refused(message(tree, PAYLOAD))


@pytest.mark.parametrize("form", [b"\xc7\x04\xff\0\0\0\5", b"\xc8\0\x08\xff" + bytes(8)])
def test_no_form_of_a_timestamp_is_a_value(form):
    assert refused(message(form)).reason == "unknown_kind"
    # Wherever it stands, and however many bytes of 255 there are before it.
    for before in (b"", b"\xcc\xff" * 500, msgpack.packb("text" * 500) + b"\xcc\xff"):
        items = len(list(_items(before)))
        assert refused(message(_array(items + 1) + before + form)).reason == "unknown_kind"


def _items(data):
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return unpacker


def _array(items):
    return b"\xdc" + items.to_bytes(2, "big")


def test_a_header_names_every_key_once():
    frames = message(1)
    doubled = b"\x85" + frames[0][1:] + msgpack.packb("ragged") + msgpack.packb([])
    refused([doubled])
    refused(message(1, checksums=None))


def test_what_encode_writes_decode_reads_at_the_deepest():
    for leaf in (
        (),
        torch.zeros(1),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(1)]),
        2**70,
        b"x" * 5000,
        {1: 2},
        np.zeros(1, [("a", "O")]),
        np.zeros(1, [("a", "O")])[0],
        TensorDict({"a": torch.eye(2).to_sparse()}, [2]),
    ):
        value = leaf
        deepest = None
        for _ in range(105):
            value = (value,)
            try:
                frames = encode(value)
            except TypeError:
                break
            deepest = frames
            decode(frames)
        assert deepest is not None


@pytest.mark.parametrize("kind", [Kind.LAZY_STACK, Kind.NON_TENSOR_STACK])
def test_stacks_in_stacks_are_few(kind):
    """tensordict's work doubles with every level: 40 of them in 350 bytes would take days."""
    lazy = kind == Kind.LAZY_STACK
    tree = ext(Kind.TENSORDICT, [1], None, []) if lazy else ext(Kind.NON_TENSOR_DATA, [1], "x")
    for _ in range(40):
        tree = ext(kind, 0, None, [tree]) if lazy else ext(kind, 0, [tree])
    assert refused(message(tree)).reason == "too_deep"


def test_as_many_stacks_as_encode_writes_are_read():
    stack = TensorDict({"x": torch.ones(1)}, [])
    for _ in range(8):
        stack = LazyStackedTensorDict(stack, stack_dim=0)
    assert decode(encode(stack)).batch_size == (1,) * 8
    with pytest.raises(TypeError, match="8 stacks"):
        encode([LazyStackedTensorDict(stack, stack_dim=0)])


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_checked_indices_do_not_change_with_the_message(layout):
    sparse = torch.eye(3).to_sparse() if layout == "coo" else torch.eye(3).to_sparse_csr()
    frames = receive(encode(sparse))
    back = decode(frames)
    frames[1][:] = b"\xff" * len(frames[1])
    assert (back._indices() if layout == "coo" else back.col_indices()).max() == 2
