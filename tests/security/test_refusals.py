"""R19: who may not come in is refused at once, in words, and leaves a trace; the server goes on serving."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from psserver.network import server, tls_handshake, transport_connection
from psserver.network.access import DNS_NAMES, Access
from psserver.network.refused_callers import MOST_KEPT, MOST_LINES, QUIET_SECONDS, RefusedCallers
from tests.kit import internals as inside
from tests.kit.attacks import Stranger
from tests.kit.certificates import PS0, Certificates, client, guarded, listening
from tests.kit.internals import pb
from tests.kit.rig import CHIEF, SOON, WORKERS, eventually
from tests.kit.shell import free_port
from tests.kit.telemetry import Page

W0, W1 = WORKERS[:2]
AT_ONCE = 30.0
"""Seconds: less than what a process waits for its servers at the start."""

Shown = Callable[[Certificates], inside.Security]
Members = dict[str, tuple[inside.RemoteServer, int]]


def ours(name: str, **changed: Any) -> Shown:
    return lambda certificates: replace(certificates.of(name), **changed)


def signed(*given: Any, **more: Any) -> Shown:
    return lambda certificates: certificates.signed(*given, **more)


def plain(c: Certificates) -> inside.Security:
    return inside.Security()


def token_only(c: Certificates) -> inside.Security:
    return inside.Security(token=c.of("ps-0").token)


def of_another_ca(c: Certificates) -> inside.Security:
    return replace(c.of_other("worker-0"), ca=c.of("ps-0").ca)


SERVER, WORKER = ours("ps-0"), ours("worker-0")
NOBODY = signed(["example.org"], -1, 1)
MAIL = {"mail": ["worker-0.paramserver"]}

REFUSED: dict[str, tuple[Shown, Shown, type[inside.PSError], str]] = {
    "plain client, TLS server": (SERVER, plain, inside.ConfigError, "requires TLS.*--tls-cert"),
    "TLS client, plain server": (plain, WORKER, inside.ConfigError, "does not use TLS.*--tls-cert"),
    "TLS client, server with a token alone": (token_only, WORKER, inside.ConfigError, "does not use TLS"),
    "a client of another CA": (
        *(SERVER, of_another_ca, inside.ConfigError),
        "rejected this process's certificate.*not signed by the server's CA.*psctl certs",
    ),
    "a server of another CA": (
        *(lambda c: c.of_other("ps-0"), WORKER, inside.ConfigError),
        "server's certificate was not signed by this process's CA",
    ),
    "an expired client": (SERVER, lambda c: c.expired("worker-0"), inside.ConfigError, "expired.*--renew"),
    "an expired server": (lambda c: c.expired("ps-0"), WORKER, inside.ConfigError, "expired.*--renew"),
    "another server": (ours("ps-1"), WORKER, inside.ConfigError, "not for ps-0.paramserver; .*TF_CONFIG"),
    "another task's certificate": (SERVER, ours("worker-1"), inside.Forbidden, "is of worker-1.*worker-0.paramserver"),
    "psctl's certificate": (SERVER, ours("admin"), inside.Forbidden, "is of admin"),
    "nobody's certificate": (SERVER, NOBODY, inside.Forbidden, "of no task.*--tls-cert"),
    "a name in its subject alone": (SERVER, signed([], -1, 1, "worker-0.paramserver"), inside.Forbidden, "of no task"),
    "mail that reads like a task": (SERVER, signed(["example.org"], -1, 1, **MAIL), inside.Forbidden, "of no task"),
    "no token": (SERVER, ours("worker-0", token=""), inside.Unauthenticated, "has no token.*PS_TOKEN_FILE"),
    "a wrong token": (SERVER, ours("worker-0", token="0" * 64), inside.Unauthenticated, "another job.*PS_TOKEN_FILE"),
    "no token without TLS": (token_only, plain, inside.Unauthenticated, "has no token.*PS_TOKEN_FILE"),
    "a wrong token without TLS": (
        token_only,
        lambda c: inside.Security(token="0" * 64),
        inside.Unauthenticated,
        "another job",
    ),
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
        assert thread._server._service._core.status().sessions == ()
        if secured == certificates.of("ps-0"):  # where it is the server that is wrong, nobody may
            with client(thread, certificates.of("worker-0")) as member:
                assert member.open(W0, 1, 7, False).session


@pytest.fixture(scope="module")
def members(certificates: Certificates) -> Iterator[Members]:
    """A server, and for each task its connection and its session."""
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(guarded(certificates.of("ps-0")))
        found = {}
        for name, task in (("worker-0", W0), ("worker-1", W1), ("chief-0", CHIEF)):
            server = stack.enter_context(client(thread, certificates.of(name)))
            found[name] = server, server.open(task, 1, 0, task == CHIEF).session
        found["admin"] = stack.enter_context(client(thread, certificates.of("admin"))), 0
        yield found


SPEC = inside.VariableSpec("v", inside.TensorSpec("float32", (4,)))
SESSION_VERBS: dict[str, Callable[[inside.RemoteServer, int], Any]] = {
    "Heartbeat": lambda s, n: s.heartbeat(n, -1, b""),
    "Leave": lambda s, n: s.leave(n, ""),
    "CreateBatch": lambda s, n: s.create_batch(n, [inside.PlacedVariable(0, SPEC, (0,))]),
    "Propose": lambda s, n: s.propose(n, None, "entry", None),
    "Watch": lambda s, n: s.watch(n, 0, 0).result(SOON),
    "Push": lambda s, n: s.push(inside.Contribution(n, 1, 0, b"p" * 32, ()), inside.Payload()).result(SOON),
    "Pull": lambda s, n: s.pull(n, (), -1).result(SOON),
    "Restore": lambda s, n: s.restore(n, "x", inside.Turn(0, 0, 0), inside.RestoreOrder("look")).result(SOON),
}


@pytest.mark.parametrize("verb", SESSION_VERBS)
def test_a_session_is_its_tasks_alone(members: Members, verb: str) -> None:
    """Who knows its number may do nothing with it, and its owner goes on; one that was not opened is not made up."""
    owner, session = members["worker-0"]
    for thief in ("worker-1", "chief-0", "admin"):
        words = r"belongs to /job:worker/task:0.*certificate is of " + thief
        with at_once(), pytest.raises(inside.Forbidden, match=words):
            SESSION_VERBS[verb](members[thief][0], session)
        owner.heartbeat(session, -1, b"")
    with pytest.raises(inside.Forbidden, match="was not opened here"):
        SESSION_VERBS[verb](owner, 1 << 62)


def test_a_worker_is_no_chief(members: Members) -> None:
    """It neither drives, nor approves, nor has checkpoints written, whatever token it says. Who may be chief, and is
    not, knows no token, and a larger one is no better; who holds it may."""
    worker, _ = members["worker-1"]
    with pytest.raises(inside.Forbidden, match="only the chief, or worker 0 in a cluster without a chief"):
        worker.open(W1, 1, 0, True)
    for token in (1, 1 << 63):
        with pytest.raises(inside.Forbidden, match="only the chief, or worker 0"):
            worker.approve(token, 0, [])
        with pytest.raises(inside.Forbidden, match="only the chief, or worker 0"):
            worker.snapshot(token, b"p" * 32, "").result(SOON)
    for token in (1, (1 << 64) - 1):
        for name in ("worker-0", "chief-0"):
            with pytest.raises(inside.Fenced) as caught:
                members[name][0].approve(token, 0, [])
            assert not any(word.isdigit() for word in str(caught.value).split())
    chief, session = members["chief-0"]
    chief.leave(session, "the next one comes")
    assert chief.approve(chief.open(CHIEF, 0, 5, True).token, 0, []) == 0


def stranger(thread: inside.ServerThread, security: inside.Security | None, name: str = "ps-0.paramserver") -> Any:
    """A connection to the data port, whose handshake is over on this side; None for no TLS."""
    sock = socket.create_connection(("127.0.0.1", thread._server._transports.port), SOON)
    if security is None:
        return sock
    return security.client_context().wrap_socket(sock, server_hostname=name)


def hello(session: int, token: bytes) -> bytes:
    said = pb.TransportHello(session=session, token=token)
    return inside.Message(inside.MessageKind.HELLO, header=said.SerializeToString()).head()


def is_closed(sock: Any) -> bool:
    """Whether the server ends the connection without a word."""
    try:
        return sock.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


TRANSPORT_REFUSED: dict[str, Shown] = {
    "another CA": of_another_ca,
    "expired": lambda c: c.expired("worker-0"),
    "another task": ours("worker-1"),
    "psctl": ours("admin"),
    "nobody": signed([], -1, 1),
}


@pytest.mark.parametrize("case", [*TRANSPORT_REFUSED, "no TLS", "wrong token", "no token"])
def test_a_transport_is_for_its_task(certificates: Certificates, case: str) -> None:
    """Whoever has a session's transport token needs its task's certificate as well, and the other way round."""
    with guarded(certificates.of("ps-0")) as thread, contextlib.ExitStack() as stack:
        transports = thread._server._transports
        member = stack.enter_context(client(thread, certificates.of("worker-0"), transport="tcp"))
        session = member.open(W0, 1, 0, False).session
        right = transports.access.registry.transport_token(session)
        token = {"wrong token": b"x" * 16, "no token": b""}.get(case, right)
        shown = None if case == "no TLS" else TRANSPORT_REFUSED.get(case, WORKER)(certificates)
        sock = stack.enter_context(stranger(thread, shown))
        with contextlib.suppress(OSError):
            sock.sendall(hello(session, token))
        assert is_closed(sock)
        eventually(lambda: [c.session for c in transports.connections] == [session])
        good = stack.enter_context(stranger(thread, certificates.of("worker-0")))
        good.sendall(hello(session, right))
        assert good.recv(inside.HEAD.size)[0] == inside.MessageKind.WELCOME


def test_each_call_on_a_transport_is_checked(certificates: Certificates) -> None:
    """As over gRPC: that a transport is open is no right to use it."""
    with guarded(certificates.of("ps-0")) as thread:
        transports = thread._server._transports
        with client(thread, certificates.of("worker-0"), transport="tcp") as member:
            session = member.open(W0, 1, 0, False).session
            assert member.pull(session, (), -1).result(SOON).round == -1
            assert [connection.session for connection in transports.connections] == [session]
            transports.access.registry._sessions.clear()
            with pytest.raises(inside.Forbidden, match="was not opened here"):
                member.pull(session, (), -1).result(SOON)


def test_a_transport_to_another_server(certificates: Certificates) -> None:
    """A client does not speak to a data port whose certificate is not the server's."""
    with guarded(certificates.of("ps-0")) as thread:
        with pytest.raises(ssl.SSLCertVerificationError, match="ps-1"):
            stranger(thread, certificates.of("worker-0"), "ps-1.paramserver")
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger(thread, certificates.of_other("worker-0"))


