"""Each row of the table of update rules gives the numbers of its framework, over 20 steps."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient.compat.v1 import train as v1
from psclient.optimizers import rules
from tests.kit.cases import once, pairwise
from tests.kit.references import START, trained
from tests.kit.strategies import variable

KINDS = ("default", "mirrored-2", "servers-1x2")
O = ps.optimizers  # noqa: E741
B, E, S = (0.8, 0.95), 1e-5, 1e-14
C = {"beta_1": B[0], "beta_2": B[1], "epsilon": 1e-3}
D = {"penalty": 0.2, "maximize": True, "decoupled": True}
P = {"b1": B[0], "b2": B[1], "eps": 1e-3}
SMALL = 2.0**-17
"""An epsilon that float32 has exactly, as it has all numbers of `TENSORFLOW`, which TensorFlow keeps in float32."""
FTRL = (0.125, -0.5, 0.125, 2.0**-6, 2.0**-5)

KERAS = {
    "SGD(0.1)": [0.9001778116, -2.01505156, 3.318257543],
    "SGD(0.1, 0.9)": [0.2726285403, -0.737008177, 3.605344224],
    "SGD(0.1, 0.9, nesterov=True)": [0.2455434979, -0.8783589197, 3.863067344],
    "Adam(0.1, *B, E)": [0.7224241156, -1.882459788, 3.142548276],
    "Adam(0.1, *B, E, amsgrad=True)": [0.7234488169, -1.882111685, 3.142974647],
    "AdamW(0.1, 0.2, *B, E)": [0.478434486, -1.2552229, 2.100795987],
    "Adamax(0.1, *B, E)": [0.7400088395, -1.94561563, 3.130347113],
    "Nadam(0.1, *B, E)": [0.8424135983, -1.996204244, 3.101274876],
    "Lamb(0.1, *B, E)": [0.2939803153, -1.467007959, 3.219339162],
    "Adagrad(0.1, 0.1, E)": [0.8892125729, -1.97084475, 3.068913548],
    "Adadelta(1.0, 0.9, 1e-3)": [0.8831120272, -2.083319874, 3.127542446],
    "RMSprop(0.1, 0.9, epsilon=E)": [0.6257022177, -2.055378507, 3.254476609],
    "RMSprop(0.01, 0.9, 0.5, E, centered=True)": [0.9254857057, -1.996980639, 3.037830113],
    "Ftrl(0.1, -0.5, 0.1, 0.01, 0.02, 0.03, 0.04)": [0.4796406543, -0.3889780632, 2.645157435],
    "Lion(0.1, 0.8, 0.95)": [0.6, -2.0, 3.2],
}
"""What Keras 3.15.1 makes of the gradients of `references.gradient` in float64."""

FRONT_ENDS = {
    "torch('SGD', 0.1, momentum=0.9, dampening=0.3, penalty=0.1, maximize=True)": [
        0.7023511629,
        -1.046604433,
        0.2657950982,
    ],
    "torch('Adam', 0.1, **C, penalty=0.05)": [0.6405812085, -1.768724827, 3.015329854],
    "torch('AdamW', 0.1, **C, **D, amsgrad=True)": [0.8559142218, -1.415676044, 1.904484156],
    "torch('SparseAdam', 0.1, **C)": [0.72360457, -1.881394672, 3.142311535],
    "torch('NAdam', 0.1, **C, penalty=0.05, momentum_decay=0.02)": [0.7539823914, -1.917531517, 3.005231293],
    "torch('NAdam', 0.1, **C, **D, momentum_decay=0.02)": [0.7754494071, -1.29294103, 1.895941235],
    "torch('RAdam', 0.1, **C, **D)": [0.8175878551, -1.532074409, 1.796915864],
    "torch('RAdam', 0.1, **C | {'beta_2': 0.6})": [0.7735346451, -1.752573604, 3.370498928],
    "torch('Adamax', 0.1, **C, penalty=0.05, maximize=True)": [1.162986442, -1.973040431, 2.790278981],
    "torch('Adagrad', 0.1, lr_decay=0.05, penalty=0.01, initial_accumulator_value=0.2, epsilon=1e-3)": [
        0.8889697863,
        -1.941260786,
        3.054044077,
    ],
    "torch('RMSprop', 0.1, alpha=0.9, epsilon=1e-3, penalty=0.02, momentum=0.5, centered=True)": [
        0.2345726832,
        -1.856758983,
        3.235654099,
    ],
    "torch('Adadelta', 1.0, rho=0.9, epsilon=1e-3, penalty=0.05, maximize=True)": [
        1.002480245,
        -1.771473618,
        2.771102862,
    ],
    "optax('Sgd', 0.1, momentum=0.9)": [0.2726285403, -0.737008177, 3.605344224],
    "optax('Adam', 0.1, **P, eps_root=1e-4)": [0.7227758919, -1.882235831, 3.142493198],
    "optax('Adam', 0.1, **P, nesterov=True, weight_decay=0.2)": [0.4795026689, -1.295892023, 2.113543625],
    "optax('Radam', 0.1, **P, eps_root=1e-4, threshold=6.0, nesterov=True)": [0.8039706831, -1.777693128, 3.279632972],
    "optax('Radam', 0.1, b1=0.9, b2=0.999, eps=1e-3, threshold=5.0)": [0.751483978, -1.710638444, 3.379738039],
    "optax('Adamax', 0.1, **P)": [0.7403000957, -1.945350994, 3.130302079],
    "optax('Adadelta', 1.0, rho=0.9, eps=1e-3, weight_decay=0.05)": [0.794387221, -1.953615898, 3.02117982],
    "optax('Adagrad', 0.1, initial_accumulator_value=0.1, eps=1e-3)": [0.8892797134, -1.970684768, 3.068909021],
}
"""What PyTorch 2.13.0 and optax 0.2.8 make of them, in float64."""

TENSORFLOW = {
    "GradientDescentOptimizer(0.125)": ([0.8752222644, -2.018814451, 3.397821929], {}),
    "MomentumOptimizer(0.125, 0.875)": ([0.2491277641, -0.7054278105, 3.636420344], {"momentum": 0.2826853126}),
    "MomentumOptimizer(0.125, 0.875, use_nesterov=True)": (
        [0.218209058, -0.8860637847, 3.95468973],
        {"momentum": 0.2826853126},
    ),
    "AdamOptimizer(0.125, 0.75, 0.9375, SMALL)": (
        [0.6928048031, -1.88705336, 3.164735986],
        {"m": 0.09555754471, "v": 0.3703950523},
    ),
    "AdagradOptimizer(0.125, 0.25)": ([0.8727648375, -1.945897442, 3.085298322], {"accumulator": 10.5471266}),
    "RMSPropOptimizer(0.125, 0.875, 0.5, SMALL)": (
        [0.8627444052, -1.826395807, 3.248257965],
        {"momentum": 0.1195250739, "rms": 0.5449136221},
    ),
    "RMSPropOptimizer(2.0**-6, 0.875, 0.5, SMALL, centered=True)": (
        [0.981383444, -1.973232615, 3.033746226],
        {"mg": 0.03533566407, "momentum": 0.01492650775, "rms": 0.5449136221},
    ),
    "AdadeltaOptimizer(1.0, 0.875, 2.0**-10)": (
        [0.8964078398, -2.07592345, 3.115857308],
        {"accum": 0.4757048633, "accum_update": 0.006559335962},
    ),
    "FtrlOptimizer(*FTRL, l2_shrinkage_regularization_strength=2.0**-4, beta=0.25)": (
        [0.3158444081, -0.1711641228, 2.372323139],
        {"accum": 10.4221266, "linear": -8.824258616},
    ),
    "FtrlOptimizer(0.125, -0.75, *FTRL[2:])": (
        [0.6080128051, -0.6026689678, 2.915730559],
        {"accum": 10.4221266, "linear": -28.26797071},
    ),
    "ProximalGradientDescentOptimizer(0.125, 0.0625, 0.125)": ([0.5053683108, -1.403977617, 2.439011663], {}),
    "ProximalGradientDescentOptimizer(0.125, 0.0, 0.125)": ([0.6386755374, -1.537284843, 2.57231889], {}),
    "ProximalAdagradOptimizer(0.125, 0.125, 0.0625, 0.125)": (
        [0.6701853225, -1.700317416, 2.901161016],
        {"accumulator": 10.4221266},
    ),
    "ProximalAdagradOptimizer(0.125, 0.125, 0.0, 0.125)": (
        [0.7412398297, -1.752772279, 2.927063603],
        {"accumulator": 10.4221266},
    ),
}
"""What TensorFlow 2.21.0 makes of them, and the first number of each slot: sessions of `tf.compat.v1`, resource
variables, CPU. Its proximal ones take float32 alone: these are of their operations, `tf.raw_ops.ResourceApply...`."""

OPTIONS_AND_DEFAULTS = {
    "Adam(0.1, *B, E, weight_decay=0.1, clipnorm=1.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4, "
    "loss_scale_factor=2.0)": [0.8216260169, -1.950758859, 2.950346355],
    "Adam(0.1, *B, E, weight_decay=0.1, global_clipnorm=1.5, gradient_accumulation_steps=2, loss_scale_factor=2.0)": [
        0.7553213328,
        -1.612374949,
        2.792792032,
    ],
    "SGD(0.1, clipvalue=0.5)": [0.9444036075, -2.006429182, 3.05769223],
    "Adam(0.1, *B, S)": [0.7224121391, -1.882470783, 3.142550672],
    "Adam(0.1, *B, S, amsgrad=True)": [0.7234369293, -1.882122673, 3.142977048],
    "AdamW(0.1, 0.2, *B, S)": [0.4784262442, -1.255230311, 2.100797625],
    "Adamax(0.1, *B, S)": [0.7400058492, -1.9456183, 3.13034757],
    "Nadam(0.1, *B, S)": [0.842411785, -1.996207137, 3.101275233],
    "Adagrad(0.1, 0.1, S)": [0.8892118941, -1.970846374, 3.068913594],
    "RMSprop(0.1, 0.9, epsilon=S)": [0.6256765584, -2.055569437, 3.2544781],
    "RMSprop(0.01, 0.9, 0.5, S, centered=True)": [0.9254792095, -1.997025264, 3.037830479],
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

PAPERS = {"DelayedNesterov(0.1, 0.9, 3)": [0.8452046774, -1.757215254, 3.161283656]}
"""What the algorithm of a paper gives in plain Python: arXiv 2401.09135, with c = 0."""

ALL = PAPERS | KERAS | FRONT_ENDS | {text: numbers for text, (numbers, _) in TENSORFLOW.items()} | OPTIONS_AND_DEFAULTS


def of_table(table, base, name, rate, **given):
    """An optimizer of a row; numbers that are not given are 0, and flags are off."""
    numbers = {name: 0.0 if allowed else False for name, allowed in table[name].numbers.items()}
    return rules.kind_of(table[name], name, base)(rate, **(numbers | given))


torch = partial(of_table, rules.TORCH, rules.TorchRule)
optax = partial(of_table, rules.OPTAX, rules.RuleOptimizer)


def made(text):
    """The optimizer of a text of this module."""
    module = v1 if "Optimizer(" in text else O
    return eval(text if text in FRONT_ENDS else f"module.{text}", {**globals(), "module": module})


@once(strategy=KINDS, text=ALL)
def test_an_optimizer_is_the_framework_s(strategy, text):
    """Names, arguments, defaults and numbers; of TensorFlow also each slot by its name, beside its variable."""
    w, expected = variable(strategy, START), np.array(ALL[text])
    with strategy.scope():
        optimizer = made(text)
    found = trained(strategy, optimizer, w)
    if text in OPTIONS_AND_DEFAULTS and "Optimizer(" in text:  # the way that was gone agrees to about five digits
        np.testing.assert_allclose(found - START, expected - START, rtol=1e-5)
        return
    # Keras rounds the momentum of averages to float32, and TensorFlow the powers of Adam's betas.
    np.testing.assert_allclose(found, expected, rtol=1e-8 if "ema" in text or "Adam" in text else 1e-9)
    slots = TENSORFLOW[text][1] if text in TENSORFLOW else {}
    for slot, first in slots.items():
        kept = optimizer.get_slot(w, slot)
        np.testing.assert_allclose(kept.numpy()[0], first, rtol=1e-9)
        assert kept.devices == w.devices
    assert text not in TENSORFLOW or optimizer.get_slot_names() == sorted(slots)


@pairwise(strategy=KINDS, text=KERAS | FRONT_ENDS, dtype=[np.float32, np.float16, ml_dtypes.bfloat16])
def test_each_dtype_is_near_the_numbers(strategy, text, dtype):
    """Within the roundings of the steps; slots of half precision variables are float32."""
    w, optimizer = variable(strategy, START.astype(dtype)), made(text)
    found = trained(strategy, optimizer, w)
    assert found.dtype == dtype
    room = (64 if dtype is np.float32 else 16) * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(found.astype(float), ALL[text], rtol=room, atol=room)
    assert {x.dtype for x in optimizer.variables if x.shape == (3,)} <= {np.dtype("float32")}


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
