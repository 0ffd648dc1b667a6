"""Pages in headless Chromium, driven over its debugging pipe: sizes, console, requests, screenshots."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run")
WIDTHS = {1280: 900, 390: 844}
# all that is in view is drawn
IDLE = "Bokeh.documents.length > 0 && Bokeh.documents.every((shown) => shown.is_idle)"


class Page:
    """A tab. errors: of its console. requests: addresses that it asked for."""

    def __init__(self, to: int, answers: int, width: int):
        self._to, self._answers = to, answers
        self._number = 0
        self._unread = b""
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loads = 0
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Performance.enable", timeDomain="threadTicks")
        size = {"width": width, "height": WIDTHS[width], "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser is gone"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"])[:2000])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"][:200])
            case "Page.loadEventFired":
                self.loads += 1

    def busy_s(self) -> float:
        """Return the processor time that the page's thread has had: other programs don't lengthen it."""
        metrics = self.ask("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def open(self, url: str) -> float:
        """Open a page; return the seconds of its thread until what is in view is drawn."""
        self.loads = 0
        self.ask("Page.navigate", url=url)
        while not self.loads:
            self._note(self._read())
        self.until(IDLE)
        return self.busy_s()

    def value(self, expression: str) -> Any:
        """Return what an expression of the page gives, awaited."""
        result = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def screenshot(self, path: Path, most: int = 12_000) -> None:
        """Write a picture of the page, with all its figures. most: pixels downwards."""
        self.value("Promise.all(boxes.map(draw)).then(() => 1)")
        self.until(IDLE)
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def page_in_browser(profile: Path, width: int) -> Iterator[Page]:
    """Open a tab of a browser of its own, `width` pixels wide."""
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()

    def pipes() -> None:
        os.dup2(theirs_in, 3)
        os.dup2(theirs_out, 4)

    command = (BROWSER, *OPTIONS, f"--user-data-dir={profile}")
    process = subprocess.Popen(
        command, preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_in, ours_out, width)
    finally:
        os.close(ours_in)  # it ends then
        os.close(ours_out)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
