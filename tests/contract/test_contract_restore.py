"""Restore: which variables get which tensors, also of partitioned ones, what is refused, and in which turn."""

import itertools
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit import internals as inside
from tests.kit.rig import SOON, WORKERS, Job, create, eventually, manifest_of, serving, sum_into, together
from tests.kit.strategies import refused

A, B = WORKERS[:2]


def add(job, worker, *variables):
    """A round for each variable, which adds ten."""
    for variable in variables:
        plan = sum_into(variable)
        if plan.id not in job.servers.cores[0].machine.job.rounds.plans:
            job.approve(plan, worker)
        worker.make(plan, [10], server=variable.servers[0])


def values(job, worker, *variables):
    return [int(job.value(worker, variable)) for variable in variables]


def second(job, worker):
    """Another member, who begins where the first one is."""
    (other,) = job.join(B)
    other.round, worker.generation = worker.round, other.generation
    return other


def ask(job, worker, turn, stage, path="run", server=0):
    return job.verbs[server].restore(worker.session, path, turn, inside.RestoreOrder(stage)).result(SOON)


def commit(job, worker, turn):
    """Makes the round that commits a restore, which may be refused."""
    plan = job.commit(worker, "run", turn)
    pushed = [worker.push(plan, server=server) for server in plan.servers]
    worker.round += 1
    together(*pushed)


def again(job, *tasks, **keys):
    """The same servers begin a new job; returns its members."""
    job.begin()
    return job.join(*tasks or (A,), **keys)


def shard_of(job, server):
    (file,) = (job.servers.root / "run/ckpt-1").glob(f"shard-{server:05d}-*")
    return file


def flip(file):
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def test_a_look_changes_nothing(job, worker):
    """It tells what there is now, takes no turn, and is not remembered."""
    variable = job.variable(worker, np.array(1))
    refused(inside.NoCheckpoint, "", lambda: ask(job, worker, inside.Turn(), "look"))
    job.save(worker)
    add(job, worker, variable)
    seen = ask(job, worker, inside.Turn(), "look")
    assert values(job, worker, variable) == [11]
    assert set(inside.Manifest.parse(seen.manifest, "here").tensors) == {"v0"}
    assert job.restore(worker) == seen
    assert values(job, worker, variable) == [1]


# ---- What is there ----


def test_a_directory_of_checkpoints_means_its_newest(job, worker, caplog):
    """The one with the greatest number, whatever the clocks say; those without a manifest do not count. The log says
    which one was restored."""
    caplog.set_level(logging.INFO, "psserver")
    variable = job.variable(worker, np.array(1))
    job.save(worker, "run/ckpt-10")
    add(job, worker, variable)
    for path in ("run/ckpt-9", "run/best"):
        job.save(worker, path)
    job.order(worker, "run/ckpt-11")
    eventually((job.servers.root / "run/ckpt-11").is_dir)
    assert job.restore(worker).path == "run/ckpt-10"
    assert values(job, worker, variable) == [1]
    (said,) = [message for message in caplog.messages if message.startswith("restored ")]
    assert "/run/ckpt-10, saved after round " in said


@pytest.mark.parametrize("server", [0, 1])
def test_what_one_server_cannot_read_no_server_restores(job, worker, server):
    """Every process of the turn is told the same, whatever becomes of the file since; a later turn tries again."""
    variables = [job.variable(worker, np.array(n), (n,)) for n in range(2)]
    job.save(worker)
    add(job, worker, *variables)
    other, turn, file = second(job, worker), worker.turn(), shard_of(job, server)
    whole = file.read_bytes()
    flip(file)
    for process in (worker, other):
        assert ask(job, process, turn, "open").path == "run/ckpt-1"
        assert ask(job, process, turn, "prepare", "run/ckpt-1", 1 - server).path == "run/ckpt-1"
        with pytest.raises(inside.CheckpointError, match=rf"{file.name} cannot be read") as told:
            ask(job, process, turn, "prepare", "run/ckpt-1", server)
        assert told.value.task == f"/job:ps/task:{server}"
        file.write_bytes(whole)
    assert values(job, worker, *variables) == [10, 11]
    job.restore(worker, others=[other])
    assert values(job, worker, *variables) == [0, 1]


