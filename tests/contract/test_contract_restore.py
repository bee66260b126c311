"""Restore: which variables get which tensors, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.kit.internals import (
    CheckpointError,
    Diverged,
    InvalidRequest,
    Manifest,
    NoCheckpoint,
    Payload,
    Plan,
    RestoreCommit,
    RestoreOrder,
    TensorSpec,
    Turn,
    VariableMismatch,
    VariableSpec,
)
from tests.kit.rig import SOON, WORKERS, Job, manifest_of, serving, sum_into, together

A, B = WORKERS[:2]


def add(job, worker, *variables):
    for variable in variables:
        plan = sum_into(variable)
        if plan.id not in job.servers.cores[0].machine.rounds.plans:
            job.approve(plan, worker)
        together(worker.push(plan, [10], server=variable.servers[0]))
        worker.round += 1


def values(job, worker, *variables):
    return [int(job.value(worker, variable)) for variable in variables]


def second(job, worker):
    """Another member, who begins where the first one is."""
    (other,) = job.join(B)
    other.round, worker.epoch = worker.round, other.epoch
    return other


def ask(job, worker, turn, stage, path="run", server=0):
    return job.verbs[server].restore(worker.session, path, turn, RestoreOrder(stage)).result(SOON)


def shard_of(job, server):
    (file,) = (job.servers.root / "run/ckpt-1").glob(f"shard-{server:05d}-*")
    return file


def flip(file):
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def test_a_look_changes_nothing(job, worker):
    """It tells what there is now, takes no turn, and is not remembered."""
    variable = job.variable(worker, np.array(1))
    with pytest.raises(NoCheckpoint):
        ask(job, worker, Turn(), "look")
    job.save(worker)
    add(job, worker, variable)
    seen = ask(job, worker, Turn(), "look")
    assert values(job, worker, variable) == [11]
    assert set(Manifest.parse(seen.manifest, "here").tensors) == {"v0"}
    assert job.restore(worker) == seen
    assert values(job, worker, variable) == [1]


# ---- Turns ----


def test_nothing_changes_before_all_have_come(job, worker):
    """Values are read and held; the round in which the last member takes part gives them to the variables."""
    variables = [job.variable(worker, np.array(n), (n,)) for n in range(2)]
    job.save(worker)
    add(job, worker, *variables[:1])
    add(job, worker, *variables[1:])
    other = second(job, worker)
    turn = worker.turn()
    job.prepare(worker, "run", turn)
    plan = job.commit(worker, "run", turn)
    first = [worker.push(plan, server=server) for server in plan.servers]
    assert values(job, other, *variables) == [10, 11]
    assert not any(future.done() for future in first)
    together(*first, *(other.push(plan, server=server) for server in plan.servers))
    assert values(job, other, *variables) == [0, 1]


def missing(file):
    file.unlink()


@pytest.mark.parametrize("damage", [flip, missing])
@pytest.mark.parametrize("server", [0, 1])
def test_what_one_server_cannot_read_no_server_restores(job, worker, server, damage):
    """Every process of the turn is told the same, whatever has become of the file; a later turn tries again."""
    variables = [job.variable(worker, np.array(n), (n,)) for n in range(2)]
    job.save(worker)
    for variable in variables:
        add(job, worker, variable)
    other, turn, file = second(job, worker), worker.turn(), shard_of(job, server)
    whole = file.read_bytes()
    damage(file)
    for process in (worker, other):
        assert ask(job, process, turn, "open").path == "run/ckpt-1"
        assert ask(job, process, turn, "prepare", "run/ckpt-1", 1 - server).path == "run/ckpt-1"
        with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read") as told:
            ask(job, process, turn, "prepare", "run/ckpt-1", server)
        assert told.value.task == f"/job:ps/task:{server}"
        file.write_bytes(whole)
    assert values(job, worker, *variables) == [10, 11]
    job.restore(worker, others=[other])
    assert values(job, worker, *variables) == [0, 1]


def test_what_does_not_fit_on_one_server_no_server_restores(job, worker):
    """The error names the variable, the checkpoint, and the server."""
    a, b = job.variable(worker, np.array(1), (0,), "a"), job.variable(worker, np.zeros(3), (1,), "b")
    job.save(worker)
    add(job, worker, a)
    c = job.variable(worker, np.zeros(2), (1,), "c")
    with pytest.raises(VariableMismatch, match=r"run/ckpt-1 has 'b' as float64\[3\], not float64\[2\]") as told:
        job.restore(worker, order=RestoreOrder(names={"a": a.id, "b": c.id}))
    assert told.value.task == "/job:ps/task:1"
    assert values(job, worker, a) == [11]
    assert job.value(worker, b).shape == (3,)


def test_who_comes_later_is_told_what_the_first_was(job, worker):
    """That there was none, though there is one by now; or which was the newest, though there is a newer one."""
    other = second(job, worker)
    turn = worker.turn()
    with pytest.raises(NoCheckpoint):
        ask(job, worker, turn, "open")
    job.close([worker.member])
    worker.epoch = job.epoch.number
    job.save(worker)
    other = second(job, worker)
    with pytest.raises(NoCheckpoint):
        ask(job, other, turn, "open")
    turn = worker.turn()
    assert ask(job, worker, turn, "open").path == "run/ckpt-1"
    (job.servers.root / "run/ckpt-1").rename(job.servers.root / "run/ckpt-2")
    assert ask(job, other, turn, "open").path == "run/ckpt-1"


def test_who_asks_for_something_else_in_a_turn_is_told_the_same(job, worker):
    """Members find out in the round that commits, all of them, and not one alone before it."""
    job.save(worker)
    other, turn = second(job, worker), worker.turn()
    found = ask(job, worker, turn, "open")
    assert ask(job, other, turn, "open", "elsewhere") == found


def test_an_earlier_rounds_restore_is_over(job, worker):
    """Who comes to it after another one has begun in a later round has gone another way."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    turn = worker.turn()
    ask(job, worker, turn, "open")
    add(job, worker, variable)
    ask(job, worker, worker.turn(), "open")
    with pytest.raises(Diverged, match="'run' was given up by a process that has begun a later one"):
        ask(job, worker, turn, "open")


