"""Who has a session and is in no generation decides nothing for those who do, and costs them next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psserver.plans import memory
from pstesting.clock import Clock
from tests.kit import internals as inside
from tests.kit.contributions import part_of
from tests.kit.internals import pb
from tests.kit.rig import SOON, WORKERS, Job, Servers, checkpoint, core, create, sum_into

FOUR = inside.TensorSpec("float32", (4,))
STRANGER = inside.Task("worker", 7)


class Two:
    """Two members of a job on two servers, who make its rounds, and the session of somebody besides."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.cores = [core(number, root=root, max_sessions=8, **more) for number in (0, 1)]
        self.job = Job(Servers([*self.cores], self.cores, Clock(), root, False))
        self.members = self.job.join(*WORKERS[:2])
        self.variable = self.job.variable(self.members[0], np.zeros(4, "float32"))
        self.plan = self.job.approve(sum_into(self.variable, returned=False), self.members[0])
        self.session = self.job.open(STRANGER).session
        self.sum = 0.0

    def propose(self, plan: inside.Plan | None, entry: str, start: inside.Start | None) -> object:
        """What the outsider proposes."""
        return self.cores[0].propose(self.session, plan, entry, start)

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


MANY = inside.VariableSpec("many", FOUR)
OUTSIDE, NOWHERE = "is not in a generation", "can wait only at"
REFUSED: dict[str, tuple[Callable[[Two], object], str]] = {
    "a start": (lambda two: two.propose(None, "", inside.Start(two.job.generation.number, 99)), OUTSIDE),
    "a plan": (lambda two: two.propose(sum_into(two.variable), "", None), OUTSIDE),
    "a checkpoint": (lambda two: two.propose(checkpoint("x", (0, 1)), "", None), OUTSIDE),
    "a restore": (
        lambda two: two.cores[0].restore(two.session, "x", inside.Turn(1 << 63), inside.RestoreOrder("open")),
        OUTSIDE,
    ),
    # What is no entry at which newcomers wait is not kept: all that watch the log are told of it, in one message.
    "a word": (lambda two: two.propose(None, "x", None), NOWHERE),
    "a long word": (lambda two: two.propose(None, "x" * (3 << 20), None), NOWHERE),
    "no dataset": (lambda two: two.propose(None, "dataset:", None), NOWHERE),
    "a large dataset": (lambda two: two.propose(None, "dataset:" + "9" * 11, None), NOWHERE),
    "no plan": (lambda two: two.propose(None, "plan:" + "g" * 64, None), NOWHERE),
    # What is checked for each of many arguments would be checked for each of many servers, under the lock.
    "a server twice": (lambda two: create(two.cores[0], two.session, 1, MANY, (0, 0)), "are not distinct servers"),
    # Each number that a server is told of it keeps; and server 0 alone names variables, so that its log is the chief's.
    "a number": (lambda two: create(two.cores[1], two.session, inside.MAX_VARIABLES, MANY, (1,)), "not placed on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_outsider_says_is_refused(two: Two, case: str) -> None:
    """The log stays as it is, and members go on and restore as if nobody had asked."""
    says, words = REFUSED[case]
    before, log = [one.status() for one in two.cores], list(two.cores[0].machine.job.log.entries)
    with pytest.raises(inside.InvalidRequest, match=words):
        says(two)
    assert [one.status() for one in two.cores] == before
    assert two.cores[0].machine.job.log.entries == log
    assert not two.cores[0].machine.job.log.proposed
    assert [state.join_point for state in two.cores[0].machine.members.states(0.0)] == ["", "", ""]
    two.round()
    worker = two.members[0]
    with pytest.raises(inside.NoCheckpoint):
        two.cores[0].restore(worker.session, "x", worker.turn(), inside.RestoreOrder("open")).result(SOON)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.thread_time()
    yield
    assert time.thread_time() - began < seconds


SUM = pb.Reduction(op=pb.Reduction.SUM, tensor=pb.TensorSpec(dtype="float32", shape=[4]), servers=[0])
PLANS: dict[str, Callable[[], Any]] = {
    "programs": lambda: pb.Plan(programs=[pb.Program()] * 300_000),
    "nodes": lambda: pb.Plan(programs=[pb.Program(nodes=[pb.Node()] * 300_000)]),
    "nodes of many programs": lambda: pb.Plan(programs=[pb.Program(nodes=[pb.Node()] * 5_000)] * 11),
    "attributes": lambda: pb.Plan(programs=[pb.Program(nodes=[pb.Node(attrs=[pb.Attr()] * 300_000)])]),
    "outputs": lambda: pb.Plan(programs=[pb.Program(outputs=[0] * 300_000)]),
    "applications": lambda: pb.Plan(applies=[pb.Apply()] * 300_000),
    "arguments": lambda: pb.Plan(applies=[pb.Apply(args=[pb.Ref(kind=2)] * 300_000)]),
    "cuts": lambda: pb.Plan(trims=[pb.Trim()] * 300_000),
    "values that come back": lambda: pb.Plan(reductions=[SUM], returned=[pb.Ref(kind=2)] * 300_000),
}
EMPTY: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {
    case: (inside.messages.PLAN.from_pb, made) for case, made in PLANS.items()
}
SHAPE_FROM = inside.messages.MAPPER.pairs[inside.TensorSpec].from_pb
EMPTY["dimensions"] = SHAPE_FROM, lambda: pb.TensorSpec(dtype="float32", shape=[(1 << 63) - 1] * 400_000)


@pytest.mark.parametrize("case", EMPTY)
def test_a_plan_of_empty_parts_is_not_read(case: str) -> None:
    """Its bytes are few, and its parts many, as are dimensions of a shape: they are counted before anything is made."""
    limit = f"at most ({inside.MAX_PLAN_NODES}|{inside.MAX_PLAN_ITEMS}) |400000 dimensions"
    read, message = EMPTY[case]
    with within(2.0), pytest.raises(inside.InvalidRequest, match=limit):
        read(message())


def test_a_server_is_named_once(two: Two) -> None:
    """Else what is checked for each of many arguments is checked for each of many servers, under the lock."""
    program = inside.Program(tuple(inside.Input("value", FOUR) for _ in range(3000)), (), (), ())
    apply = inside.Apply(0, (0,), (inside.Ref("reduction", 0),) * 3000)
    plan = inside.Plan((inside.Reduction("sum", FOUR, (0,) * 100_000),), programs=(program,), applies=(apply,))
    with within(2.0), pytest.raises(inside.InvalidRequest, match="are not distinct servers"):
        two.cores[0].propose(two.members[0].session, plan, "", None)
    two.round()


def test_large_programs_are_looked_into_without_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are answered meanwhile, whether they are proposed or approved; who is no chief has none verified."""
    two = Two(tmp_path, memory_limit=1 << 20)
    (of, seen) = memory.Need.of, []

    def look(program: inside.Program) -> object:
        seen.append([one._lock.locked() for one in two.cores])
        return of(program)

    monkeypatch.setattr(memory.Need, "of", look)
    two.job.approve(sum_into(two.variable), two.members[0])
    assert seen == [[False, False]] * len(seen)
    assert seen
    monkeypatch.setattr(inside.Plan, "check_programs", lambda plan: pytest.fail("it was verified"))
    with pytest.raises(inside.PSError, match="newer chief"):
        two.cores[0].approve(1, 0, [inside.Approved(two.plan)])  # its token is looked at first


def test_the_log_says_what_a_table_is(two: Two) -> None:
    """The same for a part of one: whoever has taken its buckets before, by any number, and what lies beside them."""
    spec, server, slot = inside.TableSpec((2,)), two.cores[1], inside.SlotTensor("m", "float32", (2,))
    squatters = [
        *(part_of(7, spec, 1, range(100, 600), name="mine"), part_of(8, spec, 1, range(100, 600), slot)),
        part_of(9, inside.TableSpec((3,)), 1, table="items", name="mine, too"),
    ]
    assert server.create_batch(two.session, squatters).error is None
    parts = [
        *(part_of(1, spec, 1), part_of(2, spec, 1, slot=slot), part_of(3, spec, 1, table="items", name="items")),
        part_of(4, spec, 1, table="more", name="more"),
    ]
    assert two.cores[0].create_batch(two.members[0].session, parts).error is None
    two.job.append()
    assert server.create_batch(two.members[0].session, parts).initialized == (1, 2, 3, 4)
    asked = [inside.TableRead(part.id, "size") for part in parts]
    assert server.pull(two.members[0].session, [], -1, [], asked).result(SOON).rows == (0,) * 4
    again = server.create_batch(two.session, squatters)
    assert again.count == 0
    assert "has buckets 100 to 599 of 'users', but 'users' has some of them" in str(again.error)
    two.round()


def test_a_table_that_cannot_be_held_is_not_in_the_way(tmp_path: Path) -> None:
    """The chief's log goes on, whoever has had server 0 name it for another server; who creates it there is told."""
    two = Two(tmp_path, memory_limit=1 << 20)
    large = part_of(1, inside.TableSpec((2,), admission=inside.CBFFilter(2, 1 << 36)), 1)
    assert two.cores[0].create_batch(two.session, [large]).error is None
    two.job.append()
    assert isinstance(two.cores[1].create_batch(two.members[0].session, [large]).error, inside.MemoryLimit)
    with pytest.raises(inside.InvalidRequest, match="variable 1 is not a dynamic table on this server"):
        two.cores[1].pull(two.session, [], -1, [], [inside.TableRead(1, "size")]).result(SOON)
    two.round()


@pytest.mark.parametrize("begun", [False, True])
def test_a_session_is_of_the_task_that_the_generation_says(two: Two, begun: bool) -> None:
    """On a server that does not give the numbers, who opens a member's first contributes nothing in its name; also
    where the generation has begun by then."""
    late, server = WORKERS[2], two.cores[1]
    session = two.cores[0].open(late, 1, 99, False).session
    members = (*(worker.member for worker in two.members), inside.Member(late, session, 1))
    steps = [lambda: server.open(STRANGER, 1, session, False), lambda: two.job.close(members)]
    for step in steps[:: -1 if begun else 1]:
        step()
        server.heartbeat(two.members[0].session, -1, b"")
    with pytest.raises(inside.Forbidden, match=f"session {session} belongs to {late}, but {STRANGER} has opened it"):
        server.heartbeat(session, -1, b"")
    server.open(late, 1, session, False)
    server.heartbeat(session, -1, b"")
    with pytest.raises(inside.Forbidden, match=f"session {session} belongs to {late}, not to {STRANGER}"):
        server.open(STRANGER, 1, session, False)


def test_who_only_looks_is_told_at_once() -> None:
    """Also where nothing has happened yet: nobody would know that it is gone, and has not to be waited for."""
    with closing(core()) as one:
        assert one.watch(0, 0, 0).done()
        assert len(one.machine.watches.news) == 0
