"""Transports for tests: one server with a job on it, a client's end by hand, and networks that break where a test
says."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import gc
import os
import random
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from psserver.network.transport_server import TransportServer
from pstesting.clock import Clock
from tests.kit import internals as inside
from tests.kit.internals import HEAD, INLINE, Message, MessageKind, RemoteServer, Security, Stream, TransportName
from tests.kit.rig import SOON, WORKERS, Job, Servers, Worker, core, eventually, payload, sum_into, together

SIZE = inside.PART_BYTES // 4
"""Elements of float32 of which a part holds as many."""

SMALL = 64
"""Elements of variables whose rounds are one part."""

ON_ONE_TRANSPORT = pytest.mark.parametrize("name", ["shm", pytest.param("tcp", marks=pytest.mark.soak)])
"""For what is alike on both transports that are no gRPC: `make soak` shows that it is."""


class Between:
    """Takes the place of a transport in what its server offers, and connects each client to the server.

    Args:
        stack: ends it, and gives the server its place back.
        transports: the server's transports; they have `port` and `path`.
        name: "tcp" or "shm".
    """

    def __init__(self, stack: ExitStack, transports: Any, name: str) -> None:
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._to: Any = ("127.0.0.1", transports.port) if name == "tcp" else transports.path
        self._family = socket.AF_INET if name == "tcp" else socket.AF_UNIX
        self._listener = socket.socket(self._family)
        if name == "tcp":
            self._listener.bind(("127.0.0.1", 0))
            transports.port = self._listener.getsockname()[1]
        else:
            path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/between"
            self._listener.bind(path)
            stack.callback(setattr, transports, "path", transports.path)  # which the server removes at its end
            transports.path = path
        self._listener.listen()
        stack.callback(self.close)
        self.start(self._accept)

    def connected(self, near: socket.socket, far: socket.socket) -> None:
        """Begins to hand on what comes; called by one thread for each connection: the client's end, the server's."""
        raise NotImplementedError

    def start(self, run: Callable[[], object]) -> None:
        """Runs something in a thread that ends with the connections."""
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def cut(self) -> None:
        """Breaks all connections now."""
        for sock in list(self._open):
            shut(sock)

    def close(self) -> None:
        """Breaks all, and takes no more."""
        shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(self._family)
            far.connect(self._to)
            self._open += [near, far]
            self.connected(near, far)


def shut(sock: socket.socket) -> None:
    """Ends a connection, so that whoever waits for it wakes up."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class Site:
    """A server, and members of a job on it that make rounds together.

    Args:
        stack: ends all of it.
        transport: the fastest transport of the members.
        workers: how many members.
        elements: of each variable, float32.
        variables: how many.
        between: called with the server's transports before anybody connects.
        shown: what the server shows and asks for, and what the members show.
        lease: of the members.
        grace: seconds that the server gives to answers under way at its end.
        more: said to the core.

    Attributes:
        transports: the server's.
        server: the members' connection.
        workers: the members.
        lease: of the members, in seconds.
        sums: what every element of the first variable is; of the n-th it is n times that.
    """

    lease = 4.0

    def __init__(
        self,
        stack: ExitStack,
        transport: TransportName,
        workers: int = 2,
        elements: int = SIZE,
        variables: int = 3,
        between: Callable[[TransportServer], object] = lambda transports: None,
        shown: tuple[Security, Security] = (Security(), Security()),
        lease: float = lease,
        grace: float = 0.0,
        **more: Any,
    ) -> None:
        self.lease = lease
        pool = stack.enter_context(ThreadPoolExecutor(1))
        self.core = core(0, submit=pool.submit, **more)
        stack.callback(self.core.close)
        config = inside.ServerConfig(self.core.task, security=shown[0], memory_limit=more.get("memory_limit", 0))
        self.thread = stack.enter_context(inside.ServerThread(self.core, config, grace=grace))
        self.transports: TransportServer = self.thread._server._transports
        between(self.transports)
        self.begin(stack, self.thread.address, transport, shown[1], workers, elements, variables)

    def begin(
        self,
        stack: ExitStack,
        address: str,
        transport: TransportName,
        security: Security,
        workers: int,
        elements: int,
        variables: int,
    ) -> None:
        """Begins the job on a server, which may be another process's."""
        self._stack, self._elements = stack, elements
        self._address, self._security = address, security
        self.server = self.connect(transport)
        incarnation: Any = SimpleNamespace(incarnation=self.server.status().incarnation)
        self.job = Job(Servers([self.server], [incarnation], Clock(), Path("nowhere"), True))
        self.workers = self.job.join(*WORKERS[:workers])
        values = [np.zeros(elements, "float32") for _ in range(variables)]
        self.variables = [self.job.variable(self.workers[0], value) for value in values]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.workers[0])
        self.sums = 0.0

    def connect(self, transport: TransportName, security: Security | None = None) -> RemoteServer:
        """One more connection."""
        timeouts = inside.Timeouts(session_timeout=self.lease, call_timeout=10.0, round_timeout=SOON)
        server = RemoteServer(
            self._address, inside.Task("ps", 0), timeouts, transport=transport, security=security or self._security
        )
        self._stack.callback(server.close)
        return server

    def said(self, worker: Worker) -> inside.Contribution:
        """What a member says in its round."""
        ids = tuple(variable.id for variable in self.variables)
        weights = (1.0,) * len(ids)
        return inside.Contribution(worker.session, worker.generation, worker.round, self.plan.id, weights, want=ids)

    def payload(self, number: float) -> inside.Payload:
        """A contribution: a number times 1, 2, 3 and so on."""
        values = [np.full(self._elements, place * number) for place in range(1, len(self.variables) + 1)]
        return payload(self.plan, 0, values, (1.0,) * len(values), ())

    def push(self, worker: Worker, number: float, server: RemoteServer | None = None) -> Future[inside.RoundReply]:
        """Contributes to the round."""
        return (server or self.server).push(self.said(worker), self.payload(number))

    def whole(self, numbers: Iterable[float], *answers: Future[inside.RoundReply]) -> None:
        """The round of these contributions is over: each counts once, and all answers say so."""
        self.sums += sum(numbers)
        specs = [variable.spec.tensor for variable in self.variables]
        for reply in together(*answers):
            for place, value in enumerate(reply.payload.tensors(specs), 1):
                assert (value == place * self.sums).all(), f"{value} is not {place} * {self.sums}"
        for worker in self.workers:
            worker.round += 1

    def round(self) -> None:
        """A round, in which each member contributes its number: everybody is served."""
        numbers = range(1, len(self.workers) + 1)
        self.whole(numbers, *[self.push(worker, n) for worker, n in zip(self.workers, numbers, strict=True)])

    def pulled(self, worker: Worker) -> np.ndarray[Any, Any]:
        """The first variable, read by a member."""
        return self.job.value(worker, self.variables[0])

    def transport(self, worker: Worker) -> Any:
        """The transport that a member uses; None for gRPC."""
        return self.server._transports[worker.session].transport

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """All members heartbeat meanwhile."""
        over = threading.Event()

        def heartbeat() -> None:
            while not over.wait(self.lease / 20):
                for worker in self.workers:
                    self.server.heartbeat(worker.session, -1, b"")

        thread = threading.Thread(target=heartbeat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def open(self, sessions: Iterable[int | None]) -> list[Any]:
        """The server's ends of these sessions' transports."""
        wanted = set(sessions)
        return [connection for connection in self.transports.connections[:] if connection.session in wanted]


class Hand:
    """A client's end of a transport, which does what the test says, and nothing by itself.

    Args:
        transports: the server's.
        name: "tcp" or "shm".
        introduce: whether it hands memory over, where the transport has such.

    Attributes:
        memory: what it has handed over; the server reads there.
        outbox: the file that it was given; the server writes there. -1 where it was given none.
    """

    def __init__(
        self, transports: TransportServer, name: str, introduce: bool = True, nbytes: int = inside.CLIENT_BYTES
    ) -> None:
        self.outbox = -1
        if name == "tcp":
            self.sock = socket.create_connection(("127.0.0.1", transports.port), SOON)
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SOON)
        eventually(lambda: self.sock.connect_ex(transports.path) != errno.EAGAIN)  # others may wait to be let in
        if introduce:
            segment, file = inside.Segment.make(nbytes)
            self.memory = segment.memory
            self.hand_over(file)

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *rest: object) -> None:
        self.sock.close()
        if self.outbox >= 0:
            os.close(self.outbox)

    def hand_over(self, *files: int) -> None:
        """Sends files with a byte, and closes them."""
        socket.send_fds(self.sock, [b"\0"], list(files))
        for file in files:
            os.close(file)

    def say(
        self,
        kind: int,
        call: int = 0,
        header: bytes = b"",
        offset: int = 0,
        size: int = 0,
        place: int = INLINE,
        data: bytes = b"",
    ) -> None:
        """Sends a message, which need not make sense."""
        head = HEAD.pack(kind, len(header), call, offset, size or len(data), place)
        self.sock.sendall(head + header + data)

    def hello(self, session: int, token: bytes, lease: float = 0.0) -> Hand:
        """Says who it is."""
        said = inside.pb.TransportHello(session=session, token=token, lease=lease)
        self.say(MessageKind.HELLO, header=said.SerializeToString())
        return self

    def welcomed(self, session: int, transports: TransportServer, lease: float = 0.0) -> Hand:
        """Says who it is, and is believed."""
        self.hello(session, transports.access.registry.transport_token(session), lease)
        assert self.hear().kind is MessageKind.WELCOME
        return self

    def push(self, site: Site, worker: Worker, number: float, call: int = 1) -> tuple[bytes, list[tuple[int, bytes]]]:
        """The header and the parts of a contribution; they are not sent."""
        sent = site.payload(number)
        header = inside.messages.contribution_to_pb(site.said(worker), sent.size).SerializeToString()
        return header, [(offset, b"".join(buffers)) for offset, buffers in inside.parts_of(sent)]

    def hear(self) -> Message:
        """The next message but those of memory that is free again; raises `ConnectionError` where there is none."""
        while (message := self.next()).kind is MessageKind.FREED:
            pass
        return message

    def freed(self) -> int:
        """The place of the next message that says that memory is free again."""
        while (message := self.next()).kind is not MessageKind.FREED:
            pass
        return message.place

    def next(self) -> Message:
        """The next message; raises `ConnectionError` where there is none."""
        if self.sock.family == socket.AF_UNIX and self.outbox < 0:
            byte, files, _, _ = socket.recv_fds(self.sock, 1, 1)
            if not byte:
                raise ConnectionResetError
            (self.outbox,) = files
        number, header_size, call, offset, size, place = HEAD.unpack(self._exactly(HEAD.size))
        header = self._exactly(header_size)
        data = memoryview(self._exactly(size)) if size and place == INLINE else None
        return Message(MessageKind(number), call, header, offset, size, place, data)

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.sock.recv(count - len(found))
            if not more:
                raise ConnectionResetError("the server has closed the connection")
            found += more
        return found

    def is_closed(self) -> bool:
        """Waits until the server has closed the connection; False where it says something first."""
        try:
            return not self.sock.recv(1)
        except ConnectionError:
            return True


