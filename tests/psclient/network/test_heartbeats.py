"""Heartbeats: when they come, the ways that they take, and what a silence says.

Those of a process that does nothing travel on its transport; wherever that cannot be, they travel over gRPC, in time.
What a transport's heartbeat proves is what any call proves, that the process lives: all that a heartbeat says otherwise
is told over gRPC, in order. A transport on which a call waits, a heartbeat included, carries no other one: then
heartbeats on gRPC's connection show whether the server, or the transport, is silent.
"""

from __future__ import annotations

from typing import Any

import pytest

from psclient._src.network.lease import HEARTBEATS, until_heartbeat
from psclient._src.network.patience import Patience
from psclient._src.network.silence import Silence
from psclient._src.network.worker_clock import WorkerClock
from psserver.network.transport_connection import BACKLOG
from pstesting.clock import Clock
from pswire.api import RESTS, HeartbeatRequest
from pswire.errors import Fenced, ServerLost
from pswire.model.status import Pace
from pswire.network.sockets import MessageKind
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers.requests import ServerRequest
from tests.kit import transports
from tests.kit.rig import SOON, WORKERS
from tests.kit.strategies import refused
from tests.kit.transports import Hand, Site, eventually

LEASE = 0.8
"""Seconds."""


class Heartbeats:
    """A member that heartbeats: how many heartbeats were calls of gRPC, and how many the server took on transports."""

    def __init__(self, site: Site, patch: pytest.MonkeyPatch, worker: int = 0) -> None:
        self.site, self.worker = site, site.workers[worker]
        self.calls = self.renewed = 0
        once, call = site.server._calls.once, site.core.call

        def count_call(name: str, data: bytes, seconds: float) -> bytes:
            self.calls += name == "Heartbeat"
            return once(name, data, seconds)

        def count_renewed(request: ServerRequest[Any]) -> Any:
            self.renewed += isinstance(request, HeartbeatRequest) and request.pace is None
            return call(request)

        patch.setattr(site.server._calls, "once", count_call)
        patch.setattr(site.core, "call", count_renewed)

    def ways(self, *args: Any) -> tuple[int, int]:
        """Heartbeats; returns how many calls of gRPC that took, and how many heartbeats on transports the server has
        taken."""
        before = self.calls, self.renewed
        self.site.server.heartbeat(self.worker.session, *(args or (-1, b"")))
        return self.calls - before[0], self.renewed - before[1]


@pytest.fixture
def site(stack, name):
    """A server, and two members with transports to it; a minute passes before a heartbeat on a transport is late."""
    return Site(stack, name, elements=64, lease=8 * SOON)


@pytest.fixture
def heartbeats(site, monkeypatch):
    """The first member's."""
    return Heartbeats(site, monkeypatch)


CALL, TRANSPORT = (1, 0), (0, 1)


def test_a_heartbeat_on_a_transport_renews_the_lease(stack, name, monkeypatch):
    """For whoever heartbeats; who does not is lost."""
    now = [0.0]
    site = Site(stack, name, elements=64, lease=8 * SOON, clock=lambda: now[0])
    heartbeats = Heartbeats(site, monkeypatch)
    assert heartbeats.ways() == CALL
    for _ in range(8):
        now[0] += 2.0
        assert heartbeats.ways() == TRANSPORT
        site.core.tick()
    found = {session.member.task: session.state for session in site.core.status().sessions}
    assert (found[WORKERS[0]], found[WORKERS[1]]) == ("open", "lost")


NEWS = {"a step": (-1, b"", Pace(steps=1)), "it leaves": (-1, b"", Pace(leaving=True)), "a clock": (-1, b"", Pace(), 3)}


