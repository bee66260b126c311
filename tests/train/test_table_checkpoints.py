"""Checkpoints of jobs with dynamic tables: onto any number of servers, with all that optimizers and filters keep."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.internals import open_saved
from tests.kit.tables import Job

de = ps.dynamic_embedding


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


def test_a_restore_undoes_what_came_after(tmp_path):
    """Rows that were made since are gone, and others are there again; a read of the same process sees it."""
    with Job(tmp_path, 2) as job:
        job.build().train(4)
        job.save("run")
        expected, size = job.state(), job.table.size()
        keys = expected.keys
        rows = np.asarray(job.table.lookup(keys))
        job.train(4, seed=5, many=1000, count=3000)
        assert job.table.size() > size
        job.checkpoint.restore("run")
        assert job.state().equals(expected)
        assert job.table.size() == size
        assert np.asarray(job.table.lookup(keys)).tobytes() == rows.tobytes()


def test_a_plain_variable_becomes_a_table_and_back(tmp_path):
    """With what an optimizer keeps; a key that is no row is named."""
    rows = np.random.default_rng(0).normal(size=(50, 2)).astype("float32")
    with Job(tmp_path, 2) as job, job.strategy.scope():
        users = ps.Variable(rows, name="users")
        optimizer = ps.optimizers.Adagrad(0.1)
        optimizer.build([users])
        job.strategy.run(lambda: optimizer.apply_gradients([(np.ones((50, 2), "float32"), users)]))
        saved = users.numpy()
        (accumulator,) = (v.numpy() for v in optimizer.variables if v.shape == (50, 2))
        ps.train.Checkpoint(users=users, optimizer=optimizer).save("plain/ckpt")
    with Job(tmp_path, 3, admission=None, eviction=None) as job:
        job.build()
        job.checkpoint.restore("plain").expect_partial()
        state = job.state()
        assert sorted(state.keys.tolist()) == list(range(50))
        assert state.tensors[0].tolist() == saved[state.keys].tolist()
        assert state.tensors[1].tolist() == accumulator[state.keys].tolist()
        job.table.scatter_update(ps.IndexedSlices(np.full((1, 2), 7, "float32"), [55]))
        job.save("table")
    with Job(tmp_path, 2) as job:
        for size, told in ((60, None), (50, r"'users' as a dynamic table with key 55, and the variable has 50 rows")):
            with job.strategy.scope():
                users = ps.Variable(np.zeros((size, 2), "float32"), name=f"w{size}")
                checkpoint = ps.train.Checkpoint(users=users)
            if told:
                with pytest.raises(ps.errors.VariableMismatch, match=told):
                    checkpoint.restore("table")
            else:
                checkpoint.restore("table").expect_partial()
                assert users.numpy()[:50].tolist() == saved.tolist()
                assert users.numpy()[55].tolist() == [7, 7]
    with ps.MirroredStrategy() as strategy, strategy.scope():
        users = ps.Variable(np.zeros((60, 2), "float32"), name="users")
        ps.train.Checkpoint(users=users).restore(str(tmp_path / "table")).expect_partial()
        assert users.numpy()[55].tolist() == [7, 7]


def test_files_and_manifest_say_what_it_is(tmp_path):
    """A manifest of format 4 has the table; its tensors are those of the state."""
    with Job(tmp_path, 3) as job:
        job.build().train(5)
        job.save("run")
        state = job.state()
    saved = open_saved(str(tmp_path / "run"))
    assert [*saved.verify()] == []
    assert (saved.manifest.format, saved.manifest.base, list(saved.manifest.tables)) == (4, None, ["users"])
    assert saved.tensor("users").tobytes() == state.tensors[0].tobytes()
    assert saved.tensor("users/keys").tobytes() == state.keys.tobytes()
    assert [v for v in saved.manifest.variables if v.startswith("users")] == ["users"]
    assert saved.manifest.tables["users"].spec.admission == de.CounterFilter(2)


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
