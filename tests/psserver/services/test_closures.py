"""Closures: who runs which, what is over, and what is told to whom; and each of their rounds is made once."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from psserver.effects import Fail, Reply
from psserver.rounds.sequences import RECORDS
from psserver.services import closures as module
from psserver.services.closures import Closures
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, InvalidRequest, MemoryLimit, ProgramError, PushAgain
from pswire.limits import CLOSURE_LOSSES, CLOSURE_ROUNDS
from pswire.model.closures import ClosureName, ClosureOrder, ClosureResult, Piece
from pswire.model.consistency import ASYNC
from pswire.model.log import Generation, Member
from pswire.model.tensor import TensorSpec
from pswire.servers.closures import FetchRequest, ScheduleRequest, TakeRequest
from tests.kit.cases import search
from tests.kit.contributions import RoundsByHand
from tests.kit.rig import WORKERS, reduce_only

CHIEF, FUNCTIONS = Task("chief", 0), ("f(x)", "g()")
GONE = Fenced("its lease ended")
ARGUMENTS, RESULT = b"arguments!", b"result"


def piece(data: bytes, first: int = 0, last: int | None = None) -> Piece:
    return Piece(len(data), first, data[first:last])


class Server:
    def __init__(self) -> None:
        self.closures = Closures(lambda *view: None)

    def carry_out(self, effects):
        for effect in effects:
            if isinstance(effect, Reply):
                effect.future.set_result(effect.value)
            elif isinstance(effect, Fail):
                effect.future.set_exception(effect.error)

    def call(self, verb, task, asked):
        future = Future()
        self.carry_out(verb(task, asked, future))
        return future

    def schedule(self, order, session=1, task=CHIEF):
        return self.call(self.closures.schedule, task, ScheduleRequest(session, order))

    def take(self, session, result=None, offset=0, functions=FUNCTIONS):
        asked = TakeRequest(session, functions, result, offset)
        return self.call(self.closures.take, Task("worker", session - 10), asked)

    def fetch(self, number, offset=0, session=1):
        return self.call(self.closures.fetch, CHIEF, FetchRequest(session, number, offset))

    def end(self, session):
        self.carry_out(self.closures.session_ended(session, GONE))

    def begin(self, session=1, functions=FUNCTIONS):
        return self.schedule(ClosureOrder(functions=functions), session)

    def add(self, number, needs=(), told=0, data=ARGUMENTS, session=1):
        return self.schedule(ClosureOrder(number, "f", needs, piece(data), told=told), session)

    def finish(self, session, number, kind="", data=RESULT):
        content = Piece() if kind else piece(data)
        return self.take(session, ClosureResult(number, content, kind, f"text of {kind}" if kind else ""))


@pytest.fixture
def server():
    server = Server()
    assert server.begin().result().number == 0
    return server


def number_of(taken):
    return taken.result().name.number


def test_closures_are_run_in_order_by_who_has_waited_the_longest(server):
    """Workers that wait get the next one each; a worker has one at a time. A closure of a lost worker goes back to its
    old place, and its name says that it was begun."""
    first, second = server.take(10), server.take(11)
    assert not first.done()
    assert server.add(1).result().number == 1
    assert number_of(first) == 1
    assert first.result().arguments.data == ARGUMENTS
    server.add(2)
    server.add(3)
    assert number_of(second) == 2
    server.add(4)
    server.end(10)
    again = server.finish(11, 2)
    assert number_of(again) == 1
    assert again.result().name.begun == (1,)
    assert again.result().name.version > first.result().name.version
    assert number_of(server.finish(11, 1)) == 3
    assert number_of(server.finish(11, 3)) == 4
    assert not server.finish(11, 4).done()


def test_arguments_and_results_come_in_pieces(server):
    """Pieces may come again; what begins anew after an interruption takes the place of the other."""
    half = ClosureOrder(1, "f", (), piece(ARGUMENTS, 0, 4))
    assert server.schedule(half).result().queued == 1
    assert server.schedule(half).result().queued == 1
    worker = server.take(10)
    assert not worker.done()
    server.schedule(ClosureOrder(1, "f", (), piece(b"others", 0, 2)))
    assert not worker.done()
    server.schedule(ClosureOrder(1, "f", (), piece(b"others", 2)))
    assert worker.result().arguments == piece(b"others")
    assert server.take(10, offset=4).result().arguments == piece(b"others", 4)
    told = [ClosureResult(1, piece(RESULT, 0, 2)), ClosureResult(1, piece(RESULT, 2))]
    assert server.take(10, told[0]).result().name is None
    assert server.take(10, told[0]).result().name is None
    assert not server.take(10, told[1]).done()
    assert server.fetch(1, 3).result().result == piece(RESULT, 3)
    server.schedule(ClosureOrder(2, "f", (), piece(b"truncated", 0, 2)))
    join = server.schedule(ClosureOrder(joins=True))
    assert not join.done()
    server.schedule(ClosureOrder(dropped=(2,)))  # it will not come whole
    assert join.result().number == 2
    with pytest.raises(InvalidRequest, match="follows"):
        server.schedule(ClosureOrder(3, "f", (), Piece(9, 4, b"x"))).result()


def test_a_failure_cancels_what_waits_and_is_told_once(server):
    """What runs is run to its end, if its worker lives; nothing is taken before the coordinator was told."""
    for number in range(1, 5):
        server.add(number)
    for session in (10, 11, 12):
        server.take(session)
    join = server.schedule(ClosureOrder(joins=True))
    server.finish(10, 1, "ValueError")
    server.end(12)
    assert not join.done()  # one is run
    assert [server.fetch(number).result(0).state for number in (3, 4)] == ["cancelled"] * 2
    refused = server.add(5).result()
    assert refused.number == 4
    assert refused.failure.text == "text of ValueError"
    assert refused.failure.task == str(Task("worker", 0))
    server.finish(11, 2, "KeyError")  # a part of the same failure
    assert join.result().failure.kind == "ValueError"
    assert join.result().failures == 1
    state = server.add(5, told=1).result()
    assert state.number == 5
    assert state.failure is None
    assert server.fetch(1).result().failure.kind == "ValueError"
    assert server.fetch(2).result().failure.kind == "KeyError"


def test_the_queue_is_bounded(server, monkeypatch):
    """The call that schedules one too many waits; arguments that can never be held are refused."""
    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    monkeypatch.setattr(module, "CLOSURE_BYTES", 45)
    server.add(1)
    server.add(2)
    late = server.add(3)
    assert not late.done()
    server.take(10)
    assert late.result().number == 3
    with pytest.raises(MemoryLimit, match="and the limit is"):
        server.add(4, data=b"x" * 100).result()
    assert not server.add(4, data=b"x" * 20).done()  # of bytes there is no room either


def test_results_that_are_not_let_go_of_fill_the_memory(server, monkeypatch):
    """A result without room is a failure; where nothing else would make room, so is scheduling."""
    monkeypatch.setattr(module, "CLOSURE_BYTES", 40)
    server.add(1)
    server.take(10)
    server.finish(10, 1, data=b"x" * 35)
    with pytest.raises(MemoryLimit, match="fetch their RemoteValues"):
        server.add(2).result()
    assert server.schedule(ClosureOrder(2, "f", (), piece(ARGUMENTS), dropped=(1,))).result().number == 2
    server.finish(10, 2, data=b"x" * 45)
    assert server.fetch(2).result().failure.kind == "MemoryLimit"
    assert server.closures._nbytes == 0


def test_a_closure_that_ends_its_workers_fails(server):
    server.add(1)
    for session in range(10, 10 + CLOSURE_LOSSES):
        assert number_of(server.take(session)) == 1
        server.end(session)
    assert server.schedule(ClosureOrder()).result().failure.kind == "WorkerLost"
    assert not server.take(50).done()


def test_other_functions_are_refused_and_both_are_told(server):
    """Whoever comes first; a worker that comes back with others is refused alone."""
    waiting = server.take(10, functions=("h()",))
    with pytest.raises(
        ConfigError, match=r"only /job:worker/task:0 has h\(\); only /job:chief/task:0 has f\(x\), g\(\)"
    ):
        waiting.result()
    with pytest.raises(ConfigError, match="have registered different functions"):
        server.schedule(ClosureOrder(joins=True)).result()
    early = Server()
    waiting = early.take(11, functions=("h()",))
    with pytest.raises(ConfigError, match="different functions"):
        early.begin().result()
    with pytest.raises(ConfigError, match="different functions"):
        waiting.result()
    later = Server()
    later.begin()
    later.take(10)
    later.end(10)
    with pytest.raises(ConfigError, match="different functions"):
        later.take(10, functions=("h()",)).result()
    assert later.add(1).result().number == 1


def test_who_may_do_what(server):
    """Chiefs schedule, workers run, and each speaks for itself."""
    with pytest.raises(InvalidRequest, match="only the chief can"):
        server.schedule(ClosureOrder(1, "f"), session=10, task=Task("worker", 0))
    with pytest.raises(InvalidRequest, match="has not registered"):
        server.schedule(ClosureOrder(1, "f"), session=2)
    with pytest.raises(InvalidRequest, match="is not a worker"):
        server.closures.take(CHIEF, TakeRequest(1, FUNCTIONS), Future())
    with pytest.raises(InvalidRequest, match="scheduled after closure 0"):
        server.add(2)
    with pytest.raises(InvalidRequest, match="closure 7 has no result"):
        server.fetch(7)
    with pytest.raises(InvalidRequest, match="there were 0"):
        server.schedule(ClosureOrder(told=1))


def test_a_coordinator_that_is_gone(server):
    """What it scheduled is dropped but for what is run; the next one has other numbers; a clean end ends all."""
    for number in range(1, 4):
        server.add(number)
    server.take(10)
    idle = server.take(11)
    assert number_of(idle) == 2
    server.end(1)
    waiting = server.finish(11, 2)
    assert not waiting.done()
    assert server.begin(session=2).result().number == 3
    assert server.add(4, session=2).result().number == 4
    assert number_of(waiting) == 4
    assert not server.finish(10, 1).done()
    server.carry_out(server.closures.task_left(CHIEF))
    assert server.finish(11, 4).result().over
    assert server.closures._begun == set()


class Walk(RuleBasedStateMachine):
    """Any order of calls and ends, each call perhaps twice."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.server.begin()
        self.number = self.told = 0
        self.state: dict[int, str] = {}
        self.waiting: dict[int, Future] = {}
        self.held: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.needs: dict[int, tuple[int, ...]] = {}
        self.failed = False

    def look(self) -> None:
        for session, future in list(self.waiting.items()):
            if future.done():
                del self.waiting[session]
                name = future.result().name
                assert self.state[name.number] == "queued"
                self.state[name.number] = "running"
                assert name.version > self.newest.get(name.number, 0)  # of two that had it the later one is known
                self.newest[name.number] = name.version
                self.held[session] = name.number

    @precondition(lambda self: self.number < 12)
    @rule(twice=st.booleans(), data=st.data())
    def schedule(self, twice, data):
        needs = tuple(sorted(data.draw(st.sets(st.integers(1, self.number), max_size=2)))) if self.number else ()
        for _ in range(1 + twice):
            answer = self.server.add(self.number + 1, needs, self.told).result()
        if self.failed:
            assert answer.number == self.number
            self.told, self.failed = answer.failures, False
            return
        self.number += 1
        assert answer.number == self.number
        self.state[self.number], self.needs[self.number] = "queued", needs
        self.look()

    @rule(session=st.integers(10, 13), twice=st.booleans())
    def take(self, session, twice):
        if session in self.held:  # the answer was lost
            assert number_of(self.server.take(session)) == self.held[session]
        if session in self.waiting or session in self.held:
            return
        for _ in range(1 + twice):
            future = self.server.take(session)
            self.waiting[session] = future
            self.look()
            if session in self.held:
                break

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.integers(0, 4), twice=st.booleans())
    def finish(self, data, fails, twice):
        session = data.draw(st.sampled_from(sorted(self.held)))
        number = self.held.pop(session)
        self.state[number] = "failed" if fails == 0 else "done"
        if fails == 0:
            self.failed = True
            for other, state in self.state.items():
                if state == "queued":
                    self.state[other] = "cancelled"
        for _ in range(1 + twice):
            future = self.server.finish(session, number, "E" if fails == 0 else "")
            if session in self.held:
                assert number_of(future) == self.held[session]
                break
            self.waiting[session] = future
            self.look()

    @rule(session=st.integers(10, 13))
    def lose(self, session):
        number = self.held.pop(session, None)
        if number is not None:
            self.state[number] = "cancelled" if self.failed else "queued"
        self.waiting.pop(session, None)
        self.server.end(session)
        self.look()

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.integers(1, self.number))
        self.dropped.add(number)
        self.server.schedule(ClosureOrder(told=self.told, dropped=(number,)))

    @invariant()
    def nothing_stands_still(self):
        """No worker waits while a closure could be run, and no closure is two workers'."""
        closures, over = self.server.closures, ("done", "failed", "cancelled")
        running = sorted(self.held.values())
        assert running == sorted(set(running)) == sorted(n for n, s in self.state.items() if s == "running")
        if self.waiting:
            ready = [n for n, needs in self.needs.items() if all(self.state[need] in over for need in needs)]
            assert all(self.state[number] != "queued" for number in ready)
        newest, begun = closures._newest, closures._begun
        assert begun == {n for n in self.newest if self.state[n] not in over}
        assert newest == max(self.newest, default=0)
        here = closures._closures.values()
        assert closures._nbytes == sum(each.arguments.size + each.result.size for each in here)
        assert {each.number for each in here} == {
            n for n, state in self.state.items() if not (state in over and n in self.dropped)
        }

    @invariant()
    def results_are_what_came(self):
        for number, state in self.state.items():
            if number not in self.dropped and state in ("done", "failed", "cancelled"):
                assert self.server.fetch(number).result().state == state

    @invariant()
    def a_join_knows(self):
        done = all(state not in ("queued", "running") for state in self.state.values())
        answer = self.server.schedule(ClosureOrder(told=self.told, joins=True))
        assert answer.done() == done
        if done:
            assert (answer.result().failure is not None) == self.failed
        else:
            self.server.closures._scheduling.fail_all(GONE)


