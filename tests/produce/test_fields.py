"""Padded columns to a batch and to a message: by lengths, by a mask, and strictly."""

import itertools
import re
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict

from jagcodec import decode, encode, encode_fields, pack_jagged_fields, padding_tax, to_blob
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, JagcodecWarning
from jagcodec.produce.jagged_tensors import maybe_pack_jagged, pack_per_token_field, stack_or_nest
from jagcodec.testing import jagged_batches, tensors
from tests.helpers import message
from tests.oracle import assert_same, bits, rows_of
from tests.wire.values import objects


def both(fields, **options):
    """The batch, which the message holds too, byte for byte."""
    batch = pack_jagged_fields(fields, **options)
    assert message(encode_fields(fields, **options)) == message(encode(batch))
    return batch


@st.composite
def batches(draw):
    """A batch, with the mask of its valid cells: right-padded, left-padded, or with holes."""
    batch = draw(jagged_batches())
    rows, width = len(batch.lengths), batch.width
    cells = np.arange(width) < batch.lengths.numpy()[:, None]
    kind = draw(st.sampled_from(["right", "shifted", "holes"]))
    if kind == "shifted":
        ends = [draw(st.integers(0, width - n)) for n in batch.lengths.tolist()]
        cells = np.stack([np.roll(row, n) for row, n in zip(cells, ends, strict=True)] or [cells])
    elif kind == "holes":
        size = rows * width
        cells = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
    dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.int32, torch.uint8, torch.uint16]))
    return batch, torch.from_numpy(cells.reshape(rows, width)).to(dtype), kind


def rows_by_mask(column, mask):
    """The valid cells of each row, as plain lists of bits."""
    pairs = zip(bits(column), mask.tolist(), strict=True)
    return [[cell for cell, keep in zip(row, kept, strict=True) if keep] for row, kept in pairs]


@given(batches())
def test_columns_keep_the_cells_where_the_mask_is_true(drawn):
    batch, mask, kind = drawn
    named = batch.token_aligned_fields
    td = both(batch.fields, mask=mask, token_aligned_fields=named)
    if kind == "right":
        assert_same(td, both(batch.fields, lengths=batch.lengths, token_aligned_fields=named))
    assert td.batch_size == (len(mask),)
    assert td.device is None
    assert list(td.keys()) == list(batch.fields)
    offsets = {id(td[name].offsets()) for name in named}
    assert len(offsets) <= 1
    for name, column in batch.fields.items():
        leaf = td.get(name)
        if name in named:
            assert rows_of(leaf) == rows_by_mask(column, mask)
        elif isinstance(column, torch.Tensor):
            assert_same(leaf, column)
        elif len(column):
            assert_same(leaf.tolist(), list(column))


def test_columns_packed_together_multiply():
    lengths = torch.tensor([1, 3, 0])
    holes = torch.nested.nested_tensor_from_jagged(
        torch.ones(7), torch.tensor([0, 2, 6, 7]), lengths=torch.tensor([1, 3, 0])
    )
    fields = {"a": torch.ones(3, 3), "b": 2 * torch.ones(3, 8), "r": torch.ones(3), "h": holes}
    fields["c"] = stack_or_nest([torch.ones(1), torch.ones(3), torch.ones(0)])
    for counts in (lengths, fields["c"]):
        td = both(fields, lengths=counts, token_aligned_fields={"a", "b", "absent"})
        for name, expected in (("b", 2.0), ("c", 1.0), ("h", 1.0)):
            assert (td["a"] * td[name]).values().tolist() == [expected] * 4
    assert (td["a"] * fields["c"]).values().tolist() == [1.0] * 4


MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
IDS = torch.tensor([[9, 9, 3, 4, 5, 9], [9, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, []),
        ({"lengths": [1, 3]}, ["three"]),
        ({"lengths": [3, 1], "token_aligned_fields": []}, []),
        ({"lengths": [1, 3], "token_aligned_fields": ["three", "four"]}, ["three", "four"]),
        ({"lengths": [1, 4], "token_aligned_fields": ["four"]}, ["four"]),
        ({"mask": MASK}, ["six"]),
        ({"mask": MASK[:, :3]}, ["three"]),
        ({"mask": MASK, "token_aligned_fields": ["three"]}, []),
    ],
)
@pytest.mark.filterwarnings("ignore::jagcodec.errors.JagcodecWarning")
def test_the_shape_or_the_names_decide(options, packed):
    fields = {"three": torch.ones(2, 3), "four": torch.ones(2, 4, 1), "six": torch.ones(2, 6)}
    fields |= {"one": torch.ones(2)}
    td = both({name: column.requires_grad_() for name, column in fields.items()}, **options)
    assert [name for name in fields if td[name].is_nested] == packed
    assert not any(column.requires_grad for column in td.values())


def test_nothing_is_a_batch_of_no_rows():
    assert both({}).batch_size == (0,)
    assert both({"text": []}, lengths=torch.empty(0, dtype=torch.int64)).batch_size == (0,)


@pytest.mark.parametrize("rows", [3, 2047, 2048, 5000])
def test_fused_is_composed_however_large_the_offsets_are(rows):
    """Offsets of 2,047 rows and more are a buffer of their own, between those of columns."""
    lengths = torch.arange(rows) % 7
    fields = {name: torch.arange(rows * 7).view(rows, 7) + i for i, name in enumerate("abc")}
    named: dict[str, Any] = {"lengths": lengths, "token_aligned_fields": fields}
    batch = both(fields, **named)
    composed = encode(batch)
    assert_same(decode(composed), batch)
    out = bytearray(sum(map(len, message(composed))) + 1000)
    assert bytes(out[: encode_fields(fields, **named, out=out)]) == bytes(to_blob(composed))


def test_columns_of_objects_are_kept():
    columns: list[Any] = [
        *(NonTensorStack({"role": "user"}, "text"), NonTensorData("gsm8k", batch_size=[2])),
        *(MetaData([1, 2], batch_size=[2]), torch.stack([NonTensorStack(1, 2)] * 2)),
        *([{"a": 1}, {}], ["a", None], ["a", "b\ud800"], [b"a", {"b": [None]}], [None, None]),
        np.array(["x", [1, 2]], dtype=object),
    ]
    for column in columns:
        fields: Any = {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "info": column}
        is_list = isinstance(column, (list, np.ndarray))
        for each in (fields,) if is_list else (fields, TensorDict(fields, [2])):
            packed = both(each, lengths=[2, 3], token_aligned_fields=["ids"])
            assert packed["ids"].values().tolist() == [5, 6, 7, 8, 9]
            found = packed.get("info")
            assert_same(*((found.tolist(), list(column)) if is_list else (found, column)))


