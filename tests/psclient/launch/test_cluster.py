"""Local clusters of real processes: what they run, how they end, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from psclient._src.launch import cluster as launch
from pstesting import forks
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.server_options import ServerOptions
from tests.kit.shell import PROGRAMS, free_port, shell
from tests.kit.strategies import refused

SECONDS = 180
WORKERS = [Task("worker", index) for index in range(3)]

READY = "print('ready', flush=True)\n"
ME = "import json, os, sys, time, signal\nme = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"


pytestmark = pytest.mark.usefixtures("leaves_soon")


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(ME + text, encoding="utf-8")
        return str(path)

    return write


def run(script: str, **keys: object) -> tuple[launch.Outcome, launch.Cluster]:
    with launch.Cluster(**{"workers": 2, "chief": "none", "script": script, **keys}) as cluster:
        outcome = cluster.wait(SECONDS)
    assert all(process.returncode is not None for process in cluster.processes.values())
    return outcome, cluster


def test_tasks_start_beside_the_servers(script):
    """They hear of the cluster once all servers listen, from a stdin that has nothing for scripts; restarts hear, too.

    One that ends before that is a failure as any other.
    """

    class Watched(launch.Cluster):
        def _await_server(self, task):
            if not self.addresses:
                started.append({*self.processes})
            if kills:
                self.processes[WORKERS[1]].kill()
                self.processes[WORKERS[1]].wait()
            return super()._await_server(task)

    def ran(text: str) -> tuple[launch.Outcome, launch.Cluster]:
        with Watched(workers=2, chief="none", ps=2, restarts=1, script=script(text)) as cluster:
            return cluster.wait(SECONDS), cluster

    started: list[set[Task]] = []
    kills = False
    text = (
        "ps = json.loads(os.environ['TF_CONFIG'])['cluster']['ps']; print(len(ps), repr(sys.stdin.read()))\n"
        "if me == 1 and not os.path.exists(sys.argv[0] + '1'): open(sys.argv[0] + '1', 'w'); sys.exit(3)\n"
    )
    outcome, cluster = ran(text)
    assert outcome == launch.Outcome(0)
    assert started == [{Task("ps", 0), Task("ps", 1), *WORKERS[:2]}]
    assert cluster.output(WORKERS[0]) == ["2 ''"]
    assert cluster.output(WORKERS[1]) == ["2 ''"] * 2
    kills = True
    outcome, _ = ran("if me == 1: sys.exit(4)")
    assert (outcome.code, outcome.task) == (4, WORKERS[1])  # the one that was started in the place of the killed one


def test_all_processes_are_told_what_is_asked_for(script):
    """With chief="script" one process more runs it, and everyone knows of the chief; the level at which all log; and a
    port of its own for each task's metrics, servers first: what the environment says is meant for the cluster."""
    port = free_port()
    text = (
        "import logging; c = json.loads(os.environ['TF_CONFIG'])\n"
        "print(c['task']['type'], len(c['cluster']['chief']), logging.getLogger().level, os.environ['PS_METRICS_HOST'],"
        " os.environ['PS_METRICS_PORT'])"
    )
    outcome, cluster = run(script(text), chief="script", log_level="debug", metrics_port=port)
    assert outcome == launch.Outcome(0)
    words = cluster.processes[Task("ps", 0)].args
    assert words[words.index("--log-level") + 1] == "debug"
    assert any(f"http://127.0.0.1:{port}/metrics" in line for line in cluster.output(Task("ps", 0)))
    for task, kind, place in ((Task("chief", 0), "chief", 1), (WORKERS[0], "worker", 2), (WORKERS[1], "worker", 3)):
        assert cluster.output(task) == [f"{kind} 1 10 127.0.0.1 {port + place}"]


def test_an_evaluator_is_waited_for(script):
    """It runs the script beside the training, in whose cluster it is not, and may go on after it: that is told once."""
    text = "c = json.loads(os.environ['TF_CONFIG']); print(*sorted(c['cluster']), c['task']['type'])"
    wait = "while time.sleep(0.1) is None and c['task']['type'] == 'evaluator' and not os.path.exists('over'): pass"
    said: list[str] = []

    def hear(line: launch.Line) -> None:
        said.append(line.text)
        if "all workers have ended" in line.text:
            over.touch()

    path = script(f"{text}; os.chdir(os.path.dirname(sys.argv[0]))\n{wait}")
    over = Path(path).parent / "over"
    outcome, cluster = run(path, evaluator=True, sink=hear)
    assert outcome == launch.Outcome(0)
    assert cluster.output(launch.EVALUATOR) == ["ps worker evaluator"]
    assert cluster.output(Task("worker", 1)) == ["ps worker worker"]
    assert said.count("psworker: all workers have ended; waiting for /job:evaluator/task:0, or press Ctrl-C") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_first_failure_ends_all(script, log_format):
    """The others are ended, the failing task's code is returned, and its traceback shows user code alone, as text."""
    text = "if me == 1:\n    raise ValueError('broken')\ntime.sleep(600)"
    outcome, cluster = run(script(text), log_format=log_format)
    assert (outcome.code, outcome.task) == (1, Task("worker", 1))
    assert outcome.report.startswith("psworker: /job:worker/task:1 failed (exit code 1):\nTraceback")
    assert outcome.report.endswith("ValueError: broken")
    assert outcome.summary == "psworker: /job:worker/task:1 failed (exit code 1): ValueError: broken"
    assert "runpy" not in outcome.report
    assert "psclient" not in outcome.report
    assert cluster.processes[Task("worker", 0)].returncode == 128 + signal.SIGTERM


