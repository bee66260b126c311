"""Servers that hold the same variables: what they find out about each other, and how one of them comes back."""

from dataclasses import replace

import numpy as np
import pytest

from psserver.effects import Work
from psserver.rounds import backlog, digests
from psserver.rounds.digests import MAX_NAMES
from psserver.values.dense import Dense
from pswire.errors import CheckpointError, PSError, ServerGone
from pswire.model.log import GenerationClosed, Gone, JobStarted, Return
from pswire.servers.votes import Digest
from tests.kit.contributions import Mail, Voters
from tests.kit.rig import SOON, WORKERS, checkpoint, core, eventually, sum_into, together

ONE = np.ones(2, "float32")
ROUNDS = 16
"""In a span of rounds: fewer than in a server, which keeps the tests short."""


@pytest.fixture(autouse=True)
def spans(monkeypatch):
    monkeypatch.setattr(digests, "ROUNDS", ROUNDS)


class Copies(Voters):
    """Some servers, each of which has the copies of the one before it; one member, and a variable for each server."""

    def __init__(self, root, count=2, copied=True):
        super().__init__(root, count, copied=copied)
        (self.worker,) = self.job.join(WORKERS[0], mode="sync")
        places = [(number, (number + 1) % count) for number in range(count)]
        self.variables = [self.job.variable(self.worker, np.zeros(2, "float32"), place) for place in places]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.worker)

    def round(self, plan=None, values=None, change=lambda vote: [vote]):
        """Makes a round, of ones or as given; returns the answers."""
        plan = plan or self.plan
        pushed = [self.worker.push(plan, values or [ONE] * len(plan.reductions), server=n) for n in plan.servers]
        self.hear(change)
        self.worker.round += 1
        return together(*pushed)

    def rounds(self, last, **how):
        """Makes rounds up to and with the last one."""
        while self.worker.round <= last:
            self.round(**how)

    def turn(self, server, variable):
        """Turns a bit of a variable over on one server, which no sum of these tests rounds away."""
        value = self.cores[server].machine.job.store.find(self.variables[variable].id).array
        value.view("uint32")[0] ^= 1 << 20

    def compared(self):
        """How often each server has found the same values, and others."""
        return [(one.tally.digests["equal"], one.tally.digests["different"]) for one in self.cores]

    def found(self):
        """What each server says that differs: the other server, the round, the names, and how often they agreed."""
        statuses = [one.status() for one in self.cores]
        return [[(d.server, d.round, d.variables, d.agreed) for d in status.differences] for status in statuses]


@pytest.fixture
def copies(tmp_path):
    return Copies(tmp_path)


def test_servers_compare_once_in_a_span_of_rounds(copies):
    """Nothing before the first of the second span is over; its digests come with the votes of the next round."""
    copies.rounds(ROUNDS)
    assert copies.compared() == [(0, 0), (0, 0)]
    copies.rounds(ROUNDS + 1)
    assert copies.compared() == [(1, 0), (1, 0)]
    copies.rounds(3 * ROUNDS + 1)
    assert copies.compared() == [(3, 0), (3, 0)]
    assert copies.found() == [[], []]


def test_nothing_is_hashed_without_copies(tmp_path):
    """Variables of several servers are compared as little as others are."""
    one = Copies(tmp_path, copied=False)
    said = []
    one.rounds(2 * ROUNDS + 2, change=lambda vote: said.append(vote.digest) or [vote])
    assert set(said) == {None}
    assert one.compared() == [(0, 0), (0, 0)]
    assert not one.cores[0].tally.hashing


@pytest.mark.parametrize("server", [0, 1])
def test_one_bit_is_found_by_both_and_said_once(copies, caplog, server):
    """In which variable, after which round; as long as it is so the status says it, and the log once."""
    copies.rounds(ROUNDS + 5)
    copies.turn(server, 1)
    copies.rounds(2 * ROUNDS + 1)
    name, first = "v1", 2 * ROUNDS
    assert copies.found() == [[(1, first, (name,), 1)], [(0, first, (name,), 1)]]
    copies.rounds(4 * ROUNDS + 1)
    assert copies.found() == [[(1, first, (name,), 1)], [(0, first, (name,), 1)]]
    assert copies.compared() == [(1, 3)] * 2
    warned = [record.getMessage() for record in caplog.records if "and its copy on" in record.getMessage()]
    assert sorted(warned) == [
        f"/job:ps/task:{n} and its copy on /job:ps/task:{1 - n} have different values of '{name}' after round "
        f"{first}. The two "
        "machines compute differently, or one has faulty memory"
        for n in (0, 1)
    ]
    one, other = (each.machine.job.store.find(copies.variables[1].id).array for each in copies.cores)
    one[:] = other
    copies.rounds(5 * ROUNDS + 1)
    assert copies.found() == [[], []], "what is the same again differs no more"


