"""Messages made by hand, with msgpack alone: good ones that `encode` never writes, and bad ones.

`test_golden.py` writes them to `golden/good.json` and `golden/bad.json`, for readers in any
language.
"""

import struct
import zlib

import msgpack

from tests.wire import spec_reader

KINDS = {name: code for code, name in spec_reader.KINDS.items()}


def ext(kind, *fields):
    """A record of a kind, by its name or its code."""
    return msgpack.ExtType(KINDS.get(kind, kind), msgpack.packb(list(fields)))


def i8(*cells):
    return struct.pack(f"<{len(cells)}q", *cells)


def header(value, sizes=(), ragged=(), **changes):
    """Frame 0 around a tree: a value, or packed bytes."""
    fields = {"jagcodec": 1, "buffers": list(sizes), "ragged": list(ragged)}
    fields.update(changes)
    packed = value if isinstance(value, bytes) else msgpack.packb(value)
    fields["tree"] = fields.pop("tree", msgpack.ExtType(16, packed))
    return msgpack.packb(fields)


def message(value, *payload, ragged=(), **changes):
    """Frames around a tree."""
    return [header(value, map(len, payload), ragged, **changes), *payload]


def blob(frames, version=1, zero=0, size=None):
    """Frames in one buffer."""
    out = bytearray(
        struct.pack("<8sIIQ", b"jagcodec", version, zero, len(frames[0]) if size is None else size)
    )
    out += frames[0]
    for frame in frames[1:]:
        out += bytes(-len(out) % 64) + frame
    return bytes(out)


# Offsets of two rows of 2 and 3 cells, and cells behind them.
PAYLOAD = i8(0, 2, 5) + bytes(range(40))
ROWS = [0, 0, 2, 2, 3]
CELLS = ["uint8", [5], 0, 24]


def tensor(dtype="uint8", shape=(1,), buffer=0, offset=24):
    return ext("TENSOR", dtype, list(shape), buffer, offset)


def jagged(group=0, dim=1, cells=5, dtype="uint8"):
    return ext("JAGGED", dtype, [cells], 0, 24, group, dim)


def batch(leaf, rows=2):
    """A TensorDict of one column."""
    return ext("TENSORDICT", [rows], None, ["a", leaf])


def nested(levels):
    tree = b"\x01"
    for _ in range(levels):
        tree = msgpack.packb(msgpack.ExtType(KINDS["TUPLE"], b"\x91\x91" + tree))
    return tree


def colliding_keys():
    # Multiples of the modulus of Python's hash of integers: all have hash 0.
    values = [i * ((1 << 61) - 1) for i in range(1, 100)]
    packed = [ext("BIG_INT", value.to_bytes(10, "little")) for value in values]
    return [part for key in packed for part in (key, None)]


def struct_of(size, *fields):
    return ["struct", size, False, [list(field) for field in fields]]


def crc(*parts):
    return [zlib.crc32(part) for part in parts]


