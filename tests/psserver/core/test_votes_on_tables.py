"""Whole rounds of dynamic tables: two servers agree on what became of their parts; the test turns the network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pswire.api import Contribution, RowRead, TableRead
from pswire.errors import Fenced, MemoryLimit, NonfiniteError
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.tables import MIN_CAPACITY, Constant, CounterFilter, TableSpec
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import Payload
from tests.kit.contributions import by_keys, create_part, keyed, part_of
from tests.kit.rig import SOON
from tests.psserver.core.test_votes import Two, errors

SPEC = TableSpec((2,), initializer=Constant(0.0))
CUTS = range(512), range(512, BUCKETS)


class Tables(Two):
    """Two servers with a part of a table each.

    Attributes:
        tables: the parts.
        plan: adds rows to both.
    """

    def __init__(self, root, spec=SPEC, **more):
        super().__init__(root)
        self.spec = spec
        self.tables = [
            create_part(self.job, self.a, part_of(2 + n, spec, n, CUTS[n], name=f"users/part_{n}")) for n in (0, 1)
        ]
        self.plan = self.job.approve(by_keys(*self.tables, **more), self.a)

    def push(self, worker, *servers, keys=(), value=1.0, lookups=(), **said):
        """A member contributes rows for its keys on some servers; returns the futures."""
        futures = []
        owners = buckets_of(hashes_of(np.array(keys, np.int64), self.spec.salt)) // 512
        for n in servers:
            mine = [key for key, owner in zip(keys, owners, strict=True) if owner == n]
            counts = tuple(len(mine) * (place == n) for place in (0, 1))
            asked = (RowRead.of(self.tables[n].id, np.array(lookups, np.int64)),) if lookups else ()
            header = Contribution(
                worker.session, worker.epoch, worker.round, self.plan.id, (1.0, 1.0), rows=counts, lookups=asked
            )
            payload = Payload.pack(keyed(mine, value))
            futures.append(self.job.verbs[n].push(replace(header, **said), payload))
        return futures

    def next(self):
        for worker in (self.a, self.b):
            worker.round += 1

    @property
    def sizes(self):
        """The rows of each part, as they are without a round under way."""
        asked = [[TableRead(self.tables[n].id, "size")] for n in (0, 1)]
        found = [self.job.verbs[n].pull(0, [], -1, [], asked[n]) for n in (0, 1)]
        return [reply.result(SOON).rows[0] if reply.done() else "not decided" for reply in found]

    def rows(self, *keys):
        owners = buckets_of(hashes_of(np.array(keys, np.int64), self.spec.salt)) // 512
        found = []
        for key, n in zip(keys, owners.tolist(), strict=True):
            read = RowRead.of(self.tables[n].id, np.array([key], np.int64))
            reply = self.job.verbs[n].pull(0, [], -1, [read]).result(SOON)
            found.append(float(reply.payload.tensors([TensorSpec("float32", (1, 2))])[0][0, 0]))
        return found


KEYS = list(range(20))


@pytest.fixture
def two(tmp_path):
    return Tables(tmp_path)


def test_rows_are_visible_once_all_have_voted(two):
    """Neither their number nor a row before; a reader waits for the verdict."""
    futures = [*two.push(two.a, 0, 1, keys=KEYS), *two.push(two.b, 0, 1, keys=KEYS)]
    assert two.sizes == ["not decided"] * 2
    two.hear()
    assert all(future.result(SOON).left_out == () for future in futures)
    assert sum(two.sizes) == 20
    assert two.rows(*KEYS) == [2.0] * 20


def test_who_is_left_out_has_made_no_rows(two):
    """Its keys are as if they had never come, on the server that had run with them as well."""
    two.push(two.a, 0, 1, keys=KEYS[:10])
    (late,) = two.push(two.b, 0, keys=KEYS)
    two.lose(two.b)
    two.hear()
    assert errors(late) == [Fenced]
    two.hear()
    assert sum(two.sizes) == 10
    assert two.rows(*KEYS) == [1.0] * 10 + [0.0] * 10


def test_a_table_that_refuses_changes_none(tmp_path):
    """A part that has no room fails the round on both servers; the next one goes on."""
    two = Tables(tmp_path, replace(SPEC, capacity=MIN_CAPACITY))
    mine = [key for key in range(40_000) if buckets_of(hashes_of(np.array([key]), SPEC.salt))[0] < 512][:9000]
    futures = [*two.push(two.a, 0, 1, keys=mine), *two.push(two.b, 0, 1, keys=[-1, -2, -3])]
    two.hear()
    assert errors(*futures) == [MemoryLimit] * 4
    assert two.sizes == [0, 0]
    two.next()
    futures = [*two.push(two.a, 0, 1, keys=KEYS), *two.push(two.b, 0, 1)]
    two.hear()
    assert errors(*futures) == [type(None)] * 4
    assert sum(two.sizes) == 20


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_round_that_is_not_applied(tmp_path, nonfinite):
    """It makes no rows, and counts no keys; rows that are looked up are those before."""
    two = Tables(tmp_path, replace(SPEC, admission=CounterFilter(2)), nonfinite=nonfinite)
    futures = [
        *two.push(two.a, 0, 1, keys=KEYS, value=np.nan, nonfinite=(0, 1)),
        *two.push(two.b, 0, 1, keys=KEYS),
    ]
    two.hear()
    assert errors(*futures) == [NonfiniteError if nonfinite == "raise" else type(None)] * 4
    assert two.sizes == [0, 0]
    two.next()
    futures = [*two.push(two.a, 0, 1, keys=KEYS[:5]), *two.push(two.b, 0, 1)]
    two.hear()
    assert two.sizes == [0, 0]


def test_rows_that_are_looked_up_are_those_of_the_verdict(two):
    """They come with the answer, after the round that was decided."""
    mine = [key for key in KEYS if buckets_of(hashes_of(np.array([key]), SPEC.salt))[0] < 512]
    first, _ = two.push(two.a, 0, 1, keys=KEYS, lookups=())
    other, _ = two.push(two.b, 0, 1, keys=KEYS)
    two.hear()
    two.next()
    asked, _ = two.push(two.a, 0, keys=KEYS, lookups=mine) + two.push(two.a, 1, keys=KEYS)
    two.push(two.b, 0, 1, keys=KEYS)
    two.hear()
    (rows,) = asked.result(SOON).payload.tensors([TensorSpec("float32", (len(mine), 2))])
    assert set(rows.ravel().tolist()) == {4.0}
    assert first.done()
    assert other.done()
