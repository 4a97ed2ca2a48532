"""Wire batch to trainer columns: where cells go, layouts, pads, memory, gradients, refusals."""

import functools
import itertools
import math
import pickle
import warnings
from typing import Any, NamedTuple, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import (
    decode,
    encode,
    materialize,
    open_wire,
    plan_micro_batches,
    plan_packing,
    select_rows,
    stack_or_nest,
    to_blob,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, JagcodecError
from jagcodec.testing import jagged_tensors, tensors
from jagcodec.types import Layout, PackedColumn
from jagcodec.wire.spec import TORCH_ITEMSIZES
from tests.helpers import MESSAGES, address, make_batch, nested, rollout
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import tensordicts

SIDES = ("right", "left", "left_right")
DTYPES = [name for name in TORCH_ITEMSIZES if hasattr(torch, name)]
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
    placed_rows = zip(cells.rows, starts, strict=True)
    return [filled(row, cells.dim, start, width, cells.pad) for row, start in placed_rows]


@st.composite
def calls(draw):
    """A batch, options, the names of masks, and the rectangles and masks to be found by name."""
    rows = draw(st.integers(0, 4))
    shapes = st.tuples(st.just(rows), st.integers(0, 5), st.integers(0, 2))
    kinds = {
        "jagged": jagged_tensors(rows),
        "grid": (shapes | shapes.map(lambda shape: shape[:2])).flatmap(tensors),
        "flat": tensors((rows,)),
    }
    order = draw(st.lists(st.sampled_from([*kinds]), min_size=1, max_size=4))
    columns = {f"{kind}{i}": draw(kinds[kind]) for i, kind in enumerate(order)}
    names = [*columns, "absent"]
    named, sides = st.sampled_from(names), st.sampled_from(SIDES)
    choices: dict[str, Any] = {
        "pad_to_seqlen": st.sampled_from([0, 3, 4, 5, 9]),
        "pad_to_multiple": st.integers(1, 4),
        "keep_jagged": st.lists(named, max_size=1),
        "token_aligned_fields": st.none() | st.lists(named, max_size=2),
        "padding_side": sides | sides.map(lambda side: {names[0]: side}),
    }
    options = draw(st.fixed_dictionaries({}, optional=choices))
    width, multiple = options.get("pad_to_seqlen", 0), options.get("pad_to_multiple", 1)
    kept, aligned = options.get("keep_jagged", []), options.get("token_aligned_fields")
    side = options.get("padding_side", "right")
    side_of = side if isinstance(side, dict) else dict.fromkeys(columns, side)
    prompts = prompt_width = None
    if "left_right" in side_of.values():
        held = [lengths_of(cells_of(c, False)) for c in columns.values() if c.dim() > 1]
        held = held if draw(st.integers(0, 4)) else []
        most = map(min, zip([2] * rows, *held, strict=True))
        prompts = [draw(st.integers(0, tokens)) for tokens in most]
        prompt_width = options["prompt_width"] = draw(st.sampled_from([0, 0, 1, 2, 3]))
        numbers = torch.tensor(prompts, dtype=torch.int64)
        forms = st.sampled_from(["prompts", numbers, prompts, tuple(prompts)])
        options["prompt_lengths"] = draw(forms)
        columns["prompts"] = numbers
    wanted = draw(st.sets(named))
    ones = {k for k in wanted if k in columns and columns[k].dtype in PADDED_WITH_ONES}
    options["pad_value_dict"] = {**dict.fromkeys(sorted(ones), 1), "absent": "any"}
    masked = [name for name in columns if name.startswith("jagged") and name not in kept]
    masks = {}
    if masked and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(masked), min_size=1, max_size=2, unique=True))
        masks = {name: f"mask of {name}" for name in chosen}
        options["attention_mask_of"] = masks
        if len(chosen) == 1 and draw(st.booleans()):
            options["attention_mask_of"], masks = chosen[0], {chosen[0]: "attention_mask"}

    def expected():
        found: dict[str, Any] = {}
        for name, column in columns.items():
            wanted, own = width, side_of.get(name, "right")
            if name in kept or column.dim() < 2:
                continue
            if name.startswith("grid"):
                held = column.shape[1]
                if aligned is not None and name not in aligned:
                    continue
                if aligned is not None and 0 < width < held:
                    raise RefusedError("row_too_long", name)
                if own != "left_right":
                    wanted = max(width, held)
            cells = cells_of(column, name in ones)
            lengths = lengths_of(cells)
            try:
                if name.startswith("jagged") and width and max(lengths, default=0) > width:
                    row = next(i for i, length in enumerate(lengths) if length > width)
                    raise RefusedError("row_too_long", f", row {row}")
                places = placed(lengths, own, wanted, multiple, prompts, prompt_width)
            except RefusedError as error:
                raise RefusedError(error.args[0], name + error.args[1]) from None
            found[name] = rectangle(cells, places)
            if name in masks:
                found[masks[name]] = rectangle(Cells([[1] * n for n in lengths], 1, 0), places)
        return found

    return TensorDict(columns, [rows]), options, [*masks.values()], expected


BUFFERS: list[Any] = [bytearray(20_000), np.empty(20_000, np.uint8), torch.empty(2500).double()]


