"""`ps.compat.v1.train` on every kind of strategy: formulas as plain NumPy and as TensorFlow, slots, the global step."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import psclient as ps
from psclient.compat.v1 import train
from tests.kit.strategies import by_replica, in_replicas, kind_of, merged, opened, replicas, variable

STEPS = 20
START = np.array([1.0, -2.0, 3.0])
SMALL = 2.0**-17
"""An epsilon that float32 has exactly, as it has all numbers of `CASES`: TensorFlow keeps them in float32."""


# The formulas: the new weights, from the old ones, the gradient, what was kept, and the step's number.


def gradient_descent(w, g, s, t):
    return w - 0.125 * g


def momentum(w, g, s, t):
    s["momentum"] = 0.875 * s.get("momentum", 0 * g) + g
    return w - 0.125 * s["momentum"]


def nesterov(w, g, s, t):
    s["momentum"] = 0.875 * s.get("momentum", 0 * g) + g
    return w - (0.125 * g + 0.125 * 0.875 * s["momentum"])


def adam(w, g, s, t):
    s["m"] = 0.75 * s.get("m", 0 * g) + 0.25 * g
    s["v"] = 0.9375 * s.get("v", 0 * g) + 0.0625 * g * g
    rate = 0.125 * np.sqrt(1 - 0.9375**t) / (1 - 0.75**t)
    return w - rate * s["m"] / (np.sqrt(s["v"]) + SMALL)


def adagrad(w, g, s, t):
    s["accumulator"] = s.get("accumulator", 0.25 + 0 * g) + g * g
    return w - 0.125 * g / np.sqrt(s["accumulator"])


def rmsprop(w, g, s, t, rate=0.125, centered=False):
    s["rms"] = 0.875 * s.get("rms", 1 + 0 * g) + 0.125 * g * g
    size = s["rms"]
    if centered:
        s["mg"] = 0.875 * s.get("mg", 0 * g) + 0.125 * g
        size = size - s["mg"] ** 2
    s["momentum"] = 0.5 * s.get("momentum", 0 * g) + rate * g / np.sqrt(size + SMALL)
    return w - s["momentum"]


def rmsprop_centered(w, g, s, t):
    return rmsprop(w, g, s, t, 0.015625, centered=True)


def adadelta(w, g, s, t):
    s["accum"] = 0.875 * s.get("accum", 0 * g) + 0.125 * g * g
    step = np.sqrt(s.get("accum_update", 0 * g) + 2.0**-10) / np.sqrt(s["accum"] + 2.0**-10) * g
    s["accum_update"] = 0.875 * s.get("accum_update", 0 * g) + 0.125 * step * step
    return w - step


def ftrl(w, g, s, t, power=-0.5, l1=2.0**-6, l2=2.0**-5, shrinkage=2.0**-4, beta=0.25, rate=0.125):
    old, linear = s.get("accum", 0.125 + 0 * g), s.get("linear", 0 * g)
    s["accum"] = old + g * g
    s["linear"] = linear + g + 2 * shrinkage * w - (s["accum"] ** -power - old**-power) / rate * w
    quadratic = s["accum"] ** -power / rate + 2 * (l2 + beta / (2 * rate))
    return np.where(np.abs(s["linear"]) > l1, (np.sign(s["linear"]) * l1 - s["linear"]) / quadratic, 0.0)


def ftrl_other_power(w, g, s, t):
    return ftrl(w, g, s, t, power=-0.75, shrinkage=0.0, beta=0.0)


def shrunk(w, rate, l1, l2):
    return np.sign(w) * np.maximum(np.abs(w) - rate * l1, 0) / (1 + rate * l2)


def proximal_gradient_descent(w, g, s, t, l1=0.0625):
    return shrunk(w - 0.125 * g, 0.125, l1, 0.125)


def proximal_gradient_descent_without_l1(w, g, s, t):
    return proximal_gradient_descent(w, g, s, t, 0.0)


def proximal_adagrad(w, g, s, t, l1=0.0625):
    s["accumulator"] = s.get("accumulator", 0.125 + 0 * g) + g * g
    rate = 0.125 / np.sqrt(s["accumulator"])
    return shrunk(w - rate * g, rate, l1, 0.125)


def proximal_adagrad_without_l1(w, g, s, t):
    return proximal_adagrad(w, g, s, t, 0.0)


F = {"l2_shrinkage_regularization_strength": 2.0**-4, "beta": 0.25}
CASES = {
    "gradient descent": (lambda: train.GradientDescentOptimizer(0.125), gradient_descent),
    "momentum": (lambda: train.MomentumOptimizer(0.125, 0.875), momentum),
    "nesterov": (lambda: train.MomentumOptimizer(0.125, 0.875, use_nesterov=True), nesterov),
    "adam": (lambda: train.AdamOptimizer(0.125, 0.75, 0.9375, SMALL), adam),
    "adagrad": (lambda: train.AdagradOptimizer(0.125, 0.25), adagrad),
    "rmsprop": (lambda: train.RMSPropOptimizer(0.125, 0.875, 0.5, SMALL), rmsprop),
    "rmsprop centered": (
        lambda: train.RMSPropOptimizer(0.015625, 0.875, 0.5, SMALL, centered=True),
        rmsprop_centered,
    ),
    "adadelta": (lambda: train.AdadeltaOptimizer(1.0, 0.875, 2.0**-10), adadelta),
    "ftrl": (lambda: train.FtrlOptimizer(0.125, -0.5, 0.125, 2.0**-6, 2.0**-5, **F), ftrl),
    "ftrl other power": (lambda: train.FtrlOptimizer(0.125, -0.75, 0.125, 2.0**-6, 2.0**-5), ftrl_other_power),
    "proximal gradient descent": (
        lambda: train.ProximalGradientDescentOptimizer(0.125, 0.0625, 0.125),
        proximal_gradient_descent,
    ),
    "proximal gradient descent without l1": (
        lambda: train.ProximalGradientDescentOptimizer(0.125, 0.0, 0.125),
        proximal_gradient_descent_without_l1,
    ),
    "proximal adagrad": (lambda: train.ProximalAdagradOptimizer(0.125, 0.125, 0.0625, 0.125), proximal_adagrad),
    "proximal adagrad without l1": (
        lambda: train.ProximalAdagradOptimizer(0.125, 0.125, 0.0, 0.125),
        proximal_adagrad_without_l1,
    ),
}
SLOTS = {
    "momentum": ["momentum"],
    "nesterov": ["momentum"],
    "adam": ["m", "v"],
    "adagrad": ["accumulator"],
    "rmsprop": ["momentum", "rms"],
    "rmsprop centered": ["mg", "momentum", "rms"],
    "adadelta": ["accum", "accum_update"],
    "ftrl": ["accum", "linear"],
    "ftrl other power": ["accum", "linear"],
    "proximal adagrad": ["accumulator"],
    "proximal adagrad without l1": ["accumulator"],
}
"""What TensorFlow's `get_slot_names` gives; the others have none."""


