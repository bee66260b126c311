"""The model test: a job under random interleavings, of workers that make rounds together or each by itself. Real cores,
and the chief's and the workers' own code; the network, the clock and the scheduler are hypothesis'. Processes stop
before any call, die and come back; messages are late, lost and repeated, or arrive bit by bit, as rounds that stream
take them, and are cut off; leases end under processes that live. Rounds may bring rows of tables, and take rows of the
next ones along. Whatever happens, the rules of the protocol hold after every step, and once nothing disturbs it the job
ends."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import combinations, count
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psclient._src.chief import driver as chief_module
from psclient._src.chief.driver import Chief
from psclient._src.network.session import Session
from psclient._src.processes.aggregation.sums import OwnPush
from psclient._src.rounds.membership import Group
from psclient._src.rounds.numbering import SharedRounds
from psclient._src.rounds.rounds import Exchange, Outgoing
from psclient._src.rounds.under_way import UnderWay
from psserver.core.core import Core
from psserver.plans.round import Record
from psserver.plans.round import SessionSequence as OwnSequence
from psserver.rounds.runner import Deciding
from psserver.rounds.steps import Running
from pstesting.clock import Clock
from pstesting.replay import Recording, Replay
from pswire.api import Contribution, Opened, RoundReply
from pswire.cluster import ClusterSpec, Task
from pswire.errors import Fenced, InvalidRequest, ProgramError, PSError, PushAgain, ServerLost, TaskTaken
from pswire.limits import Timeouts
from pswire.model.consistency import Consistency, Mode
from pswire.model.log import Generation, GenerationClosed, Started
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.rows import row_specs
from pswire.model.tensor import Array, TensorSpec, layout
from pswire.network.payload import Chunk, Payload
from pswire.servers.votes import LateContribution, Vote
from tests.kit.cases import search
from tests.kit.contributions import Mail
from tests.kit.rig import CHIEF, WORKERS, adding, core
from tests.kit.tables import KINDS, PRIME, TABLE, Tables
from tests.kit.workers import Door, ModelHost
from tests.kit.workers import Strand as Thread

VALUE = TensorSpec("int64", ())
LEASE = 10.0
TIMEOUTS = Timeouts(session_timeout=LEASE)
TURNS = 300
"""Turns after which a job that nobody disturbs any more has ended."""


class Stepped(Session):
    """A session whose process stands still where it waits, and heartbeats when the model says so."""

    pause: Callable[[], None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opens: list[int] = []

    def _start_beating(self, index: int) -> None:
        self.opens.append(index)

    def _hold(self, index: int) -> None:
        pass  # the model says when a process that has ended is seen to have

    def _open_first(self, key: int) -> Opened:
        while True:
            try:
                return self._open_at(self.log_server, key)
            except TaskTaken:
                self.pause()

    def _unless_broken(self, work: Callable[[], Any]) -> Any:
        return work()

    def wait(self, future: Future[Any], *_: Any) -> Any:
        while not future.done():
            self.check()
            self.pause()
        return self._take(future)


@dataclass
class Message:
    """One push on its way, and what came of it. Attributes: task: whose; server: where to; said, payload: what it says;
    reply: what its sender waits for; singles: of a sum, what it is of; answers: what the server promised, one for each
    attempt, and the payloads of which it told before; travels: whether it is still to arrive whole."""

    task: Task
    server: int
    said: Contribution
    payload: Payload
    singles: Sequence[OwnPush] = ()
    reply: Future[RoundReply] = field(default_factory=Future)
    answers: list[tuple[Future[RoundReply], list[Payload]]] = field(default_factory=list)
    travels: bool = True

    @property
    def each(self) -> list[tuple[Contribution, Payload]]:
        """What it says and brings, of each worker that contributes with it."""
        return [(own.said, own.payload) for own in self.singles] or [(self.said, self.payload)]


@dataclass
class Attempt:
    """One arrival of a message, bit by bit. Attributes: message: which; payload: as far as it has come; rest: what is
    to come; answer: what the server promised."""

    message: Message
    payload: Payload
    rest: list[Chunk]
    answer: Future[RoundReply]


class Line:
    """A process's connection to a server: it may stand still before each call, and pushes travel."""

    def __init__(self, model: Model, process: Worker | Driver, server: int) -> None:
        self.task, self.address = Task("ps", server), f"ps-{server}:1"
        self._model = model
        self._process = process
        self._server = server

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any) -> Any:
            self._process.sequence.pause()
            while self._server in self._model.dead:
                if self._server == 0 or isinstance(self._process, Driver) or verb == "open":
                    raise self._model.lost()  # who starts sees it itself, after PS_START_TIMEOUT
                self._process.session.check()  # that a server is lost the chief says, and until then it is silent
                self._process.sequence.pause()
            return getattr(self._model.cores[self._server], verb)(*args)

        return call

    def push(self, said: Contribution, payload: Payload) -> Future[RoundReply]:
        if said.first_values:  # a part of no round: it comes as other calls do
            found: Future[RoundReply] = self.__getattr__("push")(said, payload)
            return found
        message = Message(self._process.task, self._server, said, payload)
        self._model.messages.append(message)
        return message.reply

    def close(self) -> None:
        pass


