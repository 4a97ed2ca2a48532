"""What is needed of other packages beyond their public names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from jagcodec.errors import ArgumentError


@contextmanager
def private_names(package: str, tested: str) -> Iterator[None]:
    """Around all uses of private names at import: if one is missing, say which, and a remedy.

    `tested` is the last version that has been tested. A later one is not refused by its number.
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


def check_torch(path: str) -> None:
    """Refuse the call at `path`, which needs torch and tensordict, where they are not installed."""
    for package in ("torch", "tensordict"):
        if package not in sys.modules and find_spec(package) is None:
            detail = (
                f"expected the package {package}, which this needs, found none; "
                "pip install torch tensordict"
            )
            raise ArgumentError("bad_option", path, detail)


def module_with_torch(name: str, path: str) -> ModuleType:
    """A module of this package that imports torch or tensordict, for the call at `path`."""
    check_torch(path)
    return importlib.import_module(f"jagcodec.{name}")