def test_a_variable_is_compared_that_the_compared_round_does_not_assign(copies):
    """Programs make sections in turn: what any of the rounds since the last time has assigned is compared."""
    even, odd = (copies.job.approve(sum_into(each, returned=False), copies.worker) for each in copies.variables)
    while copies.worker.round < ROUNDS + 2:
        copies.round(odd if copies.worker.round % 2 else even)
        if copies.worker.round == 10:
            copies.turn(1, 1)
    assert [names for _, _, names, _ in copies.found()[0]] == [("v1",)]


def test_what_no_round_has_assigned_is_not_hashed(copies):
    plan = copies.job.approve(sum_into(copies.variables[0], returned=False), copies.worker)
    said = []
    copies.rounds(ROUNDS + 1, plan=plan, change=lambda vote: said.append(vote.digest) or [vote])
    digests = [digest for digest in said if digest is not None]
    assert [digest.variables for digest in digests] == [(copies.variables[0].id,)] * 2


def test_servers_compare_what_both_hold(tmp_path):
    """Of four, neighbours; who holds nothing that another one holds compares nothing with it."""
    copies = Copies(tmp_path, 4)
    copies.rounds(ROUNDS)
    copies.turn(2, 1)
    copies.rounds(2 * ROUNDS + 1)
    assert [[server for server, *_ in found] for found in copies.found()] == [[], [2], [1], []]


def test_a_digest_that_is_lost_is_said_again(copies):
    copies.rounds(ROUNDS)
    copies.turn(0, 0)
    futures = [copies.worker.push(copies.plan, [ONE, ONE], server=n) for n in (0, 1)]
    assert all(vote.digest is not None for *_, vote in copies.votes)
    copies.votes.clear()
    copies.cores[0].meet(1)
    copies.cores[1].meet(0)
    copies.hear()
    assert all(future.done() for future in futures)
    assert copies.compared() == [(1, 0), (1, 0)]  # of the round before the bit turned
    copies.worker.round += 1
    copies.rounds(2 * ROUNDS + 1)
    assert copies.compared() == [(1, 1), (1, 1)]


def test_a_digest_that_is_repeated_counts_once(copies):
    """And an older one that comes late changes nothing."""
    kept = []
    copies.rounds(2 * ROUNDS + 1, change=lambda vote: kept.append(vote) or [*kept, vote])
    assert copies.compared() == [(2, 0), (2, 0)]


def test_a_variable_that_one_server_alone_tells_of_is_not_compared(copies):
    """One of the two may have begun to make rounds later, or know of NaN in it."""
    extra = Digest(ROUNDS, (copies.variables[0].id, 12345), (1, 2))
    without = Digest(ROUNDS, (), ())
    for said, wanted in ((without, (1, 0)), (extra, (0, 1))):
        machine = copies.cores[0].machine
        machine.job.digests._pairs.clear()
        copies.cores[0].tally.digests.clear()
        before = copies.worker.round
        copies.rounds(before | (ROUNDS - 1))
        copies.rounds(copies.worker.round)
        said = replace(said, round=copies.worker.round - 1)
        machine.job.digests.hear(1, said)
        tally = copies.cores[0].tally.digests
        assert (tally["equal"], tally["different"]) == wanted
        copies.rounds(copies.worker.round + 2)


def test_variables_with_nan_are_not_compared(copies):
    """Processors make NaN in several ways, and there is nothing left to be right."""
    copies.rounds(3)
    assert all(reply.warnings for reply in copies.round(values=[np.array([np.nan, 1], "float32"), ONE]))
    said = []
    copies.rounds(ROUNDS + 1, change=lambda vote: said.append(vote.digest) or [vote])
    assert [digest.variables for digest in said if digest] == [(copies.variables[1].id,)] * 2


