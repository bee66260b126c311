"""R19: what comes is data. Nothing is executed, unpickled, allocated for what it announces, or written elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.attacks import streams
from tests.kit.certificates import PS0, Certificates, client, guarded
from tests.kit.internals import (
    BY_NAME,
    ERROR_KEY,
    VERBS,
    ConfigError,
    Frame,
    InvalidRequest,
    PSError,
    RestoreOrder,
    Security,
    ServerConfig,
    ServerThread,
    Turn,
    pb,
)
from tests.kit.rig import CHIEF, WORKERS, core, eventually

SECONDS = 20.0
SOME_MIB = 64 << 10
"""In KiB, as the system counts resident memory: a thousandth of what is announced."""


class Bomb:
    """What tells of itself if anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Attacked:
    """A server with a root of checkpoints, and a member that says what the test wants.

    Args:
        certificates: with which it is secured.
        root: of checkpoints.
        stack: ends all of it.
    """

    def __init__(self, certificates: Certificates, root: Path, stack: contextlib.ExitStack) -> None:
        self.root = root
        self.core = core(root=root, memory_limit=1 << 30)
        self.thread = stack.enter_context(guarded(certificates.of("ps-0"), self.core, memory_limit=1 << 30))
        self.server = stack.enter_context(client(self.thread, certificates.of("worker-0")))
        self.chief = stack.enter_context(client(self.thread, certificates.of("chief-0")))
        self.session = self.server.open(WORKERS[0], 1, 0, False).session
        self.token = self.chief.open(CHIEF, 0, 0, True).token

    def say(self, verb: str, message: bytes) -> str:
        """Sends bytes as the request of a verb; returns the name of the error, "" for an answer."""
        stub: Any = self.server._calls._stubs[verb]
        asks = VERBS[verb].streams[0]
        call = stub if streams(verb) else stub.future
        try:
            reply = call(iter([message]) if asks else message, metadata=self.server._calls._metadata, timeout=SECONDS)
            list(reply) if streams(verb) else reply.result()
        except grpc.RpcError as error:
            trailing: Any = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
            return str(trailing.get(ERROR_KEY, error))
        return ""

    def serves(self) -> None:
        """It goes on."""
        self.server.beat(self.session, -1, b"")


