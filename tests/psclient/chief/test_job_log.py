"""The log of a job, as a chief reads it that takes over while a server is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psclient._src.chief.job_log import JobLog, JobOver
from psclient._src.transport.hosting import Hosting
from pswire.cluster import ClusterSpec, Task
from pswire.errors import ServerLost
from pswire.model.log import Done, Epoch, EpochClosed, JobStarted

LOG = [JobStarted(1, (11, 12), "mine", (), (1, 0)), EpochClosed(Epoch(1, ()))]


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
    """However many answers that takes."""
    log = reader(LOG, LOG)
    log.attach()
    assert log.state.log == LOG


def test_where_the_server_that_keeps_it_is_lost_the_next_one_has_it():
    """The chief tells of that once it knows the log."""
    log = reader(None, LOG)
    log.attach()
    assert log.state.log == LOG
    assert log._session.hosting.gone == {0}
    assert [*log._session.hosting.suspects] == [0]


@pytest.mark.parametrize("logs", [(None, None), (None, LOG)], ids=["all", "without copies"])
def test_the_last_server_cannot_be_overlooked(logs):
    """Nor one whose variables nobody else has."""
    with pytest.raises(ServerLost):
        reader(*logs, copied=logs[1] is None).attach()


def test_what_is_over_is_not_taken_over():
    """Nor is another job."""
    with pytest.raises(JobOver):
        reader([*LOG, Done()], LOG).attach()


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
