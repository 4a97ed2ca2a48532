"""How the tables of cases are written: a title and its message by turns."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A message by hand, and what any reader must make of it."""

    why: str
    message: Any  # frames, or bytes for a message in one buffer
    reason: str | None = None  # why it is refused; None: it is read


def good(*titles_and_messages: Any) -> dict[str, Case]:
    """Cases of the titles "name: what it shows"."""
    found = {}
    for title, message in zip(titles_and_messages[::2], titles_and_messages[1::2], strict=True):
        name, why = title.split(": ", 1)
        assert name not in found, name
        found[name] = Case(why, message)
    return found


def bad(*titles_and_messages: Any) -> dict[str, Case]:
    """Cases of the titles "reason name: what is wrong"."""
    found = {}
    for title, (why, message, _) in good(*titles_and_messages).items():
        reason, name = title.split(" ")
        assert name not in found, name
        found[name] = Case(why, message, reason)
    return found
