"""A server as a state machine, and its core: array work that is late, leases of its own clock, the order of answers."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from psserver.cli import summary
from psserver.config import ServerConfig
from psserver.core.machine import Machine
from psserver.devices import ServerDevice
from psserver.effects import Reply, Run, Work
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from pstesting.clock import Clock
from pswire.api import (
    ApproveRequest,
    Contribution,
    CreateBatchRequest,
    HeartbeatRequest,
    OpenRequest,
    WatchRequest,
)
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, PSError, ServerGone, ServerLost, Unreachable
from pswire.model.log import (
    Approved,
    Done,
    Generation,
    GenerationClosed,
    Gone,
    JobStarted,
    Member,
    Return,
    Snapshotted,
    Start,
)
from pswire.model.plan import PlacedVariable, Plan, SnapshotOrder, Turn, VariableSpec
from pswire.model.status import Pace
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from pswire.servers import votes as said_by_servers
from pswire.servers.votes import Vote
from tests.kit.rig import (
    CHIEF,
    SOON,
    WORKERS,
    JobWithValues,
    Servers,
    core,
    given,
    payload,
    reduce_only,
    sum_into,
)

A, B = WORKERS[:2]
NUMBER = TensorSpec("int64", ())


class Late:
    """Array work that is done when the test says so."""

    def __init__(self) -> None:
        self.queue: deque = deque()

    def __call__(self, work) -> None:
        self.queue.append(work)

    def run(self) -> int:
        done = 0
        while self.queue:
            self.queue.popleft()()
            done += 1
        return done


@pytest.fixture
def late():
    return Late()


@pytest.fixture
def job(late, tmp_path: Path):
    clock = Clock()
    cores = [core(number, 0, 0, tmp_path, clock, late) for number in (0, 1)]
    return JobWithValues(Servers(list(cores), cores, clock, tmp_path, False))


def test_a_token_cannot_be_guessed():
    """It is drawn by lot: no two servers give the same to their first chief."""
    assert len({core().open(CHIEF, 0, 0, True).token for _ in range(8)}) == 8


def test_work_of_an_old_job_is_thrown_away(job, late):
    """A round, or a restore, that was under way when another job began changes nothing in it."""
    (one,) = job.join(A)
    variable = job.variable(one, np.array(1))
    plan = job.approve(sum_into(variable), one)
    waiting = one.push(plan, [100])
    assert len(late.queue) == 1
    restoring = job.verbs[0].restore(one.session, "nowhere", Turn())
    job.begin()
    with pytest.raises(ServerLost, match="was restarted"):
        waiting.result(SOON)
    (again,) = job.join(A)
    fresh = job.variable(again, np.array(5))
    job.approve(sum_into(fresh), again)
    waiting = again.push(sum_into(fresh), [1])
    late.run()
    with pytest.raises(PSError):
        restoring.result(SOON)
    assert int(given(waiting.result(SOON), plan)[0]) == 1
    reading = job.verbs[0].pull(again.session, [fresh.id], 0)
    late.run()
    assert int(reading.result(SOON).payload.tensors([NUMBER])[0]) == 6


def test_a_read_is_of_its_moment(job, late):
    """Made ready late, it still is the value of the round that it names."""
    (one,) = job.join(A)
    variable = job.variable(one, np.array(1))
    plan = job.approve(sum_into(variable), one)
    reading = job.verbs[0].pull(one.session, [variable.id], -1)
    one.push(plan, [10])
    late.run()
    reply = reading.result(SOON)
    assert (reply.round, int(reply.payload.tensors([NUMBER])[0])) == (-1, 1)


def test_values_on_a_gpu_are_fetched_by_array_work(job, late, monkeypatch):
    """An answer that needs one comes when it is here: nobody waits for a device with the lock in hand."""
    (one,) = job.join(A)
    variables = [job.variable(one, np.array(value)) for value in (1, 5)]
    plan = job.approve(sum_into(variables[0]), one)
    monkeypatch.setattr(job.servers.cores[0].machine.job.store, "device", SimpleNamespace(gpu=0, get=np.copy))
    answer = one.push(plan, [3], want=tuple(variable.id for variable in variables))
    late.queue.popleft()()
    assert (answer.done(), len(late.queue)) == (False, 1)
    late.run()
    assert [int(value) for value in given(answer.result(SOON), plan, 0, variables)] == [3, 4, 5]


@pytest.mark.parametrize("server", [0, 1])
def test_signs_of_life_are_counted(job, server):
    """On every server: sessions that are opened, and heartbeats of those that have not ended; none of them, it ends."""
    tally, verb = job.servers.cores[server].tally, job.verbs[server]
    counted = [tally.signs]
    (one,) = job.join(A)
    counted.append(tally.signs)
    verb.heartbeat(one.session, -1, b"")
    counted.append(tally.signs)
    job.close([])
    with pytest.raises(Fenced):
        verb.heartbeat(one.session, -1, b"")
    counted.append(tally.signs)
    assert [after - before for before, after in pairwise(counted)] == [1, 1, 0]


def test_an_answer_may_ask_again(job, late):
    """Futures are answered without the lock, those that are refused under the lock as well: what is called by one may
    call the server."""
    one, two = job.join(A, B)
    plan, wrong = reduce_only(NUMBER), reduce_only(TensorSpec("int64", (2,)))
    for each in (plan, wrong):
        job.verbs[0].propose(one.session, each, "", None)
    asked = []
    one.push(plan, [1]).add_done_callback(lambda _: asked.append(job.verbs[0].status().round))
    two.push(plan, [1])
    job.append(Approved(plan))
    late.run()
    assert asked == [0]
    said = Contribution(one.session, one.generation, 1, wrong.id, (1.0,))
    refused = job.verbs[0].push(said, Payload.pack([np.zeros(1)]))
    refused.add_done_callback(lambda _: asked.append(job.verbs[0].status().log))
    job.append(Approved(wrong))
    assert isinstance(refused.exception(SOON), InvalidRequest)
    assert len(asked) == 2


def test_a_server_says_what_it_holds(job):
    (one,) = job.join(A)
    job.variable(one, np.zeros(1 << 17))
    assert summary(job.verbs[0].status()) == "1 variables, 1 MiB of them here, after no round on cpu"


def test_the_end_comes_once(job):
    """However often it is said; one that was let in a moment before, and creates a variable a moment after, undoes no
    end."""
    (one,) = job.join(A)
    job.append(Done())
    job.variable(one, np.zeros(3))
    for _ in range(2):
        job.verbs[0].leave(job.opened.session, "")
        job.servers.tick()
    assert job.verbs[0].status().over
    assert [one.done.done() for one in job.servers.cores] == [True, True]


def test_each_variable_is_asked_for_once(job):
    """A push or a read that asks twice is refused before it counts."""
    (one,) = job.join(A)
    variable = job.variable(one, np.array(1))
    plan = job.approve(sum_into(variable), one)
    with pytest.raises(InvalidRequest, match="twice"):
        one.push(plan, [1], want=(0, 0)).result(SOON)
    with pytest.raises(InvalidRequest, match="twice"):
        job.verbs[0].pull(one.session, [0, 0], -1).result(SOON)
    assert job.verbs[0].status().waiting == ()


VALUE = TensorSpec("float32", (2,))


class Told:
    """A machine of server 0, a job of two members, a variable, and a plan that adds to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kernels = Kernels(ServerDevice.parse("cpu"), 1)
        self.machine = Machine(ServerConfig(Task("ps", 0)), 100, self.kernels, lambda: self.now)
        opened = self.tell("open", OpenRequest(CHIEF, 0, 1, True), 7)[0]
        self.chief, self.token = opened.session, opened.token
        self.append(JobStarted(self.token, (100,)))
        self.a, self.b = (self.tell("open", OpenRequest(task, 1, 0, False), 0)[0].session for task in (A, B))
        self.close(Member(A, self.a, 1), Member(B, self.b, 1))
        self.variable = PlacedVariable(0, VariableSpec("v", VALUE), (0,))
        self.tell("create_batch", CreateBatchRequest(self.a, (self.variable,)))
        self.machine.job.store.initialize(0, np.zeros(2, "float32"))
        self.plan = self.approve(sum_into(self.variable, returned=False))

    def tell(self, name, *args):
        """Lets a stimulus in; returns its answer, and what is to be done."""
        answer, effects = self.machine.verb(name)(self.now, *args)
        return answer, [*effects, *self.machine.progress(self.now)]

    def append(self, *entries):
        prepared = {e.plan.id: PreparedPlan(e.plan, 0) for e in entries if isinstance(e, Approved)}
        entry = ApproveRequest(self.token, len(self.machine.job.log.entries), entries)
        return self.tell("approve", entry, prepared)[1]

    def close(self, *members):
        number = self.machine.job.rounds.generation.number + 1 if self.machine.job.rounds.generation else 1
        return self.append(GenerationClosed(Generation(number, members, start=Start(number, 0))))

    def approve(self, plan):
        self.append(Approved(plan))
        return plan

    def push(self, session, plan=None, round=0, came=None, generation=1, want=()):
        """A member pushes ones, of which as many bytes have come; returns its future, and what is to be done."""
        plan, future = plan or self.plan, Future()
        sent = payload(plan, 0, [np.ones(2)] * len(plan.reductions), (1.0,) * len(plan.reductions), ())
        if came is not None:
            sent = Payload((), sent.size)
        said = Contribution(session, generation, round, plan.id, (1.0,) * len(plan.reductions), want=want)
        return future, self.tell("push", said, sent, None, future)[1]

    def made(self, work):
        """The thread for arrays does its work; returns what is to be done then."""
        return self.tell("worked", work, work.call(*work.args), None)[1]


