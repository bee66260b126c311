"""A server has other values than its copies: that is found, named, and repaired, while training goes on."""

from __future__ import annotations

import json
import os
import re
import sys
import time

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.processes import CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import DIRECTORY, ME, say
from tests.jobs.test_lost_servers import PS2, values
from tests.jobs.test_returning_servers import KEYS, all_go_on_with, await_variables, learn
from tests.kit.faulty_servers import fail, flips
from tests.kit.internals import DIGEST_ROUNDS as ROUNDS
from tests.kit.internals import OUTLIVED
from tests.kit.telemetry import Page


def everything():
    """Trains what servers hold: large and small variables, rows that miss updates, a table whose keys come and go.

    One worker reads what the other one does not. They go on until the test has had enough.
    """
    strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
    with strategy.scope():
        large = ps.Variable(np.zeros(300_000, "float32"), name="large")
        small = ps.Variable(np.full(5, 0.1, "float32"), name="small")
        cut = ps.Variable(np.zeros((40, 2), "float32"), name="cut")
        policy = ps.dynamic_embedding.GlobalStepEvict(8)
        table = ps.dynamic_embedding.get_variable(
            "table", dim=2, admission=ps.dynamic_embedding.CounterFilter(2), eviction=policy
        )
        optimizer = ps.optimizers.Adam(0.01)
    draw = np.random.default_rng(ME)

    def step(number):
        keys = draw.integers(0, 60, 5)
        found = table.lookup(keys)
        grads = [
            (draw.standard_normal(5).astype("float32"), small),
            (ps.IndexedSlices(draw.standard_normal((5, 2)).astype("float32"), keys % 40), cut),
            (found.gradient(draw.standard_normal(found.values.shape).astype("float32")), table),
        ]
        if number % 16 == 0:
            grads.append((np.full(300_000, 0.3 + ME, "float32"), large))
        optimizer.apply_gradients(grads)
        time.sleep(0.02)
        return np.float32((DIRECTORY / "enough").exists())

    number, enough = 0, False
    while not enough:
        seen = strategy.run(step, (number,))
        enough = float(strategy.reduce("sum", seen, axis=None)) > 0
        number += 1
        if ME == 0 and number % 7 == 0:
            cut.numpy(), table.lookup(np.arange(20)).values
    say("is", [small.numpy().tolist(), float(np.sum(large.numpy()))])


def compared(job, server):
    """How often a server that runs has found the same values as another one, and how often not."""
    said = " serves metrics at "
    job.until(lambda: any(said in line for line in job.cluster.output(server)))
    line = [line for line in job.cluster.output(server) if said in line][-1]
    page = Page.at(re.search(r"http://\S+", line).group())
    return [page("server_digests_total", outcome=outcome) for outcome in ("equal", "different")]


def begun(job, path, name):
    """Lets a variable fail while rounds are made; returns the round after which it may be so."""
    with job.server(PS0) as server:
        for task in (W0, W1):
            job.hear(task, "at", 20)
        fail(path, name)
        return server.status().round


def problems(job):
    """What `psctl status` finds wrong, by its kind and task."""
    addresses = ",".join(job.cluster.addresses[server] for server in sorted(job.cluster.addresses))
    psctl = [sys.executable, "-m", "psclient.psctl", "--address", addresses, "status", "--json"]
    environ = os.environ | job.cluster._options.variables()
    done = forks.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    return {(each["kind"], each["task"]): each["message"] for each in json.loads(done.stdout)["problems"]}


@pytest.mark.parametrize(
    ("name", "home", "failing"), [("v", PS0, PS1), pytest.param("w", PS2, PS0, marks=pytest.mark.soak)], ids=str
)
def test_a_server_with_another_value_is_taken_back_with_the_right_one(tmp_path, name, home, failing):
    """One bit of a copy: within a span of rounds both servers name it, and the sums are exact without the other one.

    Of three servers the one that fails keeps the log.
    """
    environ, keys = flips(tmp_path, failing.index), {**KEYS, "ps": max(home.index, failing.index) + 1}
    with ProcessCluster(learn, tmp_path, (None, [20]), servers_environ=environ, **keys) as job:
        last = begun(job, tmp_path, name)
        job.open("go 20")
        said = job.hear_error(failing, f"{failing} has other values than {home} after round ")
        found = int(re.search(r"after round (\d+)", said).group(1))
        assert last < found <= last + 1 + ROUNDS
        assert repr(name) in said
        job.hear_error(CHIEF, f"goes on without {failing}: had other values than {home} after round {found}")
        assert job.exited(failing) == OUTLIVED
        job.start(failing)
        all_go_on_with(job, failing)
        await_variables(job, failing)
        assert not [key for key in problems(job) if key[0] == "differs"]
        job.kill(home)
        job.hear_error(CHIEF, f"goes on without {home}")
        (tmp_path / "enough").touch()
        what = job.hear(W0, "is")
        assert what == job.hear(W1, "is") == values(what[2], what[2])
        assert [line.count("has other values") for line in (job.errors(home), job.errors(failing))] == [1, 1]
        assert job.exited(failing) == 0


@pytest.mark.ci
def test_undisturbed_servers_never_differ(tmp_path):
    """Nor do they where a server comes back, whose tables lie in another order, or a worker is left out."""
    keys = {**KEYS, "gates": [], "ps": 3, "metrics_port": 0, "timeouts": QUICK}
    with ProcessCluster(everything, tmp_path, **keys) as job, job.server(PS0) as server:
        job.until(lambda: server.status().round > ROUNDS + 2)
        job.kill(PS1)
        job.hear_error(CHIEF, f"goes on without {PS1}")
        job.start(PS1)
        job.hear_error(W0, f"goes on with {PS1}, which is back")
        job.kill(W1)
        first = server.status().round
        job.until(lambda: server.status().round > first + 2 * ROUNDS + 2)
        for each, least in ((PS0, 4), (PS1, 2), (PS2, 4)):
            equal, different = compared(job, each)
            assert (equal >= least, different) == (True, 0)
        (tmp_path / "enough").touch()
        assert job.hear(W0, "is")