@settings(max_examples=250)
@given(calls(), st.data())
def test_rectangles_are_those_of_the_oracle(call, data):
    td, options, masks, expected = call
    cut = data.draw(st.integers(0, len(td)))
    halves = [encode(select_rows(td, slice(0, cut))), encode(select_rows(td, slice(cut, None)))]
    narrow = encode(td, narrow=True)
    order = torch.tensor(data.draw(st.permutations(range(len(td)))), dtype=torch.int64)
    shuffled = open_wire(encode(select_rows(td, order)))
    for batch in (
        *(td, dict(td.items()), decode(encode(td)), open_wire(narrow), narrow),
        shuffled.rows(order.argsort()),
        *(halves, tuple(map(MESSAGES["blob"], halves)), [*map(MESSAGES["fetched"], halves)]),
    ):
        try:
            rectangles = expected()
        except RefusedError as refused:
            with pytest.raises(ArgumentError) as caught:
                materialize(batch, **options)
            reason, where = refused.args
            name, *row = where.split(",")
            assert caught.value.reason == reason
            assert caught.value.path == ",".join([f"materialize({name!r})", *row])
            continue
        made: dict[str, Any] = {}
        for out in (None, data.draw(st.sampled_from(BUFFERS)), made):
            found = materialize(batch, **options, out=out)
            assert [*found] == [*td.keys(), *masks]
            for name, column in found.items():
                if name not in rectangles:
                    assert_same(column, td[name])
                    continue
                assert column.dtype == (torch.bool if name in masks else td[name].dtype)
                assert bits(column) == rectangles[name]
                place, nbytes = column.data_ptr(), column.numel() * column.itemsize
                if name not in masks and column.shape == td[name].shape:
                    assert batch is not td or place == td[name].data_ptr()
                elif out is None:
                    memory = torch.ones(nbytes, dtype=torch.uint8)
                    made[name] = memory.view(column.dtype).view(column.shape)
                elif out is made:
                    assert place == made[name].data_ptr()
                elif nbytes:
                    assert place % 64 == 0
                    begin = out.data_ptr() if isinstance(out, torch.Tensor) else address(out)
                    assert begin <= place <= begin + 20_000 - nbytes


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


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.sampled_from([*DTYPES]), min_size=1, max_size=3),
    st.sampled_from([(), (2,), (0,)]),
    st.sampled_from([None, 1, -1.5, 1e300, "x"]),
    st.sampled_from([{}, {"narrow": True}, {"elide": True}]),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_small_messages_and_their_rows_are_padded_cell_by_cell(
    lengths, names, inner, pad, options, index
):
    dtypes = [getattr(torch, name) for name in names]
    columns: dict[str, Any] = {"reward": torch.arange(len(lengths))}
    for i, dtype in enumerate(dtypes):
        size = sum(lengths) * math.prod(inner) * dtype.itemsize
        cells = torch.arange(size, dtype=torch.uint8) % 2
        values = cells.view(dtype).view(sum(lengths), *inner)
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        columns[f"f{i}"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    batch = open_wire(encode(TensorDict(columns, batch_size=[len(lengths)]), **options))
    pads = {} if pad is None else {"f0": pad}
    index = [i for i in index if i < len(lengths)]
    for source, chosen in ((batch, range(len(lengths))), (batch.rows(index), index)):
        try:
            found = materialize(source, pad_value_dict=pads)
        except (ArgumentError, ArgumentTypeError):
            with pytest.raises(JagcodecError, match=r"materialize\('f0'\)"):
                materialize(source, pad_value_dict=pads)
            continue
        assert found["reward"].tolist() == [*chosen]
        width = max([lengths[i] for i in chosen], default=0)
        for i, dtype in enumerate(dtypes):
            pad_cell = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
            if i == 0 and pad is not None:
                pad_cell = torch.tensor([pad], dtype=dtype)
            rows = columns[f"f{i}"].unbind()
            padding = pad_cell.reshape(1, *[1] * len(inner)).expand(width, *inner)
            wanted = [[*rows[row].unbind(), *padding[lengths[row] :].unbind()] for row in chosen]
            assert found[f"f{i}"].shape == (len(chosen), width, *inner)
            assert [bits(cell) for row in wanted for cell in row] == [
                bits(cell) for row in found[f"f{i}"].unbind() for cell in row.unbind()
            ]


def test_plain_columns_come_from_a_store_as_from_their_batch():
    td = TensorDict({"ids": nested([[1, 2], [3]]), "reward": torch.ones(2)}, batch_size=[2])
    blob = to_blob(encode(td))
    store = open_wire(lambda offset, size: blob[offset : offset + size])
    assert_same(materialize(store), materialize(td))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 2))
def test_rows_whose_tokens_are_in_the_next_dim_are_not_widened_without_a_word(lengths, k, more):
    """Rows (k, n), nested in dim 1 because all are alike, beside rows of n tokens."""
    rows, width = len(lengths), max(*lengths, k) + more
    ids = nested([[0] * n for n in lengths])
    n = lengths[0]
    alike = [torch.zeros(k, n)] * rows
    for swapped in (nested(alike), torch.stack(alike)):
        batch = TensorDict({"ids": ids, "positions": swapped}, batch_size=[rows])
        for source in (batch, encode(batch), [encode(batch)]):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                materialize(source, pad_to_seqlen=width)
                materialize(source, pad_to_seqlen=width, keep_jagged=["positions"])
                materialize(source)
            told = [str(each.message) for each in caught]
            evident = len({*lengths}) == 1 and k != n and width > k
            assert [text[:25] for text in told] == ["materialize('positions'):"] * evident


SHAPES = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.lists(st.integers(0, 3), max_size=2))


