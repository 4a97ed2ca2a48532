"""A batch as samples: one mapping per row, made of views where that is possible."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args, overload

import numpy as np
import numpy.typing as npt
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)

from jagcodec._arguments import check_option, known_names
from jagcodec.batch.leaves import row_counts
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import plain_array, resolved
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import (
    fields_of,
    is_non_tensor,
    payloads_of_stack,
    rows_of_leaf,
    unbatched_parts,
)
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.wire_batch import WireBatch

RowsAs = Literal["tensor", "numpy", "list"]
"""What `to_rows` makes of the rows of tensors and arrays."""

_FORMS = get_args(RowsAs)

Rows: TypeAlias = TensorDictBase | WireBatch | dict[str, Any]
"""A batch whose rows are looked at: a TensorDict, an open message, or a dict of columns."""


@overload
def to_rows(batch: Rows, columns: str, as_: RowsAs = ...) -> list[Any]: ...


@overload
def to_rows(
    batch: Rows, columns: Iterable[str] | None = ..., as_: RowsAs = ...
) -> list[dict[str, Any]]: ...


def to_rows(
    batch: Rows, columns: str | Iterable[str] | None = None, as_: RowsAs = "tensor"
) -> list[Any]:
    """The rows of a batch, one mapping of names to values each; or the rows of one column.

    Example:
        >>> import torch
        >>> from jagcodec import pack_jagged_fields, to_rows
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "reward": torch.tensor([0.0, 1.0])},
        ...     lengths=torch.tensor([2, 3]),
        ...     token_aligned_fields=["ids"],
        ... )
        >>> to_rows(td, as_="list")
        [{'ids': [5, 6], 'reward': 0.0}, {'ids': [7, 8, 9], 'reward': 1.0}]
        >>> to_rows(td, "ids")
        [tensor([5, 6]), tensor([7, 8, 9])]

    Args:
        batch: A TensorDict of batch size (N, ...), a `WireBatch`, a `BatchedDataDict`, or a dict
            of columns of N rows: tensors (also jagged, strided nested and sparse), `PackedColumn`s,
            arrays, lists, payloads, and batches within the batch.
        columns: None for all columns, or a list of names for these in this order: N dicts. One
            name: the N rows of that column.
        as_: What rows of tensors and of arrays of numbers become. ``"tensor"``: tensors, of a
            column of one dim 0-d ones. ``"numpy"``: arrays, of a column of one dim numpy's
            scalars. ``"list"``: Python's numbers, in lists as deep as a row has dims.

    Returns:
        A new list. Python objects are the objects of the batch; one that belongs to the whole batch
        is in every row. Rows of a batch within the batch, a tensorclass among them, are dicts.
        Tensors and arrays are views of the column, so a row that is kept keeps the column, and
        writing to one writes to the batch; gradients flow through tensors. Copied once, all rows
        together, are: jagged columns with holes between the rows, for arrays what lies on a
        device, and of an open message what `decode` copies, such as read-only frames.

    Raises:
        ArgumentError: `as_` is not one of these, `batch` has no batch dim, or columns differ in
            their number of rows.
        ArgumentKeyError: A name is not that of a column.
        ArgumentTypeError: `batch` is none of these, a lazy stack among them, or a column's dtype
            or layout has no rows of this form, as bfloat16 has no arrays; it is named.
        WireFormatError: A column of an open message is malformed.
    """
    where = "to_rows"
    check_option(as_, _FORMS, f"{where}(as_)")
    names, rows = _names_and_rows(batch, where)
    making = _Making(as_)
    if isinstance(columns, str):
        (name,) = known_names(columns, names, where)
        return making.rows_of(*_leaves(batch, [name])[0], rows, where)
    if columns is not None:
        names = known_names(_listed(columns, where), names, where)
    return making.samples(batch, names, rows, where)


def _listed(columns: Any, where: str) -> list[Any]:
    if not isinstance(columns, Iterable):
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(columns)",
            f"expected a name or a list of names, found {type(columns).__name__}",
        )
    return list(columns)


def _names_and_rows(batch: Any, path: str) -> tuple[list[str], int]:
    """The names of the columns of a batch, and N."""
    if isinstance(batch, WireBatch):
        return list(batch.fields), len(batch)
    if isinstance(batch, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type",
            path,
            "expected a TensorDict, found a lazy stack, whose rows may differ in keys and shapes; "
            "they are batch.unbind(0)",
        )
    if isinstance(batch, TensorDictBase):
        if not len(batch.batch_size):
            raise ArgumentError(
                "bad_shape", path, "expected batch size (N, ...), found no batch dim"
            )
        return list(batch.keys()), int(batch.batch_size[0])
    if isinstance(batch, dict):
        return list(batch), row_counts(batch, path) or 0
    raise ArgumentTypeError(
        "bad_type",
        path,
        f"expected a TensorDict, a WireBatch or a dict of columns, found {type(batch).__name__}",
    )


def _leaves(batch: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    """The columns of these names; of an open message those of objects as an array."""
    if not isinstance(batch, WireBatch):
        return [(name, batch.get(name)) for name in names]
    schema = batch.schema
    return [
        batch.select([name]).columns()[0]
        if schema[name].kind == "object"
        else (name, batch.leaf(name))
        for name in names
    ]


class _Making:
    """One call of `to_rows`."""

    def __init__(self, form: RowsAs) -> None:
        self._form = form
        self._pool = RowSplitsPool()
        # Row lengths as torch takes them, by the identity of the row splits, which are kept.
        self._lengths: dict[int, tuple[Any, list[int]]] = {}

    def samples(self, batch: Any, names: Sequence[str], rows: int, path: str) -> list[Any]:
        """One dict per row."""
        if not names:
            return [{} for _ in range(rows)]
        columns = [self.rows_of(name, leaf, rows, path) for name, leaf in _leaves(batch, names)]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def rows_of(self, name: str, leaf: Any, rows: int, path: str) -> list[Any]:
        """The N rows of a column."""
        return self._rows(leaf, rows, f"{path}[{name!r}]")

    def _rows(self, leaf: Any, rows: int, path: str) -> list[Any]:
        if is_jagged(leaf):
            return self._ragged(view_of(leaf, path, self._pool, detach=False), path)
        if isinstance(leaf, PackedColumn):
            return self._ragged(view_of_varlen(leaf, path), path)
        if isinstance(leaf, UnbatchedTensor):
            return [self._value(unbatched_parts(leaf)[1], path)] * rows
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf, path)
        if isinstance(leaf, np.ndarray):
            return self._array(leaf, path)
        if isinstance(leaf, list):
            return list(leaf)
        if is_non_tensor(leaf):
            return _objects(leaf, rows)
        if is_tensorclass(leaf):
            fields, others = fields_of(leaf)
            return [{**row, **others} for row in self._rows(fields, rows, path)]
        names, found = _names_and_rows(leaf, path)
        # A dict without columns has any number of rows.
        return self.samples(leaf, names, found if names else rows, path)

    def _ragged(self, view: RaggedView, path: str) -> list[Any]:
        row_splits, dim = view.row_splits, view.ragged_dim - 1
        if not row_splits.rows:
            return []
        values = values_of(view)
        known = self._lengths.get(id(row_splits))
        if known is None:
            known = self._lengths[id(row_splits)] = row_splits, row_splits.lengths.tolist()
        if self._form == "tensor":
            return list(torch.split_with_sizes(values, known[1], dim))
        array = self._numbers(values, path)
        ends = itertools.pairwise(row_splits.host.tolist())
        if self._form == "list":
            if dim:
                before = (slice(None),) * dim
                return [array[(*before, slice(start, end))].tolist() for start, end in ends]
            cells = array.tolist()
            return [cells[start:end] for start, end in ends]
        before = (slice(None),) * dim
        if not dim:
            return [array[start:end] for start, end in ends]
        return [array[(*before, slice(start, end))] for start, end in ends]

    def _tensor(self, leaf: torch.Tensor, path: str) -> list[Any]:
        if self._form == "tensor":
            if leaf.layout in (torch.strided, torch.sparse_coo):
                return list(leaf.unbind())
        elif leaf.layout is torch.strided and not leaf.is_nested:
            numbers = self._numbers(leaf, path)
            return numbers.tolist() if self._form == "list" else list(numbers)
        elif leaf.is_nested:
            return [self._value(row, path) for row in leaf.unbind()]
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected a column that has rows as_={self._form!r}, found a {leaf.layout}"
            + ("; use as_='tensor'" if leaf.layout is torch.sparse_coo else "; leave it out"),
        )

    def _array(self, leaf: npt.NDArray[Any], path: str) -> list[Any]:
        if leaf.dtype.hasobject or self._form == "numpy":
            return list(leaf)
        if self._form == "list":
            rows: list[Any] = leaf.tolist()
            return rows
        if leaf.dtype.kind not in "biufc":
            return list(leaf)  # of strings, say, which are no tensors
        # Torch warns of memory that is not writable, and knows one byte order.
        native = leaf.dtype.newbyteorder("=")
        own = np.require(leaf, native, None if leaf.flags.writeable else ("O", "W"))
        try:
            return list(torch.from_numpy(own).unbind())
        except (TypeError, ValueError) as error:  # a long double; a step backwards
            if leaf.itemsize <= 8:
                return list(torch.from_numpy(own.copy()).unbind())
            raise ArgumentTypeError(
                "bad_dtype", path, f"expected a dtype that torch has, found {leaf.dtype}"
            ) from error

    def _value(self, tensor: torch.Tensor, path: str) -> Any:
        """One tensor that is a row."""
        if self._form == "tensor":
            return tensor
        numbers = self._numbers(tensor, path)
        return numbers.tolist() if self._form == "list" else numbers[()]

    def _numbers(self, tensor: torch.Tensor, path: str) -> npt.NDArray[Any]:
        """The cells of a strided tensor as an array, aliased where that can be."""
        array = plain_array(tensor)
        if array is not None:
            return array
        if tensor.is_meta:
            raise ArgumentTypeError("bad_type", path, "expected cells, found a meta tensor")
        host = resolved(tensor.detach().cpu())
        if self._form == "list" and host.dtype in _WIDENED:
            host = host.to(_WIDENED[host.dtype])
        try:
            return host.numpy()
        except (TypeError, RuntimeError) as error:
            raise ArgumentTypeError(
                "bad_dtype",
                path,
                f"expected a dtype that has rows as_={self._form!r}, found {tensor.dtype}; use "
                "as_='tensor', or leave the column out",
            ) from error


# What Python's numbers hold exactly, though numpy has not this dtype.
_WIDENED: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **{
        getattr(torch, name): torch.float32
        for name in dir(torch)
        if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
    },
}


def _objects(leaf: Any, rows: int) -> list[Any]:
    """The payloads of a non-tensor leaf, one per row."""
    payloads = payloads_of_stack(leaf) if isinstance(leaf, NonTensorStack) else None
    return list(rows_of_leaf(leaf, rows)) if payloads is None else payloads
