"""Losses, first values and schedules, those of Keras; configs of optimizers, which JSON can hold."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing.recorder import Recording, trace
from psclient.optimizers import schedules as s
from psserver.programs.interpreter import run
from pswire.model import tables
from pswire.model.tensor import spec_of
from tests.kit.strategies import refused

L = ps.losses
LOGITS = np.array([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0], [-1.5, 0.25, 0.75], [40.0, -40.0, 0.0]])
SHARES = np.array([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.3, 0.3, 0.6], [0.05, 0.9, 0.05]])
"""The third row adds up to more than 1."""
SINGLE = np.array([[0.9, 0.1, 0.5], [0.0, 1.0, 0.2], [0.3, 0.6, 0.7], [0.5, 0.5, 0.01]])
LABELS = np.array([[1.0, 0, 0], [0.25, 0.5, 0.25], [0, 0, 1], [0, 1, 0]])
CLASSES = np.array([0, 1, 2, 1])

CASES = {
    "mse": lambda: L.mean_squared_error(LABELS, LOGITS),
    "bce": lambda: L.binary_crossentropy(LABELS, SINGLE),
    "bce logits": lambda: L.binary_crossentropy(LABELS, LOGITS, from_logits=True),
    "bce smoothed": lambda: L.binary_crossentropy(LABELS, LOGITS, from_logits=True, label_smoothing=0.25),
    "cce": lambda: L.categorical_crossentropy(LABELS, SHARES),
    "cce logits": lambda: L.categorical_crossentropy(LABELS, LOGITS, from_logits=True),
    "cce smoothed": lambda: L.categorical_crossentropy(LABELS, SHARES, label_smoothing=0.25),
    "scce": lambda: L.sparse_categorical_crossentropy(CLASSES, SHARES),
    "scce logits": lambda: L.sparse_categorical_crossentropy(CLASSES, LOGITS, from_logits=True),
}
KERAS = {
    "mse": [0.75, 3.7916666666666665, 0.7916666666666666, 1093.6666666666667],
    "bce": [0.3012894039585326, 4.2194296683587025, 0.5432135399172067, 0.465448232324464],
    "bce logits": [0.471422227580434, 0.9562208477255533, 0.4714079013254986, 26.897715726853317],
    "bce smoothed": [0.5755888942471007, 0.9978875143922199, 0.554741234658832, 23.56438239351998],
    "cce": [0.3566749439387323, 8.059047875479163, 0.6931471805599453, 0.10536051565782628],
    "cce logits": [0.24131129665715703, 2.0549852353771474, 0.5376213214337139, 80.0],
    "cce smoothed": [0.6232310370679557, 8.730635190102426, 0.8086717106532695, 0.5870891419738536],
    "scce": [0.35667494393873256, 2.0000000010078654e-07, 0.6931471805599453, 0.10536051565782635],
    "scce logits": [0.24131129665715703, 0.05498523537714723, 0.5376213214337139, 80.0],
}
"""What the functions of `keras.losses` of these names give: Keras 3.15.1 on TensorFlow 2.21.0, floatx float64."""


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_keras(name):
    np.testing.assert_allclose(CASES[name](), KERAS[name], rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_great_logits_do_not_overflow(dtype):
    """The loss is as great as the logits are; no warning, which would be an error here."""
    logits = np.array([[30000.0, -30000.0], [-30000.0, 30000.0]], dtype)
    great = 60000 if dtype is not ml_dtypes.bfloat16 else 2 * float(logits[0, 0])
    with np.errstate(all="raise", under="ignore"):
        sparse = L.sparse_categorical_crossentropy(np.array([0, 0]), logits, from_logits=True)
        dense = L.categorical_crossentropy(np.array([[1, 0], [1, 0]]), logits, from_logits=True)
        binary = L.binary_crossentropy(np.array([[1, 0], [1, 0]]), logits, from_logits=True)
    for found, expected in ((sparse, great), (dense, great), (binary, great / 2)):
        assert found.dtype == np.float32
        assert found.tolist() == [0.0, expected]


def test_certain_predictions():
    """Of 0 and 1 as if they were 1e-7 away; a class that is ruled out costs nothing unless it is the label."""
    certain = np.array([[1.0, 0.0]])
    wrong = np.array([[0.0, 1.0]])
    for loss in (L.binary_crossentropy, L.categorical_crossentropy):
        assert float(loss(wrong, certain)[0]) == pytest.approx(-np.log(1e-7))
        assert float(loss(certain, certain)[0]) == pytest.approx(1e-7)
    assert float(L.sparse_categorical_crossentropy([1], certain)[0]) == pytest.approx(-np.log(1e-7), rel=1e-6)
    logits = np.array([[0.0, 0.0, -np.inf]])
    for found in (
        L.categorical_crossentropy(np.array([[1.0, 0.0, 0.0]]), logits, from_logits=True),
        L.sparse_categorical_crossentropy(np.array([0]), logits, from_logits=True),
    ):
        assert float(found[0]) == pytest.approx(np.log(2))
    assert L.sparse_categorical_crossentropy(np.array([2]), logits, from_logits=True).tolist() == [np.inf]


def test_labels_may_lack_the_last_dimension():
    """Where predictions have one of size 1; there may be any number of dimensions before it, and no examples."""
    np.testing.assert_array_equal(L.mean_squared_error([1.0, 2.0], [[3.0], [5.0]]), [4.0, 9.0])
    np.testing.assert_array_equal(L.mean_squared_error([[1.0], [2.0]], [3.0, 5.0]), [4.0, 9.0])
    deep = L.mean_squared_error(np.ones((2, 3, 1)), np.zeros((2, 3)))
    assert deep.tolist() == [1.0, 1.0]
    labels = CLASSES.astype("float32")[:, None]
    np.testing.assert_allclose(L.sparse_categorical_crossentropy(labels, SHARES), KERAS["scce"], rtol=1e-9)
    for shape in ((2, 2), (4, 1), (1, 2, 2)):
        found = L.sparse_categorical_crossentropy(CLASSES.reshape(shape), LOGITS.reshape(*shape, 3), from_logits=True)
        np.testing.assert_allclose(found, np.reshape(KERAS["scce logits"], shape))
    assert L.sparse_categorical_crossentropy(np.zeros(0, int), np.zeros((0, 3))).shape == (0,)
    for loss in (L.mean_squared_error, L.binary_crossentropy, L.categorical_crossentropy):
        assert loss(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0,)
    np.testing.assert_allclose(L.mean_squared_error(ps.Variable(LABELS), ps.Variable(LOGITS)), KERAS["mse"])


def test_shapes_that_do_not_fit_are_refused():
    """And never broadcast: the error has both."""
    for loss in (L.mean_squared_error, L.binary_crossentropy, L.categorical_crossentropy):
        with pytest.raises(ValueError, match=r"labels of shape \(3,\) and predictions of shape \(3, 3\) differ"):
            loss(np.ones(3), np.ones((3, 3)))
        refused(ValueError, "but got a number", lambda loss=loss: loss(1.0, 0.5))
    for labels in (np.zeros(3, int), np.zeros((4, 3), int), 0):
        with pytest.raises(ValueError, match=r"do not match predictions of shape \(4, 3\); pass one class number"):
            L.sparse_categorical_crossentropy(labels, LOGITS)
    refused(ValueError, r"predictions of shape \(\)", lambda: L.sparse_categorical_crossentropy(0, 0.5))


@pytest.mark.parametrize("wrong", [-1, 3, 0.5, np.nan])
def test_a_label_is_the_number_of_a_class(wrong):
    """Anything else is refused, and would be another class's loss; so is a smoothing that is no fraction."""
    with pytest.raises(ValueError, match="not an integer from 0 to 2, but there are 3 classes"):
        L.sparse_categorical_crossentropy(np.array([0, 1, 2, wrong]), LOGITS, from_logits=True)
    for loss in (L.binary_crossentropy, L.categorical_crossentropy):
        for smoothing in (-0.1, 1.5, np.nan):
            with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}"):
                loss(LABELS, SHARES, label_smoothing=smoothing)


