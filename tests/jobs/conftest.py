"""The examples as scripts that start quickly, for all jobs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from pstesting import forks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples() -> Iterator[Path]:
    """The folder of the examples, whose processes have scikit-learn: to import it takes each of them two seconds."""
    if find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed; it comes with paramserver[examples]")
    with forks.having("sklearn.datasets", "sklearn.metrics"):
        yield EXAMPLES
