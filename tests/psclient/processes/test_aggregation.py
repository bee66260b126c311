"""Sums of a host's workers, in one process: whatever goes wrong, each contribution is answered, and as it should be."""

from __future__ import annotations

import gc
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from psclient._src.processes.aggregation import follower
from psclient._src.processes.aggregation.follower import LeaderConnection
from psclient._src.processes.aggregation.host_group import PARTS, HostGroup
from psclient._src.processes.aggregation.host_role import HostRole
from psclient._src.processes.aggregation.leader import AT_ONCE, Leader
from psclient._src.processes.aggregation.link import HEAD, HostLink, LinkLost, LinkMessage
from psclient._src.processes.aggregation.sums import OwnPush, sum_of
from pswire.api import Contribution, RoundReply, RowRead
from pswire.cluster import Task
from pswire.errors import PSError, PushAgain
from pswire.model.compression import Codec
from pswire.model.log import Generation, Member
from pswire.model.plan import PlacedVariable, Plan, Reduction, VariableSpec
from pswire.model.tensor import Array, TensorSpec
from pswire.network.payload import Payload
from tests.kit.rig import eventually
from tests.kit.strategies import refused

MEMBERS = tuple(Member(Task("worker", number), number + 1, 1) for number in range(3))
GENERATION = Generation(1, MEMBERS)
NUMBERS = count()
LONG = 20.0


@dataclass
class Server:
    """Takes sums; `answer` answers them."""

    sums: list[tuple[int, Contribution, Payload, Future[RoundReply]]] = field(default_factory=list)

    def push(self, server: int, said: Contribution, payload: Payload) -> Future[RoundReply]:
        future: Future[RoundReply] = Future()
        self.sums.append((server, said, payload, future))
        return future

    def until(self, number: int) -> None:
        eventually(lambda: len(self.sums) == number)

    def answer(self, number: int, value: float, size: int) -> None:
        array = np.full(size, value, np.float32)
        said, future = self.sums[number][1], self.sums[number][3]
        future.set_result(RoundReply(said.round, GENERATION, False, (), Payload.pack([array])))


@dataclass
class Worker:
    """A worker of the host, and what it pushed by itself."""

    session: int
    group: HostGroup
    singly: list[int] = field(default_factory=list)

    def push(self, round: int, size: int = 4, server: int = 0, value: float | None = None, **said: Any) -> OwnPush:
        spec = TensorSpec("float32", (size,))
        plan = said.pop("plan", Plan(reductions=(Reduction("sum", spec, (0, 1)),)))
        payload = said.pop("payload", Payload.pack([np.full(size, value or self.session, np.float32)]))
        whole = {"weights": (1.0,), "host": 7, "want": (0,), **said}
        contribution = Contribution(self.session, 1, round, plan.id, **whole)

        def singly() -> Future[RoundReply]:
            self.singly.append(round)
            answer: Future[RoundReply] = Future()
            answer.set_result(RoundReply(round, GENERATION, False, (), Payload.pack([np.full(size, -1, np.float32)])))
            return answer

        own = OwnPush(server, contribution, payload, plan, GENERATION.by_session, singly)
        future = self.group.push(own)
        return own if future is own.future else replace(own, future=future)

    @property
    def place(self) -> HostRole:
        """Its role for the only part of the servers that there is."""
        (found,) = self.group._roles
        return found

    @property
    def role(self) -> Any:
        return self.place._role

    def find_role(self) -> None:
        with self.place._lock:
            self.place._role_now()
        eventually(lambda: self.role is not None)

    def close(self) -> None:
        self.group.close()


def thread_of(worker: Worker) -> threading.Thread:
    """Returns the thread that receives for a worker."""
    return next(each for each in threading.enumerate() if getattr(each, "_target", None) == worker.role._run)


