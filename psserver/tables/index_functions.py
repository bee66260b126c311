"""The functions of an index for Numba. Each is described with the class that calls it, `cells.CellIndex`.

A bucket is a block of cells of two words: a hash, and an entry, which is 0 in an empty cell. The block's occupied cells
are in increasing order of their hashes, none before its home, and with nothing empty between its home and itself. The
last `END` cells are never occupied. All buckets without entries share one block of so many cells, which is never
written.

Blocks lie anywhere. A function takes null pointers for all memory, and unsigned places of words: an address divided
by 8. Numba counts signed ones from an array's end if they are negative, and tests each for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psserver.programs.kernels.compiler import Tools
from pswire.model.hashing import BUCKETS, GOLDEN, LOW_BITS, mixing

PLACES = 3
"""Words for each bucket in the table of places: its block's place, its homes, its cells."""

AHEAD = 24
"""Keys between a prefetch and its use."""

FRACTION_BITS = 32
"""Bits of a hash, after those of its bucket, that say where in its bucket it is at home."""

SHIFT = LOW_BITS - FRACTION_BITS
EVERYWHERE = 1 << 60
"""Words of an array that stands for all memory."""

LOAD = 4, 5
"""The largest part of a bucket's homes that are occupied, 4 of 5."""

FIRST_HOMES, GROWTH = 16, 1.25
"""Homes of the smallest bucket, and how many times as many a bucket has with each step of its growth. The first sizes
of the buckets are spread evenly over one step, so that they do not grow together."""

END = 4
"""Cells at the end of a block that are never occupied, so that a search may look at as many at once."""

SPARE = 16 + END
"""Cells of a block behind its homes, for entries that are displaced beyond the last home. Of a thousand buckets that
are as full as they may be one has more of these, and gets a longer block."""

STATE = 3
"""Words of what is known of an index as a whole."""


def homing(tools: Tools) -> Any:
    """Returns the function that computes the place of a hash's home."""
    low, shift, three = np.uint64(LOW_BITS), np.uint64(SHIFT), np.uint64(PLACES)
    fraction, bits = np.uint64((1 << FRACTION_BITS) - 1), np.uint64(FRACTION_BITS)
    one, two = np.uint64(1), np.uint64(2)

    def home(h: Any, places: Any) -> Any:
        at = (h >> low) * three
        return places[at] + two * ((((h >> shift) & fraction) * places[at + one]) >> bits)

    return tools.njit(home)


def seeking(tools: Tools) -> Any:
    """Returns the function that computes the place of the first cell from a home on that has a hash or a greater one.

    It counts how many of the next cells have less, all at once: a loop would end in another way for each hash, and the
    processor cannot guess how.
    """
    home = homing(tools)
    two, four, six, eight = np.uint64(2), np.uint64(4), np.uint64(6), np.uint64(2 * END)

    def seek(h: Any, places: Any, words: Any) -> Any:
        at = home(h, places)
        while words[at + six] < h:
            at += eight
        return at + two * (np.uint64(words[at] < h) + np.uint64(words[at + two] < h) + np.uint64(words[at + four] < h))

    return tools.njit(seek)


def finding(tools: Tools) -> Callable[..., None]:
    """Returns `find(n, salt, has_keys, keys, hashes, places, words, entries, found)`."""
    carray, fetch, mix, home, seek = tools.carray, tools.fetch, mixing(tools), homing(tools), seeking(tools)
    one, none = np.uint64(1), np.int64(0)

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
            at = seek(h, places, words)
            found[i] = entries[at + one] if words[at] == h else none

    return find


