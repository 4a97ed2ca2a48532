"""Packing by a mask, and back to the very same rectangles."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    decode,
    encode,
    materialize,
    pack_masked_fields,
    stack_or_nest,
    unpack_masked_fields,
)
from jagcodec.testing import tensors
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import torch_dtypes


@st.composite
def masks(draw, max_rows=4, max_width=7):
    """Left-padded, right-padded, with holes, all or nothing; no rows and no cells among them."""
    rows, width = draw(st.integers(0, max_rows)), draw(st.integers(0, max_width))
    cells = np.zeros((rows, width), dtype=bool)
    for row in cells:
        kind = draw(st.sampled_from(["left", "right", "both", "holes", "full", "empty"]))
        start, stop = sorted(draw(st.lists(st.integers(0, width), min_size=2, max_size=2)))
        if kind == "holes":
            row[:] = draw(st.lists(st.booleans(), min_size=width, max_size=width))
        elif kind != "empty":
            row[0 if kind in ("right", "full") else start : stop if kind != "full" else width] = 1
    mask = torch.from_numpy(cells)
    dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.int32, torch.uint8, torch.uint16]))
    return mask.to(dtype)


def trailing_dims():
    return st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def masked_batches(draw):
    """A mask, and columns over it: pad cells of one constant, or any bits at all."""
    mask = draw(masks())
    fields = {}
    for i in range(draw(st.integers(1, 3))):
        shape, dtype = (*mask.shape, *draw(trailing_dims())), draw(torch_dtypes())
        column = draw(tensors(shape, dtype))
        if draw(st.booleans()):
            column = padded_with(column, mask, draw(tensors((1,), dtype)))
        fields[f"token_{i}"] = column
    if draw(st.booleans()):
        fields["row"] = draw(tensors((mask.shape[0],)))
    return mask, fields


def padded_with(column, mask, pad):
    """`column` with the bits of `pad` in every pad cell; no torch kernel asked."""
    shape = (*column.shape, column.itemsize)
    cells = np.array(as_uint8(column)).reshape(shape)
    cells[mask.numpy() == 0] = as_uint8(pad)
    return torch.from_numpy(cells.reshape(-1)).view(column.dtype).view(column.shape)


def as_uint8(tensor):
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize)
    flat = (tensor if size is None else tensor.view(size)).contiguous().reshape(-1)
    # One cell may keep a stride that no view as bytes allows.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()


def rows_by_mask(column, mask):
    """The oracle: the valid cells of each row, as plain lists of bits."""
    pairs = zip(bits(column), mask.tolist(), strict=True)
    return [[cell for cell, keep in zip(row, kept, strict=True) if keep] for row, kept in pairs]


def pad_scalars(column, mask):
    """All scalars of the pad cells, as bits."""
    cells = []
    for row, kept in zip(bits(column), mask.tolist(), strict=True):
        for cell, keep in zip(row, kept, strict=True):
            if not keep:
                cells += scalars(cell, column.dim() - 2)
    if column.itemsize == 16:
        cells = list(map(tuple, cells))
    return set(cells)


def scalars(cell, depth):
    return [cell] if not depth else [x for inner in cell for x in scalars(inner, depth - 1)]


@given(masked_batches())
def test_the_same_rectangles_come_back(batch):
    mask, fields = batch
    td = pack_masked_fields(fields, mask=mask, token_aligned_fields=token_names(fields))
    assert td.batch_size == (mask.shape[0],)
    assert list(td.keys()) == [*fields, "padding"]
    assert_same(unpack_masked_fields(td), rectangles(fields, mask))
    assert_same(unpack_masked_fields(decode(encode(td))), rectangles(fields, mask))


def rectangles(fields, mask):
    return TensorDict(fields, batch_size=[mask.shape[0]])


def token_names(fields):
    return [name for name in fields if name.startswith("token")]


@given(masked_batches())
def test_rows_are_the_cells_where_the_mask_is_true(batch):
    mask, fields = batch
    td = pack_masked_fields(fields, mask=mask, token_aligned_fields=token_names(fields))
    for name in token_names(fields):
        constant = len(pad_scalars(fields[name], mask)) <= 1
        assert td[name].is_nested == constant, name
        if constant:
            assert rows_of(td[name]) == rows_by_mask(fields[name], mask)
            assert td[name].offsets() is td[jagged_names(td)[0]].offsets()


def jagged_names(td):
    return [name for name, leaf in td.items() if isinstance(leaf, torch.Tensor) and leaf.is_nested]


@given(masks())
def test_runs_say_where_the_rows_were(mask):
    td = pack_masked_fields({"m": mask}, mask="m")
    runs = td["padding", "runs"]
    assert runs.values().dtype == torch.int32
    cells = [[i for a, n in row for i in range(a, a + n)] for row in rows_of(runs)]
    assert cells == [[i for i, keep in enumerate(row) if keep] for row in mask.tolist()]
    for row in rows_of(runs):
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(row))


MASK = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)


def packs(column, mask=MASK):
    return pack_masked_fields({"x": column}, mask=mask)["x"].is_nested


def test_pads_are_compared_by_their_bits():
    nan = torch.full((2, 4), float("nan"))
    assert packs(nan)
    other = nan.clone()
    other.view(torch.int32)[0, 3] += 1  # a NaN of another payload
    assert not packs(other)
    zeros = torch.zeros(2, 4)
    assert packs(zeros)
    assert packs(-zeros)
    zeros[0, 3] = -0.0
    assert not packs(zeros)
    imaginary = torch.zeros(2, 4, dtype=torch.complex128)
    assert packs(imaginary)
    imaginary[1, 2] = 1j  # type: ignore[assignment]
    assert not packs(imaginary)


def test_one_pad_serves_the_trailing_dims_too():
    column = torch.zeros(2, 4, 2)
    column[0, 0, 1] = 1
    assert not packs(column)
    column[:, :, 1] = 1
    assert not packs(column)
    assert packs(torch.ones(2, 4, 2))


def test_no_pad_cells_and_no_valid_ones():
    column = torch.arange(1, 9).view(2, 4)
    full = pack_masked_fields({"x": column}, mask=torch.ones(2, 4, dtype=torch.bool))
    assert full["padding"]["rectangle"]["pads"]["x"].item() == 0
    assert_same(unpack_masked_fields(full)["x"], column)
    assert not packs(column, torch.zeros(2, 4, dtype=torch.bool))
    none = pack_masked_fields({"x": column * 0 + 7}, mask=torch.zeros(2, 4, dtype=torch.bool))
    assert none["x"].values().tolist() == []
    assert unpack_masked_fields(none)["x"].tolist() == [[7] * 4] * 2


def test_a_batch_as_verl_holds_it():
    """Prompts padded on the left, responses on the right, position ids counting on in the pads."""
    attention = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    ids = torch.tensor([[151643, 151643, 3, 4, 5, 151643], [151643, 2, 3, 4, 5, 6]])
    fields = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4]]),
        "reward": torch.tensor([0.5, 1.0]),
        "message": np.array([{"role": "user"}, None], dtype=object),
    }
    td = decode(encode(pack_masked_fields(fields, mask="attention_mask")))
    assert [row.tolist() for row in td["input_ids"].unbind()] == [[3, 4, 5], [2, 3, 4, 5, 6]]
    assert (td["input_ids"] * td["attention_mask"]).values().tolist() == [3, 4, 5, 2, 3, 4, 5, 6]
    assert_same(td["position_ids"], fields["position_ids"])
    assert td["padding"]["rectangle"]["width"] == 6
    back = unpack_masked_fields(td)
    assert list(back.keys()) == list(fields)
    for name in ("input_ids", "attention_mask", "position_ids", "reward"):
        assert_same(back[name], fields[name])
    assert back.get("message").tolist() == [{"role": "user"}, None]
    assert materialize(td, pad_value_dict={"input_ids": 151643})["input_ids"].shape == (2, 5)


def test_true_is_any_byte_but_zero():
    mask = torch.tensor([[0, 2, 255, 0]], dtype=torch.uint8).view(torch.bool)
    td = pack_masked_fields({"x": torch.tensor([[9, 1, 2, 9]])}, mask=mask)
    assert rows_of(td["x"]) == [[1, 2]]


def test_names_decide_where_they_are_given():
    fields = {"x": torch.zeros(2, 4), "grid": torch.zeros(2, 4)}
    td = pack_masked_fields(fields, mask=MASK, token_aligned_fields={"x", "absent"})
    assert [td[name].is_nested for name in fields] == [True, False]
    assert td["grid"].data_ptr() == fields["grid"].data_ptr()
    td = pack_masked_fields(fields, mask=MASK)
    assert [td[name].is_nested for name in fields] == [True, True]


def test_jagged_columns_of_the_same_rows_join():
    jagged = stack_or_nest([torch.ones(2), torch.ones(2)], always_nest=True)
    td = pack_masked_fields({"x": torch.zeros(2, 4), "done": jagged}, mask=MASK)
    assert (td["x"] + td["done"]).values().tolist() == [1.0] * 4
    back = unpack_masked_fields(td)
    assert back["done"] is td["done"]


def test_a_slice_of_a_wider_rectangle_and_an_expanded_row():
    wide = torch.arange(16).view(2, 8)
    wide[:, :4][~MASK] = 9
    expanded = torch.tensor([0, 1, 1, 0]).expand(2, 4)
    mask = expanded.bool()
    td = pack_masked_fields({"wide": wide[:, :4]}, mask=MASK)
    assert rows_of(td["wide"]) == [[1, 2], [8, 11]]
    td = pack_masked_fields({"row": expanded}, mask=mask)
    assert rows_of(td["row"]) == [[1, 1], [1, 1]]
    assert_same(unpack_masked_fields(td)["row"], expanded.contiguous())


def test_the_batch_is_detached():
    column = torch.zeros(2, 4, requires_grad=True)
    td = pack_masked_fields({"x": column * 1, "r": column.sum(1)}, mask=MASK)
    assert not td["x"].requires_grad
    assert not td["r"].requires_grad
    td["x"].values().fill_(5)
    assert column.sum() == 0


def test_another_name_for_the_padding():
    td = pack_masked_fields({"padding": torch.ones(2, 4)}, mask=MASK, padding_field="rectangle")
    assert_same(unpack_masked_fields(td, padding_field="rectangle")["padding"], torch.ones(2, 4))


def test_other_leaves_and_columns_that_were_dropped():
    td = pack_masked_fields({"x": torch.ones(2, 4), "y": torch.ones(2, 4)}, mask=MASK)
    del td["x"]
    td["late"] = torch.zeros(2)
    td["nested"] = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    back = unpack_masked_fields(td)
    assert list(back.keys()) == ["y", "late", "nested"]
    assert back["late"] is td["late"]
    assert_same(back["y"], torch.ones(2, 4))
    assert "padding" in td.keys()  # noqa: SIM118


def test_names_of_dims_and_the_device_stay():
    td = pack_masked_fields({"x": torch.ones(2, 4)}, mask=MASK)
    named = TensorDict(dict(td.items()), batch_size=[2], device="cpu", names=["row"])
    back = unpack_masked_fields(named)
    assert back.names == ["row"]
    assert back.device == torch.device("cpu")


# --- rows chosen and joined --------------------------------------------------------------------


def joined(parts, order):
    """Rows of several packed batches, as row functions would join them: made by hand."""
    rows = [(part, i) for part in parts for i in range(part.batch_size[0])]
    rows = [rows[i] for i in order]
    leaves = {
        name: stack_or_nest([part[name].unbind()[i] for part, i in rows], always_nest=True)
        for name in parts[0].keys()  # noqa: SIM118
        if name != "padding"
    }
    payloads = [part["padding"]["rectangle"] for part, _ in rows]
    runs = [part["padding", "runs"].unbind()[i] for part, i in rows]
    leaves["padding"] = TensorDict(
        {
            "runs": stack_or_nest(runs, always_nest=True),
            "rectangle": NonTensorStack(*[NonTensorData(payload) for payload in payloads]),
        },
        batch_size=[len(rows)],
    )
    return TensorDict(leaves, batch_size=[len(rows)])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 0], [2]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.complex128])
@pytest.mark.parametrize("trailing", [(), (3,)])
def test_pads_may_differ_by_row(order, dtype, trailing):
    masks = [MASK, torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)]
    columns = []
    for mask, pad in zip(masks, (9, -4), strict=True):
        column = torch.arange(8.0).view(2, 4, *[1] * len(trailing)).expand(2, 4, *trailing).clone()
        column[~mask] = pad
        columns.append(column.to(dtype))
    parts = [
        pack_masked_fields({"x": column}, mask=mask)
        for column, mask in zip(columns, masks, strict=True)
    ]
    td = joined(parts, order)
    expected = [bits(row) for column in columns for row in column]
    for batch in (td, decode(encode(td))):
        back = unpack_masked_fields(batch)
        assert back["x"].dtype == dtype
        assert bits(back["x"]) == [expected[i] for i in order]
        assert list(back.keys()) == ["x"]


def test_widths_that_differ_by_row_are_refused():
    narrow = pack_masked_fields({"x": torch.ones(2, 4)}, mask=MASK)
    wide = pack_masked_fields({"x": torch.ones(1, 6)}, mask=torch.ones(1, 6, dtype=torch.bool))
    with pytest.raises(ArgumentError, match=r"row 2.*width 4.*found 6; unpack the parts"):
        unpack_masked_fields(joined([narrow, wide], [0, 1, 2]))


def test_a_row_without_a_pad_is_named():
    td = joined([pack_masked_fields({"x": torch.ones(2, 4)}, mask=MASK)], [0, 1])
    payload = {"width": 4, "pads": {}}
    whole = td["padding"].get("rectangle").tolist()[0]
    td["padding"].set("rectangle", NonTensorStack(NonTensorData(whole), NonTensorData(payload)))
    with pytest.raises(ArgumentError, match=r"'x'\), row 1.*found NoneType"):
        unpack_masked_fields(td)


# --- bad arguments -----------------------------------------------------------------------------

GOOD = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (None, ArgumentTypeError, "found NoneType"),
        (MASK.numpy(), ArgumentTypeError, "found ndarray"),
        (MASK.tolist(), ArgumentTypeError, "found list"),
        (MASK.to_sparse(), ArgumentTypeError, "sparse"),
        (stack_or_nest([GOOD[0], GOOD[0]], always_nest=True), ArgumentTypeError, "nested"),
        (MASK.float(), ArgumentTypeError, "float32; try mask.bool"),
        (MASK[0], ArgumentError, r"shape \(4,\)"),
        (MASK[..., None], ArgumentError, r"shape \(2, 4, 1\)"),
        (torch.tensor([[0, 1], [1, -1]]), ArgumentError, r"\(mask\), row 1.*found -1"),
        (torch.tensor([[0, 200]], dtype=torch.uint8), ArgumentError, "row 0.*found 200"),
        (torch.tensor([[65535]]).to(torch.uint16), ArgumentError, "found 65535"),
        ("absent", ArgumentKeyError, "'absent'.*columns are 'x', 'words'"),
        ("words", ArgumentTypeError, r"\('words'\).*ndarray"),
    ],
)
def test_masks_that_are_not_valid(mask, error, text):
    rows = mask.shape[0] if isinstance(mask, torch.Tensor) else 2
    fields = {"x": torch.ones(rows, 4), "words": np.array([None] * rows, dtype=object)}
    with pytest.raises(error, match=text):
        pack_masked_fields(fields, mask=mask)


@pytest.mark.parametrize(
    ("column", "error", "text"),
    [
        (torch.ones(2, 3), ArgumentError, r"'bad'.*\(2, 4, ...\).*shape \(2, 3\)"),
        (torch.ones(2), ArgumentError, r"'bad'.*shape \(2,\)"),
        (stack_or_nest([GOOD[0], GOOD[0]], always_nest=True), ArgumentError, "jagged rows"),
        (np.array([None, None]), ArgumentError, "object array"),
        (torch.ones(3, 4), ArgumentError, "'bad'.*2 rows, like the mask, found 3"),
        (torch.tensor(1), ArgumentError, "'bad'.*0-d"),
        (np.ones(2), ArgumentTypeError, "'bad'.*from_numpy"),
    ],
)
def test_named_columns_that_are_not_per_token(column, error, text):
    with pytest.raises(error, match=text):
        pack_masked_fields({"bad": column}, mask=MASK, token_aligned_fields=["bad"])


def test_other_bad_arguments():
    with pytest.raises(ArgumentTypeError, match="dict of names"):
        pack_masked_fields([GOOD], mask=MASK)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="put it in a list"):
        pack_masked_fields({"x": GOOD}, mask=MASK, token_aligned_fields="x")
    with pytest.raises(ArgumentError, match=r"'padding'.*choose another"):
        pack_masked_fields({"padding": GOOD}, mask=MASK)
    with pytest.raises(ArgumentTypeError, match="name of a leaf, found 5"):
        pack_masked_fields({"x": GOOD}, mask=MASK, padding_field=5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="name of a leaf"):
        unpack_masked_fields(pack_masked_fields({}, mask=MASK), padding_field=("a", "b"))  # type: ignore[arg-type]


def test_batches_that_cannot_be_unpacked():
    td = pack_masked_fields({"x": GOOD}, mask=MASK)
    with pytest.raises(ArgumentTypeError, match="found dict"):
        unpack_masked_fields(dict(td.items()))  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="LazyStacked"):
        unpack_masked_fields(TensorDict.lazy_stack([TensorDict({"a": GOOD}, [2])] * 2))
    with pytest.raises(ArgumentError, match="no batch dim"):
        unpack_masked_fields(TensorDict({}, batch_size=[]))
    with pytest.raises(ArgumentKeyError, match="no 'other' among 'x', 'padding'"):
        unpack_masked_fields(td, padding_field="other")


def with_padding(**changed):
    """A packed batch whose padding leaf was tampered with."""
    td = pack_masked_fields({"x": GOOD}, mask=MASK)
    leaf = {key: td["padding"].get(key) for key in ("runs", "rectangle")}
    leaf.update(changed)
    td["padding"] = TensorDict({k: v for k, v in leaf.items() if v is not None}, batch_size=[2])
    return td


def runs_of(*rows, dtype=torch.int32):
    return stack_or_nest(
        [torch.tensor(row, dtype=dtype).reshape(-1, 2) for row in rows], always_nest=True
    )


def rectangle(**payload):
    return NonTensorData(payload, batch_size=[2])


BIG = 2**62


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"runs": None}, ArgumentTypeError, "runs and rectangle"),
        ({"rectangle": None}, ArgumentTypeError, "runs and rectangle"),
        ({"runs": torch.zeros(2, 2)}, ArgumentTypeError, r"found a \(2, 2\) tensor"),
        ({"runs": runs_of([[1, 2]], [[0, 1]], dtype=torch.float32)}, ArgumentTypeError, "runs"),
        ({"runs": stack_or_nest([torch.ones(2).int()] * 2, always_nest=True)}, TypeError, "runs"),
        ({"runs": runs_of([[1, 2]], [[0, 1], [4, 1]])}, ArgumentError, "row 1.*1 cells from 4"),
        ({"runs": runs_of([[-1, 2]], [[0, 1]])}, ArgumentError, "row 0.*within the width 4"),
        ({"runs": runs_of([[1, 2]], [[0, 0]])}, ArgumentError, "row 1.*0 cells from 0"),
        ({"runs": runs_of([[1, -2]], [[0, 1]])}, ArgumentError, "row 0.*-2 cells"),
        ({"runs": runs_of([[BIG, BIG]], [], dtype=torch.int64)}, ArgumentError, "row 0"),
        ({"runs": runs_of([[1, 2]], [[0, 2], [1, 1]])}, ArgumentError, "row 1.*not overlap"),
        ({"runs": runs_of([[1, 2]], [[3, 1], [0, 1]])}, ArgumentError, "row 1.*in order"),
        ({"runs": runs_of([[1, 2]], [[0, 1]])}, ArgumentError, "'x'.*row 1.*1 cells.*found 2"),
        ({"rectangle": rectangle(width=4)}, ArgumentTypeError, "'width'"),
        ({"rectangle": rectangle(width=-4, pads={})}, ArgumentTypeError, "-4"),
        ({"rectangle": rectangle(width=True, pads={})}, ArgumentTypeError, "True"),
        ({"rectangle": rectangle(width=2**63, pads={})}, ArgumentTypeError, "2233720"),
        ({"rectangle": NonTensorData("text", batch_size=[2])}, ArgumentTypeError, "text"),
        ({"rectangle": torch.zeros(2)}, ArgumentTypeError, "rectangle"),
        ({"rectangle": NonTensorStack({"width": 4}, "text")}, ArgumentTypeError, "of all rows or"),
        ({"rectangle": rectangle(width=4, pads={"x": 0})}, ArgumentError, "0-d pad.*found int"),
        (
            {"rectangle": rectangle(width=4, pads={"x": torch.tensor(0)})},
            ArgumentError,
            "float32, found torch.int64",
        ),
        (
            {"rectangle": rectangle(width=4, pads={"x": torch.zeros(1)})},
            ArgumentError,
            "'x'.*0-d pad",
        ),
        (
            {"rectangle": rectangle(width=BIG, pads={"x": torch.tensor(0.0)})},
            ArgumentError,
            "fit in memory",
        ),
    ],
)
def test_padding_leaves_that_contradict_themselves(changed, error, text):
    with pytest.raises(error, match=text):
        unpack_masked_fields(with_padding(**changed))


def test_a_padding_leaf_of_another_kind():
    td = pack_masked_fields({"x": GOOD}, mask=MASK)
    for leaf in (torch.zeros(2), NonTensorData("text", batch_size=[2])):
        td["padding"] = leaf
        with pytest.raises(ArgumentTypeError, match="that pack_masked_fields made"):
            unpack_masked_fields(td)


@pytest.mark.parametrize(
    ("column", "error", "text"),
    [
        (GOOD, ArgumentTypeError, "'x'.*jagged column"),
        (stack_or_nest([GOOD[0], GOOD[0, :2]]), ArgumentError, "'x'.*row 0.*2 cells.*found 4"),
        (
            stack_or_nest([torch.ones(3, 2)] * 2, always_nest=True, ragged_dim=2),
            ValueError,
            "ragged dim 1, found 2",
        ),
        (
            stack_or_nest([GOOD[0, :2].half()] * 2, always_nest=True),
            ArgumentError,
            "'x'.*float16, found torch.float32",
        ),
    ],
)
def test_columns_that_were_edited_in_between(column, error, text):
    td = pack_masked_fields({"x": GOOD}, mask=MASK)
    td["x"] = column
    with pytest.raises(error, match=text):
        unpack_masked_fields(td)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_as_on_the_cpu():
    mask = torch.rand(64, 33) > 0.4
    fields = {
        "ids": torch.randint(0, 9, (64, 33)).masked_fill(~mask, 7),
        "logprobs": torch.randn(64, 33).masked_fill(~mask, 0),
        "f8": torch.randn(64, 33, 2).masked_fill(~mask[..., None], 1).to(torch.float8_e4m3fn),
        "position_ids": torch.randint(0, 9, (64, 33)),
    }
    expected = pack_masked_fields(fields, mask=mask)
    there = {name: column.cuda() for name, column in fields.items()}
    td = pack_masked_fields(there, mask=mask.cuda())
    assert all(td[name].is_cuda for name in fields)
    assert_same(decode(encode(td)), expected)
    back = unpack_masked_fields(td)
    for name, column in fields.items():
        assert back[name].is_cuda
        assert_same(back[name].cpu(), column)
    mixed = pack_masked_fields({**there, "here": fields["ids"]}, mask=mask)
    assert_same(unpack_masked_fields(mixed)["here"], fields["ids"])
    assert_same(unpack_masked_fields(mixed)["ids"].cpu(), fields["ids"])
