"""Who says what a checkpoint has beside the variables: the same process for all, and one that has it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

import psclient as ps
from psclient._src.devices import Device
from psclient._src.rounds.membership import Group
from psclient._src.rounds.rounds import Exchange
from psclient._src.transport.session import Session
from pstesting.processes import PS0, QUICK, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, add_all, gate, say
from pswire.cluster import Task
from pswire.limits import Timeouts
from pswire.model.log import Member
from pswire.model.plan import Plan, SnapshotOrder
from tests.kit.rig import SOON, WORKERS, eventually, serving
from tests.kit.rig import Job as Driven

SLOW = Timeouts(beat=60.0)


class Process:
    """One process of a job, in a life of its own."""

    def __init__(self, job: Driven, task: Task) -> None:
        self.session = Session(task, job.verbs, 1, timeouts=SLOW)
        self.session.open()
        self.group = Group(self.session, (Device("cpu", 0),))
        self.member = Member(task, self.session.number, 1)


class Processes:
    """Those of a job; each epoch has those that are there."""

    def __init__(self, job: Driven, count: int) -> None:
        self.job = job
        self.here = [Process(job, task) for task in WORKERS[:count]]
        self.began = {process.session.number for process in self.here}
        self.close()

    def close(self) -> None:
        """An epoch of all that are there, which all take in."""
        self.here.sort(key=lambda process: process.session.task)
        self.job.close([process.member for process in self.here])
        for process in self.here:
            process.group.enter("dataset:0")
            process.group.epoch = self.job.epoch

    def die(self, process: Process) -> None:
        self.here.remove(process)
        process.session.leave("it died")

    def come(self, task: Task) -> Process:
        process = Process(self.job, task)
        self.here.append(process)
        return process

    @property
    def savers(self) -> list[Process]:
        return [process for process in self.here if process.group.saves()]


@pytest.fixture
def processes(tmp_path) -> Iterator[Processes]:
    """Three that began a job."""
    with serving("core", 2, tmp_path) as servers:
        found = Processes(Driven(servers), 3)
        yield found
        for process in found.here:
            process.session.leave()


def test_the_first_of_those_that_began_the_job_saves(processes):
    """One that came back to a running job does not, even if it is the first in task order."""
    a, b, c = processes.here
    assert processes.savers == [a]
    processes.die(a)
    assert processes.savers == [b]
    processes.come(a.session.task)
    processes.close()
    assert processes.savers == [b]
    processes.die(b)
    assert processes.savers == [c]


def test_of_those_that_came_later_the_first_to_come_saves(processes):
    """Where nobody is left who began the job: it has seen the most of it."""
    a, b, c = processes.here
    for process in (a, b, c):
        processes.die(process)
    again = [processes.come(process.session.task) for process in (c, a)]
    processes.close()
    assert processes.savers == again[:1]


@pytest.mark.parametrize("seed", range(5))
def test_there_is_always_one_who_saves(processes, seed):
    """Whoever dies and comes back, all know the same one, and one who began the job as long as there is any."""
    rng = random.Random(seed)
    for _ in range(20):
        gone = [task for task in WORKERS[:3] if task not in {process.session.task for process in processes.here}]
        if gone and rng.random() < 0.5:
            processes.come(rng.choice(gone))
            processes.close()
        elif len(processes.here) > 1:
            processes.die(rng.choice(processes.here))
        (saver,) = processes.savers
        left = [process for process in processes.here if process.session.number in processes.began]
        assert saver in (left or processes.here)


@pytest.mark.parametrize("began", [True, False], ids=["who began the job", "who came later"])
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
        assert (
            "worker/task:1 came to a running job, and saves: in checkpoint 'run/ckpt-7' the state of 'loader'"
            in said[0]
        )


class Seen:
    """A state of Python that nobody gives back to who comes later."""

    def __init__(self):
        self.rounds = 0

    def state_dict(self):
        return {"task": ME, "rounds": self.rounds}

    def load_state_dict(self, state):
        raise AssertionError("nothing is restored here")


def learn(stops):
    """Counts the rounds that it has seen, and saves that at the end; stops are gates of this task by round."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(0.0, name="v")
    seen = Seen()
    checkpoint = ps.train.Checkpoint(v=v, seen=seen)
    gates = {round: name for who, round, name in stops if who == ME}
    for _ in strategy.experimental_distribute_dataset(ps.ArrayDataset(list(range(40))).batch(4)):
        if strategy.round in gates:
            say("at", strategy.round)
            gate(gates[strategy.round])
        strategy.run(lambda: add_all([(v, 1.0)]))
        seen.rounds += 1
    checkpoint.save("run/ckpt")
    checkpoint.sync()
    state = json.loads((DIRECTORY / "checkpoints/run/ckpt-1/manifest.json").read_text())["state"]
    say("saved", state["seen"])


def test_who_came_back_does_not_overwrite_what_others_know(tmp_path):
    """The first worker is started again, and has seen less than the second, whose state is saved."""
    stops = [[0, 3, "never"], [1, 6, "go"]]
    keys = {"workers": 2, "chief": "driver", "gates": ["never", "go"], "timeouts": QUICK}
    with ProcessCluster(learn, tmp_path, (stops,), helpers=[Seen], **keys) as job, job.server(PS0) as server:
        job.hear(W0, "at", 3)
        job.kill(W0)
        job.hear(W1, "at", 6)
        job.start(W0)
        eventually(
            lambda: (
                ("open", "dataset:0")
                in [(one.state, one.join_point) for one in server.status().sessions if one.member.task == W0]
            )
        )
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "saved") == {"task": 1, "rounds": 10}
        job.finish()