@pytest.fixture(scope="module")
def attacked(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One server for all attacks; none may surprise it."""
    surprises: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: surprises.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psserver").addHandler(handler)
    with contextlib.ExitStack() as stack:
        yield Attacked(certificates, tmp_path_factory.mktemp("below") / "root", stack)
    logging.getLogger("psserver").removeHandler(handler)
    assert surprises == []


KNOWN = {"", *BY_NAME} - {"PSError"}
"""What may be said of a message: nothing, or an error that is no internal one."""

PROMPT = [name for name, verb in VERBS.items() if not verb.waits and name != "Leave"]
"""Verbs whose malformed requests are answered at once; well-formed ones may end the member's session."""


@pytest.mark.parametrize("verb", VERBS)
def test_a_pickle(attacked: Attacked, tmp_path: Path, verb: str) -> None:
    """Is bytes like any others, as a message, as a header, and as data."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for message in (bomb, Frame(bomb, 0, (memoryview(bomb),)).encode()):
        assert attacked.say(verb, message) in KNOWN
    assert not (tmp_path / "exploded").exists()
    attacked.serves()


MESSAGES = st.one_of(st.binary(max_size=200), st.builds(lambda header: Frame(header).encode(), st.binary(max_size=60)))


@given(verb=st.sampled_from(sorted(PROMPT)), message=MESSAGES)
def test_whatever_is_said(attacked: Attacked, verb: str, message: bytes) -> None:
    """Any bytes get an answer or a typed error, which is no internal one, and the server goes on."""
    assert attacked.say(verb, message) in KNOWN
    attacked.serves()


SESSIONS = {
    "Beat": pb.BeatRequest,
    "Propose": pb.ProposeRequest,
    "Watch": pb.WatchRequest,
    "Pull": pb.PullRequest,
    "Restore": pb.RestoreRequest,
}


@given(verb=st.sampled_from(sorted(SESSIONS)), rest=st.binary(max_size=80))
def test_whatever_follows_a_session(attacked: Attacked, verb: str, rest: bytes) -> None:
    """The same for who has one, whose bytes come further in; what waits is not waited for."""
    message = SESSIONS[verb](session=attacked.session).SerializeToString() + rest
    if VERBS[verb].waits:
        stub: Any = attacked.server._calls._stubs[verb]
        stub(message, metadata=attacked.server._calls._metadata, timeout=1).cancel()
    else:
        assert attacked.say(verb, message) in KNOWN
    attacked.server.status()


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("size", [2 << 30, 1 << 60, (1 << 64) - 1])
def test_an_announced_size(attacked: Attacked, size: int) -> None:
    """Takes no memory before what it announces has come; more than the server may hold is refused."""
    before = resident()
    header = pb.PushHeader(session=attacked.session, epoch=1, round=0, plan_id=b"p" * 32, size=size)
    message = Frame(header.SerializeToString(), 0, (memoryview(b"x" * 64),)).encode()
    assert attacked.say("Push", message) == "MemoryLimit"
    assert resident() - before < SOME_MIB
    attacked.serves()


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 33, 1 << 33), (1 << 20, 1 << 10, 1 << 10), (0, 1 << 63)])
def test_an_announced_shape(attacked: Attacked, shape: tuple[int, ...]) -> None:
    """The same for variables; with a value, the value of that size never comes."""
    before = resident()
    spec = pb.VariableSpec(name="huge", tensor=pb.TensorSpec(dtype="float32", shape=shape))
    for has_value in (False, True):
        header = pb.CreateHeader(
            session=attacked.session, ordinal=0, id=-1, spec=spec, servers=[0], has_value=has_value
        )
        with contextlib.suppress(ValueError):
            said = attacked.say("Create", Frame(header.SerializeToString(), 0, (memoryview(b"x" * 64),)).encode())
            assert said in ("MemoryLimit", "InvalidRequest", "VariableMismatch") or not (has_value or said)
    assert resident() - before < SOME_MIB
    attacked.serves()


OUTSIDE = [
    "../secret",
    "a/../../secret",
    "/etc",
    "//etc",
    "..",
    "\0",
    "~",
    "file:///etc",
    "s3://bucket/x",
    "a\nb",
    "x" * 5000,
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_stays_below_the_root(attacked: Attacked, path: str) -> None:
    """Whatever it says: nothing elsewhere is read or written, or told of."""
    secret = attacked.root.parent / "secret"
    secret.mkdir(exist_ok=True)
    (secret / "manifest.json").write_text("{}")
    for stage in ("look", "open", "prepare"):
        with pytest.raises(PSError) as caught:
            attacked.server.restore(attacked.session, path, Turn(0, 0, 1), RestoreOrder(stage)).result(SECONDS)
        assert type(caught.value) is not PSError, caught.value
    assert [path.name for path in secret.iterdir()] == ["manifest.json"]
    attacked.serves()


def test_a_message_that_is_too_long(attacked: Attacked) -> None:
    """One message has a limit, which gRPC holds before anybody looks into it."""
    with pytest.raises(InvalidRequest, match="larger than max"):
        attacked.server.propose(attacked.session, None, "x" * (8 << 20), None)
    attacked.serves()


# ---- The sockets ----


@given(said=st.lists(st.binary(max_size=300), max_size=4), data_port=st.booleans())
def test_whatever_comes_before_a_handshake(attacked: Attacked, said: list[bytes], data_port: bool) -> None:
    """Bytes of any kind, in any pieces, cost their connection and nothing else."""
    port = attacked.thread._server._lanes.port if data_port else attacked.thread.port
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock, contextlib.suppress(OSError):
        for part in said:
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)
        if data_port:
            while sock.recv(4096):
                pass
    attacked.serves()


def test_nothing_is_left_of_them(attacked: Attacked) -> None:
    """Of all that came before, no connection is kept."""
    lanes = attacked.thread._server._lanes
    eventually(lambda: not lanes._handshakes and not [c for c in lanes.connections if c.session is None])


# ---- Who may reach it ----

ANYWHERE = ["0.0.0.0", "::"]


@pytest.mark.parametrize("host", ANYWHERE)
@pytest.mark.parametrize("has", ["nothing", "a token", "TLS"])
def test_other_machines_are_kept_out(certificates: Certificates, host: str, has: str) -> None:
    """A server that they can reach has TLS and a token, or does not start; it says which flags are missing."""
    full = certificates.of("ps-0")
    security = {
        "nothing": Security(),
        "a token": Security(token=full.token),
        "TLS": Security(full.certificate, full.key, full.ca),
    }[has]
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    thread = ServerThread(core(), ServerConfig(PS0, host=host, security=security))
    with pytest.raises(ConfigError, match=r"other machines.*without.*--tls-cert.*--token-file.*--insecure"):
        thread.__enter__()


def test_other_machines_with_all_of_it(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    """TLS and a token open the door; so does --insecure, which says loudly that it does."""
    with guarded(certificates.of("ps-0"), host="0.0.0.0") as thread:
        assert thread.port
    assert "INSECURE" not in caplog.text
    with guarded(Security(), host="0.0.0.0", insecure=True) as thread:
        assert thread.port
    assert "INSECURE: /job:ps/task:0 listens to other machines on 0.0.0.0 without TLS and a token" in caplog.text
