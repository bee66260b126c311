"""Rounds of one worker beside those of all: of variables that each worker updates alone, in a synchronous job."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit.internals import WINDOW, Fenced, InvalidRequest, Plan, RestoreCommit
from tests.kit.rig import SOON, WORKERS, Job, checkpoint, eventually, given, sgd, sum_into, together

A, B, C = WORKERS[:3]


@pytest.fixture
def apart(job: Job, two):
    """A variable that each updates alone, and the plan that adds to it."""
    variable = job.variable(two[0], np.array(0), alone=True)
    return variable, job.approve(sum_into(variable), two[0])


def push(worker, plan, values, server=0, **keys):
    """Makes its next round of its own; nobody else has to do anything."""
    reply = worker.push(plan, values, server=server, alone=True, **keys).result(SOON)
    worker.own += 1
    return reply


def test_a_round_of_its_own_is_answered_at_once(job, two, apart):
    """While one member is missing in the round of all; each has its own numbers."""
    variable, plan = apart
    shared = job.variable(two[0], np.array(0))
    common = job.approve(sum_into(shared), two[0])
    waits = two[0].push(common, [1])
    for number in range(3):
        reply = push(two[0], plan, [10], want=(variable.id,))
        assert (reply.round, reply.epoch, reply.left_out, reply.more) == (number, job.epoch, (), False)
        assert [int(each) for each in given(reply, plan, 0, (variable,))] == [10, 10 * (number + 1)]
    assert push(two[1], plan, [1000]).round == 0
    assert not waits.done()
    together(waits, two[1].push(common, [2]))
    assert int(job.value(two[0], shared, 0)) == 3
    assert int(job.value(two[0], variable)) == 1030


def test_rounds_of_all_do_not_count_them(job, two, apart):
    """Nor does whoever asks where the job stands: the chief, a process that comes back, a reader after a round."""
    variable, plan = apart
    for _ in range(4):
        push(two[0], plan, [1])
    status = job.verbs[0].status()
    assert (status.round, status.places, status.waiting) == (-1, (), ())
    shared = job.variable(two[0], np.array(0))
    common = job.approve(sum_into(shared), two[0])
    together(*(worker.push(common, [1]) for worker in two))
    assert job.verbs[0].status().round == 0
    reader = job.verbs[0].pull(two[0].session, [variable.id], 1)
    push(two[1], plan, [1])
    assert not reader.done()


def test_one_that_is_half_there_is_nobodys_concern(job, two, apart):
    """What waits is told to the chief, who lets go of whoever holds a round of all up: this one holds nobody up."""
    unknown = sum_into(apart[0], returned=False)
    waits = two[0].push(unknown, [1], alone=True)  # a plan that nobody has approved yet
    assert job.verbs[0].status().waiting == ()
    job.approve(unknown, two[0])
    assert waits.result(SOON).round == 0


def test_a_resend_is_answered_and_not_applied_twice(job, two, apart):
    """By its session, its strand and its number, whatever the rounds of all are; one that is long over is refused."""
    variable, plan = apart
    shared = job.variable(two[0], np.array(0))
    common = job.approve(sum_into(shared), two[0])
    together(*(worker.push(common, [5]) for worker in two))  # round 0 as well
    push(two[0], plan, [100])
    for _ in range(WINDOW + 2):
        push(two[1], plan, [1])
    again = two[0].push(plan, [100], alone=True).result(SOON)  # the next number: it counts
    assert int(given(again, plan)[0]) == 100
    two[0].own = 0
    again = two[0].push(plan, [100], alone=True).result(SOON)
    assert (again.round, int(given(again, plan)[0])) == (0, 100)
    two[1].own = 0
    with pytest.raises(InvalidRequest, match="round 0 is over"):
        two[1].push(plan, [1], alone=True).result(SOON)
    assert int(job.value(two[0], variable)) == 202 + WINDOW
    assert int(job.value(two[0], shared, 0)) == 10


@pytest.mark.parametrize("mode", ["sync", "whole"])
def test_one_round_of_several_servers_asks_nobody(job, mode):
    """Each server applies it when it comes, also where rounds of all are whole; a mean is over its own weights."""
    two = job.join(A, B, mode=mode)
    variables = [job.variable(two[0], np.array([10.0, 20.0]), (server,), alone=True) for server in (0, 1)]
    plans = [job.approve(sgd(variable), two[0]) for variable in variables]
    both = job.approve(sum_into(*variables), two[0])
    first = two[0].push(both, [[1.0, 1.0]] * 2, server=0, alone=True)
    assert first.result(SOON).round == 0
    assert job.value(two[1], variables[1]).tolist() == [10.0, 20.0]
    two[0].push(both, [[1.0, 1.0]] * 2, server=1, alone=True).result(SOON)
    two[0].own += 1
    for server, plan in enumerate(plans):
        push(two[1], plan, [[6.0, 9.0]], server, weights=(3.0,), operands=[0.5])
    assert [job.value(two[0], v).tolist() for v in variables] == [[10.0, 19.5]] * 2


def test_who_is_fenced_adds_no_more(job, two, apart):
    """What it had sent whole counts, and nothing that comes later; who comes back begins anew, with number 0."""
    variable, plan = apart
    late = job.verbs[0]
    push(two[0], plan, [1])
    waits = sum_into(variable, returned=False)
    two[0].push(waits, [10], alone=True, previous=0)
    strands = job.servers.cores[0].machine.rounds.strands  # status does not tell what one has sent for itself
    eventually(lambda: any(strand.open for key, strand in [*strands.items()] if key is not None))
    job.close([two[1].member])
    with pytest.raises(Fenced, match="was ended"):
        two[0].push(plan, [100], alone=True).result(SOON)
    job.approve(waits, two[1])
    eventually(lambda: int(job.value(two[1], variable)) == 11)
    (back,) = job.join(A, mode=two[1].mode)
    assert push(back, plan, [1000]).round == 0
    push(two[1], plan, [1000])
    assert int(job.value(back, variable)) == 2011
    assert late.status().round == -1


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


def test_a_checkpoint_has_what_was_added_before_it(job, two, apart):
    """Of rounds of all, whose order it is, and of each member's own that were answered before it came to the save."""
    variable, plan = apart
    push(two[0], plan, [1])
    push(two[1], plan, [10])
    servers = tuple(range(len(job.verbs)))
    order = job.approve(checkpoint("run/ckpt-1", servers), two[0])
    pushed = [two[0].push(order, server=server) for server in servers]
    push(two[1], plan, [100])  # it is not there yet
    together(*pushed, *(two[1].push(order, server=server) for server in servers))
    push(two[1], plan, [1000])
    shards = [server.snapshot(job.token, order.id, "").result(SOON) for server in job.verbs]
    saved = load_file(job.servers.root / shards[0].path / shards[0].file)
    assert int(saved[variable.spec.name]) == 111
    assert int(job.value(two[0], variable)) == 1111
