"""What is kept of a server's stimuli, and the words for it."""

from __future__ import annotations

import gc
import inspect
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from psserver.core.machine import Machine
from psserver.core.peers import VotingPeers
from psserver.core.stimuli import KEPT, LONGEST, QUIET, Stimuli, Stimulus, told
from psserver.effects import Work
from psserver.plans.prepared import PreparedPlan
from psserver.registry import Registry
from psserver.services.chunks import ChunkQueue
from psserver.services.closures import Closures
from psserver.services.joining import JoiningWorkers
from psserver.services.service import Service
from psserver.services.standbys import Standbys
from pswire import api
from pswire.api import Contribution
from pswire.cluster import Task
from pswire.errors import CheckpointError, Fenced, InvalidRequest, PSError, ServerGone
from pswire.model.chunks import ChunkAsk
from pswire.model.closures import ClosureOrder, ClosureResult
from pswire.model.consistency import ASYNC
from pswire.model.log import Approved, Created, Generation, GenerationClosed, Start
from pswire.model.places import Standby
from pswire.model.plan import PlacedVariable, Plan, Turn, VariableSpec
from pswire.model.saved import RestoreOrder
from pswire.model.status import Happened
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from pswire.security.session_numbers import COUNT_BITS, TAG_BITS
from pswire.servers import votes as said_by_servers
from pswire.servers.checkpoints import RestoreRequest, SnapshotRequest
from pswire.servers.chunks import AssignBatchesRequest
from pswire.servers.closures import FetchRequest, ScheduleRequest, TakeRequest
from pswire.servers.places import MoveRequest, OfferRequest
from pswire.servers.requests import REQUESTS, ServerRequest
from pswire.servers.votes import Vote
from tests.kit.rig import CHIEF, WORKERS, checkpoint

W0 = WORKERS[0]
SESSION, STRANGER = ((0xFACE << COUNT_BITS) + count << TAG_BITS for count in (7, 8))
"""The session of worker 0, and one that nobody has opened here."""

TOKEN, LOT, DRAWN = 0x1234_5678_9ABC, 0x2345_6789_ABCD, 0x3456_789A_BCDE
"""A chief's token, what a process is known by that opens its session again, and what a token is drawn with."""

SPEC = VariableSpec("dense/kernel", TensorSpec("float32", (2, 3)))
VARIABLE = PlacedVariable(4, SPEC, (0,))
PLAN = checkpoint("run/ckpt-1", (0,))
ID = PLAN.id.hex()[:8]
PREPARED = PreparedPlan(PLAN, 0, False)
ENTRIES = [Created(VARIABLE), Created(VARIABLE), Approved(PLAN), GenerationClosed(Generation(1, ()))]


def write_shard() -> None:
    """Work by its name."""


WORK = Work("files", write_shard)
WHO = "/job:worker/task:0, session 7"
FUTURE: Future[Any] = Future()

