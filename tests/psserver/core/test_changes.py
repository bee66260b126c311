"""A change of consistency on two servers, one of which hears of it later."""

from __future__ import annotations

import pytest

from pswire.model.changes import Change
from pswire.model.log import Epoch, EpochClosed, Start
from tests.psserver.core.test_votes import Two


@pytest.fixture
def two(tmp_path):
    """Two servers, and two members that make whole rounds."""
    return Two(tmp_path)


def change(two, made, round, mode):
    """The entry of a change that both members ask for; they go on from there."""
    asked, number = Change(made, round, mode), two.job.epoch.number + 1
    members = tuple(map(asked.moved, two.job.epoch.members))
    two.job.epoch = Epoch(number, members, str(asked), Start(number, round))
    for worker in (two.a, two.b):
        worker.epoch, worker.round = number, round
    return EpochClosed(two.job.epoch)


def test_a_vote_counts_that_comes_before_its_server_knows_of_the_change(two):
    """Its number may be below that of the rounds which this server has made, one by one, for each worker."""
    two.job.append(change(two, 0, 0, "async"))
    for _ in range(4):
        for worker in (two.a, two.b):
            done = two.push(worker, 0, 1)
            assert all(each.result(0).left_out == () for each in done)
            worker.round += 1
    assert two.values == [8.0, 8.0]
    entry, first = change(two, 1, 4, "whole"), two.cores[0]
    length = first.status().log
    first.approve(two.job.token, length, [entry])
    on_first = [two.push(worker, 0)[0] for worker in (two.a, two.b)]
    on_second = [two.push(worker, 1)[0] for worker in (two.a, two.b)]
    two.hear()
    assert not any(each.done() for each in (*on_first, *on_second))
    two.cores[1].approve(two.job.token, length, [entry])
    two.hear()
    assert [each.result(0).round for each in (*on_first, *on_second)] == [4] * 4
    assert two.values == [10.0, 10.0]
    assert two.lasts == [4, 4]
