"""Status pages over real HTTP, and headless Chromium that shows them."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.contract import ProcessStatus, Security, make_code, traffic
from tests.kit.internals import MetricsPort, Rim, ServerConfig
from tests.kit.rig import SOON, Job

TOKEN, OTHER_TOKEN = "a" * 32, "b" * 32


@dataclass
class Got:
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Served:
    """A page that is served.

    Attributes:
        port: its port on 127.0.0.1.
        code: a code that is good.
    """

    port: int
    code: str = field(default_factory=lambda: make_code(TOKEN, time.time()))

    def get(self, path: str = "/", method: str = "GET", **headers: str) -> Got:
        """Asks for a path; `Host` and the like may be given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): each for name, each in headers.items()})
            answer = connection.getresponse()
            return Got(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()

    def look(self) -> Got:
        """Asks for the page with a good code."""
        return self.get(f"/?code={self.code}")


@contextmanager
def page_of(job: Job, token: str = TOKEN) -> Iterator[Served]:
    """Serves the metrics and the page of a job's first server."""
    core = job.servers.cores[0]
    process = ProcessStatus(time.time(), 1 << 20, {}, 1, "", {}, {"shm received": 1 << 21}, 99.0)
    rim = Rim("127.0.0.1:2222", lambda: process, core.recent, dict)
    port = MetricsPort(core, traffic(), ServerConfig(core.task, security=Security(token=token)), 0, rim)
    try:
        yield Served(int(port.url.rpartition(":")[2].partition("/")[0]))
    finally:
        port.close()


BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None where there is none."""

SECONDS = 60.0
"""Time limit of an answer of the browser: it shares two cores with others."""


class Browser:
    """A browser with one tab; a context manager that leaves nothing behind.

    Args:
        directory: directory for its profile.

    Attributes:
        said: what pages wrote to the console, and which policy they broke.
    """

    def __init__(self, directory: Path) -> None:
        assert BINARY is not None
        self.said: list[str] = []
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command = [BINARY, *flags, f"--user-data-dir={directory}", "about:blank"]
        # The browser reads file 3, and writes to file 4.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", *command], pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self._session = ""

    def __enter__(self) -> Browser:
        (tab,) = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, url: str) -> None:
        """Loads a page."""
        self._call("Page.navigate", url=url)
        self.until(lambda: self.run("document.readyState") == "complete")

    def run(self, script: str) -> Any:
        """Evaluates an expression of JavaScript, as its tools do: also where the page may run none."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, holds: Callable[[], object]) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, "what the page was to show has not come"
            time.sleep(0.1)

    def text(self, place: str = "body") -> str:
        """Returns the text that somebody sees in the element of a selector."""
        return str(self.run(f"document.querySelector({json.dumps(place)})?.innerText ?? ''"))  # none while it loads

    def look(self, width: int = 1200, dark: bool = False, script: bool = True) -> None:
        """Sets the width of the window, the colours that its user likes, and whether pages may run scripts."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Emulation.setScriptExecutionDisabled", value=not script)

    def photograph(self, path: Path, height: int) -> None:
        """Writes a picture of the page from its top."""
        width = self.run("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        told = {"id": self._number, "method": method, "params": params}
        if self._session:
            told["sessionId"] = self._session
        os.write(self._to, json.dumps(told).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(message["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))
