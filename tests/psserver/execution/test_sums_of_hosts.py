"""The bits of a sum: the same whether workers of one host have summed what they contribute, or the server does."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from psserver.plans.sums import shares_of, total_weights
from pswire.model.plan import Apply, Plan, Reduction, Ref
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.transport.payload import Payload
from tests.kit.programs import job_of, run, same_bits
from tests.kit.rig import adding

NONE = (0, 0, 0, 0)
INTERLEAVED = (7, 9, 7, 9)


def plan_of(spec, op="sum"):
    """A plan that adds what is reduced to a variable, which a kernel may do with the sum."""
    return Plan(
        reductions=(Reduction(op, spec, (0,)),),
        programs=(adding(spec),),
        applies=(Apply(0, (0,), (Ref("variable", 0), Ref("reduction", 0))),),
    )


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


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_hosts_sum_as_a_server_does(kernels, dtype, op):
    """Those of a host first, in task order; then the hosts, by the first of their members."""
    spec, arrays = TensorSpec(dtype, (64,)), numbers(dtype)
    job = on_hosts(job_of(plan_of(spec, op), [[array] for array in arrays], part_bytes=96), INTERLEAVED)
    first, second, third, fourth = arrays
    found = made(job, spec, kernels)
    assert same_bits(found, made(summed(job, arrays), spec, kernels))
    if op == "sum":
        assert same_bits(found, (first + third) + (second + fourth))
        assert not same_bits(found, ((first + second) + third) + fourth), "the order makes no difference here"


def test_the_first_member_of_a_host_has_its_place(kernels):
    """Also if another one sends the sum."""
    spec, arrays = TensorSpec("float32", (64,)), numbers("float32")
    first, second, third, fourth = arrays
    job = on_hosts(job_of(plan_of(spec), [[array] for array in arrays]), (7, 9, 8, 7))
    assert same_bits(made(job, spec, kernels), ((first + fourth) + second) + third)
    assert same_bits(made(summed(job, arrays), spec, kernels), ((first + fourth) + second) + third)


def test_variables_that_kernels_update_together(kernels):
    """They are updated one by one where hosts have sums."""
    spec, count = TensorSpec("float32", (64,)), 3
    refs = [(Ref("variable", n), Ref("reduction", n)) for n in range(count)]
    applies = tuple(Apply(0, (0,), each) for each in refs)
    plan = Plan((Reduction("sum", spec, (0,)),) * count, (), (adding(spec),), applies)
    first, second, third, fourth = numbers("float32")
    given = [[array] * count for array in (first, second, third, fourth)]
    for hosts, value in (
        (INTERLEAVED, (first + third) + (second + fourth)),
        (NONE, ((first + second) + third) + fourth),
    ):
        job = on_hosts(job_of(plan, given), hosts)
        for _ in range(3):
            zeros = {n: np.zeros(64, "float32") for n in range(count)}
            found = run(job, kernels, zeros, frozenset(zeros)).assigned
            assert all(same_bits(array, value) for array in found.values())
            kernels.compiler.wait()


def test_members_of_no_host_beside_a_host(kernels):
    """Each counts by itself."""
    spec, arrays = TensorSpec("float32", (64,)), numbers("float32")
    first, second, third, fourth = arrays
    job = on_hosts(job_of(plan_of(spec), [[array] for array in arrays]), (7, 0, 7, 0))
    assert same_bits(made(job, spec, kernels), ((first + third) + second) + fourth)


def test_members_of_no_host_are_summed_in_task_order(kernels):
    """As before there were sums; so are those of which each is on a host of its own, or on one with members of none."""
    spec, (first, second, third, fourth) = TensorSpec("float32", (64,)), numbers("float32")
    job = job_of(plan_of(spec), [[first], [second], [third], [fourth]])
    for hosts in (NONE, (1, 2, 3, 4), (1, 0, 2, 0)):
        assert same_bits(made(on_hosts(job, hosts), spec, kernels), ((first + second) + third) + fourth)


@pytest.mark.parametrize("missing", [(0,), (2,), (0, 2), (1, 3), (0, 1, 2)])
def test_members_without_examples(kernels, missing):
    """They add nothing, and do not change the order of the hosts, which is by all of their members."""
    spec, arrays = TensorSpec("float32", (64,)), [*numbers("float32")]
    for place in missing:
        arrays[place] = None
    job = on_hosts(job_of(plan_of(spec, "mean"), [[array] for array in arrays]), INTERLEAVED)
    assert same_bits(made(job, spec, kernels), made(summed(job, arrays), spec, kernels))


def test_the_first_contribution_is_that_of_the_first_task(kernels):
    """Whatever host it is of."""
    spec, arrays = TensorSpec("float32", (64,)), [None, *numbers("float32")[1:]]
    job = on_hosts(job_of(plan_of(spec, "first"), [[array] for array in arrays]), INTERLEAVED)
    assert same_bits(made(job, spec, kernels), arrays[1])
