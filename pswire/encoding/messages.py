"""The table of values and the generated protobuf classes that they travel as: used by both rims, and by nobody else.

Each row has `to_pb` and `from_pb`, made by the mapper. Reading checks what the type system of protobuf cannot: unknown
numbers of enumerations and missing choices raise `InvalidRequest`. Written by hand is what has its payload beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from operator import attrgetter
from weakref import ref

from pswire.api import (
    Contribution,
    CreateBatchRequest,
    ProposeRequest,
    PullReply,
    PullRequest,
    RoundReply,
    RowRead,
    TableQuestion,
)
from pswire.cluster import JOBS, Task
from pswire.encoding.mapper import Mapper, MessageCodec
from pswire.encoding.verbs import parse, refusal_from_pb, refusal_to_pb
from pswire.errors import InvalidRequest, PSError
from pswire.limits import MAX_BATCH_VARIABLES, MAX_PLAN_BYTES, MAX_PLAN_ITEMS, MAX_PLAN_NODES
from pswire.model.closures import (
    ClosureName,
    ClosureState,
)
from pswire.model.compression import CodecKind
from pswire.model.consistency import Consistency, Mode
from pswire.model.log import Generation, LogEntry, Position
from pswire.model.plan import (
    Form,
    Nonfinite,
    Plan,
    ReduceOp,
    RefKind,
    Sparse,
    VariableSpec,
)
from pswire.model.program import Attr, InputKind
from pswire.model.saved import RestoreOrder, RestoreStage
from pswire.model.tables import (
    Admission,
    Eviction,
    Initializer,
    KeyDtype,
    Unknown,
)
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers.votes import Digest, LateContribution, Testimony, Vote
from pswire.traces.traceparent import well_formed

# ---- What is not as the fields' types say ----


def _task_to_pb(task: Task) -> pb.Task:
    return pb.Task(job=task.job, index=task.index)


def _task_from_pb(message: pb.Task) -> Task:
    if message.job not in JOBS:
        raise InvalidRequest(f"unknown job {message.job!r}; known are {', '.join(JOBS)}")
    return Task(message.job, message.index)


def _attr_to_pb(attr: tuple[str, Attr]) -> pb.Attr:
    name, value = attr
    match value:
        case bool():
            return pb.Attr(name=name, flag=value)
        case int():
            return pb.Attr(name=name, number=value)
        case float():
            return pb.Attr(name=name, real=value)
        case str():
            return pb.Attr(name=name, text=value)
        case tuple():
            return pb.Attr(name=name, numbers=pb.Numbers(values=value))
        case None:
            return pb.Attr(name=name)


def _attr_from_pb(message: pb.Attr) -> tuple[str, Attr]:
    match message.WhichOneof("value"):
        case None:
            return message.name, None
        case "numbers":
            return message.name, tuple(message.numbers.values)
        case chosen:
            return message.name, getattr(message, chosen)


def _admit_plan(message: pb.Plan) -> None:
    """Raises `InvalidRequest` for a plan of so many messages that reading them takes long; most may be empty."""
    if message.ByteSize() > MAX_PLAN_BYTES:
        raise InvalidRequest(f"a compiled step has {message.ByteSize()} bytes; at most {MAX_PLAN_BYTES} are allowed")
    nodes = sum(len(program.nodes) for program in message.programs[:MAX_PLAN_NODES])
    if nodes > MAX_PLAN_NODES:
        raise InvalidRequest(
            f"the update functions of a compiled step have {nodes} operations; at most {MAX_PLAN_NODES} are allowed"
        )
    items = len(message.reductions) + len(message.operands) + len(message.programs) + len(message.applies)
    items += len(message.returned) + len(message.trims) + nodes
    if items <= MAX_PLAN_ITEMS:
        items += sum(len(p.inputs) + len(p.assigns) + len(p.outputs) for p in message.programs)
        items += sum(len(apply.args) for apply in message.applies)
        items += sum(len(node.attrs) for program in message.programs for node in program.nodes)
    if items > MAX_PLAN_ITEMS:
        raise InvalidRequest(f"a compiled step has {items} parts; at most {MAX_PLAN_ITEMS} are allowed")


def _admit_batch(message: pb.CreateBatchRequest) -> None:
    if len(message.variables) > MAX_BATCH_VARIABLES:
        count = len(message.variables)
        raise InvalidRequest(f"a batch has {count} variables; at most {MAX_BATCH_VARIABLES} are allowed")


# ---- The table; a row may use those above it. What its fields alone say of a class needs no row ----

MAPPER = Mapper()

MAPPER.words(Mode, pb.Mode, "unknown mode {}")
MAPPER.words(InputKind, pb.Input.Kind, "unknown kind of input {}")
MAPPER.words(RefKind, pb.Ref.Kind, "unknown kind of value {}")
MAPPER.words(Nonfinite, pb.Nonfinite, "unknown choice {} for NaN and infinity")
MAPPER.words(ReduceOp, pb.Reduction.Op, "unknown reduction {}")
MAPPER.words(Form, pb.Reduction.Form, "unknown form {} of gradients")
MAPPER.words(CodecKind, pb.Codec.Kind, "unknown codec {} of gradients")
MAPPER.words(KeyDtype, pb.TableSpec.KeyDtype, "unknown dtype {} of keys")
MAPPER.words(Unknown, pb.TableSpec.Unknown, "unknown value {} of keys without a row")
MAPPER.words(TableQuestion, pb.TableRead.Question, "unknown question {} to a table")
MAPPER.words(Sparse, pb.Apply.Sparse, "unknown way {} of updates with rows")
MAPPER.words(RestoreStage, pb.RestoreStage, "a restore has no stage {}")
MAPPER.words(ClosureState, pb.FetchReply.State, "a closure has no state {}")

MAPPER.pair(TensorSpec, pb.TensorSpec, check=TensorSpec.check)
MAPPER.choice(Initializer, pb.Initializer, "a table has no initializer")
MAPPER.choice(Admission, pb.Admission, "a table's filter has no kind")
MAPPER.choice(Eviction, pb.Eviction, "a table's eviction policy has no kind")
MAPPER.pair(VariableSpec, pb.VariableSpec, check=VariableSpec.check)
TASK = MAPPER.add(Task, MessageCodec(pb.Task, _task_to_pb, _task_from_pb))
POSITION = MAPPER.pair(Position, pb.Position)
MAPPER.pair(Consistency, pb.Consistency, check=Consistency.check)
GENERATION = MAPPER.pair(Generation, pb.Generation)
MAPPER.add(tuple[str, Attr], MessageCodec(pb.Attr, _attr_to_pb, _attr_from_pb))
PLAN = MAPPER.pair(Plan, pb.Plan, admit=_admit_plan)
ENTRY: MessageCodec[LogEntry, pb.Entry] = MAPPER.choice(LogEntry, pb.Entry, "an entry of the log is empty")
MAPPER.add(PSError, MessageCodec(pb.Refusal, refusal_to_pb, refusal_from_pb))
MAPPER.pair(RestoreOrder, pb.RestoreOrder, flags={"names": "named"})
ROW_READ = MAPPER.pair(RowRead, pb.RowRead)
DIGEST = MAPPER.pair(Digest, pb.Digest)
CLOSURE = MAPPER.pair(ClosureName, pb.ClosureName)
MAPPER.pair(CreateBatchRequest, pb.CreateBatchRequest, admit=_admit_batch)
MAPPER.pair(ProposeRequest, pb.ProposeRequest, check=lambda found: replace(found, trace=well_formed(found.trace)))
PULL = MAPPER.pair(PullRequest, pb.PullRequest)


# ---- Of each round: the payload comes beside the message ----


def contribution_to_pb(contribution: Contribution, size: int) -> pb.PushHeader:
    """Makes the header of a push whose payload has `size` bytes."""
    return pb.PushHeader(
        session=contribution.session,
        generation=contribution.generation,
        round=contribution.round,
        plan_id=contribution.plan_id,
        weights=contribution.weights,
        more=contribution.more,
        positions=[POSITION.to_pb(p) for p in contribution.positions],
        want=contribution.want,
        observes=contribution.observes,
        start=contribution.start,
        size=size,
        nonfinite=contribution.nonfinite,
        follows=contribution.previous + 1,
        first_values=contribution.first_values,
        rows=contribution.rows,
        lookups=map(ROW_READ.to_pb, contribution.lookups),
        seconds=contribution.seconds,
        closure=None if contribution.closure is None else CLOSURE.to_pb(contribution.closure),
        chunks=contribution.chunks,
        alone=contribution.alone,
        trace=contribution.trace,
        host=contribution.host,
        parts=[contribution_to_pb(part, 0) for part in contribution.parts],
        hints=map(ROW_READ.to_pb, contribution.hints),
        batch=contribution.batch,
    )


def contribution_from_pb(message: pb.PushHeader) -> Contribution:
    """Reads the header of a push."""
    return Contribution(
        message.session,
        message.generation,
        message.round,
        message.plan_id,
        tuple(message.weights),
        message.more,
        tuple([POSITION.from_pb(p) for p in message.positions]),
        tuple(message.want),
        message.observes,
        message.start,
        tuple(message.nonfinite),
        tuple(message.first_values),
        message.follows - 1,
        tuple(message.rows),
        tuple(map(ROW_READ.from_pb, message.lookups)),
        message.seconds,
        CLOSURE.from_pb(message.closure) if message.HasField("closure") else None,
        tuple(message.chunks),
        message.alone,
        well_formed(message.trace),
        message.host,
        tuple([contribution_from_pb(part) for part in message.parts]),
        tuple(map(ROW_READ.from_pb, message.hints)),
        message.batch,
    )


MAX_STEADY = 64
"""Pushes of which an encoder keeps what they say, each of another plan."""

MAX_STEADY_BYTES = 1 << 16
"""Bytes of a header that is kept: thousands of variables have one of this size."""

MAX_KNOWN = 4
"""Headers that a decoder knows: a loop alternates between a few steps."""

_VARYING = ("round", "previous", "positions")
"""The fields in which the pushes of a loop differ."""

_STEADY = attrgetter(*(each.name for each in fields(Contribution) if each.name not in _VARYING))


def _varying(said: Contribution) -> bytes:
    """Returns the fields that vary, encoded. Messages one after another are one message with the fields of all."""
    found = pb.PushHeader(round=said.round, follows=said.previous + 1)
    if said.positions:
        found.positions.extend(map(POSITION.to_pb, said.positions))
    return found.SerializeToString()


class PushEncoder:
    """Encodes the headers of pushes: what a push says as the last one of its plan did, once. Used by any thread.

    The fields that vary come last. The bytes before them stay the same from round to round.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[object, bytes]] = {}  # by plan

    def encode(self, contribution: Contribution, size: int) -> bytes:
        """Returns the encoded header of a push whose payload has `size` bytes."""
        said = _STEADY(contribution), size
        known = self._known.get(contribution.plan_id)
        if known is None or known[0] != said:
            known = said, contribution_to_pb(contribution.at(0, -1, ()), size).SerializeToString()
            if len(known[1]) <= MAX_STEADY_BYTES:
                if len(self._known) >= MAX_STEADY:
                    self._known.clear()
                self._known[contribution.plan_id] = known
        return known[1] + _varying(contribution)


