"""A storage backend for TransferQueue that moves columns, not rows.

Import this module before `transfer_queue.init`, in the process that calls it. It registers the
backend under the name ``SimpleStorage``. Every other process imports it by itself, when it
unpickles the configuration that `transfer_queue.init` fetches from the controller.

A put sends one message to each storage unit. A unit keeps the messages, and the place of each row
in them. It answers a get with one message, in which each column is one block. For columns whose
rows came in many puts, it then keeps the joined rows in place of those messages. The controller and
all other messages stay TransferQueue's.

After `installed` come the client, the storage unit, and the start of the units. Other processes
unpickle classes of this module, and so register the backend. The other parts have modules of their
own: `_transfer_queue_messages`, `_transfer_queue_columns`, `_transfer_queue_storage` (the rows of a
unit) and `_transfer_queue_version` (everything that is imported from TransferQueue).
"""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec.errors import (
    ArgumentError,
    JagcodecError,
    TransportError,
    WireFormatError,
    brief,
)
from jagcodec.integrations._transfer_queue_columns import (
    column_of_values,
    columns_of_rows,
    columns_to_send,
    field_schema,
    rows_of_messages,
    values_of_rows,
)
from jagcodec.integrations._transfer_queue_messages import (
    MESSAGE,
    NAME,
    WITH_TENSORS,
    StorageOptions,
    body_of,
    other_backend,
    storage_options,
)
from jagcodec.integrations._transfer_queue_storage import RowStorage
from jagcodec.integrations._transfer_queue_version import (
    AsyncSimpleStorageManager,
    BatchMeta,
    PayloadTransfer,
    StockStorageUnit,
    StorageBootstrapProvider,
    StorageManagerFactory,
    ZMQMessage,
    ZMQRequestType,
    ZMQServerInfo,
    get_logger,
    interface,
    ray,
    simple_storage,
    start_stock_units,
)
from jagcodec.rows.non_tensor import batch_of
from jagcodec.wire.read.wire_batch import WireBatch

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


# --- the client --------------------------------------------------------------------------------


