"""Applications of one kernel, made together: the same bits as one by one, and nothing that one by one would refuse."""

import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given as given_by_hypothesis
from hypothesis import strategies as st

from psserver.devices import ServerDevice
from psserver.execution.execution import Execution
from psserver.plans.round import Commit
from psserver.programs.interpreter import Script
from psserver.programs.kernels import launch
from psserver.programs.kernels.kernels import SMALL_PATIENCE, Kernels
from pswire.limits import ALIGN
from pswire.model.plan import Ref
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from tests.kit.cases import search
from tests.kit.programs import job_of, kept_kernels, run, same_bits, step, updates

RATE = TensorSpec("float32", ())


def descent(size):
    spec = TensorSpec("float32", (size,))
    inputs = (Input("variable", spec), Input("value", spec), Input("operand", RATE))
    return Program(inputs, (Node("multiply", (1, 2)), Node("subtract", (0, 3))), ((0, 4),), ())


def descents(sizes, op="sum", own=False):
    """A plan that updates a variable of each size alike, with one operand, or one of its `own` for each."""
    plan = updates(*map(descent, sizes), op=op)
    if not own:
        return plan
    applies = tuple(replace(a, args=(*a.args[:2], Ref("operand", n))) for n, a in enumerate(plan.applies))
    return replace(plan, operands=plan.operands * len(sizes), applies=applies)


def arrays(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=size).astype("float32") for size in sizes]


def job_for(plan, contributions, part_bytes=1 << 20):
    return job_of(plan, contributions, [np.float32(0.1 * 10**n) for n in range(len(plan.operands))], part_bytes)


def warm(kernels, job, values):
    """Has all kernels made; returns the numbers of what is batched now."""
    for _ in range(2):
        run(job, kernels, values)
        kernels.compiler.wait()
    return set(job.prepared.batches(kernels, len(job.parts)))


def fresh(sizes):
    return dict(enumerate(arrays(sizes, 99)))


def check(kernels, job, sizes, in_place=True):
    """Runs a round: what it assigns has the bits that it has without kernels; returns it by number."""
    values, expected = fresh(sizes), run(job, Kernels(ServerDevice()), fresh(sizes)).assigned
    found = run(job, kernels, values, frozenset(values)).assigned
    assert found.keys() == expected.keys()
    assert all(same_bits(array, expected[id]) for id, array in found.items())
    assert not in_place or all(array is values[id] for id, array in found.items() if array.size)
    return found


@search(0.08)
@given_by_hypothesis(
    st.lists(st.integers(0, 40), min_size=2, max_size=6),
    st.sampled_from(["sum", "mean"]),
    st.integers(1, 4),
    st.sampled_from([2 * ALIGN, 4 * ALIGN, 1 << 20]),
    st.booleans(),
    st.sets(st.integers(0, 5)),
    st.integers(1, 4),
)
def test_a_batch_has_the_bits_of_its_applications(kernels, sizes, op, members, part_bytes, own, absent, without):
    """Whatever the sizes, however many contribute, wherever their contributions are cut, with an operand for all or one
    for each. Some variables some members do not contribute to; one to which nobody does stays as it is."""
    plan = descents(sizes, op, own)
    plan = replace(plan, applies=tuple(replace(apply, optional=True) for apply in plan.applies))
    sent = [arrays(sizes, seed) for seed in range(members)]
    given = [[None if n in absent and m < without else a for n, a in enumerate(each)] for m, each in enumerate(sent)]
    job = job_for(plan, given, part_bytes)
    assert warm(kernels, job, fresh(sizes)) == set(range(len(sizes)))
    excluded = absent if members <= without else set()
    assert set(check(kernels, job, sizes, in_place=not absent)) == set(range(len(sizes))) - excluded


def test_threads_share_a_batch_evenly(monkeypatch):
    """A few large variables are cut into runs: no thread has a whole one while the others have nothing."""
    monkeypatch.setattr(launch, "RUN", 16)
    kernels = kept_kernels(2, patience=1, smallest=0)
    sizes, calls, own = [50, 3, 0, 33], [], kernels.crew.run
    job = job_for(descents(sizes, "mean", own=True), [arrays(sizes, 1), arrays(sizes, 2)])
    assert warm(kernels, job, fresh(sizes)) == set(range(len(sizes)))
    monkeypatch.setattr(kernels.crew, "run", lambda kernel, made: calls.extend(made) or own(kernel, made))
    check(kernels, job, sizes)
    assert [size for size, *_ in calls] == [16, 16, 16, 2, 3, 16, 16, 1]
    kernels.close()


