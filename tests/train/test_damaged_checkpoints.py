"""A damaged newest checkpoint is passed over for the one before it, with a word, and kept aside."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from pswire.checkpoint import storage
from tests.kit.shell import shell
from tests.kit.storage import BUCKET, object_store
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = pytest.mark.parametrize(
    "kind", ["mirrored-1", "servers-1x2", pytest.param("servers-2x1", marks=pytest.mark.soak)]
)


def root_of(kind):
    return Path("." if kind.startswith("mirrored") else "runs")


def managed(strategy, directory="run", max_to_keep=9):
    with strategy.scope():
        v, w = ps.Variable(np.zeros(40), name="v"), ps.Variable(np.zeros(40), name="w")
        checkpoint = ps.train.Checkpoint(v=v, w=w)
        return v, ps.train.CheckpointManager(checkpoint, directory, max_to_keep)


def save(kind, numbers, directory="run"):
    """A checkpoint for each number, of which the values are that number."""
    with opened(kind) as strategy:
        v, manager = managed(strategy, directory)
        for number in numbers:
            v.assign(np.full(40, float(number)))
            manager.save(number)
        manager.sync()


def flip(directory):
    shard = next(directory.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")


def cut(directory):
    manifest = directory / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])


def brackets(directory):
    (directory / "manifest.json").write_text("[" * 200_000)


def lose(directory):
    next(directory.glob("shard-*")).unlink()


DAMAGE = {flip: "are not those that were saved", cut: "is no manifest", brackets: "no manifest", lose: "is missing"}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(kind):
    return sorted(path.name for path in (root_of(kind) / "run").iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        pytest.param(
            kind,
            damage,
            # All that can be wrong is passed over by both in the next test; here two show what is said and kept.
            marks=() if (kind, damage) in (("mirrored-1", flip), ("servers-1x2", cut)) else pytest.mark.soak,
        )
        for kind in ("mirrored-1", "servers-1x2", "servers-2x1")
        for damage in (flip, cut, brackets, lose)
    ],
)
def test_the_one_before_is_restored(kind, damage, caplog):
    """Whatever is wrong with the newest: one warning says which, what, and what is restored instead; it stays as it is
    under a name by which it is neither restored, counted, written over nor deleted."""
    save(kind, (1, 2, 3))
    run = root_of(kind) / "run"
    damage(run / "ckpt-3")
    kept = contents(run / "ckpt-3")
    assert shell(["psctl", "checkpoint", "verify", str(run)], Path.cwd()).code == 1
    with opened(kind) as strategy:
        v, manager = managed(strategy, max_to_keep=2)
        assert manager.restore_or_initialize() == "run/ckpt-2"
        assert v.numpy()[0] == 2.0
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "'run/ckpt-2' is restored" in said
        assert "ckpt-3: " in said
        assert DAMAGE[damage] in said
        assert manager.checkpoints == ["run/ckpt-1", "run/ckpt-2"]
        assert ps.train.latest_checkpoint("run", strategy) == "run/ckpt-2"
        for number in range(3, 7):
            assert manager.save() == f"run/ckpt-{number}"
        manager.sync()
    assert names(kind) == ["ckpt-3.damaged", "ckpt-5", "ckpt-6"]
    assert contents(run / "ckpt-3.damaged") == kept
    listed = json.loads(shell(["psctl", "checkpoint", "ls", "--json", str(run)], Path.cwd()).out)
    assert [each["name"] for each in listed["checkpoints"]] == ["ckpt-5", "ckpt-6"]
    assert (list(listed["damaged"]), listed["latest"]) == (["ckpt-3.damaged"], "ckpt-6")


@KINDS
def test_several_in_a_row(kind):
    """All that are newer than the first whole one are passed over and set aside; a name that is taken stays."""
    save(kind, (1, 2, 3, 4))
    run = root_of(kind) / "run"
    for number, damage in ((4, flip), (3, cut), (2, lose)):
        damage(run / f"ckpt-{number}")
    shutil.copytree(run / "ckpt-1", run / "ckpt-3.damaged")
    with opened(kind) as strategy:
        v, manager = managed(strategy)
        assert len(manager.checkpoints) == 4  # that are complete; nobody has read them
        assert manager.restore_or_initialize() == "run/ckpt-1"
        assert v.numpy()[0] == 1.0
        assert manager.checkpoints == ["run/ckpt-1"]
    assert names(kind) == ["ckpt-1", "ckpt-2.damaged", "ckpt-3.damaged", "ckpt-3.damaged.2", "ckpt-4.damaged"]


@KINDS
def test_where_all_are_damaged_nothing_begins_anew(kind):
    """An error names them all; nothing is renamed, for nothing else was restored."""
    save(kind, (1, 2))
    run = root_of(kind) / "run"
    flip(run / "ckpt-2")
    cut(run / "ckpt-1")
    with opened(kind) as strategy:
        v, manager = managed(strategy)
        v.assign(np.full(40, 9.0))
        with pytest.raises(ps.errors.DamagedCheckpoint, match=r"ckpt-2: .*not those that.*ckpt-1: .*is no manifest"):
            manager.restore_or_initialize()
        assert v.numpy()[0] == 9.0
    assert names(kind) == ["ckpt-1", "ckpt-2"]


@KINDS
def test_one_that_is_named_is_never_passed_over(kind):
    """Its path is what the script wants: it is told, and nothing is renamed."""
    save(kind, (1, 2))
    flip(root_of(kind) / "run/ckpt-2")
    with opened(kind) as strategy:
        v, manager = managed(strategy)
        with pytest.raises(ps.errors.DamagedCheckpoint, match=r"ckpt-2/shard-.*not those that were saved"):
            manager.checkpoint.restore("run/ckpt-2")
        assert v.numpy()[0] == 0.0
    assert names(kind) == ["ckpt-1", "ckpt-2"]


@KINDS
def test_who_went_back_goes_further_back(kind):
    """The one before is the one with the next smaller number, and not what the job has once gone back from; a restart
    finds it again."""
    save(kind, (1, 2, 3, 4, 5))
    run = root_of(kind) / "run"
    with opened(kind) as strategy:
        v, manager = managed(strategy)
        manager.checkpoint.restore("run/ckpt-2")
        v.assign(np.full(40, 33.0))
        manager.save(3)
        manager.sync()
    flip(run / "ckpt-3")
    for _ in range(2):
        with opened(kind) as strategy:
            v, manager = managed(strategy)
            assert manager.restore_or_initialize() == "run/ckpt-2"
            assert v.numpy()[0] == 2.0
    assert names(kind) == ["ckpt-1", "ckpt-2", "ckpt-3.damaged", "ckpt-4", "ckpt-5"]


@KINDS
def test_what_is_created_later_is_looked_at_now(kind):
    """Values that only later variables will take are checked as well: else the job would fail at its first step, at
    every start."""
    with opened(kind) as strategy, strategy.scope():
        v, late = ps.Variable(1.0, name="v"), ps.Variable(np.ones(40), name="late")
        manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v, late=late), "run", 9)
        manager.save()
        late.assign(np.full(40, 2.0))
        manager.save()
        manager.sync()
    run = root_of(kind) / "run"
    manifest = json.loads((run / "ckpt-2/manifest.json").read_text())
    shard = run / "ckpt-2" / manifest["tensors"]["late"]["file"]
    shard.write_bytes(shard.read_bytes().replace(np.full(40, 2.0).tobytes(), np.full(40, 3.0).tobytes()))
    with opened(kind) as strategy, strategy.scope():
        v = ps.Variable(0.0, name="v")
        manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", 9)
        assert manager.restore_or_initialize() == "run/ckpt-1"
        assert ps.Variable(np.zeros(40), name="late").numpy()[0] == 1.0


# ---- What is no damage ----


def test_a_file_that_may_not_be_read_is_raised():
    """Nobody knows whether it is damaged: a shard, a manifest, a directory."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o777)
        directory = f"{above}/run"
        save("mirrored-1", (1, 2), directory)
        newest = Path(directory, "ckpt-2")
        uid = os.geteuid()
        with opened("mirrored-1") as strategy:
            v, manager = managed(strategy, directory)
            for hidden in (next(newest.glob("shard-*")), newest / "manifest.json", newest):
                mode = hidden.stat().st_mode
                hidden.chmod(0)
                if uid == 0:
                    os.seteuid(65534)
                try:
                    with pytest.raises(ps.errors.CheckpointError, match="Permission denied") as told:
                        manager.restore_or_initialize()
                finally:
                    if uid == 0:
                        os.seteuid(0)
                    hidden.chmod(mode)
                assert type(told.value) is ps.errors.CheckpointError
            assert v.numpy()[0] == 0.0
            assert manager.restore_or_initialize() == f"{directory}/ckpt-2"
        assert sorted(path.name for path in Path(directory).iterdir()) == ["ckpt-1", "ckpt-2", "latest"]


