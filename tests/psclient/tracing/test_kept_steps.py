"""Optimizer steps that are like the last one: they are not recorded again, and nobody can tell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import psclient as ps
from psclient._src.distribute.extended import contributions
from psclient._src.distribute.prepared_step import OwnContributions
from psclient._src.distribute.reduction import combine
from psclient._src.rounds.section import Section
from psclient._src.tracing.update_function import UpdateFunction
from psclient.optimizers import schedules
from psclient.optimizers.state import state_of
from pswire.model.plan import Reduction
from pswire.model.tensor import spec_of
from tests.kit.cases import search
from tests.kit.strategies import kinds, merged, opened, refused, replicas, variable

pytestmark = kinds("servers-1x1", soak=["embedded-1"])

SHAPES = ((3,), (2, 2), (3,))
OPTIMIZERS = {
    "momentum": lambda: ps.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: ps.optimizers.Adam(0.01),
    "averaged": lambda: ps.optimizers.SGD(0.1, use_ema=True, gradient_accumulation_steps=2),
}


@pytest.fixture
def calls(monkeypatch):
    """The update functions that were called for, one item for each time."""
    seen, own = [], UpdateFunction.call
    monkeypatch.setattr(UpdateFunction, "call", lambda fn, *args: seen.append(fn.__name__) or own(fn, *args))
    return seen


def step(strategy, optimizer, grads, variables):
    """A step that may be repeated: the replicas meet for it alone."""
    strategy.run(lambda *own: optimizer.apply_gradients(zip(own, variables, strict=True)), tuple(grads))


def recorded_step(strategy, optimizer, grads, variables):
    """A step that is recorded: it is part of what the replicas meet for."""
    merged(strategy, lambda _, *own: optimizer.apply_gradients(zip(own, variables, strict=True)), *grads)


def gradients(strategy, dtypes, shapes, t):
    """Per-replica gradients, of which no two are the same."""

    def gradient(dtype, shape, place):
        values = [
            np.sin(np.arange(np.prod(shape)) + t + 7 * place + 11 * i).reshape(shape).astype(dtype)
            for i in range(replicas(strategy))
        ]
        return strategy.experimental_distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])

    return [gradient(dtype, shape, place) for place, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))]


def beside(strategy, v, value):
    """Another variable, on the same server."""
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        return variable(strategy, value)


def bits(optimizer, variables):
    """All that was trained and kept, bit by bit."""
    return [v.numpy().tobytes() for v in (*variables, *optimizer.variables)]


# ---- Nobody can tell ----

RATES = st.sampled_from([0.1, 0.5, 0.0, -0.0, 1e-30])
CHANGES = st.one_of(
    st.tuples(st.just("learning_rate"), RATES),
    st.tuples(st.just("learning_rate"), RATES.map(lambda rate: lambda: rate)),
    st.tuples(st.just("learning_rate"), RATES.map(lambda rate: schedules.ExponentialDecay(abs(rate) + 0.1, 2, 0.5))),
    st.tuples(st.sampled_from(["clipvalue", "clipnorm"]), st.sampled_from([None, 0.25, 0.5])),
    st.tuples(st.just("weight_decay"), st.sampled_from([None, 0.0, 0.125])),
    st.tuples(st.just("loss_scale_factor"), st.sampled_from([None, 2.0])),
    st.tuples(st.just("exclude"), st.integers(0, 2)),
)
STEPS = st.tuples(
    st.lists(CHANGES, max_size=1),
    st.sampled_from([(0, 1, 2), (0, 1, 2), (0, 1, 2), (2, 0), (1,)]),
    st.sampled_from(["float32", "float32", "float32", "float64", "float16"]),
)


def change(optimizer, name, value, variables):
    if name == "exclude":
        optimizer.exclude_from_weight_decay([variables[value]])
        return
    if name.startswith("clip"):
        optimizer.clipvalue = optimizer.clipnorm = None
    setattr(optimizer, name, value)


@kinds("mirrored-2", "servers-3x1", "async-2x2", soak=("embedded-1", "embedded-2", "embedded-4", "servers-3"))
@search(0.04, suppress=(HealthCheck.function_scoped_fixture,))
@given(name=st.sampled_from(sorted(OPTIMIZERS)), steps=st.lists(STEPS, min_size=3, max_size=8))
def test_repeated_steps_are_recorded_ones_bit_by_bit(strategy, name, steps):
    """Whatever changes between steps: numbers, schedules, options, exclusions, variables, dtypes of gradients."""
    first = [np.cos(np.arange(np.prod(shape))).reshape(shape).astype("float32") for shape in SHAPES]
    ours = [variable(strategy, value) for value in first]
    pairs = ours, [beside(strategy, v, value) for v, value in zip(ours, first, strict=True)]
    with strategy.scope():
        optimizers = [OPTIMIZERS[name]() for _ in range(2)]
    for t, (changes, chosen, dtype) in enumerate(steps):
        grads = gradients(strategy, ["float32", *[dtype] * (len(chosen) - 1)], [SHAPES[i] for i in chosen], t)
        for make, optimizer, variables in zip((step, recorded_step), optimizers, pairs, strict=True):
            for which, value in changes:
                change(optimizer, which, value, variables)
            make(strategy, optimizer, grads, [variables[i] for i in chosen])
        one, other = (bits(optimizer, variables) for optimizer, variables in zip(optimizers, pairs, strict=True))
        assert one == other


def test_norms_over_several_servers_are_never_repeated(calls):
    """Such a step takes two rounds, and the second one computes with what the first has found."""
    with opened("servers-3x1") as strategy:
        ours = [variable(strategy, np.zeros(2)) for _ in range(2)]
        theirs = [beside(strategy, v, np.zeros(2)) for v in ours]
        assert ours[0].devices != ours[1].devices
        with strategy.scope():
            optimizers = [ps.optimizers.SGD(1.0, global_clipnorm=0.5) for _ in range(2)]
        for t in range(3):
            calls.clear()
            grads = gradients(strategy, ["float32"] * 2, [(2,)] * 2, t)
            step(strategy, optimizers[0], grads, ours)
            assert "apply" in calls
            recorded_step(strategy, optimizers[1], grads, theirs)
            assert bits(optimizers[0], ours) == bits(optimizers[1], theirs)
        assert not any(state_of(optimizers[0]).of(v).staged.trainable for v in ours)


# ---- What is recorded, and what is not ----


def one_step(strategy, optimizer, *variables, t=0, dtype="float32"):
    grads = gradients(strategy, [dtype] * len(variables), [v.shape for v in variables], t)
    step(strategy, optimizer, grads, variables)


def test_a_step_like_the_last_records_no_update(strategy, calls):
    """Also with another learning rate, and other numbers; and also if a variable was read or assigned in between."""
    w, u = variable(strategy), variable(strategy)
    with strategy.scope():
        optimizer = ps.optimizers.Adam(0.1)
    one_step(strategy, optimizer, w, u)
    assert calls == ["begin", "apply", "apply"]
    for rate in (0.1, 0.1, 0.2, 0.3):
        calls.clear()
        optimizer.learning_rate, optimizer.beta_1 = rate, rate
        w.assign_add(1.0 + w.numpy())
        one_step(strategy, optimizer, w, u, t=rate)
        assert "apply" not in calls


ANOTHER_STEP = {
    "option": lambda o, *_: setattr(o, "clipvalue", 1.0),
    "word": lambda o, *_: setattr(o, "nesterov", True),
    "no decay": lambda o, *_: setattr(o, "weight_decay", 0.0),
    "schedule": lambda o, *_: setattr(o, "learning_rate", schedules.ExponentialDecay(0.1, 2, 0.5)),
    "excluded": lambda o, w, *_: o.exclude_from_weight_decay([w]),
    "another order": lambda o, w, u, x: (u, w),
    "fewer variables": lambda o, w, u, x: (w,),
    "more variables": lambda o, w, u, x: (w, u, x),
}
"""Changes an optimizer, or gives the variables of the next step."""


@pytest.mark.parametrize("change", [*ANOTHER_STEP, "built"])
def test_another_kind_of_step_is_recorded(strategy, calls, change):
    """What says what a step does is compared each time; more state elsewhere changes it only where it is counted."""
    w, u, x = (variable(strategy) for _ in range(3))
    with strategy.scope():
        optimizer = ps.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.5)
    one_step(strategy, optimizer, w, u)
    chosen = ANOTHER_STEP.get(change, lambda o, *variables: o.build(variables))(optimizer, w, u, x) or (w, u)
    calls.clear()
    one_step(strategy, optimizer, *chosen)
    assert calls.count("apply") == len(chosen) * (change != "built")


def test_variables_on_another_server_are_counted_once_they_are_known(calls):
    """The count gets a copy there; from then on steps of the others count in both."""
    with opened("servers-3x1") as strategy:
        w, u = variable(strategy, np.zeros(2)), variable(strategy, np.zeros(3))
        assert w.devices != u.devices
        with strategy.scope():
            optimizer = ps.optimizers.SGD(1.0)
        for _ in range(2):
            one_step(strategy, optimizer, w)
        optimizer.build([u])
        for _ in range(2):
            one_step(strategy, optimizer, w)
        one_step(strategy, optimizer, u)
        counts = [v.numpy().tolist() for v in optimizer.variables]
        assert counts == [5, 5]
        assert calls.count("apply") == 3


class Careful(ps.optimizers.Optimizer):
    """Looks at its learning rate."""

    def update(self, v, gradient, iterations):
        v.assign_sub(self.learning_rate * gradient if self.learning_rate < 1 else np.sign(gradient))


def test_numbers_that_a_function_looks_at_may_make_another_step(strategy, calls):
    """It is recorded where the function comes to see something else."""
    w = variable(strategy, np.zeros(1))
    with strategy.scope():
        optimizer = Careful(0.5)
    seen = []
    for rate in (0.5, 0.25, 2.0, 3.0, 0.5):
        calls.clear()
        optimizer.learning_rate = rate
        step(strategy, optimizer, [np.full(1, 8.0)], [w])
        seen.append((float(w.numpy()[0]), "apply" in calls))
    assert seen == [(-4.0, True), (-6.0, False), (-7.0, True), (-8.0, False), (-12.0, True)]


# ---- Mistakes ----


def test_mistakes_in_a_later_step_are_told(strategy):
    """As in the first; and what comes after them is as if they had not been."""
    w = variable(strategy)
    stranger = ps.Variable(np.zeros(3, "float32"))
    with strategy.scope():
        optimizer = ps.optimizers.SGD(1.0)
    good = np.ones(3, "float32")
    for _ in range(4):
        step(strategy, optimizer, [good], [w])
    for grads, variables, error, text in (
        ([np.ones(4, "float32")], [w], ValueError, "has shape"),
        ([None], [w], ValueError, "is None"),
        ([good * 1j], [w], ValueError, "complex"),
        ([good, good], [w, stranger], ValueError, "was created"),
        ([good, good], [w, w], ValueError, "several pairs"),
        ([good], ["w"], TypeError, "expected a variable, but got a"),
        ([np.array(["a", "b", "c"])], [w], TypeError, "cannot be reduced"),
    ):
        with pytest.raises(error, match=text):
            step(strategy, optimizer, grads, variables)
    step(strategy, optimizer, [good], [w])
    assert w.numpy().tolist() == [-5.0] * 3
    assert int(optimizer.iterations) == 5


def test_steps_in_another_strategy_or_after_the_end_are_told(strategy):
    """A step that is known is no way around a scope."""
    with opened("servers-1x1") as other:
        w = variable(other)
        with other.scope():
            optimizer = ps.optimizers.SGD(1.0)
        pairs = [(np.ones(3, "float32"), w)]
        for _ in range(3):
            other.run(optimizer.apply_gradients, (pairs,))
        with pytest.raises(RuntimeError, match="was used in the scope of another strategy"):
            strategy.run(optimizer.apply_gradients, (pairs,))
    refused(RuntimeError, "closed", lambda: other.run(optimizer.apply_gradients, (pairs,)))
    refused(RuntimeError, "closed", lambda: optimizer.apply_gradients(pairs))


# ---- Sections ----


ONES = OwnContributions([1.0], [np.ones(2)])


@ps.update_function
def doubled(x, factor):
    return x * factor


@ps.update_function
def assigned(v, x):
    v.assign(x)


def reduced(*arrays):
    """A section of one server that has reduced arrays."""
    section = Section(1, lambda section: section.arrived({}))
    return section, [section.reduce(combine("sum", [array], frozenset(), None), (0,)) for array in arrays]


def test_a_repeated_section_knows_what_it_assigns(strategy):
    """Who reads that before it is sent has it sent; nothing is recorded behind it."""
    w, (section, _) = variable(strategy, np.zeros(2)), reduced()
    recorded, (total,) = reduced(np.ones(2))
    with strategy.scope():
        recorded.apply((0,), assigned, (w, total), {})
    assert section.repeat(recorded.complete([]), [], ONES)
    assert section.writes(w.handle.id)
    refused(RuntimeError, "complete", lambda: section.apply((0,), doubled, (np.ones(2), 2.0), {}))
    refused(RuntimeError, "complete", lambda: section.reduce(combine("sum", [np.ones(2)], frozenset(), None), (0,)))


def kept(numbers=(2.0,), fn=doubled):
    section, (total,) = reduced(np.ones(2))
    section.apply((0,), fn, (total, 2.0), {})
    return section.complete(list(numbers))


class Tagged(np.ndarray):
    """An array of a class of the user's."""


