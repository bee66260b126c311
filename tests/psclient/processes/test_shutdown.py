"""What is done before a process ends, while threads can still be started; and what is done where none can be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from psclient._src.processes import shutdown
from psclient._src.processes.process import start_server
from psclient._src.transport.daemon_threads import SPARE, Threads
from psclient._src.transport.remote_server import RemoteServer
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from pswire.cluster import Task
from pswire.errors import CheckpointError, PSError, RoundTimeout, ServerLost
from pswire.model.plan import VariableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.shell import shell

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from psclient._src.processes import shutdown
from psclient._src.transport.daemon_threads import SPARE, Threads

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

NO_THREAD = "no thread could be started"


@contextmanager
def no_more_threads() -> Iterator[None]:
    """As in a process that may have no more: each would get a stack as large as all memory that can be addressed."""
    before = threading.stack_size(2**47)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("program", ["python", "psworker"])
def test_what_ends_with_the_process_may_use_threads(tmp_path: Path, program: str) -> None:
    """The last registered comes first, after the script, and may use a thread, as under `atexit` none may."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = shell([program, "script.py"], tmp_path, fork=False)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["the script ends", "second 7", "first 7"]


def test_an_error_keeps_nothing_else_from_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is called once; what one raises is logged, and what was unregistered is not called."""
    called: list[str] = []
    monkeypatch.setattr(shutdown, "_endings", [])  # what this process has registered goes on

    def left_out() -> None:
        called.append("left out")

    shutdown.register(lambda: called.append("first"))
    shutdown.register(lambda: [][1])
    shutdown.register(left_out)
    shutdown.unregister(left_out)
    shutdown.unregister(left_out)
    shutdown.run()
    shutdown.run()
    assert called == ["first"]
    assert "IndexError" in caplog.text


@pytest.mark.parametrize("lane", ["shm", "grpc"])
def test_what_a_script_saved_last_is_there_without_a_close(tmp_path: Path, lane: str) -> None:
    """A script may end in its scope, with a checkpoint on its way, and a later one restores it."""
    (tmp_path / "job.py").write_text(JOB)
    done = [shell(["python", "job.py", "5", what], tmp_path, PS_LANE=lane) for what in ("save", "restore")]
    assert [(each.code, each.err, each.out, each.left) for each in done] == [(0, "", "", ()), (0, "", "1.0\n", ())]


@pytest.mark.parametrize("lane", ["shm", "grpc"])
def test_what_cannot_be_sent_at_the_end_is_told(tmp_path: Path, lane: str) -> None:
    """gRPC has to start threads for more than one message: where Python starts none any more, the script still ends."""
    (tmp_path / "job.py").write_text(JOB)
    done = shell(["python", "job.py", str(MANY)], tmp_path, PS_LANE=lane)
    assert (done.code, done.left) == (0, ())
    assert (NO_THREAD in done.err) == (lane == "grpc" and SPARE > 0)


@pytest.mark.parametrize("how", ["end", "exit"])
@pytest.mark.parametrize("program", ["python", "psworker"])
def test_a_script_whose_last_save_failed_fails(tmp_path: Path, program: str, how: str) -> None:
    """It has come to its end before anybody knew: one sentence says which checkpoint, and the exit code does; all that
    the script has registered for its end is done, and what it printed is there."""
    (tmp_path / "job.py").write_text(LOSES)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/last-1").write_text("no directory")
    done = shell([program, "job.py", how], tmp_path)
    assert (done.code, done.left) == (shutdown.NOT_SAVED, ())
    (line,) = done.err.splitlines()
    heads = {"python": "job.py: error: ", "psworker": "psworker: error: "}
    assert line.startswith(f"{heads[program]}/job:worker/task:0: the last checkpoint 'last-1' was not saved: ")
    ends = "the script ends" if how == "end" else ""
    assert done.out == f"{ends}registered last\nregistered first\n"


@pytest.mark.parametrize(("how", "code", "last"), [("sync", 0, "the script ends"), ("raise", 1, "")])
def test_a_failed_save_that_was_told_is_not_told_again(tmp_path: Path, how: str, code: int, last: str) -> None:
    """To a script that has caught it; nor does it hide why a script failed."""
    (tmp_path / "job.py").write_text(LOSES)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/last-1").write_text("no directory")
    done = shell(["python", "job.py", how], tmp_path)
    assert done.code == code
    assert "the last checkpoint" not in done.err
    assert ("RuntimeError: mine" in done.err) == (how == "raise")
    assert last in done.out


def test_a_strategy_that_is_closed_raises_what_was_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There somebody can still do something about it; all else of its end is done."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/last-1").write_text("no directory")
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(1.0, name="v"))
    checkpoint.save("last")
    with pytest.raises(ps.errors.CheckpointError, match="the last checkpoint 'last-1' was not saved"):
        strategy.close()
    strategy.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpoint.save("other")


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


def test_a_failed_save_ends_nobody_else(tmp_path: Path) -> None:
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


def test_work_that_no_thread_can_do_is_refused() -> None:
    """It is not left in the queue for later: the next work is done."""
    threads, over = Threads("test"), threading.Event()
    with no_more_threads():
        for _ in range(SPARE):
            threads.submit(over.wait)
        with pytest.raises(PSError, match=NO_THREAD):
            threads.submit(over.wait)
    assert threads.submit(lambda: "next").result(10) == "next"
    over.set()
    threads.close()


@pytest.fixture
def server() -> Iterator[RemoteServer]:
    process, address = start_server(until_done=False)
    with process:
        yield RemoteServer(address, Task("ps", 0))
        if process.stdin:
            process.stdin.close()


def test_a_connection_that_lacks_a_thread_can_be_closed(server: RemoteServer) -> None:
    """A call that needs a thread is refused; those that need none are answered, and `close` waits for nothing."""
    with no_more_threads():
        session = server.open(Task("worker", 0), 0, 1, True).session
        with pytest.raises(PSError, match=NO_THREAD):
            server.create(session, 0, 0, VariableSpec("v", TensorSpec("float32", (1,))), (0,), None)
        assert [state.member.session for state in server.status().sessions] == [session]
        server.leave(session, "")
        server.close()


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([], 0),
        ([CheckpointError("not written")], shutdown.NOT_SAVED),
        ([ServerLost("it was lost")], shutdown.SERVER_LOST),
        ([RoundTimeout("too late")], 1),
    ],
)
def test_the_exit_code_says_what_was_not_done(failures, code):
    """A launcher tells by it whether another attempt helps."""
    assert shutdown.code_after(failures) == code
