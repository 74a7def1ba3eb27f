"""A headless Chromium, driven over a pipe in its own protocol (DevTools): no package is needed.

Left out: getting one (`make browser`).
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome")
FETCHED = Path(sys.prefix) / "browser"
ANSWER_S = 30.0


def found():
    """The command of a Chromium, or None: what `make browser` fetched, or the machine's own."""
    own = FETCHED / "run"
    return str(own) if own.exists() else next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a browser of its own.

    Attributes:
        said: what its console and its errors said.
        asked: addresses that it asked for.
    """

    def __init__(self, read, write):
        self.said, self.asked = [], []
        self._read, self._write, self._left, self._count = read, write, b"", 0
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        """The answer to a command of the protocol."""
        return self._ask(method, self._session, **params)

    def open(self, path, *, width=1200, dark=False):
        """Show a file, as on a screen of this width (CSS pixels)."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._hear(self._next())

    def value(self, script):
        """What an expression is, in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        """The whole page as a PNG."""
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method, session=None, **params):
        self._count += 1
        number = self._count
        of_page = {"sessionId": session} if session else {}
        message = {"id": number, "method": method, "params": params} | of_page
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (heard := self._next()).get("id") != number:
            self._hear(heard)
        assert "error" not in heard, (method, heard["error"])
        return heard["result"]

    def _hear(self, event):
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.said.append(params)
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    def _next(self):
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 16) if ready else b""
            assert part, "the browser ended" if ready else f"no answer in {ANSWER_S:.0f} s"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(command, profile):
    """A page, and a browser around it that ends with it; `profile`: a folder to write to."""
    their_read, write = os.pipe()
    read, their_write = os.pipe()
    # It reads commands from descriptor 3, and writes to 4. As root it cannot lock itself in.
    pipes = f"exec 3<&{their_read} 4>&{their_write}; exec {command}"
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip
    log = (Path(profile) / "browser.log").open("wb")
    process = subprocess.Popen(
        ["bash", "-c", f'{pipes} "$@"', "bash", *flags],
        pass_fds=(their_read, their_write), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )  # fmt: skip
    os.close(their_read)
    os.close(their_write)
    try:
        page = Page(read, write)
        yield page
        page._ask("Browser.close")
    finally:
        os.close(write)
        os.close(read)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
