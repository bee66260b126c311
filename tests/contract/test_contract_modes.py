"""Rounds of one worker: of asynchronous workers, of variables that each updates alone, and with bounded staleness."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.kit import internals as inside
from tests.kit.cases import search
from tests.kit.internals import (
    RESTS,
    WINDOW,
    ConfigError,
    Fenced,
    InvalidRequest,
    Plan,
    Position,
    RestoreCommit,
    WorkerProgress,
)
from tests.kit.rig import (
    NOWHERE,
    SOON,
    WORKERS,
    Job,
    checkpoint,
    eventually,
    given,
    serving,
    sgd,
    sum_into,
    together,
)

A, B, C = WORKERS[:3]
HERE, THERE = (Position(0, 0, 3),), (Position(0, 2, 8),)
BOTH = (0, 1)


class Lone:
    """Two workers whose rounds are their own: `async`, or `alone` for a variable of a synchronous job.

    Args:
        job: where.
        mode: which.
    """

    def __init__(self, job: Job, mode: str) -> None:
        self.job, self.alone = job, mode == "alone"
        self.two = job.join(A, B, mode="sync" if self.alone else "async")

    def adder(self, value, servers=(0,), plan=sum_into):
        """A variable, and a plan for it."""
        variable = self.job.variable(self.two[0], np.asarray(value), servers, alone=self.alone)
        return variable, self.job.approve(plan(variable), self.two[0])

    def push(self, worker, plan, values, **keys):
        """Makes a worker's next round; nobody else has to do anything."""
        return worker.make(plan, values, **keys, **({"alone": True} if self.alone else {}))

    def back(self, worker):
        """Has a worker begin again with round 0."""
        worker.own = worker.round = 0


@pytest.fixture(params=["async", "alone"])
def lone(job, request):
    """Two members of the job."""
    return Lone(job, request.param)


def common(job, *workers):
    """Makes a round of all; returns its variable."""
    shared, plan = job.adder(workers[0])
    together(*(worker.push(plan, [5]) for worker in workers))
    return shared


# ---- Answered at once ----


def test_a_push_is_answered_at_once(job, lone):
    """With what it has done alone; the other has not begun. Each has its own numbers."""
    one, other = lone.two
    variable, plan = lone.adder([1, 2])
    for number in range(3):
        reply = lone.push(other, plan, [[10, 20]], want=(variable.id,))
        assert (reply.round, reply.generation, reply.more, reply.excluded) == (number, job.generation, False, ())
        total, value = given(reply, plan, 0, (variable,))
        assert total.tolist() == [10, 20]
        assert value.tolist() == [10 * number + 11, 20 * number + 22]
    assert lone.push(one, plan, [[1, 1]], more=True).round == 0


def test_a_resend_is_answered_and_not_applied_twice(job, lone):
    """Also if others have made any number of rounds since, and whatever rounds of all there are; one that is long over
    is only refused."""
    one, other = lone.two
    variable, plan = lone.adder(0)
    if lone.alone:
        shared = common(job, one, other)  # round 0 as well
    lone.push(one, plan, [100])
    for _ in range(WINDOW + 2):
        lone.push(other, plan, [1])
    assert int(given(lone.push(one, plan, [100]), plan)[0]) == 100  # the next number: it counts
    lone.back(one)
    again = lone.push(one, plan, [100])
    assert (again.round, int(given(again, plan)[0])) == (0, 100)
    lone.back(other)
    with pytest.raises(InvalidRequest, match="round 0 is over"):
        lone.push(other, plan, [1])
    assert int(job.value(one, variable)) == 202 + WINDOW
    if lone.alone:
        assert int(job.value(one, shared, 0)) == 10


def test_a_mean_is_over_the_weights_of_the_push(job, lone):
    """Other workers' replicas and operands do not count."""
    _, plan = lone.adder([10.0, 20.0], plan=sgd)
    for worker, rate in zip(lone.two, (0.5, 0.25), strict=True):
        reply = lone.push(worker, plan, [[6.0, 9.0]], weights=(3.0,), operands=[rate])
    assert given(reply, plan)[0].tolist() == [8.5, 17.75]


