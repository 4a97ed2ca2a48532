# mypy: disable-error-code="call-arg, misc, arg-type, name-match, attr-defined, list-item"
"""What cannot be sent is refused with its place and a remedy; and types of the user's."""

import collections
import contextlib
import decimal
import enum
import pickle
import re
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta, timezone
from pathlib import PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
import tensordict
import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import MsgpackEncoder, WireFormatError, decode, encode, open_wire, register_type
from jagcodec.stdlib import register_stdlib_types
from jagcodec.wire import registry
from jagcodec.wire.registry import restore
from tests.helpers import message, receive, run_python, trip
from tests.oracle import assert_same
from tests.wire import forge, readers, values
from tests.wire.values import KINDS, Color, Sampling, Stranger, Turn, grid_of_objects, legacy, turn

HERE = values.__name__


def refused(value, reason="unsupported_type", path="", says="", **options):
    """The error for a value that cannot be sent."""
    with pytest.raises(jagcodec.UnsupportedTypeError, match=says or None) as caught:
        encode(value, **options)
    error = caught.value
    assert (error.reason, isinstance(error, TypeError)) == (reason, True)
    assert path in ("", error.path)
    assert str(error).startswith(f"{error.path}: ")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return error


# --- refused, with the place and a remedy ------------------------------------------------------


def quantised():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def cycle():
    loop: dict[str, Any] = {}
    loop["me"] = loop
    return loop


def stranger(*size):
    return Stranger(tokens=torch.rand(size), batch_size=size)


def with_leaf(leaf):
    """A TensorDict with a leaf that no checked way of setting lets in."""
    td = TensorDict({}, batch_size=[2])
    td._tensordict["leaf"] = leaf
    return td


def ragged_view():
    rows = [TensorDict({"a": torch.zeros(1, n)}, batch_size=[1]) for n in (1, 2)]
    return legacy(lambda: tensordict.lazy_stack(rows, 0).view(2))


def stacks_through_tensorclasses():
    value: Any = turn(1)
    for _ in range(40):
        value = turn(1, before=LazyStackedTensorDict(TensorDict({"t": value}, batch_size=[1])))
        value = LazyStackedTensorDict(TensorDict({"t": value}, batch_size=[1]))[0]["t"]
    return value


def negative(*size):
    return TensorDict({}, batch_size=torch.Size(size))


def with_attribute(value):
    value.note = "x"
    return value


def named(names=("rows",), *inner):
    return TensorDict({"a": torch.ones(2, *inner)}, [2, *inner], names=names)


def freed(column):
    """A column whose memory was freed, in part or as a whole, as FSDP does it with parameters."""
    values = torch.arange(6.0)
    made = column(values)
    values.untyped_storage().resize_(4)
    return made


def cells_of_nested(values):
    shapes = torch.tensor([[2, 1], [4, 1]])
    return torch._nested_view_from_buffer(values, shapes, shapes * 0 + 1, torch.tensor([0, 2]))


