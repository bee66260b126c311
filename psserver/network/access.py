"""Access control: which caller may call which verb. Both rims check here before they call the core.

It knows certificates and tokens, and no network.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from psserver.network.refused_callers import RefusedCallers
from psserver.registry import Registered, Registry
from pswire.cluster import Task
from pswire.encoding import messages
from pswire.encoding.verbs import TOKEN_KEY, VERBS, Caller, Verb, bearer
from pswire.errors import Fenced, Forbidden, InvalidRequest, Unauthenticated
from pswire.pb import parameter_server_pb2 as pb
from pswire.security.identity import Security
from pswire.security.names import ADMIN, certificate_name, named, task_name

DNS_NAMES = "peer_dns"
"""gRPC's key for the DNS names of a certificate. Its URIs and mail addresses may look like one, and do not count."""

Names = frozenset[str] | None
"""The tasks that a caller's certificate names, maybe none; None where certificates are not asked for."""


class Access:
    """The checks of callers: the token of the job, and for each verb its row in `VERBS`. May be used from any thread.

    Args:
        server: this server's task, for messages.
        security: the certificates and the token that callers need.
        registry: the task and the transport token of each session.
    """

    def __init__(self, server: Task, security: Security, registry: Registry) -> None:
        self.registry = registry
        self.refused = RefusedCallers(str(server))
        self._server = str(server)
        self._tls = security.tls
        self._bearer = bearer(security.token).encode() if security.token else b""
        self._checks: Mapping[Caller, Callable[[frozenset[str], Any], None]] = {
            "task": self._check_task,
            "joiner": self._check_joiner,
            "session": self._check_session,
            "reader": self._check_reader,
            "chief": self._check_chief,
            "server": self._check_server,
            "standby": self._check_standby,
            "mover": self._check_mover,
            "anyone": self._check_known,
        }

    def admit(
        self, metadata: Iterable[tuple[str, str | bytes]], shown: Callable[[], Mapping[str, Iterable[bytes]]]
    ) -> Names:
        """Checks the token of a caller over gRPC; returns the names in its certificate.

        Args:
            metadata: the call's metadata.
            shown: returns gRPC's facts about the caller's certificate.

        Raises:
            Unauthenticated: the caller lacks the token.
        """
        self.admit_token(metadata)
        if not self._tls:
            return None
        return named(name.decode(errors="replace") for name in shown().get(DNS_NAMES, ()))

    def admit_token(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises `Unauthenticated` if a call lacks the token."""
        if self._bearer:
            self._check_token(dict(metadata).get(TOKEN_KEY))

    def admit_transport(self, hello: pb.TransportHello, names: Names) -> Registered:
        """Checks that a client may open a transport and push on it; returns the session that it has shown.

        Raises:
            InvalidRequest: the client lacks the token of its session.
            Forbidden: its certificate is not the session's.
        """
        found = self.registry.find(hello.session)
        if found is None or not hmac.compare_digest(found.transport_token, hello.token):
            raise InvalidRequest("the connection did not send a valid session token")
        self.check(VERBS["Push"], hello, names)
        return found

    def check_held(self, session: int, shown: Registered | None) -> None:
        """Raises `Fenced` if a transport was opened for a session that its own task has readmitted."""
        if self.registry.find(session) not in (shown, None):  # of one that is not here any more others say so
            raise Fenced("this connection belongs to a session that its own task has opened again")

    def voter(self, session: int) -> int:
        """Returns the server that has introduced itself with an incarnation; raises `Forbidden` if none has."""
        found = self.registry.find(session)
        if found is None or found.task.job != "ps":
            raise Forbidden("only a server that has introduced itself can vote here", self._server)
        return found.task.index

    def check(self, verb: Verb, request: Any, names: Names) -> None:
        """Raises `Forbidden` if the holder of a certificate may not make a request.

        Args:
            verb: the verb.
            request: the message; it has the fields that `verb.caller` needs.
            names: the names in the certificate.
        """
        if names is not None:
            self._checks[verb.caller](names, request)

    def _check_token(self, given: str | bytes | None) -> None:
        if given is None:
            raise Unauthenticated(
                "the call has no token, and this server requires the token of its job; give the process the same "
                "PS_TOKEN_FILE or PS_TOKEN as the server",
                self._server,
            )
        said = given if isinstance(given, bytes) else given.encode(errors="replace")
        if not hmac.compare_digest(said, self._bearer):
            raise Unauthenticated(
                "the call has the token of another job, or an old one; restart the process with the same "
                "PS_TOKEN_FILE or PS_TOKEN as the server",
                self._server,
            )

    # ---- The callers that a row of the table may name ----

    def _check_task(self, names: frozenset[str], request: Any) -> None:
        self._check_names(names, messages.TASK.from_pb(request.task))
        if request.drives:
            self._check_chief(names, request)

    def _check_joiner(self, names: frozenset[str], request: Any) -> None:
        if not request.HasField("task"):
            raise Forbidden(
                f"a worker with a certificate must join as the task that its certificate names ({_whose(names)}), "
                "but this worker named no task; install the same version of paramserver on both sides",
                self._server,
            )
        self._check_names(names, messages.TASK.from_pb(request.task))

    def _check_names(self, names: frozenset[str], task: Task) -> None:
        if task_name(task) not in names:
            raise Forbidden(
                f"the caller is {task}, but its certificate is {_whose(names)}; start {task} with the certificate of "
                f"{certificate_name(task_name(task))} (--tls-cert, PS_TLS_CERT)",
                self._server,
            )

    def _check_session(self, names: frozenset[str], request: Any) -> None:
        found = self.registry.find(request.session)
        if found is None:
            raise Forbidden(
                f"session {request.session} was not opened here by a task with a certificate; restart the process",
                self._server,
            )
        if task_name(found.task) not in names:
            raise Forbidden(
                f"session {request.session} belongs to {found.task}, but the caller's certificate is "
                f"{_whose(names)}; a process can use only its own session",
                self._server,
            )

    def _check_reader(self, names: frozenset[str], request: Any) -> None:
        check = self._check_session if request.session else self._check_known
        check(names, request)

    def _check_chief(self, names: frozenset[str], request: Any) -> None:
        if not any(name.startswith("chief-") or name == "worker-0" for name in names):
            raise Forbidden(
                "only the chief, or worker 0 in a cluster without a chief, may do this, but the caller's certificate "
                f"is {_whose(names)}; start the chief with the certificate chief-0 of psctl certs",
                self._server,
            )

    def _check_server(self, names: frozenset[str], request: Any) -> None:
        self._check_names(names, Task("ps", request.server))

    def _check_standby(self, names: frozenset[str], request: Any) -> None:
        if not any(name.startswith("ps-") for name in names):
            raise Forbidden(
                f"a standby server needs the certificate of a server, but this one is {_whose(names)}; psctl certs "
                "--extra-ps makes such certificates",
                self._server,
            )

    def _check_mover(self, names: frozenset[str], request: Any) -> None:
        if request.token or not {ADMIN, task_name(Task("ps", request.server))} & names:
            self._check_chief(names, request)

    def _check_known(self, names: frozenset[str], request: Any) -> None:
        if not names:
            raise Forbidden(
                f"the caller's certificate is {_whose(names)}; use the certificate of a task, or admin's, from psctl "
                "certs",
                self._server,
            )


def _whose(names: frozenset[str]) -> str:
    return f"of {', '.join(sorted(names))}" if names else "of no task"
