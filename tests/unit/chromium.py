"""A headless Chromium that tests look at pages with, spoken to over a pipe in its own DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.deadlines import deadline

DEADLINE = 60.0
"""Seconds after which a silent browser is given up; no test's result depends on how fast it is."""

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def program() -> str | None:
    """The browser of this machine (Debian: the package `chromium`), or None."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One tab. `requests`: the URL of everything it asked for since it was opened, the page itself first."""

    _browser: _Browser
    _session: str
    requests: list[str] = field(default_factory=list)

    def open(self, file: Path, width: int, dark: bool) -> None:
        """Shows the file, `width` CSS pixels wide, and returns when it has loaded."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.requests.clear()
        self.call("Page.navigate", url=file.as_uri())
        self._browser.wait_for("Page.loadEventFired", self)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; it must have a JSON form."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """All of the page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, params, self)


class _Browser:
    """Messages are JSON that ends with a zero byte: to the browser's file 3, from its file 4."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest = b""
        self._numbers = itertools.count(1)

    def call(self, method: str, session: str | None, params: dict[str, Any], page: Page | None = None) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive(page)).get("id") != number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def wait_for(self, event: str, page: Page) -> None:
        while self._receive(page).get("method") != event:
            pass

    def _receive(self, page: Page | None) -> dict[str, Any]:
        until = time.monotonic() + deadline(DEADLINE)
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._back, 1 << 16) if ready else b""
            assert piece, "Chromium fell silent"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if page is not None and message.get("method") == "Network.requestWillBeSent":
            page.requests.append(message["params"]["request"]["url"])
        return message


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page in a browser of its own, which is gone afterwards, all of its processes with it."""
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    # Moved to 3 and 4 by a shell: between fork and exec of a process with threads Python should not run.
    command = f'exec "$@" 3<&{to_read} 4>&{back_write}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, "chromium", str(program()), *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(to_read, back_write),
        # It leaves settings and caches in a home; they are not the user's.
        env={**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)},
        start_new_session=True,
    )
    os.close(to_read)
    os.close(back_write)
    try:
        browser = _Browser(to, back)
        target = browser.call("Target.createTarget", None, {"url": "about:blank"})["targetId"]
        attached = browser.call("Target.attachToTarget", None, {"targetId": target, "flatten": True})
        page = Page(browser, attached["sessionId"])
        page.call("Page.enable")
        page.call("Network.enable")
        yield page
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to)
        os.close(back)
