"""A headless Chromium, driven over a pipe (the DevTools protocol), without any other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0
"""Seconds after which what a page should show counts as missing."""
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40, "ArrowLeft": 37, " ": 32}


def program() -> str | None:
    """A Chromium of this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page. Every method waits for its answer."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number = 0
        self._bytes = b""
        self._session: str | None = None
        self.errors: list[str] = []
        """Exceptions, refused files and messages of level error."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> Any:
        """Calls a method of the protocol. Returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> Any:
        while b"\0" not in self._bytes:
            more = os.read(self._read, 1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self._bytes += more
        first, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(first)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE) -> None:
        """Waits until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            text = self.run("document.body?.innerText")
            assert time.monotonic() < end, f"never true: {script}\n{text}\n{self.errors}"
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def scheme(self, scheme: str) -> None:
        """Prefers `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def names(self) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader tells."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and "role" in node
        ]

    def picture(self, file: Path, of: str | None = None) -> None:
        """Writes what the window shows as a PNG, or one element of the page, by its selector."""
        clip = {} if of is None else {"clip": self.box(of) | {"scale": 2}, "captureBeyondViewport": True}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))

    def still(self, quality: int) -> bytes:
        """What the window shows, as a WebP of this quality in percent."""
        taken = self.call("Page.captureScreenshot", format="webp", quality=quality)
        return base64.b64decode(taken["data"])

    def box(self, selector: str) -> dict[str, float]:
        """Where an element of the page is, with eight pixels around it, in pixels of the page."""
        found: dict[str, float] = self.run(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return { x: box.x + scrollX - 8, y: box.y + scrollY - 8, width: box.width + 16,"
            " height: box.height + 16 }; })()"
        )
        return found


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own, with an empty profile."""
    found = program()
    assert found is not None
    to_child, ours = os.pipe()
    theirs, from_child = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]
        command = [found, *flags, "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        inner = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        process = subprocess.Popen(
            ["bash", "-c", inner, "bash", *command],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        try:
            yield Page(ours, theirs)
        finally:
            with contextlib.suppress(OSError):
                os.write(ours, b'{"id": 0, "method": "Browser.close"}\0')
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours)
            os.close(theirs)
