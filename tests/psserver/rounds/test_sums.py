"""Sums of what several workers of a host contribute: each contribution counts once, in a sum or by itself."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from psserver.effects import attempt
from pswire.api import Contribution, RowRead
from pswire.errors import Fenced, InvalidRequest, NonfiniteError, PushAgain
from pswire.model.closures import ClosureName
from pswire.network.payload import Payload
from tests.kit.contributions import Voters
from tests.kit.rig import WORKERS, payload, sum_into

HERE, THERE = 7, 9
A, B, C, D = WORKERS


class Hosts(Voters):
    """Servers, four members of which three are on one host, a variable on each server, and a plan that adds to all.

    Each member contributes its own power of ten, so that a value says whose contributions are in it.

    Attributes:
        work: array work that is not done; it is done at once unless `lags`.
    """

    def __init__(self, root, servers=1, mode="sync", backup=0, op="sum", nonfinite="apply"):
        self.work, self.lags = [], False
        super().__init__(root, servers, submit=self._submit)
        self.members = self.job.join(A, B, C, D, mode=mode, backup_workers=backup)
        self.a, self.b, self.c, self.d = self.members
        self.variables = [self.job.variable(self.a, np.zeros(2, "float32"), (n,)) for n in range(servers)]
        self.plan = replace(sum_into(*self.variables, op=op, returned=False), nonfinite=nonfinite)
        self.job.approve(self.plan, self.a)

    def _submit(self, work):
        self.work.append(work)
        while self.work and not self.lags:
            self.work.pop(0)()

    def catch_up(self):
        self.lags = False
        while self.work:
            self.work.pop(0)()

    def said(self, worker, weight=1.0, **more):
        host = THERE if worker.task == D else HERE
        weights = (weight,) * len(self.plan.reductions)
        said = Contribution(worker.session, 1, worker.round, self.plan.id, weights, host=host)
        return replace(said, previous=worker.round - 1, **more)

    def data(self, workers, server=0, weight=1.0):
        value = np.full(2, sum(10.0**worker.task.index for worker in workers))
        number = len(self.plan.reductions)
        return payload(self.plan, server, [value] * number, (weight,) * number, ())

    def push(self, worker, server=0, data=None, **said):
        return self.cores[server].push(self.said(worker, **said), data or self.data([worker], server))

    def sum(self, *workers, server=0, data=None, parts=None, **said):
        """The first of some members sends their sum; returns the future."""
        parts = tuple(map(self.said, workers)) if parts is None else parts
        weights = tuple(map(sum, zip(*(part.weights for part in parts), strict=True)))
        whole = replace(self.said(workers[0]), **{"weights": weights, "parts": parts, **said})
        return self.cores[server].push(whole, data or self.data(workers, server))

    def half(self, server=0):
        return Payload((), self.data([self.a], server).size)

    def close(self, *lost):
        self.job.close([worker.member for worker in self.members if worker not in lost])

    def turn(self):
        for worker in self.members:
            worker.round += 1


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


@pytest.fixture
def two(tmp_path):
    return Hosts(tmp_path, servers=2)


def errors(*futures):
    return [type(future.exception(0)) for future in futures]


def made(*futures):
    """Whether futures have the answer to a round with everybody's contribution."""
    return [future.done() and future.result().excluded == () for future in futures]


# ---- A sum ----


def test_a_sum_counts_as_all_of_its_senders(hosts):
    """The round waits for nobody else, and its record names nobody who was left out; contributions of other hosts, and
    of no host, leave it alone."""
    last = hosts.push(hosts.d)
    total = hosts.sum(hosts.b, hosts.a, hosts.c)
    assert made(last, total) == [True, True]
    assert hosts.values == [1111]
    assert record(hosts).sessions == {worker.session for worker in hosts.members}
    hosts.turn()
    total = hosts.sum(hosts.a, hosts.b)
    others = [hosts.push(hosts.c, host=0), hosts.push(hosts.d)]
    assert made(total, *others) == [True] * 3


def record(hosts, server=0, round=0):
    return hosts.cores[server].machine.job.rounds.sequences[None].records[round]


def test_a_mean_is_over_the_weights_of_all_senders(tmp_path):
    """A sum has the weight of its senders, who may have some examples more or less."""
    hosts = Hosts(tmp_path, op="mean")
    hosts.push(hosts.d, weight=5.0)
    parts = (hosts.said(hosts.a, weight=2.0), hosts.said(hosts.b, weight=0.0), hosts.said(hosts.c, weight=3.0))
    hosts.sum(hosts.a, hosts.b, hosts.c, parts=parts, data=hosts.data([hosts.a, hosts.c]))
    assert hosts.cores[0].machine.job.store.find(0).array.tolist() == [pytest.approx(1101 / 10)] * 2


