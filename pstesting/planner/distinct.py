"""The number of different keys that more examples will have, estimated from a sample of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MOST_SEEN = 32
"""Keys that came more often than that say nothing about those that did not come."""

STEPS = 33
"""Points of the grid on which each of the two parameters is searched."""

ZOOMS = 8

LIKELY = 1.92
"""Parameters are in the interval if their log-likelihood is at most that far below the best: 95 % of chi-square / 2."""

Floats = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """A number that was estimated.

    Attributes:
        value: the most likely one.
        low, high: the interval of 95 %, if the model holds.
    """

    value: float
    low: float
    high: float


def distinct_at(counts: Sequence[int] | Any, times: float) -> Estimate:
    """Returns how many different keys there are among so many times the keys of a sample.

    Each key comes independently, by a probability of its own. Few keys are frequent and many are rare: of those with a
    probability above p there are p**-a as many as above 1, down to the rarest. That is Zipf's law with exponent 1 / a,
    and for a large `a` the uniform distribution. `a` and the rarest probability are those by which the numbers of keys
    that came once, twice, up to `MOST_SEEN` times are most likely. Only these count: frequent keys may have any law.

    Source: Good and Toulmin, "The number of new species, and the increase in population coverage, when a sample is
    increased" (1956), with a parametric prior.

    Args:
        counts: how often each key came in the sample, at least 1.
        times: how many times the keys of the sample there are to be, at least 1.
    """
    counts = np.asarray(counts)
    seen = float(len(counts))
    spectrum = np.bincount(counts[counts <= MOST_SEEN], minlength=MOST_SEEN + 1)[1:].astype(float)
    if not spectrum.sum() or times <= 1:
        return Estimate(seen, seen, seen)
    # Whether there are rarer keys than the sample or the job can show makes no difference to either.
    least, most = np.log(1e-3 / times), np.log(MOST_SEEN)
    rates = np.exp(np.linspace(least, most + np.log(4), 600))
    orders = np.arange(1, MOST_SEEN + 1)
    factorials = np.cumsum(np.log(orders))
    chances = np.exp(np.outer(np.log(rates), orders) - rates[:, None] - factorials)  # of a rate to come so often
    fresh = np.exp(-rates) * -np.expm1(-(times - 1) * rates)  # not in the sample, but among those that follow
    bounds = np.array([[0.02, least], [12.0, most]])
    low, high = bounds
    best, kept = -np.inf, []
    for _ in range(ZOOMS):
        a, b = np.linspace(np.maximum(low, bounds[0]), np.minimum(high, bounds[1]), STEPS).T
        grid = np.stack([each.ravel() for each in np.meshgrid(a, b, indexing="ij")], 1)
        weights = _weights(rates, grid)
        came, new = weights @ chances, weights @ fresh
        total = came.sum(1)
        likely = (spectrum * np.log(np.maximum(came / total[:, None], 1e-300))).sum(1)
        kept.append((likely, spectrum.sum() * new / total))
        best = max(best, float(likely.max()))
        near = grid[likely >= likely.max() - 4 * LIKELY]
        wide = 4 * np.array([a[1] - a[0], b[1] - b[0]])
        low, high = near.min(0) - wide, near.max(0) + wide
    likely, found = (np.concatenate(each) for each in zip(*kept, strict=True))
    inside = found[likely >= best - LIKELY]
    return Estimate(seen + found[np.argmax(likely)], seen + inside.min(), seen + inside.max())


def _weights(rates: Floats, grid: Floats) -> Floats:
    """Returns the density of keys over log rates, for each pair of an exponent and the log of the rarest rate."""
    logs = np.log(rates)
    step = logs[1] - logs[0]
    above = np.clip((logs - grid[:, 1:]) / step + 0.5, 0, 1)  # a part of the cell in which the rarest one lies
    found: Floats = above * np.exp(-grid[:, :1] * (logs - grid[:, 1:]))
    return found


def distinct_in(counts: Sequence[int] | Any, part: float) -> float:
    """Returns how many different keys a part of the examples of a sample has on average.

    Args:
        counts: how often each key came in the sample.
        part: the part, from 0 to 1.
    """
    return float((1 - (1 - min(part, 1.0)) ** np.asarray(counts, float)).sum())