def test_whatever_happens_to_closures():
    """Each is one worker's at a time, and none stands still; what was told twice counts once; results are what came."""
    run_state_machine_as_test(Walk, settings=search(1.5))


NUMBER = TensorSpec("int64", ())
PLAN, OTHER = reduce_only(NUMBER, target="this"), reduce_only(NUMBER, target="that")
MEMBERS = tuple(Member(task, place + 1, 1, ASYNC) for place, task in enumerate(WORKERS[:3]))
FIRST, SECOND = ClosureName(5, 1, 5, (5,)), ClosureName(5, 2, 5, (5,))


class Maker(RoundsByHand):
    """Rounds of closures, which workers push for by a closure's name."""

    def __init__(self):
        super().__init__(PLAN, OTHER, members=MEMBERS)

    def push(self, session, name, round=0, plan=PLAN, generation=1, **more):
        """Pushes, unless it is answered by the record."""
        record = self.rounds.recorded(Contribution(session, generation, round, plan.id, (1.0,), closure=name))
        if record is None:
            return super().push(session, round, plan, generation, previous=round - 1, closure=name, **more)
        answered = Future()
        answered.set_result(record)
        return answered

    def counted(self):
        """Runs all rounds that can; returns whose contributions they have."""
        return [session for _, _, sessions in self.run() for session in sessions]


