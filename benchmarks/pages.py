"""Pages whose tables are written from a record: shared by the commands that make one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, rewritten

DOCS = ROOT / "docs"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def rewrite(page: Path, made: Mapping[str, str]) -> None:
    """Put tables where the page's markers name them.

    Raises:
        KeyError: A marker names no table.
    """
    page.write_text(rewritten(page.read_text(), made))
    print(f"written: {page}")


def read(path: Path) -> dict[str, Any]:
    """A record."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {path}")