I = ps.initializers  # noqa: E741
RANDOM = I.RandomUniform, I.RandomNormal, I.TruncatedNormal
WIRE = {
    I.Zeros(): tables.Zeros(),
    I.Ones(): tables.Constant(1.0),
    I.Constant(3.0): tables.Constant(3.0),
    I.RandomUniform(-1, 1, 7): tables.Uniform(-1, 1),
    I.RandomNormal(1, 2, 7): tables.Normal(1, 2),
    I.TruncatedNormal(1, 2, 7): tables.TruncatedNormal(1, 2),
}
"""What servers are told of each."""


@pytest.mark.parametrize("initializer", WIRE, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", np.float64, np.float16, ml_dtypes.bfloat16])
def test_values_are_the_same_each_time(initializer, dtype):
    """In each dtype of floats, as an ordinary array of their own; in other dtypes the user has to choose a constant."""
    first, second = initializer((3, 4), dtype), initializer((3, 4), dtype)
    assert (first.dtype, first.shape, first.flags.writeable) == (dtype, (3, 4), True)
    assert first.tobytes() == second.tobytes()
    assert first is not second
    assert initializer._of_rows() == WIRE[initializer]
    if isinstance(initializer, RANDOM):
        refused(TypeError, "float32", lambda: initializer((2,), "int32"))
        refused(TypeError, "is not supported for variables", lambda: initializer((2,), "datetime64[s]"))


def test_numbers_that_cannot_be():
    nan, infinite = float("nan"), float("inf")
    refused(ValueError, "", lambda: I.Constant(nan), lambda: I.TruncatedNormal(infinite))
    refused(ValueError, "", lambda: I.RandomUniform(1, 0), lambda: I.RandomNormal(0, -1))
    refused(ValueError, "", lambda: I.RandomUniform(seed=-1), lambda: I.RandomNormal(seed=1.5))
    refused(ValueError, "", lambda: I.TruncatedNormal(seed=True))


@pytest.mark.parametrize("kind", RANDOM)
def test_another_seed_gives_other_values(kind):
    """And equal ones are equal initializers."""
    assert kind(seed=1)((9,)).tolist() != kind(seed=2)((9,)).tolist()
    assert kind(seed=1) == kind(seed=1)
    assert kind(seed=1) != kind(seed=2)


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation", "least", "greatest"),
    [
        (I.RandomUniform(2, 4, 5), 3, 3**-0.5, 2, 4),
        (I.RandomNormal(1, 2, 5), 1, 2, -12, 14),
        (I.TruncatedNormal(1, 2, 5), 1, 2 * 0.8796, -3, 5),
    ],
    ids=repr,
)
def test_distributions(initializer, mean, deviation, least, greatest):
    found = initializer((100, 1000), "float64")
    assert found.mean() == pytest.approx(mean, abs=0.03)
    assert found.std() == pytest.approx(deviation, rel=0.02)
    assert least <= found.min() < found.max() <= greatest


