"""A real browser for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """Chromium without a window, driven by its DevTools protocol: messages of JSON that end in a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        # The protocol is spoken on descriptors 3 and 4, which only a shell can be asked for.
        command = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>&2', program, *flags]
        self._complaints = (profile / "stderr").open("w+b")
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )
        # A browser that hangs is ended, which ends the wait for its answer.
        self._watch = threading.Timer(120, self._process.kill)
        self._watch.start()
        self._numbers = count(1)
        self._received = bytearray()
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []

    def open(self) -> None:
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> Any:
        """The answer to a message; what happens in the meantime is noted."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\0" not in self._received:
            more = self._process.stdout.read1(2**20)
            if not more:
                self._complaints.seek(0)
                raise EOFError(f"the browser has ended: {self._complaints.read()[-500:].decode(errors='replace')}")
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def show(self, path: Path, width: int, scheme: str, media: str = "screen") -> None:
        """Load a page in a window of so many CSS pixels and wait until it is complete."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        assert "errorText" not in self("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, script: str) -> Any:
        answer = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> Any:
        from matplotlib.image import imread

        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))
        return imread(path)

    def close(self) -> None:
        """Hang up, which ends the browser; what is left of it after that is ended by the watch."""
        self._process.communicate()
        self._watch.cancel()
        self._complaints.close()


def program() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    found = program()
    if found is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")
    browser = Browser(found, tmp_path_factory.mktemp("profile"))
    try:
        try:
            browser.open()
        except (EOFError, BrokenPipeError) as error:
            pytest.skip(f"{found} does not start: {error}")
        yield browser
    finally:
        browser.close()
