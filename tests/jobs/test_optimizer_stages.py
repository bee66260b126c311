"""Steps that have to know all gradients, of variables on several servers: two rounds, and the same as on one."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, say


def learn(kind):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.ones(n, "float32"), name=f"w{n}") for n in (2, 3, 4)]
        options = {"global_clipnorm": 1.0, "use_ema": True}
        if kind == "all":
            options["loss_scale_factor"] = ps.optimizers.DynamicLossScale(4.0, 2)
            options["gradient_accumulation_steps"] = 2
        rate = ps.optimizers.schedules.CosineDecay(0.1, 20)
        optimizer = ps.optimizers.Adam(rate, **options)
    first = strategy.extended.should_checkpoint  # One worker alone may see what is not finite.
    for step in range(6):
        grads = [np.sin(np.arange(v.size) + step + 7 * ME).astype("float32") * 4 for v in variables]
        if kind == "all" and step == 2 and first:
            grads[2][1] = np.inf
        strategy.run(lambda g: optimizer.apply_gradients(zip(g, variables, strict=True)), (grads,))
    say("weights", [v.numpy() for v in variables])
    say("averages", [optimizer.average(v).numpy() for v in variables])
    with strategy.scope():
        say("counts", [int(optimizer.iterations)] + ([int(optimizer.skipped_steps)] if kind == "all" else []))


@pytest.mark.parametrize("kind", [pytest.param("clip", marks=pytest.mark.soak), "all"])
def test_two_servers_make_the_steps_of_one(tmp_path, kind):
    """Norm and finiteness are those of all gradients: weights, averages and counts are equal to the bit."""
    found = []
    for servers in (1, 2):
        directory = tmp_path / str(servers)
        directory.mkdir()
        with ProcessCluster(learn, directory, (kind,), ps=servers, workers=2) as job:
            job.finish()
        said = [[job.said(task, what) for what in ("weights", "averages", "counts")] for task in (W0, W1)]
        assert said[0] == said[1]
        found.append(said[0])
    assert found[0] == found[1]
    assert found[0][2] == [{"clip": [6], "all": [2, 1]}[kind]]


def asynchronous(kind):
    strategy = ps.ParameterServerStrategy(consistency=ps.Async())
    with strategy.scope():
        variables = [ps.Variable(np.ones(n, "float32"), name=f"w{n}") for n in (2, 3)]
    grads = [np.full(v.size, 3.0, "float32") for v in variables]
    pairs = list(zip(grads, variables, strict=True))
    try:
        strategy.run(lambda: ps.optimizers.SGD(1.0, global_clipnorm=1.0).apply_gradients(pairs))
    except ValueError as error:
        say("refused", str(error))
    one = ps.optimizers.SGD(1.0, global_clipnorm=1.5, name="one")
    strategy.run(lambda: one.apply_gradients(pairs[:1]))
    say("weights", variables[0].numpy())


def test_asynchronous_workers_do_not_mix_their_norms(tmp_path):
    """On several servers what a norm is taken of could be another worker's by the second round: refused with a word."""
    with ProcessCluster(asynchronous, tmp_path, ("async",), ps=2, workers=1) as job:
        job.finish()
    (refused,) = job.said(W0, "refused")
    assert "asynchronous workers on several servers" in refused
    np.testing.assert_allclose(job.said(W0, "weights")[0], 1 - 1.5 / np.sqrt(2), rtol=1e-6)
