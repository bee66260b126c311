"""Who may call what. Between the rims and the core: it knows certificates and the job's token, and no network."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from psserver.registry import Registry
from pswire.api import (
    ALL,
    Begun,
    Contribution,
    CreateReply,
    Opened,
    ParameterServer,
    PullReply,
    RestoreOrder,
    RestoreReply,
    RoundReply,
    Shard,
    Watched,
)
from pswire.cluster import Task
from pswire.encoding.verbs import TOKEN_KEY, bearer
from pswire.errors import Forbidden, Unauthenticated
from pswire.model.log import LogEntry, Mode, Start
from pswire.model.plan import Plan, Turn, VariableSpec
from pswire.model.status import ServerStatus
from pswire.security.identity import Security
from pswire.security.names import certificate_name, named, task_name
from pswire.transport.payload import Payload

DNS_NAMES = "peer_dns"
"""As gRPC calls the DNS names of a certificate: a URI or an address of mail may read like one, and is nobody."""


class Gate:
    """Lets calls in.

    Args:
        core: the server proper.
        task: which task this is, for messages.
        security: what callers are asked for.
        registry: whose sessions are whose.
    """

    def __init__(self, core: ParameterServer, task: Task, security: Security, registry: Registry) -> None:
        self._core = core
        self._task = str(task)
        self._bearer = bearer(security.token).encode() if security.token else b""
        self.roles = Roles(str(task), registry) if security.tls else None

    def admit(
        self, metadata: Iterable[tuple[str, str | bytes]], shown: Callable[[], Mapping[str, Iterable[bytes]]]
    ) -> ParameterServer:
        """The core, as a caller may use it.

        Args:
            metadata: of the call.
            shown: gives what gRPC knows of the caller's certificate.

        Raises:
            Unauthenticated: the caller lacks the token.
        """
        if self._bearer:
            self._check_token(dict(metadata).get(TOKEN_KEY))
        if self.roles is None:
            return self._core
        names = named(name.decode(errors="replace") for name in shown().get(DNS_NAMES, ()))
        return Guarded(self._core, self.roles, names)

    def _check_token(self, given: str | bytes | None) -> None:
        if given is None:
            raise Unauthenticated(
                "this server asks for the token of its job, and the call has none; give the process PS_TOKEN_FILE or "
                "PS_TOKEN, the same as the server's",
                self._task,
            )
        said = given if isinstance(given, bytes) else given.encode(errors="replace")
        if not hmac.compare_digest(said, self._bearer):
            raise Unauthenticated(
                "the call has the token of another job, or an old one; give the process the server's PS_TOKEN_FILE "
                "or PS_TOKEN, and start it again",
                self._task,
            )


class Roles:
    """What certificates allow. May be used by any thread.

    Args:
        server: which task this is, for messages.
        registry: whose sessions are whose.
    """

    def __init__(self, server: str, registry: Registry) -> None:
        self._server = server
        self._registry = registry

    def check_task(self, names: frozenset[str], task: Task) -> None:
        """Raises `Forbidden` if a certificate does not name a task."""
        if task_name(task) not in names:
            raise Forbidden(
                f"the caller says that it is {task}, and its certificate is {_whose(names)}; start {task} with the "
                f"certificate of {certificate_name(task_name(task))} (--tls-cert, PS_TLS_CERT)",
                self._server,
            )

    def check_session(self, names: frozenset[str], session: int) -> None:
        """Raises `Forbidden` if a session is not of a task that a certificate names."""
        found = self._registry.find(session)
        if found is None:
            raise Forbidden(
                f"session {session} was not opened here by a task with a certificate; restart the process", self._server
            )
        if task_name(found.task) not in names:
            raise Forbidden(
                f"session {session} is {found.task}'s, and the caller's certificate is {_whose(names)}; a process uses "
                "its own session alone",
                self._server,
            )

    def check_chief(self, names: frozenset[str]) -> None:
        """Raises `Forbidden` if a certificate is of nobody who may be chief."""
        if not any(name.startswith("chief-") or name == "worker-0" for name in names):
            raise Forbidden(
                "only a chief task, or worker 0 where there is none, approves plans and commits checkpoints, and the "
                f"caller's certificate is {_whose(names)}; start the chief with its own (psctl certs makes chief-0)",
                self._server,
            )

    def check_known(self, names: frozenset[str]) -> None:
        """Raises `Forbidden` if a certificate names nobody of the job."""
        if not names:
            raise Forbidden(
                f"the caller's certificate is {_whose(names)}; give it one of psctl certs: that of a task, or admin's",
                self._server,
            )


def _whose(names: frozenset[str]) -> str:
    return f"of {', '.join(sorted(names))}" if names else "of no task"


class Guarded:
    """A core as the holder of a certificate may use it: a `ParameterServer`.

    Args:
        core: the server proper.
        roles: what is allowed.
        names: those of the certificate.
    """

    def __init__(self, core: ParameterServer, roles: Roles, names: frozenset[str]) -> None:
        self._core = core
        self._roles = roles
        self._names = names

    def open(
        self,
        task: Task,
        replicas: int,
        session: int,
        drives: bool,
        mode: Mode = "sync",
        job: str = "",
        term: int = 0,
    ) -> Opened:
        """For the task that the certificate names."""
        self._roles.check_task(self._names, task)
        if drives:
            self._roles.check_chief(frozenset((task_name(task),)))
        return self._core.open(task, replicas, session, drives, mode, job, term)

    def beat(self, session: int, round: int, plan_id: bytes) -> None:
        """For the session's task."""
        self._roles.check_session(self._names, session)
        self._core.beat(session, round, plan_id)

    def leave(self, session: int, error: str) -> None:
        """For the session's task."""
        self._roles.check_session(self._names, session)
        self._core.leave(session, error)

    def create(
        self,
        session: int,
        ordinal: int,
        id: int,
        spec: VariableSpec,
        servers: tuple[int, ...],
        value: Payload | None,
    ) -> CreateReply:
        """For the session's task."""
        self._roles.check_session(self._names, session)
        return self._core.create(session, ordinal, id, spec, servers, value)

    def propose(self, session: int, plan: Plan | None, join_point: str, start: Start | None) -> None:
        """For the session's task."""
        self._roles.check_session(self._names, session)
        self._core.propose(session, plan, join_point, start)

    def watch(self, session: int, after: int, version: int) -> Future[Watched]:
        """For the session's task; without a session for everyone of the job."""
        self._check_reader(session)
        return self._core.watch(session, after, version)

    def approve(self, token: int, index: int, entries: Sequence[LogEntry]) -> int:
        """For who may be chief."""
        self._roles.check_chief(self._names)
        return self._core.approve(token, index, entries)

    def push(self, contribution: Contribution, payload: Payload, begun: Begun | None = None) -> Future[RoundReply]:
        """For the session's task."""
        self._roles.check_session(self._names, contribution.session)
        return self._core.push(contribution, payload, begun)

    def pull(self, session: int, variables: Sequence[int], after: int) -> Future[PullReply]:
        """As `watch`."""
        self._check_reader(session)
        return self._core.pull(session, variables, after)

    def snapshot(self, token: int, plan_id: bytes, manifest: str) -> Future[Shard]:
        """For who may be chief."""
        self._roles.check_chief(self._names)
        return self._core.snapshot(token, plan_id, manifest)

    def restore(self, session: int, path: str, turn: Turn, order: RestoreOrder = ALL) -> Future[RestoreReply]:
        """For the session's task."""
        self._roles.check_session(self._names, session)
        return self._core.restore(session, path, turn, order)

    def status(self) -> ServerStatus:
        """For everyone of the job."""
        self._roles.check_known(self._names)
        return self._core.status()

    def _check_reader(self, session: int) -> None:
        if session:
            self._roles.check_session(self._names, session)
        else:
            self._roles.check_known(self._names)
