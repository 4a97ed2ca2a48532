"""`check_schema`: whether a batch has the columns that a stage expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jagcodec._arguments import check_known, name_set
from jagcodec._compiling import untraced
from jagcodec.columns.batch import FieldSchema, sizes_fit
from jagcodec.errors import ArgumentError, ArgumentTypeError, Reason, brief, describe


@untraced
def check_schema(
    batch: Any, schema: Mapping[str, FieldSchema], optional: Iterable[str] = ()
) -> None:
    """Check that a batch has the columns that a stage expects, before a cell is read.

    Example:
        >>> from jagcodec import encode_rows, open_wire
        >>> from jagcodec.schema import check_schema
        >>> schema = open_wire(encode_rows([{"ids": [1, 2], "reward": 0.5}])).schema
        >>> check_schema(encode_rows([{"ids": [3]}, {"ids": [4, 5]}]), schema, optional=["reward"])
        >>> check_schema(encode_rows([{"ids": [3]}]), schema)
        Traceback (most recent call last):
        jagcodec.errors.ArgumentError: check_schema: column 'reward': expected it, found none

    Args:
        batch: A batch in any form: also frames, or a blob.
        schema: What `WireBatch.schema` returned for another batch, or a dict that you write by
            hand. A dtype or a shape of None is any, and so is each None in a shape. The number of
            rows, which is the first of a shape, is not compared.
        optional: Names of the columns that a batch may lack.

    Raises:
        ArgumentError: The batch lacks a column (reason ``"no_such_field"``), has one that is not in
            the schema (``"new_field"``), or a column has another kind (``"bad_type"``), dtype
            (``"bad_dtype"``) or shape (``"bad_shape"``). The column is named.
        ArgumentKeyError: An optional name is not in the schema.
        WireFormatError: A message is malformed.
    """
    where = "check_schema"
    is_mapping = isinstance(schema, Mapping)
    if not is_mapping or not all(isinstance(field, FieldSchema) for field in schema.values()):
        detail = f"expected a mapping of names to FieldSchema, found {describe(schema)}"
        raise ArgumentTypeError("bad_type", f"{where}(schema)", detail)
    may_be_absent = name_set(optional, f"{where}(optional)")
    check_known(may_be_absent, schema, f"{where}(optional)")
    from jagcodec.wire.read.any_batch import schema_of  # it imports much more than a schema needs

    schema_in_batch = schema_of(batch, f"{where}(batch)")
    new_names = [name for name in schema_in_batch if name not in schema]
    if new_names:
        remedy = "add it to the schema, or drop it"
        raise _field_error(new_names[0], "new_field", "no such column", f"one; {remedy}")
    for name, field in schema.items():
        if name in schema_in_batch:
            _check_field(name, field, schema_in_batch[name])
        elif name not in may_be_absent:
            raise _field_error(name, "no_such_field", "it", "none")


def _check_field(name: str, expected: FieldSchema, actual: FieldSchema) -> None:
    """Raise an error if a column has another kind, dtype or shape than the schema."""
    if actual.kind != expected.kind:
        kind = f"a column of kind {expected.kind!r}"
        raise _field_error(name, "bad_type", kind, repr(actual.kind))
    if expected.dtype not in (None, actual.dtype):
        raise _field_error(name, "bad_dtype", f"dtype {expected.dtype}", str(actual.dtype))
    if expected.shape is None:
        return
    dims, actual_dims = expected.shape[1:], (actual.shape or ())[1:]
    if not sizes_fit(dims, actual_dims):
        raise _field_error(name, "bad_shape", f"rows of shape {list(dims)}", str(list(actual_dims)))


def _field_error(name: str, reason: Reason, expected: str, found: str) -> ArgumentError:
    """The error for a column that differs from the schema."""
    path = f"check_schema: column {brief(name)}"
    return ArgumentError(reason, path, f"expected {expected}, found {found}")
