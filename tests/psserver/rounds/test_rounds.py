"""The state machine of rounds, by itself: which round runs when, with whom, and what is kept."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psserver.effects import Fail
from psserver.plans.prepared import MAX_LAYOUTS, PreparedPlan
from psserver.plans.round import ReturnedValues
from psserver.rounds.rounds import Rounds
from psserver.rounds.sequences import RECORDS, RESENDS
from psserver.rounds.votes import Votes
from pswire.api import Contribution
from pswire.errors import Diverged, Fenced, InvalidRequest, MemoryLimit, NewcomerDiverged, PSError
from pswire.limits import WINDOW
from pswire.model.consistency import ASYNC
from pswire.model.log import Generation, Member, Position, Start
from pswire.model.plan import Plan, Reduction
from pswire.model.status import WorkerProgress
from pswire.model.tensor import TensorSpec
from pswire.network.payload import EMPTY, Payload
from tests.kit.rig import WORKERS, payload, reduce_only

NUMBER = TensorSpec("int64", ())
PLAN, OTHER = reduce_only(NUMBER, target="this"), reduce_only(NUMBER, target="that")
MEMBERS = tuple(Member(task, place + 1, 1) for place, task in enumerate(WORKERS[:3]))


class Told:
    """Rounds, and what they want to be done.

    Args:
        describe: as of `Rounds`.
    """

    def __init__(self, describe):
        self.rounds = Rounds(describe, Votes(0))
        self.effects = []

    def __getattr__(self, name):
        return getattr(self.rounds, name)

    def _keep(name):
        def call(self, *args):
            self.effects += getattr(self.rounds, name)(*args)

        return call

    approve, refuse, close_generation, push, session_ended = map(
        _keep, ("approve", "refuse", "close_generation", "push", "session_ended")
    )

    def failed(self):
        found = {effect.future: effect.error for effect in self.effects if isinstance(effect, Fail)}
        self.effects = [effect for effect in self.effects if not isinstance(effect, Fail)]
        return found


def begun(members):
    """Two plans approved, two members."""
    found = Told(lambda plan_id: {PLAN.id: "this", OTHER.id: "that"}.get(plan_id, "unknown"))
    found.approve(PreparedPlan(PLAN, 0))
    found.approve(PreparedPlan(OTHER, 0))
    found.close_generation(Generation(1, members))
    return found


@pytest.fixture
def rounds():
    return begun(MEMBERS[:2])


def push(rounds, session, round=0, plan=PLAN, generation=1, value=None, positions=(), start=-1, previous=-1):
    """Pushes its own number; returns the future."""
    future = Future()
    said = Contribution(
        session, generation, round, plan.id, (1.0,), positions=positions, start=start, previous=previous
    )
    rounds.push(said, payload(plan, 0, [value or session], (1.0,), ()), future, 0.0)
    return future


def sessions(job):
    return [part.said.session for part in job.parts]


def finish(rounds, job):
    _, waiters = rounds.complete(job, ReturnedValues([np.array(0)]))
    return [said.session for said, _ in waiters]


def records(rounds, sequence=None):
    return rounds.sequences[sequence].records


def failed(rounds):
    return rounds.failed()


def refused(rounds, *args, **said):
    kept, rounds.effects = rounds.effects, []
    future = push(rounds, *args, **said)
    fail, rounds.effects = rounds.effects[-1], kept + rounds.effects[:-1]
    assert fail.future is future
    raise fail.error


def test_a_job_is_given_once(rounds):
    """When everyone is there, in task order, however they came."""
    push(rounds, 2)
    assert rounds.next_job() is None
    push(rounds, 1)
    job = rounds.next_job()
    assert (job.round, job.plan, sessions(job), job.excluded) == (0, PLAN, [1, 2], ())
    assert job.section() == "this"
    assert rounds.next_job() is None
    assert finish(rounds, job) == [2, 1]
    assert rounds.last == 0
    assert rounds.next_job() is None


def test_the_last_answers_are_kept(rounds):
    """For resends of all that may be under way; older rounds are only known to be over."""
    assert RECORDS > WINDOW
    for number in range(RECORDS + 2):
        for session in (1, 2):
            push(rounds, session, number)
        finish(rounds, rounds.next_job())
    assert sorted(records(rounds)) == list(range(2, RECORDS + 2))
    said = Contribution(1, 1, 3, PLAN.id, (1.0,))
    assert rounds.recorded(said) is records(rounds)[3]
    assert rounds.recorded(Contribution(1, 1, RECORDS + 2, PLAN.id)) is None
    with pytest.raises(InvalidRequest, match="round 0 is over"):
        refused(rounds, 1, 0)


def test_a_record_is_for_those_who_are_in_it(rounds):
    """And for its plan; an error is for everyone who asks."""
    for session in (1, 2):
        push(rounds, session)
    finish(rounds, rounds.next_job())
    with pytest.raises(Fenced, match="completed without this process"):
        rounds.recorded(Contribution(3, 1, 0, PLAN.id, (1.0,)))
    with pytest.raises(InvalidRequest, match="another compiled step"):
        rounds.recorded(Contribution(1, 1, 0, OTHER.id, (1.0,)))
    for session in (1, 2):
        push(rounds, session, 1)
    rounds.fail(rounds.next_job(), PSError("no"))
    assert rounds.recorded(Contribution(3, 1, 1, OTHER.id)).error.message == "no"


def test_an_generation_completes_what_is_open(rounds):
    """Without those whom it leaves out, if they gave nothing; with them if they did."""
    push(rounds, 1)
    rounds.close_generation(Generation(2, MEMBERS[:1]))
    job = rounds.next_job()
    assert (sessions(job), job.excluded) == ([1], (WORKERS[1],))
    finish(rounds, job)
    assert records(rounds)[0].generation.number == 2
    push(rounds, 1, 1, generation=2)
    rounds.close_generation(Generation(3, MEMBERS[1:2]))
    job = rounds.next_job()
    assert (sessions(job), job.excluded) == ([1], ())
    assert 1 in rounds.fenced


def test_a_round_that_is_forgotten_leaves_no_position(rounds):
    """Who comes next begins at the round after the last one, and with the batch that belongs to it."""
    first, second = (Position(0, 0, index) for index in (1, 2))
    for session in (1, 2):
        push(rounds, session, positions=(first,))
    finish(rounds, rounds.next_job())
    said = Contribution(1, 1, 1, PLAN.id, (1.0,), positions=(second,))
    rounds.push(said, Payload((), NUMBER.nbytes), Future(), 0.0)
    assert (rounds.sequences[None].newest, rounds.positions) == (1, (second,))
    rounds.close_generation(Generation(2, MEMBERS[2:]))
    assert rounds.next_job() is None
    assert (rounds.sequences[None].newest, rounds.positions) == (0, (first,))


def test_a_divergence_closes_its_round(rounds):
    """All who wait are told both positions, nothing runs, and the rounds after it do."""
    one = push(rounds, 1)
    two = push(rounds, 2, plan=OTHER)
    errors = failed(rounds)
    assert set(errors) == {one, two}
    for error in errors.values():
        assert isinstance(error, Diverged)
        assert "worker/task:0 runs: this" in str(error)
        assert "worker/task:1 runs: that" in str(error)
    assert rounds.next_job() is None
    assert (rounds.last, records(rounds)[0].error) == (0, errors[one])
    for session in (1, 2):
        push(rounds, session, 1)
    assert sessions(rounds.next_job()) == [1, 2]


def reads(rounds, session, batch, round=0, **said):
    """Pushes what a worker makes of a global batch; returns the future."""
    future = Future()
    given = Contribution(session, 1, round, PLAN.id, (1.0,), batch=batch, **said)
    rounds.push(given, payload(PLAN, 0, [session], (1.0,), ()), future, 0.0)
    return future


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_different_batches_are_a_divergence(rounds, order):
    """Both members get one error, with both batches in words of a bounded length, whoever comes first."""
    words = {1: "batch 3 has 64 examples", 2: "batch 3 has 32 examples" + "!" * 10_000}
    futures = [reads(rounds, session, words[session]) for session in order]
    errors = failed(rounds)
    assert set(errors) == set(futures)
    for error in errors.values():
        assert isinstance(error, Diverged)
        assert str(error).startswith(
            "/job:worker/task:0 and /job:worker/task:1 read different global batches: batch 3 has 64 examples, and "
            "batch 3 has 32 examples!"
        )
        assert "torch.Generator().manual_seed(0)" in str(error)
        assert len(str(error)) < 600
    assert rounds.next_job() is None
    for session in (1, 2):
        reads(rounds, session, "batch 4", 1)
    assert sessions(rounds.next_job()) == [1, 2]


@pytest.mark.parametrize("batches", [("a batch", "a batch"), ("a batch", ""), ("", "a batch")])
def test_batches_are_compared_where_both_say_them(rounds, batches):
    """Those that are equal, and one beside a worker that says nothing, make their round."""
    for session, batch in enumerate(batches, 1):
        reads(rounds, session, batch)
    assert failed(rounds) == {}
    assert sessions(rounds.next_job()) == [1, 2]


def test_the_batches_of_a_sum_are_compared(rounds):
    """Each part of a sum says its sender's own."""
    host = {"round": 0, "plan_id": PLAN.id, "host": 7, "generation": 1}
    parts = [Contribution(session=s, weights=(1.0,), batch=f"batch {s} has {s} examples", **host) for s in (1, 2)]
    future = Future()
    said = Contribution(session=1, weights=(2.0,), parts=tuple(parts), **host)
    rounds.push(said, payload(PLAN, 0, [3], (2.0,), ()), future, 0.0)
    assert "batch 1 has 1 examples, and batch 2 has 2" in str(failed(rounds)[future])