def test_a_batch_is_one_call(kernels, monkeypatch):
    """Python calls once for all variables, which are written in place; where somebody holds one, that is replaced."""
    sizes, calls = [8, 9, 10, 11, 12], []
    job = job_for(descents(sizes), [arrays(sizes, 1), arrays(sizes, 2)])
    warm(kernels, job, fresh(sizes))
    function = job.prepared.batches(kernels, 2)[0].kernel.function
    rows = function.rows
    monkeypatch.setattr(function, "rows", lambda *args: calls.append(args) or rows(*args))
    expected = run(job, Kernels(ServerDevice()), fresh(sizes)).assigned
    for lent in (frozenset(range(5)), frozenset([0, 2, 3, 4])):
        values = fresh(sizes)
        found = run(job, kernels, values, lent).assigned
        assert all(same_bits(found[id], expected[id]) for id in found)
        assert [found[id] is values[id] for id in values] == [id in lent for id in values]
        assert 1 in lent or same_bits(values[1], fresh(sizes)[1])
    assert calls[0][1] == 5


def test_one_variable_twice_is_no_batch(kernels):
    """The second application reads what the first has written."""
    plan = descents([8, 8])
    plan = replace(plan, applies=tuple(replace(a, args=(Ref("variable", 0), *a.args[1:])) for a in plan.applies))
    job = job_for(plan, [arrays([8, 8])])
    assert warm(kernels, job, fresh([8])) == {0, 1}
    first, second = job.prepared.batches(kernels, 1).values()
    assert first is not second
    assert check(kernels, job, [8])


def streamed(kernels, sizes):
    """A round of two members that runs bit by bit: the round, its stream, and what has so many tensors of each come."""
    job = job_for(descents(sizes), [arrays(sizes, 1), arrays(sizes, 2)])
    warm(kernels, job, fresh(sizes))
    parts = [replace(part, payload=Payload((), part.payload.size)) for part in job.parts]
    stream = Execution(replace(job, parts=tuple(parts), commit=Commit.PROGRESSIVE), kernels)
    ends = [ALIGN, *(ALIGN + 4 * sum(sizes[: n + 1]) for n in range(len(sizes)))]
    bytes_of = [part.payload.chunks[0][1] for part in job.parts]
    rest = [[(low, whole[low:high]) for low, high in pairwise([0, *ends])] for whole in bytes_of]

    def come(*counts):
        for part, chunks, count in zip(parts, rest, counts, strict=True):
            for _ in chunks[:count]:
                part.payload.add(*chunks.pop(0))

    return job, stream, come


def advance(stream, values):
    made = []
    while not (stream.done or stream.awaits()):
        assigned, _ = step(stream, values, frozenset(values))
        values |= assigned
        made.append(len(assigned))
    return made


def test_a_stream_makes_at_once_what_is_there(kernels):
    """One step for all variables whose contributions have come, and none for the others."""
    sizes = [8] * 6
    job, stream, come = streamed(kernels, sizes)
    values = fresh(sizes)
    come(3, 3)
    few = sum(advance(stream, values))
    assert 0 < few < 6
    come(9, 9)
    assert advance(stream, values) == [6 - few]
    expected = run(job, Kernels(ServerDevice()), fresh(sizes)).assigned
    assert all(same_bits(values[id], expected[id]) for id in values)


def test_what_a_step_is_waits_for_no_kernel(kernels, monkeypatch):
    """That is decided under the core's lock: while a kernel is compiled nobody could heartbeat, and leases would
    end."""
    sizes = [8, 9]
    job = replace(job_for(descents(sizes), [arrays(sizes)]), commit=Commit.PROGRESSIVE)
    stream = Execution(job, kernels)
    step(stream, fresh(sizes))
    monkeypatch.setattr(kernels, "stages", None)
    assert stream.reads() <= {0, 1}


