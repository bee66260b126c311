"""Our values as protobuf, and the table that both gRPC rims share."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pswire.api import (
    Contribution,
    PullReply,
    RestoreOrder,
    RestoreReply,
    RestoreStage,
    RoundReply,
    RowRead,
    TableQuestion,
    TableRead,
    Watched,
)
from pswire.cluster import JOBS, Task
from pswire.encoding import messages
from pswire.encoding.mapper import Codec
from pswire.encoding.verbs import ERROR_KEY, STATUS, TASK_KEY, VERBS, batches, fitting, parse, refusal, refused
from pswire.errors import BY_NAME, InvalidRequest, PSError, ServerLost
from pswire.limits import MAX_PLAN_BYTES, Timeouts
from pswire.model.log import (
    Approved,
    Created,
    Done,
    Epoch,
    EpochClosed,
    JobStarted,
    Member,
    Mode,
    Position,
    Snapshotted,
    Start,
    Started,
)
from pswire.model.plan import (
    REDUCE_OPS,
    REF_KINDS,
    Apply,
    Form,
    Operand,
    PlacedVariable,
    Plan,
    Reduction,
    Ref,
    RestoreCommit,
    ShardOf,
    SnapshotOrder,
    Trim,
    Turn,
    VariableSpec,
)
from pswire.model.program import INPUT_KINDS, PROGRAM_VERSION, Input, Node, Program
from pswire.model.saved import PartOf, SavedTable, SavedTensor, Shard
from pswire.model.status import Happened, OpenRound, ProcessStatus, Saving, ServerStatus, SessionState, WorkerProgress
from pswire.model.tables import (
    KEY_DTYPES,
    LFU,
    LRU,
    MAX_COUNT,
    MAX_MEMORY,
    MIN_CAPACITY,
    RANDOM_DTYPES,
    CBFFilter,
    Constant,
    CounterFilter,
    GlobalStepEvict,
    L2WeightEvict,
    Normal,
    ProbabilityFilter,
    SlotTensor,
    TablePart,
    TableSpec,
    TimeToLive,
    TruncatedNormal,
    Uniform,
    Unknown,
    Zeros,
)
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.payload import EMPTY
from tests.kit.samples import ROUND

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
S64 = st.integers(-(1 << 63), (1 << 63) - 1)
REAL = st.floats(allow_nan=False)
REAL_VALUES = st.floats(-99, 99)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BYTES = st.binary(max_size=32)


def tuples(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=3).map(tuple)


def maps(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Of one item at most: they have no order on the wire."""
    return st.dictionaries(keys, values, max_size=1)


