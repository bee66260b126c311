"""`ps.compat.v1.train` on every kind of strategy: arguments, slots, the global step."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import psclient as ps
from psclient.compat.v1 import train
from tests.kit.references import START, trained
from tests.kit.strategies import by_replica, in_replicas, kind_of, merged, opened, replicas, variable

SIGNATURES = {
    "GradientDescent": "learning_rate, use_locking=False, name='GradientDescent'",
    "Momentum": "learning_rate, momentum, use_locking=False, name='Momentum', use_nesterov=False",
    "Adam": "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, use_locking=False, name='Adam'",
    "Adagrad": "learning_rate, initial_accumulator_value=0.1, use_locking=False, name='Adagrad'",
    "RMSProp": "learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10, use_locking=False, centered=False, "
    "name='RMSProp'",
    "Adadelta": "learning_rate=0.001, rho=0.95, epsilon=1e-08, use_locking=False, name='Adadelta'",
    "Ftrl": "learning_rate, learning_rate_power=-0.5, initial_accumulator_value=0.1, l1_regularization_strength=0.0, "
    "l2_regularization_strength=0.0, use_locking=False, name='Ftrl', accum_name=None, linear_name=None, "
    "l2_shrinkage_regularization_strength=0.0, beta=None",
    "ProximalGradientDescent": "learning_rate, l1_regularization_strength=0.0, l2_regularization_strength=0.0, "
    "use_locking=False, name='ProximalGradientDescent'",
    "ProximalAdagrad": "learning_rate, initial_accumulator_value=0.1, l1_regularization_strength=0.0, "
    "l2_regularization_strength=0.0, use_locking=False, name='ProximalAdagrad'",
}
"""As TensorFlow 2.21.0 has them, but for the last argument of Adam's, which is of the graph."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_names_and_defaults_of_tensorflow(name):
    """In their order; a name that is given is the optimizer's, and locking is taken."""
    kind = getattr(train, f"{name}Optimizer")
    parameters = [str(p).split(":")[0] if p.default is p.empty else f"{p.name}={p.default!r}" for p in signature(kind)]
    assert ", ".join(parameters) == SIGNATURES[name]
    rest = {"momentum": 0.5} if name == "Momentum" else {}
    assert kind(learning_rate=0.1, **rest).get_name() == name
    assert kind(learning_rate=0.1, use_locking=True, name="mine", **rest).get_name() == "mine"


def signature(kind):
    """The parameters of a class."""
    return inspect.signature(kind).parameters.values()


def test_apply_gradients_has_the_arguments_of_tensorflow():
    """In their order."""
    parameters = inspect.signature(train.Optimizer.apply_gradients).parameters
    assert list(parameters) == ["self", "grads_and_vars", "global_step", "name"]


# ---- Slots ----


def test_slots_are_there_from_the_first_step_on(strategy):
    """Before it there is none; of another variable, or by another name, there is none after it either."""
    w, other, optimizer = variable(strategy), variable(strategy), train.AdamOptimizer()
    assert (optimizer.get_slot(w, "m"), optimizer.get_slot_names(), optimizer.variables()) == (None, [], [])
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "float32"), w)]))
    assert (optimizer.get_slot(other, "m"), optimizer.get_slot(w, "momentum")) == (None, None)
    m, v = optimizer.get_slot(w, "m"), optimizer.get_slot(w, "v")
    assert [x.shape for x in (m, v)] == [(3,), (3,)]
    assert not any(slot.trainable for slot in (m, v))
    kept = optimizer.variables()
    assert {id(m), id(v)} < set(map(id, kept))
    assert [int(x) for x in kept if not x.shape] == [1]
    inside = in_replicas(strategy, lambda _, own: optimizer.get_slot(own, "m") is m, w)
    assert inside == (True,) * replicas(strategy)


