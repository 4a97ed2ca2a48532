"""What is needed of other packages beyond their public names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version


@contextmanager
def private_names(package: str, tested: str) -> Iterator[None]:
    """Around all uses of private names at import: if one is missing, say which, and a remedy.

    `tested` is the last version that has been tested. A later one is not refused by its number.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
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