OF_REQUESTS: list[tuple[ServerRequest[Any], str]] = [
    (api.OpenRequest(W0, 1, LOT, False, job="the-job", term=3), "/job:worker/task:0: 1 replica, sync"),
    (api.OpenRequest(W0, 2, LOT, False, ASYNC), "/job:worker/task:0: 2 replicas, async"),
    (api.OpenRequest(CHIEF, 0, LOT, True, term=3), "/job:chief/task:0: drives"),
    (api.EnlistRequest(None, LOT), "asks for an index"),
    (api.EnlistRequest(Task("worker", 2), LOT), "/job:worker/task:2"),
    (api.HeartbeatRequest(SESSION, 5, PLAN.id), f"{WHO}: waits in round 5"),
    (api.HeartbeatRequest(SESSION, -1, b""), WHO),
    (api.LeaveRequest(SESSION, ""), f"{WHO}: cleanly"),
    (api.LeaveRequest(STRANGER, "it failed"), "session 8: it failed"),
    (api.CreateBatchRequest(SESSION, (VARIABLE, VARIABLE)), f"{WHO}: 2 variables"),
    (api.PullRequest(SESSION, (1, 2, 3), 5), f"{WHO}: 3 variables after round 5"),
    (api.PullRequest(0, (1,), -1), "no session: 1 variable"),
    (api.ProposeRequest(SESSION, PLAN, "", None), f"{WHO}: plan {ID}"),
    (api.ProposeRequest(SESSION, None, f"plan:{PLAN.id.hex()}", None), f"{WHO}: waits at plan:{ID}"),
    (api.ProposeRequest(SESSION, None, "", Start(2, 5)), f"{WHO}: new members of generation 2 begin with round 5"),
    (api.ProposeRequest(SESSION, PLAN, "dataset:1", None), f"{WHO}: plan {ID}, waits at dataset:1"),
    (api.WatchRequest(SESSION, 3, 9), f"{WHO}: the log from 3 on"),
    (api.WatchRequest(SESSION, 3, api.UNTIL_ENDED), f"{WHO}: its end"),
    (api.ApproveRequest(TOKEN, 3, ENTRIES), "the log from 3 on: 2 created, 1 approved, 1 generation closed"),
    (api.ApproveRequest(TOKEN, 0, ()), "the log from 0 on: nothing"),
    (SnapshotRequest(TOKEN, PLAN.id, ""), f"plan {ID}, the shard"),
    (SnapshotRequest(TOKEN, PLAN.id, "{}"), f"plan {ID}, the manifest"),
    (RestoreRequest(SESSION, "run", Turn(1, 2, 3), RestoreOrder("open")), f"{WHO}: open 'run'"),
    (ScheduleRequest(SESSION, ClosureOrder(3, "step")), f"{WHO}: closure 3 of step"),
    (ScheduleRequest(SESSION, ClosureOrder(joins=True)), f"{WHO}: waits for all closures"),
    (ScheduleRequest(SESSION, ClosureOrder()), f"{WHO}: looks"),
    (TakeRequest(SESSION, ("f()",)), f"{WHO}: waits for a closure"),
    (TakeRequest(SESSION, (), ClosureResult(3)), f"{WHO}: closure 3 is over, waits for a closure"),
    (
        TakeRequest(SESSION, (), ClosureResult(3, kind="KeyError")),
        f"{WHO}: closure 3 is over: KeyError, waits for a closure",
    ),
    (FetchRequest(SESSION, 3, 0), f"{WHO}: the result of closure 3"),
    (
        AssignBatchesRequest(SESSION, ChunkAsk(1, 1, 2, 9, want=1, needs=True)),
        f"{WHO}: asks for 1 chunk of dataset 1, pass 2",
    ),
    (
        AssignBatchesRequest(SESSION, ChunkAsk(1, 1, 2, 9, want=3, done=(7, 8))),
        f"{WHO}: asks for 3 chunks ahead of dataset 1, pass 2, 2 done",
    ),
    (AssignBatchesRequest(SESSION, ChunkAsk(1, 1, 2, 9, looks=True)), f"{WHO}: looks at dataset 1"),
    (OfferRequest(Standby("ps9:1")), "ps9:1 waits for the place of a server"),
    (MoveRequest(1), "server 1 moves to any standby server"),
    (MoveRequest(1, "ps9:1", TOKEN), "server 1 moves to ps9:1"),
]
"""Requests, and their words."""

BESIDE: dict[str, tuple[Any, ...]] = {"open": (DRAWN,), "propose": (PREPARED,), "approve": ({},)}
"""What the machine gets with a request that waits for nothing."""

WORDS: dict[str, list[tuple[tuple[Any, ...], str]]] = {
    "worked": [((WORK, None, None), "write shard (files)")],
    "initialize_batch": [(((VARIABLE,), 1, {4: np.zeros(3)}, None), "1 variable, with values of a checkpoint")],
    "part": [((SESSION,), f"{WHO}: watches no more")],
    "holds": [((TOKEN,), "a chief's token")],
    "push": [
        (
            (Contribution(SESSION, 0, 0, b"", first_values=(4, 5)), Payload((), 2048), None, FUTURE),
            f"{WHO}: 2 first values, 2 KiB",
        ),
        (
            (Contribution(SESSION, 1, 5, PLAN.id), Payload((), 40), None, FUTURE),
            f"{WHO}: round 5 of generation 1, 40 bytes",
        ),
    ],
    "hear": [
        ((1, Vote(7, 5, PLAN.id, 1, 0, frozenset((SESSION,)))), "server 1 votes in round 5"),
        ((1, Vote(7, 5, PLAN.id, 1, 1, error=InvalidRequest("no"))), "server 1 votes in round 5, again: no"),
    ],
    "introduce": [((2, 77), "server 2")],
    "testify": [((2, said_by_servers.Testimony(7, 1)), "server 2 has heard 0 votes of server 1, which is gone")],
    "outlive": [((ServerGone("the job goes on without it"),), "the job goes on without it")],
    "meet": [((2,), "server 2 is connected")],
    "miss": [((2, "nothing listens there"), "server 2 is not connected: nothing listens there")],
    "close": [((), "the server ends")],
}
"""Arguments of each stimulus after the time, and its words."""

for request, words in OF_REQUESTS:
    beside = (FUTURE,) if request.waits else BESIDE.get(request.method, ())
    WORDS.setdefault(request.method, []).append(((request, *beside), words))

WORDLESS = {"tick", "look", "asked"}
"""Stimuli that say nothing, and that nothing refuses."""

