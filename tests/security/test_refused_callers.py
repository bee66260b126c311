"""Who is refused leaves a trace: a count by reason, a line in the log, and no more lines than somebody may read."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.request import urlopen

import grpc
import pytest

from psserver.transport.refused_callers import MOST_KEPT, MOST_LINES, QUIET_SECONDS, RefusedCallers
from pstesting import forks
from tests.kit.internals import TOKEN_KEY, VERBS, child_environ, pb
from tests.kit.shell import free_port

SOON = 20


class Server:
    """A psserver process with a token, and what it says."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        command = [sys.executable, "-P", "-m", "psserver", "--port", "0", "--metrics-port", "0", *flags]
        environ = child_environ(1, None, {"PS_TOKEN": "0123456789abcdef0123456789abcdef"})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = forks.Forked[str](command, env=environ, text=True, **pipes)
        stack.callback(self.end)
        self.address = self._read(r"listening on (\S+)")
        self.metrics = self._read(r"serves metrics at (\S+)")

    def _read(self, pattern: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"the server has not said {pattern}")

    def counts(self) -> dict[str, int]:
        """How many callers were refused, by reason, as its metrics say."""
        with urlopen(self.metrics, timeout=SOON) as answer:
            text = answer.read().decode()
        found = re.findall(r'^paramserver_server_refused_total\{reason="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {reason: int(float(count)) for reason, count in found}

    def end(self) -> str:
        """Ends it; returns what it has said on stderr."""
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.communicate(timeout=SOON)[1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def status(address: str, *metadata: tuple[str, str]) -> None:
    """Asks for a server's status, and is refused."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(VERBS["Status"].path)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            call(pb.Empty().SerializeToString(), timeout=SOON, metadata=metadata)


def test_strangers_are_counted_and_fill_no_log(stack: ExitStack) -> None:
    """Thousands of them write a few lines, with their address and what they lacked."""
    server = Server(stack)
    host = server.address.rpartition(":")[0]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(VERBS["Status"].path)
        for _ in range(300):
            with pytest.raises(grpc.RpcError):
                call(pb.Empty().SerializeToString(), timeout=SOON)
    status(server.address, (TOKEN_KEY, "Bearer fedcba9876543210"))
    assert server.counts() == {"token": 301, "certificate": 0, "handshake": 0, "lane": 0}
    said = server.end()
    lines = [line for line in said.splitlines() if "refuses a caller" in line]
    assert len(lines) == 1
    assert f"refuses a caller at ipv4:{host} (status, token): Unauthenticated: this server asks for the" in lines[0]
    assert len(said) < 2000


def test_strangers_on_a_lane(stack: ExitStack) -> None:
    """What is no hello closes the connection."""
    data_port = free_port()
    server = Server(stack, "--data-port", str(data_port))
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", data_port), SOON) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            while stranger.recv(1 << 16):
                pass
    assert server.counts()["lane"] == 200
    said = server.end()
    assert said.count("refuses a caller at 127.0.0.1 (connect, lane)") == 1


def test_lines_are_limited_by_host_and_in_all(caplog: pytest.LogCaptureFixture) -> None:
    """After a minute the next one says how many there were meanwhile; what is kept has a limit as well."""
    now = 0.0
    refused = RefusedCallers("/job:ps/task:0", lambda: now)
    for host in range(3 * MOST_KEPT):
        for port in (1, 2):
            refused.note("connect", f"10.0.0.{host}:{port}", "lane", "no hello")
    assert len(caplog.messages) == MOST_LINES
    assert refused.counts["lane"] == 6 * MOST_KEPT
    assert len(refused.recent()) == MOST_KEPT
    assert refused.recent()[-1].said == f"a caller at 10.0.0.{3 * MOST_KEPT - 1}, 2 times"
    now = QUIET_SECONDS
    refused.note("connect", "10.0.0.1:3", "lane", "no hello")
    untold = 6 * MOST_KEPT - MOST_LINES - (MOST_LINES - 1)  # those between two lines are told with the second
    assert caplog.messages[-1].endswith(f"no hello; {untold} more were refused since the last such line")
