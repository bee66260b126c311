"""R19: a table that somebody announces is data: an absurd one is refused in words, and nothing is allocated for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kit.internals import (
    BUCKETS,
    LFU,
    MAX_PARTS,
    CBFFilter,
    Constant,
    CounterFilter,
    GlobalStepEvict,
    InvalidRequest,
    MemoryLimit,
    Normal,
    PlacedVariable,
    ProbabilityFilter,
    PSError,
    RowRead,
    SlotTensor,
    TablePart,
    TableSpec,
    TensorSpec,
    TimeToLive,
    Uniform,
    VariableSpec,
    messages,
    parse,
    pb,
)
from tests.kit.rig import SOON, WORKERS, Job, Worker, serving

LIMIT = 1 << 28
SOME = 32 << 20
"""Bytes of memory that a refusal may take, and less than a thousandth of what is announced."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Worker]]:
    """A job on a server with a memory limit, and who is in it."""
    with serving("grpc", 1, tmp_path_factory.mktemp("root"), LIMIT) as servers:
        job = Job(servers)
        yield job, job.join(WORKERS[0])[0]


def table(**more: object) -> TablePart:
    """A table of rows of four numbers."""
    return TablePart("users", TableSpec(**{"shape": (4,)} | more), 0, BUCKETS)  # type: ignore[arg-type]


def beside(**more: object) -> TablePart:
    """A tensor beside it."""
    spec = {"name": "m", "dtype": "float32", "shape": (4,)} | more
    return TablePart("users", TableSpec((4,)), 0, BUCKETS, SlotTensor(**spec))  # type: ignore[arg-type]


ABSURD: dict[str, tuple[TablePart, type[PSError], str]] = {
    "a filter of 2**36 keys": (table(admission=CBFFilter(2, 1 << 36)), MemoryLimit, "613.4 GiB for its filter"),
    "one that never errs": (table(admission=CBFFilter(2, 1 << 36, 1e-9)), MemoryLimit, "TiB for its filter"),
    "a filter of 2**62 keys": (table(admission=CBFFilter(2, 1 << 62)), InvalidRequest, "max_element_size"),
    "a filter that always errs": (table(admission=CBFFilter(2, 9, math.nan)), InvalidRequest, "a finite number"),
    "a filter of 2**63 occurrences": (table(admission=CounterFilter(1 << 63)), InvalidRequest, "k of a CounterFilter"),
    "a die of two sides": (table(admission=ProbabilityFilter(2.0)), InvalidRequest, "p of a ProbabilityFilter"),
    "rows of 2 MiB": (table(shape=(1 << 19,)), InvalidRequest, "impossible shape"),
    "rows of 2**60 numbers": (table(shape=(1 << 30, 1 << 30)), InvalidRequest, "impossible shape"),
    "rows of nothing": (table(shape=(0,)), InvalidRequest, "no elements"),
    "rows of many dimensions": (table(shape=(1,) * 100_000), InvalidRequest, "100001 dimensions"),
    "rows of objects": (table(dtype="object"), InvalidRequest, "unknown dtype 'object'"),
    "2**62 rows": (table(capacity=1 << 62), InvalidRequest, "capacity must be in"),
    "a limit of 2**63 bytes": (table(memory_limit=1 << 63), InvalidRequest, "memory_limit must be in"),
    "a limit of a byte": (table(memory_limit=1), InvalidRequest, "has room for 0 rows"),
    "no numbers": (table(initializer=Constant(math.nan)), InvalidRequest, "a finite number"),
    "an endless interval": (table(initializer=Uniform(-1e308, 1e308)), InvalidRequest, "a finite number"),
    "endless deviations": (table(initializer=Normal(0.0, 1e300)), InvalidRequest, "which is infinite there"),
    "counts that grow": (table(eviction=LFU(1e300), capacity=1 << 20), InvalidRequest, "decay of LFU"),
    "2**40 rounds to live": (table(eviction=GlobalStepEvict(1 << 40)), InvalidRequest, "steps_to_live"),
    "a time before the beginning": (table(eviction=TimeToLive(-1.0)), InvalidRequest, "seconds of TimeToLive"),
    "no buckets": (TablePart("users", TableSpec((4,)), 0, 0), InvalidRequest, "0 buckets from 0 on"),
    "2**32 buckets": (TablePart("users", TableSpec((4,)), 9, (1 << 32) - 1), InvalidRequest, "buckets from 9 on"),
    "a name of two lines": (TablePart("a\nb", TableSpec((4,)), 0, BUCKETS), InvalidRequest, "printable characters"),
    "what lies beside nothing": (beside(), InvalidRequest, "of which no such part is there"),
    "2 MiB beside each row": (beside(shape=(1 << 19,)), InvalidRequest, "impossible shape"),
    "objects beside the rows": (beside(dtype="object"), InvalidRequest, "unknown dtype 'object'"),
    "infinities beside the rows": (beside(value=math.inf), InvalidRequest, "first value of 'm'"),
    "a large number in a small place": (beside(dtype="float16", value=1e9), InvalidRequest, "is infinite there"),
}