LOOKS = (api.StatusRequest, api.EventsRequest)
"""Requests that change nothing: the core answers them."""

EVERY = [pytest.param(name, *row, id=f"{name} {at}") for name, rows in WORDS.items() for at, row in enumerate(rows)]


@pytest.fixture
def registry() -> Registry:
    """In which worker 0 has a session."""
    registry = Registry(Task("ps", 0))
    registry.enter(SESSION, W0)
    return registry


SERVICES: tuple[type[Service], ...] = (Closures, ChunkQueue, JoiningWorkers, Standbys, VotingPeers)


def serving(name: str) -> type[Service] | None:
    """The service that has a verb of this name."""
    return next((service for service in SERVICES if name in service.verbs), None)


def stimuli_of(machine: type[Machine]) -> set[str]:
    """The stimuli of a machine: what takes the time first and answers with effects."""
    methods = inspect.getmembers(machine, inspect.isfunction)
    found = {name for name, method in methods if str(method.__annotations__.get("return")).startswith("Outcome")}
    return {name for name in found if not name.startswith("_")}


def kept(name: str, *args: Any, error: PSError | None = None) -> Stimuli:
    stimuli = Stimuli()
    stimuli.keep(10.0, name, args, error)
    return stimuli


def only(stimuli: Stimuli, registry: Registry) -> Happened:
    (happened,) = told(stimuli.last(), 12.5, registry)
    return happened


# ---- Words ----


def test_every_stimulus_has_words() -> None:
    """A new method of the machine is told to people, too, or is one of those that say nothing."""
    known = stimuli_of(Machine).union(*(service.verbs for service in SERVICES))
    assert known == {*WORDS} | WORDLESS
    assert known >= QUIET >= WORDLESS


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS.values() if kind not in LOOKS])
def test_every_request_is_a_stimulus(kind: type[ServerRequest[Any]]) -> None:
    """The machine has a method of the verb's name, which takes the request, and answers as the request says."""
    service = serving(kind.method)
    hints = get_type_hints(getattr(service or Machine, kind.method))
    assert hints["asked"] is kind
    if kind.waits:
        assert hints["future"] == Future[kind.answer]  # type: ignore[name-defined]
    else:
        assert isinstance(hints["return"], GenericAlias)
        assert kind.answer in (found := get_args(hints["return"])[0], *get_args(found))


@pytest.mark.parametrize(("name", "args", "words"), EVERY)
def test_a_stimulus_in_words(registry: Registry, name: str, args: tuple[Any, ...], words: str) -> None:
    """By whom and about what; the arguments are those that the machine takes. No secret is in the words: neither a
    chief's token, nor a transport's, nor what was drawn by lot, nor the whole number of a session."""
    service = serving(name)
    first = W0 if service is not None and service.for_sessions else 0.0
    inspect.signature(getattr(service or Machine, name)).bind(None, first, *args)
    happened = only(kept(name, *args), registry)
    assert (happened.seconds, happened.what, happened.refused) == (2.5, name, "")
    assert happened.said == words
    said = str(only(kept(name, *args, error=Fenced("it ended")), registry))
    transport = registry.transport_token(SESSION)
    for secret in (TOKEN, LOT, DRAWN, SESSION, STRANGER):
        assert not any(form in said.lower() for form in (str(secret), f"{secret:x}", repr(secret.to_bytes(8))))
    assert transport.hex() not in said
    assert repr(transport) not in said


def test_nothing_is_held_in_the_future(registry: Registry) -> None:
    """A clock that goes back tells of nothing that is to come."""
    (happened,) = told(kept("close").last(), 9.0, registry)
    assert happened.seconds == 0


# ---- What is kept ----


@pytest.mark.parametrize("name", sorted(QUIET))
def test_what_is_quiet_is_kept_where_it_was_refused(registry: Registry, name: str) -> None:
    args = WORDS[name][0][0] if name in WORDS else ()
    stimuli = Stimuli()
    stimuli.note(10.0, "part", (SESSION,))
    stimuli.note(11.0, name, args)
    assert [one.what for one in told(stimuli.last(), 12.0, registry)] == ["part"]
    stimuli.refused(11.0, name, args, Fenced("it ended"))
    first, second = told(stimuli.last(), 12.0, registry)
    assert (first.what, first.refused) == ("part", "")
    assert (second.what, second.refused) == (name, "Fenced: it ended")


def test_who_is_refused_is_told_once(registry: Registry) -> None:
    """With why; work that came to nothing brings its own error."""
    left, worked = Stimuli(), Stimuli()
    left.note(10.0, "leave", (api.LeaveRequest(SESSION, ""),))
    left.refused(10.0, "leave", (api.LeaveRequest(SESSION, ""),), Fenced("it ended"))
    assert only(left, registry) == Happened(2.5, "leave", f"{WHO}: cleanly", "Fenced: it ended")
    worked.note(10.0, "worked", (WORK, None, CheckpointError("no space left")))
    assert only(worked, registry).refused == "CheckpointError: no space left"