def test_many_differences_are_named_in_part(tmp_path):
    copies = Copies(tmp_path)
    more = [copies.job.variable(copies.worker, np.zeros(2, "float32"), (0, 1)) for _ in range(MAX_NAMES + 1)]
    copies.variables += more
    plan = copies.job.approve(sum_into(*more, returned=False), copies.worker)
    copies.rounds(1, plan=plan)
    for number in range(2, len(copies.variables)):
        copies.turn(1, number)
    copies.rounds(ROUNDS + 1, plan=plan)
    (found,) = copies.cores[0].status().differences
    assert (len(found.variables), found.more) == (MAX_NAMES, 1)
    assert found.told.endswith(" and 1 more")


def test_no_round_begins_while_values_are_hashed(copies, tmp_path):
    """It would write into what is read; the answers of the round before have left."""
    pieces = []
    one = copies.cores[0]
    carried = one._arrays.run
    hashes = one.machine.job.digests._hash

    def run(piece, brief):
        (effect,) = piece.args[0]
        assert isinstance(effect, Work)
        pieces.append(piece) if effect.call == hashes else carried(piece, brief)

    one._arrays.run = run
    copies.rounds(ROUNDS)
    assert len(pieces) == 1
    futures = [copies.worker.push(copies.plan, [ONE, ONE], server=n) for n in (0, 1)]
    copies.hear()
    assert [future.done() for future in futures] == [False, False]
    pieces.pop()()
    copies.hear()
    assert [future.result(SOON).excluded for future in futures] == [(), ()]
    copies.worker.round += 1
    assert copies.compared() == [(1, 0), (1, 0)]


# ---- Servers that are lost, and come back ----


def lose(copies, server):
    """The chief says that a server is gone; votes to it and of it are lost."""
    entry = Gone(server, "was lost")
    for one in copies.cores:
        if one.server != server:
            one.approve(copies.job.token, one.status().log, [entry])
    copies.votes[:] = [vote for vote in copies.votes if server not in vote[:2]]


def test_what_differs_from_a_server_that_is_lost_is_forgotten(copies):
    """Nothing is compared with it, and its last digest, which comes late, is refused with its vote."""
    copies.rounds(ROUNDS)
    copies.turn(0, 0)
    copies.rounds(2 * ROUNDS + 1)
    assert copies.found()[0]
    late = []
    futures = [copies.worker.push(copies.plan, [ONE, ONE], server=n) for n in (0, 1)]
    late += [vote for vote in copies.votes if vote[0] == 1]
    lose(copies, 1)
    assert copies.found()[0] == []
    with pytest.raises(ServerGone):
        copies.cores[0].hear(1, late[0][2])
    assert futures[0].result(SOON)
    assert copies.compared()[0] == (1, 1)


def come_back(copies):
    """Server 1 is back as another process, without its variables; returns it, and what the others have of these."""
    new, number = core(1, 777, clock=copies.clock), copies.job.generation.number + 1
    new.others = Mail(1, copies.votes)
    generation = replace(
        copies.job.generation, number=number, returns=Return(1, 777, number, True, copies.worker.round)
    )
    others = [one for one in copies.cores if one.server != 1]
    log = [*others[0].machine.job.log.entries]
    for one in (*others, new):
        have = one.status().log
        one.approve(copies.job.token, have, [*log[have:], GenerationClosed(generation)])
    held = {id: Dense(value.copy()) for one in others for id, value in one.machine.job.store.values().items()}
    new.open(WORKERS[0], 1, copies.worker.session, False)
    copies.cores[1] = copies.job.verbs[1] = new
    copies.worker.generation, copies.job.generation = number, generation
    return new, {v.id: held[v.id] for v in copies.variables if 1 in v.servers}


def read(copies, new, held):
    new.machine.job.store.commit(held)
    new.machine.job.rounds.backlog.has_read(copies.job.generation.number)
    new.tick()


def test_a_server_that_is_back_is_compared_anew(tmp_path):
    """It makes no digest in the span in which it comes back, and is told apart from its former life."""
    copies = Copies(tmp_path, 3)
    copies.rounds(ROUNDS)
    copies.turn(1, 0)
    copies.rounds(2 * ROUNDS + 3)
    assert copies.found()[0]
    lose(copies, 1)
    new, held = come_back(copies)
    read(copies, new, held)
    assert not copies.found()[0]
    copies.rounds(3 * ROUNDS)
    assert new.tally.digests == {"equal": 0, "different": 0}
    copies.rounds(3 * ROUNDS + 1)
    assert new.tally.digests == {"equal": 2, "different": 0}
    assert copies.found() == [[], [], []]