SERVERS = tuples(U32)
TENSORS = st.builds(TensorSpec, st.sampled_from(sorted(DTYPES)), tuples(st.integers(0, 1000)))
NAMES = st.text(string.ascii_letters + "/_:0", min_size=1, max_size=12)
SHARDS_OF = st.builds(ShardOf, NAMES, st.integers(0, 9), st.integers(1 << 10, 1 << 40))
_ROWS = st.builds(
    TensorSpec, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 9), min_size=1, max_size=8).map(tuple)
)
_LOW, _HIGH, _COUNT = st.floats(-9, 0), st.floats(0, 9), st.integers(1, 255)
_SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
TABLES = st.builds(
    TableSpec,
    shape=_SHAPES,
    dtype=st.sampled_from(RANDOM_DTYPES),
    key_dtype=st.sampled_from(KEY_DTYPES),
    initializer=st.one_of(
        st.builds(Zeros),
        st.builds(Constant, _LOW),
        *(st.builds(kind, _LOW, _HIGH) for kind in (Uniform, Normal, TruncatedNormal)),
    ),
    admission=st.one_of(
        st.none(),
        st.builds(CounterFilter, _COUNT),
        st.builds(CBFFilter, _COUNT, _COUNT, st.floats(1e-9, 0.5), _COUNT),
        st.builds(ProbabilityFilter, st.floats(0, 1)),
    ),
    eviction=st.one_of(
        st.none(),
        st.builds(LRU),
        st.builds(LFU, st.floats(0, 1)),
        st.builds(GlobalStepEvict, _COUNT),
        st.builds(L2WeightEvict, _HIGH),
        st.builds(TimeToLive, _HIGH),
    ),
    capacity=st.integers(MIN_CAPACITY, MAX_COUNT),
    memory_limit=st.integers(0, MAX_MEMORY),
    refused=st.sampled_from(get_args(Unknown)),
    seed=U64,
    hash_seed=U64,
)
SLOTS = st.builds(SlotTensor, NAMES.map("{}/slot".format), st.sampled_from(RANDOM_DTYPES), _SHAPES, REAL_VALUES)
PARTS = st.builds(TablePart, NAMES, TABLES, st.integers(0, 900), st.integers(1, 100), st.none() | SLOTS)
SPECS = st.one_of(
    st.builds(VariableSpec, NAMES, TENSORS, st.booleans(), st.none() | st.just("") | NAMES),
    st.builds(VariableSpec, NAMES, _ROWS, st.booleans(), st.none(), SHARDS_OF),
    PARTS.map(lambda part: VariableSpec("part", part.tensor, part=part)),
)
VARIABLES = st.builds(PlacedVariable, U64, SPECS, SERVERS)
ATTRS = st.none() | st.booleans() | S64 | REAL | TEXT | tuples(S64)
PROGRAMS = st.builds(
    Program,
    tuples(st.builds(Input, st.sampled_from(INPUT_KINDS), TENSORS)),
    tuples(st.builds(Node, TEXT, tuples(U32), tuples(st.tuples(TEXT, ATTRS)))),
    tuples(st.tuples(U32, U32)),
    tuples(U32),
)
TURNS = st.builds(Turn, U64, U64, U64)
REFS = st.builds(Ref, st.sampled_from(REF_KINDS), U64)
PLANS = st.builds(
    Plan,
    reductions=tuples(
        st.builds(Reduction, st.sampled_from(REDUCE_OPS), TENSORS, SERVERS, TEXT, st.sampled_from(get_args(Form)))
    ),
    operands=tuples(st.builds(Operand, TENSORS, SERVERS)),
    programs=tuples(PROGRAMS),
    applies=tuples(st.builds(Apply, U32, SERVERS, tuples(REFS))),
    returned=tuples(REFS),
    snapshot=st.none() | st.builds(SnapshotOrder, TEXT, SERVERS),
    restore=st.none() | st.builds(RestoreCommit, TEXT, SERVERS, TURNS, TEXT),
    trims=tuples(st.builds(Trim, U64, SERVERS, U64)),
)
TASKS = st.builds(Task, st.sampled_from(JOBS), U32)
POSITIONS = tuples(st.builds(Position, U32, U64, U64))
STARTS = st.builds(Start, U64, U64, POSITIONS)
MEMBERS = st.builds(Member, TASKS, U64, U32, st.sampled_from(get_args(Mode)), U32)
EPOCHS = st.builds(Epoch, U64, tuples(MEMBERS), TEXT, st.none() | STARTS)
ENTRIES = st.one_of(
    st.builds(JobStarted, U64, tuples(U64)),
    st.builds(Created, VARIABLES),
    st.builds(Approved, PLANS),
    st.builds(EpochClosed, EPOCHS),
    st.builds(Started, STARTS),
    st.builds(Snapshotted, BYTES, U64, TEXT, TEXT),
    st.just(Done()),
)
SESSIONS = st.builds(SessionState, MEMBERS, TEXT, TEXT, REAL, st.booleans())
WATCHED = st.builds(Watched, S64, U64, tuples(ENTRIES), tuples(PLANS), tuples(SESSIONS))
ROUNDS = st.builds(OpenRound, U64, TEXT, tuples(TASKS), st.booleans())
PROCESSES = st.builds(
    ProcessStatus,
    REAL,
    U64,
    maps(TEXT, TEXT),
    U32,
    TEXT,
    maps(U64, TEXT),
    maps(TEXT, U64),
)
STATUSES = st.builds(
    ServerStatus,
    server=U32,
    incarnation=U64,
    log=U64,
    epoch=st.none() | EPOCHS,
    round=S64,
    positions=POSITIONS,
    waiting=tuples(ROUNDS),
    variables=U64,
    nbytes=U64,
    memory_limit=U64,
    chief=st.floats(0, allow_nan=False),
    places=tuples(st.builds(WorkerProgress, TASKS, S64, POSITIONS, U64)),
    program_version=U32,
    held=U64,
    snapshot_limit=U64,
    saving=tuples(st.builds(Saving, TEXT, S64, U64)),
    sessions=tuples(SESSIONS),
    incarnations=tuples(U64),
    over=st.booleans(),
    broken=TEXT,
    device=TEXT,
    process=st.none() | PROCESSES,
)
ORDERS = st.builds(
    RestoreOrder,
    st.sampled_from(get_args(RestoreStage)),
    st.none() | maps(TEXT, U64),
    st.booleans(),
    st.booleans(),
)
RESTORED = st.builds(RestoreReply, TEXT, POSITIONS, TEXT)
SAVED = st.builds(
    SavedTensor, TEXT, TENSORS, TEXT, st.none() | SHARDS_OF, st.none() | st.builds(PartOf, NAMES, st.integers(0, 1023))
)
SAVED_TABLES = st.builds(SavedTable, NAMES, TABLES, tuples(SLOTS), S64, U64)
SHARDS = st.builds(Shard, TEXT, TEXT, U64, POSITIONS, tuples(SAVED), U64, tuples(SAVED_TABLES))
ROW_READS = st.builds(RowRead, U64, BYTES)
QUESTIONS = st.builds(TableRead, U64, st.sampled_from(get_args(TableQuestion)), U32, U32)
CONTRIBUTIONS = st.builds(
    Contribution,
    *(U64, U64, U64, BYTES, tuples(REAL), st.booleans(), POSITIONS, tuples(U64)),
    rows=tuples(U64),
    lookups=tuples(ROW_READS),
    seconds=U64,
)
REPLIES = st.builds(RoundReply, U64, EPOCHS, st.booleans(), tuples(TASKS), st.just(EMPTY))
PULLED = st.builds(PullReply, S64, st.just(EMPTY), tuples(U64))

