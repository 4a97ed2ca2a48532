"""The message: memory, sharing, layout, refusals. Values are test_roundtrip's."""

import itertools
import mmap
import os
import pickle
import threading
from collections import OrderedDict, namedtuple

import msgpack
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictParams

from jagcodec import (
    MsgpackDecoder,
    MsgpackEncoder,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    materialize,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
)
from jagcodec.errors import ArgumentTypeError
from tests.helpers import receive, trip
from tests.oracle import assert_same
from tests.strategies import trees

BIG = 5000  # int64 cells: a buffer too large to share frame 1


def address(buffer):
    return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


@given(trees(max_leaves=4))
def test_equal_objects_give_equal_bytes(value):
    assert receive(encode(value), bytes) == receive(encode(value), bytes)
    assert receive(encode(trip(value)), bytes) == receive(encode(value), bytes)


# Memory


def test_encoding_aliases_large_contiguous_memory():
    tensor, array = torch.arange(BIG), np.arange(BIG)
    values = torch.arange(2.0 * BIG)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, BIG, 2 * BIG]))
    frames = encode([tensor, array, nested, b"x" * BIG])
    assert [address(f) for f in frames[2:5]] == [
        tensor.data_ptr(),
        array.__array_interface__["data"][0],
        values.data_ptr(),
    ]


def test_a_frame_keeps_its_tensor_alive():
    frames = encode(torch.full((BIG,), 7))
    assert trip_of(frames).tolist() == [7] * BIG


def trip_of(frames):
    return decode(receive(frames))


def test_small_buffers_share_one_frame():
    frames = encode({str(i): torch.arange(10) for i in range(100)})
    assert len(frames) == 2


def test_decoding_aliases_writable_frames():
    for kind in (bytearray, lambda b: np.frombuffer(bytearray(b), np.uint8)):
        frames = receive(encode([torch.arange(BIG), np.arange(BIG)]), kind)
        tensor, array = decode(frames)
        assert tensor.data_ptr() == address(frames[2])
        assert array.__array_interface__["data"][0] == address(frames[3])
        tensor[0] = 99
        assert np.frombuffer(frames[2], np.int64)[0] == 99


def test_decoding_copies_read_only_frames_once():
    small = {str(i): torch.arange(4) for i in range(3)}
    frames = receive(encode({**small, "big": torch.arange(BIG)}), bytes)
    before = [bytes(frame) for frame in frames]
    value = decode(frames)
    pointers = [value[name].data_ptr() for name in small]
    assert [b - a for a, b in itertools.pairwise(pointers)] == [64, 64]
    for tensor in value.values():
        tensor.fill_(-1)
    assert frames == before


def test_a_write_never_reaches_a_read_only_mapping(tmp_path):
    frames = encode(torch.arange(BIG))
    path = tmp_path / "frame"
    path.write_bytes(frames[2])
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        tensor = decode([frames[0], frames[1], mapped])
        tensor.zero_()
        del tensor
    assert path.read_bytes() == bytes(frames[2])


def test_copy_overrides():
    frames = receive(encode(torch.arange(BIG)))
    assert decode(frames, copy=True).data_ptr() != address(frames[2])
    read_only = receive(frames, bytes)
    assert decode(read_only, copy=False).data_ptr() == address(read_only[2])
    assert MsgpackDecoder(copy=True).decode(frames).data_ptr() != address(frames[2])


@pytest.mark.parametrize("shift", range(8))
def test_frames_lie_at_any_address(shift):
    value = [torch.arange(BIG), torch.rand(BIG, dtype=torch.complex128), np.arange(5.0)]
    frames = []
    for frame in encode(value):
        memory = bytearray(shift) + bytearray(memoryview(frame))
        frames.append(memoryview(memory)[shift:])
    result = decode(frames)
    assert_same(result, value)
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in result[:2])