# ---- A network that breaks ----


@dataclass(frozen=True)
class Cut:
    """Where a connection breaks.

    Attributes:
        up, down: after how many bytes from, or to, the client; None: that way it does not.
    """

    up: int | None = None
    down: int | None = None


class Proxy(Between):
    """A network that breaks.

    Args:
        stack, transports, name: as of `Between`.

    Attributes:
        cuts: of the connections that come, in order; those after them do not break.
        count: connections that came.
    """

    def __init__(self, stack: ExitStack, transports: TransportServer, name: str) -> None:
        self.cuts: deque[Cut] = deque()
        self.count = 0
        self._lock = threading.Lock()  # guards the flows
        self._flows: dict[str, list[threading.Event]] = {"up": [], "down": []}
        super().__init__(stack, transports, name)

    def cut(self) -> None:
        """Breaks all connections now."""
        super().cut()
        self.go_on()

    def stop(self, number: int, *ways: str) -> None:
        """Hands nothing more on, "up" or "down", of a connection, counted from 0: it stays open, and is silent."""
        with self._lock:
            for way in ways:
                self._flows[way][number].clear()

    def go_on(self) -> None:
        """Hands on what came meanwhile, and all that comes."""
        with self._lock:
            for flow in (*self._flows["up"], *self._flows["down"]):
                flow.set()

    def connected(self, near: socket.socket, far: socket.socket) -> None:
        """Hands on bytes, and descriptors, as far as the connection's cut says."""
        cut = self.cuts.popleft() if self.cuts else Cut()
        up, down = threading.Event(), threading.Event()
        up.set()
        down.set()
        with self._lock:
            self._flows["up"].append(up)
            self._flows["down"].append(down)
        self.count += 1
        self.start(partial(_pump, near, far, cut.up, up))
        self.start(partial(_pump, far, near, cut.down, down))


