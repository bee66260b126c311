"""The identity of a process, and its proofs: a certificate that names its task, and the token of its job.

The DNS name on a certificate is the task's, `ps-0.paramserver`, and no host's: where a process runs does not matter.
Certificates may change while a process runs: their files are read again for new connections.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pswire.errors import ConfigError
from pswire.options import PATH, SECURITY, flag_name, option, options_of
from pswire.security.given import read_small
from pswire.variables import TLS_CA, TLS_CERT, TLS_KEY, TOKEN, TOKEN_FILE

PREFIX = "PS_"
"""`PS_TLS_CERT` says what `--tls-cert` says; each field of `SecurityOptions` has such a name."""

PLACEHOLDER = "{task}"
"""In a path it becomes the name of the process's task, as `task_name` writes it."""

TOKEN_BYTES = 32
"""Of a token that we draw; it is written with twice as many characters."""

LEAST_TOKEN = 16
"""Characters: a shorter token can be guessed."""

HOW = "run psctl certs to make one for each task"

LOOK_SECONDS = 1.0
"""Least seconds between two looks at the files."""

AGAIN_SECONDS = 10.0
"""Seconds after which files that were not taken are read again: a certificate may become valid."""

State = tuple[tuple[int, int, int], ...] | str
"""Times, inodes and sizes of the files; or why they cannot be looked at."""

log = logging.getLogger("pswire")


@dataclass(frozen=True)
class Security:
    """The proofs of identity that a process shows, and those that it asks for.

    Attributes:
        certificate, key, ca: in PEM: its own certificate, with those between it and the CA; the certificate's key; the
            CA that must have signed others' certificates. All three, or none for no TLS.
        expiry: end of the certificates' validity, the CA's too, in Unix seconds; 0 without TLS.
        token: the secret that every call of the job carries; "" for none.
        files: where they were read, and may have changed; None if they stay as they are.
    """

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    expiry: float = 0.0
    token: str = field(default="", repr=False)
    files: CertificateFiles | None = field(default=None, repr=False, compare=False)

    def newest(self) -> Security:
        """Returns what a new connection is to use: the same, or what the files have now. The token stays."""
        return (self.files and self.files.newest()) or self

    @property
    def tls(self) -> bool:
        """True if connections are encrypted, and both ends show certificates."""
        return bool(self.certificate)

    def page_context(self) -> Callable[[], ssl.SSLContext] | None:
        """Returns what makes contexts for pages, which ask for no certificate; None without TLS."""
        return ServerContexts(self, asks=False).newest if self.tls else None

    def server_context(self, asks: bool = True) -> ssl.SSLContext:
        """For sockets that accept; the other end must show a certificate, unless `asks` is False."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        if not asks:
            context.verify_mode = ssl.CERT_NONE
        return context

    def client_context(self) -> ssl.SSLContext:
        """For sockets that connect; the other end must show a certificate with the name that is asked for.

        It has the certificates as the files have them now.
        """
        return self.newest()._context(ssl.PROTOCOL_TLS_CLIENT)

    def check_usable(self) -> None:
        """Raises `ssl.SSLError` if OpenSSL does not take the certificate, its key or the CA."""
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            self._context(side)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.ca.decode("ascii"))
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # connections are few, and last
        # OpenSSL takes keys from files alone; this one is in memory, and nobody else has its name.
        file = os.memfd_create("key", os.MFD_CLOEXEC)
        try:
            os.write(file, self.key + b"\n" + self.certificate)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return context


class CertificateFiles:
    """The files that a process's certificates came from. May be used from any thread.

    Files that do not fit one another, as between two writes, are not taken: the certificates before stay in use. The
    log is told if that lasts, once for each state of the files.

    Args:
        paths: of certificate, key and CA.
        read: reads and checks them; raises `ConfigError` if they are not what they should be.
        clock: monotonic seconds.
    """

    def __init__(
        self, paths: Sequence[str], read: Callable[[], Security], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()  # guards all below
        self._taken = self._state()
        self._newest: Security | None = None
        self._looked = clock()
        self._refused: State = ()
        self._refused_since = 0.0
        self._told: State = ()

    def newest(self) -> Security | None:
        """Returns what the files have now; None while they have not changed since they were read first."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look(now)
            return self._newest

    def _look(self, now: float) -> None:
        state = self._state()
        if state == self._taken or (state == self._told and now - self._refused_since < AGAIN_SECONDS):
            return
        try:
            if isinstance(state, str):
                raise ConfigError(state)
            found = self._read()
            found.check_usable()
        except (ConfigError, ssl.SSLError) as error:
            self._refuse(state, now, str(error))
            return
        if state != self._state():
            return  # they change just now: the next look sees it
        self._newest, self._taken, self._refused, self._told = found, state, (), ()
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(found.expiry))
        log.info("reloaded %s, which is valid until %s UTC; new connections use it", self._paths[0], until)

    def _refuse(self, state: State, now: float, why: str) -> None:
        lasts, self._refused = state == self._refused, state
        self._refused_since = now
        if lasts and state != self._told:
            self._told = state
            log.warning("the changed certificates cannot be used, so the previous ones stay in use: %s", why)

    def _state(self) -> State:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)


