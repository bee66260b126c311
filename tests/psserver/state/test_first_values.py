"""First values on their way to a server: they come in parts, are copied once, and the first ones count."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pstesting.clock import Clock
from pswire.api import Contribution, RoundReply
from pswire.errors import Fenced, InvalidRequest
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import Array, as_bytes, spec_of
from pswire.network.payload import Payload
from tests.kit.rig import NOWHERE, WORKERS, Deferred, Job, Servers, core

A, B = 0, 1
"""Who sends."""

VALUES: list[Array] = [
    np.arange(5, dtype="int16"),
    np.zeros((0, 3), "float32"),
    np.arange(100, dtype="float64").reshape(10, 10),
    np.array(True),
]


class Server:
    """A server of a job of two, which is told of variables without values; it does array work when the test says so.

    Args:
        values: what the variables may have; behind them there is one that lives elsewhere.
    """

    def __init__(self, values: Sequence[Array] = VALUES) -> None:
        self.work = Deferred()
        cores = [core(number, submit=self.work) for number in (0, 1)]
        job = Job(Servers(list(cores), cores, Clock(), NOWHERE, False))
        self.core, self.sessions = cores[0], [job.open(task).session for task in WORKERS[:2]]
        specs = [VariableSpec(f"v{id}", spec_of(value)) for id, value in enumerate([*values, values[0]])]
        placed = [PlacedVariable(id, spec, (int(id == len(values)),)) for id, spec in enumerate(specs)]
        assert self.core.create_batch(self.sessions[A], placed).error is None
        self.store = self.core.machine.job.store

    def push(self, who: int, ids: tuple[int, ...], payload: Payload) -> Future[RoundReply]:
        return self.core.push(Contribution(self.sessions[who], 0, 0, b"", first_values=ids), payload)

    def do(self) -> None:
        self.work.run()

    def value(self, id: int) -> Any:
        return self.store.find(id).array.tolist()


def packed(values: Sequence[Array]) -> bytes:
    whole = Payload.pack(values)
    found = bytearray(whole.size)
    for offset, buffer in whole.chunks:
        found[offset : offset + len(buffer)] = buffer
    return bytes(found)


@pytest.mark.parametrize("step", [1, 16, 48, 1 << 20])
@pytest.mark.parametrize("eager", [True, False], ids=["copied as it comes", "copied in the end"])
def test_values_are_as_they_were_sent(step, eager):
    """Wherever they are cut; nothing is there before all is."""
    server, data = Server(), packed(VALUES)
    payload = Payload((), len(data))
    future = server.push(A, (0, 1, 2, 3), payload)
    for at in range(0, len(data), step):
        assert not future.done()
        assert not server.store.initialized(0)
        payload.add(at, memoryview(data[at : at + step]))
        if eager:
            server.do()
            assert payload.begin == payload.end, "what was copied is let go of"
    server.do()
    assert future.result().payload.size == 0
    assert [server.value(id) for id in range(4)] == [value.tolist() for value in VALUES]
    assert all(server.store.find(id).array.flags.owndata for id in range(4)), "rounds write into them"


def test_the_first_values_count():
    """Those of another session change nothing, and it is told that the variables have some; only missing ones count."""
    server, mine = Server(), [np.full(5, 3, "int16"), np.zeros((10, 10))]
    server.push(A, (0,), Payload.pack(VALUES[:1]))
    late = server.push(B, (0, 2), Payload.pack(mine))
    server.do()
    assert late.done()
    assert (server.value(0), server.value(2)) == (VALUES[0].tolist(), mine[1].tolist())
    again = server.push(B, (2, 0), Payload((), len(packed(mine[::-1]))))
    assert again.done(), "nobody waits for bytes that are not wanted"


def test_a_resend_goes_on_where_the_first_call_has_stopped():
    """A transport that broke has brought a part of it; both calls are answered."""
    server, data = Server(), packed(VALUES)
    first, second = (Payload((), len(data)) for _ in range(2))
    one = server.push(A, (0, 1, 2, 3), first)
    first.add(0, memoryview(data[:64]))
    server.do()
    two = server.push(A, (0, 1, 2, 3), second)
    second.add(0, memoryview(data[:256]))
    server.do()
    assert not two.done()
    second.add(256, memoryview(data[256:]))
    server.do()
    assert (one.exception(0), two.exception(0), server.value(2)) == (None, None, VALUES[2].tolist())


def test_a_session_that_ends_gives_nothing():
    """What it has sent is dropped, also what is being copied; another one's values are taken."""
    server, data = Server(), packed(VALUES)
    payload = Payload((), len(data))
    future = server.push(A, (0, 1, 2, 3), payload)
    payload.add(0, memoryview(data[:128]))
    server.core.leave(server.sessions[A], "a bug")
    with pytest.raises(Fenced):
        future.result(0)
    payload.add(128, memoryview(data[128:]))
    server.do()
    assert not server.store.initialized(0)
    server.push(B, (0,), Payload.pack([np.ones(5, "int16")]))
    server.do()
    assert server.value(0) == [1] * 5


def test_a_session_sends_one_push_at_a_time():
    """Other values give up those before: what a client can make a server hold is bounded."""
    server = Server()
    given_up = server.push(A, (2,), Payload((), VALUES[2].nbytes))
    server.push(A, (0,), Payload.pack(VALUES[:1]))
    with pytest.raises(InvalidRequest, match="newer initial values"):
        given_up.result(0)
    server.do()
    assert server.value(0) == VALUES[0].tolist()
    assert not server.store.initialized(2)


@pytest.mark.parametrize(
    ("ids", "size", "told"),
    [
        *((ids, 16, "of this server, each once") for ids in ((0, 0), (5,), (4,), (0, 4))),
        ((0,), 11, "11 bytes does not hold the initial values of 1 variables"),
    ],
    ids=str,
)
def test_other_variables_are_refused(ids, size, told):
    """Twice the same, one that nobody has created, one that lives elsewhere; and a payload of another size."""
    with pytest.raises(InvalidRequest, match=told):
        Server().push(A, ids, Payload((), size)).result(0)


def test_a_large_value_is_taken_in_as_it_comes():
    """A server takes no more of it in than what it may have in flight."""
    large = np.zeros(4 * PART_BYTES, "int8")
    server, payload = Server([large]), Payload((), large.nbytes)
    server.push(A, (0,), payload)
    payload.add(0, as_bytes(large)[: 3 * PART_BYTES])
    told: list[str] = []
    assert payload.crowded(2 * PART_BYTES, lambda: told.append("there is room"))
    server.do()
    assert (payload.begin, told) == (3 * PART_BYTES, ["there is room"])