TO_COO, NAMES = "call .to_sparse_coo\\(\\) first", "set td.names = None"
# What is refused, where in it, and the reason and what the error says.
REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: {"e": [0, {"lock": threading.Lock()}]}, ".e[1].lock", "_thread.lock"),
    (lambda: [bytearray(b"x")], "[0]", "bytearray"),
    (lambda: {"odd key": (object(),)}, "['odd key'][0]", "object"),
    (lambda: {1: {2: print}}, "[1][2]", "builtin_function_or_method"),
    (lambda: [with_attribute(OrderedDict(a=1))], "[0]", r"attribute but _metadata.*dict\(x\)"),
    (lambda: [collections.Counter(a=1)], "[0]", "Counter"),
    (lambda: [defaultdict(list)], "[0]", "defaultdict"),
    (lambda: [type("Own", (OrderedDict,), {})(a=1)], "[0]", "Own"),
    (lambda: {"p": values.Pair(1, 2)}, ".p", "Pair"),
    (lambda: msgpack.ExtType(48, b""), "", "ExtType"),
    (lambda: msgpack.Timestamp(0), "", "Timestamp"),
    (lambda: memoryview(b"x"), "", "memoryview"),
    (lambda: {torch.ones(1): 1}, "", "hashed by identity"),
    (lambda: torch.ones(2, device="meta"), "", "meta"),
    (lambda: np.ma.masked_array([1]), "", "MaskedArray"),
    (lambda: torch.ones(2, 2).to_mkldnn(), "", "mkldnn"),
    (lambda: {"q": quantised()}, ".q", "qint8.*dequantise"),
    (lambda: [quantised()] * 2, "[0]", "qint8.*dequantise"),
    (lambda: [torch.ones(2, *[1] * 64)] * 2, "[0]", "65 dims"),
    (lambda: freed(lambda cells: {"x": cells.view(2, 3).t()}), ".x", "storage.*gather"),
    (lambda: freed(lambda cells: [cells[:1], cells[1:]]), "[1]", "storage.*gather"),
    (lambda: freed(lambda cells: values.jagged(cells, [0, 2, 6])), "", "storage.*gather"),
    (lambda: freed(cells_of_nested), "", "storage.*gather"),
    (lambda: TensorDict({"x": {"y": NonTensorStack(object(), 1)}}, []), ".x.y[0]", "object"),
    (lambda: TensorDict({"x": torch.ones(1)}, []).to_module, "", "method"),
    # what no reader would accept
    (cycle, "", "too_deep: cycle"),
    (lambda: forge.nest(lambda value: [value], 101, []), "", "too_deep: 100 nested"),
    (stacks_through_tensorclasses, "", "too_deep: "),
    (lambda: values.stacks(9), "", "too_deep: 8 stacks"),
    (lambda: TensorDict({"s": "x"}, [(1 << 24) + 1]), "", "too_large: rows without data"),
    (lambda: TensorDict({}, [0, (1 << 24) + 1]), "", "too_large: 16777216 rows"),
    (lambda: {i * ((1 << 61) - 1): 1 for i in range(1, 100)}, "", "bad_value: distinct hashes"),
    # compressed sparse tensors
    (lambda: torch.eye(4).to_sparse_csr(), "", TO_COO),
    (lambda: torch.eye(4).to_sparse_csc(), "", TO_COO),
    (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "", TO_COO),
    (lambda: TensorDict({"x": torch.eye(4).to_sparse_bsc((2, 2))}, [4]), ".x", TO_COO),
    # kinds of TensorDict
    (lambda: stranger(2), "", "register_type"),
    (lambda: TensorDict({"s": stranger(2)}, [2]), ".s", "register_type"),
    (lambda: turn(2, before=stranger(2)), ".state.before", "register_type"),
    (lambda: negative(2, 3, -1), "", "bad_shape: "),
    (lambda: TensorDict({"x": negative(2, 3, -1)}, [2, 3]), ".x", "bad_shape: "),
    (lambda: NonTensorData(1, batch_size=torch.Size((2, -1))), "", "bad_shape: "),
    (lambda: with_leaf((torch.zeros(2), torch.zeros(2))), ".leaf", "tuple"),
    (lambda: with_leaf([torch.zeros(2), torch.zeros(2)]), ".leaf", "list"),
    (lambda: with_leaf("x"), ".leaf", "str"),
    (lambda: with_leaf(turn(3)), "", "row_mismatch: in nested 'leaf'"),
    (lambda: with_leaf(TensorDict({}, [])), "", "row_mismatch: in nested 'leaf'"),
    (lambda: with_leaf(NonTensorData("x", batch_size=[5])), "", "row_mismatch: in 'leaf'"),
    (lambda: with_leaf(MetaData("x", batch_size=[5])), "", "row_mismatch: in 'leaf'"),
    (ragged_view, "", "encode what it is a view of"),
    # names of dims
    (named, "", NAMES),
    (lambda: named((None, "x"), 3), "", NAMES),
    (lambda: Turn(tokens=torch.rand(2), batch_size=[2], names=["rows"]), ".state", NAMES),
    (lambda: tensordict.lazy_stack([TensorDict({}, [2], names=["rows"])] * 2, 1), "[0]", NAMES),
    (lambda: LazyStackedTensorDict(negative(), stack_dim=0, stack_dim_name="x"), "", NAMES),
    (lambda: LazyStackedTensorDict(stack_dim=0, stack_dim_name="x"), "", NAMES),
    (lambda: NonTensorStack("a", "b", stack_dim=0, stack_dim_name="x"), "", NAMES),
    (lambda: NonTensorData("a", batch_size=[2], names=["rows"]), "", NAMES),
    (lambda: MetaData("a", batch_size=[2], names=["rows"]), ".state", NAMES),
    (lambda: legacy(lambda: named((None, "x"), 3).unsqueeze(0)), "", NAMES),
]
with contextlib.suppress(RuntimeError, IndexError):  # since tensordict 0.14
    grid_of_objects()[:0]
    REFUSED.append((lambda: grid_of_objects()[:0], "", ""))