def held_in(monkeypatch: pytest.MonkeyPatch, reader: threading.Thread) -> tuple[threading.Event, threading.Event]:
    """Has a thread stand still where it copies an answer; returns what tells that it does, and what lets it go on."""
    reads, go, real = threading.Event(), threading.Event(), follower._copied

    def slowly(payload: Payload) -> Payload:
        if threading.current_thread() is reader:
            reads.set()
            assert go.wait(LONG)
        return real(payload)

    monkeypatch.setattr(follower, "_copied", slowly)
    return reads, go


def _variable(number: int) -> PlacedVariable:
    return PlacedVariable(number, VariableSpec(f"v{number}", TensorSpec("float32", (4,))), (0,))


@pytest.fixture
def make():
    made: list[Worker] = []

    def begin(number: int, lease: float = LONG) -> tuple[Any, ...]:
        """A server, and workers, of which the first leads and the others follow."""
        server = Server()
        job = f"{os.getpid()} {next(NUMBERS)}".encode()
        for session in range(1, number + 1):
            worker = Worker(session, HostGroup(job, session, lease, 1, server.push, _variable))
            made.append(worker)
            worker.find_role()
        assert isinstance(made[0].role, Leader)
        assert all(isinstance(worker.role, LeaderConnection) for worker in made[1:])
        return server, *made

    yield begin
    for worker in made:
        worker.close()
    eventually(lambda: not any(thread.name.startswith("host") for thread in threading.enumerate()))


def values(own: OwnPush) -> list[float]:
    """Returns the different elements of an answer."""
    payload = own.future.result(LONG).payload
    found: Array = np.concatenate([np.frombuffer(buffer, np.float32) for _, buffer in payload.chunks])
    return sorted(set(found.tolist()))


def summed(server: Server, leads: Worker, follows: Worker) -> list[float]:
    """Makes a first round of two, whose sum is answered with twos; returns what the second one has of it."""
    own = follows.push(0)
    leads.push(0)
    server.until(1)
    server.answer(0, 2.0, 4)
    return values(own)


def singly(*owns: OwnPush) -> bool:
    """Whether all of these were pushed by themselves."""
    return [values(own) for own in owns] == [[-1.0]] * len(owns)


def test_sums_are_sent_by_one_and_answered_to_all(make):
    server, *workers = make(3)
    for round, size in enumerate((4, AT_ONCE)):
        owns = [worker.push(round, size) for worker in workers]
        server.until(round + 1)
        _, said, payload, _ = server.sums[round]
        assert [part.session for part in said.parts] == [1, 2, 3]
        assert said.weights == (3.0,)
        assert set(np.frombuffer(payload.chunks[0][1], np.float32).tolist()) == {6.0}
        server.answer(round, 10.0 + round, size)
        assert [values(own) for own in owns] == [[10.0 + round]] * 3
    assert workers[0].group.summed == 6
    assert not any(worker.singly for worker in workers)


def test_a_worker_that_is_welcome_is_waited_for(make, monkeypatch):
    real, go = HostLink.introduce, threading.Event()

    def slowly(link: HostLink, kind: LinkMessage, call: int = 0) -> None:
        real(link, kind, call)
        if kind is LinkMessage.WELCOME:  # the other end goes on, and this one does not yet
            assert go.wait(LONG)

    monkeypatch.setattr(HostLink, "introduce", slowly)
    server, leads, follows = make(2)
    owns = [leads.push(0), follows.push(0)]
    go.set()
    server.until(1)
    server.answer(0, 3.0, 4)
    assert [values(own) for own in owns] == [[3.0]] * 2


