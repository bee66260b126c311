"""What all optimizers have in common: clipping, decay, averages, accumulation, loss scales, schedules."""

from __future__ import annotations

import re

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing import update_function
from psclient.optimizers import schedules
from tests.kit.cases import once
from tests.kit.strategies import USUAL, copies, in_replicas, kind_of, kinds, opened, replicas, variable

SGD = ps.optimizers.SGD


pytestmark = kinds("mirrored-2", "servers-1x2", soak=USUAL)


def apply(strategy, optimizer, *pairs):
    """One call by all replicas, whose gradients add up to those given."""
    count = replicas(strategy)
    shares = [(np.asarray(g, v.dtype) / v.dtype.type(count), v) for g, v in pairs]
    in_replicas(strategy, lambda _: optimizer.apply_gradients(shares))


def value(v):
    return v.numpy().tolist()


# ---- Clipping and decay ----


def test_values_are_clipped(strategy):
    """Element by element, in both directions."""
    w = variable(strategy)
    apply(strategy, SGD(1.0, clipvalue=2.0), ([-3.0, 1.0, 5.0], w))
    assert value(w) == [2.0, -1.0, -2.0]


def test_norms_are_clipped_for_each_variable(strategy):
    """To the norm that is allowed; a smaller gradient and a gradient of zeros stay what they are."""
    w, small, zero = (variable(strategy, np.zeros(2)) for _ in range(3))
    apply(strategy, SGD(1.0, clipnorm=2.5), ([3.0, 4.0], w), ([1.0, 0.0], small), ([0.0, 0.0], zero))
    assert [value(x) for x in (w, small, zero)] == [[-1.5, -2.0], [-1.0, 0.0], [0.0, 0.0]]


def test_the_norm_of_all_gradients_is_clipped(strategy):
    """They keep their proportions."""
    w, u = variable(strategy, np.zeros(2)), variable(strategy, np.zeros(1))
    optimizer = SGD(1.0, global_clipnorm=6.5)
    apply(strategy, optimizer, ([3.0, 4.0], w), ([12.0], u))
    assert [value(w), value(u)] == [[-1.5, -2.0], [-6.0]]
    apply(strategy, optimizer, ([0.5, 0.0], w), ([0.0], u))
    assert [value(w), value(u)] == [[-2.0, -2.0], [-6.0]]


def test_weights_decay_before_the_step(strategy):
    """By the decay times the learning rate; not those that are left out, by themselves or by name."""
    w, kept, named = (variable(strategy, np.ones(2), name=name) for name in ("w_decays", "w_stays", "bias_stays"))
    optimizer = SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([kept], ["^bias"])
    apply(strategy, optimizer, *(([1.0, 1.0], x) for x in (w, kept, named)))
    assert [value(x) for x in (w, kept, named)] == [[0.25] * 2, [0.5] * 2, [0.5] * 2]


# ---- Averages ----


def test_averages_follow_the_weights(strategy):
    """The first step sets them; they can be read, and given to the variables. A call without a step changes none."""
    w, optimizer = variable(strategy, np.zeros(2)), SGD(1.0, use_ema=True, ema_momentum=0.5)
    for expected in (-1.0, -1.5, -2.25):
        apply(strategy, optimizer, ([1.0, 1.0], w))
        assert value(optimizer.average(w)) == [expected] * 2
    assert value(w) == [-3.0] * 2
    optimizer.finalize_variable_values([w])
    assert value(w) == [-2.25] * 2
    with pytest.raises(RuntimeError, match="use_ema=True"):
        SGD().average(w)
    SGD().finalize_variable_values([w])
    assert value(w) == [-2.25] * 2
    u, slow = variable(strategy, np.zeros(1)), SGD(1.0, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2)
    for _ in range(5):  # calls, of which the second and the fourth make a step
        apply(strategy, slow, ([1.0], u))
    assert (value(u), value(slow.average(u))) == ([-2.0], [-1.5])


def test_averages_overwrite_the_weights_now_and_then(strategy):
    """After every so many steps."""
    w = variable(strategy, np.zeros(1))
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    seen = []
    for _ in range(4):
        apply(strategy, optimizer, ([1.0], w))
        seen += value(w)
    assert seen == [-1.0, -1.5, -2.5, -2.75]


