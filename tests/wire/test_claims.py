"""The quick check of a header's numbers says yes only where the rule and the second reader do."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jagcodec import WireFormatError, encode, encode_rows
from jagcodec.wire import claims
from jagcodec.wire import header as header_module
from jagcodec.wire.claims import EXACT, sound_at_sight
from jagcodec.wire.header import read_header, split_header
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits
from jagcodec.wire.many.stacked import _open_stack
from jagcodec.wire.schema import FORMS, INTEGER_ROWS, Group, Node
from jagcodec.wire.spec import Kind
from tests.helpers import nested, rollout
from tests.strategies import tensordicts, trees
from tests.wire import forge, spec_reader
from tests.wire.test_golden import NAMES, OPAQUE, kept, message_of

NUMBERS = (*(n for n in forge.NUMBERS if n >= 0), EXACT, EXACT + 1, 2 * EXACT + 1, 1 << 24)
LIMITS = (DEFAULT_LIMITS, NO_LIMITS, Limits(bytes=4096), Limits(objects=8), Limits(depth=1))
# What the second reader says of numbers alone, whatever the payload is.
OF_NUMBERS = {
    *("below 0", "counts", "numbers", "too many cells", "group", "too many rows", "too much"),
    *("no such buffer", "outside of the buffer", "copies of the same bytes", "stored"),
}


def forged(frame, seed):
    """A header with up to three of its numbers changed, most often to one that might be right."""
    rng, parts = random.Random(seed), forge.Parts(frame)
    numbers = parts.numbers
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at = rng.randrange(len(numbers))
        near = (numbers[at] - 1, numbers[at] + 1, rng.choice(numbers), 0, 1)
        numbers[at] = max(0, rng.choice((*NUMBERS, *near * 5)))
    return parts.frame()


def at_sight(frame, limits):
    """What the quick check says of a header, and the rule too if it says yes."""
    try:
        size, schema, packed, _ = split_header(frame, limits)
        numbers = np.frombuffer(packed, np.int64).tolist()
        groups, sizes, sent_sizes, checksums = header_module._after_nodes(schema, numbers)
    except WireFormatError:  # counts that do not fit
        return False
    sound, claimed, expanded, objects = sound_at_sight(schema, numbers, groups, sizes, size, limits)
    if not sound or checksums or sent_sizes is not sizes or schema.plan.others:
        return False
    header_numbers = claims._HeaderNumbers(schema, numbers, groups, sizes, sizes, size)
    by_rule = claims._check_one_by_one(header_numbers, limits, None, in_row=False)
    assert by_rule == (size + sum(sizes), objects)
    places = claims.Claims(sizes)
    claims.check_groups(groups, places)
    for node in schema.nodes:
        claims.check_node(node, numbers, groups, places)
    assert (claimed, expanded) == (places.payload - places.left, places.expanded)
    return True


def refusal(frames):
    """Why the second reader refuses a message; of its payload as much as its sizes say is read."""
    try:
        sizes = spec_reader.Header(frames[0]).sizes
        if sum(sizes) > 1 << 20:
            return ""
        payload = zip([*frames[1:], *[b""] * len(sizes)], sizes, strict=False)
        spec_reader.read([frames[0], *(old[:size].ljust(size, b"\0") for old, size in payload)])
    except spec_reader.RefusedError as error:
        return str(error)
    return ""


def check(frames, seed, limits):
    """If the quick check says yes, the rule does, and the second reader of the numbers."""
    frame = forged(frames[0], seed)
    if at_sight(frame, limits):
        assert refusal([frame, *frames[1:]]) not in OF_NUMBERS


@pytest.mark.parametrize("name", sorted({*NAMES} - OPAQUE))
def test_a_yes_at_first_sight_is_a_yes_of_the_rule_and_of_the_second_reader(name):
    frames = message_of(kept(name))
    for seed in range(60):
        check(frames, f"{name}{seed}", LIMITS[seed % len(LIMITS)])


@given(trees() | tensordicts(trees(max_leaves=3)), st.integers(0), st.sampled_from(LIMITS))
def test_a_yes_is_right_whatever_the_message(value, seed, limits):
    frames = [bytes(memoryview(frame)) for frame in encode(value)]
    for more in range(4):
        check(frames, seed + more, limits)


def test_every_kind_with_numbers_has_a_rule_and_no_other_kind_passes():
    def reason(kind):
        numbers = FORMS[kind].numbers if kind in FORMS else ()
        dims, end = len([name for name in numbers if name != "*"]), len(numbers)
        node = Node(kind, ["|u1" if kind is Kind.ARRAY else "int64", 1, 1], 0, dims, end, 0, 8)
        node.children = [node, Node(Kind.TENSOR, ["int64", 2], 0, 3, 5, 0, 8)]
        try:
            claims.check_node(node, [0] * 5, [Group(0, 0, 0, 0, 0)], claims.Claims([]))
        except WireFormatError as error:
            return error.reason
        return None

    known = {kind for kind, form in FORMS.items() if form.numbers} | {*INTEGER_ROWS}
    assert {kind for kind in Kind if reason(kind) != "unknown_kind"} == known


# One node of each kind that the quick check knows, in a batch of one dim.
KNOWN = forge.tensordict(
    [2],
    {
        "rectangle": forge.tensor("int16", (2, 3)),
        "jagged": forge.jagged(shape=(5, 2)),
        "objects": forge.rows_node(2),
        "arrays": forge.array_rows(
            forge.jagged(shape=(5,)), forge.tensor("int64", (2, 3)), tensors=1
        ),
        "array": forge.array("|S0", (2, 2)),
        "more": forge.object_array([2, 1], 2),
        "cell": forge.tensor("int64", ()),
        "all": forge.payload("text", 2),
    },
)
SMALL = (*[0] * 12, *[1] * 6, 2, 2, 3, 8, 24, 40, 64, 1 << 24, 1 << 31)
LARGE = tuple(n + d for n in (EXACT, 2 * EXACT, 1 << 60, (1 << 63) - 2) for d in (0, 1))


@settings(max_examples=200)
@given(st.data())
def test_a_yes_is_right_whatever_the_numbers(data):
    """Small numbers that often fit, and a few that are too large to be added up or to be floats."""
    draw = st.sampled_from(SMALL) | st.sampled_from(SMALL) | st.sampled_from(LARGE)
    few = st.integers(0, 3)
    headers = []
    for _ in range(3):
        numbers = [0] * len(KNOWN.numbers)
        for at in data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=6)):
            numbers[at] = data.draw(draw)
        group = st.tuples(few, few, few, few | draw, few | draw)
        groups, sizes = data.draw(st.lists(group, min_size=1, max_size=1)), [64]
        headers.append(forge.header(KNOWN, sizes, groups, numbers=numbers))
    for header in headers:
        at_sight(header, NO_LIMITS)
    arrays = [np.frombuffer(header, np.uint8) for header in headers]
    stack = _open_stack(arrays, np.arange(3), None, NO_LIMITS)
    for i in [] if stack is None else stack.members.tolist():
        read_header(headers[i], NO_LIMITS)


@settings(max_examples=150)
@given(
    st.sampled_from(["rollout", "small_batch", "tensordict"]),
    st.lists(st.integers(0), min_size=1, max_size=6),
    st.sampled_from(LIMITS),
)
@example("rollout", [0] * 3, DEFAULT_LIMITS)
def test_a_yes_to_one_of_many_messages_is_a_yes_to_it_alone(name, seeds, limits):
    """Of messages that are opened together the numbers are floats, which may be inexact."""
    headers = [forged(message_of(kept(name))[0], seed) for seed in seeds]
    arrays = [np.frombuffer(header, np.uint8) for header in headers]
    # Those of blobs, before their sizes are known.
    stack = _open_stack(arrays, np.arange(len(headers)), None, limits)
    for i in [] if stack is None else stack.members.tolist():
        read_header(headers[i], limits)


def test_numbers_that_only_floats_take_for_each_other_are_left_to_the_rule():
    """Two lengths of 2^53 and one more are one float."""
    low = 2 * EXACT
    for rows, *lengths in ((1, low, low + 1), (2, low + 1, low), (1, low, low)):
        batch = forge.tensordict([1], {"a": forge.tensor()})
        (frame, *_) = forge.message(batch, bytes(64), groups=[[0, 0, rows, *lengths]])
        stack = _open_stack([np.frombuffer(frame, np.uint8)], np.zeros(1, int), None, NO_LIMITS)
        assert stack is None
    # So are the bytes of a buffer of 2^53 and one byte more.
    batch = forge.batch(forge.tensor(shape=(2,), offset=(1 << 53) - 1))
    (frame, *_) = forge.message(batch, sizes=[1 << 53])
    assert _open_stack([np.frombuffer(frame, np.uint8)], np.zeros(1, int), None, NO_LIMITS) is None
    dims = (1 << 40, 1 << 40)  # of cells without bytes, too
    (frame, *_) = forge.message(forge.array("|S0", dims), bytes(64))
    assert not at_sight(frame, NO_LIMITS)


def test_the_rule_is_not_asked_about_what_writers_write(monkeypatch):
    messages = [encode(rollout()), encode({"a": np.arange(3), "b": [np.ones((2, 2)), "text"]})]
    rows = [
        {"ids": np.arange(n), "none": np.zeros((0, 3)), "uid": str(n), "says": [{"n": n}]}
        | {"image": np.ones((n, 2))}
        for n in (0, 5)
    ]
    dtypes = {"image": object}
    messages += [encode_rows(some, dtypes=dtypes) for some in (rows[:1], rows)]
    messages += [encode(nested([[2], [3, 4]]))]
    monkeypatch.setattr(claims, "_check_one_by_one", None)
    for frames in messages:
        read_header(bytes(frames[0]))
    headers = [np.frombuffer(frames[0], np.uint8) for frames in messages[2:4]]
    for header in headers:
        stack = _open_stack([header] * 3, np.arange(3), None, DEFAULT_LIMITS)
        assert len(stack.members) == 3
