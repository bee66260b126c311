"""Rounds of one worker beside those of all, while one of these is on its way: neither is taken for the other."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from pswire.api import Contribution
from pswire.limits import PART_BYTES
from pswire.transport.payload import Payload
from tests.kit.rig import WORKERS, Job, given, serving, sum_into


@pytest.fixture
def job(tmp_path):
    """A job on one server, in this thread."""
    with serving("core", 1, tmp_path) as servers:
        yield Job(servers)


def test_a_round_that_streams_is_not_taken_for_one(job):
    """An own round with the number, and the wishes, of a large round that is on its way waits for the end of that, and
    gets an answer of its own."""
    two = job.join(*WORKERS[:2])
    apart, large = (
        job.variable(two[0], np.array(0), alone=True),
        job.variable(two[0], np.zeros(PART_BYTES // 8 + 100, "int64")),
    )
    plan = job.approve(sum_into(apart), two[0])
    common = job.approve(sum_into(large, returned=False), two[0])
    whole = Payload.pack([np.ones(large.spec.tensor.shape, "int64")])
    core, begun = job.servers.cores[0], list[tuple[str, Payload]]()
    payloads, shared = [], list[Future]()
    for worker in two:
        payload = Payload((), whole.size)
        said = Contribution(worker.session, worker.epoch, 0, common.id, (1.0,))
        shared.append(core.push(said, payload, lambda found: begun.append(("shared", found))))
        payloads.append(payload)
    assert [name for name, _ in begun] == ["shared", "shared"]  # it streams
    said = Contribution(two[0].session, two[0].epoch, 0, plan.id, (1.0,), alone=True)
    own = core.push(said, Payload.pack([np.array(10)]), lambda found: begun.append(("own", found)))
    assert not own.done()
    for payload in payloads:
        for offset, chunk in whole.chunks:
            payload.add(offset, chunk)
    assert [future.result(0).payload.size for future in shared] == [0, 0]
    assert [int(each) for each in given(own.result(0), plan)] == [10]
    assert [name for name, _ in begun] == ["shared", "shared"]
    assert int(job.value(two[0], large, 0).sum()) == 2 * large.spec.tensor.shape[0]