@pytest.mark.parametrize("first", [1, 2])
def test_a_excluded_round_is_a_divergence(rounds, first):
    """A member that goes on to a later one of this server has made another sequence, whoever of the two is first."""
    early = push(rounds, first, first - 1)
    told = r"round 0.*worker/task:1 runs: a later step" + (r" .*; .*worker/task:0 runs: this" if first == 2 else "")
    with pytest.raises(Diverged, match=told):
        refused(rounds, 3 - first, 2 - first)
    assert isinstance(failed(rounds)[early], Diverged)
    assert rounds.next_job() is None


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "new"])
def test_who_need_not_make_a_round_leaves_none_out(rounds, gone):
    """It was fenced, or is a member only since a later generation: what it sent to a later one says nothing."""
    if gone:
        push(rounds, 2, 1)
    rounds.close_generation(Generation(2, MEMBERS[:1] if gone else MEMBERS))
    if not gone:
        push(rounds, 3, 1, generation=2)
        push(rounds, 2)
    push(rounds, 1)
    assert not failed(rounds)
    assert sessions(rounds.next_job()) == ([1] if gone else [1, 2])


def test_a_window_of_rounds_may_be_under_way(rounds):
    """Of each session; one more is refused, and the others go on, in order."""
    for number in range(WINDOW):
        push(rounds, 1, number, previous=number - 1)
    with pytest.raises(
        InvalidRequest, match=f"8 rounds of this session are open, from round 0 on, so it cannot begin round {WINDOW}"
    ):
        refused(rounds, 1, WINDOW, previous=WINDOW - 1)
    push(rounds, 1, 0)  # a resend of one that is under way
    assert rounds.next_job() is None
    for number in range(WINDOW):
        push(rounds, 2, number, previous=number - 1)
    for number in range(WINDOW):
        job = rounds.next_job()
        assert (job.round, sessions(job)) == (number, [1, 2])
        finish(rounds, job)


