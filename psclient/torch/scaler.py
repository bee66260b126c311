"""`GradScaler`: torch's, which decides with all workers whether a step has _overflown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from psclient.torch.optimizer import Optimizer


class GradScaler(torch.amp.GradScaler):
    """Torch's loss scaler, also for optimizers of this package: an overflow in one worker counts in all workers.

    Such a step changes nothing in any worker, and all workers halve their scales; so scales stay the same everywhere.

    Source: `torch.amp.GradScaler`, with the same arguments.
    """

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Divides gradients, and looks for overflows among them: those of rows as well, which are of no group."""
        of: Any = optimizer
        if isinstance(optimizer, Optimizer):
            of = SimpleNamespace(param_groups=[{"params": optimizer._gradient_holders}])
        return super()._unscale_grads_(of, *args, **kwargs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Makes a step, unless gradients of a worker have NaN or infinity."""
        if not (isinstance(optimizer, Optimizer) and self.is_enabled()):
            return super().step(optimizer, *args, **kwargs)
        with optimizer._under_scaler():
            found = super().step(optimizer, *args, **kwargs)
        device = optimizer.device
        overflow = torch.full((), float(optimizer._overflown), device=device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {device: overflow}
        return found
