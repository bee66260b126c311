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
    expanded = imports.replace("src.", "psclient._src.").replace("wire.", "pswire.")
    return Room(name.replace("src.", "psclient._src."), floor, frozenset(expanded.split()))


ROOMS = {
    room.name: room
    for room in (
        _room("pswire", 0),
        _room("pswire.model", 1, "pswire"),
        _room("pswire.security", 1, "pswire"),
        _room("pswire.telemetry", 1, "pswire"),
        _room("pswire.transport", 2, "pswire wire.model"),
        _room("pswire.api", 3, "pswire wire.model wire.transport"),
        _room("pswire.checkpoint", 4, "pswire wire.model wire.api"),
        _room("pswire.encoding", 4, "pswire wire.model wire.transport wire.api"),
        _room("psserver", 5, "pswire wire.model wire.security"),
        _room("psserver.programs", 6, "pswire wire.model psserver"),
        _room(
            "psserver.transport",
            6,
            "pswire wire.model wire.security wire.transport wire.api wire.encoding psserver",
        ),
        _room("psserver.plans", 7, "pswire wire.model wire.transport wire.api psserver.programs"),
        _room("psserver.state", 8, "pswire wire.model wire.telemetry wire.transport wire.api psserver psserver.plans"),
        _room(
            "psserver.checkpoints",
            9,
            "pswire wire.model wire.api wire.checkpoint psserver psserver.plans psserver.state",
        ),
        _room("psserver.execution", 9, "pswire wire.model psserver psserver.programs psserver.plans psserver.state"),
        _room(
            "psserver.core",
            10,
            "pswire wire.model wire.telemetry wire.transport wire.api wire.checkpoint psserver "
            "psserver.programs psserver.plans psserver.state psserver.checkpoints psserver.execution",
        ),
        _room(
            "psserver.telemetry",
            11,
            "wire.model wire.telemetry wire.transport psserver psserver.state psserver.core",
        ),
        _room(
            "psserver.cli",
            12,
            "pswire wire.model wire.security wire.telemetry wire.checkpoint psserver psserver.transport psserver.core "
            "psserver.telemetry",
        ),
        _room("psserver.__main__", 13, "psserver.cli"),
        _room("psclient.ops", 2, "wire.model"),
        _room("psclient._src", 5, "pswire wire.model wire.security wire.telemetry wire.transport"),
        _room("src.cluster_resolver", 6, "pswire psclient._src"),
        _room("src.data", 6, "wire.model psclient._src"),
        _room("src.processes", 6, "pswire wire.security wire.telemetry psclient._src"),
        _room("src.tracing", 6, "pswire wire.model psclient._src"),
        _room(
            "src.transport",
            6,
            "pswire wire.model wire.security wire.telemetry wire.transport wire.api wire.encoding psclient._src",
        ),
        _room("src.variables", 6, "wire.model psclient._src"),
        _room("psclient.summary", 6, "psclient._src"),
        _room("src.chief", 7, "pswire wire.model wire.telemetry wire.api wire.checkpoint src.transport"),
        _room(
            "src.distribute",
            7,
            "pswire wire.model psclient._src src.cluster_resolver src.data src.processes src.tracing src.variables",
        ),
        _room("psclient.cluster_resolver", 7, "src.cluster_resolver"),
        _room("psclient.metrics", 7, "wire.model psclient._src src.variables"),
        _room(
            "src.rounds",
            8,
            "pswire wire.model wire.telemetry wire.transport wire.api psclient._src src.data src.tracing "
            "src.transport src.variables src.distribute",
        ),
        _room("psclient.compat", 8, "psclient._src src.data src.variables src.distribute"),
        _room("psclient.optimizers", 8, "wire.model psclient._src src.tracing src.variables src.distribute"),
        _room(
            "psclient.psctl",
            8,
            "pswire wire.model wire.security wire.transport wire.checkpoint psclient._src src.transport src.chief",
        ),
        _room(
            "src.telemetry",
            9,
            "pswire wire.security wire.telemetry psclient._src src.transport src.chief src.rounds",
        ),
        _room(
            "psclient.train",
            9,
            "pswire wire.model wire.telemetry wire.api wire.checkpoint psclient._src src.data src.variables "
            "src.distribute src.rounds psclient.optimizers",
        ),
        _room(
            "src.launch",
            10,
            "pswire wire.model wire.security wire.telemetry psclient._src src.processes "
            "src.transport src.chief src.telemetry",
        ),
        _room(
            "src.strategies",
            10,
            "pswire wire.security wire.transport psclient._src src.cluster_resolver src.processes "
            "src.transport src.chief src.distribute src.rounds src.telemetry",
        ),
        _room(
            "psclient",
            15,
            "pswire psclient.ops psclient._src src.data src.tracing src.variables psclient.summary "
            "src.distribute psclient.cluster_resolver psclient.metrics psclient.compat psclient.optimizers "
            "psclient.train src.strategies",
        ),
        _room("psclient.__main__", 15, "src.launch"),
    )
}

RESERVED = {
    "psclient._src.rows": 7,
    "psclient.compression": 7,
    "psclient.initializers": 7,
    "psclient.losses": 7,
    "psclient.nn": 9,
    "psclient.dynamic_embedding": 11,
    "psclient.coordinator": 11,
    "psclient.launch": 12,
    "psclient.experimental": 14,
    "psclient.torch": 16,
    "psclient.jax": 16,
    "psserver.tables": 8,
    "psserver.replication": 11,
}
"""Rooms that are not built yet, with their floors. No room imports `psclient.torch` or `psclient.jax`."""
