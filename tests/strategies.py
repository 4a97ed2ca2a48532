"""Hypothesis strategies of all values that `encode` accepts; those of batches are the library's."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec.memory.arrays import object_array
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES
from jagcodec.rows.non_tensor import stack_of_payloads
from jagcodec.testing import cells, jagged_tensors, tensors
from jagcodec.wire.spec import TORCH_ITEMSIZES
from tests.helpers import nested

Draw = st.DrawFn
Strategy = st.SearchStrategy


def torch_dtypes() -> Strategy[torch.dtype]:
    """Every torch dtype of the wire format that the installed torch has."""
    names = [name for name in TORCH_ITEMSIZES if hasattr(torch, name)]
    return st.sampled_from([getattr(torch, name) for name in names])


def lengths_in(width: int, rows: int) -> Strategy[list[int]]:
    """`rows` row lengths of 0 to `width`."""
    return st.lists(st.integers(0, width), min_size=rows, max_size=rows)


def whole_numbers() -> Strategy[int]:
    """Ints, and often those next to a power of two."""
    powers = st.tuples(st.sampled_from([1, -1]), st.integers(0, 70), st.integers(-1, 1))
    near = powers.map(lambda parts: parts[0] * (1 << parts[1]) + parts[2])
    return st.integers(-(2**70), 2**70) | st.integers(-300, 300) | near


@st.composite
def indices(draw: Draw, rows: int) -> tuple[Any, list[int]]:
    """An index, and the rows that it stands for."""
    kinds: list[str] = ["slice", "booleans", "empty", *(["integers", "one"] if rows else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "slice":
        index = draw(st.slices(rows))
        return index, list(range(rows))[index]
    if kind == "empty":
        return [], []
    if kind == "one":
        i = draw(st.integers(-rows, rows - 1))
        return i, [i % rows]
    form: Any = draw(st.sampled_from([np.array, torch.tensor]))
    if kind == "booleans":
        wanted = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        dtype = bool if form is np.array else torch.bool
        return form(wanted, dtype=dtype), [i for i, chosen in enumerate(wanted) if chosen]
    chosen = draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=6))
    return (list if draw(st.booleans()) else form)(chosen), [i % rows for i in chosen]


_text = st.text(
    alphabet=st.characters(codec="utf-8") | st.sampled_from("\ud800\udfff\x00"), max_size=6
)
_integers = st.integers() | st.integers(-(2**200), 2**200)
_scalars: Strategy[Any] = (
    st.none()
    | st.booleans()
    | _integers
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | _text
    | st.binary(max_size=8)
)
_torch_values = (
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    | torch_dtypes()
    | st.sampled_from(["cpu", "cuda", "cuda:1", "meta"]).map(torch.device)
)
_ranges = st.builds(range, _integers, _integers, st.integers(1, 2**70) | st.integers(-(2**70), -1))
_hashable: Strategy[Any] = st.recursive(
    _scalars.filter(lambda value: value == value) | _ranges | torch_dtypes(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)

_NUMPY_DTYPES = [
    *("?", "i1", "u1", "<i2", ">i2", "<u4", ">i8", "<u8", "<f2", "<f4", ">f8", "<c8", ">c16"),
    *("S3", "<U2", ">U2", "V3", "S0", "<M8[ns]", "<M8[25s]", ">m8[D]", "<M8", "<m8"),
]


@st.composite
def arrays(draw: Draw) -> Any:
    """A numpy array: numbers, strings, times, objects, in any order in memory."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    if draw(st.booleans()):
        array = np.empty(shape, dtype=object)
        for index in np.ndindex(shape):
            array[index] = draw(_scalars)
        return array
    dtype = np.dtype(draw(st.sampled_from(_NUMPY_DTYPES)))
    array = np.zeros(shape, dtype=dtype)
    if array.nbytes and dtype.kind not in ("b", "U"):
        data = draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
        array = np.frombuffer(bytearray(data), dtype=array.dtype).reshape(array.shape)
    elif dtype.kind == "U" and array.size:
        array[...] = draw(st.text(alphabet="aß\U0001f600", max_size=2))
    elif array.size:
        array[...] = 1
    return array.T if draw(st.booleans()) else array


