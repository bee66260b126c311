"""R19: who may not come in is refused at once, in words, and the server goes on serving."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from psserver.transport import lane_connection, server, tls_handshake
from tests.kit.certificates import PS0, Certificates, client, guarded
from tests.kit.internals import (
    HEAD,
    PROTOCOL,
    ConfigError,
    Contribution,
    Fenced,
    Forbidden,
    Kind,
    Message,
    Payload,
    PSError,
    RemoteServer,
    RestoreOrder,
    Security,
    ServerThread,
    Task,
    TensorSpec,
    Turn,
    Unauthenticated,
    VariableSpec,
    pb,
)
from tests.kit.rig import CHIEF, SOON, WORKERS, core, eventually

W0, W1 = WORKERS[:2]
AT_ONCE = 30.0
"""Seconds: less than what a process waits for its servers at the start."""

Shown = Callable[[Certificates], Security]


def ours(name: str, **changed: Any) -> Shown:
    return lambda certificates: replace(certificates.of(name), **changed)


def plain(c: Certificates) -> Security:
    return Security()


def token_only(c: Certificates) -> Security:
    return Security(token=c.of("ps-0").token)


REFUSED: dict[str, tuple[Shown, Shown, type[PSError], str]] = {
    "plain client, TLS server": (ours("ps-0"), plain, ConfigError, "expects TLS.*--tls-cert"),
    "TLS client, plain server": (plain, ours("worker-0"), ConfigError, "speaks without TLS.*--tls-cert"),
    "TLS client, server with a token alone": (token_only, ours("worker-0"), ConfigError, "speaks without TLS"),
    "a client of another CA": (
        ours("ps-0"),
        lambda c: replace(c.of_other("worker-0"), ca=c.of("ps-0").ca),
        ConfigError,
        "does not take our certificate.*not signed by the server's CA.*psctl certs",
    ),
    "a server of another CA": (
        lambda c: c.of_other("ps-0"),
        ours("worker-0"),
        ConfigError,
        "server's certificate is not signed by our CA",
    ),
    "an expired client": (ours("ps-0"), lambda c: c.expired("worker-0"), ConfigError, "expired.*--renew"),
    "an expired server": (lambda c: c.expired("ps-0"), ours("worker-0"), ConfigError, "expired.*--renew"),
    "another server": (ours("ps-1"), ours("worker-0"), ConfigError, "not ps-0.paramserver's.*TF_CONFIG"),
    "a certificate of another task": (
        ours("ps-0"),
        ours("worker-1"),
        Forbidden,
        "is of worker-1.*worker-0.paramserver",
    ),
    "psctl's certificate": (ours("ps-0"), ours("admin"), Forbidden, "is of admin"),
    "a certificate of nobody": (
        ours("ps-0"),
        lambda c: c.signed(["example.org"], -1, 1),
        Forbidden,
        "of no task.*--tls-cert",
    ),
    "a certificate with a name in its subject alone": (
        ours("ps-0"),
        lambda c: c.signed([], -1, 1, "worker-0.paramserver"),
        Forbidden,
        "of no task",
    ),
    "a certificate whose address of mail reads like a task": (
        ours("ps-0"),
        lambda c: c.signed(["example.org"], -1, 1, mail=["worker-0.paramserver"]),
        Forbidden,
        "of no task",
    ),
    "no token": (ours("ps-0"), ours("worker-0", token=""), Unauthenticated, "has none.*PS_TOKEN_FILE"),
    "a wrong token": (ours("ps-0"), ours("worker-0", token="0" * 64), Unauthenticated, "another job.*PS_TOKEN_FILE"),
    "no token without TLS": (token_only, plain, Unauthenticated, "has none.*PS_TOKEN_FILE"),
    "a wrong token without TLS": (token_only, lambda c: Security(token="0" * 64), Unauthenticated, "another job"),
}


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """What happens within does not wait for a deadline."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize("case", REFUSED)
def test_who_may_not_come_in(certificates: Certificates, case: str) -> None:
    """Is refused with a typed error that says what to do, opens no session, and costs the others nothing."""
    shown, given, kind, text = REFUSED[case]
    secured = shown(certificates)
    with guarded(secured) as thread:
        with client(thread, given(certificates)) as stranger, at_once():
            with pytest.raises(kind, match=text) as caught:
                stranger.open(W0, 1, 7, False)
            assert str(caught.value.task) == str(PS0)
        serves(thread, certificates, secured)


def serves(thread: ServerThread, certificates: Certificates, secured: Security) -> None:
    """Nobody has come in, and who may is let in; where it is the server that is wrong, nobody may."""
    assert thread._server._service._core.status().sessions == ()
    if secured == certificates.of("ps-0"):
        with client(thread, certificates.of("worker-0")) as member:
            assert member.open(W0, 1, 7, False).session


