"""Sequences of rounds: where they go on after a change of consistency, who asks for what, and those of one worker."""

from dataclasses import replace

import pytest

from psserver.plans.round import SessionSequence
from psserver.registry import Registry
from psserver.rounds.open_rounds import open_rounds
from psserver.state.sessions import Membership
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import ConfigError, Diverged, Fenced, InvalidRequest
from pswire.limits import WINDOW
from pswire.model.changes import Change
from pswire.model.consistency import Consistency
from pswire.model.log import Generation, Member, Position, Start
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.contributions import RoundsByHand
from tests.kit.rig import WORKERS, reduce_only, sum_into

A, B, C = WORKERS[:3]
NUMBER = TensorSpec("int64", ())
PLAN = reduce_only(NUMBER)
MEMBERS = tuple(Member(task, place + 1, 1) for place, task in enumerate((A, B)))
ASYNC, SYNC, BOUNDED = (Change(0, 7, Consistency(*how)) for how in (("async",), ("sync",), ("bounded", 0, 1)))


def begins(number, change, members=MEMBERS, positions=(), made=0):
    start, here = Start(number, change.round, positions), str(replace(change, number=made))
    return Generation(number, tuple(map(change.moved, members)), here, start)


@pytest.fixture
def rounds():
    return RoundsByHand(PLAN, members=MEMBERS, start=Start(1, 0))


def push(rounds, session, round, **said):
    return rounds.push(session, round, start=0, **said)


def run(rounds):
    return [(round, {WORKERS[session - 1] for session in sessions}) for _, round, sessions in rounds.run()]


def test_after_a_change_each_makes_rounds_of_its_own(rounds):
    """From the round of the change on, though each has pushed others before; a push of the new way waits until the
    change is known here: the chief copies its log to one server after the other. What is sent again across it finds its
    record, since a contribution is named by its session, its generation and its round."""
    push(rounds, 1, 0), push(rounds, 2, 0)
    assert run(rounds) == [(0, {A, B})]
    early = push(rounds, 1, 7, generation=2, previous=0)
    assert run(rounds) == []
    assert not early.done()
    rounds.close_generation(begins(2, ASYNC))
    assert rounds.last == 6
    again = Contribution(1, 1, 0, PLAN.id, (1.0,), start=0)
    assert rounds.recorded(again) is not None
    assert rounds.recorded(replace(again, generation=2, round=7)) is None
    push(rounds, 1, 8, generation=2, previous=7)
    assert run(rounds) == [(7, {A}), (8, {A})]
    push(rounds, 2, 7, generation=2, previous=0)
    assert run(rounds) == [(7, {B})]


def test_after_a_change_all_make_rounds_together(rounds):
    """The next one waits for all, and its number is above all that any of them has made."""
    rounds.close_generation(begins(2, ASYNC))
    push(rounds, 1, 7, generation=2), push(rounds, 1, 8, generation=2, previous=7), push(rounds, 2, 7, generation=2)
    assert len(run(rounds)) == 3
    rounds.close_generation(begins(3, replace(SYNC, round=9), made=1))
    push(rounds, 1, 9, generation=3, previous=8)
    assert run(rounds) == []
    push(rounds, 2, 9, generation=3, previous=7)
    assert run(rounds) == [(9, {A, B})]
    assert rounds.last == 9


def test_what_a_lost_member_left_open_is_never_applied(rounds):
    """Nobody makes that round any more, and no later round is held up by it. The change itself fences nobody: who was
    named in the generation before, and waits to be taken in, goes on waiting."""
    left, late = push(rounds, 2, 0), Member(C, 3, 1)
    rounds.close_generation(Generation(2, (MEMBERS[0], late), "dataset:0"))
    rounds.close_generation(begins(3, ASYNC, MEMBERS[:1]))
    assert isinstance(left.exception(0), Fenced)
    push(rounds, 1, 7, generation=3)
    assert run(rounds) == [(7, {A})]
    assert open_rounds(rounds) == ()
    assert rounds.fenced == {2}


