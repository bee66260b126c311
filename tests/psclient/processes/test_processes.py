"""A task's process: its threads of BLAS, its embedded server, what it prints, and how psctl finds its cluster."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from psclient._src.config import threads_of
from psclient._src.processes import local_clusters
from psclient._src.processes.blas import share_cores
from psclient._src.processes.embedded_server import EmbeddedServer
from psclient._src.processes.local_clusters import choose, find_clusters, register, started_at
from psclient._src.processes.output import MAX_LINE, Line, Printer, Relay
from pstesting import forks
from pswire.cluster import ClusterSpec, Task
from pswire.errors import ConfigError, Unreachable
from pswire.server_options import ServerOptions
from pswire.telemetry import logging_setup
from pswire.variables import THREADS
from tests.kit.strategies import refused

W0 = Task("worker", 0)
CORES = threads_of(1)

SCRIPT = """
import numpy as np
from threadpoolctl import ThreadpoolController
def say(): print(*{library.num_threads for library in ThreadpoolController().select(user_api="blas").lib_controllers})
import psclient as ps
say()
ps.ParameterServerStrategy()
say()
"""


@pytest.mark.skipif(CORES == 1, reason="one core is not shared")
@pytest.mark.parametrize(("environ", "after"), [({}, threads_of(2)), ({"OPENBLAS_NUM_THREADS": str(CORES)}, CORES)])
def test_a_script_and_its_server_share_the_cores(environ, after):
    """`python SCRIPT` starts a server beside it; without a strategy, or if the user sets it, NumPy is as it was."""
    clean = {name: value for name, value in os.environ.items() if name not in THREADS}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=clean | environ, capture_output=True, text=True)
    assert [int(number) for number in done.stdout.split()] == [CORES, after], done.stderr


def test_tasks_of_a_host_share_its_cores(monkeypatch):
    """Whatever they are, and those elsewhere do not; a number that is smaller is the user's, and never raised."""
    spec = ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["a:2", "b:2"], "chief": ["a:3"]})
    assert spec.at_host_of(W0) == [Task("ps", 0), W0, Task("chief", 0)]
    assert spec.at_host_of(Task("ps", 1)) == [Task("ps", 1), Task("worker", 1)]
    assert spec.at_host_of(Task("evaluator", 0)) == [Task("evaluator", 0)]
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(1, "blas"):
        share_cores(ClusterSpec({"worker": ["a:1"]}), W0)
        assert {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {1}


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
    return owner, psutil.Process(int(owner.stdout.readline()))


def test_it_listens_until_it_is_stopped():
    """At once; `stop` may be called twice; one that refuses its flags says why it did not start."""
    server = EmbeddedServer()
    process = psutil.Process(server.pid)
    host, _, port = server.address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=SECONDS).close()
    server.stop()
    server.stop()
    assert not process.is_running()
    refused(Unreachable, "embedded server did not start", lambda: EmbeddedServer(ServerOptions(memory_limit="lots")))


@pytest.mark.parametrize("text", ["", "sys.exit(3)", "raise KeyError", "time.sleep(600)"])
def test_it_ends_with_its_script(text):
    """However that ends, its server has ended before; after SIGKILL, which lets nothing run at exit, soon."""
    owner, server = started(text)
    if "sleep" in text:
        owner.kill()
    owner.communicate(timeout=SECONDS)
    psutil.wait_procs([server], timeout=SECONDS if "sleep" in text else 0)
    assert not server.is_running()


def test_a_fork_does_not_own_it():
    """A fork that exits does not end the server, and one that lives on does not keep it alive."""
    text = (
        "short = os.fork()\nif not short: sys.exit()\nos.waitpid(short, 0)\n"
        "long = os.fork()\nif not long: time.sleep(600)\n"
        "print(long, flush=True)\nsys.stdin.read()\nos._exit(0)\n"
    )
    owner, server = started(text)
    fork = psutil.Process(int(owner.stdout.readline()))
    try:
        assert server.is_running()
        owner.stdin.close()
        owner.wait(SECONDS)
        psutil.wait_procs([server], timeout=SECONDS)
        assert not server.is_running()
    finally:
        os.kill(fork.pid, signal.SIGKILL)
        owner.stdout.close()


