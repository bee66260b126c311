"""Modules of Flax NNX, whose parameters are attributes: trained in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psclient._src.distribute.strategy import Strategy
from psclient.jax.parameters import Reduction
from psclient.jax.rows import Rows
from psclient.jax.state import NO_ROWS, TrainState
from psclient.optimizers import Optimizer


class Bound:
    """A module of Flax NNX and the state that trains its parameters; made by `bind`. The face of `nnx.Optimizer`.

    Args:
        module: the module.
        wrt: the kind of variables that are trained, such as `nnx.Param`.
        state: the state of its parameters.

    Attributes:
        module: the constructor's argument.
        state: the newest `TrainState` of its parameters.
    """

    def __init__(self, module: Any, wrt: Any, state: TrainState) -> None:
        self.module = module
        self.state = state
        self._wrt = wrt
        self.pull()

    @property
    def step(self) -> int:
        """The number of steps that were applied."""
        return self.state.step

    @property
    def tx(self) -> Optimizer:
        """The optimizer, whose steps servers make."""
        return self.state.tx

    def update(self, grads: Any, rows: Mapping[Rows, Any] = NO_ROWS) -> None:
        """Makes a step on the servers, and gives the module the new parameters, for which it waits.

        Args:
            grads: what `nnx.grad(loss, argnums=nnx.DiffState(0, wrt))` gives, or `nnx.grad(loss)` of `nnx.Param`.
            rows: as of `TrainState.apply_gradients`.

        Raises:
            TypeError, ValueError: as `TrainState.apply_gradients`.
        """
        self.state = self.state.apply_gradients(grads=_plain(grads), rows=rows)
        self.pull()

    def pull(self) -> None:
        """Gives the module the parameters of now, as after a checkpoint was restored."""
        from flax import nnx

        own = nnx.state(self.module, self._wrt)
        nnx.replace_by_pure_dict(own, self.state.params)
        nnx.update(self.module, own)

    def _trackable_children(self) -> dict[str, Any]:
        """Returns what checkpoints save of it, by name. In any context."""
        return self.state._trackable_children()


def bind(
    module: Any,
    tx: Optimizer,
    *,
    wrt: Any = None,
    strategy: Strategy | None = None,
    tables: Sequence[Any] = (),
    reduction: Reduction = "mean",
    name: str = "params",
) -> Bound:
    """Trains the parameters of a module of Flax NNX on the servers; by all processes alike.

        optimizer = psj.bind(module, psj.optimizers.adam(1e-3), strategy=strategy)
        loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(module, batch)
        optimizer.update(grads)

    Variables of other kinds, such as `nnx.BatchStat`, stay this process's own.

    Args:
        module: an `nnx.Module`.
        tx, strategy, tables, reduction, name: as of `TrainState.create`.
        wrt: the kind of variables that are trained; None for `nnx.Param`.

    Returns:
        The module with its state; the module has the parameters of the servers.

    Raises:
        ImportError: Flax is not installed.
        RuntimeError, TypeError, ValueError, VariableMismatch: as `TrainState.create`.
    """
    from flax import nnx

    kind = nnx.Param if wrt is None else wrt
    params = nnx.to_pure_dict(nnx.state(module, kind))
    state = TrainState.create(
        apply_fn=None, params=params, tx=tx, strategy=strategy, tables=tables, reduction=reduction, name=name
    )
    return Bound(module, kind, state)


def _plain(grads: Any) -> Any:
    from flax import nnx

    return nnx.to_pure_dict(grads) if isinstance(grads, nnx.State) else grads
