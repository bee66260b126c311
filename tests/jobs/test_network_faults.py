"""Networks that lose, cut, repeat and delay, and connections that fall silent alone: every contribution counts once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

import psclient as ps
from pstesting import faults, forks
from pstesting.faults import Faults
from pstesting.processes import W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, say
from tests.kit import transports
from tests.kit.internals import Payload, Security
from tests.kit.rig import WORKERS
from tests.kit.transports import ON_ONE_TRANSPORT, SIZE, Proxy, Site, eventually


def hammer(rounds, rates, calls, changes):
    """Sums of integers, of whole variables, rows and keys, on a network that has faults, or, with a number of calls, on
    transports that break again and again.

    Says the steps whose sums are not exact. With changes each step has another consistency.
    """
    from tests.kit import transports

    network = Faults(7 + ME, rates)
    made = transports.fragile(ME, calls) if calls else faults.use(network)
    de, zeros = ps.dynamic_embedding, ps.initializers.Zeros()
    strategy = ps.ParameterServerStrategy(
        variable_partitioner=lambda shape, dtype: [3 if shape == (50, 3) else 1, *(1,) * (len(shape) - 1)]
    )
    with strategy.scope():
        small = ps.Variable(np.zeros(5), name="small")
        large = ps.Variable(np.zeros(200_000), name="large")
        optimizer = ps.optimizers.SGD(1.0)
        weights = ps.Variable(np.zeros(7), name="weights")
        shards = ps.Variable(np.zeros((50, 3)), name="shards")
        table = de.get_variable("table", dim=2, value_dtype="float64", initializer=zeros)
        rare = de.get_variable("rare", dim=2, initializer=zeros, admission=de.CounterFilter(6))
    kinds = ps.Sync(), ps.Async(), ps.Sync(nonfinite="skip"), ps.BoundedStaleness(1)
    wrong = []

    def train(step, value):
        def given(ids, width):
            return ps.IndexedSlices(np.full((len(ids), width), value), ids)

        shards.prefetch([7, 20, 40])
        table.prefetch([step, 1 << 62])
        seldom = ps.IndexedSlices(np.ones((1, 2), "float32"), [step // 2])
        pairs = [(np.full(7, value), weights), (given([40, 7, 20, 7], 3), shards), (given([-7, step, -7], 2), table)]
        optimizer.apply_gradients([*pairs, (seldom, rare)])

    for step in range(rounds):
        if changes:
            strategy.set_consistency(kinds[step % 4])
        value = (step + 1.0) * (ME + 1)
        strategy.run(lambda value=value: add_all([(small, np.full(5, value)), (large, np.full(200_000, value))]))
        strategy.run(train, (step, value))
        expected = 6.0 * sum(range(1, step + 2))
        twice = shards.lookup([7]).numpy() / 2, table.lookup([-7]).numpy() / 2
        trained = [-each for each in (weights.numpy(), shards.lookup([20, 40]).numpy(), *twice)]
        found = [small.numpy(), large.numpy(), *trained]
        if not (changes and step % 2) and not all((value == expected).all() for value in found):
            wrong.append([step, expected, [float(value.flat[0]) for value in found]])
    strategy.set_consistency(ps.Sync())
    say("wrong", wrong)
    say("sums", [float(small[0]), float(large.numpy().min()), float(-weights[0]), int(optimizer.iterations)])
    keys, rows = table.export()
    say("rows", [sorted(zip(keys.tolist(), -rows[:, 0], strict=True)), -shards.numpy()[:, 0], sorted(rare.keys())])
    say("faults", {"transports": made[0]} if calls else network.counts)


ALL = {"drop": 0.1, "cut": 0.05, "repeat": 0.05, "twice": 0.05, "late": 0.05, "lose": 0.1}


@pytest.mark.parametrize(
    ("transport", "rates"),
    [
        pytest.param("grpc", ALL, id="all of it"),
        pytest.param("shm", {"transports": 20}, id="breaking transports, shm", marks=pytest.mark.ci),
        pytest.param("tcp", {"transports": 20}, id="breaking transports, tcp", marks=pytest.mark.soak),
        pytest.param("grpc", ALL | {"changes": True}, id="all of it, amid changes", marks=pytest.mark.ci),
        pytest.param("grpc", {fault: 2 * rate for fault, rate in ALL.items()}, id="twice", marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("compiled_rounds")
def test_the_variable_is_the_exact_sum(tmp_path, transport, rates):
    """2 rounds a step, 2 servers, 3 workers, integers: the exact sum after each round, whatever the network does.

    Every row has the exact sum too, and every key has come as often as it did.
    """
    rounds, counts, rates = 14, [], dict(rates)
    changes, calls = rates.pop("changes", False), rates.get("transports", 0)
    args = (rounds, {} if calls else rates, calls, changes)
    total = 6.0 * sum(range(1, rounds + 1))
    of_shards = total * np.bincount([7, 7, 20, 40], minlength=50)
    of_keys = [[-7, 2 * total], *([step, 6.0 * (step + 1)] for step in range(rounds))]
    with ProcessCluster(hammer, tmp_path, args, ps=2, workers=3, transport=transport) as job:
        for task in (W0, W1, W2):
            assert job.hear(task, "wrong") == []
            *sums, steps = job.hear(task, "sums")
            assert sums == [total] * 3
            assert job.hear(task, "rows") == [of_keys, of_shards.tolist(), [*range(rounds // 2)]]
            assert changes or steps == rounds
            counts.append(job.hear(task, "faults"))
        job.finish()
    assert all(sum(count[fault] for count in counts) for fault in rates), counts
    assert not calls or min(count["transports"] for count in counts) > 6, "hardly a transport broke"


LEASE = 0.6
"""Seconds: short, so that what waits for one does not wait long."""

TASKS = ("ps-0", "worker-0", "worker-1", "chief-0")
UP, DOWN, BOTH = ("up",), ("down",), ("up", "down")
LARGE = {"elements": SIZE // 4, "variables": 40, "in_flight": 4 << 20}
"""A push of which the server takes in as much as it wants for now."""


class Place(Site):
    """Two members, one of whose connections may become silent.

    Args:
        stack: ends all of it.
        how: `tcp` and `tls` lose packets in the system, `relay` (tcp) and `shm` in what is between.
        certificates: for `tls`.
    """

    def __init__(self, stack, how, certificates=None, elements=64, in_flight=64 << 20, **more):
        self.proxy, shown = None, (Security(), Security())
        transport = "shm" if how == "shm" else "tcp"
        if how == "tls":
            shown = certificates.of("ps-0"), certificates.signed([f"{task}.paramserver" for task in TASKS], -1, 1)

        def between(transports):
            transports.in_flight = in_flight
            if how in ("relay", "shm"):
                self.proxy = Proxy(stack, transports, transport)

        super().__init__(stack, transport, elements=elements, between=between, shown=shown, lease=LEASE, **more)
        self.here, self.other = self.workers
        self.first_transport = self.transport(self.here)
        (self.connection,) = self.open([self.here.session])

    def silence(self, ways):
        """Nothing arrives any more on the first member's transport, up or down."""
        if self.proxy is not None:
            self.proxy.stop(0, *ways)
            return
        if "up" in ways:
            transports.drop(self.connection.sock)
        if "down" in ways:
            transports.drop(self.first_transport._sock)

    def is_paused(self):
        """Whether the server has taken in as much of a push as it wants for now."""
        if self.first_transport.name == "shm":
            return any(stream.part for stream in self.first_transport._channel._streams)
        return self.connection._paused

    def complete(self, first):
        """The other member pushes, and each contribution of the round counts once."""
        with self.beating():
            self.whole([1, 2], first, self.push(self.other, 2))

    def waits_on(self, first):
        """For leases a push is not answered; its transport stays, and so does its session: then the round goes on."""
        with self.beating():
            assert not wait([first], 3 * LEASE).done
        self.is_whole()

    def is_whole(self):
        """The first transport is the one that is used."""
        assert self.transport(self.here) is self.first_transport
        assert self.first_transport._why is None


