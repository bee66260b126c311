"""Rounds for which some members suffice, on one server and on two: with backup workers what the last send counts
nowhere, with a quorum it is merged into the next round."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from psserver.rounds.sequences import BEHIND
from pswire.api import Contribution
from pswire.errors import Diverged, Fenced, InvalidRequest, NonfiniteError, PSError
from pswire.model.log import Snapshotted
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref, SnapshotOrder
from pswire.model.program import Input, Program
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from tests.kit.contributions import Voters
from tests.kit.rig import SOON, WORKERS, checkpoint, manifest_of, powers_of, reduce_only, scaling, sum_into

A, B, C = WORKERS[:3]
VECTOR, NUMBER = TensorSpec("float64", (2,)), TensorSpec("int64", ())


class Late(Voters):
    """Servers that vote, three members of which one may be late, and a plan that adds to a variable on each server. A
    member contributes a power of ten of its own in each round, so that a sum tells whose contributions it has.

    Args:
        root: see `Voters`.
        servers: how many.
        begin: True if all make a first round, whose sum `values` are without: before it nobody is left out.
        how: the consistency of all members.
    """

    def __init__(self, root, servers=1, begin=False, **how):
        super().__init__(root, servers)
        self.members = self.a, self.b, self.c = self.job.join(A, B, C, **how)
        self.variables = [self.job.variable(self.a, np.zeros(2), (n,)) for n in range(servers)]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.a)
        self.before = 111 * begin
        if begin:
            self.all_in_time(None)

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

    def all_in_time(self, value=0.0):
        """One more round, of all members, which has what is still late."""
        servers = range(len(self.cores))
        for worker in self.members:
            worker.round = max(each.round for each in self.members)
        futures = [future for worker in self.members for future in self.push(worker, *servers, value=value)]
        self.hear()
        return [future.result(SOON) for future in futures]

    def come(self, memory):
        """The last member's push begins to come, of which half is there; returns its payload and its future."""
        payload = Payload((), len(memory))
        said = Contribution(self.c.session, self.c.generation, self.c.round, self.plan.id, (1.0,))
        half = self.cores[0].push(replace(said, previous=self.c.round - 1), payload)
        payload.add(0, memoryview(memory)[:8])
        return payload, half

    @property
    def values(self):
        """What is in the variable of each server, beside the first round's."""
        return [value - self.before for value in super().values]


# ---- Backup workers ----


@pytest.fixture
def three(tmp_path):
    """One of three members may be late to what follows their first round."""
    return Late(tmp_path, begin=True, backup_workers=1)


@pytest.fixture
def two_servers(tmp_path):
    return Late(tmp_path, servers=2, begin=True, backup_workers=1)


def test_a_round_is_made_without_the_last(three):
    """Its record names it. When it comes it is told so, and how far the others are, and gets the values of now."""
    (first,) = three.push(three.a, want=(0,))
    assert not first.done()
    (second,) = three.push(three.b)
    assert [future.result(SOON).excluded for future in (first, second)] == [(C,), (C,)]
    assert [future.result(SOON).over for future in (first, second)] == [0, 0], "who is in time is not behind"
    three.in_time()
    assert three.values == [22]
    (late,) = three.push(three.c, want=(0,))
    reply = late.result(SOON)
    assert (reply.round, reply.excluded, reply.over) == (1, (C,), 3)
    assert reply.payload.tensors([VECTOR])[0].tolist() == [133, 133], "the values of now"
    assert three.values == [22], "what came late counts nowhere"
    (behind,) = three.push(three.c)
    assert behind.result(SOON).over == 3


def test_all_who_are_whole_when_it_runs_count(three):
    """A round that has waited for its plan has all contributions that came meanwhile."""
    other = sum_into(*three.variables, op="mean", returned=False)
    three.job.verbs[0].propose(three.a.session, other, "", None)
    futures = [three.push(worker, plan=other)[0] for worker in three.members]
    three.job.approve(other, three.a)
    assert [future.result(SOON).excluded for future in futures] == [()] * 3
    assert three.values == [37]