def test_slots_of_half_precision_are_single(strategy):
    """The variable stays what it is."""
    w, optimizer = variable(strategy, START.astype("float16")), train.RMSPropOptimizer(0.125)
    trained(strategy, optimizer, w, steps=3)
    assert (w.dtype, optimizer.get_slot(w, "rms").dtype) == (np.float16, np.float32)
    wide = trained(strategy, train.RMSPropOptimizer(0.125), variable(strategy, START), steps=3)
    np.testing.assert_allclose(w.numpy().astype(float), wide, rtol=4e-3)


def test_momentum_holds_gradients_and_not_steps(strategy):
    """So a new learning rate holds for the gradients of before, too: where Keras's formula has another result."""
    rates = iter([1.0, 0.5, 0.5])
    rate = [next(rates)]
    w, optimizer = variable(strategy), train.MomentumOptimizer(lambda: rate[0], 0.5)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "float32"), w)]))
        rate[0] = next(rates)
    n = replicas(strategy)
    assert w.numpy().tolist() == [-(1.0 * n + 0.5 * 1.5 * n)] * 3


def test_a_schedule_goes_by_the_steps(strategy):
    """As in `ps.optimizers`."""
    w = variable(strategy)
    optimizer = train.GradientDescentOptimizer(ps.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.25]))
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "float32"), w)]))
    assert w.numpy().tolist() == [-1.5 * replicas(strategy)] * 3


@pytest.mark.parametrize("kind", ["mirrored-2", "servers-2x2", pytest.param("embedded-2", marks=pytest.mark.soak)])
def test_a_checkpoint_goes_on(kind, tmp_path):
    """With the slots and the count: the restored optimizer makes the steps that the saved one would make."""
    with opened(kind) as strategy:
        w, optimizer = variable(strategy, START), train.AdamOptimizer(0.125, 0.75, 0.9375)
        checkpoint = ps.train.Checkpoint(w=w, optimizer=optimizer)
        trained(strategy, optimizer, w, steps=3)
        saved = checkpoint.write(str(tmp_path / "at3")) if kind == "mirrored-2" else checkpoint.write("v1-at3")
        after = trained(strategy, optimizer, w, steps=2)
        checkpoint.restore(saved).assert_existing_objects_matched()
        np.testing.assert_array_equal(trained(strategy, optimizer, w, steps=2), after)
        for slot in ("m", "v"):
            assert optimizer.get_slot(w, slot).numpy().any()


# ---- The global step ----


def test_the_global_step_counts_once(strategy):
    """In every context, whatever the number of replicas; together with the step, in one round."""
    w, step = variable(strategy), variable(strategy, np.int64(4), trainable=False)
    optimizer = train.GradientDescentOptimizer(0.5)
    one = np.ones(3, "float32")
    in_replicas(strategy, lambda _: optimizer.apply_gradients([(one, w)], step))
    before = getattr(strategy, "round", 0)
    in_replicas(strategy, lambda _, v, s: optimizer.apply_gradients([(one, v)], global_step=s, name="train"), w, step)
    assert getattr(strategy, "round", 0) == before + (kind_of(strategy) == "embedded")
    gradients = by_replica(strategy, lambda replica: np.full(3, replica, "float32"))
    optimizer.apply_gradients([(gradients, w)], step)
    with strategy.scope():
        optimizer.apply_gradients([(gradients, w)], step)
    merged(strategy, lambda s, g: optimizer.apply_gradients([(g, w)], step), gradients)
    n = replicas(strategy)
    assert int(step) == 4 + 5
    assert w.numpy().tolist() == [-0.5 * (2 * n + 3 * n * (n - 1) / 2)] * 3


