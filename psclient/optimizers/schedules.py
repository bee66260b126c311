"""Learning rates that depend on the number of steps: Keras's schedules, and a linear warm-up.

Servers compute a schedule from their count of steps, so that all processes use the same rate, also those that join late
or restore a checkpoint. Called with a number, a schedule returns the rate of that step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from psclient._src.arrays.devices import Value
from psclient.optimizers.configs import CustomObjects, Described
from psclient.optimizers.ranges import AT_LEAST_0, AT_LEAST_1, MORE_THAN_0, check_number


class LearningRateSchedule(Described):
    """Base of all schedules: a subclass stores numbers as attributes and computes the rate in `__call__`.

    Source: `keras.optimizers.schedules.LearningRateSchedule`.
    """

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step.

        Args:
            step: number of steps before this one, or a stand-in for it in an update function: use NumPy functions, and
                `np.where` instead of `if`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define the rate; implement __call__(self, step)")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: CustomObjects | None = None) -> Self:
        """Makes a schedule as optimizers are made; ignores Keras's `name` if the constructor does not take one."""
        known = cls._arguments()
        kept = {name: value for name, value in config.items() if name != "name" or name in known}
        return super().from_config(kept, custom_objects)


class Constant(LearningRateSchedule):
    """The same rate in every step, as a schedule.

    Args:
        learning_rate: the rate.

    Raises:
        ValueError: the rate is not finite; all schedules check all their numbers.
        TypeError: the rate is not a number; all schedules check all their numbers.
    """

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = check_number("learning_rate", learning_rate)

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        return np.full_like(_float(step), self.learning_rate)


class _Decay(LearningRateSchedule):
    """Base of schedules that decay by the same rule in each `decay_steps` steps."""

    def __init__(
        self, initial_learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
    ) -> None:
        self.initial_learning_rate = check_number("initial_learning_rate", initial_learning_rate)
        self.decay_steps = check_number("decay_steps", decay_steps, MORE_THAN_0)
        self.decay_rate = check_number("decay_rate", decay_rate, AT_LEAST_0)
        self.staircase = bool(staircase)

    def _decays(self, step: Value) -> Value:
        decays = _float(step) / self.decay_steps
        return np.floor(decays) if self.staircase else decays


class ExponentialDecay(_Decay):
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    Source: `keras.optimizers.schedules.ExponentialDecay`.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: number of steps in which the rate decays once.
        decay_rate: factor of one decay.
        staircase: True if the rate changes only every `decay_steps`.
    """

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        return self.initial_learning_rate * self.decay_rate ** self._decays(step)


class InverseTimeDecay(_Decay):
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`.

    Source: `keras.optimizers.schedules.InverseTimeDecay`.

    Args:
        initial_learning_rate: as in `ExponentialDecay`.
        decay_steps: as in `ExponentialDecay`.
        decay_rate: as in `ExponentialDecay`.
        staircase: as in `ExponentialDecay`.
    """

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        return self.initial_learning_rate / (1 + self.decay_rate * self._decays(step))


class PiecewiseConstantDecay(LearningRateSchedule):
    """`values[0]` up to and including step `boundaries[0]`, then `values[1]`, and so on.

    Source: `keras.optimizers.schedules.PiecewiseConstantDecay`.

    Args:
        boundaries: steps, increasing.
        values: rates, one more than boundaries.

    Raises:
        ValueError: the numbers of boundaries and values do not fit, or boundaries do not increase.
    """

    def __init__(self, boundaries: Sequence[float], values: Sequence[float]) -> None:
        if len(values) != len(boundaries) + 1:
            raise ValueError(f"{len(boundaries)} boundaries need {len(boundaries) + 1} values, not {len(values)}")
        if list(boundaries) != sorted(set(boundaries)):
            raise ValueError(f"boundaries must increase: {list(boundaries)}")
        self.boundaries = tuple(check_number("a boundary", boundary) for boundary in boundaries)
        self.values = tuple(check_number("a value", value) for value in values)

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        step = _float(step)
        rate = np.full_like(step, self.values[0])
        for boundary, value in zip(self.boundaries, self.values[1:], strict=True):
            rate = np.where(step > boundary, value, rate)
        return rate


