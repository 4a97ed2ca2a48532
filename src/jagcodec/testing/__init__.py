"""The oracle and the hypothesis strategies that this project tests itself with, for your tests.

Example:
    >>> from jagcodec.testing import assert_same, jagged_batches
    >>> from hypothesis import given, settings
    >>> @settings(max_examples=5, database=None)
    ... @given(jagged_batches())
    ... def test_my_adapter(batch):
    ...     assert_same(my_adapter(batch.fields), batch.fields)
    >>> my_adapter = dict
    >>> test_my_adapter()

`oracle` models the layouts in plain Python lists, and compares values down to the last bit, such as
two batches with `is_same`; it needs nothing but the library. `strategies` generates batches and
values for hypothesis (``pip install 'jagcodec[testing]'``), which is imported only for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jagcodec.testing.oracle import assert_same, bits, is_same, pad_rows, rows_of

if TYPE_CHECKING:
    from jagcodec.testing.strategies import (
        JaggedBatch,
        arrays,
        jagged_batches,
        jagged_tensors,
        lengths_in,
        numpy_scalars,
        sparse_tensors,
        strided_nested_tensors,
        tensordicts,
        tensors,
        torch_dtypes,
        trees,
    )

__all__ = [
    "JaggedBatch",
    "arrays",
    "assert_same",
    "bits",
    "is_same",
    "jagged_batches",
    "jagged_tensors",
    "lengths_in",
    "numpy_scalars",
    "pad_rows",
    "rows_of",
    "sparse_tensors",
    "strided_nested_tensors",
    "tensordicts",
    "tensors",
    "torch_dtypes",
    "trees",
]


def __getattr__(name: str) -> Any:
    """The strategies: hypothesis is imported only by those who use them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from jagcodec.testing import strategies
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("hypothesis"):
            raise
        raise ModuleNotFoundError(
            f"jagcodec.testing.{name} needs hypothesis: pip install 'jagcodec[testing]'",
            name=error.name,
        ) from error
    return getattr(strategies, name)
