"""A simulated server: the real core, on a host whose time its work takes."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future
from functools import partial
from math import ceil, inf
from typing import Any, NamedTuple

from psserver.config import ServerConfig
from psserver.core.core import Core
from psserver.effects import NOWHERE, Peer, settle
from psserver.plans.round import BRIEF_BYTES
from psserver.rounds.steps import Running
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.machines import Host, Strand, nothing, travel
from pstesting.simulation.scheduler import Scheduler, UnlockedFuture
from pswire.api import (
    Begun,
    Contribution,
    HeartbeatRequest,
    OpenRequest,
    ParameterServer,
    RoundReply,
    WatchRequest,
)
from pswire.cluster import Task
from pswire.errors import PSError, ServerGone, ServerLost, Unreachable
from pswire.limits import PART_BYTES
from pswire.network.parts import parts_of
from pswire.network.payload import Payload
from pswire.security.session_numbers import COUNT_BITS, TAG_BITS
from pswire.servers.requests import R, ServerRequest
from pswire.servers.votes import Testimony, Vote

RESET_SECONDS = 0.1
"""Until a client knows that nothing listens any more where a server was: it tries once more."""

ANSWER_SECONDS = 1.0
"""Until a client gives up a call to a server that has never answered it."""

SLICE_BYTES = 1 << 18
"""Bytes of a message of which the first are taken in while the others still come."""

MOST_SLICES = 8

SMALL = 200
"""Bytes of a message that has no arrays."""

SPARE_SESSIONS = 100
"""Sessions that a server takes beside those of workers."""


class Sliced(NamedTuple):
    """A message, or a piece of one, that is worked on while it travels.

    Attributes:
        nbytes: its size.
        slices: in how many slices.
        slice: bytes of each.
    """

    nbytes: float
    slices: int
    slice: float

    @classmethod
    def of(cls, nbytes: float) -> Sliced:
        """Returns how a message is sliced."""
        slices = min(ceil(nbytes / SLICE_BYTES), MOST_SLICES) or 1
        return cls(nbytes, slices, nbytes / slices)


NO_VALUES = Sliced.of(SMALL)
"""An answer to who wants none."""


class SimulatedServer:
    """A server.

    Args:
        scheduler: the simulation's.
        host: where it runs.
        index: its number.
        cluster: the cluster.
        life: how many processes had its place before.

    Attributes:
        core: the real one.
        loop: the thread of its event loop.
        arrays: its thread for array work.
        others: the newest process of each server of the job, by number; set once they are there.
        lines: the connections of clients.
        share: what of a round lies here.
        chunks: the pieces in which that travels, and is applied.
    """

    def __init__(self, scheduler: Scheduler, host: Host, index: int, cluster: Cluster, life: int = 0) -> None:
        self.scheduler, self.host, self.index = scheduler, host, index
        self.costs, self.transport = cluster.costs, cluster.transport_costs
        self.share = share = cluster.workload.on(index)
        self.chunks = 1 if cluster.local_reduction else share.chunks  # a sum is taken once it is whole
        self.pushed = Sliced.of(share.pushed / self.chunks)
        self.answered = Sliced.of(SMALL + share.answered / self.chunks)
        self.loop, self.arrays = Strand(host, self), Strand(host, self)
        self.others: MutableSequence[SimulatedServer] = []
        self.lines: list[Line] = []
        self._links: dict[int, SimulatedServer] = {}  # the processes at which it votes
        self._cut: set[int] = set()  # the servers that it does not reach
        self._pauses = 0
        self._paused = False
        self._streamed: dict[tuple[int, int], list[Line]] = {}  # whose piece of a round is here
        config = ServerConfig(
            Task("ps", index),
            timeouts=cluster.timeouts,
            domain=f"host {index}",
            checkpoint_root=cluster.root,
            max_sessions=cluster.workers + SPARE_SESSIONS,
        )
        incarnation = 1 + index + 1000 * life << TAG_BITS + COUNT_BITS  # the highest bits are in numbers of sessions
        self.core = Core(config, incarnation, lambda: scheduler.now, _refuse, self._files)
        self.core._arrays = self  # type: ignore[assignment]
        self.core.others = self
        self.core.done.add_done_callback(self._over)
        self._tick = cluster.timeouts.session_timeout / 8
        scheduler.after(self._tick, self._look_at_leases)

    @property
    def alive(self) -> bool:
        """True until it is killed."""
        return self.loop.alive

    def kill(self) -> None:
        """Ends its process: its connections are reset."""
        self.loop.stop()
        self.arrays.stop()
        for line in self.lines:
            self.scheduler.after(RESET_SECONDS, line.reset)
        for other in self.others:
            if other is not self:
                self.scheduler.after(RESET_SECONDS, other.miss, self, "nothing listens there any more")

    def _over(self, _: Future[None]) -> None:
        """Its process ends by itself, where the job goes on without it."""
        if self.core.machine.outlived is not None:
            self.scheduler.after(0.0, self.kill)

    @property
    def outlived(self) -> bool:
        """True once it was told that the job goes on without it."""
        return self.core.machine.outlived is not None

    def pause(self) -> None:
        """Its process stands still: it is silent, and not gone."""
        self._pauses, self._paused = self._pauses + 1, True
        for strand in (self.loop, self.arrays):
            strand.pause()
        for line in self.lines:
            line.grow_silent(partial(self._is_silent, self._pauses))

    def _is_silent(self, pause: int) -> bool:
        return self.alive and self._paused and self._pauses == pause

    def resume(self) -> None:
        """Its process goes on; its connections to servers that go on without it have ended, and are made anew."""
        self._paused = False
        for strand in (self.loop, self.arrays):
            strand.resume()
        for index in list(self._links):
            self.scheduler.after(self.transport.latency, self._introduce, index)

    def _look_at_leases(self) -> None:
        if self.alive:
            if not self._paused:
                self.core.tick()
            self.scheduler.after(self._tick, self._look_at_leases)

    # ---- Array work ----

    def run(self, piece: Callable[[], object], brief: bool) -> None:
        """Runs array work of the core, as its `ArrayQueue` does."""
        phase, seconds = self.core.machine.job.runner.phase, self.costs.call
        if isinstance(phase, Running):
            contributions = sum(part.within is None for part in phase.job.parts)
            brief = brief and contributions * self.share.pushed <= BRIEF_BYTES
            seconds = self._round_seconds(contributions)
            piece = partial(self._then_settle, piece)
        (self.loop if brief else self.arrays).do(seconds, piece)

    def _then_settle(self, piece: Callable[[], object]) -> None:
        piece()  # which lets answers leave
        self.loop.do(self.costs.settle, nothing)

    def _round_seconds(self, contributions: int) -> float:
        """The time of a round, but for the pieces that were applied before."""
        costs, share = self.costs, self.share
        rows = share.rows * contributions * costs.row + (costs.table if share.rows else 0.0)
        kernel = self._kernel_seconds(contributions, share.nbytes / self.chunks)
        return costs.round + share.variables * costs.round_variable + rows + kernel

    def _kernel_seconds(self, contributions: int, nbytes: float) -> float:
        return nbytes * (contributions * self.costs.kernel_byte + self.costs.apply_byte)

    # ---- Rounds that stream ----

    def streamed(self, line: Line, round: int, piece: int, members: int) -> None:
        """A piece of a contribution is here: with those of all others it is applied, and its values leave."""
        lines = self._streamed.setdefault((round, piece), [])
        lines.append(line)
        if len(lines) == members:
            del self._streamed[round, piece]
            seconds = self._kernel_seconds(members, self.share.nbytes / self.chunks)
            self.arrays.do(seconds, self._answer_piece, lines, self.share.answered / self.chunks)

    def _answer_piece(self, lines: Sequence[Line], nbytes: float) -> None:
        for line in lines:
            self.loop.do_part(self.transport.piece + nbytes * self.transport.answer_byte, line.take_piece, nbytes)

    def _files(self, piece: Callable[[], object]) -> None:
        self.arrays.do(self.costs.call, piece)

    # ---- Other servers ----

    def know(self, servers: Sequence[Peer]) -> None:
        """Takes which process is which server from now on: to a new one it connects at once."""
        for index, link in list(self._links.items()):
            other, peer = self.others[index], servers[index] if index < len(servers) else NOWHERE
            if peer.incarnation != link.core.incarnation:
                del self._links[index]
                if peer.incarnation == other.core.incarnation:
                    self._links[index] = other
                    self.scheduler.after(self.transport.latency, self._introduce, index)

    def _introduce(self, index: int) -> None:
        """Connects to another server, which may know that the job goes on without this one."""
        link = self._links.get(index)
        if link is None or not (link.alive and self.alive) or index in self._cut:
            return
        try:
            link.core.introduce(self.index, self.core.incarnation)
        except ServerGone as error:
            self.core.outlive(error)
        else:
            self.core.meet(index)

    def say(self, server: int, said: Vote | Testimony) -> None:
        """Says a vote to another server."""
        other = self._links.setdefault(server, self.others[server])
        if server not in self._cut:
            self.loop.do(self.costs.vote, self._send, other, other._hear, self, said)

    def cut(self, server: int) -> None:
        """Its messages do not reach another server from now on."""
        self._cut.add(server)
        self.scheduler.after(RESET_SECONDS, self.miss, self.others[server], "no answer")

    def mend(self, server: int) -> None:
        """It reaches another server again."""
        self._cut.discard(server)
        self.scheduler.after(self.transport.latency, self._introduce, server)

    def miss(self, other: SimulatedServer, why: str) -> None:
        """It finds that it does not reach another server."""
        if self.alive and self._links.get(other.index) is other and (other.index in self._cut or not other.alive):
            self.core.miss(other.index, f"at ps-{other.index}:2222: {why}")

    def _send(self, other: SimulatedServer, call: Callable[..., object], *args: Any) -> None:
        do, seconds = other.loop.do, other.costs.vote
        travel(self.scheduler, self.host, other.host, SMALL, self.transport.latency, do, seconds, call, *args)

    def _hear(self, sender: SimulatedServer, said: Vote | Testimony) -> None:
        try:
            self.core.hear(sender.index, said)
        except ServerGone as error:
            sender.core.outlive(error)


class Line(ParameterServer):
    """A client's connection to a server: every verb takes the time of its message, its work, and its answer.

    Args:
        server: the server.
        host: the client's.
        strand: the client's thread.
        decides: True for the chief's: it alone says that a server is lost, and all others wait for that.
        silence: seconds that the server may be silent; then it is lost.
    """

    def __init__(
        self, server: SimulatedServer, host: Host, strand: Strand, decides: bool, silence: float = inf
    ) -> None:
        self.task, self.address = server.core.task, f"ps-{server.index}:2222"
        self._host, self._strand, self._transport = host, strand, server.transport
        self._scheduler = server.scheduler
        self._decides, self._silence = decides, silence
        self._failure: PSError | None = None
        self._open: dict[Future[Any], None] = {}  # what waits for answers
        self._held: list[Future[Any]] = []  # calls that the server holds, and that end with the client
        self._find(server)

    def _find(self, server: SimulatedServer) -> None:
        self._server, self._expected = server, False
        server.lines.append(self)
        if server._paused:
            self.grow_silent(partial(server._is_silent, server._pauses))

    def expect(self) -> None:
        """The server has answered: it is lost once nothing listens there any more."""
        self._expected = True

    def elsewhere(self, address: str) -> Line:
        """Returns a connection to the newest process in the place of the server."""
        newest = self._server.others[self._server.index]
        return Line(newest, self._host, self._strand, self._decides, self._silence)

    def reset(self) -> None:
        """The server has ended: that is silence, for those who do not decide."""
        if self._failure is not None:
            return
        if self._decides:
            self.fail(self._lost())
        else:
            self.grow_silent(partial(self._is_gone, self._server))

    def _is_gone(self, server: SimulatedServer) -> bool:
        return server is self._server and not server.alive

    def end(self) -> None:
        """The client has ended: what the server holds for it ends as well."""
        self._server.loop.do(0.0, self._part)

    def _part(self) -> None:
        for made in self._held:
            if not made.done():
                made.cancel()

    def grow_silent(self, is_silent: Callable[[], bool]) -> None:
        """The server answers nothing any more; if that lasts, it is lost for this client."""
        if self._silence < inf:
            self._scheduler.after(self._silence, self._give_up, is_silent)

    def _give_up(self, is_silent: Callable[[], bool]) -> None:
        if is_silent() and self._failure is None:
            why = f"was lost: no answer at {self.address} for {self._silence:.3g} s (PS_SERVER_TIMEOUT)"
            self.fail(ServerLost(f"{why}; restart from a checkpoint", str(self.task)))

    def _lost(self) -> ServerLost:
        why = f"was lost (nothing listens there any more, at {self.address})"
        return ServerLost(f"{why}; restart from a checkpoint", str(self.task))

    def begin_anew(self, address: str = "") -> None:
        """Looks for another life of the server."""
        self._failure = None
        newest = self._server.others[self._server.index]
        if newest is not self._server:
            self._find(newest)
        self._expected = False

    @property
    def failed(self) -> bool:
        """True since `fail`, and until it begins anew."""
        return self._failure is not None

    def fail(self, error: PSError) -> None:
        """Makes all calls under way, and all that come, raise an error."""
        self._failure, waiting, self._open = error, [*self._open], {}
        for answer in waiting:
            settle(answer, None, error)

    def _asked(self) -> Future[Any]:
        """Returns what a call waits for; raises what the connection failed with."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, self._failure.task)
        answer: Future[Any] = UnlockedFuture()
        newest = self._server.others[self._server.index]
        if not self._server.alive and not self._expected and newest.alive:
            self._find(newest)
        if not self._server.alive and self._expected and self._decides:
            raise self._lost()
        if not self._server.alive and not self._expected:
            late = Unreachable(f"no answer at {self.address}", str(self.task))
            self._scheduler.after(ANSWER_SECONDS, settle, answer, None, late)
        self._open[answer] = None
        return answer

    def _answer(self, answer: Future[Any], made: Future[Any]) -> None:
        if answer in self._open and not made.cancelled():
            del self._open[answer]
            error = made.exception()
            settle(answer, None if error else made.result(), error)

    def call(self, request: ServerRequest[R]) -> R:
        """Makes a call, in a process that stands still meanwhile if the answer does not come late."""
        answer: Any = self._asked()
        costs = self._server.costs
        cost = costs.heartbeat if isinstance(request, HeartbeatRequest) else costs.call
        self._up(SMALL, cost, self._made, answer, request)
        if not request.waits:
            self._scheduler.wait([answer])
            answer = answer.result()
        found: R = answer
        return found

    def _up(self, nbytes: float, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """A message goes to the server, which works on it."""
        do, host = self._server.loop.do, self._server.host
        travel(self._scheduler, self._host, host, nbytes, self._transport.latency, do, seconds, call, *args)

    def _down(self, nbytes: float, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """An answer comes from the server; the client works on it."""
        do, host = self._strand.do, self._server.host
        travel(self._scheduler, host, self._host, nbytes, self._transport.latency, do, seconds, call, *args)

    def _down_part(self, nbytes: float, seconds: float) -> None:
        """As `_down`, for a part of an answer."""
        do, host = self._strand.do_part, self._server.host
        travel(self._scheduler, host, self._host, nbytes, self._transport.latency, do, seconds, nothing)

    def _made(self, answer: Future[Any], request: ServerRequest[Any]) -> None:
        made: Future[Any] = UnlockedFuture()
        try:
            result = self._server.core.call(request)
        except PSError as error:
            made.set_exception(error)
        else:
            if isinstance(result, Future):
                made = result
                if isinstance(request, WatchRequest):
                    self._held = [each for each in (*self._held, made) if not each.done()]
            else:
                self._expected = self._expected or isinstance(request, OpenRequest)
                made.set_result(result)
        made.add_done_callback(lambda made: self._down(SMALL, 0.0, self._answer, answer, made))

    def push(self, said: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """Pushes: the worker's time, then the link, then the server's time; and back."""
        answer: Future[RoundReply] = self._asked()
        pushed, transport, strand = self._server.pushed, self._transport, self._strand
        if said.first_values:
            strand.do(transport.send, self._leave, said, payload, float(payload.size), answer)
            return answer
        part, slice = pushed.nbytes, pushed.slice
        for piece in range(self._server.chunks - 1):
            strand.do_part(transport.piece + part * transport.send_byte, self._leave_piece, said.round, piece, part)
        for _ in range(pushed.slices - 1):
            strand.do_part(slice * transport.send_byte, self._leave_slice, slice)
        strand.do(transport.send + slice * transport.send_byte, self._leave, said, payload, SMALL + slice, answer)
        return answer

    def _leave_slice(self, nbytes: float) -> None:
        do, host, latency = self._server.loop.do_part, self._server.host, self._transport.latency
        travel(self._scheduler, self._host, host, nbytes, latency, do, nbytes * self._transport.receive_byte, nothing)

    def _leave_piece(self, round: int, piece: int, nbytes: float) -> None:
        seconds, generation = (
            self._transport.piece + nbytes * self._transport.receive_byte,
            self._server.core.machine.job.rounds.generation,
        )
        members = len(generation.members) if generation else 0
        self._up(nbytes, seconds, self._server.streamed, self, round, piece, members)

    def take_piece(self, nbytes: float) -> None:
        """A piece of an answer leaves the server."""
        self._down_part(nbytes, self._transport.piece + nbytes * self._transport.take_byte)

    def _leave(self, said: Contribution, payload: Payload, nbytes: float, answer: Future[RoundReply]) -> None:
        seconds = (
            self._transport.receive + nbytes * self._transport.receive_byte + len(said.parts) * self._server.costs.part
        )
        self._up(nbytes, seconds, self._arrive, said, payload, answer)

    def _arrive(self, said: Contribution, payload: Payload, answer: Future[RoundReply]) -> None:
        sliced = self._server.answered if said.want else NO_VALUES
        there = Payload([(at, memoryview(b"".join(of))) for at, of in parts_of(payload, PART_BYTES)], payload.size)
        try:
            made = self._server.core.push(said, there)
        except PSError as error:
            made = UnlockedFuture()
            made.set_exception(error)
        made.add_done_callback(partial(self._answer_all, sliced, answer))

    def _answer_all(self, sliced: Sliced, answer: Future[RoundReply], made: Future[RoundReply]) -> None:
        slice, transport, loop = sliced.slice, self._transport, self._server.loop
        for _ in range(sliced.slices - 1):
            loop.do_part(slice * transport.answer_byte, self._down_part, slice, slice * transport.take_byte)
        loop.do(transport.answer + slice * transport.answer_byte, self._return, slice, answer, made)

    def _return(self, nbytes: float, answer: Future[RoundReply], made: Future[RoundReply]) -> None:
        self._down(nbytes, self._transport.take + nbytes * self._transport.take_byte, self._answer, answer, made)

    def close(self) -> None:
        """Closes the connection."""


def _refuse(work: Callable[[], object]) -> None:
    """Array work of a simulated server goes to its strands."""
    raise RuntimeError("array work was not simulated")
