"""Headless Chromium over its DevTools protocol: one browser for all pages of a test session.

with HeadlessBrowser(folder) as browser: page_load = browser.open(page, width=400)
"""

import asyncio
import json
import shutil
import subprocess
import time
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
READY_S = 60.0  # only a hang takes longer, also beside other tests
COMPLETE = (
    "document.readyState === 'complete' && "
    "(!document.getElementById('charts') || !!document.documentElement.dataset.charts)"
)


@dataclass
class PageLoad:
    """Record of a page while it opened."""

    problems: list[str] = field(default_factory=list)  # console errors and uncaught exceptions
    requests: list[str] = field(default_factory=list)  # addresses, the page itself excluded
    seconds: float = 0.0  # until all charts are drawn


class HeadlessBrowser:
    """A running Chromium with one tab."""

    def __init__(self, folder: Path):
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-background-networking"]
        assert PROGRAM is not None
        self._process = subprocess.Popen([PROGRAM, *flags, "about:blank"], stderr=subprocess.DEVNULL)
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.page_load = PageLoad()
        try:
            self._loop.run_until_complete(self._connect(folder / "DevToolsActivePort"))
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> "HeadlessBrowser":
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(READY_S)

    def open(self, page: Path, width: int = 1600, dark: bool = False) -> PageLoad:
        """Open a page in a window of this width; return when its charts are drawn."""
        self.page_load = PageLoad()
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.prefer("dark" if dark else "light")
        began = time.monotonic()
        self._call("Page.navigate", url=page.as_uri())
        while not self.evaluate(COMPLETE):
            assert time.monotonic() - began < READY_S, f"not drawn after {READY_S} s: {self.page_load.problems}"
            time.sleep(0.02)
        self.page_load.seconds = time.monotonic() - began
        self.page_load.requests = [url for url in self.page_load.requests if url.split(":")[0] not in ("data", "blob")]
        self.page_load.requests.remove(page.as_uri())
        return self.page_load

    def resize(self, width: int) -> None:
        """Change the width of the window, and wait until the charts have followed."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.evaluate("new Promise(done => setTimeout(done, 250))")

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark pages, as the settings of a system do."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write a picture of the upper part of the page as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(b64decode(answer["data"]))

    async def _connect(self, port_file: Path) -> None:
        import aiohttp

        for _ in range(1200):
            if port_file.exists() and port_file.read_text().count("\n"):
                break
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tab = next(target for target in await answer.json() if target["type"] == "page")
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._exchange(f"{domain}.enable", {})

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._exchange(method, parameters))

    async def _exchange(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Send a command and return its result; events that arrive meanwhile are recorded."""
        self._number += 1
        await self._socket.send_str(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads((await self._socket.receive(READY_S)).data)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._record(message)

    def _record(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.page_load.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.page_load.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.page_load.problems.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.page_load.problems.append(parameters["entry"]["text"])
