"""Strategies of one process without servers: `MirroredStrategy`, and the default one outside of every scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psclient._src import context
from psclient._src.devices import CPU, local_devices
from psclient._src.distribute.local import LocalBackend
from psclient._src.distribute.strategy import Strategy
from psclient._src.options import RunOptions


class MirroredStrategy(Strategy):
    """Trains on the devices of this process: each variable has a copy on each, and all get the same updates.

    Source: `tf.distribute.MirroredStrategy`.

    Args:
        devices: the replicas' devices, such as `["gpu:0", "gpu:1"]`; by default all GPUs, or one CPU. Several CPU
            replicas are told apart by number: `["cpu:0", "cpu:1"]`.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        super().__init__(LocalBackend(local_devices(devices)))


class DefaultStrategy(Strategy):
    """The strategy outside of every scope: one replica, in which library code runs unchanged."""

    def __init__(self) -> None:
        super().__init__(LocalBackend((CPU,)))

    def close(self) -> None:
        """Nothing: it is there as long as the process."""

    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls the function, in replica context; in any thread at any time."""
        with self.scope():
            context.require_cross_replica(self, "run")
            self.begin_step()
            args, keys = context.arguments("run", args, kwargs)
            with context.enter_default_replica():
                return fn(*args, **keys)


context.install_default(DefaultStrategy())
