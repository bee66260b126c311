"""Clocks: whose answer waits for whom, as they tick, rest, come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.state.clocks import Clocks
from pswire.api import RESTS
from pswire.cluster import Task
from pswire.model.log import Epoch, Member, Start

A, B, C = (Member(Task("worker", index), index + 1, 1, "bounded", staleness=2) for index in range(3))


def clocks(*members, before=None, start=0, found=None):
    """Clocks after an epoch of these members."""
    found = found or Clocks()
    found.close_epoch(before, Epoch(1, members, start=Start(1, start)))
    return found


def late(found, *members, start=0):
    return clocks(*members, before=Epoch(1, ()), start=start, found=found)


def do(found, member, *rounds):
    for round in rounds:
        found.over(member.session, round, False)


def names(members):
    return [member.task.index for member in members]


def test_an_answer_waits_for_who_is_more_than_k_behind():
    """Who has made no round yet counts as before its first one."""
    found = clocks(A, B, C)
    do(found, A, 0, 1, 2)
    do(found, B, 0)
    assert found.answers(A.session, 1)
    assert names(found.behind(A.session, 2)) == [2]
    assert not found.begins(A.session, 3)
    do(found, C, 0)
    assert found.answers(A.session, 2)
    assert names(found.behind(A.session, 3)) == [1, 2]


def test_who_begins_together_begins_at_the_epochs_start():
    """Not at 0: a job goes on after rounds that were made before."""
    found = clocks(A, B, start=40)
    assert found.counted == {1: 39, 2: 39}
    assert found.answers(A.session, 41)
    assert not found.answers(A.session, 42)


def test_who_leaves_releases_the_others():
    """A member of no later epoch, and one whose lease has ended; nobody then waits for it."""
    for leave in (lambda found: found.leave(B.session), lambda found: late(found, A)):
        found = clocks(A, B)
        do(found, A, 0, 1, 2)
        assert not found.answers(A.session, 2)
        leave(found)
        assert found.answers(A.session, 2)
        assert found.gap == 0


def test_a_newcomer_counts_from_what_it_tells_and_from_the_least_of_the_others():
    """While it starts nobody waits for it, and once it has come nobody waits for it to catch up."""
    found = clocks(A, B)
    do(found, A, 4, 5, 6)
    do(found, B, 5)
    late(found, A, B, C)
    assert found.counted == {1: 6, 2: 5}
    found.tell(C.session, 0)
    assert found.counted[3] == 5
    late(found, A, B)
    late(found, A, B, C, start=9)  # it was ahead of all, where it died
    found.tell(C.session, 9)
    assert found.counted[3] == 8


def test_who_rests_is_not_waited_for():
    """It comes back at the least of the others' clocks, and never goes back."""
    found = clocks(A, B)
    do(found, A, 0)
    found.tell(B.session, RESTS)
    do(found, A, 1, 2, 3, 4, 5)
    assert found.answers(A.session, 5)
    found.tell(B.session, 1)
    assert found.counted == {1: 5, 2: 5}
    found.tell(B.session, 3)
    assert found.counted[2] == 5


def test_who_is_at_rest_and_pushes_all_the_same_counts():
    """As if it had told so."""
    found = clocks(A, B)
    found.tell(B.session, RESTS)
    do(found, A, *range(8))
    do(found, B, 0)
    assert found.counted == {1: 7, 2: 7}


def test_rounds_elsewhere_are_told():
    """A server that a worker's rounds do not touch counts them by what it tells."""
    found = clocks(A, B)
    do(found, A, 0, 1, 2)
    found.tell(B.session, 1)
    assert found.answers(A.session, 2)
    assert found.gap == 2


def test_a_round_that_only_saves_is_no_tick():
    """One of all workers makes it, and gets no further ahead by it."""
    found = clocks(A, B)
    do(found, A, 0, 1)
    found.over(A.session, 2, True)
    assert found.counted[A.session] == 1
    assert found.answers(A.session, 2)
    do(found, A, 3)
    assert not found.answers(A.session, 3)
    do(found, B, 0)
    assert found.answers(A.session, 3)


@pytest.mark.parametrize("mode", ["sync", "whole", "async"])
def test_other_modes_have_no_clocks(mode):
    """Nothing is ever held back."""
    found = clocks(Member(A.task, 1, 1, mode), Member(B.task, 2, 1, mode))
    do(found, A, *range(9))
    found.tell(2, 0)
    assert found.counted == {}
    assert found.gap == 0
    assert found.answers(1, 100)
    assert found.begins(1, 100)


MEMBERS = [Member(Task("worker", index), index + 1, 1, "bounded", staleness=2) for index in range(4)]

DONE = st.one_of(
    st.tuples(st.just("over"), st.integers(1, 5), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("tell"), st.integers(1, 5), st.sampled_from([RESTS, *range(9)])),
    st.tuples(st.just("leave"), st.integers(1, 5)),
    st.tuples(st.just("come"), st.integers(0, 4), st.integers(0, 9)),
)
"""What may happen to clocks, of sessions 1 to 4 that are members and 5 that is none."""


@given(st.lists(DONE, max_size=30))
def test_whoever_comes_and_goes_an_answer_goes_once_nobody_is_behind(done):
    """And the version tells where one that waited may go: who looks at nothing else misses none."""
    found = clocks(*MEMBERS[:2])
    asked = [(session, round) for session in range(1, 6) for round in range(12)]
    for verb, *args in done:
        goes, version = {each for each in asked if found.answers(*each)}, found.version
        if verb == "come":
            late(found, *MEMBERS[: args[0]], start=args[1])
        else:
            getattr(found, verb)(*args)
        now = {each for each in asked if found.answers(*each)}
        assert now == {each for each in asked if not found.behind(*each)}
        counted = found.counted.values()
        assert found.gap == max(counted, default=0) - min(counted, default=0)
        over = {(session, round) for session, round in now - goes if _is_over(found, session, round)}
        assert verb == "come" or found.version != version or not over


def _is_over(found, session, round):
    """Whether a round may wait for its answer: it is over, and its worker's clock says so."""
    at = {member.session: clock for member, clock in found.all}
    return session in at and round <= at[session]
