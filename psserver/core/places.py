"""The stimuli of processes that wait for the place of a server, and of servers that move there."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from psserver.core.log import Log
from psserver.effects import Outcome, Reply
from psserver.state.standbys import Standbys
from psserver.state.variables import Store
from pswire.cluster import Task
from pswire.errors import ConfigError, InvalidRequest
from pswire.model.places import Offered
from pswire.servers.places import MoveRequest, OfferRequest

log = logging.getLogger("psserver")


class PlaceStimuli:
    """The part of a server's state machine by which servers get other places.

    Attributes:
        moved_to: the address of the process that has this server's place now; "" while it has not moved.
    """

    task: Task
    server: int
    log: Log
    store: Store
    done: Future[None]
    left: Future[None]
    moved_to: str = ""
    _standbys: Standbys

    def _check_token(self, token: int) -> None:
        raise NotImplementedError

    def offer(self, now: float, asked: OfferRequest) -> Outcome[Offered]:
        """Notes a process that waits for a place; answers which it has got, and where the servers are."""
        place = self._standbys.offer(asked.standby, now, self.log.over)
        return Offered(place, self.log.addresses if self.log.incarnations else (), self.log.over), []

    def move(self, now: float, asked: MoveRequest) -> Outcome[str]:
        """Gives the place of a server to a process that waits; of the chief takes that this server has moved."""
        server, address = asked.server, asked.address
        if asked.token:
            return self._leave_to(server, address, asked.token)
        if not self.log.incarnations or self.log.over:
            raise ConfigError("no job runs on this server, so it cannot be moved", str(self.task))
        if not self.store.copied:
            raise ConfigError(
                "a server can move only if its variables have copies; start the job with PS_REPLICATION_FACTOR=2",
                str(self.task),
            )
        if server >= self.log.servers:
            raise InvalidRequest(f"the job has {self.log.servers} servers, so there is no server {server}")
        return self._standbys.give(server, address, now), []

    def _leave_to(self, server: int, address: str, token: int) -> Outcome[str]:
        self._check_token(token)
        if server != self.server:
            raise InvalidRequest(f"this is {self.task}, not {Task('ps', server)}", str(self.task))
        log.warning("%s has moved to %s; this process ends", self.task, address)
        self.moved_to = address
        return address, [Reply(self.left, None), Reply(self.done, None)]
