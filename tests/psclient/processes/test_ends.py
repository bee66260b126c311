"""How a process ends: what is done before, while threads can still be started, and what SIGTERM tells it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import psclient as ps
from psclient._src.network.daemon_threads import SPARE, Threads
from psclient._src.network.remote_server import RemoteServer
from psclient._src.processes import shutdown
from psclient._src.processes.process import start_server
from pstesting import forks
from pstesting.processes import SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from pswire.cluster import Task
from pswire.errors import Abandoned, CheckpointError, PSError, RoundTimeout, ServerLost
from tests.kit.shell import shell
from tests.kit.strategies import refused

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from psclient._src.processes import shutdown
from psclient._src.network.daemon_threads import SPARE, Threads

pool = Threads("test") if SPARE else ThreadPoolExecutor()
for name in ("first", "second"):
    shutdown.register(lambda name=name: print(name, pool.submit(lambda: 7).result(), flush=True))
print("the script ends", flush=True)
"""


JOB = """
import sys
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    v = ps.Variable(np.zeros(int(sys.argv[1]), "float32"), name="v")
checkpoint = ps.train.Checkpoint(v=v)
if "restore" in sys.argv:
    checkpoint.restore("last-1")
    print(v.numpy()[0])
else:
    strategy.scope().__enter__()
    v.assign_add(np.ones(v.shape, "float32"))
    if "save" in sys.argv:
        checkpoint.save("last")
"""

LOSES = """
import atexit, sys, threading
atexit.register(lambda: print("registered first"))
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    v = ps.Variable(np.zeros(3), name="v")
ps.train.Checkpoint(v=v).save("last")
atexit.register(lambda: print("registered last"))
if "sync" in sys.argv:
    try:
        ps.train.Checkpoint(v=v).sync()
        strategy.close()
    except ps.errors.CheckpointError:
        print("told")
if "exit" in sys.argv:
    sys.exit(0)
if "raise" in sys.argv:
    raise RuntimeError("mine")
print("the script ends", end="")
"""

MANY = 3_000_000
"""Numbers that do not fit into one message."""

NO_THREAD = "a thread could not be started"


@contextmanager
def no_more_threads() -> Iterator[None]:
    """As in a process that may have no more: each would get a stack as large as all memory that can be addressed."""
    before = threading.stack_size(2**47)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("program", ["python", "psworker"])
def test_what_ends_with_the_process_may_use_threads(tmp_path, program):
    """The last registered comes first, after the script, and may use a thread, as under `atexit` none may."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = shell([program, "script.py"], tmp_path, fork=False)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["the script ends", "second 7", "first 7"]


def test_an_error_keeps_nothing_else_from_its_end(caplog, monkeypatch):
    """Each is called once; what one raises is logged, and what was unregistered is not called."""
    called: list[str] = []
    monkeypatch.setattr(shutdown, "_endings", [])  # what this process has registered goes on

    def excluded() -> None:
        called.append("left out")

    shutdown.register(lambda: called.append("first"))
    shutdown.register(lambda: [][1])
    shutdown.register(excluded)
    shutdown.unregister(excluded)
    shutdown.unregister(excluded)
    shutdown.run()
    shutdown.run()
    assert called == ["first"]
    assert "IndexError" in caplog.text


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_what_a_script_did_last_is_done_without_a_close(tmp_path, transport):
    """It may end in its scope, with a checkpoint on its way, which a later one restores. gRPC has to start threads for
    more than one message: where Python starts none any more, the script still ends, and says so."""
    (tmp_path / "job.py").write_text(JOB)
    save, restore, large = (
        shell(["python", "job.py", *words], tmp_path, PS_TRANSPORT=transport)
        for words in (("5", "save"), ("5", "restore"), (str(MANY),))
    )
    for each, out in ((save, ""), (restore, "1.0\n")):
        assert (each.code, each.err, each.out, each.left) == (0, "", out, ())
    assert (large.code, large.left) == (0, ())
    assert (NO_THREAD in large.err) == (transport == "grpc" and SPARE > 0)


@pytest.fixture
def loses(tmp_path):
    """A directory with a job that cannot save there."""
    (tmp_path / "job.py").write_text(LOSES)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/last-1").write_text("no directory")
    return tmp_path


@pytest.mark.parametrize("how", ["end", "exit"])
@pytest.mark.parametrize("program", ["python", "psworker"])
def test_a_script_whose_last_save_failed_fails(loses, program, how):
    """It has come to its end before anybody knew: one sentence says which checkpoint, and the exit code does; all that
    the script has registered for its end is done, and what it printed is there."""
    done = shell([program, "job.py", how], loses)
    assert (done.code, done.left) == (shutdown.NOT_SAVED, ())
    (line,) = done.err.splitlines()
    heads = {"python": "job.py: error: ", "psworker": "psworker: error: "}
    assert line.startswith(f"{heads[program]}/job:worker/task:0: the last checkpoint 'last-1' was not saved: ")
    ends = "the script ends" if how == "end" else ""
    assert done.out == f"{ends}registered last\nregistered first\n"


@pytest.mark.parametrize(("how", "code", "last"), [("sync", 0, "the script ends"), ("raise", 1, "")])
def test_a_failed_save_that_was_told_is_not_told_again(loses, how, code, last):
    """To a script that has caught it; nor does it hide why a script failed."""
    done = shell(["python", "job.py", how], loses)
    assert done.code == code
    assert "the last checkpoint" not in done.err
    assert ("RuntimeError: mine" in done.err) == (how == "raise")
    assert last in done.out


def saves_last() -> None:
    """The first worker's last save fails, and it ends; the second one trains on."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
    checkpoint = ps.train.Checkpoint(v=v)
    say("saved", checkpoint.save("last"))
    if ME:
        gate("go")
        v.assign_add(np.ones(3))
        say("value", v.numpy())


