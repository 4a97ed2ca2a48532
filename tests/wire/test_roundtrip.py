"""What goes in comes out, by every way and with all options: types, layout, order and bits."""

import itertools
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import jagcodec
from jagcodec import decode, encode, encode_fields, materialize, open_wire, select_rows, to_blob
from jagcodec.errors import ArgumentTypeError, UnsupportedTypeError
from jagcodec.stdlib import register_stdlib_types
from jagcodec.testing import jagged_batches, jagged_tensors, tensors
from jagcodec.wire.dtypes import NAME_OF_DTYPE
from jagcodec.wire.spec import TORCH_ITEMSIZES
from jagcodec.wire.torch_dtypes import TORCH_NAMES
from tests import strategies
from tests.helpers import Store, at_odd_address, message, nested, receive, size
from tests.oracle import assert_same
from tests.strategies import arrays, indices, numpy_scalars, repeating_batches, tensordicts, trees
from tests.wire.readers import OPTIONS, assert_reads
from tests.wire.values import KINDS, NUMPY, PYTHON, REGISTERED, STDLIB, TORCH, as_it_arrives

WAYS = {
    "as sent": decode,
    "received": lambda frames: decode(receive(frames)),
    "read-only": lambda frames: decode(tuple(receive(frames, bytes))),
    "copied": lambda frames: jagcodec.MsgpackDecoder(copy=True).decode(receive(frames)),
    "at odd addresses": lambda frames: decode([at_odd_address(frame, 3) for frame in frames]),
    "in one buffer": lambda frames: decode(to_blob(frames)),
    "in one buffer with more": lambda frames: decode(bytes(to_blob(frames)) + b"more"),
    "sent again": lambda frames: decode(encode(decode(receive(frames)), elide=True)),
}
READS = {
    "open": lambda frames: open_wire(receive(frames, bytes)).to_tensordict(),
    "open by ranges": lambda frames: open_wire(Store(frames)).to_tensordict(),
    "open and encoded": lambda frames: decode(encode(open_wire(to_blob(frames)), narrow=True)),
    "open and sent on": lambda frames: decode(open_wire(Store(frames)).to_frames()),
    "open and pickled": lambda frames: pickle.loads(
        pickle.dumps(open_wire(receive(frames)))
    ).to_tensordict(),
}

# Their fixtures are the same for all examples.
WITH_FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
OF_ANY_SIZE = pytest.mark.parametrize("paying", ["if it pays", "always"], indirect=True)


@pytest.fixture(autouse=True)
def _stdlib_types():
    register_stdlib_types()


@pytest.fixture
def paying(request):
    """Whether `elide` and `compress` change a message only if it becomes smaller."""
    if request.param == "always":
        request.getfixturevalue("eager")


def assert_arrives(value, expected, ways):
    for options, way in itertools.product(OPTIONS, ways):
        assert_same(ways[way](encode(value, **options)), expected, f"{way}, {options}: $")


# --- named values ------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [PYTHON, TORCH, NUMPY, STDLIB, KINDS, REGISTERED])
def test_every_value_by_every_way_with_all_options(values, eager):
    for make in values.values():
        value = make()
        assert_arrives(value, as_it_arrives(value), WAYS)
        for options in OPTIONS if values in (PYTHON, TORCH, NUMPY) else []:
            assert_reads(message(encode(value, **options)), value)


