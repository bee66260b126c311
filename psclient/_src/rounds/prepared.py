"""A plan as this process makes its rounds: what goes to each server, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable, Plan, Ref
from pswire.model.tables import TimeToLive
from pswire.model.tensor import TensorSpec


class WantedVariables:
    """Variables that a server is asked for. Used by the thread that runs cross-replica code.

    Args:
        ids: their numbers.
        specs: their tensors, in that order.
    """

    def __init__(self, ids: tuple[int, ...], specs: tuple[TensorSpec, ...]) -> None:
        self.ids, self.specs = ids, specs
        self._numbers = frozenset(ids)
        self._part: WantedVariables | None = None  # the last part, which is mostly the next one

    def among(self, *numbers: Set[int]) -> WantedVariables:
        """Returns those of the variables whose numbers are in one of some sets."""
        found = set[int]()
        for each in numbers:
            found |= self._numbers & each
        if found == self._numbers:
            return self
        part = self._part
        if part is None or part._numbers != found:
            places = [place for place, id in enumerate(self.ids) if id in found]
            ids, specs = [self.ids[place] for place in places], [self.specs[place] for place in places]
            part = self._part = WantedVariables(tuple(ids), tuple(specs))
        return part


@dataclass(frozen=True)
class ServerShare:
    """One server's share of a plan.

    Attributes:
        operands, reductions: indices into the plan's operands and reductions of those that are sent there.
        writes: numbers of the variables that are assigned there, as `Plan.writes`.
        given: the plan's given values that come back from there, as `Plan.given`.
        rows: as `reductions`, of those that are sent as rows.
        given_rows: as `Plan.given_rows`.
        returns: of the variables that are assigned there those that are asked for there, as long as no server is gone.
    """

    operands: tuple[int, ...]
    reductions: tuple[int, ...]
    writes: tuple[int, ...]
    given: list[tuple[Ref, TensorSpec]]
    rows: tuple[int, ...]
    given_rows: list[tuple[Ref, TensorSpec]]
    returns: WantedVariables

    @cached_property
    def given_specs(self) -> list[TensorSpec]:
        """The tensors of the given values."""
        return [spec for _, spec in self.given]

    @classmethod
    def of(cls, plan: Plan, server: int, variables: Mapping[int, PlacedVariable]) -> ServerShare:
        """Finds a server's share; `variables` are those that this process has created."""
        operands = tuple(place for place, item in enumerate(plan.operands) if server in item.servers)
        reductions = tuple(place for place, item in enumerate(plan.reductions) if server in item.servers)
        dense = tuple(place for place in reductions if place not in plan.rows)
        rows = tuple(place for place in reductions if place in plan.rows)
        found = cls(operands, dense, plan.writes(server), plan.given(server), rows, plan.given_rows(server), NONE)
        return replace(found, returns=found.returned_by(server, variables, itemgetter(0)))

    def returned_by(
        self, server: int, variables: Mapping[int, PlacedVariable], home: Callable[[Sequence[int]], int]
    ) -> WantedVariables:
        """Returns the variables that a server is asked for.

        Args:
            server: the server.
            variables: those that this process has created.
            home: returns which of the servers of a variable is asked for it.
        """
        mine = [variables[id] for id in self.writes if home(variables[id].servers) == server]
        return WantedVariables(tuple([each.id for each in mine]), tuple([each.spec.tensor for each in mine]))


NONE = WantedVariables((), ())
"""No variables."""


class PlanShares:
    """A plan's parts by server: its rounds need not find them out again.

    Args:
        plan: the plan.
        variables: the variables that this process has created, by number.

    Attributes:
        shares: the share of each server that takes part.
        written: numbers of the variables that are assigned on any of them.
        restores: True if it restores variables: any of them may have another value after it.
        timed: the servers on which it updates a dynamic table whose rows live for a time.
        refuses: True if each of its rounds is waited for by its call: it may refuse a value, which is to be told there.
        large: True if more than one part goes to some server, which is not copied if its arrays may change afterwards.
    """

    def __init__(self, plan: Plan, variables: Mapping[int, PlacedVariable]) -> None:
        self.shares = {server: ServerShare.of(plan, server, variables) for server in plan.servers}
        self.written = frozenset(id for share in self.shares.values() for id in share.writes)
        written = ((server, variables[id]) for server, share in self.shares.items() for id in share.writes)
        self.timed = frozenset(server for server, variable in written if _lives_for_a_time(variable))
        self.restores = plan.restore is not None
        self.refuses = plan.nonfinite == "raise" or any(program.may_refuse for program in plan.programs)
        sent = [
            sum(plan.operands[place].tensor.nbytes for place in each.operands)
            + sum(plan.reductions[place].nbytes for place in each.reductions)
            for each in self.shares.values()
        ]
        self.large = max(sent, default=0) > PART_BYTES


def _lives_for_a_time(variable: PlacedVariable) -> bool:
    part = variable.spec.part
    return part is not None and isinstance(part.spec.eviction, TimeToLive)