def gradient(t):
    """Of one step: away from zero, so that signs and quotients are sure."""
    return np.sin(np.arange(3.0) * 2 + t) * (1 + np.arange(3.0))


def trained(strategy, optimizer, w, steps=STEPS):
    """The weights after some steps of which the replicas' gradients add up to `gradient`."""
    for t in range(1, steps + 1):
        share = (gradient(t) / replicas(strategy)).astype(w.dtype)
        in_replicas(strategy, lambda _, g=share: optimizer.apply_gradients([(g, w)]))
    return w.numpy()


def plain(rule, kept, steps=STEPS):
    """The same in plain NumPy; `kept` has the slots in the end."""
    w = START
    for t in range(1, steps + 1):
        w = rule(w, gradient(t), kept, t)
    return w


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_its_formula(strategy, name):
    """Weights and slots, after 20 steps; a slot lives where its variable does."""
    make, rule = CASES[name]
    w, kept = variable(strategy, START), dict[str, np.ndarray]()
    with strategy.scope():
        optimizer = make()
    np.testing.assert_allclose(trained(strategy, optimizer, w), plain(rule, kept), rtol=1e-12, atol=1e-13)
    assert optimizer.get_slot_names() == sorted(kept) == SLOTS.get(name, [])
    for slot, expected in kept.items():
        found = optimizer.get_slot(w, slot)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-13)
        assert found.devices == w.devices


