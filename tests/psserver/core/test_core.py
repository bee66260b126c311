"""What the contract cannot see of a core: array work that is late, leases of its own clock, the order of answers."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from psserver.cli import summary
from psserver.config import ServerConfig
from psserver.core.core import Core
from pstesting.clock import Clock
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, MemoryLimit, PSError, ServerLost
from pswire.model.log import Approved, Done
from pswire.model.plan import Turn, VariableSpec
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import Payload
from tests.kit.rig import (
    CHIEF,
    SOON,
    WORKERS,
    Job,
    Servers,
    checkpoint,
    core,
    given,
    reduce_only,
    sum_into,
    together,
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
    return Job(Servers(list(cores), cores, clock, tmp_path, False))


def test_a_token_cannot_be_guessed():
    """It is drawn by lot: no two servers give the same to their first chief."""
    assert len({core().open(CHIEF, 0, 0, True).token for _ in range(8)}) == 8


def test_one_round_runs_at_a_time(job, late):
    """And its answers come when its work is done."""
    one, two = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER), one)
    futures = [one.push(plan, [1]), two.push(plan, [2])]
    assert len(late.queue) == 1
    assert not any(future.done() for future in futures)
    again = one.push(plan, [1])
    assert len(late.queue) == 1
    late.run()
    assert [int(given(reply, plan)[0]) for reply in together(*futures, again)] == [3, 3, 3]


def test_work_of_an_old_job_is_thrown_away(job, late):
    """A round that was under way when another job began changes nothing in it."""
    (one,) = job.join(A)
    variable = job.variable(one, np.array(1))
    plan = job.approve(sum_into(variable), one)
    waiting = one.push(plan, [100])
    assert len(late.queue) == 1
    job.begin()
    with pytest.raises(ServerLost, match="anew"):
        waiting.result(SOON)
    (again,) = job.join(A)
    fresh = job.variable(again, np.array(5))
    job.approve(sum_into(fresh), again)
    waiting = again.push(sum_into(fresh), [1])
    late.run()
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
    monkeypatch.setattr(job.servers.cores[0].machine.store, "device", SimpleNamespace(gpu=0, get=np.copy))
    answer = one.push(plan, [3], want=tuple(variable.id for variable in variables))
    late.queue.popleft()()
    assert (answer.done(), len(late.queue)) == (False, 1)
    late.run()
    assert [int(value) for value in given(answer.result(SOON), plan, 0, variables)] == [3, 4, 5]


def test_a_restore_of_an_old_job_is_thrown_away(job, late):
    """It does not reach the new job's variables."""
    (one,) = job.join(A)
    job.variable(one, np.array(1))
    waiting = job.verbs[0].restore(one.session, "nowhere", Turn())
    job.begin()
    late.run()
    with pytest.raises(PSError):
        waiting.result(SOON)


def test_a_plan_that_one_server_cannot_run_is_refused_there(tmp_path):
    """Servers may have different limits: the chief goes on, and whoever pushes is told why, by the server."""
    clock = Clock()
    cores = [core(0, 0, 0, tmp_path, clock), core(1, 0, 10_000, tmp_path, clock)]
    job = Job(Servers(list(cores), cores, clock, tmp_path, False))
    (one,) = job.join(A)
    plan = job.approve(reduce_only(TensorSpec("float64", (2000,)), server=1), one)
    with pytest.raises(MemoryLimit, match="a section needs") as told:
        one.push(plan, [np.zeros(2000)], server=1).result(SOON)
    assert told.value.task == "/job:ps/task:1"
    small = job.approve(reduce_only(NUMBER, server=1), one)
    one.round = 1
    assert int(given(one.push(small, [4], server=1).result(SOON), small, 1)[0]) == 4


def test_a_variable_that_one_server_cannot_hold_does_not_end_the_chief(tmp_path):
    """Its creator is told; the log goes on everywhere."""
    clock = Clock()
    cores = [core(0, 0, 0, tmp_path, clock), core(1, 0, 100, tmp_path, clock)]
    job = Job(Servers(list(cores), cores, clock, tmp_path, False))
    (one,) = job.join(A)
    spec = VariableSpec("large", TensorSpec("float64", (100,)))
    job.verbs[0].create(one.session, 0, -1, spec, (1,), None)
    job.append(Approved(reduce_only(NUMBER)))
    with pytest.raises(MemoryLimit) as told:
        job.verbs[1].create(one.session, 0, 0, spec, (1,), None)
    assert told.value.task == "/job:ps/task:1"
    assert cores[0].machine.log.entries == cores[1].machine.log.entries


def test_leases_end_by_ticks_alone(job):
    """A clock that nobody looks at ends nothing; one that was not looked at for long forgives."""
    one, other = job.join(A, B)
    job.servers.clock.now += 9_999.0
    job.verbs[0].beat(job.opened.session, -1, b"")
    job.servers.tick()
    job.verbs[0].beat(one.session, -1, b"")
    job.servers.spend(11, job.opened.session, other.session)
    with pytest.raises(Fenced, match="lease"):
        job.verbs[0].beat(one.session, -1, b"")


