"""Dynamic tables of a server in a checkpoint: as they were after its round, while rounds go on; and what a base is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from psserver.tables.rows import BOOK_BYTES
from pstesting.clock import Clock
from pswire.api import Contribution
from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.storage import storage_at
from pswire.errors import CheckpointError
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.log import Snapshotted
from pswire.model.tables import Constant, TableSpec
from pswire.network.payload import Payload
from tests.kit.contributions import by_keys, create_part, keyed, part_of
from tests.kit.rig import SOON, WORKERS, Job, Servers, core, eventually, together
from tests.kit.tables import remove, state_of
from tests.psserver.checkpoints.test_checkpoint_memory import Gate, job_on

SPEC = TableSpec((2,), initializer=Constant(0.5))


def pushed(worker, plan, keys, value=1.0, server=0):
    """Contributes rows for some keys, all of one number."""
    header = Contribution(worker.session, worker.generation, worker.round, plan.id, (1.0,), rows=(len(keys),))
    return worker.job.verbs[server].push(header, Payload.pack(keyed(keys, value)))


class Job1:
    """A job with one table on one server, which trains it by a plan that adds rows. Args: job: the job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        (self.worker,) = job.join(WORKERS[0])
        self.table = create_part(job, self.worker, part_of(0, SPEC))
        self.plan = job.approve(by_keys(self.table), self.worker)

    @property
    def stored(self):
        """The table as its server has it."""
        return self.job.servers.cores[0].machine.job.store.tables()[0]

    def add(self, keys, value=1.0):
        """Begins a round that adds a number to rows."""
        future = pushed(self.worker, self.plan, list(keys), value)
        self.worker.round += 1
        return future

    def train(self, keys, value=1.0):
        together(self.add(keys, value))

    def order(self, path, base=""):
        """Makes a round that orders a checkpoint; returns its plan, and the shard that comes."""
        plan = self.job.order(self.worker, path, json.dumps({"base": base}))
        return plan, self.job.verbs[0].snapshot(self.job.token, plan.id, "")

    def finish(self, plan, shard, error=""):
        """Commits what was ordered, or gives it up."""
        if not error:
            text = manifest_of([shard.result(SOON)], plan.snapshot).text()
            self.job.verbs[0].snapshot(self.job.token, plan.id, text).result(SOON)
        self.job.append(Snapshotted(plan.id, 0, plan.snapshot.path, error))

    def save(self, path, base=""):
        self.finish(*self.order(path, base))
        return SavedCheckpoint.at(storage_at(self.job.servers.root), path)


@contextmanager
def trained(root, **keys):
    with job_on(root, **keys) as (job, _):
        made = Job1(job)
        made.train(range(1000))
        yield made


def state_in(saved):
    """The first elements of the rows that a whole checkpoint has, by their keys."""
    return dict(zip(saved.tensor("users/keys").tolist(), saved.tensor("users")[:, 0].tolist(), strict=True))


def test_a_bug_in_holding_a_table_fails_its_checkpoint_alone(tmp_path, monkeypatch):
    """Who asks for the shard is told; the round is answered, and so are the next ones."""
    with trained(tmp_path) as job:

        def broken(since):
            raise ZeroDivisionError("as a bug would")

        with monkeypatch.context() as patch:
            patch.setattr(job.stored, "freeze", broken)
            plan, shard = job.order("ckpt-1")
        with pytest.raises(CheckpointError, match=r"internal error: ZeroDivisionError.*see the server's log"):
            shard.result(SOON)
        job.finish(plan, shard, "it failed")
        job.train(range(100))
        assert state_in(job.save("ckpt-2"))[0] == 2.5


def test_a_round_writes_its_own_rows_aside(tmp_path, monkeypatch):
    """As much as it writes is held, each row once, and nothing once the file is there; the status tells."""
    gate = Gate(monkeypatch)
    with trained(tmp_path) as job:
        plan, shard = job.order("ckpt-1")
        held = lambda: job.job.verbs[0].status().snapshot_bytes  # noqa: E731
        eventually(lambda: job.job.servers.cores[0].machine.job.snapshots.saving[0].nbytes == 8000)
        assert held() == 0
        for _ in range(3):
            job.train(range(100))
        assert held() in (100 * 8, 100 * (8 + BOOK_BYTES))  # as it has been found out which rows there are, or not
        gate.let(20)
        job.finish(plan, shard)
        assert held() == 0


def since(saved):
    return saved.manifest.tables["users"].since