def test_a_server_that_reads_that_it_is_gone_ends(copies, tmp_path):
    """The chief tells it so where it answers still: also the server that keeps the log, which may have more of it. A
    new process that reads of the loss of the one before goes on: it is no part of the job yet, and has to read nothing
    that no plan has saved for it."""
    copies.rounds(3)
    for one in copies.cores:
        server, token = one.server, copies.job.token
        length = one.status().log
        assert one.approve(token, length - 1, [Gone(server, "had other values")]) == length - 1
        assert one.machine.outlived.message == "the job goes on without this server, because it had other values"
        assert one.machine.left.done()
        assert one.done.done()
    one = core(1, 5, 0, tmp_path)
    log = [JobStarted(7 << 20, (100, 101), copies=(1, 0)), Gone(1, "had other values")]
    assert one.approve(1, 0, log) == 2
    assert one.approve(1, 2, [Gone(1, "was lost again")]) == 3
    assert one.machine.outlived is None
    with pytest.raises(CheckpointError, match="this server is not writing the checkpoint"):
        one.snapshot(1, b"", "").result(SOON)


# ---- Catching up: it votes in rounds, and makes them once it has its variables ----


class Back(Copies):
    """Two servers one of which, `new`, is back, and has not read its variables, of which the values are `held`.
    Attributes: returning, saving: plans of rounds that return what they reduce, and that save."""

    def __init__(self, root):
        super().__init__(root)
        self.returning = self.job.approve(sum_into(*self.variables), self.worker)
        self.saving = self.job.approve(checkpoint("run/ckpt-1", (0, 1)), self.worker)
        self.rounds(2)
        lose(self, 1)
        self.new, self.held = come_back(self)

    def values(self, server):
        return [value.tolist() for _, value in sorted(self.cores[server].machine.job.store.values().items())]


@pytest.fixture
def back(tmp_path):
    return Back(tmp_path)


def test_rounds_are_made_once_the_variables_are_there(back):
    """Each once, in order; their members were answered before."""
    last = back.worker.round + 5
    back.rounds(last)
    status = back.new.status()
    assert (status.round, status.recovering) == (last, True)
    assert not back.new.machine.job.store.values()
    read(back, back.new, back.held)
    eventually(lambda: not back.new.status().recovering)
    back.rounds(last + 1)
    assert back.values(1) == back.values(0) == [[last + 2.0] * 2] * 2


def test_what_a_round_returns_of_reductions_it_has_at_once(back):
    """Each server returns one of the two."""
    replies = back.round(back.returning)
    first, second = (b"".join(data for _, data in reply.payload.chunks) for reply in replies)
    assert first == second == ONE.tobytes()


def test_a_save_waits_for_the_variables(back):
    futures = [back.worker.push(back.saving, [], server=n) for n in (0, 1)]
    back.hear()
    assert not futures[1].done()
    read(back, back.new, back.held)
    eventually(lambda: back.hear() or all(future.done() for future in futures))
    assert back.values(1) == back.values(0)


def test_a_backlog_has_an_end(back, monkeypatch):
    """Rounds wait then, and are made when there is room."""
    monkeypatch.setattr(backlog, "BACKLOG_BYTES", 2 * 2 * 16)
    back.rounds(back.worker.round + 1)
    futures = [back.worker.push(back.plan, [ONE, ONE], server=n) for n in (0, 1)]
    back.hear()
    assert not any(future.done() for future in futures)
    read(back, back.new, back.held)
    eventually(lambda: back.hear() or all(future.done() for future in futures))
    assert back.values(1) == back.values(0)


def test_a_read_waits_for_the_rounds(back):
    """Of a variable that is not here yet, too; one that nobody knows is refused then."""
    back.rounds(back.worker.round + 1)
    ids = [variable.id for variable in back.variables]
    known, unknown = (back.new.pull(back.worker.session, names, back.worker.round - 1) for names in (ids, [99]))
    assert not known.done()
    read(back, back.new, back.held)
    eventually(known.done)
    assert np.frombuffer(known.result().payload.chunks[0][1], "float32")[0] == back.values(0)[0][0]
    with pytest.raises(PSError):
        unknown.result(SOON)
