"""Threads of BLAS: a task has its share of the cores, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from psclient._src.config import THREADS, threads_of
from psclient._src.processes.blas import share_cores
from pswire.cluster import ClusterSpec, Task

W0 = Task("worker", 0)
CORES = threads_of(1)

SCRIPT = """
import numpy as np
from threadpoolctl import ThreadpoolController
def say(): print(*{library.num_threads for library in ThreadpoolController().select(user_api="blas").lib_controllers})
import psclient as ps
say()
ps.ParameterServerStrategy()
say()
"""


@pytest.mark.skipif(CORES == 1, reason="one core is not shared")
@pytest.mark.parametrize(("environ", "after"), [({}, threads_of(2)), ({"OPENBLAS_NUM_THREADS": str(CORES)}, CORES)])
def test_a_script_and_its_server_share_the_cores(environ, after):
    """`python SCRIPT` starts a server beside it; without a strategy, or if the user sets it, NumPy is as it was."""
    clean = {name: value for name, value in os.environ.items() if name not in THREADS}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=clean | environ, capture_output=True, text=True)
    assert [int(number) for number in done.stdout.split()] == [CORES, after], done.stderr


def test_tasks_elsewhere_share_nothing():
    """Those at the same host do, whatever they are."""
    spec = ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["a:2", "b:2"], "chief": ["a:3"]})
    assert spec.at_host_of(W0) == [Task("ps", 0), W0, Task("chief", 0)]
    assert spec.at_host_of(Task("ps", 1)) == [Task("ps", 1), Task("worker", 1)]
    assert spec.at_host_of(Task("evaluator", 0)) == [Task("evaluator", 0)]


@pytest.mark.skipif(CORES == 1, reason="one core is not shared")
def test_a_number_is_never_raised(monkeypatch):
    """A smaller one is the user's."""
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(1, "blas"):
        share_cores(ClusterSpec({"worker": ["a:1"]}), W0)
        assert {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {1}
