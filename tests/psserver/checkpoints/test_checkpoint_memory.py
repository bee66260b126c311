"""What a checkpoint that is being written holds, and what it keeps from going on: nothing, below the limit."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file

from pstesting.clock import Clock
from pswire.checkpoint import safetensors_stream
from pswire.checkpoint.manifest import Manifest
from pswire.model.log import Snapshotted
from tests.kit import rig

SIZE = 1000
NBYTES = 8 * SIZE


class Gate:
    """Lets the bytes of one variable after the other into a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may = threading.Semaphore(0)
        append = safetensors_stream.append

        def gated(file, arrays):
            assert self._may.acquire(timeout=rig.SOON)
            return append(file, arrays)

        monkeypatch.setattr(safetensors_stream, "append", gated)

    def let(self, count: int) -> None:
        """Lets this many more variables be written."""
        self._may.release(count)


@contextmanager
def job_on(root, copied=False, **keys) -> Iterator[tuple[rig.Job, rig.Servers]]:
    with ThreadPoolExecutor(1) as files:
        one = rig.core(root=root, files=files.submit, **keys)
        servers = rig.Servers([one], [one], Clock(), root, False)
        job = rig.Job(servers)
        one.machine.job.store.copied = copied
        yield job, servers
        one.close()


def order(job, worker, path="ckpt-1"):
    """A round that orders a checkpoint, and a chief that asks for the shard."""
    plan = job.order(worker, path)
    return plan, job.verbs[0].snapshot(job.token, plan.id, "")


def adding(job, worker, *variables):
    """Begins a round that adds one to some variables."""
    plan = rig.sum_into(*variables, returned=False)
    if plan.id not in job.servers.cores[0].machine.job.rounds.plans:
        job.approve(plan, worker)
    future = worker.push(plan, [np.ones(SIZE) for _ in variables])
    worker.round += 1
    return future


def variables(job, worker, count):
    return [job.variable(worker, np.full(SIZE, float(place))) for place in range(count)]


def held(job):
    return job.verbs[0].status().snapshot_bytes


def test_a_variable_is_let_go_of_when_it_is_written(tmp_path, monkeypatch):
    """Old values are gone before the next one is written, and into others rounds may write again."""
    gate = Gate(monkeypatch)
    with job_on(tmp_path) as (job, servers):
        (worker,) = job.join(rig.WORKERS[0])
        store = servers.cores[0].machine.job.store
        a, b, c = variables(job, worker, 3)
        old = [weakref.ref(store.find(v.id).array) for v in (a, c)]
        _, shard = order(job, worker)
        rig.together(adding(job, worker, a, c))
        assert store.exclusive([b.id]) == set()
        gate.let(2)
        rig.eventually(lambda: store.exclusive([b.id]) == {b.id})
        gc.collect()
        assert [one() is None for one in old] == [True, False]
        gate.let(1)
        shard.result(rig.SOON)


@pytest.mark.parametrize("copied", [False, True])
def test_a_round_waits_at_the_limit(tmp_path, monkeypatch, caplog, copied):
    """It says so in the log and in the status, and runs as soon as enough is written; others that fit run. It waits no
    longer where variables have copies: what is held for the loss of a server goes first."""
    caplog.set_level("INFO", "psserver")
    gate = Gate(monkeypatch)
    with job_on(tmp_path, copied, snapshot_limit=NBYTES) as (job, _):
        (worker,) = job.join(rig.WORKERS[0])
        a, b, c = variables(job, worker, 3)
        _, shard = order(job, worker)
        for _ in range(2):
            rig.together(adding(job, worker, a))
        waits = adding(job, worker, b)
        (told,) = job.verbs[0].status().waiting
        assert told.section.endswith("waits until more of a checkpoint is written")
        assert "round 3 waits until more of a checkpoint is written (--snapshot-limit)" in caplog.text
        assert (waits.done(), held(job)) == (False, NBYTES)
        gate.let(1)  # a
        rig.together(waits)
        assert held(job) == NBYTES
        gate.let(2)
        shard.result(rig.SOON)
        rig.together(adding(job, worker, a, b, c))
        assert held(job) == 0


@pytest.mark.parametrize("limit", [0, NBYTES])
def test_what_fits_is_held_for_the_loss_of_a_server(tmp_path, limit):
    """Until the whole checkpoint is there: others are still writing."""
    with job_on(tmp_path, True, snapshot_limit=limit) as (job, _):
        (worker,) = job.join(rig.WORKERS[0])
        (a,) = variables(job, worker, 1)
        _, shard = order(job, worker)
        rig.together(adding(job, worker, a))
        shard.result(rig.SOON)
        assert held(job) == NBYTES


