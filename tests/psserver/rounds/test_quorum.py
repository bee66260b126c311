"""A quorum: rounds that some members suffice for; what the others send later is merged into the next round, on one
server and on two."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pswire.api import Contribution
from pswire.errors import ConfigError, InvalidRequest, NonfiniteError, PSError
from pswire.model.log import Snapshotted
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from tests.kit.contributions import Voters
from tests.kit.rig import SOON, WORKERS, checkpoint, manifest_of, reduce_only, scaling, sum_into

A, B, C = WORKERS[:3]
SIZE = 2


class Quorum(Voters):
    """Servers that vote, three members two of which suffice, and a plan that adds to a variable on each server. A
    member contributes a power of ten of its own in each round, so that a sum tells whose contributions it has."""

    def __init__(self, root, servers=1, size=SIZE, grace=0.0):
        super().__init__(root, servers)
        self.members = self.a, self.b, self.c = self.job.join(A, B, C, quorum=size, grace=grace)
        self.variables = [self.job.variable(self.a, np.zeros(2, "float64"), (n,)) for n in range(servers)]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.a)

    def push(self, worker, *servers, plan=None, turn=True, value=None, **said):
        """A member contributes on some servers, and goes on to its next round; returns the futures."""
        plan = plan or self.plan
        number = float(10 ** self.members.index(worker)) if value is None else value
        said.setdefault("previous", worker.round - 1)
        values = [np.full(r.tensor.shape, number, r.tensor.dtype) for r in plan.reductions]
        futures = [worker.push(plan, values, server=n, **said) for n in servers or (0,)]
        worker.round += turn
        return futures

    def in_time(self, *servers, **said):
        """The first two push; returns the futures."""
        return [future for worker in (self.a, self.b) for future in self.push(worker, *servers, **said)]

    def all_in_time(self):
        """One more round, of all members, which has what is still late."""
        servers = range(len(self.cores))
        for worker in self.members:
            worker.round = max(each.round for each in self.members)
        futures = [future for worker in self.members for future in self.push(worker, *servers, value=0.0)]
        self.hear()
        return [future.result(SOON) for future in futures]


@pytest.fixture
def one(tmp_path):
    return Quorum(tmp_path)


@pytest.fixture
def two(tmp_path):
    return Quorum(tmp_path, servers=2)


def test_what_comes_late_is_merged_into_the_next_round(one):
    """Its sender gets the values of then at once, and goes on."""
    first, _ = one.in_time()
    assert first.result(SOON).excluded == (C,)
    (late,) = one.push(one.c, want=(0,))
    reply = late.result(SOON)
    assert (reply.round, reply.excluded) == (0, (C,))
    assert reply.payload.tensors([one.variables[0].spec.tensor])[0].tolist() == [11, 11]
    assert one.values == [11]
    one.in_time()
    assert one.values == [122], "once, beside those that were in time"
    one.in_time()
    assert one.values == [133]


def test_a_member_counts_with_a_late_contribution_and_one_in_time(one):
    one.in_time()
    one.push(one.c)
    one.push(one.a)
    one.push(one.c)
    assert one.values == [11 + 1 + 2 * 100]


def test_a_round_waits_for_the_others_for_its_time_of_grace(tmp_path):
    """From when it has its quorum on: whoever comes within is in it."""
    late = Quorum(tmp_path, grace=5.0)
    first, _ = late.in_time()
    late.clock.now += 4.9
    late.job.servers.tick()
    assert not first.done()
    late.push(late.c)
    assert first.result(SOON).excluded == ()
    assert late.values == [111]
    first, _ = late.in_time()
    late.clock.now += 5.0
    late.job.servers.tick()
    assert first.result(SOON).excluded == (C,)


def test_the_status_names_those_that_a_round_waits_for(tmp_path):
    one = Quorum(tmp_path, grace=5.0)
    one.push(one.a)
    assert [waiting.missing for waiting in one.cores[0].status().waiting] == [(B, C)]
    one.push(one.b)
    assert [waiting.missing for waiting in one.cores[0].status().waiting] == [(C,)]


def test_a_resend_of_a_late_contribution_counts_once(one):
    """While it waits, and once it is merged."""
    one.in_time()
    resends = [one.push(one.c, turn=False)[0] for _ in range(2)]
    one.in_time()
    resends += one.push(one.c)
    assert [future.result(SOON).round for future in resends] == [0, 0, 0]
    one.all_in_time()
    assert one.values == [122]


def test_a_resend_that_arrives_ten_rounds_later_counts_once(one):
    """Its sender has gone on since, so it has been answered."""
    for _ in range(11):
        one.in_time()
        one.push(one.c)
    one.in_time()
    one.c.round = 0
    assert one.push(one.c)[0].result(SOON).round == 0
    one.all_in_time()
    assert one.values == [11 * 111 + 11]


def test_what_is_half_there_when_its_round_runs_is_merged_once_it_is_whole(one):
    """Its sender is answered then, and may use its memory again. What a resend brings completes it."""
    array = np.full(2, 100.0)
    payload, memory = Payload((), array.nbytes), bytearray(array.tobytes())
    said = Contribution(one.c.session, one.c.generation, one.c.round, one.plan.id, (1.0,), previous=-1)
    half = one.cores[0].push(said, payload)
    payload.add(0, memoryview(memory)[:8])
    one.in_time()
    assert not half.done()
    payload.add(8, memoryview(memory)[8:])
    assert half.result(SOON).excluded == (C,)
    memory[:] = bytes(16)
    one.c.round += 1
    one.in_time()
    assert one.values == [122]


def test_a_worker_that_comes_back_after_a_hundred_rounds(one):
    """It makes the rounds that it has missed, at once, also those whose records are forgotten; each counts once."""
    for _ in range(100):
        one.in_time()
    for number in range(100):
        (late,) = one.push(one.c)
        assert late.result(SOON).round == number
    one.push(one.a)
    (caught_up,) = one.push(one.c)
    assert caught_up.result(SOON).excluded == (B,)
    one.push(one.b)
    one.all_in_time()
    assert one.values == [101 * 111]


def test_a_resend_of_a_round_that_is_long_over_counts_once(one):
    """It was in time, and its sender hears of it a hundred rounds later."""
    (lost,) = one.push(one.c, turn=False)
    assert not lost.done()
    one.push(one.a)
    for _ in range(100):
        one.push(one.a)
        one.push(one.b)
    one.push(one.b)
    assert one.push(one.c)[0].result(SOON).round == 0
    one.all_in_time()
    assert one.values == [101 * 11 + 100]


def test_of_fewer_members_than_the_quorum_all_are_waited_for(one):
    first, *_ = one.push(one.a)
    one.job.close([one.a.member, one.b.member])
    assert not first.done(), "two suffice, and two are left"
    one.job.close([one.a.member])
    assert first.result(SOON).excluded == (B, C)


def test_rounds_without_updates_wait_for_all(one):
    plan = one.job.approve(reduce_only(one.variables[0].spec.tensor), one.a)
    first, _ = one.in_time(plan=plan)
    assert not first.done()
    one.push(one.c, plan=plan)
    assert first.result(SOON).excluded == ()


def test_late_contributions_wait_for_a_round_of_their_own_plan(one):
    """As with the fragments of a model, which are exchanged in turn."""
    other = one.job.approve(sum_into(one.variables[0], op="mean", returned=False), one.a)
    one.in_time()
    one.push(one.c)
    one.in_time(plan=other, value=2.0)
    assert one.values == [13]
    one.in_time()
    assert one.values == [13 + 111]


def test_a_late_contribution_may_have_other_operands(one):
    """Those of the members in time are used, as with a learning rate that follows the steps."""
    tensor = one.variables[0].spec.tensor
    apply = Apply(0, (0,), (Ref("variable", 0), Ref("reduction", 0), Ref("operand", 0)))
    rate = Operand(TensorSpec(tensor.dtype, ()), (0,))
    plan = one.job.approve(Plan((Reduction("sum", tensor, (0,)),), (rate,), (scaling(tensor),), (apply,)), one.a)
    one.in_time(plan=plan, operands=[1.0])
    one.push(one.c, plan=plan, operands=[1.0])
    one.in_time(plan=plan, operands=[0.5])
    assert one.values == [-11 - 111 / 2]


@pytest.mark.parametrize(("nonfinite", "values"), [("skip", [22]), ("raise", [22])])
def test_nan_in_a_late_contribution_is_that_of_the_round_it_is_merged_into(one, nonfinite, values):
    """Nothing of that round is applied, and the next one has it no more."""
    plan = one.job.approve(replace(one.plan, nonfinite=nonfinite), one.a)
    one.in_time(plan=plan)
    (late,) = one.push(one.c, plan=plan, value=float("nan"), nonfinite=(0,))
    assert late.result(SOON).round == 0
    futures = one.in_time(plan=plan)
    if nonfinite == "raise":
        assert isinstance(futures[0].exception(SOON), NonfiniteError)
    assert futures[0].done()
    one.in_time(plan=plan)
    assert one.values == values


def test_a_late_contribution_that_does_not_fit_is_refused_alone(one):
    one.in_time()
    with pytest.raises(InvalidRequest):
        one.c.job.verbs[0].push(
            Contribution(one.c.session, one.c.generation, 0, one.plan.id, (1.0,)), Payload.pack([np.zeros(7)])
        ).result(SOON)
    one.push(one.c)
    one.in_time()
    assert one.values == [122]


def test_processes_of_a_job_have_one_quorum(one):
    words = r"task:3 runs with ps.Quorum\(3, grace=0\), but .*task:0 with ps.Quorum\(2, grace=0\)"
    with pytest.raises(ConfigError, match=words):
        one.job.open(WORKERS[3], quorum=3)
    with pytest.raises(ConfigError, match=r"runs with ps.Quorum\(2, grace=1\), but"):
        one.job.open(WORKERS[3], quorum=2, grace=1.0)


def saved(job, plan, path):
    """All members save; returns what is in the checkpoint."""
    servers = range(len(job.cores))
    futures = [future for worker in job.members for future in job.push(worker, *servers, plan=plan)]
    job.hear()
    pending = [core.snapshot(job.job.token, plan.id, "") for core in job.cores]
    shards = [future.result(SOON) for future in pending]
    job.cores[0].snapshot(job.job.token, plan.id, manifest_of(shards)).result(SOON)
    assert all(future.done() for future in futures)
    job.job.append(Snapshotted(plan.id, shards[0].round, path))


@pytest.mark.parametrize("servers", [1, 2])
def test_a_checkpoint_has_the_rounds_that_are_over(tmp_path, servers):
    """What waits is in none of them, and counts in the next round; a restore drops it."""
    job, every = Quorum(tmp_path, servers), tuple(range(servers))
    job.in_time(*every)
    job.hear()
    job.push(job.c, *every)
    saved(job, job.job.approve(checkpoint("run/one", every), job.a), "run/one")
    assert job.values == [11] * servers
    job.in_time(*every)
    job.hear()
    assert job.values == [122] * servers
    job.push(job.c, *every)
    restore(job, every)
    assert job.values == [11] * servers
    job.all_in_time()
    assert job.values == [11] * servers


def restore(job, servers):
    """All members restore the checkpoint; votes are on their way between the servers."""
    turn = job.a.turn()
    job.job.prepare(job.a, "run/one", turn)
    plan = job.job.commit(job.a, "run/one", turn)
    futures = [future for worker in job.members for future in job.push(worker, *servers, plan=plan)]
    job.hear()
    assert all(future.done() for future in futures)


# ---- Two servers ----


def test_servers_merge_the_same(two):
    """One that only one server has when they vote waits for the round after the next."""
    two.in_time(0, 1)
    two.hear()
    assert two.values == [11, 11]
    (here,) = two.push(two.c, 0, turn=False)
    assert here.result(SOON).excluded == (C,)
    two.in_time(0, 1)
    two.hear()
    assert two.values == [22, 22], "one of the two does not have it"
    two.push(two.c, 1)
    two.in_time(0, 1)
    two.hear()
    assert two.values == [133, 133]


def test_what_is_in_time_on_one_server_alone_is_merged_on_both(two):
    futures = [*two.push(two.c, 0, turn=False), *two.push(two.a, 0, 1), *two.push(two.b, 1, turn=False)]
    two.push(two.b, 0)
    two.hear()
    assert two.values == [11, 11]
    assert {future.result(SOON).excluded for future in futures} == {(C,)}
    two.push(two.c, 1)
    two.in_time(0, 1)
    two.hear()
    assert two.values == [122, 122]


def test_of_a_lost_worker_counts_what_all_servers_have(two):
    """What only one server has is dropped, and does not wait for ever."""
    two.in_time(0, 1)
    two.hear()
    two.push(two.c, 0, 1)
    two.push(two.c, 0)
    two.job.close([two.a.member, two.b.member])
    for _ in range(4):
        two.in_time(0, 1)
        two.hear()
    assert two.values == [5 * 11 + 100] * 2
    assert not two.cores[0].machine.job.rounds.late.waiting


class Arrivals:
    """Members that push at random times: each push arrives at each server at some time, perhaps twice, and votes arrive
    late. A member pushes again once all servers have answered."""

    def __init__(self, job, luck):
        self.job, self.luck = job, luck
        self.living, self.pushed = list(job.members), 0.0
        self.travelling, self.answers = [], {}

    def step(self):
        """One thing happens."""
        job, luck = self.job, self.luck
        job.clock.now += luck.random() / 100
        match luck.choice(["push", "arrive", "arrive", "arrive", "vote", "vote", "tick"]):
            case "push":
                self.begin(luck.choice(self.living), float(luck.randrange(1, 1000)))
            case "arrive" if self.travelling:
                self.arrive(self.travelling.pop(luck.randrange(len(self.travelling))))
            case "vote" if job.votes:
                sender, receiver, vote = job.votes.pop(0)
                job.cores[receiver].hear(sender, vote)
            case "tick":
                job.job.servers.tick()

    def begin(self, worker, value, weight=1.0):
        """A member contributes, if it has all answers to its last round."""
        if not self._is_answered(worker):
            return
        answers = self.answers[worker.task] = dict.fromkeys(range(len(self.job.cores)), False)
        self.travelling += [(worker, worker.round, server, value, weight, answers) for server in answers]
        worker.round += 1
        self.pushed += value * weight

    def _is_answered(self, worker):
        return all(self.answers.get(worker.task, {}).values())

    def arrive(self, message):
        """A push arrives; it may come again later, also after its answer."""
        worker, round, server, value, weight, answers = message
        if self.luck.random() < 0.3:
            self.travelling.append(message)
        now, worker.round = worker.round, round
        try:
            weights = (weight,) * len(self.job.cores)
            (future,) = self.job.push(worker, server, value=value, weights=weights, turn=False)
            future.add_done_callback(lambda done: done.exception() or answers.update({server: True}))
        except PSError:
            assert worker not in self.living or answers[server], "what its sender waits for is refused"
        worker.round = now

    def lose(self, worker):
        """A member that has all its answers is lost."""
        if self._is_answered(worker):
            self.living.remove(worker)
            self.job.job.close([each.member for each in self.living])

    def settle(self):
        """All arrives, members that are behind make what they have missed, without examples, and one more round."""
        last = 1 + max(worker.round for worker in self.living)
        for _ in range(2000):
            for worker in self.living:
                if worker.round < last:
                    self.begin(worker, 0.0, 0.0)
            while self.travelling:
                self.arrive(self.travelling.pop())
            self.job.hear()
            self.job.clock.now += 0.02
            self.job.job.servers.tick()
            self.job.hear()
            if min(worker.round for worker in self.living) == last and all(map(self._is_answered, self.living)):
                return
        raise AssertionError("a push is not answered")


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_sums_are_exact_whatever_comes_late(tmp_path, servers, seed):
    """Random arrivals, resends and a lost worker: what was applied is what was pushed, each once, on all servers."""
    luck = Random(seed)
    arrivals = Arrivals(Quorum(tmp_path, servers, luck.choice([1, 2]), luck.choice([0.0, 0.02])), luck)
    for number in range(600):
        arrivals.step()
        if number > 300 and luck.random() < 0.02 and len(arrivals.living) == 3:
            arrivals.lose(arrivals.job.c)
    arrivals.settle()
    assert arrivals.job.values == [arrivals.pushed] * servers
    assert not any(core.machine.job.rounds.late.waiting for core in arrivals.job.cores)
