"""Push: contributions in, one answer out, the same for everyone; each counted once, whatever is resent."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit import internals as inside
from tests.kit.rig import SOON, WORKERS, Worker, given, reduce_only, sgd, together, turn

A, B, C = WORKERS[:3]
NUMBER = inside.TensorSpec("int64", ())


def refused(future_of):
    """The error that a push ends with, however it is told."""
    with pytest.raises(inside.PSError) as told:
        future_of().result(SOON)
    return told.value


# ---- What a round does ----


def test_a_round_waits_for_everyone(job, two):
    """And then all get the same answer, and the variable has everyone's share: exactly, round after round."""
    one, other = two
    variable, plan = job.adder(one, [1, 2])
    first = one.push(plan, [[10, 20]])
    job.arrived(one)
    assert not first.done()
    replies = together(first, other.push(plan, [[100, 200]]))
    for reply in replies:
        assert (reply.round, reply.generation, reply.more, reply.excluded) == (0, job.generation, False, ())
        assert given(reply, plan)[0].tolist() == [110, 220]
    assert job.value(one, variable, 0).tolist() == [111, 222]
    total = 111
    for number in range(1, 30):
        turn(*two)
        together(*(worker.push(plan, [[number * 7 + place, 0]]) for place, worker in enumerate(two)))
        total += 14 * number + 1
    assert job.value(one, variable).tolist() == [total, 222]
    assert job.verbs[0].status().round == 29


def test_wanted_variables_come_with_the_answer(job, two):
    """As they are after the round; each member what it asked for."""
    w = job.variable(two[0], np.array([5, 6]))
    v, plan = job.adder(two[0], 1)
    plain, full = together(two[0].push(plan, [1]), two[1].push(plan, [1], want=(w.id, v.id)))
    assert len(given(plain, plan)) == 1
    total, second, first = given(full, plan, 0, (w, v))
    assert (int(total), second.tolist(), int(first)) == (2, [5, 6], 3)


def test_more_and_positions_are_everyones(job, two):
    """One that has a further batch is enough; the datasets' positions are kept for who comes later."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    places = (inside.Position(0, 1, 5), inside.Position(1, 0, 2))
    replies = together(*(w.push(plan, [1], more=w is two[1], positions=places) for w in two))
    assert [reply.more for reply in replies] == [True, True]
    assert job.verbs[0].status().positions == places
    turn(*two)
    assert not together(*(worker.push(plan, [1]) for worker in two))[0].more
    assert job.verbs[0].status().positions == places


def test_a_round_waits_for_its_approval(job, two):
    """Contributions are kept meanwhile; one that does not fit is refused then, and its sender may send what fits."""
    plan = reduce_only(NUMBER)
    job.verbs[0].propose(two[0].session, plan, "", None)
    wrong = inside.Contribution(two[0].session, two[0].generation, 0, plan.id, (1.0,))
    futures = [job.verbs[0].push(wrong, inside.Payload.pack([np.zeros(5)])), two[1].push(plan, [2])]
    for worker in two:
        job.arrived(worker)
    assert not any(future.done() for future in futures)
    job.append(inside.Approved(plan))
    assert isinstance(refused(lambda: futures[0]), inside.InvalidRequest)
    assert int(given(together(futures[1], two[0].push(plan, [2]))[0], plan)[0]) == 4


# ---- Resends ----


def test_a_push_that_is_resent_while_it_waits_counts_once(job, two):
    """All calls get the answer, but for those whose caller has gone away. Other contents under a name that is taken
    change nothing: the first stands."""
    variable, plan = job.adder(two[0])
    gone, *futures = [two[0].push(plan, [5]) for _ in range(3)]
    job.arrived(two[0])
    gone.cancel()
    futures += [two[0].push(plan, [999]), two[1].push(plan, [2]), two[0].push(plan, [5])]
    assert [int(given(reply, plan)[0]) for reply in together(*futures)] == [7] * 5
    assert int(job.value(two[0], variable)) == 7
    turn(*two)
    gone = two[0].push(plan, [5])
    job.arrived(two[0])
    gone.cancel()
    assert int(given(two[1].push(plan, [2]).result(SOON), plan)[0]) == 7, "it has contributed all the same"
    assert int(job.value(two[0], variable)) == 14


def test_a_push_resent_after_completion_gets_the_recorded_answer(job, two):
    """However often, and even after the round that follows has begun; a server remembers those of a window."""
    variable, plan = job.adder(two[0])
    first = together(*(w.push(plan, [5], more=True, want=(0,)) for w in two))[0]
    for _ in range(2):
        again = two[0].push(plan, [5], more=True, want=(0,)).result(SOON)
        assert (again.round, again.generation, again.more, again.excluded) == (0, first.generation, True, ())
        assert [int(x) for x in given(again, plan, 0, (variable,))] == [10, 10]
    turn(two[1])
    two[1].push(plan, [1])
    job.arrived(two[1])
    assert int(given(two[0].push(plan, [5]).result(SOON), plan)[0]) == 10
    assert int(job.value(two[0], variable)) == 10
    turn(two[0])
    for _ in range(inside.WINDOW + 1):
        together(*(worker.push(plan, [1]) for worker in two))
        turn(*two)
    two[0].round = 0
    assert "round 0 is over" in str(refused(lambda: two[0].push(plan, [1])))
    assert job.verbs[0].status().waiting == ()


# ---- Members that go ----


def test_a_round_is_completed_without_who_is_gone(job, two):
    """The answer names whom it lacks; the mean is over those who are there."""
    plan = job.approve(reduce_only(inside.TensorSpec("float64", ()), "mean"), two[0])
    waiting = two[0].push(plan, [6.0])
    job.arrived(two[0])
    job.close([two[0].member])
    reply = waiting.result(SOON)
    assert (reply.excluded, reply.generation.number) == ((B,), 2)
    assert float(given(reply, plan)[0]) == 6.0
    assert isinstance(refused(lambda: two[1].push(plan, [3.0])), inside.Fenced)


def test_new_members_come_with_their_generation(job, two):
    """A round expects the members of the generation that its pushes name."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    session = job.open(C).session
    third = inside.Member(C, session, 1)
    job.append(inside.GenerationClosed(inside.Generation(2, (*job.generation.members, third), "dataset:0")))
    replies = together(*(worker.push(plan, [1]) for worker in two))
    assert (replies[0].generation.number, replies[0].excluded) == (2, ())
    turn(*two)
    futures = []
    for worker in two:
        worker.generation = 2
        futures.append(worker.push(plan, [1]))
        job.arrived(worker)
    assert not any(future.done() for future in futures)
    futures.append(
        job.verbs[0].push(inside.Contribution(session, 2, 1, plan.id, (1.0,)), inside.Payload.pack([np.array(5)]))
    )
    assert [int(given(reply, plan)[0]) for reply in together(*futures)] == [7, 7, 7]


