"""Lanes that break, and processes that die, while values travel on plain sockets and through shared memory."""

from __future__ import annotations

import dataclasses
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

import psclient as ps
from psclient._src.transport import lane_selector as client_lanes
from pstesting.processes import CALM, CHIEF, MARGIN, PS0, PS1, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit import lanes
from tests.kit.internals import HEAD, PART_BYTES, SERVER_LOST, LaneName
from tests.kit.lanes import ON_ONE_LANE, Cut, Proxy, Site, eventually, mappings
from tests.kit.rig import SOON, WORKERS

HELLO = 1 + HEAD.size + 48
"""Bytes of a client's hello at most: who breaks off before has no lane that could break."""

WELCOME = {"tcp": HEAD.size, "shm": 1 + HEAD.size}
"""Bytes of a server's answer to it."""


@pytest.fixture(params=["tcp", "shm"])
def name(request: pytest.FixtureRequest) -> LaneName:
    """The lane that breaks."""
    return request.param  # type: ignore[no-any-return]


# ---- Connections that are cut ----


def proxied(stack: ExitStack, name: LaneName, monkeypatch: pytest.MonkeyPatch) -> tuple[Site, Proxy]:
    """A site behind a proxy, whose members do not tire of opening lanes."""
    monkeypatch.setattr(client_lanes, "LOSSES", 1 << 30)
    proxies: list[Proxy] = []
    site = Site(stack, name, between=lambda lanes: proxies.append(Proxy(stack, lanes, name)))
    return site, proxies[0]


