"""Columns of the last tokens of each row: laid out at the ends of rows, and taken from there."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    concat_rows,
    encode,
    encode_rows,
    materialize,
    open_wire,
    pack_rows,
    plan_micro_batches,
    plan_packing,
    to_rows,
)
from jagcodec.errors import ArgumentError, ArgumentIndexError, ArgumentKeyError, ArgumentTypeError
from jagcodec.forward import copy_pieces
from jagcodec.rows import copy_rows
from tests.forward.written_out import multiple_of, written_out
from tests.helpers import nested

CP_LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]


def padded(cells, pad):
    return [pad if cell is None else cell for cell in cells]


def widened(rows, lengths):
    """Rows of these lengths that end with the given cells; None is a cell before them."""
    return [[None] * (n - len(row)) + row for row, n in zip(rows, lengths, strict=True)]


@st.composite
def parts(draw):
    """Lengths of rows, and of a part at the end of each."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    return lengths, [draw(st.integers(0, n)) for n in lengths]


def columns_of(lengths, counts):
    """Tokens of all rows, and two columns of the last `counts` tokens of each."""
    number = itertools.count(1)
    ids = [[next(number) for _ in range(n)] for n in lengths]
    floats = [[0.5 + next(number) for _ in range(n)] for n in counts]
    pairs = [[[next(number), next(number)] for _ in range(n)] for n in counts]
    return {"ids": ids, "logprobs": floats, "top": pairs}


def packed_rows(columns):
    """A TensorDict of rows of cells."""
    found = pack_rows(
        {name: columns[name] for name in ("ids", "logprobs")},
        dtypes={"ids": torch.int64, "logprobs": torch.float32},
    )
    flat = [pair for row in columns["top"] for pair in row]
    ends = [0, *itertools.accumulate(map(len, columns["top"]))]
    found["top"] = torch.nested.nested_tensor_from_jagged(
        torch.tensor(flat, dtype=torch.int64).view(-1, 2),
        torch.tensor(ends),
        min_seqlen=0,
        max_seqlen=max(map(len, columns["top"])),
    )
    return found


FORMS: dict[str, Any] = {
    "TensorDict": lambda td: td,
    "dict of packed columns": lambda td: dict(materialize(td, layout="packed").items()),
    "frames": encode,
    "narrow and elided": lambda td: encode(td, narrow=True, elide=True),
    "join": lambda td: concat_rows([encode(td), encode(td)]).rows(slice(len(td))),
}


@settings(max_examples=60)
@given(st.data(), parts(), st.sampled_from([*FORMS]))
def test_rows_at_the_end_are_those_widened_by_hand(data, rows, form):
    lengths, counts = rows
    cp_size, cp_layout = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(CP_LAYOUTS))
    unit = multiple_of(cp_size, cp_layout)
    options = {"row_multiple": unit, "cp_size": cp_size, "cp_layout": cp_layout}
    tail = data.draw(st.sampled_from([None, "last_row", "own_row"]))
    if tail:
        options |= {"total_multiple": 5 * unit, "tail": tail}
    columns, plan = columns_of(lengths, counts), plan_packing(lengths, **options)
    batch = FORMS[form](packed_rows(columns))
    for rank in (None, *range(cp_size)):
        found = plan.pack(
            batch,
            labels_of={"labels": "ids", "old": "logprobs"},
            align_end=["logprobs", "top", "ids"],  # which has all tokens
            pad_value_dict={"logprobs": -1.0, "old": 9.0, "top": [7, 8]},
            cp_rank=rank,
        )
        for name, of, pad, shift in (
            ("ids", "ids", 0, 0),
            ("labels", "ids", -100, -1),
            ("logprobs", "logprobs", -1.0, 0),
            ("old", "logprobs", 9.0, -1),
            ("top", "top", [7, 8], 0),
        ):
            expected = written_out(widened(columns[of], lengths), **options)
            held = expected.held(expected.buffer(shift), rank)
            assert found[name].tolist() == padded(held, pad), name


