"""The group as one process sees it, what it reads, and who saves what a checkpoint has beside the variables."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import numpy as np
import pytest

from psclient._src.distribute.strands import Marks, PlanCutter
from psclient._src.processes.sigterm import Leaving, Notice
from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.rounds import Exchange, Outgoing
from pstesting.processes import PS0
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import ConfigError, Fenced, NewcomerDiverged, RoundTimeout
from pswire.limits import Timeouts
from pswire.model.changes import Change
from pswire.model.closures import ClosureName
from pswire.model.consistency import ASYNC
from pswire.model.log import STEP, Approved, Generation, GenerationClosed, Position, Start, Started
from pswire.model.plan import Plan, SnapshotOrder
from pswire.network.payload import Payload
from tests.kit.rig import SOON, WORKERS, Job, eventually, serving, sum_into
from tests.kit.strategies import refused
from tests.kit.workers import Process, began

A, B, C = WORKERS[:3]


def approved(job, v):
    """A plan that adds to a variable, which the chief has approved."""
    plan = sum_into(v)
    job.append(Approved(plan))
    return plan


@pytest.mark.parametrize(("mode", "slices"), [("sync", [(0, 6), (2, 6), (3, 6)]), ("async", [(0, 2), (0, 1), (0, 3)])])
def test_members_count_replicas(job, mode, slices):
    """In their rounds, all or their own; they share the data with all, as those were when the job began."""
    with began(job, mode, 2, 1, 3) as processes:
        for one in processes:
            one.group.enter("dataset:0")
        assert [one.group.slice() for one in processes] == slices
        assert [one.group.replicas for one in processes] == ([6] * 3 if mode == "sync" else [2, 1, 3])
        assert [one.group.share() for one in processes] == [(0, 6), (2, 6), (3, 6)]
        if mode == "async":
            assert [one.group.pipeline for one in processes] == [(0, 3), (1, 3), (2, 3)]
        assert [one.group.leads for one in processes] == [True, False, False]


def test_an_generation_with_new_members_is_taken_in_at_its_entry(job):
    """Where the program comes to it, which tells the others the round; nowhere else, and only once."""
    with began(job, "sync", 1, 1) as (one, _):
        plan = approved(job, one.create("v"))
        job.close([one.member])
        one.group.enter("dataset:0")
        late = Process(job, B, "sync")
        generation = Generation(3, (one.member, late.member), "dataset:0")

        def told() -> list[Start]:
            entries = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON).entries
            return [entry.start for entry in entries if isinstance(entry, Started)]

        one.add(plan, 1)
        job.append(GenerationClosed(generation))
        one.group.enter("dataset:0")
        assert one.group.generation.number == 2, "no answer has announced the generation yet"
        one.add(plan, 1)
        one.group.advance(0, 0, 7, True, frozenset())
        one.group.boundary(1)
        assert (one.group.generation.number, one.group.replicas, told()) == (2, 1, [])
        one.group.boundary(0)
        one.group.answered(one.group.sent(), generation, False)
        one.group.boundary(0)
        assert (one.group.generation, told()) == (generation, [Start(3, 2, (Position(0, 0, 7),))])
        assert one.group.slice() == (0, 2)
        late.group.join(0)
        assert (late.group.generation, late.group.round, late.group.position(0)) == (generation, 2, Position(0, 0, 7))
        late.session.leave()


def test_who_is_taken_in_before_a_batch_knows_that_there_is_one(job):
    """Of that dataset, until its first round is over: no round has told it yet."""
    with began(job, "sync", 1) as (one,):
        plan = approved(job, one.create("v"))
        one.add(plan, 1)
        late = Process(job, B, "sync", 2)
        late.create("v")
        job.close([one.member])
        entered = Generation(3, (late.member,), "dataset:2", Start(3, 1))
        job.append(GenerationClosed(entered))
        assert late.group.replicas == 2
        late.group.enter("dataset:2")
        assert (late.group.any_more(2), late.group.any_more(1)) == (True, None)
        late.group.advance(2, 0, 1, True, frozenset())
        assert late.group.any_more(2) is None, "it has a batch itself; what the others have it will be told"
        late.add(plan, 1)
        assert late.group.any_more(2) is True
        late.group.advance(2, 0, 2, False, frozenset())
        late.add(plan, 1)
        assert late.group.any_more(2) is False
        late.group.finish(2)
        assert late.group.any_more(2) is None
        late.session.leave()


def test_a_process_whose_session_is_over_comes_to_no_entry(job):
    """It is told why, before anything else."""
    with began(job, "sync", 1) as (one,):
        one.session.end(Fenced("it was given up"))
        refused(Fenced, "it was given up", lambda: one.group.enter("dataset:0"))


def test_a_newcomer_that_differs_ends_itself_alone(job):
    with began(job, "sync", 1, 1) as (one, new):
        new.session.end(NewcomerDiverged("it runs another program"))
        job.verbs[0].heartbeat(one.session.number, -1, b"")


def test_a_process_hears_between_two_heartbeats_that_a_server_has_ended_its_session(job):
    """A call that it holds there is answered."""
    one = Process(job, A, "sync", timeouts=Timeouts(heartbeat_interval=1e4))
    job.verbs[0].leave(one.session.number, "it was given up")
    refused(Fenced, "this process was removed from the job", lambda: eventually(one.session.check))
    one.session.leave("it was given up")


def test_a_closure_is_over_once_its_rounds_are_answered(tmp_path):
    """Also those whose values nobody has looked at: else its result would come before what it has pushed."""
    with serving("core", 1, tmp_path) as servers, began(job := Job(servers), "async", 1) as (one,):
        plan = approved(job, one.create("v"))
        with one.exchange.closure(ClosureName(1, 1, 1, (1,))):
            for _ in range(2):  # the first of a plan is waited for anyhow
                one.exchange.enter(plan)
                one.exchange.send(Outgoing(plan, (1.0,), (np.asarray(1),), ()))
        assert one.exchange.measures.rounds["completed"] == 2


def test_who_comes_late_makes_no_change_of_consistency(job):
    """The others have made it, or come to it later; it goes on to where they take it in, and asks for nothing."""
    with began(job, "sync", 1) as (one,):
        one.group.enter("dataset:0")
        late = Process(job, B, "sync", timeouts=Timeouts(heartbeat_interval=60.0, round_timeout=0.3))
        assert not late.group.change(Change(0, 0, ASYNC))
        assert not any(state.join_point for state in one.session.look().sessions)
        late.session.leave()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_came_late_is_outside(job, mode):
    """A synchronous one until it was taken in; an asynchronous one is never where the others are."""
    with began(job, mode, 1) as (one,):
        late = Process(job, B, mode)
        assert (one.group.late, late.group.late) == (False, True)
        assert (one.group.outside, late.group.outside) == (False, True)
        assert late.group.saves(), "alone it does, as long as it makes no rounds with others"
        job.append(GenerationClosed(Generation(2, (one.member, late.member), start=Start(2, 0))))
        for process in (one, late):
            process.group.enter("dataset:0")
        assert (one.group.outside, late.group.outside) == (False, mode == "async")
        assert (one.group.late, late.group.late) == (False, True)
        late.session.leave()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_first_of_the_group_leads(job, mode):
    """Of those that are in it now; where workers are asynchronous the task that was first when the job began."""
    with began(job, mode, 1, 1) as (one, other):
        plan = approved(job, one.create("v", 0))
        for process in (one, other):
            assert process.group.leads == (process is one)
            process.group.enter("dataset:0")
            assert process.group.saves() == (process is one or mode == "async")
        other.create("v", 0)
        job.close([other.member])
        other.add(plan, 1)
        assert other.group.leads == (mode == "sync")
        back = Process(job, A, mode)
        assert back.group.leads == (mode == "async"), "it takes no part yet"
        back.session.leave()


def test_who_comes_back_has_its_share_again(job):
    """By its task, whoever else is gone; with the replicas that it had, and nothing for who was not there."""
    with began(job, "async", 2, 1):
        job.close()
        back, other, new = Process(job, B, "async"), Process(job, A, "async", 3), Process(job, C, "async")
        where = Position(0, 1, 9)
        members = [other.member, back.member, new.member]
        number = job.generation.number + 1
        job.append(GenerationClosed(Generation(number, tuple(members), start=Start(number, 17, (where,)))))
        back.group.enter("dataset:0")
        assert (back.group.round, back.group.position(0), back.group.late) == (17, where, True)
        assert (back.group.share(), back.group.slice(), back.group.pipeline) == ((2, 3), (0, 1), (1, 2))
        assert new.group.share() == (3, 3)
        refused(ConfigError, r"worker/task:0 has 3 replicas, but had 2 when the job began", lambda: other.group.share())
        for one in (back, other, new):
            one.session.leave()


def test_an_asynchronous_worker_waits_at_no_boundary(job):
    """It asks for no place to be taken in, and keeps the generation in which it began: others come and go."""
    with began(job, "async", 1, 1) as (one, other):
        plan = sum_into(one.create("v"))
        one.group.enter("dataset:0")
        job.append(Approved(plan))
        job.close([one.member])
        one.add(plan, 1)
        one.group.enter("dataset:0")
        assert one.group.generation.number == 1
        assert all(state.join_point == "" for state in one.session.look().sessions)
        one.add(plan, 2)
        assert (one.group.round, one.session.waits) == (2, (-1, b""))
        assert int(one.exchange.reads.read(one.exchange._variables[0], now=True)) == 3
        assert other.session.number in job.servers.cores[0].machine.job.rounds.fenced


def test_a_server_is_told_of_rounds_that_do_not_come_to_it(job):
    """Else the others would wait for a worker with bounded staleness that has made them."""
    with began(job, "bounded", 1) as (one,):
        plan = approved(job, one.create("v"))
        one.group.enter("dataset:0")
        one.add(plan, 1)
        assert one.session.clock.say(1, False) == one.group.round == 1


def test_an_asynchronous_worker_waits_for_no_round_of_another(job):
    """That one waits for the chief, which is not what this one names."""
    with began(job, "async", 1, 1) as (one, other):
        v, _ = other.create("v"), one.create("v")
        other.add(approved(job, v), 1)
        said = Contribution(other.session.number, 1, 1, sum_into(v, v).id, (1.0, 1.0))
        job.verbs[0].push(said, Payload.pack([np.asarray(1)] * 2))
        assert job.verbs[0].status().waiting
        assert Awaited(one.session, one.group).names(0) == [str(PS0)]
        assert Awaited(other.session, other.group).names(0) == ["the chief"]


def test_a_member_that_computes_about_as_long_as_before_is_not_reported(job):
    """There is a line to log once it takes much longer than in earlier rounds, and as long as these are not known."""
    with began(job, "sync", 1, 1) as (one, other):
        plan, _ = approved(job, one.create("v")), other.create("v")
        clock, reminder = job.servers.clock, partial(Awaited(one.session, one.group).reminder, 0)

        def waits(number):
            return any(waiting.round == number for waiting in job.verbs[0].status().waiting)

        with ThreadPoolExecutor(1) as pool:
            for number in range(4):
                made = pool.submit(one.add, plan, 1)
                eventually(partial(waits, number))
                clock.now += 80 if number == 3 else 60
                assert bool(reminder(number)) == (number < 2)
                if number == 3:
                    clock.now += 20
                    assert reminder(number).startswith(f"waits in round 3 for {B};")
                other.add(plan, 1)
                made.result(SOON)


def test_a_step_computes_with_one_value(job):
    """An asynchronous worker's reads are kept for a step; one that is not of a step sees what there is now."""
    with began(job, "async", 1, 1) as (one, other):
        v, _ = one.create("v"), other.create("v")
        plan = approved(job, v)
        other.add(plan, 1)
        assert int(one.exchange.reads.read(v)) == 1
        other.add(plan, 1)
        assert int(one.exchange.reads.read(v)) == 1
        assert int(one.exchange.reads.read(v, now=True)) == 2
        one.exchange.reads._begin_step()
        assert int(one.exchange.reads.read(v)) == 2
        one.add(plan, 10)
        other.add(plan, 1)
        one.exchange.reads._begin_step()
        assert int(one.exchange.reads.read(v)) == 12, "what its push brought back is what its next step begins with"
        one.exchange.reads._begin_step()
        assert int(one.exchange.reads.read(v)) == 13


