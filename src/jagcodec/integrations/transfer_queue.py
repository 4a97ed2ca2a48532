"""A storage backend for TransferQueue that moves columns, not rows.

Import this module before `transfer_queue.init`, in the process that calls it. It registers the
backend under the name ``SimpleStorage``. Every other process imports it by itself, when it
unpickles the configuration that `transfer_queue.init` fetches from the controller.

A put sends one jagcodec message to each storage unit. A unit keeps the messages that it receives,
and the place of each row in them. It answers a get with one message, in which each column is one
block. If that joined rows of many puts, the unit keeps the answer in their place. The controller
and all other messages stay TransferQueue's.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec.errors import (
    ArgumentError,
    JagcodecError,
    TransportError,
    UnsupportedTypeError,
    brief,
)
from jagcodec.integrations._needed import needed
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import batch_of
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.encoder import encode
from jagcodec.wire.wire_batch import open_wire

with needed(__name__, "TransferQueue: pip install 'TransferQueue>=0.1.9'"):
    import ray
    import transfer_queue


def _changed(difference: str) -> ImportError:
    """The error of a TransferQueue that lacks something that this module builds on."""
    return ImportError(
        f"jagcodec.integrations.transfer_queue: expected TransferQueue with {difference}, found "
        f"version {transfer_queue.__version__} without it; install one of 0.1.9 to 0.1.11, or a "
        "newer jagcodec"
    )


try:
    from transfer_queue import interface
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.storage import simple_storage
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider, simple_storage_bootstrap
    from transfer_queue.storage.managers.base import StorageManagerFactory
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from transfer_queue.utils.logging_utils import get_logger
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, ZMQServerInfo

    from jagcodec.integrations._queue_storage import (
        APART,
        MESSAGE,
        NAME,
        RowStorage,
        StorageOptions,
        body_of,
        content_of,
        options_of,
        rows_of,
        sendable,
        values_of_rows,
    )
except ImportError as _error:
    raise _changed(f"all modules and names of 0.1.11 ({_error})") from _error

__all__ = ["installed"]

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


# --- storage units ------------------------------------------------------------------------------


_Stock: Any = simple_storage.SimpleStorageUnit.__ray_metadata__.modified_class


class _JagcodecStorageUnit(_Stock):  # type: ignore[misc]
    """A storage unit whose rows are in the messages that it received."""

    def __init__(self, *args: Any, options: StorageOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No client knows the address before this returns.
        self.storage_data = RowStorage(self.storage_unit_size, options)

    def get_zmq_server_info(self) -> _StorageUnitInfo:
        """The address, as a class of this module: unpickling it registers the backend."""
        info = super().get_zmq_server_info()
        return _StorageUnitInfo(info.role, info.id, info.ip, info.ports)

    # TransferQueue's own handlers count the cores of the host first, which is slower than a put.

    def _handle_put(self, request: Any) -> Any:
        body = request.body
        try:
            self.storage_data.put_data(body["data"], body["global_indexes"])
        except Exception:
            return super()._handle_put(request)  # which names the fault
        return self._reply(ZMQRequestType.PUT_DATA_RESPONSE, {})

    def _handle_get(self, request: Any) -> Any:
        body = request.body
        try:
            data = self.storage_data.get_data(body["fields"], body["global_indexes"])
        except Exception:
            return super()._handle_get(request)  # which names the fault
        return self._reply(ZMQRequestType.GET_DATA_RESPONSE, {"data": data})

    def _reply(self, kind: Any, body: dict[str, Any]) -> Any:
        return ZMQMessage.create(kind, self.storage_unit_id, body)

    # TransferQueue's code sees its own storage for a moment. A unit has one thread for requests.

    @contextmanager
    def _stock_rows(self) -> Iterator[None]:
        rows = self.storage_data
        self.storage_data = rows.as_stock()
        try:
            yield
        finally:
            self.storage_data = rows

    def _handle_save_checkpoint(self, request: Any) -> Any:
        with self._stock_rows():
            return super()._handle_save_checkpoint(request)

    def _handle_load_checkpoint(self, request: Any) -> Any:
        with self._stock_rows():
            response, loaded = super()._handle_load_checkpoint(request), self.storage_data
        if response.body["success"]:
            try:
                self.storage_data = RowStorage.of_stock(loaded, self.storage_data.options)
            except JagcodecError as error:
                response.body = {"success": False, "message": str(error)}
        return response


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
            raise ArgumentError(
                "bad_option",
                "put(data_parser)",
                "expected None, because storage units of jagcodec keep columns as they are sent, "
                f"found {brief(data_parser)}; parse the columns before the put, or do not import "
                "jagcodec.integrations.transfer_queue",
            )
        if metadata.size == 0:
            return
        schema = field_schema(data)
        groups = self._groups(metadata)
        messages = self._messages(data, [group.batch_positions for group in groups.values()])
        requests = []
        for (unit, group), message in zip(groups.items(), messages, strict=True):
            rows = group.global_indexes
            request = partial(
                self._put_to_single_storage_unit, rows, body_of(message), target_storage_unit=unit
            )
            requests.append(self._attempts("put", unit, rows, request))
        await asyncio.gather(*requests)
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Fetch rows, each column of all storage units in one piece."""
        if metadata.size == 0:
            return TensorDict({}, batch_size=0)
        names = list(metadata.field_names)
        groups = self._groups(metadata)
        requests = []
        for unit, group in groups.items():
            rows = group.global_indexes
            request = partial(
                self._get_from_single_storage_unit, rows, {MESSAGE: names}, target_storage_unit=unit
            )
            requests.append(self._attempts("get", unit, rows, request))
        replies = await asyncio.gather(*requests)
        batches = [self._options.open(content_of(body, "get")) for _, body in replies]
        # The rows of all storage units as one batch, in the order that was asked for.
        places = np.concatenate([group.batch_positions for group in groups.values()])
        index = np.argsort(places).tolist()
        apart = {name for batch in batches for name in batch.meta.get(APART, ())}
        alike = [name for name in names if name not in apart]
        leaves, values = rows_of(batches, index, alike, lambda b: b.to_tensordict().items())
        values |= {name: values_of_rows(batches, index, name) for name in apart}
        leaves |= {name: self._pack_field_values(rows) for name, rows in values.items()}
        return batch_of({name: leaves[name] for name in names}, metadata.size)

    def _groups(self, metadata: BatchMeta) -> dict[str, Any]:
        """The rows of each storage unit; one of another version reports it by itself."""
        for info in self.storage_unit_infos.values():
            if not isinstance(info, _StorageUnitInfo):
                content_of({}, f"storage unit {info.id} at {info.ip}")
        groups: dict[str, Any] = self._group_by_hash(metadata.global_indexes)
        return groups

    def _attempts(self, operation: str, unit: str, rows: list[int], request: Any) -> Any:
        """A request, repeated where and as often as TransferQueue repeats its own."""
        if not hasattr(self, "_request_with_retry"):  # before 0.1.11
            return request()
        return self._request_with_retry(operation, unit, f"samples={len(rows)}", request)

    def _messages(self, data: TensorDict, groups: Sequence[list[int]]) -> list[list[Any]]:
        """The rows of each group of positions as a message."""
        columns, pickle = sendable(data), self._options.allow_pickle
        try:
            if len(groups) == 1:
                return [self._options.encode(columns)]
            frames = encode(columns, allow_pickle=pickle)
        except UnsupportedTypeError as error:
            remedy = f"or set backend.{NAME}.jagcodec.allow_pickle to true"
            raise UnsupportedTypeError(
                error.reason, error.path, f"{error.detail}; {remedy}"
            ) from error
        batch = open_wire(frames, allow_pickle=pickle)
        return [self._options.encode(batch.rows(rows).to_encode()) for rows in groups]