class Failing(io.FileIO):
    """A file on a disk that fails."""

    def readinto(self, buffer):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_is_raised(monkeypatch):
    """Its next answer may be another one; nothing is set aside."""
    kind = "mirrored-1"
    save(kind, (1, 2))
    real = storage.Directory.open

    def failing(self, path):
        return Failing(self.full(path)) if "ckpt-2/shard" in path else real(self, path)

    monkeypatch.setattr(storage.Directory, "open", failing)
    with opened(kind) as strategy:
        _, manager = managed(strategy)
        with pytest.raises(ps.errors.CheckpointError, match="Input/output error") as told:
            manager.restore_or_initialize()
        assert type(told.value) is ps.errors.CheckpointError
    assert names(kind) == ["ckpt-1", "ckpt-2"]


def test_what_one_server_cannot_read_counts_for_more(tmp_path):
    """Than what another one finds damaged: its part may be whole, and nothing is passed over."""
    save("servers-2x1", (1, 2))
    run = root_of("servers-2x1") / "run"
    first, second = (next((run / "ckpt-2").glob(f"shard-0000{server}-*")) for server in (0, 1))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    shutil.move(second, tmp_path / "elsewhere")
    second.symlink_to(tmp_path / "elsewhere")
    with opened("servers-2x1") as strategy:
        v, manager = managed(strategy)
        with pytest.raises(ps.errors.CheckpointError, match="through a link") as told:
            manager.restore_or_initialize()
        assert type(told.value) is ps.errors.CheckpointError
        assert v.numpy()[0] == 0.0
    assert names("servers-2x1") == ["ckpt-1", "ckpt-2"]