def test_what_does_not_fit_on_one_server_no_server_restores(job, worker):
    """The error names the variable, the checkpoint, and the server: one of another shape, or that is not there."""
    a, b = job.variable(worker, np.array(1), (0,), "a"), job.variable(worker, np.zeros(3), (1,), "b")
    job.save(worker)
    add(job, worker, a)
    c = job.variable(worker, np.zeros(2), (1,), "c")
    for order, error, words in (
        ({"a": a.id, "b": c.id}, inside.VariableMismatch, r"run/ckpt-1 holds 'b' as float64\[3\], not float64\[2\]"),
        ({"a": a.id, "w": c.id}, inside.CheckpointError, "has no variable 'w'"),
        (None, inside.CheckpointError, "has no variable 'c'"),
    ):
        with pytest.raises(error, match=words) as told:
            job.restore(worker, order=inside.RestoreOrder(names=order))
        assert told.value.task == "/job:ps/task:1"
    assert values(job, worker, a) == [11]
    assert job.value(worker, b).shape == (3,)


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


def test_who_comes_later_is_told_what_the_first_was(job, worker):
    """That there was none, though there is one by now; or which was the newest, though there is a newer one. Also who
    asks for something else: members find out in the round that commits, all of them, and not one alone."""
    other, turn = second(job, worker), worker.turn()
    refused(inside.NoCheckpoint, "", lambda: ask(job, worker, turn, "open"))
    job.close([worker.member])
    worker.generation = job.generation.number
    job.save(worker)
    other = second(job, worker)
    refused(inside.NoCheckpoint, "", lambda: ask(job, other, turn, "open"))
    turn = worker.turn()
    found = ask(job, worker, turn, "open")
    assert found.path == "run/ckpt-1"
    (job.servers.root / "run/ckpt-1").rename(job.servers.root / "run/ckpt-2")
    for path in ("run", "elsewhere"):
        assert ask(job, other, turn, "open", path) == found


def test_a_new_job_restores_anew(job, worker):
    """Nothing of what the old one was told is told to it, though its turns are numbered alike."""
    turn = worker.turn()
    refused(inside.NoCheckpoint, "", lambda: ask(job, worker, turn, "open"))
    job.save(worker)
    (new,) = again(job)
    assert new.turn() == turn
    assert ask(job, new, turn, "open").path == "run/ckpt-1"


NOTHING = "the restore of 'run' was not prepared"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_nobody_has_prepared_is_not_committed(job, mode):
    """Neither before any restore nor after one; a synchronous process cannot commit one again, either. Each restore is
    one: rounds between two of the same checkpoint are undone by the second, and by nothing else."""
    (worker,) = job.join(A, mode=mode)
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    refused(inside.InvalidRequest, NOTHING, lambda: commit(job, worker, worker.turn()))
    add(job, worker, variable)
    turn = worker.turn()
    job.prepare(worker, "run", turn)
    commit(job, worker, turn)
    assert values(job, worker, variable) == [1]
    if mode == "sync":
        refused(inside.InvalidRequest, NOTHING, lambda: commit(job, worker, turn))
    add(job, worker, variable)
    refused(inside.InvalidRequest, NOTHING, lambda: commit(job, worker, worker.turn()))
    assert values(job, worker, variable) == [11]
    job.restore(worker)
    assert values(job, worker, variable) == [1]


def test_what_was_given_up_is_not_restored(job, worker):
    """By a later restore, or by another round; who commits it all the same is refused."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    first, later = worker.turn(), worker.turn()
    job.prepare(worker, "run", first)
    job.prepare(worker, "run", later)
    refused(inside.InvalidRequest, NOTHING, lambda: commit(job, worker, first))
    add(job, worker, variable)
    refused(inside.InvalidRequest, NOTHING, lambda: commit(job, worker, later))
    assert values(job, worker, variable) == [21]


def test_an_older_turn_than_the_newest_is_refused(job, worker):
    """Another process has gone on: what it has prepared is not replaced, and their ways are separate. Nor is one of an
    earlier round taken, after another one has begun in a later round."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    early = worker.turn()
    ask(job, worker, early, "open")
    add(job, worker, variable)
    older, turn = worker.turn(), worker.turn()
    job.prepare(worker, "run", turn)
    for late, stage in ((older, "open"), (older, "prepare"), (early, "open")):
        with pytest.raises(inside.Diverged, match="'run' was cancelled, because another process began a later restore"):
            ask(job, worker, late, stage)
    commit(job, worker, turn)
    assert values(job, worker, variable) == [1]