def test_a_sum_that_is_sent_again_counts_once(hosts):
    """Before the round is over, where it brings what the first one has not, and after it; with something else it is
    refused, as any contribution is."""
    first = hosts.sum(hosts.a, hosts.b, hosts.c, data=hosts.half())
    again = hosts.sum(hosts.b, hosts.a, hosts.c)
    parts = (hosts.said(hosts.a), hosts.said(hosts.b, weight=2.0), hosts.said(hosts.c))
    assert errors(hosts.sum(hosts.a, hosts.b, hosts.c, parts=parts)) == [InvalidRequest]
    assert errors(hosts.sum(hosts.a, hosts.b, hosts.c, data=Payload((), 4))) == [InvalidRequest]
    last = hosts.push(hosts.d)
    assert made(first, again, last) == [True] * 3
    assert made(hosts.sum(hosts.a, hosts.b, hosts.c)) == [True]
    assert hosts.values == [1111]


def test_observers_in_a_sum(hosts):
    """They contribute nothing and are named; the sum is whose contribution it has, also if one of them sends it."""
    parts = (hosts.said(hosts.a, weight=0.0, observes=True), hosts.said(hosts.b), hosts.said(hosts.c))
    total = hosts.sum(hosts.a, hosts.b, hosts.c, parts=parts, data=hosts.data([hosts.b, hosts.c]))
    assert made(hosts.push(hosts.d), total) == [True, True]
    assert total.result().observers == (A,)
    assert hosts.values == [1110]


def test_what_is_not_finite_in_a_sum_is_its_senders(tmp_path):
    """The error accuses who said so, and nobody else of its host."""
    hosts = Hosts(tmp_path, nonfinite="raise")
    parts = (hosts.said(hosts.a), hosts.said(hosts.b, nonfinite=(0,)), hosts.said(hosts.c))
    total, last = hosts.sum(hosts.a, hosts.b, hosts.c, parts=parts), hosts.push(hosts.d)
    assert errors(total, last) == [NonfiniteError] * 2
    assert str(B) in str(total.exception())
    assert str(A) not in str(total.exception())
    assert hosts.values == [0]


# ---- Sums, and what comes beside them ----

SCENES = {
    "senders ask by themselves, before the end and after it": ("abc c a d a b c d", "made " * 8, 1111),
    "senders that are lost count in a sum that is whole": ("abc -ab c d", "fenced made made", 1111),
    "a sum beside a contribution that is in it, or not": ("c abc ab a b d", "made again again made made made", 1111),
    "a second sum of a host": ("ab bc abc", "waits again again", 0),
    "a sender of it pushes before it is whole": ("abc/ b c d + abc a", "again made made made again made", 1111),
    "a contribution of its host that is not in it": ("ab b c a b d", "again again made made made made", 1111),
    "the same before it has come whole": ("ab/ c a b d", "again made made made made", 1111),
    "its sender is lost halfway": ("abc/ d b -a c", "again -a -a -a", 1110),
    "all of its senders are lost halfway": ("abc/ d -abc", "fenced -abc", 1000),
    "a member of it is lost before": ("-b abc a c d", "again -b -b -b", 1101),
    "its round was made without one of its senders": ("a c d -b abc a b", "-b -b -b again -b fenced", 1101),
}
"""What comes in turn, what each is answered in the end, and what is in the variable then. Members push by themselves or
in a sum, of which half may have come (/) and the rest comes later (+), or are lost (-). An answer is that of a round
with everybody, or without some (-); or the sender is asked to push again, or told that its session has ended."""


@pytest.mark.parametrize("scene", SCENES)
def test_sums_and_contributions(hosts, scene):
    """Each contribution counts once: a sum that would be cut, or have other bits, is refused or dropped, and its
    senders push by themselves; who was left out is told so. What still comes of one that was dropped counts nothing."""
    steps, answers, value = SCENES[scene]
    calls, half = [], hosts.half()
    for step in steps.split():
        members = [hosts.members["abcd".index(name)] for name in step.strip("-/+")]
        if step == "+":
            half.add(0, memoryview(np.full(2, 5e5, "float32")).cast("B"))
        elif step[0] == "-":
            hosts.close(*members)
        elif len(step) == 1:
            calls.append(attempt(partial(hosts.push, *members)))
        else:
            calls.append(attempt(partial(hosts.sum, *members, data=half if step[-1] == "/" else None)))
    assert [answer(*call) for call in calls] == answers.split()
    assert hosts.values == [value]


def answer(future, error):
    """The answer of a call, or why it was refused at once, in a word."""
    if error is None and not future.done():
        return "waits"
    if (error := error or future.exception()) is not None:
        return {PushAgain: "again", Fenced: "fenced"}[type(error)]
    excluded = "".join("abcd"[task.index] for task in future.result().excluded)
    return f"-{excluded}" if excluded else "made"