@pytest.mark.parametrize("server", [0, 1])
def test_signs_of_life_are_counted(job, server):
    """On every server: sessions that are opened, and beats of those that have not ended; none of them, it ends."""
    tally, verb = job.servers.cores[server].tally, job.verbs[server]
    counted = [tally.signs]
    (one,) = job.join(A)
    counted.append(tally.signs)
    verb.beat(one.session, -1, b"")
    counted.append(tally.signs)
    job.close([])
    with pytest.raises(Fenced):
        verb.beat(one.session, -1, b"")
    counted.append(tally.signs)
    assert [after - before for before, after in pairwise(counted)] == [1, 1, 0]


def test_only_server_0_ends_sessions(job):
    """The others have no leases; they learn of it by an epoch."""
    one, other = job.join(A, B)
    job.servers.spend(30, job.opened.session, other.session)
    job.verbs[1].beat(one.session, -1, b"")
    job.close([])
    with pytest.raises(Fenced, match="epoch"):
        job.verbs[1].beat(one.session, -1, b"")


def test_an_answer_may_ask_again(job, late):
    """Futures are answered without the lock: what is called by one may call the server."""
    one, two = job.join(A, B)
    plan = reduce_only(NUMBER)
    job.verbs[0].propose(one.session, plan, "", None)
    asked = []
    one.push(plan, [1]).add_done_callback(lambda _: asked.append(job.verbs[0].status().round))
    two.push(plan, [1])
    job.append(Approved(plan))
    late.run()
    assert asked == [0]


def test_a_refusal_may_ask_again(job):
    """Those that are given under the lock as well."""
    (one,) = job.join(A)
    plan = reduce_only(TensorSpec("int64", (2,)))
    job.verbs[0].propose(one.session, plan, "", None)
    asked = []
    said = Contribution(one.session, 1, 0, plan.id, (1.0,))
    refused = job.verbs[0].push(said, Payload.pack([np.zeros(1)]))
    refused.add_done_callback(lambda _: asked.append(job.verbs[0].status().log))
    job.append(Approved(plan))
    assert isinstance(refused.exception(SOON), InvalidRequest)
    assert asked


def test_a_server_says_what_it_holds(job):
    """On one line."""
    (one,) = job.join(A)
    job.variable(one, np.zeros(1 << 17))
    assert summary(job.verbs[0].status()) == "1 variables, 1 MiB of them here, after no round on cpu"


def test_the_end_comes_once(job):
    """However often it is said."""
    job.append(Done())
    for _ in range(2):
        job.verbs[0].leave(job.opened.session, "")
        job.servers.tick()
    assert [one.done.done() for one in job.servers.cores] == [True, True]


def test_who_comes_too_late_undoes_no_end(job):
    """One that was let in a moment before creates a variable a moment after."""
    (one,) = job.join(A)
    job.append(Done())
    job.variable(one, np.zeros(3))
    job.verbs[0].leave(job.opened.session, "")
    assert job.verbs[0].status().over
    assert [one.done.done() for one in job.servers.cores] == [True, True]


def test_closing_answers_everyone(job, late):
    """Whoever waits is told, whatever it waits for; what comes later is served by nobody."""
    one, _ = job.join(A, B)
    variable = job.variable(one, np.array(1))
    plan, saving = job.approve(reduce_only(NUMBER), one), job.approve(checkpoint("x", (0, 1)), one)
    waiting = [
        one.push(plan, [1]),
        job.verbs[0].pull(one.session, [variable.id], 7),
        job.verbs[0].watch(one.session, job.verbs[0].status().log, -1),
        job.verbs[0].snapshot(job.token, saving.id, ""),
    ]
    job.servers.cores[0].close()
    for future in waiting:
        with pytest.raises(ServerLost, match="server ends"):
            future.result(SOON)


def test_a_device_that_is_not_there_is_refused():
    """At the start, and not in the first round."""
    with pytest.raises(PSError):
        Core(ServerConfig(Task("ps", 0), device="gpu:4096"), 1, Clock(), Late())


def test_a_task_is_its_number(job):
    """For messages."""
    assert [one.task for one in job.servers.cores] == [Task("ps", 0), Task("ps", 1)]


def test_pushes_want_each_variable_once(job):
    """A message that asks twice is refused before it counts."""
    (one,) = job.join(A)
    variable = job.variable(one, np.array(1))
    plan = job.approve(sum_into(variable), one)
    with pytest.raises(InvalidRequest, match="twice"):
        one.push(plan, [1], want=(0, 0)).result(SOON)
    assert job.verbs[0].status().waiting == ()
