"""`ps.train.Checkpoint`: what it tracks, by which paths, and what its status says of a restore."""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import in_replicas, opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = pytest.mark.parametrize(
    "kind", ["default", "mirrored-2", pytest.param("embedded-2", marks=pytest.mark.soak), "servers-2x2"]
)
"""A server of this process's own is one more server, which other files ask to save and to restore."""


class Dense:
    """Two variables; it knows who has it."""

    def __init__(self, owner, name, fill):
        self.owner = owner
        self.w = ps.Variable(np.full((2, 2), fill, "float32"), name=f"{name}/w")
        self.b = ps.Variable(np.full(2, fill, "float32"), name=f"{name}/b")


class Model:
    """Layers in a list, a table in a dict, and circles; where its names begin is another matter than its paths."""

    def __init__(self, fill, prefix=""):
        self.layers = [Dense(self, f"{prefix}dense{index}", fill + index) for index in range(2)]
        self.tables = {"users/all": ps.Variable(np.full(3, fill), name=f"{prefix}users")}
        self.me = {"self": self}

    def values(self):
        layers = [v.numpy().tolist() for layer in self.layers for v in (layer.w, layer.b)]
        return [*layers, self.tables["users/all"].numpy().tolist()]


class Sampler:
    """A state that is no array."""

    def __init__(self, seed):
        self.state = {"seed": seed, "seen": [1, 2], "name": None}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


PATHS = {
    "model/layers/0/w",
    "model/layers/0/b",
    "model/layers/1/w",
    "model/layers/1/b",
    "model/tables/users.Sall",
}


def manifest_of(kind, path):
    root = "runs/" if kind.startswith(("embedded", "servers")) else ""
    with open(f"{root}{path}/manifest.json") as file:
        return json.load(file)


@KINDS
def test_everything_comes_back_by_its_path(kind):
    """Lists, dicts, attributes, optimizers with slots, metrics and other state, wherever they are reached from."""
    with opened(kind) as strategy:
        with strategy.scope():
            model, optimizer, mean, sampler = Model(1.0), ps.optimizers.Adam(0.1), ps.metrics.Mean("loss"), Sampler(7)
        checkpoint = ps.train.Checkpoint(model=model, opt=optimizer, metrics=[mean], sampler=sampler)
        w = model.layers[0].w

        def step():
            optimizer.apply_gradients([(np.ones((2, 2), "float32"), w)])
            mean.update_state([1.0, 3.0])

        strategy.run(step)
        path = checkpoint.save("run/ckpt")
        saved = model.values(), [v.numpy().tolist() for v in optimizer.variables]
        strategy.run(step)
        for v in (model.layers[1].b, model.tables["users/all"]):
            v.assign(v.numpy() + 1)
        sampler.state = {}
        status = checkpoint.restore(path).assert_consumed()
        assert status.restored
        assert status.path == path == "run/ckpt-1"
        assert (model.values(), [v.numpy().tolist() for v in optimizer.variables]) == saved
        assert mean.result() == 2.0
        assert sampler.state == Sampler(7).state
        assert int(checkpoint.save_counter) == 1
    manifest = manifest_of(kind, path)
    slots = {f"opt/{slot}/model/layers/0/w" for slot in ("m", "v")}
    metrics = {"metrics/0/total", "metrics/0/count"}
    assert set(manifest["objects"]) == {*PATHS, *slots, *metrics, "opt/iterations", "save_counter"}
    assert manifest["state"] == {"sampler": Sampler(7).state}


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("servers-2x1", "servers-3x1"),
        *(
            pytest.param(kind, other, marks=pytest.mark.soak)
            for kind in ("default", "mirrored-2", "embedded-2", "servers-2x1")
            for other in ("servers-3x1", "default", "mirrored-1", "embedded-2")
            if (kind, other) != ("servers-2x1", "servers-3x1")
        ),
    ],
)
def test_a_checkpoint_moves_between_strategies(kind, other, tmp_path):
    """The files are the same, whoever wrote them."""
    here, there = ("runs" if k.startswith(("embedded", "servers")) else "." for k in (kind, other))
    with opened(kind) as strategy:
        with strategy.scope():
            model = Model(3.0)
        path = ps.train.Checkpoint(model=model).save("run/ckpt")
        saved = model.values()
    if here != there:
        (tmp_path / there).mkdir(exist_ok=True)
        (tmp_path / here / "run").rename(tmp_path / there / "run")
    with opened(other) as strategy:
        with strategy.scope():
            model = Model(0.0, "renamed ")
        ps.train.Checkpoint(model=model).restore(path).assert_consumed()
        assert model.values() == saved