# ---- Accumulation ----


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_accumulated_gradients_make_one_step_of_a_big_batch(strategy, dtype):
    """Nothing changes before the last; the count is of steps."""
    w, u = variable(strategy, np.ones(2, dtype)), variable(strategy, np.ones(2, dtype))
    options = {"weight_decay": 0.1, "use_ema": True}
    piecewise = ps.optimizers.Adam(0.1, gradient_accumulation_steps=3, **options)
    whole = ps.optimizers.Adam(0.1, **options)
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


# ---- Loss scales ----


def test_a_fixed_loss_scale_is_divided_out(strategy):
    """Of the gradients; the loss is multiplied by it."""
    w, optimizer = variable(strategy, np.zeros(2)), SGD(1.0, loss_scale_factor=8.0)
    assert optimizer.scale_loss(0.5) == 4.0
    apply(strategy, optimizer, ([8.0, 16.0], w))
    assert value(w) == [-1.0, -2.0]
    assert SGD().scale_loss(0.5) == 0.5


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_steps_that_are_not_finite_are_left_out(strategy, bad):
    """Of all variables, slots, averages and counts; they are counted apart, and the scale falls and rises."""
    w, u = variable(strategy, np.ones(2, "float16")), variable(strategy, np.ones(3))
    scale = ps.optimizers.DynamicLossScale(4.0, dynamic_growth_steps=2)
    optimizer = ps.optimizers.Adam(0.1, loss_scale_factor=scale, use_ema=True, weight_decay=0.1)
    assert optimizer.scale_loss(1.0) == 4.0

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
        loss_scale_factor=ps.optimizers.DynamicLossScale(2.0, 1000),
    )
    for number, (g, steps) in enumerate([(1.0, 0), (np.inf, 0), (0.5, 1), (np.nan, 1), (0.25, 1), (0.25, 2)]):
        # 3, 4 and 12 in each step, multiplied by the scale of the call
        apply(strategy, optimizer, ([6.0 * g, 8.0 * g], w), ([24.0 * g], u))
        assert int(optimizer.iterations) == steps, f"after call {number}"
    assert [value(w), value(u)] == [[-2.25 * 2 / 3 - 0.75, -2.0 - 1.0], [-6.0 - 3.0]]
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps)) == (0.5, 2)


def test_a_norm_that_is_not_finite_is_seen_in_all(strategy):
    """As in Keras: one gradient without a norm leaves no variable as if nothing were wrong."""
    w, u = variable(strategy, np.zeros(2)), variable(strategy, np.zeros(1))
    with np.errstate(all="ignore"):
        apply(strategy, SGD(1.0, global_clipnorm=1.0), ([3.0, 4.0], w), ([np.inf], u))
    assert np.isnan(w.numpy()).all()


# ---- Learning rates ----


def test_schedules_follow_the_steps_applied(strategy):
    """The first step has the rate of 0, computed where the count is."""
    w, rate = variable(strategy, np.zeros(1, "float64")), schedules.ExponentialDecay(1.0, 2, 0.25)
    optimizer = SGD(schedules.LinearWarmup(rate, 2, 0.5))
    expected = 0.0
    for k in (0.5, 0.75, 1.0, 0.5, 0.25):
        apply(strategy, optimizer, ([1.0], w))
        expected -= k
        assert value(w) == [expected]


def test_a_function_is_asked_for_each_step(strategy):
    """By every process alike."""
    w, rates = variable(strategy, np.zeros(1)), iter([1.0, 0.5])
    optimizer = SGD(lambda: next(rates))
    for expected in (-1.0, -1.5):
        apply(strategy, optimizer, ([1.0], w))
        assert value(w) == [expected]


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


def test_scheduled_and_changed_rates_make_no_new_trace(strategy, calls_of):
    """Nor do other numbers of the optimizer; without servers nothing is traced at all."""
    traced = calls_of("trace", update_function)
    w = variable(strategy, np.zeros(7))
    optimizer = ps.optimizers.Adam(schedules.CosineDecay(0.1, 10))
    apply(strategy, optimizer, (np.ones(7), w))
    first = len(traced)
    assert bool(first) == (kind_of(strategy) == "embedded")
    optimizer.beta_1 = 0.5
    for step in range(3):
        optimizer.learning_rate = schedules.CosineDecay(0.1 + step, 10 + step)
        apply(strategy, optimizer, (np.ones(7), w))
    assert len(traced) == first