@st.composite
def array_rows(draw: Draw, rows: int | None = None) -> list[Any]:
    """Rows that are arrays, or tensors, of one dtype and number of dims, or None; one is not."""
    rows = draw(st.integers(1, 5)) if rows is None else rows
    of_arrays, rank = draw(st.booleans()), draw(st.integers(0, 3))
    dtypes = st.sampled_from([*NUMPY_DTYPES]) if of_arrays else torch_dtypes()
    dtype = draw(dtypes)
    shape = st.lists(st.integers(0, 3), min_size=rank, max_size=rank).map(tuple)
    made = [None if draw(st.booleans()) else cells(draw, draw(shape), dtype) for _ in range(rows)]
    made[draw(st.integers(0, rows - 1))] = cells(draw, draw(shape), dtype)
    made = [row.mT if row is not None and rank > 1 and draw(st.booleans()) else row for row in made]
    return [None if row is None else row.numpy() if of_arrays else row for row in made]


@st.composite
def numpy_scalars(draw: Draw) -> Any:
    """A numpy scalar of any type."""
    if draw(st.booleans()):
        return draw(
            _text.map(np.str_)
            | st.binary(max_size=4).map(np.bytes_)
            | st.integers(-9, 9).map(np.int16)
            | st.floats().map(np.float64)
            | st.just(np.datetime64("2026-11-20T12:00", "m"))
            | st.sampled_from([-(2**63), 5]).map(lambda n: np.array(n).view("m8")[()])  # of no unit
            | st.binary(min_size=2, max_size=2).map(np.void)
        )
    array = draw(arrays().filter(lambda a: a.size and a.dtype.kind != "O"))
    return array.reshape(-1)[0]


@st.composite
def sparse_tensors(draw: Draw) -> torch.Tensor:
    """A 4 x 4 COO tensor."""
    dense = torch.tensor(
        draw(st.lists(st.sampled_from([0.0, 1.5]), min_size=16, max_size=16))
    ).view(4, 4)
    kind = draw(st.sampled_from(["coo", "hybrid", "uncoalesced"]))
    if kind == "coo":
        return dense.to_sparse()
    if kind == "hybrid":
        return dense.to_sparse(1)
    twice = torch.tensor([[1, 1, 0], [2, 2, 3]])
    return torch.sparse_coo_tensor(twice, torch.tensor([1, 2, 3]), (4, 4), check_invariants=True)


@st.composite
def strided_nested_tensors(draw: Draw) -> torch.Tensor:
    """A `torch.strided` nested tensor of 0 to 3 components."""
    dims = draw(st.integers(1, 2))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16]))
    shape = st.lists(st.integers(0, 3), min_size=dims, max_size=dims)
    shapes = draw(st.lists(shape, max_size=3))
    rows = [cells(draw, tuple(shape), dtype) for shape in shapes]
    return torch.nested.nested_tensor(rows, dtype=dtype, layout=torch.strided)


@st.composite
def tensors_over_one_memory(draw: Draw) -> Any:
    """A list or dict of tensors over one memory, with storages of their own or with shared ones."""
    memory = bytearray(draw(st.sampled_from([64, 40_000])))
    memory[:64] = range(64)
    array, shared = np.frombuffer(memory, np.uint8), torch.frombuffer(memory, dtype=torch.uint8)
    made: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 5))):
        # Few places, so that many begin or end at the same one.
        start, cells = 8 * draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 2, 5, 6]))
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
        size = cells * dtype.itemsize
        way = draw(st.sampled_from(["numpy", "frombuffer", "slice", "end"]))
        if way == "numpy":
            tensor = torch.from_numpy(array[start : start + size]).view(dtype)
        elif way == "frombuffer" and cells:
            tensor = torch.frombuffer(memory, dtype=dtype, count=cells, offset=start)
        elif way == "end":
            tensor = shared[start:].view(dtype)
        else:
            tensor = shared[start : start + size].view(dtype)
        if cells == 6 and way != "end":
            tensor = draw(st.sampled_from([tensor, tensor.view(3, 2), tensor.view(2, 3).t()]))
        made.append(tensor)
    return dict(zip("abcde", made, strict=False)) if draw(st.booleans()) else made


