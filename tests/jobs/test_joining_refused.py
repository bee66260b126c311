"""Workers that cannot join, typed as a user types it: one line that says what is wrong, and what to do; no hang."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.jobs import test_bad_input as bad_input
from tests.kit import shell
from tests.kit.certificates import Certificates
from tests.kit.internals import VERBS, Done, JobStarted, LogEntry, Lost, Security, ServerConfig, ServerThread, Task
from tests.kit.rig import CHIEF, core

HASTY = {"PS_TIMEOUT_START": "2", "PS_TIMEOUT_LEASE": "2", "PS_TIMEOUT_BEAT": "0.3"}
"""A process waits for two seconds for what is not there."""

TOKEN = "0123456789abcdef"

TWO = ("a:0", "b:0")
"""The workers of the cluster."""


@contextmanager
def server(
    *entries: LogEntry,
    security: Security | None = None,
    name: str = "",
    workers: tuple[str, ...] = TWO,
    begins: bool = True,
    taken: Task | None = None,
    chief: str = "",
) -> Iterator[ServerThread]:
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


def join(directory: Path, words: str, **environ: str) -> shell.Done:
    """Types a command; `fine.py` is a script that says who it is."""
    (directory / "fine.py").write_text("import os; print(os.environ['TF_CONFIG'])")
    return shell.shell(words.split(), directory, **(HASTY | environ))


def check(done: shell.Done, code: int, says: str) -> None:
    """As `bad_input.check`, and no script has run."""
    bad_input.check(done, code, says)
    assert done.out == ""


def test_nobody_is_there(tmp_path):
    """After PS_TIMEOUT_START it ends with 1: another attempt may help."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        done = join(tmp_path, f"psworker --join {address} fine.py")
    check(
        done, 1, rf"no job to join at {address} for 2 s \(PS_TIMEOUT_START\): no answer at {address} .*correct --join"
    )


class Page(BaseHTTPRequestHandler):
    """What answers every request, and knows no protocol of ours."""

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def test_another_program_is_there(tmp_path):
    """What is no parameter server gives no answer that counts."""
    with HTTPServer(("127.0.0.1", 0), Page) as web:
        serving = threading.Thread(target=web.serve_forever, daemon=True)
        serving.start()
        done = join(tmp_path, f"psworker --join 127.0.0.1:{web.server_port} fine.py")
        web.shutdown()
        serving.join()
    check(done, 1, r"there is no job to join at 127.0.0.1:\d+ for 2 s .*correct --join")


def test_a_job_that_has_not_begun(tmp_path):
    """It is waited for as long as for any other process."""
    with server(begins=False) as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py")
    check(done, 1, r"for 2 s \(PS_TIMEOUT_START\): no chief has begun a job there yet; start its servers and its chief")


def test_a_job_that_has_lost_a_server(tmp_path):
    """Its processes end, and begin it anew: that one may be joined."""
    with server(Lost(0, "was lost")) as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py")
    check(done, 1, r"the job there has lost a server, and is not begun anew yet: was lost; start its servers")


def test_a_job_that_is_over(tmp_path):
    """There is nothing to do: it says so, and has not failed."""
    with server(Done()) as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py")
    check(done, 0, rf"psworker: the job at {thread.address} is over: there is nothing to join")


def test_another_job(tmp_path):
    """Whoever says which job it is for joins no other one; who says none joins the one that is there."""
    with server(name="theirs") as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py", PS_JOB="mine")
        check(done, 2, r"to join the job 'mine' \(PS_JOB\), and the servers at .* hold the job 'theirs'; unset PS_JOB")
        done = join(tmp_path, f"psworker --join {thread.address} fine.py")
        assert (done.code, done.errors) == (0, []), done.err
        assert '"task": {"type": "worker", "index": 2}' in done.out


@pytest.mark.parametrize("token", ["", "fedcba9876543210"], ids=["none", "another"])
def test_a_wrong_token(tmp_path, token):
    """It is told at once."""
    with server(security=Security(token=TOKEN)) as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py", **({"PS_TOKEN": token} if token else {}))
    check(done, 2, r"/job:ps/task:0: .*token.*PS_TOKEN_FILE")


def test_a_server_of_an_older_version(tmp_path):
    """Which knows nobody that joins."""
    with server() as thread:
        del thread._server._service._methods[VERBS["Enlist"].path]
        done = join(tmp_path, f"psworker --join {thread.address} fine.py")
    check(done, 2, r"is of an older version, which does not know Enlist; install the same version of paramserver")


def test_a_chief_of_an_older_version(tmp_path):
    """It has not said how many workers the cluster has."""
    with server(workers=()) as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py")
    check(done, 2, r"the chief that began this job is of an older version, .* begun anew with this version")


def files(certificates: Certificates, name: str, other: bool = False) -> dict[str, str]:
    """The environment of a process with the files of a task."""
    folder = (certificates.other if other else certificates.out) / name
    named = {"PS_TLS_CERT": "tls.crt", "PS_TLS_KEY": "tls.key", "PS_TLS_CA": "ca.crt", "PS_TOKEN_FILE": "token"}
    return {variable: str(folder / file) for variable, file in named.items()}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ps-0", r"ps-0/tls.crt is of ps-0, and a worker joins as the one worker that its certificate names; psctl"),
        ("worker-1", r"/job:worker/task:1 is one of the 2 workers of the job's cluster; start it with .* TF_CONFIG"),
    ],
)
def test_a_certificate_of_another_task(certificates, tmp_path, name, says):
    """Nobody joins as a server, or in the place of a worker of the cluster."""
    with server(security=certificates.of("ps-0")) as thread:
        check(join(tmp_path, f"psworker --join {thread.address} fine.py", **files(certificates, name)), 2, says)


def test_certificates_of_another_cluster(certificates, tmp_path):
    """The server's is not signed by our CA."""
    with server(security=certificates.of("ps-0")) as thread:
        done = join(
            tmp_path, f"psworker --join {thread.address} fine.py", **files(certificates, "worker-1", other=True)
        )
    check(done, 2, r"the server's certificate is not signed by our CA")


def test_an_index_that_is_in_use(certificates, tmp_path):
    """Who finds another process with its certificate waits a lease for the end of that one, and is told."""
    with server(security=certificates.of("ps-0"), workers=TWO[:1], taken=Task("worker", 1)) as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py", **files(certificates, "worker-1"))
    check(done, 2, r"another process is /job:worker/task:1 of this job; end it first, or join with .*--extra-workers N")
    assert "waits for it to end, for at most its lease of 2 s: " in done.err


def test_a_certificate_names_the_index(certificates, tmp_path):
    """Which it gets, though lower ones are free."""
    with server(security=certificates.of("ps-0"), workers=TWO[:0], chief="c:0") as thread:
        done = join(tmp_path, f"psworker --join {thread.address} fine.py", **files(certificates, "worker-1"))
    assert (done.code, done.errors) == (0, []), done.err
    assert '"worker": {"1": ' in done.out
    assert '"task": {"type": "worker", "index": 1}' in done.out


def test_whoever_is_there_is_told_apart(tmp_path):
    """Two servers that are named: one that is not there is no obstacle."""
    with socket.socket() as bound, server() as thread:
        bound.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{bound.getsockname()[1]}"
        done = join(tmp_path, f"psworker --join {gone},{thread.address} fine.py", PS_TIMEOUT_START="30")
    assert (done.code, done.errors) == (0, []), done.err
    assert f'"ps": ["{thread.address}"]' in done.out