@pytest.mark.parametrize(("make", "path", "says"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_sent_is_refused_with_its_place_and_a_remedy(make, path, says):
    reason, _, text = says.rpartition(": ")
    for value, place in ((make(), "$"), ({"k": [1, make()]}, "$.k[1]")):
        error = refused(value, reason or "unsupported_type", says=text)
        assert error.path == place + path or (reason == "too_deep" and error.path.startswith(place))


def test_more_rows_than_bytes_are_refused_in_every_form_of_a_batch():
    nothing = torch.zeros((1 << 24) + 1, 0)
    batches = [TensorDict({"x": nothing}, [len(nothing)]), open_wire({"x": nothing})]
    batches.append(jagcodec.BatchedDataDict(x=nothing))
    batches.append(jagcodec.BatchedDataDict(inner=jagcodec.BatchedDataDict(x=nothing)))
    for batch in batches:
        with pytest.raises(jagcodec.UnsupportedTypeError, match="rows without data"):
            encode(batch)


def test_offsets_that_wrap_around_are_refused():
    offsets = [0, 2**63 - 1, -(2**63), -1, 5]
    jagged = values.jagged(torch.zeros(5), offsets, min_seqlen=1, max_seqlen=5)
    refused(jagged, "bad_length", says="within the 5 cells")


FIELDS, CONVERT = "make a dict of its fields", "convert it with .astype"
NO_DTYPES = [
    (lambda: np.zeros(2, "i4,f8"), FIELDS),
    (lambda: np.zeros(2, [("a", "O")]), FIELDS),
    (lambda: np.zeros(1, "i4,f8")[0], FIELDS),
    (lambda: np.zeros(1, np.dtype((np.record, "i4,f8")))[0], FIELDS),
    (lambda: np.zeros(2, np.dtype([])), "allow_pickle"),
    (lambda: np.ones(2, "g"), CONVERT),
    (lambda: np.longdouble(1), CONVERT),
    (lambda: np.ones(2, "G"), CONVERT),
]
if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):
    NO_DTYPES.append((lambda: np.array(["a", "b"], np.dtypes.StringDType()), CONVERT))


@pytest.mark.parametrize(("make", "remedy"), NO_DTYPES)
def test_dtypes_that_messages_do_not_have_are_refused_or_pickled(make, remedy):
    for value, path in (({"k": [1, make()]}, "$.k[1]"), (np.array([0, make()], object), "$[1]")):
        refused(value, path=path, says=re.escape(remedy))
    frames = receive(encode([make()], allow_pickle=True))
    (back,) = decode(frames, allow_pickle=True)
    assert (back.dtype, repr(back)) == (make().dtype, repr(make()))
    readers.refused(decode, frames, says="pickled")
    assert decode(encode([make()], default=str)) == [str(make())]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: TensorDict({"s": x}, [2])])
def test_the_remedy_for_a_tensorclass_works(wrap):
    once = tensordict.tensorclass(type("Once", (), {"__annotations__": {"tokens": torch.Tensor}}))
    value: Any = wrap(once(tokens=torch.rand(2), batch_size=[2]))
    assert "register_type" in str(refused(value))
    register_type(once, f"tests.{id(once)}")
    assert_same(trip(value), value)


def test_persistent_tensordicts_arrive_as_tensordicts(tmp_path):
    pytest.importorskip("h5py")
    td = tensordict.PersistentTensorDict.from_dict(
        values.batch_in_batch(), filename=str(tmp_path / "td.h5")
    )
    assert_same(trip(td), td.to_tensordict())


# --- types of the user's -----------------------------------------------------------------------


def test_registrations_are_checked():
    with pytest.raises(TypeError, match="expected a class, found int"):
        register_type(3)
    with pytest.raises(TypeError, match="to_state and from_state"):
        register_type(collections.OrderedDict)
    register_type(decimal.Context, "rollout-x", to_state=str, from_state=str)
    with pytest.raises(ValueError, match="pass another name"):
        register_type(collections.Counter, "rollout-x", to_state=dict, from_state=dict)


def test_registered_metadata_does_not_recurse():
    register_type(MetaData, "tests.MetaData")
    try:
        assert_same(trip(MetaData([1])), MetaData([1]))
    finally:
        register_type(MetaData, "tensordict.MetaData")