def test_who_looks_whether_a_port_is_open_is_not_refused(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """As `psctl doctor` does: no line and no count, unlike for one that begins and goes."""
    with guarded(certificates.of("ps-0")) as thread:
        transports = thread._server._transports
        for _ in range(3):
            stranger(thread, None).close()
        began = stranger(thread, None)
        began.sendall(b"\x16\x03\x01\x02\x00\x01")
        began.close()
        eventually(lambda: transports.access.refused.counts["handshake"] == 1)
        eventually(lambda: not transports._handshakes)
        assert transports.access.refused.counts["handshake"] == 1
    assert [message for message in caplog.messages if "rejected a caller" in message and "3 more" in message] == []


def test_a_handshake_that_does_not_go_on(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is waited for as long as is said, and no longer, also where gRPC listens; meanwhile others get in."""
    monkeypatch.setattr(server, "HANDSHAKE_MS", 300)
    monkeypatch.setattr(tls_handshake, "SECONDS", 0.3)
    monkeypatch.setattr(transport_connection, "HELLO_SECONDS", 0.3)
    with guarded(certificates.of("ps-0")) as thread, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(stranger(thread, None)) for _ in range(20)]
        halfway = stack.enter_context(stranger(thread, None))
        halfway.sendall(b"\x16\x03\x01\x02\x00\x01")
        shaken = stack.enter_context(stranger(thread, certificates.of("worker-0")))
        with client(thread, certificates.of("worker-0"), transport="tcp") as member:
            member.open(W0, 1, 0, False)
        with at_once():
            assert all(map(is_closed, [*silent, halfway, shaken]))
        eventually(lambda: not thread._server._transports._handshakes)
    for secured in (certificates.of("ps-0"), inside.Security()):
        with guarded(secured) as thread:
            host, _, port = thread.address.rpartition(":")
            with socket.create_connection((host, int(port)), AT_ONCE) as sock, at_once():
                while sock.recv(4096):
                    pass


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_who_calls_nothing_keeps_no_connection(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """However well it answers pings: else strangers without the token would take all connections that there may be."""
    assert server.IDLE_MS == 30_000
    monkeypatch.setattr(server, "IDLE_MS", 300)
    shown = certificates.of("ps-0") if tls else inside.Security(token="t" * 32)
    with guarded(shown) as thread, contextlib.ExitStack() as stack:
        host, _, port = thread.address.rpartition(":")
        socks = [stack.enter_context(socket.create_connection((host, int(port)), SOON)) for _ in range(3)]
        if tls:
            context = certificates.of("worker-0").client_context()
            context.set_alpn_protocols(["h2"])
            socks = [context.wrap_socket(each, server_hostname="ps-0.paramserver") for each in socks]
        with at_once():
            for each in map(Stranger, socks):  # who acknowledges settings and pings
                while not each.closed:
                    each.pump(0.1)


def test_strangers_are_counted_and_fill_no_log(stack: contextlib.ExitStack) -> None:
    """Thousands of them write a few lines, with their address and what they lacked; what is no hello ends a
    transport."""
    data_port = free_port()
    given = inside.SecurityOptions(token="0123456789abcdef0123456789abcdef")
    flags = ("--metrics-port", "0", "--data-port", str(data_port))
    process, address = listening(stack, flags=flags, security=given, stderr=subprocess.PIPE)
    assert process.stdout is not None
    printed = iter(process.stdout.readline, b"")
    metrics = next(found[1] for line in printed if (found := re.search(r"metrics at (\S+)", line.decode())))
    host = address.rpartition(":")[0]
    wrong = ((inside.TOKEN_KEY, "Bearer fedcba9876543210"),)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(inside.VERBS["Status"].path)
        for metadata in [()] * 200 + [wrong]:
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                call(pb.Empty().SerializeToString(), timeout=SOON, metadata=metadata)
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", data_port), SOON) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            while stranger.recv(1 << 16):
                pass
    for reason, count in {"token": 201, "certificate": 0, "handshake": 0, "transport": 100}.items():
        assert Page.at(metrics)("server_refused_total", reason=reason) == count
    process.terminate()
    said = process.communicate(timeout=SOON)[1].decode()
    lines = [line for line in said.splitlines() if "rejected a caller" in line]
    assert len(lines) == 2
    assert f"rejected a caller at ipv4:{host} (status, token): Unauthenticated: the call has no token" in lines[0]
    assert "rejected a caller at 127.0.0.1 (connect, transport)" in lines[1]
    assert len(said) < 2000


def test_lines_are_limited_by_host_and_in_all(caplog: pytest.LogCaptureFixture) -> None:
    """After a minute the next one says how many there were meanwhile; what is kept has a limit as well."""
    now = 0.0
    refused = RefusedCallers("/job:ps/task:0", lambda: now)
    for host in range(3 * MOST_KEPT):
        for port in (1, 2):
            refused.note("connect", f"10.0.0.{host}:{port}", "transport", "no hello")
    assert len(caplog.messages) == MOST_LINES
    assert refused.counts["transport"] == 6 * MOST_KEPT
    assert len(refused.recent()) == MOST_KEPT
    assert refused.recent()[-1].said == f"a caller at 10.0.0.{3 * MOST_KEPT - 1}, 2 times"
    now = QUIET_SECONDS
    refused.note("connect", "10.0.0.1:3", "transport", "no hello")
    untold = 6 * MOST_KEPT - MOST_LINES - (MOST_LINES - 1)  # those between two lines are told with the second
    assert caplog.messages[-1].endswith(f"no hello; {untold} more were rejected since the last such line")


# ---- The table of who may call what: each verb, for each certificate ----

SECURED = inside.Security(b"certificate", b"key", b"ca", token="t" * 32)
OWNER, MADE_UP = 7, 1 << 60
"""The session of worker 1, and one that nobody has opened."""

CALLERS = ("worker-0", "worker-1", "chief-0", "ps-0", "admin", "nobody")
MAY: dict[inside.Caller, set[str]] = {
    "task": {"worker-1"}, "joiner": {"worker-1"}, "session": {"worker-1"}, "reader": {"worker-1"},
    "chief": {"chief-0", "worker-0"}, "server": {"ps-0"}, "standby": {"ps-0"},
    "mover": {"ps-0", "admin", "chief-0", "worker-0"}, "anyone": {*CALLERS} - {"nobody"},
}  # fmt: skip
"""Who may make a call for worker 1, with its session where the verb has one."""

VERBS_OF: dict[str, inside.Caller] = {
    verb: caller
    for caller, verbs in {
        "task": "Open",
        "joiner": "Enlist",
        "session": "Heartbeat Leave CreateBatch Propose Push Restore Schedule Take Fetch AssignBatches Vote",
        "reader": "Watch Pull",
        "chief": "Approve Snapshot",
        "server": "Introduce",
        "standby": "Offer",
        "mover": "Move",
        "anyone": "Status Events Exchange",
    }.items()
    for verb in verbs.split()
}  # type: ignore[misc]


@pytest.fixture
def access() -> Access:
    registry = inside.Registry(PS0)
    registry.enter(OWNER, WORKERS[1])
    return Access(PS0, SECURED, registry)


def request_of(verb: str, session: int = OWNER, task: inside.Task = WORKERS[1], drives: bool = False) -> Any:
    kind, who = inside.VERBS[verb].request, inside.messages.TASK.to_pb(task)
    own: dict[str, Any] = {"session": session} if "session" in kind.DESCRIPTOR.fields_by_name else {}
    return kind(**{"Open": {"task": who, "drives": drives}, "Enlist": {"task": who}}.get(verb, own))


def names_of(caller: str) -> frozenset[str]:
    return frozenset({caller} - {"nobody"})


def those_let_in(access: Access, verb: str, request: Any) -> set[str]:
    """Who may make a request; everybody else is refused as such."""
    found = set()
    for caller in CALLERS:
        with contextlib.suppress(inside.Forbidden):
            access.check(inside.VERBS[verb], request, names_of(caller))
            found.add(caller)
    return found


def test_every_verb_says_who_may_call_it() -> None:
    """The rule is written twice: neither changes alone; and a request says who its caller is, where that counts."""
    assert {name: verb.caller for name, verb in inside.VERBS.items()} == VERBS_OF
    of = {"session": "session", "reader": "session", "task": "task drives", "joiner": "task", "server": "server"}
    for verb in inside.VERBS.values():
        needed = {*(of | {"mover": "server token"}).get(verb.caller, "").split()}
        assert needed <= {*verb.request.DESCRIPTOR.fields_by_name}


@pytest.mark.parametrize("verb", inside.VERBS)
def test_each_verb_is_for_its_callers(access: Access, verb: str) -> None:
    """A session is its task's alone, and none is made up; chiefs and worker 0 decide; anyone of the job looks."""
    kind = VERBS_OF[verb]
    assert those_let_in(access, verb, request_of(verb)) == MAY[kind]
    if kind in ("session", "reader"):
        assert those_let_in(access, verb, request_of(verb, MADE_UP)) == set()
        assert those_let_in(access, verb, request_of(verb, 0)) == (MAY["anyone"] if kind == "reader" else set())


PARTICULAR = {
    "a worker drives": ("Open", request_of("Open", drives=True), set()),
    "a chief drives": ("Open", request_of("Open", task=CHIEF, drives=True), {"chief-0"}),
    "worker 0 drives": ("Open", request_of("Open", task=WORKERS[0], drives=True), {"worker-0"}),
    "whichever index is free": ("Enlist", inside.pb.EnlistRequest(key=1), set()),  # a certificate is of one worker
    "a server moves": ("Move", inside.pb.MoveRequest(server=1), {"admin", "chief-0", "worker-0"}),  # or itself alone
    "a server has moved": ("Move", inside.pb.MoveRequest(server=0, token=1), {"chief-0", "worker-0"}),
}


@pytest.mark.parametrize("case", PARTICULAR)
def test_what_a_request_says_counts(access: Access, case: str) -> None:
    """Who drives is a chief as well; who joins with a certificate says which worker it is, and without one need not."""
    verb, request, let_in = PARTICULAR[case]
    assert those_let_in(access, verb, request) == let_in
    access.check(inside.VERBS["Enlist"], inside.pb.EnlistRequest(key=1), None)


@pytest.mark.parametrize("caller", CALLERS)
def test_a_transport_is_for_who_has_token_and_certificate(access: Access, caller: str) -> None:
    """Both, or nobody is told anything."""
    token = access.registry.transport_token(OWNER)
    for session, wrong in ((OWNER, b""), (OWNER, bytes(16)), (OWNER, token[:15]), (MADE_UP, token)):
        with pytest.raises(inside.InvalidRequest, match="did not send a valid session token"):
            access.admit_transport(inside.pb.TransportHello(session=session, token=wrong), names_of(caller))
    hello = inside.pb.TransportHello(session=OWNER, token=token)
    if caller == "worker-1":
        access.admit_transport(hello, names_of(caller))
    else:
        with pytest.raises(inside.Forbidden):
            access.admit_transport(hello, names_of(caller))


def test_the_token_comes_first(access: Access) -> None:
    """Without it nothing else is looked at; with it, names are those of tasks, and none without a certificate."""

    def look() -> Any:
        pytest.fail("its certificate was looked at")

    wrong = [((inside.TOKEN_KEY, token),) for token in ("t" * 32, inside.bearer("u" * 32), b"\xff")]
    for said in ((), *wrong):
        with pytest.raises(inside.Unauthenticated):
            access.admit(said, look)
    shown = {"peer_dns": [b"worker-1.paramserver", b"example.org", b"\xff"], "peer_email": [b"chief-0.paramserver"]}
    good = ((inside.TOKEN_KEY, inside.bearer("t" * 32)),)
    assert access.admit(good, lambda: shown) == {"worker-1"}
    assert access.admit(good, dict) == frozenset()
    assert Access(PS0, inside.Security(), inside.Registry(PS0)).admit((), dict) is None


MISSPELT = ("", "ps", "ps-", "ps-x", "ps-00", "ps-0.ps-1", "worker-0 ", "PS-0", "ps-0\0", "boss-0")


@pytest.mark.parametrize("name", ["*", "*-0", "ps-*", "metrics", *MISSPELT])
def test_a_certificate_of_no_task_stands_for_nobody(access: Access, name: str) -> None:
    """A wildcard, which other checks of names take for every task, is none; its holder may not even look."""
    shown = {DNS_NAMES: [f"{name}.paramserver".encode()]}
    good = [(inside.TOKEN_KEY, inside.bearer(SECURED.token))]
    names = access.admit(good, lambda: shown)
    assert names == frozenset()
    with pytest.raises(inside.Forbidden, match="the caller's certificate is of no task"):
        access.check(inside.VERBS["Status"], None, names)
    shown[DNS_NAMES] += [b"ps-10.paramserver", b"ps-standby-2.paramserver", b"admin.paramserver", b"ps-1.example"]
    assert access.admit(good, lambda: shown) == {"ps-10", "ps-standby-2", "admin"}
