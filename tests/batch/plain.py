"""A batch as a plain list of rows: each a dict of names to the bits, or the text, of its cells."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from jagcodec import WireBatch
from jagcodec.types import PackedColumn
from tests.oracle import bits, rows_of


def table(batch, count=None):
    """The rows of a batch, of which there are `count` if a dict does not say so."""
    if isinstance(batch, WireBatch):
        batch = batch.to_tensordict()
    if isinstance(batch, TensorDictBase):
        assert count in (None, batch.batch_size[0])
        count = batch.batch_size[0]
    elif count is None:
        count = len(batch)
    columns = {name: _entries(leaf, count) for name, leaf in batch.items()}
    assert all(len(column) == count for column in columns.values())
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _entries(leaf, count):
    if isinstance(leaf, NonTensorStack):
        return [repr(item) for item in leaf.tolist()]
    if isinstance(leaf, NonTensorData):
        held = leaf.data
        by_row = isinstance(held, np.ndarray) and held.dtype == object
        return [repr(item) for item in held] if by_row else [repr(held)] * count
    if isinstance(leaf, PackedColumn):
        cuts = leaf.cu_seqlens.tolist()
        assert leaf.max_seqlen == max(np.diff(cuts), default=0)
        steps = [i for a, b in itertools.pairwise(cuts) for i in range(b - a)]
        assert leaf.position_ids.tolist() == steps
        dim = leaf.values.shape.index(cuts[-1])
        rows = [leaf.values.narrow(dim, a, b - a) for a, b in itertools.pairwise(cuts)]
        return [(leaf.values.dtype, bits(row)) for row in rows]
    if isinstance(leaf, torch.Tensor):
        return [(leaf.dtype, row) for row in (rows_of(leaf) if leaf.is_nested else bits(leaf))]
    if isinstance(leaf, (np.ndarray, list)):
        return [repr(item) for item in leaf]
    return table(leaf, count)


def offsets_of(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def jagged(rows, offsets=None):
    """A jagged column of rows (n, ...) of one dtype."""
    lengths = [len(row) for row in rows]
    offsets = offsets_of(lengths) if offsets is None else offsets
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(rows), offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def rollout_of(rows, tag="gsm8k"):
    """A batch of (number, tokens) for each row, whose cells say where they are from.

    Numbers from 2 on do not fit in a byte, and from 4 on not in two.
    """
    offsets = offsets_of([tokens for _, tokens in rows])
    ids = [torch.arange(tokens) + (number << 7 * number) for number, tokens in rows]
    views = torch.cat([torch.stack([row, -row]).int() for row in ids], 1)
    numbers = torch.tensor([float(number) for number, _ in rows])
    inner = {"ids": jagged([row[:1].short() for row in ids]), "reward": numbers.double()}
    return TensorDict(
        {
            "ids": jagged(ids, offsets),
            "pairs": jagged([torch.stack([row, -row], 1).float() for row in ids], offsets),
            "done": jagged([row % 3 == 0 for row in ids], offsets),
            "views": torch.nested.nested_tensor_from_jagged(views, offsets, jagged_dim=2),
            "reward": numbers,
            "grid": (numbers.view(-1, 1, 1) * torch.ones(2, 3)).short(),
            "text": NonTensorStack(*[NonTensorData({"row": number}) for number, _ in rows]),
            "tag": NonTensorData(tag, batch_size=[len(rows)]),
            "inner": TensorDict(inner, [len(rows)]),
        },
        [len(rows)],
    )


@st.composite
def indices(draw, rows):
    """An index, and the rows that it stands for."""
    kinds = ["slice", "booleans", "empty", *(["integers", "one"] if rows else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "slice":
        index = draw(st.slices(rows))
        return index, list(range(rows))[index]
    if kind == "empty":
        return [], []
    if kind == "one":
        i = draw(st.integers(-rows, rows - 1))
        return i, [i % rows]
    form = draw(st.sampled_from([np.array, torch.tensor]))
    if kind == "booleans":
        chosen = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        dtype = bool if form is np.array else torch.bool
        return form(chosen, dtype=dtype), [i for i, wanted in enumerate(chosen) if wanted]
    chosen = draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=6))
    return (list if draw(st.booleans()) else form)(chosen), [i % rows for i in chosen]
