"""Encrypted connections deliver what was sent, and take new certificates while a job trains."""

from __future__ import annotations

import logging
import selectors
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psserver.network import server as transport
from pstesting.clock import Clock
from pstesting.network import Relay
from pstesting.processes import CALM, PS0, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say  # in the program below, which is a source
from pswire.security import identity
from pswire.security.identity import CertificateFiles
from tests.kit import internals as inside
from tests.kit.cases import search
from tests.kit.certificates import Certificates, guarded, options
from tests.kit.rig import eventually

SECONDS = 20.0


@contextmanager
def connected(certificates: Certificates) -> Iterator[tuple[inside.Sealed, inside.Sealed]]:
    here, there = socket.socketpair()
    for sock in (here, there):
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    server = inside.Sealed(there, certificates.of("ps-0").server_context())
    client = inside.Sealed(here, certificates.of("worker-0").client_context(), "ps-0.paramserver")
    shaking = threading.Thread(target=server.shake)
    shaking.start()
    client.shake()
    shaking.join()
    pair = client, server
    yield pair
    for end in pair:
        end.close()


def send(link: inside.MessageSocket, messages: Sequence[tuple[inside.Message, bytes]]) -> None:
    """Sends all, as the thread of a transport does."""
    with selectors.DefaultSelector() as selector:
        selector.register(link.sock, selectors.EVENT_WRITE)
        for message, data in messages:
            left = link.send([message.head(), memoryview(data)])
            while left:
                assert selector.select(SECONDS)
                left = link.flush()


def receive(link: inside.MessageSocket, count: int) -> list[tuple[inside.Message, bytes]]:
    found: list[tuple[inside.Message, bytes]] = []
    with selectors.DefaultSelector() as selector:
        selector.register(link.sock, selectors.EVENT_READ)
        while len(found) < count:
            found += [(message, bytes(message.data or b"")) for message in link.receive()]
            if len(found) < count:
                assert selector.select(SECONDS), f"{len(found)} of {count}"
    return found


EDGES = (inside.RECORD - 40, inside.RECORD, inside.RECORD + 1, inside.PIECE, inside.PIECE + 1, inside.MAX_PART_BYTES)
SIZES = st.integers(0, 100) | st.sampled_from(EDGES)


@search(0.25)
@given(sizes=st.lists(SIZES, max_size=8), seed=st.integers(0, 9))
def test_what_is_sent_arrives(certificates: Certificates, sizes: list[int], seed: int) -> None:
    """Messages of all sizes, both ways at once, by four threads; each end reads while it writes."""
    random, kind = np.random.default_rng(seed), inside.MessageKind.PART
    heads = [inside.Message(kind, number, b"h" * number, 0, size) for number, size in enumerate(sizes)]
    sent = [[(head, random.bytes(head.size)) for head in heads] for _ in range(2)]
    with connected(certificates) as pair, ThreadPoolExecutor(4) as threads:
        links = [inside.MessageSocket(end) for end in pair]
        for link in links:
            link.trust()
        sending = [threads.submit(send, link, messages) for link, messages in zip(links, sent, strict=True)]
        receiving = [threads.submit(receive, link, len(sizes)) for link in links]
        for done in sending:
            done.result(SECONDS)
        got = [done.result(SECONDS) for done in receiving]
    assert [said(messages) for messages in got] == [said(messages) for messages in reversed(sent)]


def said(messages: Sequence[tuple[inside.Message, bytes]]) -> list[tuple[int, bytes, bytes]]:
    return [(message.call, message.header, data) for message, data in messages]


