"""Connections whose packets vanish while all others work: what waits there goes another way, and no session ends.

What only looks like that, a server that stands still, reads nothing or waits for others, breaks no connection.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import CONFIG, ME, add_all, say
from tests.kit import lanes
from tests.kit.certificates import Certificates
from tests.kit.internals import LaneName, Payload, Security
from tests.kit.lanes import ON_ONE_LANE, SIZE, Proxy, Site, eventually
from tests.kit.rig import WORKERS

LEASE = 0.6
"""Seconds: short, so that what waits for one does not wait long."""

TASKS = ("ps-0", "worker-0", "worker-1", "chief-0")
UP, DOWN, BOTH = ("up",), ("down",), ("up", "down")


@pytest.fixture(params=["tcp", "shm"])
def name(request: pytest.FixtureRequest) -> LaneName:
    """A lane that is no gRPC."""
    return request.param  # type: ignore[no-any-return]


@dataclass
class Place:
    """Two members, one of whose connections may become silent.

    Attributes:
        site: where they are.
        proxy: what is between them and the server; None where the system itself drops packets.
    """

    site: Site
    proxy: Proxy | None

    def silence(self, *ways: str) -> Any:
        """Nothing arrives any more on the first member's lane, up or down; returns the lane."""
        here = self.site.workers[0]
        lane = self.site.lane(here)
        if self.proxy is not None:
            self.proxy.stop(0, *ways)
            return lane
        if "up" in ways:
            (connection,) = self.site.open([here.session])
            lanes.drop(connection.sock)
        if "down" in ways:
            lanes.drop(lane._sock)
        return lane


def place(stack: ExitStack, certificates: Certificates, how: str, **more: Any) -> Place:
    """Members on a lane: `tcp` and `tls` lose packets in the system, `relay` (tcp) and `shm` in what is between."""
    lane: LaneName = "shm" if how == "shm" else "tcp"
    proxies: list[Proxy] = []
    shown = (Security(), Security())
    if how == "tls":
        shown = certificates.of("ps-0"), certificates.signed([f"{task}.paramserver" for task in TASKS], -1, 1)
    limit = more.pop("in_flight", 64 << 20)

    def between(lanes: Any) -> None:
        lanes.in_flight = limit
        if how in ("relay", "shm"):
            proxies.append(Proxy(stack, lanes, lane))

    site = Site(stack, lane, between=between, shown=shown, lease=LEASE, **more)
    return Place(site, proxies[0] if proxies else None)


def cases(*quick: tuple[str, tuple[str, ...]], ways: tuple[tuple[str, ...], ...]) -> list[Any]:
    """How and in which direction: those named in `make test`, the others in `make soak`."""
    every = [(how, way) for how in ("tcp", "tls", "relay", "shm") for way in ways]
    return [
        pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}", marks=[] if case in quick else pytest.mark.soak)
        for case in every
    ]


# ---- Connections that are silent ----


@pytest.mark.parametrize(
    ("how", "ways"),
    cases(("tcp", UP), ("tcp", BOTH), ("tls", DOWN), ("relay", UP), ("shm", BOTH), ways=(UP, DOWN, BOTH)),
)
def test_what_is_sent_on_a_silent_connection_is_sent_again(
    stack: ExitStack, certificates: Certificates, how: str, ways: tuple[str, ...]
) -> None:
    """A push on a connection whose packets vanish, one way or both, goes by the same lane anew, and counts once."""
    at = place(stack, certificates, how, elements=64)
    site = at.site
    here, other = site.workers
    site.round()
    silent = at.silence(*ways)
    first = site.push(here, 1)
    with site.beating():
        eventually(lambda: site.lane(here) is not silent)
        site.whole([1, 2], first, site.push(other, 2))
    assert site.lane(here).name == silent.name
    if at.proxy is not None:
        at.proxy.go_on()  # what comes late is known
    site.round()


@pytest.mark.parametrize(("how", "ways"), cases(("tcp", BOTH), ("shm", DOWN), ways=(DOWN, BOTH)))
def test_who_waits_on_a_silent_connection_is_answered(
    stack: ExitStack, certificates: Certificates, how: str, ways: tuple[str, ...]
) -> None:
    """A push that has arrived, whose answer cannot: it is asked for again, before the round is over."""
    at = place(stack, certificates, how, elements=64)
    site = at.site
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    silent = at.silence(*ways)
    with site.beating():
        eventually(lambda: site.lane(here) is not silent)
        site.whole([1, 2], first, site.push(other, 2))


