"""Snapshot and Restore of partitioned variables: each server writes its own rows, and reads those that it needs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.kit.internals import (
    CheckpointError,
    DamagedCheckpoint,
    InvalidRequest,
    RestoreOrder,
    ShardOf,
    VariableMismatch,
    open_saved,
)
from tests.kit.rig import WORKERS, Job

FIRST = np.arange(20, dtype="float32").reshape(10, 2)


@pytest.fixture
def worker(job: Job):
    """A member of the job."""
    return job.join(WORKERS[0])[0]


def parts(job, worker, starts, places, name="table", rows=10, value=FIRST):
    """The shards of a variable of ten rows."""
    ends = [*starts[1:], len(value)]
    return [
        job.variable(worker, value[a:b], (place,), f"{name}/part_{n}", shard=ShardOf(name, a, rows))
        for n, (a, b, place) in enumerate(zip(starts, ends, places, strict=True))
    ]


def values(job, worker, shards):
    """What the servers have of it."""
    found = [job.verbs[v.servers[0]].pull(worker.session, [v.id], -1, []).result(9) for v in shards]
    return np.concatenate([r.payload.tensors([v.spec.tensor])[0] for r, v in zip(found, shards, strict=True)])


def test_the_manifest_has_the_whole(job, worker):
    """By the variable's name; the files have the shards, for any reader of safetensors."""
    parts(job, worker, (0, 4, 7), (0, 1, 0))
    plain = job.variable(worker, np.ones(3), (1,), "plain")
    job.save(worker, "run/ckpt-1")
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
    saved = open_saved(str(directory))
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
    """Bit for bit; all of a variable's shards are restored where one is named."""
    parts(job, worker, (0, 4, 7), (0, 1, 0))
    other = parts(job, worker, *CUTS[to], name="other", value=FIRST * 0)
    job.save(worker, "run/ckpt-1")
    job.restore(worker, "run", RestoreOrder(names={"table": other[-1].id}))
    np.testing.assert_array_equal(values(job, worker, other), FIRST)


def test_a_plain_one_restores_it_and_back(job, worker):
    """A checkpoint does not tell into how many parts a variable was cut by who reads it."""
    table = parts(job, worker, (0, 5), (1, 0))
    plain = job.variable(worker, FIRST + 1, (1,), "plain")
    job.save(worker, "run/ckpt-1")
    job.restore(worker, "run", RestoreOrder(names={"table": plain.id, "plain": table[0].id}))
    np.testing.assert_array_equal(values(job, worker, [plain]), FIRST)
    np.testing.assert_array_equal(values(job, worker, table), FIRST + 1)


def test_all_is_restored_by_name(job, worker):
    """Where no names are given."""
    table = parts(job, worker, (0, 5), (1, 0))
    job.save(worker, "run/ckpt-1")
    job.restore(worker, "run")
    np.testing.assert_array_equal(values(job, worker, table), FIRST)


def test_a_whole_of_other_rows_is_refused(job, worker):
    parts(job, worker, (0, 5), (1, 0))
    other = parts(job, worker, (0, 5), (1, 0), name="other", rows=11)
    with pytest.raises(CheckpointError, match="partitioned variable 'other' has no value yet in some of its 11 rows"):
        job.save(worker, "run/ckpt-1")
    assert other


def test_rows_that_do_not_fit_are_refused(job, worker):
    """The whole counts, and not the shard."""
    parts(job, worker, (0, 5), (1, 0))
    job.save(worker, "run/ckpt-1")
    other = parts(job, worker, (0, 5), (1, 0), name="other", rows=11, value=np.zeros((11, 2), "float32"))
    with pytest.raises(VariableMismatch, match=r"'table' as float32\[10,2\], not float32\[11,2\]"):
        job.restore(worker, "run/ckpt-1", RestoreOrder(names={"table": other[0].id}))


@pytest.mark.parametrize("first", [-1, 6, 1 << 40])
def test_a_shard_beyond_its_whole_is_refused(job, worker, first):
    with pytest.raises((InvalidRequest, ValueError)):
        job.variable(worker, FIRST[:5], (0,), "bad/part_0", shard=ShardOf("bad", first, 10))


@pytest.mark.parametrize("row", [0, 5, 9])
def test_a_flipped_bit_is_found_whoever_reads_the_row(job, worker, row):
    """Of a tensor of which servers read parts each is checked by the one that reads its first row."""
    plain = job.variable(worker, FIRST, (0,), "plain")
    other = parts(job, worker, (0, 4, 7), (1, 1, 0), name="other", value=FIRST * 0)
    job.save(worker, "run/ckpt-1")
    directory = job.servers.root / "run/ckpt-1"
    name = json.loads((directory / "manifest.json").read_text())["tensors"][plain.spec.name]["file"]
    data = bytearray((directory / name).read_bytes())
    at = bytes(data).index(FIRST.tobytes()) + FIRST[:row].nbytes
    data[at] ^= 1
    (directory / name).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="'plain'"):
        job.restore(worker, "run/ckpt-1", RestoreOrder(names={"plain": other[0].id}))
    np.testing.assert_array_equal(values(job, worker, other), FIRST * 0)
