"""Rounds of closures, by themselves: whichever workers run a closure, each of its rounds is made once."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.effects import Fail
from psserver.plans.prepared import PreparedPlan
from psserver.state.rounds import Rounds
from psserver.state.strands import RECORDS, Given
from pswire.api import Contribution
from pswire.errors import Fenced, InvalidRequest, ProgramError, PushAgain
from pswire.limits import CLOSURE_ROUNDS
from pswire.model.closures import ClosureName
from pswire.model.log import Epoch, Member
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import Payload
from tests.kit.rig import WORKERS, payload, reduce_only

NUMBER = TensorSpec("int64", ())
PLAN, OTHER = reduce_only(NUMBER, target="this"), reduce_only(NUMBER, target="that")
MEMBERS = tuple(Member(task, place + 1, 1, "async") for place, task in enumerate(WORKERS[:3]))
FIRST, SECOND = ClosureName(5, 1, 5, (5,)), ClosureName(5, 2, 5, (5,))


class Server:
    def __init__(self):
        self.rounds = Rounds(str)
        self.rounds.approve(PreparedPlan(PLAN, 0))
        self.rounds.approve(PreparedPlan(OTHER, 0))
        self.rounds.close_epoch(Epoch(1, MEMBERS))

    def push(self, session, name, round=0, plan=PLAN, whole=True, epoch=1):
        """Pushes, unless it is answered by the record; returns the future."""
        said = Contribution(session, epoch, round, plan.id, (1.0,), previous=round - 1, closure=name)
        future = Future()
        record = self.rounds.recorded(said)
        if record is not None:
            future.set_result(record)
            return future
        content = payload(plan, 0, [session], (1.0,), ()) if whole else Payload((), 8)
        for effect in self.rounds.push(said, content, future, 0.0):
            if isinstance(effect, Fail):
                effect.future.set_exception(effect.error)
        return future

    def run(self):
        counted = []
        while (job := self.rounds.next_job()) is not None:
            counted += [part.said.session for part in job.parts]
            self.finish(job)
        return counted

    def finish(self, job):
        record, waiters = self.rounds.complete(job, Given([np.array(0)]))
        for _, future in waiters:
            future.set_result(record)


@pytest.fixture
def server():
    return Server()


def test_a_round_that_was_made_is_answered_from_its_record(server):
    """The second worker's contribution does not count; the rounds that the first did not come to are made."""
    server.push(1, FIRST)
    assert server.run() == [1]
    again = server.push(2, SECOND)
    assert again.result().sessions == {1}
    server.push(2, SECOND, round=1)
    assert server.run() == [2]
    assert server.rounds.places == ()  # no worker's own rounds


def test_all_answers_are_kept_until_the_closure_is_over(server):
    """However many there are; then they are let go of, and who still pushes has lost the closure."""
    for round in range(2 * RECORDS):
        server.push(1, FIRST, round)
        server.run()
    assert all(server.push(2, SECOND, round).done() for round in range(2 * RECORDS))
    server.rounds.learn(3, 6, (6,))
    assert 5 not in server.rounds.strands
    with pytest.raises(Fenced, match="closure 5 is over"):
        server.push(1, FIRST, round=1).result()
    server.rounds.learn(2, 5, (5,))  # older news change nothing
    with pytest.raises(Fenced, match="closure 5 is over"):
        server.push(1, FIRST, round=2 * RECORDS).result()


def test_what_is_not_whole_makes_room(server):
    """The first worker died in the middle of its push: the second one's counts, in whatever epoch it is."""
    first = server.push(1, FIRST, whole=False)
    assert server.run() == []
    server.rounds.close_epoch(Epoch(2, MEMBERS[1:]))
    server.push(2, SECOND, epoch=2)
    with pytest.raises(Fenced, match="handed to another worker"):
        first.result()
    assert server.run() == [2]


def test_who_comes_back_takes_its_own_place(server):
    """A worker that has the closure and lost its session goes on with it: its own push from before is let go of."""
    before = server.push(1, FIRST, whole=False)
    server.push(2, FIRST)
    assert isinstance(before.exception(0), Fenced)
    assert server.run() == [2]


def test_a_round_that_runs_answers_both(server):
    """While it runs with the first contribution, the second waits for the same answer."""
    first = server.push(1, FIRST)
    job = server.rounds.next_job()
    second = server.push(2, SECOND)
    assert not second.done()
    server.finish(job)
    assert first.result() is second.result()
    assert server.run() == []


def test_who_had_it_before_is_refused(server):
    """It may not take the place of its successor, whose push is on its way."""
    server.push(2, SECOND, whole=False)
    with pytest.raises(Fenced, match="handed to another worker"):
        server.push(1, FIRST).result()


def test_another_sequence_is_refused(server):
    """A function that makes another section than before is told so; so is one that makes too many."""
    server.push(1, FIRST)
    server.run()
    with pytest.raises(ProgramError, match="makes the same sequence of sections each time"):
        server.push(2, SECOND, plan=OTHER).result()
    with pytest.raises(InvalidRequest, match="at most 1000 rounds"):
        server.push(2, replace(SECOND, number=6, begun=(5, 6), newest=6), round=CLOSURE_ROUNDS).result()
    with pytest.raises(InvalidRequest, match="numbered from 1"):
        server.push(2, replace(SECOND, number=0)).result()


def test_a_push_that_waited_for_its_epoch_comes_again(server):
    """By then the round may have been made."""
    early = server.push(2, SECOND, epoch=2)
    server.push(1, FIRST)
    server.run()
    for effect in server.rounds.close_epoch(Epoch(2, MEMBERS)):
        effect.future.set_exception(effect.error)
    with pytest.raises(PushAgain):
        early.result()
    assert server.push(2, SECOND, epoch=2).result().sessions == {1}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), max_size=12))
def test_each_round_counts_once_on_each_of_two_servers(lives):
    """Workers run it one after another, each up to some round and on some servers; the last one to its end.

    Args:
        lives: for each worker that is lost its session, the rounds that it makes, and whether the last of them comes to
            the second server as well.
    """
    servers, counted = (Server(), Server()), ([], [])
    for version, (session, rounds, both) in enumerate([*lives, (1, 4, True)], 1):
        name = ClosureName(9, version, 9, (9,))
        for round in range(rounds):
            for place, server in enumerate(servers[: 1 + (both or round + 1 < rounds)]):
                server.push(session, name, round)
                counted[place].extend((round, each) for each in server.run())
    for rounds in counted:
        assert sorted(round for round, _ in rounds) == [0, 1, 2, 3]
