"""Who has a session and takes part in no epoch decides nothing for those who do, and costs them next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psserver import registry
from psserver.core import waiting
from psserver.plans import memory
from psserver.state import strands
from pstesting.clock import Clock
from tests.kit.contributions import part_of
from tests.kit.internals import (
    MAX_DETAILS_BYTES,
    MAX_PLAN_ITEMS,
    MAX_PLAN_NODES,
    MAX_VARIABLES,
    Apply,
    Approved,
    CBFFilter,
    ConfigError,
    Contribution,
    Forbidden,
    Input,
    InvalidRequest,
    Member,
    MemoryLimit,
    NoCheckpoint,
    Payload,
    Plan,
    Program,
    PSError,
    Reduction,
    Ref,
    RestoreOrder,
    SlotTensor,
    Start,
    TableRead,
    TableSpec,
    Task,
    TensorSpec,
    Turn,
    VariableSpec,
    messages,
    pb,
    refusal,
    refusal_to_pb,
)
from tests.kit.rig import SOON, WORKERS, Job, Servers, Worker, checkpoint, core, sum_into

FOUR = TensorSpec("float32", (4,))
STRANGER = Task("worker", 7)


class Two:
    """Two members of a job on two servers, and who has a session besides.

    Attributes:
        job: the job.
        members: who make its rounds.
        session: the other's.
    """

    def __init__(self, root: Path, **more: Any) -> None:
        cores = [core(number, root=root, max_sessions=8, **more) for number in (0, 1)]
        self.cores = cores
        self.job = Job(Servers([*cores], cores, Clock(), root, False))
        self.members = self.job.join(*WORKERS[:2])
        self.variable = self.job.variable(self.members[0], np.zeros(4, "float32"))
        self.plan = self.job.approve(sum_into(self.variable, returned=False), self.members[0])
        self.session = self.job.open(STRANGER).session
        self.sum = 0.0

    def push(self, worker: Worker) -> object:
        return worker.push(self.plan, [np.ones(4)])

    def round(self) -> None:
        """The members make a round, whose sum is exact."""
        futures = [worker.push(self.plan, [np.ones(4)], want=(self.variable.id,)) for worker in self.members]
        self.sum += 2
        for worker, future in zip(self.members, futures, strict=True):
            worker.round += 1
            (value,) = future.result(SOON).payload.tensors([FOUR])
            assert (value == self.sum).all()


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


# ---- What it says ----


def test_a_beat_of_an_outsider_waits_in_no_round(two: Two) -> None:
    """Whatever plan it says that it waits with: only members can be at different places of one program."""
    for member in two.members:
        two.cores[0].beat(member.session, 0, two.plan.id)
    two.cores[0].beat(two.session, 0, b"x" * 32)
    two.round()


def test_the_divergence_of_an_outsider_is_its_own(two: Two) -> None:
    """It ends with the session that tells of it."""
    two.cores[0].leave(two.session, "Diverged: everything")
    two.round()


SAID: dict[str, Callable[[Two], object]] = {
    "a start": lambda two: two.cores[0].propose(two.session, None, "", Start(two.job.epoch.number, 99)),
    "a plan": lambda two: two.cores[0].propose(two.session, sum_into(two.variable), "", None),
    "a checkpoint": lambda two: two.cores[0].propose(two.session, checkpoint("x", (0, 1)), "", None),
    "a restore": lambda two: two.cores[0].restore(two.session, "x", Turn(1 << 63), RestoreOrder("open")),
}


@pytest.mark.parametrize("case", SAID)
def test_an_outsider_proposes_nothing(two: Two, case: str) -> None:
    """It is refused, the log stays as it is, and members go on and restore as if nobody had asked."""
    before = list(two.cores[0].machine.log.entries)
    with pytest.raises(InvalidRequest, match="takes part in no epoch"):
        SAID[case](two)
    assert two.cores[0].machine.log.entries == before
    assert not two.cores[0].machine.log.proposed
    two.round()
    worker = two.members[0]
    with pytest.raises(NoCheckpoint):
        two.cores[0].restore(worker.session, "x", worker.turn(), RestoreOrder("open")).result(SOON)


@pytest.mark.parametrize("epoch", [0, 3, 1 << 63])
def test_nobody_begins_in_an_epoch_that_is_not_there(two: Two, epoch: int) -> None:
    """A member neither: a start in an epoch to come would be in the way of who says it then."""
    with pytest.raises(InvalidRequest, match=f"epoch {epoch} is not known"):
        two.cores[0].propose(two.members[0].session, None, "", Start(epoch, 0))
    two.round()


@pytest.mark.parametrize("entry", ["x", "x" * (3 << 20), "dataset:", "dataset:" + "9" * 11, "plan:" + "g" * 64])
def test_newcomers_wait_at_entries(two: Two, entry: str) -> None:
    """What is none is not kept: all that watch the log are told of it, in one message."""
    with pytest.raises(InvalidRequest, match="nowhere else"):
        two.cores[0].propose(two.session, None, entry, None)
    assert [state.join_point for state in two.cores[0].machine.members.states(0.0)] == ["", "", ""]


# ---- What it costs ----


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What happens within takes little of the processor, however busy the machine is."""
    began = time.thread_time()
    yield
    assert time.thread_time() - began < seconds


