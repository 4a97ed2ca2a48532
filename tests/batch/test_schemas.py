"""Schemas: of every form of a batch the same, checked column by column, JSON and back."""

import copy
import dataclasses
import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    BatchedDataDict,
    FieldSchema,
    Schema,
    SchemaError,
    WireFormatError,
    concat_rows,
    dump,
    encode,
    encode_fields,
    join_columns,
    open_wire,
    pack_rows,
    schema_of,
    stack_or_nest,
    to_blob,
)
from jagcodec.batch.schemas import WIDER
from jagcodec.ragged.non_tensor import empty_stack, leaf_of_rows
from jagcodec.testing.strategies import jagged_batches, tensordicts, torch_dtypes
from jagcodec.wire.spec import TORCH_DTYPES
from tests.helpers import make_batch, receive

JAGGED = FieldSchema("jagged", torch.int64, (None, None))
REWARD = FieldSchema("tensor", torch.float32, (None,))
OBJECT = FieldSchema("object", None, None)


# --- of what -----------------------------------------------------------------------------------


@given(tensordicts())
def test_a_batch_and_its_message_have_one_schema(td):
    """The batch is looked at leaf by leaf, the message by its header: one is the other's oracle."""
    of_batch = schema_of(td)
    assert of_batch == schema_of(encode(td))
    assert list(of_batch) == list(schema_of(encode(td)))
    names = [key for key in td.keys(include_nested=True) if not _in_a_leaf(td, key)]
    assert sorted(map(str, of_batch)) == sorted(map(str, names))


def _in_a_leaf(td, key):
    """Whether a name lies inside what is one column, such as a lazy stack."""
    if type(key) is not tuple:
        return False
    outer = (td.get(key[:i]) for i in range(1, len(key)))
    return any(type(batch) is not TensorDict for batch in outer)


@given(jagged_batches())
def test_the_schema_of_columns_is_what_the_header_says_without_the_rows(batch):
    frames = encode_fields(
        batch.fields,
        lengths=batch.lengths,
        token_aligned_fields=batch.token_aligned_fields,
    )
    schema = schema_of(frames)
    for name, (kind, dtype, shape) in open_wire(frames).schema.items():
        rows = len(batch.lengths)
        assert schema[name][:2] == (kind, dtype)
        assert shape is None or (rows, *(schema[name].shape or ())[1:]) == shape


def test_every_form_of_a_message_has_the_schema_of_its_batch(tmp_path):
    td = make_batch()
    td["nested"] = TensorDict({"x": torch.ones(6, 2), "y": {"z": torch.ones(6)}}, [6])
    expected = {
        "ids": JAGGED,
        "logprobs": FieldSchema("jagged", torch.float32, (None, None)),
        "experts": FieldSchema("jagged", torch.int64, (None, None, 2)),
        "embedding": FieldSchema("tensor", torch.float32, (None, 3)),
        "reward": REWARD,
        "message": OBJECT,
        "tag": OBJECT,
        "nested": FieldSchema("tensordict", None, None),
        ("nested", "x"): FieldSchema("tensor", torch.float32, (None, 2)),
        ("nested", "y"): FieldSchema("tensordict", None, None),
        ("nested", "y", "z"): REWARD,
    }
    frames = receive(encode(td))
    blob = bytes(to_blob(frames))
    dump(td, tmp_path / "batch.jag")
    forms = [
        td,
        frames,
        blob,
        tmp_path / "batch.jag",
        lambda offset, size: blob[offset : offset + size],
        open_wire(frames),
        open_wire(frames).rows([2, 0]),
        concat_rows([open_wire(frames), open_wire(blob)]),
        join_columns([open_wire(frames)]),
        encode({"batch": td, "step": 3}),
        encode(td, narrow=True, elide=True),
        encode(td, compress="zstd"),
    ]
    for form in forms:
        assert dict(schema_of(form).columns) == expected
        assert schema_of(form).optional == frozenset()
    assert list(schema_of(td)) == list(expected)


def test_of_a_store_only_the_header_is_read():
    blob = bytes(to_blob(encode(make_batch(cells_per_token=4000))))
    asked = []

    def fetch(offset, size):
        asked.append((offset, size))
        return blob[offset : offset + size]

    assert schema_of(fetch) == schema_of(blob)
    assert len(asked) == 2
    assert sum(size for _, size in asked) < len(blob) / 50


