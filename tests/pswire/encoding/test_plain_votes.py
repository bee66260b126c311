"""Plain votes as packed numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.encoding import plain_votes
from pswire.errors import InvalidRequest
from pswire.servers.votes import Vote
from tests.kit import samples
from tests.kit.cases import search

NUMBERS = st.integers(0, (1 << 64) - 1)

PLAIN = st.builds(
    Vote, job=NUMBERS, round=NUMBERS, plan_id=st.binary(max_size=40), generation=NUMBERS,
    attempt=st.integers(0, (1 << 32) - 1), whole=st.frozensets(NUMBERS, max_size=9),
    closed=st.integers(-1, (1 << 63) - 1),
)  # fmt: skip


@search()
@given(PLAIN)
def test_plain_votes_arrive_as_they_were(vote: Vote) -> None:
    """With any members and numbers."""
    packed = plain_votes.pack(vote)
    assert packed is not None
    assert plain_votes.unpack(packed) == vote


@search()
@given(PLAIN.filter(lambda vote: not vote.plan_id), st.data())
def test_a_vote_that_is_cut_off_is_refused(vote: Vote, data: st.DataObject) -> None:
    """Its members would be others."""
    packed = plain_votes.pack(vote)
    assert packed is not None
    with pytest.raises(InvalidRequest, match="is not whole"):
        plain_votes.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


def test_nothing_is_lost_of_votes_that_say_more() -> None:
    """A vote with an error, a digest, sums or late contributions is not packed, and neither is a testimony."""
    plain, *others = samples.VOTES
    assert plain_votes.pack(plain) is not None
    assert [plain_votes.pack(each) for each in others] == [None] * 5
