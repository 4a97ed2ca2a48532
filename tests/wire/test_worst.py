"""What small messages cost under default limits: memory is bounded, and more is refused."""

import sys

import pytest

from jagcodec import Limits, WireFormatError, decode
from tests.wire.worst import READERS, WORST, cost

MOST = 512 << 20


@pytest.mark.parametrize("name", WORST)
def test_a_message_below_1_kb_takes_less_than_512_mb(name):
    frames = WORST[name]()
    assert sum(map(len, frames)) < 1000
    # It asks for nearly as much as is allowed, so that a limit that counts less is noticed.
    with pytest.raises(WireFormatError) as caught:
        decode(frames, limits=Limits(expanded=Limits().expanded // 4))
    assert caught.value.reason == "too_large"
    for reader in ("decode", "open_wire", "materialize"):
        _, peak = cost(lambda read=READERS[reader]: read(frames))
        assert peak < MOST, reader


@pytest.mark.parametrize("name", ["int64 as bits", "documents: lists", "components"])
def test_of_several_messages_each_takes_less_than_512_mb(name):
    frames = WORST[name]()
    _, peak = cost(lambda: READERS["join"](frames))
    assert peak < 2 * MOST


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)
