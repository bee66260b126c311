"""Workers that cannot join, typed as a user types it: one line that says what is wrong, and what to do; no hang."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.jobs import test_bad_input as bad_input
from tests.kit import shell
from tests.kit.internals import Done, JobStarted, Lost, Security, ServerConfig, ServerThread, Task
from tests.kit.rig import CHIEF, core

HASTY = {"PS_START_TIMEOUT": "2", "PS_SESSION_TIMEOUT": "2", "PS_HEARTBEAT_INTERVAL": "0.3"}
"""A process waits for two seconds for what is not there."""

TOKEN = Security(token="0123456789abcdef")

TWO = ("a:0", "b:0")
"""The workers of the cluster."""


@contextmanager
def server(*entries, security=None, name="", workers=TWO, begins=True, taken=None, chief=""):
    """A server that holds a job, with these entries in its log behind its beginning."""
    behind = core()
    config = ServerConfig(behind.task, security=security or Security())
    with ServerThread(behind, config, grace=0.0) as thread:
        token = behind.open(CHIEF, 0, 0, True, job=name).token
        begun = JobStarted(token, (behind.incarnation,), name, (thread.address,), (), workers, chief)
        try:
            if begins:
                behind.approve(token, 0, [begun, *entries])
            if taken:
                behind.enlist(taken, 1)
            yield thread
        finally:
            behind.close()


def join(directory, address, **environ):
    """Types the command; `fine.py` is a script that says who it is."""
    (directory / "fine.py").write_text("import os; print(os.environ['TF_CONFIG'])")
    return shell.shell(f"psworker --join {address} fine.py".split(), directory, **(HASTY | environ))


def check(done, code, says):
    """As `bad_input.check`, and no script has run."""
    bad_input.check(done, code, says)
    assert done.out == ""


def joined(done, *told):
    """The script has run, and was told this."""
    assert (done.code, done.errors) == (0, []), done.err
    for each in told:
        assert each in done.out


@contextmanager
def silent():
    """An address at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


class Page(BaseHTTPRequestHandler):
    """What answers every request, and knows no protocol of ours."""

    def log_message(self, format, *args):
        """Says nothing."""


def test_nobody_is_there(tmp_path):
    """After PS_START_TIMEOUT it ends with 1: another attempt may help."""
    with silent() as address:
        done = join(tmp_path, address)
    says = rf"no job to join at {address} within 2 s \(PS_START_TIMEOUT\): no answer at {address} .*correct --join"
    check(done, 1, says)


def test_another_program_is_there(tmp_path):
    """What is no parameter server gives no answer that counts."""
    with HTTPServer(("127.0.0.1", 0), Page) as web:
        serving = threading.Thread(target=web.serve_forever, daemon=True)
        serving.start()
        done = join(tmp_path, f"127.0.0.1:{web.server_port}")
        web.shutdown()
        serving.join()
    check(done, 1, r"found no job to join at 127.0.0.1:\d+ within 2 s .*correct --join")


NOT_BEGUN = (
    r"within 2 s \(PS_START_TIMEOUT\): the chief has not started a job there yet; start its servers and its chief"
)
LOST = r"the job there has lost a server, and was not restarted yet: was lost; start its servers"
NO_TOKEN = r"/job:ps/task:0: .*token.*PS_TOKEN_FILE"


@pytest.mark.parametrize(
    ("entries", "about", "environ", "code", "says"),
    [
        pytest.param([], {"begins": False}, {}, 1, NOT_BEGUN, id="a job that has not begun is waited for"),
        pytest.param([Lost(0, "was lost")], {}, {}, 1, LOST, id="a job that has lost a server may be begun anew"),
        pytest.param([Done()], {}, {}, 0, r"is over, so it cannot be joined", id="a job that is over: no failure"),
        pytest.param([], {"security": TOKEN}, {}, 2, NO_TOKEN, id="no token"),
        pytest.param([], {"security": TOKEN}, {"PS_TOKEN": "fedcba9876543210"}, 2, NO_TOKEN, id="another token"),
    ],
)
def test_a_job_that_cannot_be_joined(tmp_path, entries, about, environ, code, says):
    """It says why, and what to do."""
    with server(*entries, **about) as thread:
        check(join(tmp_path, thread.address, **environ), code, says)


def test_another_job(tmp_path):
    """Whoever says which job it is for joins no other one; who says none joins the one that is there.

    A server that is named, and not there, is no obstacle.
    """
    with server(name="theirs") as thread, silent() as gone:
        done = join(tmp_path, thread.address, PS_JOB="mine")
        check(done, 2, r"PS_JOB names the job 'mine', but the servers at .* hold the job 'theirs'; unset PS_JOB")
        done = join(tmp_path, f"{gone},{thread.address}", PS_START_TIMEOUT="30")
    joined(done, '"task": {"type": "worker", "index": 2}', f'"ps": ["{thread.address}"]')


def files(folder):
    """The environment of a process with the files of a task."""
    named = {"PS_TLS_CERT": "tls.crt", "PS_TLS_KEY": "tls.key", "PS_TLS_CA": "ca.crt", "PS_TOKEN_FILE": "token"}
    return {variable: str(folder / file) for variable, file in named.items()}


OF_A_SERVER = r"ps-0/tls.crt is for ps-0, but a worker that joins needs the certificate of exactly one worker; psctl"
OF_THE_CLUSTER = r"/job:worker/task:1 is one of the 2 workers of the job's cluster; start it with .* TF_CONFIG"
OF_OTHERS = r"the server's certificate was not signed by this process's CA"
IN_USE = r"/job:worker/task:1 is already in this job; end that process first, or join with .*--extra-workers N"


@pytest.mark.parametrize(
    ("about", "folder", "says"),
    [
        pytest.param({}, "out/ps-0", OF_A_SERVER, id="of a server"),
        pytest.param({}, "out/worker-1", OF_THE_CLUSTER, id="of a worker of the cluster"),
        pytest.param({}, "other/worker-1", OF_OTHERS, id="of another cluster"),
        pytest.param({"workers": TWO[:1], "taken": Task("worker", 1)}, "out/worker-1", IN_USE, id="that is in use"),
    ],
)
def test_a_certificate_with_which_nobody_joins(certificates, tmp_path, about, folder, says):
    """Who finds another process with its certificate waits a lease for the end of that one, and is told."""
    out, name = folder.split("/")
    with server(security=certificates.of("ps-0"), **about) as thread:
        done = join(tmp_path, thread.address, **files(getattr(certificates, out) / name))
    check(done, 2, says)
    assert ("waiting up to 2 s (PS_SESSION_TIMEOUT) for the earlier process of this task to end: " in done.err) == (
        "taken" in about
    )


def test_a_certificate_names_the_index(certificates, tmp_path):
    """Which it gets, though lower ones are free."""
    with server(security=certificates.of("ps-0"), workers=TWO[:0], chief="c:0") as thread:
        done = join(tmp_path, thread.address, **files(certificates.out / "worker-1"))
    joined(done, '"worker": {"1": ', '"task": {"type": "worker", "index": 1}')
