"""How wide `materialize` makes columns: one rule, whatever the rows of a batch happen to be."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    decode,
    encode,
    materialize,
    open_wire,
    stack_or_nest,
)
from jagcodec.errors import ArgumentKeyError
from tests.oracle import assert_same

SIDES = ("right", "left", "left_right")


def rows_from(lengths, start=1):
    """Rows of different numbers, so that none is taken for another or for a pad."""
    first = itertools.accumulate(lengths, initial=start)
    return [torch.arange(a, a + n) for a, n in zip(first, lengths, strict=False)]


def fetched(lengths, start=1, always_nest=False):
    """A batch as NeMo-RL's reader makes it: rows of one length are stacked, others are nested."""
    ids = rows_from(lengths, start)
    columns = {
        "ids": stack_or_nest(ids, always_nest=always_nest),
        "logprobs": stack_or_nest([row.float() / 8 for row in ids], always_nest=always_nest),
        "routed": stack_or_nest(
            [torch.stack([row, row + 1], dim=1) for row in ids], always_nest=always_nest
        ),
        "mask": torch.ones(len(lengths)),
    }
    return TensorDict(columns, [len(lengths)])


def padded(row, width, pad=0):
    return [*row.tolist(), *[pad] * (width - len(row))]


# --- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, ["ids", "logprobs", "routed", "mask"]])
@pytest.mark.parametrize("through", [lambda td: td, lambda td: open_wire(encode(td))])
def test_every_rank_gets_the_same_width(named, through):
    """Four ranks of one batch: one has rows of the full width, two have rows of one length."""
    shards = [[4, 4], [2, 8], [8, 8], [3, 3]]
    shapes = []
    for lengths in shards:
        td = fetched(lengths)
        assert td["ids"].is_nested == (len(set(lengths)) > 1)
        options: dict[str, Any] = {} if named is None else {"token_aligned_fields": named}
        batch = materialize(through(td), "padded", {"ids": -1}, 8, **options)
        shapes.append({name: tuple(column.shape) for name, column in batch.items()})
        assert batch["ids"].tolist() == [padded(row, 8, -1) for row in rows_from(lengths)]
    assert shapes == [{"ids": (2, 8), "logprobs": (2, 8), "routed": (2, 8, 2), "mask": (2,)}] * 4


batches = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4)


@given(batches, st.integers(6, 9), st.integers(1, 4), st.sampled_from(SIDES), st.data())
def test_a_shard_is_the_same_whether_its_rows_were_stacked_or_not(
    shards, width, multiple, side, data
):
    for lengths in shards:
        options: dict[str, Any] = {
            "pad_to_seqlen": width,
            "pad_to_multiple": multiple,
            "padding_side": side,
        }
        if side == "left_right":
            prompts = [data.draw(st.integers(0, length)) for length in lengths]
            longest = max(prompts)
            options |= {"prompt_lengths": torch.tensor(prompts), "pad_to_seqlen": width + longest}
        options |= {"attention_mask_of": "ids", "pad_value_dict": {"ids": -1, "logprobs": 0.5}}
        expected = materialize(fetched(lengths, always_nest=True), **options)
        for td in (fetched(lengths), open_wire(encode(fetched(lengths)))):
            columns = materialize(td, **options)
            assert_same(dict(columns), dict(expected))
            assert columns["ids"].shape[1] % multiple == 0


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=4),
    st.integers(0, 12),
)
def test_the_rule_is_that_of_nemo_rl(lengths, width):
    """Columns of two dims or more are padded on the right up to the width; wider ones stay."""
    rows = len(lengths)
    ragged = [torch.arange(1, 1 + a) for a, _ in lengths]
    width = width and max(width, *(a for a, _ in lengths))
    columns = {
        "ragged": stack_or_nest(ragged, always_nest=True),
        "flat": torch.arange(rows),
        "narrow": torch.ones(rows, 3, dtype=torch.int32),
        "grid": torch.ones(rows, 2, 3, 1),
        "wide": torch.ones(rows, 13),
        "none": torch.ones(rows, 0),
    }
    found = materialize(
        TensorDict(columns, [rows]), pad_to_seqlen=width, pad_value_dict={"grid": 7}
    )
    longest = max(len(row) for row in ragged)
    assert found["ragged"].tolist() == [padded(row, width or longest) for row in ragged]
    for name in ("flat", "wide"):
        assert found[name].data_ptr() == columns[name].data_ptr()
    pads = {"narrow": 0, "grid": 7, "none": 0}
    for name, pad in pads.items():
        column = columns[name]
        target = max(width, column.shape[1])
        assert found[name].shape == (rows, target, *column.shape[2:])
        assert (found[name][:, : column.shape[1]] == column).all()
        assert (found[name][:, column.shape[1] :] == pad).all()


