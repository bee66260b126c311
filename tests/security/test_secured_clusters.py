"""Clusters of real processes with certificates: they train as those without, vote, and keep sessions from thieves."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import psclient as ps
from psclient._src.network.transport import TransportCall
from psclient._src.processes import process
from psclient.psctl.certificate_authority import Authority
from pstesting.network import Relay
from pstesting.processes import CALM, PS0, PS1, SECONDS, W0, W1, ProcessCluster
from pstesting.script import say  # in the programs below, which are sources
from tests.kit import internals as inside
from tests.kit.certificates import Certificates, listening, options
from tests.kit.rig import create

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


def digests(directory: Path, transport: str = "shm", relays: Sequence[Relay] = (), **keys: Any) -> set[str]:
    """What the workers of a job end with; they use the transport that is named, and servers vote as they can."""
    directory.mkdir(exist_ok=True)
    keys |= {"ps": 2, "workers": 2, "transport": transport, "log_level": "debug"}
    keys["between"] = [relay.address for relay in relays]
    with ProcessCluster(train, directory, (3,), **keys) as job:
        for relay, server in zip(relays, (PS0, PS1), strict=False):
            relay.lead_to(job.cluster.addresses[server])
        job.finish()
        (first,), (second,) = (job.said(task, "digest") for task in (W0, W1))
        assert f"{transport} transport to {PS0}" in job.errors(W0)
        votes = "grpc" if relays else transport  # relays lie between servers
        for one, other in ((PS0, PS1), (PS1, PS0)):
            assert transport != "tcp" or f"{one} is connected to {other} over {votes}" in job.errors(one)
    return {first, second}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return digests(tmp_path_factory.mktemp("plain"), transport="grpc")


SOAK = [pytest.param(transport, False, marks=pytest.mark.soak) for transport in ("grpc", "shm")]
SOAK += [pytest.param("tcp", True, marks=pytest.mark.soak)]


@pytest.mark.parametrize(("transport", "relayed"), [("tcp", False), *SOAK])
def test_a_secured_cluster_trains(
    certificates: Certificates, tmp_path: Path, stack: ExitStack, without: set[str], transport: str, relayed: bool
) -> None:
    """It ends as without, on every transport; servers vote encrypted on the tcp transport, or over gRPC where that is
    shut."""
    # At another address of this host there is no transport.
    relays = [Relay(stack, "127.0.0.2") for _ in range(2)] if relayed else []
    found = digests(tmp_path, transport, relays, security=options(certificates.out), chief="driver")
    assert found == without
    assert len(found) == 1


def test_a_cluster_draws_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else on the machine gets in, though nobody has said anything about security."""
    monkeypatch.setattr(process, "popen", subprocess.Popen)  # the system tells of what began with its environment
    with inside.Cluster(script="", workers=0, chief="none") as cluster:
        environment = psutil.Process(cluster.processes[PS0].pid).environ()
        assert len(environment["PS_TOKEN"]) == 64
        assert environment["PS_TOKEN"] not in " ".join(psutil.Process(cluster.processes[PS0].pid).cmdline())


def fails(directory: Path, security: inside.SecurityOptions) -> str:
    began = time.monotonic()
    with ProcessCluster(train, directory, (1,), security=security) as job:
        outcome = job.cluster.wait(AT_ONCE)
    assert outcome.code
    assert time.monotonic() - began < AT_ONCE
    return outcome.report


def test_a_worker_with_a_wrong_certificate_is_told(certificates: Certificates, tmp_path: Path) -> None:
    """At its start, in one line, with the file and what to do; nobody waits. A server says it of another CA's."""
    out = tmp_path / "certs"
    shutil.copytree(certificates.out, out)
    shutil.copytree(out / "worker-1", out / "worker-0", dirs_exist_ok=True)
    report = fails(tmp_path, options(out))
    assert "/worker-0/tls.crt is worker-1's, not for this process, worker-0" in report
    assert "Traceback" not in report
    shutil.copytree(certificates.other / "worker-0", out / "worker-0", dirs_exist_ok=True)
    assert "the server's certificate was not signed by this process's CA" in fails(tmp_path, options(out))


def test_a_server_comes_back_with_new_certificates(
    certificates: Certificates, tmp_path: Path, stack: ExitStack
) -> None:
    """Its clients take them, if they are of the same CA: what they hear is that it was replaced, as always."""
    first, address = listening(stack, security=options(certificates.out))
    client = inside.RemoteServer(address, PS0, CALM, security=options(certificates.out).read("worker-0"))
    stack.callback(client.close)
    session = client.open(W0, 1, 0, False).session
    first.kill()
    first.wait()
    out = tmp_path / "certs"
    shutil.copytree(certificates.out, out)
    Authority(out, 20).issue("ps-0", True)
    listening(stack, port=int(address.rpartition(":")[2]), security=options(out))
    with pytest.raises(ps.errors.ServerLost, match="replaced"):
        client.heartbeat(session, -1, b"")
    assert client.open(W0, 1, 1, False).session != session


def test_a_server_that_cannot_be_secure_does_not_start(certificates: Certificates, tmp_path: Path) -> None:
    """It says which file is wrong, before anybody connects."""
    wrong = options(certificates.out)
    with pytest.raises(ps.errors.ConfigError, match=r"ps-7/token cannot be read.*psctl certs"):
        inside.start_server(7, security=wrong, stderr=-1)


SPEC = inside.VariableSpec("mine", inside.TensorSpec("float32", (4,)))


class Job:
    """Two servers that ask for certificates, and who connects to them."""

    def __init__(self, stack: ExitStack, certificates: Certificates) -> None:
        self._stack, self._certificates = stack, certificates
        self.addresses = [listening(stack, task, security=options(certificates.out))[1] for task in (0, 1)]

    def connect(self, name: str, server: inside.Task, transport: inside.TransportName = "grpc") -> inside.RemoteServer:
        shown = self._certificates.of(name)
        client = inside.RemoteServer(self.addresses[server.index], server, CALM, transport=transport, security=shown)
        self._stack.callback(client.close)
        return client


@pytest.fixture
def job(stack: ExitStack, certificates: Certificates) -> Job:
    return Job(stack, certificates)


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_a_task_takes_back_a_session_that_another_has_opened(job: Job, transport: inside.TransportName) -> None:
    """On a server that did not give the number, its own task gets in; the thief is out, on the transport it has
    opened."""
    number = job.connect("worker-0", PS0).open(W0, 1, 1, False).session
    thief, owner = job.connect("worker-1", PS1, transport), job.connect("worker-0", PS1)
    assert thief.open(W1, 1, number, False).session == number
    value = inside.Payload.pack([np.ones(4, "float32")])
    assert create(thief, number, 1, SPEC, (1,), value).initialized
    assert thief.pull(number, [1], -1).result(SECONDS).payload.size == 16  # its transport is open
    assert thief.traffic[transport].received
    assert owner.open(W0, 1, number, False).session == number
    with pytest.raises((inside.Forbidden, inside.Fenced)):
        thief.pull(number, [1], -1).result(SECONDS)
    if (held := thief.transport(number)) is not None:
        held.send(call := TransportCall(number, inside.MessageKind.HEARTBEAT, b"", inside.EMPTY, print))
        with pytest.raises((inside.Forbidden, inside.Fenced)):
            call.result(SECONDS)
    with pytest.raises(inside.Forbidden, match=f"session {number} belongs to {W0}, not to {W1}"):
        thief.open(W1, 1, number, False)
    owner.heartbeat(number, -1, b"")
    assert owner.pull(number, [1], -1).result(SECONDS).payload.size == 16
