"""Processes that die while a checkpoint is saved or restored, and disks that fail: the one before it stays whole."""

from __future__ import annotations

import json
import os
import re
import resource
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
from tests.kit.contributions import by_keys, create_part, keyed, part_of
from tests.kit.internals import (
    BUCKETS,
    CheckpointError,
    Chief,
    ClusterSpec,
    Contribution,
    DamagedCheckpoint,
    Generation,
    Node,
    Payload,
    ProgramError,
    RemoteServer,
    RestoreOrder,
    ServerLost,
    ServerOptions,
    SnapshotOrder,
    Snapshotted,
    TableSpec,
    Task,
    Timeouts,
    Turn,
    address_in,
    await_listening,
    buckets_of,
    hashes_of,
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
    core,
    eventually,
    manifest_of,
    serving,
    sum_into,
    together,
)
from tests.kit.storage import BUCKET, object_store
from tests.kit.table_states import joined, state_of

DYING = Path(__file__).parent.parent / "kit" / "faulty_servers.py"
CALM = Timeouts(session_timeout=60.0, call_timeout=10.0, round_timeout=180.0)


# ---- Processes ----


@contextmanager
def processes(root, points=None, count=2):
    """Servers in processes of their own, some of which die at a point; and the processes."""
    with ExitStack() as stack:
        started, verbs = [], []
        for task in range(count):
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


SHARD = ["before a shard", "in a shard", "naming a shard"]
MANIFEST = ["before the manifest", "in the manifest", "naming the manifest", "after the manifest"]
"""Server 0 writes it."""


@pytest.mark.parametrize(
    ("task", "point"),
    [*((0, point) for point in (*SHARD[1:], *MANIFEST[1:])), (1, SHARD[1])]
    + [pytest.param(0, point, marks=pytest.mark.soak) for point in (SHARD[0], MANIFEST[0])]
    + [pytest.param(1, point, marks=pytest.mark.soak) for point in (SHARD[0], SHARD[2])],
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


def test_a_server_that_dies_in_a_restore(tmp_path):
    """Nothing of the checkpoint changes: a new job restores it."""
    root = str(tmp_path)
    save(root, 1, 1.0)

    def contents():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = contents()
    with processes(root, {1: "in a restore"}) as (servers, started):
        _, worker = job_on(servers, 2.0)
        for server in servers.verbs:
            server.restore(worker.session, "run", Turn())
        is_killed(servers, started[1])
    assert contents() == before
    assert newest(root) == ("run/ckpt-1", 1.0)


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


@pytest.mark.parametrize(
    "point",
    [
        "before the shards",
        pytest.param("after a shard", marks=pytest.mark.soak),
        pytest.param("before the manifest", marks=pytest.mark.soak),
        "after the manifest",
    ],
)
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


def test_a_save_whose_round_fails(tmp_path):
    """The chief is told by the servers, says so in the log, and completes the next one."""
    root = str(tmp_path)
    with serving("grpc", 2, root) as servers, driving(servers) as worker:
        variable = worker.job.variable(worker, np.zeros(3, "int64"), (0, 1), saved_as="")
        plan = sum_into(variable, returned=False)
        power = replace(plan.programs[0], nodes=(Node("pow", (0, 1)),))
        failing = replace(plan, programs=(power,), snapshot=SnapshotOrder("run/ckpt-1", (0, 1)))
        for future in order(worker, failing):
            assert isinstance(future.exception(SOON), ProgramError)
        (entry,) = eventually(lambda: snapshotted(worker))
        assert "'run/ckpt-1' failed" in entry.error
        assert next_save(worker, root) == [entry.error]


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


def test_a_save_whose_members_are_gone(tmp_path):
    """They reached one server of two: the next round of those who come after them settles it, and nothing is left."""
    root = str(tmp_path)
    with serving("grpc", 2, root) as servers, driving(servers) as worker:
        plan = checkpoint("run/ckpt-1", (0, 1))
        servers.verbs[0].propose(worker.session, plan, "", None)
        worker.push(plan)
        eventually(lambda: servers.verbs[0].status().waiting)
        servers.verbs[0].leave(worker.session, "it died")
        eventually(lambda: not servers.verbs[1].status().generation.members)
        back = Worker(worker.job, WORKERS[0], worker.job.open(WORKERS[0]).session, round=1)
        eventually(lambda: all(server.status().generation.members for server in servers.verbs))
        back.generation = servers.verbs[0].status().generation.number
        (failed,) = next_save(back, root)
    assert "the workers that began it were lost" in failed


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


def forbid(directory):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (directory / "run").chmod(0o500)
    return partial((directory / "run").chmod, 0o700)


@pytest.mark.parametrize(
    ("spoil", "place", "why"),
    [(fill, "disk", "No space left"), (make_read_only, "disk", "Read-only"), (forbid, "tmp_path", "Permission")],
)
def test_a_place_where_nothing_can_be_written(request, spoil, place, why):
    """Said with the shard's name, and all stays as it was: it can be restored from; saving goes on once it can."""
    directory = request.getfixturevalue(place)
    root = str(directory)
    save(root, 1, 1.0)
    mend = spoil(directory)
    try:
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
    finally:
        if newest(root)[0] == "run/ckpt-1":
            mend()
    assert newest(root) == ("run/ckpt-3", 2.0)


def test_a_disk_that_is_full_before_the_manifest(disk):
    """There is no checkpoint then; what its shards take is free again after the next save."""
    root = str(disk)
    save(root, 1, 1.0)
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 2.0)
        plan = job.order(worker, "run/ckpt-2")
        shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
        mend = fill(disk)
        with pytest.raises(CheckpointError, match=r"ckpt-2/manifest\.json cannot be written: .*No space left"):
            job.verbs[0].snapshot(job.token, plan.id, manifest_of(shards)).result(SOON)
        assert newest(root) == ("run/ckpt-1", 1.0)
        job.append(Snapshotted(plan.id, 0, "run/ckpt-2", "no space"))
        mend()
        job.save(worker, "run/ckpt-3")
    assert files(root) == whole(1) | whole(3)


