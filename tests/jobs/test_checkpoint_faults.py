"""Processes that die while a checkpoint is saved or restored, and disks that fail: the one before it stays whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pstesting import forks
from pstesting.clock import Clock
from pswire.checkpoint import storage
from tests.kit.internals import (
    CheckpointError,
    Chief,
    ClusterSpec,
    Generation,
    RemoteServer,
    RestoreOrder,
    ServerLost,
    ServerOptions,
    Snapshotted,
    Task,
    Timeouts,
    address_in,
    await_listening,
    start_server,
)
from tests.kit.internals import manifest_of as assembled
from tests.kit.rig import (
    CHIEF,
    SOON,
    WORKERS,
    Job,
    Servers,
    Worker,
    checkpoint,
    eventually,
    serving,
    together,
)
from tests.kit.storage import BUCKET, object_store

DYING = Path(__file__).parent.parent / "kit" / "children.py"
CALM = Timeouts(session_timeout=60.0, call_timeout=10.0, round_timeout=180.0)


# ---- Processes ----


@contextmanager
def processes(root, points=None):
    """Servers in processes of their own, some of which die at a point; and the processes."""
    with ExitStack() as stack:
        started, verbs = [], []
        for task in range(2):
            if point := (points or {}).get(task):
                flags = ["--task", str(task), "--port", "0", "--checkpoint-root", root, "--lifeline"]
                command = [sys.executable, str(DYING), point, "server", *flags]
                process = forks.Forked[bytes](command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                address = address_in(await_listening(process, Task("ps", task), CALM))
            else:
                process, address = start_server(task, options=ServerOptions(checkpoint_root=root), timeouts=CALM)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
            verbs.append(RemoteServer(address, Task("ps", task), CALM))
            stack.callback(verbs[-1].close)
        yield Servers(verbs, [server.status() for server in verbs], Clock(), root, True), started


def is_killed(servers, process):
    """A server has died; whoever waits for an answer is told."""
    assert process.wait(SOON) == -9
    for server in servers.verbs:
        server.fail(ServerLost("a server is gone"))


def job_on(servers, value):
    """A job with one large and one small variable on each server."""
    job = Job(servers)
    (worker,) = job.join(WORKERS[0])
    for task in range(len(servers.verbs)):
        job.variable(worker, np.full(100_000, value), (task,))
        job.variable(worker, np.full(3, value, "float32"), (task,))
    return job, worker


def newest(root):
    """What a job that is started anew restores: the path, and the value that all variables have."""
    with serving("core", 1, root) as servers:
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        variables = [job.variable(worker, np.zeros(n, dtype)) for n, dtype in [(100_000, "f8"), (3, "f4")] * 2]
        path = job.restore(worker).path
        values = {float(x) for variable in variables for x in np.unique(job.value(worker, variable))}
    assert len(values) == 1
    return path, values.pop()


def files(root):
    """Those below a root, less what tells the saves apart."""
    found = (str(path.relative_to(root)) for path in Path(root).rglob("*") if not path.is_dir())
    return {re.sub(r"-\w{8}\.safetensors", ".safetensors", path) for path in found}


def whole(number, count=2):
    """The files of a complete checkpoint."""
    shards = {f"run/ckpt-{number}/shard-{n:05d}-of-{count:05d}.safetensors" for n in range(count)}
    return shards | {f"run/ckpt-{number}/manifest.json"}


def save(root, number, value):
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, value)
        job.save(worker, f"run/ckpt-{number}")


# ---- Servers that die ----


def save_until(point, job, worker, plan):
    """Two servers save, as far as they get; returns their shards, if all are there."""
    for server in (0, 1):
        worker.push(plan, server=server)
    if "manifest" not in point:
        return []
    shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
    job.verbs[0].snapshot(job.token, plan.id, assembled(shards, plan.snapshot).text())
    return shards


@pytest.mark.parametrize(
    ("task", "point"),
    [(1, "in a shard"), *((0, point) for point in ("in a shard", "in the manifest", "after the manifest"))],
)
def test_a_server_that_dies_in_a_save(tmp_path, point, task):
    """The checkpoint before it is what a new job restores, until the manifest is there; the next save cleans up."""
    root = str(tmp_path)
    save(root, 1, 1.0)
    with processes(root, {task: point}) as (servers, started):
        job, worker = job_on(servers, 2.0)
        plan = job.approve(checkpoint("run/ckpt-2", (0, 1)), worker)
        save_until(point, job, worker, plan)
        is_killed(servers, started[task])
    done = point == "after the manifest"
    assert newest(root) == (("run/ckpt-2", 2.0) if done else ("run/ckpt-1", 1.0))
    assert files(root) >= whole(1)
    save(root, 3, 3.0)
    assert newest(root) == ("run/ckpt-3", 3.0)
    assert files(root) == whole(1) | whole(3) | (whole(2) if done else set())


# ---- Chiefs that die ----


class Driven(Job):
    """A job whose chief is another process."""

    def begin(self):
        self.generation, self.variables = Generation(0, ()), []


@contextmanager
def chief(servers, point):
    """A process that drives the job, until a point."""
    cluster = {"ps": [server.address for server in servers.verbs], "worker": ["127.0.0.1:1"], "chief": ["127.0.0.1:1"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    command = [sys.executable, str(DYING), point, "chief", config]
    with forks.Forked[bytes](command, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def snapshotted(worker):
    """What the chief has said of saves."""
    entries = worker.job.verbs[0].watch(worker.session, 0, 0).result(SOON).entries
    return [entry for entry in entries if isinstance(entry, Snapshotted)]


def driven(servers):
    """A worker of a job that a chief drives, once it is a member; with variables on both servers."""
    eventually(lambda: servers.verbs[0].status().log)
    job = Driven(servers)
    worker = Worker(job, WORKERS[0], job.open(WORKERS[0]).session)
    eventually(lambda: all(server.status().generation for server in servers.verbs))
    worker.generation = servers.verbs[0].status().generation.number
    for task in (0, 1):
        job.variable(worker, np.full(100_000, 2.0), (task,))
        job.variable(worker, np.full(3, 2.0, "float32"), (task,))
    return worker


@pytest.mark.parametrize("point", ["before the shards", "after the manifest"])
def test_a_chief_that_dies_in_a_save(tmp_path, point):
    """The checkpoint before it is the newest until the manifest is there; the next chief completes the save."""
    root = str(tmp_path)
    save(root, 1, 1.0)
    with processes(root) as (servers, _):
        with chief(servers, point) as first:
            worker = driven(servers)
            plan = checkpoint("run/ckpt-2", (0, 1))
            servers.verbs[0].propose(worker.session, plan, "", None)
            together(*(worker.push(plan, server=server) for server in (0, 1)))
            assert first.wait(SOON) == -9
        assert newest(root) == (("run/ckpt-2", 2.0) if point == "after the manifest" else ("run/ckpt-1", 1.0))
        assert snapshotted(worker) == []
        with chief(servers, "never"):
            (entry,) = eventually(lambda: snapshotted(worker))
    assert (entry.plan_id, entry.round, entry.error) == (plan.id, 0, "")
    assert newest(root) == ("run/ckpt-2", 2.0)
    assert files(root) == whole(1) | whole(2)


@contextmanager
def driving(servers, timeouts=CALM):
    """A chief in a thread of this process; gives a worker of its job."""
    cluster = ClusterSpec({"ps": ["127.0.0.1:1"] * 2, "worker": ["127.0.0.1:1"], "chief": ["127.0.0.1:1"]})
    theirs = [RemoteServer(server.address, server.task, timeouts) for server in servers.verbs]
    chief = Chief(CHIEF, theirs, cluster, timeouts)
    chief.start()
    try:
        yield driven(servers)
    finally:
        chief.stop(abandon=True)


def order(worker, plan):
    """Proposes a section of both servers, and makes its round."""
    worker.job.verbs[0].propose(worker.session, plan, "", None)
    values = [np.full(reduction.tensor.shape, -1) for reduction in plan.reductions]
    pushed = [worker.push(plan, values, server=server) for server in (0, 1)]
    worker.round += 1
    return pushed


def next_save(worker, root, number=2):
    """The chief completes the next save, of which alone there are files; returns what it has said of those before."""
    together(*order(worker, checkpoint(f"run/ckpt-{number}", (0, 1), round=worker.round)))
    *failed, done = eventually(lambda: snapshotted(worker)[number - 1 :] and snapshotted(worker))
    assert (done.round, done.error) == (worker.round - 1, "")
    assert newest(root) == (f"run/ckpt-{number}", 2.0)
    assert files(root) == whole(number)
    return [entry.error for entry in failed]


@pytest.mark.parametrize("what", ["its round", "the manifest"])
def test_a_save_that_takes_longer_than_a_round_may(tmp_path, caplog, monkeypatch, what):
    """The chief asks again, and is told of what it asked for first."""
    caplog.set_level("INFO", "psclient.chief")
    go, put = threading.Event(), storage.Directory.put

    def late(self, path, data):
        assert what == "its round" or go.wait(SOON)
        put(self, path, data)

    monkeypatch.setattr(storage.Directory, "put", late)
    with (
        serving("grpc", 2, str(tmp_path)) as servers,
        driving(servers, replace(CALM, round_timeout=0.2, report_interval=0.2)) as worker,
    ):
        plan = checkpoint("run/ckpt-1", (0, 1))
        if what == "its round":
            servers.verbs[0].propose(worker.session, plan, "", None)
        else:
            together(*order(worker, plan))
        eventually(lambda: caplog.text.count("is still writing its part of a checkpoint") > 3)
        go.set()
        if what == "its round":
            together(*(worker.push(plan, server=server) for server in (0, 1)))
        (entry,) = eventually(lambda: snapshotted(worker))
    assert (entry.round, entry.error) == (0, "")
    assert newest(str(tmp_path)) == ("run/ckpt-1", 2.0)


def test_saves_that_are_ordered_in_bad_json(tmp_path, caplog):
    """By a worker that is not ours: each fails with a word, and chief and servers write the next one."""
    root, bad = str(tmp_path), ["[" * 200_000, '{"objects": 1e400}', '{"state": [NaN]}', '{"delete": [1]}']
    with serving("grpc", 2, root) as servers, driving(servers) as worker:
        for number, state in enumerate(bad, 1):
            together(*order(worker, checkpoint(f"run/ckpt-{number}", (0, 1), state, worker.round)))
            eventually(lambda number=number: len(snapshotted(worker)) == number)
        for number, error in enumerate(next_save(worker, root, 5), 1):
            assert error.startswith(f"the data to be saved as 'run/ckpt-{number}' is malformed: ")
    assert not [one for one in caplog.records if one.levelname == "ERROR" and one.name.startswith("ps")]


# ---- Disks ----


def mount(*args):
    subprocess.run(["mount", *args], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small file system here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(disk):
    """Leaves no room; returns what gives it back."""
    junk = disk / "junk"
    with open(junk, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return junk.unlink


def make_read_only(disk):
    mount("-o", "remount,ro", str(disk))
    return partial(mount, "-o", "remount,rw", str(disk))


@pytest.mark.parametrize(("spoil", "why"), [(fill, "No space left"), (make_read_only, "Read-only")])
def test_a_place_where_nothing_can_be_written(disk, spoil, why):
    """Said with the shard's name, and all stays as it was: it can be restored from; saving goes on once it can."""
    root = str(disk)
    save(root, 1, 1.0)
    mend = spoil(disk)
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 2.0)
        for path in ("run/ckpt-2", "run/ckpt-1"):
            shard = rf"{path}/shard-00000-of-00002-\w+\.safetensors cannot.*{why}"
            with pytest.raises(CheckpointError, match=shard):
                job.save(worker, path)
        assert newest(root) == ("run/ckpt-1", 1.0)
        assert files(root) - {"junk"} == whole(1)
        mend()
        job.save(worker, "run/ckpt-3")
    assert newest(root) == ("run/ckpt-3", 2.0)


