"""Ratings for the examples of recommenders: MovieLens's from files, or made ones, of which the best guess is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

LIKED = 4.0
"""A rating from which on somebody likes something: what the AUC is about."""


class Ratings(NamedTuple):
    """Ratings, (N,), at times from -1 to 1; where they are made, the best guess of each, and the best without times."""

    users: Any
    items: Any
    times: Any
    ratings: Any
    best: Any = None
    timeless: Any = None


def make_ratings(users: int, items: int, count: int, seed: int = 0) -> Ratings:
    """Ratings from 0.5 to 5 in halves: tastes of four dimensions that drift, and noise; items are popular as Zipf says.

    In all the time a user's taste turns by one radian towards another one, and an item becomes better or worse. Nobody
    can guess better than by the mean of what may be rated, given user, item and time: noise, rounding and limits count.
    """
    rng = np.random.default_rng(seed)
    (taste, other), traits = rng.normal(0, 0.5, (2, users, 4)), rng.normal(0, 0.8, (items, 4))
    kind, good, ages = rng.normal(0, 0.3, users), rng.normal(0, 0.4, items), rng.normal(0, 0.4, items)
    popular = np.arange(1, items + 1) ** -0.8
    who, what = rng.integers(0, users, count), rng.choice(items, count, p=popular / popular.sum())
    times, noise = rng.uniform(-1, 1, count), 0.33

    def liking(when: Any) -> Any:
        tastes = np.cos(when / 2)[:, None] * taste[who] + np.sin(when / 2)[:, None] * other[who]
        return 3.3 + kind[who] + good[what] + ages[what] * when + np.sum(tastes * traits[what], axis=1)

    def expected(mean: Any) -> Any:  # half a star for each border between two ratings, as likely as it is passed
        return 0.5 + sum(0.5 / (1 + np.exp((border - mean) / noise)) for border in np.arange(0.75, 5, 0.5))

    mean = liking(times)
    rated = np.clip(np.round(2 * (mean + rng.logistic(0, noise, count))) / 2, 0.5, 5)
    timeless = np.mean([expected(liking(np.full(count, when))) for when in np.linspace(-0.9, 0.9, 10)], axis=0)
    return Ratings(who, what, times.astype("float32"), rated.astype("float32"), expected(mean), timeless)


def read_ratings(path: Path) -> Ratings:
    """MovieLens's files: `u.data` (tabs), `ratings.dat` (::) or `ratings.csv` (commas, and a line with names)."""
    if not path.is_file():
        raise SystemExit(
            f"there is no file {path}; MovieLens's ratings are at https://grouplens.org/datasets/movielens"
        )
    lines = [line.replace("::", "\t").replace(",", "\t").split("\t") for line in path.read_text().splitlines()]
    rows = [line[:4] for line in lines if line[0].isdigit()]
    if not rows or any(len(row) < 4 for row in rows):
        raise SystemExit(f"{path} has no lines with a user, an item, a rating and a time; give u.data or ratings.csv")
    table = np.array(rows, dtype="float64")
    who, what = (np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1))
    first, last = table[:, 3].min(), table[:, 3].max()
    times = 2 * (table[:, 3] - first) / max(last - first, 1) - 1
    return Ratings(who, what, times.astype("float32"), table[:, 2].astype("float32"))


def split(ratings: Ratings, seed: int) -> tuple[Ratings, Ratings]:
    """Nine tenths to train on, and one to test."""
    order = np.random.default_rng(seed).permutation(len(ratings.users))
    cut = len(order) // 10
    parts = [[None if one is None else one[part] for one in ratings] for part in (order[cut:], order[:cut])]
    return Ratings(*parts[0]), Ratings(*parts[1])


def scores(guesses: Any, test: Ratings) -> str:
    """RMSE, and the AUC of who likes what."""
    rmse = np.sqrt(np.mean((np.clip(guesses, 0.5, 5) - test.ratings) ** 2))
    return f"RMSE {rmse:.3f}  AUC {roc_auc_score(test.ratings >= LIKED, guesses):.3f}"
