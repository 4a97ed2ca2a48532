"""Packing by a mask: padding on both sides, and holes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import ArgumentError, decode, encode, encode_fields, materialize, pack_jagged_fields
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError, JagcodecWarning
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.testing import tensors
from tests.helpers import message
from tests.oracle import bits, rows_of
from tests.strategies import torch_dtypes


@st.composite
def masks(draw):
    """Left-padded, right-padded, with holes, all or nothing; no rows and no cells among them."""
    rows, width = draw(st.integers(0, 4)), draw(st.integers(0, 7))
    cells = np.zeros((rows, width), dtype=bool)
    holes = draw(st.booleans())
    for row in cells:
        start, stop = sorted(draw(st.lists(st.integers(0, width), min_size=2, max_size=2)))
        row[start:stop] = True
        if holes:
            row[:] = draw(st.lists(st.booleans(), min_size=width, max_size=width))
    dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.int32, torch.uint8, torch.uint16]))
    return torch.from_numpy(cells).to(dtype)


@st.composite
def masked_batches(draw):
    mask = draw(masks())
    fields = {"row": draw(tensors((mask.shape[0],)))}
    for i in range(draw(st.integers(1, 3))):
        trailing = draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
        column = draw(tensors((*mask.shape, *trailing), draw(torch_dtypes())))
        if draw(st.booleans()):  # rows that lie apart
            column = contiguous_bits(column.transpose(0, 1)).transpose(0, 1)
        fields[f"token_{i}"] = column
    return mask, fields


def rows_by_mask(column, mask):
    """The oracle: the valid cells of each row, as plain lists of bits."""
    pairs = zip(bits(column), mask.tolist(), strict=True)
    return [[cell for cell, keep in zip(row, kept, strict=True) if keep] for row, kept in pairs]


@given(masked_batches())
def test_rows_are_the_cells_where_the_mask_is_true(batch):
    mask, fields = batch
    names = [name for name in fields if name.startswith("token")]
    td = pack_jagged_fields(fields, mask=mask, token_aligned_fields=names)
    frames = encode_fields(fields, mask=mask, token_aligned_fields=names)
    assert message(frames) == message(encode(td))
    assert td.batch_size == (mask.shape[0],)
    assert list(td.keys()) == list(fields)
    for name in names:
        assert rows_of(td[name]) == rows_by_mask(fields[name], mask)
        assert td[name].offsets() is td[names[0]].offsets()
    assert not td["row"].is_nested


@given(masks())
def test_a_mask_of_right_padding_is_the_lengths(mask):
    lengths = mask.long().sum(1)
    right = torch.arange(mask.shape[1]) < lengths[:, None]
    fields = {"ids": torch.arange(mask.numel()).view(mask.shape), "r": torch.zeros(len(mask))}
    frames = encode_fields(fields, mask=right)
    fields["ids"] = fields["ids"].where(right, 0)
    assert message(frames) == message(
        encode_fields(fields, lengths=lengths, token_aligned_fields=["ids"])
    )


MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
IDS = torch.tensor([[9, 9, 3, 4, 5, 9], [9, 2, 3, 4, 5, 6]])


def test_prompts_on_the_left_and_responses_on_the_right_come_back():
    """As verl pads them: three cells of prompt, three of response."""
    fields = {"ids": IDS, "logprobs": IDS.float() * MASK, "attention_mask": MASK}
    frames = encode_fields(fields, mask="attention_mask")
    assert decode(frames)["ids"].values().tolist() == [3, 4, 5, 2, 3, 4, 5, 6]
    batch = materialize(
        frames,
        padding_side="left_right",
        prompt_lengths=MASK[:, :3].sum(1),
        prompt_width=3,
        pad_to_seqlen=6,
        pad_value_dict={"ids": 9},
    )
    assert all(torch.equal(batch[name], column) for name, column in fields.items())


def test_a_mask_with_holes_restores_what_it_packed():
    holes = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0]])
    ids = torch.arange(12).view(2, 6).where(holes == 1, 9)
    fields = {"ids": ids, "mask": holes}
    td = decode(encode_fields(fields, mask="mask", token_aligned_fields=["ids"], narrow=["mask"]))
    out = torch.full(holes.shape, 9)
    out[td["mask"] == 1] = td["ids"].values()
    assert torch.equal(out, ids)


def test_rows_of_one_run_are_not_copied_before_they_are_written(monkeypatch):
    def refused(view):
        raise AssertionError("copied")

    monkeypatch.setattr("jagcodec.pack.mask.values_of", refused)
    assert decode(encode_fields({"ids": IDS}, mask=MASK))["ids"].values()[0] == 3


def test_columns_without_the_shape_of_the_mask_stay():
    fields = {"ids": IDS, "image": torch.ones(2, 5), "reward": torch.ones(2), "tag": ["a", "b"]}
    td = pack_jagged_fields(fields, mask=MASK)
    assert [td[name].is_nested for name in ("ids", "image", "reward")] == [True, False, False]
    assert list(td["tag"]) == ["a", "b"]
    options: Any = {"mask": MASK, "token_aligned_fields": ["ids", "image", "reward"]}
    with pytest.warns(JagcodecWarning, match=r"'image'\): stays rectangular"):
        pack_jagged_fields(fields, **options)
    with pytest.raises(ArgumentError, match=r"'image'\): .*\(2, 6, \.\.\.\), found shape \(2, 5\)"):
        pack_jagged_fields(fields, **options, strict=True)


def test_strict_looks_at_the_cells_outside_the_mask():
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    good = {"position_ids": positions, "ids": IDS}
    pack_jagged_fields(good, mask=MASK, strict=True)
    responses = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]])
    with pytest.raises(ArgumentError, match=r"'position_ids'\), row 0: .*one constant"):
        pack_jagged_fields(good, mask=responses, strict=True)


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (torch.ones(2).bool(), ArgumentError, r"\(mask\): .*shape \(2,\)"),
        (torch.ones(2, 6), ArgumentTypeError, "float32"),
        (torch.ones(2, 6, dtype=torch.bfloat16), ArgumentTypeError, "bfloat16"),
        ([[True]], ArgumentTypeError, "found list"),
        (torch.ones(2, 6).to_sparse(), ArgumentTypeError, "sparse"),
        ("absent", ArgumentKeyError, "absent"),
        ("ids", ArgumentError, r"'ids'\), row 0: .*0 and 1, found 9"),
        (torch.tensor([[0, 1], [1, -1]]), ArgumentError, r"\(mask\), row 1: .*found -1"),
        (torch.ones(3, 6).bool(), ArgumentError, "expected 3 rows"),
    ],
)
@pytest.mark.parametrize("pack", [pack_jagged_fields, encode_fields])
def test_masks_that_are_not_valid(pack, mask, error, text):
    with pytest.raises(error, match=text) as caught:
        pack({"ids": IDS}, mask=mask)
    assert pack.__name__ in str(caught.value)


def test_lengths_or_a_mask():
    with pytest.raises(ArgumentError, match="lengths or a mask, found both"):
        pack_jagged_fields({"ids": IDS}, lengths=[3, 5], mask=MASK)
