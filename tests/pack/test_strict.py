"""Signs that a batch is not what its producer believes: warnings, and errors with strict=True."""

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
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    encode,
    encode_fields,
    materialize,
    maybe_pack_jagged,
    open_wire,
    pack_jagged_fields,
    pack_per_token_field,
    padding_tax,
    stack_or_nest,
)
from jagcodec.errors import ArgumentKeyError, JagcodecWarning
from jagcodec.testing import tensors
from tests.helpers import message, rollout
from tests.oracle import bits

LENGTHS = torch.tensor([2, 4, 1])
IDS = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 3, 0], [4, 0, 0, 0, 0]])
LEFTOVERS = torch.arange(15).view(3, 5)


def per_token(fields, *, lengths, token_aligned_fields):
    (name,) = token_aligned_fields
    return pack_per_token_field(fields[name], lengths)


def guess(fields, *, lengths, token_aligned_fields):
    (name,) = token_aligned_fields
    return maybe_pack_jagged(fields[name][:, : int(lengths.max())], lengths)


BY_NAME: list[Any] = [pack_jagged_fields, encode_fields]
OPTIONS: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"]}


def silent(function, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments, **options)


# Of left-padded rows, and of their responses alone.
MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
RESPONSES = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]])
PADDED_LEFT = {"p": (MASK.cumsum(1) - 1).clamp(min=0), "ids": MASK * 7}
POSITIONS = {"logprobs": LEFTOVERS.float(), "p": torch.arange(5).expand(3, 5), "ids": IDS}
BY_MASK = {"lengths": None, "mask": MASK}
RECTANGULAR = r"'x'\): stays rectangular .* its rows or its width"
NAMES = "token_aligned_fields.*expected one of 'x', found 'ys'"
NEITHER = "lengths or a mask to pack it by, found neither"
CONSTANT = r"'p'\), row 0: .*one constant.*prompt or response lengths"
# Columns, other options, and the texts of the warning and of the error of strict=True, if any.
SIGNS: list[tuple[Any, dict[str, Any], str | None, str | None]] = [
    ({"x": IDS}, {}, None, None),
    ({"x": torch.ones(3)}, {}, None, None),
    ({"x": np.array(["a", None, 1], dtype=object)}, {}, None, None),
    ({"x": ["a", "b", "c"]}, {}, None, None),
    ({"x": stack_or_nest([torch.ones(n) for n in (2, 4, 1)])}, {}, None, None),
    ({"x": LEFTOVERS.float().requires_grad_()}, {}, None, None),
    ({"x": (LEFTOVERS % 2).bfloat16()}, {}, None, None),
    ({"x": LEFTOVERS % 2 == 1}, {}, None, None),
    ({"x": torch.ones(0, 5).long()}, {"lengths": LENGTHS[:0]}, None, None),
    # Names, widths, and no lengths.
    ({"x": IDS}, {"token_aligned_fields": ["x", "ys", "z"]}, None, NAMES),
    ({"x": IDS[:, :3]}, {}, RECTANGULAR, r"expected a per-token column \(3, 4 or more"),
    ({"x": torch.ones(3, 2, 4)}, {}, RECTANGULAR, r"expected a per-token column \(3, 4 or more"),
    (
        {"x": torch.ones(2, 5)},
        BY_MASK,
        RECTANGULAR,
        r"'x'\): .*\(2, 6, \.\.\.\), found shape \(2, 5\)",
    ),
    ({"x": IDS}, {"lengths": None}, None, NEITHER),
    # One column of integers is enough, wherever it is: position ids go on into the pads.
    (POSITIONS, {"token_aligned_fields": ["logprobs", "p", "ids"]}, None, None),
    (POSITIONS, {"token_aligned_fields": ["logprobs", "p"]}, r"'p'\): cells after rows", CONSTANT),
    (PADDED_LEFT, BY_MASK | {"token_aligned_fields": None}, None, None),
    (PADDED_LEFT, BY_MASK | {"mask": RESPONSES, "token_aligned_fields": None}, None, CONSTANT),
]


