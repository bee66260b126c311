"""Finds out why no connection comes to be, where both ends do not agree on TLS."""

from __future__ import annotations

import socket
import ssl
from typing import cast

from pswire.security.identity import Security
from pswire.security.names import named

SECONDS = 2.0
"""Seconds that one step of the probe may take."""

PROTOCOL = "h2"
"""The protocol that gRPC speaks within TLS."""

NO_TLS = (
    "the server does not use TLS, but this process has a certificate; start the server with --tls-cert, "
    "--tls-key and --tls-ca, or this process without them (PS_TLS_CERT, PS_TLS_KEY, PS_TLS_CA)"
)
ONLY_TLS = (
    "the server requires TLS, but this process has no certificate; set --tls-cert, --tls-key and --tls-ca "
    "(or PS_TLS_CERT, PS_TLS_KEY, PS_TLS_CA). psctl certs creates the files"
)
NOT_OURS = (
    "the server's certificate was not signed by this process's CA; use files from the same psctl certs run on both"
)

FOUND = {
    "hostname mismatch": (
        "the certificate of that server is not for {name}; correct the servers' addresses (TF_CONFIG, "
        "--address), or give the server its own certificate"
    ),
    "unable to get local issuer certificate": NOT_OURS,
    "self-signed certificate": NOT_OURS,
    "self signed certificate": NOT_OURS,
    "certificate signature failure": NOT_OURS,
    "certificate has expired": "the server's certificate has expired; renew it with psctl certs OUT --renew",
    "certificate is not yet valid": "the server's certificate is not yet valid; correct the clock of either machine",
}
"""Readings of OpenSSL's errors about a server's certificate."""

PLAIN = ("WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE")
"""OpenSSL's errors where the other end answers, and not in TLS."""

REFUSED = (
    "the server rejected this process's certificate, which has expired or was not signed by the server's "
    "CA; use files from the same psctl certs run on both (--renew creates new certificates)"
)


def mismatch(address: str, security: Security, name: str) -> str:
    """Returns why two ends cannot speak, in words, and what to do; "" if that is not known.

    Args:
        address: the server's address, `host:port`.
        security: certificate and token that this process shows, and the CA that it asks for.
        name: the name that the server's certificate must have.
    """
    found = _found(address, security, name)
    # A server that ends may look the same, once.
    return found if found != REFUSED else _found(address, security, name)


def names_shown(address: str, security: Security) -> frozenset[str]:
    """Returns the tasks that the certificate of the server at an address names, which our CA has signed.

    Empty where none answers with such a certificate.
    """
    host, _, port = address.rpartition(":")
    try:
        return named(dns_names((host.strip("[]"), int(port)), security, SECONDS))
    except (OSError, ValueError):
        return frozenset()


def dns_names(place: tuple[str, int], security: Security, seconds: float) -> list[str]:
    """Returns the DNS names on the certificate of a server, which our CA has signed; raises `OSError` if it has none.

    Args:
        place: host and port of the server.
        security: certificate that this process shows, and the CA that it asks for.
        seconds: time that each step may take.
    """
    context = security.client_context()
    context.check_hostname = False  # whose it is, is what is asked for
    context.set_alpn_protocols([PROTOCOL])
    with socket.create_connection(place, seconds) as sock, context.wrap_socket(sock) as sealed:
        shown = sealed.getpeercert() or {}
    pairs = cast(tuple[tuple[str, str], ...], shown.get("subjectAltName", ()))
    return [name for kind, name in pairs if kind == "DNS"]


def _found(address: str, security: Security, name: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), SECONDS)
    except (OSError, ValueError):
        return ""  # nobody is there yet, which has nothing to do with TLS
    with sock:
        if not security.tls:
            return ONLY_TLS if _speaks_tls(sock) else ""
        return _with_certificates(sock, security, name)


def _speaks_tls(sock: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([PROTOCOL])
    try:
        context.wrap_socket(sock).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True


def _with_certificates(sock: socket.socket, security: Security, name: str) -> str:
    context = security.client_context()
    context.set_alpn_protocols([PROTOCOL])
    try:
        with context.wrap_socket(sock, server_hostname=name) as sealed:
            # A server that takes our certificate speaks first; another one goes, most often without a word.
            return "" if sealed.recv(1) else REFUSED
    except ssl.SSLCertVerificationError as error:
        said = error.verify_message
        found = (words.format(name=name) for part, words in FOUND.items() if part in said.lower())
        return next(found, f"the server's certificate is not valid: {said}")
    except ssl.SSLError as error:
        reason = error.reason or ""
        return REFUSED if "ALERT" in reason else NO_TLS if reason in PLAIN else ""
    except OSError:
        return ""  # it is silent, or has gone