def test_what_is_complete_is_a_base(tmp_path):
    """Once the log says so. What failed is none, nor what it was to replace; nor what this server never saw."""
    with trained(tmp_path) as job:
        assert since(job.save("run/ckpt-1", "nothing")) == -1
        job.train([5])
        second = job.save("run/ckpt-2", "ckpt-1")
        assert (since(second), second.tensor("users/keys").tolist()) == (1, [5])
        job.train([6])
        assert since(job.save("other/ckpt-2", "ckpt-1")) == -1  # it is another directory's
        plan, shard = job.order("run/ckpt-3", "ckpt-2")
        shard.result(SOON)
        job.finish(plan, shard, "given up")
        job.train([7])
        assert since(job.save("run/ckpt-4", "ckpt-3")) == -1
        fifth = job.save("run/ckpt-5", "ckpt-2")
        assert (since(fifth), sorted(fifth.tensor("users/keys").tolist())) == (2, [6, 7])
        plan, shard = job.order("run/ckpt-5", "ckpt-4")
        shard.result(SOON)
        job.finish(plan, shard, "given up")
        assert since(job.save("run/ckpt-6", "ckpt-5")) == -1


@pytest.mark.parametrize("base", ["..", "a/b", 3, "\0"])
def test_a_base_with_no_name(tmp_path, base):
    """Is refused when the manifest is made; the round and the shard are not touched by it."""
    with trained(tmp_path) as job:
        plan, shard = job.order("ckpt-1", base)
        found = shard.result(SOON)
        assert found.tables[0].since == -1
        with pytest.raises(Exception, match="malformed"):
            manifest_of([found], plan.snapshot)
        job.finish(plan, shard, "given up")


def test_only_as_many_bases_as_are_remembered(tmp_path):
    """The newest; deletions of rounds before all of them are forgotten."""
    with trained(tmp_path) as job:
        for number in range(20):
            job.train([number])
            remove(job.stored.table, job.stored.table.round + 1, np.array([100 + number]))
            job.save(f"ckpt-{number}")
        deletions = job.stored.table._contents.deletions
        assert deletions.known_after > 1
        assert len(deletions.since(0)) <= 18
        for base, is_known in ((0, False), (10, True), (19, True)):
            assert (since(job.save(f"delta-{base}", f"ckpt-{base}")) >= 0) == is_known


def test_parts_of_asynchronous_jobs_may_be_of_different_rounds(tmp_path):
    """The greatest counts, on any number of servers; and changes since the base are found on each."""
    with ThreadPoolExecutor(1) as pool:
        cores = [core(number, root=tmp_path, submit=pool.submit) for number in range(2)]
        job = Job(Servers(cores, cores, Clock(), tmp_path, False))
        (worker,) = job.join(WORKERS[0], mode="async")
        halves = range(BUCKETS // 2), range(BUCKETS // 2, BUCKETS)
        parts = [
            create_part(job, worker, part_of(number, SPEC, number, half, name=f"users/part_{number}"))
            for number, half in enumerate(halves)
        ]
        plans = [job.approve(by_keys(part), worker) for part in parts]
        stored = [one.machine.job.store.tables()[0] for one in cores]

        def train(server, count):
            for _ in range(count):
                mine = buckets_of(hashes_of(np.arange(200), SPEC.salt)) // (BUCKETS // 2) == server
                keys = np.flatnonzero(mine)[:50].tolist()
                pushed(worker, plans[server], keys, server=server).result(SOON)
                worker.round += 1

        train(0, 5)
        train(1, 2)
        first = job.save(worker, "run/ckpt-1")
        assert [shard.tables[0].round for shard in first] == [5, 2]
        saved = SavedCheckpoint.at(storage_at(tmp_path), "run/ckpt-1")
        assert saved.manifest.tables["users"].round == 5
        before = [state_of(each.freeze(-1)) for each in stored]
        train(1, 4)
        job.restore(worker, "run/ckpt-1")
        assert [each.table.round for each in stored] == [5, 5]
        for each, old in zip(stored, before, strict=True):
            found = state_of(each.freeze(-1))
            assert (found.keys.tolist(), found.tensors[0].tolist()) == (old.keys.tolist(), old.tensors[0].tolist())
        train(1, 1)
        plan = job.order(worker, "run/ckpt-2", json.dumps({"base": "ckpt-1"}))
        shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
        assert [(shard.tables[0].since, shard.tables[0].round) for shard in shards] == [(5, 5), (5, 6)]
        for one in cores:
            one.close()
