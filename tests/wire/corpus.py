"""Messages made by hand, with msgpack alone: good ones that `encode` never writes, and bad ones.

`test_golden.py` writes them to `golden/good.json` and `golden/bad.json`, for readers in any
language.
"""

import msgpack

from tests.wire import corpus_indirect
from tests.wire.forge import (
    Part,
    RowMessage,
    Rows,
    array,
    blob,
    blob_row,
    compressed,
    header,
    int64s,
    jagged,
    list_of,
    map_of,
    message,
    message_of,
    message_of_rows,
    node,
    object_array,
    record,
    row_message,
    rows_node,
    rows_of,
    sparse_coo,
    strided_nested,
    tag,
    tensor,
    tensor_views,
    tensordict,
    user,
    zstd,
)

# Offsets of two rows of 2 and 3 cells, and cells behind them.
PAYLOAD = int64s(0, 2, 5) + bytes(range(40))
GROUP = [0, 0, 2, 2, 3]


def batch(leaf, rows=2):
    """A TensorDict of one column."""
    return tensordict([rows], {"a": leaf})


def jagged_batch(**changes):
    changes = {"groups": [GROUP], **changes}
    return message(batch(jagged()), PAYLOAD, **changes)


def sparse(indices, values, coalesced=0, shape=(3,)):
    return sparse_coo(indices, values, coalesced, shape)


def views(*bounds, shape=(3, 2)):
    """Views of a tensor of bytes that lie behind their bounds."""
    rows = int64s(*(number for start_end in bounds for number in start_end))
    cells = bytes(range(shape[0] * (shape[1] if len(shape) > 1 else 1)))
    return message(tensor_views(len(bounds), shape, (0, len(rows))), rows + cells)


def components_of(shapes, cells, rank=1, components=None):
    """Components of bytes that lie behind their shapes."""
    components = len(shapes) if components is None else components
    sizes = int64s(*(dim for shape in shapes for dim in shape or [1]))
    nested = strided_nested(cells, components, rank, (0, len(sizes)))
    return message(nested, sizes + bytes(range(cells)))


def nodes_inside(levels, leaf=None):
    """A schema of tuples in each other, `levels` of them."""
    part = tensor(shape=(0,)) if leaf is None else leaf
    for _ in range(levels):
        part = node("TUPLE", children=[part])
    return part


def documents_inside(levels, value=1):
    for _ in range(levels):
        value = record("TUPLE", value)
    return value


def rows_inside(levels, kind="OBJECT_ARRAY"):
    """Messages in rows of each other."""
    frames = message(1)
    for _ in range(levels):
        frames = message_of_rows(row_message(frames), kind=kind)
    return frames


def stacks_inside(levels, kind="LAZY_STACK"):
    part = (
        tensordict([1], {})
        if kind == "LAZY_STACK"
        else node("NON_TENSOR_DATA", 1, numbers=[1], children=["x"])
    )
    for _ in range(levels):
        part = node(kind, 0, children=[part])
    return part


def colliding_keys():
    # Multiples of the modulus of Python's hash of integers: all have hash 0.
    values = [i * ((1 << 61) - 1) for i in range(1, 100)]
    return [record("BIG_INT", value.to_bytes(10, "little")) for value in values]


def pairs(keys):
    return [part for key in keys for part in (key, None)]


# A batch whose message lies in a row, between a document and a document.
INNER = message(tensor(shape=[3]), b"\1\2\3")

# A frame of 100 bytes 07: what is stored of it.
RUN = zstd((b"\7", 100), size=100)
CHECKSUM = bytes.fromhex("45839bdd")  # of zstd: the low half of the XXH64


def of_sevens(sent, **changes):
    """A tensor of 100 bytes 07, whose frame is stored as `sent`."""
    return compressed(tensor(shape=[100]), [100], sent, **changes)


def bomb(size):
    """A tensor of `size` bytes in one frame of zstd."""
    runs = zstd(*[(b"\0", 1 << 17)] * (size >> 17), size=size)
    return compressed(tensor(shape=[size]), [size], runs)


