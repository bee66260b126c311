"""The server of a script that no cluster has started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from psclient._src.processes.embedded_server import EmbeddedServer
from pstesting import forks
from pswire.errors import Unreachable
from pswire.server_options import ServerOptions

SECONDS = 180
START = (
    "import os, signal, sys, time\nfrom psclient._src.processes.embedded_server import EmbeddedServer\n"
    "server = EmbeddedServer()\nprint(server.pid, flush=True)\n"
)


def started(text: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Runs a script that has an embedded server; returns both processes."""
    owner = forks.Forked[str](
        [sys.executable, "-c", START + text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    return owner, psutil.Process(int(owner.stdout.readline()))


def test_it_listens_until_it_is_stopped():
    """The address works at once, and `stop` may be called twice."""
    server = EmbeddedServer()
    process = psutil.Process(server.pid)
    host, _, port = server.address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=SECONDS).close()
    server.stop()
    server.stop()
    assert not process.is_running()


def test_it_says_why_it_did_not_start():
    """A server that refuses its flags is an error that says so."""
    with pytest.raises(Unreachable, match="embedded server did not start"):
        EmbeddedServer(ServerOptions(memory_limit="lots"))


@pytest.mark.parametrize("text", ["", "sys.exit(3)", "raise KeyError"])
def test_it_ends_with_its_script(text):
    """However the script ends, its server has ended before."""
    owner, server = started(text)
    owner.communicate(timeout=SECONDS)
    assert not server.is_running()


def test_it_ends_when_its_script_is_killed():
    """SIGKILL lets nothing run at exit; the pipe ends all the same."""
    owner, server = started("time.sleep(600)")
    owner.kill()
    owner.communicate()
    psutil.wait_procs([server], timeout=SECONDS)
    assert not server.is_running()


def test_a_fork_does_not_own_it():
    """A fork that exits does not end the server, and one that lives on does not keep it alive."""
    text = (
        "short = os.fork()\nif not short: sys.exit()\nos.waitpid(short, 0)\n"
        "long = os.fork()\nif not long: time.sleep(600)\n"
        "print(long, flush=True)\nsys.stdin.read()\nos._exit(0)\n"
    )
    owner, server = started(text)
    assert owner.stdout
    fork = psutil.Process(int(owner.stdout.readline()))
    try:
        assert server.is_running()
        assert owner.stdin
        owner.stdin.close()
        owner.wait(SECONDS)
        psutil.wait_procs([server], timeout=SECONDS)
        assert not server.is_running()
    finally:
        os.kill(fork.pid, signal.SIGKILL)
        owner.stdout.close()
