"""Push: contributions in, one answer out, the same for everyone; each counted once, whatever is resent."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from tests.kit.internals import (
    DTYPES,
    EMPTY,
    PART_BYTES,
    WINDOW,
    Apply,
    Approved,
    Contribution,
    Diverged,
    Fenced,
    Generation,
    GenerationClosed,
    Input,
    InvalidRequest,
    Member,
    Node,
    Payload,
    Plan,
    Position,
    Program,
    ProgramError,
    PSError,
    Reduction,
    Ref,
    RoundReply,
    Start,
    TensorSpec,
    spec_of,
)
from tests.kit.rig import SOON, WORKERS, given, reduce_only, sgd, sum_into, together, turn

A, B, C = WORKERS[:3]
NUMBER = TensorSpec("int64", ())


def refused(future_of):
    """The error that a push ends with, however it is told."""
    with pytest.raises(PSError) as told:
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


def test_a_mean_is_over_the_weights(job, two):
    """Of replicas, or of elements. What has no weight counts as zeros in a sum, and not at all in a mean; where nobody
    has anything the mean is NaN. The members' own arrays stay as they are, and may change once the round is over."""
    spec = TensorSpec("float32", (2,))
    reductions = tuple(Reduction(op, spec, (0,)) for op in ("sum", "mean", "mean", "mean"))
    plan = job.approve(Plan(reductions, returned=tuple(Ref("reduction", index) for index in range(4))), two[0])
    mine, others = (np.array(values, "float32") for values in ([6, 9], [2, 1]))
    replies = together(
        two[0].push(plan, [mine] * 4, weights=(0.0, 3.0, 2.0, 0.0)),
        two[1].push(plan, [others] * 4, weights=(0.0, 1.0, 0.0, 0.0)),
    )
    assert (mine.tolist(), others.tolist()) == ([6, 9], [2, 1])
    mine += 1
    again = two[0].push(plan, [mine] * 4, weights=(0.0, 3.0, 2.0, 0.0)).result(SOON)
    for reply in (*replies, again):
        total, both, one, nothing = given(reply, plan)
        assert [each.tolist() for each in (total, both, one)] == [[0.0, 0.0], [2.0, 2.5], [3.0, 4.5]]
        assert np.isnan(nothing).all()


def test_every_dtype_is_summed(job, two):
    """In its own arithmetic, in task order, beside all others."""
    dtypes = [dtype for name, dtype in DTYPES.items() if name != "bool"]
    values = [[np.array(numbers).astype(dtype) for dtype in dtypes] for numbers in ([1, 2, 3], [4, 5, 6])]
    reductions = tuple(Reduction("sum", spec_of(value), (0,)) for value in values[0])
    plan = job.approve(Plan(reductions, returned=tuple(Ref("reduction", i) for i in range(len(dtypes)))), two[0])
    reply = together(two[1].push(plan, values[1]), two[0].push(plan, values[0]))[0]
    for dtype, total, one, other in zip(dtypes, given(reply, plan), *values, strict=True):
        assert total.dtype == dtype
        assert total.tobytes() == (one + other).tobytes(), dtype


