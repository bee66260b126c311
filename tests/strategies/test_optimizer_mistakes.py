"""What is wrong with an optimizer, a schedule or a gradient is said: where it is, and what to write instead."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import USUAL, in_replicas, kinds, replicas, variable

Optimizer, Schedule = ps.optimizers.Optimizer, ps.optimizers.schedules.LearningRateSchedule


pytestmark = kinds("mirrored-2", "servers-1x2", soak=USUAL)


def apply(strategy, optimizer, v, gradient=1.0):
    share = np.full(v.shape, gradient / replicas(strategy), v.dtype)
    in_replicas(strategy, lambda _: optimizer.apply_gradients([(share, v)]))


def line(method, ahead=0):
    return f"{__file__}:{method.__code__.co_firstlineno + ahead}: "


class Heavy(Optimizer):
    def __init__(self, learning_rate, **options):
        super().__init__(learning_rate, **options)
        self.velocity = 0.0

    def update(self, v, gradient, iterations):
        self.velocity = 0.9 * self.velocity - self.learning_rate * gradient
        v.assign_add(self.velocity)


class Counting(Schedule):
    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.1 / self.calls


@pytest.mark.parametrize(
    ("make", "method", "text"),
    [
        (lambda: Heavy(0.1), Heavy.update, "Heavy.velocity is assigned"),
        (lambda: ps.optimizers.SGD(Counting()), Counting.__call__, "Counting.calls is assigned"),
    ],
)
def test_state_is_kept_in_slots(strategy, make, method, text):
    """What an update function assigns to its optimizer or schedule would be lost."""
    v = variable(strategy)
    with pytest.raises(ps.errors.ProgramError, match="keep it in a slot") as caught:
        apply(strategy, make(), v)
    assert str(caught.value).startswith(line(method, 1) + text)
    assert v.numpy().tolist() == [0.0] * 3


class Returning(Optimizer):
    def update(self, v, gradient, iterations):
        return v - gradient


class Generating(Optimizer):
    def update(self, v, gradient, iterations):
        yield v.assign_sub(gradient)


class Awaiting(Optimizer):
    async def update(self, v, gradient, iterations):
        v.assign_sub(gradient)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Returning, "returns a value, which is lost; assign it"), (Generating, "generator"), (Awaiting, "coroutine")],
)
def test_an_update_that_assigns_nothing_is_refused(strategy, kind, text):
    """It returns what should be assigned, or does not run at all."""
    v = variable(strategy)
    with pytest.raises(ps.errors.ProgramError, match=text) as caught:
        apply(strategy, kind(0.1), v)
    assert str(caught.value).startswith(f"{line(kind.update)}{kind.__name__}.update returns")
    assert v.numpy().tolist() == [0.0] * 3


class Short(Optimizer):
    slots = ("m", "s")

    def update(self, v, gradient, iterations, m):
        v.assign_sub(m)


def test_an_update_takes_the_slots(strategy):
    """It is told with what it would be called."""
    with pytest.raises(
        ps.errors.ProgramError, match=r"is called with \(v, gradient, iterations, m, s\): too many"
    ) as caught:
        apply(strategy, Short(0.1), variable(strategy))
    assert str(caught.value).startswith(f"{line(Short.update)}Short.update")


@pytest.mark.parametrize("slots", ["momentum", "m", ("m", "m")])
def test_slots_are_names(strategy, slots):
    """One word has a name in each letter, and a tuple of one lacks its comma easily."""
    optimizer = Idle(0.1)
    optimizer.slots = slots
    with pytest.raises(TypeError, match=r"slots of Idle is .*must be a tuple of names, each of them once"):
        apply(strategy, optimizer, variable(strategy))


class Idle(Optimizer):
    slots = ("seen",)

    def update(self, v, gradient, iterations, seen):
        seen.assign(gradient)
        v - gradient


class Waiting(Optimizer):
    """Assigns what the variable has already, and for two steps of three nothing else."""

    def update(self, v, gradient, iterations):
        v.assign(v.value())
        v.assign(np.where(iterations % 3 == 0, v - gradient, v))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}, {"gradient_accumulation_steps": 2}])
def test_a_step_that_leaves_its_variable_alone_is_refused(strategy, options):
    """What decay or accumulation assign does not count, nor does a slot; an assignment of the same value does."""
    v = variable(strategy)
    with pytest.raises(ps.errors.ProgramError, match=r"does not assign its variable.*write v\.assign_sub") as caught:
        apply(strategy, Idle(0.1, **options), v)
    assert str(caught.value).startswith(f"{line(Idle.update)}Idle.update")
    waiting = Waiting(0.1)
    for expected in (0.0, 0.0, -1.0):
        apply(strategy, waiting, v)
        assert v.numpy().tolist() == [expected] * 3


def test_an_update_may_return_what_it_has_assigned(strategy):
    """`assign` gives the variable back; also several, in a nest."""

    class Brief(Optimizer):
        def update(self, v, gradient, iterations):
            return v.assign_sub(self.learning_rate * gradient)

    class Grouped(Brief):
        slots = ("last",)

        def update(self, v, gradient, iterations, last):
            return last.assign(gradient), [super().update(v, gradient, iterations), None]

    v = variable(strategy)
    for optimizer in (Brief(0.5), Grouped(0.25)):
        apply(strategy, optimizer, v)
    assert v.numpy().tolist() == [-0.75] * 3


class Noisy(Optimizer):
    def update(self, v, gradient, iterations):
        v.assign_add(np.random.normal(size=v.shape).astype("float32"))


@kinds("servers-1x2")
def test_noise_is_no_part_of_an_optimizer(strategy):
    """It is traced once, and the first call's noise would be that of all."""
    v = variable(strategy)
    with pytest.raises(ps.errors.ProgramError, match="add it to the gradient") as caught:
        apply(strategy, Noisy(0.1), v)
    assert str(caught.value).startswith(f"{line(Noisy.update, 1)}Noisy.update makes an array (float32[3])")


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
    with pytest.raises(ps.errors.ProgramError, match=f"uses <.*heat {where}.*keep it in a slot") as caught:
        apply(strategy, Heated(0.1) if where == "optimizer" else ps.optimizers.SGD(Cooling()), v)
    assert str(caught.value).startswith(line(method, 1) + method.__qualname__.rpartition("<locals>.")[2])


