"""Jobs of real processes: who reads the terminal of any of them learns which worker poisoned which variable."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from pswire.telemetry import logging_setup
from tests.kit.telemetry import Page, metrics_url

LARGE = (3 << 20) // 4
"""Elements of float32 of which two are more than a part: such a round streams."""


def poisoned(size: int, asynchronous: bool) -> None:
    """Worker 1 has a NaN among its gradients for `v` in the second round of five; nobody has any for `u` or `t`."""
    strategy = ps.ParameterServerStrategy(consistency=ps.Async() if asynchronous else ps.Sync())
    with strategy.scope():
        three = [ps.Variable(np.zeros(size, "float32"), name=name) for name in ("u", "v", "t")]
    for step in range(5):
        gradients = [np.ones(size, "float32") for _ in three]
        if (ME, step) == (1, 1):
            gradients[1][size // 2] = np.nan
        strategy.run(add_all, args=(list(zip(three, gradients, strict=True)),))
    say("finite", [bool(np.isfinite(variable.numpy()).all()) for variable in three])
    gate("on")
    strategy.close()


def warnings_of(job: ProcessCluster, task) -> list[str]:
    """What a task has said of values that are not finite."""
    lines = [logging_setup.read(line) for line in job.errors(task).splitlines()]
    return [line["message"] for line in lines if line and line["level"] == "warning" and "NaN" in line["message"]]


@pytest.mark.parametrize(
    ("size", "lane", "servers"),
    [
        pytest.param(64, "grpc", (PS0, PS1), marks=pytest.mark.soak),
        (LARGE, "shm", (PS0,)),
        pytest.param(LARGE, "tcp", (PS0,), marks=pytest.mark.soak),
    ],
)
def test_a_poisoned_variable_is_told_once_in_every_terminal(tmp_path, size, lane, servers):
    """The worker and the variable are named exactly, and nothing else is; the metrics count it; all go on."""
    keys = {"ps": len(servers), "workers": 2, "metrics_port": 0, "log_format": "json", "lane": lane}
    with ProcessCluster(poisoned, tmp_path, (size, False), gates=["on"], **keys) as job:
        assert [job.hear(task, "finite") for task in (W0, W1)] == [[True, False, True]] * 2
        pages = [Page.at(metrics_url(job, task)) for task in servers]
        job.open("on")
        job.finish()
        told = {task: warnings_of(job, task) for task in (W0, W1, *servers)}
    (words,) = told[W0]
    assert told[W1] == [words]
    assert [line for server in servers for line in told[server]] == [words]
    assert "'v'" in words
    assert str(W1) in words
    assert "round 1" in words
    assert not [name for name in ("'u'", "'t'", str(W0)) if name in words]
    assert sum(one("server_nonfinite_contributions_total") for one in pages) == 1
    assert sum(one("server_nonfinite_variables") for one in pages) == 1


def test_an_asynchronous_worker_reads_of_its_own_gradients(tmp_path):
    """Its rounds are its own, and so is the warning; the server's log has it as well."""
    keys = {"ps": 1, "workers": 2, "log_format": "json"}
    with ProcessCluster(poisoned, tmp_path, (64, True), gates=["on"], **keys) as job:
        for task in (W0, W1):
            job.hear(task, "finite")
        job.open("on")
        job.finish()
        told = {task: warnings_of(job, task) for task in (W0, W1, PS0)}
    (words,) = told[W1]
    assert str(W1) in words
    assert (told[W0], told[PS0]) == ([], [words])