# name -> (why, frames, or bytes for a message in one buffer)
GOOD = {
    "longer_integers": (
        "integers in more bytes than needed",
        message(None, values=b"\x91\x92\xcc\x01\xd3" + bytes(8)),
    ),
    "longer_lengths": (
        "str, array and map with a 32-bit length",
        message(None, values=b"\xdd\0\0\0\1\xdd\0\0\0\2\xdb\0\0\0\1a\xdf\0\0\0\1\xda\0\1b\xc0"),
    ),
    "longer_tag": (
        "a tag with a 32-bit length",
        message(None, values=b"\x91\x92\xc9\0\0\0\0\x13\1"),
    ),
    "longer_schema": (
        "a schema in more bytes than needed",
        message(tensor(), b"\7", schema=b"\xdd\0\0\0\3\xcd\0\x30\xd9\5uint8\xcc\1"),
    ),
    "longer_header": (
        "a header whose parts have longer lengths than needed",
        [
            b"\x84\xa8jagcodec\1"
            b"\xa6schema\xc9\0\0\0\1\x10\xc0"
            b"\xa7numbers\xc6\0\0\0\x10" + bytes(16) + b"\xa6values\xc5\0\2\x91\7"
        ],
    ),
    "float32": ("a msgpack float32", message(None, values=b"\x91\xca\x3f\xc0\0\0")),
    "big_int_in_64_bits": (
        "a BIG_INT that would have fitted, with sign bytes to spare",
        message([record("BIG_INT", b"\xff\xff\xff"), record("BIG_INT", b"\5\0")]),
    ),
    "big_int_in_range": (
        "a BIG_INT wherever there is an integer",
        message(user("range", 0, record("BIG_INT", b"\5"), 1)),
    ),
    "document_as_node": (
        "a list without buffers that is a node all the same",
        message(list_of(1, node("TUPLE", children=[2]), map_of({"a": 3}))),
    ),
    "dict_as_node": (
        "a dict with a list of keys and one child per key",
        message(node("DICT", children=[[1, record("TUPLE", "a", None)], 2, tensor()]), b"\7"),
    ),
    "slice_as_node": (
        "a slice of a tensor",
        message(
            node("USER", "slice", children=[node("TUPLE", children=[None, tensor(), 1])]), b"\7"
        ),
    ),
    "empty_payload_frame": ("a frame 1 of no bytes", message(None, b"")),
    "unused_bytes": (
        "bytes between and behind the values that are not zero",
        message(tensor(offset=3), b"\xff\xff\xff\x07\xff"),
    ),
    "odd_offsets": (
        "values at offsets that are no multiple of anything",
        message(list_of(tensor("int16", [2], 0, 1), tensor("int16", [2], 0, 5)), bytes(range(9))),
    ),
    "no_cells_anywhere": (
        "a value of no bytes, wherever it says that it lies",
        message(
            list_of(
                tensor("int64", [0], 7, 99),
                tensor("int64", [0, 3], 7, 9, stored=0x11),
                array("<f4", [0], 7, 9),
                node("BYTES", numbers=[7, 9, 0]),
            )
        ),
    ),
    "no_cells_stored_anyhow": (
        "how no cells are stored says nothing",
        message(list_of(tensor("float32", [0], stored=1), tensor("int8", [0], stored=99))),
    ),
    "short_bytes": ("BYTES below 4 KiB", message(node("BYTES", numbers=[0, 1, 2]), b"\1\2\3")),
    "unused_bits": (
        "bits behind the last cell that are not zero",
        message(tensor("int64", [3], stored=1), b"\xfd"),
    ),
    "bool_of_any_bits": (
        "a bool cell that is neither 0 nor 1 keeps its bits",
        message(array("|u1"), b"\x02"),
    ),
    "narrow_widths": (
        "every stored width, with and without a sign",
        message(
            list_of(
                *(
                    tensor("int64", [1], 0, 8 * i, sign + width)
                    for i, (sign, width) in enumerate(
                        (sign, width) for sign in (16, 32) for width in range(1, 5)
                    )
                )
            ),
            bytes([0x81, 0x82, 0x83, 0x84, 5, 6, 7, 0xFF]) * 8,
        ),
    ),
    "jagged_narrow": (
        "rows 0 1 and 2 3 4, one byte each",
        message(jagged(dtype="int64", stored=0x11), PAYLOAD, groups=[GROUP]),
    ),
    "group_of_no_rows": (
        "a group of no rows has no offsets; min and max 0",
        message(jagged(shape=[0]), groups=[[0, 0, 0, 0, 0]]),
    ),
    "group_of_one_row": (
        "a group of one row has no offsets; min and max are its length",
        message(jagged(shape=[3], offset=0), b"\1\2\3", groups=[[0, 0, 1, 3, 3]]),
    ),
    "group_of_one_row_anywhere": (
        "what has no offsets may lie anywhere",
        message(jagged(shape=[3], offset=0), b"\1\2\3", groups=[[7, 99, 1, 3, 3]]),
    ),
    "group_of_empty_rows": (
        "rows without cells",
        message(jagged(shape=[0]), int64s(0, 0, 0), groups=[[0, 0, 2, 0, 0]]),
    ),
    "group_that_nobody_names": (
        "its offsets may go unread",
        message(7, bytes([255]) * 24, groups=[[0, 0, 2, 2, 3]]),
    ),
    "jagged": ("rows 0 1 and 2 3 4", message(jagged(), PAYLOAD, groups=[GROUP])),
    "jagged_inner_dim": (
        "a ragged dim of 2: row i is columns of the values",
        message(jagged(dim=2, shape=[2, 5]), PAYLOAD, groups=[GROUP]),
    ),
    "views_overlap": (
        "views may overlap, repeat and be empty",
        views((0, 2), (1, 3), (1, 3), (1, 1)),
    ),
    "views_of_narrow_cells": (
        "a base that is stored narrow: 0 1 0 1, and then 1 0 1",
        message(
            node(
                "TENSOR_VIEWS",
                children=[
                    tensor("int64", (8,), offset=32, stored=1),
                    tensor("int64", (2, 2)),
                ],
            ),
            int64s(0, 4, 3, 6) + b"\xaa",
        ),
    ),
    "nested_of_narrow_cells": (
        "cells of components that are stored narrow",
        message(
            node(
                "STRIDED_NESTED",
                1,
                children=[tensor("int64", (3,), offset=16, stored=17), tensor("int64", (2, 1))],
            ),
            int64s(1, 2) + b"\1\2\3",
        ),
    ),
    "nested_without_dims": (
        "components of no dims: one cell each",
        components_of([(), ()], 2, rank=0),
    ),
    "sparse_not_coalesced": (
        "an index twice",
        message(
            sparse(tensor("int64", [1, 2]), tensor(shape=[2], offset=16)), int64s(1, 1) + b"\1\2"
        ),
    ),
    "set_in_any_order": (
        "a reader need not check the order of members",
        message(record("SET", 3, 1, 2)),
    ),
    "nodes_100_deep": ("100 containers of nodes in each other", message(nodes_inside(100))),
    "documents_100_deep": ("100 records in each other", message(documents_inside(100))),
    "rows_50_deep": ("50 messages in rows of each other", rows_inside(50)),
    "stacks_8_deep": ("8 stacks in each other", message(stacks_inside(8))),
    "schema_strings_of_any_kind": (
        "keys with a lone surrogate, and empty",
        message(map_of({"\ud800": 1, "": 2})),
    ),
    "checksums": (
        "CRC-32 of the header, frame 1 and frame 2",
        message(1, b"one", b"two", checksum=True),
    ),
    "checksum_of_the_header_alone": ("where there is no payload", message(1, checksum=True)),
    "rows": ("one document per row", message_of_rows(1, "a", None)),
    "rows_of_records": (
        "documents that hold records",
        message_of_rows(record("TUPLE", 1), {"a": record("TUPLE")}),
    ),
    "rows_of_numbers": (
        "0 and 106 in one byte begin as a blob and its zeros do, and are numbers",
        message_of_rows(0, 106, 107),
    ),
    "one_row": ("one document needs no offsets", message_of_rows("only")),
    "no_rows": ("no documents at all", message_of_rows(kind="OBJECT_ARRAY")),
    "message_in_a_row": (
        "a tensor beside documents, which are messages too",
        message_of_rows("a", row_message(INNER), "b", kind="OBJECT_ARRAY"),
    ),
    "messages_in_rows_of_documents": (
        "messages of no tensor",
        message_of_rows(row_message(message("a")), row_message(message(None))),
    ),
    "no_rows_stored_anyhow": (
        "how no bytes of documents are stored says nothing",
        message(rows_node(0, 7, 9, stored=999), groups=[[0, 0, 0, 0, 0]]),
    ),
    "message_in_a_row_without_payload": (
        "a number in a message of its own",
        message_of_rows(row_message(message(7))),
    ),
    "message_in_a_row_with_checksums": (
        "which hold",
        message_of_rows(row_message(message(tensor(), b"\7", checksum=True))),
    ),
    "blob": ("in one buffer", blob(message(tensor(), b"\x07"))),
    "blob_without_payload": ("in one buffer that ends with the header", blob(message(7))),
    "blob_in_a_page": ("bytes behind the end", blob(message(tensor(), b"\x07")) + b"\xff" * 40),
    "header_alone": ("one buffer that is no blob is frame 0", header(7)),
    "negative_size": (
        "torch.Size may hold negative numbers",
        message(record("USER", "torch.Size", [-1, 2])),
    ),
    "rows_without_payload": (
        "2^24 rows with nothing to show for them",
        message(node("NON_TENSOR_DATA", 1, numbers=[1 << 24], children=["x"])),
    ),
    "batch": ("a TensorDict", jagged_batch()),
    "compressed": ("a frame of zstd", of_sevens(RUN)),
    "compressed_blocks": (
        "several blocks in it, and checksums of the message",
        of_sevens(zstd((b"\7", 40), b"\7", (b"\7", 59), size=100), checksum=True),
    ),
    "compressed_window": (
        "a window of 8 MiB",
        of_sevens(zstd((b"\7", 100), size=100, window=104)),
    ),
    "compressed_sizes": (
        "content sizes of 1, 2 and 8 bytes, and a frame of no bytes",
        compressed(
            list_of(*(tensor(shape=[n], buffer=i) for i, n in enumerate((100, 300, 50)))),
            [100, 300, 50, 0],
            *(zstd((b"\7", n), size=n, width=w) for n, w in ((100, 1), (300, 2), (50, 8))),
            b"",
        ),
    ),
    "compressed_own_checksum": (
        "a checksum of zstd",
        of_sevens(zstd((b"\7", 100), size=100, flags=4, behind=CHECKSUM)),
    ),
    "compressed_one_of_two": (
        "a frame that is stored as it is after one of zstd",
        compressed(
            list_of(tensor(shape=[100]), tensor(shape=[3], buffer=1)), [100, 3], RUN, b"\1\2\3"
        ),
    ),
    "compressed_as_it_is": ("stored sizes that are the sizes", of_sevens(b"\7" * 100)),
    "compressed_blob": ("in one buffer", blob(of_sevens(RUN, checksum=True))),
    "compressed_meta": (
        "with what belongs to the whole message",
        of_sevens(RUN, values=[{"step": 3}]),
    ),
    "compressed_much": ("a MiB in a few bytes", bomb(1 << 20)),
    **corpus_indirect.GOOD,
}


