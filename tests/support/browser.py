"""Headless Chromium through its DevTools protocol, for tests of web pages."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest


def chromium() -> str:
    """Return the path of Chromium. Skips the test if it is missing."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return found


class Session:
    """Commands to a target of the DevTools protocol."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect

        self._socket = connect(address, max_size=None)
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._socket.close()

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result


class Browser:
    """Start a browser, for the duration of the `with` block."""

    def __init__(self, folder: Path) -> None:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]
        self._process = subprocess.Popen(
            [chromium(), *flags, f"--user-data-dir={folder}", "about:blank"], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        line = next(line for line in self._process.stderr if "DevTools listening on" in line)
        address = line.split()[-1]
        self.session, self.pages = Session(address), address.partition("/devtools/")[0] + "/devtools/page/"

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.session.close()
        self._process.terminate()
        self._process.wait(10)
        assert self._process.stderr is not None
        self._process.stderr.close()


class Page:
    """A browser page with its own storage."""

    def __init__(
        self, url: str, browser: Browser, width: int = 1000, height: int = 1400, *, ignore_policy: bool = False
    ) -> None:
        """ignore_policy: run scripts that the page's content security policy forbids."""
        self._browser = browser.session
        self._context = self._browser.do("Target.createBrowserContext")["browserContextId"]
        made = self._browser.do("Target.createTarget", url="about:blank", browserContextId=self._context)
        self._session = Session(browser.pages + made["targetId"])
        self._do = self._session.do
        self.size(width, height)
        self._do("Page.enable")
        self._do("Page.setBypassCSP", enabled=ignore_policy)
        self._do("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._session.close()
        self._browser.do("Target.disposeBrowserContext", browserContextId=self._context)

    def size(self, width: int, height: int) -> None:
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def js(self, expression: str) -> Any:
        """Evaluate an expression."""
        result = self._do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not self.js(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.01)  # for the server, which is in this process

    def theme(self, name: str) -> None:
        """Set the system's preferred colour scheme: "light" or "dark"."""
        self._do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def reload(self) -> None:
        self.js("document.body.id = 'before'")
        self._do("Page.reload")
        self.until("document.readyState === 'complete' && document.body.id !== 'before'")

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self._do("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False, control: bool = False) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"Enter": 13, "Tab": 9, " ": 32, "Escape": 27, "O": 79}
        code = {" ": "Space", "O": "KeyO"}.get(key, key)
        modifiers = 8 * shift + 2 * control
        same = {"key": key, "code": code, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self._do("Input.dispatchKeyEvent", type="keyDown", **same, **({"text": text} if text else {}))
        self._do("Input.dispatchKeyEvent", type="keyUp", **same)

    def shot(self, path: Path) -> None:
        """Take a screenshot of the whole page."""
        image = self._do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))