def test_a_newcomer_that_differs_ends_alone(job, two):
    """Though it pushes first it is told with both positions, and leaves; the others go on without it.

    Its next process takes part.
    """
    plan, other = (job.approve(reduce_only(NUMBER, target=target), two[0]) for target in ("this", "that"))
    together(*(worker.push(plan, [1]) for worker in two))
    turn(*two)
    members, third = job.generation.members, Worker(job, C, job.open(C).session, generation=2, round=1)
    job.append(inside.GenerationClosed(inside.Generation(2, (*members, third.member), "dataset:0")))
    early = third.push(other, [5], start=1)
    job.arrived(third)
    for worker in two:
        worker.generation = 2
    futures = [worker.push(plan, [1], start=0) for worker in two]
    told = early.exception(SOON)
    assert isinstance(told, inside.NewcomerDiverged)
    assert f"in its first round, 1, {A} runs: " in str(told)
    assert f"{C} runs: " in str(told)
    job.verbs[0].leave(third.session, f"{type(told).__name__}: {told.message}")  # as its process does
    job.append(inside.GenerationClosed(inside.Generation(3, members)))
    assert [int(given(reply, plan)[0]) for reply in together(*futures)] == [2, 2]
    turn(*two)
    back = Worker(job, C, job.open(C).session, generation=4, round=2)
    job.append(inside.GenerationClosed(inside.Generation(4, (*members, back.member), "dataset:0")))
    for worker in two:
        worker.generation = 4
    futures = [worker.push(plan, [1], start=start) for worker, start in zip((*two, back), (0, 0, 2), strict=True)]
    assert [int(given(reply, plan)[0]) for reply in together(*futures)] == [3, 3, 3]


# ---- Errors ----


def test_a_push_that_does_not_fit_is_refused(job, two):
    """Its sender alone is told; it may send what fits, and the round is made."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    other = two[1].push(plan, [2])
    job.arrived(two[1])
    wrong = [((1.0,), 4), ((1.0,), 16), ((0.0,), 8), ((), 8), ((1.0, 1.0), 8), ((-1.0,), 8), ((np.nan,), 8)]
    for weights, size in wrong:
        said = inside.Contribution(two[0].session, 1, 0, plan.id, weights)
        error = refused(
            lambda said=said, size=size: job.verbs[0].push(said, inside.Payload.pack([np.zeros(size, "int8")]))
        )
        assert isinstance(error, inside.InvalidRequest), (weights, size)
    assert not other.done()
    assert int(given(together(other, two[0].push(plan, [3]))[0], plan)[0]) == 5


def test_who_observes_sends_nothing(job, two):
    """It is waited for and answered, and neither its contribution nor its operands count. A round that all observe
    changes nothing: all were started again while the last round of those before them was still to be completed."""
    variable = job.variable(two[0], np.array([1.0]))
    plan = job.approve(sgd(variable), two[0])

    def observe(worker):
        said = inside.Contribution(worker.session, 1, worker.round, plan.id, (0.0,), observes=True)
        return job.verbs[0].push(said, inside.EMPTY)

    observing = observe(two[1])
    job.arrived(two[1])
    assert not observing.done()
    replies = together(two[0].push(plan, [[2.0]], operands=[0.25]), observing)
    assert [given(reply, plan)[0].tolist() for reply in replies] == [[0.5], [0.5]]
    turn(*two)
    assert len(together(*map(observe, two))) == 2
    assert job.value(two[0], variable).tolist() == [0.5]
