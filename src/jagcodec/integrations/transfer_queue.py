"""TransferQueue in this wire format: call `install` in every process that takes part."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from jagcodec.errors import (
    ArgumentError,
    UnsupportedTypeError,
    WireFormatError,
    brief,
    describe,
)
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import stack_of_payloads
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.select import select_leaf
from jagcodec.wire import decoder, encoder
from jagcodec.wire.frames import blob_size, writable_bytes, write_blob
from jagcodec.wire.limits import Limits
from jagcodec.wire.registry import register_type

_NAMES = (
    *("encode", "decode", "MsgpackEncoder", "MsgpackDecoder", "_encoder", "_decoder"),
    *("batch_encode_into", "batch_decode_from"),
)

try:
    import cloudpickle
    from transfer_queue import metadata
    from transfer_queue.metadata import BatchMeta
    from transfer_queue.storage.managers.base import StorageManager
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from transfer_queue.utils import serial_utils, zmq_utils

    _STOCK = {
        **{name: getattr(serial_utils, name) for name in _NAMES},
        "extract_field_schema": metadata.extract_field_schema,
    }
    # Where SimpleStorage splits columns before they are sent, and joins them again.
    _STOCK_METHODS: dict[tuple[type, str], Any] = {
        (cls, name): vars(cls)[name]
        for cls, name in (
            (AsyncSimpleStorageManager, "_select_by_positions"),
            (AsyncSimpleStorageManager, "put_data"),
            (AsyncSimpleStorageManager, "get_data"),
            (StorageManager, "_do_handshake_with_controller"),
        )
    }
except (ImportError, AttributeError, KeyError) as _error:
    if "transfer_queue" not in sys.modules or sys.modules["transfer_queue"] is None:
        raise ModuleNotFoundError(
            "jagcodec.integrations.transfer_queue needs TransferQueue: "
            "pip install 'jagcodec[transfer-queue]'",
            name=getattr(_error, "name", None),
        ) from _error
    _found = getattr(sys.modules["transfer_queue"], "__version__", "another")
    raise ImportError(
        "jagcodec.integrations.transfer_queue replaces functions of TransferQueue 0.1.9 to 0.1.11, "
        f"found version {_found}, where one of them is missing ({_error}); "
        "pip install 'jagcodec[transfer-queue]'",
    ) from _error


@dataclass
class _Options:
    allow_pickle: bool = False
    default: Callable[[Any], Any] | None = None
    limits: Limits | None = None


_options = _Options()


def install(
    *,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    limits: Limits | None = None,
) -> None:
    """Replace TransferQueue's encoder and decoder with this library's, in this process.

    Example:
        .. code-block:: python

            import ray, transfer_queue
            from jagcodec.integrations.transfer_queue import install

            install()
            ray.init(runtime_env={
                "worker_process_setup_hook": "jagcodec.integrations.transfer_queue.install"
            })
            transfer_queue.init()

    Args:
        allow_pickle: Pickle objects in columns and tags that cannot be encoded, and unpickle them
            on arrival.
        default: As for `encode`: what to send in place of an object that cannot be encoded.
        limits: Of what arrives at this process, as for `decode`.

    Raises:
        UnsupportedTypeError: Not by this call, but inside TransferQueue's own error, when it sends
            an object that cannot be encoded.

    Every process of a TransferQueue needs this. Call it before `transfer_queue.init`, and name it
    as ``worker_process_setup_hook`` in `ray.init`, so that the controller, the storage units and
    all other workers call it. A second call only changes these options.

    Everything that TransferQueue sends then goes through `encode` and `decode`: its messages,
    whatever they hold, its metadata, and the values that `batch_encode_into` writes for key-value
    stores. Only a `data_parser`, which is code, is still sent by cloudpickle.
    """
    _options.allow_pickle, _options.default = allow_pickle, default
    _options.limits = limits
    _replace(_STOCK, _OURS)
    for (cls, name), method in zip(_STOCK_METHODS, _OUR_METHODS, strict=True):
        setattr(cls, name, method)


def uninstall() -> None:
    """Restore TransferQueue's own encoder and decoder, in this process."""
    _replace(_OURS, _STOCK)
    for (cls, name), method in _STOCK_METHODS.items():
        setattr(cls, name, method)


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Replace objects in every module that imported them, under whatever name."""
    by_id = {id(value): new[name] for name, value in old.items()}
    for module in list(sys.modules.values()):
        if module is sys.modules[__name__] or not isinstance(module, ModuleType):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)]


# --- messages ----------------------------------------------------------------------------------


@dataclass
class _Code:
    """A received `data_parser`, unpickled only when a storage unit calls it.

    It is TransferQueue's own contract that whoever can put to a storage unit can run code there.
    On the wire it is bytes, at a place that only TransferQueue's decoder looks at: no other
    `decode` of this process makes anything that can be called.
    """

    pickled: bytes

    def __call__(self, fields: Any) -> Any:
        return cloudpickle.loads(self.pickled)(fields)


def _encode(obj: Any) -> list[Any]:
    """Replaces TransferQueue's: a message, or any value, to frames."""
    try:
        return _encoded(_with_code(_columnar(obj)))
    except UnsupportedTypeError as error:
        if not _is_reply(obj):
            raise
        # Raised here, the error would end the thread that serves all clients.
        body = {"success": False, "message": f"{type(error).__name__}: {error}"}
        refusal = _REFUSAL.value
        return _encoded({**obj, "request_type": refusal, "body": body})


