"""Whole rounds: what two servers agree on, with a network between them that the test turns."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from psserver.execution.compiled import CompiledRound
from psserver.programs.kernels.compiler import PATIENCE
from pswire.api import Contribution, RowRead, TableRead
from pswire.errors import Diverged, Fenced, MemoryLimit, NonfiniteError, ProgramError
from pswire.limits import PART_BYTES
from pswire.model.changes import Change
from pswire.model.consistency import Consistency
from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.log import Approved, Generation, GenerationClosed, Start
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref, SnapshotOrder
from pswire.model.status import MissedPeer
from pswire.model.tables import MIN_CAPACITY, Constant, CounterFilter, TableSpec
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from tests.kit.contributions import Sending, Voters, by_keys, create_part, keyed, part_of
from tests.kit.rig import SOON, WORKERS, compiler_of, given, powers_of, scaling, sum_into, turn

A, B = WORKERS[:2]
ONE = np.ones(2, "float32")
NUMBER = TensorSpec("int64", ())


class Two(Voters):
    """Two servers that vote, two members, a variable on each server, and a plan that adds to both."""

    def __init__(self, root, limits=()):
        super().__init__(root, limits=limits)
        self.a, self.b = self.job.join(A, B, mode="sync")
        self.variables = [self.job.variable(self.a, np.zeros(2, "float32"), (n,)) for n in (0, 1)]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.a)

    def push(self, worker, *servers, plan=None, **said):
        plan = plan or self.plan
        return [worker.push(plan, [ONE] * len(plan.reductions), server=n, **said) for n in servers]

    def both(self, **said):
        """Both members push on both servers; returns the futures."""
        return [*self.push(self.a, 0, 1, **said), *self.push(self.b, 0, 1, **said)]

    def round(self, **said):
        """A round of both; returns how it ended for each."""
        futures = self.both(**said)
        self.hear()
        turn(self.a, self.b)
        return errors(*futures)

    def lose(self, *lost):
        """The chief closes a generation without these."""
        self.job.close([w.member for w in (self.a, self.b) if w not in lost])


@pytest.fixture
def two(tmp_path):
    return Two(tmp_path)


def errors(*futures):
    return [type(future.exception(SOON)) for future in futures]


@pytest.mark.parametrize("streams", [False, True])
def test_nothing_is_visible_before_all_have_voted(tmp_path, monkeypatch, streams):
    """Neither an answer nor a value, on either server; a stream runs as its contributions come, into second arrays."""
    if streams:
        monkeypatch.setattr("pswire.model.plan.PART_BYTES", 0)
    two = Two(tmp_path)
    futures = two.both()
    assert not any(future.done() for future in futures)
    assert (two.values, two.lasts, len(two.votes)) == ([0, 0], [-1, -1], 2)
    two.hear()
    assert all(future.result(SOON).excluded == () for future in futures)
    assert (two.values, two.lasts) == ([2, 2], [0, 0])


def test_different_operands_fail_a_round_before_any_server_applies_it(two):
    """On all servers, also one that has no operand: no variable changes, and the servers go on."""
    plan = replace(
        two.plan,
        operands=(Operand(TensorSpec("float32", ()), (0,), "lr"),),
        programs=(*two.plan.programs, scaling(TensorSpec("float32", (2,)))),
        applies=(*two.plan.applies[1:], Apply(2, (0,), (*two.plan.applies[0].args, Ref("operand", 0)))),
    )
    two.job.approve(plan, two.a)
    futures = [
        *two.push(two.a, 0, 1, plan=plan, operands=[np.float32(0.1)]),
        *two.push(two.b, 0, 1, plan=plan, operands=[np.float32(0.2)]),
    ]
    two.hear()
    assert errors(*futures) == [Diverged] * 4
    assert "lr must be equal on all workers" in str(futures[0].exception())
    assert (two.values, two.lasts) == ([0, 0], [0, 0])
    assert [one.machine.job.runner.broken for one in two.cores] == [None, None]


def test_a_round_that_fails_on_one_server_fails_on_all(tmp_path):
    """With the one server's error; the next round runs."""
    two = Two(tmp_path, limits=(0, 40))
    large = TensorSpec("float32", (64,))
    plan = Plan((Reduction("sum", large, (1,), "large"), *two.plan.reductions), returned=(Ref("reduction", 0),))
    two.job.append(Approved(plan))
    futures = [worker.push(plan, [np.ones(64), ONE, ONE], server=n) for worker in (two.a, two.b) for n in (0, 1)]
    two.hear()
    assert errors(*futures) == [MemoryLimit] * 4
    assert two.lasts == [0, 0]
    turn(two.a, two.b)
    two.round()
    assert two.values == [2, 2]


