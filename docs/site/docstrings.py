"""Turn the docstrings' plain paragraphs into Markdown for the reference: an extension of Griffe's.

A docstring explains arguments as `name: meaning.` in one paragraph, and begins an example with `Example::`.
Markdown would run the lines together. So a paragraph in which parameters are explained becomes a list, with
an item for each, and the indented code after `::` stays as it is.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# name, name(argument), name[index], name (remark), and several of these.
_NAME = r"[a-z_]\w*(?:(?:\[\w+\])+|\([\w, ]*\)| \([^)]*\))?"
_INDEXED = re.compile(r"(?<![\w`.])[\w.]+(?:\[[^\]\n]+\]){2,}(?!`)")  # a link in Markdown
_ITEM = re.compile(rf"(?:^|(?<=[.)]) )(?P<names>{_NAME}(?:(?:, | or ){_NAME})*): ")


class DocstringsAsMarkdown(griffe.Extension):
    """Rewrites the docstring of every class and function."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            func.docstring.value = as_markdown(func.docstring.value, _parameters(func))

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring:
            init = cls.members.get("__init__")
            names = _parameters(init) if isinstance(init, griffe.Function) else set()
            cls.docstring.value = as_markdown(cls.docstring.value, names | set(cls.attributes))


def _parameters(func: griffe.Function) -> set[str]:
    return {parameter.name.lstrip("*") for parameter in func.parameters}


def as_markdown(docstring: str, names: set[str]) -> str:
    """Return the docstring as Markdown, with a list item for whatever explains some of these names."""
    paragraphs: list[str] = []
    is_after_list = False
    for given in docstring.split("\n\n"):
        if given.startswith("    "):
            paragraphs.append(textwrap.indent(given, "    ") if is_after_list else given)  # code
            continue
        paragraphs.append(_with_list(given, names))
        is_after_list = paragraphs[-1].rpartition("\n")[2].startswith("- ")
    return re.sub(r"::$", ":", "\n\n".join(paragraphs), flags=re.MULTILINE)


def _with_list(paragraph: str, names: set[str]) -> str:
    """Return a paragraph's text up to the first name that it explains, then a list; or as it is."""
    text = " ".join(line.strip() for line in paragraph.splitlines())
    items = [item for item in _ITEM.finditer(text) if names & set(re.findall(r"\w+", item["names"]))]
    if not items:
        return _INDEXED.sub(r"`\g<0>`", paragraph)
    ends = [item.start() for item in items[1:]] + [len(text)]
    listed = [
        f"- {re.sub(_NAME, _as_code, item['names'])}: {text[item.end() : end].strip()}"
        for item, end in zip(items, ends, strict=True)
    ]
    return _INDEXED.sub(r"`\g<0>`", "\n".join([text[: items[0].start()].strip(), "", *listed]).strip())


def _as_code(found: re.Match[str]) -> str:
    """Return a name as code, a remark behind it as text, and words between names as they are."""
    if found[0] == "or":
        return found[0]
    name, _, remark = found[0].partition(" ")
    return f"`{name}` {remark}".strip()
