"""Who has no token may make a server hold so much memory, and write so much log, and keeps nobody out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from pstesting.processes import CALM, PS0, SECONDS, W0
from tests.kit.attacks import Stranger
from tests.kit.internals import VERBS, RemoteServer, Security, SecurityOptions, start_server

TOKEN = "t" * 32
MIB = 1 << 20
CONNECTIONS, STREAMS = 4, 64
ATTACK_SECONDS = 6.0
"""Seconds in which strangers send as fast as the server takes it."""

MOST_GROWTH = 96 * MIB
"""Bytes by which a server may grow: 64 KiB of each stream, 4 whole messages, and what gRPC needs. All have 1 GiB."""

MOST_LOG = 16 << 10
"""Bytes of log."""

METHODS = {
    "a call": VERBS["Status"].path,
    "a stream": VERBS["Push"].path,
    "health": "/grpc.health.v1.Health/Check",
    "reflection": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}


class Attacked:
    """A real server with a token.

    Attributes:
        address: its `host:port`.
        process: its process, as the system sees it.
    """

    def __init__(self, stack: ExitStack, log: Path) -> None:
        self.log = log
        flags = ["--metrics-port", "0"]
        with log.open("wb") as file:
            process, self.address = start_server(
                until_done=False,
                timeouts=CALM,
                security=SecurityOptions(token=TOKEN),
                stderr=file.fileno(),
                flags=flags,
            )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        self.process = psutil.Process(process.pid)
        self.works()
        self._before = self.memory()

    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    @property
    def grown(self) -> int:
        """Bytes by which it has grown."""
        return self.memory() - self._before

    def works(self) -> None:
        """A worker opens a session, and beats, in time."""
        client = RemoteServer(self.address, PS0, CALM, security=Security(token=TOKEN))
        with closing(client):
            session = client.open(W0, 1, time.monotonic_ns(), False).session
            client.beat(session, -1, b"")
            client.leave(session, "")


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    with ExitStack() as stack:
        yield Attacked(stack, tmp_path / "log")


@pytest.mark.parametrize("case", METHODS)
def test_messages_that_never_end_are_not_kept(attacked: Attacked, case: str) -> None:
    """Of calls, and of the services that ask for no token: a stranger has a few buffers, and is told of once."""
    strangers = [Stranger(attacked.address, METHODS[case], 4 * MIB) for _ in range(CONNECTIONS)]
    for stranger in strangers:
        stranger.begin(STREAMS)
    threads = [threading.Thread(target=stranger.pump, args=(ATTACK_SECONDS,)) for stranger in strangers]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, attacked.grown)
        time.sleep(0.05)
    began = time.monotonic()
    attacked.works()
    assert time.monotonic() - began < SECONDS / 3
    sent = sum(stranger.sent for stranger in strangers)
    assert most < MOST_GROWTH, f"grown by {most / MIB:.1f} MiB, of {sent / MIB:.1f} that were sent"
    assert attacked.log.stat().st_size < MOST_LOG
    for stranger in strangers:
        stranger.sock.close()
