"""Micro-batches: every rule, the fewest and the most even of small ones, results back in order."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagcodec import (
    MicroBatches,
    encode,
    materialize,
    open_wire,
    plan_micro_batches,
    select_rows,
    to_blob,
    to_rows,
)
from jagcodec.errors import ArgumentError, ArgumentIndexError, ArgumentTypeError
from tests.helpers import LENGTHS, make_batch, nested, run_python
from tests.oracle import rows_of

# --- written out -------------------------------------------------------------------------------


def up(number, multiple):
    return math.ceil(number / multiple) * multiple


def first_fit(sizes, room):
    """How many parts first-fit-decreasing needs for (tokens, rows), if this fits into a part."""
    parts: list[tuple[int, ...]] = []
    for size in sorted(sizes, reverse=True):
        for i, part in enumerate(parts):
            both = tuple(map(sum, zip(part, size, strict=True)))
            if all(held <= most for held, most in zip(both, room, strict=True)):
                parts[i] = both
                break
        else:
            parts.append(size)
    return len(parts)


def longest_first(costs, ranks):
    """The rows of each rank, longest-processing-time-first, without caps."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        min(parts, key=lambda part: (sum(costs[i] for i in part), len(part))).append(row)
    return parts


def divides(sizes, count, most):
    """Whether sizes can be divided into `count` parts of at most `most`, none of them empty."""
    free = [most] * count

    def place(left):
        if not left:
            return True
        for part in {room: i for i, room in enumerate(free) if room >= left[0]}.values():
            free[part] -= left[0]
            placed = place(left[1:])
            free[part] += left[0]
            if placed:
                return True
        return False

    return len(sizes) >= count and place(sorted(sizes, reverse=True))


def lists(batches):
    return [[rows.tolist() for rows in steps] for steps in batches]


def rank_costs(batches, costs):
    return [sum(costs[row] for rows in steps for row in rows) for steps in lists(batches)]


# --- the rules ---------------------------------------------------------------------------------

COSTS: list[tuple[Any, Any]] = [
    (None, lambda n: n),
    ((2, 0.5), lambda n: 2 * n + 0.5 * n * n),
    (lambda lengths: [n % 7 for n in lengths], lambda n: n % 7),
]


@st.composite
def plans(draw):
    """Lengths, the group of each row, and options that no row or group exceeds alone."""
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=24))
    ids = draw(st.none() | st.lists(st.integers(0, 9), min_size=24, max_size=24))
    group_of = list(range(len(lengths))) if ids is None else ids[: len(lengths)]
    row_multiple, total_multiple = draw(st.sampled_from([(1, 1), (2, 1), (6, 16), (1, 16)]))
    padded, groups = [up(n, row_multiple) for n in lengths], sorted(set(group_of))
    sizes = [sum(n for n, g in zip(padded, group_of, strict=True) if g == own) for own in groups]
    room: dict[str, int] = {}
    if draw(st.booleans()):
        room["max_tokens"] = up(max(sizes), total_multiple) + draw(st.integers(0, 60))
        room["max_tokens"] = max(room["max_tokens"], total_multiple)
    if draw(st.booleans()) or not room:
        room["rows_per_batch"] = max(map(group_of.count, groups)) + draw(st.integers(0, 3))
    options = {
        **room,
        **{"row_multiple": row_multiple, "total_multiple": total_multiple},
        "groups": None if ids is None else group_of,
        "ranks": draw(st.integers(1, 4)),
        "count_multiple": draw(st.integers(1, 3)),
        "fill": draw(st.sampled_from(["error", "repeat"])),
        "cost": draw(st.sampled_from(COSTS))[0],
    }
    return lengths, group_of, padded, options


