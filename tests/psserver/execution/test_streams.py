"""Rounds that stream: a variable is updated when all contributions to it are there, and nobody sees half a round."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as given_by_hypothesis
from hypothesis import strategies as st
from safetensors.numpy import load_file

from psserver.devices import ServerDevice
from psserver.execution.execution import Execution
from psserver.plans.round import Commit, MemberShare
from psserver.programs import interpreter
from psserver.programs.kernels.kernels import Kernels
from pstesting.clock import Clock
from pswire.api import Contribution
from pswire.errors import Diverged, Fenced, InvalidRequest, PSError, ServerLost
from pswire.limits import ALIGN
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref, SnapshotOrder, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from pswire.network.parts import parts_of
from pswire.network.payload import EMPTY, Payload
from tests.kit import rig
from tests.kit.contributions import LIMIT, SIZE, Sending, arrays, full, round_of, stored, streaming, zeros
from tests.kit.programs import run, same_bits, step, updates

A, B, C = rig.WORKERS[:3]
VECTOR = TensorSpec("float64", (SIZE,))


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """All plans of this module stream that have more than one variable."""
    streaming(monkeypatch)


@pytest.fixture
def two(job):
    return job.join(A, B)


@pytest.fixture
def three(job, two):
    """Three variables, all zero."""
    return [job.variable(two[0], value) for value in zeros(3)]


@pytest.fixture
def plan(job, two, three):
    """Adds to each variable what is summed for it."""
    return job.approve(rig.sum_into(*three, returned=False), two[0])


def ids(variables):
    return tuple(variable.id for variable in variables)


def wanted(reply, variables):
    """The wanted variables in an answer, each of which has one number throughout."""
    tensors = reply.payload.tensors([variable.spec.tensor for variable in variables])
    assert all((tensor == tensor[0]).all() for tensor in tensors)
    return [float(tensor[0]) for tensor in tensors]


def failure(future):
    assert future.done()
    error = future.exception()
    assert isinstance(error, PSError), error
    return error


# ---- In order ----


def test_what_is_excluded_is_sent_as_it_was(job, two, three):
    """When its turn has come, and the answers are as long as always. A weight of nothing is not waited for: its payload
    has no place for it."""
    plan = rig.sum_into(*three, returned=False)
    plan = job.approve(replace(plan, applies=tuple(replace(each, optional=True) for each in plan.applies)), two[0])
    weights = [(1.0, 0.0, 1.0), (0.0, 0.0, 1.0)]
    sent = [
        Sending(worker, plan, full(1, 2, 3), weights=each, want=ids(three))
        for worker, each in zip(two, weights, strict=True)
    ]
    sent[0].come(LIMIT)
    assert arrays(sent[0].told()) == [1, 0]
    for reply in rig.together(*(sending.come().reply for sending in sent)):
        assert wanted(reply, three) == [1, 0, 6]


def test_who_wants_nothing_is_answered_at_the_end(job, two, three, plan):
    """And so is who wants what is not here: with an error of its own. A stranger that names the round that runs gets an
    error alone, and hears nothing of the answer."""
    (third,) = job.join(C)
    third.generation = two[0].generation
    nothing = Sending(two[0], plan, full(1, 2, 3)).come()
    missing = Sending(two[1], plan, full(1, 2, 3), want=(77,)).come(LIMIT)
    stranger = Sending(third, plan, full(1, 2, 3), want=ids(three))
    assert isinstance(failure(stranger.reply), Fenced)
    missing.come()
    assert nothing.reply.result(rig.SOON).payload.size == 0
    assert isinstance(failure(missing.reply), InvalidRequest)
    assert missing.begun == stranger.begun == []
    assert stored(job, *three) == [2, 4, 6]


def test_what_needs_no_contribution_waits_for_none(job, two, three):
    doubling = Program((Input("variable", VECTOR),), (Node("add", (0, 0)),), ((0, 1),), ())
    other, adds = job.variable(two[0], np.full(SIZE, 7.0)), rig.sum_into(*three, returned=False)
    applies = (Apply(len(adds.programs), (0,), (Ref("variable", other.id),)), *adds.applies)
    plan = job.approve(Plan(adds.reductions, (), (*adds.programs, doubling), applies), two[0])
    sent = [Sending(worker, plan, full(1, 2, 3), want=ids(three)) for worker in two]
    assert stored(job, other) == [14]
    first, _ = rig.together(*(sending.come().reply for sending in sent))
    assert wanted(first, three) == [2, 4, 6]


@pytest.fixture
def queue():
    return deque()


@pytest.fixture
def queued(queue, tmp_path):
    clock = Clock()
    cores = [rig.core(0, 0, 0, tmp_path, clock, queue.append)]
    return rig.JobWithValues(rig.Servers(list(cores), cores, clock, tmp_path, False))


def test_steps_follow_one_another(queued, queue):
    """All that is there is made as one piece of work: nothing that was queued meanwhile comes between."""
    (worker,) = queued.join(A)
    *variables, other = (queued.variable(worker, value) for value in zeros(4))
    plan = queued.approve(rig.sum_into(*variables, returned=False), worker)
    sending = Sending(worker, plan, full(1, 2, 3), want=ids(variables)).come()
    reading = queued.verbs[0].pull(worker.session, [other.id], -1)
    queue.popleft()()
    assert (sending.reply.done(), reading.done()) == (True, False)
    assert wanted(sending.reply.result(rig.SOON), variables) == [1, 2, 3]
    queue.popleft()()
    assert (reading.done(), len(queue)) == (True, 0)


def test_while_a_step_is_made_no_other_begins(queued, queue, monkeypatch):
    (worker,) = queued.join(A)
    variables = [queued.variable(worker, value) for value in zeros(3)]
    plan = queued.approve(rig.sum_into(*variables, returned=False), worker)
    sending = Sending(worker, plan, full(1, 2, 3), want=ids(variables))
    begin, others = Execution._begin, []

    def slow(execution):
        begin(execution)
        queued.servers.tick()
        sending.come(LIMIT)
        others.append(len(queue))

    monkeypatch.setattr(Execution, "_begin", slow)
    queue.popleft()()
    assert (others, stored(queued, *variables)) == ([0], [1, 0, 0])


def test_rounds_that_are_small_wait_for_everything(job, two, three):
    """They are made at once or not at all, and nobody is told of half an answer."""
    plan = job.approve(rig.sum_into(three[0], returned=False), two[0])
    assert plan.streams == frozenset()
    sent = [Sending(worker, plan, full(1), want=ids(three)).come(LIMIT - 16) for worker in two]
    assert stored(job, *three) == [0, 0, 0]
    first, _ = rig.together(*(sending.come().reply for sending in sent))
    assert wanted(first, three) == [2, 0, 0]
    assert [sending.begun for sending in sent] == [[], []]


def test_a_program_that_may_refuse_a_value_waits_for_everything(job, two):
    spec = TensorSpec("int64", (SIZE,))
    v, w = (job.variable(two[0], np.full(SIZE, 2)) for _ in range(2))
    plan = job.approve(updates(rig.adding(spec), rig.power(spec)), two[0])
    sent = [Sending(worker, plan, [np.full(SIZE, 3), np.full(SIZE, -1)]).come() for worker in two]
    assert all("pow" in str(failure(sending.reply)) for sending in sent)
    assert stored(job, v, w) == [2, 2]


def test_asynchronous_rounds_wait_for_everything(job):
    one, other = job.join(A, B, mode="async")
    variables = [job.variable(one, value) for value in zeros(2)]
    plan = job.approve(rig.sum_into(*variables, returned=False), one)
    assert plan.streams == {0}
    slow = Sending(one, plan, full(1, 2), want=ids(variables)).come(LIMIT)
    assert stored(job, *variables) == [0, 0]
    fast = Sending(other, plan, full(10, 20), want=ids(variables)).come()
    assert wanted(fast.reply.result(rig.SOON), variables) == [10, 20]
    slow.come()
    assert wanted(slow.reply.result(rig.SOON), variables) == [11, 22]
    assert slow.begun == fast.begun == []


def test_who_observes_is_answered_and_not_waited_for(job, two, three):
    """Its answer grows as the others' do; a plan that is approved late begins in the middle, with what is there."""
    plan = rig.sum_into(*three, returned=False)
    observer = Sending(two[1], plan, want=ids(three), observes=True)
    sending = Sending(two[0], plan, full(1, 2, 3), want=ids(three)).come(LIMIT)
    assert stored(job, *three) == [0, 0, 0]
    job.approve(plan, two[0])
    assert stored(job, *three) == [1, 0, 0]
    assert arrays(observer.told()) == [1]
    sending.come()
    assert wanted(observer.reply.result(rig.SOON), three) == [1, 2, 3]