# name -> (why, frames, or bytes for a message in one buffer)
GOOD = {
    "longer_integers": (
        "integers in more bytes than needed",
        message(b"\x92\xcc\x01\xd3" + bytes(8)),
    ),
    "longer_lengths": (
        "str, array and map with a 32-bit length",
        message(b"\xdd\0\0\0\2\xdb\0\0\0\1a\xdf\0\0\0\1\xda\0\1b\xc0"),
    ),
    "longer_extension": (
        "an extension with a 32-bit length",
        message(b"\xc9\0\0\0\3\x13\x91\x91\1"),
    ),
    "float32": ("a msgpack float32", message(b"\xca\x3f\xc0\0\0")),
    "big_int_in_64_bits": (
        "a BIG_INT that would have fitted, with sign bytes to spare",
        message([ext("BIG_INT", b"\xff\xff\xff"), ext("BIG_INT", b"\5\0")]),
    ),
    "empty_payload_frame": ("a frame 1 of no bytes", message(None, b"")),
    "unused_bytes": (
        "bytes between and behind the values that are not zero",
        message(tensor(offset=3), b"\xff\xff\xff\x07\xff"),
    ),
    "overlap": (
        "two values in the same bytes, at odd offsets",
        message([tensor("int16", [2], 0, 1), tensor("int16", [2], 0, 3)], bytes(range(9))),
    ),
    "no_cells_anywhere": (
        "a value of no bytes, wherever it says that it lies",
        message({"a": tensor("int64", [0], 7, 99), "b": tensor(["int64", "u1"], [0], 7, 9)}),
    ),
    "unused_bits": (
        "bits behind the last cell that are not zero",
        message(tensor(["int64", "bits"], [3], 0, 0), b"\xfd"),
    ),
    "bool_of_any_bits": (
        "a bool cell that is neither 0 nor 1 keeps its bits",
        message(ext("ARRAY", "|u1", [1], 0, 0), b"\x02"),
    ),
    "narrow_widths": (
        "every stored width, with and without a sign",
        message(
            [tensor(["int64", f"{s}{w}"], [1], 0, 0) for s in "ui" for w in range(1, 8)],
            bytes([1, 2, 3, 4, 5, 6, 0x87]) * 8,
        ),
    ),
    "group_of_no_rows": (
        "a group of no rows: one offset, min and max 0",
        message(jagged(cells=0), i8(0), ragged=[[0, 0, 0, 0, 0]]),
    ),
    "group_of_empty_rows": (
        "rows without cells",
        message(jagged(cells=0), i8(0, 0, 0), ragged=[[0, 0, 2, 0, 0]]),
    ),
    "jagged": ("rows 0 1 and 2 3 4", message(jagged(), PAYLOAD, ragged=[ROWS])),
    "jagged_inner_dim": (
        "a ragged dim of 2: row i is columns of the values",
        message(ext("JAGGED", "uint8", [2, 5], 0, 24, 0, 2), PAYLOAD, ragged=[ROWS]),
    ),
    "views_overlap": (
        "views may overlap, repeat and be empty",
        message(ext("TENSOR_VIEWS", [0, 1, 1], [2, 3, 1], "uint8", [3, 2], 0, 24), PAYLOAD),
    ),
    "set_in_any_order": (
        "a reader need not check the order of members",
        message(ext("SET", [3, 1, 2])),
    ),
    "nested_100_deep": ("100 extensions in each other", message(nested(100))),
    "checksums": (
        "CRC-32 of the tree, frame 1 and frame 2",
        message(b"\x01", b"one", b"two", checksums=crc(b"\x01", b"one", b"two")),
    ),
    "blob": ("in one buffer", blob(message(tensor(offset=0), b"\x07"))),
    "blob_without_payload": ("in one buffer that ends with the header", blob(message(7))),
    "blob_in_a_page": (
        "bytes behind the end",
        blob(message(tensor(offset=0), b"\x07")) + b"\xff" * 40,
    ),
    "header_alone": ("one buffer that is no blob is frame 0", header(7)),
    "negative_size": ("torch.Size may hold negative numbers", message(ext("SIZE", [-1, 2]))),
    "rows_without_payload": (
        "2^24 rows with nothing to show for them",
        message(ext("NON_TENSOR_DATA", [1 << 24], "x")),
    ),
    "batch": ("a TensorDict", message(batch(jagged()), PAYLOAD, ragged=[ROWS])),
}