@given(plans())
def test_every_rule_holds(plan):
    lengths, group_of, padded, options = plan
    ranks, most_rows = options["ranks"], options.get("rows_per_batch", len(lengths))
    total_multiple, multiple = options["total_multiple"], options["count_multiple"]
    most = options.get("max_tokens", math.inf)
    sizes: dict[int, tuple[int, int]] = {}
    for n, group in zip(padded, group_of, strict=True):
        tokens, rows = sizes.get(group, (0, 0))
        sizes[group] = tokens + n * ("max_tokens" in options), rows + 1
    room = most if most == math.inf else most // total_multiple * total_multiple, most_rows
    count = up(math.ceil(first_fit(sizes.values(), room) / ranks), multiple)
    exact = (
        "max_tokens" not in options
        and options["groups"] is None
        and count == math.ceil(len(lengths) / (ranks * most_rows))
        and (options["fill"] == "repeat" or len(lengths) >= ranks * (most_rows * (count - 1) + 1))
    )
    needed = ranks * ((most_rows if exact else 1) * (count - 1) + 1)
    missing = max(0, needed - len(sizes))
    if missing and options["fill"] == "error":
        with pytest.raises(ArgumentError, match=f"expected {needed} .*found .*: {missing} missing"):
            plan_micro_batches(lengths, **options)
        return
    batches = plan_micro_batches(lengths, **options)
    # Each rank has the same number of micro-batches, as few as first-fit-decreasing needs.
    assert {len(batches), *map(len, batches)} == {ranks, count}
    flat = [rows for steps in batches for rows in steps]
    assert all(len(rows) and rows.dtype == np.int64 and (np.diff(rows) >= 0).all() for rows in flat)
    # Each row is there once, and besides copies of the shortest row.
    copies = np.concatenate([batches.is_repeat(*at) for at in np.ndindex(ranks, count)])
    assert batches.order.tolist() == np.concatenate(flat).tolist()
    assert sorted(batches.order[~copies]) == list(range(len(lengths)))
    assert batches.order[copies].tolist() == [lengths.index(min(lengths))] * missing
    assert batches.order[batches.inverse].tolist() == list(range(len(lengths)))
    assert not copies[batches.inverse].any()
    # No micro-batch holds more than fits, and a group is in one of them.
    assert all(up(sum(padded[row] for row in rows), total_multiple) <= most for rows in flat)
    assert all(len(rows) <= most_rows for rows in flat)
    if exact:
        assert {len(rows) for steps in batches for rows in steps[:-1]} <= {most_rows}
    step_of = np.repeat(np.arange(len(flat)), [*map(len, flat)])[batches.inverse]
    for group in set(group_of):
        assert len({step for step, own in zip(step_of, group_of, strict=True) if own == group}) == 1
    report = batches.report()
    assert (report["rows"], report["copies"]) == (len(lengths), missing)
    assert report["micro_batches"] == ranks * report["micro_batches_per_rank"] == len(flat)
    cells = [up(sum(padded[row] for row in rows), total_multiple) for rows in flat]
    assert (report["tokens"], report["cells"]) == (sum(lengths), sum(cells))
    assert report["fill"] == (sum(lengths) / sum(cells) if sum(cells) else 1)


def best(lengths, costs, ranks, count, most):
    """The lowest cost of the heaviest rank, of all ways that keep the cap; tried one by one."""
    lowest = math.inf
    for others in itertools.product(range(ranks), repeat=len(lengths) - 1):
        owners = (0, *others)
        heaviest = max(sum(itertools.compress(costs, map(r.__eq__, owners))) for r in range(ranks))
        if heaviest < lowest and all(
            divides([*itertools.compress(lengths, map(r.__eq__, owners))], count, most)
            for r in range(ranks)
        ):
            lowest = heaviest
    return lowest


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.integers(12, 30),
    st.integers(1, 3),
    st.sampled_from(COSTS),
)
def test_small_plans_are_compared_with_all_ways_to_divide_the_rows(lengths, most, ranks, cost):
    argument, cost_of = cost
    fewest = next(b for b in itertools.count(1) if divides([*lengths, *[0] * b], b, most))
    try:
        batches = plan_micro_batches(lengths, ranks, max_tokens=most, cost=argument)
    except ArgumentError:
        assert len(lengths) < ranks * math.ceil((11 * fewest + 6) / 9 / ranks)
        return
    count = len(batches[0])
    assert fewest / ranks <= count <= math.ceil((11 * fewest + 6) / 9 / ranks)
    costs = [cost_of(n) for n in lengths]
    heaviest = max(rank_costs(batches, costs))
    assert heaviest >= best(lengths, costs, ranks, count, most)
    for parts in [longest_first(costs, ranks)]:
        if all(divides([lengths[row] for row in rows], count, most) for rows in parts):
            assert heaviest <= max(sum(costs[row] for row in rows) for rows in parts)


