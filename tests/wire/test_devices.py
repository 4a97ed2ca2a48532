"""Tensors on a device: the results of the CPU, and how often the device is waited for.

Each test runs on the suite's own device, and on CUDA where there is one.
"""

import pickle
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, UnbatchedTensor
from torch.utils._pytree import tree_leaves

import jagcodec
from benchmarks.measure import copied
from jagcodec import (
    BatchedDataDict,
    concat_rows,
    decode,
    encode,
    encode_rows,
    join_columns,
    materialize,
    pack_jagged_fields,
    select_rows,
    split_rows,
    to_nested_by_length,
)
from jagcodec.errors import UnsupportedTypeError
from jagcodec.memory import staging
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.rows.copy_rows import gather_by_torch
from jagcodec.testing import jagged_batches, jagged_tensors
from jagcodec.types import Layout
from tests.device import DEVICE, install, needs_cuda, on_device, watched, with_tensors
from tests.helpers import message, nested
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import lengths_in, tensordicts, trees
from tests.wire.values import jagged

LENGTHS = torch.tensor([2, 0, 5, 3])
PADDED = torch.arange(4 * 6 * 3, dtype=torch.float32).view(4, 6, 3)


def test_copies_and_waits_are_counted_and_a_copy_that_was_not_waited_for_is_not_there(device):
    there = torch.arange(1, 4, device=device)
    with watched(device) as traffic:
        there.sum().item()
    assert traffic.waits == 1
    if device != DEVICE:
        return
    here = torch.zeros(3, dtype=torch.int64)
    with watched(device) as traffic:
        here.copy_(there, non_blocking=True)
        there.add_(10)
        assert here.tolist() == [0, 0, 0]
        torch.get_device_module(device).current_stream(device).synchronize()
        assert here.tolist() == [1, 2, 3]
        there[:2].cpu()
    assert (traffic.fetched, traffic.waits) == ([24, 16], 2)


def tensors_with_holes(value):
    found = []

    def look(tensor):
        if tensor.layout is torch.jagged and tensor.lengths() is not None:
            found.append(tensor)
        return tensor

    with_tensors(value, look)
    return found


@given(trees(), st.booleans())
def test_any_value_is_the_same_message_after_one_wait(device, value, narrow):
    expected = message(encode(value, narrow=narrow, checksum=True))
    there = on_device(value, device)
    with watched(device) as traffic:
        frames = encode(there, narrow=narrow, checksum=True)
    assert message(frames) == expected
    # Which cells to fetch of a jagged tensor with holes depends on what was fetched before.
    assert traffic.waits <= 1 + len(tensors_with_holes(value))


@given(st.integers(1, 3), lengths_in(4, 3), st.sampled_from([torch.int64, torch.bfloat16]))
def test_rows_are_the_same_message_whichever_dim_their_tokens_have(device, dim, lengths, dtype):
    shapes = [(3, 2)[: dim - 1] + (length,) + (2,) * (3 - dim) for length in lengths]
    rows = [{"x": torch.ones(shape).cumsum(dim - 1).to(dtype)} for shape in shapes]
    expected = message(encode_rows(rows, ragged_dims={"x": dim}))
    assert message(encode_rows(on_device(rows, device), ragged_dims={"x": dim})) == expected


@given(jagged_batches())
def test_batches_pack_encode_and_materialize_as_on_the_cpu(device, batch):
    options = {"token_aligned_fields": batch.token_aligned_fields}
    # Strided tensors of some dtypes cannot be moved, on any device.
    fields, lengths = with_tensors(batch.fields, contiguous_bits), batch.lengths.to(device)
    fields = on_device(fields, device)
    td = pack_jagged_fields(fields, lengths=lengths, **options)
    reference = pack_jagged_fields(batch.fields, lengths=batch.lengths, **options)
    assert message(encode(td)) == message(encode(reference))
    assert message(encode(td, narrow=True)) == message(encode(reference, narrow=True))
    with watched(device) as traffic:
        frames = jagcodec.encode_fields(fields, lengths=batch.lengths, **options)
    assert traffic.waits <= 1
    assert message(frames) == message(encode(reference))
    for layout in ("padded", "packed"):
        expected = materialize(reference, layout=layout)
        opened = jagcodec.open_wire(frames, device=device)
        for there in (td, decode(frames, device=device), opened):
            columns = materialize(there, layout=layout)
            assert columns.keys() == expected.keys()
            for found, wanted in zip(*map(tree_leaves, (columns, expected)), strict=True):
                if isinstance(wanted, torch.Tensor):
                    assert found.device == device
                    assert_same(found.cpu(), wanted)
                else:
                    assert_same(found, wanted)


