"""Workers that join a running job: each gets an index of its own, which is free again when its process is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.internals import ConfigError, Done, Enlisted, InvalidRequest, JobStarted, Task, TaskTaken
from tests.kit.rig import CHIEF, SOON, WORKERS, Job

LEASE = 12
"""Seconds after which a place that nobody keeps is free: more than a lease."""

ONE, OTHER, THIRD = 11, 22, 33
"""Keys of processes."""


@pytest.fixture
def grown(job):
    """A job whose cluster has two workers, of which none is there yet."""
    return begin(job, ("a:0", "b:0"), "c:0")


def begin(job, workers, chief):
    """Begins a job of such a cluster."""
    job.opened = job.open(CHIEF, 0, True)
    job.token = job.opened.token
    lives = tuple(one.incarnation for one in job.servers.cores)
    entry = JobStarted(job.token, lives, workers=workers, chief=chief)
    for server in job.verbs:
        assert server.approve(job.token, 0, [entry]) == 1
    return job


def enlist(job, key, index=None):
    """A process asks for an index; returns the one that it gets."""
    place = job.verbs[0].enlist(None if index is None else Task("worker", index), key)
    assert place.task.job == "worker"
    return place.task.index


def test_each_gets_an_index_of_its_own(grown):
    """The first above the cluster's that is free; who asks again gets the same one."""
    assert [enlist(grown, key) for key in (ONE, OTHER, ONE, THIRD, OTHER)] == [2, 3, 2, 4, 3]
    assert enlist(grown, THIRD, 4) == 4


def test_a_place_that_nobody_keeps_is_free_again(grown):
    """After a lease, and not before."""
    assert [enlist(grown, key) for key in (ONE, OTHER)] == [2, 3]
    grown.servers.spend(LEASE / 2, grown.opened.session)
    assert enlist(grown, OTHER) == 3
    grown.servers.spend(LEASE / 2, grown.opened.session)
    assert enlist(grown, THIRD) == 2, "its process has not asked for a lease"
    assert enlist(grown, ONE) == 4, "the other one has kept its own"


def test_a_session_keeps_the_place_of_its_task(grown):
    """As long as it is open: no word is needed beside its beats; then the index is free."""
    enlist(grown, ONE)
    session = grown.open(WORKERS[2]).session
    assert grown.verbs[0].enlist(WORKERS[2], ONE) == Enlisted(WORKERS[2], True)
    grown.servers.spend(2 * LEASE, grown.opened.session, session)
    assert enlist(grown, OTHER) == 3
    with pytest.raises(TaskTaken, match="another process is /job:worker/task:2"):
        enlist(grown, OTHER, 2)
    grown.servers.spend(2 * LEASE, grown.opened.session, grown.open(WORKERS[0]).session)
    assert enlist(grown, THIRD) == 2, "its lease has ended"


def test_whoever_is_there_has_its_index(grown):
    """Also a process that was started as that task by its TF_CONFIG."""
    grown.open(WORKERS[2])
    assert enlist(grown, ONE) == 3


def test_a_certain_index(grown):
    """As a certificate names one: it is given if it is free, and above the cluster's."""
    assert enlist(grown, ONE, 7) == 7
    assert enlist(grown, OTHER) == 2
    with pytest.raises(TaskTaken, match=r"end it first.*--extra-workers"):
        enlist(grown, OTHER, 7)
    with pytest.raises(ConfigError, match=r"task:1 is one of the 2 workers of the job's cluster.*without --join"):
        enlist(grown, OTHER, 1)
    assert enlist(grown, OTHER, 3) == 3, "it gives up the one that it had"
    assert enlist(grown, THIRD) == 2


def test_a_cluster_without_workers(job):
    """Its chief runs the script: the first that joins is worker 0."""
    assert enlist(begin(job, (), "c:0"), ONE) == 0


def test_another_job_knows_nobody(grown):
    """Its cluster may be another one."""
    enlist(grown, ONE)
    begin(grown, ("a:0", "b:0", "c:0"), "d:0")
    assert enlist(grown, OTHER) == 3
    with pytest.raises(ConfigError, match="one of the 3 workers"):
        enlist(grown, ONE, 2)


def test_there_is_an_end_to_it(grown):
    """Whoever asks under many names fills no memory."""
    limit = grown.servers.cores[0].registry.limit
    assert [enlist(grown, key) for key in range(1, limit + 1)] == [*range(2, limit + 2)]
    with pytest.raises(ConfigError, match=f"{limit} workers join this job"):
        enlist(grown, limit + 1)
    assert enlist(grown, 1) == 2


def test_who_cannot_join(serve):
    """Each is told why."""
    servers = serve(2)
    with pytest.raises(InvalidRequest, match="no chief has begun a job"):
        servers.verbs[0].enlist(None, ONE)
    job = Job(servers)
    with pytest.raises(ConfigError, match="older version, which does not say how many workers"):
        enlist(job, ONE)
    begin(job, ("a:0",), "")
    with pytest.raises(InvalidRequest, match="/job:ps/task:0 is no worker"):
        job.verbs[0].enlist(Task("ps", 0), ONE)
    with pytest.raises(InvalidRequest, match="drawn by lot"):
        enlist(job, 0)
    with pytest.raises(InvalidRequest, match="another server keeps the sessions"):
        job.verbs[1].enlist(None, ONE)
    job.append(Done())
    with pytest.raises(InvalidRequest, match="is over"):
        enlist(job, ONE)


def test_an_older_server_s_log_is_of_the_same_job(grown):
    """It keeps nothing of the cluster: a new chief that has read its log does not begin the job anew elsewhere."""
    first, second = grown.verbs
    v = grown.open(WORKERS[0])
    (begun,) = first.watch(v.session, 0, 0).result(SOON).entries
    assert (begun.workers, begun.chief) == (("a:0", "b:0"), "c:0")
    assert second.approve(grown.token, 0, [replace(begun, workers=(), chief=""), Done()]) == 2
    assert second.status().over
    assert begun == replace(begun, workers=(), chief="")
    assert second.watch(0, 0, 0).result(SOON).entries[0].workers == begun.workers