class PolynomialDecay(LearningRateSchedule):
    """From `initial_learning_rate` to `end_learning_rate` in `decay_steps`, as `(1 - step / decay_steps) ** power`.

    Source: `keras.optimizers.schedules.PolynomialDecay`.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: number of steps after which the end is reached.
        end_learning_rate: the rate from then on.
        power: 1 for a straight line.
        cycle: True if the rate rises again after the end, over a longer cycle each time.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
    ) -> None:
        self.initial_learning_rate = check_number("initial_learning_rate", initial_learning_rate)
        self.end_learning_rate = check_number("end_learning_rate", end_learning_rate)
        self.decay_steps = check_number("decay_steps", decay_steps, MORE_THAN_0)
        self.power, self.cycle = check_number("power", power, AT_LEAST_0), bool(cycle)

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        step, whole = _float(step), self.decay_steps
        if self.cycle:
            whole = np.maximum(np.ceil(step / self.decay_steps), 1.0) * self.decay_steps
        left = 1 - np.minimum(step, whole) / whole
        return (self.initial_learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate


class CosineDecay(LearningRateSchedule):
    """Half a cosine from the initial rate to `alpha` of it, after an optional linear warm-up.

    Source: `keras.optimizers.schedules.CosineDecay`; Loshchilov and Hutter, "SGDR", 2017.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: number of steps of the cosine.
        alpha: the rate at its end, as a fraction of that at its beginning.
        warmup_target: the rate at the end of the warm-up; None for no warm-up.
        warmup_steps: number of steps of the warm-up; these come before `decay_steps`.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        alpha: float = 0.0,
        warmup_target: float | None = None,
        warmup_steps: float = 0,
    ) -> None:
        self.initial_learning_rate = check_number("initial_learning_rate", initial_learning_rate)
        self.decay_steps = check_number("decay_steps", decay_steps, MORE_THAN_0)
        self.alpha = check_number("alpha", alpha)
        self.warmup_target = None if warmup_target is None else check_number("warmup_target", warmup_target)
        self.warmup_steps = check_number("warmup_steps", warmup_steps, AT_LEAST_0)
        self.warms = warmup_target is not None and warmup_steps > 0

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        step = _float(step)
        if self.warmup_target is None:
            return self._decayed(step, self.initial_learning_rate)
        if not self.warms:
            return self._decayed(step, self.warmup_target)
        rise = (self.warmup_target - self.initial_learning_rate) * (step / self.warmup_steps)
        decayed = self._decayed(step - self.warmup_steps, self.warmup_target)
        return np.where(step < self.warmup_steps, rise + self.initial_learning_rate, decayed)

    def _decayed(self, step: Value, start: float) -> Value:
        done = np.minimum(step, self.decay_steps) / self.decay_steps
        return start * ((1 - self.alpha) * 0.5 * (1 + np.cos(math.pi * done)) + self.alpha)


class CosineDecayRestarts(LearningRateSchedule):
    """`CosineDecay` that restarts each time it ends, longer and lower.

    Source: `keras.optimizers.schedules.CosineDecayRestarts`; Loshchilov and Hutter, "SGDR", 2017.

    Args:
        initial_learning_rate: the rate at step 0.
        first_decay_steps: number of steps of the first cosine.
        t_mul: length of each cosine, as a multiple of the one before.
        m_mul: first rate of each cosine, as a multiple of the one before.
        alpha: the rate at the end of each, as a fraction of the initial rate.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        first_decay_steps: float,
        t_mul: float = 2.0,
        m_mul: float = 1.0,
        alpha: float = 0.0,
    ) -> None:
        self.initial_learning_rate = check_number("initial_learning_rate", initial_learning_rate)
        self.first_decay_steps = check_number("first_decay_steps", first_decay_steps, MORE_THAN_0)
        self.t_mul, self.m_mul = check_number("t_mul", t_mul, AT_LEAST_1), check_number("m_mul", m_mul, AT_LEAST_0)
        self.alpha = check_number("alpha", alpha)
        self.grows = self.t_mul != 1

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        done = _float(step) / self.first_decay_steps
        if self.grows:
            restarts = np.floor(np.log(1 - done * (1 - self.t_mul)) / np.log(np.full_like(done, self.t_mul)))
            before = (1 - self.t_mul**restarts) / (1 - self.t_mul)
            done = (done - before) / self.t_mul**restarts
        else:
            restarts = np.floor(done)
            done = done - restarts
        cosine = 0.5 * self.m_mul**restarts * (1 + np.cos(math.pi * done))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


class LinearWarmup(LearningRateSchedule):
    """Increases the rate linearly to another schedule's first rate, and then follows that schedule from its beginning.

    Args:
        schedule: the schedule after the warm-up; a number for a constant rate.
        warmup_steps: number of steps of the warm-up.
        initial_learning_rate: the rate at step 0.
    """

    def __init__(
        self, schedule: LearningRateSchedule | float, warmup_steps: float, initial_learning_rate: float = 0.0
    ) -> None:
        self.schedule = schedule if isinstance(schedule, LearningRateSchedule) else Constant(schedule)
        self.warmup_steps = check_number("warmup_steps", warmup_steps, MORE_THAN_0)
        self.initial_learning_rate = check_number("initial_learning_rate", initial_learning_rate)

    def __call__(self, step: Value) -> Value:
        """Returns the learning rate of a step."""
        step = _float(step)
        after = self.schedule(np.maximum(step - self.warmup_steps, 0.0))
        rise = (self.schedule(np.zeros_like(step)) - self.initial_learning_rate) * (step / self.warmup_steps)
        return np.where(step < self.warmup_steps, self.initial_learning_rate + rise, after)


def _float(step: Value) -> Value:
    # In half or single precision a step of many millions is not told from the next.
    return step.astype(np.float64) if hasattr(step, "astype") else np.float64(step)
