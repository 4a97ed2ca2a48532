"""How tensordict stores Python objects: the only import of private tensordict.

All other files see plain lists of rows. tensordict 0.10 to 0.15 stores a Python object as a
`NonTensorData` of its batch's size, and a list of objects as a `NonTensorStack`. An object array
in a TensorDict becomes one `NonTensorData` around the whole array. A tensorclass has a TensorDict
of its fields, and a dict of the fields that a TensorDict cannot hold.

`rows_of_leaf` and `objects_of_leaf` read leaves; `leaf_of_rows` and `leaf_of_array` make them. Then
come the stack of payloads, which these use, and tensorclasses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensordict
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    UnbatchedTensor,
    is_tensorclass,
)

from jagcodec._compiling import untraced
from jagcodec._dependencies import check_attributes, private_names
from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.arrays import is_numeric, object_array
from jagcodec.memory.tensor_bytes import array_tensor

_TESTED = "0.15.3"

with private_names("tensordict", tested=_TESTED):
    from tensordict._lazy import _CustomOpTensorDict
    from tensordict._td import _SubTensorDict
    from tensordict.tensorclass import NonTensorDataBase as NonTensorDataBase  # for others, too
    from tensordict.utils import LinkedList

    _new_tensordict: Any = TensorDict._new_unsafe
    # Attributes that are read later.
    _MODEL_MEMBER = NonTensorData(None)
    check_attributes(_MODEL_MEMBER, "_non_tensordict", "_tensordict")
    check_attributes(vars(_MODEL_MEMBER)["_tensordict"], "_tensordict")
    _MODEL_STACK = NonTensorStack(_MODEL_MEMBER)
    check_attributes(_MODEL_STACK, "_batch_size", "tensordicts")
    check_attributes(LazyStackedTensorDict, "_td_dim_name")

TENSORDICT_TYPES = (TensorDict, TensorDictParams, PersistentTensorDict, _SubTensorDict)
"""The types that hold leaves by name, with a batch size."""

LAZY_VIEW: type = _CustomOpTensorDict
"""The type that `squeeze` and similar methods return if views of TensorDicts are lazy."""

LIST_TYPES: tuple[type, ...] = (list, LinkedList)
"""The types that `NonTensorStack.tolist` and similar methods return for a list."""


@untraced
def unwrap_wire_stripped_payload(item: Any) -> Any:
    """The Python object of one non-tensor row.

    Args:
        item: Anything.

    Returns:
        The payload of a `NonTensorData`; None for exactly an empty ``TensorDict({},
        batch_size=[])``, which encoders leave if they strip payloads; any other
        item unchanged. Nothing is copied.

    Example:
        >>> from tensordict import NonTensorData, TensorDict
        >>> from jagcodec import unwrap_wire_stripped_payload
        >>> unwrap_wire_stripped_payload(NonTensorData({"role": "user"}))
        {'role': 'user'}
        >>> unwrap_wire_stripped_payload(TensorDict({}, batch_size=[])) is None
        True
        >>> unwrap_wire_stripped_payload("as it is")
        'as it is'
    """
    if isinstance(item, NonTensorData):
        return item.data
    if type(item) is TensorDict and item.batch_size == torch.Size([]) and not item.keys():
        return None
    return item


def is_non_tensor(leaf: Any) -> bool:
    """Whether a leaf of a TensorDict holds Python objects."""
    return isinstance(leaf, (NonTensorDataBase, NonTensorStack))


def is_stack(leaf: Any) -> bool:
    """Whether a leaf of a TensorDict is a stack: a Python object for each row."""
    return isinstance(leaf, NonTensorStack)


def is_leaf(value: Any) -> bool:
    """Whether a TensorDict can hold the value under a name."""
    return isinstance(value, (torch.Tensor, TensorDictBase)) or is_tensorclass(value)


def sizes_of_batch(leaf: Any) -> list[int]:
    """The batch size of a batch, or of a leaf that holds Python objects."""
    sizes = [*leaf.batch_size]
    if sizes and isinstance(leaf, LazyStackedTensorDict) and leaf.stack_dim == 0:
        sizes[0] = len(leaf.tensordicts)  # the caller may have changed this list
    return sizes


def is_nested_batch(leaf: Any) -> bool:
    """Whether a leaf of a TensorDict is itself a batch: a TensorDict or a tensorclass."""
    if isinstance(leaf, (list, tuple, torch.Tensor, UnbatchedTensor)) or is_non_tensor(leaf):
        return False
    return is_leaf(leaf)


def rows_of_leaf(leaf: Any, rows: int) -> list[Any]:
    """The Python objects of a leaf, one per row. An object of the whole batch is in each row."""
    if isinstance(leaf, NonTensorStack):
        payloads = payloads_of_stack(leaf)
        if payloads is not None:
            return payloads
        return [unwrap_wire_stripped_payload(item) for item in leaf.tolist()]
    array = array_of_leaf(leaf)
    return [unwrap_wire_stripped_payload(leaf)] * rows if array is None else list(array)


def objects_of_leaf(leaf: Any) -> npt.NDArray[Any]:
    """The Python objects of a non-tensor leaf (N, ...) as an array with one item per row."""
    array = array_of_leaf(leaf)
    return object_array(rows_of_leaf(leaf, leaf.batch_size[0])) if array is None else array


def array_of_leaf(leaf: Any) -> npt.NDArray[Any] | None:
    """The array (N, ...) with one item per row of a leaf; None if the leaf has no such array.

    A TensorDict turns an array of numbers into a tensor, and puts any other array into such a
    leaf. So an array of numbers in a leaf belongs to the whole batch.
    """
    array = leaf.data if isinstance(leaf, NonTensorData) else None
    if not isinstance(array, np.ndarray) or is_numeric(array):
        return None
    sizes = leaf.batch_size
    return array if len(sizes) and array.shape[: len(sizes)] == sizes else None


def leaf_of_array(array: npt.NDArray[Any]) -> Any:
    """An array (N, ...) as a leaf; TypeError for numbers of a dtype that torch lacks."""
    if is_numeric(array):
        return array_tensor(array)
    if array.dtype == object and array.ndim == 1:
        return leaf_of_rows(list(array))
    return NonTensorData(array, batch_size=[len(array)])


def leaf_of_rows(items: Sequence[Any]) -> Any:
    """N Python objects as a leaf with one row each."""
    if not items:
        # A stack without members has no batch dim.
        return NonTensorData(np.empty(0, dtype=object), batch_size=[0])
    return stack_of_payloads(payloads_of_rows(items))


def payloads_of_rows(rows: Sequence[Any], path: str = "objects") -> list[Any]:
    """The objects of rows, without the `NonTensorData` around some of them."""
    if not _PLAIN.issuperset(map(type, rows)):
        for i, row in enumerate(rows):
            if isinstance(row, NonTensorStack):
                detail = "expected an object, found a NonTensorStack; pass its .tolist()"
                raise ArgumentTypeError("bad_type", f"{path}, row {i}", detail)
        # A payload that is a NonTensorData would give the stack its own batch size.
        rows = [row.data if isinstance(row, NonTensorDataBase) else row for row in rows]
    return list(rows)


def stack_of_payloads(payloads: Sequence[Any]) -> NonTensorStack:
    """A flat `NonTensorStack` of the payloads themselves, even if they are TensorDicts."""
    if not _PLAIN.issuperset(map(type, payloads)):
        return NonTensorStack(*[NonTensorData(payload) for payload in payloads])
    # Avoid the constructors: they inspect each payload, for 10 microseconds.
    stack = object.__new__(NonTensorStack)
    size = torch.Size((len(payloads),))
    stack.__dict__.update(_STACK, tensordicts=list(_members(payloads)), _batch_size=size)
    return stack


_STACK = vars(_MODEL_STACK)
"""The attributes of a flat stack other than its members and its size."""

# The types of payloads that the constructor of NonTensorData stores without inspecting them.
_PLAIN = frozenset((dict, list, tuple, str, bytes, int, float, bool, type(None)))


def _members(payloads: Iterable[Any]) -> Iterator[NonTensorData]:
    """A ``NonTensorData(payload)`` for each, made in a twentieth of its constructor's time."""
    # Set attributes one by one: asking for `__dict__` makes the object slow to garbage-collect.
    model = vars(_MODEL_MEMBER)
    data, empty = model["_non_tensordict"], vars(model["_tensordict"])
    entries = type(empty["_tensordict"])
    inner_attributes = [(name, value) for name, value in empty.items() if name != "_tensordict"]
    member_attributes = [
        (name, value) for name, value in model.items() if not name.endswith("_tensordict")
    ]
    new, put = object.__new__, object.__setattr__
    for payload in payloads:
        inner, member = new(TensorDict), new(NonTensorData)
        for name, value in inner_attributes:
            put(inner, name, value)
        put(inner, "_tensordict", entries())
        for name, value in member_attributes:
            put(member, name, value)
        put(member, "_tensordict", inner)
        put(member, "_non_tensordict", {**data, "data": payload})
        yield member


