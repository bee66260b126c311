"""Transports that break while values travel on them, and contributions larger than what a server holds of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from psclient._src.network import transport_selector as client_transports
from psserver.execution.compiled import CompiledRound
from tests.kit.internals import HEAD, LEAST_IN_FLIGHT, PART_BYTES, TRANSPORTS, Apply, Reduction, Ref, TensorSpec
from tests.kit.rig import SOON, compiler_of, sum_into
from tests.kit.transports import Cut, Proxy, Site, eventually

HELLO = 1 + HEAD.size + 48
"""Bytes of a client's hello at most: who breaks off before has no transport that could break."""

WELCOME = {"tcp": HEAD.size, "shm": 1 + HEAD.size}
"""Bytes of a server's answer to it."""

IN_FLIGHT = 1 << 22

ON_BOTH = pytest.mark.parametrize("name", ["tcp", "shm"])


# ---- Connections that are cut ----


@pytest.fixture
def proxied(stack, monkeypatch):
    """Makes a site behind a proxy, whose members do not tire of opening transports."""
    monkeypatch.setattr(client_transports, "LOSSES", 1 << 30)

    def make(name, **more):
        proxies = []
        site = Site(stack, name, between=lambda transports: proxies.append(Proxy(stack, transports, name)), **more)
        return site, proxies[0]

    return make


