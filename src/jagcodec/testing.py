"""Hypothesis strategies of batches, and a bitwise comparison, for your tests.

Example:
    >>> from jagcodec.testing import assert_same, jagged_batches
    >>> from hypothesis import given, settings
    >>> @settings(max_examples=5, database=None)
    ... @given(jagged_batches())
    ... def test_my_adapter(batch):
    ...     assert_same(dict(batch.fields), batch.fields)
    >>> test_my_adapter()

The strategies need hypothesis; `is_same` and `assert_same` do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jagcodec._compiling import untraced
from jagcodec.memory.tensor_bytes import from_bytes
from jagcodec.wire.compare import first_difference
from jagcodec.wire.spec import TORCH_ITEMSIZES

__all__ = ["JaggedBatch", "assert_same", "is_same", "jagged_batches", "jagged_tensors", "tensors"]


@untraced
def assert_same(actual: Any, expected: Any) -> None:
    """Assert that two values are equal in type, dtype, shape, layout, order and bits.

    Example:
        >>> assert_same({"a": [1.0]}, {"a": [1.0]})
        >>> assert_same({"a": [1, True]}, {"a": [1, 1]})
        Traceback (most recent call last):
        AssertionError: column a, row 1: type bool and int

    Raises:
        AssertionError: They differ; the message names the first difference.

    Parameters and memory-mapped tensors count as plain tensors. A jagged tensor with holes equals
    one with the same rows and no holes.
    """
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(str(difference))


@untraced
def is_same(actual: Any, expected: Any) -> bool:
    """Whether two values, such as two batches, are equal, as `assert_same` compares them.

    ``==`` of two batches compares cell by cell, and raises for jagged columns.

    Example:
        >>> is_same({"a": [1.0]}, {"a": [1.0]}), is_same({"a": [1.0]}, {"a": [1]})
        (True, False)
    """
    return first_difference(actual, expected) is None


@dataclass(frozen=True)
class JaggedBatch:
    """Padded columns as a framework holds them.

    Attributes:
        fields: Name to column: per-token tensors (N, S, ...), per-row tensors, object arrays.
        lengths: (N,) int64.
        token_aligned_fields: Names of the per-token columns.
        width: S; not less than the longest row.
    """

    fields: dict[str, Any]
    lengths: torch.Tensor
    token_aligned_fields: frozenset[str]
    width: int


def jagged_batches(max_rows: int = 5, max_width: int = 6) -> Any:
    """A strategy: a `JaggedBatch` of 0 to `max_rows` rows, each of 0 to `max_width` tokens."""
    return _strategies().composite(_jagged_batch)(max_rows, max_width)


def jagged_tensors(rows: int | None = None) -> Any:
    """A strategy: a jagged tensor with ragged dim 1 or 2, with or without holes."""
    return _strategies().composite(_jagged_tensor)(rows)


def tensors(shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Any:
    """A strategy: a strided CPU tensor: contiguous, transposed, sliced, stepped or expanded."""
    return _strategies().composite(_draw_tensor)(shape, dtype)


def _strategies() -> Any:
    """The module of hypothesis, which is imported on first use."""
    try:
        from hypothesis import strategies
    except ModuleNotFoundError as error:
        text = "the strategies of jagcodec.testing need hypothesis: pip install 'hypothesis>=6.100'"
        raise ModuleNotFoundError(text, name=error.name) from error
    return strategies


def _jagged_batch(draw: Any, max_rows: int, max_width: int) -> JaggedBatch:
    st = _strategies()
    rows, width = draw(st.integers(0, max_rows)), draw(st.integers(0, max_width))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    inner = st.lists(st.integers(0, 3), max_size=2)
    names = [f"token_{i}" for i in range(draw(st.integers(0, 3)))]
    fields: dict[str, Any] = {name: draw(tensors((rows, width, *draw(inner)))) for name in names}
    for i in range(draw(st.integers(0, 2))):
        fields[f"row_{i}"] = draw(tensors((rows, *draw(inner))))
    if draw(st.booleans()):
        scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
        messages = np.empty(rows, dtype=object)
        for i in range(rows):
            messages[i] = draw(scalars | st.complex_numbers() | st.binary(max_size=8))
        fields["message"] = messages
    return JaggedBatch(fields, torch.tensor(lengths, dtype=torch.int64), frozenset(names), width)


def _jagged_tensor(draw: Any, rows: int | None) -> torch.Tensor:
    st = _strategies()
    rows = draw(st.integers(0, 4)) if rows is None else rows
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    outer = draw(st.lists(st.integers(1, 3), max_size=1))
    inner = draw(st.lists(st.integers(0, 3), max_size=1))
    values = draw(tensors((*outer, sum(lengths), *inner)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=dtype)
    # With holes, a row is shorter than the cells between its offsets. Without, torch may be told
    # the shortest and the longest row.
    lengths_with_holes, bounds = None, {}
    if rows and draw(st.booleans()):
        lengths_with_holes = torch.tensor([draw(st.integers(0, n)) for n in lengths], dtype=dtype)
    elif draw(st.booleans()):
        bounds = {"min_seqlen": min(lengths, default=0), "max_seqlen": max(lengths, default=0)}
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths=lengths_with_holes, jagged_dim=len(outer) + 1, **bounds
    )


def _draw_tensor(
    draw: Any, shape: tuple[int, ...] | None, dtype: torch.dtype | None
) -> torch.Tensor:
    st = _strategies()
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if dtype is None:
        names = [name for name in TORCH_ITEMSIZES if hasattr(torch, name)]
        dtype = getattr(torch, draw(st.sampled_from(names)))
    kinds = ["contiguous", "transposed", "sliced", "stepped", "expanded"]
    kind = draw(st.sampled_from(kinds)) if shape else "contiguous"
    if kind == "transposed":
        return cells(draw, shape[::-1], dtype).permute(*range(len(shape))[::-1])
    if kind == "sliced":
        return cells(draw, (*shape[:-1], shape[-1] + 2), dtype)[..., 1 : shape[-1] + 1]
    if kind == "stepped":
        return cells(draw, (2 * shape[0], *shape[1:]), dtype)[::2]
    if kind == "expanded":
        return cells(draw, (1, *shape[1:]), dtype).expand(shape)
    return cells(draw, shape, dtype)


def cells(draw: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of arbitrary bits; booleans are 0 or 1."""
    size = torch.Size(shape).numel() * dtype.itemsize
    # A few random bytes, repeated: varied bits that are cheap to draw.
    seed = draw(_strategies().binary(min_size=1, max_size=23)) if size else b"0"
    data = np.resize(np.frombuffer(seed, dtype=np.uint8), size).astype(np.uint8)
    if dtype == torch.bool:
        data &= 1
    return from_bytes(data, dtype, shape)
