"""Calls that wait: until what they wait for comes, or their session ends; and they cost others no time."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier

import pytest

from psserver.calls import MAX_CALLS
from psserver.effects import settle
from pswire.api import UNTIL_ENDED, UNTIL_GONE, Contribution
from pswire.cluster import Task
from pswire.errors import Fenced, InvalidRequest, ServerLost
from tests.kit.rig import SOON


def members(job, count, **how):
    """Members of the job, and an approved plan that adds to a variable."""
    workers = job.join(*(Task("worker", number) for number in range(count)), **how)
    return workers, job.adder(workers[0])[1]


CALLS = {
    "news": lambda worker, plan: worker.job.verbs[0].watch(worker.session, worker.job.verbs[0].status().log, -1),
    "the loss of servers": lambda worker, plan: worker.job.verbs[0].watch(worker.session, 0, UNTIL_GONE),
    "its end": lambda worker, plan: worker.job.verbs[0].watch(worker.session, 0, UNTIL_ENDED),
    "a round that is read": lambda worker, plan: worker.job.verbs[0].pull(worker.session, [0], 9),
    "a round": lambda worker, plan: worker.push(plan, [1]),
}
KEPT = [kind for kind in CALLS if kind != "a round"]
"""Those that a client may make any number of; how often a round is sent again has a limit of its own."""


@pytest.mark.parametrize("kind", CALLS)
def test_whose_session_has_ended_is_told_why(job, kind):
    """Whatever it waits for; the others wait on."""
    (one, other, _), plan = members(job, 3)
    mine, others = CALLS[kind](one, plan), CALLS[kind](other, plan)
    assert not mine.done()
    job.verbs[0].leave(one.session, "a bug")
    with pytest.raises(Fenced, match="it failed"):
        mine.result(0)
    assert not others.done()


@pytest.mark.parametrize("kind", KEPT)
def test_calls_of_one_session_are_bounded(job, kind):
    """The oldest of too many of a kind are refused; those of other kinds and sessions do not count."""
    (one, other), plan = members(job, 2)
    others = [CALLS[each](worker, plan) for each in KEPT for worker in (one, other) if (each, worker) != (kind, one)]
    mine = [CALLS[kind](one, plan) for _ in range(MAX_CALLS + 2)]
    assert [call.done() for call in (*mine, *others)] == [True] * 2 + [False] * (MAX_CALLS + len(others))
    with pytest.raises(InvalidRequest, match=f"{MAX_CALLS} later calls"):
        mine[0].result(0)


def test_who_comes_looks_at_nobody_else(job):
    """Of a thousand processes each holds calls, and each that comes must not look at those of all others. A call whose
    caller has gone away waits no more once it is looked at."""
    (*workers, last), plan = members(job, 50)
    kinds = "the loss of servers", "news"
    held = [CALLS[kind](worker, plan) for worker in workers for kind in kinds]
    held[0].cancel()  # which a look at it would find out
    CALLS[kinds[0]](last, plan)
    watches = job.servers.cores[0].machine.watches
    assert (len(watches.losses), len(watches.news)) == (50, 49)
    job.close([worker.member for worker in (*workers, last)])
    assert (len(watches.losses), len(watches.news)) == (49, 0)


def test_who_is_ahead_is_looked_at_when_the_last_moves(job):
    """Of a thousand workers most may be ahead, and each push of another one must not look at them all."""
    (*workers, one, last), plan = members(job, 50, mode="bounded", k=1)
    for worker in workers:
        worker.make(plan, [1])
    futures = [worker.push(plan, [1]) for worker in workers]
    ahead = job.servers.cores[0].machine.job.late.ahead
    futures[0].cancel()  # which a look at it would find out
    one.make(plan, [1])
    assert len(ahead) == 48
    last.make(plan, [1])
    assert all(future.done() for future in futures)
    assert len(ahead) == 0


@pytest.mark.parametrize("how", ["leave", "generation", "lease"])
def test_who_goes_releases_the_others(job, how):
    """A clean farewell, or a lease that ends, at once, before any generation says so; and the generation that leaves it
    out."""
    (one, other), plan = members(job, 2, mode="bounded", k=1)
    one.make(plan, [1])
    late = one.push(plan, [1])
    assert not late.done()
    if how == "leave":
        job.verbs[0].leave(other.session, "")
    elif how == "generation":
        job.close([one.member])
    else:
        job.servers.spend(12, one.session)
        with pytest.raises(Fenced, match="sent no heartbeat"):
            job.verbs[0].heartbeat(other.session, -1, b"")
    assert late.result(0).round == 1


def test_a_round_that_counts_as_no_step_waits_for_no_clock(job):
    """Its number says nothing of how far its worker is; who is ahead is told that its session has ended."""
    (one, _), plan = members(job, 2, mode="bounded", k=1)
    one.make(plan, [1])
    late = one.push(plan, [1])
    one.push(plan, [1], alone=True).result(SOON)
    waiter = Contribution(one.session, 1, 7, plan.id, alone=True), Future()
    assert job.servers.cores[0].machine.job.late.hold(None, [waiter]) == [waiter]
    assert not late.done()
    job.verbs[0].leave(one.session, "a bug")
    assert isinstance(late.exception(0), Fenced)


def test_answers_of_two_threads_do_not_disturb_each_other() -> None:
    """A server that ends fails what its threads are about to answer: who answers first is heard, and neither of them is
    told of the other; a caller that has gone away is not answered."""
    futures, gone = [Future[int]() for _ in range(2000)], Future[int]()
    gone.cancel()
    both, before = Barrier(2), sys.getswitchinterval()

    def each(error: bool) -> None:
        both.wait()
        for number, future in enumerate([gone, *futures]):
            settle(future, number, ServerLost("it ends") if error else None)

    sys.setswitchinterval(1e-6)  # threads alternate as often as the interpreter lets them
    try:
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(each, error) for error in (True, False)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    for number, future in enumerate(futures, 1):
        assert future.exception() is not None or future.result() == number
    assert gone.cancelled()
