# mypy: disable-error-code="call-arg, misc, assignment, type-var, list-item, arg-type, name-match"
"""Values by name, each of which arrives as it was sent, and the classes that some are of."""

import collections
import dataclasses
import enum
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import tensordict
import torch
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from jagcodec import BatchedDataDict, register_type, stack_or_nest
from jagcodec.wire.spec import TORCH_ITEMSIZES
from tests.helpers import make_batch, nested, rollout, rollouts
from tests.wire.forge import nest

try:
    from tensordict import TypedTensorDict
except ImportError:  # since 0.12
    TypedTensorDict = None

Makers = dict[str, Callable[[], Any]]


# --- classes -----------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    GREEN = ("a", 2)


class Mode(str, enum.Enum):  # noqa: UP042
    LEFT = "left"


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


Pair = collections.namedtuple("Pair", "first second")


@register_type
@dataclasses.dataclass(frozen=True)
class Sampling:
    """One whose `__post_init__` must not run on what it has run on."""

    temperature: float
    stop: tuple
    scores: torch.Tensor = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "temperature", self.temperature * 2)


@register_type
@tensorclass
class Turn:
    tokens: torch.Tensor
    before: Any = None
    role: Any = None


@register_type
@tensorclass
class Dialogue:
    tokens: torch.Tensor
    turn: Turn
    anything: Any = None


@register_type
@tensorclass
class Counted:
    """One whose `__post_init__` must not run on what it has run on."""

    counts: torch.Tensor

    def __post_init__(self):
        self.counts = self.counts + 1


@tensorclass
class Stranger:
    """One that is not registered."""

    tokens: torch.Tensor


if TypedTensorDict is not None:

    @register_type
    class Typed(TypedTensorDict):
        ids: torch.Tensor


# --- Python, torch and numpy -------------------------------------------------------------------


PYTHON: Makers = {
    "integers": lambda: [
        10**4000,
        *(s * 2**b + d for b in (0, 31, 63, 64) for s in (1, -1) for d in (0, -1)),
    ],
    "texts": lambda: ["\ud800", "a\0b", "x" * 70_000],
    "bytes": lambda: [b"x" * 5000, b"y" * 70_000],
    "slices": lambda: [slice(None), slice(1, 2, 3), slice([1], "x", None)],
    "reserved_keys": lambda: [
        {key: True, "batch_size": [2]} for key in ("__tq_tensordict__", "jagcodec", "tree", "")
    ],
    "as_deep_as_it_may": lambda: nest(lambda value: [value], 99, []),
}


def every_layout(dtype):
    size = dtype.itemsize
    cells = torch.arange(12 * size, dtype=torch.uint8)
    cells = cells & 1 if dtype == torch.bool else cells
    tensor = cells.view(dtype).view(3, 4)
    return [tensor, tensor.t(), tensor[0, 0], tensor[:, :0], tensor[:, 1:3], dtype]


def jagged(values, offsets, **parts):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), **parts)


def views(*bounds):
    base = torch.arange(200_000)
    return [base[first:last] for first, last in bounds]


TORCH: Makers = {
    name: lambda name=name: every_layout(getattr(torch, name))
    for name in TORCH_ITEMSIZES
    if hasattr(torch, name)
}
TORCH |= {
    "sizes_and_devices": lambda: [torch.Size([2, 0]), torch.device("cuda:1"), torch.device("cpu")],
    "large": lambda: [torch.arange(5000), torch.rand(5000).to(torch.bfloat16), torch.zeros(5000)],
    "rearranged": lambda: [torch.rand(3, 4, 5).permute(2, 0, 1), torch.rand(1, 3).expand(4, 3)],
    "parameter": lambda: [torch.nn.Parameter(torch.ones(2)), torch.ones(2).requires_grad_() * 2],
    "conjugated": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "negated": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
    "odd_booleans": lambda: torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool),
    "sparse": lambda: [torch.eye(4).to_sparse(), torch.eye(4).to_sparse(1)],
    "strided_nested": lambda: torch.nested.as_nested_tensor([torch.ones(2, 2), torch.ones(3, 1)]),
    "jagged": lambda: nested([[1, 2], [], [3]]),
    "jagged_without_rows": lambda: jagged(torch.ones(0), [0]),
    "jagged_in_dim_2": lambda: jagged(torch.rand(2, 5), [0, 2, 5], jagged_dim=2),
    "jagged_in_dim_3": lambda: jagged(torch.rand(2, 1, 5, 3), [0, 2, 2, 5], jagged_dim=3),
    "jagged_of_equal_rows": lambda: stack_or_nest([torch.ones(2)] * 2, always_nest=True),
    "jagged_with_holes": lambda: jagged(
        torch.arange(10.0), [0, 4, 10], lengths=torch.tensor([2, 3])
    ),
    "jagged_by_strided_offsets": lambda: torch.nested.nested_tensor_from_jagged(
        torch.arange(5), torch.tensor([0, 9, 2, 9, 5])[::2]
    ),
    "jagged_amid_slack": lambda: jagged(torch.arange(10.0), [2, 4, 7]),
    "jagged_by_narrow": lambda: torch.nested.narrow(
        *(torch.arange(20.0).view(4, 5), 1, torch.tensor([0, 1, 2, 0]), torch.tensor([2, 3, 1, 5])),
        layout=torch.jagged,
    ),
    "jagged_in_one_group": lambda: [jagged(torch.ones(5, 1 + i), [0, 2, 5]) for i in range(3)],
    "views_that_overlap": lambda: views((0, 5000), (10, 20), (4000, 9000), (7, 7)),
    "views_in_reverse": lambda: views(*[(100 * i, 100 * i + 100) for i in range(50)])[::-1],
    "views_with_gaps": lambda: [row[:10] for row in torch.arange(100_000).view(1000, 100)],
    "more_side_by_side_than_levels": lambda: [(torch.ones(1),), TensorDict({}, [])] * 120,
    "tensors_in_a_list": lambda: [torch.ones(3), torch.ones(3, 2), torch.ones(3).int()],
}


