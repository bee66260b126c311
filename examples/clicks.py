"""Clicks for the examples of recommenders: made data in the shape of Criteo's, whose best guess is known.

Needs NumPy alone: benchmarks/recommenders.py trains other systems with it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

CRITEO: tuple[int, ...] = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Numbers of different ids of the 26 features in Criteo's Kaggle data."""

NUMBERS = 13
"""Features of Criteo's data that are numbers."""

MIX = 2654435761
"""A prime: ids times this, modulo their number, are a permutation, so that frequent ids have no small numbers."""


class Clicks(NamedTuple):
    """Ids, (N, features), numbers, (N, features), who clicked, (N,), and the logit of the chance of that, (N,)."""

    ids: Any
    numbers: Any
    clicked: Any
    best: Any


def criteo_sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of ids of Criteo's features, none above `most`."""
    return tuple(min(size, most) for size in CRITEO)


def make_clicks(count: int, sizes: Sequence[int], numbers: int, exponent: float = 1.05, seed: int = 0) -> Clicks:
    """Makes clicks, of which about a third is 1.

    The chance of a click depends on each id, on products of what belongs to the ids of two features that stand beside
    each other, and on the numbers.

    Args:
        count: how many examples.
        sizes: for each feature its number of ids.
        numbers: how many features are numbers.
        exponent: of the frequency of ids by Zipf's law, other than 1.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    ids = np.empty((count, len(sizes)), np.int64)
    logits = np.full(count, -1, np.float32)
    before = np.zeros(count, np.float32)
    for feature, size in enumerate(sizes):
        own, factor = rng.normal(size=(2, size)).astype("float32")
        last = (size + 1) ** (1 - exponent)
        ranks = (1 + rng.random(count) * (last - 1)) ** (1 / (1 - exponent))  # Zipf's law, as a continuous density
        drawn = ids[:, feature] = np.minimum(ranks.astype(np.int64) - 1, size - 1) * MIX % size
        logits += (own[drawn] + before * factor[drawn]) / len(sizes) ** 0.5
        before = factor[drawn]
    given = rng.normal(size=(count, numbers)).astype("float32")
    logits += given @ rng.normal(0, max(numbers, 1) ** -0.5, numbers).astype("float32")
    clicked = (rng.random(count) < 1 / (1 + np.exp(-logits))).astype("float32")
    return Clicks(ids, given, clicked, logits)


def auc(guesses: Any, clicked: Any) -> float:
    """Returns how often a click has a higher guess than what was not clicked."""
    ranks = np.empty(len(guesses))
    ranks[np.argsort(guesses)] = np.arange(1, len(guesses) + 1)
    clicks = int(clicked.sum())
    return float((ranks[clicked > 0].mean() - (clicks + 1) / 2) / (len(guesses) - clicks))
