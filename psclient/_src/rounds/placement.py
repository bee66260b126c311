"""The choice of a server for a new variable that is not created beside another.

All processes of a job create the same variables in the same order, so each finds the same places by itself, a process
that comes back included. Server 0 keeps them, and refuses a process that finds another place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from psclient._src.distribute.destinations import ServerIds
from pswire.limits import refuse_unknown
from pswire.model.hashing import BUCKETS
from pswire.model.plan import PlacedVariable, VariableSpec

PsStrategy = Literal["greedy", "round_robin"]
"""Ways to place variables: beside the fewest bytes, or in turn."""


def check_ps_strategy(name: object) -> None:
    """Raises `ConfigError` for a name that is no `PsStrategy`."""
    refuse_unknown([str(name)], get_args(PsStrategy), "ps_strategy")


class Placement:
    """Chooses servers for new variables. Used by the thread that creates variables.

    A new variable goes to the server with the least load that has room for it, the first of equals; if none has room,
    to the one with the least load, which says so. The load is in bytes of all that a server holds, slot variables and
    copies of non-slot ones included ("greedy"); or in variables that were placed here ("round_robin").

    Source: `GreedyLoadBalancingStrategy` with `byte_size_load_fn`, and the round-robin of `replica_device_setter`, in
    TensorFlow 1.

    Args:
        ps_strategy: one of `PsStrategy`.
        limits: bytes that variables may take on each server, 0 for no limit.
        copies: for each server the one that has a copy of its variables; empty for no copies.
    """

    def __init__(self, ps_strategy: PsStrategy, limits: Sequence[int], copies: Sequence[int] = ()) -> None:
        self._limits = tuple(limits)
        self._copies = tuple(copies)
        self._nbytes = [0] * len(self._limits)
        self._turns = [0] * len(self._limits)
        self._load = self._turns if ps_strategy == "round_robin" else self._nbytes

    def choose(self, spec: VariableSpec) -> ServerIds:
        """Chooses the server for a variable."""
        everywhere = range(len(self._limits))
        roomy = [server for server in everywhere if self.has_room(self.with_copies((server,)), spec)]
        return self.with_copies((min(roomy or everywhere, key=self._load.__getitem__),))

    def with_copies(self, servers: ServerIds) -> ServerIds:
        """Returns the servers that hold what lies on some: one of them, and its copy; of several each has a copy."""
        if not self._copies or len(servers) != 1:
            return servers
        return (*servers, self._copies[servers[0]])

    def in_turn(self, specs: Sequence[VariableSpec]) -> list[ServerIds]:
        """Chooses the servers for the shards of one variable.

        The first goes where a variable would go, the next ones to the other servers, those of less load first, and so
        on round. Each passes over servers without room for it.
        """
        order = sorted(range(len(self._limits)), key=self._load.__getitem__)
        taken = [0] * len(self._limits)
        found: list[ServerIds] = []
        turn = 0
        for nbytes in map(held_bytes, specs):
            ahead = [order[(turn + step) % len(order)] for step in range(len(order))]
            passed = next((n for n, s in enumerate(ahead) if self._fits(s, taken[s] + nbytes)), 0)
            turn += passed + 1
            taken[ahead[passed]] += nbytes
            found.append(self.with_copies((ahead[passed],)))
        return found

    def _fits(self, server: int, nbytes: int) -> bool:
        return not self._limits[server] or self._nbytes[server] + nbytes <= self._limits[server]

    def has_room(self, servers: ServerIds, spec: VariableSpec) -> bool:
        """Returns whether a variable fits on some servers."""
        return all(self._fits(server, held_bytes(spec)) for server in servers)

    def created(self, variable: PlacedVariable, chosen: bool) -> None:
        """Counts a variable.

        Args:
            variable: the variable, as server 0 named and placed it.
            chosen: True if its place came from `choose`.
        """
        for server in variable.servers:
            self._nbytes[server] += held_bytes(variable.spec)
            self._turns[server] += chosen


def held_bytes(spec: VariableSpec) -> int:
    """Returns the bytes that a variable takes on its server, as far as is known when it is created.

    A part of a dynamic table takes its share of the table's memory limit, what lies beside its rows included; where
    there is no limit, what its filter takes, since nobody knows how it will grow.
    """
    part = spec.part
    if part is None or part.slot is not None:
        return spec.nbytes
    return max(part.spec.memory_limit * part.count // BUCKETS, spec.nbytes)
