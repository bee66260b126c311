"""Strategies of one process without servers: `MirroredStrategy`, and the default one outside of every scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psclient._src import context
from psclient._src.arrays.devices import CPU, local_devices
from psclient._src.distribute.local import LocalBackend
from psclient._src.distribute.strategy import Strategy
from psclient._src.strategies.extended_v1 import StrategyExtended


class MirroredStrategy(Strategy):
    """Trains on the devices of this process: each variable has a copy on each device, and all get the same updates.

    Source: `tf.distribute.MirroredStrategy`.

    Args:
        devices: the devices of the replicas, such as `["gpu:0", "gpu:1"]`; by default all GPUs, or one CPU. Several CPU
            replicas differ by number: `["cpu:0", "cpu:1"]`.

    Raises:
        ConfigError: a device does not exist.
    """

    extended: StrategyExtended

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        super().__init__(StrategyExtended(self, LocalBackend(local_devices(devices))))


class DefaultExtended(StrategyExtended):
    """What the default strategy does otherwise than others."""

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function, in replica context; in any thread at any time."""
        with context.across_replicas(self._strategy, "run"):
            if not context.in_merge_call():
                self._strategy._begin_step()
            args, keys = context.arguments("run", args, kwargs)
            with context.enter_default_replica():
                return fn(*args, **keys)


class DefaultStrategy(Strategy):
    """The strategy outside of every scope: one replica, in which library code runs unchanged."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended(self, LocalBackend((CPU,))))

    def close(self) -> None:
        """Nothing: it is there as long as the process."""


context.install_default(DefaultStrategy())
