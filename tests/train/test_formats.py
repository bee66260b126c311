"""Checkpoints are of documented formats: those that are written now, and one of each that earlier versions wrote."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.internals import DTYPES, FORMAT, MANIFEST, Examples, Manifest, Position, open_saved
from tests.kit.strategies import opened, root_of

pytestmark = pytest.mark.usefixtures("in_tmp_path")

de = ps.dynamic_embedding
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
        shutil.copytree(saved, root_of(kind) / "ckpt" / "old-1")
        with strategy.scope():
            w = ps.Variable(np.zeros((2, 3), "f4"), name="w")
            b = ps.Variable(np.zeros(2), name="b")
            n = ps.Variable(np.int64(0), name="n")
        checkpoint = ps.train.Checkpoint(w=w, b=b, n=n)
        checkpoint.restore("ckpt/old-1").assert_nontrivial_match().assert_existing_objects_matched()
        assert np.asarray(w).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert (np.asarray(b).tolist(), int(n), int(checkpoint.save_counter)) == ([0.5, -1.5], 7, 1)
        assert checkpoint.save("ckpt/new") == "ckpt/new-2"


@pytest.mark.ci
@pytest.mark.parametrize("servers", [1, 3])
def test_tables_and_deltas_of_format_4_are_restored(tmp_path, servers):
    """With what lies beside their rows, and what their filters have counted."""
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
                stored = [core.machine.job.store.tables() for core in cluster.cores]
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


def test_a_checkpoint_from_before_names_changed_is_restored(tmp_path):
    """Of the main of 2026-11-28: variables, slots, a table, a metric, and a dataset in the middle of its pass."""
    shutil.copytree(Path(__file__).parent / "before_names", tmp_path, dirs_exist_ok=True)
    with ExitStack() as stack:
        cluster = stack.enter_context(InProcessCluster(2, checkpoint_root=tmp_path))
        strategy = stack.enter_context(ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()))
        with strategy.scope():
            w = ps.Variable(np.zeros((4, 2), "f4"), name="w")
            users = de.get_variable("users", 2)
            dense, rows = ps.optimizers.Adam(0.5, catch_up="closed_form"), ps.optimizers.Adagrad(0.5)
            mean = ps.metrics.Mean(name="mean")
            dense.build([w])
            rows.build([users])
        dataset = ps.ArrayDataset(np.arange(12, dtype="f4")).shuffle(3).batch(4)
        data = strategy.experimental_distribute_dataset(dataset)
        checkpoint = ps.train.Checkpoint(w=w, users=users, dense=dense, rows=rows, mean=mean, data=data)
        checkpoint.restore("run").assert_consumed()
        left = [batch.tolist() for _ in data.epochs(1) for batch in data]
        assert left == [[11.0, 3.0, 8.0, 2.0]]
        assert w.numpy().tolist() == [[pytest.approx(-1.0, abs=1e-5)] * 2] * 4
        assert (int(dense.iterations), int(rows.iterations), float(mean.result())) == (2, 2, 21.0)
        assert sorted(users.keys().tolist()) == [1, 2]


@pytest.mark.parametrize("kind", ["mirrored-1", "servers-1x1"])
def test_a_checkpoint_of_format_1_is_restored_by_names(kind):
    """It has no paths; the count of saves goes on, and the status tells both sides by names and paths."""
    with opened(kind) as strategy, strategy.scope():
        shutil.copytree(FORMATS / "1/run1", root_of(kind) / "run")
        b, c = ps.Variable(np.zeros(2), name="b"), ps.Variable(0.0, name="c")
        checkpoint = ps.train.Checkpoint(first=b, second=c)
        status = checkpoint.restore("run").assert_nontrivial_match()
        assert (b.numpy().tolist(), float(c), int(checkpoint.save_counter)) == ([0.5, -1.5], 0.0, 1)
        with pytest.raises(AssertionError, match=r"not used by the program: 'n', 'w'; not in the checkpoint: 'second'"):
            status.assert_consumed()
        checkpoint.third = ps.Variable(np.int64(0), name="n")
        assert int(checkpoint.third) == 7


# ---- What is written now ----

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "manifest.schema.json"


def schema() -> Any:
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def strict(text: str) -> Any:
    """As JSON, which knows neither NaN nor infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Sampler:
    """Has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"seed": [1, 2.5, None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def cutting():
    """A strategy whose variables of two or more rows are in slices."""
    return ps.ParameterServerStrategy(variable_partitioner=ps.experimental.partitioners.FixedShardsPartitioner(2))


@pytest.mark.parametrize("kind", [ps.ParameterServerStrategy, ps.MirroredStrategy, cutting])
def test_a_manifest_is_as_documented(kind, in_tmp_path):
    """Of a checkpoint with all that one can have, written by servers and without them."""
    with kind() as strategy, strategy.scope():
        layers = [ps.Variable(np.zeros((2, 3), dtype), name=f"v-{name}") for name, dtype in DTYPES.items()]
        optimizer = ps.optimizers.Adam()
        weight = ps.Variable(np.ones(3, "float32"), name="w")
        optimizer.build([weight])
        batches = strategy.experimental_distribute_dataset([np.zeros(4), np.ones(4)])
        next(iter(batches))
        checkpoint = ps.train.Checkpoint(layers=layers, w=weight, opt=optimizer, sampler=Sampler())
        manager = ps.train.CheckpointManager(checkpoint, "run", max_to_keep=2, keep_checkpoint_every_n_hours=1)
        path = manager.save()
        manager.sync()
    (found,) = in_tmp_path.rglob(MANIFEST)
    assert found.parent.name == Path(path).name
    manifest = strict(found.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(manifest, schema())
    assert {entry["dtype"] for entry in manifest["tensors"].values()} == set(DTYPES)
    assert manifest["state"]["sampler"] == {"seed": [1, 2.5, None]}
    assert manifest["objects"]["w"] == "w"
    assert manifest["format"] == (3 if kind is cutting else 2)
    assert ("slices" in manifest["tensors"]["w"]) == (kind is cutting)
    for name, size in manifest["files"].items():
        assert (found.parent / name).stat().st_size == size


POLICIES = [(None, None), (de.CounterFilter(2), de.TTL("7d")), (de.CBFFilter(2, 1 << 12), de.LFU())]


@pytest.mark.parametrize(("admission", "eviction"), POLICIES)
def test_a_manifest_of_tables_is_as_documented(in_tmp_path, admission, eviction):
    """Of a whole checkpoint and of a delta, with all kinds of policies."""
    with ps.ParameterServerStrategy() as strategy, strategy.scope():
        table = de.get_variable("users", 3, admission=admission, eviction=eviction, capacity=1 << 15)
        optimizer = ps.optimizers.Adagrad()
        optimizer.build([table])
        checkpoint = ps.train.Checkpoint(table=table, optimizer=optimizer)
        manager = ps.train.CheckpointManager(checkpoint, "run", max_to_keep=2, full_every=2)
        for _ in range(2):
            table.scatter_add(ps.IndexedSlices(np.ones((2, 3), "float32"), [5, 6]))
            manager.save()
        manager.sync()
    manifests = [strict(path.read_text(encoding="utf-8")) for path in sorted(in_tmp_path.rglob(MANIFEST))]
    for manifest in manifests:
        jsonschema.validate(manifest, schema())
        assert manifest["format"] == FORMAT
    assert [manifest["tables"]["users"]["since"] for manifest in manifests] == [-1, 1]
    assert manifests[1]["base"] == {"name": "ckpt-1", "id": manifests[0]["id"]}


def test_the_schema_is_that_of_this_format():
    """Its number, its dtypes, and nothing beside what it names."""
    properties = schema()["properties"]
    assert properties["format"]["enum"] == [*range(2, FORMAT + 1)]
    assert set(properties["tensors"]["additionalProperties"]["properties"]["dtype"]["enum"]) == set(DTYPES)
    assert set(schema()["required"]) == set(properties) - {"tables", "id", "base"}


def test_examples_that_have_come_back_are_as_documented():
    """Where there are none, nothing is said of them, as by versions that know none."""
    for returned in ((), (Examples(1, 0, 3), Examples(2, 3, 6))):
        found = Manifest(3, (Position(0, 1, 2, returned),), {})
        said = strict(found.text())
        jsonschema.validate(said, schema())
        assert ("returned" in said["positions"][0]) == bool(returned)
        assert Manifest.parse(found.text(), "here").positions == found.positions