@pytest.mark.parametrize(
    "kind",
    [
        bytes,
        bytearray,
        memoryview,
        lambda b: np.frombuffer(b, np.uint8),
        lambda b: torch.frombuffer(bytearray(b) or bytearray(1), dtype=torch.uint8)[: len(b)],
        zmq.Frame,
    ],
)
def test_any_buffer_is_a_frame(kind):
    value = {"a": torch.arange(BIG), "b": [1, "x"], "c": np.ones(3)}
    frames = [kind(bytes(frame)) for frame in encode(value)]
    assert_same(decode(frames), value)
    assert_same(decode(tuple(frames)), value)
    assert_same(decode(kind(bytes(encode([1, 2])[0]))), [1, 2])


def test_every_decoded_column_has_a_storage_of_its_own():
    td = trip(TensorDict({"a": torch.zeros(BIG), "b": torch.zeros(3), "c": torch.zeros(4)}, []))
    assert td["b"].untyped_storage().nbytes() == 12
    assert len(pickle.dumps(td["b"])) < 1000


def test_tensors_keep_the_message_alive():
    frames = receive(encode(torch.arange(BIG)))
    tensor = decode(frames)
    frames.clear()
    assert tensor.tolist() == list(range(BIG))


# Ragged groups and layout


def test_equal_rows_are_one_group_whatever_object_they_came_in():
    def column(width):
        offsets = torch.tensor([0, 2, 5], dtype=width)
        return torch.nested.nested_tensor_from_jagged(torch.ones(5), offsets)

    td = TensorDict({"a": column(torch.int64), "b": column(torch.int32)}, [2])
    with pytest.raises(RuntimeError):
        td["a"] * td["b"]
    back = trip(td)
    assert (back["a"] * back["b"]).values().tolist() == [1.0] * 5
    assert back["a"].offsets().dtype == back["b"].offsets().dtype == torch.int64


def test_offsets_are_encoded_once():
    rows = 1500
    lengths = torch.ones(rows, dtype=torch.int64)
    fields = {str(i): torch.ones(rows, 1, dtype=torch.uint8) for i in range(4)}
    frames = encode(pack_jagged_fields(fields, lengths=lengths))
    size = sum(memoryview(frame).nbytes for frame in frames)
    assert size < 8 * (rows + 1) + 4 * rows + 1000


def test_layout_is_data():
    equal = stack_or_nest([torch.ones(2), torch.ones(2)], always_nest=True)
    wide = stack_or_nest([torch.ones(3, 1), torch.ones(3, 2)])
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.strided)
    back = trip([equal, wide, strided, torch.ones(2, 2)])
    assert [t.layout for t in back] == [torch.jagged, torch.jagged, torch.strided, torch.strided]
    assert [t.is_nested for t in back] == [True, True, True, False]
    assert [t._ragged_idx for t in back[:2]] == [1, 2]


def test_holes_arrive_compacted():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0), torch.tensor([0, 4, 10]), lengths=torch.tensor([2, 3])
    )
    back = trip(holes)
    assert back.values().tolist() == [0, 1, 4, 5, 6]
    assert back.lengths() is None


def test_slack_around_the_rows_is_cut():
    slack = torch.nested.nested_tensor_from_jagged(torch.arange(10.0), torch.tensor([2, 4, 7]))
    assert trip(slack).values().tolist() == [2, 3, 4, 5, 6]


def test_wire_size_of_a_packed_batch():
    rows, width = 512, 1536
    lengths = torch.randint(1, width // 2, (rows,))
    fields = {f"c{i}": torch.ones(rows, width) for i in range(6)}
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=fields)
    frames = encode(td)
    valid = 6 * 4 * int(lengths.sum())
    assert sum(memoryview(frame).nbytes for frame in frames) <= valid * 1.01 + 8192
    assert len(frames) <= len(fields) + 3


# What arrives as what


def test_containers_of_tensordict(tmp_path):
    td = TensorDict({"a": torch.arange(4).view(2, 2), "n": NonTensorStack("x", "y")}, [2])
    mapped = TensorDict({"a": torch.arange(4).view(2, 2)}, [2]).memmap(tmp_path)
    expanded = TensorDict({"a": torch.ones(2)}, []).expand(3)
    for value in (td, mapped, expanded, TensorDictParams(TensorDict({"p": torch.ones(2)}, []))):
        back = trip(value)
        assert type(back) is TensorDict
        assert back.device is None
        assert not back.is_locked
        for key, leaf in back.items():
            if isinstance(leaf, torch.Tensor):
                assert type(leaf) is torch.Tensor
                assert leaf.tolist() == value[key].tolist()
                assert not leaf.requires_grad