def growing(tools: Tools) -> Any:
    """Returns the function that moves a bucket into a block with homes for a number of entries, or into a longer one.

    It returns False if there is no memory for that; then nothing has changed.
    """
    malloc, free, fill = tools.malloc, tools.free, filling(tools)
    one, two, three, eight, sixteen, spare, shared = (np.uint64(n) for n in (1, 2, PLACES, 8, 16, SPARE, END))
    part, whole = np.uint64(LOAD[0]), np.uint64(LOAD[1])
    golden, eleven, unit, spread = np.uint64(GOLDEN), np.uint64(11), 2.0**-53, GROWTH - 1.0

    def grow(bucket: Any, count: Any, places: Any, words: Any, entries: Any, state: Any) -> Any:
        at = three * bucket
        old, old_homes, old_cells = places[at], places[at + one], places[at + two]
        wide = FIRST_HOMES * (1.0 + spread * (np.float64((bucket * golden) >> eleven) * unit))
        homes = np.uint64(wide)
        while homes < old_homes or whole * count > part * homes:
            wide *= GROWTH
            homes = np.uint64(wide)
        cells = homes + spare
        if homes == old_homes:  # it is full only behind the last home
            cells = old_cells + (old_cells >> one) + one
        while True:
            block = malloc(sixteen * cells)
            if block == np.uint64(0):
                return False
            if fill(block // eight, homes, cells, old, old_cells, words, entries):
                break
            free(block)
            cells += (cells >> one) + one
        places[at], places[at + one], places[at + two] = block // eight, homes, cells
        state[1] += sixteen * cells
        if old_cells > shared:
            free(old * eight)
            state[1] -= sixteen * old_cells
        return True

    return tools.njit(grow)


def filling(tools: Tools) -> Any:
    """Returns the function that copies a bucket's entries into a new block; False if that is too short."""
    one, two, shift, spare = np.uint64(1), np.uint64(2), np.uint64(SHIFT), np.uint64(END)
    fraction, bits = np.uint64((1 << FRACTION_BITS) - 1), np.uint64(FRACTION_BITS)
    empty = np.uint64((1 << 64) - 1)

    def fill(base: Any, homes: Any, cells: Any, old: Any, old_cells: Any, words: Any, entries: Any) -> Any:
        old_end, end, free = old + two * old_cells, base + two * cells, base
        while old < old_end:
            h, entry = words[old], entries[old + one]
            old += two
            if entry == 0:
                continue
            at = max(base + two * ((((h >> shift) & fraction) * homes) >> bits), free)
            if at >= end - two * spare:
                return False
            while free < at:
                words[free], entries[free + one] = empty, 0
                free += two
            words[at], entries[at + one] = h, entry
            free = at + two
        while free < end:
            words[free], entries[free + one] = empty, 0
            free += two
        return True

    return tools.njit(fill)


def putting(tools: Tools) -> Callable[..., None]:
    """Returns `put(n, hashes, values, places, used, words, entries, state)`.

    `state` has the number of the hashes that are put, fewer only if there is no memory, then the bytes of all blocks,
    and the number of times that a bucket grew.
    """
    carray, fetch, home, seek, grow = tools.carray, tools.fetch, homing(tools), seeking(tools), growing(tools)
    one, two, three, low = np.uint64(1), np.uint64(2), np.uint64(PLACES), np.uint64(LOW_BITS)
    part, whole, spare = np.uint64(LOAD[0]), np.uint64(LOAD[1]), np.uint64(END)

    def put(
        n: Any, p_hashes: Any, p_values: Any, p_places: Any, p_used: Any, p_words: Any, p_entries: Any, p_state: Any
    ) -> None:
        hashes, values, state = carray(p_hashes, n), carray(p_values, n), carray(p_state, STATE)
        places, used = carray(p_places, PLACES * BUCKETS), carray(p_used, BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        for i in range(n):
            if i + AHEAD < n:
                fetch(words, home(hashes[i + AHEAD], places))
            h = hashes[i]
            bucket = h >> low
            while True:
                at = seek(h, places, words)
                if words[at] == h and entries[at + one] != 0:
                    entries[at + one] = values[i]
                    break
                last = places[three * bucket] + two * (places[three * bucket + two] - spare)
                end = at
                while entries[end + one] != 0:
                    end += two
                if end < last and whole * (used[bucket] + one) <= part * places[three * bucket + one]:
                    while end > at:
                        words[end], entries[end + one] = words[end - two], entries[end - one]
                        end -= two
                    words[at], entries[at + one] = h, values[i]
                    used[bucket] += one
                    break
                if not grow(bucket, used[bucket] + one, places, words, entries, state):
                    state[0] = i
                    return
                state[2] += one
        state[0] = n

    return put


def reserving(tools: Tools) -> Callable[..., None]:
    """Returns `reserve(n, counts, places, words, entries, state)`: `state[0]` is less than n without memory."""
    carray, grow = tools.carray, growing(tools)
    one, three = np.uint64(1), np.uint64(PLACES)
    part, whole = np.uint64(LOAD[0]), np.uint64(LOAD[1])

    def reserve(n: Any, p_counts: Any, p_places: Any, p_words: Any, p_entries: Any, p_state: Any) -> None:
        counts, places, state = carray(p_counts, n), carray(p_places, PLACES * BUCKETS), carray(p_state, STATE)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        for i in range(n):
            bucket = np.uint64(i)
            if whole * counts[i] > part * places[three * bucket + one] and not grow(
                bucket, counts[i], places, words, entries, state
            ):
                state[0] = i
                return
        state[0] = n

    return reserve


def releasing(tools: Tools) -> Callable[..., None]:
    """Returns `release(n, places)`, which frees all blocks; the index is of no use then."""
    carray, free = tools.carray, tools.free
    two, three, eight, shared = np.uint64(2), np.uint64(PLACES), np.uint64(8), np.uint64(END)

    def release(n: Any, p_places: Any) -> None:
        places = carray(p_places, PLACES * n)
        for i in range(n):
            at = three * np.uint64(i)
            if places[at + two] > shared:
                free(places[at] * eight)

    return release


def removing(tools: Tools) -> Callable[..., None]:
    """Returns `remove(n, hashes, places, used, words, entries)`."""
    carray, home, seek = tools.carray, homing(tools), seeking(tools)
    one, two, low, empty = np.uint64(1), np.uint64(2), np.uint64(LOW_BITS), np.uint64((1 << 64) - 1)

    def remove(n: Any, p_hashes: Any, p_places: Any, p_used: Any, p_words: Any, p_entries: Any) -> None:
        hashes, places, used = carray(p_hashes, n), carray(p_places, PLACES * BUCKETS), carray(p_used, BUCKETS)
        words, entries = carray(p_words, EVERYWHERE), carray(p_entries, EVERYWHERE)
        for i in range(n):
            h = hashes[i]
            at = seek(h, places, words)
            if words[at] != h or entries[at + one] == 0:
                continue
            after = at + two
            while entries[after + one] != 0 and home(words[after], places) < after:
                words[at], entries[at + one] = words[after], entries[after + one]
                at, after = after, after + two
            words[at], entries[at + one] = empty, 0
            used[h >> low] -= one

    return remove


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