PAIRS: dict[str, tuple[st.SearchStrategy[Any], Codec[Any, Any]]] = {
    "tensor": (TENSORS, messages.TENSOR),
    "variable": (VARIABLES, messages.VARIABLE),
    "program": (PROGRAMS, messages.PROGRAM),
    "plan": (PLANS, messages.PLAN),
    "epoch": (EPOCHS, messages.EPOCH),
    "entry": (ENTRIES, messages.ENTRY),
    "watched": (WATCHED, messages.WATCHED),
    "status": (STATUSES, messages.STATUS),
    "happened": (st.builds(Happened, REAL, TEXT, TEXT, TEXT), messages.HAPPENED),
    "process": (PROCESSES, messages.MAPPER.pairs[ProcessStatus]),
    "turn": (TURNS, messages.TURN),
    "order": (ORDERS, messages.ORDER),
    "restored": (RESTORED, messages.RESTORED),
    "shard": (SHARDS, messages.SHARD),
    "contribution": (
        CONTRIBUTIONS,
        Codec(pb.PushHeader, lambda c: messages.contribution_to_pb(c, 8), messages.contribution_from_pb),
    ),
    "rows": (ROW_READS, messages.ROW_READ),
    "question": (QUESTIONS, messages.TABLE_READ),
    "round": (REPLIES, ROUND),
    "pull": (PULLED, Codec(pb.PullHeader, messages.pull_to_pb, lambda m: messages.pull_from_pb(m, EMPTY))),
}


@pytest.mark.parametrize("kind", PAIRS)
@given(data=st.data())
def test_values_arrive_as_they_were(kind: str, data: st.DataObject) -> None:
    """Each value comes back equal, to the last bit: its repr, from which ids are made, is the same."""
    values, pair = PAIRS[kind]
    value = data.draw(values)
    sent = pair.to_pb(value).SerializeToString()
    assert repr(pair.from_pb(pair.message.FromString(sent))) == repr(value)


@given(st.lists(st.sampled_from(range(3)), max_size=8), st.lists(REPLIES, min_size=3, max_size=3))
def test_answers_are_the_same_where_some_of_them_is_kept(turns: list[int], replies: list[RoundReply]) -> None:
    """Whatever came before: what is kept of an answer is used for one that says the same, and for no other."""
    encoder, decoder = messages.RoundEncoder(), messages.RoundDecoder()
    for turn in turns:
        reply = replies[turn]
        message = pb.RoundHeader.FromString(encoder.encode(reply))
        assert message == ROUND.to_pb(reply)
        assert repr(decoder.decode(message, EMPTY)) == repr(reply)
        assert pb.RoundHeader.FromString(encoder.encode(replace(reply, more=not reply.more))).more != reply.more