# ---- Readers ----


def test_nobody_reads_half_a_round(job, two, three, plan):
    """Neither the variables that it has updated nor those that it will; others are read, and sent, at once."""
    other = job.variable(two[0], np.full(SIZE, 7.0))
    sent = [Sending(worker, plan, full(1, 2, 3), want=(other.id, *ids(three))) for worker in two]
    assert arrays(sent[0].told()) == [7]
    for sending in sent:
        sending.come(LIMIT)
    reading = [job.verbs[0].pull(two[0].session, [variable.id], -1) for variable in three]
    assert float(job.value(two[0], other)[0]) == 7
    assert not any(future.done() for future in reading)
    for sending in sent:
        sending.come()
    values = [future.result(rig.SOON).payload.tensors([VECTOR])[0] for future in reading]
    assert [float(value[0]) for value in values] == [2, 4, 6]
    assert wanted(sent[0].reply.result(rig.SOON), [other, *three]) == [7, 2, 4, 6]


def test_who_asks_again_for_the_last_round_does_not_read_half_of_this_one(job, two, three, plan):
    last = rig.together(*(Sending(worker, plan, full(1, 2, 3), want=ids(three)).come().reply for worker in two))
    two[1].round += 1
    early = Sending(two[1], plan, full(1, 2, 3)).come()
    asking = two[0].push(plan, full(1, 2, 3), want=ids(three))
    assert wanted(asking.result(rig.SOON), three) == [2, 4, 6]
    two[0].round += 1
    now = Sending(two[0], plan, full(1, 2, 3)).come(LIMIT)
    two[1].round -= 1
    asking = two[1].push(plan, full(1, 2, 3), want=ids(three))
    assert not asking.done()
    now.come()
    rig.together(now.reply, early.reply)
    assert wanted(asking.result(rig.SOON), three) == [4, 8, 12]
    assert wanted(last[0], three) == [2, 4, 6]