def field_schema(data: TensorDict) -> dict[str, dict[str, Any]]:
    """What TransferQueue's `extract_field_schema` returns, asked of columns instead of rows."""
    schema: dict[str, dict[str, Any]] = {}
    for name, leaf in data.items():
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            if is_jagged(leaf) and leaf.size(0) == len(data):
                schema[name] = _jagged_schema(view_of(leaf, f"put({name!r})"))
                continue
        elif len(leaf) == len(data):
            tensor = isinstance(leaf, torch.Tensor)
            shape = (leaf.shape[1:] or torch.Size((1,))) if tensor else None
            schema[name] = _field(leaf.dtype if tensor else None, shape)
            continue
        schema.update(extract_field_schema(data.select(name)))
    return schema


def _jagged_schema(view: RaggedView) -> dict[str, Any]:
    before, after = view.shape[: view.ragged_dim - 1], view.shape[view.ragged_dim :]
    shapes = [(*before, length, *after) for length in view.row_splits.lengths.tolist()]
    field = _field(view.dtype, torch.Size(shapes[0]))
    return {**field, "is_nested": True, "per_sample_shapes": shapes}


def _field(dtype: torch.dtype | None, shape: torch.Size | None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "is_nested": False, "is_non_tensor": shape is None}


# --- registration ------------------------------------------------------------------------------