# With sparse tensors, lazy stacks or grids of objects in them.
WITHOUT_CHOICE = {
    *("column_of_ragged_tensorclasses", "column_of_grids"),
    *("leaves_of_every_kind", "sparse_columns"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_batch_that_is_opened(name):
    value = KINDS[name]()
    expected = as_it_arrives(value)
    if type(expected) is not TensorDict or not expected.batch_dims:
        return
    assert_arrives(value, expected, READS)
    if name in WITHOUT_CHOICE:
        for choose in (
            lambda: open_wire(encode(value)).rows([1, 0]).to_tensordict(),
            lambda: select_rows(decode(encode(value)), [1, 0]),
        ):
            with pytest.raises(jagcodec.ArgumentError) as refused:
                choose()
            assert refused.value.reason == "bad_option"
    elif value.batch_size[0] > 1:
        chosen = open_wire(encode(value)).rows([1, 0])
        assert_same(chosen.to_tensordict(), select_rows(decode(encode(value)), [1, 0]))


def test_no_torch_dtype_is_forgotten():
    refused = {"qint8", "qint32", "quint8", "quint2x4", "quint4x2"}
    refused.add("bcomplex32")  # new in torch 2.14
    known = {str(v).removeprefix("torch.") for v in vars(torch).values() if type(v) is torch.dtype}
    assert known - refused <= set(TORCH_ITEMSIZES)


def test_a_dtype_of_a_later_torch_is_refused_with_a_remedy(monkeypatch):
    later = torch.complex32
    monkeypatch.delitem(TORCH_NAMES, later)
    monkeypatch.delitem(TORCH_ITEMSIZES, "complex32")
    monkeypatch.setitem(NAME_OF_DTYPE, later, None)
    cells, offsets = torch.zeros(3, dtype=later), torch.tensor([0, 1, 3])
    jagged = torch.nested.nested_tensor_from_jagged(cells, offsets)
    batch = TensorDict({"x": jagged}, [2])
    rows = [{"x": row} for row in jagged.unbind()]
    sent = [cells, jagged, [cells[:1], cells[1:]], batch, cells.new_zeros(2).to_sparse()]
    calls: list[Any] = [partial(encode, {"x": value}, narrow=True, elide=True) for value in sent]
    calls += [partial(encode, {"x": value}) for value in sent]
    calls += [lambda: encode(jagcodec.pack_rows(rows)), lambda: jagcodec.encode_rows(rows)]
    calls += [lambda: open_wire(batch).to_frames()]
    for call in calls:
        with pytest.raises(UnsupportedTypeError, match=r"^\$\.x.*32; convert it with \.to\(\)$"):
            call()
    schema = jagcodec.types.FieldSchema("jagged", later, (None, None))
    refused = jagcodec.ArgumentError, ArgumentTypeError
    for dtype in (later, schema):
        with pytest.raises(refused, match=r"\['x'\].*can be encoded.*complex32"):
            jagcodec.pack_rows([{"x": [1.0]}], dtypes={"x": dtype})
    # What stays in memory is moved bit by bit.
    padded = materialize(batch, out={"x": torch.ones(2, 2, dtype=later)})
    assert padded["x"].dtype == jagcodec.plan_packing([1, 2]).pack(jagged).dtype == later


def test_a_default_device_changes_nothing():
    values = [make() for name, make in TORCH.items() if "jagged" in name or "nested" in name]
    values += [torch.eye(3), torch.eye(3)[:0], torch.eye(3).to_sparse().coalesce()]
    frames = encode(values)
    with torch.device("meta"):
        assert message(encode(values)) == message(frames)
        back = decode(frames)
    assert_same(back, values)


def test_a_tensor_without_memory():
    assert decode(encode(torch._efficientzerotensor((2, 3)))).tolist() == [[0.0] * 3] * 2


def test_gradients_are_not_sent():
    leaf = torch.nn.Parameter(torch.ones(2))
    leaf.grad = torch.ones(2)
    back = decode(encode([leaf, leaf * 2]))
    assert [(type(t), t.requires_grad) for t in back] == [(torch.Tensor, False)] * 2


def test_the_longest_and_the_shortest_row_are_known():
    """Without them, torch pads to the sum of all lengths."""
    td = TensorDict({"bare": TORCH["jagged"](), "wide": TORCH["jagged_in_dim_2"]()}, [])
    back = decode(encode(td))
    assert torch.nested.to_padded_tensor(back["bare"], 0).shape == (3, 2)
    assert {"_max_seqlen", "_min_seqlen"} <= set(dir(back["wide"]))
    assert (back["wide"]._max_seqlen, back["wide"]._min_seqlen) == (3, 2)


def test_offsets_of_any_stride_are_read():
    td = TensorDict({"a": TORCH["jagged_by_strided_offsets"]()}, batch_size=[2])
    assert materialize(td)["a"].tolist() == [[0, 1, 0], [2, 3, 4]]


# --- any value ---------------------------------------------------------------------------------


def values():
    return st.one_of(
        repeating_batches(),
        *(trees(), strategies.stdlib_values(), arrays(), numpy_scalars(), jagged_tensors()),
        *(strategies.sparse_tensors(), strategies.strided_nested_tensors(), tensordicts()),
        tensordicts(st.one_of(arrays(), tensors(), tensordicts())),
        st.lists(tensors(), max_size=4).map(lambda tensors: tensors * 2),
    )


@OF_ANY_SIZE
@pytest.mark.usefixtures("paying")
@settings(WITH_FIXTURES, max_examples=150)
@given(values(), st.sampled_from(OPTIONS), st.sampled_from(sorted(WAYS)))
def test_any_value(value, options, way):
    frames = encode(value, **options)
    assert_same(WAYS[way](frames), value)
    assert message(encode(value, **options)) == message(frames)
    assert message(encode(decode(frames), **options)) == message(frames)


@settings(max_examples=300)
@given(strategies.tensors_over_one_memory(), st.sampled_from(OPTIONS), st.sampled_from([*WAYS]))
def test_tensors_over_one_memory(value, options, way):
    """They may begin at one address and end at several, with storages of their own or shared."""
    assert_same(WAYS[way](encode(value, **options)), value)
    assert_same(decode(encode(decode(encode(value)), **options)), value)


@st.composite
def batches_that_repeat_a_little(draw):
    """Columns of rows that others have too, wholly or in part; to say so costs about as much."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    rows, cells = draw(st.sampled_from([(1, 60), (3, 60), (6, 60), (6, 9), (40, 9), (300, 2)]))
    most, dtype = draw(st.sampled_from([(200, torch.uint8), (200, torch.int64), (1 << 40, None)]))
    longest = rng.integers(0, most, 60)
    heads = [longest[:n] for n in rng.integers(0, cells, rows).tolist()]
    tails = [rng.integers(0, most, n) for n in rng.integers(0, cells, rows).tolist()]
    picked = rng.integers(0, draw(st.integers(1, rows)), rows).tolist()
    columns = {
        **{"heads": heads, "tails": tails, "again": tails, "some": [tails[i] for i in picked]},
        "both": [np.concatenate(pair) for pair in zip(heads, tails, strict=True)],
    }
    names = draw(st.lists(st.sampled_from(sorted(columns)), unique=True))
    grid = torch.tensor(rng.integers(0, most, (rows, draw(st.integers(1, 40))))[picked])
    texts = [{"text": "x" * 50 * len(head)} for head in heads]
    batch = {"grid": grid, "texts": NonTensorStack(*texts)} if draw(st.booleans()) else {}
    columns = {name: nested(columns[name], dtype or torch.int64) for name in names}
    return TensorDict({**batch, **columns}, [rows])


@settings(max_examples=400)
@given(st.one_of(values(), *[batches_that_repeat_a_little()] * 10), st.sampled_from(OPTIONS))
def test_no_option_makes_a_message_larger(value, options):
    """`narrow` and `elide` are decided before frames are compressed, so they are compared there."""
    without = {name: how for name, how in options.items() if name != "compress"}
    assert size(encode(value, **options)) <= size(encode(value, **without))
    for less in ("narrow", "elide"):
        with_less = {name: how for name, how in without.items() if name != less}
        assert size(encode(value, **without)) <= size(encode(value, **with_less))


@OF_ANY_SIZE
@pytest.mark.usefixtures("paying")
@settings(WITH_FIXTURES, max_examples=100)
@given(trees() | tensordicts(trees(max_leaves=3)), st.sampled_from(OPTIONS))
def test_the_second_reader_reads_any_value(value, options):
    frames = message(encode(value, **options))
    assert_reads(frames, value)
    assert_reads(bytes(to_blob(frames)) + b"page", value)


@given(trees(max_leaves=4), st.sampled_from(OPTIONS), st.booleans())
def test_memory_and_files_hold_any_value(tmp_path_factory, value, options, mmap):
    blob = to_blob(encode(value, **options))
    memory = np.full(len(blob) + 5, 0xAA, dtype=np.uint8)
    assert encode(value, out=memory, **options) == len(blob)
    assert memory[: len(blob)].tobytes() == blob
    assert memory[len(blob) :].tolist() == [0xAA] * 5
    path = tmp_path_factory.mktemp("files") / "value.jag"
    jagcodec.dump(value, path, **options)
    assert path.read_bytes() == blob
    assert_same(jagcodec.load(path, mmap=mmap), value)


# --- rows of any batch -------------------------------------------------------------------------


@given(jagged_batches(), st.sampled_from(OPTIONS), st.data())
def test_any_columns_and_rows_of_any_batch(batch, options, data):
    names = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
    frames = encode_fields(batch.fields, **names, **options)
    packed = jagcodec.pack_jagged_fields(batch.fields, **names)
    assert message(frames) == message(encode(packed, **options))
    memory = bytearray(len(to_blob(frames)))
    assert encode_fields(batch.fields, out=memory, **names, **options) == len(memory)
    assert_same(decode(memory), packed)

    rest = open_wire(frames).rows(slice(1, None))
    assert_same(decode(rest.to_frames()), select_rows(packed, slice(1, None)))

    columns = data.draw(st.permutations(sorted(batch.fields)))[: data.draw(st.integers(0, 3))]
    index, rows = data.draw(indices(len(batch.lengths)))
    part = open_wire(to_blob(frames) + b"secret").rows(index).select(columns)
    assert (part.fields, part.batch_size) == (tuple(columns), (len(rows),))
    td = part.to_tensordict()
    assert_same(td, select_rows(packed, rows).select(*columns))
    sent = part.to_frames()
    assert_same(decode(sent), td)
    assert not any(b"secret" in bytes(frame) for frame in sent)


@pytest.mark.usefixtures("eager")
@settings(WITH_FIXTURES, max_examples=120)
@given(repeating_batches(), st.booleans(), st.data())
def test_any_rows_of_any_batch_that_repeats(td, narrow, data):
    frames = message(encode(td, narrow=narrow, elide=True))
    assert_same(decode(frames), td)
    assert_reads(frames, td)
    index, rows = data.draw(indices(len(td)))
    for source in (frames, Store(frames)):
        part = open_wire(source).rows(index)
        assert_same(part.to_tensordict(), select_rows(td, rows))
        assert_same(decode(part.to_frames()), select_rows(td, rows))
    assert_same(dict(materialize(frames)), dict(materialize(td)))