def test_lazy_stacks_of_unequal_rows_stay_lazy():
    members = [
        TensorDict({"a": torch.ones(i), **({"b": torch.ones(1)} if i else {})}, []) for i in (0, 3)
    ]
    assert_same(
        trip(LazyStackedTensorDict(*members, stack_dim=0)),
        LazyStackedTensorDict(*members, stack_dim=0),
    )


def test_device_option():
    td = trip(TensorDict({"a": torch.ones(2)}, [2]), device="cpu")
    assert td.device == torch.device("cpu")
    meta = trip([torch.ones(2), stack_or_nest([torch.ones(1), torch.ones(2)])], device="meta")
    assert [t.device.type for t in meta] == ["meta", "meta"]


def test_encoder_and_decoder_objects():
    assert MsgpackDecoder().decode(MsgpackEncoder().encode({"a": (1,)})) == {"a": (1,)}


def test_user_keys_are_only_keys():
    for key in ("__tq_tensordict__", "jagcodec", "tree", "__tensor__", ""):
        value = {key: True, "batch_size": [2], "data": {}}
        assert_same(trip(value), value)


# Refusals


class Mine:
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "path", "name"),
    [
        ({"extra": [0, 1, 2, {"lock": threading.Lock()}]}, "$.extra[3].lock", "_thread.lock"),
        ([bytearray(b"x")], "$[0]", "bytearray"),
        ({"odd key": (Mine(),)}, "$['odd key'][0]", "Mine"),
        ({1: {2: print}}, "$[1][2]", "builtin_function_or_method"),
        ([OrderedDict(a=1)], "$[0]", "collections.OrderedDict"),
        ({"p": Point(1, 2)}, "$.p", "Point"),
        ([msgpack.ExtType(48, b"")], "$[0]", "ExtType"),
        ([memoryview(b"x")], "$[0]", "memoryview"),
        ([msgpack.Timestamp(0)], "$[0]", "Timestamp"),
        ({torch.ones(1): 1}, "$", "hashed by identity"),
        ([torch.ones(2, device="meta")], "$[0]", "meta"),
        ([np.ma.masked_array([1])], "$[0]", "MaskedArray"),
        ([torch.ones(2, 2).to_mkldnn()], "$[0]", "mkldnn"),
        (TensorDict({"x": {"y": NonTensorStack(Mine(), 1)}}, []), "$.x.y[0]", "Mine"),
        (TensorDict({"x": torch.ones(1)}, []).to_module, "$", "method"),
    ],
)
def test_objects_that_cannot_be_encoded_are_named_with_their_path(value, path, name):
    with pytest.raises(UnsupportedTypeError) as caught:
        encode(value)
    assert caught.value.path == path
    assert name in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert isinstance(caught.value, TypeError)


def test_quantised_tensors_are_refused(recwarn):
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedTypeError, match=r"\$\.q: .*qint8.*dequantise"):
        encode({"q": quantised})


def test_nesting_is_bounded_and_cycles_end():
    deep = value = []
    for _ in range(99):
        value.append([])
        value = value[0]
    assert_same(trip(deep), deep)
    value.append([[]])
    with pytest.raises(UnsupportedTypeError, match="100 nested"):
        encode(deep)
    loop = {}
    loop["me"] = loop
    with pytest.raises(UnsupportedTypeError, match="cycle"):
        encode(loop)


def test_rows_without_data_are_bounded():
    rows = 1 << 25
    with pytest.raises(UnsupportedTypeError, match="rows without data"):
        encode(TensorDict({"s": "x"}, [rows]))


def test_errors_survive_pickling():
    with pytest.raises(UnsupportedTypeError) as caught:
        encode([Mine()])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.reason == "unsupported_type"


def test_pickled_data_is_never_read():
    class Bomb:
        def __reduce__(self):
            return (os.abort, ())

    bomb = pickle.dumps(Bomb())
    for frames in ([bomb], [encode(1)[0], bomb], bomb, [b"\xc1\xfe\xed", bomb]):
        with pytest.raises(WireFormatError):
            decode(frames)


