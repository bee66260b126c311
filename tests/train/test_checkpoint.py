"""`ps.train.Checkpoint`: what it tracks, by which paths, and what it says of what does not find its place."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from tests.kit.shell import shell
from tests.kit.strategies import opened, refused, root_of

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


PATHS = {*(f"model/layers/{index}/{name}" for index in (0, 1) for name in "wb"), "model/tables/users.Sall"}


@KINDS
def test_everything_comes_back_by_its_path(kind):
    """Lists, dicts, attributes, optimizers with slots, metrics and other state, wherever they are reached from."""
    with opened(kind) as strategy, strategy.scope():
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
    manifest = json.loads((root_of(kind) / path / "manifest.json").read_text())
    slots = {f"opt/{slot}/model/layers/0/w" for slot in ("m", "v")}
    metrics = {"metrics/0/total", "metrics/0/count"}
    assert set(manifest["objects"]) == {*PATHS, *slots, *metrics, "opt/iterations", "save_counter"}
    assert manifest["state"] == {"sampler": Sampler(7).state}


@KINDS
def test_what_is_created_later_begins_with_its_value(kind):
    """By its name, slots at the first step included; the status knows then, and not before."""

    def train(strategy, model, optimizer):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones((2, 2), "float32"), model.layers[0].w)]))

    with opened(kind) as strategy, strategy.scope():
        model, optimizer = Model(1.0), ps.optimizers.Adam(0.1)
        train(strategy, model, optimizer)
        checkpoint = ps.train.Checkpoint(model=model, opt=optimizer)
        path = checkpoint.save("run/ckpt")
        saved = model.values()
        train(strategy, model, optimizer)
        trained = model.values()
    with opened(kind) as strategy, strategy.scope():
        holder, optimizer = {}, ps.optimizers.Adam(0.1)
        checkpoint = ps.train.Checkpoint(holder, opt=optimizer)
        status = checkpoint.restore(path).assert_existing_objects_matched()
        with pytest.raises(AssertionError, match=r"not used by the program: 'model/layers/0/b', .*opt/iterations"):
            status.assert_consumed()
        refused(AssertionError, "nothing was restored from the checkpoint", status.assert_nontrivial_match)
        holder["model"] = model = Model(0.0)
        assert model.values() == saved
        status.assert_nontrivial_match()
        train(strategy, model, optimizer)
        assert int(optimizer.iterations) == 2
        assert model.values() == trained
        status.assert_consumed()


@KINDS
def test_another_dtype_is_refused_unless_asked(kind):
    """And another shape always; nothing has changed then."""

    def made(strategy, value, name):
        with strategy.scope():
            v = ps.Variable(value, name=name)
        return v, ps.train.Checkpoint(v=v)

    cast = ps.train.CheckpointOptions(cast=True)
    with opened(kind) as strategy:
        path = made(strategy, np.arange(3.0), "old")[1].save("run/ckpt")
    with opened(kind) as strategy:
        small, checkpoint = made(strategy, np.ones(3, "float32"), "small")
        refused(ps.errors.VariableMismatch, "float64", lambda: checkpoint.restore(path))
        assert small.numpy().tolist() == [1, 1, 1]
        checkpoint.restore(path, cast).assert_consumed()
        assert small.numpy().tolist() == [0, 1, 2]
    with opened(kind) as strategy:
        wide, checkpoint = made(strategy, np.ones(4), "wide")
        refused(ps.errors.VariableMismatch, "", lambda: checkpoint.restore(path, cast))
        assert wide.numpy().tolist() == [1, 1, 1, 1]


def test_there_are_things_that_cannot_be_saved():
    """A number, a function; variables of two strategies; a state that is no JSON; a name that is taken."""
    for make, told in (
        (lambda: ps.train.Checkpoint(step=3), r"Checkpoint\(step=\.\.\.\) got 3"),
        (lambda: ps.train.Checkpoint(save={}), "this name is reserved"),
        (lambda: ps.train.Checkpoint(ps.get_strategy()), "nothing to save"),
        (lambda: ps.train.CheckpointOptions(if_busy="never"), "use 'wait' or 'refuse'"),
    ):
        with pytest.raises(ValueError, match=told):
            make()
    sampler = Sampler(1)
    with opened("servers-1x1") as strategy, strategy.scope():
        v = ps.Variable(1.0, name="v")
        sampler.state = ["words"] * 300_000
        with pytest.raises(ValueError, match="keep large data in variables"):
            ps.train.Checkpoint(v=v, sampler=sampler).save("run/ckpt")
    with opened("mirrored-1") as strategy, opened("mirrored-2") as other:
        with strategy.scope():
            a = ps.Variable(1.0, name="a")
        with other.scope():
            b = ps.Variable(1.0, name="b")
        refused(ValueError, "different strategies", lambda: ps.train.Checkpoint(a=a, b=b))
        sampler.state = {"step": [object()]}
        said = r"'sampler' cannot be saved: at \['step'\]\[0\]: an instance of object cannot be restored"
        refused(TypeError, said, lambda: ps.train.Checkpoint(a=a, sampler=sampler).save("run/ckpt"))


# ---- What does not find its place ----


@KINDS
def test_the_status_lists_both_sides(kind):
    """What the checkpoint has and nobody takes, and what is tracked and it does not have. What is not tracked stays.

    `write` takes a path as it is and counts nothing; `read` reads it.
    """
    with opened(kind) as strategy, strategy.scope():
        a, b, c = (ps.Variable(float(index), name=name) for index, name in enumerate("abc"))
        checkpoint = ps.train.Checkpoint(a=a, b=b, s=Sampler(1))
        path = checkpoint.save("run/ckpt")
        for v in (a, b, c):
            v.assign(9.0)
        status = ps.train.Checkpoint(a=a, c=c, t=Sampler(2)).restore(path)
        words = r"not used by the program: 'b', 's'; not in the checkpoint: 'c', 't'"
        refused(AssertionError, words, status.assert_consumed)
        with pytest.raises(AssertionError, match=r"does not contain 'c', 't'; not used by the program: 'b', 's'"):
            status.assert_existing_objects_matched()
        assert status.expect_partial() is status.assert_nontrivial_match() is status
        assert (float(a), float(b), float(c)) == (0.0, 9.0, 9.0)
        b.assign(5.0)
        ps.train.Checkpoint(a=a).restore(path).expect_partial().assert_existing_objects_matched()
        assert float(b) == 5.0
        assert checkpoint.write("best") == "best"
        b.assign(6.0)
        checkpoint.read("best").assert_consumed()
        assert float(b) == 5.0
        assert int(checkpoint.save_counter) == 1


def test_restoring_nothing_says_so():
    """`restore(latest_checkpoint(directory))`, as scripts for TensorFlow have it, is right at the first start."""
    with opened("mirrored-1") as strategy, strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(1.0, name="v"))
        status = checkpoint.restore(ps.train.latest_checkpoint("run", strategy))
        assert not status.restored
        assert "nothing was restored" in repr(status)
        refused(AssertionError, "no checkpoint", status.assert_consumed)
        refused(FileNotFoundError, "", lambda: checkpoint.restore("run"))


DIFFER = "and this program differ"


def save(kind, optimizer, **variables):
    """A checkpoint of variables after one step."""
    with opened(kind) as strategy, strategy.scope():
        made = {name: ps.Variable(value, name=name) for name, value in variables.items()}
        made_optimizer = optimizer()
        checkpoint = ps.train.Checkpoint(opt=made_optimizer, **made)
        strategy.run(lambda: made_optimizer.apply_gradients([(np.ones_like(v.numpy()), v) for v in made.values()]))
        return checkpoint.save("run/ckpt")


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@KINDS
@pytest.mark.parametrize("how", ["in replicas", "across replicas", "untracked", "expected"])
def test_where_everything_fits_nothing_is_said(kind, how, caplog):
    """Though the optimizer makes its slots only when it has gradients, and begins with them where nobody tracks it.

    Nor is what is expected: `expect_partial`, as of an evaluator that wants no optimizer.
    """
    path = save(kind, lambda: ps.optimizers.Adam(0.1), w=np.ones(3))
    with opened(kind) as strategy, strategy.scope():
        w, optimizer = ps.Variable(np.zeros(3), name="w"), ps.optimizers.Adam(0.1)
        tracked = {"w": w, "opt": optimizer} if how.endswith("replicas") else {"w": w}
        status = ps.train.Checkpoint(**tracked).restore(path)
        assert ("opt/m/w" in repr(status)) or how == "untracked"
        if how == "expected":
            status.expect_partial()
            for _ in range(3):
                strategy.run(lambda: None)
        else:
            for _ in range(2):
                if how == "across replicas":
                    optimizer.apply_gradients([(strategy.run(lambda: np.ones(3)), w)])
                else:
                    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))
            assert int(optimizer.iterations) == 3
        if "opt" in tracked:
            assert repr(status) == (
                f"<LoadStatus of {path!r}: 4 matched; in the checkpoint and not used: nothing; in the program and not "
                "in the checkpoint: nothing>"
            )
    assert warnings(caplog) == []


@KINDS
def test_both_sides_are_told_once(kind, caplog):
    """When the first step is over, with what the checkpoint has and nobody takes, and what it does not have: another
    optimizer's slots."""
    path = save(kind, lambda: ps.optimizers.SGD(0.1, momentum=0.9), w=np.ones(3), old=np.ones(2))
    with opened(kind) as strategy, strategy.scope():
        w, new = (ps.Variable(np.zeros(3), name=name) for name in ("w", "new"))
        optimizer = ps.optimizers.Adam(0.1)
        status = ps.train.Checkpoint(opt=optimizer, w=w, new=new).restore(path)

        def step():
            optimizer.apply_gradients([(np.ones(3), w)])

        strategy.run(step)
        assert warnings(caplog) == []
        strategy.run(step)
        (said,) = warnings(caplog)
        strategy.run(step)
        assert "4 ('new', 'opt/iterations', 'opt/m/w', 'opt/v/w')" in repr(status)
    assert f"{path!r} {DIFFER}" in said
    assert "in the checkpoint and not used: 4 ('old', 'opt/iterations', 'opt/momentum/old', 'opt/momentum/w')" in said
    assert "in the program and not in the checkpoint: 4 ('new', 'opt/iterations', 'opt/m/w', 'opt/v/w')" in said
    assert warnings(caplog) == [said]


