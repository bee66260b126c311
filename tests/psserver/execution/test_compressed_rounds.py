"""Rounds whose contributions are compressed, or summed by hosts: the bits of plain sums, in task order."""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from psclient._src.variables.encoding import encode
from psserver.plans.prepared import PreparedPlan
from psserver.rounds.sums import shares_of, total_weights
from pswire.api import Contribution
from pswire.errors import InvalidRequest, ProgramError
from pswire.model.compression import PIECE, Codec
from pswire.model.plan import Reduction, Ref
from pswire.model.tensor import TensorSpec
from pswire.network.payload import Payload
from tests.kit.programs import job_of, run, same_bits, updates
from tests.kit.references import CODECS, DTYPES, Worker
from tests.kit.rig import adding


def coded(spec, codec, op="sum", form="dense", count=1):
    """A plan that adds contributions to variables, and gives the first reduction back."""
    reductions = tuple(Reduction(op, spec, (0,), f"'v{n}'", form, codec) for n in range(count))
    return replace(updates(*[adding(spec)] * count), reductions=reductions, returned=(Ref("reduction", 0),))


def arrays(shape, dtype, count=3):
    rng = np.random.default_rng(5)
    return [rng.normal(size=shape).astype(DTYPES[dtype]) for _ in range(count)]


def encoded(how, array):
    spec = TensorSpec(array.dtype.name, array.shape)
    return encode(how._codec, array, spec, np.zeros(array.shape, Worker(how, (1,), array.dtype).residual.dtype)).data


@pytest.mark.parametrize(
    ("dtype", "op"), [*((dtype, "sum") for dtype in DTYPES), ("float32", "mean"), ("bfloat16", "mean")]
)
@pytest.mark.parametrize("name", CODECS)
def test_contributions_are_summed_in_task_order_as_what_they_stand_for(kernels, name, dtype, op):
    """Three of them, of more than one piece, that came in many parts; the bits of a plain sum, and its mean."""
    shape, how = (PIECE + 77,), CODECS[name]
    spec = TensorSpec(dtype, shape)
    given = arrays(shape, dtype)
    first, second, third = (Worker(how, shape, DTYPES[dtype]).send(each) for each in given)
    expected = first + second + third
    if op == "mean":
        expected = np.divide(expected, np.asarray(6.0, np.result_type(expected.dtype, "float32")), casting="same_kind")
        expected = expected.astype(first.dtype)
    job = job_of(coded(spec, how._codec, op), [[encoded(how, each)] for each in given], part_bytes=10_000)
    for _ in range(3):
        outcome = run(job, kernels, {0: np.ones(shape, first.dtype)})
        assert same_bits(outcome.given[0], expected)
        assert same_bits(outcome.assigned[0], (np.ones(shape, first.dtype) + expected).astype(first.dtype))


@pytest.mark.parametrize("name", CODECS)
def test_many_variables_alike_are_no_list_of_one_kernels_calls(kernels, name):
    """Such a list sums what lies in the payload as numbers; a contribution that is missing adds nothing."""
    spec, how = TensorSpec("float32", (300,)), CODECS[name]
    given = [[encoded(how, each), encoded(how, -each)] for each in arrays(300, "float32", 2)]
    given[1][1] = None
    plan = coded(spec, how._codec, count=2)
    sent = [Worker(how, (300,)).send(each) for each in arrays(300, "float32", 2)]
    values = {0: np.zeros(300, "float32"), 1: np.zeros(300, "float32")}
    for _ in range(3):
        outcome = run(job_of(plan, given), kernels, values)
        assert same_bits(outcome.assigned[0], sent[0] + sent[1])
        assert same_bits(outcome.assigned[1], np.float32(0) - sent[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_who_sends_what_is_not_finite_is_found(kernels, name, bad):
    how, given = CODECS[name], arrays(300, "float32", 2)
    given[1][7] = bad
    plan = coded(TensorSpec("float32", (300,)), how._codec)
    outcome = run(job_of(plan, [[encoded(how, each)] for each in given]), kernels, {0: np.zeros(300, "float32")})
    assert [(number, task.index) for number, task in outcome.found.contributions] == [(0, 1)]


@pytest.mark.parametrize("places", [[5, 5], [6, 5], [3, 10], [0, 1 << 31]], ids=str)
def test_places_that_no_array_has_are_refused(kernels, places):
    """Before anything is written; it says who sent them, and for what."""
    spec, codec = TensorSpec("float32", (10,)), Codec("topk", 0.2)
    good = np.concatenate([np.array([0, 9], "uint32").view("uint8"), np.ones(2, "float32").view("uint8")])
    evil = np.concatenate([np.array(places, "uint32").view("uint8"), np.ones(2, "float32").view("uint8")])
    value = np.zeros(10, "float32")
    with pytest.raises(
        ProgramError, match=r"'v0': the element indices from /job:worker/task:1 must increase and be below 10"
    ):
        run(job_of(coded(spec, codec), [[good], [evil]]), kernels, {0: value}, {0})
    assert not value.any()
    outcome = run(job_of(coded(spec, codec), [[good], [good]]), kernels, {0: value})
    assert outcome.assigned[0].tolist() == [2.0, *[0.0] * 8, 2.0]


@pytest.mark.parametrize("form", ["dense", "rows"])
@pytest.mark.parametrize("name", CODECS)
def test_a_contribution_of_another_size_is_refused(name, form):
    """Of whole arrays and of rows: one byte more or less, or the bytes of what is not compressed."""
    spec, codec = TensorSpec("float32", (40, 3)), CODECS[name]._codec
    plan = coded(spec, codec, form=form)
    said = Contribution(1, 1, 4, plan.id, (1.0,), rows=(64,) if form == "rows" else ())
    fitting = 64 * 8 + 64 * codec.row_bytes(spec) if form == "rows" else codec.nbytes(spec)
    PreparedPlan(plan, 0).check(said, fitting)
    for size in (fitting - 1, fitting + 1):
        with pytest.raises(InvalidRequest, match="does not fit"):
            PreparedPlan(plan, 0).check(said, size)
    plain = replace(plan, reductions=tuple(replace(each, codec=None) for each in plan.reductions))
    if fitting != 64 * 8 + 64 * 12:  # chosen rows travel as rows do
        with pytest.raises(InvalidRequest, match="does not fit"):
            PreparedPlan(plain, 0).check(said, fitting)


NONE = (0, 0, 0, 0)
INTERLEAVED = (7, 9, 7, 9)


def on_hosts(job, hosts):
    parts = [replace(part, said=replace(part.said, host=hosts[place])) for place, part in enumerate(job.parts)]
    return replace(job, parts=tuple(parts))


def summed(job, arrays):
    """A round whose hosts have summed what their members contribute."""
    parts = []
    for host in sorted({part.said.host for part in job.parts}, reverse=True):
        places = [place for place, part in enumerate(job.parts) if part.said.host == host]
        said = [job.parts[place].said for place in places]
        there = [arrays[place] for place in places if arrays[place] is not None]
        payload = Payload.pack([reduce(np.add, there)] if there else [])
        whole = replace(said[-1], weights=total_weights([each.weights for each in said]), parts=tuple(said[::-1]))
        parts += shares_of(whole, payload, [job.parts[place].member for place in places[::-1]])
    return replace(job, parts=tuple(sorted(parts, key=lambda part: part.member.task)))


def made(job, spec, kernels):
    """What rounds make of zeros: one that is interpreted, and two of which kernels run what they can."""
    zeros = [{0: np.zeros(spec.shape, DTYPES[spec.dtype])} for _ in range(3)]
    found = []
    for values in zeros:
        found.append(run(job, kernels, values).assigned[0])
        kernels.compiler.wait()
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])
    return found[0]