def test_contributions_are_made_to_the_same_reductions(strategy):
    """None to others, or to more or fewer of them. What does not travel as it is, is made an array that does."""
    w, ones = variable(strategy, np.zeros((2, 3), "float32")), np.ones((2, 3), "float32")
    asked = Reduction("sum", spec_of(ones), (0,))

    def found(values, number):
        return contributions(strategy.extended, values, [w] * len(values), [], None, [asked] * number)

    with strategy.scope():
        for value in (ones[0], ones.astype("float64")):
            assert found([value], 1) is None
        assert found([ones], 2) is None
        assert found([ones, ones], 1) is None
        for value in (ones, np.asfortranarray(ones), ones.view(Tagged), np.ones((3, 2), "float32").T):
            weights, (array,) = found([value], 1)
            assert (weights, array.tolist(), array.flags.c_contiguous) == ([1.0], ones.tolist(), True)


def test_calls_with_the_same_numbers_share_operands():
    """Whatever the shapes, so that a server computes numbers of them once; those of one call stay apart."""

    @ps.update_function
    def scaled(x, rate, other):
        return x * (1 - rate) * other

    @ps.update_function
    def constant(x):
        return (x + 1.5) * 1.5

    def operands(*shares, fn=scaled):
        section, totals = reduced(*[np.ones(2 + share, "float32") for share in range(len(shares))])
        for total, numbers in zip(totals, shares, strict=True):
            section.apply((0,), fn, (total, *numbers), {})
        applies = section.outgoing().plan.applies
        return [array.tolist() for array in section.outgoing().operands], [
            [ref.index for ref in each.args if ref.kind == "operand"] for each in applies
        ]

    assert operands((0.25, 2.0), (0.25, 2.0)) == ([0.75, 2.0], [[0, 1], [0, 1]])
    assert operands((0.25, 2.0), (0.25, 3.0)) == ([0.75, 2.0, 0.75, 3.0], [[0, 1], [2, 3]])
    assert operands((), (), fn=constant) == ([1.5, 1.5], [[0, 1], [0, 1]])


def test_a_section_is_repeated_where_nothing_is_recorded():
    """Behind a reduction, or an update, it is another section; what depends on more than numbers is not kept."""
    section, (total,) = reduced(np.ones(2))
    assert not section.repeat(kept(), [2.0], ONES)
    section.apply((0,), doubled, (total, 2.0), {})
    assert not section.repeat(kept(), [2.0], ONES)
    assert kept(numbers=(3.0,)) is None
    for fn, args in ((doubled, (np.ones(2),)), (lambda x, y: x + y, (2.0,))):
        section, (total,) = reduced(np.ones(2))
        section.apply((0,), fn, (total, *args), {})
        assert section.complete([2.0]) is None
