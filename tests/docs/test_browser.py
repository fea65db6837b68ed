"""Every page of the site in a real browser, narrow and wide: nothing too wide, no errors in the console."""

import functools
import http.server
import threading

import pytest

from tests.docs.browser import Browser, chromium
from tests.docs.code_blocks import ROOT

SIZES = {"narrow": (375, 812), "wide": (1280, 900)}
SCREENSHOTS = ROOT / "build" / "screenshots"

# What sticks out of the window, for the message.
TOO_WIDE = """
[...document.body.querySelectorAll('*')]
    .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
    .map(each => each.tagName + '.' + each.className + ' ' + each.textContent.trim().slice(0, 40)).slice(0, 5)
"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def serve(folder):
    """Start a server of the folder on this machine, in a thread."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium, as .ci/run does")
    browser = Browser(program, tmp_path_factory.mktemp("chromium") / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def address(site):
    server = serve(site.folder)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_pages_fit_and_have_no_errors(site, browser, address):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    problems = []
    for path in site.pages:
        name = path.parent.relative_to(site.folder).as_posix()
        browser.problems.clear()
        browser.open(f"{address}/{'' if name == '.' else f'{name}/'}", *SIZES["wide"])
        for size in SIZES:
            browser.resize(*SIZES[size])
            if browser.evaluate("document.documentElement.scrollWidth > innerWidth"):
                problems.append(f"{name}, {size}: wider than the window: {browser.evaluate(TOO_WIDE)}")
            browser.screenshot(SCREENSHOTS / f"{name.replace('/', '-').replace('.', 'index')}-{size}.png")
        problems += [f"{name}: {problem}" for problem in browser.problems]
    assert problems == []


def test_the_search_finds_a_hook(browser, address):
    browser.open(f"{address}/", *SIZES["wide"])
    browser.evaluate("document.querySelector('[for=__search]').click()")
    browser.evaluate("document.querySelector('.md-search__input').focus()")
    browser.call("Input.insertText", text="quantization_hook")
    found = """
    new Promise((done, fail) => {
        const end = performance.now() + 20000;
        const look = () => {
            const links = [...document.querySelectorAll('.md-search-result__link')].map(each => each.href);
            if (links.length || performance.now() > end) done(links); else setTimeout(look, 50);
        };
        look();
    })
    """
    assert any("/hooks/" in each or "/api/" in each for each in browser.evaluate(found))


def test_a_page_that_is_too_wide_or_has_errors_is_found(tmp_path, browser):
    (tmp_path / "index.html").write_text(
        "<div class=wide style='width: 500px'>wide</div><script>console.error('broken')</script>"
        "<script>nothing()</script><img src=missing.png>"
    )
    server = serve(tmp_path)
    try:
        browser.problems.clear()
        browser.open(f"http://127.0.0.1:{server.server_port}/", *SIZES["narrow"])
        assert browser.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert browser.evaluate(TOO_WIDE) == ["DIV.wide wide"]
        problems = "; ".join(browser.problems)
        for each in ("broken", "nothing is not defined", "missing.png"):
            assert each in problems
    finally:
        server.shutdown()
        server.server_close()
        browser.problems.clear()
