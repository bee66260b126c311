"""Which arrays of batches are ids, as lookups show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from psclient._src.data.learned import LearnedLookups, prefetch_ahead
from pswire.model.tensor import Array


class Table:
    """Refuses ids below 0; remembers what it was asked to prefetch."""

    def __init__(self, takes_hints: bool = False) -> None:
        self.asked: list[list[int]] = []
        self.hinted: list[list[int]] = []
        self._takes_hints = takes_hints

    def prefetch(self, *ids: Array) -> None:
        if min(map(np.min, ids)) < 0:
            raise ValueError("no row")
        self.asked.append(np.concatenate(ids).tolist())

    def prefetch_hint(self, *ids: Array) -> None:
        self.hinted.append(np.concatenate(ids).tolist())

    def _join(self, arrays: Sequence[tuple[int, Array]]) -> Array:
        return np.concatenate([ids.ravel() for _, ids in arrays])


def batch(number: int) -> dict[str, Array]:
    """Of four examples: ids in an array of their own, in columns, and among floats; the last key of the first batch has
    the same ones as `user`."""
    ids = np.random.default_rng(number).integers(0, 1000, (4, 7))
    return {
        "floats": ids[:, 5:] * 1.0,
        "items": ids[:, 1:5],
        "text": np.array(["a"] * 4),
        "user": ids[:, 0],
        "viewer": ids[:, 0] if number == 0 else ids[:, 0] + 1,
    }


def learn(
    count: int,
    looked_up: Callable[[dict[str, Array], int], Sequence[Array]],
    ahead: Any = batch,
    takes_hints: bool = False,
    waits: bool = False,
) -> Table:
    """Looks some arrays of each batch up; two batches ahead are known. A step may wait for its round."""
    table, lookups = Table(takes_hints), LearnedLookups()
    for number in range(count):
        lookups.begin_batch([batch(number)])
        meanwhile = prefetch_ahead(lookups.wanted, iter([[ahead(number + 1)], [ahead(number + 2)]]))
        if waits and meanwhile:
            meanwhile()
        for ids in looked_up(batch(number), number):
            lookups.looked_up(table, lambda ids=ids: [ids])
    return table


PLACES = {
    "array": lambda batch: batch["user"],
    "other shape": lambda batch: batch["user"].reshape(2, 2),
    "other dtype": lambda batch: batch["user"].astype(np.uint32),
    "columns": lambda batch: batch["items"][:, 1:3],
    "column of floats": lambda batch: batch["floats"][:, 1].astype(np.int64),
}


@pytest.mark.parametrize("place", PLACES)
def test_ids_are_found_in_a_batch(place):
    """From the second batch on those of the next one are prefetched, each as it is looked up."""
    of = PLACES[place]
    table = learn(6, lambda batch, _: [of(batch)])
    right = [of(batch(number)).ravel().tolist() for number in range(2, 7)]
    assert [asked[: len(expected)] for asked, expected in zip(table.asked, right, strict=True)] == right
    assert table.asked[1:] == right[1:], "what had the same ids only in the first batch is forgotten"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("takes_hints", [False, True])
def test_the_batch_behind_is_named(takes_hints, waits):
    """Before the round for a table in files; of others the ids are grouped while a round is waited for, if one is."""
    table = learn(4, lambda batch, _: [batch["user"]], takes_hints=takes_hints, waits=waits)
    right = [batch(number)["user"].tolist() for number in range(2, 6)]
    assert (table.asked[1:], table.hinted[1:]) == (right[1:3], right[2:4] if takes_hints or waits else [])


def test_what_is_in_no_batch_is_not_prefetched():
    assert learn(6, lambda batch, _: [batch["user"] * 7 % 31]).asked == []


def test_two_lookups_of_a_table_are_prefetched_together():
    table = learn(4, lambda batch, _: [batch["items"], batch["viewer"]])
    assert table.asked[-1] == [*batch(4)["items"].ravel(), *batch(4)["viewer"]]


@pytest.mark.parametrize("used", [[True] * 4 + [False] * 4, [False, True, True, True, True, False, False, False]])
def test_what_is_not_looked_up_any_more_is_not_prefetched(used):
    """And a table that is first used in a later batch is."""
    table = learn(8, lambda batch, number: [batch["user"]] if used[number] else [])
    assert len(table.asked) == sum(used)


def test_a_batch_without_examples_teaches_nothing():
    table = learn(5, lambda batch, number: [batch["user"][: 0 if number == 2 else 4]])
    assert table.asked[-1] == batch(5)["user"].tolist()


def test_bad_ids_of_the_next_batch_are_reported_by_their_lookup():
    """Not one batch before."""
    table = learn(
        5, lambda batch, _: [batch["user"]], lambda n: {**batch(n), "user": batch(n)["user"] - 2000 * (n == 3)}
    )
    assert table.asked[-1] == batch(5)["user"].tolist()
    assert batch(3)["user"].tolist() not in table.asked


def test_nothing_is_read_ahead_for_a_step_without_lookups():
    lookups = LearnedLookups()
    lookups.begin_batch([batch(0)])
    prefetch_ahead(lookups.wanted, (pytest.fail("a batch was read") for _ in range(1)))
