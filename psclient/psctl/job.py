"""Changes a running job: ends it (`psctl job delete`) or moves its servers (`move`, `drain`, `rebalance`).

Servers go to processes that wait for a place, as `psserver --join` does. The chief moves them, one after the other,
each where a step begins; these commands ask for it, and wait until it is done.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import click

from psclient._src.chief.standby import discard
from psclient._src.network.remote_server import connect
from psclient._src.telemetry.observer import Servers
from psclient.psctl.settings import CHANGE, CommandSettings, command, connected, number
from pswire.cluster import ClusterSpec, Task
from pswire.errors import ConfigError, PSError, RoundTimeout
from pswire.flags import COMMANDS, CommandGroup
from pswire.limits import Timeouts
from pswire.model.places import NOWHERE, Standby
from pswire.model.status import ServerStatus, newest_of
from pswire.security.names import task_name

CHIEF = Task("chief", 0)

LOOK_SECONDS = 0.5
"""Seconds between two looks at whether a server has moved."""

WAIT_SECONDS = 600.0
"""Seconds that a server has to move: as long as a round may take."""

Choose = Callable[["JobPlaces", bool], "tuple[int, str] | None"]
"""Returns the server that moves next, and the address to which, "" for any; None once all have.

It is given where all are now, and whether one has moved already.
"""

waits = number(
    "--wait",
    click.FloatRange(0, min_open=True),
    f"Time that one server may take to move. [default: {WAIT_SECONDS:g}]",
    WAIT_SECONDS,
    "SECONDS",
)


@click.group(
    cls=CommandGroup,
    section=CHANGE,
    examples=(("Discard a job whose processes have ended", "psctl job delete --address 10.0.0.7:2222"),),
    no_args_is_help=False,
)
def job() -> None:
    """Discard a job that did not end cleanly."""


@command(
    COMMANDS,
    ("Discard a job whose processes have ended", "psctl job delete --address 10.0.0.7:2222"),
    group=job,
)
def delete(told: CommandSettings) -> int:
    """Discard the job on these servers, so that another can begin.

    Servers keep the variables of a job that did not end cleanly, so that its processes can return. Refused while a
    process of the job is connected. Servers with --until-done end. Checkpoints are kept. Needs the chief's certificate.
    """
    cluster = ClusterSpec({"ps": tuple(told.cluster().servers.values())})
    timeouts = dataclasses.replace(Timeouts(), start_timeout=told.seconds, call_timeout=told.seconds)
    servers = connect(cluster, timeouts, security=told.paths().read(task_name(CHIEF)), drives=True)
    try:
        name = discard(CHIEF, servers, timeouts)
    finally:
        for server in servers:
            server.close()
    return told.tell({"job": name}, f"the job {name!r} is over" if name else "the job without a name is over")


# ---- Servers that move ----


class JobPlaces:
    """Where the servers of a job are, and which processes wait for a place.

    Args:
        statuses: the answers of its servers.
    """

    def __init__(self, statuses: Sequence[ServerStatus]) -> None:
        newest = newest_of(statuses)
        if newest is None:
            raise ConfigError("no job runs on these servers, so they cannot be moved")
        found = {s.server: s for s in statuses if s.incarnation in newest.incarnations}
        self.servers: Mapping[int, ServerStatus] = {server: found[server] for server in sorted(found)}
        self.count = len(newest.incarnations)
        # What all of them know: the one that is asked for the next move may be the last to hear of this one.
        known = [each for each in newest.moved if all(each in status.moved for status in found.values())]
        self.moved = {moved.server: moved.address for moved in known}
        # Each says to all servers that it is there; one that all servers have heard is known to the chief as well.
        self.standbys = {standby.address: standby for status in statuses for standby in status.standbys}

    def free(self) -> list[Standby]:
        """Returns the processes that wait, and have got no place yet."""
        return [standby for standby in self.standbys.values() if standby.place == NOWHERE]

    def in_domain(self, domain: str) -> list[int]:
        """Returns the servers of a domain."""
        return [server for server, status in self.servers.items() if status.domain == domain]

    def domains(self) -> Counter[str]:
        """Returns how many servers each domain has, those with a process that waits included."""
        found = Counter({standby.domain: 0 for standby in self.free()})
        found.update(status.domain for status in self.servers.values())
        return found


@command(
    CHANGE,
    ("Move server 1 to any standby server", "psctl move ps:1"),
    ("Move it to a certain one", "psctl move ps:1 --to 10.0.0.9:2222"),
)
@click.argument("task")
@click.option("--to", "to", metavar="HOST:PORT", default="", help="Address of a standby server. [default: any]")
@waits
def move(told: CommandSettings, task: str, to: str, wait: float) -> int:
    """Move a server to a standby server, while the job runs.

    TASK is a server, such as ps:1. psserver --join starts the standby server. The old server ends when the job
    uses the new one. Needs PS_REPLICATION_FACTOR=2.
    """
    server = _server(task)
    return _move_each(told, lambda places, moved: None if moved else (server, to), wait)


@command(
    CHANGE,
    ("Move server 1 away from its machine", "psctl drain ps:1"),
    ("Move all servers of a rack away", "psctl drain rack-3"),
)
@click.argument("what")
@waits
def drain(told: CommandSettings, what: str, wait: float) -> int:
    """Move servers away from a machine or failure domain.

    WHAT is a server, such as ps:1, or a domain (psserver --domain, by default the host's name). The servers move to
    standby servers in other domains.
    """

    def choose(places: JobPlaces, moved: bool) -> tuple[int, str] | None:
        if what in (*places.domains(), *(standby.domain for standby in places.standbys.values())):
            domain, servers = what, places.in_domain(what)
        elif moved:
            return None
        else:
            server = _server(what)
            domain, servers = places.servers[server].domain if server in places.servers else "", [server]
        if not servers:
            return None
        free = [standby.address for standby in places.free() if standby.domain != domain]
        if not free:
            raise ConfigError(
                f"there is no standby server for {Task('ps', servers[0])} outside domain {domain!r}; start one on "
                "another machine with psserver --join"
            )
        return servers[0], free[0]

    return _move_each(told, choose, wait)


@command(
    CHANGE,
    ("Use the standby servers of new machines", "psctl rebalance"),
)
@waits
def rebalance(told: CommandSettings, wait: float) -> int:
    """Spread servers over the domains that have standby servers.

    The servers with the most bytes of variables move first. Start standby servers with psserver --join on new machines.
    Start the job with as many servers as it may have machines later.
    """

    def choose(places: JobPlaces, moved: bool) -> tuple[int, str] | None:
        counts = places.domains()
        targets = [standby for standby in places.free() if standby.domain]
        if not targets:
            return None
        target = min(targets, key=lambda standby: counts[standby.domain])
        fullest = max(counts, key=lambda domain: counts[domain])
        if counts[fullest] - counts[target.domain] < 2:
            return None
        heaviest = max(places.in_domain(fullest), key=lambda server: places.servers[server].variable_bytes)
        return heaviest, target.address

    return _move_each(told, choose, wait)


def _server(text: str) -> int:
    """Reads `ps:1`, or `/job:ps/task:1`."""
    job, colon, index = text.partition(":")
    task = Task(job, int(index)) if colon and job == "ps" and index.isdecimal() else _task(text)
    if task.job != "ps":
        raise ConfigError(f"{task} is not a server; write ps:0")
    return task.index


def _task(text: str) -> Task:
    try:
        return Task.parse(text)
    except ConfigError:
        raise ConfigError(f"{text!r} is neither a server nor the domain of a server; write ps:0") from None


def _move_each(told: CommandSettings, choose: Choose, wait: float) -> int:
    """Moves servers until there is none to move, and says which; the exit code is 0."""
    done = list[dict[str, str]]()
    with connected(told) as servers:
        while (chosen := choose(places := _look(servers), bool(done))) is not None:
            server, to = chosen
            if server not in range(places.count):
                raise ConfigError(f"the job has {places.count} servers, so there is no {Task('ps', server)}")
            address = servers.move(server, to)
            _await(servers, server, address, wait)
            done.append({"task": str(Task("ps", server)), "to": address})
    text = "\n".join(f"{each['task']} has moved to {each['to']}" for each in done) or "no server needs to move"
    return told.tell({"moved": done}, text)


def _look(servers: Servers) -> JobPlaces:
    looked = servers.look()
    statuses = [found.status for found in looked if found.status]
    errors = [found.error for found in looked if found.error]
    if not statuses and errors:
        raise errors[0]
    return JobPlaces(statuses)


def _await(servers: Servers, server: int, address: str, wait: float) -> None:
    """Waits until a server has moved.

    Raises:
        RoundTimeout: it has not, within this time.
        ConfigError: the process that waited is gone.
    """
    until, task = time.monotonic() + wait, Task("ps", server)
    absent = 0
    while True:
        try:
            places = _look(servers)
        except PSError:  # in the moment in which the server ends
            places = None
        if places is not None:
            if places.moved.get(server) == address and server in places.servers:
                return
            absent = 0 if address in places.standbys or places.moved.get(server) == address else absent + 1
            if absent > 2:
                raise ConfigError(
                    f"{task} was not moved, because the standby server at {address} has ended; see its log"
                )
        if time.monotonic() > until:
            raise RoundTimeout(
                f"{task} has not moved to {address} within {wait:g} s; a server moves between two steps of the job: "
                "see the chief's log and psctl status",
                str(task),
            )
        time.sleep(LOOK_SECONDS)