def powers(two, exponents):
    """A plan that raises a counter on each server to the power of an operand, which only one server may refuse."""
    variables = [two.job.variable(two.a, np.asarray(3), (n,), name=f"n{n}") for n in (0, 1)]
    plan = two.job.approve(powers_of(*variables), two.a)
    push = [two.a.push(plan, exponents, server=n) for n in (0, 1)]
    return variables, push, lambda worker, *servers: [worker.push(plan, [1, 1], server=n) for n in servers]


def numbers(two, variables):
    return [int(one.machine.job.store.find(v.id).array) for one, v in zip(two.cores, variables, strict=True)]


def test_a_value_that_one_server_refuses_changes_none(two):
    """Each server tries before it votes: the error is told to all, on both servers."""
    variables, pushed, push = powers(two, [0, -5])
    futures = [*pushed, *push(two.b, 0, 1)]
    assert numbers(two, variables) == [3, 3], "a trial is visible"
    two.hear()
    assert errors(*futures) == [ProgramError] * 4
    assert numbers(two, variables) == [3, 3]


def test_a_trial_is_made_again_without_who_is_excluded(two):
    """And voted on again; only then it is visible."""
    variables, (first, *_), push = powers(two, [1, 1])
    (only,) = push(two.b, 0)
    two.lose(two.b)
    two.hear()
    assert first.result(SOON).excluded == (B,)
    assert errors(only) == [Fenced]
    assert numbers(two, variables) == [3, 3], "3 to the power of 1"
    two.hear()
    assert [record_of(one) for one in two.cores] == [(B,), (B,)]


def record_of(one):
    return one.machine.job.rounds.sequences[None].records[0].excluded


def test_votes_that_are_lost_are_said_again(two):
    """Once the servers are connected anew; votes that come twice, or late, change nothing, nor do those of another job:
    a server that has not heard of its end may still vote in it."""
    futures = two.both()
    lost = list(two.votes)
    for sender, receiver, vote in lost:
        two.cores[receiver].hear(sender, replace(vote, job=vote.job + 1))
    assert two.lasts == [-1, -1]
    two.votes.clear()
    for one, other in ((0, 1), (1, 0)):
        two.cores[one].meet(other)
    assert [(s, r, replace(v, closed=-1)) for s, r, v in two.votes] == [(s, r, v) for s, r, v in lost]
    two.hear()
    assert all(future.done() for future in futures)
    for sender, receiver, vote in lost * 2:
        two.cores[receiver].hear(sender, vote)
    assert (two.values, two.lasts) == ([2, 2], [0, 0])


def test_a_snapshot_has_whole_rounds_only(two):
    """The round that orders it is decided before anything is frozen."""
    futures = two.both(plan=two.job.approve(Plan(snapshot=SnapshotOrder("run/ckpt-1", (0, 1), 0)), two.a))
    assert all(one.machine.job.snapshots.saving == () for one in two.cores)
    two.hear()
    assert all(future.done() for future in futures)