def test_half_a_late_contribution_is_let_go_of(three):
    """When the round runs its sender is answered, and what has come of it is not kept, nor what still comes."""
    payload, half = three.come(np.full(2, 100.0).tobytes())
    three.in_time()
    assert half.result(SOON).excluded == (C,)
    payload.add(8, memoryview(bytes(8)))
    assert (payload.chunks, payload.whole) == ([], True)
    assert three.values == [11]


@pytest.mark.parametrize(("backup", "begin"), [(1, False), (0, True)], ids=["of who has not begun", "without any"])
def test_a_round_waits_for_who_has_not_begun(tmp_path, backup, begin):
    """At the start of a job, and where one comes later: until it has made its first round; and without backup workers
    for all of its members, whatever has come."""
    three = Late(tmp_path, begin=begin, backup_workers=backup)
    first, _ = three.in_time()
    assert not first.done()
    three.push(three.c)
    assert first.result(SOON).excluded == ()


def test_a_round_waits_for_who_is_too_far_behind(three):
    """It finds the records of all rounds that it has missed, and is left out again once it has made them up."""
    for _ in range(BEHIND):
        three.in_time()
    assert three.lasts == [BEHIND]
    three.in_time()
    assert three.lasts == [BEHIND], "it would not find its record"
    (late,) = three.push(three.c)
    assert late.result(SOON).excluded == (C,)
    assert three.lasts == [BEHIND + 1]
    for _ in range(BEHIND):
        (late,) = three.push(three.c)
        assert late.result(SOON).excluded == (C,)
    assert three.values == [11 * (BEHIND + 1)]


def test_who_has_no_examples_is_none_of_those_who_suffice(three):
    """At the end of a pass those who have data are waited for, however slow they are."""
    (first,), _ = three.push(three.a, weights=(0.0,)), three.push(three.b)
    assert not first.done()
    three.push(three.c)
    assert first.result(SOON).excluded == ()
    assert three.values == [110]


def test_of_fewer_members_fewer_suffice(three):
    """Lost ones are not waited for; with as many left as backup workers one is enough, and two lost ones are named."""
    (first,) = three.push(three.a)
    assert not first.done()
    three.job.close([three.a.member, three.b.member])
    assert first.result(SOON).excluded == (B, C)
    assert three.values == [1]


@pytest.mark.parametrize("kind", ["reduction", "save", "operands"])
def test_other_rounds_wait_for_all(three, kind):
    """What is reduced to be looked at is of all members, and so is a checkpoint; and what nobody contributes to."""
    assigning = Program((Input("variable", VECTOR), Input("operand", VECTOR)), (), ((0, 1),), ())
    apply = Apply(0, (0,), (Ref("variable", three.variables[0].id), Ref("operand", 0)))
    plans = {
        "reduction": reduce_only(VECTOR),
        "save": replace(three.plan, snapshot=SnapshotOrder("a", (0,), 1)),
        "operands": Plan((), (Operand(VECTOR, (0,)),), (assigning,), (apply,)),
    }
    plan = three.job.approve(plans[kind], three.a)
    said = {"operands": [np.ones(2)]} if kind == "operands" else {}
    first, _ = three.in_time(plan=plan, **said)
    assert not first.done()
    three.push(three.c, plan=plan, **said)
    assert first.result(SOON).excluded == ()


def test_a_late_member_with_another_section_has_diverged(three):
    three.in_time()
    with pytest.raises(Diverged, match=r"in round 1 .*worker/task:0.*worker/task:2"):
        three.push(three.c, plan=three.job.approve(reduce_only(NUMBER), three.a))


def test_servers_leave_the_same_ones_out(two_servers):
    """One has all three, the other two: those two count on both, and the third is told so on both."""
    three, plan = two_servers, sum_into(*two_servers.variables, op="mean", returned=False)
    three.job.verbs[0].propose(three.a.session, plan, "", None)
    futures = three.push(three.c, 0, plan=plan, turn=False)
    futures += [future for worker in (three.a, three.b) for future in three.push(worker, 0, 1, plan=plan)]
    three.job.approve(plan, three.a)  # until then both have waited for that
    assert [len(vote.whole) for _, _, vote in three.votes] == [3, 2]
    assert not any(future.done() for future in futures), "visible before both have voted"
    three.hear()
    assert {future.result(SOON).excluded for future in futures} == {(C,)}
    (late,) = three.push(three.c, 1, plan=plan)
    assert late.result(SOON).excluded == (C,)
    assert three.values == [5.5, 5.5], "a mean of those who count"