def test_who_is_fenced_adds_no_more(job, lone):
    """By the generation, on every server: what it sends late does not count, and the other is not held up. Who comes
    back begins anew, or goes on in its task's place: its rounds are no others' resends."""
    one, other = lone.two
    variable, plan = lone.adder(0, (1,))
    lone.push(one, plan, [1], server=1, positions=HERE)
    job.close([other.member])
    with pytest.raises(Fenced, match=r"was removed|new generation"):
        lone.push(one, plan, [100], server=1)
    lone.push(other, plan, [10], server=1)
    (back,) = job.join(A, mode=other.mode)
    if not lone.alone:
        (place, _) = job.verbs[1].status().places
        assert place == WorkerProgress(A, 0, HERE)
        with pytest.raises(Fenced, match="completed without this process"):
            lone.push(back, plan, [1], server=1)
        back.round = place.round + 1
    assert lone.push(back, plan, [1000], server=1).round == (0 if lone.alone else 1)
    assert int(job.value(back, variable)) == 1011


# ---- Asynchronous workers ----


@pytest.fixture
def free(job: Job):
    """Two members of the job, which are asynchronous."""
    return job.join(A, B, mode="async")


def test_each_counts_its_own_rounds(job, free):
    """In any order; the status counts all of one server. Whether the other goes on is nothing to it."""
    variable, plan = job.adder(free[0])
    for worker in (0, 1, 1, 1, 0):
        assert free[worker].make(plan, [1], positions=(HERE, THERE)[worker], more=worker == 0).more == (worker == 0)
    status = job.verbs[0].status()
    assert status.round == 4
    assert status.places == (WorkerProgress(A, 1, HERE), WorkerProgress(B, 2, THERE))
    assert job.verbs[1].status().places == ()
    assert int(job.value(free[0], variable)) == 5


def test_pushes_of_all_at_once(job, free):
    """From threads: integer-valued, exactly the sum; each sees its own in what comes back."""
    variable, plan = job.adder(free[0])

    def run(worker, number):
        for turn in range(1, 41):
            (_, value) = given(worker.make(plan, [number], want=(variable.id,)), plan, 0, (variable,))
            assert int(value) >= turn * number

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, worker, 1000**place) for place, worker in enumerate(free)]:
            done.result(SOON)
    assert int(job.value(free[0], variable)) == 40 * 1001
    assert job.verbs[0].status().round == 79


def test_all_have_one_mode(job, free):
    """Who comes with another is told both, and begins no session."""
    with pytest.raises(ConfigError, match=r"worker/task:2 runs with ps.Sync\(\).*worker/task:0 with ps.Async\(\)"):
        job.verbs[0].open(C, 1, 0, False)
    assert job.open(C, mode="async").session > free[1].session


def test_a_checkpoint_is_of_the_push_that_orders_it(job, free):
    """Its values and its positions; those of others come before or after it."""
    one, other = free
    adds = [job.adder(one, 0, (server,))[1] for server in BOTH]
    order = job.approve(checkpoint("run/ckpt-1", BOTH), one)

    def add_all():
        for server, plan in enumerate(adds):
            other.make(plan, [1], server=server, positions=THERE)

    add_all()
    one.push(order, server=0, positions=HERE).result(SOON)
    add_all()
    one.push(order, server=1, positions=HERE).result(SOON)
    add_all()
    shards = [server.snapshot(job.token, order.id, "").result(SOON) for server in job.verbs]
    assert [(shard.round, shard.positions) for shard in shards] == [(0, HERE)] * 2
    saved = [load_file(f"{shard.path}/{shard.file}") for shard in shards]
    assert [int(found[f"v{server}"]) for server, found in enumerate(saved)] == [1, 2]


# ---- Alone, beside rounds of all ----


@pytest.fixture
def apart(job: Job, two):
    """A variable that each updates alone, and the plan that adds to it."""
    variable = job.variable(two[0], np.array(0), alone=True)
    return variable, job.approve(sum_into(variable), two[0])


def push(worker, plan, values, server=0, **keys):
    """Makes its next round of its own."""
    return worker.make(plan, values, server=server, alone=True, **keys)


def test_rounds_of_all_do_not_count_them(job, two, apart):
    """Nor does one wait for the other. Whoever asks where the job stands is not told of them: the chief, a process that
    comes back, a reader after a round."""
    variable, plan = apart
    for _ in range(4):
        push(two[0], plan, [1])
    status = job.verbs[0].status()
    assert (status.round, status.places, status.waiting) == (-1, (), ())
    shared, common = job.adder(two[0])
    waits = two[0].push(common, [1])
    assert push(two[0], plan, [1]).round == 4
    assert not waits.done()
    together(waits, two[1].push(common, [2]))
    assert int(job.value(two[0], shared, 0)) == 3
    assert job.verbs[0].status().round == 0
    reader = job.verbs[0].pull(two[0].session, [variable.id], 1)
    push(two[1], plan, [1])
    assert not reader.done()


