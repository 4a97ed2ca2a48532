"""`side_by_side`: the columns of several batches of the same rows as one `WireBatch`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from jagcodec.columns.batch import (
    Column,
    Read,
    Source,
    chosen_in,
    columns_in,
    source_in,
)
from jagcodec.columns.held import column_of
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView
from jagcodec.wire.compare import meta_without_conflicts
from jagcodec.wire.many.joined import join_rows
from jagcodec.wire.read.wire_batch import WireBatch


class SideBySide(Source):
    """The columns of several batches of the same rows."""

    __slots__ = ("_batches", "_columns", "_pool")

    def __init__(
        self, columns: Mapping[str, Column], batches: Sequence[WireBatch], pool: RowSplitsPool
    ) -> None:
        """`columns` are columns of `batches`; `pool` has the row splits of those in memory."""
        sources = [source_in(batch) for batch in batches]
        device = next((s.device for s in sources if s.device is not None), None)
        allow_pickle = any(source.allow_pickle for source in sources)
        sizes = common_sizes(source.sizes for source in sources)
        super().__init__(tuple(columns), sizes, device, allow_pickle)
        self._columns = columns
        self._batches = batches
        self._pool = pool

    def columns(self) -> Mapping[str, Column]:
        return self._columns

    def meta(self) -> dict[str, Any]:
        # All batches are of the same rows, so one that lacks a value does not contradict it.
        return meta_without_conflicts(self.metas())

    def metas(self) -> list[dict[str, Any]]:
        return [batch.meta for batch in self._batches]

    def shared(self, columns: dict[str, Any], chosen: ChosenRows | None) -> dict[str, Any]:
        pool = self._pool if chosen is None else chosen.pool
        return {name: sharing(column, pool, "join_columns") for name, column in columns.items()}

    def decompress_ahead(self, how: Read) -> None:
        for batch in self._batches:
            source_in(batch).decompress_ahead(how)


def common_sizes(batches: Iterable[Sequence[int]]) -> list[int]:
    """The leading dims that all of these batch sizes have."""
    dims = takewhile(lambda sizes: len({*sizes}) == 1, zip(*batches, strict=False))
    return [sizes[0] for sizes in dims]


def sharing(column: Any, pool: RowSplitsPool, path: str) -> Any:
    """The column; if it is jagged, with the row splits that the pool has for its lengths."""
    if isinstance(column, RaggedView):
        return replace(column, row_splits=pool.unique(column.row_splits))
    return column_of(column).with_shared_offsets(path, pool)


def side_by_side(batches: Sequence[WireBatch], where: str, pool: RowSplitsPool) -> WireBatch:
    """The columns of batches of the same rows; if two have one name, the later one wins."""
    # Make a join of a batch whose rows were chosen: a later choice then counts among these rows.
    whole = [b if chosen_in(b) is None else join_rows([b], where) for b in batches]
    columns = {name: column for batch in whole for name, column in columns_in(batch).items()}
    return WireBatch(SideBySide(columns, whole, pool))