def _encoded(obj: Any) -> list[Any]:
    return encoder.encode(obj, allow_pickle=_options.allow_pickle, default=_options.default)


def _decode(frames: Any) -> Any:
    """Replaces TransferQueue's: frames to the value that was encoded."""
    try:
        value = decoder.decode(frames, allow_pickle=_options.allow_pickle, limits=_options.limits)
        return _with_callable(value)
    except WireFormatError as error:
        if error.reason not in ("foreign", "bad_header", "unknown_kind"):
            raise
        raise WireFormatError(
            error.reason,
            error.path,
            f"{error.detail}. If TransferQueue's own encoder wrote this message: {_REMEDY}",
        ) from error


# What every requester takes for a failure; the first one since TransferQueue 0.1.10.
_REFUSAL: Any = getattr(
    zmq_utils.ZMQRequestType, "REQUEST_ERROR", zmq_utils.ZMQRequestType.PUT_GET_ERROR
)

_REMEDY = (
    "call jagcodec.integrations.transfer_queue.install() in every process, including the "
    "controller and the storage units: name it as worker_process_setup_hook in "
    "ray.init(runtime_env=...)"
)


def _with_code(obj: Any) -> Any:
    """A message to a storage unit with its `data_parser` as bytes."""
    parser = _parser_of(obj)
    if not callable(parser):
        return obj
    pickled = parser.pickled if type(parser) is _Code else cloudpickle.dumps(parser)
    return {**obj, "body": {**obj["body"], "data_parser": pickled}}


def _with_callable(obj: Any) -> Any:
    """A message from `_with_code` with its `data_parser` as something to be called."""
    parser = _parser_of(obj)
    if type(parser) is bytes:
        obj["body"]["data_parser"] = _Code(parser)
    return obj


def _parser_of(obj: Any) -> Any:
    body: Any = obj.get("body") if type(obj) is dict else None
    return body.get("data_parser") if type(body) is dict else None


def _is_reply(obj: Any) -> bool:
    kind = obj.get("request_type") if type(obj) is dict else None
    return type(kind) is str and kind.endswith("_RESPONSE")


class _Encoder:
    """Replaces TransferQueue's `MsgpackEncoder`."""

    def encode(self, obj: Any) -> list[Any]:
        return _encode(obj)


class _Decoder:
    """Replaces TransferQueue's `MsgpackDecoder`."""

    def decode(self, bufs: Any) -> Any:
        return _decode(bufs)


# --- metadata ----------------------------------------------------------------------------------


class _Shapes:
    """The shapes of all rows of a column as one array, where 512 tuples would be 512 records."""

    def __init__(self, rows: list[int] | None, shapes: list[tuple[int, ...]]) -> None:
        self.state = (rows, np.array(shapes, dtype=np.int64))


def _shapes(state: Any) -> Any:
    rows, shapes = state
    # Shapes without dims would take no bytes, however many there are.
    if not _is_table(shapes) or not shapes.shape[1]:
        raise ValueError("expected int64 shapes of at least one dim")
    if rows is not None and (type(rows) is not list or len(rows) != len(shapes)):
        raise ValueError(f"expected {len(shapes)} rows")
    tuples = list(zip(*shapes.T.tolist(), strict=True))
    return tuples if rows is None else dict(zip(rows, tuples, strict=True))


def _is_table(array: Any, ndim: int = 2) -> bool:
    return type(array) is np.ndarray and array.dtype == np.int64 and array.ndim == ndim


def _columnar_schema(schema: Any) -> Any:
    """A field schema with `_Shapes` for the shapes of rows that all have the same rank."""
    if type(schema) is not dict:
        return schema
    columnar = {}
    for name, field in schema.items():
        shapes = field.get("per_sample_shapes") if type(field) is dict else None
        values: Any = list(shapes.values()) if type(shapes) is dict else shapes
        if _are_alike(values):
            rows = list(shapes) if type(shapes) is dict else None
            field = {**field, "per_sample_shapes": _Shapes(rows, list(values))}
        columnar[name] = field
    return columnar