def test_a_snapshot_is_of_the_whole_round(job, two, three):
    """It is written when the round is over, and has all of its updates."""
    adds = rig.sum_into(*three, returned=False)
    plan = Plan(adds.reductions, (), adds.programs, adds.applies, (), SnapshotOrder("here", (0,)))
    job.approve(plan, two[0])
    sent = [Sending(worker, plan, full(1, 2, 3)).come(LIMIT) for worker in two]
    shard = job.verbs[0].snapshot(job.token, plan.id, "")
    assert not shard.done()
    for sending in sent:
        sending.come()
    written = shard.result(rig.SOON)
    values = load_file(job.servers.root / "here" / written.file)
    assert [float(values[v.spec.name][0]) for v in three] == [2, 4, 6]


# ---- Members that are lost ----


def test_who_is_lost_before_a_round_begins_has_no_part_in_it(job, two, three, plan):
    """However much of its contribution has come: nothing was done with it."""
    gone = Sending(two[1], plan, full(10, 20, 30)).come(2 * LIMIT)
    job.close([two[0].member])
    assert isinstance(failure(gone.reply), Fenced)
    reply = Sending(two[0], plan, full(1, 2, 3), want=ids(three)).come().reply.result(rig.SOON)
    assert (reply.excluded, wanted(reply, three)) == ((B,), [1, 2, 3])


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    ("came", "lost"),
    [((1, 3), "b"), ((1, 1.75), "b"), ((0, 0), "ab"), ((1, 1), "ab"), ((2, 2), "ab"), ((2, 1), "ab")],
    ids=str,
)
def test_what_lost_members_have_sent_whole_counts(job, two, three, op, came, lost):
    """And nothing else of theirs: a mean is over those whose contributions are in it, and the answer names who has not
    sent all. Where all are lost nothing more is made, and the job goes on with new members."""
    plan = job.approve(rig.sum_into(*three, op=op, returned=False), two[0])
    given, weights = ((2, 4, 6), (20, 40, 60)), (1.0, 3.0)
    sent = [
        Sending(two[n], plan, full(*given[n]), weights=(weights[n],) * 3, want=ids(three)).come(int(came[n] * LIMIT))
        for n in (0, 1)
    ]
    job.close([two[n].member for n in (0, 1) if "ab"[n] not in lost])
    assert all(isinstance(failure(sent["ab".index(name)].reply), Fenced) for name in lost)
    if lost == "b":
        sent[0].come()
    made = []
    for place in range(3):
        counted = [n for n in (0, 1) if "ab"[n] not in lost or came[n] >= place + 1]
        total = sum(given[n][place] for n in counted)
        made.append(total / sum(weights[n] for n in counted) if op == "mean" and counted else total)
    assert stored(job, *three) == made
    if lost == "b":
        reply = sent[0].reply.result(rig.SOON)
        assert (reply.excluded, reply.generation.number) == (() if came[1] == 3 else (B,), job.generation.number)
        assert wanted(reply, three) == made
    else:
        (new,) = job.join(C)
        new.round = 1
        assert [float(job.value(new, variable)[0]) for variable in three] == made
        reply = Sending(new, plan, full(1, 1, 1), want=ids(three)).come().reply.result(rig.SOON)
        assert (reply.excluded, wanted(reply, three)) == ((), [value + 1 for value in made])