@pytest.mark.ci
@ON_BOTH
@pytest.mark.parametrize("way", ["up", "down"])
def test_wherever_a_connection_breaks_each_contribution_counts_once(proxied, name, way):
    """In the middle of a push, or of its answer, of three parts: between bytes of heads, between messages, in parts."""
    site, proxy = proxied(name)
    heads = [*range(0, 4 * HEAD.size, 29), 2 * HEAD.size, 3 * HEAD.size]
    parts = [PART_BYTES // 2, PART_BYTES, PART_BYTES + 100, 2 * PART_BYTES, 3 * PART_BYTES - 1]
    first = HELLO if way == "up" else WELCOME[name]
    where = [first + place for place in sorted(heads + (parts if name == "tcp" else []))]
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
    assert all(site.transport(worker).name == name for worker in site.workers)
    for _ in range(5):
        proxy.cut()  # between rounds nobody sees it
        site.round()


@ON_BOTH
@pytest.mark.parametrize("way", ["up", "down"])
def test_wherever_a_connection_breaks_a_compiled_round_counts_once(proxied, monkeypatch, name, way):
    """Small rounds, which repeat: what is sent again is one more contribution to a round that runs as compiled."""
    ran, run = [], CompiledRound.run
    monkeypatch.setattr(CompiledRound, "run", lambda *args: ran.append(found := run(*args)) or found)
    site, proxy = proxied(name, elements=64)
    site.core.kernels.smallest = 0
    compiler = compiler_of(site.core)
    while not ran:
        site.round()
        compiler.wait()
        assert site.workers[0].round < 10, "no round is compiled, as most of a real job are"
    ran.clear()
    begun = site.workers[0].round
    first = HELLO if way == "up" else WELCOME[name]
    for at in range(first, first + 4 * HEAD.size, 29):
        proxy.cuts.append(Cut(at, None) if way == "up" else Cut(None, at))
        proxy.cut()
        while proxy.cuts:
            site.round()
        site.round()
    assert len(ran) == site.workers[0].round - begun
    assert None not in ran


@ON_BOTH
def test_a_push_that_has_changed_a_variable_is_sent_again(proxied, name):
    """The first part changes a variable before the connection breaks: it does so once, and the rest follows."""
    site, proxy = proxied(name)
    here, other = site.workers
    first = site.push(here, 1)
    site.job.arrived(here)
    size = PART_BYTES if name == "tcp" else 0
    # The part travels whole, and half of the head of the next one.
    proxy.cuts.append(Cut(HELLO + HEAD.size + 200 + size, None))
    site.transport(other)._sock.shutdown(2)
    site.whole([1, 10], first, site.push(other, 10))
    site.round()


# ---- Contributions that are larger than what a server holds of them ----


def limited(stack, transport, bytes=IN_FLIGHT, **more):
    """A site whose server holds so many bytes of what is on its way."""
    return Site(stack, transport, between=lambda transports: setattr(transports, "in_flight", bytes), **more)


def with_a_loss(plan):
    """A small value is reduced before all gradients, and read after them."""
    applies = tuple(
        Apply(apply.program, apply.servers, (apply.args[0], Ref("reduction", apply.args[1].index + 1)))
        for apply in plan.applies
    )
    loss = Reduction("mean", TensorSpec("float32", ()), (0,), "loss")
    return replace(plan, reductions=(loss, *plan.reductions), applies=applies, returned=(Ref("reduction", 0),))


ORDERS = {
    "in order": lambda plan: plan,
    "a loss first": with_a_loss,
    "backwards": lambda plan: replace(plan, applies=plan.applies[::-1]),
    "two passes": lambda plan: replace(plan, applies=plan.applies * 2),
    "most is never read": lambda plan: replace(plan, applies=plan.applies[:1]),
}


@pytest.mark.parametrize(
    ("order", "transport"),
    [
        *(("a loss first", transport) for transport in TRANSPORTS),  # it needs the most
        *(("in order", "tcp"), ("backwards", "shm"), ("two passes", "grpc"), ("most is never read", "tcp")),
    ],
)
def test_a_round_larger_than_what_is_in_flight_completes(stack, transport, order):
    """And so does the next one, on the same connections; sizes need not be multiples of anything."""
    elements = (1 << 18) - 3
    site = limited(stack, transport, elements=elements, variables=8)
    plan = site.job.approve(ORDERS[order](sum_into(*site.variables, returned=False)), site.workers[0])
    assert plan.streams
    values = [np.ones(reduction.tensor.shape, "float32") for reduction in plan.reductions]
    passes = 2 if order == "two passes" else 1
    for number in range(2):
        replies = [worker.push(plan, values) for worker in site.workers]
        for worker, reply in zip(site.workers, replies, strict=True):
            assert reply.result(SOON).round == worker.round == number
            worker.round += 1
    first = site.job.value(site.workers[0], site.variables[0])
    assert first.tolist() == [2.0 * passes * len(site.workers)] * elements


@pytest.mark.ci
def test_a_part_that_is_read_by_half_does_not_stop_what_comes_next(stack):
    """The least that may be in flight is less than a part, and an update may need what lies in two of them."""
    site = limited(stack, "shm", LEAST_IN_FLIGHT, elements=1 << 14, variables=160)
    summed = sum_into(*site.variables, returned=False)
    applies = [apply for at in range(1, 159, 2) for apply in (summed.applies[at + 1], summed.applies[at])]
    crosswise = replace(summed, applies=(summed.applies[0], *applies, summed.applies[159]))
    plan = site.job.approve(crosswise, site.workers[0])
    assert plan.streams
    values = [np.ones(reduction.tensor.shape, "float32") for reduction in plan.reductions]
    for reply in [worker.push(plan, values) for worker in site.workers]:
        assert reply.result(SOON).round == 0


def rests(value):
    """What a number is once it has been the same for a while."""
    seen = []

    def same():
        seen.append(value())
        return len(seen) > 100 and len(set(seen[-100:])) == 1

    eventually(same)
    return seen[-1]


@ON_BOTH
def test_a_push_that_is_sent_again_is_bounded_too(stack, name):
    """Its connection breaks when it has sent as much as it may: on the next one it sends no more than that."""
    site = limited(stack, name, elements=1 << 18, variables=12)
    here, other = site.workers
    second = site.push(other, 2)
    (waiting,) = eventually(lambda: [*site.core.machine.job.rounds.sequences[None].open.values()])
    payload = waiting.parts[other.session].payload
    held = rests(lambda: payload.end - payload.begin)
    assert 0 < held <= IN_FLIGHT + PART_BYTES
    lost = site.transport(other)
    lost._sock.shutdown(2)
    eventually(lambda: site.transport(other) is not lost)
    assert held <= rests(lambda: payload.end - payload.begin) <= 2 * IN_FLIGHT
    site.whole([1, 2], site.push(here, 1), second)
    site.round()
