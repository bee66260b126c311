"""Bounded staleness: pushes are applied at once, and answered when nobody is more than k rounds behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from tests.kit.cases import search
from tests.kit.internals import RESTS, ConfigError, Fenced
from tests.kit.rig import SOON, WORKERS, Job, checkpoint, eventually, given, serving, sum_into

A, B, C = WORKERS[:3]


@pytest.fixture
def two(job: Job):
    """Two members of the job, of which one may be a round ahead."""
    return job.join(A, B, mode="bounded", k=1)


def push(worker, plan, values=(), **keys):
    """Makes its next round; returns the answer to come.

    Calls overtake each other on the way: who does not wait for the answer of one says in the next which was before it.
    """
    future = worker.push(plan, values, **keys)
    worker.round += 1
    return future


def applied(job, server=0):
    """How many rounds are over on a server."""
    return job.verbs[server].status().round + 1


def adder(job, worker, servers=(0,)):
    """A variable, and a plan that adds to it."""
    variable = job.variable(worker, np.array(0), servers)
    return variable, job.approve(sum_into(variable), worker)


def held(job, server=0):
    """The rounds whose answers wait, with the tasks that they wait for."""
    return [(one.round, one.missing) for one in job.verbs[server].status().waiting]


def test_an_answer_is_held_and_brings_what_is_new(job, two):
    """It was applied at once, says so in the status, and comes with the values of when it goes."""
    one, other = two
    variable, plan = adder(job, one)
    assert push(one, plan, [1]).result(SOON).round == 0
    late = push(one, plan, [1], want=(variable.id,))
    eventually(lambda: applied(job) == 2)
    assert held(job) == [(1, (B,))]
    assert job.verbs[0].status().gap == 2
    assert int(job.value(other, variable)) == 2
    assert not late.done()
    push(other, plan, [100]).result(SOON)
    total, value = given(late.result(SOON), plan, 0, (variable,))
    assert (int(total), int(value)) == (1, 102)
    assert held(job) == []
    assert job.verbs[0].status().gap == 1


def test_a_resend_of_a_held_answer_waits_as_well(job, two):
    """Both come when it may go, and it was applied once."""
    one, other = two
    variable, plan = adder(job, one)
    push(one, plan, [1]).result(SOON)
    first = one.push(plan, [1])
    eventually(lambda: applied(job) == 2)
    again = one.push(plan, [1])
    assert not again.done()
    push(other, plan, [1]).result(SOON)
    assert [answer.result(SOON).round for answer in (first, again)] == [1, 1]
    assert int(job.value(one, variable)) == 3


def test_who_does_not_wait_is_applied_no_further(job, two):
    """A client that sends on without its answers is held at the same place, whatever it does."""
    one, other = two
    variable, plan = adder(job, one)
    futures = [push(one, plan, [1], previous=number - 1) for number in range(4)]
    eventually(lambda: applied(job) == 2)
    push(other, plan, [100])
    eventually(lambda: applied(job) == 4)
    assert int(job.value(other, variable)) == 103
    assert futures[1].result(SOON).round == 1
    assert not futures[2].done()
    for number in (1, 2):
        push(other, plan, [100], previous=number - 1)
    futures[3].result(SOON)
    assert int(job.value(other, variable)) == 304


@pytest.mark.parametrize("how", ["leave", "epoch"])
def test_who_goes_releases_the_others(job, two, how):
    """A clean farewell at server 0 at once, and on all servers with the epoch that leaves it out."""
    one, other = two
    _, plan = adder(job, one)
    push(one, plan, [1]).result(SOON)
    late = push(one, plan, [1])
    eventually(lambda: applied(job) == 2)
    if how == "leave":
        job.verbs[0].leave(other.session, "")
    else:
        job.close([one.member])
    late.result(SOON)


def test_a_lease_that_ends_releases_the_others(job, two):
    """At server 0 at the same moment, before any epoch says so."""
    one, other = two
    _, plan = adder(job, one)
    push(one, plan, [1]).result(SOON)
    late = push(one, plan, [1])
    eventually(lambda: applied(job) == 2)
    job.servers.spend(12, one.session)
    late.result(SOON)
    with pytest.raises(Fenced):
        job.verbs[0].beat(other.session, -1, b"")


def test_a_server_that_is_not_touched_is_told(job, two):
    """Each server counts what comes to it, and what it is told of other rounds."""
    one, other = two
    _, here = adder(job, one)
    _, there = adder(job, one, (1,))
    push(one, here, [1]).result(SOON)
    late = push(one, here, [1])
    eventually(lambda: applied(job) == 2)
    push(other, there, [1], server=1).result(SOON)
    assert held(job) == [(1, (B,))]
    job.verbs[0].beat(other.session, -1, b"", clock=other.round)
    late.result(SOON)


def test_a_worker_without_data_is_not_waited_for(job, two):
    """It comes back at the least of the others' clocks."""
    one, other = two
    _, plan = adder(job, one)
    job.verbs[0].beat(other.session, -1, b"", clock=RESTS)
    for _ in range(5):
        push(one, plan, [1]).result(SOON)
    job.verbs[0].beat(other.session, -1, b"", clock=0)
    places = {place.task: place.clock for place in job.verbs[0].status().places}
    assert places == {A: 5, B: 5}


