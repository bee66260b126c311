"""What jobs share: the examples as scripts that start quickly."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

DATASETS = """
import numpy as np

def load_digits(return_X_y):
    return np.load({file!r})["pixels"], np.load({file!r})["labels"]
"""

METRICS = """
import numpy as np

def roc_auc_score(right, scores):
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]
    good = np.sum(right)
    return (np.sum(ranks[right]) - good * (good + 1) / 2) / (good * (len(right) - good))
"""


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, for which scikit-learn is its digits and one function of its metrics.

    To import all of it takes each process of a cluster three seconds.
    """
    folder = tmp_path_factory.mktemp("examples")
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, folder)
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        pytest.skip("scikit-learn is not installed; it comes with paramserver[examples]")
    rows = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    np.savez(folder / "digits.npz", pixels=rows[:, :-1], labels=rows[:, -1].astype(int))
    (folder / "sklearn").mkdir()
    (folder / "sklearn" / "__init__.py").touch()
    (folder / "sklearn" / "datasets.py").write_text(DATASETS.format(file=str(folder / "digits.npz")))
    (folder / "sklearn" / "metrics.py").write_text(METRICS)
    return folder
