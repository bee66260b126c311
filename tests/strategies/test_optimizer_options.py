"""What all optimizers have in common: clipping, decay, averages, accumulation, loss scales, schedules, extension; what
is wrong with one, with a schedule or a gradient is said: where it is, and what to write instead."""

from __future__ import annotations

import re

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing import update_function
from psclient._src.tracing.hyperparameters import Configured
from psclient.compat.v1 import train
from psclient.optimizers import schedules
from tests.kit.cases import once
from tests.kit.strategies import USUAL, in_replicas, kind_of, kinds, refused, replicas, variable

O = ps.optimizers  # noqa: E741
SGD, Optimizer, Schedule = O.SGD, O.Optimizer, schedules.LearningRateSchedule


pytestmark = kinds("mirrored-2", "servers-1x2", soak=USUAL)


def apply(strategy, optimizer, *pairs):
    """One call by all replicas, whose gradients add up to those given."""
    count = replicas(strategy)
    shares = [(np.asarray(g, v.dtype) / v.dtype.type(count), v) for g, v in pairs]
    in_replicas(strategy, lambda _: optimizer.apply_gradients(shares))


def value(v):
    return v.numpy().tolist()


RATES = [[[-0.5]], [[-1.25]], [[-2.25]], [[-2.75]], [[-3.0]]]
OVERWRITING = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
OPTIONS = {
    "clipvalue": ({"clipvalue": 2.0}, [[-3.0, 1.0, 5.0]], [[[2.0, -1.0, -2.0]]]),
    "clipnorm": ({"clipnorm": 2.5}, [[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]], [[[-1.5, -2.0], [-1.0, 0.0], [0.0, 0.0]]]),
    "global_clipnorm": ({"global_clipnorm": 6.5}, [[3.0, 4.0], [12.0]], [[[-1.5, -2.0], [-6.0]]]),
    "global_clipnorm of less": ({"global_clipnorm": 6.5}, [[0.5, 0.0], [0.0]], [[[-0.5, 0.0], [0.0]]]),
    "global_clipnorm, not finite": ({"global_clipnorm": 1.0}, [[3.0, 4.0], [np.inf]], [[[np.nan] * 2, [np.nan]]]),
    "loss_scale_factor": ({"loss_scale_factor": 8.0}, [[8.0, 16.0]], [[[-1.0, -2.0]]]),
    "averages that overwrite": (OVERWRITING, [[1.0]], [[[-1.0]], [[-1.5]], [[-2.5]], [[-2.75]]]),
    "a schedule": (
        {"learning_rate": schedules.LinearWarmup(schedules.ExponentialDecay(1, 2, 0.25), 2, 0.5)},
        [[1.0]],
        RATES,
    ),
    "a function": ({"learning_rate": lambda: iter([0.5, 0.75, 1.0, 0.5, 0.25]).__next__}, [[1.0]], RATES),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_that_of_its_options(strategy, name):
    """Clipped element by element in both directions, by each norm, or by that of all, which keeps proportions; as in
    Keras one gradient without a norm leaves no variable as if nothing were wrong. Averages overwrite the weights after
    every so many steps. Of a schedule the first step has the rate of 0, and a function is asked for each."""
    options, gradients, expected = OPTIONS[name]
    rate = options.get("learning_rate", 1.0)
    optimizer = SGD(**options | {"learning_rate": rate() if name == "a function" else rate})
    variables = [variable(strategy, np.zeros(len(gradient))) for gradient in gradients]
    for after in expected:
        with np.errstate(all="ignore"):
            apply(strategy, optimizer, *zip(gradients, variables, strict=True))
        for w, values in zip(variables, after, strict=True):
            np.testing.assert_array_equal(w.numpy(), values)


def test_weights_decay_before_the_step(strategy):
    """By the decay times the learning rate; not those that are left out, by themselves or by name."""
    w, kept, named = (variable(strategy, np.ones(2), name=name) for name in ("w_decays", "w_stays", "bias_stays"))
    optimizer = SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([kept], ["^bias"])
    apply(strategy, optimizer, *(([1.0, 1.0], x) for x in (w, kept, named)))
    assert [value(x) for x in (w, kept, named)] == [[0.25] * 2, [0.5] * 2, [0.5] * 2]


def test_averages_follow_the_weights(strategy):
    """The first step sets them; they can be read, and given to the variables. A call without a step changes
    none."""
    w, optimizer = variable(strategy, np.zeros(2)), SGD(1.0, use_ema=True, ema_momentum=0.5)
    for expected in (-1.0, -1.5, -2.25):
        apply(strategy, optimizer, ([1.0, 1.0], w))
        assert value(optimizer.average(w)) == [expected] * 2
    assert value(w) == [-3.0] * 2
    optimizer.finalize_variable_values([w])
    assert value(w) == [-2.25] * 2
    refused(RuntimeError, "use_ema=True", lambda: SGD().average(w))
    SGD().finalize_variable_values([w])
    assert value(w) == [-2.25] * 2
    u, slow = variable(strategy, np.zeros(1)), SGD(1.0, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2)
    for _ in range(5):  # calls, of which the second and the fourth make a step
        apply(strategy, slow, ([1.0], u))
    assert (value(u), value(slow.average(u))) == ([-2.0], [-1.5])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_accumulated_gradients_make_one_step_of_a_big_batch(strategy, dtype):
    """Nothing changes before the last; the count is of steps."""
    w, u = variable(strategy, np.ones(2, dtype)), variable(strategy, np.ones(2, dtype))
    options = {"weight_decay": 0.1, "use_ema": True}
    piecewise = O.Adam(0.1, gradient_accumulation_steps=3, **options)
    whole = O.Adam(0.1, **options)
    for _ in range(2):
        before = value(w)
        for gradient in ([1.0, 4.0], [2.0, 5.0]):
            apply(strategy, piecewise, (gradient, w))
            assert value(w) == before
        apply(strategy, piecewise, ([6.0, 6.0], w))
        apply(strategy, whole, ([3.0, 5.0], u))
        np.testing.assert_allclose(w.numpy(), u.numpy(), rtol=1e-6)
        np.testing.assert_allclose(piecewise.average(w).numpy(), whole.average(u).numpy(), rtol=1e-6)
    assert int(piecewise.iterations) == int(whole.iterations) == 2


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_steps_that_are_not_finite_are_excluded(strategy, bad):
    """Of all variables, slots, averages and counts; they are counted apart, and the scale falls and rises."""
    w, u = variable(strategy, np.ones(2, "float16")), variable(strategy, np.ones(3))
    scale = O.DynamicLossScale(4.0, dynamic_growth_steps=2)
    optimizer = O.Adam(0.1, loss_scale_factor=scale, use_ema=True, weight_decay=0.1)
    assert [x.scale_loss(0.5) for x in (optimizer, SGD(loss_scale_factor=8.0), SGD())] == [2.0, 4.0, 0.5]

    def state():
        kept = {"loss_scale", "good_steps", "skipped_steps"}
        found = [x for x in optimizer.variables if re.sub(r"_\d+$", "", x.name.rpartition("/")[2]) not in kept]
        return [value(x) for x in (w, u, *found)]

    def counts():
        return [float(optimizer.loss_scale), int(optimizer.skipped_steps), int(optimizer.iterations)]

    apply(strategy, optimizer, ([4.0, 4.0], w), ([4.0] * 3, u))
    assert counts() == [4.0, 0, 1]
    before = state()
    apply(strategy, optimizer, ([4.0, 4.0], w), ([4.0, bad, 4.0], u))
    assert state() == before
    assert counts() == [2.0, 1, 1]
    assert optimizer.scale_loss(1.0) == 2.0
    for expected in ([2.0, 1, 2], [4.0, 1, 3], [4.0, 1, 4]):
        apply(strategy, optimizer, ([2.0, 2.0], w), ([2.0] * 3, u))
        assert counts() == expected
    with pytest.raises(RuntimeError, match="loss_scale_factor=DynamicLossScale"):
        _ = SGD().skipped_steps


def test_options_work_together(strategy):
    """Scale, accumulation, the norm of all and a schedule: a call that is not finite is left out, and no other."""
    w, u = variable(strategy, np.zeros(2)), variable(strategy, np.zeros(1))
    optimizer = SGD(
        schedules.PiecewiseConstantDecay([1], [1.0, 0.5]),
        global_clipnorm=6.5,
        gradient_accumulation_steps=2,
        loss_scale_factor=O.DynamicLossScale(2.0, 1000),
    )
    for number, (g, steps) in enumerate([(1.0, 0), (np.inf, 0), (0.5, 1), (np.nan, 1), (0.25, 1), (0.25, 2)]):
        # 3, 4 and 12 in each step, multiplied by the scale of the call
        apply(strategy, optimizer, ([6.0 * g, 8.0 * g], w), ([24.0 * g], u))
        assert int(optimizer.iterations) == steps, f"after call {number}"
    assert [value(w), value(u)] == [[-2.25 * 2 / 3 - 0.75, -2.0 - 1.0], [-6.0 - 3.0]]
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (0.5, 2)


@pytest.mark.parametrize(("given", "error", "words"), [(None, TypeError, "number"), (np.nan, ValueError, "finite")])
def test_a_function_gives_a_number(strategy, given, error, words):
    """As a learning rate; what it gave instead is told."""
    optimizer, pair = SGD(lambda: given), ([1.0] * 3, variable(strategy))
    says = f"function passed as learning_rate returned {given}; it must return .*{words}"
    refused(error, says, lambda: optimizer.learning_rate, lambda: apply(strategy, optimizer, pair))


def test_the_rate_of_now_can_be_read(strategy):
    """A number, whatever it was given as; of a schedule that of the next step."""
    w = variable(strategy, np.zeros(1))
    rate = schedules.PiecewiseConstantDecay([2], [1.0, 0.5])
    whole, piecewise = SGD(rate), SGD(rate, gradient_accumulation_steps=2)
    assert [x.learning_rate for x in (whole, piecewise, SGD(lambda: 0.25), SGD(2))] == [1.0, 1.0, 0.25, 2.0]
    seen = []
    for _ in range(4):
        for optimizer in (whole, piecewise):
            apply(strategy, optimizer, ([1.0], w))
            seen.append(optimizer.learning_rate)
    assert seen == [1.0] * 4 + [0.5] * 4
    whole.learning_rate = 3
    assert whole.learning_rate == 3.0


# ---- What may be changed later ----

CHANGES = {"learning_rate": (1.0, 2), "weight_decay": (0.5, np.float32(0.25)), "loss_scale_factor": (2.0, 4)}
CHANGES |= dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm"), (2.0, 1))
CHANGES |= {"ema_momentum": (0.5, 0.25), "momentum": (0.5, 0.25), "ema_overwrite_frequency": (3, 2)}


@once(strategy=["mirrored-2", "servers-1x2"], name=CHANGES)
def test_a_number_may_be_changed_later(strategy, calls_of, name):
    """The next steps are those of an optimizer that was created with it, and by the same program."""
    before, after = CHANGES[name]
    averages = {"use_ema": True} if name.startswith("ema") else {}
    traced = calls_of("trace", update_function)

    def trained(first, then):
        w = variable(strategy, np.full(5, 2.0))
        optimizer = SGD(**({"momentum": 0.25} | averages | {name: first, "learning_rate": 0.0}))
        apply(strategy, optimizer, (np.full(5, 3.0), w))  # A step of no length.
        optimizer.learning_rate = 1.0
        setattr(optimizer, name, then)
        count = len(traced)
        for _ in range(3):
            apply(strategy, optimizer, (np.full(5, 3.0), w))
        assert len(traced) == count
        return [x.numpy().tolist() for x in (w, *optimizer.variables)]

    assert trained(before, after) == trained(after, after)
    assert trained(before, after) != trained(before, before)


def test_what_says_which_state_there_is_stays(strategy):
    """A change that would need other state is refused by name; one that does not is nothing."""
    w = variable(strategy)
    scaled = SGD(loss_scale_factor=O.DynamicLossScale())
    cases = [
        (SGD(), "gradient_accumulation_steps", 2, "is None and cannot be changed"),
        (SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps", 3, "is 2 and cannot be changed"),
        (SGD(), "name", "other", "is 'sgd' and cannot be changed"),
        (SGD(), "loss_scale_factor", O.DynamicLossScale(), "is None and cannot be changed"),
        (scaled, "loss_scale_factor", None, "cannot be changed"),
        (SGD(), "use_ema", True, "is False and cannot be changed"),
        (SGD(), "slots", ("m",), r"is \(\) and cannot be changed"),
        (SGD(), "momentum", 0.5, "'momentum', but this SGD was created without"),
        (O.Adam(), "amsgrad", True, "'v_hat', but this Adam was created without"),
        (O.RMSprop(), "centered", True, "'mean', but this RMSprop was created without"),
    ]
    for optimizer, name, other, text in cases:
        optimizer.build([w])
        setattr(optimizer, name, vars(optimizer)[name])
        with pytest.raises(AttributeError, match=f"{name}.*{text}.*create another one"):
            setattr(optimizer, name, other)
        apply(strategy, optimizer, (np.ones(3), w))
    before_it_is_built = SGD()
    before_it_is_built.use_ema = True
    apply(strategy, before_it_is_built, (np.ones(3), w))
    assert before_it_is_built.average(w).shape == (3,)


@pytest.mark.parametrize(
    ("make", "name", "without"),
    [
        (lambda **o: O.RMSprop(0.1, **({"momentum": 0.5} | o)), "centered", False),
        (lambda **o: O.RMSprop(0.1, **({"centered": True} | o)), "momentum", 0.0),
        (lambda **o: O.Adam(0.1, **o), "amsgrad", False),
        (lambda **o: SGD(0.1, **o), "momentum", 0.0),
    ],
)
def test_a_slot_may_rest(strategy, make, name, without):
    """What a slot was for can be turned off: the steps are those of an optimizer that never had it."""
    found = []
    for given in (0.5 if name == "momentum" else True, without):
        w, optimizer = variable(strategy), make(**{name: given})
        optimizer.build([w])
        setattr(optimizer, name, without)
        for gradient in (2.0, 1.0):
            apply(strategy, optimizer, (np.full(3, gradient), w))
        found.append((value(w), len(optimizer.variables)))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1] + 1


OWN_RANGES = {
    SGD: {"momentum": (-1, 2.0)},
    O.Lion: {"beta_1": (0, 2.0), "beta_2": (-1.0,)},
    O.Adam: {"beta_1": (2.0,), "beta_2": (-1.0, 1), "epsilon": (-1.0, np.nan)},
    O.Nadam: {"beta_1": (2.0,), "beta_2": (1,), "epsilon": (-1.0,)},
    O.RMSprop: {"rho": (2.0,), "momentum": (-1, 2.0), "epsilon": (-1,)},
    O.Adagrad: {"initial_accumulator_value": (-1,), "epsilon": (-1,)},
    O.Adadelta: {"rho": (-0.5,), "epsilon": (-1,)},
    O.Ftrl: {"learning_rate_power": (1,), "l1_regularization_strength": (-1,), "beta": (-1,)},
}
ALL_RANGES = {"weight_decay": (-1,), "clipnorm": (0,), "clipvalue": (0,), "ema_momentum": (2,)}
ALL_RANGES |= {"loss_scale_factor": (0, -1), "learning_rate": ()}  # a negative rate climbs, as in Keras
WORDS = ["x", "0.1", True, np.ones(2), [0.1]]
NOT_FINITE = [np.nan, np.inf, -np.inf, 10**400]


@pytest.mark.parametrize("kind", OWN_RANGES, ids=lambda kind: kind.__name__)
def test_a_number_has_one_range(kind):
    """Out of it, or of another type, it is refused by name: at creation, and later, where the old one stays."""
    for name, wrongs in (OWN_RANGES[kind] | ALL_RANGES).items():
        optimizer = kind()
        old = getattr(optimizer, name)
        for wrong in (*wrongs, *WORDS, *NOT_FINITE):
            error = TypeError if any(wrong is word for word in WORDS) else ValueError
            text = re.escape(f"{name} is {wrong!r}") + ("; use a number" if error is TypeError else ", and must be ")
            with pytest.raises(error, match=text):
                kind(**{name: wrong})
            with pytest.raises(error, match=text):
                setattr(optimizer, name, wrong)
            assert getattr(optimizer, name) == old


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: train.MomentumOptimizer(0.1, 2), "momentum is 2, and must be between 0 and 1"),
        (lambda: train.AdamOptimizer(beta2=1.0), "beta_2 is 1.0"),
        (lambda: train.AdagradOptimizer(0.1, 0.0), "initial_accumulator_value is 0.0, and must be more than 0"),
        (lambda: train.RMSPropOptimizer(0.1, decay=-1), "decay is -1"),
        (lambda: train.FtrlOptimizer(0.1, 0.5), "learning_rate_power is 0.5, and must be at most 0"),
        (lambda: train.ProximalGradientDescentOptimizer(0.1, -1), "l1_regularization_strength is -1"),
        (lambda: train.ProximalAdagradOptimizer(0.1, -0.1), "initial_accumulator_value is -0.1"),
        (lambda: train.ProximalAdagradOptimizer(0.1, 0.1, 0, -1), "l2_regularization_strength is -1"),
        (lambda: train.GradientDescentOptimizer(np.inf), "learning_rate is inf"),
        (lambda: SGD(0.1, 0.5, name="a", clipnorm=1, clipvalue=1), "clipnorm and clipvalue were passed; use one"),
        (lambda: setattr(SGD(clipvalue=1.0), "clipnorm", 1.0), "clipnorm and clipvalue were passed"),
        (lambda: setattr(SGD(), "ema_overwrite_frequency", 2), "add use_ema=True"),
        (lambda: SGD(global_clipnorm=0), "global_clipnorm is 0, and must be more than 0"),
        (lambda: SGD(ema_overwrite_frequency=3), "add use_ema=True"),
        (lambda: SGD(use_ema=True, ema_overwrite_frequency=0), "at least 1"),
        (lambda: SGD(gradient_accumulation_steps=1), "whole number of at least 2"),
        (lambda: SGD(gradient_accumulation_steps=2.5), "whole number of at least 2"),
        (lambda: O.DynamicLossScale(0), "initial_scale is 0, and must be a float32 of more than 0"),
        (lambda: O.DynamicLossScale(1e39), "initial_scale is 1e\\+39, and must be a float32"),
        (lambda: O.DynamicLossScale(np.inf), "initial_scale is inf, and must be finite"),
        (lambda: O.DynamicLossScale(2.0, 0), "dynamic_growth_steps is 0, and must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    """At once, by name and value."""
    refused(ValueError, text, make)


def test_a_switch_is_a_switch_and_names_are_a_list():
    """A switch is one kind of call, whatever it was given as; of one word each letter would be a name."""
    assert SGD(use_ema=1).use_ema is True
    optimizer = SGD(use_ema=True)
    optimizer.use_ema = 0
    assert optimizer.use_ema is False
    with pytest.raises(TypeError, match=r"var_names is 'bias'.*use var_names=\['bias'\]"):
        SGD(weight_decay=0.1).exclude_from_weight_decay(var_names="bias")


class Signed(O.Optimizer):
    """An optimizer of ten lines, with a helper, a switch and a number of its own."""

    slots = ("mean",)

    def __init__(self, learning_rate=0.01, rho=0.5, doubled=False, **options):
        super().__init__(learning_rate, **options)
        self.rho, self.doubled = rho, doubled

    def mixed(self, old, new):
        return self.rho * old + (1 - self.rho) * new

    def update(self, v, gradient, iterations, mean):
        mean.assign(self.mixed(mean, gradient))
        v.assign_sub(self.learning_rate * np.sign(mean) * (2 if self.doubled else 1))


class Later(Signed):
    """Begins with the second step, and asks its base for the rest."""

    def update(self, v, gradient, iterations, mean):
        old = v.value()
        super().update(v, gradient, iterations, mean)
        v.assign(np.where(iterations > 1, v, old))


def test_an_optimizer_of_ones_own_has_all_options(strategy):
    """Methods, switches and numbers of its own are read anew in each step; `super` works."""
    w = variable(strategy, np.zeros(2))
    optimizer = Signed(1.0, rho=0.0, clipvalue=1.0)
    apply(strategy, optimizer, ([3.0, -4.0], w))
    optimizer.doubled = True
    apply(strategy, optimizer, ([3.0, -4.0], w))
    assert value(w) == [-3.0, 3.0]
    optimizer.rho, optimizer.doubled = np.float64(1.0), False
    apply(strategy, optimizer, ([-3.0, 4.0], w))
    assert value(w) == [-4.0, 4.0]
    later = Later(1.0)
    for expected in (-4.0, -5.0):
        apply(strategy, later, ([1.0, 0.0], w))
        assert value(w)[0] == expected


# ---- What is wrong ----


def line(method, ahead=0):
    return f"{__file__}:{method.__code__.co_firstlineno + ahead}: "


class Heavy(Optimizer):
    def __init__(self, learning_rate, **options):
        super().__init__(learning_rate, **options)
        self.velocity = 0.0

    def update(self, v, gradient, iterations):
        self.velocity = 0.9 * self.velocity - self.learning_rate * gradient
        v.assign_add(self.velocity)


class Returning(Optimizer):
    def update(self, v, gradient, iterations):
        return v - gradient


class Short(Optimizer):
    slots = ("m", "s")

    def update(self, v, gradient, iterations, m):
        v.assign_sub(m)


class Idle(Optimizer):
    slots = ("seen",)

    def update(self, v, gradient, iterations, seen):
        seen.assign(gradient)
        v - gradient


class Noisy(Optimizer):
    def update(self, v, gradient, iterations):
        v.assign_add(np.random.normal(size=v.shape).astype("float32"))


class Given(Schedule):
    """Returns a value of its own, or what a function of the step gives."""

    def __init__(self, given):
        self.given = given

    def __call__(self, step):
        return self.given(step) if callable(self.given) else self.given


RETURNS = r"the schedule Given returns .* one number for each step"
ALONE = r"does not assign its variable.*write v\.assign_sub"
MISTAKES = {
    "a state of its own": (Heavy, {}, 1, "Heavy.velocity was assigned", "use a slot"),
    "a result": (Returning, {}, 0, "Returning.update returns", "a value, which is not used; assign it"),
    "too few slots": (Short, {}, 0, "Short.update", r"called with \(v, gradient, iterations, m, s\): too many"),
    "no assignment": (Idle, {}, 0, "Idle.update", ALONE),
    "only decay": (Idle, {"weight_decay": 0.5}, 0, "Idle.update", ALONE),
    "only sums": (Idle, {"gradient_accumulation_steps": 2}, 0, "Idle.update", ALONE),
    "noise": (Noisy, {}, 1, "Noisy.update makes an array (float32[3])", "add it to the gradient"),
    "no rate": (Given, {"given": None}, None, "", RETURNS),
    "a vector": (Given, {"given": lambda step: step * np.ones(2)}, None, "", RETURNS),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_where_it_is(strategy, name):
    """What would be lost, or is no step: what is assigned to an optimizer or a schedule, returned, or assigned to none.
    What decay or accumulation assign does not count, nor does a slot."""
    if name == "noise" and kind_of(strategy) != "embedded":
        pytest.skip("it is not traced here: each call has noise of its own")
    (kind, options, ahead, first, text), v = MISTAKES[name], variable(strategy)
    rule = issubclass(kind, Optimizer)
    optimizer = kind(0.1, **options) if rule else SGD(kind(**options))
    with pytest.raises(ps.errors.ProgramError, match=text) as caught:
        apply(strategy, optimizer, ([1.0] * 3, v))
    where = "" if ahead is None else line(kind.update if rule else kind.__call__, ahead)
    assert str(caught.value).startswith(where + first)
    assert value(v) == [0.0] * 3


@pytest.mark.parametrize("slots", ["momentum", "m", ("m", "m")])
def test_slots_are_names(strategy, slots):
    """One word has a name in each letter, and a tuple of one lacks its comma easily."""
    optimizer = Idle(0.1)
    optimizer.slots = slots
    with pytest.raises(TypeError, match=r"slots of Idle is .*must be a tuple of different names"):
        apply(strategy, optimizer, ([1.0] * 3, variable(strategy)))


def test_what_a_step_may_do(strategy):
    """Assign the same value, or return what it has assigned; a schedule may return a plain number, which may change."""

    class Waiting(Optimizer):
        def update(self, v, gradient, iterations):
            v.assign(v.value())
            v.assign(np.where(iterations % 3 == 0, v - gradient, v))

    class Brief(Optimizer):
        def update(self, v, gradient, iterations):
            return v.assign_sub(self.learning_rate * gradient)

    class Grouped(Brief):
        slots = ("last",)

        def update(self, v, gradient, iterations, last):
            return last.assign(gradient), [super().update(v, gradient, iterations), None]

    v, schedule, waiting = variable(strategy), Given(0.5), Waiting(0.1)
    by_schedule = SGD(schedule)
    for optimizer, expected in (
        *((waiting, x) for x in (0.0, 0.0, -1.0)),
        (Brief(0.5), -1.5),
        (Grouped(0.25), -1.75),
        (by_schedule, -2.25),
        (by_schedule, -3.25),
    ):
        apply(strategy, optimizer, ([1.0] * 3, v))
        assert value(v) == [expected] * 3
        schedule.given = 1.0 if optimizer is by_schedule else 0.5


@kinds("servers-1x2")
@pytest.mark.parametrize("where", ["optimizer", "schedule"])
def test_variables_by_closure_are_refused_by_name(strategy, where):
    """Where an optimizer is traced: the class, the method, the line, and what to do instead."""
    v, heat = variable(strategy), variable(strategy, np.float32(2), name=f"heat {where}")

    class Heated(Optimizer):
        def update(self, v, gradient, iterations):
            v.assign_sub(self.learning_rate * gradient * heat)

    class Cooling(Schedule):
        def __call__(self, step):
            return 0.1 / (step + heat)

    method = Heated.update if where == "optimizer" else Cooling.__call__
    with pytest.raises(ps.errors.ProgramError, match=f"uses <.*heat {where}.*arrays in a slot") as caught:
        apply(strategy, Heated(0.1) if where == "optimizer" else SGD(Cooling()), ([1.0] * 3, v))
    assert str(caught.value).startswith(line(method, 1) + method.__qualname__.rpartition("<locals>.")[2])


def test_an_optimizer_begins_with_its_base_and_says_what_a_step_is(strategy):
    """Whatever is asked of one whose `__init__` does not call that of its base; a schedule says what the rate is. An
    update sees numbers and words of its optimizer; what it cannot see is missing, and the error says why."""

    class Masked(Optimizer):
        def update(self, v, gradient, iterations):
            v.assign_sub(gradient * self.mask)

    class Own(Optimizer):
        def __init__(self, rate):
            self.rate = rate

    class Empty(Optimizer):
        pass

    class Endless(Schedule):
        pass

    v, optimizer = variable(strategy), Own(0.1)
    pair = ([1.0] * 3, v)
    refused(
        AttributeError,
        r"^Own has no attribute .* call super\(\).__init__\(learning_rate",
        lambda: apply(strategy, optimizer, pair),
        lambda: optimizer.build([v]),
        lambda: optimizer.learning_rate,
    )
    with pytest.raises(AttributeError, match=r"^SGD has no attribute 'rate'$"):
        SGD(0.1).rate  # noqa: B018
    with pytest.raises(NotImplementedError, match=r"Empty does not define .* implement update\(self, v, gradient"):
        apply(strategy, Empty(0.1), pair)
    with pytest.raises(NotImplementedError, match=r"Endless does not define .* implement __call__\(self, step\)"):
        apply(strategy, SGD(Endless()), pair)
    masked = Masked(1.0)
    masked.mask = np.zeros(3)
    with pytest.raises(AttributeError, match="no attribute 'mask'; an update function can use only"):
        apply(strategy, masked, pair)
    assert value(v) == [0.0] * 3


def test_complex_gradients_are_for_complex_variables(strategy):
    """Their imaginary part would be lost; refused by the variable's name, before anything is changed."""
    v, optimizer = variable(strategy), SGD(0.5)
    for gradient in (np.ones(3, "complex64"), [1j, 0.0, 1.0]):
        with pytest.raises(ValueError, match=f"of variable '{v.name}' is complex, but the variable is float32"):
            in_replicas(strategy, lambda _, gradient=gradient: optimizer.apply_gradients([(gradient, v)]))
    assert v.numpy().tolist() == [0.0] * 3
    w = variable(strategy, np.zeros(2, "complex64"))
    apply(strategy, SGD(0.5), ([2 + 2j] * 2, w))
    assert w.numpy().tolist() == [-1 - 1j] * 2


class Rates(Configured):
    """Two numbers, and a list of them."""

    def __init__(self):
        self.first, self.second, self.more = None, 0.5, [1.0]


def test_settings_stay_the_same_until_something_changes():
    """Then they are others: also if values change places, or a list changes in itself."""
    rates = Rates()
    rates.more = ()
    known = rates._settings()
    assert rates._settings() is known
    rates.first, rates.second = rates.second, rates.first
    swapped = rates._settings()
    assert (known.numbers, swapped.numbers, known.key == swapped.key) == ([0.5], [0.5], False)
    rates.more = [1.0]
    assert rates._settings().numbers == [0.5, 1.0]
    rates.more.append(2.0)
    assert rates._settings().numbers == [0.5, 1.0, 2.0]