@st.composite
def tensordicts(
    draw: Draw, payloads: Strategy[Any] = _scalars, depth: int = 1, lazy: bool = True
) -> TensorDict:
    """A TensorDict of one batch dim with leaves of every kind, nested to `depth`."""
    rows = draw(st.integers(0, 3))
    shapes = st.lists(st.integers(0, 3), max_size=1).map(lambda inner: (rows, *inner))
    leaves = [
        shapes.flatmap(tensors),
        st.builds(torch.nn.Parameter, tensors((rows, 2), torch.float32), st.booleans()),
        jagged_tensors(rows),
        payloads.map(lambda payload: NonTensorData(payload, batch_size=[rows])),
    ]
    if rows:
        items = st.lists(payloads.map(NonTensorData), min_size=rows, max_size=rows)
        leaves.append(items.map(lambda items: NonTensorStack(*items)))
        leaves.append(array_rows(rows).map(lambda items: stack_of_payloads(items)))
    if rows and lazy:

        def member(x: torch.Tensor) -> TensorDict:
            return TensorDict({"x": x, **({"y": torch.ones(1)} if len(x) else {})}, [])

        members = [tensors((j,)).map(member) for j in range(rows)]
        leaves.append(st.tuples(*members).map(lambda members: LazyStackedTensorDict(*members)))
    if depth:
        inner = tensordicts(payloads, depth - 1, lazy)
        leaves.append(inner.filter(lambda td: td.shape[0] == rows))
    columns = draw(st.lists(st.one_of(leaves), max_size=4))
    return TensorDict({f"f{i}": column for i, column in enumerate(columns)}, batch_size=[rows])


def trees(max_leaves: int = 8) -> Strategy[Any]:
    """Any value that can be encoded, arbitrarily nested."""
    leaves = (
        _scalars
        | _ranges
        | _torch_values
        | arrays()
        | array_rows().map(object_array)
        | numpy_scalars()
        | tensors()
        | jagged_tensors()
        | sparse_tensors()
        | strided_nested_tensors()
        | tensordicts()
        | st.binary(min_size=5000, max_size=5001)
    )

    def containers(inner: Strategy[Any]) -> Strategy[Any]:
        return (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(_text, inner, max_size=4)
            | st.dictionaries(_hashable, inner, max_size=4)
            | st.sets(_hashable, max_size=4)
            | st.frozensets(_hashable, max_size=4)
            | st.builds(slice, inner, inner, inner)
            | st.builds(NonTensorData, inner)
            | tensordicts(inner)
        )

    return st.recursive(leaves, containers, max_leaves=max_leaves)


def stdlib_values() -> Strategy[Any]:
    """Values of the types that `register_stdlib_types` names."""
    return st.one_of(
        st.datetimes().map(lambda at: at.replace(fold=0)),
        *(st.dates(), st.timedeltas(), st.uuids(), st.decimals(), st.binary().map(bytearray)),
    )


@st.composite
def repeating_batches(draw: Draw) -> TensorDict:
    """A TensorDict whose columns and rows are often those of others, or begin or end like them."""
    rows = draw(st.integers(1, 6))
    patterns = st.sampled_from([[0] * 4, [1, 2, 3, 4], [5, 5, 9, 9], [0, 1, 0, 1], [7, 6, 5, 4]])
    dtypes = st.sampled_from([torch.int64, torch.uint8, torch.float32, torch.bool, torch.int16])
    made: list[list[list[int]]] = []
    columns: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["copy", "joined", *["new"] * 4]))
        if kind == "new" or not made:
            few = [draw(patterns) * draw(st.integers(0, 3)) for _ in range(draw(st.integers(1, 3)))]
            column = [
                draw(st.sampled_from(few)) + draw(patterns) * draw(st.integers(0, 1))
                for _ in range(rows)
            ]
        else:
            column, other = draw(st.sampled_from(made)), draw(st.sampled_from(made))
            if kind == "joined":
                column = [a + b for a, b in zip(column, other, strict=True)]
        made.append(column)
        form = draw(st.sampled_from(["rectangle", "objects", *["jagged"] * 5]))
        dtype = draw(dtypes)
        if form == "rectangle":
            columns[f"c{i}"] = torch.tensor([[*row, 0][:1] * 3 for row in column]).to(dtype)
        elif form == "objects":
            objects = st.sampled_from([{"row": row} for row in made[0]])
            columns[f"c{i}"] = NonTensorStack(*[draw(objects) for _ in range(rows)])
        else:
            columns[f"c{i}"] = nested(column, dtype)
    return TensorDict(columns, batch_size=[rows])