def test_others_do_not_vote(tmp_path):
    """Rounds of one server, and those of one worker, cost no word, and are answered at once."""
    two = Two(tmp_path)
    plan = two.job.approve(sum_into(two.variables[0], returned=False), two.a)
    futures = [worker.push(plan, [ONE]) for worker in (two.a, two.b)]
    assert all(future.done() for future in futures)
    assert (two.votes, two.values) == ([], [2, 0])
    two.job.close([])
    a, b = two.job.join(A, B, mode="async")
    a.round = b.round = 1
    for worker in (a, b):
        two.push(worker, 0, 1)
    assert (two.votes, two.values) == ([], [4, 2])


# ---- Rounds that stream ----


@pytest.fixture
def streamed(tmp_path, monkeypatch):
    """Two servers on which every round streams."""
    monkeypatch.setattr("pswire.model.plan.PART_BYTES", 0)
    return Two(tmp_path)


@pytest.fixture
def compiled(streamed):
    """The two servers, once they have compiled the kernel of their plan."""
    with kernels_of(streamed):
        yield streamed


@contextmanager
def kernels_of(two):
    """Has two servers compile the kernel of their plan."""
    for one in two.cores:
        one.kernels.smallest = 0
        compiler_of(one)
    addresses(two, PATIENCE + 1)
    for one in two.cores:
        one.kernels.compiler.wait()
    addresses(two, 1)
    yield
    for one in two.cores:
        one.kernels.close()


def addresses(two, rounds):
    """Makes rounds; returns where the value of the first server's variable lies after each."""
    found = []
    for _ in range(rounds):
        assert two.round() == [type(None)] * 4
        found.append(two.cores[0].machine.job.store.find(two.variables[0].id).array.ctypes.data)
    return found


def test_a_round_that_cannot_be_refused_is_compiled(two):
    """It needs no trial: once it is decided it runs in place, as that of one server."""
    with kernels_of(two):
        assert len({*addresses(two, 4)}) == 1
        plans = [one.machine.job.rounds.plans[two.plan.id] for one in two.cores]
        assert [[type(each) for each in plan.compiled.values()] for plan in plans] == [[CompiledRound]] * 2
        assert two.values == [2 * (two.lasts[0] + 1)] * 2


def test_streams_write_into_two_arrays_by_turns(compiled):
    """What a round has replaced serves the next one, and nothing is allocated; an array that somebody reads is not
    written, neither as a value, nor once it was replaced."""
    one, other, *later = addresses(compiled, 6)
    assert one != other
    assert later == [one, other] * 2
    read = compiled.cores[0].machine.job.store.find(compiled.variables[0].id).array
    before = read.copy()
    assert read.ctypes.data not in addresses(compiled, 4)
    np.testing.assert_array_equal(read, before)


def test_the_second_arrays_of_a_stream_count_in_the_limit(tmp_path, monkeypatch):
    """A plan that streams is refused where a server has no memory for them, on all; it says what it needs."""
    monkeypatch.setattr("pswire.model.plan.PART_BYTES", 0)
    fits, short = Two(tmp_path, limits=(0, 32)), Two(tmp_path, limits=(0, 28))
    for two, expected in ((fits, [type(None)] * 2), (short, [MemoryLimit] * 2)):
        assert two.round()[:2] == expected


# ---- Beside other rounds ----


def change(two, made, round, mode):
    """The entry of a change that both members ask for; they go on from there."""
    asked, number = Change(made, round, Consistency(mode)), two.job.generation.number + 1
    members = tuple(map(asked.moved, two.job.generation.members))
    two.job.generation = Generation(number, members, str(asked), Start(number, round))
    for worker in (two.a, two.b):
        worker.generation, worker.round = number, round
    return GenerationClosed(two.job.generation)


