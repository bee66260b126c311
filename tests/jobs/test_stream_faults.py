"""Connections that fail while a round streams: in the middle of a push, or of an answer."""

from __future__ import annotations

import queue

import grpc
import pytest

from tests.kit.internals import (
    PART_BYTES,
    VERBS,
    Frame,
    InvalidRequest,
    RemoteServer,
    Timeouts,
    frames,
    messages,
    parts_of,
    refused,
)
from tests.kit.rig import SOON, together
from tests.kit.transports import Site, eventually


class Wire:
    """A push over a bare channel: a test sends its frames, and reads those of the answer."""

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address)
        self._frames = queue.Queue()
        self.call = self._channel.stream_stream(VERBS["Push"].path)(iter(self._frames.get, None), timeout=SOON)

    def send(self, *sent):
        """Sends frames; None ends the push."""
        for frame in sent:
            self._frames.put(frame and frame.encode())

    def read(self):
        """The answer's next frame; raises `grpc.RpcError` where there is none."""
        return Frame.decode(next(self.call))

    def error(self):
        """What the server answers with, if it is an error."""
        with pytest.raises(grpc.RpcError):
            list(self.call)
        return refused(self.call.details() or "", self.call.trailing_metadata() or ())

    def close(self):
        """Is gone, as a process that dies."""
        self.send(None)
        self._channel.close()


class Streams(Site):
    """Two members, three variables of one part each; the first one has sent all that it has, which is 1, 2 and 3.

    Attributes:
        sent: the other member's push, ten times as much, as it travels: three frames.
    """

    def __init__(self, stack):
        super().__init__(stack, "grpc")
        self.here, self.other = self.workers
        self.first = self.push(self.here, 1)
        self.job.arrived(self.here)
        whole = self.payload(10)
        header = messages.contribution_to_pb(self.said(self.other), whole.size).SerializeToString()
        self.sent = list(frames(header, parts_of(whole)))

    def again(self, *interceptors):
        """The other member's push on a connection of its own."""
        timeouts = Timeouts(session_timeout=4.0, call_timeout=10.0, round_timeout=SOON)
        server = RemoteServer(self.thread.address, self.core.task, timeouts, interceptors)
        self._stack.callback(server.close)
        return self.push(self.other, 10, server)

    def wire(self, *sent):
        """A push by hand, of which some frames are sent."""
        wire = Wire(self.thread.address)
        self._stack.callback(wire.close)
        wire.send(*sent)
        return wire

    def stored(self):
        """What the variables are at this moment, which no client can see."""
        with self.core._lock:
            values = [self.core.machine.job.store.find(variable.id).array for variable in self.variables]
        assert all((value == value[0]).all() for value in values)
        return [float(value[0]) for value in values]

    def until(self, *values):
        """Waits until the variables are these."""
        eventually(lambda: self.stored() == list(values))

    def check(self, *answers, sums=(11, 22, 33)):
        """All of these are answered with the same sums, and the variables are these."""
        for reply in together(self.first, *answers):
            values = reply.payload.tensors([variable.spec.tensor for variable in self.variables])
            assert [(value == total).all() for value, total in zip(values, sums, strict=True)] == [True] * 3
        assert self.stored() == list(sums)


@pytest.fixture
def cluster(stack):
    return Streams(stack)


def test_a_client_that_dies_in_the_middle_of_the_answer(cluster):
    """Holds up nobody: what it sent whole counts, what it did not is left out; it may still ask for its answer."""
    wire = cluster.wire(cluster.sent[0])
    assert wire.read().data is not None
    wire.close()
    cluster.check(cluster.again())
    cluster.check(cluster.again())


WRONG = {
    "a part that is not the next": lambda sent: sent[2],
    "a part once more": lambda sent: Frame(b"", sent[0].offset, sent[0].data),
    "a second header": lambda sent: Frame(sent[0].header, sent[1].offset, sent[1].data),
    "no part": lambda sent: Frame(),
    "its end": lambda sent: None,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_frame_in_the_middle_is_refused_at_once(cluster, case):
    """Though the round still waits; what is missing at the end is said; a good push completes the round."""
    wire = cluster.wire(cluster.sent[0])
    cluster.until(11, 0, 0)
    wire.send(WRONG[case](cluster.sent))
    error = wire.error()
    assert isinstance(error, InvalidRequest)
    assert case != "its end" or f"{PART_BYTES} of {3 * PART_BYTES}" in str(error)
    assert not cluster.first.done()
    cluster.check(cluster.again())