def test_a_round_that_waits_is_looked_at_when_it_may_run(tmp_path, monkeypatch):
    """Not with each variable that is written: there may be thousands of small ones, and a look counts them all."""
    gate = Gate(monkeypatch)
    with job_on(tmp_path, snapshot_limit=1) as (job, servers):
        (worker,) = job.join(rig.WORKERS[0])
        many = variables(job, worker, 40)
        snapshots = servers.cores[0].machine.job.snapshots
        held, looks = snapshots._held, []
        _, shard = order(job, worker)
        waits = adding(job, worker, *many)
        monkeypatch.setattr(snapshots, "_held", lambda ids: (looks.append(1), held(ids))[1])
        gate.let(40)
        shard.result(rig.SOON)
        rig.together(waits)
        assert len(looks) < 4


def test_what_nobody_asks_for_is_written_and_let_go_of(tmp_path, monkeypatch):
    """A round that waits at the limit waits for the disk, and for no chief; the next chief is told of what is there. A
    limit that is smaller than a variable stops training while it is written; it stops it for no longer."""
    gate = Gate(monkeypatch)
    with job_on(tmp_path, snapshot_limit=1) as (job, _):
        (worker,) = job.join(rig.WORKERS[0])
        a, _ = variables(job, worker, 2)
        plan = job.order(worker, "ckpt-1")
        waits = adding(job, worker, a)
        assert not waits.done()
        gate.let(1)
        rig.together(waits)
        gate.let(1)
        job.opened = job.open(rig.CHIEF, 0, True)
        job.token = job.opened.token
        found = job.verbs[0].snapshot(job.token, plan.id, "").result(rig.SOON)
        assert load_file(f"{found.path}/{found.file}")["v0"][0] == 0


def test_a_checkpoint_that_fails_holds_nothing(tmp_path, monkeypatch):
    """Nor one that is given up while it is written: the round that waited for it runs, and its file is removed."""
    (tmp_path / "ckpt-1").write_text("a file where a directory should be")
    with job_on(tmp_path, snapshot_limit=1) as (job, _):
        (worker,) = job.join(rig.WORKERS[0])
        (a,) = variables(job, worker, 1)
        _, shard = order(job, worker)
        assert shard.exception(rig.SOON) is not None
        rig.together(adding(job, worker, a))
        gate = Gate(monkeypatch)
        plan = job.order(worker, "ckpt-2")
        waits = adding(job, worker, a)
        assert not waits.done()
        job.append(Snapshotted(plan.id, 0, "", "given up"))
        rig.together(waits)
        gate.let(1)
        rig.eventually(lambda: not (tmp_path / "ckpt-2").exists())


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_memory_stays_within_the_limit(tmp_path, monkeypatch, limit):
    """Whatever rounds replace while variables are written; and the checkpoints have their rounds' values."""
    rng, seen, append = random.Random(limit), [], safetensors_stream.append
    monkeypatch.setattr(safetensors_stream, "append", lambda *args: (seen.append(held(job)), append(*args))[1])
    with job_on(tmp_path, snapshot_limit=limit * NBYTES) as (job, _):
        (worker,) = job.join(rig.WORKERS[0])
        many = variables(job, worker, 8)
        expected = np.arange(8.0)
        for number in range(4):
            plan, shard = order(job, worker, f"ckpt-{number}")
            saved = expected.copy()
            while not shard.done():
                some = rng.sample(range(8), rng.randint(1, limit))
                rig.together(adding(job, worker, *(many[place] for place in some)))
                expected[some] += 1
                seen.append(held(job))
            found = shard.result()
            values = load_file(f"{found.path}/{found.file}")
            assert [values[f"v{place}"][0] for place in range(8)] == saved.tolist()
            text = job.verbs[0].snapshot(job.token, plan.id, rig.manifest_of([found])).result(rig.SOON)
            assert Manifest.parse((tmp_path / f"ckpt-{number}/manifest.json").read_text(), text.path).round >= number
            job.append(Snapshotted(plan.id, found.round, found.path))
        assert max(seen) <= limit * NBYTES
        assert [job.value(worker, variable)[0] for variable in many] == expected.tolist()