class Worker:
    """A worker process. Each round of its script is one batch of dataset 0 and one section."""

    def __init__(self, model: Model, task: Task) -> None:
        self.model = model
        self.task = task
        self.state = "runs"
        lines: list[Any] = [Line(model, self, server) for server in range(len(model.cores))]
        self.session = Stepped(task, lines, 1, False, TIMEOUTS, model.consistency, "", lambda error: None)
        self.group = Group(self.session, (None,), ())  # type: ignore[arg-type]
        self.exchange = Exchange(self.session, self.group)
        if model.hosts:
            host = model.hosts[task.index % len(model.hosts)]
            self.exchange.pushes.near = Door(host, self)  # type: ignore[assignment]
            self.exchange._shared = SharedRounds(self.group, [-1] * len(lines), host.number)
        self.sent: list[UnderWay] = []
        self.seen = [0] * len(model.cores)
        self.sequence = Thread(self._run)
        self.session.pause = self.sequence.pause

    def _run(self) -> None:
        try:
            self._script()
            self.session.leave()
            self.state = "left"
        except PSError as error:
            self.told(error)

    def _script(self) -> None:
        model, group = self.model, self.group
        self.session.open()
        self.session.await_job()
        create = self.exchange.creation.create
        created = [create(spec, at, np.zeros(spec.tensor.shape, "int64"), now=True) for spec, at in model.variables]
        own = [create(spec, at, np.zeros((), "int64"), now=True) for spec, at in model.own.variables]
        batch = 0
        while True:
            if model.datasets:
                group.boundary(0)
                begins = group.position(0)
                batch = max(batch, begins.index if begins else 0)
            if group.generation is not None and group.round >= model.rounds:
                self.exchange.settle()
                while self.sent:
                    self._look(self.sent.pop())
                return
            if model.datasets:
                # A round that nobody's contribution is in may be over without a batch: its rows are read again.
                alike = batch == group.round if model.mode == "async" else batch <= group.round
                assert alike, "the datasets and the rounds do not stand alike"
                group.advance(0, 0, batch + 1, batch + 1 < model.rounds, frozenset())
            outgoing = model.section(batch % len(model.plans))
            if next(model.unique) % 2 and (not model.hosts or model.luck.randrange(8) == 0):  # rows are in no sum
                self.exchange.reads.prefetch(*self._some_rows(created))
            self.exchange.enter(outgoing.plan)
            self.sent.append(self.exchange.send(outgoing))
            batch += 1
            if own and next(model.unique) % 3:
                self._push_own(own)
            if next(model.unique) % 2:
                self._look(self.sent.pop(self.model.luck.randrange(len(self.sent))))
            if next(model.unique) % 3 == 0:
                self._read(created[batch % len(model.cores)])
            if next(model.unique) % 3 == 0:
                self._look_up(*self._some_rows(created))

    def _look(self, round: UnderWay) -> None:
        """Looks at what a round returned, perhaps while later ones are under way; all before it come with it."""
        self.model.answered(self, round, self.exchange.window.values(round))

    def _push_own(self, own: Sequence[Any]) -> None:
        """Makes a round of its own, for which nobody waits, and which waits for nobody; reads what came of it."""
        model = self.model
        sent = self.exchange.send(model.own.section(next(model.unique), model.luck), alone=True)
        if next(model.unique) % 3 == 0:
            variable = own[sent.plan.servers[0]]
            value = int(self.exchange.reads.read(variable, now=True))
            model.take_in()
            model.own.check_read(sent, self.session.number, value)

    def _read(self, variable: Any) -> None:
        """Sees the last round of this process that touched the server; as long as it lives there is no later one. An
        asynchronous one sees what all have added before it read, and nothing that nobody has."""
        alone, totals = self.group.alone, self.model.totals
        self.model.take_in()
        before = totals[variable.id]
        value = int(self.exchange.reads.read(variable, now=True))
        self.model.take_in()
        if self.model.is_open(self.session.number) and self.model.consistency.leaves_out:
            assert value in self.model.past[variable.id], f"{self.task} reads what no round has left"
            assert value >= self.seen[variable.id], f"{self.task} reads of a round before the one that it has seen"
            self.seen[variable.id] = value
        elif self.model.is_open(self.session.number):
            least = before if alone else totals[variable.id]
            assert least <= value <= totals[variable.id], f"{self.task} reads what no round wrote"

    def _some_rows(self, created: Sequence[Any]) -> tuple[Any, Array]:
        """A table, and some of its rows."""
        luck = self.model.luck
        return luck.choice(created[-len(KINDS) * len(self.model.cores) :]), np.flatnonzero(
            [luck.randrange(2) for _ in range(TABLE.shape[0])]
        )

    def _look_up(self, table: Any, ids: Array) -> None:
        """Sees rows as of the last round of this process that touched the server, from its answer or by asking."""
        if next(self.model.unique) % 4 == 0:
            rows = self.exchange.reads.read(table)[ids]  # which comes back with the next round
        else:
            rows = self.exchange.reads.read_rows(table, ids)
        self.model.take_in()
        if self.model.is_open(self.session.number):
            (server,) = table.servers
            last = self.model._name(server, self.task, self.exchange.reads._pulls.touched[server])
            if self.model.consistency.leaves_out:
                self.model.tables.check_read_late(server, table.id, ids, rows)
            elif self.group.alone:
                self.model.tables.check_read_alone(last, table.id, ids, rows)
            else:
                self.model.tables.check_read(server, table.id, ids, rows)

    def told(self, error: PSError) -> None:
        """It gets an error: the only one of a job whose servers live is that its session was ended."""
        self.state = "ended"
        if self.model.dead and isinstance(error, ServerLost):
            return
        if not isinstance(error, Fenced) or self.model.is_open(self.session.number):
            raise AssertionError(
                f"{self.task}, session {self.session.number}, is told {error!r}\n{self.model._describe()}"
            ) from error

    def heartbeat(self) -> None:
        if self.state != "runs":
            return
        for number in self.session.opens:
            try:
                if number not in self.model.dead:
                    self.model.cores[number].heartbeat(self.session.number, *self.session.waits)
                elif number == 0:
                    raise self.model.lost()
            except PSError as error:
                self.session.end(error)

    def end(self, state: str) -> None:
        """Dies; what it sent may still arrive, but of what has arrived in part nothing is sent again."""
        if self.state == "runs":
            self.state = state
            self.sequence.kill()
            self.model.part(self.session)
            for host in self.model.hosts:
                host.end(self)
            for message in self.model.messages:
                if message.said.session == self.session.number and message.answers:
                    message.travels = False


class Stepping(Chief):
    """A chief that stands still where it waits."""

    pause: Callable[[], None] = staticmethod(lambda: None)

    def _new_session(self) -> Stepped:
        session = Stepped(self.task, self._servers, 0, True, TIMEOUTS)
        session.pause = lambda: self.pause()
        return session