# What decode could not make again is refused where it is


def batch_size_differs():
    td = TensorDict({}, [2])
    td["n"] = TensorDict({"x": torch.zeros(2)}, [2])
    td["n"].batch_size = []
    return td


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (batch_size_differs, "batch size"),
        (lambda: {i * ((1 << 61) - 1): 1 for i in range(1, 100)}, "distinct hashes"),
    ],
)
def test_what_no_reader_would_take_is_refused_here(make, text):
    with pytest.raises(UnsupportedTypeError, match=text):
        encode([make()])


NO_DTYPES = {
    "fields": (lambda: np.zeros(2, "i4,f8"), "make a dict of its fields"),
    "fields of nothing": (lambda: np.zeros(2, np.dtype([])), "allow_pickle"),
    "objects in fields": (lambda: np.zeros(2, [("a", "O")]), "make a dict of its fields"),
    "scalar with fields": (lambda: np.zeros(1, "i4,f8")[0], "make a dict of its fields"),
    "record": (lambda: np.zeros(1, np.dtype((np.record, "i4,f8")))[0], "make a dict of its"),
    "long double": (lambda: np.ones(2, "g"), "convert it with .astype"),
    "long double scalar": (lambda: np.longdouble(1), "convert it with .astype"),
    "complex long double": (lambda: np.ones(2, "G"), "convert it with .astype"),
}
if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):
    NO_DTYPES["strings"] = (
        lambda: np.array(["a", "b"], np.dtypes.StringDType()),
        "convert it with .astype",
    )


@pytest.mark.parametrize("name", NO_DTYPES)
def test_dtypes_that_messages_do_not_have_are_refused_or_pickled(name):
    make, remedy = NO_DTYPES[name]
    for value, path in (({"k": [1, make()]}, "$.k[1]"), (np.array([0, make()], object), "$[1]")):
        with pytest.raises(UnsupportedTypeError, match=remedy) as caught:
            encode(value)
        assert (caught.value.reason, caught.value.path) == ("unsupported_type", path)
    frames = receive(encode([make()], allow_pickle=True))
    (back,) = decode(frames, allow_pickle=True)
    assert back.dtype == make().dtype
    assert repr(back) == repr(make())
    with pytest.raises(WireFormatError, match="pickled"):
        decode(frames)
    assert decode(encode([make()], default=str)) == [str(make())]


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_are_refused_with_what_to_do(layout):
    sizes = [(2, 2)] if layout.startswith("b") else []
    tensor = getattr(torch.eye(4), f"to_sparse_{layout}")(*sizes)
    for value, path in ([tensor], "$[0]"), (TensorDict({"x": tensor}, [4]), "$.x"):
        with pytest.raises(UnsupportedTypeError, match=r"call \.to_sparse_coo\(\) first") as caught:
            encode(value)
        assert caught.value.path == path
    back = decode(encode(tensor.to_sparse_coo()))
    assert_same(back.to_dense(), torch.eye(4))


def test_odd_but_sound_values():
    names = TensorDict({"m": NonTensorStack("x", "y")}, [2])["m"]
    assert_same(trip(names), ["x", "y"])
    assert_same(trip(np.zeros(2, "q")), np.zeros(2, "q"))
    assert trip(torch._efficientzerotensor((2, 3))).tolist() == [[0.0] * 3] * 2
    assert trip(LazyStackedTensorDict(stack_dim=0)).batch_size == (0,)


@pytest.mark.parametrize("device", ["foo", 3.5, "cuda:99"])
def test_devices_that_are_not_there(device):
    with pytest.raises(ValueError, match=r"decode\(device\)"):
        decode(encode(1), device=device)


@pytest.mark.parametrize("read", [decode, open_wire])
def test_rows_are_no_message(read):
    with pytest.raises(ArgumentTypeError, match="and encode_rows of rows"):
        read([{"ids": [1, 2]}])


def test_rows_are_no_batches():
    with pytest.raises(ArgumentTypeError, match=r"\['reward'\].*pack_rows or encode_rows"):
        materialize([{"ids": [1, 2], "reward": 1.0}])