@pytest.mark.parametrize(
    ("old", "new", "text", "reason"),
    [
        ("Sampling", "Samplinx", r"^\$\[0\]: .*Samplinx.*register_type", "unknown_type"),
        ("stop", "stoq", "Sampling.*expected the fields", "bad_value"),
        ("scores", "scored", "Sampling.*expected the fields", "bad_value"),
    ],
)
def test_the_other_side_must_know_the_type_and_its_fields(old, new, text, reason):
    frames = receive(encode([Sampling(1.0, ())]))
    frames[0] = frames[0].replace(old.encode(), new.encode())
    readers.refused(decode, frames, reason, says=text)


TURN, TWO = f"{HERE}.Turn", torch.zeros(2)
FORGED: dict[str, list[Any]] = {
    TURN: [
        *({"tokens": TWO}, NonTensorStack("a"), (TensorDict({}, batch_size=[2]),), TWO),
        (TensorDict({}, batch_size=[2]), {"other": 1}),
        (TensorDict({"tokens": TWO}, batch_size=[2]), {"tokens": 1}),
        (TensorDict({}, batch_size=[2]), [("role", 1)]),
        TensorDict({"other": TWO}, batch_size=[2]),
    ],
    "tensordict.MetaData": ["x", MetaData("x")],
    "tensordict.UnbatchedTensor": [TWO, ((2,), TWO), (None, "x")],
    "collections.deque": [(2, [1, 2, 3]), {}],
    "collections.OrderedDict": [[(1, 2)]],
    "collections.defaultdict": [("eval", {})],
    "datetime.datetime": [("2026-01-02", 0, "UTC"), "2026-13-02", 5],
    "datetime.timedelta": [(1, 2), (10**12, 0, 0)],
    "uuid.UUID": [b"1"],
    "decimal.Decimal": ["x"],
    "pathlib.Path": [5],
    "bytearray": [1 << 40],
    f"{HERE}.Color": ["__class__", 1],
    f"{HERE}.Bits": ["A"],
    f"{HERE}.Point": [(1,), [1, 2]],
}
NOT_CLASSES = (
    *("os.system", "builtins.eval", "pathlib.PosixPath.home", "no.such.module", "tests"),
    *("", ".", "....", "jagcodec.wire.items.Columns", "enum.Enum.__class__"),
    *(f"{HERE}.Path", f"{HERE}.np.ndarray"),
)


@pytest.mark.parametrize("name", [*FORGED, *NOT_CLASSES])
def test_forged_states_and_names_of_other_things_are_refused(name):
    register_stdlib_types()
    says = "the state of" if name in FORGED else "registered here"
    for state in FORGED.get(name, ["x"]):
        with pytest.raises(WireFormatError, match=says):
            restore(name, state)


# --- types of the standard library -------------------------------------------------------------


def test_what_the_other_side_could_not_know_is_refused():
    register_stdlib_types()
    zones = (UTC, ZoneInfo("UTC"), timezone(timedelta(0), "X"))
    for value in (
        *(defaultdict(lambda: 0), deque([1], 5), time(1), *zones[:2]),
        *(type("Sub", (OrderedDict,), {})(), type("Sub", (datetime,), {})(2026, 1, 2)),
        *(enum.Enum("Local", "A").A, collections.namedtuple("Local", "a")(1)),
        *(datetime(2026, 1, 2, tzinfo=zone) for zone in zones[1:]),
        *(datetime(2026, 1, 2, fold=1), PurePosixPath("a"), PureWindowsPath("a")),
    ):
        refused({"a": [value]}, path="$.a[0]")


def test_names_are_looked_up_in_time_that_does_not_grow_with_their_square(monkeypatch):
    register_stdlib_types()
    get = Mock(wraps=sys.modules.get)
    monkeypatch.setattr(registry, "sys", SimpleNamespace(modules=SimpleNamespace(get=get)))
    with pytest.raises(WireFormatError, match="register_type"):
        restore("a." * 40_000 + "b", 1)
    assert sum(len(call.args[0]) for call in get.mock_calls) < 1 << 20
    assert restore(f"{HERE}.Color", "RED") is Color.RED


def test_a_stranger_adds_no_members_to_flags():
    register_stdlib_types()
    known, bits = len(re.RegexFlag._value2member_map_), "expected bits of RegexFlag's members"
    flags = forge.message(forge.record("USER", "re.RegexFlag", 10))
    assert decode(flags) == re.RegexFlag(10)
    for value in range(1 << 20, (1 << 20) + 100):
        flags = forge.message(forge.record("USER", "re.RegexFlag", value))
        readers.refused(decode, flags, says=bits)
    assert len(re.RegexFlag._value2member_map_) <= known + 1
    refused(re.RegexFlag(1 << 20), says=bits)


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
    run_python(code)