@pytest.mark.parametrize(("asks", "replicas"), [(True, 1), (True, 2), (False, 2)])
@pytest.mark.parametrize("reads", [None, "before", "now"])
def test_a_section_is_out_of_date_by_what_it_was_computed_with(job, asks, replicas, reads):
    """Values that it read before its process took part, if rounds were made since, or another R than that of now."""
    with began(job, "sync", 1, 1) as (one, _):
        v = one.create("v")
        plan = approved(job, v)
        job.close([one.member])
        one.add(plan, 1)
        late = Process(job, B, "sync", replicas)
        late.create("v")
        assert not asks or late.group.slice() == (1, 2)
        if reads == "before":
            assert int(late.exchange.reads.read(v)) == 1
        one.add(plan, 1)
        if reads == "now":
            assert int(late.exchange.reads.read(v)) == 2
        job.append(GenerationClosed(Generation(3, (one.member, late.member), start=Start(3, 2))))
        assert late.exchange.enter(plan) == (reads == "before" or (asks and replicas == 2))
        assert not late.exchange.enter(plan), "it takes part by now"
        assert int(late.exchange.reads.read(v)) == 2
        late.session.leave()


def test_of_a_section_that_is_out_of_date_a_worker_s_own_part_counts(job):
    """Of what all make together nothing does."""
    with began(job, "sync", 1) as (one,):
        v, w = one.create("v"), one.create("w", alone=True)
        plan, marks = sum_into(v, w, returned=False), Marks()
        marks.reductions, marks.applies = {1}, {1}
        for part in PlanCutter().cut(plan, marks):
            job.append(Approved(part.plan))
        one.exchange.enter(plan)
        one.exchange.make(Outgoing(plan, (1.0, 1.0), (np.asarray(1),) * 2, ()), marks, observes=True)
        one.exchange.settle()
        assert [int(one.exchange.reads.read(each, now=True)) for each in (v, w)] == [0, 1]


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ("dataset:3", "a batch of its dataset 3"),
        ("plan:" + "0" * 64, "the compiled step that it begins with"),
        ("save", "a save"),
    ],
)
def test_who_waits_in_vain_is_told_for_what(job, entry, place, caplog):
    """The others never come again to where a late process is taken in; it says so while it waits, and fails alone."""
    with began(job, "sync", 1) as (one,):
        one.group.enter("dataset:4")
        short = Timeouts(heartbeat_interval=60.0, report_interval=0.01, round_timeout=0.3)
        late = Process(job, B, "sync", timeouts=short)
        with pytest.raises(RoundTimeout, match=f"worker/task:1 joined late .* did not reach {place} again.* once"):
            late.group.enter(entry)
        assert f"waits until {A} reach {place}" in caplog.text
        one.session.check()
        assert [state.join_point for state in one.session.look().sessions if state.member.task == B] == [entry]
        late.session.leave("it gave up")


