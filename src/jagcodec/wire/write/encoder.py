"""`encode`: Python values to frames, without a copy of large memory in order.

Encoding has four phases. Each hands its result to the next:

    lower   a value -> a schema, and items: data that needs a place (`lowering`, `items`)
    store   items -> smaller items, if the caller wants them narrow or elided (`stored`)
    place   items -> buffers and numbers, then the header's bytes (`place`, `header`)
    copy    rows -> buffers, one allocation and one kernel call (`frames`)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias, TypedDict, Unpack, overload

import numpy as np

from jagcodec._arguments import (
    check_function,
    check_known,
    check_options,
    items_of,
    mapping_of,
    require_flag,
)
from jagcodec._compiling import untraced
from jagcodec.columns.batch import Batch, Name, source_in, storage_of_batch, to_send
from jagcodec.errors import (
    ArgumentKeyError,
    ArgumentTypeError,
    UnsupportedTypeError,
    brief,
    describe,
)
from jagcodec.memory.buffers import Target
from jagcodec.wire.compress import Compress, compressed, usable_level
from jagcodec.wire.frames import Frame, PendingMessage, frames_of, write_to, written_buffers
from jagcodec.wire.header import is_accepted, with_checksums
from jagcodec.wire.items import Tree
from jagcodec.wire.spec import Code
from jagcodec.wire.write.items_to_message import message_of
from jagcodec.wire.write.lowering import Lowering

Narrow: TypeAlias = bool | Collection[str | tuple[str, ...]]
"""All columns, none of them, or those of these names."""


class EncodeOptions(TypedDict, total=False):
    """The options of `encode`, which other functions pass on to it."""

    narrow: Narrow
    elide: bool
    checksum: bool
    compress: Compress
    allow_pickle: bool
    default: Callable[[Any], Any] | None
    meta: Mapping[Any, Any] | None


@overload
def encode(obj: Any, *, out: None = ..., **options: Unpack[EncodeOptions]) -> list[Frame]: ...


@overload
def encode(obj: Any, *, out: Target, **options: Unpack[EncodeOptions]) -> int: ...


@untraced
def encode(
    obj: Any,
    *,
    out: Target | None = None,
    narrow: Narrow = False,
    elide: bool = False,
    checksum: bool = False,
    compress: Compress = None,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    meta: Mapping[Any, Any] | None = None,
) -> list[Frame] | int:
    """A value as a message: the header frame, then raw buffers.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode
        >>> frames = encode({"step": 3, "ids": torch.arange(4)})
        >>> decode(frames)
        {'step': 3, 'ids': tensor([0, 1, 2, 3])}

    Args:
        obj: Any tree of dict, OrderedDict, list, tuple, set, frozenset, None, bool, int, float,
            complex, str, bytes, range, slice, numpy arrays and scalars of every dtype, tensors
            (strided, jagged, nested or sparse COO) of every dtype but the quantised, `torch.Size`,
            `torch.dtype`, `torch.device`, TensorDict, LazyStackedTensorDict, NonTensorData,
            NonTensorStack, MetaData and UnbatchedTensor, and of types registered with
            `register_type` (dataclasses, tensorclasses, ...) or `register_stdlib_types`
            (`datetime`, `deque`, ...). Or a `WireBatch`, whose chosen columns and rows are sent on
            as a TensorDict with its `meta`. Its narrow columns stay narrow, whatever `narrow` is.
            If one of its columns is elided, repeats are looked for, whatever `elide` is.
        out: Write the message as one blob to the start of this memory: a bytearray, numpy array,
            shared memory or CPU tensor (pinned or not), writable and contiguous. What comes after
            the blob is kept. Or a function that is called once with the size of the blob, and
            returns such memory.
        narrow: Store integer tensors in the fewest bytes per cell that hold their values, 1 to 4,
            and those of 0 and 1 as bits; larger numbers stay as they are. The writer reads each
            cell twice, and the reader copies it. True is for all of them; a list of names for
            columns of every TensorDict and `BatchedDataDict` in `obj`. Name a column of a nested
            batch by a tuple: ``("extra", "ids")``. The name of a nested batch is for all of its
            columns. A batch of more than 2^24 rows needs one byte of payload per row. If narrowing
            leaves fewer, nothing is narrowed.
        elide: Send once what tensors and rows of objects repeat: rows that are equal or begin
            alike, as those of one prompt do; columns of one memory or of equal cells; rows that are
            the beginning of the longest row, as masks and positions are; columns whose rows are the
            rows of two others, joined. Everything is compared cell by cell. What would not make the
            message smaller is sent as it is. Rows that hold the same object hold one object again
            after decoding. Equal but distinct objects are found only from 1 KiB on. Arrays and
            tensors in rows arrive as one for each row.
        checksum: Add a CRC-32 of the header and of every buffer, which `decode` verifies.
        compress: Compress large frames that get smaller, for links slower than memory: ``"zstd"``,
            or ``("zstd", level)`` with a level from -7 (faster) to 19 (smaller); the default is 1.
            Both sides need ``pip install 'zstandard>=0.22'``; readers need no option. `narrow` and
            `elide` are decided before: where zstd finds the same, they may make a message larger.
        allow_pickle: Pickle objects of other types instead of rejecting them; other tensors are
            rejected even so. `decode` must be given the same option; only for peers that you trust
            with your process.
        default: A function, as in json, msgspec and orjson. It is called with each value of a
            type that is not in this list, but not with dict keys and set members. It returns one
            that is encoded in its place, or raises. If it returns the value itself, that is pickled
            or rejected as without it.
        meta: What belongs to the whole message, such as the step and the version of the model: a
            mapping of values without tensors and arrays. It is read as `meta` of a `WireBatch`,
            and not part of the result of `decode`. Of a `WireBatch`, it is added to its `meta`.

    Returns:
        Frames of the buffer protocol: `bytes` first, then flat memoryviews, ready for
        ``send_multipart(frames, copy=False)``. A frame aliases memory that is contiguous on the
        CPU, and keeps it alive: write to it, or call ``tensor.share_memory_()`` (as a queue of
        torch.multiprocessing does), only after the frames are sent. Buffers below 16 KiB are copied
        into frame 1. Tensors on other devices are copied to one block, for CUDA of pinned memory,
        which lives as long as one of its frames; the device is waited for once, and once more for
        each jagged tensor with holes. With `out`, the size of the blob that was written.

    Example of `out` and `default`:
        >>> memory = bytearray(1000)
        >>> size = encode([ValueError("no reward")], out=memory, default=repr)
        >>> decode(memory[:size])
        ["ValueError('no reward')"]

    Raises:
        ArgumentError: `compress` is something else, or its library is not installed; or `out` is
            too small, or overlaps a tensor. Nothing was written.
        ArgumentKeyError: `narrow` names a column that `obj` does not have, or `obj` has tensors or
            arrays, but no batch with columns.
        ArgumentTypeError: `narrow` or `meta` is of another type; or `out` is not a buffer, is
            read-only, or has gaps.
        UnsupportedTypeError: An object outside this set, named with its path:
            ``$.extra[3].lock: _thread.lock ...``; or containers nested past 100 levels.

    `decode` returns the same value: types, dtypes, shapes, layouts, bits and dict order. These are
    not kept: gradients and `requires_grad` (a Parameter arrives as a plain tensor), devices
    (tensors arrive on the CPU), holes in jagged tensors (they arrive compacted), memory-mapped
    files (their contents arrive), locks of TensorDicts, and metadata of numpy dtypes.

    Safe to call from several threads at once.
    """
    message = pending(
        obj,
        narrow=narrow,
        elide=elide,
        checksum=checksum,
        compress=compress,
        allow_pickle=allow_pickle,
        default=default,
        meta=meta,
    )
    return frames_of(message) if out is None else write_to(message, out, "encode(out)")


def pending(
    obj: Any,
    *,
    narrow: Narrow = False,
    elide: bool = False,
    checksum: bool = False,
    compress: Compress = None,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    meta: Mapping[Any, Any] | None = None,
) -> PendingMessage:
    """The message of a value before the last phase: some rows may still have to be copied."""
    level = None if compress is None else usable_level(compress)
    narrow = False if narrow is False else _narrow_columns(narrow)
    # Most calls leave these options out: one test then takes the place of three calls.
    has_options = elide is not False or checksum is not False or allow_pickle is not False
    if has_options or default is not None:
        elide, checksum = require_flag(elide, "elide"), require_flag(checksum, "checksum")
        allow_pickle = require_flag(allow_pickle, "allow_pickle")
        if default is not None:
            check_function(default, "default", "a function of one value, or None")
    if meta is not None:
        meta = mapping_of(meta, "meta", "a mapping of names to values")
    if isinstance(obj, Batch):
        storage = storage_of_batch(obj)
        if narrow is not True and storage.narrow:
            named = narrow if isinstance(narrow, frozenset) else frozenset()
            narrow = named.union(storage.narrow)
        meta = {**source_in(obj).meta(), **(meta or {})} or None
        elide = elide or storage.elided
        obj = to_send(obj)
    values = [] if meta is None else [_document_of_meta(meta, allow_pickle, default)]
    lowering = Lowering(allow_pickle, default, narrow)
    tree = lowering.lower(obj)
    if narrow and isinstance(narrow, frozenset):
        _check_narrow_names(narrow, lowering.columns, tree)
    message = message_of(lowering.finish(tree, values), narrows=bool(narrow), elides=elide)
    if level is not None:
        message = compressed(message, level, is_accepted)
    if checksum:
        frames = written_buffers(message)
        header = with_checksums(message.header, [zlib.crc32(frame.data) for frame in frames])
        message = PendingMessage(header, [*frames], message.sources())
    return message


def _narrow_columns(narrow: Any) -> bool | frozenset[Name]:
    """The option `narrow`, with each name as a tuple."""
    if isinstance(narrow, (bool, np.bool_)):
        return bool(narrow)
    expected = "True, False, or a list of names (in a nested batch: tuples of names)"
    if not isinstance(narrow, Collection) or isinstance(narrow, (str, bytes, Mapping)):
        detail = f"expected {expected}, found {describe(narrow)}"
        raise ArgumentTypeError("bad_type", "narrow", detail)
    names: set[Name] = set()
    for name in items_of(narrow, "narrow", expected):
        path = name if type(name) is tuple else (name,)
        if not path or not all(isinstance(part, str) for part in path):
            detail = f"expected {expected}, found {brief(name)}"
            raise ArgumentTypeError("bad_type", "narrow", detail)
        names.add(path)
    return frozenset(names)


def _check_narrow_names(narrow: Iterable[Name], columns: Collection[Name], tree: Tree) -> None:
    """Refuse names in `narrow` that no column of a lowered value has.

    A value without columns, tensors and arrays has nothing to store narrow, so any names are
    accepted: one encoder may send batches, and commands between them.
    """
    names = _names_as_given(narrow)
    if columns:
        check_known(names, _names_as_given(columns), "narrow")
    elif _has_arrays(tree):
        name = min(names, key=brief)
        detail = (
            "expected names of columns of a TensorDict or another batch, "
            f"found {brief(name)}, and no batch; pass narrow=True, or make a batch of the value"
        )
        raise ArgumentKeyError("no_such_field", f"narrow({brief(name)})", detail)


def _has_arrays(tree: Tree) -> bool:
    """Whether a tree has a node of a tensor or an array."""
    if type(tree) is not tuple or not tree:  # a node may also contain a tuple of names
        return False
    return tree[0] in _ARRAYS or any(map(_has_arrays, tree))


_ARRAYS = frozenset(
    (
        *(Code.ARRAY, Code.OBJECT_ARRAY, Code.ARRAY_ROWS, Code.TENSOR, Code.JAGGED),
        *(Code.STRIDED_NESTED, Code.SPARSE_COO, Code.TENSOR_VIEWS),
    )
)
"""The nodes of tensors and arrays."""


def _names_as_given(names: Iterable[Name]) -> list[Any]:
    """Names as callers write them: a tuple only for a column of a nested batch."""
    return [name[0] if len(name) == 1 else name for name in names]


def _document_of_meta(
    meta: dict[Any, Any], allow_pickle: bool, default: Callable[[Any], Any] | None
) -> Any:
    """The document of `meta`, which comes after all other values of a message."""
    document = Lowering(allow_pickle, default).lower(meta)
    if type(document) is tuple:
        detail = (
            "expected values without tensors, arrays and long bytes, found one; "
            "make it a column, or encode({'batch': batch, 'more': value})"
        )
        raise UnsupportedTypeError("unsupported_type", "meta", detail)
    return document


@untraced
class MsgpackEncoder:
    """`encode` as an object, where a framework wants one: it holds the options and nothing else.

    Example:
        >>> from jagcodec import MsgpackDecoder, MsgpackEncoder
        >>> MsgpackDecoder().decode(MsgpackEncoder().encode([1, (2, 3)]))
        [1, (2, 3)]
    """

    def __init__(self, **options: Unpack[EncodeOptions]) -> None:
        """Take the options of `encode`."""
        check_options(options, EncodeOptions.__annotations__, "MsgpackEncoder")
        self._options = options

    def encode(self, obj: Any) -> list[Frame]:
        """See `encode`."""
        return encode(obj, **self._options)
