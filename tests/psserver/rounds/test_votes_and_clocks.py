"""Votes of a server that is gone: all others use the same ones. Clocks: whose answer waits for whom."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.effects import Send
from psserver.rounds.clocks import Clocks
from psserver.rounds.votes import MAX_HEARD, Votes
from pswire.api import RESTS
from pswire.cluster import Task
from pswire.errors import InvalidRequest
from pswire.model.consistency import Consistency
from pswire.model.log import Generation, Member, Start
from pswire.servers import votes as said_by_servers
from pswire.servers.votes import Vote

JOB, ALL = 7, (0, 1, 2)


def vote(whole: set[int], round: int = 0, attempt: int = 0, closed: int = -1) -> Vote:
    return Vote(JOB, round, b"plan", 1, attempt, frozenset(whole), None, closed)


def three() -> list[Votes]:
    """Three servers that all have voted in round 0; server 2 lacks the contribution of session 20."""
    servers = [Votes(index) for index in ALL]
    for server, whole in zip(servers, ({10, 20}, {10, 20}, {10}), strict=True):
        server.begin(JOB)
        server.cast(vote(whole), ALL)
    servers[0].hear(1, vote({10, 20}), -1)
    servers[1].hear(0, vote({10, 20}), -1)
    return servers


ORDERS = [*itertools.permutations(["lose 0", "lose 1", "hear 0", "hear 1"])]


@pytest.mark.parametrize("heard", [(), (0,), (1,), (0, 1)], ids=str)
def test_all_use_the_same_votes(heard):
    """Whoever has heard the vote of the server that is gone: it counts for all, or for none; and in whatever order two
    servers learn of the loss, and hear each other."""
    for order in ORDERS:
        servers = three()
        for index in heard:
            servers[index].hear(2, vote({10}), -1)
        said, waiting = {}, []
        for step in order:
            what, me = step.split()[0], int(step[-1])
            if what == "lose":
                (effect,) = servers[me].lose(2, [1 - me], -1)
                assert isinstance(effect, Send)
                assert isinstance(effect.said, said_by_servers.Testimony)
                said[1 - me] = effect.said
                if 1 - me in waiting:
                    servers[1 - me].testify(me, effect.said, -1)
            elif me in said:
                servers[me].testify(1 - me, said[me], -1)
            else:
                waiting.append(me)
        found = {server.verdict(0, 0, ALL).whole for server in servers[:2]}
        assert found == {frozenset({10} if heard else {10, 20})}


def test_what_was_said_is_said_again_on_a_new_connection():
    """A testimony may have been lost with the connection, as a vote may."""
    zero, one, _ = three()
    (said,) = zero.lose(2, [1], -1)
    assert said.said in [effect.said for effect in zero.repeat(1)]
    assert zero.repeat(2) == []
    assert zero.kept(2) == -1
    one.lose(2, [0], -1)
    for _ in range(2):
        one.testify(0, said.said, -1)
    assert one.verdict(0, 0, ALL) is not None


def test_a_round_that_is_over_here_is_told_to_who_still_has_it_open():
    """One server has closed the round by the vote of the one that is gone; another has heard no such vote."""
    zero, one, _ = three()
    zero.hear(2, vote({10}), -1)
    assert zero.verdict(0, 0, ALL).whole == {10}
    zero.close(0)
    (said,) = zero.lose(2, [1], 0)
    one.lose(2, [0], -1)
    one.testify(0, said.said, -1)
    assert one.verdict(0, 0, ALL).whole == {10}


def test_two_that_are_gone():
    """Whoever is left decides alone, once both are known to be gone."""
    zero, *_ = three()
    zero.lose(2, [1], -1)
    assert zero.verdict(0, 0, ALL) is None
    zero.lose(1, [], -1)
    assert zero.verdict(0, 0, ALL).whole == {10, 20}


def test_nothing_is_kept_of_rounds_that_are_over_everywhere():
    """A server that has lost its only peer votes on alone, for as long as the job lasts."""
    alone = Votes(0)
    alone.begin(JOB)
    alone.lose(1, [], -1)
    for round in range(50):
        alone.cast(vote({10}, round), (0, 1))
        assert alone.verdict(round, 0, (0, 1)).whole == {10}
        alone.close(round)
    assert not alone._cast
    assert not alone._heard


def test_more_votes_than_a_server_can_have_heard():
    """A peer that says too much is refused, and nothing is kept."""
    zero, *_ = three()
    votes = tuple(vote({10}, round) for round in range(2 * MAX_HEARD + 1))
    with pytest.raises(InvalidRequest, match="which is too far ahead"):
        zero.testify(1, said_by_servers.Testimony(JOB, 2, votes), -1)


def test_a_server_that_has_no_part_any_more_keeps_nobody_from_forgetting():
    """After a round of all servers rounds of two of them are made without an end: each needs the votes of the last."""
    servers = three()[:2]
    for server in servers:
        server.hear(2, vote({10}), -1)
        server.close(0)
    for round in range(1, 2 * MAX_HEARD):
        for server, other in ((0, 1), (1, 0)):
            servers[server].cast(vote({10}, round, closed=round - 1), (0, 1))
            servers[other].hear(server, vote({10}, round, closed=round - 1), round - 1)
        for server in servers:
            assert server.verdict(round, 0, (0, 1)).whole == {10}
            server.close(round)
            assert server.kept(2) == 0  # it may not have heard the vote of the one round that it had a part in


MEMBERS = [Member(Task("worker", index), index + 1, 1, Consistency("bounded", staleness=2)) for index in range(4)]
A, B, C, _ = MEMBERS


def clocks(*members, before=None, start=0, found=None):
    """Clocks after a generation of these members."""
    found = found or Clocks()
    found.close_generation(before, Generation(1, members, start=Start(1, start)))
    return found


def later(found, *members, start=0):
    return clocks(*members, before=Generation(1, ()), start=start, found=found)


def do(found, member, *rounds):
    for round in rounds:
        found.over(member.session, round, False)


def names_of(members):
    return [member.task.index for member in members]


def test_an_answer_waits_for_who_is_more_than_k_behind():
    """Who has made no round yet counts as before its first one; who begins together begins at the generation's start,
    and not at 0: a job goes on after rounds that were made before. Rounds elsewhere, on servers that a worker's rounds
    do not touch, count by what it tells."""
    found = clocks(A, B, C)
    do(found, A, 0, 1, 2)
    do(found, B, 0)
    assert found.answers(A.session, 1)
    assert names_of(found.behind(A.session, 2)) == [2]
    assert not found.begins(A.session, 3)
    do(found, C, 0)
    assert found.answers(A.session, 2)
    assert names_of(found.behind(A.session, 3)) == [1, 2]
    found.tell(C.session, 2)
    assert names_of(found.behind(A.session, 3)) == [1]
    assert found.gap == 2
    found = clocks(A, B, start=40)
    assert found.counted == {1: 39, 2: 39}
    assert found.answers(A.session, 41)
    assert not found.answers(A.session, 42)


def test_who_rests_is_not_waited_for():
    """It comes back at the least of the others' clocks, and never goes back; one that pushes all the same counts as if
    it had told so."""
    found = clocks(A, B)
    do(found, A, 0)
    found.tell(B.session, RESTS)
    do(found, A, 1, 2, 3, 4, 5)
    assert found.answers(A.session, 5)
    found.tell(B.session, 1)
    assert found.counted == {1: 5, 2: 5}
    found.tell(B.session, 3)
    assert found.counted[2] == 5
    found.tell(B.session, RESTS)
    do(found, A, 6, 7)
    do(found, B, 0)
    assert found.counted == {1: 7, 2: 7}


def test_a_newcomer_counts_from_what_it_tells_and_from_the_least_of_the_others():
    """While it starts nobody waits for it, and once it has come nobody waits for it to catch up."""
    found = clocks(A, B)
    do(found, A, 4, 5, 6)
    do(found, B, 5)
    later(found, A, B, C)
    assert found.counted == {1: 6, 2: 5}
    found.tell(C.session, 0)
    assert found.counted[3] == 5
    later(found, A, B)
    later(found, A, B, C, start=9)  # it was ahead of all, where it died
    found.tell(C.session, 9)
    assert found.counted[3] == 8


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


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_other_modes_have_no_clocks(mode):
    found = clocks(*(Member(each.task, each.session, 1, Consistency(mode)) for each in (A, B)))
    do(found, A, *range(9))
    found.tell(2, 0)
    assert found.counted == {}
    assert found.gap == 0
    assert found.answers(1, 100)
    assert found.begins(1, 100)


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
            later(found, *MEMBERS[: args[0]], start=args[1])
            assert {*found.sessions} == {*range(1, 1 + args[0])}, "somebody waits for who has left"
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
