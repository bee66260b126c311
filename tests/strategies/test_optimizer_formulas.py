"""Each optimizer, over 20 steps, on every kind of strategy: as its plain NumPy formula, as Keras, and as PyTorch where
that has the same formula."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import in_replicas, replicas, variable

STEPS = 20
START = np.array([1.0, -2.0, 3.0])


@pytest.fixture(scope="module", params=["mirrored-2", "embedded-2", "default"])
def strategy(request, shared):
    return shared(request.param)


# Keras's formulas: the new weights, from the old ones, the gradient, what was kept, and the step's number.


def sgd(w, g, s, t):
    return w - 0.1 * g


def momentum(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0 * g) - 0.1 * g
    return w + s["m"]


def nesterov(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0 * g) - 0.1 * g
    return w + 0.9 * s["m"] - 0.1 * g


def moments(g, s, b1=0.8, b2=0.95):
    s["m"] = s.get("m", 0 * g) + (g - s.get("m", 0 * g)) * (1 - b1)
    s["v"] = s.get("v", 0 * g) + (g * g - s.get("v", 0 * g)) * (1 - b2)
    return s["m"], s["v"]


def adam(w, g, s, t):
    m, v = moments(g, s)
    alpha = 0.1 * (1 - 0.95**t) ** 0.5 / (1 - 0.8**t)
    return w - m * alpha / (np.sqrt(v) + 1e-5)


def amsgrad(w, g, s, t):
    m, v = moments(g, s)
    s["hat"] = np.maximum(s.get("hat", v), v)
    alpha = 0.1 * (1 - 0.95**t) ** 0.5 / (1 - 0.8**t)
    return w - m * alpha / (np.sqrt(s["hat"]) + 1e-5)


def adamw(w, g, s, t):
    return adam(w - w * 0.2 * 0.1, g, s, t)


def adamax(w, g, s, t):
    s["m"] = s.get("m", 0 * g) + (g - s.get("m", 0 * g)) * 0.2
    s["u"] = np.maximum(0.95 * s.get("u", 0 * g), np.abs(g))
    return w - 0.1 * s["m"] / ((1 - 0.8**t) * (s["u"] + 1e-5))


def nadam(w, g, s, t):
    now, next = 0.8 * (1 - 0.5 * 0.96**t), 0.8 * (1 - 0.5 * 0.96 ** (t + 1))
    s["p"] = s.get("p", 1.0) * now
    m, v = moments(g, s)
    ahead = next * m / (1 - s["p"] * next) + (1 - now) * g / (1 - s["p"])
    return w - ahead * 0.1 / (np.sqrt(v / (1 - 0.95**t)) + 1e-5)


def lamb(w, g, s, t):
    m, v = moments(g, s)
    step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-5)
    return w - np.sqrt((w * w).sum()) / np.sqrt((step * step).sum()) * 0.1 * step


def adagrad(w, g, s, t):
    s["a"] = s.get("a", 0.1 + 0 * g) + g * g
    return w - 0.1 * g / np.sqrt(s["a"] + 1e-5)


def adadelta(w, g, s, t):
    s["g"] = 0.9 * s.get("g", 0 * g) + 0.1 * g * g
    delta = -np.sqrt(s.get("d", 0 * g) + 1e-3) * g / np.sqrt(s["g"] + 1e-3)
    s["d"] = 0.9 * s.get("d", 0 * g) + 0.1 * delta * delta
    return w + delta


def rmsprop(w, g, s, t):
    s["v"] = 0.9 * s.get("v", 0 * g) + 0.1 * g * g
    return w - 0.1 * g / np.sqrt(s["v"] + 1e-5)


def rmsprop_whole(w, g, s, t):
    s["v"] = 0.9 * s.get("v", 0 * g) + 0.1 * g * g
    s["a"] = 0.9 * s.get("a", 0 * g) + 0.1 * g
    s["m"] = 0.5 * s.get("m", 0 * g) + 0.01 * g / np.sqrt(s["v"] - s["a"] ** 2 + 1e-5)
    return w - s["m"]


def ftrl(w, g, s, t, rate=0.1, power=-0.5, l1=0.01, l2=0.02, shrinkage=0.03, beta=0.04):
    old, linear = s.get("n", 0.1 + 0 * g), s.get("z", 0 * g)
    s["n"] = old + g * g
    s["z"] = linear + g + 2 * shrinkage * w - (s["n"] ** -power - old**-power) / rate * w
    quadratic = s["n"] ** -power / rate + 2 * (l2 + beta / (2 * rate))
    return (np.clip(s["z"], -l1, l1) - s["z"]) / quadratic


def lion(w, g, s, t):
    m = s.get("m", 0 * g)
    s["m"] = 0.95 * m + 0.05 * g
    return w - 0.1 * np.sign(0.8 * m + 0.2 * g)


O = ps.optimizers  # noqa: E741
B = (0.8, 0.95)
CASES = {
    "sgd": (lambda: O.SGD(0.1), sgd),
    "momentum": (lambda: O.SGD(0.1, 0.9), momentum),
    "nesterov": (lambda: O.SGD(0.1, 0.9, nesterov=True), nesterov),
    "adam": (lambda: O.Adam(0.1, *B, 1e-5), adam),
    "amsgrad": (lambda: O.Adam(0.1, *B, 1e-5, amsgrad=True), amsgrad),
    "adamw": (lambda: O.AdamW(0.1, 0.2, *B, 1e-5), adamw),
    "adamax": (lambda: O.Adamax(0.1, *B, 1e-5), adamax),
    "nadam": (lambda: O.Nadam(0.1, *B, 1e-5), nadam),
    "lamb": (lambda: O.Lamb(0.1, *B, 1e-5), lamb),
    "adagrad": (lambda: O.Adagrad(0.1, 0.1, 1e-5), adagrad),
    "adadelta": (lambda: O.Adadelta(1.0, 0.9, 1e-3), adadelta),
    "rmsprop": (lambda: O.RMSprop(0.1, 0.9, epsilon=1e-5), rmsprop),
    "rmsprop momentum centered": (lambda: O.RMSprop(0.01, 0.9, 0.5, 1e-5, centered=True), rmsprop_whole),
    "ftrl": (lambda: O.Ftrl(0.1, -0.5, 0.1, 0.01, 0.02, 0.03, 0.04), ftrl),
    "lion": (lambda: O.Lion(0.1, *B[:1], 0.95), lion),
}


def gradient(t):
    """Of one step: away from zero, so that signs and quotients are sure."""
    return np.sin(np.arange(3.0) * 2 + t) * (1 + np.arange(3.0))


def trained(strategy, optimizer, dtype, steps=STEPS):
    """The weights after some steps of which the replicas' gradients add up to `gradient`."""
    w, count = variable(strategy, START.astype(dtype)), replicas(strategy)
    for t in range(1, steps + 1):
        share = (gradient(t).astype(dtype) / count).astype(dtype)
        in_replicas(strategy, lambda _, g=share: optimizer.apply_gradients([(g, w)]))
    return w.numpy()


