# mypy: disable-error-code="misc, name-match, attr-defined, arg-type"
"""Types of the standard library by one call, members of enums, named tuples, and `default`."""

import collections
import dataclasses
import enum
import re
import subprocess
import sys
import textwrap
from collections import OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from jagcodec import (
    MsgpackEncoder,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    encode_fields,
    register_type,
)
from jagcodec.stdlib import register_stdlib_types
from jagcodec.wire import registry
from jagcodec.wire.registry import restore
from tests.oracle import assert_same
from tests.wire.forge import message, record


class Color(enum.Enum):
    RED = 1
    GREEN = ("a", 2)


class Mode(str, enum.Enum):  # noqa: UP042
    LEFT = "left"


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def _stdlib_types():
    register_stdlib_types()


VALUES = [
    OrderedDict([("b", 1), ("a", torch.tensor([1]))]),
    OrderedDict([(3, 1), ((1, 2), 1)]),
    defaultdict(list, a=[1]),
    defaultdict(None, a=[1]),
    deque([1, {"a": torch.tensor([2])}]),
    deque(),
    bytearray(b"abc"),
    bytearray(100_000),
    datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(seconds=1, microseconds=5))),
    datetime.min,
    datetime.max,
    date(1, 1, 1),
    timedelta(-1, 5, 7),
    timedelta.max,
    UUID(int=7),
    Decimal("-0.00"),
    Decimal("sNaN12"),
    Decimal("1E+1000"),
    Path("/a b/c"),
    Color.RED,
    Color.GREEN,
    Mode.LEFT,
    Bits.A,
    Bits.A | Bits.B,
    Bits(0),
    Point(1, torch.tensor([2])),
    Pair("a", (1,)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_they_arrive_as_they_were(value):
    for whole in (value, [value, {"k": value}], NonTensorData(value, batch_size=[2])):
        decoded = decode(encode(whole))
        if whole is value:
            assert type(decoded) is type(value)
            assert repr(decoded) == repr(value)
        else:
            assert repr(decoded) == repr(whole)
    if isinstance(value, enum.Enum):
        assert decode(encode(value)) is value


@given(
    st.one_of(
        *(
            st.datetimes().map(lambda at: at.replace(fold=0)),
            st.dates(),
            st.timedeltas(),
            st.uuids(),
        ),
        *(st.decimals(), st.binary().map(bytearray)),
    )
)
def test_any_of_them_arrives(value):
    decoded = decode(encode([value]))[0]
    assert type(decoded) is type(value)
    assert repr(decoded) == repr(value)


def test_as_keys_and_members():
    value = {UUID(int=1): {Color.RED, Mode.LEFT}, date(2026, 1, 2): {Point(1, 2): Path("x")}}
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        defaultdict(lambda: 0),
        type("Sub", (OrderedDict,), {})(),
        type("Sub", (datetime,), {})(2026, 1, 2),
        enum.Enum("Local", "A").A,
        collections.namedtuple("Local", "a")(1),
        deque([1], 5),
        datetime(2026, 1, 2, fold=1),
        datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")),
        datetime(2026, 1, 2, tzinfo=timezone(timedelta(0), "X")),
        time(1),
        UTC,
        ZoneInfo("UTC"),
        PurePosixPath("a"),
        PureWindowsPath("a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_other_side_could_not_know_is_refused(value):
    with pytest.raises(UnsupportedTypeError) as raised:
        encode({"a": [value]})
    assert raised.value.path == "$.a[0]"


def test_the_remedy_for_a_local_enum_and_named_tuple_works():
    color = enum.Enum("Color", "A B")
    register_type(color, "tests.local.Color")
    assert decode(encode(color.B)) is color.B
    pair = collections.namedtuple("Twin", "a b")
    register_type(pair, "tests.local.Twin")
    assert decode(encode(pair(1, 2))) == pair(1, 2)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("collections.deque", (2, [1, 2, 3])),
        ("collections.deque", {}),
        ("collections.OrderedDict", [(1, 2)]),
        ("collections.defaultdict", ("eval", {})),
        ("datetime.datetime", ("2026-01-02", 0, "UTC")),
        ("datetime.datetime", "2026-13-02"),
        ("datetime.datetime", 5),
        ("datetime.timedelta", (1, 2)),
        ("datetime.timedelta", (10**12, 0, 0)),
        ("uuid.UUID", b"1"),
        ("decimal.Decimal", "x"),
        ("pathlib.Path", 5),
        ("bytearray", 1 << 40),
        (f"{__name__}.Color", "__class__"),
        (f"{__name__}.Color", 1),
        (f"{__name__}.Bits", "A"),
        (f"{__name__}.Point", (1,)),
        (f"{__name__}.Point", [1, 2]),
    ],
)
def test_forged_states_are_refused(name, state):
    with pytest.raises(WireFormatError, match="expected the state of"):
        restore(name, state)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "pathlib.PosixPath.home",
        "no.such.module",
        "tests",
        "",
        ".",
        "....",
        "jagcodec.wire.lowered.Columns",
        "enum.Enum.__class__",
        f"{__name__}.pytest.Item",
        f"{__name__}.np.ndarray",
    ],
)
def test_no_other_class_can_be_named(name):
    with pytest.raises(WireFormatError, match="registered here"):
        restore(name, "x")


class Looked(dict[str, Any]):
    """The modules of the process, and how many characters were looked up among them."""

    characters = 0

    def get(self, name, default=None):
        self.characters += len(name)
        return super().get(name, default)