@given(SHAPES, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from(SIDES[:2]))
def test_strided_rows_are_padded_in_the_dim_in_which_they_differ(shape, lengths, side):
    (outer, inner), width = shape, max(lengths) + 1
    outer = outer if len({*lengths}) > 1 else []
    parts = [torch.rand(*outer, n, *inner) for n in lengths]
    expected = torch.full([len(lengths), *outer, width, *inner], 2.0)
    for row, place in zip(parts, expected, strict=True):
        n = row.shape[len(outer)]
        place.narrow(len(outer), width - n if side == "left" else 0, n)[:] = row
    td = TensorDict({"x": torch.nested.nested_tensor(parts)}, [len(lengths)])
    options: dict[str, Any] = {"pad_to_seqlen": width, "padding_side": side}
    for batch in (td, open_wire(encode(td))):
        assert_same(materialize(batch, pad_value_dict={"x": 2}, **options)["x"], expected)


def pads_around(row, sizes, width, left, dim, pad):
    """A row as lists, padded in dim `dim` to a width, and in each later dim to its size."""
    if not sizes:
        return row
    inner = [pads_around(each, sizes[1:], width, left, dim - 1, pad) for each in row]
    missing = (width if dim == 0 else sizes[0]) - len(row)
    blank = np.full([width if i == dim else n for i, n in enumerate(sizes)][1:], pad).tolist()
    pads = [blank] * missing
    return pads + inner if left and dim == 0 else inner + pads


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.int16, torch.bfloat16, torch.complex128]),
    st.sampled_from(SIDES[:2]),
    st.integers(0, 2),
)
def test_strided_rows_that_differ_in_several_dims_are_padded_in_each(shapes, dtype, side, more):
    """The first of these dims is that of the tokens; without options it is `to_padded_tensor`."""
    numbers = itertools.count(1)
    rows = [torch.tensor([next(numbers) for _ in range(math.prod(x))]) for x in shapes]
    parts = [row.view(shape).to(dtype) for row, shape in zip(rows, shapes, strict=True)]
    column = torch.nested.nested_tensor(parts)
    sizes = [max(each) for each in zip(*shapes, strict=True)]
    dim = next((i for i in range(3) if len({shape[i] for shape in shapes}) > 1), 0)
    width = sizes[dim] + more
    options: dict[str, Any] = {"pad_value_dict": {"x": 7}, "padding_side": side}
    td = TensorDict({"x": column, "y": torch.ones(len(parts))}, [len(parts)])
    expected = [pads_around(part.tolist(), sizes, width, side == "left", dim, 7) for part in parts]
    for batch in (td, {"x": column}, open_wire(encode(td)), [encode(td)]):
        found = materialize(batch, **options, pad_to_seqlen=width, attention_mask_of="x")
        assert found["x"].dtype == dtype
        assert found["x"].tolist() == expected
        lengths = [shape[dim] for shape in shapes]
        assert found["attention_mask"].sum(1).tolist() == lengths
    plain = materialize(td, pad_value_dict={"x": 7})["x"]
    if dtype in (torch.float32, torch.bfloat16) and column.numel():
        assert torch.equal(plain, torch.nested.to_padded_tensor(column, 7))


def test_strided_rows_in_the_other_layouts():
    x = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)])
    y = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 1)])
    td = TensorDict({"x": x, "y": y}, [2])
    for batch in (td, open_wire(encode(td))):
        wide: Any = {"pad_to_seqlen": 3, "keep_jagged": ["y"]}
        kept: Any = {"keep_jagged": ["x", "y"]}
        for how in (kept, {"layout": "jagged"}, {"layout": "jagged", **wide}):
            assert_same(dict(materialize(batch, **how)), dict(td))
        for layout in get_args(Layout):
            with pytest.raises(ArgumentError, match=r"'x'\), row 1.*pad_to_seqlen=2.*found 3"):
                materialize(batch, layout, pad_to_seqlen=2, keep_jagged=["y"])
        packed = materialize(batch, "packed", keep_jagged=["y"])["x"]
        assert packed.cu_seqlens.tolist() == [0, 1, 4]
        assert packed.values.shape == (4, 2)
        assert materialize(batch)["y"].shape == (2, 3, 2)
        options: list[Any] = [("packed",), ("jagged", None, 3)]
        for more in options:
            with pytest.raises(ArgumentError, match=r"'y'.*in one dim, found 2; .*keep_jagged"):
                materialize(batch, *more)
    found = materialize({"x": x}, pad_to_seqlen=4, attention_mask_of="x", device="cpu")
    assert found["attention_mask"].sum(1).tolist() == [1, 3]


@given(
    st.complex_numbers(allow_nan=False) | st.builds(complex, *[st.sampled_from([0.0, -0.0])] * 2)
)
def test_complex_pads_keep_the_signs_of_both_parts(pad):
    rows = [torch.tensor(row, dtype=torch.complex128) for row in ([1j], [2j, 3j])]
    td = {"x": torch.nested.nested_tensor(rows, layout=torch.jagged)}
    rectangle = materialize(td, pad_value_dict={"x": pad})["x"]
    assert rectangle[0, 1].numpy().tobytes() == np.complex128(pad).tobytes()