LAYOUTS: list[dict[str, Any]] = [
    *({"layout": layout} for layout in get_args(Layout)),
    {"padding_side": "left", "pad_to_multiple": 3, "attention_mask_of": "x"},
    {"layout": "packed", "keep_jagged": ["x"]},
]


@st.composite
def batches(draw):
    """A column that is jagged, and columns of every kind: in the batch, and in one inside it."""
    column = draw(jagged_tensors())
    rows = column.shape[0]
    inner = draw(tensordicts(lazy=False).filter(lambda td: td.shape[0] == rows))
    return TensorDict({"x": column, **dict(inner.items()), "inner": inner}, batch_size=[rows])


@given(batches(), st.sampled_from(LAYOUTS))
def test_what_comes_to_the_host_has_arrived_after_one_wait(device, td, options):
    there, holes = on_device(td, device), len(tensors_with_holes(td))
    expected = dict(materialize(td, **options))
    for batch in (there, dict(there.items())):
        with watched(device) as traffic:
            found = materialize(batch, **options, device="cpu")
        assert_same(dict(found), expected)
        assert traffic.waits <= 1 + holes
    with watched(device) as traffic:
        stays = materialize(there, **options)
    assert traffic.waits <= 1 + 2 * holes
    for non_blocking in (False, True):
        with watched(device) as traffic:
            found = stays.to("cpu", non_blocking=non_blocking)
        assert_same(dict(found), expected)
        assert traffic.waits <= 1 + holes
    with watched(device) as traffic:
        found = materialize(td, **options, device=device)
    assert traffic.waits == 0
    assert_same(dict(found.to("cpu")), expected)


def test_prompt_lengths_by_name_are_read_without_a_wait_of_their_own(device):
    td = TensorDict({"ids": nested([[1, 2, 3], [4, 5]]), "prompts": torch.tensor([2, 1])}, [2])
    options: dict[str, Any] = {"padding_side": "left_right", "prompt_lengths": "prompts"}
    expected = dict(materialize(td, **options))
    forms: list[Any] = [td, dict(td.items()), BatchedDataDict(td.items()), encode(td)]
    for form in (*forms, [td, encode(td)]):
        with watched(device) as traffic:
            found = materialize(form, **options, device=device)
        assert traffic.waits == 0
        assert_same(dict(found.to("cpu")), dict(materialize(form, **options)))
    for there in on_device(forms[:2], device):
        with watched(device) as traffic:
            found = materialize(there, **options, device="cpu")
        assert traffic.waits == 1
        assert_same(dict(found), expected)


def test_batches_on_a_device_are_chosen_from_and_joined_after_one_wait(device):
    ids, few = (nested([range(n) for n in lengths]) for lengths in ((4, 3), (2, 0)))
    packed = materialize({"b": few}, "packed")
    td = TensorDict({"ids": ids, "few": few, "inner": TensorDict({"few": few}, [2])}, [2])
    there = on_device(td, device)
    calls: list[Any] = [
        lambda td: [select_rows(td, [1, 0])],
        lambda td: [concat_rows([td, td])],
        lambda td: split_rows(td, 2),
        lambda td: [join_columns([td, {"a": td["few"]}])],
    ]
    for call in calls:
        with watched(device) as traffic:
            found = call(there)
        assert traffic.waits == 1
        assert_same(decode(encode(found)), call(td))
    for other in (there, dict(there.items()), BatchedDataDict(packed).to(device)):
        own = TensorDict({"own": torch.ones(2)}, [2], device="cpu")
        with watched(device) as traffic:
            found = join_columns([own, other])
        assert traffic.waits <= 3  # one of them in tensordict, for the batch inside
        plain = td if "ids" in other else dict(packed)
        assert_same(found, join_columns([own, plain]))


@given(batches())
def test_what_goes_to_a_third_device_waits_once_for_row_lengths(device, td):
    """To another GPU; here to meta, whose tensors have shapes alone."""
    there, holes = BatchedDataDict(dict(on_device(td, device).items())), len(tensors_with_holes(td))
    with watched(device) as traffic:
        found = there.to("meta")
    assert traffic.waits <= 1 + holes
    for name, column in td.items():
        moved: Any = found[name]
        if isinstance(column, torch.Tensor):
            assert moved.is_meta
            assert (moved.dtype, moved.ndim) == (column.dtype, column.ndim)
            if column.is_nested and column.layout is torch.jagged:
                assert len(moved.offsets()) == len(column) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_columns_whose_memory_was_freed_are_refused_but_by_meta(device, dtype):
    freed = torch.ones(3, 2, dtype=dtype)
    freed.untyped_storage().resize_(0)  # as sharded training frees parameters
    jagged_rows = nested([[1, 2], [3], [4]], dtype)
    jagged_rows.values().untyped_storage().resize_(0)
    for column in (freed, UnbatchedTensor(freed, batch_size=[3]), jagged_rows):
        with pytest.raises(jagcodec.JagcodecError, match="'x'"):
            BatchedDataDict(x=column).to(device)
    assert BatchedDataDict(x=freed).to("meta")["x"].is_meta


