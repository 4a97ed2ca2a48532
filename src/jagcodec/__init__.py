"""The jagged wire codec for reinforcement-learning rollout batches.

Write site: `pack_jagged_fields`, `encode`. Fetch site: `decode`, `materialize`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jagcodec._version import __version__

# What a type checker reads. A process reads `_HOMES` below instead, so that what needs no tensor,
# such as `jagcodec --help`, does not wait for torch.
if TYPE_CHECKING:
    from jagcodec.batch.batched_data_dict import BatchedDataDict
    from jagcodec.batch.materialize import materialize
    from jagcodec.batch.options import Layout, PaddingSide
    from jagcodec.batch.parts import balance_rows
    from jagcodec.batch.rows import (
        concat_rows,
        join_columns,
        repeat_rows,
        select_rows,
        split_rows,
    )
    from jagcodec.batch.tax import padding_tax
    from jagcodec.batch.to_rows import RowsAs, to_rows
    from jagcodec.errors import (
        ArgumentError,
        ArgumentIndexError,
        ArgumentKeyError,
        ArgumentTypeError,
        JagcodecError,
        JagcodecWarning,
        TransportError,
        TransportTimeoutError,
        UnsupportedTypeError,
        WireFormatError,
    )
    from jagcodec.pack.builder import RowBuilder
    from jagcodec.pack.fields import encode_fields, pack_jagged_fields
    from jagcodec.pack.rows import encode_rows, pack_rows
    from jagcodec.pack.tensors import (
        maybe_pack_jagged,
        pack_per_token_field,
        response_from_nested,
        stack_or_nest,
        to_nested_by_length,
    )
    from jagcodec.ragged.non_tensor import unwrap_wire_stripped_payload
    from jagcodec.ragged.varlen import PackedColumn
    from jagcodec.wire.blobs import dump, load, to_blob
    from jagcodec.wire.decoder import MsgpackDecoder, decode
    from jagcodec.wire.encoder import MsgpackEncoder, encode
    from jagcodec.wire.field_schema import FieldSchema
    from jagcodec.wire.limits import Limits
    from jagcodec.wire.registry import register_type
    from jagcodec.wire.stdlib_types import register_stdlib_types
    from jagcodec.wire.wire_batch import WireBatch, open_wire

__all__ = [
    "ArgumentError",
    "ArgumentIndexError",
    "ArgumentKeyError",
    "ArgumentTypeError",
    "BatchedDataDict",
    "FieldSchema",
    "JagcodecError",
    "JagcodecWarning",
    "Layout",
    "Limits",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "PackedColumn",
    "PaddingSide",
    "RowBuilder",
    "RowsAs",
    "TransportError",
    "TransportTimeoutError",
    "UnsupportedTypeError",
    "WireBatch",
    "WireFormatError",
    "__version__",
    "balance_rows",
    "concat_rows",
    "decode",
    "dump",
    "encode",
    "encode_fields",
    "encode_rows",
    "join_columns",
    "load",
    "materialize",
    "maybe_pack_jagged",
    "open_wire",
    "pack_jagged_fields",
    "pack_per_token_field",
    "pack_rows",
    "padding_tax",
    "register_stdlib_types",
    "register_type",
    "repeat_rows",
    "response_from_nested",
    "select_rows",
    "split_rows",
    "stack_or_nest",
    "to_blob",
    "to_nested_by_length",
    "to_rows",
    "unwrap_wire_stripped_payload",
]

# The same once more, for a process: a module is imported when one of its names is asked for.
_HOMES = {
    "batch.batched_data_dict": "BatchedDataDict",
    "batch.materialize": "materialize",
    "batch.options": "Layout PaddingSide",
    "batch.parts": "balance_rows",
    "batch.rows": "concat_rows join_columns repeat_rows select_rows split_rows",
    "batch.tax": "padding_tax",
    "batch.to_rows": "RowsAs to_rows",
    "errors": (
        "ArgumentError ArgumentIndexError ArgumentKeyError ArgumentTypeError JagcodecError "
        "JagcodecWarning TransportError TransportTimeoutError UnsupportedTypeError "
        "WireFormatError"
    ),
    "pack.builder": "RowBuilder",
    "pack.fields": "encode_fields pack_jagged_fields",
    "pack.rows": "encode_rows pack_rows",
    "pack.tensors": (
        "maybe_pack_jagged pack_per_token_field response_from_nested "
        "stack_or_nest to_nested_by_length"
    ),
    "ragged.non_tensor": "unwrap_wire_stripped_payload",
    "ragged.varlen": "PackedColumn",
    "wire.blobs": "dump load to_blob",
    "wire.decoder": "MsgpackDecoder decode",
    "wire.encoder": "MsgpackEncoder encode",
    "wire.field_schema": "FieldSchema",
    "wire.wire_batch": "WireBatch open_wire",
    "wire.limits": "Limits",
    "wire.registry": "register_type",
    "wire.stdlib_types": "register_stdlib_types",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_PACKAGES = ("batch", "cells", "data", "errors", "memory", "pack", "ragged", "rowcopy", "wire")

if not TYPE_CHECKING:  # for whom there would be no name that does not exist

    def __getattr__(name: str) -> Any:
        """A public name, or a package, when it is asked for first."""
        if name in _PACKAGES:
            return importlib.import_module(f"jagcodec.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'jagcodec' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"jagcodec.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *__all__})
