"""Beats of a process that does nothing travel on its lane; wherever that cannot be, they travel over gRPC, in time.

What a lane's beat proves is what any call proves, that the process lives: all that a beat says otherwise is told over
gRPC, and so in order. A lane on which a call waits, a beat included, carries no other one: then beats on gRPC's
connection show whether the server, or the lane, is silent.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from psserver.transport import grpc_service
from psserver.transport.lane_connection import BACKLOG
from pswire.encoding.protocol import BEATS
from pswire.errors import Fenced, ServerLost
from pswire.model.status import Pace
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.sockets import Kind
from pswire.transport.traffic import LaneName
from tests.kit import lanes
from tests.kit.lanes import Hand, Site, eventually
from tests.kit.rig import SOON, WORKERS

LEASE = 0.8
"""Seconds."""


@pytest.fixture(params=["tcp", "shm"])
def name(request: pytest.FixtureRequest) -> LaneName:
    """A lane that is no gRPC."""
    return request.param  # type: ignore[no-any-return]


class Beats:
    """A member that beats, and the ways of its beats.

    Args:
        site: where it is.
        patch: counts them.
        worker: which one; the first.

    Attributes:
        calls: how many were calls of gRPC.
        renewed: how many the server took on lanes.
    """

    def __init__(self, site: Site, patch: pytest.MonkeyPatch, worker: int = 0) -> None:
        self.site, self.worker = site, site.workers[worker]
        self.calls = self.renewed = 0
        once, beat = site.server._calls.once, site.core.beat

        def count_call(name: str, data: bytes, seconds: float) -> bytes:
            self.calls += name == "Beat"
            return once(name, data, seconds)

        def count_renewed(session: int, *said: Any) -> bool:
            self.renewed += said[2] is None
            return beat(session, *said)

        patch.setattr(site.server._calls, "once", count_call)
        patch.setattr(site.core, "beat", count_renewed)

    def ways(self, *args: Any) -> tuple[int, int]:
        """Beats; returns how many calls of gRPC that took, and how many beats on lanes the server has taken."""
        before = self.calls, self.renewed
        self.site.server.beat(self.worker.session, *(args or (-1, b"")))
        return self.calls - before[0], self.renewed - before[1]


@pytest.fixture
def site(stack: ExitStack, name: LaneName) -> Site:
    """A server, and two members with lanes to it; a minute passes before a beat on a lane is late."""
    return Site(stack, name, elements=64, lease=8 * SOON)


@pytest.fixture
def beats(site: Site, monkeypatch: pytest.MonkeyPatch) -> Beats:
    """The first member's."""
    return Beats(site, monkeypatch)


CALL, LANE = (1, 0), (0, 1)


def test_a_process_that_does_nothing_beats_on_its_lane(beats: Beats) -> None:
    """Its first beat says over gRPC what it does; those after it are no calls, and each of them is a sign of life."""
    assert beats.ways() == CALL
    signs = beats.site.core.machine.tally.signs
    assert [beats.ways() for _ in range(3)] == [LANE] * 3
    assert beats.site.core.machine.tally.signs == signs + 3


