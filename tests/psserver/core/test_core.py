"""A server as a state machine, and its core: array work that is late, leases of its own clock, the order of answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from psserver.cli import summary
from psserver.effects import Work
from psserver.rounds.open_rounds import open_rounds
from pstesting.clock import Clock
from pswire.api import ApproveRequest, Contribution
from pswire.errors import Fenced, InvalidRequest, MemoryLimit, PSError, ServerGone, ServerLost, Unreachable
from pswire.model import log
from pswire.model.plan import SnapshotOrder, Turn
from pswire.model.program import Node
from pswire.model.status import Pace
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from pswire.servers import votes
from tests.kit import rig

A, B = rig.WORKERS[:2]
NUMBER = TensorSpec("int64", ())


@pytest.fixture
def late():
    return rig.Deferred()


@pytest.fixture
def job(late, tmp_path: Path):
    clock = Clock()
    cores = [rig.core(number, 0, 0, tmp_path, clock, late) for number in (0, 1)]
    return rig.JobWithValues(rig.Servers(list(cores), cores, clock, tmp_path, False))


def test_a_token_cannot_be_guessed():
    """It is drawn by lot: no two servers give the same to their first chief."""
    assert len({rig.core().open(rig.CHIEF, 0, 0, True).token for _ in range(8)}) == 8


def test_work_of_an_old_job_is_thrown_away(job, late):
    """A round, or a restore, that was under way when another job began changes nothing in it."""
    (one,) = job.join(A)
    _, plan = job.adder(one, 1)
    waiting = one.push(plan, [100])
    assert len(late.queue) == 1
    restoring = job.verbs[0].restore(one.session, "nowhere", Turn())
    job.begin()
    with pytest.raises(ServerLost, match="was restarted"):
        waiting.result(rig.SOON)
    (again,) = job.join(A)
    fresh, plan = job.adder(again, 5)
    waiting = again.push(plan, [1])
    late.run()
    with pytest.raises(PSError):
        restoring.result(rig.SOON)
    assert int(rig.given(waiting.result(rig.SOON), plan)[0]) == 1
    reading = job.verbs[0].pull(again.session, [fresh.id], 0)
    late.run()
    assert int(reading.result(rig.SOON).payload.tensors([NUMBER])[0]) == 6


def test_a_read_is_of_its_moment(job, late):
    """Made ready late, it still is the value of the round that it names."""
    (one,) = job.join(A)
    variable, plan = job.adder(one, 1)
    reading = job.verbs[0].pull(one.session, [variable.id], -1)
    one.push(plan, [10])
    late.run()
    reply = reading.result(rig.SOON)
    assert (reply.round, int(reply.payload.tensors([NUMBER])[0])) == (-1, 1)


def test_values_on_a_gpu_are_fetched_by_array_work(job, late, monkeypatch):
    """An answer that needs one comes when it is here: nobody waits for a device with the lock in hand."""
    (one,) = job.join(A)
    variables = [job.variable(one, np.array(value)) for value in (1, 5)]
    plan = job.approve(rig.sum_into(variables[0]), one)
    monkeypatch.setattr(job.servers.cores[0].machine.job.store, "device", SimpleNamespace(gpu=0, get=np.copy))
    answer = one.push(plan, [3], want=tuple(variable.id for variable in variables))
    late.queue.popleft()()
    assert (answer.done(), len(late.queue)) == (False, 1)
    late.run()
    assert [int(value) for value in rig.given(answer.result(rig.SOON), plan, 0, variables)] == [3, 4, 5]


def test_leases_end_by_ticks_alone(job):
    """Time in which a server stood still counts for none: it could hear nobody. An end is news for who watches. The
    other servers have no leases: they learn by a generation who has ended."""
    one, other = job.join(A, B)
    first, chief = job.verbs[0], job.opened.session
    version = first.watch(chief, 0, 0).result(rig.SOON).version
    news = first.watch(chief, first.status().log, version)
    job.servers.spend(8, chief, other.session)
    job.servers.clock.now += 9_999.0
    job.servers.tick()
    job.servers.spend(1, chief, other.session)
    assert not news.done()
    job.servers.spend(3, chief, other.session)
    assert news.result(0).version > version
    with pytest.raises(Fenced, match="sent no heartbeat"):
        first.heartbeat(one.session, -1, b"")
    job.verbs[1].heartbeat(one.session, -1, b"")
    job.close([])
    with pytest.raises(Fenced, match="generation"):
        job.verbs[1].heartbeat(one.session, -1, b"")


@pytest.mark.parametrize("server", [0, 1])
def test_signs_of_life_are_counted(job, server):
    """On every server: sessions that are opened, and heartbeats of those that have not ended; none of them, it ends."""
    tally, verb = job.servers.cores[server].tally, job.verbs[server]
    before = tally.signs
    (one,) = job.join(A)
    assert tally.signs == before + 1
    verb.heartbeat(one.session, -1, b"")
    assert tally.signs == before + 2
    job.close([])
    with pytest.raises(Fenced):
        verb.heartbeat(one.session, -1, b"")
    assert tally.signs == before + 2


def test_an_answer_may_ask_again(job, late):
    """Futures are answered without the lock, those that are refused under the lock as well: what is called by one may
    call the server."""
    one, two = job.join(A, B)
    plan, wrong = rig.reduce_only(NUMBER), rig.reduce_only(TensorSpec("int64", (2,)))
    for each in (plan, wrong):
        job.verbs[0].propose(one.session, each, "", None)
    asked = []
    one.push(plan, [1]).add_done_callback(lambda _: asked.append(job.verbs[0].status().round))
    two.push(plan, [1])
    job.append(log.Approved(plan))
    late.run()
    assert asked == [0]
    said = Contribution(one.session, one.generation, 1, wrong.id, (1.0,))
    refused = job.verbs[0].push(said, Payload.pack([np.zeros(1)]))
    refused.add_done_callback(lambda _: asked.append(job.verbs[0].status().log))
    job.append(log.Approved(wrong))
    assert isinstance(refused.exception(rig.SOON), InvalidRequest)
    assert len(asked) == 2


def test_closing_answers_everyone(job, late):
    """Whoever waits is told, whatever it waits for: a round, a read, news, a checkpoint."""
    one, _ = job.join(A, B)
    variable = job.variable(one, np.array(1))
    plan, saving = job.approve(rig.reduce_only(NUMBER), one), job.approve(rig.checkpoint("x", (0, 1)), one)
    waiting = [
        one.push(plan, [1]),
        job.verbs[0].pull(one.session, [variable.id], 7),
        job.verbs[0].watch(one.session, job.verbs[0].status().log, -1),
        job.verbs[0].snapshot(job.token, saving.id, ""),
    ]
    assert not any(future.done() for future in waiting)
    job.servers.cores[0].close()
    for future in waiting:
        with pytest.raises(ServerLost, match="server is shutting down"):
            future.result(rig.SOON)


def test_a_server_says_what_it_holds(job):
    (one,) = job.join(A)
    job.variable(one, np.zeros(1 << 17))
    assert summary(job.verbs[0].status()) == "1 variables, 1 MiB of them here, after no round on cpu"


def test_the_end_comes_once(job):
    """However often it is said; one that was let in a moment before, and creates a variable a moment after, undoes no
    end."""
    (one,) = job.join(A)
    job.append(log.Done())
    job.variable(one, np.zeros(3))
    for _ in range(2):
        job.verbs[0].leave(job.opened.session, "")
        job.servers.tick()
    assert job.verbs[0].status().over
    assert [one.done.done() for one in job.servers.cores] == [True, True]


def test_each_variable_is_asked_for_once(job):
    """A push or a read that asks twice is refused before it counts."""
    (one,) = job.join(A)
    _, plan = job.adder(one, 1)
    with pytest.raises(InvalidRequest, match="twice"):
        one.push(plan, [1], want=(0, 0)).result(rig.SOON)
    with pytest.raises(InvalidRequest, match="twice"):
        job.verbs[0].pull(one.session, [0, 0], -1).result(rig.SOON)
    assert job.verbs[0].status().waiting == ()


def test_a_plan_needs_no_more_memory_than_there_is(tmp_path):
    """What a program needs on the way counts, though the variable itself would fit."""
    with rig.serving("core", 1, tmp_path, memory_limit=4096) as servers:
        job = rig.Job(servers)
        (one,) = job.join(A)
        variable = job.variable(one, np.zeros(8))
        small = rig.sum_into(variable)
        wide = Node("broadcast_to", (1,), (("shape", (64, 8)),))
        outer = (wide, Node("multiply", (0, 2)), Node("sum", (3,), (("axis", 0),)))
        large = replace(small, programs=(replace(small.programs[0], nodes=outer, assigns=((0, 4),)),))
        with pytest.raises(MemoryLimit, match=r"a compiled step needs .* limit is 4 KiB") as told:
            job.verbs[0].propose(one.session, large, "", None)
        assert told.value.task == "/job:ps/task:0"
        job.verbs[0].propose(one.session, small, "", None)


def test_a_heartbeat_without_a_pace_renews_the_lease_and_changes_nothing_else(job, monkeypatch):
    """It may come behind a newer one. Until a session has said what it does, one is refused."""
    (one,) = job.join(A)
    plan, server, clocks = job.approve(rig.reduce_only(NUMBER), one), job.servers.cores[0], []
    monkeypatch.setattr(server.machine.job.rounds.clocks, "tell", lambda *said: clocks.append(said))
    with pytest.raises(InvalidRequest, match="must send its first heartbeat over gRPC"):
        server.heartbeat(one.session, -1, b"", None)
    server.heartbeat(one.session, 5, plan.id, Pace(steps=3), 7)
    before = replace(server.machine.members._sessions[one.session])
    job.servers.clock.now += 1.0
    assert server.heartbeat(one.session, -1, b"", None) is False
    after = server.machine.members._sessions[one.session]
    assert (after.seen, replace(after, seen=before.seen)) == (job.servers.clock.now, before)
    assert clocks == [(one.session, 7)]


# ---- A server that is back ----

VALUE = TensorSpec("float32", (2,))


def begin(server, incarnation):
    """Begins a job of three servers whose variables have copies; the first one is this, or one that was lost."""
    addresses = ("a:1", "b:2", "c:3")
    server.approve(
        server.machine.members.token, 0, [log.JobStarted(7, (incarnation, 201, 301), "", addresses, (1, 2, 0))]
    )


def append(server, *entries):
    server.approve(server.machine.members.token, server.status().log, entries)


def back(server, incarnation, round):
    generation = log.Generation(
        1, (log.Member(A, 1, 1),), "step", returns=log.Return(server, incarnation, 1, True, round)
    )
    return log.GenerationClosed(generation)


@pytest.fixture
def server():
    """Server 0, the 100th process of it, and a chief."""
    found = rig.core()
    found.open(rig.CHIEF, 0, 0, True)
    return found


def test_who_is_back_waits_for_those_who_do_not_know_yet(server):
    """It has read in the log that it is: the others read the same a little later, and must not send it away."""
    begin(server, 100)
    append(server, log.Gone(2, "was lost"))
    with pytest.raises(Unreachable, match="does not know yet"):
        server.introduce(2, 302)
    with pytest.raises(ServerGone, match="without this server"):
        server.introduce(2, 301)
    append(server, back(2, 302, 5))
    server.introduce(2, 302)
    with pytest.raises(ServerGone, match="another process"):
        server.introduce(2, 301)


def test_who_is_back_makes_no_round_of_before(server):
    """Others tell it of rounds that were under way when a third one was lost; all of them are over."""
    begin(server, 99)
    append(server, log.Gone(0, "was lost"), log.Gone(2, "was lost"))
    plan, rounds = rig.reduce_only(VALUE), server.machine.job.rounds
    vote = votes.Vote(rounds.votes.job, 3, plan.id, 1, 0, frozenset({1}), None, 2)
    append(
        server,
        log.Approved(plan),
        log.GenerationClosed(log.Generation(1, (log.Member(A, 1, 1),), start=log.Start(1, 0))),
    )
    server.hear(1, votes.Testimony(vote.job, 2, (vote,), 0))
    assert [open.round for open in open_rounds(rounds)] == [3]
    append(server, back(0, 100, 5))
    assert not open_rounds(rounds)
    assert rounds.last == 4


def test_what_is_read_for_a_job_that_is_over_is_not_the_next_ones(server):
    """A server that is back reads its variables while another job begins, whose variables have the same numbers."""
    begin(server, 99)
    saving = replace(rig.reduce_only(VALUE), snapshot=SnapshotOrder("x", (0, 1, 2), returns=1))
    append(server, log.Gone(0, "was lost"), log.Approved(saving), back(0, 100, 5))
    machine = server.machine
    asked = ApproveRequest(machine.members.token, server.status().log, [log.Snapshotted(saving.id, 4, "x")])
    effects = [*machine.approve(0.0, asked, {})[1], *machine.progress(0.0)]
    (reading,) = (effect for effect in effects if isinstance(effect, Work))
    begin(server, 100)
    read = SimpleNamespace(arrays={0: np.ones(2, "float32")}, tables=[])
    machine.worked(0.0, reading, (read, lambda: None), None)
    assert not machine.job.store.initialized(0)
