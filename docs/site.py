"""What mkdocs cannot say of the site: pages that lie beside docs/, and links to other files.

The README, SECURITY.md, CONTRIBUTING.md and CHANGELOG.md are read in the repository and on the
site. Their links, and those of docs/ to them, are right where the files lie; here they become those
of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
_HOME_OF = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """The pages that lie beside docs/."""
    from mkdocs.structure.files import File  # which the tests, who read PAGES, lack

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page with the links of the site."""
    here = page.file.src_uri
    source = _HOME_OF.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        return found[1] + _on_site(target, here, config["extra"]["repository"])

    return _LINK.sub(link, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The page, unless Markdown is left in it: what lies in a list is indented by four spaces."""
    text = _MARKUP.sub("", html)
    left = _LEFT.search(text)
    if left is not None:
        from mkdocs.exceptions import PluginError

        line = text[left.start() :].strip().split("\n", 1)[0]
        raise PluginError(f"{page.file.src_uri}: Markdown that did not become HTML: {line:.80}")
    return html


_MARKUP = re.compile(r"<(pre|code)\b.*?</\1>|<[^>]+>", re.DOTALL)
_LEFT = re.compile(r"^\s*([*-] |\||#+ )|\]\(", re.MULTILINE)


def _on_site(target: str, here: str, repository: str) -> str:
    """Where a page of the site finds a file: on the site, or else in the repository."""
    page = PAGES.get(target)
    if page is None and target.startswith("docs/") and (ROOT / target).is_file():
        page = target.removeprefix("docs/")
    if page is not None:
        return posixpath.relpath(page, posixpath.dirname(here) or ".")
    if (ROOT / target).exists():
        return f"{repository}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"
    return target  # which mkdocs finds to be missing
