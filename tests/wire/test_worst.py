"""What small messages cost under default limits: memory is bounded, and more is refused."""

import sys

import pytest
import torch
from tensordict import TensorDict

from jagcodec import ArgumentError, Limits, WireFormatError, decode, encode, materialize
from tests.wire.forge import int64s, jagged, zstd
from tests.wire.worst import READERS, WORST, batch, cost

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


def one_long_row():
    """Compressed offsets of 131,071 rows, of which the last has all 2**20 cells."""
    blocks = [(b"\0", 1 << 17)] * 8
    offsets = (1 << 20) + 8, zstd(*blocks, int64s(1 << 20), size=(1 << 20) + 8)
    cells = 1 << 20, zstd(*blocks, size=1 << 20)
    column = jagged(0, 1, [1 << 20], "uint8", 1, 0)
    return batch(1 << 17, {"a": column}, offsets, cells, groups=[[0, 0, 1 << 17, 0, 1 << 20]])


@pytest.mark.parametrize("reader", READERS)
def test_a_rectangle_that_no_plain_message_could_ask_for_is_refused(reader):
    frames = one_long_row()
    assert sum(map(len, frames)) < 1000
    with pytest.raises(WireFormatError, match=r"padded rows.*Limits") as caught:
        READERS[reader](frames)
    assert caught.value.reason == "too_large"
    assert len(decode(frames, limits=Limits(expanded=1 << 38))["a"].offsets()) == (1 << 17) + 1


def test_shapes_of_rows_without_cells_are_not_padded():
    rows = [torch.zeros(1 << 16, 0), torch.zeros(0, 1 << 16)]
    td = TensorDict({"a": torch.nested.nested_tensor(rows)}, [2])
    with pytest.raises(ArgumentError, match=r"'a'.*found 48 bytes.*keep_jagged"):
        materialize(encode(td))
    assert materialize(encode(td), keep_jagged=["a"])["a"].size(0) == 2


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)