SERVERS = ["127.0.0.1:1", "127.0.0.1:2"]
CLUSTER = {"ps": SERVERS, "worker": ["127.0.0.1:0"]}
SECRET = {"PS_TOKEN": "t" * 32}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where the files lie; it is not there yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "paramserver"


def test_a_cluster_is_found_as_it_was_told(directory):
    """By its name, or as the only one; none, or several, are said. Nobody else may read the file, or its directory."""
    assert find_clusters() == []
    refused(ConfigError, r"no cluster started by psworker --standalone", lambda: choose(""))
    path = register("dir/train.py", SERVERS, CLUSTER, SECRET)
    assert (path.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)
    (found,) = find_clusters()
    name = f"train-{os.getpid()}"
    assert found == choose("") == choose(name)
    assert (found.servers, found.cluster, found.security) == (tuple(SERVERS), CLUSTER, SECRET)
    assert "t" * 32 not in repr(found)
    register("train.py", SERVERS, CLUSTER, SECRET)
    assert [each.name for each in find_clusters()] == [name, f"{name}-2"]
    refused(ConfigError, rf"2 clusters .*{name}, {name}-2; choose one with --local=NAME", lambda: choose(""))
    refused(ConfigError, f"no cluster is named 'x'; running clusters: {name}", lambda: choose("x"))
    assert choose(f"{name}-2").name == f"{name}-2"


def test_a_launcher_that_is_gone_counts_for_nothing(directory):
    """Nor does another process that has its number now; the file is removed."""
    path = register("train.py", SERVERS, CLUSTER, SECRET)
    said = json.loads(path.read_text())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = {"pid": child.pid, "started": started_at(child.pid)}
        path.write_text(json.dumps(said | other))
        assert [each.pid for each in find_clusters()] == [child.pid]
        path.write_text(json.dumps(said | other | {"started": other["started"] - 1}))
        assert find_clusters() == []
        assert not path.exists()
        register("train.py", SERVERS, CLUSTER, SECRET)
        path.write_text(json.dumps(said | other))
        child.communicate(b"\n")
    assert find_clusters() == []
    assert not path.exists()


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[1] / "elsewhere"))


OTHER_TEXTS = ["", "{", "[]", "{}", '{"servers": 7}', '{"servers": [], "cluster": 1}', "[" * 9999]
PASSED_OVER: list[Callable[[Path], object]] = [
    *(partial(Path.chmod, mode=mode) for mode in (0o644, 0o660, 0o602)),
    *(partial(Path.write_text, data=text) for text in OTHER_TEXTS),
    link,
]


@pytest.mark.parametrize("change", PASSED_OVER)
def test_files_that_are_not_ours_alone_are_passed_over(directory, change):
    """Who could write it could name servers of his own; a link may lead anywhere; and whatever else it has."""
    path = register("train.py", SERVERS, CLUSTER, SECRET)
    change(path)
    assert find_clusters() == []
    assert path.exists()


@pytest.mark.parametrize("kind", ["open to others", "a file", "a link", "another user's"])
def test_a_directory_that_is_not_ours_alone_is_not_used(directory, tmp_path, monkeypatch, kind):
    """Neither to write a token there, nor to read one."""
    if kind == "a file":
        directory.write_text("")
    elif kind == "a link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
    else:
        directory.mkdir(mode=0o700)
        if kind == "open to others":
            directory.chmod(0o755)
        else:
            monkeypatch.setattr(local_clusters.os, "getuid", lambda: 12345)
    assert register("train.py", SERVERS, CLUSTER, SECRET) is None
    refused(ConfigError, "mode 0700", lambda: find_clusters())


