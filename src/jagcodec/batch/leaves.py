"""Rows of one column, whatever kind of column it is: choose them, or put batches of them together.

Leaves of a TensorDict and columns of a `BatchedDataDict` alike. What tensordict can do with them
depends on its release (below 0.15 nothing with jagged leaves), so nothing here asks it to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, UnsupportedTypeError
from jagcodec.memory.tensor_bytes import IntArray, as_bytes, cat_bits, from_bytes, take_rows
from jagcodec.ragged.nested import (
    Parts,
    RaggedGroups,
    Seen,
    is_jagged,
    splits_of_lengths,
    take_apart,
)
from jagcodec.ragged.non_tensor import (
    holds_rows,
    is_non_tensor,
    leaf_of_rows,
    object_array,
    payloads_of_stack,
    rows_of_leaf,
)
from jagcodec.ragged.varlen import PackedColumn, Packing, parts_of_packed
from jagcodec.ragged.views import compact_values
from jagcodec.wire.encoder import encode

Chosen: TypeAlias = "range | IntArray"
"""Rows as `choose_rows` gives them: a range is contiguous, of step 1."""

T = TypeVar("T")


class Sharing:
    """What the columns of one result share: offsets, and what packed columns add to them.

    Attributes:
        groups: The raggedness of the result.
        packing: What packed columns of the result share.
        read: Offsets of the source that were read: for `take_apart`, so that a device is waited
            for once per raggedness.
    """

    def __init__(self) -> None:
        self.groups = RaggedGroups()
        self.packing = Packing()
        self.read: Seen = {}


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None for a dict without columns, which has any number of rows.

    Raises:
        ArgumentTypeError: It is no column.
    """
    if isinstance(column, torch.Tensor):
        if column.is_nested or column.dim():
            return int(column.size(0))
    elif isinstance(column, PackedColumn):
        return len(column.cu_seqlens) - 1
    elif isinstance(column, TensorDictBase) or is_non_tensor(column):
        if len(column.batch_size):
            return int(column.batch_size[0])
    elif isinstance(column, np.ndarray):
        if column.ndim:
            return len(column)
    elif isinstance(column, list):
        return len(column)
    elif isinstance(column, dict):
        return row_counts(column, path)
    raise ArgumentTypeError(
        "bad_type",
        path,
        f"expected a column of N rows (a tensor, an array, a list, a PackedColumn, or a dict of "
        f"columns), found {type(column).__name__}; what belongs to the whole batch goes into "
        "meta_info",
    )