# ---- What may be changed later ----

CHANGES = {
    "learning_rate": (1.0, 2),
    "weight_decay": (0.5, np.float32(0.25)),
    "clipnorm": (2.0, 1),
    "clipvalue": (2.0, 1),
    "global_clipnorm": (2.0, 1),
    "ema_momentum": (0.5, 0.25),
    "ema_overwrite_frequency": (3, 2),
    "loss_scale_factor": (2.0, 4),
    "momentum": (0.5, 0.25),
}


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
    scaled = SGD(loss_scale_factor=ps.optimizers.DynamicLossScale())
    cases = [
        (SGD(), "gradient_accumulation_steps", 2, "is None and stays so"),
        (SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps", 3, "is 2 and stays so"),
        (SGD(), "name", "other", "is 'sgd' and stays so"),
        (SGD(), "loss_scale_factor", ps.optimizers.DynamicLossScale(), "is None and stays so"),
        (scaled, "loss_scale_factor", None, "stays so"),
        (SGD(), "use_ema", True, "is False and stays so"),
        (SGD(), "slots", ("m",), r"is \(\) and stays so"),
        (SGD(), "momentum", 0.5, "'momentum', and this SGD was created without"),
        (ps.optimizers.Adam(), "amsgrad", True, "'v_hat', and this Adam was created without"),
        (ps.optimizers.RMSprop(), "centered", True, "'mean', and this RMSprop was created without"),
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
        (lambda **o: ps.optimizers.RMSprop(0.1, **({"momentum": 0.5} | o)), "centered", False),
        (lambda **o: ps.optimizers.RMSprop(0.1, **({"centered": True} | o)), "momentum", 0.0),
        (lambda **o: ps.optimizers.Adam(0.1, **o), "amsgrad", False),
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


def test_names_without_decay_are_a_list():
    """Of one word each letter would be a name."""
    with pytest.raises(TypeError, match=r"var_names is 'bias'.*write var_names=\['bias'\]"):
        SGD(weight_decay=0.1).exclude_from_weight_decay(var_names="bias")


OWN_RANGES = {
    SGD: {"momentum": (-1, 2.0)},
    ps.optimizers.Lion: {"beta_1": (0, 2.0), "beta_2": (-1.0,)},
    ps.optimizers.Adam: {"beta_1": (2.0,), "beta_2": (-1.0, 1), "epsilon": (-1.0, np.nan)},
    ps.optimizers.Nadam: {"beta_1": (2.0,), "beta_2": (1,), "epsilon": (-1.0,)},
    ps.optimizers.RMSprop: {"rho": (2.0,), "momentum": (2.0,), "epsilon": (-1,)},
    ps.optimizers.Adagrad: {"initial_accumulator_value": (-1,), "epsilon": (-1,)},
    ps.optimizers.Adadelta: {"rho": (-0.5,), "epsilon": (-1,)},
    ps.optimizers.Ftrl: {"learning_rate_power": (1,), "l1_regularization_strength": (-1,), "beta": (-1,)},
}
ALL_RANGES = {"weight_decay": (-1.0,), "clipnorm": (0,), "ema_momentum": (2.0,), "loss_scale_factor": (0,)}
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
            text = re.escape(f"{name} is {wrong!r}") + ("; give a number" if error is TypeError else ", and must be ")
            with pytest.raises(error, match=text):
                kind(**{name: wrong})
            with pytest.raises(error, match=text):
                setattr(optimizer, name, wrong)
            assert getattr(optimizer, name) == old


@pytest.mark.parametrize("rate", NOT_FINITE)
def test_a_learning_rate_is_finite(rate):
    """At creation, and later, where the old one stays; a negative one climbs, as in Keras."""
    with pytest.raises(ValueError, match=r"^learning_rate is .*must be finite"):
        SGD(rate)
    optimizer = SGD(-0.1)
    with pytest.raises(ValueError, match=r"^learning_rate is .*must be finite"):
        optimizer.learning_rate = rate
    assert optimizer.learning_rate == -0.1


@pytest.mark.parametrize(("given", "error", "words"), [(None, TypeError, "number"), (np.nan, ValueError, "finite")])
def test_a_function_gives_a_number(strategy, given, error, words):
    """As a learning rate; what it gave instead is told."""
    w = variable(strategy)
    for use in (
        lambda optimizer: optimizer.learning_rate,
        lambda optimizer: apply(strategy, optimizer, ([1.0] * 3, w)),
    ):
        with pytest.raises(
            error, match=f"function given as learning_rate returned {given}; it has to return .*{words}"
        ):
            use(SGD(lambda: given))


def test_a_switch_is_a_switch():
    """Whatever it was given as, so that it is one kind of call."""
    assert SGD(use_ema=1).use_ema is True
    optimizer = SGD(use_ema=True)
    optimizer.use_ema = 0
    assert optimizer.use_ema is False


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("clipvalue", 0, "must be more than 0"),
        ("clipnorm", 1.0, "clipnorm and clipvalue are given"),
        ("ema_momentum", 2, "between 0 and 1"),
        ("ema_overwrite_frequency", 2, "add use_ema=True"),
        ("loss_scale_factor", -1.0, "must be more than 0"),
    ],
)
def test_a_change_keeps_the_rules(name, wrong, text):
    """Those of the constructor; what was set before stays."""
    optimizer = SGD(clipvalue=1.0)
    old = getattr(optimizer, name)
    with pytest.raises(ValueError, match=text):
        setattr(optimizer, name, wrong)
    with pytest.raises(TypeError, match="give a number, a schedule"):
        optimizer.learning_rate = "0.1"
    assert (getattr(optimizer, name), optimizer.learning_rate) == (old, 0.01)