LATE = "import atexit\natexit.register(print, '12:00:00 W psclient: could not say goodbye', file=sys.stderr)\n"
FAILED = "psworker: /job:worker/task:0 failed"
EVALUATES = "time.sleep(600 * (json.loads(os.environ['TF_CONFIG'])['task']['type'] != 'evaluator')); exit(3)"
ODD = "psworker: /job:worker/task:0: error: odd ("

CODES: dict[str, tuple[str, int, str]] = {
    "a code": ("sys.exit(7)", 7, f"{FAILED} (exit code 7)"),
    "a signal": ("os.kill(os.getpid(), signal.SIGKILL)", 137, f"{FAILED} (killed by SIGKILL)"),
    "an error of ours": (f"{LATE}from pswire.errors import PSError\nraise PSError('odd')", 1, ODD),
    "the user's": (f"{LATE}raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "neither": (f"{LATE}sys.exit('no data here')", 1, "no data here"),
    "an evaluator's": (EVALUATES, 3, "psworker: /job:evaluator/task:0 failed (exit code 3)"),
}


@pytest.mark.parametrize("case", CODES)
def test_the_code_is_the_failing_task_s(script, case):
    """A signal's is 128 more. The report is our last line or the last traceback, whatever is logged in the end."""
    text, code, said = CODES[case]
    outcome, _ = run(script(text), workers=1, evaluator="evaluator" in case)
    assert outcome.code == code
    assert outcome.report.splitlines()[0 if " failed (" in said else -1].startswith(said)


ONE = (
    "import pathlib\nfrom pswire.errors import PSError, ServerLost\n"
    "mark, pid = pathlib.Path(__file__).with_suffix('.mark'), str(os.getpid())\n"
)
BLAMES = (
    "if me == 0:\n    while not mark.exists():\n        time.sleep(0.01)\n    raise PSError('worker 1 has failed')\n"
    "try:\n    mark.touch()\n    raise KeyError('cause')\nfinally:\n    time.sleep(0.2)\n"
)
LOST = (
    "if me == 0:\n    mark.write_text(pid)\n    raise ServerLost('was lost', '/job:ps/task:0')\n"
    "while not mark.exists() or not (other := mark.read_text()):\n    time.sleep(0.01)\n"
    "while (stat := pathlib.Path('/proc', other, 'stat')).exists() and ') Z ' not in stat.read_text():\n"
    "    time.sleep(0.01)\n"
    "time.sleep(0.2)\nsys.exit(3)"
)


@pytest.mark.parametrize(("text", "code", "said"), [(BLAMES, 1, "KeyError: 'cause'"), (LOST, 3, "(exit code 3)")])
def test_the_one_to_blame_is_shown(script, monkeypatch, text, code, said):
    """A process that fails because another did, or says that a server was lost, may end first; the report is about the
    other, whatever that one printed."""
    monkeypatch.setattr(launch, "SETTLE_SECONDS", 5.0)
    outcome, _ = run(script(ONE + text))
    assert (outcome.task, outcome.code) == (Task("worker", 1), code)
    assert said in outcome.report


def test_who_still_runs_in_the_end_is_named(script):
    """What does not end in time is ended, and the error says what it was."""
    with (
        launch.Cluster(script=script("time.sleep(600)"), chief="none") as cluster,
        pytest.raises(TimeoutError, match=r"still run after 0\.5 s: /job:ps/task:0, /job:worker/task:0"),
    ):
        cluster.wait(0.5)


@pytest.mark.parametrize(
    "chief", ["driver", *(pytest.param(chief, marks=pytest.mark.soak) for chief in ("script", "none"))]
)
def test_a_job_ends_by_itself(script, monkeypatch, chief):
    """When the workers have left, the chief ends and then the servers, all with exit code 0."""
    monkeypatch.setattr(launch, "LEAVE_SECONDS", 30.0)
    said: list[str] = []
    text = (
        "import numpy as np, psclient as ps\nstrategy = ps.ParameterServerStrategy()\n"
        "with strategy.scope():\n    v = ps.Variable(np.zeros(3), name='v')\n    v.assign_add(np.ones(3))\n"
    )
    outcome, cluster = run(script(text), ps=2, chief=chief, sink=lambda line: said.append(line.text))
    assert outcome == launch.Outcome(0)
    assert {process.returncode for process in cluster.processes.values()} == {0}
    assert not [line for line in said if "did not end by itself" in line]


def test_what_waits_for_a_job_that_no_script_begins_is_ended(script, monkeypatch):
    """At once, and without a word: a script may do without servers."""
    monkeypatch.setattr(launch, "LEAVE_SECONDS", 10 * SECONDS)
    said: list[str] = []
    outcome, cluster = run(script("pass"), chief="driver", sink=lambda line: said.append(line.text))
    assert outcome == launch.Outcome(0)
    assert not [line for line in said if line.startswith("psworker: ")]
    assert all(cluster.processes[task].returncode == 0 for task in (Task("ps", 0), *WORKERS[:2]))


@pytest.mark.parametrize("chief", ["driver", "none"])
def test_a_job_that_does_not_come_to_its_end_is_a_failure(script, chief):
    """A script may swallow its error and end with 0: the launcher, which has to end the servers, does not."""
    text = (
        "import numpy as np, psclient as ps\nstrategy = ps.ParameterServerStrategy()\n"
        "try:\n    with strategy.scope():\n        v = ps.Variable(np.zeros(3), name='v')\n"
        "        v.assign_add(np.full(3, me))\nexcept ps.errors.Diverged:\n    pass\n"
    )
    outcome, cluster = run(script(text), chief=chief)
    assert [cluster.processes[task].returncode for task in WORKERS[:2]] == [0, 0]
    assert (outcome.code, outcome.task) == (1, None)
    assert outcome.report.startswith("psworker: /job:ps/task:0")
    assert outcome.report.endswith("after the last worker, because a worker did not leave the job cleanly")
    assert "\n" not in outcome.report


def test_a_server_that_cannot_start_is_an_error():
    """The server's own line is in the error, also where that is JSON; what was started before is ended."""
    for log_format, options, said in (
        ("text", ServerOptions(memory_limit="lots"), r"ps/task:0: the server did not start \(exit code 2\): [^{]*lots"),
        ("json", ServerOptions(device="tpu"), r"^[^{]*write cpu or gpu:0[^{]*$"),
    ):
        cluster = launch.Cluster(ps=2, server=options, log_format=log_format)
        refused(ConfigError, said, cluster.start)
        assert all(process.returncode is not None for process in cluster.processes.values())


def standalone(script: str, cwd: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts two servers and two workers, and waits until each worker has said "ready"."""
    command = [*PROGRAMS["psworker"], "--standalone", "--ps", "2", "--workers", "2", "--no-chief", script]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    keys = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environ}
    launcher = forks.Forked[str](command, cwd=cwd, **keys)
    ready: set[str] = set()
    while len(ready) < 2:
        line = launcher.stdout.readline()
        assert line, launcher.stderr.read() if launcher.stderr else ""
        ready |= {line} if line.endswith("ready\n") else set()
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) >= 4
    return launcher, children


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    for process in alive:
        process.kill()
    return not alive


def test_nothing_outlives_a_killed_launcher(script, tmp_path):
    """kill -9 of the launcher ends servers and workers, whatever these do with signals."""
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)"
    launcher, children = standalone(script(text), tmp_path)
    launcher.kill()
    launcher.communicate()
    assert gone(children)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT])
def test_signals_are_forwarded(script, tmp_path, number):
    """The script sees an ordinary exit, runs what it has at exit, and the launcher returns 128 + signal."""
    text = f"import atexit\natexit.register(print, 'leaving')\n{READY}while True: time.sleep(0.05)"
    launcher, children = standalone(script(text), tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + number
    assert "[worker 0] leaving" in out
    assert "[worker 1] leaving" in out
    assert "Traceback" not in err
    assert gone(children)


@pytest.mark.soak
def test_a_second_signal_kills(script, tmp_path):
    """Who presses Ctrl-C twice does not wait for a script that ignores it."""
    text = (
        "for n in (2, 15): signal.signal(n, lambda *_: print('no', flush=True))\n" + READY + "while True: time.sleep(9)"
    )
    launcher, children = standalone(script(text), tmp_path)
    launcher.send_signal(signal.SIGINT)
    while "no\n" not in launcher.stdout.readline():
        pass
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 130
    assert time.monotonic() - began < launch.TERM_SECONDS
    assert gone(children)


def test_a_file_gives_the_cluster_and_flags_win(script, tmp_path):
    """--config means what the flags mean; a flag beside it is stronger. The last lines on stderr are the failing task's
    traceback, headed by its name."""
    text = "print(sys.argv[1:])\nif me:\n    raise KeyError(me)"
    (tmp_path / "c.yaml").write_text(f"workers: 3\nchief: none\nscript: {script(text)}\nargs: [a]\n")
    done = shell(["psworker", "--config", "c.yaml", "--workers", "2"], tmp_path)
    assert done.code == 1
    assert "[worker 0] ['a']" in done.out
    assert "[worker 2]" not in done.out
    assert "\x1b" not in done.out + done.err
    last = done.err[done.err.index("psworker: /job:worker/task:1 failed") :]
    assert last.endswith("KeyError: 1\n")