PAYLOADS = {
    "a number": np.array(2.5),
    "nothing": np.zeros((2, 0, 3), "float32"),
    "many parts": np.arange(3 * PART_BYTES // 8 + 3, dtype="float64"),
    "more than a message": np.ones((5, 1 << 20), "uint8"),
    "bfloat16": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "an odd number of bytes": np.arange(7, dtype="int8"),
}


def test_every_shape_travels(job, two):
    """There in a contribution, and back in the answer, among others of another size."""
    small = TensorSpec("int8", (3,))
    for name, value in PAYLOADS.items():
        reductions = tuple(Reduction("sum", spec, (0,)) for spec in (small, spec_of(value), small))
        plan = job.approve(Plan(reductions, returned=tuple(Ref("reduction", index) for index in range(3))), two[0])
        replies = together(*(worker.push(plan, [[1, 2, 3], value, [4, 5, 6]]) for worker in two))
        turn(*two)
        for reply in replies:
            first, middle, last = given(reply, plan)
            assert (first.tolist(), last.tolist()) == ([2, 4, 6], [8, 10, 12]), name
            assert middle.shape == value.shape, name
            assert middle.tobytes() == np.ascontiguousarray(value + value).tobytes(), name


def test_operands_reach_the_program(job, two):
    """A learning rate is data, and so may change from round to round."""
    variable = job.variable(two[0], np.array([10.0, 20.0]))
    plan = job.approve(sgd(variable), two[0])
    for rate in (0.5, 0.25):
        replies = together(*(worker.push(plan, [[2.0, 4.0]], operands=[rate]) for worker in two))
        turn(*two)
    assert given(replies[0], plan)[0].tolist() == [8.5, 17.0]
    assert job.value(two[1], variable).tolist() == [8.5, 17.0]


def test_wanted_variables_come_with_the_answer(job, two):
    """As they are after the round; each member what it asked for."""
    w = job.variable(two[0], np.array([5, 6]))
    v, plan = job.adder(two[0], 1)
    plain, full = together(two[0].push(plan, [1]), two[1].push(plan, [1], want=(w.id, v.id)))
    assert len(given(plain, plan)) == 1
    total, second, first = given(full, plan, 0, (w, v))
    assert (int(total), second.tolist(), int(first)) == (2, [5, 6], 3)


def test_programs_run_in_order(job, two):
    """The second sees what the first has assigned; results pass from one to the other."""
    v, w = job.variable(two[0], np.array(1.0)), job.variable(two[0], np.array(0.0))
    spec = v.spec.tensor
    double = Program((Input("variable", spec),), (Node("add", (0, 0)),), ((0, 1),), (1,))
    copy = Program((Input("variable", spec), Input("variable", spec)), (), ((0, 1),), ())
    keep = Program((Input("variable", spec), Input("value", spec)), (Node("add", (0, 1)),), ((0, 2),), ())
    refs = [Ref("variable", v.id), Ref("variable", w.id)]
    plan = Plan(
        programs=(double, copy, keep),
        applies=(
            Apply(0, (0,), (refs[0],)),
            Apply(1, (0,), (refs[1], refs[0])),
            Apply(2, (0,), (refs[1], Ref("result", 0))),
        ),
        returned=(Ref("result", 0),),
    )
    job.approve(plan, two[0])
    reply = together(*(worker.push(plan) for worker in two))[0]
    assert float(given(reply, plan)[0]) == 2.0
    assert [float(job.value(two[0], variable)) for variable in (v, w)] == [2.0, 4.0]


def test_servers_do_their_own_part(job, two):
    """A plan over two servers sends each what it needs, and gets each value from one. Servers that a plan does not
    touch take no part, and their rounds have gaps."""
    v, w = job.variable(two[0], np.array(0), (0,)), job.variable(two[0], np.array([0, 0]), (1,))
    plan = job.approve(sum_into(v, w), two[0])
    values = [[3, [4, 5]], [30, [40, 50]]]
    pushed = [[m.push(plan, value, server=n) for m, value in zip(two, values, strict=True)] for n in (0, 1)]
    for server, expected in ((0, 33), (1, [44, 55])):
        replies = together(*pushed[server])
        assert [array.tolist() for array in given(replies[0], plan, server)] == [expected]
    assert [job.value(two[0], variable).tolist() for variable in (v, w)] == [33, [44, 55]]
    here, there = reduce_only(NUMBER, server=0), reduce_only(NUMBER, server=1)
    job.append(Approved(here), Approved(there))
    for plan, server in ((here, 0), (there, 1), (there, 1), (here, 0), (there, 1)):
        turn(*two)
        together(*(worker.push(plan, [1], server=server) for worker in two))
    assert [server.status().round for server in job.verbs] == [4, 5]


def test_more_and_positions_are_everyones(job, two):
    """One that has a further batch is enough; the datasets' positions are kept for who comes later."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    places = (Position(0, 1, 5), Position(1, 0, 2))
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
    futures = [_wrong(job, two[0], plan), two[1].push(plan, [2])]
    for worker in two:
        job.arrived(worker)
    assert not any(future.done() for future in futures)
    job.append(Approved(plan))
    assert isinstance(refused(lambda: futures[0]), InvalidRequest)
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
    for _ in range(WINDOW + 1):
        together(*(worker.push(plan, [1]) for worker in two))
        turn(*two)
    two[0].round = 0
    assert "round 0 is over" in str(refused(lambda: two[0].push(plan, [1])))
    assert job.verbs[0].status().waiting == ()


# ---- Members that go ----


def test_a_round_is_completed_without_who_is_gone(job, two):
    """The answer names whom it lacks; the mean is over those who are there."""
    plan = job.approve(reduce_only(TensorSpec("float64", ()), "mean"), two[0])
    waiting = two[0].push(plan, [6.0])
    job.arrived(two[0])
    job.close([two[0].member])
    reply = waiting.result(SOON)
    assert (reply.excluded, reply.generation.number) == ((B,), 2)
    assert float(given(reply, plan)[0]) == 6.0
    assert isinstance(refused(lambda: two[1].push(plan, [3.0])), Fenced)


def test_what_a_lost_member_gave_whole_counts(job, two):
    """It is in the round, and nobody is left out."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    lost = two[1].push(plan, [3])
    job.arrived(two[1])
    job.close([two[0].member])
    reply = two[0].push(plan, [5]).result(SOON)
    assert (reply.excluded, int(given(reply, plan)[0])) == ((), 8)
    assert isinstance(refused(lambda: lost), Fenced)


def _wrong(job, worker, plan) -> Future[RoundReply]:
    """A push whose payload does not fit its plan."""
    said = Contribution(worker.session, worker.generation, worker.round, plan.id, (1.0,))
    return job.verbs[0].push(said, Payload.pack([np.zeros(5)]))


def test_new_members_come_with_their_generation(job, two):
    """A round expects the members of the generation that its pushes name."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    session = job.open(C).session
    third = Member(C, session, 1)
    job.append(GenerationClosed(Generation(2, (*job.generation.members, third), "dataset:0")))
    replies = together(*(worker.push(plan, [1]) for worker in two))
    assert (replies[0].generation.number, replies[0].excluded) == (2, ())
    turn(*two)
    futures = []
    for worker in two:
        worker.generation = 2
        futures.append(worker.push(plan, [1]))
        job.arrived(worker)
    assert not any(future.done() for future in futures)
    futures.append(job.verbs[0].push(Contribution(session, 2, 1, plan.id, (1.0,)), Payload.pack([np.array(5)])))
    assert [int(given(reply, plan)[0]) for reply in together(*futures)] == [7, 7, 7]


# ---- Errors ----


def test_a_push_that_does_not_fit_is_refused(job, two):
    """Its sender alone is told; it may send what fits, and the round is made."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    other = two[1].push(plan, [2])
    job.arrived(two[1])
    wrong = [((1.0,), 4), ((1.0,), 16), ((0.0,), 8), ((), 8), ((1.0, 1.0), 8), ((-1.0,), 8), ((np.nan,), 8)]
    for weights, size in wrong:
        said = Contribution(two[0].session, 1, 0, plan.id, weights)
        error = refused(lambda said=said, size=size: job.verbs[0].push(said, Payload.pack([np.zeros(size, "int8")])))
        assert isinstance(error, InvalidRequest), (weights, size)
    assert not other.done()
    assert int(given(together(other, two[0].push(plan, [3]))[0], plan)[0]) == 5


def test_different_plans_in_a_round_are_a_divergence(job, two):
    """All are told, with both positions; nothing is applied."""
    v, one = job.adder(two[0])
    other = job.approve(reduce_only(NUMBER, target="'loss'"), two[0])
    waiting = two[0].push(one, [5])
    job.arrived(two[0])
    for error in (refused(lambda: two[1].push(other, [5])), refused(lambda: waiting)):
        assert isinstance(error, Diverged)
        assert all(word in str(error) for word in ("round 0", str(A), str(B), "'v0'", "'loss'"))
    for worker in two:
        with pytest.raises(Diverged):
            job.verbs[0].heartbeat(worker.session, -1, b"")
    job.close([])
    (new,) = job.join(C)
    new.round = 1
    assert int(given(new.push(one, [4]).result(SOON), one)[0]) == 4
    assert int(job.value(new, v)) == 4


@pytest.mark.parametrize(
    ("operands", "words"),
    [((0.5, 0.25), (str(A), str(B), "0.5", "0.25", "operand 0")), ((0.0, -0.0), ()), ((np.nan, np.nan), None)],
    ids=["others", "a zero and its negative", "equal NaNs"],
)
def test_different_operands_are_a_divergence(job, two, operands, words):
    """Both values and both processes are named; nothing is applied. They are compared bit by bit."""
    variable = job.variable(two[0], np.array([1.0]))
    plan = job.approve(sgd(variable), two[0])
    futures = [worker.push(plan, [[2.0]], operands=[one]) for worker, one in zip(two, operands, strict=True)]
    if words is None:
        together(*futures)
        return
    for future in futures:
        error = refused(lambda future=future: future)
        assert isinstance(error, Diverged)
        assert all(word in str(error) for word in words)


def negative_power(variable):
    """A plan whose program nobody can run, which the verifier cannot know; before it, one that can be run."""
    spec = variable.spec.tensor
    inputs = (Input("variable", spec), Input("value", spec))
    add = Program(inputs, (Node("add", (0, 1)),), ((0, 2),), (2,))
    power = Program(inputs, (Node("pow", (0, 1)),), ((0, 2),), ())
    refs = (Ref("variable", variable.id), Ref("reduction", 0))
    return Plan(
        (Reduction("sum", spec, variable.servers),),
        (),
        (add, power),
        (Apply(0, variable.servers, refs), Apply(1, variable.servers, refs)),
        (Ref("result", 0),),
    )


def test_an_error_in_a_program_reaches_everyone(job, two):
    """All get the same error, the variables stay as they were, and the next round is made."""
    variable = job.variable(two[0], np.array(3))
    bad, good = job.approve(negative_power(variable), two[0]), job.approve(sum_into(variable), two[0])
    errors = [refused(lambda f=f: f) for f in [worker.push(bad, [-1]) for worker in two]]
    assert [type(error) for error in errors] == [ProgramError, ProgramError]
    assert str(errors[0]) == str(errors[1])
    assert str(refused(lambda: two[0].push(bad, [-1]))) == str(errors[0])
    turn(*two)
    together(*(worker.push(good, [1]) for worker in two))
    assert int(job.value(two[0], variable)) == 5


def optional(plan):
    """The plan whose updates are left out where nobody contributes to them."""
    return replace(plan, applies=tuple(replace(each, optional=True) for each in plan.applies))


def test_an_update_may_be_excluded(job, two):
    """Where nobody's contribution to it has a weight; one has, and it is made, as if it had always to be.

    Never one without contributions, nor one that has results, which others read: such plans are refused.
    """
    variables = [job.variable(two[0], np.full(3, value)) for value in (1.0, 2.0, 3.0)]
    doubling = Program((Input("variable", variables[0].spec.tensor),), (Node("add", (0, 0)),), ((0, 1),), ())
    doubles = Plan(programs=(doubling,), applies=(Apply(0, (0,), (Ref("variable", variables[0].id),)),))
    for refused_plan in (sgd(variables[0]), doubles):
        with pytest.raises(ProgramError, match="can be skipped must take a reduction, and cannot return results"):
            job.approve(optional(refused_plan), two[0])
    plan = job.approve(optional(sum_into(*variables, op="mean", returned=False)), two[0])
    want = tuple(variable.id for variable in variables)
    pushed = [
        worker.push(plan, [np.full(3, 10.0)] * 3, weights=weights, want=want)
        for worker, weights in zip(two, ([0.0, 0.0, 1.0], [2.0, 0.0, 0.0]), strict=True)
    ]
    for reply in together(*pushed):
        found = reply.payload.tensors([variable.spec.tensor for variable in variables])
        assert [each.tolist() for each in found] == [[6.0] * 3, [2.0] * 3, [13.0] * 3]


def test_who_observes_sends_nothing(job, two):
    """It is waited for and answered, and neither its contribution nor its operands count. A round that all observe
    changes nothing: all were started again while the last round of those before them was still to be completed."""
    variable = job.variable(two[0], np.array([1.0]))
    plan = job.approve(sgd(variable), two[0])

    def observe(worker):
        said = Contribution(worker.session, 1, worker.round, plan.id, (0.0,), observes=True)
        return job.verbs[0].push(said, EMPTY)

    observing = observe(two[1])
    job.arrived(two[1])
    assert not observing.done()
    replies = together(two[0].push(plan, [[2.0]], operands=[0.25]), observing)
    assert [given(reply, plan)[0].tolist() for reply in replies] == [[0.5], [0.5]]
    turn(*two)
    assert len(together(*map(observe, two))) == 2
    assert job.value(two[0], variable).tolist() == [0.5]


def test_a_start_is_where_rounds_begin(job, two):
    """Members that come later begin after what was there; gaps in the numbers do not matter."""
    plan = job.approve(reduce_only(NUMBER), two[0])
    generation = Generation(2, job.generation.members, "", Start(2, 40))
    job.append(GenerationClosed(generation))
    for worker in two:
        worker.generation, worker.round = 2, 40
    assert together(*(worker.push(plan, [1]) for worker in two))[0].round == 40
