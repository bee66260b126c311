"""The state machine of rounds, by itself: which round runs when, with whom, and what is kept."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.plans.prepared import MAX_LAYOUTS, PreparedPlan
from psserver.rounds.open_rounds import open_rounds
from psserver.rounds.sequences import RECORDS, RESENDS
from pswire.api import Contribution
from pswire.errors import Diverged, Fenced, InvalidRequest, MemoryLimit, NewcomerDiverged
from pswire.limits import WINDOW
from pswire.model.consistency import ASYNC
from pswire.model.log import Generation, Member, Position, Start
from pswire.model.plan import Plan, Reduction
from pswire.model.status import WorkerProgress
from pswire.model.tensor import TensorSpec
from pswire.network.payload import EMPTY, Payload
from tests.kit.contributions import RoundsByHand
from tests.kit.rig import WORKERS, payload, reduce_only

NUMBER = TensorSpec("int64", ())
PLAN, OTHER = reduce_only(NUMBER, target="this"), reduce_only(NUMBER, target="that")
MEMBERS = tuple(Member(task, place + 1, 1) for place, task in enumerate(WORKERS[:3]))


def begun(members):
    """Two plans approved, two members."""
    words = {PLAN.id: "this", OTHER.id: "that"}
    return RoundsByHand(PLAN, OTHER, members=members, describe=lambda plan_id: words.get(plan_id, "unknown"))


@pytest.fixture
def rounds():
    return begun(MEMBERS[:2])


def both(rounds, round=0, **said):
    """Sessions 1 and 2 push; returns their futures."""
    return [rounds.push(session, round, **said) for session in (1, 2)]


def sessions(job):
    return [part.said.session for part in job.parts]


def made(rounds):
    """Runs all rounds that can; returns their numbers, and whose contributions they have."""
    return [(round, who) for _, round, who in rounds.run()]


def test_a_job_is_given_once(rounds):
    """When everyone is there, in task order, however they came."""
    rounds.push(2)
    assert rounds.next_job() is None
    rounds.push(1)
    job = rounds.next_job()
    assert (job.round, job.plan, sessions(job), job.excluded) == (0, PLAN, [1, 2], ())
    assert job.section() == "this"
    assert rounds.next_job() is None
    assert rounds.finish(job) == [2, 1]
    assert (rounds.last, rounds.next_job()) == (0, None)


def test_a_round_that_is_forgotten_leaves_no_position(rounds):
    """Who comes next begins at the round after the last one, and with the batch that belongs to it."""
    first, second = (Position(0, 0, index) for index in (1, 2))
    both(rounds, positions=(first,))
    rounds.run()
    said = Contribution(1, 1, 1, PLAN.id, (1.0,), positions=(second,))
    rounds.give(said, Payload((), NUMBER.nbytes))
    assert (rounds.sequences[None].newest, rounds.positions) == (1, (second,))
    rounds.close_generation(Generation(2, MEMBERS[2:]))
    assert rounds.next_job() is None
    assert (rounds.sequences[None].newest, rounds.positions) == (0, (first,))


def diverged(rounds, *futures):
    """These, and no others, have failed, as divergences; returns in what words."""
    errors = rounds.failed()
    assert set(errors) == set(futures)
    assert {type(error) for error in errors.values()} == {Diverged}
    return [str(error) for error in errors.values()]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_different_batches_are_a_divergence(rounds, order):
    """Both members get one error, with both batches in words of a bounded length, whoever comes first."""
    words = {1: "batch 3 has 64 examples", 2: "batch 3 has 32 examples" + "!" * 10_000}
    for error in diverged(rounds, *(rounds.push(session, batch=words[session]) for session in order)):
        assert error.startswith(
            "/job:worker/task:0 and /job:worker/task:1 read different global batches: batch 3 has 64 examples, and "
            "batch 3 has 32 examples!"
        )
        assert "torch.Generator().manual_seed(0)" in error
        assert len(error) < 600
    assert rounds.next_job() is None
    both(rounds, 1, batch="batch 4")
    assert sessions(rounds.next_job()) == [1, 2]


@pytest.mark.parametrize("batches", [("a batch", "a batch"), ("a batch", ""), ("", "a batch")])
def test_batches_are_compared_where_both_say_them(rounds, batches):
    """Those that are equal, and one beside a worker that says nothing, make their round."""
    for session, batch in enumerate(batches, 1):
        rounds.push(session, batch=batch)
    assert rounds.failed() == {}
    assert sessions(rounds.next_job()) == [1, 2]


def test_the_batches_of_a_sum_are_compared(rounds):
    """Each part of a sum says its sender's own."""
    host = {"round": 0, "plan_id": PLAN.id, "host": 7, "generation": 1}
    parts = [Contribution(session=s, weights=(1.0,), batch=f"batch {s} has {s} examples", **host) for s in (1, 2)]
    said = Contribution(session=1, weights=(2.0,), parts=tuple(parts), **host)
    future = rounds.give(said, payload(PLAN, 0, [3], (2.0,), ()))
    assert "batch 1 has 1 examples, and batch 2 has 2" in str(rounds.failed()[future])


