"""What the network between two hosts carries: measured on links whose rates the test knows."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest
from click.testing import CliRunner

from pstesting.hosts import Host
from pstesting.planner.commands import calibrate
from pstesting.planner.network import LEAST, MOST, WORD, answer
from tests.kit.internals import ConfigError, Unreachable
from tests.kit.shell import linked

ANSWER = """
from pstesting.planner.network import answer
answer({host!r}, {port}, lambda at: print(at, flush=True))
"""

MEASURE = """
import json
from pstesting.planner import network
network.PINGS = 200
found = network.measure({host!r}, {port})
print(json.dumps([found.rate, found.latency]))
"""


def test_the_rate_of_the_slower_way_and_the_latency_of_a_link() -> None:
    """Two hosts of 80 and 40 Mbit move 40, either way."""
    with ExitStack() as stack:
        hosts = linked(stack, Host("one", 80e6), Host("two", 40e6))
        at = hosts.addresses["two"]
        code = ANSWER.format(host=at, port=5000)
        peer = hosts.start("two", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert peer.stdout is not None
        assert peer.stdout.readline() == f"{at}:5000\n"
        code = MEASURE.format(host=at, port=5000)
        found = hosts.start("one", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        rate, latency = json.loads(found.communicate(timeout=60)[0])
        assert 40e6 / 8 * 0.3 < rate < 40e6 / 8 * 1.2  # others may use this machine, and no more comes than that
        assert 0 <= latency < 0.01
        assert peer.wait(10) == 0


@pytest.mark.parametrize("word", [WORD.pack(b"x", 1), WORD.pack(b"t", MOST + 1), b"GET /", b""])
def test_nonsense_ends_a_connection_and_no_more(word: bytes) -> None:
    listening = SimpleQueue[str]()
    peer = Thread(target=answer, args=("127.0.0.1", 0, listening.put), daemon=True)
    peer.start()
    host, _, port = listening.get(timeout=20).rpartition(":")
    address = host, int(port)
    with socket.create_connection(address, 20) as sock:
        sock.sendall(word)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    with socket.create_connection(address, 20) as sock:
        sock.sendall(WORD.pack(b"s", LEAST))
        left = LEAST
        while left:
            came = sock.recv(1 << 16)
            assert came
            assert came.count(0) == len(came)
            left -= len(came)
        sock.sendall(WORD.pack(b"e", 0))
    peer.join(20)
    assert not peer.is_alive()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--peer", "127.0.0.1:1"],
            "127.0.0.1:1 does not answer ([Errno 111] Connection refused); run psctl calibrate",
        ),
        (["--peer", "here"], "--peer: 'here' is no address"),
        (["--answer", "many"], "--answer: '0.0.0.0:many' is no address"),
        (["--answer", "192.0.2.1:5000"], "nothing can listen at 192.0.2.1:5000"),
    ],
)
def test_hosts_that_cannot_be_measured(tmp_path: Path, arguments: list[str], said: str) -> None:
    with pytest.raises((ConfigError, Unreachable), match=re.escape(said)):
        CliRunner().invoke(
            calibrate,
            ["--output", str(tmp_path / "costs.json"), *arguments],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert not list(tmp_path.iterdir())