def test_a_record_gets_all_of_each(registry: Registry) -> None:
    """Quiet ones, too, arguments as they came, and all work; people are told of work that failed."""
    stimuli, recorded, payload, error = Stimuli(), [], Payload(), CheckpointError("no space left")
    stimuli.made(0.0, WORK, "result", None)
    stimuli.record = recorded.append
    args = (Contribution(SESSION, 1, 5, b""), payload, None, Future[Any]())
    stimuli.note(1.0, "tick", ())
    stimuli.note(2.0, "push", args)
    stimuli.made(10.0, WORK, None, error)
    made = Stimulus(10.0, "made", (WORK, None, error))
    assert recorded == [Stimulus(1.0, "tick", ()), Stimulus(2.0, "push", args), made]
    assert recorded[1].args[1] is payload
    told_of = told(stimuli.last(), 12.5, registry)[-1]
    assert told_of == Happened(2.5, "worked", "write shard (files)", "CheckpointError: no space left")


def test_the_last_hundred_are_kept(registry: Registry) -> None:
    """In their order; one that was refused drops no other."""
    stimuli = Stimuli()
    for number in range(KEPT + 30):
        stimuli.note(float(number), "leave", (api.LeaveRequest(SESSION, str(number)),))
    stimuli.refused(200.0, "leave", (api.LeaveRequest(SESSION, "the last"),), Fenced("it ended"))
    found = told(stimuli.last(), 200.0, registry)
    assert [one.said for one in found] == [*(f"{WHO}: {number}" for number in range(30, KEPT + 29)), f"{WHO}: the last"]


def test_a_peer_s_text_is_one_line_that_does_nothing(registry: Registry) -> None:
    """No new line, no order to the terminal, no half of a character, and no more than fits."""
    stimuli = kept(
        "leave", api.LeaveRequest(SESSION, "a\nb\x1b[2Jc\udc80d" + 9999 * "e"), error=PSError("f\ng\x07h" + 9999 * "i")
    )
    happened = only(stimuli, registry)
    assert happened.said.startswith(f"{WHO}: a b [2Jc deee")
    assert happened.refused.startswith("PSError: f g hiii")
    for text in (happened.said, happened.refused):
        assert len(text) == LONGEST
        assert text.isprintable()
        text.encode()
    assert len(str(stimuli.last())) < 3 * LONGEST


# ---- What is held ----


class Large:
    """What takes memory."""


@dataclass
class Result:
    large: Large


def test_nothing_large_is_held() -> None:
    """Neither a payload, an array, a plan or a work's arguments, nor the frames of an error."""
    payload, array, prepared = Payload.pack([np.zeros(4)]), np.zeros(4), PreparedPlan(Plan(), 0, False)
    given, result, frame = Large(), Result(Large()), Large()

    def fail() -> None:
        local = frame  # noqa: F841
        raise CheckpointError("no space left")

    with pytest.raises(CheckpointError) as caught:
        fail()
    stimuli = Stimuli()
    stimuli.note(1.0, "push", (Contribution(SESSION, 1, 5, b""), payload, fail, Future()))
    stimuli.keep(1.0, "initialize_batch", ((VARIABLE,), 1, {4: array}, None), None)
    stimuli.note(1.0, "approve", (api.ApproveRequest(TOKEN, 0, ENTRIES), {b"": prepared}))
    stimuli.note(1.0, "propose", (api.ProposeRequest(SESSION, Plan(), "", None), prepared))
    stimuli.note(1.0, "worked", (Work("files", write_shard, (given,)), result, caught.value))
    stimuli.refused(1.0, "leave", (api.LeaveRequest(SESSION, ""),), caught.value)
    refs = [weakref.ref(each) for each in (payload, array, prepared, given, result, caught.value)]
    del payload, array, prepared, given, result, caught
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_numbers_of_variables_are_not_held() -> None:
    """A contribution may want a hundred thousand, and a hundred of those are kept."""
    wanted = tuple(range(100_000))
    stimuli = Stimuli()
    stimuli.note(1.0, "push", (Contribution(SESSION, 1, 5, b"", want=wanted), Payload(), None, Future()))
    stimuli.note(1.0, "pull", (api.PullRequest(SESSION, wanted, 5), Future()))
    order = RestoreOrder("open", {str(n): n for n in wanted})
    stimuli.note(1.0, "restore", (RestoreRequest(SESSION, "run", Turn(), order), Future()))
    assert len(str(stimuli.last())) < LONGEST