def test_no_cell_is_read():
    """Cells on the meta device cannot be read at all."""
    values = torch.empty(4, 3, device="meta", dtype=torch.bfloat16)
    td = TensorDict({"x": values, "n": {"y": values[:, 0]}}, [4])
    assert dict(schema_of(td).columns) == {
        "x": FieldSchema("tensor", torch.bfloat16, (None, 3)),
        "n": FieldSchema("tensordict", None, None),
        ("n", "y"): FieldSchema("tensor", torch.bfloat16, (None,)),
    }


def test_rare_leaves_have_the_kinds_of_their_messages():
    lazy = [TensorDict({"v": torch.ones(i)}, []) for i in range(3)]
    strided = [torch.ones(n) for n in (1, 2, 3)]
    td = TensorDict(
        {
            "wide": stack_or_nest([torch.arange(2 * n).view(2, n) for n in (1, 3, 2)]),
            "objects": np.array(["x", ["y"], 3], dtype=object),
            "lazy": LazyStackedTensorDict(*lazy, stack_dim=0),
            "strided": torch.nested.nested_tensor(strided, layout=torch.strided),
            "coo": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "data": NonTensorData("for all", batch_size=[3]),
            "stack": NonTensorStack("a", None, (1,)),
        },
        [3],
    )
    kinds = ["jagged", "object", "lazy_stack", "strided_nested", "sparse_coo", "sparse_compressed"]
    assert [kind for kind, _, _ in schema_of(td).columns.values()] == [*kinds, "object", "object"]
    assert schema_of(td) == schema_of(encode(td))
    assert schema_of(td)["wide"].shape == (None, 2, None)
    two = TensorDict({"x": torch.ones(2, 3, 4)}, [2, 3])
    assert schema_of(two) == schema_of(encode(two))


def test_a_dict_of_columns_and_a_batched_data_dict():
    objects = np.array(["a", None], dtype=object)
    columns = {"x": torch.ones(2, 3), "o": objects, "l": ["u", "v"], "p": np.ones(2)}
    expected = Schema(
        {
            "x": FieldSchema("tensor", torch.float32, (None, 3)),
            "o": OBJECT,
            "l": OBJECT,
            "p": FieldSchema("array", None, None),
        }
    )
    batch = BatchedDataDict(columns, meta_info={"step": 1})
    assert schema_of(columns) == schema_of(batch) == schema_of(encode(batch)) == expected
    lists = {"t": [torch.ones(1), torch.ones(2)], "e": [[1], {"a": 2}], "x": torch.ones(2, 3)}
    rest = BatchedDataDict(lists)
    assert schema_of(rest) == schema_of(encode(rest))
    assert [kind for kind, _, _ in schema_of(rest).columns.values()] == [
        "object",
        "object",
        "tensor",
    ]


