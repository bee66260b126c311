"""Batches that are handed out: the state machine by itself, and on a server that makes rounds."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from psserver.effects import Reply
from psserver.services.chunks import MAX_NUMBER, ChunkQueue
from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, InvalidRequest
from pswire.limits import MAX_CHUNKS
from pswire.model.chunks import ChunkAsk, Chunks
from pswire.model.log import Approved, Examples, Position
from pswire.servers.chunks import AssignBatchesRequest
from tests.kit import rig
from tests.kit.cases import search
from tests.kit.rig import WORKERS

COUNT = 6
GONE = Fenced("its lease ended")


def whole(index: int) -> Examples:
    return Examples(index, 0, 0)


class Server:
    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.queue = ChunkQueue(lambda session: session in self.busy)
        self.last: dict[int, ChunkAsk] = {}

    def ask(self, session: int, epoch: int = 0, count: int = COUNT, **said) -> Chunks:
        number = self.last[session].number + 1 if session in self.last else 1
        self.last[session] = ChunkAsk(0, number, epoch, count, **{"want": 1, "needs": True, "restores": 1, **said})
        return self.resend(session)

    def resend(self, session: int) -> Chunks:
        return self.assign(session, self.last[session])

    def assign(self, session: int, ask: ChunkAsk) -> Chunks:
        (reply,) = self.queue.assign_batches(Task("worker", session), AssignBatchesRequest(session, ask), Future())
        assert isinstance(reply, Reply)
        return reply.value

    def look(self, session: int = 99, **said) -> tuple[Position, ...]:
        return self.ask(session, want=0, needs=False, looks=True, **said).positions


@pytest.fixture
def server() -> Server:
    return Server()


def places(answer: Chunks) -> list[tuple[int, int]]:
    return [(chunk.epoch, chunk.examples.index) for chunk in answer.chunks]


def ticket(answer: Chunks) -> int:
    return answer.chunks[0].ticket


def test_batches_come_in_order_and_the_end_waits_for_nobody(server):
    """Each once, to whoever asks; who finds nothing left is told so at once, though others still work. A question that
    is asked again has the same answer, so that no batch is lost with one; an older question is refused."""
    for index in range(COUNT):
        answer = server.ask(1 + index % 2)
        assert places(answer) == [(0, index)]
        assert server.resend(1 + index % 2) == answer
    over = server.ask(3)
    assert (over.chunks, over.over) == ((), True)
    older = server.last[3]
    assert places(server.ask(3, 1)) == [(1, 0)]
    with pytest.raises(InvalidRequest, match="request 1 for dataset 0 arrived after request 2"):
        server.assign(3, older)


def test_what_a_worker_has_ahead_goes_back(server):
    """A pass that one worker has broken off goes on for the others; of one that all have, nothing is owed."""
    ahead = server.ask(1)
    assert places(server.ask(2)) == [(0, 1)]
    server.ask(1, 1, back=(ticket(ahead),))
    assert places(server.ask(2)) == [(0, 0)]
    assert places(server.ask(2, 1)) == [(1, 1)]
    server.queue.session_ended(2, GONE)
    assert places(server.ask(1, 1)) == [(1, 1)]
    assert server.look(epoch=1) == (Position(0, 1, 2, (whole(0), whole(1))),)


def test_nobody_has_more_ahead_than_it_will_come_to_do(server):
    """Half of its share of what is left, less two for each worker, by how many were handed out since it asked last."""
    count = 40
    assert len(server.ask(1, count=count, needs=False).chunks) == 0  # nothing is known of it
    slow, fast = server.ask(1, count=count), server.ask(2, count=count)
    for _ in range(8):
        fast = server.ask(2, count=count, done=(ticket(fast),))
    # 10 were handed out while the slow one has done one, and 30 are left: it will come to do 3.
    slow = server.ask(1, count=count, needs=False, want=4, done=(ticket(slow),))
    assert len(slow.chunks) == 1
    for _ in range(19):
        fast = server.ask(2, count=count, done=(ticket(fast),))
    slow = server.ask(1, count=count, needs=False, want=4, done=(ticket(slow),))
    assert slow == Chunks((), False)  # 10 are left, and 20 were handed out
    assert len(server.ask(1, count=count, want=4).chunks) == 1  # but who has none gets one
    alone = Server()  # of 20 that are left, less two: nobody else could do it earlier
    first = alone.ask(1, count=21)
    assert len(alone.ask(1, count=21, needs=False, want=16, done=(ticket(first),)).chunks) == 9


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 80), st.integers(1, 3))
@search(3)
def test_the_end_waits_for_one_batch_of_the_slowest(speeds, count, passes):
    """Whatever they are: whoever begins a batch does so before anybody has found that nothing is left."""
    server, clock = Server(), [(0, session) for session in range(len(speeds))]
    ahead, using = [[] for _ in speeds], [[] for _ in speeds]
    at, ends = [0] * len(speeds), {}
    while clock:
        now, session = heappop(clock)
        done, using[session] = tuple(chunk.ticket for chunk in using[session]), []
        said = {"epoch": at[session], "count": count}
        if not ahead[session]:
            answer = server.ask(session, want=2, done=done, **said)
            ahead[session] += answer.chunks
            done = ()
        if not ahead[session]:
            ends.setdefault(at[session], now)
            at[session] += 1
            if at[session] < passes:
                heappush(clock, (now, session))
            continue
        chunk = ahead[session].pop(0)
        assert now <= ends.get(chunk.epoch, now)
        using[session] = [chunk]
        ahead[session] += server.ask(session, needs=False, done=done, **said).chunks
        heappush(clock, (now + speeds[session], session))


# ---- Where a dataset stands ----


def test_a_dataset_that_is_done_stands_at_its_next_pass(server):
    """Also where nobody has asked for that one yet; before the first question it stands where the asker began."""
    assert server.look(begins=(Position(0, 3, 4),)) == (Position(0, 3, 4),)
    done = ticket(server.ask(1, 3)), ticket(server.ask(1, 3))
    assert server.ask(1, 3, done=done).over
    assert server.look() == (Position(0, 4, 0),)
    assert server.ask(1, 2).over  # it is behind the dataset


def test_a_dataset_begins_where_the_first_worker_says(server):
    """Maybe in two passes, and in parts of batches; what others say is of no account."""
    part = Examples(2, 1, 3)
    begins = Position(0, 0, COUNT, (part,)), Position(0, 1, 4, (whole(3),))
    assert places(server.ask(1, 1, begins=begins)) == [(0, 2)]
    assert places(server.ask(2, 1, begins=(Position(0, 0, 0),))) == [(1, 3)]
    assert places(server.ask(2, 1)) == [(1, 4)]
    assert server.look()[0].returned == (part,)


def test_a_pass_between_two_that_are_not_done_is_not_done_again(server):
    begins = Position(0, 2, COUNT, (whole(1),)), Position(0, 4, 0)
    assert places(server.ask(1, 2, begins=begins)) == [(2, 1)]
    assert server.ask(1, 2).over
    assert server.ask(1, 3) == Chunks((), True)
    assert places(server.ask(1, 4)) == [(4, 0)]


def test_a_restore_begins_it_anew_once(server):
    """With the first worker that has restored. Who has not yet gets nothing until it has; who came late does."""
    ahead = server.ask(1)
    server.ask(2, 5)
    back = (Position(0, 0, 3),)
    assert places(server.ask(1, 0, restores=2, begins=back, done=(ticket(ahead),))) == [(0, 3)]
    assert server.ask(2, 5) == Chunks((), True)
    assert places(server.ask(3, 0, restores=0)) == [(0, 4)]
    assert places(server.ask(2, 0, restores=2, begins=back)) == [(0, 5)]
    assert server.look(restores=2) == (Position(0, 0, 6, (whole(3), whole(4), whole(5))),)


# ---- What is refused ----


def test_what_is_no_question_is_refused(server):
    """So that no client makes the queue hold what nobody needs; and datasets of different lengths, in which a number
    would name other examples."""
    with pytest.raises(InvalidRequest, match="the limits are 16 per request"):
        server.ask(1, want=MAX_CHUNKS + 1)
    for said in ({"epoch": MAX_NUMBER + 1}, {"count": MAX_NUMBER + 1}, {"begins": (Position(0, 0, MAX_NUMBER + 1),)}):
        with pytest.raises(InvalidRequest, match="above"):
            server.ask(2, **said)
    server.ask(1)
    told = r"dataset 0 has 7 batches per epoch on /job:worker/task:2, but 6 on other workers"
    with pytest.raises(ConfigError, match=told):
        server.ask(2, count=7)


def test_a_long_job_holds_no_passes(server):
    """Those that are done are forgotten, also where one worker has never come to them."""
    server.ask(2)
    for epoch in range(50):
        while not (answer := server.ask(1, epoch)).over or answer.chunks:
            server.ask(1, epoch, want=0, done=tuple(chunk.ticket for chunk in answer.chunks))
        server.ask(2, want=0, done=(1,))
    assert len(server.queue._datasets[0].passes) <= 1


# ---- Whatever happens ----


class Model(RuleBasedStateMachine):
    """Workers come, ask, do what they have, say so or not, and die; a pass is over for who is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.epoch: dict[int, int] = {}
        self.has: dict[int, list] = {}
        self.applied: Counter[tuple[int, int]] = Counter()
        self.told: dict[int, list[int]] = {}
        self.next = 1
        self.begun = 0

    @rule()
    @precondition(lambda self: len(self.epoch) < 4)
    def come(self) -> None:
        *before, last = self.server.look()
        at = before[-1].epoch if before and not (last.index or last.returned) else last.epoch
        self.epoch[self.next], self.has[self.next], self.told[self.next] = at, [], []
        self.next += 1

    @rule(data=st.data(), want=st.integers(1, 4), needs=st.booleans(), again=st.booleans())
    @precondition(lambda self: self.epoch)
    def ask(self, data, want, needs, again) -> None:
        self._ask(data.draw(st.sampled_from(sorted(self.epoch))), want, needs)
        if again:
            session = data.draw(st.sampled_from(sorted(self.epoch)))
            if session in self.server.last:
                self.server.resend(session)

    def _ask(self, session: int, want: int, needs: bool) -> None:
        epoch = self.epoch[session]
        done, self.told[session] = tuple(self.told[session]), []
        answer = self.server.ask(session, epoch, want=want, needs=needs, done=done)
        self.begun = max(self.begun, epoch)
        assert len(answer.chunks) <= want
        assert all(chunk.epoch <= epoch for chunk in answer.chunks)
        self.has[session] += answer.chunks
        if needs and not answer.chunks:
            assert answer.over
            if not self.has[session]:
                self.epoch[session] += 1

    @rule(data=st.data(), says=st.booleans())
    @precondition(lambda self: any(self.has.values()))
    def do(self, data, says) -> None:
        session = data.draw(st.sampled_from(sorted(session for session, has in self.has.items() if has)))
        self._do(session, says)

    def _do(self, session: int, says: bool) -> None:
        """Its round is applied: the queue learns it at once, or when the worker asks next."""
        chunk = self.has[session].pop(0)
        self.applied[chunk.epoch, chunk.examples.index] += 1
        self.told[session].append(chunk.ticket)
        if not says:
            worker = self.server.queue._workers[session]
            self.server.queue._do(session, worker, chunk.ticket)

    @rule(data=st.data())
    @precondition(lambda self: self.epoch)
    def die(self, data) -> None:
        """What it has done is known, as that of all whose rounds server 0 applies."""
        session = data.draw(st.sampled_from(sorted(self.epoch)))
        if session in self.server.last:
            self.server.ask(session, self.epoch[session], want=0, done=tuple(self.told[session]))
        self.server.queue.session_ended(session, GONE)
        for rows in (self.epoch, self.has, self.told):
            rows.pop(session)

    @invariant()
    def no_two_have_the_same(self) -> None:
        held = [(chunk.epoch, chunk.examples) for has in self.has.values() for chunk in has]
        assert len(set(held)) == len(held)

    @invariant()
    def nothing_is_done_twice(self) -> None:
        assert not self.applied or max(self.applied.values()) == 1

    @invariant()
    def a_checkpoint_has_what_is_not_done(self) -> None:
        missing = Counter[tuple[int, int]]()
        found = self.server.look()
        assert [each.epoch for each in found] == sorted({each.epoch for each in found})
        for each in found:
            missing.update((each.epoch, one.index) for one in each.returned)
            missing.update((each.epoch, index) for index in range(each.index, COUNT))
        told_later = {(e, i) for e, i in self.applied if (e, i) in missing}
        unknown = {ticket for told in self.told.values() for ticket in told}
        assert len(told_later) <= len(unknown)
        every = {(epoch, index) for epoch in range(found[-1].epoch + 1) for index in range(COUNT)}
        assert every == set(missing) | set(self.applied)

    def teardown(self) -> None:
        """Who comes back does the rest, with those who are left: each batch of each pass that was begun counts once."""
        self.come()
        while min(self.epoch.values(), default=0) <= self.begun or any(self.has.values()):
            for session in list(self.epoch):
                while self.has[session]:
                    self._do(session, True)
                if self.epoch[session] <= self.begun:
                    self._ask(session, 2, True)
        assert self.applied == {(epoch, index): 1 for epoch in range(self.begun + 1) for index in range(COUNT)}