@settings(max_examples=40)
@given(parts(), st.integers(-2, 2), st.integers(1, 2), st.booleans())
def test_the_last_tokens_are_those_of_all_rows_cut_by_hand(rows, shift, cp_size, as_jagged):
    lengths, counts = rows
    options = {"row_multiple": 2 * cp_size, "cp_size": cp_size}
    plan = plan_packing(lengths, **options)
    expected = written_out([[*range(n)] for n in lengths], **options)
    computed = [0.5 + i for i in range(plan.total)]
    whole = [padded(row, -7.0) for row in expected.unpacked(computed, shift)]
    last: Any = pack_rows({"x": [[0] * n for n in counts]})["x"] if as_jagged else counts
    parts = [torch.tensor(expected.held(computed, rank)) for rank in range(cp_size)]
    for values in (torch.tensor(computed), parts):
        found: Any = plan.unpack(values, shift=shift, pad=-7.0, last=last)
        cut = [row[len(row) - n :] for row, n in zip(whole, counts, strict=True)]
        assert [row.tolist() for row in found.unbind()] == cut
        if as_jagged:  # the result can be added to the column of these rows
            assert found.offsets() is last.offsets()


@settings(max_examples=40)
@given(parts(), st.integers(1, 3), st.booleans())
def test_restore_keeps_the_last_cells_of_ragged_columns_alone(rows, ranks, all_ranks):
    lengths, counts = rows
    batches = plan_micro_batches(lengths, ranks, rows_per_batch=2, fill="repeat")
    columns = columns_of(lengths, lengths)
    td = packed_rows(columns)
    td["reward"] = torch.arange(len(lengths))
    td["uid"] = [f"u{i}" for i in range(len(lengths))]
    td["inner"] = TensorDict({"ids": td["ids"]}, batch_size=[len(lengths)])
    rank = None if all_ranks else ranks - 1
    steps = range(ranks) if rank is None else [rank]
    chosen = [*range(len(lengths))] if rank is None else batches.rows(rank).tolist()
    for form in (
        lambda part: part.to_tensordict(),
        lambda part: part,
        lambda part: part.to_frames(),
    ):
        results = [form(open_wire(td).rows(rows)) for each in steps for rows in batches[each]]
        whole = batches.restore(results, rank)
        found = batches.restore(results, rank, last=counts)
        assert type(found) is type(whole)
        for name in ("ids", "logprobs", "top"):
            expected = [columns[name][i][lengths[i] - counts[i] :] for i in chosen]
            assert [row.tolist() for row in found[name].unbind()] == expected
        inner = [row.tolist() for row in found["inner"]["ids"].unbind()]
        assert inner == [row.tolist() for row in found["ids"].unbind()]
        assert found["reward"].tolist() == chosen
        assert [row["uid"] for row in to_rows(found)] == [f"u{i}" for i in chosen]
    results = [open_wire(td).rows(rows)["ids"] for each in steps for rows in batches[each]]
    found = batches.restore(results, rank, last=torch.tensor(counts))
    assert [row.tolist() for row in found.unbind()] == [
        columns["ids"][i][lengths[i] - counts[i] :] for i in chosen
    ]


