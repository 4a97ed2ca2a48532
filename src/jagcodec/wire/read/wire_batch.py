"""`open_wire`, `WireBatch`: a batch that is read on demand.

`WireBatch` comes first. After it come the functions that make one:

* `open_wire`, for users: of a message in any place, or of a batch in memory;
* `open_memory`: of a batch in memory;
* `open_whole`: of frames or a blob, for callers that read all of it;
* `batch_of_message`: of a `Message` that is open already.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from jagcodec._arguments import check_name, known_names, unknown_name
from jagcodec._compiling import untraced
from jagcodec._dependencies import with_or_without_torch
from jagcodec.columns.batch import (
    VALUES,
    As,
    Batch,
    CellRows,
    FieldSchema,
    OneObject,
    closed_batch,
    leaves_of,
    lengths_of_column,
    names_in,
    values_of_batch,
    views_of,
    with_closed,
)
from jagcodec.columns.held import column_of, common_row_count
from jagcodec.columns.memory import MemorySource, columns_and_meta
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    describe,
)
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.buffers import WireSource
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows, choose_rows
from jagcodec.rows.column_arrays import ColumnArrays, arrays_of_view, rectangle_of_view
from jagcodec.rows.row_splits import Chosen
from jagcodec.rows.views import RaggedView
from jagcodec.wire.files import file_path, noted_file, read_file
from jagcodec.wire.frames import Frame
from jagcodec.wire.limits import Limits
from jagcodec.wire.read.message import Message
from jagcodec.wire.read.message_source import source_of_message
from jagcodec.wire.read.opening import open_message, open_store, usable_reading
from jagcodec.wire.write.encoder import encode

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict, TensorDictBase


@untraced
class WireBatch(Batch):
    """A batch of columns over one message or several, and in memory; made by `open_wire`.

    `select` and `rows` choose without reading, and ``batch["ids"]`` reads one column: a tensor, an
    array of objects, or for a nested batch a `WireBatch`. `keys`, `items`, `values`, `get` and
    iteration are those of a dict, but ``len(batch)`` is N. It keeps its messages alive. A
    contiguous range of rows of one writable message aliases it; anything else is copied. `encode`
    accepts it. A pickle of it is a message of the chosen columns and rows with `meta`: it keeps
    neither the options of `open_wire` nor the `metas` of each message of a join.

    Whatever reads columns raises WireFormatError if one is malformed, and ArgumentError if those of
    several messages differ, or if one in memory got another number of rows after it was opened.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire
        >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
        >>> frames = encode_fields(columns, lengths=torch.tensor([3, 4, 3]))
        >>> batch = open_wire(frames).select(["ids"]).rows(slice(1, 3))
        >>> batch.fields, batch.batch_size
        (('ids',), torch.Size([2]))
        >>> [row.tolist() for row in batch["ids"].unbind()]
        [[4, 5, 6, 7], [8, 9, 10]]
    """

    __slots__ = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return names_in(self)

    @property
    def batch_size(self) -> torch.Size:
        """(N, ...): N rows as chosen; a tuple where torch is not installed."""
        size: torch.Size = with_or_without_torch(*VALUES).Size([len(self), *self._source.sizes[1:]])
        return size

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """Name to `FieldSchema`, from the headers alone, for the rows as chosen.

        Where torch is not installed, dtypes are names. If a column differs between the messages of
        a join, this raises ArgumentError, as a read of that column does.
        """
        with_or_without_torch(
            *VALUES
        )  # imports torch if it is installed, so that dtypes are torch's
        rows = len(self)
        return MappingProxyType(
            {name: column.field(rows) for name, column in self._columns.items()}
        )

    @property
    def meta(self) -> dict[str, Any]:
        """Values of the whole batch: `meta` of `encode`, or what is next to the batch in
        a dict or a `BatchedDataDict`. Joined by rows: values that all messages agree on. Joined by
        columns: values that no message contradicts. A new dict each time; no column is read.
        """
        return self._source.meta()

    @property
    def metas(self) -> list[dict[str, Any]]:
        """`meta` of each message, or of each batch that was joined, in their order."""
        return self._source.metas()

    def __iter__(self) -> Iterator[str]:
        """Iterate over `fields`, as over a dict; ``name in batch`` asks it, too."""
        return iter(self.fields)

    def __getitem__(self, name: str) -> Any:
        """Read one column; each call reads it again.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"ids": [[5], [6, 7]], "uid": ["a", "b"]}))
            >>> batch["uid"], batch["ids"].values()
            (array(['a', 'b'], dtype=object), tensor([5, 6, 7]))

        Returns:
            Cells as a tensor: jagged, strided or sparse. Python objects as an array (N,) of the
            objects that were sent; an object of the whole batch fills N rows. Arrays of text, bytes
            or times as they are. A nested batch as a `WireBatch` of the same rows. Tensorclasses,
            lazy stacks and an `UnbatchedTensor` as `decode` returns them. Where torch is not
            installed, cells are arrays, those of a jagged column a `ColumnArrays`.

        Raises:
            ArgumentError: The column needs torch, which is not installed.
            ArgumentKeyError: There is no such column.
            ArgumentTypeError: `name` is not a string.
        """
        if not isinstance(name, str):
            found = describe(name)
            detail = f"expected the name of a column, found {found}; rows(index) chooses rows"
            raise ArgumentTypeError("bad_type", "WireBatch[name]", detail)
        if name not in self._columns:
            raise unknown_name(name, self._columns, "WireBatch.__getitem__")
        return values_of_batch(self, [name])[name]

    def arrays(self, name: str) -> ColumnArrays:
        """Read one column as arrays on the host, the same with and without torch.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"ids": [[5], [6, 7]], "uid": ["a", "b"]}))
            >>> ids = batch.arrays("ids")
            >>> ids.values.tolist(), ids.row_splits.tolist()
            ([5, 6, 7], [0, 1, 3])
            >>> batch.arrays("uid").values.tolist()
            ['a', 'b']

        Returns:
            Its values and row splits, as `ColumnArrays` describes them. The values may alias the
            message, or a tensor of a batch in memory: only read them.

        Raises:
            ArgumentKeyError: There is no such column.
            ArgumentTypeError: The column has no rows of cells or objects: it is sparse, a strided
                nested tensor, a tensor of the whole batch, or a batch, whose own columns have.
        """
        check_name(name, "WireBatch.arrays(name)")
        columns = self._columns
        if name not in columns:
            raise unknown_name(name, columns, "WireBatch.arrays")
        # Not `select`, which would check the name again.
        one = WireBatch(self._source, {name: columns[name]}, self._chosen)
        column = views_of(one, As.HOST)[name]
        if isinstance(column, RaggedView):
            return arrays_of_view(column)
        if isinstance(column, CellRows):
            return rectangle_of_view(column.view)
        if isinstance(column, OneObject):
            column = column_of(column).object_array()
        if isinstance(column, np.ndarray):
            return ColumnArrays(column, None, None)
        remedy = "read batch[name]"
        if isinstance(column, Batch):
            remedy = "call .arrays of one of its columns"
        detail = f"expected a column of cells or objects, found {describe(column)}; {remedy}"
        raise ArgumentTypeError("bad_type", f"WireBatch.arrays({name!r})", detail)

    def get(self, name: str, default: Any = None) -> Any:
        """``batch[name]``; `default` if there is no such column.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"reward": [0.5, 1.0]}))
            >>> batch.get("reward"), batch.get("advantages") is None
            (tensor([0.5000, 1.0000]), True)

        Raises:
            ArgumentTypeError: `name` is not a string.
        """
        check_name(name, "WireBatch.get(name)")
        return self[name] if name in self._columns else default

    def keys(self) -> tuple[str, ...]:
        """`fields`, as a dict calls them. Reads nothing."""
        return self.fields

    def items(self) -> Iterator[tuple[str, Any]]:
        """Each name with ``batch[name]``: an iterator, which reads a column when it comes to it.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"reward": [0.5, 1.0], "uid": ["a", "b"]}))
            >>> for name, column in batch.items():
            ...     print(name, column.tolist())
            reward [0.5, 1.0]
            uid ['a', 'b']
        """
        return ((name, self[name]) for name in self.fields)

    def values(self) -> Iterator[Any]:
        """``batch[name]`` of each name, as `items` reads them."""
        return (self[name] for name in self.fields)

    def __repr__(self) -> str:
        return f"WireBatch(fields={list(self.fields)}, batch_size={list(self.batch_size)})"

    def select(self, names: Iterable[str]) -> WireBatch:
        """The columns of these names, in this order. Reads nothing.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        columns = self._columns
        listed = known_names(names, columns, "WireBatch.select")
        return WireBatch(self._source, {name: columns[name] for name in listed}, self._chosen)

    def rows(self, index: Any) -> WireBatch:
        """These rows, in this order; they may repeat. Reads nothing.

        Args:
            index: A slice, a range, integers (list, tensor, array; negative ones count from the
                end), N booleans, or one integer for a batch of one row.

        Raises:
            ArgumentIndexError: A row does not exist.
            ArgumentTypeError: `index` has another type.
        """
        return rows_at(self, choose_rows(index, len(self), CHOSEN))

    def to_tensordict(self) -> TensorDict:
        """The chosen columns and rows as a TensorDict, as `decode` would make it.

        Raises:
            ArgumentError: Rows were chosen of a column whose rows torch cannot choose.
        """
        return closed_batch(self, leaves_of(self))

    def to_frames(self) -> list[Frame]:
        """The chosen columns and rows as a message, to send on.

        Example:
            >>> import torch
            >>> from jagcodec import decode, encode_fields, open_wire
            >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
            >>> batch = open_wire(encode_fields(columns, lengths=torch.tensor([3, 4, 3])))
            >>> decode(batch.rows([2]).select(["ids"]).to_frames())["ids"].values()
            tensor([ 8,  9, 10])

        Returns:
            If the batch is a whole message in memory, its frames. Otherwise new frames, as `encode`
            makes them of this batch; columns that are stored narrow stay narrow, and elided ones
            elided where that pays. A range of rows of plain columns is cut out, which is faster.
            Only read the frames: they may alias the messages.
        """
        source = self._source
        frames = source.frames(self)
        return encode(self, allow_pickle=source.allow_pickle) if frames is None else frames

    def row_lengths(self, name: str) -> IntArray | None:
        """(N,) lengths of the chosen rows of a jagged column; None for any other column.

        Reads the offsets of its ragged group and nothing else.
        """
        check_name(name, "WireBatch.row_lengths(name)")
        if name not in self._columns:
            raise unknown_name(name, self._columns, "WireBatch.row_lengths")
        return lengths_of_column(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The pickle of a batch: the chosen columns and rows as a message, which `open_wire` opens.

        `copy.copy` and `copy.deepcopy` return such a batch, too. It keeps columns, rows and `meta`.
        It does not keep:

        * the options of `open_wire`: tensors are on the CPU, `limits` are the defaults, and pickled
          objects, in columns or in `meta`, raise WireFormatError when they are read;
        * the `metas` of each message of a join: `metas` is a list of one, `meta`;
        * gradients, and memory that is shared with the columns of a batch in memory.

        From protocol 5 on, the frames are buffers that a pickler may send out of band. Below it,
        they are copied.

        Raises:
            UnsupportedTypeError: A column of a batch in memory holds objects that `encode` rejects.
        """
        frames = self.to_frames()
        if protocol >= 5:
            return open_wire, ([pickle.PickleBuffer(frame) for frame in frames],)
        return open_wire, ([bytes(frame) for frame in frames],)


def rows_at(batch: WireBatch, chosen: Chosen) -> WireBatch:
    """The rows of an open batch at an index that the caller has checked."""
    known = batch._chosen
    if known is not None:
        if isinstance(chosen, range):
            chosen = known.index[chosen.start : chosen.stop]
        else:
            chosen = np.asarray(known.index, dtype=np.int64)[chosen]
    return WireBatch(batch._source, batch._columns, ChosenRows(chosen))


# --- opening -----------------------------------------------------------------------------------


@untraced
def open_wire(
    source: WireSource | WireBatch | TensorDictBase | dict[str, Any],
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> WireBatch:
    """Open the message of a batch without reading its payload.

    A batch in memory gets the same methods: choose its columns and rows, and ask for row lengths.

    Args:
        source: Frames or a blob, as for `decode`; the path of a file, which is mapped as by
            `load`; a callable ``(offset, size) -> buffer`` over a blob, as RDMA and object stores
            give: it is asked for the preamble, the header, and the ranges that are wanted; or a
            TensorDict, a dict of columns or a `WireBatch`, for which the options are left out.
        copy: As for `decode`, but of each range that is read.
        device: As for `decode`.
        allow_pickle: As for `decode`.
        limits: As for `decode`; a callable is asked for no more than they allow.

    Returns:
        A `WireBatch` over the message, whose value must be a TensorDict of at least one batch
        dim, a `BatchedDataDict`, or a dict with one such TensorDict in it, the rest of which is
        `meta`. The checksum of the header is compared. Those of frames are not: that would read
        them all. A compressed frame is decompressed at its first use, and kept while the batch is
        open. Columns in memory are aliased, and gradients flow through them: to read one that got
        another number of rows since is an error.

    Raises:
        WireFormatError: The source is not such a message, a file goes on after it, or a callable
            returned too few bytes.
        ArgumentTypeError: `source` has another type.
        ArgumentError: There is no such device; the path is that of a directory, a pipe, a socket
            or a device; frames are compressed, and the library for that is not installed; an
            option is given for a batch in memory; or its columns differ in their number of rows,
            or its dims have names.
        OSError: The file cannot be read.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire, to_blob
        >>> columns = {"ids": torch.arange(12).view(3, 4)}
        >>> store = to_blob(encode_fields(columns, lengths=torch.tensor([3, 4, 3])))
        >>> batch = open_wire(lambda offset, size: store[offset : offset + size])
        >>> batch.schema["ids"]
        FieldSchema(kind='jagged', dtype=torch.int64, shape=(3, None))
    """
    where = "open_wire(source)"
    how = usable_reading(
        "open_wire", limits, copy, device, allow_pickle, value_by_value=True, verify=False
    )
    if type(source) not in _MESSAGE_TYPES and isinstance(source, (str, os.PathLike)):
        name = file_path(source, where, "decode accepts a message in memory")
        with noted_file(name):
            data = read_file(name, where, how.limits, mmap=True)
            return batch_of_message(open_message(data, where, how._replace(file=name)))
    if column_of(source).has_columns:
        if how.has_options():
            detail = (
                "expected a message, to which the options apply, found a batch in memory; "
                "leave all of them out"
            )
            raise ArgumentError("bad_option", where, detail)
        return open_memory(source, where)
    if callable(source):
        return batch_of_message(open_store(source, how))
    return batch_of_message(open_message(source, where, how))


def open_memory(batch: Any, where: str) -> WireBatch:
    """An open batch as a `WireBatch`."""
    if isinstance(batch, WireBatch):
        return batch
    check_batch(batch, where)
    if type(batch) is dict:
        batch = with_closed(batch)
    found = getattr(batch, "batch_size", None)
    sizes = [common_row_count(batch, where) or 0] if found is None else [*found]
    names = getattr(batch, "names", ())
    if any(name is not None for name in names):  # a message cannot hold names of dims either
        detail = f"expected dims without names, found {names}; set td.names = None"
        raise ArgumentError("bad_shape", where, detail)
    columns, meta = columns_and_meta(batch)
    return WireBatch(MemorySource(columns, sizes, meta))


def check_batch(batch: Any, where: str) -> None:
    """Check that a TensorDict has rows, and that all rows have the same columns."""
    column_of(batch).check_batch(where)


_MESSAGE_TYPES = (list, bytes, bytearray)
"""The types of most messages. Checking these first is faster than checking for a path."""


def open_whole(source: Any, path: str) -> WireBatch:
    """`open_wire` of frames or a blob, for callers that read all of it: verifies all checksums."""
    how = usable_reading(path, None, None, None, False, value_by_value=True)
    remedy = "send columns with encode_fields(columns, lengths=...), rows with encode_rows(rows)"
    return batch_of_message(open_message(source, path, how), remedy)


def batch_of_message(message: Message, remedy: str = "use decode") -> WireBatch:
    """The `WireBatch` of an open message; the error for a message without a batch has `remedy`."""
    return WireBatch(source_of_message(message, remedy))