@pytest.mark.parametrize("members", [1, 2])
def test_a_round_waits_for_the_one_that_its_sender_has_sent_before(rounds, members):
    """Which may arrive later, on another connection; rounds of other servers are no concern of this one."""
    rounds.close_generation(Generation(2, MEMBERS[:members]))
    here = range(1, members + 1)
    for session in here:
        push(rounds, session, 5, generation=2, previous=3)
    assert rounds.next_job() is None
    for session in here:
        push(rounds, session, 3, generation=2)
    for number in (3, 5):
        job = rounds.next_job()
        assert (job.round, sessions(job)) == (number, list(here))
        finish(rounds, job)
    assert failed(rounds) == {}


def test_nobody_waits_for_the_round_of_one_who_is_gone(rounds):
    push(rounds, 1, 1, previous=0)
    rounds.close_generation(Generation(2, MEMBERS[1:2]))
    assert rounds.next_job() is None
    for number in (1, 0):
        push(rounds, 2, number, previous=number - 1)
    job = rounds.next_job()
    assert (job.round, sessions(job), job.excluded) == (0, [2], (WORKERS[0],))
    finish(rounds, job)
    assert sessions(rounds.next_job()) == [1, 2], "what it had sent whole counts"


def test_what_nobody_else_makes_is_forgotten_with_its_sender(rounds):
    """Where the round before it has not come: it would never run."""
    push(rounds, 1, 1, previous=0)
    rounds.close_generation(Generation(2, ()))
    assert rounds.next_job() is None
    assert not list(rounds.waiting())