def test_who_is_lost_within_a_batch_counts_where_it_was_whole(kernels):
    sizes = [8] * 4
    job, stream, come = streamed(kernels, sizes)
    values = fresh(sizes)
    come(9, 3)
    before = sum(advance(stream, values))
    assert stream.contributions.drop({job.parts[1].member.session})
    advance(stream, values)
    both = run(job, Kernels(ServerDevice()), fresh(sizes)).assigned
    alone = run(replace(job, parts=job.parts[:1]), Kernels(ServerDevice()), fresh(sizes)).assigned
    assert 0 < before < 4
    assert all(same_bits(values[id], (both if id < before else alone)[id]) for id in values)


def test_small_variables_have_a_kernel_in_the_long_run():
    """It saves little in a round, so that a short job never compiles."""
    kernels = kept_kernels(patience=1)
    job = job_for(descents([8, 9]), [arrays([8, 9])])
    for _ in range(SMALL_PATIENCE // 2 - 1):
        run(job, kernels, fresh([8, 9]))
    assert not kernels.compiler.texts
    for _ in range(SMALL_PATIENCE):
        run(job, kernels, fresh([8, 9]))
    kernels.compiler.wait()
    assert warm(kernels, job, fresh([8, 9])) == {0, 1}
    kernels.close()


def test_a_kernel_that_comes_while_batches_are_made_is_for_all(monkeypatch):
    """Those that were looked at before it came are in the batch of the next round: none is left out for good."""
    kernels = kept_kernels(patience=1, smallest=0)
    job = job_for(descents([8] * 4), [arrays([8] * 4)])
    stages, asked = kernels.stages, []

    def late(*args):
        asked.append(args)
        if len(asked) == 3:
            kernels.compiler.wait()
        return stages(*args)

    monkeypatch.setattr(kernels, "stages", late)
    assert set(job.prepared.batches(kernels, 1)) == {2, 3}
    assert set(job.prepared.batches(kernels, 1)) == {0, 1, 2, 3}
    assert job.prepared.settled(kernels, 1) is not None
    kernels.close()


def test_addresses_are_those_of_the_arrays_that_are_there(kernels):
    """Also after a variable was replaced, though all others are as they were."""
    values = fresh([8, 8, 8])
    job = job_for(descents([8, 8, 8]), [arrays([8, 8, 8])])
    warm(kernels, job, fresh([8, 8, 8]))
    for replaced in (None, 1, None, 2, 0):
        if replaced is not None:
            values[replaced] = values[replaced].copy()
        before = {id: value.copy() for id, value in values.items()}
        own, every = dict(values), frozenset(values)
        assigned = run(job, kernels, own, every).assigned
        for id, value in before.items():
            assert assigned[id] is values[id]
            assert not np.array_equal(values[id], value)


def test_a_large_variable_waits_for_its_kernel(monkeypatch):
    """Interpreting its first rounds would take longer, and several times its memory."""
    monkeypatch.setattr("psserver.programs.kernels.kernels.LARGE", 8)
    monkeypatch.setattr(Script, "run", None)
    kernels = kept_kernels(patience=1000, smallest=0)
    job = job_for(descents([8, 9]), [arrays([8, 9])])
    values = fresh([8, 9])
    assert run(job, kernels, values, frozenset(values)).assigned[0] is values[0]
    kernels.close()


def test_a_kernel_that_takes_too_long_is_waited_for_once(monkeypatch):
    """A round asks for it as often as it has variables, and must not wait as often."""
    monkeypatch.setattr("psserver.programs.kernels.kernels.LARGE", 8)
    monkeypatch.setattr("psserver.programs.kernels.compiler.WAIT_SECONDS", 0.5)
    kernels, busy, sizes = Kernels(ServerDevice(), patience=1, smallest=0), threading.Event(), [8] * 20
    kernels.compiler._background.submit(busy.wait)
    begun = time.monotonic()
    run(job_for(descents(sizes), [arrays(sizes)]), kernels, fresh(sizes))
    took = time.monotonic() - begun
    busy.set()
    kernels.close()
    assert 0.5 <= took < 5
