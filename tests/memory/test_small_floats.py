"""Floats that numpy lacks, by numpy alone, beside torch."""

import numpy as np
import pytest
import torch

from jagcodec.memory.small_floats import numbers_of, rounded

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
    assert np.isnan(numbers_of(cells, name)[is_nan]).all()
    found, wanted = cells.view(np.uint16), expected.view(torch.int16).numpy().view(np.uint16)
    assert (found[~is_nan] == wanted[~is_nan]).all()
    back = numbers_of(cells, name)
    assert (back[~is_nan] == expected.float().numpy()[~is_nan]).all()


def test_a_nan_is_that_of_one_number_in_torch():
    nan = np.array([np.nan, -np.nan], dtype=np.float32)
    assert rounded(nan, "bfloat16").tolist() == [0x7FC0] * 2
    assert torch.tensor(np.nan, dtype=torch.bfloat16).view(torch.int16).item() == 0x7FC0


FLOAT8 = [name for name in dir(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("name", FLOAT8)
def test_each_code_of_an_8_bit_float_is_the_number_that_torch_has(name):
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(getattr(torch, name)).float().numpy()
    found = numbers_of(codes, name)
    is_nan = np.isnan(expected)
    assert found.dtype == np.float32
    assert np.isnan(found[is_nan]).all()
    assert (found.view(np.uint32)[~is_nan] == expected.view(np.uint32)[~is_nan]).all()
    assert numbers_of(codes[5], name) == expected[5]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_halves_are_widened():
    numbers = torch.tensor([[1 + 2j, -0.5j], [float("inf"), 65504]], dtype=torch.complex32)
    words = numbers.view(torch.int16).contiguous().numpy().view(np.uint32)
    assert (
        numbers_of(words.reshape(2, 2), "complex32") == numbers.to(torch.complex64).numpy()
    ).all()


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "bits8", "uint3"])
def test_cells_without_a_number_each_are_refused(name):
    with pytest.raises(TypeError, match=name):
        numbers_of(np.zeros(2, np.uint8), name)