def test_a_file_that_may_not_grow(tmp_path):
    """A server whose files are limited says so and goes on; without the limit it saves."""
    root, endless = str(tmp_path), resource.RLIM_INFINITY
    save(root, 1, 1.0)
    with processes(root) as (servers, started):
        job, worker = job_on(servers, 2.0)
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, (200_000, endless))
        shard = r"ckpt-2/shard-00001-of-00002-\w+\.safetensors cannot.*too large"
        with pytest.raises(CheckpointError, match=shard) as told:
            job.save(worker, "run/ckpt-2")
        assert told.value.task == "/job:ps/task:1"
        assert newest(root) == ("run/ckpt-1", 1.0)
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, (endless, endless))
        job.save(worker, "run/ckpt-3")
    assert newest(root) == ("run/ckpt-3", 2.0)
    assert files(root) == whole(1) | whole(3)


# ---- Files that are not what they were ----


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


SHARD_FILE = "shard-00000-of-00002-*.safetensors"
DAMAGE = {
    "a bit of the data": (SHARD_FILE, lambda path: flip(path, -1)),
    "a bit of the header": (SHARD_FILE, lambda path: flip(path, 20)),
    "a bit of the length": (SHARD_FILE, lambda path: flip(path, 3)),
    "a missing shard": (SHARD_FILE, lambda path: path.unlink()),
    "a short shard": (SHARD_FILE, lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "an empty shard": (SHARD_FILE, lambda path: path.write_bytes(b"")),
    "a short manifest": ("manifest.json", lambda path: path.write_text(path.read_text()[:-9])),
    "an empty manifest": ("manifest.json", lambda path: path.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(tmp_path, damage):
    """It is refused with the file's name, never passed over for an older one unseen, and that one is set aside of whose
    damage the processes have told the servers, once another one is restored."""
    root = str(tmp_path)
    for number in (1, 2):
        save(root, number, float(number))
    pattern, spoil = DAMAGE[damage]
    (damaged,) = (tmp_path / "run/ckpt-2").glob(pattern)
    spoil(damaged)
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 9.0)
        with pytest.raises(DamagedCheckpoint, match=rf"run/ckpt-2/{damaged.name}"):
            job.restore(worker, "run/ckpt-2")
        assert {float(job.value(worker, v)[0]) for v in job.variables if v.servers == (0,)} == {9.0}
        found = servers.verbs[0].restore(worker.session, "run", worker.turn(), RestoreOrder("open")).result(SOON)
        assert (found.path, set(found.damaged)) == (
            ("run/ckpt-1", {"ckpt-2"}) if "manifest" in damage else ("run/ckpt-2", set())
        )
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


def test_servers_of_one_process_share_a_memory(tmp_path):
    """`memory://` is a place like others."""
    root = f"memory://{tmp_path.name}"
    save(root, 1, 1.0)
    save(root, 2, 2.0)
    assert newest(root) == ("run/ckpt-2", 2.0)


def test_processes_share_an_object_store():
    """What some servers saved in a bucket others restore, two to one."""
    with object_store():
        root = f"s3://{BUCKET}/jobs"
        with processes(root) as (servers, _):
            job, worker = job_on(servers, 5.0)
            shards = job.save(worker)
            assert {shard.path for shard in shards} == {f"{root}/run/ckpt-1"}
        assert newest(root) == ("run/ckpt-1", 5.0)


def test_an_object_store_that_is_gone(tmp_path):
    """The error names the file; the server goes on."""
    with object_store():
        one = core(root=f"s3://{BUCKET}/jobs")
    servers = Servers([one], [one], Clock(), "", False)
    job, worker = job_on(servers, 1.0)
    with pytest.raises(
        CheckpointError, match=rf"s3://{BUCKET}/jobs/run/ckpt-1/shard-00000-of-00001-\w+\.safetensors cannot"
    ):
        job.save(worker)
    assert float(job.value(worker, job.variables[0])[0]) == 1.0
    one.close()


# ---- Deltas ----

SPEC = TableSpec((2,))


def job_with_a_table(servers):
    """A job with a table in as many parts as there are servers; and what trains it."""
    job, count = Job(servers), len(servers.verbs)
    (worker,) = job.join(WORKERS[0])
    ends = np.linspace(0, BUCKETS, count + 1).astype(int).tolist()
    parts = [
        create_part(job, worker, part_of(n, SPEC, n, range(ends[n], ends[n + 1]), name=f"users/part_{n}"))
        for n in range(count)
    ]
    plan = job.approve(by_keys(*parts), worker)

    def train(keys, value):
        owners = np.searchsorted(ends, buckets_of(hashes_of(np.array(keys), SPEC.salt)), "right") - 1
        mine = [np.array(keys)[owners == n].tolist() for n in range(count)]
        rows = tuple(map(len, mine))
        said = Contribution(worker.session, worker.generation, worker.round, plan.id, (1.0,) * count, rows=rows)
        together(*(job.verbs[n].push(said, Payload.pack(keyed(mine[n], value))) for n in range(count)))
        worker.round += 1

    return job, worker, train


@pytest.mark.parametrize(("task", "point"), [(0, "naming the manifest"), (1, "in a shard")])
def test_a_server_that_dies_in_a_delta(tmp_path, task, point):
    """Nothing of the base is touched, and the next save cleans up."""
    root = str(tmp_path)
    with serving("core", 2, root) as servers:
        job, worker, train = job_with_a_table(servers)
        train(range(300), 1.0)
        train(range(100), 2.0)
        job.save(worker, "run/ckpt-1")
        expected = joined(
            [state_of(core.machine.job.store.tables()[0].freeze(-1)) for core in servers.cores], range(BUCKETS)
        )
    with processes(root, {task: point}) as (servers, started):
        job, worker, train = job_with_a_table(servers)
        job.restore(worker, "run")
        train(range(50, 400), 3.0)
        plan = job.approve(checkpoint("run/ckpt-2", (0, 1), json.dumps({"base": "ckpt-1"}), worker.round), worker)
        assert {shard.tables[0].since for shard in save_until(point, job, worker, plan)} <= {2}
        is_killed(servers, started[task])
    with serving("core", 1, root) as servers:
        job, worker, train = job_with_a_table(servers)
        assert job.restore(worker, "run").path == "run/ckpt-1"
        assert state_of(servers.cores[0].machine.job.store.tables()[0].freeze(-1)).equals(expected)
        job.save(worker, "run/ckpt-3")
    assert files(root) == whole(1) | whole(3, 1)
