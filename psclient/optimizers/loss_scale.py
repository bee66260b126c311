"""Loss scales that find themselves."""

from __future__ import annotations

import numpy as np

from psclient.optimizers.configs import Described
from psclient.optimizers.ranges import Range, check_count, check_number

_FLOAT32 = np.finfo(np.float32)
_SINGLE = Range("a float32 of more than 0", lambda x: float(_FLOAT32.tiny) <= x <= float(_FLOAT32.max))


class DynamicLossScale(Described):
    """Keeps small gradients of half precision from underflow: `Optimizer(..., loss_scale_factor=DynamicLossScale())`.

    The loss is multiplied by the scale, and the gradients are divided by it. A step with gradients that are not finite
    is skipped, counted in `optimizer.skipped_steps`, and halves the scale. The scale doubles after a number of steps
    without a skipped one.

    Source: `keras.optimizers.LossScaleOptimizer`.

    Args:
        initial_scale: the first scale.
        dynamic_growth_steps: number of consecutive steps after which it doubles.

    Raises:
        ValueError: an argument is not positive, the scale is not a float32, or the number of steps not an integer.
        TypeError: the scale is not a number.
    """

    def __init__(self, initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000) -> None:
        self.initial_scale = check_number("initial_scale", initial_scale, _SINGLE)
        self.dynamic_growth_steps = check_count("dynamic_growth_steps", dynamic_growth_steps, 1)