def test_a_round_with_a_sum_does_not_stream(tmp_path, monkeypatch):
    """Nothing of a sum is used before it is whole, since it may be dropped until then; nor of what came before it."""
    monkeypatch.setattr("pswire.model.plan.PART_BYTES", 0)
    hosts = Hosts(tmp_path, mode="sync")
    rest = hosts.half()
    last = hosts.push(hosts.d, data=rest)
    total = hosts.sum(hosts.a, hosts.b, hosts.c, data=hosts.half())
    told = [last, *map(hosts.push, (hosts.a, hosts.b, hosts.c))]
    assert errors(total) == [PushAgain]
    rest.add(0, memoryview(np.full(2, 1e3, "float32")).cast("B"))
    assert made(*told) == [True] * 4
    assert hosts.values == [1111]


def test_a_late_contribution_leaves_a_sum_alone_that_its_round_has_begun_with(tmp_path):
    """With backup workers: the round reads what the sum has. Whoever is late gets the answer, and counts nowhere."""
    hosts = Hosts(tmp_path, backup=1)
    assert made(*map(hosts.push, hosts.members)) == [True] * 4
    hosts.turn()
    hosts.lags = True
    told = [hosts.sum(hosts.a, hosts.b), hosts.push(hosts.d)]
    assert hosts.work, "it has begun"
    told += [hosts.push(hosts.c), hosts.push(hosts.a)]
    hosts.catch_up()
    assert [future.result(0).excluded for future in told] == [(C,)] * 4
    assert hosts.values == [1111 + 1011]


# ---- Senders that no sum may have ----


@pytest.mark.parametrize("new", ["a session that is no member", "a newcomer"])
def test_a_sum_with_who_may_not_be_in_one(hosts, new):
    """A process that the next generation takes in; or one that is new, which may be in another section in its first
    round, and then that is its error alone."""
    assert made(*map(hosts.push, hosts.members)) == [True] * 4
    hosts.turn()
    part = {"start": 1} if new == "a newcomer" else {"session": hosts.c.session + 10_000}
    parts = (hosts.said(hosts.a), hosts.said(hosts.b), replace(hosts.said(hosts.c), **part))
    assert errors(hosts.sum(hosts.a, hosts.b, hosts.c, parts=parts)) == [PushAgain]
    start = {"start": 1} if new == "a newcomer" else {}
    assert made(hosts.push(hosts.c, **start), *map(hosts.push, (hosts.a, hosts.b, hosts.d))) == [True] * 4
    assert hosts.values == [2222]


def test_a_sum_to_an_generation_that_is_not_known_yet(hosts):
    parts = tuple(hosts.said(worker, generation=2) for worker in (hosts.a, hosts.b, hosts.c))
    total = hosts.sum(hosts.a, hosts.b, hosts.c, parts=parts, generation=2)
    assert not total.done()
    hosts.close(hosts.d)
    assert total.result(0).excluded == ()
    assert hosts.values == [111]


def test_a_sum_to_rounds_that_each_worker_makes_by_itself(tmp_path):
    """There is no round of both."""
    hosts = Hosts(tmp_path, mode="async")
    assert errors(hosts.sum(hosts.a, hosts.b)) == [PushAgain]
    assert errors(hosts.push(hosts.a), hosts.push(hosts.b)) == [type(None)] * 2
    assert hosts.values == [11]


# ---- What is no sum ----