OBJECTS = np.empty((2, 2), dtype=object)
WRONG: list[tuple[Any, dict[str, Any], Any, str]] = [
    (torch.ones(3, 2), {}, ArgumentError, "'bad'.*expected 2 rows.*found 3"),
    (torch.tensor(1.0), {}, ArgumentError, "'bad'.*0-d"),
    (np.ones(3), {}, ArgumentError, "'bad'.*expected 2 rows.*found 3"),
    (np.ones(2, "g"), {}, ArgumentTypeError, r"'bad'.*longdouble|'bad'.*float128; convert"),
    (np.array("a"), {}, ArgumentTypeError, "'bad'.*numpy.empty"),
    (objects("a", NonTensorStack("b", "c")), {}, ArgumentTypeError, r"'bad'\), row 1: .*tolist"),
    (OBJECTS[:1], {}, ArgumentError, "'bad'.*expected 2 rows.*found 1"),
    ([], {}, ArgumentError, "'bad'.*expected 2 rows.*found 0"),
    ([[], []], {}, ArgumentTypeError, "'bad'.*encode_rows"),
    ([[1], [2, 3]], {}, ArgumentTypeError, "'bad'.*encode_rows"),
    ({"x": 1}, {}, ArgumentTypeError, r"'bad'\)\['x'\]: .*meta="),
    (["a", 1], {}, ArgumentTypeError, "'bad'.*list"),
    ([torch.zeros(1), torch.zeros(1)], {}, ArgumentTypeError, "'bad'.*list"),
    (["a"], {}, ArgumentError, "'bad'.*expected 2 rows"),
    (NonTensorStack("a", "b", "c"), {}, ArgumentError, "'bad'.*found 3"),
    (NonTensorData("a"), {}, ArgumentTypeError, "'bad'.*without batch dims"),
    (NonTensorData("a", batch_size=[3]), {}, ArgumentError, "'bad'.*found 3"),
    (MetaData("a"), {}, ArgumentTypeError, "'bad'.*without batch dims"),
    (torch.eye(2).to_sparse(), {}, ArgumentTypeError, "'bad'.*sparse"),
    (TensorDict({}, [3]), {}, ArgumentError, "'bad'.*expected 2 rows.*found 3"),
    (TensorDict({}, []), {}, ArgumentTypeError, "'bad'.*expected a column of N rows"),
    (torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), {}, TypeError, "dequantise"),
    (torch.ones(2), {"lengths": [-1, 2]}, ArgumentError, "row 0.*-1"),
    (torch.ones(2), {"token_aligned_fields": "ids"}, ArgumentTypeError, "put it in a list"),
]
BAD_MASKS: list[tuple[Any, Any, str]] = [
    (torch.ones(2).bool(), ArgumentError, r"\(mask\): .*shape \(2,\)"),
    (torch.ones(2, 6), ArgumentTypeError, "float32"),
    (torch.ones(2, 6, dtype=torch.bfloat16), ArgumentTypeError, "bfloat16"),
    ([[True]], ArgumentTypeError, "found list"),
    (torch.ones(2, 6).to_sparse(), ArgumentTypeError, "sparse"),
    ("absent", ArgumentKeyError, "absent"),
    ("good", ArgumentError, r"'good'\), row 0: .*0 and 1, found 9"),
    (torch.tensor([[0, 1], [1, -1]]), ArgumentError, r"\(mask\), row 1: .*found -1"),
    (torch.ones(3, 6).bool(), ArgumentError, "expected 3 rows"),
]
WRONG += [(IDS, {"lengths": None, "mask": mask}, error, text) for mask, error, text in BAD_MASKS]
WRONG.append((IDS, {"mask": MASK}, ArgumentError, "lengths or a mask, found both"))


@pytest.mark.parametrize(("column", "options", "error", "text"), WRONG)
@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields])
def test_bad_input_is_named(pack, column, options, error, text):
    with pytest.raises(error, match=text) as caught:
        pack({"good": IDS, "bad": column}, **({"lengths": [1, 2]} | options))
    assert caught.value.path.startswith(pack.__name__)


@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields])
def test_fields_that_are_not_valid(pack):
    bad = [(None, "dict of names"), ([IDS], "found list"), ({1: IDS}, "not strings")]
    for fields, text in bad:
        with pytest.raises(ArgumentTypeError, match=text):
            pack(fields, lengths=[1, 2])


# --- signs that a batch is not what its producer believes ---------------------------------------

LENGTHS = torch.tensor([2, 4, 1])
PADDED = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 3, 0], [4, 0, 0, 0, 0]])
LEFTOVERS = torch.arange(15).view(3, 5)


OPTIONS: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"]}