@pytest.mark.parametrize("is_left", [True, False])
def test_large_tensors_go_through_page_locked_memory_if_some_is_left(monkeypatch, is_left):
    """Of CUDA, with the suite's own device in its place."""
    install()
    asked: list[int] = []

    def pin_memory(tensor):
        asked.append(tensor.nbytes)
        if not is_left:
            raise RuntimeError("CUDA error: out of memory")
        return tensor.clone()

    monkeypatch.setattr(staging, "_is_read_at_once", lambda *_: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    for count in (100, 1 << 18):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.arange(count).to(dtype)
            assert_same(staging.to_device(tensor, DEVICE).cpu(), tensor)
    assert asked == [1 << 20]


def test_an_open_batch_on_a_device_is_sent_after_one_wait(device):
    columns = {"a": nested([[1, 2], [3]]), "b": nested([[1], [2, 3]]), "reward": torch.ones(2)}
    there = jagcodec.open_wire(on_device(columns, device))
    with watched(device) as traffic:
        frames = encode(there)
    assert traffic.waits == 1
    assert_same(decode(frames), TensorDict(columns, [2]))


def test_gradients_follow_what_comes_to_the_host(device):
    values, offsets = on_device((torch.arange(3.0), torch.tensor([0, 1, 3])), device)
    rows = torch.nested.nested_tensor_from_jagged(values.requires_grad_(), offsets)
    batch = {"rows": rows, "grid": on_device(torch.ones(2, 3), device).requires_grad_()}
    for layout in ("padded", "jagged"):
        with watched(device) as traffic:
            found = materialize(batch, layout, device="cpu")
        assert traffic.waits == 1
        assert all(column.requires_grad for column in found.values())
        with torch.no_grad():
            found = materialize(batch, layout, device="cpu")
        assert not any(column.requires_grad for column in found.values())
    if device != DEVICE:
        found["grid"] = materialize(batch, device="cpu")["grid"]
        (found["grid"] * 3).sum().backward()
        assert batch["grid"].grad.tolist() == [[3.0] * 3] * 2


def test_a_pickle_is_written_after_one_wait_and_read_to_its_device(device):
    td = TensorDict({"ids": nested([[1], [2, 3]]), "x": torch.ones(2, dtype=torch.uint16)}, [2])
    batch = BatchedDataDict(on_device(dict(td.items()), device))
    with watched(device) as traffic:
        data = pickle.dumps(batch)
    assert traffic.waits == 1
    found = pickle.loads(data)
    assert {column.device for column in found.values()} == {device}
    assert_same(dict(found.to("cpu")), dict(td.items()))


def test_each_column_that_came_to_the_host_has_memory_of_its_own(device):
    there = on_device({"small": torch.ones(2), "large": torch.ones(2, 50_000)}, device)
    found = materialize(there, device="cpu")
    assert len(pickle.dumps(found["small"])) < 2000


def test_rows_with_holes_are_compacted_on_their_device(device):
    holes = jagged(torch.arange(1000.0), [0, 500, 1000], lengths=torch.tensor([2, 3]))
    there = on_device(TensorDict({"a": holes}, batch_size=[2]), device)
    with watched(device) as traffic:
        frames = encode(there)
    if device == DEVICE:
        assert traffic.fetched == [24, 16, 20]  # offsets, lengths, and the rows alone
    assert rows_of(decode(frames)["a"]) == [bits(torch.arange(2.0)), bits(torch.arange(500.0, 503))]


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_rows_of_a_batch_are_not_mistaken_for_tokens(device, rows):
    for there in (nested([[1, 2], [3, 4]]), on_device(nested([[1, 2], [3, 4]]), device)):
        td = TensorDict({"a": torch.arange(rows)}, [rows])
        td._tensordict["x"] = there  # as if the caller had changed it
        if rows == 2:
            assert_same(decode(encode(td))["x"], nested([[1, 2], [3, 4]]))
            continue
        with pytest.raises(UnsupportedTypeError, match=r"in 'x' too, found \[2\]") as error:
            encode(td)
        assert error.value.reason == "row_mismatch"


def test_tensors_that_are_made_anew_whenever_they_are_read(device):
    made, fresh = [torch.arange(5), torch.ones(2)], type("Fresh", (), {})
    to_state: Any = lambda value: on_device(made, device)  # noqa: E731
    jagcodec.register_type(fresh, f"tests.{id(fresh)}", to_state=to_state, from_state=list)
    assert_same(decode(encode([fresh(), torch.zeros(3)])), [made, torch.zeros(3)])


@pytest.mark.cuda
@needs_cuda
def test_large_frames_alias_pinned_memory():
    frames = encode({"a": torch.arange(10_000, device="cuda")})
    assert torch.frombuffer(frames[-1], dtype=torch.int64).is_pinned()


@pytest.mark.cuda
@needs_cuda
def test_page_locked_rectangles_are_not_overwritten_before_they_have_been_read():
    rows = torch.full((512,), 1024)
    first, second = (
        pack_jagged_fields({name: torch.full((512, 1024), n) for name in "ab"}, lengths=rows)
        for n in (1, 2)
    )
    torch.cuda._sleep(10**8)  # so that the device reads later
    columns = materialize(first, pin_memory=True)
    there = [column.to("cuda", non_blocking=True) for column in columns.values()]
    del columns
    materialize(second, pin_memory=True)
    assert all((column == 1).all() for column in there)


@pytest.mark.cuda
@needs_cuda
def test_large_columns_go_to_a_busy_device_at_once_and_arrive_whole():
    rows = torch.full((64,), 1 << 17)
    frames = [
        copied(jagcodec.encode_fields({"a": torch.full((64, 1 << 17), n)}, lengths=rows))
        for n in (1, 2)
    ]
    calls: list[Any] = [
        lambda sent: materialize(sent, device="cuda")["a"],
        lambda sent: decode(sent, device="cuda")["a"].values(),
    ]
    for call in calls:
        for sent in frames * 2:  # so that page-locked memory is there
            call(sent)
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)
        found = [call(sent) for sent in frames]
        assert not torch.cuda.current_stream().query()
        assert [int(each.unique()) for each in found] == [1, 2]