class _JagcodecStorageManager(AsyncSimpleStorageManager):  # type: ignore[misc]
    """The client of the storage units: its puts and gets send one message to each unit."""

    def __init__(self, controller_info: Any, config: Any, **kwargs: Any) -> None:
        self._options = storage_options(config)
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
        groups = self._rows_by_unit(metadata)
        positions = [group.batch_positions for group in groups.values()]
        messages = self._message_for_each(data, positions)
        request = self._put_to_single_storage_unit
        await self._ask_units("put", groups, request, map(body_of, messages))
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Fetch rows, each column of all storage units in one piece."""
        if metadata.size == 0:
            return TensorDict({}, batch_size=0)
        names = list(metadata.field_names)
        groups = self._rows_by_unit(metadata)
        request = self._get_from_single_storage_unit
        replies = await self._ask_units("get", groups, request, [{MESSAGE: names}] * len(groups))
        batches = [
            self._checked_reply(unit_id, group, names, body)
            for (unit_id, group), (_, body) in zip(groups.items(), replies, strict=True)
        ]
        # The rows of all storage units as one batch, in the order of the request.
        places = np.concatenate([group.batch_positions for group in groups.values()])
        index = np.argsort(places).tolist()
        with_tensors = {name for batch in batches for name in batch.meta.get(WITH_TENSORS, ())}
        joinable = [name for name in names if name not in with_tensors]
        whole = rows_of_messages(batches, index, joinable)
        leaves, others = columns_of_rows(
            batches, index, whole, lambda batch: batch.to_tensordict().items()
        )
        others |= {
            name: column_of_values(*values_of_rows(batches, index, name)) for name in with_tensors
        }
        leaves |= {name: self._in_stock_form(column) for name, column in others.items()}
        return batch_of({name: leaves[name] for name in names}, metadata.size)

    def _checked_reply(
        self, unit_id: str, group: Any, names: Sequence[str], body: Any
    ) -> WireBatch:
        """The batch in a unit's reply; an error if it has other rows or columns than requested."""
        where = f"get from storage unit {unit_id}"
        batch = self._options.open_sent(body, len(group.global_indexes), where)
        differences = [f"{brief(name)} missing" for name in names if name not in batch.fields]
        differences += [f"{brief(name)} in addition" for name in batch.fields if name not in names]
        if differences:
            detail = f"expected the columns that were asked for, found {differences[0]}"
            raise WireFormatError("bad_value", where, detail)
        with_tensors = batch.meta.get(WITH_TENSORS, [])
        if type(with_tensors) is not list or any(name not in names for name in with_tensors):
            detail = f"expected names of columns as {WITH_TENSORS}, found {brief(with_tensors)}"
            raise WireFormatError("bad_value", where, detail)
        return batch

    def _in_stock_form(self, column: Any) -> Any:
        """A column that `column_of_values` made, in the form that TransferQueue returns."""
        if type(column) is not list:
            return column
        # TransferQueue would convert rows of several dtypes to the dtype of the first row.
        has_one_kind = all(isinstance(row, torch.Tensor) for row in column) and (
            len({(row.dtype, row.dim(), row.layout) for row in column}) == 1
        )
        return self._pack_field_values(column) if has_one_kind else NonTensorStack(*column)

    def _rows_by_unit(self, metadata: BatchMeta) -> dict[str, Any]:
        """A `RoutingGroup` of rows for each storage unit. A unit of another backend is an error."""
        for info in self.storage_unit_infos.values():
            if not isinstance(info, _StorageUnitInfo):
                raise other_backend([], f"storage unit {info.id} at {info.ip}")
        groups: dict[str, Any] = self._group_by_hash(metadata.global_indexes)
        return groups

    async def _ask_units(
        self, operation: str, groups: dict[str, Any], request: Any, bodies: Iterable[Any]
    ) -> Sequence[Any]:
        """The replies of the storage units. Versions that repeat a request repeat these too."""
        calls = []
        for (unit_id, group), body in zip(groups.items(), bodies, strict=True):
            rows = group.global_indexes
            call = partial(request, rows, body, target_storage_unit=unit_id)
            if hasattr(self, "_request_with_retry"):  # from 0.1.11 on
                size = f"samples={len(rows)}"
                call = partial(self._request_with_retry, operation, unit_id, size, call)
            calls.append(call())
        return await asyncio.gather(*calls)

    def _message_for_each(self, data: TensorDict, groups: Sequence[list[int]]) -> list[list[Any]]:
        """The message for each group, which is the positions of its rows in `data`."""
        columns, options = columns_to_send(data), self._options
        if len(groups) == 1:
            return [options.encode(columns)]
        positions = [np.array(group, dtype=np.int64) for group in groups]
        return [options.encode(part) for part in options.parts(columns, positions)]


# --- the storage unit --------------------------------------------------------------------------