def objects(*cells):
    array = np.empty(len(cells), dtype=object)
    for i, cell in enumerate(cells):
        array[i] = cell
    return array


NUMPY: Makers = {
    "array_of_nothing": lambda: [np.zeros(2, "S0"), np.zeros(2, "V3"), np.zeros((), "q")],
    "array_of_objects": lambda: np.array([[{"a": (1,)}, None], ["x", torch.ones(2)]], dtype=object),
    "large_arrays": lambda: [np.arange(5000), np.arange(5000.0).reshape(50, 100).T],
}

STDLIB: Makers = {
    "OrderedDict": lambda: OrderedDict([("b", 1), ("a", torch.tensor([1])), ((1, 2), 1)]),
    "defaultdict": lambda: [defaultdict(list, a=[1]), defaultdict(None, a=[1])],
    "deque": lambda: [deque([1, {"a": torch.tensor([2])}]), deque()],
    "bytearray": lambda: [bytearray(b"abc"), bytearray(100_000)],
    "datetime": lambda: [
        *(datetime(2026, 1, 2, 3, 4, 5, 6), datetime.min, datetime.max),
        *(datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=timezone.min)),
        datetime(2026, 1, 2, tzinfo=timezone(timedelta(seconds=1, microseconds=5))),
    ],
    "date": lambda: [date(1, 1, 1), date.max],
    "timedelta": lambda: [timedelta(-1, 5, 7), timedelta.max, timedelta.min],
    "UUID": lambda: UUID(int=7),
    "Decimal": lambda: [Decimal("-0.00"), Decimal("sNaN12"), Decimal("1E+1000")],
    "Path": lambda: Path("/a b/c"),
    "enum": lambda: [Color.RED, Color.GREEN, Mode.LEFT, Bits.A, Bits.A | Bits.B, Bits(0)],
    "named_tuple": lambda: [Point(1, torch.tensor([2])), Pair("a", (1,))],
    "as_keys": lambda: {UUID(int=1): {Color.RED, Mode.LEFT}, Point(1, 2): Path("x")},
}


# --- kinds of TensorDict -----------------------------------------------------------------------

SIZE = (4, 3, 2, 1)


def batch(*size):
    size = size or SIZE
    ids = torch.arange(torch.Size(size).numel() * 3).view(*size, 3)
    return TensorDict({"ids": ids, "reward": torch.rand(size)}, batch_size=size)


def stacked(dim) -> Any:
    return torch.stack([batch(), batch()], dim)


def batch_in_batch():
    return batch().set("inner", batch())


def turn(*size, **fields):
    size = size or SIZE
    return Turn(tokens=torch.rand(*size, 2), role="user", batch_size=size, **fields)


def counted(*size):
    return Counted(counts=torch.zeros(size), batch_size=size)


def ragged_turns():
    turns = [Turn(tokens=torch.arange(n), role=str(n), batch_size=[]) for n in (2, 3)]
    return lazy_stack(turns, 0)