def test_who_restores_something_else_diverges(job, worker):
    """Another path, or other variables: all are told, and nothing is restored."""
    variable = job.variable(worker, np.array(1))
    job.save(worker)
    add(job, worker, variable)
    other, turn = second(job, worker), worker.turn()
    job.prepare(worker, "run", turn)
    commits = [inside.RestoreCommit(path, (0, 1), turn) for path in ("run", "run/ckpt-1")]
    plans = [job.approve(inside.Plan(restore=commit), worker) for commit in commits]
    futures = [worker.push(plans[0])]
    job.arrived(worker)
    futures.append(other.push(plans[1]))
    for future in futures:
        with pytest.raises(inside.Diverged, match=r"restore 'run'.*restore 'run/ckpt-1'"):
            future.result(SOON)
    assert int(job.servers.cores[0].machine.job.store.find(variable.id).array) == 11


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
    assert [reply.excluded for reply in together(*waiting)] == [(B,), (B,)]
    assert values(job, worker, variable) == [1]


def test_a_restore_is_of_all_servers_and_of_nothing_else(job, worker):
    """Such a plan is refused."""
    variable = job.variable(worker, np.array(1))
    some, more = (inside.Plan(restore=inside.RestoreCommit("run", servers)) for servers in ((0,), (0, 1)))
    for plan in (some, replace(sum_into(variable), restore=more.restore)):
        with pytest.raises(inside.InvalidRequest, match="include all servers, and nothing else"):
            job.verbs[0].propose(worker.session, plan, "", None)


def two_alone(job):
    """Two asynchronous processes, and a variable on each server of which there is a checkpoint in `run`."""
    (first,) = job.join(A)
    for server in (0, 1):
        job.variable(first, np.array(1), (server,))
    job.save(first)
    one, two = again(job, A, B, mode="async")
    return one, two, [job.variable(one, np.array(5), (server,)) for server in (0, 1)]


def test_asynchronous_processes_undo_nothing(job):
    """Each makes the round that commits; what was pushed after the first one's stays. Who names another checkpoint than
    the first did is told so, instead of what became of that."""
    one, two, variables = two_alone(job)
    job.restore(one, "run/ckpt-1")
    assert values(job, one, *variables) == [1, 1]
    with pytest.raises(inside.InvalidRequest, match=r"restores 'run', but another process restored 'run/ckpt-1' first"):
        job.restore(two, "run")
    two.restores = 0
    add(job, one, variables[0])
    job.restore(two, "run/ckpt-1")
    assert values(job, two, *variables) == [11, 1]
    job.restore(two, "run/ckpt-1")
    assert values(job, two, *variables) == [1, 1]


def test_what_an_asynchronous_process_gives_up_is_not_held(job):
    """A server that could read its part lets go of it with the next round of who asked for it."""
    one, two, variables = two_alone(job)
    flip(shard_of(job, 1))
    refused(inside.CheckpointError, "cannot be read", lambda: job.restore(one))
    restores = job.servers.cores[0].machine.job.restores
    add(job, two, variables[0])
    assert restores._prepared is not None
    add(job, one, variables[0])
    assert restores._prepared is None
    assert values(job, one, *variables) == [25, 5]


# ---- Which variables ----


def test_a_restore_by_names_changes_these(job, worker):
    """Each variable gets the tensor that is named for it, whatever its own name; the others stay. A name stands for all
    variables that are saved by it: they always have one value."""
    a, b, c = (job.variable(worker, np.array(n), (n % 2,)) for n in range(3))
    first = job.variable(worker, np.array(1), (1,), "count")
    copy = job.variable(worker, np.array(1), (0,), "copy", saved_as="count")
    job.save(worker)
    fresh = job.variable(worker, np.array(5), (1,))
    everything = (a, b, c, fresh, first, copy)
    add(job, worker, a, b, c, first, copy)
    job.restore(worker, order=inside.RestoreOrder(names={"v0": fresh.id, "v1": b.id}))
    assert values(job, worker, *everything) == [10, 1, 12, 0, 11, 11]
    job.restore(worker, order=inside.RestoreOrder(names={"count": first.id}))
    assert values(job, worker, *everything) == [10, 1, 12, 0, 1, 1]