# ---- Connections that are silent ----


@pytest.mark.ci
@pytest.mark.parametrize(
    ("when", "how", "ways"),
    [
        ("before a push", "tcp", UP),
        ("before a push", "tcp", BOTH),
        ("before a push", "tls", DOWN),
        ("before a push", "relay", UP),
        ("before a push", "shm", BOTH),
        ("while an answer is awaited", "tcp", BOTH),
        ("while an answer is awaited", "shm", DOWN),
        ("in the middle of a push", "tcp", BOTH),
        ("in the middle of a push", "relay", UP),
        ("in the middle of a push", "shm", UP),
    ],
)
def test_what_is_sent_on_a_silent_connection_is_sent_again(stack, certificates, when, how, ways):
    """A push, or an answer, on a connection whose packets vanish, one way or both, goes by the same transport anew.

    It counts once, also where the server never gets the rest of it, and an answer is asked for before the round is
    over. The server keeps nothing of the old connection, whose end it cannot be told; what comes late there is known.
    """
    site = Place(stack, how, certificates, **(LARGE if "middle" in when else {}))
    if when == "before a push":
        site.round()
        site.silence(ways)
    first = site.push(site.here, 1)
    if when == "while an answer is awaited":
        site.job.arrived(site.here)
    if when == "in the middle of a push":
        eventually(site.is_paused)
    if when != "before a push":
        site.silence(ways)
    if when != "in the middle of a push":  # there the server reads on when the other one has pushed
        with site.beating():
            eventually(lambda: site.transport(site.here) is not site.first_transport)
    site.complete(first)
    assert site.first_transport._why is not None
    assert site.transport(site.here).name == site.first_transport.name
    (new,) = site.open([site.here.session])
    assert new is not site.connection
    if when == "before a push":
        if site.proxy is not None:
            site.proxy.go_on()
        site.round()


