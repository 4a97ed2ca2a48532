"""What `encode` does on request: narrow, checksum, registered types, pickle; and row views."""

import collections
import dataclasses
import decimal
import fractions

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

from examples import demo
from jagcodec import (
    MsgpackDecoder,
    MsgpackEncoder,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    pack_jagged_fields,
    padding_tax,
    register_type,
)
from jagcodec.testing import tensors
from jagcodec.wire.spec import INTEGER_DTYPES
from tests.helpers import message, receive, size
from tests.oracle import assert_same, bits
from tests.strategies import trees

# narrow


@given(trees(max_leaves=4))
def test_narrow_changes_no_value(value):
    frames = encode(value, narrow=True, checksum=True)
    assert_same(decode(receive(frames)), value)


@pytest.mark.parametrize("name", sorted(INTEGER_DTYPES))
@given(data=st.data())
def test_every_integer_comes_back(name, data):
    dtype = getattr(torch, name)
    low, high = (0, 1) if name == "bool" else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    edge = st.sampled_from(
        [e for b in range(0, 65, 8) for e in (2**b - 1, 2**b, -(2**b), 2**b // 2, -(2**b) // 2 - 1)]
    )
    values = data.draw(st.lists(edge.filter(lambda v: low <= v <= high) | st.integers(low, high)))
    tensor = torch.tensor(values, dtype=dtype)
    frames = encode([tensor], narrow=True)
    assert_same(decode(receive(frames)), [tensor])


@pytest.mark.parametrize(
    ("low", "high", "width"),
    [
        (0, 1, 1 / 8),
        (0, 255, 1),
        (-128, 127, 1),
        (0, 256, 2),
        (-129, 0, 2),
        (0, 151_999, 3),
        (0, 2**32 - 1, 4),
        (0, 2**32, 8),
        (-(2**31), 2**31 - 1, 4),
        (-(2**31) - 1, 0, 8),
        (-(2**63), 2**63 - 1, 8),
    ],
)
def test_the_smallest_width_that_holds_them(low, high, width):
    tensor = torch.tensor([low, high] * 8192)
    plain, narrow = encode(tensor), encode(tensor, narrow=True)
    assert size(plain[1:]) == 16384 * 8
    assert size(narrow[1:]) == 16384 * width
    assert_same(decode(narrow), tensor)


def test_floats_are_not_touched():
    tensor = torch.zeros(5000)
    assert decode(encode(tensor, narrow=True)).tolist() == tensor.tolist()
    assert size(encode(tensor, narrow=True)) == size(encode(tensor))


def test_bool_bits_other_than_0_and_1_survive():
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    assert bits(decode(encode(odd, narrow=True))) == [0, 1, 2, 255]


def test_the_demo_batch_takes_three_quarters_of_its_valid_bytes():
    columns, lengths = demo.make_batch()
    td = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=demo.PER_TOKEN)
    valid = sum(field.wire_bytes for field in padding_tax(td).columns)
    frames = encode(td, narrow=True)
    assert size(frames) <= 0.75 * valid
    assert_same(decode(receive(frames)), td)


# checksums


def test_damage_is_named():
    frames = receive(encode([torch.arange(5000), torch.arange(3)], checksum=True))
    assert decode(frames)[1].tolist() == [0, 1, 2]
    for i in (1, 2):
        frames[i][5] ^= 1
        with pytest.raises(WireFormatError, match=rf"frame {i}: .*CRC-32") as caught:
            decode(frames)
        assert caught.value.reason == "bad_checksum"
        frames[i][5] ^= 1
    place = frames[0].rindex(b"int64")
    frames[0][place : place + 5] = b"uint8"
    with pytest.raises(WireFormatError, match=r"header: .*CRC-32"):
        decode(frames)


def test_frames_that_changed_places_are_found():
    frames = encode([torch.zeros(5000), torch.ones(5000)], checksum=True)
    with pytest.raises(WireFormatError, match="changed places"):
        decode([*frames[:2], frames[3], frames[2]])


# lists of row views


@given(st.data())
def test_views_of_one_storage_come_back_as_views(data):
    base = torch.arange(60).view(*data.draw(st.sampled_from([(60,), (30, 2), (10, 3, 2)])))
    row = st.tuples(st.integers(0, len(base)), st.integers(0, len(base)))
    ranges = data.draw(st.lists(row, min_size=2, max_size=8))
    views = [base[min(r) : max(r)] for r in ranges]
    back = decode(receive(encode({"rows": views})))["rows"]
    assert_same(back, views)
    assert len({view.untyped_storage().data_ptr() for view in back}) == 1


def test_thousands_of_adjacent_views_are_one_buffer():
    values = torch.arange(200_000)
    views = list(values.split([100] * 2000))
    frames = encode(views)
    assert [size([frame]) for frame in frames[1:]] == [0, 200_000 * 8, 2000 * 16]
    address = np.frombuffer(frames[2], np.uint8).__array_interface__["data"][0]
    assert address == values.data_ptr()
    assert_same(decode(receive(frames)), views)
    shuffled = views[::-1] + views[:3]
    assert_same(decode(receive(encode(shuffled))), shuffled)
    assert size(encode(shuffled)) == size(frames) + 3 * 16


def test_gaps_between_views_are_not_sent():
    padded = torch.arange(1000 * 100).view(1000, 100)
    views = [row[:10] for row in padded]
    frames = encode(views)
    # The cells, and where each view starts and ends.
    assert size(frames[1:]) == 1000 * 10 * 8 + 1000 * 16
    assert_same(decode(frames), views)


@given(st.lists(tensors(), max_size=4))
def test_other_lists_of_tensors_stay_as_they_are(values):
    assert_same(decode(encode(values)), values)
    assert_same(decode(encode(values * 2)), values * 2)


# types of the user's


@register_type
@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float
    stop: tuple
    scores: torch.Tensor = dataclasses.field(default=None, compare=False)  # type: ignore[assignment]

    def __post_init__(self):
        object.__setattr__(self, "temperature", self.temperature * 2)


@tensorclass
class Rollout:
    ids: torch.Tensor
    note: str


def test_dataclasses_are_encoded():
    value = {"a": [Sampling(0.5, ("x", 1), torch.ones(2))]}
    back = decode(encode(value))["a"][0]
    assert back == value["a"][0]
    assert back.temperature == 1.0
    assert back.scores.tolist() == [1, 1]


def test_tensorclasses_are_encoded():
    register_type(Rollout, "rollout")
    back = decode(encode(Rollout(ids=torch.ones(2, 3), note="hi", batch_size=[2])))  # type: ignore[call-arg]
    assert type(back) is Rollout
    assert back.ids.tolist() == [[1.0] * 3] * 2
    assert back.note == "hi"
    assert back.batch_size == (2,)  # type: ignore[attr-defined]


def test_any_type_is_encoded_with_two_functions():
    # Of a class that `register_stdlib_types` has no name for: this one would stay.
    register_type(fractions.Fraction, "fraction", to_state=str, from_state=fractions.Fraction)
    assert decode(encode([fractions.Fraction(1, 3)])) == [fractions.Fraction(1, 3)]


def test_the_other_side_must_know_the_type():
    frames = receive(encode([Sampling(1.0, ())]))
    name = f"{Sampling.__module__}.Sampling".encode()
    frames[0] = frames[0].replace(name, name[:-1] + b"x")
    with pytest.raises(WireFormatError, match=r"^\$\[0\]: .*Samplinx.*register_type") as caught:
        decode(frames)
    assert caught.value.reason == "unknown_type"


@pytest.mark.parametrize(("old", "new"), [(b"stop", b"stoq"), (b"scores", b"scored")])
def test_a_state_that_does_not_fit_is_named(old, new):
    frames = receive(encode([Sampling(1.0, ())]))
    frames[0] = frames[0].replace(old, new)
    with pytest.raises(WireFormatError, match=r"Sampling.*expected the fields"):
        decode(frames)


def test_registrations_are_checked():
    with pytest.raises(TypeError, match="expected a class, found int"):
        register_type(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to_state and from_state"):
        register_type(collections.OrderedDict)
    register_type(decimal.Context, "rollout-x", to_state=str, from_state=str)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass another name"):
        register_type(collections.Counter, "rollout-x", to_state=dict, from_state=dict)  # type: ignore[arg-type]


# pickle


def test_pickle_needs_both_sides():
    value = {"when": [decimal.BasicContext.copy]}
    with pytest.raises(UnsupportedTypeError, match="allow_pickle=True on both sides"):
        encode({"when": [slice, value]})
    frames = MsgpackEncoder(allow_pickle=True).encode({"f": [len]})
    with pytest.raises(WireFormatError, match=r"^\$\.f\[0\]: .*allow_pickle=True") as caught:
        decode(frames)
    assert caught.value.reason == "pickle_refused"
    assert MsgpackDecoder(allow_pickle=True).decode(frames) == {"f": [len]}


def test_what_does_not_pickle_is_still_refused():
    with pytest.raises(UnsupportedTypeError, match=r"^\$\[0\]: .*pickle failed too"):
        encode([lambda: 0], allow_pickle=True)


def test_what_can_be_encoded_is_never_pickled():
    td = TensorDict({"a": torch.ones(2), "s": "text"}, [2])
    plain = message(encode(td))
    assert message(encode(td, allow_pickle=True)) == plain
