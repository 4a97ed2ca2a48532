"""Odd values: what callers pass by mistake, and objects that lie about themselves."""

import array
import datetime
import decimal
import enum
import fractions
import pathlib
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from jagcodec import BatchedDataDict, Limits, encode, materialize, open_wire, to_blob
from jagcodec.types import FieldSchema, PackedColumn
from tests.helpers import nested

# --- objects -----------------------------------------------------------------------------------


class OwnError(Exception):
    """What the caller's own object raises."""


def raises(*_, **__):
    raise OwnError


class Color(enum.Enum):
    RED = "right"


class Number(int):
    pass


class Text(str):
    pass


class Hostile:
    """An object of which nothing can be asked."""

    __repr__ = __str__ = __bool__ = __len__ = __iter__ = __eq__ = __index__ = raises
    __float__ = __getitem__ = __contains__ = __call__ = __fspath__ = __array__ = raises
    __hash__ = None  # type: ignore[assignment]


class Endlessly(BaseException):
    """Somebody asks for all items of `Endless`; nothing catches this."""


class Endless:
    """An object with an item at every index, as a NonTensorData of tensordict 0.10 is."""

    def __getitem__(self, index):
        if isinstance(index, int) and index > 1000:
            raise Endlessly
        return self


class EndlessWithLength(Endless):
    """What numpy takes for a sequence, and reads to its end."""

    def __len__(self):
        return 2


class NoRepr:
    __repr__ = raises


class LongList(list):
    """A list that says it has 2**62 items. `torch.device` ends the process by it."""

    def __len__(self):
        return 2**62


class ShortList(list):
    """A list that says it has nothing."""

    def __len__(self):
        return 0


class BadList(list):
    __iter__ = raises


class OtherList(list):
    """A list that has other items than its own when it is iterated."""

    def __iter__(self):
        return iter([1, [2], None])


class LongDict(dict):
    def __len__(self):
        return 2**62


class BadDict(dict):
    items = keys = __iter__ = raises


class LyingDict(dict):
    def items(self):
        return [1, 2]


class AnyMapping(Mapping):
    def __getitem__(self, key):
        return {"ids": 1}[key]

    def __iter__(self):
        return iter(["ids"])

    def __len__(self):
        return 1


class BadMapping(AnyMapping):
    __iter__ = raises


class MissingMapping(AnyMapping):
    """A mapping that lacks a key that it lists."""

    def __iter__(self):
        return iter(["ids", "no such"])


class AnySequence(Sequence):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index > 1:
            raise IndexError
        return ("ids", 1)[index]


class Equal:
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


class Unequal:
    """Compared like an array."""

    def __eq__(self, other):
        return np.array([True, False])

    __hash__ = object.__hash__


# --- tensors and arrays ------------------------------------------------------------------------


class OwnTensor(torch.Tensor):
    """A subclass that adds nothing."""


class OwnArray(np.ndarray):
    """A subclass that adds nothing."""


def own(tensor):
    return tensor.as_subclass(OwnTensor)


def fake(*shape):
    with FakeTensorMode():
        return torch.empty(*shape)


def masked(data):
    tensor = torch.tensor(data)
    return masked_tensor(tensor, torch.ones_like(tensor, dtype=torch.bool))


def freed(tensor):
    """A tensor whose storage was freed, as FSDP does it with parameters."""
    made = tensor.clone()
    made.untyped_storage().resize_(0)
    return made


def quantised():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def batch():
    return TensorDict({"ids": nested([[5, 6], [7]]), "reward": torch.ones(2)}, [2])


def objects(*items):
    made = np.empty(len(items), object)
    made[:] = items
    return made


LONG = 10**5000
HUGE = np.broadcast_to(np.array(1), (2, 2**40))


# --- values ------------------------------------------------------------------------------------