def test_whatever_happens_to_batches():
    """Each is done once in its pass, no two workers have the same, and a checkpoint has what is not done."""
    run_state_machine_as_test(Model, settings=search())


BATCHES = 10


@pytest.fixture
def job(tmp_path):
    with rig.serving("core", 2, tmp_path) as servers:
        yield rig.Job(servers)


class Asker:
    """An asynchronous worker that asks server 0 for batches, and pushes."""

    def __init__(self, worker):
        self.worker, self.number, self.has = worker, 0, ()

    def _asked(self, **said):
        self.number += 1
        ask = ChunkAsk(0, self.number, 0, BATCHES, restores=1, **said)
        return self.worker.job.verbs[0].assign_batches(self.worker.session, ask).result(rig.SOON)

    def ask(self):
        answer = self._asked(want=1, needs=True)
        self.has = answer.chunks or self.has
        return [chunk.examples.index for chunk in answer.chunks]

    def stands(self):
        (found,) = self._asked(looks=True).positions
        return found

    def push(self, plan, server=0):
        chunks = tuple(chunk.ticket for chunk in self.has)
        future = self.worker.push(plan, [np.ones(2)], server=server, chunks=chunks)
        self.worker.round += 1
        return future


@pytest.fixture
def two(job):
    return [Asker(worker) for worker in job.join(WORKERS[0], WORKERS[1], mode="async")]


