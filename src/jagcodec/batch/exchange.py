"""Batches as the columns of .npz files, Arrow tables and safetensors, and back.

Nothing is changed on the way: what a format cannot say is an error that names the column.

In ``.npz`` and safetensors a jagged column ``ids`` is two arrays, ``ids.values`` (tokens, ...), the
rows end to end, and ``ids.offsets``, (N + 1,) int64 from 0; in Arrow it is a column of lists. A
rectangle is one array, or in Arrow a column of fixed-size lists. Rows that are all `str` (in Arrow
also all `bytes`) are a column of these. `meta` of the message, and the order of the columns, are
JSON under the name ``jagcodec``: an array of text in ``.npz``, and metadata elsewhere.
"""

from __future__ import annotations

import importlib
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import batch_of, holds_rows, leaf_of_rows, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.wire.encoder import encode
from jagcodec.wire.wire_batch import WireBatch

LEAVE_OUT = "leave it out with --columns"
RENAME = "rename the column"
VALUES, OFFSETS, ABOUT = ".values", ".offsets", "jagcodec"

NUMPY_DTYPES = frozenset(
    ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
) | {"float16", "float32", "float64", "complex64", "complex128"}
"""Torch dtypes that numpy has too."""

ARROW_DTYPES = NUMPY_DTYPES - {"complex64", "complex128"}
SAFETENSORS_DTYPES = (NUMPY_DTYPES - {"complex64", "complex128"}) | {
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
}


class JaggedRows(NamedTuple):
    """The rows of a jagged column: end to end, and where each begins and the last ends."""

    values: torch.Tensor
    offsets: IntArray


class Columns(NamedTuple):
    """A batch of N rows as plain columns.

    Attributes:
        rows: N.
        columns: Names to tensors (N, ...), `JaggedRows`, or lists of N `str` or of N `bytes`.
        meta: What belongs to the whole batch.
    """

    rows: int
    columns: dict[str, Any]
    meta: dict[str, Any]


class Format(NamedTuple):
    """A file format: its endings, and the functions that write and read one in memory."""

    name: str
    endings: tuple[str, ...]
    write: Callable[[Columns], bytes]
    read: Callable[[bytes], Columns]


# --- batches and columns -----------------------------------------------------------------------


def columns_of_batch(batch: WireBatch) -> Columns:
    """The columns of an open message, read.

    Raises:
        ArgumentError: A column is of a kind that no other format has; it is named.
        WireFormatError: A column is malformed.
    """
    if len(batch.batch_size) != 1:
        found = list(batch.batch_size)
        raise ArgumentError("bad_shape", "batch", f"expected a batch size of (N,), found {found}")
    if not batch.fields:
        raise ArgumentError("bad_shape", "batch", "expected a column or more, found none")
    columns: dict[str, Any] = {}
    for name in batch.fields:
        columns[name] = _plain_column(name, batch.leaf(name))
    return Columns(len(batch), columns, batch.meta)