def test_layouts_without_pads_ignore_pad_values():
    """As NeMo-RL's do, whose readers pass one dict with any layout. A wrong name is still found."""
    td, layouts = make_batch(), list[Layout](["jagged", "packed"])
    for batch, layout in itertools.product((td, open_wire(encode(td))), layouts):
        for pads in ({"ids": -1}, {"ids": "no number", "absent": 0}):
            assert_same(materialize(batch, layout, pads), materialize(batch, layout))
        with pytest.raises(ArgumentKeyError, match=r"pad_value_dict.*'absent'"):
            materialize(batch, layout, {"absent": 0}, strict=True)


def test_strided_rows_without_dims_and_without_rows():
    scalars = torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)])
    assert materialize(TensorDict({"x": scalars}, [2]))["x"].tolist() == [1.0, 2.0]
    assert materialize(TensorDict({"x": scalars}, [2]), "jagged", pad_to_seqlen=1)["x"].is_nested
    none = torch.nested.nested_tensor([])
    assert materialize(TensorDict({"x": none}, [0]))["x"].shape == (0,)


def ids(*lengths):
    return TensorDict({"ids": nested([range(1, n + 1) for n in lengths])}, [len(lengths)])


def padded_cell(dtype, pad):
    """The bits of the two pads in a row of one cell."""
    rows = [torch.ones(n, dtype=torch.uint8).to(dtype) for n in (1, 3)]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    return bits(materialize(td, pad_value_dict={"x": pad, "absent": 1})["x"])[0][1:]


# Pads that fit, and pads that do not.
PADS: dict[torch.dtype, tuple[list[Any], list[Any]]] = {
    torch.int64: (
        [
            *(2**63 - 1, -(2**53) - 1, torch.tensor(7), torch.tensor([7.0]), np.int32(7)),
            *(np.array([[7]]), True + 6, 7.0),
        ],
        [
            *(0.5, math.nan, "pad", None, torch.tensor([1, 2]), np.array([], dtype=np.int64)),
            *(torch.tensor(2**63, dtype=torch.uint64), torch.tensor(1, device="meta")),
        ],
    ),
    torch.uint64: ([2**64 - 1], []),
    torch.uint16: ([65535], []),
    torch.uint8: ([], [-1]),
    torch.int32: ([-(2**31), 2**31 - 1], [2**31, -(2**31) - 1]),
    torch.bool: ([True], [2]),
    torch.float32: ([-0.0, math.nan, -3.4028235e38, 16777217.0], [2**24 + 1, 1e300, 1j, 1e-50]),
    torch.bfloat16: ([-math.inf, -1e30], [torch.tensor(2**9 + 1)]),
    torch.float16: ([math.inf, 0.1], [151643, -1e9, 1e-9]),
    torch.float8_e4m3fn: ([447.0], [math.inf, -1e4]),
    torch.float8_e5m2: ([-1e4], [1e9]),
    torch.float64: ([0.1], []),
    torch.complex64: ([complex(0.1, -1e9), complex(0, math.inf)], [1 + 1e39j, 1e-50 + 1j]),
    torch.complex128: ([3.5], []),
}
E8M0 = getattr(torch, "float8_e8m0fnu", None)
if E8M0 is not None:  # this torch has it; it has no zero
    PADS[E8M0] = ([1, 0.5, 2.0**-127], [0, 0.0, -0.0, torch.tensor(0), -1.0, math.inf])


@pytest.mark.parametrize("dtype", PADS)
def test_pads_are_exact_or_rounded_as_torch_rounds_them_or_refused(dtype):
    fit, others = PADS[dtype]
    for pad in fit:
        number = pad.item() if isinstance(pad, (torch.Tensor, np.ndarray)) else pad
        as_float = torch.float32 if dtype is E8M0 else dtype
        expected = torch.tensor([number, number], dtype=as_float).to(dtype)
        assert padded_cell(dtype, pad) == bits(expected)
    for pad in others:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"materialize\('x'\)"):
            padded_cell(dtype, pad)


@pytest.mark.parametrize("dtype", PADS)
def test_packing_pads_with_the_same_bits_or_refuses_with_the_same_words(dtype):
    """Left out, the bits of pads are 0, also for a dtype that has no zero."""
    cells = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
    td = TensorDict(
        {"x": torch.nested.nested_tensor_from_jagged(cells, torch.tensor([0, 1, 1]))}, [2]
    )
    plan = plan_packing([1, 0], total=2, tail="own_row")
    each = plan_micro_batches([1, 0], max_tokens=2, total_multiple=2)

    def padded(**pads):
        return materialize(td, pad_value_dict=pads)["x"][1]

    def packed(**pads):
        yield lambda: plan.pack(td, pad_value_dict=pads)["x"][1:]
        yield lambda: each.pack(td, tail="last_row", pad_value_dict=pads)[0][1]["x"][1:]
        pad = {"pad": pads["x"]} if pads else {}
        yield lambda: plan.pack(td["x"], **pad)[1:]
        yield lambda: plan.unpack(
            cells.view(torch.uint8).repeat(2).view(dtype), shift=1, **pad
        ).values()

    def outcome(make):
        try:
            return str(bits(make()))
        except JagcodecError as error:
            return type(error), error.reason, error.detail

    assert {outcome(make) for make in packed()} == {outcome(padded)} == {outcome(lambda: cells)}
    odd = [False, np.float32(0), 0j, torch.tensor(1 + 1j), "0", None, torch.ones((), device="meta")]
    for pad in [*itertools.chain(*PADS[dtype]), *odd]:
        expected = outcome(functools.partial(padded, x=pad))
        assert {outcome(make) for make in packed(x=pad)} == {expected}, pad