# ---- Files that are not what they were ----


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def test_what_processes_say_is_damaged_is_set_aside(tmp_path):
    """Once another one is restored; and nothing else, whatever they name."""
    root = str(tmp_path)
    for number in (1, 2):
        save(root, number, float(number))
    flip(next((tmp_path / "run/ckpt-2").glob("shard-00000-of-00002-*.safetensors")))
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 9.0)
        turn, told = worker.turn(), {"ckpt-2": "it is damaged", "../elsewhere": "x", "ckpt-1": "no", "none": ""}
        known = RestoreOrder("open", damaged={"ckpt-2": "it is damaged"})
        assert servers.verbs[0].restore(worker.session, "run", turn, known).result(SOON).path == "run/ckpt-1"
        for server in servers.verbs:
            server.restore(worker.session, "run/ckpt-1", turn, RestoreOrder(damaged=told)).result(SOON)
        assert files(root) >= whole(1)
        assert not list(tmp_path.glob("run/*.damaged"))
        plan = job.commit(worker, "run", turn)
        together(*(worker.push(plan, server=server) for server in (0, 1)))
        worker.round += 1
        assert {float(job.value(worker, v)[0]) for v in job.variables} == {1.0}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["ckpt-1", "ckpt-2.damaged"]
    assert newest(root) == ("run/ckpt-1", 1.0)


# ---- Places ----


@pytest.mark.ci
def test_processes_share_an_object_store():
    """What some servers saved in a bucket others restore, two to one."""
    with object_store():
        root = f"s3://{BUCKET}/jobs"
        with processes(root) as (servers, _):
            job, worker = job_on(servers, 5.0)
            shards = job.save(worker)
            assert {shard.path for shard in shards} == {f"{root}/run/ckpt-1"}
        assert newest(root) == ("run/ckpt-1", 5.0)
