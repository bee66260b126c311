"""Pushes and pulls over gRPC share a stream: it serves them in turn, breaks, is opened anew, or is done without."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from psclient._src.config import grpc_streams
from psclient._src.transport import grpc_calls
from psclient._src.transport.remote_server import RemoteServer
from psserver.config import ServerConfig
from psserver.transport.server import ServerThread
from pstesting.clock import Clock
from pstesting.network import Relay
from pswire.api import Contribution
from pswire.encoding import messages
from pswire.encoding.verbs import VERBS
from pswire.errors import ConfigError, InvalidRequest
from pswire.limits import PART_BYTES, Timeouts
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.grpc_frames import Frame, frames
from pswire.transport.parts import parts_of
from tests.kit.rig import SOON, WORKERS, Job, Servers, core, eventually, payload, sum_into, together

A, B = WORKERS[:2]
TIMEOUTS = Timeouts(lease=4.0, call=10.0, round=SOON)


class Pair:
    """A server behind a relay, two members on connections of their own, and a plan of three variables.

    Args:
        stack: ends it.
        size: bytes of a variable.
        streams: of the connections.
        grace: seconds that the server gives to answers under way at its end.
    """

    def __init__(self, stack: ExitStack, size: int, streams: bool = True, grace: float = 0.0) -> None:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        self.core = core(0, submit=pool.submit)
        stack.callback(self.core.close)
        self.thread = stack.enter_context(ServerThread(self.core, ServerConfig(self.core.task), grace=grace))
        self.relay = Relay(stack)
        self.relay.lead_to(self.thread.address)
        self.servers = [RemoteServer(self.relay.address, self.core.task, TIMEOUTS, streams=streams) for _ in "ab"]
        for server in self.servers:
            stack.callback(server.close)
        self.job = Job(Servers([self.servers[0]], [self.core], Clock(), Path("nowhere"), True))
        self.members = self.job.join(A, B)
        self.size = size // 4
        self.variables = [self.job.variable(self.members[0], np.zeros(self.size, "float32")) for _ in range(3)]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.members[0])
        self.total = 0.0

    @property
    def calls(self):
        """The calls of the first member's connection."""
        return self.servers[0]._calls

    @property
    def stream(self):
        """The stream of the first member's connection; None where there is none."""
        return self.calls._stream

    def contribution(self, index: int, number: float):
        """What a member says in its round, and its payload: the number for each variable."""
        member, ids = self.members[index], tuple(variable.id for variable in self.variables)
        said = Contribution(member.session, member.epoch, member.round, self.plan.id, (1.0,) * 3, want=ids)
        return said, payload(self.plan, 0, [np.full(self.size, number)] * 3, (1.0,) * 3, ())

    def push(self, index: int, number: float):
        """A member contributes to the round."""
        return self.servers[index].push(*self.contribution(index, number))

    def end_round(self, *answers) -> None:
        """Both have contributed 1 and 10: all are answered with the sums, and the round counted once."""
        self.total += 11
        for reply in together(*answers):
            values = reply.payload.tensors([variable.spec.tensor for variable in self.variables])
            assert [(value == self.total).all() for value in values] == [True] * 3
        for member in self.members:
            member.round += 1

    def round(self) -> None:
        """A whole round."""
        self.end_round(self.push(0, 1), self.push(1, 10))


@contextmanager
def pair(size: int = 4000, streams: bool = True):
    with ExitStack() as stack:
        yield Pair(stack, size, streams)


SIZES = pytest.mark.parametrize("size", [4000, PART_BYTES], ids=["one message", "a round that streams"])


@SIZES
def test_calls_share_a_stream(size):
    """All pushes and pulls of a connection are on the one that the first has opened."""
    with pair(size) as job:
        job.round()
        stream = job.stream
        assert stream is not None
        for _ in range(3):
            job.round()
            value = job.servers[0].pull(job.members[0].session, [job.variables[0].id], -1).result(SOON)
            assert value.payload.tensors([job.variables[0].spec.tensor])[0][0] == job.total
        assert job.stream is stream


@SIZES
def test_without_streams_each_is_a_call(size):
    """`PS_GRPC_STREAM=0`."""
    with pair(size, streams=False) as job:
        job.round()
        job.round()
        assert job.stream is None


def test_a_setting_switches_streams_off(monkeypatch):
    """Any other word is an error, since a typo would change nothing."""
    assert [grpc_streams({}), grpc_streams({"PS_GRPC_STREAM": "1"}), grpc_streams({"PS_GRPC_STREAM": "0"})] == [
        True,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="PS_GRPC_STREAM must be 1 or 0, not 'no'"):
        grpc_streams({"PS_GRPC_STREAM": "no"})


