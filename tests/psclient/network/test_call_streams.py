"""Pushes and pulls over gRPC share a stream: it serves them in turn, breaks, is opened anew, or is done without."""

from __future__ import annotations

import queue
import socket
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from psclient._src.network import grpc_calls
from psclient._src.network.grpc_calls import GrpcCalls
from psclient._src.network.remote_server import RemoteServer
from psclient._src.network.retries import Attempts
from pstesting.network import Relay
from pswire.api import RoundReply
from pswire.cluster import Task
from pswire.encoding import messages
from pswire.encoding.verbs import VERBS
from pswire.errors import Fenced, ServerLost, Unreachable
from pswire.limits import PART_BYTES, Timeouts
from pswire.network.grpc_channel import open_channel, stub
from pswire.network.grpc_frames import Frame, frames
from pswire.network.parts import parts_of
from pswire.network.traffic import TransportName, traffic
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from tests.kit.rig import SOON, Worker, eventually
from tests.kit.strategies import refused
from tests.kit.transports import Site


class Pair(Site):
    """Two members, each with its server's connection, by streams or single calls, through a relay."""

    def __init__(self, stack: ExitStack, size: int, streams: bool = True, grace: float = 0.0) -> None:
        self.relay, self._streams = Relay(stack), streams
        super().__init__(stack, "grpc", elements=size // 4, grace=grace)

    def begin(self, stack: ExitStack, address: str, *rest: Any) -> None:
        self.relay.lead_to(address)
        super().begin(stack, self.relay.address, *rest)
        self.servers = [self.server, self.connect("grpc")]

    def connect(self, transport: TransportName, security: Security | None = None) -> RemoteServer:
        timeouts = Timeouts(session_timeout=self.lease, call_timeout=10.0, round_timeout=SOON)
        server = RemoteServer(self._address, self.core.task, timeouts, streams=self._streams)
        self._stack.callback(server.close)
        return server

    def push(self, worker: Worker, number: float, server: RemoteServer | None = None) -> Future[RoundReply]:
        return super().push(worker, number, server or self.servers[self.workers.index(worker)])

    @property
    def calls(self):
        """The calls of the first member's connection."""
        return self.server._calls

    @property
    def stream(self):
        """The stream of the first member's connection; None where there is none."""
        return self.calls._stream


@contextmanager
def pair(size: int = 4000, streams: bool = True):
    with ExitStack() as stack:
        yield Pair(stack, size, streams)


LARGE = PART_BYTES // 2
"""Bytes of each of three variables, of which a round travels in more than one part, and is applied as it comes."""

SIZES = pytest.mark.parametrize("size", [4000, LARGE], ids=["one message", "a round that streams"])


@SIZES
@pytest.mark.parametrize("streams", [True, False])
def test_calls_share_a_stream(size, streams):
    """All pushes and pulls of a connection are on the one that the first has opened, or each is a call of its own."""
    with pair(size, streams) as job:
        job.round()
        stream = job.stream
        assert (stream is not None) == streams
        for _ in range(2):
            job.round()
            assert job.pulled(job.workers[0])[0] == job.sums
        assert job.stream is stream


@SIZES
def test_calls_leave_one_another_alone(size):
    """A push that waits for others holds no pull up; a refusal ends a call, whose rest is passed over, and not the
    stream. Nobody waits on an idle one, so that the server's end does not either."""
    with ExitStack() as stack:
        job = Pair(stack, size, grace=SOON)
        job.round()
        stream, stranger = job.stream, replace(job.workers[0], session=1 << 60)
        waiting = job.push(job.workers[0], 1)
        job.job.arrived(job.workers[0])
        assert job.pulled(job.workers[0])[0] == job.sums
        assert not waiting.done()
        job.whole([1, 10], waiting, job.push(job.workers[1], 10))
        stream = job.stream
        for _ in range(3):
            refused(Fenced, "session", lambda: job.push(stranger, 1, job.server).result(SOON))
        job.round()
        assert job.stream is stream
        began = time.monotonic()
        job.thread.stop()
        assert time.monotonic() - began < SOON / 2


@SIZES
def test_a_stream_that_breaks_is_opened_anew(size):
    """The push under way is sent again by a call of its own and counts once; the next one opens a stream."""
    with pair(size) as job:
        job.round()
        broken, first = job.stream, job.push(job.workers[0], 1)
        job.job.arrived(job.workers[0])
        job.relay.mend()  # ends all connections
        eventually(lambda: job.stream is not broken)
        job.whole([1, 10], first, job.push(job.workers[1], 10))
        job.round()
        job.round()
        assert job.stream not in (None, broken)


def test_a_stream_that_cannot_go_on_fails_no_call():
    """One that has ended while idle, that ends soon, of an earlier life."""
    with pair() as job:
        job.round()
        stream = job.stream
        job.relay.mend()
        eventually(lambda: not stream.serves(0))
        job.round()
        assert job.stream not in (None, stream)
        stream = job.stream
        stream._end = time.monotonic() + 1  # less than a call may take
        job.round()
        assert job.stream not in (None, stream)
        stream = job.stream
        job.calls.bind(job.core.incarnation)
        assert job.stream is None
        job.round()
        assert job.stream not in (None, stream)


@pytest.mark.parametrize("streams", [True, False])
def test_a_server_that_stops_is_told_of(streams):
    """Who waits learns at once why."""
    with pair(streams=streams) as job:
        pull = job.server.pull(job.workers[1].session, [job.variables[0].id], 5)
        push = job.push(job.workers[0], 1)
        job.job.arrived(job.workers[0])
        job.thread.stop()
        for waiting in (push, pull):
            refused(ServerLost, "was stopped", lambda waiting=waiting: waiting.result(SOON))


def test_a_call_that_is_interrupted_is_cancelled():
    """Its server does not go on with what nobody takes."""
    with pair() as job:
        ask = pb.PullRequest(session=job.workers[0].session, variables=[job.variables[0].id], after=5)
        call = job.calls._start("Pull", ask.SerializeToString(), SOON)
        with pytest.raises(KeyboardInterrupt), job.calls._endable(call):
            raise KeyboardInterrupt
        assert call.code() is grpc.StatusCode.CANCELLED


def test_the_rest_of_a_push_that_is_answered_is_passed_over():
    """Nothing of what follows it is lost, wherever the server was reading when the answer was there."""
    with pair(LARGE) as job, grpc.insecure_channel(job.thread.address) as channel:
        said, data = job.said(job.workers[0]), job.payload(1)
        job.round()
        outgoing: queue.Queue[bytes | None] = queue.Queue()
        call = channel.stream_stream(VERBS["Exchange"].path)(iter(outgoing.get, None), timeout=SOON)
        header = pb.ExchangeHeader(push=messages.contribution_to_pb(said, data.size)).SerializeToString()
        first, *rest = [frame.encode() for frame in frames(header, parts_of(data))]
        pull = pb.ExchangeHeader(pull=pb.PullRequest(session=said.session, variables=[job.variables[0].id], after=-1))
        for _ in range(5):
            outgoing.put(first)  # of a round that is over: the answer is there at once
            while Frame.decode(next(call)).end is None:
                pass
            for message in rest:
                outgoing.put(message)
            outgoing.put(Frame(pull.SerializeToString()).encode())
            answer = [Frame.decode(next(call))]
            while answer[-1].end is None:
                answer.append(Frame.decode(next(call)))
            assert sum(len(buffer) for frame in answer for buffer in frame.data or ()) == LARGE
        outgoing.put(None)


def test_streams_that_never_last_are_given_up(monkeypatch, caplog):
    """A proxy may end each of them: every call is answered all the same, and after a while there are no streams."""
    with pair() as job:

        async def ends(request, context):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "upstream reset")

        methods = job.thread._server._service._methods
        methods[VERBS["Exchange"].path] = grpc.stream_stream_rpc_method_handler(ends)
        job.relay.mend()  # ends the streams that there are
        with caplog.at_level("INFO", "psclient.calls"):
            for _ in range(grpc_calls.MAX_BREAKS + 1):
                job.round()
        assert (job.stream, job.calls._streams) == (None, False)
        line = f"/job:ps/task:0 uses single calls, because streams to {job.relay.address} break repeatedly"
        assert caplog.messages.count(line) == 2