# ---- Leaving ----


def told_to_end(job, one, grace=60.0, saves=False):
    """A process that SIGTERM has told to end, without the signal."""
    one.group.departure.notice = notice = Notice()
    notice.take_part(lambda: None, grace, saves)
    notice._asked_at = time.monotonic() if grace else 0.0
    return notice


def test_an_generation_that_some_leave_is_taken_in_where_a_step_begins(job):
    """By all at the same place: those who stay save first if it says so, and go on; those who leave end there."""
    with began(job, "sync", 1, 2, 1) as (one, two, three):
        v, *_ = [each.create("v") for each in (one, two, three)]
        plan = approved(job, v)
        saved = []
        for each in (one, two, three):
            each.group.departure.notice = Notice()
            each.group.departure.save = lambda each=each: saved.append((each.member.task, each.group.generation.number))
            each.group.enter("dataset:0")
        told_to_end(job, two)
        two.group.boundary(0)
        generation = Generation(2, (one.member, three.member), STEP, None, (two.member,), 2)
        job.append(GenerationClosed(generation))
        threads = [Thread(target=each.add, args=(plan, 1)) for each in (one, two, three)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        one.group.enter("save")
        assert (one.group.generation.number, one.group.replicas) == (1, 4), "that is no step"
        one.group.advance(0, 0, 1, True, frozenset())
        one.group.begin_run()
        assert one.group.generation.number == 1, "its pass has batches, which are steps"
        for each in (one, three):
            each.group.boundary(0)
            assert (each.group.generation, each.group.replicas) == (generation, 2)
            each.group.boundary(0)
        refused(Leaving, "", lambda: two.group.begin_run())
        assert saved == [(A, 1), (C, 1), (B, 1)]
        told = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON).entries
        assert not any(isinstance(entry, Started) for entry in told), "nobody is new"


