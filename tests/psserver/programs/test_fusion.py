"""Programs cut into steps: in time that grows with their length, and into no kernels that only copy."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from psserver.devices import Device
from psserver.programs.kernels.fusion import split, whole
from psserver.programs.kernels.kernels import Kernels
from pswire.limits import MAX_NODES
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from tests.kit.programs import job_of, plan_of, run, traced

SPEC = TensorSpec("float32", (300, 400))
V = Input("variable", SPEC)


def alternating():
    """A reduction, and what is done with it, as often as can be."""
    nodes = []
    for _ in range(MAX_NODES // 2):
        current = len(nodes)
        nodes += [Node("sum", (current,)), Node("multiply", (current, current + 1))]
    return Program((V,), tuple(nodes), ((0, len(nodes)),), ())


def rotated(count=20_000):
    """Many variables, each of which becomes the one before it, and is given back."""
    assigns = tuple((n, (n + 1) % count) for n in range(count))
    return Program((V,) * count, (Node("negative", (0,)),), assigns, tuple(range(count)))


@pytest.mark.parametrize("make", [alternating, rotated])
def test_a_long_program_is_cut_in_time(make):
    """However many steps or variables it has; one of very many steps stays whole."""
    program = make()
    _ = program.specs
    begun = time.process_time()
    steps = split(program)
    assert time.process_time() - begun < 2
    assert steps == (whole(program),) or len(steps) <= 2


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_only_looked_at_takes_no_memory(compiled):
    """A scalar that is broadcast to be summed is a view, in the interpreter and beside kernels."""

    def fn(v):
        v.assign(v * 2)
        return np.sum(np.broadcast_to(np.sum(v), (4000, 4000)))

    program, operands = traced(fn, [SPEC], [])
    kernels, value = Kernels(Device(), patience=1 if compiled else 10**9), np.ones(SPEC.shape, "float32")
    job = job_of(plan_of(program), [[]], operands)
    run(job, kernels, {0: value})
    kernels.compiler.wait()
    tracemalloc.start()
    try:
        (found,) = run(job, kernels, {0: value}).given
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        kernels.close()
    assert not any(step.may_fail for step in split(program))
    assert found == np.float32(SPEC.size * 2 * 4000 * 4000)
    assert peak < 3 * value.nbytes
    assert bool(kernels.compiler.texts) == compiled


def test_what_a_kernel_reads_is_made_in_it():
    """A broadcast value that is also assigned or computed with is no array of its own before."""
    program, _ = traced(lambda v: v.assign(np.broadcast_to(np.sum(v), SPEC.shape) + v), [SPEC], [])
    (kernel,) = [step for step in split(program) if step.shape is not None]
    assert [node.op for node in kernel.program.nodes] == ["broadcast_to", "add"]