def test_a_stranger_in_between(certificates: Certificates) -> None:
    """A byte that is changed breaks the connection, and so does an end that goes; each end reads the other's names."""
    with connected(certificates) as (here, there):
        assert sorted(here.peer_names()) == ["metrics.paramserver", "ps-0.paramserver"]
        assert sorted(there.peer_names()) == ["metrics.paramserver", "worker-0.paramserver"]
        here._sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(OSError, match=r"(?i)mac|decrypt|bad record"):
            receive(inside.MessageSocket(there), 1)
    with connected(certificates) as (here, there):
        there.close()
        with pytest.raises(ConnectionError):
            receive(inside.MessageSocket(here), 1)


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
    """The files of one task, as they are replaced, each at once."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        shutil.copytree(source, path, dirs_exist_ok=True)
        self.options = inside.SecurityOptions(*(str(path / file) for file in (*FILES, "token")))

    def take(self, source: Path, *files: str) -> None:
        for file in files or FILES:
            new = self.path / f".{file}"
            new.write_bytes((source / file).read_bytes())
            new.replace(self.path / file)

    def trust(self, *sources: Path) -> None:
        new = self.path / ".ca"
        new.write_bytes(b"".join((source / "ca.crt").read_bytes() for source in sources))
        new.replace(self.path / "ca.crt")


@pytest.fixture
def files(certificates: Certificates, tmp_path: Path) -> Files:
    return Files(tmp_path / "ps-0", certificates.out / "ps-0")


class Watched:
    """Files that a process follows, and what it has read first."""

    def __init__(self, files: Files) -> None:
        self._clock, self.first = Clock(), files.options.read("ps-0")
        paths = [str(files.path / file) for file in FILES]
        self._files = CertificateFiles(paths, lambda: files.options.read("ps-0"), lambda: self._clock.now)

    def later(self, seconds: float = identity.LOOK_SECONDS) -> bytes:
        """Looks after a while; returns the certificate that is in use."""
        self._clock.now += seconds
        return (self._files.newest() or self.first).certificate


def test_new_files_are_taken(files: Files, certificates: Certificates) -> None:
    """All three at once, by the next look, which not each connection makes; a CA file may have an old one besides."""
    watched, old, new = Watched(files), certificates.out / "ps-0", certificates.other / "ps-0"
    files.trust(new, old)
    assert watched.later() == watched.first.certificate
    files.take(new, "tls.crt", "tls.key")
    assert watched.later(0.0) == watched.first.certificate
    assert watched.later() == (new / "tls.crt").read_bytes()
    files.take(old)
    files.take(new)
    assert watched.later() == (new / "tls.crt").read_bytes()


def test_a_broken_pair_is_not_taken(files: Files, certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    """The old one stays; what lasts is told of once, with file and reason, and what is made good is taken."""
    watched, new = Watched(files), certificates.other / "ps-0"
    broken = {
        "tls.key is not the key of": lambda: files.take(new, "tls.key"),
        "tls.crt is not signed by": lambda: files.take(new, "tls.crt"),
        "tls.crt does not contain a PEM certificate": lambda: (files.path / "tls.crt").write_bytes(b"-----BEGIN"),
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
                assert watched.later(identity.AGAIN_SECONDS) == watched.first.certificate
        (line,) = [record.getMessage() for record in caplog.records]
        assert why in line
        assert "previous ones stay in use" in line
    files.take(new)
    assert watched.later() == (new / "tls.crt").read_bytes()


def test_a_server_shows_new_certificates_on_every_port(
    files: Files, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gRPC's and on the tcp transport's; who is connected goes on, and who comes from the old CA is let in no more.
    A client whose connection breaks connects again with what its own files have then."""
    monkeypatch.setattr(identity, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(transport, "LOOK_SECONDS", 0.05)
    own = Files(files.path.parent / "worker-0", certificates.out / "worker-0")
    with ExitStack() as stack:
        thread = stack.enter_context(guarded(files.options.read("ps-0")))
        relay = Relay(stack)
        relay.lead_to(thread.address)
        client = inside.RemoteServer(relay.address, PS0, CALM, security=own.options.read("worker-0"))
        stack.callback(client.close)
        session = client.open(W0, 1, 1, False).session
        # The new CA first, beside the old one; then certificates of it; then the new CA alone.
        token = (own.path / "token").read_bytes()
        files.trust(certificates.out / "ps-0", certificates.other / "ps-0")
        files.take(certificates.other / "ps-0", "tls.crt", "tls.key")
        files.take(certificates.other / "ps-0")
        transports = thread._server._transports
        new = ssl.PEM_cert_to_DER_cert((certificates.other / "ps-0" / "tls.crt").read_text())
        assert eventually(lambda: shown_at(transports.port) == new)
        assert [shown_at(thread.port) for _ in range(3)] == [new] * 3, "the next connection has it"
        client.heartbeat(session, -1, b"")  # on the connection that it has
        own.take(certificates.other / "worker-0")
        relay.mend()
        client.heartbeat(session, -1, b"")  # on a new one, by the new CA
        assert (own.path / "token").read_bytes() == token


def shown_at(port: int) -> bytes:
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=10.0))


def test_a_worker_of_the_new_ca_joins_a_job_that_trains(certificates: Certificates, tmp_path: Path) -> None:
    """Real processes: server and worker 0 get new certificates of a new CA amid the training, and both go on."""
    out, old, new = tmp_path / "certs", certificates.out, certificates.other
    shutil.copytree(old, out)
    keys = {"ps": 1, "workers": 1, "timeouts": CALM, "gates": ["changed"], "log_level": "debug"}
    with ProcessCluster(train, tmp_path, (200,), security=options(out), **keys) as job:
        job.hear(W0, "trains")
        for name in ("ps-0", "worker-0"):
            files = Files(out / name, old / name)
            files.trust(old / name, new / name)
            files.take(new / name, "tls.key", "tls.crt")
        job.hear_error(PS0, "new connections use it")
        late = Files(tmp_path / "late", new / "worker-1")
        shutil.copy(old / "worker-1" / "token", late.path / "token")
        job.join(W1, **late.options.variables())
        job.hear(W1, "is")
        job.open("changed")
        job.finish()
        assert job.said(W1, "ended") == job.said(W0, "ended")
        assert "previous ones stay in use" not in job.errors(PS0)
