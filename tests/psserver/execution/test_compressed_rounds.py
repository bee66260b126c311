"""Rounds with compressed contributions: decoded, then summed in task order; what no codec makes is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from psclient._src.variables.encoding import encode
from psserver.plans.prepared import PreparedPlan
from pswire.api import Contribution
from pswire.errors import InvalidRequest, ProgramError
from pswire.model.compression import PIECE, Codec
from pswire.model.plan import Apply, Plan, Reduction, Ref
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from tests.kit.programs import job_of, run, same_bits
from tests.kit.references import CODECS, DTYPES, Worker

V = Ref("variable", 0)


def adding(spec, codec, op="sum", form="dense", count=1):
    """A plan that adds contributions to variables, and gives the first reduction back."""
    program = Program((Input("variable", spec), Input("value", spec)), (Node("add", (0, 1)),), ((0, 2),), ())
    reductions = tuple(Reduction(op, spec, (0,), f"'v{n}'", form, codec) for n in range(count))
    applies = tuple(Apply(0, (0,), (Ref("variable", n), Ref("reduction", n))) for n in range(count))
    return Plan(reductions, (), (program,), applies, (Ref("reduction", 0),))


def arrays(shape, dtype, count=3):
    rng = np.random.default_rng(5)
    return [rng.normal(size=shape).astype(DTYPES[dtype]) for _ in range(count)]


def encoded(how, array):
    spec = TensorSpec(array.dtype.name, array.shape)
    return encode(how.codec, array, spec, np.zeros(array.shape, Worker(how, (1,), array.dtype).residual.dtype)).data


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
    job = job_of(adding(spec, how.codec, op), [[encoded(how, each)] for each in given], part_bytes=10_000)
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
    plan = adding(spec, how.codec, count=2)
    sent = [Worker(how, (300,)).send(each) for each in arrays(300, "float32", 2)]
    values = {0: np.zeros(300, "float32"), 1: np.zeros(300, "float32")}
    for _ in range(3):
        outcome = run(job_of(plan, given), kernels, values)
        assert same_bits(outcome.assigned[0], sent[0] + sent[1])
        assert same_bits(outcome.assigned[1], np.float32(0) - sent[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_who_sends_what_is_not_finite_is_found(kernels, name, bad):
    """Though it travels in other bytes."""
    how, given = CODECS[name], arrays(300, "float32", 2)
    given[1][7] = bad
    plan = adding(TensorSpec("float32", (300,)), how.codec)
    outcome = run(job_of(plan, [[encoded(how, each)] for each in given]), kernels, {0: np.zeros(300, "float32")})
    assert [(number, task.index) for number, task in outcome.found.contributions] == [(0, 1)]


@pytest.mark.parametrize("places", [[5, 5], [6, 5], [3, 10], [0, 1 << 31]], ids=str)
def test_places_that_no_array_has_are_refused(kernels, places):
    """Before anything is written; it says who sent them, and for what."""
    spec, codec = TensorSpec("float32", (10,)), Codec("topk", 0.2)
    good = np.concatenate([np.array([0, 9], "uint32").view("uint8"), np.ones(2, "float32").view("uint8")])
    evil = np.concatenate([np.array(places, "uint32").view("uint8"), np.ones(2, "float32").view("uint8")])
    value = np.zeros(10, "float32")
    with pytest.raises(ProgramError, match=r"the places that /job:worker/task:1 sent for 'v0' are not those of 10 "):
        run(job_of(adding(spec, codec), [[good], [evil]]), kernels, {0: value}, {0})
    assert not value.any()
    outcome = run(job_of(adding(spec, codec), [[good], [good]]), kernels, {0: value})
    assert outcome.assigned[0].tolist() == [2.0, *[0.0] * 8, 2.0]


@pytest.mark.parametrize("form", ["dense", "rows"])
@pytest.mark.parametrize("name", CODECS)
def test_a_contribution_of_another_size_is_refused(name, form):
    """Of whole arrays and of rows: one byte more or less, or the bytes of what is not compressed."""
    spec, codec = TensorSpec("float32", (40, 3)), CODECS[name].codec
    plan = adding(spec, codec, form=form)
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
