"""Steps that have to know all gradients, of variables on several servers: two rounds, and the same as on one."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.workers import in_threads


def learn(strategy, worker, everything):
    with strategy.scope():
        variables = [ps.Variable(np.ones(n, "float32"), name=f"w{n}") for n in (2, 3, 4)]
        options = {"global_clipnorm": 1.0, "use_ema": True}
        if everything:
            options["loss_scale_factor"] = ps.optimizers.DynamicLossScale(4.0, 2)
            options["gradient_accumulation_steps"] = 2
        rate = ps.optimizers.schedules.CosineDecay(0.1, 20)
        optimizer = ps.optimizers.Adam(rate, **options)
    first = strategy.extended.should_checkpoint  # One worker alone may see what is not finite.
    for step in range(6):
        grads = [np.sin(np.arange(v.size) + step + 7 * worker).astype("float32") * 4 for v in variables]
        if everything and step == 2 and first:
            grads[2][1] = np.inf
        strategy.run(lambda g: optimizer.apply_gradients(zip(g, variables, strict=True)), (grads,))
    values = [v.numpy().tolist() for v in [*variables, *(optimizer.average(v) for v in variables)]]
    return values, [int(optimizer.iterations)] + ([int(optimizer.skipped_steps)] if everything else [])


@pytest.mark.parametrize("everything", [pytest.param(False, marks=pytest.mark.soak), True], ids=["clip", "all"])
def test_two_servers_make_the_steps_of_one(everything):
    """Norm and finiteness are those of all gradients: weights, averages and counts are equal to the bit."""
    found = [in_threads(lambda *one: learn(*one, everything), servers=servers) for servers in (1, 2)]
    assert found == [[found[0][0]] * 2] * 2
    assert found[0][0][1] == ([2, 1] if everything else [6])


def test_asynchronous_workers_do_not_mix_their_norms():
    """On several servers what a norm is taken of could be another worker's by the second round: refused with a word."""

    def learn(strategy, worker):
        with strategy.scope():
            variables = [ps.Variable(np.ones(n, "float32"), name=f"w{n}") for n in (2, 3)]
        pairs = [(np.full(v.size, 3.0, "float32"), v) for v in variables]
        with pytest.raises(ValueError, match="asynchronous workers on several servers"):
            strategy.run(lambda: ps.optimizers.SGD(1.0, global_clipnorm=1.0).apply_gradients(pairs))
        one = ps.optimizers.SGD(1.0, global_clipnorm=1.5, name="one")
        strategy.run(lambda: one.apply_gradients(pairs[:1]))
        np.testing.assert_allclose(variables[0].numpy(), 1 - 1.5 / np.sqrt(2), rtol=1e-6)

    in_threads(learn, workers=1, consistency=ps.Async())