def test_what_says_something_travels_over_grpc(heartbeats):
    """All else is no call, and each of those heartbeats is a sign of life."""
    site, tally = heartbeats.site, heartbeats.site.core.machine.tally

    def quiet() -> None:
        """A process that does nothing heartbeats on its transport."""
        signs = tally.signs
        assert [heartbeats.ways() for _ in range(2)] == [TRANSPORT] * 2
        assert tally.signs == signs + 2

    assert heartbeats.ways() == CALL  # its first heartbeat says what it does
    quiet()
    for name, news in NEWS.items():
        assert heartbeats.ways(*news) == CALL, name
        pace = next(s.pace for s in site.core.status().sessions if s.member.task == WORKERS[0])
        assert pace == news[2]
        assert heartbeats.ways(*news) == (CALL if len(news) > 3 else TRANSPORT), name  # the same once more
        assert heartbeats.ways() == CALL
        quiet()

    # A server compares rounds that processes wait in, whoever comes first: it has to be told in each heartbeat.
    assert [heartbeats.ways(0, b"plan"), heartbeats.ways(0, b"plan"), heartbeats.ways()] == [CALL] * 3
    quiet()

    # While a call waits on the transport they are to show that the server lives, though the transport is silent.
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    assert [heartbeats.ways(), heartbeats.ways()] == [CALL, CALL]
    site.whole([1, 2], first, site.push(other, 2))
    quiet()

    # A server that keeps the sessions anew has heard no heartbeat: one on a transport is refused, and told at once.
    site.core.machine.members._sessions[heartbeats.worker.session].described = False
    assert heartbeats.ways() == (1, 1)
    quiet()

    # The end of a transport is found at once.
    (connection,) = site.open([heartbeats.worker.session])
    site.thread._loop.call_soon_threadsafe(connection.close, "the test says so")
    eventually(lambda: site.transport(heartbeats.worker).lost)
    assert heartbeats.ways() == CALL


def test_a_session_that_has_ended_is_refused_on_its_transport(stack, site, name):
    """As in a call, with the same error; nobody's lease is renewed."""
    here = site.workers[0]
    site.server.heartbeat(here.session, -1, b"")
    hand = stack.enter_context(Hand(site.transports, name).welcomed(here.session, site.transports))
    hand.say(MessageKind.HEARTBEAT, 1)
    answer = hand.hear()
    assert (answer.kind, answer.call) == (MessageKind.ANSWER, 1)
    assert pb.HeartbeatReply.FromString(answer.header) == pb.HeartbeatReply()
    site.job.verbs[0].leave(here.session, "it failed")
    hand.say(MessageKind.HEARTBEAT, 2)
    answer = hand.hear()
    refusal = pb.Refusal.FromString(answer.header)
    assert (answer.kind, answer.call, refusal.error) == (MessageKind.REFUSAL, 2, "Fenced")
    with pytest.raises(Fenced, match="this process was removed from the job, because it failed"):
        site.server.heartbeat(here.session, -1, b"")


def test_a_server_that_ends_says_so(site):
    """A heartbeat on a transport is refused then; the call tells that the server is lost."""
    here = site.workers[0]
    for _ in range(2):
        site.server.heartbeat(here.session, -1, b"")
    site.thread.stop()
    refused(ServerLost, "", lambda: site.server.heartbeat(here.session, -1, b""))


@pytest.mark.parametrize("ways", ["up", "down"])
def test_a_silent_transport_costs_no_lease(stack, monkeypatch, ways):
    """A heartbeat that is lost there travels over gRPC within the lease, and so do those after it, until the transport
    is broken: by then heartbeats were answered for a lease. The next call opens another, on which the heartbeats are
    from then on."""
    site = Site(stack, "tcp", elements=64, lease=LEASE)
    heartbeats = Heartbeats(site, monkeypatch)
    assert heartbeats.ways()[0] == 1
    transport = site.transport(heartbeats.worker)
    (connection,) = site.open([heartbeats.worker.session])
    transports.drop(connection.sock if ways == "up" else transport._sock)
    assert heartbeats.ways()[0] == 1
    assert transport.waits
    with site.beating():
        eventually(lambda: transport.lost)
        assert "nothing was received on it for" in transport._why
        site.round()
        assert site.transport(heartbeats.worker) is not transport
        eventually(lambda: heartbeats.ways() == TRANSPORT)


