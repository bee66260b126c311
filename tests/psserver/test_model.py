"""The model test: a job under random interleavings.

Real cores, the chief's and the workers' own code, and a network, a clock and a scheduler that hypothesis
turns. Processes die and come back, messages are late, lost and repeated, leases end under processes that
live. Whatever happens, the rules of the protocol hold after every step, and what lives gets done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rig import CHIEF, WORKERS, Clock, adding, core

from psclient import chief as chief_module
from psclient.chief import Chief
from psclient.exchange import Exchange, Outgoing
from psclient.group import Group
from psclient.session import Session
from psserver.core import Core
from pswire.api import Contribution, PullReply, RoundReply
from pswire.cluster import ClusterSpec, Task
from pswire.errors import Fenced, PSError
from pswire.limits import Timeouts
from pswire.program import Input, Node, Program
from pswire.spec import Apply, Epoch, EpochClosed, Operand, Plan, Position, Reduction, Ref, Started, VariableSpec
from pswire.tensor import Payload, TensorSpec

STATS = []
import atexit
atexit.register(lambda: open("/tmp/stats","w").write("\n".join(map(str,STATS))))
VALUE = TensorSpec("int64", ())
LEASE = 10.0
TIMEOUTS = Timeouts(lease=LEASE)
TURNS = 400
"""Turns in which a job that nobody disturbs any more has to end."""


class NotYet(BaseException):
    """What a process waits for is not there; it calls again later. No error that the code may catch."""


class Killed(BaseException):
    """A chief was killed between two calls."""


class Polled(Session):
    """A session that never blocks, and beats only when the model says so."""

    def _beat(self, server: Any) -> None:
        pass

    def wait(self, future: Future[Any], *_: Any) -> Any:
        if not future.done():
            self.check()
            raise NotYet
        return self._take(future)


@dataclass
class Message:
    """One push on its way, and what came of it.

    Attributes:
        server: where to.
        said, payload: what it says.
        reply: what its sender waits for.
        answers: what the server promised, one for each time that the message arrived.
        travels: whether it is still to arrive.
    """

    server: int
    said: Contribution
    payload: Payload
    reply: Future[RoundReply] = field(default_factory=Future)
    answers: list[Future[RoundReply]] = field(default_factory=list)
    travels: bool = True


class Line:
    """A connection of one process to one server. Pushes travel when the model says so."""

    def __init__(self, model: Model, number: int) -> None:
        self._model = model
        self._number = number
        self._core = model.cores[number]
        self._sent: dict[int, Message] = {}

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._core, verb)

    def push(self, said: Contribution, payload: Payload) -> Future[RoundReply]:
        message = self._sent.get(said.round)
        if message is None:
            message = self._sent[said.round] = Message(self._number, said, payload)
            self._model.messages.append(message)
        if message.said != said:
            for m in self._model.messages: print("MSG", m.server, m.said.session, m.said.round, m.said.epoch, m.said.plan_id[:2], m.travels, m.answers, m.reply)
            print(self._model._describe())
            print([ (p.task,p.batch) for p in self._model.processes])
        assert message.said == said, "a process says two things in one round"
        return message.reply

    def pull(self, session: int, variables: Any, after: int) -> Future[PullReply]:
        future = self._core.pull(session, variables, after)
        self._model.run_work(self._number)
        return future


class ChiefLine:
    """A connection of a chief, which may be killed before any of its calls; and between them, things happen."""

    def __init__(self, model: Model, behind: Core, left: list[float]) -> None:
        self._model = model
        self._core = behind
        self._left = left

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any) -> Any:
            self._left[0] -= 1
            if self._left[0] < 0:
                raise Killed
            if self._model.meanwhile:
                self._model.happen(self._model.meanwhile.pop())
            return getattr(self._core, verb)(*args)

        return call

    def close(self) -> None:
        pass


@dataclass
class Driver:
    """A chief process."""

    chief: Chief
    left: list[float]
    session: Session
    version: int = 0
    watched: Any = None
    alive: bool = True


class Process:
    """A worker process: runs the script, a step at a time.

    Each round is one batch of dataset 0 and one section; `script` says which servers each section touches.
    """

    def __init__(self, model: Model, task: Task) -> None:
        self.model = model
        self.task = task
        lines: list[Any] = [Line(model, number) for number in range(len(model.cores))]
        self.session = Polled(task, lines, 1, False, TIMEOUTS)
        self.group = Group(self.session, (None,), ())  # type: ignore[arg-type]
        self.exchange = Exchange(self.session, self.group)
        self.state = "runs"
        self.batch = 0
        self.outgoing: Outgoing | None = None
        self._work = self._script()
        self._next: Callable[[], object] | None = None

    def step(self) -> None:
        """Goes on until it has to wait, or one thing is done."""
        if self.state != "runs":
            return
        try:
            if self._next is None:
                self._next = next(self._work)
            self._next()
            self._next = None
        except NotYet:
            return
        except PSError as error:
            self.model.told(self, error)

    def _script(self) -> Iterator[Callable[[], object]]:
        """The program. Each call is repeated until it does not raise `NotYet`."""
        yield self.session.open
        yield self.session.await_job
        yield self._create
        model = self.model
        while True:
            if model.datasets:
                yield lambda: self.group.boundary(0)
                begins = self.group.position(0)
                self.batch = max(self.batch, begins.index if begins else 0)
            if self.group.epoch is not None and self.group.round >= model.rounds:
                break
            section = self.batch % len(model.script)
            if model.datasets:
                assert self.batch == self.group.round, "the datasets and the rounds do not stand alike"
                self.group.advance(0, 0, self.batch + 1, self.batch + 1 < model.rounds, frozenset())
            self.outgoing = model.section(section)
            yield self._flush
            self.batch += 1
        yield self._leave

    def _leave(self) -> None:
        self.session.leave()
        self.state = "left"

    def _create(self) -> None:
        for name, servers in self.model.variables:
            self.exchange.create(VariableSpec(name, VALUE), servers, np.zeros((), "int64"))

    def _flush(self) -> None:
        assert self.outgoing is not None
        values = self.exchange.flush(self.outgoing)
        self.model.answered(self, self.outgoing.plan, values)
        self.outgoing = None

    def read(self, server: int) -> None:
        """Reads a variable: sees the last round of this process that touched the server."""
        if self.state != "runs" or self.outgoing is not None or len(self.exchange._variables) <= server:
            return
        try:
            value = int(self.exchange.read(self.exchange._variables[server]))
        except PSError as error:
            self.model.told(self, error)
        else:
            assert value == self.model.totals[server], f"{self.task} reads what no round wrote"

    def beat(self) -> None:
        """Says that it lives, and what it waits for."""
        if self.state != "runs" or not self.session.number:
            return
        waits = (self.group.round, self.outgoing.plan.id) if self.outgoing and self.group.epoch else (-1, b"")
        for server in self.session.servers:
            try:
                server.beat(self.session.number, *waits)
            except PSError as error:
                self.model.told(self, error)
                return

    def crash(self) -> None:
        """Dies without a word; what it sent may still arrive."""
        if self.state == "runs":
            self.state = "dead"


class Model(RuleBasedStateMachine):
    """A cluster, and the laws that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.cores: list[Core] = []
        self.work: list[deque[Callable[[], object]]] = []
        self.messages: list[Message] = []
        self.processes: list[Process] = []
        self.drivers: list[Driver] = []
        self.unique = count(1)
        self.broken = False
        self.meanwhile: list[int] = []
        # The ledger: what was said, what arrived, and what the servers made of it.
        self.epochs: dict[int, Epoch] = {}
        self.arrived: dict[tuple[int, int], dict[int, Contribution]] = defaultdict(dict)
        self.records: dict[tuple[int, int], tuple[int, ...]] = {}
        self.replies: dict[tuple[int, int], RoundReply] = {}
        self.contents: dict[tuple[int, int, int], int] = {}
        self.totals: list[int] = []
        self.lasts: list[int] = []

    @initialize(
        servers=st.integers(1, 3),
        workers=st.integers(1, 3),
        datasets=st.booleans(),
        rounds=st.integers(2, 9),
        warm=st.booleans(),
        data=st.data(),
    )
    def begin(self, servers: int, workers: int, datasets: bool, rounds: int, warm: bool, data: Any) -> None:
        self.work = [deque() for _ in range(servers)]
        self.cores = [
            core(number, 0, 0, Path("nowhere"), self.clock, queue.append, LEASE)
            for number, queue in enumerate(self.work)
        ]
        self.totals, self.counts, self.lasts = [0] * servers, [0] * servers, [-1] * servers
        self.datasets, self.rounds = datasets, rounds
        sections = st.lists(st.sampled_from(range(servers)), min_size=1, unique=True).map(sorted).map(tuple)
        self.script = data.draw(st.lists(sections, min_size=1, max_size=3), "script")
        every = tuple(range(servers))
        self.variables = [*((f"v{number}", (number,)) for number in every), ("count", every)]
        self.plans = [self._plan(index, where) for index, where in enumerate(self.script)]
        self.processes = [Process(self, task) for task in WORKERS[:workers]]
        self.cluster = ClusterSpec({"ps": ("x:1",) * servers, "worker": ("x:2",) * workers})
        if warm:
            self.new_chief(100)
            for _ in range(8):
                self._turn()

    def _plan(self, index: int, where: tuple[int, ...]) -> Plan:
        """A section: adds a number to the variable of each of its servers, and counts the round there."""
        counter = len(self.cores)
        counting = Program((Input("variable", VALUE), Input("operand", VALUE)), (Node("add", (0, 1)),), ((0, 2),), ())
        return Plan(
            reductions=tuple(Reduction("sum", VALUE, (server,), f"section {index}") for server in where),
            operands=(Operand(VALUE, where),),
            programs=(adding(VALUE), counting),
            applies=(
                *(Apply(0, (s,), (Ref("variable", s), Ref("reduction", i))) for i, s in enumerate(where)),
                Apply(1, where, (Ref("variable", counter), Ref("operand", 0))),
            ),
            returned=tuple(Ref("reduction", i) for i in range(len(where))),
        )

    def section(self, index: int) -> Outgoing:
        """What one process sends in a section: numbers that no other sum is likely to give."""
        plan, weights, contributions = self.plans[index], [], []
        for _ in plan.reductions:
            number = next(self.unique)
            weights.append(float(number % 4 > 0))
            value = np.asarray(pow(3, number, (1 << 53) - 111), "int64")
            contributions.append(value if number % 4 else None)
        return Outgoing(plan, tuple(weights), tuple(contributions), (np.asarray(1, "int64"),))

    # ---- What can happen ----

    @property
    def over(self) -> bool:
        return self.cores[0].done.done()

    @rule(turns=st.integers(1, 4))
    def go_on(self, turns: int) -> None:
        """Everything goes on for a while, without harm."""
        for _ in range(turns):
            self._turn()

    @rule(who=st.integers(0, 5), times=st.integers(1, 4))
    def step(self, who: int, times: int) -> None:
        """One process goes on as far as it can."""
        for _ in range(times):
            self.processes[who % len(self.processes)].step()

    @rule(which=st.integers(1, 8))
    def deliver(self, which: int) -> None:
        """One message arrives, not always the oldest."""
        self.happen(which)

    @rule(which=st.integers(0, 40))
    def repeat(self, which: int) -> None:
        """A message arrives once more, however late: its sender's first attempt was only slow."""
        if self.messages:
            self._arrive(self.messages[-1 - which % len(self.messages)], again=True)

    @rule(which=st.integers(0, 8))
    def lose_reply(self, which: int) -> None:
        """An answer is lost; the sender sends again."""
        if not self.messages:
            return
        message = self.messages[-1 - which % len(self.messages)]
        if message.answers and not message.reply.done():
            message.travels = True

    @rule(server=st.integers(0, 2))
    def run_work(self, server: int) -> None:
        """A server does its array work."""
        queue = self.work[server % len(self.work)]
        while queue:
            queue.popleft()()

    @rule(budget=st.sampled_from([0, 1, 3, 5, 8, 100, 100]))
    def new_chief(self, budget: int) -> None:
        """A chief is started, whether or not there is one; it may be killed at once."""
        if self.over:
            return
        left: list[float] = [float(budget)]
        lines: list[Any] = [ChiefLine(self, one, left) for one in self.cores]
        chief = Chief(CHIEF, lines, self.cluster, TIMEOUTS)
        session = chief._session = Polled(CHIEF, lines, 0, True, TIMEOUTS)
        driver = Driver(chief, left, session)
        self.drivers.append(driver)
        self._drive(driver, lambda: (session.open(), chief._attach()))
        left[0] = float("inf")

    @rule(which=st.integers(0, 3))
    def look(self, which: int) -> None:
        """A chief looks; what it sees may be old when it acts."""
        alive = [driver for driver in self.drivers if driver.alive]
        if alive:
            self._look(alive[which % len(alive)])

    @rule(
        which=st.integers(0, 3),
        fresh=st.booleans(),
        budget=st.sampled_from([100, 100, 100, 0, 1, 2, 3, 5]),
        meanwhile=st.lists(st.integers(0, 8), max_size=6),
    )
    def decide(self, which: int, fresh: bool, budget: int, meanwhile: list[int]) -> None:
        """A chief acts; messages arrive between its calls, and it may be killed on the way."""
        alive = [driver for driver in self.drivers if driver.alive]
        if not alive:
            return
        driver = alive[which % len(alive)]
        if fresh:
            self._look(driver)
        if driver.watched:
            driver.left[0], self.meanwhile = float(budget), meanwhile
            self._decide(driver)
            driver.left[0], self.meanwhile = float("inf"), []

    def happen(self, which: int) -> None:
        """A message arrives, and its server does its work; or nothing happens."""
        waiting = [message for message in self.messages if message.travels]
        if which and waiting:
            message = waiting[which % len(waiting)]
            self._arrive(message)
            self.run_work(message.server)

    @rule(who=st.integers(0, 5))
    def crash(self, who: int) -> None:
        """A worker is killed."""
        self.processes[who % len(self.processes)].crash()

    @rule(who=st.integers(0, 5))
    def give_up(self, who: int) -> None:
        """A worker's script fails, and it says so."""
        process = self.processes[who % len(self.processes)]
        if process.state == "runs" and process.session.number:
            process.session.leave("ValueError: a bug of the script")
            process.state = "ended"

    @rule(who=st.integers(0, 5), times=st.integers(0, 4))
    def restart(self, who: int, times: int) -> None:
        """A task that ended, or was thought dead, is started again."""
        process = self.processes[who % len(self.processes)]
        if process.state != "left" and not self.over:
            process.crash()
            self.processes[who % len(self.processes)] = Process(self, process.task)
            self.step(who, times)

    @rule(silent=st.sets(st.integers(0, 3), max_size=3), chief=st.booleans())
    def time_passes(self, silent: set[int], chief: bool) -> None:
        """Longer than a lease; who is silent in it loses its session, even if it lives."""
        for _ in range(2):
            self.clock.now += 0.6 * LEASE
            self._beat([p for who, p in enumerate(self.processes) if who not in silent], chief)
            for one in self.cores:
                one.tick(self.clock())

    @rule(who=st.integers(0, 5), server=st.integers(0, 2))
    def read(self, who: int, server: int) -> None:
        self.processes[who % len(self.processes)].read(server % len(self.cores))

    # ---- How it happens ----

    def _turn(self) -> None:
        """Everybody takes one step."""
        for process in self.processes:
            process.step()
        for message in list(self.messages):
            if message.travels:
                self._arrive(message)
        for server in range(len(self.cores)):
            self.run_work(server)
        for driver in self.drivers:
            if driver.alive:
                self._look(driver)
            if driver.alive and driver.watched:
                self._decide(driver)
        self.clock.now += 0.1
        self._collect()

    def _arrive(self, message: Message, again: bool = False) -> None:
        message.travels = message.travels and again
        said, key = message.said, (message.server, message.said.round)
        try:
            answer = self.cores[message.server].push(said, message.payload)
        except PSError as error:
            if not again and not message.reply.done():
                message.reply.set_exception(error)
            return
        message.answers.append(answer)
        if key not in self.records:
            self.arrived[key].setdefault(said.session, said)
        self._remember(message)

    def _remember(self, message: Message) -> None:
        """Notes the numbers that a message carries, by server, round and session."""
        said, plan = message.said, next(p for p in self.plans if p.id == message.said.plan_id)
        index = next(i for i, r in enumerate(plan.reductions) if message.server in r.servers)
        value = 0
        if said.weights[index]:
            value = int(message.payload.pieces(0, VALUE)[0][0])
        self.contents[message.server, said.round, said.session] = value

    def _drive(self, driver: Driver, work: Callable[[], Any]) -> Any:
        replaced = 0 < driver.session.token < self.cores[0]._members.token
        before = len(self.cores[0]._log.entries)
        try:
            return work()
        except Killed:
            driver.alive = False
        except PSError as error:
            driver.alive = False
            assert isinstance(error, Fenced), f"a chief is told {error!r}"
            driver.left[0] = float("inf")
            driver.session.leave("the chief was stopped")
        finally:
            if replaced:
                assert len(self.cores[0]._log.entries) == before, "a chief that was replaced still decides"
        return None

    def _look(self, driver: Driver) -> None:
        watched = self._drive(driver, lambda: driver.chief._watch(driver.version))
        if watched is not None:
            driver.watched, driver.version = watched, watched.version

    def _decide(self, driver: Driver) -> None:
        watched, driver.watched = driver.watched, None
        if self._drive(driver, lambda: driver.chief._decide(watched)):
            driver.alive = False
            driver.session.leave("")

    def _beat(self, processes: list[Process], chief: bool) -> None:
        for process in processes:
            process.beat()
        for driver in self.drivers:
            if chief and driver.alive:
                try:
                    self.cores[0].beat(driver.session.number, -1, b"")
                except PSError:
                    driver.alive = False

    def told(self, process: Process, error: PSError) -> None:
        """A process got an error: the only one that this job has is that its session was ended."""
        process.state = "ended"
        if not isinstance(error, Fenced) or self._is_open(process.session.number):
            self.broken = True
            raise AssertionError(f"{process.task} (session {process.session.number}) is told: {error!r}") from error

    def _is_open(self, session: int) -> bool:
        return any(
            state.member.session == session and state.state == "open"
            for state in self.cores[0]._members.states(self.clock())
        )

    # ---- The laws ----

    @invariant()
    def laws(self) -> None:
        try:
            self._collect()
        except AssertionError:
            self.broken = True
            raise

    def _collect(self) -> None:
        """Takes in what the servers did, and checks it."""
        self._check_log()
        for number, one in enumerate(self.cores):
            for round in sorted(one._rounds.records):
                if (number, round) not in self.records:
                    self._check_record(number, round)
            self._check_values(number)
        for message in self.messages:
            self._check_answers(message)

    def _check_log(self) -> None:
        """One log, and epochs in order. Before server 0 has a job, a chief that was killed may have begun others."""
        master = self.cores[0]._log.entries
        for one in self.cores[1:] if master else ():
            assert one._log.entries == master[: len(one._log.entries)], "two logs differ"
        closed = [entry.epoch for entry in master if isinstance(entry, EpochClosed)]
        assert [epoch.number for epoch in closed] == list(range(1, len(closed) + 1))
        self.epochs = {epoch.number: epoch for epoch in closed}
        starts = [entry.start for entry in master if isinstance(entry, Started)]
        starts += [epoch.start for epoch in closed if epoch.start]
        assert len({start.epoch for start in starts}) == len(starts), "an epoch starts twice"

    def _check_record(self, server: int, round: int) -> None:
        """A round holds the contributions of the members of its epoch, each once, but for those it names."""
        record = self.cores[server]._rounds.records[round]
        arrived = self.arrived[server, round]
        assert record.error is None, f"round {round} of server {server} failed: {record.error}"
        assert round > self.lasts[server], "rounds run out of order"
        self.lasts[server] = round
        assert len({said.epoch for said in arrived.values()}) == 1
        epoch = self.epochs[next(iter(arrived.values())).epoch]
        counted = {m.session for m in epoch.members if m.task not in record.left_out}
        assert counted == set(arrived), "what arrived is not what was counted"
        for member in epoch.members:
            assert member.session in counted or not self._is_open(member.session), f"{member.task} lives and is left out"
        total = sum(self.contents[server, round, session] for session in counted)
        assert [int(value) for value in record.given] == [total]
        self.records[server, round] = tuple(sorted(counted))
        self.totals[server] += total
        self.counts[server] += 1

    def _check_values(self, server: int) -> None:
        """The variables are what the rounds say."""
        values = self.cores[server]._store.values()
        assert int(values.get(server, 0)) == self.totals[server], "a variable is not the sum of its rounds"
        assert int(values.get(len(self.cores), 0)) == self.counts[server]

    def _check_answers(self, message: Message) -> None:
        """All answers of one round of one server are the same, to whoever and however often it is asked."""
        key = message.server, message.said.round
        for answer in [answer for answer in message.answers if answer.done()]:
            error = answer.exception()
            if error is not None:
                assert isinstance(error, Fenced), repr(error)
                assert not self._is_open(message.said.session), "a living session is told that it is not"
            else:
                reply = answer.result()
                known = self.replies.setdefault(key, reply)
                assert (reply.epoch, reply.left_out, reply.more) == (known.epoch, known.left_out, known.more)
                first = [chunk.tobytes() for _, chunk in reply.payload.chunks][:1]
                assert first == [chunk.tobytes() for _, chunk in known.payload.chunks][:1]
            if not message.travels and not message.reply.done():
                if error is not None:
                    message.reply.set_exception(error)
                else:
                    message.reply.set_result(reply)

    def answered(self, process: Process, plan: Plan, values: dict[Ref, Any]) -> None:
        """Who is answered was counted; what it is given is what the records of its round say."""
        round = process.group.round - 1
        for index, reduction in enumerate(plan.reductions):
            counted = self.records[reduction.servers[0], round]
            assert process.session.number in counted, f"{process.task} is answered, and was not counted"
            total = sum(self.contents[reduction.servers[0], round, session] for session in counted)
            assert int(values[Ref("reduction", index)]) == total

    def teardown(self) -> None:
        """Left alone, whatever lives gets done: every process is started again, and the job ends."""
        if self.broken or not self.cores:
            return
        for _ in range(TURNS):
            if self.over and all(one.done.done() for one in self.cores):
                break
            self.clock.now += 0.3 * LEASE
            self._beat(self.processes, True)
            for one in self.cores:
                one.tick(self.clock())
            if not self.over and not any(driver.alive for driver in self.drivers):
                self.new_chief(1000)
            for index, process in enumerate(self.processes):
                if process.state in ("dead", "ended") and not self.over:
                    self.processes[index] = Process(self, process.task)
            self._turn()
        else:
            raise AssertionError(f"the job does not end: {self._describe()}")
        self._check_end()

    def _check_end(self) -> None:
        STATS.append((len(self.records), len(self.epochs), sum(1 for e in self.epochs.values() if e.start), sum(1 for (s,r),c in self.records.items() if len(c) < len(self.epochs[next(iter(self.arrived[s,r].values())).epoch].members)), len(self.drivers)))
        for message in self.messages:
            assert all(answer.done() for answer in message.answers), "an answer hangs"
        rounds = {round for _, round in self.records}
        for round in rounds:
            plan_servers = {server for server in range(len(self.cores)) if (server, round) in self.arrived}
            assert all((server, round) in self.records for server in plan_servers)

    def _describe(self) -> str:
        lines = [f"{p.task} {p.state} session {p.session.number} round {p.group.round}" for p in self.processes]
        lines += [str(one.status()) for one in self.cores]
        lines += [str(state) for state in self.cores[0]._members.states(self.clock())[-5:]]
        return "\n".join(lines)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """A chief looks, and does not wait for something to see."""
    monkeypatch.setattr(chief_module, "PAUSE", 0.0)


class TestModel(Model.TestCase):
    """Runs the model."""

    pytestmark = pytest.mark.usefixtures("no_pauses")


if settings.get_current_profile_name() != "soak":
    TestModel.settings = settings(max_examples=int(__import__("os").environ.get("N","60")), stateful_step_count=40)
import os
from hypothesis import Phase
if os.environ.get("NOSHRINK"):
    TestModel.settings = settings(TestModel.settings, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
_ = note, Position
