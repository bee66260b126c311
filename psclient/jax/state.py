"""`TrainState`: the face of flax's, over parameters and an optimizer that live on servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from psclient._src.distribute.strategy import Strategy
from psclient._src.interpreter.interrupts import INTERRUPTS
from psclient.jax.parameters import Parameters, Reduction, Values, check_optimizer, strategy_of
from psclient.jax.rows import JoinedRows
from psclient.jax.trees import Tree
from psclient.optimizers import Optimizer
from pswire.errors import InvalidCall, InvalidType

NO_ROWS: Mapping[JoinedRows, Any] = MappingProxyType({})


class TrainState:
    """Parameters after a number of steps. `create` makes the first state, `apply_gradients` the next one.

    A state is a pytree of `step` and `params`, so that it may be given to compiled functions. Its values are fetched
    when they are first read, and then stay. Servers store only the values of the newest state: an older one keeps its
    values if they were read before, and cannot make steps.

    Source: `flax.training.train_state.TrainState`. There is no `opt_state`: slots are on the servers, `tx.variables`.

    Attributes:
        apply_fn: the model's function; stored for the script.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import psclient as ps
        >>> import psclient.jax as psj
        >>> strategy = ps.ParameterServerStrategy()
        >>> params = {"w": jnp.array([1.0, 2.0])}
        >>> state = psj.TrainState.create(
        ...     apply_fn=None, params=params, tx=psj.optimizers.sgd(0.5), strategy=strategy
        ... )
        >>> def loss_fn(params, x):
        ...     return jnp.sum(params["w"] * x)
        >>> loss, grads = jax.jit(jax.value_and_grad(loss_fn))(state.params, jnp.ones(2))
        >>> state = state.apply_gradients(grads=grads)
        >>> state.params["w"].tolist()
        [0.5, 1.5]
        >>> strategy.close()
    """

    def __init__(
        self,
        parameters: Parameters,
        apply_fn: Callable[..., Any] | None,
        version: int | None,
        values: Values | None = None,
    ) -> None:
        self.apply_fn = apply_fn
        self._parameters = parameters
        self._version = version  # None of what a function of trees has made
        self._values = values

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Tree,
        tx: Optimizer,
        strategy: Strategy | None = None,
        tables: Sequence[Any] = (),
        reduction: Reduction = "mean",
        name: str = "params",
    ) -> TrainState:
        """Creates a variable for each parameter, and the optimizer's slots; in the same way in all processes.

        The parameters of the first process are used. In cross-replica context, or outside of every scope.

        Args:
            apply_fn: the model's function, which becomes an attribute; None for none.
            params: a pytree of arrays of float16, bfloat16, float32 or float64. The leaf at `dense`, `kernel` becomes
                the variable "params/dense/kernel".
            tx: an optimizer of `psj.optimizers`, with optax's formulas, or of `ps.optimizers`, with Keras's.
            strategy: the strategy that owns the variables, with one replica in this process; None for that of the
                scope.
            tables: tables whose rows are trained with it, so that their slots exist from the beginning.
            reduction: "mean" if each worker's gradients are those of the mean over its own examples: they are weighted
                by its number of examples, and the result is the mean over all. If that number is not known, as without
                a `psj.Loader` or for a loader without shards, all workers have the same weight. "sum" adds them up, as
                `ps.optimizers` do: divide the loss by the global batch size.
            name: the first part of the variables' names.

        Returns:
            The first state.

        Raises:
            RuntimeError: there is no strategy.
            TypeError: `tx` is not one of these optimizers, for example one of optax; or a parameter is not an array.
            ValueError: another state uses `tx`; a parameter is of integers, complex, or of float64 without
                `jax_enable_x64`; the strategy has several replicas here.
            VariableMismatch: another process has parameters of other names or shapes.
        """
        home = Parameters(strategy_of(strategy), check_optimizer(tx), params, tables, name, reduction)
        return cls(home, apply_fn, home.version)

    # ---- Values ----

    @property
    def params(self) -> Tree:
        """The parameters, a pytree of JAX arrays on its default device; waits for the step that made them.

        Raises:
            RuntimeError: this state is not the newest, and its values were not read while it was.
        """
        return self._fetched.params

    @property
    def step(self) -> int:
        """The number of steps, those before a restore included; fetched as `params`."""
        return self._fetched.step

    @property
    def _fetched(self) -> Values:
        if self._version == self._parameters.version and not self._is_of_now:
            self._values = self._parameters.read()
        if self._values is None:
            raise InvalidCall(
                "this TrainState is outdated and its parameters were freed; use the state that "
                "apply_gradients returned: state = state.apply_gradients(grads=grads)"
            )
        return self._values

    @property
    def _is_of_now(self) -> bool:
        """False where a checkpoint was restored since, or something was assigned to a variable."""
        return self._values is not None and self._parameters.are_of_now(self._values)

    @property
    def tx(self) -> Optimizer:
        """The optimizer, whose steps run on the servers."""
        return self._parameters.tx

    @property
    def variables(self) -> Any:
        """The variables, in dicts by the keys of `params`, for `ps.train.Checkpoint(params=state.variables)`."""
        return self._parameters.variables

    def _trackable_children(self) -> dict[str, Any]:
        """Returns what checkpoints save of it, by name: parameters, optimizer, tables. In any context."""
        tables = {"tables": self._parameters.tables} if self._parameters.tables else {}
        return {"params": self.variables, "tx": self.tx, **tables}

    # ---- Steps ----

    def apply_gradients(self, *, grads: Tree, rows: Mapping[JoinedRows, Any] = NO_ROWS) -> TrainState:
        """Makes a step on the servers, with the gradients of all workers, in one round; returns the next state.

        It returns when the gradients are computed and sent. In any context except an update function, by all workers of
        a synchronous job.

        Args:
            grads: a pytree like `params`, with gradients of this worker's examples; see `reduction` of `create`.
            rows: gradients of rows of tables, by the results of `psj.lookup`: `{rows: gradient by rows.values}`.

        Returns:
            The new state, whose values are fetched when they are read.

        Raises:
            RuntimeError: this state is not the newest.
            TypeError: called in `jax.jit`; or a key of `rows` is not a result of `psj.lookup`.
            ValueError: the gradients have another structure than the parameters, or one has another shape; or a table
                was looked up twice.
        """
        self._check_newest("apply_gradients")
        self._parameters.apply(grads, rows)
        after = self._after(self.apply_fn)
        if INTERRUPTS.held:  # the caller gets that in place of the new state, and goes on with this one
            self._version, self._values = after._version, None
        return after

    def newest(self) -> TrainState:
        """Returns the newest state, for a script that has lost it by an exception. In any context.

        Makes no round.
        """
        return self._after(self.apply_fn)

    def replace(self, **changes: Any) -> TrainState:
        """Returns a state with other parameters, or with another function. In the same way in all processes.

        Args:
            changes: `params`, which are assigned to the variables, in a round; `apply_fn`.

        Raises:
            TypeError: another argument is given.
            RuntimeError: this state is not the newest.
            ValueError: the parameters have another structure, or one has another shape.
        """
        if others := changes.keys() - {"params", "apply_fn"}:
            raise InvalidType(
                f"replace({', '.join(sorted(others))}=...) is not supported; only params and apply_fn can "
                "be replaced. Steps and slots are on the servers and restored by checkpoints; tx cannot "
                "change"
            )
        self._check_newest("replace")
        if "params" in changes:
            self._parameters.assign(changes["params"])
        return self._after(changes.get("apply_fn", self.apply_fn))

    def _after(self, apply_fn: Callable[..., Any] | None) -> TrainState:
        return TrainState(self._parameters, apply_fn, self._parameters.version)

    def _check_newest(self, what: str) -> None:
        if self._version is None:
            raise InvalidCall(
                f"{what} was called on a state made by a pytree function, such as jax.jit or jax.tree.map, "
                "whose values are not on the servers; call it on the result of create or apply_gradients, "
                "and assign values with state.replace(params=...)"
            )
        if self._version != self._parameters.version:
            raise InvalidCall(
                f"{what} was called on an outdated state, but servers keep only the newest parameters; use "
                "state = state.apply_gradients(grads=grads), or state = state.newest() after an exception"
            )

    def __repr__(self) -> str:
        return f"TrainState({self._parameters!r})"

    # ---- A pytree ----

    def _flatten(self) -> tuple[list[tuple[Any, Any]], tuple[Parameters, Callable[..., Any] | None]]:
        found = self._fetched
        key = jax.tree_util.GetAttrKey
        return [(key("step"), found.step), (key("params"), found.params)], (self._parameters, self.apply_fn)

    @classmethod
    def _unflatten(cls, fixed: tuple[Parameters, Callable[..., Any] | None], children: Iterable[Any]) -> TrainState:
        parameters, apply_fn = fixed
        step, params = children
        return cls(parameters, apply_fn, None, Values(step, (), params))


jax.tree_util.register_pytree_with_keys(TrainState, TrainState._flatten, TrainState._unflatten)
