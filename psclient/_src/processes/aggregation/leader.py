"""The worker of a host that sends: it gathers what its host's workers contribute, and hands on what came of it."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from psclient._src.processes.aggregation.link import (
    HostLink,
    HostMessage,
    Left,
    LinkLost,
    LinkMessage,
    Outbox,
    Pulse,
    Silent,
)
from psclient._src.processes.aggregation.sums import OwnPush, Single, part_of, sum_of
from pswire.api import Contribution, RoundReply
from pswire.encoding import messages
from pswire.encoding.verbs import parse
from pswire.errors import InvalidRequest, PSError
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from pswire.pb import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

QUIET_SECONDS = 60.0
"""Seconds in which the log has one line at most of processes of another user."""

Push = Callable[[int, Contribution, Payload], Future[RoundReply]]
"""Pushes to a server, by its index."""

VariableOf = Callable[[int], PlacedVariable]
"""Returns a variable, by its number."""

AT_ONCE = 1 << 18
"""Bytes to add that a thread adds which has more to do; more of them are left to one that has not."""

MOST_RESTS = 64
"""Rounds in which nothing is summed after a sum that was of no use: one after the first, then twice as many."""


@dataclass(frozen=True, eq=False)
class HandedContribution(Single):
    """A contribution that another worker has handed over.

    Attributes:
        leader: who has it.
        link: where it came from.
        call: its number there.
    """

    leader: Leader
    link: HostLink
    call: int

    def answer(self, reply: RoundReply) -> None:
        name = self.server, self.said.round, self.said.want
        answer = HostMessage(
            LinkMessage.ANSWER, self.server, self.call, self.leader.encoder.encode(reply), reply.payload
        )
        with suppress(LinkLost):  # then its sender finds that out, and pushes it
            if not self.link.send(answer, name):
                self.refuse()

    def refuse(self) -> None:
        with suppress(LinkLost):
            self.link.tell(LinkMessage.SINGLY, self.call)


class Leader:
    """Gathers, sums and sends. May be used by any thread.

    Args:
        listener: the socket at which the others find it.
        silence: seconds after which another worker counts as gone, if nothing comes from it.
        patience: seconds that a round waits for another worker; after it each pushes by itself.
        push: pushes a sum.
        variable: returns a variable, by its number.
        met: is called where another worker has come.

    Attributes:
        encoder: encodes answers.
        summed: contributions that it has sent in sums, which were answered.
        lost: True once it leads no more.

    Raises:
        OSError: the system gives no memory.
    """

    def __init__(
        self,
        listener: socket.socket,
        silence: float,
        patience: float,
        push: Push,
        variable: VariableOf,
        met: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._silence, self._patience = silence, patience
        self._push = push
        self._variable = variable
        self._met = met
        self.encoder = messages.RoundEncoder()
        self.summed = 0
        self.lost = False
        self._lock = threading.RLock()  # guards all below
        self._links: set[HostLink] = set()
        self._coming: set[OwnPush] = set()
        self._open: dict[tuple[int, int], _Gathering] = {}
        self._decided = dict[int, int]()  # for each server up to which round it is decided how they are sent
        self._rests, self._left = 1, 0
        self._strangers, self._told = 0, float("-inf")  # who have come since the log told of them, and when it did
        self._adder = ThreadPoolExecutor(1, "host sums")
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, lambda: None)
        self._outbox = Outbox()
        threading.Thread(target=self._run, name="host", daemon=True).start()

    # ---- What is gathered ----

    def push(self, own: OwnPush) -> None:
        """Takes this process's contribution, once it is whole; its future is answered in any case."""
        with self._lock:
            lost = self.lost
            if not lost:
                self._coming.add(own)
        if lost:
            self._refuse([own])
        else:
            own.payload.reach(own.payload.size, partial(self._begin, own))

    def _begin(self, own: OwnPush) -> None:
        with self._lock:
            there = own in self._coming
            self._coming.discard(own)
        if there:  # else it was pushed by itself meanwhile
            self._offer(own)

    def decline(self, server: int, round: int) -> None:
        """Notes that one of the workers pushes what it contributes to a server by itself, up to a round."""
        with self._lock:
            behind = self._decide(server, round)
        for gathering in behind:
            self._refuse(gathering.in_order)

    def _decide(self, server: int, round: int) -> list[_Gathering]:
        """Returns what is there up to a round; what comes later to one of these is pushed by its sender."""
        self._decided[server] = max(round, self._decided.get(server, round))
        keys = sorted(key for key in self._open if key[0] == server and key[1] <= round)
        return [self._open.pop(key) for key in keys]

    def _offer(self, single: Single) -> None:
        server, round = single.server, single.said.round
        with self._lock:
            late = self.lost or round <= self._decided.get(server, -1)
            if not late:
                self._open.setdefault((server, round), _Gathering(time.monotonic())).take(single)
        if late:
            self._refuse([single])
        else:
            self._look(server, round)

    def _look(self, server: int, round: int) -> None:
        """Sends a round whose contributions are all there."""
        with self._lock:
            gathering = self._open.get((server, round))
            if gathering is None or gathering.awaits({link.session for link in self._links}):
                return
            *behind, gathering = self._decide(server, round)
            own, singles = gathering.own, gathering.in_order
            rests, self._left = self._left > 0, max(self._left - 1, 0)
        for each in behind:
            self._refuse(each.in_order)
        if own is None or rests or len(singles) == 1:
            self._refuse(singles)
        elif own.payload.size * len(singles) <= AT_ONCE:
            self._send(own, singles)
        else:
            try:
                self._adder.submit(self._send, own, singles)
            except RuntimeError:  # it is over, or this process ends
                self._refuse(singles)

    def _send(self, own: OwnPush, singles: Sequence[Single]) -> None:
        """Sends the sum of some contributions; if there is none, each is pushed by itself."""
        try:
            found = sum_of(own, singles)
            pushed = None if found is None else self._push(own.server, *found)
        except PSError as error:
            log.info("a local sum cannot be sent: %s", error)
            pushed = None
        except Exception:  # a bug of ours: the servers take the contributions one by one
            log.exception("the gradients for round %d cannot be summed", own.said.round)
            pushed = None
        if found is None or pushed is None:
            self._refuse(singles)
        else:
            pushed.add_done_callback(partial(self._answered, own, singles, found[0].want))

    def _answered(
        self,
        own: OwnPush,
        singles: Sequence[Single],
        want: Sequence[int],
        pushed: Future[RoundReply],
    ) -> None:
        """Hands on what came of a sum. Where that is an error each asks for itself: it may be its own alone."""
        if pushed.exception() is not None:
            with self._lock:
                self._left, self._rests = self._rests, min(2 * self._rests, MOST_RESTS)
            self._refuse(singles)
            return
        with self._lock:
            self._rests = 1
            self.summed += len(singles)
        reply, parts = pushed.result(), dict[tuple[int, ...], RoundReply]()
        for single in sorted(singles, key=lambda each: each is own):  # this process has much to do after it
            mine = single.said.want
            try:
                if mine not in parts:
                    parts[mine] = part_of(reply, want, mine, partial(self._specs, own, want))
                single.answer(parts[mine])
            except Exception:  # a bug of ours: it asks the server
                log.exception("the response to round %d cannot be forwarded", reply.round)
                self._refuse([single])

    def _specs(self, own: OwnPush, want: Sequence[int]) -> list[TensorSpec]:
        return [*(self._variable(id).spec.tensor for id in want), *(spec for _, spec in own.plan.given(own.server))]

    def _refuse(self, singles: Sequence[Single]) -> None:
        for single in singles:
            single.refuse()

    # ---- The thread ----

    def _run(self) -> None:
        pulse = Pulse(self._silence)
        try:
            while not self.lost:
                for key, _ in self._selector.select(pulse.left):
                    key.data()
                if pulse.is_due():
                    self._see(pulse)
        except Exception:
            log.exception("local reduction on this host failed")
        finally:
            self.close()
            for link in self._links:
                link.close()
            for sock in (self._listener, self._bell, self._rope):
                sock.close()
            self._selector.close()
            self._outbox.close()

    def _see(self, pulse: Pulse) -> None:
        """Looks who is silent, and which rounds wait too long."""
        for link in list(self._links):
            try:
                link.say_alive(pulse)
            except Silent as error:
                if link.session:  # it may read answers when it goes on: this memory is written no more
                    log.warning(
                        "a worker on this host does not respond; each worker sends its own gradients until "
                        "local reduction restarts"
                    )
                    self.close()
                    return
                self._lose(link, error)
            except LinkLost:
                pass  # its end is read
        with self._lock:
            slow = [(key, each.own) for key, each in self._open.items() if pulse.now - each.since > self._patience]
        for key, _ in slow:
            self.decline(*key)
        if any(own is None for _, own in slow):
            self.close()  # this process takes no part any more: another one leads

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it is gone already
        sock.setblocking(False)
        link = HostLink(sock, self._outbox, socket.SHUT_WR)
        if not link.is_ours:
            link.close()
            self._tell_of_stranger()
            return
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, link))
        with self._lock:
            self._links.add(link)

    def _tell_of_stranger(self) -> None:
        """Says that a process of another user was sent away: once a minute, however often it comes."""
        self._strangers += 1
        if time.monotonic() - self._told >= QUIET_SECONDS:
            times = "" if self._strangers == 1 else f" {self._strangers} times"
            log.warning("rejected a connection to this host's local reduction from a process of another user%s", times)
            self._strangers, self._told = 0, time.monotonic()

    def _read(self, link: HostLink) -> None:
        try:
            for message in link.receive():
                self._handle(link, message)
        except (LinkLost, OSError, PSError) as error:
            self._lose(link, error)

    def _handle(self, link: HostLink, message: HostMessage) -> None:
        if message.kind is LinkMessage.HELLO and not link.session:
            with self._lock:
                link.session = message.call  # before it is told: what it pushes then is waited for
            link.introduce(LinkMessage.WELCOME)
            self._met()
        elif message.kind is LinkMessage.PUSH and link.session:
            said = messages.contribution_from_pb(parse(pb.PushHeader, message.header))
            if said.session != link.session:
                raise InvalidRequest(f"it sent a push for session {said.session}, but its session is {link.session}")
            handed = HandedContribution(message.server, said, message.payload, self, link, message.call)
            self._offer(handed)
        elif message.kind is LinkMessage.SINGLY and link.session:
            self.decline(message.server, message.call)
        else:
            raise InvalidRequest(f"it sent an unexpected message {message.kind.name}")

    def _lose(self, link: HostLink, why: Exception) -> None:
        """A worker is gone; what it has handed over counts."""
        log.info("the connection to a worker on this host ended: %s", why)
        self._selector.unregister(link.sock)
        with self._lock:
            self._links.discard(link)
            alone = link.session and not any(each.session for each in self._links)
            keys = list(self._open)
        link.close()
        if isinstance(why, Left):
            link.reclaim()
        if alone:
            self.close()  # perhaps this process stood still, and the others have found another one
            return
        for key in keys:
            self._look(*key)

    @property
    def workers(self) -> int:
        """Workers of this host that take part in these sums, with this one."""
        with self._lock:
            return 1 + sum(link.session != 0 for link in self._links)

    def close(self) -> None:
        """Leads no more: the others find it out, and each pushes by itself what is not answered."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            rounds, self._open = list(self._open.values()), {}
            coming, self._coming = list(self._coming), set()
            links = list(self._links)
        self._adder.shutdown(wait=False)
        for link in links:
            link.end()
        with suppress(OSError):
            self._rope.send(b"\0")
        self._refuse([*coming, *(single for each in rounds for single in each.in_order)])


class _Gathering:
    """The contributions of a host's workers to one round of one server.

    Args:
        since: the time of the first one, in monotonic seconds.

    Attributes:
        own: this process's; None before it has come.
        singles: all, by their sessions.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self.own: OwnPush | None = None
        self.singles: dict[int, Single] = {}

    def take(self, single: Single) -> None:
        self.singles[single.said.session] = single
        if isinstance(single, OwnPush):
            self.own = single

    def awaits(self, linked: set[int]) -> bool:
        """Returns whether it waits for any of the workers that are there, which `linked` has without this one."""
        return self.own is None or not linked & self.own.members.keys() <= self.singles.keys()

    @property
    def in_order(self) -> list[Single]:
        """All, in task order; those of no member, which no server sums, come last."""
        members = {} if self.own is None else self.own.members
        place = {session: number for number, session in enumerate(members)}
        return sorted(self.singles.values(), key=lambda each: place.get(each.said.session, len(place)))
