"""Tables that are larger than the memory they may take.

With a hint a push says what the batch after the next one looks up, where rows lie in files, and nothing depends on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest

import psclient as ps
from psclient._src.rounds import read_cache
from pstesting.in_process import InProcessCluster
from tests.kit.internals import Contribution
from tests.kit.rig import eventually
from tests.kit.storage import disk

de = ps.dynamic_embedding
MEMORY = 8 << 20
COUNT, SIZE = 9, 6
KEYS = np.random.default_rng(3).integers(-(1 << 62), 1 << 62, (COUNT, SIZE))


@pytest.fixture
def directory():
    with disk() as found:
        yield found


class Pushes:
    """The pushes to a cluster's servers from now on that assign tables, by server."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.said: list[list[Contribution]] = [[] for _ in cluster.cores]
        for core, said in zip(cluster.cores, self.said, strict=True):
            core.stimuli.record = lambda stimulus, said=said: self._note(stimulus, said)

    def _note(self, stimulus, said: list[Contribution]) -> None:
        if stimulus.name == "push" and any(stimulus.args[0].rows):
            said.append(stimulus.args[0])

    def keys(self, what: str) -> list[list[int]]:
        """Of each round the keys that all servers were told, in order: as "lookups", or as "hints"."""
        rounds = zip(*self.said, strict=True)
        return [sorted(k for said in round for read in getattr(said, what) for k in numbers(read)) for round in rounds]


def numbers(read) -> list[int]:
    return [int(number) for number in read.numbers()]


@contextmanager
def opened(directory, servers=1, memory=MEMORY, **options):
    tier = {"tier_path": str(directory), "tier_memory": memory} if directory else {}
    with (
        InProcessCluster(servers, **tier) as cluster,
        ps.ParameterServerStrategy(devices=["cpu:0"], cluster_resolver=cluster.resolver(), **options) as strategy,
    ):
        yield cluster, strategy


@pytest.fixture
def world(directory):
    """A cluster, a strategy, an optimizer, its table, and the pushes from now on."""
    with opened(directory) as (cluster, strategy):
        optimizer = ps.optimizers.SGD(1.0)
        table = made(strategy, optimizer)
        yield cluster, strategy, optimizer, table, Pushes(cluster)


def made(strategy, optimizer, name="users"):
    with strategy.scope():
        table = de.get_variable(name, dim=2)
        optimizer.build([table])
    return table


def train(strategy, table, optimizer, data):
    def step(keys):
        rows = table.lookup(keys)
        optimizer.apply_gradients([(rows.gradient(np.ones_like(rows.values)), table)])

    for keys in data:
        strategy.run(step, (keys,))
    strategy.backend.settle()


WAYS = {
    "shared": ({}, {}),
    "one after the other": ({}, {"auto_shard_policy": ps.AutoShardPolicy.OFF}),
    "asynchronous": ({"consistency": ps.Async()}, {}),
    "by a function": ({}, {}),
}


@pytest.mark.parametrize(
    ("way", "servers"), [("shared", 2), ("one after the other", 1), ("asynchronous", 2), ("by a function", 1)]
)
def test_a_push_names_the_rows_of_two_batches_ahead(directory, way, servers):
    """Those of the next one to get them, those of the one behind it as a hint; each server is told of its own."""
    of_strategy, of_data = WAYS[way]
    with opened(directory, servers, **of_strategy) as (cluster, strategy):
        optimizer = ps.optimizers.SGD(1.0)
        table = made(strategy, optimizer)
        assert table._takes_hints
        pushes = Pushes(cluster)
        options = ps.InputOptions(prefetch={table: lambda keys: keys}, **of_data)
        if way == "by a function":
            data = strategy.distribute_datasets_from_function(lambda context: list(KEYS), options)
        else:
            data = strategy.experimental_distribute_dataset(list(KEYS), options)
        train(strategy, table, optimizer, data)
        expected = [*map(sorted, KEYS.tolist())]
        assert pushes.keys("lookups")[:-1] == expected[1:]
        assert pushes.keys("hints") == [*expected[2:], [], []]


def test_batches_that_are_handed_out_are_hinted_at_as_far_as_they_are_known(directory):
    """A worker has that many ahead that it is told of two in most steps, where steps take as long as an answer."""
    batches = np.arange(400).reshape(40, 10)
    with opened(directory, consistency=ps.Async()) as (cluster, strategy):
        optimizer = ps.optimizers.SGD(1.0)
        table = made(strategy, optimizer)
        pushes, asked, calls = Pushes(cluster), [], strategy.backend.group.chunk_calls
        ask = calls.ask
        calls.ask = lambda question: asked.append(ask(question)) or asked[-1]
        policy = ps.AutoShardPolicy.DYNAMIC
        options = ps.InputOptions(prefetch={table: lambda keys: keys}, auto_shard_policy=policy)
        data = strategy.experimental_distribute_dataset(list(batches), options)
        train(strategy, table, optimizer, ((keys, futures.wait(asked))[0] for keys in data))
        hints, expected = pushes.keys("hints"), [*batches[2:].tolist(), [], []]
        assert sum(map(bool, hints)) > 25
        assert all(found in ([], more) for found, more in zip(hints, expected, strict=True))