def test_without_a_width_rectangles_are_left_alone():
    td = fetched([3, 3])
    cases: list[dict[str, Any]] = [{}, {"padding_side": "left"}, {"attention_mask_of": "ids"}]
    for options in cases:
        batch = materialize(td, **options)
        for name, column in td.items():
            assert batch[name].data_ptr() == column.data_ptr()
    mask = batch["attention_mask"]
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 3))
    assert mask.all()


@pytest.mark.parametrize("layout", ["jagged", "packed"])
def test_other_layouts_pad_nothing(layout):
    td = fetched([3, 3])
    for batch in (td, open_wire(encode(td))):
        assert_same(dict(materialize(batch, layout, pad_to_seqlen=8)), dict(td))


def test_widths_of_rectangles_are_rounded_up():
    td = TensorDict({"x": torch.ones(2, 5), "wide": torch.ones(2, 9)}, [2])
    found = (
        materialize(td, pad_to_multiple=4),
        materialize(td, pad_to_multiple=5),
        materialize(td, pad_to_seqlen=6, pad_to_multiple=4),
    )
    shapes = [{name: batch[name].shape[1] for name in batch} for batch in found]
    assert shapes == [{"x": 8, "wide": 12}, {"x": 5, "wide": 10}, {"x": 8, "wide": 12}]


# --- names -------------------------------------------------------------------------------------


def test_named_rectangles_follow_the_width():
    td = fetched([1, 2])
    td["mask"] = torch.tensor([[1, 0], [1, 1]], dtype=torch.int32)
    td["grid"] = torch.ones(2, 2)
    columns = materialize(td, "padded", {"mask": 7}, 4, token_aligned_fields=["mask", "absent"])
    assert columns["mask"].tolist() == [[1, 0, 7, 7], [1, 1, 7, 7]]
    assert columns["grid"].data_ptr() == td["grid"].data_ptr()
    left = materialize(
        td, pad_to_multiple=3, token_aligned_fields=["mask"], padding_side={"mask": "left"}
    )
    assert left["mask"].tolist() == [[0, 1, 0], [0, 1, 1]]
    same = materialize(td, token_aligned_fields=["mask"])
    assert same["mask"].data_ptr() == td["mask"].data_ptr()
    td["wide"] = torch.ones(2, 5)
    with pytest.raises(ArgumentError, match=r"'wide'.*pad_to_seqlen=4.*found 5"):
        materialize(td, pad_to_seqlen=4, token_aligned_fields=["wide"])


def test_names_of_nemo_rl_hold_a_column_of_one_dim():
    names = frozenset({"ids", "logprobs", "routed", "sample_mask", "absent"})
    td = fetched([2, 2])
    td["sample_mask"] = torch.ones(2)
    td["grid"] = torch.ones(2, 2)
    columns = materialize(td, pad_to_seqlen=8, token_aligned_fields=names)
    assert columns["sample_mask"].data_ptr() == td["sample_mask"].data_ptr()
    assert columns["grid"].shape == (2, 2)
    assert {columns[name].shape[1] for name in ("ids", "logprobs", "routed")} == {8}


@pytest.mark.parametrize("none", [(), [], frozenset()])
def test_an_empty_collection_means_jagged_columns_alone(none):
    td = fetched([1, 2])
    td["grid"] = torch.ones(2, 3, 4)
    options: dict[str, Any] = {"padding_side": "left_right", "prompt_lengths": torch.tensor([1, 2])}
    for more in ({}, options):
        columns = materialize(
            td, pad_to_seqlen=8, pad_to_multiple=3, token_aligned_fields=none, **more
        )
        assert columns["grid"].data_ptr() == td["grid"].data_ptr()
        assert columns["ids"].shape == (2, 9)
    with pytest.raises(ArgumentKeyError, match=r"='grid'.*token_aligned_fields"):
        materialize(td, attention_mask_of="grid", token_aligned_fields=none)


def test_rows_that_stay_jagged_stay_as_they_are_when_they_were_stacked():
    td = TensorDict({"ids": rows_of_ones(1, 2), "patches": torch.ones(2, 3, 4)}, [2])
    columns = materialize(td, pad_to_seqlen=8, keep_jagged=["patches"])
    assert columns["patches"].data_ptr() == td["patches"].data_ptr()
    named: dict[str, Any] = {"keep_jagged": ["patches"], "token_aligned_fields": ["patches"]}
    assert materialize(td, pad_to_seqlen=8, **named)["patches"].shape == (2, 3, 4)


