"""Other packages: whether they are installed, and whether they have the private names we use."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from jagcodec.errors import ArgumentError


@contextmanager
def private_names(package: str, tested: str) -> Iterator[None]:
    """Use private names of a package inside this, at import. Its error names a missing one.

    `tested` is the last version that was tested, for the remedy. No version is refused by its
    number.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        from importlib.metadata import version  # it takes as long to import as all of `encode_rows`

        raise ImportError(
            f"jagcodec needs private names of {package}, one of which {package} {version(package)} "
            f"lacks ({error}); install the last version that was tested: "
            f"pip install '{package}=={tested}'",
            name=getattr(error, "name", None),
            path=getattr(error, "path", None),
        ) from error


def check_attributes(instance: object, *names: str) -> None:
    """Raise AttributeError if an object lacks one of these names in its `vars`."""
    for name in names:
        if name not in vars(instance):
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {name!r}")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for the answer."""
    return package in sys.modules or find_spec(package) is not None


@functools.cache
def has_torch() -> bool:
    """Whether columns are tensors here: torch and tensordict are installed."""
    return is_installed("torch") and is_installed("tensordict")


@functools.cache
def with_or_without_torch(of_tensors: str, of_arrays: str) -> Any:
    """One of two modules of this package with the same functions.

    If torch and tensordict are installed, it is the one that makes tensors; otherwise, arrays.
    """
    return importlib.import_module(f"jagcodec.{of_tensors if has_torch() else of_arrays}")


def check_torch(path: str) -> None:
    """Refuse the call at `path`, which needs torch and tensordict, where they are not installed."""
    for package in ("torch", "tensordict"):
        if not is_installed(package):
            detail = (
                f"expected the package {package}, which this needs, found none; "
                "pip install torch tensordict"
            )
            raise ArgumentError("bad_option", path, detail)


def module_with_torch(name: str, path: str) -> ModuleType:
    """A module of this package that imports torch or tensordict, for the call at `path`."""
    check_torch(path)
    return importlib.import_module(f"jagcodec.{name}")