def test_a_layout_that_nobody_lays_out_falls_into_none():
    """As one would that is new, and accepted."""
    td = TensorDict({"x": nested([[1], [2, 3]])}, [2])
    layouts = (*get_args(Layout), "new")
    with (
        mock.patch("jagcodec.train.layout_options._LAYOUTS", layouts),
        pytest.raises(AssertionError),
    ):
        materialize(td, layout="new")  # type: ignore[arg-type]


def test_the_error_of_a_column_without_prompts_says_which_padding_side_to_pass():
    td = TensorDict(
        {
            "responses": nested([[3], [5]]),
            "ids": nested([[1, 2, 3], [4, 5]]),
            "logprobs": nested([[0, 0, 1], [0, 1]], torch.float32),
        },
        [2],
    )
    for batch in (td, dict(td.items()), open_wire(encode(td)), [encode(td)]):
        options: dict[str, Any] = {"prompt_lengths": [2, 1], "padding_side": "left_right"}
        remedy = "padding_side={'ids': 'left_right', 'logprobs': 'left_right'}"
        with pytest.raises(ArgumentError, match=f"'responses'.*found 2 tokens.*{remedy}"):
            materialize(batch, **options)
        options["padding_side"] = dict.fromkeys(td.keys(), "left_right")
        with pytest.raises(ArgumentError, match="leave 'responses' out of padding_side"):
            materialize(batch, **options)
        del options["padding_side"]["responses"]
        assert materialize(batch, **options)["responses"].tolist() == [[3], [5]]


def test_packed_is_what_varlen_attention_takes():
    """What its cells are is checked with those of every batch in `test_rows`."""
    td = rollout()
    columns = materialize(td, "packed", container=dict)
    assert type(columns) is dict
    column = columns["ids"]
    assert column._fields == ("values", "cu_seqlens", "max_seqlen", "position_ids")
    assert column.values.data_ptr() == td["ids"].values().data_ptr()
    assert column.cu_seqlens.dtype == torch.int32
    assert columns["logprob"].cu_seqlens is column.cu_seqlens
    turned = {"x": stack_or_nest([torch.ones(3, 1), torch.ones(3, 2)])}
    assert materialize(turned, "packed")["x"].values.shape == (3, 3)
    left = materialize(columns, padding_side="left")
    assert left["ids"].tolist() == [[0, 0, 0, 1], [4, 5, 6, 7], [0, 0, 0, 0]]
    conjugated = torch.tensor([[1 + 2j], [3 - 1j]]).conj()
    assert materialize({"x": conjugated}, container=list) == ["x"]
    found = materialize({"x": conjugated}, pad_to_seqlen=2)["x"]
    assert found.tolist() == [[1 - 2j, 0], [3 + 1j, 0]]


def test_columns_within_batches_follow_the_same_rule():
    inner = TensorDict({"ids": torch.ones(2, 3), "row": torch.ones(2)}, [2])
    td = TensorDict({"inner": inner, "ids": ids(1, 2)["ids"]}, [2])
    pads: Any = {("inner", "ids"): 9}
    options: dict[str, Any] = {"pad_to_seqlen": 4, "pad_value_dict": pads}
    dicts = {"inner": {**dict(inner.items()), "none": {}}, "ids": td["ids"]}
    for batch in (td, open_wire(encode(td)), dicts):
        columns = materialize(batch, **options, strict=True)
        assert type(columns["inner"]) is type(columns)
        assert columns["inner"]["ids"].tolist() == [[1, 1, 1, 9]] * 2
        assert columns["inner"]["row"].tolist() == [1, 1]
        again = materialize(batch, **options, out=columns)["inner"]["ids"]
        assert again.data_ptr() == columns["inner"]["ids"].data_ptr()
        alone = materialize(batch, token_aligned_fields=["ids"], **options)
        assert alone["inner"]["ids"].shape == (2, 3)
        named = materialize(batch, token_aligned_fields=list(pads), **options)
        assert named["inner"]["ids"].shape == (2, 4)


@pytest.mark.filterwarnings("error::jagcodec.errors.JagcodecWarning")
@pytest.mark.parametrize("source", [lambda td: td, lambda td: open_wire(encode(td))])
@pytest.mark.parametrize(
    ("argument", "good", "bad"),
    [
        ("pad_value_dict", {"ids": 1, "reward": 0, ("inner", "ids"): 3}, {"ids": 1, "idz": 2}),
        ("pad_value_dict", {"attention_mask": True}, {("inner", "idz"): 3}),
        ("pad_value_dict", {}, {"inner": 3}),
        ("padding_side", {"logprobs": "left"}, {"idz": "left"}),
        ("token_aligned_fields", ["reward", "ids"], ["idz", "ids"]),
        ("keep_jagged", ["ids", ("inner", "ids")], ["ids", "idz"]),
    ],
)
def test_names_that_materialize_does_not_find(source, argument, good, bad):
    td = make_batch(lengths=[2, 4, 1])
    td["inner"] = TensorDict({"ids": td["ids"]}, [3])
    td = source(td)
    options: Any = {"attention_mask_of": "logprobs"}
    out = materialize(td, **{argument: good}, strict=True, **options)
    materialize(td, **{argument: bad}, **options)
    before = out["logprobs"].fill_(7).clone()
    with pytest.raises(ArgumentKeyError, match=rf"{argument}\).*found .*(idz|inner)"):
        materialize(td, **{argument: bad}, strict=True, out=dict(out), **options)
    assert torch.equal(out["logprobs"], before)