def test_names_are_looked_up_in_time_that_does_not_grow_with_their_square(monkeypatch):
    looked = Looked(sys.modules)
    monkeypatch.setattr(registry, "sys", SimpleNamespace(modules=looked))
    with pytest.raises(WireFormatError, match="register_type"):
        restore("a." * 40_000 + "b", 1)
    assert looked.characters < 1 << 20
    assert restore("tests.wire.test_stdlib_types.Color", "RED") is Color.RED


def test_a_stranger_adds_no_members_to_flags():
    known = len(re.RegexFlag._value2member_map_)
    assert decode(message(record("USER", "re.RegexFlag", 10))) == re.RegexFlag(10)
    for value in range(1 << 20, (1 << 20) + 100):
        with pytest.raises(WireFormatError, match="expected bits of RegexFlag's members"):
            decode(message(record("USER", "re.RegexFlag", value)))
    assert len(re.RegexFlag._value2member_map_) <= known + 1
    with pytest.raises(UnsupportedTypeError, match="expected bits of RegexFlag's members"):
        encode(re.RegexFlag(1 << 20))


def test_nothing_is_imported_and_nothing_is_open_without_the_call():
    code = """
    import sys
    from jagcodec import WireFormatError
    from jagcodec.stdlib import register_stdlib_types
    from jagcodec.wire.registry import restore
    import http
    def refused(name, state):
        try:
            restore(name, state)
        except WireFormatError:
            return True
    assert refused("http.HTTPStatus", "OK") and refused("uuid.UUID", bytes(16))
    register_stdlib_types()
    assert restore("http.HTTPStatus", "OK") is http.HTTPStatus.OK
    before = set(sys.modules)
    assert refused("wsgiref.handlers.X", "A") and refused("plistlib.PlistFormat", "FMT_XML")
    assert set(sys.modules) == before
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_a_registration_of_ones_own_stays():
    @dataclasses.dataclass
    class Mine:
        x: int

    register_type(Mine, "tests.Mine")
    register_stdlib_types()
    assert decode(encode(Mine(1))) == Mine(1)


# --- default -----------------------------------------------------------------------------------


class Opaque:
    def __init__(self, value):
        self.value = value


def opened(value):
    if isinstance(value, Opaque):
        return value.value
    raise TypeError(f"not mine: {type(value).__name__}")


def blob_of(value):
    blob = bytearray(4096)
    return blob[: encode(value, out=blob, default=opened)]


def test_default_stands_in_for_what_cannot_be_encoded():
    value = {"a": [Opaque(1), (Opaque(torch.tensor([2])), {"b": Opaque(Opaque("c"))})], "d": 4}
    wanted = {"a": [1, (torch.tensor([2]), {"b": "c"})], "d": 4}
    for frames in (
        encode(value, default=opened),
        MsgpackEncoder(default=opened).encode(value),
        blob_of(value),
    ):
        assert_same(decode(frames), wanted)
    column = np.array([Opaque(torch.tensor([1])), Opaque("x")], dtype=object)
    td = decode(encode_fields({"o": column}, lengths=None, default=opened))
    assert_same(td.get("o").tolist(), [torch.tensor([1]), "x"])


def test_default_is_asked_about_types_and_not_about_contents():
    masked = np.ma.masked_array([1, 2], [True, False])
    assert_same(decode(encode(masked, default=lambda value: value.tolist())), [None, 2])
    quantised = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)
    with pytest.raises(UnsupportedTypeError, match=r"\$\[0\].*dequantise it first"):
        encode([quantised, 1], default=lambda value: value.dequantize())


def test_what_default_raises_is_raised():
    with pytest.raises(TypeError, match="not mine: object"):
        encode([object()], default=opened)


def test_default_that_returns_the_value_leaves_it_as_it_was():
    with pytest.raises(UnsupportedTypeError, match=r"^\$\[0\]: object"):
        encode([object()], default=lambda value: value)
    value = {"f": print}
    decoded = decode(
        encode(value, default=lambda value: value, allow_pickle=True), allow_pickle=True
    )
    assert decoded == value


@pytest.mark.parametrize(
    "wrap", [Opaque, lambda value: [Opaque(value)], lambda value: {"a": value}]
)
def test_default_that_never_ends_is_refused(wrap):
    with pytest.raises(UnsupportedTypeError, match=r"nested|calls"):
        encode(Opaque(1), default=lambda value: wrap(Opaque(value)))


def test_default_is_not_asked_about_keys():
    with pytest.raises(UnsupportedTypeError):
        encode({Opaque(1): 1}, default=lambda value: "key")
    with pytest.raises(UnsupportedTypeError):
        encode({(1, Opaque(1))}, default=lambda value: "key")


def test_default_for_columns():
    from tests.wire.test_tensordict_kinds import Stranger

    stranger: Any = Stranger
    td = TensorDict({"s": stranger(tokens=torch.zeros(2), batch_size=[2])}, batch_size=[2])
    decoded = decode(encode(td, default=lambda value: value.to_tensordict()))
    assert_same(decoded["s"], TensorDict({"tokens": torch.zeros(2)}, batch_size=[2]))
    for bad in ("x", torch.zeros(2).unbind(), TensorDict({}, batch_size=[3])):
        with pytest.raises(UnsupportedTypeError):
            encode(td, default=lambda value, bad=bad: bad)
