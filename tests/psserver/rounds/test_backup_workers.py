"""Backup workers: rounds of updates that do not wait for the last of their members, on one server and on two."""

from dataclasses import replace

import numpy as np
import pytest

from psserver.rounds.sequences import BEHIND
from pswire.api import Contribution
from pswire.errors import ConfigError, Diverged, Fenced
from pswire.model.plan import Apply, Operand, Plan, Ref, SnapshotOrder
from pswire.model.program import Input, Program
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from tests.kit.contributions import Voters
from tests.kit.rig import SOON, WORKERS, powers_of, reduce_only, sum_into

A, B, C = WORKERS[:3]
ONE = np.ones(2, "float32")
NUMBER = TensorSpec("int64", ())


class Three(Voters):
    """Servers that vote, three members of which one may be late, and a plan that adds to a variable on each server. The
    first round is made by all: nobody is left out before it has begun."""

    def __init__(self, root, servers=1, backup=1, begin=True):
        super().__init__(root, servers)
        self.members = self.a, self.b, self.c = self.job.join(A, B, C, mode="sync", backup_workers=backup)
        self.variables = [self.job.variable(self.a, np.zeros(2, "float32"), (n,)) for n in range(servers)]
        self.plan = self.job.approve(sum_into(*self.variables, returned=False), self.a)
        if begin:
            for worker in self.members:
                self.push(worker, *range(servers))
            self.hear()

    def push(self, worker, *servers, plan=None, turn=True, values=None, **said):
        """A member contributes ones on some servers, and goes on to its next round; returns the futures."""
        plan = plan or self.plan
        values = [ONE] * len(plan.reductions) if values is None else values
        said.setdefault("previous", worker.round - 1)
        futures = [worker.push(plan, values, server=n, **said) for n in servers or (0,)]
        worker.round += turn
        return futures

    def in_time(self, *servers, **said):
        """All members but the last push; returns the futures."""
        return [future for worker in (self.a, self.b) for future in self.push(worker, *servers, **said)]

    @property
    def values(self):
        """What is in the variable of each server, beside the first round's."""
        return [value - 3 for value in super().values]


@pytest.fixture
def three(tmp_path):
    return Three(tmp_path)


@pytest.fixture
def two_servers(tmp_path):
    return Three(tmp_path, servers=2)


def test_a_round_is_made_without_the_last(three):
    """Its record names it. When it comes it is told so, and how far the others are, and gets the values of now."""
    (first,) = three.push(three.a, want=(0,))
    assert not first.done()
    (second,) = three.push(three.b)
    assert [future.result(SOON).excluded for future in (first, second)] == [(C,), (C,)]
    assert [future.result(SOON).over for future in (first, second)] == [0, 0], "who is in time is not behind"
    three.in_time()
    assert three.values == [4]
    (late,) = three.push(three.c, want=(0,))
    reply = late.result(SOON)
    assert (reply.round, reply.excluded, reply.over) == (1, (C,), 3)
    assert reply.payload.tensors([TensorSpec("float32", (2,))])[0].tolist() == [7, 7], "the values of now"
    assert three.values == [4], "what came late counts nowhere"
    (behind,) = three.push(three.c)
    assert behind.result(SOON).over == 3


def test_who_has_caught_up_counts_again(three):
    """Nothing of what it pushed late is left in the next round."""
    three.in_time()
    three.push(three.c)
    (caught_up,) = three.push(three.c)
    three.push(three.a)
    assert caught_up.result(SOON).excluded == (B,)
    assert three.values == [4]


def test_all_who_are_whole_when_it_runs_count(tmp_path):
    """A round that has waited for its plan has all contributions that came meanwhile."""
    three = Three(tmp_path)
    other = sum_into(*three.variables, op="mean", returned=False)
    three.job.verbs[0].propose(three.a.session, other, "", None)
    futures = [three.push(worker, plan=other)[0] for worker in three.members]
    three.job.approve(other, three.a)
    assert [future.result(SOON).excluded for future in futures] == [()] * 3
    assert three.values == [1]


