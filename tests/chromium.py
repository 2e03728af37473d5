"""A headless Chromium for tests, driven over its debugging pipe: no driver and no package needed.

With `--remote-debugging-pipe` the browser reads DevTools commands from descriptor 3 and answers on
descriptor 4, each a JSON object that ends with a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Backspace": 8, "Enter": 13, "1": 49, "2": 50}
PATIENCE = 60  # seconds; a busy machine starts a browser slowly


class Browser:
    """One running browser with one tab; what it keeps is in `profile`, downloads in `downloads`.

    `requests` are the addresses that the pages have asked for, of files as of the network.
    """

    def __init__(self, profile: Path, downloads: Path, *, width: int = 1280, height: int = 800):
        self._buffer, self._last, self._session = b"", 0, None
        self.requests: list[str] = []
        self._start(profile, f"--window-size={width},{height}")
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")
        self._call("Network.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, profile: Path, *flags: str) -> None:
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        # Copies with high numbers, so that neither stands where the other must go.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (its_in, its_out)]
        null = [(os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_RDWR, 0) for n in (0, 1, 2)]
        ends = [(os.POSIX_SPAWN_DUP2, end, n) for end, n in zip(high, (3, 4), strict=True)]
        command = [PROGRAM, *FLAGS, *flags, f"--user-data-dir={profile}"]
        self._pid = os.posix_spawn(PROGRAM, command, os.environ, file_actions=[*null, *ends])
        for end in (its_in, its_out, *high):
            os.close(end)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; of the events on the way, keep the requests."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _receive(self, method: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no answer to {method} in {PATIENCE} s"
            piece = os.read(self._in, 1 << 16)
            assert piece, f"the browser has ended before it answered {method}"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        self._call("Page.navigate", url=page.as_uri())
        self.wait(
            f"location.href === {json.dumps(page.as_uri())} && document.readyState === 'complete'"
        )

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def press(self, key: str, *, repeat: bool = False) -> None:
        """Press and release one key; `repeat` is what a key that is held down sends."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", autoRepeat=repeat, **code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        """Type text into what has the focus."""
        self._call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of what the window shows."""
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser and wait for it."""
        self._session = None
        try:
            self._call("Browser.close")
        except (AssertionError, BrokenPipeError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)
