"""Rows in rounds and reads: what is pushed, what comes back with the answer, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.contributions import packed, rows
from tests.kit.internals import EMPTY, PART_BYTES, Contribution, InvalidRequest, RowRead, TensorSpec, row_specs, spec_of
from tests.kit.rig import SOON, WORKERS, sum_into, together, turn

A, B = WORKERS[:2]
TABLE = np.arange(12, dtype="float32").reshape(6, 2)


def of_rows(variable, **more):
    """A plan that adds rows to a table and gives them back."""
    plan = sum_into(variable)
    return replace(plan, reductions=tuple(replace(each, form="rows") for each in plan.reductions), **more)


def read_of(variable, *ids):
    return RowRead.of(variable.id, np.array(ids, np.int64))


def push(worker, plan, *given, lookups=(), want=(), **said):
    """Contributes rows, and asks for some."""
    counts, payload = packed(plan, given)
    weights = tuple(0.0 if one is None else 1.0 for one in given)
    header = Contribution(
        worker.session, worker.generation, worker.round, plan.id, weights, want=want, rows=counts, lookups=lookups
    )
    return worker.job.verbs[0].push(replace(header, **said), payload)


def looked_up(reply, plan, *counts, want=()):
    """The wanted variables, then the rows that an answer has for the member that asked for so many of the table."""
    given = [spec for _, spec in plan.given(0)]
    for (_, whole), count in zip(plan.given_rows(0), reply.rows, strict=True):
        given += row_specs(whole, count)
    wanted = [each.spec.tensor for each in want]
    asked = [TensorSpec("float32", (count, 2)) for count in counts]
    tensors = reply.payload.tensors([*wanted, *given, *asked])
    return [each.tolist() for each in (*tensors[: len(want)], *tensors[len(want) + len(given) :])]


def test_an_answer_has_the_rows_that_its_member_asked_for(job, two):
    """As they are after the round; who asks for others, or none, gets these; with whole variables before them."""
    table, other = (job.variable(two[0], TABLE) for _ in range(2))
    plan = job.approve(of_rows(table), two[0])
    replies = together(
        push(two[0], plan, rows(1, 3), lookups=(read_of(table, 3, 0, 3), read_of(other, 5)), want=(other.id,)),
        push(two[1], plan, rows(3, 4), lookups=()),
    )
    after = TABLE.copy()
    after[[1, 4]] += 1
    after[3] += 2
    found = looked_up(replies[0], plan, 3, 1, want=(other,))
    assert found == [TABLE.tolist(), after[[3, 0, 3]].tolist(), TABLE[[5]].tolist()]
    for reply in replies:
        assert reply.rows == (3,)
    assert looked_up(replies[1], plan) == []
    ids, values = replies[1].payload.tensors(row_specs(table.spec.tensor, 3))
    assert (ids.tolist(), values[:, 0].tolist()) == ([1, 3, 4], [1, 2, 1])
    assert job.value(two[0], table).tolist() == after.tolist()


def test_no_rows_may_be_asked_for_and_sent(job, two):
    """Neither changes what is there; a reduction in which nobody has rows gives none. Who observes sends no rows, and
    gets those after the round."""
    table = job.variable(two[0], TABLE)
    plan = job.approve(of_rows(table), two[0])
    replies = together(push(two[0], plan, rows(), lookups=(read_of(table),)), push(two[1], plan, None))
    assert looked_up(replies[0], plan, 0) == [[]]
    assert replies[0].rows == (0,)
    assert job.value(two[0], table).tolist() == TABLE.tolist()
    turn(*two)
    said = Contribution(two[1].session, 1, 1, plan.id, (0.0,), observes=True, lookups=(read_of(table, 1),))
    replies = together(push(two[0], plan, rows(1)), job.verbs[0].push(said, EMPTY))
    assert looked_up(replies[1], plan, 1) == [[(TABLE[1] + 1).tolist()]]


def test_a_push_that_is_sent_again_counts_once_and_has_the_same_rows(job, two):
    """After the round as before its end."""
    table = job.variable(two[0], TABLE)
    plan = job.approve(of_rows(table), two[0])
    asked = (read_of(table, 2, 3),)
    push(two[0], plan, rows(3), lookups=asked)
    first = push(two[0], plan, rows(3), lookups=asked)
    replies = [*together(first, push(two[1], plan, rows(3))), push(two[0], plan, rows(3), lookups=asked).result(SOON)]
    expected = [[TABLE[2].tolist(), (TABLE[3] + 2).tolist()]]
    assert [looked_up(reply, plan, 2) for reply in (replies[0], replies[2])] == [expected] * 2
    assert job.value(two[0], table)[3].tolist() == (TABLE[3] + 2).tolist()


def test_rows_come_with_a_round_that_streams(job, two):
    """At its end, whatever came before."""
    table = job.variable(two[0], TABLE)
    large = [job.variable(two[0], np.zeros(PART_BYTES // 4 + 1, "float32")) for _ in range(2)]
    plan = job.approve(sum_into(*large, table, returned=False), two[0])
    assert plan.streams == {0}
    ones = [np.ones(PART_BYTES // 4 + 1, "float32")] * 2 + [np.ones((6, 2), "float32")]
    replies = together(
        *(push(worker, plan, *ones, lookups=(read_of(table, 5),), rows=(), want=(large[1].id,)) for worker in two)
    )
    for reply in replies:
        whole, row = reply.payload.tensors([large[1].spec.tensor, TensorSpec("float32", (1, 2))])
        assert set(whole.tolist()) == {2.0}
        assert row.tolist() == [(TABLE[5] + 2).tolist()]


BAD_READS = {
    "too large": (lambda v: read_of(v, 0, 6), "id 6 is not a row of variable 'v0'"),
    "negative": (lambda v: read_of(v, -1), "id -1 is not a row of variable 'v0'"),
    "not there": (lambda v: RowRead(99, bytes(8)), "99"),
    "half an id": (lambda v: RowRead(v.id, bytes(12)), "12 bytes are not ids"),
    "of a number": (lambda v: RowRead(v.id + 1, bytes(8)), "variable 'v1', whose shape is"),
}


def test_rows_that_are_not_there_are_refused(job, two):
    """In a push, which then does not count, and in a read; the job goes on."""
    table = job.variable(two[0], TABLE)
    job.variable(two[0], np.array(1.0))
    plan = job.approve(of_rows(table), two[0])
    for make, why in BAD_READS.values():
        for attempt in (
            lambda read: push(two[0], plan, rows(1), lookups=(read,)),
            lambda read: push(two[0], plan, rows(1), hints=(read,)),
            lambda read: job.verbs[0].pull(two[0].session, [], -1, [read]),
        ):
            with pytest.raises(InvalidRequest, match=why):
                attempt(make(table)).result(SOON)
    together(*(push(worker, plan, rows(1)) for worker in two))
    assert job.value(two[0], table)[1].tolist() == (TABLE[1] + 2).tolist()


def test_rows_are_read_beside_variables(job, two):
    """In the order asked for, variables first; a row as often as it is asked for, of several tables. Or nothing."""
    table, other = job.variable(two[0], TABLE), job.variable(two[0], -TABLE)
    number, read = job.variable(two[0], np.array(1.5)), job.verbs[0].pull
    ids = [other.id, number.id, table.id]
    reply = read(two[0].session, ids, -1, [read_of(table, 5, 0, 5), read_of(other)]).result(SOON)
    specs = [spec_of(TABLE), number.spec.tensor, spec_of(TABLE)]
    found = reply.payload.tensors([*specs, TensorSpec("float32", (3, 2)), TensorSpec("float32", (0, 2))])
    assert [each.tolist() for each in found] == [(-TABLE).tolist(), 1.5, TABLE.tolist(), TABLE[[5, 0, 5]].tolist(), []]
    assert (reply.round, read(two[0].session, [], -1).result(SOON).payload.size) == (-1, 0)