def test_what_is_not_widened_is_the_column_itself():
    cells = torch.ones(2, 3, 2)
    td = TensorDict({"ids": cells[..., 0], "experts": cells, "reward": cells[:, 0, 0]}, [2])
    for layout in ("jagged", "packed"):
        found = materialize(td, layout, pad_to_seqlen=8)
        for name in ("ids", "experts", "reward"):
            assert found[name].data_ptr() == td[name].data_ptr()
    assert materialize(td, attention_mask_of="ids")["attention_mask"].tolist() == [[True] * 3] * 2


def test_no_pad_is_that_of_a_mask():
    options: Any = {"pad_value_dict": {"x": 7, "m": 1}, "attention_mask_of": {"x": "m"}}
    found = materialize({"x": nested([torch.ones(1), torch.ones(2)])}, **options)
    assert found["x"].tolist() == [[1, 7], [1, 1]]
    assert found["m"].tolist() == [[True, False], [True, True]]
    jagged = ids(1, 2)
    width: Any = np.int64(2)
    assert materialize(jagged, "jagged", pad_to_seqlen=width)["ids"] is jagged["ids"]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_what_cannot_be_widened_is_an_error_only_where_it_would_be(make):
    column = make(torch.eye(2))
    td = TensorDict({"x": column, "ids": ids(1, 2)["ids"]}, [2])
    assert materialize(td, pad_to_seqlen=2)["x"].layout == column.layout
    assert materialize(td, pad_to_seqlen=3, token_aligned_fields=())["x"].layout == column.layout
    for names in (None, ["x"]):
        with pytest.raises(ArgumentError, match=r"'x'\).*a strided rectangle.*3 cells wide"):
            materialize(td, pad_to_seqlen=3, token_aligned_fields=names)


def test_a_pickled_column_holds_only_itself():
    ones = nested(torch.ones(64, 512), torch.float32)
    batch = materialize(TensorDict({"a": ones, "b": ones.clone()}, [64]))
    assert len(pickle.dumps(batch["a"])) < 64 * 512 * 4 + 2000


def test_memory_is_not_written_over_while_it_is_read():
    td = ids(4, 2)
    td["more"] = td["ids"] + 1
    room = torch.zeros(2, 4, dtype=torch.int64)
    memory = torch.zeros(32, dtype=torch.int64)
    memory[:3] = torch.tensor([0, 4, 8])  # offsets of the column
    column = torch.nested.nested_tensor_from_jagged(torch.arange(8), memory[:3])
    own = {"a": memory[1:9].view(2, 4)}
    for batch, out in ((td, {"ids": room, "more": room}), ({"a": column}, own)):
        with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
            materialize(batch, out=out)
    assert not room.any()
    assert memory.tolist() == [0, 4, 8] + [0] * 29


def test_memory_on_a_device_is_not_written_over_while_it_is_read(device):
    cells = torch.arange(12.0, device=device)
    offsets = torch.tensor([0, 4, 8], device=device)
    column = torch.nested.nested_tensor_from_jagged(cells[:8], offsets)
    room = torch.zeros(2, 4, device=device)
    batch = {"a": column, "b": column + 1}
    for out in ({"a": room, "b": room}, {"a": cells[4:].view(2, 4)}):
        with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
            materialize(batch, out=out)
    assert not room.any()
    assert cells.tolist() == [*range(12)]


@pytest.mark.parametrize("first", [0, 100, 900])
def test_a_message_is_not_written_over_while_it_is_read(first):
    memory = bytearray(10_000)
    header, payload = encode(ids(100, 90))
    memory[: len(payload)] = payload
    frames = [header, memoryview(memory)[: len(payload)]]
    batch, before = open_wire(frames), bytes(memory)
    td: Any
    for td in (batch, batch.to_tensordict(), [frames, encode(ids(1, 2))]):
        with pytest.raises(ArgumentError, match=r"materialize\(out\): .* found an overlap"):
            materialize(td, out=memoryview(memory)[first:])
    assert memory == before
    columns = materialize(batch, out=memoryview(memory)[len(payload) :])
    assert_same(columns["ids"], materialize(batch)["ids"])


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_to_another_device(layout):
    td = make_batch(lengths=[1, 2])
    td["stacked"] = torch.ones(2, 2)
    options: Any = {"attention_mask_of": "ids"} if layout == "padded" else {}
    columns = materialize(td, layout, pad_to_seqlen=4, device="meta", **options)
    assert columns.pop("message").tolist() == td["message"]
    assert columns.pop("tag").tolist() == ["gsm8k"] * 2
    for column in columns.values():
        packed = isinstance(column, PackedColumn)
        parts = [column.values, column.cu_seqlens] if packed else [column]
        assert {part.device.type for part in parts} == {"meta"}
    if layout == "padded":
        shapes = [tuple(columns[name].shape) for name in ("ids", "stacked", "attention_mask")]
        assert shapes == [(2, 4)] * 3


GRADIENTS = ["jagged", "function of a jagged one", "rectangle", "strided"]