def _are_alike(shapes: Any) -> bool:
    """Whether these are shapes with the same number of dims, one or more, that int64 holds."""
    return (
        type(shapes) is list
        and {tuple} == set(map(type, shapes))
        and len(set(map(len, shapes))) == 1
        and {int} == {type(dim) for shape in shapes for dim in shape}
        and all(0 <= dim < 1 << 63 for shape in shapes for dim in shape)
    )


def _columnar(obj: Any) -> Any:
    body = obj.get("body") if type(obj) is dict else None
    if type(body) is not dict or "field_schema" not in body:
        return obj
    return {**obj, "body": {**body, "field_schema": _columnar_schema(body["field_schema"])}}


_SCHEMA = BatchMeta.__slots__.index("field_schema")


def _metadata_state(meta: BatchMeta) -> tuple[Any, ...]:
    state = list(meta.__getstate__())
    state[_SCHEMA] = _columnar_schema(state[_SCHEMA])
    return tuple(state)


def _metadata(state: Any) -> BatchMeta:
    if type(state) is not tuple or len(state) != len(BatchMeta.__slots__):
        raise ValueError(f"expected the {len(BatchMeta.__slots__)} attributes of a BatchMeta")
    meta = BatchMeta.__new__(BatchMeta)
    meta.__setstate__(state)
    return meta


def _extract_field_schema(data: TensorDict) -> dict[str, dict[str, Any]]:
    """Replaces TransferQueue's, which splits each jagged column into N tensors three times."""
    stock = _STOCK["extract_field_schema"]
    names: list[Any] = list(data.keys())
    jagged: dict[str, Any] = {name: leaf for name, leaf in data.items() if is_jagged(leaf)}
    if not jagged or not data.batch_size[0]:
        schema: dict[str, dict[str, Any]] = stock(data)
        return schema
    others = stock(data.exclude(*jagged))
    return {
        name: _jagged_schema(jagged[name], name) if name in jagged else others[name]
        for name in names
    }


def _jagged_schema(leaf: torch.Tensor, name: str) -> dict[str, Any]:
    view = view_of(leaf, f"extract_field_schema({name!r})")
    before, after = view.shape[: view.ragged_dim - 1], view.shape[view.ragged_dim :]
    shapes = [(*before, length, *after) for length in view.row_splits.lengths.tolist()]
    return {
        "dtype": view.dtype,
        "shape": torch.Size(shapes[0]),
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": shapes,
    }


# --- columns -----------------------------------------------------------------------------------


class _Rows(list[torch.Tensor]):
    """Rows of a jagged column, which lie end to end: a list, as it is for TransferQueue.

    Sent as one buffer and their lengths, where a list of tensors would be looked at one by one.
    """

    def __init__(self, jagged: torch.Tensor) -> None:
        view = view_of(jagged, "put_data")
        self._state = (values_of(view), view.row_splits.lengths, view.ragged_dim)
        super().__init__(_split(*self._state))
        self._sent = list(self)

    @property
    def state(self) -> Any:
        """Values, lengths and ragged dim; or a list of tensors, if one was replaced."""
        same = len(self) == len(self._sent) and all(map(operator.is_, self, self._sent))
        return self._state if same else self[:]


def _split(values: torch.Tensor, lengths: IntArray, dim: int) -> Iterable[torch.Tensor]:
    return torch.split(values, lengths.tolist(), dim=dim - 1)


def _row_list(state: Any) -> Any:
    """What `_Rows` sent, as a plain list. Each row has a length, which took 8 bytes."""
    if type(state) is list:
        return state
    values, lengths, dim = state
    if type(values) is not torch.Tensor or values.is_nested or values.layout is not torch.strided:
        raise ValueError(f"expected dense values, found {describe(values)}")
    if type(dim) is not int or not 1 <= dim <= values.dim():
        raise ValueError(f"expected one of {values.dim()} dims, found {brief(dim)}")
    if not _is_table(lengths, ndim=1) or (lengths < 0).any():
        raise ValueError("expected lengths of 0 or more")
    if sum(lengths.tolist()) != values.shape[dim - 1]:
        raise ValueError(f"expected lengths that add up to {values.shape[dim - 1]}")
    return list(_split(values, lengths, dim))


def _select_by_positions(field_data: Any, positions: list[int]) -> Any:
    """Replaces SimpleStorage's: the rows that one storage unit gets."""
    if is_jagged(field_data) and positions:
        chosen = np.array(positions, dtype=np.int64)
        return _Rows(select_leaf(field_data, chosen, RowSplitsPool(), "put_data"))
    return _stock_select(field_data, positions)


