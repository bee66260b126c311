"""Optimizers are made of their configs, which JSON can hold."""

from __future__ import annotations

import json

import numpy as np
import pytest

import psclient as ps
from psclient.optimizers import schedules

o = ps.optimizers

MADE = {
    "SGD": lambda: o.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=1.0),
    "SGD without": lambda: o.SGD(np.float32(0.5), name="mine"),
    "Lion": lambda: o.Lion(schedules.CosineDecay(0.1, 8), beta_1=0.5),
    "Adam": lambda: o.Adam(0.01, 0.8, 0.9, 1e-5, amsgrad=True, use_ema=True, ema_overwrite_frequency=3),
    "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=2),
    "Adamax": lambda: o.Adamax(schedules.LinearWarmup(schedules.ExponentialDecay(0.5, 2, 0.5), 3)),
    "Nadam": lambda: o.Nadam(global_clipnorm=2.0),
    "Lamb": lambda: o.Lamb(clipvalue=0.25, loss_scale_factor=4.0),
    "Adagrad": lambda: o.Adagrad(0.1, 0.2, 1e-3),
    "Adadelta": lambda: o.Adadelta(1.0, 0.9),
    "RMSprop": lambda: o.RMSprop(0.1, 0.8, 0.5, 1e-4, centered=True),
    "Ftrl": lambda: o.Ftrl(0.1, -0.4, 0.2, 0.01, 0.02, 0.03, 0.04),
    "scaled": lambda: o.SGD(0.1, loss_scale_factor=o.DynamicLossScale(64.0, 5)),
}


def steps(optimizer):
    """What a variable is after some steps, and the names of what the optimizer keeps."""
    v = ps.Variable([1.0, -2.0, 0.5])
    for step in range(5):
        optimizer.apply_gradients([(np.float32([0.5, step, -3.0]), v)])
    return v.numpy().tolist(), len(optimizer.variables), optimizer.learning_rate


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_is_made_of_its_config(name):
    """Through JSON: the same class, the same arguments, the same steps."""
    optimizer = MADE[name]()
    config = json.loads(json.dumps(optimizer.get_config()))
    made = type(optimizer).from_config(config)
    assert (type(made), made.get_config()) == (type(optimizer), config)
    assert steps(made) == steps(optimizer)


def test_a_config_has_the_names_of_keras():
    """And its values: None for what is not given; a schedule with the name of its class."""
    assert o.Adam(0.5, name="a").get_config() == {
        "name": "a",
        "learning_rate": 0.5,
        "weight_decay": None,
        "clipnorm": None,
        "global_clipnorm": None,
        "clipvalue": None,
        "use_ema": False,
        "ema_momentum": 0.99,
        "ema_overwrite_frequency": None,
        "loss_scale_factor": None,
        "gradient_accumulation_steps": None,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "amsgrad": False,
    }
    rate = o.SGD(schedules.Constant(0.25)).get_config()["learning_rate"]
    assert rate == {"class_name": "Constant", "config": {"learning_rate": 0.25}}
    scale = o.SGD(loss_scale_factor=o.DynamicLossScale()).get_config()["loss_scale_factor"]
    assert scale == {
        "class_name": "DynamicLossScale",
        "config": {"initial_scale": 32768.0, "dynamic_growth_steps": 2000},
    }


def test_a_config_is_as_of_now():
    """What was changed since is in it, and a schedule's steps are not."""
    optimizer = o.SGD(schedules.ExponentialDecay(1.0, 1, 0.5))
    before = optimizer.get_config()
    steps(optimizer)
    assert optimizer.get_config() == before
    optimizer.learning_rate, optimizer.clipnorm = 0.125, 3
    assert optimizer.get_config() == before | {"learning_rate": 0.125, "clipnorm": 3.0}


class Halving(schedules.LearningRateSchedule):
    """A schedule of one's own."""

    def __init__(self, start, name="halving"):
        self.start, self.name = start, name

    def __call__(self, step):
        return self.start * 0.5**step


class Mine(o.Optimizer):
    """An optimizer of one's own."""

    def __init__(self, learning_rate=0.1, *, power=2, **options):
        super().__init__(learning_rate, **options)
        self.power = power

    def update(self, v, gradient, iterations):
        v.assign_sub(self.learning_rate * gradient**self.power)


class Renamed(Mine):
    """One that keeps an argument by another name."""

    def __init__(self, exponent, **options):
        super().__init__(power=exponent, **options)


def test_classes_of_ones_own_have_configs():
    """Of an optimizer by what its constructor takes; of a schedule the class has to be given."""
    optimizer = Mine(Halving(0.5), power=3, clipvalue=1.0)
    config = json.loads(json.dumps(optimizer.get_config()))
    made = Mine.from_config(config, custom_objects={"Halving": Halving})
    assert made.get_config() == config
    assert (config["power"], config["learning_rate"]["config"]) == (3, {"start": 0.5, "name": "halving"})
    assert steps(made) == steps(optimizer)
    with pytest.raises(ValueError, match=r"class 'Halving' is not known here; give it in custom_objects=\{'Halving'"):
        Mine.from_config(config)


def test_what_has_no_config_is_told():
    """A function, an argument that is not kept; and arguments that a constructor does not take."""
    with pytest.raises(ValueError, match=r"learning_rate is <function .*, and a config has numbers and words only"):
        o.SGD(lambda: 0.5).get_config()
    with pytest.raises(NotImplementedError, match="Renamed does not keep its argument 'exponent' under that name"):
        Renamed(3).get_config()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        o.SGD.from_config({"learning_rat": 0.5})
    with pytest.raises(ValueError, match="momentum is 7"):
        o.SGD.from_config({"momentum": 7})
