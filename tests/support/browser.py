"""A real browser without a window: Debian's chromium, spoken to through its own driver, one session per `with`.

What a page says on the console and whom it asks for anything are kept, so that a test can look at both.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromedriver")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,1600",
)


def missing_browser() -> str:
    """Returns what a browser test lacks here, "" where it can be run."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name) is None)


@dataclass(slots=True)
class Browser:
    """A session of a browser."""

    address: str

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Sends a command of the WebDriver protocol and returns its value."""
        data = json.dumps({} if body is None else body).encode() if method == "POST" else None
        request = urllib.request.Request(self.address + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        """Opens a file, as a person would from disk."""
        self.call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Runs a script in the page and returns its value."""
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def point(self, x: float, y: float) -> None:
        """Moves the pointer there."""
        self.drag((x, y))

    def drag(self, start: tuple[float, float], *to: tuple[float, float]) -> None:
        """Moves the pointer to a place; with further places it is held down there and let go at the last."""
        moves = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)} for x, y in (start, *to)]
        actions = (
            [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
            if to
            else moves
        )
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self.call("POST", "/actions", {"actions": [pointer]})

    def press(self, x: float, y: float) -> None:
        """Presses and lets go in one place."""
        self.drag((x, y), (x, y))

    def picture(self) -> bytes:
        """Returns what is seen, as PNG."""
        return base64.b64decode(self.call("GET", "/screenshot"))

    def complaints(self) -> list[str]:
        """Returns what pages have said on the console since the last look; not the browser's own, such as its first."""
        messages = [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]
        return [message for message in messages if not message.startswith("chrome://")]

    def asked_for(self, path: Path) -> list[str]:
        """Returns the addresses that a page asked for since the last look; the browser's own start page has others."""
        entries = self.call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        asked = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in asked if one["documentURL"] == path.resolve().as_uri()]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Starts a browser and ends it."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert driver.stdout is not None
    try:
        port = next(found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = _new_session(f"http://127.0.0.1:{port}/session", profile)
            try:
                yield browser
            finally:
                browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(timeout=30)
        driver.stdout.close()


def _new_session(address: str, profile: str) -> Browser:
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": [*_FLAGS, f"--user-data-dir={profile}"]},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    found = Browser(address).call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
    return Browser(f"{address}/{found['sessionId']}")
