"""Batches that are handed out, on a server that makes rounds: what a round has applied is done, whoever lives."""

from __future__ import annotations

import numpy as np
import pytest

from pswire.errors import Fenced, InvalidRequest
from pswire.model.chunks import ChunkAsk
from pswire.model.log import Approved, Examples, Position
from tests.kit import rig
from tests.kit.rig import WORKERS

COUNT = 10


@pytest.fixture
def job(tmp_path):
    with rig.serving("core", 2, tmp_path) as servers:
        yield rig.Job(servers)


class Asker:
    """An asynchronous worker that asks server 0 for batches, and pushes."""

    def __init__(self, worker):
        self.worker, self.number, self.has = worker, 0, ()

    def ask(self, **said):
        self.number += 1
        said = {"want": 1, "needs": True, "restores": 1, **said}
        ask = ChunkAsk(0, self.number, 0, COUNT, **said)
        answer = self.worker.job.verbs[0].hand_out(self.worker.session, ask).result(rig.SOON)
        self.has = answer.chunks or self.has
        return [chunk.examples.index for chunk in answer.chunks]

    def stands(self):
        self.number += 1
        ask = ChunkAsk(0, self.number, 0, COUNT, restores=1, looks=True)
        (found,) = self.worker.job.verbs[0].hand_out(self.worker.session, ask).result(rig.SOON).positions
        return found

    def push(self, plan, server=0):
        chunks = tuple(chunk.ticket for chunk in self.has)
        future = self.worker.push(plan, [np.ones(2)], server=server, chunks=chunks)
        self.worker.round += 1
        return future


@pytest.fixture
def two(job):
    return [Asker(worker) for worker in job.join(WORKERS[0], WORKERS[1], mode="async")]


@pytest.fixture
def adds(job, two):
    v = job.variable(two[0].worker, np.zeros(2))
    return job.approve(rig.sum_into(v), two[0].worker)


def test_a_batch_is_done_once_its_round_is_applied(job, two, adds):
    """Whatever becomes of its worker then; before that it is handed out again."""
    one, other = two
    assert one.ask() == [0]
    one.push(adds).result(rig.SOON)
    assert one.ask() == [1]
    assert other.stands() == Position(0, 0, 2, (Examples(1, 0, 0),))
    job.servers.spend(12, other.worker.session, job.opened.session)
    assert [other.ask() for _ in range(3)] == [[1], [2], [3]]


def test_a_round_that_updates_nothing_does_no_batch(job, two, adds):
    """A step may look at the loss first."""
    looks = job.approve(rig.reduce_only(job.variables[0].spec.tensor), two[0].worker)
    two[0].ask()
    two[0].push(looks).result(rig.SOON)
    assert two[1].stands().returned == (Examples(0, 0, 0),)
    two[0].push(adds).result(rig.SOON)
    assert two[1].stands().returned == ()


def test_a_round_that_may_still_be_applied_keeps_its_batch(job, two, adds):
    """Its worker is lost, and its contribution is whole, but for the approval of its plan."""
    one, other = two
    v = job.variable(one.worker, np.zeros(2))
    late = rig.sum_into(v)
    one.ask()
    one.worker.job.verbs[0].propose(one.worker.session, late, "", None)
    one.push(late)
    job.servers.spend(12, other.worker.session, job.opened.session)
    assert other.ask() == [1]
    job.append(Approved(late))
    assert job.value(other.worker, v).tolist() == [1, 1]
    assert other.ask() == [2]
    assert other.stands().returned == (Examples(1, 0, 0), Examples(2, 0, 0))


def test_who_is_gone_gets_no_batch(job, two):
    """And a server that keeps no log hands out none."""
    one, other = two
    assert one.ask() == [0]
    job.servers.spend(12, other.worker.session, job.opened.session)
    with pytest.raises(Fenced):
        one.ask()
    with pytest.raises(InvalidRequest, match="handed out by server 0"):
        job.verbs[1].hand_out(other.worker.session, ChunkAsk(0, 1, 0, COUNT))


def test_a_new_job_begins_anew(job, two):
    """What the job before was handed out is nothing to it."""
    assert [two[0].ask() for _ in range(3)] == [[0], [1], [2]]
    job.begin()
    (one,) = job.join(WORKERS[0], mode="async")
    assert Asker(one).ask() == [0]