def rows_of_ones(*lengths):
    return stack_or_nest([torch.ones(n) for n in lengths])


def test_nested_columns_follow_the_same_rule():
    inner = TensorDict({"ids": torch.ones(2, 3), "row": torch.ones(2)}, [2])
    td = TensorDict({"inner": inner, "ids": rows_of_ones(1, 2)}, [2])
    options: dict[str, Any] = {"pad_to_seqlen": 4, "pad_value_dict": {("inner", "ids"): 9}}
    for batch in (td, open_wire(encode(td))):
        columns = materialize(batch, **options)
        assert columns["inner"]["ids"].tolist() == [[1, 1, 1, 9]] * 2
        assert columns["inner"]["row"].tolist() == [1, 1]
        assert materialize(batch, token_aligned_fields=["ids"], **options)["inner"][
            "ids"
        ].shape == (2, 3)
        named = materialize(batch, token_aligned_fields=[("inner", "ids")], **options)  # type: ignore[list-item]
        assert named["inner"]["ids"].shape == (2, 4)


def test_prompts_that_are_longer_than_a_rectangle_are_an_error():
    """It is not said whether it has one cell per token, and its layout would be a guess."""
    td = fetched([4, 5])
    td["sizes"] = torch.ones(2, 2)
    prompts: dict[str, Any] = {"padding_side": "left_right", "prompt_lengths": torch.tensor([3, 1])}
    with pytest.raises(ArgumentError, match=r"'sizes'\), row 0.*another padding_side by name"):
        materialize(td, **prompts)
    for right in (
        {"token_aligned_fields": ()},
        {"padding_side": {"ids": "left_right", "logprobs": "left_right"}},
    ):
        assert materialize(td, **prompts | right)["sizes"].shape == (2, 2)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_what_cannot_be_widened_is_an_error_only_where_it_would_be(make):
    column = make(torch.eye(2))
    td = TensorDict({"x": column, "ids": rows_of_ones(1, 2)}, [2])
    assert materialize(td, pad_to_seqlen=2)["x"].layout == column.layout
    assert materialize(td, pad_to_seqlen=3, token_aligned_fields=())["x"].layout == column.layout
    for names in (None, ["x"]):
        with pytest.raises(ArgumentError, match=r"'x'\).*a strided rectangle.*3 cells wide"):
            materialize(td, pad_to_seqlen=3, token_aligned_fields=names)


@pytest.mark.parametrize(
    "column",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(3).expand(4, 3),
        torch.arange(24).view(4, 6)[:, ::2],
        torch.zeros(4, 0),
        torch.zeros(4, 2, 0),
        torch.zeros(4, 3, dtype=torch.complex64).conj(),
        torch.zeros(4, 3, dtype=torch.bool),
        torch.zeros(4, 3).to(torch.float8_e4m3fn),
    ],
)
def test_rectangles_of_any_strides_are_widened(column):
    for side in ("right", "left"):
        td = TensorDict({"x": column}, [4])
        found = materialize(td, pad_to_seqlen=5, padding_side=side)["x"]
        blank = torch.zeros(4, 5 - column.shape[1], *column.shape[2:], dtype=torch.uint8)
        parts = [column.resolve_conj().contiguous(), blank.to(column.dtype)]
        parts = [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]
        expected = torch.cat(parts if side == "right" else parts[::-1], dim=1)
        assert torch.equal(found.view(expected.dtype), expected)


def test_widened_rectangles_are_written_again_from_step_to_step():
    first = materialize(fetched([3, 3]), pad_to_seqlen=4, attention_mask_of="ids")
    places = {name: column.data_ptr() for name, column in first.items() if name != "mask"}
    for lengths in ([1, 2], [2, 2], [4, 1]):
        again = materialize(
            fetched(lengths), pad_to_seqlen=4, attention_mask_of="ids", out=dict(first)
        )
        assert {name: again[name].data_ptr() for name in places} == places
        assert again["ids"].tolist() == [padded(row, 4) for row in rows_from(lengths)]
        assert again["attention_mask"].sum(1).tolist() == lengths


def test_rectangles_are_widened_on_the_device_that_was_asked_for():
    columns = materialize(fetched([2, 2]), pad_to_seqlen=4, device="meta", attention_mask_of="ids")
    assert {column.device.type for column in columns.values()} == {"meta"}
    assert columns["ids"].shape == columns["attention_mask"].shape == (2, 4)