# What TensorFlow 2.21.0 makes of the same gradients in float64: sessions of `tf.compat.v1`, resource variables, CPU.
# Its two proximal optimizers take float32 alone, so these are of their operations, `tf.raw_ops.ResourceApply...`.

TENSORFLOW = {
    "gradient descent": [0.8752222644475272, -2.018814450507964, 3.3978219288382046],
    "momentum": [0.24912776406162662, -0.7054278104728963, 3.6364203437542826],
    "nesterov": [0.21820905800145066, -0.8860637846717481, 3.954689729623201],
    "adam": [0.6928048031478432, -1.887053360145007, 3.1647359864256916],
    "adagrad": [0.8727648375091979, -1.945897442283537, 3.085298322046715],
    "rmsprop": [0.8627444052299138, -1.8263958070993054, 3.248257964678814],
    "rmsprop centered": [0.9813834439567195, -1.9732326151392863, 3.033746225771522],
    "adadelta": [0.8964078397834803, -2.07592345023392, 3.1158573082561527],
    "ftrl": [0.31584440809082104, -0.17116412280826726, 2.372323138711469],
    "ftrl other power": [0.6080128050724705, -0.602668967757831, 2.9157305594611804],
    "proximal gradient descent": [0.5053683108158005, -1.4039776165381141, 2.4390116631384458],
    "proximal gradient descent without l1": [0.6386755374387814, -1.5372848431610948, 2.5723188897614264],
    "proximal adagrad": [0.6701853225072852, -1.700317415697823, 2.9011610158639636],
    "proximal adagrad without l1": [0.7412398296705813, -1.752772278631388, 2.927063603446921],
}
OF_DEFAULTS = {
    "adam": (lambda: train.AdamOptimizer(), [0.9963875240377601, -1.9981488773012126, 3.0017496825994465]),
    "adagrad": (
        lambda: train.AdagradOptimizer(0.125),
        [0.8615148675955412, -1.9635579675345822, 3.0861419924992926],
    ),
    "rmsprop": (
        lambda: train.RMSPropOptimizer(0.125),
        [0.8716364077602154, -1.9647220955043905, 3.2349088032352227],
    ),
    "adadelta": (
        lambda: train.AdadeltaOptimizer(),
        [0.9999994746878438, -2.000000379941504, 3.0000005414159703],
    ),
    "ftrl": (lambda: train.FtrlOptimizer(0.125), [0.5097320770982686, -0.4714337095103752, 2.7583430575583385]),
    "proximal gradient descent": (
        lambda: train.ProximalGradientDescentOptimizer(0.125),
        [0.8752222644475272, -2.018814450507964, 3.3978219288382046],
    ),
    "proximal adagrad": (
        lambda: train.ProximalAdagradOptimizer(0.125),
        [0.8615148677219768, -1.963557967232145, 3.086141992490774],
    ),
}


@pytest.mark.parametrize("kind", ["default", "embedded-2"])
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_tensorflows(shared, kind, name):
    """An implementation that nobody here has written."""
    strategy = shared(kind)
    found = trained(strategy, CASES[name][0](), variable(strategy, START))
    # TensorFlow multiplies the powers of Adam's betas in float32.
    np.testing.assert_allclose(found, TENSORFLOW[name], rtol=1e-9 if name == "adam" else 1e-11)


@pytest.mark.parametrize("name", OF_DEFAULTS)
def test_defaults_make_tensorflows_steps(shared, name):
    """Which are rounded to float32 there: the way that was gone agrees to about five digits."""
    strategy, (make, expected) = shared("default"), OF_DEFAULTS[name]
    found = trained(strategy, make(), variable(strategy, START))
    np.testing.assert_allclose(found - START, np.array(expected) - START, rtol=1e-5)


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
    rule = OF_DEFAULTS["rmsprop"][0]()
    wide = trained(strategy, rule, variable(strategy, START), steps=3)
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


@pytest.mark.parametrize("kind", ["mirrored-2", "embedded-2", "servers-2x2"])
def test_a_checkpoint_goes_on(kind, tmp_path):
    """With the slots and the count: the restored optimizer makes the steps that the saved one would make."""
    with opened(kind) as strategy:
        w, optimizer = variable(strategy, START), train.AdamOptimizer(0.125, 0.75, 0.9375, SMALL)
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
