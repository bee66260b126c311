"""A server has other values than its copies: that is found, named, and repaired, while training goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from psserver.cli import OUTLIVED
from psserver.core.digests import ROUNDS
from pstesting.processes import CHIEF, PS0, PS1, SECONDS, W0, W1, ProcessCluster
from tests.faults.test_lost_servers import PS2, values
from tests.faults.test_returning_servers import KEYS, learn
from tests.support.flipping import fail, flips


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
    done = subprocess.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    return {(each["kind"], each["task"]): each["message"] for each in json.loads(done.stdout)["problems"]}


@pytest.mark.parametrize(("name", "home", "failing"), [("v", PS0, PS1), ("w", PS2, PS0)], ids=str)
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
        for task in (CHIEF, W0, W1):
            job.hear_error(task, f"goes on with {failing}, which is back")
        with job.server(failing) as server:
            back = server.status().round
            job.until(lambda: server.status().round > back + 2 * ROUNDS)
            assert not server.status().differences
        assert not [key for key in problems(job) if key[0] == "differs"]
        job.kill(home)
        job.hear_error(CHIEF, f"goes on without {home}")
        (tmp_path / "enough").touch()
        what = job.hear(W0, "is")
        assert what == job.hear(W1, "is") == values(what[2], what[2])
        assert [line.count("has other values") for line in (job.errors(home), job.errors(failing))] == [1, 1]
        assert job.exited(failing) == 0
