"""The table of modules in docs/architecture.md: `python docs/modules.py` writes it anew.

Each line is the first sentence of a module's docstring. The modules of the command line are left
out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "jagcodec"

# From the ground up, as tests/repo/test_house.py has them.
ORDER = (
    *("data", "errors.py", "_dependencies.py", "_compiling.py", "_arguments.py", "memory"),
    *("kernels", "rows", "columns", "wire", "wire/stored", "wire/write", "wire/read", "wire/many"),
    *("produce", "forward", "train"),
    *("types.py", "stdlib.py", "schema.py", "record.py", "testing.py", "integrations"),
    *("doctor.py", "cli"),
)
_MARKED = re.compile(r"(<!-- generated: modules -->\n).*?(<!-- end -->)", re.S)


def table() -> str:
    """One line for each package and module that can be imported."""
    lines = ["| file | what it does |", "|---|---|"]
    for name in ORDER:
        path = SOURCE / name
        if path.suffix:
            lines.append(f"| `{name}` | {_sentence(path)} |")
            continue
        lines.append(f"| **`{name}/`** | {_sentence(path / '__init__.py')} |")
        modules = sorted(path.glob("*.py")) if name != "cli" else []
        lines += [
            f"| `{name}/{module.name}` | {_sentence(module)} |"
            for module in modules
            if module.stem != "__init__"
        ]
    return "\n".join(lines) + "\n"


def _sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def rewritten(page: str) -> str:
    """The page with the table of today."""
    return _MARKED.sub(lambda found: found[1] + table() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