def test_a_round_that_others_make_is_not_jumped_over(rounds):
    """Whoever comes first: of two that may be under way, each member makes both; and it is a divergence if one has gone
    from the round before one of another member to the one behind it."""
    for session in (1, 2):
        push(rounds, session, 0)
    finish(rounds, rounds.next_job())
    push(rounds, 1, 2, previous=0)
    push(rounds, 2, 1, previous=0)
    assert {type(error) for error in failed(rounds).values()} == {Diverged}
    early = [push(rounds, 1, 3, previous=2), push(rounds, 1, 4, previous=3)]
    late = push(rounds, 2, 4, previous=2)
    found = failed(rounds)
    assert set(found) == {early[0], late}
    assert {type(error) for error in found.values()} == {Diverged}


def test_what_is_pushed_too_soon_is_kept(rounds):
    """Until its generation is here; strangers are told then."""
    early = [push(rounds, session, generation=2) for session in (1, 2, 3)]
    assert rounds.next_job() is None
    assert [waiting.approved for waiting in rounds.waiting()] == [False] * 3
    rounds.close_generation(Generation(2, MEMBERS[:2]))
    assert isinstance(failed(rounds)[early[2]], Fenced)
    assert sessions(rounds.next_job()) == [1, 2]


def test_what_is_pushed_too_soon_is_bounded(rounds):
    """A window of each session, of which the newest attempts wait: it may try as often as its network loses them."""
    early = [push(rounds, 1, 3, generation=9) for _ in range(RESENDS + 2)]
    found = failed(rounds)
    assert list(found) == early[:2]
    for number in range(4, 3 + WINDOW):
        push(rounds, 1, number, generation=9, previous=number - 1)
    with pytest.raises(InvalidRequest, match="8 rounds of this session are open, from round 3 on"):
        refused(rounds, 1, 3 + WINDOW, generation=9)
    assert list(failed(rounds)) == []
    assert [waiting.round for waiting in rounds.waiting()] == list(range(3, 3 + WINDOW))


def test_a_plan_that_was_refused_runs_nowhere(rounds):
    """Whoever has pushed for it, and whoever does, is told why; that another plan differs, too, is no news."""
    large = reduce_only(NUMBER, target="large")
    early = push(rounds, 1, plan=large)
    error = MemoryLimit("too large")
    rounds.refuse(PreparedPlan(large, 0), error)
    assert failed(rounds) == {early: error}
    for plan in (large, OTHER):
        with pytest.raises(MemoryLimit, match="too large"):
            refused(rounds, 2, plan=plan)
    assert rounds.next_job() is None
    for session in (1, 2):
        push(rounds, session, 1)
    assert sessions(rounds.next_job()) == [1, 2], "its round is over, and does not stop the next one"


