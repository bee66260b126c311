"""The contract of Push and Pull: once, whole, the same for everyone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from rig import SOON, WORKERS, Job, eventually, given, reduce_only, sgd, sum_into, together

from pswire.errors import Diverged, Fenced, InvalidRequest, ProgramError
from pswire.program import Input, Node, Program
from pswire.spec import Apply, EpochClosed, Epoch, Operand, Plan, Position, Ref
from pswire.tensor import TensorSpec


def pair(job: Job, value, **place):
    a, b = job.join(*WORKERS[:2])
    variable = job.variable(a, value, **place)
    return a, b, variable


def test_a_round_sums_and_answers_all_alike(job):
    """Both members get the sum, and the variable's new value that they want back."""
    a, b, v = pair(job, np.zeros(3, "float32"))
    plan = job.approve(sum_into(v), a)
    replies = together(a.push(plan, [[1, 2, 3]], want=(v.id,)), b.push(plan, [[10, 20, 30]]))
    assert [r.round for r in replies] == [0, 0]
    assert [r.left_out for r in replies] == [(), ()]
    first = given(replies[0], plan, want=[v])
    np.testing.assert_array_equal(first[0], [11, 22, 33])
    np.testing.assert_array_equal(first[1], [11, 22, 33])
    np.testing.assert_array_equal(given(replies[1], plan)[0], [11, 22, 33])
    np.testing.assert_array_equal(job.value(a, v, 0), [11, 22, 33])


def test_a_push_waits_for_the_chief(job):
    """Contributions are kept until the plan is approved, and then count."""
    a, b, v = pair(job, np.int64(0))
    plan = sum_into(v)
    job.verbs[0].propose(a.session, plan, "", None)
    first, second = a.push(plan, [1]), b.push(plan, [2])
    assert not eventually(lambda: job.verbs[0].status().waiting)[0].approved
    job.approve(plan, b)
    together(first, second)
    assert job.value(a, v, 0) == 3


def test_a_resend_is_answered_and_not_applied(job):
    """While the round waits, after it is complete, and one round later: the variable changes once."""
    a, b, v = pair(job, np.int64(0))
    plan = job.approve(sum_into(v), a)
    early = [a.push(plan, [5]), a.push(plan, [5])]
    replies = together(*early, b.push(plan, [7]), a.push(plan, [5], want=(v.id,)))
    assert [int(given(r, plan)[0]) for r in replies[:3]] == [12] * 3
    assert given(replies[3], plan, want=[v])[1] == 12
    a.round = b.round = 1
    together(a.push(plan, [1]), b.push(plan, [1]))
    a.round = 0
    assert given(a.push(plan, [5]).result(SOON), plan)[0] == 12
    assert job.value(a, v, 1) == 14


def test_a_caller_that_went_away_does_not_stop_the_round(job):
    """What it asked for happens all the same."""
    a, b, v = pair(job, np.int64(0))
    plan = job.approve(sum_into(v), a)
    a.push(plan, [5]).cancel()
    eventually(lambda: job.verbs[0].status().waiting and WORKERS[0] not in job.verbs[0].status().waiting[0].missing)
    b.push(plan, [7]).result(SOON)
    assert job.value(b, v, 0) == 12


def test_a_mean_divides_by_the_weights(job):
    """Weights add up over members; a weight of 0 sends nothing and counts for nothing."""
    a, b = job.join(*WORKERS[:2])
    plan = job.approve(reduce_only(TensorSpec("float64", (2,)), "mean"), a)
    replies = together(a.push(plan, [[6, 9]], weights=[3]), b.push(plan, [None], weights=[0]))
    np.testing.assert_array_equal(given(replies[0], plan)[0], [2, 3])
    a.round = b.round = 1
    nothing = together(a.push(plan, [None], weights=[0]), b.push(plan, [None], weights=[0]))
    assert np.isnan(given(nothing[1], plan)[0]).all()


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3),
        np.zeros((0, 4)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=">i4"),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.array([1 + 2j]),
        np.arange(1_500_000, dtype="float32"),
    ],
    ids=["0-d", "empty", "Fortran", "big-endian", "bfloat16", "complex", "6 MB"],
)
def test_every_tensor_arrives_as_it_is(job, value):
    """Created, pushed, summed and read: bit for bit, whatever its order, dtype or size."""
    a, b, v = pair(job, value)
    np.testing.assert_array_equal(job.value(b, v), value)
    plan = job.approve(sum_into(v), a)
    replies = together(a.push(plan, [value]), b.push(plan, [np.zeros_like(value)]))
    np.testing.assert_array_equal(given(replies[1], plan)[0], value)
    np.testing.assert_array_equal(job.value(a, v, 0), np.asarray(value) + np.asarray(value))


def test_two_servers_each_make_their_part(job):
    """A round is complete on a server when that server has its contributions."""
    a, b, v = pair(job, np.int64(0))
    u = job.variable(a, np.int64(0), servers=(1,))
    plan = job.approve(sum_into(v, u), a)
    futures = [w.push(plan, [n, 10 * n], server=s) for n, w in ((1, a), (2, b)) for s in (0, 1)]
    together(*futures)
    assert (job.value(a, v, 0), job.value(b, u, 0)) == (3, 30)
    assert [server.status().round for server in job.verbs] == [0, 0]


