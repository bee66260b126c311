"""Each optimizer, over 20 steps: as its formula in NumPy, which is Keras's or TensorFlow 1's, and as PyTorch's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient.compat.v1 import train as v1
from tests.kit import references as F
from tests.kit.cases import once, pairwise
from tests.kit.references import START, STEPS, computed, trained
from tests.kit.strategies import kinds, variable

KINDS = ("default", "mirrored-2", "servers-1x2")
O = ps.optimizers  # noqa: E741
B, E, S = (0.8, 0.95), 1e-5, 1e-14
SMALL = 2.0**-17
"""An epsilon that float32 has exactly, as it has all numbers of `TENSORFLOW`, which TensorFlow keeps in float32."""
FTRL = (0.125, -0.5, 0.125, 2.0**-6, 2.0**-5)

KERAS = {
    "sgd": (lambda: O.SGD(0.1), F.descent(0.1)),
    "momentum": (lambda: O.SGD(0.1, 0.9), F.momentum(0.1, 0.9)),
    "nesterov": (lambda: O.SGD(0.1, 0.9, nesterov=True), F.momentum(0.1, 0.9, nesterov=True)),
    "adam": (lambda: O.Adam(0.1, *B, E), F.adam(0.1, *B, E)),
    "amsgrad": (lambda: O.Adam(0.1, *B, E, amsgrad=True), F.adam(0.1, *B, E, amsgrad=True)),
    "adamw": (lambda: O.AdamW(0.1, 0.2, *B, E), F.adam(0.1, *B, E, decay=0.2)),
    "adamax": (lambda: O.Adamax(0.1, *B, E), F.adamax(0.1, *B, E)),
    "nadam": (lambda: O.Nadam(0.1, *B, E), F.nadam(0.1, *B, E)),
    "lamb": (lambda: O.Lamb(0.1, *B, E), F.lamb(0.1, *B, E)),
    "adagrad": (lambda: O.Adagrad(0.1, 0.1, E), F.adagrad(0.1, 0.1, E)),
    "adadelta": (lambda: O.Adadelta(1.0, 0.9, 1e-3), F.adadelta(0.9, 1e-3)),
    "rmsprop": (lambda: O.RMSprop(0.1, 0.9, epsilon=E), F.rmsprop(0.1, 0.9, 0.0, E)),
    "rmsprop momentum centered": (
        lambda: O.RMSprop(0.01, 0.9, 0.5, E, centered=True),
        F.rmsprop(0.01, 0.9, 0.5, E, centered=True),
    ),
    "ftrl": (lambda: O.Ftrl(0.1, -0.5, 0.1, 0.01, 0.02, 0.03, 0.04), F.ftrl(0.1, -0.5, 0.1, 0.01, 0.02, 0.03, 0.04)),
    "lion": (lambda: O.Lion(0.1, 0.8, 0.95), F.lion(0.1, 0.8, 0.95)),
}
"""What makes an optimizer, and its formula."""

TENSORFLOW = {
    "gradient descent": (lambda: v1.GradientDescentOptimizer(0.125), F.descent(0.125)),
    "momentum": (lambda: v1.MomentumOptimizer(0.125, 0.875), F.momentum(0.125, 0.875)),
    "nesterov": (
        lambda: v1.MomentumOptimizer(0.125, 0.875, use_nesterov=True),
        F.momentum(0.125, 0.875, nesterov=True),
    ),
    "adam": (lambda: v1.AdamOptimizer(0.125, 0.75, 0.9375, SMALL), F.adam(0.125, 0.75, 0.9375, SMALL)),
    "adagrad": (lambda: v1.AdagradOptimizer(0.125, 0.25), F.adagrad(0.125, 0.25)),
    "rmsprop": (lambda: v1.RMSPropOptimizer(0.125, 0.875, 0.5, SMALL), F.rmsprop(0.125, 0.875, 0.5, SMALL, first=1.0)),
    "rmsprop centered": (
        lambda: v1.RMSPropOptimizer(2.0**-6, 0.875, 0.5, SMALL, centered=True),
        F.rmsprop(2.0**-6, 0.875, 0.5, SMALL, centered=True, first=1.0),
    ),
    "adadelta": (lambda: v1.AdadeltaOptimizer(1.0, 0.875, 2.0**-10), F.adadelta(0.875, 2.0**-10)),
    "ftrl": (
        lambda: v1.FtrlOptimizer(*FTRL, l2_shrinkage_regularization_strength=2.0**-4, beta=0.25),
        F.ftrl(*FTRL, 2.0**-4, 0.25),
    ),
    "ftrl other power": (lambda: v1.FtrlOptimizer(0.125, -0.75, *FTRL[2:]), F.ftrl(0.125, -0.75, *FTRL[2:])),
    "proximal gradient descent": (
        lambda: v1.ProximalGradientDescentOptimizer(0.125, 0.0625, 0.125),
        F.proximal_descent(0.125, 0.0625, 0.125),
    ),
    "proximal gradient descent without l1": (
        lambda: v1.ProximalGradientDescentOptimizer(0.125, 0.0, 0.125),
        F.proximal_descent(0.125, 0.0, 0.125),
    ),
    "proximal adagrad": (
        lambda: v1.ProximalAdagradOptimizer(0.125, 0.125, 0.0625, 0.125),
        F.proximal_adagrad(0.125, 0.125, 0.0625, 0.125),
    ),
    "proximal adagrad without l1": (
        lambda: v1.ProximalAdagradOptimizer(0.125, 0.125, 0.0, 0.125),
        F.proximal_adagrad(0.125, 0.125, 0.0, 0.125),
    ),
}
OF_KERAS = {
    "sgd": [0.900177811558, -2.015051560406, 3.318257543071],
    "momentum": [0.2726285403281, -0.7370081769669, 3.605344223795],
    "nesterov": [0.2455434978533, -0.8783589196765, 3.863067344486],
    "adam": [0.7224241155696, -1.882459787961, 3.142548276408],
    "amsgrad": [0.7234488169375, -1.882111684707, 3.142974647042],
    "adamw": [0.478434485976, -1.255222900341, 2.100795987342],
    "adamax": [0.7400088395033, -1.945615630095, 3.130347112747],
    "nadam": [0.8424135983152, -1.996204243535, 3.101274876348],
    "lamb": [0.2939803153225, -1.467007958851, 3.219339162043],
    "adagrad": [0.8892125728655, -1.97084475041, 3.068913548268],
    "adadelta": [0.8831120272337, -2.083319874127, 3.127542445623],
    "rmsprop": [0.6257022177437, -2.055378507063, 3.254476609391],
    "rmsprop momentum centered": [0.9254857057254, -1.996980639002, 3.037830113123],
    "ftrl": [0.4796406542734, -0.3889780632421, 2.645157434526],
    "lion": [0.6, -2.0, 3.2],
}
"""What Keras 3.15.1 makes of the same gradients in float64."""

OF_TENSORFLOW = {
    "gradient descent": [0.8752222644475, -2.018814450508, 3.397821928838],
    "momentum": [0.2491277640616, -0.7054278104729, 3.636420343754],
    "nesterov": [0.2182090580015, -0.8860637846717, 3.954689729623],
    "adam": [0.6928048031478, -1.887053360145, 3.164735986426],
    "adagrad": [0.8727648375092, -1.945897442284, 3.085298322047],
    "rmsprop": [0.8627444052299, -1.826395807099, 3.248257964679],
    "rmsprop centered": [0.9813834439567, -1.973232615139, 3.033746225772],
    "adadelta": [0.8964078397835, -2.075923450234, 3.115857308256],
    "ftrl": [0.3158444080908, -0.1711641228083, 2.372323138711],
    "ftrl other power": [0.6080128050725, -0.6026689677578, 2.915730559461],
    "proximal gradient descent": [0.5053683108158, -1.403977616538, 2.439011663138],
    "proximal gradient descent without l1": [0.6386755374388, -1.537284843161, 2.572318889761],
    "proximal adagrad": [0.6701853225073, -1.700317415698, 2.901161015864],
    "proximal adagrad without l1": [0.7412398296706, -1.752772278631, 2.927063603447],
}
"""What TensorFlow 2.21.0 makes of them: sessions of `tf.compat.v1`, resource variables, CPU. Its proximal ones take
float32 alone, so these are of their operations, `tf.raw_ops.ResourceApply...`."""

CASES = [(name, KERAS[name], OF_KERAS[name]) for name in KERAS]
CASES += [(f"TensorFlow's {name}", TENSORFLOW[name], OF_TENSORFLOW[name]) for name in TENSORFLOW]


@pytest.mark.parametrize(("name", "case", "expected"), CASES)
def test_a_formula_is_the_framework_s(name, case, expected):
    """Implementations that nobody here has written."""
    # TensorFlow multiplies the powers of Adam's betas in float32.
    rtol = 1e-9 if name == "TensorFlow's adam" else 1e-11
    np.testing.assert_allclose(computed(case[1]), expected, rtol=rtol, atol=1e-13)


@pairwise(strategy=KINDS, name=KERAS, dtype=[np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_optimizer_is_its_formula(strategy, name, dtype):
    """Within the roundings of 20 steps; slots of half precision variables are float32."""
    make, rule = KERAS[name]
    w, optimizer = variable(strategy, START.astype(dtype)), make()
    found = trained(strategy, optimizer, w)
    assert found.dtype == dtype
    # Replicas halve their gradients, which rounds nothing; the order of roundings is all that may differ.
    eps = float(ml_dtypes.finfo(dtype).eps)
    room = 8 * STEPS * eps if np.dtype(dtype).itemsize >= 4 else 8 * eps
    np.testing.assert_allclose(found.astype(float), computed(rule, dtype).astype(float), rtol=room, atol=room)
    wide = np.dtype("float32") if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)
    assert {x.dtype for x in optimizer.variables if x.shape == (3,)} <= {wide}


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


@once(strategy=KINDS, name=TENSORFLOW)
def test_an_optimizer_of_tensorflow_is_its_formula(strategy, name):
    """The weights, and each slot by its name; a slot is where its variable is."""
    make, rule = TENSORFLOW[name]
    w, kept = variable(strategy, START), dict[str, np.ndarray]()
    with strategy.scope():
        optimizer = make()
    np.testing.assert_allclose(trained(strategy, optimizer, w), computed(rule, kept=kept), rtol=1e-12, atol=1e-13)
    assert optimizer.get_slot_names() == sorted(kept) == SLOTS.get(name, [])
    for slot, expected in kept.items():
        found = optimizer.get_slot(w, slot)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-13)
        assert found.devices == w.devices


WITHOUT_FORMULA = {
    "Adam(0.1, *B, E, weight_decay=0.1, clipnorm=1.5, use_ema=True, ema_momentum=0.9, "
    "ema_overwrite_frequency=4, loss_scale_factor=2.0)": [0.8216260168951, -1.950758858805, 2.950346355318],
    "Adam(0.1, *B, E, weight_decay=0.1, global_clipnorm=1.5, gradient_accumulation_steps=2, loss_scale_factor=2.0)": [
        0.7553213327552,
        -1.612374949153,
        2.792792032222,
    ],
    "SGD(0.1, clipvalue=0.5)": [0.9444036075073, -2.006429181686, 3.057692229888],
    "SGD(0.1)": [0.900177811558, -2.015051560406, 3.318257543071],
    "SGD(0.1, 0.9)": [0.2726285403281, -0.7370081769669, 3.605344223795],
    "SGD(0.1, 0.9, nesterov=True)": [0.2455434978533, -0.8783589196765, 3.863067344486],
    "Adam(0.1, *B, S)": [0.7224121390759, -1.882470782792, 3.14255067166],
    "Adam(0.1, *B, S, amsgrad=True)": [0.7234369292767, -1.882122673307, 3.142977047683],
    "AdamW(0.1, 0.2, *B, S)": [0.478426244167, -1.255230310631, 2.100797624805],
    "Adamax(0.1, *B, S)": [0.7400058492029, -1.945618299835, 3.130347570419],
    "Nadam(0.1, *B, S)": [0.8424117850002, -1.996207137271, 3.10127523345],
    "Adagrad(0.1, 0.1, S)": [0.8892118940764, -1.970846374028, 3.068913593999],
    "Adadelta(1.0, 0.9, 1e-3)": [0.8831120272337, -2.083319874127, 3.127542445623],
    "RMSprop(0.1, 0.9, epsilon=S)": [0.6256765583852, -2.055569437255, 3.25447809995],
    "RMSprop(0.01, 0.9, 0.5, S, centered=True)": [0.9254792094878, -1.99702526397, 3.037830478787],
}
"""What Keras 3.15.1 makes with options, and then PyTorch 2.13.0, with a tiny epsilon where it stands elsewhere."""


@kinds("default", soak=KINDS)
@pytest.mark.parametrize("text", WITHOUT_FORMULA)
def test_an_optimizer_is_the_framework_s(strategy, text):
    """Names, arguments and numbers."""
    optimizer = eval(f"O.{text}", {"O": O, "B": B, "E": E, "S": S})  # text of this module
    found = trained(strategy, optimizer, variable(strategy, START))
    # Keras rounds the momentum of averages to float32.
    np.testing.assert_allclose(found, WITHOUT_FORMULA[text], rtol=1e-8 if "ema" in text else 1e-11, atol=1e-13)


OF_DEFAULTS = {
    "adam": (lambda: v1.AdamOptimizer(), [0.9963875240377601, -1.9981488773012126, 3.0017496825994465]),
    "adagrad": (
        lambda: v1.AdagradOptimizer(0.125),
        [0.8615148675955412, -1.9635579675345822, 3.0861419924992926],
    ),
    "rmsprop": (
        lambda: v1.RMSPropOptimizer(0.125),
        [0.8716364077602154, -1.9647220955043905, 3.2349088032352227],
    ),
    "adadelta": (
        lambda: v1.AdadeltaOptimizer(),
        [0.9999994746878438, -2.000000379941504, 3.0000005414159703],
    ),
    "ftrl": (lambda: v1.FtrlOptimizer(0.125), [0.5097320770982686, -0.4714337095103752, 2.7583430575583385]),
    "proximal gradient descent": (
        lambda: v1.ProximalGradientDescentOptimizer(0.125),
        [0.8752222644475272, -2.018814450507964, 3.3978219288382046],
    ),
    "proximal adagrad": (
        lambda: v1.ProximalAdagradOptimizer(0.125),
        [0.8615148677219768, -1.963557967232145, 3.086141992490774],
    ),
}


@kinds("default")
@pytest.mark.parametrize("name", OF_DEFAULTS)
def test_defaults_make_tensorflows_steps(strategy, name):
    """Which are rounded to float32 there: the way that was gone agrees to about five digits."""
    make, expected = OF_DEFAULTS[name]
    found = trained(strategy, make(), variable(strategy, START))
    np.testing.assert_allclose(found - START, np.array(expected) - START, rtol=1e-5)


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