class Driver:
    task = CHIEF

    def __init__(self, model: Model) -> None:
        self.model = model
        lines: list[Any] = [Line(model, self, server) for server in range(len(model.cores))]
        self.chief = Stepping(CHIEF, lines, model.cluster, TIMEOUTS)
        self.sequence = Thread(self._run)
        self.chief.pause = self.sequence.pause

    @property
    def session(self) -> Session:
        return self.chief._session

    def kill(self) -> None:
        self.sequence.kill()
        self.model.part(self.session)

    def _run(self) -> None:
        try:
            self.chief.drive()
        except Fenced:
            pass  # there is a newer one
        except ServerLost:
            assert self.model.dead

    def resume(self, times: int) -> None:
        """Goes on for some calls; if there is a newer chief, it decides nothing."""
        for _ in range(times):
            log = self.model.cores[0].machine.job.log.entries
            before, token = len(log), self.session.token
            replaced = 0 < token < self.model.cores[0].machine.members.token
            ended = self.model.over
            self.sequence.resume()
            replaced = replaced and self.session.token == token  # else it is chief again
            assert not replaced or len(log) == before, "a chief that was replaced still decides"
            if self.model.over and not ended:
                # Whoever comes now begins another job, which is none of this model's.
                self.model.end_chiefs(but=self)

    def heartbeat(self) -> None:
        if self.session.number and not self.sequence.over:
            try:
                if self.model.dead:
                    raise self.model.lost()
                self.model.cores[0].heartbeat(self.session.number, -1, b"")
            except PSError as error:
                self.session.end(error)


class OwnRounds:
    """The ledger of what each worker adds to variables that it updates alone, beside the rounds of all.

    Args:
        servers: number of servers, each of which has one such variable; 0 for none.
        first: number of the first of them.
    """

    def __init__(self, servers: int, first: int) -> None:
        self.variables = [(VariableSpec(f"own{n}", VALUE, alone=True), (n,)) for n in range(servers)]
        self.plans = [self._plan(where, first) for size in (1, 2, 3) for where in combinations(range(servers), size)]
        self.sent: dict[tuple[int, int, int], int] = {}
        self.whole: set[tuple[int, int, int]] = set()
        self.made: set[tuple[int, int, int]] = set()
        self.totals = [0] * servers
        self._first = first

    def _plan(self, where: tuple[int, ...], first: int) -> Plan:
        """A section that adds a number to the variable of each of some servers."""
        applies = (Apply(0, (s,), (Ref("variable", first + s), Ref("reduction", i))) for i, s in enumerate(where))
        reductions = tuple(Reduction("sum", VALUE, (server,), "own") for server in where)
        returned = tuple(Ref("reduction", i) for i in range(len(where)))
        return Plan(reductions, (), (adding(VALUE),), tuple(applies), returned)

    def section(self, number: int, luck: Random) -> Outgoing:
        """What one process sends: numbers whose sums tell whose they are."""
        plan = luck.choice(self.plans)
        value = np.asarray(pow(3, number, PRIME), "int64")
        return Outgoing(plan, (1.0,) * len(plan.reductions), (value,) * len(plan.reductions), ())

    def came(self, message: Message, payload: Payload) -> None:
        """Notes how much of a contribution is there; another attempt at it says the same."""
        name = message.server, message.said.session, message.said.round
        value = int(message.payload.pieces(0, VALUE)[0][0])
        assert self.sent.setdefault(name, value) == value, "two contributions have one name"
        self.whole |= {name} if payload.whole else set()

    def recorded(self, server: int, session: int, round: int, record: Record) -> None:
        """A round is over: it has the contribution of its session alone, once, and whole."""
        name = server, session, round
        if name not in self.made:
            assert (record.error, record.excluded, record.sessions) == (None, (), frozenset({session}))
            assert name in self.whole, "what has not arrived is counted"
            self.made.add(name)
            self.totals[server] += self.sent[name]

    def check(self, server: int, values: Mapping[int, Array]) -> None:
        """A variable is the sum of the rounds that are over."""
        if self.totals:
            assert int(values.get(self._first + server, 0)) == self.totals[server], "an own round was not counted once"

    def check_answer(self, message: Message, reply: RoundReply) -> None:
        """What is given back is what was sent, to whoever and however often it is asked."""
        name = message.server, message.said.session, message.said.round
        assert name in self.made, "who is answered was not counted"
        specs = [VALUE] * (len(message.said.want) + 1)
        assert int(reply.payload.tensors(specs)[-1]) == self.sent[name]

    def check_read(self, sent: UnderWay, session: int, value: int) -> None:
        """Its sender has all of its own, and of the others what has come."""
        server = sent.plan.servers[0]
        mine = [number for at, who, number in self.made if (at, who) == (server, session)]
        assert sent.number in mine, "a worker does not see what it has added"
        assert value <= self.totals[server], "a worker sees what nobody has added"


Content = list[tuple[int, int]]
"""The numbers that a message brings to a server, and where each ends in its payload."""

SequenceKey = Task | None
"""Whose rounds: a task's own, or everyone's."""

Name = tuple[int, SequenceKey, int]
"""A round of a server: the server, whose round, its number."""


