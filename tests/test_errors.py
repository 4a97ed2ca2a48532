"""Texts of errors: safe to log, whoever sent what they are about."""

import pickle
import traceback
from collections import UserDict
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import (
    ArgumentError,
    JagcodecError,
    WireFormatError,
    decode,
    encode,
    encode_fields,
    open_wire,
)
from jagcodec._arguments import unknown_name
from jagcodec.errors import (
    LONGEST_DETAIL,
    LONGEST_PATH,
    ArgumentTypeError,
    TransportTimeoutError,
    brief,
)
from tests.wire import forge
from tests.wire.forge import map_of, message, node, record, tensor, tensordict, user

EVIL = "x\n2026-01-01 CRITICAL \x1b[2J\x9b31m\u202e\ud800\ue000\u2028"
LONG = EVIL + 1_000_000 * "\ue000"


def is_shown(error):
    for text, most in ((error.path, LONGEST_PATH), (error.detail, LONGEST_DETAIL)):
        assert text.isprintable(), text
        assert len(text) <= most
    assert error.args == (error.reason, error.path, error.detail)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.args, str(again)) == (error.args, f"{error.path}: {error.detail}")
    if isinstance(error, TransportTimeoutError):  # also an OSError
        assert isinstance(again, TimeoutError)
        assert (again.errno, again.filename) == (None, None)


@pytest.mark.parametrize("kind", [WireFormatError, ArgumentError, TransportTimeoutError])
def test_control_characters_are_escaped_and_long_texts_lose_their_middle(kind):
    error = kind("bad_value", f"$.{EVIL}", f"expected a, found {EVIL}; try b")
    is_shown(error)
    assert "\\n2026-01-01 CRITICAL \\x1b[2J\\x9b31m\\u202e\\ud800\\ue000\\u2028" in error.path
    assert error.detail.endswith("; try b")
    error = kind("bad_value", f"$.{LONG}.end", f"expected a, found {LONG}; try b")
    is_shown(error)
    assert error.path.startswith("$.x\\n2026")
    assert error.path.endswith(".end")
    assert error.detail.startswith("expected a, found x\\n2026")
    assert error.detail.endswith("; try b")
    plain = kind("bad_value", "$.größe['日本']", "expected 'ü', found \"\\n\"")
    assert str(plain) == "$.größe['日本']: expected 'ü', found \"\\n\""


def wide(part):
    for _ in range(90):
        part = map_of({LONG[:200]: part})
    return part


BAD = tensor("float33")
WORD = "y" * 40 + EVIL


@pytest.mark.parametrize("text", [EVIL, LONG, WORD], ids=["evil", "long", "word"])
@pytest.mark.parametrize(
    "frames",
    [
        lambda text: message(map_of({text: BAD})),
        lambda text: message(tensordict([1], {text: BAD})),
        lambda text: message(tensor(text)),
        lambda text: message(forge.array(text)),
        lambda text: message(node("USER", text, children=[1])),
        lambda text: message(node("TENSORDICT", 1, [text, text], numbers=[1])),
        lambda text: message({text: user("range", 0, 1, 0)}),
        lambda text: message(user("torch.device", text, None)),
        lambda text: message(record("USER", "torch.dtype", text)),
        lambda text: message(record("USER", text, 1)),
        lambda text: message(user("range", text, 1, 1)),
        lambda text: message(user("complex", text, [text] * 8)),
        lambda text: message(record("SCALAR", text, b"")),
        lambda text: message(record("SET", {text: 1})),
        lambda text: forge.message_of_rows({text: user("range", 0, 1, 0)}, 1),
        lambda text: message(1, fields={"jagcodec": text}),
        lambda text: message(1, fields={text: 1}),
        lambda text: message(1, fields={"numbers": text}),
        lambda text: [text.encode("utf-8", "surrogatepass")],
        lambda text: [msgpack.packb({"jagcodec": text}, unicode_errors="surrogatepass")],
    ],
)
def test_what_came_in_a_message_is_shown_in_few_printable_characters(frames, text):
    for read in (decode, lambda frames: open_wire(frames).to_tensordict()):
        try:
            made = frames(text)
        except UnicodeEncodeError:  # what msgpack of the test cannot write
            made = frames(text.replace("\ud800", ""))
        with pytest.raises(WireFormatError) as caught:
            read(made)
        is_shown(caught.value)
        # Nor does what it was raised from say more, which loggers print too.
        whole = "".join(traceback.format_exception(caught.value)).splitlines()
        assert not any("\x1b" in line or line.startswith("2026") for line in whole)


def test_paths_of_deep_nesting_values_of_callers_and_names_of_columns_are_bounded_too():
    columns = {f"{LONG[:300]}{i}": torch.ones(2, 1) for i in range(300)}
    batch = open_wire(encode_fields(columns, lengths=torch.tensor([1, 1])))
    for error, call in (
        (WireFormatError, lambda: decode(message(forge.list_of(0, wide(BAD))))),
        (KeyError, lambda: batch.select([LONG])),
        (KeyError, lambda: batch[LONG]),
        (JagcodecError, lambda: encode_fields({EVIL: np.ones(3)}, lengths=torch.tensor([1, 1]))),
    ):
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, JagcodecError)
        is_shown(caught.value)
        if error is WireFormatError:
            assert caught.value.path.startswith("$[1]['x\\n")
            # On the way up each level adds to what was shortened before: one gap, not ninety.
            assert caught.value.path.count("...") <= 3


@given(
    st.permutations(
        ["input_ids", "reward", *(f"{i}" * 5 for i in range(9)), "attention_mask", ("inner", "ids")]
    )
)
def test_the_error_for_an_unknown_name_names_the_nearest_columns_first(columns):
    for name, nearest in (
        *(("inputids", "'input_ids'"), ("atention_mask", "'attention_mask'")),
        *((("input", "ids"), "'input_ids'"), (("inner", "id"), "['inner', 'ids']")),
    ):
        detail = unknown_name(name, columns, "select").detail
        assert detail.startswith(f"expected one of {nearest}, ")
        assert " and 5 more, found " in detail
        assert detail.count(nearest) == 1
    others: list[Any] = ["?", 3, None, ("?",), ()]
    for other in others:
        detail = unknown_name(other, columns, "select").detail
        assert detail.startswith(f"expected one of {brief(columns[0])}, {brief(columns[1])}, ")


def test_a_few_columns_are_named_in_their_order():
    detail = unknown_name("id", ["reward", "ids"], "select").detail
    assert detail == "expected one of 'reward', 'ids', found 'id'"


def test_a_mapping_without_items_is_named_as_what_was_found():
    class Numbers(UserDict):
        def items(self):
            return [1, 2]

    with pytest.raises(
        ArgumentTypeError, match="names to values, found Numbers whose items are not pairs"
    ):
        encode(1, meta=Numbers({"a": 1}))
