"""The jagged wire codec for reinforcement-learning rollout batches.

Write site: `pack_jagged_fields`, `encode`. Fetch site: `decode`, `materialize`.
"""

from jagcodec._version import __version__
from jagcodec.batch.batched_data_dict import BatchedDataDict
from jagcodec.batch.concat import concat_rows, join_columns
from jagcodec.batch.materialize import materialize
from jagcodec.batch.options import Layout, PaddingSide
from jagcodec.batch.padding_tax import padding_tax
from jagcodec.batch.rows import balance_rows, repeat_rows, select_rows, split_rows
from jagcodec.batch.schemas import Schema, schema_of
from jagcodec.batch.tax_report import tax_report
from jagcodec.batch.to_rows import RowsAs, to_rows
from jagcodec.errors import (
    ArgumentError,
    ArgumentIndexError,
    ArgumentKeyError,
    ArgumentTypeError,
    JagcodecError,
    JagcodecWarning,
    SchemaError,
    TransportError,
    TransportTimeoutError,
    UnsupportedTypeError,
    WireFormatError,
)
from jagcodec.pack.builder import RowBuilder
from jagcodec.pack.columns import encode_fields, merge_columns, pack_jagged_fields
from jagcodec.pack.masked import pack_masked_fields, unpack_masked_fields
from jagcodec.pack.rows import encode_rows, pack_rows
from jagcodec.pack.tensors import (
    maybe_pack_jagged,
    pack_per_token_field,
    response_from_nested,
    response_to_nested,
    stack_or_nest,
    to_nested_by_length,
)
from jagcodec.pack.token_lists import pack_token_lists, pad_token_lists, unpack_token_lists
from jagcodec.pack.trimming import restore_padding, trim_padding
from jagcodec.ragged.non_tensor import unwrap_wire_stripped_payload
from jagcodec.ragged.varlen import PackedColumn
from jagcodec.record import RecordInfo, RecordReader, RecordWriter
from jagcodec.wire.blobs import (
    decode_batch,
    dump,
    encode_batch_into,
    encode_into,
    encoded_size,
    load,
    to_blob,
)
from jagcodec.wire.compression import Compression
from jagcodec.wire.decoder import MsgpackDecoder, decode
from jagcodec.wire.encoder import MsgpackEncoder, encode
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.lazy import WireBatch, open_wire
from jagcodec.wire.limits import Limits
from jagcodec.wire.registry import register_type
from jagcodec.wire.stdlib_types import register_stdlib_types

__all__ = [
    "ArgumentError",
    "ArgumentIndexError",
    "ArgumentKeyError",
    "ArgumentTypeError",
    "BatchedDataDict",
    "Compression",
    "FieldSchema",
    "JagcodecError",
    "JagcodecWarning",
    "Layout",
    "Limits",
    "MsgpackDecoder",
    "MsgpackEncoder",
    "PackedColumn",
    "PaddingSide",
    "RecordInfo",
    "RecordReader",
    "RecordWriter",
    "RowBuilder",
    "RowsAs",
    "Schema",
    "SchemaError",
    "TransportError",
    "TransportTimeoutError",
    "UnsupportedTypeError",
    "WireBatch",
    "WireFormatError",
    "__version__",
    "balance_rows",
    "concat_rows",
    "decode",
    "decode_batch",
    "dump",
    "encode",
    "encode_batch_into",
    "encode_fields",
    "encode_into",
    "encode_rows",
    "encoded_size",
    "join_columns",
    "load",
    "materialize",
    "maybe_pack_jagged",
    "merge_columns",
    "open_wire",
    "pack_jagged_fields",
    "pack_masked_fields",
    "pack_per_token_field",
    "pack_rows",
    "pack_token_lists",
    "pad_token_lists",
    "padding_tax",
    "register_stdlib_types",
    "register_type",
    "repeat_rows",
    "response_from_nested",
    "response_to_nested",
    "restore_padding",
    "schema_of",
    "select_rows",
    "split_rows",
    "stack_or_nest",
    "tax_report",
    "to_blob",
    "to_nested_by_length",
    "to_rows",
    "trim_padding",
    "unpack_masked_fields",
    "unpack_token_lists",
    "unwrap_wire_stripped_payload",
]