def with_gradient(kind):
    """A column of two rows, and the cells that it comes from.

    Autograd follows the nested tensor of a function of torch, and not the values inside it.
    """
    sizes = [3, 3] if kind == "rectangle" else [2, 3]
    cells = torch.arange(1.0, 1 + sum(sizes)).requires_grad_()
    if kind == "function of a jagged one":
        jagged = torch.nested.nested_tensor_from_jagged(cells, torch.tensor([0, 2, 5]))
        return torch.mul(jagged, 2), cells
    rows = (cells * 2).split(sizes)
    if kind == "rectangle":
        return torch.stack(rows), cells
    layout = torch.strided if kind == "strided" else torch.jagged
    return torch.nested.as_nested_tensor([*rows], layout=layout), cells


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_pass_through_a_rectangle(kind, side):
    column, cells = with_gradient(kind)
    td = TensorDict({"x": column, "ids": torch.ones(2, 2)}, [2])
    options: Any = {"pad_to_seqlen": 4, "padding_side": side, "pad_value_dict": {"x": -1}}
    options |= {"prompt_lengths": [1, 2]} if side == "left_right" else {}
    found = materialize(td, **options)["x"]
    with torch.no_grad():
        cut = materialize(td, **options)["x"]
    assert not cut.requires_grad
    assert cut.tolist() == found.tolist()
    weights = torch.arange(1.0, 9.0).view(2, 4)
    (found * weights).sum().backward()
    assert cells.grad.tolist() == (weights[cut > 0] * 2).tolist()
    if kind != "rectangle":
        column, cells = with_gradient(kind)
        materialize({"x": column}, "packed")["x"].values.sum().backward()
        assert cells.grad.tolist() == [2] * 5


@pytest.mark.parametrize("kind", GRADIENTS)
def test_what_autograd_follows_is_not_written_over_other_memory(kind):
    td = TensorDict({"x": with_gradient(kind)[0]}, [2])
    for out in (bytearray(1000), {"x": torch.zeros(2, 4)}):
        with pytest.raises(ArgumentError, match=r"materialize\(out\)\['x'\].*torch.no_grad"):
            materialize(td, pad_to_seqlen=4, out=out)
        with torch.no_grad():
            materialize(td, pad_to_seqlen=4, out=out)
    assert materialize(td, pad_to_seqlen=4, out={})["x"].requires_grad
    values = torch.ones(3).to(torch.float8_e5m2).requires_grad_()  # which torch cannot pad
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    with pytest.raises(ArgumentError, match=r"'x'\).*float8_e5m2.*detach"):
        materialize({"x": column})


@pytest.mark.parametrize("page_locked", [False, True])
def test_out_for_page_locked_rectangles_must_be_page_locked(page_locked, monkeypatch):
    monkeypatch.setattr("jagcodec.train.layout_options._check_accelerator", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: page_locked)
    td = ids(1, 2)
    expected = materialize(td)["ids"]
    out = {"ids": torch.full_like(expected, 7)}
    buffer = bytearray(expected.nbytes + 128)
    for memory, place in ((out, r"\(out\)\['ids'\]"), (buffer, r"\(out\)")):
        if page_locked:
            assert_same(materialize(td, pin_memory=True, out=memory)["ids"], expected)
        else:
            with pytest.raises(ArgumentError, match=f"{place}: expected page-locked mem") as error:
                materialize(td, pin_memory=True, out=memory)
            assert error.value.reason == "conflict"
    assert page_locked or (out["ids"] == 7).all()