@pytest.mark.parametrize("kind", ["mirrored-1", "servers-1x1"])
def test_a_script_of_one_step_is_told_at_its_end(kind, caplog):
    """Or of none: when its strategy is closed. One that nobody closes is told at the end of the process."""
    path = save(kind, lambda: ps.optimizers.SGD(0.1), w=np.ones(3), old=np.ones(2))
    with opened(kind) as strategy, strategy.scope():
        w = ps.Variable(np.zeros(3), name="w")
        ps.train.Checkpoint(w=w).restore(path)
        assert warnings(caplog) == []
    assert sum(DIFFER in said for said in warnings(caplog)) == 1
    if kind == "mirrored-1":
        Path("job.py").write_text(
            "import numpy as np\nimport psclient as ps\nstrategy = ps.MirroredStrategy(['cpu:0'])\n"
            "with strategy.scope():\n    w = ps.Variable(np.zeros(3), name='w')\n"
            "ps.train.Checkpoint(w=w).restore('run')\n"
        )
        done = shell(["python", "job.py"], Path.cwd())
        assert (done.code, done.err.count(DIFFER)) == (0, 1)


@KINDS
def test_nothing_at_all_is_told_at_once(kind, caplog):
    """A checkpoint of another program: before a step is made with values that nobody restored; and only once."""
    path = save(kind, lambda: ps.optimizers.Adagrad(0.1), of_another_program=np.ones(3))
    with opened(kind) as strategy, strategy.scope():
        many = [ps.Variable(0.0, name=f"v{number}") for number in range(12)]
        status = ps.train.Checkpoint(many=many).restore(path)
        (said,) = warnings(caplog)
        for _ in range(3):
            strategy.run(lambda: None)
        refused(AssertionError, "nothing was restored from the checkpoint", status.assert_nontrivial_match)
    assert "12 ('many/0', 'many/1', 'many/10', 'many/11', 'many/2'" in said
    assert "'many/7', ...)" in said
    assert "'many/8'" not in said
    assert "is from another program" in said
    assert warnings(caplog) == [said]