@pytest.mark.parametrize("tiered", [True, False])
def test_data_is_read_two_batches_ahead(directory, tiered):
    """Counted from the batch in use. A push has no hints for a table in memory."""
    with opened(directory if tiered else None) as (cluster, strategy):
        optimizer = ps.optimizers.SGD(1.0)
        table, read = made(strategy, optimizer), list[int]()

        def batches() -> Iterator[np.ndarray]:
            for number, keys in enumerate(KEYS):
                read.append(number)
                yield keys

        class Data:
            def __iter__(self) -> Iterator[np.ndarray]:
                return batches()

        pushes, ahead = Pushes(cluster), []
        options = ps.InputOptions(prefetch={table: lambda keys: keys})
        data = strategy.experimental_distribute_dataset(Data(), options)
        first = next(iter(data)), read.clear()
        assert len(first)
        train(strategy, table, optimizer, ((keys, ahead.append(len(read) - n))[0] for n, keys in enumerate(data, 1)))
        assert max(ahead) == 2
        assert any(pushes.keys("hints")) == tiered
        assert table._takes_hints == tiered


def test_a_hint_is_said_once(directory):
    """With the next round that assigns the table; a later one says what is named until then, or nothing.

    Each table of a group names its own keys, and keeps what the others have named.
    """
    with opened(directory) as (cluster, strategy):
        optimizer = ps.optimizers.SGD(1.0)
        table, other = made(strategy, optimizer), made(strategy, optimizer, "others")
        with strategy.scope():
            group = de.group(["user", "item"], dim=2)
        pushes = Pushes(cluster)
        table.prefetch_hint([5, 3, 5], [9])
        other.prefetch_hint([4])
        for _ in range(2):
            train(strategy, table, optimizer, [[1]])
        table.prefetch_hint([6])
        train(strategy, table, optimizer, [[1]])
        train(strategy, other, optimizer, [[1]])
        group.prefetch_hint({"item": [4, 9], "user": [4]})
        group["user"].prefetch_hint([5])
        group["user"].scatter_add(ps.IndexedSlices(np.ones((1, 2), "float32"), [1]))
        strategy.backend.settle()
        *said, of_group = pushes.keys("hints")
        assert said == [[3, 5, 9], [], [6], [4]]
        assert [(key >> 48, key & 0xFFFF) for key in of_group] == [(0, 5), (1, 4), (1, 9)]


def test_what_lookups_leave_of_a_header_is_for_hints(world, monkeypatch):
    """Hints that have no room there are left out, and the round goes on."""
    monkeypatch.setattr(read_cache, "ROWS_AT_A_TIME", 7)
    _, strategy, optimizer, table, pushes = world
    for lookups, hints in ((4, 3), (4, 4), (9, 7)):
        table.prefetch(range(lookups))
        table.prefetch_hint(range(10, 10 + hints))
        train(strategy, table, optimizer, [[1]])
    assert [len(keys) for keys in pushes.keys("lookups")] == [4, 4, 0]
    assert [len(keys) for keys in pushes.keys("hints")] == [3, 0, 7]


def test_bad_hints_are_refused_where_they_are_named(world):
    """As bad ids of lookups; those of a plain variable as well, which takes no hints."""
    _, strategy, _, table, _ = world
    with pytest.raises(TypeError, match="the row ids of table 'users' must be integers"):
        table.prefetch_hint([0.5])
    with strategy.scope():
        plain = ps.Variable(np.zeros((3, 2), "float32"), name="plain")
    assert not plain._takes_hints
    with pytest.raises(ValueError, match="id 7 at index 0 is not a row of 3"):
        plain.prefetch_hint([7])


def test_a_server_reads_what_it_is_told(directory):
    """Pages of a hint come while the worker computes: the round that needs them finds them, and they are counted. The
    server keeps its bound, and its files have no names."""
    many = 40_000  # rows of 256 bytes: ten times the memory
    with opened(directory, memory=1 << 20) as (cluster, strategy):
        optimizer = ps.optimizers.SGD(1.0)
        with strategy.scope():
            table = de.get_variable("users", dim=64)
            optimizer.build([table])
        for first in range(0, many, 4000):
            train(strategy, table, optimizer, [np.arange(first, first + 4000)])
        tier = cluster.cores[0].machine.job.store.native.tier
        tier.settle()
        rows = list(np.arange(0, many, 50).reshape(-1, 40))  # a page each
        table.prefetch(rows[0])
        before = None
        for now, after, behind in zip(rows, islice(rows, 1, None), islice(rows, 2, None), strict=False):
            table.prefetch(after)
            table.prefetch_hint(behind)
            before = before or tier.outcomes  # without what the first lookup waits for
            train(strategy, table, optimizer, [now])
            eventually(lambda: not tier._untaken)
        status = cluster.cores[0].status()
        assert status.tier_memory == 1 << 20 < status.tier_bytes
        eventually(lambda: cluster.cores[0].status().tier_resident_bytes <= 1 << 20)
        assert os.listdir(directory) == [], "its files have names"
        found = {name: count - before[name] for name, count in tier.outcomes.items()}
        assert found["hit"] > 500
        assert found["waited"] < found["hit"] // 5