def test_a_newcomer_begins_where_the_slowest_is(job, two):
    """Nobody waits for it before it tells that it makes rounds, nor for it to catch up."""
    one, other = two
    _, plan = adder(job, one)
    for number in range(3):
        push(one, plan, [1], previous=number - 1)
        push(other, plan, [1]).result(SOON)
    (new,) = job.join(C, mode="bounded", k=1)
    push(one, plan, [1]).result(SOON)
    push(other, plan, [1]).result(SOON)
    push(one, plan, [1]).result(SOON)
    job.verbs[0].beat(new.session, -1, b"", clock=0)
    assert {place.task: place.clock for place in job.verbs[0].status().places} == {A: 5, B: 4, C: 4}
    late = push(one, plan, [1])
    push(other, plan, [1]).result(SOON)
    assert held(job) == [(5, (C,))]
    new.round = 4
    push(new, plan, [1]).result(SOON)
    late.result(SOON)


def test_a_save_is_answered_at_once(job, two):
    """It is a round of one worker, which the others do not make."""
    one, _ = two
    _, plan = adder(job, one)
    push(one, plan, [1]).result(SOON)
    order = job.approve(checkpoint("run/ckpt-1", (0, 1)), one)
    for server in (0, 1):
        one.push(order, server=server).result(SOON)
    one.round += 1
    late = push(one, plan, [1])
    eventually(lambda: applied(job) == 3)
    assert held(job) == [(2, (B,))]
    assert not late.done()


def test_all_have_one_bound(job, two):
    """Who comes with another is told both, and begins no session."""
    with pytest.raises(
        ConfigError, match=r"task:2 runs with ps.BoundedStaleness\(3\), and .*task:0 with ps.BoundedStaleness\(1\)"
    ):
        job.verbs[0].open(C, 1, 0, False, "bounded", staleness=3)
    with pytest.raises(ConfigError, match=r"task:2 runs with ps.Async\(\), and .*task:0 with ps.BoundedStaleness\(1\)"):
        job.verbs[0].open(C, 1, 0, False, "async")


# ---- Any interleaving ----

STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push"] * 8 + ["rest", "back", "die", "leave"])))


@search(1.5)
@drawn(st.integers(2, 4), st.integers(0, 3), STEPS, st.booleans())
def test_the_gap_is_bounded_and_nobody_waits_within_it(count, k, steps, eager):
    """Whatever order workers push, rest, die and leave in, and whether or not they wait for their answers.

    No answer is out while another worker that counts is more than k rounds behind; none waits while nobody is; and
    once all others have gone nothing waits at all, and each push was counted once.
    """
    with serving("core", 1, "nowhere") as servers:
        job = Job(servers)
        workers = job.join(*WORKERS[:count], mode="bounded", k=k)
        variable, plan = adder(job, workers[0])
        futures = {worker.session: {} for worker in workers}
        here = {worker.session: worker for worker in workers}
        resting, answered, pushes = set(), set(), 0

        def clocks():
            """The clocks that count, by session."""
            told = {place.task: place.clock - 1 for place in job.verbs[0].status().places}
            return {s: told[worker.task] for s, worker in here.items() if s not in resting}

        def check():
            at = clocks()
            for session in here:
                least = min((clock for other, clock in at.items() if other != session), default=10**9)
                for number, future in futures[session].items():
                    if future.done():
                        if (session, number) not in answered:
                            assert number - least <= k
                            answered.add((session, number))
                    else:
                        assert number - least > k, "it waits, and nobody is too far behind"

        for index, what in steps:
            worker = workers[index % count]
            session = worker.session
            if session not in here or (what in ("die", "leave") and len(here) == 1):
                continue
            mine = futures[session]
            if what == "push":
                open_now = sum(not future.done() for future in mine.values())
                if session in resting:
                    job.verbs[0].beat(session, -1, b"", clock=worker.round)
                    resting.discard(session)
                    worker.round = max(worker.round, clocks()[session] + 1)
                if open_now < (3 if eager else 1):
                    number, before = worker.round, max(mine, default=-1)
                    mine[number] = push(worker, plan, [1], previous=before)
                    pushes += 1
            elif what == "rest" and all(future.done() for future in mine.values()):
                job.verbs[0].beat(session, -1, b"", clock=RESTS)
                resting.add(session)
            elif what == "back" and session in resting:
                job.verbs[0].beat(session, -1, b"", clock=worker.round)
                resting.discard(session)
                worker.round = max(worker.round, clocks()[session] + 1)
            elif what in ("die", "leave"):
                del here[session]
                resting.discard(session)
                if what == "leave":
                    job.verbs[0].leave(session, "")
                job.close([one.member for one in here.values()])
            check()
        last = next(iter(here.values()))
        job.close([last.member])
        assert all(future.done() for future in futures[last.session].values())
        counted = int(job.value(last, variable))
        gone = [future for one, sent in futures.items() if one != last.session for future in sent.values()]
        dead = sum(not future.done() or future.exception() is not None for future in gone)
        assert pushes - dead <= counted <= pushes


def test_k_0_is_lockstep(job):
    """Nobody begins a round before all have pushed the one before."""
    workers = job.join(A, B, C, mode="bounded", k=0)
    _, plan = adder(job, workers[0])
    for number in range(3):
        answers = []
        for count, worker in enumerate(workers):
            assert not any(answer.done() for answer in answers)
            answers.append(push(worker, plan, [1]))
            eventually(lambda done=3 * number + count + 1: applied(job) == done)
        assert [answer.result(SOON).round for answer in answers] == [number] * 3