class PushDecoder:
    """Reads the headers of the pushes of one client: what comes before the fields that vary, once. Of one thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Contribution, int]] = {}
        self._last = b""  # of the last header that was not known, what came before the fields that vary

    def decode(self, header: bytes) -> tuple[Contribution, int]:
        """Returns what a push says, and the size of its payload.

        Raises:
            InvalidRequest: the header is none.
        """
        for steady, (known, size) in self._known.items():
            if header.startswith(steady):
                varies = header[len(steady) :]
                message = parse(pb.PushHeader, varies)
                positions = tuple(map(POSITION.from_pb, message.positions)) if message.positions else ()
                said = known.at(message.round, message.follows - 1, positions)
                if _varying(said) == varies:  # it says nothing else
                    return said, size
        message = parse(pb.PushHeader, header)
        said, last = contribution_from_pb(message), self._last
        self._last = header.removesuffix(_varying(said)) if len(header) <= MAX_STEADY_BYTES else b""
        if last and last == self._last:  # it repeats; a header with ids of rows does not
            self._learn(last)
        return said, message.size

    def _learn(self, steady: bytes) -> None:
        with suppress(InvalidRequest):  # no message ends here
            message = parse(pb.PushHeader, steady)
            said = contribution_from_pb(message)
            if not _varying(said):
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[steady] = said, message.size


class RoundEncoder:
    """Encodes the headers of answers to pushes: an answer that several members get, once. Used by any thread.

    A generation, which is the same for many rounds and takes longer than all the rest, is kept as it travels.
    """

    def __init__(self) -> None:
        self._generation: tuple[Generation | None, bytes] = (None, b"")
        self._last: tuple[Callable[[], RoundReply | None], bytes] = (lambda: None, b"")

    def encode(self, reply: RoundReply) -> bytes:
        """Returns the encoded header of an answer."""
        last, header = self._last
        if last() is not reply:
            header = self._encode(reply)
            self._last = ref(reply), header  # weakly: an answer has values, into which rounds write later
        return header

    def _encode(self, reply: RoundReply) -> bytes:
        generation, said = self._generation
        if generation is not reply.generation:
            said = pb.RoundHeader(generation=GENERATION.to_pb(reply.generation)).SerializeToString()
            self._generation = reply.generation, said
        # Messages one after another are one message with the fields of all.
        round = pb.RoundHeader(round=reply.round)
        rest = pb.RoundHeader(
            more=reply.more,
            excluded=map(TASK.to_pb, reply.excluded),
            size=reply.payload.size,
            warnings=reply.warnings,
            observers=map(TASK.to_pb, reply.observers),
            rows=reply.rows,
            over=reply.over,
        )
        return round.SerializeToString() + said + rest.SerializeToString()


class RoundDecoder:
    """Reads the headers of answers to pushes, of which many have the same generation. Used by any thread."""

    def __init__(self) -> None:
        self._generation: tuple[bytes, Generation] | None = None

    def decode(self, message: pb.RoundHeader, payload: Payload) -> RoundReply:
        """Reads a header that came with a payload."""
        said, known = message.generation.SerializeToString(), self._generation
        if known is None or known[0] != said:
            known = self._generation = said, GENERATION.from_pb(message.generation)
        return RoundReply(
            message.round,
            known[1],
            message.more,
            tuple(map(TASK.from_pb, message.excluded)),
            payload,
            tuple(message.warnings),
            tuple(map(TASK.from_pb, message.observers)),
            tuple(message.rows),
            message.over,
        )


def pull_to_pb(reply: PullReply) -> pb.PullHeader:
    """Makes the header of the answer to a pull."""
    return pb.PullHeader(round=reply.round, size=reply.payload.size, rows=reply.rows)


def pull_from_pb(message: pb.PullHeader, payload: Payload) -> PullReply:
    """Reads the header of the answer to a pull, which came with a payload."""
    return PullReply(message.round, payload, tuple(message.rows))


def said_to_pb(said: Vote | Testimony, session: int) -> pb.ServerVote:
    """Makes the message of a vote, or of a testimony; `session` is the incarnation of the server that says it."""
    if isinstance(said, Vote):
        return _vote_to_pb(said, session)
    return pb.ServerVote(session=session, testimony=testimony_to_pb(said))


def said_from_pb(message: pb.ServerVote) -> Vote | Testimony:
    """Reads a vote, or a testimony."""
    if not message.HasField("testimony"):
        return _vote_from_pb(message)
    return testimony_from_pb(message.testimony)


def testimony_to_pb(said: Testimony) -> pb.Testimony:
    """Makes the message of a testimony."""
    votes = [_vote_to_pb(vote, 0) for vote in said.votes]
    return pb.Testimony(job=said.job, gone=said.gone, votes=votes, before=said.before)


def testimony_from_pb(message: pb.Testimony) -> Testimony:
    """Reads a testimony."""
    return Testimony(message.job, message.gone, tuple(map(_vote_from_pb, message.votes)), message.before)


def _vote_to_pb(vote: Vote, session: int) -> pb.ServerVote:
    return pb.ServerVote(
        session=session,
        job=vote.job,
        round=vote.round,
        plan_id=vote.plan_id,
        generation=vote.generation,
        attempt=vote.attempt,
        whole=sorted(vote.whole),
        error=None if vote.error is None else refusal_to_pb(vote.error),
        closed=vote.closed,
        digest=None if vote.digest is None else DIGEST.to_pb(vote.digest),
        sums=[pb.Sessions(numbers=sorted(each)) for each in vote.sums],
        late=[pb.LateContribution(session=each.session, round=each.round) for each in sorted(vote.late)],
    )


def _vote_from_pb(message: pb.ServerVote) -> Vote:
    error = refusal_from_pb(message.error) if message.HasField("error") else None
    whole = frozenset(message.whole)
    digest = DIGEST.from_pb(message.digest) if message.HasField("digest") else None
    if digest is not None and len(digest.variables) != len(digest.hashes):
        raise InvalidRequest(f"a digest has {len(digest.hashes)} hashes for {len(digest.variables)} variables")
    return Vote(
        message.job,
        message.round,
        message.plan_id,
        message.generation,
        message.attempt,
        whole,
        error,
        message.closed,
        digest,
        tuple([frozenset(each.numbers) for each in message.sums]),
        frozenset([LateContribution(each.session, each.round) for each in message.late]),
    )