def test_a_dtype_is_cast_if_asked(job, worker):
    """Else another one is refused; what is created later is treated the same."""
    job.variable(worker, np.array(1.75), (0,), "w")
    job.variable(worker, np.array(1.5), (1,), "late")
    job.save(worker)
    (new,) = again(job)
    variable = job.variable(new, np.array(7, "float32"), (0,), "w")
    refused(inside.VariableMismatch, r"'w' as float64\[\], not float32\[\]", lambda: job.restore(new))
    job.restore(new, order=inside.RestoreOrder(cast=True))
    found = job.value(new, variable)
    assert (found.dtype, found[()]) == ("float32", 1.75)
    assert created(job, new, "float32")[0] == 1.5


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
    job.restore(worker, "run/ckpt-1")
    shards = [server.snapshot(job.token, plan.id, "").result(SOON) for server in job.verbs]
    job.verbs[0].snapshot(job.token, plan.id, manifest_of(shards)).result(SOON)
    assert values(job, worker, variable) == [1]
    job.restore(worker, "run/ckpt-2")
    assert values(job, worker, variable) == [11]


# ---- Variables that are created later ----


def created(job, worker, dtype="int64", name="late"):
    """The value of a variable that is created now, the next of the job's, and whether it was told to be restored."""
    spec = inside.VariableSpec(name, inside.TensorSpec(dtype, ()))
    ordinal = job.verbs[0].status().variables
    named = create(job.verbs[0], worker.session, ordinal, spec, (1,))
    payload = inside.Payload.pack([np.array(9, dtype)])
    told = [named, create(job.verbs[1], worker.session, ordinal, spec, (1,), payload)]
    pulled = job.verbs[1].pull(worker.session, [ordinal], -1).result(SOON)
    return pulled.payload.tensors([spec.tensor])[0], [bool(reply.restored) for reply in told]


@pytest.mark.parametrize(("late", "value"), [(True, 1), (False, 9)])
def test_variables_of_later_get_theirs_if_asked(job, worker, late, value):
    """Whatever first value their creators bring, also where the restore named others; it is told to everyone who
    creates them, however late, until the job is started anew. One that the checkpoint does not have keeps theirs, and
    so do all with `late=False`. One that does not fit is told with both shapes."""
    job.variable(worker, np.array(1), (1,), "late")
    job.variable(worker, np.zeros(3), (0,), "w")
    job.save(worker)
    one, two = again(job, A, B)
    job.restore(one, order=inside.RestoreOrder(names={}, late=late), others=[two])
    assert created(job, one) == (value, [False, late])
    for member in (two, one):
        spec, payload = inside.VariableSpec("late", inside.TensorSpec("int64", ())), inside.Payload.pack([np.array(7)])
        assert bool(create(job.verbs[1], member.session, 0, spec, (1,), payload).restored) == late
    assert created(job, one, name="new") == (9, [False, False])
    if late:
        spec = inside.VariableSpec("w", inside.TensorSpec("float64", (2,)))
        with pytest.raises(inside.VariableMismatch, match=r"float64\[3\], not float64\[2\]"):
            create(job.verbs[0], one.session, 2, spec, (0,), inside.Payload.pack([np.zeros(2)]))
    (new,) = again(job)
    assert created(job, new) == (9, [False, False])


def test_what_is_saved_by_another_name_begins_as_its_creator_says(job, worker):
    """After a restore, too: the other variable may have changed since. What a restore gives to a variable that was
    there before does not change its own first value."""
    variable = job.variable(worker, np.array(1), (0,), "count")
    job.save(worker)
    job.restore(worker)
    assert not create(job.verbs[0], worker.session, 0, variable.spec, (0,)).restored
    (new,) = again(job)
    job.restore(new)
    first = job.variable(new, np.array(0), (0,), "count")
    add(job, new, first)
    copy = job.variable(new, np.array(11), (1,), "copy", saved_as="count")
    assert values(job, new, first, copy) == [11, 11]


# ---- Partitioned variables: each server writes its own rows, and reads those that it needs ----

FIRST = np.arange(20, dtype="float32").reshape(10, 2)


def parts(job, worker, starts, places, name="table", rows=10, value=FIRST):
    """The shards of a variable of ten rows."""
    ends = [*starts[1:], len(value)]
    return [
        job.variable(worker, value[a:b], (place,), f"{name}/part_{n}", shard=inside.ShardOf(name, a, rows))
        for n, (a, b, place) in enumerate(zip(starts, ends, places, strict=True))
    ]


def whole(job, worker, shards):
    """What the servers have of it."""
    return np.concatenate([job.value(worker, shard) for shard in shards])


