"""Signs that a batch is not what its producer believes: warnings, and errors with strict=True."""

import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    encode_fields,
    materialize,
    maybe_pack_jagged,
    open_wire,
    pack_jagged_fields,
    pack_per_token_field,
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


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", BY_NAME)
def test_names_that_are_not_columns(pack):
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x", "labels", "logprob"]}
    silent(pack, {"x": IDS}, **options)
    text = r"token_aligned_fields.*expected one of 'x', found 'labels'"
    with pytest.raises(ArgumentKeyError, match=text):
        pack({"x": IDS}, strict=True, **options)


@pytest.mark.parametrize("source", [lambda td: td, lambda td: open_wire(jagcodec.encode(td))])
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


# --- columns that stay rectangular -------------------------------------------------------------


@pytest.mark.parametrize("pack", [*BY_NAME, per_token])
@pytest.mark.parametrize("column", [IDS[:, :3], torch.ones(3, 2, 4)])
def test_a_named_column_that_cannot_be_packed(pack, column):
    with pytest.warns(JagcodecWarning, match="stays rectangular .* its rows or its width"):
        pack({"x": column}, **OPTIONS)
    if pack is not per_token:
        with pytest.raises(ArgumentError, match=r"expected a per-token column \(3, 4 or more"):
            pack({"x": column}, strict=True, **OPTIONS)
    else:
        with pytest.warns(JagcodecWarning, match="stays rectangular"):
            pack({"x": torch.ones(2, 4)}, **OPTIONS)  # the rows do not fit


@pytest.mark.parametrize("pack", BY_NAME)
def test_without_lengths_strict_has_nothing_to_pack_by(pack):
    silent(pack, {"x": IDS}, token_aligned_fields=["x"])
    with pytest.raises(ArgumentError, match="lengths or a mask to pack it by, found neither"):
        pack({"x": IDS}, token_aligned_fields=["x"], strict=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("column", "lengths"),
    [
        (torch.ones(3), LENGTHS),
        (np.array(["a", None, 1], dtype=object), LENGTHS),
        (["a", "b", "c"], LENGTHS),
        (stack_or_nest([torch.ones(2), torch.ones(4), torch.ones(1)]), LENGTHS),
        (LEFTOVERS.float().requires_grad_(), LENGTHS),
        (torch.ones(0, 5).long(), LENGTHS[:0]),
        *(((LEFTOVERS % 2).to(dtype), LENGTHS) for dtype in (torch.bfloat16, torch.bool)),
    ],
)
def test_other_columns_give_no_warning(strict, column, lengths):
    for pack in BY_NAME:
        options: Any = {"lengths": lengths, "token_aligned_fields": ["x"], "strict": strict}
        silent(pack, {"x": column}, **options)


# --- cells after rows --------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [*BY_NAME, per_token, guess])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_that_are_left_out(pack, dtype):
    with pytest.warns(JagcodecWarning, match="cells after rows are left out") as caught:
        pack({"x": LEFTOVERS.to(dtype)}, **OPTIONS)
    assert [warning.filename for warning in caught] == [__file__]
    silent(pack, {"x": IDS.to(dtype)}, **OPTIONS)


@pytest.mark.parametrize("pack", BY_NAME)
def test_one_column_of_integers_speaks_for_the_lengths(pack):
    """Any one is enough, wherever it is: position ids go on into the pads."""
    positions = torch.arange(5).expand(3, 5)
    fields = {"logprobs": LEFTOVERS.float(), "positions": positions, "ids": IDS}
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": list(fields)}
    silent(pack, fields, **options)
    silent(pack, fields, **options, strict=True)
    options["token_aligned_fields"].remove("ids")
    with pytest.warns(JagcodecWarning, match=r"'positions'\): cells"):
        pack(fields, **options)
    text = r"'positions'\), row 0: .*one constant.*prompt or response lengths"
    with pytest.raises(ArgumentError, match=text):
        pack(fields, **options, strict=True)


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


# --- once per line -----------------------------------------------------------------------------

PROGRAM = """
import torch, jagcodec
options = dict(lengths=torch.tensor([2, 4]), token_aligned_fields=["ids", "wide"])
for step in range(5):
    columns = {"ids": torch.arange(10).view(2, 5) + step, "wide": torch.ones(2, 3 - step % 2)}
    jagcodec.encode_fields(columns, **options)
    jagcodec.padding_tax(columns, **options)
    jagcodec.pack_per_token_field(columns["ids"], options["lengths"])
    jagcodec.maybe_pack_jagged(columns["ids"][:, :4], options["lengths"])
"""


def test_python_shows_a_warning_once_per_line_that_called(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shown = [line for line in run.stderr.splitlines() if "JagcodecWarning" in line]
    assert len(shown) == len(set(shown))
    lines = [int(line.split(":")[1]) for line in shown]
    assert sorted(lines) == [6, 6, 7, 7, 8, 9], run.stderr
    assert all(line.startswith(str(path)) for line in shown)
