"""The work of reading grows no faster than the message: counted in operations, not by the clock.

`fuzz/grow.py` reads larger messages of the same recipes, and looks at time and memory.
"""

import itertools
import sys

import pytest
import torch

from jagcodec import WireFormatError, decode
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.header import read_header
from jagcodec.wire.schema import FORMS
from tests.wire.grown import beside, grown, singles
from tests.wire.growth import forget, operations, outcome, readers_of
from tests.wire.many import COLUMNS, DOCUMENTS, VALUES, probing_keys

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts bytecode"),
]

UNITS = 4
ALONE = singles()
# Of two kinds and more, in each other and beside each other.
DRAWN = [grown(seed) for seed in range(40)]
# Beside what many costs were multiplied with once: buffers, groups and rows.
MULTIPLIERS = ["no bytes", "jagged, own group [2]", "rows, own group [2]", "objects", "str"]
PAIRS = [beside(a, b) for a, b in itertools.combinations(MULTIPLIERS, 2)]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of torch that wait for each other take most of the time of nested tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counted(recipe, units, reader):
    frames = recipe.make(units)
    forget()  # so that both messages are read from scratch
    return operations(lambda: outcome(reader, frames))


@pytest.mark.parametrize("recipe", [*ALONE, *PAIRS, *DRAWN], ids=lambda recipe: recipe.name)
def test_twice_as_much_more_is_twice_the_work(recipe):
    """From n to 2n, and from 2n to 4n: what does not depend on n falls out of the differences.

    A reader may go another way from some size on: after such a step the next doubling counts.
    """
    for name, reader in readers_of(recipe.batch).items():
        outcome(reader, recipe.make(UNITS))  # loads whatever is loaded on first use
        work = [counted(recipe, units, reader) for units in (UNITS, 2 * UNITS, 4 * UNITS)]
        if not in_proportion(*work):
            work = [*work[1:], counted(recipe, 8 * UNITS, reader)]
        assert in_proportion(*work), f"{name}: {work} operations"


def in_proportion(small, twice, four_times):
    return four_times - twice <= 2.1 * (twice - small) + 150


def test_the_messages_grow_as_they_say():
    for recipe in (*ALONE, *DRAWN):
        less, more = (sum(map(len, recipe.make(units))) for units in (32, 128))
        assert more <= 8 * less, recipe.name


def test_most_of_the_messages_are_read():
    """Those that are refused have something wrong in them."""
    read = 0
    for recipe in (*ALONE, *PAIRS):
        read += not isinstance(outcome(decode, recipe.make(UNITS)), WireFormatError)
    assert read > 0.9 * len([*ALONE, *PAIRS])


def test_every_kind_is_among_them():
    kinds = {kind for name in VALUES for kind in kinds_in(beside(name).make(2))}
    assert set(FORMS) <= kinds
    assert {kind.name for kind in RECORDS} - {"PICKLE"} <= {
        name.split(",")[0].split(" ")[0].removesuffix("s") for name in DOCUMENTS
    }
    assert {f"{name} [1]" for name in COLUMNS} <= set(VALUES)


def kinds_in(frames):
    try:
        schema = read_header(frames[0]).schema
    except WireFormatError:
        return set()
    return set(kinds_below(schema.root))


def kinds_below(node):
    yield node.kind
    for child in node.children:
        yield from kinds_below(child)


def test_what_is_quadratic_is_noticed():
    def quadratic(n):
        return sum(a < b for a in range(n) for b in range(n))

    def count(n):
        return operations(lambda: quadratic(n))

    less, more = count(UNITS), count(4 * UNITS)
    assert more > 10 * less
    assert operations(lambda: None) < 10


def test_keys_that_share_their_way():
    """As `grown` forges them: distinct, and so are their hashes."""
    keys = probing_keys(5000)
    assert len({hash(key) for key in keys}) == len(keys) == 5000
    mask = 8191
    slots = set()
    steps = 0
    for key in keys:
        slot, perturb = key & mask, key
        while slot in slots:
            perturb >>= 5
            slot = (5 * slot + perturb + 1) & mask
            steps += 1
        slots.add(slot)
    assert steps > 150 * len(keys)
