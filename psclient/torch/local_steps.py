"""`DiLoCo` and `LocalSGD`: workers make local steps with an optimizer of torch, and exchange now and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from psclient._src.arrays.conversions import on_host, to_torch
from psclient._src.distribute.strategy import Strategy
from psclient._src.variables.compression import Compressed, check_compression
from psclient._src.variables.variable import Variable
from psclient.optimizers import Optimizer as Rule
from psclient.optimizers.local_steps.fragment import Fragment, rules_of
from psclient.optimizers.local_steps.schedule import Schedule, balanced
from psclient.optimizers.local_steps.steps import LocalSteps
from psclient.torch.groups import plain, rule_of, set_hyperparameter
from psclient.torch.optimizer import checked_strategy
from psclient.torch.parameters import Gate, check_parameter, name_of
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array

Parameters: TypeAlias = torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""What is exchanged: a module, or its `named_parameters()`, or parameters in an order that all workers have."""


class DiLoCo:
    """Local steps with an inner optimizer; an outer optimizer on the servers combines the workers.

    After every `sync_every`-th local step a worker sends its pseudo-gradient, the outer parameters minus its own. The
    servers give the mean over workers to the outer optimizer, and the worker continues with the new outer parameters.
    All workers call `step` after each step of the inner optimizer. The outer parameters need memory of the host alone,
    once. Buffers, such as BatchNorm's, stay those of their worker.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105; "Streaming DiLoCo", arXiv 2501.18512.

    Args:
        net: the module; or its `named_parameters()`, or a list of parameters.
        inner: the optimizer that trains the parameters locally, or several that train all of them together.
        outer: a class of `torch.optim`, or one of `ps.optimizers`, whose formula the servers run.
        sync_every: H, the local steps between two exchanges of a parameter.
        fragments: P, into how many fragments of about equal size the parameters are cut; or the fragments, each a
            module. One fragment is exchanged after every H / P steps.
        sync_delay: tau, the local steps that are made while an exchange is under way; less than H / P.
        alpha: the part of a worker's own parameters in those after an exchange: alpha * own + (1 - alpha) * outer. 0
            takes the outer parameters, 1 keeps the worker's own.
        dynamic: True if slower workers make fewer local steps than `sync_every` between two exchanges, so that all
            exchange about equally often; for asynchronous workers, with one fragment.
        compression: how pseudo-gradients are compressed; None for what the strategy says.
        strategy: the strategy that owns the outer parameters; None for that of the scope.
        prefix: prefix of the names of variables.
        options: arguments of the outer optimizer, such as lr, momentum and nesterov.

    Attributes:
        strategy: the strategy that owns the outer parameters.
        param_groups: the hyperparameters of the outer optimizer, in one group; they may be changed, as in torch.

    Raises:
        ValueError: H is not divisible by P, tau is too long, another worker has others, or `dynamic` does not go with
            the consistency; the inner optimizer trains other parameters; fragments do not have each parameter once;
            servers cannot run the outer optimizer.
        TypeError: an argument has another type; or the strategy has no servers, or several replicas in this process.
        VariableMismatch: workers have different parameters.

    Examples:
        >>> import torch
        >>> import psclient as ps
        >>> import psclient.torch as pst
        >>> strategy = ps.ParameterServerStrategy()
        >>> net = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.AdamW(net.parameters(), lr=0.1)
        >>> outer = pst.DiLoCo(
        ...     net, inner, torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, sync_every=2, strategy=strategy
        ... )
        >>> for _ in range(4):
        ...     inner.zero_grad()
        ...     net(torch.ones(4, 2)).square().mean().backward()
        ...     inner.step()
        ...     print(outer.step())
        False
        True
        False
        True
        >>> strategy.close()
    """

    def __init__(
        self,
        net: Parameters,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        outer: Rule | type[torch.optim.Optimizer],
        *,
        sync_every: int = 100,
        fragments: int | Sequence[torch.nn.Module] = 1,
        sync_delay: int = 0,
        alpha: float = 0.0,
        dynamic: bool = False,
        compression: Compressed = None,
        strategy: Strategy | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self.strategy = checked_strategy(strategy)
        check_compression(compression, "DiLoCo")
        count = fragments if isinstance(fragments, int) else len(fragments)
        schedule = Schedule(sync_every, count, sync_delay, alpha, dynamic)
        named = _named(net)
        self._inner = [inner] if isinstance(inner, torch.optim.Optimizer) else list(inner)
        _check_inner(self._inner, named)
        cut = _cut(named, fragments)
        self._tensors = [[p for _, p in some] for some in cut]
        rule, defaults = rule_of(outer, options, None)
        self.param_groups: list[dict[str, Any]] = [defaults]
        self._known = dict(defaults)
        self._rules = rules_of(rule, len(cut))
        self._variables: dict[str, Variable] = {}
        made = []
        for own, some in zip(self._rules, cut, strict=True):
            with self.strategy.scope():
                variables = [Variable(on_host(p), name=f"{prefix}{name}", compression=compression) for name, p in some]
            self._variables |= zip([name for name, _ in some], variables, strict=True)
            made.append(Fragment(self.strategy, own, variables))
        self._steps = LocalSteps(self.strategy, made, schedule, f"{prefix}local_steps")
        self._steps.take_all(self._merge)

    @property
    def variables(self) -> Mapping[str, Variable]:
        """The outer parameters, by the names of the parameters."""
        return dict(self._variables)

    @property
    def local_step(self) -> int:
        """The local steps that this worker has made."""
        return self._steps.step

    @property
    def exchanges(self) -> int:
        """The exchanges that this worker has sent."""
        return self._steps.exchanges

    # ---- Steps ----

    def step(self, tokens: float | None = None) -> bool:
        """Counts a local step; sends a fragment and merges one where it is time. Call it after the inner step.

        Args:
            tokens: the number of tokens, or examples, of this local step: workers are weighted by their sum since the
                last exchange. In every step or in none; None for equal weights.

        Returns:
            True if parameters were merged with outer ones.

        Raises:
            ValueError: `tokens` is negative or not finite, or was not given in other steps.
            PSError: an exchange failed, or the session has ended.
        """
        self._refresh_rules()
        return self._steps.advance(tokens, self._local, self._merge)

    def _local(self, number: int) -> list[Array]:
        """Returns the parameters of a fragment."""
        return [on_host(p) for p in self._tensors[number]]

    @torch.no_grad()
    def _merge(self, number: int, outer: Sequence[Array], alpha: float) -> None:
        for p, value in zip(self._tensors[number], outer, strict=True):
            theirs = to_torch(value).to(p.device)
            p.copy_(p * alpha + theirs * (1 - alpha) if alpha else theirs)

    def _refresh_rules(self) -> None:
        """Gives the rules the hyperparameters in `param_groups`."""
        for name, value in self.param_groups[0].items():
            if value != self._known.get(name, value):
                for rule in self._rules:
                    set_hyperparameter(rule, name, plain(value))
                self._known[name] = value

    # ---- State ----

    def state_dict(self) -> dict[str, Any]:
        """Returns what is this worker's own: the state of the inner optimizers, and its counts.

        The outer parameters and their optimizer are in checkpoints of `ps.train`.
        """
        steps = self._steps
        return {"inner": [each.state_dict() for each in self._inner], "step": steps.step, "tokens": steps.tokens}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets what `state_dict` has returned, of this worker or another one.

        Raises:
            ValueError: it has another number of inner optimizers.
        """
        for each, own in zip(self._inner, state_dict["inner"], strict=True):
            each.load_state_dict(own)
        self._steps.continue_at(state_dict["step"], state_dict["tokens"])

    def _trackable_children(self) -> Mapping[str, Any]:
        """Returns what `ps.train.Checkpoint` saves: outer parameters, the outer optimizer, and the count of steps."""
        return {
            "model": self.variables,
            "outer": self._rules,
            "steps": self._steps.saved(lambda: self._steps.take_all(self._merge)),
        }


class LocalSGD(DiLoCo):
    """Local steps with an inner optimizer; the workers' parameters are averaged.

    `DiLoCo` whose outer optimizer takes the mean. Source: Stich, "Local SGD Converges Fast and Communicates Little",
    arXiv 1805.09767.

    Args:
        net: as in `DiLoCo`.
        inner: as in `DiLoCo`.
        options: as in `DiLoCo`: sync_every, fragments, sync_delay, alpha, dynamic, compression, strategy, prefix.

    Raises:
        ValueError: as in `DiLoCo`.
        TypeError: as in `DiLoCo`.
    """

    def __init__(
        self, net: Parameters, inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], **options: Any
    ) -> None:
        super().__init__(net, inner, torch.optim.SGD, lr=1.0, **options)


def _named(net: Parameters) -> dict[str, torch.Tensor]:
    """Returns the parameters that are exchanged, by name: those that are trained, each once."""
    given = net.named_parameters() if isinstance(net, torch.nn.Module) else net
    found = [each if isinstance(each, tuple) else (str(number), each) for number, each in enumerate(given)]
    for name, p in found:
        if not isinstance(p, torch.Tensor):
            raise InvalidType(f"{name} is a {type(p).__name__}; pass a module, or its parameters")
    named = {name_of(name): p for name, p in found if p.requires_grad and not isinstance(p, Gate)}
    if not named:
        raise InvalidArgument("there are no parameters to exchange; pass a module with parameters that are trained")
    for name, p in named.items():
        check_parameter(name, p)
    return named


def _check_inner(inner: Sequence[torch.optim.Optimizer], named: Mapping[str, torch.Tensor]) -> None:
    """Raises an error unless the inner optimizers train exactly what is exchanged."""
    for each in inner:
        if not isinstance(each, torch.optim.Optimizer):
            raise InvalidType(f"inner is a {type(each).__name__}; pass an optimizer such as torch.optim.AdamW(...)")
    own = {id(p): p for each in inner for group in each.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for name, p in named.items() if id(p) not in own]
    others = len(own.keys() - {id(p) for p in named.values()})
    if missing or others:
        raise InvalidArgument(
            f"the inner optimizer trains {others} parameters that are not exchanged, and does not train "
            f"{', '.join(missing[:5]) or 'none'} of those that are; pass the same parameters to both"
        )


def _cut(
    named: Mapping[str, torch.Tensor], fragments: int | Sequence[torch.nn.Module]
) -> list[list[tuple[str, torch.Tensor]]]:
    """Returns the parameters of each fragment by name."""
    pairs = list(named.items())
    if isinstance(fragments, int):
        return [[pairs[place] for place in part] for part in balanced([p.nbytes for _, p in pairs], fragments)]
    places: dict[int, int] = {}
    for number, module in enumerate(fragments):
        for p in module.parameters():
            if places.setdefault(id(p), number) != number:
                raise InvalidArgument(f"fragments {places[id(p)]} and {number} have a parameter in common")
    if missing := [name for name, p in pairs if id(p) not in places]:
        raise InvalidArgument(f"{', '.join(missing[:5])} are in no fragment; each parameter has to be in one")
    cut = [[(name, p) for name, p in pairs if places[id(p)] == number] for number in range(len(fragments))]
    if not all(cut):
        raise InvalidArgument(f"fragment {cut.index([])} has no parameters that are exchanged; leave it out")
    return cut