def refused(job: Job, worker: Worker, request: pb.CreateBatchRequest) -> PSError:
    """Why a batch is refused, or a variable of it, for which no memory was taken; the job goes on."""
    process, (server,) = psutil.Process(), job.verbs
    before, memory = server.status(), process.memory_info().rss
    request.session = worker.session
    try:
        reply = messages.batch_from_pb(parse(pb.CreateBatchReply, server._ask("CreateBatch", request)))  # type: ignore[attr-defined]
        assert (reply.count, reply.initialized) == (0, ())
        error = reply.error
    except PSError as raised:
        error = raised
    assert error is not None
    after = server.status()
    assert (after.variables, after.nbytes, after.log) == (before.variables, before.nbytes, before.log)
    assert process.memory_info().rss - memory < SOME
    return error


def encoded(job: Job, part: TablePart) -> pb.Variable:
    """A part as the next variable of a job; the rest of the message makes sense."""
    spec = VariableSpec("users/part_0", part.tensor, part=part)
    return messages.VARIABLE.to_pb(PlacedVariable(len(job.variables), spec, (0,)))


@pytest.mark.parametrize("case", ABSURD)
def test_an_absurd_table(attacked: tuple[Job, Worker], case: str) -> None:
    """What it has of too much, or of what is nothing, is named; a table that makes sense is created afterwards."""
    part, kind, words = ABSURD[case]
    error = refused(*attacked, pb.CreateBatchRequest(variables=[encoded(attacked[0], part)]))
    assert type(error) is kind
    assert words in str(error)


def changed(**fields: object) -> pb.TableSpec:
    """A table's message, of which some fields are others."""
    spec = messages.MAPPER.pairs[TableSpec].to_pb(TableSpec((4,), admission=CounterFilter(2), eviction=TimeToLive(9)))
    for name, value in fields.items():
        spec.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, int):
            setattr(spec, name, value)
        else:
            getattr(spec, name).SetInParent()
    return spec


UNKNOWN = {
    "a dtype of keys": (changed(key_dtype=7), "unknown dtype 7 of keys"),
    "first values": (changed(initializer=None), "first values of a table are of a newer version"),
    "a filter": (changed(admission=None), "a table's filter is of a newer version"),
    "a policy": (changed(eviction=None), "a table's policy of eviction is of a newer version"),
    "a value of unknown keys": (changed(refused=9), "unknown value 9 of keys without a row"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_a_newer_client_may_say(attacked: tuple[Job, Worker], case: str) -> None:
    """It is refused as what is not known here, and not taken for something else."""
    spec, words = UNKNOWN[case]
    variable = encoded(attacked[0], table())
    variable.spec.part.spec.CopyFrom(spec)
    error = refused(*attacked, pb.CreateBatchRequest(variables=[variable]))
    assert type(error) is InvalidRequest
    assert words in str(error)


def test_a_variable_that_is_not_what_its_part_is(attacked: tuple[Job, Worker]) -> None:
    """Its shape is that of the part: neither is larger than the other says."""
    for shape in ([1 << 24, 5], [4], [(1 << 24) + 1, 4]):
        variable = encoded(attacked[0], table())
        variable.spec.tensor.shape[:] = shape
        error = refused(*attacked, pb.CreateBatchRequest(variables=[variable]))
        assert "and its part of a table float32[16777216,4]" in str(error)


def test_the_widest_rows_cost_nothing_until_they_are_there(tmp_path: Path) -> None:
    """Programs see 16 TiB of each such table. As many as there may be take little memory, and a part of the address
    space; more are refused, and so is what is asked of them beyond the limit."""
    process, wide = psutil.Process(), TableSpec((1 << 18,))
    parts = [TablePart(f"w{number}", wide, 0, BUCKETS) for number in range(MAX_PARTS)]
    specs = [VariableSpec(part.table, part.tensor, part=part) for part in parts]
    with serving("grpc", 1, tmp_path, LIMIT) as servers:
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        (server,), before = job.verbs, process.memory_info()
        reply = server.create_batch(worker.session, [PlacedVariable(n, spec, (0,)) for n, spec in enumerate(specs)])
        assert (reply.error, reply.count) == (None, MAX_PARTS)
        now = process.memory_info()
        assert now.rss - before.rss < 3 * SOME
        assert now.vms - before.vms < 33 << 40
        assert server.status().nbytes == 0
        job.variables += [PlacedVariable(n, spec, (0,)) for n, spec in enumerate(specs)]
        error = refused(job, worker, pb.CreateBatchRequest(variables=[encoded(job, table())]))
        assert f"too many on server 0, which has {MAX_PARTS}" in str(error)
        with pytest.raises(MemoryLimit, match="take 300 MiB, and the limit is 256 MiB"):
            server.pull(worker.session, [], -1, [RowRead(0, bytes(8 * 300))]).result(SOON)
        rows = server.pull(worker.session, [], -1, [RowRead(0, bytes(8 * 2))]).result(SOON)
        assert rows.payload.size == TensorSpec("float32", (2, 1 << 18)).nbytes
