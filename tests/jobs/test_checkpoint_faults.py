"""Processes that die while a checkpoint is saved or restored, and disks that fail: the one before it stays whole."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pstesting import forks
from pstesting.clock import Clock
from pswire.checkpoint import storage
from tests.kit.internals import (
    Apply,
    CheckpointError,
    Chief,
    ClusterSpec,
    DamagedCheckpoint,
    Epoch,
    Input,
    Node,
    Plan,
    Program,
    ProgramError,
    Reduction,
    Ref,
    RemoteServer,
    RestoreOrder,
    RoundReply,
    ServerLost,
    ServerOptions,
    SnapshotOrder,
    Snapshotted,
    Task,
    TensorSpec,
    Timeouts,
    Turn,
    address_in,
    await_listening,
    start_server,
)
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
    together,
)
from tests.kit.storage import BUCKET, object_store

DYING = Path(__file__).parent.parent / "kit" / "faulty_servers.py"
CALM = Timeouts(lease=60.0, call=10.0, round=180.0)


# ---- Processes ----


def start(root: str, task: int = 0, point: str = "") -> subprocess.Popen[bytes]:
    """A server process, which dies at a point if one is given."""
    if not point:
        return start_server(task, options=ServerOptions(checkpoint_root=root), timeouts=CALM)[0]
    flags = ["--task", str(task), "--port", "0", "--checkpoint-root", root, "--lifeline"]
    command = [sys.executable, str(DYING), point, "server", *flags]
    return forks.Forked[bytes](command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def processes(root: str, points: Mapping[int, str] | None = None, count: int = 2) -> Iterator[tuple[Servers, list]]:
    """Servers in processes of their own; and the processes."""
    with ExitStack() as stack:
        started, verbs = [], []
        for task in range(count):
            point = (points or {}).get(task, "")
            if point:
                process = stack.enter_context(ended(start(root, task, point)))
                address = address_in(await_listening(process, Task("ps", task), CALM))
            else:
                process, address = start_server(task, options=ServerOptions(checkpoint_root=root), timeouts=CALM)
                stack.enter_context(ended(process))
            started.append(process)
            verbs.append(RemoteServer(address, Task("ps", task), CALM))
            stack.callback(verbs[-1].close)
        yield Servers(verbs, [server.status() for server in verbs], Clock(), root, True), started


def job_on(servers: Servers, value: float) -> tuple[Job, Worker]:
    """A job with one large and one small variable on each server."""
    job = Job(servers)
    (worker,) = job.join(WORKERS[0])
    for task in range(len(servers.verbs)):
        job.variable(worker, np.full(100_000, value), (task,))
        job.variable(worker, np.full(3, value, "float32"), (task,))
    return job, worker


def newest(root: str) -> tuple[str, float]:
    """What a job that is started anew restores: the path, and the value that all variables have."""
    with serving("core", 1, root) as servers:
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        variables = [job.variable(worker, np.zeros(n, dtype)) for n, dtype in [(100_000, "f8"), (3, "f4")] * 2]
        path = job.restore(worker).path
        values = {float(x) for variable in variables for x in np.unique(job.value(worker, variable))}
    assert len(values) == 1
    return path, values.pop()


def files(root: str) -> set[str]:
    """Those below a root, less what tells the saves apart."""
    found = (str(path.relative_to(root)) for path in Path(root).rglob("*") if not path.is_dir())
    return {re.sub(r"-\w{8}\.safetensors", ".safetensors", path) for path in found}


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def whole(number: int, count: int = 2) -> set[str]:
    """The files of a complete checkpoint."""
    shards = {f"run/ckpt-{number}/shard-{n:05d}-of-{count:05d}.safetensors" for n in range(count)}
    return shards | {f"run/ckpt-{number}/manifest.json"}


def save(root: str, number: int, value: float) -> None:
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, value)
        job.save(worker, f"run/ckpt-{number}")


# ---- Servers that die ----

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
        for server in (0, 1):
            worker.push(plan, server=server)
        if "manifest" in point:
            asked = [server.snapshot(job.token, plan.id, "") for server in job.verbs]
            text = manifest_of([future.result(SOON) for future in asked])
            asked = [job.verbs[0].snapshot(job.token, plan.id, text)]
        assert started[task].wait(SOON) == -9
        for server in servers.verbs:
            server.fail(ServerLost("a server is gone"))
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
    before = contents(tmp_path)
    with processes(root, {1: "in a restore"}) as (servers, started):
        _, worker = job_on(servers, 2.0)
        for server in servers.verbs:
            server.restore(worker.session, "run", Turn())
        assert started[1].wait(SOON) == -9
        for server in servers.verbs:
            server.fail(ServerLost("a server is gone"))
    assert contents(tmp_path) == before
    assert newest(root) == ("run/ckpt-1", 1.0)


# ---- Chiefs that die ----


class Driven(Job):
    """A job whose chief is another process."""

    def begin(self):
        self.epoch, self.variables = Epoch(0, ()), []


@contextmanager
def chief(servers: Servers, point: str) -> Iterator[subprocess.Popen[bytes]]:
    cluster = {"ps": [server.address for server in servers.verbs], "worker": ["127.0.0.1:1"], "chief": ["127.0.0.1:1"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    command = [sys.executable, str(DYING), point, "chief", config]
    with ended(forks.Forked[bytes](command, stdin=subprocess.DEVNULL)) as process:
        yield process


def snapshotted(worker: Worker) -> Sequence[Snapshotted]:
    entries = worker.job.verbs[0].watch(worker.session, 0, 0).result(SOON).entries
    return [entry for entry in entries if isinstance(entry, Snapshotted)]


def driven(servers: Servers) -> Worker:
    """A worker of a job that a chief drives, once it is a member; with variables on both servers."""
    eventually(lambda: servers.verbs[0].status().log)
    job = Driven(servers)
    worker = Worker(job, WORKERS[0], job.open(WORKERS[0]).session)
    eventually(lambda: all(server.status().epoch for server in servers.verbs))
    worker.epoch = servers.verbs[0].status().epoch.number
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
def driving(servers: Servers, timeouts: Timeouts) -> Iterator[Worker]:
    """A chief in a thread of this process; gives a worker of its job."""
    cluster = ClusterSpec({"ps": ["127.0.0.1:1"] * 2, "worker": ["127.0.0.1:1"], "chief": ["127.0.0.1:1"]})
    theirs = [RemoteServer(server.address, server.task, timeouts) for server in servers.verbs]
    chief = Chief(CHIEF, theirs, cluster, timeouts)
    chief.start()
    try:
        yield driven(servers)
    finally:
        chief.stop(abandon=True)


def order(worker: Worker, plan: Plan) -> list[Future[RoundReply]]:
    """Proposes a section of both servers, and makes its round."""
    worker.job.verbs[0].propose(worker.session, plan, "", None)
    values = [np.full(reduction.tensor.shape, -1) for reduction in plan.reductions]
    pushed = [worker.push(plan, values, server=server) for server in (0, 1)]
    worker.round += 1
    return pushed


@pytest.mark.parametrize("what", ["its round", "the manifest"])
def test_a_save_that_takes_longer_than_a_round_may(tmp_path, caplog, monkeypatch, what):
    """The chief asks again, and is told of what it asked for first."""
    caplog.set_level("INFO", "psclient.chief")
    go, put = threading.Event(), storage.Directory.put

    def late(self: storage.Directory, path: str, data: bytes) -> None:
        assert what == "its round" or go.wait(SOON)
        put(self, path, data)

    monkeypatch.setattr(storage.Directory, "put", late)
    with serving("grpc", 2, str(tmp_path)) as servers, driving(servers, replace(CALM, round=0.2, word=0.2)) as worker:
        plan = checkpoint("run/ckpt-1", (0, 1))
        if what == "its round":
            servers.verbs[0].propose(worker.session, plan, "", None)
        else:
            together(*order(worker, plan))
        eventually(lambda: caplog.text.count("still writes its part of a checkpoint") > 3)
        go.set()
        if what == "its round":
            together(*(worker.push(plan, server=server) for server in (0, 1)))
        (entry,) = eventually(lambda: snapshotted(worker))
    assert (entry.round, entry.error) == (0, "")
    assert newest(str(tmp_path)) == ("run/ckpt-1", 2.0)


def test_a_save_whose_round_fails(tmp_path):
    """The chief is told by the servers, says so in the log, and completes the next one."""
    root = str(tmp_path)
    with serving("grpc", 2, root) as servers, driving(servers, CALM) as worker:
        spec = TensorSpec("int64", (3,))
        variable = worker.job.variable(worker, np.zeros(3, "int64"), (0, 1), saved_as="")
        power = Program((Input("variable", spec), Input("value", spec)), (Node("pow", (0, 1)),), ((0, 2),), ())
        applied = Apply(0, (0, 1), (Ref("variable", variable.id), Ref("reduction", 0)))
        saved = SnapshotOrder("run/ckpt-1", (0, 1))
        failing = Plan((Reduction("sum", spec, (0, 1)),), (), (power,), (applied,), (), saved)
        for future in order(worker, failing):
            assert isinstance(future.exception(SOON), ProgramError)
        (entry,) = eventually(lambda: snapshotted(worker))
        assert "'run/ckpt-1' failed" in entry.error
        together(*order(worker, checkpoint("run/ckpt-2", (0, 1), round=1)))
        entry = eventually(lambda: snapshotted(worker)[1:])[0]
    assert (entry.round, entry.error) == (1, "")
    assert newest(root) == ("run/ckpt-2", 2.0)
    assert files(root) == whole(2)


@pytest.mark.parametrize("state", ["[" * 200_000, '{"objects": 1e400}', '{"state": [NaN]}', '{"delete": [1]}'])
def test_a_save_that_is_ordered_in_bad_json(tmp_path, caplog, state):
    """By a worker that is not ours: the save fails with a word, and chief and servers write the next one."""
    root = str(tmp_path)
    with serving("grpc", 2, root) as servers, driving(servers, CALM) as worker:
        together(*order(worker, checkpoint("run/ckpt-1", (0, 1), state)))
        (entry,) = eventually(lambda: snapshotted(worker))
        assert entry.error.startswith("what is to be saved as 'run/ckpt-1' is malformed: ")
        together(*order(worker, checkpoint("run/ckpt-2", (0, 1), round=1)))
        entry = eventually(lambda: snapshotted(worker)[1:])[0]
    assert (entry.round, entry.error) == (1, "")
    assert files(root) == whole(2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_save_whose_members_are_gone(tmp_path):
    """They reached one server of two: the next round of those who come after them settles it, and nothing is left."""
    root = str(tmp_path)
    with serving("grpc", 2, root) as servers, driving(servers, CALM) as worker:
        plan = checkpoint("run/ckpt-1", (0, 1))
        servers.verbs[0].propose(worker.session, plan, "", None)
        together(worker.push(plan))
        servers.verbs[0].leave(worker.session, "it died")
        eventually(lambda: not servers.verbs[1].status().epoch.members)
        back = Worker(worker.job, WORKERS[0], worker.job.open(WORKERS[0]).session, round=1)
        eventually(lambda: all(server.status().epoch.members for server in servers.verbs))
        back.epoch = servers.verbs[0].status().epoch.number
        together(*order(back, checkpoint("run/ckpt-2", (0, 1), round=1)))
        failed, done = eventually(lambda: snapshotted(back)[1:] and snapshotted(back))
    assert "those who began it are gone" in failed.error
    assert (done.round, done.error) == (1, "")
    assert files(root) == whole(2)


# ---- Disks ----


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
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


def fill(disk: Path) -> Path:
    """Leaves no room."""
    junk = disk / "junk"
    with open(junk, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return junk


def test_a_full_disk(disk):
    """Said with the shard's name; the checkpoint before stays, and saving goes on once there is room."""
    root = str(disk)
    save(root, 1, 1.0)
    junk = fill(disk)
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 2.0)
        with pytest.raises(
            CheckpointError, match=r"ckpt-2/shard-00000-of-00002-\w+\.safetensors cannot.*No space left"
        ):
            job.save(worker, "run/ckpt-2")
        assert newest(root) == ("run/ckpt-1", 1.0)
        assert files(root) == whole(1) | {"junk"}
        junk.unlink()
        job.save(worker, "run/ckpt-3")
    assert newest(root) == ("run/ckpt-3", 2.0)


