"""How often something took how long, for the metrics of both sides."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds for what takes from half a millisecond to a minute."""


class Histogram:
    """Counts values by size. Whoever observes from several threads has a lock around it.

    Args:
        bounds: upper bounds of the buckets, each included, in increasing order; beyond the last is one more bucket.

    Attributes:
        total: the sum of all values.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.total = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """For each upper bound, the last of which is "+Inf", how many values are not above it."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))