def numbers(dtype, size=64):
    """What four members contribute: numbers whose sum depends on its order."""
    random = np.random.default_rng(3)
    return [(random.normal(size=size) * 10.0 ** random.integers(-3, 4, size)).astype(DTYPES[dtype]) for _ in range(4)]


def host_sum(arrays, hosts):
    """What is there, summed: the members of each host, or each of no host, and then these sums, in task order."""
    own = {}
    for place, (array, host) in enumerate(zip(arrays, hosts, strict=True)):
        own.setdefault(host or -1 - place, []).append(array)
    there = [[array for array in each if array is not None] for each in own.values()]
    return reduce(np.add, [reduce(np.add, each) for each in there if each])


SUMMED = [(INTERLEAVED, (), op, dtype) for op in ("sum", "mean") for dtype in ("float32", "float64", "bfloat16")]
SUMMED += [(INTERLEAVED, (), "sum", "float16"), (INTERLEAVED, (0,), "first", "float32")]
SUMMED += [(hosts, (), "sum", "float32") for hosts in (NONE, (1, 2, 3, 4), (1, 0, 2, 0), (7, 0, 7, 0), (7, 9, 8, 7))]
SUMMED += [(INTERLEAVED, missing, "mean", "float32") for missing in ((0,), (2,), (0, 2), (1, 3), (0, 1, 2))]
"""Hosts of four members, those who have no examples, and what is reduced."""


@pytest.mark.parametrize(("hosts", "missing", "op", "dtype"), SUMMED)
def test_hosts_sum_as_a_server_does(kernels, hosts, missing, op, dtype):
    """Those of a host first, in task order; then the hosts, by the first of their members, also if another one sends
    the sum, or the first has no examples. Members of no host are summed as before there were sums."""
    spec, arrays = TensorSpec(dtype, (64,)), numbers(dtype)
    for place in missing:
        arrays[place] = None
    job = on_hosts(job_of(updates(adding(spec), op=op), [[array] for array in arrays], part_bytes=96), hosts)
    found = made(job, spec, kernels)
    if op != "mean":
        assert same_bits(found, host_sum(arrays, hosts) if op == "sum" else arrays[1])
    if op != "first" and 0 not in hosts:
        assert same_bits(found, made(summed(job, arrays), spec, kernels))


def test_variables_that_kernels_update_together(kernels):
    spec, count = TensorSpec("float32", (64,)), 3
    plan, arrays = updates(*[adding(spec)] * count), numbers("float32")
    assert not same_bits(host_sum(arrays, INTERLEAVED), host_sum(arrays, NONE)), "the order makes no difference here"
    for hosts in (INTERLEAVED, NONE):
        job = on_hosts(job_of(plan, [[array] * count for array in arrays]), hosts)
        for _ in range(3):
            zeros = {n: np.zeros(64, "float32") for n in range(count)}
            found = run(job, kernels, zeros, frozenset(zeros)).assigned
            assert all(same_bits(array, host_sum(arrays, hosts)) for array in found.values())
            kernels.compiler.wait()