# --- messages ----------------------------------------------------------------------------------


@st.composite
def mixed_batches(draw):
    """Jagged, stacked, wide and flat columns, the nested ones among them, of few rows."""
    rows = draw(st.integers(0, 4))
    lengths = st.lists(st.integers(0, 6), min_size=rows, max_size=rows)

    def columns(depth):
        made = {}
        for i in range(draw(st.integers(0, 4))):
            kind = draw(st.sampled_from(["jagged", "equal", "flat", "grid", "strided", "inner"]))
            name = f"{kind}{i}"
            if kind == "jagged":
                shared = draw(lengths)
                made[name] = stack_or_nest(
                    [row.to(torch.int32) for row in rows_from(shared)] or [torch.ones(0)],
                    always_nest=True,
                )
                made[name] = made[name] if rows else torch.ones(0, 2)
            elif kind == "equal":
                made[name] = torch.arange(rows * 3).view(rows, 3)
            elif kind == "flat":
                made[name] = torch.ones(rows, dtype=torch.float16)
            elif kind == "grid":
                made[name] = torch.ones(rows, draw(st.integers(0, 9)), 2)
            elif kind == "strided" and rows:
                shapes = [
                    draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) for _ in range(rows)
                ]
                made[name] = torch.nested.nested_tensor([torch.ones(shape) for shape in shapes])
            elif kind == "inner" and depth:
                made[name] = TensorDict(columns(depth - 1), [rows])
        return made

    return TensorDict(columns(1), [rows])


@given(
    mixed_batches(),
    st.sampled_from([0, 6, 8]),
    st.integers(1, 4),
    st.sampled_from(SIDES),
    st.sampled_from([None, (), ("equal0", "grid0", "flat0", "jagged0", "strided0")]),
    st.data(),
)
def test_a_message_and_its_batch_are_of_the_same_widths(td, width, multiple, side, names, data):
    options: dict[str, Any] = {
        "pad_to_seqlen": width,
        "pad_to_multiple": multiple,
        "padding_side": side,
    }
    options |= {"token_aligned_fields": names, "keep_jagged": ["jagged1", "grid1", "strided1"]}
    rows = td.batch_size[0]
    if side == "left_right":
        prompts = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
        options["prompt_lengths"] = torch.tensor(prompts, dtype=torch.int64)
    found = []
    frames = encode(td)
    for batch in (td, decode(frames), open_wire(frames)):
        try:
            found.append(materialize(batch, **options))
        except ArgumentError as error:
            found.append(str(error))
    for other in found[1:]:
        assert type(other) is type(found[0])
        if isinstance(other, BatchedDataDict):
            assert_same(dict(other), dict(found[0]))
        else:
            assert other == found[0]


# --- strided nested tensors ---------------------------------------------------------------------


def strided(*shapes, dtype=torch.float32):
    cells = [int(np.prod(shape)) for shape in shapes]
    parts = [torch.arange(1, 1 + n).to(dtype) for n in cells]
    return torch.nested.nested_tensor(
        [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    )


shapes_of_rows = st.integers(1, 3).flatmap(
    lambda rank: st.lists(st.tuples(*[st.integers(0, 3)] * rank), min_size=1, max_size=4)
)


@given(shapes_of_rows, st.sampled_from(["right", "left"]), st.integers(1, 4), st.integers(-2, 2))
def test_strided_rows_are_padded_in_every_dim(shapes, side, multiple, pad):
    nested = strided(*shapes)
    rank = len(shapes[0])
    widest = [max(shape[dim] for shape in shapes) for dim in range(rank)]
    ragged = [dim for dim in range(rank) if len({shape[dim] for shape in shapes}) > 1]
    token = ragged[0] if len(ragged) == 1 else 0
    target = list(widest)
    target[token] = -(-widest[token] // multiple) * multiple
    expected = torch.full([len(shapes), *target], float(pad))
    for i, row in enumerate(nested.unbind()):
        place: list[slice] = [slice(extent) for extent in row.shape]
        if side == "left":
            place[token] = slice(target[token] - row.shape[token], None)
        expected[i][tuple(place)] = row
    td = TensorDict({"x": nested}, [len(shapes)])
    options: dict[str, Any] = {
        "pad_value_dict": {"x": pad},
        "pad_to_multiple": multiple,
        "padding_side": side,
    }
    for batch in (td, open_wire(encode(td))):
        assert_same(materialize(batch, **options)["x"], expected)


def test_strided_rows_in_the_other_layouts():
    td = TensorDict({"x": strided((1, 2), (3, 2)), "y": strided((1, 2), (3, 1))}, [2])
    for batch in (td, open_wire(encode(td))):
        for columns in (
            materialize(batch, "jagged", pad_to_seqlen=3),
            materialize(batch, keep_jagged=["x", "y"]),
        ):
            assert_same(dict(columns), dict(td))
        for layout in ("padded", "jagged", "packed"):
            with pytest.raises(ArgumentError, match=r"'x'\), row 1.*pad_to_seqlen=2.*found 3"):
                materialize(batch, layout, pad_to_seqlen=2, keep_jagged=["y"])
        packed = materialize(batch, "packed", keep_jagged=["y"])["x"]
        assert packed.cu_seqlens.tolist() == [0, 1, 4]
        assert packed.values.shape == (4, 2)
        with pytest.raises(ArgumentError, match=r"'y'.*differ in one dim, found 2"):
            materialize(batch, "packed")
    found = materialize(td, pad_to_seqlen=4, attention_mask_of="x", device="cpu")
    assert found["attention_mask"].sum(1).tolist() == [1, 3]
    assert found["y"].shape == (2, 4, 2)


def test_strided_rows_without_dims_and_without_rows():
    scalars = torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)])
    assert materialize(TensorDict({"x": scalars}, [2]))["x"].tolist() == [1.0, 2.0]
    assert materialize(TensorDict({"x": scalars}, [2]), "jagged", pad_to_seqlen=1)["x"].is_nested
    none = torch.nested.nested_tensor([])
    assert materialize(TensorDict({"x": none}, [0]))["x"].shape == (0,)


