r"""The bytes of the wire, kept: what every kind of value encodes to, and what is refused and why.

`golden/` holds three files with a message per line, its frames in hex and its value in neutral JSON
(docs/wire-format.md, section 9): `encoded.json` is what `encode` writes for the values below,
`good.json` has hand-made messages that any reader must read, and `bad.json` those that any reader
must refuse. A byte that changes is a decision that shows in a diff::

    python -m tests.wire.test_golden --write
    python -m tests.wire.test_golden --add "bad_record rank_65: 65 dims" \
        "message(tensor(shape=[1] * 65), PAYLOAD)"

write `encoded.json` again (the `why` and the `options` of a new value are written into it by hand
first), and add a message by hand to `good.json` ("good NAME: WHY") or to
`bad.json` ("REASON NAME: WHY"): an expression of `forge.py`.
"""

import functools
import json
import re
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    decode,
    encode,
    materialize,
    pack_jagged_fields,
    register_type,
    to_blob,
)
from jagcodec.wire.spec import Kind
from tests.helpers import ROOT, message, nested, receive, run_python
from tests.oracle import assert_same
from tests.wire import forge, spec_reader
from tests.wire.values import jagged, objects

SPEC = ROOT / "docs" / "wire-format.md"
GOLDEN = ROOT / "tests" / "wire" / "golden"
RUN = re.compile(rb"(.)\1{15,}", re.DOTALL)


def hex_of(data):
    """Bytes as hex; a run of one byte of 16 or more is a word of its own, such as `00*4096`."""
    words, end = [], 0
    for run in RUN.finditer(data):
        words += [data[end : run.start()].hex(), f"{run[1].hex()}*{len(run[0])}"]
        end = run.end()
    return " ".join(filter(None, [*words, data[end:].hex()]))


def bytes_of(text):
    words = (word.partition("*") for word in text.split())
    return b"".join(bytes.fromhex(word) * int(times or 1) for word, _, times in words)


def entry(why, message, **more):
    """One message as it stands in a file."""
    if isinstance(message, bytes):
        return {"why": why, "blob": hex_of(message), **more}
    return {"why": why, "frames": [hex_of(frame) for frame in message], **more}


def message_of(entry):
    if "blob" in entry:
        return bytes_of(entry["blob"])
    return [bytes_of(lines) for lines in entry["frames"]]


@functools.cache
def load(file):
    return json.loads((GOLDEN / file).read_text())


def lines_of(entries):
    """JSON with a line per message."""
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


GOOD = {name: message_of(entry) for name, entry in load("good.json").items()}
# And the reason why each is refused.
BAD = {name: (message_of(entry), entry["reason"]) for name, entry in load("bad.json").items()}
# They ask for what only Python or torch can know, or are nested deeper than must be read.
MAY_ACCEPT = {name for name, entry in load("bad.json").items() if entry.get("may_accept")}


class Point(NamedTuple):
    """A type of the user's."""

    x: int
    y: int


register_type(Point, name="golden.Point", to_state=list, from_state=lambda state: Point(*state))


def i64(*cells):
    return torch.tensor(cells, dtype=torch.int64)


def row_views():
    base = torch.arange(6, dtype=torch.int16).view(3, 2)
    return [base[0:2], base[2:3], base[1:1]]


def coo(indices, shape):
    return torch.sparse_coo_tensor(indices, [1.5, 2.5], shape, check_invariants=True)


def small_batch():
    """The message that section 8 of the specification takes apart."""
    columns = {"ids": nested([[5, 6], [7]]), "tag": NonTensorStack("x", "yz")}
    return TensorDict(columns, batch_size=[2])


def rollout():
    """A batch as a rollout worker sends it."""
    fields = {
        "input_ids": torch.arange(12).view(3, 4) * 1000,
        "token_mask": torch.tensor([[0, 1, 9, 9], [0, 0, 1, 1], [9, 9, 9, 9]]),
        "logprobs": -torch.arange(12, dtype=torch.float32).view(3, 4) / 8,
        "pixels": torch.arange(24, dtype=torch.uint8).view(3, 4, 2),
        "reward": torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16),
        "finished": torch.tensor([True, False, True]),
        "message": objects([{"role": "user", "content": "1 + 1?"}], "text", None),
    }
    return pack_jagged_fields(
        fields,
        lengths=torch.tensor([2, 4, 0]),
        token_aligned_fields=["input_ids", "token_mask", "logprobs", "pixels"],
    )