def plain(rule, dtype, steps=STEPS):
    """The same in plain NumPy; half precision is computed in float32, and rounded once in each step."""
    wide = np.dtype("float32") if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)
    w, state = START.astype(dtype), {}
    for t in range(1, steps + 1):
        w = np.asarray(rule(w.astype(wide), gradient(t).astype(dtype).astype(wide), state, t), wide).astype(dtype)
    return w


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_its_formula(strategy, name, dtype):
    """Within the roundings of 20 steps; slots of half precision variables are float32."""
    make, rule = CASES[name]
    optimizer = make()
    found = trained(strategy, optimizer, dtype)
    assert found.dtype == dtype
    # Replicas halve their gradients, which rounds nothing; the order of roundings is all that may differ.
    eps = float(ml_dtypes.finfo(dtype).eps)
    room = 8 * STEPS * eps if np.dtype(dtype).itemsize >= 4 else 8 * eps
    np.testing.assert_allclose(found.astype(float), plain(rule, dtype).astype(float), rtol=room, atol=room)
    wide = np.dtype("float32") if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)
    assert {x.dtype for x in optimizer.variables if x.shape == (3,)} <= {wide}


# What PyTorch 2.13.0 makes of the same gradients in float64, with an epsilon of 1e-14 where it stands elsewhere.

