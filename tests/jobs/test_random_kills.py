"""Workers, the chief, and servers die at random moments, again and again, and are started again."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import psclient as ps
from pstesting import faults
from pstesting.faults import Faults
from pstesting.processes import CHIEF, QUICK, SECONDS, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, say
from tests.kit.internals import Task


def endure(rounds, rates):
    """Each contribution is a power of 1000, so that the sums' digits count contributions by worker."""
    faults.use(Faults(ME, rates))
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(50_000), name="v")
        u = ps.Variable(np.zeros(50_000), name="u")
    while strategy.round < rounds:
        mine = np.full(50_000, 1000.0**ME)
        time.sleep(0.01)  # a step that takes its time
        strategy.run(lambda mine=mine: add_all([(v, mine), (u, mine)]))
        found = v.numpy(), u.numpy()
        assert all((value == value[0]).all() for value in found)
        say("did", strategy.round - 1)
    say("sums", [float(v[0]), float(u[0])])


def check_counts(job, totals, deaths):
    """Each contribution that was answered is in the sums, and of the others at most one for each death."""
    for total in totals:
        for task in (W0, W1, W2):
            count, did = int(total) // 1000**task.index % 1000, len(job.said(task, "did"))
            assert did <= count <= did + deaths[task], (task, count, did, deaths)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_all_die_and_come_back(tmp_path, seed):
    """With copies each of three servers dies again and again as well, one at a time; the same law holds."""
    choices = random.Random(seed)
    servers = [Task("ps", index) for index in range(3)]
    deaths = dict.fromkeys((W0, W1, W2, CHIEF, *servers), 0)
    rates = {"drop": 0.02, "twice": 0.02, "lose": 0.02} if seed % 2 else {}
    keys = {"ps": 3, "workers": 3, "chief": "driver", "timeouts": QUICK, "replication": 1}
    with ProcessCluster(endure, tmp_path, (900, rates), **keys) as job:  # so many that all are there in the end
        job.hear(W0, "did", 0)
        away = None
        until = time.monotonic() + 10 * SECONDS
        while max(round for task in (W0, W1, W2) for round in job.said(task, "did") or [0]) < 420:
            assert time.monotonic() < until, job.errors(CHIEF)
            _check_clients(job)
            if away is not None and _are_back(job, servers, deaths):
                away = None
            for server in servers:  # one that stood still for a lease was lost, and has ended by itself
                if job.cluster.processes[server].poll() is not None:
                    assert away in (None, server), f"{server} was lost beside {away}: this machine is too slow"
                    deaths[server] += away is None
                    away = server
                    job.start(server)
            task = choices.choice([task for task in deaths if task.job != "ps" or away is None])
            away = task if task.job == "ps" else away
            job.kill(task)
            deaths[task] += 1
            time.sleep(choices.random() * 0.5)
            job.start(task)
            time.sleep(choices.random() * 2.5)
        while not all(job.said(task, "sums") for task in (W0, W1, W2)):
            assert time.monotonic() < until, job.errors(CHIEF)
            _check_clients(job)
            time.sleep(0.1)
        sums = {tuple(job.said(task, "sums")[-1]) for task in (W0, W1, W2)}
        check_counts(job, sums.pop(), deaths)
        for task in (W0, W1, W2, CHIEF):
            assert job.exited(task) == 0
    assert not sums


def _check_clients(job):
    """None of those that are not servers ends by itself before its part is done."""
    for task in (W0, W1, W2, CHIEF):
        assert job.cluster.processes[task].poll() in (None, 0), job.errors(task)[-4000:]


def _are_back(job, servers, deaths):
    """Whether the job goes on with all its servers, each of which knows it."""
    killed = sum(deaths[server] for server in servers)
    for server in servers:
        with job.server(server) as asked:
            status = asked.status()
            if status.gone or len(status.losses) != killed or status.catching_up:
                return False
    return True
