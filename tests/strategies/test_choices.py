"""Which rows of a product the tests of this folder take."""

from __future__ import annotations

import itertools
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.cases import pairs_of


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_any_two_values_meet(sizes):
    """In a row of a pairwise choice; no row stands twice, and the choice is the same each time."""
    rows = pairs_of(sizes)
    assert len({*rows}) == len(rows) <= prod(sizes)
    assert rows == pairs_of(sizes)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == {*itertools.product(range(sizes[one]), range(sizes[other]))}
