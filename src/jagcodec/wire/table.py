"""A table of what was made of schemas, bounded whoever sends them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Entry(Generic[T]):
    __slots__ = ("size", "used", "value")

    def __init__(self, value: T, size: int) -> None:
        self.value = value
        self.size = size
        self.used = False


class Table(Generic[T]):
    """What was made of schemas: bounded in entries and in bytes, and safe to share by threads.

    An entry that was asked for again since the table was last full stays; of the others the oldest
    makes way. So a stranger with ever new schemas only pushes out what nobody asks for.

    Single dict operations, and no lock: a process that forks would copy a lock that another thread
    holds, and its child would wait for it forever.
    """

    def __init__(self, entries: int, size: int) -> None:
        self._most_entries = entries
        self._most_bytes = size
        self._entries: dict[Any, _Entry[T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Any) -> T | None:
        """What was kept under a key."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def keep(self, key: Any, value: T, size: int) -> None:
        """Keep a value that takes about `size` bytes."""
        entries = self._entries
        if key in entries or size > self._most_bytes:
            return
        known = entries.copy()
        entries[key] = _Entry(value, size)
        total = size + sum(entry.size for entry in known.values())
        # Twice: an entry that was used gets a second chance in the first round.
        for old, entry in [*known.items()] * 2:
            if len(entries) <= self._most_entries and total <= self._most_bytes:
                return
            if entries.pop(old, None) is None:
                continue
            if entry.used:
                entry.used = False
                entries[old] = entry
            else:
                total -= entry.size
