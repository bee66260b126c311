"""Dynamic tables: what their options mean, and a reader without servers, which has the rows that servers saved."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

import psclient as ps
from pswire.checkpoint.compaction import compact
from pswire.checkpoint.manifest import latest_text
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import combined, keys_of
from pswire.model.tables import CounterFilter, GlobalStepEvict, Normal, TableSpec, TimeToLive, Zeros
from tests.kit.storage import write_checkpoint
from tests.kit.strategies import refused
from tests.kit.tables import NAME, Servers

de = ps.dynamic_embedding


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), (" 1.5 h ", 5400), ("2w", 1_209_600), (60, 60)],
)
def test_times_to_live(time, seconds):
    assert de.TTL(time) == TimeToLive(seconds)


REFUSED = [
    *((lambda time: de.TTL(time), time, "") for time in ("", "7", "7 years", "-1d", -1, float("nan"))),
    *((lambda kind: de.StorageOption(kind), kind, f"storage '{kind}' is not supported") for kind in ("ssd", "hbm")),
    (
        lambda kind: de.StorageOption(kind, path="/nvme/t", dram="1GiB"),
        "dram_ssd",
        "storage 'dram_ssd' is not supported",
    ),
    (lambda kind: de.StorageOption(kind), "dram_ssd", "storage 'dram_ssd' is not supported"),
    (lambda count: de.HashPartitioner(buckets=count), 512, ""),
    *((lambda count: de.HashPartitioner(shards=count), count, "") for count in (0, 2000, True)),
]


@pytest.mark.parametrize(("make", "given", "said"), REFUSED)
def test_options_that_cannot_be(make, given, said):
    """No time is guessed; rows lie in memory; buckets are 1024 for good, and parts have at least one each."""
    assert de.StorageOption() == de.StorageOption("dram")
    refused(ValueError, said, lambda: make(given))


WRONG = {
    "capacity too small": ({"capacity": 1000}, ValueError, "table 'users': a capacity of 1000 rows"),
    "no size": ({"memory_limit": "4 Gigs"}, ValueError, "memory_limit of table 'users'"),
    "checkpoint": ({"checkpoint": False}, ValueError, "supported, because checkpoints contain all tables; remove it"),
    "storage": ({"storage": 3}, TypeError, "use StorageOption"),
    "storage that does not exist yet": ({"storage": "dram_ssd"}, ValueError, "storage 'dram_ssd' is not supported"),
    "compression of rows": ({"compression": "int8"}, ValueError, "table 'users': compression of rows is not supported"),
    "partitioner": ({"partitioner": len}, TypeError, "use HashPartitioner"),
    "initializer": ({"initializer": np.zeros}, TypeError, "use one of ps.initializers"),
    "a class": ({"initializer": ps.initializers.Zeros}, TypeError, "use one of ps.initializers"),
    "name": ({"name": 3}, TypeError, "name is 3"),
    "a name of nothing": ({"name": ""}, ValueError, "printable characters"),
    "hash_seed": ({"hash_seed": -1}, ValueError, "table 'users': hash_seed"),
    "shards": ({"shards": 0}, ValueError, "shards is 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_table_cannot_be(wrong):
    """Each is an error that names the table, before anything is created."""
    options, error, words = WRONG[wrong]
    refused(error, words, lambda: de.get_variable(**{"name": "users", "dim": 8, **options}))


def test_what_groups_and_readers_cannot_be():
    """No names or a word, names that come twice or are too many, other keys; tables live on parameter servers. A place
    without checkpoints, or a URL, is not read."""
    said = r"names|group 'group'"
    for names in ([], ["a", "b", "a"], map(str, range(40_000))):
        refused(ValueError, said, lambda names=names: de.group(names, dim=8))
    refused(TypeError, said, lambda: de.group("users", dim=8), lambda: de.group(["a"], dim=8, key_dtype="uint64"))
    for scope in (ps.get_strategy(), ps.MirroredStrategy(["cpu:0"])):
        with scope.scope():
            refused(RuntimeError, "ParameterServerStrategy", lambda: de.get_variable("users", dim=8))
    refused(ps.errors.NoCheckpoint, "", lambda: de.Reader("nothing"))
    refused(ps.errors.ConfigError, "copy the checkpoint to this machine", lambda: de.Reader("s3://bucket/run"))


SPEC = TableSpec((2,), admission=CounterFilter(2), eviction=GlobalStepEvict(6), initializer=Normal())


def same(reader, job):
    """Whether a table has the rows of a job, and begins all others as it does."""
    table, state = reader[NAME], job.state()
    others = np.arange(10**6, 10**6 + 50).astype(job.spec.key_dtype)
    assert len(table) == state.keys.size
    assert table.keys().tolist() == state.keys.tolist()
    assert table.lookup(state.keys).tobytes() == state.tensors[0].tobytes()
    assert table.lookup(others).tobytes() == RowInitializer(job.spec).rows(others).tobytes()
    asked = np.concatenate([others, state.keys[:50]]).reshape(2, -1)
    assert table.lookup(asked)[1].tobytes() == state.tensors[0][:50].tobytes()
    assert table.contains(state.keys).all()
    assert not table.contains(others).any()
    return True


@pytest.mark.parametrize("count", [1, 3])
def test_it_follows_a_job(tmp_path, count):
    """Deltas come upon what it has, as many as there are; whole checkpoints take its place; no row is lost. One that is
    opened later has the same."""
    job, rng = Servers.made(tmp_path, SPEC, count), np.random.default_rng(0)
    job.train(rng)
    job.save("c-1")
    reader = de.Reader(str(tmp_path))
    table, views = reader[NAME], []
    assert not reader.refresh()
    for number, base in ((2, 1), (3, 2), (4, 3), (5, 0), (6, 5), (7, 6)):
        job.train(rng, 2)
        if number == 6:
            job.parts[-1].forget_deletions(job.parts[-1].round)
        job.save(f"c-{number}", f"c-{base}" if base else "")
        if number != 3:
            assert reader.refresh()
            assert same(reader, job)
            assert same(de.Reader(str(tmp_path / f"c-{number}")), job)
            views.append(len(reader.view(NAME).layers))
        assert not reader.refresh() or number == 3
    assert views == ([2, 4, 1, 1, 2] if count == 1 else [2, 4, 1, 2, 3])  # a delta is whole if all of its parts are
    assert len(table) == job.state().keys.size
    assert (reader.tables, [*reader], len(reader)) == ((NAME,), [NAME], 1)
    assert (reader.path, table.spec, table.round) == (str(tmp_path / "c-7"), SPEC, 17)
    refused(KeyError, "no table 'other'; it has users", lambda: reader["other"])
    compact(job.opened("c-7"))
    assert not reader.refresh()
    assert same(de.Reader(str(tmp_path / "c-7")), job)
    (tmp_path / "latest").write_text(latest_text("c-2"))
    assert reader.refresh()
    assert reader.path == str(tmp_path / "c-2")


def test_what_it_has_mapped_stays(tmp_path):
    """Also when its files are deleted, or replaced."""
    job, rng = Servers.made(tmp_path, SPEC), np.random.default_rng(0)
    job.train(rng)
    job.save("c-1")
    job.train(rng)
    job.save("c-2", "c-1")
    reader = de.Reader(str(tmp_path))
    shutil.rmtree(tmp_path / "c-1")
    assert same(reader, job)
    refused(ps.errors.DamagedCheckpoint, "c-1", lambda: reader.refresh())
    assert same(reader, job)


def test_lookups_go_on_while_it_takes_a_delta(tmp_path):
    """Each sees one checkpoint, whole: all rows have the number of the same save."""
    job = Servers.made(tmp_path, TableSpec((), "int64", initializer=Zeros()), 2, ())
    keys = np.arange(2000)
    job.step(keys, 1)
    job.save("c-1")
    reader = de.Reader(str(tmp_path))
    table, ended, seen = reader[NAME], threading.Event(), set()

    def look() -> None:
        while not ended.is_set():
            seen.add(tuple(np.unique(table.lookup(keys)).tolist()))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(2, 8):
        job.step(keys, 1)
        job.save(f"c-{number}", f"c-{number - 1}")
        reader.refresh()
    ended.set()
    thread.join()
    assert seen <= {(number,) for number in range(1, 8)}
    assert len(seen) > 1


def test_hashes_that_are_not_spread_evenly(tmp_path):
    """Keys that somebody has chosen are found as well; those beside them are not there."""
    close = (np.uint64(5) << np.uint64(54)) + np.arange(1, 4000, 2, dtype=np.uint64)
    job = Servers.made(tmp_path, TableSpec((2,)))
    job.step(keys_of(close, combined(0), "int64"))
    job.step(np.arange(100))
    job.save("c-1")
    reader = de.Reader(str(tmp_path))
    assert same(reader, job)
    beside = keys_of(close - np.uint64(1), combined(0), "int64")
    assert not reader[NAME].contains(beside).any()


def test_keys_of_all_kinds(tmp_path):
    """Integers of any width and shape; the same bits are the same key; what is no integer is refused."""
    for key_dtype in ("int64", "uint64"):
        job = Servers.made(tmp_path / key_dtype, TableSpec((2,), key_dtype=key_dtype))
        job.step(np.array([-1, 3, 1 << 62]))
        job.save("c-1")
        table = de.Reader(str(tmp_path / key_dtype))[NAME]
        rows = table.lookup(np.array([-1, 3]))
        assert table.lookup(np.array([(1 << 64) - 1, 3], "uint64")).tolist() == rows.tolist()
        assert table.lookup(np.array([[-1], [3]], "int8")).tolist() == rows[:, None].tolist()
        assert table.lookup(3).tolist() == rows[1].tolist()
        assert table.lookup([]).shape == (0, 2)
        assert table.contains([3, 4]).tolist() == [True, False]
    refused(TypeError, "integers, not float64", lambda: table.lookup(0.5))


def test_zeros_for_what_is_refused(tmp_path):
    """As a lookup on servers gives, where the table says so; other tables give the first value. A checkpoint may have
    no tables."""
    write_checkpoint(tmp_path / "plain", {"w": np.zeros(2)})
    reader = de.Reader(str(tmp_path / "plain"))
    assert (reader.tables, reader.refresh(), "no tables" in repr(reader)) == ((), False, True)
    for instead in ("zeros", "initial"):
        spec = TableSpec((2,), admission=CounterFilter(3), refused=instead, initializer=Normal())
        job = Servers.made(tmp_path / instead, spec)
        job.step(np.array([5]))
        job.save("c-1")
        found = de.Reader(str(tmp_path / instead))[NAME].lookup([5])
        assert found.tolist() == job.parts[0].lookup(np.array([5])).tolist()
        assert (found == 0).all() == (instead == "zeros")


# ---- Keys of texts ----

# XXH64 of "" and "abc" without a seed, as published with xxHash; "Nobody inspects the spammish repetition" is pyhash's.
VECTORS = {
    "": 0xEF46DB3751D8E999,
    "abc": 0x44BC2CF5AD770999,
    "Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


@pytest.mark.parametrize(
    "made", [list, np.array, lambda keys: np.array(keys, object), lambda keys: np.array(keys, "S")]
)
def test_keys_of_texts_are_their_xxh64(made):
    """Of texts in UTF-8 and of bytes, in lists and arrays of any shape."""
    found = de.hash_keys(made(list(VECTORS)))
    assert found.dtype == np.int64
    assert found.view(np.uint64).tolist() == list(VECTORS.values())
    assert de.hash_keys([["ü"], [b"\xc3\xbc"]]).tolist() == [[de.hash_keys("ü")]] * 2
    assert de.hash_keys(made([])).shape == (0,)


def test_keys_of_texts_have_as_many_bits_as_asked_for():
    """48 of them are the low ones, from 0 on, as tables of a group take them. Another seed is another hash."""
    keys = [f"user-{n}" for n in range(2000)]
    whole = de.hash_keys(keys)
    assert len(set(whole.tolist())) == 2000
    assert (whole < 0).any()
    assert np.array_equal(de.hash_keys(keys, bits=48), whole % 2**48)
    assert not (de.hash_keys(keys, seed=2**64 - 1) == whole).any()


@pytest.mark.parametrize(("n", "bits"), [(1000, 20), (3000, 24)])
def test_so_many_texts_collide_as_the_documents_say(n, bits):
    """n * n / 2**(bits + 1) pairs, within four standard deviations of that."""
    expected = n * n / 2 ** (bits + 1)
    found = [
        n - len(set(de.hash_keys([f"{k}" for k in range(n)], bits=bits, seed=seed).tolist())) for seed in range(40)
    ]
    assert abs(np.mean(found) - expected) < 4 * (expected / 40) ** 0.5 + 0.02


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: de.hash_keys(["a", 3]), "key 3 at position 1 is a int"),
        (lambda: de.hash_keys(np.array(["a", None])), "key None at position 1 is a NoneType"),
        (lambda: de.hash_keys(np.array([1.0])), "texts or bytes, not float64; use integers as they are"),
        (lambda: de.hash_keys("a", bits=65), "bits is 65; use 1 to 64"),
        (lambda: de.hash_keys("a", seed=-1), "seed is -1; use a number from 0"),
    ],
)
def test_what_is_no_text_has_no_key(call, says):
    refused((TypeError, ValueError), says, call)
