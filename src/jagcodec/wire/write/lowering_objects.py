"""`Lowering` of rows of objects: a document per row, a message per row, or cells of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jagcodec.memory.arrays import ByteArray
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import in_buffers
from jagcodec.wire import spec
from jagcodec.wire.array_rows import array_rows
from jagcodec.wire.dtypes import DtypeName, bytes_in_order
from jagcodec.wire.frames import NO_BYTES
from jagcodec.wire.items import Item, Lowered, RowMessages, Tree, item_of_documents
from jagcodec.wire.native import first_same, written_at_once
from jagcodec.wire.spec import PLAIN, Code
from jagcodec.wire.write.walk import OF_DOCUMENTS, ValueWalk, lowering_of_tensors


def lower_objects(walk: ValueWalk, objects: Iterable[Any], holder: int | None) -> Tree:
    """The tree of rows of objects: a document per row, or a message per row.

    Rows become messages if one of them needs buffers. If all rows are arrays or None, and `holder`
    is given, they become cells end to end instead. Readers put them into the `holder`: `IN_STACK`,
    `IN_LIST` or `IN_ARRAY`.
    """
    # A list keeps all rows alive, so that no two have the same id.
    rows = objects if type(objects) is list else list(objects)
    written = written_at_once(rows, spec.MAX_DEPTH - len(walk.path))
    if written is not None:
        rows_as_bytes, same = written
        walk.items.append(item_of_documents(rows_as_bytes, same))
        return OF_DOCUMENTS
    arrays = None if holder is None else lower_array_rows(walk, rows, holder)
    if arrays is not None:
        return arrays
    same = first_same(rows)
    places = same or range(len(rows))
    # Lower each object once, even if it is in several rows.
    lowered: dict[int, Any] = {i: walk.lower_row(i, rows[i]) for i in dict.fromkeys(places)}
    if Lowered not in map(type, lowered.values()):
        walk.items.append(item_of_documents([lowered[i] for i in places], same))
        return OF_DOCUMENTS
    item = item_of_documents([b""] * len(rows), same)
    item.storage_code = PLAIN + spec.BLOBS
    walk.items.append(item)
    walk.messages.append(RowMessages(item, lowered, places))
    return OF_DOCUMENTS


def lower_array_rows(walk: ValueWalk, rows: Sequence[Any], holder: int) -> Tree | None:
    """The node of rows that are arrays, or tensors, of one dtype; any may be None.

    Returns None if the rows are anything else.
    """
    array_parts = array_rows(rows)
    if array_parts is None or len(walk.path) >= spec.MAX_DEPTH:
        return None  # rows that are too deep are lowered one by one, which raises the error
    walk.array_rows += len(rows)
    parts, lengths, dims, dtype, are_tensors = array_parts
    splits = RowSplits.from_counts(lengths)
    item = Item(None, (splits.total,), splits, dtype)
    cells = (
        lowering_of_tensors().bytes_of_tensors(walk, item, parts)
        if are_tensors
        else map(bytes_in_order, parts)
    )
    if cells is not None:
        item.data = _rows_in_place([data for data in cells if len(data)], dtype, splits)
    children = walk.add(item), walk.add(Item(dims, dims.shape, None, "int64"))
    return (Code.ARRAY_ROWS, holder, int(are_tensors), *children)


def _rows_in_place(cells: Sequence[ByteArray], dtype: str, splits: RowSplits) -> Any:
    """The data of an item of rows: one array of `cells` for each row that is not empty."""
    if not cells:
        return NO_BYTES
    if splits.rows == 1:
        return cells[0]
    starts = splits.starts * spec.TORCH_ITEMSIZES[dtype]
    return in_buffers(cells, DtypeName(dtype), (), starts, splits)
