"""Check the links of the README, which package indexes show, too, and of every other page."""

import re
from pathlib import Path

from tests.docs.code_blocks import blocks_in

ROOT = Path(__file__).parents[2]
OURS = "https://github.com/gradcomp/gradcomp/blob/main/"
IMAGES = "https://raw.githubusercontent.com/gradcomp/gradcomp/main/"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def links_of(text: str) -> list[str]:
    """Return the targets of a page's links and images: [text](target), and definitions [label]: target."""
    inline = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return inline + re.findall(r"^\[[^\]]+\]: (\S+)$", without_code(text), flags=re.MULTILINE)


def undefined_labels(text: str) -> list[str]:
    """Return the labels of links to definitions, [label] and [text][label], that a page doesn't define."""
    defined = set(re.findall(r"^\[([^\]]+)\]: \S+$", text, flags=re.MULTILINE))
    rest = re.sub(r"^\[[^\]]+\]: \S+$", "", without_code(text), flags=re.MULTILINE)
    rest = re.sub(r"\[[^\]]*\]\([^)\s]+\)", "", rest)
    named = [label or text for text, label in re.findall(r"\[([^\]]+)\](?:\[([^\]]+)\])?", rest)]
    return [label for label in named if label not in defined]


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+?)(?: \{ #[\w-]+ \})?$", prose, flags=re.MULTILINE)
    given = set(re.findall(r"^#+ .+ \{ #([\w-]+) \}$", prose, flags=re.MULTILINE))  # the site's own
    return given | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def why_broken(target: str, page: Path) -> str | None:
    """Return the problem of a link on this page, or None. Links to other sites aren't checked."""
    file, _, anchor = target.removeprefix(OURS).removeprefix(IMAGES).partition("#")
    ours = target.startswith((OURS, IMAGES))
    if not ours and re.match(r"[a-z]+:", target):
        return None
    found = page if not file else (ROOT if ours else page.parent) / file
    if not found.exists():
        return f"{page.name}: {target} doesn't exist"
    if anchor and anchor not in anchors_of(found.read_text()):
        return f"{page.name}: {found.name} has no heading #{anchor}"
    return None


def test_links_lead_to_files_and_headings():
    broken = [why_broken(target, page) for page in PAGES for target in links_of(page.read_text())]
    assert [each for each in broken if each] == []
    assert len(broken) > 50


def code_of(text: str) -> list[str]:
    """Return the lines of a page's code blocks."""
    return [line for block in blocks_in(text, "") for line in block.source.splitlines()]


def hard_to_read(text: str) -> list[str]:
    """Return links that show a file's name, empty table headers, and registrations too long for a page."""
    prose = without_code(text)
    names = re.findall(r"\[[\w./-]+\.md\]\(", prose)
    headers = re.findall(r"^\|(?: *\|)+ *\n\|-", prose, flags=re.MULTILINE)
    # A page shows 86 columns at 1400 px.
    lines = [line for line in code_of(text) if "register_comm_hook(" in line and len(line) > 86]
    return names + headers + lines


def test_pages_show_titles_and_whole_lines():
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert {page.name: found for page in pages if (found := hard_to_read(page.read_text()))} == {}
    bad = "[hooks.md](hooks.md)\n\n| | |\n|---|---|\n\n```\n" + "x" * 80 + ".register_comm_hook(a, b)\n```\n"
    assert len(hard_to_read(bad)) == 3


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert [line for line in code_of(text) if len(line) > 80] == []


def test_the_readme_links_are_absolute():
    readme = (ROOT / "README.md").read_text()
    assert undefined_labels(readme) == []
    assert [target for target in links_of(readme) if not target.startswith("https://")] == []
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert images
    assert all(image.startswith(IMAGES) for image in images)


def test_broken_links_are_found():
    page = ROOT / "docs" / "hooks.md"
    text = f"""
[a](missing.md) ![b](images/none.png) `[c](in_code.md)` [d](powersgd.md#speed) [e](#no-such-heading)
```
[f](in_code.md)
```
[g] and [h][i] and [j]
[g]: {OURS}docs/powersgd.md#no-such-heading
[i]: {OURS}docs/none.md
[k]: https://arxiv.org/abs/1905.13727
"""
    broken = [why_broken(target, page) for target in links_of(text)]
    assert [each for each in broken if each] == [
        "hooks.md: missing.md doesn't exist",
        "hooks.md: images/none.png doesn't exist",
        "hooks.md: hooks.md has no heading #no-such-heading",
        "hooks.md: powersgd.md has no heading #no-such-heading",
        f"hooks.md: {OURS}docs/none.md doesn't exist",
    ]
    assert undefined_labels(text) == ["j"]