# ---- What goes wrong ----


def steps(job, members):
    """Two variables, the first of the job, and a plan that adds to each a sum times the same operand."""
    inputs = (Input("variable", VECTOR), Input("value", VECTOR), Input("operand", VECTOR))
    scaling = Program(inputs, (Node("multiply", (1, 2)), Node("add", (0, 3))), ((0, 4),), ())
    variables = [job.variable(members[0], value) for value in zeros(2)]
    return variables, job.approve(updates(scaling, scaling), members[0])


def test_operands_that_differ_change_nothing(job, two):
    """They come first, so that the divergence is found, and told, before anything is written."""
    variables, plan = steps(job, two)
    whole = Sending(two[0], plan, full(1, 2), operands=full(5)).come()
    sending = Sending(two[1], plan, full(1, 2), operands=full(6)).come(LIMIT)
    for one in (whole, sending):
        assert isinstance(failure(one.reply), Diverged)
    assert stored(job, *variables) == [0, 0]
    sending.come()
    assert stored(job, *variables) == [0, 0]


def test_operands_are_waited_for(job, two):
    """Of everyone, however much else is there; where a lost member has not sent them whole nothing of it counts."""
    variables, plan = steps(job, two)
    whole = Sending(two[0], plan, full(1, 2), operands=full(5)).come()
    sending = Sending(two[1], plan, full(1, 2), operands=full(5)).come(LIMIT - 16)
    assert stored(job, *variables) == [0, 0]
    sending.come(16 + LIMIT)
    assert stored(job, *variables) == [10, 0]
    sending.come()
    rig.together(whole.reply, sending.reply)
    assert stored(job, *variables) == [10, 20]
    rig.turn(*two)
    gone = Sending(two[1], plan, full(1, 2), operands=full(5), want=ids(variables)).come(16)
    sending = Sending(two[0], plan, full(1, 2), operands=full(5), want=ids(variables)).come()
    job.close([two[0].member])
    assert isinstance(failure(gone.reply), Fenced)
    reply = sending.reply.result(rig.SOON)
    assert (reply.excluded, wanted(reply, variables)) == ((B,), [15, 30])


