"""Processes that are forked from one that has imported our programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from psclient._src.config import child_environ
from pstesting.forks import SEEDS, Forked

SAYS = """
import json, os, signal, sys, threading
sys.stderr.write(sys.stdin.read())
print(json.dumps({
    "argv": sys.argv, "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "here": os.getcwd(),
    "environ": dict(os.environ), "threads": threading.active_count(), "path": [each for each in sys.path if each],
    "main": sys.modules["__main__"].__file__, "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "signals": [str(signal.getsignal(each)).split(" at ")[0] for each in signal.valid_signals()],
    "hash": hash("psserver"),
}))
sys.exit(7)
"""


def run(kind, script, environ, said=b"a word"):
    """Runs a script as a client would; returns what it says, what it wrote on stderr, and its exit code."""
    command = [sys.executable, "-P", "-m", "psclient", "--", str(script), "one", "two"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with kind(command, bufsize=0, env=environ, process_group=0, **pipes) as process:
        out, err = process.communicate(said)
    return json.loads(out), err, process.returncode


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script that says what it finds; this process is in its directory."""
    path = tmp_path / "says.py"
    path.write_text(SAYS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


def test_a_fork_is_what_a_start_is(script):
    """A forked process has the parent, streams, directory, variables, files and signals of one that is started."""
    environ = child_environ(1, None, {"PS_JOB": "forks"})
    (forked, *rest), (started, *wanted) = (run(kind, script, environ) for kind in (Forked, subprocess.Popen))
    assert rest == wanted == [b"a word", 7]
    assert forked["parent"] == os.getpid()
    assert forked.pop("hash") != started.pop("hash")
    assert forked == started


def test_forks_differ_as_processes_do(script):
    """Of two processes that are forked one after another each has an order of its own in sets of strings."""
    found = {run(Forked, script, child_environ(1, None))[0]["hash"] for _ in SEEDS}
    assert len(found) == len(SEEDS)


def test_what_a_fork_could_not_have_is_started(script):
    """A process with other variables of Python's is started by itself."""
    environ = child_environ(1, None, {"PYTHONHASHSEED": "77"})
    (one, *_), (other, *_) = (run(kind, script, environ) for kind in (Forked, subprocess.Popen))
    assert one["hash"] == other["hash"]
