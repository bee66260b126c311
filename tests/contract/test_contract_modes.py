"""Rounds of one worker: of asynchronous workers, of variables that each updates alone, and with bounded staleness."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit.internals import WINDOW, Fenced, InvalidRequest, Plan, Position, RestoreCommit, WorkerProgress
from tests.kit.rig import SOON, WORKERS, Job, checkpoint, eventually, given, sum_into, together

A, B, C = WORKERS[:3]
HERE, THERE = (Position(0, 0, 3),), (Position(0, 2, 8),)
BOTH = (0, 1)


class Lone:
    """Two workers whose rounds are their own: `async`, or `alone` for a variable of a synchronous job. Args: job:
    where; mode: which."""

    def __init__(self, job: Job, mode: str) -> None:
        self.job, self.alone = job, mode == "alone"
        self.two = job.join(A, B, mode="sync" if self.alone else "async")

    def adder(self, value, servers=(0,)):
        """A variable, and a plan for it."""
        variable = self.job.variable(self.two[0], np.asarray(value), servers, alone=self.alone)
        return variable, self.job.approve(sum_into(variable), self.two[0])

    def push(self, worker, plan, values, **keys):
        """Makes a worker's next round; nobody else has to do anything."""
        return worker.make(plan, values, **keys, **({"alone": True} if self.alone else {}))

    def back(self, worker):
        """Has a worker begin again with round 0."""
        worker.own = worker.round = 0


@pytest.fixture(params=["async", "alone"])
def lone(job, request):
    """Two members of the job."""
    return Lone(job, request.param)


def common(job, *workers):
    """Makes a round of all; returns its variable."""
    shared, plan = job.adder(workers[0])
    together(*(worker.push(plan, [5]) for worker in workers))
    return shared


# ---- Answered at once ----


def test_a_push_is_answered_at_once(job, lone):
    """With what it has done alone; the other has not begun. Each has its own numbers."""
    one, other = lone.two
    variable, plan = lone.adder([1, 2])
    for number in range(3):
        reply = lone.push(other, plan, [[10, 20]], want=(variable.id,))
        assert (reply.round, reply.generation, reply.more, reply.excluded) == (number, job.generation, False, ())
        total, value = given(reply, plan, 0, (variable,))
        assert total.tolist() == [10, 20]
        assert value.tolist() == [10 * number + 11, 20 * number + 22]
    assert lone.push(one, plan, [[1, 1]], more=True).round == 0


def test_a_resend_is_answered_and_not_applied_twice(job, lone):
    """Also if others have made any number of rounds since, and whatever rounds of all there are; one that is long over
    is only refused."""
    one, other = lone.two
    variable, plan = lone.adder(0)
    if lone.alone:
        shared = common(job, one, other)  # round 0 as well
    lone.push(one, plan, [100])
    for _ in range(WINDOW + 2):
        lone.push(other, plan, [1])
    assert int(given(lone.push(one, plan, [100]), plan)[0]) == 100  # the next number: it counts
    lone.back(one)
    again = lone.push(one, plan, [100])
    assert (again.round, int(given(again, plan)[0])) == (0, 100)
    lone.back(other)
    with pytest.raises(InvalidRequest, match="round 0 is over"):
        lone.push(other, plan, [1])
    assert int(job.value(one, variable)) == 202 + WINDOW
    if lone.alone:
        assert int(job.value(one, shared, 0)) == 10


def test_who_is_fenced_adds_no_more(job, lone):
    """By the generation, on every server: what it sends late does not count, and the other is not held up. Who comes
    back begins anew, or goes on in its task's place: its rounds are no others' resends."""
    one, other = lone.two
    variable, plan = lone.adder(0, (1,))
    lone.push(one, plan, [1], server=1, positions=HERE)
    job.close([other.member])
    with pytest.raises(Fenced, match=r"was removed|new generation"):
        lone.push(one, plan, [100], server=1)
    lone.push(other, plan, [10], server=1)
    (back,) = job.join(A, mode=other.mode)
    if not lone.alone:
        (place, _) = job.verbs[1].status().places
        assert place == WorkerProgress(A, 0, HERE)
        with pytest.raises(Fenced, match="completed without this process"):
            lone.push(back, plan, [1], server=1)
        back.round = place.round + 1
    assert lone.push(back, plan, [1000], server=1).round == (0 if lone.alone else 1)
    assert int(job.value(back, variable)) == 1011


# ---- Asynchronous workers ----


def test_a_checkpoint_is_of_the_push_that_orders_it(job):
    """Its values and its positions; those of others come before or after it."""
    one, other = job.join(A, B, mode="async")
    adds = [job.adder(one, 0, (server,))[1] for server in BOTH]
    order = job.approve(checkpoint("run/ckpt-1", BOTH), one)

    def add_all():
        for server, plan in enumerate(adds):
            other.make(plan, [1], server=server, positions=THERE)

    add_all()
    one.push(order, server=0, positions=HERE).result(SOON)
    add_all()
    one.push(order, server=1, positions=HERE).result(SOON)
    add_all()
    shards = [server.snapshot(job.token, order.id, "").result(SOON) for server in job.verbs]
    assert [(shard.round, shard.positions) for shard in shards] == [(0, HERE)] * 2
    saved = [load_file(f"{shard.path}/{shard.file}") for shard in shards]
    assert [int(found[f"v{server}"]) for server, found in enumerate(saved)] == [1, 2]