def batch_of(leaves: dict[Any, Any], rows: int) -> TensorDict:
    """A TensorDict (N,) of leaves of N rows, without the constructor's check of their shapes."""
    batch: TensorDict = _new_tensordict(leaves, batch_size=torch.Size((rows,)), nested=False)
    return batch


def tensordict_of_view(view: TensorDictBase) -> TensorDict:
    """The contents of a lazy view (`LAZY_VIEW`); RuntimeError if rows have different shapes."""
    names = view.names if any(name is not None for name in view.names) else None
    return TensorDict(dict(view.items()), batch_size=view.batch_size, names=names)


def stack_dim_name(stack: Any) -> str | None:
    """The name of the dim that a lazy stack stacks along; its members are not read."""
    name: str | None = stack._td_dim_name
    return name


def payloads_of_stack(stack: NonTensorStack) -> list[Any] | None:
    """The payloads of a flat stack of `NonTensorData`; None for any other stack."""
    members = stack.tensordicts
    if stack.batch_dims != 1 or any(type(member) is not NonTensorData for member in members):
        return None
    # Read the dict: tensordict looks attributes up in Python, which takes 5 microseconds.
    return [vars(member)["_non_tensordict"]["data"] for member in members]


# --- tensorclasses -----------------------------------------------------------------------------