async def _put_data(
    self: AsyncSimpleStorageManager,
    data: TensorDict,
    metadata: BatchMeta,
    data_parser: Callable[[Any], Any] | None = None,
) -> None:
    """Wraps SimpleStorage's, which deals a `NonTensorData` out to the rows, or fails."""
    whole = {
        name: leaf
        for name, leaf in data.items()
        if isinstance(leaf, NonTensorData) and not _has_rows(leaf.data, len(leaf))
    }
    if whole:
        # Such a payload belongs to every row.
        data = data.copy()
        for name, leaf in whole.items():
            data.set(name, stack_of_payloads([leaf.data] * len(leaf)))
    await _stock_put_data(self, data, metadata, data_parser)


def _has_rows(payload: Any, rows: int) -> bool:
    """Whether a payload has one item for each row, as far as TransferQueue is concerned."""
    if isinstance(payload, torch.Tensor):
        return payload.dim() > 0 and payload.size(0) == rows
    if isinstance(payload, np.ndarray):
        return payload.ndim > 0 and len(payload) == rows
    return type(payload) is list and len(payload) == rows


async def _get_data(self: AsyncSimpleStorageManager, batch: BatchMeta) -> TensorDict:
    """Wraps SimpleStorage's: columns with equal row lengths then share their offsets."""
    td: TensorDict = await _stock_get_data(self, batch)
    pool = RowSplitsPool()
    columns: dict[str, Any] = dict(td.items())
    for name, leaf in columns.items():
        if is_jagged(leaf):
            view = view_of(leaf, f"get_data({name!r})", pool)
            if view.starts is None:
                row_splits = pool.unique(view.row_splits)
                jagged = nested_tensor(values_of(view), row_splits, view.ragged_dim)
                td.set(name, jagged, inplace=False)
    return td


def _do_handshake_with_controller(self: StorageManager) -> None:
    """Wraps TransferQueue's, which waits for a reply that a stock controller never sends."""
    try:
        _stock_handshake(self)
    except TimeoutError as error:
        raise TimeoutError(
            f"{error} If the controller runs TransferQueue's own encoder, it cannot read this "
            f"process: {_REMEDY}"
        ) from error


_stock_select, _stock_put_data, _stock_get_data, _stock_handshake = _STOCK_METHODS.values()
_stock_select = _stock_select.__func__
_OUR_METHODS = (
    staticmethod(_select_by_positions),
    _put_data,
    _get_data,
    _do_handshake_with_controller,
)

register_type(
    _Shapes,
    "transfer_queue.shapes",
    to_state=lambda shapes: shapes.state,
    from_state=_shapes,
)
register_type(BatchMeta, "transfer_queue.BatchMeta", to_state=_metadata_state, from_state=_metadata)
register_type(_Rows, "transfer_queue.rows", to_state=lambda rows: rows.state, from_state=_row_list)


# --- values for key-value stores ---------------------------------------------------------------


def _batch_encode_into(
    objs: Sequence[Any], alloc_buff_func: Callable[[list[int]], list[Any]], *, num_workers: int = 1
) -> tuple[list[Any], list[int]]:
    """Replaces TransferQueue's: every object as a blob in a buffer of its own.

    Nothing is written if an object cannot be encoded or a buffer is too small for its blob.
    """
    messages = [
        encoder.pending(obj, allow_pickle=_options.allow_pickle, default=_options.default)
        for obj in objs
    ]
    sizes = [blob_size(message) for message in messages]
    buffers = alloc_buff_func(sizes)
    where = "batch_encode_into(alloc_buff_func)"
    if len(buffers) != len(sizes):
        raise ArgumentError(
            "bad_option", where, f"expected {len(sizes)} buffers, found {len(buffers)}"
        )
    targets = [writable_bytes(buffer, where) for buffer in buffers]
    for i, (target, size) in enumerate(zip(targets, sizes, strict=True)):
        if len(target) < size:
            raise ArgumentError(
                "too_large",
                f"{where}[{i}]",
                f"expected a buffer of at least {size} bytes, found {len(target)}",
            )
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        list(pool.map(write_blob, messages, targets))
    return buffers, sizes


def _batch_decode_from(source_buffers: Sequence[Any]) -> list[Any]:
    """Replaces TransferQueue's: what `batch_encode_into` wrote, aliasing the buffers."""
    return [_decode(buffer) for buffer in source_buffers]


_OURS: dict[str, Any] = {
    "encode": _encode,
    "decode": _decode,
    "MsgpackEncoder": _Encoder,
    "MsgpackDecoder": _Decoder,
    "_encoder": _Encoder(),
    "_decoder": _Decoder(),
    "batch_encode_into": _batch_encode_into,
    "batch_decode_from": _batch_decode_from,
    "extract_field_schema": _extract_field_schema,
}