def test_one_that_is_half_there_is_nobodys_concern(job, two, apart):
    """What waits is told to the chief, who lets go of whoever holds a round of all up: this one holds nobody up."""
    unknown = sum_into(apart[0], returned=False)
    waits = two[0].push(unknown, [1], alone=True)  # a plan that nobody has approved yet
    assert job.verbs[0].status().waiting == ()
    job.approve(unknown, two[0])
    assert waits.result(SOON).round == 0


def test_one_round_of_several_servers_asks_nobody(job, two):
    """Each server applies it when it comes; a mean is over its own weights."""
    variables = [job.variable(two[0], np.array([10.0, 20.0]), (server,), alone=True) for server in (0, 1)]
    plans = [job.approve(sgd(variable), two[0]) for variable in variables]
    both = job.approve(sum_into(*variables), two[0])
    first = two[0].push(both, [[1.0, 1.0]] * 2, server=0, alone=True)
    assert first.result(SOON).round == 0
    assert job.value(two[1], variables[1]).tolist() == [10.0, 20.0]
    two[0].push(both, [[1.0, 1.0]] * 2, server=1, alone=True).result(SOON)
    two[0].own += 1
    for server, plan in enumerate(plans):
        push(two[1], plan, [[6.0, 9.0]], server, weights=(3.0,), operands=[0.5])
    assert [job.value(two[0], v).tolist() for v in variables] == [[10.0, 19.5]] * 2


def test_what_who_is_fenced_had_sent_whole_counts(job, two, apart):
    """And nothing that comes later."""
    variable, plan = apart
    push(two[0], plan, [1])
    waits = sum_into(variable, returned=False)
    two[0].push(waits, [10], alone=True, previous=0)
    sequences = job.servers.cores[0].machine.job.rounds.sequences  # status does not tell what one has sent for itself
    eventually(lambda: any(sequence.open for key, sequence in [*sequences.items()] if key is not None))
    job.close([two[1].member])
    with pytest.raises(Fenced, match="was removed from the job"):
        two[0].push(plan, [100], alone=True).result(SOON)
    job.approve(waits, two[1])
    eventually(lambda: int(job.value(two[1], variable)) == 11)
    assert job.verbs[0].status().round == -1


@pytest.mark.parametrize("what", ["another variable", "both", "a save", "a restore"])
def test_only_such_variables_may_be_updated_alone(job, two, apart, what):
    """Whatever a process says: others would compute with what is not of all of them. Nor may it save, or restore."""
    shared = job.variable(two[0], np.array(0))
    servers = tuple(range(len(job.verbs)))
    plan = {
        "another variable": sum_into(shared),
        "both": sum_into(apart[0], shared),
        "a save": checkpoint("run/ckpt-1", servers),
        "a restore": Plan(restore=RestoreCommit("run", servers)),
    }[what]
    job.approve(plan, two[0])
    with pytest.raises(InvalidRequest, match=r"created with ps.Async\(\)"):
        two[0].push(plan, [1] * len(plan.reductions), alone=True).result(SOON)
    common = job.approve(sum_into(shared, returned=False), two[0])
    together(*(worker.push(common, [1]) for worker in two))
    assert int(job.value(two[0], shared, 0)) == 2


def test_a_checkpoint_has_what_was_added_before_it(job, two, apart):
    """Of rounds of all, whose order it is, and of each member's own that were answered before it came to the save."""
    variable, plan = apart
    push(two[0], plan, [1])
    push(two[1], plan, [10])
    servers = tuple(range(len(job.verbs)))
    order = job.approve(checkpoint("run/ckpt-1", servers), two[0])
    pushed = [two[0].push(order, server=server) for server in servers]
    push(two[1], plan, [100])  # it is not there yet
    together(*pushed, *(two[1].push(order, server=server) for server in servers))
    push(two[1], plan, [1000])
    shards = [server.snapshot(job.token, order.id, "").result(SOON) for server in job.verbs]
    saved = load_file(job.servers.root / shards[0].path / shards[0].file)
    assert int(saved[variable.spec.name]) == 111
    assert int(job.value(two[0], variable)) == 1111


