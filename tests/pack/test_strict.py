"""Signs that a batch is not what its producer believes: warnings, and errors with strict=True."""

import inspect
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
    JagcodecError,
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


BY_NAME = [pack_jagged_fields, encode_fields]
ALL = [*BY_NAME, per_token]


def silent(function, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments, **options)


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", BY_NAME)
def test_names_that_are_no_columns(pack):
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x", "labels", "logprob"]}
    silent(pack, {"x": IDS}, **options)
    with pytest.raises(
        ArgumentKeyError, match=r"token_aligned_fields.*expected one of 'x', found 'labels'"
    ):
        pack({"x": IDS}, strict=True, **options)
    silent(pack, {"x": IDS}, lengths=LENGTHS, token_aligned_fields=["x"], strict=True)


@pytest.mark.parametrize("source", [lambda td: td, lambda td: open_wire(jagcodec.encode(td))])
@pytest.mark.parametrize(
    ("argument", "good", "bad", "named"),
    [
        (
            "pad_value_dict",
            {"ids": 1, "reward": 0, ("inner", "ids"): 3},
            {"ids": 1, "idz": 2},
            "'idz'",
        ),
        ("padding_side", {"logprob": "left"}, {"logprobs": "left"}, "'logprobs'"),
        ("token_aligned_fields", ["reward", "ids"], ["rewards", "ids"], "'rewards'"),
        ("keep_jagged", ["ids", ("inner", "ids")], ["ids", "inner"], "'inner'"),
        ("pad_value_dict", {}, {("inner", "idz"): 3}, "idz"),
    ],
)
def test_names_that_materialize_does_not_find(source, argument, good, bad, named):
    td = rollout()
    td["inner"] = TensorDict({"ids": td["ids"]}, [3])
    td = source(td)
    silent(materialize, td, **{argument: good}, strict=True)
    silent(materialize, td, **{argument: bad})
    with pytest.raises(ArgumentKeyError, match=re.escape(f"materialize({argument})")) as error:
        materialize(td, **{argument: bad}, strict=True)
    assert named in str(error.value) or named == "idz"


def test_a_pad_for_the_mask_that_materialize_adds_is_known():
    options: Any = {"pad_value_dict": {"attention_mask": True}, "attention_mask_of": "ids"}
    assert materialize(rollout(), **options, strict=True)["attention_mask"].all()


def test_a_refused_call_of_materialize_writes_nothing():
    out = materialize(rollout())
    before = {name: column.clone() for name, column in out.items() if name == "ids"}
    with pytest.raises(ArgumentKeyError):
        materialize(rollout(), out=out, pad_value_dict={"idz": 1, "ids": 9}, strict=True)
    assert torch.equal(out["ids"], before["ids"])


# --- columns that stay rectangular -------------------------------------------------------------


@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields, per_token])
@pytest.mark.parametrize("column", [IDS[:, :3], torch.ones(3, 2, 4)])
def test_a_named_column_that_cannot_be_packed(pack, column):
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"]}
    with pytest.warns(JagcodecWarning, match="stays rectangular") as caught:
        pack({"x": column}, **options)
    assert [warning.filename for warning in caught] == [__file__] * 1
    if pack is not per_token:
        with pytest.raises(ArgumentError, match=r"expected a per-token column \(3, 4 or more"):
            pack({"x": column}, strict=True, **options)


def test_other_rows_than_lengths():
    with pytest.warns(JagcodecWarning, match="its rows or its width"):
        pack_per_token_field(torch.ones(2, 4), LENGTHS)


def test_without_lengths_nothing_is_packed():
    options: Any = {"lengths": None, "token_aligned_fields": ["x"]}
    silent(pack_jagged_fields, {"x": IDS}, **options)
    with pytest.raises(ArgumentError, match="lengths or a mask to pack it by, found neither"):
        pack_jagged_fields({"x": IDS}, strict=True, **options)


@pytest.mark.parametrize("pack", BY_NAME)
@pytest.mark.parametrize("strict", [False, True])
def test_columns_of_one_dim_are_exempt(pack, strict):
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"], "strict": strict}
    silent(pack, {"x": torch.ones(3)}, **options)
    silent(pack, {"x": np.array(["a", None, 1], dtype=object)}, **options)
    silent(pack, {"x": ["a", "b", "c"]}, **options)
    silent(pack_per_token_field, torch.ones(3), LENGTHS)


@pytest.mark.parametrize("pack", BY_NAME)
@pytest.mark.parametrize("strict", [False, True])
def test_jagged_columns_are_as_they_are(pack, strict):
    rows = stack_or_nest([torch.ones(2), torch.ones(4), torch.ones(1)])
    silent(pack, {"x": rows}, lengths=LENGTHS, token_aligned_fields=["x"], strict=strict)
    silent(pack_per_token_field, rows, LENGTHS)


# --- cells behind rows -------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [*ALL, guess])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_that_are_left_out(pack, dtype):
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"]}
    column = LEFTOVERS.to(dtype)
    with pytest.warns(JagcodecWarning, match="cells after rows are left out") as caught:
        loose = pack({"x": column}, **options)
    assert len(caught) == 1
    again = silent(pack, {"x": IDS.to(dtype)}, **options)
    assert type(again) is type(loose)
    if pack in BY_NAME:
        text = r"'x'\), row 0.*one constant.*prompt or response lengths"
        with pytest.raises(ArgumentError, match=text):
            pack({"x": column}, strict=True, **options)
        silent(pack, {"x": IDS.to(dtype)}, strict=True, **options)