def test_what_one_client_says_keeps_no_other_waiting(stack, site, name):
    """If a client heartbeats and reads no answers, a server reads no more of it once it has so many answers to send."""
    here, other = site.workers
    site.server.heartbeat(here.session, -1, b"")
    hand = stack.enter_context(Hand(site.transports, name).welcomed(here.session, site.transports))
    hand.sock.setblocking(False)
    connection = site.transports.connections[-1]
    head = bytes((MessageKind.HEARTBEAT,)) + bytes(31) + b"\xff" * 8
    refused(BlockingIOError, "", lambda: _flood(hand, 1000 * head))
    eventually(lambda: connection._paused)
    assert connection._link.waiting <= 2 * BACKLOG
    site.server.heartbeat(other.session, -1, b"")
    assert site.server.heartbeat(other.session, -1, b"") is False


def _flood(hand: Hand, said: bytes) -> None:
    for _ in range(2000):
        hand.sock.send(said)


PAUSE = 2.0


def test_sessions_heartbeat_together_at_a_few_times_of_a_pause():
    """Those of one time together, whenever they began; the times are spread over a pause. One that was woken a little
    early does not heartbeat twice."""
    for early in (1e-6, 1e-3, PAUSE / HEARTBEATS):
        assert until_heartbeat(PAUSE, 3, 3 / HEARTBEATS * PAUSE - early) == pytest.approx(PAUSE + early)
    for tenth in range(200):
        assert 0 < until_heartbeat(PAUSE, 3, tenth / 10) <= PAUSE * (1 + 1 / HEARTBEATS) + 1e-9
    times = {
        round(now + until_heartbeat(PAUSE, 5 + HEARTBEATS * k, now), 6) % PAUSE
        for k in range(9)
        for now in (7.3, 100.0, 1e9)
    }
    assert times == {5 / HEARTBEATS * PAUSE}
    times = sorted((1e9 + until_heartbeat(PAUSE, number, 1e9)) % PAUSE for number in range(HEARTBEATS))
    assert times == pytest.approx([PAUSE * number / HEARTBEATS for number in range(HEARTBEATS)])


TRANSPORT_LEASE = 8.0
"""Seconds."""


def silent(silence: Silence, *times: float, waiting: bool = True) -> list[str]:
    """What is said when heartbeats are answered at these times."""
    return [silence.heartbeat(waiting, now) for now in times]


def test_a_transport_is_broken_once_heartbeats_were_answered_for_a_lease():
    """Since the first, or since something came; not while no call is under way, when nothing is to be said. A pause of
    heartbeats counts for half a lease: the server may have stood still, or this process."""
    for gap in (5.0, 100.0):
        silence = Silence(TRANSPORT_LEASE)
        assert not any(silent(silence, 0, gap, gap + 1, gap + 3))
        assert silent(silence, gap + 4) != [""]
    *before, last = silent(Silence(TRANSPORT_LEASE), 0, 2, 4, 6, 8)
    assert before == [""] * 4
    assert last == "nothing was received on it for 8 s"
    silence = Silence(TRANSPORT_LEASE)
    silent(silence, 0, 2, 4, 6)
    silence.heard = True
    assert not any(silent(silence, 8, 10, 12, 14, 16))
    assert silent(silence, 18) != [""]
    silence = Silence(TRANSPORT_LEASE)
    assert not any(silent(silence, *range(100), waiting=False))
    assert not any(silent(silence, 100, 102, 104, 106))


def words(silence: Silence, received: int, sent: int, *times: float, paused: bool = False) -> str:
    """What is said at a heartbeat after words that came at these times."""
    for now in times:
        silence.heard = True
        silence.word(received, paused, sent, now)
    return silence.heartbeat(True, times[-1])