def test_a_shape_of_many_dimensions_is_not_multiplied() -> None:
    """Half a million factors would take hours: their number alone refuses them."""
    message = pb.TensorSpec(dtype="float32", shape=[(1 << 63) - 1] * 400_000)
    with within(1.0), pytest.raises(InvalidRequest, match="400000 dimensions"):
        messages.TENSOR.from_pb(message)


SUM = pb.Reduction(op=pb.Reduction.SUM, tensor=pb.TensorSpec(dtype="float32", shape=[4]), servers=[0])
EMPTY: dict[str, Callable[[], pb.Plan]] = {
    "programs": lambda: pb.Plan(programs=[pb.Program(version=1)] * 300_000),
    "nodes": lambda: pb.Plan(programs=[pb.Program(version=1, nodes=[pb.Node()] * 300_000)]),
    "nodes of many programs": lambda: pb.Plan(programs=[pb.Program(nodes=[pb.Node()] * 5_000)] * 11),
    "attributes": lambda: pb.Plan(programs=[pb.Program(nodes=[pb.Node(attrs=[pb.Attr()] * 300_000)])]),
    "outputs": lambda: pb.Plan(programs=[pb.Program(outputs=[0] * 300_000)]),
    "applications": lambda: pb.Plan(applies=[pb.Apply()] * 300_000),
    "arguments": lambda: pb.Plan(applies=[pb.Apply(args=[pb.Ref(kind=2)] * 300_000)]),
    "cuts": lambda: pb.Plan(trims=[pb.Trim()] * 300_000),
    "values that come back": lambda: pb.Plan(reductions=[SUM], returned=[pb.Ref(kind=2)] * 300_000),
}


@pytest.mark.parametrize("case", EMPTY)
def test_a_plan_of_empty_parts_is_not_read(case: str) -> None:
    """Its bytes are few, and its parts are many: they are counted before anything is made of them."""
    message = EMPTY[case]()
    with within(0.5), pytest.raises(InvalidRequest, match=f"at most ({MAX_PLAN_NODES}|{MAX_PLAN_ITEMS}) "):
        messages.PLAN.from_pb(message)


def test_a_server_is_named_once(two: Two) -> None:
    """Else what is checked for each of many arguments is checked for each of many servers, under the lock."""
    program = Program(tuple(Input("value", FOUR) for _ in range(3000)), (), (), ())
    apply = Apply(0, (0,), (Ref("reduction", 0),) * 3000)
    plan = Plan((Reduction("sum", FOUR, (0,) * 100_000),), programs=(program,), applies=(apply,))
    with within(2.0), pytest.raises(InvalidRequest, match="name each once"):
        two.cores[0].propose(two.members[0].session, plan, "", None)
    spec = VariableSpec("many", FOUR)
    with pytest.raises(InvalidRequest, match="name each once"):
        two.cores[0].create(two.session, 1, -1, spec, (0, 0), None)
    two.round()


