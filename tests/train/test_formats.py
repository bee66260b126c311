"""Checkpoints that earlier versions have written: one of each format is kept beside this file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.internals import FORMAT, open_saved
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FORMATS = Path(__file__).parent / "formats"
"""Format 1 was written by the version of 2026-11-21, format 2 by that of 2026-11-22, formats 3 and 4, of two servers,
by that of 2026-11-24. That of format 4 has two tables, and a delta upon it."""


def test_there_is_one_of_each_format():
    """A new format comes with a checkpoint of it, and takes none away."""
    assert sorted(path.name for path in FORMATS.iterdir()) == [str(number) for number in range(1, FORMAT + 1)]


@pytest.mark.parametrize("format", range(1, FORMAT + 1))
@pytest.mark.parametrize("kind", ["servers-1x1", "mirrored-1"])
def test_a_checkpoint_of_each_format_is_restored(kind, format):
    """With all its variables, of several dtypes and shapes; and the next save counts on."""
    saved = FORMATS / str(format) / ("run1/ckpt-1" if format == 1 else "run1-1")
    with opened(kind) as strategy:
        root = Path("runs" if kind == "servers-1x1" else ".")
        shutil.copytree(saved, root / "ckpt" / "old-1")
        with strategy.scope():
            w = ps.Variable(np.zeros((2, 3), "f4"), name="w")
            b = ps.Variable(np.zeros(2), name="b")
            n = ps.Variable(np.int64(0), name="n")
        checkpoint = ps.train.Checkpoint(w=w, b=b, n=n)
        checkpoint.restore("ckpt/old-1").assert_nontrivial_match().assert_existing_objects_matched()
        assert np.asarray(w).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert (np.asarray(b).tolist(), int(n), int(checkpoint.save_counter)) == ([0.5, -1.5], 7, 1)
        assert checkpoint.save("ckpt/new") == "ckpt/new-2"


@pytest.mark.parametrize("servers", [1, 3])
def test_tables_and_deltas_of_format_4_are_restored(tmp_path, servers):
    """With what lies beside their rows, and what their filters have counted."""
    de = ps.dynamic_embedding
    with InProcessCluster(servers, checkpoint_root=FORMATS) as cluster:
        resolver = cluster.resolver()
        with ps.ParameterServerStrategy(cluster_resolver=resolver) as strategy, strategy.scope():
            users = de.get_variable("users", 2, admission=de.CounterFilter(2), eviction=de.TTL("7d"))
            items = de.get_variable("items", (), "uint64", "float64", admission=de.CBFFilter(1, 200))
            optimizer = ps.optimizers.Adagrad(0.5)
            optimizer.build([users])
            checkpoint = ps.train.Checkpoint(users=users, items=items, opt=optimizer)
            for name, changed in (("run1-1", {}), ("run1-2", {3: [6, -3], 4: [8, -4], 1000: [1000, -1000]})):
                checkpoint.restore(f"4/{name}").assert_existing_objects_matched()
                rows = {key: [key, -key] for key in range(-20, 20)} | changed
                keys = np.array(list(rows))
                assert np.asarray(users.lookup(keys)).tolist() == [*map(list, rows.values())]
                assert sorted(users.keys().tolist()) == sorted(rows)
                stored = [core.machine.store.tables() for core in cluster.cores]
                counted = {each.part.table: 0 for tables in stored for each in tables}
                for each in (each for tables in stored for each in tables):
                    counted[each.part.table] += each.table.counted
                assert counted == {"users": 2, "items": 0}
                assert np.asarray(items.lookup(np.array([3, (1 << 64) - 1], "uint64"))).tolist() == [1.5, 2.5]
            (accumulator,) = (v for v in optimizer.variables if v.name.startswith("adagrad/users"))
            found = np.asarray(accumulator.lookup(np.arange(-20, 20)))
            assert found.tolist() == [[pytest.approx(1.1)] * 2] * 40


def test_tables_of_format_4_are_read_without_servers():
    """By a reader, of the newest of a directory, and of one by its name."""
    for path, rows in ((FORMATS / "4", 41), (FORMATS / "4" / "run1-1", 40)):
        reader = ps.dynamic_embedding.Reader(str(path))
        assert (len(reader["users"]), len(reader["items"])) == (rows, 2)
        assert reader["users"].lookup([-7]).tolist() == [[-7, 7]]
        assert reader["items"].lookup([3]).tolist() == [1.5]
    for name in ("run1-1", "run1-2"):
        assert [*open_saved(str(FORMATS / "4" / name)).verify()] == []
