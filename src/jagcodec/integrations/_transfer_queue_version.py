"""Imports what the backend uses of TransferQueue, and checks that the installed version has it.

All modules of the backend import TransferQueue's names, and Ray, from here. First come the errors
about a version that differs, then the imports, and last the check of attributes.

Two differences between versions stay where they matter, in `jagcodec.integrations.transfer_queue`:
who answers a request to a storage unit, and who repeats a request that failed.
"""

from __future__ import annotations

import types
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from jagcodec.integrations import needed

with needed(
    "jagcodec.integrations.transfer_queue", "TransferQueue: pip install 'TransferQueue>=0.1.9'"
):
    import ray
    import transfer_queue


def _version_error(difference: str) -> ImportError:
    """The error for a version of TransferQueue that lacks something which the backend uses."""
    version = getattr(transfer_queue, "__version__", "unknown")
    return ImportError(
        f"jagcodec.integrations.transfer_queue: expected TransferQueue with {difference}, found "
        f"version {version} without it; install one of 0.1.9 to 0.1.11, or a newer jagcodec"
    )


def _part(owner: Any, path: str) -> Any:
    """The attribute of a module or class of TransferQueue at a dotted path."""
    part = owner
    for name in path.split("."):
        if not hasattr(part, name):
            raise _version_error(f"{_name_of(owner)}.{path}")
        part = getattr(part, name)
    return part


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
    raise _version_error(f"all modules and names of 0.1.11 ({_error})") from _error

__all__ = [
    "AsyncSimpleStorageManager",
    "BatchMeta",
    "PayloadTransfer",
    "StockStorageUnit",
    "StorageBootstrapProvider",
    "StorageManagerFactory",
    "StorageUnitData",
    "ZMQMessage",
    "ZMQRequestType",
    "ZMQServerInfo",
    "extract_field_schema",
    "get_logger",
    "interface",
    "ray",
    "simple_storage",
    "start_stock_units",
]

# TransferQueue's own storage unit, without the wrapper of Ray, and its function that starts units.
StockStorageUnit: Any = _part(simple_storage, "SimpleStorageUnit.__ray_metadata__.modified_class")
start_stock_units: Any = _part(simple_storage_bootstrap, "initialize_simple_storage.__wrapped__")

# The attributes that the backend uses, of each module and class.
_NAMES_USED: dict[Any, str] = {
    AsyncSimpleStorageManager: "put_data get_data notify_data_update _group_by_hash "
    "_pack_field_values _put_to_single_storage_unit _get_from_single_storage_unit "
    "storage_unit_infos",
    StockStorageUnit: "get_zmq_server_info _handle_save_checkpoint _handle_load_checkpoint "
    "storage_data storage_unit_id storage_unit_size "
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
    _NAMES_USED[PayloadTransfer] = "handle_request"


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has an attribute, or a method that sets it on an instance."""
    if hasattr(owner, name):
        return True
    methods = (method for cls in getattr(owner, "__mro__", ()) for method in vars(cls).values())
    codes = (method.__code__ for method in methods if isinstance(method, types.FunctionType))
    return any(name in code.co_names for code in codes)


def _check_attributes() -> None:
    """Raise an error if this version of TransferQueue lacks something that the backend uses."""
    names = ((owner, name) for owner, names in _NAMES_USED.items() for name in names.split())
    missing = [f"{_name_of(owner)}.{name}" for owner, name in names if not _has(owner, name)]
    if missing:
        raise _version_error(", ".join(missing))
    code = getattr(start_stock_units, "__code__", None)
    if code is None or "SimpleStorageUnit" not in code.co_names or code.co_freevars:
        raise _version_error(
            "initialize_simple_storage, a function that starts each SimpleStorageUnit"
        )


_check_attributes()
