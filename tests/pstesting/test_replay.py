"""Recordings: a machine that is told what another one was told comes to the same state, and gives the same answers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from pstesting.clock import Clock
from pstesting.replay import Grown, Recording, Replay
from tests.kit.contributions import streaming
from tests.kit.internals import LANES, PSError, RoundReply
from tests.kit.rig import SOON, WORKERS, Job, Servers, core, remote, sum_into, together

SIZE = 4096


def same(mine, theirs):
    """Whether two answers say the same, payloads bit by bit."""
    if not (mine.done() and theirs.done()) or theirs.cancelled():
        return mine.done() == theirs.done()
    if error := theirs.exception():
        return type(mine.exception()) is type(error) and str(mine.exception()) == str(error)
    mine, theirs = mine.result(), theirs.result()
    if isinstance(theirs, RoundReply):
        assert (mine.round, mine.epoch, mine.left_out, mine.more) == (
            theirs.round,
            theirs.epoch,
            theirs.left_out,
            theirs.more,
        )
    if hasattr(theirs, "payload"):
        return bytes_of(mine.payload) == bytes_of(theirs.payload)
    return mine == theirs


def bytes_of(payload):
    return [(offset, bytes(buffer)) for offset, buffer in payload.chunks]


def train(job, worker, other):
    """Rounds of two members side by side, reads, a checkpoint and a restore, a refused call, and a member that dies."""
    variables = [job.variable(worker, np.zeros(SIZE, "float32")) for _ in range(3)]
    plan = job.approve(sum_into(*variables), worker)
    want = tuple(variable.id for variable in variables)
    rng = np.random.default_rng(7)

    def rounds(member, count):
        for _ in range(count):
            member.push(plan, [rng.normal(size=SIZE).astype("f4") for _ in variables], want=want).result(SOON)
            member.round += 1

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(rounds, member, 20) for member in (worker, other)]:
            each.result()
    for variable in variables:
        job.value(worker, variable)
    with suppress(PSError):
        job.verbs[0].pull(worker.session, [99], 0).result(SOON)
    waits = worker.push(plan, [np.ones(SIZE, "f4")] * 3, want=want)
    job.servers.spend(30, worker.session, job.opened.session)
    job.close([worker.member])
    together(waits)
    worker.round += 1
    worker.epoch = job.epoch.number
    job.save(worker)
    rounds(worker, 2)
    job.restore(worker)
    rounds(worker, 2)


@pytest.mark.parametrize("kind", ["core", "thread", *LANES])
@pytest.mark.parametrize("streams", [False, True])
def test_a_run_can_be_replayed(tmp_path, kind, streams, monkeypatch, stack):
    """Whatever its threads and its network did: variables, log, sessions, and each answer to each call."""
    if streams:
        streaming(monkeypatch)
    clock, root = Clock(), tmp_path / "was"
    pool = stack.enter_context(ThreadPoolExecutor(1))
    one = core(root=root, clock=clock, **({} if kind == "core" else {"submit": pool.submit}))
    recording = Recording(one)
    verb = stack.enter_context(remote(one, lane=kind)) if kind in LANES else one
    job = Job(Servers([verb], [one], clock, root, kind in LANES))
    train(job, *job.join(*WORKERS[:2]))
    pool.shutdown()
    steps = list(recording.steps)
    replay = Replay(recording)
    replay.run()
    assert replay.machine.status(clock()) == one.status()
    mine, theirs = replay.machine.store.values(), one.machine.store.values()
    assert mine.keys() == theirs.keys()
    assert all((mine[id] == theirs[id]).all() for id in theirs)
    assert replay.machine.log.entries == one.machine.log.entries
    answered = {arg for step in steps if not isinstance(step, Grown) for arg in step.args if isinstance(arg, Future)}
    assert len(answered) > 40
    assert all(same(replay.futures[future], future) for future in answered)
    one.close()