@pytest.mark.parametrize(
    "leaf",
    [leaf_of_rows([]), empty_stack(NonTensorStack, torch.Size([0]), 0)],
    ids=["data", "stack"],
)
def test_objects_of_no_rows_are_objects(leaf):
    td = TensorDict({"x": torch.ones(0)}, [0])
    td._set_str("tag", leaf, validated=True, inplace=False)
    assert schema_of(td)["tag"] == schema_of(encode(td))["tag"] == OBJECT


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (3, ArgumentTypeError, r"schema_of\(batch\): expected the frames of a message, or a blob"),
        (None, ArgumentTypeError, "pass what encode returned"),
        ({"a": 3}, ArgumentTypeError, r"schema_of\(batch\): \$.a: expected a column .*, found int"),
        ({"a": torch.tensor(1)}, ArgumentTypeError, "expected a column with a row per sample"),
        ({3: torch.ones(2)}, ArgumentTypeError, "expected names of columns, found int"),
        (TensorDict({}, []), ArgumentError, "expected a batch dim or more"),
        (
            LazyStackedTensorDict(TensorDict({}, []), stack_dim=0),
            ArgumentTypeError,
            "found LazyStackedTensorDict; call to_tensordict",
        ),
        (encode([1, 2]), WireFormatError, "expected the message of a TensorDict"),
        ([b"nonsense"], WireFormatError, "header"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_schema(value, error, text):
    with pytest.raises(error, match=text):
        schema_of(value)


# --- check -------------------------------------------------------------------------------------


def refused(schema, batch, **options):
    with pytest.raises(SchemaError) as caught:
        schema.check(batch, **options)
    return caught.value


@given(tensordicts())
def test_a_batch_is_of_its_own_schema(td):
    schema_of(td).check(td)
    schema_of(td).check(encode(td))


def batch(**changes):
    columns = {"ids": torch.arange(6).view(2, 3), "reward": torch.ones(2), "tag": ["a", "b"]}
    changed = {**columns, **changes}
    kept = {name: column for name, column in changed.items() if column is not None}
    names = [name for name in ("ids", "extra") if name in kept]
    return encode_fields(kept, lengths=[3, 2], token_aligned_fields=names)


SCHEMA = Schema({"ids": JAGGED, "reward": REWARD, "tag": OBJECT})


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        (
            {"reward": None},
            "no_such_field",
            "$.reward: expected kind tensor float32 (N), found no such column among 'ids', 'tag'; "
            "write it, or declare it with with_optional",
        ),
        (
            {"ids": torch.ones(2, 3)},
            "bad_dtype",
            "$.ids: expected dtype int64, or one that it holds exactly, found float32; convert the "
            "column, or widen the schema",
        ),
        (
            {"reward": torch.ones(2, 5)},
            "bad_shape",
            "$.reward: expected shape (N), found (N, 5); a None in the schema's shape allows any "
            "size",
        ),
        (
            {"tag": torch.ones(2)},
            "bad_type",
            "$.tag: expected kind object, found kind tensor float32 (N); write it in the form that "
            "its readers expect",
        ),
        (
            {"extra": torch.ones(2, 3)},
            "new_field",
            "$.extra: expected no such column, found kind jagged float32 (N, *); pass "
            "new_columns=True to allow columns that the schema does not have",
        ),
        (
            {"extra": torch.ones(2, 3), "reward": torch.ones(2).int(), "tag": None},
            "bad_dtype",
            "$.reward: expected dtype float32, or one that it holds exactly, found int32; convert "
            "the column, or widen the schema (the first of 3 columns that differ)",
        ),
    ],
)
def test_a_mismatch_names_column_expected_found_and_remedy(changes, reason, text):
    message = batch(**changes)
    for form in (message, open_wire(message), open_wire(message).to_tensordict()):
        error = refused(SCHEMA, form)
        assert (error.reason, str(error)) == (reason, text)
    assert isinstance(error, ValueError)


def test_what_is_no_batch_is_a_mistake_of_the_caller_and_damage_one_of_the_message():
    with pytest.raises(ArgumentTypeError, match=r"Schema.check\(batch\): expected"):
        SCHEMA.check(None)
    with pytest.raises(WireFormatError):
        SCHEMA.check(bytes(to_blob(batch()))[:40])


def test_new_columns_are_refused_or_allowed():
    more = batch(extra=torch.ones(2, 3))
    assert refused(SCHEMA, more).reason == "new_field"
    SCHEMA.check(more, new_columns=True)
    # What else is wrong is wrong all the same.
    missing = batch(extra=torch.ones(2, 3), tag=None)
    assert refused(SCHEMA, missing, new_columns=True).path == "$.tag"


def test_optional_columns_may_be_absent_and_are_checked_if_they_are_there():
    schema = SCHEMA.with_optional("reward")
    schema.check(batch(reward=None))
    schema.check(batch())
    assert refused(schema, batch(reward=torch.ones(2, 5))).reason == "bad_shape"
    assert refused(schema, batch(tag=None)).path == "$.tag"
    with pytest.raises(ArgumentKeyError, match="expected one of 'ids', 'reward', 'tag'"):
        SCHEMA.with_optional("rewards")


def test_a_nested_batch_is_absent_or_new_as_a_whole():
    nested = TensorDict({"x": torch.ones(2), "n": {"y": {"z": torch.ones(2)}}}, [2])
    schema = schema_of(nested)
    bare = nested.exclude("n")
    error = refused(schema, bare)
    assert (error.path, "the first of" in str(error)) == ("$.n", False)
    error = refused(schema_of(bare), nested)
    assert (error.reason, error.path, "the first of" in str(error)) == ("new_field", "$.n", False)
    schema.with_optional("n").check(bare)
    assert refused(schema.with_optional("n"), nested.exclude(("n", "y", "z"))).path == "$.n.y.z"
    schema.with_optional(("n", "y")).check(nested.exclude(("n", "y")))


