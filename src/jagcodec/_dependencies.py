"""What is needed of other packages beyond their public names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version


@contextmanager
def private_names(package: str, tested: str) -> Iterator[None]:
    """Around an import of private names of a package: if one is missing, say which, and a remedy.

    `tested` is the last version that has been tested. A later one is not refused by its number.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"jagcodec needs private names of {package}, one of which {package} {version(package)} "
            f"lacks ({error}); install the last version that was tested: "
            f"pip install '{package}=={tested}'",
            name=error.name,
            path=getattr(error, "path", None),
        ) from error