CLOSURE = ClosureName(1, 1, 1, ())
WRONG = {
    "weights that do not add up": {"weights": (4.0,)},
    "weights of another plan": {"weights": (3.0, 3.0)},
    "a session twice": {"twice": True},
    "without its sender": {"missing": True},
    "of another round": {"part": {"round": 1}},
    "of another generation": {"part": {"generation": 2}},
    "of another plan": {"part": {"plan_id": b"another"}},
    "of another host": {"part": {"host": THERE}},
    "with rows": {"part": {"rows": (2,)}},
    "with lookups": {"part": {"lookups": (RowRead(0, b""),)}},
    "with lookups of all": {"lookups": (RowRead(0, b""),)},
    "with hints": {"part": {"hints": (RowRead(0, b""),)}},
    "with hints of all": {"hints": (RowRead(0, b""),)},
    "with a closure's": {"part": {"closure": CLOSURE}},
    "with batches that were handed out": {"part": {"chunks": (1,)}},
    "with first values": {"part": {"first_values": (1,)}},
    "with a round of a single worker": {"part": {"alone": True}},
    "with an observer that contributes": {"part": {"observes": True}},
    "with weights that are not finite numbers from 0": {"part": {"weights": (-1.0,)}, "weights": (1.0,)},
    "with a sum": {"nested": True},
    "of observers": {"part": {"observes": True, "weights": (0.0,)}, "all": True, "weights": (0.0,)},
    "that only observes": {"observes": True, "weights": (0.0,)},
    "without a host": {"hostless": True},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_sum_is_refused(hosts, wrong):
    """With an error that is its sender's, not with a word to send again; and nothing of it is taken."""
    said = dict(WRONG[wrong])
    parts = list(map(hosts.said, (hosts.a, hosts.b, hosts.c)))
    part = said.pop("part", {})
    for index in range(3) if said.pop("all", False) else [1]:
        parts[index] = replace(parts[index], **part)
    if said.pop("twice", False):
        parts[2] = parts[1]
    if said.pop("missing", False):
        del parts[0]
    if said.pop("nested", False):
        parts[1] = replace(parts[1], parts=(parts[1],))
    if said.pop("hostless", False):
        parts, said = [replace(part, host=0) for part in parts], {"host": 0}
    with pytest.raises(InvalidRequest):
        hosts.sum(hosts.a, hosts.b, hosts.c, parts=tuple(parts), **said).result(0)
    assert hosts.cores[0].status().waiting == ()
    assert made(*map(hosts.push, hosts.members)) == [True] * 4
    assert hosts.values == [1111]


def test_a_sum_that_does_not_fit_its_plan(hosts):
    """All of it is dropped: its senders can still push what they have."""
    with pytest.raises(InvalidRequest, match="does not fit"):
        hosts.sum(hosts.a, hosts.b, hosts.c, data=Payload((), 4)).result(0)
    assert made(*map(hosts.push, hosts.members)) == [True] * 4


# ---- Several servers ----


def everywhere(two, push, *args):
    return [push(*args, server=server) for server in (0, 1)]


@pytest.mark.parametrize("everywhere", [True, False], ids=["a sum on both", "its parts on one"])
def test_a_sum_on_several_servers(two, everywhere):
    """Nothing is visible before all have voted; what counts is the same if it comes as a sum to one server alone."""
    told = [two.sum(two.a, two.b, two.c), *(two.push(two.d, server=server) for server in (0, 1))]
    if everywhere:
        told.append(two.sum(two.a, two.b, two.c, server=1))
    else:
        told += [two.push(worker, server=1) for worker in (two.a, two.b, two.c)]
    assert two.values == [0, 0]
    two.hear()
    assert made(*told) == [True] * len(told)
    assert two.values == [1111, 1111]


@pytest.mark.parametrize("late", [False, True])
def test_a_vote_that_would_cut_a_sum(two, late):
    """One server has a sum, the other the contributions of all its senders but one, which is lost: both servers ask for
    all contributions again, and count the same. A sum that was on its way still is refused: it might be cut again, and
    its senders are asked already."""
    told = [two.sum(two.b, two.a, two.c), two.push(two.d)]
    told += [two.push(worker, server=1) for worker in (two.a, two.c, two.d)]
    two.close(two.b)
    assert {len(vote.whole) for _, _, vote in two.votes} == {3, 4}
    two.hear()
    assert errors(*told) == [Fenced, PushAgain, PushAgain, PushAgain, PushAgain]
    if late:
        assert errors(two.sum(two.a, two.c)) == [PushAgain]
    again = [two.push(worker, server=server) for server in (0, 1) for worker in (two.a, two.c, two.d)]
    assert two.values == [0, 0]
    two.hear()
    assert [future.result(0).excluded for future in again] == [(B,)] * 6
    assert two.values == [1101, 1101]
    assert [record(two, server).sessions for server in (0, 1)] == [record(two).sessions] * 2


def test_a_vote_that_would_cut_a_sum_and_has_too_few(tmp_path):
    """With backup workers: whoever was late may count at the next attempt, so that enough are on all servers."""
    two = Hosts(tmp_path, servers=2, backup=1)
    for worker in two.members:
        everywhere(two, two.push, worker)
    two.hear()
    two.turn()
    told = [two.sum(two.a, two.b), two.push(two.d), *(two.push(w, server=1) for w in (two.a, two.c, two.d))]
    two.hear()
    assert errors(*told) == [PushAgain] * 5
    again = [future for worker in (two.a, two.b, two.d) for future in everywhere(two, two.push, worker)]
    two.hear()
    assert [future.result(0).excluded for future in again] == [(C,)] * 6
    assert two.values == [1111 + 1011] * 2


def test_a_vote_that_leaves_out_all_of_a_sum(two):
    """All its senders are lost before the second server has anything of them: nothing has to be asked for again."""
    total, last = two.sum(two.a, two.b, two.c), everywhere(two, two.push, two.d)
    two.close(two.a, two.b, two.c)
    two.hear()
    assert errors(total) == [Fenced]
    assert [future.result(0).excluded for future in last] == [(A, B, C)] * 2
    assert two.values == [1000, 1000]