def test_what_does_not_fit_is_told_to_its_sender(rounds):
    """Its place in the round is free again; what was approved too late is looked at then."""
    strange = reduce_only(TensorSpec("int64", (3,)), target="strange")
    future = push(rounds, 1, plan=strange)
    assert failed(rounds) == {}
    wrong = Future()
    rounds.push(Contribution(2, 1, 0, strange.id, (1.0,)), Payload.pack([np.zeros(2)]), wrong, 0.0)
    rounds.approve(PreparedPlan(strange, 0))
    errors = failed(rounds)
    assert set(errors) == {future, wrong}
    assert all("1 reductions, 1 of them on this server" in str(error) for error in errors.values())
    assert [waiting.missing for waiting in rounds.waiting()] == [(WORKERS[0], WORKERS[1])]


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
    future = Future()
    rounds.push(Contribution(1, 1, 0, PLAN.id, **said), EMPTY, future, 0.0)
    (error,) = [failed(rounds)[future]]
    assert isinstance(error, InvalidRequest)
    assert told in str(error)


def test_what_is_remembered_of_contributions_is_bounded(rounds):
    """Which of them count is whatever a client says, refused or not."""
    spec = TensorSpec("float64", (4,))
    plan = Plan(tuple(Reduction("sum", spec, (0,), str(n)) for n in range(8)))
    rounds.approve(PreparedPlan(plan, 0))
    for said in product([0.0, 1.0], repeat=8):
        future = Future()
        rounds.push(Contribution(1, 1, 0, plan.id, said), Payload((), 1), future, 0.0)
        assert isinstance(failed(rounds)[future], InvalidRequest)
    assert 0 < len(rounds.plans[plan.id]._layouts) <= MAX_LAYOUTS


def test_a_session_that_ends_waits_no_more(rounds):
    """What it gave stays in the round; when everything ends all futures get the error, parked or open."""
    gone = push(rounds, 1)
    rounds.session_ended(1, Fenced("gone"))
    assert isinstance(failed(rounds)[gone], Fenced)
    rounds.session_ended(1, Fenced("gone"))
    assert failed(rounds) == {}
    push(rounds, 2)
    job = rounds.next_job()
    assert sessions(job) == [1, 2]
    assert finish(rounds, job) == [2]
    futures = {push(rounds, 1, 1), push(rounds, 1, 1), push(rounds, 2, generation=5)}
    for session in (1, 2):
        rounds.session_ended(session, PSError("the server ends"))
    assert set(failed(rounds)) == futures


def test_status_tells_who_is_missing(rounds):
    rounds.close_generation(Generation(2, MEMBERS))
    push(rounds, 2, generation=2)
    (waiting,) = rounds.waiting()
    assert (waiting.round, waiting.section, waiting.approved) == (0, "this", True)
    assert waiting.missing == (WORKERS[0], WORKERS[2])


# ---- Workers that make rounds of their own ----

LONERS = tuple(replace(member, consistency=ASYNC) for member in MEMBERS)
ONE, TWO, THREE = WORKERS[:3]


@pytest.fixture
def alone():
    return begun(LONERS[:2])


def test_a_push_is_a_round_of_its_own(alone):
    """Nobody is waited for or left out, whatever the plan and the number of the others' rounds."""
    push(alone, 2, 5, OTHER)
    assert [waiting.missing for waiting in alone.waiting()] == [()]
    job = alone.next_job()
    assert (job.round, job.plan, job.sequence, sessions(job), job.excluded) == (5, OTHER, TWO, [2], ())
    push(alone, 1, 5, PLAN)
    assert alone.next_job() is None, "one at a time"
    assert finish(alone, job) == [2]
    job = alone.next_job()
    assert (job.round, job.plan, job.sequence, sessions(job)) == (5, PLAN, ONE, [1])
    assert finish(alone, job) == [1]


def test_the_rounds_of_all_are_counted(alone):
    """That is what a server calls its last round; each task has its own numbers beside."""
    for session, round in ((1, 0), (2, 7), (1, 1)):
        push(alone, session, round)
        finish(alone, alone.next_job())
    assert alone.last == 2
    assert [(place.task, place.round) for place in alone.places] == [(ONE, 1), (TWO, 7)]
    with pytest.raises(InvalidRequest, match="round 1 is over; this server is at 7"):
        refused(alone, 2, 1)