def test_a_new_job_restores_anew(job, worker):
    """Nothing of what the old one was told is told to it, though its turns are numbered alike."""
    turn = worker.turn()
    with pytest.raises(NoCheckpoint):
        ask(job, worker, turn, "open")
    job.save(worker)
    job.begin()
    (again,) = job.join(A)
    assert again.turn() == turn
    assert ask(job, again, turn, "open").path == "run/ckpt-1"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_nobody_has_prepared_is_not_committed(job, mode):
    """Neither before any restore nor after one; a synchronous process cannot commit one again, either."""
    (worker,) = job.join(A, mode=mode)
    variable = job.variable(worker, np.array(1))
    job.save(worker)

    def commit(turn):
        plan = job.commit(worker, "run", turn)
        try:
            together(*(worker.push(plan, server=server) for server in (0, 1)))
        finally:
            worker.round += 1

    with pytest.raises(InvalidRequest, match="nothing was prepared to restore 'run'"):
        commit(worker.turn())
    turn = worker.turn()
    job.prepare(worker, "run", turn)
    commit(turn)
    if mode == "sync":
        with pytest.raises(InvalidRequest, match="nothing was prepared to restore 'run'"):
            commit(turn)
    add(job, worker, variable)
    with pytest.raises(InvalidRequest, match="nothing was prepared to restore 'run'"):
        commit(worker.turn())
    assert values(job, worker, variable) == [11]


def test_each_restore_is_one(job, worker):
    """Rounds between two of the same checkpoint are undone by the second, and by nothing else."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    for _ in range(2):
        add(job, worker, variable)
        job.restore(worker)
        assert values(job, worker, variable) == [1]
    add(job, worker, variable)
    assert values(job, worker, variable) == [11]


def test_what_was_given_up_is_not_restored(job, worker):
    """By a later restore, or by another round; who commits it all the same is refused."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    first, later = worker.turn(), worker.turn()
    job.prepare(worker, "run", first)
    job.prepare(worker, "run", later)
    with pytest.raises(InvalidRequest, match="nothing was prepared to restore 'run'"):
        together(worker.push(job.commit(worker, "run", first)))
    worker.round += 1
    add(job, worker, variable)
    with pytest.raises(InvalidRequest, match="nothing was prepared to restore 'run'"):
        together(worker.push(job.commit(worker, "run", later)))
    assert values(job, worker, variable) == [21]


