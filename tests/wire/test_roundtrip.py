"""What goes in comes out: same types, dtypes, shapes, layout, order and bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagcodec
from jagcodec.testing import (
    arrays,
    assert_same,
    jagged_tensors,
    numpy_scalars,
    sparse_tensors,
    strided_nested_tensors,
    tensordicts,
    tensors,
    trees,
)
from jagcodec.wire.spec import TORCH_DTYPES
from tests.helpers import receive


def assert_survives(value):
    frames = jagcodec.encode(value)
    assert_same(jagcodec.decode(frames), value)
    received = receive(frames)
    assert_same(jagcodec.decode(received), value)
    # and again, now that every value lies in a message
    assert_same(jagcodec.decode(jagcodec.encode(jagcodec.decode(received))), value)


@given(trees())
def test_any_tree(value):
    assert_survives(value)


@pytest.mark.parametrize(
    "strategy",
    [
        arrays(),
        numpy_scalars(),
        jagged_tensors(),
        sparse_tensors(),
        strided_nested_tensors(),
        tensordicts(),
        tensordicts(st.one_of(arrays(), tensors(), tensordicts())),
    ],
    ids=[
        "arrays",
        "numpy_scalars",
        "jagged",
        "sparse",
        "strided_nested",
        "tensordicts",
        "rich_payloads",
    ],
)
def test_any_value_of_a_kind(strategy):
    given(strategy)(assert_survives)()


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_torch_dtype(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    size = TORCH_DTYPES[name]
    assert dtype.itemsize == size
    cells = torch.arange(12 * size, dtype=torch.uint8)
    cells = cells & 1 if dtype == torch.bool else cells
    tensor = cells.view(dtype).view(3, 4)
    assert_survives([tensor, tensor.t(), tensor[0, 0], tensor[:, :0], dtype])


def test_no_torch_dtype_is_forgotten():
    quantised = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
    known = {str(v).removeprefix("torch.") for v in vars(torch).values() if type(v) is torch.dtype}
    assert known - quantised <= set(TORCH_DTYPES)


def test_a_default_device_changes_nothing():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    nested = torch.nested.as_nested_tensor([torch.ones(2, 2), torch.ones(3, 1)])
    eye = torch.eye(3)
    values = [eye, eye[:0], jagged, nested, eye.to_sparse().coalesce()]
    with torch.device("meta"):
        back = jagcodec.decode(jagcodec.encode(values))
    assert_same(back, values)


def test_lazily_conjugated_and_negated_tensors():
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    for lazy in (z.conj(), z.conj().imag):
        assert jagcodec.decode(jagcodec.encode(lazy)).tolist() == lazy.tolist()


def test_gradients_are_not_encoded():
    leaf = torch.nn.Parameter(torch.ones(2))
    leaf.grad = torch.ones(2)
    back = jagcodec.decode(jagcodec.encode([leaf, leaf * 2]))
    assert [type(t) for t in back] == [torch.Tensor, torch.Tensor]
    assert [t.requires_grad for t in back] == [False, False]
