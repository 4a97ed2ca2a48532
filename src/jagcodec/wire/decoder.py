"""Frames -> Python values. Every number of the header is checked before something is built."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, from_bytes
from jagcodec.ragged.nested import Raggedness, RowSplits, rows_of, splits_of_offsets
from jagcodec.ragged.non_tensor import batch_of, is_non_tensor, stack_of_payloads
from jagcodec.wire import numpy_dtypes, records
from jagcodec.wire.checks import brief, check_distinct
from jagcodec.wire.dtypes import torch_size
from jagcodec.wire.frames import buffer_bytes, is_blob, split_blob
from jagcodec.wire.header import check_crc, read_header, read_tree
from jagcodec.wire.narrow import widened
from jagcodec.wire.payload import FramePayload, Payload
from jagcodec.wire.registry import restore
from jagcodec.wire.spec import MAX_NDIM, MAX_STACKS, TORCH_DTYPES

T = TypeVar("T")
AnyArray: TypeAlias = npt.NDArray[Any]

_DTYPES: dict[str, torch.dtype | None] = {name: getattr(torch, name, None) for name in TORCH_DTYPES}

# Of every dtype that this torch has: a dtype itself may ride even where its tensors cannot.
_ALL_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def decode(
    frames: Any,
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
) -> Any:
    """The value that `encode` was given.

    Args:
        frames: The message's frames in order, each of the buffer protocol (bytes, bytearray,
            memoryview, numpy array, `zmq.Frame`) or a uint8 CPU tensor; at any address. Or a
            message in one buffer, as `to_blob` makes it.
        copy: None aliases writable frames and copies read-only ones, each once however many
            values lie in it: torch has no read-only tensors, and a write into read-only memory
            can kill the process. True copies every frame. False copies none: never write to
            what comes back if a frame was read-only.
        device: Where tensors go, and the `device` of TensorDicts. None: the CPU, and None.
        allow_pickle: Unpickle what an `encode` with the same option pickled. That runs whatever
            code the sender chose: only for peers that you trust with your process.

    Returns:
        The value. Tensors and arrays that alias a frame keep it alive, and each has a storage of
        its own over its bytes. Columns with equal row lengths share one raggedness, so
        ``td["a"] * td["b"]`` works. Values at an address that their dtype cannot live at are
        copied, whatever `copy` says.

    Raises:
        WireFormatError: The frames are no whole message of this format and version. `.path` says
            where, `.reason` what.

    Nothing is unpickled unless you allow it, and no name in a message is ever looked up outside
    the tables of `docs/wire-format.md` and the types that you registered. Safe to call from
    several threads at once.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from jagcodec import decode, encode
        >>> td = TensorDict({"ids": torch.arange(6).view(2, 3), "tag": "gsm8k"}, batch_size=[2])
        >>> back = decode(encode(td))
        >>> back["ids"].tolist(), back["tag"]
        ([[0, 1, 2], [3, 4, 5]], 'gsm8k')
    """
    header, payload = receive(flat_frames(frames))
    if header.checksums is not None:
        for i, array in enumerate(payload):
            check_crc(array, header.checksums[i + 1], f"frame {i + 1}")
    target = usable_device(device, "decode(device)")
    source = FramePayload(payload, copy)
    return read_tree(header, Decoding(header, source, target, allow_pickle).build)


def usable_device(device: torch.device | str | None, path: str) -> torch.device | None:
    """The device, if tensors can be put there.

    Raises:
        ArgumentError: There is no such device.
    """
    if device is None:
        return None
    try:
        return (
            torch.empty(0, device=device).device if str(device) != "meta" else torch.device("meta")
        )
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(
            "bad_option", path, f"expected a device of this machine, found {device!r}: {error}"
        ) from error


class MsgpackDecoder:
    """`decode` as an object, where a framework wants one. Holds its options and no other state.

    Example:
        >>> from jagcodec import MsgpackDecoder, MsgpackEncoder
        >>> decoder = MsgpackDecoder(copy=True)
        >>> decoder.decode(MsgpackEncoder().encode({"a": 1}))
        {'a': 1}
    """

    def __init__(
        self,
        *,
        copy: bool | None = None,
        device: torch.device | str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._copy = copy
        self._device = device
        self._allow_pickle = allow_pickle

    def decode(self, frames: Any) -> Any:
        """See `decode`."""
        return decode(frames, copy=self._copy, device=self._device, allow_pickle=self._allow_pickle)


# --- frames ------------------------------------------------------------------------------------


def flat_frames(frames: Any) -> list[ByteArray]:
    """The frames of a message in frames or in one blob, header first, aliased.

    Raises:
        WireFormatError: There is no message, or a blob is cut.
    """
    one = isinstance(frames, (bytes, bytearray, memoryview, np.ndarray, torch.Tensor))
    if one or not isinstance(frames, Sequence):
        frames = [frames]
    if not frames:
        raise WireFormatError("no_message", "frames", "expected a header frame, found no frame")
    arrays = [buffer_bytes(frame, f"frame {i}") for i, frame in enumerate(frames)]
    if len(arrays) == 1 and is_blob(arrays[0]):
        arrays = split_blob(arrays[0], lambda header: read_header(header).buffers)
    return arrays


def receive(arrays: list[ByteArray]) -> tuple[records.Header, list[ByteArray]]:
    """The checked header and the payload of `flat_frames`, aliased.

    Raises:
        WireFormatError: The message is cut, or its frames are not the header's.
    """
    header = read_header(arrays[0].data)
    sizes = [len(array) for array in arrays[1:]]
    if len(sizes) != len(header.buffers):
        raise WireFormatError(
            "frame_count",
            "frames",
            f"expected {len(header.buffers) + 1} frames, found {len(sizes) + 1}; "
            "frames were lost, or come from more than one message",
        )
    for i, (expected, found) in enumerate(zip(header.buffers, sizes, strict=True)):
        if expected != found:
            raise WireFormatError(
                "frame_size",
                f"frame {i + 1}",
                f"expected {expected} bytes, found {found}; it was cut, or frames changed places",
            )
    return header, arrays[1:]


# --- values ------------------------------------------------------------------------------------


class _Budget:
    """Bytes that values of one message may take all together, however many share a place."""

    def __init__(self, size: int, exceeded: str) -> None:
        self._left = size
        self._exceeded = exceeded

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise WireFormatError("out_of_bounds", "$", self._exceeded)


class Decoding:
    """Records to values, over one message: the state of one `decode` call."""

    def __init__(
        self,
        header: records.Header,
        payload: Payload,
        device: torch.device | None,
        allow_pickle: bool,
    ) -> None:
        self._header = header
        self._allow_pickle = allow_pickle
        bound = records.field_array_bound(header)
        overlap = "expected values that do not overlap, found many over one"
        self._reads = _Budget(sum(header.buffers), overlap)
        self._copies = _Budget(bound, overlap)
        # The bound of one structured array, as the bound of them all.
        self._fields = _Budget(bound, "expected fields, found mostly gaps")
        # Levels of lazy stacks in what was built, with the value, so that its id stays its own.
        self._stacked: dict[int, tuple[int, Any]] = {}
        self._payload = payload
        self._device = device
        self._ragged: dict[int, Raggedness] = {}

    def build(self, record: Any) -> Any:
        """The value of one checked record."""
        try:
            return _BUILDERS[type(record)](self, record)
        except WireFormatError:
            raise
        except MemoryError:
            raise
        except Exception as error:  # torch, numpy and tensordict raise all kinds
            raise _bad(f"a {type(record).__name__}", error) from error

    def _read_once(self, buffer: int, offset: int, size: int) -> ByteArray:
        """Bytes that become a copy. All of them together are no more than the payload has."""
        self._reads.take(size)
        return self._payload.read(buffer, offset, size)

    def _big_int(self, record: records.BigInt) -> int:
        return int.from_bytes(record.data, "little", signed=True)

    def _members(self, record: records.Set | records.FrozenSet) -> list[Any]:
        check_distinct(record.items, "set members")
        if len(set(record.items)) != len(record.items):
            raise _bad("every set member once", "some twice")
        return record.items

    def _dict(self, record: records.Dict) -> dict[Any, Any]:
        keys = record.items[::2]
        check_distinct(keys, "dict keys")
        value = dict(zip(keys, record.items[1::2], strict=True))
        if len(value) != len(keys):
            raise _bad("every dict key once", "some twice")
        return value

    def _bytes(self, record: records.Bytes) -> bytes:
        return self._read_once(record.buffer, record.offset, record.size).tobytes()

    # numpy

    def _array(self, record: records.Array) -> AnyArray:
        dtype = _numpy_dtype(record.dtype)
        size = math.prod(record.shape) * dtype.itemsize
        alignment = math.gcd(dtype.alignment, 16)
        data = self._payload.bytes_at(record.buffer, record.offset, size, alignment)
        array: AnyArray = np.ndarray(tuple(record.shape), dtype=dtype, buffer=data)
        numpy_dtypes.check_text(array)
        return array

    def _object_array(self, record: records.ObjectArray) -> AnyArray:
        array = np.empty(len(record.items), dtype=object)
        for i, item in enumerate(record.items):
            array[i] = item
        return array.reshape(record.shape)

    def _field_array(self, record: records.FieldArray) -> AnyArray:
        dtype = _numpy_dtype(record.dtype)
        shape = tuple(record.shape)
        names = dtype.names or ()
        self._fields.take(math.prod(shape) * dtype.itemsize)
        for name, column in zip(names, record.columns, strict=True):
            if not isinstance(column, np.ndarray) or column.shape[: len(shape)] != shape:
                raise _bad(f"an array of shape {shape} for field {name!r}", type(column).__name__)
        array = np.zeros(shape, dtype=dtype)
        for name, column in zip(names, record.columns, strict=True):
            if column.dtype != array[name].dtype or column.shape != array[name].shape:
                raise _bad(f"{array[name].dtype} for field {name!r}", column.dtype)
            array[name] = column
        return array

    def _string_array(self, record: records.StringArray) -> AnyArray:
        dtypes: Any = getattr(np, "dtypes", None)
        if not hasattr(dtypes, "StringDType"):
            raise _bad("a numpy with StringDType (2.0 or newer)", np.__version__)
        options = {"na_object": record.na} if record.has_na else {}
        dtype = dtypes.StringDType(coerce=record.coerce, **options)
        items = [record.na if item is None else item for item in record.items]
        array = np.empty(len(items), dtype=dtype)
        for i, item in enumerate(items):
            array[i] = item
        return array.reshape(record.shape)

    def _scalar(self, record: records.Scalar) -> Any:
        if record.dtype is None:
            if not isinstance(record.data, np.ndarray) or record.data.shape != ():
                raise _bad("a 0-d array", type(record.data).__name__)
            self._copies.take(record.data.nbytes)
            return record.data[()]
        dtype = _numpy_dtype(record.dtype)
        data = np.frombuffer(bytearray(record.data), dtype=np.uint8)
        array: AnyArray = np.ndarray((), dtype=dtype, buffer=data)
        numpy_dtypes.check_text(array)
        return array[()]

    def _string_scalar(self, record: records.StringScalar) -> Any:
        return np.str_(record.value) if isinstance(record.value, str) else np.bytes_(record.value)

    # torch

    def _tensor(self, record: records.Tensor | records.Jagged) -> torch.Tensor:
        tensor = self._cells(record)
        return tensor if self._device is None else tensor.to(self._device)

    def _cells(self, record: records.Tensor | records.Jagged | records.TensorViews) -> torch.Tensor:
        cells = math.prod(record.shape)
        size = torch_size(record.dtype, cells)
        dtype = torch_dtype(record.dtype)
        if isinstance(record.dtype, list):
            name, stored = record.dtype
            narrow = self._read_once(record.buffer, record.offset, size)
            data = widened(narrow, stored, name, cells)
        else:
            data = self._payload.bytes_at(record.buffer, record.offset, size, dtype.itemsize)
        return from_bytes(data, dtype, tuple(record.shape))

    def _tensor_views(self, record: records.TensorViews) -> list[torch.Tensor]:
        base = self._cells(record)
        base = base if self._device is None else base.to(self._device)
        return [base[start:end] for start, end in zip(record.starts, record.ends, strict=True)]

    def _jagged(self, record: records.Jagged) -> torch.Tensor:
        raggedness = self._ragged.get(record.group)
        if raggedness is None:
            raggedness = self._ragged[record.group] = self._raggedness(record.group)
        cells = record.shape[record.ragged_dim - 1]
        if raggedness.splits.total != cells:
            raise WireFormatError(
                "bad_offsets",
                "$",
                f"expected the offsets of ragged group {record.group} to end at the {cells} "
                f"cells of the values, found {raggedness.splits.total}",
            )
        return raggedness.jagged(self._tensor(record), record.ragged_dim)

    def _raggedness(self, index: int) -> Raggedness:
        return Raggedness(read_splits(self._header, self._payload, index))

    def _strided_nested(self, record: records.StridedNested) -> torch.Tensor:
        sizes, values = _cpu_tensor(record.sizes), _cpu_tensor(record.values)
        if sizes.dtype != torch.int64 or sizes.dim() != 2 or values.dim() != 1:
            raise _bad("int64 sizes (N, dims) and flat values", f"{sizes.dtype} {sizes.dim()}-d")
        if sizes.shape[1] > MAX_NDIM:
            raise _bad(f"at most {MAX_NDIM} dims", sizes.shape[1])
        if not sizes.shape[1] and len(sizes) != values.numel():
            # Without dims every component is one cell, and no byte of sizes vouches for them.
            raise _bad(f"{values.numel()} components without dims", len(sizes))
        shapes = sizes.tolist()
        # In Python integers, which cannot overflow.
        cells = [math.prod(shape) for shape in shapes]
        if any(dim < 0 for shape in shapes for dim in shape) or sum(cells) != values.numel():
            raise WireFormatError(
                "bad_offsets",
                "$",
                f"expected component sizes that add up to {values.numel()} cells, "
                f"found {sum(cells)}",
            )
        self._copies.take(values.numel() * values.itemsize)
        parts = torch.split(values, cells) if cells else ()
        return torch.nested.as_nested_tensor(
            [part.view(shape) for part, shape in zip(parts, shapes, strict=True)],
            dtype=values.dtype,
            device=values.device,
            layout=torch.strided,
        )

    def _sparse_coo(self, record: records.SparseCoo) -> torch.Tensor:
        indices, values = _cpu_tensor(record.indices), _cpu_tensor(record.values)
        if indices.dtype != torch.int64:
            raise WireFormatError(
                "bad_sparse", "$", f"expected int64 indices, found {indices.dtype}"
            )
        self._copies.take(indices.numel() * indices.itemsize)
        try:
            # Copied: torch relies on indices, so what was checked must not change with the memory.
            tensor = torch.sparse_coo_tensor(
                indices.clone(),
                values,
                tuple(record.shape),
                device=values.device,
                check_invariants=True,
            )
            if not record.coalesced:
                return tensor
            # torch believes this flag, so see that the indices rise.
            if not _rising(indices):
                raise ValueError("coalesced indices that do not rise")
            return tensor._coalesced_(True)
        except (RuntimeError, ValueError) as error:
            raise WireFormatError(
                "bad_sparse", "$", f"expected indices within {record.shape}, found {error!s:.200}"
            ) from error

    def _sparse_compressed(self, record: records.SparseCompressed) -> torch.Tensor:
        compressed, plain = _cpu_tensor(record.compressed), _cpu_tensor(record.plain)
        self._copies.take(compressed.numel() * compressed.itemsize + plain.numel() * plain.itemsize)
        try:
            return torch.sparse_compressed_tensor(
                compressed.clone(),
                plain.clone(),
                _cpu_tensor(record.values),
                tuple(record.shape),
                layout=getattr(torch, record.layout),
                device=compressed.device,
                check_invariants=True,
            )
        except RuntimeError as error:
            raise WireFormatError(
                "bad_sparse", "$", f"expected a {record.layout} tensor, found {error!s:.200}"
            ) from error

    def _dtype(self, record: records.DType) -> torch.dtype:
        dtype = _ALL_DTYPES.get(record.name)
        if dtype is None:
            raise _unknown_dtype(record.name)
        return dtype

    def _torch_device(self, record: records.Device) -> torch.device:
        return torch.device(record.type, record.number)  # type: ignore[arg-type]

    # tensordict

    def _tensordict(self, record: records.TensorDict) -> TensorDict:
        leaves = dict(zip(record.items[::2], record.items[1::2], strict=True))
        for key, leaf in leaves.items():
            if not (isinstance(leaf, (torch.Tensor, TensorDictBase)) or is_non_tensor(leaf)):
                raise _bad(f"a leaf at {key!r}", type(leaf).__name__)
        size = record.batch_size
        plain = len(size) == 1 and record.names is None and self._device is None
        if plain and all(_rows(leaf) == size[0] for leaf in leaves.values()):
            return batch_of(leaves, size[0])
        td = TensorDict(
            leaves,
            batch_size=torch.Size(record.batch_size),
            names=record.names,  # type: ignore[arg-type]
            device=self._device,
        )
        levels = self._levels(leaves.values())
        if levels:
            self._stacked[id(td)] = (levels, td)
        return td

    def _levels(self, members: Iterable[Any]) -> int:
        """How many lazy stacks are inside each other in these."""
        known = [self._stacked.get(id(member)) for member in members]
        return max((entry[0] for entry in known if entry is not None), default=0)

    def _stack(self, members: list[Any], make: Callable[[], T]) -> T:
        """A lazy stack, if it is not the one too many."""
        levels = 1 + self._levels(members)
        if levels > MAX_STACKS:
            raise WireFormatError(
                "too_deep", "$", f"expected at most {MAX_STACKS} stacks in each other, found more"
            )
        stack = make()
        self._stacked[id(stack)] = (levels, stack)
        return stack

    def _lazy_stack(self, record: records.LazyStack) -> LazyStackedTensorDict:
        if not all(isinstance(member, TensorDictBase) for member in record.items):
            raise _bad("TensorDicts to stack", "something else")
        options: Any = {"stack_dim": record.stack_dim, "stack_dim_name": record.dim_name}
        stack: LazyStackedTensorDict = self._stack(
            record.items, lambda: LazyStackedTensorDict(*record.items, **options)
        )
        # Members whose dim names differ are found only when one asks.
        if record.items and len(stack.names) != stack.batch_dims:
            raise _bad(f"{stack.batch_dims} dim names", stack.names)
        return stack

    def _non_tensor_data(self, record: records.NonTensorData) -> NonTensorData:
        return NonTensorData(record.payload, batch_size=torch.Size(record.batch_size))

    def _non_tensor_stack(self, record: records.NonTensorStack) -> NonTensorStack:
        if not all(is_non_tensor(member) for member in record.items):
            raise _bad("non-tensor members to stack", "something else")
        return self._stack(
            record.items, lambda: NonTensorStack(*record.items, stack_dim=record.stack_dim)
        )

    # the user's

    def _user(self, record: records.User) -> Any:
        return restore(record.name, record.state)

    def _pickle(self, record: records.Pickle) -> Any:
        if not self._allow_pickle:
            raise WireFormatError(
                "pickle_refused",
                "$",
                "expected a message without pickle, found a pickled object; if you trust the "
                "sender with this process, pass allow_pickle=True on both sides",
            )
        try:
            return pickle.loads(record.data)  # noqa: S301
        except Exception as error:  # whatever unpickling may raise
            raise _bad("data that unpickles", f"{type(error).__name__}: {error}") from error


def _rows(leaf: Any) -> int | None:
    """Rows of a leaf that a TensorDict takes as it is; None of any other."""
    if type(leaf) is NonTensorStack:
        return len(leaf.tensordicts) if leaf.batch_dims == 1 else None
    return rows_of(leaf)


_OFFSETS = np.dtype("<i8")


def read_splits(header: records.Header, payload: Payload, index: int) -> RowSplits:
    """The row splits of a ragged group.

    Raises:
        WireFormatError: Its offsets are not, or not those of its min and max.
    """
    group = header.groups[index]
    data = payload.read(group.buffer, group.offset, 8 * (group.rows + 1))
    # A copy: offsets that were checked must not change with the message's memory.
    offsets = np.frombuffer(bytearray(data), dtype=_OFFSETS)
    splits = splits_of_offsets(offsets)
    if splits is None:
        raise WireFormatError(
            "bad_offsets",
            f"$ (ragged group {index})",
            f"expected offsets from 0 that never fall, found {brief(offsets[:8].tolist())}",
        )
    if (splits.min, splits.max) != (group.min, group.max):
        raise WireFormatError(
            "bad_offsets",
            f"$ (ragged group {index})",
            f"expected rows of {splits.min} to {splits.max} as the offsets say, "
            f"found {group.min} to {group.max} in the header",
        )
    return splits


def _bad(expected: str, found: Any) -> WireFormatError:
    # Foreign texts can be long: torch's dispatch tables, a stranger's own words.
    return WireFormatError("bad_value", "$", f"expected {expected}, found {found!s:.200}")


def _unknown_dtype(name: str) -> WireFormatError:
    return WireFormatError(
        "unknown_dtype", "$", f"expected a dtype of torch {torch.__version__}, found {name!r}"
    )


def torch_dtype(description: Any) -> torch.dtype:
    """The torch dtype of a checked description, whichever way its cells are stored.

    Raises:
        WireFormatError: This torch has no such dtype.
    """
    name = description if isinstance(description, str) else description[0]
    dtype = _DTYPES[name]
    if dtype is None:
        raise _unknown_dtype(name)
    return dtype


def _numpy_dtype(description: Any) -> np.dtype[Any]:
    try:
        return numpy_dtypes.restore(description)
    except (TypeError, ValueError) as error:
        raise WireFormatError(
            "unknown_dtype", "$", f"expected a dtype of numpy {np.__version__}, found {error}"
        ) from error


def _rising(indices: torch.Tensor) -> bool:
    """Whether the columns of (dims, nnz) indices rise in lexicographic order, none twice."""
    if indices.shape[0] == 0:
        return indices.shape[1] <= 1
    steps = indices[:, 1:] - indices[:, :-1]
    open_steps = torch.ones(steps.shape[1], dtype=torch.bool, device=steps.device)
    for step in steps:
        if (open_steps & (step < 0)).any():
            return False
        open_steps &= step == 0
    return not open_steps.any()


def _cpu_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        raise _bad("a dense tensor", type(value).__name__)
    return value


_BUILDERS: dict[type, Callable[[Decoding, Any], Any]] = {
    records.BigInt: Decoding._big_int,
    records.Complex: lambda d, r: complex(r.real, r.imag),
    records.Tuple: lambda d, r: tuple(r.items),
    records.Set: lambda d, r: set(d._members(r)),
    records.FrozenSet: lambda d, r: frozenset(d._members(r)),
    records.Dict: Decoding._dict,
    records.Range: lambda d, r: range(r.start, r.stop, r.step),
    records.Slice: lambda d, r: slice(r.start, r.stop, r.step),
    records.Bytes: Decoding._bytes,
    records.Array: Decoding._array,
    records.ObjectArray: Decoding._object_array,
    records.FieldArray: Decoding._field_array,
    records.StringArray: Decoding._string_array,
    records.Scalar: Decoding._scalar,
    records.StringScalar: Decoding._string_scalar,
    records.Tensor: Decoding._tensor,
    records.Jagged: Decoding._jagged,
    records.TensorViews: Decoding._tensor_views,
    records.StridedNested: Decoding._strided_nested,
    records.SparseCoo: Decoding._sparse_coo,
    records.SparseCompressed: Decoding._sparse_compressed,
    records.Size: lambda d, r: torch.Size(r.shape),
    records.DType: Decoding._dtype,
    records.Device: Decoding._torch_device,
    records.TensorDict: Decoding._tensordict,
    records.LazyStack: Decoding._lazy_stack,
    records.NonTensorData: Decoding._non_tensor_data,
    records.NonTensorRows: lambda d, r: stack_of_payloads(r.payloads),
    records.NonTensorStack: Decoding._non_tensor_stack,
    records.User: Decoding._user,
    records.Pickle: Decoding._pickle,
}
