"""A storage backend for TransferQueue that moves columns, not rows.

Import this module before `transfer_queue.init`, in the process that calls it. It registers the
backend under the name ``SimpleStorage``. Every other process imports it by itself, when it
unpickles the configuration that `transfer_queue.init` fetches from the controller.

A put sends one message to each storage unit. A unit keeps the messages, and the place of each row
in them. It answers a get with one message, in which each column is one block. For columns whose
rows came in many puts, it then keeps the joined rows in place of those messages. The controller and
all other messages stay TransferQueue's.
"""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from jagcodec import concat_rows
from jagcodec._arguments import check_options
from jagcodec._version import __version__
from jagcodec.columns.batch import AS_IT_IS, Stored, all_stored, closed, stored, to_send
from jagcodec.columns.column import column_of
from jagcodec.columns.of_tensors import (
    Dense,
    Jagged,
    Payloads,
    StridedNested,
    TensorColumn,
    TensorDictBatch,
    Unbatched,
)
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    TransportError,
    UnsupportedTypeError,
    WireFormatError,
    brief,
)
from jagcodec.integrations import needed, options_of_environment
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, contiguous_bits, same_width_dtype
from jagcodec.produce.jagged_tensors import stack_or_nest
from jagcodec.rows.nested import parts_of
from jagcodec.rows.non_tensor import batch_of, is_stack, rows_of_leaf
from jagcodec.rows.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits
from jagcodec.wire.read.wire_batch import WireBatch, open_wire
from jagcodec.wire.write.encoder import Columns, encode
from jagcodec.wire.write.parts import parts_to_send

with needed(__name__, "TransferQueue: pip install 'TransferQueue>=0.1.9'"):
    import ray
    import transfer_queue


def _changed(difference: str) -> ImportError:
    """The error of a TransferQueue that lacks something that this module builds on."""
    version = getattr(transfer_queue, "__version__", "unknown")
    return ImportError(
        f"jagcodec.integrations.transfer_queue: expected TransferQueue with {difference}, found "
        f"version {version} without it; install one of 0.1.9 to 0.1.11, or a newer jagcodec"
    )


def _part(owner: Any, path: str) -> Any:
    """What a module or class of TransferQueue has at a dotted path."""
    found = owner
    for name in path.split("."):
        if not hasattr(found, name):
            raise _changed(f"{_name_of(owner)}.{path}")
        found = getattr(found, name)
    return found


def _name_of(owner: Any) -> str:
    """The name of a class, or of a module without its packages."""
    return str(owner.__name__).rpartition(".")[2]


try:
    from transfer_queue import interface
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.storage import simple_storage
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider, simple_storage_bootstrap
    from transfer_queue.storage.managers.base import StorageManagerFactory
    from transfer_queue.storage.managers.simple_storage_manager import (
        AsyncSimpleStorageManager,
        RoutingGroup,
    )
    from transfer_queue.storage.simple_storage import StorageUnitData
    from transfer_queue.utils.logging_utils import get_logger
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, ZMQServerInfo

    # Up to 0.1.11 a storage unit has a method for each request, later one `PayloadTransfer`.
    PayloadTransfer: Any = None
    if find_spec("transfer_queue.storage.payload_transfer") is not None:
        PayloadTransfer = _part(
            import_module("transfer_queue.storage.payload_transfer.base"), "PayloadTransfer"
        )
except ImportError as _error:
    raise _changed(f"all modules and names of 0.1.11 ({_error})") from _error

__all__ = ["installed"]

NAME = "SimpleStorage"  # `transfer_queue.close` and the metrics compare with it
MESSAGE = f"jagcodec {__version__}"  # the key of a message in the body of a request
# The key in `meta` of a reply for the names of columns that are lists with tensors in them.
# TransferQueue's own code nests those.
WITH_TENSORS = "with_tensors"

# With fewer rows than this in each message, a get takes longer for the messages than for the rows:
# then the unit keeps the joined rows for the next get.
_FEWEST_ROWS_PER_MESSAGE = 4

_logger = get_logger(__name__)


def installed() -> bool:
    """Whether the TransferQueue client of this process uses jagcodec's storage units.

    Example:
        .. code-block:: python

            import transfer_queue
            from jagcodec.integrations.transfer_queue import installed

            transfer_queue.init()
            print(installed())  # True if the process that started the queue imported this module

    Returns:
        False if the storage units are TransferQueue's own, and before `transfer_queue.init`.
    """
    return isinstance(
        getattr(interface._TQ_CLIENT, "storage_manager", None), _JagcodecStorageManager
    )