def test_nobody_waits_for_what_was_pushed_before_a_role(make):
    """Of a round that any worker pushed by itself, before it had its role, nothing waits for it."""
    server, *workers = make(2)
    for late, other in (workers, reversed(workers)):
        late.role.decline(1, 20 + late.session)  # as it does when it has found its role
        own = other.push(20 + late.session, server=1)
        assert values(own) == [-1.0]
    job = f"{os.getpid()} {next(NUMBERS)}".encode()
    first = Worker(1, HostGroup(job, 1, LONG, 1, server.push, _variable))
    assert values(first.push(5)) == [-1.0]  # it has no role yet
    eventually(lambda: first.role is not None)
    second = Worker(2, HostGroup(job, 2, LONG, 1, server.push, _variable))
    second.find_role()
    assert values(second.push(5)) == [-1.0]
    owns = [second.push(6), first.push(6)]
    server.until(1)
    server.answer(0, 3.0, 4)
    assert [values(own) for own in owns] == [[3.0]] * 2
    for worker in (second, first):
        worker.close()


@pytest.mark.parametrize("how", ["leaves", "sends nonsense", "the leader leaves"])
def test_nothing_is_written_where_one_reads_whose_link_is_over(make, monkeypatch, how):
    """Though answers to older sums still come."""
    (server, leads, follows, third), size = make(3), 1 << 18
    first = follows.push(0, size)
    owns = [worker.push(0, size) for worker in (third, leads)]
    server.until(1)
    reads, go = held_in(monkeypatch, thread_of(follows))
    server.answer(0, 111.0, size)
    assert reads.wait(LONG)
    assert [values(own) for own in owns] == [[111.0]] * 2
    if how == "the leader leaves":
        owns = [worker.push(1, size) for worker in (follows, third, leads)]
        server.until(2)
        thread = thread_of(leads)
        leads.close()
        thread.join(LONG)
        server.answer(1, 222.0, size)
        go.set()
        assert values(first) == [111.0]
        assert values(owns[0]) == [-1.0]
        return
    if how == "leaves":
        follows.close()
    else:
        follows.role._link.sock.send(b"x")
        eventually(lambda: len(leads.role._links) == 1)
    owns = [worker.push(1, size) for worker in (third, leads)]
    gathers = leads.role._open
    eventually(lambda: len(server.sums) == 2 or ((0, 1) in gathers and len(gathers[0, 1].singles) == 2))
    if len(server.sums) == 2:  # who leads waits for nobody any more: not where its link seems to be there still
        server.answer(1, 222.0, size)
        assert [values(own) for own in owns] == [[222.0]] * 2
    go.set()
    assert values(first) == [111.0]
    server.until(2)
    if how == "leaves":
        server.answer(1, 222.0, size)
        assert [values(own) for own in owns] == [[222.0]] * 2
        own = third.push(2)  # it tells what it needs no more, too
        leads.push(2)
        server.until(3)
        server.answer(2, 5.0, 4)
        assert values(own) == [5.0]
        assert sum(each.size for each in leads.role._outbox.arena._entries.values()) < size


def test_a_message_that_finds_no_room_ends_the_link(make, monkeypatch):
    """A worker that reads nothing for long loses the link: it would wait for ever for the answer that was dropped."""
    server, leads, follows = make(2)
    own = follows.push(0)
    mine = leads.push(0)
    server.until(1)
    reads, go = threading.Event(), threading.Event()

    def slowly(message: object) -> None:
        reads.set()
        assert go.wait(LONG)

    monkeypatch.setattr(follows.role, "_handle", slowly)
    (link,) = leads.role._links
    link.tell(LinkMessage.SINGLY, 10**6)
    assert reads.wait(LONG)
    refused(LinkLost, "sending failed", lambda: _flood(link))
    server.answer(0, 1.0, 4)
    go.set()
    assert values(mine) == [1.0]
    assert values(own) == [-1.0]
    eventually(lambda: follows.role.lost)


def _flood(link: HostLink) -> None:
    while True:
        link.tell(LinkMessage.ALIVE)


