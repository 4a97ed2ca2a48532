"""What is said of messages and of the first difference of two, and how much work that is."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import cli, decode, dump, encode, encode_fields, pack_jagged_fields, testing
from jagcodec.errors import ArgumentKeyError
from jagcodec.train import describe
from jagcodec.train.describe import describe_message, differences, open_source, read_whole
from jagcodec.wire.compare import first_difference
from jagcodec.wire.read import opening
from tests.helpers import nested
from tests.oracle import is_same
from tests.strategies import tensordicts, trees
from tests.wire.forge import jagged, message, tensor, tensordict
from tests.wire.readers import peak_of

VALUES = st.one_of(tensordicts(), trees())


def message_difference(left, right, columns=None):
    a, b = (read_whole(each, "message", columns) for each in (left, right))
    return next(differences(a, b), None)


@given(VALUES, VALUES)
def test_two_batches_differ_where_the_oracle_says_so(a, b):
    assert first_difference(a, decode(encode(a))) is None
    assert message_difference(encode(a), encode(a, narrow=True, checksum=True)) is None
    found, same = first_difference(a, b), is_same(a, b)
    assert (found is None) == testing.is_same(a, b) == same
    assert (message_difference(encode(a), encode(b)) is None) == same
    if found is None:
        testing.assert_same(a, b)
        return
    with pytest.raises(AssertionError, match=re.escape(str(found))):
        testing.assert_same(a, b)


@given(st.data(), st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.bool]))
def test_the_changed_cell_is_found(data, dtype):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    where = data.draw(st.sampled_from([i for i, length in enumerate(lengths) if length]))
    token = data.draw(st.integers(0, lengths[where] - 1))
    cells = torch.zeros(len(lengths), 5, 2, dtype=dtype)
    changed = cells.clone()
    changed[where, token, 1] = 1
    one = torch.ones(len(lengths))
    how: Any = {"lengths": lengths, "token_aligned_fields": ["ids"]}
    both = [{"first": one, "ids": ids, "reward": one} for ids in (cells, changed)]
    packed = [pack_jagged_fields(columns, **how) for columns in both]
    for found in (first_difference(*packed), message_difference(*map(encode, packed))):
        assert (found.column, found.row, found.cell) == ("ids", where, (token, 1))
        assert found.what == "value"
        assert (float(eval(found.left)), float(eval(found.right))) == (0, 1)


IDS = torch.tensor([[1, 2], [3, 4]])
NAN = torch.tensor([math.nan, 1.0])
OTHER_NAN = (NAN.view(torch.int32) + 1).view(torch.float32)
UNSAFE = "\x1b]0;owned\x07\x1b[2J\u202e"
SAFE = r"\x1b]0;owned\x07\x1b[2J\u202e"


def batch(**columns):
    return TensorDict(columns, batch_size=[2])


def stack(sizes):
    rows = [TensorDict({"a": torch.ones(n)}, size) for n, size in zip((2, 3), sizes, strict=True)]
    return LazyStackedTensorDict(*rows, stack_dim=0)


def payloads(*sizes):
    """A stack of payloads that is no list of rows if their sizes differ."""
    each = (NonTensorData("x", batch_size=[size]) for size in sizes)
    return NonTensorStack(*each, stack_dim=1)


def dotted(outer, inner):
    """A key may have a dot in it, so that two columns have one name."""
    return batch(**{"a.b": outer, "a": batch(b=inner)})


def named(column):
    return {"td": batch(**{"$.x": column}), "x": 1}


def only(left, right):
    return f"the whole: columns only {left} in the first and {right} in the second"


ONE, TWO = NonTensorStack({"a": [1, 2]}, "x"), NonTensorStack({"a": [1, True]}, "y")
ROWS, LONGER = nested([[1, 1], [1, 1, 1]]), nested([[1, 1], [1, 1, 1, 1]])
TURNED, OTHER = nested([[[1], [1]], [[1, 1, 1]] * 2]), nested([[[1], [1]], [[1, 1, 7], [1, 1, 1]]])
EYE, BATCH = torch.eye(2), batch(ids=IDS)
COLUMNS: list[tuple[Any, Any, str]] = [
    (IDS, IDS.int(), ": dtype int64 and int32"),
    (IDS, IDS[:, :1], ": shape [2, 2] and [2, 1]"),
    (NAN, OTHER_NAN, ", row 0: value nan (bits 7fc00000) and nan (bits 7fc00001)"),
    (torch.zeros(2), -torch.zeros(2), ", row 0: value 0.0 and -0.0"),
    (EYE.to_sparse(), EYE.flip(0).to_sparse(), ", cell [1, 0], $.indices: value 0 and 1"),
    (TURNED, OTHER, ", row 1, cell [0, 2]: value 1 and 7"),
    (ONE, TWO, ", row 0, $.a[1]: type int and bool"),
    (NonTensorStack("x", "y"), NonTensorStack("x", "z"), ", row 1: value 'y' and 'z'"),
    (batch(ids=IDS, y=ROWS), batch(ids=IDS, y=LONGER), ".y, row 1: tokens 3 and 4"),
]
WHOLE: list[tuple[Any, Any, str]] = [
    (batch(x=NAN), batch(x=NAN.clone()), "None"),
    (batch(a=IDS, x=IDS), batch(a=IDS), only("x", "none")),
    (batch(**{UNSAFE: IDS}), batch(x=IDS), only(SAFE, "x")),
    (batch(a=IDS, b=NAN), batch(b=NAN, a=IDS), "the whole: order of columns a, b and b, a"),
    ({1: "x"}, {True: "x"}, "$: columns only 1 in the first and True in the second"),
    (batch(a=IDS, b=IDS), batch(a=-IDS, b=NAN), "column a, row 0, cell [0]: value 1 and -1"),
    (batch(**{UNSAFE: IDS[0]}), batch(**{UNSAFE: IDS[1]}), f"column {SAFE}, row 0: value 1 and 3"),
    (dotted(IDS, IDS), dotted(IDS.clone(), IDS), "None"),
    (dotted(IDS, IDS), dotted(-IDS, IDS), "column a.b, row 0, cell [0]: value 1 and -1"),
    (dotted(IDS, IDS), dotted(IDS, -IDS), "column a.b, row 0, cell [0]: value 1 and -1"),
    (
        dotted(NAN, IDS),
        batch(a=BATCH, **{"a.b": NAN}),
        "the whole: order of columns a.b, a and a, a.b",
    ),
    # What is next to the batch, and a column that has its name.
    ({"td": BATCH, "w": IDS[0]}, {"td": BATCH, "w": IDS[1]}, "column w, row 0: value 1 and 3"),
    (named(IDS), named(-IDS), "column td.$.x, row 0, cell [0]: value 1 and -1"),
    # Equal by ==, and not the same.
    (range(0, 3, 2), range(0, 4, 2), "$: value range(0, 3, 2) and range(0, 4, 2)"),
    # [x] and (x,) have the same entries.
    ([IDS], (IDS,), "$: type list and tuple"),
    (stack([[], []]), stack([[], []]), "None"),
    (stack([[], []]), stack([[], []]).tensordicts, "$: type LazyStackedTensorDict and list"),
    (stack([[], []]), stack([[2], [3]]), "$: batch size [2] and [2, -1]"),
]
SAID = [*((batch(x=one), batch(x=two), f"column x{said}") for one, two, said in COLUMNS), *WHOLE]


@pytest.mark.parametrize(("left", "right", "said"), SAID)
def test_what_is_said(left, right, said):
    assert str(first_difference(left, right)) == said.replace("$: ", "the whole: ")
    assert str(message_difference(encode(left), encode(right))) == said


def test_stacks_of_payloads_of_several_sizes_are_compared():
    first, second = encode(payloads(3, 1)), encode(payloads(3, 2))
    assert message_difference(first, first) is None
    assert str(message_difference(first, second)) == "$[1]: batch size [1] and [2]"


def test_what_is_not_in_the_batch_is_compared_and_columns_are_chosen():
    steps = [encode(batch(ids=IDS), meta={"step": step}) for step in (1, 2)]
    assert str(message_difference(*steps)) == "column meta, $.step: value 1 and 2"
    a, b = (encode(batch(ids=IDS, x=x)) for x in (IDS, IDS + 1))
    assert message_difference(a, b, columns=["ids"]) is None
    assert message_difference(a, b, columns=["x"]).column == "x"
    with pytest.raises(ArgumentKeyError):
        message_difference(a, b, columns=["nothing"])


def test_arrays_and_plain_values():
    x = np.arange(6).reshape(2, 3)
    rest = (1, 2.5, {"k": b"1"})
    assert first_difference({"x": x, "y": rest}, {"x": x.copy(), "y": rest}) is None
    found = first_difference({"x": x, "y": rest}, {"x": x % 5, "y": rest})
    assert (found.column, found.row, found.cell) == ("x", 1, (2,))
    a, b = ({float("nan"): value} for value in (1, 2))  # keys that equal nothing
    assert str(first_difference([a], [b])).endswith("value 1 and 2")


def test_equal_columns_are_compared_without_memory_of_their_size():
    ids = torch.arange(1 << 20)
    rows = nested([ids[: 1 << 19], ids[1 << 19 :]])
    for left, right in ((ids, ids.clone()), (rows, rows.clone())):
        assert first_difference(left, right) is None
        assert peak_of(first_difference, left, right) < ids.nbytes / 64


def described(source):
    return describe_message(open_source(source, "message"))


def test_columns_of_a_batch_in_a_batch_have_all_their_keys(tmp_path, capsys):
    inner = batch(b=batch(c=torch.arange(6).view(2, 3)))
    td = batch(**{"a.b": torch.zeros(2), "a": inner})
    found = {column.name: column.keys for column in described(encode(td)).columns}
    assert found == {"a.b": ("a.b",), "a.b.c": ("a", "b", "c")}
    dump(td, tmp_path / "x.jag")
    assert cli.main(["inspect", str(tmp_path / "x.jag"), "--row", "1"]) == 0
    assert capsys.readouterr().out == "row 1\na.b    0.0\na.b.c  [3 4 5]\n"
    dump(batch(**{UNSAFE: IDS}), tmp_path / "y.jag")
    assert cli.main(["diff", str(tmp_path / "x.jag"), str(tmp_path / "y.jag")]) == 1
    assert SAFE in capsys.readouterr().out


def test_cells_that_columns_share_count_for_the_first():
    ids = torch.randint(1 << 40, (8, 512), generator=torch.Generator().manual_seed(0))
    whole = encode_fields({"ids": ids}, lengths=[512] * 8, elide=False)
    both = encode_fields({"ids": ids, "same": ids.clone()}, lengths=[512] * 8, elide=True)
    first, second = described(both).columns
    assert first.bytes == described(whole).columns[0].bytes
    assert second.stored == "indirect"
    assert second.bytes < 200


def test_meta_that_is_not_known_here_does_not_make_a_message_unsound():
    frames = encode(batch(x=torch.ones(2)), meta={"own": print}, allow_pickle=True)
    unknown = describe.check_message(frames)[1]
    assert list(unknown) == ["meta"]
    assert "pickle" in unknown["meta"]
    assert described(frames).meta is None


@pytest.mark.parametrize("read", [described, lambda m: read_whole(m, "m")])
def test_no_column_is_compared_with_all_frames(read, monkeypatch):
    passes = []

    class Sizes(list):
        def __iter__(self):
            passes.append(1)
            return super().__iter__()

    original = vars(opening)["read_header"]

    def counting(*args, **kwargs):
        header = original(*args, **kwargs)
        sizes = Sizes(header.sizes)
        return header._replace(sizes=sizes, sent_sizes=sizes)

    monkeypatch.setattr(opening, "read_header", counting)
    columns = {f"c{i}": tensor(offset=8 * i) for i in range(200)}
    read(message(tensordict([1], columns), bytes(8 * 200), *[b""] * 200))
    assert len(passes) < 40


COMPARED = []


class Noted:
    """Notes what it is compared with."""

    def __eq__(self, other):
        COMPARED.append(other)
        return super().__eq__(other)

    def __hash__(self):
        return super().__hash__()


Number, Name = type("Number", (Noted, int), {}), type("Name", (Noted, str), {})


def test_groups_and_names_are_found_without_a_search():
    n = 300
    columns = {f"c{i}": jagged(group=i, shape=[1], offset=8 * i) for i in range(n)}
    groups = [[0, 0, 1, 1, 1]] * n
    found = open_source(message(tensordict([1], columns), bytes(8 * n), groups=groups), "x")
    for entry in found.entries:
        at = entry.node.number + 3
        found.message.numbers[at] = Number(found.message.numbers[at])
    COMPARED.clear()
    assert [column.rows for column in describe_message(found).columns] == [*range(n)]
    assert len(COMPARED) < 20 * n
    left, right = ({Name(f"{side}{i}"): 0 for i in range(n + (side > "a"))} for side in "ab")
    COMPARED.clear()
    difference = first_difference(left, right)
    assert difference is not None
    assert difference.what == "columns only"
    assert len(COMPARED) < 5 * n
