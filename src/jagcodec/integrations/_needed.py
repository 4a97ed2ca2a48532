"""Imports of what integrations need, and what to install where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(integration: str, package: str) -> Iterator[None]:
    """Say which package to install, and how, if a module that is imported inside is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{integration} needs {package} (found no module named {error.name!r})", name=error.name
        ) from error
