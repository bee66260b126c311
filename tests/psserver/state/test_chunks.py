"""The state machine of batches that are handed out, by itself: who has which, and what is done."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psserver.state.chunks import MAX_NUMBER, ChunkQueue
from pswire.cluster import Task
from pswire.errors import ConfigError, InvalidRequest
from pswire.limits import MAX_CHUNKS
from pswire.model.chunks import ChunkAsk, Chunks
from pswire.model.log import Examples, Position
from tests.kit.cases import search

COUNT = 6


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
        return self.queue.hand_out(session, Task("worker", session), self.last[session])

    def resend(self, session: int) -> Chunks:
        return self.queue.hand_out(session, Task("worker", session), self.last[session])

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
    """Each once, to whoever asks; who finds nothing left is told so at once, though others still work."""
    assert [places(server.ask(1 + index % 2)) for index in range(COUNT)] == [[(0, index)] for index in range(COUNT)]
    over = server.ask(3)
    assert (over.chunks, over.over) == ((), True)
    assert places(server.ask(3, 1)) == [(1, 0)]


def test_a_question_that_is_asked_again_has_the_same_answer(server):
    """So no batch is lost with an answer; an older question is refused."""
    first = server.ask(1)
    assert server.resend(1) == first
    older = server.last[1]
    assert places(server.ask(1)) == [(0, 1)]
    with pytest.raises(InvalidRequest, match="question 1 about dataset 0 comes after question 2"):
        server.queue.hand_out(1, Task("worker", 1), older)


def test_what_is_not_done_at_a_sessions_end_is_handed_out_again(server):
    """First, and under another ticket; what it has told to be done is not."""
    first = server.ask(1)
    server.ask(1, done=(ticket(first),))
    server.queue.end(1)
    again = server.ask(2)
    assert places(again) == [(0, 1)]
    assert places(server.ask(2)) == [(0, 2)]
    assert ticket(again) not in (1, 2)


def test_what_may_still_be_applied_is_not_handed_out(server):
    """A session has ended, and a round of it is open: its batches wait until that is over."""
    server.ask(1)
    server.busy.add(1)
    server.queue.end(1)
    assert places(server.ask(2)) == [(0, 1)]
    server.busy.clear()
    assert places(server.ask(2)) == [(0, 0)]


def test_a_batch_comes_back_in_a_later_pass(server):
    """The others have nothing left in the pass, and do not wait: whoever is in the next one does it, before that."""
    server.ask(1)
    done = tuple(ticket(server.ask(2)) for _ in range(COUNT - 1))
    assert server.ask(2, done=done).over
    assert places(server.ask(2, 1)) == [(1, 0)]
    server.queue.end(1)
    assert server.look(epoch=1)[0] == Position(0, 0, COUNT, (whole(0),))
    assert places(server.ask(2, 1)) == [(0, 0)]
    assert places(server.ask(2, 1)) == [(1, 1)]


def test_a_ticket_counts_for_who_has_it(server):
    """What another session says to be done, or what was handed out again since, is not done."""
    first = server.ask(1)
    server.ask(2, done=(ticket(first),))
    server.queue.end(1)
    assert places(server.ask(2)) == [(0, 0)]
    assert server.look()[0].returned == (whole(0), whole(1))


def test_what_a_worker_has_ahead_goes_back(server):
    """A pass that one worker has broken off goes on for the others; of one that all have, nothing is owed."""
    ahead = server.ask(1)
    assert places(server.ask(2)) == [(0, 1)]
    server.ask(1, 1, back=(ticket(ahead),))
    assert places(server.ask(2)) == [(0, 0)]
    assert places(server.ask(2, 1)) == [(1, 1)]
    server.queue.end(2)
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


def test_one_worker_alone_has_half_of_what_is_left_ahead(server):
    """Of 20 that are left, less two: nobody else could do it earlier."""
    first = server.ask(1, count=21)
    assert len(server.ask(1, count=21, needs=False, want=16, done=(ticket(first),)).chunks) == 9


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


def test_a_dataset_stands_at_what_was_not_done(server):
    """Its low mark, and what is missing before it, whoever has it."""
    taken = [server.ask(1 + index % 3) for index in range(4)]
    server.ask(1, want=0, done=(ticket(taken[0]),))
    server.queue.end(2)
    assert server.look() == (Position(0, 0, 4, (whole(1), whole(2), whole(3))),)


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
    """It began, and nothing is said of it."""
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


def test_datasets_of_different_lengths_are_refused(server):
    """A number would name other examples in another worker."""
    server.ask(1)
    with pytest.raises(
        ConfigError, match=r"dataset 0 has 7 batches in a pass for /job:worker/task:2, and 6 for others"
    ):
        server.ask(2, count=7)


def test_what_is_no_question_is_refused(server):
    """So that no client makes the queue hold what nobody needs."""
    with pytest.raises(InvalidRequest, match="at most 16 are handed out at a time"):
        server.ask(1, want=MAX_CHUNKS + 1)
    for said in ({"epoch": MAX_NUMBER + 1}, {"count": MAX_NUMBER + 1}, {"begins": (Position(0, 0, MAX_NUMBER + 1),)}):
        with pytest.raises(InvalidRequest, match="above"):
            server.ask(2, **said)


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
        self.server.queue.end(session)
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


TestModel = Model.TestCase
TestModel.settings = search()
