"""Messages by hand that `encode` never writes: good ones, bad ones, and more bad ones.

`golden/good.json` and `golden/bad.json` hold the first two, for readers in any language, and
`test_hostile.py` gives all of them to every reader. `python -m tests.wire.test_golden --add` writes
a new one to them.
"""

from tests.wire.cases.files import cases_of, load
from tests.wire.cases.more import MORE

__all__ = ["BAD", "GOOD", "MAY_ACCEPT", "MORE"]

GOOD = cases_of("good.json")
BAD = cases_of("bad.json")
# They ask for what only Python or torch can know, or are nested deeper than must be read.
MAY_ACCEPT = {name for name, entry in load("bad.json").items() if entry.get("may_accept")}
MAY_ACCEPT |= {"a type of device with a line break"}