def python_values() -> list[Any]:
    return [
        *(None, True, False, 0, 1, 2, 3, -1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**64), LONG, -LONG),
        *(0.0, 0.5, -1.5, 2.0, float("nan"), float("inf"), 1e300, 1j, Number(1), Color.RED),
        *("", "ids", "x", "right", "zstd", "no such", "\ud800", "a\0b", "x" * 10_000, Text("ids")),
        *("cpu", "meta", "cuda", "cuda:99", "cpu:-1", b"", b"ids", bytearray(2), memoryview(b"ab")),
        *((), [], {}, set(), frozenset(["ids"]), range(0), range(2), range(5, 0, -2), [0], [1, 2]),
        *([True, False], [None], [None, None], [[1], [1, 2]], [[1, 2], [3, 4]], ["ids"], ("ids",)),
        *(["ids", "ids"], [("ids",)], [["ids"]], [{}], [{"ids": 1}], [LONG], [LONG, 1], [0.5, 1]),
        *(["ids", 1], ("zstd", 1), ("zstd", 99), ("zstd", LONG), ["zstd", 1], [object()], [b""]),
        *([-1, 1], [2**63, 2**63], [2**62, 2**62], ["x", None], [(), ()], [float("nan")] * 2),
        *({"ids": 1}, {"ids": None}, {"ids": "reward"}, {"ids": "right"}, {"reward": [1, 2]}),
        *({1: 2}, {None: None}, {("ids",): 1}, {"ids": LONG}, {"ids": [1, 2]}, {"x": object()}),
        *({"ids": NoRepr()}, {NoRepr(): 1}, {"ids": {"ids": 1}}, [NoRepr()], [NoRepr(), NoRepr()]),
        *(slice(None), slice(0, 2, 0), slice("a", None), slice(2**70), slice(None, None, -1)),
        *(..., NotImplemented, object(), object, int, len, raises, lambda: None, lambda *a: a),
        *(
            array,
            Hostile(),
            Hostile,
            NoRepr(),
            Endless(),
            EndlessWithLength(),
            Equal(),
            Unequal(),
            OwnError(),
            OwnError,
        ),
        *(LongList([1, 2]), ShortList([1, 2]), BadList([1]), OtherList([1]), LongList(["ids"])),
        *(LongDict(ids=1), BadDict(ids=1), LyingDict(ids=1), AnyMapping(), BadMapping()),
        *(MissingMapping(), AnySequence(), UserDict(ids=1), OrderedDict(ids=1), Counter("ab")),
        *(defaultdict(list, {"ids": [1]}), array.array("q", [1, 2]), decimal.Decimal(1)),
        *(fractions.Fraction(1, 2), datetime.datetime(2026, 1, 2), datetime.timedelta(1)),
        *(pathlib.Path("/no/such"), "/no/such/file", "/", pathlib.Path("/dev/null"), Limits()),
    ]


def array_values() -> list[Any]:
    return [
        *map(np.array, (1, -1, 0.5, True, [], [1], [1, 2], [-1, 0], [0.5, 1.5], [True, False])),
        *map(np.array, ([[1, 2], [3, 4]], ["ids"], ["ids", "reward"], "ids", "right", b"x", [1j])),
        *(np.array([], bool), np.array([[], []]), np.zeros((0, 2)), np.array([2**64 - 1, 0], "u8")),
        *(np.zeros((2, 0)), np.array([1, 2], ">i8"), np.ones(2, "g"), np.ones(2, "f2"), HUGE),
        *(np.array([None, None]), np.array(["ids", 1], object), objects([1], [2]), objects()),
        *(np.zeros(2, "i4,f8"), np.array(["2026-01-01"] * 2, "M8[D]"), np.ma.masked_array([1, 2])),
        *(np.matrix([[1, 2]]), np.zeros(1, "i4,f8").view(np.recarray), np.ones(2).view(OwnArray)),
        *(np.int64(1), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True), np.float64(0.5)),
        *(np.str_("ids"), np.bytes_(b"x"), np.datetime64("2026-01-01"), np.void(b"x")),
    ]


