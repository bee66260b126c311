"""Checkpoints of jobs with dynamic tables: onto any number of servers, with all that optimizers and filters keep.

Between whole ones a manager saves deltas, of what has changed in tables; they restore as whole ones do.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import psclient as ps
from psclient.train.manager import NOTE
from tests.kit.internals import FoundCheckpoint, SavedCheckpoint, open_saved, storage_at
from tests.kit.strategies import refused
from tests.kit.tables import Job

OPTIMIZERS = {"adagrad": ps.optimizers.Adagrad, "adam": ps.optimizers.Adam, "lazy": ps.optimizers.LazyAdam}
OPTIMIZERS["nadam"] = ps.optimizers.Nadam  # has one number for each table, of which each part has a copy


@pytest.mark.parametrize(
    ("make", "source"),
    [(OPTIMIZERS["nadam"], 3)]
    + [pytest.param(OPTIMIZERS[name], 3, marks=pytest.mark.soak) for name in ("adagrad", "adam", "lazy")]
    + [pytest.param(make, 1, marks=pytest.mark.soak) for make in OPTIMIZERS.values()],
)
def test_any_number_of_servers_restores_it(tmp_path, source, make):
    """Bit for bit, and goes on as the job does that was not stopped."""
    with Job(tmp_path, source, make) as job:
        job.build().train(5)
        job.save("run")
        expected, numbers = job.state(), job.numbers()
        job.train(3, seed=1)
        later = job.state()
    assert expected.keys.size > 20 < expected.counted_keys.size
    for servers in (1, 2):
        with Job(tmp_path, servers, make) as job:
            job.build()
            job.checkpoint.restore("run").assert_consumed()
            assert job.state().equals(expected)
            assert job.numbers() == numbers
            job.train(3, seed=1)
            assert job.state().equals(later)


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_tables_and_slots_that_are_created_later_begin_with_it(tmp_path, servers):
    """The table when it is created, the optimizer's tensors when they are; both as if they had been there."""
    with Job(tmp_path, 2) as job:
        job.build().train(5)
        job.save("run")
        expected = job.state()
        job.train(3, seed=1)
        later = job.state()
    for has_table in (True, False):
        with Job(tmp_path, servers) as job:
            if has_table:
                job.build(slots=False)
                status = job.checkpoint.restore("run")
            else:
                with job.strategy.scope():
                    counter = ps.Variable(0.0, name="counter")
                    status = ps.train.Checkpoint(counter=counter).restore("run")
                job.build(slots=False)
            assert job.state().keys.tolist() == expected.keys.tolist()
            job.train(3, seed=1)
            assert job.state().equals(later), has_table
            status.assert_existing_objects_matched() if has_table else status.expect_partial()


def test_an_optimizer_alone_is_restored_by_keys(tmp_path):
    """Its tensors get what the checkpoint has for the keys that are there, and begin anew in other rows; rows stay."""
    with Job(tmp_path, 3, admission=None, eviction=None) as job:
        job.build().train(3)
        job.save("run")
        saved = job.state()
    with Job(tmp_path, 2, admission=None, eviction=None) as job:
        job.build().train(2, seed=4, many=90)
        manager = ps.train.CheckpointManager(job.checkpoint, "other", 3, full_every=9)
        manager.save()
        rows = job.state().tensors[0]
        ps.train.Checkpoint(optimizer=job.optimizer).restore("run").expect_partial()
        found = job.state()
        assert found.tensors[0].tobytes() == rows.tobytes()
        known = dict(zip(saved.keys.tolist(), saved.tensors[1].tolist(), strict=True))
        first = job.optimizer.initial_accumulator_value
        assert found.tensors[1].tolist() == [known.get(key, pytest.approx([first] * 2)) for key in found.keys.tolist()]
        assert 0 < len(known.keys() & found.keys.tolist()) < found.keys.size
        manager.save()  # whole: no row says that what lies beside it has changed
        manager.sync()
        job.train(1)
        job.checkpoint.restore("other")
        assert job.state().equals(found)
    assert open_saved(str(tmp_path / "other")).manifest.base is None


# ---- Deltas ----


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


@pytest.mark.ci
@pytest.mark.parametrize("source", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_deltas_are_restored_as_whole_checkpoints_are(tmp_path, source):
    """Each of them, onto any number of servers; and the job goes on as one that was not stopped. What was restored is a
    base of the next delta."""
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
    for servers, paths in ((1, list(states)[:2]), (2, list(states)[2:])):
        with Job(tmp_path, servers) as job:
            job.build()
            for path in paths:
                job.checkpoint.restore(path).assert_consumed()
                assert job.state().equals(states[path]), path
            if servers == 2:
                job.train(3, seed=9)
                assert job.state().equals(later)
                manager = manager_of(job, full_every=3)
                assert manager.restore_or_initialize() == "run/ckpt-5"
                job.train(1)
                assert save(manager) == "run/ckpt-6"
                later = job.state()
                job.checkpoint.restore("run").assert_consumed()
                assert job.state().equals(later)
    assert bases(tmp_path)["ckpt-6"] == "ckpt-5"


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
        said = "'ckpt-2', but the checkpoint of this name was saved later"
        refused(ps.errors.DamagedCheckpoint, said, lambda: job.checkpoint.restore("run/ckpt-3"))
        save(manager, 1)
        assert bases(tmp_path)["ckpt-1"] == "ckpt-2"
        job.checkpoint.restore("run/ckpt-1")
        assert job.state().equals(expected)
        save(manager, 2)
    assert bases(tmp_path)["ckpt-2"] == ""


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
