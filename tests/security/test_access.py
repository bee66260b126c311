"""The table of who may call what: each verb, for each certificate."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from psserver.transport.access import Access
from tests.kit.internals import (
    TOKEN_KEY,
    VERBS,
    Caller,
    Forbidden,
    InvalidRequest,
    Registry,
    Security,
    Task,
    Unauthenticated,
    bearer,
    messages,
    pb,
)
from tests.kit.rig import CHIEF, WORKERS

PS0 = Task("ps", 0)
SECURED = Security(b"certificate", b"key", b"ca", token="t" * 32)
OWNER, MADE_UP = 7, 1 << 60
"""The session of worker 1, and one that nobody has opened."""

CALLERS = ("worker-0", "worker-1", "chief-0", "ps-0", "admin", "nobody")
MAY: dict[Caller, set[str]] = {
    "task": {"worker-1"},
    "joiner": {"worker-1"},
    "session": {"worker-1"},
    "reader": {"worker-1"},
    "chief": {"chief-0", "worker-0"},
    "server": {"ps-0"},
    "spare": {"ps-0"},
    "mover": {"ps-0", "admin", "chief-0", "worker-0"},
    "anyone": {*CALLERS} - {"nobody"},
}
"""Who may make a call for worker 1, with its session where the verb has one."""

VERBS_OF: dict[str, Caller] = {
    "Open": "task",
    "Enlist": "joiner",
    "Beat": "session",
    "Leave": "session",
    "Create": "session",
    "CreateBatch": "session",
    "Propose": "session",
    "Watch": "reader",
    "Approve": "chief",
    "Push": "session",
    "Pull": "reader",
    "Snapshot": "chief",
    "Restore": "session",
    "Schedule": "session",
    "Take": "session",
    "Fetch": "session",
    "HandOut": "session",
    "Status": "anyone",
    "Recent": "anyone",
    "Exchange": "anyone",
    "Introduce": "server",
    "Vote": "session",
    "Offer": "spare",
    "Move": "mover",
}


@pytest.fixture
def access() -> Access:
    """That of a secured server, on which worker 1 has opened a session."""
    registry = Registry(PS0)
    registry.enter(OWNER, WORKERS[1])
    return Access(PS0, SECURED, registry)


def names_of(caller: str) -> frozenset[str]:
    return frozenset() if caller == "nobody" else frozenset((caller,))


def request_of(verb: str, session: int = OWNER, task: Task = WORKERS[1], drives: bool = False) -> Any:
    kind = VERBS[verb].request
    said: dict[str, Any] = {"session": session} if "session" in kind.DESCRIPTOR.fields_by_name else {}
    if verb == "Open":
        said = {"task": messages.TASK.to_pb(task), "drives": drives}
    if verb == "Enlist":
        said = {"task": messages.TASK.to_pb(task)}
    return kind(**said)


def those_let_in(access: Access, verb: str, request: Any) -> set[str]:
    """Who may make a request; everybody else is refused as such."""
    found = set()
    for caller in CALLERS:
        with contextlib.suppress(Forbidden):
            access.check(VERBS[verb], request, names_of(caller))
            found.add(caller)
    return found


def test_every_verb_says_who_may_call_it() -> None:
    """The rule is written twice, here and in the table: neither changes alone."""
    assert {name: verb.caller for name, verb in VERBS.items()} == VERBS_OF


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_for_its_callers(access: Access, verb: str) -> None:
    """A session is its task's alone; a chief task or worker 0 decides; who looks is anyone of the job."""
    assert those_let_in(access, verb, request_of(verb)) == MAY[VERBS_OF[verb]]


@pytest.mark.parametrize("verb", [name for name, caller in VERBS_OF.items() if caller in ("session", "reader")])
def test_a_session_is_not_made_up(access: Access, verb: str) -> None:
    """Nobody may use one that was not opened; who only looks needs none, and who does more needs one."""
    assert those_let_in(access, verb, request_of(verb, MADE_UP)) == set()
    looks = MAY["anyone"] if VERBS_OF[verb] == "reader" else set()
    assert those_let_in(access, verb, request_of(verb, 0)) == looks


def test_who_drives_is_a_chief_as_well(access: Access) -> None:
    """A certificate of a worker that may not be chief opens no session that drives; nor does a chief's for another."""
    assert those_let_in(access, "Open", request_of("Open", drives=True)) == set()
    assert those_let_in(access, "Open", request_of("Open", task=CHIEF, drives=True)) == {"chief-0"}
    assert those_let_in(access, "Open", request_of("Open", task=WORKERS[0], drives=True)) == {"worker-0"}


def test_who_joins_with_a_certificate_says_which_worker_it_is(access: Access) -> None:
    """Whichever index is free is for those without: a certificate is of one worker."""
    assert those_let_in(access, "Enlist", pb.EnlistRequest(key=1)) == set()
    access.check(VERBS["Enlist"], pb.EnlistRequest(key=1), None)


def test_who_moves_a_server(access: Access) -> None:
    """A server moves itself alone, and no other; that one has moved, a chief alone says."""
    assert those_let_in(access, "Move", pb.MoveRequest(server=1)) == {"admin", "chief-0", "worker-0"}
    assert those_let_in(access, "Move", pb.MoveRequest(server=0, token=1)) == {"chief-0", "worker-0"}


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_checked_is_in_the_request(verb: str) -> None:
    """A verb whose caller is somebody in particular has a request that says who."""
    particular = {"session": {"session"}, "reader": {"session"}, "task": {"task", "drives"}}
    particular |= {"server": {"server"}, "mover": {"server", "token"}}
    particular |= {"joiner": {"task"}}
    needed = particular.get(VERBS[verb].caller, set())
    assert needed <= {*VERBS[verb].request.DESCRIPTOR.fields_by_name}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_lane_is_for_who_has_token_and_certificate(access: Access, caller: str) -> None:
    """Both, or nobody is told anything."""
    token = access.registry.lane_token(OWNER)
    for session, wrong in ((OWNER, b""), (OWNER, bytes(16)), (OWNER, token[:15]), (MADE_UP, token)):
        with pytest.raises(InvalidRequest, match="not shown whose it is"):
            access.admit_lane(pb.LaneHello(session=session, token=wrong), names_of(caller))
    hello = pb.LaneHello(session=OWNER, token=token)
    if caller == "worker-1":
        access.admit_lane(hello, names_of(caller))
    else:
        with pytest.raises(Forbidden):
            access.admit_lane(hello, names_of(caller))


def test_the_token_comes_first(access: Access) -> None:
    """Of a caller without it nothing else is looked at; with it, the names on its certificate are those of tasks."""

    def look() -> Any:
        pytest.fail("its certificate was looked at")

    for said in ((), ((TOKEN_KEY, "t" * 32),), ((TOKEN_KEY, bearer("u" * 32)),), ((TOKEN_KEY, b"\xff"),)):
        with pytest.raises(Unauthenticated):
            access.admit(said, look)
    shown = {"peer_dns": [b"worker-1.paramserver", b"example.org", b"\xff"], "peer_email": [b"chief-0.paramserver"]}
    assert access.admit(((TOKEN_KEY, bearer("t" * 32)),), lambda: shown) == {"worker-1"}


def test_a_secured_server_takes_nobody_for_somebody(access: Access) -> None:
    """A caller without a certificate has no names; only where no certificates are asked for there is no question."""
    assert access.admit(((TOKEN_KEY, bearer("t" * 32)),), dict) == frozenset()
    assert Access(PS0, Security(), Registry(PS0)).admit((), dict) is None
