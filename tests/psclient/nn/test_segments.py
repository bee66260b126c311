"""Sums of rows by group: of any sizes, also of groups that have nearly every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psclient.nn.segments import sum_segments
from pswire.model.rows import group


@given(lengths=st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 1025, 1100]), max_size=6), seed=st.integers(0, 9))
def test_each_group_has_the_sum_of_its_rows(lengths, seed):
    """Zeros where it has none; in any order of the rows."""
    of_each = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(lengths)), lengths))
    rows = np.random.default_rng(seed + 1).integers(-9, 9, (len(of_each), 2))
    expected = np.zeros((len(lengths), 2), int)
    np.add.at(expected, of_each, rows)
    starts = np.append(0, np.cumsum(lengths)).astype(int)
    found = sum_segments(rows, np.argsort(of_each, kind="stable"), starts)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("repeats", [1, 1000, 40_000])
def test_a_group_may_have_every_row(repeats):
    """Sums in single precision stay near, as they are of pieces."""
    rows = np.full((repeats, 1), 0.1, "float32")
    (total,) = sum_segments(rows, *group(np.zeros(repeats, np.int64)))
    assert total == pytest.approx(repeats * 0.1, rel=1e-6)
