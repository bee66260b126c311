"""Certificates for tests: of a cluster, of another one, of other days, of nobody; and servers that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from psclient.psctl.certificate_authority import Authority
from pstesting.processes import CALM
from tests.kit import internals as inside
from tests.kit.internals import Core, RemoteServer, Security, SecurityOptions, ServerConfig, ServerThread, Task
from tests.kit.rig import core

NAMES = ("ps-0", "ps-1", "worker-0", "worker-1", "chief-0", "admin")
PS0 = Task("ps", 0)
HASTY = inside.Timeouts(start_timeout=60.0, call_timeout=10.0, session_timeout=10.0, round_timeout=30.0)
"""A refusal has to come long before these."""


def options(out: Path) -> SecurityOptions:
    """Where the files of every task are."""
    return SecurityOptions(*(f"{out}/{{task}}/{file}" for file in ("tls.crt", "tls.key", "ca.crt", "token")))


@dataclass(frozen=True)
class Certificates:
    """What tests show.

    Attributes:
        out: the cluster's directory, as psctl certs writes it.
        other: another cluster's.
    """

    out: Path
    other: Path

    @classmethod
    def make(cls, root: Path) -> Certificates:
        """Writes both."""
        for out in (root / "ours", root / "others"):
            authority = Authority(out, 100)
            for name in NAMES:
                authority.issue(name, False)
        return cls(root / "ours", root / "others")

    def of(self, name: str) -> Security:
        """What a task of the cluster shows."""
        return options(self.out).read(name)

    def of_other(self, name: str, **changed: Any) -> Security:
        """What the same task of the other cluster shows."""
        return replace(options(self.other).read(name), **changed)

    def signed(
        self,
        names: Sequence[str],
        first: float,
        last: float,
        title: str = "x",
        mail: Sequence[str] = (),
        usages: Sequence[x509.ObjectIdentifier] = (),
    ) -> Security:
        """A certificate of the cluster's CA for names, good from some day to another, counted from now."""
        ca = self.out / "ca"
        root = x509.load_pem_x509_certificate((ca / "ca.crt").read_bytes())
        signer: Any = load_pem_private_key((ca / "ca.key").read_bytes(), None)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)]))
            .issuer_name(root.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(first))
            .not_valid_after(now + timedelta(last))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)
        )
        if names:
            alternatives = x509.SubjectAlternativeName([*map(x509.DNSName, names), *map(x509.RFC822Name, mail)])
            builder = builder.add_extension(alternatives, critical=False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(signer, SHA256()).public_bytes(Encoding.PEM)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return replace(self.of("admin"), certificate=certificate, key=private)

    def expired(self, name: str) -> Security:
        """A certificate of a task that was good until yesterday."""
        return self.signed([f"{name}.paramserver"], -2, -1)


@contextmanager
def guarded(security: Security, behind: Core | None = None, **more: Any) -> Iterator[ServerThread]:
    """A server that asks for what it shows itself."""
    behind = behind or core()
    with ServerThread(behind, ServerConfig(PS0, security=security, **more), grace=0.0) as thread:
        try:
            yield thread
        finally:
            behind.close()


@contextmanager
def client(thread: ServerThread, security: Security | None, transport: Any = "grpc") -> Iterator[RemoteServer]:
    """A connection to it."""
    server = RemoteServer(thread.address, PS0, HASTY, transport=transport, security=security)
    try:
        yield server
    finally:
        server.close()


def listening(
    stack: ExitStack, task: int = 0, timeouts: inside.Timeouts = CALM, **keys: Any
) -> tuple[Popen[bytes], str]:
    """A real server that waits for a job, and its address; it is killed with the stack."""
    process, address = inside.start_server(task, until_done=False, timeouts=timeouts, **keys)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process, address