def test_an_older_turn_than_the_newest_is_refused(job, worker):
    """Another process has gone on: what it has prepared is not replaced, and their ways are separate."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    older, turn = worker.turn(), worker.turn()
    job.prepare(worker, "run", turn)
    for stage in ("open", "prepare"):
        with pytest.raises(Diverged, match="'run' was given up by a process that has begun a later one"):
            ask(job, worker, older, stage)
    together(*(worker.push(job.commit(worker, "run", turn), server=server) for server in (0, 1)))
    assert values(job, worker, variable) == [1]


def test_who_restores_something_else_diverges(job, worker):
    """Another path, or other variables: all are told, and nothing is restored."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    other, turn = second(job, worker), worker.turn()
    job.prepare(worker, "run", turn)
    plans = [job.approve(Plan(restore=RestoreCommit(path, (0, 1), turn)), worker) for path in ("run", "run/ckpt-1")]
    futures = [worker.push(plans[0])]
    job.arrived(worker)
    futures.append(other.push(plans[1]))
    for future in futures:
        with pytest.raises(Diverged, match=r"restore 'run'.*restore 'run/ckpt-1'"):
            future.result(SOON)
    assert int(job.servers.cores[0].machine.store.value(variable.id)) == 11


def test_a_member_that_is_lost_is_not_waited_for(job, worker):
    """The others restore without it."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    second(job, worker)
    turn = worker.turn()
    job.prepare(worker, "run", turn)
    plan = job.commit(worker, "run", turn)
    waiting = [worker.push(plan, server=server) for server in plan.servers]
    job.close([worker.member])
    assert [reply.left_out for reply in together(*waiting)] == [(B,), (B,)]
    assert values(job, worker, variable) == [1]


def test_asynchronous_processes_undo_nothing(job):
    """Each makes the round that commits; what was pushed after the first one's stays."""
    (first,) = job.join(A)
    variable = job.variable(first, np.array(1))
    job.save(first)
    job.begin()
    one, two = job.join(A, B, mode="async")
    variable = job.variable(one, np.array(5), name="w")
    job.restore(one, order=RestoreOrder(names={"v0": variable.id}))
    assert values(job, one, variable) == [1]
    add(job, one, variable)
    job.restore(two, order=RestoreOrder(names={"v0": variable.id}))
    assert values(job, two, variable) == [11]
    job.restore(two, order=RestoreOrder(names={"v0": variable.id}))
    assert values(job, two, variable) == [1]


def two_alone(job):
    """Two asynchronous processes, and a variable on each server of which there is a checkpoint in `run`."""
    (first,) = job.join(A)
    for server in (0, 1):
        job.variable(first, np.array(1), (server,))
    job.save(first)
    job.begin()
    one, two = job.join(A, B, mode="async")
    return one, two, [job.variable(one, np.array(5), (server,)) for server in (0, 1)]


def test_asynchronous_processes_restore_the_same(job):
    """Who names another checkpoint than the first did is told so, instead of what became of that."""
    one, two, variables = two_alone(job)
    job.restore(one, "run/ckpt-1")
    with pytest.raises(InvalidRequest, match=r"'run' is not what another process restores first: 'run/ckpt-1'"):
        job.restore(two, "run")
    assert values(job, one, *variables) == [1, 1]


def test_what_an_asynchronous_process_gives_up_is_not_held(job):
    """A server that could read its part lets go of it with the next round of who asked for it."""
    one, two, variables = two_alone(job)
    flip(shard_of(job, 1))
    with pytest.raises(CheckpointError, match="cannot be read"):
        job.restore(one)
    restores = job.servers.cores[0].machine.restores
    add(job, two, variables[0])
    assert restores._prepared is not None
    add(job, one, variables[0])
    assert restores._prepared is None
    assert values(job, one, *variables) == [25, 5]


def test_a_restore_is_of_all_servers_and_of_nothing_else(job, worker):
    """Such a plan is refused."""
    variable = job.variable(worker, np.array(1))
    some, more = Plan(restore=RestoreCommit("run", (0,))), Plan(restore=RestoreCommit("run", (0, 1)))
    for plan in (some, replace(sum_into(variable), restore=more.restore)):
        with pytest.raises(InvalidRequest, match="of all servers, and of nothing else"):
            job.verbs[0].propose(worker.session, plan, "", None)


# ---- Which variables ----


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
    job.restore(again, order=RestoreOrder(cast=True))
    found = job.value(again, variable)
    assert (found.dtype, found[()]) == ("float32", 1.75)
    assert created(job, again, "float32") == 1.5


def test_what_later_variables_need_is_not_deleted(job, worker):
    """Until a variable of each name has been created; then it is as free as any other."""
    job.variable(worker, np.array(1), (1,), "late")
    job.save(worker)
    job.begin()
    (again,) = job.join(A)
    job.restore(again, order=RestoreOrder(names={}))
    root = job.servers.root / "run"
    for number, there in ((2, True), (3, False)):
        state = json.dumps({"delete": ["ckpt-1"]})
        job.save(again, f"run/ckpt-{number}", state=state)
        assert (root / "ckpt-1/manifest.json").exists() == there
        assert there == (number == 2)
        if there:
            assert created(job, again) == 1


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
