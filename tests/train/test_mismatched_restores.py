"""What of a checkpoint and of a program does not find its place is told: once, with names, when the step is over."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, say
from tests.kit.shell import shell
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

KINDS = pytest.mark.parametrize("kind", ["default", "mirrored-2", "servers-2x2"])
DIFFER = "and this program differ"


def save(kind, optimizer, **variables):
    """A checkpoint of variables after one step."""
    with opened(kind) as strategy:
        with strategy.scope():
            made = {name: ps.Variable(value, name=name) for name, value in variables.items()}
            made_optimizer = optimizer()
        checkpoint = ps.train.Checkpoint(opt=made_optimizer, **made)
        strategy.run(lambda: made_optimizer.apply_gradients([(np.ones_like(v.numpy()), v) for v in made.values()]))
        return checkpoint.save("run/ckpt")


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@KINDS
@pytest.mark.parametrize("inside", [True, False], ids=["in replicas", "across replicas"])
def test_slots_that_come_with_the_first_step_are_found(kind, inside, caplog):
    """Where everything fits nothing is said, though the optimizer makes its slots only when it has gradients."""
    path = save(kind, lambda: ps.optimizers.Adam(0.1), w=np.ones(3))
    with opened(kind) as strategy:
        with strategy.scope():
            w, optimizer = ps.Variable(np.zeros(3), name="w"), ps.optimizers.Adam(0.1)
        status = ps.train.Checkpoint(opt=optimizer, w=w).restore(path)
        assert "opt/m/w" in repr(status)
        for _ in range(2):
            if inside:
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))
            else:
                gradient = strategy.run(lambda: np.ones(3))
                optimizer.apply_gradients([(gradient, w)])
        assert repr(status) == (
            f"<LoadStatus of {path!r}: 4 matched; in the checkpoint and not used: nothing; in the program and not in "
            "the checkpoint: nothing>"
        )
    assert warnings(caplog) == []


@KINDS
def test_both_sides_are_told_once(kind, caplog):
    """When the first step is over, with what the checkpoint has and nobody takes, and what it does not have: another
    optimizer's slots."""
    path = save(kind, lambda: ps.optimizers.SGD(0.1, momentum=0.9), w=np.ones(3), old=np.ones(2))
    with opened(kind) as strategy:
        with strategy.scope():
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


@KINDS
def test_what_is_taken_untracked_is_used(kind, caplog):
    """An optimizer that nobody tracks begins with the slots of the checkpoint all the same."""
    path = save(kind, lambda: ps.optimizers.Adam(0.1), w=np.ones(3))
    with opened(kind) as strategy:
        with strategy.scope():
            w, optimizer = ps.Variable(np.zeros(3), name="w"), ps.optimizers.Adam(0.1)
        ps.train.Checkpoint(w=w).restore(path)
        for _ in range(2):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))
        assert int(optimizer.iterations) == 3
    assert warnings(caplog) == []


@pytest.mark.parametrize("kind", ["mirrored-1", "servers-1x1"])
def test_a_script_of_one_step_is_told_at_its_end(kind, caplog):
    """Or of none: when its strategy is closed."""
    path = save(kind, lambda: ps.optimizers.SGD(0.1), w=np.ones(3), old=np.ones(2))
    with opened(kind) as strategy:
        with strategy.scope():
            w = ps.Variable(np.zeros(3), name="w")
        ps.train.Checkpoint(w=w).restore(path)
        assert warnings(caplog) == []
    assert sum(DIFFER in said for said in warnings(caplog)) == 1


def test_a_strategy_that_nobody_closes_is_told_at_the_end_of_the_process():
    """Under python, whatever the strategy."""
    save("mirrored-1", lambda: ps.optimizers.SGD(0.1), w=np.ones(3), old=np.ones(2))
    Path("job.py").write_text(
        "import numpy as np\nimport psclient as ps\nstrategy = ps.MirroredStrategy(['cpu:0'])\n"
        "with strategy.scope():\n    w = ps.Variable(np.zeros(3), name='w')\n"
        "ps.train.Checkpoint(w=w).restore('run')\n"
    )
    done = shell(["python", "job.py"], Path.cwd())
    assert (done.code, done.err.count(DIFFER)) == (0, 1)


@KINDS
def test_what_is_expected_is_not_told(kind, caplog):
    """`expect_partial`, as of an evaluator that wants no optimizer."""
    path = save(kind, lambda: ps.optimizers.Adam(0.1), w=np.ones(3))
    with opened(kind) as strategy:
        with strategy.scope():
            w = ps.Variable(np.zeros(3), name="w")
        ps.train.Checkpoint(w=w).restore(path).expect_partial()
        for _ in range(3):
            strategy.run(lambda: None)
    assert warnings(caplog) == []


@KINDS
def test_nothing_at_all_is_told_at_once(kind, caplog):
    """A checkpoint of another program: before a step is made with values that nobody restored; and only once."""
    path = save(kind, lambda: ps.optimizers.SGD(0.1), w=np.ones(3))
    with opened(kind) as strategy:
        with strategy.scope():
            many = [ps.Variable(0.0, name=f"v{number}") for number in range(12)]
        status = ps.train.Checkpoint(many=many).restore(path)
        (said,) = warnings(caplog)
        for _ in range(3):
            strategy.run(lambda: None)
        with pytest.raises(AssertionError, match="nothing of the checkpoint"):
            status.assert_nontrivial_match()
    assert "12 ('many/0', 'many/1', 'many/10', 'many/11', 'many/2'" in said
    assert "'many/7', ...)" in said
    assert "'many/8'" not in said
    assert "of another program?" in said
    assert warnings(caplog) == [said]


def test_statuses_without_a_checkpoint_say_so():
    """`repr` of what `restore(None)` gives."""
    with opened("mirrored-1") as strategy, strategy.scope():
        status = ps.train.Checkpoint(v=ps.Variable(1.0, name="v")).restore(None)
    assert "nothing was restored" in repr(status)


def takes():
    """Restores `a`, and makes two steps."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        a = ps.Variable(np.zeros(3), name="a")
    ps.train.CheckpointManager(ps.train.Checkpoint(a=a), "run", 3).restore_or_initialize()
    for _ in range(2):
        strategy.run(lambda: a.read_value())
        a.assign_add(np.ones(3))
    say("made", [ME, a.numpy()])


def test_one_process_says_it(tmp_path):
    """Of all that restore together; also where a manager does it."""
    with (
        InProcessCluster(checkpoint_root=tmp_path / "checkpoints") as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy,
        strategy.scope(),
    ):
        a, b = (ps.Variable(np.zeros(3), name=name) for name in "ab")
        ps.train.Checkpoint(a=a, b=b).save("run/ckpt")
    with ProcessCluster(takes, tmp_path, workers=2) as job:
        job.finish()
    assert [job.errors(task).count(DIFFER) for task in (W0, W1)] == [1, 0]