def test_all_clocks_count_from_a_change_on(rounds):
    """From before its round; a change of the bound begins them anew."""
    rounds.close_generation(begins(2, BOUNDED))
    assert (rounds.clocks.bound, dict(rounds.clocks.counted)) == (1, {1: 6, 2: 6})
    push(rounds, 1, 7, generation=2)
    run(rounds)
    assert not rounds.clocks.answers(1, 8)
    assert rounds.clocks.answers(1, 7)
    rounds.close_generation(begins(3, replace(BOUNDED, round=9, consistency=Consistency("bounded", 0, 3)), made=1))
    assert (rounds.clocks.bound, dict(rounds.clocks.counted)) == (3, {1: 8, 2: 8})


def test_positions_go_over_with_a_change(rounds):
    """Who comes back finds the datasets where they were, in the sequence that counts by then."""
    told = (Position(0, 1, 0),)
    rounds.close_generation(begins(2, ASYNC, positions=told))
    assert [(place.round, place.positions) for place in rounds.places] == [(6, told)] * 2
    further = (Position(0, 2, 0),)
    push(rounds, 1, 7, generation=2, positions=further)
    run(rounds)
    rounds.close_generation(begins(3, replace(BOUNDED, round=8), positions=told, made=1))
    assert rounds.places[0].positions == further  # each keeps its own where each has one
    rounds.close_generation(begins(4, replace(SYNC, round=9), positions=further, made=2))
    assert rounds.positions == further


class Here:
    """Members with open sessions, and the generations of their job."""

    def __init__(self, mode="sync"):
        self.generations = {}
        self.members = Membership(
            Registry(Task("ps", 0), 8),
            10.0,
            generation=lambda: self.generations.get(1),
            generations=lambda: self.generations,
        )
        opens = [Member(task, 0, 1, Consistency(mode)) for task in (A, B)]
        self.a, self.b = (self.members.open(each, False, 0, 0.0)[0] for each in opens)
        self.generations[1] = Generation(1, (replace(opens[0], session=self.a), replace(opens[1], session=self.b)))

    def heartbeat(self, number, round):
        self.members.check(number)
        self.members.heartbeat(number, (round, b"p"), 0.0, lambda plan_id: "a section")


def test_members_that_ask_for_other_changes_are_both_named():
    """All of them end, and know what each has called."""
    here = Here("async")
    here.members.enter(here.a, str(SYNC))
    here.members.enter(here.b, str(replace(SYNC, round=30)))  # each counts its own rounds
    here.members.check(here.b)
    here.members.enter(here.b, str(replace(SYNC, nonfinite="skip")))
    with pytest.raises(Diverged, match=r"task:0 calls set_consistency\(ps.Sync\(\)\), and .*nonfinite='skip'"):
        here.members.check(here.a)


@pytest.mark.parametrize("first", ["the change", "the round"])
def test_a_synchronous_member_that_makes_a_round_in_place_of_a_change_is_named(first):
    """Whichever is there first; one that has rounds of before left is waited for."""
    here = Here()
    here.heartbeat(here.b, 6)
    steps = [lambda: here.members.enter(here.a, str(ASYNC)), lambda: here.heartbeat(here.b, 7)]
    steps[first == "the round"]()
    here.members.check(here.b)
    steps[first == "the change"]()
    with pytest.raises(Diverged, match=r"task:0 calls set_consistency\(ps.Async\(\)\) before round 7, and .* runs"):
        here.members.check(here.b)


def test_a_change_that_was_made_is_compared_with_nothing():
    here = Here()
    here.members.enter(here.a, str(ASYNC))
    here.generations[2] = begins(2, ASYNC, here.generations[1].members)
    here.members.move(here.generations[2].members[0])
    here.members.enter(here.b, str(replace(SYNC, number=1)))
    here.members.enter(here.a, str(ASYNC))
    here.members.check(here.a)
    here.members.check(here.b)


