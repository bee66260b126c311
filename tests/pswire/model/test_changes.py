"""Changes of consistency as join points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pswire.model.changes import Change
from pswire.model.log import Member
from tests.kit.rig import WORKERS

CHANGES = {
    "ps.Sync()": Change(0, 0, "whole"),
    "ps.Sync(whole_rounds=False)": Change(1, 5, "sync"),
    "ps.Sync(nonfinite='skip', backup_workers=2)": Change(2, 7, "whole", 2, 0, "skip"),
    "ps.Async()": Change(3, 8, "async"),
    "ps.BoundedStaleness(4, nonfinite='raise')": Change(4, 9, "bounded", 0, 4, "raise"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_change_survives_its_join_point(said):
    """And says what a script says for it."""
    change = CHANGES[said]
    assert Change.parse(str(change)) == change
    assert change.said == said


@pytest.mark.parametrize("text", ["", "save", "dataset:1", "change:1:2:never:0:0:apply", "change:1:2:async:0:0", "x"])
def test_other_join_points_are_no_changes(text):
    """Nor is what nobody says."""
    assert Change.parse(text) is None


def test_two_ask_for_the_same_wherever_they_are():
    """The round is each one's own; all else is the change."""
    change = CHANGES["ps.Async()"]
    assert change.same(replace(change, round=99))
    assert not change.same(replace(change, number=9))
    assert not change.same(replace(change, nonfinite="skip"))


def test_a_member_is_moved():
    """Its task, session and replicas stay."""
    member = Member(WORKERS[0], 3, 2, "whole", 1)
    assert CHANGES["ps.BoundedStaleness(4, nonfinite='raise')"].moved(member) == Member(
        WORKERS[0], 3, 2, "bounded", 0, 4
    )
