"""Contributions with rows by keys, as workers send them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pswire.model.hashing import BUCKETS
from pswire.model.plan import Apply, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Program
from pswire.model.tables import ROWS, SlotTensor, TablePart, TableSpec
from pswire.model.tensor import Array, TensorSpec
from tests.kit.rig import Job, Worker, adding

WHOLE = TensorSpec("float32", (ROWS, 2))
"""A table of two numbers a row, as programs have it."""


def part_of(
    number: int,
    spec: TableSpec,
    server: int = 0,
    buckets: range = range(BUCKETS),
    slot: SlotTensor | None = None,
    name: str = "users",
    table: str = "users",
) -> PlacedVariable:
    """A variable that is a part of a table, or a tensor beside one."""
    part = TablePart(table, spec, buckets.start, len(buckets), slot)
    return PlacedVariable(number, VariableSpec(slot.name if slot else name, part.tensor, part=part), (server,))


def create_part(job: Job, worker: Worker, variable: PlacedVariable) -> PlacedVariable:
    """Creates it, as the next variable of a job."""
    for place in dict.fromkeys((0, *variable.servers)):
        reply = job.verbs[place].create_batch(worker.session, [variable])
        assert (reply.error, reply.initialized) == (None, (variable.id,) * (place in variable.servers))
    job.variables.append(variable)
    return variable


def by_keys(*tables: PlacedVariable, program: Program | None = None, **more: object) -> Plan:
    """A plan that adds rows by keys to each table."""
    reductions = tuple(Reduction("sum", WHOLE, v.servers, repr(v.spec.name), "keys") for v in tables)
    applies = tuple(Apply(0, v.servers, (Ref("variable", v.id), Ref("reduction", n))) for n, v in enumerate(tables))
    return Plan(reductions, programs=(program or adding(WHOLE),), applies=applies, **more)  # type: ignore[arg-type]


def keyed(keys: Sequence[int], value: float = 1.0, times: Sequence[int] | None = None) -> list[Array]:
    """Keys and how often each came, and rows that are all of one number."""
    ids = np.array([keys, times or [1] * len(keys)], np.int64)
    return [ids, np.full((len(keys), 2), value, "float32")]
