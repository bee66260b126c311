"""Connections that fail while a round streams: in the middle of a push, or of an answer, or with the server."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest

from psserver.execution import calls
from pstesting.clock import Clock
from tests.kit.internals import (
    PART_BYTES,
    VERBS,
    Assembly,
    Contribution,
    Fenced,
    Frame,
    InvalidRequest,
    PSError,
    RemoteServer,
    ServerConfig,
    ServerLost,
    ServerThread,
    Timeouts,
    frames,
    messages,
    parse,
    parts_of,
    pb,
    refused,
)
from tests.kit.rig import SOON, WORKERS, Job, Servers, core, eventually, payload, sum_into, together

A, B = WORKERS[:2]
SIZE = PART_BYTES // 4
"""Elements of float32 of which a part holds as many."""


class Wire:
    """A push over a bare channel: a test sends its frames, and reads those of the answer.

    Args:
        address: the server's.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._frames: queue.Queue[bytes | None] = queue.Queue()
        stub = self._channel.stream_stream(VERBS["Push"].path)
        self.call = stub(iter(self._frames.get, None), timeout=SOON)

    def send(self, frame: Frame) -> None:
        """Sends a frame."""
        self._frames.put(frame.encode())

    def read(self) -> Frame:
        """The answer's next frame; raises `grpc.RpcError` where there is none."""
        return Frame.decode(next(self.call))

    def error(self) -> PSError | None:
        """What the server answers with, if it is an error."""
        with pytest.raises(grpc.RpcError):
            list(self.call)
        return refused(self.call.details() or "", self.call.trailing_metadata() or ())

    def close(self) -> None:
        """Is gone, as a process that dies."""
        self._frames.put(None)
        self._channel.close()


class CutOnce(grpc.StreamStreamClientInterceptor):
    """Breaks the first push off after two frames, and holds the second one.

    Attributes:
        attempts: how often there was a push.
        cut: lets the first one break off.
        go: lets the second one go on.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self.cut, self.go = threading.Event(), threading.Event()

    def intercept_stream_stream(self, continuation, details, messages):
        self.attempts += 1
        return continuation(details, self._cut(messages) if self.attempts == 1 else self._late(messages))

    def _cut(self, messages):
        for _ in range(2):
            yield next(messages)
        assert self.cut.wait(SOON)  # what is on its way when a call ends may not arrive
        raise ConnectionError("a fault of the test")

    def _late(self, messages):
        assert self.go.wait(SOON)
        yield from messages


class Cluster:
    """Two members, three variables of one part each, and a server whose array work has its own thread."""

    def __init__(self, stack: ExitStack, submit) -> None:
        self.core = core(0, submit=submit)
        self._stack = stack
        self.thread = stack.enter_context(ServerThread(self.core, ServerConfig(self.core.task)))
        self.server = self.connect()
        self.job = Job(Servers([self.server], [self.core], Clock(), Path("nowhere"), True))
        self.here, self.other = self.job.join(A, B)
        self.variables = [self.job.variable(self.here, np.zeros(SIZE, "float32")) for _ in range(3)]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.here)
        self.ids = tuple(variable.id for variable in self.variables)
        self.first = self.push(self.server, self.here, 1)
        self.job.arrived(self.here)

    def connect(self, *interceptors) -> RemoteServer:
        """One more connection."""
        timeouts = Timeouts(lease=4.0, call=10.0, round=SOON)
        server = RemoteServer(self.thread.address, self.core.task, timeouts, interceptors)
        self._stack.callback(server.close)
        return server

    def said(self, worker):
        """What a worker says in its round."""
        return Contribution(worker.session, worker.epoch, worker.round, self.plan.id, (1.0,) * 3, want=self.ids)

    def payload(self, number: float):
        """A contribution: a number times 1, 2 and 3."""
        return payload(self.plan, 0, [np.full(SIZE, n * number) for n in (1, 2, 3)], (1.0,) * 3, ())

    def push(self, server, worker, number):
        """Contributes to the round."""
        return server.push(self.said(worker), self.payload(number))

    def frames(self, number: float) -> list[Frame]:
        """The other member's push, as it travels."""
        sent = self.payload(number)
        header = messages.contribution_to_pb(self.said(self.other), sent.size).SerializeToString()
        found = list(frames(header, parts_of(sent)))
        assert len(found) == 3
        return found

    def wire(self) -> Wire:
        """A push by hand."""
        wire = Wire(self.thread.address)
        self._stack.callback(wire.close)
        return wire

    def stored(self) -> list[float]:
        """What the variables are at this moment, which no client can see."""
        with self.core._lock:
            values = [self.core.machine.store.value(id) for id in self.ids]
        assert all((value == value[0]).all() for value in values)
        return [float(value[0]) for value in values]

    def until(self, *values: float) -> None:
        """Waits until the variables are these."""
        eventually(lambda: self.stored() == list(values))

    def check(self, *answers, sums=(11, 22, 33)) -> None:
        """All of these are answered with the same sums, and the variables are these."""
        for reply in together(*answers):
            values = reply.payload.tensors([variable.spec.tensor for variable in self.variables])
            assert [(value == total).all() for value, total in zip(values, sums, strict=True)] == [True] * 3
        assert self.stored() == list(sums)


