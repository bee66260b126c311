"""Clusters of real processes with certificates: they train as those without, on every lane, and say what is wrong."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import psclient as ps
from psclient._src.processes import process
from pstesting.processes import CALM, PS0, W0, ProcessCluster
from pstesting.script import say  # in the programs below, which are sources
from tests.kit.certificates import Certificates, options
from tests.kit.internals import Cluster, LaneName, RemoteServer, SecurityOptions, Task, start_server

AT_ONCE = 90.0
"""Seconds: processes start in a few of them, on a machine that others use in many; a start's deadline is 120."""


def train(rounds: int) -> None:
    """Adam on one matrix over some parts' size; tells every bit of it."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        w = ps.Variable(np.linspace(-1, 1, 1 << 19, dtype="float32").reshape(-1, 64), name="w")
        small = ps.Variable(np.zeros(3, "float32"), name="small")
        optimizer = ps.optimizers.Adam(1e-2)

    def step(index: Any) -> None:
        number = 1 + strategy.task.index + 2 * index
        optimizer.apply_gradients([(w.numpy() * number, w), (np.full(3, number, "float32"), small)])

    for index in range(rounds):
        strategy.run(step, args=(index,))
    import hashlib

    say("digest", hashlib.sha256(w.numpy().tobytes() + small.numpy().tobytes()).hexdigest())
    strategy.close()


def digests(directory: Path, **keys: Any) -> set[str]:
    """What the workers of a job end with, and which lanes they used."""
    directory.mkdir(exist_ok=True)
    with ProcessCluster(train, directory, (3,), ps=2, workers=2, **keys) as job:
        job.finish()
        (first,), (second,) = (job.said(task, "digest") for task in (W0, Task("worker", 1)))
        logged = job.errors(W0)
    lane = keys.get("lane", "shm")
    assert f"{lane} lane to {PS0}" in logged, logged
    return {first, second}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a cluster without certificates ends with."""
    return digests(tmp_path_factory.mktemp("plain"), lane="grpc", log_level="info")


@pytest.mark.parametrize("lane", ["tcp", *(pytest.param(lane, marks=pytest.mark.soak) for lane in ("grpc", "shm"))])
def test_a_secured_cluster_trains(
    certificates: Certificates, tmp_path: Path, without: set[str], lane: LaneName
) -> None:
    """With certificates and a token, on every lane, it ends with the same bits, and by itself; a chief task drives."""
    found = digests(tmp_path, lane=lane, security=options(certificates.out), chief="driver", log_level="info")
    assert found == without
    assert len(found) == 1


def test_a_cluster_draws_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else on the machine gets in, though nobody has said anything about security."""
    monkeypatch.setattr(process, "popen", subprocess.Popen)  # the system tells of what began with its environment
    with Cluster(script="", workers=0, chief="none") as cluster:
        environment = psutil.Process(cluster.processes[PS0].pid).environ()
        assert len(environment["PS_TOKEN"]) == 64
        assert environment["PS_TOKEN"] not in " ".join(psutil.Process(cluster.processes[PS0].pid).cmdline())


def fails(directory: Path, security: SecurityOptions) -> str:
    """How a job ends that cannot begin."""
    began = time.monotonic()
    with ProcessCluster(train, directory, (1,), security=security) as job:
        outcome = job.cluster.wait(AT_ONCE)
    assert outcome.code
    assert time.monotonic() - began < AT_ONCE
    return outcome.report


def test_a_worker_with_anothers_certificate_is_told(certificates: Certificates, tmp_path: Path) -> None:
    """At its start, in one line, with the file and what to do; nobody waits for it."""
    out = tmp_path / "certs"
    shutil.copytree(certificates.out, out)
    shutil.copy(out / "worker-1" / "tls.crt", out / "worker-0" / "tls.crt")
    shutil.copy(out / "worker-1" / "tls.key", out / "worker-0" / "tls.key")
    report = fails(tmp_path, options(out))
    assert "/worker-0/tls.crt is worker-1's, and not of this process, worker-0" in report
    assert "Traceback" not in report


def test_a_worker_of_another_cluster_is_told(certificates: Certificates, tmp_path: Path) -> None:
    """The same where the server has to say it."""
    out = tmp_path / "certs"
    shutil.copytree(certificates.out, out)
    shutil.rmtree(out / "worker-0")
    shutil.copytree(certificates.other / "worker-0", out / "worker-0")
    assert "the server's certificate is not signed by our CA" in fails(tmp_path, options(out))


def test_a_server_comes_back_with_new_certificates(certificates: Certificates, tmp_path: Path) -> None:
    """Its clients take them, if they are of the same CA: what they hear is that it was replaced, as always."""
    from psclient.psctl.certificate_authority import Authority

    first, address = start_server(until_done=False, timeouts=CALM, security=options(certificates.out))
    client = RemoteServer(address, PS0, CALM, security=options(certificates.out).read("worker-0"))
    second = None
    try:
        session = client.open(W0, 1, 0, False).session
        first.kill()
        first.wait()
        out = tmp_path / "certs"
        shutil.copytree(certificates.out, out)
        Authority(out, 20).issue("ps-0", True)
        port = int(address.rpartition(":")[2])
        second, _ = start_server(0, port, until_done=False, timeouts=CALM, security=options(out))
        with pytest.raises(ps.errors.ServerLost, match="replaced"):
            client.beat(session, -1, b"")
        assert client.open(W0, 1, 1, False).session != session
    finally:
        client.close()
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe:
                        pipe.close()


def test_a_server_that_cannot_be_secure_does_not_start(certificates: Certificates, tmp_path: Path) -> None:
    """It says which file is wrong, before anybody connects."""
    wrong = options(certificates.out)
    with pytest.raises(ps.errors.ConfigError, match=r"ps-7/token cannot be read.*psctl certs"):
        start_server(7, security=wrong, stderr=-1)