# ---- Bounded staleness: answered when nobody is more than k rounds behind ----


@pytest.fixture
def near(job: Job):
    """Two members of the job, of which one may be a round ahead."""
    return job.join(A, B, mode="bounded", k=1)


def sent(worker, plan, **keys):
    """Makes its next round; returns the answer to come.

    Calls overtake each other on the way: who does not wait for the answer of one says in the next which was before it.
    """
    future = worker.push(plan, [1], **keys)
    worker.round += 1
    return future


def applied(job, server=0):
    """How many rounds are over on a server."""
    return job.verbs[server].status().round + 1


def held(job, server=0):
    """The rounds whose answers wait, with the tasks that they wait for."""
    return [(one.round, one.missing) for one in job.verbs[server].status().waiting]


def ahead(job, worker, **keys):
    """A worker is two rounds ahead, so that the answer of the second is held: a variable, its plan, and that answer."""
    variable, plan = job.adder(worker)
    assert sent(worker, plan).result(SOON).round == 0
    late = sent(worker, plan, **keys)
    eventually(lambda: applied(job) == 2)
    assert held(job) == [(1, (B,))]
    assert not late.done()
    return variable, plan, late


def test_an_answer_is_held_and_brings_what_is_new(job, near):
    """It was applied at once, says so in the status, and comes with the values of when it goes. A resend waits as well,
    and was applied once."""
    one, other = near
    variable, plan, late = ahead(job, one, want=(0,))
    assert job.verbs[0].status().gap == 2
    one.round -= 1
    again = sent(one, plan, want=(0,))
    assert int(job.value(other, variable)) == 2
    assert not again.done()
    sent(other, plan).result(SOON)
    for answer in (late, again):
        reply = answer.result(SOON)
        assert (reply.round, [int(each) for each in given(reply, plan, 0, (variable,))]) == (1, [1, 3])
    assert held(job) == []
    assert job.verbs[0].status().gap == 1


def test_who_does_not_wait_is_applied_no_further(job, near):
    """A client that sends on without its answers is held at the same place, whatever it does."""
    one, other = near
    variable, plan = job.adder(one)
    futures = [sent(one, plan, previous=number - 1) for number in range(4)]
    eventually(lambda: applied(job) == 2)
    sent(other, plan)
    eventually(lambda: applied(job) == 4)
    assert int(job.value(other, variable)) == 4
    assert futures[1].result(SOON).round == 1
    assert not futures[2].done()
    for number in (1, 2):
        sent(other, plan, previous=number - 1)
    futures[3].result(SOON)
    assert int(job.value(other, variable)) == 7


@pytest.mark.parametrize("how", ["leave", "generation", "lease"])
def test_who_goes_releases_the_others(job, near, how):
    """A clean farewell, or a lease that ends, at server 0 at once, before any generation says so; and on all servers
    with the generation that leaves it out."""
    one, other = near
    *_, late = ahead(job, one)
    if how == "leave":
        job.verbs[0].leave(other.session, "")
    elif how == "generation":
        job.close([one.member])
    else:
        job.servers.spend(12, one.session)
        with pytest.raises(Fenced):
            job.verbs[0].heartbeat(other.session, -1, b"")
    late.result(SOON)


def test_a_newcomer_begins_where_the_slowest_is(job, near):
    """Nobody waits for it before it tells that it makes rounds, nor for it to catch up."""
    one, other = near
    _, plan = job.adder(one)
    for number in range(3):
        sent(one, plan, previous=number - 1)
        sent(other, plan).result(SOON)
    (new,) = job.join(C, mode="bounded", k=1)
    for worker in (one, other, one):
        sent(worker, plan).result(SOON)
    job.verbs[0].heartbeat(new.session, -1, b"", clock=0)
    assert {place.task: place.clock for place in job.verbs[0].status().places} == {A: 5, B: 4, C: 4}
    late = sent(one, plan)
    sent(other, plan).result(SOON)
    assert held(job) == [(5, (C,))]
    new.round = 4
    sent(new, plan).result(SOON)
    late.result(SOON)


