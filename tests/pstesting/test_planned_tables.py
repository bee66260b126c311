"""Tables that psctl plan suggests from a sample of ids: how many rows they will have, of which kind, and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pstesting.planner.commands import plan
from pstesting.planner.distinct import Estimate, distinct_at, distinct_in
from pstesting.planner.tables import INDEX_BYTES, SHARD_BYTES, PlannedTable, Sample, collections_of, plan_tables
from tests.kit.internals import ConfigError
from tests.kit.simulated import FREE


def zipf(size: int, exponent: float) -> Any:
    frequencies = np.arange(1, size + 1) ** -exponent
    return frequencies / frequencies.sum()


def draw(count: int, frequencies: Any, seed: int = 1) -> Any:
    """How often each id came that came at all."""
    counts = np.random.default_rng(seed).multinomial(count, frequencies)
    return counts[counts > 0]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.05, 1.5])
def test_distinct_ids_of_a_known_zipf_law(exponent: float) -> None:
    """Of 20 times as many ids as in a sample the distinct ones are within 10 % and within the interval."""
    frequencies, count, times = zipf(100_000, exponent), 20_000, 20
    true = -np.expm1(times * count * np.log1p(-frequencies)).sum()
    seen = draw(count, frequencies)
    found = distinct_at(seen, times)
    assert true > 3 * len(seen)
    assert found.low < true < found.high
    assert found.value == pytest.approx(true, rel=0.1)


def test_frequent_ids_do_not_matter_for_what_is_to_come() -> None:
    """Half of all ids are one id, as where values are missing; and where all ids came often, no more are expected."""
    frequencies = np.append(0.5, zipf(100_000, 1.05) / 2)
    true = -np.expm1(20 * 40_000 * np.log1p(-frequencies)).sum()
    assert distinct_at(draw(40_000, frequencies), 20).value == pytest.approx(true, rel=0.1)
    assert distinct_at([100, 200, 300], 1000) == Estimate(3, 3, 3)
    assert distinct_at([1, 1, 1], 1) == Estimate(3, 3, 3)


def test_distinct_ids_of_a_batch() -> None:
    """The average of what parts of the sample have."""
    ids = np.random.default_rng(2).integers(0, 300, 2000)
    counts = np.unique(ids, return_counts=True)[1]
    parts = np.random.default_rng(3).permuted(np.tile(ids, (50, 1)), axis=1)[:, :200]
    average = np.mean([len(np.unique(part)) for part in parts])
    assert distinct_in(counts, 0.1) == pytest.approx(average, rel=0.02)
    assert distinct_in(counts, 3.0) == len(counts)


IDS = {"user": np.array([[5, 6], [5, 7], [8, 5]]), "item": np.array([[1], [2], [1]])}


def test_files(tmp_path: Path) -> None:
    """All formats have the same ids; a cell of a CSV file may have several, or none."""
    np.savez(tmp_path / "sample.npz", **IDS)
    np.save(tmp_path / "sample.npy", np.hstack(list(IDS.values())))
    (tmp_path / "sample.csv").write_text("user,item\n5 6,1\n5 7,2\n8 5,1\n")
    (tmp_path / "bags.csv").write_text('user\n5\n""\n6 7\n')
    for name in ("sample.npz", "sample.csv"):
        found = Sample.read(tmp_path / name)
        assert found.examples == 3
        assert {name: ids.tolist() for name, ids in found.ids.items()} == {
            k: v.ravel().tolist() for k, v in IDS.items()
        }
    assert {k: v.tolist() for k, v in Sample.read(tmp_path / "sample.npy").ids.items()} == {
        "0": [5, 5, 8],
        "1": [6, 7, 5],
        "2": [1, 2, 1],
    }
    bags = Sample.read(tmp_path / "bags.csv")
    assert (bags.examples, bags.ids["user"].tolist()) == (3, [5, 6, 7])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ids.txt", "", "unknown format; use .npz, .npy, .csv"),
        ("none.csv", None, "cannot be read"),
        ("empty.csv", "", "cannot be read"),
        ("words.csv", "user\nfive\n", "cannot be read: invalid literal"),
        ("no.csv", 'user\n""\n', "'user' has no ids"),
        ("short.csv", "user,item\n5\n", "cannot be read"),
        ("broken.npz", "x", "cannot be read"),
        ("floats.npz", {"user": np.zeros(3)}, "ids of 'user' are float64, not integers"),
        ("number.npz", {"user": np.array(3)}, "an array without dimensions"),
        ("uneven.npz", {"user": np.array([3]), "item": np.array([3, 4])}, "tables have 1, 2 examples"),
        ("row.npy", np.arange(3), "an array of shape (3,), not (examples, tables)"),
    ],
)
def test_files_without_ids(tmp_path: Path, name: str, text: Any, said: str) -> None:
    path = tmp_path / name
    if isinstance(text, dict):
        np.savez(path, **text)
    elif isinstance(text, np.ndarray):
        np.save(path, text)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Sample.read(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def sample() -> dict[str, Any]:
    """Ids of 20,000 examples: of days and shops, hashed users, and words with keys of 64 bits."""
    rng = np.random.default_rng(4)
    users = rng.choice(100_000, 20_000, p=zipf(100_000, 1.05))
    return {
        "day": rng.integers(0, 7, 20_000),
        "user": users * 2654435761 % 2**40,
        "shop": rng.integers(0, 500, 20_000),
        "word": users * 2**33,
        "page": users * 48271 % 2**40,
    }


def test_kinds_and_collections() -> None:
    """Few ids from 0 on are rows of a static table; keys of 48 bits go into one group, others into a table alone."""
    found = {each.name: each for each in plan_tables(Sample(20_000, sample()), 200_000, 1000, 128)}
    assert {name: each.kind for name, each in found.items()} == {
        **dict.fromkeys(("day", "shop"), "static"),
        **dict.fromkeys(("user", "word", "page"), "dynamic"),
    }
    assert (found["day"].rows, found["shop"].rows) == (7, 500)
    assert (found["day"].batch, found["shop"].held_bytes) == (pytest.approx(7), 500 * 128)
    user = found["user"]
    assert user.expected.low < user.rows < user.expected.high
    assert user.held_bytes == user.rows * (128 + INDEX_BYTES)
    assert abs(user.checked) < 0.1
    collections = collections_of(list(found.values()), 4)
    assert [each.tables for each in collections] == [("day", "shop"), ("user", "page"), ("word",)]
    assert [each.shards for each in collections] == [1, 4, 4]
    assert collections[1].rows == user.rows + found["page"].rows


def test_static_tables_are_cut_into_worthwhile_shards() -> None:
    table = PlannedTable("shop", 1, 1, Estimate(1, 1, 1), 0.0, "static", 1.0, 2.5 * SHARD_BYTES, 0)
    assert [collections_of([table], servers)[0].shards for servers in (1, 2, 8)] == [1, 2, 2]


def ask(*words: object) -> str:
    return CliRunner().invoke(plan, list(map(str, words)), standalone_mode=False, catch_exceptions=False).output


def test_the_plan_of_a_sample(tmp_path: Path) -> None:
    """Rows and ids of the sample are those of the job; servers have the memory for them."""
    np.savez(tmp_path / "sample.npz", **sample())
    FREE.write(tmp_path / "costs.json")
    asked = ["--workers", 2, "--costs", tmp_path / "costs.json", "--network", "10Gbit", "--step", "100ms"]
    asked += ["--tables", tmp_path / "sample.npz", "--examples", "200K", "--dim", 16, "--slots", 1, "--memory", "10MB"]
    said = json.loads(ask(*asked, "--json"))
    rows = sum(table["rows"] for table in said["tables"])
    assert said["servers"] == -(-rows * (128 + INDEX_BYTES) // 10**7)
    assert said["held_bytes"] == rows * (128 + INDEX_BYTES) / said["servers"]
    assert said["ids"] == pytest.approx(sum(table["batch"] for table in said["tables"]), abs=1)
    assert [each["shards"] for each in said["collections"]] == [1, said["servers"], said["servers"]]
    shown = ask(*asked)
    assert f"{said['tables'][1]['rows']:,}" in shown
    assert "collection 1: 2 dynamic tables, " in shown
    with pytest.raises(ConfigError, match="leave out --rows and --ids"):
        ask(*asked, "--rows", "1M:16")
    with pytest.raises(ConfigError, match="--examples 'many' is not a number"):
        ask(*asked[:-8], "--examples", "many")
