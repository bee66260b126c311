"""What the network adds: errors travel by class, a server has one life, and calls that are cut come again."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack

import numpy as np
import pytest

from pstesting.clock import Clock
from tests.kit import internals as inside
from tests.kit.rig import SOON, WORKERS, Job, Servers, checkpoint, core, create, given, remote, sum_into, together

A, B = WORKERS[:2]
NUMBER = inside.TensorSpec("int64", ())


class Refusing(inside.ParameterServer):
    """A server that answers every verb with one error: the waiting ones at once, or by their future."""

    def __init__(self, error: Exception, later: bool = False) -> None:
        self.error = error
        self.later = later
        self.task, self.incarnation, self.registry = "/job:ps/task:0", 7, None

    def call(self, request):
        if not (self.later and request.waits):
            raise self.error
        return self._failed()

    def push(self, contribution, payload, begun=None):
        if not self.later:
            raise self.error
        return self._failed()

    def _failed(self):
        future = Future()
        future.set_exception(self.error)
        return future


CALLS = {
    "open": lambda server: server.open(A, 1, 0, False),
    "heartbeat": lambda server: server.heartbeat(1, -1, b""),
    "leave": lambda server: server.leave(1, ""),
    "create_batch": lambda server: create(server, 1, 0, inside.VariableSpec("w", NUMBER)),
    "propose": lambda server: server.propose(1, None, "x", None),
    "watch": lambda server: server.watch(1, 0, 0).result(SOON),
    "approve": lambda server: server.approve(1, 0, []),
    "push": lambda server: server.push(inside.Contribution(1, 0, 0, b""), inside.EMPTY).result(SOON),
    "pull": lambda server: server.pull(1, [0], -1).result(SOON),
    "snapshot": lambda server: server.snapshot(1, b"", "").result(SOON),
    "restore": lambda server: server.restore(1, "x", inside.Turn()).result(SOON),
}


@pytest.fixture
def connect():
    """Connects to whatever answers the verbs: `connect(behind)`."""
    with ExitStack() as stack:

        def connected(behind):
            task, timeouts = inside.Task("ps", 0), inside.Timeouts(session_timeout=2.0, call_timeout=5.0)
            thread = stack.enter_context(inside.ServerThread(behind, inside.ServerConfig(task), grace=0.0))
            server = inside.RemoteServer(thread.address, task, timeouts)
            stack.callback(server.close)
            return server

        yield connected


def told(call, server):
    """What a call raises: its class, its words, and its task."""
    with pytest.raises(inside.PSError) as caught:
        call(server)
    return type(caught.value), caught.value.message, caught.value.task


@pytest.mark.parametrize("later", [False, True])
def test_every_verb_passes_errors_on(connect, later):
    """Class, message and task, as they were raised; whether at once or by the future. A bug of the server is no
    silence: it arrives as an error that names the server, and is not tried again."""
    error = inside.BY_NAME["ProgramError"]("what is wrong, where, and \u00fcberhaupt", "/job:worker/task:3")
    server, broken = connect(Refusing(error, later)), connect(Refusing(KeyError("a bug"), later))
    for verb, call in CALLS.items():
        assert told(call, server) == (type(error), error.message, error.task), verb
        if verb in ("create_batch", "push", "watch"):
            _, words, task = told(call, broken)
            assert "internal error" in words
            assert task == "/job:ps/task:0"


def test_a_server_has_one_life():
    """Its successor at the same address does not answer for it, in any verb but `open`."""
    with ExitStack() as stack:
        first = stack.enter_context(inside.ServerThread(core(0, 100), inside.ServerConfig(core(0).task), grace=0.0))
        servers = {}
        for verb in CALLS:
            servers[verb] = inside.RemoteServer(
                first.address,
                core(0).task,
                inside.Timeouts(session_timeout=20.0, call_timeout=SOON, start_timeout=SOON),
            )
            stack.callback(servers[verb].close)
            assert servers[verb].open(inside.Task("worker", len(servers)), 1, 0, False).incarnation == 100
        first.stop()
        stack.enter_context(
            inside.ServerThread(core(0, 200), inside.ServerConfig(core(0).task, port=first.port), grace=0.0)
        )
        opened = servers.pop("open")
        assert opened.open(A, 1, 0, False).incarnation == 200
        for verb, server in servers.items():
            kind, words, task = told(CALLS[verb], server)
            assert (kind, "replaced" in words, task) == (inside.ServerLost, True, "/job:ps/task:0"), verb


def test_a_cut_connection_leaves_the_contribution(tmp_path):
    """A worker that loses its connection in a round comes back to its answer: it has contributed once."""
    with ExitStack() as stack:
        one = core(0)
        first, second = (stack.enter_context(remote(one)) for _ in range(2))
        job = Job(Servers([first], [one], Clock(), tmp_path, True))
        here, other = job.join(A, B)
        variable = job.variable(here, np.array(0))
        plan = job.approve(sum_into(variable), here)
        cut = here.push(plan, [5])
        job.arrived(here)
        first.fail(inside.PSError("cut"))
        with pytest.raises(inside.PSError, match="cut"):
            cut.result(SOON)
        job.verbs[0] = second
        replies = together(here.push(plan, [5]), other.push(plan, [2]))
        assert [int(given(reply, plan)[0]) for reply in replies] == [7, 7]
        assert int(job.value(here, variable)) == 7


def test_a_wait_for_a_round_that_takes_too_long_says_whom_it_waits_for(tmp_path):
    """The client's deadline names the missing member: here of the round that a checkpoint is of."""
    with ExitStack() as stack:
        one = core(0)
        patient = stack.enter_context(remote(one))
        job = Job(Servers([patient], [one], Clock(), tmp_path, True))
        here, _ = job.join(A, B)
        plan = job.approve(checkpoint("run", (0,)), here)
        pushed = here.push(plan)
        hasty = inside.RemoteServer(patient.address, one.task, inside.Timeouts(round_timeout=0.2))
        stack.callback(hasty.close)
        with pytest.raises(inside.RoundTimeout, match=str(B)):
            hasty.snapshot(job.token, plan.id, "").result(SOON)
        assert not pushed.done()
