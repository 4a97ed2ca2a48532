"""Imports of optional packages, with an error that names what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(integration: str, package: str) -> Iterator[None]:
    """If a module that is imported inside is missing, name the package to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{integration} needs {package} (found no module named {error.name!r})", name=error.name
        ) from error