@pytest.fixture
def maker():
    return Maker()


def test_all_answers_are_kept_until_the_closure_is_over(maker):
    """However many there are; then they are let go of, and who still pushes has lost the closure."""
    for round in range(2 * RECORDS):
        maker.push(1, FIRST, round)
        maker.run()
    assert all(maker.push(2, SECOND, round).done() for round in range(2 * RECORDS))
    maker.rounds.learn(3, 6, (6,))
    assert 5 not in maker.rounds.sequences
    with pytest.raises(Fenced, match="already run closure 5"):
        maker.push(1, FIRST, round=1).result()
    maker.rounds.learn(2, 5, (5,))  # older news change nothing
    with pytest.raises(Fenced, match="already run closure 5"):
        maker.push(1, FIRST, round=2 * RECORDS).result()


def test_what_is_not_whole_makes_room(maker):
    """The first worker died in the middle of its push: the second one's counts, in whatever generation it is."""
    first = maker.push(1, FIRST, whole=False)
    assert maker.counted() == []
    maker.close_generation(Generation(2, MEMBERS[1:]))
    maker.push(2, SECOND, generation=2)
    with pytest.raises(Fenced, match="assigned to another worker"):
        first.result()
    assert maker.counted() == [2]


def test_who_comes_back_takes_its_own_place(maker):
    """A worker that has the closure and lost its session goes on with it: its own push from before is let go of."""
    before = maker.push(1, FIRST, whole=False)
    maker.push(2, FIRST)
    assert isinstance(before.exception(0), Fenced)
    assert maker.counted() == [2]


