"""`Optimizer`: an optimizer of torch whose step is a round with parameter servers."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from psclient._src import context
from psclient._src.arrays.conversions import on_host
from psclient._src.config import threads_chosen, threads_of
from psclient._src.distribute.strategy import Strategy
from psclient._src.interpreter.lifetimes import Unpicklable, weakly
from psclient._src.options import check_word
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.table_views import table_of
from psclient._src.variables.variable import Variable
from psclient.optimizers import Optimizer as Rule
from psclient.torch.buffers import Mode, ModuleBuffers
from psclient.torch.embeddings import LookupModule, lookups_of
from psclient.torch.groups import ParameterGroups, needs_rows, rule_of
from psclient.torch.parameters import Gate, Trained, check_parameter, limited_of, name_of, paths_of, sparse_of
from psclient.torch.state import ITERATIONS, GroupState, SlotState
from psclient.torch.steps import Steps
from psclient.train.object_graph import register_kind
from psclient.train.states import register_generator
from pswire.errors import InvalidArgument, InvalidCall, InvalidType

log = logging.getLogger("psclient")

LARGE_TABLE = 1 << 20
"""Bytes of a parameter with sparse gradients from which on the log says that it travels as a whole."""

Reduction = Literal["mean", "sum"]

_OWNERS: Any = WeakTensorKeyDictionary()
"""The optimizer that trains a parameter, weakly, by the parameter."""


class Optimizer(Unpicklable, torch.optim.Optimizer):
    """A torch optimizer with the parameters on servers: `step` sends gradients and updates the parameters in place.

    The parameters of the module are variables on servers, by their names; all workers begin with those of the first. A
    step waits once, for its round. Everything else is as with torch's optimizers: `zero_grad`, closures, `param_groups`
    (all hyperparameters may be changed between steps), and torch's learning rate schedulers.

    Gradients are averaged over workers, weighted by their numbers of examples if batches come from a `Loader` or a
    distributed dataset. A parameter without a gradient in any worker keeps its value.

    Every worker makes the same calls. In cross-replica context, or outside of every scope.

    Args:
        module: has the parameters, and modules of this package whose rows are trained.
        optimizer: one of `ps.optimizers`, or a class of `torch.optim`, whose formula the servers then run.
        params: the trained part of the module, as torch's optimizers take it: parameters, or groups of parameters with
            their own hyperparameters; modules such as `Embedding` may be among the parameters. None for all.
        strategy: the strategy that owns the variables; None for that of the scope.
        buffers: how to treat all persistent buffers, such as BatchNorm's means. "first": each step gives all workers
            those of the first, as DDP does before each forward. "mean": floating-point buffers are averaged over
            workers in each step. "own": each worker keeps its own, as always with asynchronous workers. Checkpoints
            have those of the first worker in any case.
        reduction: "mean" of the workers' gradients, or their "sum".
        overlap: True to send gradients during backward if there are more than 4 MiB of them. A step has to follow each
            backward, because sent gradients count.
        prefix: prefix of the names of variables.
        options: arguments of a class of torch; and `clipnorm`, `clipvalue`, `global_clipnorm`, `sparse` and `catch_up`,
            as in `ps.optimizers`, which classes of torch do not have.

    Attributes:
        strategy: the strategy that owns the variables.
        rule: the optimizer that servers run: that of the first group, with the state of all groups.

    Raises:
        ValueError: there is no strategy; another optimizer trains one of the parameters; a parameter is of integers,
            complex, or not of the module; servers cannot run the class.
        TypeError: an argument has another type; or the strategy has no servers, or several replicas in this process.
        VariableMismatch: workers have different modules.

    Examples:
        >>> import torch
        >>> import psclient as ps
        >>> import psclient.torch as pst
        >>> strategy = ps.ParameterServerStrategy()
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = pst.Optimizer(net, torch.optim.AdamW, lr=1e-3, weight_decay=0.01, strategy=strategy)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = net(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        >>> strategy.close()
    """

    _pickle_remedy = "save its state_dict(), or create another one there, with a strategy of that process"
    _step_supports_amp_scaling = True
    param_groups: list[dict[str, Any]]  # torch has it so; without torch nobody else says it

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Rule | type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        strategy: Strategy | None = None,
        buffers: Mode = "first",
        reduction: Reduction = "mean",
        overlap: bool = False,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self.strategy = checked_strategy(strategy)
        if not isinstance(module, torch.nn.Module):
            raise InvalidType(f"a {type(module).__name__} is not a module; pass the torch.nn.Module that is trained")
        averages = check_word("reduction", reduction, Reduction) == "mean"
        mode, self._prefix = check_word("buffers", buffers, Mode), prefix
        self.rule, defaults = rule_of(optimizer, options, None)
        self._groups = ParameterGroups(self.rule)
        self._steps = Steps(self.strategy, self._groups, averages, overlap, weakly(self._refresh_rules), module)
        self._slots = SlotState(self.strategy, self._groups)
        self._find()
        self._trained: dict[int, Trained] = {}
        self._rules: list[dict[str, Any]] = []  # of each group the hyperparameters that its rule has
        self._in_scaler = False
        try:
            super().__init__(self._given(params), defaults)
            with self.strategy.scope():
                self._steps.buffers = ModuleBuffers(mode, prefix)
                self._steps.buffers.add(module)
        except BaseException:
            self._steps.release()
            _give_back(self, [*(p for _, p in self._paths.values()), *_claims(self._lookups.values())])
            raise
        _share_threads(self.strategy)
        weakref.finalize(self, self._steps.release)

    # ---- What is trained ----

    def _given(self, params: Iterable[Any] | None) -> list[dict[str, Any]]:
        if params is None:
            return [{"params": [*(p for _, p in self._paths.values()), *self._lookups.values()]}]
        given = list(params)
        return given if given and all(isinstance(group, dict) for group in given) else [{"params": given}]

    def _find(self) -> None:
        """Looks at what the module has now: layers may have been added to it."""
        module = self._steps.module
        self._paths, self._lookups = paths_of(module), lookups_of(module)
        self._sparse, self._limited = sparse_of(module), limited_of(module)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, in the same way in all workers; see `torch.optim.Optimizer.add_param_group`.

        Layers that were added to the module are trained from here on, and their buffers are in checkpoints.

        Args:
            param_group: "params" with parameters of the module and modules such as `Embedding`; and hyperparameters.
        """
        number = len(self.param_groups)
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor | torch.nn.Module) else list(given)
        self._find()
        behind = {id(rows.gate): module for module in self._lookups.values() for rows in module.rows}
        given = [behind.get(id(each), each) for each in given]
        tables = list(dict.fromkeys(each for each in given if isinstance(each, LookupModule)))
        rest = [each for each in given if not isinstance(each, LookupModule)]
        with torch.no_grad():
            super().add_param_group({**param_group, "params": rest})
        parameters = self.param_groups[-1]["params"]
        try:
            self._check(parameters, tables)
            if number:
                self._groups.add()
        except BaseException:
            self.param_groups.pop()
            raise
        for tensor in (*parameters, *_claims(tables)):
            _OWNERS[tensor] = weakref.ref(self)
        self._rules.append({name: self._groups.get(number, name) for name in self.defaults})
        made = self._create(parameters, number)
        for module in tables:
            self._enter_rows(module, number)
        self._steps.bind(made)
        if self._steps.buffers is not None:
            with self.strategy.scope():
                self._steps.buffers.add(self._steps.module)

    def _check(self, parameters: Iterable[torch.Tensor], tables: Iterable[LookupModule]) -> None:
        for p in parameters:
            name = name_of(self._paths.get(id(p), ("", p))[0])
            if not name:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(p.shape)} does not belong to the module and has no name; "
                    "pass parameters of the module, pass the module that contains it, or add its layer to "
                    "the module first"
                )
            check_parameter(name, p)
            if needs_rows(self.rule) and id(p) not in self._sparse:
                raise InvalidArgument(
                    f"the gradient of parameter {name!r} is dense, but {type(self.rule).__name__} takes sparse "
                    "gradients alone; leave it out with params=[...], and train it with another optimizer, such as "
                    "torch.optim.Adam"
                )
            if id(p) in self._limited and self.strategy.num_replicas_in_sync > 1:
                raise InvalidArgument(
                    f"parameter {name!r} has max_norm={self._limited[id(p)]:g}, with which forward() "
                    "changes rows in place, differently in each worker; leave max_norm out, and limit the "
                    "rows that were looked up: rows * (limit / rows.norm(dim=-1, "
                    "keepdim=True).clamp(min=limit))"
                )
            _check_free(p, self, f"parameter {name!r}")
        for module in tables:
            if id(module) not in self._lookups:
                raise InvalidArgument(f"a {type(module).__name__} is not part of the module whose rows are trained")
            for rows in module.rows:
                _check_free(rows.gate, self, f"what is looked up in {rows.table.name!r}")

    def _create(self, parameters: Iterable[torch.Tensor], group: int) -> list[Trained]:
        made = []
        with self.strategy.scope():
            for p in parameters:
                path, _ = self._paths[id(p)]
                first = on_host(p)
                v = Variable(first, name=f"{self._prefix}{name_of(path)}")
                each = Trained(path, p, v, id(p) in self._sparse)
                if each.by_rows and p.nbytes >= LARGE_TABLE:
                    log.warning(
                        "parameter %r has sparse gradients, but each step receives the whole parameter, "
                        "%.1f MB; use psclient.torch.Embedding or EmbeddingBag to receive only the rows in "
                        "use",
                        each.name,
                        p.nbytes / 1e6,
                    )
                self._groups.enter(v, group, each.by_rows)
                self._trained[id(p)] = each
                made.append(each)
        self._steps.trained += made
        for each in made:
            self._steps.gradients.watch(each)
        return made

    def _enter_rows(self, module: LookupModule, group: int) -> None:
        for rows in module.rows:
            if rows not in self._steps.tables:
                self._groups.enter(table_of(rows.table), group, by_rows=True, limit=rows.limit)
                self._steps.tables.append(rows)
                self._steps.gradients.watch_rows(rows)

    @property
    def variables(self) -> Mapping[str, Variable]:
        """The variables of the parameters, by their names in the module."""
        return {each.name: each.variable for each in self._trained.values()}

    def _buffers_by_name(self, names: Mapping[int, str]) -> dict[str, Variable]:
        """Returns the variables of buffers that are in checkpoints.

        Args:
            names: the names that they shall have, by the `id` of the buffers.
        """
        own = self._steps.buffers
        return {} if own is None else {names[key]: v for key, v in own.by_id.items() if key in names}

    def _trackable_children(self) -> Mapping[str, Any]:
        """Returns what `ps.train.Checkpoint` saves: parameters, buffers, tables, the state of the rules, and groups."""
        buffers = self._steps.buffers
        return {
            "model": self.variables,
            "buffers": {} if buffers is None else buffers.variables,
            "tables": {rows.table.name: rows.table for rows in self._steps.tables},
            "rule": self.rule,
            "groups": GroupState(self.param_groups),
        }

    # ---- Steps ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step: a round that every worker makes. Waits for it.

        Args:
            closure: computes the loss and its gradients, and returns the loss; called once.

        Returns:
            The loss, if there is a closure.

        Raises:
            RuntimeError: gradients were changed after backward; a parameter has another shape, dtype or device than
                before; the scaler is torch's own.
            PSError: the round failed, or the session has ended.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, overflow = self._scaled()
        self._steps.make(scale, overflow)
        return loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds up the gradients of backward passes within, and sends nothing: as `no_sync` of DDP.

        The last backward of a step is outside; or `step` follows, and sends the sum. For a block that is used twice,
        under `torch.utils.checkpoint`, `use_reentrant=True` has two such passes: use `use_reentrant=False`.
        """
        before, self._steps.gradients.accumulating = self._steps.gradients.accumulating, True
        try:
            yield
        finally:
            self._steps.gradients.accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; see `torch.optim.Optimizer.zero_grad`.

        Raises:
            RuntimeError: the gradients were sent during backward, and no step has followed.
        """
        super().zero_grad(set_to_none)
        self._steps.forget()

    @property
    def _gradient_holders(self) -> list[torch.Tensor]:
        """The tensors whose `grad` a step sends: the parameters, and rows that were looked up."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return [*parameters, *(leaf for rows in self._steps.tables for leaf in rows.leaves)]

    @property
    def _overflown(self) -> bool:
        """True if in the last step under a scaler gradients of some worker had NaN or infinity."""
        return self._steps.overflows > 0

    @contextlib.contextmanager
    def _under_scaler(self) -> Iterator[None]:
        """A step within is made for a `GradScaler` of this package."""
        self._in_scaler = True
        try:
            yield
        finally:
            self._in_scaler = False

    def _scaled(self) -> tuple[float | None, bool]:
        """Returns the loss scale of this step, and whether gradients have overflown here; None without a scaler."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return None, False
        if not self._in_scaler:
            raise InvalidCall(
                "torch's GradScaler decides in each worker separately whether a step overflows; use "
                "psclient.torch.GradScaler, which decides for all workers"
            )
        scale = getattr(self, "grad_scale", None)
        return (1.0 if scale is None else float(scale)), bool(found)

    def _refresh_rules(self) -> None:
        """Gives the rules the hyperparameters in `param_groups`."""
        for number, (group, known) in enumerate(zip(self.param_groups, self._rules, strict=True)):
            for name, old in known.items():
                now = group[name]
                if now is not old and now != old:
                    self._groups.set(number, name, now)
                    known[name] = now

    # ---- Batches ----

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the host if there are none."""
        return next((each.device for each in self._trained.values()), torch.device("cpu"))

    def _begin_batch(self) -> None:
        self._steps.begin_batch()

    # ---- State ----

    def state_dict(self) -> dict[str, Any]:
        """Fetches the state from the servers and returns it in torch's form.

        If the optimizer is a class of torch, torch's own optimizer can load it.
        """
        self.state.update(self._slots.fetch(self._steps.trained))
        try:
            found: dict[str, Any] = super().state_dict()
        finally:
            self.state.clear()
        return {**found, ITERATIONS: self._slots.iterations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the state on the servers, in the same way in all workers; also a state that a torch optimizer has saved.

        Raises:
            ValueError: the state is that of other parameters or groups, or of another optimizer.
        """
        groups, before = state_dict["param_groups"], self.param_groups
        numbers = {name for name, value in self.defaults.items() if not isinstance(value, bool)}
        for group in groups:
            if lacks := sorted(numbers - group.keys()):
                raise InvalidArgument(
                    f"the saved state has a parameter group without {', '.join(lacks)}; load it into an "
                    "optimizer of the kind that saved it"
                )
        words = {name: value for name, value in self.defaults.items() if name not in numbers}
        super().load_state_dict({"state": {}, "param_groups": [words | group for group in groups]})
        try:
            self._refresh_rules()  # a group may have state that the others have not, such as momentum
            keys = [key for group in groups for key in group["params"]]
            trained = [self._trained[id(p)] for group in self.param_groups for p in group["params"]]
            saved = [(each, state_dict["state"].get(key, {})) for key, each in zip(keys, trained, strict=True)]
            self._slots.assign(saved, state_dict.get(ITERATIONS))
        except BaseException:
            self.param_groups = before
            raise


