"""Tensors on a device: the results of the CPU, and how often the device is waited for.

Each test runs on the suite's own device, and on CUDA where there is one.
"""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given

from jagcodec import (
    decode,
    encode,
    encode_fields,
    join_columns,
    materialize,
    maybe_pack_jagged,
    open_wire,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
)
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.rowcopy import torch_ops
from jagcodec.testing import jagged_batches
from tests.device import DEVICE, Traffic, install, on_device, watch
from tests.helpers import message
from tests.oracle import assert_same, bits, rows_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTHS = torch.tensor([2, 0, 5, 3])
PADDED = torch.arange(4 * 6 * 3, dtype=torch.float32).view(4, 6, 3)


DEVICES = [
    pytest.param(DEVICE, id="own"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=[pytest.mark.cuda, needs_cuda]),
]


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    if request.param == DEVICE:
        install()
    return request.param


@contextmanager
def watched(device):
    """Gives an object whose `waits` at the end says how often the device was waited for."""
    if device == DEVICE:
        with watch() as traffic:
            yield traffic
        return
    traffic = Traffic()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield traffic
        finally:
            torch.cuda.set_sync_debug_mode("default")
    traffic.waits = sum("synchronizing CUDA operation" in str(w.message) for w in caught)


def nest(device, *lengths):
    return stack_or_nest([torch.rand(n, device=device) for n in lengths], always_nest=True)


def test_the_count_counts(device):
    with watched(device) as traffic:
        torch.ones(3, device=device).sum().item()
    assert traffic.waits == 1


@pytest.mark.parametrize(
    "pack", [to_nested_by_length, pack_per_token_field, lambda p, n: maybe_pack_jagged(p[:, :5], n)]
)
@pytest.mark.parametrize("lengths_there", [False, True])
def test_packing_is_that_of_the_cpu(device, pack, lengths_there):
    padded, lengths = PADDED.to(device), LENGTHS.to(device) if lengths_there else LENGTHS
    with watched(device) as traffic:
        packed = pack(padded, lengths)
    assert traffic.waits <= lengths_there
    assert packed.device == device
    assert rows_of(packed.cpu()) == rows_of(pack(PADDED, LENGTHS))


@given(jagged_batches())
def test_batches_pack_encode_and_materialize_as_on_the_cpu(device, batch):
    options = {"token_aligned_fields": batch.token_aligned_fields}
    # Strided tensors of some dtypes cannot be moved, on any device.
    fields = on_device(
        {
            k: contiguous_bits(v) if isinstance(v, torch.Tensor) else v
            for k, v in batch.fields.items()
        },
        device,
    )
    td = pack_jagged_fields(fields, lengths=batch.lengths.to(device), **options)
    reference = pack_jagged_fields(batch.fields, lengths=batch.lengths, **options)
    assert message(encode(td)) == message(encode(reference))
    assert message(encode(td, narrow=True)) == message(encode(reference, narrow=True))
    assert message(encode_fields(fields, lengths=batch.lengths.to(device), **options)) == message(
        encode_fields(batch.fields, lengths=batch.lengths, **options)
    )
    back = decode(encode(td), device=device)
    for layout in ("padded", "packed"):
        expected = materialize(reference, layout=layout)
        for columns in (materialize(td, layout=layout), materialize(back, layout=layout)):
            for name, column in expected.items():
                if isinstance(column, tuple):
                    assert all(
                        a.cpu().equal(b) if isinstance(b, torch.Tensor) else a == b
                        for a, b in zip(columns[name][1:], column[1:], strict=True)
                    )
                    assert bits(columns[name].values.cpu()) == bits(column.values)  # type: ignore[attr-defined]
                elif isinstance(column, torch.Tensor):
                    assert columns[name].device == device
                    assert_same(columns[name].cpu(), column)


def test_a_row_gather_starts_no_wait(device):
    cells = PADDED.view(24, 3).to(device)
    starts, lengths = np.array([20, 3, 3, 0]), np.array([4, 0, 5, 2])
    with watched(device) as traffic:
        gathered = torch_ops.gather(cells, starts, lengths)
    assert traffic.waits == 0
    assert_same(gathered.cpu(), torch_ops.gather(cells.cpu(), starts, lengths))