WORKER, OTHER = Task("worker", 0), Task("worker", 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def relayed(*pieces: bytes) -> tuple[list[Line], Relay]:
    """What a relay makes of bytes that come in these pieces."""
    lines: list[Line] = []
    relay = Relay(lines.append)
    reader, writer = os.pipe()
    relay.watch(os.fdopen(reader, "rb", buffering=0), WORKER, error=False)
    for piece in pieces:
        os.write(writer, piece)
    os.close(writer)
    relay.close(timeout=30)
    return lines, relay


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], [("a", False), ("b", False)]),
        ([b"a\r\nb"], [("a", False), ("b", False)]),
        ([b"a\r", b"\nb\n"], [("a", False), ("b", False)]),
        ([b"\r10%\r20%\n"], [("10%", True), ("20%", False)]),
        ([b"10%\r20%\r"], [("10%", True), ("20%", False)]),
        ([b"\n"], [("", False)]),
        ([b"\x1b[2K\x1b[1Ared \x1b[31mx\x1b[0m\n"], [("red \x1b[31mx\x1b[0m", False)]),
        (["gr\u00fc\u00df".encode()[:3], "gr\u00fc\u00df\n".encode()[3:]], [("gr\u00fc\u00df", False)]),
        ([b"\xff\n"], [("\ufffd", False)]),
    ],
)
def test_lines(pieces, expected):
    """Lines come whole however the bytes came; a carriage return makes a state of a bar."""
    lines, _ = relayed(*pieces)
    assert [(line.text, line.bar) for line in lines] == expected


def test_a_stream_without_lines_takes_no_memory():
    """It is broken into lines, but for one of a log, however long its message is; the last lines are kept for a
    launcher to show, and bars are not."""
    lines, _ = relayed(*[b"x" * 60_000] * 3)
    assert all(len(line.text) <= 2 * MAX_LINE for line in lines)
    assert sum(len(line.text) for line in lines) == 180_000
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "\U0001f600" * 100_000, (), None)
    text = logging_setup.Json().format(record)
    lines, _ = relayed(text.encode() + b"\n")
    assert [line.text for line in lines] == [text]
    _, relay = relayed(b"1%\r2%\r", b"end\n")
    assert (relay.lines(WORKER, error=False), relay.lines(WORKER, error=True)) == (["end"], [])


def test_every_line_has_its_task():
    """Without a terminal a prefix and no codes; on one, colours tell two workers apart, unless none is wanted. JSON of
    a log passes as it is: it says itself whose it is."""
    out, err = io.StringIO(), io.StringIO()
    printer = Printer(out, err)
    line = '{"time": "2026-11-21T21:58:51.123Z", "level": "info", "message": "a\\u001b[2Kb"}'
    for error, text in ((True, line), (True, "plain"), (True, '{"level": 1}'), (False, line)):
        printer(Line(WORKER, error, text))
    printer(Line(Task("chief", 0), True, "two"))
    said = [line, "[worker 0] plain", '[worker 0] {"level": 1}', "[chief] two"]
    assert (err.getvalue().splitlines(), out.getvalue()) == (said, f"[worker 0] {line}\n")
    out = Terminal()
    printer = Printer(out, out)
    printer(Line(WORKER, False, "x"))
    printer(Line(OTHER, False, "x"))
    first, second = (line.partition("[worker")[0] for line in out.getvalue().split("\n")[:2])
    assert first != second
    plain = Terminal()
    Printer(plain, plain, colour=False)(Line(WORKER, False, "x"))
    assert plain.getvalue().endswith("[worker 0] x\n")


def test_one_error_that_ends_several_workers_is_said_once():
    """The first line says what it is; others, from another place of the script too, that theirs is the same. A terminal
    that is gone stops nobody: processes that nobody hears would wait for a full pipe."""
    out = io.StringIO()
    printer = Printer(out, out, colour=False)
    for task, text in ((WORKER, "all is lost (a.py:3)"), (OTHER, "all is lost (a.py:9)"), (WORKER, "another (a.py:3)")):
        printer(Line(task, True, f"psworker: {task}: error: {text}"))
    said = [line.partition("error: ")[2] or line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert said == ["all is lost (a.py:3)", f"same error as {WORKER}", "another (a.py:3)"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone:
        printer = Printer(gone, gone)
        printer(Line(WORKER, False, "x"))
        printer(Line(WORKER, False, "y"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())


def test_one_bar_stays_below_the_lines():
    """The first task's; a line is printed above it; in a file, its states are a line now and then."""
    out = Terminal()
    printer = Printer(out, out, colour=False)
    printer(Line(WORKER, False, "10%", bar=True))
    printer(Line(OTHER, False, "90%", bar=True))
    printer(Line(OTHER, False, "line"))
    assert "90%" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K[worker 1] line\n\r\x1b[K[worker 0] 10%")
    out = io.StringIO()
    printer = Printer(out, out)
    for percent in range(100):
        printer(Line(WORKER, False, f"{percent}%", bar=True))
    assert out.getvalue() == "[worker 0] 0%\n"
