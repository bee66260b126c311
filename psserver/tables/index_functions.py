"""The functions of an index for Numba. Each is described with the class that calls it, `cells.CellIndex`.

A bucket is a block of cells of two words: a hash, and an entry, which is 0 in an empty cell. The block's occupied cells
are in increasing order of their hashes, none before its home, and with nothing empty between its home and itself. The
last cell is never occupied.

Blocks lie anywhere. A function takes null pointers for all memory, and unsigned places of words: an address divided
by 8. Numba counts signed ones from an array's end if they are negative, and tests each for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psserver.programs.kernels.compiler import Tools
from pswire.model.hashing import BUCKETS, LOW_BITS, mixing

PLACES = 3
"""Words for each bucket in the table of places: its block's place, its homes, its cells."""

AHEAD = 24
"""Keys between a prefetch and its use."""

FRACTION_BITS = 32
"""Bits of a hash, after those of its bucket, that say where in its bucket it is at home."""

SHIFT = LOW_BITS - FRACTION_BITS
EVERYWHERE = 1 << 60
"""Words of an array that stands for all memory."""

LOAD = 3, 5
"""The largest part of a bucket's homes that are occupied, 3 of 5."""


def homing(tools: Tools) -> Any:
    """Returns the function that computes the place of a hash's home."""
    low, shift, three = np.uint64(LOW_BITS), np.uint64(SHIFT), np.uint64(PLACES)
    fraction, bits = np.uint64((1 << FRACTION_BITS) - 1), np.uint64(FRACTION_BITS)
    one, two = np.uint64(1), np.uint64(2)

    def home(h: Any, places: Any) -> Any:
        at = (h >> low) * three
        return places[at] + two * ((((h >> shift) & fraction) * places[at + one]) >> bits)

    return tools.njit(home)


