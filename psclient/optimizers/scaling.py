"""Loss scales that find themselves."""

from __future__ import annotations

from psclient.configured import Configured


class DynamicLossScale(Configured):
    """Keeps small gradients of half precision away from zero: `Optimizer(..., loss_scale_factor=DynamicLossScale())`.

    The loss is multiplied by the scale, and the gradients divided by it. A step whose gradients are not all finite is
    left out and counted in `optimizer.skipped_steps`, and halves the scale; it doubles after a while without such.

    Source: `keras.optimizers.LossScaleOptimizer`.

    Args:
        initial_scale: the first scale.
        dynamic_growth_steps: after how many steps in a row it doubles.

    Raises:
        ValueError: one of them is not more than 0.
    """

    def __init__(self, initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000) -> None:
        if not initial_scale > 0 or dynamic_growth_steps < 1:
            raise ValueError(
                f"initial_scale is {initial_scale!r} and dynamic_growth_steps {dynamic_growth_steps!r}; both must be "
                "more than 0"
            )
        self.initial_scale = float(initial_scale)
        self.dynamic_growth_steps = int(dynamic_growth_steps)