def tensor_values() -> list[Any]:
    complex_ones = torch.ones(2, dtype=torch.complex64)
    return [
        *map(torch.tensor, (1, -1, 0.5, True, [], [1], [1, 2], [-1, 0], [0.5, 1.5], [True, False])),
        *map(torch.tensor, ([[1, 2], [3, 4]], [[1.0, 2], [3, 4]], 1j, [[True, False]] * 2)),
        *(torch.empty(0, dtype=torch.int64), torch.empty(2, 0), torch.empty(0, 2)),
        *(nested([[1], [2, 3]]), nested([[1, 1], [1]]), nested([[0.5], [1]], torch.float32)),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        *(torch.empty(2, device="meta"), torch.tensor(1, device="meta")),
        *(complex_ones.conj(), complex_ones.conj().imag),
        *(torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.ones(2).to_sparse()),
        *(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float8_e5m2), quantised()),
        *(torch.ones(2, dtype=torch.bfloat16), torch.tensor([2**63, 1], dtype=torch.uint64)),
        *(torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 3))),
        *(own(torch.tensor([1, 2])), own(torch.tensor(1)), own(torch.ones(2, 3))),
        *(fake(2), fake(2, 3), torch.ones(2, 3)),
        *(masked([1, 2]), masked([[1.0, 2], [3, 4]]), torch.nn.parameter.UninitializedParameter()),
        *(torch.ones(1).expand(2), torch.ones(2, 2).t(), torch._efficientzerotensor((2,))),
        *(torch.ones(2, 2).to_mkldnn(), torch.empty(2, 2**40, device="meta"), freed(torch.ones(2))),
        *(torch.device("cpu"), torch.device("cuda"), torch.device("meta"), torch.float32),
        *(torch.strided, torch.jagged, torch.Size([2]), torch.finfo(torch.float32), torch.qint8),
    ]


def batch_values() -> list[Any]:
    frames, rows = encode(batch()), BatchedDataDict(reward=torch.ones(2))
    return [
        *(batch(), TensorDict({}, []), TensorDict({}, [2]), TensorDict({"ids": 1}, [])),
        *(LazyStackedTensorDict(TensorDict({}, []), TensorDict({}, [])), NonTensorData("ids")),
        *(NonTensorData("ids", batch_size=[2]), NonTensorStack("ids", "x"), rows),
        *(BatchedDataDict(), frames, [bytes(frames[0])], to_blob(frames), open_wire(frames)),
        *(open_wire(frames).rows([0]), open_wire(frames)["ids"], encode(3), [batch(), batch()]),
        *([frames, frames], [rows, open_wire(frames)], materialize(batch(), "packed")["ids"]),
        *({"ids": torch.ones(2)}, {"ids": torch.ones(2), "x": torch.ones(3)}, {"x": [1, 2]}),
        *({"reward": NonTensorStack("a", "b")}, {"reward": batch()}, {"ids": nested([[1], [2]])}),
        *(open_wire(frames).schema, {"ids": torch.float32}, {"ids": object}, {"ids": "int64"}),
        *({"ids": FieldSchema("jagged", None, 5)}, {"ids": FieldSchema("tensor", "x", (2,))}),  # type: ignore[arg-type]
        *({"ids": FieldSchema("jagged", torch.int64, (2,))}, {"ids": FieldSchema(1, 2, 3)}),  # type: ignore[arg-type]
        *(PackedColumn(None, None, None, None), {"ids": PackedColumn(1, [0, 1], 1, None)}),  # type: ignore[arg-type]
        {"ids": PackedColumn(torch.ones(2), torch.ones(2), 1, torch.ones(2))},
    ]


FRESH: list[Callable[[], Any]] = [
    lambda: iter(()),
    lambda: iter(["ids"]),
    lambda: iter([1, 0]),
    lambda: (each for each in [batch(), batch()]),
    lambda: map(raises, [1]),
    lambda: zip([1], [2], strict=True),
]
"""Values that are used up, and so made anew each time."""
