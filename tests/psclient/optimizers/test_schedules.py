"""Schedules against their closed forms, and traced as on numbers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from psclient._src.tracing.recorder import Recording, trace
from psclient.optimizers import schedules as s
from psserver.programs.interpreter import run
from pswire.model.tensor import spec_of

STEPS = (0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 15, 20, 100)


def exponential(t, stairs=False):
    return 0.5 * 0.25 ** (t // 4 if stairs else t / 4)


def inverse(t, stairs=False):
    return 0.5 / (1 + 3 * (t // 4 if stairs else t / 4))


def cosine(t, steps=8, start=0.5, alpha=0.1):
    return start * ((1 - alpha) * 0.5 * (1 + math.cos(math.pi * min(t, steps) / steps)) + alpha)


def restarts(t, length=4, lower=1.0, t_mul=2, m_mul=0.5):
    while t >= length:
        t, length, lower = t - length, length * t_mul, lower * m_mul
    return 0.5 * (0.9 * lower * 0.5 * (1 + math.cos(math.pi * t / length)) + 0.1)


def polynomial(t):
    return (0.5 - 0.1) * (1 - min(t, 8) / 8) ** 2 + 0.1


def cycling(t):
    steps = 8 * max(1, math.ceil(t / 8))
    return (0.5 - 0.1) * (1 - t / steps) ** 2 + 0.1


CASES = {
    "constant": (s.Constant(0.5), lambda t: 0.5),
    "exponential": (s.ExponentialDecay(0.5, 4, 0.25), exponential),
    "exponential stairs": (s.ExponentialDecay(0.5, 4, 0.25, staircase=True), lambda t: exponential(t, True)),
    "inverse": (s.InverseTimeDecay(0.5, 4, 3), inverse),
    "inverse stairs": (s.InverseTimeDecay(0.5, 4, 3, True), lambda t: inverse(t, True)),
    "piecewise": (s.PiecewiseConstantDecay([2, 5], [3, 2, 1]), lambda t: 3 if t <= 2 else 2 if t <= 5 else 1),
    "polynomial": (s.PolynomialDecay(0.5, 8, 0.1, 2.0), polynomial),
    "polynomial cycle": (s.PolynomialDecay(0.5, 8, 0.1, 2.0, cycle=True), cycling),
    "cosine": (s.CosineDecay(0.5, 8, 0.1), cosine),
    "cosine warm": (
        s.CosineDecay(0.25, 8, 0.1, warmup_target=0.5, warmup_steps=4),
        lambda t: 0.25 + 0.25 * t / 4 if t < 4 else cosine(t - 4),
    ),
    "cosine target without steps": (s.CosineDecay(0.25, 8, 0.1, warmup_target=0.5), cosine),
    "cosine restarts": (s.CosineDecayRestarts(0.5, 4, 2.0, 0.5, 0.1), restarts),
    "cosine restarts alike": (s.CosineDecayRestarts(0.5, 4, 1.0, 0.5, 0.1), lambda t: restarts(t, t_mul=1)),
    "warm-up": (
        s.LinearWarmup(s.ExponentialDecay(0.5, 4, 0.25), 5, 0.1),
        lambda t: 0.1 + 0.4 * t / 5 if t < 5 else exponential(t - 5),
    ),
    "warm-up of a number": (s.LinearWarmup(0.5, 4), lambda t: 0.5 * min(t, 4) / 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_its_closed_form(name):
    """On numbers."""
    schedule, closed = CASES[name]
    assert [float(schedule(t)) for t in STEPS] == pytest.approx([closed(t) for t in STEPS], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_computed_where_the_count_is(name):
    """Traced on an int64 count and run as a program: float64, the same bits as on numbers."""
    schedule, _ = CASES[name]
    for t in STEPS:
        count, recording = np.array(t), Recording()
        found = trace(recording, schedule, (recording.value(spec_of(count), "count"),))
        inputs = [o if isinstance(o, np.ndarray) else count for o in found.origins]
        (rate,) = run(found.program, inputs, np)[1]
        assert np.asarray(rate).dtype == np.float64
        assert float(rate) == pytest.approx(float(schedule(t)), rel=1e-14)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: s.CosineDecay(0.1, 0), "decay_steps is 0, and must be more than 0"),
        (lambda: s.ExponentialDecay(0.1, -1, 0.5), "decay_steps is -1"),
        (lambda: s.CosineDecayRestarts(0.1, 0), "first_decay_steps is 0"),
        (lambda: s.LinearWarmup(0.1, 0), "warmup_steps is 0"),
        (lambda: s.ExponentialDecay(0.1, 1, -0.5), "decay_rate is -0.5, and must be at least 0"),
        (lambda: s.CosineDecayRestarts(0.1, 10, t_mul=0.5), "t_mul is 0.5, and must be at least 1"),
        (lambda: s.Constant(np.nan), "learning_rate is nan, and must be finite"),
        (lambda: s.PolynomialDecay(np.inf, 10), "initial_learning_rate is inf"),
        (lambda: s.PiecewiseConstantDecay([1], [0.1, np.nan]), "a value is nan"),
        (lambda: s.PiecewiseConstantDecay([1, 2], [1, 2]), "2 boundaries need 3 values, and not 2"),
        (lambda: s.PiecewiseConstantDecay([2, 1], [1, 2, 3]), "boundaries must increase"),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    """At once, by name and value."""
    with pytest.raises(ValueError, match=text):
        make()


def test_words_are_no_numbers():
    """Not even those that Python makes numbers of."""
    with pytest.raises(TypeError, match=r"initial_learning_rate is '0.1'; give a number"):
        s.CosineDecay("0.1", 10)


def test_a_schedule_of_ones_own_says_what_it_has_to_do():
    """The base computes nothing."""
    with pytest.raises(NotImplementedError):
        s.LearningRateSchedule()(0)


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_made_of_its_config(name):
    """Through JSON, a schedule within another included; and that of Keras has a name besides."""
    schedule, _ = CASES[name]
    config = json.loads(json.dumps(schedule.get_config()))
    for given in (config, {**config, "name": "Keras"}):
        made = type(schedule).from_config(given)
        assert (type(made), made.get_config()) == (type(schedule), config)
        assert [float(made(t)) for t in STEPS] == [float(schedule(t)) for t in STEPS]


def test_a_config_has_the_arguments_by_name():
    """With the names of Keras, and the defaults of those that were not given."""
    assert s.CosineDecay(0.5, 8).get_config() == {
        "initial_learning_rate": 0.5,
        "decay_steps": 8.0,
        "alpha": 0.0,
        "warmup_target": None,
        "warmup_steps": 0.0,
    }
    inner = {"class_name": "PiecewiseConstantDecay", "config": {"boundaries": [2.0], "values": [1.0, 0.5]}}
    warmup = s.LinearWarmup(s.PiecewiseConstantDecay([2], [1, 0.5]), 3)
    assert warmup.get_config() == {"schedule": inner, "warmup_steps": 3.0, "initial_learning_rate": 0.0}
