"""Send links to files outside of the site to GitHub, and refuse those to files that don't exist.

A page links to `../benchmarks/results/network.jsonl` as its reader in a checkout does. The site holds docs/
only, without its programs: there the same link names the file in the repository. A hook of mkdocs.yml's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

REPOSITORY = "https://github.com/gradcomp/gradcomp"
IN_SITE = {".md", ".png", ".svg", ".css"}

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^\s*(```+|~~~+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's source with links to files outside of the site replaced (called by MkDocs)."""
    docs = Path(config.docs_dir).resolve()
    return with_links_to_repository(markdown, docs / page.file.src_uri, docs)


def with_links_to_repository(markdown: str, path: Path, docs: Path) -> str:
    """Replace the links of the page at path to what lies outside of docs, or in it but not in the site.

    Fenced code stays as it is. Raises PluginError for a link to a file that doesn't exist.
    """
    lines, fence = [], None
    for line in markdown.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found and fence is None:
            fence = found[1]
        elif found and found[1].startswith(fence or ""):
            fence = None
        elif fence is None:
            line = _LINK.sub(lambda link: _in_repository(link, path, docs), line)
        lines.append(line)
    return "".join(lines)


def _in_repository(link: re.Match[str], path: Path, docs: Path) -> str:
    target = (path.parent / link[1]).resolve()
    if not target.exists():
        raise PluginError(f"{path.name} links to {link[1]}, which doesn't exist")
    if target.is_relative_to(docs) and target.suffix in IN_SITE:
        return link[0]
    kind = "tree" if target.is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{target.relative_to(docs.parent).as_posix()}{link[2] or ''}"