def test_gradients_flow_through_the_ends_and_back():
    values = torch.arange(1.0, 6.0, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    plan = plan_packing([4, 3], row_multiple=4)
    packed = plan.pack({"x": column}, align_end=["x"], pad_value_dict={"x": -1.0})["x"]
    assert packed.tolist() == [-1, -1, 1, 2, 3, 4, 5, -1]
    (packed * torch.arange(8.0)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 3, 4, 5, 6]
    cells = torch.arange(8.0, requires_grad=True)
    plan.unpack(cells, last=[1, 2]).values().sum().backward()
    assert cells.grad is not None
    assert cells.grad.tolist() == [0, 0, 0, 1, 0, 1, 1, 0]


def test_columns_on_a_device_share_one_index(monkeypatch):
    made: list[Any] = []
    index = copy_rows.cell_index
    monkeypatch.setattr(copy_pieces, "cell_index", lambda *args: made.append(args) or index(*args))
    offsets = torch.tensor([0, 2, 5])
    columns = {
        name: torch.nested.nested_tensor_from_jagged(torch.ones(5, requires_grad=True), offsets)
        for name in "abc"
    }
    plan = plan_packing([4, 3])
    plan.pack(columns, align_end=[*"abc"])
    assert len(made) == 1


# --- rectangles --------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data(), parts(), st.sampled_from([*FORMS]))
def test_rectangles_end_where_those_of_the_other_column_do(data, rows, form):
    lengths, counts = rows
    columns = columns_of(lengths, counts)
    td = packed_rows(columns)
    td["inner"] = TensorDict({"part": td["logprobs"], "all": td["ids"]}, batch_size=[len(lengths)])
    wide = dict(columns)
    wide["logprobs"] = [padded(row, -1.0) for row in widened(columns["logprobs"], lengths)]
    wide["top"] = [padded(row, [7, 8]) for row in widened(columns["top"], lengths)]
    prompts = [data.draw(st.integers(0, n)) for n in lengths]
    side = data.draw(st.sampled_from(["right", "left", "left_right"]))
    multiple = data.draw(st.integers(1, 4))
    options: dict[str, Any] = {"padding_side": side, "pad_to_multiple": multiple}
    options |= {"prompt_lengths": prompts} if side == "left_right" else {"pad_to_seqlen": 9}
    ends: Any = {"logprobs": "ids", "top": "ids", ("inner", "part"): "ids"}
    pads: Any = {"logprobs": -1.0, "top": 7, ("inner", "part"): -1.0}
    kept: Any = [("inner", "all")]
    found = materialize(
        FORMS[form](td),
        pad_value_dict=pads,
        align_end=ends,
        attention_mask_of={"ids": "mask", "logprobs": "loss_mask"},
        keep_jagged=kept,
        **options,
    )
    expected = materialize(packed_rows(wide), pad_value_dict={"logprobs": -1.0}, **options)
    assert found["ids"].tolist() == expected["ids"].tolist()
    assert found["logprobs"].tolist() == expected["logprobs"].tolist()
    assert found["inner"]["part"].tolist() == expected["logprobs"].tolist()
    assert found["loss_mask"].sum(1).tolist() == counts
    for name in ("logprobs", "top"):
        tokens = [token for row in columns[name] for token in row]
        assert found[name][found["loss_mask"]].tolist() == tokens
    assert found["top"][~found["loss_mask"]].unique().tolist() in ([7], [])
    assert [*found][:3] == [*td.keys()][:3]


def test_a_rectangle_of_equally_long_rows_may_have_all_tokens():
    ids, part = torch.arange(6).view(2, 3), nested([[1], [2, 3]])
    found = materialize({"ids": ids, "part": part}, align_end={"part": "ids"})
    assert found["part"].tolist() == [[0, 0, 1], [0, 2, 3]]
    left: Any = {"pad_to_seqlen": 4, "padding_side": "left"}
    found = materialize({"part": part, "ids": ids}, align_end={"part": "ids"}, **left)
    assert found["part"].tolist() == [[0, 0, 0, 1], [0, 0, 2, 3]]
    assert found["ids"].tolist() == [[0, 0, 1, 2], [0, 3, 4, 5]]
    values = torch.arange(1.0, 4.0, requires_grad=True)
    part = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    found = materialize({"ids": ids, "part": part}, align_end={"part": "ids"})
    (found["part"] * torch.arange(6.0).view(2, 3)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 4, 5]


def test_columns_that_cannot_be_aligned_are_refused():
    ids, part, long = nested([[1, 2], [3]]), nested([[1], [2]]), nested([[1], [2, 3]])
    batch = {"ids": ids, "part": part, "long": long, "n": torch.ones(2), "uid": ["a", "b"]}
    one = {"part": "ids"}
    cases: list[Any] = [
        ({"long": "ids"}, {}, ArgumentError, "row 1: expected at most .* length of 1, found 2"),
        ({"no": "ids"}, {}, ArgumentKeyError, "expected one of 'ids', .*, found 'no'"),
        ({"part": "no"}, {}, ArgumentKeyError, "expected a column that is padded, .* 'no'"),
        ({"part": "uid"}, {}, ArgumentKeyError, "expected a column that is padded, .* 'uid'"),
        (one, {"keep_jagged": ["ids"]}, ArgumentKeyError, "found 'ids'"),
        (one, {"keep_jagged": ["part"]}, ArgumentError, "that is not kept jagged"),
        ({"n": "ids"}, {}, ArgumentError, r"'n'\): .*pack_jagged_fields makes it jagged"),
        ({"uid": "ids"}, {}, ArgumentError, "expected a jagged or packed column"),
        ({"part": "ids", "ids": "part"}, {}, ArgumentError, "found 'ids' on both sides"),
        (one, {"padding_side": {"part": "left"}}, ArgumentError, "expected no padding_side of"),
        (one, {"layout": "packed"}, ArgumentError, r"align_end\): requires layout='padded'"),
        (["part"], {}, ArgumentTypeError, "expected a dict of names"),
        ({"part": 3}, {}, ArgumentTypeError, "expected names, found 3"),
    ]
    for ends, options, error, text in cases:
        with pytest.raises(error, match=f"materialize.*{text}"):
            materialize(batch, align_end=ends, **options)


# --- what is refused ---------------------------------------------------------------------------


def test_rows_that_do_not_fit_are_errors_that_name_the_column_and_the_row():
    plan = plan_packing([3, 2])
    batches = plan_micro_batches([3, 2], 2, max_tokens=3)
    short, long = nested([[1], [1, 2]]), nested([[1], [1, 2, 3]])
    full = nested([[1, 2, 3], [1, 2]])
    at_end = {"align_end": ["x"]}
    calls: list[Any] = [plan.pack, *(partial(batches.pack, rank=rank) for rank in (0, 1))]
    for pack in calls:
        cases: list[Any] = [
            (short, {}, ArgumentError, "row 0: .* length of 3, found 1; name it in align_end"),
            (long, {}, ArgumentError, "row 0: .* length of 3, found 1; or name it in keep_jagged"),
            (long, at_end, ArgumentError, "row 1: expected at most .* length of 2, found 3"),
            (nested([[1]]), at_end, ArgumentError, "expected .*2.* found 1"),
            (full, {"align_end": ["y"]}, ArgumentKeyError, "expected one of 'x', found 'y'"),
            (short, {**at_end, "keep_jagged": ["x"]}, ArgumentError, "found 'x' in both"),
            (short, {"align_end": "x"}, ArgumentTypeError, "expected names, found the string"),
            (torch.zeros(2, 3), at_end, ArgumentError, "pack_jagged_fields makes it jagged"),
            *((column, at_end, ArgumentError, "expected a jagged or packed column in align_end")
              for column in (torch.zeros(2), ["a", "b"], np.zeros((2, 3)))),
        ]  # fmt: skip
        for column, options, error, text in cases:
            with pytest.raises(error, match=text):
                pack({"x": column}, **options)
    with pytest.raises(ArgumentError, match=r"pack\(align_end\): expected a batch with align_end"):
        plan.pack(nested([[1, 2, 3], [1, 2]]), align_end=["x"])


def test_lengths_that_do_not_fit_are_errors_that_name_the_row():
    plan = plan_packing([3, 2])
    batches = plan_micro_batches([3, 2, 1], 2, max_tokens=3)
    results = [
        open_wire({"x": nested([[0] * [3, 2, 1][i] for i in rows])})
        for steps in batches
        for rows in steps
    ]
    for last, error, text in (
        ([1, 3], ArgumentError, "row 1: expected at most the row's length of 2, found 3"),
        ([1], ArgumentError, "expected 2 lengths, one for each row, found 1"),
        ([1, -1], ArgumentError, "row 1: expected a length of 0 or more"),
        ([1, 0.5], ArgumentTypeError, "row 1: expected integer lengths, found 0.5"),
        (torch.zeros(2), ArgumentTypeError, "expected integer lengths"),
        ("ab", ArgumentTypeError, "expected .*lengths"),
    ):
        with pytest.raises(error, match=rf"PackPlan.unpack\(last\).*{text}"):
            plan.unpack(torch.zeros(5), last=last)  # type: ignore[arg-type]
    for last, text in (
        ([1, 3, 1], r"restore\['x'\], row 1: expected at most the row's length of 2, found 3"),
        ([1, 2], r"restore\(last\): expected 3 lengths, one for each row of the batch, found 2"),
    ):
        with pytest.raises(ArgumentError, match=text):
            batches.restore(results, last=last)


# --- steps and rows of a rank ------------------------------------------------------------------


def test_rows_of_a_rank_are_those_that_restore_returns():
    lengths = [5, 1, 4, 2, 3, 6, 2]
    for ranks in (1, 2, 3, 5):
        batches = plan_micro_batches(lengths, ranks, rows_per_batch=1, fill="repeat")
        seen = []
        for rank in range(ranks):
            results = [rows * 10 for rows in batches[rank]]
            assert batches.restore(results, rank).tolist() == (batches.rows(rank) * 10).tolist()
            seen += batches.rows(rank).tolist()
        assert sorted(seen) == [*range(7)]
    with pytest.raises(
        ArgumentIndexError, match=r"rows\(rank\): expected a rank of 0 to 4, found 5"
    ):
        batches.rows(5)


@given(st.permutations(range(4)))
def test_steps_in_another_order_pack_and_restore_the_same_rows(order):
    lengths = [5, 1, 4, 2, 3, 6, 2, 1, 1]
    batches = plan_micro_batches(lengths, 2, count=4, rows_per_batch=2)
    batch = open_wire(encode_rows({"ids": [[i] * n for i, n in enumerate(lengths)]}))
    moved = batches.in_order(1, order)
    assert [rows.tolist() for rows in moved[0]] == [rows.tolist() for rows in batches[0]]
    assert [rows.tolist() for rows in moved[1]] == [batches[1][i].tolist() for i in order]
    for rank in range(2):
        packed = moved.pack(batch, rank)
        assert [c["ids"].tolist() for _, c in packed] == [
            [i for i in rows for _ in range(lengths[i])] for rows in moved[rank]
        ]
        restored = moved.restore([plan.unpack(c["ids"]) for plan, c in packed], rank)
        assert [row.tolist() for row in restored.unbind()] == [
            [i] * lengths[i] for i in batches.rows(rank)
        ]
        assert moved.rows(rank).tolist() == batches.rows(rank).tolist()
    assert moved.report() == {**batches.report(), "heaviest_rank": moved.report()["heaviest_rank"]}


def test_nothing_that_callers_write_to_changes_the_plan():
    lengths = [5, 1, 4, 2, 3, 6]
    batches = plan_micro_batches(lengths, 2, max_tokens=8)
    batch = open_wire(encode_rows({"ids": [[i] * n for i, n in enumerate(lengths)]}))
    expected = [c["ids"].tolist() for _, c in batches.pack(batch)]
    with pytest.raises(AttributeError):
        batches[0].reverse()  # type: ignore[attr-defined]
    batches[0][0][:] = 99
    batches.order[:] = batches.inverse[:] = 0
    batches.rows(0)[:] = -1
    assert [c["ids"].tolist() for _, c in batches.pack(batch)] == expected
    for order in ([0], [0, 0], [0, 2], [1, 0, 2]):
        with pytest.raises(ArgumentError, match=r"in_order\(order\): expected each step of 0 to 1"):
            batches.in_order(0, order)
    wrong: tuple[list[Any], ...] = ["a", 0], [1, 0, "x"], [0, None], [0, 1.0]
    for steps in wrong:
        with pytest.raises(ArgumentError, match=r"in_order\(order\)\[\d\]: expected the index"):
            batches.in_order(0, steps)
    with pytest.raises(ArgumentIndexError, match=r"in_order\(rank\)"):
        batches.in_order(2, [0, 1])


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4))
def test_steps_of_at_most_so_many_rows_exist_unless_there_are_fewer_rows_than_steps(
    rows, ranks, most
):
    count = -(-rows // (ranks * most))
    if rows < ranks * count:
        with pytest.raises(ArgumentError, match=f"expected {ranks * count} rows or more"):
            plan_micro_batches([1] * rows, ranks, rows_per_batch=most)
        return
    batches = plan_micro_batches([1] * rows, ranks, rows_per_batch=most)
    assert {len(steps) for steps in batches} == {count}
    sizes = [[len(step) for step in steps] for steps in batches]
    assert max(map(max, sizes)) <= most
    assert min(map(min, sizes)) >= 1
    if rows >= ranks * (most * (count - 1) + 1):
        assert all(set(each[:-1]) <= {most} for each in sizes)
    assert sorted(batches.order.tolist()) == [*range(rows)]


# --- memory ------------------------------------------------------------------------------------


def test_cells_larger_than_the_memory_cost_nothing_without_pads():
    huge = torch.empty(0, 1 << 40)
    column = torch.nested.nested_tensor_from_jagged(huge, torch.zeros(3, dtype=torch.int64))
    plan = plan_packing([0, 0])
    found = plan.pack({"x": column}, labels_of="x", pad_value_dict={"x": 1})
    assert found["labels"].shape == (0, 1 << 40)
    padded_plan = plan_packing([0, 0], total=1, tail="own_row")
    with pytest.raises(ArgumentError, match="expected buffers that fit in memory") as caught:
        padded_plan.pack(column, pad=1)
    assert caught.value.reason == "too_large"


def test_a_plan_forgets_pieces_of_old_shifts():
    plan = plan_packing([50] * 200)
    column = torch.arange(10_000)
    for shift in range(-200, 200):
        plan.pack(column, shift=shift)
        plan.unpack(column, shift=shift)
    kept = [*plan.layout._pieces_by_rank.values(), *plan.layout._inverses.values()]
    assert len(kept) <= 32