def test_many_rows_are_spread_evenly():
    for seed in range(3):
        draw = np.random.default_rng(seed).lognormal(7, 0.8, 2048)
        lengths = np.minimum(draw, 16_384).astype(int)
        batches = plan_micro_batches(lengths, 16, max_tokens=32_768, cost=(24_576, 1))
        report = batches.report()
        fewest = math.ceil(lengths.sum() / 32_768 / 16)
        assert fewest <= report["micro_batches_per_rank"] <= fewest + 1
        assert 1 <= report["heaviest_rank"] < 1.01
        costs = 24_576.0 * lengths + lengths**2.0
        mean = costs.sum() / 16
        assert math.isclose(report["heaviest_rank"], max(rank_costs(batches, costs)) / mean)
        # Full to the brim: whole micro-batches are swapped between ranks.
        tight = math.ceil(lengths.sum() / (16 * fewest))
        full = plan_micro_batches(lengths, 16, max_tokens=tight + 20, cost=(24_576, 1))
        assert full.report()["micro_batches_per_rank"] == fewest
        assert full.report()["heaviest_rank"] < 1.02


def test_rows_per_batch_alone_is_exact_up_to_the_last_step():
    for rows, ranks, each in itertools.product(range(1, 20), (1, 2, 3), (1, 2, 4)):
        lengths = [row * row % 13 for row in range(rows)]
        batches = plan_micro_batches(lengths, ranks, rows_per_batch=each, fill="repeat")
        assert len(batches[0]) == math.ceil(rows / ranks / each)
        sizes = [[len(own) for own in steps] for steps in batches]
        assert {size for steps in sizes for size in steps[:-1]} <= {each}
        last = [steps[-1] for steps in sizes]
        assert 1 <= min(last) <= max(last) <= min(each, min(last) + 1)


def test_counts():
    lengths = [4, 4, 4, 4]
    assert lists(plan_micro_batches(lengths, count=2)) == [[[0, 2], [1, 3]]]
    assert len(plan_micro_batches(lengths, max_tokens=8, count_multiple=4)[0]) == 4
    assert len(plan_micro_batches(lengths, max_tokens=8, count=4, count_multiple=2)[0]) == 4
    # More micro-batches than rows_per_batch needs: then it is the most that one may hold.
    sizes = [len(rows) for rows in plan_micro_batches(lengths, rows_per_batch=3, count=3)[0]]
    assert sorted(sizes) == [1, 1, 2]


def test_a_plan_of_nothing():
    for options in ({"max_tokens": 9}, {"rows_per_batch": 2, "groups": []}):
        batches = plan_micro_batches([], 3, **options)
        assert (lists(batches), len(batches)) == ([[], [], []], 3)
        assert batches.order.tolist() == batches.inverse.tolist() == []
        assert (batches.report()["fill"], batches.report()["heaviest_rank"]) == (1, 1)
        with pytest.raises(ArgumentError, match="expected results, found none: the plan has no"):
            batches.restore([])
        with pytest.raises(ArgumentError, match=r"expected 0 results, .* found 1"):
            batches.restore([[1]])
        with pytest.raises(ArgumentIndexError, match=r"expected no step, .* found 0"):
            batches.is_repeat(0, 0)
        with pytest.raises(ArgumentError, match=r"\(order\): expected no steps, found \[0\]"):
            batches.in_order(0, [0])
    assert lists(plan_micro_batches([0, 0], 2, max_tokens=1)) == [[[0]], [[1]]]