def test_an_epoch_is_read_once() -> None:
    """As long as the answers have the same."""
    decoder = messages.RoundDecoder()
    headers = [ROUND.to_pb(RoundReply(n, Epoch(n // 2, ()), False, (), EMPTY)) for n in range(4)]
    first, second, third, fourth = (decoder.decode(header, EMPTY).epoch for header in headers)
    assert first is second
    assert third is fourth
    assert [first.number, third.number] == [0, 1]


@given(PLANS)
def test_a_plan_keeps_its_id(plan: Plan) -> None:
    """A server computes the id that the client did."""
    assert messages.PLAN.from_pb(messages.PLAN.to_pb(plan)).id == plan.id


SPEC = pb.TensorSpec(dtype="float32")
REFUSED: dict[str, Message] = {
    "a restore has no stage 0": pb.RestoreOrder(),
    "unknown mode 0": pb.Member(task=pb.Task(job="worker")),
    "unknown reduction 0": pb.Plan(reductions=[pb.Reduction(tensor=SPEC)]),
    "unknown reduction 99": pb.Plan(reductions=[pb.Reduction(op=99, tensor=SPEC)]),  # type: ignore[arg-type]
    "unknown kind of input 0": pb.Program(inputs=[pb.Input(spec=SPEC)], version=PROGRAM_VERSION),
    "unknown kind of input 99": pb.Program(
        inputs=[pb.Input(kind=99, spec=SPEC)],  # type: ignore[arg-type]
        version=PROGRAM_VERSION,
    ),
    "unknown kind of value 0": pb.Plan(returned=[pb.Ref(index=1)]),
    "unknown kind of value 99": pb.Plan(returned=[pb.Ref(kind=99)]),  # type: ignore[arg-type]
    f"an update program has version {PROGRAM_VERSION + 1}, and": pb.Program(version=PROGRAM_VERSION + 1),
    f"an update program has version 0, and version {PROGRAM_VERSION} runs here": pb.Program(),
    "an entry of the log is empty, or of a newer version": pb.Entry(),
    "unknown dtype ''": pb.TensorSpec(),
    "unknown dtype 'object'": pb.TensorSpec(dtype="object"),
    f"impossible shape ({1 << 45},)": pb.TensorSpec(dtype="int8", shape=[1 << 45]),
    "a variable's name has 1 to 512 printable characters": pb.VariableSpec(tensor=SPEC),
    "a variable's name has 1 to 512 printable": pb.VariableSpec(name="a\nb", tensor=SPEC),
    "is no shard such as ShardOf": pb.VariableSpec(name="a", tensor=SPEC, shard=pb.ShardOf(whole="w", rows=4)),
    "a variable's name has 1 to 512": pb.VariableSpec(name="a", tensor=SPEC, saved_as="a\nb"),
    "unknown job ''; known are chief, worker, ps, evaluator": pb.Task(index=1),
    "unknown job 'boss'": pb.Task(job="boss"),
    f"bytes; at most {MAX_PLAN_BYTES} are allowed": pb.Plan(snapshot=pb.SnapshotOrder(path="x" * MAX_PLAN_BYTES)),
}
NEWER: dict[str, Message] = {
    "first values of a table are of a newer version": pb.Initializer(),
    "a table's filter is of a newer version": pb.Admission(),
    "a table's policy of eviction is of a newer version": pb.Eviction(),
}
_KEYS = pb.TableSpec.INT64
REFUSED |= NEWER | {
    "unknown form 7 of contributions": pb.Plan(reductions=[pb.Reduction(op=1, tensor=SPEC, form=7)]),  # type: ignore[arg-type]
    "unknown dtype 0 of keys": pb.TableSpec(dtype="float32"),
    "unknown dtype 3 of keys": pb.TableSpec(key_dtype=3),  # type: ignore[arg-type]
    "table are of a newer version": pb.VariableSpec(tensor=SPEC, part=pb.TablePart(spec=pb.TableSpec(key_dtype=_KEYS))),
    "unknown value 0 of keys without": pb.TableSpec(key_dtype=_KEYS, initializer=pb.Initializer(zeros=pb.Zeros())),
    "unknown question 0 to a table": pb.TableRead(),
    "unknown question 4 to a table": pb.TableRead(what=4),  # type: ignore[arg-type]
}
READERS: dict[Any, Callable[[Any], Any]] = {p.message: p.from_pb for p in messages.MAPPER.pairs.values()}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(words: str) -> None:
    """Unknown numbers, missing choices and impossible sizes are refused where they come in, in these words."""
    message = REFUSED[words]
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        READERS[type(message)](message)


@pytest.mark.parametrize("words", NEWER)
def test_what_a_newer_version_has_is_refused(words: str) -> None:
    """A choice of a oneof that is not known here is none: its bytes are passed over, and not taken for another."""
    kind = type(NEWER[words])
    with pytest.raises(InvalidRequest, match=words):
        READERS[kind](kind.FromString(b"\xfa\x01\x02\x08\x01"))  # field 31, which has a field 1


@given(st.sampled_from([pb.Plan, pb.Entry, pb.WatchReply, pb.StatusReply, pb.VariableSpec]), st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(kind: type[Message], data: bytes) -> None:
    """No bytes do anything but be read, or raise InvalidRequest."""
    try:
        READERS[kind](parse(kind, data))
    except InvalidRequest:
        pass


def test_bytes_that_are_no_message_are_named() -> None:
    """A malformed message is refused with its size and what it should have been."""
    with pytest.raises(InvalidRequest, match="2 bytes are no OpenRequest"):
        parse(pb.OpenRequest, b"\xff\xff")


# ---- The table of the rims ----


def test_the_table_of_verbs_is_the_protocol() -> None:
    """Table and .proto have the same verbs, in the same order, with the same streams, requests and deadlines."""
    service = pb.DESCRIPTOR.services_by_name["ParameterServer"]
    assert [(v.path, v.streams) for v in VERBS.values()] == [
        (f"/{service.full_name}/{m.name}", (m.client_streaming, m.server_streaming)) for m in service.methods
    ]
    assert [v.request.DESCRIPTOR for v in VERBS.values() if not v.streams[0]] == [
        m.input_type for m in service.methods if not m.client_streaming
    ]
    assert {v.deadline for v in VERBS.values()} <= {"", *Timeouts.__dataclass_fields__}
    assert {v.late for v in VERBS.values()} <= set(BY_NAME)


def test_every_error_has_a_status() -> None:
    """Table and tree of errors have the same names."""
    assert list(STATUS) == list(BY_NAME)


@given(st.sampled_from(sorted(BY_NAME)), TEXT, st.sampled_from(["", "/job:worker/task:1"]))
def test_errors_cross(name: str, text: str, task: str) -> None:
    """An error arrives with its class, its message and its task."""
    _, details, metadata = refusal(BY_NAME[name](text, task))
    came = refused(details, metadata)
    assert type(came) is BY_NAME[name]
    assert (came.message, came.task) == (text, task)


@given(st.text(max_size=5000), st.text(max_size=20))
def test_no_text_of_an_error_breaks_the_answer(text: str, task: str) -> None:
    """Metadata are plain ASCII, and details short enough for a header, whatever the error says."""
    _, details, metadata = refusal(PSError(text, task))
    assert len(details.encode()) <= 2048
    assert all(value.isascii() and value.isprintable() for _, value in metadata)


def test_errors_of_other_versions() -> None:
    """A class made from a known one crosses as that; an unknown name arrives as PSError; none as none."""

    class Burnt(ServerLost):
        pass

    assert refusal(Burnt("x"))[2] == ((ERROR_KEY, "ServerLost"),)
    assert type(refused("x", [(ERROR_KEY, "Newer"), (TASK_KEY, "t")])) is PSError
    assert refused("Socket closed", []) is None


@given(st.lists(st.integers(0, 30), max_size=20))
def test_batches_fit(sizes: list[int]) -> None:
    """Batches have all messages, in order; each fits its limit, unless it is a single one."""
    messages = [pb.PushFrame(header=bytes(size)) for size in sizes]
    cut = list(batches(messages, 40))
    assert [m for batch in cut for m in batch] == messages
    assert all(len(batch) == 1 or sum(m.ByteSize() for m in batch) <= 40 for batch in cut)
    assert len(cut) == 1 or all(cut)


@given(st.lists(st.integers(0, 30), max_size=20))
def test_what_fits_is_the_first_batch(sizes: list[int]) -> None:
    """And no more of the rest is made than the one that does not fit."""
    messages = [pb.PushFrame(header=bytes(size)) for size in sizes]
    made: list[pb.PushFrame] = []
    found = fitting((made.append(message) or message for message in messages), 40)  # type: ignore[func-returns-value]
    assert found == next(batches(messages, 40))
    assert len(made) <= len(found) + 1
