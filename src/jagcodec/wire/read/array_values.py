"""Values of a message where torch is not installed: what `tensor_values` makes, as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec._dependencies import check_torch
from jagcodec.memory.arrays import object_array
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.column_arrays import ColumnArrays
from jagcodec.rows.copy_bytes import array_of_cells
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.read.message import Budget, Message, owned_array, owned_bytes
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import Kind

Size: TypeAlias = tuple[int, ...]
"""The type of batch sizes."""

HAS_LEAVES = False
"""Whether there are leaves of TensorDicts."""


def tensor_of_node(
    message: Message, node: Node, chosen: ChosenRows | None = None
) -> npt.NDArray[Any]:
    """The cells of a TENSOR or a JAGGED, or of its chosen rows, as an array that may be kept."""
    return owned_array(message, message.view(node, chosen))


def owned_cells(
    message: Message, view: RaggedView, *, goes_to_device: bool = False
) -> npt.NDArray[Any] | None:
    """The cells of a view, as an array that may be kept; None if they are not end to end."""
    data = owned_bytes(message, view, goes_to_device=goes_to_device)
    return None if data is None else array_of_cells(data, view)


def jagged_of_node(message: Message, node: Node) -> ColumnArrays:
    """A JAGGED column."""
    view = message.view(node)
    return jagged_of_values(owned_array(message, view), view.row_splits, view.ragged_dim)


def values_from_cells(cells: Any, view: RaggedView) -> npt.NDArray[Any]:
    """`cells`, which `gathered_cells` copied from the rows of a view, as an array."""
    return array_of_cells(cells, view)


def jagged_of_values(values: npt.NDArray[Any], row_splits: RowSplits, dim: int) -> ColumnArrays:
    """The jagged column of `values`, whose rows are end to end."""
    return ColumnArrays(values, row_splits.offsets_array, dim - 1)


def column_of_objects(items: list[Any]) -> npt.NDArray[np.object_]:
    """An array with one of these objects per row."""
    return object_array(items)


def is_payload(item: Any) -> bool:
    """Whether an object may be one of a column: any may, because there is no tensordict."""
    return True


def maker_of_rows(message: Message, cells: Node, chosen: ChosenRows | None) -> None:
    """None: rows that are tensors arrive as arrays."""
    return


def rows_of_cells(cells: Any, view: RaggedView) -> None:
    """None, as of `maker_of_rows`."""
    return


def _of_torch(message: Message, node: Node, budget: Budget) -> Any:
    """Refuse a value that only torch or tensordict can hold."""
    check_torch(f"a {node.kind.name}")


BUILDERS: dict[Kind, Callable[[Message, Node, Budget], Any]] = {
    Kind.TENSOR: lambda message, node, budget: tensor_of_node(message, node),
    Kind.JAGGED: lambda message, node, budget: jagged_of_node(message, node),
    **dict.fromkeys(
        (
            *(Kind.STRIDED_NESTED, Kind.SPARSE_COO, Kind.TENSORDICT),
            *(Kind.LAZY_STACK, Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_STACK),
        ),
        _of_torch,
    ),
}
"""What makes the value of a node, by its kind."""