class ServerContexts:
    """Contexts for sockets that accept, made anew when certificates have changed. May be used from any thread.

    Args:
        security: the certificates.
        asks: True if the other end must show a certificate.
    """

    def __init__(self, security: Security, asks: bool = True) -> None:
        self._security = security
        self._asks = asks
        self._made: tuple[Security, ssl.SSLContext] | None = None

    def newest(self) -> ssl.SSLContext:
        """Returns the context for a new connection."""
        newest, made = self._security.newest(), self._made
        if made is None or made[0] is not newest:
            made = self._made = newest, newest.server_context(self._asks)
        return made[1]


@dataclass(frozen=True)
class SecurityOptions:
    """Paths of a process's certificate and token, as flags, the environment or a file say them; "" for none.

    Attributes:
        tls_cert, tls_key, tls_ca: paths of PEM files, in which `{task}` is the process's own.
        token_file: path of the file with the token, in which `{task}` is the process's own.
        token: the token itself; not in flags or configuration files, for others may read these.
    """

    tls_cert: str = option(
        "",
        "The task's certificate. In this and the other paths {task} is the task's name, such as ps-0 or worker-1, and "
        "admin for psctl.",
        PATH,
        variable=TLS_CERT,
        group=SECURITY,
    )
    tls_key: str = option("", "The certificate's private key.", PATH, variable=TLS_KEY, group=SECURITY)
    tls_ca: str = option("", "The CA certificate that signed all certificates.", PATH, variable=TLS_CA, group=SECURITY)
    token_file: str = option(
        "",
        "A file with the job's token.",
        PATH,
        variable=TOKEN_FILE,
        otherwise=f"the token in {TOKEN}",
        group=SECURITY,
    )
    token: str = field(default="", repr=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SecurityOptions:
        """Reads `PS_TLS_CERT`, `PS_TLS_KEY`, `PS_TLS_CA`, `PS_TOKEN_FILE` and `PS_TOKEN`."""
        return cls(**{name: environ.get(_variable(name), "") for name in _names()})

    def variables(self) -> dict[str, str]:
        """The variables that `from_environ` reads back."""
        return {_variable(name): getattr(self, name) for name in _names()}

    def under(self, given: Mapping[str, Any]) -> SecurityOptions:
        """With what flags say, where they say something: they win."""
        return dataclasses.replace(self, **{name: path for name in FLAGS if (path := given.get(name))})

    def read(self, name: str) -> Security:
        """Reads and checks what these files say, so that no handshake fails for what could be known.

        Args:
            name: of the task whose they are, as `task_name` writes it, or `ADMIN`.

        Raises:
            ConfigError: a file is missing or no PEM, the key does not fit the certificate, the certificate is not of
                now, not of this CA, or of another task; a token is too short. It names the file, and what to do.
        """
        token = self._token(name)
        read = partial(self._read, name, token)
        found = read()
        if not found.tls:
            return found
        paths = [_file(getattr(self, field), name) for field in ("tls_cert", "tls_key", "tls_ca")]
        return dataclasses.replace(found, files=CertificateFiles(paths, read))

    def _read(self, name: str, token: str) -> Security:
        return Security(*self._certificates(name), token=token)

    def names(self) -> frozenset[str]:
        """The tasks that the certificate names, as `task_name` writes them; none without one.

        Raises:
            ConfigError: the file cannot be read, or is no certificate.
        """
        if not self.tls_cert:
            return frozenset()
        from pswire.security.certificates import PemFile, load, names

        return names(load(PemFile(self.tls_cert, _read(flag_name("tls_cert"), self.tls_cert)))[0])

    def _certificates(self, name: str) -> tuple[bytes, bytes, bytes, float]:
        paths = {field: getattr(self, field) for field in ("tls_cert", "tls_key", "tls_ca")}
        missing = [flag_name(field) for field, path in paths.items() if not path]
        if len(missing) == len(paths):
            return b"", b"", b"", 0.0
        if missing:
            raise ConfigError(
                f"--tls-cert, --tls-key and --tls-ca belong together; missing: {', '.join(missing)}; give all "
                "three, or none for no TLS"
            )
        files = {field: _file(path, name) for field, path in paths.items()}
        certificate, key, ca = (_read(flag_name(field), path) for field, path in files.items())
        # Only where there is TLS: to load it takes a while.
        from pswire.security.certificates import PemFile, check

        pairs = PemFile(files["tls_cert"], certificate), PemFile(files["tls_key"], key), PemFile(files["tls_ca"], ca)
        return certificate, key, ca, check(*pairs, name)

    def _token(self, name: str) -> str:
        where, token = TOKEN, self.token
        if self.token_file:
            path = _file(self.token_file, name)
            where, token = path, _read("--token-file", path).decode("ascii", "replace").strip()
        elif not token:
            return ""
        if len(token) < LEAST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
            raise ConfigError(
                f"{where} is not a token; it needs at least {LEAST_TOKEN} letters and digits without spaces, such as "
                "the output of openssl rand -hex 32"
            )
        return token


FLAGS = tuple(options_of(SecurityOptions))
"""Attributes of `SecurityOptions` that flags and files may give."""


def _names() -> list[str]:
    return [field.name for field in dataclasses.fields(SecurityOptions)]


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _file(path: str, name: str) -> str:
    return path.replace(PLACEHOLDER, name)


def _read(flag: str, path: str) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}; {HOW}") from error
