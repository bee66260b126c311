"""The plan of the house: its rooms, on which floor each is, and what it may import.

A room is a package, or the modules that lie beside the packages of one (its ground floor, by the package's own name).
An import goes down: to a room on a lower floor, whether at load, in a function or for type checkers only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """One room.

    Attributes:
        name: of the package, or of the module that stands for itself.
        floor: above all that it imports.
        imports: names of rooms, all that it may import.
    """

    name: str
    floor: int
    imports: frozenset[str]


def _room(name: str, floor: int, imports: str = "") -> Room:
    expanded = imports.replace("src.", "psclient._src.").replace("wire.", "pswire.").split()
    return Room(name.replace("src.", "psclient._src."), floor, frozenset(WITHIN.get(one, one) for one in expanded))


WITHIN = {f"pswire.{name}": f"pswire.telemetry.{name}" for name in ("views", "page")}
"""Rooms within `pswire.telemetry`, which rows name as `wire.views` and `wire.page`."""


ROOMS = {
    room.name: room
    for room in (
        _room("pswire", 0),
        _room("pswire.model", 1, "pswire"),
        _room("pswire.security", 1, "pswire"),
        _room("pswire.telemetry", 1, "pswire"),
        _room("pswire.traces", 1, "pswire"),
        _room("pswire.telemetry.views", 2, "pswire wire.model wire.security"),
        _room("pswire.telemetry.page", 3, "pswire wire.model wire.security wire.telemetry wire.views"),
        _room("pswire.transport", 2, "pswire wire.model wire.security"),
        _room("pswire.servers", 2, "pswire wire.model"),
        _room("pswire.api", 3, "pswire wire.model wire.transport wire.servers"),
        _room("pswire.checkpoint", 4, "pswire wire.model wire.api"),
        _room("pswire.encoding", 4, "pswire wire.model wire.servers wire.traces wire.transport wire.api"),
        _room("psserver", 4, "pswire wire.model wire.security wire.servers wire.traces wire.transport"),
        _room("psserver.programs", 5, "pswire wire.model psserver"),
        _room("psserver.tiers", 5, "pswire wire.model"),
        _room("psserver.tables", 6, "pswire wire.model psserver.programs psserver.tiers"),
        _room("psserver.plans", 6, "pswire wire.model wire.servers wire.transport psserver.programs wire.api"),
        _room(
            "psserver.state",
            7,
            "pswire wire.servers wire.model wire.security wire.telemetry psserver wire.transport psserver.programs "
            "wire.api psserver.plans psserver.tables",
        ),
        _room(
            "psserver.transport",
            7,
            "pswire wire.servers wire.model wire.security wire.telemetry wire.traces psserver wire.transport wire.api "
            "wire.encoding",
        ),
        _room(
            "psserver.checkpoints",
            8,
            "pswire wire.model psserver psserver.tables wire.api psserver.plans wire.checkpoint psserver.state",
        ),
        _room("psserver.execution", 8, "pswire wire.model psserver psserver.programs psserver.plans psserver.state"),
        _room(
            "psserver.core",
            9,
            "pswire wire.servers wire.model wire.security wire.telemetry wire.traces psserver wire.transport "
            "psserver.programs wire.api psserver.plans psserver.tables psserver.tiers wire.checkpoint psserver.state "
            "psserver.checkpoints psserver.execution",
        ),
        _room(
            "psserver.telemetry",
            10,
            "pswire wire.model wire.telemetry wire.views wire.page psserver wire.transport psserver.tables "
            "psserver.state psserver.core",
        ),
        _room(
            "psserver.cli",
            11,
            "pswire wire.model wire.security wire.telemetry psserver wire.checkpoint psserver.transport "
            "psserver.core psserver.telemetry",
        ),
        _room("psserver.__main__", 12, "psserver.cli"),
        _room("psclient.ops", 2, "wire.model"),
        _room("psclient._src", 3, "pswire wire.model wire.security wire.telemetry wire.traces wire.transport"),
        _room("src.telemetry.traces", 4, "wire.traces"),
        _room("src.cluster_resolver", 4, "pswire psclient._src"),
        _room("src.data", 4, "pswire wire.model psclient._src"),
        _room("src.processes", 4, "pswire wire.model wire.security wire.telemetry psclient._src"),
        _room("src.tracing", 4, "pswire wire.model psclient._src"),
        _room("src.variables", 4, "wire.model psclient._src"),
        _room("psclient.summary", 4, "psclient._src"),
        _room("psclient.initializers", 4, "wire.model"),
        _room("psclient.losses", 4, "psclient._src"),
        _room(
            "src.distribute",
            5,
            "pswire wire.model psclient._src src.cluster_resolver src.data src.processes src.tracing src.variables",
        ),
        _room(
            "src.transport",
            5,
            "pswire wire.model wire.security wire.telemetry wire.transport psclient._src wire.api wire.encoding",
        ),
        _room(
            "src.processes.aggregation",
            5,
            "pswire wire.model wire.transport wire.api wire.encoding",
        ),
        _room("psclient.cluster_resolver", 5, "src.cluster_resolver"),
        _room("psclient.metrics", 5, "wire.model psclient._src src.variables psclient.losses"),
        _room("psclient.nn", 5, "wire.model psclient._src src.variables"),
        _room(
            "src.chief",
            6,
            "pswire wire.model wire.telemetry wire.api wire.checkpoint src.telemetry.traces src.transport",
        ),
        _room(
            "src.rounds",
            6,
            "pswire wire.model wire.telemetry wire.transport psclient._src wire.api src.data src.processes src.tracing "
            "src.variables src.distribute src.telemetry.traces src.transport src.processes.aggregation",
        ),
        _room("psclient.optimizers", 6, "wire.model psclient._src src.tracing src.variables src.distribute"),
        _room(
            "psclient.compat.v1.train",
            7,
            "wire.model psclient._src src.tracing src.variables src.distribute psclient.optimizers",
        ),
        _room("psclient.compat.v1", 8, "src.variables src.distribute psclient.compat.v1.train"),
        _room("psclient.experimental", 14, "src.variables"),
        _room("psclient.compression", 14, "src.variables"),
        _room(
            "psclient.dynamic_embedding",
            7,
            "pswire wire.model psclient._src src.variables wire.checkpoint src.distribute psclient.initializers",
        ),
        _room("psclient.compat", 9, "psclient._src src.data src.variables src.distribute psclient.compat.v1"),
        _room(
            "src.telemetry",
            7,
            "pswire wire.model wire.security wire.telemetry wire.views wire.page psclient._src src.telemetry.traces "
            "src.transport src.chief src.rounds",
        ),
        _room(
            "psclient.psctl",
            8,
            "pswire wire.model wire.security wire.transport wire.views psclient._src wire.checkpoint src.transport "
            "src.chief src.telemetry src.processes",
        ),
        _room(
            "psclient.train",
            7,
            "pswire wire.model wire.telemetry psclient._src wire.api src.data src.variables wire.checkpoint "
            "src.distribute src.rounds psclient.optimizers",
        ),
        _room(
            "src.launch",
            8,
            "pswire wire.model wire.security wire.telemetry wire.encoding psclient._src src.processes src.transport "
            "src.chief src.telemetry src.processes",
        ),
        _room(
            "src.strategies",
            8,
            "pswire wire.model wire.security wire.transport wire.encoding psclient._src src.cluster_resolver "
            "src.processes src.variables src.distribute src.transport src.chief src.rounds src.telemetry",
        ),
        _room(
            "psclient.coordinator",
            11,
            "pswire wire.model wire.transport psclient._src src.cluster_resolver src.processes src.variables "
            "src.transport src.strategies",
        ),
        _room(
            "psclient",
            15,
            "pswire psclient.ops psclient._src src.data src.tracing src.variables psclient.summary "
            "psclient.coordinator src.distribute psclient.losses psclient.nn psclient.cluster_resolver "
            "psclient.metrics psclient.compat psclient.dynamic_embedding psclient.initializers "
            "psclient.compression psclient.experimental psclient.optimizers psclient.train src.strategies",
        ),
        _room(
            "psclient.jax",
            16,
            "wire.model psclient._src src.data src.variables src.distribute psclient.optimizers",
        ),
        _room("psclient.__main__", 15, "src.launch"),
        _room("psclient.launch", 12, "pswire psclient._src src.processes src.launch"),
        _room(
            "psclient.torch",
            16,
            "pswire wire.model psclient._src src.data src.distribute src.rounds src.tracing src.variables "
            "psclient.dynamic_embedding psclient.optimizers",
        ),
        _room(
            "pstesting",
            16,
            "pswire wire.model wire.security psserver psserver.programs wire.transport psclient._src src.processes "
            "src.transport psserver.transport psserver.core src.launch src.strategies psclient",
        ),
        _room(
            "pstesting.simulation",
            16,
            "pswire wire.servers wire.api wire.model wire.transport wire.telemetry psserver psserver.programs "
            "psserver.plans psserver.core psclient._src src.transport src.rounds src.processes.aggregation src.chief",
        ),
        _room("pstesting.planner", 17, "pswire wire.transport psclient psclient.psctl pstesting pstesting.simulation"),
    )
}

RESERVED = {
    "psclient._src.rows": 7,
    "psserver.replication": 11,
}
"""Rooms that are not built yet, with their floors. No room imports `psclient.torch` or `psclient.jax`."""