def test_the_manifest_has_the_whole(job, worker):
    """By the variable's name; the files have the shards, for any reader of safetensors."""
    parts(job, worker, (0, 4, 7), (0, 1, 0))
    plain = job.variable(worker, np.ones(3), (1,), "plain")
    job.save(worker)
    directory = job.servers.root / "run/ckpt-1"
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["format"] == 3
    table = manifest["tensors"]["table"]
    assert (table["dtype"], table["shape"]) == ("float32", [10, 2])
    assert [(each["first"], each["rows"], each["tensor"]) for each in table["slices"]] == [
        (0, 4, "table/part_0"),
        (4, 3, "table/part_1"),
        (7, 3, "table/part_2"),
    ]
    pieces = [load_file(directory / each["file"])[each["tensor"]] for each in table["slices"]]
    np.testing.assert_array_equal(np.concatenate(pieces), FIRST)
    assert "slices" not in manifest["tensors"][plain.spec.name]
    saved = inside.open_saved(str(directory))
    np.testing.assert_array_equal(saved.tensor("table"), FIRST)
    assert list(saved.verify()) == []


CUTS = {
    "one": ((0,), (0,)),
    "one elsewhere": ((0,), (1,)),
    "the same": ((0, 4, 7), (0, 1, 0)),
    "five": ((0, 2, 4, 6, 8), (1, 0, 1, 0, 1)),
    "ten": (tuple(range(10)), (0, 1) * 5),
}


@pytest.mark.parametrize("to", CUTS)
def test_another_cut_restores_it(job, worker, to):
    """Bit for bit; all of a variable's shards are restored where one is named. So does a plain variable, and back: who
    reads a checkpoint is not told how a variable was cut. Where no names are given all is restored by name."""
    table = parts(job, worker, (0, 4, 7), (0, 1, 0))
    other = parts(job, worker, *CUTS[to], name="other", value=FIRST * 0)
    plain = job.variable(worker, FIRST + 1, (1,), "plain")
    job.save(worker)
    job.restore(worker, "run", inside.RestoreOrder(names={"table": other[-1].id}))
    np.testing.assert_array_equal(whole(job, worker, other), FIRST)
    names = {"table": plain.id, "plain": table[0].id, "other": other[0].id}
    job.restore(worker, "run", inside.RestoreOrder(names=names))
    for shards, expected in (([plain], FIRST), (table, FIRST + 1), (other, FIRST * 0)):
        np.testing.assert_array_equal(whole(job, worker, shards), expected)
    job.restore(worker)
    for shards, expected in (([plain], FIRST + 1), (table, FIRST), (other, FIRST * 0)):
        np.testing.assert_array_equal(whole(job, worker, shards), expected)


def test_rows_that_do_not_fit_are_refused(job, worker):
    """The whole counts, and not the shard: to be restored, and to be saved where some of it have no value yet."""
    parts(job, worker, (0, 5), (1, 0))
    job.save(worker)
    other = parts(job, worker, (0, 5), (1, 0), name="other", rows=11, value=np.zeros((11, 2), "float32"))
    with pytest.raises(inside.VariableMismatch, match=r"'table' as float32\[10,2\], not float32\[11,2\]"):
        job.restore(worker, "run/ckpt-1", inside.RestoreOrder(names={"table": other[0].id}))
    parts(job, worker, (0, 5), (1, 0), name="third", rows=11)
    with pytest.raises(inside.CheckpointError, match="variable 'third' has no value yet in some of its 11 rows"):
        job.save(worker, "run/ckpt-2")
    for first in (-1, 6, 1 << 40):
        with pytest.raises((inside.InvalidRequest, ValueError)):
            job.variable(worker, FIRST[:5], (0,), "bad/part_0", shard=inside.ShardOf("bad", first, 10))


@pytest.mark.parametrize("row", [0, 5, 9])
def test_a_flipped_bit_is_found_whoever_reads_the_row(job, worker, row):
    """Of a tensor of which servers read parts each is checked by the one that reads its first row."""
    plain = job.variable(worker, FIRST, (0,), "plain")
    other = parts(job, worker, (0, 4, 7), (1, 1, 0), name="other", value=FIRST * 0)
    job.save(worker)
    directory = job.servers.root / "run/ckpt-1"
    name = json.loads((directory / "manifest.json").read_text())["tensors"][plain.spec.name]["file"]
    data = bytearray((directory / name).read_bytes())
    at = bytes(data).index(FIRST.tobytes()) + FIRST[:row].nbytes
    data[at] ^= 1
    (directory / name).write_bytes(data)
    with pytest.raises(inside.DamagedCheckpoint, match="'plain'"):
        job.restore(worker, "run/ckpt-1", inside.RestoreOrder(names={"plain": other[0].id}))
    np.testing.assert_array_equal(whole(job, worker, other), FIRST * 0)
