"""Messages by hand that `encode` never writes: good ones and bad ones.

`golden/good.json` and `golden/bad.json` hold them, for readers in any language: JSON with
a message per line (docs/wire-format.md, section 9). `test_hostile.py` gives all of them to every
reader. `python -m tests.wire.test_golden --add` writes a new one to them.
"""

import functools
import json
import re
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
RUN = re.compile(rb"(.)\1{15,}", re.DOTALL)


def hex_of(data):
    """Bytes as hex; a run of one byte of 16 or more is a word of its own, such as `00*4096`."""
    words, end = [], 0
    for run in RUN.finditer(data):
        words += [data[end : run.start()].hex(), f"{run[1].hex()}*{len(run[0])}"]
        end = run.end()
    return " ".join(filter(None, [*words, data[end:].hex()]))


def bytes_of(text):
    words = (word.partition("*") for word in text.split())
    return b"".join(bytes.fromhex(word) * int(times or 1) for word, _, times in words)


def entry(why, message, **more):
    """One message as it stands in a file."""
    if isinstance(message, bytes):
        return {"why": why, "blob": hex_of(message), **more}
    return {"why": why, "frames": [hex_of(frame) for frame in message], **more}


def message_of(entry):
    if "blob" in entry:
        return bytes_of(entry["blob"])
    return [bytes_of(lines) for lines in entry["frames"]]


@functools.cache
def load(file):
    return json.loads((GOLDEN / file).read_text())


def lines_of(entries):
    """JSON with a line per message."""
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


GOOD = {name: message_of(entry) for name, entry in load("good.json").items()}
# And the reason why each is refused.
BAD = {name: (message_of(entry), entry["reason"]) for name, entry in load("bad.json").items()}
# They ask for what only Python or torch can know, or are nested deeper than must be read.
MAY_ACCEPT = {name for name, entry in load("bad.json").items() if entry.get("may_accept")}