FULL, MASK = (nested(map(range, n), torch.float32) for n in ((4, 3, 6), (3, 0, 2)))
TURNS = nested([[0, 0, 1, 1], [0, 1, 0], [0, 1, 0, 0, 1, 1]], torch.bool)
IDS, ROWS = torch.arange(12).view(3, 4), to_nested_by_length(PADDED, LENGTHS)
ENDS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
GAPS = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])


def by_mask(ids, mask):
    return pack_jagged_fields({"ids": ids}, mask=mask)["ids"]


def gather(rows):
    return gather_by_torch(rows, np.array([20, 3, 3, 0]), np.array([4, 0, 5, 2]), {})


def padded(td):
    return materialize(td, pad_value_dict={"a": -1}, pad_to_seqlen=8)["a"]


# How often the device is waited for, what is called, and with which values on the device.
CALLS: dict[str, tuple[int, Any, list[Any]]] = {
    "lengths here": (0, lambda x: to_nested_by_length(x, LENGTHS), [PADDED]),
    "lengths there": (1, to_nested_by_length, [PADDED, LENGTHS]),
    "tokens, lengths there": (1, jagcodec.pack_per_token_field, [PADDED, LENGTHS]),
    "maybe": (0, lambda x: jagcodec.maybe_pack_jagged(x, LENGTHS), [PADDED[:, :5]]),
    "maybe, lengths there": (1, jagcodec.maybe_pack_jagged, [PADDED[:, :5], LENGTHS]),
    "row gather": (0, gather, [PADDED.view(24, 3)]),
    "padded": (1, padded, [pack_jagged_fields({"a": ROWS}, lengths=None)]),
    "responses": (1, jagcodec.response_from_nested, [FULL, MASK]),
    "responses in turns": (1, jagcodec.response_from_nested, [FULL, TURNS]),
    "rows of a mask": (1, to_nested_by_length, [IDS, MASK]),
    "mask at one end": (1, by_mask, [IDS, ENDS]),
    "mask with gaps": (1, by_mask, [IDS, GAPS]),
}


@pytest.mark.parametrize("name", CALLS)
def test_columns_are_those_of_the_cpu_after_few_waits(device, name):
    most, call, values = CALLS[name]
    there = [on_device(value, device) for value in values]
    with watched(device) as traffic:
        found = call(*there)
    assert traffic.waits <= most
    assert found.device == device
    assert_same(found.cpu(), call(*values))
    if values[-1] is MASK:  # of the same rows, as torch knows
        assert (found * there[-1]).device == device


@pytest.mark.cuda
@needs_cuda
def test_gradients_flow_on_the_device():
    padded = PADDED.cuda().requires_grad_()
    mask = to_nested_by_length(torch.ones(4, 6, device="cuda"), LENGTHS)
    to_nested_by_length(padded, mask).values().sum().backward()
    expected = torch.arange(6) < LENGTHS[:, None]
    assert padded.grad[..., 0].cpu().bool().equal(expected)  # type: ignore[index]
