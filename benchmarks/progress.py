"""The bar that shows how far a run is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Progress = Callable[[int, int], None]
"""Takes the number of rounds done, and the total, which may change."""


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    with tqdm(desc=what, unit="round", leave=False) as bar:

        def show(done: int, rounds: int) -> None:
            bar.total = rounds
            bar.update(done - bar.n)

        yield show