def test_one_failure_keeps_nobody_waiting(make):
    """An answer that cannot be cut, and a push that raises, are each one's own."""
    server, leads, follows = make(2)
    own, other = leads.push(0, want=()), follows.push(0)
    server.until(1)
    server.answer(0, 1.0, 3)  # not the size of the variable
    assert values(other) == [1.0]  # it wants what all want: it is handed on as it is
    assert values(own) == [-1.0]

    spec = TensorSpec("float32", (4,))
    plan = Plan(reductions=(Reduction("sum", spec, (0, 1)),))

    def singly() -> Future[RoundReply]:
        raise RuntimeError("it cannot")

    said = Contribution(1, 1, 1, plan.id, (1.0,), host=7, want=(0,))
    broken = OwnPush(0, said, Payload.pack([np.ones(4, np.float32)]), plan, GENERATION.by_session, singly)
    other = follows.push(1)
    leads.group.push(broken)
    server.until(2)
    server.sums[1][3].set_exception(PushAgain("each by itself"))
    assert values(other) == [-1.0]
    refused(RuntimeError, "it cannot", lambda: broken.future.result(LONG))


def test_after_a_sum_that_was_of_no_use_a_few_are_not_made(make):
    server, leads, follows = make(2)
    made = []
    for round in range(40):
        before, owns = len(server.sums), [follows.push(round), leads.push(round)]
        eventually(lambda before=before, owns=owns: len(server.sums) > before or all(o.future.done() for o in owns))
        if len(server.sums) > before:
            made.append(round)
            server.sums[-1][3].set_exception(PushAgain("each by itself"))
        assert singly(*owns)
    assert made == [0, 2, 5, 10, 19, 36]


def test_what_comes_whole_too_late_is_pushed_by_itself(make):
    """After a later round, or at the end."""
    server, leads, follows = make(2)
    halves = [Payload(size=16) for _ in range(3)]
    owns = [follows.push(0), leads.push(0, payload=halves[0])]
    later = [worker.push(1) for worker in (leads, follows)]
    server.until(1)
    server.answer(0, 2.0, 4)
    assert [values(own) for own in later] == [[2.0]] * 2
    assert values(owns[0]) == [-1.0]
    last = [worker.push(2, payload=half) for worker, half in zip((leads, follows), halves[1:], strict=True)]
    assert not any(own.future.done() for own in (owns[1], *last))
    halves[0].add(0, memoryview(bytes(16)))
    assert values(owns[1]) == [-1.0]
    leads.close()
    assert singly(*last)
    for half in halves[1:]:
        half.add(0, memoryview(bytes(16)))
    assert (leads.singly, follows.singly) == ([0, 2], [0, 2])


def test_a_round_of_which_one_is_late_is_pushed_singly_after_the_lease(make):
    """A leader whose own contribution is the late one leads no more."""
    server, leads, follows, third = make(3, 0.5)
    owns = [worker.push(0) for worker in (leads, third)]
    assert singly(*owns)
    assert values(follows.push(0)) == [-1.0]  # late
    assert values(follows.push(1)) == [-1.0]
    eventually(lambda: leads.role.lost)
    assert not server.sums


def reduced(kind: str, **more: Any) -> dict[str, Any]:
    return {"plan": Plan(reductions=(Reduction(kind, TensorSpec("float32", (4,)), (0, 1), **more),))}


IN_NO_SUM: dict[str, dict[str, Any]] = {
    "lookups": {"lookups": (RowRead(0, b""),)},
    "hints": {"hints": (RowRead(0, b""),)},
    "batches that were handed out": {"chunks": (3,)},
    "rows": {"rows": (1,)},
    "compressed": reduced("sum", codec=Codec("fp16")),
    "first values": reduced("first"),
}


@pytest.mark.parametrize("more", IN_NO_SUM.values(), ids=IN_NO_SUM)
def test_others_do_not_wait_for_what_is_in_no_sum(make, more):
    server, leads, follows = make(2)
    for round, (special, plain) in enumerate(((leads, follows), (follows, leads))):
        before = plain.push(2 * round)
        assert singly(special.push(2 * round, **more), before, special.push(2 * round + 1, **more))
        eventually(lambda round=round: leads.role._decided.get(0, -1) == 2 * round + 1)
        assert values(plain.push(2 * round + 1)) == [-1.0]
    assert not server.sums