def test_a_beat_on_a_lane_renews_the_lease(stack: ExitStack, name: LaneName, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever beats; who does not is lost."""
    now = [0.0]
    site = Site(stack, name, elements=64, lease=8 * SOON, clock=lambda: now[0])
    beats = Beats(site, monkeypatch)
    assert beats.ways() == CALL
    for _ in range(8):
        now[0] += 2.0
        assert beats.ways() == LANE
        site.core.tick()
    found = {session.member.task: session.state for session in site.core.status().sessions}
    assert (found[WORKERS[0]], found[WORKERS[1]]) == ("open", "lost")


@pytest.mark.parametrize(
    "news",
    [(-1, b"", Pace(steps=1)), (-1, b"", Pace(leaving=True)), (-1, b"", Pace(), 3)],
    ids=["a step", "it leaves", "a clock"],
)
def test_news_travel_over_grpc(beats: Beats, news: tuple[Any, ...]) -> None:
    """And the server knows them; what is the same once more needs no call."""
    assert [beats.ways(), beats.ways()] == [CALL, LANE]
    assert beats.ways(*news) == CALL
    pace = next(s.pace for s in beats.site.core.status().sessions if s.member.task == WORKERS[0])
    assert pace == news[2]
    assert beats.ways(*news) == (CALL if len(news) > 3 else LANE)
    assert beats.ways() == CALL


def test_who_waits_in_a_round_beats_over_grpc(beats: Beats) -> None:
    """A server compares rounds that processes wait in, whoever comes first: it has to be told in each beat, and once
    none is waited in any more."""
    assert [beats.ways(0, b"plan"), beats.ways(0, b"plan")] == [CALL, CALL]
    assert [beats.ways(), beats.ways()] == [CALL, LANE]


def test_while_a_call_waits_on_a_lane_beats_travel_over_grpc(beats: Beats) -> None:
    """They are to show that the server lives, though the lane is silent; after that they are on the lane again."""
    assert [beats.ways(), beats.ways()] == [CALL, LANE]
    here, other = beats.site.workers
    first = beats.site.push(here, 1)
    beats.site.job.arrived(here)
    assert [beats.ways(), beats.ways()] == [CALL, CALL]
    beats.site.whole([1, 2], first, beats.site.push(other, 2))
    assert beats.ways() == LANE


def test_a_server_of_the_version_before_is_called(
    stack: ExitStack, name: LaneName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would close a lane on which beats come: it says its number when the session opens."""
    monkeypatch.setattr(grpc_service, "spoken_with", lambda number: BEATS - 1)
    beats = Beats(Site(stack, name, elements=64, lease=8 * SOON), monkeypatch)
    assert [beats.ways(), beats.ways()] == [CALL, CALL]


def test_who_keeps_the_sessions_anew_is_told_everything(beats: Beats) -> None:
    """It has heard no beat of them: one on a lane is refused, and told over gRPC at once."""
    assert [beats.ways(), beats.ways()] == [CALL, LANE]
    record = beats.site.core.machine.members._sessions[beats.worker.session]
    record.described = False
    assert beats.ways() == (1, 1)
    assert beats.ways() == LANE


def test_a_session_that_has_ended_is_refused_on_its_lane(stack: ExitStack, site: Site, name: LaneName) -> None:
    """As in a call, with the same error; nobody's lease is renewed."""
    here = site.workers[0]
    site.server.beat(here.session, -1, b"")
    hand = stack.enter_context(Hand(site.lanes, name).welcomed(here.session, site.lanes))
    hand.say(Kind.BEAT, 1)
    answer = hand.hear()
    assert (answer.kind, answer.call, pb.BeatReply.FromString(answer.header)) == (Kind.ANSWER, 1, pb.BeatReply())
    site.job.verbs[0].leave(here.session, "it failed")
    hand.say(Kind.BEAT, 2)
    answer = hand.hear()
    refusal = pb.Refusal.FromString(answer.header)
    assert (answer.kind, answer.call, refusal.error) == (Kind.REFUSAL, 2, "Fenced")
    with pytest.raises(Fenced, match="this session was ended: it failed"):
        site.server.beat(here.session, -1, b"")


def test_a_server_that_ends_says_so(site: Site) -> None:
    """A beat on a lane is refused then; the call tells that the server is lost."""
    here = site.workers[0]
    for _ in range(2):
        site.server.beat(here.session, -1, b"")
    site.thread.stop()
    with pytest.raises(ServerLost):
        site.server.beat(here.session, -1, b"")


# ---- Lanes that are silent, or break ----


@pytest.mark.parametrize("ways", ["up", "down"])
def test_a_silent_lane_costs_no_lease(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, ways: str) -> None:
    """A beat that is lost there travels over gRPC within the lease, and so do those after it, until the lane is broken:
    by then beats were answered for a lease. The next call opens another, on which the beats are from then on."""
    site = Site(stack, "tcp", elements=64, lease=LEASE)
    beats = Beats(site, monkeypatch)
    assert beats.ways()[0] == 1
    lane = site.lane(beats.worker)
    (connection,) = site.open([beats.worker.session])
    lanes.drop(connection.sock if ways == "up" else lane._sock)
    assert beats.ways()[0] == 1
    assert lane.waits
    with site.beating():
        eventually(lambda: lane.lost)
        assert "nothing has come on it for" in lane._why
        site.round()
        assert site.lane(beats.worker) is not lane
        eventually(lambda: beats.ways() == LANE)


def test_a_lane_that_breaks_costs_no_lease(beats: Beats) -> None:
    """Its end is found at once: the beat is a call."""
    assert [beats.ways(), beats.ways()] == [CALL, LANE]
    (connection,) = beats.site.open([beats.worker.session])
    beats.site.thread._loop.call_soon_threadsafe(connection.close, "the test says so")
    eventually(lambda: beats.site.lane(beats.worker).lost)
    assert beats.ways() == CALL


def test_what_one_client_says_keeps_no_other_waiting(stack: ExitStack, site: Site, name: LaneName) -> None:
    """If a client beats and reads no answers, a server reads no more of it once it has so many answers to send."""
    here, other = site.workers
    site.server.beat(here.session, -1, b"")
    hand = stack.enter_context(Hand(site.lanes, name).welcomed(here.session, site.lanes))
    hand.sock.setblocking(False)
    connection = site.lanes.connections[-1]
    head = bytes((Kind.BEAT,)) + bytes(31) + b"\xff" * 8
    with pytest.raises(BlockingIOError):
        _flood(hand, 1000 * head)
    eventually(lambda: connection._paused)
    assert connection._link.waiting <= 2 * BACKLOG
    site.server.beat(other.session, -1, b"")
    assert site.server.beat(other.session, -1, b"") is False


def _flood(hand: Hand, said: bytes) -> None:
    for _ in range(2000):
        hand.sock.send(said)