def test_rows_are_padded_with_one_wait_for_their_offsets(device):
    column = to_nested_by_length(PADDED.to(device), LENGTHS)
    td = pack_jagged_fields({"a": column}, lengths=None)
    with watched(device) as traffic:
        padded = materialize(td, pad_value_dict={"a": -1}, pad_to_seqlen=8)["a"]
    assert traffic.waits <= 1
    assert padded.device == device
    reference = to_nested_by_length(PADDED, LENGTHS)
    expected = torch.nested.to_padded_tensor(reference, -1.0, (4, 8, 3))
    assert_same(padded.cpu(), expected)


def test_responses_are_those_of_the_cpu(device):
    full, mask = nest(device, 4, 3, 6), nest(device, 3, 0, 2)
    with watched(device) as traffic:
        sliced = response_from_nested(full, mask)
    assert traffic.waits == 1
    assert rows_of(sliced.cpu()) == rows_of(response_from_nested(full.cpu(), mask.cpu()))
    assert (sliced * mask).device == device
    padded = torch.rand(3, 4, device=device)
    with watched(device) as traffic:
        packed = to_nested_by_length(padded, mask)
    assert traffic.waits == 1
    assert rows_of(packed.cpu()) == rows_of(padded.cpu(), [3, 0, 2])
    assert (packed * mask).device == device


@pytest.mark.parametrize(
    "mask", [[[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]]
)
def test_a_mask_is_read_with_one_wait(device, mask):
    mask, ids = torch.tensor(mask), torch.arange(12).view(3, 4)
    expected = pack_jagged_fields({"ids": ids}, mask=mask)["ids"]
    fields, mask = {"ids": ids.to(device)}, mask.to(device)
    with watched(device) as traffic:
        packed = pack_jagged_fields(fields, mask=mask)["ids"]
    assert traffic.waits == 1
    assert packed.device == device
    assert rows_of(packed.cpu()) == rows_of(expected)


def test_columns_of_any_device_merge(device):
    td = pack_jagged_fields({"a": PADDED.to(device)}, lengths=LENGTHS, token_aligned_fields=["a"])
    column = to_nested_by_length(PADDED, LENGTHS)
    merged = join_columns([td, {"here": column, "there": column.to(device)}])
    assert (td["a"] * merged["there"]).device == device
    assert merged["here"].device.type == "cpu"
    merged = join_columns([td.to(device), {"here": column}])
    assert merged["here"].device == device


VALUES = {
    "scalar": torch.tensor(3.5),
    "small": torch.arange(5),
    "large": torch.arange(10_000),
    "strided": torch.arange(12).view(3, 4).t(),
    "half": torch.ones(7, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex64).conj(),
    "negative": torch.ones(3, dtype=torch.complex64).conj().imag,
    "empty": torch.empty(0, 3),
    "sparse": torch.eye(4).to_sparse(),
    "rows": to_nested_by_length(PADDED, LENGTHS),
    "message": ["text", None],
}


def test_a_value_is_encoded_with_one_wait(device):
    values = on_device(VALUES, device)
    with watched(device) as traffic:
        frames = encode(values)
    assert traffic.waits == 1
    assert message(frames) == message(encode(VALUES))
    assert_same(decode(frames), VALUES)
    assert_same(
        open_wire(encode(pack_jagged_fields({"a": values["rows"]}, lengths=None))).to_tensordict()[
            "a"
        ],
        VALUES["rows"],
    )


@pytest.mark.cuda
@needs_cuda
def test_large_frames_alias_pinned_memory():
    frames = encode({"a": torch.arange(10_000, device="cuda")})
    assert torch.frombuffer(frames[-1], dtype=torch.int64).is_pinned()


def test_rows_with_holes_are_compacted_on_their_device(device):
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(9.0).to(device),
        torch.tensor([0, 4, 9]).to(device),
        lengths=torch.tensor([1, 3]).to(device),
    )
    assert rows_of(decode(encode(holes))) == [bits(torch.tensor([0.0])), bits(torch.arange(4.0, 7))]


@pytest.mark.cuda
@needs_cuda
def test_gradients_flow_on_the_device():
    padded = PADDED.cuda().requires_grad_()
    mask = to_nested_by_length(torch.ones(4, 6, device="cuda"), LENGTHS)
    to_nested_by_length(padded, mask).values().sum().backward()
    expected = torch.arange(6) < LENGTHS[:, None]
    assert padded.grad[..., 0].cpu().bool().equal(expected)  # type: ignore[index]