@SIZES
def test_a_stream_that_breaks_is_opened_anew(size):
    """The push under way is sent again by a call of its own and counts once; the next one opens a stream."""
    with pair(size) as job:
        job.round()
        broken, first = job.stream, job.push(0, 1)
        job.job.arrived(job.members[0])
        job.relay.mend()  # ends all connections
        eventually(lambda: job.stream is not broken)
        job.end_round(first, job.push(1, 10))
        job.round()
        job.round()
        assert job.stream not in (None, broken)


def test_an_idle_stream_that_has_ended_fails_no_call():
    """The next call sees it and opens another, without a failed attempt."""
    with pair() as job:
        job.round()
        stream = job.stream
        job.relay.mend()
        eventually(lambda: not stream.serves(0))
        job.round()
        assert job.stream not in (None, stream)


def test_a_second_call_at_the_same_time_is_one_of_its_own():
    """A push that waits for others holds no pull up."""
    with pair() as job:
        job.round()
        waiting = job.push(0, 1)
        job.job.arrived(job.members[0])
        value = job.servers[0].pull(job.members[0].session, [job.variables[0].id], -1).result(SOON)
        assert value.payload.tensors([job.variables[0].spec.tensor])[0][0] == job.total
        assert not waiting.done()
        job.end_round(waiting, job.push(1, 10))
        job.round()


@SIZES
def test_a_refusal_ends_a_call_and_not_the_stream(size):
    """Also where the rest of the push is still on its way: it is passed over."""
    with pair(size) as job:
        job.round()
        stream, member = job.stream, job.members[0]
        job.members[0] = replace(member, session=1 << 60)
        for _ in range(3):
            with pytest.raises(Exception, match="session"):
                job.push(0, 1).result(SOON)
        job.members[0] = member
        job.round()
        assert job.stream is stream


def test_the_rest_of_a_push_that_is_answered_is_passed_over():
    """Nothing of what follows it is lost, wherever the server was reading when the answer was there."""
    with pair(PART_BYTES) as job, grpc.insecure_channel(job.thread.address) as channel:
        said, data = job.contribution(0, 1)
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
            assert sum(len(buffer) for frame in answer for buffer in frame.data or ()) == PART_BYTES
        outgoing.put(None)


def test_a_stream_makes_room_for_another_in_time():
    """Its end by its deadline would break the call under way."""
    with pair() as job:
        job.round()
        stream = job.stream
        stream._end = time.monotonic() + 1  # less than a call may take
        job.round()
        assert job.stream not in (None, stream)


def test_a_later_life_of_a_server_gets_a_stream_of_its_own():
    """The metadata of a stream name the life that it was opened for."""
    with pair() as job:
        job.round()
        stream = job.stream
        job.calls.bind(job.core.incarnation)
        assert job.stream is None
        job.round()
        assert job.stream not in (None, stream)


def test_an_older_server_gets_calls():
    """It answers UNIMPLEMENTED, and is not asked for a stream again."""
    with pair() as job:
        job.thread._server._service._methods.pop(VERBS["Exchange"].path)
        job.round()
        job.round()
        assert (job.stream, job.calls._streams) == (None, False)


def test_streams_that_never_last_are_given_up(monkeypatch, caplog):
    """A proxy may end each of them: every call is answered all the same, and after a while there are no streams."""
    with pair() as job:

        async def ends(request, context):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "upstream reset")

        methods = job.thread._server._service._methods
        methods[VERBS["Exchange"].path] = grpc.stream_stream_rpc_method_handler(ends)
        with caplog.at_level("INFO", "psclient.calls"):
            for _ in range(grpc_calls.MAX_BREAKS + 1):
                job.round()
        assert (job.stream, job.calls._streams) == (None, False)
        told = [record.getMessage() for record in caplog.records if "do not last" in record.getMessage()]
        assert told == [f"/job:ps/task:0 is sent single calls: streams to {job.relay.address} do not last"] * 2


def test_a_server_ends_at_once_beside_an_idle_stream():
    """Nobody waits on it, so that the server's last answers do not wait for it either."""
    with ExitStack() as stack:
        job = Pair(stack, 4000, grace=SOON)
        job.round()
        assert job.stream is not None
        began = time.monotonic()
        job.thread.stop()
        assert time.monotonic() - began < SOON / 2


def test_what_is_no_call_ends_the_stream():
    """A header that begins nothing is refused; bytes that are no frame end the stream, with the reason."""
    with pair() as job, grpc.insecure_channel(job.thread.address) as channel:
        stub = channel.stream_stream(VERBS["Exchange"].path)
        call = stub(iter([b"\xff\xff"]), timeout=SOON)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert dict(call.trailing_metadata())["ps-error"] == InvalidRequest.__name__
        job.round()