def test_a_plain_reader_reads_what_a_mirrored_strategy_saves():
    """Its shard is plain safetensors, and its manifest names each tensor."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    with opened("mirrored-2") as strategy:
        with strategy.scope():
            model = Model(3.0)
        path = ps.train.Checkpoint(model=model).save("run/ckpt")
    manifest = manifest_of("mirrored", path)
    assert len(manifest["files"]) == 1
    tensors = load_file(f"{path}/{next(iter(manifest['files']))}")
    assert set(tensors) == set(manifest["tensors"])
    np.testing.assert_array_equal(tensors["dense1/w"], np.full((2, 2), 4.0))


@KINDS
def test_what_is_created_later_begins_with_its_value(kind):
    """By its name, slots at the first step included; the status knows then, and not before."""

    def train(strategy, model, optimizer):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones((2, 2), "float32"), model.layers[0].w)]))

    with opened(kind) as strategy:
        with strategy.scope():
            model, optimizer = Model(1.0), ps.optimizers.Adam(0.1)
        train(strategy, model, optimizer)
        checkpoint = ps.train.Checkpoint(model=model, opt=optimizer)
        path = checkpoint.save("run/ckpt")
        saved = model.values()
        train(strategy, model, optimizer)
        trained = model.values()
    with opened(kind) as strategy:
        with strategy.scope():
            holder, optimizer = {}, ps.optimizers.Adam(0.1)
            checkpoint = ps.train.Checkpoint(holder, opt=optimizer)
            status = checkpoint.restore(path).assert_existing_objects_matched()
            with pytest.raises(AssertionError, match=r"nothing tracked takes 'model/layers/0/b', .*opt/iterations"):
                status.assert_consumed()
            with pytest.raises(AssertionError, match="nothing of the checkpoint"):
                status.assert_nontrivial_match()
            holder["model"] = model = Model(0.0)
            assert model.values() == saved
            status.assert_nontrivial_match()
        train(strategy, model, optimizer)
        assert int(optimizer.iterations) == 2
        assert model.values() == trained
        status.assert_consumed()


@pytest.mark.parametrize("other", [pytest.param("mirrored-1", marks=pytest.mark.soak), "servers-1x2"])
@pytest.mark.parametrize("kind", ["mirrored-2", "servers-1x1"])
def test_the_data_go_on_where_they_stood(kind, other, tmp_path):
    """After a restore the next batch is the one that came next, in the order of that pass."""

    def opened_data(strategy):
        with strategy.scope():
            v = ps.Variable(0.0, name="v")
        batches = strategy.experimental_distribute_dataset(ps.ArrayDataset(np.arange(20)).shuffle(3).batch(4))
        return v, ps.train.Checkpoint(v=v, data=batches), batches

    def rows(strategy, batch):
        return [int(row) for part in strategy.experimental_local_results(batch) for row in part]

    with opened(kind) as strategy:
        v, checkpoint, batches = opened_data(strategy)
        seen = [rows(strategy, batch) for epoch in batches.epochs(2) for batch in batches]
    with opened(kind) as strategy:
        v, checkpoint, batches = opened_data(strategy)
        iterator = iter(batches)
        for _ in range(3):
            next(iterator)
        v.assign(1.0)
        checkpoint.save("run/ckpt")
    here, there = ("runs" if k.startswith("servers") else "." for k in (kind, other))
    if here != there:
        (tmp_path / there).mkdir(exist_ok=True)
        (tmp_path / here / "run").rename(tmp_path / there / "run")
    with opened(other) as strategy:
        v, checkpoint, batches = opened_data(strategy)
        checkpoint.restore("run").assert_consumed()
        assert [rows(strategy, batch) for epoch in batches.epochs(2) for batch in batches] == seen[3:]


@KINDS
def test_the_status_lists_both_sides(kind):
    """What the checkpoint has and nobody takes, and what is tracked and it does not have."""
    with opened(kind) as strategy:
        with strategy.scope():
            a, b, c = (ps.Variable(float(index), name=name) for index, name in enumerate("abc"))
        path = ps.train.Checkpoint(a=a, b=b, s=Sampler(1)).save("run/ckpt")
        c.assign(9.0)
        status = ps.train.Checkpoint(a=a, c=c, t=Sampler(2)).restore(path)
        words = r"nothing tracked takes 'b', 's'; it has nothing for 'c', 't'"
        with pytest.raises(AssertionError, match=words):
            status.assert_consumed()
        with pytest.raises(AssertionError, match=r"has nothing for 'c', 't'; what it has .*: 'b', 's'"):
            status.assert_existing_objects_matched()
        assert status.expect_partial() is status.assert_nontrivial_match() is status
        assert float(c) == 9.0


@KINDS
def test_what_is_not_tracked_stays(kind):
    """A checkpoint that tracks a part restores a part."""
    with opened(kind) as strategy:
        with strategy.scope():
            a, b = (ps.Variable(1.0, name=name) for name in "ab")
        path = ps.train.Checkpoint(a=a, b=b).save("run/ckpt")
        for v in (a, b):
            v.assign(2.0)
        ps.train.Checkpoint(a=a).restore(path).assert_existing_objects_matched()
        assert (float(a), float(b)) == (1.0, 2.0)


@KINDS
def test_another_dtype_is_refused_unless_asked(kind):
    """And another shape always; nothing has changed then."""
    with opened(kind) as strategy:
        with strategy.scope():
            old = ps.Variable(np.arange(3.0), name="old")
        path = ps.train.Checkpoint(v=old).save("run/ckpt")
    with opened(kind) as strategy:
        with strategy.scope():
            small = ps.Variable(np.ones(3, "float32"), name="small")
        with pytest.raises(ps.errors.VariableMismatch, match="float64"):
            ps.train.Checkpoint(v=small).restore(path)
        assert small.numpy().tolist() == [1, 1, 1]
        ps.train.Checkpoint(v=small).restore(path, ps.train.CheckpointOptions(cast=True)).assert_consumed()
        assert small.numpy().tolist() == [0, 1, 2]
    with opened(kind) as strategy:
        with strategy.scope():
            wide = ps.Variable(np.ones(4), name="wide")
        with pytest.raises(ps.errors.VariableMismatch):
            ps.train.Checkpoint(v=wide).restore(path, ps.train.CheckpointOptions(cast=True))


@KINDS
def test_copies_on_read_are_saved_as_their_aggregate(kind):
    """A sum over the replicas of then is shared out among those of now."""
    with opened(kind) as strategy:
        with strategy.scope():
            count = ps.Variable(
                0.0,
                name="count",
                synchronization=ps.VariableSynchronization.ON_READ,
                aggregation=ps.VariableAggregation.SUM,
            )
        checkpoint = ps.train.Checkpoint(count=count)
        in_replicas(strategy, lambda replica: count.assign_add(replica + 1.0))
        total = float(count)
        path = checkpoint.save("run/ckpt")
        in_replicas(strategy, lambda replica: count.assign_add(50.0))
        checkpoint.restore(path).assert_consumed()
        assert float(count) == total


def test_there_are_things_that_cannot_be_saved():
    """A number, a function; variables of two strategies; a state that is no JSON; a name that is taken."""
    with pytest.raises(ValueError, match=r"Checkpoint\(step=...\) is given 3"):
        ps.train.Checkpoint(step=3)
    with pytest.raises(ValueError, match="this name is taken"):
        ps.train.Checkpoint(save={})
    with pytest.raises(ValueError, match="nothing to save"):
        ps.train.Checkpoint(ps.get_strategy())
    with opened("servers-1x1") as strategy:
        with strategy.scope():
            v = ps.Variable(1.0, name="v")
        sampler = Sampler(1)
        sampler.state = ["words"] * 300_000
        with pytest.raises(ValueError, match="keep in variables what is large"):
            ps.train.Checkpoint(v=v, sampler=sampler).save("run/ckpt")
    with opened("mirrored-1") as strategy, opened("mirrored-2") as other:
        with strategy.scope():
            a = ps.Variable(1.0, name="a")
        with other.scope():
            b = ps.Variable(1.0, name="b")
        with pytest.raises(ValueError, match="different strategies"):
            ps.train.Checkpoint(a=a, b=b)
        sampler = Sampler(1)
        sampler.state = {"array": np.zeros(2)}
        with pytest.raises(TypeError, match=r"state_dict\(\) of 'sampler' gives what cannot be written as JSON"):
            ps.train.Checkpoint(a=a, sampler=sampler).save("run/ckpt")
    with pytest.raises(ValueError, match="write 'wait' or 'refuse'"):
        ps.train.CheckpointOptions(if_busy="never")


@KINDS
def test_write_has_no_number(kind):
    """`write` takes the path as it is and counts nothing; `read` reads it."""
    with opened(kind) as strategy:
        with strategy.scope():
            v = ps.Variable(1.0, name="v")
        checkpoint = ps.train.Checkpoint(v=v)
        assert checkpoint.write("best") == "best"
        v.assign(2.0)
        checkpoint.read("best").assert_consumed()
        assert float(v) == 1.0
        assert int(checkpoint.save_counter) == 0


def test_restoring_nothing_says_so():
    """`restore(latest_checkpoint(directory))`, as scripts for TensorFlow have it, is right at the first start."""
    with opened("mirrored-1") as strategy:
        with strategy.scope():
            checkpoint = ps.train.Checkpoint(v=ps.Variable(1.0, name="v"))
        status = checkpoint.restore(ps.train.latest_checkpoint("run", strategy))
        assert not status.restored
        with pytest.raises(AssertionError, match="no checkpoint"):
            status.assert_consumed()
        with pytest.raises(ps.errors.NoCheckpoint):
            checkpoint.restore("run")


@pytest.mark.parametrize("kind", ["mirrored-1", "servers-1x1"])
def test_a_flipped_bit_is_found(kind):
    """By the checksum that was saved, with and without servers: nothing has changed then, the error names the file."""
    with opened(kind) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(8), name="v")
        checkpoint = ps.train.Checkpoint(v=v)
        path = checkpoint.save("run/ckpt")
        checkpoint.sync()
        v.assign(np.ones(8))
        (file,) = manifest_of(kind, path)["files"]
        root = "runs/" if kind.startswith("servers") else ""
        with open(f"{root}{path}/{file}", "r+b") as shard:
            shard.seek(-3, 2)
            shard.write(b"\x01")
        with pytest.raises(ps.errors.CheckpointError, match=file):
            checkpoint.restore(path)
        assert v.numpy().tolist() == [1.0] * 8


@pytest.mark.parametrize("kind", ["mirrored-1", "servers-1x1"])
def test_a_checkpoint_of_format_1_is_restored_by_names(kind):
    """It has no paths; the count of saves goes on, and the status tells both sides by names and paths."""
    with opened(kind) as strategy:
        with strategy.scope():
            a, b = (ps.Variable(1.0, name=name) for name in "ab")
        path = ps.train.Checkpoint(a=a, b=b).save("run/ckpt")
    root = "runs/" if kind.startswith("servers") else ""
    manifest = manifest_of(kind, path)
    for entry in manifest["tensors"].values():
        del entry["checksum"]
    for key in ("objects", "state", "files", "saved_at"):
        del manifest[key]
    with open(f"{root}{path}/manifest.json", "w") as file:
        json.dump(manifest | {"format": 1}, file)
    with opened(kind) as strategy:
        with strategy.scope():
            a, c = (ps.Variable(0.0, name=name) for name in "ac")
        checkpoint = ps.train.Checkpoint(first=a, second=c)
        status = checkpoint.restore("run").assert_nontrivial_match()
        assert (float(a), float(c), int(checkpoint.save_counter)) == (1.0, 0.0, 1)
        with pytest.raises(AssertionError, match=r"nothing tracked takes 'b'; it has nothing for 'second'"):
            status.assert_consumed()
        with strategy.scope():
            checkpoint.third = ps.Variable(0.0, name="b")
        assert float(checkpoint.third) == 1.0
