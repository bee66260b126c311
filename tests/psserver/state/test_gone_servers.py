"""Votes of a server that is gone: all others use the same ones, whoever has heard them."""

from __future__ import annotations

import itertools

import pytest

from psserver.effects import Send
from psserver.state.votes import MAX_HEARD, Votes
from pswire.errors import InvalidRequest
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


def lose(servers: list[Votes], gone: int) -> None:
    """All others learn that a server is gone, in turn, and hear what each says of it."""
    for server in servers:
        for effect in server.lose(gone, [other for other in ALL if other not in (gone, server._server)], -1):
            assert isinstance(effect, Send)
            assert isinstance(effect.said, said_by_servers.Testimony)
            servers[effect.server].testify(server._server, effect.said, -1)


@pytest.mark.parametrize("heard", [(), (0,), (1,), (0, 1)], ids=str)
def test_all_use_the_same_votes(heard):
    """Whoever has heard the vote of the server that is gone: it counts for all, or for none."""
    servers = three()
    for index in heard:
        servers[index].hear(2, vote({10}), -1)
    lose(servers[:2], 2)
    found = {server.verdict(0, 0, ALL).whole for server in servers[:2]}
    assert found == {frozenset({10} if heard else {10, 20})}


def test_nobody_decides_before_all_have_said_what_they_have_heard():
    """One that has heard nothing cannot know yet whether another one has."""
    zero, one, _ = three()
    (said,) = zero.lose(2, [1], -1)
    assert zero.verdict(0, 0, ALL) is None
    one.testify(0, said.said, -1)  # before it knows of the loss itself
    assert one.verdict(0, 0, ALL) is None
    (answer,) = one.lose(2, [0], -1)
    assert one.verdict(0, 0, ALL) is not None
    zero.testify(1, answer.said, -1)
    assert zero.verdict(0, 0, ALL) == one.verdict(0, 0, ALL)


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
    with pytest.raises(InvalidRequest, match="no server is so far ahead"):
        zero.testify(1, said_by_servers.Testimony(JOB, 2, votes), -1)


def test_every_order_of_losses_and_words():
    """Two servers learn of the loss, and hear each other, in any order: they decide the same."""
    steps = ["lose 0", "lose 1", "hear 0", "hear 1"]
    for order in itertools.permutations(steps):
        servers = three()
        servers[0].hear(2, vote({10}), -1)
        said: dict[int, said_by_servers.Testimony] = {}
        waiting: list[int] = []
        for step in order:
            what, index = step.split()
            me = int(index)
            if what == "lose":
                (effect,) = servers[me].lose(2, [1 - me], -1)
                said[1 - me] = effect.said
                if 1 - me in waiting:
                    servers[1 - me].testify(me, effect.said, -1)
            elif me in said:
                servers[me].testify(1 - me, said[me], -1)
            else:
                waiting.append(me)
        assert [server.verdict(0, 0, ALL).whole for server in servers[:2]] == [{10}, {10}]


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
