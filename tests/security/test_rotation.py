"""Certificates that change while a job trains: new connections use the new ones, and those that are there go on."""

from __future__ import annotations

import logging
import shutil
import ssl
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from psserver.transport import server as transport
from pstesting.clock import Clock
from pstesting.network import Relay
from pstesting.processes import CALM, PS0, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say  # in the program below, which is a source
from pswire.security import rotation
from pswire.security.rotation import CertificateFiles
from tests.kit.certificates import Certificates, guarded, options
from tests.kit.internals import RemoteServer, SecurityOptions
from tests.kit.rig import eventually

FILES = ("tls.crt", "tls.key", "ca.crt")


def train(rounds: int) -> None:
    """Adds to a variable; worker 0 waits amid it."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        count = ps.Variable(np.zeros((), "int64"), name="count")
    say("is", ME)
    while strategy.round < rounds:
        strategy.run(lambda: add_all([(count, np.int64(1))]))
        if strategy.round == 3:
            say("trains", ME)
            gate("changed")
    say("ended", int(count))


class Files:
    """The files of one task, as they are replaced.

    Attributes:
        path: the directory.
        options: where they are.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        shutil.copytree(source, path, dirs_exist_ok=True)
        self.options = SecurityOptions(*(str(path / file) for file in (*FILES, "token")))

    def take(self, source: Path, *files: str) -> None:
        """Replaces files, each at once."""
        for file in files or FILES:
            new = self.path / f".{file}"
            new.write_bytes((source / file).read_bytes())
            new.replace(self.path / file)

    def trust(self, *sources: Path) -> None:
        """Replaces the CA by several."""
        new = self.path / ".ca"
        new.write_bytes(b"".join((source / "ca.crt").read_bytes() for source in sources))
        new.replace(self.path / "ca.crt")


@pytest.fixture
def files(certificates: Certificates, tmp_path: Path) -> Files:
    """Those of server 0."""
    return Files(tmp_path / "ps-0", certificates.out / "ps-0")


class Watched:
    """Files that a process follows.

    Attributes:
        first: what it has read first.
    """

    def __init__(self, files: Files) -> None:
        self._clock = Clock()
        self._options = files.options
        self.first = files.options.read("ps-0")
        paths = [str(files.path / file) for file in FILES]
        self._files = CertificateFiles(paths, lambda: files.options.read("ps-0"), lambda: self._clock.now)

    def later(self, seconds: float = rotation.LOOK_SECONDS) -> bytes:
        """Looks after a while; returns the certificate that is in use."""
        self._clock.now += seconds
        return (self._files.newest() or self.first).certificate


def test_new_files_are_taken(files: Files, certificates: Certificates) -> None:
    """All three at once, by the next look; a look is not made for each connection."""
    watched = Watched(files)
    files.take(certificates.other / "ps-0")
    new = (certificates.other / "ps-0" / "tls.crt").read_bytes()
    assert watched.later(0.0) == watched.first.certificate
    assert watched.later() == new


def test_a_broken_pair_is_not_taken(files: Files, certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    """The old one stays; what lasts is told of once, with file and reason, and what is made good is taken."""
    watched, new = Watched(files), certificates.other / "ps-0"
    broken = {
        "tls.key is not the key of": lambda: files.take(new, "tls.key"),
        "tls.crt is not signed by": lambda: files.take(new, "tls.crt"),
        "tls.crt has no certificate in PEM": lambda: (files.path / "tls.crt").write_bytes(b"-----BEGIN"),
        "tls.crt cannot be read: No such file": lambda: (files.path / "tls.crt").unlink(),
    }
    for why, happens in broken.items():
        caplog.clear()
        happens()
        with caplog.at_level(logging.WARNING):
            assert watched.later() == watched.first.certificate
            assert not caplog.records, "it may be between two writes"
            for _ in range(5):
                assert watched.later() == watched.first.certificate
                assert watched.later(rotation.AGAIN_SECONDS) == watched.first.certificate
        (line,) = [record.getMessage() for record in caplog.records]
        assert why in line
        assert "those before stay in use" in line
    files.take(new)
    assert watched.later() == (new / "tls.crt").read_bytes()


def test_a_ca_file_may_have_an_old_one_besides(files: Files, certificates: Certificates) -> None:
    """While a CA is replaced, both are taken; also where the certificate is of the second."""
    files.trust(certificates.other / "ps-0", certificates.out / "ps-0")
    files.options.read("ps-0")
    files.take(certificates.other / "ps-0", "tls.crt", "tls.key")
    files.options.read("ps-0")


def test_a_server_shows_new_certificates_on_every_port(
    files: Files, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gRPC's and on the tcp lane's; who is connected goes on, and who comes from the old CA is let in no more.

    A client whose connection breaks connects again with what its own files have then.
    """
    monkeypatch.setattr(rotation, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(transport, "LOOK_SECONDS", 0.05)
    own = Files(files.path.parent / "worker-0", certificates.out / "worker-0")
    with ExitStack() as stack:
        thread = stack.enter_context(guarded(files.options.read("ps-0")))
        relay = Relay(stack)
        relay.lead_to(thread.address)
        client = RemoteServer(relay.address, PS0, CALM, security=own.options.read("worker-0"))
        stack.callback(client.close)
        session = client.open(W0, 1, 1, False).session
        # The new CA first, beside the old one; then certificates of it; then the new CA alone.
        token = (own.path / "token").read_bytes()
        files.trust(certificates.out / "ps-0", certificates.other / "ps-0")
        files.take(certificates.other / "ps-0", "tls.crt", "tls.key")
        files.take(certificates.other / "ps-0")
        lanes = thread._server._lanes
        new = ssl.PEM_cert_to_DER_cert((certificates.other / "ps-0" / "tls.crt").read_text())
        for port in (thread.port, lanes.port):
            assert eventually(lambda port=port: shown_at(port) == new)
        client.beat(session, -1, b"")  # on the connection that it has
        own.take(certificates.other / "worker-0")
        relay.mend()
        client.beat(session, -1, b"")  # on a new one, by the new CA
        assert (own.path / "token").read_bytes() == token


def shown_at(port: int) -> bytes:
    """The certificate that a port shows."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=10.0))


def test_a_worker_of_the_new_ca_joins_a_job_that_trains(certificates: Certificates, tmp_path: Path) -> None:
    """Real processes: server and worker 0 get new certificates of a new CA amid the training, and both go on."""
    out, old, new = tmp_path / "certs", certificates.out, certificates.other
    shutil.copytree(old, out)
    keys = {"ps": 1, "workers": 1, "timeouts": CALM, "gates": ["changed"], "log_level": "info"}
    with ProcessCluster(train, tmp_path, (200,), security=options(out), **keys) as job:
        job.hear(W0, "trains")
        for name in ("ps-0", "worker-0"):
            files = Files(out / name, old / name)
            files.trust(old / name, new / name)
            files.take(new / name, "tls.key", "tls.crt")
        job.hear_error(PS0, "tls.crt again: new connections use it")
        late = Files(tmp_path / "late", new / "worker-1")
        shutil.copy(old / "worker-1" / "token", late.path / "token")
        job.join(W1, **late.options.variables())
        job.hear(W1, "is")
        job.open("changed")
        job.finish()
        assert job.said(W1, "ended") == job.said(W0, "ended")
        assert "those before stay in use" not in job.errors(PS0)