def test_large_programs_are_looked_into_without_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats are answered meanwhile, whether they are proposed or approved."""
    two = Two(tmp_path, memory_limit=1 << 20)
    (of, seen) = memory.Need.of, []

    def look(program: Program) -> object:
        seen.append([one._lock.locked() for one in two.cores])
        return of(program)

    monkeypatch.setattr(memory.Need, "of", look)
    two.job.approve(sum_into(two.variable), two.members[0])
    assert seen == [[False, False]] * len(seen)
    assert seen


def test_watches_of_one_session_are_bounded(two: Two) -> None:
    """The oldest of too many end: their clients have gone away, or make more than anybody needs."""
    length = two.cores[0].status().log
    waits = [two.cores[0].watch(two.session, length, -1) for _ in range(waiting.MAX_CALLS + 10)]
    other = two.cores[0].watch(two.members[0].session, length, -1)
    assert [future.done() for future in waits] == [True] * 10 + [False] * waiting.MAX_CALLS
    with pytest.raises(InvalidRequest, match="later calls"):
        waits[0].result(SOON)
    two.job.variable(two.members[0], np.zeros(4, "float32"))
    assert all(future.result(SOON).entries for future in [*waits[10:], other])


def test_who_only_looks_is_told_at_once() -> None:
    """Also where nothing has happened yet: nobody would know that it is gone, and has not to be waited for."""
    one = core()
    assert one.watch(0, 0, 0).done()
    assert len(one.machine.waiters.rows[waiting.Watch]) == 0
    one.close()


def test_reads_of_one_session_are_bounded(two: Two) -> None:
    """The same for those that wait for a round."""
    reads = [two.cores[0].pull(two.session, [0], 0) for _ in range(waiting.MAX_CALLS + 10)]
    other = two.cores[0].pull(two.members[0].session, [0], 0)
    assert [future.done() for future in reads] == [True] * 10 + [False] * waiting.MAX_CALLS
    two.round()
    assert all(future.result(SOON).round == 0 for future in [*reads[10:], other])


def test_pushes_of_an_epoch_to_come_are_bounded(two: Two) -> None:
    """A few attempts at one contribution wait until their epoch is known, which may be never."""
    said = Contribution(two.session, 99, 0, b"x" * 32, ())
    for server in two.cores:
        futures = [server.push(said, Payload((), 1 << 20)) for _ in range(100)]
        assert sum(not future.done() for future in futures) <= strands.RESENDS
        assert len(server.status().waiting) == 1
    two.round()


def test_the_log_says_what_a_variable_is(two: Two) -> None:
    """Whoever came to a server before the log with another one of its number is not in the chief's way."""
    squatter = VariableSpec("mine", TensorSpec("float32", (1000,)))
    two.cores[1].create(two.session, 1, 1, squatter, (1,), Payload.pack([np.ones(1000, "float32")]))
    spec = VariableSpec("v1", FOUR)
    named = two.cores[0].create(two.members[0].session, 1, -1, spec, (1,), None)
    assert named.id == 1
    two.job.append()
    assert two.cores[1].status().nbytes == FOUR.nbytes
    value = Payload.pack([np.full(4, 3, "float32")])
    assert two.cores[1].create(two.members[0].session, 1, 1, spec, (1,), value).initialized
    (found,) = two.cores[1].pull(two.members[0].session, [1], -1).result(SOON).payload.tensors([FOUR])
    assert found.tolist() == [3.0] * 4


def test_the_log_says_what_a_table_is(two: Two) -> None:
    """The same for a part of one: whoever has taken its buckets before, by any number, and what lies beside them."""
    spec, server, slot = TableSpec((2,)), two.cores[1], SlotTensor("m", "float32", (2,))
    squatters = [
        *(part_of(7, spec, 1, range(100, 600), name="mine"), part_of(8, spec, 1, range(100, 600), slot)),
        part_of(9, TableSpec((3,)), 1, table="items", name="mine, too"),
    ]
    assert server.create_batch(two.session, squatters).error is None
    parts = [
        *(part_of(1, spec, 1), part_of(2, spec, 1, slot=slot), part_of(3, spec, 1, table="items", name="items")),
        part_of(4, spec, 1, table="more", name="more"),
    ]
    assert two.cores[0].create_batch(two.members[0].session, parts).error is None
    two.job.append()
    assert server.create_batch(two.members[0].session, parts).initialized == (1, 2, 3, 4)
    asked = [TableRead(part.id, "size") for part in parts]
    assert server.pull(two.members[0].session, [], -1, [], asked).result(SOON).rows == (0,) * 4
    again = server.create_batch(two.session, squatters)
    assert again.count == 0
    assert "has buckets 100 to 599 of 'users', and 'users' has some of them" in str(again.error)
    two.round()


