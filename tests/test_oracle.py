"""The oracle tells apart what is not the same: a comparison that cannot fail proves nothing."""

import runpy
import sys

import numpy as np
import pytest
import torch
from hypothesis import find
from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor

from jagcodec import stack_or_nest, testing
from jagcodec.testing import jagged_batches, tensors
from jagcodec.wire.compare import first_difference
from tests.oracle import assert_same, is_same
from tests.strategies import tensordicts, torch_dtypes, trees


def nest(*shapes):
    return stack_or_nest([torch.ones(shape) for shape in shapes], always_nest=True)


JAGGED = stack_or_nest([torch.ones(1), torch.ones(2)])
OTHER_ROWS = stack_or_nest([torch.ones(2), torch.ones(1)])
TD = TensorDict({"a": torch.ones(2)}, [2])
NAN, OTHER_NAN = torch.tensor([[0x7FC00000], [0x7FC00001]]).int().view(torch.float32)
INT1 = torch.zeros(1, dtype=torch.uint8).view(torch.int1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((1, True), (1, 1.0), (0.0, -0.0), (float("nan"), 0.0), ((1,), [1]), ([1], [1, 1])),
        *(({1}, {True}), ({1}, frozenset({1})), (1j, complex(-0.0, 1)), ("a", np.str_("a"))),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        *((range(0), range(0, 0, 2)), (slice(1), slice(1.0)), (torch.Size([1]), (1,))),
        (np.int32(1), np.int64(1)),
        (np.array([1]), np.array([1.0])),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([[1]]), np.array([1])),
        (np.array([1, "a"], object), np.array([1.0, "a"], object)),
        (np.zeros(1, [("a", "i4")]), np.ones(1, [("a", "i4")])),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2)),
        (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
        (JAGGED, OTHER_ROWS),
        (JAGGED, torch.ones(2, 2)),
        (nest((2, 1), (2, 2)), nest((1, 2), (2, 2))),
        (nest((0, 2)), nest((0, 3))),
        (torch.float32, torch.float64),
        (TD, TensorDict({"a": torch.zeros(2)}, [2])),
        (TD, TensorDict({"a": torch.ones(2)}, [])),
        (TD, TensorDict({"b": torch.ones(2)}, [2])),
        (TD, TensorDict({"a": torch.ones(2)}, [2], names=["x"])),
        (NonTensorData("a"), NonTensorData("b")),
        (NonTensorData("a"), NonTensorData("a", batch_size=[2])),
        (NonTensorStack("a", "b"), NonTensorStack("a", "c")),
        (TensorDict.lazy_stack([TD, TD]), TensorDict.lazy_stack([TD, TD], 1)),
        *((NAN, OTHER_NAN), (UnbatchedTensor(NAN), UnbatchedTensor(OTHER_NAN))),
        # Values that Python or torch cannot print.
        *((10**5000, 10**5000 + 1), ({10**5000}, {10**5000 + 1})),
        ({10**5000: {10**5000: [1]}}, {10**5000: {10**5000: [2]}}),
        (NonTensorStack([INT1]), NonTensorStack([INT1], [INT1])),
        (NonTensorData(INT1), NonTensorData(INT1, batch_size=[2])),
        (slice(INT1), slice(None)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_different_values_differ(one, other):
    for left, right in ((one, other), (other, one)):
        assert_same(left, left)
        assert first_difference(left, left) is None
        assert not is_same(left, right)
        with pytest.raises(AssertionError, match=r"^\$"):
            assert_same(left, right)
        assert str(first_difference(left, right))


DTYPES = sorted({value for value in vars(torch).values() if type(value) is torch.dtype}, key=str)


def two_cells(dtype, last):
    """All bits are 0, but those of the last cell's first byte are `last`."""
    data = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8)
    data[dtype.itemsize] = last
    return data.view(dtype)


def two_rows(cells):
    return torch.nested.nested_tensor_from_jagged(cells, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [torch.Tensor.detach, two_rows, UnbatchedTensor])
def test_cells_of_every_dtype_are_compared(make, dtype):
    """Torch can neither print nor copy some of them, such as int1."""
    one, same, other = (make(two_cells(dtype, last)) for last in (0, 0, 1))
    assert is_same(one, same)
    assert not is_same(one, other)
    assert not is_same(other, one)
    with pytest.raises(AssertionError, match=r"^\$.*: .*, expected "):
        assert_same(one, other)
    assert first_difference(one, same) is None
    found = first_difference(one, other)
    assert found.what == "value"
    assert found.left != found.right


def test_strategies_reach_the_corners():
    for strategy, wanted in (
        (jagged_batches(), lambda b: len(b.lengths) == 0),
        (jagged_batches(), lambda b: len(b.lengths) > 1 and 0 in b.lengths),
        (jagged_batches(), lambda b: b.width > max(b.lengths.tolist(), default=99)),
        (jagged_batches(), lambda b: "message" in b.fields and len(b.lengths) > 0),
        (tensors(), lambda t: not t.is_contiguous()),
        (tensors(), lambda t: t.numel() > 1 and 0 in t.stride()),
        (torch_dtypes(), lambda d: d.itemsize == 16),
        (tensordicts(), lambda t: any(isinstance(v, torch.nn.Parameter) for v in t.values())),
        (trees(), lambda v: isinstance(v, NonTensorData)),
    ):
        find(strategy, wanted)


def test_comparisons_need_no_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    module = runpy.run_path(testing.__file__)
    assert module["is_same"]({"a": JAGGED}, {"a": JAGGED})
    assert not module["is_same"]({"a": JAGGED}, {"a": OTHER_ROWS})
    text = "the strategies of jagcodec.testing need hypothesis: pip install"
    with pytest.raises(ModuleNotFoundError, match=text):
        module["jagged_batches"]()