def of_schema(schema):
    """A message of a schema that is not a valid one, without numbers or values."""
    return message(Part(schema, [], []))


# name -> (reason, why, frames, or bytes for a message in one buffer)
BAD = {
    # frames and preambles
    "no_frames": ("no_message", "no frame at all", []),
    "empty_frame": ("foreign", "a frame of no bytes", [b""]),
    "other_map": ("foreign", "another map", [msgpack.packb({"a": 1})]),
    "a_pickle": ("foreign", "a pickle", [b"\x80\x04\x95\x03\0\0\0\0\0\0\0K\x01."]),
    "array_for_map": (
        "foreign",
        "an array that begins with the magic",
        [msgpack.packb(["jagcodec", 1, 2, 3])],
    ),
    "more_keys": ("foreign", "a map of five keys", message(1, fields={"more": 1})),
    "cut_preamble": ("foreign", "a blob of fewer than 24 bytes", blob(message(1))[:20]),
    "version_2": ("unknown_version", "a version to come", message(1, fields={"jagcodec": 2})),
    "version_true": (
        "unknown_version",
        "a version that is no integer",
        message(1, fields={"jagcodec": True}),
    ),
    "blob_version_2": ("unknown_version", "in the preamble", blob(message(1), version=2)),
    "blob_not_zero": ("bad_header", "bytes 12 to 15 of the preamble", blob(message(1), zero=1)),
    "blob_huge_header": ("bad_header", "a header above 2^33", blob(message(1), size=2**33 + 1)),
    "blob_cut_header": ("frame_size", "a header that is not all there", blob(message(1))[:-1]),
    "blob_cut_payload": (
        "frame_size",
        "a payload that is not all there",
        blob(message(tensor(shape=[2]), b"\7\7"))[:-1],
    ),
    "frames_too_few": ("frame_count", "a frame is missing", message(1, sizes=[1])),
    "frames_too_many": ("frame_count", "a frame that nobody named", [*message(1), b"x"]),
    "frame_cut": ("frame_size", "a frame of 1 byte instead of 2", message(1, b"x", sizes=[2])),
    "frame_long": ("frame_size", "a frame of 2 bytes instead of 1", message(1, b"xx", sizes=[1])),
    # the header's map
    "cut_header": ("bad_header", "a header cut short", [header(1)[:-1]]),
    "bytes_behind_header": ("bad_header", "a byte behind the map", [header(1) + b"\0"]),
    "other_key": (
        "bad_header",
        "a key of another name",
        [header(1).replace(b"\xa7numbers", b"\xa7Numbers")],
    ),
    "keys_out_of_order": (
        "bad_header",
        "values before numbers",
        [
            msgpack.packb(
                {
                    "jagcodec": 1,
                    "schema": msgpack.ExtType(16, b"\xc0"),
                    "values": b"\x91\1",
                    "numbers": bytes(16),
                }
            )
        ],
    ),
    "header_key_twice": (
        "bad_header",
        "a header with its values twice",
        [header(1).replace(b"\xa7numbers\xc4\x10" + bytes(16), b"\xa6values\xc4\2\x91\1")],
    ),
    "schema_is_int": (
        "bad_header",
        "a schema that is no extension",
        message(1, fields={"schema": 5}),
    ),
    "schema_code": (
        "bad_header",
        "a schema of another code",
        message(1, fields={"schema": msgpack.ExtType(17, b"\xc0")}),
    ),
    "numbers_are_an_array": (
        "bad_header",
        "numbers as msgpack integers",
        message(1, fields={"numbers": [0, 0]}),
    ),
    "numbers_cut": ("bad_header", "15 bytes of numbers", message(1, fields={"numbers": bytes(15)})),
    "numbers_none": ("bad_header", "no numbers at all", message(1, fields={"numbers": b""})),
    "values_are_an_array": (
        "bad_header",
        "values that are not packed",
        message(1, fields={"values": [1]}),
    ),
    # the schema
    "schema_reserved": ("bad_header", "msgpack's byte c1", message(1, schema=b"\xc1")),
    "schema_two": ("bad_header", "two objects in the schema", message(1, schema=b"\xc0\xc0")),
    "schema_empty": ("bad_header", "no object in the schema", message(1, schema=b"")),
    "schema_utf8": (
        "bad_header",
        "a name that is no UTF-8",
        message(1, schema=b"\x93\x1b\x91\xa1\xff\xc0"),
    ),
    "schema_count": (
        "bad_header",
        "an array that claims 2^32 - 1 items",
        message(1, schema=b"\xdd" + b"\xff" * 4),
    ),
    "schema_map": ("bad_record", "a map for a node", of_schema({"a": 1})),
    "schema_map_key": ("bad_header", "a map with a key that is an integer", of_schema({1: 1})),
    "schema_extension": (
        "bad_record",
        "an extension for a node",
        of_schema(msgpack.ExtType(48, b"")),
    ),
    "node_is_int": ("bad_record", "an integer for a node", of_schema(48)),
    "node_empty": ("bad_record", "a node without a kind", of_schema([])),
    "node_kind_is_str": ("bad_record", "a kind by its name", of_schema(["TENSOR", "uint8", 0])),
    "node_kind_is_true": ("bad_record", "a bool for a kind", of_schema([True])),
    "node_1": ("unknown_kind", "a code that others unpickle", of_schema([1, None])),
    "node_schema": ("unknown_kind", "a schema in the schema", of_schema([16, None])),
    "node_of_a_record": ("unknown_kind", "a record's kind for a node", of_schema([20, None])),
    "node_127": ("unknown_kind", "a code to come", of_schema([127])),
    "fields_short": ("bad_record", "one field of a TENSOR", of_schema([48, "uint8"])),
    "fields_swapped": ("unknown_dtype", "the rank before the dtype", of_schema([48, 1, "uint8"])),
    "rank_negative": ("bad_record", "a rank of -1", of_schema([48, "uint8", -1])),
    "rank_true": ("bad_record", "a rank that is a bool", of_schema([48, "uint8", True])),
    "rank_65": ("bad_record", "65 dims", message(tensor(shape=[1] * 65), PAYLOAD)),
    "child_of_a_leaf": ("bad_record", "a child of a TENSOR", of_schema([48, "uint8", 0, None])),
    "children_few": ("bad_record", "one child of SPARSE_COO", of_schema([51, 0, 0, None])),
    "children_of_keys": ("bad_record", "two keys and one child", of_schema([27, ["a", "b"], None])),
    "dict_without_keys": ("bad_record", "a DICT without its first child", of_schema([22])),
    "key_is_int": ("bad_record", "a MAP with an integer key", of_schema([27, [1], None])),
    "keys_are_a_str": ("bad_record", "a str for the keys", of_schema([27, "a", None])),
    "map_key_twice": (
        "bad_record",
        "a MAP with a key twice",
        of_schema([27, ["a", "a"], None, None]),
    ),
    "key_twice": (
        "bad_record",
        "a TensorDict with a key twice",
        of_schema([64, 0, ["a", "a"], None, None]),
    ),
    "dim_names": (
        "bad_record",
        "a TensorDict with names of its dims",
        of_schema([64, 1, ["a"], []]),
    ),
    "dim_names_nil": ("bad_record", "nil for the names of dims", of_schema([64, 1, None, []])),
    "stack_dim_negative": ("bad_record", "a stack dim of -1", of_schema([65, -1, None])),
    "stack_dim_true": ("bad_record", "a stack dim that is a bool", of_schema([68, True])),
    "stack_dim_name": ("bad_record", "a stack with a name of its dim", of_schema([65, 0, "a"])),
    "user_name": ("bad_record", "an integer for a type's name", of_schema([80, 1, None])),
    "sparse_compressed": (
        "unknown_kind",
        "the code of a compressed sparse tensor",
        of_schema([52, "sparse_csr", 1, None, None, None]),
    ),
    "ragged_dim_0": ("bad_record", "a ragged dim of 0", of_schema([49, "uint8", 1, 0])),
    "ragged_dim_2": ("bad_record", "a ragged dim past the values", of_schema([49, "uint8", 1, 2])),
    "views_rank_0": ("bad_record", "views of a tensor without rows", of_schema([56, "uint8", 0])),
    "dtype": ("unknown_dtype", "a torch dtype to come", message(tensor("float33"), PAYLOAD)),
    "dtype_numpy": ("unknown_dtype", "a numpy dtype", message(array("<i3"), PAYLOAD)),
    "dtype_fields": (
        "unknown_dtype",
        "a numpy dtype with fields",
        message(array(["struct", 4, False, [["a", None, 0, "<i4"]]]), PAYLOAD),
    ),
    "dtype_sub": (
        "unknown_dtype",
        "a dtype that is a subarray, which would change the rank",
        message(array(["sub", "<i4", [3]], [1]), PAYLOAD),
    ),
    "dtype_long_double": ("unknown_dtype", "a long double", message(array("float80"), PAYLOAD)),
    "field_array": (
        "unknown_kind",
        "the code of an array of fields",
        of_schema([34, ["struct", 8, False, [["a", None, 0, "|O"]]], 1, None]),
    ),
    "scalar_node": ("unknown_kind", "a numpy scalar as a node", of_schema([36, None])),
    "string_array": (
        "unknown_kind",
        "the code of an array of strings",
        message([tag(35), [1], ["a"], True, False, None]),
    ),
    "scalar_fields": (
        "unknown_dtype",
        "a scalar with fields",
        message(record("SCALAR", ["struct", 4, False, [["a", None, 0, "<i4"]]], bytes(4))),
    ),
    "dtype_objects": ("unknown_dtype", "objects in an ARRAY", message(array("|O"), PAYLOAD)),
    "too_deep": ("too_deep", "105 nodes in each other", message(nodes_inside(105))),
    # numbers
    "numbers_few": (
        "bad_header",
        "a number too few",
        message(tensor(), PAYLOAD, numbers=[0, 0, 0]),
    ),
    "numbers_many": (
        "bad_header",
        "a number too many",
        message(tensor(), PAYLOAD, numbers=[0, 0, 0, 1, 0]),
    ),
    "groups_counted": (
        "bad_header",
        "a count of 2^60 groups",
        message(1, PAYLOAD, counts=[2**60, 1]),
    ),
    "frames_counted": (
        "bad_header",
        "a count of 2^60 frames",
        message(1, PAYLOAD, counts=[0, 2**60]),
    ),
    "number_behind": ("bad_header", "a number behind the last", message(1, behind=[0, 0])),
    "sizes_negative": ("bad_header", "a frame of -1 bytes", message(1, sizes=[-1])),
    "sizes_overflow": ("bad_header", "frames of 3 x 2^62 bytes", message(1, sizes=[2**62] * 3)),
    "dim_negative": ("bad_header", "a dim of -1", message(tensor(shape=[-1]), PAYLOAD)),
    "offset_negative": ("bad_header", "a byte offset of -1", message(tensor(offset=-1), PAYLOAD)),
    "count_negative": ("bad_header", "a count of -1 groups", message(1, counts=[-1, 0])),
    "group_short": ("bad_header", "a group of 3 numbers", message(1, groups=[[0, 0, 2]])),
    "cells_overflow": ("bad_record", "2^124 cells", message(tensor(shape=[2**62] * 2), PAYLOAD)),
    "cells_overflow_zero": (
        "bad_record",
        "2^124 cells, but for a dim of 0",
        message(tensor(shape=[0, 2**62, 2**62]), PAYLOAD),
    ),
    "bytes_overflow": (
        "bad_record",
        "2^62 cells of 16 bytes",
        message(array("<c16", [2**62]), PAYLOAD),
    ),
    "group_unknown": (
        "bad_record",
        "a group that is not there",
        message(jagged(1), PAYLOAD, groups=[GROUP]),
    ),
    "group_of_rows_unknown": (
        "bad_record",
        "documents in a group that is not there",
        message(node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, 1]), b"\1"),
    ),
    "coalesced_2": (
        "bad_record",
        "a flag that is neither 0 nor 1",
        message(sparse(tensor("int64", [1, 0]), tensor(shape=[0]), coalesced=2)),
    ),
    "stored_wider": (
        "unknown_dtype",
        "int16 in 2 bytes is not narrow",
        message(tensor("int16", stored=0x12), PAYLOAD),
    ),
    "stored_sign": (
        "unknown_dtype",
        "uint16 with a sign",
        message(tensor("uint16", stored=0x21), PAYLOAD),
    ),
    "stored_bool_sign": (
        "unknown_dtype",
        "bool in one byte is as wide as it is",
        message(tensor("bool", stored=0x11), PAYLOAD),
    ),
    "stored_float_bits": (
        "unknown_dtype",
        "floats as bits",
        message(tensor("float32", stored=1), PAYLOAD),
    ),
    "stored_unknown": (
        "unknown_dtype",
        "a code between the others",
        message(tensor("int64", stored=0x18), PAYLOAD),
    ),
    "stored_5_bytes": (
        "unknown_dtype",
        "a width between 4 and 8 bytes",
        message(tensor("int64", stored=0x15), PAYLOAD),
    ),
    # places
    "cells_outside": (
        "out_of_bounds",
        "one cell too many",
        message(tensor(shape=[41], offset=24), PAYLOAD),
    ),
    "offset_outside": ("out_of_bounds", "behind the frame", message(tensor(offset=64), PAYLOAD)),
    "buffer_unknown": (
        "out_of_bounds",
        "a buffer that is not there",
        message(tensor(buffer=1), PAYLOAD),
    ),
    "bytes_outside": (
        "out_of_bounds",
        "BYTES past the frame",
        message(node("BYTES", numbers=[0, 0, 2**40]), PAYLOAD),
    ),
    "offset_overflow": (
        "out_of_bounds",
        "offset + size above 2^63",
        message(tensor("int64", [2**60 - 1], 0, 2**63 - 1), PAYLOAD),
    ),
    "narrow_outside": (
        "out_of_bounds",
        "a narrow cell past the frame",
        message(tensor("int64", [23], stored=0x13), PAYLOAD),
    ),
    "bits_outside": (
        "out_of_bounds",
        "a bit past the frame",
        message(tensor("int64", [9], stored=1), b"\0"),
    ),
    "array_outside": ("out_of_bounds", "an array past the frame", message(array("<U17"), PAYLOAD)),
    "documents_outside": (
        "out_of_bounds",
        "documents past the frame",
        message(object_array([1], 65), PAYLOAD, groups=[[0, 0, 1, 65, 65]]),
    ),
    "bounds_outside": (
        "out_of_bounds",
        "bounds of 2^58 views",
        message(tensor_views(2**58), PAYLOAD),
    ),
    "components_outside": (
        "out_of_bounds",
        "shapes of 2^60 components",
        message(strided_nested(1, 2**60), PAYLOAD),
    ),
    "group_outside": (
        "out_of_bounds",
        "offsets of 2^60 rows",
        message(1, PAYLOAD, groups=[[0, 0, 2**60, 0, 0]]),
    ),
    "batch_cells_outside": (
        "out_of_bounds",
        "a column past its frame",
        message(batch(tensor(shape=[2], offset=63)), PAYLOAD),
    ),
    # every byte once
    "cells_overlap": (
        "out_of_bounds",
        "two values in the same bytes",
        message(list_of(tensor("int16", [2]), tensor("int16", [2])), bytes(7)),
    ),
    "narrow_overlap": (
        "out_of_bounds",
        "narrow cells of more bytes than the payload",
        message(list_of(*[tensor("int64", [2], stored=0x11)] * 2), b"\1\2\3"),
    ),
    "bytes_overlap": (
        "out_of_bounds",
        "byte strings of more bytes than the payload",
        message(list_of(*[node("BYTES", numbers=[0, 0, 5])] * 2), bytes(9)),
    ),
    "documents_overlap": (
        "out_of_bounds",
        "two columns of the same documents",
        message(
            list_of(*[node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, 2])] * 2),
            b"\1\2",
            groups=[[0, 0, 1, 2, 2]],
        ),
    ),
    "groups_overlap": (
        "out_of_bounds",
        "groups of more bytes than the payload",
        message(1, PAYLOAD, groups=[GROUP] * 3),
    ),
    "group_and_cells_overlap": (
        "out_of_bounds",
        "cells where the offsets lie",
        message(jagged(dtype="int64", offset=0), PAYLOAD[:48], groups=[GROUP]),
    ),
    # groups and rows
    "min_above_max": (
        "bad_offsets",
        "min above max, in a group that nobody uses",
        message(1, PAYLOAD, groups=[[0, 0, 2, 3, 2]]),
    ),
    "min_of_one_row": (
        "bad_offsets",
        "one row of two lengths",
        message(jagged(offset=0), PAYLOAD, groups=[[0, 0, 1, 2, 5]]),
    ),
    "max_of_no_rows": (
        "bad_offsets",
        "a length of no rows",
        message(jagged(offset=0), PAYLOAD, groups=[[0, 0, 0, 0, 5]]),
    ),
    "end_of_one_row": (
        "bad_offsets",
        "one row that ends elsewhere than the values",
        message(jagged(offset=0), PAYLOAD, groups=[[0, 0, 1, 4, 4]]),
    ),
    "offsets_start": (
        "bad_offsets",
        "offsets that start at 1",
        message(jagged(), int64s(1, 2, 5) + bytes(5), groups=[GROUP]),
    ),
    "offsets_fall": (
        "bad_offsets",
        "offsets that fall",
        message(jagged(), int64s(0, 6, 5) + bytes(5), groups=[GROUP]),
    ),
    "offsets_end": (
        "bad_offsets",
        "offsets that end elsewhere than the values",
        message(jagged(shape=[4]), PAYLOAD, groups=[GROUP]),
    ),
    "offsets_min": (
        "bad_offsets",
        "a min that is not theirs",
        message(jagged(), PAYLOAD, groups=[[0, 0, 2, 1, 3]]),
    ),
    "offsets_max": (
        "bad_offsets",
        "a max that is not theirs",
        message(jagged(), PAYLOAD, groups=[[0, 0, 2, 2, 4]]),
    ),
    "offsets_of_documents": (
        "bad_offsets",
        "offsets that end elsewhere than the documents",
        message(
            node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, 2]), b"\1\2", groups=[[0, 0, 1, 1, 1]]
        ),
    ),
    "view_bounds_are_narrow": (
        "bad_record",
        "bounds that are stored narrow",
        message(
            node(
                "TENSOR_VIEWS",
                children=[tensor(shape=(8,)), tensor("int64", (1, 2), offset=8, stored=17)],
            ),
            PAYLOAD,
        ),
    ),
    "view_bounds_of_three": (
        "bad_record",
        "three numbers for a view",
        message(
            node("TENSOR_VIEWS", children=[tensor(shape=(1,)), tensor("int64", (1, 3), offset=8)]),
            PAYLOAD,
        ),
    ),
    "view_bounds_of_int32": (
        "bad_record",
        "bounds of another dtype than int64",
        message(
            node("TENSOR_VIEWS", children=[tensor(shape=(1,)), tensor("int32", (1, 2), offset=8)]),
            PAYLOAD,
        ),
    ),
    "view_of_a_document": (
        "bad_record",
        "a document for what is viewed",
        message(node("TENSOR_VIEWS", children=[[1, 2], tensor("int64", (0, 2))])),
    ),
    "views_of_a_scalar": (
        "bad_record",
        "views of a tensor of rank 0",
        message(tensor_views(1, (), (0, 16)), PAYLOAD),
    ),
    "views_with_numbers_of_their_own": (
        "bad_record",
        "the fields that views had without children",
        of_schema([56, "uint8", 1]),
    ),
    "nested_cells_of_two_dims": (
        "bad_record",
        "cells of components that have two dims",
        message(
            node(
                "STRIDED_NESTED",
                1,
                children=[tensor(shape=(1, 1)), tensor("int64", (1, 1), offset=8)],
            ),
            PAYLOAD,
        ),
    ),
    "nested_sizes_of_another_rank": (
        "bad_record",
        "shapes of two dims for components of one",
        message(
            node("STRIDED_NESTED", 1, children=[tensor(), tensor("int64", (1, 2), offset=8)]),
            PAYLOAD,
        ),
    ),
    "nested_sizes_are_narrow": (
        "bad_record",
        "shapes that are stored narrow",
        message(
            node(
                "STRIDED_NESTED",
                1,
                children=[tensor(), tensor("int64", (1, 1), offset=8, stored=17)],
            ),
            b"\0" * 8 + b"\1" * 8,
        ),
    ),
    "nested_sizes_without_bytes": (
        "bad_record",
        "2^40 components without dims, whose sizes take no bytes",
        message(
            node("STRIDED_NESTED", 0, children=[tensor(), tensor("int64", (2**40, 0))]), PAYLOAD
        ),
    ),
    "view_outside": ("out_of_bounds", "a view past the rows", views((0, 4))),
    "view_backwards": ("out_of_bounds", "a view that ends before it starts", views((2, 1))),
    "view_negative": ("out_of_bounds", "a view from -1", views((-1, 1))),
    "nested_cells": (
        "bad_offsets",
        "component sizes that do not add up",
        components_of([(1,), (1,)], 3),
    ),
    "nested_negative": (
        "bad_record",
        "a component of -1 cells",
        components_of([(-1,), (2,)], 1),
    ),
    "nested_without_dims": (
        "out_of_bounds",
        "2^40 components without dims and one cell",
        components_of([], 1, rank=0, components=2**40),
    ),
    "nested_without_dims_or_cells": (
        "bad_value",
        "a component without dims that has two cells",
        components_of([(2,)], 2, rank=0),
    ),
    "rows_unbacked": (
        "bad_rows",
        "10^9 rows of nothing",
        message(node("NON_TENSOR_DATA", 1, numbers=[10**9], children=["x"])),
    ),
    "batch_unbacked": (
        "bad_rows",
        "a TensorDict of 10^9 rows",
        message(tensordict([10**9], {})),
    ),
    "batch_unbacked_zero": (
        "bad_rows",
        "10^9 rows, but for a dim of 0",
        message(tensordict([0, 10**9], {})),
    ),
    "nested_batch_rows": (
        "bad_rows",
        "a TensorDict in one of other rows",
        message(batch(tensordict([3], {}))),
    ),
    # checksums
    "checksum_count": (
        "bad_header",
        "one checksum for the header and two frames",
        message(1, b"x", b"y", checksums=[0]),
    ),
    "checksum_negative": ("bad_header", "a checksum of -1", message(1, checksums=[-1])),
    "checksum_header": ("bad_checksum", "of the header", message(1, checksums=[0])),
    "checksum_schema": (
        "bad_checksum",
        "of another schema",
        [message(tensor(), b"x", checksum=True)[0].replace(b"uint8", b"uint4"), b"x"],
    ),
    "checksum_numbers": (
        "bad_checksum",
        "of other numbers",
        [
            message(tensor(), b"xy", checksum=True)[0].replace(
                int64s(0, 0, 0, 1), int64s(0, 1, 0, 1)
            ),
            b"xy",
        ],
    ),
    "checksum_values": (
        "bad_checksum",
        "of other values",
        [message("abc", checksum=True)[0].replace(b"abc", b"abd")],
    ),
    "checksum_frame": (
        "bad_checksum",
        "of frame 1",
        [message(tensor(), b"x", checksum=True)[0], b"y"],
    ),
    "checksum_frames_swapped": (
        "bad_checksum",
        "of frames of one size that changed places",
        [message(1, b"x", b"y", checksum=True)[0], b"y", b"x"],
    ),
    # documents
    "values_few": ("bad_header", "no value for the schema", message(1, values=[])),
    "values_many": ("bad_header", "a value too many", message(1, values=[1, {}, 2])),
    "values_map": ("bad_header", "a map of values", message(1, values={"a": 1})),
    "values_two": ("bad_header", "two arrays of values", message(1, values=b"\x91\1\x91\1")),
    "values_reserved": ("bad_header", "msgpack's byte c1", message(1, values=b"\x91\xc1")),
    "values_utf8": ("bad_header", "a string that is no UTF-8", message(1, values=b"\x91\xa1\xff")),
    "values_count": (
        "bad_header",
        "an array that claims 2^32 - 1 items",
        message(1, values=b"\x91\xdd" + b"\xff" * 4),
    ),
    "map_key": ("bad_header", "a map with a key that is an integer", message({1: 1})),
    "tag_1": (
        "unknown_kind",
        "an extension that others unpickle",
        message([msgpack.ExtType(1, b"\1")]),
    ),
    "tag_timestamp": ("unknown_kind", "msgpack's timestamp", message(msgpack.Timestamp(5))),
    "tag_timestamp_long": (
        "unknown_kind",
        "msgpack's timestamp, with a length of its own",
        message(None, values=b"\x91\xc7\x0c\xff\0\0\0\5" + bytes(8)),
    ),
    "tag_timestamp_in_a_row": (
        "unknown_kind",
        "msgpack's timestamp in a row",
        message_of_rows(1, msgpack.Timestamp(5)),
    ),
    "tag_schema": ("unknown_kind", "a schema in a document", message([tag(16)])),
    "tag_of_a_node": ("unknown_kind", "a node's kind for a record", message([tag("TENSOR")])),
    "tag_127": ("unknown_kind", "a code to come", message([tag(127)])),
    "tag_not_empty": (
        "bad_record",
        "a tag that holds something",
        message([tag("TUPLE", b"\x90")]),
    ),
    "tag_alone": ("unknown_kind", "a tag that is no record", message(tag("TUPLE"))),
    "tag_not_first": ("unknown_kind", "a tag behind an item", message([1, tag("TUPLE")])),
    "tag_as_value": ("unknown_kind", "a tag in a map", message({"a": tag("TUPLE")})),
    "big_int_empty": ("bad_record", "a BIG_INT of no bytes", message(record("BIG_INT", b""))),
    "big_int_str": ("bad_record", "a BIG_INT of text", message(record("BIG_INT", "1"))),
    "complex_int": ("bad_value", "an integer for a float", message(user("complex", 1, 2.0))),
    "complex_short": ("bad_value", "one float of two", message(user("complex", 2.0))),
    "range_step": ("bad_value", "a step of 0", message(user("range", 0, 1, 0))),
    "range_short": ("bad_value", "two integers of three", message(user("range", 0, 1))),
    "range_bool": ("bad_value", "a bool for an integer", message(user("range", 0, True, 1))),
    "slice_short": ("bad_value", "two parts of three", message(user("slice", 0, 1))),
    "complex_record": ("unknown_kind", "the code of a complex", message([tag(18), 1.0, 2.0])),
    "slice_node": ("unknown_kind", "the code of a slice", of_schema([24, None, None, None])),
    "dict_odd": ("bad_record", "a key without a value", message(record("DICT", 1))),
    "dict_twice": ("bad_value", "a key twice", message(record("DICT", 1, 2, 1, 3))),
    "dict_equal": ("bad_value", "1 and true are one key", message(record("DICT", 1, 2, True, 3))),
    "dict_list": ("bad_value", "a list for a key", message(record("DICT", [], 2))),
    "dict_node_twice": (
        "bad_value",
        "a key twice",
        message(node("DICT", children=[[1, 1], 2, tensor()]), b"x"),
    ),
    "dict_node_keys": (
        "bad_value",
        "keys that are no list",
        message(node("DICT", children=[5, tensor()]), b"x"),
    ),
    "dict_node_count": (
        "bad_value",
        "two keys for one child",
        message(node("DICT", children=[[1, 2], tensor()]), b"x"),
    ),
    "dict_node_of_nodes": (
        "bad_value",
        "keys that are a node",
        message(node("DICT", children=[list_of(1), tensor()]), b"x"),
    ),
    "set_twice": ("bad_value", "a member twice", message(record("SET", 1, 1))),
    "set_of_maps": ("bad_value", "a map for a member", message(record("FROZENSET", {}))),
    "keys_collide": (
        "bad_value",
        "99 keys of one hash, as Python hashes integers",
        message(record("DICT", *pairs(colliding_keys()))),
    ),
    "members_collide": (
        "bad_value",
        "99 members of one hash",
        message(record("SET", *colliding_keys())),
    ),
    "numbers_dtype": (
        "unknown_dtype",
        "numbers of a dtype that Python's are not",
        message(record("NUMBERS", "float32", bytes(4))),
    ),
    "numbers_size": (
        "bad_value",
        "5 bytes of int32",
        message(record("NUMBERS", "int32", bytes(5))),
    ),
    "numbers_bool": ("bad_value", "a bool of 2", message(record("NUMBERS", "bool", b"\0\1\2"))),
    "numbers_text": ("bad_record", "numbers as text", message(record("NUMBERS", "int8", "12"))),
    "numbers_key": (
        "bad_value",
        "numbers as a key",
        message(record("DICT", record("NUMBERS", "int8", b"12"), 1)),
    ),
    "scalar_size": ("bad_record", "3 bytes of a <i4", message(record("SCALAR", "<i4", b"123"))),
    "scalar_objects": (
        "unknown_dtype",
        "a pointer for a scalar",
        message(record("SCALAR", "|O", bytes(8))),
    ),
    "scalar_code_point": (
        "bad_value",
        "a <U1 above 10ffff",
        message(record("SCALAR", "<U1", b"\0\0\x11\0")),
    ),
    "string_scalar": (
        "bad_value",
        "an integer for a string",
        message(record("USER", "numpy.str_", 1)),
    ),
    "size_65_bits": (
        "bad_value",
        "a number of 65 bits",
        message(record("USER", "torch.Size", [2**63])),
    ),
    "dtype_record": (
        "bad_value",
        "a name of torch's",
        message(record("USER", "torch.dtype", "load")),
    ),
    "device": (
        "bad_value",
        "a type of device that torch has not",
        message(user("torch.device", "gpu", 0)),
    ),
    "device_number": ("bad_value", "device 128", message(user("torch.device", "cuda", 128))),
    "user": (
        "unknown_type",
        "a type of the user's",
        message(node("USER", "no.such.Type", children=[tensor()]), b"x"),
    ),
    "user_record": (
        "unknown_type",
        "a type of the user's, without buffers",
        message(record("USER", "no.such.Type", [1])),
    ),
    "user_record_name": (
        "bad_record",
        "an integer for a type's name",
        message(record("USER", 1, 1)),
    ),
    "pickle": (
        "pickle_refused",
        "a pickle that its reader did not ask for",
        message(record("PICKLE", b"\x80\x04K\x01.")),
    ),
    "documents_deep": ("too_deep", "106 records in each other", message(documents_inside(106))),
    # rows of documents
    "row_long": (
        "bad_value",
        "a document that ends before its row",
        message_of(Rows(b"\1\2\3", [0, 2, 3])),
    ),
    "row_short": (
        "bad_value",
        "a document that ends behind its row",
        message_of(Rows(b"\x91\1\3", [0, 1, 3])),
    ),
    "row_empty": ("bad_value", "a row of no bytes", message_of(Rows(b"\1\2", [0, 0, 1, 2]))),
    "row_cut": (
        "bad_header",
        "a document that is not all there",
        message_of(Rows(b"\1\x92\1", [0, 1, 3])),
    ),
    "row_kind": (
        "unknown_kind",
        "an unknown record in a row",
        message_of_rows(1, [tag(127), 1]),
    ),
    "row_count": (
        "bad_value",
        "three documents for four cells",
        message(object_array([2, 2], 3), b"\1\2\3" + int64s(0, 1, 2, 3), groups=[[0, 3, 3, 1, 1]]),
    ),
    "rows_stored": (
        "bad_record",
        "documents that are stored narrow",
        message(rows_node(1, stored=257), b"\1", groups=[[0, 0, 1, 1, 1]]),
    ),
    "row_message_among_documents": (
        "bad_value",
        "a message where rows are documents",
        message_of(rows_of(row_message(INNER))._replace(stored=0)),
    ),
    "row_document_among_messages": (
        "bad_value",
        "a document where rows are messages",
        message_of_rows(row_message(INNER), blob_row(b"\1")),
    ),
    "row_empty_among_messages": (
        "bad_value",
        "a row of no bytes where rows are messages",
        message_of_rows(row_message(INNER), b""),
    ),
    "row_message_zeros": (
        "bad_value",
        "64 zeros before a message",
        message_of_rows(RowMessage(bytes(64) + row_message(INNER))),
    ),
    "row_message_behind": (
        "bad_value",
        "a byte behind a message that is not zero",
        message_of_rows(RowMessage(row_message(INNER)[:-1] + b"\1")),
    ),
    "row_message_longer": (
        "bad_value",
        "64 zeros too many behind a message",
        message_of_rows(RowMessage(row_message(INNER) + bytes(64))),
    ),
    "row_message_short": (
        "bad_value",
        "a message in a row that does not end at a multiple of 64",
        message_of_rows(RowMessage(row_message(INNER)[:-1])),
    ),
    "row_message_cut": (
        "frame_size",
        "a message cut short",
        message_of_rows(RowMessage(blob(INNER)[:-1])),
    ),
    "row_message_version": (
        "unknown_version",
        "a message of a version to come",
        message_of_rows(1, blob_row(blob(INNER, version=2))),
    ),
    "row_message_header": (
        "unknown_version",
        "the same in its header",
        message_of_rows(1, row_message(message(1, fields={"jagcodec": 2}))),
    ),
    "row_message_checksum": (
        "bad_checksum",
        "a message whose bytes were damaged",
        message_of_rows(row_message([message(tensor(), b"x", checksum=True)[0], b"y"])),
    ),
    "row_message_outside": (
        "out_of_bounds",
        "a place outside the message in the row",
        message_of_rows("a" * 99, row_message(message(tensor(shape=[2]), b"x"))),
    ),
    "rows_too_deep": ("too_deep", "110 messages in rows of each other", rows_inside(110)),
    # compressed frames
    "compressed_in_a_row": (
        "bad_record",
        "a compressed frame of a message in a row",
        message_of_rows(1, row_message(of_sevens(RUN))),
    ),
    "compressed_to_more": (
        "bad_header",
        "a stored size above the size",
        compressed(tensor(shape=[100]), [100], RUN + bytes(100)),
    ),
    "compressed_numbers": ("bad_header", "a number too many", of_sevens(RUN, behind=[1, 2, 3])),
    "compressed_cut": ("frame_size", "a byte less than stored", of_sevens(RUN[:-1], stored=[13])),
    "compressed_frames": (
        "frame_count",
        "one frame of two",
        compressed(tensor(shape=[100]), [100, 100], RUN, stored=[13, 13]),
    ),
    "compressed_checksum": (
        "bad_checksum",
        "a stored frame that was damaged",
        [of_sevens(RUN, checksum=True)[0], RUN[:-1] + b"\6"],
    ),
    "compressed_stored_checksum": (
        "bad_checksum",
        "a stored size that was damaged",
        [of_sevens(RUN, checksum=True)[0].replace(int64s(100, 13), int64s(100, 12)), RUN[:-1]],
    ),
    "zstd_nothing": ("bad_value", "no byte for a frame", of_sevens(b"")),
    "zstd_short": ("bad_value", "one byte for a frame", of_sevens(b"\x28")),
    "zstd_start": ("bad_value", "nothing after the flags", of_sevens(RUN[:5])),
    "zstd_foreign": ("bad_value", "no frame of zstd", of_sevens(b"\7" * 20)),
    "zstd_skippable": (
        "bad_value",
        "a frame that is to be skipped",
        of_sevens(b"\x50\x2a\x4d\x18\1\0\0\0\7"),
    ),
    "zstd_cut": ("bad_value", "a frame cut short", of_sevens(RUN[:-1])),
    "zstd_cut_block": (
        "bad_value",
        "a frame without its last block, which is empty",
        of_sevens(zstd((b"\7", 100), b"", size=100)[:-3]),
    ),
    "zstd_behind": ("bad_value", "a byte behind a frame", of_sevens(RUN + b"\0")),
    "zstd_two": (
        "bad_value",
        "two frames in one",
        of_sevens(zstd((b"\7", 50), size=50, width=1) * 2),
    ),
    "zstd_skippable_behind": (
        "bad_value",
        "a frame to be skipped behind it",
        of_sevens(RUN + b"\x50\x2a\x4d\x18\1\0\0\0\7"),
    ),
    "zstd_says_other": ("bad_value", "another size", of_sevens(zstd((b"\7", 100), size=101))),
    "zstd_says_nothing": ("bad_value", "no size", of_sevens(zstd((b"\7", 100)))),
    "zstd_less": ("bad_value", "99 bytes that say 100", of_sevens(zstd((b"\7", 99), size=100))),
    "zstd_more": ("bad_value", "101 bytes that say 100", of_sevens(zstd((b"\7", 101), size=100))),
    "zstd_much_more": (
        "bad_value",
        "2^17 bytes that say 100",
        of_sevens(zstd((b"\7", 1 << 17), size=100, window=56)),
    ),
    "zstd_dictionary": (
        "bad_value",
        "a dictionary",
        of_sevens(b"\x28\xb5\x2f\xfd\xa1\7" + RUN[5:]),
    ),
    "zstd_window": (
        "bad_value",
        "a window of 9 MiB",
        of_sevens(zstd((b"\7", 100), size=100, window=105)),
    ),
    "zstd_reserved": (
        "bad_value",
        "a bit that is reserved",
        of_sevens(zstd((b"\7", 100), size=100, flags=8)),
    ),
    "zstd_block": (
        "bad_value",
        "a block of a type that is reserved",
        of_sevens(RUN[:9] + b"\7\0\0"),
    ),
    "zstd_checksum": (
        "bad_value",
        "a checksum of its own that does not hold",
        of_sevens(zstd((b"\7", 100), size=100, flags=4, behind=bytes(4))),
    ),
    "zstd_checksum_cut": (
        "bad_value",
        "a checksum of its own that is cut",
        of_sevens(zstd((b"\7", 100), size=100, flags=4, behind=CHECKSUM[:3])),
    ),
    # values that do not fit together
    "code_point": ("bad_value", "a cell of <U1 above 10ffff", message(array("<U1"), b"\0\0\x11\0")),
    "sparse_index": (
        "bad_sparse",
        "an index of 3 in a dim of 3",
        message(sparse(tensor("int64", [1, 1]), tensor(offset=8)), int64s(3) + b"x"),
    ),
    "sparse_order": (
        "bad_sparse",
        "coalesced, and an index twice",
        message(
            sparse(tensor("int64", [1, 2]), tensor(shape=[2], offset=16), coalesced=1),
            int64s(1, 1) + b"\1\2",
        ),
    ),
    "sparse_dtype": (
        "bad_sparse",
        "indices of another dtype",
        message(sparse(tensor("int32", [1, 1]), tensor(offset=4)), bytes(5)),
    ),
    "sparse_narrow": (
        "bad_value",
        "narrow indices",
        message(sparse(tensor("int64", [1, 1], stored=0x11), tensor(offset=1)), bytes(2)),
    ),
    "sparse_of_lists": (
        "bad_value",
        "a list for indices",
        message(sparse(list_of(), tensor(shape=[0]))),
    ),
    "leaf": ("bad_value", "an integer for a leaf", message(batch(5))),
    "leaf_array": (
        "bad_value",
        "a numpy array for a leaf",
        message(batch(array("|u1", [2])), b"xy"),
    ),
    "leaf_rows": ("bad_value", "a leaf of another batch size", message(batch(tensor()), b"x")),
    "jagged_rows": (
        "bad_value",
        "a jagged leaf of another batch size",
        message(batch(jagged(), 3), PAYLOAD, groups=[GROUP]),
    ),
    "stack_of_ints": (
        "bad_value",
        "no TensorDict to stack",
        message(node("LAZY_STACK", 0, children=[1])),
    ),
    "stack_of_tensors": (
        "bad_value",
        "no non-tensor members",
        message(node("NON_TENSOR_STACK", 0, children=[tensor()]), b"x"),
    ),
    "stack_of_nothing": (
        "unknown_type",
        "a stack of several dims without members, which had a name",
        message(record("USER", "tensordict.NonTensorStack", record("TUPLE", [0, 2], 0))),
    ),
    "stacks_9_deep": ("too_deep", "9 stacks in each other", message(stacks_inside(9))),
    "non_tensor_stacks_9_deep": (
        "too_deep",
        "9 stacks of non-tensors in each other",
        message(stacks_inside(9, "NON_TENSOR_STACK")),
    ),
    # indirect columns
    **corpus_indirect.BAD,
}

MAY_ACCEPT = {
    # They ask for what only Python or torch can know.
    "keys_collide",
    "members_collide",
    "device",
    # Documents may be nested deeper than they must be read.
    "documents_deep",
}
