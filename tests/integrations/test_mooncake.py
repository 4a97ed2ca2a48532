"""The Mooncake example, against a real store on the loopback."""

from unittest.mock import Mock

import pytest
import torch

from jagcodec import WireFormatError, decode, encode, to_blob
from tests.helpers import make_batch
from tests.oracle import assert_same, rows_of

# An ImportError names the library of the system that is not there.
pytest.importorskip("mooncake.store", exc_type=ImportError)

from examples import mooncake_put_get as example

pytestmark = pytest.mark.cluster


@pytest.fixture
def client():
    with example.cluster(segment=1 << 26) as client:
        yield client


def test_a_range_of_rows_is_one_read_and_a_batch_of_its_own(client):
    batch = make_batch(500, lengths=[i % 50 + 1 for i in range(200)])
    size = example.put(client, "a", batch, checksum=True)
    assert size == client.get_size("a") == len(to_blob(encode(batch, checksum=True)))
    watched = Mock(wraps=client)

    def sizes():
        return [call.args[4][0][0][0] for call in watched.get_into_ranges.call_args_list]

    wire = example.opened(watched, "a")
    assert sizes() == [example.READ_AHEAD]
    assert size > 10 * example.READ_AHEAD
    part = wire.select(["ids", "message"]).rows(slice(150, 160))
    found = part.to_tensordict()
    assert rows_of(found["ids"]) == rows_of(batch["ids"])[150:160]
    assert found["message"].tolist() == batch["message"].tolist()[150:160]
    tokens = sum(i % 50 + 1 for i in range(150, 160))
    assert [size for size in sizes()[1:] if size > 201 * 8] == [tokens * 500 * 8]
    example.put(client, "b", part)
    assert_same(decode(example.get(client, "b")), found)
    assert_same(wire.to_tensordict(), batch)


def test_what_is_missing_taken_too_large_or_foreign(client):
    for call in (example.get, example.opened):
        with pytest.raises(KeyError, match="'nothing'"):
            call(client, "nothing")
    with pytest.raises(ConnectionError, match="code -"):
        example.put(client, "a", torch.zeros(1 << 27, dtype=torch.uint8))
    example.put(client, "a", [1])  # nothing of it was left
    with pytest.raises(ValueError, match="taken"):
        example.put(client, "a", [2])
    assert decode(example.get(client, "a")) == [1]
    assert client.put("foreign", b"hello" * 100) == 0
    with pytest.raises(WireFormatError):
        decode(example.get(client, "foreign"))
