"""The table of who may call what: each verb, for each certificate."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from psserver.network.access import DNS_NAMES, Access
from tests.kit import internals as inside
from tests.kit.rig import CHIEF, WORKERS

PS0 = inside.Task("ps", 0)
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

    for said in (
        (),
        ((inside.TOKEN_KEY, "t" * 32),),
        ((inside.TOKEN_KEY, inside.bearer("u" * 32)),),
        ((inside.TOKEN_KEY, b"\xff"),),
    ):
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
    names = access.admit([(inside.TOKEN_KEY, inside.bearer(SECURED.token))], lambda: shown)
    assert names == frozenset()
    with pytest.raises(inside.Forbidden, match="the caller's certificate is of no task"):
        access.check(inside.VERBS["Status"], None, names)
    shown[DNS_NAMES] += [b"ps-10.paramserver", b"ps-standby-2.paramserver", b"admin.paramserver", b"ps-1.example"]
    assert access.admit([(inside.TOKEN_KEY, inside.bearer(SECURED.token))], lambda: shown) == {
        "ps-10",
        "ps-standby-2",
        "admin",
    }