WIDE = TensorDict({"wide": torch.ones(2, 5), "ids": ids(1, 2)["ids"]}, [2])
TAKEN = TensorDict({"attention_mask": torch.ones(2), "ids": ids(1, 2)["ids"]}, [2])
EMPTY = TensorDict({}, [])
GRID = {"sizes": torch.ones(2, 2)}
LR = {"padding_side": "left_right"}
INT = torch.int64
LAZY = TensorDict.lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])
MIXED = ids(1, 2).update({"inner": ids(1, 2), "text": NonTensorStack("a", "b")})
MIXED["stack"] = TensorDict.lazy_stack([TensorDict({"a": 1}), TensorDict({"a": 2})])
PROMPTS = ("x", torch.tensor([1, 1]))
UNPINNED: list[tuple[dict[str, Any], str]] = [
    ({"td": td, "pin_memory": True}, r"materialize\(pin_memory\).* an accelerator")
    for td in (ids(1, 2), open_wire(encode(ids(1, 2))), TensorDict({"x": torch.ones(2)}, [2]))
]
REFUSED: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    ArgumentError: [
        ({"layout": "Padded"}, "'padded'.*'Padded'"),
        ({"pad_to_seqlen": -1}, "pad_to_seqlen"),
        ({"pad_to_seqlen": 0.0}, "pad_to_seqlen"),
        ({"padding_side": "both"}, "'left', 'left_right', found 'both'"),
        ({"padding_side": {"ids": "up"}}, "found 'up'"),
        ({"pad_to_multiple": 0}, "1 or more, found 0"),
        ({"prompt_width": -1, **LR}, r"\(prompt_width\)"),
        ({"device": "nowhere"}, r"materialize\(device\)"),
        # layouts
        ({"layout": "jagged", "pad_to_seqlen": 1}, r"'ids'\), row 1.*pad_to_seqlen=1.*found 2"),
        ({"layout": "packed", "pad_to_multiple": 8}, r"multiple\).*'packed'"),
        ({"layout": "jagged", "padding_side": "left"}, r"side\).*'jagged'"),
        ({"layout": "jagged", "attention_mask_of": "ids"}, r"\(attention"),
        ({"layout": "jagged", "token_aligned_fields": ["x"]}, "aligned"),
        ({"layout": "jagged", "prompt_width": 1}, r"\(prompt_width\)"),
        ({"layout": "jagged", "out": {}}, r"\(out\)"),
        ({"layout": "jagged", "pin_memory": True}, r"\(pin_memory\)"),
        ({"device": "meta", "pin_memory": True}, r"rectangles on the host, found device='meta'"),
        *([] if torch.cuda.is_available() else UNPINNED),
        # prompts
        (LR, "expected prompt_lengths"),
        ({"prompt_lengths": [1, 1]}, "requires padding_side='left_right'"),
        ({"prompt_width": 3}, "requires padding_side='left_right'"),
        ({"prompt_width": 3, **LR}, "expected the prompts of prompt_width=3, found None"),
        ({"prompt_lengths": [1], **LR}, r"lengths shape \(1,\) != \(2,\)"),
        ({"prompt_lengths": [2, 1], **LR}, "row 0: .*within its row of 1"),
        ({"prompt_lengths": [1, 2], "prompt_width": 1, **LR}, "row 1.*prompt_width=1.*found 2"),
        ({"prompt_lengths": [1, 0], "pad_to_seqlen": 2, **LR}, "=2.*found 3 with its prompt"),
        *(({"td": EMPTY, "prompt_lengths": each, **LR}, "no batch dim") for each in PROMPTS),
        # It is not said whether a rectangle has one cell per token: its layout would be a guess.
        ({"td": GRID, "prompt_lengths": [3, 1], **LR}, "row 0.*another padding_side"),
        # names
        ({"td": WIDE, "pad_to_seqlen": 4, "token_aligned_fields": ["wide"]}, "=4.*found 5"),
        ({"attention_mask_of": {"a": "m", "b": "m"}}, "a name for each"),
        ({"td": TAKEN, "attention_mask_of": "ids"}, r"of=\{'ids': 'another name'\}"),
        # memory; a batch of two rows of two cells each of 8 bytes, in lines of 64
        ({"out": bytearray(10)}, r"materialize\(out\): expected 128 bytes to write to, found 10"),
        ({"out": {"ids": torch.zeros(2, 3, dtype=INT)}}, r"\['ids'\].*2, 2"),
        ({"out": {"ids": torch.zeros(2, 2)}}, "torch.int64"),
        ({"out": {"ids": torch.zeros(2, 2, dtype=INT).T}}, "contiguous"),
        ({"out": {"ids": "x"}}, "found str"),
    ],
    ArgumentTypeError: [
        ({"pad_value_dict": 0}, "pad_value_dict"),
        ({"keep_jagged": "ids"}, r"materialize\(keep_jagged\)"),
        ({"prompt_lengths": [1.0, 1.0], **LR}, "integer lengths"),
        *(
            ({"td": td, "prompt_lengths": name, **LR}, r"\(prompt_lengths\).*lengths")
            for td in (MIXED, open_wire(encode(MIXED)))
            for name in ("ids", "inner", "stack", "text")
        ),
        *(({"td": LAZY, "prompt_lengths": each, **LR}, "a lazy stack") for each in PROMPTS),
        ({"attention_mask_of": 3}, "expected the name of a column"),
        ({"attention_mask_of": {"ids": 3}}, "names of masks"),
        ({"out": bytes(1000)}, "read-only"),
        ({"out": 7}, "found int"),
    ],
    ArgumentKeyError: [
        ({"prompt_lengths": "nope", **LR}, "'nope'"),
        ({"td": WIDE, "attention_mask_of": "wide", "token_aligned_fields": ()}, "wide"),
        ({"attention_mask_of": "nope"}, "nope"),
        ({"td": TAKEN, "attention_mask_of": "attention_mask"}, "attention_mask"),
    ],
}


@pytest.mark.parametrize(
    ("error", "options", "text"), [(error, *case) for error in REFUSED for case in REFUSED[error]]
)
def test_refused(error, options, text):
    with pytest.raises(error, match=text):
        materialize(**{"td": ids(1, 2), **options})


@pytest.mark.parametrize("options", [{"pad_to_multiple": 8}, {"padding_side": "left"}])
def test_a_rectangle_wider_than_the_width_stays_as_it_is(options):
    """It may be an image grid; one that is narrower is padded like the rows."""
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 2, 3]))
    grid, mask = torch.ones(2, 63), torch.ones(2, 5)
    found = materialize({"ids": ids, "grid": grid, "mask": mask}, pad_to_seqlen=32, **options)
    assert found["grid"] is grid
    assert found["ids"].shape == found["mask"].shape == (2, 32)


@pytest.mark.parametrize("form", ["jagged", "rectangle"])
def test_cells_that_a_message_claims_without_bytes_make_no_memory(form):
    """A mask and positions have bytes for each cell, also of columns whose cells have none."""
    for cells, fits in ((1 << 10, True), (1 << 31, False)):
        x = torch.empty(2, cells // 2, 0)
        if form == "jagged":
            offsets = torch.tensor([0, cells // 2, cells])
            x = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets)
        frames = encode(TensorDict({"x": x}, [2]))
        assert sum(map(len, frames)) < 1000
        assert materialize(frames)["x"].shape == (2, cells // 2, 0)
        calls: Any = [{"attention_mask_of": "x", **more} for more in ({}, {"padding_side": "left"})]
        calls += [{"layout": "packed"}] if form == "jagged" else []
        for options in calls:
            if fits:
                materialize(frames, **options)
                continue
            with pytest.raises(ArgumentError, match=r"'x'.* without bytes, found 2147483648"):
                materialize(frames, **options)