def places(name: LaneName, way: str) -> list[int]:
    """Where a push, or an answer, of three parts may break: between bytes of heads, between messages, within parts."""
    heads = [*range(0, 4 * HEAD.size, 13), 2 * HEAD.size, 3 * HEAD.size]
    parts = [PART_BYTES // 2, PART_BYTES, PART_BYTES + 100, 2 * PART_BYTES, 3 * PART_BYTES - 1]
    first = HELLO if way == "up" else WELCOME[name]
    return [first + place for place in sorted(heads + (parts if name == "tcp" else []))]


@pytest.mark.parametrize("way", ["up", "down"])
def test_wherever_a_connection_breaks_each_contribution_counts_once(
    stack: ExitStack, name: LaneName, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a push, or of its answer, at every place where that may be."""
    site, proxy = proxied(stack, name, monkeypatch)
    where = places(name, way)
    for at in where:
        proxy.cuts.append(Cut(at, None) if way == "up" else Cut(None, at))
    came = proxy.count
    proxy.cut()
    # Cuts that come after the end of one round's messages break the next round.
    rounds = 0
    while proxy.cuts:
        site.round()
        rounds += 1
        assert rounds < len(where)
    site.round()
    assert proxy.count >= came + len(where)
    assert all(site.lane(worker).name == name for worker in site.workers)


@ON_ONE_LANE
def test_connections_that_break_between_rounds(
    stack: ExitStack, name: LaneName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees it."""
    site, proxy = proxied(stack, name, monkeypatch)
    for _ in range(5):
        site.round()
        proxy.cut()
        site.round()


def test_a_push_that_has_changed_a_variable_is_sent_again(
    stack: ExitStack, name: LaneName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part changes a variable before the connection breaks: it does so once, and the rest follows."""
    site, proxy = proxied(stack, name, monkeypatch)
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    size = PART_BYTES if name == "tcp" else 0
    # The part travels whole, and half of the head of the next one.
    proxy.cuts.append(Cut(HELLO + HEAD.size + 200 + size, None))
    site.lane(other)._sock.shutdown(2)
    site.whole([1, 10], first, site.push(other, 10))
    site.round()


def test_a_member_that_goes_in_the_middle_of_its_push_is_left_out(stack: ExitStack, name: LaneName) -> None:
    """Others go on once its session has ended; of its memory nothing stays."""
    site = Site(stack, name, workers=3)
    *others, gone = site.workers
    answers = [site.push(worker, 1) for worker in others]
    guest = stack.enter_context(lanes.Hand(site.lanes, name)).welcomed(gone.session, site.lanes)
    before = mappings()
    header, parts = guest.push(site, gone, 100)
    if name == "shm":
        guest.memory[: len(parts[0][1])] = parts[0][1]
        guest.say(3, 1, header, size=len(parts[0][1]), place=0)
    else:
        guest.say(3, 1, header, data=parts[0][1])
    eventually(lambda: site.core.machine.store.value(site.variables[0].id)[0] == 102)
    guest.sock.close()
    site.job.close([worker.member for worker in others])
    for answer in answers:
        values = answer.result(SOON).payload.tensors([v.spec.tensor for v in site.variables])
        assert [float(value[0]) for value in values] == [102, 4, 6]
        assert answer.result().left_out == (WORKERS[2],)
    if name == "shm":
        # One of the hand's own, which the test holds, and one of the server's, which goes.
        eventually(lambda: mappings() == before - 1)


# ---- Jobs of processes ----


def hammer(rounds, calls):
    """Sums of integers on lanes that break again and again; says those that are not exact."""
    from tests.kit import lanes

    made = lanes.fragile(ME, calls)
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        small = ps.Variable(np.zeros(5), name="small")
        large = ps.Variable(np.zeros(400_000), name="large")
    wrong = []
    for step in range(rounds):
        value = (step + 1.0) * (ME + 1)
        strategy.run(lambda value=value: add_all([(small, np.full(5, value)), (large, np.full(400_000, value))]))
        expected = 6.0 * sum(range(1, step + 2))
        found = [small.numpy(), large.numpy()]
        if not all((value == expected).all() for value in found):
            wrong.append([step, expected, [float(value[0]) for value in found]])
    say("wrong", wrong)
    say("sums", [float(small[0]), float(large.numpy().min())])
    say("made", made[0])


@ON_ONE_LANE
def test_the_variable_is_the_exact_sum(tmp_path, name):
    """2 servers, 3 workers, integers: the exact sum after each round, however often lanes break."""
    with ProcessCluster(hammer, tmp_path, (25, 30), ps=2, workers=3, lane=name) as job:
        for task in (W0, W1, W2):
            assert job.hear(task, "wrong") == []
            assert job.hear(task, "sums") == [6.0 * 325] * 2
            assert job.hear(task, "made") > 6, "hardly a lane broke"
        job.finish()


def endure(rounds, stops, elements, stall):
    """Each contribution is a power of 100, so that the sums' digits count contributions by worker.

    Stops are (worker, round), each with a gate of its own.
    """
    from tests.kit import lanes

    if stall and stall[0] == ME:
        lanes.stall(
            lambda: strategy is not None and strategy._session.waits[0] == stall[1],
            lambda: (say("stalled"), gate("never")),
        )
    strategy = None
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(elements), name="v")
        u = ps.Variable(np.zeros(elements), name="u")
    while strategy.round < rounds:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"{ME} at {strategy.round}")
        mine = np.full(elements, 100.0**ME)
        strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
        found = v.numpy(), u.numpy()
        assert all((value == value[0]).all() for value in found)
        say("did", strategy.round - 1)
    say("sums", [float(v[0]), float(u[0])])


LEASE = QUICK.lease


def named(process: int) -> Path:
    """What a server has in the file system."""
    bound = {Path(one.laddr) for one in psutil.Process(process).net_connections("unix") if one.laddr}
    (path,) = [path for path in bound if "paramserver-" in path.name]
    return path.with_name(path.name.lstrip("."))  # the name that it has got once somebody listened there


def counts(*workers):
    """The sum of so many contributions of each worker."""
    return sum(count * 100.0**worker for worker, count in enumerate(workers))


@ON_ONE_LANE
def test_a_worker_killed_in_the_middle_of_a_push(tmp_path, name):
    """No half contribution is ever visible, the others go on within the lease, and its memory is gone."""
    keys = {"ps": 1, "workers": 3, "chief": "driver", "timeouts": QUICK, "gates": ["never", "0 at 7"], "lane": name}
    with ProcessCluster(endure, tmp_path, (8, [[0, 7]], 400_000, [1, 5]), **keys) as job:
        job.hear(W1, "stalled")
        server = job.cluster.processes[PS0].pid
        path = named(server)
        assert path.is_socket()
        mapped = mappings(server)
        assert mapped == (4 if name == "shm" else 0)
        job.kill(W1)
        began = time.monotonic()
        job.hear(W0, "did", 5)
        assert time.monotonic() - began < LEASE + MARGIN
        job.hear(W0, "at", 7)
        if name == "shm":
            job.until(lambda: mappings(server) == mapped - 1)
        job.open("0 at 7")
        for task in (W0, W2):
            first, second = job.hear(task, "sums")
            assert first in (counts(8, 5, 8), counts(8, 6, 8))
            assert second == counts(8, 5, 8)
            assert f"round 5 of server 0 is complete without {W1}" in job.errors(task)
            assert job.exited(task) == 0
    assert not path.exists()


@pytest.mark.soak
@ON_ONE_LANE
def test_a_stopped_worker(tmp_path, name):
    """Its lease ends, and the others go on; when it runs again it is told, and disturbs nobody."""
    keys = {"ps": 2, "workers": 2, "timeouts": QUICK, "gates": ["1 at 5", "0 at 9"], "lane": name}
    with ProcessCluster(endure, tmp_path, (12, [[1, 5], [0, 9]], 200_000, None), **keys) as job:
        job.hear(W1, "at", 5)
        job.kill(W1, signal.SIGSTOP)
        job.open("1 at 5")
        began = time.monotonic()
        job.hear(W0, "did", 5)
        assert time.monotonic() - began < LEASE + MARGIN
        job.kill(W1, signal.SIGCONT)
        assert job.exited(W1) == 1
        assert "this session was ended" in job.errors(W1)
        job.open("0 at 9")  # not before: with the last one the servers end, and would tell nobody
        assert job.hear(W0, "sums") == [counts(12, 5)] * 2
        assert job.exited(W0) == 0


PATIENCE = 10.0
"""Seconds that a silent server is waited for: a stopped one is, one that computes on a busy machine answers by then."""


@pytest.mark.soak
@ON_ONE_LANE
@pytest.mark.parametrize(
    ("number", "told", "timeouts", "after"),
    [
        pytest.param(signal.SIGKILL, "nothing listens there any more", CALM, 0.0, id="killed"),
        pytest.param(
            signal.SIGSTOP,
            "PS_TIMEOUT_SERVER",
            dataclasses.replace(CALM, lease=PATIENCE, server=PATIENCE),
            PATIENCE,
            id="stopped",
        ),
    ],
)
def test_a_server_that_is_lost(tmp_path, name, number, told, timeouts, after):
    """Every process knows which one, at once or after PS_TIMEOUT_SERVER; its files go with the next server."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "timeouts": timeouts, "gates": ["1 at 5"], "lane": name}
    with ProcessCluster(endure, tmp_path, (20, [[1, 5]], 200_000, None), **keys) as job:
        job.hear(W1, "at", 5)
        path, other = (named(job.cluster.processes[task].pid) for task in (PS1, PS0))
        assert path.is_socket()
        job.kill(PS1, number)
        began = time.monotonic()
        for task in (W0, CHIEF):  # one waits in a round, one for news
            text = job.hear_error(task, f"error: {PS1}: was lost")
            assert told in text
            assert "restart from a checkpoint" in text
            assert time.monotonic() - began < after + MARGIN
        job.open("1 at 5")
        for task in (W0, W1, CHIEF):
            assert job.exited(task) == SERVER_LOST
        job.kill(PS1)
        with ExitStack() as stack:
            Site(stack, "shm", elements=4)
            assert not path.exists()
    assert not other.exists()


def interrupted():
    """Waits in a round for a worker that does not come, until somebody presses Ctrl-C."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(400_000), name="v")
    if ME:
        say("away")
        gate("never")
    say("waits")
    strategy.run(lambda: add_all([(v, np.ones(400_000))]))


@ON_ONE_LANE
def test_control_c_while_a_push_waits(tmp_path, name):
    """The process ends at once, as one that waits for a call of gRPC."""
    with ProcessCluster(interrupted, tmp_path, gates=["never"], workers=2, lane=name) as job, job.server(PS0) as server:
        job.hear(W1, "away")
        job.hear(W0, "waits")
        job.until(lambda: any(W0 not in waiting.missing for waiting in server.status().waiting))
        began = time.monotonic()
        job.kill(W0, signal.SIGINT)
        assert job.exited(W0) != 0
        assert time.monotonic() - began < MARGIN