def test_what_arrives_late_counts_once(stack):
    """The rest of a push arrives on the old connection after it was sent again on another, within the round."""
    site = Place(stack, "relay", elements=SIZE // 4, variables=8)
    site.silence(DOWN)
    first = site.push(site.here, 1)
    with site.beating():
        eventually(lambda: site.transport(site.here) is not site.first_transport)
    site.proxy.go_on()
    site.complete(first)
    site.round()


# ---- What is no silence ----


@pytest.mark.parametrize("size", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_a_round_that_waits_for_others_breaks_no_transport(stack, name, size):
    """For leases nobody says anything, or the server reads no more of a push: the connection stays."""
    site = Place(stack, name, **size)
    first = site.push(site.here, 1)
    site.waits_on(first)
    site.complete(first)


@ON_ONE_TRANSPORT
def test_a_push_that_has_not_begun_breaks_no_transport(stack, name):
    """Of values that a device still computes nothing has left: the server knows nothing of the push, and is silent."""
    site = Place(stack, name)
    whole = site.payload(1)
    late = Payload((), whole.size)
    first = site.server.push(site.said(site.here), late)
    site.waits_on(first)
    for offset, buffer in whole.chunks:
        late.add(offset, buffer)
    site.complete(first)


class Elsewhere(Site):
    """The same, with the server in a process of its own."""

    def __init__(self, stack, transport):
        self.lease = LEASE
        command = [sys.executable, "-m", "psserver", "--port", "0"]
        self.process = stack.enter_context(forks.Forked[str](command, stdout=subprocess.PIPE, text=True))
        stack.callback(self.process.kill)
        address = self.process.stdout.readline().partition("listening on ")[2].split()[0]
        self.begin(stack, address, transport, Security(), 2, 64, 1)


@ON_ONE_TRANSPORT
def test_a_server_that_stands_still_breaks_no_transport(stack, name):
    """It answers no heartbeat either: it is waited for, and the round goes on by the same connection."""
    site = Elsewhere(stack, name)
    here, other = site.workers
    transport = site.transport(here)
    first = site.push(here, 1)
    site.job.arrived(here)
    site.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as heartbeats:
        heartbeat = heartbeats.submit(site.server.heartbeat, here.session, -1, b"")
        time.sleep(3 * LEASE)
        site.process.send_signal(signal.SIGCONT)
        heartbeat.result(20.0)
    with site.beating():
        site.whole([1, 2], first, site.push(other, 2))
    assert site.transport(here) is transport
    assert transport._why is None


# ---- gRPC's own connection ----


def test_a_silent_connection_of_grpc_costs_no_session(stack):
    """Another one is made, and a heartbeat arrives on it, before the lease has ended."""
    lease = 2.0
    site = Site(stack, "grpc", elements=64, lease=lease, clock=time.monotonic)
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    assert len([transports.drop(sock) for sock in transports.connections(site.thread.port)]) >= 2
    with site.beating():
        deadline = time.monotonic() + 2 * lease
        while time.monotonic() < deadline:
            site.core.tick()
            time.sleep(lease / 20)
        assert {session.state for session in site.core.status().sessions if session.member.task in WORKERS} == {"open"}
        site.whole([1, 2], first, site.push(other, 2))
