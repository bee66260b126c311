"""Transports that break while values travel on them, and contributions larger than what a server holds of them."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from psclient._src.network import transport_selector as client_transports
from pstesting.processes import MARGIN, PS0, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from tests.kit import transports
from tests.kit.internals import HEAD, LEAST_IN_FLIGHT, PART_BYTES, TRANSPORTS, Apply, Reduction, Ref, TensorSpec
from tests.kit.rig import SOON, WORKERS, sum_into
from tests.kit.transports import ON_ONE_TRANSPORT, Cut, Proxy, Site, eventually, mappings

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

    def make(name):
        proxies = []
        site = Site(stack, name, between=lambda transports: proxies.append(Proxy(stack, transports, name)))
        return site, proxies[0]

    return make


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


@ON_BOTH
def test_a_member_that_goes_in_the_middle_of_its_push_is_excluded(stack, name):
    """Others go on once its session has ended; of its memory nothing stays."""
    site = Site(stack, name, workers=3)
    *others, gone = site.workers
    answers = [site.push(worker, 1) for worker in others]
    guest = stack.enter_context(transports.Hand(site.transports, name)).welcomed(gone.session, site.transports)
    before = mappings()
    header, parts = guest.push(site, gone, 100)
    if name == "shm":
        guest.memory[: len(parts[0][1])] = parts[0][1]
        guest.say(3, 1, header, size=len(parts[0][1]), place=0)
    else:
        guest.say(3, 1, header, data=parts[0][1])
    eventually(lambda: site.core.machine.job.store.find(site.variables[0].id).array[0] == 102)
    guest.sock.close()
    site.job.close([worker.member for worker in others])
    for answer in answers:
        values = answer.result(SOON).payload.tensors([v.spec.tensor for v in site.variables])
        assert [float(value[0]) for value in values] == [102, 4, 6]
        assert answer.result().excluded == (WORKERS[2],)
    if name == "shm":
        # One of the hand's own, which the test holds, and one of the server's, which goes.
        eventually(lambda: mappings() == before - 1)


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


@ON_ONE_TRANSPORT
def test_control_c_while_a_push_waits(tmp_path, name):
    """The process ends at once, as one that waits for a call of gRPC."""
    with (
        ProcessCluster(interrupted, tmp_path, gates=["never"], workers=2, transport=name) as job,
        job.server(PS0) as server,
    ):
        job.hear(W1, "away")
        job.hear(W0, "waits")
        job.until(lambda: any(W0 not in waiting.missing for waiting in server.status().waiting))
        began = time.monotonic()
        job.kill(W0, signal.SIGINT)
        assert job.exited(W0) != 0
        assert time.monotonic() - began < MARGIN


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

QUICKLY = {("in order", "tcp"), ("backwards", "shm"), ("two passes", "grpc"), ("most is never read", "tcp")}
"""Each order on one transport, and that which needs the most on all of them; all others in `make soak`."""


@pytest.mark.parametrize(
    ("order", "transport"),
    [
        pytest.param(
            order, transport, marks=[] if order == "a loss first" or (order, transport) in QUICKLY else pytest.mark.soak
        )
        for order in ORDERS
        for transport in TRANSPORTS
    ],
)
@pytest.mark.parametrize("elements", [pytest.param(1 << 18, marks=pytest.mark.soak), (1 << 18) - 3])
def test_a_round_larger_than_what_is_in_flight_completes(stack, transport, order, elements):
    """And so does the next one, on the same connections; sizes need not be multiples of anything."""
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


@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(transport, marks=pytest.mark.soak) for transport in ("tcp", "grpc"))]
)
def test_a_part_that_is_read_by_half_does_not_stop_what_comes_next(stack, transport):
    """The least that may be in flight is less than a part, and an update may need what lies in two of them."""
    site = limited(stack, transport, LEAST_IN_FLIGHT, elements=1 << 14, variables=160)
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
