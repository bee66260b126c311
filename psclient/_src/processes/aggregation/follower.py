"""A worker that hands what it would push to the one of its host that sends."""

from __future__ import annotations

import itertools
import logging
import select
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np

from psclient._src.processes.aggregation.link import HostLink, HostMessage, Kind, LinkLost, Outbox, Pulse
from psclient._src.processes.aggregation.sums import Own
from pswire.encoding import messages
from pswire.encoding.verbs import parse
from pswire.errors import PSError
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.payload import Payload

log = logging.getLogger("psclient")

HELLO_SECONDS = 2.0
"""Seconds within which the other end says that it leads."""


class Follower:
    """A connection to the worker that sends for this one. May be used by any thread.

    Args:
        sock: the connection.
        session: number of this process's session.
        silence: seconds after which the other end counts as gone, if nothing comes from it.

    Raises:
        LinkLost: the other end does not lead.
        OSError: the system gives no memory, or the connection is broken.
    """

    def __init__(self, sock: socket.socket, session: int, silence: float) -> None:
        self._silence = silence
        self._outbox = Outbox()
        self._link = HostLink(sock, self._outbox)
        self._lock = threading.Lock()  # guards the calls, and that it is lost once
        self._calls: dict[int, Own] = {}
        self._numbers = itertools.count(1)
        self._decoder = messages.RoundDecoder()
        self.lost = False
        try:
            if not self._link.is_ours:
                raise LinkLost("it is of another user")
            self._link.introduce(Kind.HELLO, session)
            self._await_welcome()
        except BaseException:
            self._link.close()
            self._outbox.close()
            raise
        threading.Thread(target=self._run, name="host", daemon=True).start()

    def _await_welcome(self) -> None:
        until = time.monotonic() + HELLO_SECONDS
        while (left := until - time.monotonic()) > 0:
            select.select([self._link.sock], [], [], left)
            if any(message.kind is Kind.WELCOME for message in self._link.receive()):
                return
        raise LinkLost("it does not answer")

    def push(self, own: Own) -> None:
        """Hands over a contribution, once it is whole; its future is answered in any case."""
        own.payload.reach(own.payload.size, partial(self._send, own))

    def decline(self, server: int, round: int) -> None:
        """Says that this process pushes what it contributes to a round of a server by itself."""
        with suppress(LinkLost):
            self._link.tell(Kind.SINGLY, round, server=server)

    def _send(self, own: Own) -> None:
        call = next(self._numbers)
        with self._lock:
            lost = self.lost
            if not lost:
                self._calls[call] = own
        if lost:
            own.refuse()
            return
        header = messages.contribution_to_pb(own.said, own.payload.size).SerializeToString()
        try:
            sent = self._link.send(HostMessage(Kind.PUSH, own.server, call, header, own.payload))
        except LinkLost:
            self.close()
            return
        if not sent:
            self.decline(own.server, own.said.round)
            with self._lock:
                there = self._calls.pop(call, None)
            if there is not None:
                own.refuse()

    def _run(self) -> None:
        pulse = Pulse(self._silence)
        try:
            while not self.lost:
                select.select([self._link.sock], [], [], pulse.left)
                for message in self._link.receive():
                    self._handle(message)
                if pulse.is_due():
                    self._link.say_alive(pulse)
        except (LinkLost, OSError, ValueError) as error:  # the last: it was closed meanwhile
            log.info("the worker of this host that sends is gone: %s", error)
        except Exception:
            log.exception("a worker of this host cannot be followed")
        finally:
            self.close()
            self._link.close()

    def _handle(self, message: HostMessage) -> None:
        with self._lock:
            own = self._calls.pop(message.call, None)
        if own is None:
            return
        if message.kind is not Kind.ANSWER:
            own.refuse()
            return
        try:
            reply = self._decoder.decode(parse(pb.RoundHeader, message.header), _copied(message.payload))
        except PSError:
            own.refuse()
            return
        own.answer(reply)

    def close(self) -> None:
        """Ends it; what is not answered is pushed by itself."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            calls, self._calls = list(self._calls.values()), {}
        with suppress(OSError):
            self._link.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        for own in calls:
            own.refuse()
        self._outbox.close()


def _copied(payload: Payload) -> Payload:
    """Copies an answer: its memory is another process's, which may lose this one, and write there."""
    memory = np.empty(payload.size, np.uint8)
    for offset, buffer in payload.chunks:
        memory[offset : offset + len(buffer)] = np.frombuffer(buffer, np.uint8)
    return Payload([(0, memory.data)] if payload.size else (), payload.size)