# ---- Wherever they are ----


def test_by_a_url():
    """Where nothing can be renamed all files are copied before any is removed."""
    url = f"memory://{uuid.uuid4()}"
    save("mirrored-1", (1, 2), url)
    there = storage.storage_at(url)
    (shard,) = (name for name in there.listing(".")["ckpt-2"] if name.startswith("shard"))
    with there.open(f"ckpt-2/{shard}") as file:
        data = file.read()
    there.put(f"ckpt-2/{shard}", data[:-1] + b"?")
    with opened("mirrored-1") as strategy:
        v, manager = managed(strategy, url)
        assert manager.restore_or_initialize() == f"{url}/ckpt-1"
        assert v.numpy()[0] == 1.0
    assert there.listing(".").keys() == {"ckpt-1", "ckpt-2.damaged"}
    assert there.listing(".")["ckpt-2.damaged"] == {shard, "manifest.json"}


def test_a_bucket_that_does_not_answer_is_raised():
    """It is neither damaged nor empty: the job does not begin anew."""
    with object_store() as said:
        url = f"s3://{BUCKET}/{uuid.uuid4()}"
        save("mirrored-1", (1,), url)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in said.items():
            patch.setenv(name, value)
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        with opened("mirrored-1") as strategy:
            _, manager = managed(strategy, url)
            with pytest.raises(ps.errors.CheckpointError, match="cannot be read") as told:
                manager.restore_or_initialize()
            assert type(told.value) is ps.errors.CheckpointError


# ---- Several processes ----


def resumes(asynchronous):
    """Each goes on from the newest; worker 1 comes to it when the other has long done so, if it need not wait."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async() if asynchronous else ps.Sync())
    with strategy.scope():
        a, b = (ps.Variable(np.zeros(3), name=name) for name in "ab")
    manager = ps.train.CheckpointManager(ps.train.Checkpoint(a=a, b=b), "run", 3)
    if ME:
        say("waits")
        gate("go")
    say("restored", manager.restore_or_initialize())
    say("values", [a.numpy(), b.numpy()])
    if not asynchronous:
        a.assign_add(np.ones(3))
        say("saved", manager.save())
        manager.sync()


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.soak), True])
def test_all_processes_act_on_one_verdict(tmp_path, asynchronous):
    """One server finds its part of the newest damaged, the other one the part before: all take the first, whenever they
    come, and one process says so."""
    with InProcessCluster(2, checkpoint_root=tmp_path / "checkpoints") as cluster:
        resolver = cluster.resolver()
        with ps.ParameterServerStrategy(cluster_resolver=resolver) as strategy, strategy.scope():
            a, b = (ps.Variable(np.zeros(3), name=name) for name in "ab")
            manager = ps.train.CheckpointManager(ps.train.Checkpoint(a=a, b=b), "run", 3)
            for _ in range(3):
                a.assign_add(np.ones(3))
                b.assign_add(np.ones(3))
                manager.save()
    run = tmp_path / "checkpoints/run"
    for number, server in ((3, 1), (2, 0)):
        (shard,) = (run / f"ckpt-{number}").glob(f"shard-{server:05d}-*")
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    keys = {"ps": 2, "workers": 2, "gates": ["go"]}
    with ProcessCluster(resumes, tmp_path, (asynchronous,), **keys) as job, job.server(PS0) as server:
        job.hear(W1, "waits")
        if asynchronous:
            job.hear(W0, "restored")
        else:
            job.until(lambda: any("restore" in one.section for one in server.status().waiting))
        job.open("go")
        job.finish()
    for task in (W0, W1):
        assert job.said(task, "restored") == ["run/ckpt-1"]
        assert job.said(task, "values") == [[[1.0] * 3] * 2]
        assert job.said(task, "saved") == ([] if asynchronous else ["run/ckpt-2"])
    left = {"ckpt-1", "ckpt-2.damaged", "ckpt-3.damaged"} | (set() if asynchronous else {"ckpt-2"})
    assert {path.name for path in run.iterdir() if path.is_dir()} == left
    assert [job.errors(task).count("is restored, and not what is newer and damaged") for task in (W0, W1)] == [1, 0]
