"""Restore: which variables get which tensors, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rig import SOON, WORKERS, Job, manifest_of, serving, sum_into, together

from pswire.api import RestoreOrder
from pswire.errors import CheckpointError, NoCheckpoint, VariableMismatch
from pswire.manifest import Manifest
from pswire.payload import Payload
from pswire.spec import VariableSpec
from pswire.tensor import TensorSpec

A, B = WORKERS[:2]


@pytest.fixture
def worker(job: Job):
    """A member of the job."""
    return job.join(A)[0]


def add(job, worker, *variables):
    for variable in variables:
        plan = sum_into(variable)
        if plan.id not in job.servers.cores[0]._rounds.plans:
            job.approve(plan, worker)
        together(worker.push(plan, [10], server=variable.servers[0]))
        worker.round += 1


def values(job, worker, *variables):
    return [int(job.value(worker, variable)) for variable in variables]


def test_a_look_changes_nothing(job, worker):
    """It tells what there is, and takes no turn: the first restore after it is the first."""
    variable = job.variable(worker, np.array(1))
    with pytest.raises(NoCheckpoint):
        job.restore(worker, order=RestoreOrder(look=True))
    job.save(worker)
    add(job, worker, variable)
    seen = job.restore(worker, order=RestoreOrder(look=True))
    assert values(job, worker, variable) == [11]
    assert set(Manifest.parse(seen.manifest, "here").tensors) == {"v0"}
    assert job.restore(worker) == seen
    assert values(job, worker, variable) == [1]


def test_a_restore_by_names_changes_these(job, worker):
    """Each variable gets the tensor that is named for it, whatever its own name; the others stay."""
    a, b, c = (job.variable(worker, np.array(n), (n % 2,)) for n in range(3))
    job.save(worker)
    fresh = job.variable(worker, np.array(5), (1,))
    add(job, worker, a, b, c)
    job.restore(worker, order=RestoreOrder(names={"v0": fresh.id, "v1": b.id}))
    assert values(job, worker, a, b, c, fresh) == [10, 1, 12, 0]


def test_what_is_saved_as_one_is_restored_as_one(job, worker):
    """A name stands for all variables that are saved by it: they always have one value."""
    first = job.variable(worker, np.array(1), (1,), "count")
    copy = job.variable(worker, np.array(1), (0,), "copy", saved_as="count")
    job.save(worker)
    add(job, worker, first, copy)
    job.restore(worker, order=RestoreOrder(names={"count": first.id}))
    assert values(job, worker, first, copy) == [1, 1]


def test_a_tensor_that_is_not_there_is_told(job, worker):
    """By the server whose variable it is for; nothing there is restored."""
    a, b = (job.variable(worker, np.array(n)) for n in range(2))
    job.save(worker)
    add(job, worker, a)
    with pytest.raises(CheckpointError, match="has no variable 'w'") as told:
        job.restore(worker, order=RestoreOrder(names={"v0": a.id, "w": b.id}))
    assert told.value.task == "/job:ps/task:0"
    assert values(job, worker, a) == [10]


def created(job, worker, dtype="int64"):
    """The value of a variable that is created now; the next of the job's."""
    spec = VariableSpec("late", TensorSpec(dtype, ()))
    ordinal = len(job.variables)
    id = job.verbs[0].create(worker.session, ordinal, -1, spec, (1,), None).id
    job.verbs[1].create(worker.session, ordinal, id, spec, (1,), Payload.pack([np.array(9, dtype)]))
    return job.verbs[1].pull(worker.session, [id], -1).result(SOON).payload.tensors([spec.tensor])[0]


@pytest.mark.parametrize(("late", "value"), [(True, 1), (False, 9)])
def test_variables_of_later_get_theirs_if_asked(job, worker, late, value):
    """Also where the restore named others; with `late=False` they begin as their creators say."""
    job.variable(worker, np.array(1), (1,), "late")
    job.save(worker)
    job.begin()
    (again,) = job.join(A)
    job.restore(again, order=RestoreOrder(names={}, late=late))
    assert created(job, again) == value


def test_a_dtype_is_cast_if_asked(job, worker):
    """Else another one is refused; what is created later is treated the same."""
    job.variable(worker, np.array(1.75), (0,), "w")
    job.variable(worker, np.array(1.5), (1,), "late")
    job.save(worker)
    job.begin()
    (again,) = job.join(A)
    variable = job.variable(again, np.array(7, "float32"), (0,), "w")
    with pytest.raises(VariableMismatch, match=r"'w' as float64\[\], not float32\[\]"):
        job.restore(again)
    job.restore(again, order=RestoreOrder(cast=True), ordinal=1)
    found = job.value(again, variable)
    assert (found.dtype, found[()]) == ("float32", 1.75)
    assert created(job, again, "float32") == 1.5


def test_a_flipped_bit_is_told(job, worker):
    """With the server, the file and the variable; what this server has stays."""
    variables = [job.variable(worker, np.array(n)) for n in range(2)]
    job.save(worker)
    add(job, worker, *variables)
    shard = job.servers.root / "run/ckpt-1/shard-00000-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"shard-00000-of-00002\.safetensors cannot be read: .*'v1'") as told:
        job.restore(worker)
    assert told.value.task == "/job:ps/task:0"
    assert values(job, worker, *variables) == [10, 11]


@pytest.mark.parametrize(("before", "after"), list(itertools.product((1, 2, 3, 5), repeat=2)))
def test_any_number_of_servers_to_any_other(tmp_path, before, after):
    """Each variable comes back wherever it lives then."""
    arrays = [np.arange(n + 1, dtype="float32") * n for n in range(7)]
    with serving("core", before, tmp_path) as servers:
        job = Job(servers)
        (worker,) = job.join(A)
        for n, array in enumerate(arrays):
            job.variable(worker, array, (n % before,))
        job.save(worker)
    with serving("core", after, tmp_path) as servers:
        job = Job(servers)
        (worker,) = job.join(A)
        variables = [job.variable(worker, array * 0 - 1, (n % after,)) for n, array in enumerate(arrays)]
        job.restore(worker)
        for variable, array in zip(variables, arrays, strict=True):
            np.testing.assert_array_equal(job.value(worker, variable), array)


def test_a_restore_and_a_save_at_once(job, worker):
    """What is still to be written has the values of its round, not the restored ones."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    plan = job.order(worker, "run/ckpt-2")
    job.restore(worker, path="run/ckpt-1")
    shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
    job.verbs[0].snapshot(job.token, plan.id, manifest_of(shards)).result(SOON)
    assert values(job, worker, variable) == [1]
    job.restore(worker, path="run/ckpt-2")
    assert values(job, worker, variable) == [11]
