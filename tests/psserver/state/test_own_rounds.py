"""The rounds of one worker beside those of all, in the state machine of rounds: names, windows, and what is kept."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from psserver.effects import Fail
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Own
from psserver.state.rounds import Rounds
from psserver.state.strands import Given
from pswire.api import Contribution
from pswire.errors import InvalidRequest
from pswire.limits import WINDOW
from pswire.model.log import Epoch, Member
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.rig import WORKERS, payload, sum_into

NUMBER = TensorSpec("int64", ())
APART, SHARED = (PlacedVariable(id, VariableSpec(f"v{id}", NUMBER, alone=not id), (0,)) for id in (0, 1))
OWN, COMMON = sum_into(APART), sum_into(SHARED)
MEMBERS = tuple(Member(task, place + 1, 1, "whole") for place, task in enumerate(WORKERS[:3]))


@pytest.fixture
def rounds():
    found = Rounds(lambda plan_id: "a section")
    for plan in (OWN, COMMON):
        prepared = PreparedPlan(plan, 0)
        prepared.look({0: APART, 1: SHARED})
        found.approve(prepared)
    found.close_epoch(Epoch(1, MEMBERS[:2]))
    return found


def push(rounds, session, round=0, epoch=1, alone=True):
    plan = OWN if alone else COMMON
    said = Contribution(session, epoch, round, plan.id, (1.0,), alone=alone, previous=round - 1)
    future = Future()
    return rounds.push(said, payload(plan, 0, [session], (1.0,), ()), future, 0.0), future


def run(rounds):
    done = []
    while (job := rounds.next_job()) is not None:
        done.append((job.strand, job.round))
        rounds.complete(job, Given([np.array(0)]))
    return done


def test_strands_take_turns(rounds):
    """Rounds of all are among them, and wait for their members alone."""
    for round in range(2):
        push(rounds, 1, round, alone=False)
        for session in (1, 2):
            push(rounds, session, round)
    assert run(rounds) == [(Own(1), 0), (Own(2), 0), (Own(1), 1), (Own(2), 1)]
    push(rounds, 2, 0, alone=False)
    assert run(rounds) == [(None, 0)]
    assert (rounds.last, rounds.closed) == (0, 1)


def test_a_session_has_a_window_of_each_kind(rounds):
    """As many rounds of its own as of all, also while their epoch is not known here."""
    for epoch in (1, 2):
        for alone in (False, True):
            first = 50 * alone  # its numbers are none of those of all
            for round in range(first, first + WINDOW):
                effects, _ = push(rounds, 1, round, epoch, alone)
                assert not any(isinstance(effect, Fail) for effect in effects)
            effects, future = push(rounds, 1, first + WINDOW, epoch, alone)
            (failed,) = (effect for effect in effects if isinstance(effect, Fail) and effect.future is future)
            assert isinstance(failed.error, InvalidRequest)
    parked = [told for told in rounds.waiting() if "not known here yet" in told.section]
    assert [told.round for told in parked] == list(range(WINDOW))  # those of all alone
    assert len([told for told in rounds.waiting() if told not in parked]) == WINDOW
    assert rounds.sessions() == {1}


def test_what_is_parked_is_taken_in_its_strand(rounds):
    """Once the epoch is known; what a session that has ended left is failed, of both kinds."""
    push(rounds, 1, 0, 2)
    push(rounds, 1, 0, 2, alone=False)
    rounds.close_epoch(Epoch(2, MEMBERS[:2]))
    assert run(rounds) == [(Own(1), 0)]
    for alone in (False, True):
        push(rounds, 2, 1, 3, alone)
    assert len(rounds.fail_session(2, InvalidRequest("it has ended"))) == 2
    assert rounds.sessions() == {1}


def test_a_session_that_is_fenced_is_forgotten(rounds):
    """With its answers, which nobody will ask for; a session that stays keeps its own."""
    for session in (1, 2):
        push(rounds, session)
    run(rounds)
    assert {Own(1), Own(2)} <= rounds.strands.keys()
    rounds.close_epoch(Epoch(2, MEMBERS[1:]))
    assert Own(1) not in rounds.strands
    assert Own(2) in rounds.strands