def _pump(source: socket.socket, sink: socket.socket, budget: int | None, flow: threading.Event) -> None:
    """Hands on what comes, descriptors too, until so many bytes have gone; nothing while it shall not flow."""
    left = 1 << 60 if budget is None else budget
    with contextlib.suppress(OSError):
        while left:
            data, ancillary, _, _ = source.recvmsg(min(1 << 16, left), socket.CMSG_SPACE(4))
            if not data:
                break
            files = array.array("i", b"".join(item for _, _, item in ancillary))
            left -= len(data)
            flow.wait()
            sent = sink.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if files else [])
            sink.sendall(data[sent:])
            for file in files:
                os.close(file)
    for sock in (source, sink):
        shut(sock)


# ---- In the processes of jobs ----


S = TypeVar("S", bound=socket.socket)


def _instead_of(sock: socket.socket, kind: type[S]) -> S:
    """The same connection as another kind of socket."""
    timeout = sock.gettimeout()
    found = kind(fileno=sock.detach())
    found.settimeout(timeout)
    return found


class _Fragile(socket.socket):
    """A socket that breaks after so many calls of the system, in the middle of what it sends."""

    life = 1 << 60

    def sendmsg(self, buffers: Any, *rest: Any) -> int:
        self._age()
        if self.life <= 0 and not rest:
            half = b"".join(buffers)
            with contextlib.suppress(OSError):
                return super().send(half[: len(half) // 2])
        return super().sendmsg(buffers, *rest)

    def recv_into(self, *args: Any) -> int:
        self._age()
        return super().recv_into(*args)

    def _age(self) -> None:
        self.life -= 1
        if self.life == 0:
            shut(self)


def connecting(change: Callable[[Any], Stream]) -> Callable[[], None]:
    """Has the transports that clients of this process open get other sockets; gives what ends that."""
    from psclient._src.network import transport

    connect = transport._connect
    transport._connect = lambda *args: change(connect(*args))

    def end() -> None:
        transport._connect = connect

    return end


def fragile(seed: int, calls: int) -> list[int]:
    """Has the transports of this process break again and again, after 10 to so many calls; gives where they are
    counted."""
    from psclient._src.network import transport_selector

    chosen = random.Random(seed)
    made = [0]

    def change(sock: socket.socket) -> socket.socket:
        made[0] += 1
        broken = _instead_of(sock, _Fragile)
        broken.life = chosen.randint(10, calls)
        return broken

    transport_selector.LOSSES = 1 << 30
    connecting(change)
    return made


class _Stalling(socket.socket):
    """A socket that stops in the middle of what it sends."""

    when: Callable[[], bool] = staticmethod(lambda: False)
    stop: Callable[[], object] = staticmethod(lambda: None)

    def sendmsg(self, buffers: Any, *rest: Any) -> int:
        buffers = list(buffers)
        # Words of memory that is free go ahead of a message.
        kind = next((each[0] for each in buffers if each[0] != MessageKind.FREED), None)
        if kind != MessageKind.PUSH or not self.when():
            return super().sendmsg(buffers, *rest)
        data = b"".join(buffers)
        sent = super().send(data[: max(len(data) // 2, 1)])
        self.stop()
        return sent


def stall(when: Callable[[], bool], stop: Callable[[], object]) -> None:
    """Has this process stop in the middle of a push on a transport.

    Args:
        when: whether this is the one.
        stop: called in the middle of it.
    """

    def change(sock: socket.socket) -> socket.socket:
        slow = _instead_of(sock, _Stalling)
        slow.when, slow.stop = when, stop  # type: ignore[method-assign]
        return slow

    connecting(change)


# ---- What is left ----


def files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def mappings(process: int | str = "self") -> int:
    """How many shared segments are mapped in a process."""
    maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
    return sum("memfd:paramserver" in line for line in maps.splitlines())


def threads() -> set[threading.Thread]:
    """Those of this process that receive on transports; strategies that several tests share have some, too."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("transport ")}


Held = tuple[int, int, set[threading.Thread]]
"""Files, segments, and threads of transports."""


def held() -> Held:
    """What this process has open."""
    return files(), mappings(), threads()


def gone(before: Held, spare: int = 0) -> bool:
    """Whether nothing is open that was not open before, but some files; what other tests opened may end meanwhile."""
    gc.collect()
    return files() <= before[0] + spare and mappings() <= before[1] and threads() <= before[2]


SECONDS = 10.0
"""Within which a thread ends whose connection is gone."""


_ATTACH_FILTER = 26
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""A filter of the kernel's: `return 0`."""


def drop(sock: Stream) -> None:
    """Drops whatever arrives for a TCP connection from now on, acknowledgements too; this end is told nothing."""
    program = struct.pack("HL", 1, ctypes.addressof(_NOTHING))
    _plain(sock).setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _plain(sock: Stream) -> socket.socket:
    return sock._sock if isinstance(sock, inside.Sealed) else sock


def connections(*ports: int) -> Iterator[socket.socket]:
    """Both ends of all connections with some ports, as far as this process has them."""
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and not _ports(sock).isdisjoint(ports):
                        yield sock


def _ports(sock: socket.socket) -> set[int]:
    return {sock.getsockname()[1], sock.getpeername()[1]}  # one that only listens has no other end