E = 1e-14
TORCH = {
    "SGD(0.1)": [0.9001778115580219, -2.0150515604063712, 3.3182575430705636],
    "SGD(0.1, 0.9)": [0.2726285403281187, -0.7370081769668524, 3.6053442237951834],
    "SGD(0.1, 0.9, True)": [0.24554349785332852, -0.8783589196765377, 3.8630673444862293],
    "Adam(0.1, .8, .95, E)": [0.7224121390759193, -1.8824707827924978, 3.1425506716598894],
    "Adam(0.1, .8, .95, E, True)": [0.7234369292766744, -1.8821226733074254, 3.1429770476834866],
    "AdamW(0.1, 0.2, .8, .95, E)": [0.4784262441670366, -1.2552303106310214, 2.10079762480515],
    "Adamax(0.1, .8, .95, E)": [0.7400058492028966, -1.9456182998347205, 3.130347570418688],
    "Nadam(0.1, .8, .95, E)": [0.8424117850001722, -1.996207137271273, 3.101275233450221],
    "Adagrad(0.1, 0.1, E)": [0.8892118940764342, -1.970846374027665, 3.0689135939994334],
    "Adadelta(1.0, 0.9, 1e-3)": [0.8831120272337143, -2.083319874127051, 3.1275424456233045],
    "RMSprop(0.1, 0.9, epsilon=E)": [0.6256765583851901, -2.0555694372552042, 3.2544780999498752],
    "RMSprop(0.01, 0.9, 0.5, E, True)": [0.9254792094877567, -1.9970252639697263, 3.0378304787872406],
}


@pytest.mark.parametrize("text", TORCH)
def test_an_optimizer_is_pytorchs(strategy, text):
    """An implementation that nobody here has written."""
    optimizer = eval(f"O.{text}", {"O": O, "E": E})  # Text of this module.
    np.testing.assert_allclose(trained(strategy, optimizer, np.float64), TORCH[text], rtol=1e-11)


# What Keras 3.15.1 makes of the same gradients in float64, with the arguments of `CASES` and with options.

WITH_OPTIONS = {
    "ema": lambda: O.Adam(
        0.1,
        *B,
        1e-5,
        weight_decay=0.1,
        clipnorm=1.5,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=4,
        loss_scale_factor=2.0,
    ),
    "accumulated": lambda: O.Adam(
        0.1, *B, 1e-5, weight_decay=0.1, global_clipnorm=1.5, gradient_accumulation_steps=2, loss_scale_factor=2.0
    ),
    "clipvalue": lambda: O.SGD(0.1, clipvalue=0.5),
}
KERAS = {
    "sgd": [0.9001778115580219, -2.0150515604063712, 3.3182575430705636],
    "momentum": [0.2726285403281184, -0.7370081769668522, 3.6053442237951834],
    "nesterov": [0.24554349785332852, -0.8783589196765383, 3.8630673444862293],
    "adam": [0.7224241155696024, -1.8824597879605787, 3.1425482764083115],
    "amsgrad": [0.7234488169375161, -1.8821116847074615, 3.1429746470424673],
    "adamw": [0.478434485976006, -1.2552229003408955, 2.100795987341763],
    "adamax": [0.7400088395033304, -1.94561563009474, 3.1303471127470313],
    "nadam": [0.8424135983152158, -1.9962042435349205, 3.101274876347762],
    "lamb": [0.2939803153225156, -1.4670079588514646, 3.219339162043039],
    "adagrad": [0.8892125728654856, -1.970844750409828, 3.0689135482682732],
    "adadelta": [0.8831120272337142, -2.0833198741270507, 3.1275424456233045],
    "rmsprop": [0.6257022177436666, -2.055378507063191, 3.254476609391309],
    "rmsprop momentum centered": [0.9254857057254386, -1.9969806390018994, 3.0378301131226326],
    "ftrl": [0.4796406542733767, -0.38897806324206835, 2.645157434525602],
    "lion": [0.6000000000000001, -2.0, 3.2],
    "ema": [0.8216260168951337, -1.9507588588053133, 2.95034635531821],
    "accumulated": [0.7553213327552013, -1.612374949153148, 2.7927920322217856],
    "clipvalue": [0.9444036075072773, -2.006429181686483, 3.0576922298882354],
}