# name -> (reason, why, frames, or bytes for a message in one buffer)
BAD = {
    "no_frames": ("no_message", "no frame at all", []),
    "empty_frame": ("foreign", "a frame of no bytes", [b""]),
    "other_map": ("foreign", "another map", [msgpack.packb({"a": 1})]),
    "a_pickle": ("foreign", "a pickle", [b"\x80\x04\x95\x03\0\0\0\0\0\0\0K\x01."]),
    "array_for_map": (
        "foreign",
        "an array that begins with the magic",
        [msgpack.packb(["jagcodec", 1, 2, 3])],
    ),
    "cut_preamble": ("foreign", "a blob of fewer than 24 bytes", blob(message(1))[:20]),
    "version_2": ("unknown_version", "a version to come", message(1, jagcodec=2)),
    "version_true": ("unknown_version", "a version that is no integer", message(1, jagcodec=True)),
    "blob_version_2": ("unknown_version", "in the preamble", blob(message(1), version=2)),
    "blob_not_zero": ("bad_header", "bytes 12 to 15 of the preamble", blob(message(1), zero=1)),
    "blob_huge_header": ("bad_header", "a header above 2^33", blob(message(1), size=2**33 + 1)),
    "blob_cut_header": ("frame_size", "a header that is not all there", blob(message(1))[:-1]),
    "blob_cut_payload": (
        "frame_size",
        "a payload that is not all there",
        blob(message(tensor(offset=0), b"\7\7"))[:-1],
    ),
    "cut_header": ("bad_header", "a header cut short", [header(1)[:-1]]),
    "bytes_behind_header": ("bad_header", "a byte behind the map", [header(1) + b"\0"]),
    "other_keys": ("bad_header", "a key too many", message(1, more=1)),
    "keys_out_of_order": (
        "bad_header",
        "ragged before buffers",
        [
            msgpack.packb(
                {"jagcodec": 1, "ragged": [], "buffers": [], "tree": msgpack.ExtType(16, b"\1")}
            )
        ],
    ),
    "header_key_twice": (
        "bad_header",
        "a header with its tree twice",
        [b"\x85" + header(1)[1:] + b"\xa4tree" + msgpack.packb(msgpack.ExtType(16, b"\2"))],
    ),
    "sizes_negative": ("bad_header", "a buffer of -1 bytes", message(1, buffers=[-1])),
    "sizes_overflow": ("bad_header", "buffers of 3 x 2^62 bytes", message(1, buffers=[2**62] * 3)),
    "sizes_true": ("bad_header", "a size that is no integer", message(1, b"1", buffers=[True])),
    "group_short": ("bad_header", "a group of 3 numbers", message(1, ragged=[[0, 0, 2]])),
    "tree_is_int": ("bad_header", "a tree that is no extension", message(1, tree=5)),
    "tree_code": (
        "bad_header",
        "a tree of another code",
        message(1, tree=msgpack.ExtType(17, b"\1")),
    ),
    "tree_reserved": ("bad_header", "msgpack's byte c1", message(b"\xc1")),
    "tree_two": ("bad_header", "two objects in the tree", message(b"\1\1")),
    "tree_empty": ("bad_header", "no object in the tree", message(b"")),
    "tree_utf8": ("bad_header", "a string that is no UTF-8", message(b"\xa1\xff")),
    "tree_count": (
        "bad_header",
        "an array that claims 2^32 - 1 items",
        message(b"\xdd" + b"\xff" * 4),
    ),
    "map_key": ("bad_header", "a map with a key that is an integer", message(b"\x81\1\1")),
    "checksum_count": (
        "bad_header",
        "one checksum for tree and frame 1",
        message(b"\1", b"x", checksums=crc(b"\1")),
    ),
    "checksum_nil": ("bad_header", "nil for the checksums", message(1, checksums=None)),
    "checksum_tree": ("bad_checksum", "of the tree", message(b"\1", checksums=[0])),
    "checksum_frame": (
        "bad_checksum",
        "of frame 1",
        message(b"\1", b"x", checksums=crc(b"\1", b"y")),
    ),
    "frames_too_few": ("frame_count", "a frame is missing", message(1, buffers=[1])),
    "frames_too_many": ("frame_count", "a frame that nobody named", [*message(1), b"x"]),
    "frame_cut": ("frame_size", "a frame of 1 byte instead of 2", message(1, b"x", buffers=[2])),
    "frame_long": ("frame_size", "a frame of 2 bytes instead of 1", message(1, b"xx", buffers=[1])),
    "kind_1": (
        "unknown_kind",
        "an extension that others unpickle",
        message(msgpack.ExtType(1, b"\1")),
    ),
    "kind_timestamp": ("unknown_kind", "msgpack's timestamp", message(msgpack.Timestamp(5))),
    "kind_timestamp_long": (
        "unknown_kind",
        "msgpack's timestamp, with a length of its own",
        message(b"\xc7\4\xff\0\0\0\5"),
    ),
    "kind_tree": ("unknown_kind", "a tree in the tree", message(msgpack.ExtType(16, b"\1"))),
    "kind_127": ("unknown_kind", "a code to come", message(msgpack.ExtType(127, b"\1"))),
    "dtype": ("unknown_dtype", "a torch dtype to come", message(tensor("float33"), PAYLOAD)),
    "dtype_wider": (
        "unknown_dtype",
        "int16 in 2 bytes is not narrow",
        message(tensor(["int16", "i2"]), PAYLOAD),
    ),
    "dtype_sign": (
        "unknown_dtype",
        "uint16 with a sign",
        message(tensor(["uint16", "i1"]), PAYLOAD),
    ),
    "dtype_float_bits": (
        "unknown_dtype",
        "floats as bits",
        message(tensor(["float32", "bits"]), PAYLOAD),
    ),
    "dtype_numpy": (
        "unknown_dtype",
        "a numpy dtype",
        message(ext("ARRAY", "<i3", [1], 0, 0), PAYLOAD),
    ),
    "dtype_objects": (
        "unknown_dtype",
        "objects in an ARRAY",
        message(ext("ARRAY", "|O", [1], 0, 0), PAYLOAD),
    ),
    "fields_short": (
        "bad_record",
        "three fields of a TENSOR",
        message(ext("TENSOR", "uint8", [1], 0), PAYLOAD),
    ),
    "fields_map": (
        "bad_record",
        "a map for the fields",
        message(msgpack.ExtType(48, msgpack.packb({"dtype": "uint8"})), PAYLOAD),
    ),
    "dim_negative": ("bad_record", "a dim of -1", message(tensor(shape=[-1]), PAYLOAD)),
    "dim_true": ("bad_record", "a dim that is a bool", message(tensor(shape=[True]), PAYLOAD)),
    "dims_65": ("bad_record", "65 dims", message(tensor(shape=[1] * 65), PAYLOAD)),
    "cells_overflow": ("bad_record", "2^124 cells", message(tensor(shape=[2**62] * 2), PAYLOAD)),
    "cells_overflow_zero": (
        "bad_record",
        "2^124 cells, but for a dim of 0",
        message(tensor(shape=[0, 2**62, 2**62]), PAYLOAD),
    ),
    "offset_negative": ("bad_record", "a byte offset of -1", message(tensor(offset=-1), PAYLOAD)),
    "group_unknown": (
        "bad_record",
        "a group that is not there",
        message(jagged(1), PAYLOAD, ragged=[ROWS]),
    ),
    "ragged_dim_0": (
        "bad_record",
        "a ragged dim of 0",
        message(jagged(dim=0), PAYLOAD, ragged=[ROWS]),
    ),
    "ragged_dim_2": (
        "bad_record",
        "a ragged dim past the values",
        message(jagged(dim=2), PAYLOAD, ragged=[ROWS]),
    ),
    "items_for_cells": (
        "bad_record",
        "2^40 cells and no items",
        message(ext("OBJECT_ARRAY", [2**40], [])),
    ),
    "scalar_size": ("bad_record", "3 bytes of a <i4", message(ext("SCALAR", "<i4", b"123"))),
    "big_int_empty": ("bad_record", "a BIG_INT of no bytes", message(ext("BIG_INT", b""))),
    "complex_int": ("bad_record", "an integer for a float", message(ext("COMPLEX", 1, 2.0))),
    "range_step": ("bad_record", "a step of 0", message(ext("RANGE", 0, 1, 0))),
    "dict_odd": ("bad_record", "a key without a value", message(ext("DICT", [1]))),
    "key_twice": (
        "bad_record",
        "a TensorDict with a key twice",
        message(ext("TENSORDICT", [1], None, ["a", tensor(), "a", tensor()]), PAYLOAD),
    ),
    "names_count": (
        "bad_record",
        "two names for one dim",
        message(ext("TENSORDICT", [1], ["a", "b"], [])),
    ),
    "names_twice": (
        "bad_record",
        "one name for two dims",
        message(ext("TENSORDICT", [1, 1], ["a", "a"], [])),
    ),
    "layout": (
        "bad_record",
        "a layout to come",
        message(ext("SPARSE_COMPRESSED", "strided", [1], None, None, None)),
    ),
    "views_narrow": (
        "bad_record",
        "views of narrow cells",
        message(ext("TENSOR_VIEWS", [0], [1], ["int64", "u1"], [1], 0, 24), PAYLOAD),
    ),
    "cells_outside": ("out_of_bounds", "one cell too many", message(tensor(shape=[41]), PAYLOAD)),
    "offset_outside": ("out_of_bounds", "behind the frame", message(tensor(offset=64), PAYLOAD)),
    "buffer_unknown": (
        "out_of_bounds",
        "a buffer that is not there",
        message(tensor(buffer=1), PAYLOAD),
    ),
    "bytes_outside": (
        "out_of_bounds",
        "BYTES past the frame",
        message(ext("BYTES", 2**40, 0, 0), PAYLOAD),
    ),
    "offset_overflow": (
        "out_of_bounds",
        "offset + size above 2^63",
        message(tensor("int64", [2**60 - 1], 0, 2**63 - 1), PAYLOAD),
    ),
    "group_outside": (
        "out_of_bounds",
        "2^60 rows",
        message(1, PAYLOAD, ragged=[[0, 0, 2**60, 0, 0]]),
    ),
    "groups_overlap": (
        "out_of_bounds",
        "groups of more bytes than the payload",
        message(1, PAYLOAD, ragged=[ROWS] * 3),
    ),
    "copies_overlap": (
        "out_of_bounds",
        "narrow cells of more bytes than the payload",
        message([tensor(["int64", "u1"], [2], 0, 0)] * 2, b"\1\2\3"),
    ),
    "view_outside": (
        "out_of_bounds",
        "a view past the rows",
        message(ext("TENSOR_VIEWS", [0], [4], "uint8", [3], 0, 24), PAYLOAD),
    ),
    "view_backwards": (
        "out_of_bounds",
        "a view that ends before it starts",
        message(ext("TENSOR_VIEWS", [2], [1], "uint8", [3], 0, 24), PAYLOAD),
    ),
    "struct_field_outside": (
        "out_of_bounds",
        "a field past its struct",
        message(ext("ARRAY", struct_of(4, ("a", None, 2, "<i4")), [1], 0, 0), PAYLOAD),
    ),
    "field_array_size": (
        "out_of_bounds",
        "cells of 1 GiB that no byte stands for",
        message(ext("FIELD_ARRAY", struct_of(2**30, ("a", None, 0, "|O")), [1], [])),
    ),
    "offsets_start": (
        "bad_offsets",
        "offsets that start at 1",
        message(jagged(), i8(1, 2, 5) + bytes(5), ragged=[ROWS]),
    ),
    "offsets_fall": (
        "bad_offsets",
        "offsets that fall",
        message(jagged(), i8(0, 6, 5) + bytes(5), ragged=[ROWS]),
    ),
    "offsets_end": (
        "bad_offsets",
        "offsets that end elsewhere than the values",
        message(jagged(cells=4), PAYLOAD, ragged=[ROWS]),
    ),
    "offsets_min": (
        "bad_offsets",
        "a min that is not theirs",
        message(jagged(), PAYLOAD, ragged=[[0, 0, 2, 1, 3]]),
    ),
    "offsets_max": (
        "bad_offsets",
        "a max that is not theirs",
        message(jagged(), PAYLOAD, ragged=[[0, 0, 2, 2, 4]]),
    ),
    "min_above_max": (
        "bad_offsets",
        "min above max, in a group that nobody uses",
        message(1, PAYLOAD, ragged=[[0, 0, 2, 3, 2]]),
    ),
    "nested_cells": (
        "bad_offsets",
        "component sizes that do not add up",
        message(
            ext("STRIDED_NESTED", tensor("int64", [1, 1], 0, 8), tensor("uint8", [3])), PAYLOAD
        ),
    ),
    "sparse_index": (
        "bad_sparse",
        "an index of 2 in a dim of 1",
        message(ext("SPARSE_COO", [1], tensor("int64", [1, 1], 0, 8), tensor(), False), PAYLOAD),
    ),
    "sparse_order": (
        "bad_sparse",
        "coalesced, and an index twice",
        message(
            ext(
                "SPARSE_COO", [3], tensor("int64", [1, 2], 0, 0), tensor(shape=[2], offset=16), True
            ),
            i8(1, 1) + b"\1\2",
        ),
    ),
    "rows_unbacked": (
        "bad_rows",
        "10^9 rows of nothing",
        message(ext("NON_TENSOR_DATA", [10**9], "x")),
    ),
    "batch_unbacked": (
        "bad_rows",
        "a TensorDict of 10^9 rows",
        message(ext("TENSORDICT", [10**9], None, [])),
    ),
    "dict_twice": ("bad_value", "a key twice", message(ext("DICT", [1, 2, 1, 3]))),
    "dict_list": ("bad_value", "a list for a key", message(ext("DICT", [[], 2]))),
    "set_twice": ("bad_value", "a member twice", message(ext("SET", [1, 1]))),
    "keys_collide": (
        "bad_value",
        "99 keys of one hash, as Python hashes integers",
        message(ext("DICT", colliding_keys())),
    ),
    "device": (
        "bad_value",
        "a type of device that torch has not",
        message(ext("DEVICE", "gpu", 0)),
    ),
    "device_number": ("bad_record", "device 128", message(ext("DEVICE", "cuda", 128))),
    "code_point": (
        "bad_value",
        "a cell of <U1 above 10ffff",
        message(ext("ARRAY", "<U1", [1], 0, 0), b"\0\0\x11\0"),
    ),
    "leaf": ("bad_value", "an integer for a leaf", message(batch(5))),
    "leaf_rows": ("bad_value", "a leaf of another batch size", message(batch(tensor()), PAYLOAD)),
    "jagged_rows": (
        "bad_value",
        "a jagged leaf of another batch size",
        message(batch(jagged(), 3), PAYLOAD, ragged=[ROWS]),
    ),
    "stack_of_ints": (
        "bad_value",
        "no TensorDict to stack",
        message(ext("LAZY_STACK", 0, None, [1])),
    ),
    "too_deep": ("too_deep", "105 extensions in each other", message(nested(105))),
    "user": ("unknown_type", "a type of the user's", message(ext("USER", "no.such.Type", [1]))),
    "pickle": (
        "pickle_refused",
        "a pickle that its reader did not ask for",
        message(ext("PICKLE", b"\x80\x04K\x01.")),
    ),
    "batch_cells_outside": (
        "out_of_bounds",
        "a column past its frame",
        message(batch(tensor(shape=[2], offset=63)), PAYLOAD),
    ),
}

MAY_ACCEPT = {
    # They ask for what only Python or torch can know.
    "keys_collide",
    "device",
}