def start_units(conf: Any) -> dict[str, Any]:
    """Start the storage units, where and as TransferQueue would start its own."""
    config = conf.backend[NAME]
    if (config.get("ssd_offload") or {}).get("enabled", False):
        raise ArgumentError(
            "bad_option",
            f"backend.{NAME}.ssd_offload.enabled",
            "expected false, because storage units of jagcodec keep rows in memory, found true; "
            "set it to false, or do not import jagcodec.integrations.transfer_queue",
        )
    unit = partial(_unit_actor, options_of(config))
    place = simple_storage_bootstrap.initialize_simple_storage.__wrapped__
    names = {**place.__globals__, "SimpleStorageUnit": types.SimpleNamespace(options=unit)}
    try:
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        content_of({ray.get(controller.__ray_call__.remote(_message)): None}, "the controller")
        handles: dict[str, Any] = types.FunctionType(place.__code__, names)(conf)
    except ray.exceptions.RayError as error:
        raise _not_importable(error) from error
    _logger.info(f"{MESSAGE} runs the storage units: {', '.join(handles)}")
    return handles


def _unit_actor(options: StorageOptions, **given: Any) -> Any:
    """Stands for ``SimpleStorageUnit.options(...)``, with the options that class was given."""
    chosen = simple_storage.SimpleStorageUnit.options(**given).bind().get_options()
    actor = ray.remote(_JagcodecStorageUnit).options(**chosen)
    return types.SimpleNamespace(remote=partial(actor.remote, options=options))


def _message(_: Any) -> str:
    """Called in the controller, which will unpickle `_StorageUnitInfo`s."""
    return MESSAGE


def _not_importable(error: Exception) -> Exception:
    """The error of Ray as one that names the node and the remedy, if a module is missing there."""
    missing = re.search(r"No module named '(jagcodec[^']*)'", str(error))
    if missing is None:
        return error
    node = re.search(r"ip=([^,)\s]+)", str(error))
    return TransportError(
        "peer_failed",
        f"node {node[1] if node else 'unknown'}",
        f"expected {MESSAGE} in the environment of TransferQueue's controller and storage units, "
        f"found no module named {missing[1]!r}; install this version of jagcodec there",
    )


_RELIED_ON: dict[Any, str] = {
    AsyncSimpleStorageManager: """
        __init__(controller_info, config)
        put_data(data, metadata, data_parser); get_data(metadata)
        notify_data_update(partition_id, global_indexes, field_schema)
        _group_by_hash(global_indexes); _pack_field_values(values)
        _put_to_single_storage_unit(global_indexes, storage_data, target_storage_unit)
        _get_from_single_storage_unit(global_indexes, fields, target_storage_unit)
    """,
    _Stock: """
        get_zmq_server_info(); _handle_put(data_parts); _handle_get(data_parts)
        _handle_save_checkpoint(data_parts); _handle_load_checkpoint(data_parts)
    """,
    simple_storage.StorageUnitData: """
        __init__(storage_size); put_data(field_data, global_indexes)
        get_data(fields, global_indexes); clear(keys)
    """,
    ZMQServerInfo: "__init__(role, id, ip, ports)",
}


def _check_version() -> None:
    """Refuse a TransferQueue in which something that this module builds on has changed."""
    for cls, methods in _RELIED_ON.items():
        for method in re.findall(r"\w+\(.*?\)", methods):
            name, *parameters = re.findall(r"\w+", method)
            known = inspect.signature(getattr(cls, name, lambda: None)).parameters
            if not hasattr(cls, name) or not set(parameters).issubset(known):
                raise _changed(f"{cls.__name__}.{method}")
    place = getattr(simple_storage_bootstrap.initialize_simple_storage, "__wrapped__", None)
    if place is None or "SimpleStorageUnit" not in place.__code__.co_names:
        raise _changed("initialize_simple_storage(conf), which starts each SimpleStorageUnit")


_check_version()
StorageManagerFactory.register(NAME)(_JagcodecStorageManager)
StorageBootstrapProvider.register_provider(NAME)(start_units)