def fields_of(value: Any) -> tuple[TensorDictBase, dict[str, Any]]:
    """The fields of a tensorclass: a TensorDict, and a dict of all others that are not None."""
    attributes = vars(value)
    others = attributes["_non_tensordict"] or {}
    return attributes["_tensordict"], {
        key: item for key, item in others.items() if item is not None
    }


def tensorclass_of(cls: Any, fields: TensorDictBase, others: Mapping[str, Any]) -> Any:
    """The tensorclass of these fields, made without calling its `__post_init__` again."""
    names = set(cls.__expected_keys__)
    in_tensors = set(fields.keys())
    if not names >= in_tensors | others.keys() or in_tensors & others.keys():
        raise ValueError(
            f"expected the fields {sorted(names)} once, found {[*in_tensors, *others]}"
        )
    rest = dict(others)
    if _NONE_IS_STORED:
        rest |= dict.fromkeys(names - in_tensors - others.keys())
    value = object.__new__(cls)
    vars(value).update(_tensordict=fields, _non_tensordict=rest, _is_initialized=True)
    return value


def _is_before(version: str, major: int, minor: int) -> bool:
    """Whether a version, which may be one of a candidate ("0.15rc1"), comes before another."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) < (major, minor)


# Since 0.15, tensordict stores a field that is None in neither of the two.
_NONE_IS_STORED = _is_before(str(tensordict.__version__), 0, 15)


def source_of(value: Any) -> TensorDictBase:
    """The TensorDict inside a `TypedTensorDict`."""
    with private_names("tensordict", tested=_TESTED):  # no cheap probe has this attribute
        source: TensorDictBase = value._source
    return source


def unbatched_parts(leaf: Any) -> tuple[torch.Size | None, torch.Tensor]:
    """The batch size of an `UnbatchedTensor`, None if it was given none, and the plain tensor."""
    size = vars(leaf).get("_batch_size")
    if not isinstance(leaf, torch.Tensor):  # below 0.12 the type is a tensorclass
        return size, vars(leaf)["_tensordict"].get("data")
    inner = getattr(leaf, "_data", None)
    if isinstance(inner, torch.Tensor) and type(inner) is not UnbatchedTensor:
        return size, inner
    return size, leaf.as_subclass(torch.Tensor)


def unbatched_of(size: torch.Size | None, tensor: torch.Tensor) -> Any:
    """An `UnbatchedTensor`: a tensor that belongs to the whole batch."""
    make: Any = UnbatchedTensor
    leaf = make(tensor)
    if size is not None:
        leaf.batch_size = size
    return leaf