def test_a_step_that_fails_is_not_counted(strategy):
    """Nor does a step that is no variable of one integer train anything."""
    w, step = variable(strategy), variable(strategy, np.int64(0), trainable=False)
    optimizer = train.GradientDescentOptimizer(0.5)
    with pytest.raises(ValueError, match=r"has shape \(2,\)"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2, "float32"), w)], step))
    wrong = {
        "float32": variable(strategy, np.float32(0)),
        r"shape \(2,\)": variable(strategy, np.zeros(2, "int64"), trainable=False),
    }
    for says, found in wrong.items():
        with pytest.raises(ValueError, match=f"global_step .*{says}.*give a variable of one integer"):
            strategy.run(lambda found=found: optimizer.apply_gradients([(np.ones(3, "float32"), w)], found))
    with pytest.raises(TypeError, match="global_step is a int; give an integer variable, or None"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "float32"), w)], 0))
    assert (int(step), w.numpy().tolist()) == (0, [0.0] * 3)


def test_a_global_step_is_of_the_same_strategy():
    """The error names the variable."""
    with opened("mirrored-2") as one, opened("mirrored-1") as other:
        w, step = variable(one), variable(other, np.int64(0), trainable=False)
        with pytest.raises(ValueError, match="strategy"):
            one.run(lambda: train.GradientDescentOptimizer(0.5).apply_gradients([(np.ones(3, "float32"), w)], step))
        assert (int(step), w.numpy().tolist()) == (0, [0.0] * 3)


# ---- Mistakes ----


def test_pairs_without_a_gradient_are_left_out(strategy):
    """Unless there is no other: then the error names the variables."""
    w, idle, step = variable(strategy), variable(strategy), variable(strategy, np.int64(0), trainable=False)
    optimizer = train.GradientDescentOptimizer(0.5)
    for given in (None, step):
        strategy.run(lambda given=given: optimizer.apply_gradients([(None, idle), (np.ones(3, "float32"), w)], given))
    assert w.numpy().tolist() == [-1.0 * replicas(strategy)] * 3
    assert idle.numpy().tolist() == [0.0] * 3
    for pairs in ([(None, idle)], []):
        with pytest.raises(ValueError, match=f"no gradients are given for any variable.*{idle.name if pairs else ''}"):
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    with pytest.raises(TypeError, match="give \\(gradient, variable\\) pairs"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), np.ones(3))], step))


@pytest.mark.parametrize("method", ["minimize", "compute_gradients"])
def test_there_is_no_differentiation(method):
    """What would need it says so, and what to do."""
    optimizer = train.GradientDescentOptimizer(0.5)
    with pytest.raises(NotImplementedError, match=f"{method} differentiates a loss.*give them to apply_gradients"):
        getattr(optimizer, method)(lambda: 0.0, var_list=[])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: train.MomentumOptimizer(0.1, 2), "momentum is 2, and must be between 0 and 1"),
        (lambda: train.AdamOptimizer(beta2=1.0), "beta_2 is 1.0"),
        (lambda: train.AdagradOptimizer(0.1, 0.0), "initial_accumulator_value is 0.0, and must be more than 0"),
        (lambda: train.RMSPropOptimizer(0.1, decay=-1), "decay is -1"),
        (lambda: train.RMSPropOptimizer(0.1, epsilon=np.nan), "epsilon is nan, and must be finite"),
        (lambda: train.AdadeltaOptimizer(rho=1.5), "rho is 1.5"),
        (lambda: train.FtrlOptimizer(0.1, 0.5), "learning_rate_power is 0.5, and must be at most 0"),
        (lambda: train.FtrlOptimizer(0.1, beta=-1), "beta is -1"),
        (lambda: train.ProximalGradientDescentOptimizer(0.1, -1), "l1_regularization_strength is -1"),
        (lambda: train.ProximalAdagradOptimizer(0.1, -0.1), "initial_accumulator_value is -0.1"),
        (lambda: train.ProximalAdagradOptimizer(0.1, 0.1, 0, -1), "l2_regularization_strength is -1"),
        (lambda: train.GradientDescentOptimizer(np.inf), "learning_rate is inf"),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    """At once, by name and value."""
    with pytest.raises(ValueError, match=text):
        make()