class Model(RuleBasedStateMachine):
    """A cluster, and the laws that it keeps."""

    mode: Mode = "sync"
    consistency = Consistency()
    most_late = 0
    apart = False
    kinds = len(KINDS)
    most_hosts = 0
    hosts: Sequence[ModelHost] = ()

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.cores: list[Core] = []
        self.work: list[deque[Callable[[], object]]] = []
        self.messages: list[Message] = []
        self.attempts: list[Attempt] = []
        self.votes: list[tuple[int, int, Vote]] = []
        self.patch = pytest.MonkeyPatch()
        self.root = TemporaryDirectory(prefix="paramserver-model-")
        self.workers: list[Worker] = []
        self.drivers: list[Driver] = []
        self.dead: set[int] = set()
        self.sequences: list[Thread] = []
        self.unique, self.luck = count(1), Random(0)
        self.broken = False
        # The ledger: what was said, what arrived, and what the servers made of it.
        self.generations: dict[int, Generation] = {}
        self.begun: dict[Name, dict[int, Contribution]] = defaultdict(dict)
        self.arrived: dict[Name, set[int]] = defaultdict(set)
        self.carriers: dict[tuple[Name, int], list[Message]] = defaultdict(list)
        self.contents: dict[tuple[Name, int], Content] = {}
        self.progress: dict[tuple[Name, int], int] = defaultdict(int)
        self.records: dict[Name, frozenset[int]] = {}
        self.sums: dict[Name, list[int]] = {}
        self.replies: dict[Name, Any] = {}
        self.totals: list[int] = []
        self.past: list[list[int]] = []
        self.late: dict[Name, frozenset[int]] = {}
        self.brought: dict[tuple[int, int, int], Content] = {}
        self.came_whole: set[tuple[int, int, int]] = set()
        self.merged: dict[int, set[LateContribution]] = defaultdict(set)
        self.merged_into: dict[tuple[int, int], tuple[LateContribution, ...]] = {}
        self.seconds: list[int] = []
        self.counts: list[int] = []
        self.lasts: dict[tuple[int, SequenceKey], int] = {}
        self.tables = Tables(1, 0)
        self.own = OwnRounds(0, 0)

    @initialize(
        servers=st.integers(1, 3), workers=st.integers(1, 3), datasets=st.booleans(), rounds=st.integers(2, 9),
        warm=st.integers(0, 12), streams=st.booleans(), refuses=st.booleans(), data=st.data(),
    )  # fmt: skip
    def begin(
        self,
        servers: int,
        workers: int,
        datasets: bool,
        rounds: int,
        warm: int,
        streams: bool,
        refuses: bool,
        data: Any,
    ) -> None:
        """A cluster, a script, and a job that has got somewhere."""
        if streams:
            self.patch.setattr("pswire.model.plan.PART_BYTES", 0)
        self.work = [deque() for _ in range(servers)]
        self.cores = [
            core(number, 0, 0, self.root.name, self.clock, queue.append, LEASE)
            for number, queue in enumerate(self.work)
        ]
        for number, one in enumerate(self.cores):
            one.others = Mail(number, self.votes)
        self.recordings = [Recording(one) for one in self.cores]
        self.cluster = ClusterSpec({"ps": ("x:1",) * servers, "worker": ("x:2",) * workers})
        self.totals, self.seconds, self.counts = [0] * servers, [0] * servers, [0] * servers
        self.past = [[0] for _ in range(servers)]
        self.datasets, self.rounds, self.refuses = datasets, rounds, refuses
        every = tuple(range(servers))
        # On each server a sum, after those on each a count of its rounds, then on each a second sum, and tables.
        tensors = [VALUE] * 3 * servers + [TABLE] * len(KINDS) * servers
        self.tables = Tables(servers, 3 * servers)
        self.variables = [(VariableSpec(f"v{n}", tensor), (n % servers,)) for n, tensor in enumerate(tensors)]
        self.own = OwnRounds(servers if self.apart else 0, len(self.variables))
        sections = st.lists(st.sampled_from(every), min_size=1, unique=True).map(sorted).map(tuple)
        script = data.draw(st.lists(sections, min_size=1, max_size=3), "script")
        # What has no table may stream.
        ways = st.dictionaries(st.sampled_from(KINDS), st.sampled_from(["dense", "exact"]), max_size=self.kinds)
        self.plans = [
            self.tables.updated(self._plan(index, where), data.draw(ways, "tables"), data.draw(st.booleans()))
            for index, where in enumerate(script)
        ]
        if self.most_hosts:
            number = data.draw(st.integers(1, self.most_hosts), "hosts")
            self.hosts = [ModelHost(each + 1, self._send_sum, self._tensors, self.luck) for each in range(number)]
            workers = 1 + workers
        self.workers = [self._start(task) for task in WORKERS[:workers]]
        if warm:
            self.new_chief()
            self.go_on(warm)

    def _plan(self, index: int, where: tuple[int, ...]) -> Plan:
        """A section: adds numbers to two variables of each of its servers, and in between counts the round on each."""
        servers = len(self.cores)
        # One to the power of one is one, which a server finds out by a trial: it might refuse other numbers.
        one, at = (Node("pow", (1, 1)), 2) if self.refuses else (Node("negative", (1,)), 1)
        nodes = (one, Node("add", (0, at)))
        counting = Program((Input("variable", VALUE), Input("operand", VALUE)), nodes, ((0, 3),), ())
        reductions = tuple(Reduction("sum", VALUE, (server,), f"section {index}") for server in (*where, *where))
        returned, last = tuple(Ref("reduction", i) for i in range(2 * len(where))), len(where)
        applies = [Apply(0, (s,), (Ref("variable", s), returned[i])) for i, s in enumerate(where)]
        applies += [Apply(1, (s,), (Ref("variable", servers + s), Ref("operand", 0))) for s in where]
        applies += [Apply(0, (s,), (Ref("variable", 2 * servers + s), returned[i])) for i, s in enumerate(where, last)]
        return Plan(reductions, (Operand(VALUE, where),), (adding(VALUE), counting), tuple(applies), returned)

    def section(self, index: int) -> Outgoing:
        """What one process sends in a section: numbers whose sums tell whose they are, and now and then none."""
        plan, values = self.plans[index], list[Any]()
        for number, reduction in zip(self.unique, self.plans[index].reductions, strict=False):
            whole = np.asarray(pow(3, number, PRIME), "int64") if number % 4 else None
            values.append(whole if reduction.form == "dense" else self.tables.drawn(number, self.luck))
        weights = tuple(0.0 if value is None else 1.0 for value in values)
        return Outgoing(plan, weights, tuple(values), (np.asarray(1, "int64"),))

    def _start(self, task: Task) -> Worker:
        worker = Worker(self, task)
        self.sequences.append(worker.sequence)
        return worker

    @property
    def over(self) -> bool:
        return self.cores[0].machine.job.log.over

    def lost(self) -> ServerLost:
        (server,) = self.dead
        return ServerLost("was lost (nothing listens there any more)", str(Task("ps", server)))

    # ---- What can happen ----

    @rule(turns=st.integers(1, 4))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self._turn()

    @rule(who=st.integers(0, 5), times=st.integers(1, 8))
    def step(self, who: int, times: int) -> None:
        self.workers[who % len(self.workers)].sequence.resume(times)

    @rule(times=st.integers(1, 12), which=st.integers(0, 1))
    def drive(self, times: int, which: int) -> None:
        """A chief goes on, for some calls; perhaps not the newest."""
        living = [driver for driver in self.drivers if not driver.sequence.over]
        if living:
            living[-1 - which % len(living)].resume(times)

    @rule(which=st.integers(0, 8))
    def deliver(self, which: int) -> None:
        """One message arrives, not always the oldest."""
        waiting = [message for message in self.messages if message.travels]
        if waiting:
            self._arrive(waiting[which % len(waiting)])

    @rule(which=st.integers(0, 8), chunks=st.integers(0, 2))
    def begin_to_deliver(self, which: int, chunks: int) -> None:
        """A message begins to arrive; of its bytes some are there, and the others may never come."""
        waiting = [message for message in self.messages if message.travels]
        if waiting:
            self._arrive(waiting[which % len(waiting)], chunks=chunks)

    @rule(which=st.integers(0, 8))
    def deliver_more(self, which: int) -> None:
        open = [attempt for attempt in self.attempts if attempt.rest]
        if open:
            self._go_on(open[-1 - which % len(open)])

    @rule(which=st.integers(0, 40))
    def repeat(self, which: int) -> None:
        """A message arrives once more, however late: its sender's first attempt was only slow."""
        if self.messages:
            self._arrive(self.messages[-1 - which % len(self.messages)], again=True)

    @rule(which=st.integers(0, 8))
    def lose_reply(self, which: int) -> None:
        unanswered = [message for message in self.messages if message.answers and not message.reply.done()]
        if unanswered:
            unanswered[which % len(unanswered)].travels = True

    @rule(server=st.integers(0, 2))
    def run_work(self, server: int) -> None:
        queue = self.work[server % len(self.work)]
        while queue and server % len(self.work) not in self.dead:
            queue.popleft()()
            self.take_in()

    @rule()
    def new_chief(self) -> None:
        if not self.over and not self.dead:
            self.drivers.append(Driver(self))
            self.sequences.append(self.drivers[-1].sequence)

    @rule()
    def kill_chief(self) -> None:
        if self.drivers and not self.over and not self.dead:
            self.drivers[-1].kill()

    def end_chiefs(self, but: Driver) -> None:
        for driver in self.drivers:
            if driver is not but:
                driver.kill()

    def part(self, session: Session) -> None:
        if session.number and 0 not in self.dead:
            self.cores[0]._enter(self.cores[0].machine.part, session.number)

    @rule(who=st.integers(0, 5))
    def kill(self, who: int) -> None:
        self.workers[who % len(self.workers)].end("killed")

    @rule(who=st.integers(0, 5))
    def fail(self, who: int) -> None:
        worker = self.workers[who % len(self.workers)]
        worker.end("failed")
        if worker.state == "failed" and worker.session.number and 0 not in self.dead:
            self.cores[0].leave(worker.session.number, "ValueError: a bug of the script")

    @rule(who=st.integers(0, 5), times=st.integers(0, 8))
    def restart(self, who: int, times: int) -> None:
        worker = self.workers[who % len(self.workers)]
        if worker.state != "left" and not self.over and not self.dead:
            worker.end("killed")
            self.workers[who % len(self.workers)] = self._start(worker.task)
            self.step(who, times)

    @rule(silent=st.sets(st.integers(0, 3), max_size=3))
    def time_passes(self, silent: set[int]) -> None:
        """Longer than a lease; who is silent in it loses its session, even if it lives."""
        for _ in range(6):
            self._pass(0.2 * LEASE, silent)

    @rule(which=st.integers(0, 8))
    def hear(self, which: int) -> None:
        """A vote arrives at another server, not always the oldest."""
        if self.votes:
            self._hear(self.votes.pop(which % len(self.votes)))

    @rule(which=st.integers(0, 8))
    def hear_again(self, which: int) -> None:
        """A vote arrives, and will arrive once more."""
        if self.votes:
            self._hear(self.votes[which % len(self.votes)])

    @rule(one=st.integers(0, 2), other=st.integers(0, 2))
    def cut(self, one: int, other: int) -> None:
        one, other = one % len(self.cores), other % len(self.cores)
        if one != other and self.dead.isdisjoint((one, other)):
            self.votes[:] = [found for found in self.votes if {found[0], found[1]} != {one, other}]
            self.cores[one].meet(other)
            self.cores[other].meet(one)

    # ---- How it happens ----

    def _hear(self, found: tuple[int, int, Vote]) -> None:
        sender, receiver, vote = found
        if receiver in self.dead:
            return
        self.cores[receiver].hear(sender, vote)
        self.take_in()

    def _turn(self) -> None:
        """Everybody goes on as far as a few calls and all messages take it."""
        for worker in self.workers:
            worker.sequence.resume(6)
        # Of an attempt that is not whole some more comes, or the message is sent again, or nothing happens.
        living = {worker.session.number for worker in self.workers if worker.state == "runs"}
        for attempt in [attempt for attempt in self.attempts if attempt.rest]:
            if attempt.message.said.session in living and self.luck.randrange(3):
                self._go_on(attempt)
        for message in [message for message in self.messages if message.travels]:
            chunks = self.luck.randrange(4 + len(message.payload.chunks))
            if not message.answers or chunks > 2:
                self._arrive(message, chunks=chunks)
        for host in self.hosts:
            host.go_on()
        for server in range(len(self.cores)):
            self.run_work(server)
        while self.votes:
            self._hear(self.votes.pop(self.luck.randrange(len(self.votes))))
        self.take_in()
        for driver in self.drivers:
            driver.resume(6)
        self._pass(0.1, set())

    def _pass(self, seconds: float, silent: set[int]) -> None:
        """Time passes; all heartbeat but those who are silent: workers by number, then the chiefs."""
        self.clock.now += seconds
        loud = [worker for index, worker in enumerate(self.workers) if index not in silent]
        for process in [*loud, *(self.drivers if 3 not in silent else ())]:
            process.heartbeat()
        for number, one in enumerate(self.cores):
            if number not in self.dead:
                one.tick()

    def _arrive(self, message: Message, again: bool = False, chunks: int = 1 << 30) -> None:
        if message.server in self.dead:
            message.travels = False
            return
        found, begun = message.payload.chunks, list[Payload]()
        payload = Payload(found[:chunks], message.payload.size)
        if payload.whole:
            message.travels = message.travels and again
        try:
            answer = self.cores[message.server].push(message.said, payload, begun.append)
        except PSError as error:
            if not again and not message.reply.done():
                message.reply.set_exception(error)
            return
        message.answers.append((answer, begun))
        if not payload.whole:
            self.attempts.append(Attempt(message, payload, found[chunks:], answer))
        self._came(message, payload)

    def _go_on(self, attempt: Attempt) -> None:
        if not attempt.answer.done():
            attempt.payload.add(*attempt.rest.pop(0))
            self._came(attempt.message, attempt.payload)
            attempt.message.travels = bool(attempt.rest) and attempt.message.travels

    def _came(self, message: Message, payload: Payload) -> None:
        if message.said.alone:
            self.own.came(message, payload)
            return
        key = self._name(message.server, message.task, message.said.round)
        if self.consistency.quorum:
            late = message.server, message.said.session, message.said.round
            self.brought[late] = self._content(message.server, message.said, message.payload)
            self.came_whole |= {late} if payload.whole else set()
        for said, brought in message.each if key not in self.records else ():
            session = said.session
            self.begun[key].setdefault(session, said)
            self.contents[key, session] = self._content(message.server, said, brought)
            self.tables.came(key, self._plan_of(said.plan_id), said, brought)
            self.progress[key, session] = max(self.progress[key, session], payload.end)
            if payload.whole:
                self.arrived[key].add(session)
                self.carriers[key, session].append(message)

    def _name(self, server: int, task: Task, round: int) -> Name:
        return server, task if self.mode == "async" else None, round

    def _content(self, server: int, said: Contribution, payload: Payload) -> Content:
        """The numbers that are brought to a server, and where each ends; 0 where none is."""
        plan, weights = self._plan_of(said.plan_id), said.weights
        dense = [i for i in range(len(plan.reductions)) if i not in plan.rows]
        here = [i for i in dense if server in plan.reductions[i].servers]
        counted = [i for i in here if weights[i]]
        places = dict(zip(counted, layout([VALUE] * (1 + len(counted)))[0][1:], strict=True))
        return [
            (int(payload.pieces(places[i], VALUE)[0][0]), places[i] + VALUE.nbytes) if i in places else (0, 0)
            for i in here
        ]

    def _send_sum(
        self, task: Task, server: int, said: Contribution, payload: Payload, singles: Sequence[OwnPush]
    ) -> Future[RoundReply]:
        self.messages.append(Message(task, server, said, payload, singles))
        return self.messages[-1].reply

    def _tensors(self, ids: Sequence[int]) -> list[TensorSpec]:
        return [self.variables[id][0].tensor for id in ids]

    def _plan_of(self, id: bytes) -> Plan:
        return next(plan for plan in self.plans if plan.id == id)

    def is_open(self, session: int) -> bool:
        states = self.cores[0].machine.members.states(self.clock())
        return any(state.member.session == session and state.state == "open" for state in states)

    # ---- The laws ----

    @invariant()
    def laws(self) -> None:
        self.broken = True
        self.take_in()
        self.broken = False

    def take_in(self) -> None:
        """Takes in what the servers did, and checks it."""
        self._check_log()
        for number, one in enumerate(self.cores):
            for key, sequence in one.machine.job.rounds.sequences.items():
                for round in sorted(sequence.records):
                    if isinstance(key, OwnSequence):
                        self.own.recorded(number, key.session, round, sequence.records[round])
                    elif (number, key, round) not in self.records:
                        self._check_record((number, key, round), sequence.records[round])
            slow = {attempt.message.task for attempt in self.attempts}
            assert self.mode != "async" or all(slow.issuperset(open.missing) for open in one.status().waiting), (
                "one waits for another"
            )
            # What several servers vote on changes nothing before; else, amid a round, nobody sees what is there.
            phase = one.machine.job.runner.phase
            on_trial = isinstance(phase, Deciding) or (isinstance(phase, Running) and phase.on_trial)
            if on_trial or not one.machine.job.store.lent:
                assert self._values(number) == (self.totals[number], self.counts[number], self.seconds[number]), (
                    "a variable is not the sum of its rounds, or a round was not counted once"
                )
                self.tables.check(number, one.machine.job.store)
                self.own.check(number, one.machine.job.store.values())
            self.tables.looked_at(number)
        for message in self.messages:
            self._check_answers(message)

    def _values(self, number: int) -> tuple[int, ...]:
        values = self.cores[number].machine.job.store.values()
        return tuple(int(values.get(place * len(self.cores) + number, 0)) for place in range(3))

    def _check_log(self) -> None:
        """One log, and generations in order. Before server 0 has a job, a chief that was killed may have begun
        others."""
        log = self.cores[0].machine.job.log.entries
        for one in self.cores[1:] if log else ():
            assert one.machine.job.log.entries == log[: len(one.machine.job.log.entries)], "two logs differ"
        closed = [entry.generation for entry in log if isinstance(entry, GenerationClosed)]
        assert [generation.number for generation in closed] == list(range(1, len(closed) + 1))
        self.generations = {generation.number: generation for generation in closed}
        starts = [entry.start for entry in log if isinstance(entry, Started)]
        starts += [generation.start for generation in closed if generation.start]
        assert len({start.generation for start in starts}) == len(starts), "a generation starts twice"

    def _check_record(self, name: Name, record: Record) -> None:
        """A round holds the contributions of the members of its generation, each once, but for those it names."""
        server, sequence, round = name
        assert round > self.lasts.get((server, sequence), -1), "rounds run out of order"
        self.lasts[server, sequence] = round
        # Of a round that was forgotten, since all were lost, something of its number may have begun before.
        if not self.begun[name]:
            assert self.mode == "sync", "a round without contributions"
            assert not record.sessions
            self.records[name], self.sums[name] = frozenset(), [0, 0]
            self.tables.count(name, None, (), ran=False)
            return
        plan = self._plan_of(record.plan_id)  # of a round of this number that was forgotten it may be another
        number = max(said.generation for said in self.begun[name].values())
        arrived = {session for session in self.arrived[name] if self.begun[name][session].generation == number}
        assert not any(map(self.is_open, self.arrived[name] - arrived)), "a round has members of two generations"
        members = [member for member in self.generations[number].members if sequence in (None, member.task)]
        counted = frozenset(member.session for member in members if member.task not in record.excluded)
        if record.error is None:
            assert counted <= arrived, "what has not arrived is counted"
            if self._votes(name):
                self._check_whole(name, counted)
            elif not (self.consistency.leaves_out or self.hosts):
                assert counted == arrived, "what arrived is not what was counted"
            sums, made = ([int(value) for value in record.given[:2]], 1) if record.given else ([0, 0], 0)
            self.tables.count(name, plan, counted, ran=bool(made))
            assert made or not counted, "who is counted is not answered"
            if made:  # else all were lost, and the servers agreed that there is nothing of it
                self.tables.check_given(name, plan, counted, record.given[2:])
        else:  # nobody was left to make the rest of it
            assert isinstance(record.error, ProgramError), f"round {name} failed: {record.error}"
            assert "were lost" in str(record.error)
            assert not arrived
            counted = frozenset()
            self.tables.count(name, plan, (), ran=False)
            first, count, second = self._values(server)
            sums, made = [first - self.totals[server], second - self.seconds[server]], count - self.counts[server]
            assert made in (0, 1)
        out = [member for member in members if member.session not in counted and self.is_open(member.session)]
        assert len(out) <= self.most_late, f"{out} live and are left out\n{self._describe()}"
        assert record.error is not None or {member.session for member in out} <= record.late
        self.late[name] = record.late
        merged = self._check_merged(name, record)
        for index, total in enumerate(sums):
            possible = {number + merged[index] for number in self._possible(name, index, counted)}
            assert total in possible, "a contribution was not counted once"
        self.records[name], self.sums[name] = counted, sums
        self.totals[server] += sums[0]
        self.past[server].append(self.totals[server])
        self.seconds[server] += sums[1]
        self.counts[server] += made

    def _check_merged(self, name: Name, record: Record) -> tuple[int, int]:
        """Each late contribution is merged once, whole, and into the same round everywhere; returns what they bring."""
        server, _, round = name
        first = second = 0
        for late in record.merged:
            assert late not in self.merged[server], "a late contribution is merged twice"
            assert late.session not in self.records[server, None, late.round], "it was in time, and is merged again"
            self.merged[server].add(late)
            for other in self._servers(name):
                assert (other, *late) in self.came_whole, f"server {other} does not have what is merged"
            content = self.brought[server, late.session, late.round]
            first, second = first + content[0][0], second + content[1][0]
        others = [self.merged_into.get((other, round), record.merged) for other in range(len(self.cores))]
        assert all(other == record.merged for other in others), "servers merge different contributions"
        self.merged_into[server, round] = record.merged
        return first, second

    def _check_kept(self) -> None:
        """Nothing is thrown away of a worker that has left: what came late is merged, or waits for a next round."""
        left = {worker.session.number for worker in self.workers if worker.state == "left"}
        for number, one in enumerate(self.cores):
            waiting = {share.name for share in one.machine.job.rounds.late.ready()}
            for (server, _, round), sessions in self.late.items():
                names = {LateContribution(session, round) for session in sessions & left if server == number}
                given = {name for name in names if any(value for value, _ in self.brought.get((number, *name), ()))}
                assert given <= self.merged[number] | waiting, "a late contribution is lost"

    def _check_whole(self, name: Name, counted: frozenset[int]) -> None:
        """A round has the same contributions on all servers that have made it."""
        _, sequence, round = name
        others = [self.records.get((server, sequence, round), counted) for server in range(len(self.cores))]
        assert all(other == counted for other in others), f"round {round} is torn: {counted} and {others}"
        # Nor would it be where a server has not made it yet, and never will if it dies.
        for server in self._servers(name):
            assert counted <= self.arrived[server, sequence, round], f"round {round} counts what server {server} lacks"

    def _servers(self, name: Name) -> set[int]:
        """The servers of a round that has begun."""
        plans = {said.plan_id for said in self.begun[name].values()}
        return {s for plan in self.plans if plan.id in plans for r in plan.reductions for s in r.servers}

    def _votes(self, name: Name) -> bool:
        """Returns True if the servers of a round agree on whose contributions it has."""
        return self.mode == "sync" and len(self._servers(name)) > 1

    def _possible(self, name: Name, index: int, counted: frozenset[int]) -> set[int]:
        """What may come out of a round's reduction: of who is left out, what was there before it was lost may count."""
        contents = {session: self.contents[name, session][index] for session in self.begun[name]}
        whole = sum(number for session, (number, _) in contents.items() if session in counted)
        halves = [
            number
            for session, (number, end) in contents.items()
            if session not in counted and end <= self.progress[name, session] and not self._votes(name)
        ]
        chosen = (some for size in range(len(halves) + 1) for some in combinations(halves, size))
        return {whole + sum(some) for some in chosen}

    def _check_answers(self, message: Message) -> None:
        """All answers of one round of one server are the same, to whoever and however often it is asked."""
        for answer, begun in [(answer, begun) for answer, begun in message.answers if answer.done()]:
            error = answer.exception()
            if error is not None:
                if isinstance(error, InvalidRequest) and (message.reply.done() or "more times" in str(error)):
                    continue  # a repeat that came when its round was over for long, or one of many: its sender knows
                if isinstance(error, PushAgain):
                    self._ask_again(message, error)
                    continue
                if self.dead and isinstance(error, ServerLost):
                    continue  # it was written to the log
                assert isinstance(error, Fenced), repr(error)
                assert not self.is_open(message.said.session), "a living session is told that it is not"
            else:
                reply = answer.result()
                if message.said.alone:
                    self.own.check_answer(message, reply)
                else:
                    self._check_reply(message, answer)
                assert all(payload is reply.payload for payload in begun), "the answer is not what was begun"
                assert len(begun) <= 1
            if not message.travels and not message.reply.done():
                if error is not None:
                    message.reply.set_exception(error)
                else:
                    message.reply.set_result(reply)

    def _check_reply(self, message: Message, answer: Future[RoundReply]) -> None:
        """An answer of a round of all is that of all other answers of it."""
        reply = answer.result()
        name = self._name(message.server, message.task, message.said.round)
        given, rows = self._given(message, reply)
        told = reply.generation, reply.excluded, reply.more, given
        assert self.replies.setdefault(name, told) == told
        self.tables.check_answer(name, answer, message.said.lookups, rows, self.mode == "async")

    def _given(self, message: Message, reply: RoundReply) -> tuple[list[Any], list[Array]]:
        """What an answer gives back of its round, and the rows that it looks up."""
        said = message.said
        specs = [self.variables[id][0].tensor for id in said.want] + [VALUE] * 2
        specs += [spec for count in reply.rows for spec in row_specs(TABLE, count)]
        specs += [row_specs(TABLE, len(read.numbers()))[1] for read in said.lookups]
        arrays = reply.payload.tensors(specs)[len(said.want) :]
        behind = 2 + 2 * len(reply.rows)
        return [array.tolist() for array in arrays[:behind]], arrays[behind:]

    def _ask_again(self, message: Message, error: PushAgain) -> None:
        """What has arrived is used up, and does not count, unless it came before and is held; the rest goes nowhere."""
        assert self.mode == "sync"
        held = not all(answer.done() for answer, _ in message.answers)  # a resend alone was refused
        if not message.reply.done():
            message.travels = False
            self.attempts = [attempt for attempt in self.attempts if attempt.message is not message]
            name = self._name(message.server, message.task, message.said.round)
            for said, _ in message.each:
                others = [each for each in self.carriers[name, said.session] if each is not message]
                self.carriers[name, said.session] = others
                if not others and not held:
                    self.arrived[name].discard(said.session)
            message.reply.set_exception(error)

    def answered(self, worker: Worker, sent: UnderWay, values: Mapping[Ref, Any]) -> None:
        """Who is answered was counted, on every server of the plan; what it is given is what their records say."""
        self.take_in()
        reductions = [reduction for reduction in sent.plan.reductions if reduction.form == "dense"]
        for index, reduction in enumerate(reductions):
            name = self._name(reduction.servers[0], worker.task, sent.number)
            session = worker.session.number
            assert session in self.records[name] | self.late[name], f"{worker.task} is answered, and was not counted"
            assert int(values[Ref("reduction", index)]) == self.sums[name][index // (len(reductions) // 2)]

    def teardown(self) -> None:
        """Left alone, whatever lives gets done: all that ended is started again, and the job ends."""
        try:
            if self.cores and not self.broken and self.dead:
                self._finish_without()
            elif self.cores and not self.broken:
                self._finish()
                self._replay()
        finally:
            self.patch.undo()
            self.root.cleanup()
            for sequence in self.sequences:
                sequence.kill()

    def _finish(self) -> None:
        for _ in range(TURNS):
            if all(one.done.done() for one in self.cores):
                break
            if not self.over and all(driver.sequence.over for driver in self.drivers):
                self.new_chief()
            for index, worker in enumerate(self.workers):
                if worker.state not in ("runs", "left") and not self.over:
                    self.workers[index] = self._start(worker.task)
            self._pass(0.2 * LEASE, set())
            self._turn()
        else:
            raise AssertionError(f"the job does not end:\n{self._describe()}")
        for message in self.messages:
            assert all(answer.done() for answer, _ in message.answers), "an answer hangs"

    def _finish_without(self) -> None:
        """A server is gone, and with it the job: everybody ends, by the chief's word, or by its own eyes."""
        for _ in range(TURNS):
            if not any(worker.state == "runs" for worker in self.workers) and all(
                one.sequence.over for one in self.drivers
            ):
                return
            self._pass(0.2 * LEASE, set())
            self._turn()
        raise AssertionError(f"somebody waits for a server that is gone:\n{self._describe()}")

    def _replay(self) -> None:
        """A machine that is told what a server was told comes to the same state."""
        for one, recording in zip(self.cores, self.recordings, strict=True):
            replay = Replay(recording)
            replay.run()
            assert replay.machine.status(self.clock()) == one.status()
            found, values = replay.machine.job.store.values(), one.machine.job.store.values()
            assert found.keys() == values.keys()
            assert all(np.array_equal(found[id], value) for id, value in values.items())

    def _describe(self) -> str:
        lines = [f"{w.task} {w.state} session {w.session.number} round {w.group.round}" for w in self.workers]
        lines += [str(one.status()) for one in self.cores]
        lines += [str(state) for state in self.cores[0].machine.members.states(self.clock())[-5:]]
        return "\n".join(lines)


class Alone(Model):
    """The same with workers each of which makes rounds of its own."""

    mode = "async"
    consistency = Consistency("async")


class Mortal(Model):
    """The same, and in some of them a server dies, between any two of its votes. What it held is gone, and the job ends
    for all."""

    mortal = False

    @initialize(mortal=st.booleans())
    def choose(self, mortal: bool) -> None:
        self.mortal = mortal

    @precondition(lambda self: self.mortal and not self.dead and len(self.cores) > 1 and not self.over)
    @precondition(lambda self: any(worker.state == "runs" for worker in self.workers))
    @rule(which=st.sampled_from([1, 1, 2, 2, 0]), said=st.booleans())
    def die(self, which: int, said: bool) -> None:
        if not self.drivers or self.drivers[-1].sequence.over:
            self.new_chief()
            self.go_on(12)
        server, log = which % len(self.cores), self.cores[0].machine.job.log.entries
        if log and not self.over and self.drivers[-1].session.token and not self.drivers[-1].sequence.over:
            self.dead.add(server)
            self.votes[:] = [found for found in self.votes if found[1] != server and (said or found[0] != server)]
            self.attempts = [attempt for attempt in self.attempts if attempt.message.server != server]


class Apart(Mortal):
    """The same, and each worker makes rounds of its own beside those of all, for which nobody waits."""

    apart = True


class Hosts(Mortal):
    """The same with workers of one host that sum what they contribute, before one of them sends it; or do not."""

    kinds = 0
    most_hosts = 2

    @rule(which=st.integers(0, 1))
    def sum_up(self, which: int) -> None:
        """What is there at a host is summed, or goes by itself."""
        self.hosts[which % len(self.hosts)].go_on()


class Late(Mortal):
    """The same with rounds that do not wait for the last of their members: servers have others, and agree."""

    consistency = Consistency(backup_workers=1)
    most_late = 1


class Merging(Mortal):
    """The same with rounds for which two members suffice, and into which late contributions to earlier ones merge."""

    consistency = Consistency(quorum=2, grace=0.15)
    most_late = 1
    kinds = 0

    def _finish(self) -> None:
        super()._finish()
        self._check_kept()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief looks, and does not wait for something to see; for no hung member, as the model has none."""
    monkeypatch.setattr(chief_module, "PAUSE", 0.0)
    monkeypatch.setattr(chief_module.HungMembers, "look", lambda self, generation: False)


class TestAlone(Alone.TestCase):
    settings = search(0.1)


class TestModel(Mortal.TestCase):
    settings = search(0.25)


class TestApart(Apart.TestCase):
    settings = search(0.25)


class TestHosts(Hosts.TestCase):
    settings = search(0.25)


class TestLate(Late.TestCase):
    settings = search(0.25)


class TestMerging(Merging.TestCase):
    settings = search(0.25)