def test_the_most_that_was_known_of_a_server_is_told():
    """The last attempt has what is left of the deadline, which may be too short to hear that nothing listens."""
    with socket.socket() as nobody, socket.create_server(("127.0.0.1", 0)) as silent:
        nobody.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in (nobody, silent)]
        for left, said in ((addresses, "(nothing listens there)"), (addresses[1:], "(it does not answer)")):
            timeouts, task = Timeouts(call_timeout=0.5, session_timeout=8.0), Task("ps", 0)
            calls = GrpcCalls(left[-1], task, Security(), "", timeouts.session_timeout, (), traffic())
            attempts = Attempts(left[-1], str(task), timeouts, calls, str)

            def once(seconds: float, left: list[str] = left) -> bytes:
                """Asks the first address, and all others the last one, for which little time is left."""
                began, first = time.monotonic(), len(left) > 1
                with open_channel(left.pop(0) if first else left[0], Security(), "") as channel:
                    try:
                        return bytes(stub(channel, VERBS["Status"].path, VERBS["Status"].streams)(b"", timeout=seconds))
                    except grpc.RpcError:
                        time.sleep(max(0.0, began + seconds - time.monotonic() - 0.05) if first else 0.0)
                        raise

            with pytest.raises(Unreachable) as caught:
                attempts.until_answered(VERBS["Status"], once)
            assert said in str(caught.value)


def test_a_server_that_is_back_after_the_deadline_is_heard():
    """A session's server may be silent for longer than a call may take: the attempts that follow are as long as others,
    since an answer takes a while to arrive, and the last one ends when the server counts as lost."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, task = f"127.0.0.1:{silent.getsockname()[1]}", Task("ps", 0)
        timeouts = Timeouts(call_timeout=0.3, session_timeout=0.4, server_timeout=1.5)
        calls = GrpcCalls(address, task, Security(), "", timeouts.session_timeout, (), traffic())
        attempts = Attempts(address, str(task), timeouts, calls, str)
        attempts.opened, back = True, time.monotonic() + 2 * timeouts.call_timeout

        def once(seconds: float) -> bytes:
            if time.monotonic() > back and seconds > timeouts.session_timeout / 4:
                return b"heard"
            with open_channel(address, Security(), "") as channel:
                return bytes(stub(channel, VERBS["Status"].path, VERBS["Status"].streams)(b"", timeout=seconds))

        assert attempts.until_answered(VERBS["Status"], once) == b"heard"
        back = float("inf")
        began = time.monotonic()
        refused(ServerLost, "PS_SERVER_TIMEOUT", lambda: attempts.until_answered(VERBS["Status"], once))
        assert time.monotonic() - began > timeouts.server_timeout
