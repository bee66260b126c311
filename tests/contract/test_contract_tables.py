"""Dynamic tables in rounds and reads: rows come with their first gradient, and what is refused changes nothing."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.contributions import WHOLE, by_keys, create_part, keyed, part_of
from tests.kit.internals import (
    BUCKETS,
    Apply,
    Constant,
    Contribution,
    Input,
    InvalidRequest,
    MemoryLimit,
    Node,
    Payload,
    PlacedVariable,
    Plan,
    Program,
    ProgramError,
    Reduction,
    Ref,
    RowRead,
    SlotTensor,
    TablePart,
    TableRead,
    TableSpec,
    TensorSpec,
    Trim,
    VariableSpec,
    buckets_of,
    hashes_of,
)
from tests.kit.rig import SOON, WORKERS, Job, adding, together, turn

SPEC = TableSpec((2,), initializer=Constant(0.5))
A, B = WORKERS[:2]
OLD, NEW = -7, 1 << 62


def table_of(job, worker, spec=SPEC, server=0, buckets=range(BUCKETS), slot=None, name="users"):
    """A part of a table, or a tensor beside it, as the next variable of the job."""
    return create_part(job, worker, part_of(len(job.variables), spec, server, buckets, slot, name))


def push(worker, plan, keys, value=1.0, times=None, lookups=(), server=0, **said):
    """Contributes rows for some keys, all of one number."""
    header = Contribution(
        worker.session, worker.generation, worker.round, plan.id, (1.0,) * len(plan.reductions), rows=(len(keys),),
        lookups=tuple(RowRead.of(v.id, np.array(ids, np.int64)) for v, ids in lookups),
    )  # fmt: skip
    return worker.job.verbs[server].push(replace(header, **said), Payload.pack(keyed(keys, value, times)))


def looked_up(job, worker, table, *keys, after=-1):
    """The first numbers of the rows of some keys."""
    read = RowRead.of(table.id, np.array(keys, np.int64))
    reply = job.verbs[table.servers[0]].pull(worker.session, [], after, [read]).result(SOON)
    return reply.payload.tensors([TensorSpec("float32", (len(keys), 2))])[0][:, 0].tolist()


def size(job, worker, table):
    reply = job.verbs[table.servers[0]].pull(worker.session, [], -1, [], [TableRead(table.id, "size")]).result(SOON)
    return reply.rows[0]


def test_a_row_is_made_by_its_first_gradient(job, two):
    """Of any key; a lookup makes none. Rows of one key are summed over the members. Hints change nothing: of rows that
    are not there, of keys that come twice, of a variable that is no table."""
    table, plain = table_of(job, two[0]), job.variable(two[0], np.ones((4, 2), "float32"))
    assert looked_up(job, two[0], table, OLD, NEW) == [0.5, 0.5]
    assert size(job, two[0], table) == 0
    plan = job.approve(by_keys(table), two[0])
    hints = RowRead.of(table.id, np.array([NEW, 7, 7, OLD])), RowRead.of(plain.id, np.array([3, 0]))
    replies = together(
        push(two[0], plan, [NEW, OLD], lookups=[(table, [3, NEW])], hints=hints),
        push(two[1], plan, [NEW, 5], value=2.0, hints=hints),
    )
    rows = replies[0].payload.tensors([TensorSpec("float32", (2, 2))])[0]
    assert rows.tolist() == [[0.5, 0.5], [3.5, 3.5]]
    assert replies[1].payload.size == 0
    assert looked_up(job, two[0], table, OLD, 5, NEW, 6, 7, after=0) == [1.5, 2.5, 3.5, 0.5, 0.5]
    assert size(job, two[0], table) == 3


def momentum_of(table, slot):
    """A plan that adds rows to a slot, and subtracts that from the table."""
    program = Program(
        (Input("variable", WHOLE), Input("value", WHOLE), Input("variable", WHOLE)),
        (Node("add", (2, 1)), Node("subtract", (0, 3))),
        ((2, 3), (0, 4)),
        (),
    )
    args = Ref("variable", table.id), Ref("reduction", 0), Ref("variable", slot.id)
    reductions = (Reduction("sum", WHOLE, (0,), "users", "keys"),)
    return Plan(reductions, programs=(program,), applies=(Apply(0, (0,), args, "lazy"),))


def test_a_slot_takes_its_place_where_there_is_room(job, two):
    """It has a row for each that the table has, from the first round on that has to do with it: one that first needs
    them is refused where these do not fit."""
    table = table_of(job, two[0])
    plan, keys = job.approve(by_keys(table), two[0]), list(range(10_000))
    together(push(two[0], plan, keys), push(two[1], plan, []))
    slot = table_of(job, two[0], slot=SlotTensor("adam/users/m", "float32", (2,), 0.25))
    assert looked_up(job, two[0], slot, 1, 10_000) == [0.25, 0.25]
    momentum = job.approve(momentum_of(table, slot), two[0])
    store = job.servers.cores[0].machine.job.store

    def pushed(room):
        store.memory_limit = store.nbytes + room
        turn(*two)
        return push(two[0], momentum, [1, 10_000]), push(two[1], momentum, [])

    for future in pushed(79_999):
        with pytest.raises(MemoryLimit, match=r"'adam/users/m' beside 10000 rows .* 80000 bytes.* leaves 79999"):
            future.result(SOON)
    assert looked_up(job, two[0], table, 1, 10_000, after=1) == [1.5, 0.5]
    together(*pushed(1 << 20))
    assert looked_up(job, two[0], slot, 1, 2, 10_000, after=2) == [1.25, 0.25, 1.25]
    assert looked_up(job, two[0], table, 1, 2, 10_000, after=2) == [0.25, 1.5, -0.75]


def test_tables_of_one_round_share_the_room(serve):
    """What each of them alone would have is not there for both: none of them grows, whichever was first."""
    job = Job(serve(1, memory_limit=5 << 20))
    (worker,) = job.join(A)
    tables = [create_part(job, worker, part_of(n, SPEC, name=f"t{n}", table=f"t{n}")) for n in range(2)]
    plan, keys = job.approve(by_keys(*tables), worker), list(range(60_000))

    def pushed(*counts):
        said = Contribution(worker.session, worker.generation, worker.round, plan.id, (1.0, 1.0), rows=counts)
        worker.round += 1
        return job.verbs[0].push(said, Payload.pack([array for n in counts for array in keyed(keys[:n])]))

    with pytest.raises(MemoryLimit, match="--memory-limit"):
        pushed(60_000, 60_000).result(SOON)
    assert [size(job, worker, table) for table in tables] == [0, 0]
    together(pushed(60_000, 0))
    assert [size(job, worker, table) for table in tables] == [60_000, 0]


def test_much_is_not_asked_for_in_a_few_words(serve):
    """Rows that have no memory yet are made for an answer: more of them than the server may hold are refused."""
    job = Job(serve(1, memory_limit=1 << 20))
    (worker,) = job.join(A)
    wide = replace(SPEC, shape=(1 << 18,))
    table = create_part(job, worker, part_of(0, wide))
    ask = job.verbs[0].pull
    with pytest.raises(MemoryLimit, match="take 300 MiB, and the limit is 256 MiB; request fewer"):
        ask(worker.session, [], -1, [RowRead.of(table.id, np.arange(150))] * 2).result(SOON)
    reply = ask(worker.session, [], -1, [RowRead.of(table.id, np.arange(2))]).result(SOON)
    assert reply.payload.size == 2 << 20
    with pytest.raises(InvalidRequest, match="buckets of a dynamic table are requested twice"):
        ask(worker.session, [], -1, [], [TableRead(table.id, "rows", 0, BUCKETS)] * 2).result(SOON)


def test_parts_on_two_servers(job, two):
    """Each has the keys of its buckets, and refuses others, in a round, a read and a lookup."""
    parts = [
        table_of(job, two[0], server=place, buckets=cut, name=f"users/part_{place}")
        for place, cut in enumerate((range(512), range(512, BUCKETS)))
    ]
    keys = np.arange(100)
    owners = buckets_of(hashes_of(keys, SPEC.salt)) // 512
    plan = job.approve(by_keys(*parts), two[0])
    mine = [keys[owners == place].tolist() for place in range(2)]
    futures = []
    for place in range(2):
        counts = tuple(len(mine[place]) * (n == place) for n in range(2))
        futures += [push(worker, plan, mine[place], server=place, rows=counts) for worker in two]
    together(*futures)
    assert [size(job, two[0], part) for part in parts] == [len(each) for each in mine]
    assert looked_up(job, two[0], parts[1], *mine[1]) == [2.5] * len(mine[1])
    hinting = {"rows": (0, len(mine[1])), "hints": (RowRead.of(parts[1].id, np.array([mine[1][0], mine[0][0]])),)}
    with pytest.raises(InvalidRequest, match=f"key {mine[0][0]} of table 'users' is in bucket"):
        push(two[0], plan, mine[1], server=1, round=1, **hinting).result(SOON)
    with pytest.raises(InvalidRequest, match=f"key {mine[0][0]} of table 'users' is in bucket"):
        looked_up(job, two[0], parts[1], *mine[0])
    read = TableRead(parts[1].id, "keys", 0, 10)
    with pytest.raises(InvalidRequest, match="which has buckets 512 to 1023"):
        job.verbs[1].pull(two[0].session, [], -1, [], [read]).result(SOON)
    turn(*two)
    wrong = (len(mine[0]), 0), (0, len(mine[0]))
    futures = [push(worker, plan, mine[0], server=s, rows=wrong[s]) for worker in two for s in range(2)]
    assert any(isinstance(future.exception(SOON), InvalidRequest) for future in futures[1::2])


IDS, GIVEN = Reduction("sum", WHOLE, (0,), form="rows"), Ref("reduction", 0)
OTHER_SHAPE = Reduction("sum", TensorSpec("float32", (5, 2)), (0,), form="keys")
SQUARED = replace(adding(WHOLE), nodes=(Node("multiply", (0, 0)), Node("add", (2, 1))), assigns=((0, 3),))
BAD_PLANS = {
    "whole": (lambda v: replace(by_keys(v), reductions=(Reduction("sum", WHOLE, (0,)),)), ProgramError, "'users'"),
    "by ids": (lambda v: replace(by_keys(v), reductions=(IDS,)), ProgramError, "dynamic table 'users' cannot run on"),
    "returned": (lambda v: by_keys(v, returned=(GIVEN,)), InvalidRequest, "rows by keys cannot be returned"),
    "of another shape": (lambda v: Plan((OTHER_SHAPE,)), InvalidRequest, "must have a table's shape"),
    "cut to one row": (lambda v: by_keys(v, trims=(Trim(v.id, (0,), 1),)), InvalidRequest, "cannot be shrunk"),
    "cut to many rows": (lambda v: by_keys(v, trims=(Trim(v.id, (0,), 1 << 40),)), InvalidRequest, "cannot be shrunk"),
    "of two tables": (lambda v: momentum_of(v, replace(v, id=v.id + 2)), ProgramError, "only one dynamic table"),
    "cuts an array": (lambda v: Plan(trims=(Trim(v.id + 1, (0,), 0),)), InvalidRequest, "only dynamic tables"),
    "momentum": (lambda v: by_keys(v, program=SQUARED), ProgramError, "cannot run on the rows of one gradient"),
}


def test_plans_that_a_table_cannot_run(job, two):
    """They are refused before a round."""
    table = table_of(job, two[0])
    job.variable(two[0], np.zeros(2, "float32"))
    create_part(job, two[0], part_of(len(job.variables), SPEC, name="items", table="items"))
    for make, error, why in BAD_PLANS.values():
        with pytest.raises(error, match=why):
            job.verbs[0].propose(two[0].session, make(table), "", None)


def test_what_a_table_refuses_to_be(job, two):
    """An array that is read; a variable beside a table that is not there; a spec that contradicts itself."""
    table = table_of(job, two[0])
    with pytest.raises(InvalidRequest, match="has no size; look its rows up"):
        job.verbs[0].pull(two[0].session, [table.id], -1).result(SOON)
    beside = job.variable(two[0], np.zeros(2, "float32"))
    with pytest.raises(InvalidRequest, match="is not a dynamic table"):
        job.verbs[0].pull(two[0].session, [], -1, [], [TableRead(beside.id, "size")]).result(SOON)
    part = TablePart("items", SPEC, 0, BUCKETS, SlotTensor("m", "float32", (2,)))
    alone = PlacedVariable(2, VariableSpec("m", part.tensor, part=part), (0,))
    reply = job.verbs[0].create_batch(two[0].session, [alone])
    assert isinstance(reply.error, InvalidRequest)
    assert "belongs to table 'items'" in str(reply.error)
    with pytest.raises(InvalidRequest, match="its part of a table"):
        VariableSpec("m", TensorSpec("float32", (3, 2)), part=replace(part, slot=None)).check()


def test_times_that_cannot_be(job, two):
    """They fail the round for all, who are told whose they are."""
    table = table_of(job, two[0])
    plan = job.approve(by_keys(table), two[0])
    for times in (0, -1, 1 << 40):
        for future in (push(two[0], plan, [1]), push(two[1], plan, [2], times=[times])):
            with pytest.raises(ProgramError, match=f"'users': the key counts from {B}"):
                future.result(SOON)
        turn(*two)
    assert size(job, two[0], table) == 0
