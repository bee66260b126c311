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

from psclient._src.processes.aggregation.link import HostLink, HostMessage, LinkLost, LinkMessage, Outbox, Pulse
from psclient._src.processes.aggregation.sums import OwnPush
from pswire.encoding import messages
from pswire.encoding.verbs import parse
from pswire.network.payload import Payload
from pswire.pb import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

HELLO_SECONDS = 2.0
"""Seconds within which the other end says that it leads."""


class LeaderConnection:
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
        self._link = HostLink(sock, self._outbox, socket.SHUT_RD)
        self._news = select.poll()
        self._news.register(sock, select.POLLIN)
        self._lock = threading.Lock()  # guards the calls, and that it is lost once
        self._calls: dict[int, OwnPush] = {}
        self._numbers = itertools.count(1)
        self._decoder = messages.RoundDecoder()
        self.lost = False
        try:
            if not self._link.is_ours:
                raise LinkLost("it runs as another user")
            self._link.introduce(LinkMessage.HELLO, session)
            self._await_welcome()
        except BaseException:
            self._link.close()
            self._outbox.close()
            raise
        threading.Thread(target=self._run, name="host", daemon=True).start()

    def _await_welcome(self) -> None:
        until = time.monotonic() + HELLO_SECONDS
        while (left := until - time.monotonic()) > 0:
            self._news.poll(1e3 * left)
            if any(message.kind is LinkMessage.WELCOME for message in self._link.receive()):
                return
        raise LinkLost("it does not answer")

    def push(self, own: OwnPush) -> None:
        """Hands over a contribution, once it is whole; its future is answered in any case."""
        call = next(self._numbers)
        with self._lock:
            lost = self.lost
            if not lost:
                self._calls[call] = own
        if lost:
            own.refuse()
        else:
            own.payload.reach(own.payload.size, partial(self._send, call))

    def decline(self, server: int, round: int) -> None:
        """Says that this process pushes what it contributes to a server by itself, up to a round."""
        with suppress(LinkLost):
            self._link.tell(LinkMessage.SINGLY, round, server=server)

    def _send(self, call: int) -> None:
        own = self._calls.get(call)
        if own is None:
            return  # it was pushed by itself meanwhile
        header = messages.contribution_to_pb(own.said, own.payload.size).SerializeToString()
        try:
            sent = self._link.send(HostMessage(LinkMessage.PUSH, own.server, call, header, own.payload))
        except LinkLost:
            self.close()
            return
        if not sent:
            self.decline(own.server, own.said.round)
            if self._take(call) is not None:
                own.refuse()

    def _take(self, call: int) -> OwnPush | None:
        """Returns a call that is not answered, which its caller then answers; None if another one does."""
        with self._lock:
            return self._calls.pop(call, None)

    def _run(self) -> None:
        pulse = Pulse(self._silence)
        try:
            while not self.lost:
                self._news.poll(1e3 * pulse.left)
                for message in self._link.receive():
                    self._handle(message)
                    del message  # its data lie in the other end's memory, which has use for that
                if pulse.is_due():
                    self._link.say_alive(pulse)
        except (LinkLost, OSError) as error:
            log.info("the connection to the worker that sends for this host ended: %s", error)
        except Exception:
            log.exception("the connection to the worker that sends for this host failed")
        finally:
            self._link.close()  # last of all: from now on the other end writes where answers were
            self.close()
            self._outbox.close()

    def _handle(self, message: HostMessage) -> None:
        own = self._take(message.call)
        if own is None:
            return
        if message.kind is not LinkMessage.ANSWER:
            own.refuse()
            return
        try:
            reply = self._decoder.decode(parse(pb.RoundHeader, message.header), _copied(message.payload))
        except Exception as error:
            log.warning("a response from the worker that sends for this host cannot be read: %s", error)
            own.refuse()
        else:
            own.answer(reply)

    def close(self) -> None:
        """Ends it; what is not answered is pushed by itself."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            calls, self._calls = list(self._calls.values()), {}
        self._link.end()
        for own in calls:
            own.refuse()


def _copied(payload: Payload) -> Payload:
    """Copies an answer, whose memory is another process's: who gets it may keep it for long."""
    memory = np.empty(payload.size, np.uint8)
    for offset, buffer in payload.chunks:
        memory[offset : offset + len(buffer)] = np.frombuffer(buffer, np.uint8)
    return Payload([(0, memory.data)] if payload.size else (), payload.size)