def checked_strategy(strategy: Strategy | None) -> Strategy:
    """Returns the strategy that owns variables of modules: the given one, or that of the scope.

    Raises:
        ValueError: there is none.
        TypeError: it has no servers, or several replicas in this process.
    """
    if strategy is None:
        if not context.has_strategy():
            raise InvalidArgument(
                "no strategy is active; create the optimizer in strategy.scope(), or pass "
                "strategy=ps.ParameterServerStrategy()"
            )
        strategy = context.get_strategy()
    if not isinstance(strategy, Strategy):
        raise InvalidType(f"a {type(strategy).__name__} is not a strategy; pass a ps.ParameterServerStrategy")
    if not isinstance(strategy.backend, RemoteBackend):
        raise InvalidType(
            f"modules are trained by parameter servers, but a {type(strategy).__name__} has none; use a "
            "ps.ParameterServerStrategy, which starts its own server if there is no cluster"
        )
    if len(strategy.extended.worker_devices) > 1:
        raise InvalidType(
            f"a module is on one device, but the strategy has {len(strategy.extended.worker_devices)} "
            "replicas in this process; pass one device in devices=[...], and start a worker for each device"
        )
    return strategy


def _share_threads(strategy: Strategy) -> None:
    """Gives torch this process's share of the machine's cores, as BLAS has it, unless the user has said a number.

    With a thread for each core processes of one machine wait for each other in every operation.
    """
    if threads_chosen():
        return
    resolver = strategy.cluster_resolver
    spec, task = (None, None) if resolver is None else (resolver.cluster_spec(), getattr(strategy, "task", None))
    others = 2 if spec is None or task is None else len(spec.at_host_of(task))  # itself, and a server of its own
    torch.set_num_threads(min(torch.get_num_threads(), threads_of(others)))