def test_a_disk_that_is_full_before_the_manifest(disk):
    """There is no checkpoint then; what its shards take is free again after the next save."""
    root = str(disk)
    save(root, 1, 1.0)
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 2.0)
        plan = job.order(worker, "run/ckpt-2")
        shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
        junk = fill(disk)
        with pytest.raises(CheckpointError, match=r"ckpt-2/manifest\.json cannot be written: .*No space left"):
            job.verbs[0].snapshot(job.token, plan.id, manifest_of(shards)).result(SOON)
        assert newest(root) == ("run/ckpt-1", 1.0)
        job.append(Snapshotted(plan.id, 0, "run/ckpt-2", "no space"))
        junk.unlink()
        job.save(worker, "run/ckpt-3")
    assert files(root) == whole(1) | whole(3)


def test_a_read_only_disk(disk):
    """It can be restored from; a save says which file cannot be written, and leaves all as it was."""
    root = str(disk)
    save(root, 1, 1.0)
    mount("-o", "remount,ro", root)
    with serving("core", 2, root) as servers:
        job, worker = job_on(servers, 2.0)
        for path in ("run/ckpt-2", "run/ckpt-1"):
            with pytest.raises(
                CheckpointError, match=rf"{path}/shard-00000-of-00002-\w+\.safetensors cannot.*Read-only"
            ):
                job.save(worker, path)
    assert newest(root) == ("run/ckpt-1", 1.0)
    assert files(root) == whole(1)


