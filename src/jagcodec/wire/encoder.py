"""Python values -> frames. No pickle, and no copy of anything large that lies in order."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
)
from tensordict._td import _SubTensorDict
from tensordict.utils import LinkedList

from jagcodec.errors import ArgumentError, Reason, UnsupportedTypeError, WireFormatError
from jagcodec.memory.staging import Staging
from jagcodec.memory.tensor_bytes import ALIGNMENT, ByteArray, as_bytes, from_bytes, together
from jagcodec.ragged.nested import (
    Parts,
    RowSplits,
    Seen,
    is_jagged,
    note_memory,
    splits_of_lengths,
    take_apart,
)
from jagcodec.ragged.non_tensor import dim_names, leaf_of_rows, payloads_of_stack
from jagcodec.ragged.views import Strip, compact_values, packed
from jagcodec.rowcopy import copy_all
from jagcodec.wire import numpy_dtypes, records
from jagcodec.wire.checks import check_distinct
from jagcodec.wire.frames import Unwritten
from jagcodec.wire.header import HeaderWriter, child_path
from jagcodec.wire.narrow import narrowed
from jagcodec.wire.registry import registered_name, state_of
from jagcodec.wire.spec import (
    INLINE_BYTES,
    INTEGER_DTYPES,
    MAX_DEPTH,
    MAX_NDIM,
    MAX_STACKS,
    MAX_UNBACKED_ROWS,
    SMALL_BUFFER,
    TORCH_DTYPES,
)
from jagcodec.wire.views import Merged, merge

Frame: TypeAlias = bytes | bytearray | memoryview


def encode(
    obj: Any, *, narrow: bool = False, checksum: bool = False, allow_pickle: bool = False
) -> list[Frame]:
    """A value as a message: the header frame, then raw buffers.

    Args:
        obj: Any tree of dict, list, tuple, set, frozenset, None, bool, int, float, complex, str,
            bytes, range, slice, numpy arrays and scalars of every dtype, tensors of every layout
            and every dtype but the quantised, `torch.Size`, `torch.dtype`, `torch.device`,
            TensorDict, LazyStackedTensorDict, NonTensorData and NonTensorStack, and of types
            registered with `register_type`.
        narrow: Store integer tensors in the fewest bytes per cell that hold their values, and
            those of 0 and 1 as bits; `decode` restores dtype and values exactly. Costs two
            looks at each of them here and a copy there.
        checksum: Add a CRC-32 of every buffer, which `decode` verifies.
        allow_pickle: Pickle objects outside this set instead of refusing them. `decode` must be
            told the same; only for peers that you trust with your process.

    Returns:
        Frames of the buffer protocol: `bytes` first, then flat memoryviews, ready for
        ``send_multipart(frames, copy=False)``. Memory that already lies contiguous on the CPU is
        aliased, not copied, and kept alive by its frame: write to it only after the frames are
        sent. Buffers below 16 KiB are copied into frame 1. Tensors on CUDA devices are copied
        to one block of pinned memory, which lives as long as one of its frames, and waited for
        once (a jagged one with holes is compacted on its device, and waited for by itself); the
        value is then walked over twice, so `to_state` of a registered type is called twice.

    `decode` returns the same value: types, dtypes, shapes, layouts, bits and dict order. What
    does not ride: gradients and `requires_grad` (a Parameter arrives as a plain tensor), devices
    (tensors arrive on the CPU), holes in jagged tensors (they arrive compacted), memory-mapped
    files (their contents arrive), locks of TensorDicts, and metadata of numpy dtypes.

    Raises:
        UnsupportedTypeError: An object outside this set, named with its path:
            ``$.extra[3].lock: _thread.lock ...``; or containers nested past 100 levels.

    Safe to call from several threads at once.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode
        >>> frames = encode({"step": 3, "ids": torch.arange(4)})
        >>> decode(frames)
        {'step': 3, 'ids': tensor([0, 1, 2, 3])}
    """
    frames = message(
        lambda encoding: encoding.value(obj),
        narrow=narrow,
        checksum=checksum,
        allow_pickle=allow_pickle,
    )
    return written(frames)


def message(
    walk: Callable[[Encoding], Any], *, narrow: bool, checksum: bool, allow_pickle: bool
) -> list[Frame | Unwritten]:
    """The frames of the tree that `walk` makes with an `Encoding` of these options.

    Columns of `Encoding.batch` that are still to be packed stay that, until they are `written`.
    Tensors on CUDA devices are noted in a first walk, copied to the host together, and encoded
    in a second: the device is waited for once, not at every tensor.
    """
    walking = partial(Encoding, narrow=narrow, checksum=checksum, allow_pickle=allow_pickle)
    first = walking()
    tree = walk(first)
    if not len(first.staging):
        return first.frames(tree)
    first.staging.fetch()
    second = walking(fetched=first.staging)
    return second.frames(walk(second))


def written(frames: Iterable[Frame | Unwritten]) -> list[Frame]:
    """Frames of which nothing is left to be written: new ones in one allocation, with gaps."""
    parts = list(frames)
    new = [part for part in parts if isinstance(part, Unwritten)]
    rooms = together([part.nbytes for part in new])
    copy_all([part.copy_to(room) for part, room in zip(new, rooms, strict=True)])
    filled = iter(rooms)
    return [next(filled).data if isinstance(part, Unwritten) else part for part in parts]


class MsgpackEncoder:
    """`encode` as an object, where a framework wants one. Holds its options and no other state.

    Example:
        >>> from jagcodec import MsgpackDecoder, MsgpackEncoder
        >>> MsgpackDecoder().decode(MsgpackEncoder().encode([1, (2, 3)]))
        [1, (2, 3)]
    """

    def __init__(
        self, *, narrow: bool = False, checksum: bool = False, allow_pickle: bool = False
    ) -> None:
        self._narrow = narrow
        self._checksum = checksum
        self._allow_pickle = allow_pickle

    def encode(self, obj: Any) -> list[Frame]:
        """See `encode`."""
        return encode(
            obj, narrow=self._narrow, checksum=self._checksum, allow_pickle=self._allow_pickle
        )


_TORCH_NAMES = {getattr(torch, name): name for name in TORCH_DTYPES if hasattr(torch, name)}

# What msgpack holds by itself and gives back as it was.
_NATIVE = frozenset((str, int, float, bool, type(None)))
_STRING = frozenset((str,))

_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, MemoryMappedTensor))


class Encoding:
    """The state of one walk over a value; see `message`."""

    def __init__(
        self,
        *,
        narrow: bool = False,
        checksum: bool = False,
        allow_pickle: bool = False,
        fetched: Staging | None = None,
    ) -> None:
        self.staging = Staging() if fetched is None else fetched
        self._fetched = fetched is not None
        self._narrow = narrow
        self._checksum = checksum
        self._allow_pickle = allow_pickle
        self._writer = HeaderWriter()
        self._path: list[Any] = []
        self._stacks = 0
        self._small = bytearray()
        self._large: list[memoryview | Unwritten] = []
        self._groups: list[records.Group] = []
        self._group_of_rows: dict[bytes, int] = {}
        self._group_of: dict[int, int] = {}
        self._sources: list[object] = []
        self._seen: Seen = {}
        self._unbacked_rows: list[tuple[str, int]] = []

    def frames(self, tree: Any) -> list[Frame | Unwritten]:
        """The frames of a tree that this encoding made; see `written`."""
        sizes: list[int] = []
        frames: list[Any] = []
        if self._small or self._large:
            frames = [memoryview(self._small), *self._large]
            sizes = [part.nbytes for part in frames]
        if self._checksum:
            frames = written(frames)
        for path, rows in self._unbacked_rows:
            if rows > sum(sizes):
                raise UnsupportedTypeError(
                    "too_large",
                    path,
                    f"expected at most {MAX_UNBACKED_ROWS} rows without data, found {rows}",
                )
        checksums = [zlib.crc32(frame) for frame in frames] if self._checksum else None
        try:
            header = self._writer.header(tree, sizes, self._groups, checksums)
        except ValueError as error:
            raise UnsupportedTypeError("too_large", "$", f"msgpack: {error}") from error
        return [header, *frames]

    # The walk

    def value(self, value: Any) -> Any:
        """The tree of a value."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        handler = _HANDLERS.get(kind)
        if handler is None:
            handler = next((h for base, h in _BASES if isinstance(value, base)), None)
        if handler is not None:
            return handler(self, value)
        name = registered_name(kind)
        if name is not None:
            return self._record(records.User(name, self._child("state", state_of(value))))
        return self._foreign(value)

    def _foreign(self, value: Any) -> Any:
        if not self._allow_pickle:
            raise self._refusal(value)
        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:  # whatever a __reduce__ raises
            raise self._refusal(value, f", and pickle says: {error}") from error
        return self._record(records.Pickle(data))

    def _child(self, key: Any, value: Any) -> Any:
        if type(value) in _NATIVE or (
            # The messages of a batch: a dict of plain values is its own tree.
            type(value) is dict
            and len(self._path) < MAX_DEPTH
            and _STRING.issuperset(map(type, value))
            and _NATIVE.issuperset(map(type, value.values()))
        ):
            return value
        self._path.append(key)
        if len(self._path) > MAX_DEPTH:
            raise self._refused(
                "too_deep", f"expected at most {MAX_DEPTH} nested containers, found more (a cycle?)"
            )
        lowered = self.value(value)
        self._path.pop()
        return lowered

    def _children(self, values: Any) -> list[Any]:
        if _NATIVE.issuperset(map(type, values)):
            return list(values)
        return [self._child(i, value) for i, value in enumerate(values)]

    def _record(self, record: Any) -> Any:
        try:
            return self._writer.extension(record)
        except ValueError as error:
            raise self._refused("too_large", f"msgpack: {error}") from error

    def _refused(self, reason: Reason, detail: str) -> UnsupportedTypeError:
        path = "$"
        for key in self._path:
            path = child_path(path, key)
        return UnsupportedTypeError(reason, path, detail)

    def _refusal(self, value: Any, why: str = "") -> UnsupportedTypeError:
        cls = type(value)
        name = cls.__qualname__ if cls.__module__ == "builtins" else _qualified(cls)
        return self._refused(
            "unsupported_type",
            f"{name} cannot ride{why or _REMEDY}",
        )

    # Buffers

    def _place(self, data: ByteArray) -> tuple[int, int]:
        size = data.nbytes
        if size == 0:
            return (0, 0)
        if size >= SMALL_BUFFER:
            self._large.append(data.data)
            return (len(self._large), 0)
        self._small.extend(bytes(-len(self._small) % ALIGNMENT))
        offset = len(self._small)
        self._small.extend(data.data)
        return (0, offset)

    def _group(self, parts: Parts) -> int:
        if not parts.compact:
            return self._new_group(splits_of_lengths(parts.lengths))
        known = self._group_of.get(id(parts.offsets))
        if known is None:
            known = self._new_group(splits_of_lengths(parts.lengths), parts.offsets)
        return known

    def _group_of_splits(self, splits: RowSplits) -> int:
        known = self._group_of.get(id(splits))
        return self._new_group(splits, splits) if known is None else known

    def _new_group(self, splits: RowSplits, source: object = None) -> int:
        """The group of these rows, made or found; remembered for `source`, which may come again."""
        key = splits.host.tobytes()
        group = self._group_of_rows.get(key)
        if group is None:
            group = self._group_of_rows[key] = len(self._groups)
            place = self._place(splits.host.view(np.uint8))
            self._groups.append(records.Group(*place, splits.rows, splits.min, splits.max))
        if source is not None:
            self._sources.append(source)  # kept alive, so that the id stays its own
            self._group_of[id(source)] = group
        return group

    # Python

    def _dict(self, value: dict[Any, Any]) -> Any:
        if _STRING.issuperset(map(type, value)):
            if _NATIVE.issuperset(map(type, value.values())):
                return value
            return {key: self._child(key, item) for key, item in value.items()}
        self._check_distinct(value)
        items: list[Any] = []
        for key, item in value.items():
            items += (self._key(key), self._child(key, item))
        return self._record(records.Dict(items))

    def _check_distinct(self, keys: Collection[Any]) -> None:
        try:
            check_distinct(list(keys), "keys")
        except WireFormatError as error:
            # What every reader refuses is refused here, where the keys come from.
            raise self._refused(error.reason, error.detail) from error

    def _key(self, key: Any) -> Any:
        """A dict key or set member: what is hashed by identity loses its meaning on the way."""
        self._check_key(key)
        return self._child(key, key)

    def _check_key(self, key: Any) -> None:
        if isinstance(key, (torch.Tensor, TensorDictBase, NonTensorData)):
            raise self._refusal(key, " as a dict key or set member: it is hashed by identity")
        if isinstance(key, (tuple, frozenset)):
            for item in key:
                self._check_key(item)

    def _members(self, value: Any) -> list[Any]:
        self._check_distinct(value)
        return [self._key(item) for item in value]

    def _bytes(self, value: bytes) -> Any:
        if len(value) < INLINE_BYTES:
            return value
        place = self._place(np.frombuffer(value, dtype=np.uint8))
        return self._record(records.Bytes(len(value), *place))

    def _slice(self, value: slice) -> Any:
        return self._record(
            records.Slice(
                self._child("start", value.start),
                self._child("stop", value.stop),
                self._child("step", value.step),
            )
        )

    # numpy

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype, shape = array.dtype, list(array.shape)
        if dtype.kind == "O":
            return self._record(records.ObjectArray(shape, self._children(list(array.flat))))
        if dtype.kind == "T":
            return self._string_array(array)
        description = self._numpy_dtype(array)
        if dtype.hasobject:
            fields = [dtype.fields[name][0] for name in dtype.names or ()]
            # A reader must not be made to allocate gaps that no byte of the message stands for.
            gaps = dtype.itemsize > 4 * sum(field.itemsize for field in fields)
            if dtype.names is None or gaps:
                raise self._refusal(array, f" with dtype {dtype}")
            columns = [self._child(name, array[name]) for name in dtype.names]
            return self._record(records.FieldArray(description, shape, columns))
        return self._record(records.Array(description, shape, *self._place(_array_bytes(array))))

    def _numpy_dtype(self, value: Any) -> Any:
        description = numpy_dtypes.describe(value.dtype)
        if description is None:
            raise self._refusal(value, f" with dtype {value.dtype}")
        return description

    def _string_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype: Any = array.dtype
        has_na = hasattr(dtype, "na_object")
        na = dtype.na_object if has_na else None
        if type(na) not in (type(None), float, str):
            raise self._refusal(array, f" with {na!r:.60} for missing; use None, nan or a str")
        # Where a string stands for missing, numpy itself cannot tell the two apart.
        text = has_na and type(na) is str
        items = [str(item) if text or isinstance(item, str) else None for item in array.flat]
        return self._record(
            records.StringArray(
                list(array.shape), items, dtype.coerce, has_na, self._child("na_object", na)
            )
        )

    def _scalar(self, value: np.generic) -> Any:
        if isinstance(value, np.str_):
            return self._record(records.StringScalar(str(value)))
        if isinstance(value, np.bytes_):
            return self._record(records.StringScalar(bytes(value)))
        if not type(value).__module__.startswith("numpy"):
            raise self._refusal(value)
        array = np.asarray(value)
        if array.dtype.hasobject:
            return self._record(records.Scalar(None, self._array(array)))
        description = self._numpy_dtype(value)
        return self._record(records.Scalar(description, _array_bytes(array).tobytes()))

    # torch

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if is_jagged(tensor):
            return self._jagged(tensor)
        if type(tensor) not in _PLAIN_TENSORS:
            raise self._refusal(tensor)
        if tensor.layout is torch.strided:
            return self._strided_nested(tensor) if tensor.is_nested else self._dense(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.detach()
            return self._record(
                records.SparseCoo(
                    list(tensor.shape),
                    self._dense(tensor._indices()),
                    self._dense(tensor._values()),
                    tensor.is_coalesced(),
                )
            )
        if tensor.layout in _COMPRESSED:
            tensor = tensor.detach()
            row_first = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            compressed = tensor.crow_indices() if row_first else tensor.ccol_indices()
            plain = tensor.col_indices() if row_first else tensor.row_indices()
            return self._record(
                records.SparseCompressed(
                    str(tensor.layout).removeprefix("torch."),
                    list(tensor.shape),
                    self._dense(compressed),
                    self._dense(plain),
                    self._dense(tensor.values()),
                )
            )
        raise self._refusal(tensor, f" with layout {tensor.layout}; call .to_dense() first")

    def _torch_dtype(self, tensor: torch.Tensor) -> str:
        name = _TORCH_NAMES.get(tensor.dtype)
        if name is None:
            raise self._refusal(tensor, f" with dtype {tensor.dtype}; dequantise it first")
        if tensor.is_meta:
            raise self._refusal(tensor, " from the meta device: it has no values")
        return name

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What to read in place of a tensor: its copy if it was fetched, or else itself.

        In the walk that only notes what to fetch, nothing in place of that.
        """
        if self._fetched:
            return self.staging.on_host(tensor)
        return tensor.new_empty(0, device="cpu") if self.staging.note(tensor) else tensor

    def _dense(self, tensor: torch.Tensor) -> Any:
        name = self._torch_dtype(tensor)
        if tensor.dim() > MAX_NDIM:
            raise self._refusal(tensor, f" with {tensor.dim()} dims: the limit is {MAX_NDIM}")
        dtype, place = self._cells(name, as_bytes(self._on_host(tensor)))
        return self._record(records.Tensor(dtype, list(tensor.shape), *place))

    def _cells(self, name: str, data: ByteArray) -> tuple[Any, tuple[int, int]]:
        """Cells of a torch dtype: the wire's dtype for them, and where they lie."""
        if self._narrow and name in INTEGER_DTYPES:
            stored = narrowed(data, name)
            if stored is not None:
                return [name, stored[0]], self._place(stored[1])
        return name, self._place(data)

    def _list(self, values: list[Any]) -> Any:
        if values and type(values[0]) is torch.Tensor:
            merged = merge(values)
            if merged is not None:
                return self._views(merged)
        return self._children(values)

    def _views(self, merged: Merged) -> Any:
        name = self._torch_dtype(merged.base)
        place = self._place(as_bytes(merged.base))
        ranges = merged.starts.tolist(), merged.ends.tolist()
        return self._record(records.TensorViews(*ranges, name, list(merged.base.shape), *place))

    def _jagged(self, tensor: torch.Tensor) -> Any:
        if not self._fetched and self._note_jagged(tensor):
            return None
        try:
            parts = take_apart(tensor, "jagged tensor", seen=self._seen, staging=self.staging)
        except ArgumentError as error:
            raise self._refused(error.reason, error.detail) from error
        return self._record(self._parts(parts))

    def _note_jagged(self, tensor: torch.Tensor) -> bool:
        """Ask for what of a jagged tensor has to come to the host; says whether any has."""
        return note_memory(tensor, self.staging)

    def _parts(self, parts: Parts) -> records.Jagged:
        name = self._torch_dtype(parts.values)
        if parts.compact:
            parts = parts._replace(values=self._on_host(parts.values))
        # What has holes is compacted where it lies: only rows leave the device.
        values = compact_values(parts)
        dtype, place = self._cells(name, as_bytes(values))
        group = self._group(parts)
        shape = list(values.shape)
        return records.Jagged(dtype, shape, *place, group, parts.ragged_dim)

    def _strip(self, strip: Strip) -> records.Jagged:
        """A jagged column in CPU memory that is packed where it is to lie in the message."""
        name = _TORCH_NAMES.get(strip.source.dtype) or self._torch_dtype(strip.source)
        small = strip.nbytes < SMALL_BUFFER
        if small or (self._narrow and name in INTEGER_DTYPES):
            return self._parts(*packed([strip]))
        self._large.append(strip)
        place = (len(self._large), 0)
        group = self._group_of_splits(strip.splits)  # whose offsets may be a large buffer too
        return records.Jagged(name, list(strip.shape), *place, group, 1)

    def _strided_nested(self, tensor: torch.Tensor) -> Any:
        self._torch_dtype(tensor)
        tensor = tensor.detach()
        components = tensor.unbind() if tensor.size(0) else ()
        # Without components torch's own sizes are no matrix.
        shapes = [list(component.shape) for component in components]
        sizes = torch.tensor(shapes, dtype=torch.int64, device="cpu")
        sizes = sizes.view(len(shapes), -1 if shapes else 0)
        cells = [as_bytes(self._on_host(component)) for component in components]
        values = np.concatenate(cells) if cells else np.empty(0, dtype=np.uint8)
        flat = from_bytes(values, tensor.dtype, (values.nbytes // tensor.itemsize,))
        return self._record(records.StridedNested(self._dense(sizes), self._dense(flat)))

    def _dtype(self, value: torch.dtype) -> Any:
        return self._record(records.DType(str(value).removeprefix("torch.")))

    # tensordict

    def _tensordict(self, td: TensorDictBase) -> Any:
        names = td.names if td.batch_dims else []
        items: list[Any] = []
        for key, leaf in td.items():
            if isinstance(leaf, TensorDictBase):
                self._check_nested(key, leaf, td, names)
            items += (key, self._child(key, leaf))
        dims = list(names) if any(name is not None for name in names) else None
        return self._record(records.TensorDict(self._batch_size(td), dims, items))

    def _check_nested(
        self, key: str, leaf: TensorDictBase, td: TensorDictBase, names: Sequence[Any]
    ) -> None:
        """No TensorDict can be built around a nested one of other rows or other dim names."""
        dims = td.batch_dims
        try:
            inner: Any = dim_names(leaf)
        except ValueError as error:  # the members of a lazy stack have different ones
            inner = error
        else:
            if leaf.batch_size[:dims] == td.batch_size and inner[:dims] == list(names):
                return
        raise self._refused(
            "row_mismatch",
            f"expected batch size {list(td.batch_size)} and dim names {list(names)} in nested "
            f"{key!r} too, found {list(leaf.batch_size)} and {inner}",
        )

    def batch(self, rows: int, columns: Iterable[tuple[str, Any]]) -> records.Batch:
        """The tree of a batch from its columns: tensors, `Parts`, or lists of N objects.

        What it makes is what the TensorDict of these columns would make.
        """
        leaves: dict[str, Any] = {}
        for name, column in columns:
            self._path.append(name)
            if isinstance(column, Strip):
                leaves[name] = self._strip(column)
            elif isinstance(column, Parts):
                leaves[name] = self._parts(column)
            elif isinstance(column, list):
                leaves[name] = self._object_rows(column)
            else:
                leaves[name] = self._tensor(column)
            self._path.pop()
        return records.Batch([rows], leaves)

    def _object_rows(self, payloads: list[Any]) -> Any:
        if not payloads:
            return self.value(leaf_of_rows(payloads))
        return self._record(records.NonTensorRows(self._children(payloads)))

    def _lazy_stack(self, stack: LazyStackedTensorDict) -> Any:
        members = self._members_of(stack)
        try:
            name = stack.names[stack.stack_dim] if members else None
        except ValueError as error:  # its members have different ones
            raise self._refused(
                "row_mismatch", f"expected one name per dim, found {error}"
            ) from error
        return self._record(records.LazyStack(stack.stack_dim, name, members))

    def _members_of(self, stack: LazyStackedTensorDict) -> list[Any]:
        if self._stacks == MAX_STACKS:
            raise self._refused(
                "too_deep", f"expected at most {MAX_STACKS} stacks in each other, found more"
            )
        self._stacks += 1
        members = self._children(stack.tensordicts)
        self._stacks -= 1
        return members

    def _non_tensor_data(self, data: NonTensorData) -> Any:
        payload = self._child("data", data.data)
        return self._record(records.NonTensorData(self._batch_size(data), payload))

    def _non_tensor_stack(self, stack: NonTensorStack) -> Any:
        payloads = payloads_of_stack(stack)
        if payloads is not None:
            return self._record(records.NonTensorRows(self._children(payloads)))
        members = self._members_of(stack)
        return self._record(records.NonTensorStack(stack.stack_dim, members))

    def _batch_size(self, td: Any) -> list[int]:
        batch_size: torch.Size = td.batch_size
        if batch_size.numel() > MAX_UNBACKED_ROWS:
            path = self._refused("too_large", "").path
            self._unbacked_rows.append((path, batch_size.numel()))
        return list(batch_size)


_REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type, or pass allow_pickle=True on both sides"
)


def _array_bytes(array: np.ndarray[Any, Any]) -> ByteArray:
    if array.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    array = numpy_dtypes.zero_padding(array)
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    flat: ByteArray = array.reshape(-1).view(np.uint8)
    return flat


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

_HANDLERS: dict[type, Callable[[Encoding, Any], Any]] = {
    dict: Encoding._dict,
    list: Encoding._list,
    LinkedList: Encoding._list,
    tuple: lambda e, v: e._record(records.Tuple(e._children(v))),
    bytes: Encoding._bytes,
    complex: lambda e, v: e._record(records.Complex(v.real, v.imag)),
    set: lambda e, v: e._record(records.Set(e._members(v))),
    frozenset: lambda e, v: e._record(records.FrozenSet(e._members(v))),
    range: lambda e, v: e._record(records.Range(v.start, v.stop, v.step)),
    slice: Encoding._slice,
    np.ndarray: Encoding._array,
    np.memmap: Encoding._array,
    torch.Size: lambda e, v: e._record(records.Size(list(v))),
    torch.dtype: Encoding._dtype,
    torch.device: lambda e, v: e._record(records.Device(v.type, v.index)),
    TensorDict: Encoding._tensordict,
    TensorDictParams: Encoding._tensordict,
    PersistentTensorDict: Encoding._tensordict,
    _SubTensorDict: Encoding._tensordict,
    LazyStackedTensorDict: Encoding._lazy_stack,
    NonTensorData: Encoding._non_tensor_data,
    NonTensorStack: Encoding._non_tensor_stack,
}

# Types of which there are too many to list; the handlers look closer.
_BASES: tuple[tuple[type, Callable[[Encoding, Any], Any]], ...] = (
    (torch.Tensor, Encoding._tensor),
    (np.generic, Encoding._scalar),
)
