"""Servers that are lost or have other values, and the log, as a chief tells of them, or takes over meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psclient._src.chief.job_log import JobLog, JobOver, JobState
from psclient._src.chief.losses import LEASES, Differences, go_on_without
from psclient._src.network.hosting import Hosting
from pstesting.clock import Clock
from pswire.cluster import ClusterSpec, Task
from pswire.errors import ServerGone, ServerLost
from pswire.limits import Timeouts
from pswire.model.log import Created, Done, Generation, GenerationClosed, Gone, JobStarted, Lost, Return
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import Difference, ServerStatus
from pswire.model.tensor import TensorSpec
from tests.kit.strategies import refused

SERVERS = [SimpleNamespace(task=Task("ps", index)) for index in range(4)]


def lost(server):
    return ServerLost("was lost; restart from a checkpoint", str(Task("ps", server)))


class DyingLog:
    """A log of which each server of `dying` tells this process, and whose chief has no answer, as it dies then."""

    def __init__(self, hosting, dying):
        self.state, self.hosting, self.dying = JobState(), hosting, list(dying)

    def lose(self, losses, more, seconds):
        if self.dying:
            keeper, tells = self.dying.pop(0)
            if tells:
                self.hosting.lose([Gone(server, "was lost") for server in self.state.losses] + list(losses))
            raise lost(keeper)
        self.state.take([*losses, *more])
        self.hosting.lose([entry for entry in self.state.log if isinstance(entry, Gone)])


def session_of(hosting, copied=True):
    return SimpleNamespace(servers=SERVERS, hosting=hosting, copied=copied, timeouts=Timeouts())


@pytest.fixture
def hosting():
    return Hosting(Task("chief", 0), SERVERS)


def told(hosting, *errors, dying=()):
    """What the log tells of in the end."""
    log = DyingLog(hosting, dying)
    for error in errors:
        go_on_without(session_of(hosting), log, error)
    return [entry.server for entry in log.state.log if isinstance(entry, Gone)]


def test_one_is_told_once(hosting):
    """With what others have found, after what the chief before may have told: this process has heard of server 3 from a
    server that is lost since, whose successor does not know."""
    hosting.lose([Gone(3, "was lost")])
    hosting.suspect(0, lost(0), True)
    assert told(hosting, lost(1), ServerGone("is gone", "/job:ps/task:1"), lost(1)) == [3, 0, 1]
    assert (hosting.losses, hosting.gone, hosting.live) == ((3, 0, 1), {0, 1, 3}, (2,))


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_the_one_that_is_told_is_lost_as_well(hosting, first, second, tells):
    """It may have told processes of the first one, though nobody has told the chief that it has."""
    assert told(hosting, lost(first), dying=[(second, tells)]) == [first, second]
    assert hosting.losses == (first, second)
    assert hosting.live == (0, 2)


def test_the_last_one_cannot_be_lost(hosting):
    """Nor one without copies: its error stands."""
    refused(ServerLost, "restart from", lambda: told(hosting, *map(lost, range(4))))
    bare = session_of(hosting, copied=False), DyingLog(hosting, ())
    refused(ServerLost, "restart from", lambda: go_on_without(*bare, lost(1)))


def test_what_has_no_copy_ends_the_job(hosting):
    """The log tells of that as well."""
    log = DyingLog(hosting, ())
    log.state.variables.append(SimpleNamespace(servers=(1, 2)))
    go_on_without(session_of(hosting), log, lost(1))
    refused(ServerLost, "", lambda: go_on_without(session_of(hosting), log, lost(2)))
    end = Lost(2, "was lost; the server with its copies was lost too")
    assert log.state.log == [Gone(1, "was lost"), Gone(2, "was lost"), end]


LEASE = 10.0
HOMES = {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (3, 0), "all": (0, 1, 2, 3)}
"""The servers of each variable, the home first."""


class Job:
    """A job of four servers, and what these say of one another."""

    def __init__(self):
        self.state, self.clock = JobState(), Clock()
        self.hosting = Hosting(Task("chief", 0), SERVERS)
        session = SimpleNamespace(hosting=self.hosting, timeouts=Timeouts(session_timeout=LEASE))
        log = SimpleNamespace(state=self.state)
        self.differences = Differences([], session, log, None, self.clock)
        self.state.take([GenerationClosed(Generation(1, ()))])
        for number, (name, servers) in enumerate(HOMES.items()):
            spec = VariableSpec(name, TensorSpec("float32", ()), True)
            self.state.take([Created(PlacedVariable(number, spec, servers))])

    def lose(self, server):
        self.state.take([Gone(server, "was lost")])
        self.hosting.lose([entry for entry in self.state.log if isinstance(entry, Gone)])

    def look(self, *pairs, names=("a",), round=64, agreed=0, at=70):
        """Returns the server that is given up where some pairs differ; None for none."""
        found = {server: [] for server in range(4)}
        for one, other in pairs:
            for mine, their in ((one, other), (other, one)):
                found[mine].append(Difference(their, round, tuple(names), 0, agreed))
        statuses = [
            ServerStatus(server, 1, 1, None, at, (), (), 0, 0, 0, 0.0, differences=tuple(each))
            for server, each in found.items()
            if server not in self.state.gone
        ]
        lost = self.differences.look(statuses)
        return None if lost is None else int(lost.task.rpartition(":")[2])


@pytest.fixture
def job():
    return Job()


@pytest.mark.parametrize(
    ("pair", "names", "gives_up"),
    [((0, 1), ["a"], 1), ((1, 2), ["b"], 2), ((0, 3), ["d"], 0), ((0, 3), ["d", "all"], 3), ((1, 3), ["all"], 3)],
)
def test_who_has_the_copies_is_given_up(job, pair, names, gives_up):
    """Where they differ readers ask the other one; where they ask both, or neither, it is the higher one."""
    assert job.look(pair, names=names) == gives_up


def test_who_has_what_others_read_is_kept(job):
    """Not who differs from more servers, though it was read; who is read in place of a lost one stays."""
    assert job.look((0, 1), (0, 2), (0, 3), names=["all"]) == 0
    job.lose(2)
    assert job.look((0, 3), names=["c", "d"]) == 0


def test_nobody_is_given_up_before_both_have_told(job):
    """Nor while a server is taken back: members wait for it, and the others save for it."""
    assert job.look((0, 1), round=64, at=64) is None
    job.state.take([GenerationClosed(Generation(2, (), returns=Return(3, 9, 2)))])
    assert job.look((0, 1), round=64, at=65) is None
    job.state.take([GenerationClosed(Generation(3, ()))])
    assert job.look((0, 1), round=64, at=65) == 1


@pytest.mark.parametrize("agreed", [0, 3])
def test_who_has_begun_with_the_same_and_differs_again_stays(job, caplog, agreed):
    """The two compute differently, and will: that is said once, and another pair is repaired all the same. If they had
    the same values since, they are repaired again after ten leases."""
    assert job.look((0, 1)) == 1
    job.clock.now += LEASES * LEASE - 1
    assert job.look((0, 1), round=640, agreed=agreed, at=700) is None
    for seconds in (1, LEASES * LEASE):
        job.clock.now += seconds
        assert job.look((0, 1), round=640, agreed=agreed, at=700) == (1 if agreed else None)
    said = sum("so they compute differently" in record.getMessage() for record in caplog.records)
    assert said == (not agreed)
    assert job.look((0, 1), (2, 3), names=["c"]) == 3


def test_nobody_is_given_up_whose_values_would_be_lost(job, caplog):
    job.lose(2)
    for _ in range(2):
        assert job.look((0, 1)) is None
    assert [record.getMessage() for record in caplog.records if "not repaired" in record.getMessage()] == [
        "/job:ps/task:0 and /job:ps/task:1 have different values since round 64 ('a'). They are not repaired: removing "
        "either server would lose variables that have no other copy"
    ]


LOG = [JobStarted(1, (11, 12), "mine", (), (1, 0)), GenerationClosed(Generation(1, ()))]


class Server:
    """A server with a log, or one that is lost."""

    def __init__(self, index, entries):
        self.task, self.entries = Task("ps", index), entries

    def status(self):
        if self.entries is None:
            raise ServerLost("was lost", str(self.task))
        return SimpleNamespace(log=len(self.entries))


def reader(*logs, copied=True):
    """A chief that takes over the job that these servers hold."""
    servers = [Server(index, entries) for index, entries in enumerate(logs)]
    hosting = Hosting(Task("chief", 0), servers)

    def look(after):
        entries = servers[hosting.keeper].entries
        return SimpleNamespace(entries=entries[after : after + 1])  # a long log comes in several answers

    session = SimpleNamespace(hosting=hosting, look=look, copied=copied, incarnations=(11, 12), job="mine")
    return JobLog(servers, session, takes_over=True)


def test_it_reads_all_that_there_is():
    """In however many answers; where its keeper is lost from the next server, and the chief tells of that. The last
    server cannot be overlooked, nor one whose variables nobody else has; what is over is not taken over."""
    for logs, copied in (((None, None), True), ((None, LOG), False)):
        refused(ServerLost, "", reader(*logs, copied=copied).attach)
    refused(JobOver, "", reader([*LOG, Done()], LOG).attach)
    log = reader(LOG, LOG)
    log.attach()
    assert log.state.log == LOG
    log = reader(None, LOG)
    log.attach()
    assert log.state.log == LOG
    assert log._session.hosting.gone == {0}
    assert [*log._session.hosting.suspects] == [0]


def test_a_job_begins_with_what_those_need_who_join_it():
    """Where the servers are, the workers of its cluster, in their order, and its chief."""
    told = []
    servers = [
        SimpleNamespace(
            address=f"s{n}:1", approve=lambda *said: told.append(said), status=lambda: SimpleNamespace(log=0)
        )
        for n in range(2)
    ]
    hosting = Hosting(Task("chief", 0), servers)
    session = SimpleNamespace(hosting=hosting, copied=False, incarnations=(11, 12), job="mine", number=5, token=7)
    cluster = ClusterSpec({"ps": ["s0:1", "s1:1"], "worker": ["a:0", "b:0"], "chief": ["c:0"]})
    JobLog(servers, session, cluster=cluster).attach()
    assert [said[:2] for said in told] == [(7, 0)] * 2
    for begun in (entry for *_, entries in told for entry in entries):
        assert (begun.addresses, begun.workers, begun.chief) == (("s0:1", "s1:1"), ("a:0", "b:0"), "c:0")
