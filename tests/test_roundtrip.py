from hypothesis import given

import jagcodec
from jagcodec.testing import assert_same, trees


@given(trees())
def test_what_goes_in_comes_out(value):
    assert_same(jagcodec.decode(jagcodec.encode(value)), value)