def test_half_a_late_contribution_is_let_go_of(three):
    """When the round runs its sender is answered, and what has come of it is not kept, nor what still comes."""
    payload = Payload((), ONE.nbytes)
    said = Contribution(three.c.session, three.c.generation, three.c.round, three.plan.id, (1.0,), previous=0)
    half = three.cores[0].push(said, payload)
    payload.add(0, memoryview(ONE[:1].tobytes()))
    three.in_time()
    assert half.result(SOON).excluded == (C,)
    payload.add(4, memoryview(ONE[1:].tobytes()))
    assert (payload.chunks, payload.whole) == ([], True)
    assert three.values == [2]


@pytest.mark.parametrize(("backup", "begin"), [(1, False), (0, True)], ids=["of who has not begun", "without any"])
def test_a_round_waits_for_who_has_not_begun(tmp_path, backup, begin):
    """At the start of a job, and where one comes later: until it has made its first round; and without backup workers
    for all of its members, whatever has come."""
    three = Three(tmp_path, backup=backup, begin=begin)
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
    assert three.values == [2 * (BEHIND + 1)]


def test_who_has_no_examples_is_none_of_those_who_suffice(three):
    """At the end of a pass those who have data are waited for, however slow they are."""
    (first,), _ = three.push(three.a, weights=(0.0,)), three.push(three.b)
    assert not first.done()
    three.push(three.c)
    assert first.result(SOON).excluded == ()
    assert three.values == [2]


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
    spec = TensorSpec("float32", (2,))
    assigning = Program((Input("variable", spec), Input("operand", spec)), (), ((0, 1),), ())
    apply = Apply(0, (0,), (Ref("variable", three.variables[0].id), Ref("operand", 0)))
    plans = {
        "reduction": reduce_only(spec),
        "save": replace(three.plan, snapshot=SnapshotOrder("a", (0,), 1)),
        "operands": Plan((), (Operand(spec, (0,)),), (assigning,), (apply,)),
    }
    plan = three.job.approve(plans[kind], three.a)
    said = {"operands": [ONE]} if kind == "operands" else {}
    first, _ = three.in_time(plan=plan, **said)
    assert not first.done()
    three.push(three.c, plan=plan, **said)
    assert first.result(SOON).excluded == ()


def test_a_late_member_with_another_section_has_diverged(three):
    three.in_time()
    with pytest.raises(Diverged, match=r"in round 1 .*worker/task:0.*worker/task:2"):
        three.push(three.c, plan=three.job.approve(reduce_only(NUMBER), three.a), values=[np.asarray(1)])


def test_processes_of_a_job_have_one_number_of_backup_workers(three):
    words = r"task:3 runs with ps.Sync\(backup_workers=2\), but .*task:0 with ps.Sync\(backup_workers=1\); give every"
    with pytest.raises(ConfigError, match=words):
        three.job.open(WORKERS[3], mode="sync", backup_workers=2)
    with pytest.raises(ConfigError, match=r"runs with ps.Sync\(\), but"):
        three.job.open(WORKERS[3], mode="sync")


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
    assert three.values == [1, 1], "a mean of those who count"


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
    assert three.values == [2, 2]
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
    assert three.values == [1, 1]


def test_what_is_tried_before_a_vote_waits_for_all(two_servers):
    """Nobody could read what it assigns while another server waits for who reads; on one server it waits for nobody."""
    three = two_servers
    counts = [three.job.variable(three.a, np.asarray(3), (n,), name=f"n{n}") for n in (0, 1)]
    for servers, done in (((0,), True), ((0, 1), False)):
        plan = three.job.approve(powers_of(*(counts[n] for n in servers)), three.a)
        said = {"plan": plan, "values": [np.asarray(1)] * len(servers), "previous": -1}
        pushed = three.in_time(*servers, **said)
        three.hear()
        assert [future.done() for future in pushed] == [done] * len(pushed)
        three.push(three.c, *servers, **said)
        three.hear()
        assert all(future.done() for future in pushed)