def test_every_process_makes_the_same_plan():
    code = """
    from jagcodec import plan_micro_batches
    groups = [f"uid {i * i % 23}" for i in range(80)]
    lengths = [i * 7919 % 101 for i in range(80)]
    plan = plan_micro_batches(lengths, 3, max_tokens=900, groups=groups, cost=(3, 0.1))
    print([[rows.tolist() for rows in steps] for steps in plan])
    """
    plans = {run_python(code, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "2")}
    assert len(plans) == 1


def test_lists_are_planned_without_torch_and_tensordict():
    run_python(
        """
        import jagcodec, pickle, sys
        batches = jagcodec.plan_micro_batches([3, 5, 2], 2, max_tokens=8, groups=["a", "b", "b"])
        again = pickle.loads(pickle.dumps(batches))
        assert (again.order.tolist(), again.inverse.tolist()) == ([1, 2, 0], [2, 0, 1])
        assert (batches.report()["tokens"], batches.is_repeat(1, 0).tolist()) == (10, [False])
        assert [[rows.tolist() for rows in steps] for steps in batches] == [[[1, 2]], [[0]]]
        assert not {"torch", "tensordict"} & {*sys.modules}
        """
    )


def test_lengths_groups_and_costs_of_every_form():
    lengths = [3, 1, 2, 5]
    expected = lists(plan_micro_batches(lengths, 2, count=1, groups=[0, 0, 1, 1], cost=(0, 1)))
    forms = (np.array(lengths, np.uint8), torch.tensor(lengths), nested([[0] * n for n in lengths]))
    ids = (torch.tensor([7, 7, 2, 2]), np.array(["x", "x", "y", "y"]), (None, None, "", ""))
    costs: list[Any] = [(0.0, 1), lambda n: torch.tensor(n) ** 2, np.array([0, 1]), [0, 1]]
    for form, groups, cost in itertools.product(forms, (*ids, [*ids[0]], [*ids[1]]), costs):
        assert lists(plan_micro_batches(form, 2, count=1, groups=groups, cost=cost)) == expected
    given = np.array(lengths)
    plan_micro_batches(given, count=1, cost=lambda n: n.__imul__(2))
    assert given.tolist() == lengths


# --- results -----------------------------------------------------------------------------------

REPEATED = plan_micro_batches(LENGTHS, 2, max_tokens=6, count=4, fill="repeat")
FORMS: dict[str, Any] = {
    "a TensorDict": lambda td: td,
    "frames": encode,
    "a blob": lambda td: to_blob(encode(td)),
    "an open message": lambda td: open_wire(encode(td)),
    "a dict": lambda td: dict(td.items()),
    "a BatchedDataDict": lambda td: materialize(td, "jagged"),
    # Without a column whose two tokens of two cells could be of either ragged dim.
    "packed columns": lambda td: materialize(td.exclude("experts"), "packed"),
}


def own_rows(rank):
    """The rows of a rank, rising, without copies."""
    own = [(rows, REPEATED.is_repeat(rank, step)) for step, rows in enumerate(REPEATED[rank])]
    return sorted(row for rows, copies in own for row in rows[~copies].tolist())


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_every_form_come_back_in_order(form):
    td = make_batch()
    assert REPEATED.report()["copies"] == 2
    assert sorted(own_rows(0) + own_rows(1)) == list(range(6))
    results = [[FORMS[form](select_rows(td, rows)) for rows in steps] for steps in REPEATED]
    restored = REPEATED.restore(itertools.chain(*results))
    assert type(restored) is type(select_rows(FORMS[form](td), [0]))
    expected = to_rows(FORMS[form](td), as_="list")
    assert to_rows(restored, as_="list") == expected
    for rank in range(2):
        found = to_rows(REPEATED.restore(results[rank], rank), as_="list")
        assert found == [expected[row] for row in own_rows(rank)]