@pytest.mark.parametrize("name", KERAS)
def test_an_optimizer_is_keras(strategy, name):
    """Names, arguments and numbers."""
    make = WITH_OPTIONS.get(name) or CASES[name][0]
    # Keras rounds the momentum of averages to float32.
    np.testing.assert_allclose(
        trained(strategy, make(), np.float64), KERAS[name], rtol=1e-8 if name == "ema" else 1e-11, atol=1e-13
    )


DEFAULTS = {
    "SGD": {"learning_rate": 0.01, "momentum": 0.0, "nesterov": False},
    "Adam": {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
    "AdamW": {"learning_rate": 0.001, "weight_decay": 0.004, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Adamax": {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Nadam": {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Lamb": {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Adagrad": {"learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7},
    "Adadelta": {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7},
    "RMSprop": {"learning_rate": 0.001, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
    "Ftrl": {"learning_rate": 0.001, "learning_rate_power": -0.5, "initial_accumulator_value": 0.1, "beta": 0.0},
    "Lion": {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.99},
}
OPTIONS = {
    **dict.fromkeys(["weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "ema_overwrite_frequency"]),
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "use_ema": False,
    "ema_momentum": 0.99,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_keras(name):
    """Of each optimizer's own arguments, and of those that all have."""
    optimizer = getattr(O, name)()
    expected = OPTIONS | DEFAULTS[name]
    assert {key: getattr(optimizer, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: O.SGD(momentum=2), "momentum is 2, and must be between 0 and 1"),
        (lambda: O.SGD(0.1, 0.5, name="a", clipnorm=1, clipvalue=1), "clipnorm and clipvalue are given; keep one"),
        (lambda: O.SGD(global_clipnorm=0), "global_clipnorm is 0, and must be more than 0"),
        (lambda: O.SGD(loss_scale_factor=-1), "loss_scale_factor is -1"),
        (lambda: O.SGD(ema_momentum=2), "ema_momentum is 2"),
        (lambda: O.SGD(ema_overwrite_frequency=3), "add use_ema=True"),
        (lambda: O.SGD(use_ema=True, ema_overwrite_frequency=0), "at least 1"),
        (lambda: O.SGD(gradient_accumulation_steps=1), "whole number of at least 2"),
        (lambda: O.SGD(gradient_accumulation_steps=2.5), "whole number of at least 2"),
        (lambda: O.Adam(beta_2=1.0), "beta_2 is 1.0"),
        (lambda: O.Lion(beta_1=0), "beta_1 is 0"),
        (lambda: O.RMSprop(momentum=-1), "momentum is -1"),
        (lambda: O.Adagrad(initial_accumulator_value=-1), "initial_accumulator_value is -1"),
        (lambda: O.Ftrl(learning_rate_power=1), "learning_rate_power is 1"),
        (lambda: O.Ftrl(l1_regularization_strength=-1), "l1_regularization_strength is -1"),
        (lambda: O.DynamicLossScale(0), "initial_scale is 0, and must be a float32 of more than 0"),
        (lambda: O.DynamicLossScale(1e39), "initial_scale is 1e\\+39, and must be a float32"),
        (lambda: O.DynamicLossScale(np.inf), "initial_scale is inf, and must be finite"),
        (lambda: O.DynamicLossScale(2.0, 0), "dynamic_growth_steps is 0, and must be a whole number of at least 1"),
        (lambda: O.DynamicLossScale(2.0, np.nan), "dynamic_growth_steps is nan"),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    """At once, by name and value."""
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("rate", ["0.1", None, True, [0.1, 0.2]])
def test_a_learning_rate_is_a_number_a_schedule_or_a_function(rate):
    """Anything else is refused with these words."""
    with pytest.raises(TypeError, match="give a number, a schedule, or a function"):
        O.SGD(rate)