@pytest.fixture
def told():
    found = Told()
    yield found
    found.kernels.close()


def begin(told, incarnation):
    """Begins a job of three servers whose variables have copies; the first one is this, or one that was lost."""
    entry = JobStarted(told.token + 1, (incarnation, 201, 301), "", ("a:1", "b:2", "c:3"), (1, 2, 0))
    told.tell("approve", ApproveRequest(told.token, 0, [entry]), {})


def back(server, incarnation, round):
    generation = Generation(1, (Member(A, 1, 1),), "step", returns=Return(server, incarnation, 1, True, round))
    return GenerationClosed(generation)


def test_who_is_back_waits_for_those_who_do_not_know_yet(told):
    """It has read in the log that it is: the others read the same a little later, and must not send it away."""
    begin(told, 100)
    told.append(Gone(2, "was lost"))
    with pytest.raises(Unreachable, match="does not know yet"):
        told.tell("introduce", 2, 302)
    with pytest.raises(ServerGone, match="without this server"):
        told.tell("introduce", 2, 301)
    told.append(back(2, 302, 5))
    told.tell("introduce", 2, 302)
    with pytest.raises(ServerGone, match="another process"):
        told.tell("introduce", 2, 301)


def test_who_is_back_makes_no_round_of_before(told):
    """Others tell it of rounds that were under way when a third one was lost; all of them are over."""
    begin(told, 99)
    told.append(Gone(0, "was lost"), Gone(2, "was lost"))
    plan = reduce_only(VALUE)
    vote = Vote(told.machine.job.rounds.votes.job, 3, plan.id, 1, 0, frozenset({1}), None, 2)
    told.append(Approved(plan), GenerationClosed(Generation(1, (Member(A, 1, 1),), start=Start(1, 0))))
    told.tell("testify", 1, said_by_servers.Testimony(vote.job, 2, (vote,), 0))
    assert [open.round for open in told.machine.job.rounds.waiting()] == [3]
    told.append(back(0, 100, 5))
    assert not told.machine.job.rounds.waiting()
    assert told.machine.job.rounds.last == 4