@pytest.fixture
def adds(job, two):
    v = job.variable(two[0].worker, np.zeros(2))
    return job.approve(rig.sum_into(v), two[0].worker)


def test_a_batch_is_done_once_its_round_is_applied(job, two, adds):
    """Whatever becomes of its worker then; before that it is handed out again."""
    one, other = two
    assert one.ask() == [0]
    one.push(adds).result(rig.SOON)
    assert one.ask() == [1]
    assert other.stands() == Position(0, 0, 2, (Examples(1, 0, 0),))
    job.servers.spend(12, other.worker.session, job.opened.session)
    assert [other.ask() for _ in range(3)] == [[1], [2], [3]]


def test_a_round_that_updates_nothing_does_no_batch(job, two, adds):
    """A step may look at the loss first."""
    looks = job.approve(rig.reduce_only(job.variables[0].spec.tensor), two[0].worker)
    two[0].ask()
    two[0].push(looks).result(rig.SOON)
    assert two[1].stands().returned == (Examples(0, 0, 0),)
    two[0].push(adds).result(rig.SOON)
    assert two[1].stands().returned == ()


def test_a_round_that_may_still_be_applied_keeps_its_batch(job, two, adds):
    """Its worker is lost, and its contribution is whole, but for the approval of its plan."""
    one, other = two
    v = job.variable(one.worker, np.zeros(2))
    late = rig.sum_into(v)
    one.ask()
    one.worker.job.verbs[0].propose(one.worker.session, late, "", None)
    one.push(late)
    job.servers.spend(12, other.worker.session, job.opened.session)
    assert other.ask() == [1]
    job.append(Approved(late))
    assert job.value(other.worker, v).tolist() == [1, 1]
    assert other.ask() == [2]
    assert other.stands().returned == (Examples(1, 0, 0), Examples(2, 0, 0))


def test_who_is_gone_gets_no_batch(job, two):
    """And a server that keeps no log hands out none. What the job before was handed out is nothing to a new one."""
    one, other = two
    assert one.ask() == [0]
    job.servers.spend(12, other.worker.session, job.opened.session)
    with pytest.raises(Fenced):
        one.ask()
    with pytest.raises(InvalidRequest, match="only server 0 assigns batches"):
        job.verbs[1].assign_batches(other.worker.session, ChunkAsk(0, 1, 0, BATCHES))
    job.begin()
    (one,) = job.join(WORKERS[0], mode="async")
    assert Asker(one).ask() == [0]