def test_sizes_may_be_fixed_or_left_open():
    td = TensorDict({"x": torch.ones(2, 3, 4)}, [2])
    field = FieldSchema("tensor", torch.float32, (None, None, 4))
    Schema({"x": field}).check(td)
    assert refused(Schema({"x": field._replace(shape=(None, None, 5))}), td).reason == "bad_shape"
    assert refused(Schema({"x": field._replace(shape=(None, None))}), td).reason == "bad_shape"
    wide = pack_rows([{"x": [1, 2]}, {"x": [3]}])
    fixed = FieldSchema("jagged", torch.int64, (None, 2))
    assert refused(Schema({"x": fixed}), wide).detail.startswith(
        "expected shape (N, 2), found (N, *)"
    )


# --- how schemas may change --------------------------------------------------------------------


def test_an_old_batch_is_taken_under_a_new_schema_that_only_grew():
    new = Schema(
        {
            "ids": JAGGED,
            "reward": REWARD._replace(dtype=torch.float64),
            "tag": OBJECT,
            "extra": JAGGED,
        }
    ).with_optional("extra")
    new.check(SCHEMA)
    new.check(batch())
    assert refused(SCHEMA, new).path == "$.reward"
    required = Schema(dict(new.columns))
    assert refused(required, SCHEMA).reason == "no_such_field"
    # A batch of `new` may lack the column that `required` wants.
    assert refused(required, new).reason == "conflict"


def _values(dtype):
    """All values of up to 16 bits; of wider dtypes those at their edges, and many between."""
    if dtype.is_complex:
        part = _values(dtype.to_real())
        return torch.complex(part.double(), part.flip(0).double()).to(dtype)
    size = dtype.itemsize
    if size <= 2:
        count = 1 << 8 * size
        bits = np.arange(count, dtype=np.uint8 if size == 1 else np.uint16)
        return torch.from_numpy(bits.copy()).view(dtype)
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 256, (4096, size), dtype=np.uint8)
    edges = np.array([0, 1, -1], dtype=f"i{size}").view(np.uint8).reshape(-1, size)
    powers = (1 << np.arange(8 * size - 1, dtype=np.uint64)).astype(f"u{size}")
    around = np.concatenate([powers - 1, powers, ~powers, ~powers + 1]).astype(f"u{size}")
    bits = np.concatenate([bits, edges, around.view(np.uint8).reshape(-1, size)])
    return torch.from_numpy(np.ascontiguousarray(bits).reshape(-1)).view(dtype)


def _exact(values, wide):
    """Whether values come back bit for bit, signs of zeros included, NaNs as NaNs."""
    if not wide.is_complex and not wide.is_floating_point:
        return values.tolist() == values.to(wide).tolist()
    there = values.to(wide)
    if wide.is_complex:
        if values.dtype == torch.complex32:
            values = values.to(torch.complex64)
        pairs = [(values.real, there.real), (values.imag, there.imag)]
    else:
        pairs = [(values, there)]
    return all(
        _same(narrow.to(torch.float64).numpy(), found.to(torch.float64).numpy())
        for narrow, found in pairs
    )


def _same(a, b):
    return bool(((np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))).all())


_SORTS = [
    [name for name in TORCH_DTYPES if name in ("uint8", "uint16", "uint32", "uint64")]
    + ["int8", "int16", "int32", "int64"],
    [name for name in TORCH_DTYPES if name.startswith(("float", "bfloat")) and "_x" not in name],
    ["complex32", "complex64", "complex128"],
]