def test_who_comes_back_has_what_the_job_has_by_now():
    """Its script begins with what the job began with, or with what it has now; nothing else is taken."""
    here = Here()
    here.generations[2] = begins(2, BOUNDED, here.generations[1].members)
    here.members.move(here.generations[2].members[0])
    here.members.leave(here.b, "killed")
    for how in (SYNC.consistency, BOUNDED.consistency):
        number, _ = here.members.open(Member(B, 0, 1, how), False, 0, 0.0)
        state = next(each for each in here.members.states(0.0) if each.member.session == number)
        assert state.member.consistency == BOUNDED.consistency
        here.members.leave(number, "killed")
    with pytest.raises(
        ConfigError, match=r"Async\(\), but the job began with ps.Sync\(\) and now has ps.BoundedStale.*1"
    ):
        here.members.open(Member(B, 0, 1, ASYNC.consistency), False, 0, 0.0)


# ---- Rounds of one worker beside those of all ----

APART, SHARED = (PlacedVariable(id, VariableSpec(f"v{id}", NUMBER, alone=not id), (0,)) for id in (0, 1))
OWN, COMMON = sum_into(APART), sum_into(SHARED)


@pytest.fixture
def apart():
    """Rounds with a plan of each kind, and two members."""
    found = RoundsByHand(OWN, COMMON, members=MEMBERS)
    for prepared in found.plans.values():
        prepared.look({0: APART, 1: SHARED})
    return found


def push_own(rounds, session, round=0, generation=1, alone=True):
    """Contributes to a round of its own, or to one of all."""
    return rounds.push(session, round, OWN if alone else COMMON, generation, alone=alone, previous=round - 1)


def ends(rounds, session):
    """The calls that are failed where a session ends."""
    rounds.failed()
    rounds.session_ended(session, InvalidRequest("it has ended"))
    return rounds.failed()


def sequences(rounds):
    """Runs all rounds that can; returns their sequences and numbers."""
    return [(sequence, round) for sequence, round, _ in rounds.run()]


def test_strands_take_turns(apart):
    """Rounds of all are among them, and wait for their members alone."""
    for round in range(2):
        push_own(apart, 1, round, alone=False)
        for session in (1, 2):
            push_own(apart, session, round)
    assert sequences(apart) == [
        (SessionSequence(1), 0),
        (SessionSequence(2), 0),
        (SessionSequence(1), 1),
        (SessionSequence(2), 1),
    ]
    push_own(apart, 2, 0, alone=False)
    assert sequences(apart) == [(None, 0)]
    assert (apart.last, apart.closed) == (0, 1)


def test_a_session_has_a_window_of_each_kind(apart):
    """As many rounds of its own as of all, also while their generation is not known here."""
    for generation in (1, 2):
        for alone in (False, True):
            first = 50 * alone  # its numbers are none of those of all
            for round in range(first, first + WINDOW):
                assert not push_own(apart, 1, round, generation, alone).done()
            refused = push_own(apart, 1, first + WINDOW, generation, alone)
            assert isinstance(refused.exception(0), InvalidRequest)
    parked = [told for told in open_rounds(apart) if "not known here yet" in told.section]
    assert [told.round for told in parked] == list(range(WINDOW))  # those of all alone
    assert len([told for told in open_rounds(apart) if told not in parked]) == WINDOW
    assert len(ends(apart, 1)) == 4 * WINDOW


def test_what_is_parked_is_taken_in_its_strand(apart):
    """Once the generation is known; what a session that has ended left is failed, of both kinds."""
    push_own(apart, 1, 0, 2)
    push_own(apart, 1, 0, 2, alone=False)
    apart.close_generation(Generation(2, MEMBERS))
    assert sequences(apart) == [(SessionSequence(1), 0)]
    for alone in (False, True):
        push_own(apart, 2, 1, 3, alone)
    assert [len(ends(apart, session)) for session in (2, 2, 1)] == [2, 0, 1]


def test_a_session_that_is_fenced_is_forgotten(apart):
    """With its answers, which nobody will ask for; a session that stays keeps its own."""
    for session in (1, 2):
        push_own(apart, session)
    sequences(apart)
    assert {SessionSequence(1), SessionSequence(2)} <= apart.sequences.keys()
    apart.close_generation(Generation(2, MEMBERS[1:]))
    assert SessionSequence(1) not in apart.sequences
    assert SessionSequence(2) in apart.sequences
