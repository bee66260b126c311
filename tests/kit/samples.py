"""Calls of every verb with fixed values in every field, and a server that answers them: what the golden file is of.

No two fields of a message have the same value, where that can be, so that two of them cannot change places unseen.
Maps have one item: they have no order on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import Message

from pswire import api
from pswire.encoding.mapper import MessageCodec
from pswire.model import chunks, closures, compression, log, places, plan, program, saved, status, tables
from pswire.servers import votes
from tests.kit import internals as inside
from tests.kit.internals import ASYNC, BY_NAME, EMPTY, Consistency, Payload, PSError, Task, TensorSpec, messages, pb
from tests.kit.tap import spell

PS = Task("ps", 3)
"""The server that answers."""

TOKEN = "the-token-of-the-golden-file"
TRANSPORT_TOKEN = bytes(range(0xA0, 0xB0))
IN_FLIGHT = 1 << 20
DATA_PORT, DATA_PATH = 40_123, "golden.sock"
INCARNATION = 0xFEDC_BA98_7654_3210
SESSION = 0x1234_5678_9ABC

# ---- Values ----

CHIEF, WORKER, EVALUATOR = Task("chief", 0), Task("worker", 300), Task("evaluator", 2)
VECTOR, MATRIX, SCALAR = TensorSpec("float32", (3,)), TensorSpec("bfloat16", (2, 0, 70_000)), TensorSpec("int64", ())
POSITIONS = (
    log.Position(1, 2, 3, source=(1 << 64) - 5, restored=True),
    log.Position(70_000, 1 << 40, 1 << 41, (log.Examples(1 << 40, 1, 3), log.Examples(4, 200, 300))),
)
START = log.Start(5, 1 << 33, POSITIONS)
MEMBERS = (
    log.Member(WORKER, SESSION, 4, Consistency("sync", 2)),
    log.Member(EVALUATOR, 9, 1, ASYNC),
    log.Member(Task("worker", 2), 12, 1, Consistency("bounded", staleness=3)),
)
GENERATION = log.Generation(6, MEMBERS, "dataset:1", START)
PLAN_ID = bytes(range(32))
VARIABLE = plan.PlacedVariable(150, plan.VariableSpec("dense/kernel:0", VECTOR, True, "kernel"), (0, 3))
ALONE = replace(VARIABLE, spec=replace(VARIABLE.spec, alone=True))
PART = plan.PlacedVariable(
    153, plan.VariableSpec("table/part_1", VECTOR, shard=plan.ShardOf("table", 3, 1 << 33)), (1,)
)
SCRATCH = plan.PlacedVariable(151, plan.VariableSpec("scratch", MATRIX, False, ""), (1,))


def _part(id: int, part: tables.TablePart) -> plan.PlacedVariable:
    """A part of a dynamic table, or of what lies beside one."""
    return plan.PlacedVariable(id, plan.VariableSpec(f"{part.whole}/part_1", part.tensor, part=part), (1,))


_OF_USERS = tables.Uniform(-0.25, 0.5), tables.CounterFilter(4), tables.LRU()
_OF_ITEMS = tables.Normal(0.1, 0.2), tables.CBFFilter(7, 70_001, 0.03125, 8), tables.LFU(0.75)
_OF_TAGS = tables.TruncatedNormal(-1.5, 2.5), tables.ProbabilityFilter(0.0625), tables.GlobalStepEvict(70_002)
"""First values, filters and policies."""

USERS = tables.TableSpec((3,), "float16", "int64", *_OF_USERS, 70_003, 1 << 34, "zeros", 5, 6)
ITEMS = tables.TableSpec(
    (), "float64", "uint64", *_OF_ITEMS, memory_limit=1 << 33, seed=(1 << 64) - 1, hash_seed=1 << 63
)
TAGS = tables.TableSpec((9,), "float32", "int64", *_OF_TAGS)
COUNTS = tables.TableSpec((2,), "int64", initializer=tables.Constant(9), eviction=tables.L2WeightEvict(2.5))
TIMES = tables.TableSpec((2,), "uint8", initializer=tables.Zeros(), eviction=tables.TimeToLive(8.5))
SLOT = tables.SlotTensor("users/accumulator", "float64", (2, 300), 0.125)
TABLES = (
    _part(160, tables.TablePart("users", USERS, 300, 424)),
    _part(161, tables.TablePart("users", USERS, 300, 424, SLOT)),
    _part(162, tables.TablePart("items", ITEMS, 0, 1024)),
    _part(163, tables.TablePart("tags", TAGS, 0, 1)),
    _part(164, tables.TablePart("counts", COUNTS, 1, 2)),
    _part(165, tables.TablePart("times", TIMES, 1023, 1)),
)
"""Dynamic tables with every kind of first values, of filters and of evictions."""

PROGRAM = program.Program(
    inputs=(program.Input("variable", VECTOR), program.Input("value", MATRIX), program.Input("operand", SCALAR)),
    nodes=(
        program.Node("multiply", (0, 300)),
        program.Node(
            "every_kind_of_attribute",
            (1,),
            (
                ("axis", (0, -1, 1 << 40)),
                ("correction", -1.25),
                ("dtype", "float16"),
                ("keepdims", True),
                ("nothing", None),
                ("off", -70_000),
            ),
        ),
    ),
    assigns=((1, 4), (2, 300)),
    outputs=(3, 301),
)
PLAN = plan.Plan(
    reductions=(
        plan.Reduction("sum", VECTOR, (0, 1), "gradient of 'w'"),
        plan.Reduction("mean", SCALAR, (2,), "loss"),
        plan.Reduction("first", MATRIX, (3,), "statistics"),
        plan.Reduction("sum", MATRIX, (0,), "gradient of 'table'", "rows"),
        plan.Reduction("mean", VECTOR, (1,), "gradient of 'v'", codec=compression.Codec("topk", 0.25)),
        plan.Reduction("sum", MATRIX, (0,), "gradient of 'table'", "rows", compression.Codec("int8")),
        plan.Reduction("sum", VECTOR, (1,), "gradient of 'u'", codec=compression.Codec("float16")),
        plan.Reduction("sum", VECTOR, (1,), "gradient of 'x'", codec=compression.Codec("bfloat16")),
        plan.Reduction("sum", VECTOR, (1,), "gradient of 'y'", codec=compression.Codec("int4")),
    ),
    operands=(plan.Operand(SCALAR, (1, 2), "lr"),),
    programs=(PROGRAM,),
    applies=(
        plan.Apply(
            7, (0, 2), (plan.Ref("variable", 150), plan.Ref("reduction", 1), plan.Ref("operand", 2)), sparse="lazy"
        ),
        plan.Apply(8, (1,), (plan.Ref("variable", 151),), sparse="exact", optional=True),
        plan.Apply(9, (1,), (plan.Ref("variable", 152),), sparse="closed"),
    ),
    returned=(plan.Ref("result", 3), plan.Ref("reduction", 1 << 32)),
    snapshot=plan.SnapshotOrder("run/ckpt-7", (0, 1, 2, 3), 41, '{"objects": {}}', 6),
    restore=plan.RestoreCommit("run/ckpt-6", (3, 2), plan.Turn(11, 12, 13), "d1ge57"),
    nonfinite="skip",
    copied=True,
)
RAISING = plan.Plan(nonfinite="raise")
OF_TABLES = plan.Plan(
    reductions=(plan.Reduction("sum", TABLES[0].spec.tensor, (1,), "gradient of 'users'", "keys"),),
    trims=(plan.Trim(162, (1, 2), 70_004), plan.Trim(163, (3,), 0)),
)
ENTRIES: tuple[log.LogEntry, ...] = (
    log.JobStarted(
        77, (INCARNATION, 1), "the-job", ("ps-0:2222", "[::1]:2223"), (1, 0), ("worker-0:0", "worker-1:0"), "chief-0:0"
    ),
    log.Created(VARIABLE),
    log.Created(SCRATCH),
    log.Created(PART),
    log.Created(plan.PlacedVariable(152, plan.VariableSpec("own", SCALAR), (2,))),
    log.Approved(PLAN),
    log.Approved(RAISING),
    log.GenerationClosed(GENERATION),
    log.GenerationClosed(
        log.Generation(7, MEMBERS[1:], log.STEP, None, MEMBERS[:1], 7, log.Return(3, INCARNATION, 6, True, 44, "ps3:1"))
    ),
    log.Started(START),
    log.Snapshotted(PLAN_ID, 41, "root/run/ckpt-7", "no room"),
    log.Lost(2, "it was silent"),
    log.Gone(3, "was lost"),
    log.Done(),
)
SESSIONS = (
    status.SessionState(
        MEMBERS[0], "open", "plan:00ff", 1.5, False, status.Pace(7, 9, 8, True, page="http://worker-0:9103/"), 77.5
    ),
    status.SessionState(log.Member(CHIEF, 10, 0), "lost", "", 0.25, True),
)
PROCESS = status.ProcessStatus(
    1234567890.5,
    1 << 31,
    {"numpy": "2.0.0"},
    DATA_PORT,
    DATA_PATH,
    {SESSION: "tcp"},
    {"tcp sent": 1 << 34},
    98.75,
    "http://ps-3:9100/",
)
STATUS = api.ServerStatus(
    server=3,
    incarnation=INCARNATION,
    log=17,
    generation=GENERATION,
    round=-1,
    positions=POSITIONS,
    waiting=(status.OpenRound(18, "reduce sum", (WORKER, EVALUATOR), True, (EVALUATOR,)),),
    variables=19,
    variable_bytes=20,
    memory_limit=21,
    chief=2.5,
    places=(status.WorkerProgress(WORKER, 22, POSITIONS[:1], 21),),
    snapshot_bytes=24,
    snapshot_limit=25,
    saving=(status.Saving("run/ckpt-7", -3, 26),),
    sessions=SESSIONS,
    incarnations=(INCARNATION, 27),
    over=True,
    broken="a round was lost halfway",
    device="gpu:0",
    process=PROCESS,
    job="the-job",
    missed=(status.MissedPeer(1, 40, 6.5, "nothing listens there"),),
    differences=(status.Difference(1, 64, ("v", "w"), 3, 2),),
    gap=4,
    gone=(3, 5),
    losses=(5, 3, 3, 5),
    standbys=(places.Standby("ps9:1", "rack-9", 3), places.Standby("ps8:1")),
    moved=(places.Moved(3, "ps3:2"),),
    domain="rack-2",
    phases={"waiting": 2.5},
    table_rows={"users": 300},
    table_bytes={"users": 1 << 33},
    recovering=True,
    tier_bytes=1 << 34,
    tier_resident_bytes=1 << 30,
    tier_memory=(1 << 30) + 1,
)
HAPPENED = status.Happened(2.5, "push", "worker 300, session 7", "Fenced: it ended")
BARE = api.ServerStatus(0, INCARNATION, 0, None, 0, (), (), 0, 0, 0, float("inf"), process=PROCESS)


ROWS = (api.RowRead(152, b"\x07" + bytes(7)),)
HINTS = api.RowRead(160, bytes(range(8, 24))), api.RowRead(1 << 34, bytes(range(24, 32)))
QUESTIONS = api.TableRead(160, "size"), api.TableRead(162, "keys", 300, 424), api.TableRead(1 << 35, "rows", 1023, 1)


def contribution(**said: Any) -> api.Contribution:
    """What a worker says in a round."""
    full = api.Contribution(
        SESSION, 6, 41, PLAN_ID, (1.0, 0.5, -3.25), True, POSITIONS, (150, 1 << 35), True, -1, (2, 300)
    )
    rows = {"rows": (3, 1 << 33), "lookups": (api.RowRead(151, bytes(range(16))),)}
    return replace(full, **{"first_values": (151, 1 << 36), "previous": 40, **rows, **said})


def reply(payload: Payload = EMPTY) -> api.RoundReply:
    """What a server says of a round."""
    warnings = "a value is not finite", "another warning"
    return api.RoundReply(41, GENERATION, True, (WORKER, CHIEF), payload, warnings, (EVALUATOR,), (0, 4), 45)


def small() -> Payload:
    """Some tensors, with padding between them."""
    return Payload.pack([np.arange(5, dtype=np.int16), np.array(-2.5), np.array([True, False, True])])


def large(nbytes: int) -> Payload:
    """A tensor that may be larger than a part, and two behind it."""
    return Payload.pack([np.full(nbytes, 7, np.uint8), np.arange(9, dtype=np.uint8), np.full(2000, 9, np.uint8)])


LARGE = (4 << 20) + 500_001
"""Bytes: more than a message of gRPC, and a part of the tcp transport, may have."""

# ---- Calls ----


@dataclass(frozen=True)
class Sample:
    """One call.

    Attributes:
        verb: which.
        name: of the sample; with the verb's it is unique.
        args: as the caller gives them, and as the server gets them.
        answer: what the server gives, and the caller gets; an error is raised.
        grows: whether the answer is sent while it is made.
    """

    verb: str
    name: str
    args: tuple[Any, ...]
    answer: Any = None
    grows: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"


TEXT = "whät is wrong, and what to do"


def error(name: str) -> PSError:
    """An error of a class."""
    return BY_NAME[name](f"{name}: {TEXT}", "/job:worker/task:300")


_SESSION_AND_VERSION = (SESSION, 40, -70_000)
_OPENED = api.Opened(SESSION, INCARNATION, 0x1122_3344_5566, 3, "gpu:0", 9, 8, "rack-7", True)
_PACE = status.Pace(30, 61, 32)
_LOCAL = status.Pace(30, 61, 32, local=status.LocalProgress(300, 50, 2.5, 4096.0, 1 << 20, 0.5))
_BATCH = (VARIABLE, replace(VARIABLE, id=151, servers=(3,)))
_TURN = plan.Turn(42, 6, 2)
_RESTORED = saved.RestoreReply("run/ckpt-6", POSITIONS, '{"format": 1}', {"ckpt-5": "a wrong checksum"})
_OPENS, _LOOKS = saved.RestoreOrder("open", {}, False), saved.RestoreOrder("look", None, False)
_PREPARE = saved.RestoreOrder("prepare", {"kernel": 150}, True, True, {"ckpt-4": "a missing shard"}, 4)
_LEAST = api.Contribution(1, 0, 0, b"", start=7)
_OF_TABLES = api.PullReply(41, small(), (9, 0, 1 << 33))
_PULL_OF_TABLES = Sample("Pull", "of tables", (SESSION, (), 41, (), QUESTIONS), _OF_TABLES)
_OF_KEYS = contribution(seconds=1 << 31, lookups=(api.RowRead(160, bytes(range(8))),), hints=HINTS)
_PUSH_OF_KEYS = Sample("Push", "of keys", (_OF_KEYS, small()), reply(small()))

_PIECE = closures.Piece(70_000, 16, b"a piece")
_FAILURE = closures.Failure("step", "ValueError", TEXT, "/job:worker/task:300")
_NAME = closures.ClosureName(2001, 2002, 2003, (2001, 1 << 35))
_FUNCTIONS = ("step(x)", "batches()")
_ORDER = closures.ClosureOrder(2001, "step", (1998, 1 << 35), _PIECE, _FUNCTIONS, 17, True, (1990, 1 << 36))
_QUEUE = closures.ClosureQueue(2001, 31, 32, 33, 1999, 18, _FAILURE)
_BATCH_SAID = "batch 3 of generation 1 has 64 examples"
_TOLD = closures.ClosureResult(2001, _PIECE, "ValueError", TEXT)
_HOST = 0x0FED_CBA9_8765_4321
_PARTS = (contribution(host=_HOST), api.Contribution(9, 6, 41, PLAN_ID, (0.0, 0.0, 0.0), observes=True, host=_HOST))
_BEGINS = (log.Position(2001, 2004, 2005, (log.Examples(2006, 2007, 2008),)),)
_ASKED = chunks.ChunkAsk(
    2001, 2002, 1 << 33, 1 << 34, 2003, _BEGINS, 2009, True, (2010, 1 << 35), (2011, 1 << 36), True
)
_HANDED = chunks.Chunks(
    (chunks.Chunk(1 << 37, 2012, log.Examples(2013, 2014, 2015)),), True, (log.Position(2016, 2017, 2018),)
)

_ORDERED = (0x1122_3344_5566, PLAN_ID, '{"format": 1}')
_SHARD = ("root/run", "ps-3.safetensors", 41)
_SAVED = (
    saved.SavedTensor("w", VECTOR, "c0ffee"),
    saved.SavedTensor("m", MATRIX, ""),
    saved.SavedTensor("table/part_1", VECTOR, "", plan.ShardOf("table", 3, 1 << 33)),
)
_PARTS_SAVED = (saved.SavedTensor("users/part_1", VECTOR, "c0ffee", part=saved.PartOf("users", 300)),)
_TABLES_SAVED = saved.SavedTable("users", USERS, (SLOT,), 39, 40), saved.SavedTable("items", ITEMS, (), -1, 42)

_SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

SAMPLES = (
    Sample("Open", "full", (WORKER, 4, SESSION, True, ASYNC, "the-job", 8), _OPENED),
    Sample("Open", "bounded", (WORKER, 4, SESSION, False, Consistency("bounded", staleness=3), "the-job", 8), _OPENED),
    Sample("Open", "sync", (WORKER, 4, SESSION, False, Consistency(backup_workers=2), "the-job", 8), _OPENED),
    Sample("Open", "quorum", (WORKER, 4, SESSION, False, Consistency(quorum=3, grace=2.5), "the-job", 8), _OPENED),
    Sample("Open", "least", (CHIEF, 0, 0, False, inside.SYNC, "", 0), api.Opened(1, INCARNATION, 0, 0, "cpu")),
    Sample("Enlist", "full", (WORKER, SESSION), inside.Enlisted(Task("worker", 301), True)),
    Sample("Enlist", "least", (None, 1), inside.Enlisted(Task("worker", 0), False)),
    Sample("Heartbeat", "full", (SESSION, 41, PLAN_ID, _PACE, 40), True),
    Sample("Heartbeat", "leaving", (SESSION, 42, PLAN_ID, status.Pace(30, 62, 32, True, True), 0), False),
    Sample("Heartbeat", "local steps", (SESSION, -1, b"", _LOCAL, 0), False),
    Sample("Heartbeat", "at rest", (SESSION, -1, b"", _PACE, api.RESTS), False),
    Sample("Heartbeat", "least", (SESSION, -1, b"", status.STILL, 0), False),
    Sample("Leave", "full", (SESSION, "it failed")),
    Sample("Leave", "least", (SESSION, "")),
    Sample("CreateBatch", "full", (SESSION, _BATCH), api.CreateBatchReply(2, (150, 151), (151,), error("MemoryLimit"))),
    Sample("CreateBatch", "refused", (SESSION, _BATCH), error("VariableMismatch")),
    Sample("CreateBatch", "least", (1, ()), api.CreateBatchReply(0)),
    Sample("CreateBatch", "alone", (SESSION, (ALONE,)), api.CreateBatchReply(1, (150,))),
    Sample("CreateBatch", "of tables", (SESSION, TABLES), api.CreateBatchReply(6, (160, 161, 162, 163, 164, 165))),
    Sample("Propose", "full", (SESSION, PLAN, "plan:00ff", START, "")),
    Sample("Propose", "least", (SESSION, None, "", None, "")),
    Sample("Propose", "of tables", (SESSION, OF_TABLES, "plan:00ff", None, "")),
    Sample("Propose", "traced", (SESSION, RAISING, "", None, _SPAN)),
    Sample("Watch", "full", _SESSION_AND_VERSION, api.Watched(-70_001, 40, ENTRIES, (PLAN, RAISING), SESSIONS)),
    Sample("Watch", "least", (0, 0, api.UNTIL_ENDED), api.Watched(0, 0, (), (), ())),
    Sample("Watch", "traced", (SESSION, 40, 7), api.Watched(8, 40, (), (RAISING,), (), {RAISING.id.hex(): _SPAN})),
    Sample("Watch", "refused", _SESSION_AND_VERSION, error("Fenced")),
    Sample("Approve", "full", (0x1122_3344_5566, 40, ENTRIES), 40 + len(ENTRIES)),
    Sample("Approve", "least", (1, 0, ()), 0),
    Sample("Push", "full", (contribution(), small()), reply(small())),
    Sample("Push", "least", (_LEAST, EMPTY), api.RoundReply(0, log.Generation(0, ()), False, (), EMPTY)),
    Sample("Push", "large", (contribution(), large(LARGE)), reply(large(LARGE))),
    Sample("Push", "growing", (contribution(), small()), reply(small()), grows=True),
    Sample("Push", "refused", (contribution(), small()), error("Diverged")),
    _PUSH_OF_KEYS,
    Sample("Pull", "full", (SESSION, (150, 1 << 35), 41, ROWS, ()), api.PullReply(41, small())),
    Sample("Pull", "least", (0, (), -1, (), ()), api.PullReply(-1, EMPTY)),
    Sample("Pull", "large", (SESSION, (1,), 0, (), ()), api.PullReply(0, large(LARGE))),
    Sample("Pull", "refused", (SESSION, (1,), 0, (), ()), error("RoundTimeout")),
    _PULL_OF_TABLES,
    Sample("Snapshot", "full", _ORDERED, saved.Shard(*_SHARD, POSITIONS, _SAVED, 1 << 36)),
    Sample("Snapshot", "least", (1, b"", ""), saved.Shard("", "", 0, (), ())),
    Sample("Snapshot", "of tables", _ORDERED, saved.Shard(*_SHARD, (), _PARTS_SAVED, tables=_TABLES_SAVED)),
    Sample("Restore", "full", (SESSION, "run", _TURN, _PREPARE), _RESTORED),
    Sample("Restore", "opens", (SESSION, "run", _TURN, _OPENS), saved.RestoreReply("run/1", ())),
    Sample("Restore", "looks", (0, "", plan.Turn(), _LOOKS), saved.RestoreReply("", ())),
    Sample("Schedule", "full", (SESSION, _ORDER), _QUEUE),
    Sample("Schedule", "least", (1, closures.ClosureOrder()), closures.ClosureQueue(0, settled=0)),
    Sample("Take", "full", (SESSION, _FUNCTIONS, _TOLD, 1 << 33), closures.Taken(_NAME, "step", 99, _PIECE, True)),
    Sample("Take", "least", (1, (), None, 0), closures.Taken()),
    Sample("Fetch", "full", (SESSION, 2001, 1 << 33), closures.Fetched("failed", _PIECE, _FAILURE)),
    Sample("Fetch", "cancelled", (SESSION, 2001, 16), closures.Fetched("cancelled", closures.Piece(), _FAILURE)),
    Sample("Fetch", "least", (1, 1, 0), closures.Fetched("done")),
    Sample("AssignBatches", "full", (SESSION, _ASKED), _HANDED),
    Sample("AssignBatches", "least", (1, chunks.ChunkAsk(0, 0, 0, 0)), chunks.Chunks()),
    Sample("Push", "of chunks", (contribution(chunks=(_HANDED.chunks[0].ticket, 3)), small()), reply(small())),
    Sample("Push", "of a closure", (contribution(closure=_NAME), small()), reply(small())),
    Sample("Push", "traced", (contribution(trace=_SPAN), small()), reply(small())),
    Sample("Offer", "full", (places.Standby("ps9:1", "rack-9", 3),), places.Offered(3, ("ps0:1", "ps1:1"), True)),
    Sample("Offer", "least", (places.Standby("ps9:1"),), places.Offered()),
    Sample("Move", "full", (3, "ps9:1", 1 << 40), "ps9:1"),
    Sample("Move", "least", (0, "", 0), "ps9:1"),
    Sample("Push", "alone", (contribution(alone=True), small()), reply(small())),
    Sample("Push", "of a batch", (contribution(batch=_BATCH_SAID), small()), reply(small())),
    Sample("Push", "of a host", (contribution(host=_HOST, parts=_PARTS), small()), reply(small())),
    Sample("Status", "full", (), STATUS),
    Sample("Status", "least", (), BARE),
    Sample("Events", "full", (), (HAPPENED, status.Happened(0.25, "close", ""))),
    Sample("Events", "least", (), ()),
    *(Sample("Heartbeat", f"refused {name}", (SESSION, 41, PLAN_ID, status.STILL, 0), error(name)) for name in BY_NAME),
)


VOTES = (
    votes.Vote(77, 41, PLAN_ID, 6, 2, frozenset((SESSION, 9)), closed=-1),
    votes.Vote(77, 42, PLAN_ID, 6, error=error("MemoryLimit"), closed=40),
    votes.Vote(77, 64, PLAN_ID, 6, 0, frozenset((9,)), closed=63, digest=votes.Digest(62, (0, 300), (1 << 63, 7))),
    votes.Vote(77, 44, PLAN_ID, 6, whole=frozenset((9, 10)), sums=(frozenset((9, 1 << 40)), frozenset((10,)))),
    votes.Vote(
        77, 45, PLAN_ID, 6, late=frozenset((votes.LateContribution(9, 44), votes.LateContribution(10, 1 << 40)))
    ),
    votes.Testimony(77, 3, (votes.Vote(77, 43, PLAN_ID, 6, 1, frozenset((9,)), closed=42),), 2),
)
"""What another server says."""

PEER, PEER_INCARNATION = Task("ps", 1), 0x0123_4567_89AB_CDEF
"""The server that says it."""


def transport_samples(nbytes: int, refused: Sequence[str]) -> list[Sample]:
    """Calls that go over transports.

    Args:
        nbytes: of a tensor that is larger than a part.
        refused: classes of errors.
    """
    return [
        Sample("Pull", "full", (SESSION, (150, 1 << 35), 41, ROWS, ()), api.PullReply(41, small())),
        Sample("Pull", "least", (SESSION, (), -1, (), ()), api.PullReply(-1, EMPTY)),
        Sample("Pull", "large", (SESSION, (1,), 0, (), ()), api.PullReply(0, large(nbytes))),
        Sample("Push", "full", (contribution(), small()), reply(small())),
        Sample("Push", "least", (contribution(weights=(), want=()), EMPTY), reply()),
        Sample("Push", "large", (contribution(), large(nbytes)), reply(large(nbytes))),
        Sample("Push", "growing", (contribution(), small()), reply(large(nbytes)), grows=True),
        Sample("Push", "refused", (contribution(), small()), error("Diverged")),
        *(Sample("Pull", f"refused {name}", (SESSION, (1,), 0, (), ()), error(name)) for name in refused),
        _PULL_OF_TABLES,
        _PUSH_OF_KEYS,
    ]


ROUND = MessageCodec(
    pb.RoundHeader,
    lambda reply: pb.RoundHeader.FromString(messages.RoundEncoder().encode(reply)),
    lambda message: messages.RoundDecoder().decode(message, EMPTY),
)
"""The answer to a push, of which nothing is kept."""


def plain(value: Any) -> Any:
    """A value that equals another one only if all is the same: payloads, and fields that `==` passes over, too."""
    if isinstance(value, Payload):
        whole = bytearray(value.size)
        for offset, buffer in value.chunks:
            whole[offset : offset + len(buffer)] = buffer
        return "Payload", value.whole, spell(bytes(whole))
    if isinstance(value, PSError):
        return type(value).__name__, value.message, value.task
    if is_dataclass(value):
        return type(value).__name__, *((each.name, plain(getattr(value, each.name))) for each in fields(value))
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    return value


def walk(message: Message) -> Iterator[Message]:
    """A message and all within it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for below in value if field.is_repeated else (value,):
                yield from walk(below)


