"""Rectangles against an oracle: where cells go, how wide columns are, and which row is refused."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import ArgumentError, decode, encode, materialize, open_wire, select_rows
from jagcodec.testing import jagged_tensors, tensors
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import tensordicts

SIDES = ("right", "left", "left_right")
PADDED_WITH_ONES = (torch.int64, torch.uint8, torch.bfloat16, torch.bool, torch.complex64)


class RefusedError(Exception):
    """The reason, and the end of the path."""


class Cells(NamedTuple):
    """A column as lists: the bits of each row, the dim of its tokens, and the bits of a pad."""

    rows: list[Any]
    dim: int
    pad: Any


def lengths_of(cells):
    return [len(row) if cells.dim == 1 else len(row[0]) for row in cells.rows]


def cells_of(column, ones):
    """The rows of a column of tokens, which are padded with bits 0 or with 1."""
    ragged = [i for i, size in enumerate(column.shape) if not isinstance(size, int)]
    dim = ragged[0] if ragged else 1
    trailing = torch.Size(column.shape[dim + 1 :])
    count = trailing.numel()
    pad = torch.zeros(count * column.itemsize, dtype=torch.uint8).view(column.dtype)
    if ones:
        pad = torch.ones(count, dtype=torch.uint8).to(column.dtype)
    rows = rows_of(column) if ragged else bits(column)
    return Cells(rows, dim, bits(pad.view(trailing)))


def filled(row, dim, start, width, pad):
    """A row in its rectangle, whose first token is cell `start`."""
    if dim > 1:
        return [filled(each, dim - 1, start, width, pad) for each in row]
    return [pad] * start + row + [pad] * (width - start - len(row))


def placed(lengths, side, width, multiple, prompts, prompt_width):
    """Where each row begins, and how wide the rectangle is."""
    starts = [0] * len(lengths)
    needed = max(lengths, default=0)
    if side == "left_right":
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            if prompt > length:
                raise RefusedError("bad_length", f", row {i}")
        longest = max(prompts, default=0)
        prompt_width = prompt_width or longest
        if longest > prompt_width:
            raise RefusedError("row_too_long", f", row {prompts.index(longest)}")
        starts = [prompt_width - prompt for prompt in prompts]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        needed = max([prompt_width, *ends])
        if width and needed > width:
            raise RefusedError("row_too_long", f", row {ends.index(max(ends)) if ends else 0}")
    width = width or needed
    width += -width % multiple
    if side == "left":
        starts = [width - length for length in lengths]
    return starts, width


def rectangle(cells, places):
    starts, width = places
    return [
        filled(row, cells.dim, start, width, cells.pad)
        for row, start in zip(cells.rows, starts, strict=True)
    ]


@st.composite
def calls(draw):
    """A batch, options, and (side, column of tokens) by name of those that are padded."""
    rows = draw(st.integers(0, 4))
    columns: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["jagged", "grid", "flat"]))
        if kind == "jagged":
            columns[f"jagged{i}"] = draw(jagged_tensors(rows))
        elif kind == "grid":
            shape = (rows, draw(st.integers(0, 5)), *draw(st.lists(st.integers(0, 2), max_size=1)))
            columns[f"grid{i}"] = draw(tensors(shape))
        else:
            columns["flat"] = draw(tensors((rows,)))
    names = [*columns, "absent"]
    width, multiple = draw(st.sampled_from([0, 3, 4, 5, 9])), draw(st.integers(1, 4))
    options: dict[str, Any] = {"pad_to_seqlen": width, "pad_to_multiple": multiple}
    kept = draw(st.lists(st.sampled_from(names), max_size=1))
    options["keep_jagged"] = kept
    aligned = draw(st.none() | st.lists(st.sampled_from(names), max_size=2))
    options["token_aligned_fields"] = aligned
    side = draw(st.sampled_from(SIDES))
    by_name = draw(st.booleans())
    options["padding_side"] = {names[0]: side} if by_name else side
    prompts = prompt_width = None
    if side == "left_right":
        shortest = [2] * rows
        for column in columns.values() if draw(st.integers(0, 4)) else ():
            if column.dim() > 1:
                lengths = lengths_of(cells_of(column, False))
                shortest = list(map(min, shortest, lengths))
        prompts = [draw(st.integers(0, most)) for most in shortest]
        prompt_width = draw(st.sampled_from([0, 0, 1, 2, 3]))
        options["prompt_lengths"] = torch.tensor(prompts, dtype=torch.int64)
        options["prompt_width"] = prompt_width
    pads = draw(st.sets(st.sampled_from(names)))
    ones = {k for k in pads if k in columns and columns[k].dtype in PADDED_WITH_ONES}
    options["pad_value_dict"] = {**dict.fromkeys(sorted(ones), 1), "absent": "any"}
    masked = [name for name in columns if name.startswith("jagged") and name not in kept]
    mask = draw(st.sampled_from([None, *masked]))
    options["attention_mask_of"] = mask

    def expected():
        found: dict[str, Any] = {}
        masks = {}
        for name, column in columns.items():
            wanted = width
            if name in kept or column.dim() < 2:
                continue
            if name.startswith("grid"):
                held = column.shape[1]
                if aligned is not None and name not in aligned:
                    continue
                if aligned is not None and 0 < width < held:
                    raise RefusedError("row_too_long", name)
                if side != "left_right" or (by_name and name != names[0]):
                    wanted = max(width, held)
            cells = cells_of(column, name in ones)
            own = side if not by_name or name == names[0] else "right"
            lengths = lengths_of(cells)
            try:
                if name.startswith("jagged") and width and max(lengths, default=0) > width:
                    row = next(i for i, length in enumerate(lengths) if length > width)
                    raise RefusedError("row_too_long", f", row {row}")
                places = placed(lengths, own, wanted, multiple, prompts, prompt_width)
            except RefusedError as error:
                raise RefusedError(error.args[0], name + error.args[1]) from None
            found[name] = rectangle(cells, places)
            masks[name] = rectangle(Cells([[1] * n for n in lengths], 1, 0), places)
        return found, masks.get(mask)

    return TensorDict(columns, [rows]), options, expected


@settings(max_examples=300)
@given(calls(), st.data())
def test_rectangles_are_those_of_the_oracle(call, data):
    td, options, expected = call
    cut = data.draw(st.integers(0, len(td)))
    halves = [encode(select_rows(td, slice(0, cut))), encode(select_rows(td, slice(cut, None)))]
    narrow = encode(td, narrow=True)
    for batch in (td, dict(td.items()), decode(encode(td)), open_wire(narrow), narrow, halves):
        try:
            rectangles, mask = expected()
        except RefusedError as refused:
            with pytest.raises(ArgumentError) as caught:
                materialize(batch, **options)
            reason, where = refused.args
            name, *row = where.split(",")
            assert caught.value.reason == reason
            assert caught.value.path == ",".join([f"materialize({name!r})", *row])
            continue
        for out in (None, bytearray(20_000)):
            found = materialize(batch, **options, out=out)
            if mask is not None:
                assert found["attention_mask"].dtype == torch.bool
                assert bits(found["attention_mask"]) == mask
            assert [*found] == [*td.keys(), *(["attention_mask"] if mask is not None else [])]
            for name, column in td.items():
                if name in rectangles:
                    assert found[name].dtype == column.dtype
                    assert bits(found[name]) == rectangles[name]
                else:
                    assert_same(found[name], column)


@given(tensordicts(), st.sampled_from([0, 2, 4]), st.sampled_from(["right", "left"]), st.booleans())
def test_columns_of_every_kind_come_from_a_message_as_from_its_batch(td, width, side, narrow):
    frames = encode(td, narrow=narrow)
    for layout in ("padded", "jagged", "packed"):
        found: list[Any] = []
        options: dict[str, Any] = {"pad_to_seqlen": width, "layout": layout}
        options |= {"padding_side": side} if layout == "padded" else {}
        for batch in (decode(frames), open_wire(frames), [bytes(f) for f in frames], td):
            try:
                found.append(dict(materialize(batch, **options)))
            except (ArgumentError, TypeError) as error:  # as for a lazy stack
                found.append((type(error), str(error)))
        for other in found[1:]:
            assert_same(other, found[0])


# --- rows of several ragged dims ---------------------------------------------------------------

shapes_of_rows = st.integers(1, 3).flatmap(
    lambda rank: st.lists(st.tuples(*[st.integers(0, 3)] * rank), min_size=1, max_size=4)
)


@given(shapes_of_rows, st.sampled_from(["right", "left"]), st.integers(1, 4), st.integers(-2, 2))
def test_strided_rows_are_padded_in_every_dim(shapes, side, multiple, pad):
    parts = [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape in shapes]
    nested = torch.nested.nested_tensor(parts)
    rank = len(shapes[0])
    target = [max(shape[dim] for shape in shapes) for dim in range(rank)]
    ragged = [dim for dim in range(rank) if len({shape[dim] for shape in shapes}) > 1]
    token = ragged[0] if len(ragged) == 1 else 0
    target[token] += -target[token] % multiple
    expected = torch.full([len(shapes), *target], float(pad))
    for i, row in enumerate(parts):
        place: list[slice] = [slice(extent) for extent in row.shape]
        if side == "left":
            place[token] = slice(target[token] - row.shape[token], None)
        expected[i][tuple(place)] = row
    td = TensorDict({"x": nested}, [len(shapes)])
    options: dict[str, Any] = {"pad_to_multiple": multiple, "padding_side": side}
    for batch in (td, open_wire(encode(td))):
        assert_same(materialize(batch, pad_value_dict={"x": pad}, **options)["x"], expected)


def test_strided_rows_in_the_other_layouts():
    x = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)])
    y = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 1)])
    td = TensorDict({"x": x, "y": y}, [2])
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
