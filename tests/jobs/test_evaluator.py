"""A task beside the training that follows its checkpoints."""

from __future__ import annotations

import numpy as np

import psclient as ps
from pstesting.processes import ProcessCluster
from pstesting.script import DIRECTORY, gate, say
from tests.kit.internals import EVALUATOR
from tests.kit.telemetry import scalars

SAVES = 3


def train_or_evaluate(saves):
    if ps.TFConfigClusterResolver().task_type == "evaluator":
        evaluate(saves)
    else:
        train(saves)


def train(saves):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(3), name="w")
        optimizer = ps.optimizers.SGD(1.0, momentum=0.5)
        checkpoint = ps.train.Checkpoint(model={"w": w}, optimizer=optimizer)
        leads = strategy.extended.should_save_summary
        make = ps.summary.create_file_writer if leads else lambda _: ps.summary.create_noop_writer()
        writer = make(str(DIRECTORY / "train"))
    for step in range(1, saves + 1):
        with strategy.scope(), writer.as_default(step):
            strategy.run(lambda: optimizer.apply_gradients([(-np.ones(3), w)]))
            ps.summary.scalar("sum", w.numpy().sum())
            checkpoint.save("run/ckpt")
        gate(f"saved-{step}")
    writer.close()


def evaluate(saves):
    strategy = ps.MirroredStrategy()
    with strategy.scope():
        w = ps.Variable(np.zeros(3), name="another_name")
        checkpoint = ps.train.Checkpoint(model={"w": w})
    writer = ps.summary.create_file_writer(str(DIRECTORY / "evaluation"))
    for path in ps.train.checkpoints_iterator(str(DIRECTORY / "checkpoints" / "run"), timeout=60):
        checkpoint.restore(path).expect_partial()
        step = int(checkpoint.save_counter)
        with writer.as_default(step):
            ps.summary.scalar("sum", w.numpy().sum())
        say("evaluated", step)
        if step == saves:
            break
    writer.close()


def test_an_evaluator_sees_each_checkpoint(tmp_path):
    """With the values of its round, by the paths of objects; it may die, and another one goes on with the newest.

    Of the workers one alone writes summaries, and what the evaluator sees is what that one saw.
    """
    gates = [f"saved-{step}" for step in range(1, SAVES + 1)]
    with ProcessCluster(
        train_or_evaluate, tmp_path, (SAVES,), (train, evaluate), gates, ps=2, workers=2, evaluator=True
    ) as job:
        job.hear(EVALUATOR, "evaluated", 1)
        job.kill(EVALUATOR)
        job.start(EVALUATOR)
        for step, name in enumerate(gates, 1):
            job.hear(EVALUATOR, "evaluated", step)
            job.open(name)
        job.finish()
    assert len(list((tmp_path / "train").iterdir())) == 1
    seen = scalars(tmp_path / "train")
    assert [step for _, step, _ in seen] == [1, 2, 3]
    assert set(scalars(tmp_path / "evaluation")) == set(seen)