@pytest.mark.parametrize("values_of", [(1.0, np.nan), (np.inf, 1.0), (3e38, 3e38), None], ids=str)
def test_a_sum_that_is_not_finite_or_of_two_plans_is_not_sent(make, values_of):
    """A server says whose contribution it is, which a sum does not tell."""
    server, *workers = make(2)
    if values_of:
        owns = [worker.push(0, value=value) for worker, value in zip(workers, values_of, strict=True)]
    else:
        owns = [worker.push(0, size) for worker, size in zip(workers, (4, 5), strict=True)]
    assert singly(*owns)
    assert not server.sums


@contextmanager
def stranger(leads: Worker) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
        connected.connect(leads.place._names[0])
        connected.settimeout(LONG)
        yield connected


def assert_ends(connected: socket.socket) -> None:
    """The other end closes it; before, it may say that it lives."""
    assert {*iter(lambda: connected.recv(1), b"")} <= {bytes([LinkMessage.ALIVE])}


@pytest.mark.parametrize("message", [b"x", b"\x09" * 40, b"\x03" + bytes(39), None], ids=str)
def test_strangers_stop_nobody(make, message):
    """Nonsense, a message before the first one, and memory that is not sealed, which could shrink while it is read, end
    a link at once; silence ends it after a while."""
    server, leads, follows = make(2, 0.5)
    with stranger(leads) as connected:
        eventually(lambda: len(leads.role._links) == 2)
        if message:
            connected.send(message)
            assert_ends(connected)
        eventually(lambda: len(leads.role._links) == 1)
    with stranger(leads) as connected:
        file = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, 1 << 20)
        socket.send_fds(connected, [HEAD.pack(LinkMessage.HELLO, 0, 2, 0, 0, 0)], [file])
        os.close(file)
        assert_ends(connected)
    assert summed(server, leads, follows) == [2.0]
    assert not leads.role.lost


def test_a_process_with_many_files_follows(make):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert summed(*make(2)) == [2.0]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


