"""The wire's constants: magic, version, kinds, dtypes, limits.

Everything a reader in another language needs to know by number or by name is here;
`docs/wire-format.md` explains it.
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

MAGIC = "jagcodec"  # the first key of the header map; its value is the version
VERSION = 1
BLOB_MAGIC = b"jagcodec"  # begins a message in one buffer; a header frame begins with another byte

# Layout. Small buffers share frame 1, because copying them costs less than a frame each; there they
# start at multiples of `memory.ALIGNMENT`.
SMALL_BUFFER = 16 * 1024  # bytes from which on a buffer has a frame of its own
INLINE_BYTES = 4 * 1024  # from which on `bytes` are a buffer, so that a header stays small
LONG_LIST = 64  # from this length on, documents hold a list of numbers of one type as bytes

# Levels. Writers reject more containers; readers accept what a value makes inside itself on top.
MAX_DEPTH = 100
MAX_LEVELS = MAX_DEPTH + 4
MAX_STACKS = 8  # lazy stacks in lazy stacks: tensordict's work doubles with every level
MAX_NDIM = 64  # numpy's limit since 2.0, above what torch's kernels accept

# The frames of a message have fewer bytes than these; so would a value without cells if its dims of
# 0 were 1. No machine has that many bytes, so a column is never rejected just for having no cells.
MAX_BYTES = 1 << 56

# Batch sizes may count this many rows without a byte of payload to show for them (a `NonTensorData`
# of N rows holds one value). More rows need a byte of payload each.
MAX_UNBACKED_ROWS = 1 << 24

# Keys of a dict or set that collide make a table of n keys cost n squared, and numbers hash
# predictably in Python. So keys that share a hash are bounded, and so are the steps that each key
# needs on average while a table of more than a few keys is built.
MAX_EQUAL_HASHES = 64
MOST_PROBES = 100
FEW_KEYS = 1024

# How far back zstd may refer in a frame that is not a single segment. RFC 8878 asks every reader to
# support this distance.
MAX_WINDOW = 1 << 23


class Kind(IntEnum):
    """The kinds of schema nodes and document records. As extension codes, 1 to 5 stay
    unused: vLLM's and TransferQueue's decoders unpickle those.
    """

    VALUE = 0  # nil in a schema: the next of the values
    SCHEMA = 16
    # Python values
    BIG_INT = 17
    TUPLE = 19
    SET = 20
    FROZENSET = 21
    DICT = 22
    BYTES = 25
    LIST = 26
    MAP = 27
    NUMBERS = 28
    # numpy
    ARRAY = 32
    OBJECT_ARRAY = 33
    SCALAR = 36
    # torch
    TENSOR = 48
    JAGGED = 49
    STRIDED_NESTED = 50
    SPARSE_COO = 51
    TENSOR_VIEWS = 56
    # tensordict
    TENSORDICT = 64
    LAZY_STACK = 65
    NON_TENSOR_DATA = 66
    NON_TENSOR_ROWS = 67
    NON_TENSOR_STACK = 68
    ARRAY_ROWS = 69
    # the user's
    USER = 80
    PICKLE = 81


Code: Any = SimpleNamespace(**{kind.name: int(kind) for kind in Kind})
"""Kinds as plain integers: a schema is looked up by its hash, and to hash a member of an enum is a
call of Python."""

COLUMN_KINDS = frozenset(
    (
        *(Code.TENSOR, Code.JAGGED, Code.STRIDED_NESTED, Code.SPARSE_COO),
        *(Code.TENSORDICT, Code.LAZY_STACK, Code.USER),
        *(Code.NON_TENSOR_DATA, Code.NON_TENSOR_ROWS, Code.NON_TENSOR_STACK, Code.ARRAY_ROWS),
    )
)
"""The kinds that a column of a TensorDict may have."""


TORCH_ITEMSIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    **{f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)},
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
}
"""Name on the wire (PyTorch's own) to bytes per element: the one dtype table."""

INTEGER_DTYPES = frozenset(
    ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
)
"""Dtypes whose elements may be stored narrower than they are."""

ARRAY_DTYPES = frozenset(
    (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
)
"""Dtypes that arrays in rows may have: those of numpy's and torch's that are the same."""

# What an ARRAY_ROWS stands for: a column of a TensorDict, an object array (N,), or a list.
IN_STACK, IN_ARRAY, IN_LIST = range(3)

# Storage codes of elements: as wide as their dtype; one bit each, the lowest first; `narrow_code`.
PLAIN, BITS = 0, 1

# The storage code of an indirect column is INDIRECT plus the number of its runs. At its place is a
# table with RUN_NUMBERS for each run. If a run has no index, all of its rows begin at cell 0. With
# ONE_OBJECT, rows of documents that begin at the same byte are one object.
INDIRECT = 64
MOST_RUNS = 8
ONE_OBJECT = 129
RUN_NUMBERS = (
    *("group", "buffer", "offset", "stored", "cells"),
    *("index_buffer", "index_offset", "index_stored"),
)
NO_INDEX = -1

# The names of types whose states readers look into, because they are batches or columns.
ORDERED_DICT = "collections.OrderedDict"
BATCHED_DATA_DICT = "jagcodec.BatchedDataDict"
PACKED_COLUMN = "jagcodec.PackedColumn"

BLOBS = 256  # added to the storage code of rows of documents if each row is a separate message

# How many bytes of memory a message may ask for per byte of its own, whatever the limits: one bit
# may become an int64, and a byte of documents, offsets or shapes counts as this many.
EXPANSION = 64
ROW_COST = 32  # bytes that a row counts as in each run of an indirect column
ARRAY_COST = 8  # bytes of documents that an array in a row counts as


def narrow_code(width: int, signed: bool) -> int:
    """The storage code of integers in `width` bytes each, little-endian."""
    return (0x20 if signed else 0x10) + width


def is_widened_on_read(code: Any) -> Any:
    """Whether a reader must widen elements of a storage code, which take fewer bytes than others.

    For an array of codes, the result is an array.
    """
    return code != PLAIN


STORED_WIDTHS: dict[int, tuple[int, bool]] = {
    narrow_code(width, signed): (width, signed) for width in range(1, 5) for signed in (False, True)
}
"""The codes of `narrow_code`, taken apart: bytes per element, and whether there is a sign."""