def test_a_failed_save_ends_nobody_else(tmp_path):
    """Who has only not saved has left as all do: the others go on, and then the whole command fails with its code."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last-1").write_text("no directory")
    with ProcessCluster(saves_last, tmp_path, workers=2, gates=["go"], chief="driver", restarts=3) as job:
        waited = ThreadPoolExecutor(1).submit(job.cluster.wait, 60.0)
        assert job.exited(W0) == shutdown.NOT_SAVED
        job.open("go")
        assert job.hear(W1, "value") == [1.0] * 3
        outcome = waited.result()
        assert job.exited(W1) == 0
    assert (outcome.code, outcome.task) == (shutdown.NOT_SAVED, W0)
    assert "the last checkpoint 'last-1' was not saved" in outcome.report


def test_work_that_no_thread_can_do_is_refused():
    """It is not left in the queue for later: the next work is done."""
    threads, over = Threads("test"), threading.Event()
    with no_more_threads():
        for _ in range(SPARE):
            threads.submit(over.wait)
        refused(PSError, NO_THREAD, lambda: threads.submit(over.wait))
    assert threads.submit(lambda: "next").result(10) == "next"
    over.set()
    threads.close()


@pytest.fixture
def server():
    process, address = start_server(until_done=False)
    with process:
        yield RemoteServer(address, Task("ps", 0))
        if process.stdin:
            process.stdin.close()


def test_a_connection_that_lacks_a_thread_can_be_closed(server):
    """A call that needs a thread is refused; those that need none are answered, and `close` waits for nothing."""
    with no_more_threads():
        session = server.open(Task("worker", 0), 0, 1, True).session
        refused(PSError, NO_THREAD, lambda: server.pull(session, [], -1))
        assert [state.member.session for state in server.status().sessions] == [session]
        server.leave(session, "")
        server.close()


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([], 0),
        ([CheckpointError("not written")], shutdown.NOT_SAVED),
        ([ServerLost("it was lost")], shutdown.SERVER_LOST),
        ([Abandoned("nobody is left")], shutdown.ABANDONED),
        ([RoundTimeout("too late")], 1),
    ],
)
def test_the_exit_code_says_what_was_not_done(failures, code):
    """A launcher tells by it whether another attempt helps."""
    assert shutdown.code_after(failures) == code


HEAD = """
import os, signal, sys, threading, time
from psclient._src.processes.sigterm import NOTICE
def say(text): print(text, flush=True)
def sleep():
    while True: time.sleep(0.01)