def test_a_resend_of_its_own_is_answered(alone):
    """By its own record, however many rounds others have made since, and whatever their numbers."""
    push(alone, 1, 0)
    finish(alone, alone.next_job())
    for round in range(20):
        push(alone, 2, round)
        finish(alone, alone.next_job())
    first = alone.recorded(Contribution(1, 1, 0, PLAN.id, (1.0,)))
    assert first is records(alone, ONE)[0]
    assert first.sessions == {1}
    assert len(records(alone, TWO)) == RECORDS


def test_a_slow_worker_does_not_wait_for_a_burst_of_others(alone):
    """Its last round was over the longest ago, though it pushes last; with bounded staleness all may wait for it."""
    alone.close_generation(Generation(2, LONERS))
    for session, round in ((3, 0), (1, 0), (2, 0), (1, 1), (2, 1)):
        push(alone, session, round, generation=2)
        finish(alone, alone.next_job())
    for session, round in ((1, 2), (2, 2), (3, 1)):
        push(alone, session, round, generation=2)
    turns = []
    for _ in range(3):
        job = alone.next_job()
        turns.append(job.sequence)
        finish(alone, job)
    assert turns == [THREE, ONE, TWO]
    assert alone.next_job() is None


def test_a_wait_for_approval_is_ones_own(alone):
    strange = reduce_only(NUMBER, target="strange")
    push(alone, 1, plan=strange)
    assert alone.next_job() is None
    push(alone, 2)
    job = alone.next_job()
    assert sessions(job) == [2]
    finish(alone, job)
    alone.approve(PreparedPlan(strange, 0))
    assert sessions(alone.next_job()) == [1]


def test_a_contradiction_of_its_own_is_told_to_itself(alone):
    future = push(alone, 1)
    with pytest.raises(InvalidRequest, match="round 0 was already begun with another compiled step"):
        refused(alone, 1, plan=OTHER)
    assert failed(alone) == {}
    assert sessions(alone.next_job()) == [1]
    assert not future.done()


def test_what_a_dead_worker_left_whole_counts(alone):
    """Once; its place tells where its task goes on, and what it sends later is refused."""
    here, later = Position(0, 0, 4), Position(0, 1, 0)
    push(alone, 1, 3, positions=(here,))
    alone.close_generation(Generation(2, LONERS[1:2]))
    assert alone.places == (WorkerProgress(ONE, 3, (here,)),)
    assert alone.fenced == {1}
    back = Member(ONE, 9, 1, ASYNC)
    alone.close_generation(Generation(3, (back, LONERS[1])))
    push(alone, 9, 4, generation=3, positions=(later,))
    job = alone.next_job()
    assert (job.round, sessions(job), job.positions) == (3, [1], (here,))
    finish(alone, job)
    job = alone.next_job()
    assert (job.round, sessions(job), job.positions) == (4, [9], (later,))
    finish(alone, job)
    with pytest.raises(Fenced, match="completed without this process"):
        alone.recorded(Contribution(9, 3, 3, PLAN.id, (1.0,)))


def test_tasks_that_come_and_go_leave_little(alone):
    """Of each task the last answers are kept, however often it was started."""
    for life in range(50):
        session = 10 + life
        alone.close_generation(Generation(2 + life, (Member(ONE, session, 1, ASYNC), LONERS[1])))
        push(alone, session, life, generation=2 + life)
        finish(alone, alone.next_job())
    assert len(alone.sequences) == 2
    assert len(records(alone, ONE)) == RECORDS


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=40))
def test_every_push_is_counted_once(steps):
    """In any interleaving of pushes, resends and turns of the server; each task's in its own order."""
    found = Told(lambda _: "")
    found.approve(PreparedPlan(PLAN, 0))
    found.close_generation(Generation(1, LONERS))
    rounds, ran, pushed = dict.fromkeys((1, 2, 3), 0), [], []

    def run():
        job = found.next_job()
        if job is not None:
            ran.append((sessions(job)[0], job.round))
            finish(found, job)

    for session, resend in steps:
        name = (session, rounds[session])
        if found.recorded(Contribution(session, 1, name[1], PLAN.id)) is not None:
            rounds[session] += 1
            name = (session, rounds[session])
        push(found, *name)
        pushed += [name] if name not in pushed else []
        if not resend:
            run()
    for _ in steps:
        run()
    assert sorted(ran) == sorted(pushed)
    assert found.last == len(pushed) - 1


