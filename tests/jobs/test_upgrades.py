"""Servers of the version before are replaced, one after the other, by those of this one, while the job goes on.

PS_TEST_BEFORE names the Python of an environment that has the version before: a wheel of the release, or one that
`pip wheel --no-deps` makes of an older commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pstesting.in_process import InProcessCluster
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from tests.jobs.test_lost_servers import KEYS, all_go_on_with, await_variables, enough, go_on, learn, lose, replace

BEFORE = os.environ.get("PS_TEST_BEFORE", "")

SCRIPT = """
import numpy as np
import psclient as ps
strategy = ps.ParameterServerStrategy(devices=["cpu:0"])
with strategy.scope():
    v = ps.Variable(np.zeros(3, "float32"), name="v")
    w = ps.Variable(np.zeros((2, 2), "float32"), name="w")
    optimizer = ps.optimizers.SGD(1.0)
    optimizer.build([v, w])
for _ in range(50):
    strategy.run(lambda: optimizer.apply_gradients([(-np.ones(3, "float32"), v), (np.ones((2, 2), "float32"), w)]))
ps.train.Checkpoint(v=v, w=w, optimizer=optimizer).save("run/ckpt")
print("trained", float(v.numpy()[0]), flush=True)
"""
"""What workers of the version before run: it has nothing that came after it."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not BEFORE, reason="PS_TEST_BEFORE names no Python that has the version before"),
]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job with copies: its servers are of the version before, its workers and its chief of this one."""
    found = subprocess.run([BEFORE, "-P", "-c", "import psserver; print(psserver.__file__)"], stdout=subprocess.PIPE)
    there = Path(found.stdout.decode().strip()).parent
    assert there != Path(__file__).parents[2] / "psserver", f"{BEFORE} has this version, and none before it"
    cluster = ProcessCluster(learn, tmp_path, (None, [20]), **KEYS)
    start = cluster.cluster._server

    def start_before(task, port):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", BEFORE)
            return start(task, port)

    cluster.cluster._server = start_before
    with cluster:
        cluster.cluster._server = start
        for server in (PS0, PS1):
            process = cluster.cluster.processes[server]
            assert Path(f"/proc/{process.pid}/cmdline").read_text().startswith(BEFORE)
        yield cluster


def test_servers_are_upgraded_one_after_the_other(tmp_path, job):
    """One of the version before is lost, and the other goes on alone; then those of this one take their places.

    Nobody restarts, and each step counts once: bit for bit as in a job of one version.
    """
    go_on(job, W0, W1)
    lose(job, PS1)
    job.start(PS1)
    all_go_on_with(job, PS1)
    await_variables(job, PS1)
    replace(job, PS0)
    enough(job, tmp_path)
    job.finish()


def test_workers_of_the_version_before_are_served(tmp_path):
    """Servers of this version: the workers train, and save a checkpoint."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    with InProcessCluster(2, 2, tmp_path / "checkpoints") as cluster:
        jobs = {"ps": cluster.addresses, "worker": ["localhost:1", "localhost:2"]}

        def worker(index):
            config = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": index}})
            command = [BEFORE, "-P", "-m", "psclient", str(script)]
            return subprocess.Popen(command, env=plain | {"TF_CONFIG": config}, stdout=subprocess.PIPE, text=True)

        workers = [worker(index) for index in range(2)]
        assert [process.communicate(timeout=60)[0] for process in workers] == ["trained 100.0\n"] * 2
        assert [process.returncode for process in workers] == [0, 0]
    assert (tmp_path / "checkpoints" / "run").is_dir()
