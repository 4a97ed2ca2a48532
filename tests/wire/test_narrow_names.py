"""`narrow` with names of columns: which columns it reaches, and which names it refuses."""

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    MsgpackEncoder,
    RowBuilder,
    decode,
    encode,
    encode_fields,
    encode_rows,
    open_wire,
    stack_or_nest,
    to_blob,
)
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.wire.header import read_header
from jagcodec.wire.spec import PLAIN, Kind
from tests.helpers import message, size
from tests.oracle import assert_same


def nested(lengths, *inner):
    rows = [torch.randint(0, 99, (n, *inner)) for n in lengths]
    return stack_or_nest(rows, always_nest=True)


def narrow_columns(frames):
    """The tensors of a message that are stored narrow: their names, those around them first."""
    header = read_header(frames[0])
    found = set()

    def walk(node, name):
        if node.kind in (Kind.TENSOR, Kind.JAGGED):
            if header.numbers[node.number + 2] != PLAIN:
                found.add(name)
            return
        names = node.fields[-1] if node.kind in (Kind.MAP, Kind.TENSORDICT) else ()
        for i, child in enumerate(node.children):
            walk(child, f"{name}.{names[i]}".lstrip(".") if names else name)

    walk(header.schema.root, "")
    return found


def batch():
    ids = nested([3, 2])
    inner = TensorDict({"a": ids, "b": torch.arange(2)}, [2])
    columns = {"a": ids, "b": torch.arange(2), "inner": inner}
    return TensorDict({**columns, "tag": NonTensorStack("x", "y")}, [2])


def dict_batch():
    ids: Any = nested([3, 1], 4)
    inner = BatchedDataDict({"a": ids, "b": torch.arange(2)})
    columns = {"a": ids, "b": torch.arange(2), "inner": inner, "tag": ["x", "y"]}
    return BatchedDataDict(columns, meta_info={"a": 3})


@pytest.mark.parametrize("make", [batch, dict_batch])
@pytest.mark.parametrize(
    ("narrow", "names"),
    [
        (False, set()),
        (True, {"a", "b", "inner.a", "inner.b"}),
        ([], set()),
        (["a"], {"a"}),
        ({"a", "b"}, {"a", "b"}),
        (("b",), {"b"}),
        ([("inner", "a")], {"inner.a"}),
        ([("inner", "a"), ("b",)], {"inner.a", "b"}),
        (["inner"], {"inner.a", "inner.b"}),
        (["tag"], set()),
    ],
)
def test_columns_that_are_named_are_narrow_and_no_others(make, narrow, names):
    sent = make()
    frames = encode(sent, narrow=narrow)
    assert_same(decode(frames), sent)
    assert narrow_columns(frames) == names
    assert open_wire(frames)["a"].values().tolist() == sent["a"].values().tolist()


def test_tensors_that_are_not_columns_are_not_narrow():
    value = {"batch": batch(), "a": torch.arange(9), "more": [torch.arange(9)]}
    assert narrow_columns(encode(value, narrow=["a"])) == {"batch.a"}
    assert narrow_columns(encode(value, narrow=True)) > {"a", "more"}


def test_tensors_in_rows_follow_their_column():
    rows = NonTensorStack(torch.arange(9), torch.arange(9))
    td = TensorDict({"rows": rows, "b": torch.arange(2)}, [2])
    plain, narrow = encode(td, narrow=["b"]), encode(td, narrow=["rows"])
    assert size(narrow) < size(plain)
    assert_same(decode(narrow), td)


def test_every_encoder_takes_names():
    columns = {"a": torch.arange(6).view(2, 3), "b": torch.arange(2)}
    td = TensorDict({"a": nested([3, 2]), "b": torch.arange(2)}, [2])
    row = RowBuilder()
    row.append(a=[0, 1, 2], b=1)
    for name in ("a", "b"):
        memory = bytearray(1 << 16)
        written = encode(td, out=memory, narrow=[name])
        assert memory[:written] == to_blob(encode(td, narrow=[name]))
        assert message(MsgpackEncoder(narrow=[name]).encode(td)) == message(
            encode(td, narrow=[name])
        )
        for frames in (
            encode(td, narrow=[name]),
            encode_fields(columns, lengths=[3, 2], narrow=[name]),
            encode_rows({"a": [[0, 1, 2], [3, 4]], "b": [0, 1]}, narrow=[name]),
            encode_rows([{"a": [0, 1, 2], "b": 1}], narrow=[name]),
            row.to_frames(narrow=[name]),
        ):
            assert narrow_columns(frames) == {name}


def test_members_of_a_lazy_stack_are_called_by_its_name():
    member = TensorDict({"a": torch.arange(3)}, [])
    stack = LazyStackedTensorDict(member, member.clone(), stack_dim=0)
    td = TensorDict({"stack": stack, "a": torch.arange(2)}, [2])
    frames = encode(td, narrow=[("stack", "a")])
    assert narrow_columns(frames) == {"stack.a"}
    assert_same(decode(frames), td)


def test_a_value_that_default_replaces_is_in_no_column():
    class Refused:
        pass

    value = {"x": [TensorDict({"a": torch.arange(9)}, []), Refused()], "y": torch.arange(9)}
    frames = encode(value, narrow=["a"], default=lambda _: torch.arange(9))
    assert narrow_columns(frames) == {"x.a"}


@pytest.mark.parametrize("name", ["c", ("c",), ("a", "b"), ("inner", "c")])
def test_names_that_are_not_columns_are_refused(name):
    for sent in (batch(), dict_batch(), {"batch": batch()}):
        with pytest.raises(ArgumentKeyError) as raised:
            encode(sent, narrow=["a", name])
        assert raised.value.path.startswith("narrow(")


def test_the_error_of_an_unknown_name_lists_the_columns():
    with pytest.raises(ArgumentKeyError, match="expected one of 'a', 'b', 'inner'"):
        encode(batch(), narrow=["x"])
    with pytest.raises(ArgumentKeyError, match="found 'x'"):
        encode_fields({"a": torch.ones(1, 3)}, lengths=[3], narrow=["x"])
    with pytest.raises(ArgumentKeyError, match="found 'x'"):
        encode_rows([{"a": [1, 2]}], narrow=["x"])


def test_values_without_columns_are_encoded_with_any_names():
    # One encoder sends batches, and commands that have no columns.
    command = {"stop": True, "steps": [1, 2]}
    assert decode(encode(command, narrow=["x"])) == command


@pytest.mark.parametrize(
    ("narrow", "found"),
    [
        (3, "found int"),
        (None, "found NoneType"),
        ("ids", "found str"),
        ({"ids": False}, "found dict"),
        ([3], "found 3"),
        ([()], "found []"),
        ([("ids", 1)], "found ['ids', 1]"),
        ([["ids"]], "found ['ids']"),
    ],
)
def test_other_options_are_refused(narrow, found):
    with pytest.raises(ArgumentTypeError) as raised:
        encode(batch(), narrow=narrow)
    assert raised.value.path == "narrow"
    assert raised.value.detail.startswith("expected True, False, or a list of names")
    assert found in raised.value.detail