def elided_rollout():
    """A batch in which rows, cells, positions, columns and objects repeat."""
    prompts = [[1000 * i + k for k in range(25)] for i in (1, 1, 1, 2, 2, 2)]
    answers = [[7000 + 100 * i + 3 * k * k for k in range(8 + i)] for i in range(6)]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = [*map(len, whole)]
    tools = {"tools": "a long description " * 30}
    columns = {
        "prompts": nested(prompts),
        "responses": nested(answers),
        "input_ids": nested(whole),
        "attention_mask": nested([[1] * n for n in lengths]),
        "position_ids": nested([range(n) for n in lengths]),
        "rewards": torch.zeros(6, 50),
        "tools": NonTensorStack(*[tools] * 6),
    }
    return TensorDict(columns, batch_size=[6])


# A float that no arithmetic makes, so that nothing may "clean" it.
NAN = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]

# What each of them shows, and how `encode` is asked for it, stands in the file.
VALUES: dict[str, Callable[[], Any]] = {
    "native": lambda: [
        *(None, True, False, 0, -1, 2**64 - 1, -(2**63), 1.5, -0.0, NAN, "ß\ud800", b"\0\xff"),
    ],
    "map": lambda: [{"b": {}, "a": [], "": ""}, {"b": i64(1), "a": 2}],
    "list": lambda: [1, [2, i64(3), [4]], (5,), [i64(6), "x"], {"y": 7}],
    "big_int": lambda: [2**64, -(2**63) - 1, 10**30],
    "complex": lambda: complex(1.5, -0.0),
    "tuple": lambda: [(1, ("a", ()), [2]), (i64(1), ())],
    "set": lambda: {"b", "a", 300, -1, (1, 2)},
    "frozenset": lambda: {frozenset({3, 1, 2}), frozenset()},
    "dict": lambda: [{1: "a", "b": 2, (None, 2.5): [3], -(2**70): 4}, {(1,): i64(2), b"": 3}],
    "range": lambda: [range(0), range(2, 2**70, 3), range(5, -5, -2)],
    "slice": lambda: [slice(None), slice(1, "b", [2]), slice(i64(1), 2)],
    "bytes": lambda: b"\7" * 4096,
    "array": lambda: [
        *(np.array([[1, -2], [3, 4]], dtype=">i2"), np.array(1.5, dtype="<f4")),
        *(np.zeros((2, 0), dtype="<f8"), np.array([True, False])),
        *(np.array([b"ab", b"c"], dtype="S3"), np.array(["ß"], dtype="<U2")),
        np.array(["2026-11-20"], dtype="<M8[D]"),
    ],
    "object_array": lambda: objects(1, "a", None, {"b": 2}).reshape(2, 2),
    "numbers": lambda: {
        **{"bools": [True, False] * 32, "bytes": [-128, 127] * 32, "shorts": [*range(64), 32767]},
        **{"ints": [*range(63), -(2**31)], "longs": [*range(63), 2**63 - 1]},
        **{"floats": [i / 4 for i in range(62)] + [NAN, -0.0], "few": [*range(63)]},
        **{"mixed": [*range(63), True], "large": [*range(63), 2**63]},
        "rows": ([[*range(64)], []], {1: [0.5] * 64}),
    },
    "scalar": lambda: [
        *(np.float32(1.5), np.int64(-1), np.bool_(True), np.datetime64("2026-11-20", "D")),
    ],
    "string_scalar": lambda: [np.str_("ab"), np.bytes_(b"ab")],
    "tensor": lambda: [
        *(torch.arange(6).view(2, 3), torch.tensor(7, dtype=torch.int32), torch.empty(0, 3)),
        torch.tensor([float("nan"), -0.0]).view(torch.int32).add(1).view(torch.float32),
        *(torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([1 - 2j], dtype=torch.complex64)),
        torch.tensor([True, False]),
    ],
    "tensor_narrow": lambda: [
        *(i64(2, 255), i64(-128, 127), i64(0, 2**24 - 1), i64(-(2**23), 5), i64(2**40 - 1, 0)),
        *(i64(2**63 - 1), i64(), torch.tensor([2, 3], dtype=torch.uint8), torch.tensor([0.0, 1.0])),
    ],
    "tensor_bits": lambda: [i64(1, 0, 1, 1, 0, 0, 0, 0, 1), torch.tensor([True, False, True])],
    "checksum": lambda: {"a": i64(1, 2), "b": "text"},
    "checksum_alone": lambda: [1, 2],
    "jagged": lambda: [
        nested([[5, 6], [], [7]]),
        nested([[[0, 1], [2, 3]], np.empty((0, 2)), [[4, 5]]], torch.int8),
        jagged(torch.arange(8, dtype=torch.int16).view(2, 4), [0, 3, 4], jagged_dim=2),
    ],
    "jagged_empty": lambda: [jagged(i64(), [0]), nested([[], []])],
    "jagged_narrow": lambda: nested([[300, -1], [7]]),
    "strided_nested": lambda: torch.nested.nested_tensor([torch.ones(1, 2), torch.zeros(2, 1)]),
    "sparse_coo": lambda: [coo([[0, 1], [2, 0]], (2, 3)).coalesce(), coo([[1, 1]], (2,))],
    "size": lambda: [torch.Size([2, 3]), torch.Size([])],
    "dtype": lambda: torch.bfloat16,
    "device": lambda: [torch.device("cpu"), torch.device("cuda", 1)],
    "tensor_views": row_views,
    "tensordict": lambda: TensorDict(
        {"a": i64(1, 2), "b": TensorDict({"c": torch.ones(2, 1)}, batch_size=[2])}, batch_size=[2]
    ),
    "tensordict_empty": lambda: TensorDict({}, batch_size=[]),
    "lazy_stack": lambda: LazyStackedTensorDict(
        TensorDict({"a": i64(1)}, []), TensorDict({"a": i64(2, 3)}, []), stack_dim=0
    ),
    "non_tensor_data": lambda: NonTensorData({"a": (1,)}, batch_size=[2]),
    "non_tensor_rows": lambda: [NonTensorStack("a", {"b": (1,)}, None), NonTensorStack("alone")],
    "array_rows": lambda: [
        NonTensorStack(np.array([[1, -2]], "<i2"), None, np.zeros((0, 3), "<i2")),
        objects(None, torch.tensor(1.5, dtype=torch.bfloat16)),
        BatchedDataDict({"image": [np.array([0.5, -0.0], "<f4"), None], "uid": ["a", "b"]}),
    ],
    "array_rows_narrow": lambda: objects(np.array([300, 2]), None, np.array([7])),
    "array_rows_elided": lambda: TensorDict(
        {"image": NonTensorStack(*[np.full((40, 50), 7, "u1")] * 4, None)}, [5]
    ),
    "messages_in_rows": lambda: objects(
        "a", i64(1), {"b": objects(i64(2), 3)}, (np.ones(2, "<i2"), "c"), 0, 106
    ),
    "non_tensor_stack": lambda: NonTensorStack(
        NonTensorData("a", batch_size=[2]), NonTensorData("b", batch_size=[2]), stack_dim=1
    ),
    "batched_data_dict": lambda: BatchedDataDict(
        {"ids": nested([[5, 6], [7]]), "reward": torch.tensor([1.0, 0.5]), "uid": ["a", "b"]},
        meta_info={"step": 7},
    ),
    "packed_column": lambda: materialize({"ids": nested([[5, 6], [7]])}, layout="packed")["ids"],
    "user": lambda: [Point(1, -2), Point(i64(1), 2)],
    "pickle": lambda: [...],
    "large": lambda: torch.zeros(2048, dtype=torch.int64),
    "compressed": lambda: [torch.zeros(2048, dtype=torch.int64), i64(1, 2, 3)],
    "small_batch": small_batch,
    "rollout": rollout,
    "rollout_narrow": rollout,
    "rollout_elided": elided_rollout,
}