def test_columns_of_every_kind_come_back_in_order():
    weights = torch.arange(6.0, requires_grad=True)
    jagged = nested([[row] * n for row, n in enumerate(LENGTHS)])
    flat = [rows for steps in REPEATED for rows in steps]
    restored = REPEATED.restore([weights[torch.from_numpy(rows)] * 2 for rows in flat])
    assert restored.tolist() == [0, 2, 4, 6, 8, 10]
    (restored * torch.arange(6)).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 2, 4, 6, 8, 10]
    parts = [select_rows({"x": jagged}, rows)["x"] for rows in flat]
    assert rows_of(REPEATED.restore(parts)) == rows_of(jagged)
    packed = [materialize({"x": part}, "packed")["x"] for part in parts]
    assert REPEATED.restore(packed).values.tolist() == jagged.values().tolist()
    assert REPEATED.restore([rows.astype(np.uint8) for rows in flat]).tolist() == list(range(6))
    objects = [[np.arange(row) for row in rows] for rows in flat]
    assert [len(each) for each in REPEATED.restore(objects)] == list(range(6))


def test_a_plan_is_a_sequence_that_travels():
    for plan in (REPEATED, pickle.loads(pickle.dumps(REPEATED))):
        assert type(plan) is MicroBatches
        assert lists(plan) == lists(plan[::-1])[::-1] == lists(REPEATED)
        assert repr(plan) == "MicroBatches(rows=6, ranks=2, micro_batches_per_rank=4)"
        assert lists([plan[-1]]) == lists([plan[1]])


# --- refused -----------------------------------------------------------------------------------