def test_a_round_that_runs_answers_both(maker):
    """While it runs with the first contribution, the second waits for the same answer."""
    first = maker.push(1, FIRST)
    job = maker.rounds.next_job()
    second = maker.push(2, SECOND)
    assert not second.done()
    maker.finish(job)
    assert first.result() is second.result()
    assert maker.counted() == []


def test_who_had_it_before_is_refused(maker):
    """It may not take the place of its successor, whose push is on its way."""
    maker.push(2, SECOND, whole=False)
    with pytest.raises(Fenced, match="assigned to another worker"):
        maker.push(1, FIRST).result()


def test_another_sequence_is_refused(maker):
    """A function that makes another section than before is told so; so is one that makes too many."""
    maker.push(1, FIRST)
    maker.run()
    with pytest.raises(ProgramError, match="must run the same steps each time"):
        maker.push(2, SECOND, plan=OTHER).result()
    with pytest.raises(InvalidRequest, match="at most 1000 rounds"):
        maker.push(2, replace(SECOND, number=6, begun=(5, 6), newest=6), round=CLOSURE_ROUNDS).result()
    with pytest.raises(InvalidRequest, match="numbered from 1"):
        maker.push(2, replace(SECOND, number=0)).result()


def test_a_push_that_waited_for_its_generation_comes_again(maker):
    """By then the round may have been made."""
    early = maker.push(2, SECOND, generation=2)
    maker.push(1, FIRST)
    maker.run()
    maker.close_generation(Generation(2, MEMBERS))
    with pytest.raises(PushAgain):
        early.result()
    assert maker.push(2, SECOND, generation=2).result().sessions == {1}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), max_size=12))
def test_each_round_counts_once_on_each_of_two_servers(lives):
    """Workers run it one after another, each up to some round and on some servers; the last one to its end. Args:
    lives: for each worker that is lost its session, the rounds that it makes, and whether the last of them comes to the
    second server as well."""
    servers, counted = (Maker(), Maker()), ([], [])
    for version, (session, rounds, both) in enumerate([*lives, (1, 4, True)], 1):
        name = ClosureName(9, version, 9, (9,))
        for round in range(rounds):
            for place, maker in enumerate(servers[: 1 + (both or round + 1 < rounds)]):
                maker.push(session, name, round)
                counted[place].extend((round, each) for each in maker.counted())
    for rounds in counted:
        assert sorted(round for round, _ in rounds) == [0, 1, 2, 3]