# ---- Alone, beside rounds of all ----


@pytest.fixture
def apart(job: Job, two):
    """A variable that each updates alone, and the plan that adds to it."""
    variable = job.variable(two[0], np.array(0), alone=True)
    return variable, job.approve(sum_into(variable), two[0])


def test_rounds_of_all_do_not_count_them(job, two, apart):
    """Nor does one wait for the other. Whoever asks where the job stands is not told of them: the chief, a process that
    comes back, a reader after a round."""
    variable, plan = apart
    for _ in range(4):
        two[0].make(plan, [1], alone=True)
    status = job.verbs[0].status()
    assert (status.round, status.places, status.waiting) == (-1, (), ())
    shared, common = job.adder(two[0])
    waits = two[0].push(common, [1])
    assert two[0].make(plan, [1], alone=True).round == 4
    assert not waits.done()
    together(waits, two[1].push(common, [2]))
    assert int(job.value(two[0], shared, 0)) == 3
    assert job.verbs[0].status().round == 0
    reader = job.verbs[0].pull(two[0].session, [variable.id], 1)
    two[1].make(plan, [1], alone=True)
    assert not reader.done()


@pytest.mark.parametrize("what", ["another variable", "both", "a save", "a restore"])
def test_only_such_variables_may_be_updated_alone(job, two, apart, what):
    """Whatever a process says: others would compute with what is not of all of them. Nor may it save, or restore."""
    shared = job.variable(two[0], np.array(0))
    servers = tuple(range(len(job.verbs)))
    plan = {
        "another variable": sum_into(shared),
        "both": sum_into(apart[0], shared),
        "a save": checkpoint("run/ckpt-1", servers),
        "a restore": Plan(restore=RestoreCommit("run", servers)),
    }[what]
    job.approve(plan, two[0])
    with pytest.raises(InvalidRequest, match=r"created with ps.Async\(\)"):
        two[0].push(plan, [1] * len(plan.reductions), alone=True).result(SOON)
    common = job.approve(sum_into(shared, returned=False), two[0])
    together(*(worker.push(common, [1]) for worker in two))
    assert int(job.value(two[0], shared, 0)) == 2


# ---- Bounded staleness: answered when nobody is more than k rounds behind ----


def sent(worker, plan, **keys):
    """Makes its next round; returns the answer to come. Calls overtake each other on the way: who does not wait for the
    answer of one says in the next which was before it."""
    future = worker.push(plan, [1], **keys)
    worker.round += 1
    return future


def applied(job, server=0):
    """How many rounds are over on a server."""
    return job.verbs[server].status().round + 1


def held(job, server=0):
    """The rounds whose answers wait, with the tasks that they wait for."""
    return [(one.round, one.missing) for one in job.verbs[server].status().waiting]


def ahead(job, worker, **keys):
    """A worker is two rounds ahead, so that the answer of the second is held: a variable, its plan, and that answer."""
    variable, plan = job.adder(worker)
    assert sent(worker, plan).result(SOON).round == 0
    late = sent(worker, plan, **keys)
    eventually(lambda: applied(job) == 2)
    assert held(job) == [(1, (B,))]
    assert not late.done()
    return variable, plan, late


def test_an_answer_is_held_and_brings_what_is_new(job):
    """It was applied at once, says so in the status, and comes with the values of when it goes. A resend waits as well,
    and was applied once."""
    one, other = job.join(A, B, mode="bounded", k=1)
    variable, plan, late = ahead(job, one, want=(0,))
    assert job.verbs[0].status().gap == 2
    one.round -= 1
    again = sent(one, plan, want=(0,))
    assert int(job.value(other, variable)) == 2
    assert not again.done()
    sent(other, plan).result(SOON)
    for answer in (late, again):
        reply = answer.result(SOON)
        assert (reply.round, [int(each) for each in given(reply, plan, 0, (variable,))]) == (1, [1, 3])
    assert held(job) == []
    assert job.verbs[0].status().gap == 1


def test_who_does_not_wait_is_applied_no_further(job):
    """A client that sends on without its answers is held at the same place, whatever it does."""
    one, other = job.join(A, B, mode="bounded", k=1)
    variable, plan = job.adder(one)
    futures = [sent(one, plan, previous=number - 1) for number in range(4)]
    eventually(lambda: applied(job) == 2)
    sent(other, plan)
    eventually(lambda: applied(job) == 4)
    assert int(job.value(other, variable)) == 4
    assert futures[1].result(SOON).round == 1
    assert not futures[2].done()
    for number in (1, 2):
        sent(other, plan, previous=number - 1)
    futures[3].result(SOON)
    assert int(job.value(other, variable)) == 7