def test_a_directory_without_permission(tmp_path):
    """As a read-only disk."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    root = str(tmp_path)
    save(root, 1, 1.0)
    (tmp_path / "run").chmod(0o500)
    try:
        with serving("core", 2, root) as servers:
            job, worker = job_on(servers, 2.0)
            with pytest.raises(
                CheckpointError, match=r"ckpt-2/shard-00000-of-00002-\w+\.safetensors cannot.*Permission"
            ):
                job.save(worker, "run/ckpt-2")
        assert newest(root) == ("run/ckpt-1", 1.0)
    finally:
        (tmp_path / "run").chmod(0o700)


def test_a_file_that_may_not_grow(tmp_path):
    """A server whose files are limited says so and goes on; without the limit it saves."""
    root = str(tmp_path)
    save(root, 1, 1.0)
    with processes(root) as (servers, started):
        job, worker = job_on(servers, 2.0)
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        with pytest.raises(
            CheckpointError, match=r"ckpt-2/shard-00001-of-00002-\w+\.safetensors cannot.*too large"
        ) as told:
            job.save(worker, "run/ckpt-2")
        assert told.value.task == "/job:ps/task:1"
        assert newest(root) == ("run/ckpt-1", 1.0)
        resource.prlimit(started[1].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        job.save(worker, "run/ckpt-3")
    assert newest(root) == ("run/ckpt-3", 2.0)
    assert files(root) == whole(1) | whole(3)


# ---- Files that are not what they were ----


def flip(path: Path, place: int) -> None:
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
        together(worker.push(plan, server=1))
        assert not list(tmp_path.glob("run/*.damaged"))  # one server does it, which reads and writes manifests
        together(worker.push(plan, server=0))
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