def legacy(make):
    """What operations on shapes return where they return lazy views."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with tensordict.set_lazy_legacy(True):
            return make()


def column(value):
    return TensorDict({"column": value}, batch_size=value.batch_size[:1])


def grid_of_objects():
    rows = [torch.stack([NonTensorData((i, j)) for i in range(2)]) for j in range(3)]
    return torch.stack(rows)


def rich():
    """Three rows, with leaves of every kind."""
    lazy = [TensorDict({"v": torch.ones(i)}, []) for i in range(3)]
    rows = [torch.ones(n) for n in (1, 2, 3)]
    return TensorDict(
        {
            "wide": stack_or_nest([torch.arange(2 * n).view(2, n) for n in (1, 3, 2)]),
            "inner": TensorDict({"x": stack_or_nest(rows)}, [3]),
            "names": NonTensorStack("a", {"b": (1,)}, None),
            "objects": np.array(["x", ["y"], 3], dtype=object),
            "note": "for all",
            "lazy": tensordict.LazyStackedTensorDict(*lazy, stack_dim=0),
            "strided": torch.nested.nested_tensor(rows, layout=torch.strided),
            "sparse": torch.eye(3).to_sparse(),
            "flag": torch.tensor([True, False, True]),
        },
        [3],
    )


def sparse_columns():
    """Of dtypes from which torch has no kernel that picks rows; not coalesced."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    indices = torch.tensor([[0, 0, 2, 0], [1, 1, 0, 0]])
    dtypes = {"f": torch.float32, "b": torch.bfloat16, "c": torch.complex128}
    columns = {
        name: torch.sparse_coo_tensor(indices, values.to(dtype), (3, 2), check_invariants=True)
        for name, dtype in dtypes.items()
    }
    return TensorDict(columns, [3])


def unequal_rows():
    members = [
        TensorDict({"a": torch.ones(i), **({"b": torch.ones(1)} if i else {})}, []) for i in (0, 3)
    ]
    return tensordict.LazyStackedTensorDict(*members, stack_dim=0)


def stacks(levels):
    stack = TensorDict({"x": torch.ones(1)}, [])
    for _ in range(levels):
        stack = tensordict.LazyStackedTensorDict(stack, stack_dim=0)
    return stack


