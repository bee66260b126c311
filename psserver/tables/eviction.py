"""The choice of entries that leave a table at the end of a round.

Slots, sizes of buckets and memory depend on a table's past, and a restore changes them. Hashes do not. So the hand
moves over hashes, each bucket has its own, and what it passes is an interval of them. A sample is what follows a hash
that is drawn of round, bucket and number. Each bucket is judged by itself: on how many servers a table lies makes no
difference. docs/decisions/0024-tables.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from psserver.tables.index import Index
from psserver.tables.policies import Judge
from psserver.tables.rows import RowTensors
from psserver.tiers.mapped import Use
from pswire.model.hashing import BUCKET_BITS, BUCKETS, LOW_BITS, Hashes, buckets_of, combined, mixed
from pswire.model.rows import Int64s
from pswire.model.tensor import Array

TURN = 64
"""Rounds in which each bucket has its turn, about. Rounds of a table need not follow one another."""

FEWEST = 16
"""Rows that a bucket's hand passes in its turn, at least."""

MOST = 1 << 12
"""Rows that it passes in its turn, at most: the hands of all buckets pass 65,536 in a round, whatever the backlog."""

LAP, LAP_OF_VALUES = 64, 256
"""Turns in which a hand goes round, at most, but for `MOST`; the second where values of rows are read for it."""

SHARE = 2
"""While it finds what is condemned it passes one of so many of its bucket's rows in a turn, but for `MOST`."""

WORTH = 16
"""A hand goes on in its turn if one of so many rows that it has just passed was condemned."""

FURTHER = 4
"""Then it passes so many times as many."""

PER_CREATED = 2
"""Rows that a hand passes for each row that was created in its bucket."""

AT_ONCE = 64
"""Most samples of one bucket at once, so that a table that has far too much takes little memory to shrink."""

SAMPLED = 8
"""Rows among which the worst is evicted."""

_SPAN = 1 << LOW_BITS