def test_a_transport_is_broken_once_the_server_receives_nothing_for_a_lease():
    """Though its words come; not what it does not want for now, has received, or gets of a slow network. Words count
    that say something of now: not of a call that is over, nor those that come together after a standstill."""
    silence = Silence(TRANSPORT_LEASE)
    assert words(silence, 10, 20, 0, 2, 4, 6) == ""
    assert words(silence, 10, 30, 8) == "the server has not read from it for 8 s"
    silence = Silence(TRANSPORT_LEASE)
    assert words(silence, 10, 20, *range(100), paused=True) == ""
    assert words(silence, 10, 20, 100, 102, 104, 106) == ""
    assert words(silence, 10, 20, 108) != ""
    silence = Silence(TRANSPORT_LEASE)
    assert words(silence, 20, 20, *range(100)) == ""
    assert words(silence, 20, 30, 100, 102, 104, 106) == ""
    assert words(silence, 20, 30, 108) != ""
    silence = Silence(TRANSPORT_LEASE)
    for count in range(20):
        assert words(silence, count, 1000, 6 * count, 6 * count + 3) == ""
    silence = Silence(TRANSPORT_LEASE)
    assert words(silence, 10, 20, 0, 2, 4, 6) == ""
    silence.word(10, False, 20, 8)
    assert silent(silence, 9, waiting=False) == [""]
    assert silent(silence, 10) == [""]
    silence = Silence(TRANSPORT_LEASE)
    assert words(silence, 10, 20, 0, 100, 100, 100, 100, 100) == ""
    assert words(silence, 20, 20, 101) == ""


PATIENT, HEARTBEAT = 4.0, 1.0


class Patient:
    """A patience with a clock, and servers whose heartbeats are answered."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.patience = Patience(PATIENT, HEARTBEAT, self.clock)

    def after(self, seconds: float, *servers: int) -> float:
        """How long any has stood still when these answer so much later."""
        self.clock.now += seconds
        for server in servers:
            self.patience.heard(server)
        return self.patience.stood()


def test_a_silence_and_the_lease_after_it_do_not_count():
    """Of whichever server; two at a time are one, one after another add; answered heartbeats take no time. Of two waits
    up to one deadline the second has the silence of the first; one from before does not count."""
    both = Patient()
    assert [both.after(HEARTBEAT + PATIENT / 4, 0) for _ in range(10)] == [0.0] * 10
    both = Patient()
    assert both.after(0.0, 0, 1) == 0.0
    assert both.after(10.0) == both.after(0.0, 0, 1) == both.after(HEARTBEAT) == 10.0 + PATIENT
    assert both.after(0.0, 1) == 10.0 + PATIENT
    assert both.after(3.0) == 10.0 + PATIENT + 4.0
    both = Patient()
    for server in (0, 1):
        before = both.after(100.0, 1 - server, server)
        assert both.after(10.0, server) - before >= 10.0
    one = Patient()
    one.after(0.0, 0)
    one.after(100.0, 0)
    for _ in range(5):
        one.after(HEARTBEAT, 0)
    deadline = one.patience.deadline(20.0)
    assert deadline.left() == 20.0
    one.after(10.0, 0)
    assert deadline.left() == 20.0 + PATIENT
    for _ in range(20):
        one.after(HEARTBEAT, 0)
    assert deadline.left() == PATIENT


def test_a_worker_is_at_rest_some_heartbeats_after_its_pass():
    """Not before its first one, nor at once behind another; whoever goes on says so first."""
    clock = WorkerClock(1)
    clock.passed(0, 7)
    assert [clock.say(0, True) for _ in range(4)] == [7] * 4
    clock.end()
    assert [clock.say(0, True) for _ in range(3)] == [7, RESTS, RESTS]
    assert clock.begin()