def _claims(modules: Iterable[LookupModule]) -> list[torch.Tensor]:
    """Returns what an optimizer owns that trains the rows of modules."""
    return [rows.gate for module in modules for rows in module.rows]


def _check_free(tensor: torch.Tensor, optimizer: Optimizer, what: str) -> None:
    """Raises `ValueError` if another optimizer trains a parameter."""
    owner = _owner(tensor)
    if owner not in (None, optimizer):
        gc.collect()  # one that nobody uses may be in a circle
        owner = _owner(tensor)
    if owner not in (None, optimizer):
        raise InvalidArgument(
            f"{what} is already trained by another psclient.torch optimizer; leave it out here with "
            "params=[...], or add it to that optimizer as a group"
        )


def _children_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns what a checkpoint has of a module: variables, buffers and tables, by their names in it."""
    found: dict[str, Any] = {}
    owners: dict[int, Optimizer] = {}
    for name, tensor in module.named_parameters():
        owner = _owner(tensor)
        if owner is None:
            raise InvalidArgument(
                f"parameter {name_of(name)!r} of a module in a checkpoint is not trained by a "
                "psclient.torch.Optimizer, so it is not on the servers; create the optimizer first, with "
                "all parameters, or save the module with torch.save"
            )
        owners[id(owner)] = owner
        found |= {} if isinstance(tensor, Gate) else {name_of(name): owner._trained[id(tensor)].variable}
    buffers = {id(b): name_of(name) for name, b in module.named_buffers()}
    for owner in owners.values():
        found |= owner._buffers_by_name(buffers)
    tables = [rows.table for each in lookups_of(module).values() for rows in each.rows]
    return found | {table.name: table for table in tables}


register_kind(torch.nn.Module, _children_of)
register_generator(
    torch.Generator,
    lambda generator: generator.get_state().numpy(),
    lambda generator, state: generator.set_state(torch.from_numpy(state)),
)


def _give_back(optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    """Notes that an optimizer, of which there is nothing but an error, trains no parameters."""
    for tensor in tensors:
        if _owner(tensor) is optimizer:
            del _OWNERS[tensor]


def _owner(tensor: torch.Tensor) -> Optimizer | None:
    found = _OWNERS.get(tensor)
    return None if found is None else found()