def test_a_variable_without_a_value_is_found_before_anything_is_written(job, two, three):
    spec = VariableSpec("late", VECTOR)
    rig.create(job.verbs[0], two[0].session, 3, spec)
    late = Apply(0, (0,), (Ref("variable", 3), Ref("reduction", 1)))
    first = Apply(0, (0,), (Ref("variable", three[0].id), Ref("reduction", 0)))
    plan = Plan((Reduction("sum", VECTOR, (0,)),) * 2, (), (rig.adding(VECTOR),), (first, late))
    job.approve(plan, two[0])
    sent = [Sending(worker, plan, full(1, 2)).come() for worker in two]
    for sending in sent:
        error = failure(sending.reply)
        assert not isinstance(error, ServerLost)
        assert "late" in str(error)
    assert stored(job, three[0]) == [0]


def short(monkeypatch, after):
    run, made = interpreter.Script.run, []

    def counted(*args):
        made.append(1)
        if len(made) > after:
            raise MemoryError("no more")
        return run(*args)

    monkeypatch.setattr(interpreter.Script, "run", counted)


def test_memory_that_ends_halfway_ends_the_job(job, two, three, plan, monkeypatch):
    """Everyone is told that the server is lost, and nobody reads, or goes on with, half of a round; a job that is begun
    anew has nothing of the last one."""
    other = job.open(C).session
    with monkeypatch.context() as patch:
        short(patch, after=1)
        sent = [Sending(worker, plan, full(1, 2, 3)).come(LIMIT) for worker in two]
        reading = job.verbs[0].pull(other, [three[0].id], -1)
        for sending in sent:
            sending.come(LIMIT)
    for sending in sent:
        error = failure(sending.reply)
        assert isinstance(error, ServerLost)
        assert all(word in str(error) for word in ("round 0", "no more", "checkpoint"))
        sending.come()
    assert isinstance(failure(reading), ServerLost)
    server = job.verbs[0]
    for call in (
        lambda: server.pull(other, [three[0].id], -1).result(rig.SOON),
        lambda: two[0].push(plan, full(1, 2, 3)).result(rig.SOON),
        lambda: server.heartbeat(two[0].session, -1, b""),
        lambda: job.close([]),
    ):
        with pytest.raises(ServerLost):
            call()
    again(job)


def again(job):
    job.begin()
    (new,) = job.join(C)
    variables = [job.variable(new, value) for value in zeros(3)]
    plan = job.approve(rig.sum_into(*variables, returned=False), new)
    sending = Sending(new, plan, full(1, 2, 3), want=ids(variables)).come(LIMIT)
    assert arrays(sending.told()) == [1]
    assert wanted(sending.come().reply.result(rig.SOON), variables) == [1, 2, 3]


@pytest.mark.parametrize("begins", [True, False], ids=["another job begins", "the server ends"])
def test_a_stream_is_thrown_away(job, two, three, plan, begins):
    """Who was in it is told, and what still comes changes nothing."""
    sent = [Sending(worker, plan, full(1, 2, 3)).come(LIMIT) for worker in two]
    old = job.servers.cores[0].machine.job.store.find(three[1].id).array
    job.begin() if begins else job.servers.cores[0].close()
    for sending in sent:
        assert isinstance(failure(sending.reply), ServerLost)
        sending.come()
    assert not old.any()
    if begins:
        again(job)


# ---- What is sent again ----


