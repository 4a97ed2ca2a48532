"""Messages made by hand, with msgpack alone: good ones that `encode` never writes, and bad ones.

`test_golden.py` writes `GOOD` and `BAD` to `golden/good.json` and `golden/bad.json`, for readers in
any language. `test_hostile.py` gives all of them to every reader.
"""

from tests.wire.cases import bad_messages, good_messages, indirect
from tests.wire.cases.more import MORE

__all__ = ["BAD", "GOOD", "MAY_ACCEPT", "MORE"]

GOOD = good_messages.GOOD | indirect.GOOD
BAD = bad_messages.BAD | indirect.BAD

MAY_ACCEPT = {
    # They ask for what only Python or torch can know.
    "keys_collide",
    "members_collide",
    "device",
    # Documents may be nested deeper than they must be read.
    "documents_deep",
}
