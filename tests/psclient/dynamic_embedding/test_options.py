"""Options of dynamic tables: what each word means, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pswire.model.tables import TimeToLive

de = ps.dynamic_embedding


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), (" 1.5 h ", 5400), ("2w", 1_209_600), (60, 60)],
)
def test_times_to_live(time, seconds):
    """With a unit, or in seconds."""
    assert de.TTL(time) == TimeToLive(seconds)


@pytest.mark.parametrize("time", ["", "7", "7 years", "-1d", -1, float("nan")])
def test_what_is_no_time(time):
    """Nothing is guessed."""
    with pytest.raises(ValueError):
        de.TTL(time)


@pytest.mark.parametrize("kind", ["dram_ssd", "ssd", "hbm"])
def test_rows_lie_in_memory(kind):
    """Other places are refused with a sentence."""
    assert de.StorageOption() == de.StorageOption("dram")
    with pytest.raises(ValueError, match="storage 'dram_ssd' does not exist yet"):
        de.StorageOption("dram_ssd", path="/nvme/t", dram="1GiB")
    with pytest.raises(ValueError, match="does not exist yet"):
        de.StorageOption(kind)


@pytest.mark.parametrize("options", [{"buckets": 512}, {"shards": 0}, {"shards": 2000}, {"shards": True}])
def test_partitioners_that_cannot_be(options):
    """Buckets are 1024 for good; parts have at least one each."""
    with pytest.raises(ValueError):
        de.HashPartitioner(**options)


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_tables_live_on_parameter_servers(strategy):
    """Other strategies refuse them with a sentence."""
    scope = ps.get_strategy() if strategy == "default" else ps.MirroredStrategy(["cpu:0"])
    with scope.scope(), pytest.raises(RuntimeError, match="ParameterServerStrategy"):
        de.get_variable("users", dim=8)


WRONG = {
    "capacity too small": ({"capacity": 1000}, ValueError, "table 'users': a capacity of 1000 rows"),
    "no limit for a policy": ({"eviction": de.LRU()}, ValueError, "table 'users': LRU evicts above a limit alone"),
    "no size": ({"memory_limit": "4 Gigs"}, ValueError, "memory_limit of table 'users'"),
    "no dimension": ({"dim": 0}, ValueError, "table 'users': a row of shape"),
    "keys of floats": ({"key_dtype": "float32"}, ValueError, "table 'users': keys are int64 or uint64"),
    "random integers": ({"value_dtype": "int32"}, ValueError, "table 'users': rows of int32"),
    "refused": ({"refused": "nothing"}, ValueError, "table 'users': refused"),
    "filter": ({"admission": de.CounterFilter(0)}, ValueError, "table 'users': k of a CounterFilter"),
    "no filter": ({"admission": 3}, ValueError, "table 'users': admission is one of"),
    "checkpoint": ({"checkpoint": False}, ValueError, "every table is in each checkpoint"),
    "storage": ({"storage": 3}, TypeError, "give StorageOption"),
    "storage that does not exist yet": ({"storage": "dram_ssd"}, ValueError, "storage 'dram_ssd' does not exist yet"),
    "compression of rows": ({"compression": "int8"}, ValueError, "table 'users': compression of rows does not exist"),
    "partitioner": ({"partitioner": len}, TypeError, "give HashPartitioner"),
    "initializer": ({"initializer": np.zeros}, TypeError, "give one of ps.initializers"),
    "a class": ({"initializer": ps.initializers.Zeros}, TypeError, "give one of ps.initializers"),
    "name": ({"name": 3}, TypeError, "name is 3"),
    "a name of nothing": ({"name": ""}, ValueError, "printable characters"),
    "hash_seed": ({"hash_seed": -1}, ValueError, "table 'users': hash_seed"),
    "shards": ({"shards": 0}, ValueError, "shards is 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_table_cannot_be(wrong):
    """Each is an error that names the table, before anything is created."""
    options, error, words = WRONG[wrong]
    with pytest.raises(error, match=words):
        de.get_variable(**{"name": "users", "dim": 8, **options})


@pytest.mark.parametrize(
    ("names", "options", "error"),
    [
        ("users", {}, TypeError),
        ([], {}, ValueError),
        (["a", "b", "a"], {}, ValueError),
        (["a"], {"key_dtype": "uint64"}, TypeError),
        (map(str, range(40_000)), {}, ValueError),
    ],
    ids=["a word", "none", "twice", "keys", "too many"],
)
def test_groups_that_cannot_be(names, options, error):
    """Each is an error that names the group."""
    with pytest.raises(error, match=r"names|group 'group'"):
        de.group(names, dim=8, **options)