# ---- The server ----


class Fixed:
    """A `ParameterServer` that answers what a sample says.

    Attributes:
        asked: the arguments of the calls that came.
        registry: of sessions that it has told of.
        holds: whether calls of `pull` wait for `let_go`.
        reader: how many bytes of a contribution it says that it takes at once.
        heard: what other servers have said, each with who it was.
    """

    address = ""
    incarnation = INCARNATION

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.registry = inside.Registry(PS)
        self.heard: list[tuple[Any, ...]] = []
        self.others: inside.Others | None = None
        self.holds = False
        self.reader = 0
        self._answer: Any = STATUS  # which it tells of before anybody asks
        self._grows = False
        self._held: list[Future[Any]] = []

    def tell(self, sample: Sample) -> None:
        """What is answered from now on."""
        self.asked.clear()
        self._answer, self._grows = sample.answer, sample.grows

    def let_go(self) -> None:
        """Answers what waits."""
        self.holds = False
        while self._held:
            self._settle(self._held.pop())

    def call(self, request: inside.ServerRequest[Any]) -> Any:
        """Answers at once, or by a future. It knows the sessions that it opens."""
        self.asked.append(tuple(vars(request).values()))
        if request.waits:
            future: Future[Any] = Future()
            if self.holds:
                self._held.append(future)
            else:
                self._settle(future)
            return future
        if isinstance(self._answer, PSError):
            raise self._answer
        if isinstance(request, api.OpenRequest):
            self.registry.enter(self._answer.session, request.task)
        return replace(self._answer, process=None) if isinstance(request, api.StatusRequest) else self._answer

    def introduce(self, server: int, incarnation: int) -> None:
        """Lets another server vote here."""
        self.heard.append((server, incarnation))
        self.registry.enter(incarnation, Task("ps", server))

    def hear(self, server: int, vote: votes.Vote) -> None:
        """Keeps another server's vote."""
        self.heard.append((server, vote))

    def meet(self, server: int) -> None:
        """Tells nobody: it says nothing to other servers."""

    def miss(self, server: int, reason: str) -> None:
        """As `meet`."""

    def push(self, contribution: api.Contribution, payload: Payload, begun: api.Begun | None = None) -> Future[Any]:
        """Answers when all of the contribution is there."""
        self.asked.append((contribution, payload))
        payload.reader = self.reader
        future: Future[Any] = Future()

        def answer() -> None:
            if not self._grows:
                return self._settle(future)
            assert begun is not None
            growing = Payload((), self._answer.payload.size)
            begun(growing)
            for chunk in self._answer.payload.chunks:
                growing.add(*chunk)
            return future.set_result(replace(self._answer, payload=growing))

        payload.reach(payload.size, answer)
        return future

    def _settle(self, future: Future[Any]) -> None:
        if isinstance(self._answer, PSError):
            future.set_exception(self._answer)
        else:
            future.set_result(self._answer)