RESPONSES = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]])
PADDED_LEFT = {"p": (MASK.cumsum(1) - 1).clamp(min=0), "ids": MASK * 7}
POSITIONS = {"logprobs": LEFTOVERS.float(), "p": torch.arange(5).expand(3, 5), "ids": PADDED}
BY_MASK = {"lengths": None, "mask": MASK}
RECTANGULAR = r"'x'\): stays rectangular .* its rows or its width"
NAMES = "token_aligned_fields.*expected one of 'x', found 'ys'"
NEITHER = "lengths or a mask to pack it by, found neither"
CONSTANT = r"'p'\), row 0: .*one constant.*prompt or response lengths"
# Columns, other options, and the texts of the warning and of the error of strict=True, if any.
SIGNS: list[tuple[Any, dict[str, Any], str | None, str | None]] = [
    ({"x": PADDED}, {}, None, None),
    ({"x": torch.ones(3)}, {}, None, None),
    ({"x": np.array(["a", None, 1], dtype=object)}, {}, None, None),
    ({"x": ["a", "b", "c"]}, {}, None, None),
    ({"x": stack_or_nest([torch.ones(n) for n in (2, 4, 1)])}, {}, None, None),
    ({"x": LEFTOVERS.float().requires_grad_()}, {}, None, None),
    ({"x": (LEFTOVERS % 2).bfloat16()}, {}, None, None),
    ({"x": LEFTOVERS % 2 == 1}, {}, None, None),
    ({"x": torch.ones(0, 5).long()}, {"lengths": LENGTHS[:0]}, None, None),
    # Names, widths, and no lengths.
    ({"x": PADDED}, {"token_aligned_fields": ["x", "ys", "z"]}, None, NAMES),
    ({"x": PADDED[:, :3]}, {}, RECTANGULAR, r"expected a per-token column \(3, 4 or more"),
    ({"x": torch.ones(3, 2, 4)}, {}, RECTANGULAR, r"expected a per-token column \(3, 4 or more"),
    ({"x": torch.ones(2, 5)}, BY_MASK, RECTANGULAR, r"'x'\): .*\(2, 6, .*, found shape \(2, 5\)"),
    ({"x": PADDED}, {"lengths": None}, None, NEITHER),
    ({"x": PADDED, "y": PADDED[:, :4]}, {"token_aligned_fields": None}, None, None),
    # One column of integers is enough, wherever it is: position ids go on into the pads.
    (POSITIONS, {"token_aligned_fields": ["logprobs", "p", "ids"]}, None, None),
    (POSITIONS, {"token_aligned_fields": ["logprobs", "p"]}, r"'p'\): cells after rows", CONSTANT),
    (PADDED_LEFT, BY_MASK | {"token_aligned_fields": None}, None, None),
    (PADDED_LEFT, BY_MASK | {"mask": RESPONSES, "token_aligned_fields": None}, None, CONSTANT),
]


@pytest.mark.filterwarnings("error::jagcodec.errors.JagcodecWarning")
@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields])
@pytest.mark.parametrize(("fields", "options", "warning", "error"), SIGNS)
def test_signs_are_warnings_and_errors_if_strict(pack, fields, options, warning, error):
    options = OPTIONS | options
    with pytest.warns(JagcodecWarning, match=warning) if warning else nullcontext():
        pack(fields, **options)
    kind = ArgumentKeyError if error == NAMES else ArgumentError
    with pytest.raises(kind, match=error) if error else nullcontext():
        pack(fields, **options, strict=True)


@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields])
def test_lengths_that_pack_no_column_are_a_warning(pack):
    with pytest.warns(JagcodecWarning, match=r"\(lengths\): lengths pack no column"):
        pack({"x": PADDED, "reward": torch.ones(3)}, lengths=LENGTHS)


