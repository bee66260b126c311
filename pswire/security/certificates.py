"""Reads certificates, and says in words what is wrong with them. Loaded only where there is TLS."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from pswire.errors import ConfigError
from pswire.security.names import ADMIN, DOMAIN, certificate_name, ends_soon, named

NEW = "run psctl certs OUT --renew to make new certificates"

log = logging.getLogger("pswire")


class PemFile(NamedTuple):
    """A file: its path, and what is in it."""

    path: str
    data: bytes


def check(certificate: PemFile, key: PemFile, ca: PemFile, name: str) -> float:
    """Checks that a process may show a certificate; see `SecurityOptions.read`. Warns where it soon may not.

    A server whose certificate is for no client is warned, too: with one server alone a job does without.

    Args:
        certificate, key, ca: the PEM files.
        name: the name on the certificate: a task's, or `ADMIN`.

    Returns:
        The end of its validity, in Unix seconds.

    Raises:
        ConfigError: the certificate, its key or the CA does not fit, or is out of its time.
    """
    chain, roots, now = load(certificate), load(ca), datetime.now(UTC)
    # While a CA is replaced a file has the old one and the new one, of which one may be out of its time.
    roots = [root for root in roots if root.not_valid_before_utc <= now <= root.not_valid_after_utc] or roots
    signing = [root for root in roots if _is_signed(chain, [root])]
    dated = [(certificate.path, chain[0]), *((ca.path, root) for root in signing or roots)]
    for path, one in dated:
        _check_dates(path, one, now)
    _check_name(certificate.path, chain[0], name)
    _check_key(certificate, chain[0], key)
    if not signing:
        raise ConfigError(
            f"{certificate.path} is not signed by {ca.path}; all tasks of a job need certificates of one CA: use "
            "those of one psctl certs, or add the intermediate certificates to the file"
        )
    if name.startswith("ps-") and not _is_for_clients(chain[0]):
        _warn_server(certificate.path)
    (_, own), *others = dated
    last, path = min((own.not_valid_after_utc, certificate.path), max((o.not_valid_after_utc, p) for p, o in others))
    if ends_soon(last.timestamp()):
        _warn(path, f"{last:%Y-%m-%d %H:%M}")
    return last.timestamp()


def load(file: PemFile) -> list[x509.Certificate]:
    """The certificates of a PEM file, at least one; raises `ConfigError` where there is none."""
    try:
        return x509.load_pem_x509_certificates(file.data)
    except ValueError:
        raise ConfigError(f"{file.path} does not contain a PEM certificate (-----BEGIN CERTIFICATE-----)") from None


def names(certificate: x509.Certificate) -> frozenset[str]:
    """The tasks that a certificate names, as `task_name` writes them."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return named(found.get_values_for_type(x509.DNSName))


def _check_dates(path: str, certificate: x509.Certificate, now: datetime) -> None:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise ConfigError(f"{path} expired at {last:%Y-%m-%d %H:%M} UTC; {NEW}")
    if now < first:
        raise ConfigError(
            f"{path} is valid only from {first:%Y-%m-%d %H:%M} UTC, but the clock of this machine says "
            f"{now:%Y-%m-%d %H:%M}; "
            "set the clocks of both machines"
        )


@cache  # once: some processes read their files several times
def _warn(path: str, last: str) -> None:
    log.warning("%s expires at %s UTC; %s", path, last, NEW)


@cache  # as above
def _warn_server(path: str) -> None:
    log.warning(
        "%s has no extended key usage clientAuth, so other servers reject this server; make the certificate with "
        "serverAuth and clientAuth, as psctl certs does",
        path,
    )


def _is_for_clients(certificate: x509.Certificate) -> bool:
    """Returns whether a certificate may be shown by who connects: it says so, or says nothing of usages."""
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return not {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}.isdisjoint(usages)


def _check_key(certificate: PemFile, first: x509.Certificate, key: PemFile) -> None:
    try:
        public = load_pem_private_key(key.data, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{key.path} does not contain a PEM private key without a password; {NEW}") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if public.public_bytes(*form) != first.public_key().public_bytes(*form):
        raise ConfigError(f"{key.path} is not the key of {certificate.path}; use both from one directory")


def _check_name(path: str, certificate: x509.Certificate, name: str) -> None:
    found = names(certificate)
    if name not in found:
        whose = f"is {', '.join(sorted(found))}'s" if found else f"names no task (a DNS name that ends with {DOMAIN})"
        who = "psctl" if name == ADMIN else f"this process, {name}"
        raise ConfigError(
            f"{path} {whose}, not for {who}; use the certificate with the name {certificate_name(name)}: in a path, "
            "{task} stands for the task"
        )


def _is_signed(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> bool:
    """Returns whether each certificate is signed by the next, and one of them by a root."""
    for one, after in zip(chain, [*chain[1:], None], strict=True):
        if any(_signs(root, one) for root in roots):
            return True
        if after is None or not _signs(after, one):
            return False
    return False


def _signs(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