@pytest.mark.parametrize("name", ["worker-0", "admin"])
def test_who_looks(certificates: Certificates, name: str) -> None:
    """Any task of the job, and psctl, may ask for the status and what was told last; with the token."""
    with guarded(certificates.of("ps-0")) as thread:
        with client(thread, certificates.of(name)) as looker:
            assert looker.status().server == 0
            assert looker.recent() == ()
        nobody = certificates.signed(["example.org"], -1, 1)
        for shown, kind, text in (
            (replace(certificates.of(name), token=""), Unauthenticated, "has none"),
            (replace(certificates.of(name), token="0" * 64), Unauthenticated, "another job"),
            (nobody, Forbidden, "admin's"),
        ):
            with client(thread, shown) as looker:
                for look in (looker.status, looker.recent):
                    with pytest.raises(kind, match=text):
                        look()


# ---- What a member may not do ----


@pytest.fixture(scope="module")
def members(certificates: Certificates) -> Iterator[dict[str, tuple[RemoteServer, int]]]:
    """A server, and for each task its connection and its session."""
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(guarded(certificates.of("ps-0")))
        found = {}
        for name, task in (("worker-0", W0), ("worker-1", W1), ("chief-0", CHIEF)):
            server = stack.enter_context(client(thread, certificates.of(name)))
            found[name] = server, server.open(task, 1, 0, task == CHIEF).session
        found["admin"] = stack.enter_context(client(thread, certificates.of("admin"))), 0
        yield found


SPEC = VariableSpec("v", TensorSpec("float32", (4,)))
SESSION_VERBS: dict[str, Callable[[RemoteServer, int], Any]] = {
    "Beat": lambda s, n: s.beat(n, -1, b""),
    "Leave": lambda s, n: s.leave(n, ""),
    "Create": lambda s, n: s.create(n, 0, -1, SPEC, (0,), None),
    "Propose": lambda s, n: s.propose(n, None, "entry", None),
    "Watch": lambda s, n: s.watch(n, 0, 0).result(SOON),
    "Push": lambda s, n: s.push(pushed(n), Payload()).result(SOON),
    "Pull": lambda s, n: s.pull(n, (), -1).result(SOON),
    "Restore": lambda s, n: s.restore(n, "x", Turn(0, 0, 0), RestoreOrder("look")).result(SOON),
}


def pushed(session: int) -> Contribution:
    return Contribution(session, 1, 0, b"p" * 32, ())


@pytest.mark.parametrize("verb", SESSION_VERBS)
@pytest.mark.parametrize("thief", ["worker-1", "chief-0", "admin"])
def test_a_session_is_its_tasks_alone(members: dict[str, tuple[RemoteServer, int]], thief: str, verb: str) -> None:
    """Who knows its number may do nothing with it; its owner goes on."""
    owner, session = members["worker-0"]
    with at_once(), pytest.raises(Forbidden, match=r"is /job:worker/task:0's.*certificate is of " + thief):
        SESSION_VERBS[verb](members[thief][0], session)
    owner.beat(session, -1, b"")


@pytest.mark.parametrize("verb", SESSION_VERBS)
def test_a_session_that_nobody_has_opened(members: dict[str, tuple[RemoteServer, int]], verb: str) -> None:
    """Cannot be made up."""
    with pytest.raises(Forbidden, match="was not opened here"):
        SESSION_VERBS[verb](members["worker-0"][0], 1 << 62)


def test_a_worker_is_no_chief(members: dict[str, tuple[RemoteServer, int]]) -> None:
    """It neither drives, nor approves, nor has checkpoints written, whatever token it says."""
    worker, _ = members["worker-1"]
    with pytest.raises(Forbidden, match="only a chief task, or worker 0"):
        worker.open(W1, 1, 0, True)
    for token in (1, 1 << 63):
        with pytest.raises(Forbidden, match="approves plans and commits checkpoints"):
            worker.approve(token, 0, [])
        with pytest.raises(Forbidden, match="approves plans and commits checkpoints"):
            worker.snapshot(token, b"p" * 32, "").result(SOON)


@pytest.mark.parametrize("token", [1, (1 << 64) - 1])
def test_a_token_is_not_made_up(members: dict[str, tuple[RemoteServer, int]], token: int) -> None:
    """Who may be chief, and is not, knows no token; a larger one than any that was given is no better."""
    for name in ("worker-0", "chief-0"):
        with pytest.raises(Fenced) as caught:
            members[name][0].approve(token, 0, [])
        assert not any(word.isdigit() for word in str(caught.value).split())


def test_a_session_of_another_is_not_opened(certificates: Certificates) -> None:
    """On a server that does not give the numbers, whose session it is says who opened it first, and nobody else."""
    with guarded(certificates.of("ps-1"), core(1)) as thread, contextlib.ExitStack() as stack:
        ps1, names = Task("ps", 1), ("worker-0", "worker-1")
        first, second = (stack.enter_context(client(thread, certificates.of(name), ps1)) for name in names)
        first.open(W0, 1, 77, False)
        with pytest.raises(Forbidden, match=r"session 77 is /job:worker/task:0's.*restart /job:worker/task:1"):
            second.open(W1, 1, 77, False)
        first.beat(77, -1, b"")


# ---- The tcp lane ----