def test_the_same_payload_may_be_pushed_again(job, two, three, plan):
    """Where there is no network between, a resend is the same object: it takes nothing from itself."""
    cut = Sending(two[1], plan, full(10, 20, 30), want=ids(three)).come(LIMIT)
    resent = job.verbs[0].push(cut.said, cut.payload)
    cut.come()
    whole = Sending(two[0], plan, full(1, 2, 3), want=ids(three)).come()
    for reply in rig.together(resent, cut.reply, whole.reply):
        assert wanted(reply, three) == [11, 22, 33]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [LIMIT, 4 * LIMIT])
def test_a_resend_of_another_size_is_refused(job, two, three, plan, size, whole):
    """It can be no second attempt, and what is there stays as it was."""
    cut = Sending(two[1], plan, full(10, 20, 30), want=ids(three)).come(3 * LIMIT if whole else LIMIT)
    other = Payload((), size)
    refused = job.verbs[0].push(cut.said, other)
    other.add(0, memoryview(bytes(size)))
    assert isinstance(failure(refused), InvalidRequest)
    cut.come()
    reply = Sending(two[0], plan, full(1, 2, 3), want=ids(three)).come().reply.result(rig.SOON)
    assert wanted(reply, three) == wanted(cut.reply.result(rig.SOON), three) == [11, 22, 33]


@given_by_hypothesis(st.data())
def test_every_attempt_counts_once(data):
    """Whatever of it comes when, however often it is begun: each member's contribution is there once, and whole. A
    variable is updated as soon as all contributions to it have come, and sent once what is wanted before it is. Members
    that want the same share an answer."""
    with pytest.MonkeyPatch.context() as patch, rig.serving("core", 1, Path("nowhere")) as servers:
        streaming(patch)
        job = rig.Job(servers)
        workers = job.join(A, B, C)
        variables = [job.variable(workers[0], value) for value in zeros(3)]
        plan = job.approve(rig.sum_into(*variables, returned=False), workers[0])
        orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
        attempts, shared, wants = [], {}, [data.draw(st.sampled_from(orders)) for _ in workers]

        def begin(place):
            values = [float(10**place * n) for n in (1, 2, 3)]
            want = tuple(variables[n].id for n in wants[place])
            attempts.append((place, Sending(workers[place], plan, full(*values), want=want)))

        def look():
            ends = [max((each.payload.end for owner, each in attempts if owner == n), default=0) for n in range(3)]
            made = min(ends) // LIMIT
            assert stored(job, *variables) == [111.0 * (n + 1) * (n < made) for n in range(3)]
            for place, sending in attempts:
                sendable = [111.0 * (n + 1) for n in takewhile(lambda n: n < made, wants[place])]
                for answer in sending.begun:
                    assert arrays(answer) == sendable
                    assert shared.setdefault(tuple(wants[place]), answer) is answer

        for _ in range(data.draw(st.integers(0, 12))):
            place = data.draw(st.integers(0, 2))
            mine = [sending for owner, sending in attempts if owner == place]
            if not mine or data.draw(st.booleans()):
                begin(place)
            else:
                sending = data.draw(st.sampled_from(mine))
                sending.come(data.draw(st.sampled_from([16, LIMIT, 3 * LIMIT])), data.draw(st.sampled_from([16, 48])))
            look()
        for place in range(3):
            begin(place)
            attempts[-1][1].come()
        for place, sending in attempts:
            asked = [variables[n] for n in wants[place]]
            assert wanted(sending.reply.result(rig.SOON), asked) == [111 * (n + 1) for n in wants[place]]
        look()


# ---- The same as all at once ----

SPEC = {dtype: TensorSpec(dtype, (SIZE,)) for dtype in ("float32", "float64")}


def momentum(spec):
    inputs = (Input("variable", spec), Input("variable", spec), Input("value", spec), Input("operand", spec))
    nodes = (Node("multiply", (1, 3)), Node("add", (4, 2)), Node("subtract", (0, 5)))
    return Program(inputs, nodes, ((0, 6), (1, 5)), (5,))