# ---- Newcomers that differ ----


@pytest.fixture
def joined(rounds):
    """Sessions 1 and 2 have made three rounds; 3 takes part from round 3 on."""
    for number in range(3):
        for session in (1, 2):
            push(rounds, session, number, start=0)
        finish(rounds, rounds.next_job())
    rounds.close_generation(Generation(2, MEMBERS, "dataset:0"))
    return rounds


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_newcomer_that_differs_is_refused_alone(joined, first):
    """With both positions, as soon as somebody comes who was there before: the round is theirs, once it is fenced."""
    new = push(joined, 3, 3, OTHER, generation=2, start=3) if first else None
    assert failed(joined) == {}
    old = push(joined, 1, 3, generation=2, start=0)
    if first:
        assert [(future, type(error)) for future, error in failed(joined).items()] == [(new, NewcomerDiverged)]
    else:
        told = r"in its first round, 3, .*worker/task:0 runs: this.*worker/task:2 runs: that"
        with pytest.raises(NewcomerDiverged, match=told) as error:
            refused(joined, 3, 3, OTHER, generation=2, start=3)
        assert error.value.task == str(WORKERS[2])
    push(joined, 2, 3, generation=2, start=0)
    assert joined.next_job() is None
    joined.close_generation(Generation(3, MEMBERS[:2]))
    job = joined.next_job()
    assert (sessions(job), job.excluded) == ([1, 2], (WORKERS[2],))
    assert failed(joined) == {}
    assert not old.done()


@pytest.mark.parametrize("right", [PLAN, OTHER])
def test_of_newcomers_that_differ_the_members_tell_who_is_wrong(joined, right):
    """Two of them come first: the one that does what the members do takes part."""
    fourth = Member(WORKERS[3], 4, 1)
    joined.close_generation(Generation(3, (*MEMBERS, fourth), "dataset:0"))
    new = {
        PLAN: push(joined, 3, 3, PLAN, generation=3, start=3),
        OTHER: push(joined, 4, 3, OTHER, generation=3, start=3),
    }
    assert failed(joined) == {}
    push(joined, 1, 3, right, generation=3, start=0)
    wrong = new.pop(PLAN if right is OTHER else OTHER)
    assert [(future, type(error)) for future, error in failed(joined).items()] == [(wrong, NewcomerDiverged)]
    push(joined, 2, 3, right, generation=3, start=0)
    joined.close_generation(
        Generation(4, tuple(m for m in (*MEMBERS, fourth) if m.session != (4 if right is PLAN else 3)))
    )
    assert len(sessions(joined.next_job())) == 3


def test_an_ended_newcomer_waits_no_more(joined):
    """Also where it waits for the members to say who is right."""
    joined.close_generation(Generation(3, (*MEMBERS, Member(WORKERS[3], 4, 1)), "dataset:0"))
    push(joined, 3, 3, PLAN, generation=3, start=3)
    doubtful = push(joined, 4, 3, OTHER, generation=3, start=3)
    joined.session_ended(4, Fenced("it ended"))
    assert list(failed(joined)) == [doubtful]


@pytest.mark.parametrize("begins", [True, False], ids=["where all begin together", "after its first round"])
def test_what_differs_differs_for_all(joined, begins):
    """In a round of members, and in the first round of a job, or of its next workers: there nobody is a newcomer."""
    round, generation = (4, 2) if not begins else (3, 3)
    if begins:
        joined.close_generation(Generation(3, MEMBERS, start=Start(3, 3)))
    else:
        for session, start in ((1, 0), (2, 0), (3, 3)):
            push(joined, session, 3, generation=2, start=start)
        finish(joined, joined.next_job())
    futures = [
        push(joined, 1, round, generation=generation, start=0),
        push(joined, 3, round, OTHER, generation=generation, start=3),
    ]
    assert {future: type(error) for future, error in failed(joined).items()} == dict.fromkeys(futures, Diverged)
