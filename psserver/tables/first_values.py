"""First values of rows, as a function for Numba: bit by bit those of `pswire.model.first_values`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from psserver.programs.kernels.compiler import Tools
from pswire.model.first_values import BASE, CUT, LEAST, REST, TRUNCATED, UNIFORM, UNIT, quantiles
from pswire.model.hashing import GOLDEN, mixing


def filling(tools: Tools) -> Callable[..., None]:
    """Returns `fill(n, width, kind, seed, words, numbers, quantiles, room, rows)` for Numba.

    It computes the same as `pswire.model.first_values.computed`.
    """
    carray, mix, bits = tools.carray, mixing(tools), tools.bits
    golden, eleven, knot_count = np.uint64(GOLDEN), np.uint64(11), len(quantiles())
    mask, fine = (1 << REST) - 1, 2.0**-REST
    unit, cut, least, rest, base = UNIT, CUT, LEAST, REST, BASE
    uniform, truncated = UNIFORM, TRUNCATED

    def fill(
        n: Any, width: Any, kind: Any, seed: Any, p_words: Any, p_numbers: Any, p_knots: Any, p_room: Any, p_rows: Any
    ) -> None:
        words, numbers = carray(p_words, n), carray(p_numbers, 2)
        knots, rows = carray(p_knots, knot_count), carray(p_rows, n * width)
        room = carray(p_room, width)
        salt, one, other = np.uint64(seed), numbers[0], numbers[1]
        shift, scale = (cut, 1.0 - 2.0 * cut) if kind == truncated else (0.0, 1.0)
        for i in range(n):
            start = mix(words[i] ^ salt)
            row = rows[i * width : (i + 1) * width]
            if kind == uniform:
                for c in range(width):
                    drawn = np.int64(mix(start + np.uint64(c + 1) * golden) >> eleven)
                    row[c] = one + other * (np.float64(drawn) * unit)
                continue
            for c in range(width):  # two loops: several elements at once in this one
                drawn = np.int64(mix(start + np.uint64(c + 1) * golden) >> eleven)
                room[c] = shift + scale * ((np.float64(drawn) + 0.5) * unit)
            for c in range(width):
                p = room[c]
                word = bits(max(0.5 - abs(p - 0.5), least))
                at = np.uint64((word >> rest) - base)
                low, high = knots[at], knots[at + np.uint64(1)]
                found = low + (high - low) * (np.float64(word & mask) * fine)
                row[c] = one + other * (-found if p > 0.5 else found)

    return fill