"""
# Python runs no handler of a signal that comes just before the thread falls asleep: so it sleeps again and again.


def ends(tmp_path, text, *numbers):
    """Runs a program, sends it a signal whenever it says `ready`; returns its code, and what else it said."""
    command = [sys.executable, "-c", HEAD + text]
    with forks.Forked[str](command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        for number in numbers:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
        said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said.split()


INSTALL, TOLD = "NOTICE.install()\n", "told = []\nNOTICE.take_part(lambda: told.append(1), 600.0, False)\n"
PART, SHORT = (f"NOTICE.take_part(lambda: None, {grace}, False)\n" for grace in (600.0, 0.2))
LEFT = "told = lambda: None\nNOTICE.take_part(told, 600.0, False)\nNOTICE.has_left(told)\n"
WAITS = "while not NOTICE.leaving: time.sleep(0.01)"
STEPS = f"say('ready')\n{WAITS}\n"
LEAVE = "while not told: time.sleep(0.01)\ntry:\n    NOTICE.leave()\nfinally:\n    say('finally')\n"
SLEEPS = "try:\n    say('ready')\n    sleep()\nfinally:\n    say('finally')"
UNTIL = f"try:\n    say('ready')\n    {WAITS}\n    {{}}sleep()\nfinally:\n    say('finally')"
CLOSES = f"{SLEEPS}\n    time.sleep(20)\n    say('late')\n"
HUNG_UP = f"NOTICE.install(True)\n{PART}"
MINE = "signal.signal(signal.SIGTERM, lambda *_: (say('mine'), sys.exit(3)))\n"
TRAIN = "def train():\n    while not NOTICE.leaving: time.sleep(0.01)\n    NOTICE.leave()\n"
THREAD = "threading.Thread(target=train).start()\nsay('ready')\nsleep()"
FORK = (
    "codes = set()\nfor wait in 0.2, *[0] * 20:\n    child = os.fork()\n    if not child: sleep()\n"
    "    time.sleep(wait)\n    os.kill(child, signal.SIGTERM)\n    codes.add(os.waitpid(child, 0)[1])\nsay(*codes)"
)
CALLS = "own = signal.getsignal(signal.SIGTERM)\nsignal.signal(signal.SIGTERM, lambda *told: own(*told))\n"
TERM, HUP = signal.SIGTERM, signal.SIGHUP

ENDS: dict[str, tuple[str, list[int], int, list[str]]] = {
    "who has a part goes on, and leaves where it may": (TOLD + STEPS + LEAVE, [TERM], 0, ["finally"]),
    "so does psworker": (INSTALL + TOLD + STEPS + LEAVE, [TERM], 0, ["finally"]),
    "who has no part ends as Python does": (SLEEPS, [TERM], -TERM, []),
    "under psworker by an ordinary exit": (INSTALL + SLEEPS, [TERM], 143, ["finally"]),
    "one that has left its job ends as Python does": (LEFT + SLEEPS, [TERM], -TERM, []),
    "a second signal ends at once": (PART + UNTIL.format("say('ready'); "), [TERM, TERM], 143, ["finally"]),
    "so does the end of the grace period": (SHORT + UNTIL.format(""), [TERM], 143, ["finally"]),
    "who closes for long after that is ended, before a scheduler kills it": (SHORT + CLOSES, [TERM], 143, ["finally"]),
    "so is one under psworker": (INSTALL + SHORT + CLOSES, [TERM], 143, ["finally"]),
    "the launcher's SIGHUP, before which nothing is finished": (f"{HUNG_UP}say('ready')\nsleep()", [HUP], 143, []),
    "a handler of the script's own is called": (f"{HUNG_UP}{MINE}say('ready')\nsleep()", [HUP], 3, ["mine"]),
    "another thread ends the process where it comes to a step": (PART + TRAIN + THREAD, [TERM], 0, []),
    "a fork of the process has no part in the job": (PART + FORK, [], 0, [str(int(TERM))]),
    "nor has one under psworker, where an exit might be lost": (INSTALL + PART + FORK, [], 0, [str(int(TERM))]),
    "nor one whose handler calls that of the process": (PART + CALLS + FORK, [], 0, [str(int(TERM))]),
    "who only waits leaves at once": (f"{PART}with NOTICE.anywhere():\n    say('ready')\n    sleep()", [TERM], 0, []),
    "if it was told before, too": (f"{PART}{STEPS}with NOTICE.anywhere():\n    say('in')", [TERM], 0, []),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_sigterm_tells_a_process(tmp_path, case):
    """It says what it comes to, and ends with a code: 0, as its servers are told, 143 by an ordinary exit."""
    text, signals, code, said = ENDS[case]
    assert ends(tmp_path, text, *signals) == (code, said)
