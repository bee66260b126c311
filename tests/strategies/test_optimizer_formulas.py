"""Each row of the table of update rules, over 20 steps: as its formula in NumPy, and as its framework computes it."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient.compat.v1 import train as v1
from psclient.optimizers import rules
from tests.kit import references as F
from tests.kit.cases import once, pairwise
from tests.kit.references import START, computed, trained
from tests.kit.strategies import kinds, variable

KINDS = ("default", "mirrored-2", "servers-1x2")
O = ps.optimizers  # noqa: E741
B, E, S = (0.8, 0.95), 1e-5, 1e-14
SMALL = 2.0**-17
"""An epsilon that float32 has exactly, as it has all numbers of `TENSORFLOW`, which TensorFlow keeps in float32."""
FTRL = (0.125, -0.5, 0.125, 2.0**-6, 2.0**-5)

KERAS = {
    "SGD(0.1)": (F.descent(0.1), [0.900177811558, -2.015051560406, 3.318257543071]),
    "SGD(0.1, 0.9)": (F.momentum(0.1, 0.9), [0.2726285403281, -0.7370081769669, 3.605344223795]),
    "SGD(0.1, 0.9, nesterov=True)": (
        F.momentum(0.1, 0.9, nesterov=True),
        [0.2455434978533, -0.8783589196765, 3.863067344486],
    ),
    "Adam(0.1, *B, E)": (F.adam(0.1, *B, E), [0.7224241155696, -1.882459787961, 3.142548276408]),
    "Adam(0.1, *B, E, amsgrad=True)": (
        F.adam(0.1, *B, E, amsgrad=True),
        [0.7234488169375, -1.882111684707, 3.142974647042],
    ),
    "AdamW(0.1, 0.2, *B, E)": (F.adam(0.1, *B, E, decay=0.2), [0.478434485976, -1.255222900341, 2.100795987342]),
    "Adamax(0.1, *B, E)": (F.adamax(0.1, *B, E), [0.7400088395033, -1.945615630095, 3.130347112747]),
    "Nadam(0.1, *B, E)": (F.nadam(0.1, *B, E), [0.8424135983152, -1.996204243535, 3.101274876348]),
    "Lamb(0.1, *B, E)": (F.lamb(0.1, *B, E), [0.2939803153225, -1.467007958851, 3.219339162043]),
    "Adagrad(0.1, 0.1, E)": (F.adagrad(0.1, 0.1, E), [0.8892125728655, -1.97084475041, 3.068913548268]),
    "Adadelta(1.0, 0.9, 1e-3)": (F.adadelta(0.9, 1e-3), [0.8831120272337, -2.083319874127, 3.127542445623]),
    "RMSprop(0.1, 0.9, epsilon=E)": (F.rmsprop(0.1, 0.9, 0.0, E), [0.6257022177437, -2.055378507063, 3.254476609391]),
    "RMSprop(0.01, 0.9, 0.5, E, centered=True)": (
        F.rmsprop(0.01, 0.9, 0.5, E, centered=True),
        [0.9254857057254, -1.996980639002, 3.037830113123],
    ),
    "Ftrl(0.1, -0.5, 0.1, 0.01, 0.02, 0.03, 0.04)": (
        F.ftrl(0.1, -0.5, 0.1, 0.01, 0.02, 0.03, 0.04),
        [0.4796406542734, -0.3889780632421, 2.645157434526],
    ),
    "Lion(0.1, 0.8, 0.95)": (F.lion(0.1, 0.8, 0.95), [0.6, -2.0, 3.2]),
}
"""The formula of each, and what Keras 3.15.1 makes of the same gradients in float64."""

P, C = F.penalized, {"beta_1": B[0], "beta_2": B[1], "epsilon": 1e-3}
FRONT_ENDS = {
    "torch('SGD', 0.1, momentum=0.9, dampening=0.3, penalty=0.1, maximize=True)": (
        P(F.momentum(0.1, 0.9, dampening=0.3), 0.1, -1),
        [0.7023511629361, -1.046604433081, 0.265795098249],
    ),
    "torch('Adam', 0.1, **C, penalty=0.05)": (
        P(F.adam_outside(0.1, *B, 1e-3), 0.05),
        [0.6405812085311, -1.768724826999, 3.015329853893],
    ),
    "torch('AdamW', 0.1, **C, penalty=0.2, amsgrad=True, maximize=True, decoupled=True)": (
        P(F.adam_outside(0.1, *B, 1e-3, amsgrad=True, decay=0.2), 0.0, -1),
        [0.8559142218129, -1.415676044475, 1.904484155944],
    ),
    "torch('Adagrad', 0.1, lr_decay=0.05, penalty=0.01, initial_accumulator_value=0.2, epsilon=1e-3)": (
        P(F.adagrad_outside(0.1, 0.2, 1e-3, 0.05), 0.01),
        [0.8889697862857, -1.941260785879, 3.054044076734],
    ),
    "torch('RMSprop', 0.1, alpha=0.9, epsilon=1e-3, penalty=0.02, momentum=0.5, centered=True)": (
        P(F.rmsprop(0.1, 0.9, 0.5, 1e-3, centered=True, outside=True), 0.02),
        [0.2345726831949, -1.856758982558, 3.23565409915],
    ),
    "optax('Sgd', 0.1, momentum=0.9)": (F.momentum(0.1, 0.9), [0.2726285403281, -0.7370081769669, 3.605344223795]),
    "optax('Adam', 0.1, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4)": (
        F.adam_outside(0.1, *B, 1e-3, root=1e-4),
        [0.7227758918815, -1.882235830934, 3.142493197517],
    ),
    "optax('Adam', 0.1, b1=0.8, b2=0.95, eps=1e-3, nesterov=True, weight_decay=0.2)": (
        F.adam_outside(0.1, *B, 1e-3, nesterov=True, decay=0.2),
        [0.479502668888, -1.295892023379, 2.113543625313],
    ),
    "optax('Adagrad', 0.1, initial_accumulator_value=0.1, eps=1e-3)": (
        F.adagrad(0.1, 0.1, 1e-3),
        [0.8892797133989, -1.970684768105, 3.068909021377],
    ),
}
"""The same of the rules of front ends: what PyTorch 2.13.0 and optax 0.2.8 make of these gradients in float64."""

TENSORFLOW = {
    "GradientDescentOptimizer(0.125)": (F.descent(0.125), ""),
    "MomentumOptimizer(0.125, 0.875)": (F.momentum(0.125, 0.875), "momentum"),
    "MomentumOptimizer(0.125, 0.875, use_nesterov=True)": (F.momentum(0.125, 0.875, nesterov=True), "momentum"),
    "AdamOptimizer(0.125, 0.75, 0.9375, SMALL)": (F.adam(0.125, 0.75, 0.9375, SMALL), "m v"),
    "AdagradOptimizer(0.125, 0.25)": (F.adagrad(0.125, 0.25), "accumulator"),
    "RMSPropOptimizer(0.125, 0.875, 0.5, SMALL)": (F.rmsprop(0.125, 0.875, 0.5, SMALL, first=1.0), "momentum rms"),
    "RMSPropOptimizer(2.0**-6, 0.875, 0.5, SMALL, centered=True)": (
        F.rmsprop(2.0**-6, 0.875, 0.5, SMALL, centered=True, first=1.0),
        "mg momentum rms",
    ),
    "AdadeltaOptimizer(1.0, 0.875, 2.0**-10)": (F.adadelta(0.875, 2.0**-10), "accum accum_update"),
    "FtrlOptimizer(*FTRL, l2_shrinkage_regularization_strength=2.0**-4, beta=0.25)": (
        F.ftrl(*FTRL, 2.0**-4, 0.25),
        "accum linear",
    ),
    "FtrlOptimizer(0.125, -0.75, *FTRL[2:])": (F.ftrl(0.125, -0.75, *FTRL[2:]), "accum linear"),
    "ProximalGradientDescentOptimizer(0.125, 0.0625, 0.125)": (F.proximal_descent(0.125, 0.0625, 0.125), ""),
    "ProximalGradientDescentOptimizer(0.125, 0.0, 0.125)": (F.proximal_descent(0.125, 0.0, 0.125), ""),
    "ProximalAdagradOptimizer(0.125, 0.125, 0.0625, 0.125)": (
        F.proximal_adagrad(0.125, 0.125, 0.0625, 0.125),
        "accumulator",
    ),
    "ProximalAdagradOptimizer(0.125, 0.125, 0.0, 0.125)": (F.proximal_adagrad(0.125, 0.125, 0.0, 0.125), "accumulator"),
}
OF_TENSORFLOW = [
    [0.8752222644475, -2.018814450508, 3.397821928838],
    [0.2491277640616, -0.7054278104729, 3.636420343754],
    [0.2182090580015, -0.8860637846717, 3.954689729623],
    [0.6928048031478, -1.887053360145, 3.164735986426],
    [0.8727648375092, -1.945897442284, 3.085298322047],
    [0.8627444052299, -1.826395807099, 3.248257964679],
    [0.9813834439567, -1.973232615139, 3.033746225772],
    [0.8964078397835, -2.075923450234, 3.115857308256],
    [0.3158444080908, -0.1711641228083, 2.372323138711],
    [0.6080128050725, -0.6026689677578, 2.915730559461],
    [0.5053683108158, -1.403977616538, 2.439011663138],
    [0.6386755374388, -1.537284843161, 2.572318889761],
    [0.6701853225073, -1.700317415698, 2.901161015864],
    [0.7412398296706, -1.752772278631, 2.927063603447],
]
"""Formulas and slots, and what TensorFlow 2.21.0 makes of the same gradients: sessions of `tf.compat.v1`, resource
variables, CPU. Its proximal ones take float32 alone: these are of their operations, `tf.raw_ops.ResourceApply...`."""

FRAMEWORKS = {
    "Adam(0.1, *B, E, weight_decay=0.1, clipnorm=1.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4, "
    "loss_scale_factor=2.0)": [0.8216260168951, -1.950758858805, 2.950346355318],
    "Adam(0.1, *B, E, weight_decay=0.1, global_clipnorm=1.5, gradient_accumulation_steps=2, loss_scale_factor=2.0)": [
        0.7553213327552,
        -1.612374949153,
        2.792792032222,
    ],
    "SGD(0.1, clipvalue=0.5)": [0.9444036075073, -2.006429181686, 3.057692229888],
    "Adam(0.1, *B, S)": [0.7224121390759, -1.882470782792, 3.14255067166],
    "Adam(0.1, *B, S, amsgrad=True)": [0.7234369292767, -1.882122673307, 3.142977047683],
    "AdamW(0.1, 0.2, *B, S)": [0.478426244167, -1.255230310631, 2.100797624805],
    "Adamax(0.1, *B, S)": [0.7400058492029, -1.945618299835, 3.130347570419],
    "Nadam(0.1, *B, S)": [0.8424117850002, -1.996207137271, 3.10127523345],
    "Adagrad(0.1, 0.1, S)": [0.8892118940764, -1.970846374028, 3.068913593999],
    "RMSprop(0.1, 0.9, epsilon=S)": [0.6256765583852, -2.055569437255, 3.25447809995],
    "RMSprop(0.01, 0.9, 0.5, S, centered=True)": [0.9254792094878, -1.99702526397, 3.037830478787],
    "AdamOptimizer()": [0.9963875240377601, -1.9981488773012126, 3.0017496825994465],
    "AdagradOptimizer(0.125)": [0.8615148675955412, -1.9635579675345822, 3.0861419924992926],
    "RMSPropOptimizer(0.125)": [0.8716364077602154, -1.9647220955043905, 3.2349088032352227],
    "AdadeltaOptimizer()": [0.9999994746878438, -2.000000379941504, 3.0000005414159703],
    "FtrlOptimizer(0.125)": [0.5097320770982686, -0.4714337095103752, 2.7583430575583385],
    "ProximalGradientDescentOptimizer(0.125)": [0.8752222644475272, -2.018814450507964, 3.3978219288382046],
    "ProximalAdagradOptimizer(0.125)": [0.8615148677219768, -1.963557967232145, 3.086141992490774],
}
"""What Keras 3.15.1 makes with options, PyTorch 2.13.0 with a tiny epsilon where it stands elsewhere, and TensorFlow
2.21.0 with its defaults, which it rounds to float32."""


def of_table(table, base, name, rate, **given):
    """An optimizer of a row; numbers that are not given are 0, and flags are off."""
    numbers = {name: 0.0 if allowed else False for name, allowed in table[name].numbers.items()}
    return rules.kind_of(table[name], name, base)(rate, **(numbers | given))


torch = partial(of_table, rules.TORCH, rules.TorchRule)
optax = partial(of_table, rules.OPTAX, rules.RuleOptimizer)


def made(text):
    """The optimizer of a text of this module."""
    return eval(
        text if text in FRONT_ENDS else f"{'v1' if 'Optimizer(' in text else 'O'}.{text}", {**globals(), "v1": v1}
    )


@pytest.mark.parametrize("text", [*KERAS, *FRONT_ENDS, *TENSORFLOW])
def test_a_formula_is_the_framework_s(text):
    """Implementations that nobody here has written."""
    rule, expected = (KERAS | FRONT_ENDS | TENSORFLOW)[text]
    expected = OF_TENSORFLOW[[*TENSORFLOW].index(text)] if text in TENSORFLOW else expected
    # TensorFlow multiplies the powers of Adam's betas in float32.
    rtol = 1e-9 if text.startswith("AdamOptimizer") else 1e-11
    np.testing.assert_allclose(computed(rule), expected, rtol=rtol, atol=1e-13)


@pairwise(strategy=KINDS, text=[*KERAS, *FRONT_ENDS], dtype=[np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_optimizer_is_its_formula(strategy, text, dtype):
    """Within the roundings of some steps; slots of half precision variables are float32."""
    w, optimizer = variable(strategy, START.astype(dtype)), made(text)
    found = trained(strategy, optimizer, w, steps=8)
    assert found.dtype == dtype
    # Replicas halve their gradients, which rounds nothing; the order of roundings is all that may differ.
    eps = float(ml_dtypes.finfo(dtype).eps)
    room = 8 * 8 * eps if np.dtype(dtype).itemsize >= 4 else 8 * eps
    expected = computed((KERAS | FRONT_ENDS)[text][0], dtype, steps=8)
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=room, atol=room)
    wide = np.dtype("float32") if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)
    assert {x.dtype for x in optimizer.variables if x.shape == (3,)} <= {wide}


@once(strategy=KINDS, text=TENSORFLOW)
def test_an_optimizer_of_tensorflow_is_its_formula(strategy, text):
    """The weights, and each slot by its name; a slot is where its variable is."""
    rule, slots = TENSORFLOW[text]
    w, kept = variable(strategy, START), dict[str, np.ndarray]()
    with strategy.scope():
        optimizer = made(text)
    np.testing.assert_allclose(trained(strategy, optimizer, w), computed(rule, kept=kept), rtol=1e-12, atol=1e-13)
    assert optimizer.get_slot_names() == sorted(kept) == slots.split()
    for slot, expected in kept.items():
        found = optimizer.get_slot(w, slot)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-13)
        assert found.devices == w.devices


@kinds("default", soak=KINDS)
@pytest.mark.parametrize("text", FRAMEWORKS)
def test_an_optimizer_is_the_framework_s(strategy, text):
    """Names, arguments, defaults and numbers."""
    found, expected = trained(strategy, made(text), variable(strategy, START)), np.array(FRAMEWORKS[text])
    if "Optimizer(" in text:  # defaults in float32: the way that was gone agrees to about five digits
        np.testing.assert_allclose(found - START, expected - START, rtol=1e-5)
    else:  # Keras rounds the momentum of averages to float32
        np.testing.assert_allclose(found, expected, rtol=1e-8 if "ema" in text else 1e-11, atol=1e-13)


ADAM = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
DEFAULTS = {
    "SGD": {"learning_rate": 0.01, "momentum": 0.0, "nesterov": False},
    "Adam": ADAM | {"amsgrad": False},
    "AdamW": ADAM | {"weight_decay": 0.004},
    "Adamax": ADAM,
    "Nadam": ADAM,
    "Lamb": ADAM,
    "Adagrad": {"learning_rate": 0.001, "initial_accumulator_value": 0.1, "epsilon": 1e-7},
    "Adadelta": {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7},
    "RMSprop": {"learning_rate": 0.001, "rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
    "Ftrl": {"learning_rate": 0.001, "learning_rate_power": -0.5, "initial_accumulator_value": 0.1, "beta": 0.0},
    "Lion": {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.99},
}
NOTHING = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "ema_overwrite_frequency", "loss_scale_factor")
OPTIONS = dict.fromkeys([*NOTHING, "gradient_accumulation_steps"]) | {"use_ema": False, "ema_momentum": 0.99}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_keras(name):
    """Of each optimizer's own arguments, and of those that all have."""
    optimizer, expected = getattr(O, name)(), OPTIONS | DEFAULTS[name]
    assert {key: getattr(optimizer, key) for key in expected} == expected