def _plain_column(name: str, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and is_jagged(leaf):
        view = view_of(leaf, name)
        if view.ragged_dim != 1:
            raise _refused(
                name, f"a ragged dim of {view.ragged_dim}", "put the tokens first in each row"
            )
        return JaggedRows(values_of(view), view.row_splits.host)
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested:
        return leaf
    if isinstance(leaf, WireBatch):
        raise _refused(name, "a batch in a batch", "td.flatten_keys() takes it apart")
    if holds_rows(leaf) or (isinstance(leaf, NonTensorStack) and leaf.batch_dims == 1):
        items = list(rows_of_leaf(leaf, len(leaf)))
        for kind in (str, bytes):
            if all(type(item) is kind for item in items):
                return items
    raise _refused(
        name, f"objects ({describe(leaf)})", "leave it out with --columns, or make it text"
    )


def batch_of_columns(found: Columns) -> TensorDict:
    """The TensorDict of plain columns.

    Raises:
        ArgumentError: Columns differ in their rows; the first that does is named.
    """
    leaves: dict[str, Any] = {}
    splits: dict[bytes, RowSplits] = {}
    for name, column in found.columns.items():
        if isinstance(column, JaggedRows):
            offsets = np.ascontiguousarray(column.offsets, dtype=np.int64)
            known = splits.setdefault(offsets.tobytes(), _row_splits(name, offsets))
            if known.total != column.values.shape[0]:
                detail = f"expected values of {known.total} tokens, found {column.values.shape[0]}"
                raise ArgumentError("bad_length", name, detail)
            rows, leaf = known.rows, nested_tensor(column.values, known)
        elif isinstance(column, list):
            rows, leaf = len(column), leaf_of_rows(column)
        else:
            rows, leaf = _rows_of({name: column}), column
        if rows != found.rows:
            detail = f"expected {found.rows} rows as in the first column, found {rows}"
            raise ArgumentError("row_mismatch", name, detail)
        leaves[name] = leaf
    return batch_of(leaves, found.rows)


def _row_splits(name: str, offsets: IntArray) -> RowSplits:
    row_splits = RowSplits.from_offsets(offsets) if len(offsets) else None
    if row_splits is None:
        found = brief(offsets[:8].tolist())
        detail = f"expected offsets from 0 that never fall, found {found}"
        raise ArgumentError("bad_length", f"{name}{OFFSETS}", detail)
    return row_splits


def _refused(name: str, found: str, remedy: str) -> ArgumentError:
    return ArgumentError(
        "bad_type", f"column {name}", f"expected what the format can say, found {found}; {remedy}"
    )


def _check_dtypes(found: Columns, dtypes: Iterable[str], kinds: tuple[type, ...], to: str) -> None:
    """Refuse what a format has no cells for."""
    for name, column in found.columns.items():
        if not _is_unicode(name):
            raise _refused(name, "a name that is no Unicode", RENAME)
        if isinstance(column, list):
            if column and type(column[0]) not in kinds:
                what = f"rows of {type(column[0]).__name__}"
                raise _refused(name, f"{what}, which {to} has not", LEAVE_OUT)
            continue
        tensor = column.values if isinstance(column, JaggedRows) else column
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in dtypes:
            remedy = "cast it, leave it out with --columns, or convert to another format"
            raise _refused(name, f"{dtype}, which {to} has not", remedy)


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _about(found: Columns) -> str:
    """What a file says beside its columns.

    Raises:
        ArgumentError: `meta` is not what JSON can say.
    """
    remedy = "expected meta that is the same through JSON, {}; --no-meta leaves it out"
    try:
        text = json.dumps({"columns": [*found.columns], "meta": found.meta})
        # Equal objects give equal bytes, and no others do.
        same = encode(json.loads(text)["meta"]) == encode(found.meta)
    except (TypeError, ValueError, RecursionError) as error:
        detail = remedy.format(f"found {brief(str(error))}")
        raise ArgumentError("bad_type", "meta", detail) from error
    if not same:
        raise ArgumentError("bad_type", "meta", remedy.format("found types that JSON has not"))
    return text


def _read_about(text: str | bytes | None) -> tuple[list[str] | None, dict[str, Any]]:
    """The order of the columns and `meta`, if a file says them."""
    if text is None:
        return None, {}
    try:
        about = json.loads(text)
        names, meta = about["columns"], about["meta"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _not_a_file(f"the entry {ABOUT!r} as jagcodec writes it", error) from error
    if type(meta) is not dict or type(names) is not list:
        raise _not_a_file(f"the entry {ABOUT!r} as jagcodec writes it", brief(about))
    return names, meta


def _not_a_file(expected: str, found: object) -> ArgumentTypeError:
    return ArgumentTypeError("bad_type", "file", f"expected {expected}, found {brief(str(found))}")


# --- values and offsets ------------------------------------------------------------------------


def _flat(found: Columns) -> dict[str, Any]:
    """Columns as single arrays, two for a jagged one.

    Raises:
        ArgumentError: Two of them would have the same name, or one that means something else.
    """
    arrays: dict[str, Any] = {}
    for name, column in found.columns.items():
        parts = {name: column}
        if isinstance(column, JaggedRows):
            offsets = torch.from_numpy(column.offsets.copy())
            parts = {name + VALUES: column.values, name + OFFSETS: offsets}
        elif name.endswith((VALUES, OFFSETS)) or name == ABOUT:
            raise _refused(name, "a name that it uses itself", RENAME)
        for key, array in parts.items():
            if key in arrays:
                raise _refused(name, f"two columns that would be {key!r}", "rename one of them")
            arrays[key] = array
    return arrays


def _unflat(arrays: Mapping[str, Any], about: str | None) -> Columns:
    """The columns of such arrays."""
    order, meta = _read_about(about)
    columns: dict[str, Any] = {}
    for key, array in arrays.items():
        name = key.removesuffix(VALUES)
        if name != key and name + OFFSETS in arrays:
            if name in arrays:
                raise _not_a_file(f"{name!r} once", "it beside its values and offsets")
            offsets = arrays[name + OFFSETS]
            if not isinstance(offsets, torch.Tensor) or offsets.dtype != torch.int64:
                raise _not_a_file(f"int64 offsets in {name + OFFSETS!r}", describe(offsets))
            if offsets.dim() != 1 or not isinstance(array, torch.Tensor) or not array.dim():
                raise _not_a_file(f"values and (N + 1,) offsets of {name!r}", describe(array))
            columns[name] = JaggedRows(array, offsets.numpy())
        elif key.removesuffix(OFFSETS) + VALUES not in arrays or key.removesuffix(OFFSETS) == key:
            columns[key] = array
    if order is not None:
        if sorted(order, key=str) != sorted(columns):
            raise _not_a_file(f"the columns {brief(order)}", brief([*columns]))
        columns = {name: columns[name] for name in order}
    return Columns(_rows_of(columns), columns, meta)


def _rows_of(columns: Mapping[str, Any]) -> int:
    """The rows of the first column."""
    for name, column in columns.items():
        if isinstance(column, JaggedRows):
            return max(0, len(column.offsets) - 1)
        if isinstance(column, torch.Tensor) and not column.dim():
            raise _not_a_file(f"an array of rows in {name!r}", "one number")
        return len(column)
    raise _not_a_file("a column or more", "none")


# --- .npz --------------------------------------------------------------------------------------


def to_npz(found: Columns) -> bytes:
    """A ``.npz``, uncompressed.

    Raises:
        ArgumentError: It cannot hold a column, or `meta`.
    """
    _check_dtypes(found, NUMPY_DTYPES, (str,), ".npz")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, array in _flat(found).items():
        if isinstance(array, list):
            if any(text.endswith("\0") for text in array):
                raise _refused(name, "text that ends in NUL, which numpy drops", ".arrow keeps it")
            arrays[name] = np.array(array, dtype=str if array else "U1")
        else:
            arrays[name] = array.numpy()
        # zipfile drops what follows a NUL.
        if "\0" in name or len(name.encode()) > _LONGEST_MEMBER:
            raise _refused(name, "a name that zip files have not", RENAME)
    arrays[ABOUT] = np.array(_about(found))
    stream = io.BytesIO()
    # One by one: as keywords, names could be those of arguments.
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return stream.getvalue()


_LONGEST_MEMBER = (1 << 16) - len(".npy") - 1


def from_npz(data: bytes) -> Columns:
    """The columns of a ``.npz``, also of one that others wrote.

    Raises:
        ArgumentTypeError: It is none, or holds arrays that are no columns.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        # Not np.load, which of two columns "a" and "a.npy" gives the first for both.
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename or name in arrays:
                    raise ValueError(f"{member.filename!r}, which is no .npy, or there twice")
                with archive.open(member) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
                if arrays[name].dtype.kind == "U":
                    _check_text(arrays[name])
    except Exception as error:  # zipfile, zlib and numpy raise all kinds
        raise _not_a_file("a .npz of arrays without objects", error) from error
    about = arrays.pop(ABOUT, None)
    if about is not None and (about.dtype.kind != "U" or about.ndim):
        raise _not_a_file(f"text in {ABOUT!r}", about.dtype)
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.dtype.kind == "U" and array.ndim == 1:
            found[name] = [str(text) for text in array]
        elif array.dtype.kind in "biufc" and str(array.dtype.newbyteorder("=")) in NUMPY_DTYPES:
            found[name] = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
        else:
            raise _not_a_file(
                f"numbers, or (N,) text, in {name!r}", f"{array.dtype}, {array.shape}"
            )
    return _unflat(found, None if about is None else str(about))


def _check_text(array: npt.NDArray[Any]) -> None:
    """Refuse cells of text that are no Unicode, of which numpy makes broken strings."""
    array.astype(array.dtype.newbyteorder("<")).tobytes().decode("utf-32-le", "surrogatepass")


# --- safetensors -------------------------------------------------------------------------------


def _imported(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        detail = f"expected {package}, which is not installed; pip install 'jagcodec[cli]'"
        raise ArgumentError("bad_option", "format", detail) from error


def to_safetensors(found: Columns) -> bytes:
    """A safetensors file.

    Raises:
        ArgumentError: It cannot hold a column or `meta`, or safetensors is not installed.
    """
    library = _imported("safetensors.torch", "safetensors")
    _check_dtypes(found, SAFETENSORS_DTYPES, (), "safetensors")
    tensors = {
        # Of their own: safetensors refuses tensors that share memory.
        name: tensor.contiguous().clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in _flat(found).items()
    }
    for name, tensor in tensors.items():
        if isinstance(tensor, list):
            raise _refused(name, "rows of text, which safetensors has not", LEAVE_OUT)
        if name == "__metadata__":
            raise _refused(name, "a name that safetensors uses itself", RENAME)
    data: bytes = library.save(tensors, metadata={ABOUT: _about(found)})
    return data


def from_safetensors(data: bytes) -> Columns:
    """The columns of a safetensors file, also of one that others wrote.

    Raises:
        ArgumentTypeError: It is none.
        ArgumentError: safetensors is not installed.
    """
    library = _imported("safetensors.torch", "safetensors")
    try:
        tensors = library.load(data)
        (size,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except Exception as error:  # safetensors and torch raise all kinds
        raise _not_a_file("a safetensors file", error) from error
    return _unflat(tensors, metadata.get(ABOUT))


# --- Arrow -------------------------------------------------------------------------------------


def to_arrow(found: Columns) -> bytes:
    """A table as an Arrow IPC file.

    Raises:
        ArgumentError: Arrow cannot say what a column is, or `meta`; or pyarrow is not installed.
    """
    pa = _imported("pyarrow", "pyarrow")
    _check_dtypes(found, ARROW_DTYPES, (str, bytes), "Arrow")
    arrays = {name: _to_arrow(pa, name, column) for name, column in found.columns.items()}
    table = pa.Table.from_arrays([*arrays.values()], names=[*arrays])
    table = table.replace_schema_metadata({ABOUT: _about(found)})
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def _to_arrow(pa: Any, name: str, column: Any) -> Any:
    if isinstance(column, list):
        kind = pa.large_binary() if column and type(column[0]) is bytes else pa.large_string()
        try:
            return pa.array(column, kind)
        except (UnicodeError, pa.ArrowException) as error:
            raise _refused(name, "text that is no Unicode", "make it bytes") from error
    tensor = column.values if isinstance(column, JaggedRows) else column
    if 0 in tensor.shape[1:]:
        raise _refused(name, f"cells of shape {list(tensor.shape[1:])}", LEAVE_OUT)
    # Not of as many dims as the tensor: Arrow takes only flat arrays.
    cells = pa.array(tensor.contiguous().numpy().reshape(-1))
    for dim in reversed(tensor.shape[1:]):
        cells = pa.FixedSizeListArray.from_arrays(cells, dim)
    if isinstance(column, JaggedRows):
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), cells)
    return cells


def from_arrow(data: bytes) -> Columns:
    """The columns of an Arrow IPC file or stream, also of one that others wrote.

    Raises:
        ArgumentTypeError: It is none.
        ArgumentError: A column is not of numbers, lists of them, text or bytes, or has nulls; it is
            named. Or pyarrow is not installed.
    """
    pa = _imported("pyarrow", "pyarrow")
    try:
        is_file = data[:6] == b"ARROW1"
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.BufferReader(data))
        table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _not_a_file("an Arrow IPC file", error) from error
    names = table.column_names
    if len(set(names)) != len(names):
        raise _not_a_file("distinct names of columns", brief(names))
    about = (table.schema.metadata or {}).get(ABOUT.encode())
    _, meta = _read_about(about)
    columns = {name: _from_arrow(pa, name, table.column(name).combine_chunks()) for name in names}
    if not columns:
        raise _not_a_file("a column or more", "none")
    return Columns(table.num_rows, columns, meta)


def _from_arrow(pa: Any, name: str, array: Any) -> Any:
    if isinstance(array, pa.ChunkedArray):  # of no chunks, or more than one array holds
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    kind = array.type
    _check_nulls(name, array)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return array.to_pylist()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return array.to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return JaggedRows(_cells(pa, name, array.flatten()), offsets - offsets[:1])
    return _cells(pa, name, array)


def _cells(pa: Any, name: str, array: Any) -> torch.Tensor:
    """Numbers, and fixed-size lists of them."""
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        _check_nulls(name, array)
        shape.append(array.type.list_size)
        array = array.flatten()
    _check_nulls(name, array)
    kind = array.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not numbers:
        raise _refused(name, f"Arrow's {kind}", "cast it to numbers, lists of them, text or bytes")
    cells = array.to_numpy(zero_copy_only=False)
    # Of its own: Arrow's memory is read-only.
    return torch.from_numpy(cells.reshape(shape).copy())


def _check_nulls(name: str, array: Any) -> None:
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise _refused(name, f"a null at {row}", "fill it")


# --- formats -----------------------------------------------------------------------------------

FORMATS = (
    Format(".npz", (".npz",), to_npz, from_npz),
    Format("Arrow", (".arrow", ".feather"), to_arrow, from_arrow),
    Format("safetensors", (".safetensors",), to_safetensors, from_safetensors),
)


def format_of(file: str) -> Format | None:
    """The format that the ending of a file's name stands for; None for a message."""
    lower = file.lower()
    return next((each for each in FORMATS if lower.endswith(each.endings)), None)
