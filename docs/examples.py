"""What griffe reads of docstrings: their `Example:` is the section that it calls `Examples:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section as docstrings are read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every module, class, function and attribute comes by here."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