def test_a_save_is_answered_at_once(job, near):
    """It is a round of one worker, which the others do not make."""
    one, _ = near
    _, plan = job.adder(one)
    sent(one, plan).result(SOON)
    order = job.approve(checkpoint("run/ckpt-1", BOTH), one)
    for server in BOTH:
        one.push(order, server=server).result(SOON)
    one.round += 1
    late = sent(one, plan)
    eventually(lambda: applied(job) == 3)
    assert held(job) == [(2, (B,))]
    assert not late.done()


def test_all_have_one_bound(job, near):
    """Who comes with another is told both, and begins no session."""
    for consistency, words in (
        (inside.Consistency("bounded", staleness=3), r"ps.BoundedStaleness\(3\)"),
        (inside.ASYNC, r"ps.Async\(\)"),
    ):
        with pytest.raises(ConfigError, match=rf"task:2 runs with {words}, .*task:0 with ps.BoundedStaleness\(1\)"):
            job.verbs[0].open(C, 1, 0, False, consistency)


def test_k_0_is_lockstep(job):
    """Nobody begins a round before all have pushed the one before."""
    workers = job.join(A, B, C, mode="bounded", k=0)
    _, plan = job.adder(workers[0])
    for number in range(3):
        answers = []
        for count, worker in enumerate(workers):
            assert not any(answer.done() for answer in answers)
            answers.append(sent(worker, plan))
            eventually(lambda done=3 * number + count + 1: applied(job) == done)
        assert [answer.result(SOON).round for answer in answers] == [number] * 3


STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push"] * 8 + ["rest", "back", "die", "leave"])))


@search(1.5)
@drawn(st.integers(2, 4), st.integers(0, 3), STEPS, st.booleans())
def test_the_gap_is_bounded_and_nobody_waits_within_it(count, k, steps, eager):
    """Whatever order workers push, rest, die and leave in, and whether or not they wait for their answers.

    No answer is out while another worker that counts is more than k rounds behind; none waits while nobody is; and
    once all others have gone nothing waits at all, and each push was counted once.
    """
    with serving("core", 1, NOWHERE) as servers:
        job = Job(servers)
        workers = job.join(*WORKERS[:count], mode="bounded", k=k)
        variable, plan = job.adder(workers[0])
        futures = {worker.session: {} for worker in workers}
        here = {worker.session: worker for worker in workers}
        resting, answered, pushes = set(), set(), 0

        def clocks():
            """The clocks that count, by session."""
            told = {place.task: place.clock - 1 for place in job.verbs[0].status().places}
            return {s: told[worker.task] for s, worker in here.items() if s not in resting}

        def check():
            at = clocks()
            for session in here:
                least = min((clock for other, clock in at.items() if other != session), default=10**9)
                for number, future in futures[session].items():
                    if future.done():
                        if (session, number) not in answered:
                            assert number - least <= k
                            answered.add((session, number))
                    else:
                        assert number - least > k, "it waits, and nobody is too far behind"

        for index, what in steps:
            worker = workers[index % count]
            session = worker.session
            if session not in here or (what in ("die", "leave") and len(here) == 1):
                continue
            mine = futures[session]
            if what == "push":
                open_now = sum(not future.done() for future in mine.values())
                if session in resting:
                    job.verbs[0].heartbeat(session, -1, b"", clock=worker.round)
                    resting.discard(session)
                    worker.round = max(worker.round, clocks()[session] + 1)
                if open_now < (3 if eager else 1):
                    number, before = worker.round, max(mine, default=-1)
                    mine[number] = sent(worker, plan, previous=before)
                    pushes += 1
            elif what == "rest" and all(future.done() for future in mine.values()):
                job.verbs[0].heartbeat(session, -1, b"", clock=RESTS)
                resting.add(session)
            elif what == "back" and session in resting:
                job.verbs[0].heartbeat(session, -1, b"", clock=worker.round)
                resting.discard(session)
                worker.round = max(worker.round, clocks()[session] + 1)
            elif what in ("die", "leave"):
                del here[session]
                resting.discard(session)
                if what == "leave":
                    job.verbs[0].leave(session, "")
                job.close([one.member for one in here.values()])
            check()
        last = next(iter(here.values()))
        job.close([last.member])
        assert all(future.done() for future in futures[last.session].values())
        counted = int(job.value(last, variable))
        gone = [future for one, sent in futures.items() if one != last.session for future in sent.values()]
        dead = sum(not future.done() or future.exception() is not None for future in gone)
        assert pushes - dead <= counted <= pushes
