"""Messages on sockets: whole however the bytes are cut, bounded, in order, and none sent twice."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.errors import InvalidRequest
from pswire.model.tensor import Array
from pswire.network import scratch, sockets
from pswire.network.parts import STEPS, Assembly
from pswire.network.payload import Payload
from pswire.network.scratch import SCRATCH
from pswire.network.shared_memory import Segment, SharedArena, SharedView
from pswire.network.traffic import Traffic
from tests.kit import samples
from tests.kit.cases import search

SECONDS = 20.0


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, sockets.MessageSocket]]:
    """A bare end, and a link that trusts it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(SECONDS)
    with ours, theirs:
        link = sockets.MessageSocket(theirs)
        link.trust()
        yield ours, link


def plain(message: sockets.Message) -> tuple[sockets.MessageKind, int, bytes, int, int, int, bytes | None]:
    """A message as a value."""
    data = None if message.data is None else bytes(message.data)
    return (message.kind, message.call, message.header, message.offset, message.size, message.place, data)


NUMBERS = st.integers(0, (1 << 64) - 1)
DATA = st.one_of(st.binary(max_size=100), st.integers(SCRATCH - 2, SCRATCH + 2).map(bytes))
HEADS = st.tuples(st.sampled_from([*sockets.MessageKind]), NUMBERS, st.binary(max_size=100), NUMBERS)
MESSAGES = st.builds(
    lambda head, data, place: (
        sockets.Message(*head, len(data), sockets.INLINE, memoryview(data) if data else None)
        if place is None
        else sockets.Message(*head, len(data), place)
    ),
    *(HEADS, DATA, st.one_of(st.none(), st.integers(0, sockets.INLINE - 1))),
)


# ---- Links ----


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(1, 3 * SCRATCH), max_size=8))
def test_messages_are_whole_however_the_bytes_are_cut(messages: list[sockets.Message], cuts: list[int]) -> None:
    """Of a message that is not whole yet nothing is told; of those that are nothing is kept back."""
    stream = b"".join(message.head() + bytes(message.data or b"") for message in messages)
    at = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    ends = list(itertools.accumulate(len(m.head()) + len(m.data or b"") for m in messages))
    found: list[sockets.Message] = []
    with pair() as (sock, link):
        for low, high in itertools.pairwise(at):
            sender = threading.Thread(target=sock.sendall, args=(stream[low:high],))
            sender.start()
            whole = sum(end <= high for end in ends)
            while sender.is_alive() or len(found) < whole:
                found += link.receive()
            sender.join()
            found += link.receive()
            assert len(found) == whole
    assert list(map(plain, found)) == list(map(plain, messages))


@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_messages_or_an_error(data: bytes) -> None:
    """Whatever comes: messages, a wait for more, or a refusal."""
    with pair() as (sock, link):
        sock.sendall(data)
        try:
            for message in link.receive():
                assert message.kind in sockets.MessageKind
        except InvalidRequest:
            pass


