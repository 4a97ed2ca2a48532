"""The jagged wire codec for reinforcement-learning rollout batches.

To write: `encode_fields`, `encode_rows`, `encode`. To read: `materialize`, `decode`, `open_wire`.
"""

from __future__ import annotations

import importlib
from typing import Any

from jagcodec._version import __version__ as __version__

# Where each public name is. A module is imported when one of its names is asked for first, so that
# what needs no tensor, such as `jagcodec --help`, does not wait for torch. Type checkers read
# `__init__.pyi`.
_NAMES = {
    "train.batched_data_dict": "BatchedDataDict",
    "train.materialize": "materialize",
    "forward.micro_batches": "MicroBatches plan_micro_batches",
    "forward.plan": "PackPlan plan_packing",
    "train.rows": "concat_rows join_columns repeat_rows select_rows split_rows",
    "train.tax": "padding_tax",
    "train.to_rows": "to_rows",
    "errors": (
        "ArgumentError JagcodecError JagcodecWarning TransportError TransportTimeoutError "
        "UnsupportedTypeError WireFormatError"
    ),
    "produce.builder": "RowBuilder",
    "produce.fields": "encode_fields pack_jagged_fields",
    "produce.rows": "encode_rows pack_rows",
    "produce.jagged_tensors": (
        "maybe_pack_jagged pack_per_token_field stack_or_nest to_nested_by_length"
    ),
    "produce.responses": "response_from_nested",
    "rows.non_tensor": "unwrap_wire_stripped_payload",
    "wire.blobs": "dump load to_blob",
    "wire.read.decoder": "MsgpackDecoder decode",
    "wire.write.encoder": "MsgpackEncoder encode",
    "wire.limits": "Limits",
    "wire.registry": "register_type",
    "wire.read.wire_batch": "WireBatch open_wire",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}
_MAKE_TENSORS = ("MsgpackDecoder", "decode", "load")
_MODULES = ("errors", "record", "schema", "stdlib", "testing", "types")

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    """A public name, or a public module, when it is asked for first."""
    if name in _MODULES:
        return importlib.import_module(f"jagcodec.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jagcodec' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"jagcodec.{_HOME_OF[name]}"), name)
        if name in _MAKE_TENSORS:
            # Now, and not at the first call: a process that another thread forks while torch is
            # imported waits forever for the end of that import.
            from jagcodec._dependencies import with_or_without_torch

            with_or_without_torch("wire.read.tensor_values", "wire.read.array_values")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "tensordict"):
            raise
        raise ImportError(
            f"jagcodec.{name} needs {package}, which is not installed; pip install torch "
            "tensordict. encode_rows, RowBuilder, open_wire, to_rows and plan_packing need neither",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *__all__})
