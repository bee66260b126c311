"""The command `psctl`, one module for each group of its commands.

This file checks the health of servers with the standard library alone, because containers do so every few seconds. All
other commands, and health checks that fail, are in the modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from pswire.network.health_probe import serves

__all__ = ["main"]

SECONDS = 5.0
"""Time that a server may take to answer, where no option sets another."""


def main(args: Sequence[str] | None = None) -> None:
    """The console script; exits with 0, with 1 where faults or differences were found, with 2 after an error."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["health"] and _all_serve(given[1:], os.environ):
        print(*(f"{address} serves" for address in given[1:]), sep="\n")  # noqa: T201
        sys.exit(0)
    from psclient.psctl import cli

    cli.main(given)


def _all_serve(addresses: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Returns True if these are addresses of servers, and all of them serve; False where others have to look."""
    if not addresses or any(each.startswith("-") or not each.isprintable() for each in addresses):
        return False
    try:
        files = _files(environ)
        return all(serves(address, SECONDS, files) for address in addresses)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False


def _files(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Returns the paths of certificate, key and CA that the environment names; None where it names none.

    Raises:
        LookupError: one of the files is missing, or the certificate is neither psctl's nor this task's. Or another
            error, where `TF_CONFIG` or the certificate is malformed.
    """
    given = [environ.get(name, "") for name in ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA")]
    if not any(given):
        return None
    for name in _own_names(environ):
        certificate, key, ca = (path.replace("{task}", name) for path in given)
        if all(map(os.path.isfile, (certificate, key, ca))) and _is_of(certificate, name):
            return certificate, key, ca
    raise LookupError


def _own_names(environ: Mapping[str, str]) -> Iterator[str]:
    """Returns the names that may be on the certificate, the usual one first."""
    yield "admin"
    import json

    task = json.loads(environ["TF_CONFIG"])["task"]
    yield f"{task['type']}-{task.get('index', 0)}"


def _is_of(certificate: str, name: str) -> bool:
    """Returns whether a file's first certificate has the DNS name of a task."""
    import ssl

    with open(certificate, encoding="ascii") as file:
        text = file.read(1 << 20)
    first = text[text.index(ssl.PEM_HEADER) :].partition(ssl.PEM_FOOTER)
    dns_name = f"{name}.paramserver".encode("ascii")
    return bytes([0x82, len(dns_name)]) + dns_name in ssl.PEM_cert_to_DER_cert("".join(first[:2]))
