"""What a round of rows gives back: reduced rows, and rows that were looked up."""

from __future__ import annotations

import numpy as np
import pytest

from psserver.execution.execution import Execution
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from pswire.api import Contribution, RowRead
from pswire.model.log import Member
from pswire.model.plan import Apply, Plan, Reduction, Ref
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import Payload
from tests.kit.programs import kept_kernels, traced
from tests.kit.rig import WORKERS

TABLE = TensorSpec("float32", (6, 2))


def subtract(v, g):
    v.assign_sub(g)


def double(v, g):
    v.assign(v + v - g)


@pytest.fixture
def kernels():
    made = kept_kernels(1, patience=1)
    yield made
    made.close()


def plan_of(fn=subtract, op="sum", sparse="dense", returned=False):
    program, _ = traced(fn, [TABLE], [TABLE])
    places = {"variable": Ref("variable", 0), "value": Ref("reduction", 0)}
    refs = tuple(places[item.kind] for item in program.inputs if item.kind in places)
    reduction = Reduction(op, TABLE, (0,), "'table'", "rows")
    given = (Ref("reduction", 0),) if returned else ()
    return Plan((reduction,), (), (program,), (Apply(0, (0,), refs, sparse),), given)


def job_of(plan, *sent, lookups=(), weights=None):
    """A round to which each worker contributes ids and rows."""
    parts = []
    for place, (ids, rows) in enumerate(sent):
        ids, rows = np.array(ids, np.int64), np.array(rows, np.float32).reshape(-1, 2)
        packed = Payload.pack([ids, rows])
        weight = weights[place] if weights else 1.0
        said = Contribution(place + 1, 1, 4, plan.id, (weight,), rows=(len(ids),), lookups=lookups)
        parts.append(MemberShare(Member(WORKERS[place], place + 1, 1), said, packed))
    return ReadyRound(4, PreparedPlan(plan, 0), tuple(parts), (), lambda: "the section")


def step(job, kernels, table, alone=frozenset({0})):
    execution = Execution(job, kernels)
    execution.reads()
    assigned, _ = execution.step({0: table}, alone, lambda id: None)
    return execution, assigned


def ones():
    return np.ones(TABLE.shape, "float32")


def test_an_update_that_changes_all_rows_runs_on_the_whole(kernels):
    """As with the whole gradient; lazily only the given rows change."""
    table, other = ones(), ones()
    _, assigned = step(job_of(plan_of(double), ([1], [3, 3])), kernels, table)
    assert assigned[0][:, 0].tolist() == [2, -1, 2, 2, 2, 2]
    _, assigned = step(job_of(plan_of(double, sparse="lazy"), ([1], [3, 3])), kernels, other)
    assert assigned[0][:, 0].tolist() == [1, -1, 1, 1, 1, 1]


def test_reduced_rows_are_given_each_once(kernels):
    """Ids and rows, and how many."""
    job = job_of(plan_of(returned=True), ([1, 3], [1, 1, 2, 2]), ([3, 5], [4, 4, 8, 8]))
    execution, _ = step(job, kernels, ones())
    ids, rows = execution.given.arrays
    assert (ids.tolist(), rows[:, 0].tolist(), list(execution.given.rows)) == ([1, 3, 5], [1, 6, 8], [3])


def test_rows_that_are_looked_up_are_as_after_the_round(kernels):
    """For each member its own."""
    job = job_of(plan_of(), ([1], [1, 1]), lookups=(RowRead.of(0, np.array([0, 1], np.int64)),))
    execution, _ = step(job, kernels, ones())
    assert execution.lookups.found[1][0].tolist() == [[1, 1], [0, 0]]