class Hands:
    """The hands of a table's buckets: they go round, and what a policy condemns where they pass is to be evicted.

    Args:
        buckets: the buckets that the table holds.

    Attributes:
        buckets: the argument.
        at: uint64[buckets], the low bits of the hash at which each hand stands.
    """

    def __init__(self, buckets: range) -> None:
        self.buckets = buckets
        self.at: Hashes = np.zeros(len(buckets), np.uint64)

    def due(self, round: int, created: Int64s, used: Int64s, laps: int) -> tuple[Int64s, Int64s]:
        """Returns how many rows each hand passes in a round, and how many at most while it finds what is condemned.

        Args:
            round: the round.
            created: int64[BUCKETS], rows that it has created.
            used: int64[BUCKETS], entries.
            laps: turns in which a hand goes round, at most.
        """
        numbers = np.arange(self.buckets.start, self.buckets.stop)
        turn = numbers % TURN == combined(round) % TURN
        used = used[numbers]
        first = np.minimum(PER_CREATED * created[numbers] + turn * np.clip(used // laps, FEWEST, MOST), used)
        return first, turn * np.clip(used // SHARE, FEWEST, MOST)

    def move(self, passed: Int64s, used: Int64s) -> tuple[Hashes, Hashes]:
        """Moves the hands.

        Args:
            passed: int64[buckets], how many rows each of them passes, about; at most those that are used.
            used: int64[BUCKETS], entries.

        Returns:
            The first and the last hash of each interval that was passed, in order of the buckets.
        """
        numbers = np.arange(self.buckets.start, self.buckets.stop)
        used = used[numbers]
        moving = np.flatnonzero(passed)
        widths = np.where(passed == used, _SPAN, _SPAN // np.maximum(used, 1) * passed)[moving].astype(np.uint64)
        at, span = self.at[moving], np.uint64(_SPAN)
        ends = at + widths
        wrapped = ends > span
        self.at[moving] = ends & np.uint64(_SPAN - 1)
        first = numbers[moving].astype(np.uint64) << np.uint64(LOW_BITS)
        again = first[wrapped]
        lows = np.concatenate([first + at, again])
        highs = np.concatenate(
            [first + (np.minimum(ends, span) - np.uint64(1)), again + (ends[wrapped] - span) - np.uint64(1)]
        )
        order = np.argsort(lows, kind="stable")
        return lows[order], highs[order]


def condemned(
    index: Index,
    rows: RowTensors,
    judge: Judge,
    round: int,
    hands: Hands,
    created: Int64s,
    settle: Callable[[Int64s], object],
) -> tuple[Hashes, Int64s]:
    """Moves the hands; returns hashes and entries of what a policy condemns there, none that the round has touched.

    A hand that finds something goes on, until it finds little, or has passed the most of one turn: so a backlog leaves
    in as many rounds whatever its size, and a round costs little where there is none. That is how Redis looks for
    expired keys (`activeExpireCycle`), but for its bound: rows here, and time there, which differs between the servers
    that hold copies of a table, and from run to run.

    Args:
        index, rows, judge: of the table.
        round: the round.
        hands: these are moved.
        created: int64[BUCKETS], rows that the round has created.
        settle: called with the slots of rows whose values decide.
    """
    used, held = index.used.copy(), slice(hands.buckets.start, hands.buckets.stop)
    passed, left = hands.due(round, created, used, LAP_OF_VALUES if judge.looks_at_values else LAP)
    rest = used[held] - passed
    found: list[tuple[Hashes, Int64s]] = []
    while passed.any():
        hashes, entries = index.scan(*hands.move(passed, used))
        seen = in_buckets(hashes)[held]
        hashes, entries = _condemned_among(hashes, entries, rows, judge, round, settle)
        found.append((hashes, entries))
        left = np.maximum(left - seen, 0)
        # Rows lie closer before a hand than behind it: what it has just seen says how close.
        further = np.minimum(passed * FURTHER, left * passed // np.maximum(seen, 1))
        goes_on = in_buckets(hashes)[held] * WORTH >= seen
        passed = np.where(goes_on, np.minimum(further, rest), 0)
        rest -= passed
    hashes = np.concatenate([np.empty(0, np.uint64), *(some for some, _ in found)])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], np.concatenate([np.empty(0, np.int64), *(some for _, some in found)])[order]


def _condemned_among(
    hashes: Hashes, entries: Int64s, rows: RowTensors, judge: Judge, round: int, settle: Callable[[Int64s], object]
) -> tuple[Hashes, Int64s]:
    is_old = entries > 0
    is_old[is_old] = rows.last[entries[is_old] - 1] != round
    hashes, entries = hashes[is_old], entries[is_old]
    if judge.looks_at_values:
        rows.touch(entries - 1, Use.PASS)
        settle(entries - 1)
    must_go = judge.condemned(round, entries - 1, rows)
    return hashes[must_go], entries[must_go]


def above(
    index: Index, rows: RowTensors, round: int, sign: int, excess: Int64s, scores: Callable[[Int64s], Array], salt: int
) -> tuple[Hashes, Int64s]:
    """Returns one sample of entries to evict, each the worst of some that follow one another.

    There may be fewer than are too many, as two samples may find the same one. Then the rest is chosen by another call,
    with another salt, after these have left.

    Args:
        index, rows: of the table.
        round: the round; rows that it has touched are passed over.
        sign: 1 for rows, -1 for keys that are counted.
        excess: int64[BUCKETS], how many are too many in each bucket.
        scores: returns a score for each of some entries; the lowest is the worst.
        salt: a number that makes the samples differ.

    Returns:
        Hashes and entries, each once; fewer than one for a bucket only if all of it was passed over.
    """
    counts = np.clip(excess, 0, AT_ONCE)
    owners = np.repeat(np.arange(BUCKETS), counts)
    numbers = np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts)
    drawn = mixed(((owners << 32) | numbers).astype(np.uint64) ^ np.uint64(combined(round, sign, salt)))
    starts = (owners.astype(np.uint64) << np.uint64(LOW_BITS)) | (drawn >> np.uint64(BUCKET_BITS))
    hashes, entries = index.follow(starts, SAMPLED, sign, round, rows.last)
    found = np.flatnonzero(entries[:, 0])
    hashes, entries = hashes[found], entries[found]
    values = np.where(entries != 0, scores(np.where(entries != 0, entries, entries[:, :1])), np.inf)
    worst = np.argmin(values, axis=1)[:, None]
    victims, at = np.unique(np.take_along_axis(hashes, worst, 1)[:, 0], return_index=True)
    return victims, np.take_along_axis(entries, worst, 1)[at, 0]


def in_buckets(hashes: Hashes) -> Int64s:
    """Returns the number of hashes in each bucket, int64[BUCKETS]."""
    return np.bincount(buckets_of(hashes), minlength=BUCKETS)