def finding(tools: Tools) -> Callable[..., None]:
    """Returns `find(n, salt, has_keys, keys, hashes, places, words, entries, found)`."""
    carray, fetch, mix, home = tools.carray, tools.fetch, mixing(tools), homing(tools)
    one, two, none = np.uint64(1), np.uint64(2), np.int64(0)

    def find(
        n: Any, salt: Any, has_keys: Any, p_keys: Any, p_hashes: Any, p_places: Any, p_words: Any, p_entries: Any,
        p_found: Any,
    ) -> None:  # fmt: skip
        keys, hashes, found = carray(p_keys, n), carray(p_hashes, n), carray(p_found, n)
        places = carray(p_places, PLACES * BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        if has_keys:
            salted = np.uint64(salt)
            for i in range(n):
                hashes[i] = mix(keys[i] ^ salted)
        for i in range(min(AHEAD, n)):
            fetch(words, home(hashes[i], places))
        for i in range(n):
            if i + AHEAD < n:
                fetch(words, home(hashes[i + AHEAD], places))
            h = hashes[i]
            at = home(h, places)
            while words[at] < h:
                at += two
            found[i] = entries[at + one] if words[at] == h else none

    return find


def putting(tools: Tools) -> Callable[..., None]:
    """Returns `put(n, first, hashes, values, places, used, words, entries, stopped)`."""
    carray, fetch, home = tools.carray, tools.fetch, homing(tools)
    one, two, three, low = np.uint64(1), np.uint64(2), np.uint64(PLACES), np.uint64(LOW_BITS)
    part, whole = np.uint64(LOAD[0]), np.uint64(LOAD[1])

    def put(
        n: Any, first: Any, p_hashes: Any, p_values: Any, p_places: Any, p_used: Any, p_words: Any, p_entries: Any,
        p_stopped: Any,
    ) -> None:  # fmt: skip
        hashes, values, stopped = carray(p_hashes, n), carray(p_values, n), carray(p_stopped, 1)
        places, used = carray(p_places, PLACES * BUCKETS), carray(p_used, BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        stopped[0] = n
        for i in range(first, n):
            if i + AHEAD < n:
                fetch(words, home(hashes[i + AHEAD], places))
            h = hashes[i]
            bucket = h >> low
            at = home(h, places)
            while words[at] < h:
                at += two
            if words[at] == h and entries[at + one] != 0:
                entries[at + one] = values[i]
                continue
            last = places[three * bucket] + two * places[three * bucket + two] - two
            end = at
            while entries[end + one] != 0:
                end += two
            if end >= last or whole * (used[bucket] + one) > part * places[three * bucket + one]:
                stopped[0] = i
                return
            while end > at:
                words[end], entries[end + one] = words[end - two], entries[end - one]
                end -= two
            words[at], entries[at + one] = h, values[i]
            used[bucket] += one

    return put


def removing(tools: Tools) -> Callable[..., None]:
    """Returns `remove(n, hashes, places, used, words, entries)`."""
    carray, home = tools.carray, homing(tools)
    one, two, low, empty = np.uint64(1), np.uint64(2), np.uint64(LOW_BITS), np.uint64((1 << 64) - 1)

    def remove(n: Any, p_hashes: Any, p_places: Any, p_used: Any, p_words: Any, p_entries: Any) -> None:
        hashes, places, used = carray(p_hashes, n), carray(p_places, PLACES * BUCKETS), carray(p_used, BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        for i in range(n):
            h = hashes[i]
            at = home(h, places)
            while words[at] < h:
                at += two
            if words[at] != h or entries[at + one] == 0:
                continue
            after = at + two
            while entries[after + one] != 0 and home(words[after], places) < after:
                words[at], entries[at + one] = words[after], entries[after + one]
                at, after = after, after + two
            words[at], entries[at + one] = empty, 0
            used[h >> low] -= one

    return remove


def rebuilding(tools: Tools) -> Callable[..., None]:
    """Returns `rebuild(n, jobs, words, entries, placed)`.

    A job is the place and the cells of an old block, and homes, cells and place of a new one.
    """
    carray = tools.carray
    one, two, shift = np.uint64(1), np.uint64(2), np.uint64(SHIFT)
    fraction, bits = np.uint64((1 << FRACTION_BITS) - 1), np.uint64(FRACTION_BITS)
    empty = np.uint64((1 << 64) - 1)

    def rebuild(n: Any, p_jobs: Any, p_words: Any, p_entries: Any, p_placed: Any) -> None:
        jobs, placed = carray(p_jobs, 5 * n), carray(p_placed, n)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        for i in range(n):
            old, homes, base = jobs[5 * i], jobs[5 * i + 2], jobs[5 * i + 4]
            old_end, end = old + two * jobs[5 * i + 1], base + two * jobs[5 * i + 3] - two
            free = base
            placed[i] = 1
            while old < old_end:
                h, entry = words[old], entries[old + one]
                old += two
                if entry == 0:
                    continue
                at = base + two * ((((h >> shift) & fraction) * homes) >> bits)
                if at < free:
                    at = free
                while free < at and free <= end:
                    words[free], entries[free + one] = empty, 0
                    free += two
                if at >= end:
                    placed[i] = 0
                    break
                words[at], entries[at + one] = h, entry
                free = at + two
            while free <= end:
                words[free], entries[free + one] = empty, 0
                free += two

    return rebuild


def scanning(tools: Tools) -> Callable[..., None]:
    """Returns `scan(n, room, lows, highs, places, words, entries, hashes, found, total)`."""
    carray, fetch, home = tools.carray, tools.fetch, homing(tools)
    one, two, three, low_bits = np.uint64(1), np.uint64(2), np.uint64(PLACES), np.uint64(LOW_BITS)

    def scan(
        n: Any, room: Any, p_lows: Any, p_highs: Any, p_places: Any, p_words: Any, p_entries: Any, p_hashes: Any,
        p_found: Any, p_total: Any,
    ) -> None:  # fmt: skip
        lows, highs, places = carray(p_lows, n), carray(p_highs, n), carray(p_places, PLACES * BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        hashes, found, total = carray(p_hashes, room), carray(p_found, room), carray(p_total, 1)
        count = 0
        for i in range(n):
            if i + AHEAD < n:
                fetch(words, home(lows[i + AHEAD], places))
            low, high = lows[i], highs[i]
            at, bucket = home(low, places), three * (low >> low_bits)
            end = places[bucket] + two * places[bucket + two]
            while at < end:
                entry = entries[at + one]
                if entry != 0:
                    h = words[at]
                    if h > high:
                        break
                    if h >= low:
                        if count < room:
                            hashes[count], found[count] = h, entry
                        count += 1
                at += two
        total[0] = count

    return scan


def following(tools: Tools) -> Callable[..., None]:
    """Returns `follow(n, width, sign, round, stride, starts, places, words, entries, last, hashes, found)`."""
    carray, fetch, home = tools.carray, tools.fetch, homing(tools)
    one, two, three, low_bits = np.uint64(1), np.uint64(2), np.uint64(PLACES), np.uint64(LOW_BITS)

    def follow(
        n: Any, width: Any, sign: Any, round: Any, stride: Any, p_starts: Any, p_places: Any, p_words: Any,
        p_entries: Any, p_last: Any, p_hashes: Any, p_found: Any,
    ) -> None:  # fmt: skip
        starts, places = carray(p_starts, n), carray(p_places, PLACES * BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        last = carray(p_last, EVERYWHERE)
        hashes, found = carray(p_hashes, n * width), carray(p_found, n * width)
        for i in range(n):
            if i + AHEAD < n:
                fetch(words, home(starts[i + AHEAD], places))
            start = starts[i]
            bucket = three * (start >> low_bits)
            base = places[bucket]
            end = base + two * places[bucket + two]
            count = 0
            for lap in range(2):
                at = base if lap else home(start, places)
                while at < end and count < width:
                    entry, h = entries[at + one], words[at]
                    at += two
                    if entry == 0 or (h >= start if lap else h < start):
                        if lap and entry != 0:
                            break
                        continue
                    if (sign > 0 and entry > 0 and last[np.uint64((entry - 1) * stride)] != round) or (
                        sign < 0 and entry < 0
                    ):
                        hashes[i * width + count], found[i * width + count] = h, entry
                        count += 1
            while count < width:
                found[i * width + count] = 0
                count += 1

    return follow