NAMES = sorted(VALUES)
# Messages that only a reader with the type, or with trust, can read.
OPAQUE = {"user", "pickle"}


def frames_of(name):
    return message(encode(VALUES[name](), **kept(name)["options"]))


def neutral(value):
    """A value of the independent reader in JSON."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float64": struct.pack(">d", value).hex()}
    if type(value) is bytes:
        return {"hex": hex_of(value)}
    if type(value) is dict:
        return {"map": [[key, neutral(item)] for key, item in value.items()]}
    if type(value) is tuple and value and type(value[0]) is str and hasattr(Kind, value[0]):
        return {value[0]: [neutral(item) for item in value[1:]]}
    return [neutral(item) for item in value]


def read_neutral(message):
    # Through JSON and back, as a reader in another language would compare.
    return json.loads(json.dumps(neutral(spec_reader.read(message))))


def encoded(name):
    """The case of one of `VALUES`."""
    why, options, frames = kept(name)["why"], kept(name)["options"], frames_of(name)
    value = {} if name in OPAQUE else {"value": read_neutral(frames)}
    return entry(why, frames, options=options, **value)


def kept(name):
    """The case of a message that `encode` writes, as the file keeps it."""
    return load("encoded.json")[name]


def add(title, expression):
    """Write a message by hand to its file, and what this library makes of it."""
    message = eval(expression, vars(forge))
    reason, name, why = re.fullmatch(r"(\w+) (\w+): (.*)", title).groups()
    more = {"value": read_neutral(message)} if reason == "good" else {"reason": reason}
    file = GOLDEN / ("good.json" if reason == "good" else "bad.json")
    entries = json.loads(file.read_text())
    assert name not in entries, name
    file.write_text(lines_of({**entries, name: entry(why, message, **more)}))


# Its frames are as the version of zstd made them that wrote the files.
PACKED = "compressed"


def unpacked(message):
    """All that a compressed message says but its stored sizes and checksums, and its frames."""
    header = spec_reader.Header(message[0])
    assert header.stored != header.sizes
    frames = spec_reader.Reader(header, message[1:]).buffers
    more = len(header.stored) + len(header.checksums)
    return header.schema, header.numbers[:-more], len(header.checksums), header.values, frames


@pytest.mark.parametrize("name", NAMES)
def test_values_encode_to_the_golden_bytes(name):
    golden = message_of(kept(name))
    if name == PACKED:
        assert unpacked(frames_of(name)) == unpacked(golden)
    else:
        assert frames_of(name) == golden
    trusted = {"allow_pickle": name == "pickle"}
    for form in (golden, to_blob(golden), receive(golden)):
        assert_same(decode(form, **trusted), VALUES[name]())
    if name in OPAQUE:
        with pytest.raises(spec_reader.RefusedError):
            spec_reader.read(golden)


def test_the_files_hold_the_values_of_their_messages():
    """A message that changes is written anew, on purpose, and seen in the diff."""
    assert {*load("encoded.json")} == {*NAMES}
    for name in NAMES:
        apart = {"frames": []} if name == PACKED else {}
        assert {**encoded(name), **apart} == {**kept(name), **apart}, name
    for name, good in GOOD.items():
        assert read_neutral(good) == load("good.json")[name]["value"], name


READ = """
import warnings
from tests.wire.test_golden import GOOD, NAMES, decode, encode, kept, message_of
warnings.simplefilter("error")
for message in [*GOOD.values(), *map(message_of, map(kept, NAMES))]:
    encode(decode(message, allow_pickle=True), allow_pickle=True)
