"""A CA in a directory: it signs the certificates of a cluster's tasks, and keeps the token of its job."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pswire.errors import ConfigError
from pswire.security.certificates import PemFile, load, names
from pswire.security.identity import PLACEHOLDER, TOKEN_BYTES, SecurityOptions
from pswire.security.names import METRICS, certificate_name

CA_DAYS = 3650
"""Days that a CA is valid, or as many as what it signs."""

EARLIER = timedelta(minutes=5)
"""By how much a certificate is good before it is made: clocks differ."""

CA, CERTIFICATE, KEY, ROOT, ROOT_KEY, TOKEN = "ca", "tls.crt", "tls.key", "ca.crt", "ca.key", "token"
"""Directory and files; those of a task have the names that Kubernetes gives to such Secrets."""


@dataclass(frozen=True)
class Issued:
    """The directory of a task.

    Attributes:
        path: path of the directory.
        made: True if its files were made now; else they were there.
        until: end of the certificate's validity.
    """

    path: Path
    made: bool
    until: datetime


def paths(out: Path) -> SecurityOptions:
    """Returns where every task of a cluster finds its files below the directory of all."""
    return SecurityOptions(*(str(out / PLACEHOLDER / file) for file in (CERTIFICATE, KEY, ROOT, TOKEN)))


class Authority:
    """A CA. Its key is nowhere but in `OUT/ca`, which no task needs.

    Args:
        out: the directory of all; `ca` in it is made if it is not there.
        days: number of days that certificates are to be valid.

    Raises:
        ConfigError: half of the CA is there, or it has expired.
        OSError: a file cannot be read or written.
    """

    def __init__(self, out: Path, days: int) -> None:
        self._out = _directory(out)
        self._days = days
        folder = _directory(out / CA)
        _refuse_half(folder, (ROOT, ROOT_KEY), "remove the directory for a new CA")
        if not (folder / ROOT).exists():
            key, root = _make_root(max(CA_DAYS, days))
            _write(folder / ROOT_KEY, _key_pem(key))
            _write(folder / ROOT, root.public_bytes(Encoding.PEM))
        if not (folder / TOKEN).exists():
            _write(folder / TOKEN, secrets.token_hex(TOKEN_BYTES).encode() + b"\n")
        self._pem, self._token = (folder / ROOT).read_bytes(), (folder / TOKEN).read_bytes()
        self._root = load(PemFile(str(folder / ROOT), self._pem))[0]
        with _says(folder / ROOT_KEY):
            self._key = load_pem_private_key((folder / ROOT_KEY).read_bytes(), None)
        if self._root.not_valid_after_utc < datetime.now(UTC):
            raise ConfigError(f"{folder / ROOT} has expired; remove {out}, and make all certificates again")

    def issue(self, name: str, renew: bool, also: Sequence[str] = ()) -> Issued:
        """Makes the files of a task, if they are not there.

        Args:
            name: name of the task, as `task_name` writes it.
            renew: True to make its key and certificate anew.
            also: names of the tasks whose place it may take, which its certificate names as well.

        Raises:
            ConfigError: half of the files is there, or they are another CA's, or of other tasks.
        """
        folder = _directory(self._out / name)
        if not renew:
            _refuse_half(folder, (CERTIFICATE, KEY), "make both again with --renew")
        made = renew or not (folder / KEY).exists()
        if made:
            key = ec.generate_private_key(ec.SECP256R1())
            _write(folder / KEY, _key_pem(key))
            _write(folder / CERTIFICATE, self._sign((name, *also), key).public_bytes(Encoding.PEM))
        for file, data in ((ROOT, self._pem), (TOKEN, self._token)):
            if not (folder / file).exists() or renew:
                _write(folder / file, data)
        certificate = load(PemFile(str(folder / CERTIFICATE), (folder / CERTIFICATE).read_bytes()))[0]
        if certificate.issuer != self._root.subject or (folder / ROOT).read_bytes() != self._pem:
            raise ConfigError(f"{folder} was signed by another CA than {self._out / CA}; make it again with --renew")
        shown = names(certificate)
        if also and shown != {name, *also}:
            raise ConfigError(
                f"{folder} belongs to {', '.join(sorted(shown))}, but the cluster now has {', '.join(also)}; remove "
                "this directory to make it again"
            )
        return Issued(folder, made, certificate.not_valid_after_utc)

    def _sign(self, names: Sequence[str], key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        builder = _builder(names[0], self._root.subject, key, self._days, self._root.not_valid_after_utc)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._root.public_key())  # type: ignore[arg-type]
        builder = (
            builder.add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(certificate_name(name)) for name in (*names, METRICS)]),
                critical=False,
            )
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(issuer, critical=False)
        )
        return builder.sign(self._key, SHA256())  # type: ignore[arg-type]


def _make_root(days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two clusters' CAs are never taken for one another.
    title = f"paramserver CA {secrets.token_hex(4)}"
    builder = _builder(title, _subject(title), key, days, datetime.max.replace(tzinfo=UTC))
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    return key, builder.add_extension(_usage(signs=True), critical=True).sign(key, SHA256())


def _builder(
    title: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, last: datetime
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(title))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(min(now + timedelta(days), last))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(title: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _directory(path: Path) -> Path:
    """A directory for its owner alone; one that is there stays as it is, such as a volume."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _refuse_half(folder: Path, files: tuple[str, str], what: str) -> None:
    there = [file for file in files if (folder / file).exists()]
    if len(there) == 1:
        (other,) = set(files) - set(there)
        raise ConfigError(f"{folder} has {there[0]} but not {other}; {what}")


def _write(path: Path, data: bytes) -> None:
    """A file for its owner alone, whole or not at all."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def _says(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError):
        raise ConfigError(f"{path} does not contain a PEM private key without a password") from None