def test_a_table_that_cannot_be_held_is_not_in_the_way(tmp_path: Path) -> None:
    """The chief's log goes on, whoever has had server 0 name it for another server; who creates it there is told."""
    two = Two(tmp_path, memory_limit=1 << 20)
    large = part_of(1, TableSpec((2,), admission=CBFFilter(2, 1 << 36)), 1)
    assert two.cores[0].create_batch(two.session, [large]).error is None
    two.job.append()
    assert isinstance(two.cores[1].create_batch(two.members[0].session, [large]).error, MemoryLimit)
    with pytest.raises(InvalidRequest, match="variable 1 is no dynamic table on this server"):
        two.cores[1].pull(two.session, [], -1, [], [TableRead(1, "size")]).result(SOON)
    two.round()


def test_the_numbers_of_variables_are_bounded(two: Two) -> None:
    """Each that a server is told of it keeps, whether the log has it or not."""
    with pytest.raises(InvalidRequest, match="not placed on this server"):
        two.cores[1].create(two.session, 0, MAX_VARIABLES, VariableSpec("x", FOUR), (1,), None)


def test_server_0_alone_names_variables(two: Two) -> None:
    """Another one that is asked to refuses, and its log stays the chief's."""
    before = two.cores[1].status()
    with pytest.raises(InvalidRequest, match="not placed on this server"):
        two.cores[1].create(two.session, 1, -1, VariableSpec("x", FOUR), (1,), None)
    assert two.cores[1].status() == before


def test_a_server_knows_so_many_sessions(two: Two) -> None:
    """One that does not give their numbers, too."""
    known = len(two.members) + 2  # those of the chief and of the stranger
    for number in range(registry.REMEMBERED * 8 - known):
        two.cores[1].open(STRANGER, 1, (1 << 50) + number, False)
    with pytest.raises(ConfigError, match=f"started {registry.REMEMBERED * 8} times"):
        two.cores[1].open(STRANGER, 1, 1 << 60, False)
    two.round()


def test_a_session_is_of_the_task_that_the_epoch_says(two: Two) -> None:
    """On a server that does not give the numbers, who opens a member's first contributes nothing in its name."""
    late, server = WORKERS[2], two.cores[1]
    session = two.cores[0].open(late, 1, 99, False).session
    server.open(STRANGER, 1, session, False)
    members = (*(worker.member for worker in two.members), Member(late, session, 1))
    two.job.close(members)
    with pytest.raises(Forbidden, match=f"session {session} is {late}'s, and {STRANGER} has opened it"):
        server.beat(session, -1, b"")
    server.open(late, 1, session, False)
    server.beat(session, -1, b"")
    with pytest.raises(Forbidden, match=f"session {session} is {late}'s, and not {STRANGER}'s"):
        server.open(STRANGER, 1, session, False)


def test_who_is_no_chief_has_no_programs_verified(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token is looked at first."""
    monkeypatch.setattr(Plan, "check_programs", lambda plan: pytest.fail("it was verified"))
    with pytest.raises(PSError, match="newer chief"):
        two.cores[0].approve(1, 0, [Approved(two.plan)])


def test_a_refusal_is_short() -> None:
    """On every lane, however long what it complains of: it does not repeat the megabytes that were sent."""
    error = InvalidRequest(f"weights {(float('nan'),) * 500_000} are no counts")
    assert len(refusal_to_pb(error).message) == len(refusal(error)[1]) == MAX_DETAILS_BYTES