@pytest.mark.parametrize("pack", BY_NAME)
@pytest.mark.parametrize(("fields", "options", "warning", "error"), SIGNS)
def test_signs_are_warnings_and_errors_if_strict(pack, fields, options, warning, error):
    options = OPTIONS | options
    if warning is None:
        silent(pack, fields, **options)
    else:
        with pytest.warns(JagcodecWarning, match=warning):
            pack(fields, **options)
    kind = ArgumentKeyError if error == NAMES else ArgumentError
    with pytest.raises(kind, match=error) if error else nullcontext():
        silent(pack, fields, **options, strict=True)


@pytest.mark.parametrize("column", [IDS[:, :3], torch.ones(3, 2, 4), torch.ones(2, 4)])
def test_a_column_that_cannot_be_packed_stays_rectangular(column):
    with pytest.warns(JagcodecWarning, match="stays rectangular .* its rows or its width"):
        pack_per_token_field(column, LENGTHS)


@pytest.mark.parametrize("pack", [*BY_NAME, per_token, guess])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_that_are_left_out(pack, dtype):
    with pytest.warns(JagcodecWarning, match="cells after rows are left out") as caught:
        pack({"x": LEFTOVERS.to(dtype)}, **OPTIONS)
    assert [warning.filename for warning in caught] == [__file__]
    silent(pack, {"x": IDS.to(dtype)}, **OPTIONS)


@st.composite
def rectangles(draw):
    """Of some rows, and now and then of more than are read one by one."""
    rows, width = draw(st.sampled_from([1, 2, 4, 20])), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    inner = draw(st.sampled_from([(), (2,), (0,), (2, 1)]))
    dtype = draw(st.sampled_from([torch.int64, torch.uint8, torch.float16, torch.complex128]))
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
    is_integer = column.dtype in (torch.int64, torch.uint8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loose = encode_fields({"x": column}, lengths=lengths, token_aligned_fields=["x"])
    assert bool(caught) == (differ and is_integer)
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
            encode_fields(columns, **options)
            padding_tax(columns, **options)
            pack_per_token_field(columns["ids"], LENGTHS)
            maybe_pack_jagged(columns["ids"][:, :4], LENGTHS)
    lines = Counter(warning.lineno for warning in caught)
    assert [lines[line] for line in sorted(lines)] == [2, 2, 1, 1]
    assert {warning.filename for warning in caught} == {__file__}


# --- names that materialize does not find ------------------------------------------------------


@pytest.mark.parametrize("source", [lambda td: td, lambda td: open_wire(encode(td))])
@pytest.mark.parametrize(
    ("argument", "good", "bad"),
    [
        ("pad_value_dict", {"ids": 1, "reward": 0, ("inner", "ids"): 3}, {"ids": 1, "idz": 2}),
        ("padding_side", {"logprob": "left"}, {"idz": "left"}),
        ("token_aligned_fields", ["reward", "ids"], ["idz", "ids"]),
        ("keep_jagged", ["ids", ("inner", "ids")], ["ids", "idz"]),
        ("pad_value_dict", {}, {("inner", "idz"): 3}),
    ],
)
def test_names_that_materialize_does_not_find(source, argument, good, bad):
    td = rollout()
    td["inner"] = TensorDict({"ids": td["ids"]}, [3])
    td = source(td)
    silent(materialize, td, **{argument: good}, strict=True)
    silent(materialize, td, **{argument: bad})
    with pytest.raises(ArgumentKeyError, match=rf"{re.escape(f'materialize({argument})')}.*idz"):
        materialize(td, **{argument: bad}, strict=True)


def test_a_refused_call_of_materialize_writes_nothing():
    out = materialize(rollout())
    before = out["ids"].clone()
    with pytest.raises(ArgumentKeyError):
        materialize(rollout(), out=out, pad_value_dict={"idz": 1, "ids": 9}, strict=True)
    assert torch.equal(out["ids"], before)


def test_a_pad_for_the_mask_that_materialize_adds_is_known():
    options: Any = {"pad_value_dict": {"attention_mask": True}, "attention_mask_of": "ids"}
    assert materialize(rollout(), **options, strict=True)["attention_mask"].all()