def test_a_vote_counts_that_comes_before_its_server_knows_of_the_change(two):
    """Its number may be below that of the rounds which this server has made, one by one, for each worker."""
    two.job.append(change(two, 0, 0, "async"))
    for _ in range(4):
        assert all(each.done() and each.result().excluded == () for each in two.both())
        turn(two.a, two.b)
    assert two.values == [8.0, 8.0]
    entry, first = change(two, 1, 4, "sync"), two.cores[0]
    length = first.status().log
    first.approve(two.job.token, length, [entry])
    futures = two.both()
    two.hear()
    assert not any(each.done() for each in futures)
    two.cores[1].approve(two.job.token, length, [entry])
    two.hear()
    assert [each.result(0).round for each in futures] == [4] * 4
    assert (two.values, two.lasts) == ([10.0, 10.0], [4, 4])


def test_an_own_round_is_not_taken_for_one_that_streams(job):
    """An own round with the number, and the wishes, of a large round that is on its way waits for the end of that, and
    gets an answer of its own."""
    two = job.join(A, B)
    apart = job.variable(two[0], np.array(0), alone=True)
    large = job.variable(two[0], np.zeros(PART_BYTES // 8 + 100, "int64"))
    plan = job.approve(sum_into(apart), two[0])
    common = job.approve(sum_into(large, returned=False), two[0])
    shared = [Sending(worker, common, [np.ones(large.spec.tensor.shape, "int64")]) for worker in two]
    assert all(sending.begun for sending in shared)  # it streams
    said = Contribution(two[0].session, two[0].generation, 0, plan.id, (1.0,), alone=True)
    begun = []
    own = job.servers.cores[0].push(said, Payload.pack([np.array(10)]), begun.append)
    assert not own.done()
    assert [sending.come() and sending.reply.done() for sending in shared] == [False, True]
    assert [sending.reply.result(0).payload.size for sending in shared] == [0, 0]
    assert [int(each) for each in given(own.result(0), plan)] == [10]
    assert (begun, [len(sending.begun) for sending in shared]) == ([], [1, 1])
    assert int(job.value(two[0], large, 0).sum()) == 2 * large.spec.tensor.shape[0]


SPEC = TableSpec((2,), initializer=Constant(0.0))
CUTS = range(512), range(512, BUCKETS)


class Tables(Two):
    """Two servers with a part of a table each. Attributes: tables: the parts; plan: adds rows to both."""

    def __init__(self, root, spec=SPEC, **more):
        super().__init__(root)
        self.spec = spec
        self.tables = [
            create_part(self.job, self.a, part_of(2 + n, spec, n, CUTS[n], name=f"users/part_{n}")) for n in (0, 1)
        ]
        self.plan = self.job.approve(by_keys(*self.tables, **more), self.a)

    def push(self, worker, *servers, keys=(), value=1.0, lookups=(), **said):
        """A member contributes rows for its keys on some servers; returns the futures."""
        futures = []
        owners = buckets_of(hashes_of(np.array(keys, np.int64), self.spec.salt)) // 512
        for n in servers:
            mine = [key for key, owner in zip(keys, owners, strict=True) if owner == n]
            counts = tuple(len(mine) * (place == n) for place in (0, 1))
            asked = (RowRead.of(self.tables[n].id, np.array(lookups, np.int64)),) if lookups else ()
            header = Contribution(
                worker.session, worker.generation, worker.round, self.plan.id, (1.0, 1.0), rows=counts, lookups=asked
            )
            payload = Payload.pack(keyed(mine, value))
            futures.append(self.job.verbs[n].push(replace(header, **said), payload))
        return futures

    @property
    def sizes(self):
        """The rows of each part, as they are without a round under way."""
        asked = [[TableRead(self.tables[n].id, "size")] for n in (0, 1)]
        found = [self.job.verbs[n].pull(0, [], -1, [], asked[n]) for n in (0, 1)]
        return [reply.result(SOON).rows[0] if reply.done() else "not decided" for reply in found]

    def rows(self, *keys):
        owners = buckets_of(hashes_of(np.array(keys, np.int64), self.spec.salt)) // 512
        found = []
        for key, n in zip(keys, owners.tolist(), strict=True):
            read = RowRead.of(self.tables[n].id, np.array([key], np.int64))
            reply = self.job.verbs[n].pull(0, [], -1, [read]).result(SOON)
            found.append(float(reply.payload.tensors([TensorSpec("float32", (1, 2))])[0][0, 0]))
        return found


KEYS = list(range(20))


@pytest.fixture
def tabled(tmp_path):
    return Tables(tmp_path)


def test_rows_are_visible_once_all_have_voted(tabled):
    """Neither their number nor a row before; a reader waits for the verdict."""
    futures = tabled.both(keys=KEYS)
    assert tabled.sizes == ["not decided"] * 2
    tabled.hear()
    assert all(future.result(SOON).excluded == () for future in futures)
    assert sum(tabled.sizes) == 20
    assert tabled.rows(*KEYS) == [2.0] * 20


def test_who_is_excluded_has_made_no_rows(tabled):
    """Its keys are as if they had never come, on the server that had run with them as well."""
    tabled.push(tabled.a, 0, 1, keys=KEYS[:10])
    (late,) = tabled.push(tabled.b, 0, keys=KEYS)
    tabled.lose(tabled.b)
    tabled.hear()
    assert errors(late) == [Fenced]
    tabled.hear()
    assert sum(tabled.sizes) == 10
    assert tabled.rows(*KEYS) == [1.0] * 10 + [0.0] * 10


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_round_that_is_not_applied(tmp_path, nonfinite):
    """It makes no rows, and counts no keys; rows that are looked up are those before."""
    tabled = Tables(tmp_path, replace(SPEC, admission=CounterFilter(2)), nonfinite=nonfinite)
    futures = [
        *tabled.push(tabled.a, 0, 1, keys=KEYS, value=np.nan, nonfinite=(0, 1)),
        *tabled.push(tabled.b, 0, 1, keys=KEYS),
    ]
    tabled.hear()
    assert errors(*futures) == [NonfiniteError if nonfinite == "raise" else type(None)] * 4
    assert tabled.sizes == [0, 0]
    turn(tabled.a, tabled.b)
    futures = [*tabled.push(tabled.a, 0, 1, keys=KEYS[:5]), *tabled.push(tabled.b, 0, 1)]
    tabled.hear()
    assert tabled.sizes == [0, 0]


def test_a_table_that_refuses_changes_none(tmp_path):
    """A part that has no room fails the round on both servers; the next one goes on."""
    tabled = Tables(tmp_path, replace(SPEC, capacity=MIN_CAPACITY))
    mine = [key for key in range(40_000) if buckets_of(hashes_of(np.array([key]), SPEC.salt))[0] < 512][:9000]
    futures = [*tabled.push(tabled.a, 0, 1, keys=mine), *tabled.push(tabled.b, 0, 1, keys=[-1, -2, -3])]
    tabled.hear()
    assert errors(*futures) == [MemoryLimit] * 4
    assert tabled.sizes == [0, 0]
    turn(tabled.a, tabled.b)
    futures = [*tabled.push(tabled.a, 0, 1, keys=KEYS), *tabled.push(tabled.b, 0, 1)]
    tabled.hear()
    assert errors(*futures) == [type(None)] * 4
    assert sum(tabled.sizes) == 20


def test_status_tells_for_how_long_a_server_is_not_reached(two):
    """And why, as the last attempt has found; one that is connected again is not told of."""
    one = two.cores[0]
    for worker in (two.a, two.b):
        two.push(worker, 0)
    for seconds, reason in ((40.0, "refused"), (10.0, "no route")):
        one.miss(1, reason)
        two.clock.now += seconds
    assert one.status().missed == (MissedPeer(1, 0, 50.0, "no route"),)
    one.meet(1)
    assert one.status().missed == ()