"""


def test_no_library_warns_when_values_are_read_and_sent_again():
    """In a new process, because torch warns once in each."""
    run_python(READ, path=ROOT)


def test_every_kind_has_a_golden_message():
    assert {kind.name.lower() for kind in Kind} - {"value", "schema"} <= {*VALUES}


PRINTED = """
import json
from tests.wire.test_golden import NAMES, frames_of
print(json.dumps({name: [frame.hex() for frame in frames_of(name)] for name in NAMES}))
"""


@pytest.mark.parametrize("seed", ["1", pytest.param("4242", marks=pytest.mark.slow)])
def test_equal_objects_give_equal_bytes_whatever_the_hash_seed(seed):
    made = {name: [frame.hex() for frame in frames_of(name)] for name in NAMES}
    run = run_python(PRINTED, path=ROOT, PYTHONHASHSEED=seed, OMP_NUM_THREADS="1")
    assert json.loads(run.stdout) == made


def example(title):
    """The bytes of a hexdump in the specification."""
    found = re.search(rf"<!-- example: {title} -->\n```text\n(.*?)```", SPEC.read_text(), re.S)
    assert found is not None
    lines = [re.split(r" {3,}", line)[0] for line in found.group(1).splitlines()]
    return bytes_of(" ".join(lines))


def test_the_specification_explains_the_real_bytes():
    assert [example("frame 0"), example("frame 1")] == frames_of("small_batch")
    assert_same(decode([example("frame 0"), example("frame 1")]), small_batch())


if __name__ == "__main__":
    if "--write" in sys.argv:
        (GOLDEN / "encoded.json").write_text(lines_of({name: encoded(name) for name in NAMES}))
    elif "--add" in sys.argv:
        add(*sys.argv[-2:])
    elif "--blob" in sys.argv:
        sys.stdout.buffer.write(to_blob(message_of(kept(sys.argv[-1]))))
