"""Deltas: between whole checkpoints a manager saves what has changed in tables; they restore as whole ones do."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import psclient as ps
from psclient.train.manager import NOTE
from pswire.checkpoint.compaction import compact
from tests.kit.internals import FoundCheckpoint, SavedCheckpoint, storage_at
from tests.kit.tables import Job


def manager_of(job, **options):
    options = {"max_to_keep": None, "full_every": 4} | options
    return ps.train.CheckpointManager(job.checkpoint, "run", **options)


def save(manager, *args, **options):
    path = manager.save(*args, **options)
    manager.sync()
    return path


def bases(root, directory="run"):
    """The base of each checkpoint in a directory; "" of one that is whole."""
    place = storage_at(root / directory)
    opened = [SavedCheckpoint.at(place, name) for name in FoundCheckpoint.within(place).whole]
    return {saved.name: saved.manifest.base.name if saved.manifest.base else "" for saved in opened}


@pytest.mark.parametrize("source", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_deltas_are_restored_as_whole_checkpoints_are(tmp_path, source):
    """Each of them, onto any number of servers; and the job goes on as one that was not stopped."""
    states = {}
    with Job(tmp_path, source) as job:
        manager = manager_of(job.build(), full_every=3)
        for number in range(1, 6):
            job.train(2, seed=number)
            states[save(manager)] = job.state()
        job.train(3, seed=9)
        later = job.state()
    assert bases(tmp_path) == {
        "ckpt-1": "", "ckpt-2": "ckpt-1", "ckpt-3": "ckpt-2", "ckpt-4": "", "ckpt-5": "ckpt-4"
    }  # fmt: skip
    for servers in (1, 2):
        with Job(tmp_path, servers) as job:
            job.build()
            for path, expected in states.items():
                job.checkpoint.restore(path).assert_consumed()
                assert job.state().equals(expected), path
            job.train(3, seed=9)
            assert job.state().equals(later)


def test_it_goes_on_after_a_restart(tmp_path):
    """A restored checkpoint is a base, be it whole or a delta, on other servers, too."""
    with Job(tmp_path, 2) as job:
        manager = manager_of(job.build())
        for number in range(2):
            job.train(2, seed=number)
            save(manager)
    with Job(tmp_path, 3) as job:
        manager = manager_of(job.build())
        assert manager.restore_or_initialize() == "run/ckpt-2"
        job.train(1, seed=5)
        save(manager)
        expected = job.state()
    assert bases(tmp_path)["ckpt-3"] == "ckpt-2"
    with Job(tmp_path, 1) as job:
        manager = manager_of(job.build())
        assert manager.restore_or_initialize() == "run/ckpt-3"
        assert ps.train.latest_checkpoint("run", job.strategy) == "run/ckpt-3"
        assert job.state().equals(expected)


def test_steps_are_counted_to_the_next_save(tmp_path):
    """`delta_interval` is the interval of all saves."""
    with Job(tmp_path, 1) as job:
        counter = job.build().optimizer.iterations
        manager = manager_of(job, delta_interval=2, full_every=3, step_counter=counter)
        saved = []
        for step in range(8):
            job.train(1, seed=step)
            saved.append(manager.save() is not None)
        manager.sync()
    assert saved == [True, False] * 4
    assert [*bases(tmp_path).values()] == ["", "ckpt-1", "ckpt-2", ""]


def test_what_a_delta_needs_is_kept(tmp_path):
    """Beyond `max_to_keep`, and no longer than the delta is."""
    with Job(tmp_path, 1) as job:
        manager = manager_of(job.build(), max_to_keep=1, full_every=3)
        kept = []
        for number in range(7):
            job.train(1, seed=number)
            save(manager)
            kept.append([int(name.removeprefix("ckpt-")) for name in bases(tmp_path)])
            assert [path.removeprefix("run/ckpt-") for path in manager.checkpoints] == [*map(str, kept[-1])]
    assert kept == [[1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [7]]
    with Job(tmp_path, 1) as job:
        manager = manager_of(job.build(), max_to_keep=1, full_every=3)
        manager.restore_or_initialize()
        for number in range(2):
            job.train(1, seed=number)
            save(manager)
        manager = manager_of(job, max_to_keep=1, full_every=3)
        assert manager.checkpoints == ["run/ckpt-7", "run/ckpt-8", "run/ckpt-9"]
        save(manager)
    assert [*bases(tmp_path)] == ["ckpt-10"]


def test_what_is_kept_for_good_keeps_what_it_needs(tmp_path, monkeypatch):
    """A delta that is preserved is preserved with its bases."""
    now = [1000.0]
    monkeypatch.setattr("psclient.train.manager.time", SimpleNamespace(time=lambda: now[0]))
    with Job(tmp_path, 1) as job:
        manager = manager_of(job.build(), max_to_keep=1, full_every=3, keep_checkpoint_every_n_hours=1)
        for number, hours in enumerate((0.1, 0.1, 2, 0.1, 0.1, 0.1, 0.1)):
            now[0] += 3600 * hours
            job.train(1, seed=number)
            save(manager)
    assert [*bases(tmp_path)] == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-7"]


def test_who_goes_back_saves_whole(tmp_path):
    """Nothing is based on what was abandoned: neither a delta that would follow it, nor one that would replace it."""
    with Job(tmp_path, 2) as job:
        manager = manager_of(job.build(), full_every=10)
        for number in range(3):
            job.train(1, seed=number)
            save(manager)
        job.checkpoint.restore("run/ckpt-1")
        job.train(1, seed=7)
        save(manager)  # replaces ckpt-2, upon which ckpt-3 was
        expected = job.state()
        found = bases(tmp_path)
        assert found["ckpt-2"] == ""
        job.checkpoint.restore("run/ckpt-2")
        assert job.state().equals(expected)
        with pytest.raises(ps.errors.DamagedCheckpoint, match="'ckpt-2' was saved, and what is there"):
            job.checkpoint.restore("run/ckpt-3")
        save(manager, 1)
        assert bases(tmp_path)["ckpt-1"] == "ckpt-2"
        job.checkpoint.restore("run/ckpt-1")
        assert job.state().equals(expected)
        save(manager, 2)
    assert bases(tmp_path)["ckpt-2"] == ""


def test_a_damaged_base_damages_its_deltas(tmp_path):
    """A restore of the directory goes back to what is whole, and sets all of them aside."""
    with Job(tmp_path, 2) as job:
        manager = manager_of(job.build(), full_every=2)
        for number in range(4):
            job.train(1, seed=number)
            save(manager)
            if number == 1:
                expected = job.state()
    shard = next((tmp_path / "run/ckpt-3").glob("shard-00001*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with Job(tmp_path, 3) as job:
        manager = manager_of(job.build(), full_every=2)
        assert manager.restore_or_initialize() == "run/ckpt-2"
        assert job.state().equals(expected)
        job.train(1)
        save(manager)
        assert bases(tmp_path)["ckpt-3"] == ""
    assert sorted(path.name for path in (tmp_path / "run").glob("*.damaged")) == ["ckpt-3.damaged", "ckpt-4.damaged"]


def test_a_compacted_checkpoint_stays_a_base(tmp_path):
    """Of deltas that were there before, and of those that come."""
    with Job(tmp_path, 2) as job:
        manager = manager_of(job.build(), full_every=10)
        for number in range(4):
            job.train(1, seed=number)
            save(manager)
        compact(SavedCheckpoint.at(storage_at(tmp_path / "run"), "ckpt-3"))
        shutil.rmtree(tmp_path / "run/ckpt-1")
        shutil.rmtree(tmp_path / "run/ckpt-2")
        job.train(1, seed=5)
        save(manager)
        expected = job.state()
        job.train(1, seed=6)
        job.checkpoint.restore("run/ckpt-5")
        assert job.state().equals(expected)
    assert bases(tmp_path) == {"ckpt-3": "", "ckpt-4": "ckpt-3", "ckpt-5": "ckpt-4"}


def test_updates_of_all_rows_make_it_whole(tmp_path):
    """Adam with exact updates changes each row in each round: nothing can be left out; lazy updates can."""
    for make, expected in ((ps.optimizers.Adam, ""), (ps.optimizers.LazyAdam, "ckpt-1")):
        root = tmp_path / make.__name__
        with Job(root, 2, make) as job:
            manager = manager_of(job.build())
            for number in range(2):
                job.train(3, seed=number)
                save(manager)
            state = job.state()
            job.checkpoint.restore("run/ckpt-2")
            assert job.state().equals(state)
        assert bases(root)["ckpt-2"] == expected


def test_a_job_without_tables_has_no_deltas(tmp_path):
    """All of its checkpoints are whole, of the format that they had; with servers and without."""
    with Job(tmp_path, 1) as job, job.strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
        manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", 2, full_every=3)
        for _ in range(4):
            save(manager)
    place = storage_at(tmp_path / "run")
    found = [SavedCheckpoint.at(place, name).manifest for name in FoundCheckpoint.within(place).whole]
    assert {(manifest.format, manifest.base) for manifest in found} == {(2, None)}
    assert len(found) == 4  # the manager takes them for deltas
    assert "bases" in found[-2].state[NOTE]
    with ps.MirroredStrategy() as strategy, strategy.scope():
        v = ps.Variable(np.zeros(3), name="v")
        manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v), str(tmp_path / "own"), 1, full_every=3)
        for _ in range(2):
            save(manager)
    assert [*bases(tmp_path, "own").values()] == ["", ""]


def test_arguments_that_make_no_sense(tmp_path):
    """Are told when the manager is made."""
    with Job(tmp_path, 1) as job:
        job.build(slots=False)
        for options, told in (
            ({"full_every": 0}, "full_every=0"),
            ({"delta_interval": 3}, "step_counter"),
            ({"delta_interval": 3, "checkpoint_interval": 3, "step_counter": 1}, "leave checkpoint_interval out"),
        ):
            with pytest.raises(ValueError, match=told):
                manager_of(job, **options)
