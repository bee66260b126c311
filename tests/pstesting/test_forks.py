"""Processes that are forked from one that has imported our programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from pstesting import forks
from pstesting.forks import EXECS, HIGH, SEEDS, Forked
from tests.kit.internals import child_environ

SAYS = """
import json, os, signal, sys, threading
sys.stderr.write(sys.stdin.read())
main, here = sys.modules["__main__"], os.getcwd()
print(json.dumps({
    "argv": sys.argv, "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "here": here,
    "session": os.getsid(0) == os.getpid(), "environ": dict(os.environ), "threads": threading.active_count(),
    "path": [each for each in sys.path if each], "main": getattr(main, "__file__", ""), "spec": str(main.__spec__),
    "own": main.__dict__ is globals(), "name": __name__, "terminal": sys.stdout.line_buffering,
    "open": [each for each in sorted(map(int, os.listdir("/proc/self/fd"))) if each < HIGH][:-1],
    "signals": [str(signal.getsignal(each)).split(" at ")[0] for each in signal.valid_signals()],
    "hash": hash("psserver"),
}))
sys.exit(7)
""".replace("HIGH", str(HIGH))

COMMANDS = {
    "psworker": ["-P", "-m", "psclient", "--", "says.py", "one"],
    "as a module": ["-m", "psclient", "--", "says.py", "one"],
    "a script": ["says.py", "one"],
    "text": ["-P", "-c", SAYS, "one"],
}
PLACES = {"psworker": {"process_group": 0}, "text": {"process_group": 0}, "a script": {"start_new_session": True}}


ENDS = """
import atexit, threading, time
atexit.register(print, "at exit", end="")
over = threading.Event()
threading.Thread(target=lambda: (over.wait(), time.sleep(0.1), print("thread"))).start()
over.set()
print("script")
sys.exit(300)
"""


def run(kind, command, environ, **keys):
    """Runs a script as a client would; returns what it says, what it wrote on stderr, and its exit code."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with kind([sys.executable, *command], env=environ, text=True, **pipes, **keys) as process:
        out, err = process.communicate("a word")
    return json.loads(out), err, process.returncode


@pytest.fixture
def script(tmp_path):
    """The directory of a script that says what it finds."""
    (tmp_path / "says.py").write_text(SAYS, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("how", COMMANDS)
def test_a_fork_is_what_a_start_is(script, how):
    """A forked process has the parent, streams, directory, variables, files and signals of one that is started."""
    environ = child_environ(1, None, {"PS_JOB": "forks", "PYTHONPATH": f"{script}:{script}"})
    keys = {"cwd": script, **PLACES.get(how, {})}
    (forked, *rest), (started, *wanted) = (
        run(kind, COMMANDS[how], environ, **keys) for kind in (Forked, subprocess.Popen)
    )
    assert rest == wanted == ["a word", 7]
    assert forked["parent"] == os.getpid()
    assert forked.pop("hash") != started.pop("hash")
    assert forked == started


@pytest.mark.parametrize("text", ["1 / 0", "def f(:", "raise SystemExit('enough')", ENDS])
def test_a_script_fails_as_a_start_does(tmp_path, text):
    """A traceback has the script's lines only, and the exit code is Python's."""
    (tmp_path / "script.py").write_text(f"import sys\n{text}\n", encoding="utf-8")
    command = [sys.executable, "script.py"]
    ended = [run(command, cwd=tmp_path, capture_output=True, text=True) for run in (forks.run, subprocess.run)]
    assert len({(done.returncode, done.stdout, done.stderr) for done in ended}) == 1, ended


def test_forks_differ_as_processes_do(script):
    """Of two processes that are forked one after another each has an order of its own in sets of strings."""
    found = {run(Forked, COMMANDS["text"], child_environ(1, None))[0]["hash"] for _ in SEEDS}
    assert len(found) == len(SEEDS)


def test_what_a_fork_could_not_have_is_started(script):
    """A process with other variables of Python's is started by itself."""
    environ = child_environ(1, None, {"PYTHONHASHSEED": "77"})
    (one, *_), (other, *_) = (run(kind, COMMANDS["text"], environ) for kind in (Forked, subprocess.Popen))
    assert one["hash"] == other["hash"]


def test_who_asks_for_a_start_gets_one():
    """A variable of the environment says so."""
    command = [sys.executable, "-c", "print('fork' + 's' in open('/proc/self/cmdline').read())"]
    for said, forked in (("", b"True\n"), ("1", b"False\n")):
        assert forks.run(command, env={EXECS: said}, capture_output=True).stdout == forked


def test_a_bare_environment_is_enough(script):
    """A fork has the variables that it is given, and no others."""
    environ = {"PYTHONFAULTHANDLER": "1"}
    text = "import faulthandler, os, sys; os.environ.pop('LC_CTYPE', None)  # which Python adds\n"
    text += "print(dict(os.environ), faulthandler.is_enabled(), sys.dont_write_bytecode)"
    command = [sys.executable, "-c", text]
    forked, started = (each(command, env=environ, capture_output=True) for each in (forks.run, subprocess.run))
    assert forked.stdout == started.stdout == b"{'PYTHONFAULTHANDLER': '1'} True False\n", forked.stderr


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    """As `subprocess` has it."""
    with pytest.raises(FileNotFoundError):
        forks.run([sys.executable, "-c", "pass"], cwd=tmp_path / "nowhere")


def test_a_launcher_forks_what_it_starts(tmp_path):
    """Servers and workers of a cluster that `psworker` starts have its fork server's command line, and are its own."""
    (tmp_path / "script.py").write_text(
        "import os\nprint('pstesting' in open('/proc/self/cmdline').read(), os.getppid())\n", encoding="utf-8"
    )
    command = [sys.executable, "-P", "-m", "psclient", "--standalone", "--no-chief", "script.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked[str](command, cwd=tmp_path, text=True, **pipes) as process:
        out, err = process.communicate()
    assert f"True {process.pid}" in out, err


def test_forks_have_modules_that_are_asked_for(tmp_path):
    """A script that is started so has them, and so have processes that it starts; others, before and after, do not."""
    (tmp_path / "says.py").write_text("import sys; print('wave', 'wave' in sys.modules)", encoding="utf-8")
    commands = [["says.py"], ["-P", "-m", "psclient", "--standalone", "--no-chief", "says.py"]]

    def found():
        done = [forks.run([sys.executable, *each], cwd=tmp_path, capture_output=True, text=True) for each in commands]
        return [word for end in done for word in re.findall(r"wave (\w+)", end.stdout)]

    assert found() == ["False", "False"]
    with forks.having("wave"):
        assert found() == ["True", "True"]
    assert found() == ["False", "False"]
