"""Row lengths that callers pass, in every form; and those that are refused, with the row."""

from array import array

import numpy as np
import pytest
import torch

from jagcodec.errors import JagcodecError
from jagcodec.rows.lengths import length_array, read_lengths
from tests.helpers import run_python

ONE_TOO_LARGE = np.array([1, 2**63], dtype=np.uint64)


def test_every_form_of_the_same_lengths_gives_a_new_int64_array():
    numbers = np.array([3, 0, 2**31])
    frozen = numbers.copy()
    frozen.flags.writeable = False
    strided = np.repeat(numbers, 2)[::2]
    forms = [list(numbers), numbers.tolist(), (3, 0, 2**31), numbers, frozen, strided]
    forms += [array("q", [3, 0, 2**31]), numbers.astype(np.uint64), numbers.astype(">i8")]
    forms += [[torch.tensor(3), 0, np.int64(2**31)]]
    for form in forms:
        found = length_array(form, "lengths", rows=3)
        assert found.dtype == np.dtype(np.int64)
        assert found.tolist() == [3, 0, 2**31]
        assert not np.shares_memory(found, numbers)
    assert length_array(range(3), "lengths").tolist() == [0, 1, 2]
    for none in ([], (), range(0), np.array([]), array("q")):
        assert length_array(none, "lengths").shape == (0,)
    assert read_lengths(torch.from_numpy(numbers), "lengths").lengths.tolist() == [3, 0, 2**31]


@pytest.mark.parametrize(
    ("lengths", "reason", "text"),
    [
        ([3, -1], "bad_length", "x, row 1: expected a length of 0 or more, below 2**63, found -1"),
        (np.array([3, -1]), "bad_length", "x, row 1: expected a length of 0 or more"),
        (np.array([-(2**63)]), "bad_length", f"x, row 0: .* found {-(2**63)}"),
        (ONE_TOO_LARGE, "bad_length", f"x, row 1: .* found {2**63}"),
        ([1, 2**63], "bad_length", f"x, row 1: .* found {2**63}"),
        ([2**62, 2**62], "bad_length", "x: expected lengths that add up below 2**63"),
        ([1, 2.5], "bad_dtype", "x, row 1: expected integer lengths, found 2.5"),
        (np.array([1.0]), "bad_dtype", "x: expected integer lengths, found float64, 1.0 in row 0"),
        ([1, True], "bad_dtype", "x, row 1: expected integer lengths, found True"),
        (np.array([True]), "bad_dtype", "x: .* found bool, True in row 0"),
        ([1, None], "bad_dtype", "x, row 1: expected integer lengths, found None"),
        (np.array([1], object), "bad_dtype", "x: expected integer lengths, found object"),
        ([[1, 2]], "bad_dtype", r"x, row 0: expected integer lengths, found \[1, 2\]"),
        (np.ones((2, 1), int), "bad_shape", r"x: lengths shape \(2, 1\) != \(N,\)"),
        (np.array(3), "bad_shape", r"x: lengths shape \(\) != \(N,\)"),
        *((bad, "bad_type", "x: .* found") for bad in ("12", b"12", 3, None, {1: 2}, {3})),
        (range(2**70, 2**70 + 1), "bad_length", "x, row 0: .* found an int of 71 bits"),
        (
            np.ma.masked_array([1, 2], [False, True]),
            "bad_type",
            "x: .* found a MaskedArray; call .filled",
        ),
    ],
)
def test_a_bad_length_is_an_error_that_names_the_row_and_what_was_found(lengths, reason, text):
    with pytest.raises(JagcodecError, match=text.replace("**", r"\*\*")) as caught:
        length_array(lengths, "x")
    assert caught.value.reason == reason


def test_lengths_are_read_without_torch():
    code = "from jagcodec.rows.lengths import length_array; import sys\n"
    code += "assert length_array([1, 2], 'x').tolist() == [1, 2]\n"
    code += "assert not {'torch', 'tensordict'} & {*sys.modules}"
    run_python(code)
