"""Loss scales that find themselves."""

from __future__ import annotations

import numpy as np

from psclient.optimizers.configs import Described
from psclient.optimizers.ranges import Range, check_count, check_number

_FLOAT32 = np.finfo(np.float32)
_SINGLE = Range("a float32 of more than 0", lambda x: float(_FLOAT32.tiny) <= x <= float(_FLOAT32.max))


class DynamicLossScale(Described):
    """Keeps small gradients of half precision away from zero: `Optimizer(..., loss_scale_factor=DynamicLossScale())`.

    The loss is multiplied by the scale, and the gradients divided by it. A step whose gradients are not all finite is
    left out and counted in `optimizer.skipped_steps`, and halves the scale; it doubles after a while without such.

    Source: `keras.optimizers.LossScaleOptimizer`.

    Args:
        initial_scale: the first scale.
        dynamic_growth_steps: after how many steps in a row it doubles.

    Raises:
        ValueError: one of them is not more than 0, or the scale beyond float32, or the steps no whole number.
        TypeError: the scale is no number.
    """

    def __init__(self, initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000) -> None:
        self.initial_scale = check_number("initial_scale", initial_scale, _SINGLE)
        self.dynamic_growth_steps = check_count("dynamic_growth_steps", dynamic_growth_steps, 1)