@pytest.mark.parametrize("first", [1, 2])
def test_a_excluded_round_is_a_divergence(rounds, first):
    """A member that goes on to a later one of this server has made another sequence, whoever of the two is first."""
    early = rounds.push(first, first - 1)
    told = r"round 0.*worker/task:1 runs: a later step" + (r" .*; .*worker/task:0 runs: this" if first == 2 else "")
    with pytest.raises(Diverged, match=told):
        rounds.refused(3 - first, 2 - first)
    assert isinstance(rounds.failed()[early], Diverged)
    assert rounds.next_job() is None


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "new"])
def test_who_need_not_make_a_round_leaves_none_out(rounds, gone):
    """It was fenced, or is a member only since a later generation: what it sent to a later one says nothing."""
    if gone:
        rounds.push(2, 1)
    rounds.close_generation(Generation(2, MEMBERS[:1] if gone else MEMBERS))
    if not gone:
        rounds.push(3, 1, generation=2)
        rounds.push(2)
    rounds.push(1)
    assert not rounds.failed()
    assert sessions(rounds.next_job()) == ([1] if gone else [1, 2])


def test_a_window_of_rounds_may_be_under_way(rounds):
    """Of each session; one more is refused, and the others go on, in order. Answers are kept for who is in them."""
    for number in range(WINDOW):
        rounds.push(1, number, previous=number - 1)
    with pytest.raises(
        InvalidRequest, match=f"8 rounds of this session are open, from round 0 on, so it cannot begin round {WINDOW}"
    ):
        rounds.refused(1, WINDOW, previous=WINDOW - 1)
    rounds.push(1, 0)  # a resend of one that is under way
    assert rounds.next_job() is None
    for number in range(WINDOW):
        rounds.push(2, number, previous=number - 1)
    assert made(rounds) == [(number, [1, 2]) for number in range(WINDOW)]
    first = Contribution(1, 1, 0, PLAN.id, (1.0,))
    assert rounds.recorded(first) is not None, "any of them may be sent again"
    with pytest.raises(InvalidRequest, match="another compiled step"):
        rounds.recorded(replace(first, plan_id=OTHER.id))
    with pytest.raises(Fenced, match="completed without this process"):
        rounds.recorded(replace(first, session=3))


@pytest.mark.parametrize("members", [1, 2])
def test_a_round_waits_for_the_one_that_its_sender_has_sent_before(rounds, members):
    """Which may arrive later, on another connection; rounds of other servers are no concern of this one."""
    rounds.close_generation(Generation(2, MEMBERS[:members]))
    here = [1, 2][:members]
    for session in here:
        rounds.push(session, 5, generation=2, previous=3)
    assert rounds.next_job() is None
    for session in here:
        rounds.push(session, 3, generation=2)
    assert made(rounds) == [(3, here), (5, here)]
    assert rounds.failed() == {}