class Flat(Schedule):
    """Returns a number of its own."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * 2


class Given(Schedule):
    """Returns what `kind` says."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, step):
        return {"none": None, "word": "fast", "vector": step * np.ones(2)}[self.kind]


def test_a_schedule_may_return_a_plain_number(strategy):
    """As in Keras; it may be changed, and makes the steps of a number."""
    v = variable(strategy)
    schedule = Flat(0.25)
    optimizer = ps.optimizers.SGD(schedule)
    for rate, expected in ((0.25, -0.5), (0.5, -1.5)):
        schedule.rate = rate
        apply(strategy, optimizer, v)
        assert v.numpy().tolist() == [expected] * 3


@pytest.mark.parametrize("kind", ["none", "word", "vector"])
def test_a_schedule_gives_one_number(strategy, kind):
    """Nothing else is a rate; the error names the schedule."""
    with pytest.raises(ps.errors.ProgramError, match=r"the schedule Given returns .* one number for each step"):
        apply(strategy, ps.optimizers.SGD(Given(kind)), variable(strategy))


def test_an_optimizer_begins_with_its_base(strategy):
    """Whatever is asked of one whose `__init__` does not call that of its base, the error says so."""

    class Own(Optimizer):
        def __init__(self, rate):
            self.rate = rate

    v, optimizer = variable(strategy), Own(0.1)
    for use in (lambda: apply(strategy, optimizer, v), lambda: optimizer.build([v]), lambda: optimizer.learning_rate):
        with pytest.raises(AttributeError, match=r"^Own has no attribute .* call super\(\).__init__\(learning_rate"):
            use()
    with pytest.raises(AttributeError, match=r"^SGD has no attribute 'rate'$"):
        ps.optimizers.SGD(0.1).rate  # noqa: B018


def test_an_optimizer_says_what_a_step_is(strategy):
    """And a schedule what the rate is: the error names the class, and what to write."""

    class Empty(Optimizer):
        pass

    class Endless(Schedule):
        pass

    v = variable(strategy)
    with pytest.raises(NotImplementedError, match=r"Empty does not say .* write update\(self, v, gradient"):
        apply(strategy, Empty(0.1), v)
    with pytest.raises(NotImplementedError, match=r"Endless does not say .* write __call__\(self, step\)"):
        apply(strategy, ps.optimizers.SGD(Endless()), v)


def test_complex_gradients_are_for_complex_variables(strategy):
    """Their imaginary part would be lost; refused by the variable's name, before anything is changed."""
    v, optimizer = variable(strategy), ps.optimizers.SGD(0.5)
    for gradient in (np.ones(3, "complex64"), [1j, 0.0, 1.0]):
        with pytest.raises(ValueError, match=f"gradient of variable '{v.name}' is complex, and the variable float32"):
            in_replicas(strategy, lambda _, gradient=gradient: optimizer.apply_gradients([(gradient, v)]))
    assert v.numpy().tolist() == [0.0] * 3
    w = variable(strategy, np.zeros(2, "complex64"))
    apply(strategy, ps.optimizers.SGD(0.5), w, 2 + 2j)
    assert w.numpy().tolist() == [-1 - 1j] * 2