def row_counts(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns; None where there are none.

    Raises:
        ArgumentError: They have not all as many rows.
        ArgumentTypeError: One is no column.
    """
    rows: int | None = None
    for name, column in columns.items():
        found = row_count(column, f"{path}[{name!r}]")
        rows = found if rows is None else rows
        if found not in (None, rows):
            raise ArgumentError(
                "row_mismatch",
                f"{path}[{name!r}]",
                f"expected {rows} rows like the columns before it, found {found}",
            )
    return rows


# --- choosing ----------------------------------------------------------------------------------


def select_leaf(leaf: Any, chosen: Chosen, sharing: Sharing, path: str) -> Any:
    """These rows of a leaf or column, in this order.

    A range of a contiguous CPU column aliases it, with a storage of its own over those rows;
    everything else is copied once.

    Raises:
        ArgumentError: Its rows cannot be chosen (CSR and other compressed layouts).
        ArgumentTypeError: It is no column.
    """
    if isinstance(leaf, PackedColumn):
        parts = parts_of_packed(leaf, path)
        values, lengths = _select_parts(parts, chosen)
        return sharing.packing.column(values, splits_of_lengths(lengths), path)
    if isinstance(leaf, torch.Tensor):
        return _select_tensor(leaf, chosen, sharing, path)
    if is_non_tensor(leaf):
        return _select_objects(leaf, chosen)
    if isinstance(leaf, LazyStackedTensorDict):
        if leaf.stack_dim == 0:
            return _lazy_stack([leaf.tensordicts[i] for i in chosen], leaf)
        members = [select_leaf(member, chosen, sharing, path) for member in leaf.tensordicts]
        return _lazy_stack(members, leaf)
    if isinstance(leaf, TensorDictBase):
        leaves = {
            name: select_leaf(inner, chosen, sharing, f"{path}[{name!r}]")
            for name, inner in leaf.items()
        }
        return _tensordict(leaves, len(chosen), leaf)
    if isinstance(leaf, np.ndarray):
        return leaf[chosen.start : chosen.stop] if isinstance(chosen, range) else leaf[chosen]
    if isinstance(leaf, list):
        return [leaf[i] for i in chosen]
    if isinstance(leaf, dict):
        columns = {
            name: select_leaf(inner, chosen, sharing, f"{path}[{name!r}]")
            for name, inner in leaf.items()
        }
        return _dict(columns, leaf)
    row_count(leaf, path)  # says what a column is
    raise ArgumentError(
        "bad_option", path, f"expected rows that can be chosen, found a {type(leaf).__name__}"
    )


def _select_tensor(leaf: torch.Tensor, chosen: Chosen, sharing: Sharing, path: str) -> torch.Tensor:
    if is_jagged(leaf):
        parts = take_apart(leaf, path, detach=False, seen=sharing.read)
        values, lengths = _select_parts(parts, chosen)
        return sharing.groups.of_lengths(lengths).jagged(values, parts.ragged_dim)
    if leaf.is_nested:
        members = leaf.unbind()
        return torch.nested.as_nested_tensor(
            [members[i] for i in chosen],
            dtype=leaf.dtype,
            device=leaf.device,
            layout=torch.strided,
        )
    if leaf.layout is torch.sparse_coo:
        rows = torch.as_tensor(np.asarray(chosen, dtype=np.int64), device=leaf.device)
        return leaf.index_select(0, rows)
    if leaf.layout is not torch.strided:
        raise ArgumentError(
            "bad_option",
            path,
            f"expected columns whose rows can be chosen, found a {leaf.layout}; select the others",
        )
    if isinstance(chosen, range):
        return _window(leaf, chosen.start, chosen.stop)
    return take_rows(leaf, chosen)


def _select_parts(parts: Parts, chosen: Chosen) -> tuple[torch.Tensor, IntArray]:
    """The values of the chosen rows, and their lengths."""
    rows = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
    starts, lengths = parts.starts[rows], parts.lengths[rows]
    in_place = parts.compact and parts.ragged_dim == 1 and parts.values.is_contiguous()
    if isinstance(chosen, range) and in_place:
        first = int(starts[0]) if len(starts) else 0
        return _window(parts.values, first, first + int(lengths.sum())), lengths
    loose = Parts(parts.values, parts.offsets, starts, lengths, parts.ragged_dim, False)
    return compact_values(loose), lengths


def _window(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """``tensor[start:stop]``, on the CPU with a storage of its own, lest pickle send it all."""
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if not tensor.is_cpu or tensor.requires_grad or not plain:
        return tensor[start:stop]
    row = tensor.shape[1:].numel() * tensor.itemsize
    shape = (stop - start, *tensor.shape[1:])
    return from_bytes(as_bytes(tensor)[start * row : stop * row], tensor.dtype, shape)


def _select_objects(leaf: Any, chosen: Chosen) -> Any:
    if isinstance(leaf, NonTensorData):
        rest = leaf.batch_size[1:]
        if not holds_rows(leaf):
            return NonTensorData(leaf.data, batch_size=[len(chosen), *rest])
        items = object_array([leaf.data[i] for i in chosen])
        return NonTensorData(items, batch_size=[len(chosen)])
    payloads = payloads_of_stack(leaf)
    if payloads is not None:
        return leaf_of_rows([payloads[i] for i in chosen])
    members = leaf.tensordicts
    if leaf.stack_dim == 0 and len(chosen):
        return NonTensorStack(*[members[i] for i in chosen], stack_dim=0)
    if leaf.stack_dim == 0:
        return NonTensorData(None, batch_size=[0, *leaf.batch_size[1:]])
    inner = [_select_objects(member, chosen) for member in members]
    return NonTensorStack(*inner, stack_dim=leaf.stack_dim)


# --- putting together --------------------------------------------------------------------------


def concat_leaves(leaves: Sequence[Any], sharing: Sharing, path: str) -> Any:
    """The rows of one column of several batches, one batch after the other. Copied once.

    Raises:
        ArgumentError: They differ in dtype, device, layout or the shape of a row, or their rows
            cannot be put together.
        ArgumentKeyError: Nested batches do not have the same columns.
        ArgumentTypeError: They are not one kind of column.
    """
    first = leaves[0]
    if all(isinstance(leaf, PackedColumn) for leaf in leaves):
        parts = [parts_of_packed(leaf, path) for leaf in leaves]
        values, lengths = _concat_parts(parts, path)
        return sharing.packing.column(values, splits_of_lengths(lengths), path)
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _concat_tensors(leaves, sharing, path)
    if all(is_non_tensor(leaf) for leaf in leaves):
        return _concat_objects(leaves, path)
    if all(isinstance(leaf, LazyStackedTensorDict) for leaf in leaves):
        return _concat_lazy(leaves, sharing, path)
    if all(_is_plain_tensordict(leaf) for leaf in leaves):
        sizes = [tuple(leaf.batch_size[1:]) for leaf in leaves]
        _check_equal(sizes, "batch dims behind the first", path)
        joined = concat_columns([dict(leaf.items()) for leaf in leaves], sharing, path)
        return _tensordict(joined, sum(leaf.batch_size[0] for leaf in leaves), first)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        _check_equal([leaf.dtype for leaf in leaves], "dtype", path)
        _check_equal([leaf.shape[1:] for leaf in leaves], "row shape", path)
        return np.concatenate(leaves)
    if all(isinstance(leaf, list) for leaf in leaves):
        return list(itertools.chain.from_iterable(leaves))
    if all(isinstance(leaf, dict) for leaf in leaves):
        return _dict(concat_columns(leaves, sharing, path), first)
    kinds = [type(leaf).__name__ for leaf in leaves]
    odd = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
    raise ArgumentTypeError(
        "bad_type",
        f"{path} of batch {odd}",
        f"expected one kind of column in all batches, found {kinds[0]} and {kinds[odd]}",
    )


def concat_columns(
    batches: Sequence[Mapping[str, Any]], sharing: Sharing, path: str
) -> dict[str, Any]:
    """Dicts of columns, each column put together; in the order of the first.

    Raises:
        ArgumentKeyError: They have not all the same columns; the batch and the column are named.
    """
    names = batches[0].keys()
    for i, batch in enumerate(batches):
        for name in names ^ batch.keys():
            raise ArgumentKeyError(
                "no_such_field",
                f"{path} of batch {i}",
                f"expected the columns of the first batch, found {name!r} "
                f"{'missing' if name in names else 'besides'}; select the ones that all have",
            )
    return {
        name: concat_leaves([batch[name] for batch in batches], sharing, f"{path}[{name!r}]")
        for name in names
    }


def _concat_tensors(leaves: Sequence[torch.Tensor], sharing: Sharing, path: str) -> torch.Tensor:
    _check_equal([_layout(leaf) for leaf in leaves], "layout", path, _PACK)
    _check_equal([leaf.dtype for leaf in leaves], "dtype", path)
    _check_equal([leaf.device for leaf in leaves], "device", path)
    first = leaves[0]
    if is_jagged(first):
        parts = [take_apart(leaf, path, detach=False, seen=sharing.read) for leaf in leaves]
        values, lengths = _concat_parts(parts, path)
        return sharing.groups.of_lengths(lengths).jagged(values, parts[0].ragged_dim)
    if first.is_nested:
        members = [member for leaf in leaves for member in leaf.unbind()]
        _check_equal([member.dim() for member in members], "number of dims", path)
        return torch.nested.as_nested_tensor(
            members, dtype=first.dtype, device=first.device, layout=torch.strided
        )
    _check_equal([tuple(leaf.shape[1:]) for leaf in leaves], "row shape", path, _PACK)
    if first.layout is torch.strided:
        return cat_bits(leaves, 0)
    if first.layout is torch.sparse_coo:
        return torch.cat(list(leaves))
    raise ArgumentError(
        "bad_option", path, f"expected columns whose rows can be joined, found a {first.layout}"
    )


_PACK = "; pack a column the same way in every batch: pack_per_token_field, always_nest=True"


def _layout(leaf: torch.Tensor) -> str:
    return "jagged" if is_jagged(leaf) else "nested" if leaf.is_nested else str(leaf.layout)


def _concat_parts(parts: Sequence[Parts], path: str) -> tuple[torch.Tensor, IntArray]:
    _check_equal([part.ragged_dim for part in parts], "ragged dim", path)
    dim = parts[0].ragged_dim - 1
    shapes = [tuple(part.values.shape) for part in parts]
    _check_equal([(*s[:dim], *s[dim + 1 :]) for s in shapes], "row shape", path)
    values = cat_bits([compact_values(part) for part in parts], dim)
    return values, np.concatenate([part.lengths for part in parts])


def _concat_objects(leaves: Sequence[Any], path: str) -> Any:
    rows = sum(leaf.batch_size[0] for leaf in leaves)
    whole = [leaf for leaf in leaves if isinstance(leaf, NonTensorData) and not holds_rows(leaf)]
    rest = [tuple(leaf.batch_size[1:]) for leaf in leaves]
    _check_equal(rest, "batch dims behind the first", path)
    if len(whole) == len(leaves) and all(same_values(leaves[0].data, w.data) for w in whole):
        return NonTensorData(leaves[0].data, batch_size=[rows, *rest[0]])
    if not rest[0]:
        items = [item for leaf in leaves for item in rows_of_leaf(leaf, leaf.batch_size[0])]
        if all(holds_rows(leaf) for leaf in leaves):
            return NonTensorData(object_array(items), batch_size=[rows])
        return leaf_of_rows(items)
    if any(isinstance(leaf, NonTensorStack) and leaf.stack_dim for leaf in leaves):
        raise ArgumentError(
            "bad_option", path, "expected stacks along the rows, found one along another dim"
        )
    members: list[Any] = []
    for leaf in leaves:
        stacked = isinstance(leaf, NonTensorStack)
        members += leaf.tensordicts if stacked else _members(leaf, rest[0])
    return NonTensorStack(*members, stack_dim=0)


def _members(leaf: NonTensorData, size: tuple[int, ...]) -> list[NonTensorData]:
    return [NonTensorData(leaf.data, batch_size=size) for _ in range(leaf.batch_size[0])]


def _concat_lazy(leaves: Sequence[Any], sharing: Sharing, path: str) -> Any:
    _check_equal([leaf.stack_dim for leaf in leaves], "stack dim", path)
    stacks = [leaf.tensordicts for leaf in leaves]
    if leaves[0].stack_dim == 0:
        return _lazy_stack([member for stack in stacks for member in stack], leaves[0])
    _check_equal([len(stack) for stack in stacks], "number of stacked members", path)
    members = [
        concat_leaves(members, sharing, f"{path}[{i}]")
        for i, members in enumerate(zip(*stacks, strict=True))
    ]
    return _lazy_stack(members, leaves[0])


def _check_equal(found: Sequence[Any], what: str, path: str, remedy: str = "") -> None:
    for i, value in enumerate(found):
        if value != found[0]:
            raise ArgumentError(
                "bad_shape",
                f"{path} of batch {i}",
                f"expected {what} {found[0]} like batch 0, found {value}{remedy}",
            )


# --- shared ------------------------------------------------------------------------------------


def same_values(a: Any, b: Any) -> bool:
    """Whether two values are the same: types, shapes, and every bit, NaN included.

    Objects that cannot ride are the same only if they are one object.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray) and a.dtype == object:
        pairs = zip(a.reshape(-1), b.reshape(-1), strict=True) if a.shape == b.shape else None
        return pairs is not None and all(same_values(x, y) for x, y in pairs)
    try:
        # Equal values give equal bytes; large tensors are aliased, not copied.
        sent = [[np.frombuffer(frame, np.uint8) for frame in encode(x)] for x in (a, b)]
    except UnsupportedTypeError:
        return False
    return len(sent[0]) == len(sent[1]) and all(map(np.array_equal, *sent))