# --- default -----------------------------------------------------------------------------------


class Opaque:
    def __init__(self, value):
        self.value = value


def opened(value):
    if isinstance(value, Opaque):
        return value.value
    raise TypeError(f"not mine: {type(value).__name__}")


def test_default_stands_in_for_what_cannot_be_sent():
    value = {"a": [Opaque(1), (Opaque(torch.tensor([2])), {"b": Opaque(Opaque("c"))})], "d": 4}
    wanted = {"a": [1, (torch.tensor([2]), {"b": "c"})], "d": 4}
    memory = bytearray(4096)
    written = encode(value, out=memory, default=opened)
    for frames in (
        encode(value, default=opened),
        MsgpackEncoder(default=opened).encode(value),
        memory[:written],
    ):
        assert_same(decode(frames), wanted)
    column = np.array([Opaque(torch.tensor([1])), Opaque("x")], dtype=object)
    td = decode(jagcodec.encode_fields({"o": column}, lengths=None, default=opened))
    assert_same(td.get("o").tolist(), [torch.tensor([1]), "x"])


@pytest.mark.filterwarnings("ignore")
def test_default_may_have_an_answer_an_error_or_none():
    masked = np.ma.masked_array([1, 2], [True, False])
    assert_same(decode(encode(masked, default=lambda value: value.tolist())), [None, 2])
    # It is asked about types, and not about contents.
    refused([quantised(), 1], path="$[0]", says="dequantise it first", default=torch.dequantize)
    with pytest.raises(TypeError, match="not mine: object"):
        encode([object()], default=opened)
    frames = encode({"f": print}, default=lambda value: value, allow_pickle=True)
    assert decode(frames, allow_pickle=True) == {"f": print}
    td = TensorDict({"s": stranger(2)}, batch_size=[2])
    assert_same(decode(encode(td, default=Stranger.to_tensordict))["s"], td["s"].to_tensordict())


COLUMN = {"s": stranger(2)}


@pytest.mark.parametrize(
    ("value", "default", "reason"),
    [
        # It is not asked about keys.
        *(({key: 1}, lambda value: "key", "") for key in (Opaque(1), (1, Opaque(1)))),
        ([object()], lambda value: value, r"^\$\[0\].* object"),
        # What it returns never ends, or is no column.
        (Opaque(1), lambda value: Opaque(Opaque(value)), "too_deep: calls"),
        (Opaque(1), lambda value: [Opaque(Opaque(value))], "too_deep: nested|calls"),
        (Opaque(1), lambda value: {"a": Opaque(value)}, "too_deep: nested|calls"),
        (TensorDict(COLUMN, [2]), lambda value: "x", ""),
        (TensorDict(COLUMN, [2]), lambda value: torch.zeros(2).unbind(), ""),
        (TensorDict(COLUMN, [2]), lambda value: TensorDict({}, batch_size=[3]), "row_mismatch: "),
    ],
)
def test_what_default_may_not_return_and_is_not_asked_about(value, default, reason):
    reason, _, says = reason.rpartition(": ")
    refused(value, reason or "unsupported_type", says=says, default=default)


# --- pickle ------------------------------------------------------------------------------------


def test_pickle_needs_both_sides():
    refused({"when": [slice, decimal.BasicContext.copy]}, says="allow_pickle=True on both sides")
    frames = MsgpackEncoder(allow_pickle=True).encode({"f": [len]})
    readers.refused(decode, frames, "pickle_refused", "$.f[0]", "allow_pickle=True")
    assert jagcodec.MsgpackDecoder(allow_pickle=True).decode(frames) == {"f": [len]}
    refused([lambda: 0], path="$[0]", says="pickle failed too", allow_pickle=True)


def test_pickled_columns_go_on_only_where_they_may_be_read():
    td = TensorDict({"path": NonTensorData(pickle.PickleError, batch_size=[2])}, batch_size=[2])
    frames = encode(td, allow_pickle=True)
    with pytest.raises(WireFormatError, match="pickle"):
        open_wire(frames).rows([0]).to_frames()
    again = open_wire(frames, allow_pickle=True).rows([0]).to_frames()
    assert decode(again, allow_pickle=True)["path"] is pickle.PickleError


@pytest.mark.parametrize("name", ["batch", "leaves_of_every_kind", "tensorclass"])
def test_what_can_be_sent_is_never_pickled(name):
    value = KINDS[name]()
    assert message(encode(value, allow_pickle=True)) == message(encode(value))