def test_a_read_waits_for_the_round_that_it_asks_for(job):
    """A value that has not seen the round is not given."""
    a, b, v = pair(job, np.int64(1))
    plan = job.approve(sum_into(v), a)
    waiting = job.verbs[0].pull(a.session, [v.id], 0)
    a.push(plan, [1])
    assert not waiting.done()
    b.push(plan, [1]).result(SOON)
    assert waiting.result(SOON).round == 0
    assert waiting.result(SOON).payload.tensors([v.spec.tensor])[0] == 3


def test_who_is_dropped_is_named(job):
    """An epoch without a member completes the open round; its contribution counts if it is whole."""
    a, b, v = pair(job, np.int64(0))
    plan = job.approve(sum_into(v), a)
    waiting = a.push(plan, [1], more=True, positions=(Position(0, 0, 1),))
    job.close([a.member])
    reply = waiting.result(SOON)
    assert (reply.left_out, reply.more, reply.epoch.number) == ((b.task,), True, 2)
    assert job.value(a, v, 0) == 1
    assert job.verbs[0].status().positions == (Position(0, 0, 1),)
    with pytest.raises(Fenced):
        b.push(plan, [1]).result(SOON)


def test_different_plans_in_one_round_are_told_to_all(job):
    """Both sections are in the error, at every member, and in the next call."""
    a, b, v = pair(job, np.int64(0))
    u = job.variable(a, np.int64(0))
    one, other = job.approve(sum_into(v), a), job.approve(sum_into(u), a)
    futures = [a.push(one, [1]), b.push(other, [1])]
    for future in futures:
        with pytest.raises(Diverged, match="(?s)'v0'.*'v1'|'v1'.*'v0'"):
            future.result(SOON)
    with pytest.raises(Diverged):
        job.verbs[0].beat(a.session, -1, b"")
    assert (job.value(job.join(WORKERS[2])[0], v), job.verbs[0].status().waiting) == (0, ())


def test_operands_must_be_equal(job):
    """A learning rate that differs is a divergence that names both values; nothing is applied."""
    a, b, v = pair(job, np.float32(8))
    plan = job.approve(sgd(v), a)
    futures = [a.push(plan, [2], operands=[0.5]), b.push(plan, [2], operands=[0.25])]
    for future in futures:
        with pytest.raises(Diverged, match=r"0\.5.*0\.25"):
            future.result(SOON)


def test_a_failing_round_is_told_to_all_and_changes_nothing(job):
    """The next round works."""
    a, b, v = pair(job, np.int64(2))
    tensor = TensorSpec("int64", ())
    power = Program(
        (Input("variable", tensor), Input("operand", tensor)), (Node("pow", (0, 1)),), ((0, 2),), ()
    )
    apply = Apply(0, (0,), (Ref("variable", v.id), Ref("operand", 0)))
    plan = job.approve(Plan(operands=(Operand(tensor, (0,)),), programs=(power,), applies=(apply,)), a)
    for future in [w.push(plan, operands=[-1]) for w in (a, b)]:
        with pytest.raises(ProgramError):
            future.result(SOON)
    assert job.value(a, v, 0) == 2
    a.round = b.round = 1
    together(*[w.push(plan, operands=[3]) for w in (a, b)])
    assert job.value(b, v, 1) == 8


def test_a_contribution_that_does_not_fit_is_refused_to_its_sender_alone(job):
    """The round waits for one that does."""
    a, b, v = pair(job, np.zeros(3, "float32"))
    plan = job.approve(sum_into(v), a)
    good = a.push(plan, [[1, 1, 1]])
    narrow = reduce_only(TensorSpec("float32", (2,)))
    from rig import payload

    from pswire.api import Contribution

    said = Contribution(b.session, b.epoch, 0, plan.id, (1.0,))
    with pytest.raises(InvalidRequest):
        job.verbs[0].push(said, payload(narrow, 0, [[1, 1]], (1.0,), ())).result(SOON)
    assert not good.done()
    together(good, b.push(plan, [[1, 1, 1]]))
    np.testing.assert_array_equal(job.value(a, v, 0), [2, 2, 2])


def test_a_member_of_no_epoch_is_refused(job):
    """A session that never joined cannot contribute."""
    a, _, v = pair(job, np.int64(0))
    plan = job.approve(sum_into(v), a)
    stranger = job.open(WORKERS[2])
    a.session = stranger.session
    with pytest.raises(Fenced):
        a.push(plan, [1]).result(SOON)


def test_an_unknown_variable_is_refused(job):
    """With its number in the message."""
    (a,) = job.join(WORKERS[0])
    with pytest.raises(InvalidRequest, match="77"):
        job.verbs[0].pull(a.session, [77], -1).result(SOON)


def test_a_label_of_a_later_epoch_waits_for_it(job):
    """A worker may know an epoch sooner than a server does."""
    a, b, v = pair(job, np.int64(0), servers=(1,))
    plan = job.approve(sum_into(v), a)
    a.epoch = b.epoch = 2
    futures = [w.push(plan, [1], server=1) for w in (a, b)]
    eventually(lambda: job.verbs[1].status().waiting)
    assert not any(f.done() for f in futures)
    job.append(EpochClosed(Epoch(2, (a.member, b.member))))
    together(*futures)
    assert job.value(a, v, 0) == 2