def test_nobody_waits_for_the_round_of_one_who_is_gone(rounds):
    rounds.push(1, 1, previous=0)
    rounds.close_generation(Generation(2, MEMBERS[1:2]))
    assert rounds.next_job() is None
    for number in (1, 0):
        rounds.push(2, number, previous=number - 1)
    job = rounds.next_job()
    assert (job.round, sessions(job), job.excluded) == (0, [2], (WORKERS[0],))
    rounds.finish(job)
    assert made(rounds) == [(1, [1, 2])], "what it had sent whole counts"


def test_what_nobody_else_makes_is_forgotten_with_its_sender(rounds):
    """Where the round before it has not come: it would never run."""
    rounds.push(1, 1, previous=0)
    rounds.close_generation(Generation(2, ()))
    assert rounds.next_job() is None
    assert not list(open_rounds(rounds))


def test_a_round_that_others_make_is_not_jumped_over(rounds):
    """Whoever comes first: of two that may be under way, each member makes both; and it is a divergence if one has gone
    from the round before one of another member to the one behind it."""
    both(rounds)
    rounds.run()
    rounds.push(1, 2, previous=0)
    rounds.push(2, 1, previous=0)
    assert {type(error) for error in rounds.failed().values()} == {Diverged}
    early, _ = rounds.push(1, 3, previous=2), rounds.push(1, 4, previous=3)
    diverged(rounds, early, rounds.push(2, 4, previous=2))


def test_status_tells_who_is_missing(rounds):
    """From an open round, with what it does."""
    rounds.close_generation(Generation(2, MEMBERS))
    rounds.push(2, generation=2)
    (waiting,) = open_rounds(rounds)
    assert (waiting.round, waiting.section, waiting.approved) == (0, "this", True)
    assert waiting.missing == (WORKERS[0], WORKERS[2])


def test_what_is_pushed_too_soon_is_kept(rounds):
    """Until its generation is here; strangers are told then."""
    early = [rounds.push(session, generation=2) for session in (1, 2, 3)]
    assert rounds.next_job() is None
    assert [waiting.approved for waiting in open_rounds(rounds)] == [False] * 3
    rounds.close_generation(Generation(2, MEMBERS[:2]))
    assert isinstance(early[2].exception(0), Fenced)
    assert sessions(rounds.next_job()) == [1, 2]


def test_what_is_pushed_too_soon_is_bounded(rounds):
    """A window of each session, of which the newest attempts wait: it may try as often as its network loses them."""
    early = [rounds.push(1, 3, generation=9) for _ in range(RESENDS + 2)]
    found = rounds.failed()
    assert list(found) == early[:2]
    for number in range(4, 3 + WINDOW):
        rounds.push(1, number, generation=9, previous=number - 1)
    with pytest.raises(InvalidRequest, match="8 rounds of this session are open, from round 3 on"):
        rounds.refused(1, 3 + WINDOW, generation=9)
    assert list(rounds.failed()) == []
    assert [waiting.round for waiting in open_rounds(rounds)] == list(range(3, 3 + WINDOW))


def test_a_plan_that_was_refused_runs_nowhere(rounds):
    """Whoever has pushed for it, and whoever does, is told why; that another plan differs, too, is no news."""
    large = reduce_only(NUMBER, target="large")
    early = rounds.push(1, plan=large)
    error = MemoryLimit("too large")
    rounds.refuse(PreparedPlan(large, 0), error)
    assert rounds.failed() == {early: error}
    for plan in (large, OTHER):
        with pytest.raises(MemoryLimit, match="too large"):
            rounds.refused(2, plan=plan)
    assert rounds.next_job() is None
    both(rounds, 1)
    assert sessions(rounds.next_job()) == [1, 2], "its round is over, and does not stop the next one"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        *(({"weights": (weight,)}, "not finite numbers from 0") for weight in (-1.0, float("nan"), float("inf"))),
        ({"weights": (1.0,), "observes": True}, "observe"),
    ],
    ids=str,
)
def test_weights_are_counts(rounds, said, told):
    """Nothing else is divided by; and who observes has none."""
    error = rounds.give(Contribution(1, 1, 0, PLAN.id, **said), EMPTY).exception(0)
    assert isinstance(error, InvalidRequest)
    assert told in str(error)


