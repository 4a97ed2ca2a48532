"""Layouts as numbers, against buffers that are written out in plain lists."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagcodec.errors import ArgumentError
from jagcodec.forward.layout_arguments import PackOptions, plan_layout
from tests.forward.written_out import multiple_of, written_out

CP_LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]


def rows_of(lengths):
    """Rows of tokens that are all different."""
    count = itertools.count()
    return [[next(count) for _ in range(n)] for n in lengths]


def flat(lists):
    return [*itertools.chain.from_iterable(lists)]


def planned(lengths, **options):
    return plan_layout(np.array(lengths, np.int64), PackOptions(**options), "plan")


def cells_at(pieces, starts, cells):
    """The cells of a column whose rows begin at `starts`, in the order of pieces; None is a pad."""
    found = []
    for begin, length, is_pad in zip(
        pieces.begins(starts).tolist(), pieces.length.tolist(), pieces.is_pad, strict=True
    ):
        found += [None] * length if is_pad else cells[begin : begin + length]
    return found


def assert_equal_to(expected, layout):
    """Every number of a layout is that of the buffers that are written out."""
    rows, lengths = expected.rows, [*map(len, expected.rows)]
    tokens = flat(rows)
    starts = np.cumsum([0, *lengths])[:-1]
    tail = [0] * (len(expected.padded) - len(rows))
    buffer = expected.buffer()
    assert (layout.rows, layout.cu_seqlens[-1], layout.total) == (
        len(rows),
        len(tokens),
        len(buffer),
    )
    assert layout.local_total * layout.cp_size == layout.total
    assert layout.lengths.tolist() == lengths
    assert layout.padded_lengths.tolist() == expected.padded[: len(rows)]
    assert layout.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths + tail)]
    assert layout.cu_seqlens_padded.tolist() == [0, *itertools.accumulate(expected.padded)]
    same = layout.cu_seqlens_padded is layout.cu_seqlens
    assert same == (expected.padded == lengths)
    longest = max(lengths, default=0), max(expected.padded, default=0)
    assert (layout.max_seqlen, layout.max_seqlen_padded) == longest
    ranks = [None, *range(layout.cp_size)]
    for shift in (0, -1, 1, -3, 10**6):
        buffer = expected.buffer(shift)
        for rank in ranks:
            held, pieces = expected.held(buffer, rank), layout.pieces(rank, shift)
            assert cells_at(pieces, starts, tokens) == held
            assert pieces.mask().tolist() == [cell is not None for cell in held]
            assert (pieces.length > 0).all()
    for through_pads in (False, True):
        positions = expected.positions(through_pads=through_pads)
        for rank in ranks:
            found = layout.position_ids(rank, through_pads=through_pads)
            assert found.tolist() == expected.held(positions, rank)
    computed = [*range(layout.total)]
    parts = [expected.held(computed, rank) for rank in range(layout.cp_size)]
    for shift in (0, 1, -1, 2, -5):
        values = flat(expected.unpacked(computed, shift))
        whole = layout.inverse(shift, by_rank=False)
        assert cells_at(whole, np.zeros(1, np.int64), computed) == values
        split = layout.inverse(shift, by_rank=True)
        starts = np.arange(layout.cp_size) * layout.local_total
        assert cells_at(split, starts, flat(parts)) == values


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_every_length_of_every_size_and_layout_is_as_written_out(cp_size):
    lengths = range(4 * cp_size + 2)
    rows = rows_of(lengths)
    for cp_layout, batch in itertools.product(CP_LAYOUTS, [rows, rows[::-1], *([r] for r in rows)]):
        unit = multiple_of(cp_size, cp_layout)
        totals = [{"total_multiple": unit}, {"min_total": 7 * unit, "total_multiple": 3 * unit}]
        tails = [{**t, "tail": tail} for t in totals for tail in ("last_row", "own_row")]
        for options in ({}, *tails) if len(batch) > 1 else tails[2:]:
            options |= {"cp_size": cp_size, "cp_layout": cp_layout, "row_multiple": unit}
            expected = written_out(batch, **options)
            assert_equal_to(expected, planned([*map(len, batch)], **options))


SIZES = st.lists(st.integers(0, 9), max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    SIZES,
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(CP_LAYOUTS),
    st.sampled_from(["last_row", "own_row"]),
    st.sampled_from([{}, {"total_multiple": 8}, {"min_total": 13, "total_multiple": 4}, 40, 64]),
)
def test_any_arguments_give_the_buffers_that_are_written_out_or_an_error(
    lengths, row_multiple, cp_size, cp_layout, tail, totals
):
    options = totals if isinstance(totals, dict) else {"total": totals}
    options = {**options, "tail": tail, "row_multiple": row_multiple}
    options |= {"cp_size": cp_size, "cp_layout": cp_layout}
    padded = sum(-(-n // row_multiple) * row_multiple for n in lengths)
    expected = None
    wanted = max(options.get("total", 0), options.get("min_total", 0))
    if padded <= options.get("total", padded) and (lengths or tail == "own_row" or not wanted):
        expected = written_out(rows_of(lengths), **options)
    if expected is None:
        with pytest.raises(ArgumentError):
            planned(lengths, **options)
    else:
        assert_equal_to(expected, planned(lengths, **options))


@pytest.mark.parametrize(
    ("lengths", "options", "path", "text"),
    [
        ([5], {"row_multiple": 0}, "plan(row_multiple)", "expected 1 or more, found 0"),
        ([5], {"total_multiple": 0}, "plan(total_multiple)", "expected 1 or more, found 0"),
        ([5], {"row_multiple": 2.0}, "plan(row_multiple)", "found 2.0"),
        ([5], {"cp_size": 0}, "plan(cp_size)", "expected 1 or more, found 0"),
        ([5], {"min_total": -1}, "plan(min_total)", "expected 0 or more, found -1"),
        ([5], {"total": -1, "tail": "own_row"}, "plan(total)", "expected 0 or more, found -1"),
        ([5], {"cp_layout": "zig"}, "plan(cp_layout)", "expected one of 'zigzag', "),
        ([5], {"tail": "row"}, "plan(tail)", "expected one of 'last_row', 'own_row', found 'row'"),
        *(
            ([8], option, "plan(tail)", "expected 'last_row' or 'own_row', .* found None")
            for option in ({"total": 8}, {"total_multiple": 8}, {"min_total": 1})
        ),
        ([5], {"total": 8, "min_total": 1}, "plan(total)", "expected total or min_total, found bo"),
        ([5, 9], {"total": 13, "tail": "last_row"}, "plan(total)", "14 .* found 13; raise it by 1"),
        (
            [5, 9],
            {"total": 14, "tail": "own_row", "row_multiple": 4},
            "plan(total)",
            "expected 20 cells or more, .* found 14; raise it by 6",
        ),
        ([], {"total": 4, "tail": "last_row"}, "plan(tail)", "expected 'own_row' for 4 cells"),
        ([1 << 30, 1 << 30], {}, "plan(lengths)", "fewer than 2\\*\\*31 cells, found 2147483648;"),
        ([1], {"row_multiple": 1 << 62}, "plan(lengths)", "fewer than 2\\*\\*31 cells, found 4611"),
        ([1], {"total": 1 << 31, "tail": "own_row"}, "plan(total)", "2\\*\\*31 cells, found 21474"),
        (
            [8, 6],
            {"cp_size": 2},
            "plan(row_multiple), row 1",
            "expected padded rows of 4 equal chunks, found 6 cells; pass row_multiple=4",
        ),
        ([6], {"cp_size": 2, "row_multiple": 6}, "plan(row_multiple), row 0", "row_multiple=12"),
        (
            [8],
            {"cp_size": 2, "total": 10, "tail": "last_row"},
            "plan(total)",
            "expected a total of 4 equal chunks for cp_size=2 .* found 10 cells; pass total=12",
        ),
        (
            [8],
            {"cp_size": 2, "total_multiple": 5, "tail": "own_row"},
            "plan(total_multiple)",
            "found 10 cells; pass total_multiple=20",
        ),
        # The surplus that is next to a row is not that of the row.
        ([5], {"cp_size": 2, "total": 8, "tail": "own_row"}, "plan(row_multiple), row 0", "=4"),
        (
            [3, 3],
            {"cp_size": 4, "cp_layout": "contiguous"},
            "plan(total_multiple)",
            "expected a total of 4 equal chunks .* found 6 cells; pass total_multiple=4",
        ),
        (
            [3, 3],
            {"cp_size": 4, "cp_layout": "zigzag_buffer", "total": 12, "tail": "own_row"},
            "plan(total)",
            "expected a total of 8 equal chunks .* found 12 cells; pass total=16",
        ),
    ],
)
def test_bad_arguments_are_errors_that_name_the_number_to_pass(lengths, options, path, text):
    with pytest.raises(ArgumentError, match=text) as caught:
        planned(lengths, **options)
    assert caught.value.path == path


def test_what_the_remedies_say_is_accepted():
    planned([5], cp_size=2, total=8, tail="last_row")  # the last row has what it lacks by the tail
    planned([8], cp_size=2, total=12, tail="last_row")
    planned([8], cp_size=2, total_multiple=20, tail="own_row")
    planned([3, 3], cp_size=4, cp_layout="contiguous", total_multiple=4, tail="last_row")
    planned([0, 0], row_multiple=1 << 62)
    planned([], total=0, tail="last_row")


def test_ranks_and_shifts_that_do_not_exist_are_errors():
    layout = planned([8], cp_size=2, row_multiple=4)
    assert [layout.read_rank(rank, "x") for rank in (None, 0, np.int64(1))] == [None, 0, 1]
    for rank in (-1, 2, 0.0, "0", True):
        with pytest.raises(ArgumentError, match="x: expected a rank of 0 to 1, or None, found"):
            layout.read_rank(rank, "x")
    for shift in (0.5, "1", None):
        with pytest.raises(ArgumentError, match="x: expected an integer, found"):
            layout.read_shift(shift, "x")
