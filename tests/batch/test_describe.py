"""Descriptions of messages: what they count, and how much work that is."""

import pytest
import torch
from tensordict import TensorDict

from jagcodec import cli, dump, encode, encode_fields
from jagcodec.batch.compare import first_difference
from jagcodec.batch.describe import check_message, describe_message, open_source, read_whole
from jagcodec.wire import message as messages
from tests.wire.forge import jagged, message, tensor, tensordict


def described(source):
    return describe_message(open_source(source, "message"))


def test_columns_of_a_batch_in_a_batch_have_all_their_keys():
    inner = TensorDict({"c": torch.ones(2)}, [2])
    batch = TensorDict({"a.b": torch.zeros(2, 3), "a": TensorDict({"b": inner}, [2])}, [2])
    found = described(encode(batch))
    assert [(c.name, c.keys) for c in found.columns] == [
        ("a.b", ("a.b",)),
        ("a.b.c", ("a", "b", "c")),
    ]


def test_cells_that_columns_share_count_for_the_first():
    ids = torch.randint(1 << 40, (8, 512), generator=torch.Generator().manual_seed(0))
    whole = encode_fields({"ids": ids}, lengths=[512] * 8, elide=False)
    both = encode_fields({"ids": ids, "same": ids.clone()}, lengths=[512] * 8, elide=True)
    first, second = described(both).columns
    assert first.bytes == described(whole).columns[0].bytes
    assert second.stored == "indirect"
    assert second.bytes < 200


def test_one_row_of_a_batch_in_a_batch(tmp_path, capsys):
    inner = TensorDict({"c": torch.arange(6).view(2, 3)}, [2])
    dump(TensorDict({"a": inner, "r": torch.ones(2)}, [2]), tmp_path / "x.jag")
    assert cli.main(["inspect", str(tmp_path / "x.jag"), "--row", "1"]) == 0
    assert capsys.readouterr().out == "row 1\na.c  [3 4 5]\nr    1.0\n"


@pytest.mark.parametrize("read", [described, lambda m: read_whole(m, "m")])
def test_no_column_is_compared_with_all_frames(read, monkeypatch):
    """Time that grows with columns times frames would let a small message take an hour."""
    passes = []

    class Sizes(list):
        def __iter__(self):
            passes.append(1)
            return super().__iter__()

    original = vars(messages)["read_header"]

    def counting(*args, **kwargs):
        header = original(*args, **kwargs)
        sizes = Sizes(header.sizes)
        return header._replace(sizes=sizes, stored=sizes)

    monkeypatch.setattr(messages, "read_header", counting)
    columns = {f"c{i}": tensor(offset=8 * i) for i in range(200)}
    read(message(tensordict([1], columns), bytes(8 * 200), *[b""] * 200))
    assert len(passes) < 40


class Number(int):
    """An integer that counts its comparisons."""

    compared = 0

    def __eq__(self, other):
        Number.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def test_a_ragged_group_is_found_without_a_search():
    n = 200
    columns = {f"c{i}": jagged(group=i, shape=[1], offset=8 * i) for i in range(n)}
    found = open_source(
        message(tensordict([1], columns), bytes(8 * n), groups=[[0, 0, 1, 1, 1]] * n), "x"
    )
    for entry in found.entries:
        at = entry.node.number + 3
        found.message.numbers[at] = Number(found.message.numbers[at])
    places = [column.rows for column in describe_message(found).columns]
    assert places == [*range(n)]
    assert Number.compared < 20 * n


class Name(str):
    """A name that counts its comparisons."""

    compared = 0
    __slots__ = ()

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_that_differ_are_found_without_comparing_all_with_all():
    n = 300
    left, right = (
        {Name(f"{side}{i}"): 0 for i in range(n + more)} for side, more in (("a", 0), ("b", 1))
    )
    found = first_difference(left, right)
    assert found is not None
    assert found.what == "columns"
    assert Name.compared < 5 * n


def test_names_of_a_stranger_reach_no_terminal_as_they_are(tmp_path, capsys):
    for name, column in (("a", "x"), ("b", "\x1b]0;owned\x07")):
        dump(TensorDict({column: torch.ones(2)}, [2]), tmp_path / f"{name}.jag")
    assert cli.main(["diff", str(tmp_path / "a.jag"), str(tmp_path / "b.jag")]) == 1
    out = capsys.readouterr().out
    assert "owned" in out
    assert "\x1b" not in out


def test_meta_that_is_not_known_here_does_not_make_a_message_unsound():
    batch = TensorDict({"x": torch.ones(2)}, [2])
    frames = encode(batch, meta={"own": print}, allow_pickle=True)
    unknown = check_message(frames)[1]
    assert list(unknown) == ["meta"]
    assert "pickle" in unknown["meta"]
    assert described(frames).meta is None
