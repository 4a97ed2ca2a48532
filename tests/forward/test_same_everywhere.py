"""Ranks that plan for themselves get equal plans, whatever their CPU and their hash seed."""

import itertools
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from jagcodec import plan_micro_batches
from tests.helpers import run_python
from tests.wire.readers import operations

PLANS = """
    import hashlib, json
    import numpy as np
    from jagcodec import plan_micro_batches
    from jagcodec.errors import ArgumentError

    COSTS = [None, (0.1, 0.3), (24576, 1), (1 / 3, 1e-4), lambda n: 0.1 * n + 1 / (1 + n)]

    def options(draw):
        ranks = int(draw.choice([1, 2, 3, 4, 8, 39, 64]))
        rows = int(draw.integers(ranks, 12 * ranks + 40))
        unlike = [draw.integers(1, 1000, rows), draw.choice([100, 200, 330, 400, 670, 800], rows)]
        given = {"lengths": unlike[draw.integers(2)], "ranks": ranks, "fill": "repeat"}
        given["max_tokens"] = int(draw.choice([1000, 1024, 2000]))
        given["cost"] = COSTS[draw.integers(len(COSTS))]
        if draw.random() < 0.2:
            given["rows_per_batch"] = int(draw.integers(1, 5))
        if draw.random() < 0.2:
            given["groups"] = draw.integers(0, rows, rows)
        return given

    def plan(seed):
        try:
            found = plan_micro_batches(**options(np.random.default_rng(seed)))
        except ArgumentError as error:  # a group that does not fit
            return str(error)
        rows = [[step.tolist() for step in steps] for steps in found]
        return rows, found.report(), found.inverse.tolist()

    # Many ranks of equal cost: an unstable sort orders more than 256 numbers in another way.
    many = [plan_micro_batches(np.arange(n) % 7 + 994, 260, max_tokens=1000) for n in (520, 780)]
    numbers = [*map(plan, range(300)), *([s.tolist() for r in m for s in r] for m in many)]
    print(*(hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in numbers), sep="\\n")
"""


def cpu_features():
    """The features of this CPU for which numpy has code of its own, from the newest."""
    core = sys.modules.get("numpy._core._multiarray_umath")
    core = core or sys.modules["numpy.core._multiarray_umath"]
    return [each for each in core.__cpu_dispatch__[::-1] if core.__cpu_features__.get(each)]


def test_plans_are_the_same_without_the_features_of_this_cpu():
    features = cpu_features()
    whole = run_python(PLANS, PYTHONHASHSEED="1").stdout.splitlines()
    assert len({*whole}) > 250
    # Without the newest feature, as another CPU of a cluster may be, and without any.
    for count in {1, len(features) // 2, len(features)} if features else ():
        less = run_python(
            PLANS, PYTHONHASHSEED="2", NPY_DISABLE_CPU_FEATURES=" ".join(features[:count])
        )
        assert less.stdout.splitlines() == whole, features[:count]


def test_a_sum_of_costs_does_not_depend_on_the_order_of_rows():
    costs = np.array([1e16, 1.0, 1.0, 1.0, 1.0, 3.0])
    for order in itertools.islice(itertools.permutations(range(6)), 0, None, 37):
        given = costs[list(order)]
        batches = plan_micro_batches([1] * 6, 2, count=1, cost=partial(np.add, given - 1))
        loads = [sorted(given[rows[0]].tolist()) for rows in batches]
        assert sorted(loads) == [[1.0, 1.0, 1.0, 1.0, 3.0], [1e16]]


COUNTED = pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.version_info >= (3, 13),
    reason="counts bytecode, of which Python 3.13 does not report all",
)


def growing(n: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Lengths and options whose size grows with n."""
    draw = np.random.default_rng(n)

    def falling_with_length(lengths: Any) -> Any:
        return 800.0 - lengths

    def falling(lengths: Any) -> Any:
        return np.arange(2.0 * n, 0, -1)

    return {
        "as many full parts as rows": ([1000] * n + [1] * (3 * n), {"rows_per_batch": 2}),
        "a full part for each row": (range(1, n + 1), {"rows_per_batch": 1}),
        "tight": (draw.integers(1, 800, 2 * n), {"max_tokens": 800, "ranks": 2}),
        "the longest rows cost least": (
            draw.integers(1, 800, n),
            {"max_tokens": 1000, "ranks": 4, "cost": falling_with_length},
        ),
        "small and large rows in turns": (
            [900, 100] * n,
            {"max_tokens": 1000, "cost": falling},
        ),
        "groups": (
            draw.integers(1, 80, 4 * n),
            {"max_tokens": 500, "ranks": 2, "groups": np.arange(4 * n) // 4},
        ),
        "rows of groups": (
            [1] * (3 * n),
            {"rows_per_batch": 5, "groups": np.arange(3 * n) // 3},
        ),
    }


@COUNTED
@pytest.mark.parametrize("name", growing(0))
def test_twice_the_rows_are_twice_the_work(name):
    work = []
    for n in (400, 800, 1600):
        lengths, options = growing(n)[name]
        work.append(operations(partial(plan_micro_batches, lengths, **options)))
    assert work[1] <= 2.3 * work[0], work
    assert work[2] <= 2.3 * work[1], work
