"""Connections to other servers: which there are, as servers come and go."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading

import pytest

from psserver.config import ServerConfig
from psserver.effects import NOWHERE, Peer
from psserver.network import peers
from psserver.network.peers import Peers, TransportCarrier
from pswire.cluster import Task
from pswire.network.sockets import Message, MessageKind
from pswire.servers.votes import Vote

HERE, THERE, ANEW = Peer("a:1", 10), Peer("b:2", 20), Peer("b:2", 21)
VOTE = Vote(1, 0, b"plan", 1, 0, frozenset(), None, -1)


class Link:
    """A connection that says nothing to anybody."""

    made: list[Link]

    def __init__(self, core, config, server, peer):
        self.peer, self.said, self.closed = peer, [], False
        Link.made.append(self)

    def say(self, said):
        self.said.append(said)

    def close(self):
        self.closed = True

    def join(self):
        pass


@pytest.fixture
def known(monkeypatch):
    """The connections of server 0 to a second one."""
    monkeypatch.setattr(peers, "PeerConnection", Link)
    Link.made = []
    found = Peers(None, ServerConfig(Task("ps", 0)))
    found.know((HERE, THERE))
    return found


def test_the_first_vote_makes_the_connection(known):
    """And the second one uses it; nobody is connected any more at the end, whatever is said or known then."""
    assert not Link.made
    known.say(1, VOTE)
    known.say(1, VOTE)
    (link,) = Link.made
    assert (link.peer, link.said, link.closed) == (THERE, [VOTE, VOTE], False)
    known.close()
    known.know((HERE, ANEW))
    known.say(1, VOTE)
    assert ([*Link.made], link.closed) == ([link], True)


def test_who_is_gone_has_no_connection(known):
    """The one that there was is closed."""
    known.say(1, VOTE)
    known.know((HERE, NOWHERE))
    known.say(1, VOTE)
    assert [(link.said, link.closed) for link in Link.made] == [([VOTE], True)]


@pytest.mark.parametrize("early", [True, False], ids=["before it is known", "after"])
def test_who_comes_back_is_connected_though_nothing_more_is_said(known, early):
    """What was said before, by another thread, was lost: a new connection is told all that it may not have heard."""
    if not early:
        known.say(1, VOTE)
    known.know((HERE, NOWHERE))
    if early:
        known.say(1, VOTE)
    known.know((HERE, ANEW))
    assert [link.peer for link in Link.made if not link.closed] == [ANEW]


def test_a_server_with_many_connections_has_votes():
    """A thousand clients have files as well: the number of a connection to another server may be above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    here, there = socket.socketpair()
    try:
        high = socket.socket(fileno=fcntl.fcntl(here.fileno(), fcntl.F_DUPFD, 1100))
        here.close()
        high.setblocking(False)
        with high, there:
            carrier = TransportCarrier(high, 7)
            there.sendall(Message(MessageKind.WELCOME).head())
            carrier.await_welcome()
            carrier.say(VOTE)
            assert b"plan" in there.recv(1000)
            there.close()
            with pytest.raises(OSError, match="closed"):
                carrier.keep(threading.Event())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
