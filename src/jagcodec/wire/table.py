"""A table of what was made of schemas, bounded whoever sends them."""

from __future__ import annotations

import threading
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
    """

    def __init__(self, entries: int, size: int) -> None:
        self._most_entries = entries
        self._most_bytes = size
        self._bytes = 0
        self._entries: dict[Any, _Entry[T]] = {}
        self._lock = threading.Lock()

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
        with self._lock:
            if key in self._entries or size > self._most_bytes:
                return
            while len(self._entries) >= self._most_entries or self._bytes + size > self._most_bytes:
                oldest = next(iter(self._entries))
                entry = self._entries.pop(oldest)
                if entry.used:
                    entry.used = False
                    self._entries[oldest] = entry
                else:
                    self._bytes -= entry.size
            self._entries[key] = _Entry(value, size)
            self._bytes += size
