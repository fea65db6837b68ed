"""Every page of the site in a real browser, narrow and wide: nothing too wide, no errors in the console."""

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
TIMEOUT_S = 300

# At the beginning of every page: it tells the page around it of errors, and of what doesn't load.
WATCH = """<script>
const tell = problem => parent.problems.push(`${location.pathname}: ${problem}`);
addEventListener('error', event => tell(event.message || event.target.outerHTML), true);
addEventListener('unhandledrejection', event => tell(event.reason));
console.error = console.assert = (...said) => tell(said.join(' '));
</script>"""
# The page around the others, which are in a frame of a window's size, runs a script and sends its result.
AROUND = """<!doctype html><body><script type="module">
window.problems = [];
const frame = document.body.appendChild(document.createElement('iframe'));
async function show(address, width, height) {
    [frame.width, frame.height, frame.style.border] = [width, height, 0];
    if (address) {
        frame.src = address;
        await new Promise(done => frame.addEventListener('load', done, {once: true}));
    }
    for (let i = 0; i < 2; i++) await new Promise(frame.contentWindow.requestAnimationFrame);
    // The theme moves its search box when the width changes.
    const found = frame.contentDocument.getAnimations();
    const ending = found.filter(each => each.effect.getComputedTiming().endTime < Infinity);
    await Promise.allSettled(ending.map(each => each.finished));
}
async function run() { %s }
const result = await run().catch(error => `${error.stack}`);
await fetch('/result', {method: 'POST', body: JSON.stringify(result)});
</script>"""
# The problems of pages: their errors, and what sticks out of a narrow or a wide window.
CHECK = """
for (const address of %s) {
    for (const [width, height] of [[1280, 900], [375, 812]]) {
        await show(width > 1000 ? address : '', width, height);
        const {documentElement, body} = frame.contentDocument;
        if (documentElement.scrollWidth <= width) continue;
        const wide = [...body.querySelectorAll('*')].filter(
            each => each.getBoundingClientRect().right > width + 1);
        const named = wide.map(each => `${each.tagName}.${each.className}`).slice(0, 5);
        problems.push(`${address} is wider than ${width}: ${named.join(', ')}`);
    }
}
return problems;
"""
SEARCH = """
await show('/', 1280, 900);
const page = frame.contentDocument, input = page.querySelector('.md-search__input');
page.querySelector('[for=__search]').click();
input.focus();
input.value = 'quantization_hook';
for (const end = performance.now() + 20000; performance.now() < end;) {
    input.dispatchEvent(new Event('keyup'));
    await new Promise(done => setTimeout(done, 100));
    const links = [...page.querySelectorAll('.md-search-result__link')].map(each => each.href);
    if (links.length) return links;
}
return [];
"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with WATCH in its pages, and AROUND; keeps the result that AROUND sends."""

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if self.path == "/around":
            text = self.server.around
        elif path.suffix == ".html" and path.exists():
            text = WATCH + path.read_text()
        else:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        self.server.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script around a folder's pages, and returns the script's result."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium, as .ci/run does")

    def run(folder, script):
        handler = functools.partial(Handler, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.around, server.results = AROUND % script, queue.Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/around"
        command = [program, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", address]
        with (tmp_path / "chromium.log").open("w") as log:
            browser = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            return server.results.get(timeout=TIMEOUT_S)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
            server.server_close()

    return run


def test_pages_fit_and_have_no_errors(site, run):
    names = [path.parent.relative_to(site.folder).as_posix() for path in site.pages]
    assert run(site.folder, CHECK % json.dumps([f"/{name}/".replace("/./", "/") for name in names])) == []


def test_the_search_finds_a_hook(site, run):
    assert any("/hooks/" in each or "/api/" in each for each in run(site.folder, SEARCH))


def test_a_page_that_is_too_wide_or_has_errors_is_found(tmp_path, run):
    (tmp_path / "index.html").write_text(
        "<div class=wide style='width: 500px'>wide</div><script>console.error('broken')</script>"
        "<script>nothing()</script><img src=missing.png>"
    )
    problems = run(tmp_path, CHECK % '["/"]')
    assert problems.pop() == "/ is wider than 375: DIV.wide"
    for each in ("broken", "nothing is not defined", "missing.png"):
        assert any(each in problem for problem in problems)
    assert len(problems) == 3