def _is_plain_tensordict(leaf: Any) -> bool:
    return isinstance(leaf, TensorDictBase) and not isinstance(leaf, LazyStackedTensorDict)


def _tensordict(leaves: dict[str, Any], rows: int, like: TensorDictBase) -> TensorDict:
    """A TensorDict of other rows, with the dim names and the device of `like`."""
    # tensordict 0.10 cannot give names, not even none, where there is a NonTensorStack.
    names = like.names if any(name is not None for name in like.names) else None
    return TensorDict(
        leaves, batch_size=[rows, *like.batch_size[1:]], names=names, device=like.device
    )


def _lazy_stack(members: list[Any], like: Any) -> Any:
    if not members:
        raise ArgumentError(
            "bad_rows",
            "rows of a lazy stack",
            "expected at least one row, found none: a lazy stack of no rows has no columns",
        )
    return LazyStackedTensorDict(
        *members, stack_dim=like.stack_dim, stack_dim_name=like.names[like.stack_dim]
    )


def _dict(columns: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """A dict of other columns; a batch of the same kind, where `like` is one."""
    make: Callable[[dict[str, Any]], dict[str, Any]] = getattr(like, "with_columns", dict)
    return make(columns)


def move_leaf(leaf: Any, device: torch.device, non_blocking: bool, sharing: Sharing) -> Any:
    """A column with its tensors on `device`; itself where there is nothing to move."""
    if isinstance(leaf, PackedColumn):
        if leaf.values.device == device:
            return leaf
        lengths = parts_of_packed(leaf, "to").lengths
        values = leaf.values.to(device, non_blocking=non_blocking)
        return sharing.packing.column(values, splits_of_lengths(lengths), "to")
    if isinstance(leaf, dict):
        moved = {k: move_leaf(v, device, non_blocking, sharing) for k, v in leaf.items()}
        return _dict(moved, leaf)
    if is_jagged(leaf) and leaf.device != device:
        parts = take_apart(leaf, "to", detach=False, seen=sharing.read)
        values = compact_values(parts).to(device, non_blocking=non_blocking)
        return sharing.groups.of_lengths(parts.lengths).jagged(values, parts.ragged_dim)
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    return leaf