@pytest.mark.parametrize("names", _SORTS, ids=["integers", "floats", "complex"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_wider_dtypes_are_those_that_hold_every_value(names):
    """The table against casts of torch: what it lists is exact, and what it does not is not."""
    dtypes = {name: getattr(torch, name) for name in names if hasattr(torch, name)}
    for narrow, wide in itertools.permutations(dtypes, 2):
        exact = _exact(_values(dtypes[narrow]), dtypes[wide])
        assert exact == (wide in WIDER.get(narrow, ())), f"{narrow} to {wide}"
        if wide in WIDER.get(narrow, ()):
            assert torch.can_cast(dtypes[narrow], dtypes[wide])


def test_no_sort_of_dtype_becomes_another():
    for narrow, wider in WIDER.items():
        sort = next(names for names in _SORTS if narrow in names)
        assert set(wider) <= set(sort)


@given(torch_dtypes(), torch_dtypes())
def test_check_allows_exactly_the_table(expected, found):
    schema = Schema({"x": FieldSchema("tensor", expected, (None,))})
    other = Schema({"x": FieldSchema("tensor", found, (None,))})
    names = str(found).removeprefix("torch."), str(expected).removeprefix("torch.")
    if expected == found or names[1] in WIDER.get(names[0], ()):
        schema.check(other)
    else:
        assert refused(schema, other).reason == "bad_dtype"


# --- as values ---------------------------------------------------------------------------------

_names = st.text(max_size=4) | st.sampled_from(["\ud800", "a.b", "\n", ""])


@st.composite
def schemas(draw):
    name = _names | st.lists(_names, min_size=2, max_size=3).map(tuple)
    size = st.none() | st.integers(0, 2**40)
    field = st.builds(
        FieldSchema,
        st.sampled_from(["jagged", "tensor", "object", "tensordict"]),
        st.none() | torch_dtypes(),
        st.none() | st.lists(size, min_size=1, max_size=4).map(tuple),
    )
    columns = draw(st.dictionaries(name, field, max_size=5))
    optional = draw(st.sets(st.sampled_from(sorted(columns, key=repr)))) if columns else ()
    return Schema(columns, frozenset(optional))


@given(schemas(), st.sampled_from([None, 2]))
def test_json_gives_the_same_schema(schema, indent):
    text = schema.to_json(indent=indent)
    again = Schema.from_json(text)
    assert again == schema
    assert list(again) == list(schema)
    assert Schema.from_json(text.encode()).to_json(indent=indent) == text
    assert hash(again) == hash(schema)


@given(schemas())
def test_a_schema_is_a_value(schema):
    turned = Schema(dict(reversed(schema.columns.items())), schema.optional)
    assert turned == schema
    assert hash(turned) == hash(schema)
    assert pickle.loads(pickle.dumps(schema)) == copy.deepcopy(schema) == schema
    assert list(pickle.loads(pickle.dumps(schema))) == list(schema)
    schema.check(schema)
    assert len(str(schema).splitlines()) == len(schema) + 1
    assert Schema({**schema.columns, ("new", "new"): OBJECT}) != schema


@st.composite
def olden(draw, schema):
    """A schema that may become `schema`: of fewer, narrower and more definite columns."""
    columns = {}
    for name, (kind, dtype, shape) in schema.columns.items():
        if name in schema.optional and draw(st.booleans()):
            continue
        wide = str(dtype).removeprefix("torch.")
        narrower = [getattr(torch, n) for n, wider in WIDER.items() if wide in wider]
        dtype = draw(st.sampled_from([dtype, *narrower]))
        if shape is not None:
            drawn = (draw(st.integers(0, 9)) if size is None else size for size in shape)
            shape = draw(st.sampled_from([shape, tuple(drawn)]))
        columns[name] = FieldSchema(kind, dtype, shape)
    optional = [name for name in columns if name in schema.optional and draw(st.booleans())]
    return Schema(columns, frozenset(optional))


@given(schemas(), st.data())
def test_a_schema_may_change_more_than_once(newest, data):
    newer = data.draw(olden(newest))
    oldest = data.draw(olden(newer))
    newest.check(newer)
    newer.check(oldest)
    newest.check(oldest)


def test_a_schema_is_immutable():
    columns = {"ids": JAGGED}
    schema = Schema(columns)
    columns["reward"] = REWARD
    assert list(schema) == ["ids"]
    with pytest.raises(TypeError):
        schema.columns["ids"] = REWARD  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema.optional = ["ids"]  # type: ignore[misc]
    assert schema.with_optional("ids") != schema


def test_columns_of_the_batch_itself_have_one_form_of_name():
    assert Schema({("ids",): JAGGED}) == Schema({"ids": JAGGED})
    assert schema_of(batch())["ids"] == SCHEMA[("ids",)] == JAGGED
    with pytest.raises(ArgumentError, match="expected every column once"):
        Schema({("ids",): JAGGED, "ids": OBJECT})
    with pytest.raises(ArgumentTypeError, match=r"Schema\[name\]: expected the name of a column"):
        SCHEMA[["ids"]]  # type: ignore[index]
    with pytest.raises(ArgumentError, match="expected None or a dtype of the wire"):
        Schema({"ids": FieldSchema("jagged", [], None)})  # type: ignore[arg-type]
    with pytest.raises(ArgumentKeyError, match=r"Schema\[name\]\('idz'\): expected one of 'ids'"):
        SCHEMA["idz"]


def test_the_golden_json_and_the_table():
    schema = Schema(
        {
            "ids": JAGGED,
            "experts": FieldSchema("jagged", torch.uint8, (None, None, 40, 8)),
            "tag": OBJECT,
            "next": FieldSchema("tensordict", None, None),
            ("next", "odd name"): FieldSchema("tensor", torch.bfloat16, (None, 3)),
        },
        frozenset(["tag", "next"]),
    )
    golden = """{
 "schema": 1,
 "columns": [
  {"name": "ids", "kind": "jagged", "dtype": "int64", "shape": [null, null], "optional": false},
  {"name": "experts", "kind": "jagged", "dtype": "uint8", "shape": [null, null, 40, 8],
   "optional": false},
  {"name": "tag", "kind": "object", "dtype": null, "shape": null, "optional": true},
  {"name": "next", "kind": "tensordict", "dtype": null, "shape": null, "optional": true},
  {"name": ["next", "odd name"], "kind": "tensor", "dtype": "bfloat16", "shape": [null, 3],
   "optional": false}
 ]
}"""
    assert schema.to_json() == json.dumps(json.loads(golden))
    assert Schema.from_json(golden) == schema
    assert str(schema) == "\n".join(
        [
            "column            kind        dtype     shape",
            "ids               jagged      int64     (N, *)",
            "experts           jagged      uint8     (N, *, 40, 8)",
            "tag               object                               optional",
            "next              tensordict                           optional",
            "next['odd name']  tensor      bfloat16  (N, 3)",
        ]
    )


COLUMN = {"name": "a", "kind": "object", "dtype": None, "shape": None, "optional": False}


def document(**changes):
    return {"schema": 1, "columns": [{**COLUMN, **changes}]}


@pytest.mark.parametrize(
    ("found", "reason", "text"),
    [
        ("{", "bad_option", "expected JSON"),
        ("[" * 100_000, "bad_option", "expected JSON"),
        ([], "bad_option", "expected 'schema' and 'columns', found a list of 0|found \\[\\]"),
        ({"schema": 2, "columns": []}, "unknown_version", "expected version 1, found 2"),
        ({"schema": True, "columns": []}, "unknown_version", "found True"),
        ({"schema": 1, "columns": {}}, "bad_option", "expected a list of columns"),
        ({"schema": 1, "columns": [{"name": "a"}]}, "bad_option", "expected a column of dtype"),
        ({"schema": 1, "columns": [COLUMN, COLUMN]}, "bad_option", "expected every column once"),
        (document(dtype="int65"), "unknown_dtype", "expected a dtype of torch .*found 'int65'"),
        (document(dtype=["int64"]), "unknown_dtype", "expected a dtype of torch"),
        (document(name=3), "bad_option", "expected the name of a column"),
        (document(name=[]), "bad_option", "expected the name of a column"),
        (document(name=["a", [1]]), "bad_option", "expected the name of a column"),
        (document(kind=None), "bad_option", "expected a kind"),
        (document(kind="jaged"), "bad_option", "expected the kind jagged, .* found 'jaged'"),
        (document(shape=[None, -1]), "bad_option", "expected sizes from 0 on"),
        (document(shape=[True]), "bad_option", "expected sizes from 0 on"),
        (document(shape=[]), "bad_option", "expected sizes from 0 on"),
        (document(shape="N"), "bad_option", "expected sizes from 0 on"),
        (document(optional=None), "bad_option", "expected a bool"),
    ],
)
def test_json_that_is_no_schema(found, reason, text):
    found = found if isinstance(found, str) else json.dumps(found)
    with pytest.raises(ArgumentError, match=text) as caught:
        Schema.from_json(found)
    assert caught.value.reason == reason
    assert caught.value.path.startswith("Schema.from_json(text)")


@pytest.mark.parametrize(
    ("columns", "optional", "text"),
    [
        ([("a", OBJECT)], (), r"Schema\(columns\): expected a mapping, found list"),
        ({"a": torch.int64}, (), r"\$\.a: expected a FieldSchema, found dtype"),
        ({3: OBJECT}, (), "expected the name of a column"),
        ({"a": OBJECT}, "a", r"Schema\(optional\): expected a set of names"),
    ],
)
def test_what_is_no_schema_at_all(columns, optional, text):
    with pytest.raises(ArgumentTypeError, match=text):
        Schema(columns, optional)
    with pytest.raises(ArgumentTypeError, match="expected JSON text, found list"):
        Schema.from_json([columns])  # type: ignore[arg-type]