# --- options and messages ----------------------------------------------------------------------


@dataclass(frozen=True)
class StorageOptions:
    """The configuration under ``backend.SimpleStorage.jagcodec``, as for `encode` and `decode`."""

    allow_pickle: bool = False
    elide: bool = False
    narrow: bool = False
    limits: Limits = DEFAULT_LIMITS

    def encode(self, columns: Columns) -> list[Any]:
        """The message of columns in memory."""
        return self._encode(columns, narrow=self.narrow, elide=self.elide)

    def encode_again(
        self, columns: Columns, how: Stored, meta: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """The message of columns that came in other messages, stored `how` those stored them."""
        narrow = self.narrow or [path for path in how.narrow if path[0] in columns.columns] or False
        return self._encode(columns, narrow=narrow, elide=how.elided, meta=meta)

    def _encode(self, columns: Columns, **options: Any) -> list[Any]:
        with self._remedy():
            frames: list[Any] = encode(columns, allow_pickle=self.allow_pickle, **options)
        return frames

    @contextmanager
    def _remedy(self) -> Iterator[None]:
        """Name the option in errors about values that cannot be encoded."""
        try:
            yield
        except UnsupportedTypeError as error:
            detail = f"{error.detail}; or set backend.{NAME}.jagcodec.allow_pickle to true"
            raise UnsupportedTypeError(error.reason, error.path, detail) from error

    def parts(self, columns: Columns, groups: Sequence[Chosen]) -> list[Columns]:
        """The columns of each group of rows, for a message each."""
        with self._remedy():
            return parts_to_send(
                columns, groups, narrow=self.narrow, allow_pickle=self.allow_pickle
            )

    def open(self, frames: Any, limits: Limits | None = None) -> WireBatch:
        return open_wire(frames, allow_pickle=self.allow_pickle, limits=limits or self.limits)

    def open_sent(self, body: Any, rows: int, where: str) -> WireBatch:
        """The message that a peer sent, which must have so many rows."""
        frames = content_of(body, where)
        if type(frames) is not list:  # if it is a string, `open_wire` would read a file
            detail = f"expected the frames of a message, found {brief(frames)}"
            raise WireFormatError("foreign", where, detail)
        try:
            batch = self.open(frames)
        except WireFormatError as error:
            raise WireFormatError(error.reason, f"{where}: {error.path}", error.detail) from error
        if batch.batch_size != (rows,):
            found = " x ".join(map(str, batch.batch_size))
            raise WireFormatError("bad_rows", where, f"expected {rows} rows, found {found}")
        return batch


_OPTIONS = {"allow_pickle": bool, "elide": bool, "narrow": bool, "limits": Mapping}


def options_of(config: Mapping[str, Any]) -> StorageOptions:
    """The options of a configuration; the environment decides those that it leaves out."""
    where, given = f"backend.{NAME}.jagcodec", config.get("jagcodec")
    _check_type(given, Mapping, where)
    given = {} if given is None else given
    check_options(given, _OPTIONS, where)
    for name, value in given.items():
        _check_type(value, _OPTIONS[name], f"{where}.{name}")
    limits = given.get("limits") or {}
    check_options(limits, [field.name for field in fields(Limits)], f"{where}.limits")
    chosen = {**options_of_environment(), **given, "limits": Limits(**limits)}
    return StorageOptions(**chosen)


def _check_type(value: Any, kind: Any, path: str) -> None:
    if not isinstance(value, kind) and not (value is None and kind is Mapping):
        expected = "true or false" if kind is bool else "a mapping of options"
        raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {brief(value)}")


def body_of(frames: Sequence[Any]) -> dict[str, Any]:
    """A message as TransferQueue's encoder sends it: each buffer as a frame, without a copy."""
    header, *buffers = frames
    return {MESSAGE: [bytes(header), *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]}


def content_of(body: Any, where: str) -> Any:
    """What a peer sent under `MESSAGE`; an error if it uses another version or another backend."""
    names = list(body) if isinstance(body, Mapping) else []
    if names == [MESSAGE]:
        return body[MESSAGE]
    ours = [name for name in names if str(name).startswith("jagcodec ")]
    found = ours[0] if ours else "TransferQueue's own format"
    detail = f"expected a message of {MESSAGE}, found {found}; install this version everywhere, "
    detail += "and import jagcodec.integrations.transfer_queue before transfer_queue.init"
    raise TransportError("peer_failed", where, detail)


# --- columns -----------------------------------------------------------------------------------


def sendable(data: Any) -> Columns:
    """The columns of a put; rectangles become jagged, because TransferQueue nests their rows."""
    splits: dict[int, RowSplits] = {}
    rows, pool = len(data), RowSplitsPool()

    def column(name: str, leaf: Any) -> Any:
        holder = column_of(leaf)
        if isinstance(holder, Payloads):
            if is_stack(leaf):
                objects = holder.own_objects()
                return leaf if objects is None else objects
            values = _dealt(leaf.data, rows)
            return _column_of(values, [1] * len(values))
        view = holder.view(f"put({name!r})", pool, detach=True)
        if view is not None:
            return view
        if not isinstance(holder, Dense):
            return _values_of_leaf(leaf)
        if leaf.dim() == 1:
            return leaf
        length, cells = leaf.shape[1], contiguous_bits(leaf.detach().cpu()).flatten(0, 1)
        if length not in splits:
            splits[length] = RowSplits.from_lengths(np.full(rows, length))
        return RaggedView(cells, cells.dtype, cells.shape, 1, None, splits[length])

    return Columns(rows, {name: column(name, leaf) for name, leaf in data.items()})


def _dealt(payload: Any, rows: int) -> list[Any]:
    """The items of a payload with one for each row; any other payload is repeated for every row."""
    items = isinstance(payload, torch.Tensor | np.ndarray) and len(payload.shape) > 0
    deal = (items or type(payload) is list) and len(payload) == rows
    return list(payload) if deal else [payload] * rows


def _values_of_leaf(leaf: Any) -> list[Any]:
    """The rows of a column as TransferQueue holds them: tensors and objects."""
    holder = column_of(leaf)
    if isinstance(holder, Payloads):
        return rows_of_leaf(leaf, len(leaf))
    has_parts = isinstance(holder, (TensorColumn, TensorDictBatch, Unbatched))
    return list(leaf.unbind(0)) if has_parts else list(leaf)


def _column_of(values: list[Any], ragged_dims: Iterable[int]) -> Any:
    """Values as one column, nested as TransferQueue nests them; a list if that is not possible.

    `ragged_dims` are those of the columns that the values come from, and 1 for rectangles. If all
    shapes are equal, a ragged dim other than 1 decides; TransferQueue would use dim 1.
    """
    if not all(type(value) is torch.Tensor for value in values):
        return values
    known = set(ragged_dims) - {1}
    for dim in (*known, None) if len(known) == 1 else (None,):
        with suppress(ArgumentError, ArgumentTypeError):  # their dtypes or shapes do not fit
            return stack_or_nest(values, always_nest=values[0].dim() > 0, ragged_dim=dim)
    return values


def _chosen(batches: Sequence[WireBatch], index: Sequence[int], names: Iterable[str]) -> WireBatch:
    """These rows and columns of several messages, as one open batch."""
    names = tuple(names)
    parts = [batch if batch.fields == names else batch.select(names) for batch in batches]
    return (concat_rows(parts) if len(parts) > 1 else parts[0]).rows(index)


def _rows_of(
    batches: Sequence[WireBatch],
    index: Sequence[int],
    whole: WireBatch,
    read: Callable[[WireBatch], Iterable[tuple[str, Any]]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of `whole`, which are rows of `batches`: in one piece, or value by value."""
    with suppress(ArgumentError, ArgumentTypeError):  # some column differs between batches
        return dict(read(whole)), {}
    columns: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name in whole.fields:
        try:
            columns |= read(whole.select([name]))
        except (ArgumentError, ArgumentTypeError):
            others[name] = _column_of(*_values_of_rows(batches, index, name))
    return columns, others


def _values_of_rows(
    batches: Sequence[WireBatch], index: Sequence[int], name: str
) -> tuple[list[Any], list[int]]:
    """Rows of one column as TransferQueue holds them, and for each the ragged dim of its column."""
    values: list[Any] = []
    ragged_dims: list[int] = []
    for batch in batches:
        leaf = closed(batch[name])
        dim = parts_of(leaf).ragged_dim if isinstance(column_of(leaf), Jagged) else 1
        values += _values_of_leaf(leaf)
        ragged_dims += [dim] * len(batch)
    return [values[row] for row in index], [ragged_dims[row] for row in index]


def field_schema(data: Any) -> dict[str, dict[str, Any]]:
    """What TransferQueue's `extract_field_schema` returns, read from columns instead of rows."""
    schema: dict[str, dict[str, Any]] = {}
    for name, leaf in data.items():
        holder = column_of(leaf)
        tensor, nested = holder.cells() is not None, isinstance(holder, (Jagged, StridedNested))
        field = {"dtype": leaf.dtype if tensor else None, "shape": None, "is_nested": nested}
        schema[name] = {**field, "is_non_tensor": not tensor}
        view = holder.view(f"put({name!r})", RowSplitsPool(), detach=True)
        if isinstance(holder, StridedNested):
            schema.update(extract_field_schema(data.select(name)))
        elif view is not None:
            before, after = view.shape[: view.ragged_dim - 1], view.shape[view.ragged_dim :]
            shapes = [(*before, length, *after) for length in view.row_splits.lengths.tolist()]
            schema[name] |= {"shape": torch.Size(shapes[0]), "per_sample_shapes": shapes}
        elif tensor:
            schema[name]["shape"] = leaf.shape[1:] or torch.Size((1,))
    return schema


# --- storage units -----------------------------------------------------------------------------


class _StoredRow(NamedTuple):
    """A row of the queue: a row of a message. The message is freed with the last of its rows."""

    batch: WireBatch
    row: int


def _places(rows: Sequence[_StoredRow]) -> tuple[list[WireBatch], list[int]]:
    """The messages of some rows, and the place of each row if these are end to end."""
    firsts: dict[WireBatch, int] = {}
    end = 0
    for batch, _ in rows:
        if batch not in firsts:
            firsts[batch] = end
            end += len(batch)
    return list(firsts), [firsts[batch] + row for batch, row in rows]


class _RowStorage(StorageUnitData):  # type: ignore[misc]
    """What a storage unit holds: `_StoredRow`s where TransferQueue has tensors and objects."""

    def __init__(self, storage_size: int | None, options: StorageOptions) -> None:
        super().__init__(storage_size)
        self.options = options

    def put_data(self, field_data: Any, global_indexes: list[int]) -> None:
        """Keep a message."""
        self._keep(self.options.open_sent(field_data, len(global_indexes), "put"), global_indexes)

    def store(self, global_indexes: list[int], field_data: Any, data_parser: None) -> None:
        """`put_data`, called as a `PayloadTransfer` calls it."""
        self.put_data(field_data, global_indexes)

    def _keep(self, batch: WireBatch, global_indexes: list[int]) -> None:
        rows = [_StoredRow(batch, row) for row in range(len(batch))]
        super().put_data(dict.fromkeys(batch.fields, rows), global_indexes)

    def get_data(self, fields: Any, global_indexes: list[int]) -> dict[str, Any]:
        """A message with these columns of these rows."""
        found = super().get_data(content_of(fields, "get"), global_indexes)
        groups: dict[tuple[int, ...], list[str]] = {}  # columns whose rows are in the same messages
        for name, rows in found.items():
            groups.setdefault(tuple(map(id, rows)), []).append(name)
        columns: dict[str, Any] = {}
        scattered: list[str] = []
        how = AS_IT_IS
        for names in groups.values():
            batches, index = _places(found[names[0]])
            whole = _chosen(batches, index, names)
            one, others = _rows_of(batches, index, whole, lambda b: to_send(b).columns.items())
            columns |= one | others
            how = all_stored([how, self._stored(whole, len(batches))])
            if len(batches) > max(1, len(index) // _FEWEST_ROWS_PER_MESSAGE):
                scattered += list(one)
        with_tensors = [name for name, column in columns.items() if _holds_tensors(column)]
        batch = Columns(len(global_indexes), {name: columns[name] for name in found})
        meta = {WITH_TENSORS: with_tensors} if with_tensors else None
        frames = self.options.encode_again(batch, how, meta)
        joined = {name: columns[name] for name in scattered if name not in with_tensors}
        if joined:
            if len(joined) < len(columns):
                # Do not keep the reply itself: the unit would hold its other columns twice.
                frames_to_keep = self.options.encode_again(batch._replace(columns=joined), how)
            else:
                frames_to_keep = frames
            self._replace_rows(global_indexes, joined, frames_to_keep)
        return body_of(frames)

    def _stored(self, rows: WireBatch, messages: int) -> Stored:
        """How to send rows that came in so many messages.

        `encode` looks for repeats if the columns came elided, or the rows came in several messages.
        In the rows of one message, the client has looked for them already.
        """
        how = stored(rows)
        elided = how.elided or (self.options.elide and messages > 1)
        return how if elided == how.elided else how._replace(elided=elided)

    def _replace_rows(
        self, global_indexes: list[int], joined: Iterable[str], frames: list[Any]
    ) -> None:
        """Keep one message in place of those that had these rows: the next get is faster."""
        kept = self.options.open(frames, NO_LIMITS)
        rows = [_StoredRow(kept, row) for row in range(len(kept))]
        for name in joined:
            self.field_data[name].update(zip(global_indexes, rows, strict=True))

    # Checkpoints have TransferQueue's format: a queue without jagcodec can load them.

    @classmethod
    def of_stock(cls, data: StorageUnitData, options: StorageOptions) -> _RowStorage:
        """The rows of one of TransferQueue's own storage units."""
        storage = cls(None, options)
        for name, rows in data.field_data.items():
            storage.field_data[name] = dict.fromkeys(rows)  # in their order; there may be none
            groups: dict[Any, list[int]] = {}
            for key, row in rows.items():
                groups.setdefault(_form_of(row), []).append(key)
            for keys in groups.values():
                values = [rows[key] for key in keys]
                column = _column_of(values, map(_ragged_dim_of, values))
                frames = options.encode(Columns(len(keys), {name: column}))
                storage._keep(options.open(frames, NO_LIMITS), keys)
        storage.storage_size, storage._active_keys = data.storage_size, set(data._active_keys)
        return storage

    def without_values(self) -> StorageUnitData:
        """One of TransferQueue's own storage units, with the same row numbers and nothing else."""
        data = StorageUnitData(self.storage_size)
        data._active_keys = set(self._active_keys)
        return data

    def as_stock(self) -> StorageUnitData:
        """One of TransferQueue's own storage units with the same rows, for a checkpoint."""
        data = self.without_values()
        for name, rows in self.field_data.items():
            values = map(_saved, *_values_of_rows(*_places(list(rows.values())), name))
            data.field_data[name] = dict(zip(rows, values, strict=True))
        return data


RAGGED_DIM = "jagcodec_ragged_dim"  # an attribute of a saved tensor, which TransferQueue ignores


def _saved(value: Any, ragged_dim: int) -> Any:
    """A value for a checkpoint."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is torch.strided and value.dtype not in _PICKLED:
        return _SavedTensor(value)
    value = value.clone()  # a pickled view brings all of its storage
    if ragged_dim > 1:
        setattr(value, RAGGED_DIM, ragged_dim)
    return value


_PICKLED = {*NUMPY_DTYPES, torch.bfloat16, torch.complex64, torch.complex128}


class _SavedTensor:
    """Pickles a tensor as integers of its width, because torch cannot read what it writes of it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._words = value.view(same_width_dtype(value.dtype)).clone()
        self._dtype = value.dtype

    def __reduce__(self) -> Any:
        return torch.Tensor.view, (self._words, self._dtype)


def _ragged_dim_of(value: Any) -> int:
    """The ragged dim of the column that a value of a checkpoint was in."""
    return getattr(value, RAGGED_DIM, 1)


def _form_of(value: Any) -> Any:
    """A key of a value in a checkpoint: values with equal keys can be one column of a message."""
    if type(value) is not torch.Tensor:
        return None
    shape, dim = list(value.shape), _ragged_dim_of(value)
    return value.dtype, value.layout, dim, (*shape[: dim - 1], *shape[dim:]), len(shape)


def _holds_tensors(column: Any) -> bool:
    """Whether a column is a list of values with tensors among them."""
    return type(column) is list and any(
        isinstance(value, torch.Tensor | TensorDictBase) for value in column
    )


def _reply_to(request: Any, unit: str, load_data: Any, store_data: Any) -> Any:
    """The reply to a put or a get; None for other requests, and for requests that fail.

    For None, TransferQueue's own code answers, and names the fault. Not all requests are
    left to that code: it counts the cores of the host each time, which is slower than a put.
    """
    body, kind = request.body, request.request_type
    with suppress(Exception):
        if kind == ZMQRequestType.PUT_DATA:
            store_data(body["global_indexes"], body["data"], None)
            return ZMQMessage.create(ZMQRequestType.PUT_DATA_RESPONSE, unit, {})
        if kind == ZMQRequestType.GET_DATA:
            reply = {"data": load_data(body["fields"], body["global_indexes"])}
            return ZMQMessage.create(ZMQRequestType.GET_DATA_RESPONSE, unit, reply)
    return None


def _handle_request(
    theirs: Callable[..., Any], request: Any, *, storage_id: str, load_data: Any, store_data: Any
) -> Any:
    """What a `PayloadTransfer` answers: our reply, or that of its own `handle_request`."""
    return _reply_to(request, storage_id, load_data, store_data) or theirs(
        request, storage_id=storage_id, load_data=load_data, store_data=store_data
    )


_Stock: Any = _part(simple_storage, "SimpleStorageUnit.__ray_metadata__.modified_class")


class _JagcodecStorageUnit(_Stock):  # type: ignore[misc]
    """A storage unit whose rows are in the messages that it received."""

    def __init__(self, *args: Any, options: StorageOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No client knows the address before this returns.
        self.storage_data = _RowStorage(self.storage_unit_size, options)
        if PayloadTransfer is not None:
            # All else of the transfer stays TransferQueue's, such as its counters.
            transfer = self.payload_transfer
            transfer.handle_request = partial(_handle_request, transfer.handle_request)

    def get_zmq_server_info(self) -> _StorageUnitInfo:
        """The address, as a class of this module: unpickling it registers the backend."""
        info = super().get_zmq_server_info()
        return _StorageUnitInfo(info.role, info.id, info.ip, info.ports)

    def _handle_put(self, request: Any) -> Any:
        return self._reply_to(request) or super()._handle_put(request)

    def _handle_get(self, request: Any) -> Any:
        return self._reply_to(request) or super()._handle_get(request)

    def _reply_to(self, request: Any) -> Any:
        storage = self.storage_data
        return _reply_to(request, self.storage_unit_id, storage.get_data, storage.store)

    # TransferQueue's code sees its own storage for a moment. A unit has one thread for requests.

    def _handle_save_checkpoint(self, request: Any) -> Any:
        kept = self.storage_data
        try:
            self.storage_data = kept.as_stock()
            return super()._handle_save_checkpoint(request)
        except Exception as error:
            return self._failed(ZMQRequestType.SAVE_STORAGE_CHECKPOINT_RESPONSE, error)
        finally:
            self.storage_data = kept

    def _handle_load_checkpoint(self, request: Any) -> Any:
        kept = self.storage_data
        try:
            self.storage_data = kept.without_values()
            response = super()._handle_load_checkpoint(request)
            if response.body["success"]:
                kept = _RowStorage.of_stock(self.storage_data, kept.options)
            return response
        except Exception as error:
            return self._failed(ZMQRequestType.LOAD_STORAGE_CHECKPOINT_RESPONSE, error)
        finally:
            self.storage_data = kept

    def _failed(self, kind: Any, error: Exception) -> Any:
        """The answer in which TransferQueue's own handlers report a failure."""
        message = str(error) if isinstance(error, JagcodecError) else f"{error!r}"
        _logger.error(f"[{self.storage_unit_id}]: {message}")
        return ZMQMessage.create(kind, self.storage_unit_id, {"success": False, "message": message})


class _StorageUnitInfo(ZMQServerInfo):  # type: ignore[misc]
    """The address of a storage unit of this backend."""


# --- clients -----------------------------------------------------------------------------------


class _JagcodecStorageManager(AsyncSimpleStorageManager):  # type: ignore[misc]
    """The client's side of the storage units."""

    def __init__(self, controller_info: Any, config: Any, **kwargs: Any) -> None:
        self._options = options_of(config)
        super().__init__(controller_info, config, **kwargs)

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Send the rows to their storage units; nothing is sent if a value cannot be encoded."""
        if data_parser is not None:
            detail = f"expected None, found {brief(data_parser)}; parse columns before the put"
            raise ArgumentError("bad_option", "put(data_parser)", detail)
        if metadata.size == 0:
            return
        schema = field_schema(data)
        groups = self._groups(metadata)
        messages = self._messages(data, [group.batch_positions for group in groups.values()])
        request = self._put_to_single_storage_unit
        await self._ask_units("put", groups, request, map(body_of, messages))
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Fetch rows, each column of all storage units in one piece."""
        if metadata.size == 0:
            return TensorDict({}, batch_size=0)
        names = list(metadata.field_names)
        groups = self._groups(metadata)
        request = self._get_from_single_storage_unit
        replies = await self._ask_units("get", groups, request, [{MESSAGE: names}] * len(groups))
        batches = [
            self._answer(unit, group, names, body)
            for (unit, group), (_, body) in zip(groups.items(), replies, strict=True)
        ]
        # The rows of all storage units as one batch, in the order that was asked for.
        places = np.concatenate([group.batch_positions for group in groups.values()])
        index = np.argsort(places).tolist()
        with_tensors = {name for batch in batches for name in batch.meta.get(WITH_TENSORS, ())}
        joinable = [name for name in names if name not in with_tensors]
        whole = _chosen(batches, index, joinable)
        leaves, others = _rows_of(batches, index, whole, lambda b: b.to_tensordict().items())
        others |= {
            name: _column_of(*_values_of_rows(batches, index, name)) for name in with_tensors
        }
        leaves |= {name: self._packed(column) for name, column in others.items()}
        return batch_of({name: leaves[name] for name in names}, metadata.size)

    def _answer(self, unit: str, group: Any, names: Sequence[str], body: Any) -> WireBatch:
        """What a storage unit sent: the rows and columns that it was asked for, and no others."""
        where = f"get from storage unit {unit}"
        batch = self._options.open_sent(body, len(group.global_indexes), where)
        different = [f"{brief(name)} missing" for name in names if name not in batch.fields]
        different += [f"{brief(name)} in addition" for name in batch.fields if name not in names]
        if different:
            detail = f"expected the columns that were asked for, found {different[0]}"
            raise WireFormatError("bad_value", where, detail)
        with_tensors = batch.meta.get(WITH_TENSORS, [])
        if type(with_tensors) is not list or any(name not in names for name in with_tensors):
            detail = f"expected names of columns as {WITH_TENSORS}, found {brief(with_tensors)}"
            raise WireFormatError("bad_value", where, detail)
        return batch

    def _packed(self, column: Any) -> Any:
        """A column that `_column_of` made, in the form that TransferQueue returns."""
        if type(column) is not list:
            return column
        # TransferQueue would convert rows of several dtypes to the dtype of the first row.
        tensors = all(isinstance(row, torch.Tensor) for row in column)
        one_kind = tensors and len({(row.dtype, row.dim(), row.layout) for row in column}) == 1
        return self._pack_field_values(column) if one_kind else NonTensorStack(*column)

    def _groups(self, metadata: BatchMeta) -> dict[str, Any]:
        """The rows of each storage unit. A unit of another backend is an error."""
        for info in self.storage_unit_infos.values():
            if not isinstance(info, _StorageUnitInfo):
                content_of({}, f"storage unit {info.id} at {info.ip}")
        groups: dict[str, Any] = self._group_by_hash(metadata.global_indexes)
        return groups

    async def _ask_units(
        self, operation: str, groups: dict[str, Any], request: Any, bodies: Iterable[Any]
    ) -> Sequence[Any]:
        """The answers of storage units. Where TransferQueue repeats its requests, so does this."""
        calls = []
        for (unit, group), body in zip(groups.items(), bodies, strict=True):
            rows = group.global_indexes
            call = partial(request, rows, body, target_storage_unit=unit)
            if hasattr(self, "_request_with_retry"):  # from 0.1.11 on
                size = f"samples={len(rows)}"
                call = partial(self._request_with_retry, operation, unit, size, call)
            calls.append(call())
        return await asyncio.gather(*calls)

    def _messages(self, data: TensorDict, groups: Sequence[list[int]]) -> list[list[Any]]:
        """The rows of each group of positions as a message."""
        columns, options = sendable(data), self._options
        if len(groups) == 1:
            return [options.encode(columns)]
        chosen = [np.array(rows, dtype=np.int64) for rows in groups]
        return [options.encode(part) for part in options.parts(columns, chosen)]


# --- registration ------------------------------------------------------------------------------


_START: Any = _part(simple_storage_bootstrap, "initialize_simple_storage.__wrapped__")


def start_units(conf: Any) -> dict[str, Any]:
    """Start the storage units, where and as TransferQueue would start its own."""
    config = conf.backend[NAME]
    if (config.get("ssd_offload") or {}).get("enabled", False):
        detail = "expected false, because these storage units keep rows in memory, found true"
        raise ArgumentError("bad_option", f"backend.{NAME}.ssd_offload.enabled", detail)
    # TransferQueue's function starts the units: it decides how many there are, and on which nodes.
    # It looks the class up as a global of its module, and has no argument for another one. So run
    # its code in a function whose globals have our class under that name. A patch of the module
    # would change it for other callers, too. `_check_version` has checked that the code uses the
    # name, and has no closure.
    unit = partial(_unit_actor, options_of(config))
    names = {**_START.__globals__, "SimpleStorageUnit": types.SimpleNamespace(options=unit)}
    start = types.FunctionType(_START.__code__, names, None, _START.__defaults__)
    start.__kwdefaults__ = _START.__kwdefaults__
    try:
        controller = _controller()
        content_of({ray.get(controller.__ray_call__.remote(_version_here)): None}, "the controller")
        handles: dict[str, Any] = start(conf)
    except ray.exceptions.RayError as error:
        raise _not_importable(error) from error
    _logger.info(f"{MESSAGE} runs the storage units: {', '.join(handles)}")
    return handles


def _controller() -> Any:
    name, namespace = "TransferQueueController", "transfer_queue"
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        detail = f"expected an actor of this name in Ray's namespace {namespace!r}, found none; "
        detail += "start the storage units with transfer_queue.init"
        raise TransportError("peer_failed", name, detail) from error


def _unit_actor(options: StorageOptions, **given: Any) -> Any:
    """What ``SimpleStorageUnit.options(...)`` is in `start_units`: the same options, our class."""
    chosen = simple_storage.SimpleStorageUnit.options(**given).bind().get_options()
    actor = ray.remote(_JagcodecStorageUnit).options(**chosen)
    return types.SimpleNamespace(remote=partial(actor.remote, options=options))


def _version_here(_: Any) -> str:
    """The version in the controller, which will unpickle `_StorageUnitInfo`s."""
    return MESSAGE


def _not_importable(error: Exception) -> Exception:
    """Ray's error; if a module of jagcodec is missing, one that names the node and the remedy."""
    missing = re.search(r"No module named '(jagcodec[^']*)'", str(error))
    if missing is None:
        return error
    node = re.search(r"ip[=:] ?([^,)\s]+)", str(error))
    detail = f"expected {MESSAGE} at the controller and the storage units, found no module named "
    detail += f"{missing[1]!r}; install this version of jagcodec there"
    return TransportError("peer_failed", f"node {node[1] if node else 'unknown'}", detail)


_RELIED_ON: dict[Any, str] = {
    AsyncSimpleStorageManager: "put_data get_data notify_data_update _group_by_hash "
    "_pack_field_values _put_to_single_storage_unit _get_from_single_storage_unit "
    "storage_unit_infos",
    _Stock: "get_zmq_server_info _handle_save_checkpoint _handle_load_checkpoint storage_data "
    "storage_unit_id storage_unit_size "
    + ("_handle_put _handle_get" if PayloadTransfer is None else "payload_transfer"),
    StorageUnitData: "put_data get_data clear field_data storage_size _active_keys",
    BatchMeta: "size global_indexes field_names partition_ids",
    RoutingGroup: "global_indexes batch_positions",
    StorageBootstrapProvider: "register_provider",
    StorageManagerFactory: "register",
    ZMQMessage: "create",
    ZMQRequestType: "PUT_DATA GET_DATA PUT_DATA_RESPONSE GET_DATA_RESPONSE "
    "SAVE_STORAGE_CHECKPOINT_RESPONSE LOAD_STORAGE_CHECKPOINT_RESPONSE",
    ZMQServerInfo: "role id ip ports",
    interface: "_TQ_CLIENT",
}
if PayloadTransfer is not None:
    _RELIED_ON[PayloadTransfer] = "handle_request"


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has an attribute, or a method that sets it on an instance."""
    if hasattr(owner, name):
        return True
    methods = (method for cls in getattr(owner, "__mro__", ()) for method in vars(cls).values())
    codes = (method.__code__ for method in methods if isinstance(method, types.FunctionType))
    return any(name in code.co_names for code in codes)


def _check_version() -> None:
    """Refuse a TransferQueue that lacks something that this module builds on."""
    names = ((owner, name) for owner, names in _RELIED_ON.items() for name in names.split())
    missing = [f"{_name_of(owner)}.{name}" for owner, name in names if not _has(owner, name)]
    if missing:
        raise _changed(", ".join(missing))
    code = getattr(_START, "__code__", None)
    if code is None or "SimpleStorageUnit" not in code.co_names or code.co_freevars:
        raise _changed("initialize_simple_storage, a function that starts each SimpleStorageUnit")


_check_version()
StorageManagerFactory.register(NAME)(_JagcodecStorageManager)
StorageBootstrapProvider.register_provider(NAME)(start_units)
