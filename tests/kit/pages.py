"""A server's status page over real HTTP, in the process of a test."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from psserver.config import ServerConfig
from psserver.telemetry import MetricsPort, Rim
from pswire.model.status import ProcessStatus
from pswire.security.identity import Security
from pswire.security.link_codes import make_code
from pswire.transport.traffic import traffic
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
