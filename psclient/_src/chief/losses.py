"""Servers without which the job goes on, where copies of all that lay there are.

The chief tells the others of a server that is lost. Of two that have other values of the same variables, which servers
find out by themselves (`psserver.rounds.digests`), it gives one up, and tells its process, which ends. Whatever runs
the servers starts it again, and it is readmitted with the values of those that are there.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from psclient._src.chief.job_log import JobLog, JobState
from psclient._src.network.daemon_threads import Threads
from psclient._src.network.remote_server import RemoteServer, elsewhere
from psclient._src.network.session import Session
from pswire.cluster import Task, server_of
from pswire.errors import PSError, ServerGone, ServerLost
from pswire.model.log import Gone, Lost
from pswire.model.status import Difference, ServerStatus

log = logging.getLogger("psclient.chief")

LEASES = 10
"""Leases that are between two repairs of one pair of servers at least."""

ADVICE = "run all servers on the same type of processor, and test their memory"
"""What to do about servers that compute differently."""

Pair = tuple[int, int]
"""Two servers, the lower one first."""


def farewell(server: RemoteServer, say: Callable[[RemoteServer], object], what: str) -> Callable[[], None]:
    """Returns what tells the process that is a server now that it is none any more, once the job goes on without it.

    Args:
        server: the connection to the server, which may lead elsewhere by then.
        say: tells it, by a connection of its own.
        what: the same in words, for the log.
    """
    there = elsewhere(server, server.address)

    def tell() -> None:
        try:
            say(there)
        except PSError as error:
            log.info("%s at %s could not be notified that it %s: %s", there.task, there.address, what, error)
        finally:
            there.close()

    return tell


def go_on_without(session: Session, job_log: JobLog, error: ServerGone | ServerLost) -> None:
    """Goes on where all that lies on a server that is lost lies on others as well; raises the error where not."""
    losses = list[Gone]()
    # A server that is to be told of losses may be found lost itself: then the next one is told of all.
    while losses := _untold(session, job_log.state, losses, error):
        gone = job_log.state.gone | {entry.server for entry in losses}
        if len(gone) == len(session.servers):
            raise error
        lives = job_log.state.survives(gone)
        ends = [] if lives else [Lost(losses[0].server, f"{losses[0].reason}; the server with its copies was lost too")]
        try:
            job_log.lose(losses, ends, session.timeouts.call_timeout)
        except (ServerGone, ServerLost) as another:
            error = another
        else:
            if not lives:
                raise error
            return


def announce(session: Session, job_log: JobLog, error: ServerLost) -> None:
    """Writes to the log that a server is lost, so that the job ends: by that all processes know it at once."""
    lost = server_of(error)
    if not lost:
        return  # server 0 keeps the log: each process sees for itself
    try:
        job_log.insist(Lost(lost, error.message), session.timeouts.call_timeout)
    except (PSError, TimeoutError) as failure:
        log.warning("the chief could not announce that %s is lost: %s", error.task, failure)


def _untold(session: Session, state: JobState, losses: Sequence[Gone], error: ServerGone | ServerLost) -> list[Gone]:
    """Returns the servers that are lost and of which the log does not tell; raises the error if it is of none.

    Those come first of which a server may have told somebody before it was lost itself: all processes are to hear
    of losses in one order.

    Args:
        session: the chief's session.
        state: the job's state, as its log tells it.
        losses: those that such a server was to be told of, in order.
        error: how one was found now.
    """
    hosting = session.hosting
    found = server_of(error)
    if not session.copied or found is None:
        raise error
    suspects: dict[int, PSError] = {index: hosting.suspects.pop(index) for index in list(hosting.suspects)}
    # Else it is news of a loss that the log tells of, maybe of one before its return.
    if isinstance(error, ServerLost):
        suspects[found] = error
    reasons = {entry.server: entry.reason for entry in losses}
    for server in Counter(hosting.losses) - Counter(state.losses):
        reasons.setdefault(server, "was lost")
    for server in sorted(suspects):
        reasons.setdefault(server, _how(suspects[server]))
    return [Gone(server, reason) for server, reason in reasons.items() if server not in state.gone]


def _how(error: PSError) -> str:
    """Returns how a server was lost, without what that would mean were there no copies."""
    return re.split("; (?:its variables are|restart from)", error.message)[0]


class Differences:
    """The pairs of servers that differ. Used by the thread that drives.

    Args:
        servers: connections to all servers.
        session: the chief's session.
        job_log: the log.
        threads: for calls, since a server may not answer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        servers: Sequence[RemoteServer],
        session: Session,
        job_log: JobLog,
        threads: Threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = servers
        self._session = session
        self._log = job_log
        self._threads = threads
        self._clock = clock
        self._repaired: dict[Pair, float] = {}  # when
        self._left: set[Pair] = set()  # of which the log tells that they stay as they are
        self._given_up: ServerLost | None = None

    def look(self, statuses: Sequence[ServerStatus]) -> ServerLost | None:
        """Returns the error of a server that is to be given up; None for none.

        Args:
            statuses: the latest answers of all servers that are there.
        """
        generation = self._log.state.generation
        if generation is None or generation.awaited is not None:
            return None  # members wait for a server, which the others are to save for
        for pair, found in sorted(found_of(statuses).items()):
            if pair not in self._left and self._may_repair(pair, found):
                server = self.choose(pair, statuses)
                other = Task("ps", pair[0] if server == pair[1] else pair[1])
                if self._log.state.survives(self._log.state.gone | {server}):
                    self._repaired[pair] = self._clock()
                    what = f"had different values from {other} after round {found.round} ({found.told})"
                    self._given_up = lost = ServerLost(what, str(Task("ps", server)))
                    log.warning("%s: this server is removed; after a restart it copies the values of the others", lost)
                    return lost
                self._leave(pair, found, "removing either server would lose variables that have no other copy")
        return None

    def _may_repair(self, pair: Pair, found: Difference) -> bool:
        """Returns whether a repair may help that is not too soon after the last one."""
        last = self._repaired.get(pair)
        if last is None:
            return True
        if not found.agreed:
            self._leave(pair, found, f"both began with the same values, so they compute differently; {ADVICE}")
            return False
        return self._clock() - last >= LEASES * self._session.timeouts.session_timeout

    def _leave(self, pair: Pair, found: Difference, why: str) -> None:
        self._left.add(pair)
        one, other = (Task("ps", server) for server in pair)
        what = f"{one} and {other} have different values since round {found.round} ({found.told})"
        log.warning("%s. They are not repaired: %s", what, why)

    def choose(self, pair: Pair, statuses: Sequence[ServerStatus]) -> int:
        """Returns which of two servers that differ is given up.

        It is the one that differs from more servers. Else it is the one whose values nobody has read: where they
        differ the other one is asked. Else it is the higher one.

        Args:
            pair: the two.
            statuses: the latest answers of all servers that are there.
        """
        found = found_of(statuses)
        one, other = pair
        counts = Counter(server for each in found for server in each)
        if counts[one] != counts[other]:
            return max(pair, key=counts.__getitem__)
        hosting, names = self._session.hosting, set(found[pair].variables)
        variables = [each for each in self._log.state.variables if each.spec.name in names]
        homes = {hosting.home(each.servers) for each in variables} & set(pair)
        return next(iter(set(pair) - homes)) if len(homes) == 1 else other

    def tell(self, error: PSError) -> None:
        """Tells a server that it was given up, where that is why the job goes on without it: it answers still."""
        if error is not self._given_up or self._given_up is None:
            return
        self._given_up = None
        told = [(i, e) for i, e in enumerate(self._log.state.log) if isinstance(e, Gone)]
        index, entry = next((i, e) for i, e in reversed(told) if e.server == server_of(error))
        here, token = self._servers[entry.server], self._session.token
        self._threads.submit(farewell(here, lambda there: there.approve(token, index, [entry]), "was removed"))


def found_of(statuses: Sequence[ServerStatus]) -> Mapping[Pair, Difference]:
    """Returns the pairs that differ of servers that are there, once both have made the round by which they tell it."""
    rounds = {status.server: status.round for status in statuses}
    found: dict[Pair, Difference] = {}
    for status in statuses:
        for each in status.differences:
            if min(status.round, rounds.get(each.server, -1)) > each.round:
                found[min(status.server, each.server), max(status.server, each.server)] = each
    return found