KNOCK = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
    stranger.connect("\\0" + sys.argv[1])
    stranger.settimeout(20)
    print(stranger.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_is_sent_away(make, caplog):
    """As often as it comes; the log says so once a minute."""
    _, leads = make(1)
    name = leads.place._names[0][1:]
    for _ in range(3):
        found = subprocess.run([sys.executable, "-c", KNOCK, name], capture_output=True, text=True)
        assert found.stdout == "b''\n", found.stderr
    assert not leads.role._links
    assert caplog.text.count("rejected a connection to this host's local reduction from a process of another user") == 1


def test_memory_of_answers_and_contributions_is_used_again(make):
    """Of many rounds the two memories hold no more than what is under way."""
    (server, leads, follows), size = make(2), 1 << 16
    for round in range(20):
        own = follows.push(round, size)
        leads.push(round, size)
        server.until(round + 1)
        server.answer(round, float(round), size)
        assert values(own) == [float(round)]
        server.sums[round] = (0, *server.sums[round][1:2], Payload(), Future())
        del own
    gc.collect()
    for outbox in (leads.role._outbox, follows.role._outbox):
        assert sum(each.size for each in outbox.arena._entries.values()) <= 3 * 4 * size + 4096


def test_nothing_of_this_process_lies_between_the_tensors_of_a_sum(monkeypatch):
    """What is sent has no bytes that were there before: they may be anything."""
    specs = [TensorSpec("float32", (3,)), TensorSpec("float32", (5,)), TensorSpec("float64", (1,))]
    plan = Plan(reductions=tuple(Reduction("sum", spec, (0,)) for spec in specs))
    arrays = [np.ones(spec.shape, spec.dtype) for spec in specs]
    empty: Callable[..., Array] = np.empty
    monkeypatch.setattr(np, "empty", lambda *args, **keys: np.full_like(empty(*args, **keys), 0xAB))
    owns = [
        OwnPush(0, Contribution(s, 1, 0, plan.id, (1.0,) * 3, host=7), Payload.pack(arrays), plan, {}, _never)
        for s in (1, 2)
    ]
    found = sum_of(owns[0], owns)
    data = np.frombuffer(found[1].chunks[0][1], np.uint8)
    expected = np.zeros(found[1].size, np.uint8)
    for offset, buffer in Payload.pack([2 * array for array in arrays]).chunks:
        expected[offset : offset + len(buffer)] = np.frombuffer(buffer, np.uint8)
    assert data.tolist() == expected.tolist()


def _never() -> Future[RoundReply]:
    raise PSError("not asked for")


def test_who_leads_since_another_stood_still_follows_it_in_the_end(request):
    """A worker that comes meanwhile gets no answer, and leads. Later all are in one sum again."""
    server, job = Server(), f"{os.getpid()} {next(NUMBERS)}".encode()
    workers = [Worker(n, HostGroup(job, n, LONG, 1, server.push, _variable)) for n in (1, 2, 3)]
    for worker in workers:
        request.addfinalizer(worker.close)
    first, second, late = workers
    first.find_role()
    second.find_role()
    with first.role._lock:  # whoever needs it stands still
        late.find_role()
        assert isinstance(late.role, Leader)

    def follows() -> bool:
        late.find_role()
        return isinstance(late.role, LeaderConnection)

    eventually(follows)
    owns = [worker.push(0) for worker in workers]
    server.until(1)
    assert [part.session for part in server.sums[0][1].parts] == [1, 2, 3]
    server.answer(0, 3.0, 4)
    assert [values(own) for own in owns] == [[3.0]] * 3


SERVERS = 2 * PARTS + 1


def all_push(workers: list[Worker], server: Server, round: int) -> None:
    """Has each push to all servers, and ends the round: sums are answered as they come."""
    answered = len(server.sums)
    owns = [worker.push(round, server=number, plan=MANY) for number in range(SERVERS) for worker in workers]

    def is_over() -> bool:
        nonlocal answered
        while answered < len(server.sums):
            server.answer(answered, 3.0, 4)
            answered += 1
        return all(own.future.done() for own in owns)

    eventually(is_over)


def counts(workers: list[Worker]) -> list[int]:
    """Returns how many parts each of them leads."""
    return sorted(sum(isinstance(role._role, Leader) for role in worker.group._roles) for worker in workers)


MANY = Plan(reductions=(Reduction("sum", TensorSpec("float32", (4,)), tuple(range(SERVERS))),))


def test_each_worker_of_a_host_sends_to_its_share_of_the_servers(request):
    """They come one after the other, and leave; whoever is there shares the parts, and all is in sums again."""
    server, rounds, job = Server(), count(), f"{os.getpid()} {next(NUMBERS)}".encode()
    workers: list[Worker] = []

    def is_settled(expected: list[int]) -> bool:
        before = len(server.sums)
        all_push(workers, server, next(rounds))
        wholes = [said for _, said, _, _ in server.sums[before:] if len(said.parts) == len(workers)]
        return len(wholes) == SERVERS * (len(workers) > 1) and counts(workers) == expected

    for session in (1, 2, 3):
        workers.append(Worker(session, HostGroup(job, session, LONG, SERVERS, server.push, _variable)))
        request.addfinalizer(workers[-1].close)
        eventually(partial(is_settled, {1: [PARTS], 2: [4, 4], 3: [2, 3, 3]}[session]))
    assert all(worker.group.leads for worker in workers)
    sated = [worker for worker in workers if len(worker.group._led()) == 3]
    assert len(sated) == 2
    assert all(worker.group._lead(f"\0{os.getpid()} one more") is None for worker in sated)
    workers.pop(0).close()
    eventually(partial(is_settled, [4, 4]))