@pytest.mark.parametrize(("how", "ways"), cases(("tcp", BOTH), ("relay", UP), ("shm", UP), ways=(UP, DOWN, BOTH)))
def test_a_connection_that_becomes_silent_in_the_middle_of_a_push(
    stack: ExitStack, certificates: Certificates, how: str, ways: tuple[str, ...]
) -> None:
    """The server has taken in as much as it wants for now, and never gets the rest: all of it is sent again."""
    at = place(stack, certificates, how, elements=SIZE // 4, variables=40, in_flight=4 << 20)
    site = at.site
    here, other = site.workers
    first = site.push(here, 1)
    silent = site.lane(here)
    if how == "shm":
        eventually(lambda: any(stream.part for stream in silent._channel._streams))
    else:
        (connection,) = site.open([here.session])
        eventually(lambda: connection._paused)
    at.silence(*ways)
    with site.beating():
        site.whole([1, 2], first, site.push(other, 2))
    assert silent._why is not None
    assert site.lane(here).name == silent.name


def test_what_arrives_late_counts_once(stack: ExitStack, certificates: Certificates) -> None:
    """The rest of a push arrives on the old connection after it was sent again on another, within the round."""
    at = place(stack, certificates, "relay", elements=SIZE // 4, variables=8)
    site = at.site
    here, other = site.workers
    silent = at.silence("down")
    first = site.push(here, 1)
    with site.beating():
        eventually(lambda: site.lane(here) is not silent)
        assert at.proxy is not None
        at.proxy.go_on()
        site.whole([1, 2], first, site.push(other, 2))
    site.round()


def test_the_lane_that_is_opened_anew_ends_the_silent_one(stack: ExitStack, certificates: Certificates) -> None:
    """The server keeps nothing of a connection whose end it cannot be told."""
    at = place(stack, certificates, "shm", elements=64)
    site = at.site
    here, other = site.workers
    (old,) = site.open([here.session])
    silent = at.silence("up", "down")
    first = site.push(here, 1)
    with site.beating():
        eventually(lambda: site.lane(here) is not silent)
        site.whole([1, 2], first, site.push(other, 2))
    (new,) = site.open([here.session])
    assert new is not old


# ---- What is no silence ----


@pytest.mark.parametrize("large", [pytest.param(False, id="small"), pytest.param(True, id="large")])
def test_a_round_that_waits_for_others_breaks_no_lane(
    stack: ExitStack, certificates: Certificates, name: LaneName, large: bool
) -> None:
    """For leases nobody says anything, or the server reads no more of a push: the connection stays."""
    size = {"elements": SIZE // 4, "variables": 40, "in_flight": 4 << 20} if large else {"elements": 64}
    site = place(stack, certificates, "shm" if name == "shm" else "tcp", **size).site
    here, other = site.workers
    lane = site.lane(here)
    first = site.push(here, 1)
    with site.beating():
        assert not wait([first], 3 * LEASE).done
        assert site.lane(here) is lane
        assert lane._why is None
        site.whole([1, 2], first, site.push(other, 2))


@ON_ONE_LANE
def test_a_push_that_has_not_begun_breaks_no_lane(stack: ExitStack, certificates: Certificates, name: LaneName) -> None:
    """Of values that a device still computes nothing has left: the server knows nothing of the push, and is silent."""
    site = place(stack, certificates, name, elements=64).site
    here, other = site.workers
    lane = site.lane(here)
    whole = site.payload(1)
    late = Payload((), whole.size)
    first = site.server.push(site.said(here), late)
    with site.beating():
        assert not wait([first], 3 * LEASE).done
        assert site.lane(here) is lane
        assert lane._why is None
        for offset, buffer in whole.chunks:
            late.add(offset, buffer)
        site.whole([1, 2], first, site.push(other, 2))


class Elsewhere(Site):
    """The same, with the server in a process of its own."""

    def __init__(self, stack: ExitStack, lane: LaneName) -> None:
        self.lease = LEASE
        command = [sys.executable, "-m", "psserver", "--port", "0"]
        self.process = stack.enter_context(forks.Forked[str](command, stdout=subprocess.PIPE, text=True))
        stack.callback(self.process.kill)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().partition("listening on ")[2].split()[0]
        self.begin(stack, address, lane, Security(), 2, 64, 1)


@ON_ONE_LANE
def test_a_server_that_stands_still_breaks_no_lane(stack: ExitStack, name: LaneName) -> None:
    """It answers no beat either: it is waited for, and the round goes on by the same connection."""
    site = Elsewhere(stack, name)
    here, other = site.workers
    lane = site.lane(here)
    first = site.push(here, 1)
    site.job.arrived(here)
    site.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as beats:
        beat = beats.submit(site.server.beat, here.session, -1, b"")
        time.sleep(3 * LEASE)
        site.process.send_signal(signal.SIGCONT)
        beat.result(20.0)
    with site.beating():
        site.whole([1, 2], first, site.push(other, 2))
    assert site.lane(here) is lane
    assert lane._why is None


@pytest.mark.soak
def test_a_network_that_is_cut_as_a_whole_breaks_no_lane(stack: ExitStack, certificates: Certificates) -> None:
    """As long as no beat is answered either; when it is there again the round goes on."""
    at = place(stack, certificates, "tcp", elements=64)
    site = at.site
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    (connection,) = site.open([here.session])
    lane = at.silence("up", "down")
    # The system asks for signs of life after a second, and then every second.
    assert not wait([first], 4.0).done
    assert lane._why is None
    for sock in (lane._sock, connection.sock):
        lanes.take_again(sock)
    with site.beating():
        site.whole([1, 2], first, site.push(other, 2))


# ---- gRPC's own connection ----


def test_a_silent_connection_of_grpc_costs_no_session(stack: ExitStack) -> None:
    """Another one is made, and a beat arrives on it, before the lease has ended."""
    lease = 2.0
    site = Site(stack, "grpc", elements=64, lease=lease, clock=time.monotonic)
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    assert len([lanes.drop(sock) for sock in lanes.connections(site.thread.port)]) >= 2
    with site.beating():
        deadline = time.monotonic() + 2 * lease
        while time.monotonic() < deadline:
            site.core.tick()
            time.sleep(lease / 20)
        assert {session.state for session in site.core.status().sessions if session.member.task in WORKERS} == {"open"}
        site.whole([1, 2], first, site.push(other, 2))


# ---- Jobs of processes ----


def lose(rounds, when):
    """Sums of integers; on the way the first worker loses what arrives on its connections."""
    from tests.kit import lanes

    lanes = lanes.losing()

    def grpc():
        ports = [int(CONFIG.cluster.address(task).rpartition(":")[2]) for task in CONFIG.cluster.tasks("ps")]
        for sock in lanes.connections(*ports):
            lanes.drop(sock)

    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        small = ps.Variable(np.zeros(5), name="small")
        large = ps.Variable(np.zeros(400_000), name="large")
    for step in range(rounds):
        if ME == 0 and step in when:
            {"lanes": lanes, "grpc": grpc}[when[step]]()
        value = (step + 1.0) * (ME + 1)
        strategy.run(lambda value=value: add_all([(small, np.full(5, value)), (large, np.full(400_000, value))]))
        expected = 3.0 * sum(range(1, step + 2))
        assert all((found == expected).all() for found in (small.numpy(), large.numpy()))
    say("sums", [float(small[0]), float(large.numpy().min())])


@pytest.mark.parametrize(
    ("lane", "what"),
    [
        ("tcp", "lanes"),
        pytest.param("shm", "lanes", marks=pytest.mark.soak),
        pytest.param("grpc", "grpc", marks=pytest.mark.soak),
        pytest.param("tcp", "grpc", marks=pytest.mark.soak),
    ],
)
def test_a_job_goes_on_when_connections_become_silent(tmp_path: Path, lane: str, what: str) -> None:
    """All of a worker's, with both servers, in the middle of the job: the sums are exact, and all end with 0."""
    with ProcessCluster(lose, tmp_path, (12, {3: what, 8: what}), ps=2, workers=2, timeouts=QUICK, lane=lane) as job:
        for task in (W0, W1):
            assert job.hear(task, "sums") == [3.0 * 78] * 2
        if what == "lanes":
            assert f"the {lane} lane to {PS0} is broken: nothing has come on it for" in job.errors(W0)
        job.finish()
