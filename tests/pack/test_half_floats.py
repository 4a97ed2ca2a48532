"""float16 and bfloat16 by numpy alone, beside torch."""

import numpy as np
import pytest
import torch

from jagcodec.pack.half_floats import as_float32, rounded

# Every sign, exponent, and upper half of float32, with lower halves at, below and above each tie.
LOWER = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
TIES = [0x0FFF, 0x1000, 0x1001, 0x1FFF]  # of float16, which has 13 bits less


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_floats_are_rounded_as_torch_rounds_them(name):
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    words = upper | np.array(LOWER + TIES, dtype=np.uint32)
    floats = words.reshape(-1).view(np.float32)
    expected = torch.from_numpy(floats.copy()).to(getattr(torch, name))
    cells = rounded(floats, name)
    assert cells.dtype.itemsize == 2
    is_nan = np.isnan(floats)
    assert np.isnan(as_float32(cells, name)[is_nan]).all()
    found, wanted = cells.view(np.uint16), expected.view(torch.int16).numpy().view(np.uint16)
    assert (found[~is_nan] == wanted[~is_nan]).all()
    back = as_float32(cells, name)
    assert (back[~is_nan] == expected.float().numpy()[~is_nan]).all()


def test_a_nan_is_that_of_one_number_in_torch():
    nan = np.array([np.nan, -np.nan], dtype=np.float32)
    assert rounded(nan, "bfloat16").tolist() == [0x7FC0] * 2
    assert torch.tensor(np.nan, dtype=torch.bfloat16).view(torch.int16).item() == 0x7FC0