def test_who_is_told_to_end_and_not_answered_leaves_by_itself(job):
    """Once half of its grace period is over; a process that makes its own rounds, or none yet, at once."""
    with began(job, "sync", 1) as (one,):
        one.group.enter("dataset:0")
        told_to_end(job, one)
        one.group.boundary(0)
        told_to_end(job, one, grace=0.0)
        refused(Leaving, "", lambda: one.group.boundary(0))
        late = Process(job, B, "sync")
        told_to_end(job, late)
        refused(Leaving, "", lambda: late.group.boundary(0))
        late.session.leave()


def test_who_makes_its_own_rounds_leaves_at_once(job):
    """It saves first, where that is asked; a closure it finishes."""
    with began(job, "async", 1) as (one,):
        one.group.enter("dataset:0")
        saved = []
        one.group.departure.save = lambda: saved.append(one.group.round)
        told_to_end(job, one, saves=True)
        one.group.apart = True
        one.group.begin_run()
        one.group.apart = False
        refused(Leaving, "", lambda: one.group.begin_run())
        assert saved == [0]


def test_heartbeats_tell_that_a_process_leaves(job):
    """At once where they are woken, and the chief's watch hears of it."""
    with began(job, "sync", 1) as (one,):
        before = job.verbs[0].watch(job.opened.session, 0, 0).result(SOON)
        assert not before.sessions[-1].pace.leaving
        told_to_end(job, one, saves=True)
        one.session.heartbeat_now(0)
        news = job.verbs[0].watch(job.opened.session, len(before.entries), before.version).result(SOON)
        (pace,) = [session.pace for session in news.sessions]
        assert (pace.leaving, pace.saving) == (True, True)