# ---- Extension ----


class Signed(ps.optimizers.Optimizer):
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


def test_an_update_sees_numbers_and_words_of_its_optimizer(strategy):
    """What it cannot see is missing, and the error says why; on every kind of strategy."""

    class Masked(ps.optimizers.Optimizer):
        def update(self, v, gradient, iterations):
            v.assign_sub(gradient * self.mask)

    w, optimizer = variable(strategy, np.zeros(2)), Masked(1.0)
    optimizer.mask = np.zeros(2)
    with pytest.raises(AttributeError, match="no attribute 'mask'; an update function sees"):
        apply(strategy, optimizer, ([1.0, 1.0], w))
    assert value(w) == [0.0, 0.0]


def test_all_copies_stay_equal(strategy):
    """Whatever the options."""
    w = variable(strategy, np.ones(3))
    optimizer = ps.optimizers.Lamb(0.1, global_clipnorm=1.0, use_ema=True, weight_decay=0.1)
    for _ in range(3):
        apply(strategy, optimizer, (np.arange(3.0), w))
    assert len({tuple(np.asarray(copy)) for copy in strategy.experimental_local_results(w)}) == 1
    assert copies(strategy, w) == len(strategy.experimental_local_results(w))


# ---- Checkpoints ----


@pytest.mark.parametrize(
    "name", ["Adam", "Ftrl", *(pytest.param(name, marks=pytest.mark.soak) for name in ("Nadam", "SGD"))]
)
def test_a_restored_optimizer_goes_on_bit_by_bit(in_tmp_path, name):
    """Slots, averages, kept gradients, counts, loss scale, and the schedule's place."""

    def train(resume, steps):
        with opened("servers-1x2") as strategy:
            with strategy.scope():
                w = ps.Variable(np.linspace(-1, 1, 5, dtype="float32"), name="w")
                optimizer = getattr(ps.optimizers, name)(
                    schedules.CosineDecay(0.1, 9),
                    use_ema=True,
                    gradient_accumulation_steps=2,
                    global_clipnorm=1.0,
                    loss_scale_factor=ps.optimizers.DynamicLossScale(4.0, 2),
                )
                optimizer.build([w])
            checkpoint = ps.train.Checkpoint(w=w, optimizer=optimizer)
            if resume:
                checkpoint.restore(resume)
            path = ""
            for step in steps:
                apply(strategy, optimizer, (np.sin(np.arange(5.0) + step), w))
                path = checkpoint.save("run/ckpt") if step == 4 else path
            return path, [x.numpy().tobytes() for x in (w, *optimizer.variables)]

    path, whole = train("", range(10))
    assert train(path, range(5, 10))[1] == whole
