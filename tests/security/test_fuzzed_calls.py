"""R19: whoever is no member of a job may say what he likes to its server: the job goes on, and its sums stay exact."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.kit.attacks import BOMB, Attacker, Process
from tests.kit.certificates import Certificates
from tests.kit.internals import MAX_CALLS, Frame, Hold, Read, Security, Watch, messages, pb
from tests.kit.lanes import Site
from tests.kit.rig import eventually

MIB = 1 << 20

LIFE = 0x5EED << 44
"""Of a server: the numbers of its sessions are none that an attack guesses."""

FEW = 8
"""Descriptors or threads that a server may have more after a storm: of its pools, and of gRPC's."""


@dataclass
class Siege:
    """A server with a job on it, and who attacks it.

    Attributes:
        site: what is attacked.
        attacker: who does.
        root: of the server's checkpoints.
        surprises: what the server did not foresee.
    """

    site: Site
    attacker: Attacker
    root: Path
    surprises: list[str]


@pytest.fixture(scope="module", params=["open", "secured"])
def siege(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Siege]:
    """One server for all attacks; where it asks for certificates, the sessions of others are said, too."""
    shown, name = (Security(), Security()), Security()
    if request.param == "secured":
        members = certificates.signed([f"{name}.paramserver" for name in ("worker-0", "worker-1", "chief-0")], -1, 1)
        shown, name = (certificates.of("ps-0"), members), certificates.signed(["worker-7.paramserver"], -1, 1)
    surprises: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: surprises.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psserver").addHandler(handler)
    above = tmp_path_factory.mktemp("above")
    with ExitStack() as stack:
        more: dict[str, Any] = {"root": above / "root", "memory_limit": 256 * MIB, "incarnation": LIFE}
        site = Site(stack, "grpc", elements=64, shown=shown, **more)
        others = [one.session for one in site.workers] if shown[0].tls else []
        site.thread._loop.set_exception_handler(lambda loop, context: surprises.append(str(context)))
        yield Siege(site, Attacker(site, name, others), above / "root", surprises)
    logging.getLogger("psserver").removeHandler(handler)
    assert surprises == []
    assert [path.name for path in above.iterdir() if path.name != "root"] == []


@given(data=st.data())
def test_whatever_is_called_the_job_goes_on(siege: Siege, data: st.DataObject) -> None:
    """Each call is answered or waits, with no internal error, in whatever order; every round has its exact sums."""
    for _ in range(data.draw(st.integers(1, 4))):
        verb, messages = siege.attacker.attack(data.draw)
        said = siege.attacker.send(verb, messages, leaves=data.draw(st.integers(0, 9)) == 0)
        event(f"{verb}: {said}")
        if said == "Fenced":
            siege.attacker.open()
    siege.site.round()
    assert siege.surprises == []


def test_nothing_is_left_of_them(siege: Siege) -> None:
    """No more calls wait than one session may have, no bell is kept, and no memory is reserved."""
    site, attacker = siege.site, siege.attacker
    attacker.open()  # ends the session that it had
    attacker.server.leave(attacker.session, "")
    core = site.core
    eventually(lambda: not site.thread._server._service._bells)
    assert all(len(core.machine.waiters.rows[kind]) <= MAX_CALLS for kind in (Hold, Watch))
    assert len(core.machine.waiters.rows[Read]) <= MAX_CALLS
    assert core.machine.rounds.sessions() == set()
    site.round()


# ---- A process ----


def left(process: psutil.Process) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    return process.num_fds(), process.num_threads()


def test_a_process_has_nothing_left_of_thousands(tmp_path: Path) -> None:
    """Of thousands of calls that are refused, wait, or are given up: no descriptor, no thread, little memory."""
    with ExitStack() as stack:
        site = Process(stack, tmp_path, "grpc", ["--memory-limit", "256MiB"])
        attacker = Attacker(site)
        storm(attacker, 50)
        site.round()
        before, memory = left(site.process), site.process.memory_info().rss
        storm(attacker, 250)
        site.round()
        eventually(lambda: all(now <= then + FEW for now, then in zip(left(site.process), before, strict=True)))
        assert site.process.memory_info().rss - memory < 64 * MIB
        assert [path.name for path in tmp_path.iterdir()] == []


def storm(attacker: Attacker, count: int) -> None:
    """Many calls of each kind at once, of clients who go away; and connections that say nothing of use."""
    site = attacker.site
    attacker.open()
    log = site.server.status().log
    watch = pb.WatchRequest(session=attacker.session, after=log, version=-1)
    pull = pb.PullRequest(session=attacker.session, variables=[site.variables[0].id], after=1 << 40)
    push = pb.PushHeader(session=attacker.session, epoch=99, size=1 << 20, plan_id=b"p" * 32)
    create = pb.CreateHeader(
        session=attacker.session, ordinal=0, id=-1, spec=messages.SPEC.to_pb(site.variables[0].spec)
    )
    calls: dict[str, list[bytes]] = {
        "Watch": [watch.SerializeToString()],
        "Pull": [pull.SerializeToString()],
        "Push": [Frame(push.SerializeToString(), 0, (memoryview(bytes(5000)),)).encode()],
        "Create": [Frame(create.SerializeToString()).encode()],
        "Propose": [pb.ProposeRequest(session=attacker.session, entry="x" * 10_000).SerializeToString()],
    }
    for _ in range(count // 50):
        begun = [attacker.begin(verb, said, 60.0) for verb, said in calls.items() for _ in range(50)]
        site.server.status()
        for call in begun:
            call.cancel()
    host, _, port = attacker.server.address.rpartition(":")
    for _ in range(count // 5):
        with socket.create_connection((host, int(port)), 5) as sock, contextlib.suppress(OSError):
            sock.sendall(BOMB)
