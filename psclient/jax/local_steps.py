"""`DiLoCo` and `LocalSGD`: workers make local steps with an optimizer of optax, and exchange now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from psclient._src.distribute.strategy import Strategy
from psclient._src.variables.compression import Compressed, check_compression
from psclient._src.variables.variable import Variable
from psclient.jax.arrays import all_to_jax, to_host
from psclient.jax.optimizers import sgd
from psclient.jax.parameters import check_optimizer, strategy_of
from psclient.jax.trees import Leaf, Tree, check_alike, first_value, is_traced, leaves_of, nested
from psclient.optimizers import Optimizer
from psclient.optimizers.local_steps.fragment import Fragment, check_servers, rules_of
from psclient.optimizers.local_steps.schedule import Schedule, balanced
from psclient.optimizers.local_steps.steps import LocalSteps
from pswire.errors import InvalidArgument, InvalidCall, InvalidType
from pswire.model.tensor import Array


class _Exchange:
    """The outer parameters of one pytree.

    Args:
        params: the pytree.
        given: the arguments of `DiLoCo`.

    Attributes:
        steps: counts, and exchanges.
    """

    def __init__(self, params: Tree, given: _Given) -> None:
        strategy, self._name = strategy_of(given.strategy), given.name
        check_servers(strategy)
        leaves, self._structure = leaves_of(params, given.name)
        if not leaves:
            raise InvalidArgument("there are no parameters to exchange; pass a pytree of arrays")
        values = [first_value(leaf) for leaf in leaves]
        self.parts = _cut(leaves, values, given.fragments)
        with strategy.scope():
            self._variables = [
                Variable(value, name=leaf.name, compression=given.compression)
                for leaf, value in zip(leaves, values, strict=True)
            ]
        self.rules = rules_of(given.outer, len(self.parts))
        made = [
            Fragment(strategy, rule, [self._variables[place] for place in part])
            for rule, part in zip(self.rules, self.parts, strict=True)
        ]
        self._leaves = [leaf.without_value() for leaf in leaves]
        self.steps = LocalSteps(strategy, made, given.schedule, f"{given.name}/local_steps")

    @property
    def variables(self) -> Any:
        """The outer parameters, in dicts by the keys of the pytree."""
        return nested((leaf.path, v) for leaf, v in zip(self._leaves, self._variables, strict=True))

    def flat(self, params: Tree) -> list[Any]:
        """Returns the leaves of parameters like those of the beginning."""
        leaves = check_alike(params, (leaf.name for leaf in self._leaves), self._structure, self._name, "params")
        if any(map(is_traced, leaves)):
            raise InvalidType(
                "step was called on traced parameters, in jax.jit or scan, but it exchanges with servers; compile "
                "only the inner step, and call this outside"
            )
        return leaves

    def tree(self, leaves: Sequence[Any]) -> Tree:
        """Returns leaves as the pytree."""
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def outer(self) -> list[Any]:
        """Returns all outer parameters."""
        found: list[Any] = [None] * len(self._leaves)
        self.steps.take_all(lambda number, outer, alpha: self.put(found, self.parts[number], outer))
        return found

    def put(self, leaves: list[Any], part: Sequence[int], outer: Sequence[Array], alpha: float = 0.0) -> None:
        """Merges outer parameters into leaves, at the places of a fragment."""
        for place, theirs in zip(part, all_to_jax(outer), strict=True):
            leaves[place] = leaves[place] * alpha + theirs * (1 - alpha) if alpha else theirs


@dataclass(frozen=True, eq=False)
class LocalState:
    """Where a worker stands between two exchanges. `init` makes the first one, `step` the next one.

    Attributes:
        step: the local steps that this worker has made.
        merged: True if the last step merged parameters with outer ones.
    """

    _exchange: _Exchange
    step: int = 0
    merged: bool = False

    @property
    def outer_params(self) -> Tree:
        """The outer parameters after the last exchange, a pytree; after a restore those that were restored."""
        return self._exchange.tree(self._exchange.outer())

    @property
    def variables(self) -> Any:
        """The outer parameters as variables, in dicts by the keys of the pytree."""
        return self._exchange.variables

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's own counts; the script keeps the state of its inner optimizer."""
        steps = self._exchange.steps
        return {"step": steps.step, "tokens": steps.tokens}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the counts that `state_dict` has returned; the state is outdated then, and `newest` is the next one."""
        self._exchange.steps.continue_at(state_dict["step"], state_dict["tokens"])

    def newest(self) -> LocalState:
        """Returns the state of now, for a script that has restored one, or has lost it by an exception."""
        return LocalState(self._exchange, self._exchange.steps.step)

    def _trackable_children(self) -> Mapping[str, Any]:
        """Returns what `ps.train.Checkpoint` saves: outer parameters, the outer optimizer, and the count of steps."""
        steps = self._exchange.steps
        return {"params": self.variables, "outer": self._exchange.rules, "steps": steps.saved(lambda: None)}


class Functions(NamedTuple):
    """The functions of `DiLoCo`.

    Attributes:
        init: takes the parameters of this worker; returns those of the first worker, and a `LocalState`.
        step: takes the parameters after an inner step, the `LocalState`, and optionally `tokens`, with which that was
            made; returns the parameters to go on with, and the next state.
    """

    init: Callable[[Tree], tuple[Tree, LocalState]]
    step: Callable[..., tuple[Tree, LocalState]]


class _Given(NamedTuple):
    outer: Optimizer
    fragments: int | Sequence[str]
    schedule: Schedule
    compression: Compressed
    strategy: Strategy | None
    name: str


def DiLoCo(
    outer: Optimizer,
    *,
    sync_every: int = 100,
    fragments: int | Sequence[str] = 1,
    sync_delay: int = 0,
    alpha: float = 0.0,
    dynamic: bool = False,
    compression: Compressed = None,
    strategy: Strategy | None = None,
    name: str = "params",
) -> Functions:
    """Local steps with any inner optimizer; an outer optimizer on the servers combines the workers.

    After every `sync_every`-th local step a worker sends its pseudo-gradient, the outer parameters minus its own. The
    servers give the mean over workers to the outer optimizer, and the worker continues with the new outer parameters.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105; "Streaming DiLoCo", arXiv 2501.18512.

    Args:
        outer: an optimizer of `psj.optimizers` or `ps.optimizers`, which the servers run.
        sync_every: H, the local steps between two exchanges of a parameter.
        fragments: P, into how many fragments of about equal size the parameters are cut; or the fragments, each by the
            first part of its leaves' names, such as "params/encoder". One is exchanged after every H / P steps.
        sync_delay: tau, the local steps that are made while an exchange is under way; less than H / P.
        alpha: the part of a worker's own parameters in those after an exchange: alpha * own + (1 - alpha) * outer.
        dynamic: True if slower workers make fewer local steps than `sync_every` between two exchanges, so that all
            exchange about equally often; for asynchronous workers, with one fragment.
        compression: how pseudo-gradients are compressed; None for what the strategy says.
        strategy: the strategy that owns the outer parameters; None for that of the scope.
        name: the first part of the variables' names.

    Returns:
        A pair of functions, `init` and `step`. Both leave their arguments as they are.

    Raises:
        TypeError: an argument has another type.

    Examples:
        >>> import jax.numpy as jnp
        >>> import psclient as ps
        >>> import psclient.jax as psj
        >>> strategy = ps.ParameterServerStrategy()
        >>> init, step = psj.DiLoCo(psj.optimizers.sgd(1.0), sync_every=2, strategy=strategy)
        >>> params, state = init({"w": jnp.array([1.0, 2.0])})
        >>> for _ in range(2):
        ...     params = {"w": params["w"] - 0.25}  # an inner step, compiled by jax.jit
        ...     params, state = step(params, state)
        >>> params["w"].tolist(), state.merged
        ([0.5, 1.5], True)
        >>> strategy.close()
    """
    check_compression(compression, "DiLoCo")
    count = fragments if isinstance(fragments, int) else len(fragments)
    schedule = Schedule(sync_every, count, sync_delay, alpha, dynamic)
    given = _Given(check_optimizer(outer), fragments, schedule, compression, strategy, name)

    def init(params: Tree) -> tuple[Tree, LocalState]:
        made = _Exchange(params, given)
        return made.tree(made.outer()), LocalState(made)

    return Functions(init, _step)


def LocalSGD(**options: Any) -> Functions:
    """Local steps with any inner optimizer; the workers' parameters are averaged.

    `DiLoCo` whose outer optimizer takes the mean. Source: Stich, "Local SGD Converges Fast and Communicates Little",
    arXiv 1805.09767.

    Args:
        options: as in `DiLoCo`, without `outer`.

    Returns:
        As `DiLoCo`.
    """
    return DiLoCo(sgd(1.0), **options)


def _step(params: Tree, state: LocalState, tokens: float | None = None) -> tuple[Tree, LocalState]:
    exchange = state._exchange
    steps = exchange.steps
    if state.step != steps.step:
        raise InvalidCall(
            f"this LocalState is of local step {state.step}, but this worker has made {steps.step}; use the state "
            "that step returned, or state.newest() after an exception or a restore"
        )
    leaves, parts = exchange.flat(params), exchange.parts
    merged = steps.advance(
        tokens,
        lambda number: to_host([leaves[place] for place in parts[number]]),
        lambda number, outer, alpha: exchange.put(leaves, parts[number], outer, alpha),
    )
    return exchange.tree(leaves), LocalState(exchange, steps.step, merged)


def _cut(leaves: Sequence[Leaf], values: Sequence[Array], fragments: int | Sequence[str]) -> list[list[int]]:
    """Returns the places of each fragment's leaves."""
    if isinstance(fragments, int):
        return balanced([value.nbytes for value in values], fragments)
    found: list[list[int]] = [[] for _ in fragments]
    for place, leaf in enumerate(leaves):
        own = [n for n, prefix in enumerate(fragments) if f"{leaf.name}/".startswith(f"{prefix.rstrip('/')}/")]
        if len(own) != 1:
            raise InvalidArgument(f"{leaf.name} is in {len(own)} fragments; each parameter has to be in one")
        found[own[0]].append(place)
    if not all(found):
        raise InvalidArgument(
            f"no parameter's name begins with {fragments[found.index([])]!r}; leave that fragment out"
        )
    return found