@pytest.fixture
def cluster():
    """The first member has sent all that it has."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        found = Cluster(stack, pool.submit)
        yield found
        found.core.close()


def test_a_push_that_is_cut_off_is_sent_again(cluster):
    """The first part has changed a variable by then: it does so once, and the rest follows."""
    fault = CutOnce()
    answer = cluster.push(cluster.connect(fault), cluster.other, 10)
    cluster.until(11, 22, 0)
    fault.cut.set()
    eventually(lambda: fault.attempts == 2)
    assert not answer.done()
    fault.go.set()
    cluster.check(cluster.first, answer)


def test_an_answer_comes_before_the_last_contribution(cluster):
    """Who has sent all receives what is there already."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    eventually(lambda: cluster.server.traffic["grpc"].received >= PART_BYTES)
    first = wire.read()
    header = parse(pb.RoundHeader, first.header)
    assert header == pb.RoundHeader(size=3 * PART_BYTES)
    assembly = Assembly(header.size)
    assembly.add(first.offset, first.data)
    for frame in sent[1:]:
        wire.send(frame)
    while not assembly.payload.whole:
        frame = wire.read()
        assert not frame.header
        assembly.add(frame.offset, frame.data)
    last = wire.read()
    assert last.data is None
    assert parse(pb.RoundHeader, last.header).epoch.number == 1
    cluster.check(cluster.first)
    assert [float(t[-1]) for t in assembly.payload.tensors([v.spec.tensor for v in cluster.variables])] == [11, 22, 33]


def test_a_client_that_dies_in_the_middle_of_the_answer(cluster):
    """Holds up nobody: what it sent whole counts, what it did not is left out; it may still ask for its answer."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    assert wire.read().data is not None
    wire.close()
    again = cluster.push(cluster.connect(), cluster.other, 10)
    cluster.check(cluster.first, again)
    late = cluster.push(cluster.connect(), cluster.other, 10)
    cluster.check(late)


def test_a_client_that_dies_in_the_middle_of_its_push(cluster):
    """Once its session is ended the round completes without what it had not sent, and says so."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    cluster.until(11, 0, 0)
    wire.close()
    assert not cluster.first.done()
    cluster.job.close([cluster.here.member])
    cluster.check(cluster.first, sums=(11, 2, 3))
    assert cluster.first.result(SOON).left_out == (B,)
    with pytest.raises(Fenced):
        cluster.push(cluster.connect(), cluster.other, 10).result(SOON)


WRONG = {
    "a part that is not the next": lambda sent: sent[2],
    "a part once more": lambda sent: Frame(b"", sent[0].offset, sent[0].data),
    "a second header": lambda sent: Frame(sent[0].header, sent[1].offset, sent[1].data),
    "no part": lambda sent: Frame(),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_frame_in_the_middle_is_refused_at_once(cluster, case):
    """Though the round still waits; a good push completes it."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    cluster.until(11, 0, 0)
    wire.send(WRONG[case](sent))
    assert isinstance(wire.error(), InvalidRequest)
    assert not cluster.first.done()
    cluster.check(cluster.first, cluster.push(cluster.connect(), cluster.other, 10))


def test_a_push_that_ends_in_the_middle_is_refused(cluster):
    """What is missing is said; a good push completes the round."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    cluster.until(11, 0, 0)
    wire._frames.put(None)
    error = wire.error()
    assert isinstance(error, InvalidRequest)
    assert f"{PART_BYTES} of {3 * PART_BYTES}" in str(error)
    cluster.check(cluster.first, cluster.push(cluster.connect(), cluster.other, 10))


def test_two_attempts_at_once(cluster):
    """The first one is only slow: both go on, and both are answered."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    cluster.until(11, 0, 0)
    again = cluster.wire()
    again.send(sent[0])
    again.send(sent[1])
    cluster.until(11, 22, 0)
    wire.send(sent[1])
    wire.send(sent[2])
    cluster.check(cluster.first)
    for one in (wire, again):
        while one.read().data is not None:
            pass


def test_a_server_that_is_stopped_tells_everyone(cluster):
    """Who waits for the rest of an answer, and who is still sending."""
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    cluster.until(11, 0, 0)
    assert wire.read().data is not None
    cluster.thread.stop()
    assert isinstance(wire.error(), ServerLost)
    with pytest.raises(ServerLost):
        cluster.first.result(SOON)


def test_a_round_that_fails_halfway_reaches_everyone(cluster, monkeypatch):
    """As `ServerLost`, in the middle of their answers."""
    run, made = calls.KernelCall.run, []

    def short(*args):
        made.append(1)
        if len(made) > 1:
            raise MemoryError("no more")
        return run(*args)

    monkeypatch.setattr(calls.KernelCall, "run", short)
    wire, sent = cluster.wire(), cluster.frames(10)
    wire.send(sent[0])
    assert wire.read().data is not None
    wire.send(sent[1])
    assert isinstance(wire.error(), ServerLost)
    with pytest.raises(ServerLost, match="halfway"):
        cluster.first.result(SOON)