def test_what_is_read_for_a_job_that_is_over_is_not_the_next_ones(told):
    """A server that is back reads its variables while another job begins, whose variables have the same numbers."""
    begin(told, 99)
    saving = replace(reduce_only(VALUE), snapshot=SnapshotOrder("x", (0, 1, 2), returns=1))
    told.append(Gone(0, "was lost"), Approved(saving), back(0, 100, 5))
    (reading,) = (effect for effect in told.append(Snapshotted(saving.id, 4, "x")) if isinstance(effect, Work))
    begin(told, 100)
    read = SimpleNamespace(arrays={0: np.ones(2, "float32")}, tables=[])
    told.tell("worked", reading, (read, lambda: None), None)
    assert not told.machine.job.store.initialized(0)


def kinds(effects):
    return [type(effect) for effect in effects]


def test_a_checkpoint_is_written_before_its_members_are_told(told):
    """The order of effects is the order in which they are carried out: the shard's work is queued first."""
    plan = told.approve(Plan(snapshot=SnapshotOrder("run/ckpt-1", (0,), 1)))
    told.push(told.a, plan)
    _, (step,) = told.push(told.b, plan)
    effects = told.made(step)
    assert kinds(effects) == [Run, Work, Reply, Reply, Run]
    assert (effects[1].queue, effects[1].asks is None) == ("files", False)


def test_a_heartbeat_without_a_pace_renews_the_lease_and_changes_nothing_else(told, monkeypatch):
    """It may come behind a newer one. Until a session has said what it does, one is refused."""
    clocks = []
    monkeypatch.setattr(told.machine.job.rounds.clocks, "tell", lambda *said: clocks.append(said))
    with pytest.raises(InvalidRequest, match="must send its first heartbeat over gRPC"):
        told.tell("heartbeat", HeartbeatRequest(told.a, -1, b"", None))
    told.tell("heartbeat", HeartbeatRequest(told.a, 5, told.plan.id, Pace(steps=3), 7))
    before = replace(told.machine.members._sessions[told.a])
    told.now += 1.0
    assert told.tell("heartbeat", HeartbeatRequest(told.a, -1, b"", None))[0] is False
    after = told.machine.members._sessions[told.a]
    assert (after.seen, replace(after, seen=before.seen)) == (told.now, before)
    assert clocks == [(told.a, 7)]


def test_what_is_refused_changes_nothing(told):
    before = told.machine.status(told.now)
    with pytest.raises(PSError):
        told.tell("create_batch", CreateBatchRequest(99, (told.variable,)))
    with pytest.raises(PSError):
        told.tell("watch", WatchRequest(99, 0, -1), Future())
    with pytest.raises(PSError):
        told.tell("approve", ApproveRequest(12345, 0, []), {})
    assert told.machine.status(told.now) == before