class _JagcodecStorageUnit(StockStorageUnit):  # type: ignore[misc]
    """A storage unit whose rows are in the messages that it received."""

    def __init__(self, *args: Any, options: StorageOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No client knows the address before this returns.
        self.storage_data = RowStorage(self.storage_unit_size, options)
        if PayloadTransfer is not None:
            # All else of the transfer stays TransferQueue's, such as its counters.
            transfer = self.payload_transfer
            transfer.handle_request = partial(_handle_request, transfer.handle_request)

    def get_zmq_server_info(self) -> _StorageUnitInfo:
        """The address, as a class of this module: unpickling it registers the backend."""
        info = super().get_zmq_server_info()
        return _StorageUnitInfo(info.role, info.id, info.ip, info.ports)

    def _handle_put(self, request: Any) -> Any:
        return self._reply_or_none(request) or super()._handle_put(request)

    def _handle_get(self, request: Any) -> Any:
        return self._reply_or_none(request) or super()._handle_get(request)

    def _reply_or_none(self, request: Any) -> Any:
        storage = self.storage_data
        return _reply_to(request, self.storage_unit_id, storage.get_data, storage.store)

    # TransferQueue's code sees its own storage for a moment. A unit has one thread for requests.

    def _handle_save_checkpoint(self, request: Any) -> Any:
        storage = self.storage_data
        try:
            self.storage_data = storage.as_stock()
            return super()._handle_save_checkpoint(request)
        except Exception as error:
            return self._failure_reply(ZMQRequestType.SAVE_STORAGE_CHECKPOINT_RESPONSE, error)
        finally:
            self.storage_data = storage

    def _handle_load_checkpoint(self, request: Any) -> Any:
        storage = self.storage_data
        try:
            self.storage_data = storage.without_values()
            response = super()._handle_load_checkpoint(request)
            if response.body["success"]:
                storage = RowStorage.from_stock(self.storage_data, storage.options)
            return response
        except Exception as error:
            return self._failure_reply(ZMQRequestType.LOAD_STORAGE_CHECKPOINT_RESPONSE, error)
        finally:
            self.storage_data = storage

    def _failure_reply(self, kind: Any, error: Exception) -> Any:
        """The reply in which TransferQueue's own handlers report a failure."""
        message = str(error) if isinstance(error, JagcodecError) else f"{error!r}"
        _logger.error(f"[{self.storage_unit_id}]: {message}")
        return ZMQMessage.create(kind, self.storage_unit_id, {"success": False, "message": message})


class _StorageUnitInfo(ZMQServerInfo):  # type: ignore[misc]
    """The address of a storage unit of this backend, by which clients know the backend."""


def _handle_request(
    stock_handler: Callable[..., Any],
    request: Any,
    *,
    storage_id: str,
    load_data: Any,
    store_data: Any,
) -> Any:
    """The reply of a `PayloadTransfer`: ours, or the reply of its own `handle_request`.

    TransferQueue passes the id of the storage unit as `storage_id`.
    """
    return _reply_to(request, storage_id, load_data, store_data) or stock_handler(
        request, storage_id=storage_id, load_data=load_data, store_data=store_data
    )


def _reply_to(request: Any, unit_id: str, load_data: Any, store_data: Any) -> Any:
    """The reply to a put or a get; None for other requests, and for requests that fail.

    For None, TransferQueue's own code answers, and names the fault. That code does not answer all
    requests, because it counts the cores of the host each time, which is slower than a put.
    """
    body, kind = request.body, request.request_type
    with suppress(Exception):
        if kind == ZMQRequestType.PUT_DATA:
            store_data(body["global_indexes"], body["data"], None)
            return ZMQMessage.create(ZMQRequestType.PUT_DATA_RESPONSE, unit_id, {})
        if kind == ZMQRequestType.GET_DATA:
            reply = {"data": load_data(body["fields"], body["global_indexes"])}
            return ZMQMessage.create(ZMQRequestType.GET_DATA_RESPONSE, unit_id, reply)
    return None


# --- the start of the units, and registration --------------------------------------------------


def start_units(conf: Any) -> dict[str, Any]:
    """Start the storage units, where and as TransferQueue would start its own."""
    config = conf.backend[NAME]
    if (config.get("ssd_offload") or {}).get("enabled", False):
        detail = "expected false, because these storage units keep rows in memory, found true"
        raise ArgumentError("bad_option", f"backend.{NAME}.ssd_offload.enabled", detail)
    # TransferQueue's function starts the units: it decides how many there are, and on which nodes.
    # It looks the class up as a global of its module, and has no argument for another one. So run
    # its code in a function whose globals have our class under that name. A patch of the module
    # would change it for other callers, too. `_check_attributes` has checked that the code uses the
    # name, and has no closure.
    unit_options = partial(_unit_actor, storage_options(config))
    stock = start_stock_units
    names = {**stock.__globals__, "SimpleStorageUnit": types.SimpleNamespace(options=unit_options)}
    start = types.FunctionType(stock.__code__, names, None, stock.__defaults__)
    start.__kwdefaults__ = stock.__kwdefaults__
    try:
        controller = _controller()
        version = ray.get(controller.__ray_call__.remote(_version_here))
        if version != MESSAGE:
            raise other_backend([version], "the controller")
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


def _unit_actor(options: StorageOptions, **actor_options: Any) -> Any:
    """Stands for ``SimpleStorageUnit.options(...)``: the same options, but our class starts."""
    # The options of the decorator of TransferQueue's class, and those of this call.
    every_option = simple_storage.SimpleStorageUnit.options(**actor_options).bind().get_options()
    actor = ray.remote(_JagcodecStorageUnit).options(**every_option)
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


StorageManagerFactory.register(NAME)(_JagcodecStorageManager)
StorageBootstrapProvider.register_provider(NAME)(start_units)
