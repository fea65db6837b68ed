"""Test that the site builds without a warning, its links are valid, and it loads nothing from other hosts."""

import importlib.util
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.docs.code_blocks import ROOT

DOCS = ROOT / "docs"
RESOURCES = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """A page's links, loaded files, anchors and images."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors, self.images = [], [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in RESOURCES and given.get("rel") not in {"canonical", "next", "prev"}:
            self.loaded += filter(None, [given.get(RESOURCES[tag])])
        if tag == "img":
            self.images.append((given.get("src"), given.get("alt")))


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.pages}


def targets(path, link, folder):
    """Return (file, anchor) of a page's link; None for a link to another host."""
    address, anchor = urldefrag(link)
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    base = folder if parts.path.startswith("/") else path.parent
    target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
    return (target / "index.html" if target.is_dir() else target), unquote(anchor)


def test_it_builds_without_a_warning(site):
    assert site.exit_status == 0, site.output
    assert not re.search(r"\b(WARNING|ERROR)\b", site.output), site.output


def test_every_page_is_built(site):
    names = {path.parent.name if path.name == "index.html" else path.stem for path in site.pages}
    sources = {path.stem for path in DOCS.rglob("*.md") if path.stem != "index"}
    assert sources <= names
    assert len(sources) > 15


def test_every_link_leads_to_a_file_and_an_anchor(site, pages):
    broken, followed = [], 0
    for path, page in pages.items():
        for link in page.links + page.loaded:
            found = targets(path, link, site.folder)
            if found is None or link.startswith(("data:", "javascript:")):
                continue
            followed += 1
            target, anchor = found
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (anchor and anchor not in anchors):
                broken.append(f"{path.relative_to(site.folder)}: {link}")
    assert broken == []
    assert followed > 500


def test_nothing_is_loaded_from_other_hosts(pages):
    loaded = [each for page in pages.values() for each in page.loaded]
    assert [each for each in loaded if re.match(r"(https?:)?//", each)] == []
    assert any(each.endswith(".css") for each in loaded)


def test_every_picture_is_described(pages):
    pictures = [each for page in pages.values() for each in page.images]
    assert len(pictures) > 5
    assert [source for source, text in pictures if not text] == []


def test_the_reference_has_what_modules_export(site):
    anchors = Page(site.folder / "api" / "index.html").anchors
    import gradcomp
    from gradcomp import compress, fsdp, hooks, plan

    for module in (gradcomp, compress, fsdp, hooks, plan, hooks.default_hooks, hooks.quantization_hooks):
        for name in module.__all__:
            if name != "__version__" and callable(found := getattr(module, name)):
                assert {f"{module.__name__}.{name}", f"{found.__module__}.{name}"} & anchors


def site_module(name):
    """Return a module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_the_site_lead_to_the_repository(site):
    page = "[a](hooks.md#four) [b](../README.md#x) [c](examples/fsdp.py) ![d](images/fsdp.svg) "
    page += "[e](../kernels)\n"
    code = "```\n[f](../nothing.md)\n```\n"
    found = site_module("links").with_links_to_repository(page + code, DOCS / "fsdp.md", DOCS)
    blob = "https://github.com/gradcomp/gradcomp/blob/main"
    assert found == (
        f"[a](hooks.md#four) [b]({blob}/README.md#x) [c]({blob}/docs/examples/fsdp.py) ![d](images/fsdp.svg) "
        f"[e]({blob.replace('blob', 'tree')}/kernels)\n{code}"
    )


def test_a_link_to_a_file_that_does_not_exist_is_refused(site):
    links = site_module("links")
    with pytest.raises(links.PluginError, match=r"fsdp\.md links to \.\./nothing\.md"):
        links.with_links_to_repository("[a](../nothing.md)", DOCS / "fsdp.md", DOCS)


def test_docstrings_list_their_arguments(site):
    text = "Do it. a, b: what\nis done. c(x): more: all.\nNone: of c. d (or e): d.\n\nExample::\n\n    f(a)\n"
    assert site_module("docstrings").as_markdown(text, {"a", "b", "c", "d"}) == (
        "Do it.\n\n- `a`, `b`: what is done.\n- `c(x)`: more: all. None: of c.\n- `d` (or e): d.\n\n"
        "Example:\n\n    f(a)\n"
    )