# After those with which tensordict tests itself, with the kinds that they lack.
KINDS: Makers = {
    "plain": batch,
    "batch_in_batch": batch_in_batch,
    "empty": lambda: TensorDict({}, batch_size=[]),
    "no_rows": lambda: batch(0, 2),
    "no_rows_of_rows": lambda: TensorDict({"x": torch.ones(0, 3)}, [0, 3]),
    "tensorclass": turn,
    "tensorclass_without_values": lambda: Turn(tokens=None, batch_size=[2]),
    "tensorclass_of_tensorclasses": lambda: Dialogue(
        tokens=torch.rand(2), turn=turn(2), anything=turn(2), batch_size=[2]
    ),
    "tensorclass_of_one_of_its_kind": lambda: turn(before=turn()),
    "tensorclass_with_post_init": lambda: counted(2),
    "column_of_tensorclasses": lambda: column(turn(2, 3)),
    "column_with_post_init": lambda: column(counted(2)),
    "stack": lambda: lazy_stack([batch(4, 3), batch(4, 3)], 2),
    "stack_of_unequal_rows": unequal_rows,
    "stack_of_batches_in_batches": lambda: lazy_stack(list(batch_in_batch().unbind(1)), 1),
    "as_many_stacks_as_there_may_be": lambda: stacks(8),
    "stack_of_stacks": lambda: lazy_stack([lazy_stack([batch(2), batch(2)], 1)] * 2, 0),
    "stack_of_tensorclasses": lambda: lazy_stack([turn(2), turn(2)], 0),
    "stack_around_tensorclasses": lambda: tensordict.LazyStackedTensorDict(turn(2), turn(2)),
    "stack_of_ragged_tensorclasses": ragged_turns,
    "column_of_ragged_tensorclasses": lambda: column(ragged_turns()),
    "stack_with_tensorclasses_inside": lambda: lazy_stack([column(turn(3)) for _ in range(2)], 0),
    "stack_of_tensorclasses_with_post_init": lambda: lazy_stack([counted(3), counted(3)], 0),
    "indexed": lambda: stacked(0)[1],
    "sub": lambda: stacked(0)._get_sub_tensordict(1),
    "sub_of_columns": lambda: stacked(1)._get_sub_tensordict((slice(None), 1)),
    "memory_mapped": lambda: batch().memmap_(),
    "permuted": lambda: batch().permute(2, 0, 3, 1),
    "expanded": lambda: batch().expand(2, *SIZE),
    "lazily_permuted": lambda: legacy(lambda: batch_in_batch().permute(2, 0, 3, 1)),
    "lazily_unsqueezed": lambda: legacy(lambda: batch_in_batch().unsqueeze(-1)),
    "lazily_squeezed": lambda: legacy(lambda: batch_in_batch().squeeze(3)),
    "lazily_viewed": lambda: legacy(lambda: batch_in_batch().view(-1)),
    "lazily_transposed": lambda: legacy(lambda: batch_in_batch().transpose(0, 1)),
    "lazily_squeezed_column": lambda: column(legacy(lambda: batch(2, 1).squeeze(1))),
    "parameters": lambda: tensordict.TensorDictParams(batch()),
    "column_of_parameters": lambda: column(tensordict.TensorDictParams(batch(2))),
    "locked": lambda: batch().lock_(),
    "object": lambda: batch().set_non_tensor("name", "gsm8k"),
    "metadata": lambda: MetaData({"step": 3}, batch_size=[2]),
    "metadata_of_a_tensor": lambda: MetaData(torch.rand(3), batch_size=[]),
    "column_of_metadata": lambda: column(MetaData("x", batch_size=[2])),
    "metadata_in_a_tensorclass": lambda: turn(2, before=MetaData("k", batch_size=[2])),
    "stack_of_metadata": lambda: NonTensorStack(MetaData(1), MetaData(2)),
    "stack_around_metadata": lambda: lazy_stack(
        [TensorDict({"m": MetaData(i)}, batch_size=[]) for i in range(2)], 0
    ),
    "unbatched": lambda: tensordict.UnbatchedTensor(torch.arange(7)),
    "column_of_unbatched": lambda: TensorDict(
        {"u": tensordict.UnbatchedTensor(torch.arange(7)), "a": torch.rand(3)}, batch_size=[3]
    ),
    "grid_of_objects": grid_of_objects,
    "column_of_grids": lambda: column(grid_of_objects()),
    "objects_in_a_grid_without_rows": lambda: NonTensorStack(
        *[NonTensorData(None, batch_size=[0]) for _ in range(2)]
    ),
    "payload_tensorclass": lambda: NonTensorData(turn(2), batch_size=[3]),
    "payload_tensorclasses": lambda: NonTensorStack(NonTensorData(turn(2)), NonTensorData("x")),
    "leaves_of_every_kind": rich,
    "ragged_in_two_dims": lambda: TensorDict(
        {"x": jagged(torch.rand(2, 1, 4), [0, 3, 4, 4], jagged_dim=3), "y": torch.rand(3, 2)},
        [3, 2],
    ),
    "sparse_columns": sparse_columns,
    "strided_grid": lambda: TensorDict(
        {"a": torch.nested.as_nested_tensor([torch.zeros(2, 3), torch.ones(2, 4)])}, [2, 2]
    ),
    "stack_without_members": lambda: tensordict.LazyStackedTensorDict(stack_dim=0),
    "empty_stack_of_objects": lambda: TensorDict({"a": NonTensorStack()}, []),
    "batch": make_batch,
    "large_batch": lambda: make_batch(cells_per_token=100),
    "rollout": rollout,
    "batch_that_repeats": rollouts,
}
if TypedTensorDict is not None:
    KINDS["typed"] = lambda: Typed(ids=torch.arange(6).view(2, 3), batch_size=[2])
    KINDS["column_of_typed"] = lambda: column(KINDS["typed"]())

REGISTERED: Makers = {
    "dataclass": lambda: {"a": [Sampling(0.5, ("x", 1), None)]},
    "batched_data_dict": lambda: BatchedDataDict(ids=nested([[1, 2], [3]]), r=torch.ones(2)),
    "batched_data_dict_of_views": lambda: BatchedDataDict(
        x=views((0, 3), (3, 5), (5, 10)), r=torch.ones(3)
    ),
}


def as_it_arrives(value):
    """A value with every view of a TensorDict replaced by a TensorDict of what it shows."""
    if type(value) is tensordict.LazyStackedTensorDict:
        members = [as_it_arrives(member) for member in value.tensordicts]
        return tensordict.LazyStackedTensorDict(*members, stack_dim=value.stack_dim)
    if TypedTensorDict is not None and isinstance(value, TypedTensorDict):
        return value
    if isinstance(value, tensordict.TensorDictBase) and not isinstance(
        value, tensordict.LazyStackedTensorDict
    ):
        leaves = {key: as_it_arrives(leaf) for key, leaf in value.items()}
        return TensorDict(leaves, batch_size=value.batch_size)
    return value
