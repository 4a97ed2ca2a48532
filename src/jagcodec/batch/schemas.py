"""Schemas as values: what the columns of a batch are, to print, store, compare and insist on.

A `Schema` maps the name of each column to its `FieldSchema`, as `WireBatch.schema` does, without
the number of rows. The columns of a nested batch follow it, named by the tuple of names that leads
to them. (The schema in a message's header, a tree of nodes, is `wire/schema.py`'s.)

How a schema may change without breaking those who read under it: what was written under the old one
passes `check` of the new one if the new one only has more columns, all of them optional, and wider
dtypes. ``new.check(old)`` says whether that is so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec._arguments import unknown_name
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    Reason,
    SchemaError,
    brief,
    child_path,
    describe,
)
from jagcodec.memory.buffers import WireSource
from jagcodec.ragged.nested import is_jagged, parts_of
from jagcodec.ragged.non_tensor import TENSORDICT_TYPES, is_non_tensor
from jagcodec.wire.dtypes import TORCH_NAMES
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.registry import registered_name
from jagcodec.wire.spec import Kind
from jagcodec.wire.wire_batch import WireBatch, open_wire

Name: TypeAlias = "str | tuple[str, ...]"
"""Of a column; of one in a nested batch, the names that lead to it."""

VERSION = 1
"""Of the JSON form."""

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")

WIDER: Mapping[str, tuple[str, ...]] = {
    **{name: _SIGNED[i + 1 :] for i, name in enumerate(_SIGNED)},
    **{name: (*_UNSIGNED[i + 1 :], *_SIGNED[i + 1 :]) for i, name in enumerate(_UNSIGNED)},
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32", "float64"),
    "float8_e4m3fnuz": ("float16", "bfloat16", "float32", "float64"),
    "float8_e5m2": ("float16", "bfloat16", "float32", "float64"),
    "float8_e5m2fnuz": ("float16", "bfloat16", "float32", "float64"),
    "float8_e8m0fnu": ("bfloat16", "float32", "float64"),
    "complex32": ("complex64", "complex128"),
    "complex64": ("complex128",),
}
"""Dtype to those of its own sort (integer, float, complex) that hold each of its values exactly."""


@dataclass(frozen=True)
class Schema:
    """What the columns of a batch are: a value, made by `schema_of` or by hand.

    Example:
        >>> import torch
        >>> from jagcodec import SchemaError, encode_fields, schema_of
        >>> ids, reward = torch.arange(12).view(3, 4), torch.ones(3)
        >>> names = ["ids"]
        >>> frames = encode_fields({"ids": ids, "reward": reward}, lengths=[3, 4, 3])
        >>> schema = schema_of(frames).with_optional("reward")
        >>> print(schema)
        column  kind    dtype    shape
        ids     jagged  int64    (N, *)
        reward  tensor  float32  (N)     optional
        >>> schema.check(encode_fields({"ids": ids.int()}, lengths=[3, 4, 3]))
        >>> try:
        ...     schema.check(encode_fields({"ids": ids.float()}, lengths=[3, 4, 3]))
        ... except SchemaError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        $.ids: expected dtype int64, or one that it holds exactly, found float32; ...

    Args:
        columns: Name to `FieldSchema`, in order. A None in a shape is any size: of the rows, which
            are its first dim, of a ragged dim, and of any other that you leave open.
        optional: Names of the columns that a batch need not have.

    Raises:
        ArgumentError: A field cannot be that of a column.
        ArgumentKeyError: An optional name is not that of a column.
        ArgumentTypeError: An argument has another type.

    A schema is immutable, hashable, and equal to one of the same columns in any order.
    """

    # Not of Name, of which a dict of plain names would be no mapping.
    columns: Mapping[Any, FieldSchema]
    optional: Collection[Name] = frozenset()

    def __post_init__(self) -> None:
        where = "Schema(columns)"
        if not isinstance(self.columns, Mapping):
            found = describe(self.columns)
            raise ArgumentTypeError("bad_type", where, f"expected a mapping, found {found}")
        columns = {_usable_name(name): field for name, field in self.columns.items()}
        if len(columns) < len(self.columns):
            raise ArgumentError(
                "conflict", where, "expected every column once, found ('name',) beside 'name'"
            )
        for name, field in columns.items():
            _check_field(field, f"{where}: {_path(name)}")
        if isinstance(self.optional, str) or not isinstance(self.optional, Iterable):
            found = describe(self.optional)
            raise ArgumentTypeError(
                "bad_type", "Schema(optional)", f"expected a set of names, found {found}"
            )
        optional = frozenset(_usable_name(name, "Schema(optional)") for name in self.optional)
        for name in optional - columns.keys():
            raise unknown_name(shown_name(name), map(shown_name, columns), "Schema(optional)")
        object.__setattr__(self, "columns", MappingProxyType(columns))
        object.__setattr__(self, "optional", optional)

    def __hash__(self) -> int:
        return hash((frozenset(self.columns.items()), frozenset(self.optional)))

    def __reduce__(self) -> Any:
        return Schema, (dict(self.columns), self.optional)

    def __iter__(self) -> Iterator[Name]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, name: Name) -> FieldSchema:
        usable = _usable_name(name, "Schema[name]")
        if usable not in self.columns:
            raise unknown_name(shown_name(usable), map(shown_name, self.columns), "Schema[name]")
        return self.columns[usable]

    def __str__(self) -> str:
        """A table with a line for each column: N is the rows, ``*`` any size."""
        lines = [("column", "kind", "dtype", "shape", "")]
        for name, (kind, dtype, shape) in self.columns.items():
            optional = "optional" if name in self.optional else ""
            lines.append((shown_name(name), kind, _dtype_name(dtype), _shape_text(shape), optional))
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        padded = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join(line.rstrip() for line in padded)

    def with_optional(self, *names: Name) -> Schema:
        """The same schema, of which a batch need not have the columns of these names.

        With a nested batch, its columns may be absent too.

        Raises:
            ArgumentKeyError: There is no such column.
        """
        return Schema(self.columns, {*self.optional, *map(_usable_name, names)})

    def check(self, batch: Any, *, new_columns: bool = False) -> None:
        """Refuse a batch that is not of this schema; no cell is read.

        It is if it has every column that is not optional, each of the same kind, in sizes that the
        shape allows, and of the same dtype or one that the schema's holds exactly (int32 where
        int64 is expected, bfloat16 where float32 is; never an integer where a float is). Nothing
        is converted. Of exactly this schema is what ``schema_of(batch) == schema``.

        Args:
            batch: What `schema_of` takes; or a `Schema`, whose every batch must pass.
            new_columns: Whether there may be columns that the schema does not have.

        Raises:
            SchemaError: It is not; names the first such column, what was expected and found.
            ArgumentTypeError: `batch` is no batch.
            WireFormatError: It is a message that cannot be read.

        Example:
            See `Schema`.
        """
        found = batch if isinstance(batch, Schema) else _schema_of(batch, "Schema.check(batch)")
        wrong = [*self._differences(found), *(() if new_columns else self._more(found))]
        if wrong:
            reason, path, detail = wrong[0]
            more = f" (the first of {len(wrong)} columns that differ)" if len(wrong) > 1 else ""
            raise SchemaError(reason, path, detail + more)

    def _differences(self, found: Schema) -> Iterator[tuple[Reason, str, str]]:
        for name, field in self.columns.items():
            there = found.columns.get(name)
            may_lack = name in self.optional
            if there is not None:
                if name in found.optional and not may_lack:
                    detail = "expected a column of every batch, found one that is optional"
                    yield "conflict", _path(name), f"{detail}; with_optional makes it so here too"
                else:
                    yield from _difference(_path(name), field, there)
            elif not may_lack and not _lies_in_another(name, self.columns, found.columns):
                names = ", ".join(map(brief, map(shown_name, [*found.columns][:_MOST_NAMED])))
                yield (
                    "no_such_field",
                    _path(name),
                    f"expected {_field_text(field)}, found no such column among {names or 'none'}; "
                    "write it, or declare it with with_optional",
                )

    def _more(self, found: Schema) -> Iterator[tuple[Reason, str, str]]:
        for name, field in found.columns.items():
            if name not in self.columns and not _lies_in_another(name, found.columns, self.columns):
                yield (
                    "new_field",
                    _path(name),
                    f"expected no such column, found {_field_text(field)}; pass new_columns=True "
                    "to allow columns that the schema does not have",
                )

    def to_json(self, *, indent: int | None = None) -> str:
        """The schema as JSON text, which `from_json` reads.

        Example:
            >>> import torch
            >>> from jagcodec import FieldSchema, Schema
            >>> schema = Schema({"ids": FieldSchema("jagged", torch.int64, (None, None))})
            >>> Schema.from_json(schema.to_json()) == schema
            True
        """
        return json.dumps(document_of(self), indent=indent)

    @staticmethod
    def from_json(text: str | bytes) -> Schema:
        """The schema that `to_json` wrote.

        Raises:
            ArgumentError: `text` is not the JSON of a schema, or of a newer version of it, or names
                a dtype that this torch does not have.
            ArgumentTypeError: It is not text.
        """
        where = "Schema.from_json(text)"
        if not isinstance(text, (str, bytes, bytearray)):
            found = describe(text)
            raise ArgumentTypeError("bad_type", where, f"expected JSON text, found {found}")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("bad_option", where, f"expected JSON, found {error}") from error
        return schema_of_document(document, where)


_MOST_NAMED = 8


def schema_of(batch: TensorDictBase | WireBatch | dict[str, Any] | WireSource) -> Schema:
    """The schema of a batch or message, without a look at any of its cells.

    Args:
        batch: A TensorDict, a dict of columns or a `BatchedDataDict`, a `WireBatch`; or a message
            of one, as `open_wire` takes it: frames, a blob, the path of a file, or a callable,
            which is asked for the header alone.

    Returns:
        Its columns, none of them optional; the first dim of every shape is None. Objects are of
        kind ``"object"``, however they are held.

    Raises:
        ArgumentTypeError: It is none of these, or holds what is no column.
        ArgumentError: It is a TensorDict without batch dims.
        WireFormatError: It is a message that cannot be read, or that of no batch.

    Example:
        >>> import torch
        >>> from jagcodec import pack_rows, schema_of
        >>> print(schema_of(pack_rows([{"ids": [1, 2], "tag": "a"}, {"ids": [3], "tag": None}])))
        column  kind    dtype  shape
        ids     jagged  int64  (N, *)
        tag     object
    """
    return _schema_of(batch, "schema_of(batch)")


def _schema_of(batch: Any, where: str) -> Schema:
    columns: dict[Name, FieldSchema] = {}
    if isinstance(batch, TensorDictBase):
        if type(batch) not in TENSORDICT_TYPES:
            found = type(batch).__name__
            raise ArgumentTypeError(
                "bad_type", where, f"expected a TensorDict, found {found}; call to_tensordict()"
            )
        if not batch.batch_dims:
            raise ArgumentError("bad_shape", where, "expected a batch dim or more, found none")
        _add_leaves(columns, (), batch, where)
    elif isinstance(batch, Mapping):
        _add_leaves(columns, (), batch, where)
    elif isinstance(batch, WireBatch):
        _add_fields(columns, (), batch)
    else:
        try:
            opened = open_wire(batch)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(error.reason, where, error.detail) from error
        _add_fields(columns, (), opened)
    return Schema(columns)


# --- of messages and of leaves -----------------------------------------------------------------

# How the message of a `BatchedDataDict` may hold a column of objects.
_OBJECTS = frozenset(("object", "object_array", "value", "list", "tensor_views"))


def _add_fields(columns: dict[Name, FieldSchema], outer: tuple[str, ...], batch: WireBatch) -> None:
    for name, (kind, dtype, shape) in batch.schema.items():
        kind = "object" if kind in _OBJECTS else kind
        columns[_usable_name((*outer, name))] = FieldSchema(kind, dtype, _any_rows(shape))
        if kind == "tensordict":
            # Without its rows: a join would read those of all its messages.
            inner = batch.rows([]).leaf(name)
            if isinstance(inner, WireBatch):
                _add_fields(columns, (*outer, name), inner)
            else:
                _add_leaves(columns, (*outer, name), inner, name)


def _add_leaves(
    columns: dict[Name, FieldSchema], outer: tuple[str, ...], batch: Any, where: str
) -> None:
    for name, leaf in batch.items():
        if type(name) is not str:
            raise ArgumentTypeError(
                "bad_type", where, f"expected names of columns, found {describe(name)}"
            )
        path = (*outer, name)
        columns[_usable_name(path)] = _field_of_leaf(leaf, f"{where}: {_path(path)}")
        if type(leaf) in TENSORDICT_TYPES:
            _add_leaves(columns, path, leaf, where)


def _field_of_leaf(leaf: Any, path: str) -> FieldSchema:
    """What `WireBatch.schema` says of a column, of a message in which it is."""
    if type(leaf) in TENSORDICT_TYPES:
        return FieldSchema("tensordict", None, None)
    if is_non_tensor(leaf) or type(leaf) is list:
        return FieldSchema("object", None, None)
    if registered_name(type(leaf)) is not None:
        return FieldSchema("user", None, None)
    if isinstance(leaf, TensorDictBase):
        return FieldSchema("lazy_stack", None, None)
    if isinstance(leaf, np.ndarray):
        return FieldSchema("object" if leaf.dtype == object else "array", None, None)
    if is_jagged(leaf):
        parts = parts_of(leaf)
        dims: list[int | None] = [*parts.values.shape]
        dims[parts.ragged_dim - 1] = None
        return FieldSchema("jagged", leaf.dtype, (None, *dims))
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            return FieldSchema("strided_nested", None, None)
        if leaf.layout is torch.strided and leaf.dim():
            return FieldSchema("tensor", leaf.dtype, (None, *leaf.shape[1:]))
        if leaf.layout is torch.sparse_coo:
            return FieldSchema("sparse_coo", None, None)
        if leaf.layout is not torch.strided:
            return FieldSchema("sparse_compressed", None, None)
    raise ArgumentTypeError(
        "bad_type", path, f"expected a column with a row per sample, found {describe(leaf)}"
    )


def _any_rows(shape: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    return shape if shape is None else (None, *shape[1:])


# --- comparing ---------------------------------------------------------------------------------


def _difference(
    path: str, expected: FieldSchema, found: FieldSchema
) -> Iterator[tuple[Reason, str, str]]:
    """How a column is not what was expected, if it is not."""
    if expected.kind != found.kind:
        detail = f"expected {_field_text(expected)}, found {_field_text(found)}"
        yield "bad_type", path, f"{detail}; write it in the form that its readers expect"
    elif expected.dtype != found.dtype and not _holds(expected.dtype, found.dtype):
        names = _dtype_name(expected.dtype), _dtype_name(found.dtype)
        detail = f"expected dtype {names[0]}, or one that it holds exactly, found {names[1]}"
        yield "bad_dtype", path, f"{detail}; convert the column, or widen the schema"
    elif not _fits(expected.shape, found.shape):
        shapes = _shape_text(expected.shape), _shape_text(found.shape)
        detail = f"expected shape {shapes[0]}, found {shapes[1]}"
        yield "bad_shape", path, f"{detail}; a None in the schema's shape allows any size"


def _holds(wide: torch.dtype | None, narrow: torch.dtype | None) -> bool:
    return _dtype_name(wide) in WIDER.get(_dtype_name(narrow), ())


def _fits(expected: tuple[int | None, ...] | None, found: tuple[int | None, ...] | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return len(expected) == len(found) and all(
        wanted is None or wanted == size for wanted, size in zip(expected, found, strict=True)
    )


def _lies_in_another(name: Name, here: Mapping[Name, Any], there: Mapping[Name, Any]) -> bool:
    """Whether the batch that holds a column is `here` alone, and so says it all."""
    outer = [_usable_name(name[:i]) for i in range(1, len(name))] if type(name) is tuple else []
    return any(batch in here and batch not in there for batch in outer)


# --- names, fields and texts -------------------------------------------------------------------


def _usable_name(name: Any, where: str = "Schema(columns)") -> Name:
    """A name in its one form: that of a column of the batch itself is no tuple."""
    if type(name) is str:
        return name
    if type(name) is not tuple or not name or not all(type(part) is str for part in name):
        raise ArgumentTypeError(
            "bad_type",
            where,
            f"expected the name of a column, or a tuple of names, found {brief(name)}",
        )
    return name if len(name) > 1 else str(name[0])


def _check_field(field: Any, path: str) -> None:
    if not isinstance(field, FieldSchema):
        found = describe(field)
        raise ArgumentTypeError("bad_type", path, f"expected a FieldSchema, found {found}")
    kind, dtype, shape = field
    if type(kind) is not str or not kind:
        raise ArgumentTypeError("bad_type", path, f"expected a kind, found {brief(kind)}")
    if kind not in _KINDS:
        raise ArgumentError(
            "bad_value",
            path,
            f"expected the kind jagged, tensor, object or another of the wire, found {brief(kind)}",
        )
    if dtype is not None and (type(dtype) is not torch.dtype or dtype not in TORCH_NAMES):
        found = str(dtype) if type(dtype) is torch.dtype else brief(dtype)
        raise ArgumentError(
            "bad_dtype", path, f"expected None or a dtype of the wire, found {found}"
        )
    usable = type(shape) is tuple and all(
        size is None or (type(size) is int and size >= 0) for size in shape
    )
    if shape is not None and not (usable and shape):
        raise ArgumentError(
            "bad_shape", path, f"expected sizes from 0 on, or None for any, found {brief(shape)}"
        )


_KINDS = frozenset(("object", *(kind.name.lower() for kind in Kind)))


def _path(name: Name) -> str:
    path = "$"
    for part in (name,) if isinstance(name, str) else name:
        path = child_path(path, part)
    return path


def shown_name(name: Any) -> str:
    """A name on one line: those of a nested batch with dots between them."""
    if isinstance(name, str) or type(name) is tuple:
        return _path(name)[1:].removeprefix(".")
    return brief(name)


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else TORCH_NAMES[dtype]


def _shape_text(shape: tuple[int | None, ...] | None) -> str:
    if shape is None:
        return ""
    rows, *dims = ("*" if size is None else str(size) for size in shape)
    return f"({', '.join(['N' if rows == '*' else rows, *dims])})"


def _field_text(field: FieldSchema) -> str:
    parts = (field.kind, _dtype_name(field.dtype), _shape_text(field.shape))
    return " ".join(part for part in ("kind", *parts) if part)


# --- JSON --------------------------------------------------------------------------------------


def document_of(schema: Schema) -> dict[str, Any]:
    """The schema as values of JSON."""
    columns = []
    for name, (kind, dtype, shape) in schema.columns.items():
        columns.append(
            {
                "name": name if isinstance(name, str) else list(name),
                "kind": kind,
                "dtype": None if dtype is None else TORCH_NAMES[dtype],
                "shape": None if shape is None else list(shape),
                "optional": name in schema.optional,
            }
        )
    return {"schema": VERSION, "columns": columns}


def schema_of_document(document: Any, where: str) -> Schema:
    """The schema that `document_of` made values of.

    Raises:
        ArgumentError: It did not, or a newer one did.
    """
    if type(document) is not dict or document.keys() != {"schema", "columns"}:
        raise _no_schema(where, "'schema' and 'columns'", document)
    if type(document["schema"]) is not int or document["schema"] != VERSION:
        found = brief(document["schema"])
        raise ArgumentError("unknown_version", where, f"expected version {VERSION}, found {found}")
    if type(document["columns"]) is not list:
        raise _no_schema(where, "a list of columns", document["columns"])
    columns: dict[Name, FieldSchema] = {}
    optional = set()
    for column in document["columns"]:
        if type(column) is not dict or column.keys() != _COLUMN:
            raise _no_schema(where, f"a column of {', '.join(sorted(_COLUMN))}", column)
        name, dtype, shape = (column[key] for key in ("name", "dtype", "shape"))
        name = tuple(name) if type(name) is list else name
        if dtype is not None and (type(dtype) is not str or dtype not in _DTYPES):
            found = brief(dtype)
            expected = f"expected a dtype of torch {torch.__version__}"
            raise ArgumentError("unknown_dtype", where, f"{expected}, found {found}")
        shape = tuple(shape) if type(shape) is list else shape
        dtype = None if dtype is None else _DTYPES[dtype]
        if type(column["optional"]) is not bool:
            raise _no_schema(where, "a bool for 'optional'", column["optional"])
        try:
            name = _usable_name(name)
            field = FieldSchema(column["kind"], dtype, shape)
            _check_field(field, _path(name))
        except (ArgumentError, ArgumentTypeError) as error:
            raise ArgumentError("bad_option", where, str(error)) from error
        if name in columns:
            raise _no_schema(where, "every column once", shown_name(name))
        columns[name] = field
        if column["optional"]:
            optional.add(name)
    return Schema(columns, frozenset(optional))


_COLUMN = frozenset(("name", "kind", "dtype", "shape", "optional"))
_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}


def _no_schema(where: str, expected: str, found: Any) -> ArgumentError:
    return ArgumentError("bad_option", where, f"expected {expected}, found {brief(found)}")