@pytest.mark.parametrize(
    ("header", "size", "trusted", "fits"),
    [
        (sockets.MAX_HELLO_BYTES, 0, False, True),
        (sockets.MAX_HELLO_BYTES + 1, 0, False, False),
        (0, 1, False, False),
        (sockets.MAX_HEADER_BYTES, sockets.MAX_PART_BYTES, True, True),
        (sockets.MAX_HEADER_BYTES + 1, 0, True, False),
        (0, sockets.MAX_PART_BYTES + 1, True, False),
        ((1 << 32) - 1, (1 << 64) - 1, True, False),
    ],
)
@pytest.mark.parametrize("place", [sockets.INLINE, 0])
def test_sizes_are_bounded_by_the_head(header: int, size: int, trusted: bool, fits: bool, place: int) -> None:
    """Nothing of what is announced has to come, and no memory is taken for it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = sockets.MessageSocket(theirs)
        if trusted:
            link.trust()
        ours.sendall(sockets.HEAD.pack(sockets.MessageKind.HELLO, header, 0, 0, size, place))
        if fits:
            assert list(link.receive()) == []
        else:
            with pytest.raises(InvalidRequest, match=f"{header} bytes of header and {size} bytes of data is larger"):
                list(link.receive())


@pytest.mark.parametrize("number", [0, max(sockets.MessageKind) + 1, 255])
def test_unknown_kinds_are_refused(number: int) -> None:
    """They are of another version, or nonsense."""
    with pair() as (sock, link):
        sock.sendall(sockets.HEAD.pack(number, 0, 0, 0, 0, sockets.INLINE))
        with pytest.raises(InvalidRequest, match=f"kind {number}"):
            list(link.receive())


def test_an_end_is_told_after_what_came_before_it() -> None:
    """In the middle of a message as between two."""
    for rest in (b"", bytes(sockets.HEAD.size // 2)):
        with pair() as (sock, link):
            sock.sendall(sockets.Message(sockets.MessageKind.WELCOME).head() + rest)
            sock.close()
            assert [message.kind for message in link.receive()] == [sockets.MessageKind.WELCOME]
            with pytest.raises(ConnectionResetError):
                list(link.receive())


@given(st.lists(st.integers(0, 1 << 18), min_size=1, max_size=600), st.integers(1, 8))
@search(0.2)
def test_what_the_system_does_not_take_waits(sizes: list[int], times: int) -> None:
    """Everything arrives, in order, however many buffers, and though many threads send."""
    buffers = [bytes([at % 251]) * (size % 5000) for at, size in enumerate(sizes)]
    expected = b"".join(buffers)
    with pair() as (sock, link):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        left = False
        for _ in range(times):
            left = link.send(buffers)
        assert left == bool(link.waiting)
        found = bytearray()
        while len(found) < times * len(expected):
            found += sock.recv(1 << 16)
            link.flush()
        assert found == expected * times
        assert not link.waiting


# ---- Channels ----


class Wire(contextlib.ExitStack):
    """Two channels over one pair of sockets; the first sends. It ends them. Attributes: channel: of the first; got:
    what the second has, by call; kinds: of the messages of each call, in order, with the headers."""

    def __init__(self, shared: int, waits: bool) -> None:
        super().__init__()
        here, there = map(self.enter_context, socket.socketpair())
        ring = mirror = None
        self.freed: list[int] = []
        if shared:
            segment, file = Segment.make(shared)
            ring, mirror = SharedArena(segment.memory), SharedView(Segment.take(file).memory, self._let_go)
            os.close(file)
        self._mirror = mirror
        self.ring = ring
        self.channel = sockets.PayloadSender(sockets.MessageSocket(here), ring, waits, lambda: None, Traffic())
        self._link = sockets.MessageSocket(there)
        self._link.trust()
        self.got: dict[int, Assembly] = {}
        self.kinds: dict[int, list[tuple[sockets.MessageKind, bytes]]] = {}
        self.sizes: dict[int, int] = {}
        self.inline = 0

    def _let_go(self, place: int, size: int) -> None:
        self.freed.append(place)

    def step(self, free: bool = True) -> None:
        """The other end takes what has come, and maybe frees it."""
        for message in self._link.receive():
            assembly = self.got.setdefault(message.call, Assembly(self.sizes[message.call]))
            data = message.data
            if message.size and data is None:
                assert self._mirror is not None
                data = memoryview(bytes(self._mirror.read(message.place, message.size)))
            elif message.size >= sockets.SMALL:
                self.inline += 1
            if data is not None:
                assembly.add(message.offset, (data,))
            self.kinds.setdefault(message.call, []).append((message.kind, message.header))
        self.channel.flush()
        while free and self.freed:
            self.channel.freed(self.freed.pop())

    def until_whole(self, calls: int) -> None:
        """Takes all of some calls."""
        for _ in range(100_000):
            self.step()
            if len(self.got) == calls and all(one.payload.whole for one in self.got.values()):
                return
        raise AssertionError("it does not arrive")


def arrays(sizes: list[int]) -> list[Array]:
    return [np.full(size, number % 251, np.uint8) for number, size in enumerate(sizes, 1)]


def check(payload: Payload, sizes: list[int]) -> None:
    """A payload has all that was sent."""
    assert samples.plain(payload) == samples.plain(Payload.pack(arrays(sizes)))


SIZES = st.lists(st.one_of(st.integers(0, 3000), st.integers(sockets.SMALL - 1, 200_000)), max_size=6)
MEMORY = st.sampled_from([(0, False), (1 << 19, True), (1 << 19, False), (1 << 22, True), (1 << 22, False)])


@search(1.2)
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=4), MEMORY, st.data())
def test_payloads_arrive_whole(
    calls: list[tuple[list[int], bool]], memory: tuple[int, bool], data: st.DataObject
) -> None:
    """Several at once, in the socket or through memory that may be too small, whether data wait for room or not.
    Answers are sent while they are made, however they grow; the last message of each comes once, after all its
    parts."""
    waits = memory[1] and not any(grows for _, grows in calls)
    with Wire(memory[0], waits) as wire:
        growing = []
        for call, (sizes, grows) in enumerate(calls):
            packed = Payload.pack(arrays(sizes))
            wire.sizes[call] = packed.size
            if grows:
                answer = Payload((), packed.size)
                wire.channel.send(sockets.MessageKind.PART, call, b"first", answer, ends=True)
                growing.append((call, answer, list(packed.chunks)))
            else:
                wire.channel.send(sockets.MessageKind.PUSH, call, b"first", packed)
        while growing:
            index = data.draw(st.integers(0, len(growing) - 1))
            call, answer, chunks = growing[index]
            if chunks:
                answer.add(*chunks.pop(0))
            else:
                wire.channel.end(sockets.MessageKind.ANSWER, call, b"ends %d" % call)
                del growing[index]
            if data.draw(st.booleans()):
                wire.step()
        wire.until_whole(len(calls))
        for call, (sizes, grows) in enumerate(calls):
            while grows and wire.kinds[call][-1] != (sockets.MessageKind.ANSWER, b"ends %d" % call):
                wire.step()
            first, parts = sockets.MessageKind.PUSH, wire.kinds[call]
            if grows:
                first, parts = sockets.MessageKind.PART, parts[:-1]
            assert parts[:1] == [(first, b"first")] * (not grows or bool(wire.sizes[call]))
            assert set(parts[1:]) <= {(sockets.MessageKind.PART, b"")}
            check(wire.got[call].payload, sizes)
        if waits:
            assert not wire.inline, "what waits for room does not go in the socket"
        if wire.ring is not None and not any(grows for _, grows in calls):
            assert not wire.ring._entries
            assert not wire.channel._unread


def test_answers_that_grow_in_many_threads_arrive_once() -> None:
    """One payload, many receivers, all sent by whoever adds: nothing is lost, repeated, or out of order."""
    sizes = [40_000] * 40
    with Wire(0, False) as wire:
        packed = Payload.pack(arrays(sizes))
        answers = [Payload((), packed.size) for _ in range(4)]
        for call, answer in enumerate(answers):
            wire.sizes[call] = packed.size
            wire.channel.send(sockets.MessageKind.PART, call, b"", answer, ends=True)

        def grow(call: int) -> None:
            for chunk in packed.chunks:
                answers[call].add(*chunk)
            wire.channel.end(sockets.MessageKind.ANSWER, call, b"")

        with ThreadPoolExecutor(4) as pool:
            growing = [pool.submit(grow, call) for call in range(4)]
            while any((sockets.MessageKind.ANSWER, b"") not in wire.kinds.get(call, []) for call in range(4)):
                wire.step()
        assert [each.result() for each in growing] == [None] * 4
        for call in range(4):
            check(wire.got[call].payload, sizes)
            assert [kind for kind, _ in wire.kinds[call]].index(sockets.MessageKind.ANSWER) == len(wire.kinds[call]) - 1


def test_one_answer_to_many_is_written_once() -> None:
    """All are told of one place, which is free again when all have freed it; nobody keeps the arrays for that."""
    with Wire(1 << 22, False) as wire:
        packed = Payload.pack(arrays([100_000]))
        for call in range(3):
            wire.sizes[call] = packed.size
            wire.channel.send(sockets.MessageKind.ANSWER, call, b"", packed)
        assert wire.ring is not None
        assert len(wire.ring._entries) == 1
        held = packed.chunks[0][1].obj
        del packed
        assert sys.getrefcount(held) <= 4
        wire.until_whole(3)
        assert not wire.ring._entries


def test_who_is_gone_holds_nothing() -> None:
    """What it was told of is free, and it is told of nothing more, though an answer comes or grows."""
    with Wire(1 << 22, False) as wire:
        assert wire.ring is not None
        packed = Payload.pack(arrays([100_000, 100_000]))
        growing = Payload((), packed.size)
        wire.channel.send(sockets.MessageKind.PART, 0, b"", growing, ends=True)
        wire.channel.send(sockets.MessageKind.ANSWER, 1, b"", packed)
        assert wire.ring._entries
        wire.channel.close()
        assert not wire.ring._entries
        for chunk in packed.chunks:
            growing.add(*chunk)
        wire.channel.end(sockets.MessageKind.ANSWER, 0, b"")
        wire.channel.send(sockets.MessageKind.ANSWER, 2, b"", packed)
        assert not wire.ring._entries


def test_a_call_that_is_dropped_sends_no_more() -> None:
    """What waits for room goes, and others get it."""
    with Wire(1 << 19, True) as wire:
        large, small = Payload.pack(arrays([2_000_000])), Payload.pack(arrays([50_000]))
        wire.sizes = {0: large.size, 1: small.size}
        wire.channel.send(sockets.MessageKind.PUSH, 0, b"", large)
        wire.channel.send(sockets.MessageKind.PUSH, 1, b"", small)
        wire.channel.drop(0)
        while 1 not in wire.got or not wire.got[1].payload.whole:
            wire.step()
        wire.step()
        assert not wire.got[0].payload.whole
        assert wire.ring is not None
        assert not wire.ring._entries


def test_what_was_not_told_cannot_be_freed() -> None:
    """Nor more often than it was told, nor where there is no shared memory."""
    with Wire(1 << 22, False) as wire:
        with pytest.raises(InvalidRequest):
            wire.channel.freed(0)
        packed = Payload.pack(arrays([100_000]))
        wire.channel.send(sockets.MessageKind.ANSWER, 0, b"", packed)
        wire.channel.freed(0)
        with pytest.raises(InvalidRequest):
            wire.channel.freed(0)
        with Wire(0, False) as other, pytest.raises(InvalidRequest):
            other.channel.freed(0)


@pytest.mark.parametrize(("near", "bounded"), [("127.0.0.1", True), ("127.0.0.2", False)], ids=["one", "two"])
def test_what_is_in_flight_between_ends_of_one_address_is_bounded(near: str, bounded: bool) -> None:
    """It stays in the processor's caches; a connection to another address is as the system tunes it."""
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=(near, 0)) as sock,
    ):
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        sockets.tune(sock, 10.0, breaks=False)
        after = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert after == (2 * min(sockets.HOST_BYTES, most) if bounded else before)


