"""Contributions that are sent while they are being read: over each lane what whole ones give, and no hang without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import psclient as ps
from psclient._src.transport.staging import StagedParts
from pswire.errors import PSError
from pswire.limits import ALIGN
from pswire.transport.payload import Payload
from pswire.transport.traffic import LANES, LaneName
from tests.kit.lanes import SIZE, Site, eventually
from tests.kit.rig import SOON
from tests.kit.slow_gpu import Gpu, slow_gpu

SMALL = 50
"""Elements of variables of which a few fit a part."""


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with slow_gpu() as found:
        yield found


def working() -> set[threading.Thread]:
    """This process's threads, but for the one by which gRPC serves all of it."""
    return {thread for thread in threading.enumerate() if "poll" not in thread.name}


def grow(payload: Payload, whole: Payload, step: int) -> None:
    """More of a payload is there: tensor after tensor, each in pieces of so many bytes."""
    for offset, buffer in whole.chunks:
        for at in range(0, len(buffer), step):
            payload.add(offset + at, buffer[at : at + step])


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("elements", "step"), [(SMALL, 8 * SMALL), (SMALL, ALIGN), (SIZE, 1 << 30), (SIZE, 1 << 20)])
def test_what_grows_gives_what_is_whole(stack: ExitStack, lane: LaneName, elements: int, step: int) -> None:
    """Beside a member who has sent all at once; the push is under way before the first byte is there."""
    site = Site(stack, lane, elements=elements)
    for number in (1.0, 2.0):
        whole = site.payload(number)
        growing = Payload((), whole.size)
        first = site.server.push(site.said(site.workers[0]), growing)
        second = site.push(site.workers[1], 10 * number)
        assert not first.done()
        grow(growing, whole, step)
        site.whole([number, 10 * number], first, second)


@pytest.mark.parametrize("lane", ["tcp", "shm"])
def test_what_has_come_is_sent_again_where_a_lane_breaks(stack: ExitStack, lane: LaneName) -> None:
    """And the rest when it is there."""
    site = Site(stack, lane)
    whole = site.payload(1.0)
    growing = Payload((), whole.size)
    first = site.server.push(site.said(site.workers[0]), growing)
    offset, buffer = whole.chunks[0]
    growing.add(offset, buffer)
    used = site.lane(site.workers[0])
    used.close("a test cuts it")
    eventually(lambda: site.lane(site.workers[0]) is not used)
    second = site.push(site.workers[1], 10.0)
    grow(growing, whole, 1 << 20)
    site.whole([1.0, 10.0], first, second)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("elements", [SMALL, SIZE])
def test_nobody_waits_for_the_rest_once_the_connection_is_closed(
    stack: ExitStack, lane: LaneName, elements: int
) -> None:
    """The push ends with an error, and no thread of it is left."""
    before = working()
    site = Site(stack, lane, elements=elements)
    whole = site.payload(1.0)
    growing = Payload((), whole.size)
    push = site.server.push(site.said(site.workers[0]), growing)
    offset, buffer = whole.chunks[0]
    growing.add(offset, buffer)
    eventually(lambda: growing._waiting)  # for the rest
    site.server.close()
    with pytest.raises(PSError, match="closed"):
        push.result(SOON)
    stack.close()
    eventually(lambda: working() <= before)


def test_parts_end_for_whoever_waits() -> None:
    """However much is there."""
    parts, found = StagedParts(Payload((), 100)), []
    waiting = threading.Thread(target=lambda: found.extend(parts))
    waiting.start()
    parts.end()
    waiting.join(SOON)
    assert not waiting.is_alive()
    assert not found


# ---- From replicas ----


def test_gradients_of_several_gpus_are_pushed_as_they_come(gpu: Gpu) -> None:
    """The sum of the replicas' arrays, and what an update makes of it."""
    with ps.ParameterServerStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        with strategy.scope():
            weights = [ps.Variable(np.zeros(size, "float32")) for size in (3, 1 << 20)]
            optimizer = ps.optimizers.SGD(1.0)

        def step() -> None:
            replica = ps.get_replica_context().replica_id_in_sync_group
            gradients = [gpu.array(np.full(w.shape, replica + 1.0, "float32"), replica) for w in weights]
            optimizer.apply_gradients(list(zip(gradients, weights, strict=True)))

        for count in (1, 2):
            strategy.run(step)
            assert [set(w.numpy().tolist()) for w in weights] == [{-3.0 * count}] * 2


@pytest.mark.parametrize("lane", ["grpc", "shm", pytest.param("tcp", marks=pytest.mark.soak)])
def test_a_gpu_that_fails_halfway_ends_the_session(gpu: Gpu, lane: LaneName, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error that says why, at once, in this call and in all later ones; nobody hangs, and it can be closed."""
    monkeypatch.setenv("PS_LANE", lane)
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            first, second = (ps.Variable(np.zeros(1 << 20, "float32")) for _ in range(2))
            optimizer = ps.optimizers.SGD(1.0)

        def step(fails: bool) -> None:
            gradient = gpu.array(np.ones(1 << 20, "float32"))
            if fails:
                gpu.break_down()
            late = gpu.array(np.ones(1 << 20, "float32"))
            optimizer.apply_gradients([(gradient, first), (late, second)])

        strategy.run(step, args=(False,))
        for fails in (True, False):
            with pytest.raises(PSError, match=r"could not be copied from the GPU \(an illegal memory access"):
                strategy.run(step, args=(fails,))
