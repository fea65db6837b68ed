"""Drive a headless Chromium by its DevTools protocol, over a pair of pipes: --remote-debugging-pipe.

https://chromedevtools.github.io/devtools-protocol has the methods. A message is JSON and a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
TIMEOUT_S = 60
# Two frames, then the ends of all transitions: the theme moves its search box when the width changes.
_SETTLED = """
new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => Promise.allSettled(
    document.getAnimations()
        .filter(each => each.effect.getComputedTiming().endTime < Infinity)
        .map(each => each.finished)
)).then(() => true)
"""
_FIRST_FREE = 10  # above the two file descriptors, 3 and 4, that Chromium has for its pipes


def chromium() -> str | None:
    """Return the path of an installed Chromium, None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a Chromium that was started for it."""

    def __init__(self, program: str, profile: Path):
        to_it, self._write = map(_high, os.pipe())
        self._read, from_it = map(_high, os.pipe())
        log = _high(os.open(profile.parent / "chromium.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        actions = [(os.POSIX_SPAWN_DUP2, to_it, 3), (os.POSIX_SPAWN_DUP2, from_it, 4)]
        actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        arguments = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = os.posix_spawn(program, arguments, os.environ, file_actions=actions, setpgroup=0)
        for each in (to_it, from_it, log):
            os.close(each)
        self._buffer, self._last_id, self._session = b"", 0, ""
        self._has_loaded = False
        self.problems: list[str] = []  # errors in the console, exceptions, failed loads
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the browser and every process that it has started."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._read)
        os.close(self._write)

    def _attach(self) -> None:
        """Attach to the browser's first page."""
        targets = self.call("Target.getTargets")["targetInfos"]
        (page,) = [each["targetId"] for each in targets if each["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises RuntimeError for its error."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, address: str, width: int, height: int) -> None:
        """Show a page in a window of this size, and wait until the page and its resources have loaded."""
        self._set_size(width, height)
        self._has_loaded = False
        self.call("Page.navigate", url=address)
        while not self._has_loaded:
            self._receive()
        self.evaluate(_SETTLED)

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, and wait until the layout has settled."""
        self._set_size(width, height)
        self.evaluate(_SETTLED)

    def _set_size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; wait for the value of a promise."""
        options = {"awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Save the visible part of the page as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"Chromium has said nothing for {TIMEOUT_S} s")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("Chromium has ended; chromium.log has what it said")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._has_loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "assert"}:
            self.problems.append(str([each.get("value") for each in parameters["args"]]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")


def _high(descriptor: int) -> int:
    """Move a file descriptor up: the browser needs descriptors 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(descriptor)
    return moved
