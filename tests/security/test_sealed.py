"""What is encrypted arrives as it was sent, whatever the system takes at once, and in both directions at a time."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.cases import search
from tests.kit.certificates import Certificates
from tests.kit.internals import MAX_PART_BYTES, PIECE, RECORD, Kind, Message, MessageSocket, Sealed

SECONDS = 20.0


@contextmanager
def connected(certificates: Certificates) -> Iterator[tuple[Sealed, Sealed]]:
    """Both ends of a connection, whose system buffers are small."""
    here, there = socket.socketpair()
    for sock in (here, there):
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    server = Sealed(there, certificates.of("ps-0").server_context())
    client = Sealed(here, certificates.of("worker-0").client_context(), "ps-0.paramserver")
    shaking = threading.Thread(target=server.shake)
    shaking.start()
    client.shake()
    shaking.join()
    pair = client, server
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def ends(certificates: Certificates) -> Iterator[tuple[Sealed, Sealed]]:
    """The same for a test."""
    with connected(certificates) as pair:
        yield pair


def send(link: MessageSocket, messages: Sequence[tuple[Message, bytes]]) -> None:
    """Sends all, as the thread of a lane does."""
    with selectors.DefaultSelector() as selector:
        selector.register(link.sock, selectors.EVENT_WRITE)
        for message, data in messages:
            left = link.send([message.head(), memoryview(data)])
            while left:
                assert selector.select(SECONDS)
                left = link.flush()


def receive(link: MessageSocket, count: int) -> list[tuple[Message, bytes]]:
    """So many messages."""
    found: list[tuple[Message, bytes]] = []
    with selectors.DefaultSelector() as selector:
        selector.register(link.sock, selectors.EVENT_READ)
        while len(found) < count:
            found += [(message, bytes(message.data or b"")) for message in link.receive()]
            if len(found) < count:
                assert selector.select(SECONDS), f"{len(found)} of {count}"
    return found


SIZES = st.one_of(
    st.integers(0, 100), st.sampled_from([RECORD - 40, RECORD, RECORD + 1, PIECE, PIECE + 1, MAX_PART_BYTES])
)


@search(0.25)
@given(sizes=st.lists(SIZES, max_size=8), seed=st.integers(0, 9))
def test_what_is_sent_arrives(certificates: Certificates, sizes: list[int], seed: int) -> None:
    """Messages of all sizes, both ways at once, by four threads; each end reads while it writes."""
    random = np.random.default_rng(seed)
    sent = [
        [(Message(Kind.PART, number, b"h" * number, 0, size), random.bytes(size)) for number, size in enumerate(sizes)]
        for _ in range(2)
    ]
    with connected(certificates) as pair, ThreadPoolExecutor(4) as threads:
        links = [MessageSocket(end) for end in pair]
        for link in links:
            link.trust()
        sending = [threads.submit(send, link, messages) for link, messages in zip(links, sent, strict=True)]
        receiving = [threads.submit(receive, link, len(sizes)) for link in links]
        for done in sending:
            done.result(SECONDS)
        got = [done.result(SECONDS) for done in receiving]
    assert [said(messages) for messages in got] == [said(messages) for messages in reversed(sent)]


def said(messages: Sequence[tuple[Message, bytes]]) -> list[tuple[int, bytes, bytes]]:
    return [(message.call, message.header, data) for message, data in messages]


def test_an_end_that_goes(ends: tuple[Sealed, Sealed]) -> None:
    """Is noticed by the other, as on a plain socket."""
    here, there = ends
    link = MessageSocket(here)
    there.close()
    with pytest.raises(ConnectionError):
        receive(link, 1)


def test_a_stranger_in_between(ends: tuple[Sealed, Sealed]) -> None:
    """Who changes a byte breaks the connection, and nothing of it is taken."""
    here, there = ends
    link = MessageSocket(there)
    here._sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(OSError, match=r"(?i)mac|decrypt|bad record"):
        receive(link, 1)


def test_names(ends: tuple[Sealed, Sealed]) -> None:
    """Each end reads what the other's certificate names."""
    here, there = ends
    assert sorted(here.peer_names()) == ["metrics.paramserver", "ps-0.paramserver"]
    assert sorted(there.peer_names()) == ["metrics.paramserver", "worker-0.paramserver"]
