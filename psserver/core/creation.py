"""The creation of variables on one server: server 0 names them, their holders declare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psserver.checkpoints.restores import Restores
from psserver.services.log import Log
from psserver.state.variables import FirstValue, Store
from pswire.api import CreateBatchReply
from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError, VariableMismatch
from pswire.limits import MAX_VARIABLES
from pswire.model.plan import PlacedVariable


class VariableCreation:
    """Creates variables, and says what is known of them. Guarded by the core's lock.

    Args:
        store: the variables.
        log: of server 0, which names them.
        restores: what a checkpoint has for them.
    """

    def __init__(self, store: Store, log: Log, restores: Restores) -> None:
        self._store = store
        self._log = log
        self._restores = restores

    def create_batch(
        self, task: Task, variables: Sequence[PlacedVariable]
    ) -> tuple[CreateBatchReply, tuple[PlacedVariable, ...]]:
        """Creates or finds several variables, up to the first that is refused.

        Returns:
            The answer, and those that need a first value here.
        """
        refusal: PSError | None = None
        for count, variable in enumerate(variables):
            try:
                if self._log.keeps:
                    self._name(task, variable)
                else:
                    self._declare(variable)
            except PSError as error:
                refusal, variables = error, variables[:count]
                break
        return self._reply(variables, refusal), tuple(filter(self.needs_value, variables))

    def initialize_batch(
        self, variables: Sequence[PlacedVariable], saved: Mapping[int, FirstValue], error: PSError | None
    ) -> CreateBatchReply:
        """Gives variables the values that a checkpoint has for them, by number; `error` refuses the one behind them."""
        for id, value in saved.items():
            if self._is_new(id) and self._store.initialize(id, value):
                self._restores.begun.add(id)
        return self._reply(variables, error)

    def needs_value(self, variable: PlacedVariable) -> bool:
        """Returns whether a variable lives here and has no value, or waits for what a checkpoint has of a table."""
        return self._store.server in variable.servers and (
            not self._valued(variable) or self._restores.awaits(variable)
        )

    def _is_new(self, id: int) -> bool:
        """Returns whether a variable has not begun with what a checkpoint has, as other processes have asked for."""
        return id not in self._restores.begun

    def _name(self, task: Task, variable: PlacedVariable) -> None:
        """Names a variable on server 0, which has to have the number and the servers that its creator says."""
        there = self._log.name(task, variable.id, variable.spec, variable.servers)
        if there != variable:
            raise VariableMismatch(
                f"{task} creates variable {variable.spec} on servers {variable.servers[:8]}, in this order, but "
                f"other processes created it on {there.servers}. Give every process the same ps_strategy"
            )

    def _declare(self, variable: PlacedVariable) -> None:
        # Where variables have copies, each server knows all: it may have to name the next one.
        here = self._store.server in variable.servers or self._store.copied
        if not here or not 0 <= variable.id < MAX_VARIABLES:
            task = str(self._store.task)
            raise InvalidRequest(f"variable {variable.spec} was not placed on this server", task)
        self._store.declare(variable)

    def _valued(self, variable: PlacedVariable) -> bool:
        return self._store.server in variable.servers and self._store.initialized(variable.id)

    def _reply(self, variables: Sequence[PlacedVariable], error: PSError | None) -> CreateBatchReply:
        valued = tuple([variable.id for variable in variables if self._valued(variable)])
        restored = tuple([variable.id for variable in variables if variable.id in self._restores.begun])
        return CreateBatchReply(len(variables), valued, restored, error)