def cross(three):
    """One server has the first two members, and the other the last two; returns the futures."""
    futures = [*three.push(three.a, 0, turn=False), *three.push(three.b, 0, 1), *three.push(three.c, 1, turn=False)]
    three.hear()
    assert not any(future.done() for future in futures)
    assert (three.values, three.lasts) == ([0, 0], [0, 0]), "only one member is whole on both"
    return futures


def test_servers_with_too_few_in_common_vote_again_when_one_has_more(two_servers):
    """Whoever stands still halfway between the two, as c does here, is not waited for: enough are on both by then."""
    three = two_servers
    futures = cross(three)
    futures += three.push(three.a, 1)
    three.hear()
    assert {future.result(SOON).excluded for future in futures} == {(C,)}
    assert three.values == [11, 11]
    (late,) = three.push(three.c, 0)
    assert late.result(SOON).excluded == (C,)


def test_who_is_lost_meanwhile_is_not_waited_for(two_servers):
    """What it had sent to one server counts on none. Of the two that are left one suffices, and is on both."""
    three = two_servers
    early, *others = cross(three)
    three.job.close([three.b.member, three.c.member])
    three.hear()
    others += three.push(three.c, 0)
    assert {future.result(SOON).excluded for future in others} == {(A, C)}
    assert isinstance(early.exception(SOON), Fenced)
    assert three.values == [10, 10]


def test_what_is_tried_before_a_vote_waits_for_all(two_servers):
    """Nobody could read what it assigns while another server waits for who reads; on one server it waits for nobody."""
    three = two_servers
    counts = [three.job.variable(three.a, np.asarray(3), (n,), name=f"n{n}") for n in (0, 1)]
    for servers, done in (((0,), True), ((0, 1), False)):
        plan = three.job.approve(powers_of(*(counts[n] for n in servers)), three.a)
        said = {"plan": plan, "value": 1, "previous": -1}
        pushed = three.in_time(*servers, **said)
        three.hear()
        assert [future.done() for future in pushed] == [done] * len(pushed)
        three.push(three.c, *servers, **said)
        three.hear()
        assert all(future.done() for future in pushed)


# ---- A quorum ----


@pytest.fixture
def one(tmp_path):
    return Late(tmp_path, quorum=2)


@pytest.fixture
def two(tmp_path):
    return Late(tmp_path, servers=2, quorum=2)


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


def test_a_round_waits_for_the_others_for_its_time_of_grace(tmp_path):
    """From when it has its quorum on: whoever comes within is in it."""
    late = Late(tmp_path, quorum=2, grace=5.0)
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
    memory = bytearray(np.full(2, 100.0).tobytes())
    payload, half = one.come(memory)
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


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_nan_in_a_late_contribution_is_that_of_the_round_it_is_merged_into(one, nonfinite):
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
    assert one.values == [22]


def test_a_late_contribution_that_does_not_fit_is_refused_alone(one):
    one.in_time()
    with pytest.raises(InvalidRequest):
        one.c.job.verbs[0].push(
            Contribution(one.c.session, one.c.generation, 0, one.plan.id, (1.0,)), Payload.pack([np.zeros(7)])
        ).result(SOON)
    one.push(one.c)
    one.in_time()
    assert one.values == [122]


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
    job, every = Late(tmp_path, servers, quorum=2), tuple(range(servers))
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
    """Random arrivals, resends and a lost worker: what was applied is what was pushed, each once, on all servers; after
    the same round all have the same."""
    luck = Random(seed)
    job = Late(tmp_path, servers, quorum=luck.choice([1, 2]), grace=luck.choice([0.0, 0.02]))
    arrivals = Arrivals(job, luck)
    for number in range(600):
        arrivals.step()
        assert len({*job.lasts}) > 1 or len({*job.values}) == 1
        if number > 300 and luck.random() < 0.02 and len(arrivals.living) == 3:
            arrivals.lose(arrivals.job.c)
    arrivals.settle()
    assert arrivals.job.values == [arrivals.pushed] * servers
    assert not any(core.machine.job.rounds.late.waiting for core in arrivals.job.cores)