def test_defaults_are_keras():
    """Names and numbers; a variable begins with an initializer's array, or with a function that gives it."""
    assert I.RandomUniform() == I.RandomUniform(minval=-0.05, maxval=0.05, seed=0)
    assert I.RandomNormal() == I.RandomNormal(mean=0.0, stddev=0.05, seed=0)
    assert I.TruncatedNormal() == I.TruncatedNormal(mean=0.0, stddev=0.05, seed=0)
    assert I.Constant(value=2.0)(3).tolist() == [2.0] * 3
    assert I.Ones()((), "int8").tolist() == 1
    init = I.RandomNormal(seed=3)
    assert ps.Variable(init((2, 2))).numpy().tolist() == init((2, 2)).tolist()
    assert ps.Variable(lambda: init((2, 2))).numpy().tolist() == init((2, 2)).tolist()


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


SCHEDULES = {
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_its_closed_form(name):
    """On numbers; traced on an int64 count and run as a program, in float64 and the same bits; and made of its config,
    through JSON, a schedule within another included, where that of Keras has a name besides."""
    schedule, closed = SCHEDULES[name]
    rates = [float(schedule(t)) for t in STEPS]
    assert rates == pytest.approx([closed(t) for t in STEPS], rel=1e-12, abs=1e-15)
    for t, expected in zip(STEPS, rates, strict=True):
        count, recording = np.array(t), Recording()
        found = trace(recording, schedule, (recording.value(spec_of(count), "count"),))
        inputs = [o if isinstance(o, np.ndarray) else count for o in found.origins]
        (rate,) = run(found.program, inputs, np)[1]
        assert np.asarray(rate).dtype == np.float64
        assert float(rate) == pytest.approx(expected, rel=1e-14)
    config = json.loads(json.dumps(schedule.get_config()))
    for given in (config, {**config, "name": "Keras"}):
        made = type(schedule).from_config(given)
        assert (type(made), made.get_config()) == (type(schedule), config)
        assert [float(made(t)) for t in STEPS] == rates


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
        (lambda: s.PiecewiseConstantDecay([1, 2], [1, 2]), "2 boundaries need 3 values, not 2"),
        (lambda: s.PiecewiseConstantDecay([2, 1], [1, 2, 3]), "boundaries must increase"),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    """At once, by name and value; words are no numbers, not even those that Python makes numbers of."""
    refused(ValueError, text, lambda: make())
    refused(TypeError, r"initial_learning_rate is '0.1'; use a number", lambda: s.CosineDecay("0.1", 10))
    refused(NotImplementedError, "", lambda: s.LearningRateSchedule()(0))


o = ps.optimizers

MADE = {
    "SGD": lambda: o.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=1.0),
    "SGD without": lambda: o.SGD(np.float32(0.5), name="mine"),
    "Lion": lambda: o.Lion(s.CosineDecay(0.1, 8), beta_1=0.5),
    "Adam": lambda: o.Adam(0.01, 0.8, 0.9, 1e-5, amsgrad=True, use_ema=True, ema_overwrite_frequency=3),
    "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=2),
    "Adamax": lambda: o.Adamax(s.LinearWarmup(s.ExponentialDecay(0.5, 2, 0.5), 3)),
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
    """And its values: None for what is not given; with what was changed since, without a schedule's steps."""
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
    rate = o.SGD(s.Constant(0.25)).get_config()["learning_rate"]
    assert rate == {"class_name": "Constant", "config": {"learning_rate": 0.25}}
    scale = o.SGD(loss_scale_factor=o.DynamicLossScale()).get_config()["loss_scale_factor"]
    numbers = {"initial_scale": 32768.0, "dynamic_growth_steps": 2000}
    assert scale == {"class_name": "DynamicLossScale", "config": numbers}
    optimizer = o.SGD(s.ExponentialDecay(1.0, 1, 0.5))
    before = optimizer.get_config()
    steps(optimizer)
    assert optimizer.get_config() == before
    optimizer.learning_rate, optimizer.clipnorm = 0.125, 3
    assert optimizer.get_config() == before | {"learning_rate": 0.125, "clipnorm": 3.0}
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


class Halving(s.LearningRateSchedule):
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
    with pytest.raises(ValueError, match=r"class 'Halving' is not known; pass it as custom_objects=\{'Halving'"):
        Mine.from_config(config)


def test_what_has_no_config_is_told():
    """A function, an argument that is not kept; and arguments that a constructor does not take."""
    said = "learning_rate is <function .*but a config can contain only numbers and strings"
    refused(ValueError, said, o.SGD(lambda: 0.5).get_config)
    said = "Renamed does not store its argument 'exponent' as an attribute of that name"
    refused(NotImplementedError, said, Renamed(3).get_config)
    refused(TypeError, "unexpected keyword argument", lambda: o.SGD.from_config({"learning_rat": 0.5}))
    refused(ValueError, "momentum is 7", lambda: o.SGD.from_config({"momentum": 7}))
