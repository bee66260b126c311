"""Asynchronous workers: each push is a round of its sender alone, applied once, whole and at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit.internals import WINDOW, ConfigError, Fenced, InvalidRequest, Position, TensorSpec, WorkerProgress
from tests.kit.rig import SOON, WORKERS, Job, Worker, checkpoint, given, reduce_only, sgd, sum_into

A, B, C = WORKERS[:3]
HERE, THERE = (Position(0, 0, 3),), (Position(0, 2, 8),)


@pytest.fixture
def two(job: Job):
    """Two members of the job."""
    return job.join(A, B, mode="async")


def push(worker, plan, values=(), **keys):
    """Makes its next round; nobody else has to do anything."""
    reply = worker.push(plan, values, **keys).result(SOON)
    worker.round += 1
    return reply


def test_a_push_is_answered_at_once(job, two):
    """With what it has done alone; the other has not begun."""
    variable = job.variable(two[0], np.array([1, 2]))
    plan = job.approve(sum_into(variable), two[0])
    for number in range(3):
        reply = push(two[1], plan, [[10, 20]], want=(variable.id,))
        assert (reply.round, reply.epoch, reply.more, reply.left_out) == (number, job.epoch, False, ())
        total, value = given(reply, plan, 0, (variable,))
        assert total.tolist() == [10, 20]
        assert value.tolist() == [10 * number + 11, 20 * number + 22]


def test_each_counts_its_own_rounds(job, two):
    """In any order; the status counts all of one server."""
    variable = job.variable(two[0], np.array(0))
    plan = job.approve(sum_into(variable), two[0])
    for worker in (0, 1, 1, 1, 0):
        push(two[worker], plan, [1], positions=(HERE, THERE)[worker])
    status = job.verbs[0].status()
    assert status.round == 4
    assert status.places == (WorkerProgress(A, 1, HERE), WorkerProgress(B, 2, THERE))
    assert job.verbs[1].status().places == ()
    assert int(job.value(two[0], variable)) == 5


def test_a_resend_is_answered_and_not_applied_twice(job, two):
    """Also if others have made any number of rounds since; one that is long over is only refused."""
    variable = job.variable(two[0], np.array(0))
    plan = job.approve(sum_into(variable), two[0])
    push(two[0], plan, [100])
    for _ in range(WINDOW + 2):
        push(two[1], plan, [1])
    two[0].round = 0
    again = two[0].push(plan, [100]).result(SOON)
    assert (again.round, int(given(again, plan)[0])) == (0, 100)
    two[1].round = 0
    with pytest.raises(InvalidRequest, match="round 0 is over"):
        two[1].push(plan, [1]).result(SOON)
    assert int(job.value(two[0], variable)) == 102 + WINDOW


def test_a_mean_is_over_the_weights_of_the_push(job, two):
    """Other workers' replicas and operands do not count."""
    variable = job.variable(two[0], np.array([10.0, 20.0]))
    plan = job.approve(sgd(variable), two[0])
    for worker, rate in ((two[0], 0.5), (two[1], 0.25)):
        reply = push(worker, plan, [[6.0, 9.0]], weights=(3.0,), operands=[rate])
    assert given(reply, plan)[0].tolist() == [8.5, 17.75]


def test_more_is_ones_own(job, two):
    """Whether the other goes on is nothing to it."""
    plan = job.approve(reduce_only(TensorSpec("int64", ())), two[0])
    assert push(two[0], plan, [1], more=True).more
    assert not push(two[1], plan, [1], more=False).more


def test_pushes_of_all_at_once(job, two):
    """From threads: integer-valued, exactly the sum; each sees its own in what comes back."""
    variable = job.variable(two[0], np.array(0))
    plan = job.approve(sum_into(variable), two[0])

    def run(worker, number):
        for turn in range(1, 41):
            (_, value) = given(push(worker, plan, [number], want=(variable.id,)), plan, 0, (variable,))
            assert int(value) >= turn * number

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, worker, 1000**place) for place, worker in enumerate(two)]:
            done.result(SOON)
    assert int(job.value(two[0], variable)) == 40 * 1001
    assert job.verbs[0].status().round == 79


def test_a_dead_worker_is_fenced(job, two):
    """By the epoch, on every server: what it sent late does not count, and the other is not held up."""
    variable = job.variable(two[0], np.array(0), (1,))
    plan = job.approve(sum_into(variable), two[0])
    push(two[0], plan, [1], server=1, positions=HERE)
    job.close([two[1].member])
    with pytest.raises(Fenced, match="new epoch"):
        two[0].push(plan, [100], server=1).result(SOON)
    push(two[1], plan, [10], server=1)
    assert int(job.value(two[1], variable)) == 11


def test_who_comes_back_goes_on(job, two):
    """In its task's place; its rounds are no others' resends."""
    variable = job.variable(two[0], np.array(0))
    plan = job.approve(sum_into(variable), two[0])
    push(two[0], plan, [1], positions=HERE)
    job.close([two[1].member])
    (place,) = job.verbs[0].status().places
    assert place == WorkerProgress(A, 0, HERE)
    (back,) = job.join(A, mode="async")
    with pytest.raises(Fenced, match="made without this session"):
        back.push(plan, [1]).result(SOON)
    back.round = place.round + 1
    push(back, plan, [1])
    assert int(job.value(back, variable)) == 2


def test_all_have_one_mode(job, two):
    """Who comes with another is told both, and begins no session."""
    for server in job.verbs[:1]:
        with pytest.raises(
            ConfigError, match=r"worker/task:2 runs with ps.Sync\(whole_rounds=False\).*worker/task:0 with ps.Async\(\)"
        ):
            server.open(C, 1, 0, False, "sync")
    assert job.open(C, mode="async").session > two[1].session


def test_a_checkpoint_is_of_the_push_that_orders_it(job, two):
    """Its values and its positions; those of others come before or after it."""
    one, other = two
    variables = [job.variable(one, np.array(0), (server,)) for server in (0, 1)]
    adds = [job.approve(sum_into(variable), one) for variable in variables]
    order = job.approve(checkpoint("run/ckpt-1", (0, 1)), one)

    def add_all(worker: Worker):
        for server, plan in enumerate(adds):
            push(worker, plan, [1], server=server, positions=THERE)

    add_all(other)
    one.push(order, server=0, positions=HERE).result(SOON)
    add_all(other)
    one.push(order, server=1, positions=HERE).result(SOON)
    add_all(other)
    shards = [server.snapshot(job.token, order.id, "").result(SOON) for server in job.verbs]
    assert [(shard.round, shard.positions) for shard in shards] == [(0, HERE)] * 2
    saved = [load_file(f"{shard.path}/{shard.file}") for shard in shards]
    assert [int(found[f"v{server}"]) for server, found in enumerate(saved)] == [1, 2]