class Processes:
    """Those of a job, in the order in which they came; each generation has those that are there."""

    def __init__(self, job: Job, count: int) -> None:
        self.job, self.here = job, [Process(job, task, "sync") for task in WORKERS[:count]]
        self.close()

    def close(self) -> None:
        """A generation of all that are there, which all take in."""
        here = sorted(self.here, key=lambda process: process.session.task)
        self.job.close([process.member for process in here])
        for process in here:
            process.group.enter("dataset:0")
            process.group.generation = self.job.generation

    def die(self, process: Process) -> None:
        self.here.remove(process)
        process.session.leave("it died")

    def come(self, task: Task) -> Process:
        self.here.append(Process(self.job, task, "sync"))
        return self.here[-1]


@pytest.fixture
def processes(job):
    """Three that began a job."""
    found = Processes(job, 3)
    yield found
    for process in found.here:
        process.session.leave()


@pytest.mark.parametrize("seed", range(6))
def test_the_first_to_come_saves(processes, seed):
    """Those that began the job in task order, then, where none of them is left, those that came back, as they came.
    The state that a checkpoint has beside variables is that of the process that saves, not of one that has seen less.
    """
    rng, late = random.Random(seed), 0
    began = list(processes.here)
    for _ in range(25):
        gone = [task for task in WORKERS[:3] if task not in {process.session.task for process in processes.here}]
        if gone and rng.random() < 0.5:
            processes.come(rng.choice(gone))
            processes.close()
        elif len(processes.here) > 1:
            processes.die(rng.choice(processes.here))
        assert [process for process in processes.here if process.group.saves()] == processes.here[:1]
        late += processes.here[0] not in began
    assert late
    own = {process: json.dumps({"of": str(process.member.task)}) for process in processes.here}
    for process, state in reversed(own.items()):
        Exchange(process.session, process.group)._propose(Plan(snapshot=SnapshotOrder("ckpt-1", (0, 1), 1, state)))
    saver = processes.here[0]
    (plan,) = processes.job.verbs[0].watch(saver.session.number, 0, 0).result(SOON).plans
    assert plan.snapshot.state == own[saver]


@pytest.mark.parametrize("began", [True, False])
def test_what_is_lost_is_said(processes, caplog, began):
    """By who saves a state that it never restored, with the state's name; by nobody else."""
    for process in list(processes.here)[0 if not began else 1 :]:
        processes.die(process)
    (saver,) = processes.here or [processes.come(WORKERS[1])]
    processes.close()
    state = json.dumps({"state": {"loader": 1, ".manager": 2}})
    plan = Plan(snapshot=SnapshotOrder("run/ckpt-7", (0, 1), 7, state))
    Exchange(saver.session, saver.group)._propose(plan)
    watched = processes.job.verbs[0].watch(saver.session.number, 0, 0).result(SOON)
    assert watched.plans == (plan,)
    said = [record.getMessage() for record in caplog.records if "saves" in record.getMessage()]
    assert len(said) == (not began)
    if said:
        assert "worker/task:1 joined a running job and saves checkpoint 'run/ckpt-7', in which the" in said[0]
        assert "the state of 'loader'" in said[0]