def nan_in_row_1(lengths):
    return np.where(np.arange(len(lengths)) == 1, np.nan, lengths)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"count": None}, "expected at least one of max_tokens, rows_per_batch, count, found none"),
    ({"max_tokens": 4}, r"\(lengths\), row 2: expected at most max_tokens=4 tokens, found 5"),
    ({"max_tokens": 7, "row_multiple": 4}, "row 2: .*max_tokens=7 tokens, found 5, padded to 8"),
    ({"max_tokens": 7, "total_multiple": 5, "row_multiple": 3}, "row 2: .*found 5, padded to 10"),
    ({"max_tokens": 7, "total_multiple": 8}, r"\(max_tokens\): expected 8 or more, .*found 7"),
    ({"max_tokens": 7, "groups": list("abab")}, r"\(groups\), group 'a': .*found 8 in 2 rows"),
    ({"rows_per_batch": 1, "groups": [1, 2, 3, 3]}, "group 3: .*rows_per_batch=1 rows, found 2"),
    ({"max_tokens": 5, "count": 2}, r"\(count\): expected 3 or more .*for each rank, found 2"),
    ({"count": 3, "count_multiple": 2}, "expected 2 or more .*, a multiple of .*=2, found 3"),
    ({"max_tokens": 5, "count": 3, "count_multiple": 2}, "expected 4 or more .*found 3"),
    ({"ranks": 3, "count": 2}, r"\(lengths\): expected 6 rows.*found 4: 2 missing; .*'repeat'"),
    ({"count": 2, "groups": [1] * 4}, r"\(groups\): expected 2 groups .*found 1: 1 missing"),
    ({"ranks": 3, "rows_per_batch": 1}, "expected 6 rows .*: 2 missing"),
    ({"lengths": [], "count": 2, "fill": "repeat"}, "found 0: 2 missing$"),
    ({"fill": "pad"}, r"\(fill\): expected one of 'error', 'repeat', found 'pad'"),
    ({"ranks": 1 << 62}, r"\(ranks\): expected at most .* ranks, found 4611686018427387904"),
    ({"ranks": 1 << 19, "count": 1 << 40}, r"\(count\): expected at most .* micro-batches"),
    ({"count_multiple": 1 << 40, "count": None, "max_tokens": 8}, "expected at most .* for all"),
    ({"ranks": 0}, r"\(ranks\): expected 1 or more, found 0"),
    ({"row_multiple": 0}, r"\(row_multiple\): expected 1 or more, found 0"),
    ({"total_multiple": -1}, r"\(total_multiple\): expected 1 or more"),
    ({"count_multiple": 1.5}, r"\(count_multiple\): expected 1 or more, found 1.5"),
    ({"rows_per_batch": 0}, r"\(rows_per_batch\): expected 1 or more"),
    ({"max_tokens": "9"}, r"\(max_tokens\): expected 1 or more, found '9'"),
    ({"lengths": [3, -1]}, r"\(lengths\), row 1: expected a length of 0 or more.*found -1"),
    ({"lengths": [3, 1.0]}, "row 1: expected integer lengths, found 1.0"),
    ({"lengths": [True]}, "row 0: expected integer lengths, found True"),
    ({"lengths": np.ones((2, 2), int)}, r"lengths shape \(2, 2\)"),
    ({"lengths": torch.ones(2)}, "expected integer lengths"),
    ({"lengths": 3}, "expected .*lengths"),
    ({"lengths": [1 << 61, 1], "row_multiple": 1 << 61}, "below 2\\*\\*63 after padding"),
    ({"groups": [1, 2]}, "expected one id for each of 4 rows, found 2"),
    ({"groups": [[1], [2], [3], [4]]}, r"\(groups\): expected \(N,\) hashable ids, .* found list"),
    ({"groups": "abab"}, "one for each row, found 'abab'"),
    ({"groups": 3}, "expected .* hashable ids, .* found int"),
    ({"cost": nan_in_row_1}, r"\(cost\), row 1: expected a cost of 0 or more, below .*, found nan"),
    ({"cost": lambda n: -n}, "row 0: expected a cost of 0 or more, below .*, found -3"),
    ({"cost": lambda n: n[1:]}, r"expected a function that returns \(4,\) numbers, found .*3"),
    ({"cost": lambda n: n > 1}, r"returns \(4,\) numbers, found"),
    ({"cost": lambda: 1}, "expected a function that takes these arguments"),
    ({"cost": lambda n: None}, r"returns \(4,\) numbers, found NoneType"),
    ({"cost": (1e308, 1e308)}, "row 0: expected a cost of 0 or more, below .*, found inf"),
    *(({"cost": cost}, r"\(cost\): expected None, a pair of finite numbers .*or a function")
      for cost in ((1,), (1, -1), (1, math.nan), (math.inf, 0), "no", 3, ("1", "2"), (10**400, 1))),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_refused(options, text):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=text) as caught:
        plan_micro_batches(**{"lengths": [3, 1, 5, 2], "count": 2, **options})
    assert str(caught.value).startswith("plan_micro_batches")


def test_results_that_are_not_those_of_the_plan_are_refused():
    plan = plan_micro_batches([3, 1, 2], 1, max_tokens=3)
    for results, text in (
        ([[1]], r"\(results\): expected 2 results, one for each micro-batch, found 1"),
        ([[1], [2]], r"\(results\[1\]\): expected 2 rows, like its micro-batch, found 1"),
        ([[1], "ab"], r"results\[1\]\).*expected a column"),
        ([[1], torch.ones(2)], "expected one kind of column"),
        ([{"x": [1]}, [1, 2]], r"results\[1\]\): expected a batch"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=rf"restore.*{text}"):
            plan.restore(results)
    for call, text in (
        (lambda: plan[1], r"MicroBatches\(rank\): expected a rank of 0 to 0, found 1"),
        (lambda: plan.is_repeat(-1, 0), r"is_repeat\(rank\): .*found -1"),
        (lambda: plan.is_repeat(0, 2), r"is_repeat\(step\): expected a step of 0 to 1, found 2"),
        (lambda: plan.restore([[1]], 1), r"restore\(rank\): expected a rank of 0 to 0, found 1"),
    ):
        with pytest.raises(ArgumentIndexError, match=text):
            call()
