"""A session's number is its task's on every server: another member that comes first there is in nobody's way.

The thief has a certificate of the job and its token, and knows the numbers. All are real processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from pstesting import forks
from pstesting.processes import CALM, PS0, PS1, SECONDS, W0, W1
from pswire.transport.grpc_channel import open_channel, stub
from tests.kit.certificates import Certificates, options
from tests.kit.internals import (
    PROTOCOL,
    TOKEN_KEY,
    VERBS,
    Fenced,
    Forbidden,
    LaneName,
    Payload,
    RemoteServer,
    Task,
    TensorSpec,
    VariableSpec,
    bearer,
    count_of,
    number_for,
    pb,
    start_server,
)

SPEC = VariableSpec("mine", TensorSpec("float32", (4,)))
AHEAD = 8
"""How many of the numbers that come next a thief takes."""

PROGRAM = """
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    v, u = (ps.Variable(np.zeros(4), name=name) for name in "vu")
for _ in range(3):
    strategy.run(lambda: (v.assign_add(np.ones(4)), u.assign_add(np.ones(4))))
print("ended with", float(v[0]), float(u[0]), flush=True)
"""


class Job:
    """Two servers that ask for certificates, and who connects to them."""

    def __init__(self, stack: ExitStack, certificates: Certificates) -> None:
        self._stack = stack
        self._certificates = certificates
        self.addresses: list[str] = []
        self.tasks = (PS0, PS1)
        for task in self.tasks:
            process, address = start_server(
                task.index, until_done=False, timeouts=CALM, security=options(certificates.out)
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            self.addresses.append(address)

    def connect(self, name: str, server: Task, lane: LaneName = "grpc") -> RemoteServer:
        """A connection with the certificate of a task."""
        shown = self._certificates.of(name)
        client = RemoteServer(self.addresses[server.index], server, CALM, lane=lane, security=shown)
        self._stack.callback(client.close)
        return client


@pytest.fixture
def job(certificates: Certificates) -> Iterator[Job]:
    """The servers of a job that nobody has begun."""
    with ExitStack() as stack:
        yield Job(stack, certificates)


@pytest.mark.parametrize("lane", ["grpc", "tcp", "shm"])
def test_a_task_takes_back_a_session_that_another_has_opened(job: Job, lane: LaneName) -> None:
    """On a server that did not give the number, its own task gets in; the thief is out, on the lane it has opened."""
    number = job.connect("worker-0", PS0).open(W0, 1, 1, False).session
    thief, owner = job.connect("worker-1", PS1, lane), job.connect("worker-0", PS1)
    assert thief.open(W1, 1, number, False).session == number
    value = Payload.pack([np.ones(4, "float32")])
    assert thief.create(number, 1, 1, SPEC, (1,), value).initialized
    assert thief.pull(number, [1], -1).result(SECONDS).payload.size == 16  # its lane is open
    assert thief.traffic[lane].received
    assert owner.open(W0, 1, number, False).session == number
    with pytest.raises((Forbidden, Fenced)):
        thief.pull(number, [1], -1).result(SECONDS)
    if (held := thief.lane(number)) is not None:
        with pytest.raises((Forbidden, Fenced)):
            held.beat().result(SECONDS)
    with pytest.raises(Forbidden, match=f"session {number} is {W0}'s, and not {W1}'s"):
        thief.open(W1, 1, number, False)
    owner.beat(number, -1, b"")
    assert owner.pull(number, [1], -1).result(SECONDS).payload.size == 16


def test_an_incarnation_is_a_servers(job: Job, certificates: Certificates) -> None:
    """A worker that opens a session with the number by which a server votes keeps no server from voting."""
    thief = job.connect("worker-1", PS1)
    incarnation = job.connect("ps-0", PS0).status().incarnation
    thief.open(W1, 1, incarnation, False)
    shown = certificates.of("ps-0")
    with open_channel(job.addresses[1], shown, "ps-1.paramserver") as channel:
        request = pb.IntroduceRequest(server=0, incarnation=incarnation, protocol=PROTOCOL)
        call = stub(channel, VERBS["Introduce"].path, (False, False))
        call(request.SerializeToString(), timeout=SECONDS, metadata=((TOKEN_KEY, bearer(shown.token)),))
    with pytest.raises(Forbidden):
        thief.beat(incarnation, -1, b"")


def test_a_job_trains_though_a_member_has_taken_its_numbers(
    job: Job, certificates: Certificates, tmp_path: Path
) -> None:
    """A worker computes the numbers that come next, and opens them on the other server before anybody does."""
    first = job.connect("worker-1", PS0)
    own = first.open(W1, 1, 1, False).session
    first.leave(own, "")
    thief = job.connect("worker-1", PS1)
    for task in (W0, Task("chief", 0)):
        for ahead in range(1, AHEAD + 1):
            thief.open(W1, 1, number_for(task, own, count_of(own) + ahead), False)
    cluster = {"ps": job.addresses, "worker": ["127.0.0.1:0"]}
    environ = os.environ | options(certificates.out).variables()
    environ |= {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "psclient", str(script)]
    ended = forks.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "ended with 3.0 3.0" in ended.stdout, ended.stderr
