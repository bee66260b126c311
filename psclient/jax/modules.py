"""Modules of Flax NNX, whose parameters are attributes: trained in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psclient import optimizers
from psclient._src.distribute.strategy import Strategy
from psclient.jax.parameters import Reduction
from psclient.jax.rows import JoinedRows
from psclient.jax.state import NO_ROWS, TrainState


class Optimizer:
    """Trains the parameters of a Flax NNX module on the servers, as `nnx.Optimizer` does; the same in all processes.

        optimizer = psj.Optimizer(model, psj.optimizers.adam(1e-3), strategy=strategy)
        loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, batch)
        optimizer.update(model, grads)

    Variables of other kinds, such as `nnx.BatchStat`, are not shared between processes.

    Args:
        model: an `nnx.Module`; its parameters are set to those on the servers.
        tx: as in `TrainState.create`.
        strategy: as in `TrainState.create`.
        wrt: the kind of variables to train; None for `nnx.Param`.
        tables: as in `TrainState.create`.
        reduction: as in `TrainState.create`.
        name: as in `TrainState.create`.

    Attributes:
        state: the newest `TrainState` of the parameters.

    Raises:
        ImportError: Flax is not installed.
        RuntimeError: as `TrainState.create`.
        TypeError: as `TrainState.create`.
        ValueError: as `TrainState.create`.
        VariableMismatch: as `TrainState.create`.
    """

    def __init__(
        self,
        model: Any,
        tx: optimizers.Optimizer,
        *,
        wrt: Any = None,
        strategy: Strategy | None = None,
        tables: Sequence[Any] = (),
        reduction: Reduction = "mean",
        name: str = "params",
    ) -> None:
        from flax import nnx

        self._wrt = nnx.Param if wrt is None else wrt
        params = nnx.to_pure_dict(nnx.state(model, self._wrt))
        self.state = TrainState.create(
            apply_fn=None, params=params, tx=tx, strategy=strategy, tables=tables, reduction=reduction, name=name
        )
        self.refresh(model)

    @property
    def step(self) -> int:
        """The number of steps."""
        return self.state.step

    @property
    def tx(self) -> optimizers.Optimizer:
        """The optimizer, whose steps run on the servers."""
        return self.state.tx

    def update(self, model: Any, grads: Any, rows: Mapping[JoinedRows, Any] = NO_ROWS) -> None:
        """Makes a step on the servers, waits for it, and sets the module's parameters to the new values.

        Args:
            model: the module.
            grads: the result of `nnx.grad(loss, argnums=nnx.DiffState(0, wrt))`, or `nnx.grad(loss)` for `nnx.Param`.
            rows: as in `TrainState.apply_gradients`.

        Raises:
            TypeError: as `TrainState.apply_gradients`.
            ValueError: as `TrainState.apply_gradients`.
        """
        self.state = self.state.apply_gradients(grads=_plain(grads), rows=rows)
        self.refresh(model)

    def refresh(self, model: Any) -> None:
        """Sets the module's parameters to those on the servers, for example after a checkpoint was restored."""
        from flax import nnx

        own = nnx.state(model, self._wrt)
        nnx.replace_by_pure_dict(own, self.state.params)
        nnx.update(model, own)

    def _trackable_children(self) -> dict[str, Any]:
        """Returns what checkpoints save of it, by name. In any context."""
        return self.state._trackable_children()


def _plain(grads: Any) -> Any:
    from flax import nnx

    return nnx.to_pure_dict(grads) if isinstance(grads, nnx.State) else grads