def through(spec):
    """A program of two values, which assigns their difference and gives what was there before."""
    inputs = (Input("variable", spec), Input("value", spec), Input("value", spec))
    return Program(inputs, (Node("subtract", (1, 2)), Node("add", (0, 0))), ((0, 3),), (4, 3))


@st.composite
def rounds(draw):
    """A plan of several programs on four variables with random reductions, and what its members say."""
    spec = SPEC[draw(st.sampled_from(sorted(SPEC)))]
    count = draw(st.integers(2, 4))
    ops = [draw(st.sampled_from(["sum", "mean", "first"])) for _ in range(count)]
    programs = (rig.adding(spec), momentum(spec), through(spec))
    applies, results = [], 0
    for _ in range(draw(st.integers(0, 5))):
        which = draw(st.integers(0, 2))
        first, second = draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True))
        values = [Ref("reduction", n) for n in range(count)] + [Ref("result", n) for n in range(results)]
        one, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        v, w = Ref("variable", first), Ref("variable", second)
        applies.append(Apply(which, (0,), [(v, one), (v, w, one, Ref("operand", 0)), (v, one, other)][which]))
        results += len(programs[which].outputs)
    returned = [Ref("reduction", n) for n in range(count)] + [Ref("result", n) for n in range(results)]
    plan = Plan(
        tuple(Reduction(op, spec, (0,)) for op in ops),
        (Operand(spec, (0,)),),
        programs,
        tuple(applies),
        tuple(draw(st.lists(st.sampled_from(returned), max_size=4))),
    )
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    operand, parts = rng.normal(size=SIZE), []
    for place in range(draw(st.integers(1, 3))):
        weights = tuple(float(draw(st.integers(0, 2))) for _ in ops)
        observes = place > 0 and draw(st.booleans())
        said = Contribution(place + 1, 1, 4, plan.id, () if observes else weights, want=(0, 1, 2, 3), observes=observes)
        values = [rng.normal(size=SIZE) for _ in ops]
        packed = EMPTY if observes else rig.payload(plan, 0, values, weights, [operand])
        parts.append(MemberShare(Member(rig.WORKERS[place], place + 1, 1), said, packed))
    variables = {n: rng.normal(size=SIZE).astype(spec.dtype) for n in range(4)}
    return round_of(plan, *parts), variables


def growing(part):
    """The same part, of which nothing has come; and what is to come of it."""
    return replace(part, payload=Payload((), part.payload.size)), list(parts_of(part.payload, 2 * ALIGN))


KERNELS = Kernels(ServerDevice())


@given_by_hypothesis(rounds(), st.data())
def test_a_stream_makes_what_is_made_at_once(round, data):
    """To the last bit: variables, slots, returned values and what is wanted, in whatever order contributions come."""
    job, values = round
    expected = run(job, KERNELS, dict(values))
    parts, rest = zip(*(growing(part) for part in job.parts), strict=True)
    stream = Execution(replace(job, parts=parts, commit=Commit.PROGRESSIVE), KERNELS)
    ready, told = {}, []
    while not stream.done:
        if (missing := stream.awaits()) is not None:
            told.clear()
            missing.payload.reach(missing.offset, lambda: told.append(1))
            while not told:
                place = data.draw(st.sampled_from([n for n, chunks in enumerate(rest) if chunks]))
                offset, buffers = rest[place].pop(0)
                parts[place].payload.add(offset, memoryview(b"".join(buffers)))
            continue
        assigned, fresh = step(stream, values)
        values |= assigned
        assert not ready.keys() & {key for key in fresh if isinstance(key, int)}, "a variable is delivered twice"
        ready |= fresh
    assert all(same_bits(values[id], expected.assigned.get(id, values[id])) for id in values)
    assert {id for id in ready if isinstance(id, int)} == expected.assigned.keys()
    assert all(same_bits(ready[id], expected.wanted[id]) for id in expected.wanted)
    found, wanted = stream.given.arrays, expected.given
    assert len(found) == len(wanted)
    assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))
