"""Kernels on a GPU: the bits of the interpreter there."""

from __future__ import annotations

import numpy as np
import pytest

from psserver.programs.kernels.rows import apply_rows
from tests.kit.internals import Kernels, TensorSpec
from tests.kit.internals import ServerDevice as Device
from tests.kit.programs import job_of, plan_of, run, same_bits, traced
from tests.kit.rig import WORKERS

SPEC = TensorSpec("float32", (1000,))


def update(w, m, g):
    g = np.minimum(np.maximum(g, -0.5), 0.5)
    m.assign(0.9 * m + np.where(np.isfinite(g), g, 0.0 * w))
    w.assign_sub(0.1 * np.sign(m) * np.abs(m) / (np.sqrt(m * m) + 1e-7))


def decayed(w, m, g):
    m.assign(0.9 * m)
    w.assign_sub(0.1 * g)


def test_kernels_give_the_interpreters_bits() -> None:
    """Nothing is contracted, and what is assigned is new: nobody who reads the old value sees it change."""
    kernels = Kernels(Device(0), patience=1, smallest=0)
    program, operands = traced(update, [SPEC, SPEC], [SPEC])
    rng = np.random.default_rng(0)
    gradients = [[rng.standard_normal(1000).astype("float32")] for _ in range(2)]
    job = job_of(plan_of(program), gradients, operands)
    with kernels.device.scope():
        values = {n: kernels.device.put(rng.random(1000, "float32")) for n in range(2)}
        before = {n: kernels.device.get(value) for n, value in values.items()}
        first = run(job, kernels, values)
        kernels.compiler.wait()
        second = run(job, kernels, values, frozenset([0, 1]))
        for n in range(2):
            assert same_bits(kernels.device.get(first.assigned[n]), kernels.device.get(second.assigned[n]))
            assert same_bits(kernels.device.get(values[n]), before[n])
    assert kernels.settled(program, {}), "the second round was interpreted as well"
    kernels.close()


@pytest.mark.parametrize("patience", [1, 10**9])
def test_values_that_are_not_finite_are_found_on_the_device(patience: int) -> None:
    """By kernels and without: whose contribution it was, and which variables have it."""
    kernels = Kernels(Device(0), patience=patience, smallest=0)
    program, operands = traced(decayed, [SPEC, SPEC], [SPEC])
    gradients = [[np.ones(1000, "float32")] for _ in range(3)]
    gradients[1][0][999] = np.inf
    with kernels.device.scope():
        values = {n: kernels.device.put(np.ones(1000, "float32")) for n in range(2)}
        for bad in (True, False):
            contributions = gradients if bad else gradients[::2]
            job = job_of(plan_of(program), contributions, operands)
            run(job, kernels, values)
            kernels.compiler.wait()
            found = run(job, kernels, values).found
            assert found.contributions == ([(0, WORKERS[1])] if bad else [])
            assert found.variables == ({0: False} if bad else {})
    kernels.close()


def test_rows_are_updated_on_the_device() -> None:
    """As on the host."""
    spec = TensorSpec("float32", (9, 4))
    program, operands = traced(lambda w, g: w.assign_sub(0.1 * g), [spec], [spec])
    ids, rows = np.array([3, 1, 3]), np.ones((3, 4), "float32")
    found = []
    for device in (Device(), Device(0)):
        kernels = Kernels(device)
        with device.scope():
            rest = iter(operands)
            kinds = [item.kind for item in program.inputs]
            given = {"variable": np.zeros((9, 4), "float32"), "value": rows}
            inputs = [device.put(given[kind] if kind in given else next(rest)) for kind in kinds]
            apply_rows(kernels, program, inputs, ids)
            found.append(device.get(inputs[kinds.index("variable")]))
        kernels.close()
    assert same_bits(*found)