def test_what_is_remembered_of_contributions_is_bounded(rounds):
    """Which of them count is whatever a client says, refused or not."""
    spec = TensorSpec("float64", (4,))
    plan = Plan(tuple(Reduction("sum", spec, (0,), str(n)) for n in range(8)))
    rounds.approve(PreparedPlan(plan, 0))
    for said in product([0.0, 1.0], repeat=8):
        refused = rounds.give(Contribution(1, 1, 0, plan.id, said), Payload((), 1))
        assert isinstance(refused.exception(0), InvalidRequest)
    assert 0 < len(rounds.plans[plan.id]._layouts) <= MAX_LAYOUTS


# ---- Workers that make rounds of their own ----

LONERS = tuple(replace(member, consistency=ASYNC) for member in MEMBERS)
ONE, TWO, THREE = WORKERS[:3]


@pytest.fixture
def alone():
    return begun(LONERS[:2])


def test_the_rounds_of_all_are_counted(alone):
    """That is what a server calls its last round; each task has its own numbers beside."""
    for session, round in ((1, 0), (2, 7), (1, 1)):
        alone.push(session, round)
        alone.run()
    assert alone.last == 2
    assert [(place.task, place.round) for place in alone.places] == [(ONE, 1), (TWO, 7)]
    with pytest.raises(InvalidRequest, match="round 1 is over; this server is at 7"):
        alone.refused(2, 1)


def test_a_slow_worker_does_not_wait_for_a_burst_of_others(alone):
    """Its last round was over the longest ago, though it pushes last; with bounded staleness all may wait for it."""
    alone.close_generation(Generation(2, LONERS))
    for session, round in ((3, 0), (1, 0), (2, 0), (1, 1), (2, 1)):
        alone.push(session, round, generation=2)
        alone.run()
    for session, round in ((1, 2), (2, 2), (3, 1)):
        alone.push(session, round, generation=2)
    assert [task for task, *_ in alone.run()] == [THREE, ONE, TWO]


def test_a_wait_for_approval_is_ones_own(alone):
    strange = reduce_only(NUMBER, target="strange")
    alone.push(1, plan=strange)
    assert alone.next_job() is None
    alone.push(2)
    assert made(alone) == [(0, [2])]
    alone.approve(PreparedPlan(strange, 0))
    assert made(alone) == [(0, [1])]


def test_what_a_dead_worker_left_whole_counts(alone):
    """Once; its place tells where its task goes on, and what it sends later is refused."""
    here, later = Position(0, 0, 4), Position(0, 1, 0)
    alone.push(1, 3, positions=(here,))
    alone.close_generation(Generation(2, LONERS[1:2]))
    assert alone.places == (WorkerProgress(ONE, 3, (here,)),)
    assert alone.fenced == {1}
    back = Member(ONE, 9, 1, ASYNC)
    alone.close_generation(Generation(3, (back, LONERS[1])))
    alone.push(9, 4, generation=3, positions=(later,))
    job = alone.next_job()
    assert (job.round, sessions(job), job.positions) == (3, [1], (here,))
    alone.finish(job)
    job = alone.next_job()
    assert (job.round, sessions(job), job.positions) == (4, [9], (later,))
    alone.finish(job)
    with pytest.raises(Fenced, match="completed without this process"):
        alone.recorded(Contribution(9, 3, 3, PLAN.id, (1.0,)))


def test_tasks_that_come_and_go_leave_little(alone):
    """Of each task the last answers are kept, however often it was started."""
    for life in range(50):
        session = 10 + life
        alone.close_generation(Generation(2 + life, (Member(ONE, session, 1, ASYNC), LONERS[1])))
        alone.push(session, life, generation=2 + life)
        alone.run()
    assert len(alone.sequences) == 2
    assert len(alone.sequences[ONE].records) == RECORDS


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40))
def test_every_push_is_counted_once(steps):
    """In any interleaving of pushes, resends and turns of the server; each task's in its own order."""
    found = begun(LONERS)
    rounds, ran, pushed = dict.fromkeys((1, 2, 3), 0), [], []
    for session, resend in steps:
        name = (session, rounds[session])
        if found.recorded(Contribution(session, 1, name[1], PLAN.id)) is not None:
            rounds[session] += 1
            name = (session, rounds[session])
        found.push(*name)
        pushed += [name] if name not in pushed else []
        if not resend and (job := found.next_job()) is not None:
            ran.append((sessions(job)[0], job.round))
            found.finish(job)
    ran += [(who[0], round) for _, round, who in found.run()]
    assert sorted(ran) == sorted(pushed)
    assert found.last == len(pushed) - 1


