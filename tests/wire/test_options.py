"""What each option does to the bytes: which columns it reaches, how many it saves; and refusals."""

import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import ArgumentError, Limits, decode, encode, encode_rows, materialize, open_wire
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError, UnsupportedTypeError
from jagcodec.types import FieldSchema
from jagcodec.wire import compress, header, spec
from jagcodec.wire.header import read_header
from jagcodec.wire.spec import INTEGER_DTYPES, MOST_RUNS, NO_INDEX, PLAIN, Kind
from jagcodec.wire.stored.elided_rows import runs_at
from jagcodec.wire.stored.repeats import RUN_COST
from tests import strategies
from tests.helpers import Store, message, message_in, nested, node_of, receive, rollouts, size
from tests.oracle import assert_same
from tests.wire.readers import assert_reads, refused
from tests.wire.test_golden import BAD
from tests.wire.values import objects

# --- narrow ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "width"),
    [
        *((0, 1, 1 / 8), (0, 255, 1), (-128, 127, 1), (0, 256, 2), (-129, 0, 2), (0, 65_535, 2)),
        *((-128, 128, 2), (-(2**15), 2**15 - 1, 2), (0, 65_536, 3), (-(2**15) - 1, 0, 3)),
        *((0, 2**24 - 1, 3), (-(2**23), 2**23 - 1, 3), (0, 2**24, 4), (-(2**23) - 1, 0, 4)),
        *((0, 2**32 - 1, 4), (-(2**31), 2**31 - 1, 4), (0, 2**32, 8), (-(2**31) - 1, 0, 8)),
        *((-(2**63), 2**63 - 1, 8), (0, 2**64 - 1, 8)),
    ],
)
def test_integers_take_the_smallest_width_that_holds_them(low, high, width):
    cells = [*range(low, high, high // 50 - low // 50 + 1), high] * 16384
    for name in INTEGER_DTYPES - {"bool"}:
        dtype = getattr(torch, name)
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            tensor = torch.tensor(cells[:16384], dtype=dtype)
            assert size(encode(tensor)[1:]) == tensor.nbytes
            frames = encode(tensor, narrow=True)
            assert size(frames[1:]) == min(16384 * width, tensor.nbytes)
            assert_same(decode(receive(frames)), tensor)


@given(strategies.tensordicts())
def test_no_shorter_message_has_fewer_bytes_than_rows_that_need_one_each(td):
    flags = torch.ones(len(td), dtype=torch.int64)
    odd = NonTensorData("x", batch_size=[40])  # as many bytes as five numbers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "MAX_UNBACKED_ROWS", 1)
        both = TensorDict({"a": flags, "b": flags}, [len(td)])
        for value in (td, both, [flags, odd], objects(td, 3), objects(both)):
            try:
                encode(value)
            except UnsupportedTypeError:
                continue
            for narrow, elide in ((True, False), (False, True), (True, True)):
                assert_same(decode(encode(value, narrow=narrow, elide=elide)), value)


def test_more_flags_than_need_no_byte_each_are_sent_narrow_only_next_to_other_columns():
    flags = torch.zeros((1 << 24) + 64, dtype=torch.bool)
    batch = TensorDict({"flags": flags}, [len(flags)])
    for options in ({"narrow": True}, {"narrow": ["flags"]}, {"elide": True}):
        sent = encode(batch, **options)
        assert size(sent) >= len(flags)
        assert torch.equal(decode(sent)["flags"], flags)
    batch["ids"] = torch.arange(len(flags), dtype=torch.int8)
    assert len(flags) < size(encode(batch, narrow=True)) < 1.2 * len(flags)


def narrow_columns(frames):
    """The tensors of a message that are stored narrow: their names, those around them first."""
    opened = read_header(frames[0])

    def walk(node, name):
        if node.kind in (Kind.TENSOR, Kind.JAGGED):
            return {name} if opened.numbers[node.number + 2] != PLAIN else set()
        names = node.fields[-1] if node.kind in (Kind.MAP, Kind.TENSORDICT) else ()
        found = set()
        for i, child in enumerate(node.children):
            found |= walk(child, f"{name}.{names[i]}".lstrip(".") if names else name)
        return found

    return walk(opened.schema.root, "")


def batch():
    ids = nested([[1, 2, 3], [4, 5]])
    inner = TensorDict({"a": ids, "b": torch.arange(2), "f": torch.rand(2)}, [2])
    columns = {"a": ids, "b": torch.arange(2), "inner": inner, "f": torch.rand(2)}
    return TensorDict({**columns, "tag": NonTensorStack("x", "y")}, [2])


def dict_batch():
    ids = jagcodec.stack_or_nest([torch.ones(n, 4, dtype=torch.int64) for n in (3, 1)])
    inner = jagcodec.BatchedDataDict({"a": ids, "b": torch.arange(2)})
    columns = {"a": ids, "b": torch.arange(2), "inner": inner, "tag": ["x", "y"]}
    return jagcodec.BatchedDataDict(columns, meta_info={"a": 3})


@pytest.mark.parametrize("make", [batch, dict_batch])
@pytest.mark.parametrize(
    ("narrow", "names"),
    [
        (False, set()),
        (True, {"a", "b", "inner.a", "inner.b"}),
        ([], set()),
        (["a"], {"a"}),
        ({"a", "b"}, {"a", "b"}),
        (("b",), {"b"}),
        ([("inner", "a")], {"inner.a"}),
        ([("inner", "a"), ("b",)], {"inner.a", "b"}),
        (["inner"], {"inner.a", "inner.b"}),
        (["tag"], set()),
    ],
)
def test_columns_that_are_named_are_narrow_and_no_others(make, narrow, names):
    sent = make()
    frames = encode(sent, narrow=narrow)
    assert_same(decode(frames), sent)
    assert narrow_columns(frames) == names
    assert open_wire(frames)["a"].values().tolist() == sent["a"].values().tolist()


def test_names_are_those_of_columns_wherever_a_batch_is():
    tensor = torch.arange(9)
    value = {"batch": batch(), "a": tensor, "more": [tensor]}
    assert narrow_columns(encode(value, narrow=["a"])) == {"batch.a"}
    assert narrow_columns(encode(value, narrow=True)) > {"a", "more"}
    # Members of a lazy stack have the name of the stack.
    stack = LazyStackedTensorDict(*[TensorDict({"a": torch.arange(3)}, [])] * 2, stack_dim=0)
    td = TensorDict({"stack": stack, "a": torch.arange(2)}, [2])
    assert narrow_columns(encode(td, narrow=[("stack", "a")])) == {"stack.a"}
    # Tensors in rows follow their column, and what replaces a value is in none.
    td = TensorDict({"rows": NonTensorStack(tensor, tensor), "b": torch.arange(2)}, [2])
    assert size(encode(td, narrow=["rows"])) < size(encode(td, narrow=["b"]))
    value = {"x": [TensorDict({"a": tensor}, []), object()], "y": tensor}
    assert narrow_columns(encode(value, narrow=["a"], default=lambda _: tensor)) == {"x.a"}
    # One encoder sends batches, and commands that have no columns.
    assert decode(encode({"stop": True}, narrow=["x"])) == {"stop": True}


@pytest.mark.parametrize(
    "options",
    [
        *({"narrow": ["a"]}, {"narrow": ["b"]}, {"narrow": True}, {"checksum": True}),
        *({"elide": True}, {"compress": "zstd"}, {"compress": ("zstd", 3), "elide": True}),
    ],
)
def test_every_encoder_takes_every_option(options):
    columns = {"a": torch.zeros(2, 9000, dtype=torch.int64), "b": torch.arange(2)}
    lengths, aligned = torch.tensor([9000, 8000]), ["a"]
    td = jagcodec.pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=aligned)
    expected = message(encode(td, **options))
    assert expected != message(encode(td))
    of_columns = {"lengths": lengths, "token_aligned_fields": aligned, **options}
    for frames in (
        jagcodec.MsgpackEncoder(**options).encode(td),
        jagcodec.encode_fields(columns, **of_columns),
        encode_rows({"a": [[0] * 9000, [0] * 8000], "b": [0, 1]}, **options),
    ):
        assert message(frames) == expected


def test_names_that_are_not_columns_are_refused():
    names: Any = ["c", ("c",), ("a", "b"), ("inner", "c")]
    for name, sent in itertools.product(names, [batch(), dict_batch(), {"batch": batch()}]):
        with pytest.raises(ArgumentKeyError, match="expected one of 'a', 'b', 'inner'") as raised:
            encode(sent, narrow=["a", name])
        assert raised.value.path.startswith("narrow(")
    of_columns = partial(jagcodec.encode_fields, {"a": torch.ones(1, 3)}, lengths=[3])
    for call in (of_columns, partial(encode_rows, [{"a": [1, 2]}])):
        with pytest.raises(ArgumentKeyError, match="found 'x'"):
            call(narrow=["x"])


TENSOR = torch.arange(9)


@pytest.mark.parametrize("name", ["ids", "idz", ("inner", "ids")])
@pytest.mark.parametrize(
    "value",
    [
        *(TENSOR, {"ids": TENSOR}, {"a": [1, {"ids": TENSOR.numpy()}]}, [(b"x" * 999, TENSOR)]),
        *({1: TENSOR.float()}, [TENSOR[:3], TENSOR[3:]], TENSOR.to_sparse_coo()),
        *(np.array(["x", None]), slice(TENSOR, None), NonTensorData(TENSOR)),
        {"many": {f"column {i}": TENSOR for i in range(32)}},
    ],
    ids=str,
)
def test_names_for_tensors_outside_of_a_batch_are_refused(value, name):
    with pytest.raises(ArgumentKeyError, match=r"and no batch; pass narrow=True") as raised:
        encode(value, narrow=[name])
    assert raised.value.reason == "no_such_field"
    assert_same(decode(encode(value, narrow=[])), value)


@pytest.mark.parametrize(
    "value",
    [
        *(None, {"stop": True}, [b"x" * 999], {"weights": b"x" * 999, 1: (2, {3})}),
        *(TensorDict({}, [3]), [*range(99)], {"a": ("TENSOR", 48)}),
    ],
    ids=str,
)
def test_names_are_accepted_for_values_with_nothing_to_store_narrow(value):
    assert_same(decode(encode(value, narrow=["ids"])), value)


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_damage_is_named(compress):
    noise = torch.rand(5000)
    value = [torch.zeros(5000), noise, noise + 1]
    frames = receive(encode(value, checksum=True, compress=compress))
    for read in (decode, lambda frames: materialize([frames])):
        for i in range(2, 5):
            frames[i][5] ^= 1
            refused(read, frames, "bad_checksum", says=rf"frame {i}: .*CRC-32")
            frames[i][5] ^= 1
        moved = [*frames[:3], frames[4], frames[3]]
        refused(read, moved, says="in another place" if compress else "changed places")
        other = frames[0].replace(b"float32", b"float16")
        refused(read, [other, *frames[1:]], "bad_checksum", says=r"header: .*CRC-32")


# --- elide: what repeats is sent once ----------------------------------------------------------


def runs_of(frames, name):
    """Of each run of a column whether its rows begin "anywhere" or all at the "first" cell; None
    of a column that is sent as it is.
    """
    opened = open_wire(frames)
    leaf = message_in(opened).leaf(node_of(opened, name))
    if not leaf.runs:
        return None
    runs = runs_at(message_in(opened), leaf)
    return ["first" if run.index_buffer == NO_INDEX else "anywhere" for run in runs]


def assert_sent_once(td, at_most, **options):
    """`td` comes back, by both readers, from a message of so many bytes."""
    frames = encode(td, elide=True, **options)
    assert_same(decode(frames), td)
    assert_reads(message(frames), td)
    assert size(frames) < at_most
    return frames


RUNS: dict[str, Any] = {"prompts": ["anywhere"], "responses": None, "logprobs": None}
RUNS |= {name: ["anywhere", "anywhere"] for name in ("input_ids", "advantages")}
RUNS |= {f"{name}_mask": ["first"] for name in ("attention", "response", "loss")}
RUNS |= {name: ["first"] for name in ("position_ids", "rewards")}


@pytest.mark.parametrize("narrow", [False, True])
def test_a_batch_of_rollouts(narrow):
    td = rollouts()
    cells = td["responses"].values().numel() + td["prompts"].values().numel() // 4
    floor = cells * (2 if narrow else 8) + 2 * td["logprobs"].values().nbytes
    frames = assert_sent_once(td, floor + 12_000, narrow=narrow)
    assert {name: runs_of(frames, name) for name in RUNS} == RUNS
    # The head and the tail of a column may be columns after it.
    parts = td.select("responses", "input_ids", "prompts")
    assert_sent_once(parts, size(encode(parts.exclude("input_ids"), elide=True)) + 1000)


@pytest.mark.parametrize("systems", [1, 3])
def test_rows_of_one_prompt_share_what_they_begin_with(systems):
    """Without a column of prompts; the questions share a system prompt, or one of several."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 9, 100) for _ in range(systems)]
    asked = [np.concatenate([prompts[i % systems], rng.integers(0, 9, 150)]) for i in range(15)]
    rows = [np.concatenate([row, rng.integers(0, 9, 30)]) for row in asked for _ in range(4)]
    td = TensorDict({"ids": nested([rows[i] for i in rng.permutation(60)])}, batch_size=[60])
    # Fifteen questions, each with its system prompt, and sixty answers.
    frames = assert_sent_once(td, 8 * (15 * 250 + 60 * 30) + 4000)
    assert runs_of(frames, "ids") == ["anywhere", "anywhere"]


def test_steps_of_an_agent_are_sent_with_the_last_one():
    """Each step of an episode begins with all of the step before it; episodes share a prompt."""
    rng = np.random.default_rng(2)
    prompt, rows = rng.integers(0, 9, 200), []
    for _ in range(4):
        steps = [prompt, *(rng.integers(0, 9, 50) for _ in range(5))]
        rows += [np.concatenate(steps[: 2 + i]) for i in range(5)]
    assert_sent_once(TensorDict({"ids": nested(rows)}, batch_size=[20]), 8 * 4 * 450 + 2000)


@given(st.lists(st.integers(0, 4) | st.integers(0, 60), min_size=1, max_size=30))
def test_what_occurs_again_is_sent_once_where_that_pays(lengths):
    rng, rows = np.random.default_rng(3), len(lengths)
    longest, *made = cells = rng.integers(0, 1 << 40, (3, rows, 60))
    cells[:, 0, 0] = 0  # not all cells need eight bytes, but most
    heads = [longest[0, :n] for n in lengths]
    parts = [[row[:n] for row, n in zip(each, lengths, strict=True)] for each in made]
    parts += [[np.concatenate(pair) for pair in zip(*parts, strict=True)]]
    one, other, both = map(nested, parts)
    total = 8 * sum(lengths)
    cases = (
        ([nested(heads)], total - 8 * max(lengths), RUN_COST, ["first"]),
        ([one, one.clone()], total, RUN_COST + 8 * rows, ["anywhere"]),
        ([one, other, both], 2 * total, 2 * (RUN_COST + 8 * rows), ["anywhere"] * 2),
    )
    for (columns, saved, cost, runs), narrow in itertools.product(cases, (False, True)):
        td = TensorDict({f"c{i}": column for i, column in enumerate(columns)}, [rows])
        frames = encode(td, elide=True, narrow=narrow)
        assert runs_of(frames, f"c{len(columns) - 1}") == (runs if saved > cost else None)
        assert_same(decode(frames), td)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tail", [(), (3,), (3, 5)])
def test_rows_of_every_width_that_repeat(dtype, tail, eager):
    rng = np.random.default_rng(7)
    kinds = [rng.integers(0, 100, (n, *tail)) for n in (0, 1, 3, 5, 200, 201)]
    few = torch.as_tensor(rng.normal(size=(5, 16, *tail)) * 50).abs().to(dtype)
    if dtype.is_floating_point:
        few[0], few[1], few[2] = 0.0, -0.0, float("nan")
    cells = sum(kind.size for kind in kinds) * dtype.itemsize
    for column, most in (
        (nested(kinds * 80, dtype), cells + 480 * 16),
        (few[torch.from_numpy(rng.integers(0, 5, 480))], few.nbytes + 480 * 8),
    ):
        td = TensorDict({"a": column}, batch_size=[480])
        assert runs_of(assert_sent_once(td, most + 1024), "a") == ["anywhere"]


@pytest.mark.parametrize("first", [0, 300, 600])
def test_neighbours_that_are_equal_are_found_wherever_they_are(first):
    rows = np.random.default_rng(5).integers(0, 1 << 40, (900, 16))
    rows[first : first + 300 : 2] = rows[first + 1 : first + 300 : 2]
    for column in (nested(rows), torch.tensor(rows)):
        td = TensorDict({"a": column}, [900])
        assert runs_of(assert_sent_once(td, rows.nbytes), "a") == ["anywhere"]


@pytest.mark.parametrize("one_object", [True, False])
def test_payloads_that_occur_more_than_once(one_object):
    images: list[Any] = [{"pixels": torch.rand(60, 100) + i, "grid": [1, 2]} for i in range(4)]
    rows = [image if one_object else {**image} for image in images for _ in (0, 1)]
    at_most = 1.1 * sum(image["pixels"].nbytes for image in images)
    assert_sent_once({"mm": objects(*rows)}, at_most)
    frames = assert_sent_once(TensorDict({"mm": NonTensorStack(*rows)}, [8]), at_most)
    store = Store(frames)
    chosen = open_wire(store).rows([3, 2, 0])
    assert_same(chosen["mm"].tolist(), [rows[3], rows[2], rows[0]])
    assert store.fetched < at_most / 2 + 8000  # those of the rows
    again = decode(encode(chosen, elide=True)).get("mm").tolist()
    assert_same(again, [rows[3], rows[2], rows[0]])
    assert_same(decode(chosen.to_frames()).get("mm").tolist(), again)
    assert (again[0] is again[1]) == one_object


makers: list[Any] = [
    list,
    dict,
    lambda: {"t": "x" * 2000},
    lambda: ["y" * 500, {}],
    lambda: {1: "z"},
]


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(makers)), max_size=6), st.data())
def test_objects_are_one_object_only_if_they_were(kinds, data):
    """One byte is one object of CPython, and so are documents of empty lists."""
    pool = [maker() for copies, maker in kinds for _ in range(copies + 1)]
    rows = [row for row in pool for _ in range(data.draw(st.integers(1, 3)))]
    for elide in (False, True):
        frames = encode_rows(
            {"x": rows}, dtypes={"x": FieldSchema("object", None, None)}, elide=elide
        )
        found = open_wire(frames)["x"].tolist()
        assert found == rows
        one = [(i, j) for i in range(len(rows)) for j in range(i) if found[i] is found[j]]
        assert all(rows[i] is rows[j] for i, j in one)


def test_equal_texts_are_found_beside_rows_that_are_one_object():
    for shared in ([None, None], ["", ""], [7, 7], [[]] * 2, [{"a": 1}] * 2):
        texts = [str(i // 9) * 2000 for i in range(18)]
        td = TensorDict({"text": NonTensorStack(*shared, *texts)}, [20])
        assert_sent_once(td, 2 * 2000 + 800)


def test_long_texts_are_sent_once_and_short_ones_as_they_are():
    texts = [chr(97 + i // 4) * 2000 for i in range(12)]
    assert_sent_once(TensorDict({"text": NonTensorStack(*texts)}, [12]), 3 * 2000 + 600)
    short = TensorDict({"text": NonTensorStack(*"abcabc")}, batch_size=[6])
    assert encode(short, elide=True) == encode(short)


def test_what_is_chosen_of_a_message_that_shares_still_shares():
    td = rollouts()
    part = open_wire(encode(td, narrow=True, elide=True)).rows([5, 5, 0, 23, 5])
    assert size(part.to_frames()) < size(encode(part.to_tensordict())) / 2


def test_what_a_reader_would_not_take_is_sent_as_it_is(monkeypatch):
    """Many rows that are one large object, or one cell."""
    stack = NonTensorStack(*[{"text": "x" * 5000}] * 200)
    for value in (
        TensorDict({"mm": stack}, [200]),
        TensorDict({"zeros": nested([[0] * 1024] * 1024)}, [1024]),
    ):
        assert size(encode(value, elide=True)) < 20_000
        with monkeypatch.context() as patch:
            patch.setattr(header, "DEFAULT_LIMITS", Limits(expanded=100))
            assert encode(value, elide=True) == encode(value)
    # Rows that are equal become an object each: readers may take the numbers, but not the objects.
    texts = TensorDict({"mm": NonTensorStack(*[{"text": "x" * 5000} for _ in range(200)])}, [200])
    for limit in (0, 1 << 22, 1 << 30):
        limits = Limits(expanded=limit)
        monkeypatch.setattr(header, "DEFAULT_LIMITS", limits)
        frames = encode(texts, elide=True)
        assert (size(frames) < 20_000) == (limit == 1 << 30)
        assert_same(decode(frames, limits=limits), texts)
    # Documents count for more than their bytes only beyond what a message is always given.
    monkeypatch.setattr(header, "DEFAULT_LIMITS", Limits(expanded=0))
    image = torch.rand(60, 100)
    images = TensorDict({"mm": NonTensorStack(*[{"px": image.clone()} for _ in range(40)])}, [40])
    frames = encode(images, elide=True)
    assert size(frames) < 2 * image.nbytes
    assert_same(decode(frames, limits=Limits(expanded=0)), images)


AT = [0, 15, 16, 31, 32, 511, 512, 1999, 2000, 3967, 3968, 3984, 3999]


@pytest.mark.parametrize("at", AT)
def test_rows_that_are_equal_but_for_one_cell(at):
    made = np.tile(np.random.default_rng(0).integers(0, 1 << 40, 4000), (8, 1))
    made[:, at] = range(8)
    texts = ["x" * at + chr(97 + i % 3) + "x" * (3999 - at) for i in range(6)]
    arrays = [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]
    for td in (
        TensorDict({"a": nested(made)}, [8]),
        TensorDict({f"c{i}": nested([row[:2000], row[2000:]]) for i, row in enumerate(made)}, [2]),
        TensorDict({f"c{i}": torch.tensor(row) for i, row in enumerate(made)}, [4000]),
        TensorDict({"a": NonTensorStack(*texts)}, [6]),
        TensorDict({"a": NonTensorStack(*[{"text": text} for text in texts])}, [6]),
        TensorDict({"a": NonTensorStack(*arrays)}, [6]),
    ):
        for narrow in (False, True):
            assert_same(decode(encode(td, elide=True, narrow=narrow)), td)


def test_no_more_runs_are_written_than_readers_take():
    """Each column is the one before it and one more."""
    rng = np.random.default_rng(0)
    ends = [rng.integers(0, 1 << 40, (2, 200)) for _ in range(9)]
    columns = {"end0": nested(ends[0])}
    for i in range(1, len(ends)):
        columns[f"end{i}"] = nested(ends[i])
        columns[f"all{i}"] = nested(np.concatenate(ends[: i + 1], axis=1))
    td = TensorDict(columns, batch_size=[2])
    frames = encode(td, elide=True)
    found = [len(runs_of(frames, name) or []) for name in columns]
    assert max(found) == MOST_RUNS
    assert sum(map(bool, found)) == len(ends) - 2  # one of them is sent as it is
    assert_same(decode(frames), td)


# --- compressed frames -------------------------------------------------------------------------


def compressible():
    """Jagged columns that are large, and compress well or not at all."""
    lengths = torch.randint(0, 900, (400,)).tolist()
    columns = {
        "ids": nested([torch.arange(n) // 7 for n in lengths]),
        "noise": nested([torch.randint(1 << 62, (n,)) for n in lengths]),
        "mask": nested([torch.ones(n) for n in lengths], torch.bool),
        "reward": torch.arange(400.0),
    }
    return TensorDict(columns, batch_size=[400])


def test_what_does_not_shrink_is_sent_as_it_is():
    for value in (torch.ones(900), np.random.default_rng(1).bytes(100_000)):
        plain = encode(value, checksum=True)
        assert message(encode(value, compress="zstd", checksum=True)) == message(plain)
    # Frames that do not shrink are sent as they are, and so are small ones.
    noise, zeros = torch.randint(-(2**63), 2**63 - 1, (5000,)), torch.zeros(5000)
    frames = encode([noise, zeros, torch.zeros(8)], compress="zstd")
    assert [len(frame) for frame in frames[1:3]] == [32, 40_000]
    assert len(frames[3]) < 100
    assert frames[2].obj is not None
    assert np.shares_memory(np.asarray(frames[2]), noise.numpy())


@pytest.fixture
def decompressed(monkeypatch):
    """Notes the calls by which frames are decompressed."""
    calls = Mock(wraps=compress._decompressed)
    monkeypatch.setattr(compress, "_decompressed", calls)
    return calls


def test_a_range_takes_compressed_frames_whole_and_others_by_range(decompressed):
    value = compressible()
    frames = encode(value, compress="zstd")
    store = Store(frames)
    opened = open_wire(store)
    assert (store.fetched, decompressed.call_count) == (24 + len(frames[0]), 0)
    store.asked.clear()
    row = opened.rows([200])["noise"]  # as it is, but for the offsets
    assert_same(row.values(), value["noise"][200])
    read = read_header(frames[0])
    offsets = read.sent_sizes[read.groups[0].buffer]
    assert store.fetched == offsets + 8 * len(value["noise"][200])
    store.asked.clear()
    assert_same(opened.rows([3])["ids"].values(), value["ids"][3])
    assert store.fetched in read.sent_sizes
    # Frames that were fetched are known.
    store.asked.clear()
    for i in range(10):
        assert_same(opened.rows([i])["ids"].values(), value["ids"][i])
    assert (store.fetched, decompressed.call_count) == (0, 2)


@pytest.mark.parametrize("source", [lambda frames: frames, Store])
def test_what_was_read_twice_is_not_shared(source):
    """Frames are kept, and what is handed out may be written to."""
    frames = encode({"a": TensorDict({"x": torch.zeros(4, 2000)}, [4])}, compress="zstd")
    opened = open_wire(source(frames))
    first = opened.rows([3])["x"]
    first += 1
    assert opened.rows([2, 3])["x"].sum() == 0


def test_frames_in_memory_are_decompressed_only_if_asked_for(decompressed):
    expected = compressible()
    frames = encode(expected, compress="zstd")
    opened = open_wire(frames)
    assert not decompressed.called
    assert_same(opened.rows([7])["ids"].values(), expected["ids"][7])
    assert decompressed.call_count == 2  # its own, and that of the offsets
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda i: opened.rows([i])["ids"].values(), range(8)))
    for i, row in enumerate(rows):
        assert_same(row, expected["ids"][i])
    assert decompressed.call_count == 2
    assert_same(opened.to_tensordict(), expected)
    assert message(opened.to_frames()) == message(frames)
    read = read_header(frames[0])
    less = [size for sent, size in zip(read.sent_sizes, read.sizes, strict=True) if sent < size]
    assert sorted(call.args[1] for call in decompressed.mock_calls) == sorted(less)


def test_frames_are_shared_by_threads(monkeypatch, decompressed):
    """And whatever their number, equal values give equal bytes."""
    monkeypatch.setattr(compress, "_WORTH_A_THREAD", 1)
    value, sent = compressible(), []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        sent.append(message(frames := encode(value, compress="zstd")))
    assert sent[0] == sent[1] == sent[2]
    for read in (decode, materialize, lambda frames: materialize(open_wire(frames))):
        decompressed.reset_mock()
        read(frames)
        assert decompressed.called
    assert_same(decode(frames), value)
    damaged = receive(frames)
    damaged[2] = bytearray(len(damaged[2]))
    refused(decode, damaged, says=r"frame 2: expected")
    error = refused(lambda frames: materialize(open_wire(frames)), damaged)
    assert error.path.startswith("$.")
    assert error.path.endswith(" (frame 2)")


@pytest.mark.parametrize("copy", [None, True, False])
def test_what_comes_out_belongs_to_the_caller(copy):
    value = [torch.zeros(5000), torch.from_numpy(np.random.default_rng(0).random(5000))]
    frames = receive(encode(value, compress="zstd"), bytes if copy is None else bytearray)
    before = message(frames)
    first, second = decode(frames, copy=copy)
    first += 1
    if copy is not False:
        second += 1
        assert message(frames) == before
    assert_same(decode(frames, copy=True)[0], value[0])


NOT_NARROW: dict[str, Any] = {
    **{"int": 3, "NoneType": None, "str": "ids", "dict": {"ids": False}, "3": [3], "[]": [()]},
    **{"['ids', 1]": [("ids", 1)], "['ids']": [["ids"]]},
}
NOT_COMPRESSED: list[Any] = [
    *("gzip", "lz4", "", True, False, 3, b"zstd", ["zstd", 3], {"zstd": 3}, ("zstd",), ("lz4", 1)),
    *(("zstd", 20), ("zstd", -8), ("zstd", 1.0), ("zstd", True), ("zstd", 3, 4)),
]


def test_other_choices_are_refused():
    calls: Any = (partial(encode, batch()), partial(encode_rows, [{"a": 1}]))
    for call in calls:
        for found, choice in NOT_NARROW.items():
            text = re.escape(f"found {found}")
            with pytest.raises(ArgumentTypeError, match=rf"^narrow: .* a list of names.*{text}"):
                call(narrow=choice)
        for choice in NOT_COMPRESSED:
            with pytest.raises(ArgumentError, match=r"-7 to 19.* found .*compress='zstd'"):
                call(compress=choice)


def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch):
    value = {"zeros": torch.zeros(50_000)}
    frames = encode(value, compress="zstd")
    fields = encode(TensorDict({"zeros": torch.zeros(50, 1000)}, [50]), compress="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for call in (
        lambda: encode(value, compress="zstd"),
        lambda: decode(frames),
        lambda: open_wire(fields),
        lambda: open_wire(Store(fields)),
        lambda: materialize([fields, fields]),
    ):
        with pytest.raises(ArgumentError, match=r"pip install 'zstandard>=0\.22'"):
            call()
    # What is wrong with a message is said all the same, and before.
    refused(decode, BAD["compressed_to_more"][0])
    assert_same(decode(encode(value)), value)


def test_a_writer_makes_no_bombs(monkeypatch):
    """A message that default limits refuse is sent as it is."""
    value = torch.zeros(1 << 20, dtype=torch.uint8)
    beyond = (1 << 20) - 64 * size(encode(value, compress="zstd"))
    for limit, compresses in ((beyond, True), (beyond - 1, False)):
        limits = Limits(expanded=limit)
        monkeypatch.setattr(header, "DEFAULT_LIMITS", limits)
        frames = encode(value, compress="zstd")
        assert read_header(frames[0]).compressed is compresses
        assert_same(decode(frames, limits=limits), value)


@pytest.mark.parametrize(
    "options", [{}, {"narrow": True}, {"elide": True}, {"checksum": True}, {"compress": "zstd"}]
)
@pytest.mark.parametrize("cells", [8, 5000])
@pytest.mark.parametrize("jagged", [False, True])
def test_out_may_not_overlap_what_is_encoded_however_it_is_sent(options, cells, jagged):
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    column: Any = memory[: 8 * 2 * cells].view(torch.int64).view(2, cells)
    if jagged:
        flat, offsets = column.reshape(-1), torch.tensor([0, cells, 2 * cells])
        column = torch.nested.nested_tensor_from_jagged(flat, offsets)
    column.values().fill_(3) if jagged else column.fill_(3)
    td = TensorDict({"x": column, "y": torch.ones(2)}, [2])
    before = memory.clone()
    with pytest.raises(ArgumentError, match="apart from what is encoded"):
        encode(td, out=memory, **options)
    assert torch.equal(memory, before)
    size = encode(td, out=memory[1 << 19 :], **options)
    assert_same(decode(memory[1 << 19 :][:size].clone()), td)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_lacks_is_not_a_foreign_error(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    value = [torch.zeros(1 << 18), torch.ones(1 << 18)]
    frames = encode(value, compress="zstd")

    class NoMemory:
        def __init__(self, **_):
            pass

        def fail(self, *_, **__):
            raise zstandard.ZstdError("Allocation error : not enough memory")

        compress = decompress = fail

    monkeypatch.setattr(zstandard, "ZstdCompressor", NoMemory)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", NoMemory)
    with pytest.raises(ArgumentError, match="memory") as caught:
        encode(value, compress="zstd")
    assert caught.value.reason == "too_large"
    with pytest.raises(MemoryError, match=r"of frame \d: .*memory"):  # the message may be whole
        decode(frames)