@pytest.mark.parametrize("pack", BY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
@pytest.mark.parametrize("strict", [False, True])
def test_only_columns_of_integers_say_what_is_padding(pack, dtype, strict):
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"], "strict": strict}
    silent(pack, {"x": (LEFTOVERS % 2).to(dtype)}, **options)


@pytest.mark.parametrize("pack", BY_NAME)
def test_one_padded_column_is_enough_for_strict(pack):
    """Position ids go on into the padding, however they are padded."""
    positions = torch.arange(5).expand(3, 5)
    options: Any = {"lengths": LENGTHS, "strict": True}
    fields = {"positions": positions, "ids": IDS, "logprobs": LEFTOVERS.float()}
    silent(pack, fields, token_aligned_fields=list(fields), **options)
    del fields["ids"]
    with pytest.raises(ArgumentError, match=r"'positions'\), row 0"):
        pack(fields, token_aligned_fields=list(fields), **options)


def test_only_two_cells_of_a_row_are_looked_at():
    column = IDS.clone()
    column[2, 2] = 9  # between the first cell behind the row and the last
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"]}
    silent(pack_jagged_fields, {"x": column}, **options)
    with pytest.raises(ArgumentError, match="row 2"):
        pack_jagged_fields({"x": column}, strict=True, **options)


def test_one_column_of_integers_speaks_for_the_lengths():
    fields = {"logprobs": LEFTOVERS.float(), "ids": IDS, "positions": LEFTOVERS}
    silent(pack_jagged_fields, fields, lengths=LENGTHS, token_aligned_fields=list(fields))
    fields = {"logprobs": LEFTOVERS.float(), "positions": LEFTOVERS, "ids": IDS}
    with pytest.warns(JagcodecWarning, match=r"'positions'\): cells"):
        pack_jagged_fields(fields, lengths=LENGTHS, token_aligned_fields=list(fields))


def test_each_row_may_not_have_a_pad_of_its_own():
    column = torch.tensor([[1, 7, 7], [1, 2, 8], [1, 2, 3]])
    options: Any = {"lengths": torch.tensor([1, 2, 3]), "token_aligned_fields": ["x"]}
    silent(pack_jagged_fields, {"x": column}, **options)
    with pytest.raises(ArgumentError, match="row 1"):
        pack_jagged_fields({"x": column}, strict=True, **options)


def test_all_bits_are_compared():
    pads = torch.tensor([[1, -1, -1], [1, 2, -1]])
    options: Any = {"lengths": torch.tensor([1, 2]), "token_aligned_fields": ["x"], "strict": True}
    silent(pack_jagged_fields, {"x": pads}, **options)
    pads[1, 2] = -(1 << 62)
    with pytest.raises(ArgumentError, match="row 1"):
        pack_jagged_fields({"x": pads}, **options)


@st.composite
def rectangles(draw):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    inner = draw(st.sampled_from([(), (2,), (0,), (2, 1)]))
    column = draw(
        tensors(
            (rows, width, *inner),
            draw(st.sampled_from([torch.int64, torch.uint8, torch.float16, torch.complex128])),
        )
    )
    if draw(st.booleans()):
        column = column.clone()
        for i, length in enumerate(lengths):
            column[i, length:] = 3
            if draw(st.integers(0, 3)) == 0 and length < width:
                column[i, draw(st.integers(length, width - 1))] = 4
    return column, torch.tensor(lengths)


@given(rectangles())
def test_what_is_looked_at_is_said_cell_by_cell(drawn):
    column, lengths = drawn
    width = column.shape[1]

    def cell(i, j):
        return bits(column[i, j])

    behind = [(i, n) for i, n in enumerate(lengths.tolist()) if n < width]
    differ = any(cell(i, n) != cell(i, width - 1) for i, n in behind)
    pads = {repr(cell(i, j)) for i, n in behind for j in range(n, width)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loose = encode_fields({"x": column}, lengths=lengths, token_aligned_fields=["x"])
    assert bool(caught) == (differ and column.dtype in (torch.int64, torch.uint8))
    try:
        strict = encode_fields(
            {"x": column}, lengths=lengths, token_aligned_fields=["x"], strict=True
        )
    except ArgumentError:
        assert len(pads) > 1
    else:
        is_integer = column.dtype in (torch.int64, torch.uint8)
        assert len(pads) <= 1 or not column.numel() or not is_integer
        assert message(strict) == message(loose)


def test_tensors_with_gradients_and_no_rows():
    options: Any = {"lengths": LENGTHS, "token_aligned_fields": ["x"], "strict": True}
    silent(pack_jagged_fields, {"x": LEFTOVERS.float().requires_grad_()}, **options)
    none: Any = {"lengths": torch.zeros(0, dtype=torch.int64), "token_aligned_fields": ["x"]}
    silent(pack_jagged_fields, {"x": torch.ones(0, 5).long()}, strict=True, **none)
    silent(pack_jagged_fields, {"x": torch.ones(0, 5).long()}, **none)


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


def test_warnings_name_the_line_that_called():
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(JagcodecWarning) as caught:
        padding_tax({"x": LEFTOVERS}, lengths=LENGTHS, token_aligned_fields=["x"])
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, line)}


def test_the_category_is_public():
    assert issubclass(JagcodecWarning, UserWarning)
    assert not issubclass(JagcodecWarning, JagcodecError)
    assert JagcodecWarning.__module__ == "jagcodec.errors"