def stranger(thread: ServerThread, security: Security | None, name: str = "ps-0.paramserver") -> Any:
    """A connection to the data port, whose handshake is over on this side; None for no TLS."""
    sock = socket.create_connection(("127.0.0.1", thread._server._lanes.port), SOON)
    if security is None:
        return sock
    return security.client_context().wrap_socket(sock, server_hostname=name)


def hello(session: int, token: bytes) -> bytes:
    return Message(
        Kind.HELLO, header=pb.LaneHello(session=session, token=token, protocol=PROTOCOL).SerializeToString()
    ).head()


def is_closed(sock: Any) -> bool:
    """Whether the server ends the connection without a word."""
    try:
        return sock.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


LANE_REFUSED: dict[str, Shown] = {
    "another CA": lambda c: replace(c.of_other("worker-0"), ca=c.of("ps-0").ca),
    "expired": lambda c: c.expired("worker-0"),
    "another task": lambda c: c.of("worker-1"),
    "psctl": lambda c: c.of("admin"),
    "nobody": lambda c: c.signed([], -1, 1),
}


@pytest.mark.parametrize("case", [*LANE_REFUSED, "no TLS", "wrong token", "no token"])
def test_a_lane_is_for_its_task(certificates: Certificates, case: str) -> None:
    """Whoever has a session's lane token needs its task's certificate as well, and the other way round."""
    with guarded(certificates.of("ps-0")) as thread, contextlib.ExitStack() as stack:
        lanes = thread._server._lanes
        member = stack.enter_context(client(thread, certificates.of("worker-0"), lane="tcp"))
        session = member.open(W0, 1, 0, False).session
        token = {"wrong token": b"x" * 16, "no token": b""}.get(case, lanes.access.registry.lane_token(session))
        shown = None if case == "no TLS" else LANE_REFUSED.get(case, ours("worker-0"))(certificates)
        sock = stack.enter_context(stranger(thread, shown))
        with contextlib.suppress(OSError):
            sock.sendall(hello(session, token))
        assert is_closed(sock)
        eventually(lambda: [c.session for c in lanes.connections] == [session])
        good = stack.enter_context(stranger(thread, certificates.of("worker-0")))
        good.sendall(hello(session, lanes.access.registry.lane_token(session)))
        assert good.recv(HEAD.size)[0] == Kind.WELCOME


def test_each_call_on_a_lane_is_checked(certificates: Certificates) -> None:
    """As over gRPC: that a lane is open is no right to use it."""
    with guarded(certificates.of("ps-0")) as thread:
        lanes = thread._server._lanes
        with client(thread, certificates.of("worker-0"), lane="tcp") as member:
            session = member.open(W0, 1, 0, False).session
            assert member.pull(session, (), -1).result(SOON).round == -1
            assert [connection.session for connection in lanes.connections] == [session]
            lanes.access.registry._sessions.clear()
            with pytest.raises(Forbidden, match="was not opened here"):
                member.pull(session, (), -1).result(SOON)


def test_a_lane_to_another_server(certificates: Certificates) -> None:
    """A client does not speak to a data port whose certificate is not the server's."""
    with guarded(certificates.of("ps-0")) as thread:
        with pytest.raises(ssl.SSLCertVerificationError, match="ps-1"):
            stranger(thread, certificates.of("worker-0"), "ps-1.paramserver")
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger(thread, certificates.of_other("worker-0"))


# ---- Those that say nothing ----


def test_a_handshake_that_does_not_go_on(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is waited for as long as is said, and no longer; meanwhile others get in."""
    monkeypatch.setattr(tls_handshake, "SECONDS", 0.3)
    monkeypatch.setattr(lane_connection, "HELLO_SECONDS", 0.3)
    with guarded(certificates.of("ps-0")) as thread, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(stranger(thread, None)) for _ in range(20)]
        halfway = stack.enter_context(stranger(thread, None))
        halfway.sendall(b"\x16\x03\x01\x02\x00\x01")
        shaken = stack.enter_context(stranger(thread, certificates.of("worker-0")))
        with client(thread, certificates.of("worker-0"), lane="tcp") as member:
            member.open(W0, 1, 0, False)
        with at_once():
            assert all(map(is_closed, [*silent, halfway, shaken]))
        eventually(lambda: not thread._server._lanes._handshakes)


def test_a_call_that_does_not_begin(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where gRPC listens."""
    monkeypatch.setattr(server, "HANDSHAKE_MS", 300)
    for secured in (certificates.of("ps-0"), Security()):
        with guarded(secured) as thread:
            host, _, port = thread.address.rpartition(":")
            with socket.create_connection((host, int(port)), AT_ONCE) as silent, at_once():
                while silent.recv(4096):
                    pass


def test_the_approved_are_the_chiefs(members: dict[str, tuple[RemoteServer, int]]) -> None:
    """The same verbs work for who holds the token: the refusals above are not for everyone."""
    chief, session = members["chief-0"]
    chief.leave(session, "the next one comes")
    token = chief.open(CHIEF, 0, 5, True).token
    assert chief.approve(token, 0, []) == 0