# --- gradients ----------------------------------------------------------------------------------


def with_gradient(kind):
    """A column of two rows, and the leaves of the graph that it comes from."""
    rows = [torch.arange(1.0, 3.0), torch.arange(3.0, 6.0)]
    if kind == "rectangle":
        rows = [torch.arange(1.0, 4.0), torch.arange(4.0, 7.0)]
    leaves = [row.requires_grad_() for row in rows]
    doubled = [leaf * 2 for leaf in leaves]
    if kind == "rectangle":
        return torch.stack(doubled), leaves
    layout = torch.strided if kind == "strided" else torch.jagged
    return torch.nested.as_nested_tensor(doubled, layout=layout), leaves


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["jagged", "rectangle", "strided"])
def test_gradients_pass_through_a_rectangle(kind, side):
    column, leaves = with_gradient(kind)
    td = TensorDict({"x": column, "ids": torch.ones(2, 2)}, [2])
    found = materialize(td, pad_to_seqlen=4, padding_side=side, pad_value_dict={"x": -1})["x"]
    assert found.shape == (2, 4)
    assert found.requires_grad
    weights = torch.arange(1.0, 9.0).view(2, 4)
    (found * weights).sum().backward()
    for i, leaf in enumerate(leaves):
        place = slice(len(leaf)) if side == "right" else slice(4 - len(leaf), None)
        assert found[i, place].tolist() == (leaf * 2).tolist()
        assert leaf.grad.tolist() == (weights[i, place] * 2).tolist()
    with torch.no_grad():
        cut = materialize(td, pad_to_seqlen=4, padding_side=side, pad_value_dict={"x": -1})["x"]
    assert not cut.requires_grad
    assert cut.tolist() == found.tolist()


@pytest.mark.parametrize("kind", ["jagged", "strided"])
def test_gradients_pass_through_packed_columns(kind):
    column, leaves = with_gradient(kind)
    packed = materialize(TensorDict({"x": column}, [2]), "packed")["x"]
    packed.values.sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[2, 2], [2, 2, 2]]


@pytest.mark.parametrize("kind", ["jagged", "rectangle", "strided"])
def test_what_autograd_follows_is_not_written_over_other_memory(kind):
    td = TensorDict({"x": with_gradient(kind)[0]}, [2])
    for out in (bytearray(1000), {"x": torch.zeros(2, 4)}):
        with pytest.raises(ArgumentError, match=r"materialize\(out\)\['x'\].*torch.no_grad"):
            materialize(td, pad_to_seqlen=4, out=out)
        with torch.no_grad():
            materialize(td, pad_to_seqlen=4, out=out)
    assert materialize(td, pad_to_seqlen=4, out={})["x"].requires_grad


def test_gradients_that_torch_cannot_pad_are_an_error():
    values = torch.ones(3).to(torch.float8_e5m2).requires_grad_()
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    with pytest.raises(ArgumentError, match=r"'x'\).*float8_e5m2.*detach"):
        materialize(TensorDict({"x": column}, [2]))