# ---- Newcomers that differ ----


@pytest.fixture
def joined(rounds):
    """Sessions 1 and 2 have made three rounds; 3 takes part from round 3 on."""
    for number in range(3):
        both(rounds, number, start=0)
        rounds.run()
    rounds.close_generation(Generation(2, MEMBERS, "dataset:0"))
    return rounds


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_newcomer_that_differs_is_refused_alone(joined, first):
    """With both positions, as soon as somebody comes who was there before: the round is theirs, once it is fenced."""
    new = joined.push(3, 3, OTHER, generation=2, start=3) if first else None
    assert joined.failed() == {}
    old = joined.push(1, 3, generation=2, start=0)
    if first:
        assert [(future, type(error)) for future, error in joined.failed().items()] == [(new, NewcomerDiverged)]
    else:
        told = r"in its first round, 3, .*worker/task:0 runs: this.*worker/task:2 runs: that"
        with pytest.raises(NewcomerDiverged, match=told) as error:
            joined.refused(3, 3, OTHER, generation=2, start=3)
        assert error.value.task == str(WORKERS[2])
    joined.push(2, 3, generation=2, start=0)
    assert joined.next_job() is None
    joined.close_generation(Generation(3, MEMBERS[:2]))
    job = joined.next_job()
    assert (sessions(job), job.excluded) == ([1, 2], (WORKERS[2],))
    assert joined.failed() == {}
    assert not old.done()


@pytest.mark.parametrize("right", [PLAN, OTHER])
def test_of_newcomers_that_differ_the_members_tell_who_is_wrong(joined, right):
    """Two of them come first: the one that does what the members do takes part."""
    fourth = Member(WORKERS[3], 4, 1)
    joined.close_generation(Generation(3, (*MEMBERS, fourth), "dataset:0"))
    new = {plan: joined.push(n, 3, plan, generation=3, start=3) for n, plan in ((3, PLAN), (4, OTHER))}
    assert joined.failed() == {}
    joined.push(1, 3, right, generation=3, start=0)
    wrong = new.pop(PLAN if right is OTHER else OTHER)
    assert [(future, type(error)) for future, error in joined.failed().items()] == [(wrong, NewcomerDiverged)]
    joined.push(2, 3, right, generation=3, start=0)
    joined.close_generation(Generation(4, (*MEMBERS[:2], MEMBERS[2] if right is PLAN else fourth)))
    assert len(sessions(joined.next_job())) == 3


def test_an_ended_newcomer_waits_no_more(joined):
    """Also where it waits for the members to say who is right."""
    joined.close_generation(Generation(3, (*MEMBERS, Member(WORKERS[3], 4, 1)), "dataset:0"))
    joined.push(3, 3, PLAN, generation=3, start=3)
    doubtful = joined.push(4, 3, OTHER, generation=3, start=3)
    joined.session_ended(4, Fenced("it ended"))
    assert list(joined.failed()) == [doubtful]


@pytest.mark.parametrize("begins", [True, False], ids=["where all begin together", "after its first round"])
def test_what_differs_differs_for_all(joined, begins):
    """In a round of members, and in the first round of a job, or of its next workers: there nobody is a newcomer."""
    round, generation = (4, 2) if not begins else (3, 3)
    if begins:
        joined.close_generation(Generation(3, MEMBERS, start=Start(3, 3)))
    else:
        for session, start in ((1, 0), (2, 0), (3, 3)):
            joined.push(session, 3, generation=2, start=start)
        joined.run()
    said = ((1, PLAN, 0), (3, OTHER, 3))
    futures = [joined.push(who, round, plan, generation=generation, start=start) for who, plan, start in said]
    diverged(joined, *futures)
