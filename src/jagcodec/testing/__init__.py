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

`oracle` models the layouts in plain Python lists, and compares values down to the last bit;
`strategies` generates batches and values for hypothesis (``pip install 'jagcodec[testing]'``).
"""

from jagcodec.testing.oracle import assert_same, bits, pad_rows, rows_of

try:
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
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("hypothesis"):
        raise
    raise ModuleNotFoundError(
        "jagcodec.testing needs hypothesis: pip install 'jagcodec[testing]'", name=error.name
    ) from error

__all__ = [
    "JaggedBatch",
    "arrays",
    "assert_same",
    "bits",
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