def test_connections_on_which_nothing_comes_have_no_buffer() -> None:
    """Buffers go from one to the next; one of which half a message is there keeps its own."""
    messages = [sockets.Message(sockets.MessageKind.PULL, call, bytes((call,)) * 40) for call in (1, 2, 3)]
    with pair() as (one, first), pair() as (two, second):
        one.sendall(messages[0].head())
        assert [plain(message) for message in first.receive()] == [plain(messages[0])]
        assert not first._scratch
        one.sendall(messages[1].head()[:50])
        assert list(first.receive()) == []
        two.sendall(messages[2].head())
        assert [plain(message) for message in second.receive()] == [plain(messages[2])]
        assert not second._scratch
        one.sendall(messages[1].head()[50:])
        assert [plain(message) for message in first.receive()] == [plain(messages[1])]


def test_what_is_there_is_received_with_one_call() -> None:
    """The system gave less than there was room for: it is asked again when something has come since then."""

    class Asked:
        """A socket, and how often it was asked for what is there."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.times = sock, 0

        def recv_into(self, buffer: memoryview) -> int:
            self.times += 1
            return self.sock.recv_into(buffer)

    with pair() as (sock, link):
        asked = Asked(cast(socket.socket, link.sock))
        link.sock = cast(socket.socket, asked)
        for calls in ((1,), (2, 3), (4,)):
            messages = [sockets.Message(sockets.MessageKind.PULL, call, bytes((call,)) * 40) for call in calls]
            asked.times = 0
            sock.sendall(b"".join(message.head() for message in messages))
            assert [plain(message) for message in link.receive()] == [plain(message) for message in messages]
            assert asked.times == 1
        assert list(link.receive()) == []


def test_two_connections_have_never_one_buffer() -> None:
    """While messages are taken from one, what comes on the other goes elsewhere."""
    scratch.give_back(scratch.lend())
    with pair() as (one, first), pair() as (two, second):
        one.sendall(b"".join(sockets.Message(sockets.MessageKind.PULL, call).head() for call in (1, 2)))
        two.sendall(b"".join(sockets.Message(sockets.MessageKind.PUSH, call).head() for call in (3, 4)))
        ours, theirs = first.receive(), second.receive()
        taken = [next(ours), next(theirs)]
        assert first._scratch.obj is not second._scratch.obj
        assert [message.call for message in [*taken, *ours, *theirs]] == [1, 3, 2, 4]
    assert len(scratch._FREE) <= scratch.KEPT


# ---- Between hosts ----


@pytest.mark.parametrize(("address", "parts"), [("127.0.0.1", 3), ("127.0.0.2", STEPS - 1)])
def test_payloads_are_cut_finer_between_hosts(address: str, parts: int) -> None:
    """Ends with one address are on one host, where more parts cost more than they save."""
    arrays = [np.zeros(sockets.MAX_PART_BYTES // 8, np.uint8)] * 16  # of two parts in all
    with (
        socket.create_server((address, 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0)) as here,
        listener.accept()[0] as there,
    ):
        assert sockets.crosses(here) == sockets.crosses(there) == (parts > 3)
        channel = sockets.PayloadSender(sockets.MessageSocket(here), None, False, lambda: None, Traffic())
        link, got = sockets.MessageSocket(there), 0
        link.trust()
        payload = Payload.pack(arrays)
        channel.send(sockets.MessageKind.PUSH, 1, b"", payload)
        size = 0
        while size < payload.size:
            channel.flush()
            for message in link.receive():
                got, size = got + 1, size + message.size
        assert got == parts


def test_nothing_crosses_where_the_other_end_is_gone() -> None:
    """Nor over a Unix socket: that is no reason to fail."""
    one, other = socket.socketpair()
    with one, other:
        assert not sockets.crosses(one)
    with socket.create_server(("127.0.0.2", 0)) as listener:
        assert not sockets.crosses(listener)