@pytest.mark.filterwarnings("error::jagcodec.errors.JagcodecWarning")
@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields])
@pytest.mark.parametrize("options", [{"lengths": LENGTHS}, {"mask": PADDED[:, :4] != 0}])
def test_a_column_without_its_first_token_is_a_warning(pack, options):
    """Not one that is much narrower, nor one that is said not to be per-token."""
    columns = {"ids": PADDED[:, :4], "reward": torch.ones(3)}
    for width, inner in itertools.product(range(5), [(), (2,)]):
        narrow: Any = columns | {"lp": torch.ones(3, width, *inner)}
        text = r"\('lp'\): stays rectangular, because it is a few cells narrower"
        with pytest.warns(JagcodecWarning, match=text) if width in (2, 3) else nullcontext():
            pack(narrow, **options)
        pack(narrow, **options, token_aligned_fields=["ids"])
        named: Any = options | {"token_aligned_fields": ["ids", "lp"]}
        if width < 4:
            with pytest.warns(JagcodecWarning, match=r"\('lp'\): stays rectangular although"):
                pack(narrow, **named)
            with pytest.raises(ArgumentError, match=r"'lp'.*If it lacks the first token"):
                pack(narrow, **named, strict=True)
    # The remedy helps.
    padded: Any = columns | {"lp": torch.nn.functional.pad(torch.ones(3, 3), (1, 0))}
    for each in (options, options | {"token_aligned_fields": ["ids", "lp"]}):
        assert pack_jagged_fields(padded, **each)["lp"].is_nested


INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@st.composite
def rectangles(draw):
    """Of some rows, and now and then of more than are read one by one."""
    rows, width = draw(st.sampled_from([1, 2, 4, 20])), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    inner = draw(st.sampled_from([(), (2,), (0,), (2, 1)]))
    dtype = draw(st.sampled_from([*INTEGERS, torch.float16, torch.complex128]))
    column = draw(tensors((rows, width, *inner), dtype))
    if draw(st.booleans()):
        column = column.clone()
        for i, length in enumerate(lengths):
            column[i, length:] = 3
            if draw(st.integers(0, 3)) == 0 and length < width:
                column[i, draw(st.integers(length, width - 1))] = 4
    return column, torch.tensor(lengths)


@given(rectangles())
def test_a_warning_compares_two_cells_of_each_row_and_strict_all_bits_of_all(drawn):
    column, lengths = drawn
    width = column.shape[1]
    cells = bits(column)
    after = [(i, n) for i, n in enumerate(lengths.tolist()) if n < width]
    differ = any(cells[i][n] != cells[i][width - 1] for i, n in after)
    pads = [(i, repr(cells[i][j])) for i, n in after for j in range(n, width)]
    uneven = [i for i, cell in pads if cell != pads[0][1]]
    is_integer = column.dtype in INTEGERS
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loose = encode_fields({"x": column}, lengths=lengths, token_aligned_fields=["x"])
        pack_per_token_field(column, lengths)
    assert len(caught) == 2 * (differ and is_integer)
    options: Any = {"lengths": lengths, "token_aligned_fields": ["x"], "strict": True}
    if is_integer and uneven and column.numel():
        with pytest.raises(ArgumentError, match=rf"'x'\), row {uneven[0]}: .*one constant"):
            encode_fields({"x": column}, **options)
    else:
        assert message(encode_fields({"x": column}, **options)) == message(loose)


def test_python_shows_a_warning_once_per_line_that_called():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["ids", "wide"]}
        for step in range(5):
            columns = {"ids": LEFTOVERS + step, "wide": torch.ones(3, 3 - step % 2)}
            pack_jagged_fields(columns, **options)
            encode_fields(columns, **options)
            padding_tax(columns, **options)
            pack_per_token_field(columns["ids"], LENGTHS)
            maybe_pack_jagged(columns["ids"][:, :4], LENGTHS)
            pack_per_token_field(PADDED + step, LENGTHS)
            maybe_pack_jagged(PADDED[:, :4], LENGTHS)
    lines = Counter(warning.lineno for warning in caught)
    assert [lines[line] for line in sorted(lines)] == [2, 2, 2, 1, 1]
    assert {warning.filename for warning in caught} == {__file__}
    texts = "stays rectangular .* its rows or its width", "cells after rows are left out"
    for text, count in zip(texts, (3, 5), strict=True):
        assert sum(bool(re.search(text, str(warning.message))) for warning in caught) == count
